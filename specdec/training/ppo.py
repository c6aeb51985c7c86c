"""PPO for any learned policy: stable-baselines3's networks and updates, our rollouts, exact resume, export to numpy.

A run is cut into segments (see `rollouts`); after each, weights, optimiser, counters and statistics go into one
safetensors file. Killed and called again it continues at the last segment and ends with the same weights, bit for bit
on one machine. Knows nothing about which system it trains. (Design, section 5.)
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.policies.base import COLLAPSED_FRAC, Learned, Network, PPOConfig
from specdec.training.env import EPISODES, Env, ReplaySource, Reward
from specdec.training.loop import open_plan
from specdec.training.rollouts import (
    DECIDED,
    Credit,
    Moments,
    Rollouts,
    Walker,
    answers_of,
    credit_for,
    export,
    model_of,
    seeded_all,
)

SEGMENT_STEPS = 8192  # decisions between two checkpoints
_JUDGED = 2048  # decisions of the trained policy that the histogram of its answers counts; no more than it learned from
_RATE_MEMORY = 0.8  # how much of the earlier rollouts stays in the throughput that "lagrangian" is measured against
LOGGED = ("learning_rate", "value_loss", "approx_kl", "clip_fraction", "explained_variance")


@dataclass(frozen=True)
class Task:
    """What a policy learns on, and what for.

    source: a ReplaySource, a function that makes a source, or a LiveSource (then envs=1, and times do not repeat).
    reward: of the cycles a decision led to. episode: "cycle", "interval" or "turn", what ends one.
    others: a policy that answers the other kinds (each environment gets a copy), or others(seed) -> policy.
    credit: what a decision earns (`rollouts.Credit`), by default one transition per decision.
    adapt_rate: with reward "lagrangian", measure against the throughput of recent rollouts (Dinkelbach's iteration), and
    never against less than reward.rate. reseed_each_turn: exploration draws the same random numbers in every turn.
    """

    source: object
    reward: Reward = Reward()  # noqa: RUF009  frozen
    episode: str = "cycle"
    others: object = None
    credit: Credit | None = None
    adapt_rate: bool = False
    reseed_each_turn: bool = False


@dataclass(frozen=True)
class RunOptions:
    """Where and how a training runs.

    envs: environments answered side by side. segment_steps: decisions between two checkpoints.
    start_from: another run's folder, whose weights and optimiser are taken over.
    trained_for: facts the policy carries. resume: False starts over in a folder that holds a run.
    """

    out_dir: Path
    seed: int = 0
    envs: int = 8
    segment_steps: int = SEGMENT_STEPS
    start_from: Path | None = None
    trained_for: dict = dataclasses.field(default_factory=dict)
    progress: bool = True
    resume: bool = True


def train_policy(
    learner: Learned, task: Task, ppo: PPOConfig, options: RunOptions, judge: Callable[[Learned], float] | None = None
) -> Learned:
    """Train `learner` and return it with its network; policy/, curve.parquet and answers.parquet go into options.out_dir.

    judge: score of the policy after each segment; the best is kept instead of the last. The same call continues a run
    that was stopped and returns at once where it is finished. Warns where the policy collapsed to a constant.
    SpecdecError for settings that cannot be, or a folder with another run.
    """
    _check(learner, task, ppo, options)
    out_dir, seed, plan = Path(options.out_dir), options.seed, _plan(learner, task, ppo, options, judge is not None)
    credit = task.credit or credit_for(task.episode)
    rollouts = Rollouts(_env_maker(learner, task), options.envs, credit, task.reseed_each_turn)
    run = _Run(learner, rollouts, task.reward, ppo, seed, out_dir, options.start_from)
    per_segment = max(1, round(options.segment_steps / ppo.n_steps))
    run.train(task.adapt_rate, judge, per_segment, options.progress and not plan["finished"])
    learner.network = run.network()
    facts = {"seed": seed, "steps": run.state["steps"], "ppo": dataclasses.asdict(ppo)}
    learner.trained_for = {**facts, **options.trained_for}
    learner.save(out_dir / "policy")
    results = plan["results"] if plan["finished"] else run.results()
    runs.write_json(out_dir / "plan.json", {**plan, "finished": True, "results": results})
    if results["most_common_frac"] >= COLLAPSED_FRAC:
        warnings.warn(
            f"this {type(learner).__name__} gave the answer {tuple(results['most_common'])} in "
            f"{results['most_common_frac']:.1%} of cycles: it collapsed to a constant; try another seed, more entropy "
            "(ent_coef) or more steps.",
            stacklevel=2,
        )
    return learner


def _check(learner: Learned, task: Task, ppo: PPOConfig, options: RunOptions) -> None:
    if task.episode not in EPISODES:
        raise nearest_name_error("episode", task.episode, EPISODES)
    if ppo.activation != learner.activation:
        raise SpecdecError(
            f"PPO trains a {ppo.activation} network, but the policy runs {learner.activation}; give both the same."
        )
    if options.envs < 1 or ppo.n_steps % options.envs:
        raise SpecdecError(f"n_steps={ppo.n_steps} must divide among envs={options.envs}; choose a divisor.")
    if not isinstance(task.source, ReplaySource) and not callable(task.source) and options.envs > 1:
        raise SpecdecError("one live source decodes one text at a time; pass envs=1 or a function that makes a source.")
    if task.reward.kind == "lagrangian" and not task.reward.rate > 0:
        raise SpecdecError('reward "lagrangian" needs rate, for example the throughput of a static tree.')


def _plan(learner: Learned, task: Task, ppo: PPOConfig, options: RunOptions, judged: bool) -> dict:
    described = {name: _described(getattr(task, name)) for name in ("source", "others", "credit")}
    start_from = options.start_from and runs.read_json(Path(options.start_from) / "plan.json")["results"]["weights"]
    settings = {
        "learner": [type(learner).__name__, learner.settings()],
        "task": {**{field.name: getattr(task, field.name) for field in dataclasses.fields(task)}, **described},
        "ppo": ppo,
        "seed": options.seed,
        "envs": options.envs,
        "segment_steps": options.segment_steps,
        "judge": judged,
        "trained_for": options.trained_for,
        "start_from": start_from,
        "steps": ppo.total_steps,
        "minutes": None,
    }
    return open_plan(Path(options.out_dir), settings, options.resume)


def _env_maker(learner: Learned, task: Task) -> Callable[[int], Env]:
    def make(seed: int) -> Env:
        source = task.source
        if isinstance(source, ReplaySource):
            source = ReplaySource(source.trace, source.costs, source.policy_ms)
        elif callable(source):
            source = source()
        others = task.others(seed) if callable(task.others) else copy.deepcopy(task.others)
        return Env(copy.deepcopy(learner), source, others, task.reward, task.episode)

    return make


def _described(what):
    """What a result depends on, as JSON: hashes of recordings, costs and networks; names of functions."""
    if isinstance(what, ReplaySource):
        turns = what.trace.turns[["suite", "prompt", "turn", "part", "first", "positions"]].to_dict("list")
        return runs.content_key(header=what.trace.header, turns=turns, costs=what.costs, policy_ms=what.policy_ms)
    if isinstance(what, Learned):
        return [type(what).__name__, what.settings(), what.network and _hash_of(what.network)]
    return getattr(what, "__qualname__", None) or (None if what is None else type(what).__name__)


class _Run:
    """One run: stable-baselines3's PPO, the rollouts, and `state`, all else that a checkpoint holds, as JSON types."""

    def __init__(self, learner, rollouts: Rollouts, reward: Reward, ppo: PPOConfig, seed, out_dir, start_from):
        self.learner, self.rollouts, self.reward, self.ppo, self.seed = learner, rollouts, reward, ppo, seed
        self.out_dir, self.total_steps = out_dir, ppo.total_steps
        self.model = model_of(lambda: rollouts.make_env(seed), ppo, rollouts.count, seed)
        self.best: Network | None = None
        state = {"segment": 0, "steps": 0, "elapsed_s": 0.0, "curve": [], "rate_sums": [0.0, 0.0], "best_score": None}
        state |= {"rewards": Moments.new(1).state, "seen": Moments.new(learner.observation_size).state}
        if self.checkpoint.is_file():
            self._load(self.checkpoint)
        elif start_from is not None:
            self._load(Path(start_from) / "checkpoint.safetensors")
            self.best, self.state = None, {**state, "seen": self.state["seen"]}
        else:
            self.state = state

    @property
    def checkpoint(self) -> Path:
        return self.out_dir / "checkpoint.safetensors"

    def train(self, adapt_rate: bool, judge, rollouts_each: int, progress: bool) -> None:
        """Segment after segment to the last step, a checkpoint after each."""
        label = f"{type(self.learner).__name__}, seed {self.seed}"
        with tqdm(
            initial=self.state["steps"], total=self.total_steps, desc=label, unit="step", disable=not progress
        ) as bar:
            while self.state["steps"] < self.total_steps:
                with seeded_all(self.seed, self.state["segment"]):
                    self.rollouts.open(self.seed, self.state["segment"])
                    for _ in range(rollouts_each):
                        if self.state["steps"] < self.total_steps:
                            self._rollout(adapt_rate, bar)
                self.rollouts.close()
                self._judge(judge)
                self.state["segment"] += 1
                self._save()

    def _rollout(self, adapt_rate: bool, bar) -> None:
        state, model, buffer, began = self.state, self.model, self.model.rollout_buffer, time.perf_counter()
        seen = Moments(state["seen"]) if self.ppo.normalise_observations else None
        self.rollouts.scale = seen and seen.scale()
        reward = dataclasses.replace(self.reward, rate=self._rate()) if adapt_rate else self.reward
        found = self.rollouts.fill(model.policy, buffer, reward)
        if self.ppo.normalise_reward:
            rewards = Moments(state["rewards"])
            rewards.add(buffer.rewards.reshape(-1, 1))
            buffer.rewards /= rewards.scale()[1]
        buffer.compute_returns_and_advantage(*self.rollouts.last)
        if seen is not None:
            mean, deviation = self.rollouts.scale
            seen.add(buffer.observations.reshape(-1, len(mean)) * deviation + mean)
        done = min(self.total_steps, state["steps"] + self.ppo.n_steps)
        model._current_progress_remaining = 1 - (state["steps"] + done) / 2 / self.total_steps  # a rollout's middle
        with torch.inference_mode(False), torch.enable_grad():  # a live pair runs without gradients
            model.train()
        sums = zip(state["rate_sums"], (found["new_tok"], found["time"]), strict=True)
        state |= {"steps": done, "rate_sums": [_RATE_MEMORY * old + new for old, new in sums]}
        state["elapsed_s"] += time.perf_counter() - began
        logged = {name: float(model.logger.name_to_value[f"train/{name}"]) for name in LOGGED}
        found |= {"tok_per_ms": found["new_tok"] / found["total_ms"], "rate": reward.rate, **logged}
        state["curve"].append({"steps": done, **found, "score": None, "elapsed_s": state["elapsed_s"]})
        bar.set_postfix({name: f"{found[name]:.3g}" for name in ("reward", "entropy", "tok_per_ms")}, refresh=False)
        bar.update(done - bar.n)

    def _rate(self) -> float:
        """Tokens per unit of time lately, but never less than what a constant reaches (the rate that was given)."""
        tokens, spent = self.state["rate_sums"]
        return max(self.reward.rate, tokens / spent) if spent else self.reward.rate

    def _judge(self, judge) -> None:
        if judge is None:
            return
        network = self._latest()
        self.learner.network = network
        score = self.state["curve"][-1]["score"] = float(judge(self.learner))
        if self.state["best_score"] is None or score > self.state["best_score"]:
            self.best, self.state["best_score"] = network, score

    def _latest(self) -> Network:
        return export(self.model.policy, self.learner.activation, self.rollouts.scale)

    def network(self) -> Network:
        """The best one where a judge chose, else the last."""
        return self.best or self._latest()

    def results(self) -> dict:
        """What the trained policy answers, and how fast it decodes, on the training text; answers.parquet beside it."""
        seed = int(np.random.SeedSequence((self.seed, 1 << 30)).generate_state(1)[0])
        walker, network = Walker(self.rollouts.make_env(seed), 0, seed, lambda _: [], None), self.network()
        counts, tokens, total_ms = Counter(), 0, 0.0
        for _ in range(min(_JUDGED, self.total_steps)):
            rows = walker.step(int(network(walker.observation).argmax()))
            counts.update(answers_of(self.learner.kind, walker.outcome.rows))
            tokens, total_ms = tokens + sum(r.new_tok for r in rows), total_ms + sum(r.total_ms for r in rows)
        walker.env.close()
        answers = pd.DataFrame(list(counts), columns=DECIDED[self.learner.kind]).assign(cycles=list(counts.values()))
        runs.write_table(self.out_dir / "answers.parquet", answers.sort_values("cycles", ascending=False))
        common, cycles = counts.most_common(1)[0]
        return {
            "steps": self.state["steps"],
            "elapsed_s": self.state["elapsed_s"],
            "tok_per_ms": tokens / total_ms,
            "answers": len(counts),
            "most_common": list(common),
            "most_common_frac": cycles / sum(counts.values()),
            "best_score": self.state["best_score"],
            "weights": _hash_of(network),
        }

    # ---- the checkpoint ----------------------------------------------------------------------------------------------
    def _save(self) -> None:
        """checkpoint.safetensors (weights, optimiser, best network; the rest as JSON in it) and curve.parquet."""
        from safetensors.torch import save_file

        tensors = {f"policy.{name}": value for name, value in self.model.policy.state_dict().items()}
        for index, moments in self.model.policy.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in moments.items()}
        if self.best is not None:
            tensors |= {f"best.{name}": torch.from_numpy(array) for name, array in self.best.arrays().items()}
        if self.rollouts.scale is not None:
            tensors |= {f"scale.{i}": torch.from_numpy(part) for i, part in enumerate(self.rollouts.scale)}
        with runs.atomic(self.checkpoint) as temporary:
            save_file(
                {name: value.contiguous() for name, value in tensors.items()},
                temporary,
                metadata={"state": json.dumps(self.state)},
            )
        runs.write_table(self.out_dir / "curve.parquet", pd.DataFrame(self.state["curve"]))

    def _load(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as stored:
                self.state = json.loads(stored.metadata()["state"])
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        except (OSError, SafetensorError) as error:
            raise SpecdecError(f"{path} cannot be read ({error}); pass resume=False to start over.") from error
        self.model.policy.load_state_dict(_below(tensors, "policy."))
        optimizer, state = self.model.policy.optimizer, {}
        for name, value in _below(tensors, "optimizer.").items():
            index, field = name.split(".", 1)
            state.setdefault(int(index), {})[field] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        best = {name: value.numpy() for name, value in _below(tensors, "best.").items()}
        self.best = Network.from_arrays(best, self.learner.activation) if best else None
        scale = _below(tensors, "scale.")
        self.rollouts.scale = tuple(scale[name].numpy() for name in sorted(scale)) or None


def _hash_of(network: Network) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in network.arrays().values())).hexdigest()


def _below(tensors: dict, prefix: str) -> dict:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
