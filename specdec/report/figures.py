"""From tables to figures: one style, deterministic files, the scale written into every picture.

Knows nothing about models; takes the DataFrames of stats.py and tables.py. Imports matplotlib and seaborn when a
figure is drawn, not before.

Figures of recordings and cost models: curves over depth and size, the surface of speed, predicted against measured,
intervals.

In the style of `plots`, and saved by it. Knows nothing about models; takes the tables of statics, bound and livecheck.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import machine, runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.report.tables import PARTS

WIDTH_IN, HEIGHT_IN = 7.0, 3.2
RULES = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "svg.hashsalt": "specdec",  # ids inside an SVG are random without it
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@contextmanager
def style():
    """The one look of all figures, for the length of a with block."""
    import matplotlib
    import seaborn

    with seaborn.axes_style("whitegrid"), matplotlib.rc_context(RULES):
        yield seaborn.color_palette("colorblind")


def _figure(width_in: float, height_in: float):
    """A figure that pyplot does not keep: nothing to close, and a notebook shows the saved file, not a copy."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in))


def speedup_bars(table: pd.DataFrame, *, value="speedup", baseline=None, published=None, title=""):
    """Grouped bars of stats.compare's `value` with intervals, one group per suite; the line at 1 is the baseline.

    published: rows with suite, method and `value`, drawn as open diamonds over the bars they belong to.
    """
    shown = table if baseline is None else table[table["method"] != baseline]
    figure = _bars(shown, value, f"times as fast as {baseline or 'the baseline'}", published, title)
    figure.axes[0].axhline(1.0, color="0.3", linewidth=1, linestyle="--")
    return figure


def tau_bars(table: pd.DataFrame, *, published=None, title=""):
    """Grouped bars of tau (new tokens per cycle, bonus token included) with intervals, one group per suite."""
    return _bars(table[table["tau"].notna()], "tau", "new tokens per cycle (tau)", published, title)


def _bars(table: pd.DataFrame, value: str, label: str, published, title: str):
    if table.empty:
        raise SpecdecError(f"there is nothing to draw: no row has {value}.")
    suites, methods = list(dict.fromkeys(table["suite"])), list(dict.fromkeys(table["method"]))
    width = 0.8 / len(methods)
    with style() as palette:
        figure = _figure(max(WIDTH_IN, 0.3 * len(suites) * len(methods)), HEIGHT_IN)
        axes = figure.subplots()
        for number, method in enumerate(methods):
            rows = table[table["method"] == method].set_index("suite").reindex(suites)
            centres = np.arange(len(suites)) + (number - (len(methods) - 1) / 2) * width
            axes.bar(centres, rows[value], width, color=palette[number % len(palette)], label=method)
            if f"{value}_low" in rows:
                reach = np.abs(rows[[f"{value}_low", f"{value}_high"]].T.to_numpy() - rows[value].to_numpy())
                axes.errorbar(centres, rows[value], yerr=np.nan_to_num(reach), fmt="none", ecolor="0.2", capsize=1.5)
            if published is not None:
                theirs = published[published["method"] == method].set_index("suite").reindex(suites)[value]
                axes.plot(centres, theirs, "D", color="0.1", markerfacecolor="none", markersize=4)
        axes.set_xticks(range(len(suites)), [str(suite).removeprefix("laptop/") for suite in suites])
        axes.tick_params(axis="x", rotation=0 if len(suites) <= 6 else 25)
        axes.set_ylabel(label)
        axes.grid(axis="x", visible=False)
        _title_and_legend(axes, title, columns=min(4, len(methods)))
        figure.tight_layout()
    return figure


def _title_and_legend(axes, title: str, columns: int):
    """The legend above the axes, the title above the legend: neither covers a bar."""
    legend = axes.legend(ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
    rows = -(-len(legend.get_texts()) // columns)
    axes.set_title(title, loc="left", pad=8 + 14 * rows)


def time_split(table: pd.DataFrame, *, title=""):
    """Stacked bars of tables.time_split: where the milliseconds of a cycle go, one bar per row, shares written in."""
    for name in PARTS:
        if name not in table:
            raise nearest_name_error("column", name, table.columns)
    with style() as palette:
        figure = _figure(WIDTH_IN, 1.0 + 0.42 * len(table))
        axes = figure.subplots()
        left = np.zeros(len(table))
        for part, colour in zip(PARTS, palette, strict=False):
            lengths = table[part].to_numpy(float)
            axes.barh(table.index.astype(str), lengths, left=left, color=colour, label=part.removesuffix("_ms"))
            for row, length in enumerate(lengths):
                share = length / table["total_ms"].iloc[row]
                if share >= 0.06:  # narrower slices have no room for a number
                    axes.text(left[row] + length / 2, row, f"{share:.0%}", ha="center", va="center", color="w")
            left += lengths
        axes.invert_yaxis()
        axes.set_xlabel("ms per cycle")
        axes.grid(axis="y", visible=False)
        _title_and_legend(axes, title, columns=len(PARTS))
        figure.tight_layout()
    return figure


def node_curve(table: pd.DataFrame, *, by="method", parts=("draft_ms", "verify_ms", "host_ms", "total_ms"), title=""):
    """Lines of tables.node_curve: milliseconds of a cycle and its parts against verified tokens, one panel per `by`."""
    import seaborn

    panels = list(dict.fromkeys(table[by]))
    with style() as palette:
        figure = _figure(WIDTH_IN, HEIGHT_IN)
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        look = dict(hue="part", style="part", markers=True, palette=palette[: len(parts)])
        for axes, panel in zip(row[0], panels, strict=True):
            long = table[table[by] == panel].melt("verified_tok", list(parts), "part", "ms")
            long["part"] = long["part"].str.removesuffix("_ms")
            last = panel == panels[-1]
            seaborn.lineplot(long, x="verified_tok", y="ms", ax=axes, legend=last, **look)
            axes.set(xlabel="", ylabel="ms per cycle", ylim=(0, None))
            axes.set_title(str(panel) if by == "method" else f"{by.replace('_', ' ')} {panel}")
        row[0][-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.supxlabel("tokens verified in one forward", fontsize=RULES["axes.labelsize"])  # once: panels are narrow
        figure.suptitle(title, x=0.02, ha="left")
        figure.tight_layout()
    return figure


def curves(table: pd.DataFrame, x: str, y: str, *, by: str, panel: str | None = None, labels=(), title=""):
    """Lines of long rows: y against x, one line per value of `by`, one panel (with its own scales) per value of `panel`.

    labels: what to write at the two axes, default the columns' names.
    """
    for name in (x, y, by, *([panel] if panel else [])):
        if name not in table:
            raise nearest_name_error("column", name, table.columns)
    if table.empty:
        raise SpecdecError(f"there is nothing to draw: no row has {y}.")
    panels = list(dict.fromkeys(table[panel])) if panel else [None]
    lines = list(dict.fromkeys(table[by]))
    with style() as palette:
        figure = _figure(WIDTH_IN, HEIGHT_IN)
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, one in zip(row, panels, strict=True):
            shown = table if one is None else table[table[panel] == one]
            for number, name in enumerate(lines):
                part = shown[shown[by] == name].sort_values(x)
                if len(part):
                    marker = "o" if len(part) <= 12 else ""  # so few are measurements, more are a curve
                    colour = palette[number % len(palette)]
                    axes.plot(part[x], part[y], marker=marker, markersize=3.5, color=colour, label=str(name))
            axes.set(xlabel=(labels or (x, y))[0], ylabel=(labels or (x, y))[1], ylim=(0, None))
            axes.set_title("" if one is None else str(one))
        if panel != by:
            row[-1].legend(title=by.replace("_", " "), loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.suptitle(title, x=0.02, ha="left")
        figure.tight_layout()
    return figure


def save(figure, stem: Path, *, scale: str, sources=(), data: pd.DataFrame | None = None) -> list[Path]:
    """Write <stem>.svg, .pdf and .png, byte for byte the same for the same figure, <stem>.json with its runs, and its
    `data` as <stem>.csv. At any scale but 'paper' the scale is written into the picture and the files' metadata.

    sources: the Runs whose rows are drawn.
    """
    import matplotlib

    stem, label = Path(stem), {"scale": runs.known_scale(scale), "runs": [run.label() for run in sources]}
    if scale != "paper":
        figure.text(0.995, 0.005, f"{scale} scale", ha="right", va="bottom", fontsize=8, color="0.35", gid="scale")
    about = runs.canonical(label)
    metadata = {
        "svg": {"Title": stem.name, "Description": about, "Date": None},
        "pdf": {"Title": stem.name, "Subject": about, "CreationDate": None},
        "png": {"Title": stem.name, "Description": about, "Software": None},
    }
    written = []
    for kind, facts in metadata.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        with matplotlib.rc_context(RULES), runs.atomic(path) as temporary:
            figure.savefig(temporary, format=kind, metadata=facts, bbox_inches="tight")
        written.append(path)
    if data is not None:
        written.append(
            runs.write_text(stem.with_name(f"{stem.name}.csv"), data.to_csv(index=data.index.name is not None))
        )
    return [*written, runs.write_json(stem.with_name(f"{stem.name}.json"), {**label, **machine.commit()})]


# ---- from plots_replay ----------------------------------------


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
