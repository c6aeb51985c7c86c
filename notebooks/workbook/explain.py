"""Why some suites are faster than others, and measurements in a sentence.

speedup = tau / cycle_steps,    less what the prompt's own forward takes in both
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.report import tables


def suites(run: runs.Run, table: pd.DataFrame, method: str, baseline: str) -> pd.DataFrame:
    """What makes `method` fast or slow: one row per suite, in the run's order, and 'all'.

    table: bench.summary(run). cycle_steps: the mean cycle in mean plain steps, both without
    prefill. first_frac: how often a cycle's first draft token is accepted. prefill_frac: of the
    method's whole time. answer_tok: mean of new tokens.
    """
    for name in {method, baseline} - set(table["method"]):
        raise nearest_name_error("method of this run", name, set(table["method"]))
    summary = table[table["method"] == method].set_index("suite")
    if summary["tau"].isna().any():
        raise SpecdecError(f"{method!r} has no cycles to explain; name a method that drafts.")
    prompts, cycles = run.read_table("prompts"), run.read_table("cycles")
    cycles = cycles[cycles["method"] == method]
    rows = []
    for suite in summary.index:
        turns, part = prompts, cycles
        if suite != "all":
            turns = prompts[prompts["suite"] == suite]
            part = cycles[cycles["suite"] == suite]
        plain, drafted = turns[turns["method"] == baseline], turns[turns["method"] == method]
        # the prefill brings one token
        steps = np.maximum(plain["new_tok"] - 1, 0).sum()
        row = {"cycle_steps": part["total_ms"].mean() / (plain["decode_ms"].sum() / steps)}
        row["first_frac"] = (part["accepted_tok"] > 0).mean()
        row["prefill_frac"] = drafted["prefill_ms"].sum() / drafted["total_ms"].sum()
        rows.append(row | {"answer_tok": drafted["new_tok"].mean()})
    columns = summary[["prompts", "speedup", "speedup_low", "speedup_high", "tau"]]
    return columns.join(pd.DataFrame(rows, index=summary.index))


def drivers(by_suite: pd.DataFrame) -> pd.Series:
    """Spearman's rank correlation, over suites, of the speed-up with the columns of `suites`.

    NaN below three suites, and for a column that is constant.
    """
    by_suite = by_suite.drop(index="all", errors="ignore")
    names = ["tau", "cycle_steps", "first_frac", "prefill_frac", "answer_tok"]
    varied = [name for name in names if len(by_suite) >= 3 and by_suite[name].nunique() > 1]
    ranks = by_suite[varied].corrwith(by_suite["speedup"], method="spearman").reindex(names)
    return ranks.rename("rank correlation with speedup")


def clear_of_one(table: pd.DataFrame, name: str, value: str) -> str:
    """How many rows have an interval (`low`, `high`) without one, and which, the smallest first.

    >>> rows = {"choice": ["a", "b"], "gain": [0.9, 1.0], "low": [0.8, 0.9], "high": [0.95, 1.1]}
    >>> clear_of_one(pd.DataFrame(rows), "choice", "gain")
    '1 of 2: a **0.90 [0.80, 0.95]**'
    """
    clear = table[(table["low"] > 1) | (table["high"] < 1)].sort_values(value)
    ends = {"low": f"{value}_low", "high": f"{value}_high"}
    cells = tables.cells(clear.rename(columns=ends), value)
    texts = [f"{label} **{cell}**" for label, cell in zip(clear[name], cells, strict=True)]
    count = f"{len(clear)} of {len(table)}"
    return f"{count}: {', '.join(texts)}" if texts else count


def of_rows(long: pd.DataFrame, metric: str) -> str:
    """Means over benchmarks of one metric in long rows (`paper_rows.LONG`), by pair and row.

    >>> columns = {"pair": "tiny", "metric": "speedup", "column": ["GSM8K", "Alpaca", "Mean"]}
    >>> of_rows(pd.DataFrame({**columns, "row": "EAGLE-3", "value": [0.4, 0.6, 0.5]}), "speedup")
    'tiny, EAGLE-3 **0.50**'
    """
    if long.empty:
        return "Nothing was measured here"
    rows = long[(long["metric"] == metric) & ~long["column"].isin(["Mean", "All"])]
    means = rows.groupby(["pair", "row"], sort=False)["value"].mean().dropna()
    return "; ".join(f"{pair}, {row} **{mean:.2f}**" for (pair, row), mean in means.items())
