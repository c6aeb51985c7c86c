"""What the notebooks of the papers share: an item is read from finished runs, shown beside the
paper, and says what it lacks.

    item = papers.Page(run, "resps", ["smollm2"]).item("table1")
    rows = item.read("controllers", "live_t0")
    item.table(paper_rows.as_printed(rows, METHODS, SUITES, ["speedup"]))

Where a run is missing, `read` gives no rows, and the item is shown with the paper's own numbers and
the name of what is missing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pandas as pd

from specdec import runs
from specdec.report import provenance
from specdec.report.figures import drawn

from experiments.paper_rows import benchmark, with_deviations
from workbook import items
from workbook.items import settings_of
from workbook.method_rows import identified, mark_of_noise
from workbook.paper_table import PaperTable

# Notebooks that compare methods, by the names of their runs: controllers, rules of engines, other
# drafters. Each may write live_t0, live_t1 and opponents_t0, opponents_t1 with columns suite,
# method, speedup and tau; papers' rows take methods by name.
COMPARED = ("controllers", "heuristics", "baselines")


@dataclass(frozen=True)
class Page:
    """A notebook that shows the items of one paper.

    run: its NotebookRun. pairs: whose rows it shows, in this order. readings: what was read.
    """

    run: runs.Run
    paper: str
    pairs: list[str]
    readings: list[dict] = field(default_factory=list)

    def item(self, name: str, pairs: list[str] | None = None) -> Shown:
        """The item of this name, such as "table1", to be filled; pairs: in place of the page's."""
        page = self if pairs is None else dataclasses.replace(self, pairs=pairs)
        return Shown(page, items.find_item(f"{self.paper}/{name}"))

    def sources(self) -> pd.DataFrame:
        """What every item was read from: item, run, table, pair, rows, and prompts of a row."""
        columns = ["item", "run", "table", "pair", "rows", "prompts"]
        return pd.DataFrame(self.readings, columns=columns).drop_duplicates(ignore_index=True)


@dataclass
class Shown:
    """One item on its way into the notebook: what was read for it, and what was not there."""

    page: Page
    item: items.Item
    sources: list[runs.Run] = field(default_factory=list)
    marks: dict[str, str] = field(default_factory=dict)  # of the tables that were read
    missing: list[str] = field(default_factory=list)

    def read(
        self, name: str | tuple, table: str, keep: dict | None = None, **parameters
    ) -> pd.DataFrame:
        """Rows of `table` of each pair's finished runs `name`; an empty frame where there is none.

        Each method's rows come from one run. Adds pair, run_key, recipe and clock. keep: only rows
        with these values. parameters: as `items.measured` takes them.
        """
        names = list(name)
        if isinstance(name, str):
            names = [name]
        scale = self.page.run.scale
        parts = []
        for pair in self.page.pairs:
            # 1. the runs of a pair that hold the table
            measured = []
            for run_name in names:
                measured += items.measured(run_name, scale, pair=pair, **parameters)
            # 2. each method's rows from one of them
            tables = []
            for run in measured:
                if run.path(f"{table}.parquet").is_file():
                    tables.append(identified(run.read_table(table)).assign(**_facts_of(run)))
                    self.marks[table] = mark_of_noise(run.read_table(table))
            rows = _each_from_one_run(tables)
            if len(rows):
                parts.append(rows.assign(pair=pair))
                for run in measured:
                    self._note(run, table, pair, rows[rows["run_key"] == run.key])
        if not parts:
            whose = " or ".join(self.page.pairs) or "a second pair"
            why = f"no finished run {' or '.join(names)} with a table {table} for {whose}"
            self.missing.append(why)
            return pd.DataFrame()
        # 3. the rows that were asked for
        rows = pd.concat(parts, ignore_index=True)
        for column, value in (keep or {}).items():
            values = benchmark(rows[column]) if column == "suite" else rows[column]
            rows = rows[values == value]
        if rows.empty:
            self.missing.append(f"{table} of {name} holds no row with {keep}")
        return rows

    def _note(self, run: runs.Run, table: str, pair: str, rows: pd.DataFrame) -> None:
        """Remember what was read."""
        if rows.empty:
            return
        if run not in self.sources:
            self.sources.append(run)
        prompts = ""
        if "prompts" in rows and rows["prompts"].notna().any():
            ends = {int(rows["prompts"].min()), int(rows["prompts"].max())}
            prompts = " to ".join(map(str, sorted(ends)))
        # what the page says at its end
        reading = {"item": self.item.name, "run": run.directory.name, "table": table, "pair": pair}
        self.page.readings.append(reading | {"rows": len(rows), "prompts": prompts})

    @property
    def printed(self) -> pd.DataFrame:
        """The paper's own numbers in long rows; none where it prints none."""
        if not items.published_file(self.item.paper, self.item.name).is_file():
            return pd.DataFrame()
        printed = items.read_published(self.item.paper, self.item.name)
        printed = with_deviations(printed.astype({"row": str, "column": str}))
        if printed["temperature"].nunique() > 1:
            printed["metric"] += ", T=" + printed["temperature"].astype(str)
        return printed.assign(target=printed["target"].fillna("the paper"))

    def table(self, ours: pd.DataFrame, *, metric="", digits=2, notes=()) -> None:
        """Show the paper's rows as it prints them, and long rows of ours below.

        metric: only this one. notes: sentences below the table, beside what each training took.
        """
        printed = self.printed
        if metric:
            ours = ours[ours["metric"] == metric]
            printed = printed[printed["metric"] == metric]
        if ours.empty and printed.empty:
            return self._nothing()
        content = PaperTable.of(ours, printed, how=self.item.how, digits=digits)
        self.missing += [f"{row} (not measured here)" for row in content.lacking]
        sources = []
        notes = list(notes)
        if len(ours):
            self.missing += _empty_cells(ours, printed, content.lacking)
            sources = self.sources
            notes += [f"{name}: {mark}." for name, mark in self.marks.items() if mark]
            trainings = list(filter(None, map(_training_of, sources)))
            if trainings:
                notes.append(f"Trainings: {'; '.join(trainings)}.")
        content = dataclasses.replace(content, notes=(*content.notes, *notes))
        self._show(content, sources)

    def figure(self, draw, data: pd.DataFrame, lacking=()) -> None:
        """Show draw(data), or a sentence in its place where data has no rows.

        A true `published` marks rows not ours. lacking: what the paper draws and nothing measured.
        """
        if data.empty:
            return self._nothing()
        self.missing += [f"{name} (not measured here)" for name in lacking]
        theirs = int(data["published"].sum()) if "published" in data else 0
        ours = len(data) - theirs
        data.attrs["rows"] = {"measured": ours, "published_only": theirs, "not_measured": 0}
        self._show(draw(data), self.sources if ours else [], data=data)

    def _show(self, content, sources: list[runs.Run], data=None) -> None:
        options = dict(sources=sources, missing=self.missing, data=data)
        self.page.run.show_item(self.item.id, content, **options)

    def _nothing(self) -> None:
        """The item where neither the paper prints a number that we have nor ours were measured."""
        self.missing = self.missing or ["nothing was measured"]
        if "md" in items.FILES[self.item.kind]:
            row = {"item": self.item.title, "measured here": "; ".join(self.missing)}
            return self._show(pd.DataFrame([row | {"how": self.item.how}]), [])
        with drawn(height_in=0.8) as (figure, _):
            text = f"{self.item.title}: not measured here"
            figure.text(0.5, 0.5, text, ha="center", va="center", wrap=True)
        self._show(figure, [])


def _facts_of(run: runs.Run) -> dict[str, str]:
    """Key of a run, whose settings it trained with, and what its clock counted."""
    settings = settings_of(run)
    usual = "processor" if settings.get("cpu_time") else "wall"
    clock = provenance.of([run]).rows[0]["clock"] or usual
    return {"run_key": run.key, "recipe": settings.get("preset", "ours"), "clock": clock}


def _training_of(run: runs.Run) -> str:
    """What a training run took, as a sentence; '' for a run that trains nothing."""
    settings = settings_of(run)
    took = []
    for name, count in settings.items():
        if name.endswith("steps") and count:
            took.append(f"{count:,} {name.replace('_', ' ')}")
    rounds = run.path("training.parquet")
    if not took and rounds.is_file():
        table = pd.read_parquet(rounds)
        if "steps" in table:
            steps = table["steps"]
            took.append(f"{steps.min():,} to {steps.max():,} steps a round")
    if settings.get("effort"):
        took.append(f"effort {settings['effort']:g}")
    seeds = ", ".join(map(str, settings.get("seeds", ())))
    if not took or not seeds:
        return ""
    return f"{run.name} of {settings.get('pair')}, {', '.join(took)}, seeds {seeds}"


def _each_from_one_run(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """The rows of each method from the single run that measured it on most benchmarks.

    Tables without methods come from the first run as a whole.
    """
    if not tables:
        return pd.DataFrame()
    if "method" not in tables[0]:
        return tables[0]
    rows = pd.concat(tables, ignore_index=True)
    keys = ["method", "recipe", "run_key"]
    suites = pd.Series("", rows.index)
    if "suite" in rows:
        suites = benchmark(rows["suite"]).where(rows["suite"] != "all")
    counts = rows.assign(suite=suites).groupby(keys, sort=False)["suite"].nunique()
    # of equal ones the first
    chosen = counts.groupby(level=keys[:2]).idxmax()
    return rows[pd.MultiIndex.from_frame(rows[keys]).isin(chosen.tolist())]


def _empty_cells(ours: pd.DataFrame, printed: pd.DataFrame, lacking) -> list[str]:
    """What the rows that we do measure lack: per row of the paper its columns without ours."""
    if printed.empty or not set(ours["column"]) & set(printed["column"]):
        return []
    sentences = []
    measured = printed[~printed["row"].isin(lacking)]
    for row, theirs in measured.groupby("row", sort=False):
        columns = set(ours.loc[ours["row"] == row, "column"])
        empty = [column for column in dict.fromkeys(theirs["column"]) if column not in columns]
        if empty:
            sentences.append(f"{row}: {', '.join(empty)} (not measured here)")
    return sentences
