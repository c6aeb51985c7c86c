"""Every static tree on a recording, exactly: accepted tokens and time of its cycles, without
decoding anything.

    from position p on a tree of V nodes and depth n goes to  p + accepted_tok(p, n, V) + 1,
    which costs                                               draft_ms(n) + verify_ms(V) + rest_ms

Both are look-ups, so a static tree is a walk over positions, and thousands of trees walk at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from specdec.core.records import SUMS, TURN, with_rates
from specdec.core.tree_config import TreeConfig, plain_beam, pool_size
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_name, door
from specdec.replays.trace import Trace

Shape = tuple[int, tuple[int, ...]]  # children per node, beam
Ints = Iterable[int] | None  # numbers to try; None: all that were recorded
Beams = Iterable[tuple[int, ...]] | None
SETTING = ["total_tokens", "depth", "top_k", "beam"]
# Beams tried by default if a family was recorded; () means as many as there are children.
BEAMS = ((), (1,), (2, 1), (2,), (3, 1), (3, 2, 1), (4, 2, 1), (4, 3, 2, 1), (6, 3, 1))


@door
def static_grid(
    trace: Trace,
    costs: CostModel,
    total_tokens: Ints = None,
    depths: Ints = None,
    top_ks: Ints = None,
    beams: Beams = None,
    *,
    by: str | None = None,
) -> pd.DataFrame:
    """The exact time of every static tree on the trace: a row per setting (and value of `by`).

    total_tokens: root included, 1 for plain steps; None means all within the pool. depths, top_ks:
    None means all recorded ones. beams: None means BEAMS if a family was recorded. A tree with more
    nodes than its pool is cut.

    >>> import specdec
    >>> recording = specdec.explore().recording
    >>> grid = static_grid(recording.trace, recording.costs, total_tokens=[4, 8], depths=[1])
    >>> grid["total_tokens"].tolist()[:2]
    [4, 8]
    """
    shapes, trees = recorded(trace, top_ks, depths, beams)
    totals = None
    if total_tokens is not None:
        totals = np.array(within(total_tokens, 1, trace.most_nodes + 1, "total_tokens"))
    tables = CostTables.of(trace, costs, shapes)
    # 1. all sizes of a depth and width walk at once
    parts: list[pd.DataFrame] = []
    for shape, depth in trees:
        part = _sums(tables, shape, depth, totals, by)
        # plain steps once
        parts.append(part[part["total_tokens"] > 1] if parts and totals is None else part)
    # 2. rates
    table = with_rates(pd.concat(parts, ignore_index=True))
    labels = list(filter(None, [by, *SETTING]))
    return table[[*labels, "ms_per_tok", "tau", *SUMS, "speedup"]]


def _sums(
    tables: CostTables, shape: Shape, depth: int, totals: np.ndarray | None, by: str | None
) -> pd.DataFrame:
    """The sums of all sizes of one depth and width, per value of the turns' column `by`."""
    trace = tables.trace
    if totals is None:
        largest = int(np.max(tables.offered(shape, depth), initial=0))
        totals = np.arange(1, min(trace.most_nodes, largest, pool_size(depth, *shape)) + 2)
    # 1. which turns belong to which group, [turns, groups]
    group = np.zeros(len(trace.turns), dtype=int)
    names = pd.Index(["all"])
    if by is not None:
        check_name("column of the turns", by, trace.turns)
        group, names = pd.factorize(trace.turns[by])
    share = np.eye(len(names))[group]
    # 2. sums over the turns of each group
    walked = _walk(tables, shape, depth, totals - 1)
    cycles, cycle_tok, time_ms = (np.stack(walked) @ share).reshape(3, -1)
    part = pd.DataFrame({"total_tokens": np.repeat(totals, len(names))})
    if by is not None:
        part[by] = np.tile(np.array(names, dtype=object), len(totals))
    part[SETTING[1:]] = depth, shape[0], beam_text(shape[1])
    new_tok = trace.turns["positions"].to_numpy() @ share
    part["new_tok"] = np.tile(new_tok, len(totals)).astype(int)
    part["plain_ms"] = np.tile(tables.plain() @ share, len(totals))
    part["cycles"] = cycles.astype(int)
    part["cycle_tok"] = cycle_tok.astype(int)
    return part.assign(time_ms=time_ms)


def best_static(trace: Trace, costs: CostModel, **grid: Any) -> TreeConfig:
    """The fastest static tree on this trace (a training split). grid: as in `static_grid`."""
    return fastest(static_grid(trace, costs, **grid))


def fastest(table: pd.DataFrame) -> TreeConfig:
    """The tree of least time, the first of equals; all rows produced the same tokens."""
    return tree_of(table.loc[table["time_ms"].idxmin()])


def tree_of(row: Any) -> TreeConfig:
    """The tree of a row with SETTING, cut to its pool."""
    depth = int(row["depth"])
    top_k = int(row["top_k"])
    beam = beam_of(row["beam"])
    total_tokens = min(int(row["total_tokens"]), pool_size(depth, top_k, beam) + 1)
    return TreeConfig(total_tokens, depth, top_k, beam=beam)


def setting(tree: TreeConfig) -> dict[str, Any]:
    """A tree's values of SETTING."""
    values = (tree.total_tokens, tree.depth, tree.top_k, beam_text(tree.beam))
    return dict(zip(SETTING, values, strict=True))


def beam_text(beam: tuple[int, ...]) -> str:
    """A beam's form in tables: "2,1", or "" for as many nodes as there are children."""
    return ",".join(map(str, beam))


def beam_of(text: str) -> tuple[int, ...]:
    """The beam from `beam_text`'s form."""
    return tuple(map(int, filter(None, text.split(","))))


def static_turns(trace: Trace, costs: CostModel, tree: TreeConfig) -> pd.DataFrame:
    """The per-turn table of one static tree; SpecdecError if it was not recorded."""
    shapes, _ = recorded(trace, [tree.top_k], [tree.depth], [tree.beam])
    within([tree.total_tokens], 1, trace.most_nodes + 1, "total_tokens")
    tables = CostTables.of(trace, costs, shapes)
    walked = _walk(tables, shapes[0], tree.depth, np.array([tree.verify_nodes]))
    return tables.turns(*(values[0] for values in walked))


@dataclass(frozen=True)
class CostTables:
    """Milliseconds at each of the U context lengths that occur in a recording."""

    trace: Trace
    where: np.ndarray  # [R]: index of each row's context length
    draft: dict[Shape, np.ndarray]  # per (k, beam), [U, D + 1] with the cycle's fixed rest
    verify: np.ndarray  # [U, most_nodes + 1]
    step: np.ndarray  # [U]: of plain decoding
    plain_ms: np.ndarray  # [U]: a plain step inside the cycle

    @classmethod
    def of(cls, trace: Trace, costs: CostModel, shapes: Sequence[Shape]) -> CostTables:
        context_tok, where = np.unique(np.asarray(trace.context_tok), return_inverse=True)
        column = context_tok[:, None]
        draft = {}
        for top_k, beam in shapes:
            drafted_ms = costs.draft_ms(top_k, np.arange(trace.depth + 1), column, beam)
            draft[top_k, beam] = np.asarray(drafted_ms, float) + costs.rest_ms
        verify = np.asarray(costs.verify_ms(np.arange(trace.most_nodes + 1), column), float)
        assert (np.diff(verify, axis=1) >= 0).all(), "no bound allows more nodes in less time"
        step_ms = np.asarray(costs.step_ms(context_tok), float)
        plain_ms = verify[:, 0] + costs.rest_ms
        return cls(trace, where.reshape(-1), draft, verify, step_ms, plain_ms)

    def before_verification(self, shape: Shape, depth: int) -> np.ndarray:
        """Time of a cycle before it verifies, [R]: drafting and the fixed rest."""
        if self.trace.forwards:
            return self.draft[shape][self.where, depth]
        return self.plain_ms[self.where] - self.verify[self.where, 0]

    def offered(self, shape: Shape, depth: int) -> np.ndarray:
        """Candidates that may be verified, [R]."""
        top_k, beam = shape
        return np.broadcast_to(self.trace.candidates(top_k, depth, beam), len(self.where))

    def path_ranks(self, shape: Shape, depth: int) -> np.ndarray:
        """int [R, depth + 1], with copies [R, longest]: ranks of the path, cut at most_nodes."""
        ranks = self.trace.ranks[shape][:, depth]
        if not self.trace.copies:
            ranks = ranks[:, : depth + 1]
        return np.minimum(ranks, self.trace.most_nodes)

    def plain(self) -> np.ndarray:
        """Time of plain decoding per turn, [turns]."""
        total_ms = np.concatenate(([0.0], np.cumsum(self.step[self.where])))
        first = self.trace.turns["first"].to_numpy()
        return total_ms[first + self.trace.turns["positions"].to_numpy()] - total_ms[first]

    def turns(self, cycles: np.ndarray, cycle_tok: np.ndarray, time_ms: np.ndarray) -> pd.DataFrame:
        """One row per turn, with the columns of `Replayed.table` that depend on no questions."""
        table = self.trace.turns[[*TURN, "part"]].reset_index(drop=True)
        table["new_tok"] = self.trace.turns["positions"].to_numpy()
        sums = dict(cycles=cycles, cycle_tok=cycle_tok, time_ms=time_ms)
        return table.assign(**sums, plain_ms=self.plain())


def _walk(
    tables: CostTables, shape: Shape, depth: int, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """cycles, cycle_tok and time_ms [settings, turns] of trees of `sizes` [settings] nodes."""
    # 1. what a cycle gains and costs before it verifies, at every row
    new_tok = gained_tok(tables.path_ranks(shape, depth), sizes)  # [settings, R]
    draft_ms = tables.before_verification(shape, depth)  # [R]
    offered = tables.offered(shape, depth)
    # 2. one walk per setting and turn
    first = tables.trace.turns["first"].to_numpy()
    size = np.repeat(np.arange(len(sizes)), len(first))
    begin = np.tile(first, len(sizes))
    end = begin + np.tile(tables.trace.turns["positions"], len(sizes))
    position = begin.copy()
    cycles = np.zeros(len(position), int)
    time_ms = np.zeros(len(position))
    walking = np.flatnonzero(position < end)
    while len(walking):
        row = position[walking]
        nodes = sizes[size[walking]]
        context = tables.where[row]
        drafted_ms = draft_ms[row] + tables.verify[context, np.minimum(nodes, offered[row])]
        time_ms[walking] += np.where(nodes > 0, drafted_ms, tables.plain_ms[context])
        cycles[walking] += 1
        position[walking] += new_tok[size[walking], row]
        walking = walking[position[walking] < end[walking]]
    shaped = (len(sizes), -1)
    return cycles.reshape(shaped), (position - begin).reshape(shaped), time_ms.reshape(shaped)


def gained_tok(ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """uint8 [settings, R]: new tokens of a cycle with a tree of that size, with the bonus token."""
    gained = np.zeros((int(sizes.max()) + 1, len(ranks)), dtype=np.uint8)
    gained[0] = 1
    for rank in ranks.T:  # a node of rank r is verified from V = r + 1 on
        row = np.flatnonzero(rank < len(gained) - 1)
        gained[rank[row] + 1, row] += 1
    return np.cumsum(gained, axis=0, dtype=np.uint8)[sizes]


def recorded(
    trace: Trace, top_ks: Ints, depths: Ints, beams: Beams = None
) -> tuple[list[Shape], list[tuple[Shape, int]]]:
    """((top_k, beam), ...), and each with its depths: the given ones, or all recorded ones."""
    # 1. the widths and beams to try
    widths = set(trace.top_ks)
    tried_beams: Iterable[tuple[int, ...]] = ((),)
    if trace.family is not None:
        widths |= set(range(1, trace.family.top_k + 1))
        tried_beams = BEAMS
    if beams is not None:
        tried_beams = list(beams)
    chosen = within(widths if top_ks is None else top_ks, 1, 1 << 15, "top_ks")
    tried = [(top_k, plain_beam(top_k, beam)) for top_k in chosen for beam in tried_beams]
    # 2. those that were recorded; each width needs one, and each beam that was asked for
    shapes = [shape for shape in dict.fromkeys(tried) if trace.depth_of(*shape) >= 0]
    missing: set[Any] = {top_k for top_k, _ in tried} - {top_k for top_k, _ in shapes}
    if beams is not None and not missing:
        missing = set(tried) - set(shapes)
    if missing:
        raise SpecdecError(f"top_k {sorted(missing)} was not recorded, only {sorted(widths)}.")
    trees = []
    chosen = within(range(trace.depth + 1) if depths is None else depths, 0, trace.depth, "depths")
    for shape in shapes:
        trees += [(shape, depth) for depth in chosen if depth <= trace.depth_of(*shape)]
    return shapes, trees


def within(values: Iterable[int], low: int, high: int, what: str) -> list[int]:
    """Sorted distinct whole numbers; SpecdecError outside low to high."""
    numbers = sorted({int(value) for value in values})
    if not numbers or numbers[0] < low or numbers[-1] > high:
        raise SpecdecError(f"{what} must be whole numbers from {low} to {high}, got {numbers!r}.")
    return numbers
