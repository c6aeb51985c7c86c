"""How fast could anyone have been? The least time of any controller on a recording, and who comes how close to it.

    value[p] = min over answers a of cost[p, a] + value[p + accepted(p, a) + 1]

Every cycle's yield and cost is a look-up, so the best sequence of answers is a shortest path over positions p.
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
from specdec.errors import SpecdecError, door
from specdec.replays.static_trees import CostTables, Shape, beam_text, path_ranks, recorded, turn_table, within
from specdec.replays.trace import ROOT_CANDIDATES, Trace


@dataclass(frozen=True)
class Bound(Rates):
    """What `clairvoyant` found.

    turns: one row per turn, columns of `Replayed.table` that a bound has. answers: one row per cycle of a fastest
    sequence: suite, prompt, turn, position, top_k (0: a plain step or copies), beam, expansions, verify_nodes, accepted_tok,
    time_ms.
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
    top_ks: Iterable[int] | None = None,
    depths: Iterable[int] | None = None,
    sizes: Iterable[int] | None = None,
    beams: Iterable[tuple[int, ...]] | None = None,
) -> Bound:
    """The least total time to produce every turn's tokens, over all sequences of answers, one per cycle.

    Without restriction every legal answer is allowed: all (k, n, V) that were recorded, n = 0 and V = 0 among them, with
    the beams of `static_trees.BEAMS` where a family was recorded; a plain step; copied candidates alone where the drafter
    copies; and a flat tree of the root's V best children, n = 0 and V > k (RADAR's). top_ks, depths (n), sizes (V, root
    excluded) and beams allow such trees only, and neither plain steps nor flat trees. V is cut to the pool, as in the cycle.
    Questions cost nothing, nor does what the drafter reads later because nothing was drafted before.

    >>> import specdec
    >>> from specdec.costs.profiles import profile
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> small = dict(depth=3, top_ks=(3,), trees=(), max_new_tokens=8, progress=False)
    >>> trace = specdec.record(pair, {"mine": ["What is 2 + 3?"]}, **small)
    >>> costs = profile("roofline-a100-llama-8b-eager")
    >>> bound = clairvoyant(trace, costs)
    >>> tree = specdec.replay(trace, specdec.Static(6, 2, 3), costs)
    >>> bool(bound.ms_per_tok <= tree.ms_per_tok), bool(bound.answers["accepted_tok"].max() <= 4)
    (True, True)
    """
    everything = top_ks is None and depths is None and sizes is None and beams is None
    shapes, depths = recorded(trace, top_ks, depths, beams)
    tables = CostTables.of(trace, costs, shapes)
    next_size = _next_size(trace, sizes)
    cost_ms, answer = _cheapest(trace, tables, shapes if trace.forwards else [], depths, next_size)
    if everything and trace.forwards:
        _allow_plain_and_flat(trace, tables, shapes, cost_ms, answer)
    if trace.copies and (everything or not trace.forwards):
        _allow_copies(trace, tables, next_size, cost_ms, answer)
    value_ms, accepted = _least(trace, cost_ms)
    cycle_row, cycle_turn = _walk(trace, accepted)
    accepted_tok = accepted[cycle_row]
    first = trace.turns["first"].to_numpy()
    answers = trace.turns[TURN].iloc[cycle_turn].reset_index(drop=True)
    answers["position"] = cycle_row - first[cycle_turn]
    chosen, answers["expansions"], answers["verify_nodes"] = answer[cycle_row, accepted_tok].T.astype(int)
    answers["top_k"] = np.array([0, *(top_k for top_k, _ in shapes)])[chosen]
    answers["beam"] = np.array(["", *(beam_text(beam) for _, beam in shapes)], dtype=object)[chosen]
    answers["accepted_tok"], answers["time_ms"] = accepted_tok.astype(int), cost_ms[cycle_row, accepted_tok]

    def per_turn(column: ArrayLike) -> np.ndarray:
        return np.bincount(cycle_turn, weights=column, minlength=len(first)).astype(int)

    cycles, cycle_tok = per_turn(np.ones(len(answers))), per_turn(answers["accepted_tok"] + 1)
    turns = turn_table(trace, tables, cycles, cycle_tok, value_ms)
    draft_calls = (answers["expansions"] + 1) * (answers["top_k"] > 0)
    return Bound(
        turns.assign(draft_calls=per_turn(draft_calls), verified_tok=per_turn(answers["verify_nodes"] + 1)), answers
    )


def headroom(policy_ms_per_tok: ArrayLike, tuned: ArrayLike, clairvoyant: ArrayLike) -> Any:
    """Share of the gap in speed that a policy captures: (1/policy - 1/tuned) / (1/clairvoyant - 1/tuned).

    All in ms per token, numbers or arrays. 0 is the tuned static tree, 1 the bound, NaN means that there is no gap.

    >>> round(headroom(8.0, tuned=10.0, clairvoyant=5.0), 3)
    0.25
    """
    try:
        times = np.broadcast_arrays(*(np.asarray(x, float) for x in (policy_ms_per_tok, tuned, clairvoyant)))
    except (TypeError, ValueError) as error:
        raise SpecdecError(f"times are numbers or arrays of one shape, in ms per token ({error}).") from error
    policy, tuned, least = times
    if not np.isfinite(times).all() or not ((least > 0) & (least <= np.minimum(tuned, policy) * (1 + 1e-9))).all():
        raise SpecdecError(
            "times must be positive and none below the clairvoyant bound; take the same turns and costs."
        )
    gap = 1 / least - 1 / tuned
    open_gap = gap > 1e-12 / tuned
    share = np.where(open_gap, (1 / policy - 1 / tuned) / np.where(open_gap, gap, 1), np.nan)
    return float(share) if share.ndim == 0 else share


def _next_size(trace: Trace, sizes: Iterable[int] | None) -> np.ndarray:
    """[most_nodes + 2]: the smallest allowed size from v on; most_nodes + 1 where there is none."""
    most = trace.most_nodes
    allowed = np.arange(most + 1) if sizes is None else np.array(within(sizes, 0, most, "sizes"))
    return np.append(allowed, most + 1)[np.searchsorted(allowed, np.arange(most + 2))]


def _cheapest(
    trace: Trace, tables: CostTables, shapes: list[Shape], depths: list[int], next_size: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Least cost [R, D + 2] of accepting exactly a tokens, and the answer that attains it, int16 [R, D + 2, 3].

    An answer is the number of its (k, beam) among `shapes` from 1, n and V.
    """
    rows, where = len(tables.where), tables.where
    best_ms = np.full((rows, trace.depth + 2), np.inf)
    answer = np.zeros((rows, trace.depth + 2, 3), dtype=np.int16)
    never = np.full((rows, 1), trace.most_nodes)
    for number, shape in enumerate(shapes, 1):
        for depth in [depth for depth in depths if depth <= trace.depth_of(*shape)]:
            # Trees that accept exactly a tokens have more nodes than the rank of the a-th, at most the next one's rank.
            # Verification never gets cheaper with nodes, so the smallest allowed of these sizes is enough.
            edges = np.concatenate((np.full((rows, 1), -1), path_ranks(trace, shape, depth), never), axis=1)
            size = next_size[edges[:, :-1] + 1]
            offered = np.broadcast_to(trace.candidates(shape[0], depth, shape[1]), rows)[:, None]
            nodes = np.minimum(size, np.minimum(trace.most_nodes, offered))
            cost_ms = tables.draft[shape][where, depth, None] + tables.verify[where[:, None], nodes]
            row, tokens = np.nonzero((size <= edges[:, 1:]) & (cost_ms < best_ms[:, : size.shape[1]]))
            best_ms[row, tokens] = cost_ms[row, tokens]
            answer[row, tokens, 0], answer[row, tokens, 1], answer[row, tokens, 2] = number, depth, nodes[row, tokens]
    return best_ms, answer


def _allow_plain_and_flat(
    trace: Trace, tables: CostTables, shapes: list[Shape], best_ms: np.ndarray, answer: np.ndarray
) -> None:
    """Put plain steps, and flat trees that just hold the target's token, where they cost less. Changes both arrays."""
    rows, where = np.arange(len(best_ms)), tables.where
    rank = trace.root_rank.astype(int)
    number, cheapest = min(enumerate(shapes, 1), key=lambda one: float(tables.draft[one[1]][:, 0].sum()))
    widest = min(ROOT_CANDIDATES, trace.most_nodes)
    nodes = np.minimum(np.maximum(rank, cheapest[0]) + 1, widest)  # a tree of at most k nodes is no flat one
    flat_ms = np.where(rank < widest, tables.draft[cheapest][where, 0] + tables.verify[where, nodes], np.inf)
    choices = ((0, tables.plain_ms[where], np.zeros(len(rows), int)), (1, flat_ms, nodes))
    for accepted_tok, cost_ms, verify_nodes in choices:
        row = rows[cost_ms < best_ms[:, accepted_tok]]
        best_ms[row, accepted_tok] = cost_ms[row]
        shape = number if accepted_tok else 0
        answer[row, accepted_tok] = np.stack([np.full(len(row), shape), np.zeros(len(row)), verify_nodes[row]], axis=1)


def _allow_copies(
    trace: Trace, tables: CostTables, next_size: np.ndarray, best_ms: np.ndarray, answer: np.ndarray
) -> None:
    """Put trees of copied candidates alone, the smallest allowed for every length, where they cost less. Changes both arrays."""
    where, rows = tables.where, len(best_ms)
    ranks = np.minimum(trace.column("copied_ranks").astype(int), trace.most_nodes)
    edges = np.concatenate((np.full((rows, 1), -1), ranks, np.full((rows, 1), trace.most_nodes)), axis=1)
    size = next_size[edges[:, :-1] + 1]
    nodes = np.minimum(size, trace.copied[:, None])
    cost_ms = tables.plain_ms[where, None] - tables.verify[where, :1] + tables.verify[where[:, None], nodes]
    row, tokens = np.nonzero((size <= edges[:, 1:]) & (cost_ms < best_ms[:, : size.shape[1]]))
    best_ms[row, tokens] = cost_ms[row, tokens]
    answer[row, tokens, 0], answer[row, tokens, 1], answer[row, tokens, 2] = 0, 0, nodes[row, tokens]


def _least(trace: Trace, cost_ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least time per turn [turns], and the accepted_tok to aim at in every row [R]."""
    first, positions = trace.turns["first"].to_numpy(), trace.turns["positions"].to_numpy()
    tokens = cost_ms.shape[1]
    value_ms = np.zeros((len(first), positions.max() + tokens))  # nothing is left to pay beyond a turn's end
    accepted = np.zeros(len(cost_ms), dtype=np.int64)
    for position in range(positions.max() - 1, -1, -1):
        turn = np.flatnonzero(positions > position)
        total_ms = cost_ms[first[turn] + position] + value_ms[turn, position + 1 : position + 1 + tokens]
        accepted[first[turn] + position] = total_ms.argmin(axis=1)
        value_ms[turn, position] = total_ms.min(axis=1)
    return value_ms[:, 0], accepted


def _walk(trace: Trace, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and turns of the cycles, each starting where the one before ended; sorted by row. int [cycles] each."""
    row = trace.turns["first"].to_numpy()
    end = row + trace.turns["positions"].to_numpy()
    rows, turns = [], []
    while len(alive := np.flatnonzero(row < end)):
        rows.append(row[alive])
        turns.append(alive)
        row = row + np.where(row < end, accepted[np.minimum(row, len(accepted) - 1)] + 1, 0)
    row, turn = np.concatenate(rows), np.concatenate(turns)
    order = np.argsort(row)
    return row[order], turn[order]
