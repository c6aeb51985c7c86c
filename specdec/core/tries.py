"""Candidates that need no forward: token paths found in the text so far, as a trie beside the drafted tree.

       drafted            trie               merged: a node that both propose exists once, with the larger probability
      root             root                 root
      /  \\              |                  /   \\
    the   a     +      the         =     the     a
     |                  |                / \\
    cat                dog            cat   dog

Both are lists of nodes, parents first. Everything runs on the host: tries hold a dozen nodes. Knows nothing about where a
trie comes from, models or policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.core.tree import DraftTree


@dataclass(frozen=True)
class Trie:
    """Nodes 1 to N below the root, which is node 0; a parent comes before its children.

    scores: cumulative log-probabilities along the path, on the scale of the drafter's, no node's above its parent's.

    >>> Trie(tokens=(5, 6, 9), parents=(0, 1, 0), scores=(-0.1, -0.3, -2.0)).within(1).tokens
    (5, 9)
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    scores: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def within(self, levels: int) -> Trie:
        """Its nodes at most so many levels below the root."""
        if levels >= len(self):
            return self
        depth, number, kept = [0], {0: 0}, []
        for node, parent in enumerate(self.parents, 1):
            depth.append(depth[parent] + 1)
            if depth[node] <= levels:
                kept.append(node)
                number[node] = len(kept)
        rows = [(self.tokens[n - 1], number[self.parents[n - 1]], self.scores[n - 1]) for n in kept]
        return Trie(*zip(*rows, strict=True)) if rows else Trie()


@dataclass(frozen=True)
class Pool:
    """Drafted candidates as lists: node i of `tokens` and `scores`, root first; row r of `expanded` is the node whose
    children are the nodes 1 + r * top_k to (r + 1) * top_k."""

    tokens: Sequence[int]
    scores: Sequence[float]
    expanded: Sequence[int] = ()
    top_k: int = 1


class Merged:
    """A pool and a trie as one list of candidates: the pool's nodes keep their numbers, the trie's own follow.

    An edge in both gets the larger of its two probabilities, which also raises the trie's nodes below it. scores, parents and
    tokens cover all nodes, root first.
    """

    def __init__(self, pool: Pool, trie: Trie):
        self.size = len(pool.tokens)  # of the pool, root included
        self.tokens, self.scores = list(pool.tokens), list(pool.scores)
        self.parents = [-1, *(node for node in pool.expanded for _ in range(pool.top_k))]
        self._pool, self._row = pool, {node: row for row, node in enumerate(pool.expanded)}
        self._own: dict[tuple[int, int], int] = {}  # (node, token) -> child that only the trie has
        place = [0]
        for token, parent, score in zip(trie.tokens, trie.parents, trie.scores, strict=True):
            above, step = place[parent], score - (trie.scores[parent - 1] if parent else 0.0)
            node = self.child(above, token)
            if node is None:
                node = self._own[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.scores.append(self.scores[above] + step)
            else:
                step = max(step, pool.scores[node] - pool.scores[above])
                self.scores[node] = max(self.scores[node], self.scores[above] + step)
            place.append(node)

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of a node with this token."""
        row = self._row.get(node)
        if row is not None:
            first = 1 + row * self._pool.top_k
            children = self._pool.tokens[first : first + self._pool.top_k]
            if token in children:
                return first + children.index(token)
        return self._own.get((node, token))

    def ranked(self) -> list[int]:
        """All candidates by descending score; ties keep their order, so that parents come first."""
        return sorted(range(1, len(self)), key=lambda node: (-self.scores[node], node))

    def best(self, verify_nodes: int, device: torch.device | None = None) -> DraftTree:
        """The root and the best `verify_nodes` candidates."""
        keep = [0, *sorted(self.ranked()[:verify_nodes])]
        number, depth = {node: i for i, node in enumerate(keep)}, [0]
        parents = [-1, *(number[self.parents[node]] for node in keep[1:])]
        for parent in parents[1:]:
            depth.append(depth[parent] + 1)
        token, parent, depths = torch.tensor([[self.tokens[node] for node in keep], parents, depth], device=device)
        scores = torch.tensor([self.scores[node] for node in keep], device=device)
        return DraftTree(token, parent, depths, scores, max(depth))
