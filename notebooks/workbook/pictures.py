"""Pictures that single notebooks draw, and the tables of trainings behind some of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.errors import SpecdecError
from specdec.report.figures import HEIGHT_IN, WIDTH_IN, draw_line, drawn, legend_above
from specdec.report.tables import need


def training_curves(
    folders: dict[str, Path], columns=("reward", "entropy", "tok_per_ms"), points: int = 60
) -> pd.DataFrame:
    """The curves of several runs in long form: run, steps, what, value; means over blocks, about `points` per run."""
    curves = []
    for name, folder in folders.items():
        curve = runs.read_table(Path(folder) / "curve.parquet")[["steps", *columns]]
        block = curve.index // max(1, len(curve) // points)
        mean = curve.groupby(block).mean().assign(steps=curve["steps"].groupby(block).max())
        curves.append(mean.melt("steps", var_name="what", value_name="value").assign(run=name))
    return pd.concat(curves, ignore_index=True)[["run", "steps", "what", "value"]]


def training_results(folders: dict[str, Path]) -> pd.DataFrame:
    """One row per run: steps, minutes, steps_per_s, and the greedy policy's commonest answer with its share."""
    results = [
        {"run": name, **runs.read_json(Path(folder) / "plan.json")["results"]} for name, folder in folders.items()
    ]
    table = pd.DataFrame(results).rename(columns={"most_common_frac": "commonest_frac"})
    table["minutes"], table["steps_per_s"] = table["elapsed_s"] / 60, table["steps"] / table["elapsed_s"]
    table["commonest"] = ["/".join(map(str, answer)) for answer in table["most_common"]]
    return table[["run", "steps", "minutes", "steps_per_s", "answers", "commonest", "commonest_frac"]]


def depth_and_size(
    by_depth: pd.DataFrame, by_size: pd.DataFrame, value: str, *, label: str, lines=("total_tokens", "depth"), title=""
):
    """Two panels: `value` against depth, one line per size, and against total_tokens, one line per depth.

    lines: the column that names the lines of the left and of the right panel. One axis of values for both, from 0.
    """
    panels = [(by_depth, "depth", lines[0], "depth"), (by_size, "total_tokens", lines[1], "tree size (tokens)")]
    for table, x, by, _ in panels:
        need(table, x, value, by)
    highest = max(by_depth[value].max(), by_size[value].max())
    with drawn(title=title) as (figure, palette):
        both = figure.subplots(1, 2, sharey=True)
        for axes, (table, x, by, x_label) in zip(both, panels, strict=True):
            for number, line in enumerate(table[by].unique()):
                draw_line(axes, table[table[by] == line], x, value, palette[number % len(palette)], str(line))
            axes.set(xlabel=x_label, ylim=(0, 1.05 * highest))
            axes.locator_params(axis="x", integer=True)
            if axes is both[1] or lines[0] != lines[1]:  # the same lines in both panels are named once
                axes.legend(title=by.replace("_", " "), fontsize=7, title_fontsize=7)
        both[0].set_ylabel(label)
    return figure


def speed_surface(table: pd.DataFrame, marks: dict[str, tuple[float, float]], *, value="speedup", title=""):
    """Filled contours of `value` over depth and total_tokens (logarithmic); of several widths the best one counts.

    table: rows of static_grid. marks: name -> (depth, total_tokens), drawn with a sign each.
    """
    need(table, "depth", "total_tokens", value)
    surface = table.groupby(["total_tokens", "depth"])[value].max().unstack()
    if min(surface.shape) < 2:
        raise SpecdecError("a surface needs two or more depths and sizes; widen the grid.")
    with drawn(height_in=1.2 * HEIGHT_IN) as (figure, _):
        axes = figure.subplots()
        levels = np.unique(np.linspace(np.nanmin(surface), np.nanmax(surface), 15))
        filled = axes.contourf(surface.columns, surface.index, surface, max(2, len(levels)), cmap="viridis")
        figure.colorbar(filled, ax=axes, label="times as fast as plain decoding" if value == "speedup" else value)
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
        if marks:
            legend_above(axes, title, columns=len(marks))
    return figure


def predicted_measured(table: pd.DataFrame, *, within: float = 0.1, title=""):
    """The trees of a live check: measured over predicted milliseconds per token, with the band of +- `within` (speed)."""
    need(table, "predicted_ms", "measured_ms", "method")
    ends = 0.9 * table[["predicted_ms", "measured_ms"]].min().min(), 1.1 * table["predicted_ms"].max()
    with drawn(0.7 * WIDTH_IN, 1.2 * HEIGHT_IN) as (figure, palette):
        axes = figure.subplots()
        line = np.linspace(*ends, 50)
        axes.fill_between(line, line * (1 - within), line * (1 + within), color="0.85", label=f"within {within:.0%}")
        axes.plot(line, line, color="0.4", linewidth=1)
        axes.plot(table["predicted_ms"], table["measured_ms"], "o", color=palette[0])
        for row in table.itertuples():
            place = dict(xytext=(4, -3), textcoords="offset points", fontsize=7)
            axes.annotate(row.method, (row.predicted_ms, row.measured_ms), **place)
        axes.set(xlabel="predicted ms per token", ylabel="measured ms per token")
        axes.legend(loc="upper left")
        axes.set_title(title, loc="left")
    return figure
