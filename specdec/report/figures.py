"""From tables to figures: one style, deterministic files, the scale of what was measured written
into every picture.

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
from specdec.later import Later
from specdec.report import provenance
from specdec.report.tables import PARTS, need, surely

matplotlib, seaborn = Later("matplotlib"), Later("seaborn")
WIDTH_IN, HEIGHT_IN = 7.0, 3.2
# Apart in every pair for readers who see no green or no colour at all; a dash, a marker or a hatch
# goes with each.
COLOURS = ("#004488", "#ddaa33", "#bb5566", "#6699cc", "#222222", "#1b6e3c")
DASHES, MARKERS = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5))), "osD^v"
HATCHES = ("", "///", "...", "xxx")
ABOVE = dict(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)


LOOK = Path(__file__).with_name("figures.mplstyle")
RULES = runs.Table(lambda: matplotlib.rc_params_from_file(LOOK, use_default_template=False))


@contextmanager
def drawn(
    width_in: float = WIDTH_IN, height_in: float = HEIGHT_IN, title: str = "", note: str = ""
) -> Iterator[tuple]:
    """(figure, palette) in the one look of all figures. When the with block ends it is laid out,
    with its title, a letter at
    each of several panels, and a `note` below them."""
    with seaborn.axes_style("whitegrid"), matplotlib.rc_context(RULES):
        figure = matplotlib.figure.Figure(figsize=(width_in, height_in))
        yield figure, COLOURS
        panels = [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]
        for letter, axes in zip("abcdefgh", panels[: 8 * (len(panels) > 1)], strict=False):
            place = dict(
                xy=(0, 1), xytext=(-14, 4), xycoords="axes fraction", textcoords="offset points"
            )
            axes.annotate(letter, **place, ha="right", weight="bold")
        if title:
            figure.suptitle(title, x=0.02, ha="left")
        written = textwrap.fill(note, round(17 * width_in))
        figure.text(0.01, 0.01, written, va="bottom", fontsize=8, color="0.3")
        figure.tight_layout(
            rect=(0, (written.count("\n") + 1) * 0.15 / height_in if note else 0, 1, 1), w_pad=1.8
        )


def save(
    figure, stem: Path, *, sources=(), data: pd.DataFrame | None = None, about: dict | None = None
) -> list[Path]:
    """Write <stem>.svg, .pdf and .png, byte for byte the same for the same figure, its `data` as
    <stem>.csv, and
    <stem>.json with where it comes from. The label of its provenance is written into the picture.

    sources: the Runs whose rows are drawn, as `provenance.of` takes them. about: more facts for the
    json file, perhaps another `label`.
    """
    stem, origin = Path(stem), provenance.of(sources, data)
    record = {**origin.record(), **(about or {})}
    labelled(figure, record["label"])
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
    return [*written, runs.write_json(stem.with_name(f"{stem.name}.json"), record)]


def labelled(figure, label: str):
    """Write `label` below everything at the right edge; returns the text. Once: a second call
    changes the first's.
    """
    text = next((text for text in figure.texts if text.get_gid() == "scale"), None) or figure.text(
        0.995, -0.01, "", ha="right", va="top", fontsize=7, color="0.35", gid="scale"
    )
    text.set_text(label)
    return text


def speedup_bars(table: pd.DataFrame, *, value="speedup", baseline=None, title=""):
    """Grouped bars of stats.compare's `value` with intervals, one group per suite; the line at 1 is
    the baseline.
    """
    shown = table if baseline is None else table[table["method"] != baseline]
    figure = _by_suite(shown, value, f"times as fast as {baseline or 'the baseline'}", title)
    figure.axes[0].axhline(1.0, color="0.3", linewidth=1, linestyle="--")
    return figure


def tau_bars(table: pd.DataFrame, *, title=""):
    """Grouped bars of tau (new tokens per cycle, bonus token included) with intervals, one group
    per suite.
    """
    return _by_suite(table[table["tau"].notna()], "tau", "new tokens per cycle (tau)", title)


def _by_suite(table: pd.DataFrame, value: str, label: str, title: str):
    need(table, "suite", "method", value)
    names = table["suite"].astype(str).str.rpartition("/")[2]
    if "prompts" in table:
        names += "\nn = " + table.groupby("suite")["prompts"].transform("max").astype(str)
    shown, methods = surely(table).assign(suite=names), table["method"].nunique()
    with drawn(max(WIDTH_IN, 0.3 * names.nunique() * methods), title=title) as (figure, _):
        axes = figure.subplots()
        grouped_bars(axes, shown, "suite", value, "method")
        axes.set_ylabel(label)
        axes.legend(ncols=min(4, methods), **ABOVE)
    return figure


def grouped_bars(
    axes, rows: pd.DataFrame, x: str, y: str, by: str, looks: Sequence | None = None
) -> None:
    """Bars side by side: `y` over the values of `x`, one look per value of `by`, whiskers from
    <y>_low to <y>_high.

    looks: the values of `by` in the order of their looks, for axes that hold some of them.
    """
    looks, values = list(looks or dict.fromkeys(rows[by])), list(dict.fromkeys(rows[x]))
    present = [name for name in looks if (rows[by] == name).any()]
    width = 0.8 / len(present)
    for number, name in enumerate(present):
        part = rows[rows[by] == name].drop_duplicates(x)
        centres = (
            part[x].map(values.index).to_numpy(float) + (number - (len(present) - 1) / 2) * width
        )
        axes.bar(centres, part[y], width, label=str(name), **bar_look(looks.index(name)))
        if f"{y}_low" in part:
            reach = np.abs(
                part[[f"{y}_low", f"{y}_high"]].T.to_numpy(float) - part[y].to_numpy(float)
            )
            axes.errorbar(centres, part[y], yerr=reach, fmt="none", ecolor="0.2", capsize=1.5)
    axes.set_xticks(range(len(values)), list(map(str, values)))
    axes.grid(axis="x", visible=False)


def bar_look(number: int) -> dict:
    """Colour and hatch of the bars of this number, which differ in print without colours, too."""
    colour, hatch = COLOURS[number % len(COLOURS)], HATCHES[number % len(HATCHES)]
    return dict(color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)


def ink(colour) -> str:
    """The colour of a number on this colour: black or white."""
    return "white" if np.dot(matplotlib.colors.to_rgb(colour), (0.3, 0.59, 0.11)) < 0.6 else "black"


def time_split(table: pd.DataFrame, *, title=""):
    """Stacked bars of tables.time_split: where the milliseconds of a cycle go, one bar per row,
    shares written in.
    """
    need(table, *PARTS, "total_ms")
    with drawn(height_in=1.0 + 0.42 * len(table), title=title) as (figure, palette):
        axes = figure.subplots()
        left = np.zeros(len(table))
        for part, colour in zip(PARTS, palette, strict=False):
            names, lengths = table.index.astype(str), table[part].to_numpy(float)
            bars = axes.barh(
                names, lengths, left=left, color=colour, label=part.removesuffix("_ms")
            )
            shares = lengths / table["total_ms"]  # narrow slices have no room for a number
            written = [f"{share:.0%}" if share >= 0.06 else "" for share in shares]
            axes.bar_label(bars, written, label_type="center", color=ink(colour))
            left += lengths
        axes.invert_yaxis()
        axes.set_xlabel("ms per cycle")
        axes.grid(axis="y", visible=False)
        axes.legend(ncols=len(PARTS), **ABOVE)
    return figure


def curves(
    table: pd.DataFrame,
    x: str,
    y: str,
    *,
    by: str,
    panel=None,
    labels=(),
    sharey=False,
    zero=True,
    title="",
    note="",
):
    """Lines of long rows: y against x, one line per value of `by`, named at its end, one panel per
    value of `panel`.

    labels: what to write at the two axes, default the columns' names. sharey: one scale of y in all
    panels. zero: it begins at 0.
    """
    need(table, x, y, by, *([panel] if panel else []))
    panels = [("", table)] if panel is None else list(table.groupby(panel, sort=False))
    lines, (x_label, y_label) = list(table[by].unique()), labels or (x, y)
    named = (
        lines if isinstance(lines[0], str) else [f"{by.replace('_', ' ')} {line}" for line in lines]
    )
    with drawn(title=title, note=note) as (figure, _):
        all_axes = figure.subplots(1, len(panels), sharey=sharey, squeeze=False)[0]
        for axes, (head, rows) in zip(all_axes, panels, strict=True):
            for number, line in enumerate(lines):
                if (rows[by] == line).any():
                    draw_line(axes, rows[rows[by] == line], x, y, number, named[number])
            axes.set(xlabel=x_label, ylabel=y_label if axes is all_axes[0] else "", title=str(head))
            axes.set_ylim(bottom=0 if zero else None)
        left = set(named if panel != by else ())
        for axes in all_axes[::-1]:
            left -= name_ends(axes, left)
    return figure


def node_curve(
    table: pd.DataFrame,
    *,
    by="method",
    parts=("draft_ms", "verify_ms", "host_ms", "total_ms"),
    title="",
):
    """Lines of tables.node_curve: milliseconds of a cycle and its parts against verified tokens,
    one panel per `by`.
    """
    need(table, by, "verified_tok", *parts)
    names = (
        table[by].astype(str)
        if by == "method"
        else by.replace("_", " ") + " " + table[by].astype(str)
    )
    long = table.assign(**{by: names}).melt([by, "verified_tok"], list(parts), "part", "ms")
    long["part"] = long["part"].str.removesuffix("_ms")
    labels = ("tokens verified in one forward", "ms per cycle")
    return curves(
        long, "verified_tok", "ms", by="part", panel=by, labels=labels, sharey=True, title=title
    )


def draw_line(axes, rows: pd.DataFrame, x: str, y: str, number: int, label: str) -> None:
    """A line in the look of this number, with marks where there are few points; a band where rows
    have low and high.
    """
    rows, colour = rows.sort_values(x), COLOURS[number % len(COLOURS)]
    marker = (
        MARKERS[number % len(MARKERS)] if len(rows) <= 12 else ""
    )  # so few are measurements, more are a curve
    look = dict(color=colour, linestyle=DASHES[number % len(DASHES)], marker=marker, markersize=3.5)
    axes.plot(rows[x], rows[y], label=label, **look)
    if {"low", "high"} <= set(rows):
        axes.fill_between(rows[x], rows["low"], rows["high"], color=colour, alpha=0.15, linewidth=0)
    if rows[x].max() >= 1e4:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}k" if value else "0")


def name_ends(axes, names: Collection[str]) -> set[str]:
    """Write these lines' names at their right ends, moved apart where ends meet; returns those that
    are there.
    """
    lines = [line for line in axes.lines if line.get_label() in names]
    lines.sort(key=lambda line: line.get_ydata()[-1])
    ends = [axes.transData.transform(line.get_xydata()[-1]) for line in lines]
    places = [axes.transAxes.inverted().transform(end)[1] for end in ends]
    gap = 0.15 / (axes.get_position().height * axes.figure.get_figheight())
    for number in range(1, len(places)):
        places[number] = max(places[number], places[number - 1] + gap)
    over = max(0.0, places[-1] - 1) if places else 0.0
    for line, place in zip(lines, places, strict=True):
        look = dict(color=line.get_color(), fontsize=8, va="center")
        axes.annotate(
            line.get_label(), (1, place - over), (4, 0), "axes fraction", "offset points", **look
        )
    return {line.get_label() for line in lines}
