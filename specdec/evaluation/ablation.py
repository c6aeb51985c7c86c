"""What a single choice is worth: a system trained again with one field of its config changed, all else as in `OURS`.

    effect of a choice = speed of changed(OURS, {field: value}) / speed of OURS

Papers and their codes disagree in many small things (the fact sheets list them). `CHOICES` names those that can be changed
alone. What paper, code and ours say is read from the configs. How the systems learn stands in `training`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specdec.core.policy import Policy
from specdec.errors import nearest_name_error
from specdec.evaluation import stats
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed, field_of
from specdec.replays.replay import answer_ms, replay
from specdec.training.controllers import train_ltd, train_resps
from specdec.training.radar import train_radar

PRESETS = ("paper", "official", "ours")
OURS = "ours"  # what the column "choice" says where nothing was changed


@dataclass(frozen=True)
class Choice:
    """Fields of a config to change: the first is what the choice is about, the others have to change with it.

    decoding: only as the trained policy decodes, so that nothing is learnt again.
    """

    changes: dict
    decoding: bool = False

    @property
    def field(self) -> str:
        return next(iter(self.changes))

    @property
    def value(self):
        return self.changes[self.field]

    @property
    def name(self) -> str:
        return f"{self.field}={_shown(self.value)}" + (", decoding" if self.decoding else "")


_PAPER_PPO = {"ppo.batch_size": 32, "ppo.n_epochs": 4, "ppo.linear_decay": False, "ppo.ent_coef": 0.1}
CHOICES: dict[str, tuple[Choice, ...]] = {
    "resps": (
        Choice({"reward": "mean_of_ratios"}),
        Choice({"reward": "ratio_of_sums"}),
        Choice({"timed": ("policy", "verify")}),
        Choice({"terminal": True}),
        Choice({"start_in_reward": True}),
        Choice({"junk_zero": True}),
        Choice({"push_partial": False}),
        Choice({"reseed_each_turn": True}),
        Choice({"ppo.normalise_reward": False}),
        Choice({"state": "concat"}),
        Choice({"ppo.n_steps": 64, **_PAPER_PPO}),
        Choice({"interval": 30}, decoding=True),
        Choice({"temperature": 1.5}, decoding=True),
        Choice({"action_lag": True}, decoding=True),
    ),
    "ltd": (
        Choice({"reward": "throughput"}),
        Choice({"reward": "accepted"}),  # Table 2
        Choice({"reward": "time_cost"}),  # Table 2
        Choice({"timed": ltd.PAPER.timed}),
        Choice({"random_depth": False}),
        Choice({"depth.stride": 3}),
        Choice({"depth.stride": 3}, decoding=True),
        Choice({"depth.constant_length": True}),
        Choice({"size.sizes": ltd.PAPER_SIZES}),
        Choice({"size.exponentiated": False, "size.best": 0}),
        Choice({"depth.ppo.gamma": 0.999}),
    ),
    "radar": (
        Choice({"objective": "ratio", "alpha": 0.02, "gamma": 0.99}),
        Choice({"gradient": "sampled"}),
        Choice({"gradient": "exact"}),
        Choice({"count_bonus": False}),
        Choice({"select_by": "surrogate"}),
        Choice({"split_by": "cycle"}),
        Choice({"gamma": 0.99}),
        Choice({"continue_bias": 0.0}),
        Choice({"temperature": 1.0}, decoding=True),
        Choice({"half_inputs": True}, decoding=True),
    ),
}
CONFIGS = {"resps": resps.CONFIGS, "ltd": ltd.CONFIGS, "radar": radar.CONFIGS}


def stated(system: str, choice: Choice) -> dict[str, object]:
    """What each of PRESETS says about the choice's field."""
    return {preset: field_of(CONFIGS[system][preset], choice.field) for preset in PRESETS}


def ablate(
    system: str,
    trace,
    costs,
    out_dir: Path,
    *,
    base=None,
    seeds=(0, 1),
    choices: tuple[Choice, ...] | None = None,
    progress: bool = True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train and replay `base` and every choice of a system. Returns (effects, turns): see `effects`; turns holds one row
    per test turn, choice ("ours" for none) and seed.

    base: the system's OURS, or a config made from it with `changed` (a smaller budget, other trees). Every training is a
    run of its own below out_dir; what is finished is not trained again. All pay the same for an answer, what one of
    `base` costs on this machine. SpecdecError for an unknown system.
    """
    if system not in CHOICES:
        raise nearest_name_error("system", system, CHOICES)
    base, choices = base or CONFIGS[system][OURS], CHOICES[system] if choices is None else choices
    test, rows, trained, policy_ms = trace.select(part="test"), [], {}, None
    jobs = [(choice, seed) for choice in (None, *choices) for seed in seeds]
    for choice, seed in tqdm(jobs, desc=f"choices of {system}", disable=not progress):
        name = choice.name if choice else OURS
        if choice and choice.decoding:
            policy = redecoded(trained[seed], choice.changes)
        else:
            folder = Path(out_dir) / f"{_folder_name(name)}-{seed}"
            config = changed(base, choice.changes) if choice else base
            policy = _TRAIN[system](trace, costs, config, seed, folder, progress)
        if choice is None:
            trained[seed] = policy
        policy_ms = answer_ms(test, copy.deepcopy(policy), costs) if policy_ms is None else policy_ms
        replayed = replay(test, copy.deepcopy(policy), costs, policy_ms=policy_ms)
        rows.append(replayed.table.assign(choice=name, seed=seed))
    turns = pd.concat(rows, ignore_index=True)
    return effects(system, turns, choices), turns


def effects(system: str, turns: pd.DataFrame, choices: tuple[Choice, ...]) -> pd.DataFrame:
    """One row per choice: what paper, official and ours say, changed_to, seeds, and over_ours: speed over that of `ours`,
    mean over seeds, with its paired bootstrap over prompts (low, high). Below 1 the change is slower."""
    times = turns.groupby(["suite", "prompt", "choice", "seed"])["time_ms"].sum().unstack(["choice", "seed"])
    base, rows = times[OURS].to_numpy(), []
    for choice in choices:
        own = times[choice.name].to_numpy()
        spread = stats.bootstrap(np.concatenate((base, own), axis=1), _mean_gain)
        row = {"choice": choice.name, "field": choice.field}
        row |= {preset: _shown(value) for preset, value in stated(system, choice).items()}
        row |= {"changed_to": _shown(choice.value), "seeds": own.shape[1]}
        rows.append(row | {"over_ours": spread.value, "low": spread.low, "high": spread.high})
    return pd.DataFrame(rows)


def redecoded(policy: Policy, changes: dict) -> Policy:
    """The trained policy with other settings; of LTD's two, the one that "depth." or "size." names."""
    parts = getattr(policy, "policies", None)
    if parts is None:
        return policy.with_settings(**changes)
    kinds = {"depth": ltd.DepthPolicy, "size": ltd.SizePolicy}
    named = [(*name.split(".", 1), value) for name, value in changes.items()]
    return ltd.combine(
        *(part.with_settings(**{n: v for kind, n, v in named if isinstance(part, kinds[kind])}) for part in parts)
    )


def _mean_gain(means: np.ndarray) -> np.ndarray:
    half = means.shape[-1] // 2
    return (means[..., :half] / means[..., half:]).mean(axis=-1)


def _shown(value) -> str:
    if isinstance(value, tuple) and len(value) > 6:
        return f"{len(value)} values, {value[0]} to {value[-1]}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _folder_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


# ---- the systems -----------------------------------------------------------------------------------------------------
_TRAIN = {
    "resps": lambda *run: train_resps(*run[:3], seed=run[3], out_dir=run[4], progress=run[5]),
    "ltd": lambda *run: train_ltd(*run[:3], seed=run[3], out_dir=run[4], progress=run[5]).policy,
    "radar": lambda *run: train_radar(*run[:3], seed=run[3], out_dir=run[4]).policy,
}
