"""A paper's table, and ours below it with the same columns.

    PaperTable.of(measured, published, how="make book ...").markdown()

    *The paper*          | model        | row    | MT-bench | GSM8K |
    *Measured here*      | smollm2      | LTD    | 1.06     | 1.02  |
    Not measured here: GS. To measure it: make book ...

The paper's rows are printed as in the paper. A number in doubt carries a mark, with its remark
below the table. A table of more than MAX_COLUMNS columns is printed in parts, one for each metric.
Knows nothing about any paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pandas as pd

from specdec.errors import SpecdecError
from specdec.report import tables
from specdec.report.tables import need

MAX_COLUMNS = 12  # of a printed table, its rows' names included
PUBLISHED, MEASURED = "The paper", "Measured here"


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """published, measured: cells as text, rows by name and columns by (column, metric).

    notes: sentences below the table. lacking: rows of the paper without a number of ours. doubts:
    what is said against printed numbers.
    """

    published: pd.DataFrame
    measured: pd.DataFrame
    notes: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, measured, published, value: str = "value", *, how: str = "", digits=2
    ) -> PaperTable:
        """From long rows with row, column, metric and `value`, or None where there are none.

        measured: also pair, prompts or turns, the ends of an interval. published: also target and
        doubt. how: the command that measures what is missing. digits: of all or {metric: digits}.
        """
        # 1. both sides, their columns and the marks of doubts
        theirs = _filled(published, "target", value)
        ours = _filled(measured, "pair", value)
        sides = [side for side in (theirs, ours) if len(side)]
        if not sides:
            raise SpecdecError("there is nothing to show: neither measured nor published rows.")
        heads = {}
        for side in sides:
            heads |= dict.fromkeys(zip(side["column"], side["metric"], strict=True))
        several = len(sides) > 1 or any(side["whose"].nunique() > 1 for side in sides)
        keys = ["whose", "row"] if several else ["row"]
        doubts = [doubt for doubt in dict.fromkeys(theirs["doubt"]) if doubt]
        marks = {doubt: chr(ord("a") + place) for place, doubt in enumerate(doubts)}
        # 2. a block of cells for each side
        theirs["text"] = _texts(theirs, value, digits)
        ours["text"] = _texts(ours, value, digits)
        blocks = [_block(side, list(heads), keys, marks) for side in (theirs, ours)]
        # 3. the sentences below
        notes = [f"({mark}) {doubt}" for doubt, mark in marks.items()] + _equal(ours)
        rows = set(ours["row"])
        lacking = [row for row in dict.fromkeys(theirs["row"]) if row not in rows]
        if lacking:
            notes.append(f"Not measured here: {', '.join(lacking)}.")
            if how:
                notes[-1] += f" To measure: `{how}`."
        return cls(*blocks, tuple(notes), tuple(lacking), tuple(doubts))

    @property
    def counts(self) -> dict[str, int]:
        """Rows of ours, and rows of the paper without one of ours."""
        lacking = len(self.lacking)
        return {"measured": len(self.measured), "published_only": lacking, "not_measured": 0}

    @property
    def heads(self) -> list[tuple[str, str]]:
        return list((self.published if len(self.published) else self.measured).columns)

    def parts(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """(metric, columns) of each printed part; the metric is "" where one part holds all."""
        names = max(self.published.index.nlevels, self.measured.index.nlevels)
        metrics = list(dict.fromkeys(metric for _, metric in self.heads))
        room = MAX_COLUMNS - names
        for metric in [""] if len(self.heads) <= room else metrics:
            heads = [head for head in self.heads if metric in ("", head[1])]
            for first in range(0, len(heads), room):
                yield metric, heads[first : first + room]

    def blocks(self, heads: list[tuple[str, str]]) -> Iterator[tuple[str, pd.DataFrame]]:
        """(title, cells) of each block, without the rows that are empty in these columns."""
        for title, block in ((PUBLISHED, self.published), (MEASURED, self.measured)):
            if len(block):
                block = block[heads][block[heads].notna().any(axis=1)]
            if len(block):
                yield title, block.fillna("-")

    def markdown(self) -> str:
        """The parts in markdown, block by block, with the notes below."""
        texts = []
        for metric, heads in self.parts():
            for title, block in self.blocks(heads):
                texts.append(f"*{', '.join(filter(None, [title, metric]))}*")
                named = block.set_axis(_flat(heads, metric), axis=1).reset_index()
                texts.append(named.to_markdown(index=False, disable_numparse=True))
        return "\n\n".join([*texts, *self.notes])

    def to_csv(self) -> str:
        """All cells, with a column `whose` in front; one table, however wide."""
        shown = []
        for title, block in self.blocks(self.heads):
            named = block.set_axis(_flat(self.heads, ""), axis=1).reset_index()
            shown.append(named.assign(whose=title))
        table = pd.concat(shown, ignore_index=True)
        return table[["whose", *table.columns.drop("whose")]].fillna("-").to_csv(index=False)

    def latex(self, caption: str, label: str) -> str:
        """The parts as LaTeX tables (booktabs, graphicx), grouped heads where metrics differ."""
        parts = list(self.parts())
        texts = []
        for place, (metric, heads) in enumerate(parts, 1):
            blocks = list(self.blocks(heads))
            names = max((block.index.names for _, block in blocks), key=len)
            width = len(names) + len(heads)
            lines = ["\\toprule", *_latex_head(names, heads, metric)]
            for title, block in blocks:
                lines.append(f"\\midrule\n\\multicolumn{{{width}}}{{l}}{{\\emph{{{title}}}}} \\\\")
                for row in block.reset_index().itertuples(index=False):
                    lines.append(_latex_row(list(row)))
            body = "\n".join([*lines, "\\bottomrule"])
            aligned = "l" * len(names) + "r" * len(heads)
            tabular = f"\\begin{{tabular}}{{{aligned}}}\n{body}\n\\end{{tabular}}"
            head = f"{caption} Part {place}: {metric}." if metric else caption
            notes = ""
            if place == len(parts):
                notes = "\\\\\n".join(map(tables.escaped, self.notes))
            part_label = label if place == 1 else f"{label}-{place}"
            texts.append(tables.latex_table(tabular, head, part_label, notes))
        return "\n".join(texts)


def _filled(side, whose: str, value: str) -> pd.DataFrame:
    """Long rows of one side with all columns that are read; an empty frame for None."""
    usual = {"metric": "", "doubt": "", "prompts": np.nan, "turns": np.nan}
    if side is None or side.empty:
        return pd.DataFrame(columns=["whose", "row", "column", *usual, value])
    need(side, "row", "column", value)
    side = side.reset_index(drop=True)
    for name, content in usual.items():
        if name not in side:
            side[name] = content
    side["whose"] = side.get(whose, PUBLISHED)
    texts = {name: side[name].astype(str) for name in ("row", "column", "metric", "whose")}
    return side.assign(**texts, doubt=side["doubt"].fillna(""))


def _texts(side: pd.DataFrame, value: str, digits) -> pd.Series:
    """The printed form of each row; digits: of all, or {metric: digits} where 2 is usual."""
    texts = pd.Series(None, side.index, dtype=object)
    for metric, rows in side.groupby("metric"):
        places = digits.get(metric, 2) if isinstance(digits, dict) else digits
        texts[rows.index] = tables.cells(rows, value, places)
    return texts


def _block(side: pd.DataFrame, heads: list, keys: list[str], marks: dict[str, str]) -> pd.DataFrame:
    """One side as cells: rows by `keys`, columns by `heads`."""
    columns = pd.MultiIndex.from_tuples(heads)
    if side.empty:
        return pd.DataFrame(columns=columns)
    cells = []
    for text, doubt in zip(side["text"], side["doubt"], strict=True):
        cells.append(f"{text} ({marks[doubt]})" if doubt and text else text)
    long = side.assign(cell=cells, row=side["row"] + _counted(side))
    twice = long[long.duplicated([*keys, "column", "metric"])]
    if len(twice):
        names = twice[[*keys, "column", "metric"]].iloc[0].tolist()
        raise SpecdecError(f"two rows stand for {names}; select one run or aggregate first.")
    wide = long.pivot(index=keys, columns=["column", "metric"], values="cell")
    order = long[keys].drop_duplicates()
    if len(keys) == 1:
        wide = wide.loc[order["row"].tolist()].rename_axis(index=["row"])
    else:
        wide = wide.loc[list(order.itertuples(index=False, name=None))]
        wide = wide.rename_axis(index=["model", "row"])
    return wide.reindex(columns=columns)


def _counted(side: pd.DataFrame) -> pd.Series:
    """', n = 3' behind the name of a row, 'n = 3 to 5' where its cells differ.

    So many prompts its cells rest on; of cells that only know their turns, 'n = 3 turns'.
    """
    counted = pd.Series("", side.index, dtype=object)
    for column, unit in {"turns": " turns", "prompts": ""}.items():
        counts = pd.to_numeric(side[column], errors="coerce")
        groups = counts.groupby([side["whose"], side["row"]])
        ends = zip(side.index, groups.transform("min"), groups.transform("max"), strict=True)
        for place, low, high in ends:
            if low > 0:
                most = f" to {high:.0f}" if high > low else ""
                counted[place] = f", n = {low:.0f}{most}{unit}"
    return counted


def _equal(side: pd.DataFrame) -> list[str]:
    """Sentences that name the rows of several numbers which are equal in every printed digit."""
    alike: dict[tuple, list[str]] = {}
    for (whose, row), cells in side.groupby(["whose", "row"], sort=False):
        if len(cells) > 1 and cells["text"].notna().all():
            facts = sorted(zip(cells["column"], cells["metric"], cells["text"], strict=True))
            alike.setdefault((whose, *facts), []).append(row)
    sentences = []
    for (whose, *_), rows in alike.items():
        if len(rows) > 1:
            sentences.append(f"Equal in every digit ({whose}): {'; '.join(rows)}.")
    return sentences


def _flat(heads: list[tuple[str, str]], metric: str) -> list[str]:
    """Names of columns in one line, without the metric where it is said above or all there is."""
    if metric or len({name for _, name in heads}) == 1:
        return [column for column, _ in heads]
    return [f"{column}, {name}" if name else column for column, name in heads]


def _latex_head(names: list[str], heads: list[tuple[str, str]], metric: str) -> list[str]:
    groups = pd.Series([column for column, _ in heads]).value_counts(sort=False)
    if metric or groups.max() == 1:
        return [_latex_row([*names, *_flat(heads, metric)])]
    above = []
    for column, count in groups.items():
        above.append(f"\\multicolumn{{{count}}}{{c}}{{{tables.escaped(column)}}}")
    empty = " & " * (len(names) - 1)
    below = _latex_row([*names, *(name for _, name in heads)])
    return [f"{empty} & {' & '.join(above)} \\\\", below]


def _latex_row(cells: list[str]) -> str:
    return " & ".join(map(tables.escaped, cells)) + " \\\\"
