"""Tables from rows of parquet, as the papers print them, our values next to the published ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.errors import SpecdecError, check_name
from specdec.evaluation.stats import LEAST_PROMPTS
from specdec.report import provenance

# parts of a cycle's time
PARTS = ("draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms")


def need(table: pd.DataFrame, *columns: str) -> None:
    """SpecdecError unless the table has rows and these columns."""
    for name in columns:
        check_name("column", name, table)
    if table.empty:
        why = "there is nothing to show: the table has no rows"
        raise SpecdecError(f"{why} ({', '.join(columns)}).")


def surely(table: pd.DataFrame) -> pd.DataFrame:
    """The table without intervals of rows with fewer than LEAST_PROMPTS `prompts`.

    Intervals are the columns low, high, <value>_low and <value>_high.
    """
    if "prompts" not in table:
        return table
    few = pd.to_numeric(table["prompts"], errors="coerce") < LEAST_PROMPTS
    result = table.copy()
    for name in table:
        if str(name).endswith(("low", "high")):
            result[name] = table[name].mask(few)
    return result


def paper_table(table: pd.DataFrame, value: str, *, rows="method", columns="suite", digits=2):
    """One quantity as the papers print it: `rows` down, `columns` across, as they appear.

    table: long rows such as stats.compare's. With `<value>_low` and `<value>_high` a cell reads
    "2.31 [2.20, 2.42]", unless its row rests on fewer than LEAST_PROMPTS `prompts`. A missing cell
    is a dash.
    """
    need(table, rows, columns, value)
    repeated = table.loc[table.duplicated([rows, columns]), [rows, columns]]
    if len(repeated):
        why = f"two rows stand for {repeated.iloc[0].tolist()}"
        raise SpecdecError(f"{why}; select one run or aggregate first.")
    long = table.assign(cell=cells(table, value, digits))
    wide = long.pivot(index=rows, columns=columns, values="cell")
    wide = wide.loc[table[rows].unique(), table[columns].unique()]
    return wide.fillna("-").rename_axis(columns=None)


def cells(table: pd.DataFrame, value: str, digits: int | None = 2) -> list[str | None]:
    """The printed form of each row's value, None for a missing value.

    It has its interval, if any, or else its deviation (<value>_sd). digits: decimals, of which a
    smaller number has as many as it needs; None for as few as each number needs.

    >>> cells(pd.DataFrame({"x": [64.0, 0.0003]}), "x")
    ['64.00', '0.0003']
    >>> cells(pd.DataFrame({"x": [64.0]}), "x", digits=None)
    ['64']
    """
    result: list[str | None] = []
    for row in surely(table).to_dict("records"):
        if pd.isna(row[value]):
            result.append(None)
            continue
        cell = _number(row[value], digits)
        low, high = row.get(f"{value}_low"), row.get(f"{value}_high")
        if pd.notna(low) and pd.notna(high):
            cell += f" [{_number(low, digits)}, {_number(high, digits)}]"
        if pd.notna(row.get(f"{value}_sd")):
            cell += f" ± {_number(row[f'{value}_sd'], digits)}"
        result.append(cell)
    return result


def _number(number: float, digits: int | None) -> str:
    if digits is None:
        return f"{number:.6g}"
    if 0 < abs(number) < 0.5 * 10**-digits:
        return f"{number:.2g}"
    return f"{number:.{digits}f}"


def time_split(cycles: pd.DataFrame, by="method") -> pd.DataFrame:
    """Mean milliseconds per cycle and their shares, by `by`.

    cycles: rows of cycles.parquet. Returns the parts, total_ms, and <part>_frac of each part. Time
    outside all laps is host time, so the parts sum to the total.
    """
    need(cycles, by, "total_ms", *PARTS)
    means = cycles.groupby(by, sort=False)[[*PARTS, "total_ms"]].mean()
    shares = means[list(PARTS)].div(means["total_ms"], axis=0)
    return means.join(shares.rename(columns=lambda name: name.replace("_ms", "_frac")))


def acceptance_by_depth(cycles: pd.DataFrame, by="method") -> pd.DataFrame:
    """Acceptance rate of the d-th draft token once the d-1 before it are accepted.

    Columns: `by`, depth, reached, acceptance_frac. Cycles whose tree was shallower than d do not
    count (longest path = draft_calls).
    """
    need(cycles, by, "accepted_tok", "draft_calls")
    parts = []
    for depth in range(1, int(cycles["draft_calls"].max()) + 1):
        # a shallower tree says nothing of this depth
        reached = (cycles["accepted_tok"] >= depth - 1) & (cycles["draft_calls"] >= depth)
        groups = (cycles.loc[reached, "accepted_tok"] >= depth).groupby(cycles[by], sort=False)
        rates = groups.agg(reached="size", acceptance_frac="mean")
        parts.append(rates.assign(depth=depth).reset_index())
    return pd.concat(parts)[[by, "depth", "reached", "acceptance_frac"]]


def markdown(table: pd.DataFrame, digits: int = 2) -> str:
    """The table in markdown.

    Numbers have `digits` decimals, columns of integers none; a missing value is a dash.
    """
    printed = _printed(table, digits)
    return printed.to_markdown(index=_has_names(printed), disable_numparse=True)


def latex_table(tabular: str, caption: str, label: str, notes: str = "") -> str:
    """A tabular as a float, no wider than the text, its caption above and notes in LaTeX below."""
    width = "\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi"
    lines = ["\\begin{table}[t]", "\\centering", f"\\caption{{{escaped(caption)}}}"]
    lines += [f"\\label{{{label}}}", f"\\resizebox{{{width}}}{{!}}{{%", f"{tabular}}}"]
    if notes:
        lines += ["", f"\\parbox{{\\linewidth}}{{\\scriptsize\\raggedright {notes}}}"]
    return "\n".join([*lines, "\\end{table}", ""])


def _printed(table: pd.DataFrame, digits: int) -> pd.DataFrame:
    """Every number as text."""
    printed = surely(table).copy()
    for name in printed.select_dtypes("float").columns:
        column = printed[name]
        # numbers of prompts, which a missing one made floats
        is_whole = (column.dropna() % 1 == 0).all()
        form = "{:.0f}" if is_whole else f"{{:.{digits}f}}"
        printed[name] = column.map(form.format).where(np.isfinite(column), "-")
    # what is no number and missing
    for name in printed.columns[printed.isna().any()]:
        column = printed[name]
        printed[name] = column.astype(object).where(column.notna(), "-")
    return printed


def _has_names(table: pd.DataFrame) -> bool:
    """Whether its index is more than the number of the row."""
    return table.index.name is not None or not isinstance(table.index, pd.RangeIndex)


def escaped(text: str) -> str:
    """Text for LaTeX.

    >>> escaped("6 % of A_1")
    '6 \\\\% of A\\\\_1'
    """
    text = text.replace("\\", "\\textbackslash ")
    text = text.replace("~", "\\textasciitilde ")
    text = text.replace("^", "\\textasciicircum ")
    return re.sub(r"([&%$#_{}])", r"\\\1", text)


def save(
    table: pd.DataFrame, stem: Path, *, sources=(), digits: int = 2, about: dict | None = None
) -> list[Path]:
    """Write <stem>.md, with its provenance label on top, <stem>.csv, and <stem>.json.

    sources: Runs, as in `provenance.of`. about: more facts for the json file; with a `title` among
    them <stem>.tex is written too.
    """

    def latex(caption: str, label: str) -> str:
        printed = _printed(table, digits)
        tabular = printed.to_latex(index=_has_names(printed), escape=True).strip()
        return latex_table(tabular, caption, label)

    # an index without a name is a number of rows and says nothing
    csv = table.to_csv(index=table.index.name is not None)
    origin = provenance.of(sources, table)
    return write(stem, markdown(table, digits), csv, latex, origin=origin, about=about)


def write(
    stem: Path, shown: str, csv: str, latex: Callable, *, origin, about: dict | None = None
) -> list[Path]:
    """Write the files of `save` from their texts; `latex` makes one of a caption and a label."""
    stem = Path(stem)
    about = about or {}
    texts = {"md": f"*{origin.label}*\n\n{shown}\n", "csv": csv}
    if "title" in about:
        caption = f"{about['title']} ({origin.caption.rstrip('.')})."
        texts["tex"] = latex(caption, f"tab:{stem.parent.name}-{stem.name}")
    written = []
    for kind, text in texts.items():
        written.append(runs.write_text(stem.with_name(f"{stem.name}.{kind}"), text))
    record = {**origin.record(), **about}
    written.append(runs.write_json(stem.with_name(f"{stem.name}.json"), record))
    return written
