"""What our controller's network learns from: cycle starts with exact answers, a small network, several of them, a student.

Knows nothing about policies in use, replay or prices (`train.ours`).

Train `policies.value.ValuePolicy` on a recording: exact targets for every answer, no exploration noise, no returns.

A recording tells accepted_tok of every (expansions, verify_nodes) at every position, so the network is fitted by regression
on full information; positions are those that cycles really start from, first under a static tree with random detours, then
under the policy itself (DAgger, Ross et al. 2011). The rate is raised to the throughput reached (Dinkelbach 1967).
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm.auto import tqdm

from specdec.core.policy import Static
from specdec.core.records import SIZE, Cycle, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError
from specdec.policies.value import HISTORY, OURS, PROBES, AcceptanceModel, ValueConfig, ValuePolicy, history_after
from specdec.replays.replay import answer_ms, replay
from specdec.replays.trace import Trace


class Examples:
    """Cycle starts with everything the network sees and should say, batch by batch."""

    def __init__(self, trace: Trace, policy: ValuePolicy, rows: np.ndarray, histories: np.ndarray):
        self.trace, self.inputs, self.rows, self.histories = trace, policy.inputs, rows, histories
        self.scores, self.ranks = trace.column(f"scores_{policy.top_k}"), trace.ranks[policy.top_k]
        self._states = [getattr(trace, name) for name in PROBES[policy.probe]]
        self._sizes = np.array(policy.sizes, dtype=np.int16)

    def sample(self, count: int) -> np.ndarray:
        """At most `count` examples, spread evenly."""
        return np.linspace(0, len(self.rows) - 1, min(count, len(self.rows))).astype(np.int64)

    def batch(self, chosen: np.ndarray, expansions: int):
        """inputs [B, I], features [B, F], accepted_tok [B, D + 1, S] of the examples `chosen` after so many expansions."""
        rows = self.rows[chosen]
        scores = self.scores[rows, : pool_size(expansions, self.inputs.top_k)]
        seen = self.inputs.update(
            self.inputs.begin(self.trace.context_tok[rows], self.histories[chosen]), scores, expansions
        )
        ranks = self.ranks[rows][:, : self.inputs.levels]
        accepted = (ranks[..., None] < self._sizes).sum(2, dtype=np.int16).astype(np.float32)
        states = [state[rows].astype(np.float32) for state in self._states] or [np.zeros((len(rows), 1), np.float32)]
        return seen, np.concatenate(states, axis=1), accepted


class Net(nn.Module):
    """The torch twin of `policies.value.AcceptanceModel`, with standardised inputs, dropout and noise while it trains."""

    def __init__(self, config: ValueConfig, inputs: tuple, features: tuple, outputs: np.ndarray, probe: bool):
        super().__init__()
        self.config, self.use_probe = config, probe
        for name, value in zip(("im", "is_", "fm", "fs"), (*inputs, *features), strict=True):
            self.register_buffer(name, torch.from_numpy(value))
        self.probe = nn.Linear(len(features[0]), config.probe_width)
        self.hidden = nn.Linear(len(inputs[0]) + config.probe_width, config.hidden)
        self.out = nn.Linear(config.hidden, outputs.size)
        with torch.no_grad():
            self.out.weight.mul_(0.1)
            self.out.bias.copy_(torch.from_numpy(outputs.reshape(-1)))

    def forward(self, inputs, features):
        features = (features - self.fm) / self.fs
        if self.training:
            features = nn.functional.dropout(
                features + self.config.noise * torch.randn_like(features), self.config.dropout
            )
        state = torch.tanh(self.probe(features))
        if not self.use_probe:
            state = torch.zeros_like(state)
        hidden = self.hidden(torch.cat(((inputs - self.im) / self.is_, state), -1)).relu()
        return self.out(nn.functional.dropout(hidden, self.config.dropout, self.training))

    def arrays(self) -> dict[str, np.ndarray]:
        """Weights that take raw inputs: the standardisation is folded into the first layers."""
        with torch.no_grad():
            count = len(self.im)
            tree = self.hidden.weight[:, :count] / self.is_
            weight = torch.cat((tree, self.hidden.weight[:, count:]), 1)
            bias = self.hidden.bias - tree @ self.im
            probe = self.probe.weight / self.fs
            found = {
                "probe.weight": probe,
                "probe.bias": self.probe.bias - probe @ self.fm,
                "hidden.weight": weight,
                "hidden.bias": bias,
                "out.weight": self.out.weight,
                "out.bias": self.out.bias,
            }
            return {name: value.detach().numpy().copy() for name, value in found.items()}


def fit(
    examples: Examples,
    held_out: Examples,
    config: ValueConfig,
    seed: int,
    probe: bool = True,
    progress: bool = True,
    teacher: AcceptanceModel | None = None,
):
    """Regress accepted_tok of every open (expansions, sizes) on what is seen at a random level, until the loss on
    `held_out` rises. teacher: learn its answers instead, which hold no luck. Returns (arrays of the network, curve)."""
    random, levels = np.random.default_rng(seed), examples.inputs.levels
    torch.manual_seed(seed)
    net = Net(config, *_moments(examples, random), probe)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    exam = [(level, *map(torch.from_numpy, held_out.batch(held_out.sample(1500), level))) for level in range(levels)]
    curve, best, kept, losses = [], np.inf, None, []
    for step in tqdm(range(config.steps), desc="forecast", disable=not progress, leave=False):
        level = int(min(random.geometric(0.2) - 1, levels - 1))  # cycles mostly end early
        chosen = random.integers(0, len(examples.rows), config.batch)
        seen, features, accepted = examples.batch(chosen, level)
        if teacher is not None:
            accepted = teacher(seen, teacher.state(features))
        loss = _loss(net.train(), level, *map(torch.from_numpy, (seen, features, accepted)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            with torch.no_grad():
                shares = 0.8 ** np.arange(levels)
                found = [float(_loss(net.eval(), *one)) for one in exam]
            curve.append((step, float(np.mean(losses[-100:])), float(np.average(found, weights=shares))))
            if curve[-1][2] < best:
                best, kept = curve[-1][2], net.arrays()
            elif best < min(row[2] for row in curve[-config.patience :]):
                break
    return kept or net.eval().arrays(), pd.DataFrame(curve, columns=["step", "loss", "held_out_loss"])


def _loss(net: Net, level: int, seen, features, accepted):
    open_ones = net(seen, features).view(accepted.shape)[:, level:]
    return nn.functional.mse_loss(open_ones, accepted[:, level:])


def _moments(examples: Examples, random) -> tuple[tuple, tuple, np.ndarray]:
    """(mean, deviation) of inputs over all levels and of features, and the mean answer."""
    levels, sample = examples.inputs.levels, examples.sample(2000)
    random.shuffle(sample)
    parts = [examples.batch(sample[level::levels], level) for level in range(levels)]
    inputs, features, accepted = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return *((one.mean(0), one.std(0) + 0.05) for one in (inputs, features)), accepted.mean(0)


def averaged(members: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One network whose answer is the mean of its members': their layers side by side."""
    count, probe = len(members), len(members[0]["probe.bias"])
    width, split = members[0]["hidden.weight"].shape[0], members[0]["hidden.weight"].shape[1] - probe
    hidden = np.zeros((count * width, split + count * probe), np.float32)
    for number, one in enumerate(members):
        rows = slice(number * width, (number + 1) * width)
        hidden[rows, :split] = one["hidden.weight"][:, :split]
        hidden[rows, split + number * probe : split + (number + 1) * probe] = one["hidden.weight"][:, split:]
    joined = {
        name: np.concatenate([one[name] for one in members]) for name in ("probe.weight", "probe.bias", "hidden.bias")
    }
    out = np.concatenate([one["out.weight"] for one in members], 1) / count
    return {
        **joined,
        "hidden.weight": hidden,
        "out.weight": out,
        "out.bias": np.mean([m["out.bias"] for m in members], 0),
    }


def learned(trace: Trace, policy: ValuePolicy, starts: tuple, config: ValueConfig, seed: int, progress: bool):
    """(AcceptanceModel, curve) from cycle starts (rows, histories): members on different prompts, their mean, its student."""
    members, curves = [], []

    def learn(number: int, config: ValueConfig, teacher: AcceptanceModel | None) -> dict[str, np.ndarray]:
        inside = _held_out(trace, starts[0], config.held_out_frac, seed % 100 + number)
        examples, held_out = (Examples(trace, policy, *(one[mask] for one in starts)) for mask in (~inside, inside))
        arrays, curve = fit(examples, held_out, config, seed + number, policy.probe != "none", progress, teacher)
        curves.append(curve.assign(member="student" if teacher else str(number)))
        return arrays

    for number in range(config.ensemble):
        members.append(learn(number, config, None))
    network = AcceptanceModel(averaged(members), policy.inputs.levels, len(policy.sizes))
    if config.distil and config.ensemble > 1:
        gentle = dataclasses.replace(config, dropout=0.0, noise=0.0, weight_decay=0.0)
        network = AcceptanceModel(learn(config.ensemble, gentle, network), policy.inputs.levels, len(policy.sizes))
    return network, pd.concat(curves, ignore_index=True)


def _held_out(trace: Trace, rows: np.ndarray, frac: float, seed: int) -> np.ndarray:
    """bool per row: whether its prompt is held out. Turns of one prompt stay together."""
    prompts = trace.turns["prompt"].to_numpy()
    names = np.unique(prompts)
    chosen = np.random.default_rng(seed).permutation(names)[: max(1, round(frac * len(names)))]
    turn_of = np.searchsorted(trace.turns["first"].to_numpy(), rows, side="right") - 1
    return np.isin(prompts, chosen)[turn_of]


# ---- from train.ours ----------------------------------------


# What is chosen after learning, in this order: when to look at the tree, and how much going on is favoured.
CHOICES = (
    (("first_evaluation", "stride"), tuple(itertools.product((0, 1, 2), (1, 2, 3)))),
    (("continue_bonus_tok",), ((-0.1,), (-0.05,), (0.0,), (0.05,))),
)


class _Starts:
    """A policy that notes where cycles start, with the history at that point; what it answers is up to `inner`.

    detour_frac: how often a cycle verifies a random few nodes instead, so that other positions are met.
    """

    def __init__(self, inner, detour_frac: float, seed: int):
        self.inner, self.detour_frac = inner, detour_frac
        self.asks, self.limits, self.plan = inner.asks | {SIZE}, inner.limits, inner.plan
        self._random, self.rows, self.histories = np.random.default_rng(seed), [], []

    def reset(self) -> None:
        self.inner.reset()
        self.history = np.zeros(HISTORY, np.float32)

    def answer(self, question: Question):
        if question.kind != SIZE:
            return self.inner.answer(question)
        self.rows.append(question.view.row)
        self.histories.append(self.history)
        wanted = self.inner.answer(question) if SIZE in self.inner.asks else self.inner.plan.verify_nodes
        if self._random.random() < self.detour_frac:
            wanted = int(self._random.integers(0, 5))
        return min(wanted, question.largest)

    def observe(self, cycle: Cycle) -> None:
        self.inner.observe(cycle)
        self.history = history_after(self.history, cycle.accepted_tok, cycle.expansions)


def starts(trace: Trace, costs: CostModel, policy, detours: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(rows int64 [Q], histories float32 [Q, 5]) of cycle starts under `policy`: once as it is, `detours` times with detours."""
    found = [_Starts(policy, 0.25 if number else 0.0, seed + number) for number in range(detours + 1)]
    for one in found:
        replay(trace, one, costs)
    return np.concatenate([one.rows for one in found]), np.concatenate([np.stack(one.histories) for one in found])


def train_ours(
    trace: Trace,
    costs: CostModel,
    config: ValueConfig = OURS,
    *,
    start: TreeConfig | None = None,
    choose_on: Trace | None = None,
    seed: int = 0,
    policy_ms: float | None = 0.0,
    progress: bool = True,
) -> tuple[ValuePolicy, pd.DataFrame]:
    """A priced ValuePolicy for the turns of `trace` (pass its train part) and the curve of its training.

    start: the static tree whose cycle starts are learnt from first (default: at most 24 tokens, depth 5). choose_on:
    turns on which CHOICES are made (pass the tune part), default those of training. policy_ms: what one look at the
    tree costs, so that looks are weighed and the rate is the one really reached; None measures it here (and results
    then differ a little from run to run).
    """
    probe = config.probe or ("target" if trace.draft_state is None else "draft")
    for name in PROBES.get(probe, ()):
        if getattr(trace, name) is None:
            raise SpecdecError(f'this recording holds no {name}; record with features=True or pass probe="none".')
    depth, top_k = min(trace.depth, config.most_expansions), config.top_k
    policy = ValuePolicy(top_k=top_k, most_expansions=depth, sizes=config.sizes, probe=probe)
    acting = Static.of(
        start or TreeConfig(min(24, 1 + pool_size(1, top_k), trace.most_nodes + 1), min(5, depth), top_k)
    )
    rate, rows, histories, curves = replay(trace, acting, costs), [], [], []
    rate = 1 / rate.ms_per_tok
    for number in range(config.rounds):
        found = starts(trace, costs, acting, config.detours, seed + 10 * number)
        rows.append(found[0])
        histories.append(found[1])
        joined = np.concatenate(rows), np.concatenate(histories)
        last = number + 1 == config.rounds
        used = dataclasses.replace(config, distil=config.distil and last)  # before, who acts need not be quick
        policy.network, curve = learned(trace, policy, joined, used, seed + 100 * number, progress)
        curves.append(curve.assign(round=number))
        if policy_ms is None:
            policy_ms = look_ms(policy.price(costs, rate), trace, costs)
        policy, rate = settle(policy, trace, costs, rate, policy_ms)
        acting = policy
    policy = patient(policy, trace if choose_on is None else choose_on, costs, policy_ms)
    policy.trained_for = {"pair": trace.header["pair"], "costs": costs.name, "seed": seed, "rate": rate}
    return policy, pd.concat(curves, ignore_index=True)


def settle(policy: ValuePolicy, trace: Trace, costs: CostModel, rate: float, policy_ms: float = 0.0, looks: int = 3):
    """Price the policy so that its rate is the throughput it reaches on `trace`. Returns (priced policy, rate)."""
    for _ in range(looks):
        policy = policy.price(costs, rate)
        rate = 1 / ms_per_tok(policy, trace, costs, policy_ms)
    return policy.price(costs, rate), rate


def look_ms(policy: ValuePolicy, trace: Trace, costs: CostModel) -> float:
    """Measured time of one look at the tree on this machine, with what the answers between looks cost."""
    before = policy.evaluations
    asked = replay(trace.select(np.arange(len(trace.turns)) < 4), policy, costs, keep_cycles=True)
    looks = policy.evaluations - before
    return answer_ms(trace, policy, costs) * float(asked.cycles["questions"].sum()) / looks


def ms_per_tok(policy: ValuePolicy, trace: Trace, costs: CostModel, policy_ms: float) -> float:
    """Replayed time per token when a look at the tree costs `policy_ms`, and an answer without one nothing."""
    before = policy.evaluations
    found = replay(trace, policy, costs)
    return found.ms_per_tok + (policy.evaluations - before) * policy_ms / found.table["new_tok"].sum()


def patient(policy: ValuePolicy, trace: Trace, costs: CostModel, policy_ms: float = 0.0) -> ValuePolicy:
    """The policy with the first_evaluation, stride and continue_bonus_tok that are fastest on `trace`, one after the other."""
    for names, values in CHOICES:
        tried = []
        for number, value in enumerate(values):
            one = policy.with_settings(**dict(zip(names, value, strict=True)))
            tried.append((ms_per_tok(one, trace, costs, policy_ms), number, one))
        policy = min(tried, key=lambda found: found[:2])[2]
    return policy
