"""llama.cpp's stop by confidence: draft until a token is less likely than p_min.

Source: llama.cpp, common/speculative.cpp: p_min 0.75 (0 in the newest), n_max 16, n_min 0. The
unlikely token itself is not verified; keeps=True verifies it, as llama.cpp did until 2026, and as
transformers does with p_min 0.4 and at most 20 tokens. In a tree (ours) the probability of a level
is that of the best path over that of the best path before, and all nodes stay.
"""

import math
from dataclasses import dataclass

from specdec.core.records import EXTEND
from specdec.core.tree_config import pool_size
from specdec.policies.base import Rule, as_array, tree_of


@dataclass
class LlamacppPMin(Rule):
    top_k: int = 1
    beam: tuple = ()
    most_levels: int = 16
    verify_nodes: int = 60
    p_min: float = 0.75
    keeps: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.asks = frozenset({"extend", "size"})
        self.limits = tree_of(self.verify_nodes, self.most_levels - 1, self.top_k, self.beam)
        self.plan = self.limits

    def unlikely(self, question):
        """Whether the best path's probability fell below p_min with the newest level."""
        n = question.expansions
        scores = as_array(question.scores)
        start = pool_size(n - 1, self.top_k, self.beam) if n else 0
        before = pool_size(n - 2, self.top_k, self.beam) if n > 1 else 0
        parent = float(scores[before:start].max()) if n else 0.0
        return math.exp(float(scores[start:].max()) - parent) < self.p_min

    def answer(self, question):
        if question.kind == EXTEND:
            return not self.unlikely(question)
        if self.top_k > 1:
            tree = tree_of(self.verify_nodes, question.expansions, self.top_k, self.beam)
            return min(question.largest, tree.verify_nodes)
        if not self.keeps and self.unlikely(question):
            return question.expansions
        return question.expansions + 1
