"""Train `policies.ours.ValuePolicy` on a recording: exact targets for every answer, no exploration noise, no returns.

A recording tells accepted_tok of every (expansions, verify_nodes) at every position, so the network is fitted by regression
on full information; positions are those that cycles really start from, first under a static tree with random detours, then
under the policy itself (DAgger, Ross et al. 2011). The rate is raised to the throughput reached (Dinkelbach 1967).
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pandas as pd

from specdec.config import SpecdecError, TreeConfig, pool_size
from specdec.latency import CostModel
from specdec.policies.ours import HISTORY, PROBES, SIZES, ValuePolicy, history_after
from specdec.policy import Static
from specdec.records import SIZE, Cycle, Question
from specdec.replaying import answer_ms, replay
from specdec.trace import Trace
from specdec.train.forecast import Recipe, learned

# What is chosen after learning, in this order: when to look at the tree, and how much going on is favoured.
CHOICES = (
    (("first_look", "stride"), tuple(itertools.product((0, 1, 2), (1, 2, 3)))),
    (("patience_tok",), ((-0.1,), (-0.05,), (0.0,), (0.05,))),
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
    *,
    top_k: int = 6,
    start: TreeConfig | None = None,
    sizes=SIZES,
    most_expansions: int | None = None,
    probe: str | None = None,
    recipe: Recipe | None = None,
    choose_on: Trace | None = None,
    seed: int = 0,
    policy_ms: float | None = 0.0,
    progress: bool = True,
) -> tuple[ValuePolicy, pd.DataFrame]:
    """A priced ValuePolicy for the turns of `trace` (pass its train part) and the curve of its training.

    probe: a name of PROBES, default "draft" where that was recorded, else "target". start: the static tree whose cycle
    starts are learnt from first (default: at most 24 tokens, depth 5). choose_on: turns on which CHOICES are made (pass
    the tune part), default those of training. policy_ms: what one look at the tree costs, so that looks are weighed and
    the rate is the one really reached; None measures it here (and results then differ a little from run to run).
    """
    probe = probe or ("target" if trace.draft_state is None else "draft")
    for name in PROBES.get(probe, ()):
        if getattr(trace, name) is None:
            raise SpecdecError(f'this recording holds no {name}; record with features=True or pass probe="none".')
    recipe, depth = recipe or Recipe(), min(trace.depth, most_expansions or 12)
    policy = ValuePolicy(top_k=top_k, most_expansions=depth, sizes=tuple(sizes), probe=probe)
    acting = Static.of(
        start or TreeConfig(min(24, 1 + pool_size(1, top_k), trace.most_nodes + 1), min(5, depth), top_k)
    )
    rate, rows, histories, curves = replay(trace, acting, costs), [], [], []
    rate = 1 / rate.ms_per_tok
    for number in range(recipe.rounds):
        found = starts(trace, costs, acting, recipe.detours, seed + 10 * number)
        rows.append(found[0])
        histories.append(found[1])
        joined = np.concatenate(rows), np.concatenate(histories)
        last = number + 1 == recipe.rounds
        used = dataclasses.replace(recipe, student=recipe.student and last)  # before, who acts need not be quick
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
    before = policy.looks
    asked = replay(trace.select(np.arange(len(trace.turns)) < 4), policy, costs, keep_cycles=True)
    looks = policy.looks - before
    return answer_ms(trace, policy, costs) * float(asked.cycles["questions"].sum()) / looks


def ms_per_tok(policy: ValuePolicy, trace: Trace, costs: CostModel, policy_ms: float) -> float:
    """Replayed time per token when a look at the tree costs `policy_ms`, and an answer without one nothing."""
    before = policy.looks
    found = replay(trace, policy, costs)
    return found.ms_per_tok + (policy.looks - before) * policy_ms / found.table["new_tok"].sum()


def patient(policy: ValuePolicy, trace: Trace, costs: CostModel, policy_ms: float = 0.0) -> ValuePolicy:
    """The policy with the first_look, stride and patience_tok that are fastest on `trace`, one after the other."""
    for names, values in CHOICES:
        tried = []
        for number, value in enumerate(values):
            one = policy.with_settings(**dict(zip(names, value, strict=True)))
            tried.append((ms_per_tok(one, trace, costs, policy_ms), number, one))
        policy = min(tried, key=lambda found: found[:2])[2]
    return policy
