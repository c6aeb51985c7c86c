"""Intervals and tests for paired measurements: the same prompts decoded by several methods.

The prompt is the unit of resampling: repeats of one prompt share its text, so they are summed before anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec.errors import SpecdecError, nearest_name_error

RESAMPLES = 10_000
LEVEL = 0.95
# Columns of prompts.parquet: counted tokens, their time, cycles, and the tokens that tau counts (before truncation).
TOKENS, TIME, CYCLES, CYCLE_TOKENS = "new_tok", "total_ms", "cycles", "cycle_tok"


@dataclass(frozen=True)
class Interval:
    """A statistic of the whole sample and its percentile bootstrap interval."""

    value: float
    low: float
    high: float
    level: float = LEVEL
    prompts: int = 0


def bootstrap(columns, statistic, *, resamples=RESAMPLES, level=LEVEL, seed=0) -> Interval:
    """Paired percentile bootstrap over prompts (Efron and Tibshirani 1993, chapter 13).

    columns: float array [P, C], one row per prompt, one column per measured quantity.
    statistic: function of column *means* [..., C] that returns [...]; ratios of means are ratios of sums.
    A resample draws P prompts with replacement, all columns together. The interval of one prompt is NaN.
    """
    columns = np.asarray(columns, dtype=float)
    assert len(columns) and np.isfinite(columns).all(), "a bootstrap needs at least one prompt, and no NaN or infinity"
    assert 0 < level < 1, f"a level lies between 0 and 1, got {level}"
    prompts = len(columns)
    weights = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)  # [R, P]
    spread = statistic(weights @ columns / prompts)  # [R]
    low, high = np.quantile(spread, [(1 - level) / 2, (1 + level) / 2])
    if prompts == 1:
        low = high = np.nan
    return Interval(float(statistic(columns.mean(axis=0))), float(low), float(high), level, prompts)


def ratio_of_sums(numerator, denominator, **options) -> Interval:
    """Sum over prompts of `numerator` [P] over the sum of `denominator` [P]: tau, tokens per second."""
    return bootstrap(_paired(numerator, denominator), lambda means: means[..., 0] / means[..., 1], **options)


def speedup(tokens, seconds, base_tokens, base_seconds, **options) -> Interval:
    """Ratio of throughputs, each a ratio of sums: what a user who runs the whole suite would see."""
    columns = _paired(tokens, seconds, base_tokens, base_seconds)
    return bootstrap(columns, lambda means: means[..., 0] / means[..., 1] * means[..., 3] / means[..., 2], **options)


def mean_speedup(tokens, seconds, base_tokens, base_seconds, **options) -> Interval:
    """Mean of per-prompt ratios of throughputs: every prompt counts alike, however long."""
    columns = _paired(tokens, seconds, base_tokens, base_seconds)
    ratios = columns[:, 0] / columns[:, 1] * columns[:, 3] / columns[:, 2]
    return bootstrap(ratios[:, None], lambda means: means[..., 0], **options)


def wilcoxon(first, second) -> float:
    """Two-sided p-value of the Wilcoxon signed-rank test on log(first / second), [P] each, all positive."""
    from scipy.stats import wilcoxon as signed_rank

    columns = _paired(first, second)
    assert (columns > 0).all(), "ratios are compared, so every measurement must be positive"
    differences = np.log(columns[:, 0] / columns[:, 1])
    return float(signed_rank(differences).pvalue) if differences.any() else 1.0


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


def compare(rows: pd.DataFrame, baseline: str, **options) -> pd.DataFrame:
    """One row per (suite, method) against `baseline`: speed-ups with intervals, tau both ways, p-values after Holm.

    rows: prompts.parquet. A suite called 'all' pools them. options: those of `bootstrap`.
    Returns columns suite, method, prompts, speedup(_low, _high), mean_speedup(_low, _high), tok_per_s, p_value,
    p_holm (Holm over all rows but the baseline's), and tau(_low, _high), tau_macro where cycles were counted.
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
    tested = table["method"] != baseline
    table.loc[tested, "p_holm"] = holm(table.loc[tested, "p_value"])
    return table


def _compare_one(part: pd.DataFrame, method: str, baseline: str, options: dict) -> dict:
    tokens, time_ms, base_tokens, base_time_ms = columns = _two(part, method, baseline)
    row = {"method": method, "prompts": len(part)}
    row |= _spread("speedup", speedup(*columns, **options))
    row |= _spread("mean_speedup", mean_speedup(*columns, **options))
    row["tok_per_s"] = 1e3 * tokens.sum() / time_ms.sum()
    row["p_value"] = np.nan if method == baseline else wilcoxon(tokens / time_ms, base_tokens / base_time_ms)
    if CYCLES in part and part[CYCLES][method].gt(0).all():  # plain decoding has no cycles
        cycles, cycle_tokens = (part[name][method].to_numpy(float) for name in (CYCLES, CYCLE_TOKENS))
        row |= _spread("tau", ratio_of_sums(cycle_tokens, cycles, **options))
        row["tau_macro"] = float((cycle_tokens / cycles).mean())
    return row


def noise_check(rows: pd.DataFrame, first: str, second: str, **options) -> dict:
    """Compare two methods that are the same in truth: their speed-up, its interval, the p-value, and the verdict.

    `quiet`: the interval holds 1 and the test finds nothing at 1 - level. Then a difference as large as the interval's width
    is what this machine can tell apart.
    """
    both = _two(per_prompt(rows), first, second)
    ratio, p_value = speedup(*both, **options), wilcoxon(both[0] / both[1], both[2] / both[3])
    quiet = ratio.low <= 1 <= ratio.high and p_value > 1 - ratio.level
    facts = {"width": ratio.high - ratio.low, "prompts": ratio.prompts, "p_value": p_value, "quiet": bool(quiet)}
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


def _spread(name: str, interval: Interval) -> dict:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _paired(*columns) -> np.ndarray:
    """Columns [P] side by side as [P, C]."""
    arrays = [np.asarray(column, dtype=float).reshape(-1) for column in columns]
    assert len({len(array) for array in arrays}) == 1, "paired samples have equal lengths"
    return np.stack(arrays, axis=1)
