"""What the notebooks of the papers share: an item is read from finished runs, shown beside the paper, and says what it lacks.

    item = papers.Page(run, "resps", ["smollm2"]).item("table1")
    item.table(paper_rows.as_printed(item.read("controllers", "live_t0"), METHODS, SUITES, ["speedup"]))

Where a run is missing, `read` gives no rows, and the item is shown with the paper's own numbers and the name of what is
missing. Knows nothing about how anything was measured.
"""

from __future__ import annotations

import dataclasses

import pandas as pd

from specdec import runs
from specdec.identity import identified
from specdec.report import tables
from specdec.report.figures import drawn

from experiments.paper_rows import benchmark
from workbook import items

# Notebooks that compare methods, by the names of their runs: controllers, rules of engines, other drafters. Each may write
# live_t0, live_t1 and opponents_t0, opponents_t1 with columns suite, method, speedup and tau; papers' rows take methods by name.
COMPARED = ("controllers", "heuristics", "baselines")


@dataclasses.dataclass(frozen=True)
class Page:
    """A notebook that shows the items of one paper. run: its NotebookRun. pairs: whose rows it shows, in this order."""

    run: runs.Run
    paper: str
    pairs: list[str]

    def item(self, name: str, pairs: list[str] | None = None) -> Shown:
        """The item of this name, such as "table1", to be filled and shown. pairs: in place of the page's."""
        page = self if pairs is None else dataclasses.replace(self, pairs=pairs)
        return Shown(page, items.find_item(f"{self.paper}/{name}"))


@dataclasses.dataclass
class Shown:
    """One item on its way into the notebook: what was read for it, and what was not there."""

    page: Page
    item: items.Item
    sources: list[runs.Run] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)

    def read(self, name: str | tuple, table: str, keep: dict | None = None, fill=False, **parameters) -> pd.DataFrame:
        """Rows of `table` of each pair's newest finished run `name`, with a column pair; an empty frame where there is none.

        name: of several names each gives its rows, a method's from the first that measured it.
        keep: only rows with these values; a suite is known by its benchmark, in whatever form it was decoded.
        fill: a method's rows come from the first that measured it on this benchmark: what the first lacks, others fill. For
        replays, which take every prompt of their recording; a later live run may have had one prompt of a benchmark.
        parameters: what the run was measured with, as `items.measured` takes it.
        """
        names, found = [name] if isinstance(name, str) else list(name), []
        for pair in self.page.pairs:
            known: set[str] = set()
            for one in names:
                measured = items.measured(one, self.page.run.scale, pair=pair, **parameters)
                run = next((run for run in measured if run.path(f"{table}.parquet").is_file()), None)
                rows = pd.DataFrame() if run is None else identified(run.read_table(table)).assign(pair=pair)
                cells = _cells(rows, fill)
                rows = rows[~cells.isin(known)]
                if rows.empty:
                    continue
                known |= set(cells.dropna())
                self.sources += [run] * (run not in self.sources)
                found.append(rows)
        if not found:
            whose = " or ".join(self.page.pairs) or "a second pair"
            self.missing.append(f"no finished run {' or '.join(names)} with a table {table} for {whose}")
            return pd.DataFrame()
        rows = pd.concat(found, ignore_index=True)
        for column, value in (keep or {}).items():
            rows = rows[(benchmark(rows[column]) if column == "suite" else rows[column]) == value]
        if rows.empty:
            self.missing.append(f"{table} of {name} holds no row with {keep}")
        return rows

    @property
    def printed(self) -> pd.DataFrame | None:
        """The paper's own numbers in long rows, None where it prints none."""
        if not items.published_file(self.item.paper, self.item.name).is_file():
            return None
        printed = items.read_published(self.item.paper, self.item.name)
        printed = printed.astype({"row": str, "column": str})
        if printed["temperature"].nunique() > 1:
            printed["metric"] += ", T=" + printed["temperature"].astype(str)
        return printed.assign(target=printed["target"].fillna("the paper"))

    def table(self, measured: pd.DataFrame, *, metric: str = "", value: str = "value", digits: int = 2) -> None:
        """Show long rows (`paper_rows.LONG`) beside the paper's own, rows and columns as the paper has them.

        metric: only this one. Where the paper has several targets, its rows are (target, row) and ours (pair, row);
        with one target or none, ours stand in columns beside its own. Rows of the paper that nothing here measures are
        what the item lacks.
        """
        printed = self.printed
        if metric:
            measured, printed = (
                one if one is None or one.empty else one[one["metric"] == metric] for one in (measured, printed)
            )
        ours = None if measured.empty else measured
        if ours is not None:
            ours = ours.assign(of=ours["of"].fillna(ours["row"]) if "of" in ours else ours["row"])
        rows, columns = ["row"], ["column"]
        for one, whose in ((ours, "pair"), (printed, "target")):
            if one is not None and one.duplicated([whose, "row", "column"]).any():
                columns = ["column", "metric"]  # a table with two numbers in one of its cells
        if printed is not None:
            known = set() if ours is None else set(ours["of"])
            lacking = [row for row in dict.fromkeys(printed["row"]) if row not in known]
            self.missing += [f"{row} ({tables.NOT_HERE})" for row in lacking]
            self.missing += _empty_cells(ours, printed, lacking)
            if printed["target"].nunique() > 1:
                rows.insert(0, "model")
                printed = printed.rename(columns={"target": "model"})
                ours = None if ours is None else ours.rename(columns={"pair": "model"})
        if ours is None and printed is None:
            return self._nothing()
        options = dict(rows=rows, columns=columns, how=self._how(ours, printed, rows), digits=digits)
        content = tables.beside(ours, printed, value, **options)
        content = content[_in_the_papers_order(content.columns, printed, columns)]
        sources = [] if ours is None else self.sources
        self.page.run.show_item(self.item.id, content, sources=sources, missing=self.missing)

    def _how(self, ours, printed, rows: list[str]) -> dict[str, str]:
        """How the rows that lack a number of ours would be measured, said once for each of the paper's targets."""
        if printed is None or not self.item.how:
            return {}
        known = set() if ours is None else set(ours[rows].itertuples(index=False, name=None))
        lacking = [row for row in dict.fromkeys(printed[rows].itertuples(index=False, name=None)) if row not in known]
        first = {}
        for row in lacking:
            first.setdefault(row[:-1], row)
        return {", ".join(row): self.item.how if row in first.values() else "as above" for row in lacking}

    def figure(self, draw, data: pd.DataFrame) -> None:
        """Show draw(data), or a sentence in its place where data has no rows. A true `published` marks rows not ours."""
        if data.empty:
            return self._nothing()
        theirs = int(data["published"].sum()) if "published" in data else 0
        data.attrs["rows"] = {"measured": len(data) - theirs, "published_only": theirs, "not_measured": 0}
        sources = self.sources if len(data) > theirs else []
        self.page.run.show_item(self.item.id, draw(data), data=data, sources=sources, missing=self.missing)

    def diagram(self, figure) -> None:
        """Show a diagram, which measures nothing."""
        self.page.run.show_item(self.item.id, figure)

    def _nothing(self) -> None:
        """The item where neither the paper prints a number that we have nor anything was measured."""
        why = "; ".join(self.missing) or "nothing was measured"
        content = pd.DataFrame({"item": [self.item.title], "measured here": [why], "how": [self.item.how]})
        if "md" not in items.FILES[self.item.kind]:
            content = sentence(f"{self.item.title}: not measured here")
        self.page.run.show_item(self.item.id, content, sources=[], missing=self.missing or [why])


def _in_the_papers_order(names: pd.Index, printed: pd.DataFrame | None, columns: list[str]) -> list[str]:
    """Names of columns, those of one of the paper's columns together and in its order, ours among them first."""
    if printed is None:
        return list(names)
    heads = [", ".join(head) + ", " for head in dict.fromkeys(printed[columns].itertuples(index=False, name=None))]
    place = {name: next((i for i, head in enumerate(heads) if name.startswith(head)), len(heads)) for name in names}
    return sorted(names, key=place.get)


def _cells(rows: pd.DataFrame, by_benchmark: bool) -> pd.Series:
    """Which method was measured, on which benchmark if asked, by row; nothing where a table has no methods."""
    if "method" not in rows:
        return pd.Series(None, rows.index, dtype=object)
    return rows["method"] + " on " + benchmark(rows["suite"]) if by_benchmark else rows["method"]


def _empty_cells(ours: pd.DataFrame | None, printed: pd.DataFrame, lacking: list[str]) -> list[str]:
    """What the rows that we do measure lack: per row of the paper its columns in which nothing of ours stands. Where we have
    none of its columns, the table is ours by intent, such as one column per rate in place of the best."""
    told = []
    if ours is None or not set(ours["column"]) & set(printed["column"]):
        return told
    for row, theirs in printed[~printed["row"].isin(lacking)].groupby("row", sort=False):
        known = set(ours.loc[ours["of"] == row, "column"])
        columns = [column for column in dict.fromkeys(theirs["column"]) if column not in known]
        told += [f"{row}: {', '.join(columns)} ({tables.NOT_HERE})"] * bool(columns)
    return told


def sentence(text: str):
    """A figure that holds one sentence, where there is nothing to draw."""
    with drawn(height_in=0.8) as (figure, _):
        figure.text(0.5, 0.5, text, ha="center", va="center", wrap=True)
    return figure
