"""Train `policies.ours.ValuePolicy` on a recording: exact targets for every answer, no exploration noise, no returns.

A recording tells accepted_tok of every (expansions, verify_nodes) at every position, so the network is fitted by regression
on full information; positions are those that cycles really start from, first under a static tree with random detours, then
under the policy itself (DAgger, Ross et al. 2011). The rate is raised to the throughput reached (Dinkelbach 1967).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm.auto import tqdm

from specdec.config import SpecdecError, TreeConfig, pool_size
from specdec.latency import CostModel
from specdec.policies.ours import SIZES, Forecast, TreeInputs, ValuePolicy, history_after
from specdec.records import SIZE, Cycle, Question
from specdec.replaying import replay
from specdec.trace import Trace


@dataclass(frozen=True)
class Recipe:
    """Sizes of the network and of the training; the defaults train in about a minute on one core."""

    hidden: int = 96
    probe: int = 16
    steps: int = 3000
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    dropout: float = 0.1
    noise: float = 0.1  # on standardised features: few prompts, many dimensions
    rounds: int = 2
    detours: int = 3


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
        self.history = np.zeros(5, np.float32)

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


class _Examples:
    """Cycle starts with everything the network sees and should say, batch by batch."""

    def __init__(self, trace: Trace, inputs: TreeInputs, rows: np.ndarray, histories: np.ndarray):
        self.trace, self.inputs, self.rows, self.histories = trace, inputs, rows, histories
        self.scores, self.ranks = trace.column(f"scores_{inputs.top_k}"), trace.ranks[inputs.top_k]
        self._sizes = np.array(inputs.sizes, np.int16)

    def batch(self, chosen: np.ndarray, expansions: int):
        """inputs [B, I], features [B, F], accepted_tok [B, D + 1, S] of the examples `chosen` after so many expansions."""
        rows = self.rows[chosen]
        scores = self.scores[rows, : pool_size(expansions, self.inputs.top_k)]
        seen = self.inputs(scores, expansions, self.trace.context_tok[rows], self.histories[chosen])
        ranks = self.ranks[rows][:, : self.inputs.levels]
        accepted = (ranks[..., None] < self._sizes).sum(2, dtype=np.int16).astype(np.float32)
        return seen, self.trace.features[rows].astype(np.float32), accepted


class _Net(nn.Module):
    """The torch twin of `policies.ours.Forecast`, with standardised inputs, dropout and noise while it trains."""

    def __init__(self, recipe: Recipe, inputs: tuple, features: tuple, outputs: np.ndarray, probe: bool):
        super().__init__()
        self.recipe, self.use_probe = recipe, probe
        for name, value in zip(("im", "is_", "fm", "fs"), (*inputs, *features), strict=True):
            self.register_buffer(name, torch.from_numpy(value))
        self.probe = nn.Linear(len(features[0]), recipe.probe)
        self.hidden = nn.Linear(len(inputs[0]) + recipe.probe, recipe.hidden)
        self.out = nn.Linear(recipe.hidden, outputs.size)
        with torch.no_grad():
            self.out.weight.mul_(0.1)
            self.out.bias.copy_(torch.from_numpy(outputs.reshape(-1)))

    def forward(self, inputs, features):
        features = (features - self.fm) / self.fs
        if self.training:
            features = nn.functional.dropout(
                features + self.recipe.noise * torch.randn_like(features), self.recipe.dropout
            )
        state = torch.tanh(self.probe(features))
        if not self.use_probe:
            state = torch.zeros_like(state)
        hidden = self.hidden(torch.cat(((inputs - self.im) / self.is_, state), -1)).relu()
        return self.out(hidden)

    def arrays(self) -> dict[str, np.ndarray]:
        """Weights that take raw inputs: the standardisation is folded into the first layers."""
        with torch.no_grad():
            count = len(self.im)
            tree = self.hidden.weight[:, :count] / self.is_
            weight = torch.cat((tree, self.hidden.weight[:, count:]), 1)
            bias = self.hidden.bias - tree @ self.im
            probe = self.probe.weight / self.fs
            found = {
                "probe.weight": probe, "probe.bias": self.probe.bias - probe @ self.fm, "hidden.weight": weight,
                "hidden.bias": bias, "out.weight": self.out.weight, "out.bias": self.out.bias,
            }  # fmt: skip
            return {name: value.detach().numpy().copy() for name, value in found.items()}


def fit(examples: _Examples, recipe: Recipe, seed: int, probe: bool = True, progress: bool = True):
    """Regress accepted_tok of every open (expansions, sizes) on what is seen at a random level. Returns (arrays, curve)."""
    random, levels = np.random.default_rng(seed), examples.inputs.levels
    torch.manual_seed(seed)
    count = len(examples.rows)
    sample = random.choice(count, min(count, 2000), replace=False)
    parts = [examples.batch(sample[level::levels], level) for level in range(levels)]
    stacked = [np.concatenate([part[i] for part in parts]) for i in range(3)]
    moments = [(one.mean(0), one.std(0) + 0.05) for one in stacked[:2]]
    net = _Net(recipe, *moments, stacked[2].mean(0), probe).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, recipe.steps, pct_start=0.1)
    curve = []
    for step in tqdm(range(recipe.steps), desc="forecast", disable=not progress, leave=False):
        level = int(min(random.geometric(0.15) - 1, levels - 1))
        seen, features, accepted = map(torch.from_numpy, examples.batch(random.integers(0, count, recipe.batch), level))
        open_ones = net(seen, features).view(len(seen), levels, -1)[:, level:]
        loss = nn.functional.mse_loss(open_ones, accepted[:, level:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.append((step, level, loss.item()))
    return net.eval().arrays(), pd.DataFrame(curve, columns=["step", "level", "loss"])


def train_ours(
    trace: Trace,
    costs: CostModel,
    *,
    top_k: int = 6,
    start: TreeConfig | None = None,
    sizes=SIZES,
    most_expansions: int | None = None,
    probe: bool = True,
    recipe: Recipe | None = None,
    seed: int = 0,
    policy_ms: float = 0.0,
    progress: bool = True,
) -> tuple[ValuePolicy, pd.DataFrame]:
    """A priced ValuePolicy for the turns of `trace` (pass its train part) and the curve of its training.

    start: the static tree whose cycle starts are learnt from first (default: 24 tokens, depth 5). policy_ms: what one
    answer costs, so that the rate is the one really reached.
    """
    if trace.features is None and probe:
        raise SpecdecError("this recording holds no features; record with features=True or pass probe=False.")
    recipe, depth = recipe or Recipe(), min(trace.depth, most_expansions or 12)
    policy = ValuePolicy(top_k=top_k, most_expansions=depth, sizes=tuple(sizes), probe=probe)
    from specdec.policy import Static

    acting = Static(*dataclass_numbers(start or TreeConfig(min(24, 1 + pool_size(5, top_k)), min(5, depth), top_k)))
    rate, rows, histories, curves = replay(trace, acting, costs), [], [], []
    rate = 1 / rate.ms_per_tok
    for number in range(recipe.rounds):
        found = starts(trace, costs, acting, recipe.detours, seed + 10 * number)
        rows.append(found[0])
        histories.append(found[1])
        examples = _Examples(trace, policy.inputs, np.concatenate(rows), np.concatenate(histories))
        arrays, curve = fit(examples, recipe, seed + number, probe, progress)
        policy.network = Forecast(arrays, depth + 1, len(policy.sizes))
        curves.append(curve.assign(round=number))
        policy, rate = settle(policy, trace, costs, rate, policy_ms)
        acting = policy
    policy.trained_for = {"pair": trace.header["pair"], "costs": costs.name, "seed": seed, "rate": rate}
    return policy, pd.concat(curves, ignore_index=True)


def settle(policy: ValuePolicy, trace: Trace, costs: CostModel, rate: float, policy_ms: float = 0.0, looks: int = 3):
    """Price the policy so that its rate is the throughput it reaches on `trace`. Returns (priced policy, rate)."""
    for _ in range(looks):
        policy = policy.price(costs, rate)
        rate = 1 / replay(trace, policy, costs, policy_ms=policy_ms).ms_per_tok
    return policy.price(costs, rate), rate


def dataclass_numbers(tree: TreeConfig) -> tuple[int, int, int]:
    return tree.total_tokens, tree.depth, tree.top_k
