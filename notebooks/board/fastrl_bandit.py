"""FastRL's bandit over trees (TLT, ASPLOS 2026)."""

import math
import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from specdec.core.records import PLAN
from specdec.policies.base import tree_of
from specdec.policies.engines import Levels


@dataclass
class FastrlBandit(Levels):
    """An epsilon-greedy bandit over trees, by the median of the last rewards; an untried tree comes first.

    Source: mit-han-lab/fastrl, speculative/eagle_mab.py: epsilon 0.1, window 1,000, reward tokens per second; trees of 8 steps,
    4 children and 48, 32, 16 or 8 tokens. Its buckets by batch size leave the first alone for one text: here all compete.
    """

    top_k: int = 4
    most_levels: int = 8
    tokens: tuple[int, ...] = (48, 32, 16, 8)
    epsilon: float = 0.1
    window: int = 1000
    seed: int = 0

    kinds = (PLAN,)

    def __post_init__(self):
        super().__post_init__()
        self.random = random.Random(self.seed)
        self.arms = [tree_of(total - 1, self.most_levels - 1, self.top_k) for total in self.tokens]
        self.rewards = [deque(maxlen=self.window) for _ in self.arms]

    def answer(self, question):
        medians = [float(np.median(rewards)) if rewards else math.inf for rewards in self.rewards]
        explores = self.random.random() < self.epsilon
        self.arm = self.random.randrange(len(self.arms)) if explores else medians.index(max(medians))
        return self.arms[self.arm]

    def observe(self, cycle):
        self.rewards[self.arm].append(1e3 * cycle.new_tok / max(cycle.total_ms, 1e-9))
