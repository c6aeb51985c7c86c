"""Controllers under another machine's cost model: trained for it, re-priced, or carried there.

The text stays that of the recording, and an answer costs what it took on this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pandas as pd

from specdec.core.policy import Policy
from specdec.core.tree_config import TreeConfig
from specdec.evaluation import compare
from specdec.identity import CARRIED, REPRICED, Method
from specdec.policies.value import ValuePolicy
from specdec.training.value import reprice

from workbook import terms
from workbook.rules import ENGINES, PAPERS, Tuner

# rules without a network
QUICK = {*ENGINES, *(name for name, rule in PAPERS.items() if not rule.fitted)}


def made_there(
    tuner: Tuner, seeds: Sequence[int], effort: float, pair, scale: str, minutes: float
) -> dict[Method, list[Policy]]:
    """Rules tuned at the prices of `tuner` and, with an effort, systems trained at them."""
    # 1. the rules
    contenders, _ = tuner.all(minutes)
    # 2. the systems, in the folder that notebook 31 trains in
    if effort:
        trace = tuner.arena.trace
        costs = tuner.arena.costs
        equal = dataclasses.replace(tuner.arena.terms, effort=effort)
        place = terms.opened("trained_controllers", trace, costs, equal, scale)
        arena = terms.Arena(trace, costs, place.directory, equal, pair=pair)
        jobs = arena.jobs(seeds, [terms.EQUAL])
        contenders |= terms.train_all(arena, jobs, minutes)[0]
    return contenders


def carried(
    contenders: dict[Method, list[Policy]], tune, costs, pair=None
) -> dict[Method, list[Policy]]:
    """Contenders of another machine: as they are and, where they hold prices, with `costs`.

    Rules that need no training are left out. tune: the part "tune" of a recording.
    """
    moved = {}
    for method, seeds in contenders.items():
        method = Method.of(method)
        # tuned anew everywhere, which takes seconds
        if method.system in QUICK:
            continue
        moved[method.but(adapted=CARRIED)] = seeds
        if isinstance(seeds[0], ValuePolicy):
            repriced = [reprice(policy, tune, costs, pair) for policy in seeds]
            moved[method.but(adapted=REPRICED)] = repriced
    return moved


def judge(
    arena: terms.Arena, contenders: dict, charged: dict[str, float], defaults: Sequence[TreeConfig]
) -> pd.DataFrame:
    """Everybody at the prices of `arena`, beside trees tuned for them: `compare.over_seeds`.

    charged: milliseconds of an answer by the method's name at home; without one it is timed.
    """
    # an answer takes as long as at home: its network is the same
    policy_ms = {}
    for method in contenders:
        at_home = method.but(adapted="")
        if at_home in charged:
            policy_ms[method] = charged[at_home]
    baselines = compare.Baselines.choose(arena.trace, arena.costs, defaults=defaults)
    options = dict(policy_ms=policy_ms, baselines=baselines, random_seeds=())
    compared = compare.compare_replay(arena.trace, arena.costs, contenders, **options)
    return compare.over_seeds(compared)
