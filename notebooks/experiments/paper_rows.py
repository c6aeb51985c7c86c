"""Rows of measurements under the names that a paper prints: long rows for its tables and figures.

Long rows have the columns LONG: whose they are (pair), the paper's row and column, the metric, the
value, its interval and the prompts that it rests on. A row has the paper's name only where it is
made with the paper's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import wilcoxon

from specdec.core.tree_config import PAPER_TREES
from specdec.evaluation import stats
from specdec.identity import DEFAULT, EQUAL, GRID, LIVE, OFFICIAL, PAPER, STATIC, TERMS, TUNED

from workbook.items import read_published
from workbook.pictures import over_seeds

KEYS = ["pair", "row", "column", "metric"]
# what a value rests on; of a table without prompts its turns
COUNTED = ["prompts", "turns"]
LONG = [*KEYS, "value", "value_low", "value_high", *COUNTED]


@dataclass(frozen=True)
class Row:
    """A row of a paper's table: how it is called there, and which of our methods it holds.

    where: fields of a method (`identity.FIELDS`), or another column of our rows, and their values;
    the label may name fields in braces.
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


def by_recipe(names: dict[str, str], column: str = "system") -> list[Row]:
    """Rows of trainings: the paper's settings under its names, others under names that say so."""
    recipes = {"paper": "", "official": ", the released settings", "ours": ", our settings"}
    rows = []
    for recipe, how in recipes.items():
        for name, label in names.items():
            rows.append(Row(label + how, {column: name, "recipe": recipe}))
    return rows


def labelled(table: pd.DataFrame, rows: Sequence[Row]) -> pd.DataFrame:
    """Those rows of `table` that one of `rows` names, with its label as `row` and its place.

    Methods at prices that are not their own (`identity.CARRIED`) belong to no row of a paper.
    """
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

    table: with pair, suite, `metrics` and what `rows` look at. rows: in the paper's order. suites:
    our name -> the paper's, in its order; what is not named is left out, and a suite is known by
    its benchmark. metrics: our column -> the paper's name. how: added to the pair, with a run's
    clock for "{clock}". Rows of several seeds are averaged, and then have no interval. A column
    called `mean` ("" for none) is the mean over the paper's columns, where all of them are there.
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
    kept = labelled(table.assign(pair=pair, column=column), rows).dropna(subset=["column"])
    # 2. one long row per metric
    parts = []
    for name, label in metrics.items():
        ends = {f"{name}_{end}": f"value_{end}" for end in ("low", "high")}
        part = kept.rename(columns={name: "value", **ends}).assign(metric=label)
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
    labels = kept.sort_values("place", kind="stable")["row"]
    order = {name: place for place, name in enumerate(dict.fromkeys([*labels, *printed]))}
    in_order = dict(key=lambda names: names.map(order), kind="stable", ignore_index=True)
    return long.sort_values(KEYS[1:3], **in_order)


def means(long: pd.DataFrame, columns: list[str], name: str) -> pd.DataFrame:
    """Rows of the mean over `columns`, as the papers average, where every one of them is there."""
    keys = ["pair", "row", "metric"]
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


def named_lines(
    table: pd.DataFrame, drafters: dict[str, str], what: str, points: int = 0
) -> pd.DataFrame:
    """Lines of trainings: panel (the pair), name (the drafter's), step, and of the column `what`
    over seeds the mean (value), the least (low) and the largest (high).

    points: means over so many blocks of steps; 0 takes every step.
    """
    if table.empty:
        return pd.DataFrame()
    kept = table[table["drafter"].isin(list(drafters)) & table[what].notna()]
    block = 1
    if points and len(kept):
        block = max(1, -(-int(kept["step"].max() + 1) // points))
    panel = kept["pair"].rename("panel")
    name = kept["drafter"].map(drafters).rename("name")
    seed = kept.get("seed", panel).rename("of")
    keys = [panel, name, kept["step"] // block * block, seed]
    of_seeds = kept.groupby(keys, sort=False)[what].mean()
    return over_seeds(of_seeds.rename("value").reset_index())


def of_chains(
    chained: pd.DataFrame, rows: Sequence[Row], suites: dict[str, str], tau: str
) -> pd.DataFrame:
    """Long rows of chains (`drafters.compare_tau` over the start): tokens per cycle, and their
    ratio to the start's.

    tau: what the paper's table calls tokens per cycle. Of trainings in several runs the first
    counts. A column "All" pools the suites.
    """
    if chained.empty:
        return chained
    first = chained.drop_duplicates(["pair", "suite", "drafter"])
    ends = {"low": "over_baseline_low", "high": "over_baseline_high"}
    first = first.rename(columns=ends)
    metrics = {"tau": tau, "over_baseline": "tau over its start's"}
    by_suite = as_printed(first, rows, suites, metrics, how="one chain")
    pooled = as_printed(first, rows, {"all": "All"}, metrics, how="one chain")
    return pd.concat([by_suite, pooled])


def whose(table: pd.DataFrame) -> pd.DataFrame:
    """Long or published rows with `whose`, the pair or the paper's target, and `published`."""
    if "target" in table:
        return table.assign(whose=table["target"] + " (published)", published=True)
    return table.assign(whose=table["pair"], published=False)


def signed_ranks(turns: pd.DataFrame, rows: Sequence[Row], against: Row) -> pd.DataFrame:
    """Long rows of the column "p-value": of "it is not faster than `against`".

    By Wilcoxon's signed-rank test over prompts. turns: of replay, with pair, run and the fields of
    a method; rates are means over seeds.
    """
    if turns.empty:
        return pd.DataFrame(columns=LONG)
    tested = []
    for (pair, _), of_run in turns.groupby(["pair", "run_key"], sort=False):
        kept = labelled(of_run, [against, *rows])
        if against.label not in set(kept["row"]):
            continue
        quantities = stats.per_prompt(kept.assign(method=kept["row"]), stats.SPEED)
        rates = quantities["new_tok"] / quantities["time_ms"]
        rates = rates.T.groupby(level="method").mean().T
        for row in dict.fromkeys(kept["row"]):
            if row == against.label:
                continue
            test = wilcoxon(rates[row], rates[against.label], alternative="greater")
            key = (f"{pair}, replayed", row, "p-value", "p_below")
            tested.append((*key, float(test.pvalue), len(rates)))
    return pd.DataFrame(tested, columns=[*KEYS, "value", "prompts"]).reindex(columns=LONG)


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


def best_and_last(curves: pd.DataFrame, drafters: dict[str, str]) -> list[str]:
    """A sentence per pair and drafter: held-out tokens per cycle at the start, at best and last."""
    lines = named_lines(curves, drafters, "held_out_tau_chain")
    if lines.empty:
        return []
    sentences = []
    for (name, pair), line in lines.groupby(["name", "panel"], sort=False):
        values = line.set_index("step")["value"]
        best = f"{values.max():.3f} (step {values.idxmax()})"
        sentences.append(
            f"{name}, {pair}: held-out chains at the start, at best and last "
            f"(step {values.index[-1]}): {values.iloc[0]:.3f}, {best}, {values.iloc[-1]:.3f}."
        )
    return sentences


def unmoved(long: pd.DataFrame, start: str) -> list[str]:
    """A sentence for each row with the very tokens per cycle of `start`, where it began."""
    of_taus = long[long["metric"].str.startswith("tau")]
    values = of_taus.pivot_table("value", ["pair", "row"], ["column", "metric"])
    sentences = []
    for (pair, row), cells in values.iterrows():
        if row == start or (pair, start) not in values.index:
            continue
        cells = cells.dropna()
        # on the columns that both have
        begun = values.loc[(pair, start)].reindex(cells.index)
        if len(begun) and np.allclose(cells, begun, rtol=1e-9):
            why = "it is no better than its start"
            sentences.append(f"{row} ({pair}) has the numbers of its start: {why}.")
    return sentences


def gain_bars(
    measured: dict[str, pd.DataFrame], paper: str, over: dict[str, str], shared: str
) -> pd.DataFrame:
    """Bars of mean speedups of several tables, in % of change against a row of each.

    One panel per table. measured: name of a published table -> our long rows of the same. over:
    name -> the row. shared: a row that was measured once for all settings.
    """
    parts = []
    for name, long in measured.items():
        wide = []
        models = []
        for side in (long, read_published(paper, name)):
            if side.empty:
                continue
            # 1. mean speedups, by whose they are
            published = "target" in side
            speeds = whose(side[side["metric"] == "speedup"])
            bars = speeds[speeds["column"] == "Mean"]
            how = "published"
            if not published:
                trained = bars["row"].str.extract(r", ([^,]* settings)$", expand=False)
                how = "measured here, " + trained.fillna("the paper's settings")
            row = bars["row"].str.replace(r", [^,]* settings$", "", regex=True)
            table = bars.assign(how=how, row=row).pivot_table("value", "how", "row", sort=False)
            if shared in table:
                table[shared] = table[shared].fillna(table[shared].max())
            wide.append(table)
            # 2. the models in the panel's head
            if len(bars):
                model = side["target" if published else "pair"].iloc[0]
                if not published:
                    turns = speeds.groupby("row")["turns"].sum().max()
                    model += f" (n = {turns:.0f} turns)"
                models.append(model)
        # 3. changes in percent
        table = pd.concat(wide)
        gains = 100 * (table.div(table[over[name]], axis=0) - 1).drop(columns=over[name])
        bars = gains.stack().dropna().rename("gain").rename_axis(["whose", "row"]).reset_index()
        number = name.removeprefix("table")
        panel = f"Table {number}, over {over[name]}: {'; '.join(models)}"
        parts.append(bars.assign(panel=panel, published=bars["whose"] == "published"))
    return pd.concat(parts, ignore_index=True)


def cost_bars(pairs: pd.DataFrame, split: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """LTD's Figure 2: published, whose, x, part, kind, value.

    ms of drafting and of verifying by (depth, nodes), and both as % of the default tree's cycle.
    pairs: pair, depth, nodes, draft_ms, verify_ms, of which the first pair's are shown. split:
    pair, method and its fields, draft_ms, verify_ms, total_ms of the default tree and of LTD.
    """
    columns = ["published", "whose", "x", "part", "kind", "value"]
    parts = []
    for part in ("draft", "verify"):
        if len(pairs):
            first = pairs[pairs["pair"] == pairs["pair"].iloc[0]]
            depths = first["depth"].astype(str)
            x = "(" + depths + ", " + first["nodes"].astype(str) + ")"
            facts = dict(published=False, whose=first["pair"], kind="ms", part=part)
            parts.append(first.assign(**facts, x=x, value=first[f"{part}_ms"]))
        for pair, rows in split.groupby("pair", sort=False) if len(split) else ():
            default = labelled(rows, [default_row("radar", "default")])
            ours = rows[rows["system"] == "LTD"]
            bars = pd.concat([default, ours.assign(row=ours["method"])])
            value = 100 * bars[f"{part}_ms"] / default["total_ms"].iloc[0]
            facts = dict(published=False, whose=pair, kind="pct", part=part)
            parts.append(bars.assign(**facts, x=bars["row"], value=value))
        for kind in ("ms", "pct"):
            theirs = printed[printed["metric"] == f"{part}_{kind}"]
            facts = dict(published=True, whose=theirs["target"], kind=kind, part=part)
            parts.append(theirs.assign(**facts, x=theirs["row"]))
    table = pd.concat([part[columns] for part in parts], ignore_index=True)
    return table.sort_values(["published", "kind"], kind="stable", ignore_index=True)
