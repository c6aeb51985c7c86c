"""The cycle as a gymnasium environment, live or replayed.

It runs `cycle.cycle` to the next question that the learner decides, returns the learner's own
observation, and turns the action into the learner's answer. Frozen policies answer the rest.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch

from specdec.core.cycle import begin_turn, cycle
from specdec.core.engine import LiveEngine
from specdec.core.policy import Policy, largest
from specdec.core.protocols import at_once
from specdec.core.records import Cycle
from specdec.core.verification import Picker
from specdec.errors import SpecdecError, check_fields, check_name, check_number
from specdec.policies.base import Learned
from specdec.replays.replay import ReplayEngine

LAPS = ("draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms")
# Cycles without a decision after which a training gives up. Every system decides in every turn, and
# turns of many recordings have less than a hundred cycles.
MOST_UNDECIDED = 2000


@dataclass(frozen=True)
class Reward:
    """The reward of a decision, from the cycles that finished before the next one.

    kind: "ratio" (kept_tok / time: the papers' E[L / T]), "lagrangian" (kept_tok - rate * time:
    maximises E[L] / E[T] when rate is the throughput reached), "accepted" (kept_tok) or "time"
    (-time).
    """

    kind: str = "ratio"
    mean: bool = False  # average the cycles' own rewards (Re-SpS Eq. 5)
    laps: tuple[str, ...] = LAPS  # the parts of a cycle that count as time
    unit_ms: float = 10.0  # of time
    rate: float = 0.0  # tokens per unit, for "lagrangian"

    def __post_init__(self):
        check_fields(self, unit_ms=(1e-9, math.inf))
        check_name("reward", self.kind, ("ratio", "lagrangian", "accepted", "time"))

    def __call__(self, rows: list[Cycle]) -> float:
        """The reward for `rows`; 0 while none has finished."""
        if not rows:
            return 0.0
        if self.mean and len(rows) > 1:
            return sum(self([row]) for row in rows) / len(rows)
        tokens = sum(row.kept_tok for row in rows)
        if self.kind == "accepted":
            return float(tokens)
        time = sum(getattr(row, lap) for row in rows for lap in self.laps) / self.unit_ms
        if self.kind == "ratio":
            return tokens / max(time, 1e-9)
        return -time if self.kind == "time" else tokens - self.rate * time


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


class Env(gymnasium.Env):
    """Observations float32 [learner.observation_size], actions Discrete(learner.actions).

    learner: decides its kind of question; its network is not used here. others: a policy that
    answers the other kinds, or None. episode: "cycle" ends with each cycle (LTD), "interval" with
    each decision (Re-SpS: a bandit), "turn" with the text. The text continues over the end of an
    episode; a new turn begins only when the old one has ended. SpecdecError if the learner is
    never asked.
    """

    metadata: dict = {"render_modes": []}

    def __init__(
        self, learner: Learned, source, others: Policy | None = None, reward=None, episode="cycle"
    ):
        self.learner = learner
        self.others = others
        self.source = source
        self.reward = reward or Reward()
        self.episode = episode
        size = (learner.observation_size,)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, size, np.float32)
        self.action_space = gymnasium.spaces.Discrete(learner.actions)
        self._policies = [learner] if others is None else [learner, others]
        self.limits = largest([policy.limits for policy in self._policies])
        self._asks = frozenset().union(*(policy.asks for policy in self._policies))
        self._engine = None
        self._steps = None  # of the cycle that has begun
        self._question = None

    def reset(self, *, seed: int | None = None, options=None):
        """Advance to the next decision, in another text with a seed. Returns (observation, {})."""
        super().reset(seed=seed)
        if seed is not None or self._engine is None:
            # otherwise the text continues over the end of an episode
            self._open_turn()
            self._advance(None)
        return self._observe(), {}

    def step(self, action):
        """Answer the question. info: `cycles`, the rows that finished since, and `turn_ended`."""
        rows, ended = self._advance(self.learner.meaning(int(action), self._question))
        terminated = {"cycle": bool(rows), "interval": True, "turn": ended}[self.episode]
        info = {"cycles": rows, "turn_ended": ended}
        return self._observe(), self.reward(rows), terminated, False, info

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self.source.close()

    def _open_turn(self) -> None:
        self._steps = None
        self._engine = None
        while self._engine is None or self._engine.finished:
            self._engine = self.source.next(self.np_random, self.limits)
            for policy in self._policies:
                begin_turn(policy)

    def _advance(self, answer) -> tuple[list[Cycle], bool]:
        """Answer, run to the learner's next question: (finished cycles, whether a turn ended)."""
        rows: list[Cycle] = []
        ended = False
        while len(rows) < MOST_UNDECIDED:
            # 1. to the cycle's next question, or its end
            try:
                if self._steps is None:
                    self._steps = at_once(cycle(self._engine, self._asks, self.learner.plan))
                    answer = None  # a generator starts with None
                question = self._steps.send(answer)
            except StopIteration as finished:
                row = self.source.priced(finished.value)
                rows.append(row)
                self._steps = None
                for policy in self._policies:
                    policy.observe(row)
                if self._engine.finished:
                    ended = True
                    self._open_turn()
                continue
            # 2. the answer: of a partner, of the learner now, or of its fixed rule
            if question.kind not in self.learner.asks:
                answer = self.others.answer(question)
            elif self.learner.decides(question):
                self._question = question
                return rows, ended
            else:
                answer = self.learner.otherwise(question)
        why = f"this {type(self.learner).__name__} was never asked in {len(rows)} cycles"
        raise SpecdecError(f"{why}, so it cannot learn; let it draft deeper or use longer turns.")

    def _observe(self) -> np.ndarray:
        # a copy: builders reuse buffers
        return np.array(self.learner.observation(self._question), dtype=np.float32)
