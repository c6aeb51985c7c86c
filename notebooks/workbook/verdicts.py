"""The one rule by which measured numbers become a verdict.

Each number has its 95 % interval, and one-sided p-values follow from it (Student's t). A claim
*holds* where every number of every run lies on the right side. It *does not hold* where in at
least one run every table has a number on the wrong side, after Bonferroni. The claims of one paper
are one family, after Holm. Numbers without a spread are compared without an interval.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from scipy.stats import t

from specdec.evaluation import stats
from specdec.evaluation.stats import LEAST_PROMPTS

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
VACUOUS = "holds without learning"  # a method that learned nothing meets it as well
UNMEASURED, UNLEARNED, SHORT = "not measured", "not learned", "not trained long enough"
UNTESTABLE = "not testable at this scale"
VERDICTS = (HOLDS, FAILS, VACUOUS, UNDECIDED, UNLEARNED, SHORT, UNMEASURED, UNTESTABLE)


def bounded(parts: pd.DataFrame) -> pd.Series:
    """Whether each number has an interval, or no spread."""
    return parts["low"].notna() & parts["high"].notna()


def one_sided(value: float, low: float, high: float, prompts: int, limit: float) -> tuple:
    """p-values of "the number is at most `limit`" and of "it is at least `limit`".

    Both are 1 without an interval. The test is made on logarithms where number and limit are
    positive, as the intervals of ratios are.

    >>> [round(p, 3) for p in one_sided(1.10, 1.0, 1.21, 12, 1.0)]
    [0.025, 0.975]
    >>> one_sided(0.0, 0.0, 0.0, 0, 0.5)
    (1.0, 0.0)
    """
    if np.isnan(low) or np.isnan(high):
        return 1.0, 1.0
    end = low if value > limit else high
    if low == high or end == value:
        return (0.0, 1.0) if value > limit else (1.0, 0.0)
    if min(low, limit) > 0:
        value, end, limit = np.log([value, end, limit])
    freedom = max(prompts, LEAST_PROMPTS) - 1
    error = abs(value - end) / t.ppf((1 + stats.LEVEL) / 2, freedom)
    distance = (value - limit) / error
    return float(t.sf(distance, freedom)), float(t.cdf(distance, freedom))


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the parts of one claim say.

    p_value: two-sided, of the side that they lean to, which `right` names. tested: by intervals.
    """

    p_value: float = 1.0
    right: bool = False
    tested: bool = False

    def verdict(self, p_value: float) -> str:
        """The verdict at a p-value, adjusted or not."""
        if p_value > 1 - stats.LEVEL + 1e-9:
            return UNDECIDED
        return HOLDS if self.right else FAILS


def weigh(parts: pd.DataFrame, limit: float, below: bool = False) -> Finding:
    """All parts of a claim together: columns value, low, high, prompts, run_key, run_table.

    A run none of whose parts has an interval is left out where another run's have one.
    """
    if parts.empty:
        return Finding()
    telling = bounded(parts).groupby(parts["run_key"]).transform("any")
    if telling.any():
        parts = parts[telling]
    # 1. each number on both sides of the limit
    columns = parts[["value", "low", "high", "prompts"]].itertuples(index=False)
    sides = np.array([one_sided(*part, limit) for part in columns])
    right, wrong = sides.T
    if below:
        right, wrong = wrong, right
    sides = parts[["run_key", "run_table"]].assign(right=right, wrong=wrong)
    # 2. a table holds with all of its numbers, and fails with one of them, after Bonferroni
    tables = sides.groupby(["run_key", "run_table"]).agg(
        holds=("right", "max"), fails=("wrong", "min"), count=("wrong", "size")
    )
    tables["fails"] = (tables["fails"] * tables["count"]).clip(upper=1.0)
    # 3. tables of a run must agree; one run may refute
    of_runs = tables.groupby("run_key")[["holds", "fails"]].max()
    holds = float(of_runs["holds"].max())
    fails = min(1.0, len(of_runs) * float(of_runs["fails"].min()))
    tested = bool((bounded(parts) & (parts["low"] != parts["high"])).any())
    return Finding(min(1.0, 2 * min(holds, fails)), holds < fails, tested)


def adjusted(findings: list[Finding]) -> list[float]:
    """The p-values of a family after Holm; those that no interval decides do not count."""
    p_values = np.array([finding.p_value for finding in findings])
    tested = np.array([finding.tested for finding in findings], dtype=bool)
    if tested.any():
        p_values[tested] = stats.holm(p_values[tested])
    return p_values.tolist()
