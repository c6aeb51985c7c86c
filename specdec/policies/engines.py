"""The rules by which current inference engines adapt speculation, and two bandits; none needs training.

    PLAN     sglang_ema, sglang_throughput, vllm_adaptive_k, hf_heuristic, trtllm_gate, ucb, exp3             how many levels?
    EXTEND   llamacpp_ev, llamacpp_p_min                                                                    one level more?
    SIZE     sglang_draft_prob, vllm_adaptive_verification, vllm_logistic, llamacpp_ev, llamacpp_p_min      how many nodes?

Engines draft chains, so top_k is 1 and a level is a token; defaults are the engines' own constants, and each class names its
source. Trees (top_k above 1) are our generalisation: a chain's k-th token becomes level k, and a node has the probability of
its path. State that an engine keeps per batch is kept for the single text here, and lasts from text to text as it does
there (`remembers`). In measurements it lasts through the texts of one suite, in their order.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from specdec.core.policy import Policy
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import Plan, TreeConfig, pool_size, refuse_tree
from specdec.errors import SpecdecError, check_name
from specdec.policies.base import Rule, as_array, tree_of


def demand(holds: object, what: str, *values: object) -> None:
    """SpecdecError unless a setting is valid."""
    if not holds:
        raise SpecdecError(f"{what}, got {', '.join(map(repr, values))}.")


@dataclass
class Levels(Rule):
    """Common base of the rules: the tree of so many drafted levels, a plain step for none.

    most_levels: upper limit, root's children included; a chain's tokens. verify_nodes: upper limit of their nodes.
    """

    top_k: int = 1
    beam: tuple[int, ...] = ()
    most_levels: int = 9
    verify_nodes: int = 60

    kinds: ClassVar[tuple[str, ...]] = ()  # kinds of questions; set by subclasses

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(self.most_levels >= 1, "most_levels must be at least 1", self.most_levels)
        demand(self.verify_nodes >= 1, "verify_nodes must be at least 1", self.verify_nodes)
        pool = pool_size(self.most_levels - 1, self.top_k, self.beam)
        refuse_tree(self.verify_nodes + 1, self.most_levels * pool)  # before any tree is built
        grown = (
            tree_of(self.verify_nodes, depth, self.top_k, self.beam)
            for depth in range(self.most_levels)
        )
        self.trees = [TreeConfig(1, 0, 1), *grown]
        self.asks, self.plan = frozenset(self.kinds), self.trees[-1]
        self.limits = self.plan

    @property
    def remembers(self) -> bool:
        """An engine's counters outlast a text."""
        return type(self).observe is not Policy.observe


@dataclass
class Priced(Levels):
    """A rule that uses the time of a cycle: milliseconds at context 0 and per context token, set by `price`.

    draft_ms: of 0, 1, 2, ... levels together. verify_ms: of 0, 1, 2, ... nodes. priced_for: the cost model's name.
    """

    draft_ms: tuple[float, ...] = ()
    draft_per_tok: tuple[float, ...] = ()
    verify_ms: tuple[float, ...] = ()
    verify_per_tok: tuple[float, ...] = ()
    rest_ms: float = 0.0
    step_ms: float = 0.0
    step_per_tok: float = 0.0
    priced_for: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tables = [np.array(getattr(self, name)) for name in ("verify_ms", "verify_per_tok")]

    def price(self, costs: Any) -> Self:
        """The same rule with the times of `costs`, a CostModel."""
        levels = costs.levels(self.top_k, self.most_levels - 1, self.beam)
        draft_ms, draft_per_tok = ((0.0, *np.cumsum(part).tolist()) for part in levels)
        (verify, verify_per_tok), step = (
            costs.lookup(self.plan.verify_nodes),
            float(costs.step_ms(0)),
        )
        drafting = dict(draft_ms=draft_ms, draft_per_tok=draft_per_tok, rest_ms=costs.rest_ms)
        verifying = dict(verify_ms=tuple(verify), verify_per_tok=tuple(verify_per_tok))
        plain = dict(step_ms=step, step_per_tok=float(costs.step_ms(1)) - step)
        return self.with_settings(**drafting, **verifying, **plain, priced_for=costs.name)

    def plain_ms(self, context_tok: int) -> float:
        """One step of plain decoding."""
        self.check_prices()
        return self.step_ms + self.step_per_tok * context_tok

    def cycle_ms(self, levels: int, context_tok: int) -> float:
        """A cycle of so many levels with all nodes of the plan; 0 levels are a plain step."""
        if not levels:
            return self.plain_ms(context_tok)
        return float(self.sizes_ms(levels, context_tok)[self.trees[levels].verify_nodes])

    def sizes_ms(self, levels: int, context_tok: int) -> np.ndarray:
        """A cycle of so many levels with 0, 1, 2, ... verified nodes."""
        self.check_prices()
        drafting = self.draft_ms[levels] + self.draft_per_tok[levels] * context_tok + self.rest_ms
        return self._tables[0] + self._tables[1] * context_tok + drafting

    def check_prices(self) -> None:
        if not self.verify_ms:
            raise SpecdecError(
                f"this {type(self).__name__} has no costs yet; call price(costs) first."
            )


@dataclass
class Candidates(Levels):
    """Levels that a rule chooses from, ascending; it begins with `start`, or in the middle if that is not one of them."""

    candidates: tuple[int, ...] = (1, 3, 5, 7)
    start: int = -1

    def check_candidates(self, least: int) -> int:
        """Index of the first candidate; SpecdecError for invalid candidates."""
        wanted = tuple(self.candidates)
        fits = (
            wanted == tuple(sorted(set(wanted)))
            and wanted
            and least <= wanted[0]
            and wanted[-1] <= self.most_levels
        )
        demand(
            fits,
            f"candidates must be ascending whole numbers from {least} to {self.most_levels}",
            wanted,
        )
        return wanted.index(self.start) if self.start in wanted else len(wanted) // 2


@dataclass
class SglangEma(Candidates):
    """`sglang_ema`: one candidate down or up when a moving average of accepted tokens crosses a threshold.

    Source: SGLang, AdaptiveStepSlot in speculative/adaptive_spec_params.py (pull request 21599 and followers), with its
    constants; for batches of 8 and more it has other candidates, [0, 1, 3] and fewer.
    down, up: hysteresis. ceiling: 0 for none, else moves down end at ceil(average * ceiling).
    """

    alpha: float = 0.2
    interval: int = 5
    warmup: int = 10
    down: float = -0.25
    up: float = 0.0
    ceiling: float = 0.0

    kinds = (PLAN,)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0 < self.alpha <= 1 and self.interval >= 1
        demand(fits, "alpha must lie in (0, 1], interval be 1 or more", self.alpha)
        self._now = self.check_candidates(least=0)
        self.average_tok, self._seen = self.levels - 1.0, 0

    @property
    def levels(self) -> int:
        """Levels of the next cycle."""
        return self.candidates[self._now]

    def answer(self, question: Question) -> TreeConfig:
        return self.trees[self.levels]

    def observe(self, cycle: Cycle) -> None:
        if self.levels:
            self.average_tok += self.alpha * (cycle.accepted_tok - self.average_tok)
        self._seen += 1
        if self._seen > self.warmup and (self._seen - self.warmup) % self.interval == 0:
            self._now = self._next()

    def _next(self) -> int:
        steps, now, average = self.candidates, self._now, self.average_tok
        if not steps[now]:  # plain steps teach nothing: try again
            now = min(now + 1, len(steps) - 1)
            if average < 0:
                self.average_tok = steps[now] - 1.0
            return now
        while now and average <= (steps[now - 1] - 0.5 if steps[now - 1] else 0.5) + self.down:
            now -= 1
        if now == self._now:
            while now < len(steps) - 1 and average > steps[now] - 0.5 + self.up:
                now += 1
        if self.ceiling and now <= self._now:
            while now and steps[now] > max(1, math.ceil(average * self.ceiling)):
                now -= 1
        return now


@dataclass
class SglangThroughput(Candidates, Priced):
    """`sglang_throughput`: the candidate with the most expected tokens per millisecond.

    Source: SGLang, pull request 28045 (open), strategy throughput_aware. A level's rate is the share of the last `window` cycles
    that accepted it; for undrafted levels the known rates are extrapolated geometrically. It chooses anew
    every `interval` cycles if all drafted levels have full windows; after a step down, the windows above restart.
    """

    window: int = 20
    interval: int = 10

    kinds = (PLAN,)

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(
            self.window >= 1 and self.interval >= 1,
            "window and interval must be 1 or more",
            self.window,
        )
        self.levels, self._seen = self.candidates[self.check_candidates(least=1)], 0
        self._accepted: list[deque[float]] = [
            deque(maxlen=self.window) for _ in range(self.candidates[-1])
        ]

    def rates(self, levels: int) -> list[float] | None:
        """Acceptance rate of each of so many levels, known or extrapolated; None if nothing is known."""
        rates: list[float] = []
        for accepted in self._accepted[:levels]:
            if accepted:
                rates.append(sum(accepted) / len(accepted))
            elif len(rates) == 1:
                rates.append(rates[0])
            elif not rates or not rates[0]:
                return None
            else:
                rates.append(rates[-1] * (rates[-1] / rates[0]) ** (1 / (len(rates) - 1)))
        return rates

    def answer(self, question: Question) -> TreeConfig:
        full = all(len(accepted) == self.window for accepted in self._accepted[: self.levels])
        if full and self._seen % self.interval == 0:
            known = {n: rates for n in self.candidates if (rates := self.rates(n)) is not None}
            scores = {
                n: (1 + sum(rates)) / self.cycle_ms(n, question.context_tok)
                for n, rates in known.items()
            }
            levels = max(scores, key=scores.__getitem__, default=self.levels)
            for accepted in self._accepted[levels : self.levels]:
                accepted.clear()
            self.levels = levels
        return self.trees[self.levels]

    def observe(self, cycle: Cycle) -> None:
        for level, accepted in enumerate(self._accepted[: self.levels]):
            accepted.append(float(cycle.accepted_tok > level))
        self._seen += 1


@dataclass
class VllmAdaptiveK(Priced):
    """`vllm_adaptive_k`: the number of levels K with the most expected tokens for the time of a cycle.

        goodput(K) = (1 + a_1 + a_1 a_2 + ... + a_1 ... a_K) / (1 + K c_draft + overhead)

    Source: vLLM, pull requests 44336 (closed) and 47111 (open), with their constants; the divisor here is the cycle's time
    over a plain step's. a_j, the acceptance rate of level j once it is reached, is counted over `period` cycles and
    then enters a moving average; untried levels have the prior. With probability `explore` all levels are drafted. K changes
    by at most one level at a time, and then not again for `cooldown` cycles.
    """

    most_levels: int = 5
    least: int = 0
    alpha: float = 0.3
    prior: float = 0.85
    period: int = 10
    explore: float = 0.1
    cooldown: int = 2
    seed: int = 0

    kinds = (PLAN,)

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(
            0 <= self.least <= self.most_levels,
            f"least must lie from 0 to {self.most_levels}",
            self.least,
        )
        demand(
            0 <= self.explore <= 1 and 0 < self.alpha <= 1,
            "explore and alpha are shares",
            self.explore,
            self.alpha,
        )
        self.levels, self._waiting, self._random = self.most_levels, 0, random.Random(self.seed)
        self.rates: list[float] = [self.prior] * self.most_levels
        self._begin()

    def _begin(self) -> None:
        self._seen, self._reached, self._accepted = (
            0,
            [0] * self.most_levels,
            [0] * self.most_levels,
        )

    def answer(self, question: Question) -> TreeConfig:
        if self._random.random() < self.explore:
            return self.trees[-1]
        expected = np.cumsum(np.cumprod([1.0, *self.rates]))
        goodput = [
            expected[n] / self.cycle_ms(n, question.context_tok)
            for n in range(self.least, self.most_levels + 1)
        ]
        best = self.least + int(np.argmax(goodput))
        if self._waiting:
            self._waiting -= 1
        elif abs(best - self.levels) > 1:
            self.levels, self._waiting = best, self.cooldown
        return self.trees[self.levels]

    def observe(self, cycle: Cycle) -> None:
        for level in range(min(cycle.draft_calls, cycle.accepted_tok + 1)):
            self._reached[level] += 1
            self._accepted[level] += cycle.accepted_tok > level
        self._seen += 1
        if self._seen == self.period:
            for level, (accepted, reached) in enumerate(
                zip(self._accepted, self._reached, strict=True)
            ):
                if reached:
                    self.rates[level] += self.alpha * (accepted / reached - self.rates[level])
            self._begin()


@dataclass
class HfHeuristic(Levels):
    """`hf_heuristic`: two levels more after a cycle in which all were accepted, else one less, at least one.

    Source: transformers, AssistedCandidateGenerator.update_candidate_strategy, schedule "heuristic". `start` was its
    num_assistant_tokens while that schedule was the default; 5.x has 20 and a constant schedule.
    transient: every text starts with `start` again (schedule "heuristic_transient").
    """

    start: int = 5
    more: int = 2
    less: int = 1
    transient: bool = False

    kinds = (PLAN,)

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(
            self.start >= 1 and self.more >= 0 and self.less >= 0,
            "start must be at least 1",
            self.start,
        )
        self.wanted = self.start

    @property
    def remembers(self) -> bool:
        return not self.transient

    def reset(self) -> None:
        if self.transient:
            self.wanted = self.start

    def answer(self, question: Question) -> TreeConfig:
        return self.trees[
            min(self.wanted, self.most_levels)
        ]  # engines also draft only as far as there is room

    def observe(self, cycle: Cycle) -> None:
        all_of_them = cycle.accepted_tok == cycle.draft_calls
        self.wanted = self.wanted + self.more if all_of_them else max(1, self.wanted - self.less)


@dataclass
class TrtllmGate(Levels):
    """`trtllm_gate`: stops drafting permanently once the mean acceptance rate of a full window is below a threshold.

    Source: TensorRT-LLM, SpeculationGate in _torch/speculative/speculation_gate.py. It ships no values: window, threshold
    and levels are ours. The rate of a cycle is accepted tokens over drafted levels.
    """

    levels: int = 3
    window: int = 20
    threshold: float = 0.3

    kinds = (PLAN,)

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(
            1 <= self.levels <= self.most_levels,
            f"levels must lie from 1 to {self.most_levels}",
            self.levels,
        )
        demand(
            self.window >= 1 and 0 <= self.threshold <= 1,
            "window is 1 or more, threshold a share",
            self.threshold,
        )
        self.closed = False
        self._rates: deque[float] = deque(maxlen=self.window)

    def answer(self, question: Question) -> TreeConfig:
        return self.trees[0 if self.closed else self.levels]

    def observe(self, cycle: Cycle) -> None:
        self._rates.append(cycle.accepted_tok / max(1, cycle.draft_calls))
        self.closed |= (
            len(self._rates) == self.window and sum(self._rates) / self.window < self.threshold
        )


@dataclass
class LlamacppPMin(Levels):
    """`llamacpp_p_min`: draft until a token is less likely than p_min.

    Source: llama.cpp, common/speculative.cpp: p_min 0.75 (0 in the newest), n_max 16, n_min 0. The unlikely token itself is
    not verified; keeps=True verifies it, as llama.cpp did until 2026, and as transformers does (`hf_confidence`: 0.4).
    least: shorter drafts are not verified at all.
    In a tree, the probability of a level is that of the best path over that of the best path before; all nodes stay.
    """

    most_levels: int = 16
    p_min: float = 0.75
    least: int = 0
    keeps: bool = False

    kinds = (EXTEND, SIZE)

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(0 <= self.p_min <= 1, "p_min must lie from 0 to 1", self.p_min)

    def unlikely(self, question: Question) -> bool:
        """Whether the level drafted last is unlikely: how much the best path's probability fell with it."""
        scores = as_array(question.scores)
        start = (
            0
            if question.expansions == 0
            else pool_size(question.expansions - 1, self.top_k, self.beam)
        )
        before = (
            0
            if question.expansions < 2
            else pool_size(question.expansions - 2, self.top_k, self.beam)
        )
        parent = float(scores[before:start].max()) if start else 0.0
        return math.exp(float(scores[start:].max()) - parent) < self.p_min

    def answer(self, question: Question) -> Any:
        if question.kind == EXTEND:
            return not self.unlikely(question)
        levels = question.expansions + 1
        if self.top_k > 1:
            return min(question.largest, self.trees[levels].verify_nodes)
        wanted = levels - (not self.keeps and self.unlikely(question))
        return wanted if wanted >= self.least else 0


@dataclass
class LlamacppEv(Priced):
    """`llamacpp_ev`: draft and verify while the product of probabilities exceeds the cost of one more verified token.

    Source: llama.cpp, pull request 17034 (open): costs by batch size relative to a plain step. The cost of drafting is ignored
    there, and here. look_ahead: levels to draft on for a size whose next token is cheaper.
    In a tree, nodes count in the order of their paths' probabilities.
    """

    most_levels: int = 16
    look_ahead: int = 0

    kinds = (EXTEND, SIZE)

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(self.look_ahead >= 0, "look_ahead must be 0 or more", self.look_ahead)

    def marginal(self, context_tok: int) -> np.ndarray:
        """Marginal cost of the 1st, 2nd, ... verified node, in plain steps."""
        return np.diff(self._tables[0] + self._tables[1] * context_tok) / self.plain_ms(context_tok)

    def worth(self, question: Question) -> int:
        """The largest number of nodes whose last one is worth its cost."""
        chances = np.sort(np.exp(as_array(question.scores)))[::-1]
        prices = self.marginal(question.context_tok)[: len(chances)]
        paying = np.flatnonzero(chances[: len(prices)] > prices)
        return int(paying[-1]) + 1 if len(paying) else 0

    def answer(self, question: Question) -> Any:
        if question.kind == SIZE:
            return min(self.worth(question), question.largest)
        best, scores = float(question.newest_scores.max()), as_array(question.scores)
        place = int(
            (scores[: len(scores) - len(question.newest_scores)] >= best).sum()
        )  # better nodes on other levels
        prices = self.marginal(question.context_tok)[place : place + 1 + self.look_ahead]
        return bool(len(prices) and math.exp(best) > prices.min())


@dataclass
class SglangDraftProb(Priced):
    """`sglang_draft_prob`: always draft `levels`; verify the number of nodes with the most expected tokens per millisecond.

    Source: SGLang, pull request 28045's DraftProbAdaptiveController, fixed_draft_steps 5: a drafted token is weighted by the
    product of the drafter's probabilities down to it, (1 + p_1 + p_1 p_2 + ...) / cost(k). least: minimum of nodes.
    """

    levels: int = 5
    least: int = 1

    kinds = (SIZE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(
            1 <= self.levels <= self.most_levels,
            f"levels must lie from 1 to {self.most_levels}",
            self.levels,
        )
        self.plan = self.limits = self.trees[self.levels]

    def survivals(self, question: Question) -> np.ndarray:
        """Probability of each candidate to be accepted, [candidates]."""
        return np.exp(as_array(question.scores))

    def answer(self, question: Question) -> int:
        order = np.argsort(-as_array(question.scores), kind="stable")[
            : question.largest
        ]  # nodes are taken by score
        expected = 1 + np.concatenate(([0.0], np.cumsum(self.survivals(question)[order])))
        spent_ms = self.sizes_ms(question.expansions + 1, question.context_tok)[: len(expected)]
        return self.least + int((expected / spent_ms)[self.least :].argmax())


@dataclass
class VllmAdaptiveVerification(SglangDraftProb):
    """`vllm_adaptive_verification`: the same choice with other estimates of acceptance.

    Source: vLLM 0.32, page "Adaptive verification", after DSpark (arXiv 2607.05147): drafted slots are admitted by survival,
    the running product of acceptance estimates, up to the budget of the most expected tokens per second.
    confidence: "position" estimates a level's acceptance from earlier acceptance at that level, as in vLLM for drafters
    without a confidence head (chains only; weight and prior are ours). "probability" uses the drafter's own
    probabilities, each with its level's temperature, as DSpark calibrates its confidences: sigmoid(logit / temperature).
    """

    levels: int = 7
    least: int = 0
    confidence: str = "position"
    temperatures: tuple[float, ...] = ()
    alpha: float = 0.1
    prior: float = 0.85

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (
            self.confidence == "probability" or self.confidence == "position" and self.top_k == 1
        )
        demand(known, "confidence is 'probability', or for chains 'position'", self.confidence)
        demand(
            all(t > 0 for t in self.temperatures), "temperatures must be above 0", self.temperatures
        )
        self.rates = [self.prior] * self.levels

    def survivals(self, question: Question) -> np.ndarray:
        if self.confidence == "position":
            return np.cumprod(self.rates[: question.expansions + 1])
        return calibrated(as_array(question.scores), question.plan, self.temperatures)

    def observe(self, cycle: Cycle) -> None:
        """Count the levels that were verified and reached; a level that was cut off gives no information."""
        if self.confidence == "position":
            for level in range(min(cycle.verify_nodes, cycle.accepted_tok + 1)):
                self.rates[level] += self.alpha * ((cycle.accepted_tok > level) - self.rates[level])


@dataclass
class VllmLogistic(SglangDraftProb):
    """`vllm_logistic`: the same choice, with a logistic estimate of acceptance that is fitted while decoding.

        p_k = sigmoid(slope * logit(q) + b_k),  q the drafter's probability of its likeliest token at position k

    Source: vLLM, pull request 52228 (merged, August 2026), OnlineAcceptanceEstimator: slope 0 and b 1.5 at first; every 100 cycles
    one Newton step from those cycles alone, with ridge 1e-3, each number damped by n / (n + 50) of its n graded tokens; whole
    drafts are verified until the third fit. A negative slope is not taken (from an earlier version). Chains only.
    """

    levels: int = 7
    least: int = 0
    interval: int = 100
    warmup_fits: int = 3
    damping: float = 50.0
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(
            self.top_k == 1 and self.interval >= 1,
            "vllm_logistic drafts chains: top_k must be 1",
            self.top_k,
        )
        self.coefficients = np.array([0.0] + [1.5] * self.levels)
        self.fits, self._features = 0, np.zeros(0)
        self._begin()

    def _begin(self) -> None:
        size = len(self.coefficients)
        self._information, self._gradient = np.zeros((size, size)), np.zeros(size)
        self._seen, self._counts = 0, np.zeros(size)

    def chances(self, features: np.ndarray) -> np.ndarray:
        """Probability of each position to be accepted once it is reached."""
        logits: np.ndarray = (
            self.coefficients[0] * features + self.coefficients[1 : len(features) + 1]
        )
        return 0.5 * (1 + np.tanh(0.5 * logits))

    def survivals(self, question: Question) -> np.ndarray:
        return np.cumprod(self.chances(self._features))

    def answer(self, question: Question) -> int:
        steps = np.minimum(np.diff(as_array(question.scores).astype(float), prepend=0.0), -1e-17)
        self._features = np.clip(steps - np.log(-np.expm1(steps)), -40.0, 40.0)
        return super().answer(question) if self.fits >= self.warmup_fits else int(question.largest)

    def observe(self, cycle: Cycle) -> None:
        graded = min(cycle.verify_nodes, cycle.accepted_tok + 1, len(self._features))
        for level, chance in enumerate(self.chances(self._features)[:graded]):
            row = np.zeros(len(self.coefficients))
            row[[0, level + 1]] = self._features[level], 1.0
            self._information += chance * (1 - chance) * np.outer(row, row)
            self._gradient += (float(cycle.accepted_tok > level) - chance) * row
            self._counts[[0, level + 1]] += 1
        self._seen += 1
        if self._seen == self.interval:
            moved = np.linalg.solve(
                self._information + self.ridge * np.eye(len(self._gradient)), self._gradient
            )
            moved *= self._counts / (self._counts + self.damping)
            moved[0] = moved[0] if self.coefficients[0] + moved[0] >= 0 else 0.0
            self.coefficients, self.fits = self.coefficients + moved, self.fits + 1
            self._begin()


def calibrated(scores: np.ndarray, plan: Plan, temperatures: tuple[float, ...]) -> np.ndarray:
    """Path probabilities [..., pool] from cumulative log-probabilities `scores`, each step at its level's temperature.

    temperatures: of the first levels; 1 for all below.
    """
    top_k, start = plan.top_k, 0
    levels: list[np.ndarray] = []
    before, survival = np.zeros((*scores.shape[:-1], 1)), np.ones((*scores.shape[:-1], 1))
    while start < scores.shape[-1]:
        width = before.shape[-1]
        newest = (
            scores[..., start : start + width * top_k].astype(float).reshape(*before.shape, top_k)
        )
        steps = np.minimum(newest - before[..., None], -1e-7)
        temperature = temperatures[len(levels)] if len(levels) < len(temperatures) else 1.0
        logits = (steps - np.log(-np.expm1(steps))) / temperature
        chances = (survival[..., None] * 0.5 * (1 + np.tanh(0.5 * logits))).reshape(
            *before.shape[:-1], -1
        )
        flat = newest.reshape(chances.shape)
        levels.append(chances)
        start += width * top_k
        best = np.argsort(-flat, axis=-1, kind="stable")[..., : plan.beam_at(len(levels) - 1)]
        before, survival = np.take_along_axis(flat, best, -1), np.take_along_axis(chances, best, -1)
    return np.concatenate(levels, axis=-1)


@dataclass
class _Bandit(Levels):
    """Arms are numbers of levels; a cycle's reward is its tokens per second. Every text starts anew (BanditSpec)."""

    arms: tuple[int, ...] = (1, 2, 3, 4)
    per_text: bool = True

    kinds = (PLAN,)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.arms and all(0 <= arm <= self.most_levels for arm in self.arms)
        demand(fits, f"arms must be whole numbers from 0 to {self.most_levels}", self.arms)
        self.begin()

    def begin(self) -> None:
        """Reset."""
        raise NotImplementedError

    def choose(self) -> int:
        """Index of the next arm."""
        raise NotImplementedError

    def learn(self, reward: float) -> None:
        """Record the reward of that arm."""
        raise NotImplementedError

    @property
    def remembers(self) -> bool:
        return not self.per_text

    def reset(self) -> None:
        if self.per_text:
            self.begin()

    def answer(self, question: Question) -> TreeConfig:
        self.arm = self.choose()
        return self.trees[self.arms[self.arm]]

    def observe(self, cycle: Cycle) -> None:
        self.learn(1e3 * cycle.new_tok / max(cycle.total_ms, 1e-9))


@dataclass
class Ucb(_Bandit):
    """`ucb`: the arm with the largest mean reward + weight * sqrt(log(cycles) / its pulls), after `warmup` pulls of each.

    Source: BanditSpec (arXiv 2505.15141) and its code: arms 1 to 4, weight 6 tokens per second, 2 pulls each. Its code
    divides by the pulls of all arms together, which adds the same to each; here by the arm's own, as in its paper.
    """

    weight: float = 6.0
    warmup: int = 2

    def begin(self) -> None:
        self.pulls, self.means = [0] * len(self.arms), [0.0] * len(self.arms)

    def choose(self) -> int:
        fewest = min(range(len(self.arms)), key=self.pulls.__getitem__)
        if self.pulls[fewest] < max(1, self.warmup):
            return fewest
        log, arms = math.log(sum(self.pulls)), zip(self.means, self.pulls, strict=True)
        bounds = [mean + self.weight * math.sqrt(log / pulls) for mean, pulls in arms]
        return bounds.index(max(bounds))

    def learn(self, reward: float) -> None:
        self.pulls[self.arm] += 1
        self.means[self.arm] += (reward - self.means[self.arm]) / self.pulls[self.arm]


@dataclass
class Exp3(_Bandit):
    """`exp3`: arms are drawn with exponential weights of their rewards.

    Source: Auer, Cesa-Bianchi, Freund and Schapire (2002), after BanditSpec's EXP3Spec. Rewards are divided by the
    largest so far, and `mixing`, the share of uniform draws, is 0.1: both ours.
    """

    mixing: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        demand(0 < self.mixing <= 1, "mixing must lie in (0, 1]", self.mixing)
        self._random = random.Random(self.seed)
        super().__post_init__()

    def begin(self) -> None:
        self.logs, self.largest = [0.0] * len(self.arms), 0.0

    def chances(self) -> list[float]:
        """Probability of each arm to be drawn."""
        weights = [math.exp(log - max(self.logs)) for log in self.logs]
        total, count = sum(weights), len(weights)
        return [(1 - self.mixing) * weight / total + self.mixing / count for weight in weights]

    def choose(self) -> int:
        self._drawn = self.chances()
        return self._random.choices(range(len(self.arms)), self._drawn)[0]

    def learn(self, reward: float) -> None:
        self.largest = max(self.largest, reward)
        self.logs[self.arm] += (
            self.mixing * reward / self.largest / self._drawn[self.arm] / len(self.arms)
        )


NAMES = {
    "sglang_ema": SglangEma,
    "sglang_throughput": SglangThroughput,
    "sglang_draft_prob": SglangDraftProb,
    "vllm_adaptive_verification": VllmAdaptiveVerification,
    "vllm_adaptive_k": VllmAdaptiveK,
    "llamacpp_ev": LlamacppEv,
    "llamacpp_p_min": LlamacppPMin,
    "hf_heuristic": HfHeuristic,
    "trtllm_gate": TrtllmGate,
    "ucb": Ucb,
    "exp3": Exp3,
    "vllm_logistic": VllmLogistic,
}


def rule(name: str, costs: Any = None, **settings: Any) -> Levels:
    """An engine's rule by its name in NAMES, or "hf_confidence"; rules that need times take those of `costs`.

    >>> rule("hf_heuristic", most_levels=8).wanted
    5
    """
    if name == "hf_confidence":
        name, settings = (
            "llamacpp_p_min",
            {"p_min": 0.4, "keeps": True, "most_levels": 20, **settings},
        )
    kind = NAMES[check_name("engine's rule", name, [*NAMES, "hf_confidence"])]
    for setting in settings:
        check_name(
            f"setting of {name}", setting, {field.name for field in dataclasses.fields(kind)}
        )
    made = kind(**settings)
    return made.price(costs) if isinstance(made, Priced) and costs is not None else made


def shipped(name: str, levels: int, costs: Any = None) -> Levels:
    """An engine's rule with its own constants, on no more levels than were recorded."""
    ships = rule(name).settings()
    cut: dict[str, Any] = {
        key: min(ships[key], levels) for key in ("most_levels", "levels") if key in ships
    }
    if "candidates" in ships:
        cut["candidates"] = tuple(step for step in ships["candidates"] if step <= levels)
    return rule(name, costs, **cut)


def unpriced(name: str) -> Levels:
    """A rule with its engine's defaults; SpecdecError for rules that need a cost model."""
    if issubclass(NAMES[name], Priced):
        how = f"make it with policies.engines.rule({name!r}, costs), or save it and give the folder"
        raise SpecdecError(f"{name} needs costs: {how}.")
    return rule(name)
