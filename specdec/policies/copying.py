"""Which source a cycle drafts from: where copies of the text promise enough, the network is left alone for that cycle.

    promise = sum over the best V copies of exp(score)        the tokens that V copied candidates are expected to have accepted

Needs a drafter that copies beside its network (`hybrid`); with any other every cycle has its tree. (Ours.)
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specdec.core.policy import largest, limits_of
from specdec.core.records import PLAN, Question
from specdec.core.tree import Plan
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError
from specdec.policies.base import Rule


@dataclasses.dataclass
class CopyGate(Rule):
    """PLAN: `copied_tokens` of nothing but copies where they promise `enough_tok`; else the tree, copies merged into it.

    tree: total_tokens, depth, top_k and the beam, if it has its own. Other policies may answer the questions inside the
    tree: Chain(CopyGate(...), LTD's depth policy).

    >>> gate = CopyGate(tree=(8, 3, 3), copied_tokens=12, enough_tok=1.5)
    >>> gate.plan.text, gate.limits.total_tokens
    ('8,3,3', 12)
    """

    tree: tuple[int, ...] = (8, 3, 3)
    copied_tokens: int = 12  # rows to verify where only copies are, the root included
    enough_tok: float = 2.0  # expected accepted tokens from which nothing is drafted

    asks = frozenset({PLAN})

    def __post_init__(self):
        super().__post_init__()
        if not self.enough_tok >= 0:
            raise SpecdecError(f"enough_tok must be a number of tokens, 0 or more, got {self.enough_tok!r}.")
        total_tokens, depth, top_k, *beam = self.tree
        self.plan: Plan = TreeConfig(total_tokens, depth, top_k, beam=tuple(beam))
        self.copied = CopiedTree(self.copied_tokens)
        tree, most = limits_of(self.plan), max(self.copied_tokens, total_tokens)
        # room for the copies' rows; the drafter itself is never asked for more than the tree
        self.limits = (
            tree if most <= total_tokens else largest([tree, TreeConfig(most, max(depth, 1), max(top_k, most))])
        )

    def promise(self, scores) -> float:
        """Tokens that the best copies are expected to have accepted. scores: cumulative log-probabilities."""
        best = np.sort(np.asarray(scores, dtype=float))[::-1][: self.copied.verify_nodes]
        return float(np.exp(best).sum())

    def answer(self, question: Question) -> Plan:
        return self.copied if self.promise(question.copied_scores) >= self.enough_tok else self.plan
