"""Compares controllers under another machine's cost model: trained for it, re-priced, or carried
there unchanged.

Trees and rules are tuned for the machine and, where an effort is given, the four systems trained
for it on equal terms; the text stays that of the recording. An answer costs what it took on this
machine.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import pandas as pd

from specdec.core.policy import Policy
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
    contenders, _ = tuner.all(minutes)
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
    """Contenders of another machine as methods of their own: as they are and, where they hold
    prices, with those of `costs`.

    Rules that need no training are left out: those are tuned anew everywhere. tune: the part "tune"
    of a recording.
    """
    moved = {}
    for method, seeds in contenders.items():
        method = Method.of(method)
        if method.system in QUICK:
            continue
        moved[method.but(adapted=CARRIED)] = seeds
        if isinstance(seeds[0], ValuePolicy):
            repriced = [reprice(policy, tune, costs, pair) for policy in seeds]
            moved[method.but(adapted=REPRICED)] = repriced
    return moved


def judge(
    tuner: Tuner,
    contenders: dict,
    charged: dict[str, float],
    *,
    seeds: Sequence[int],
    effort=0.0,
    pair=None,
    scale="laptop",
    minutes=0.0,
    **choose,
) -> pd.DataFrame:
    """Everybody at the prices of `tuner`, beside the static trees tuned for them: rows of
    `compare.over_seeds`.

    contenders: of another machine. charged: milliseconds of an answer by the method there; without
    one it is timed. effort: length of trainings as a part of each system's own; 0: none. minutes:
    as in `terms.train_all`, for rules and systems each. choose: of `Baselines.choose`.
    """
    trace = tuner.arena.trace
    costs = tuner.arena.costs
    tune = trace.select(part="tune")
    # every controller that is carried would warn that it learned other costs
    with warnings.catch_warnings(action="ignore"):
        there = made_there(tuner, seeds, effort, pair, scale, minutes)
        there |= carried(contenders, tune, costs, pair if effort else None)
        policy_ms = {}
        for method in there:
            before = method.but(adapted="")
            if before in charged:
                policy_ms[method] = charged[before]
        baselines = compare.Baselines.choose(trace, costs, **choose)
        options = dict(policy_ms=policy_ms, baselines=baselines, random_seeds=())
        return compare.over_seeds(compare.compare_replay(trace, costs, there, **options))
