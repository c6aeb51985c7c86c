"""From rows of parquet to tables as the papers print them, ours beside the published numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from specdec import machine, runs
from specdec.errors import SpecdecError, nearest_name_error

PARTS = ("draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms")  # what the time of a cycle is made of


def need(table: pd.DataFrame, *columns: str) -> None:
    """SpecdecError unless the table has rows and these columns."""
    for name in columns:
        if name not in table:
            raise nearest_name_error("column", name, table.columns)
    if table.empty:
        raise SpecdecError(f"there is nothing to show: the table has no rows ({', '.join(columns)}).")


def paper_table(table: pd.DataFrame, value: str, *, rows="method", columns="suite", digits=2, published=None):
    """One quantity as the papers print it: `rows` down, `columns` across, both in order of appearance.

    table: long rows such as stats.compare's. Where `<value>_low` and `<value>_high` exist, a cell reads
    "2.31 [2.20, 2.42]". published: long rows with the same three columns; each of its numbers stands in a column
    "<column> (published)" right of ours, and a row that only one side has stays, with a dash for the other.
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
    names = [value, f"{value}_low", f"{value}_high"]
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


def read_published(paper: str, item: str) -> pd.DataFrame:
    """The paper's own numbers, figures/published/<paper>_<item>.csv of the checkout."""
    path = machine.checkout() / "figures" / "published" / f"{runs.plain_name(paper)}_{runs.plain_name(item)}.csv"
    if not path.is_file():
        raise nearest_name_error("published table", path.stem, [table.stem for table in path.parent.glob("*.csv")])
    return pd.read_csv(path, comment="#")


def markdown(table: pd.DataFrame, digits: int = 2) -> str:
    """The table in markdown; numbers with `digits` decimals, whole numbers as they are, what is missing as a dash."""
    shown = table.copy()
    for name in shown.columns[shown.dtypes.map(lambda kind: kind.kind == "f")]:
        column = shown[name]
        decimals = 0 if (column.dropna() % 1 == 0).all() else digits
        shown[name] = [f"{value:.{decimals}f}" if np.isfinite(value) else "-" for value in column]
    named = shown.index.name is not None or not isinstance(shown.index, pd.RangeIndex)
    return shown.to_markdown(index=named, disable_numparse=True)


def save(table: pd.DataFrame, stem: Path, *, scale: str, sources=(), digits: int = 2) -> list[Path]:
    """Write <stem>.md and <stem>.csv, and <stem>.json with the runs (labels of `sources`) they come from."""
    stem, note = Path(stem), "" if runs.known_scale(scale) == "paper" else f"*{scale} scale*\n\n"
    label = {"scale": scale, "runs": [run.label() for run in sources], **machine.commit()}
    return [
        runs.write_text(stem.with_name(f"{stem.name}.md"), note + markdown(table, digits) + "\n"),
        runs.write_text(stem.with_name(f"{stem.name}.csv"), table.to_csv(index=table.index.name is not None)),
        runs.write_json(stem.with_name(f"{stem.name}.json"), label),
    ]
