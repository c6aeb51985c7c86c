"""Pictures that notebooks draw: lines, dots, bars and heat maps in panels, and tables of trainings.

Each takes long rows and returns a figure. Knows nothing about whose rows they are.
"""

from __future__ import annotations

import io
import math
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.colors import PowerNorm, to_rgba
from PIL import Image

from specdec import runs
from specdec.report.explorer_panels import places, readable
from specdec.report.figures import COLOURS, WIDTH_IN, draw_line, drawn, grouped_bars, ink, name_ends
from specdec.report.tables import need, surely

COLUMN_IN, ROW_IN = 1.05, 0.2  # distance of columns and rows of a tree
PAGE_COLOURS, WIDEST_PX = 64, (1000, 8000)  # of a picture on a page


def small_picture(content: bytes) -> bytes:
    """A picture as PNG in few colours, made smaller until it fits onto a page."""
    picture, written = Image.open(io.BytesIO(content)).convert("RGB"), io.BytesIO()
    picture.thumbnail(WIDEST_PX, Image.Resampling.LANCZOS)
    # pages are committed: a figure has few colours, and dithering costs bytes
    few = picture.quantize(PAGE_COLOURS, dither=Image.Dither.NONE)
    few.save(written, "png", optimize=True)
    return written.getvalue()


def training_curves(folders: dict, columns=("reward", "entropy", "tok_per_ms"), points=60):
    """The curves of several runs: run, steps, what, value; means over about `points` blocks."""
    curves = []
    for name, folder in folders.items():
        curve = runs.read_table(Path(folder) / "curve.parquet")[["steps", *columns]]
        # neighbouring steps are averaged, since rewards are noisy
        block = curve.index // max(1, len(curve) // points)
        mean = curve.groupby(block).mean().assign(steps=curve["steps"].groupby(block).max())
        curves.append(mean.melt("steps", var_name="what", value_name="value").assign(run=name))
    return pd.concat(curves, ignore_index=True)[["run", "steps", "what", "value"]]


def training_results(folders: dict[str, Path]) -> pd.DataFrame:
    """One row per run: steps, minutes, steps_per_s."""
    rows = []
    for name, folder in folders.items():
        plan = runs.read_json(Path(folder) / "plan.json")
        steps = plan["settings"]["ppo"]["total_steps"]
        row = {"run": name, "steps": steps, "minutes": plan["elapsed_s"] / 60}
        rows.append(row | {"steps_per_s": steps / plan["elapsed_s"]})
    return pd.DataFrame(rows)


def over_seeds(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines by panel, name and step: mean, least and largest as value, low and high."""
    groups = lines.groupby(["panel", "name", "step"], sort=False)["value"]
    return groups.agg(value="mean", low="min", high="max").reset_index()


def seeds_of(curves: pd.DataFrame, drafters: dict[str, str]) -> str:
    """How many seeds each drafter was trained with, pair by pair: 'PPOW 3 and 3; CST 1 and 3'."""
    if curves.empty:
        return ""
    names = curves["drafter"].map(drafters).rename("drafter")
    counts = curves.groupby([names, "pair"], sort=False)["seed"].nunique().unstack(fill_value=0)
    return "; ".join(f"{name} {' and '.join(map(str, row))}" for name, *row in counts.itertuples())


def over_start(lines: pd.DataFrame) -> pd.DataFrame:
    """The same lines in % of change against their first step's value."""
    if lines.empty:
        return lines
    first = lines.groupby(["panel", "name"])["value"].transform("first")
    ends = {name: 100 * (lines[name] / first - 1) for name in ("value", "low", "high")}
    return lines.assign(**ends)


def depth_and_size(
    by_depth, by_size, value: str, *, label: str, lines=("total_tokens", "depth"), heads=("", "")
):
    """`value` against depth, a line per size, and against total_tokens, a line per depth.

    lines: the columns that name the lines of both panels. heads: over the panels.
    """
    units = {"total_tokens": "{} tokens", "depth": "depth {}"}
    labels = {"depth": "depth", "total_tokens": "tree size (tokens)"}
    tables = (by_depth, by_size)
    for table, x, by in zip(tables, labels, lines, strict=True):
        need(table, x, value, by)
    # one axis of values for both panels
    highest = max(by_depth[value].max(), by_size[value].max())
    with drawn() as (figure, _):
        panels = figure.subplots(1, 2, sharey=True)
        for place, (axes, table, x) in enumerate(zip(panels, tables, labels, strict=True)):
            by = lines[place]
            names = []
            for number, line in enumerate(table[by].unique()):
                names.append(units.get(by, "{}").format(line))
                draw_line(axes, table[table[by] == line], x, value, number, names[-1])
            axes.set(xlabel=labels[x], ylim=(0, 1.05 * highest), title=heads[place])
            axes.locator_params(axis="x", integer=True)
            # the same lines in both panels are named once
            if place == 1 or lines[0] != lines[1]:
                name_ends(axes, names)
        panels[0].set_ylabel(label)
    return figure


def intervals(table, name, value, *, panel: str | None = None, label="", line=1.0):
    """Dots of `value` with columns low and high, one row per `name`; a line at `line`.

    panel: the column with one panel per value.
    """
    need(table, name, value, "low", "high")
    table = surely(table)
    panels = [("", table)]
    if panel is not None:
        need(table, panel)
        panels = list(table.groupby(panel, sort=False))
    with drawn(height_in=0.8 + 0.24 * len(table) + 0.3 * len(panels)) as (figure, _):
        # as high as its rows, so that dots are equally far apart
        heights = [len(rows) + 1 for _, rows in panels]
        grid = dict(sharex=True, squeeze=False, height_ratios=heights)
        all_axes = figure.subplots(len(panels), 1, **grid)[:, 0]
        for axes, (head, rows) in zip(all_axes, panels, strict=True):
            dots(axes, np.arange(len(rows)), rows, value)
            axes.axvline(line, color="0.3", linewidth=1, linestyle="--")
            axes.set_yticks(np.arange(len(rows)), rows[name])
            axes.set(ylim=(len(rows) - 0.3, -0.7), title=str(head))
        all_axes[-1].set_xlabel(label or value)
    return figure


def dots(axes, places, rows, value, number: int = 0, ends=("low", "high"), **look) -> None:
    """Dots of a column with intervals, from the top down, in the colour of this number."""
    look = dict(linestyle="", marker="o", markersize=4.5, color=COLOURS[number]) | look
    axes.hlines(places, *(rows[end] for end in ends), color=look["color"], linewidth=1.5)
    axes.plot(rows[value], places, **look)


def under_heads(axes, heads: pd.Series, names: pd.Series) -> np.ndarray:
    """Name the rows of axes from the top down, under a bold line for each head; their places."""
    places, free = [], 0
    look = dict(transform=axes.get_yaxis_transform(), va="center", weight="bold", fontsize=8)
    for head, rows in names.groupby(heads, sort=False):
        axes.text(0.01, free, head, **look)
        places += range(free + 1, free + 1 + len(rows))
        free += 1 + len(rows)
    axes.set(yticks=places, yticklabels=names, ylim=(free - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    return np.array(places)


def bar_panels(table, x, y, *, by: str, panel: str, labels=("", ""), note=""):
    """Bars of `y` over the values of `x`, a look per value of `by`, a panel per value of `panel`.

    labels: of the axes; the first defaults to the panel's name. <y>_low, <y>_high: whiskers.
    """
    need(table, x, y, by, panel)
    parts, looks = list(table.groupby(panel, sort=False)), list(dict.fromkeys(table[by]))
    with drawn(note=note) as (figure, _):
        wide = [rows[x].nunique() for _, rows in parts]
        all_axes = figure.subplots(1, len(parts), squeeze=False, width_ratios=wide)[0]
        handles = {}
        for axes, (head, rows) in zip(all_axes, parts, strict=True):
            grouped_bars(axes, rows, x, y, by, looks)
            head = textwrap.fill(str(head), 90 // len(parts))
            axes.set(xlabel=labels[0] or head, title=head if labels[0] else "")
            if rows[y].min() < 0:
                axes.axhline(0, color="0.3", linewidth=1)
            for bars in axes.containers:
                if len(rows) <= 12 and hasattr(bars, "datavalues"):
                    numbers = [_short(height) for height in bars.datavalues]
                    axes.bar_label(bars, numbers, padding=2, fontsize=7)
            # long names of rows would overlap
            names = [textwrap.fill(text.get_text(), 11) for text in axes.get_xticklabels()]
            axes.set_xticks(axes.get_xticks(), names)
            axes.margins(y=0.1)
            for handle, look in zip(*axes.get_legend_handles_labels(), strict=True):
                handles[look] = handle
        all_axes[0].set_ylabel(labels[1])
        if len(looks) > 1:
            shown = [str(look) for look in looks]
            columns = 2 if max(map(len, shown)) > 20 else len(looks)
            place = dict(loc="lower left", bbox_to_anchor=(0.05, 1.0), ncols=columns)
            figure.legend([handles[look] for look in shown], shown, **place)
    return figure


def _short(value: float) -> str:
    """The number of a bar: '' for 0, no digit behind the point from 10 on."""
    if abs(value) < 0.05:
        return ""
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"


def heat_panels(table, x, y, value, *, rows: str, columns: str, labels=("", ""), note=""):
    """Heat maps of shares of `cycles` over x and y, panels by values of `rows` and `columns`."""
    need(table, x, y, value, rows, columns, "cycles")
    down, across = table[rows].unique(), table[columns].unique()
    at_x, at_y = sorted(table[x].unique()), sorted(table[y].unique())
    # a square root of colours
    norm = PowerNorm(0.5, 0.0, float(table[value].max()))
    height = 0.7 + (0.9 + 0.22 * min(10, len(at_y))) * len(down)
    with drawn(WIDTH_IN, height, note=note) as (figure, _):
        grid = figure.subplots(len(down), len(across), squeeze=False, sharex=True, sharey=True)
        for (row, column), axes in np.ndenumerate(grid):
            part = table[(table[rows] == down[row]) & (table[columns] == across[column])]
            # cells that no cycle reached are zero, not missing
            cells = part.pivot_table(value, y, x, aggfunc="sum")
            cells = cells.reindex(index=at_y, columns=at_x).fillna(0.0)
            image = axes.imshow(cells, origin="lower", aspect="auto", cmap="Blues", norm=norm)
            for (of_y, of_x), share in cells.stack().items():
                if share >= 0.01 and cells.size <= 120:
                    look = dict(ha="center", va="center", fontsize=7)
                    look["color"] = ink(image.cmap(image.norm(share)))
                    axes.text(at_x.index(of_x), at_y.index(of_y), f"{100 * share:.0f}", **look)
            count = f"n = {int(part['cycles'].sum()):,} cycles"
            axes.set_title(f"{down[row]}: {across[column]}\n{count}", fontsize=8)
            axes.set_xticks(*_few(at_x))
            axes.set_yticks(*_few(at_y))
            axes.grid(visible=False)
        for axes in grid[-1]:
            axes.set_xlabel(labels[0])
        for axes in grid[:, 0]:
            axes.set_ylabel(labels[1])
    return figure


def _few(values: list, most: int = 8) -> tuple[list[int], list[str]]:
    """Places and names of at most `most` ticks."""
    step = -(-len(values) // most)
    return list(range(0, len(values), step)), [f"{value:g}" for value in values[::step]]


def tree(tokens, parents, *, scores=None, accepted=(), title=""):
    """A draft tree as a figure: the accepted path is filled, darker borders mean likelier nodes.

    tokens: text of each node [N], root first. parents: of each node [N], -1 for the root, before
    their children. scores: log-probabilities [N]. accepted: nodes on the accepted path.
    """
    # children stand right of their parents
    depth, row = places(parents)
    path = set(accepted)
    size = ((max(depth) + 1.2) * COLUMN_IN, (max(row) + 2) * ROW_IN + 0.3)
    with drawn(*size, title=title) as (figure, _):
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(-0.5, max(depth) + 0.5), ylim=(max(row) + 0.7, -0.7))
        for node, parent in enumerate(parents):
            if parent >= 0:
                look = dict(color="0.75", linewidth=1)
                if node in path:
                    look = dict(color=COLOURS[5], linewidth=2)
                axes.plot([depth[parent], depth[node]], [row[parent], row[node]], zorder=1, **look)
        for node, token in enumerate(tokens):
            fill, letters = (COLOURS[5], "white") if node in path else ("white", "0.13")
            # unlikely ones stay visible
            share = 0.5 if scores is None else math.exp(max(float(scores[node]), -6.0)) ** 0.3
            edge = to_rgba(COLOURS[0], 0.25 + 0.75 * share)
            look = dict(family="DejaVu Sans Mono", fontsize=7, color=letters, parse_math=False)
            look |= dict(ha="center", va="center", zorder=2, gid=f"node-{node}")
            look["bbox"] = dict(boxstyle="round,pad=0.25", facecolor=fill, edgecolor=edge)
            axes.text(depth[node], row[node], readable(token), **look)
    return figure
