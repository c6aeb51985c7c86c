"""Figures of recordings and cost models: curves over depth and size, the surface of speed, predicted against measured,
intervals.

In the style of `plots`, and saved by it. Knows nothing about models; takes the tables of statics, bound and livecheck.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec.config import SpecdecError, nearest_name_error
from specdec.plots import HEIGHT_IN, WIDTH_IN, _figure, style


def depth_and_size(
    by_depth: pd.DataFrame, by_size: pd.DataFrame, value: str, *, label: str, lines=("total_tokens", "depth"), title=""
):
    """Two panels: `value` against depth, one line per size, and against total_tokens, one line per depth.

    lines: the column that names the lines of the left and of the right panel. One axis of values for both, from 0.
    """
    panels = [(by_depth, "depth", lines[0], "depth"), (by_size, "total_tokens", lines[1], "tree size (tokens)")]
    for table, x, line, _ in panels:
        _need(table, x, value, line)
    with style() as palette:
        figure = _figure(WIDTH_IN, HEIGHT_IN)
        row = figure.subplots(1, 2, sharey=True)
        highest = max(by_depth[value].max(), by_size[value].max())
        for axes, (table, x, line, name) in zip(row, panels, strict=True):
            for number, one in enumerate(dict.fromkeys(table[line])):
                part = table[table[line] == one].sort_values(x)
                look = dict(color=palette[number % len(palette)], marker="o" if len(part) <= 20 else "", markersize=3)
                axes.plot(part[x], part[value], label=str(one), **look)
            axes.set(xlabel=name, ylim=(0, 1.05 * highest))
            axes.locator_params(axis="x", integer=True)
            if axes is row[1] or lines[0] != lines[1]:  # the same lines in both panels are named once
                axes.legend(title=line.replace("_", " "), fontsize=7, title_fontsize=7)
        row[0].set_ylabel(label)
        figure.suptitle(title, x=0.02, ha="left")
        figure.tight_layout()
    return figure


def speed_surface(table: pd.DataFrame, marks: dict[str, tuple[float, float]], *, value="speedup", title=""):
    """Filled contours of `value` over depth and total_tokens (logarithmic); of several widths the best one counts.

    table: rows of static_grid. marks: name -> (depth, total_tokens), drawn with a sign each.
    """
    _need(table, "depth", "total_tokens", value)
    surface = table.groupby(["total_tokens", "depth"])[value].max().unstack()
    if min(surface.shape) < 2:
        raise SpecdecError("a surface needs two or more depths and sizes; widen the grid.")
    with style():
        figure = _figure(WIDTH_IN, 1.2 * HEIGHT_IN)
        axes = figure.subplots()
        levels = np.unique(np.linspace(np.nanmin(surface), np.nanmax(surface), 15))
        drawn = axes.contourf(surface.columns, surface.index, surface, max(2, len(levels)), cmap="viridis")
        figure.colorbar(drawn, ax=axes, label="times as fast as plain decoding" if value == "speedup" else value)
        for (name, (depth, total_tokens)), sign in zip(marks.items(), "os*^DvPX" * len(marks), strict=False):
            look = dict(marker=sign, markersize=9, markeredgecolor="black", markerfacecolor="white", linestyle="")
            axes.plot([depth], [total_tokens], label=name, clip_on=False, **look)
        axes.set_yscale("log", base=2)
        low, high = surface.index.min(), surface.index.max()
        ticks = [2**power for power in range(12) if low <= 2**power <= high] or [low, high]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.locator_params(axis="x", integer=True)
        axes.minorticks_off()
        axes.set(xlabel="depth", ylabel="tree size (tokens)")
        axes.grid(visible=False)
        axes.legend(ncols=len(marks), loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
        axes.set_title(title, loc="left", pad=22)
        figure.tight_layout()
    return figure


def predicted_measured(table: pd.DataFrame, *, within: float = 0.1, title=""):
    """The trees of a live check: measured over predicted milliseconds per token, with the band of +- `within` (speed)."""
    _need(table, "predicted_ms", "measured_ms", "method")
    reach = np.array([0.9, 1.1]) * [table[["predicted_ms", "measured_ms"]].min().min(), table["predicted_ms"].max()]
    with style() as palette:
        figure = _figure(0.7 * WIDTH_IN, 1.2 * HEIGHT_IN)
        axes = figure.subplots()
        line = np.linspace(*reach, 50)
        axes.fill_between(line, line * (1 - within), line * (1 + within), color="0.85", label=f"within {within:.0%}")
        axes.plot(line, line, color="0.4", linewidth=1)
        axes.plot(table["predicted_ms"], table["measured_ms"], "o", color=palette[0])
        for row in table.itertuples():
            place = dict(xytext=(4, -3), textcoords="offset points", fontsize=7)
            axes.annotate(row.method, (row.predicted_ms, row.measured_ms), **place)
        axes.set(xlabel="predicted ms per token", ylabel="measured ms per token")
        axes.legend(loc="upper left")
        axes.set_title(title, loc="left")
        figure.tight_layout()
    return figure


def intervals(table: pd.DataFrame, name: str, value: str, *, panel: str | None = None, label="", line=1.0, title=""):
    """Dots of `value` with columns low and high, one row per `name`, one panel per value of `panel`; a line at `line`."""
    _need(table, name, value, "low", "high", *([panel] if panel else []))
    panels = [(None, table)] if panel is None else list(table.groupby(panel, sort=False))
    with style() as palette:
        figure = _figure(WIDTH_IN, 0.8 + 0.24 * len(table) + 0.3 * len(panels))
        heights = [len(rows) + 1 for _, rows in panels]
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for number, (axes, (head, rows)) in enumerate(zip(all_axes, panels, strict=True)):
            places, color = np.arange(len(rows))[::-1], palette[number % len(palette)]
            axes.hlines(places, rows["low"], rows["high"], color=color, linewidth=1.5)
            axes.plot(rows[value], places, linestyle="", marker="o", markersize=4, color=color)
            axes.axvline(line, color="0.3", linewidth=1, linestyle="--")
            axes.set_yticks(places, rows[name], fontsize=7)
            axes.set_ylim(-0.7, len(rows) - 0.3)
            axes.set_title("" if head is None else str(head), fontsize=8, loc="left")
        all_axes[-1].set_xlabel(label or value)
        figure.suptitle(title, x=0.02, ha="left")
        figure.tight_layout()
    return figure


def _need(table: pd.DataFrame, *names: str) -> None:
    for name in names:
        if name not in table:
            raise nearest_name_error("column", name, table.columns)
    if table.empty:
        raise SpecdecError("there is nothing to draw: the table has no rows.")
