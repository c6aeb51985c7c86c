"""Pictures that notebooks draw: lines, dots, bars and heat maps in panels; and the tables of
trainings behind some of them.

Each takes long rows and returns a figure. Knows nothing about whose rows they are.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from specdec import runs
from specdec.errors import SpecdecError
from specdec.report.explorer_panels import places, readable
from specdec.report.figures import (
    ABOVE,
    COLOURS,
    HEIGHT_IN,
    WIDTH_IN,
    draw_line,
    drawn,
    grouped_bars,
    ink,
    name_ends,
)
from specdec.report.tables import need, surely

COLUMN_IN, ROW_IN = 1.05, 0.2  # distance of columns and rows of a tree
PAGE_COLOURS, WIDEST_PX = 64, (1000, 8000)  # of a picture on a page


def few_colours(picture: Image.Image) -> Image.Image:
    """The picture with a palette, as small as figures on a page can be without a visible loss."""
    return picture.convert("RGB").quantize(PAGE_COLOURS, dither=Image.Dither.NONE)


def small_picture(content: bytes, box_px: tuple[int, int] = WIDEST_PX) -> bytes:
    """A picture as PNG in few colours, made smaller until it fits into (width, height)."""
    picture, written = Image.open(io.BytesIO(content)).convert("RGB"), io.BytesIO()
    picture.thumbnail(box_px, Image.Resampling.LANCZOS)
    few_colours(picture).save(written, "png", optimize=True)
    return written.getvalue()


def training_curves(
    folders: dict[str, Path], columns=("reward", "entropy", "tok_per_ms"), points: int = 60
) -> pd.DataFrame:
    """The curves of several runs in long form: run, steps, what, value; means over blocks, about
    `points` per run.
    """
    curves = []
    for name, folder in folders.items():
        curve = runs.read_table(Path(folder) / "curve.parquet")[["steps", *columns]]
        block = curve.index // max(1, len(curve) // points)
        mean = curve.groupby(block).mean().assign(steps=curve["steps"].groupby(block).max())
        curves.append(mean.melt("steps", var_name="what", value_name="value").assign(run=name))
    return pd.concat(curves, ignore_index=True)[["run", "steps", "what", "value"]]


def training_results(folders: dict[str, Path]) -> pd.DataFrame:
    """One row per run: steps, minutes, steps_per_s, and the greedy policy's commonest answer with
    its share.
    """
    results = [
        {"run": name, **runs.read_json(Path(folder) / "plan.json")["results"]}
        for name, folder in folders.items()
    ]
    table = pd.DataFrame(results).rename(columns={"most_common_frac": "commonest_frac"})
    table["minutes"], table["steps_per_s"] = (
        table["elapsed_s"] / 60,
        table["steps"] / table["elapsed_s"],
    )
    table["commonest"] = ["/".join(map(str, answer)) for answer in table["most_common"]]
    return table[
        ["run", "steps", "minutes", "steps_per_s", "answers", "commonest", "commonest_frac"]
    ]


def over_seeds(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines by panel, name and step: the mean of their values, with the least and the largest as
    low and high.
    """
    groups = lines.groupby(["panel", "name", "step"], sort=False)["value"]
    return groups.agg(value="mean", low="min", high="max").reset_index()


def seeds_of(curves: pd.DataFrame, drafters: dict[str, str]) -> str:
    """How many seeds each drafter was trained with, pair by pair: 'PPOW 3 and 3; CST 1 and 3'."""
    if curves.empty:
        return ""
    named = curves["drafter"].map(drafters).rename("drafter")
    counts = curves.groupby([named, "pair"], sort=False)["seed"].nunique().unstack(fill_value=0)
    return "; ".join(f"{name} {' and '.join(map(str, row))}" for name, *row in counts.itertuples())


def over_start(lines: pd.DataFrame) -> pd.DataFrame:
    """The same lines in % of change against their first step's value."""
    columns = ["value", "low", "high"]
    first = lines.groupby(["panel", "name"])["value"].transform("first") if len(lines) else 1.0
    return lines.assign(**{name: 100 * (lines[name] / first - 1) for name in columns if len(lines)})


def depth_and_size(
    by_depth: pd.DataFrame,
    by_size: pd.DataFrame,
    value: str,
    *,
    label: str,
    lines=("total_tokens", "depth"),
    heads=("", ""),
):
    """Two panels: `value` against depth, one line per size, and against total_tokens, one line per
    depth.

    lines: the column that names the lines of the left and of the right panel. heads: over the
    panels. One axis of values for both, from 0.
    """
    panels = [
        (by_depth, "depth", lines[0], "depth"),
        (by_size, "total_tokens", lines[1], "tree size (tokens)"),
    ]
    for table, x, by, _ in panels:
        need(table, x, value, by)
    highest = max(by_depth[value].max(), by_size[value].max())
    with drawn() as (figure, _):
        both = figure.subplots(1, 2, sharey=True)
        for axes, head, (table, x, by, x_label) in zip(both, heads, panels, strict=True):
            unit = {"total_tokens": "{} tokens", "depth": "depth {}"}.get(by, "{}")
            names = {line: unit.format(line) for line in table[by].unique()}
            for number, (line, name) in enumerate(names.items()):
                draw_line(axes, table[table[by] == line], x, value, number, name)
            axes.set(xlabel=x_label, ylim=(0, 1.05 * highest), title=head)
            axes.locator_params(axis="x", integer=True)
            if (
                axes is both[1] or lines[0] != lines[1]
            ):  # the same lines in both panels are named once
                name_ends(axes, names.values())
        both[0].set_ylabel(label)
    return figure


def intervals(
    table: pd.DataFrame,
    name: str,
    value: str,
    *,
    panel: str | None = None,
    label="",
    line=1.0,
    title="",
):
    """Dots of `value` with columns low and high, one row per `name`, one panel per value of
    `panel`; a line at `line`.
    """
    need(table, name, value, "low", "high", *([panel] if panel else []))
    table = surely(table)
    panels = [("", table)] if panel is None else list(table.groupby(panel, sort=False))
    with drawn(height_in=0.8 + 0.24 * len(table) + 0.3 * len(panels), title=title) as (figure, _):
        heights = [len(rows) + 1 for _, rows in panels]
        all_axes = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, (head, rows) in zip(all_axes, panels, strict=True):
            dots(axes, np.arange(len(rows)), rows, value)
            axes.axvline(line, color="0.3", linewidth=1, linestyle="--")
            axes.set(
                yticks=np.arange(len(rows)),
                yticklabels=rows[name],
                ylim=(len(rows) - 0.3, -0.7),
                title=str(head),
            )
        all_axes[-1].set_xlabel(label or value)
    return figure


def dots(
    axes, places, rows: pd.DataFrame, value: str, number: int = 0, ends=("low", "high"), **look
) -> None:
    """Dots of a column at these places from the top down, in the colour of this number, with their
    intervals.
    """
    look = dict(linestyle="", marker="o", markersize=4.5, color=COLOURS[number]) | look
    axes.hlines(places, *(rows[end] for end in ends), color=look["color"], linewidth=1.5)
    axes.plot(rows[value], places, **look)


def under_heads(axes, heads: pd.Series, names: pd.Series) -> np.ndarray:
    """Name the rows of axes from the top down, with a bold line inside above those of each head;
    returns the rows' places.
    """
    places, free = [], 0
    for head, own in names.groupby(heads, sort=False):
        axes.text(
            0.01,
            free,
            head,
            transform=axes.get_yaxis_transform(),
            va="center",
            weight="bold",
            fontsize=8,
        )
        places += range(free + 1, free + 1 + len(own))
        free += 1 + len(own)
    axes.set(yticks=places, yticklabels=names, ylim=(free - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    return np.array(places)


def bar_panels(
    table: pd.DataFrame, x: str, y: str, *, by: str, panel: str, labels=("", ""), note=""
):
    """Bars of long rows: `y` over the values of `x`, one look per value of `by`, one panel per
    value of `panel`.

    labels: of the axes; the first defaults to the panel's name, which else is its title. Where the
    column <y>_low is there, whiskers show the intervals; few bars have their numbers. Values and
    panels keep their order of appearance.
    """
    need(table, x, y, by, panel)
    parts, looks = list(table.groupby(panel, sort=False)), list(dict.fromkeys(table[by]))
    with drawn(note=note) as (figure, _):
        wide = [rows[x].nunique() for _, rows in parts]
        all_axes = figure.subplots(1, len(parts), squeeze=False, width_ratios=wide)[0]
        for axes, (head, rows) in zip(all_axes, parts, strict=True):
            grouped_bars(axes, rows, x, y, by, looks)
            head = textwrap.fill(str(head), 90 // len(parts))
            axes.set(xlabel=labels[0] or head, title=head if labels[0] else "")
            if rows[y].min() < 0:
                axes.axhline(0, color="0.3", linewidth=1)
            for bars in axes.containers if len(rows) <= 12 else ():
                if hasattr(bars, "datavalues"):
                    axes.bar_label(
                        bars, [_short(one) for one in bars.datavalues], padding=2, fontsize=7
                    )
            names = [textwrap.fill(text.get_text(), 11) for text in axes.get_xticklabels()]
            axes.set_xticks(axes.get_xticks(), names)
            axes.margins(y=0.1)
        all_axes[0].set_ylabel(labels[1])
        if len(looks) > 1:
            handles = dict(
                pair[::-1]
                for axes in all_axes
                for pair in zip(*axes.get_legend_handles_labels(), strict=True)
            )
            handles = {look: handles[look] for look in map(str, looks)}
            place = dict(loc="lower left", bbox_to_anchor=(0.05, 1.0))
            figure.legend(
                handles.values(),
                handles,
                ncols=2 if max(map(len, handles)) > 20 else len(looks),
                **place,
            )
    return figure


def _short(value: float) -> str:
    """The number of a bar: '' for 0, no digit behind the point from 10 on."""
    return f"{value:.{int(abs(value) < 9.95)}f}" if abs(value) >= 0.05 else ""


def heat_panels(
    table: pd.DataFrame,
    x: str,
    y: str,
    value: str,
    *,
    rows: str,
    columns: str,
    labels=("", ""),
    note="",
):
    """Heat maps of shares of `cycles` over x and y, one row of panels per value of `rows`, one
    column per value of `columns`.

    All panels share their axes and one scale of colours, in which small shares differ as well;
    cells of 1 % and more have their number, in %.
    """
    from matplotlib.colors import PowerNorm

    need(table, x, y, value, rows, columns, "cycles")
    down, across = list(dict.fromkeys(table[rows])), list(dict.fromkeys(table[columns]))
    at_x, at_y = sorted(table[x].unique()), sorted(table[y].unique())
    look = dict(
        origin="lower",
        aspect="auto",
        cmap="Blues",
        norm=PowerNorm(0.5, 0.0, float(table[value].max())),
    )
    with drawn(WIDTH_IN, 0.7 + (0.9 + 0.22 * min(10, len(at_y))) * len(down), note=note) as (
        figure,
        _,
    ):
        grid = figure.subplots(len(down), len(across), squeeze=False, sharex=True, sharey=True)
        for axes, (row, column) in zip(
            grid.flat, ((row, column) for row in down for column in across), strict=True
        ):
            part = table[(table[rows] == row) & (table[columns] == column)]
            cells = (
                part.pivot_table(value, y, x, aggfunc="sum")
                .reindex(index=at_y, columns=at_x)
                .fillna(0.0)
            )
            shown = axes.imshow(cells, **look)
            written = cells.stack() if cells.size <= 120 else pd.Series(dtype=float)
            for (of_y, of_x), share in written[written >= 0.01].items():
                colour = ink(shown.cmap(shown.norm(share)))
                place = at_x.index(of_x), at_y.index(of_y)
                axes.text(
                    *place, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour
                )
            axes.set_title(f"{row}: {column}\nn = {int(part['cycles'].sum()):,} cycles", fontsize=8)
            axes.set_xticks(*_few(at_x))
            axes.set_yticks(*_few(at_y))
            axes.grid(visible=False)
            axes.set(
                xlabel=labels[0] if row == down[-1] else "",
                ylabel=labels[1] if column == across[0] else "",
            )
    return figure


def _few(values: list, most: int = 8) -> tuple[list[int], list[str]]:
    """Places and names of at most `most` ticks."""
    step = -(-len(values) // most)
    return list(range(0, len(values), step)), [f"{value:g}" for value in values[::step]]


def speed_surface(
    table: pd.DataFrame, marks: dict[str, tuple[float, float]], *, value="speedup", title=""
):
    """Filled contours of `value` over depth and total_tokens (logarithmic); of several widths the
    best one counts.

    table: rows of static_grid. marks: name -> (depth, total_tokens), drawn with a sign each.
    """
    need(table, "depth", "total_tokens", value)
    surface = table.groupby(["total_tokens", "depth"])[value].max().unstack()
    if min(surface.shape) < 2:
        raise SpecdecError("a surface needs two or more depths and sizes; widen the grid.")
    with drawn(height_in=1.2 * HEIGHT_IN, title=title) as (figure, _):
        axes = figure.subplots()
        levels = np.unique(np.linspace(np.nanmin(surface), np.nanmax(surface), 15))
        filled = axes.contourf(
            surface.columns, surface.index, surface, max(2, len(levels)), cmap="viridis"
        )
        figure.colorbar(
            filled,
            ax=axes,
            label="times as fast as plain decoding" if value == "speedup" else value,
        )
        for (name, (depth, total_tokens)), sign in zip(
            marks.items(), "os*^DvPX" * len(marks), strict=False
        ):
            look = dict(
                marker=sign,
                markersize=9,
                markeredgecolor="black",
                markerfacecolor="white",
                linestyle="",
            )
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
            axes.legend(ncols=len(marks), **ABOVE)
    return figure


def predicted_measured(table: pd.DataFrame, *, within: float = 0.1, title=""):
    """The trees of a live check: measured over predicted milliseconds per token, with the band of
    +- `within` (speed).
    """
    need(table, "predicted_ms", "measured_ms", "method")
    ends = (
        0.9 * table[["predicted_ms", "measured_ms"]].min().min(),
        1.1 * table["predicted_ms"].max(),
    )
    with drawn(0.7 * WIDTH_IN, 1.2 * HEIGHT_IN) as (figure, palette):
        axes = figure.subplots()
        line = np.linspace(*ends, 50)
        axes.fill_between(
            line,
            line * (1 - within),
            line * (1 + within),
            color="0.85",
            label=f"within {within:.0%}",
        )
        axes.plot(line, line, color="0.4", linewidth=1)
        axes.plot(table["predicted_ms"], table["measured_ms"], "o", color=palette[0])
        for row in table.itertuples():
            place = dict(xytext=(4, -3), textcoords="offset points", fontsize=7)
            axes.annotate(row.method, (row.predicted_ms, row.measured_ms), **place)
        axes.set(xlabel="predicted ms per token", ylabel="measured ms per token")
        axes.legend(loc="upper left")
        axes.set_title(title, loc="left")
    return figure


def tree(
    tokens: Sequence[str],
    parents: Sequence[int],
    *,
    scores=None,
    accepted: Sequence[int] = (),
    title: str = "",
):
    """A draft tree as a figure: the accepted path is filled, darker borders mean likelier nodes.

    tokens: text of each node [N], root first. parents: index of each node's parent [N], -1 for the
    root, parents before children. scores: cumulative log-probability [N], shown as the border's
    darkness. accepted: indices of the nodes on the accepted path.
    """
    from matplotlib.colors import to_rgba

    assert len(tokens) == len(parents) > 0 and (scores is None or len(scores) == len(tokens))
    assert parents[0] == -1 and all(
        0 <= parent < node for node, parent in enumerate(parents) if node
    )
    assert all(0 <= node < len(tokens) for node in accepted)
    depth, row = places(parents)
    path, size = set(accepted), ((max(depth) + 1.2) * COLUMN_IN, (max(row) + 2) * ROW_IN + 0.3)
    with drawn(*size, title=title) as (figure, _):
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(-0.5, max(depth) + 0.5), ylim=(max(row) + 0.7, -0.7))
        for node, parent in enumerate(parents):
            if parent >= 0:
                look = (
                    dict(color=COLOURS[5], linewidth=2)
                    if node in path
                    else dict(color="0.75", linewidth=1)
                )
                axes.plot([depth[parent], depth[node]], [row[parent], row[node]], zorder=1, **look)
        for node, token in enumerate(tokens):
            fill, letters = (COLOURS[5], "white") if node in path else ("white", "0.13")
            # unlikely ones stay visible
            share = 0.5 if scores is None else math.exp(max(float(scores[node]), -6.0)) ** 0.3
            box = dict(
                boxstyle="round,pad=0.25",
                facecolor=fill,
                edgecolor=to_rgba(COLOURS[0], 0.25 + 0.75 * share),
            )
            text = dict(
                family="DejaVu Sans Mono",
                fontsize=7,
                color=letters,
                parse_math=False,
                gid=f"node-{node}",
            )
            axes.text(
                depth[node],
                row[node],
                readable(token),
                ha="center",
                va="center",
                bbox=box,
                zorder=2,
                **text,
            )
    return figure
