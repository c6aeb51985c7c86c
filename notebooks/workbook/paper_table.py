"""A paper's table, and ours below it with the same columns.

The paper's rows are printed as in the paper. A number in doubt carries a mark, with its remark
below the table. A table of more than MAX_COLUMNS columns is printed in parts, one for each metric.
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

    lacking: rows of the paper without ours. doubts: what is said against printed numbers.
    """

    published: pd.DataFrame
    measured: pd.DataFrame
    notes: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @classmethod
    def of(cls, measured, published, *, how: str = "", digits=2) -> PaperTable:
        """From long rows with row, column, metric and value, or None where there are none.

        measured: also pair, prompts or turns, an interval. published: also target and doubt.
        how: measures what is missing. digits: of all or {metric: digits}.
        """
        # 1. both sides, their columns and the marks of doubts
        theirs = _filled(published, "target", digits)
        ours = _filled(measured, "pair", digits)
        sides = list(filter(len, (theirs, ours)))
        if not sides:
            raise SpecdecError("there is nothing to show: neither measured nor published rows.")
        heads = pd.concat(sides)[["column", "metric"]].drop_duplicates()
        keys = ["row"]
        # one pair on either side needs no column for its name
        if len(sides) > 1 or sides[0]["whose"].nunique() > 1:
            keys = ["whose", "row"]
        # a letter for each remark, in the order of the rows
        marks = {}
        notes = []
        for doubt in filter(None, theirs["doubt"].unique()):
            marks[doubt] = chr(ord("a") + len(marks))
            notes.append(f"({marks[doubt]}) {doubt}")
        # 2. a block of cells for each side
        columns = pd.MultiIndex.from_frame(heads, names=[None, None])
        published = _block(theirs, columns, keys, marks)
        measured = _block(ours, columns, keys, marks)
        # 3. the sentences below
        notes += _equal(ours)
        lacking = theirs.loc[~theirs["row"].isin(ours["row"]), "row"].unique().tolist()
        if lacking:
            notes.append(f"Not measured here: {', '.join(lacking)}.")
            if how:
                notes[-1] += f" To measure: `{how}`."
        return cls(published, measured, tuple(notes), tuple(lacking), tuple(marks))

    @property
    def counts(self) -> dict[str, int]:
        """Rows of ours, and rows of the paper without one of ours."""
        lacking = len(self.lacking)
        return {"measured": len(self.measured), "published_only": lacking, "not_measured": 0}

    @property
    def heads(self) -> list[tuple[str, str]]:
        block = self.published if len(self.published) else self.measured
        return list(block.columns)

    def parts(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """(metric, columns) of each printed part; the metric is "" where one part holds all."""
        names = max(self.published.index.nlevels, self.measured.index.nlevels)
        room = MAX_COLUMNS - names
        metrics = [""]
        if len(self.heads) > room:
            metrics = list(dict.fromkeys(_metrics(self.heads)))
        for metric in metrics:
            heads = [head for head in self.heads if metric in ("", head[1])]
            for first in range(0, len(heads), room):
                yield metric, heads[first : first + room]

    def blocks(self, heads: list[tuple[str, str]]) -> dict[str, pd.DataFrame]:
        """{title: cells} of each side, without the rows that are empty in these columns."""
        blocks = {}
        for title, block in ((PUBLISHED, self.published), (MEASURED, self.measured)):
            if len(block):
                block = block[heads][block[heads].notna().any(axis=1)]
            if len(block):
                blocks[title] = block.fillna("-")
        return blocks

    def markdown(self) -> str:
        """The parts in markdown, block by block, with the notes below."""
        texts = []
        for metric, heads in self.parts():
            for title, block in self.blocks(heads).items():
                texts.append(f"*{', '.join(filter(None, (title, metric)))}*")
                labelled = block.set_axis(_flat(heads, metric), axis=1).reset_index()
                texts.append(labelled.to_markdown(index=False, disable_numparse=True))
        return "\n\n".join([*texts, *self.notes])

    def to_csv(self) -> str:
        """All cells, with a column `whose` in front; one table, however wide."""
        table = pd.concat(self.blocks(self.heads), names=["whose"])
        return table.set_axis(_flat(self.heads, ""), axis=1).reset_index().to_csv(index=False)

    def latex(self, caption: str, label: str) -> str:
        """One LaTeX table (booktabs, graphicx), with grouped heads where metrics differ."""
        table = pd.concat(self.blocks(self.heads), names=[""])
        look = {"column_format": "l" * table.index.nlevels + "r" * len(self.heads)}
        if len(set(_metrics(self.heads))) == 1:
            table = table.set_axis(_flat(self.heads, ""), axis=1)
        table = table.reset_index()
        # the title of a block stands in its first row
        table.iloc[:, 0] = table.iloc[:, 0].mask(table.iloc[:, 0].duplicated(), "")
        tabular = table.to_latex(index=False, escape=True, multicolumn_format="c", **look)
        notes = "\\\\\n".join(map(tables.escaped, self.notes))
        return tables.latex_table(tabular.strip(), caption, label, notes)


def _filled(side, whose: str, digits) -> pd.DataFrame:
    """Long rows of one side with all columns that are read, and their printed form, text.

    An empty frame for None.
    """
    usual = {"metric": "", "doubt": "", "prompts": np.nan, "turns": np.nan}
    if side is None or side.empty:
        return pd.DataFrame(columns=["whose", "row", "column", *usual, "value", "text"])
    need(side, "row", "column", "value")
    side = side.reset_index(drop=True)
    usual["whose"] = side.get(whose, PUBLISHED)
    for name, content in usual.items():
        side[name] = side.get(name, content)
    side["doubt"] = side["doubt"].fillna("")
    names = ["row", "column", "metric", "whose"]
    side[names] = side[names].astype(str)
    side["text"] = pd.Series(None, side.index, dtype=object)
    for metric, rows in side.groupby("metric"):
        # 2 digits are usual
        places = digits.get(metric, 2) if isinstance(digits, dict) else digits
        side.loc[rows.index, "text"] = tables.cells(rows, "value", places)
    return side


def _block(side: pd.DataFrame, columns: pd.MultiIndex, keys: list[str], marks: dict[str, str]):
    """One side as cells: rows by `keys`, columns by (column, metric)."""
    if side.empty:
        return pd.DataFrame(columns=columns)
    doubted = (side["doubt"] != "") & side["text"].astype(bool)
    cells = side["text"].mask(doubted, side["text"] + " (" + side["doubt"].map(marks) + ")")
    long = side.assign(cell=cells, row=side["row"] + _counted(side))
    twice = long[long.duplicated([*keys, "column", "metric"])]
    if len(twice):
        names = twice[[*keys, "column", "metric"]].iloc[0].tolist()
        raise SpecdecError(f"two rows stand for {names}; select one run or aggregate first.")
    wide = long.pivot(index=keys, columns=["column", "metric"], values="cell")
    # pivot sorts; the rows stay as they came
    order = long.set_index(keys).index.unique()
    if len(keys) > 1:
        wide.index.names = ["model", "row"]
    return wide.loc[order].reindex(columns=columns)


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
                upper = f" to {high:.0f}" if high > low else ""
                counted[place] = f", n = {low:.0f}{upper}{unit}"
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


def _metrics(heads: list[tuple[str, str]]) -> list[str]:
    return [metric for _, metric in heads]


def _flat(heads: list[tuple[str, str]], metric: str) -> list[str]:
    """Names of columns in one line, without the metric where it is said above or all there is."""
    if metric or len(set(_metrics(heads))) == 1:
        return [column for column, _ in heads]
    return [", ".join(filter(None, head)) for head in heads]
