"""PPO for any learned policy: stable-baselines3's networks and updates, our rollouts, exact resume, export to numpy.

A training consists of segments, with a checkpoint after each. A segment opens new environments on new turns and seeds all
randomness with (seed, segment), so that a killed run continues at the last segment and ends with
the same weights, bit for bit on one machine. Every decision is credited with the cycles it led to.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from specdec import runs
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle
from specdec.errors import SpecdecError, check_fields
from specdec.models.fingerprint import describe_pair
from specdec.policies.base import Learned, Network, PPOConfig
from specdec.training.env import Env, LiveSource, ReplaySource, Reward
from specdec.training.loop import (
    Best,
    TrainingRun,
    below,
    generators,
    read_checkpoint,
    restore,
    warn_of_a_constant,
)

MAX_GRAD_NORM = 0.5  # stable-baselines3's default
_COUNTED = 2048  # decisions of the trained policy in the histogram of its answers; at most the number it learned from
_RATE_MEMORY = 0.8  # weight of earlier rollouts in the reference throughput of "lagrangian"
PATIENCE = 500  # decisions without a transition before training gives up
# The part of a finished cycle that a learner of each kind has decided.
DECIDED = {
    PLAN: ("verify_nodes", "expansions", "top_k"),
    EXTEND: ("expansions",),
    SIZE: ("verify_nodes",),
}
_LOGGED = ("learning_rate", "value_loss", "approx_kl", "clip_fraction", "explained_variance")


@dataclass(frozen=True)
class Task:
    """A policy's training task.

    source: a ReplaySource, a function that makes a source, or a LiveSource (then envs=1, and times are not reproducible).
    reward: of the cycles a decision led to. episode: "cycle", "interval" or "turn".
    others: a policy that answers the other kinds (each environment gets a copy), or others(seed) -> policy.
    credit: the transitions of a decision (`Credit`), by default one per decision.
    adapt_rate: with reward "lagrangian", use the throughput of recent rollouts (Dinkelbach's iteration), at least
    reward.rate. reseed_each_turn: exploration uses the same random numbers in every turn.
    clear_each_turn: a turn's end drops transitions that have not yet filled the buffer.
    """

    source: object
    reward: Reward = Reward()  # noqa: RUF009  frozen
    episode: str = "cycle"
    others: object = None
    credit: Credit | None = None
    adapt_rate: bool = False
    reseed_each_turn: bool = False
    clear_each_turn: bool = False


@dataclass(frozen=True)
class RunOptions:
    """Where and how a training runs."""

    out_dir: Path | str
    seed: int = 0
    envs: int = 8  # environments in parallel
    segment_steps: int = 8192  # decisions between two checkpoints
    start_from: Path | str | None = (
        None  # another run's folder, whose weights and optimiser are the start
    )
    trained_for: dict = dataclasses.field(default_factory=dict)  # facts stored in the policy
    progress: bool = True
    resume: bool = True  # False starts over in a folder that holds a run

    def __post_init__(self):
        check_fields(self, envs=(1, math.inf))


def train_policy(
    learner: Learned,
    task: Task,
    ppo: PPOConfig,
    options: RunOptions,
    judge: Callable[[Learned], float] | None = None,
) -> Learned:
    """Train `learner` and return it with its network; curve.parquet and answers.parquet go into options.out_dir.

    judge: score of the policy after each segment; the best is kept in place of the last. The same call continues a stopped
    run and returns at once if it is finished. Warns if the policy collapsed to a constant.
    SpecdecError for invalid settings, or a folder with another run.
    """
    many = isinstance(task.source, ReplaySource) or callable(task.source)
    assert many or options.envs == 1, "one live source decodes one text at a time"
    assert task.reward.kind != "lagrangian" or task.reward.rate > 0, "lagrangian needs rate"
    if ppo.activation != learner.activation:
        raise SpecdecError(
            f"PPO trains {ppo.activation} but the policy runs {learner.activation}; give both the same."
        )
    if ppo.n_steps % options.envs:
        raise SpecdecError(
            f"n_steps={ppo.n_steps} must divide among envs={options.envs}; choose a divisor."
        )
    out_dir, seed = Path(options.out_dir), options.seed
    segment_steps = ppo.n_steps * max(1, round(options.segment_steps / ppo.n_steps))
    settings = _settings(learner, task, ppo, options, judge is not None)
    make_env = functools.partial(_new_env, learner, task)
    rollouts = Rollouts(
        make_env,
        options.envs,
        task.credit or each_alone,
        task.reseed_each_turn,
        task.clear_each_turn,
    )
    model, state = build_ppo(lambda: make_env(seed), ppo, options.envs, seed), State(learner)
    settings |= {"steps": math.ceil(ppo.total_steps / segment_steps)}
    run = TrainingRun(out_dir, settings, options.resume, "curve")
    model.attach(rollouts, task, state, run.add)
    optimizers = [model.policy.optimizer]
    if options.start_from is not None and not run.checkpoint.is_file():
        tensors = read_checkpoint(Path(options.start_from) / "checkpoint.safetensors")[1]
        restore(
            tensors, {"policy": model.policy, "state.observations": state.observations}, optimizers
        )
    run.track({"policy": model.policy, "state": state}, optimizers)
    model.num_timesteps = min(ppo.total_steps, run.step * segment_steps)

    def segment(number: int, _) -> None:
        words = np.random.SeedSequence((seed, number + 1, 1)).generate_state(2)
        with generators(*words.tolist()), rollouts.opened(seed, number):
            left = ppo.total_steps - model.num_timesteps
            model.learn(min(segment_steps, left), log_interval=None, reset_num_timesteps=False)
        learner.network = export(model.policy, learner.activation, rollouts.scale)
        run.curve.new[-1]["score"] = state.keep(learner.network, judge and float(judge(learner)))

    label = f"{type(learner).__name__}, seed {seed}"
    shown = ("reward", "entropy", "tok_per_ms")
    run.run(segment, label, all_or_nothing=True, save_s=0, shown=shown, progress=options.progress)
    learner.network = state.network
    learner.trained_for = {
        "seed": seed,
        "steps": model.num_timesteps,
        "ppo": dataclasses.asdict(ppo),
    }
    learner.trained_for |= options.trained_for
    if not run.finished:
        results = {
            "steps": ppo.total_steps,
            "elapsed_s": run.elapsed_s,
            "best_score": state.best_score,
        }
        run.finish(**results, **_answers(learner, make_env, ppo.total_steps, seed, out_dir))
    results = run.plan["results"]
    answer = f"this {type(learner).__name__} gave the answer {tuple(results['most_common'])}"
    warn_of_a_constant(answer, results["most_common_frac"])
    return learner


def _settings(
    learner: Learned, task: Task, ppo: PPOConfig, options: RunOptions, judged: bool
) -> dict:
    """All settings that the weights depend on."""
    described = {name: _described(getattr(task, name)) for name in ("source", "others", "credit")}
    start_from = (
        options.start_from
        and runs.read_json(Path(options.start_from) / "plan.json")["results"]["weights"]
    )
    told = {
        name: getattr(options, name) for name in ("seed", "envs", "segment_steps", "trained_for")
    }
    told["learner"] = [type(learner).__name__, learner.settings()]
    return told | {
        "task": vars(task) | described,
        "ppo": ppo,
        "judge": judged,
        "start_from": start_from,
    }


def _described(what):
    """What results depend on, as JSON: hashes of recordings, costs and networks; names of functions."""
    if isinstance(what, ReplaySource):
        turns = what.trace.turns[["suite", "prompt", "turn", "part", "first", "positions"]].to_dict(
            "list"
        )
        return runs.content_key(
            header=what.trace.header, turns=turns, costs=what.costs, policy_ms=what.policy_ms
        )
    if isinstance(what, LiveSource):
        decoding = [what.max_new_tokens, what.temperature, what.seed, what.policy_ms]
        return runs.content_key(
            pair=describe_pair(what.pair), prompts=what.prompts, decoding=decoding
        )
    if isinstance(what, Learned):
        return [type(what).__name__, what.settings(), what.network and _hash_of(what.network)]
    return getattr(what, "__qualname__", None) or (None if what is None else type(what).__name__)


def _new_env(learner: Learned, task: Task, seed: int) -> Env:
    source = task.source
    if isinstance(source, ReplaySource):
        source = ReplaySource(source.trace, source.costs, source.policy_ms)
    elif callable(source):
        source = source()
    others = task.others(seed) if callable(task.others) else copy.deepcopy(task.others)
    return Env(copy.deepcopy(learner), source, others, task.reward, task.episode)


def _answers(learner: Learned, make_env, total_steps: int, seed: int, out_dir: Path) -> dict:
    """The trained policy's answers and speed on the training text; also written to answers.parquet."""
    seed = int(np.random.SeedSequence((seed, 1 << 30)).generate_state(1)[0])
    runner, counts, tokens, total_ms = (
        EnvRunner(make_env(seed), 0, seed, lambda _: [], None),
        Counter(),
        0,
        0.0,
    )
    left = min(_COUNTED, total_steps)
    while left > 0 or not counts:  # a cycle may need more decisions than a very short training had
        left -= 1
        rows = runner.step(int(learner.network(runner.observation).argmax()))
        counts.update(
            tuple(getattr(row, name) for name in DECIDED[learner.kind])
            for row in runner.outcome.rows
        )
        tokens, total_ms = (
            tokens + sum(row.kept_tok for row in rows),
            total_ms + sum(row.total_ms for row in rows),
        )
    runner.env.close()
    answers = pd.DataFrame(list(counts), columns=DECIDED[learner.kind]).assign(
        cycles=list(counts.values())
    )
    runs.write_table(out_dir / "answers.parquet", answers.sort_values("cycles", ascending=False))
    commonest, cycles = counts.most_common(1)[0]
    return {
        "tok_per_ms": tokens / total_ms,
        "answers": len(counts),
        "most_common": list(commonest),
        "most_common_frac": cycles / sum(counts.values()),
        "weights": _hash_of(learner.network),
    }


@dataclass(frozen=True)
class Outcome:
    """The outcome of one decision. rows: the finished cycles of its own turn. before: cycles of this turn before its first
    decision (a fixed first tree), given to that decision only; unknown, and empty, in the first turn of a segment.
    first: it is the turn's first decision. ended: the turn ended with it; over: the episode did."""

    observation: np.ndarray
    rows: list[Cycle]
    before: list[Cycle]
    first: bool
    ended: bool
    over: bool = False


# (observation, the cycles that count, whether the episode ends): usually one per decision. A turn's end without a
# transition still ends the episode of the previous one.
Credit = Callable[[Outcome], list[tuple[np.ndarray, list[Cycle], bool]]]


def each_alone(outcome: Outcome) -> list[tuple[np.ndarray, list[Cycle], bool]]:
    """One transition per decision."""
    return [(outcome.observation, outcome.rows, outcome.over)]


class EnvRunner:
    """One environment, its random numbers, and the transitions that did not fit into the buffer yet.

    column: its column of the buffer. each_turn: seed of the draws of every turn, or None for continuing draws.
    """

    def __init__(self, env: Env, column: int, seed: int, credit: Credit, each_turn: int | None):
        self.env, self.column, self.credit, self.each_turn = env, column, credit, each_turn
        self.random = np.random.default_rng(seed if each_turn is None else each_turn)
        self.observation = env.reset(seed=seed)[0]
        self.pending: deque = deque()
        self.starts, self.filled, self.most, self.idle = True, 0, 0, 0
        self._first, self._before = True, []
        self.outcome: Outcome | None = None  # of the latest step

    def draw(self, logits: np.ndarray) -> int:
        """An action from softmax(logits)."""
        return int((logits + self.random.gumbel(size=logits.shape)).argmax())

    def step(self, action: int) -> list[Cycle]:
        """Answer the current question and queue the transitions. Returns all cycles that finished."""
        answered = self.observation
        self.observation, _, over, _, info = self.env.step(action)
        rows, ended = info["cycles"], info["turn_ended"]
        own = rows
        if ended:  # later cycles belong to another turn, and undecided turns to no decision
            own = [*rows[:1], *itertools.takewhile(lambda row: row.cycle > 0, rows[1:])]
        self.outcome = Outcome(answered, own, self._before, self._first, ended, over)
        self.pending += [(action, *transition) for transition in self.credit(self.outcome)]
        later = rows[len(own) :]
        self._before = later[
            max((i for i, row in enumerate(later) if row.cycle == 0), default=len(later)) :
        ]
        if ended:
            self.pending.append(None)  # an episode never continues into another turn
            if self.each_turn is not None:
                self.random = np.random.default_rng(self.each_turn)
        self._first = ended
        return rows


class Rollouts:
    """Fills stable-baselines3's rollout buffer from `count` environments.

    make_env(seed) builds one. scale: (mean, deviation) of observations, or None. clear: drop unfinished buffers at a turn's end.
    """

    def __init__(
        self,
        make_env: Callable[[int], Env],
        count: int,
        credit: Credit,
        reseed_each_turn=False,
        clear=False,
    ):
        self.make_env, self.count, self.credit = make_env, count, credit
        self.reseed, self.clear = reseed_each_turn, clear
        self.runners: list[EnvRunner] = []
        self.scale: tuple[np.ndarray, np.ndarray] | None = None

    @contextlib.contextmanager
    def opened(self, seed: int, segment: int):
        """New environments for a segment, closed at the end of the block."""
        states = np.random.SeedSequence((seed, segment)).generate_state(self.count)
        each_turn = (
            seed if self.reseed else None
        )  # of the run: the same draws in every turn of every environment
        for column, state in enumerate(states.tolist()):
            self.runners.append(
                EnvRunner(self.make_env(state), column, state, self.credit, each_turn)
            )
        try:
            yield
        finally:
            for runner in self.runners:
                runner.env.close()
            self.runners = []

    def scaled(self, observations: np.ndarray) -> np.ndarray:
        return (
            observations if self.scale is None else (observations - self.scale[0]) / self.scale[1]
        )

    def fill(self, policy, buffer, reward: Reward) -> dict:
        """Collect until the buffer is full, with values and log-probabilities; `last` holds what follows its last row.

        Returns reward and entropy (means), cycles, new_tok (those kept), total_ms, time (as in the reward), and the actions.
        """
        buffer.reset()
        for runner in self.runners:
            runner.filled = runner.most = 0
            self._take(runner, buffer, reward)
        finished: list[Cycle] = []
        while active := [runner for runner in self.runners if runner.filled < buffer.buffer_size]:
            logits = action_logits(
                policy, self.scaled(np.stack([runner.observation for runner in active]))
            )
            for runner, row in zip(active, logits, strict=True):
                finished += runner.step(runner.draw(row))
                self._take(runner, buffer, reward)
                runner.idle = runner.idle + 1 if runner.filled <= runner.most else 0
                runner.most = max(runner.most, runner.filled)
                if runner.idle > PATIENCE:
                    raise SpecdecError(
                        f"{PATIENCE} decisions gave no transition to learn from: every turn ends before its first interval does "
                        "(with clear_buffer: before n_steps do); shorten the interval, keep partial ones or use longer turns."
                    )
        buffer.pos, buffer.full = buffer.buffer_size, True
        return {
            "reward": float(buffer.rewards.mean()),
            "entropy": self._evaluate(policy, buffer),
            "cycles": len(finished),
            "new_tok": sum(row.kept_tok for row in finished),
            "total_ms": sum(row.total_ms for row in finished),
            "time": sum(getattr(row, lap) for row in finished for lap in reward.laps)
            / reward.unit_ms,
            "actions": np.bincount(
                buffer.actions.astype(int).ravel(), minlength=int(policy.action_space.n)
            ).tolist(),
        }

    def _take(self, runner: EnvRunner, buffer, reward: Reward) -> None:
        """Move pending transitions into the runner's column of the buffer, as far as there is room."""
        while runner.pending and runner.filled < buffer.buffer_size:
            transition = runner.pending.popleft()
            if transition is None:
                runner.starts, runner.filled = True, 0 if self.clear else runner.filled
                continue
            action, observation, rows, done = transition
            at = runner.filled, runner.column
            buffer.observations[at] = self.scaled(observation)
            buffer.actions[at], buffer.rewards[at], buffer.episode_starts[at] = (
                action,
                reward(rows),
                runner.starts,
            )
            runner.filled, runner.starts = runner.filled + 1, done
        while runner.pending and runner.pending[0] is None:
            runner.pending.popleft()
            runner.starts = True

    def _evaluate(self, policy, buffer) -> float:
        """Values and log-probabilities of the whole buffer in one forward; returns the mean entropy."""
        flat = torch.from_numpy(buffer.observations.reshape(-1, *buffer.obs_shape))
        actions = torch.from_numpy(buffer.actions.reshape(-1))
        last = [
            runner.pending[0][1] if runner.pending else runner.observation
            for runner in self.runners
        ]
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
        hidden = policy.mlp_extractor.forward_actor(
            torch.from_numpy(np.ascontiguousarray(observations))
        )
        return policy.action_net(hidden).numpy()


class SegmentRollouts:
    """Mixin for stable-baselines3's PPO: rollouts come from `Rollouts`, and every update adds a row to a curve.

    A mixin, because the library is imported only for training (`build_ppo`).
    """

    def attach(
        self, rollouts: Rollouts, task: Task, state: State, add_row: Callable[[dict], None]
    ) -> None:
        self.rollouts, self.task, self.state, self.add_row = rollouts, task, state, add_row
        self._last_obs = ()  # otherwise `learn` resets environments that are never used

    def collect_rollouts(self, env, callback, rollout_buffer, n_rollout_steps) -> bool:
        state, config, reward = self.state, self.config, self.task.reward
        self.rollouts.scale = state.observations.scale() if config.normalise_observations else None
        if self.task.adapt_rate:
            reward = dataclasses.replace(reward, rate=state.rate(reward.rate))
        self.row = self.rollouts.fill(self.policy, rollout_buffer, reward) | {"rate": reward.rate}
        state.note_rate(self.row["new_tok"], self.row["time"])
        if config.normalise_reward:
            state.rewards.add(rollout_buffer.rewards.reshape(-1, 1))
            rollout_buffer.rewards /= state.rewards.scale()[1]
        rollout_buffer.compute_returns_and_advantage(*self.rollouts.last)
        if config.normalise_observations:
            mean, deviation = self.rollouts.scale
            state.observations.add(
                rollout_buffer.observations.reshape(-1, len(mean)) * deviation + mean
            )
        self._begun_at = self.num_timesteps
        self.num_timesteps = min(config.total_steps, self.num_timesteps + config.n_steps)
        return True

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        """Of the whole training, not of this segment, and at the rollout's middle."""
        super()._update_current_progress_remaining(
            (self._begun_at + num_timesteps) / 2, self.config.total_steps
        )

    def train(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():  # a live pair runs without gradients
            super().train()
        logged = {name: float(self.logger.name_to_value[f"train/{name}"]) for name in _LOGGED}
        throughput = {
            "tok_per_ms": self.row["new_tok"] / self.row["total_ms"],
            "rate": self.row.pop("rate"),
        }
        self.add_row(
            {"steps": self.num_timesteps, **self.row, **throughput, **logged, "score": math.nan}
        )


def build_ppo(make_env, config: PPOConfig, envs: int, seed: int):
    """stable-baselines3's PPO with these settings and `SegmentRollouts`; its own environments only define shapes."""

    # imported only for training: it takes seconds
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import Logger

    class SegmentPPO(SegmentRollouts, PPO):
        """PPO, one segment per call of `learn`."""

    names = ("batch_size", "n_epochs", "clip_range", "gamma", "gae_lambda", "ent_coef", "vf_coef")
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[config.activation]
    words = np.random.SeedSequence((seed, 0, 1)).generate_state(2)
    with generators(*words.tolist()):
        model = SegmentPPO(
            "MlpPolicy",
            make_vec_env(make_env, envs, seed),
            learning_rate=lambda remaining: learning_rate(config, 1 - remaining),
            n_steps=config.n_steps // envs,
            seed=seed,
            device="cpu",
            max_grad_norm=MAX_GRAD_NORM,
            policy_kwargs=dict(
                net_arch=dict(pi=list(config.pi), vf=list(config.vf)), activation_fn=activation
            ),
            **{name: getattr(config, name) for name in names},
        )
    model.config = config
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def learning_rate(config: PPOConfig, progress: float) -> float:
    """Linear warm-up from 0, then constant or linear to 0 at the end. progress: 0 to 1."""
    if progress < config.warmup_frac:
        return config.learning_rate * (progress / config.warmup_frac)
    return config.learning_rate * (
        (1 - progress) / (1 - config.warmup_frac) if config.linear_decay else 1.0
    )


def export(policy, activation: str, scale=None) -> Network:
    """The actor of a stable-baselines3 MlpPolicy as a numpy Network.

    scale (mean, deviation) moves into its first layer, so that it reads raw observations:
    W / deviation and b - W (mean / deviation).
    """
    layers = [
        layer for layer in policy.mlp_extractor.policy_net if isinstance(layer, torch.nn.Linear)
    ]
    layers.append(policy.action_net)
    weights = [layer.weight.detach().double().numpy() for layer in layers]
    biases = [layer.bias.detach().double().numpy() for layer in layers]
    if scale is not None:
        weights[0] = weights[0] / scale[1]
        biases[0] = biases[0] - weights[0] @ scale[0]
    return Network(weights, biases, activation)


def _hash_of(network: Network) -> str:
    return hashlib.sha256(
        b"".join(array.tobytes() for array in network.arrays().values())
    ).hexdigest()


class RunningMoments:
    """Mean and variance of `width` numbers over all rows so far.

    Unlike stable-baselines3's RunningMeanStd it starts at no rows, not at 0.0001 rows of mean 0 and variance 1.
    """

    def __init__(self, width: int):
        self.count, self.mean, self.squares = 0, np.zeros(width), np.zeros(width)

    def add(self, rows: np.ndarray) -> None:
        """Add rows [N, width] (Chan, Golub and LeVeque's merging of two sets)."""
        rows = rows.astype(np.float64)
        mean, total = rows.mean(0), self.count + len(rows)
        apart = np.square(mean - self.mean) * self.count * len(rows) / total
        self.squares = self.squares + np.square(rows - mean).sum(0) + apart
        self.mean = self.mean + (mean - self.mean) * len(rows) / total
        self.count = total

    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation, float32 [width] each; 0 and 1 before any row, deviation 1 for constants."""
        variance = self.squares / max(1, self.count)
        deviation = np.where(variance > 1e-8, np.sqrt(variance), 1.0)
        return self.mean.astype(np.float32), deviation.astype(np.float32)

    def state_dict(self) -> dict:
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict) -> None:
        self.count, self.mean, self.squares = (
            int(state["count"]),
            state["mean"].numpy(),
            state["squares"].numpy(),
        )


class State:
    """Running moments, the recent throughput, and the network to keep.

    observations, rewards: their running moments. rate_sums: tokens and time of recent rollouts.
    """

    def __init__(self, learner: Learned):
        self.observations, self.rewards = (
            RunningMoments(learner.observation_size),
            RunningMoments(1),
        )
        self.activation, self.rate_sums, self.best = learner.activation, [0.0, 0.0], Best()

    def rate(self, least: float) -> float:
        """Recent tokens per unit of time, but at least `least`, which a constant reaches."""
        tokens, spent = self.rate_sums
        return max(least, tokens / spent) if spent else least

    def note_rate(self, tokens: float, spent: float) -> None:
        self.rate_sums = [
            _RATE_MEMORY * old + new
            for old, new in zip(self.rate_sums, (tokens, spent), strict=True)
        ]

    def keep(self, network: Network, score: float | None) -> float:
        """Keep the network if it is the best so far, or the newest if there are no scores. Returns the score, or NaN."""
        self.best.consider(
            {name: torch.from_numpy(array) for name, array in network.arrays().items()}, score
        )
        return math.nan if score is None else score

    @property
    def network(self) -> Network | None:
        """The kept network."""
        arrays = {name: tensor.numpy() for name, tensor in self.best.weights.items()}
        return Network.from_arrays(arrays, self.activation) if arrays else None

    @property
    def best_score(self) -> float | None:
        return self.best.score if math.isfinite(self.best.score) else None

    def state_dict(self) -> dict:
        parts = {
            "observations": self.observations.state_dict(),
            "rewards": self.rewards.state_dict(),
        }
        parts["network"] = self.best.weights
        tensors = {
            f"{part}.{name}": tensor
            for part, state in parts.items()
            for name, tensor in state.items()
        }
        score = math.nan if self.best_score is None else self.best_score
        return tensors | {
            "rate_sums_and_score": torch.tensor([*self.rate_sums, score], dtype=torch.float64)
        }

    def load_state_dict(self, tensors: dict) -> None:
        restore(tensors, {"observations": self.observations, "rewards": self.rewards})
        *self.rate_sums, score = tensors["rate_sums_and_score"].tolist()
        self.best.weights, self.best.score = (
            below(tensors, "network."),
            -math.inf if math.isnan(score) else score,
        )
