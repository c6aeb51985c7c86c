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
BLOCKS = {"published": "The paper", "measured": "Measured here"}


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """published, measured: cells as text, rows by name and columns by (column, metric); either may
    be empty.

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

        measured: also pair, perhaps prompts (else turns) and the ends of an interval. Rows that
        are equal in every digit are named below. published: also target and doubt. how: the
        command that measures what is missing, said once below the table. digits: as in
        `tables.cells`, or {metric: digits}.
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
        doubts = [doubt for doubt in dict.fromkeys(theirs["doubt"]) if doubt]
        marks = {doubt: chr(ord("a") + place) for place, doubt in enumerate(doubts)}
        # 2. a block of cells for each side
        blocks = []
        for side in (theirs, ours):
            blocks.append(_block(side, value, list(heads), several, marks, digits))
        # 3. the sentences below
        notes = [f"({mark}) {doubt}" for doubt, mark in marks.items()]
        notes += _equal(ours, _texts(ours, value, digits))
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
        return {
            "measured": len(self.measured),
            "published_only": len(self.lacking),
            "not_measured": 0,
        }

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
        for name, title in BLOCKS.items():
            block = getattr(self, name)
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
        shown = [
            block.set_axis(_flat(self.heads, ""), axis=1).reset_index().assign(whose=title)
            for title, block in self.blocks(self.heads)
        ]
        table = pd.concat(shown, ignore_index=True)
        return table[["whose", *table.columns.drop("whose")]].fillna("-").to_csv(index=False)

    def latex(self, caption: str, label: str) -> str:
        """The parts as LaTeX tables (booktabs, graphicx).

        The paper's columns are grouped where each has several metrics.
        """
        parts = list(self.parts())
        texts = []
        for place, (metric, heads) in enumerate(parts, 1):
            names = max((block.index.names for _, block in self.blocks(heads)), key=len)
            lines = ["\\toprule", *_latex_head(names, heads, metric)]
            lines += [*_latex_rows(self, heads, len(names)), "\\bottomrule"]
            body = "\n".join(lines)
            aligned = "l" * len(names) + "r" * len(heads)
            tabular = f"\\begin{{tabular}}{{{aligned}}}\n{body}\n\\end{{tabular}}"
            head = f"{caption} Part {place}: {metric}." if metric else caption
            notes = ""
            if place == len(parts):
                notes = "\\\\\n".join(map(tables.escaped, self.notes))
            own_label = label if place == 1 else f"{label}-{place}"
            texts.append(tables.latex_table(tabular, head, own_label, notes))
        return "\n".join(texts)


def _filled(side, whose: str, value: str) -> pd.DataFrame:
    """Long rows of one side with all columns that are read; an empty frame for None."""
    columns = ["whose", "row", "column", "metric", "doubt", "prompts", "turns", value]
    if side is None or side.empty:
        return pd.DataFrame(columns=columns)
    need(side, "row", "column", value)
    side = side.reset_index(drop=True)
    usual = {
        "metric": "",
        "doubt": "",
        "prompts": np.nan,
        "turns": np.nan,
        "whose": side.get(whose, BLOCKS["published"]),
    }
    side = side.assign(**{name: content for name, content in usual.items() if name not in side})
    texts = {name: side[name].astype(str) for name in ("row", "column", "metric", "whose")}
    return side.assign(**texts, doubt=side["doubt"].fillna(""))


def _block(
    side: pd.DataFrame, value: str, heads: list, several: bool, marks: dict[str, str], digits
) -> pd.DataFrame:
    if side.empty:
        return pd.DataFrame(columns=pd.MultiIndex.from_tuples(heads))
    texts = zip(_texts(side, value, digits), side["doubt"], strict=True)
    cells = [f"{text} ({marks[doubt]})" if doubt and text else text for text, doubt in texts]
    long, keys = (
        side.assign(cell=cells, row=side["row"] + _counted(side)),
        ["whose", "row"][not several :],
    )
    twice = long[long.duplicated([*keys, "column", "metric"])]
    if len(twice):
        names = twice[[*keys, "column", "metric"]].iloc[0].tolist()
        raise SpecdecError(f"two rows stand for {names}; select one run or aggregate first.")
    wide = long.pivot(index=keys, columns=["column", "metric"], values="cell")
    order = list(dict.fromkeys(_rows(long, keys)))
    wide = wide.loc[order if several else [name for (name,) in order]]
    return wide.reindex(columns=pd.MultiIndex.from_tuples(heads)).rename_axis(
        index=["model", "row"][not several :]
    )


def _rows(table: pd.DataFrame, columns: list[str]):
    return table[columns].itertuples(index=False, name=None)


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


def _equal(side: pd.DataFrame, texts: list) -> list[str]:
    """Sentences that name the rows of several numbers which are equal in every printed digit."""
    alike: dict[tuple, list[str]] = {}
    for (whose, row), cells in side.assign(text=texts).groupby(["whose", "row"], sort=False):
        if len(cells) > 1 and cells["text"].notna().all():
            facts = sorted(zip(cells["column"], cells["metric"], cells["text"], strict=True))
            alike.setdefault((whose, *facts), []).append(row)
    sentences = []
    for (whose, *_), rows in alike.items():
        if len(rows) > 1:
            sentences.append(f"Equal in every digit ({whose}): {'; '.join(rows)}.")
    return sentences


def _texts(side: pd.DataFrame, value: str, digits) -> list:
    """The printed form of each row; digits: of all, or {metric: digits} where 2 is usual."""
    if not isinstance(digits, dict):
        return tables.cells(side, value, digits)
    texts = pd.Series(None, side.index, dtype=object)
    for metric, rows in side.groupby("metric"):
        texts[rows.index] = tables.cells(rows, value, digits.get(metric, 2))
    return texts.tolist()


def _flat(heads: list[tuple[str, str]], metric: str) -> list[str]:
    """Names of columns in one line.

    Without the metric where it is said above or there is only one.
    """
    if metric or len({name for _, name in heads}) == 1:
        return [column for column, _ in heads]
    return [f"{column}, {name}" if name else column for column, name in heads]


def _latex_head(names: list[str], heads: list[tuple[str, str]], metric: str) -> list[str]:
    groups: dict[str, int] = {}
    for column, _ in heads:
        groups[column] = groups.get(column, 0) + 1
    if metric or max(groups.values()) == 1:
        return [_latex_row([*names, *_flat(heads, metric)])]
    above = []
    for column, count in groups.items():
        above.append(f"\\multicolumn{{{count}}}{{c}}{{{tables.escaped(column)}}}")
    empty = " & " * (len(names) - 1)
    return [
        f"{empty} & {' & '.join(above)} \\\\",
        _latex_row([*names, *(name for _, name in heads)]),
    ]


def _latex_row(cells: list[str]) -> str:
    return " & ".join(map(tables.escaped, cells)) + " \\\\"


def _latex_rows(table: PaperTable, heads: list[tuple[str, str]], names: int) -> Iterator[str]:
    for title, block in table.blocks(heads):
        width = names + len(heads)
        yield f"\\midrule\n\\multicolumn{{{width}}}{{l}}{{\\emph{{{title}}}}} \\\\"
        for name, cells in zip(block.index, block.itertuples(index=False), strict=True):
            labels = [name] if isinstance(name, str) else list(name)
            yield _latex_row([*labels, *cells])
