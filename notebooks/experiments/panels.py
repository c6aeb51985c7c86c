"""Figures of the papers that need more than one axis: bars in panels, grouped or stacked, and heat maps of answers.

Each takes long rows and returns a figure. Knows nothing about whose rows they are or which paper prints them.
"""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd

from specdec.report.figures import HEIGHT_IN, WIDTH_IN, curves, drawn
from specdec.report.tables import need

from workbook.pictures import depth_and_size

HATCHES = ("", "///", "...", "xxx")  # beside the colour, for print without colour


def bar_panels(table: pd.DataFrame, x: str, y: str, *, by: str, panel: str, labels=("", ""), stacked: bool = False):
    """Bars of long rows: `y` over the values of `x`, one colour per value of `by`, one panel per value of `panel`.

    stacked: on top of each other instead of side by side. labels: of the axes; a panel's name stands over it. Where the
    column <y>_low is there, whiskers show the intervals. Values and panels keep their order of appearance.
    """
    need(table, x, y, by, panel)
    parts, names = list(table.groupby(panel, sort=False)), list(dict.fromkeys(table[by]))
    across = 2 if len(parts) in (2, 4) else min(3, len(parts))
    down, handles = -(-len(parts) // across), {}
    with drawn(WIDTH_IN, HEIGHT_IN * (0.3 + 0.7 * down)) as (figure, palette):
        all_axes = figure.subplots(down, across, squeeze=False).ravel()
        for number, (axes, (head, rows)) in enumerate(zip(all_axes, parts, strict=False)):
            _bars(axes, rows, (x, y, by), names, palette, stacked, room_in=WIDTH_IN / across - 0.7)
            axes.set_title(textwrap.fill(str(head), 100 // across), fontsize=8, loc="left")
            axes.grid(axis="x", visible=False)
            axes.set_ylabel(labels[1] if number % across == 0 else "", fontsize=8)
            axes.set_xlabel(labels[0] if number >= len(parts) - across else "", fontsize=8)
            handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        for axes in all_axes[len(parts) :]:
            axes.set_axis_off()
        across = max(1, 90 // (6 + max(map(len, map(str, names)))))
        figure.legend(
            handles.values(), handles, fontsize=7, ncols=across, loc="lower center", bbox_to_anchor=(0.5, 1.0)
        )
    return figure


def _bars(axes, rows: pd.DataFrame, columns: tuple, names: list, palette: list, stacked: bool, room_in: float) -> None:
    x, y, by = columns
    places = {value: number for number, value in enumerate(dict.fromkeys(rows[x]))}
    present = [name for name in names if (rows[by] == name).any()]
    width = 0.8 if stacked else 0.8 / len(present)
    bottom = pd.Series(0.0, index=list(places))
    for number, name in enumerate(present):
        part = rows[rows[by] == name].drop_duplicates(x).set_index(x)
        at = np.array([places[value] for value in part.index], dtype=float)
        at += 0.0 if stacked else (number - (len(present) - 1) / 2) * width
        colour, hatch = palette[names.index(name) % len(palette)], HATCHES[names.index(name) % len(HATCHES)]
        look = dict(color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, label=str(name))
        axes.bar(at, part[y], width, bottom=bottom[part.index] if stacked else 0, **look)
        if stacked:
            bottom[part.index] += part[y]
        elif f"{y}_low" in part and part[f"{y}_low"].notna().any():
            reach = np.abs(part[[f"{y}_low", f"{y}_high"]].T.to_numpy(float) - part[y].to_numpy(float))
            axes.errorbar(at, part[y], yerr=np.nan_to_num(reach), fmt="none", ecolor="0.2", capsize=1.5)
    crowded = 0.075 * sum(len(str(value)) + 1 for value in places) > room_in  # inches that the names take side by side
    turn = dict(rotation=40, ha="right") if crowded else {}
    axes.set_xticks(list(places.values()), [str(value) for value in places], fontsize=7, **turn)


def heat_panels(table: pd.DataFrame, x: str, y: str, value: str, *, rows: str, columns: str, labels=("", "")):
    """Heat maps of `value` over x and y, one row of panels per value of `rows`, one column per value of `columns`.

    All panels share their axes and one scale of colours.
    """
    need(table, x, y, value, rows, columns)
    down, across = list(dict.fromkeys(table[rows])), list(dict.fromkeys(table[columns]))
    at_x, at_y = sorted(table[x].unique()), sorted(table[y].unique())
    most = float(table[value].max())
    with drawn(WIDTH_IN, 0.6 + 0.55 * HEIGHT_IN * len(down)) as (figure, _):
        ratios = [1.0] * len(across) + [0.06]
        layout = figure.add_gridspec(len(down), len(across) + 1, width_ratios=ratios)
        for i, row in enumerate(down):
            line = [figure.add_subplot(layout[i, j]) for j in range(len(across))]
            for axes, column in zip(line, across, strict=True):
                part = table[(table[rows] == row) & (table[columns] == column)]
                cells = part.pivot_table(value, y, x, aggfunc="sum").reindex(index=at_y, columns=at_x)
                shown = axes.imshow(cells.fillna(0.0), origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=most)
                axes.set_title(str(column) if row == down[0] else "", fontsize=8)
                axes.set_xticks(*_few(at_x), fontsize=7)
                axes.set_yticks(*_few(at_y), fontsize=7)
                axes.grid(visible=False)
                axes.label_outer()
            line[0].set_ylabel(f"{row}\n{labels[1]}", fontsize=8)
        figure.supxlabel(labels[0], fontsize=8)
        figure.colorbar(shown, cax=figure.add_subplot(layout[:, -1]), label="share of cycles")
    return figure


def _few(values: list, most: int = 8) -> tuple[list[int], list[str]]:
    """Places and names of at most `most` ticks."""
    step = -(-len(values) // most)
    return list(range(0, len(values), step)), [f"{value:g}" for value in values[::step]]


def fixed_trees(grid: pd.DataFrame, size: int = 60, depth: int = 8, width: int = 10):
    """Tokens per cycle of static trees, one line per pair: against depth at `size` nodes, against size at `depth`.

    grid: rows of static_grid with a column pair. Where the exact size, depth or width is not there, the nearest one is.
    """
    need(grid, "pair", "total_tokens", "depth", "top_k", "tau")
    plain = grid[grid["beam"] == ""] if "beam" in grid else grid
    rows = plain[plain["top_k"] == _nearest(plain["top_k"], width)]
    by_depth = rows[rows["total_tokens"] == _nearest(rows["total_tokens"], size)]
    by_size = rows[rows["depth"] == _nearest(rows["depth"], depth)]
    return depth_and_size(by_depth, by_size, "tau", label="tokens per cycle (tau)", lines=("pair", "pair"))


def by_subject(table: pd.DataFrame, *, label=""):
    """Dots, a row for each suite: left `gain`, one colour per method, right `speedup` of the tree that they are compared with.

    table: subject, method, gain, speedup; suites from the largest gain of the first method down.
    """
    need(table, "subject", "method", "gain", "speedup")
    methods = list(dict.fromkeys(table["method"]))
    first = table[table["method"] == methods[0]].sort_values("gain")
    places = dict(zip(first["subject"], range(len(first)), strict=True))
    with drawn(height_in=1.0 + 0.14 * len(places)) as (figure, palette):
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        for number, method in enumerate(methods):
            rows = table[table["method"] == method]
            look = dict(color=palette[number % len(palette)], marker="osD^v"[number % 5], markersize=3.5, linestyle="")
            left.plot(rows["gain"], rows["subject"].map(places), label=method, **look)
        left.axvline(1.0, color="0.3", linewidth=1, linestyle="--")
        right.plot(first["speedup"], first["subject"].map(places), color="0.4", marker="|", markersize=5, linestyle="")
        left.set_yticks(list(places.values()), [name.replace("_", " ") for name in places], fontsize=6)
        left.set_ylim(-1, len(places))
        left.set_xlabel(label, fontsize=8)
        right.set_xlabel("the tree, over plain decoding", fontsize=8)
        left.legend(fontsize=7, ncols=len(methods), loc="lower left", bbox_to_anchor=(0.0, 1.0))
    return figure


def _nearest(values: pd.Series, wanted: int) -> int:
    return int(min(values.unique(), key=lambda value: abs(value - wanted)))


def learning(table: pd.DataFrame, labels=("decisions", "")):
    """Lines of trainings, run by run: one panel per value of `what`, each with a scale of its own. labels: of the axes.

    table: run, steps, what, value.
    """
    figure = curves(table, "steps", "value", by="run", panel="what", labels=labels)
    for axes in figure.axes:
        axes.set_ylim(auto=True)
        axes.autoscale(axis="y")
    return figure
