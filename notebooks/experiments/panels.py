"""Figures of the papers that need more than one axis: grouped and stacked bars, lines of trainings,
rows of dots. Each takes long rows and returns a figure.
"""

from __future__ import annotations

import pandas as pd

from specdec.report.figures import COLOURS, MARKERS, bar_look, curves, drawn
from specdec.report.tables import need

from workbook.pictures import depth_and_size, under_heads


def learning(
    table: pd.DataFrame, x_label: str, y_label: str = "", *, dashed: str = "", mark=(), note=""
):
    """Lines of trainings: step, value, name, panel, with a band from low to high.

    dashed: lines whose names end so are drawn in dashes, all others through. mark: (step, words) of
    a dashed line across.
    """
    look = dict(by="name", panel="panel", labels=(x_label, y_label), zero=False, note=note)
    figure = curves(table, "step", "value", **look)
    for axes in figure.axes:
        # styles tell one kind of line from the other, besides their colours
        for line in axes.lines:
            if dashed and line.get_label().endswith(dashed):
                line.set_linestyle("--")
            elif dashed:
                line.set_linestyle("-")
        if mark:
            step, words = mark
            # the words stand at the foot of the line, on its left
            axes.axvline(step, color="0.3", linewidth=1, linestyle="--")
            place = ((step, 0.02), (-3, 0), ("data", "axes fraction"), "offset points")
            axes.annotate(words, *place, fontsize=7, ha="right")
    return figure


def pair_costs(models: dict, here: str, top_k: int = 10, context_tok: int = 300) -> pd.DataFrame:
    """Milliseconds of drafting d levels and of verifying 20 d nodes, d = 1 .. 10, within each
    machine's measured range. The first level is the root pass, as in LTD's Figure 2.
    """
    columns = ["machine", "here", "depth", "nodes", "draft_ms", "verify_ms"]
    rows = []
    for name, costs in models.items():
        for depth in range(1, 11):
            nodes = 20 * depth
            measured = costs.measured("expansions", [depth - 1])
            if measured and costs.measured("verify_nodes", [nodes]):
                draft_ms = float(costs.draft_ms(top_k, depth - 1, context_tok))
                verify_ms = float(costs.verify_ms(nodes, context_tok))
                rows.append((name, name == here, depth, nodes, draft_ms, verify_ms))
    return pd.DataFrame(rows, columns=columns)


def cost_panels(table: pd.DataFrame, note=""):
    """LTD's Figure 2: left the time of a cycle by tree, right its parts in % of the default's.

    table: published, whose, x, part, kind (ms or pct), value.
    """
    need(table, "published", "whose", "x", "part", "kind", "value")
    keys = ["published", "kind", "whose", "x"]
    wide = table.pivot_table("value", keys, "part", sort=False).reset_index()
    parts = list(dict.fromkeys(table["part"]))
    shares = wide[wide["kind"] == "pct"]
    rows = {}
    for side, part in shares.groupby("published", sort=False):
        rows[side] = max(8, len(part) + part["whose"].nunique())
    height_in = 1.0 + 0.17 * sum(rows.values()) + 0.5 * len(rows)
    with drawn(height_in=height_in, note=note) as (figure, _):
        grid = figure.subplots(len(rows), 2, squeeze=False, height_ratios=list(rows.values()))
        for (left, right), side in zip(grid, rows, strict=True):
            whose = "published" if side else "measured here"
            # 1. milliseconds by tree
            ms = wide[(wide["published"] == side) & (wide["kind"] == "ms")]
            _stacked(left.bar, range(len(ms)), ms, parts, "bottom")
            labels = ms["x"].str.strip("()").str.replace(", ", "\n")
            left.set_xticks(range(len(ms)), labels, fontsize=7)
            title = ", ".join([*ms["whose"].unique(), whose])
            left.set(xlabel="depth, nodes below it", ylabel="ms per cycle", title=title)
            left.grid(axis="x", visible=False)
            # 2. shares by target
            pct = shares[shares["published"] == side]
            _stacked(right.barh, under_heads(right, pct["whose"], pct["x"]), pct, parts, "left")
            right.set(xlabel="% of the default tree's cycle", title=whose)
        place = dict(ncols=2, loc="lower left", bbox_to_anchor=(0.05, 1.0))
        figure.legend(*left.get_legend_handles_labels(), **place)
    return figure


def _stacked(bars, places, rows: pd.DataFrame, parts: list[str], side: str) -> None:
    begin = 0 * rows[parts[0]]
    for number, part in enumerate(parts):
        bars(places, rows[part], 0.75, **{side: begin}, label=part, **bar_look(number))
        begin = begin + rows[part]


def fixed_trees(grid: pd.DataFrame):
    """Tokens per cycle of static trees of width 10: against depth at 60 nodes, size at depth 8.

    grid: rows of static_grid with a column pair. The nearest size, depth and width there are.
    """
    need(grid, "pair", "total_tokens", "depth", "top_k", "tau", "new_tok")
    # trees that expand as many nodes as they are wide
    plain = grid[grid["beam"] == ""] if "beam" in grid else grid
    width = _nearest(plain["top_k"], 10)
    depth = _nearest(plain["depth"], 8)
    size = _nearest(plain["total_tokens"], 60)
    rows = plain[plain["top_k"] == width]
    counts = rows.groupby("pair", sort=False)["new_tok"].max()
    rows = rows.assign(pair=rows["pair"].map(lambda pair: f"{pair}\n(n = {counts[pair]} tokens)"))
    heads = (f"trees of {size} tokens, width {width}", f"trees of depth {depth}, width {width}")
    sides = (rows[rows["total_tokens"] == size], rows[rows["depth"] == depth])
    look = dict(label="tokens per cycle (tau)", lines=("pair", "pair"), heads=heads)
    return depth_and_size(*sides, "tau", **look)


def by_subject(table: pd.DataFrame, *, baseline="the default tree", note=""):
    """A row of dots per subject: left over the tuned tree, right the first over `baseline`.

    table: subject, method, over_tuned, over_default.
    """
    need(table, "subject", "method", "over_tuned", "over_default")
    methods = list(dict.fromkeys(table["method"]))
    first = table[table["method"] == methods[0]].sort_values("over_tuned", ascending=False)
    places = {subject: place for place, subject in enumerate(first["subject"])}
    with drawn(height_in=1.0 + 0.135 * len(places), note=note) as (figure, _):
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        # 1. the dots
        look = dict(markersize=3.5, linestyle="")
        for number, method in enumerate(methods):
            rows = table[table["method"] == method]
            look |= dict(color=COLOURS[number], marker=MARKERS[number % 5])
            left.plot(rows["over_tuned"], rows["subject"].map(places), label=method, **look)
        look |= dict(color=COLOURS[0], marker="o")
        right.plot(first["over_default"], first["subject"].map(places), **look)
        # 2. names, and how many lie right of one
        names = [name.replace("_", " ") for name in places]
        left.set_yticks(list(places.values()), names, fontsize=6)
        short = methods[0].split()[0]
        left.set(ylim=(len(places), -1), xlabel="times as fast as\nthe tuned static tree")
        right.set_xlabel(f"{short}: times as fast as\n{baseline}")
        for axes, value in ((left, "over_tuned"), (right, "over_default")):
            axes.axvline(1.0, color="0.3", linewidth=1, linestyle="--")
            faster = (first[value] > 1).sum()
            axes.set_title(f"{short}: faster on {faster} of {len(first)} subjects")
        place = dict(ncols=len(methods), loc="lower left", bbox_to_anchor=(0.05, 1.0))
        figure.legend(*left.get_legend_handles_labels(), **place)
    return figure


def _nearest(values: pd.Series, aim: int) -> int:
    return int(min(values.unique(), key=lambda value: abs(value - aim)))
