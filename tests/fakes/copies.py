"""Drafters whose copies and window are given; tries as dictionaries."""

import torch

from specdec.core.protocols import Drafter, DraftSession
from specdec.core.tree import Trie


def paths_of(trie: Trie) -> dict[tuple[int, ...], float]:
    paths = [()]
    for token, parent in zip(trie.tokens, trie.parents, strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths), "two nodes of one path"
    return dict(zip(paths[1:], trie.scores, strict=True))


def random_trie(draw, nodes: int, tokens) -> Trie:
    """`nodes` nodes at random places, tokens out of `tokens`, no two of one path."""
    rows = []
    while len(rows) < nodes:
        parent = draw.randint(0, len(rows))
        free = [token for token in tokens if (token, parent) not in [row[:2] for row in rows]]
        if free:
            score = (rows[parent - 1][2] if parent else 0.0) - draw.expovariate(2.0)
            rows.append((draw.choice(free), parent, score))
    return Trie(*zip(*rows, strict=True)) if rows else Trie()


class ScriptedDrafter(Drafter, DraftSession):
    """`drafter`'s tree (none without one), beside it the trie that `propose(token ids)` gives.

    window: token ids of a chain that rides along in every forward of the target; `learned` is what
    it brought. asked: the lengths at which copies were looked for.
    """

    copied_levels = 4

    def __init__(self, target, propose, drafter=None, window: tuple[int, ...] = ()):
        self.target, self.propose, self.drafter = target, propose, drafter
        self.forwards, self.extra_rows = drafter is not None, len(window)
        self.chain, self.asked, self.learned = window, [], []
        if drafter is not None:
            self.root, self.expand = drafter.root, drafter.expand
        self.learn = self.learned.append

    def session(self, context_tok: int, tree_tok: int) -> "ScriptedDrafter":
        return self

    def copied(self, ids: torch.Tensor) -> Trie:
        self.asked.append(len(ids))
        return self.propose(ids.tolist())

    def window(self, levels: int):
        count = len(self.chain)
        if not count or count > levels:
            return None
        depths, sees = 1 + torch.arange(count), torch.ones(count, count, dtype=torch.bool).tril()
        return torch.tensor(self.chain), depths, sees
