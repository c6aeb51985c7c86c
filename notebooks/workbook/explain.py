"""Measurements of a notebook in one sentence."""

from __future__ import annotations

import pandas as pd

from specdec.report import tables


def clear_of_one(table: pd.DataFrame, name: str, value: str) -> str:
    """How many rows have an interval (`low`, `high`) without one, and which, the smallest first.

    >>> rows = {"choice": ["a", "b"], "gain": [0.9, 1.0], "low": [0.8, 0.9], "high": [0.95, 1.1]}
    >>> clear_of_one(pd.DataFrame(rows), "choice", "gain")
    '1 of 2: a **0.90 [0.80, 0.95]**'
    """
    clear = table[(table["low"] > 1) | (table["high"] < 1)].sort_values(value)
    # the column names that `cells` reads
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
    # a mean of means would count some benchmarks twice
    rows = long[(long["metric"] == metric) & ~long["column"].isin(["Mean", "All"])]
    means = rows.groupby(["pair", "row"], sort=False)["value"].mean().dropna()
    return "; ".join(f"{pair}, {row} **{mean:.2f}**" for (pair, row), mean in means.items())
