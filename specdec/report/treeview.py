"""A draft tree as a picture: plain lists in, one figure out.

Root left, one column per depth, one row per leaf; the accepted path is filled, darker borders mean likelier nodes.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from specdec.report import figures

COLUMN_IN, ROW_IN = 1.05, 0.2  # distance of columns and rows
SHOWN_CHARACTERS = 11
ACCEPTED, OTHER = "#029e73", "#0173b2"


def picture(
    tokens: Sequence[str], parents: Sequence[int], *, scores=None, accepted: Sequence[int] = (), title: str = ""
):
    """The tree as a figure.

    tokens: text of each node [N], root first. parents: index of each node's parent [N], -1 for the root, parents before
    children. scores: cumulative log-probability [N], shown as the border's darkness. accepted: indices of the nodes on the
    accepted path.
    """
    from matplotlib.colors import to_rgba

    assert len(tokens) == len(parents) > 0 and (scores is None or len(scores) == len(tokens))
    assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert all(0 <= node < len(tokens) for node in accepted)
    depth, row = places(parents)
    path, size = set(accepted), ((max(depth) + 1.2) * COLUMN_IN, (max(row) + 2) * ROW_IN + 0.3)
    with figures.drawn(*size, title=title) as (figure, _):
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(-0.5, max(depth) + 0.5), ylim=(max(row) + 0.7, -0.7))
        for node, parent in enumerate(parents):
            if parent >= 0:
                look = dict(color=ACCEPTED, linewidth=2) if node in path else dict(color="0.75", linewidth=1)
                axes.plot([depth[parent], depth[node]], [row[parent], row[node]], zorder=1, **look)
        for node, token in enumerate(tokens):
            fill, ink = (ACCEPTED, "white") if node in path else ("white", "0.13")
            # keep unlikely ones visible
            share = 0.5 if scores is None else math.exp(max(float(scores[node]), -6.0)) ** 0.3
            box = dict(boxstyle="round,pad=0.25", facecolor=fill, edgecolor=to_rgba(OTHER, 0.25 + 0.75 * share))
            text = dict(family="DejaVu Sans Mono", fontsize=7, color=ink, parse_math=False, gid=f"node-{node}")
            axes.text(depth[node], row[node], readable(token), ha="center", va="center", bbox=box, zorder=2, **text)
    return figure


def places(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """(depth, row) of every node: leaves take the next free row, an inner node the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depth[node] = depth[parent] + 1
    row, free = [0.0] * len(parents), 0
    waiting = [(0, False)]
    while waiting:  # children before their parent, top to bottom
        node, children_placed = waiting.pop()
        if not children[node]:
            row[node], free = float(free), free + 1
        elif children_placed:
            row[node] = (row[children[node][0]] + row[children[node][-1]]) / 2
        else:
            waiting += [(node, True), *((child, False) for child in reversed(children[node]))]
    return depth, row


def readable(token: str) -> str:
    """A token's text with visible white space and limited length."""
    shown = printable(token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")) or "∅"
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 1] + "…"


def printable(text: str) -> str:
    """`text` with control characters, which XML forbids, replaced by a dot."""
    return "".join("·" if unicodedata.category(character) in ("Cc", "Cs", "Cn") else character for character in text)
