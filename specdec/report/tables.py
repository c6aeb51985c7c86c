"""From rows of parquet to tables as the papers print them, ours beside the published numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.report import provenance

FEW = 4  # fewer prompts say nothing about their spread
PARTS = ("draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms")  # what the time of a cycle is made of


def need(table: pd.DataFrame, *columns: str) -> None:
    """SpecdecError unless the table has rows and these columns."""
    for name in columns:
        if name not in table:
            raise nearest_name_error("column", name, table.columns)
    if table.empty:
        raise SpecdecError(f"there is nothing to show: the table has no rows ({', '.join(columns)}).")


def surely(table: pd.DataFrame) -> pd.DataFrame:
    """The table without the intervals (<value>_low, <value>_high) of rows that rest on fewer than FEW `prompts`."""
    if "prompts" not in table:
        return table
    few = pd.to_numeric(table["prompts"], errors="coerce") < FEW
    return table.assign(**{name: table[name].mask(few) for name in table if str(name).endswith(("_low", "_high"))})


def paper_table(table: pd.DataFrame, value: str, *, rows="method", columns="suite", digits=2, published=None):
    """One quantity as the papers print it: `rows` down, `columns` across, both in order of appearance.

    table: long rows such as stats.compare's. Where `<value>_low` and `<value>_high` exist, a cell reads
    "2.31 [2.20, 2.42]", unless its row rests on fewer than FEW `prompts`. published: long rows with the same three
    columns; each of its numbers stands in a column "<column> (published)" right of ours, and a row that only one side has
    stays, with a dash for the other.
    """
    need(table, rows, columns, value)
    wide = _pivot(table, rows, columns, _cells(table, value, digits))
    across, down = list(dict.fromkeys(table[columns])), list(dict.fromkeys(table[rows]))
    if published is not None:
        need(published, rows, columns, value)
        theirs = _pivot(published, rows, columns, _cells(published[[value]], value, digits))
        wide = wide.join(theirs.add_suffix(" (published)"), how="outer")
        down += [name for name in theirs.index if name not in down]
        across += [name for name in theirs.columns if name not in across]
        across = [name for column in across for name in (column, f"{column} (published)") if name in wide]
    return wide.loc[down, across].fillna("-").rename_axis(columns=None)


def _pivot(long: pd.DataFrame, rows: str, columns: str, cells: list) -> pd.DataFrame:
    if long.duplicated([rows, columns]).any():
        twice = long.loc[long.duplicated([rows, columns]), [rows, columns]].iloc[0].tolist()
        raise SpecdecError(f"two rows stand for {twice}; select one run or aggregate first.")
    return long.assign(cell=cells).pivot(index=rows, columns=columns, values="cell")


def _cells(table: pd.DataFrame, value: str, digits: int) -> list[str | None]:
    """The printed form of each row's value, with its interval where there is one."""
    names, table = [value, f"{value}_low", f"{value}_high"], surely(table)
    cells = []
    for numbers in table[[name for name in names if name in table]].itertuples(index=False):
        shown = [f"{number:.{digits}f}" for number in numbers if pd.notna(number)]
        cells.append(f"{shown[0]} [{shown[1]}, {shown[2]}]" if len(shown) == 3 else shown[0] if shown else None)
    return cells


def time_split(cycles: pd.DataFrame, by="method") -> pd.DataFrame:
    """Mean milliseconds per cycle and their shares: index `by`; the parts, total_ms, and <part>_frac of each part.

    cycles: rows of cycles.parquet. What no lap claimed is host time, so the parts sum to the total.
    """
    need(cycles, by, "total_ms", *PARTS)
    means = cycles.groupby(by, sort=False)[[*PARTS, "total_ms"]].mean()
    shares = means[list(PARTS)].div(means["total_ms"], axis=0)
    return means.join(shares.rename(columns=lambda name: name.replace("_ms", "_frac")))


def acceptance_by_depth(cycles: pd.DataFrame, by="method") -> pd.DataFrame:
    """How often the d-th draft token is accepted once the d-1 before it were: columns `by`, depth, reached,
    acceptance_frac. Cycles whose tree was shallower than d do not count (longest path = draft_calls)."""
    need(cycles, by, "accepted_tok", "draft_calls")
    rows = []
    for name, part in cycles.groupby(by, sort=False):
        for depth in range(1, int(part["draft_calls"].max()) + 1):
            reached = (part["accepted_tok"] >= depth - 1) & (part["draft_calls"] >= depth)
            if reached.any():
                rate = float((part.loc[reached, "accepted_tok"] >= depth).mean())
                rows.append({by: name, "depth": depth, "reached": int(reached.sum()), "acceptance_frac": rate})
    return pd.DataFrame(rows)


def node_curve(cycles: pd.DataFrame, by="method") -> pd.DataFrame:
    """Median milliseconds against verified tokens: columns `by`, verified_tok, cycles, the parts and total_ms."""
    need(cycles, by, "verified_tok", "total_ms", *PARTS)
    grouped = cycles.groupby([by, "verified_tok"], sort=True)
    return grouped[[*PARTS, "total_ms"]].median().join(grouped.size().rename("cycles")).reset_index()


OURS, NOT_HERE = "measured", "not measured here"


def beside(measured, published, value: str, *, rows="method", columns="suite", how="", digits=2) -> pd.DataFrame:
    """One table of what was measured here and what a paper prints: each in columns of its own, side by side.

    measured, published: long rows with `value` and the columns `rows` and `columns` (a name or a list of names each, []
    for none); None where there is nothing. Whose numbers they are, column `pair` of measured and `target` of published
    say; a cell of ours reads "2.31 [2.20, 2.42]" where `<value>_low` and `<value>_high` exist. Columns are named
    "<column>, <pair>" and "<column>, <target> (published)". A row that has no number of ours says NOT_HERE, and column
    `how` says how it would be measured: `how` is one sentence for all, or {row: sentence}. A row's name joins its parts
    by ", ".

    attrs of the result, which `items.save` writes beside it: "rows" counts those measured, published_only and
    not_measured (no number on either side), "missing" names those without a number of ours, "doubts" lists what the
    published rows have against them.
    """
    down, across = ([names] if isinstance(names, str) else list(names) for names in (rows, columns))
    both = [_owned(measured, "pair", "", value, (down, across), digits)]
    both += [_owned(published, "target", " (published)", value, (down, across), digits)]
    long = pd.concat(both, ignore_index=True)
    if long.empty:
        raise SpecdecError("there is nothing to show: neither measured nor published rows.")
    if not long["ours"].any():  # a column that says so
        long = pd.concat([long, long.drop_duplicates("row").assign(column=OURS, cell=None, ours=True, place="")])
    heads = list(dict.fromkeys(long["place"]))
    long = long.sort_values("place", key=lambda places: places.map(heads.index), kind="stable", ignore_index=True)
    order = [name for part in both for name in part["row"]]
    down_names, across_names = list(dict.fromkeys(order)), list(dict.fromkeys(long["column"]))
    wide = _pivot(long, "row", "column", long["cell"]).loc[down_names, across_names]
    ours = list(dict.fromkeys(long.loc[long["ours"], "column"]))
    here, there = wide[ours].notna().any(axis=1), wide.drop(columns=ours).notna().any(axis=1)
    wide.loc[~here, ours] = NOT_HERE
    if how and not here.all():
        said = {row: how if isinstance(how, str) else how.get(row, "") for row in wide.index}
        wide["how"] = ["" if is_here else said[row] for row, is_here in here.items()]
    wide = wide.fillna("-").rename_axis(columns=None, index=", ".join(down))
    counts = {"measured": here, "published_only": there & ~here, "not_measured": ~here & ~there}
    doubts = [] if published is None or "doubt" not in published else [doubt for doubt in published["doubt"] if doubt]
    counted = {name: int(which.sum()) for name, which in counts.items()}
    wide.attrs = {"rows": counted, "missing": list(wide.index[~here]), "doubts": list(dict.fromkeys(doubts))}
    return wide


def _owned(table, whose: str, suffix: str, value: str, names: tuple, digits: int) -> pd.DataFrame:
    """One side of `beside`: row, column, cell, ours, and place, the column without its owner."""
    if table is None or table.empty:
        return pd.DataFrame(columns=["row", "column", "cell", "ours", "place"])
    need(table, *names[0], *names[1], value)
    row, place = ([", ".join(map(str, values)) for values in table[part].itertuples(index=False)] for part in names)
    nobody = suffix.strip(" ()") or OURS
    owners = table[whose].astype(str) + suffix if whose in table else [nobody] * len(table)
    column = [", ".join(filter(None, pair)) for pair in zip(place, owners, strict=True)]
    cells = _cells(table if not suffix else table[[value]], value, digits)
    return pd.DataFrame({"row": row, "column": column, "cell": cells, "ours": not suffix, "place": place})


def markdown(table: pd.DataFrame, digits: int = 2) -> str:
    """The table in markdown; numbers with `digits` decimals, whole numbers as they are, what is missing as a dash."""
    shown = _printed(table, digits)
    return shown.to_markdown(index=_named(shown), disable_numparse=True)


def latex(table: pd.DataFrame, caption: str, label: str, digits: int = 2) -> str:
    """The same as a LaTeX table (booktabs) with a caption."""
    shown = _printed(table, digits)
    caption = "".join(
        f"\\{letter}" if letter in "&%$#_{}" else letter for letter in caption
    )  # pandas escapes cells alone
    return shown.to_latex(index=_named(shown), caption=caption, label=label, position="t", escape=True)


def _printed(table: pd.DataFrame, digits: int) -> pd.DataFrame:
    shown = surely(table).copy()
    for name in shown.columns[shown.dtypes.map(lambda kind: kind.kind == "f")]:
        column = shown[name]
        decimals = 0 if (column.dropna() % 1 == 0).all() else digits
        shown[name] = [f"{value:.{decimals}f}" if np.isfinite(value) else "-" for value in column]
    for name in shown.columns[shown.isna().any()]:
        shown[name] = shown[name].astype(object).where(shown[name].notna(), "-")
    return shown


def _named(table: pd.DataFrame) -> bool:
    return table.index.name is not None or not isinstance(table.index, pd.RangeIndex)


def save(table: pd.DataFrame, stem: Path, *, sources=(), digits: int = 2, about: dict | None = None) -> list[Path]:
    """Write <stem>.md, with the label of its provenance above, <stem>.csv, and <stem>.json with where it comes from.

    sources: Runs, as `provenance.of` takes them. about: more facts for the json file; with a `title` among them <stem>.tex
    is written too, its `doubts` stand below the table.
    """
    stem, origin, about = Path(stem), provenance.of(sources), about or {}
    doubts = [f"Published numbers in doubt: {doubt}" for doubt in about.get("doubts", ())]
    text = "\n\n".join([f"*{origin.label}*", markdown(table, digits), *doubts])
    texts = {"md": text + "\n", "csv": table.to_csv(index=table.index.name is not None)}
    if "title" in about:
        label = f"tab:{stem.parent.name}-{stem.name}"
        texts["tex"] = latex(table, f"{about['title']} ({origin.caption.rstrip('.')}).", label, digits)
    written = [runs.write_text(stem.with_name(f"{stem.name}.{kind}"), text) for kind, text in texts.items()]
    return [*written, runs.write_json(stem.with_name(f"{stem.name}.json"), {**origin.record(), **about})]
