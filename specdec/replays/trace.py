"""A recording: what every draft tree would have accepted, at every position of a text.

    accepted_tok(r, k, n, V) = number of j with  ranks[k][r, n, j] < V

The target's continuation does not depend on the tree. So for each position r, each beam width k and each number n of
expansions it is enough to know the rank, by the drafter's score, of every node j on the target's own path: a tree of V nodes
holds the V best. Exact at every temperature.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike

from specdec import runs, stored
from specdec.core.text import Text
from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError, door
from specdec.replays.columns import Column, Columns, column_of, keyed, read_columns, stacked, write_columns
from specdec.replays.family import Family, member, path_places

SCHEMA = 1
ADVICE = "record again"
TURNS = ("suite", "prompt", "turn", "part", "prompt_tok", "kept_tok", "first", "positions", "piece")
NEVER = np.iinfo(np.int16).max  # the rank of a node outside the pool
ROOT_CANDIDATES = 64  # the root's children recorded beside the tree: RADAR's flat tree verifies 59 of them


@dataclasses.dataclass(frozen=True)
class Trees:
    """Whole candidate trees of R positions for one k, in creation order (k of the root, then k * k per expansion).

    scores float32 [R, C], tokens int32 [R, C] with C = k + depth * k**2; beams int16 [R, depth, k]: the flat indices,
    inside level i's candidates, of the nodes that expansion i expands.
    """

    scores: np.ndarray
    tokens: np.ndarray
    beams: np.ndarray


class Trace:
    """Positions of all turns, turn after turn: row r is one position where a cycle may start.

    header: schema, key, pair, dtype, temperature, seed, depth, top_ks, most_nodes, position_limit.
    turns: one row per turn: suite, prompt, turn, part, prompt_tok, kept_tok, first (row), positions (kept_tok - 1).
    columns: by Column, or by kind, arrays over positions (Column("ranks", 10) int16 [R, depth + 1, depth + 1],
    context_tok, root_rank, ...); the rest is read by `load` on first use.
    acceptance_distributions: RADAR's at some positions, (rows int64 [Q], float32 [Q, 8, 9]), or None. Entry (q, a, j) is the
    probability at T = 1 that the tree after a + 1 draft calls has j tokens accepted.
    """

    def __init__(
        self,
        header: dict[str, Any],
        turns: pd.DataFrame,
        columns: Columns,
        load: Callable[[Column], np.ndarray | None] | None = None,
        acceptance_distributions: tuple[np.ndarray, np.ndarray] | None = None,
        made: tuple[Any, ...] | None = None,
    ):
        self._made = made  # (function, arguments) with which another process makes the same
        self.header, self.turns, self._columns, self._load = header, turns, keyed(columns), load
        self.acceptance_distributions = acceptance_distributions
        self.depth: int = header["depth"]
        self.top_ks, self.most_nodes = tuple(header["top_ks"]), int(header["most_nodes"])
        # levels: the longest copied path; forwards: whether anything is drafted by a network
        self.copies: dict[str, Any] | None = header.get("copies")
        self.forwards = self.copies is None or bool(self.copies["forwards"])

    def __reduce__(self) -> tuple[Any, ...]:
        """A recording on disk is reopened by the receiving process; one in memory is sent whole."""
        return self._made or (Trace, (self.header, self.turns, self._columns, None, self.acceptance_distributions))

    def __len__(self) -> int:
        return int(self.turns["positions"].sum())

    def __repr__(self) -> str:
        return f"Trace({len(self.turns)} turns, {len(self)} positions, k in {self.top_ks}, depth {self.depth})"

    def column(self, kind: str, top_k: int = 0, beam: tuple[int, ...] = (), level: int = -1) -> np.ndarray:
        """One array over positions, by its Column. SpecdecError if the recording lacks it."""
        column = Column(kind, top_k, beam, level)
        if column not in self._columns:
            array = self._load(column) if self._load is not None else None
            if array is None and top_k:
                array = self._of_family(column)
            if array is None and kind == "matched" and "ids" in self.turns and self.header["trees"]:
                top_k = max(self.header["trees"])
                array = _matched(self.turns, self.column("tokens", top_k)[:, :top_k])
            if array is None:
                how = f" (--trees {top_k})" if kind in ("scores", "tokens", "beams") and top_k else ""
                raise SpecdecError(f"the recording holds no {column.name}; record again with it{how}.")
            self._columns[column] = array
        return self._columns[column]

    @property
    def context_tok(self) -> np.ndarray:
        """int32 [R]: committed tokens before the root."""
        return self.column("context_tok")

    @property
    def text(self) -> np.ndarray:
        """int32 [R, depth + 2]: the root's token and the target's next ones."""
        return self.column("text")

    @property
    def root_rank(self) -> np.ndarray:
        """int16 [R]: rank of the target's next token among the root's ROOT_CANDIDATES best, NEVER if not among them."""
        return self.column("root_rank")

    @property
    def features(self) -> np.ndarray | None:
        """float16 [R, F]: the target's features at the last accepted token, or None if not recorded."""
        return self.column("features") if self.header.get("features") else None

    @property
    def draft_state(self) -> np.ndarray | None:
        """float16 [R, H]: the drafter's state at the root, or None if not recorded."""
        try:
            return self.column("draft_state")
        except SpecdecError:
            return None

    @property
    def ranks(self) -> _ByWidth:
        """ranks[k], or ranks[k, beam] (see TreeConfig): int16 [R, depth + 1, depth + 1], non-decreasing in j.

        (r, n, j) is the rank, in the pool after n expansions, of the node at depth j + 1 on the target's path, or NEVER.
        """
        return _ByWidth(self)

    def _of_family(self, column: Column) -> np.ndarray | None:
        """Ranks or scores of a tree that only the recorded family holds; NEVER beyond its depth."""
        kind, top_k, beam, _ = column
        levels, by_itself = self.depth_of(top_k, beam), top_k in self.top_ks and not beam
        if levels < 0 or by_itself or kind not in ("ranks", "scores"):  # recorded separately: with scores or without
            return None
        assert self.family is not None, "nothing else is as deep"
        scores, nodes = member(self.column, self.family, top_k, beam, levels)
        if kind == "scores":
            return scores
        ranks = path_ranks(scores, nodes, top_k, beam)
        beyond = self.depth - levels
        return np.pad(ranks, ((0, 0), (0, beyond), (0, beyond)), constant_values=NEVER)

    @property
    def family(self) -> Family | None:
        """All trees up to a number of children and nodes per level, if recorded."""
        numbers = self.header.get("family")
        return Family(numbers[0], tuple(numbers[1:])) if numbers else None

    def depth_of(self, top_k: int, beam: tuple[int, ...] = ()) -> int:
        """The most expansions of such trees that can be replayed; -1 for none. Without drafted nodes all trees are equal."""
        if not self.forwards or (top_k in self.top_ks and not beam):
            return self.depth
        return self.family.depth_of(top_k, beam, self.depth) if self.family else -1

    def beside(self, kind: str, column: np.ndarray, what: str) -> Trace:
        """The recording with one more array over positions; its header describes it."""
        assert len(column) == len(self), f"{kind} has {len(column)} rows for {len(self)} positions"
        columns = {**self._columns, Column(kind): column}
        return Trace({**self.header, kind: what}, self.turns, columns, self._load, self.acceptance_distributions)

    def trees(self, top_k: int) -> Trees:
        """The whole candidate trees for one k."""
        check_recorded(self, top_k=top_k)
        return Trees(*(self.column(kind, top_k) for kind in ("scores", "tokens", "beams")))

    def accepted_tok(
        self, rows: Any, top_k: int, expansions: int, verify_nodes: int, beam: tuple[int, ...] = ()
    ) -> np.ndarray:
        """int64 [rows]: accepted draft tokens of one tree at many positions."""
        check_recorded(self, top_k, expansions, verify_nodes, beam)
        return (self.ranks[top_k, beam][rows, expansions] < verify_nodes).sum(-1)

    def candidates(self, top_k: int, expansions: int, beam: tuple[int, ...] = ()) -> np.ndarray | int:
        """Number of nodes available for verification: one number, or int [R] if copies are among them."""
        if not self.forwards:
            return self.copied
        if self.copies:
            return self.column("candidates", top_k)[:, expansions].astype(int)
        return pool_size(expansions, top_k, beam)

    @functools.cached_property
    def copied(self) -> np.ndarray:
        """int [R]: copied candidates."""
        return np.isfinite(self.column("copied_scores")).sum(1)

    def select(self, mask: ArrayLike | None = None, part: str | None = None) -> Trace:
        """The turns of a boolean mask, or of one part ("train", "tune", "test"), as a trace of their own."""
        mask = self.turns["part"].to_numpy() == part if part is not None else np.asarray(mask, dtype=bool)
        if not mask.any():
            parts, of = ", ".join(dict.fromkeys(self.turns["part"])), f" of part {part!r}" if part is not None else ""
            raise SpecdecError(f"no recorded turn is left{of} (there are {parts}); record more prompts or take others.")
        turns = self.turns[mask]
        rows = np.concatenate([np.arange(f, f + n) for f, n in zip(turns["first"], turns["positions"], strict=True)])
        distributions = self.acceptance_distributions
        if distributions is not None:
            inside = np.isin(distributions[0], rows)
            distributions = np.searchsorted(rows, distributions[0][inside]), distributions[1][inside]
        columns, made = {column: array[rows] for column, array in self._columns.items()}, (Trace.select, (self, mask))
        return Trace(self.header, numbered(turns), columns, lambda one: self.column(*one)[rows], distributions, made)

    def restrict(self, ranges: dict[str, tuple[int, int]]) -> Trace:
        """The recording restricted to the `ranges` at which a cost model was measured.

        ranges: "top_k", "expansions" and "verify_nodes" -> (low, high); missing ones are not restricted. Shallower and smaller
        trees than the low ends stay: a cost model keeps its first value there, so they gain nothing.
        """
        low, high = ranges.get("top_k", (1, max(self.top_ks)))
        top_ks = tuple(top_k for top_k in self.top_ks if low <= top_k <= high)
        if not top_ks:
            raise SpecdecError(f"the costs were measured at top_k {low} to {high}, which was not recorded; record it.")
        depth = min(self.depth, ranges.get("expansions", (0, self.depth))[1])
        most_nodes = min(self.most_nodes, ranges.get("verify_nodes", (0, self.most_nodes))[1])
        if (top_ks, depth, most_nodes) == (self.top_ks, self.depth, self.most_nodes):
            return self

        def cut(column: Column) -> np.ndarray:
            kind, array = column.kind, self.column(*column)
            if kind == "ranks" and not self.copies:  # copied paths may be longer than the drafted one
                return array[:, : depth + 1, : depth + 1]
            if kind in ("ranks", "candidates", "family_path"):
                return array[:, : depth + 1]
            if kind == "beams":
                return array[:, :depth]
            return array[:, : pool_size(depth, column.top_k, column.beam)] if kind in ("scores", "tokens") else array

        header = {**self.header, "top_ks": top_ks, "depth": depth, "most_nodes": most_nodes}
        made, columns = (Trace.restrict, (self, ranges)), {"context_tok": self.context_tok}
        return Trace(header, self.turns, columns, cut, self.acceptance_distributions, made)


@dataclasses.dataclass(frozen=True)
class _ByWidth:
    """trace.ranks[k], read on demand."""

    trace: Trace

    def __getitem__(self, width: int | tuple[int, tuple[int, ...]]) -> np.ndarray:
        top_k, beam = width if isinstance(width, tuple) else (width, ())
        check_recorded(self.trace, top_k, beam=beam)
        if not self.trace.forwards:
            ranks = self.trace.column("copied_ranks")
            return np.broadcast_to(ranks[:, None], (len(ranks), self.trace.depth + 1, ranks.shape[1]))
        return self.trace.column("ranks", top_k, beam)


def check_recorded(
    trace: Trace, top_k: int | None = None, expansions: int = 0, verify_nodes: int = 0, beam: tuple[int, ...] = ()
) -> None:
    """Refuse an answer that the recording cannot replay."""
    deepest = trace.depth if top_k is None else trace.depth_of(top_k, beam)
    if deepest < 0:
        known = f" and the family {trace.family}" if trace.family else ""
        own = f" and beam={beam}" if beam else ""
        raise SpecdecError(f"top_k={top_k}{own} was not recorded, only {trace.top_ks}{known}; record again with it.")
    if not 0 <= expansions <= deepest:
        raise SpecdecError(f"depth {expansions} was asked for, but such trees were recorded to depth {deepest}.")
    if verify_nodes > trace.most_nodes:
        raise SpecdecError(f"{verify_nodes} nodes were asked for, but the recording judges at most {trace.most_nodes}.")


def _matched(turns: pd.DataFrame, children: np.ndarray) -> np.ndarray:
    """int16 [R, 2]: how many tokens of the text's end stand earlier in it, and which of the root's `children` [R, k] followed
    there; -1 for none of them."""
    rows = np.empty((len(children), 2), np.int16)
    for ids, first, prompt, positions in turns[["ids", "first", "prompt_tok", "positions"]].itertuples(index=False):
        text, tokens = Text(), torch.as_tensor(np.asarray(ids))
        for row in range(first, first + positions):
            text.grow_to(tokens[: prompt + row - first + 1])
            count, token = text.repeats()
            hit = np.flatnonzero(children[row] == token)
            rows[row] = count, hit[0] if len(hit) else -1
    return rows


def numbered(turns: pd.DataFrame) -> pd.DataFrame:
    """The turns with `first`, the first row of each if all are in sequence."""
    first = np.concatenate(([0], turns["positions"].cumsum()[:-1])).astype(int)
    return turns.assign(first=first).reset_index(drop=True)


def joined(traces: list[Trace], top_k: int) -> Trace:
    """Several recordings of one pair as one, for one k and the smallest of their depths: ranks, scores and features."""
    if len({(trace.header["pair"], trace.header.get("weights")) for trace in traces}) > 1:
        raise SpecdecError("recordings of different pairs cannot be joined; record them with one pair.")
    common = {"top_k": (top_k, top_k), "expansions": (0, min(trace.depth for trace in traces))}
    common["verify_nodes"] = (0, min(trace.most_nodes for trace in traces))
    parts = [trace.restrict(common) for trace in traces]
    kept = Column("context_tok"), Column("ranks", top_k), Column("scores", top_k)
    columns: dict[Column, list[Any]] = {column: [part.column(*column) for part in parts] for column in kept}
    columns |= {Column(kind): [getattr(part, kind) for part in parts] for kind in ("features", "draft_state")}
    held = {one: np.concatenate(arrays) for one, arrays in columns.items() if all(part is not None for part in arrays)}
    turns = numbered(pd.concat([part.turns for part in parts], ignore_index=True))
    return Trace({**parts[0].header, "family": ()}, turns, held)


def path_nodes(tokens: np.ndarray, beams: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Pool index of each node on the target's path, -1 from the first one that is missing. int64 [R, depth + 1].

    tokens int [R, C] of the pool; beams int [R, depth, k]; path int [R, depth + 1]: the target's next tokens.
    """
    starts = [pool_size(level, beams.shape[-1]) for level in range(beams.shape[1])]  # of the levels below the first
    places = path_places(np.split(tokens, starts, axis=1), [*beams.swapaxes(0, 1)], path, beams.shape[-1])
    return np.where(places < 0, -1, places + [0, *starts])


def path_ranks(scores: np.ndarray, nodes: np.ndarray, top_k: int, beam: tuple[int, ...] = ()) -> np.ndarray:
    """int16 [R, depth + 1, depth + 1]: rank of path node j in the pool after n expansions; ties to the earlier one.

    scores float32 [R, C]; nodes int [R, depth + 1] from `path_nodes`.
    """
    count, levels = nodes.shape
    ends = [pool_size(n, top_k, beam) for n in range(levels)]
    ranks = np.full((count, levels, levels), NEVER, dtype=np.int16)
    index = np.arange(scores.shape[1])
    for j in range(levels):
        there = np.flatnonzero(nodes[:, j] >= 0)
        if not len(there):
            break
        own, all_scores = nodes[there, j, None], scores[there]
        mine = np.take_along_axis(all_scores, own, 1)
        better = (all_scores > mine) | ((all_scores == mine) & (index < own))
        sums = np.add.reduceat(better, [0, *ends[:-1]], axis=1, dtype=np.int32).cumsum(1)
        ranks[there, j:, j] = np.minimum(sums[:, j:], NEVER - 1)
    return ranks


def save_trace(
    trace: Trace, folder: Path, leave_out: tuple[str, ...] = ("root_scores",), family: bool = False, **facts: Any
) -> Path:
    """Write a trace, for instance a selection of turns, as a finished recording.

    leave_out: kinds of columns that are not written. family: with the family's trees. facts: more for the header.
    """
    folder, columns, files = Path(folder), {}, ["turns.parquet"]
    for table in ("positions", "trees") + ("family",) * family:
        listed = sorted(map(column_of, trace.header["columns"].get(table, ())))
        arrays = {column: trace.column(*column) for column in listed if column.kind not in leave_out}
        columns[table] = [column.stored for column in arrays]
        if arrays:
            files.append(f"{table}/part-00000.parquet")
            write_columns(folder / files[-1], arrays)
    runs.write_table(folder / "turns.parquet", trace.turns.assign(piece=0))
    header = {**trace.header, "columns": columns, "lengths": 0, **facts}
    header |= {} if family else {"family": ()}
    header |= {"trees": ()} if "tokens" in leave_out else {}
    return runs.write_json(folder / "trace.json", header, files).parent


@door
def open_trace(folder: Path | str, pair: str | None = None) -> Trace:
    """The finished recording in `folder`. SpecdecError for another schema, an unfinished one or another pair.

    folder: also a recording.json, or a folder with one, which names the folder; a relative one may be below the results
    folder. pair: the name or key that the recording must have.

    >>> import specdec
    >>> from specdec import runs
    >>> small = dict(depth=3, top_ks=(3,), trees=(), max_new_tokens=8, progress=False, name="example_open")
    >>> trace = specdec.record(specdec.load_pair("tiny", dtype="float32"), {"mine": ["What is 2 + 3?"]}, **small)
    >>> again = open_trace(runs.find("example_open")[0].directory, "tiny")
    >>> bool((again.ranks[3] == trace.ranks[3]).all())
    True
    """
    folder = recording_folder(folder)
    if not (folder / "trace.json").is_file():
        why = f"there is no finished recording in {folder} (no trace.json)"
        raise SpecdecError(f"{why}; check the path, or run that `record` again.")
    header = stored.read_json(folder / "trace.json", stored.TraceFile, ADVICE, SCHEMA)
    if pair is not None and pair not in (header["pair"], header.get("pair_key")):
        raise SpecdecError(f"{folder} was recorded with the pair {header['pair']!r}, not {pair!r}; record that pair.")
    turns = runs.read_table(stored.check_file(header, folder, "turns.parquet", ADVICE))
    if lacking := sorted(set(TURNS) - set(turns)):
        raise SpecdecError(f"{folder / 'turns.parquet'} has no column {', '.join(lacking)}; {ADVICE}.")
    if "items" not in header:  # recorded when the toy suites were called laptop/...
        named = {name: turns[name].str.replace(r"^laptop/", "toy/", regex=True) for name in ("suite", "prompt")}
        turns = turns.assign(**named)
    shards = [f"part-{number:05d}.parquet" for number in turns["piece"].unique()]
    checked_file = functools.cache(lambda name: stored.check_file(header, folder, name, ADVICE))
    tables = {column_of(listed): table for table, columns in header["columns"].items() for listed in columns}

    def read(column: Column) -> np.ndarray | None:
        if (where := tables.get(column)) is None:
            return None
        parts = stacked([read_columns(checked_file(f"{where}/{shard}"), [column])[column] for shard in shards])
        if (count := len(parts)) != (needed := turns["positions"].sum()):
            raise SpecdecError(f"{folder / where} holds {count} rows of {column.name} for {needed}; {ADVICE}.")
        return parts

    distributions = None
    if (folder / "lengths.parquet").is_file():
        columns = read_columns(checked_file("lengths.parquet"))
        distributions = columns[Column("row")], columns[Column("distribution")]
    return Trace(header, turns, {}, read, distributions, (_opened_again, (str(folder.resolve()), header["key"])))


def recording_folder(folder: Path | str) -> Path:
    """The folder of a recording, which a recording.json beside costs or in a notebook's run may only name."""
    place = runs.placed(folder)
    named = place if place.suffix == ".json" else place / "recording.json"
    if (place / "trace.json").is_file() or not named.is_file():
        return place
    record = stored.read_json(named)
    if not isinstance(record, dict) or not isinstance(told := record.get("folder", record.get("key")), str):
        return place
    own = runs.home().glob(f"runs/*/*-{told[:12]}/trace.json") if "folder" not in record else ()
    return next((path.parent for path in own), runs.placed(told))


@functools.lru_cache(maxsize=2)
def _opened_again(folder: str, key: str) -> Trace:
    """Reopen the recording in `folder` in another process. SpecdecError if it holds another one there."""
    trace = open_trace(folder)
    if trace.header["key"] != key:
        raise SpecdecError(f"{folder} holds another recording here; let all machines see the same folder.")
    return trace
