"""Candidate trees of any drafter, one position after the other through its own session: slow, and the reference.

A drafter without a batched way to record (see `eagle_forest`) is recorded like this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafters import Drafter
from specdec.drafters.eagle_forest import Forest
from specdec.tree import GrowingTree, tree_capacity


class OneByOne:
    """The same `grow` as `ForestDrafter`; contexts must ascend. tokens int64 [T], features [T, F] or None."""

    def __init__(self, drafter: Drafter, tokens: Tensor, features: Tensor | None, depth: int):
        self.drafter, self.tokens, self.features, self.depth = drafter, tokens, features, depth

    def grow(self, contexts: Tensor, top_k: int, depth: int, most: int) -> Forest:
        """Trees of `depth` expansions at each context. `most` > top_k asks the root for more children."""
        session = self.drafter.session(len(self.tokens), top_k * max(1, depth))
        growing = GrowingTree(tree_capacity(depth, top_k), self.tokens.device)
        seen, found = 0, []
        for context in contexts.tolist():
            new = None if self.features is None else self.features[seen:context]
            roots = session.root(self.tokens[seen + 1 : context + 1], new, max(most, top_k))
            seen = context
            growing.restart(self.tokens[context])
            growing.grow(roots[0][:, :top_k], roots[1][:, :top_k], top_k)
            beams = []
            for _ in range(depth):
                beams.append(growing.frontier - growing._level_start)
                growing.grow(*session.expand(growing.frontier_tokens, growing.rows, top_k), top_k)
            tree = growing.whole()
            chosen = torch.stack(beams) if beams else torch.zeros(0, top_k, dtype=torch.long)
            found.append((tree.score[1:], tree.token[1:], chosen, roots[0][0], roots[1][0]))
        return Forest(*(torch.stack(parts) for parts in zip(*found, strict=True)))
