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

        measured: also pair, perhaps prompts (else turns) and the ends of an interval. Rows that are
        equal in every digit are named below.
        published: also target and doubt. how: the command that measures what is missing, said once
        below the table.
        digits: as in `tables.cells`, or {metric: digits}.
        """
        sides = [
            _filled(side, whose, value)
            for side, whose in ((published, "target"), (measured, "pair"))
        ]
        if not any(map(len, sides)):
            raise SpecdecError("there is nothing to show: neither measured nor published rows.")
        heads = list(
            dict.fromkeys(
                head
                for side in sides
                for head in side[["column", "metric"]].itertuples(index=False, name=None)
            )
        )
        several = (
            any(side["whose"].nunique() > 1 for side in sides)
            or sum(map(bool, map(len, sides))) > 1
        )
        doubts = [doubt for doubt in dict.fromkeys(sides[0]["doubt"]) if doubt]
        marks = {doubt: chr(ord("a") + place) for place, doubt in enumerate(doubts)}
        blocks = [_block(side, value, heads, several, marks, digits) for side in sides]
        known = set(sides[1]["row"])
        lacking = [row for row in dict.fromkeys(sides[0]["row"]) if row not in known]
        notes = [
            *(f"({mark}) {doubt}" for doubt, mark in marks.items()),
            *_equal(sides[1], _texts(sides[1], value, digits)),
        ]
        if lacking:
            notes.append(
                f"Not measured here: {', '.join(lacking)}."
                + (f" To measure: `{how}`." if how else "")
            )
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
            shown = block[heads][block[heads].notna().any(axis=1)] if len(block) else block
            if len(shown):
                yield title, shown.fillna("-")

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
        """The parts as LaTeX tables (booktabs, graphicx), with the paper's columns grouped where
        each has several metrics.
        """
        parts = list(self.parts())
        shown = []
        for place, (metric, heads) in enumerate(parts):
            body = "\n".join(
                [
                    "\\toprule",
                    *_latex_head(self, heads, metric),
                    *_latex_rows(self, heads),
                    "\\bottomrule",
                ]
            )
            names = max(block.index.nlevels for _, block in self.blocks(heads))
            tabular = (
                f"\\begin{{tabular}}{{{'l' * names}{'r' * len(heads)}}}\n{body}\n\\end{{tabular}}"
            )
            said = f"{caption}{f' Part {place + 1}: {metric}.' if metric else ''}"
            notes = "\\\\\n".join(
                map(tables.escaped, self.notes if place + 1 == len(parts) else ())
            )
            shown.append(
                tables.latex_table(
                    tabular, said, label if not place else f"{label}-{place + 1}", notes
                )
            )
        return "\n".join(shown)


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
    """', n = 3' behind the name of a row whose cells say how many prompts they rest on, 'n = 3 to
    5' where they differ; of cells that only know how many turns that is, 'n = 3 turns'.
    """
    said = pd.Series("", side.index, dtype=object)
    for column, unit in {"turns": " turns", "prompts": ""}.items():
        counts = pd.to_numeric(side[column], errors="coerce").groupby([side["whose"], side["row"]])
        ends = zip(counts.transform("min"), counts.transform("max"), strict=True)
        ranges = [
            f", n = {low:.0f}" + f" to {high:.0f}" * (high > low) + unit if low > 0 else ""
            for low, high in ends
        ]
        ranges = pd.Series(ranges, side.index, dtype=object)
        said = ranges.where(ranges != "", said)
    return said


def _equal(side: pd.DataFrame, texts: list) -> list[str]:
    """Sentences that name the rows of several numbers which are equal in every printed digit: they
    decode alike.
    """
    found: dict[tuple, list[str]] = {}
    for (whose, row), cells in side.assign(text=texts).groupby(["whose", "row"], sort=False):
        if len(cells) > 1 and cells["text"].notna().all():
            facts = sorted(zip(cells["column"], cells["metric"], cells["text"], strict=True))
            found.setdefault((whose, *facts), []).append(row)
    alike = [(whose, rows) for (whose, *_), rows in found.items() if len(rows) > 1]
    return [f"Equal in every digit ({whose}): {'; '.join(rows)}." for whose, rows in alike]


def _texts(side: pd.DataFrame, value: str, digits) -> list:
    """The printed form of each row; digits: of all, or {metric: digits} where 2 is usual."""
    if not isinstance(digits, dict):
        return tables.cells(side, value, digits)
    texts = pd.Series(None, side.index, dtype=object)
    for metric, rows in side.groupby("metric"):
        texts[rows.index] = tables.cells(rows, value, digits.get(metric, 2))
    return texts.tolist()


def _flat(heads: list[tuple[str, str]], metric: str) -> list[str]:
    """Names of columns in one line; without the metric where it is said above or there is only
    one.
    """
    alone = metric or len({one for _, one in heads}) == 1
    return [column if alone else ", ".join(filter(None, (column, one))) for column, one in heads]


def _latex_head(table: PaperTable, heads: list[tuple[str, str]], metric: str) -> list[str]:
    names = max((block.index.names for _, block in table.blocks(heads)), key=len)
    empty = " & " * (len(names) - 1)
    columns = list(dict.fromkeys(column for column, _ in heads))
    groups = [sum(column == one for one, _ in heads) for column in columns]
    if metric or max(groups) == 1:
        return [" & ".join(map(tables.escaped, [*names, *_flat(heads, metric)])) + " \\\\"]
    above = [
        f"\\multicolumn{{{count}}}{{c}}{{{tables.escaped(column)}}}"
        for column, count in zip(columns, groups, strict=True)
    ]
    return [
        f"{empty} & {' & '.join(above)} \\\\",
        " & ".join(map(tables.escaped, [*names, *(one for _, one in heads)])) + " \\\\",
    ]


def _latex_rows(table: PaperTable, heads: list[tuple[str, str]]) -> Iterator[str]:
    blocks = list(table.blocks(heads))
    names = max(block.index.nlevels for _, block in blocks)
    for title, block in blocks:
        yield f"\\midrule\n\\multicolumn{{{names + len(heads)}}}{{l}}{{\\emph{{{title}}}}} \\\\"
        for name, cells in zip(block.index, block.itertuples(index=False), strict=True):
            name = (name,) if isinstance(name, str) else name
            yield " & ".join(map(tables.escaped, [*name, *cells])) + " \\\\"
