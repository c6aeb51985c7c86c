"""A bandit: the number of levels with the largest mean reward + weight * sqrt(log(cycles) / pulls).

Source: BanditSpec (arXiv 2505.15141) and its code: arms 1 to 4, weight 6 tokens per second, two
pulls of each arm first, every text anew. Its code divides by the pulls of all arms together, which
adds the same to each; here by the arm's own, as in its paper.
"""

import math
from dataclasses import dataclass

from specdec.core.tree_config import TreeConfig
from specdec.policies.base import Rule, tree_of

WARMUP = 2  # pulls of each arm
WEIGHT = 6.0  # tokens per second


@dataclass
class Ucb(Rule):
    """per_text: every text starts anew."""

    top_k: int = 1
    beam: tuple = ()
    most_levels: int = 9
    verify_nodes: int = 60
    arms: tuple = (1, 2, 3, 4)
    per_text: bool = True

    def __post_init__(self):
        super().__post_init__()
        assert max(self.arms) <= self.most_levels, "no arm above most_levels"
        self.asks = frozenset({"plan"})
        self.trees = [TreeConfig(1, 0, 1)]
        for depth in range(self.most_levels):
            self.trees.append(tree_of(self.verify_nodes, depth, self.top_k, self.beam))
        self.limits = self.plan = self.trees[-1]
        self._begin()

    def _begin(self):
        self.pulls = [0] * len(self.arms)
        self.means = [0.0] * len(self.arms)

    def reset(self):
        if self.per_text:
            self._begin()

    def answer(self, question):
        self.arm = self.pulls.index(min(self.pulls))
        if self.pulls[self.arm] >= WARMUP:
            # the bonus of an arm that was pulled seldom
            cycles = math.log(sum(self.pulls))
            bounds = []
            for mean, pulls in zip(self.means, self.pulls, strict=True):
                bounds.append(mean + WEIGHT * math.sqrt(cycles / pulls))
            self.arm = bounds.index(max(bounds))
        return self.trees[self.arms[self.arm]]

    def observe(self, cycle):
        # tokens per second of this cycle
        reward = 1e3 * cycle.new_tok / max(cycle.total_ms, 1e-9)
        self.pulls[self.arm] += 1
        self.means[self.arm] += (reward - self.means[self.arm]) / self.pulls[self.arm]
