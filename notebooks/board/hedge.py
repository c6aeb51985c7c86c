"""Not-a-Bandit (ICLR 2026), for lengths of a chain in place of drafters."""

import math
import random
from dataclasses import dataclass

import numpy as np

from specdec.core.records import PLAN
from specdec.policies.engines import Priced


@dataclass
class Hedge(Priced):
    """Every cycle judges chains of all lengths, not the drafted one alone; NormalHedge's weights draw the next.

    Source: Not-a-Bandit (arXiv 2510.20064): one verified text judges all drafters, and NormalHedge chooses among them. Ours:
    lengths of one drafter's chain take the drafters' place, the reward is the cycle's tokens over the time of the length, and
    lengths beyond a wholly accepted chain, which the cycle cannot judge, keep their regret.
    """

    most_levels: int = 8
    seed: int = 0

    kinds = (PLAN,)

    def __post_init__(self):
        super().__post_init__()
        self._random, self.regrets = random.Random(self.seed), np.zeros(self.most_levels)

    def weights(self):
        """Of 1, 2, ... levels: those of NormalHedge, c being such that the mean of exp(R^2 / 2c) over positive regrets R is e."""
        squares = np.maximum(self.regrets, 0.0) ** 2
        if not squares.any():
            return np.full(self.most_levels, 1 / self.most_levels)
        low, high = squares.max() / (2 * (1 + math.log(len(squares)))), squares.max() / 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if np.exp(squares / (2 * middle)).mean() > math.e else (low, middle)
        found = np.sqrt(squares) / high * np.exp(squares / (2 * high))
        return found / found.sum()

    def answer(self, question):
        self.drawn = self.weights()
        self.levels = 1 + self._random.choices(range(self.most_levels), self.drawn)[0]
        return self.trees[self.levels]

    def observe(self, cycle):
        lengths = np.arange(1, self.most_levels + 1)
        rewards = (1 + np.minimum(lengths, cycle.accepted_tok)) / [self.cycle_ms(n, cycle.context_tok) for n in lengths]
        judged = lengths <= (self.levels if cycle.accepted_tok >= self.levels else self.most_levels)
        own = float((self.drawn * rewards)[judged].sum() / self.drawn[judged].sum())
        self.regrets += np.where(judged, rewards - own, 0.0) * self.plain_ms(cycle.context_tok)
