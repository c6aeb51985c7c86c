"""Replay: run any policy on a recording, with the decoding cycle itself driven over ranks and
scores instead of models.

Results of the live engine are looked up, and their times predicted by the cost model. Trees that a
recording cannot replay exactly (another k, a deeper tree) are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from specdec.core.clock import Clock, now
from specdec.core.cycle import begin_turn, run_cycle
from specdec.core.policy import Chain, Policy, checked_policy
from specdec.core.records import TURN, Cycle, Question, Rates
from specdec.core.tree_config import CopiedTree, Plan, TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_number, door
from specdec.replays.trace import ROOT_CANDIDATES, Trace, check_recorded

# Sums over cycles: column of a turn -> field of a cycle.
SUMMED = {
    "new_tok": "kept_tok",
    "cycle_tok": "new_tok",
    "draft_calls": "draft_calls",
    "verified_tok": "verified_tok",
    "accepted_tok": "accepted_tok",
    "time_ms": "total_ms",
    "policy_ms": "policy_ms",
}
OTHERS_MB = 8.0  # read between timed answers, about as much as a small pair's draft forward reads


class ReplayClock(Clock):
    """A clock whose time the cost model predicts. question_ms is charged per question."""

    def __init__(self, question_ms: float):
        self.question_ms = question_ms
        self.start()

    def start(self) -> None:
        self.draft_ms = self.policy_ms = self.verify_ms = self.rest_ms = 0.0

    def mark(self) -> None:
        """Nothing runs between two laps."""

    def lap(self, name: str) -> None:
        """The cycle itself only times policies; the engine charges everything else."""
        self.policy_ms += self.question_ms

    def stop(self) -> dict[str, float]:
        times = {"draft_ms": self.draft_ms, "policy_ms": self.policy_ms}
        times |= {"verify_ms": self.verify_ms, "commit_ms": 0.0, "host_ms": self.rest_ms}
        return {**times, "total_ms": sum(times.values())}


class ReplayEngine:
    """Implements `cycle.Engine` over a Trace. `open` a turn, then run cycles until `finished`.

    policy_ms: time of one answer of the policy, beyond that of asking (costs.question_ms).
    """

    def __init__(self, trace: Trace, costs: CostModel, limits: TreeConfig, policy_ms: float = 0.0):
        check_number("policy_ms", policy_ms)
        self.trace = trace
        self.costs = costs
        self.limits = limits
        self.clock = ReplayClock(costs.question_ms + policy_ms)
        # no recorded tree reaches the target's context limit
        self.most_expansions = 1 << 30
        self.forwards = trace.forwards
        # recorded trees have no rows beside them
        self.extra_rows = 0
        self._turns = trace.turns[["first", "positions", "prompt_tok"]].to_numpy().tolist()
        self._verify, self._verify_per_tok = costs.lookup(trace.most_nodes)
        # before the first cycle: a plain step
        self._plan: Plan = TreeConfig(1, 0, 1)
        self._looked_up: dict[Plan, tuple[np.ndarray, Any]] = {}

    def open(self, turn: int) -> None:
        """Start turn number `turn` of the recording at its first position."""
        self.first, self.positions, self.prompt_tok = self._turns[turn]
        self.position = 0
        self.cycles = 0
        self.level = -1

    @property
    def finished(self) -> bool:
        return bool(self.position >= self.positions)

    @property
    def context_tok(self) -> int:
        return int(self.prompt_tok + self.position)

    @property
    def row(self) -> int:
        """The trace's row of this position."""
        return int(self.first + self.position)

    def root(self, plan: Plan) -> None:
        # policies mostly answer with the same object, whose look-ups are done
        if plan is not self._plan:
            self._look_up(plan)
        self.level = -1
        self._context_tok = self.context_tok
        self.expand()

    def _look_up(self, plan: Plan) -> None:
        """The ranks and times of a plan's trees; SpecdecError for one that was not recorded."""
        if not isinstance(plan, TreeConfig | CopiedTree):
            raise SpecdecError("a recording judges TreeConfig only; measure a StaticShape live.")
        drafts = plan.drafted and self.forwards
        copied = bool(plan.verify_nodes) and not drafts
        if copied and self.trace.copies is None:
            raise SpecdecError("the recorded drafter copies nothing; record one that does.")
        if copied or not plan.verify_nodes:
            # a plain step or copies: a tree without children, drafted for free
            self._top_k = self._flat_nodes = 0
            self._draft = ((0.0,), (0.0,))
        else:
            check_recorded(self.trace, plan.top_k, plan.depth, 0, plan.beam)
            if plan.flat_nodes > ROOT_CANDIDATES:
                raise SpecdecError(f"flat_nodes={plan.flat_nodes} exceeds {ROOT_CANDIDATES}.")
            self._top_k = plan.top_k
            self._flat_nodes = plan.flat_nodes
            if plan not in self._looked_up:
                base, per_tok = self.costs.levels(plan.top_k, plan.depth, plan.beam)
                ranks = self.trace.ranks[plan.top_k, plan.beam]
                self._looked_up[plan] = ranks, (base.tolist(), per_tok.tolist())
            self._path_ranks, self._draft = self._looked_up[plan]
        self._plan = plan
        self._copied = copied

    def expand(self) -> None:
        self.level += 1
        base, per_tok = self._draft
        self.clock.draft_ms += base[self.level] + per_tok[self.level] * self._context_tok

    def verify(self, verify_nodes: int) -> int:
        if verify_nodes > self.trace.most_nodes:
            check_recorded(self.trace, self.trace.top_ks[0], verify_nodes=verify_nodes)
        slope = self._verify_per_tok[verify_nodes]
        self.clock.verify_ms += self._verify[verify_nodes] + slope * self._context_tok
        # a tree holds the best nodes, so the path goes as far as its ranks are below the size
        if not verify_nodes:
            ranks = np.empty(0)
        elif self._copied:
            ranks = self.trace.column("copied_ranks")[self.row]
        elif self.level == 0 and self._flat_nodes:
            ranks = self.trace.column("root_rank")[self.row]
        else:
            ranks = self._path_ranks[self.row, self.level]
        self._accepted_tok = int(np.count_nonzero(ranks < verify_nodes))
        return self._accepted_tok

    def commit(self) -> int:
        self.clock.rest_ms += self.costs.rest_ms
        self.cycles += 1
        before = self.position
        self.position += self._accepted_tok + 1
        self.level = -1
        return int(min(self.position, self.positions) - before)

    # What a question may look at.

    @property
    def candidates(self) -> int:
        if not self._plan.verify_nodes:
            return 0
        if self._copied:
            return int(self.trace.copied[self.row])
        if self.level == 0 and self._flat_nodes:
            return self._flat_nodes
        if self.trace.copies:
            return int(self.trace.column("candidates", self._top_k)[self.row, self.level])
        return pool_size(self.level, self._top_k, self._plan.beam)

    @property
    def scores(self) -> torch.Tensor:
        return torch.tensor(self.copied_scores) if self._copied else self._scores(0)

    @property
    def newest_scores(self) -> torch.Tensor:
        first = self.level and pool_size(self.level - 1, self._top_k, self._plan.beam)
        return self._scores(first)

    def _scores(self, first: int) -> torch.Tensor:
        scores = self.trace.column("scores", self._top_k, self._plan.beam)[self.row]
        end = pool_size(self.level, self._top_k, self._plan.beam)
        return torch.from_numpy(np.asarray(scores[first:end]))

    @property
    def copied_scores(self) -> np.ndarray:
        if not self.trace.copies:
            return np.empty(0, np.float32)
        scores = self.trace.column("copied_scores")[self.row]
        return np.asarray(scores[: self.trace.copied[self.row]])

    @property
    def features(self) -> torch.Tensor:
        return self._state("features")

    @property
    def draft_state(self) -> torch.Tensor:
        return self._state("draft_state")

    @property
    def text_state(self) -> torch.Tensor:
        return self._state("text_state")

    def _state(self, kind: str) -> torch.Tensor:
        return torch.from_numpy(self.trace.column(kind)[self.row])


@dataclass
class Replayed(Rates):
    """The result of `replay`.

    table: one row per turn: suite, prompt, turn, part, cycles, SUMMED, plain_ms (plain decoding of
    the same tokens). rows: the cycles, if kept.
    """

    table: pd.DataFrame
    rows: list[list[Cycle]]

    @property
    def cycles(self) -> pd.DataFrame:
        """One row per cycle with its turn (only with keep_cycles=True)."""
        cycles = []
        for turn, rows in zip(self.table[TURN].to_dict("records"), self.rows, strict=True):
            cycles += [{**turn, **row.row()} for row in rows]
        return pd.DataFrame(cycles)


@door
def replay(
    trace: Trace,
    policy: Policy,
    costs: CostModel,
    *,
    policy_ms: float = 0.0,
    keep_cycles: bool = False,
) -> Replayed:
    """Decode every turn of the recording with `policy`, in the time predicted by `costs`.

    policy_ms: the measured time of one answer (see `answer_ms`), charged with costs.question_ms for
    every question. SpecdecError for answers that were not recorded.

    >>> import specdec
    >>> recording = specdec.explore().recording
    >>> replayed = replay(recording.trace, specdec.Static(8, 3, 4), recording.costs)
    >>> round(replayed.tau, 2), round(replayed.speedup, 2)
    (2.0, 1.06)
    """
    checked_policy(policy)
    costs.check_machine()
    engine = ReplayEngine(trace, costs, policy.limits, policy_ms)
    table = []
    cycles = []
    for number, turn in enumerate(trace.turns.to_dict("records")):
        # 1. the decoding cycle itself, over recorded trees, until the turn's text ends
        engine.open(number)
        begin_turn(policy, turn["prompt_tok"])
        rows = []
        while not engine.finished:
            rows.append(run_cycle(engine, policy))
        # 2. the turn's sums, and the time of plain decoding of the same tokens
        summed = {name: turn[name] for name in (*TURN, "part")}
        summed["cycles"] = len(rows)
        for name, field in SUMMED.items():
            summed[name] = sum(getattr(row, field) for row in rows)
        contexts = turn["prompt_tok"] + np.arange(turn["positions"])
        summed["plain_ms"] = float(np.sum(costs.step_ms(contexts)))
        table.append(summed)
        cycles.append(rows if keep_cycles else [])
    return Replayed(pd.DataFrame(table), cycles)


def answer_ms(trace: Trace, policy: Policy, costs: CostModel, turns: int = 4) -> float:
    """Measured wall time of one answer of `policy`: the mean over questions of a few turns, without
    the slowest twentieth, which was interrupted.
    """
    timed = _TimedPolicy(policy)
    replay(trace.select(np.arange(len(trace.turns)) < turns), timed, costs)
    count = len(timed.spent_ms)
    spent_ms = sorted(timed.spent_ms)[: count - count // 20]
    return float(np.mean(spent_ms or [0.0]))


class _TimedPolicy(Chain):
    """`policy` with the milliseconds of its answers, before each of which memory is read."""

    def __init__(self, policy: Policy):
        super().__init__(policy)
        self.memory = torch.ones(int(OTHERS_MB * 2**18))
        self.spent_ms: list[float] = []

    def answer(self, question: Question) -> Any:
        self.memory.sum()
        begin = now()
        answer = self.policies[0].answer(question)
        self.spent_ms.append(1e3 * (now() - begin))
        return answer
