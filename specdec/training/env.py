"""Decoding as PPO's environment, live or replayed: texts, rewards, and transitions."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from specdec.core.cycle import cycle
from specdec.core.engine import LiveEngine
from specdec.core.policy import Chain
from specdec.core.protocols import at_once
from specdec.core.records import Cycle
from specdec.core.verification import Picker
from specdec.errors import SpecdecError, check_fields, check_name, check_number
from specdec.policies.base import Learned
from specdec.replays.replay import ReplayEngine

LAPS = ("draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms")
# The kinds of rewards and their units of time: seconds in Re-SpS (1.4), 10 ms in LTD (1.5).
UNITS_MS = {"mean_of_ratios": 1e3, "ratio_of_sums": 1e3}
UNITS_MS |= dict.fromkeys(("throughput", "accepted", "time_cost", "lagrangian"), 10.0)
# Cycles without a decision after which a training gives up. Every system decides in every turn, and
# turns of many recordings have less than a hundred cycles.
MOST_UNDECIDED = 2000


@dataclass(frozen=True)
class Reward:
    """The reward of a decision, from the cycles that finished before the next one.

    kind: a name of UNITS_MS. Of kept_tok / time, the papers' E[L / T], there are three:
    "throughput", "ratio_of_sums" and "mean_of_ratios" of the cycles. "lagrangian", kept_tok -
    rate * time, maximises E[L] / E[T] when rate is the throughput reached. "accepted" is kept_tok,
    "time_cost" is -time.
    """

    kind: str = "throughput"
    laps: tuple[str, ...] = LAPS  # the parts of a cycle that count as time
    rate: float = 0.0  # tokens per unit, for "lagrangian"

    def __post_init__(self):
        check_fields(self)
        check_name("reward", self.kind, UNITS_MS)

    def time(self, rows: list[Cycle]) -> float:
        """The time of `rows` in the kind's unit."""
        return sum(getattr(row, lap) for row in rows for lap in self.laps) / UNITS_MS[self.kind]

    def __call__(self, rows: list[Cycle]) -> float:
        """The reward for `rows`; 0 while none has finished."""
        if not rows:
            return 0.0
        if self.kind == "mean_of_ratios" and len(rows) > 1:
            return sum(self([row]) for row in rows) / len(rows)
        tokens = sum(row.kept_tok for row in rows)
        if self.kind == "accepted":
            return float(tokens)
        if self.kind == "time_cost":
            return -self.time(rows)
        if self.kind == "lagrangian":
            return tokens - self.rate * self.time(rows)
        return tokens / max(self.time(rows), 1e-9)


class ReplaySource:
    """Turns of a recording in random order. next(random) opens one and returns its engine."""

    def __init__(self, trace, costs, policy_ms: float = 0.0):
        costs.check_machine()
        self.trace = trace
        self.costs = costs
        self.policy_ms = check_number("policy_ms", policy_ms)
        self._engine: ReplayEngine | None = None
        self._open_turns = np.flatnonzero(trace.turns["positions"].to_numpy() > 0)

    def next(self, random: np.random.Generator, limits) -> ReplayEngine:
        if self._engine is None:
            self._engine = ReplayEngine(self.trace, self.costs, limits, self.policy_ms)
        self._engine.open(int(random.choice(self._open_turns)))
        return self._engine

    def priced(self, row: Cycle) -> Cycle:
        """Unchanged: the cost model set the times."""
        return row

    def close(self) -> None:
        """Nothing to release."""


class LiveSource:
    """Prompts decoded greedily by a pair in random order; it stays in `inference` until `close`.

    policy_ms: time counted for an answer, since the measured time would include the trainer.
    """

    def __init__(self, pair, prompts: list, max_new_tokens: int = 128, policy_ms: float = 0.0):
        assert prompts, "a live environment needs a prompt"
        self.policy_ms = check_number("policy_ms", policy_ms)
        self.pair = pair
        self.prompts = [pair.ids_of(prompt) for prompt in prompts]
        self.max_new_tokens = max_new_tokens
        self._inference = None

    def next(self, random: np.random.Generator, limits) -> LiveEngine:
        if self._inference is None:
            self._inference = self.pair.inference()
            self._inference.__enter__()
        ids = self.prompts[int(random.integers(len(self.prompts)))]
        prompt = torch.tensor(ids, device=self.pair.target.device)
        picker = Picker.from_settings(0.0, 0)
        stops = tuple(self.pair.stop_tokens)
        engine = LiveEngine(self.pair, prompt, self.max_new_tokens, limits, picker, stops)
        engine.prefill()
        return engine

    def priced(self, row: Cycle) -> Cycle:
        """The cycle, with the fixed time per answer."""
        policy_ms = self.policy_ms * row.questions
        total_ms = row.total_ms - row.policy_ms + policy_ms
        return dataclasses.replace(row, policy_ms=policy_ms, total_ms=total_ms)

    def close(self) -> None:
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
        self._inference = None


# The transitions (observation, cycles, whether the episode ends) of a decision, from (observation,
# rows, before, first, ended). rows: the cycles of its turn that finished since. before: those
# before the turn's first decision (a fixed first tree), unknown, and empty, in the first turn of a
# segment. first: whether it was that decision. ended: whether the turn ended with it.
Credit = Callable[..., list[tuple[np.ndarray, list[Cycle], bool]]]


@dataclass(frozen=True)
class Task:
    """A policy's training task.

    source: with a LiveSource envs=1, and times are not reproducible. reward: "lagrangian" is
    charged at the throughput of recent rollouts (Dinkelbach's iteration), at least reward.rate.
    episode: "cycle" ends with each cycle (LTD), "interval" with each decision (Re-SpS: a bandit),
    "turn" with the text. others: a policy that answers the other kinds of question, or
    others(seed) -> policy. credit: by default one transition per decision. reseed_each_turn: each
    draws the same numbers.
    """

    source: ReplaySource | LiveSource
    reward: Reward = Reward()  # noqa: RUF009  frozen
    episode: str = "cycle"
    others: object = None
    credit: Credit | None = None
    reseed_each_turn: bool = False


class Environment:
    """Texts in which the learner decides its kind of question, and the transitions it makes.

    It always stands at a question of the learner's, seen as `observation`; frozen policies answer
    the rest. A text continues over the end of an episode. seed: of texts and actions. each_turn:
    seed of the actions of every turn, or None for continuing draws.
    """

    def __init__(self, learner: Learned, task: Task, seed: int, each_turn: int | None = None):
        # 1. policies and source of its own
        self.task = task
        self.learner = copy.deepcopy(learner)
        others = task.others(seed) if callable(task.others) else copy.deepcopy(task.others)
        partners = () if others is None else (others,)
        self._policy = Chain(self.learner, *partners)
        self._source = copy.copy(task.source)
        # 2. random numbers of texts and of actions
        self.each_turn = each_turn
        self._texts = np.random.default_rng(seed)
        self._random = np.random.default_rng(seed if each_turn is None else each_turn)
        # 3. transitions (action, observation, cycles, whether an episode begins) that wait for room
        self.pending: deque = deque()
        self.filled = 0  # rows of its column in the buffer
        self._starts = True  # whether the next transition begins an episode
        self._before: list[Cycle] = []
        self._first = True
        # 4. the first question
        self._open_turn()
        self._advance(None)

    def draw(self, logits: np.ndarray) -> int:
        """An action from softmax(logits), by the Gumbel trick."""
        return int((logits + self._random.gumbel(size=logits.shape)).argmax())

    def step(self, action: int) -> list[Cycle]:
        """Answer the question and queue the transitions. Returns the finished cycles."""
        observation = self.observation
        cycles, ended = self._advance(self.learner.meaning(action, self._question))
        # 1. later cycles belong to another turn, and undecided turns to no decision
        rows = cycles
        if ended:
            rest = itertools.takewhile(lambda row: row.cycle > 0, cycles[1:])
            rows = [*cycles[:1], *rest]
        # 2. transitions; an episode never continues into another turn
        over = {"cycle": bool(cycles), "interval": True, "turn": ended}[self.task.episode]
        transitions = [(observation, rows, over)]
        if self.task.credit is not None:
            transitions = self.task.credit(observation, rows, self._before, self._first, ended)
        for state, of_state, done in transitions:
            self.pending.append((action, state, of_state, self._starts))
            self._starts = done
        if ended:
            self._starts = True
            if self.each_turn is not None:
                self._random = np.random.default_rng(self.each_turn)
        # 3. the cycles of the new turn that precede its first decision
        self._before = []
        for row in cycles[len(rows) :]:
            if row.cycle == 0:
                self._before = []
            self._before.append(row)
        self._first = ended
        return cycles

    @property
    def following(self) -> tuple[np.ndarray, bool]:
        """The observation after those in the buffer, and whether an episode begins with it."""
        if not self.pending:
            return self.observation, self._starts
        _, observation, _, starts = self.pending[0]
        return observation, starts

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._source.close()

    def _open_turn(self) -> None:
        self._steps = None  # of the cycle that has begun
        self._engine = None
        while self._engine is None or self._engine.finished:
            self._engine = self._source.next(self._texts, self._policy.limits)
            self._policy.reset()

    def _advance(self, answer) -> tuple[list[Cycle], bool]:
        """Answer, run to the learner's next question: (finished cycles, whether a turn ended)."""
        rows: list[Cycle] = []
        ended = False
        while len(rows) < MOST_UNDECIDED:
            # 1. to the cycle's next question, or its end
            try:
                if self._steps is None:
                    self._steps = at_once(cycle(self._engine, self._policy.asks, self._policy.plan))
                    answer = None  # a generator starts with None
                question = self._steps.send(answer)
            except StopIteration as finished:
                row = self._source.priced(finished.value)
                rows.append(row)
                self._steps = None
                self._policy.observe(row)
                if self._engine.finished:
                    ended = True
                    self._open_turn()
                continue
            # 2. the answer: of a partner, of the learner now, or of its fixed rule
            if question.kind not in self.learner.asks:
                answer = self._policy.answer(question)
            elif self.learner.decides(question):
                self._question = question
                # a copy: builders reuse buffers
                self.observation = np.array(self.learner.observation(question), np.float32)
                return rows, ended
            else:
                answer = self.learner.otherwise(question)
        why = f"this {type(self.learner).__name__} was never asked in {len(rows)} cycles"
        raise SpecdecError(f"{why}, so it cannot learn; let it draft deeper or use longer turns.")
