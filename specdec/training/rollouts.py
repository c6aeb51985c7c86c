"""Experience for PPO: environments answered side by side, every decision credited with the cycles it led to.

All chance comes from (seed, segment): a segment opens fresh environments on fresh turns, so what it collects depends on
nothing but the weights and these two numbers, and a run that resumes at a segment's start repeats it exactly. Knows
nothing about updates, files or the systems.

What we take from stable-baselines3: PPO of given settings, its actor alone, and that actor in numpy.

Knows nothing about rollouts, files or the systems.
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
from specdec.policies.base import Network, PPOConfig
from specdec.training.env import Env, Reward, make_vec

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


class Walker:
    """One environment, its random numbers, and the transitions that did not fit into the buffer yet.

    column: its place in the buffer. each_turn: seed of the draws of every turn, or None for draws that go on.
    """

    def __init__(self, env: Env, column: int, seed: int, credit: Credit, each_turn: int | None):
        self.env, self.column, self.credit, self.each_turn = env, column, credit, each_turn
        self.random = np.random.default_rng(seed if each_turn is None else each_turn)
        self.observation = env.reset(seed=seed)[0]
        self.waiting: deque = deque()
        self.starts, self.filled, self.idle = True, 0, 0
        self._first, self._before = True, []
        self.outcome: Outcome | None = None  # of the latest step

    def draw(self, logits: np.ndarray) -> int:
        """An action from softmax(logits)."""
        return int((logits + self.random.gumbel(size=logits.shape)).argmax())

    def step(self, action: int) -> list[Cycle]:
        """Answer the question at hand and queue what follows. Returns all cycles that finished."""
        seen = self.observation
        self.observation, _, _, _, info = self.env.step(action)
        rows, ended = info["cycles"], info["turn_ended"]
        own = rows
        if ended:  # what follows the turn's end belongs to another turn, and undecided turns to nobody
            own = [*rows[:1], *itertools.takewhile(lambda row: row.cycle > 0, rows[1:])]
        outcome = Outcome(seen, own, self._before, self._first, ended)
        self.outcome = outcome
        for transition in self.credit(outcome):
            self.waiting.append((action, *transition))
        if ended:
            self.waiting.append(None)  # an episode never goes on into another turn
            later = rows[len(own) :]
            opened = max((i for i, row in enumerate(later) if row.cycle == 0), default=len(later))
            self._before = later[opened:]
            if self.each_turn is not None:
                self.random = np.random.default_rng(self.each_turn)
        else:
            self._before = []
        self._first = ended
        return rows


class Moments:
    """Running mean and variance of `width` numbers, kept as JSON types in `state`: [count, means, sums of squares]."""

    def __init__(self, state: list):
        self.state = state

    @classmethod
    def new(cls, width: int) -> Moments:
        return cls([0, [0.0] * width, [0.0] * width])

    def add(self, rows: np.ndarray) -> None:
        """Take in rows [N, width] (Chan, Golub and LeVeque's way of joining two sets)."""
        count, mean, squares = self.state[0], *(np.array(part) for part in self.state[1:])
        rows = rows.astype(np.float64)
        own, total = rows.mean(0), count + len(rows)
        squares = squares + np.square(rows - own).sum(0) + np.square(own - mean) * count * len(rows) / total
        mean = mean + (own - mean) * len(rows) / total
        self.state[:] = [total, mean.tolist(), squares.tolist()]

    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation, float32 [width] each; 0 and 1 before any row, deviation 1 of what never changes."""
        count, mean, squares = self.state
        variance = np.array(squares) / max(1, count)
        deviation = np.where(variance > 1e-8, np.sqrt(variance), 1.0)
        return np.array(mean, dtype=np.float32), deviation.astype(np.float32)


class Rollouts:
    """Fills stable-baselines3's rollout buffer from `count` environments.

    make_env(seed) builds one. scale: (mean, deviation) of observations, both [observation_size], or None.
    """

    def __init__(self, make_env: Callable[[int], Env], count: int, credit: Credit, reseed_each_turn: bool = False):
        self.make_env, self.count, self.credit, self.reseed = make_env, count, credit, reseed_each_turn
        self.walkers: list[Walker] = []
        self.scale: tuple[np.ndarray, np.ndarray] | None = None

    def open(self, seed: int, segment: int) -> None:
        """Fresh environments for a segment."""
        self.close()
        states = np.random.SeedSequence((seed, segment)).generate_state(self.count)
        each_turn = seed if self.reseed else None  # of the run: the same draws in every turn of every environment
        for column, state in enumerate(states.tolist()):
            self.walkers.append(Walker(self.make_env(state), column, state, self.credit, each_turn))

    def close(self) -> None:
        for walker in self.walkers:
            walker.env.close()
        self.walkers = []

    def scaled(self, observations: np.ndarray) -> np.ndarray:
        if self.scale is None:
            return observations
        return (observations - self.scale[0]) / self.scale[1]

    def fill(self, policy, buffer, reward: Reward) -> dict:
        """Collect until the buffer is full, with values and log-probabilities; `last` holds what follows its last row.

        Returns reward and entropy (means), cycles, new_tok, total_ms, time (what the reward counts), and the actions.
        """
        buffer.reset()
        for walker in self.walkers:
            walker.filled = 0
            self._take(walker, buffer, reward)
        finished: list[Cycle] = []
        while active := [walker for walker in self.walkers if walker.filled < buffer.buffer_size]:
            logits = action_logits(policy, self.scaled(np.stack([walker.observation for walker in active])))
            for walker, row in zip(active, logits, strict=True):
                finished += walker.step(walker.draw(row))
                self._take(walker, buffer, reward)
                walker.idle = walker.idle + 1 if walker.filled == 0 else 0
                if walker.idle > PATIENCE:
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

    def _take(self, walker: Walker, buffer, reward: Reward) -> None:
        """Move waiting transitions into the walker's column of the buffer, as far as there is room."""
        while walker.waiting and walker.filled < buffer.buffer_size:
            waiting = walker.waiting.popleft()
            if waiting is None:
                walker.starts = True
                continue
            action, observation, rows, done = waiting
            at = walker.filled, walker.column
            buffer.observations[at] = self.scaled(observation)
            buffer.actions[at], buffer.rewards[at], buffer.episode_starts[at] = action, reward(rows), walker.starts
            walker.filled, walker.starts = walker.filled + 1, done
        while walker.waiting and walker.waiting[0] is None:
            walker.waiting.popleft()
            walker.starts = True

    def _evaluate(self, policy, buffer) -> float:
        """Values and log-probabilities of everything in one forward; returns the mean entropy."""
        flat = torch.from_numpy(buffer.observations.reshape(-1, *buffer.obs_shape))
        actions = torch.from_numpy(buffer.actions.reshape(-1))
        last = [walker.waiting[0][1] if walker.waiting else walker.observation for walker in self.walkers]
        policy.set_training_mode(False)
        with torch.no_grad():
            values, log_probs, entropy = policy.evaluate_actions(flat, actions)
            last_values = policy.predict_values(torch.from_numpy(self.scaled(np.stack(last))))
        buffer.values[:] = values.numpy().reshape(buffer.values.shape)
        buffer.log_probs[:] = log_probs.numpy().reshape(buffer.log_probs.shape)
        self.last = last_values, np.array([walker.starts for walker in self.walkers])
        return float(entropy.mean())


def answers_of(kind: str, rows: list[Cycle]) -> list[tuple[int, ...]]:
    """What a learner of `kind` decided in each cycle."""
    return [tuple(getattr(row, name) for name in DECIDED[kind]) for row in rows]


# ---- from train.sb3 ----------------------------------------


def model_of(make_env, ppo: PPOConfig, envs: int, seed: int):
    """stable-baselines3's PPO with these settings: its networks, buffer and update; it never steps an environment."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    def rate(remaining: float) -> float:
        return ppo.learning_rate * rate_factor(1 - remaining, ppo.warmup_frac, ppo.linear_decay)

    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[ppo.activation]
    widths = dict(pi=list(ppo.pi), vf=list(ppo.vf))
    same = ("batch_size", "n_epochs", "clip_range", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")
    with seeded_all(seed, -1):
        model = PPO(
            "MlpPolicy",
            make_vec(make_env, envs, seed),
            learning_rate=rate,
            n_steps=ppo.n_steps // envs,
            seed=seed,
            device="cpu",
            policy_kwargs=dict(net_arch=widths, activation_fn=activation),
            **{name: getattr(ppo, name) for name in same},
        )
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def rate_factor(progress: float, warmup_frac: float, linear_decay: bool) -> float:
    """The learning rate as a fraction of its peak: linear warm-up from 0, then constant or linear to 0 at the end."""
    if progress < warmup_frac:
        return progress / warmup_frac
    return (1 - progress) / (1 - warmup_frac) if linear_decay else 1.0


def export(policy, activation: str, scale=None) -> Network:
    """The actor of a stable-baselines3 MlpPolicy as a numpy Network; scale (mean, deviation) moves into its first layer:
    W / deviation and b - W (mean / deviation), so that it reads raw observations."""
    layers = [layer for layer in policy.mlp_extractor.policy_net if isinstance(layer, torch.nn.Linear)]
    layers.append(policy.action_net)
    weights = [layer.weight.detach().double().numpy() for layer in layers]
    biases = [layer.bias.detach().double().numpy() for layer in layers]
    if scale is not None:
        weights[0] = weights[0] / scale[1]
        biases[0] = biases[0] - weights[0] @ scale[0]
    return Network(weights, biases, activation)


def action_logits(policy, observations: np.ndarray) -> np.ndarray:
    """float32 [B, actions] of a stable-baselines3 MlpPolicy for observations float32 [B, O]."""
    with torch.no_grad():
        hidden = policy.mlp_extractor.forward_actor(torch.from_numpy(np.ascontiguousarray(observations)))
        return policy.action_net(hidden).numpy()


@contextlib.contextmanager
def seeded_all(seed: int, number: int):
    """torch's and numpy's global generators set from (seed, number) inside the block, and as they were afterwards."""
    words = np.random.SeedSequence((seed, number + 1, 1)).generate_state(2)
    before = np.random.get_state()  # noqa: NPY002  stable-baselines3 shuffles with it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002
