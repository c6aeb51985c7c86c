"""SGLang's moving average: one candidate of levels down or up when it crosses a threshold.

Source: SGLang, AdaptiveStepSlot in speculative/adaptive_spec_params.py (pull request 21599 and
followers), with its constants. Its average outlasts a text. Trees are ours: level for token.
"""

from dataclasses import dataclass

from specdec.core.tree_config import TreeConfig
from specdec.policies.base import Rule, tree_of

ALPHA = 0.2  # weight of the newest cycle
INTERVAL = 5  # cycles between two choices
WARMUP = 10  # cycles before the first
DOWN = -0.25  # hysteresis


@dataclass
class SglangEma(Rule):
    top_k: int = 1
    beam: tuple = ()
    most_levels: int = 9
    verify_nodes: int = 60
    candidates: tuple = (1, 3, 5, 7)

    def __post_init__(self):
        super().__post_init__()
        assert self.candidates[-1] <= self.most_levels, "no candidate above most_levels"
        self.asks = frozenset({"plan"})
        self.trees = [TreeConfig(1, 0, 1)]
        for depth in range(self.most_levels):
            self.trees.append(tree_of(self.verify_nodes, depth, self.top_k, self.beam))
        self.limits = self.plan = self.trees[-1]
        self._now = len(self.candidates) // 2
        # as in its code: begins in the middle
        self.average_tok = self.levels - 1.0
        self._cycles = 0

    @property
    def levels(self):
        return self.candidates[self._now]

    def answer(self, question):
        return self.trees[self.levels]

    def observe(self, cycle):
        if self.levels:
            self.average_tok += ALPHA * (cycle.accepted_tok - self.average_tok)
        self._cycles += 1
        if self._cycles > WARMUP and (self._cycles - WARMUP) % INTERVAL == 0:
            self._now = self._next()

    def _next(self):
        steps, now = self.candidates, self._now
        if not steps[now]:  # plain steps teach nothing: try again
            now = min(now + 1, len(steps) - 1)
            if self.average_tok < 0:
                self.average_tok = steps[now] - 1.0
            return now
        # several steps down at once, or one after the other up
        while now and self.average_tok <= max(steps[now - 1] - 0.5, 0.5) + DOWN:
            now -= 1
        if now == self._now:
            while now < len(steps) - 1 and self.average_tok > steps[now] - 0.5:
                now += 1
        return now
