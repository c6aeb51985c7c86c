"""PPO for any learned policy: our rollouts, stable-baselines3's networks and update, exact resume.

`iteration` is PPO's loop (Schulman et al. 2017): act, estimate advantages, update. A training
consists of segments of some iterations, with a checkpoint after each. A segment opens new
environments and seeds all randomness with (seed, segment), so a killed run continues at its last
segment and ends with the same weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specdec import runs
from specdec.core.records import Cycle
from specdec.errors import SpecdecError
from specdec.models.pairs import describe_pair
from specdec.policies.base import Learned, Network, PPOConfig
from specdec.training import loop
from specdec.training.env import Environment, LiveSource, ReplaySource, Reward, Task

MAX_GRAD_NORM = 0.5  # stable-baselines3's default
RATE_MEMORY = 0.8  # weight of earlier rollouts in the throughput of "lagrangian"
PATIENCE = 500  # decisions without a transition before training gives up


@dataclass(frozen=True)
class RunOptions:
    """Where and how a training runs. start_from: another run's folder, whose weights it takes."""

    out_dir: Path | str
    seed: int = 0
    envs: int = 8
    segment_steps: int = 8192  # decisions between two checkpoints
    start_from: Path | str | None = None
    trained_for: dict = dataclasses.field(default_factory=dict)  # stored in the policy
    progress: bool = True
    resume: bool = True


@loop.undisturbed()
def train_policy(
    learner: Learned, task: Task, ppo: PPOConfig, options: RunOptions, judge=None
) -> Learned:
    """Train `learner` and return it with its network; the same call continues a stopped run.

    judge: policy -> its score after each segment; the best is kept in place of the last.
    """
    # 1. networks, running moments, and the run on disk
    assert isinstance(task.source, ReplaySource) or options.envs == 1, "one live text at a time"
    seed = options.seed
    model = build_ppo(learner, ppo, options.envs, seed)
    state = fresh_state(learner.observation_size)
    best = loop.Best()
    segment_steps = ppo.n_steps * max(1, round(options.segment_steps / ppo.n_steps))
    settings = {**_settings(learner, task, options), "ppo": ppo, "judge": judge is not None}
    settings["steps"] = math.ceil(ppo.total_steps / segment_steps)
    run = loop.TrainingRun(options.out_dir, settings, options.resume, "curve")
    # 2. they begin fresh, with those of another run, or where this one stopped
    optimizers = [model.policy.optimizer]
    if options.start_from is not None:
        tensors = loop.read_checkpoint(Path(options.start_from) / "checkpoint.safetensors")[1]
        parts = {"policy": model.policy, "state.observations": state.observations}
        loop.restore(tensors, parts, optimizers)
    run.track({"policy": model.policy, "state": state, "best": best}, optimizers)

    # 3. segments of several iterations
    def segment(number: int, _) -> None:
        first = number * segment_steps
        end = min(first + segment_steps, ppo.total_steps)
        words = np.random.SeedSequence((seed, number + 1, 1)).generate_state(2)
        with loop.generators(*words.tolist()):
            with closing(Rollouts(learner, task, options, number)) as rollouts:
                for steps in range(first, end, ppo.n_steps):
                    run.add(iteration(model, rollouts, state, ppo, steps))
        learner.network = export(model.policy, learner.activation, rollouts.scale)
        score = None if judge is None else float(judge(learner))
        run.rows[-1]["score"] = math.nan if score is None else score
        arrays = learner.network.arrays()
        best.consider({name: torch.from_numpy(array) for name, array in arrays.items()}, score)

    label = f"{type(learner).__name__}, seed {seed}"
    run.run(segment, label, all_or_nothing=True, progress=options.progress)
    # 4. the kept network
    arrays = {name: tensor.numpy() for name, tensor in best.weights.items()}
    learner.network = Network.from_arrays(arrays, learner.activation)
    facts = {"seed": seed, "steps": ppo.total_steps, "ppo": dataclasses.asdict(ppo)}
    learner.trained_for = {**facts, **options.trained_for}
    run.finish(weights=_hash_of(learner.network))
    return learner


def iteration(model, rollouts: Rollouts, state, config: PPOConfig, steps: int) -> dict:
    """One iteration of PPO after `steps` decisions; returns its row of the curve."""
    buffer = model.rollout_buffer
    reward = rollouts.task.reward
    # 1. act
    rollouts.scale = state.observations.scale()
    tokens, spent = state.rate_sums.tolist()
    if reward.kind == "lagrangian" and spent:
        # a constant reaches the reward's own rate
        reward = dataclasses.replace(reward, rate=max(reward.rate, tokens / spent))
    row = rollouts.fill(model.policy, buffer, reward)
    latest = torch.tensor([row["new_tok"], row["time"]], dtype=torch.float64)
    state.rate_sums = RATE_MEMORY * state.rate_sums + latest
    # 2. advantages: A_t = sum over l of (gamma * lambda)^l delta_(t+l), where
    # delta_t = r_t + gamma * V(s_(t+1)) - V(s_t); returns R_t = A_t + V(s_t)
    if config.normalise_reward:
        state.rewards.add(buffer.rewards.reshape(-1, 1))
        buffer.rewards /= state.rewards.scale()[1]
    buffer.compute_returns_and_advantage(*rollouts.following)
    if config.normalise_observations:
        mean, deviation = rollouts.scale
        raw = buffer.observations.reshape(-1, len(mean)) * deviation + mean
        state.observations.add(raw)
    # 3. n_epochs over the buffer in random minibatches
    # loss = -min(ratio * A, clip(ratio, 1 - clip_range, 1 + clip_range) * A)
    #        + vf_coef * (V(s) - R)^2 - ent_coef * entropy
    # with ratio = pi(a|s) / pi_old(a|s)
    reached = min(config.total_steps, steps + config.n_steps)
    middle = (steps + reached) / 2  # of the whole training, for the learning rate
    model._current_progress_remaining = 1.0 - middle / config.total_steps
    with torch.inference_mode(False), torch.enable_grad():  # a live pair runs without gradients
        try:
            model.train()
        except ValueError as error:  # torch's distributions refuse logits that are not finite
            raise SpecdecError(loop.DIVERGED) from error
    row |= {"rate": reward.rate, "tok_per_ms": row["new_tok"] / row["total_ms"]}
    return {"steps": reached, **row, "score": math.nan}


class Rollouts:
    """Fills stable-baselines3's rollout buffer from the new environments of a segment.

    scale: mean and deviation, by which observations are normalised. following: what comes after
    the buffer's last row: the critic's values, and whether an episode begins.
    """

    def __init__(self, learner: Learned, task: Task, options: RunOptions, segment: int):
        self.task = task
        self.scale = (np.zeros(1, np.float32), np.ones(1, np.float32))
        self.following: tuple[torch.Tensor, np.ndarray]
        # the run's seed: the same draws in every turn of every environment
        each_turn = options.seed if task.reseed_each_turn else None
        seeds = np.random.SeedSequence((options.seed, segment)).generate_state(options.envs)
        self.envs = [Environment(learner, task, seed, each_turn) for seed in seeds.tolist()]

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def fill(self, policy, buffer, reward: Reward) -> dict:
        """Collect until the buffer is full. Returns means and sums for the curve."""
        # 1. transitions; environments whose column is full wait
        buffer.reset()
        finished: list[Cycle] = []
        for column, env in enumerate(self.envs):
            env.filled = 0
            self._take(env, column, buffer, reward)
        idle = 0
        room = buffer.buffer_size
        while active := [n for n, env in enumerate(self.envs) if env.filled < room]:
            observations = np.stack([self.envs[column].observation for column in active])
            with torch.no_grad():
                inputs = torch.from_numpy(self.scaled(observations))
                logits = policy.action_net(policy.mlp_extractor.forward_actor(inputs))
            loop.check_finite([logits])
            idle += 1
            for column, row in zip(active, logits.numpy(), strict=True):
                env = self.envs[column]
                finished += env.step(env.draw(row))
                if self._take(env, column, buffer, reward):
                    idle = 0
            if idle > PATIENCE:
                why = "too few transitions to learn from: turns end before their first interval"
                raise SpecdecError(f"{why}; shorten the interval or use longer turns.")
        buffer.pos = buffer.buffer_size
        buffer.full = True
        # 2. values and log-probabilities, in one forward
        shape = buffer.values.shape
        observations = torch.from_numpy(buffer.observations.reshape(-1, *buffer.obs_shape))
        actions = torch.from_numpy(buffer.actions.reshape(-1))
        following, starts = zip(*(env.following for env in self.envs), strict=True)
        policy.set_training_mode(False)
        with torch.no_grad():
            values, log_probs, entropy = policy.evaluate_actions(observations, actions)
            following = torch.from_numpy(self.scaled(np.stack(following)))
            last_values = policy.predict_values(following)
        buffer.values[:] = values.numpy().reshape(shape)
        buffer.log_probs[:] = log_probs.numpy().reshape(shape)
        self.following = (last_values, np.array(starts))
        # 3. sums for the curve
        return {
            "reward": float(buffer.rewards.mean()),
            "entropy": float(entropy.mean()),
            "new_tok": sum(row.kept_tok for row in finished),
            "total_ms": sum(row.total_ms for row in finished),
            "time": reward.time(finished),
        }

    def scaled(self, observations: np.ndarray) -> np.ndarray:
        return (observations - self.scale[0]) / self.scale[1]

    def _take(self, env: Environment, column: int, buffer, reward: Reward) -> bool:
        """Move pending transitions into the column while there is room; whether any."""
        before = env.filled
        while env.pending and env.filled < buffer.buffer_size:
            action, observation, rows, starts = env.pending.popleft()
            place = (env.filled, column)
            buffer.observations[place] = self.scaled(observation)
            buffer.actions[place] = action
            buffer.rewards[place] = reward(rows)
            buffer.episode_starts[place] = starts
            env.filled += 1
        return env.filled > before


def build_ppo(learner: Learned, config: PPOConfig, envs: int, seed: int):
    """stable-baselines3's PPO, whose own environments only state shapes."""
    if envs < 1 or config.n_steps % envs:
        why = f"n_steps={config.n_steps} must divide among envs={envs}"
        raise SpecdecError(f"{why}; choose a divisor.")
    # imported only for training: they take seconds
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import Logger

    class Shapes(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (learner.observation_size,))
        action_space = gymnasium.spaces.Discrete(learner.actions)

    names = "batch_size n_epochs clip_range gamma gae_lambda ent_coef vf_coef".split()
    settings = {name: getattr(config, name) for name in names}
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[config.activation]
    widths = {"pi": list(config.pi), "vf": list(config.vf)}
    model = PPO(
        "MlpPolicy",
        make_vec_env(Shapes, envs),
        learning_rate=lambda remaining: learning_rate(config, 1 - remaining),
        n_steps=config.n_steps // envs,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs={"net_arch": widths, "activation_fn": activation},
        seed=seed,
        device="cpu",
        **settings,
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def learning_rate(config: PPOConfig, progress: float) -> float:
    """Linear warm-up from 0, then constant or linear to 0 at the end. progress: 0 to 1."""
    rise = progress / config.warmup_frac if config.warmup_frac else 1.0
    fall = (1 - progress) / (1 - config.warmup_frac) if config.linear_decay else 1.0
    return config.learning_rate * min(1.0, rise, fall)


def export(policy, activation: str, scale: tuple[np.ndarray, np.ndarray]) -> Network:
    """The actor of a stable-baselines3 MlpPolicy as a numpy Network.

    scale (mean, deviation) moves into its first layer, so that it reads raw observations.
    """
    layers = [*policy.mlp_extractor.policy_net, policy.action_net]
    # every second one is an activation
    weights = [layer.weight.detach().double().numpy() for layer in layers[::2]]
    biases = [layer.bias.detach().double().numpy() for layer in layers[::2]]
    weights[0] = weights[0] / scale[1]
    biases[0] = biases[0] - weights[0] @ scale[0]
    return Network(weights, biases, activation)


class RunningMoments(torch.nn.Module):
    """Mean and variance of `width` numbers over all rows so far, in float64."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(width, dtype=torch.float64))

    def add(self, rows: np.ndarray) -> None:
        """Add rows [N, width] (Chan, Golub and LeVeque's merging of two sets)."""
        rows = rows.astype(np.float64)
        count = int(self.count)
        total = count + len(rows)
        before = self.mean.numpy()
        mean = rows.mean(0)
        apart = np.square(mean - before) * count * len(rows) / total
        squares = self.squares.numpy() + np.square(rows - mean).sum(0) + apart
        self.squares = torch.from_numpy(squares)
        self.mean = torch.from_numpy(before + (mean - before) * len(rows) / total)
        self.count = torch.tensor(total)

    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation, float32 [width] each; 0 and 1 before any row; 1 for constants."""
        variance = self.squares.numpy() / max(1, int(self.count))
        deviation = np.where(variance > 1e-8, np.sqrt(variance), 1.0)
        return self.mean.numpy().astype(np.float32), deviation.astype(np.float32)


def fresh_state(observation_size: int) -> torch.nn.Module:
    """Running moments of `observations` and `rewards`, and tokens and time of recent rollouts."""
    state = torch.nn.Module()
    state.observations = RunningMoments(observation_size)
    state.rewards = RunningMoments(1)
    state.register_buffer("rate_sums", torch.zeros(2, dtype=torch.float64))
    return state


def _hash_of(network: Network) -> str:
    content = b"".join(array.tobytes() for array in network.arrays().values())
    return hashlib.sha256(content).hexdigest()


def _settings(learner: Learned, task: Task, options: RunOptions) -> dict:
    """What the weights depend on beside PPO's settings."""
    names = ("seed", "envs", "segment_steps", "trained_for")
    settings = {name: getattr(options, name) for name in names}
    settings["learner"] = [type(learner).__name__, learner.settings()]
    settings["task"] = {name: _described(part) for name, part in vars(task).items()}
    # later rounds begin with the weights of an earlier one
    if options.start_from is not None:
        plan = runs.read_json(Path(options.start_from) / "plan.json")
        settings["start_from"] = plan["results"]["weights"]
    return settings


def _described(part):
    """What results depend on: hashes of recordings, costs and networks; names of functions."""
    if isinstance(part, ReplaySource):
        columns = ["suite", "prompt", "turn", "part", "first", "positions"]
        turns = part.trace.turns[columns].to_dict("list")
        priced = {"costs": part.costs, "policy_ms": part.policy_ms}
        return runs.content_key(header=part.trace.header, turns=turns, **priced)
    if isinstance(part, LiveSource):
        decoding = [part.max_new_tokens, part.policy_ms]
        pair = describe_pair(part.pair)
        return runs.content_key(pair=pair, prompts=part.prompts, decoding=decoding)
    if isinstance(part, Learned):
        return [type(part).__name__, part.settings(), _hash_of(part.network)]
    if isinstance(part, str | bool | Reward):
        return part
    return getattr(part, "__qualname__", type(part).__name__)
