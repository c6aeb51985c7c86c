"""Medusa's static trees: the likeliest nodes, by how often each head's ranks are right."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from specdec.core.tree import StaticShape


def tree_from_table(right_frac: Sequence[Sequence[float]], nodes: int) -> StaticShape:
    """Medusa's static tree: repeatedly the node most likely to be reached is added.

    right_frac [heads][ranks]: how often the token of that rank is the target's own, given the
    tokens before it are right; a node's probability is the product along its path.

    >>> tree_from_table([[0.6, 0.2, 0.1], [0.5, 0.1]], 4).choices
    ((0,), (1,), (0, 0), (1, 0))
    """
    # negated probability, path, the parent's probability
    waiting = [(-float(right_frac[0][0]), (0,), 1.0)]
    chosen = []
    while waiting and len(chosen) < nodes:
        chance, path, above = heapq.heappop(waiting)
        chosen.append(path)
        level, rank = len(path) - 1, path[-1] + 1
        if rank < len(right_frac[level]):
            sibling = -above * float(right_frac[level][rank])
            heapq.heappush(waiting, (sibling, (*path[:-1], rank), above))
        if level + 1 < len(right_frac):
            child = chance * float(right_frac[level + 1][0])
            heapq.heappush(waiting, (child, (*path, 0), -chance))
    return StaticShape(chosen)
