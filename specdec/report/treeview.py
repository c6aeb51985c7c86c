"""A draft tree as a picture: plain lists in, one SVG text out.

Root left, one column per depth, one row per leaf; the accepted path is filled, darker borders mean likelier nodes.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Sequence

COLUMN, ROW, BOX, MARGIN = 104, 19, 84, 8  # pixels: distance of columns and rows, width of a node, border
SHOWN_CHARACTERS = 11


def svg(
    tokens: Sequence[str], parents: Sequence[int], *, scores=None, accepted: Sequence[int] = (), title: str = ""
) -> str:
    """The tree as SVG.

    tokens: text of each node [N], root first. parents: index of each node's parent [N], -1 for the root, parents before
    children. scores: cumulative log-probability [N], shown on hover and as the border's darkness. accepted: indices of
    the nodes on the accepted path.
    """
    assert len(tokens) == len(parents) > 0 and (scores is None or len(scores) == len(tokens))
    assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert all(0 <= node < len(tokens) for node in accepted)
    depth, row = places(parents)
    width = (max(depth) + 1) * COLUMN - (COLUMN - BOX) + 2 * MARGIN
    top = MARGIN + (18 if title else 0)
    height = (max(row) + 1) * ROW + top + MARGIN
    spots = [(MARGIN + d * COLUMN, top + r * ROW) for d, r in zip(depth, row, strict=True)]
    path = set(accepted)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}" '
        f'role="img" aria-label="{html.escape(title or "draft tree")}" font-family="DejaVu Sans Mono, monospace" '
        'font-size="10">',
        f'<rect width="{width}" height="{height:g}" fill="white"/>',
    ]
    if title:
        parts.append(f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="11" fill="#222">{html.escape(title)}</text>')
    parts += [_edge(spots[parent], spots[node], node in path) for node, parent in enumerate(parents) if parent >= 0]
    for node, (spot, token) in enumerate(zip(spots, tokens, strict=True)):
        parts.append(_node(node, spot, token, None if scores is None else float(scores[node]), node in path))
    return "\n".join([*parts, "</svg>"]) + "\n"


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
    """A token's text with its white space made visible and its length limited."""
    shown = printable(token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")) or "∅"
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 1] + "…"


def printable(text: str) -> str:
    """`text` with every control character, which XML forbids, shown as a dot."""
    return "".join("·" if unicodedata.category(character) in ("Cc", "Cs", "Cn") else character for character in text)


def _node(node: int, spot, token: str, score: float | None, accepted: bool) -> str:
    x, y = spot
    share = 0.5 if score is None else math.exp(max(score, -6.0)) ** 0.3  # so that unlikely nodes stay visible
    fill, ink = ("#029e73", "white") if accepted else ("white", "#222")
    hover = printable(token) + ("" if score is None else f"  p = {math.exp(score):.3f}")
    return (
        f'<g data-node="{node}"><title>{html.escape(hover)}</title>'
        f'<rect x="{x}" y="{y:g}" width="{BOX}" height="{ROW - 4}" rx="4" fill="{fill}" stroke="#0173b2" '
        f'stroke-opacity="{0.25 + 0.75 * share:.2f}"/>'
        f'<text x="{x + BOX / 2:g}" y="{y + 11:g}" text-anchor="middle" fill="{ink}">'
        f"{html.escape(readable(token))}</text></g>"
    )


def _edge(start, end, accepted: bool) -> str:
    x0, y0, x1, y1 = start[0] + BOX, start[1] + (ROW - 4) / 2, end[0], end[1] + (ROW - 4) / 2
    middle = (x0 + x1) / 2
    look = 'stroke="#029e73" stroke-width="2"' if accepted else 'stroke="#bbb"'
    return f'<path d="M{x0} {y0:g} C{middle:g} {y0:g} {middle:g} {y1:g} {x1} {y1:g}" fill="none" {look}/>'
