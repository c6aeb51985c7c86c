"""From tables to figures: one style, deterministic files, the scale of the rows in every picture.

Each function takes a DataFrame of long rows and returns a figure; `save` writes it. matplotlib and
seaborn are imported when a figure is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.report import provenance
from specdec.report.tables import PARTS, need, surely

WIDTH_IN = 7.0
HEIGHT_IN = 3.2
# Apart in every pair for readers who see no green or no colour at all; a dash, a marker or a hatch
# goes with each.
COLOURS = ("#004488", "#ddaa33", "#bb5566", "#6699cc", "#222222", "#1b6e3c")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
MARKERS = "osD^v"
HATCHES = ("", "///", "...", "xxx")
# place of a legend
ABOVE = dict(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
LOOK = Path(__file__).with_name("figures.mplstyle")  # for matplotlib.style


@contextmanager
def drawn(
    width_in: float = WIDTH_IN, height_in: float = HEIGHT_IN, title: str = "", note: str = ""
) -> Iterator[tuple]:
    """(figure, palette) in the one look of all figures.

    When the with block ends it is laid out, with its title, a letter at each of several panels, and
    a `note` below them.
    """
    import seaborn
    from matplotlib import style
    from matplotlib.figure import Figure

    with seaborn.axes_style("whitegrid"), style.context(LOOK):
        figure = Figure(figsize=(width_in, height_in))
        yield figure, COLOURS
        # 1. a letter at each of several panels
        panels = [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]
        if len(panels) > 1:
            for letter, axes in zip("abcdefgh", panels, strict=False):
                place = ((0, 1), (-14, 4), "axes fraction", "offset points")
                axes.annotate(letter, *place, ha="right", weight="bold")
        # 2. title and note
        if title:
            figure.suptitle(title, x=0.02, ha="left")
        written = textwrap.fill(note, round(17 * width_in))
        figure.text(0.01, 0.01, written, va="bottom", fontsize=8, color="0.3")
        bottom = 0.0
        if note:
            bottom = (written.count("\n") + 1) * 0.15 / height_in
        figure.tight_layout(rect=(0, bottom, 1, 1), w_pad=1.8)


def save(
    figure, stem: Path, *, sources=(), data: pd.DataFrame | None = None, about: dict | None = None
) -> list[Path]:
    """Write <stem>.svg, .pdf and .png, its `data` as <stem>.csv, and its sources as <stem>.json.

    Files of the same figure are the same, byte for byte. The label of its provenance is written
    into the picture. sources: the Runs whose rows are drawn, as `provenance.of` takes them. about:
    more facts for the json file, perhaps another `label`.
    """
    from matplotlib import style

    stem = Path(stem)
    origin = provenance.of(sources, data)
    record = {**origin.record(), **(about or {})}
    # the label below everything at the right edge, once
    for text in list(figure.texts):
        if text.get_gid() == "scale":
            text.remove()
    look = dict(ha="right", va="top", fontsize=7, color="0.35", gid="scale")
    figure.text(0.995, -0.01, record["label"], **look)
    keys = [row["key"] for row in origin.rows]
    described = runs.canonical({"scale": origin.scale, "runs": keys})
    # without dates and versions, so that the same figure is the same file
    metadata: dict[str, dict] = {
        "svg": {"Description": described, "Date": None},
        "pdf": {"Subject": described, "CreationDate": None},
        "png": {"Description": described, "Software": None},
    }
    written = []
    for kind, fields in metadata.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        with style.context(LOOK), runs.atomic(path) as temporary:
            fields["Title"] = stem.name
            figure.savefig(temporary, format=kind, metadata=fields, bbox_inches="tight")
        written.append(path)
    if data is not None:
        text = data.to_csv(index=data.index.name is not None)
        written.append(runs.write_text(stem.with_name(f"{stem.name}.csv"), text))
    written.append(runs.write_json(stem.with_name(f"{stem.name}.json"), record))
    return written


def speedup_bars(table: pd.DataFrame, *, baseline: str | None = None, title: str = ""):
    """Grouped bars of stats.compare's `speedup` with intervals, one group per suite.

    The line at 1 is the baseline.
    """
    need(table, "suite", "method", "speedup")
    if baseline is not None:
        table = table[table["method"] != baseline]
    names = table["suite"].astype(str).str.rpartition("/")[2]
    if "prompts" in table:
        names += "\nn = " + table.groupby("suite")["prompts"].transform("max").astype(str)
    methods = table["method"].nunique()
    width_in = max(WIDTH_IN, 0.3 * names.nunique() * methods)
    with drawn(width_in, title=title) as (figure, _):
        axes = figure.subplots()
        grouped_bars(axes, surely(table).assign(suite=names), "suite", "speedup", "method")
        axes.axhline(1.0, color="0.3", linewidth=1, linestyle="--")
        axes.set_ylabel(f"times as fast as {baseline or 'the baseline'}")
        axes.legend(ncols=min(4, methods), **ABOVE)
    return figure


def grouped_bars(
    axes, rows: pd.DataFrame, x: str, y: str, by: str, looks: Sequence | None = None
) -> None:
    """Bars side by side: `y` over the values of `x`, one look per value of `by`.

    Whiskers go from <y>_low to <y>_high. looks: the values of `by` in the order of their looks, for
    axes that hold some of them.
    """
    looks = list(looks or dict.fromkeys(rows[by]))
    values = list(dict.fromkeys(rows[x]))
    groups = dict(list(rows.groupby(by, sort=False)))
    names = sorted(groups, key=looks.index)
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        part = groups[name].drop_duplicates(x)
        shift = (number - (len(names) - 1) / 2) * width
        centres = part[x].map(values.index).to_numpy(float) + shift
        axes.bar(centres, part[y], width, label=str(name), **bar_look(looks.index(name)))
        if f"{y}_low" in part:
            limits = part[[f"{y}_low", f"{y}_high"]].T.to_numpy(float)
            reach = np.abs(limits - part[y].to_numpy(float))
            axes.errorbar(centres, part[y], yerr=reach, fmt="none", ecolor="0.2", capsize=1.5)
    axes.set_xticks(range(len(values)), list(map(str, values)))
    axes.grid(axis="x", visible=False)


def bar_look(number: int) -> dict:
    """Colour and hatch of the bars of this number, which differ in print without colours, too."""
    colour = COLOURS[number % len(COLOURS)]
    hatch = HATCHES[number % len(HATCHES)]
    return dict(color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)


def ink(colour) -> str:
    """The colour of a number on this colour: black or white."""
    from matplotlib.colors import to_rgb

    lightness = np.dot(to_rgb(colour), (0.3, 0.59, 0.11))
    return "white" if lightness < 0.6 else "black"


def time_split(table: pd.DataFrame, *, title=""):
    """Stacked bars of tables.time_split: where the milliseconds of a cycle go, one bar per row."""
    need(table, *PARTS, "total_ms")
    names = table.index.astype(str)
    with drawn(height_in=1.0 + 0.42 * len(table), title=title) as (figure, palette):
        axes = figure.subplots()
        left = np.zeros(len(table))
        for part, colour in zip(PARTS, palette, strict=False):
            lengths = table[part].to_numpy(float)
            label = part.removesuffix("_ms")
            bars = axes.barh(names, lengths, left=left, color=colour, label=label)
            shares = lengths / table["total_ms"]
            # narrow slices have no room for a number
            shares = shares.map("{:.0%}".format).where(shares >= 0.06, "")
            axes.bar_label(bars, shares, label_type="center", color=ink(colour))
            left += lengths
        axes.invert_yaxis()
        axes.set_xlabel("ms per cycle")
        axes.grid(axis="y", visible=False)
        axes.legend(ncols=len(PARTS), **ABOVE)
    return figure


def curves(table, x: str, y: str, *, by: str, panel="", labels=(), sharey=False, zero=True, **head):
    """Lines of long rows: y against x, one line per value of `by`, named at its end.

    panel: a column with one panel per value. labels: what to write at the two axes, default the
    columns' names. sharey: one scale of y in all panels. zero: it begins at 0. head: title and
    note of `drawn`.
    """
    need(table, x, y, by)
    panels = [("", table)]
    if panel:
        need(table, panel)
        panels = list(table.groupby(panel, sort=False))
    x_label, y_label = labels or (x, y)
    names = {}
    for line in table[by].unique():
        names[line] = line if isinstance(line, str) else f"{by.replace('_', ' ')} {line}"
    with drawn(**head) as (figure, _):
        all_axes = figure.subplots(1, len(panels), sharey=sharey, squeeze=False)[0]
        for axes, (title, rows) in zip(all_axes, panels, strict=True):
            for number, (line, name) in enumerate(names.items()):
                if (rows[by] == line).any():
                    draw_line(axes, rows[rows[by] == line], x, y, number, name)
            axes.set(xlabel=x_label, title=str(title))
            if zero:
                axes.set_ylim(bottom=0)
        all_axes[0].set_ylabel(y_label)
        # each line is named once, in the rightmost panel that has it
        if panel != by:
            unnamed = set(names.values())
            for axes in all_axes[::-1]:
                unnamed -= name_ends(axes, unnamed)
    return figure


def draw_line(axes, rows: pd.DataFrame, x: str, y: str, number: int, label: str) -> None:
    """A line in the look of this number; a band where rows have low and high."""
    rows = rows.sort_values(x)
    colour = COLOURS[number % len(COLOURS)]
    dash = DASHES[number % len(DASHES)]
    # so few points are measurements, more are a curve
    marker = ""
    if len(rows) <= 12:
        marker = MARKERS[number % len(MARKERS)]
    look = dict(color=colour, linestyle=dash, marker=marker, markersize=3.5)
    axes.plot(rows[x], rows[y], label=label, **look)
    if {"low", "high"} <= set(rows):
        axes.fill_between(rows[x], rows["low"], rows["high"], color=colour, alpha=0.15, linewidth=0)
    if rows[x].max() >= 1e4:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}k" if value else "0")


def name_ends(axes, names: Collection[str]) -> set[str]:
    """Write these lines' names at their right ends; returns those that are there.

    Names are moved apart where ends meet.
    """
    lines = [line for line in axes.lines if line.get_label() in names]
    lines.sort(key=lambda line: line.get_ydata()[-1])
    # 1. the height of each end, from 0 to 1
    heights = []
    for line in lines:
        end = axes.transData.transform(line.get_xydata()[-1])
        heights.append(axes.transAxes.inverted().transform(end)[1])
    # 2. moved apart, from below; if the last one is too high, all go down
    gap = 0.15 / (axes.get_position().height * axes.figure.get_figheight())
    for number in range(1, len(heights)):
        heights[number] = max(heights[number], heights[number - 1] + gap)
    over = max(0.0, max(heights, default=0.0) - 1)
    for line, height in zip(lines, heights, strict=True):
        look = dict(color=line.get_color(), fontsize=8, va="center")
        place = ((1, height - over), (4, 0), "axes fraction", "offset points")
        axes.annotate(line.get_label(), *place, **look)
    return {line.get_label() for line in lines}
