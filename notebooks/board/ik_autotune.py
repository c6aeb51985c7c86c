"""ik_llama.cpp's --spec-autotune: a bandit for each of three flags."""

import random
from dataclasses import dataclass

import numpy as np

from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.policies.engines import LlamacppPMin


@dataclass
class IkAutotune(LlamacppPMin):
    """An epsilon-greedy bandit for each of n_max, p_min and n_min, all rewarded with the cycle's tokens per second.

    Source: ik_llama.cpp, common/spec-tuner.cpp (pull requests 1595 and 2112): epsilon 0.15, means over all pulls; 30 cycles in a
    row 30 % below a moving average (weight 0.05) start it anew from llama.cpp's values, and are not counted in the 50 cycles after.
    """

    most_levels: int = 9  # 16 in ik_llama.cpp; no longer chains were recorded
    epsilon: float = 0.15
    weight: float = 0.05
    drop: float = 0.3
    patience: int = 30
    cooldown: int = 50
    seed: int = 0

    kinds = (PLAN, EXTEND, SIZE)

    def __post_init__(self):
        super().__post_init__()
        limits = np.unique([*np.linspace(0, 0.95, 11), self.p_min])
        self.grids = [list(range(1, self.most_levels + 1)), limits.tolist(), list(range(7))]
        given = (self.most_levels, self.p_min, self.least)
        self._given = [grid.index(value) for grid, value in zip(self.grids, given, strict=True)]
        self._random = random.Random(self.seed)
        self.rule = LlamacppPMin(self.top_k, self.beam, self.most_levels, self.verify_nodes, self.p_min, 0, self.keeps)
        self._begin([0, 0, 0], 0)

    def _begin(self, best, waiting):
        self.best, self._waiting, self._low, self._average = best, waiting, 0, 0.0
        self._pulls, self._means = ([[value] * len(grid) for grid in self.grids] for value in (0, 0.0))

    def answer(self, question):
        if question.kind != PLAN:
            return self.rule.answer(question)
        self.chosen = [
            self._random.randrange(len(grid)) if self._random.random() < self.epsilon else best
            for grid, best in zip(self.grids, self.best, strict=True)
        ]
        levels, self.rule.p_min, least = (grid[arm] for grid, arm in zip(self.grids, self.chosen, strict=True))
        self.rule.least = min(least, levels)
        return self.trees[levels]

    def observe(self, cycle):
        reward = 1e3 * cycle.new_tok / max(cycle.total_ms, 1e-9)
        for number, arm in enumerate(self.chosen):
            pulls, means = self._pulls[number], self._means[number]
            pulls[arm] += 1
            means[arm] += (reward - means[arm]) / pulls[arm]
            self.best[number] = max((arm for arm, count in enumerate(pulls) if count), key=means.__getitem__)
        self._low = self._low + 1 if not self._waiting and reward < self._average * (1 - self.drop) else 0
        if self._low == self.patience:
            return self._begin(list(self._given), self.cooldown)
        self._waiting = max(0, self._waiting - 1)
        self._average += (self.weight if self._average else 1.0) * (reward - self._average)
