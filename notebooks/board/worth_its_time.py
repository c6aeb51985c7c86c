"""Verifies as many nodes as bring the most expected tokens per millisecond, with the costs of the machine it is judged on.

The drafter is too sure of itself, so its log-probabilities are scaled; levels are added while the best path is likely.
"""

import math

import numpy as np

from specdec.core.policy import Policy
from specdec.core.tree_config import TreeConfig


class WorthItsTime(Policy):
    asks = frozenset({"extend", "size"})
    plan = limits = TreeConfig(total_tokens=33, depth=7, top_k=4)
    deeper, scale = math.log(0.25), 1.2
    costs = None

    def price(self, costs):
        self.costs = costs
        self.verify_ms = np.array([float(costs.verify_ms(nodes, 200)) for nodes in range(33)])
        self.draft_ms = np.array([float(costs.draft_ms(4, level, 200)) for level in range(8)])
        return self

    def answer(self, question):
        if question.kind == "extend":
            return float(question.newest_scores.max()) > self.deeper
        chances = np.sort(np.exp(self.scale * question.scores.numpy()))[::-1][: question.largest]
        tokens = 1 + np.concatenate(([0.0], np.cumsum(chances)))
        spent_ms = self.verify_ms[: len(tokens)] + self.draft_ms[question.expansions] + self.costs.rest_ms
        return int((tokens / spent_ms).argmax())
