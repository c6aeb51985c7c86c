"""Trains `policies.value.ValuePolicy` on a recording: exact targets for every answer, no
exploration noise, no returns.

A recording holds accepted_tok of every (expansions, verify_nodes) at every position. So the
acceptance model is fitted by regression on full information:

        replay: where do cycles start?  ->  fit an ensemble  ->  distil it into one model  ->  calibrate the rate

Cycle starts are collected first under a static tree with random detours, then under the policy
itself (DAgger, Ross et al. 2011). The rate is raised to the throughput reached (Dinkelbach 1967).
It takes a minute, so runs are not resumable.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from specdec import runs
from specdec.core import clock
from specdec.core.policy import Policy, Static
from specdec.core.records import PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.calibrate import calibrate, measured_answer_ms
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_number, warn
from specdec.policies.base import chose
from specdec.policies.value import (
    NOTHING,
    OURS,
    PROBES,
    AcceptanceModel,
    ValueConfig,
    ValuePolicy,
    history_after,
)
from specdec.replays.record import record
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import best_static
from specdec.replays.trace import NEVER, Trace
from specdec.training.loop import Best, TrainingRun, descend

NARROW_FRAC = 0.03  # another shape of trees must be faster by so much to be worth a training
# Chosen after learning, in this order: when the model is evaluated, and the bonus for continuing.
SCHEDULES = (
    (("first_evaluation", "stride"), tuple(itertools.product((0, 1, 2), (1, 2, 3)))),
    (("continue_bonus_tok",), ((-0.1,), (-0.05,), (0.0,), (0.05,))),
)
DETOURS = 3  # replays per round that leave the policy's path at random
ENSEMBLE = 3  # networks trained separately; one of the same size is distilled from their mean
HELD_OUT_FRAC = 0.15
PATIENCE = 4  # held-out losses without improvement before training stops; one per 100 steps
PROBE_WIDTH = 8


def train_value(
    trace: Trace,
    costs: CostModel,
    config: ValueConfig = OURS,
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

    start: the static tree for the first cycle starts (default, also in place of plain decoding: at
    most 24 tokens, depth 5). tune_on: turns of part "tune" on which SCHEDULES are tried, default
    those of training. policy_ms: time of one evaluation of the model, so that the rate is the one
    actually reached. None measures it here (in live decoding if the `pair` is given); results then
    vary a little between runs.
    """
    check_number("policy_ms", 0.0 if policy_ms is None else policy_ms)
    usual = "none" if config.plans else "target" if trace.draft_state is None else "draft"
    probe = config.probe or usual
    for name in PROBES.get(probe, ()):
        if getattr(trace, name) is None:
            raise SpecdecError(
                f'this recording holds no {name}; record with features=True or pass probe="none".'
            )
    depth, top_k = min(trace.depth_of(config.top_k), config.most_expansions), config.top_k
    if start is None or not start.verify_nodes:  # plain steps have no tree to learn from
        start = TreeConfig(
            min(24, 1 + pool_size(1, top_k), trace.most_nodes + 1), min(5, depth), top_k
        )
    policy = ValuePolicy(
        top_k=top_k, most_expansions=depth, sizes=config.sizes, probe=probe, plans=config.plans
    )
    acting = Static.of(start)
    rate, starts, curves = 1 / replay(trace, acting, costs).ms_per_tok, [], []
    for number in range(config.rounds):
        starts.append(cycle_starts(trace, costs, acting, DETOURS, seed + 10 * number, config.plans))
        rows, histories = (np.concatenate(parts) for parts in zip(*starts, strict=True))
        last = number + 1 == config.rounds
        examples = Examples(trace, policy, rows, histories)
        policy.network, curve = fit_ensemble(
            examples, config, seed + 100 * number, progress, distil=last
        )
        curves.append(curve.assign(round=number))
        if policy_ms is None:
            policy_ms = evaluation_ms(policy.price(costs, rate), trace, costs, pair)
        policy, rate = calibrate_rate(policy, trace, costs, rate, policy_ms)
        acting = policy
    policy = tune_schedule(policy, trace if tune_on is None else tune_on, costs, policy_ms)
    policy.trained_for = {
        "pair": trace.header["pair"],
        "costs": costs.name,
        "seed": seed,
        "rate": rate,
    }
    chose(policy, "weights, sizes, probe", "train", f"recipe {config.name!r}, chosen before")
    chose(
        policy,
        "schedule",
        "train" if tune_on is None else "tune",
        f"{policy.first_evaluation}, {policy.stride}",
    )
    return policy, pd.concat(curves, ignore_index=True)


def train_recording(
    trace: Trace, costs: CostModel, config: ValueConfig = OURS, *, seed: int, out_dir: Path
) -> ValuePolicy:
    """Train on the beam of the fastest tree at these costs, of those whose whole trees were
    recorded; writes policy and curve.
    """
    if not trace.header["trees"]:
        raise SpecdecError(
            "this recording keeps no whole trees; record again with trees=(4,), for example."
        )
    tune, learn = (trace.select(part=part) for part in ("tune", "train"))
    totals = range(2, tune.most_nodes + 2)
    drafting = best_static(
        tune, costs, total_tokens=totals, top_ks=trace.header["trees"], beams=[()]
    )
    options = dict(start=drafting, tune_on=tune, seed=seed, policy_ms=None)
    policy, curve = train_value(
        learn, costs, dataclasses.replace(config, top_k=drafting.top_k), **options
    )
    runs.write_table(Path(out_dir) / "curve.parquet", curve)
    policy.save(Path(out_dir) / "policy")
    return policy


class _StartRecorder(Policy):
    """A policy that records cycle starts, with the history at that point. `inner` gives the
    answers, but for random detours.
    """

    def __init__(self, inner, detour_frac: float, seed: int, plans: bool = False):
        self.inner = inner
        self.detour_frac = detour_frac  # detours lead to other positions
        self.starts_at = PLAN if plans else SIZE
        self.asks, self.limits, self.plan = (
            inner.asks | {SIZE, self.starts_at},
            inner.limits,
            inner.plan,
        )
        self._random, self.rows, self.histories = np.random.default_rng(seed), [], []

    def reset(self) -> None:
        self.inner.reset()
        self.history = NOTHING

    def answer(self, question: Question):
        if question.kind == self.starts_at:
            self.rows.append(question.view.row)
            self.histories.append(self.history)
        if question.kind != SIZE:
            return (
                self.inner.answer(question) if question.kind in self.inner.asks else self.inner.plan
            )
        nodes = (
            self.inner.answer(question) if SIZE in self.inner.asks else self.inner.plan.verify_nodes
        )
        if self._random.random() < self.detour_frac:
            nodes = int(self._random.integers(0, 5))
        return min(nodes, question.largest)

    def observe(self, cycle: Cycle) -> None:
        self.inner.observe(cycle)
        self.history = history_after(self.history, cycle.accepted_tok, cycle.expansions)


def cycle_starts(
    trace: Trace, costs: CostModel, policy, detours: int, seed: int = 0, plans: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(rows int64 [Q], histories float32 [Q, 5]) of cycle starts under `policy`: once unchanged,
    `detours` times with detours.

    plans: those of every cycle; otherwise of cycles in which a tree's size is asked for.
    """
    fracs = [0.25 * (number > 0) for number in range(detours + 1)]
    recorders = [
        _StartRecorder(policy, frac, seed + number, plans) for number, frac in enumerate(fracs)
    ]
    for recorder in recorders:
        replay(trace, recorder, costs)
    rows = np.concatenate([recorder.rows for recorder in recorders])
    return rows, np.concatenate([np.stack(recorder.histories) for recorder in recorders])


class Examples:
    """Cycle starts with the model's inputs and targets, in batches."""

    def __init__(self, trace: Trace, policy: ValuePolicy, rows: np.ndarray, histories: np.ndarray):
        self.trace, self.policy, self.inputs, self.rows, self.histories = (
            trace,
            policy,
            policy.inputs,
            rows,
            histories,
        )
        self._scores = trace.column("scores", policy.top_k)
        self._ranks = trace.ranks[policy.top_k]
        self._copied = (
            [trace.column(kind) for kind in ("copied_scores", "copied_ranks")]
            if trace.copies
            else None
        )
        self._states = [getattr(trace, name) for name in PROBES[policy.probe]]
        self._sizes = np.array(policy.sizes, dtype=np.int16)

    def sample(self, count: int) -> np.ndarray:
        """At most `count` examples, evenly spaced."""
        return np.linspace(0, len(self.rows) - 1, min(count, len(self.rows))).astype(np.int64)

    def batch(self, numbers: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """inputs [B, I], features [B, F] and accepted_tok [B, D + 1, S] of examples at a level:
        after so many expansions; where the policy plans, the first level is that before the root
        pass, and so is the first row of accepted_tok.
        """
        rows, features = self.rows[numbers], [np.zeros((len(numbers), 1), np.float32)]
        ranks, copied = self._ranks[rows], np.zeros((len(numbers), 0), np.float32)
        before = np.full_like(ranks[:, :1], NEVER)
        if self._copied:
            copied, before = self._copied[0][rows], self._copied[1][rows][:, None]
        inputs = self.inputs.begin(
            self.trace.context_tok[rows], self.histories[numbers], copied=copied
        )
        if (expansions := level - self.inputs.before) >= 0:
            pool = pool_size(expansions, self.inputs.top_k)
            inputs = self.inputs.update(inputs, self._scores[rows, :pool], expansions)
        ranks = np.concatenate((before, ranks), 1)[:, 1 - self.inputs.before :][
            :, : self.inputs.levels
        ]
        accepted = (ranks[..., None] < self._sizes).sum(2, dtype=np.int16).astype(np.float32)
        if self._states:
            features = [state[rows].astype(np.float32) for state in self._states]
        return inputs, np.concatenate(features, axis=1), accepted

    def split(self, frac: float, seed: int) -> tuple[Examples, Examples]:
        """(training, held out). Turns of one prompt stay together."""
        prompts = self.trace.turns["prompt"].to_numpy()
        names = np.unique(prompts)
        held_out = np.random.default_rng(seed).permutation(names)[
            : max(1, round(frac * len(names)))
        ]
        turns = np.searchsorted(self.trace.turns["first"].to_numpy(), self.rows, side="right") - 1
        inside = np.isin(prompts, held_out)[turns]
        known = self.trace, self.policy
        return tuple(
            Examples(*known, self.rows[mask], self.histories[mask]) for mask in (~inside, inside)
        )


class Net(nn.Module):
    """The torch version of `policies.value.AcceptanceModel`, with standardised inputs, dropout and
    noise in training.

    inputs, features: (mean, deviation) of its inputs. outputs: the mean answer, to initialise the
    last bias.
    """

    def __init__(
        self, config: ValueConfig, inputs: tuple, features: tuple, outputs: np.ndarray, probe: bool
    ):
        super().__init__()
        self.config, self.use_probe = config, probe
        names = ("input_mean", "input_deviation", "feature_mean", "feature_deviation")
        for name, value in zip(names, (*inputs, *features), strict=True):
            self.register_buffer(name, torch.from_numpy(value))
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
        tree, probe = (
            self.hidden.weight[:, :count] / self.input_deviation,
            self.probe.weight / self.feature_deviation,
        )
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
    examples: Examples,
    held_out: Examples,
    config: ValueConfig,
    seed: int,
    progress: bool = True,
    teacher: AcceptanceModel | None = None,
) -> tuple[dict[str, np.ndarray], pd.DataFrame]:
    """Regress accepted_tok of every possible (expansions, size) on the information at a random
    level. Returns (arrays, curve).

    Stops when the loss on `held_out` rises; the weights with the lowest are kept. teacher: learn
    its answers instead.
    """
    random, levels = np.random.default_rng(seed), examples.inputs.levels
    torch.manual_seed(seed)
    net = Net(config, *_moments(examples, random), examples.policy.probe != "none")
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    best, losses = Best(), []
    exam = [
        (level, *map(torch.from_numpy, held_out.batch(held_out.sample(1500), level)))
        for level in range(levels)
    ]
    weights = 0.8 ** np.arange(levels)  # most cycles end early

    def step(number: int, _) -> dict | None:
        level = int(min(random.geometric(0.2) - 1, levels - 1))
        inputs, features, accepted = examples.batch(
            random.integers(0, len(examples.rows), config.batch), level
        )
        if teacher is not None:
            accepted = teacher(inputs, teacher.state(features))
        loss = _loss(net.train(), level, *map(torch.from_numpy, (inputs, features, accepted)))
        losses.append(descend(optimizer, loss, 1.0))
        schedule.step()
        if number % 100 < 99:
            return None
        with torch.no_grad():
            held_out_loss = float(
                np.average([float(_loss(net.eval(), *batch)) for batch in exam], weights=weights)
            )
        best.consider(net.state_dict(), -held_out_loss, number)
        return {"loss": float(np.mean(losses[-100:])), "held_out_loss": held_out_loss}

    with tempfile.TemporaryDirectory() as folder:  # it takes seconds, so it is not resumable
        run = TrainingRun(folder, {"steps": config.steps})
        run.stopped = lambda: best.misses >= PATIENCE
        run.run(
            step,
            "acceptance model",
            shown=("loss", "held_out_loss"),
            progress=progress,
            leave=False,
        )
        curve = run.curve.table() if run.curve.rows else pd.DataFrame()
    if best.weights:
        best.load_into(net)
    return net.eval().arrays(), curve.reindex(columns=["step", "loss", "held_out_loss"])


def _loss(net: Net, level: int, inputs, features, accepted):
    still_open = net(inputs, features).view(accepted.shape)[:, level:]
    return nn.functional.mse_loss(still_open, accepted[:, level:])


def _moments(examples: Examples, random) -> tuple[tuple, tuple, np.ndarray]:
    """(mean, deviation) of inputs over all levels and of features, and the mean answer."""
    levels, sample = examples.inputs.levels, examples.sample(2000)
    random.shuffle(sample)
    parts = zip(
        *(examples.batch(sample[level::levels], level) for level in range(levels)), strict=True
    )
    inputs, features, accepted = (np.concatenate(part) for part in parts)
    return *((array.mean(0), array.std(0) + 0.05) for array in (inputs, features)), accepted.mean(0)


def fit_ensemble(
    examples: Examples, config: ValueConfig, seed: int, progress: bool, distil: bool = True
):
    """(AcceptanceModel, curve): models trained on different prompts, their mean, and one model
    distilled from it.
    """
    policy, curves = examples.policy, []

    def learn(
        number: int, config: ValueConfig, teacher: AcceptanceModel | None
    ) -> dict[str, np.ndarray]:
        training, held_out = examples.split(HELD_OUT_FRAC, seed % 100 + number)
        arrays, curve = fit_model(training, held_out, config, seed + number, progress, teacher)
        curves.append(curve.assign(member="distilled" if teacher else str(number)))
        return arrays

    def model(arrays: dict[str, np.ndarray]) -> AcceptanceModel:
        return AcceptanceModel(arrays, policy.inputs.levels, len(policy.sizes))

    network = model(averaged([learn(number, config, None) for number in range(ENSEMBLE)]))
    if distil:  # earlier policies need not be fast
        gentle = dataclasses.replace(config, dropout=0.0, noise=0.0, weight_decay=0.0)
        network = model(learn(ENSEMBLE, gentle, network))
    return network, pd.concat(curves, ignore_index=True)


def averaged(models: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One network whose output is the mean of the models': their layers side by side."""
    count, probe = len(models), len(models[0]["probe.bias"])
    width, split = models[0]["hidden.weight"].shape[0], models[0]["hidden.weight"].shape[1] - probe
    hidden = np.zeros((count * width, split + count * probe), np.float32)
    for number, arrays in enumerate(models):
        rows = slice(number * width, (number + 1) * width)
        hidden[rows, :split] = arrays["hidden.weight"][:, :split]
        hidden[rows, split + number * probe : split + (number + 1) * probe] = arrays[
            "hidden.weight"
        ][:, split:]
    stacked = ("probe.weight", "probe.bias", "hidden.bias")
    return {name: np.concatenate([arrays[name] for arrays in models]) for name in stacked} | {
        "hidden.weight": hidden,
        "out.weight": np.concatenate([arrays["out.weight"] for arrays in models], 1) / count,
        "out.bias": np.mean([arrays["out.bias"] for arrays in models], 0),
    }


def calibrate_rate(
    policy: ValuePolicy, trace: Trace, costs: CostModel, rate: float, policy_ms: float = 0.0
):
    """Price the policy so that its rate is the throughput it reaches on `trace`. Returns (priced
    policy, rate).
    """
    for _ in range(3):
        policy = policy.price(costs, rate)
        rate = 1 / ms_per_tok(policy, trace, costs, policy_ms)
    return policy.price(costs, rate), rate


@dataclasses.dataclass(frozen=True)
class Repriced:
    """The result of `reprice`. table: one row per cost and prediction, before and after. policy:
    with the new costs.
    """

    policy: ValuePolicy
    table: pd.DataFrame
    # of the costs: relative difference of two predicted times below which it means nothing
    uncertainty_frac: float


def reprice(policy: ValuePolicy, trace: Trace, costs: CostModel, pair=None) -> Repriced:
    """The policy with the times of `costs`, its rate and schedule chosen anew on `trace` (tuning
    turns), and the changes.

    pair: to measure an answer's time in live decoding; otherwise in replay. SpecdecError for
    policies without costs of their own: those must be trained again.
    """
    _check_priced(policy)
    moved = policy.price(costs, policy.rate)
    policy_ms = evaluation_ms(moved, trace, costs, pair)
    moved, rate = calibrate_rate(moved, trace, costs, policy.rate, policy_ms)
    moved = tune_schedule(moved, trace, costs, policy_ms)
    moved.trained_for = {**policy.trained_for, "costs": costs.name, "rate": rate}
    tree = best_static(trace, costs, top_ks=[policy.top_k], beams=[()])
    tree_ms = replay(trace, Static.of(tree), costs).ms_per_tok
    _warn_of_a_narrow_tree(policy, trace, costs, tree_ms)
    rows = [
        ("priced for", policy.priced_for, moved.priced_for),
        ("tokens per ms", policy.rate, moved.rate),
    ]
    rows += [("expansion, ms", policy.expand_ms, moved.expand_ms)]
    for size, before, after in zip(policy.sizes, policy.verify_ms, moved.verify_ms, strict=True):
        rows.append((f"verification of {size} nodes, ms", before, after))
    for name in ("first_evaluation", "stride", "continue_bonus_tok"):
        rows.append((name, getattr(policy, name), getattr(moved, name)))
    times = [ms_per_tok(some, trace, costs, policy_ms) for some in (policy, moved)]
    rows += [
        ("one evaluation here, ms", np.nan, policy_ms),
        ("predicted here, ms per token", *times),
    ]
    rows.append(
        (f"predicted here, over the static tree {tree.text}", *(tree_ms / time for time in times))
    )
    return Repriced(
        moved, pd.DataFrame(rows, columns=["", "before", "after"]), costs.uncertainty_frac
    )


def _warn_of_a_narrow_tree(
    policy: ValuePolicy, trace: Trace, costs: CostModel, tree_ms: float
) -> None:
    """Prices move a policy to other sizes and depths, not to another shape of trees: that was worth
    19 % from a CPU to an A100.
    """
    best = best_static(trace, costs)
    ahead = tree_ms / replay(trace, Static.of(best), costs).ms_per_tok
    if ahead > 1 + NARROW_FRAC:
        why = f"re-pricing keeps trees of top_k={policy.top_k}, and with these costs {best.text} is {ahead - 1:.0%} faster"
        warn(f"{why} than the best of them; train a controller with these costs.")


def evaluation_ms(policy: ValuePolicy, trace: Trace, costs: CostModel, pair=None) -> float:
    """Measured time of one evaluation on this machine, including the answers in between: live if a
    pair is given.
    """
    before = policy.evaluations
    replayed = replay(
        trace.select(np.arange(len(trace.turns)) < 4), policy, costs, keep_cycles=True
    )
    evaluations = policy.evaluations - before
    per_answer = (
        measured_answer_ms(pair, policy, costs) if pair else answer_ms(trace, policy, costs)
    )
    return per_answer * float(replayed.cycles["questions"].sum()) / max(1, evaluations)


def ms_per_tok(policy: ValuePolicy, trace: Trace, costs: CostModel, policy_ms: float) -> float:
    """Replayed time per token if an evaluation takes `policy_ms`, and an answer without one
    nothing.
    """
    check_number("policy_ms", policy_ms)
    before = policy.evaluations
    replayed = replay(trace, policy, costs)
    return (
        replayed.ms_per_tok
        + (policy.evaluations - before) * policy_ms / replayed.table["new_tok"].sum()
    )


def tune_schedule(
    policy: ValuePolicy, trace: Trace, costs: CostModel, policy_ms: float = 0.0
) -> ValuePolicy:
    """The policy with the settings of SCHEDULES that are fastest on `trace`, chosen one after the
    other.
    """
    for names, values in SCHEDULES:
        policies = [
            policy.with_settings(**dict(zip(names, value, strict=True))) for value in values
        ]
        times = [ms_per_tok(candidate, trace, costs, policy_ms) for candidate in policies]
        policy = policies[int(np.argmin(times))]
    return policy


def _check_priced(policy) -> None:
    if not isinstance(policy, ValuePolicy):
        raise SpecdecError(
            f"a {type(policy).__name__} has no costs to replace: it learned its machine's costs. Train it here again."
        )


def reprice_here(
    policy, pair, *, costs=None, trace=None, suites=(), limit=10, seconds=45.0, cpu_time=False
):
    """(`reprice` of the policy on this machine, the costs): costs and a recording of the pair are
    made if not given.

    suites, limit: prompts to record, `limit` of each suite. seconds: how long to measure costs.
    cpu_time: in processor time.
    """
    _check_priced(policy)
    costs = costs or calibrate(pair, seconds=seconds, cpu_time=cpu_time)
    if trace is None:
        ks = (policy.top_k,)
        widths = dict(top_ks=ks, trees=ks, depth=policy.most_expansions, max_new_tokens=64)
        trace = record(pair, suites, limit=limit, name="reprice", **widths)
    part = "tune" if (trace.turns["part"] == "tune").any() else "train"
    with clock.by_processor_time(cpu_time):
        return reprice(policy, trace.select(part=part), costs, pair), costs
