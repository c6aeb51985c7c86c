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

import numpy as np
from scipy.stats import t

from specdec.evaluation import stats
from specdec.evaluation.stats import LEAST_PROMPTS

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
VACUOUS = "holds without learning"  # a method that learned nothing meets it as well
UNMEASURED, UNLEARNED, SHORT = "not measured", "not learned", "not trained long enough"
UNTESTABLE = "not testable at this scale"
VERDICTS = (HOLDS, FAILS, VACUOUS, UNDECIDED, UNLEARNED, SHORT, UNMEASURED, UNTESTABLE)


@dataclasses.dataclass(frozen=True)
class Part:
    """One number that a test compares, and its interval.

    low, high: NaN where there is no interval, equal where it has no spread. prompts: how many it
    rests on, 0 where unknown. source: run and table that it comes from. still: it equals what it
    is compared with in every prompt.
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
    def bounded(self) -> bool:
        """Whether there is an interval, or no spread."""
        return not (np.isnan(self.low) or np.isnan(self.high))


def one_sided(part: Part, limit: float) -> tuple[float, float]:
    """p-values of "the number is at most `limit`" and of "it is at least `limit`".

    Both are 1 without an interval. The test is made on logarithms where number and limit are
    positive, as the intervals of ratios are.

    >>> [round(p, 3) for p in one_sided(Part("ours", 1.10, 1.0, 1.21, prompts=12), 1.0)]
    [0.025, 0.975]
    >>> one_sided(Part("differing", 0.0, 0.0, 0.0), 0.5)
    (1.0, 0.0)
    """
    if not part.bounded:
        return 1.0, 1.0
    value = part.value
    end = part.low if value > limit else part.high
    if part.exact or end == value:
        return (0.0, 1.0) if value > limit else (1.0, 0.0)
    if min(part.low, limit) > 0:
        value, end, limit = np.log([value, end, limit])
    freedom = max(part.prompts, LEAST_PROMPTS) - 1
    error = abs(value - end) / t.ppf((1 + stats.LEVEL) / 2, freedom)
    distance = (value - limit) / error
    return float(t.sf(distance, freedom)), float(t.cdf(distance, freedom))


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the parts of one claim say.

    p_value: two-sided, of the side that they lean to. right: whether that is the claim's side.
    tested: by intervals, so that it counts in the family.
    """

    p_value: float = 1.0
    right: bool = False
    tested: bool = False

    def verdict(self, p_value: float) -> str:
        """The verdict at a p-value, adjusted or not."""
        if p_value > 1 - stats.LEVEL + 1e-9:
            return UNDECIDED
        return HOLDS if self.right else FAILS


def weigh(parts: Iterable[Part], limit: float, below: bool = False) -> Finding:
    """All parts of a claim together.

    A run none of whose parts has an interval is left out where another run's have one.
    """
    by_run: dict[str, list[Part]] = {}
    for part in parts:
        by_run.setdefault(part.source[0], []).append(part)
    measured = list(by_run.values())
    telling = [run for run in measured if any(part.bounded for part in run)]
    measured = telling or measured
    if not measured:
        return Finding()
    sides = [_sides_of_run(run, limit, below) for run in measured]
    holds = max(right for right, _ in sides)
    fails = min(1.0, len(sides) * min(wrong for _, wrong in sides))
    tested = any(part.bounded and not part.exact for run in measured for part in run)
    return Finding(min(1.0, 2 * min(holds, fails)), holds < fails, tested)


def _sides_of_run(parts: list[Part], limit: float, below: bool) -> tuple[float, float]:
    """p-values of holding and of failing in one run: its tables must agree."""
    by_table: dict[str, list[tuple[float, float]]] = {}
    for part in parts:
        right, wrong = one_sided(part, limit)
        if below:
            right, wrong = wrong, right
        by_table.setdefault(part.source[1], []).append((right, wrong))
    holds, fails = [], []
    for pairs in by_table.values():
        holds.append(max(right for right, _ in pairs))
        fails.append(min(1.0, len(pairs) * min(wrong for _, wrong in pairs)))
    return max(holds), max(fails)


def adjusted(findings: list[Finding]) -> list[float]:
    """The p-values of a family after Holm; those that no interval decides do not count."""
    p_values = np.array([finding.p_value for finding in findings])
    tested = np.array([finding.tested for finding in findings], dtype=bool)
    if tested.any():
        p_values[tested] = stats.holm(p_values[tested])
    return p_values.tolist()
