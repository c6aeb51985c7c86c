"""The run of one notebook: shows and saves figures, tables and items, opens what was read."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display

from specdec import runs
from specdec.costs.profiles import prices
from specdec.data.suites import embedded_suite
from specdec.errors import nearest_name_error
from specdec.replays.trace import open_trace
from specdec.report import figures, tables
from specdec.tools import cli

from workbook import items


@dataclass(frozen=True, repr=False)
class NotebookRun(runs.Run):
    """A run that shows what it saves, and opens what its notebook reads.

    figures: the folder of its figures and tables. values: its parameters, and files that it reads.
    """

    figures: str
    values: dict

    def show(self, figure, name: str, data: pd.DataFrame | None = None, sources=None) -> None:
        """Display `figure`, saved as svg, pdf and png, its `data` as csv, and the runs as json.

        sources: the runs it comes from; without them, this one.
        """
        stem = runs.figure_path(self.figures, name, self.scale)
        # a figure comes from this run unless others are named
        sources = [self] if sources is None else sources
        paths = figures.save(figure, stem, sources=sources, data=data)
        _display(paths, f"{self.figures}, {name}")

    def show_table(self, table, name: str, text="", digits: int = 2, sources=None) -> None:
        """Display `text` and `table`, saved in markdown and csv, with the runs it comes from."""
        stem = runs.figure_path(self.figures, name, self.scale)
        tables.save(table, stem, sources=[self] if sources is None else sources, digits=digits)
        display(Markdown(f"{text}\n\n{tables.markdown(table, digits)}"))

    def show_item(self, item_id: str, content, sources=(), **options) -> None:
        """Save (`items.save`) and display one of the papers' items, with its caption."""
        item = items.find_item(item_id)
        paths = items.save(item_id, content, scale=self.scale, sources=sources, **options)
        caption = f"**{item.title}.** {runs.read_json(paths[-1])['caption']}"
        _display(paths, f"{item.title} ({item_id})", caption)

    def recording(self, suites=(), parameter: str = "recording"):
        """The recording that a parameter names, or notebook 21's, noted in the run.

        suites: only these; a benchmark's name stands for its embedded form unless it was recorded.
        """
        drafter = self.values.get("drafter") or None
        pair = cli.Models(self.values["pair"], drafter=drafter).name
        trace = open_trace(self.values[parameter], pair)
        # a benchmark may have been recorded itself or in its embedded form
        recorded = set(trace.turns["suite"])
        chosen = []
        for name in suites:
            suite = name if name in recorded else embedded_suite(name, trace.header["pair"])
            if suite not in recorded:
                raise nearest_name_error("recorded suite", suite, recorded)
            chosen.append(suite)
        if chosen and recorded - set(chosen):
            trace = trace.select(trace.turns["suite"].isin(chosen))
        return self.noted(trace)

    def noted(self, trace):
        """The recording; what it is of is left in the run as recording.json."""
        turns = trace.turns.groupby("suite", sort=False)["prompt"].nunique()
        facts = {}
        for name in ("key", "pair", "dtype", "device", "temperature"):
            facts[name] = trace.header.get(name)
        counts = {"suite": turns.index.tolist(), "prompts": turns.sum()}
        runs.write_json(self.path("recording.json"), {**facts, **counts})
        return trace

    def cost_model(self, parameter: str = "costs"):
        """The cost model of the profile or file its parameter names, or notebook 21's.

        A copy is left in the run as costs.json.
        """
        costs = prices(self.values[parameter])
        costs.save(self.path("costs.json"))
        return costs


def _display(paths: list[Path], alternative: str, caption: str = "") -> None:
    """Show the picture or the table among these files; a picture as png, which fits its cell."""
    # a figure has a picture, a table has none
    by_kind = {path.suffix: path for path in paths}
    if ".png" not in by_kind:
        table = by_kind[".md"].read_text(encoding="utf-8")
        display(Markdown(f"{table}\n{caption}"))
        return
    picture = base64.b64encode(by_kind[".png"].read_bytes()).decode()
    data = {"image/png": picture, "text/plain": alternative}
    display(data, metadata={"image/png": {"alt": alternative}}, raw=True)
    if caption:
        display(Markdown(caption))
