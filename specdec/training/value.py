"""Trains our controller on a recording: exact targets for every answer, no exploration noise.

    replay: where do cycles start?  ->  fit an ensemble  ->  distil it  ->  calibrate the rate

Cycle starts are collected first under a static tree with random detours, then under the policy
itself (DAgger, Ross et al. 2011). The rate is raised to the throughput reached (Dinkelbach 1967).
It takes a minute, so runs are not resumable.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.linalg
import torch
from torch import nn
from tqdm.auto import trange

from specdec import runs
from specdec.core.policy import Policy, Static
from specdec.core.records import SIZE, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.calibrate import measured_answer_ms
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_number
from specdec.policies import value as controller
from specdec.policies.base import chose
from specdec.policies.value import AcceptanceModel, ValueConfig, ValuePolicy
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import best_static
from specdec.replays.trace import NEVER, Trace
from specdec.training.loop import Best, check_finite, descend, undisturbed

# Chosen after learning, in this order: when the model is evaluated, and the bonus for continuing.
SCHEDULES = (
    [{"first_evaluation": n, "stride": m} for n, m in itertools.product((0, 1, 2), (1, 2, 3))],
    [{"continue_bonus_tok": bonus} for bonus in (-0.1, -0.05, 0.0, 0.05)],
)
DETOURS = 3  # replays per round that leave the policy's path at random
ENSEMBLE = 3  # networks trained separately; one of the same size is distilled from their mean
HELD_OUT_FRAC = 0.15
PATIENCE = 4  # held-out losses without improvement before training stops; one per 100 steps
PROBE_WIDTH = 8


@undisturbed()
def train_value(
    trace: Trace,
    costs: CostModel,
    config: ValueConfig = controller.OURS,
    *,
    start: TreeConfig | None = None,
    tune_on: Trace | None = None,
    seed: int = 0,
    policy_ms: float | None = 0.0,
    pair=None,
    progress: bool = True,
) -> tuple[ValuePolicy, pd.DataFrame]:
    """A priced ValuePolicy for the turns of `trace` (pass its train part), and the curve of its
    training.

    start: the static tree for the first cycle starts (default: at most 24 tokens, depth 5).
    tune_on: turns on which SCHEDULES are tried, default those of training. policy_ms: time of one
    evaluation of the model; None measures it here (in live decoding if the `pair` is given).
    """
    # 1. the policy, as large as the recording, and what acts first
    check_number("policy_ms", policy_ms or 0.0)
    policy = _untrained(trace, config)
    if start is None or not start.verify_nodes:  # plain steps have no tree to learn from
        total = min(24, 1 + pool_size(1, policy.top_k), trace.most_nodes + 1)
        start = TreeConfig(total, min(5, policy.most_expansions), policy.top_k)
    acting: Policy = Static.of(start)
    rate = 1 / replay(trace, acting, costs).ms_per_tok
    # 2. rounds: where cycles start, the acceptance model there, and what time is worth
    starts = []
    curves = []
    for number in range(config.rounds):
        starts.append(cycle_starts(trace, costs, acting, DETOURS, seed + 10 * number))
        rows, histories = map(np.concatenate, zip(*starts, strict=True))
        examples = Examples(trace, policy, rows, histories)
        # policies that only collect starts need not be fast, hence not distilled
        last = number + 1 == config.rounds
        fitted = fit_ensemble(examples, config, seed + 100 * number, progress, distil=last)
        policy.network, curve = fitted
        curves.append(curve.assign(round=number))
        if policy_ms is None:
            policy_ms = evaluation_ms(policy.price(costs, rate), trace, costs, pair)
        policy, rate = calibrate_rate(policy, trace, costs, rate, policy_ms)
        acting = policy
    # 3. the schedule, and what the policy will say of its training
    policy = tune_schedule(policy, trace if tune_on is None else tune_on, costs, policy_ms)
    pair_name = trace.header["pair"]
    policy.trained_for = {"pair": pair_name, "costs": costs.name, "seed": seed, "rate": rate}
    chose(policy, "weights, sizes, probe", "train", f"recipe {config.name!r}, chosen before")
    part = "train" if tune_on is None else "tune"
    chose(policy, "schedule", part, f"{policy.first_evaluation}, {policy.stride}")
    return policy, pd.concat(curves, ignore_index=True)


def _untrained(trace: Trace, config: ValueConfig) -> ValuePolicy:
    recorded = "target" if trace.draft_state is None else "draft"
    probe = config.probe or ("none" if config.plans else recorded)
    for name in controller.PROBES[probe]:
        if getattr(trace, name) is None:
            why = f"this recording holds no {name}"
            raise SpecdecError(f'{why}; record with features=True or pass probe="none".')
    deepest = min(trace.depth_of(config.top_k), config.most_expansions)
    return config.policy(most_expansions=deepest, probe=probe)


def train_recording(
    trace: Trace, costs: CostModel, config: ValueConfig, *, out_dir: Path, seed=0, resume=True
) -> ValuePolicy:
    """Train on the beam of the tree that is fastest at these costs; writes policy and curve.

    Only beams whose whole trees were recorded are considered. resume: it always starts over.
    """
    top_ks = trace.header["trees"]
    if not top_ks:
        why = "this recording keeps no whole trees"
        raise SpecdecError(f"{why}; record again with trees=(4,), for example.")
    tune = trace.select(part="tune")
    totals = range(2, tune.most_nodes + 2)
    start = best_static(tune, costs, total_tokens=totals, top_ks=top_ks, beams=[()])
    config = dataclasses.replace(config, top_k=start.top_k)
    options = {"start": start, "tune_on": tune, "seed": seed, "policy_ms": None}
    policy, curve = train_value(trace.select(part="train"), costs, config, **options)
    runs.write_table(Path(out_dir) / "curve.parquet", curve)
    policy.save(Path(out_dir) / "policy")
    return policy


class _Detours(Policy):
    """`inner`, with few nodes in some cycles, so that the next ones start earlier."""

    def __init__(self, inner: Policy, frac: float, seed: int):
        self.inner = inner
        self.frac = frac
        self.asks = inner.asks | {SIZE}
        self.limits = inner.limits
        self.plan = inner.plan
        self.reset = inner.reset
        self.observe = inner.observe
        self._random = np.random.default_rng(seed)

    def answer(self, question: Question):
        answer = self.inner.plan.verify_nodes
        if question.kind in self.inner.asks:
            answer = self.inner.answer(question)
        if question.kind != SIZE:
            return answer
        if self._random.random() < self.frac:
            answer = int(self._random.integers(0, 5))
        return min(answer, question.largest)


def cycle_starts(trace: Trace, costs: CostModel, policy: Policy, detours: int, seed=0):
    """(rows int64 [Q], histories float32 [Q, 5]) of cycle starts under `policy`.

    Once unchanged, then `detours` times with detours.
    """
    rows: list[int] = []
    histories: list[np.ndarray] = []
    for number in range(detours + 1):
        acting = _Detours(policy, 0.25 if number else 0.0, seed + number)
        turns = replay(trace, acting, costs, keep_cycles=True).rows
        for row, cycles in zip(trace.turns["first"].tolist(), turns, strict=True):
            # a cycle starts at the recorded position after the tokens of those before
            history = controller.NOTHING
            for cycle in cycles:
                rows.append(row)
                histories.append(history)
                row += cycle.new_tok
                history = controller.history_after(history, cycle.accepted_tok, cycle.expansions)
    return np.array(rows), np.stack(histories)


class Examples(NamedTuple):
    """Cycle starts with the model's inputs and targets, in batches."""

    trace: Trace
    policy: ValuePolicy
    rows: np.ndarray
    histories: np.ndarray

    def sample(self, count: int) -> np.ndarray:
        """At most `count` examples, evenly spaced."""
        return np.linspace(0, len(self.rows) - 1, min(count, len(self.rows))).astype(np.int64)

    def batch(self, numbers: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """inputs [B, I], features [B, F] and accepted_tok [B, D + 1, S] after `level` expansions.

        Where the policy plans, the first level is that before the root pass.
        """
        trace = self.trace
        top_k = self.policy.top_k
        rows = self.rows[numbers]
        before = self.policy.inputs.before
        expansions = level - before
        # 1. what the copies offer
        ranks = trace.ranks[top_k][rows]
        copied = ()
        copied_ranks = np.full_like(ranks[:, :1], NEVER)
        if trace.copies:
            copied = trace.column("copied_scores")[rows]
            copied_ranks = trace.column("copied_ranks")[rows][:, None]
        # 2. the inputs
        inputs = self.policy.inputs.begin(trace.context_tok[rows], self.histories[numbers], copied)
        if expansions >= 0:
            scores = trace.column("scores", top_k)[rows, : pool_size(expansions, top_k)]
            inputs = self.policy.inputs.update(inputs, scores, expansions)
        features = np.zeros((len(numbers), 1), np.float32)
        names = controller.PROBES[self.policy.probe]
        if names:
            states = [getattr(trace, name)[rows].astype(np.float32) for name in names]
            features = np.concatenate(states, axis=1)
        # 3. the targets
        if before:
            ranks = np.concatenate((copied_ranks, ranks), 1)
        ranks = ranks[:, : self.policy.inputs.levels]
        sizes = np.array(self.policy.sizes, dtype=np.int16)
        accepted = (ranks[..., None] < sizes).sum(2, dtype=np.int16).astype(np.float32)
        return inputs, features, accepted

    def split(self, frac: float, seed: int) -> tuple[Examples, Examples]:
        """(training, held out). Turns of one prompt stay together."""
        prompts = self.trace.turns["prompt"].to_numpy()
        names = np.random.default_rng(seed).permutation(np.unique(prompts))
        held_out = names[: max(1, round(frac * len(names)))]
        turns = np.searchsorted(self.trace.turns["first"].to_numpy(), self.rows, side="right") - 1
        inside = np.isin(prompts, held_out)[turns]
        learned = self._replace(rows=self.rows[~inside], histories=self.histories[~inside])
        held = self._replace(rows=self.rows[inside], histories=self.histories[inside])
        return learned, held


class Net(nn.Module):
    """The torch version of `policies.value.AcceptanceModel`, with dropout and noise in training.

    inputs, features: (mean, deviation) of its inputs. outputs: the mean answer, its first bias.
    """

    def __init__(self, config: ValueConfig, inputs, features, outputs: np.ndarray, probe: bool):
        super().__init__()
        self.config = config
        self.use_probe = probe
        for name, (mean, deviation) in {"input": inputs, "feature": features}.items():
            self.register_buffer(f"{name}_mean", torch.from_numpy(mean))
            self.register_buffer(f"{name}_deviation", torch.from_numpy(deviation))
        self.probe = nn.Linear(len(features[0]), PROBE_WIDTH)
        self.hidden = nn.Linear(len(inputs[0]) + PROBE_WIDTH, config.hidden)
        self.out = nn.Linear(config.hidden, outputs.size)
        with torch.no_grad():
            self.out.weight.mul_(0.1)
            self.out.bias.copy_(torch.from_numpy(outputs.reshape(-1)))

    def forward(self, inputs, features):
        features = (features - self.feature_mean) / self.feature_deviation
        if self.training:
            noisy = features + self.config.noise * torch.randn_like(features)
            features = nn.functional.dropout(noisy, self.config.dropout)
        state = torch.tanh(self.probe(features))
        if not self.use_probe:
            state = torch.zeros_like(state)
        inputs = (inputs - self.input_mean) / self.input_deviation
        hidden = self.hidden(torch.cat((inputs, state), -1)).relu()
        return self.out(nn.functional.dropout(hidden, self.config.dropout, self.training))

    @torch.no_grad()
    def arrays(self) -> dict[str, np.ndarray]:
        """Weights for raw inputs: the standardisation is folded into the first layers."""
        count = len(self.input_mean)
        tree = self.hidden.weight[:, :count] / self.input_deviation
        probe = self.probe.weight / self.feature_deviation
        folded = {
            "probe.weight": probe,
            "probe.bias": self.probe.bias - probe @ self.feature_mean,
            "hidden.weight": torch.cat((tree, self.hidden.weight[:, count:]), 1),
            "hidden.bias": self.hidden.bias - tree @ self.input_mean,
            "out.weight": self.out.weight,
            "out.bias": self.out.bias,
        }
        return {name: value.detach().numpy().copy() for name, value in folded.items()}


def fit_model(
    examples: Examples, held_out: Examples, config: ValueConfig, seed: int, progress, teacher=None
):
    """Regress accepted_tok of every (expansions, size) on the information at a random level.

    Stops when the loss on `held_out` rises; the weights with the lowest are kept. teacher: an
    AcceptanceModel whose answers it learns instead. Returns (arrays, curve).
    """
    # 1. the network and the held-out examples of every level
    random = np.random.default_rng(seed)
    levels = examples.policy.inputs.levels
    torch.manual_seed(seed)
    sample = examples.sample(2000)
    random.shuffle(sample)
    parts = [examples.batch(sample[level::levels], level) for level in range(levels)]
    inputs, features, accepted = map(np.concatenate, zip(*parts, strict=True))
    scales = [(array.mean(0), array.std(0) + 0.05) for array in (inputs, features)]
    net = Net(config, *scales, accepted.mean(0), examples.policy.probe != "none")
    rates = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizer = torch.optim.AdamW(net.parameters(), **rates)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    best = Best()
    sample = held_out.sample(1500)
    exam = [(level, *held_out.batch(sample, level)) for level in range(levels)]
    weights = 0.8 ** np.arange(levels)  # most cycles end early
    # 2. steps
    losses = []
    curve = []
    steps = trange(config.steps, desc="acceptance model", leave=False, disable=not progress)
    for number in steps:
        level = int(min(random.geometric(0.2) - 1, levels - 1))
        numbers = random.integers(0, len(examples.rows), config.batch)
        inputs, features, accepted = examples.batch(numbers, level)
        if teacher is not None:
            accepted = teacher(inputs, teacher.state(features))
        loss = _loss(net.train(), level, inputs, features, accepted)
        losses.append(descend(optimizer, loss, 1.0))
        schedule.step()
        if number % 100 < 99:
            continue
        # 3. every hundredth step: is it still getting better?
        with torch.no_grad():
            held_losses = [float(_loss(net.eval(), *batch)) for batch in exam]
        held_out_loss = float(np.average(held_losses, weights=weights))
        curve.append((number, float(np.mean(losses[-100:])), held_out_loss))
        best.consider(net.state_dict(), -held_out_loss)
        if best.misses >= PATIENCE:
            break
    if curve:
        best.load_into(net)
    check_finite(net.parameters())
    return net.eval().arrays(), pd.DataFrame(curve, columns=["step", "loss", "held_out_loss"])


def _loss(net: Net, level: int, *arrays: np.ndarray):
    inputs, features, accepted = map(torch.from_numpy, arrays)
    # what is above has been decided
    still_open = net(inputs, features).view(accepted.shape)[:, level:]
    return nn.functional.mse_loss(still_open, accepted[:, level:])


def fit_ensemble(examples: Examples, config: ValueConfig, seed: int, progress, distil=True):
    """(AcceptanceModel, curve): the mean of models of different prompts, or one distilled of it.

    distil: regress the mean with one network of the usual size, which answers faster.
    """
    curves = []

    def fitted(member: str, number: int, config: ValueConfig, teacher=None) -> dict:
        sides = examples.split(HELD_OUT_FRAC, seed % 100 + number)
        arrays, curve = fit_model(*sides, config, seed + number, progress, teacher)
        curves.append(curve.assign(member=member))
        return arrays

    shape = (examples.policy.inputs.levels, len(examples.policy.sizes))
    members = [fitted(str(number), number, config) for number in range(ENSEMBLE)]
    network = AcceptanceModel(averaged(members), *shape)
    if distil:
        gentle = dataclasses.replace(config, dropout=0.0, noise=0.0, weight_decay=0.0)
        network = AcceptanceModel(fitted("distilled", ENSEMBLE, gentle, network), *shape)
    return network, pd.concat(curves, ignore_index=True)


def averaged(models: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One network whose output is the mean of the models': their layers side by side."""
    joined = {name: np.stack([arrays[name] for arrays in models]) for name in models[0]}
    probe = joined["probe.bias"].shape[1]
    tree = np.concatenate(joined["hidden.weight"][:, :, :-probe])
    # every hidden layer reads the probe of its own model
    probes = scipy.linalg.block_diag(*joined["hidden.weight"][:, :, -probe:])
    mean = {"hidden.weight": np.concatenate((tree, probes), axis=1)}
    for name in ("probe.weight", "probe.bias", "hidden.bias"):
        mean[name] = np.concatenate(joined[name])
    mean["out.weight"] = np.concatenate(joined["out.weight"], axis=1) / len(models)
    mean["out.bias"] = joined["out.bias"].mean(0)
    return mean


def calibrate_rate(policy: ValuePolicy, trace: Trace, costs: CostModel, rate, policy_ms=0.0):
    """(priced policy, rate), where the rate is the throughput the policy reaches on `trace`."""
    # each price changes what is fastest, and that the rate
    for _ in range(3):
        policy = policy.price(costs, rate)
        rate = 1 / ms_per_tok(policy, trace, costs, policy_ms)
    return policy.price(costs, rate), rate


def reprice(policy: ValuePolicy, trace: Trace, costs: CostModel, pair=None) -> ValuePolicy:
    """The policy for another machine: its `costs`, rate and schedule; weights and trees stay.

    trace: part "tune" of a recording. An evaluation is timed here, live if the `pair` is given.
    """
    if not isinstance(policy, ValuePolicy):
        why = f"a {type(policy).__name__} has no costs to replace"
        raise SpecdecError(f"{why}; train it here again.")
    moved = policy.price(costs, policy.rate)
    policy_ms = evaluation_ms(moved, trace, costs, pair)
    moved, rate = calibrate_rate(moved, trace, costs, policy.rate, policy_ms)
    moved = tune_schedule(moved, trace, costs, policy_ms)
    moved.trained_for = {**policy.trained_for, "costs": costs.name, "rate": rate}
    return moved


def evaluation_ms(policy: ValuePolicy, trace: Trace, costs: CostModel, pair=None) -> float:
    """Measured time of one evaluation, with the answers in between: live if a pair is given."""
    before = policy.evaluations
    few = trace.select(np.arange(len(trace.turns)) < 4)
    questions = float(replay(few, policy, costs, keep_cycles=True).cycles["questions"].sum())
    evaluations = max(1, policy.evaluations - before)
    where, timed = (trace, answer_ms) if pair is None else (pair, measured_answer_ms)
    return timed(where, policy, costs) * questions / evaluations


def ms_per_tok(policy: ValuePolicy, trace: Trace, costs: CostModel, policy_ms: float) -> float:
    """Replayed time per token; an evaluation of the model takes `policy_ms`."""
    before = policy.evaluations
    replayed = replay(trace, policy, costs)
    spent_ms = (policy.evaluations - before) * policy_ms
    return replayed.ms_per_tok + spent_ms / replayed.table["new_tok"].sum()


def tune_schedule(policy: ValuePolicy, trace: Trace, costs: CostModel, policy_ms=0.0):
    """The policy with the settings of SCHEDULES that are fastest on `trace`, one by one."""
    for choices in SCHEDULES:
        candidates = [policy.with_settings(**choice) for choice in choices]
        times = [ms_per_tok(candidate, trace, costs, policy_ms) for candidate in candidates]
        policy = candidates[int(np.argmin(times))]
    return policy
