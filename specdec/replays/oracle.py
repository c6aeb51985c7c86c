"""The clairvoyant bound: the least time of any controller on a recording, and how close a policy
comes to it.

    value[p] = min over answers a of cost[p, a] + value[p + accepted(p, a) + 1]

Every cycle's accepted tokens and cost are look-ups, so the best sequence of answers is a shortest
path over positions p.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from specdec.core.records import TURN, Rates
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_integer, door
from specdec.replays import static_trees as trees
from specdec.replays.static_trees import Beams, CostTables, Ints, Shape
from specdec.replays.trace import ROOT_CANDIDATES, Trace


@dataclass(frozen=True)
class Bound(Rates):
    """The result of `clairvoyant`. turns: as `Replayed.table`, a row per turn. answers: a row per
    cycle of a fastest sequence; top_k is 0 for a plain step or copies.
    """

    turns: pd.DataFrame
    answers: pd.DataFrame

    @property
    def per_turn(self) -> pd.DataFrame:
        return self.turns


@door
def clairvoyant(
    trace: Trace,
    costs: CostModel,
    top_ks: Ints = None,
    depths: Ints = None,
    sizes: Ints = None,
    beams: Beams = None,
) -> Bound:
    """The least time to produce every turn's tokens, over all sequences of answers.

    Every legal answer is allowed: all recorded (k, n, V), with `static_trees.BEAMS` of a family; a
    plain step; copied candidates alone; and a flat tree of the root's V best children (RADAR's).
    top_ks, depths (n), sizes (V, root excluded) and beams restrict the trees, and exclude the
    others. V is cut to the pool. Questions cost nothing.

    >>> import specdec
    >>> recording = specdec.explore().recording
    >>> bound = clairvoyant(recording.trace, recording.costs)
    >>> tree = specdec.replay(recording.trace, specdec.Static(8, 3, 4), recording.costs)
    >>> bool(bound.ms_per_tok <= tree.ms_per_tok)
    True
    """
    everything = top_ks is None and depths is None and sizes is None and beams is None
    shapes, recorded = trees.recorded(trace, top_ks, depths, beams)
    tables = CostTables(trace, costs, shapes)
    # 1. for every position and accepted length, the cheapest answer that accepts so many tokens
    best = _Cheapest(tables, sizes)
    if trace.forwards:
        for shape, depth in recorded:
            best.put_tree(shape, depth, shapes.index(shape) + 1)
        if everything:
            best.put_plain_and_flat(shapes)
    if trace.copies and (everything or not trace.forwards):
        best.put_tree(trees.COPIES, 0, 0)
    # 2. the shortest path from the first position of every turn to its end
    value_ms, accepted_tok = _least(trace, best.ms)
    answers, turn = _answers(trace, shapes, best, accepted_tok)

    # 3. sums per turn
    def summed(column: ArrayLike) -> np.ndarray:
        return np.bincount(turn, weights=column, minlength=len(trace.turns)).astype(int)

    cycle_tok = summed(answers["accepted_tok"] + 1)
    turns = tables.turns(summed(np.ones(len(turn))), cycle_tok, value_ms)
    turns["draft_calls"] = summed((answers["expansions"] + 1) * (answers["top_k"] > 0))
    turns["verified_tok"] = summed(answers["verify_nodes"] + 1)
    return Bound(turns, answers)


class _Cheapest:
    """Least cost `ms` [R, D + 2] of accepting exactly a tokens, and the `answer` that achieves it,
    int16 [R, D + 2, 3]: number of its (k, beam) among the shapes, from 1 (0: none), then n and V.
    """

    def __init__(self, tables: CostTables, sizes: Ints):
        self.trace = trace = tables.trace
        self.tables = tables
        most = trace.most_nodes
        allowed = np.arange(most + 1)
        if sizes is not None:
            allowed = np.array(trees.within(sizes, 0, most, "sizes"))
        # [most_nodes + 2]: the smallest allowed size from v on; most_nodes + 1 if there is none
        self.next_size = np.append(allowed, most + 1)[np.searchsorted(allowed, np.arange(most + 2))]
        self.ms = np.full((len(tables.where), trace.depth + 2), np.inf)
        self.answer = np.zeros((*self.ms.shape, 3), dtype=np.int16)

    def put(
        self, cost_ms: np.ndarray, nodes: np.ndarray, number: int, depth: int, first: int = 0
    ) -> None:
        """Use an answer where it costs less. cost_ms, nodes [R, A]: of first, ... tokens."""
        row, tokens = np.nonzero(cost_ms < self.ms[:, first : first + cost_ms.shape[1]])
        self.ms[row, tokens + first] = cost_ms[row, tokens]
        chosen = np.broadcast_arrays(number, depth, nodes[row, tokens])
        self.answer[row, tokens + first] = np.stack(chosen, axis=-1)

    def put_tree(self, shape: Shape, depth: int, number: int) -> None:
        """For every accepted length, the smallest allowed tree: verification never gets cheaper
        with more nodes.
        """
        tables = self.tables
        most = self.trace.most_nodes
        ranks = tables.path_ranks(shape, depth)
        size = self.next_size[np.pad(ranks, ((0, 0), (1, 0)), constant_values=-1) + 1]
        below = np.pad(ranks, ((0, 0), (0, 1)), constant_values=most)
        nodes = np.minimum(size, np.minimum(most, tables.offered(shape, depth)[:, None]))
        draft_ms = tables.before_verification(shape, depth)
        cost_ms = draft_ms[:, None] + tables.verify[tables.where[:, None], nodes]
        self.put(np.where(size <= below, cost_ms, np.inf), nodes, number, depth)

    def put_plain_and_flat(self, shapes: list[Shape]) -> None:
        """Plain steps, and flat trees just large enough for the target's token."""
        where = self.tables.where
        self.put(self.tables.plain_ms[where, None], np.zeros((len(where), 1), int), 0, 0)
        # the cheapest root pass; a tree of at most k nodes is not flat
        root_ms = [self.tables.draft[shape][:, 0].sum() for shape in shapes]
        number = int(np.argmin(root_ms))
        rank = self.trace.column("root_rank").astype(int)
        widest = min(ROOT_CANDIDATES, self.trace.most_nodes)
        nodes = np.minimum(np.maximum(rank, shapes[number][0]) + 1, widest)
        flat_ms = self.tables.draft[shapes[number]][where, 0] + self.tables.verify[where, nodes]
        flat_ms = np.where(rank < widest, flat_ms, np.inf)
        self.put(flat_ms[:, None], nodes[:, None], number + 1, 0, first=1)


def _least(trace: Trace, cost_ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least time per turn [turns], and the best accepted_tok in every row [R]."""
    first = trace.turns["first"].to_numpy()
    positions = trace.turns["positions"].to_numpy()
    tokens = cost_ms.shape[1]
    value_ms = np.zeros((len(first), positions.max() + tokens))  # no cost beyond a turn's end
    accepted = np.zeros(len(cost_ms), dtype=np.int64)
    for position in range(positions.max() - 1, -1, -1):
        turn = np.flatnonzero(positions > position)
        row = first[turn] + position
        total_ms = cost_ms[row] + value_ms[turn, position + 1 : position + 1 + tokens]
        accepted[row] = total_ms.argmin(axis=1)
        value_ms[turn, position] = total_ms.min(axis=1)
    return value_ms[:, 0], accepted


def _answers(
    trace: Trace, shapes: list[Shape], best: _Cheapest, accepted: np.ndarray
) -> tuple[pd.DataFrame, np.ndarray]:
    """`Bound.answers` and the number of each one's turn. accepted [R]: the best in every row."""
    # 1. the rows where cycles start, each where the previous one ended
    rows = []
    turns = []
    for number, turn in enumerate(trace.turns.itertuples()):
        row = turn.first
        while row < turn.first + turn.positions:
            rows.append(row)
            turns.append(number)
            row += accepted[row] + 1
    # 2. the answers there
    accepted_tok = accepted[rows]
    chosen, *numbers = best.answer[rows, accepted_tok].T.astype(int)
    answers = trace.turns[TURN].iloc[turns].reset_index(drop=True)
    answers["position"] = np.array(rows) - trace.turns["first"].to_numpy()[turns]
    answers["expansions"], answers["verify_nodes"] = numbers
    top_ks, beams = zip(*shapes, strict=True)
    answers["top_k"] = np.array([0, *top_ks])[chosen]
    texts = ["", *map(trees.beam_text, beams)]
    answers["beam"] = np.array(texts)[chosen]
    answers["accepted_tok"] = accepted_tok.astype(int)
    answers["time_ms"] = best.ms[rows, accepted_tok]
    return answers, np.array(turns)


@door
def kept_bound(
    trace: Trace, costs: CostModel, cycles: int, total_tokens: Iterable[int], **shapes: Any
) -> pd.DataFrame:
    """The least time per turn (TURN, part, new_tok, time_ms) where a tree is kept for so many
    `cycles`, as in Re-SpS. total_tokens: sizes to choose from, root included, 1 for a plain step.
    shapes: top_ks, depths, beams of `static_grid`.
    """
    check_integer("cycles", cycles, 1)
    sizes = np.array(trees.within(total_tokens, 1, trace.most_nodes + 1, "total_tokens")) - 1
    tried, recorded = trees.recorded(trace, **shapes)
    tables = CostTables(trace, costs, tried)
    first, last = tables.turn_rows
    positions = last - first
    rows = np.arange(len(tables.where))
    end = np.repeat(last, positions)
    # 1. where so many cycles with each tree lead from every row, and what they cost
    reached = []
    spent_ms = []
    for tree in recorded:
        _, gained, time_ms = trees.walk(tables, tree, sizes, (rows, end), cycles)
        reached.append(np.minimum(rows + gained, end))
        spent_ms.append(time_ms)
    following = np.concatenate(reached)
    cost_ms = np.concatenate(spent_ms)
    # 2. the least time from every row, the last positions first
    value_ms = np.zeros(len(end) + 1)
    for position in range(positions.max() - 1, -1, -1):
        row = first[positions > position] + position
        ahead_ms = np.where(following[:, row] < end[row], value_ms[following[:, row]], 0.0)
        value_ms[row] = (cost_ms[:, row] + ahead_ms).min(axis=0)
    return trace.turns[[*TURN, "part"]].assign(new_tok=positions, time_ms=value_ms[first])


def headroom(policy_ms_per_tok: ArrayLike, tuned: ArrayLike, clairvoyant: ArrayLike) -> Any:
    """Share of the gap in speed from the tuned tree (0) to the bound (1) that a policy closes.

    All in ms per token, numbers or arrays. NaN if there is no gap.

    >>> round(headroom(8.0, tuned=10.0, clairvoyant=5.0), 3)
    0.25
    """
    times = np.array(np.broadcast_arrays(policy_ms_per_tok, tuned, clairvoyant), float)
    policy, static, least = times
    possible = (least > 0) & (least <= np.minimum(static, policy) * (1 + 1e-9))
    if not np.isfinite(times).all() or not possible.all():
        raise SpecdecError("times must be positive and none below the clairvoyant bound.")
    gap = 1 / least - 1 / static
    open_gap = gap > 1e-12 / static
    share = np.where(open_gap, (1 / policy - 1 / static) / np.where(open_gap, gap, 1), np.nan)
    return float(share) if share.ndim == 0 else share
