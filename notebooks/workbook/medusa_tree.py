"""Medusa's static trees: the likeliest nodes, by how often each head's ranks are right."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from specdec.core.decode import autoregress
from specdec.core.pair import Pair
from specdec.core.tree import StaticShape
from specdec.errors import SpecdecError
from specdec.training.drafter.accuracy import draft_accuracy
from specdec.training.drafter.objective import FrozenTarget, TokenBatch


def static_tree(
    pair: Pair, prompts: Sequence, nodes: int = 25, *, depth: int = 4, max_new_tokens: int = 64
) -> StaticShape:
    """The best fixed tree of so many nodes on the target's answers to `prompts`.

    depth: levels, at most the number of heads. `Static.of(...)` is its policy.
    """
    texts = []
    for prompt in prompts:
        ids = pair.ids_of(prompt)
        tokens = [*ids, *autoregress(pair, ids, max_new_tokens=max_new_tokens).tokens]
        answer = torch.arange(len(tokens))[None] >= len(ids)
        texts.append(TokenBatch(torch.tensor([tokens], device=pair.target.device), answer))
    target, deepest = FrozenTarget(pair.target.model, pair.drafter.taps), pair.drafter.deepest
    levels = (depth if deepest is None else deepest) + 1
    with torch.inference_mode(), pair.drafter.inference():
        accuracy = draft_accuracy(pair.drafter.network, target, texts, drafts=min(depth, levels))
    return tree_from_table(accuracy["rank_frac"], nodes)


def tree_from_table(right_frac: Sequence[Sequence[float]], nodes: int) -> StaticShape:
    """Medusa's static tree: repeatedly the node most likely to be reached is added.

    right_frac [heads][ranks]: how often the token of that rank is the target's own, given the
    tokens before it are right; a node's probability is the product along its path.

    >>> tree_from_table([[0.6, 0.2, 0.1], [0.5, 0.1]], 4).choices
    ((0,), (1,), (0, 0), (1, 0))
    """
    if nodes < 1:
        raise SpecdecError("a static tree needs at least one node.")
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
