"""The draft tree as flat arrays: grow it by levels, keep its best nodes, compute masks and paths.

A node is a row of three int64 arrays and a score:

    node       0    1    2    3    4                  0
    token      the  cat  dog  sat  ran               / \
    parent    -1    0    0    1    1                1   2
    depth      0    1    1    2    2               / \
    score      0   -.2  -.9  -.5  -1.              3   4

A level takes a handful of tensor operations and reads no value back to the host. (EAGLE-2 section
4: expand, then re-rank.)

Candidates that need no forward, token paths copied from the text, are a trie beside the drafted
tree. Merged, a node that both propose exists once, with the larger probability:

    drafted            trie               merged
      root             root                 root
      /  \\              |                  /   \\
    the   a     +      the         =     the     a
     |                  |                / \\
    cat                dog            cat   dog
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.core.tree_config import Plan, TreeConfig
from specdec.errors import SpecdecError


def causal(count: int, device: torch.device | str) -> Tensor:
    """bool [count, count], true on and below the diagonal."""
    return torch.ones(count, count, dtype=torch.bool, device=device).tril_()


def additive(seen: Tensor, dtype: torch.dtype, hidden: float = float("-inf")) -> Tensor:
    """An attention mask of the shape of bool `seen`: 0 where seen, `hidden` elsewhere."""
    return seen.new_full(seen.shape, hidden, dtype=dtype).masked_fill_(seen, 0.0)


@functools.cache  # every level of every tree adds one
@torch.inference_mode(False)
def apart(count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A mask [count, count] in which every row sees only itself: 0 on the diagonal, else -inf."""
    return additive(torch.eye(count, dtype=torch.bool, device=device), dtype)


@dataclass
class DraftTree:
    """N nodes in creation order; node 0 is the root (the last committed token), parents come first.

    token, parent, depth: int64 [N]; the root has parent -1 and depth 0.
    score: float32 [N], cumulative draft log-probability along the path, 0 at the root.
    levels: the deepest depth of any node, known on the host.

    >>> tree = DraftTree.from_arrays(token=[7, 3, 4, 5], parent=[-1, 0, 0, 1])
    >>> tree.ancestors[3].int().tolist()
    [1, 1, 0, 1]
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    score: Tensor
    levels: int

    def __len__(self) -> int:
        return self.token.shape[0]

    @functools.cached_property
    def ancestors(self) -> Tensor:
        """bool [N, N]: row i is true at node i and at all its ancestors, the root included."""
        mask = torch.eye(len(self), dtype=torch.bool, device=self.token.device)
        above = self.parent.clamp(min=0)
        # one step towards the root for all nodes at once
        for _ in range(self.levels):
            mask.scatter_(1, above[:, None], True)
            above = self.parent[above].clamp_(min=0)
        return mask

    def lineage(self) -> Tensor:
        """int64 [N, levels + 1]: entry (i, d) is node i's ancestor at depth d, -1 below its own."""
        table = self.token.new_full((len(self), self.levels + 1), -1)
        node = torch.arange(len(self), device=self.token.device)
        for _ in range(self.levels + 1):
            table.scatter_(1, self.depth[node, None], node[:, None])
            node = self.parent[node].clamp(min=0)
        return table

    def select(self, keep: Tensor) -> DraftTree:
        """The tree of the nodes `keep`, int64 [K], ascending, root first, with their parents."""
        parent = torch.searchsorted(keep, self.parent[keep])
        parent[0] = -1
        return DraftTree(self.token[keep], parent, self.depth[keep], self.score[keep], self.levels)

    @classmethod
    def from_arrays(cls, token: Any, parent: Any, score: Any = None) -> DraftTree:
        """A tree from plain sequences (tests, teaching); root first, parents before children."""
        depth = [0]
        for node, above in enumerate(parent[1:], 1):
            assert 0 <= above < node, "parents precede their children"
            depth.append(depth[above] + 1)
        tokens, parents, depths = torch.tensor([list(token), list(parent), depth])
        scores = torch.zeros(len(depth)) if score is None else torch.as_tensor(score).float()
        return cls(tokens, parents, depths, scores, max(depth))


class GrowingTree:
    """The candidate pool and the current beam while drafting.

    A table of k columns with a row per expanded node: node p is a child of row (p - 1) // k.
    """

    def __init__(self, device: torch.device | str | None = None):
        self._root = torch.zeros(1, dtype=torch.long, device=device)
        self._root_score = torch.zeros(1, device=device)

    def restart(self, root_token: Tensor) -> None:
        """Start a new tree of the root alone, int64 []."""
        self.size = 1
        self.level = 0
        self.top_k = 0
        # level by level, concatenated when a tree is cut out of them
        self._tokens = [root_token[None]]
        self._scores: list[Tensor] = []
        # expanded nodes after a row for the root itself, and the depths of their children
        self._expanded = [self._root]
        self._depths = [self._root]
        self._frontier = (self._root, self._root, self._tokens[0], self._root_score)
        # how the next frontier is chosen: by beam, or the candidates of a static tree
        self._choice: tuple[int | None, Tensor | None] | None = None

    @property
    def candidates(self) -> int:
        """Nodes in the pool, root excluded."""
        return self.size - 1

    @property
    def scores(self) -> Tensor:
        """float32 [candidates]: cumulative log-probabilities in creation order (LTD's size)."""
        return torch.cat(self._scores)

    @property
    def newest_scores(self) -> Tensor:
        """float32 [W * k] of the level drafted last, beam rank x child rank (LTD's depth)."""
        return self._scores[-1]

    @property
    def level_start(self) -> int:
        """The first node of the level drafted last."""
        return self.size - len(self.newest_scores)

    @property
    def frontier(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The nodes to expand next, [W] each: nodes, rows of the last forward, tokens, scores."""
        if self._choice is not None:  # not needed after the last level
            beam, chosen = self._choice
            scores = self._scores[-1]
            if chosen is None:
                chosen = scores.sort(descending=True, stable=True).indices[:beam]
            rows = torch.div(chosen, self.top_k, rounding_mode="floor")
            nodes = chosen + self.level_start
            self._frontier = (nodes, rows, self._tokens[-1][chosen], scores[chosen])
            self._choice = None
        return self._frontier

    def grow(
        self, tokens: Tensor, log_probs: Tensor, beam: int | None, chosen: Tensor | None = None
    ) -> None:
        """Add the children of the frontier.

        tokens int64 [W, k], log_probs float32 [W, k] (descending in each row; none above 0, so that
        ancestors rank first). The next frontier is the `beam` best by cumulative score, ties
        towards the earlier candidate, or the flat candidates `chosen` of a static tree.
        """
        nodes, _, _, scores = self.frontier
        width, children = tokens.shape
        self.top_k = children
        self.level += 1
        self.size += width * children
        self._expanded.append(nodes)
        self._depths.append(torch.full_like(nodes, self.level))
        self._tokens.append(tokens.flatten())
        self._scores.append((scores[:, None] + log_probs).flatten())
        self._choice = (beam, chosen)

    def whole(self) -> DraftTree:
        """Every candidate as a tree."""
        children = max(1, self.top_k)
        # every expanded node has as many children, and they follow each other
        parent = torch.cat(self._expanded)[1:].repeat_interleave(children)
        depth = torch.cat(self._depths)[1:].repeat_interleave(children)
        return DraftTree(
            torch.cat(self._tokens),
            torch.cat((self._root - 1, parent)),
            torch.cat((self._root, depth)),
            torch.cat((self._root_score, *self._scores)),
            self.level,
        )

    def select(self, keep: Tensor) -> DraftTree:
        return self.whole().select(keep)

    def prune(self, verify_nodes: int) -> DraftTree:
        """The root and the best `verify_nodes` candidates by score (EAGLE-2's re-rank)."""
        if not verify_nodes or not self._scores:
            return self.select(self._root)
        best = self.scores.sort(descending=True, stable=True).indices[:verify_nodes]
        return self.select(torch.cat((self._root, best.sort().values + 1)))


@dataclass(frozen=True)
class Trie:
    """Nodes 1 to N below the root, which is node 0; a parent comes before its children.

    scores: cumulative log-probabilities along the path, no node's above its parent's.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    scores: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.tokens)


class Merged:
    """Drafted candidates and a trie as one list: the drafted nodes, then the trie's own.

    An edge in both gets the larger of its two probabilities, which also raises the trie's nodes
    below it. tokens, parents, scores: of the drafted nodes, root first; size: how many they are.
    """

    def __init__(self, tokens: list[int], parents: list[int], scores: list[float], trie: Trie):
        self.size = len(tokens)
        self.tokens = list(tokens)
        self.parents = list(parents)
        self.scores = list(scores)
        self._child: dict[tuple[int, int], int] = {}
        # 1. the drafted nodes; of children with one token the first counts
        for node in range(1, self.size):
            self._child.setdefault((parents[node], tokens[node]), node)

        # 2. the trie's nodes, each below the place of its parent
        # where the nodes of the trie are in the list
        places = [0]
        for token, parent, score in zip(trie.tokens, trie.parents, trie.scores, strict=True):
            above = places[parent]
            step = score - (trie.scores[parent - 1] if parent else 0.0)
            node = self._child.get((above, token), -1)
            if node < 0:
                node = self._child[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.scores.append(self.scores[above] + step)
            elif node < self.size:
                step = max(step, scores[node] - scores[above])
                self.scores[node] = max(self.scores[node], self.scores[above] + step)
            places.append(node)

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of a node with this token."""
        return self._child.get((node, token))

    def ranked(self) -> list[int]:
        """All candidates by descending score; ties keep their order, so that parents come first."""
        return sorted(range(1, len(self)), key=lambda node: (-self.scores[node], node))

    def best(self, verify_nodes: int, device: torch.device | None = None) -> DraftTree:
        """The root and the best `verify_nodes` candidates."""
        keep = [0, *sorted(self.ranked()[:verify_nodes])]
        parents = [-1, *(keep.index(self.parents[node]) for node in keep[1:])]
        tokens = [self.tokens[node] for node in keep]
        scores = [self.scores[node] for node in keep]
        tree = DraftTree.from_arrays(tokens, parents, scores)
        token, parent, depth = torch.stack((tree.token, tree.parent, tree.depth)).to(device)
        return DraftTree(token, parent, depth, tree.score.to(device), tree.levels)


class StaticShape(Plan):
    """A fixed tree given as child-rank paths, as EAGLE-1 and Medusa use it: ((0,), (0, 0), ...).

    Node (r1, ..., rd) takes rank rd among the children of (r1, ..., rd-1). top_k: children drafted
    per node; widest: the largest number of nodes expanded in a level.

    >>> shape = StaticShape([(0,), (1,), (0, 0), (0, 1)])
    >>> shape.top_k, shape.depth, shape.verify_nodes
    (2, 1, 4)
    """

    def __init__(self, choices: Iterable[Iterable[int]]):
        paths = set(map(tuple, choices))
        self.choices = tuple(sorted(paths, key=lambda path: (len(path), path)))
        if not paths:
            raise SpecdecError("a static tree needs at least one node; plan total_tokens=1.")
        for path in paths:
            if not path or path[:-1] not in paths | {()} or min(path) < 0:
                raise SpecdecError(f"the static tree lists {path} without its parent.")
        self.top_k = 1 + max(max(path) for path in paths)
        self.depth = max(map(len, paths)) - 1
        self.total_tokens = len(paths) + 1
        self._expanded, self._kept = self._layout()
        self.widest = max(1, *map(len, self._expanded))
        # uploaded once: a cycle has no other upload than its accepted path
        self._placed: dict[torch.device, tuple[list[Tensor], Tensor]] = {}

    def _layout(self) -> tuple[list[list[int]], list[int]]:
        """Per level the flat candidates to expand, and the pool nodes to keep."""
        inner = {path[:-1] for path in self.choices if len(path) > 1}
        frontier: list[tuple[int, ...]] = [()]
        start = 1
        kept = [0]
        expanded = []
        for level in range(1, self.depth + 2):
            # the pool is in frontier-row-major order
            flat = {}
            for path in self.choices:
                if len(path) == level:
                    flat[path] = frontier.index(path[:-1]) * self.top_k + path[-1]
            kept += sorted(start + place for place in flat.values())
            start += len(frontier) * self.top_k
            frontier = sorted(inner & set(flat), key=lambda path: flat[path])
            expanded.append([flat[path] for path in frontier])
        return expanded, kept

    @property
    def limits(self) -> TreeConfig:
        return TreeConfig(self.total_tokens, self.depth, max(self.top_k, self.widest))

    def on(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Per level the flat candidates to expand next, int64 [W]; the pool nodes of the tree."""
        if device not in self._placed:
            rows = [*self._expanded, self._kept]
            *levels, kept = [torch.tensor(row, dtype=torch.long, device=device) for row in rows]
            self._placed[device] = levels, kept
        return self._placed[device]


# EAGLE-1's static tree (`mc_sim_7b_63`: 25 drafted nodes despite its name).
RANKS = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
EAGLE1_TREE = [tuple(map(int, ranks)) for ranks in RANKS.split()]
