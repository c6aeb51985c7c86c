"""vLLM's estimator: a logistic fit of acceptance, then the size of the most tokens per ms.

    p_k = sigmoid(slope * logit(q) + b_k),  q the drafter's probability of token k

Source: vLLM, pull request 52228 (merged, August 2026), OnlineAcceptanceEstimator: slope 0 and b 1.5
at first; every 100 cycles one Newton step from those cycles alone, with ridge 1e-3, each number
damped by n / (n + 50) of its n graded tokens; whole drafts are verified until the third fit. A
negative slope is not taken. Chains only; what it learned outlasts a text.
"""

import dataclasses

import numpy as np

from specdec.policies.base import Rule, as_array, tree_of

INTERVAL, WARMUP_FITS, DAMPING, RIDGE = 100, 3, 50.0, 1e-3


@dataclasses.dataclass
class VllmLogistic(Rule):
    levels: int = 7

    def __post_init__(self):
        super().__post_init__()
        self.asks = frozenset({"size"})
        self.limits = self.plan = tree_of(self.levels, self.levels - 1, 1)
        self.coefficients = np.array([0.0] + [1.5] * self.levels)
        self.fits = 0
        self._logits = np.zeros(0)
        self._begin()

    def _begin(self):
        size = len(self.coefficients)
        self._information, self._gradient = np.zeros((size, size)), np.zeros(size)
        self._counts, self._cycles = np.zeros(size), 0

    def price(self, costs):
        """The same rule with the times of a CostModel."""
        priced = dataclasses.replace(self)
        draft_ms, per_tok = costs.levels(1, self.levels - 1)
        priced._draft_ms = np.concatenate(([0.0], np.cumsum(draft_ms))) + costs.rest_ms
        priced._draft_per_tok = np.concatenate(([0.0], np.cumsum(per_tok)))
        priced._verify_ms, priced._verify_per_tok = map(np.array, costs.lookup(self.levels))
        return priced

    def chances(self):
        """Probability of each position to be accepted once it is reached."""
        slope, *biases = self.coefficients
        logits = slope * self._logits + np.array(biases)[: len(self._logits)]
        return 0.5 * (1 + np.tanh(0.5 * logits))

    def answer(self, question):
        # log-probability of each token, below zero for the logit
        steps = np.minimum(np.diff(as_array(question.scores).astype(float), prepend=0.0), -1e-17)
        self._logits = np.clip(steps - np.log(-np.expm1(steps)), -40.0, 40.0)
        if self.fits < WARMUP_FITS:
            return int(question.largest)
        survival = np.cumprod(self.chances())[: question.largest]
        expected = 1 + np.concatenate(([0.0], np.cumsum(survival)))
        n, context_tok = question.expansions + 1, question.context_tok
        cost = self._verify_ms + self._verify_per_tok * context_tok
        cost = cost + self._draft_ms[n] + self._draft_per_tok[n] * context_tok
        return int((expected / cost[: len(expected)]).argmax())

    def observe(self, cycle):
        # only tokens whose acceptance is known: up to the first refusal
        graded = min(cycle.verify_nodes, cycle.accepted_tok + 1, len(self._logits))
        for level, chance in enumerate(self.chances()[:graded]):
            row = np.zeros(len(self.coefficients))
            row[[0, level + 1]] = self._logits[level], 1.0
            self._information += chance * (1 - chance) * np.outer(row, row)
            self._gradient += (float(cycle.accepted_tok > level) - chance) * row
            self._counts[[0, level + 1]] += 1
        self._cycles += 1
        if self._cycles == INTERVAL:
            ridge = RIDGE * np.eye(len(self._gradient))
            step = np.linalg.solve(self._information + ridge, self._gradient)
            step *= self._counts / (self._counts + DAMPING)
            # confidence would count against a token
            if self.coefficients[0] + step[0] < 0:
                step[0] = 0.0
            self.coefficients = self.coefficients + step
            self.fits += 1
            self._begin()
