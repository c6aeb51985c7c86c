"""What a single choice is worth: a system trained again with one field of its config changed, all
else as in `OURS`.

    effect of a choice = speed of changed(OURS, {field: value}) / speed of OURS

Papers and their codes disagree in many small things. `CHOICES` names those that can be changed
alone.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specdec.core.policy import Chain, Policy
from specdec.errors import nearest_name_error
from specdec.evaluation import stats
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed
from specdec.replays.replay import answer_ms, replay
from specdec.training.controllers import train_ltd, train_resps
from specdec.training.radar import train_radar

PRESETS = ("paper", "official", "ours")
OURS = "ours"  # what the column "choice" says where nothing was changed


@dataclass
class Choice:
    """Fields of a config to change: the first is what the choice is about, the others have to
    change with it.

    decoding: only as the trained policy decodes, so that nothing is learnt again.
    """

    changes: dict
    decoding: bool = False

    def __post_init__(self):
        self.field, self.value = next(iter(self.changes.items()))
        self.name = f"{self.field}={_shown(self.value)}" + (", decoding" if self.decoding else "")


def _shown(value) -> str:
    if isinstance(value, tuple) and len(value) > 6:
        return f"{len(value)} values, {value[0]} to {value[-1]}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


_PAPER_PPO = {
    "ppo.batch_size": 32,
    "ppo.n_epochs": 4,
    "ppo.linear_decay": False,
    "ppo.ent_coef": 0.1,
}
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
    return {preset: attrgetter(choice.field)(CONFIGS[system][preset]) for preset in PRESETS}


def ablate(
    system: str,
    trace,
    costs,
    out_dir: Path,
    *,
    base=None,
    seeds=(0, 1),
    choices=None,
    progress=True,
):
    """Train and replay `base` and every choice of a system. Returns two tables, (effects, turns).

    turns: one row per test turn, choice ("ours" for none) and seed. For the other see `effects`.
    base: the system's OURS, or a config made from it with `changed`. choices: those of CHOICES
    unless given. Every training is a run of its own below out_dir; what is finished is not trained
    again.
    All pay the same for an answer: what one of `base` costs on this machine.
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
            folder = "".join(letter if letter.isalnum() else "-" for letter in name)
            options = dict(seed=seed, out_dir=Path(out_dir) / f"{folder}-{seed}")
            policy = _train(
                system,
                trace,
                costs,
                changed(base, choice.changes if choice else {}),
                options,
                progress,
            )
        if choice is None:
            trained[seed] = policy
        policy_ms = (
            answer_ms(test, copy.deepcopy(policy), costs) if policy_ms is None else policy_ms
        )
        replayed = replay(test, copy.deepcopy(policy), costs, policy_ms=policy_ms)
        rows.append(replayed.table.assign(choice=name, seed=seed))
    turns = pd.concat(rows, ignore_index=True)
    return effects(system, turns, choices), turns


def _train(system: str, trace, costs, config, options: dict, progress: bool) -> Policy:
    if system == "radar":
        return train_radar(trace, costs, config, **options).policy
    if system == "ltd":
        return train_ltd(trace, costs, config, progress=progress, **options).policy
    return train_resps(trace, costs, config, progress=progress, **options)


def redecoded(policy: Policy, changes: dict) -> Policy:
    """The trained policy with other settings; of LTD's two, the one that "depth." or "size."
    names.
    """
    if not isinstance(policy, Chain):
        return policy.with_settings(**changes)
    parts = dict(zip(("depth", "size"), policy.policies, strict=True))
    for name, value in changes.items():
        part, _, setting = name.partition(".")
        parts[part] = parts[part].with_settings(**{setting: value})
    return ltd.combine(*parts.values())


def effects(system: str, turns: pd.DataFrame, choices: tuple[Choice, ...]) -> pd.DataFrame:
    """One row per choice: what paper, official and ours say, changed_to, seeds, over_ours, low and
    high.

    over_ours: speed over that of `ours`, mean over seeds; below 1 the change is slower.
    low, high: its paired interval over prompts.
    """

    def mean_gain(means: np.ndarray) -> np.ndarray:
        ours, others = np.split(means, 2, axis=-1)
        return (ours / others).mean(axis=-1)

    times = (
        turns.groupby(["suite", "prompt", "choice", "seed"])["time_ms"]
        .sum()
        .unstack(["choice", "seed"])
    )
    rows = []
    for choice in choices:
        own = times[choice.name].to_numpy()
        spread = stats.interval(np.concatenate((times[OURS].to_numpy(), own), axis=1), mean_gain)
        row = {"choice": choice.name, "field": choice.field}
        row |= {preset: _shown(value) for preset, value in stated(system, choice).items()}
        row |= {"changed_to": _shown(choice.value), "seeds": own.shape[1]}
        rows.append(row | {"over_ours": spread.value, "low": spread.low, "high": spread.high})
    return pd.DataFrame(rows)
