"""What a single choice is worth: a system trained again with one field of its config changed, all
else as in `OURS`.

    effect of a choice = speed of changed(OURS, {field: value}) / speed of OURS

Papers and their codes disagree in many small things; notebooks 40 to 42 list those that can be
changed alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specdec.core.policy import Chain, Policy
from specdec.evaluation import stats
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed
from specdec.replays.replay import answer_ms, replay
from specdec.training.controllers import train_ltd, train_resps
from specdec.training.radar import train_radar

PRESETS = ("paper", "official", "ours")
# what the column "choice" says where nothing was changed
OURS = "ours"
CONFIGS = {"resps": resps.CONFIGS, "ltd": ltd.CONFIGS, "radar": radar.CONFIGS}


@dataclasses.dataclass
class Choice:
    """Fields of a config to change: the first is what the choice is about.

    The others have to change with it. decoding: only as the trained policy decodes, so that nothing
    is learnt again.
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
        name = f"{self.field}={in_words(self.value)}"
        return f"{name}, decoding" if self.decoding else name


def in_words(value) -> str:
    """A setting as it is printed."""
    if isinstance(value, tuple) and len(value) > 6:
        return f"{len(value)} values, {value[0]} to {value[-1]}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def stated(system: str, choices: Sequence[Choice]) -> pd.DataFrame:
    """What is varied: choice, field, what paper, official and ours say of it, and changed_to."""
    rows = []
    for choice in choices:
        row = {"choice": choice.name, "field": choice.field}
        for preset in PRESETS:
            row[preset] = in_words(attrgetter(choice.field)(CONFIGS[system][preset]))
        rows.append(row | {"changed_to": in_words(choice.value)})
    return pd.DataFrame(rows)


def ablate(
    system: str,
    trace,
    costs,
    out_dir: Path,
    choices: Sequence[Choice],
    *,
    base,
    seeds=(0, 1),
    progress=True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train and replay `base` and every choice of a system. Returns two tables, (effects, turns).

    system: "resps", "ltd" or "radar". turns: one row per test turn, choice ("ours" for none) and
    seed. For the other see `effects`. base: a config made from the system's OURS with `changed`.
    Every training is a run of its own below out_dir; what is finished is not trained again. All pay
    the same for an answer: what one of `base` costs on this machine.
    """
    test = trace.select(part="test")
    trained: dict[int, Policy] = {}
    policy_ms = None
    rows = []
    jobs = [(choice, seed) for choice in (None, *choices) for seed in seeds]
    for choice, seed in tqdm(jobs, desc=f"choices of {system}", disable=not progress):
        # 1. the policy: trained with the change, or decoding with it
        name = choice.name if choice else OURS
        if choice and choice.decoding:
            policy = redecoded(trained[seed], choice.changes)
        else:
            folder = "".join(letter if letter.isalnum() else "-" for letter in name)
            options = dict(seed=seed, out_dir=Path(out_dir) / f"{folder}-{seed}")
            config = changed(base, choice.changes if choice else {})
            policy = _train(system, trace, costs, config, options, progress)
        if choice is None:
            trained[seed] = policy
        # 2. its turns
        if policy_ms is None:
            policy_ms = answer_ms(test, copy.deepcopy(policy), costs)
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
    """The trained policy with other settings; of LTD's two, the one of "depth." or "size."."""
    if not isinstance(policy, Chain):
        return policy.with_settings(**changes)
    parts = dict(zip(("depth", "size"), policy.policies, strict=True))
    for name, value in changes.items():
        part, _, setting = name.partition(".")
        parts[part] = parts[part].with_settings(**{setting: value})
    return ltd.combine(*parts.values())


def effects(system: str, turns: pd.DataFrame, choices: Sequence[Choice]) -> pd.DataFrame:
    """The table of `stated` with seeds, over_ours, low and high.

    over_ours: speed over that of `ours`, mean over seeds; below 1 the change is slower. low, high:
    its paired interval over prompts.
    """

    def mean_gain(means: np.ndarray) -> np.ndarray:
        ours, changed_ms = np.split(means, 2, axis=-1)
        return (ours / changed_ms).mean(axis=-1)

    keys = ["suite", "prompt", "choice", "seed"]
    times = turns.groupby(keys)["time_ms"].sum().unstack(["choice", "seed"])
    rows = []
    for choice in choices:
        both = np.concatenate((times[OURS], times[choice.name]), axis=1)
        gain = stats.interval(both, mean_gain)
        row = {"seeds": both.shape[1] // 2, "over_ours": gain.value}
        rows.append(row | {"low": gain.low, "high": gain.high})
    return stated(system, choices).join(pd.DataFrame(rows))
