"""Every static tree on a recording, exactly: accepted tokens and time of its cycles, without
decoding anything.

    from position p on a tree of V nodes and depth n goes to  p + accepted_tok(p, n, V) + 1,
    which costs                                               draft_ms(n) + verify_ms(V) + rest_ms

Both are look-ups, so a static tree is a walk over positions, and thousands of trees walk at once.
`trace` and `costs` are a `trace.Trace` and a `model.CostModel`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

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
    """The exact time of every static tree on the trace: one row per setting, and per value of the
    turns' column `by` if given.

    total_tokens: root included, 1 for plain steps; None means 2 .. most_nodes + 1 within the pool,
    and plain steps once, under the first depth and width. depths, top_ks: None means all recorded
    ones. beams: of TreeConfig; None means BEAMS if a family was recorded. The column beam holds
    them as text. A tree with more nodes than its pool is cut, as in the cycle. as_fast: whether the
    costs cannot tell it from the fastest (of its value of `by`).

    >>> import specdec
    >>> from specdec.costs.profiles import profile
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> small = dict(depth=3, top_ks=(3,), trees=(), max_new_tokens=8, progress=False)
    >>> trace = specdec.record(pair, {"mine": ["What is 2 + 3?"]}, **small)
    >>> costs = profile("roofline-a100-llama-8b-eager")
    >>> grid = static_grid(trace, costs, total_tokens=[4, 8, 16], depths=[1, 2])
    >>> grid[["total_tokens", "depth"]].to_numpy().tolist()[:2], bool((grid["tau"] >= 1).all())
    ([[4, 1], [8, 1]], True)
    """
    shapes, depths = recorded(trace, top_ks, depths, beams)
    requested = (
        None
        if total_tokens is None
        else within(total_tokens, 1, trace.most_nodes + 1, "total_tokens")
    )
    tables = CostTables.of(trace, costs, shapes)
    if by is None:
        names = ["all"]
        group = np.zeros(len(trace.turns), dtype=int)
    else:
        group, found = pd.factorize(trace.turns[check_name("column of the turns", by, trace.turns)])
        names = list(found)
    share = np.eye(len(names))[group]  # [turns, groups]
    plain_ms = tables.plain(trace) @ share
    new_tok = trace.turns["positions"].to_numpy() @ share
    pairs = [
        (shape, depth) for shape in shapes for depth in depths if depth <= trace.depth_of(*shape)
    ]
    parts: list[pd.DataFrame] = []
    for (top_k, beam), depth in tqdm(pairs, desc="static trees", delay=2, leave=False):
        offered = int(np.max(trace.candidates(top_k, depth, beam), initial=0))
        most = min(trace.most_nodes, offered, pool_size(depth, top_k, beam))
        totals = (
            np.arange(2 if parts else 1, most + 2) if requested is None else np.array(requested)
        )
        walked = _walk(trace, tables, (top_k, beam), depth, totals - 1)
        # [settings * groups]
        cycles, cycle_tok, time_ms = ((values @ share).ravel() for values in walked)
        columns = dict(
            total_tokens=np.repeat(totals, len(names)),
            depth=depth,
            top_k=top_k,
            beam=beam_text(beam),
        )
        columns |= dict(
            new_tok=np.tile(new_tok, len(totals)).astype(int),
            plain_ms=np.tile(plain_ms, len(totals)),
        )
        columns |= dict(cycles=cycles.astype(int), cycle_tok=cycle_tok.astype(int), time_ms=time_ms)
        labels = {} if by is None else {by: np.tile(np.array(names, dtype=object), len(totals))}
        parts.append(pd.DataFrame(labels | columns))
    table = with_rates(pd.concat(parts, ignore_index=True))
    least_ms = (
        table["time_ms"].min() if by is None else table.groupby(by)["time_ms"].transform("min")
    )
    table["as_fast"] = np.log(table["time_ms"] / least_ms) <= costs.uncertainty_frac
    return table[
        [*([] if by is None else [by]), *SETTING, "ms_per_tok", "tau", *SUMS, "speedup", "as_fast"]
    ]


def best_static(trace: Trace, costs: CostModel, **grid: Any) -> TreeConfig:
    """The fastest static tree on this trace (a training split).

    grid: total_tokens, depths, top_ks, beams of `static_grid`.
    """
    return fastest(static_grid(trace, costs, **grid))


def fastest(table: pd.DataFrame) -> TreeConfig:
    """The tree of least time, the first of equals; all rows produced the same tokens."""
    return tree_of(table.loc[table["time_ms"].idxmin()])


def tree_of(row: Any) -> TreeConfig:
    """The tree of a row with SETTING, cut to its pool."""
    depth = int(row["depth"])
    top_k = int(row["top_k"])
    beam = beam_of(row["beam"])
    return TreeConfig(
        min(int(row["total_tokens"]), pool_size(depth, top_k, beam) + 1), depth, top_k, beam=beam
    )


def setting(tree: TreeConfig) -> dict[str, Any]:
    """A tree's values of SETTING."""
    return {name: getattr(tree, name) for name in SETTING[:-1]} | {"beam": beam_text(tree.beam)}


def beam_text(beam: tuple[int, ...]) -> str:
    """A beam's form in tables: "2,1", or "" for as many nodes as there are children."""
    return ",".join(map(str, beam))


def beam_of(text: str) -> tuple[int, ...]:
    """The beam from `beam_text`'s form."""
    return tuple(int(width) for width in text.split(",") if width)


def static_turns(trace: Trace, costs: CostModel, tree: TreeConfig) -> pd.DataFrame:
    """The per-turn table of one static tree."""
    shapes = judged_shapes(trace, tree)
    tables = CostTables.of(trace, costs, shapes)
    walked = _walk(trace, tables, shapes[0], tree.depth, np.array([tree.verify_nodes]))
    return turn_table(trace, tables, *(values[0] for values in walked))


def judged_shapes(trace: Trace, tree: TreeConfig) -> list[Shape]:
    """The tree's shape as recorded; SpecdecError if the recording cannot replay the tree."""
    shapes, _ = recorded(trace, [tree.top_k], [tree.depth], [tree.beam])
    within([tree.total_tokens], 1, trace.most_nodes + 1, "total_tokens")
    return shapes


def turn_table(
    trace: Trace, tables: CostTables, cycles: np.ndarray, cycle_tok: np.ndarray, time_ms: np.ndarray
) -> pd.DataFrame:
    """One row per turn, with the columns of `Replayed.table` that do not depend on a policy's
    questions.
    """
    table = trace.turns[[*TURN, "part"]].reset_index(drop=True)
    counted = {
        "new_tok": trace.turns["positions"].to_numpy(),
        "cycles": cycles,
        "cycle_tok": cycle_tok,
    }
    return table.assign(**counted, time_ms=time_ms, plain_ms=tables.plain(trace))


@dataclass(frozen=True)
class CostTables:
    """Milliseconds at each of the U context lengths that occur."""

    where: np.ndarray  # [R]: index of each row's context length
    draft: dict[Shape, np.ndarray]  # per (k, beam), [U, D + 1] with the cycle's fixed rest
    verify: np.ndarray  # [U, most_nodes + 1]
    step: np.ndarray  # [U]: of plain decoding
    plain_ms: np.ndarray  # [U]: a plain step inside the cycle

    @classmethod
    def of(cls, trace: Trace, costs: CostModel, shapes: Sequence[Shape]) -> CostTables:
        if not len(trace.turns) or not trace.turns["positions"].sum():
            raise SpecdecError(
                "the trace holds no position where a cycle could start; record some turns."
            )
        context_tok, where = np.unique(np.asarray(trace.context_tok), return_inverse=True)
        column = context_tok[:, None]
        depths = np.arange(trace.depth + 1)
        nodes = np.arange(trace.most_nodes + 1)
        levels = {(k, beam): costs.draft_ms(k, depths, column, beam) for k, beam in shapes}
        draft = {
            shape: np.asarray(drafted_ms, float) + costs.rest_ms
            for shape, drafted_ms in levels.items()
        }
        verify = np.asarray(costs.verify_ms(nodes, column), float)
        assert (np.diff(verify, axis=1) >= 0).all(), "no bound allows more nodes in less time"
        step_ms = np.asarray(costs.step_ms(context_tok), float)
        return cls(where.reshape(-1), draft, verify, step_ms, verify[:, 0] + costs.rest_ms)

    def before_verification(self, trace: Trace, shape: Shape, depth: int) -> np.ndarray:
        """Time of a cycle before it verifies, [R]: drafting and the fixed rest, or the rest alone
        where only copies are drafted.
        """
        drafted_ms = self.draft[shape][self.where, depth]
        copied_ms = self.plain_ms[self.where] - self.verify[self.where, 0]
        return drafted_ms if trace.forwards else copied_ms

    def plain(self, trace: Trace) -> np.ndarray:
        """Time of plain decoding per turn, [turns]."""
        total_ms = np.concatenate(([0.0], np.cumsum(self.step[self.where])))
        first = trace.turns["first"].to_numpy()
        return total_ms[first + trace.turns["positions"].to_numpy()] - total_ms[first]


def path_ranks(trace: Trace, shape: Shape, depth: int) -> np.ndarray:
    """int [R, depth + 1]: ranks of the target's path after `depth` expansions; most_nodes if beyond
    every recorded size.

    With copies among the candidates, of the whole recorded path: it may be longer than the drafted
    one.
    """
    ranks = trace.ranks[shape][:, depth]
    return np.minimum(ranks if trace.copies else ranks[:, : depth + 1], trace.most_nodes)


def _walk(
    trace: Trace, tables: CostTables, shape: Shape, depth: int, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """cycles, cycle_tok and time_ms [settings, turns] of trees of `sizes` [settings] nodes,
    computed together.
    """
    first = trace.turns["first"].to_numpy()
    positions = trace.turns["positions"].to_numpy()
    new_tok = gained_tok(path_ranks(trace, shape, depth), sizes).ravel()  # [settings * R]
    draft_ms = tables.before_verification(trace, shape, depth)  # [R]
    nodes = np.repeat(sizes, len(first))
    offered = trace.candidates(shape[0], depth, shape[1])
    offered = np.broadcast_to(offered, len(draft_ms))  # [R]
    # start of a setting's new_tok
    start = np.repeat(np.arange(len(sizes)) * len(draft_ms), len(first))
    row = np.tile(first, len(sizes))  # one walk per setting and turn
    end = row + np.tile(positions, len(sizes))
    cycles = np.zeros(len(row), int)
    time_ms = np.zeros(len(row))
    walking = np.flatnonzero(row < end)
    while len(walking):
        here = row[walking]
        verified = np.minimum(nodes[walking], offered[here])
        drafted_ms = draft_ms[here] + tables.verify[tables.where[here], verified]
        time_ms[walking] += np.where(
            nodes[walking] > 0, drafted_ms, tables.plain_ms[tables.where[here]]
        )
        cycles[walking] += 1
        here = here + new_tok[start[walking] + here]
        row[walking] = here
        walking = walking[here < end[walking]]
    cycle_tok = row - np.tile(first, len(sizes))
    shape_of = len(sizes), -1
    return cycles.reshape(shape_of), cycle_tok.reshape(shape_of), time_ms.reshape(shape_of)


def gained_tok(ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """uint8 [settings, R]: new tokens of a cycle with a tree of that size, the bonus token
    included.
    """
    gained = np.zeros((int(sizes.max()) + 1, len(ranks)), dtype=np.uint8)
    gained[0] = 1
    for rank in ranks.T:  # a node of rank r is verified from V = r + 1 on
        row = np.flatnonzero(rank < len(gained) - 1)
        gained[rank[row] + 1, row] += 1
    return np.cumsum(gained, axis=0, dtype=np.uint8)[sizes]


def recorded(
    trace: Trace, top_ks: Ints, depths: Ints, beams: Beams = None
) -> tuple[list[Shape], list[int]]:
    """((top_k, beam), ...) and depths: the given ones, or all recorded ones; SpecdecError for
    unrecorded ones.
    """
    known = sorted(int(k) for k in trace.top_ks)
    if trace.family is not None and top_ks is None:
        known = sorted({*known, *range(1, trace.family.top_k + 1)})
    tried = (BEAMS if trace.family is not None else ((),)) if beams is None else beams
    wanted = known if top_ks is None else within(top_ks, 1, 1 << 15, "top_ks")
    asked = [(k, plain_beam(k, beam)) for k in wanted for beam in tried]
    shapes = [shape for shape in dict.fromkeys(asked) if trace.depth_of(*shape) >= 0]
    unknown = [k for k in sorted({k for k, _ in asked}) if not any(k == own for own, _ in shapes)]
    if unknown or (beams is not None and len(shapes) < len(set(asked))):
        missing: list[Any] = [*unknown] or [shape for shape in asked if shape not in shapes]
        raise SpecdecError(
            f"top_k {missing} was not recorded, only {known}; ask for these or record again."
        )
    return shapes, within(
        range(trace.depth + 1) if depths is None else depths, 0, trace.depth, "depths"
    )


def within(values: Iterable[Any], low: int, high: int, what: str) -> list[int]:
    """Sorted distinct whole numbers; SpecdecError outside low to high."""
    try:
        numbers = sorted({operator.index(value) for value in values})
    except TypeError:
        numbers = []
    if not numbers or numbers[0] < low or numbers[-1] > high:
        why = f"{what} must be whole numbers from {low} to {high}, as recorded, got {values!r}"
        raise SpecdecError(f"{why}; record again.")
    return numbers
