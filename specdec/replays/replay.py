"""Judge any policy on a recording: the very cycle of decoding, driven over ranks and scores instead of models.

`ReplayEngine` answers what the live engine computes by looking it up, and charges what the cost model predicts. What a
recording cannot judge exactly (another k, a deeper tree) is refused. Knows nothing about training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from specdec.core.cycle import run_cycle
from specdec.core.policy import Policy
from specdec.core.rates import TURN, Rates
from specdec.core.records import Cycle
from specdec.core.tree import Plan
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError
from specdec.replays.trace import ROOT_CANDIDATES, Trace, check_recorded

_UNLIMITED = 1 << 30  # a recording holds no position whose trees meet the target's context limit


class ReplayClock:
    """Stands in for `clock.Clock`: time passes as the cost model says. question_ms is charged per question asked."""

    def __init__(self, question_ms: float):
        self.question_ms = question_ms
        self.start()

    def start(self) -> None:
        self.draft_ms = self.policy_ms = self.verify_ms = self.rest_ms = 0.0

    def mark(self) -> None:
        """Nothing runs between two laps."""

    def lap(self, name: str) -> None:
        """Only policies are timed by the cycle itself; the engine charges everything else."""
        self.policy_ms += self.question_ms

    def stop(self) -> dict[str, float]:
        draft, policy, verify, rest = self.draft_ms, self.policy_ms, self.verify_ms, self.rest_ms
        return {
            "draft_ms": draft,
            "policy_ms": policy,
            "verify_ms": verify,
            "commit_ms": 0.0,
            "host_ms": rest,
            "total_ms": draft + policy + verify + rest,
        }


class ReplayEngine:
    """Implements `cycle.Engine` over a Trace. `open` a turn, then run cycles until `finished`.

    policy_ms: what one answer of the policy costs on top of asking (costs.question_ms).
    """

    def __init__(self, trace: Trace, costs: CostModel, limits: TreeConfig, policy_ms: float = 0.0):
        self.trace, self.costs, self.limits = trace, costs, limits
        self.clock = ReplayClock(costs.question_ms + policy_ms)
        self.most_expansions = _UNLIMITED
        self._turns = trace.turns[["first", "positions", "prompt_tok"]].to_numpy().tolist()
        self._tables = costs.lookup(trace.most_nodes, trace.top_ks)
        self._rest_ms = costs.rest_ms
        self._ranks = {top_k: trace.ranks[top_k] for top_k in trace.top_ks}
        self._trees: dict = {}
        self._plan: Plan | None = None

    def open(self, turn: int) -> None:
        """Begin turn number `turn` of the recording at its first position."""
        self.first, self.positions, self.prompt_tok = self._turns[turn]
        self.position, self.cycles, self.level = 0, 0, -1

    @property
    def finished(self) -> bool:
        return self.position >= self.positions

    # ---- what the cycle asks for ------------------------------------------------------------------------------------
    @property
    def context_tok(self) -> int:
        return self.prompt_tok + self.position

    @property
    def candidates(self) -> int:
        if self.level == 0 and self._flat_nodes:
            return self._flat_nodes
        return self._top_k + self.level * self._top_k * self._top_k

    def root(self, plan: Plan) -> None:
        if plan is not self._plan:
            self._take(plan)
        self.level, self._context_tok = 0, self.prompt_tok + self.position
        tables, top_k = self._tables, self._top_k
        self.clock.draft_ms += tables.root[top_k] + tables.root_per_tok[top_k] * self._context_tok
        self._expand_ms = tables.expand[top_k] + tables.expand_per_tok[top_k] * self._context_tok

    def _take(self, plan: Plan) -> None:
        if not isinstance(plan, TreeConfig):
            raise SpecdecError("a recording judges trees of TreeConfig only; measure a StaticShape live.")
        check_recorded(self.trace, plan.top_k, plan.depth, 0)
        if plan.flat_nodes > ROOT_CANDIDATES:
            raise SpecdecError(f"flat_nodes={plan.flat_nodes} was asked for, but {ROOT_CANDIDATES} are recorded.")
        self._plan, self._top_k, self._path_ranks = plan, plan.top_k, self._ranks[plan.top_k]
        self._flat_nodes = plan.flat_nodes

    def expand(self) -> None:
        self.level += 1
        self.clock.draft_ms += self._expand_ms

    def verify(self, verify_nodes: int) -> int:
        if verify_nodes > self.trace.most_nodes:
            check_recorded(self.trace, verify_nodes=verify_nodes)
        tables = self._tables
        self.clock.verify_ms += tables.verify[verify_nodes] + tables.verify_per_tok[verify_nodes] * self._context_tok
        row = self.first + self.position
        if self.level == 0 and self._flat_nodes:
            self._accepted_tok = int(self.trace.root_rank[row] < verify_nodes)
        else:
            self._accepted_tok = int(np.count_nonzero(self._path_ranks[row, self.level] < verify_nodes))
        return self._accepted_tok

    def commit(self) -> int:
        self.clock.rest_ms += self._rest_ms
        self.cycles += 1
        before, self.position = self.position, self.position + self._accepted_tok + 1
        return min(self.position, self.positions) - before

    # ---- what a policy may look at ------------------------------------------------------------------------------------
    @property
    def row(self) -> int:
        """The trace's row of this position."""
        return self.first + self.position

    @property
    def _scores(self) -> np.ndarray:
        if self._top_k not in self._trees:
            self._trees[self._top_k] = self.trace.column(f"scores_{self._top_k}")
        return self._trees[self._top_k][self.first + self.position]

    @property
    def scores(self) -> torch.Tensor:
        return torch.from_numpy(self._scores[: pool_size(self.level, self._top_k)])

    @property
    def newest_scores(self) -> torch.Tensor:
        start = 0 if self.level == 0 else pool_size(self.level - 1, self._top_k)
        return torch.from_numpy(self._scores[start : pool_size(self.level, self._top_k)])

    @property
    def features(self) -> torch.Tensor:
        features = self.trace.features
        if features is None:
            raise SpecdecError("this policy looks at features, which were not recorded; record with features=True.")
        return torch.from_numpy(features[self.first + self.position])

    @property
    def draft_state(self) -> torch.Tensor:
        states = self.trace.draft_state
        if states is None:
            raise SpecdecError(
                "this policy looks at the drafter's state, which was not recorded; record with features=True."
            )
        return torch.from_numpy(states[self.first + self.position])


@dataclass
class Replayed(Rates):
    """table: one row per turn: suite, prompt, turn, part, new_tok (of the cycles), cycles, cycle_tok, draft_calls,
    verified_tok, accepted_tok, time_ms, policy_ms, plain_ms (plain decoding of the same tokens). rows: the cycles, if kept.
    """

    table: pd.DataFrame
    rows: list[list[Cycle]]

    @property
    def cycles(self) -> pd.DataFrame:
        """One row per cycle with the turn it belongs to (only with keep_cycles=True)."""
        keys = self.table[TURN].to_dict("records")
        return pd.DataFrame([{**key, **row.row()} for key, rows in zip(keys, self.rows, strict=True) for row in rows])


def replay(
    trace: Trace, policy: Policy, costs: CostModel, *, policy_ms: float = 0.0, keep_cycles: bool = False
) -> Replayed:
    """Decode every turn of the recording with `policy`, in the time that `costs` predicts.

    policy_ms: the measured cost of one answer (see `answer_ms`), charged with costs.question_ms for every question.
    Raises SpecdecError for answers that were not recorded, and warns where `costs` belong to another machine.

    >>> import specdec
    >>> from specdec.costs.profiles import profile
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> small = dict(depth=3, top_ks=(3,), trees=(), max_new_tokens=8, progress=False)
    >>> trace = specdec.record(pair, {"mine": ["What is 2 + 3?"]}, **small)
    >>> replayed = replay(trace, specdec.Static(6, 2, 3), profile("roofline-a100-llama-8b-eager"))
    >>> live = specdec.chat(pair, ["What is 2 + 3?"], specdec.Static(6, 2, 3), max_new_tokens=8)
    >>> replayed.tau == live[0].tau
    True
    """
    costs.check_machine()
    engine = ReplayEngine(trace, costs, policy.limits, policy_ms)
    table, cycles = [], []
    for number, turn in enumerate(trace.turns.to_dict("records")):
        engine.open(number)
        policy.reset()
        rows = []
        while not engine.finished:
            rows.append(run_cycle(engine, policy))
        labels = {name: turn[name] for name in (*TURN, "part")}
        table.append({**labels, **_sums(rows), "plain_ms": plain_ms(costs, turn)})
        cycles.append(rows if keep_cycles else [])
    return Replayed(pd.DataFrame(table), cycles)


def _sums(rows: list[Cycle]) -> dict:
    return {
        "new_tok": sum(row.kept_tok for row in rows),
        "cycles": len(rows),
        "cycle_tok": sum(row.new_tok for row in rows),
        "draft_calls": sum(row.draft_calls for row in rows),
        "verified_tok": sum(row.verified_tok for row in rows),
        "accepted_tok": sum(row.accepted_tok for row in rows),
        "time_ms": sum(row.total_ms for row in rows),
        "policy_ms": sum(row.policy_ms for row in rows),
    }


def plain_ms(costs: CostModel, turn: dict) -> float:
    """Predicted time of plain decoding for the tokens after the first of one turn: one step each."""
    contexts = turn["prompt_tok"] + np.arange(turn["positions"])
    return float(np.sum(costs.step_ms(contexts)))


def answer_ms(trace: Trace, policy: Policy, costs: CostModel, turns: int = 4, others_mb: float = 8.0) -> float:
    """Measured wall time of one answer of `policy` on this machine: the mean over the questions of a few turns.

    In decoding a forward lies between two answers and fills the caches with weights. So here `others_mb` are read before
    each answer, about what a draft forward of a small pair reads. The slowest twentieth, interruptions, is left out.
    """
    timed = _TimedPolicy(policy, torch.ones(int(others_mb * 2**18)))
    replay(trace.select(np.arange(len(trace.turns)) < turns), timed, costs)
    spent_ms = sorted(timed.spent_ms)
    return float(np.mean(spent_ms[: max(1, len(spent_ms) - len(spent_ms) // 20)])) if spent_ms else 0.0


class _TimedPolicy:
    """`policy` with the milliseconds of its answers. Before each of them the array `others` is read."""

    def __init__(self, policy: Policy, others: torch.Tensor):
        self.policy, self.others, self.spent_ms = policy, others, []

    def __getattr__(self, name: str):
        return getattr(self.policy, name)

    def answer(self, question):
        self.others.sum()
        begin = time.perf_counter()
        answer = self.policy.answer(question)
        self.spent_ms.append(1e3 * (time.perf_counter() - begin))
        return answer
