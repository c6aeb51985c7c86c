"""Intervals and tests for paired measurements: the same prompts decoded by several methods.

The prompt is the unit: repeats of one prompt share its text, so they are summed first. Every figure
is a positive function of means over prompts, mostly a ratio of sums. Its logarithm gets a standard
error from the jackknife (Efron and Tibshirani 1993, chapter 11) and Student's t with one degree of
freedom less than there are prompts.

This keeps its level with few prompts: of 95 % intervals over 6 prompts of skewed lengths and gains,
91 to 94 % covered the true value; of percentile and BCa bootstraps 80 to 85 %; a bootstrap-t
covered as well and was 1.5 times as wide (the tests repeat it).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy

from specdec.errors import SpecdecError, check_name

LEVEL = 0.95
LEAST_PROMPTS = 8  # fewer give no reliable spread: nothing shown has an interval from them
# Columns of prompts.parquet: counted tokens, their time, cycles, and the tokens that tau counts
# (before truncation).
TOKENS = "new_tok"
TIME = "total_ms"
CYCLES = "cycles"
CYCLE_TOKENS = "cycle_tok"
SPEED = ("new_tok", "time_ms")  # the rate of a replay's turns: tokens per millisecond


@dataclass(frozen=True)
class Interval:
    """A figure of the whole sample, its confidence interval, and the two-sided p-value of "it is
    1".
    """

    value: float
    low: float
    high: float
    level: float = LEVEL
    prompts: int = 0
    p_value: float = np.nan


def interval(columns, statistic: Callable, *, level: float = LEVEL) -> Interval:
    """Student's t-interval of log(statistic), with the jackknife's standard error.

    columns: float array [P, C], one row per prompt, one column per measured quantity.
    statistic: function of column *means* [..., C] that returns [...], positive; ratios of means are
    ratios of sums. A single prompt has no interval and no p-value (NaN).
    """
    columns = np.asarray(columns, dtype=float)
    assert len(columns) and np.isfinite(columns).all(), (
        "an interval needs at least one prompt, and no NaN or infinity"
    )
    assert 0 < level < 1, f"a level lies between 0 and 1, got {level}"
    prompts = len(columns)
    value = float(statistic(columns.mean(axis=0)))
    if prompts == 1:
        return Interval(value, np.nan, np.nan, level, 1)
    without_one = np.log(statistic((columns.sum(axis=0) - columns) / (prompts - 1)))  # [P]
    error = np.sqrt((prompts - 1) * np.var(without_one))
    reach = float(np.exp(scipy.stats.t.ppf((1 + level) / 2, prompts - 1) * error))
    distance = abs(np.log(value))
    p_value = (
        float(2 * scipy.stats.t.sf(distance / error, prompts - 1))
        if error
        else float(distance == 0)
    )
    return Interval(value, value / reach, value * reach, level, prompts, p_value)


def ratio_of_sums(numerator, denominator, **options) -> Interval:
    """Sum over prompts of `numerator` [P] over the sum of `denominator` [P]: tau, tokens per
    second.
    """
    return interval(
        _paired(numerator, denominator), lambda means: means[..., 0] / means[..., 1], **options
    )


def mean_speedup(tokens, seconds, base_tokens, base_seconds, **options) -> Interval:
    """Mean of per-prompt ratios of throughputs: every prompt has equal weight."""
    columns = _paired(tokens, seconds, base_tokens, base_seconds)
    ratios = columns[:, 0] / columns[:, 1] * columns[:, 3] / columns[:, 2]
    return interval(ratios[:, None], lambda means: means[..., 0], **options)


def holm(p_values) -> np.ndarray:
    """p-values adjusted for multiple tests (Holm 1979): the i-th smallest of m, times m - i + 1,
    monotone.
    """
    p_values = np.asarray(p_values, dtype=float)
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * np.arange(len(p_values), 0, -1)
    return np.minimum(np.maximum.accumulate(steps), 1.0)[np.argsort(order)]


def per_prompt(rows: pd.DataFrame, quantities=(TOKENS, TIME, CYCLES, CYCLE_TOKENS)) -> pd.DataFrame:
    """Rows summed over turns and repeats: index (suite, prompt), columns (quantity, method, seed);
    seed 0 if rows have none."""
    rows = rows if "seed" in rows else rows.assign(seed=0)
    groups = rows.groupby(["suite", "prompt", "method", "seed"], sort=False)
    counts = groups.size().unstack(["method", "seed"])
    uneven = counts.ne(counts.iloc[:, 0], axis=0).any(axis=1).sum()
    if uneven:
        raise SpecdecError(
            f"{uneven} prompts were not measured equally often by all methods; finish the run."
        )
    summed = groups[[name for name in quantities if name in rows]].sum()
    return summed.unstack(["method", "seed"]).sort_index()


def summarise(
    rows: pd.DataFrame,
    baselines: dict[str, str],
    *,
    rate: tuple[str, str] = (TOKENS, TIME),
    family: Collection[str] | None = None,
    pool: bool | None = None,
    **options,
) -> pd.DataFrame:
    """One row per suite and method: its rate relative to that of each baseline, with paired
    intervals over prompts.

    rows: columns suite, prompt, method and the two of `rate`, a quotient of sums; optionally seed,
    over which rates are averaged. baselines: name of a ratio, such as "over_tuned" -> the method in
    its denominator.
    family: the methods under test, default all but the baseline. pool: adds the suite "all", the
    primary comparison; default if there are several suites. options: those of `interval`. Returns
    suite, method, seeds, prompts, rate, and for each ratio <ratio>, <ratio>_low, <ratio>_high,
    p_<ratio> and p_<ratio>_holm (`holm_by_suite`); the p-value's name drops a leading "over_" of
    the ratio.
    """
    summed = per_prompt(rows, rate)
    methods = list(summed[rate[0]].columns.unique("method"))
    suites = list(dict.fromkeys(rows["suite"]))
    for baseline in baselines.values():
        check_name("baseline", baseline, methods)
    table = []
    for suite in sorted(suites) + ["all"] * (len(suites) > 1 if pool is None else pool):
        part = summed if suite == "all" else summed.loc[[suite]]
        sides = {
            method: [part[name][method].to_numpy(float) for name in rate] for method in methods
        }
        for method, own in sides.items():
            row = {"suite": suite, "method": method, "seeds": own[0].shape[1], "prompts": len(part)}
            row["rate"] = float(_mean_rate(own[0].mean(0), own[1].mean(0)))
            for name, baseline in baselines.items():
                found = _over(own, sides[baseline], options)
                p_value = np.nan if method == baseline else found.p_value
                row |= {**spread_of(name, found), p_name(name): p_value}
            table.append(row)
    table = pd.DataFrame(table)
    for name, baseline in baselines.items():
        tested = table["method"].isin(set(methods if family is None else family) - {baseline})
        table[f"{p_name(name)}_holm"] = holm_by_suite(table, p_name(name), tested)
    return table


def p_name(ratio: str) -> str:
    """The column of a ratio's p-value.

    >>> p_name("over_tuned"), p_name("speedup")
    ('p_tuned', 'p_speedup')
    """
    return f"p_{ratio.removeprefix('over_')}"


def _mean_rate(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Quotients [..., S] averaged over seeds."""
    return (numerators / denominators).mean(-1)


def _over(own: list[np.ndarray], base: list[np.ndarray], options: dict) -> Interval:
    """The rate of `own` over that of `base`; each two arrays [P, seeds], numerators and
    denominators.
    """
    ends = np.cumsum([side.shape[1] for side in (*own, *base)])[:-1]

    def ratio(means: np.ndarray) -> np.ndarray:
        parts = np.split(means, ends, axis=-1)
        return _mean_rate(*parts[:2]) / _mean_rate(*parts[2:])

    return interval(np.concatenate([*own, *base], axis=1), ratio, **options)


def compare(
    rows: pd.DataFrame, baseline: str, *, family: Collection[str] | None = None, **options
) -> pd.DataFrame:
    """One row per (suite, method) against `baseline`: speed-ups with intervals, two kinds of tau,
    p-values after Holm.

    rows: prompts.parquet. A suite called 'all' pools them, and is the primary comparison. family,
    options: of `summarise`. Returns columns suite, method, prompts, speedup(_low, _high),
    mean_speedup(_low, _high), tok_per_s, p_value (of speedup), p_holm, and tau(_low, _high),
    tau_macro if cycles were counted.
    """
    rows = rows.assign(seed=0)  # all policies of a method count as one method here
    table = summarise(rows, {"speedup": baseline}, family=family, **options).set_index(
        ["suite", "method"]
    )
    summed = per_prompt(rows).droplevel("seed", axis=1)
    added = []
    for suite, method in table.index:
        part = summed if suite == "all" else summed.loc[[suite]]
        names = summed.columns.unique(0)
        sides = (method, baseline)
        own, base = ({name: part[name][which].to_numpy(float) for name in names} for which in sides)
        mean = mean_speedup(own[TOKENS], own[TIME], base[TOKENS], base[TIME], **options)
        row = spread_of("mean_speedup", mean) | {
            "tok_per_s": 1e3 * own[TOKENS].sum() / own[TIME].sum()
        }
        if CYCLES in own and (own[CYCLES] > 0).all():  # plain decoding has no cycles
            row |= spread_of("tau", ratio_of_sums(own[CYCLE_TOKENS], own[CYCLES], **options))
            row["tau_macro"] = float((own[CYCLE_TOKENS] / own[CYCLES]).mean())
        added.append(row)
    table = table.join(pd.DataFrame(added, index=table.index)).reset_index()
    table = table.rename(columns={"p_speedup": "p_value", "p_speedup_holm": "p_holm"}).drop(
        columns=["seeds", "rate"]
    )
    first = ["suite", "method", "prompts", *spread_names("speedup"), *spread_names("mean_speedup")]
    first += ["tok_per_s", "p_value"]
    return table[[*first, *(name for name in table if name not in first)]]


def holm_by_suite(table: pd.DataFrame, column: str, tested: pd.Series) -> pd.Series:
    """p-values of the tested rows, adjusted within each suite ("all" is one, the primary one); NaN
    elsewhere.

    One family per suite: with few prompts no row of a family over all suites could be significant.
    """
    adjusted = pd.Series(np.nan, index=table.index)
    for _, rows in table[tested & table[column].notna()].groupby("suite"):
        adjusted[rows.index] = holm(rows[column])
    return adjusted


def noise_check(rows: pd.DataFrame, first: str, second: str, **options) -> dict:
    """Compare two identical methods: their speed-up, its interval, the p-value, and the verdict.

    `quiet`: the interval holds 1. The interval's width is then the smallest difference that this
    machine can detect.
    """
    table = summarise(rows[rows["method"].isin([first, second])], {"speedup": second}, **options)
    found = table[table["method"] == first].iloc[-1]  # all suites together
    facts = {name: float(found[name]) for name in spread_names("speedup")}
    _, low, high = facts.values()
    facts |= {
        "width": high - low,
        "prompts": int(found["prompts"]),
        "p_value": float(found["p_speedup"]),
    }
    return facts | {"quiet": low <= 1 <= high}


def with_all(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, and all of them again as suite "all" if there are several suites."""
    return pd.concat([rows, rows.assign(suite="all")]) if rows["suite"].nunique() > 1 else rows


def in_order(table: pd.DataFrame, methods: list[str]) -> pd.DataFrame:
    """The rows of a table suite by suite, in each the methods and seeds in the order given."""
    places = pd.DataFrame(
        {"suite": pd.factorize(table["suite"])[0], "method": table["method"].map(methods.index)}
    )
    places["seed"] = table["seed"] if "seed" in table else 0
    return table.loc[places.sort_values([*places]).index].reset_index(drop=True)


def spread_names(name: str) -> list[str]:
    """The column names of a figure and its interval."""
    return [name, f"{name}_low", f"{name}_high"]


def spread_of(name: str, found: Interval) -> dict[str, float]:
    """A figure and its interval under `spread_names`."""
    return dict(zip(spread_names(name), (found.value, found.low, found.high), strict=True))


def _paired(*columns) -> np.ndarray:
    """Columns [P] side by side as [P, C]."""
    arrays = [np.asarray(column, dtype=float).reshape(-1) for column in columns]
    assert len({len(array) for array in arrays}) == 1, "paired samples have equal lengths"
    return np.stack(arrays, axis=1)
