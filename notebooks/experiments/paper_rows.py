"""Rows of measurements under the names that a paper prints: LONG rows for its tables and figures.

A row has the paper's name only where it is made with the paper's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from specdec.core.tree_config import PAPER_TREES
from specdec.identity import DEFAULT, EQUAL, GRID, LIVE, OFFICIAL, PAPER, STATIC, TERMS, TUNED

KEYS = ["pair", "row", "column", "metric"]
# what a value rests on; of a table without prompts its turns
COUNTED = ["prompts", "turns"]
LONG = [*KEYS, "value", "value_low", "value_high", *COUNTED]


@dataclass(frozen=True)
class Row:
    """A row of a paper's table: its label, which may name fields in braces, and whose rows it is.

    where: fields of a method (`identity.FIELDS`), or another column of our rows, and their values.
    """

    label: str
    where: dict[str, str]


def named(names: dict[str, str], column: str = "system") -> list[Row]:
    """Rows of systems, rules and drafters by name: ours -> the paper's. column: of our names."""
    untrained = {"terms": "", "preset": ""} if column == "system" else {}
    return [Row(label, {column: name} | untrained) for name, label in names.items()]


def default_row(paper: str, label: str) -> Row:
    """The row of the tree that a paper calls EAGLE-3.

    >>> default_row("ltd", "Eagle3").where["preset"]
    '60,8,10'
    """
    tree = PAPER_TREES[paper].text
    return Row(label, {"system": STATIC, "terms": DEFAULT, "preset": tree})


# in every table
TUNED_ROW = Row("tuned static (ours)", {"system": STATIC, "terms": TUNED})
OWN_GRID = "best static tree of the paper's own grid (ours)"


def grid_rows(system: str, label: str = OWN_GRID) -> list[Row]:
    """The rows of the fastest static tree of a paper's own grid, whole or as far as recorded."""
    rows = []
    for cut in ("", ", as far as recorded"):
        where = {"system": STATIC, "terms": GRID, "preset": system + cut}
        rows.append(Row(label + cut, where))
    return rows


def on_terms(system: str, printed: str) -> list[Row]:
    """The rows of a controller: under the paper's name as the paper trains it, else with terms."""
    rows = [Row(printed, {"system": system, "terms": PAPER})]
    for term in (EQUAL, OFFICIAL, LIVE):
        rows.append(Row(f"{printed}, {TERMS[term]}", {"system": system, "terms": term}))
    return rows


def labelled(table: pd.DataFrame, rows: Sequence[Row]) -> pd.DataFrame:
    """Those rows of `table` that one of `rows` names, with its label as `row` and its place.

    Methods at prices that are not their own (`identity.CARRIED`) belong to no row of a paper.
    """
    # their order in `table` is kept: of equal rows the first counts
    table = table.assign(at=range(len(table)))
    at_home = table.get("adapted", pd.Series("", table.index)) == ""
    parts = []
    for place, row in enumerate(rows):
        same = (table[list(row.where)] == pd.Series(row.where)).all(axis=1)
        part = table[at_home & same]
        labels = row.label
        if "{" in labels:
            labels = [row.label.format(**fields) for fields in part.to_dict("records")]
        parts.append(part.assign(row=labels, place=place))
    return pd.concat(parts).sort_values("at", kind="stable").drop(columns="at")


def benchmark(suites: pd.Series) -> pd.Series:
    """The benchmark of each suite: gsm8k of laptop/gsm8k and of toy/gsm8k."""
    return suites.str.rpartition("/")[2]


def as_printed(
    table: pd.DataFrame,
    rows: Sequence[Row],
    suites: dict[str, str],
    metrics: dict[str, str] | list[str],
    how: str = "",
    mean: str = "Mean",
) -> pd.DataFrame:
    """Long rows (`LONG`) of a table, under the names that a paper prints.

    suites, metrics: our name -> the paper's, in its order. how: added to the pair, with a run's
    clock for "{clock}". mean: the column of means over columns, "" for none.
    """
    if table.empty:
        return pd.DataFrame(columns=LONG)
    # 1. the rows that the paper names
    if isinstance(metrics, list):
        metrics = {name: name for name in metrics}
    pair = table["pair"]
    if how:
        clocks = table.get("clock", pd.Series("", table.index))
        pair = pair + [f", {how.format(clock=clock)}" for clock in clocks]
    column = benchmark(table["suite"]).map(suites)
    matched = labelled(table.assign(pair=pair, column=column), rows).dropna(subset=["column"])
    # 2. one long row per metric
    parts = []
    for name, label in metrics.items():
        ends = {f"{name}_{end}": f"value_{end}" for end in ("low", "high")}
        part = matched.rename(columns={name: "value", **ends}).assign(metric=label)
        parts.append(part.reindex(columns=LONG))
    long = pd.concat(parts, ignore_index=True).astype({"value": float})
    # 3. the mean over seeds, which has no interval
    groups = long.groupby(KEYS, sort=False)
    once = groups.size().eq(1).reindex(pd.MultiIndex.from_frame(long[KEYS])).to_numpy()
    long.loc[~once, ["value_low", "value_high"]] = float("nan")
    long = groups[LONG[len(KEYS) :]].mean().reset_index()
    # 4. the mean over columns, and the paper's order
    printed = list(dict.fromkeys(suites.values()))
    if mean and len(printed) > 1:
        long = pd.concat([long, means(long, printed, mean)], ignore_index=True)
    labels = matched.sort_values("place", kind="stable")["row"]
    order = {name: place for place, name in enumerate(dict.fromkeys([*labels, *printed]))}
    in_order = dict(key=lambda names: names.map(order), kind="stable", ignore_index=True)
    return long.sort_values(KEYS[1:3], **in_order)


def means(long: pd.DataFrame, columns: list[str], name: str) -> pd.DataFrame:
    """Rows of the mean over `columns`, as the papers average, where every one of them is there."""
    keys = ["pair", "row", "metric"]
    # a mean over fewer columns would be of easier or harder prompts
    groups = long[long["column"].isin(columns)].groupby(keys, sort=False)["value"]
    table = groups.agg(["mean", "size"]).reset_index()
    table = table[table["size"] == len(columns)].rename(columns={"mean": "value"})
    return table.assign(column=name).reindex(columns=LONG)


def long_rows(table: pd.DataFrame, **columns) -> pd.DataFrame:
    """Long rows of a table: row, column, metric, value and pair, as in `DataFrame.assign`.

    Rows without a name are left out; without a table there are none.
    """
    if table.empty:
        return pd.DataFrame(columns=LONG)
    rows = table.assign(**columns).dropna(subset=["row"])
    return rows[[*KEYS, "value"]].reindex(columns=LONG)


def by_column(
    table: pd.DataFrame, row: str, values: dict[str, str], metric: str = ""
) -> pd.DataFrame:
    """Long rows of a table with a column for each of `values`: our name -> the paper's column.

    row: the column of rows. metric: of all; default each column's own name.
    """
    parts = []
    for name, label in values.items():
        names = dict(row=lambda rows: rows[row].astype(str), column=label, metric=metric or name)
        parts.append(long_rows(table, **names, value=table.get(name)))
    return pd.concat(parts, ignore_index=True)


def with_deviations(long: pd.DataFrame) -> pd.DataFrame:
    """Rows in which the rows of a metric "x_sd" have become the column value_sd of those of "x"."""
    long = long.reset_index(drop=True)
    # "length_sd" beside "length"
    deviation = long["metric"].astype(str).str.endswith("_sd")
    if not deviation.any():
        return long
    keys = [key for key in ("target", "temperature", *KEYS) if key in long]
    spread = long[deviation].assign(metric=long["metric"].str.removesuffix("_sd"))
    spread = spread[[*keys, "value"]].rename(columns={"value": "value_sd"})
    return long[~deviation].merge(spread, on=keys, how="left")


def whose(table: pd.DataFrame) -> pd.DataFrame:
    """Long or published rows with `whose`, the pair or the paper's target, and `published`."""
    if "target" in table:
        return table.assign(whose=table["target"] + " (published)", published=True)
    return table.assign(whose=table["pair"], published=False)


def constants(facts: pd.DataFrame, rows: Sequence[Row]) -> list[str]:
    """A sentence for each of `rows` in cycle_facts (with pair) that became a static tree.

    It gives one answer nearly always.
    """
    if facts.empty:
        return []
    alike = facts[facts["collapsed"].astype(bool) & (facts["system"] != STATIC)]
    alike = labelled(alike, rows).drop_duplicates(["pair", "row"])
    sentences = []
    for row in alike.itertuples():
        sentences.append(
            f"{row.row} of {row.pair} became a constant: {row.commonest} (nodes and root, depth, "
            f"width) in {row.commonest_frac:.0%} of its cycles."
        )
    return sentences
