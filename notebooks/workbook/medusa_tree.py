"""Medusa's static trees: the likeliest nodes, by how often each rank of each head is right on the target's own answers."""

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
    """The best fixed tree of so many nodes for a pair's drafter on the target's answers to `prompts` (Medusa's recipe).

    depth: levels, at most the number of heads. `Static.of(...)` is its policy.
    """
    network = pair.drafter.network if pair.drafter is not None else None
    if not hasattr(network, "t2d"):
        raise SpecdecError(
            "this type of drafter has no training forward, so its accuracy cannot be computed; use one of EAGLE, Medusa or "
            "Hydra."
        )
    texts = []
    for prompt in prompts:
        ids = pair.ids_of(prompt)
        tokens = [*ids, *autoregress(pair, ids, max_new_tokens=max_new_tokens).tokens]
        answer = torch.arange(len(tokens))[None] >= len(ids)
        texts.append(TokenBatch(torch.tensor([tokens], device=pair.target.device), answer))
    target, deepest = FrozenTarget(pair.target.model, pair.drafter.taps), pair.drafter.deepest
    levels = (depth if deepest is None else deepest) + 1
    with torch.inference_mode(), pair.drafter.inference():
        found = draft_accuracy(network, target, texts, drafts=min(depth, levels))
    return tree_from_table(found["rank_frac"], nodes)


def tree_from_table(right_frac: Sequence[Sequence[float]], nodes: int) -> StaticShape:
    """Medusa's static tree with so many nodes: built by repeatedly adding the node most likely to be reached.

    right_frac [heads][ranks]: how often the token of that rank is the target's own, given the tokens before it are right; a
    node's probability is the product along its path.

    >>> tree_from_table([[0.6, 0.2, 0.1], [0.5, 0.1]], 4).choices
    ((0,), (1,), (0, 0), (1, 0))
    """
    if not len(right_frac) or nodes < 1 or not all(len(row) for row in right_frac):
        raise SpecdecError(
            "a static tree needs a table with a row of shares per head, and at least one node."
        )
    waiting, chosen = (
        [(-float(right_frac[0][0]), (0,), 1.0)],
        [],
    )  # negated probability, path, its parent's
    while waiting and len(chosen) < nodes:
        chance, path, above = heapq.heappop(waiting)
        chosen.append(path)
        level, rank = len(path) - 1, path[-1] + 1
        if rank < len(right_frac[level]):
            heapq.heappush(
                waiting, (-above * float(right_frac[level][rank]), (*path[:-1], rank), above)
            )
        if level + 1 < len(right_frac):
            heapq.heappush(waiting, (chance * float(right_frac[level + 1][0]), (*path, 0), -chance))
    return StaticShape(chosen)
