"""Intervals and tests for paired measurements: the same prompts decoded by several methods.

The prompt is the unit: repeats of one prompt share its text, so they are summed before anything else. Every figure is a positive
function of means over prompts, mostly a ratio of sums. Its logarithm gets a standard error from the jackknife (Efron and
Tibshirani 1993, chapter 11) and Student's t with one degree of freedom less than there are prompts.

With few prompts this is what holds its level: of 95 % intervals over 6 prompts of skewed lengths and gains, 91 to 94 % held the
truth; of percentile and BCa bootstraps 80 to 85 %; a bootstrap-t covered as well and was half as wide again (the tests repeat it).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec.errors import SpecdecError, nearest_name_error

LEVEL = 0.95
# Columns of prompts.parquet: counted tokens, their time, cycles, and the tokens that tau counts (before truncation).
TOKENS, TIME, CYCLES, CYCLE_TOKENS = "new_tok", "total_ms", "cycles", "cycle_tok"


@dataclass(frozen=True)
class Interval:
    """A figure of the whole sample, its interval, and the two-sided p-value of "it is 1": below 1 - level, 1 lies outside."""

    value: float
    low: float
    high: float
    level: float = LEVEL
    prompts: int = 0
    p_value: float = np.nan


def interval(columns, statistic: Callable, *, level: float = LEVEL) -> Interval:
    """Student's t-interval of log(statistic), with the jackknife's standard error.

    columns: float array [P, C], one row per prompt, one column per measured quantity.
    statistic: function of column *means* [..., C] that returns [...], positive; ratios of means are ratios of sums.
    A single prompt has no interval and no p-value (NaN).
    """
    from scipy.stats import t

    columns = np.asarray(columns, dtype=float)
    assert len(columns) and np.isfinite(columns).all(), "an interval needs at least one prompt, and no NaN or infinity"
    assert 0 < level < 1, f"a level lies between 0 and 1, got {level}"
    prompts, value = len(columns), float(statistic(columns.mean(axis=0)))
    if prompts == 1:
        return Interval(value, np.nan, np.nan, level, 1)
    without_one = np.log(statistic((columns.sum(axis=0) - columns) / (prompts - 1)))  # [P]
    error = np.sqrt((prompts - 1) * np.var(without_one))
    reach = float(np.exp(t.ppf((1 + level) / 2, prompts - 1) * error))
    distance = abs(np.log(value))
    p_value = float(2 * t.sf(distance / error, prompts - 1)) if error else float(distance == 0)
    return Interval(value, value / reach, value * reach, level, prompts, p_value)


def ratio_of_sums(numerator, denominator, **options) -> Interval:
    """Sum over prompts of `numerator` [P] over the sum of `denominator` [P]: tau, tokens per second."""
    return interval(_paired(numerator, denominator), lambda means: means[..., 0] / means[..., 1], **options)


def speedup(tokens, seconds, base_tokens, base_seconds, **options) -> Interval:
    """Ratio of throughputs, each a ratio of sums: what a user who runs the whole suite would see."""
    columns = _paired(tokens, seconds, base_tokens, base_seconds)
    return interval(columns, lambda means: means[..., 0] / means[..., 1] * means[..., 3] / means[..., 2], **options)


def mean_speedup(tokens, seconds, base_tokens, base_seconds, **options) -> Interval:
    """Mean of per-prompt ratios of throughputs: every prompt counts alike, however long."""
    columns = _paired(tokens, seconds, base_tokens, base_seconds)
    ratios = columns[:, 0] / columns[:, 1] * columns[:, 3] / columns[:, 2]
    return interval(ratios[:, None], lambda means: means[..., 0], **options)


def holm(p_values) -> np.ndarray:
    """p-values adjusted for testing them together (Holm 1979): the i-th smallest of m, times m - i + 1, monotone."""
    p_values = np.asarray(p_values, dtype=float)
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * (len(p_values) - np.arange(len(p_values)))
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def per_prompt(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of prompts.parquet summed over repeats: index (suite, prompt), columns (quantity, method)."""
    counts = rows.groupby(["suite", "prompt", "method"]).size().unstack("method")
    uneven = counts.ne(counts.iloc[:, 0], axis=0).any(axis=1).sum()
    if uneven:
        raise SpecdecError(f"{uneven} prompts were not measured equally often by every method; finish the run first.")
    quantities = [name for name in (TOKENS, TIME, CYCLES, CYCLE_TOKENS) if name in rows]
    return rows.groupby(["suite", "prompt", "method"])[quantities].sum().unstack("method")


def compare(rows: pd.DataFrame, baseline: str, *, family: Collection[str] | None = None, **options) -> pd.DataFrame:
    """One row per (suite, method) against `baseline`: speed-ups with intervals, tau both ways, p-values after Holm.

    rows: prompts.parquet. A suite called 'all' pools them, and is the primary comparison.
    family: the methods under test; without it all but the baseline. options: those of `interval`.
    Returns columns suite, method, prompts, speedup(_low, _high), mean_speedup(_low, _high), tok_per_s, p_value (of speedup),
    p_holm (`holm_by_suite`), and tau(_low, _high), tau_macro where cycles were counted.
    """
    summed = per_prompt(rows)
    methods = list(summed[TOKENS].columns)
    if baseline not in methods:
        raise nearest_name_error("baseline", baseline, methods)
    suites, table = list(summed.index.unique("suite")), []
    for suite in suites + (["all"] if len(suites) > 1 else []):
        part = summed if suite == "all" else summed.loc[[suite]]
        table += [{"suite": suite, **_compare_one(part, method, baseline, options)} for method in methods]
    table = pd.DataFrame(table)
    tested = set(methods if family is None else family) - {baseline}
    return table.assign(p_holm=holm_by_suite(table, "p_value", table["method"].isin(tested)))


def holm_by_suite(table: pd.DataFrame, column: str, tested: pd.Series) -> pd.Series:
    """p-values of the tested rows, adjusted within each suite ("all" is one, and the primary one); NaN elsewhere.

    A family of its own for each: with few prompts no row of a family over all suites could ever be found.
    """
    adjusted = pd.Series(np.nan, index=table.index)
    for _, rows in table[tested & table[column].notna()].groupby("suite"):
        adjusted[rows.index] = holm(rows[column])
    return adjusted


def _compare_one(part: pd.DataFrame, method: str, baseline: str, options: dict) -> dict:
    tokens, time_ms, *_ = columns = _two(part, method, baseline)
    row, faster = {"method": method, "prompts": len(part)}, speedup(*columns, **options)
    row |= _spread("speedup", faster)
    row |= _spread("mean_speedup", mean_speedup(*columns, **options))
    row["tok_per_s"] = 1e3 * tokens.sum() / time_ms.sum()
    row["p_value"] = np.nan if method == baseline else faster.p_value
    if CYCLES in part and part[CYCLES][method].gt(0).all():  # plain decoding has no cycles
        cycles, cycle_tokens = (part[name][method].to_numpy(float) for name in (CYCLES, CYCLE_TOKENS))
        row |= _spread("tau", ratio_of_sums(cycle_tokens, cycles, **options))
        row["tau_macro"] = float((cycle_tokens / cycles).mean())
    return row


def noise_check(rows: pd.DataFrame, first: str, second: str, **options) -> dict:
    """Compare two methods that are the same in truth: their speed-up, its interval, the p-value, and the verdict.

    `quiet`: the interval holds 1. Then a difference as large as the interval's width is what this machine can tell apart.
    """
    ratio = speedup(*_two(per_prompt(rows), first, second), **options)
    quiet = bool(ratio.low <= 1 <= ratio.high)
    facts = {"width": ratio.high - ratio.low, "prompts": ratio.prompts, "p_value": ratio.p_value, "quiet": quiet}
    return {**_spread("speedup", ratio), **facts}


def with_all(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, and all of them again as suite "all" where there are several suites."""
    return pd.concat([rows, rows.assign(suite="all")]) if rows["suite"].nunique() > 1 else rows


def in_order(table: pd.DataFrame, methods: list[str]) -> pd.DataFrame:
    """The rows of a table suite by suite, in each the methods (and their seeds) in the order given."""
    places = pd.DataFrame({"suite": pd.factorize(table["suite"])[0], "method": table["method"].map(methods.index)})
    places["seed"] = table["seed"] if "seed" in table else 0
    return table.loc[places.sort_values([*places]).index].reset_index(drop=True)


def _two(part: pd.DataFrame, method: str, baseline: str) -> list[np.ndarray]:
    """Tokens and times [P] of the method, then of the baseline."""
    return [part[name][which].to_numpy(float) for which in (method, baseline) for name in (TOKENS, TIME)]


def _spread(name: str, found: Interval) -> dict:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _paired(*columns) -> np.ndarray:
    """Columns [P] side by side as [P, C]."""
    arrays = [np.asarray(column, dtype=float).reshape(-1) for column in columns]
    assert len({len(array) for array in arrays}) == 1, "paired samples have equal lengths"
    return np.stack(arrays, axis=1)
