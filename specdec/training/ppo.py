"""PPO for any learned policy: stable-baselines3's networks and updates, our rollouts, exact resume.

A training consists of segments, with a checkpoint after each. A segment opens new environments on
new turns and seeds all randomness with (seed, segment). So a killed run continues at its last
segment and ends with the same weights, bit for bit on one machine. Every decision is credited with
the cycles it led to.
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
    generators,
    read_checkpoint,
    restore,
    warn_of_a_constant,
)

MAX_GRAD_NORM = 0.5  # stable-baselines3's default
# Decisions of the trained policy in the histogram of its answers; at most those it learned from.
COUNTED = 2048
# Weight of earlier rollouts in the reference throughput of "lagrangian".
RATE_MEMORY = 0.8
PATIENCE = 500  # decisions without a transition before training gives up
# The part of a finished cycle that a learner of each kind has decided.
DECIDED = {
    PLAN: ("verify_nodes", "expansions", "top_k"),
    EXTEND: ("expansions",),
    SIZE: ("verify_nodes",),
}
LOGGED = ("learning_rate", "value_loss", "approx_kl", "clip_fraction", "explained_variance")


@dataclass(frozen=True)
class Task:
    """A policy's training task.

    source: a ReplaySource, a function that makes a source, or a LiveSource (then envs=1, and times
    are not reproducible). reward: of the cycles a decision led to. episode: "cycle", "interval" or
    "turn". others: a policy that answers the other kinds (each environment gets a copy), or
    others(seed) -> policy. credit: the transitions of a decision (`Credit`), by default one each.
    adapt_rate: with reward "lagrangian", use the throughput of recent rollouts (Dinkelbach's
    iteration), at least reward.rate. reseed_each_turn: every turn draws the same random numbers.
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
    """Where and how a training runs.

    envs: environments in parallel. segment_steps: decisions between two checkpoints. start_from:
    another run's folder, whose weights and optimiser are the start. trained_for: facts stored in
    the policy. resume: False starts over in a folder that holds a run.
    """

    out_dir: Path | str
    seed: int = 0
    envs: int = 8
    segment_steps: int = 8192
    start_from: Path | str | None = None
    trained_for: dict = dataclasses.field(default_factory=dict)
    progress: bool = True
    resume: bool = True

    def __post_init__(self):
        check_fields(self, envs=(1, math.inf))


def train_policy(
    learner: Learned,
    task: Task,
    ppo: PPOConfig,
    options: RunOptions,
    judge: Callable[[Learned], float] | None = None,
) -> Learned:
    """Train `learner` and return it with its network.

    Writes curve.parquet and answers.parquet into options.out_dir. judge: score of the policy after
    each segment; the best is kept in place of the last. The same call continues a stopped run and
    returns at once if it is finished. Warns if the policy collapsed to a constant. SpecdecError
    for a number of environments that does not fit, or a folder with another run.
    """
    # 1. settings
    many = isinstance(task.source, ReplaySource) or callable(task.source)
    assert many or options.envs == 1, "one live source decodes one text at a time"
    assert task.reward.kind != "lagrangian" or task.reward.rate > 0, "lagrangian needs rate"
    assert ppo.activation == learner.activation, (ppo.activation, learner.activation)
    if ppo.n_steps % options.envs:
        why = f"n_steps={ppo.n_steps} must divide among envs={options.envs}"
        raise SpecdecError(f"{why}; choose a divisor.")
    seed = options.seed
    segment_steps = ppo.n_steps * max(1, round(options.segment_steps / ppo.n_steps))
    settings = _settings(learner, task, ppo, options, judge is not None)
    settings["steps"] = math.ceil(ppo.total_steps / segment_steps)
    # 2. environments, stable-baselines3's model, and the run on disk
    make_env = functools.partial(_new_env, learner, task)
    rollouts = Rollouts(make_env, options.envs, task)
    model = build_ppo(lambda: make_env(seed), ppo, options.envs, seed)
    state = State(learner)
    run = TrainingRun(options.out_dir, settings, options.resume, "curve")
    model.attach(rollouts, task, state, run.add)
    optimizers = [model.policy.optimizer]
    if options.start_from is not None and not run.checkpoint.is_file():
        tensors = read_checkpoint(Path(options.start_from) / "checkpoint.safetensors")[1]
        parts = {"policy": model.policy, "state.observations": state.observations}
        restore(tensors, parts, optimizers)
    run.track({"policy": model.policy, "state": state}, optimizers)
    model.num_timesteps = min(ppo.total_steps, run.step * segment_steps)

    # 3. segments
    def segment(number: int, _) -> None:
        words = np.random.SeedSequence((seed, number + 1, 1)).generate_state(2)
        steps = min(segment_steps, ppo.total_steps - model.num_timesteps)
        with generators(*words.tolist()), rollouts.opened(seed, number):
            model.learn(steps, log_interval=None, reset_num_timesteps=False)
        learner.network = export(model.policy, learner.activation, rollouts.scale)
        score = None if judge is None else float(judge(learner))
        run.curve.new[-1]["score"] = state.keep(learner.network, score)

    label = f"{type(learner).__name__}, seed {seed}"
    columns = ("reward", "entropy", "tok_per_ms")
    run.run(segment, label, all_or_nothing=True, save_s=0, shown=columns, progress=options.progress)
    # 4. the kept network and its answers
    learner.network = state.network
    facts = {"seed": seed, "steps": model.num_timesteps, "ppo": dataclasses.asdict(ppo)}
    learner.trained_for = {**facts, **options.trained_for}
    if not run.finished:
        results = _answers(learner, make_env, ppo.total_steps, seed, Path(options.out_dir))
        results |= {"steps": ppo.total_steps, "elapsed_s": run.elapsed_s}
        run.finish(**results, best_score=state.best_score)
    results = run.plan["results"]
    answer = f"this {type(learner).__name__} gave the answer {tuple(results['most_common'])}"
    warn_of_a_constant(answer, results["most_common_frac"])
    return learner


def _settings(
    learner: Learned, task: Task, ppo: PPOConfig, options: RunOptions, judged: bool
) -> dict:
    """All settings that the weights depend on."""
    described = dict(vars(task))
    for name in ("source", "others", "credit"):
        described[name] = _described(described[name])
    start_from = None
    if options.start_from is not None:
        plan = runs.read_json(Path(options.start_from) / "plan.json")
        start_from = plan["results"]["weights"]
    return {
        "seed": options.seed,
        "envs": options.envs,
        "segment_steps": options.segment_steps,
        "trained_for": options.trained_for,
        "learner": [type(learner).__name__, learner.settings()],
        "task": described,
        "ppo": ppo,
        "judge": judged,
        "start_from": start_from,
    }


def _described(part):
    """What results depend on: hashes of recordings, costs and networks; names of functions."""
    if part is None:
        return None
    if isinstance(part, ReplaySource):
        columns = ["suite", "prompt", "turn", "part", "first", "positions"]
        turns = part.trace.turns[columns].to_dict("list")
        priced = {"costs": part.costs, "policy_ms": part.policy_ms}
        return runs.content_key(header=part.trace.header, turns=turns, **priced)
    if isinstance(part, LiveSource):
        decoding = [part.max_new_tokens, part.temperature, part.seed, part.policy_ms]
        pair = describe_pair(part.pair)
        return runs.content_key(pair=pair, prompts=part.prompts, decoding=decoding)
    if isinstance(part, Learned):
        weights = None if part.network is None else _hash_of(part.network)
        return [type(part).__name__, part.settings(), weights]
    return getattr(part, "__qualname__", type(part).__name__)


def _new_env(learner: Learned, task: Task, seed: int) -> Env:
    source = task.source
    if isinstance(source, ReplaySource):
        source = ReplaySource(source.trace, source.costs, source.policy_ms)
    elif callable(source):
        source = source()
    others = task.others(seed) if callable(task.others) else copy.deepcopy(task.others)
    return Env(copy.deepcopy(learner), source, others, task.reward, task.episode)


def _answers(learner: Learned, make_env, total_steps: int, seed: int, out_dir: Path) -> dict:
    """The trained policy's answers (also in answers.parquet) and its speed on the training text."""
    seed = int(np.random.SeedSequence((seed, 1 << 30)).generate_state(1)[0])
    runner = EnvRunner(make_env(seed), 0, seed, each_alone, None)
    columns = DECIDED[learner.kind]
    counts: Counter = Counter()
    tokens = 0
    total_ms = 0.0
    decisions = 0
    # a cycle may need more decisions than a very short training had
    while decisions < min(COUNTED, total_steps) or not counts:
        decisions += 1
        for row in runner.step(int(learner.network(runner.observation).argmax())):
            tokens += row.kept_tok
            total_ms += row.total_ms
        for row in runner.outcome.rows:
            counts[tuple(getattr(row, name) for name in columns)] += 1
    runner.env.close()
    answers = pd.DataFrame(list(counts), columns=columns).assign(cycles=list(counts.values()))
    runs.write_table(out_dir / "answers.parquet", answers.sort_values("cycles", ascending=False))
    answer, cycles = counts.most_common(1)[0]
    return {
        "tok_per_ms": tokens / total_ms,
        "answers": len(counts),
        "most_common": list(answer),
        "most_common_frac": cycles / sum(counts.values()),
        "weights": _hash_of(learner.network),
    }


@dataclass(frozen=True)
class Outcome:
    """The outcome of one decision.

    rows: the finished cycles of its own turn. before: cycles of this turn before its first decision
    (a fixed first tree), given to that decision only; unknown, and empty, in the first turn of a
    segment. first: it is the turn's first decision. ended: the turn ended with it; over: the
    episode did.
    """

    observation: np.ndarray
    rows: list[Cycle]
    before: list[Cycle]
    first: bool
    ended: bool
    over: bool = False


# (observation, the cycles that count, whether the episode ends): usually one per decision. A turn's
# end without a transition still ends the episode of the previous one.
Credit = Callable[[Outcome], list[tuple[np.ndarray, list[Cycle], bool]]]


def each_alone(outcome: Outcome) -> list[tuple[np.ndarray, list[Cycle], bool]]:
    """One transition per decision."""
    return [(outcome.observation, outcome.rows, outcome.over)]


class EnvRunner:
    """One environment, its random numbers, and transitions that did not fit into the buffer yet.

    column: its column of the buffer. each_turn: seed of the draws of every turn, or None for
    continuing draws.
    """

    def __init__(self, env: Env, column: int, seed: int, credit: Credit, each_turn: int | None):
        self.env = env
        self.column = column
        self.credit = credit
        self.each_turn = each_turn
        self.random = np.random.default_rng(seed if each_turn is None else each_turn)
        self.observation = env.reset(seed=seed)[0]
        self.pending: deque = deque()
        self.starts = True
        self.filled = 0
        # decisions without a new row in the buffer, and the most rows it had
        self.idle = 0
        self.most = 0
        self._first = True
        self._before: list[Cycle] = []
        self.outcome: Outcome | None = None  # of the latest step

    def draw(self, logits: np.ndarray) -> int:
        """An action from softmax(logits)."""
        return int((logits + self.random.gumbel(size=logits.shape)).argmax())

    def step(self, action: int) -> list[Cycle]:
        """Answer the current question and queue the transitions. Returns the finished cycles."""
        answered = self.observation
        self.observation, _, over, _, info = self.env.step(action)
        rows = info["cycles"]
        ended = info["turn_ended"]
        # 1. later cycles belong to another turn, and undecided turns to no decision
        same_turn = rows
        if ended:
            same_turn = [*rows[:1], *itertools.takewhile(lambda row: row.cycle > 0, rows[1:])]
        self.outcome = Outcome(answered, same_turn, self._before, self._first, ended, over)
        for transition in self.credit(self.outcome):
            self.pending.append((action, *transition))
        # 2. the cycles of the new turn that precede its first decision
        self._before = []
        for row in rows[len(same_turn) :]:
            if row.cycle == 0:
                self._before = []
            self._before.append(row)
        # 3. an episode never continues into another turn
        if ended:
            self.pending.append(None)
            if self.each_turn is not None:
                self.random = np.random.default_rng(self.each_turn)
        self._first = ended
        return rows


class Rollouts:
    """Fills stable-baselines3's rollout buffer from `count` environments.

    make_env(seed) builds one. scale: (mean, deviation) of observations, or None.
    """

    def __init__(self, make_env: Callable[[int], Env], count: int, task: Task):
        self.make_env = make_env
        self.count = count
        self.task = task
        self.runners: list[EnvRunner] = []
        self.scale: tuple[np.ndarray, np.ndarray] | None = None

    @contextlib.contextmanager
    def opened(self, seed: int, segment: int):
        """New environments for a segment, closed at the end of the block."""
        states = np.random.SeedSequence((seed, segment)).generate_state(self.count)
        credit = self.task.credit or each_alone
        # the run's seed: the same draws in every turn of every environment
        each_turn = seed if self.task.reseed_each_turn else None
        for column, state in enumerate(states.tolist()):
            runner = EnvRunner(self.make_env(state), column, state, credit, each_turn)
            self.runners.append(runner)
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
        """Collect until the buffer is full, with values and log-probabilities.

        `last` then holds what follows its last row. Returns reward and entropy (means), cycles,
        new_tok (those kept), total_ms, time (as in the reward), and the actions.
        """
        # 1. transitions
        buffer.reset()
        for runner in self.runners:
            runner.filled = 0
            runner.most = 0
            self._take(runner, buffer, reward)
        finished: list[Cycle] = []
        while active := [runner for runner in self.runners if runner.filled < buffer.buffer_size]:
            observations = np.stack([runner.observation for runner in active])
            logits = action_logits(policy, self.scaled(observations))
            for runner, row in zip(active, logits, strict=True):
                finished += runner.step(runner.draw(row))
                self._take(runner, buffer, reward)
                runner.idle = runner.idle + 1 if runner.filled <= runner.most else 0
                runner.most = max(runner.most, runner.filled)
                if runner.idle > PATIENCE:
                    why = f"{PATIENCE} decisions gave no transition to learn from: every turn ends"
                    why = f"{why} before its first interval"
                    raise SpecdecError(f"{why}; shorten the interval or use longer turns.")
        buffer.pos = buffer.buffer_size
        buffer.full = True
        # 2. what they show
        spent = sum(getattr(row, lap) for row in finished for lap in reward.laps)
        actions = buffer.actions.astype(int).ravel()
        return {
            "reward": float(buffer.rewards.mean()),
            "entropy": self._evaluate(policy, buffer),
            "cycles": len(finished),
            "new_tok": sum(row.kept_tok for row in finished),
            "total_ms": sum(row.total_ms for row in finished),
            "time": spent / reward.unit_ms,
            "actions": np.bincount(actions, minlength=int(policy.action_space.n)).tolist(),
        }

    def _take(self, runner: EnvRunner, buffer, reward: Reward) -> None:
        """Move pending transitions into the runner's column, as far as there is room."""
        while runner.pending and runner.filled < buffer.buffer_size:
            transition = runner.pending.popleft()
            if transition is None:
                runner.starts = True
                if self.task.clear_each_turn:
                    runner.filled = 0
                continue
            action, observation, rows, done = transition
            place = (runner.filled, runner.column)
            buffer.observations[place] = self.scaled(observation)
            buffer.actions[place] = action
            buffer.rewards[place] = reward(rows)
            buffer.episode_starts[place] = runner.starts
            runner.filled += 1
            runner.starts = done
        while runner.pending and runner.pending[0] is None:
            runner.pending.popleft()
            runner.starts = True

    def _evaluate(self, policy, buffer) -> float:
        """Values and log-probabilities of the buffer in one forward; returns the mean entropy."""
        observations = torch.from_numpy(buffer.observations.reshape(-1, *buffer.obs_shape))
        actions = torch.from_numpy(buffer.actions.reshape(-1))
        following = []
        for runner in self.runners:
            following.append(runner.pending[0][1] if runner.pending else runner.observation)
        policy.set_training_mode(False)
        with torch.no_grad():
            values, log_probs, entropy = policy.evaluate_actions(observations, actions)
            last_values = policy.predict_values(torch.from_numpy(self.scaled(np.stack(following))))
        buffer.values[:] = values.numpy().reshape(buffer.values.shape)
        buffer.log_probs[:] = log_probs.numpy().reshape(buffer.log_probs.shape)
        self.last = (last_values, np.array([runner.starts for runner in self.runners]))
        return float(entropy.mean())


def action_logits(policy, observations: np.ndarray) -> np.ndarray:
    """float32 [B, actions] of a stable-baselines3 MlpPolicy for observations float32 [B, O]."""
    inputs = torch.from_numpy(np.ascontiguousarray(observations))
    with torch.no_grad():
        return policy.action_net(policy.mlp_extractor.forward_actor(inputs)).numpy()


class SegmentRollouts:
    """Mixin for stable-baselines3's PPO: our rollouts, and a row of a curve per update.

    A mixin, because the library is imported only for training (`build_ppo`).
    """

    def attach(
        self, rollouts: Rollouts, task: Task, state: State, add_row: Callable[[dict], None]
    ) -> None:
        self.rollouts = rollouts
        self.task = task
        self.state = state
        self.add_row = add_row
        self._last_obs = ()  # otherwise `learn` resets environments that are never used

    def collect_rollouts(self, env, callback, rollout_buffer, n_rollout_steps) -> bool:
        state = self.state
        config = self.config
        reward = self.task.reward
        # 1. the rollout
        self.rollouts.scale = state.observations.scale() if config.normalise_observations else None
        if self.task.adapt_rate:
            reward = dataclasses.replace(reward, rate=state.rate(reward.rate))
        self.row = self.rollouts.fill(self.policy, rollout_buffer, reward)
        self.row["rate"] = reward.rate
        state.note_rate(self.row["new_tok"], self.row["time"])
        # 2. rewards and returns
        if config.normalise_reward:
            state.rewards.add(rollout_buffer.rewards.reshape(-1, 1))
            rollout_buffer.rewards /= state.rewards.scale()[1]
        rollout_buffer.compute_returns_and_advantage(*self.rollouts.last)
        # 3. moments of the raw observations
        if config.normalise_observations:
            mean, deviation = self.rollouts.scale
            rows = rollout_buffer.observations.reshape(-1, len(mean))
            state.observations.add(rows * deviation + mean)
        self._begun_at = self.num_timesteps
        self.num_timesteps = min(config.total_steps, self.num_timesteps + config.n_steps)
        return True

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        """Of the whole training, not of this segment, and at the rollout's middle."""
        middle = (self._begun_at + num_timesteps) / 2
        super()._update_current_progress_remaining(middle, self.config.total_steps)

    def train(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():  # a live pair runs without gradients
            super().train()
        row = {"steps": self.num_timesteps, **self.row}
        row["tok_per_ms"] = row["new_tok"] / row["total_ms"]
        for name in LOGGED:
            row[name] = float(self.logger.name_to_value[f"train/{name}"])
        self.add_row({**row, "score": math.nan})


def build_ppo(make_env, config: PPOConfig, envs: int, seed: int):
    """stable-baselines3's PPO with `SegmentRollouts`; its own environments only define shapes."""
    # imported only for training: it takes seconds
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import Logger

    class SegmentPPO(SegmentRollouts, PPO):
        """PPO, one segment per call of `learn`."""

    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[config.activation]
    widths = {"pi": list(config.pi), "vf": list(config.vf)}
    words = np.random.SeedSequence((seed, 0, 1)).generate_state(2)
    with generators(*words.tolist()):
        model = SegmentPPO(
            "MlpPolicy",
            make_vec_env(make_env, envs, seed),
            learning_rate=lambda remaining: learning_rate(config, 1 - remaining),
            n_steps=config.n_steps // envs,
            batch_size=config.batch_size,
            n_epochs=config.n_epochs,
            clip_range=config.clip_range,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            ent_coef=config.ent_coef,
            vf_coef=config.vf_coef,
            max_grad_norm=MAX_GRAD_NORM,
            policy_kwargs={"net_arch": widths, "activation_fn": activation},
            seed=seed,
            device="cpu",
        )
    model.config = config
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def learning_rate(config: PPOConfig, progress: float) -> float:
    """Linear warm-up from 0, then constant or linear to 0 at the end. progress: 0 to 1."""
    if progress < config.warmup_frac:
        return config.learning_rate * (progress / config.warmup_frac)
    if not config.linear_decay:
        return config.learning_rate
    return config.learning_rate * ((1 - progress) / (1 - config.warmup_frac))


def export(policy, activation: str, scale=None) -> Network:
    """The actor of a stable-baselines3 MlpPolicy as a numpy Network.

    scale (mean, deviation) moves into its first layer, so that it reads raw observations:
    W / deviation and b - W (mean / deviation).
    """
    layers = [*policy.mlp_extractor.policy_net, policy.action_net]
    weights = []
    biases = []
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            weights.append(layer.weight.detach().double().numpy())
            biases.append(layer.bias.detach().double().numpy())
    if scale is not None:
        weights[0] = weights[0] / scale[1]
        biases[0] = biases[0] - weights[0] @ scale[0]
    return Network(weights, biases, activation)


def _hash_of(network: Network) -> str:
    content = b"".join(array.tobytes() for array in network.arrays().values())
    return hashlib.sha256(content).hexdigest()


class RunningMoments:
    """Mean and variance of `width` numbers over all rows so far.

    Unlike stable-baselines3's RunningMeanStd it starts at no rows, not at 0.0001 rows of mean 0
    and variance 1.
    """

    def __init__(self, width: int):
        self.count = 0
        self.mean = np.zeros(width)
        self.squares = np.zeros(width)

    def add(self, rows: np.ndarray) -> None:
        """Add rows [N, width] (Chan, Golub and LeVeque's merging of two sets)."""
        rows = rows.astype(np.float64)
        mean = rows.mean(0)
        total = self.count + len(rows)
        apart = np.square(mean - self.mean) * self.count * len(rows) / total
        self.squares = self.squares + np.square(rows - mean).sum(0) + apart
        self.mean = self.mean + (mean - self.mean) * len(rows) / total
        self.count = total

    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation, float32 [width] each; 0 and 1 before any row; 1 for constants."""
        variance = self.squares / max(1, self.count)
        deviation = np.where(variance > 1e-8, np.sqrt(variance), 1.0)
        return self.mean.astype(np.float32), deviation.astype(np.float32)

    def state_dict(self) -> dict:
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict) -> None:
        self.count = int(state["count"])
        self.mean = state["mean"].numpy()
        self.squares = state["squares"].numpy()


class State:
    """Running moments, the recent throughput, and the network to keep.

    rate_sums: tokens and time of recent rollouts.
    """

    def __init__(self, learner: Learned):
        self.observations = RunningMoments(learner.observation_size)
        self.rewards = RunningMoments(1)
        self.activation = learner.activation
        self.rate_sums = [0.0, 0.0]
        self.best = Best()

    def rate(self, least: float) -> float:
        """Recent tokens per unit of time, but at least `least`, which a constant reaches."""
        tokens, spent = self.rate_sums
        return max(least, tokens / spent) if spent else least

    def note_rate(self, tokens: float, spent: float) -> None:
        earlier_tokens, earlier = self.rate_sums
        self.rate_sums = [RATE_MEMORY * earlier_tokens + tokens, RATE_MEMORY * earlier + spent]

    def keep(self, network: Network, score: float | None) -> float:
        """Keep the network if it is the best, or the newest without scores. The score, or NaN."""
        weights = {name: torch.from_numpy(array) for name, array in network.arrays().items()}
        self.best.consider(weights, score)
        return math.nan if score is None else score

    @property
    def network(self) -> Network | None:
        """The kept network."""
        if not self.best.weights:
            return None
        arrays = {name: tensor.numpy() for name, tensor in self.best.weights.items()}
        return Network.from_arrays(arrays, self.activation)

    @property
    def best_score(self) -> float | None:
        return self.best.score if math.isfinite(self.best.score) else None

    def state_dict(self) -> dict:
        tensors = {"rate_sums": torch.tensor(self.rate_sums, dtype=torch.float64)}
        for part in ("observations", "rewards", "best"):
            for name, tensor in getattr(self, part).state_dict().items():
                tensors[f"{part}.{name}"] = tensor
        return tensors

    def load_state_dict(self, tensors: dict) -> None:
        restore(
            tensors, {name: getattr(self, name) for name in ("observations", "rewards", "best")}
        )
        self.rate_sums = tensors["rate_sums"].tolist()
