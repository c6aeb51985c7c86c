"""Tables from rows of parquet, as the papers print them, our values next to the published ones."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.errors import SpecdecError, check_name
from specdec.evaluation.stats import LEAST_PROMPTS
from specdec.report import provenance

PARTS = ("draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms")  # parts of a cycle's time


def need(table: pd.DataFrame, *columns: str) -> None:
    """SpecdecError unless the table has rows and these columns."""
    for name in columns:
        check_name("column", name, table)
    if table.empty:
        raise SpecdecError(
            f"there is nothing to show: the table has no rows ({', '.join(columns)})."
        )


def surely(table: pd.DataFrame) -> pd.DataFrame:
    """The table without intervals (low, high, <value>_low, <value>_high) of rows with fewer than
    LEAST_PROMPTS `prompts`.
    """
    if "prompts" not in table:
        return table
    few = pd.to_numeric(table["prompts"], errors="coerce") < LEAST_PROMPTS
    return table.assign(
        **{name: table[name].mask(few) for name in table if str(name).endswith(("low", "high"))}
    )


def paper_table(table: pd.DataFrame, value: str, *, rows="method", columns="suite", digits=2):
    """One quantity as the papers print it: `rows` down, `columns` across, both in order of
    appearance.

    table: long rows such as stats.compare's. With `<value>_low` and `<value>_high` a cell reads
    "2.31 [2.20, 2.42]", unless its row rests on fewer than LEAST_PROMPTS `prompts`. A missing cell
    is a dash.
    """
    need(table, rows, columns, value)
    if len(twice := table.loc[table.duplicated([rows, columns]), [rows, columns]]):
        raise SpecdecError(
            f"two rows stand for {twice.iloc[0].tolist()}; select one run or aggregate first."
        )
    wide = table.assign(cell=cells(table, value, digits)).pivot(
        index=rows, columns=columns, values="cell"
    )
    across, down = list(dict.fromkeys(table[columns])), list(dict.fromkeys(table[rows]))
    return wide.loc[down, across].fillna("-").rename_axis(columns=None)


def cells(table: pd.DataFrame, value: str, digits: int | None = 2) -> list[str | None]:
    """The printed form of each row's value, with its interval, if any, or else its deviation
    (<value>_sd); None for
    a missing value.

    digits: decimals, of which a smaller number has as many as it needs; None for as few as each
    number needs.

    >>> cells(pd.DataFrame({"x": [64.0, 0.0003]}), "x"), cells(pd.DataFrame({"x": [64.0]}), "x",
    digits=None) (['64.00', '0.0003'], ['64'])
    """
    names, table = [value, f"{value}_low", f"{value}_high"], surely(table)
    found = []
    for numbers in table[[name for name in names if name in table]].itertuples(index=False):
        shown = [_number(number, digits) for number in numbers if pd.notna(number)]
        found.append(
            f"{shown[0]} [{shown[1]}, {shown[2]}]"
            if len(shown) == 3
            else shown[0]
            if shown
            else None
        )
    spreads = table.get(f"{value}_sd", pd.Series(float("nan"), table.index))
    told = [f" ± {_number(sd, digits)}" if pd.notna(sd) else "" for sd in spreads]
    return [text and text + spread for text, spread in zip(found, told, strict=True)]


def _number(number: float, digits: int | None) -> str:
    if digits is None:
        return f"{number:.6g}"
    return f"{number:.2g}" if 0 < abs(number) < 0.5 * 10**-digits else f"{number:.{digits}f}"


def time_split(cycles: pd.DataFrame, by="method") -> pd.DataFrame:
    """Mean milliseconds per cycle and their shares: index `by`; the parts, total_ms, and
    <part>_frac of each part.

    cycles: rows of cycles.parquet. Time outside all laps is host time, so the parts sum to the
    total.
    """
    need(cycles, by, "total_ms", *PARTS)
    means = cycles.groupby(by, sort=False)[[*PARTS, "total_ms"]].mean()
    shares = means[list(PARTS)].div(means["total_ms"], axis=0)
    return means.join(shares.rename(columns=lambda name: name.replace("_ms", "_frac")))


def acceptance_by_depth(cycles: pd.DataFrame, by="method") -> pd.DataFrame:
    """Acceptance rate of the d-th draft token once the d-1 before it are accepted: columns `by`,
    depth, reached,
    acceptance_frac. Cycles whose tree was shallower than d do not count (longest path =
    draft_calls).
    """
    need(cycles, by, "accepted_tok", "draft_calls")
    rows = []
    for name, part in cycles.groupby(by, sort=False):
        for depth in range(1, int(part["draft_calls"].max()) + 1):
            reached = (part["accepted_tok"] >= depth - 1) & (part["draft_calls"] >= depth)
            if reached.any():
                rate = float((part.loc[reached, "accepted_tok"] >= depth).mean())
                rows.append(
                    {
                        by: name,
                        "depth": depth,
                        "reached": int(reached.sum()),
                        "acceptance_frac": rate,
                    }
                )
    return pd.DataFrame(rows)


def node_curve(cycles: pd.DataFrame, by="method") -> pd.DataFrame:
    """Median milliseconds against verified tokens: columns `by`, verified_tok, cycles, the parts
    and total_ms.
    """
    need(cycles, by, "verified_tok", "total_ms", *PARTS)
    grouped = cycles.groupby([by, "verified_tok"], sort=True)
    return (
        grouped[[*PARTS, "total_ms"]].median().join(grouped.size().rename("cycles")).reset_index()
    )


def markdown(table: pd.DataFrame, digits: int = 2) -> str:
    """The table in markdown; numbers with `digits` decimals, integers without, missing values as a
    dash.
    """
    shown = _printed(table, digits)
    return shown.to_markdown(index=_named(shown), disable_numparse=True)


def latex(table: pd.DataFrame, caption: str, label: str, digits: int = 2) -> str:
    """The same as a LaTeX table (booktabs, graphicx) with a caption, no wider than the text."""
    shown = _printed(table, digits)
    return latex_table(shown.to_latex(index=_named(shown), escape=True).strip(), caption, label)


def latex_table(tabular: str, caption: str, label: str, notes: str = "") -> str:
    """A tabular as a float that shrinks to the width of the text, with its caption above and notes
    in LaTeX below.
    """
    fitted = f"\\resizebox{{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}}{{!}}{{%\n{tabular}}}"
    below = f"\n\n\\parbox{{\\linewidth}}{{\\scriptsize\\raggedright {notes}}}" if notes else ""
    head = f"\\begin{{table}}[t]\n\\centering\n\\caption{{{escaped(caption)}}}\n\\label{{{label}}}"
    return f"{head}\n{fitted}{below}\n\\end{{table}}\n"


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


def escaped(text: str) -> str:
    """Text for LaTeX.

    >>> escaped("6 % of A_1")
    '6 \\\\% of A\\\\_1'
    """
    for letter, written in {
        "\\": r"\textbackslash ",
        "~": r"\textasciitilde ",
        "^": r"\textasciicircum ",
    }.items():
        text = text.replace(letter, written)
    return "".join(f"\\{letter}" if letter in "&%$#_{}" else letter for letter in text)


def save(
    table: pd.DataFrame, stem: Path, *, sources=(), digits: int = 2, about: dict | None = None
) -> list[Path]:
    """Write <stem>.md, with its provenance label on top, <stem>.csv, and <stem>.json with the
    sources.

    sources: Runs, as in `provenance.of`. about: more facts for the json file; with a `title` among
    them <stem>.tex is written too.
    """
    csv = table.to_csv(index=table.index.name is not None)
    in_latex = functools.partial(latex, table, digits=digits)
    return write(
        stem,
        markdown(table, digits),
        csv,
        in_latex,
        origin=provenance.of(sources, table),
        about=about,
    )


def write(
    stem: Path, shown: str, csv: str, in_latex, *, origin, about: dict | None = None
) -> list[Path]:
    """Write the files of `save` from their texts. in_latex: function of a caption and a label.
    origin: a Provenance.
    """
    stem, about = Path(stem), about or {}
    texts = {"md": f"*{origin.label}*\n\n{shown}\n", "csv": csv}
    if "title" in about:
        caption = f"{about['title']} ({origin.caption.rstrip('.')})."
        texts["tex"] = in_latex(caption, f"tab:{stem.parent.name}-{stem.name}")
    written = [
        runs.write_text(stem.with_name(f"{stem.name}.{kind}"), text) for kind, text in texts.items()
    ]
    return [
        *written,
        runs.write_json(stem.with_name(f"{stem.name}.json"), {**origin.record(), **about}),
    ]
