"""llama.cpp's stop by cumulative probability: draft while a path is worth one verified token more.

Source: llama.cpp, pull request 17034 (open): the product of probabilities against the cost of one
more token in the batch, relative to a plain step. The cost of drafting is ignored there, and here.
In a tree (ours) nodes count in the order of their paths' probabilities.
"""

import dataclasses
import math

import numpy as np

from specdec.core.records import SIZE
from specdec.policies.base import Rule, as_array, tree_of


@dataclasses.dataclass
class LlamacppEv(Rule):
    """look_ahead: levels to draft on for a size whose next token is cheaper."""

    top_k: int = 1
    beam: tuple = ()
    most_levels: int = 16
    verify_nodes: int = 60
    look_ahead: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.asks = frozenset({"extend", "size"})
        self.limits = tree_of(self.verify_nodes, self.most_levels - 1, self.top_k, self.beam)
        self.plan = self.limits

    def price(self, costs):
        """The same rule with the times of a CostModel."""
        priced = dataclasses.replace(self)
        verify_ms, per_tok = costs.lookup(self.plan.verify_nodes)
        priced._verify_ms = np.array(verify_ms)
        priced._verify_per_tok = np.array(per_tok)
        priced._step_ms = float(costs.step_ms(0))
        priced._step_per_tok = float(costs.step_ms(1)) - priced._step_ms
        return priced

    def marginal(self, context_tok):
        """Cost of the 1st, 2nd, ... verified node, in plain steps."""
        # a plain step at this length of context is the unit
        step_ms = self._step_ms + self._step_per_tok * context_tok
        return np.diff(self._verify_ms + self._verify_per_tok * context_tok) / step_ms

    def answer(self, question):
        scores = as_array(question.scores)
        prices = self.marginal(question.context_tok)
        if question.kind == SIZE:
            chances = np.sort(np.exp(scores))[::-1][: len(prices)]
            paying = np.flatnonzero(chances > prices[: len(chances)])
            return min(int(paying[-1]) + 1, question.largest) if len(paying) else 0
        # continue while the best path beats the price of its place among all nodes
        best = float(question.newest_scores.max())
        earlier = scores[: len(scores) - len(question.newest_scores)]
        place = int((earlier >= best).sum())
        prices = prices[place : place + 1 + self.look_ahead]
        return bool(len(prices) and math.exp(best) > prices.min())
