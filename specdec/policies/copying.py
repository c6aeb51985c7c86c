"""Chooses a cycle's draft source: where copies of the text are likely, the network is skipped.

    promise = sum over the best V copies of exp(score)       expected accepted tokens among V copies
    copies alone, if 1 + promise >= (1 - saved_frac) * (1 + drafted)

drafted is the mean number of accepted tokens in cycles with a drafted tree, with more weight on
newer cycles of the turn. So on text that the network predicts badly, few copies are enough, and a
cycle without any becomes a plain step. Needs a drafter that copies beside its network (`hybrid`);
with any other, every cycle has its tree. (Ours.)
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from specdec.core.policy import largest
from specdec.core.records import PLAN, Cycle, Question
from specdec.core.tree_config import CopiedTree, Plan, TreeConfig
from specdec.errors import check_fields
from specdec.policies.base import Rule


@dataclasses.dataclass
class CopyGate(Rule):
    """PLAN: copies alone, if they promise enough; else the tree, with copies merged into it.

    tree: total_tokens, depth, top_k and, if set, the beam. Other policies may answer the questions
    inside the tree: Chain(CopyGate(...), LTD's depth policy).

    >>> gate = CopyGate(tree=(8, 3, 3), copied_tokens=12)
    >>> gate.plan.text, gate.limits.total_tokens, round(gate.enough_tok, 2)
    ('8,3,3', 12, 0.6)
    """

    tree: tuple[int, ...] = (8, 3, 3)
    copied_tokens: int = 12  # rows to verify in a cycle of copies only, the root included
    saved_frac: float = 0.2  # fraction of a drafted cycle's time that copies alone save
    drafted_tok: float = 1.0  # accepted tokens expected of a drafted tree at the start of a turn
    newest_frac: float = 0.2  # weight of the newest cycle; 0 never learns

    asks = frozenset({PLAN})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, saved_frac=(0.0, 1.0), newest_frac=(0.0, 1.0), drafted_tok=(0.0, np.inf))
        total_tokens, depth, top_k, *beam = self.tree
        self.plan: Plan = TreeConfig(total_tokens, depth, top_k, beam=tuple(beam))
        self.copied = CopiedTree(self.copied_tokens)
        tree = self.plan.limits
        most = max(self.copied_tokens, total_tokens)
        # room for the copies' rows; the drafter itself is asked for the tree at most
        room = TreeConfig(most, max(depth, 1), max(top_k, most))
        self.limits = tree if most <= total_tokens else largest([tree, room])
        self.reset()

    def reset(self) -> None:
        self.drafted = self.drafted_tok

    @property
    def enough_tok(self) -> float:
        """The promise above which nothing is drafted."""
        return (1 - self.saved_frac) * (1 + self.drafted) - 1

    def promise(self, scores: ArrayLike) -> float:
        """Expected accepted tokens among the best copies. scores: cumulative log-probabilities."""
        best = np.sort(np.asarray(scores, dtype=float))[::-1][: self.copied.verify_nodes]
        return float(np.exp(best).sum())

    def answer(self, question: Question) -> Plan:
        enough = self.promise(question.copied_scores) >= self.enough_tok
        return self.copied if enough else self.plan

    def observe(self, cycle: Cycle) -> None:
        if cycle.draft_calls:
            self.drafted += self.newest_frac * (cycle.accepted_tok - self.drafted)
