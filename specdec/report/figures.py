"""From tables to figures: one style, deterministic files, the scale of what was measured written into every picture.

Each function takes a DataFrame of long rows and returns a figure; `save` writes it. matplotlib and seaborn are imported
when a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.report import provenance
from specdec.report.tables import PARTS, need, surely

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
BESIDE = dict(loc="center left", bbox_to_anchor=(1.0, 0.5))  # where a legend covers nothing
ABOVE = dict(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)


@contextmanager
def drawn(width_in: float = WIDTH_IN, height_in: float = HEIGHT_IN, title: str = "") -> Iterator[tuple]:
    """(figure, palette) in the one look of all figures; laid out, with its title, when the with block ends."""
    import matplotlib
    import seaborn
    from matplotlib.figure import Figure

    with seaborn.axes_style("whitegrid"), matplotlib.rc_context(RULES):
        figure = Figure(figsize=(width_in, height_in))
        yield figure, seaborn.color_palette("colorblind")
        if title:
            figure.suptitle(title, x=0.02, ha="left")
        figure.tight_layout()


def save(figure, stem: Path, *, sources=(), data: pd.DataFrame | None = None, about: dict | None = None) -> list[Path]:
    """Write <stem>.svg, .pdf and .png, byte for byte the same for the same figure, its `data` as <stem>.csv, and
    <stem>.json with where it comes from. The label of its provenance is written into the picture.

    sources: the Runs whose rows are drawn, as `provenance.of` takes them. about: more facts for the json file.
    """
    import matplotlib

    stem, origin = Path(stem), provenance.of(sources, data)
    labelled(figure, origin.label)
    described = runs.canonical({"scale": origin.scale, "runs": [row["key"] for row in origin.rows]})
    metadata = {
        "svg": {"Title": stem.name, "Description": described, "Date": None},
        "pdf": {"Title": stem.name, "Subject": described, "CreationDate": None},
        "png": {"Title": stem.name, "Description": described, "Software": None},
    }
    written = []
    for kind, facts in metadata.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        with matplotlib.rc_context(RULES), runs.atomic(path) as temporary:
            figure.savefig(temporary, format=kind, metadata=facts, bbox_inches="tight")
        written.append(path)
    if data is not None:
        text = data.to_csv(index=data.index.name is not None)
        written.append(runs.write_text(stem.with_name(f"{stem.name}.csv"), text))
    return [*written, runs.write_json(stem.with_name(f"{stem.name}.json"), {**origin.record(), **(about or {})})]


def labelled(figure, label: str):
    """Write `label` below everything at the right edge; returns the text. Once: a second call changes the first's."""
    text = next((text for text in figure.texts if text.get_gid() == "scale"), None) or figure.text(
        0.995, -0.01, "", ha="right", va="top", fontsize=7, color="0.35", gid="scale"
    )
    text.set_text(label)
    return text


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
    need(table, "suite", "method", value)
    suites, methods, table = table["suite"].unique(), table["method"].unique(), surely(table)
    width = 0.8 / len(methods)
    with drawn(max(WIDTH_IN, 0.3 * len(suites) * len(methods))) as (figure, palette):
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
        axes.set_xticks(range(len(suites)), [str(suite).rpartition("/")[2] for suite in suites])
        axes.tick_params(axis="x", rotation=0 if len(suites) <= 6 else 25)
        axes.set_ylabel(label)
        axes.grid(axis="x", visible=False)
        legend_above(axes, title, columns=min(4, len(methods)))
    return figure


def legend_above(axes, title: str, columns: int) -> None:
    """The legend above the axes, the title above the legend: neither covers a bar."""
    legend = axes.legend(ncols=columns, **ABOVE)
    rows = -(-len(legend.get_texts()) // columns)
    axes.set_title(title, loc="left", pad=8 + 14 * rows)


def time_split(table: pd.DataFrame, *, title=""):
    """Stacked bars of tables.time_split: where the milliseconds of a cycle go, one bar per row, shares written in."""
    need(table, *PARTS, "total_ms")
    with drawn(height_in=1.0 + 0.42 * len(table)) as (figure, palette):
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
        legend_above(axes, title, columns=len(PARTS))
    return figure


def curves(
    table: pd.DataFrame, x: str, y: str, *, by: str, panel: str | None = None, labels=(), sharey=False, title=""
):
    """Lines of long rows: y against x, one line per value of `by`, one panel per value of `panel`.

    labels: what to write at the two axes, default the columns' names. sharey: one scale of y for all panels.
    """
    need(table, x, y, by, *([panel] if panel else []))
    panels = [("", table)] if panel is None else list(table.groupby(panel, sort=False))
    lines, (x_label, y_label) = list(table[by].unique()), labels or (x, y)
    with drawn(title=title) as (figure, palette):
        all_axes = figure.subplots(1, len(panels), sharey=sharey, squeeze=False)[0]
        for axes, (name, rows) in zip(all_axes, panels, strict=True):
            for number, line in enumerate(lines):
                if (rows[by] == line).any():
                    draw_line(axes, rows[rows[by] == line], x, y, palette[number % len(palette)], str(line))
            axes.set(xlabel=x_label if len(panels) == 1 else "", ylim=(0, None))
            axes.set_ylabel("" if sharey and axes is not all_axes[0] else y_label)
            axes.set_title(str(name))
        if len(panels) > 1:
            figure.supxlabel(x_label, fontsize=RULES["axes.labelsize"])  # once: panels are narrow
        if panel != by:
            all_axes[-1].legend(title=by.replace("_", " "), **BESIDE)
    return figure


def node_curve(table: pd.DataFrame, *, by="method", parts=("draft_ms", "verify_ms", "host_ms", "total_ms"), title=""):
    """Lines of tables.node_curve: milliseconds of a cycle and its parts against verified tokens, one panel per `by`."""
    need(table, by, "verified_tok", *parts)
    names = table[by].astype(str) if by == "method" else by.replace("_", " ") + " " + table[by].astype(str)
    long = table.assign(**{by: names}).melt([by, "verified_tok"], list(parts), "part", "ms")
    long["part"] = long["part"].str.removesuffix("_ms")
    labels = ("tokens verified in one forward", "ms per cycle")
    return curves(long, "verified_tok", "ms", by="part", panel=by, labels=labels, sharey=True, title=title)


def draw_line(axes, rows: pd.DataFrame, x: str, y: str, colour, label: str) -> None:
    rows = rows.sort_values(x)
    marker = "o" if len(rows) <= 12 else ""  # so few are measurements, more are a curve
    axes.plot(rows[x], rows[y], marker=marker, markersize=3.5, color=colour, label=label)


def intervals(table: pd.DataFrame, name: str, value: str, *, panel: str | None = None, label="", line=1.0, title=""):
    """Dots of `value` with columns low and high, one row per `name`, one panel per value of `panel`; a line at `line`."""
    need(table, name, value, "low", "high", *([panel] if panel else []))
    table = surely(table)
    panels = [("", table)] if panel is None else list(table.groupby(panel, sort=False))
    with drawn(height_in=0.8 + 0.24 * len(table) + 0.3 * len(panels), title=title) as (figure, palette):
        heights = [len(rows) + 1 for _, rows in panels]
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for number, (axes, (head, rows)) in enumerate(zip(all_axes, panels, strict=True)):
            places, colour = np.arange(len(rows))[::-1], palette[number % len(palette)]
            axes.hlines(places, rows["low"], rows["high"], color=colour, linewidth=1.5)
            axes.plot(rows[value], places, linestyle="", marker="o", markersize=4, color=colour)
            axes.axvline(line, color="0.3", linewidth=1, linestyle="--")
            axes.set_yticks(places, rows[name], fontsize=7)
            axes.set_ylim(-0.7, len(rows) - 0.3)
            axes.set_title(str(head), fontsize=8, loc="left")
        all_axes[-1].set_xlabel(label or value)
    return figure
