"""What the notebooks of the papers share: an item is read from finished runs, shown beside the
paper, and says what it lacks.

    item = papers.Page(run, "resps", ["smollm2"]).item("table1")
    item.table(paper_rows.as_printed(item.read("controllers", "live_t0"), METHODS, SUITES,
    ["speedup"]))

Where a run is missing, `read` gives no rows, and the item is shown with the paper's own numbers and
the name of what is missing. Knows nothing about how anything was measured.
"""

from __future__ import annotations

import dataclasses

import pandas as pd

from specdec import runs
from specdec.report import provenance
from specdec.report.figures import drawn

from experiments.paper_rows import benchmark, with_deviations
from workbook import items
from workbook.method_rows import identified
from workbook.paper_table import PaperTable

# Notebooks that compare methods, by the names of their runs: controllers, rules of engines, other
# drafters. Each may write
# live_t0, live_t1 and opponents_t0, opponents_t1 with columns suite, method, speedup and tau;
# papers' rows take methods by name.
COMPARED = ("controllers", "heuristics", "baselines")


@dataclasses.dataclass(frozen=True)
class Page:
    """A notebook that shows the items of one paper. run: its NotebookRun. pairs: whose rows it
    shows, in this order.
    """

    run: runs.Run
    paper: str
    pairs: list[str]

    def item(self, name: str, pairs: list[str] | None = None) -> Shown:
        """The item of this name, such as "table1", to be filled and shown. pairs: in place of the
        page's.
        """
        page = self if pairs is None else dataclasses.replace(self, pairs=pairs)
        return Shown(page, items.find_item(f"{self.paper}/{name}"))


@dataclasses.dataclass
class Shown:
    """One item on its way into the notebook: what was read for it, and what was not there."""

    page: Page
    item: items.Item
    sources: list[runs.Run] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)

    def read(
        self, name: str | tuple, table: str, keep: dict | None = None, **parameters
    ) -> pd.DataFrame:
        """Rows of `table` of each pair's finished runs `name`, with columns pair, run_key, recipe
        (whose settings were trained
        with: paper, official or ours) and clock (wall or processor); an empty frame where there is
        none.

        A method's rows come from one run: the one that measured it on most suites, of equal ones
        the first of `name`, then the newest. Tables without methods come from that run as a whole.
        keep: only rows with these values; a suite is known by its benchmark, in whatever form it
        was decoded.
        parameters: what the run was measured with, as `items.measured` takes it.
        """
        names, found = [name] if isinstance(name, str) else list(name), []
        for pair in self.page.pairs:
            measured = [
                run
                for one in names
                for run in items.measured(one, self.page.run.scale, pair=pair, **parameters)
            ]
            measured = [run for run in measured if run.path(f"{table}.parquet").is_file()]
            rows = _each_from_one_run(
                [identified(run.read_table(table)).assign(**_facts_of(run)) for run in measured]
            )
            self.sources += [
                run
                for run in measured
                if run.key in set(rows.get("run_key", ())) and run not in self.sources
            ]
            found += [rows.assign(pair=pair)] * bool(len(rows))
        if not found:
            whose = " or ".join(self.page.pairs) or "a second pair"
            self.missing.append(
                f"no finished run {' or '.join(names)} with a table {table} for {whose}"
            )
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
        printed = with_deviations(printed.astype({"row": str, "column": str}))
        if printed["temperature"].nunique() > 1:
            printed["metric"] += ", T=" + printed["temperature"].astype(str)
        return printed.assign(target=printed["target"].fillna("the paper"))

    def table(
        self, measured: pd.DataFrame, *, metric: str = "", value: str = "value", digits=2, notes=()
    ) -> None:
        """Show the paper's rows as it prints them, and long rows of ours (`paper_rows.LONG`) below,
        with the same columns.

        metric: only this one. notes: sentences below the table, beside what each training took.
        Rows of the paper that nothing here measures, and columns that a row of ours lacks, are what
        the item lacks.
        """
        printed = self.printed
        if metric:
            measured, printed = (
                None if one is None or one.empty else one[one["metric"] == metric]
                for one in (measured, printed)
            )
        ours = None if measured is None or measured.empty else measured
        if ours is None and printed is None:
            return self._nothing()
        content = PaperTable.of(ours, printed, value, how=self.item.how, digits=digits)
        self.missing += [f"{row} (not measured here)" for row in content.lacking]
        self.missing += _empty_cells(ours, printed, content.lacking)
        sources = [] if ours is None else self.sources
        if trained := list(filter(None, map(_training_of, sources))):
            notes = [*notes, f"Trainings: {'; '.join(trained)}."]
        content = dataclasses.replace(content, notes=(*content.notes, *notes))
        self.page.run.show_item(self.item.id, content, sources=sources, missing=self.missing)

    def figure(self, draw, data: pd.DataFrame, lacking=()) -> None:
        """Show draw(data), or a sentence in its place where data has no rows. A true `published`
        marks rows not ours.

        lacking: what the paper draws and nothing here measured.
        """
        if data.empty:
            return self._nothing()
        self.missing += [f"{name} (not measured here)" for name in lacking]
        theirs = int(data["published"].sum()) if "published" in data else 0
        data.attrs["rows"] = {
            "measured": len(data) - theirs,
            "published_only": theirs,
            "not_measured": 0,
        }
        sources = self.sources if len(data) > theirs else []
        self.page.run.show_item(
            self.item.id, draw(data), data=data, sources=sources, missing=self.missing
        )

    def diagram(self, figure) -> None:
        """Show a diagram, which measures nothing."""
        self.page.run.show_item(self.item.id, figure)

    def _nothing(self) -> None:
        """The item where neither the paper prints a number that we have nor anything was
        measured.
        """
        why = "; ".join(self.missing) or "nothing was measured"
        content = pd.DataFrame(
            {"item": [self.item.title], "measured here": [why], "how": [self.item.how]}
        )
        if "md" not in items.FILES[self.item.kind]:
            content = sentence(f"{self.item.title}: not measured here")
        self.page.run.show_item(self.item.id, content, sources=[], missing=self.missing or [why])


def _facts_of(run: runs.Run) -> dict[str, str]:
    """Key of a run, whose settings it trained with, and what its clock counted."""
    settings = settings_of(run)
    clock = provenance.of([run]).rows[0]["clock"] or (
        "processor" if settings.get("cpu_time") else "wall"
    )
    return {"run_key": run.key, "recipe": settings.get("preset", "ours"), "clock": clock}


def settings_of(run: runs.Run) -> dict:
    """What a run was asked for: the parameters of its notebook."""
    config = run.record()["config"]
    return config.get("parameters", config)


def _training_of(run: runs.Run) -> str:
    """What a training run took, as a sentence; '' for a run that trains nothing."""
    settings, name = settings_of(run), f"{run.name} of {settings_of(run).get('pair')}"
    took = [
        f"{value:,} {key.replace('_', ' ')}"
        for key, value in settings.items()
        if key.endswith("steps") and value
    ]
    if (
        not took
        and (rounds := run.path("training.parquet")).is_file()
        and "steps" in (table := pd.read_parquet(rounds))
    ):
        took = [f"{table['steps'].min():,} to {table['steps'].max():,} steps a round"]
    took += [f"effort {settings['effort']:g}"] if settings.get("effort") else []
    seeds = ", ".join(map(str, settings.get("seeds", ())))
    return f"{name}, {', '.join([*took, f'seeds {seeds}'])}" if took and seeds else ""


def _each_from_one_run(found: list[pd.DataFrame]) -> pd.DataFrame:
    """Of the same table of several runs, the rows of each method from the run that measured it on
    most benchmarks.
    """
    if not found or "method" not in found[0]:
        return found[0] if found else pd.DataFrame()
    rows, one = pd.concat(found, ignore_index=True), ["method", "recipe"]
    if "suite" not in rows:
        return rows[rows["run_key"] == rows.groupby(one)["run_key"].transform("first")]
    suites = benchmark(rows["suite"]).where(rows["suite"] != "all")
    counts = rows.assign(suite=suites).groupby([*one, "run_key"], sort=False)["suite"].nunique()
    chosen = counts.groupby(level=one).idxmax()  # the first of equal ones
    return rows[pd.MultiIndex.from_frame(rows[[*one, "run_key"]]).isin(chosen.tolist())]


def _empty_cells(ours: pd.DataFrame | None, printed: pd.DataFrame | None, lacking) -> list[str]:
    """What the rows that we do measure lack: per row of the paper its columns in which nothing of
    ours stands. Where we have none of its columns, the table is ours by intent, such as one column
    per rate in place of the best.
    """
    told = []
    if ours is None or printed is None or not set(ours["column"]) & set(printed["column"]):
        return told
    for row, theirs in printed[~printed["row"].isin(lacking)].groupby("row", sort=False):
        known = set(ours.loc[ours["row"] == row, "column"])
        columns = [column for column in dict.fromkeys(theirs["column"]) if column not in known]
        told += [f"{row}: {', '.join(columns)} (not measured here)"] * bool(columns)
    return told


def sentence(text: str):
    """A figure that holds one sentence, where there is nothing to draw."""
    with drawn(height_in=0.8) as (figure, _):
        figure.text(0.5, 0.5, text, ha="center", va="center", wrap=True)
    return figure
