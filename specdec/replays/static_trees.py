"""Every static tree on a recording, exactly: accepted tokens and time of its cycles, without
decoding anything.

    from position p on a tree of V nodes and depth n goes to  p + accepted_tok(p, n, V) + 1,
    which costs                                               draft_ms(n) + verify_ms(V) + rest_ms

Both are look-ups, so a static tree is a walk over positions, and thousands of trees walk at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specdec.core.records import SUMS, TURN, with_rates
from specdec.core.tree_config import TreeConfig, plain_beam, pool_size
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_name, door
from specdec.replays.trace import Trace

Shape = tuple[int, tuple[int, ...]]  # children per node, beam
Tree = tuple[Shape, int]  # and its expansions
Rows = tuple[np.ndarray, np.ndarray] | None  # of walks: the first of each, and where it ends
Ints = Iterable[int] | None  # numbers to try; None: all that were recorded
Beams = Iterable[tuple[int, ...]] | None
COPIES: Shape = (0, ())  # copied candidates alone
WALKED = ["cycles", "cycle_tok", "time_ms", "new_tok", "plain_ms"]
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
    tables = CostTables(trace, costs, shapes)
    # 1. which turns belong to which group, [turns, groups]
    group = np.zeros(len(trace.turns), dtype=int)
    names = pd.Index(["all"])
    if by is not None:
        check_name("column of the turns", by, trace.turns)
        group, names = pd.factorize(trace.turns[by])
    share = np.eye(len(names))[group]
    labels = np.array(names, dtype=object)
    turns = [trace.turns["positions"].to_numpy(), tables.plain()]
    # 2. all sizes of a depth and width walk at once; sums over the turns of each group
    parts: list[pd.DataFrame] = []
    for shape, depth in trees:
        sizes = totals
        if sizes is None:
            largest = int(np.max(tables.offered(shape, depth), initial=0))
            sizes = np.arange(1, min(trace.most_nodes, largest, pool_size(depth, *shape)) + 2)
        walked = walk(tables, (shape, depth), sizes - 1)
        sums = [values @ share for values in (*walked, *np.broadcast_arrays(*turns, walked[0])[:2])]
        part = pd.DataFrame(dict(zip(WALKED, map(np.ravel, sums), strict=True)))
        part[SETTING[1:]] = depth, shape[0], beam_text(shape[1])
        part["total_tokens"] = np.repeat(sizes, len(names))
        part[by or "all"] = np.tile(labels, len(sizes))
        # plain steps once
        parts.append(part[part["total_tokens"] > 1] if parts and totals is None else part)
    # 3. rates
    table = pd.concat(parts, ignore_index=True)
    table = with_rates(table.astype(dict.fromkeys(("new_tok", "cycles", "cycle_tok"), int)))
    columns = [by, *SETTING] if by else SETTING
    return table[[*columns, "ms_per_tok", "tau", *SUMS, "speedup"]]


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
    tables = CostTables(trace, costs, shapes)
    walked = walk(tables, (shapes[0], tree.depth), np.array([tree.verify_nodes]))
    return tables.turns(*(values[0] for values in walked))


class CostTables:
    """Milliseconds at each of the U context lengths that occur in a recording.

    where [R]: index of each row's context length. draft: per (k, beam), [U, D + 1] with the cycle's
    fixed rest. verify [U, most_nodes + 1]. plain_ms [U]: a plain step inside the cycle.
    """

    def __init__(self, trace: Trace, costs: CostModel, shapes: Sequence[Shape]):
        self.trace = trace
        context_tok, where = np.unique(np.asarray(trace.context_tok), return_inverse=True)
        self.where = where.reshape(-1)
        column = context_tok[:, None]
        self.draft = {}
        for top_k, beam in shapes:
            drafted_ms = costs.draft_ms(top_k, np.arange(trace.depth + 1), column, beam)
            self.draft[top_k, beam] = np.asarray(drafted_ms, float) + costs.rest_ms
        self.verify = np.asarray(costs.verify_ms(np.arange(trace.most_nodes + 1), column), float)
        assert (np.diff(self.verify, axis=1) >= 0).all(), "no bound allows more nodes in less time"
        self.step_ms = np.asarray(costs.step_ms(context_tok), float)
        self.plain_ms = self.verify[:, 0] + costs.rest_ms

    # Of a tree of `shape` after `depth` expansions; COPIES are candidates that need no drafting.

    def before_verification(self, shape: Shape, depth: int) -> np.ndarray:
        """Time of a cycle before it verifies, [R]: drafting and the fixed rest."""
        if shape == COPIES or not self.trace.forwards:
            return (self.plain_ms - self.verify[:, 0])[self.where]
        return self.draft[shape][self.where, depth]

    def offered(self, shape: Shape, depth: int) -> np.ndarray:
        """Candidates that may be verified, [R]."""
        if shape == COPIES:
            return self.trace.copied
        top_k, beam = shape
        return np.broadcast_to(self.trace.candidates(top_k, depth, beam), len(self.where))

    def path_ranks(self, shape: Shape, depth: int) -> np.ndarray:
        """int [R, depth + 1], with copies [R, longest]: ranks of the path, cut at most_nodes."""
        if shape == COPIES:
            ranks = self.trace.column("copied_ranks")
        else:
            ranks = self.trace.ranks[shape][:, depth]
            if not self.trace.copies:
                ranks = ranks[:, : depth + 1]
        return np.minimum(ranks, self.trace.most_nodes)

    @property
    def turn_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """First row of every turn, and the row after its last, [turns] each."""
        first = self.trace.turns["first"].to_numpy()
        return first, first + self.trace.turns["positions"].to_numpy()

    def plain(self) -> np.ndarray:
        """Time of plain decoding per turn, [turns]."""
        total_ms = np.concatenate(([0.0], np.cumsum(self.step_ms[self.where])))
        first, end = self.turn_rows
        return total_ms[end] - total_ms[first]

    def turns(self, cycles: np.ndarray, cycle_tok: np.ndarray, time_ms: np.ndarray) -> pd.DataFrame:
        """One row per turn, with the columns of `Replayed.table` that depend on no questions."""
        table = self.trace.turns[[*TURN, "part"]].reset_index(drop=True)
        table["new_tok"] = self.trace.turns["positions"].to_numpy()
        sums = dict(cycles=cycles, cycle_tok=cycle_tok, time_ms=time_ms)
        return table.assign(**sums, plain_ms=self.plain())


def walk(
    tables: CostTables, tree: Tree, sizes: np.ndarray, rows: Rows = None, most_cycles: int = 1 << 30
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """cycles, cycle_tok and time_ms [sizes, walks] of trees of `sizes` nodes.

    rows: by default those of the turns.
    """
    # 1. what a cycle gains and costs before it verifies, at every row
    new_tok = gained_tok(tables.path_ranks(*tree), sizes)  # [sizes, R]
    draft_ms = tables.before_verification(*tree)  # [R]
    offered = tables.offered(*tree)
    # 2. one walk per size and first row
    first, end = rows or tables.turn_rows
    size = np.repeat(np.arange(len(sizes)), len(first))
    begin = np.tile(first, len(sizes))
    end = np.tile(end, len(sizes))
    position = begin.copy()
    cycles = np.zeros(len(position), int)
    time_ms = np.zeros(len(position))
    walking = np.flatnonzero(position < end)
    while len(walking) and most_cycles:
        row = position[walking]
        nodes = sizes[size[walking]]
        context = tables.where[row]
        drafted_ms = draft_ms[row] + tables.verify[context, np.minimum(nodes, offered[row])]
        time_ms[walking] += np.where(nodes > 0, drafted_ms, tables.plain_ms[context])
        cycles[walking] += 1
        position[walking] += new_tok[size[walking], row]
        walking = walking[position[walking] < end[walking]]
        most_cycles -= 1
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
    trace: Trace, top_ks: Ints = None, depths: Ints = None, beams: Beams = None
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
    tried = dict.fromkeys((k, plain_beam(k, beam)) for k in chosen for beam in tried_beams)
    # 2. those that were recorded, with their depths; a beam may be missing unless it was asked for
    shapes = []
    trees = []
    depths = within(range(trace.depth + 1) if depths is None else depths, 0, trace.depth, "depths")
    for shape in tried:
        deepest = trace.depth_of(*shape)
        if deepest >= 0:
            shapes.append(shape)
            trees += [(shape, depth) for depth in depths if depth <= deepest]
        elif beams is not None or not shape[1]:
            why = f"top_k={shape[0]} with beam={shape[1]} was not recorded"
            raise SpecdecError(f"{why}, only {sorted(widths)}.")
    return shapes, trees


def within(values: Iterable[int], low: int, high: int, what: str) -> list[int]:
    """Sorted distinct whole numbers; SpecdecError outside low to high."""
    numbers = sorted({int(value) for value in values})
    if not numbers or numbers[0] < low or numbers[-1] > high:
        raise SpecdecError(f"{what} must be whole numbers from {low} to {high}, got {numbers!r}.")
    return numbers
