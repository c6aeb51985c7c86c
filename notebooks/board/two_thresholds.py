"""Drafts deeper while the best path is likely, and verifies the nodes that are likely enough: a controller of ten lines."""

import math

from specdec.core.policy import Policy
from specdec.core.tree_config import TreeConfig


class TwoThresholds(Policy):
    asks = frozenset({"extend", "size"})
    plan = limits = TreeConfig(total_tokens=17, depth=6, top_k=4)
    deeper, likely = math.log(0.3), math.log(0.1)

    def answer(self, question):
        if question.kind == "extend":
            return float(question.newest_scores.max()) > self.deeper
        return min(int((question.scores > self.likely).sum()), question.largest)
