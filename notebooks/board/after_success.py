"""Goes by history alone: one level more after a cycle that accepted all of its levels, one less after any other."""

from specdec.core.policy import Policy
from specdec.core.tree_config import TreeConfig


class AfterSuccess(Policy):
    asks = frozenset({"plan"})
    plan = limits = TreeConfig(total_tokens=17, depth=6, top_k=4)

    def reset(self):
        self.depth = 2

    def answer(self, question):
        nodes = (0, 4, 7, 9, 11, 13, 15, 17)[self.depth + 1] - 1
        return TreeConfig(nodes + 1, self.depth, 4)

    def observe(self, cycle):
        grown = cycle.accepted_tok > self.depth
        self.depth = min(6, self.depth + 1) if grown else max(0, self.depth - 1)
