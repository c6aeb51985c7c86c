"""The one rule by which measured numbers become a verdict.

A claim compares numbers with a limit. Each number comes with its 95 % interval over prompts or
seeds, and its one-sided p-values follow from that interval (Student's t). A claim *holds* where
every number of every run and table lies on the right side, and *does not hold* where, in at least
one run, every table that measured it (live and replay) has a number on the wrong side, after
Bonferroni. Then the claims of one paper are one family, adjusted after Holm. So a verdict needs at
least LEAST_PROMPTS prompts, live and replay that agree, all seeds and all pairs. Numbers without a
spread (counts, what papers print) are compared without an interval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import groupby

import numpy as np

from specdec.evaluation import stats
from specdec.evaluation.stats import LEAST_PROMPTS

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
VACUOUS = "holds without learning"  # a method that learned nothing meets it as well
UNMEASURED, UNLEARNED, SHORT = "not measured", "not learned", "not trained long enough"
UNTESTABLE = "not testable at this scale"
VERDICTS = (HOLDS, FAILS, VACUOUS, UNDECIDED, UNLEARNED, SHORT, UNMEASURED, UNTESTABLE)


@dataclasses.dataclass(frozen=True)
class Part:
    """One number that a test compares, and its interval: NaN ends where there is none, equal ends
    where it has no spread.

    prompts: how many it rests on, 0 where unknown. source: run and table that it comes from.
    still: it equals what it is compared with in every prompt, so that it has no interval.
    """

    name: str
    value: float
    low: float = np.nan
    high: float = np.nan
    prompts: int = 0
    source: tuple[str, str] = ("", "")
    still: bool = False

    @property
    def exact(self) -> bool:
        return self.low == self.high

    @property
    def told(self) -> bool:
        """Whether there is an interval, or no spread."""
        return not (np.isnan(self.low) or np.isnan(self.high))


def one_sided(part: Part, limit: float) -> tuple[float, float]:
    """p-values of "the number is at most `limit`" and of "it is at least `limit`"; 1 and 1 without
    an interval.

    The test is made on logarithms where number and limit are positive, as the intervals of ratios
    are.

    >>> [round(p, 3) for p in one_sided(Part("ours", 1.10, 1.0, 1.21, prompts=12), 1.0)]
    [0.025, 0.975]
    >>> one_sided(Part("differing", 0.0, 0.0, 0.0), 0.5)
    (1.0, 0.0)
    """
    from scipy.stats import t

    if not part.told:
        return 1.0, 1.0
    end = part.low if part.value > limit else part.high
    if part.exact or end == part.value:
        return (0.0, 1.0) if part.value > limit else (1.0, 0.0)
    freedom = max(part.prompts, LEAST_PROMPTS) - 1
    value, end, limit = (
        np.log([part.value, end, limit]) if min(part.low, limit) > 0 else (part.value, end, limit)
    )
    distance = (value - limit) / (abs(value - end) / t.ppf((1 + stats.LEVEL) / 2, freedom))
    return float(t.sf(distance, freedom)), float(t.cdf(distance, freedom))


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the parts of one claim say: the two-sided p-value of the side that they lean to, and
    which side that is.
    """

    p_value: float = 1.0
    right: bool = False
    tested: bool = False  # by intervals, so that it counts in the family

    def verdict(self, p_value: float) -> str:
        """The verdict at a p-value, adjusted or not."""
        return UNDECIDED if p_value > 1 - stats.LEVEL + 1e-9 else HOLDS if self.right else FAILS


def weigh(parts: Iterable[Part], limit: float, below: bool = False) -> Finding:
    """All parts of a claim together. A run none of whose parts has an interval is left out where
    another run's have one.
    """
    by_run = {
        name: list(found)
        for name, found in groupby(sorted(parts, key=_source), lambda part: part.source[0])
    }
    telling = {
        name: found for name, found in by_run.items() if any(part.told for part in found)
    } or by_run
    if not telling:
        return Finding()
    sides = [_sides_of_run(found, limit, below) for found in telling.values()]
    holds = max(right for right, _ in sides)
    fails = min(1.0, len(sides) * min(wrong for _, wrong in sides))
    tested = any(part.told and not part.exact for found in telling.values() for part in found)
    return Finding(min(1.0, 2 * min(holds, fails)), holds < fails, tested)


def _source(part: Part) -> tuple[str, str]:
    return part.source


def _sides_of_run(parts: list[Part], limit: float, below: bool) -> tuple[float, float]:
    """p-values of holding and of failing in one run: its tables must agree."""
    sides = []
    for _, found in groupby(parts, lambda part: part.source[1]):
        pairs = [one_sided(part, limit)[:: -1 if below else 1] for part in found]
        sides.append(
            (
                max(right for right, _ in pairs),
                min(1.0, len(pairs) * min(wrong for _, wrong in pairs)),
            )
        )
    return max(right for right, _ in sides), max(wrong for _, wrong in sides)


def adjusted(findings: list[Finding]) -> list[float]:
    """The p-values of a family after Holm; those that no interval decides stay as they are and do
    not count.
    """
    p_values = np.array([found.p_value for found in findings])
    tested = np.array([found.tested for found in findings], dtype=bool)
    if tested.any():
        p_values[tested] = stats.holm(p_values[tested])
    return p_values.tolist()
