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
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class Machine:
    """Where contenders are taken: with the prices of `tuner`, which tunes its rules.

    arena: where controllers learn these prices; None: nowhere. jobs: their trainings.
    """

    tuner: Tuner
    arena: terms.Arena | None = None
    jobs: tuple[terms.Job, ...] = ()

    @classmethod
    def prepare(
        cls, tuner: Tuner, seeds: Sequence[int], effort=0.0, pair=None, scale="laptop"
    ) -> Machine:
        """effort: length of trainings as a part of each system's own; 0: none."""
        if not effort:
            return cls(tuner)
        trace = tuner.arena.trace
        costs = tuner.arena.costs
        equal = dataclasses.replace(tuner.arena.terms, effort=effort)
        place = terms.opened("trained_controllers", trace, costs, equal, scale)
        arena = terms.Arena(trace, costs, place.directory, equal, pair=pair)
        return cls(tuner, arena, tuple(arena.jobs(seeds, [terms.EQUAL])))

    @property
    def costs(self):
        return self.tuner.arena.costs

    def made_here(self, minutes: float = 0.0) -> dict[Method, list[Policy]]:
        """Rules tuned and systems trained at these prices. minutes: as in `terms.train_all`, for
        rules and systems each.
        """
        contenders, _ = self.tuner.all(minutes)
        if self.arena is not None:
            contenders |= terms.train_all(self.arena, self.jobs, minutes)[0]
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
    machine: Machine, contenders: dict, charged: dict[str, float], minutes=0.0, **choose
) -> pd.DataFrame:
    """Everybody at the prices of `machine`, beside the static trees tuned for it: rows of
    `compare.over_seeds`.

    contenders: of another machine. charged: milliseconds of an answer by the method there; without
    one it is timed. choose: of `Baselines.choose`.
    """
    trace = machine.tuner.arena.trace
    costs = machine.costs
    pair = machine.arena.pair if machine.arena else None
    with warnings.catch_warnings(action="ignore"):
        # the warnings are of every controller that is carried: it learned other costs
        there = machine.made_here(minutes)
        there |= carried(contenders, trace.select(part="tune"), costs, pair)
        policy_ms = {}
        for method in there:
            before = method.but(adapted="")
            if before in charged:
                policy_ms[method] = charged[before]
        baselines = compare.Baselines.choose(trace, costs, **choose)
        options = dict(policy_ms=policy_ms, baselines=baselines, random_seeds=())
        return compare.over_seeds(compare.compare_replay(trace, costs, there, **options))
