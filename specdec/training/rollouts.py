"""Experience for PPO: environments answered side by side, every decision credited with the cycles it led to.

All chance comes from (seed, segment): a segment opens fresh environments on fresh turns. What it collects depends on
nothing but the weights and these two numbers, so a run that resumes at a segment's start repeats it exactly.
Knows nothing about updates, files or the systems.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from specdec.core.records import EXTEND, PLAN, SIZE, Cycle
from specdec.errors import SpecdecError
from specdec.training.env import Env, Reward

PATIENCE = 500  # decisions without a transition before training gives up
# What of a finished cycle a learner of each kind has decided.
DECIDED = {PLAN: ("verify_nodes", "expansions", "top_k"), EXTEND: ("expansions",), SIZE: ("verify_nodes",)}


@dataclass(frozen=True)
class Outcome:
    """What one decision led to. rows: the finished cycles of its own turn. before: cycles of this turn before its first
    decision (a fixed first tree), given to that decision alone; unknown, and empty, in the first turn of a segment.
    first: it is the turn's first decision. ended: the turn ended with it."""

    observation: np.ndarray
    rows: list[Cycle]
    before: list[Cycle]
    first: bool
    ended: bool


# (observation, the cycles that count, whether the episode ends): usually one per decision. A turn's end that yields no
# transition still ends the episode of the one before.
Credit = Callable[[Outcome], list[tuple[np.ndarray, list[Cycle], bool]]]


def credit_for(episode: str) -> Credit:
    """One transition per decision; the episode ends with the "cycle", the "interval" (each decision) or the "turn"."""

    def credit(outcome: Outcome):
        done = {"cycle": bool(outcome.rows), "interval": True, "turn": outcome.ended}[episode]
        return [(outcome.observation, outcome.rows, done)]

    return credit


class EnvRunner:
    """One environment, its random numbers, and the transitions that did not fit into the buffer yet.

    column: its place in the buffer. each_turn: seed of the draws of every turn, or None for draws that go on.
    """

    def __init__(self, env: Env, column: int, seed: int, credit: Credit, each_turn: int | None):
        self.env, self.column, self.credit, self.each_turn = env, column, credit, each_turn
        self.random = np.random.default_rng(seed if each_turn is None else each_turn)
        self.observation = env.reset(seed=seed)[0]
        self.pending: deque = deque()
        self.starts, self.filled, self.idle = True, 0, 0
        self._first, self._before = True, []
        self.outcome: Outcome | None = None  # of the latest step

    def draw(self, logits: np.ndarray) -> int:
        """An action from softmax(logits)."""
        return int((logits + self.random.gumbel(size=logits.shape)).argmax())

    def step(self, action: int) -> list[Cycle]:
        """Answer the question at hand and queue what follows. Returns all cycles that finished."""
        answered = self.observation
        self.observation, _, _, _, info = self.env.step(action)
        rows, ended = info["cycles"], info["turn_ended"]
        own = rows
        if ended:  # what follows the turn's end belongs to another turn, and undecided turns to nobody
            own = [*rows[:1], *itertools.takewhile(lambda row: row.cycle > 0, rows[1:])]
        outcome = Outcome(answered, own, self._before, self._first, ended)
        self.outcome = outcome
        for transition in self.credit(outcome):
            self.pending.append((action, *transition))
        if ended:
            self.pending.append(None)  # an episode never goes on into another turn
            later = rows[len(own) :]
            opened = max((i for i, row in enumerate(later) if row.cycle == 0), default=len(later))
            self._before = later[opened:]
            if self.each_turn is not None:
                self.random = np.random.default_rng(self.each_turn)
        else:
            self._before = []
        self._first = ended
        return rows


class Rollouts:
    """Fills stable-baselines3's rollout buffer from `count` environments.

    make_env(seed) builds one. scale: (mean, deviation) of observations, both [observation_size], or None.
    """

    def __init__(self, make_env: Callable[[int], Env], count: int, credit: Credit, reseed_each_turn: bool = False):
        self.make_env, self.count, self.credit, self.reseed = make_env, count, credit, reseed_each_turn
        self.runners: list[EnvRunner] = []
        self.scale: tuple[np.ndarray, np.ndarray] | None = None

    @contextlib.contextmanager
    def opened(self, seed: int, segment: int):
        """Fresh environments for a segment, closed at the end of the block."""
        states = np.random.SeedSequence((seed, segment)).generate_state(self.count)
        each_turn = seed if self.reseed else None  # of the run: the same draws in every turn of every environment
        for column, state in enumerate(states.tolist()):
            self.runners.append(EnvRunner(self.make_env(state), column, state, self.credit, each_turn))
        try:
            yield
        finally:
            for runner in self.runners:
                runner.env.close()
            self.runners = []

    def scaled(self, observations: np.ndarray) -> np.ndarray:
        if self.scale is None:
            return observations
        return (observations - self.scale[0]) / self.scale[1]

    def fill(self, policy, buffer, reward: Reward) -> dict:
        """Collect until the buffer is full, with values and log-probabilities; `last` holds what follows its last row.

        Returns reward and entropy (means), cycles, new_tok, total_ms, time (what the reward counts), and the actions.
        """
        buffer.reset()
        for runner in self.runners:
            runner.filled = 0
            self._take(runner, buffer, reward)
        finished: list[Cycle] = []
        while active := [runner for runner in self.runners if runner.filled < buffer.buffer_size]:
            logits = action_logits(policy, self.scaled(np.stack([runner.observation for runner in active])))
            for runner, row in zip(active, logits, strict=True):
                finished += runner.step(runner.draw(row))
                self._take(runner, buffer, reward)
                runner.idle = runner.idle + 1 if runner.filled == 0 else 0
                if runner.idle > PATIENCE:
                    raise SpecdecError(
                        f"{PATIENCE} decisions gave no transition to learn from: every turn ends before its first "
                        "interval does; shorten the interval, keep partial ones or use longer turns."
                    )
        buffer.pos, buffer.full = buffer.buffer_size, True
        entropy = self._evaluate(policy, buffer)
        return {
            "reward": float(buffer.rewards.mean()),
            "entropy": entropy,
            "cycles": len(finished),
            "new_tok": sum(row.new_tok for row in finished),
            "total_ms": sum(row.total_ms for row in finished),
            "time": sum(getattr(row, lap) for row in finished for lap in reward.laps) / reward.unit_ms,
            "actions": np.bincount(buffer.actions.astype(int).ravel(), minlength=int(policy.action_space.n)).tolist(),
        }

    def _take(self, runner: EnvRunner, buffer, reward: Reward) -> None:
        """Move pending transitions into the runner's column of the buffer, as far as there is room."""
        while runner.pending and runner.filled < buffer.buffer_size:
            transition = runner.pending.popleft()
            if transition is None:
                runner.starts = True
                continue
            action, observation, rows, done = transition
            at = runner.filled, runner.column
            buffer.observations[at] = self.scaled(observation)
            buffer.actions[at], buffer.rewards[at], buffer.episode_starts[at] = action, reward(rows), runner.starts
            runner.filled, runner.starts = runner.filled + 1, done
        while runner.pending and runner.pending[0] is None:
            runner.pending.popleft()
            runner.starts = True

    def _evaluate(self, policy, buffer) -> float:
        """Values and log-probabilities of everything in one forward; returns the mean entropy."""
        flat = torch.from_numpy(buffer.observations.reshape(-1, *buffer.obs_shape))
        actions = torch.from_numpy(buffer.actions.reshape(-1))
        last = [runner.pending[0][1] if runner.pending else runner.observation for runner in self.runners]
        policy.set_training_mode(False)
        with torch.no_grad():
            values, log_probs, entropy = policy.evaluate_actions(flat, actions)
            last_values = policy.predict_values(torch.from_numpy(self.scaled(np.stack(last))))
        buffer.values[:] = values.numpy().reshape(buffer.values.shape)
        buffer.log_probs[:] = log_probs.numpy().reshape(buffer.log_probs.shape)
        self.last = last_values, np.array([runner.starts for runner in self.runners])
        return float(entropy.mean())


def action_logits(policy, observations: np.ndarray) -> np.ndarray:
    """float32 [B, actions] of a stable-baselines3 MlpPolicy for observations float32 [B, O]."""
    with torch.no_grad():
        hidden = policy.mlp_extractor.forward_actor(torch.from_numpy(np.ascontiguousarray(observations)))
        return policy.action_net(hidden).numpy()
