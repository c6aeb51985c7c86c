"""What a single choice is worth: a system trained again with one field of its config changed.

effect of a choice = speed of changed(OURS, {field: value}) / speed of OURS
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specdec.core.policy import Chain, Policy
from specdec.core.tree_config import PAPER_TREES
from specdec.evaluation import metrics, stats
from specdec.evaluation.compare import Baselines, compare_replay
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed
from specdec.replays.replay import answer_ms, replay
from specdec.training.controllers import train_ltd, train_resps
from specdec.training.radar import train_radar

PRESETS = ("paper", "official", "ours")
# what the column "choice" says where nothing was changed
OURS = "ours"
CONFIGS = {"resps": resps.CONFIGS, "ltd": ltd.CONFIGS, "radar": radar.CONFIGS}


@dataclass
class Choice:
    """Fields of a config to change, the first in question. decoding: nothing is learnt."""

    changes: dict
    decoding: bool = False

    @property
    def field(self) -> str:
        return next(iter(self.changes))

    @property
    def name(self) -> str:
        name = f"{self.field}={in_words(self.changes[self.field])}"
        if self.decoding:
            name += ", decoding"
        return name


def in_words(value) -> str:
    """A setting as it is printed."""
    if not isinstance(value, tuple):
        return str(value)
    if len(value) > 6:
        return f"{len(value)} values, {value[0]} to {value[-1]}"
    return ", ".join(map(str, value))


def stated(system: str, choices: Sequence[Choice]) -> pd.DataFrame:
    """What is varied: choice, field, what paper, official and ours say of it, and changed_to."""
    rows = []
    for choice in choices:
        row = {"choice": choice.name, "field": choice.field}
        for preset in PRESETS:
            row[preset] = in_words(attrgetter(choice.field)(CONFIGS[system][preset]))
        rows.append(row | {"changed_to": in_words(choice.changes[choice.field])})
    return pd.DataFrame(rows)


def trained(trace, costs, config, folder: Path, seeds: Sequence[int]) -> list[Policy]:
    """A policy per seed, each in a folder of its own; a finished training is not repeated.

    config: of Re-SpS, LTD or RADAR.
    """
    policies = []
    for seed in seeds:
        options = dict(seed=seed, out_dir=folder.with_name(f"{folder.name}-{seed}"))
        if isinstance(config, radar.RadarConfig):
            policies.append(train_radar(trace, costs, config, **options).policy)
        elif isinstance(config, ltd.LtdConfig):
            policies.append(train_ltd(trace, costs, config, **options).policy)
        else:
            policies.append(train_resps(trace, costs, config, **options))
    return policies


def folder_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def ablate(
    system: str, trace, costs, out_dir: Path, choices: Sequence[Choice], base, seeds: Sequence[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train and replay `base` and every choice of a system: `effects` and turns.

    turns: one row per test turn, choice ("ours" for none) and seed.
    """
    # what an answer costs is measured once, so that no change gains by chance
    test = trace.select(part="test")
    ours = trained(trace, costs, base, out_dir / OURS, seeds)
    policy_ms = answer_ms(test, copy.deepcopy(ours[0]), costs)
    policies = {OURS: ours}
    for choice in tqdm(choices, desc=f"choices of {system}"):
        if choice.decoding:
            policies[choice.name] = [redecoded(policy, choice.changes) for policy in ours]
        else:
            folder = out_dir / folder_name(choice.name)
            config = changed(base, choice.changes)
            policies[choice.name] = trained(trace, costs, config, folder, seeds)
    # the turns of each, on the test prompts
    rows = []
    for name, of_seeds in policies.items():
        for seed, policy in zip(seeds, of_seeds, strict=True):
            # a copy, since ours decodes more than once
            replayed = replay(test, copy.deepcopy(policy), costs, policy_ms=policy_ms)
            rows.append(replayed.table.assign(choice=name, seed=seed))
    turns = pd.concat(rows, ignore_index=True)
    return effects(system, turns, choices), turns


def redecoded(policy: Policy, changes: dict) -> Policy:
    """The trained policy with other settings; of LTD's two, the one of "depth." or "size."."""
    if not isinstance(policy, Chain):
        return policy.with_settings(**changes)
    # "depth.stride" is a setting of the depth policy
    parts = dict(zip(("depth", "size"), policy.policies, strict=True))
    for name, value in changes.items():
        part, _, setting = name.partition(".")
        parts[part] = parts[part].with_settings(**{setting: value})
    return ltd.combine(*parts.values())


def effects(system: str, turns: pd.DataFrame, choices: Sequence[Choice]) -> pd.DataFrame:
    """The table of `stated` with seeds, over_ours (speed, mean over seeds), low, high."""

    def mean_gain(means: np.ndarray) -> np.ndarray:
        ours, changed_ms = np.split(means, 2, axis=-1)
        return (ours / changed_ms).mean(axis=-1)

    keys = ["suite", "prompt", "choice", "seed"]
    times = turns.groupby(keys)["time_ms"].sum().unstack(["choice", "seed"])
    rows = []
    for choice in choices:
        # ours in the first half of the columns
        columns = np.concatenate((times[OURS], times[choice.name]), axis=1)
        gain = stats.interval(columns, mean_gain)
        row = {"seeds": len(times[OURS].columns), "over_ours": gain.value}
        rows.append(row | {"low": gain.low, "high": gain.high})
    return stated(system, choices).join(pd.DataFrame(rows))


def beside_paper_tree(
    trace, costs, policies: dict[str, list], encoder=None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Variants of Re-SpS replayed beside its paper's default tree: (table, turns).

    policies: name -> one per seed. table: over_eagle3 (plain mean over suites) and unique_actions,
    means over seeds. turns: one row per test turn, method and seed.
    """
    test = trace.select(part="test")
    charged = {}
    for name, (policy, *_) in policies.items():
        if policy.state == "text":
            timed = copy.deepcopy(policy)
            timed.attach(lambda asked: encoder("word " * asked.context_tok))
            charged[name] = answer_ms(test, timed, costs)
    # the paper's EAGLE-3, in place of the usual default
    baselines = Baselines.choose(trace, costs, defaults=(PAPER_TREES["resps"],))
    options = dict(baselines=baselines, policy_ms=charged, random_seeds=())
    compared = compare_replay(trace, costs, policies, **options)
    by_suite = compared.table[compared.table["suite"] != "all"]
    actions = metrics.actions(compared.cycles, ["method", "seed"])["unique_actions"]
    table = pd.DataFrame(index=pd.Index(policies, name="method"))
    table["over_eagle3"] = by_suite.groupby("method")["over_default"].mean()
    table["unique_actions"] = actions.groupby(level="method").mean()
    turns = compared.turns
    return table, turns[turns["method"].isin(list(policies))]
