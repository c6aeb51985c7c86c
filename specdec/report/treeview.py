"""Where the nodes of a drawn tree are, and how tokens are written in it: root left, one column per depth, one row per leaf."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

SHOWN_CHARACTERS = 11


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
