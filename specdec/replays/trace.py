"""A recording: what every draft tree would have accepted, at every position of a text.

    accepted_tok(r, k, n, V) = number of j with  ranks[k][r, n, j] < V

The target's continuation does not depend on the tree. So for each position r, each beam width k and
each number n of expansions it is enough to know the rank, by the drafter's score, of every node j
on the target's own path: a tree of V nodes holds the V best. Exact at every temperature.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from specdec import runs, stored
from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError, door, unreadable
from specdec.replays.family import Family, member, path_places

SCHEMA = 1
ADVICE = "record again"
NEVER = np.iinfo(np.int16).max  # the rank of a node outside the pool
OWN_NOISE = "of each prompt"  # in the header of sampled recordings
SHARED_NOISE = "shared by all prompts"  # of those that were made before and do not say it
ROOT_CANDIDATES = 64  # the root's children recorded beside the tree: RADAR's flat tree verifies 59


class Column(NamedTuple):
    """The key of an array over positions: a kind, perhaps with the width of its trees."""

    kind: str
    top_k: int = 0  # children per node; 0 if not of trees of one width
    beam: tuple[int, ...] = ()  # nodes expanded per level, as in a TreeConfig
    level: int = -1  # of a family's trees

    @property
    def name(self) -> str:
        """For files and errors; no code parses it."""
        if self.top_k:
            return f"{self.kind}_{','.join(map(str, (self.top_k, *self.beam)))}"
        return f"{self.kind}_{self.level}".removesuffix("_-1")

    @property
    def stored(self) -> dict[str, Any]:
        """Its form in files, for `column_of`: the fields that differ from their defaults."""
        fields = self._asdict().items()
        return {name: value for name, value in fields if value != self._field_defaults.get(name)}


Columns = Mapping[Any, np.ndarray]  # by Column; a kind alone means its Column
Load = Callable[[Column], np.ndarray | None]
Distributions = tuple[np.ndarray, np.ndarray]  # RADAR's: rows int64 [Q], float32 [Q, 8, 9]


class Trees(NamedTuple):
    """Whole candidate trees of R positions for one k, in creation order: float32 and int32 [R, C]
    with C = k + depth * k**2; beams int16 [R, depth, k] as in FORMAT.md.
    """

    scores: np.ndarray
    tokens: np.ndarray
    beams: np.ndarray


class Recorded:
    """An attribute of Trace that is the column of its name, None if it was not recorded."""

    def __set_name__(self, owner: type, kind: str) -> None:
        self.kind = kind

    def __get__(self, trace: Trace, owner: type) -> Any:
        return trace.get(Column(self.kind))


class Trace:
    """Positions of all turns, turn after turn: row r is one position where a cycle may start.

    header: trace.json, see FORMAT.md. turns: one row per turn, with first (row) and positions
    (kept_tok - 1). columns: arrays over positions; the rest is read by `load` on first use.
    acceptance_distributions: entry (q, a, j) is the probability at T = 1 that RADAR's tree after
    a + 1 draft calls has j tokens accepted in row q.
    """

    context_tok = Recorded()  # int32 [R]: committed tokens before the root
    text = Recorded()  # int32 [R, depth + 2]: the root's token and the target's next ones
    root_rank = Recorded()  # int16 [R]: of the target's next token among the root's children
    features = Recorded()  # float16 [R, F]: the target's at the last accepted token
    draft_state = Recorded()  # float16 [R, H]: the drafter's at the root

    def __init__(
        self,
        header: dict[str, Any],
        turns: pd.DataFrame,
        columns: Columns,
        load: Load | None = None,
        acceptance_distributions: Distributions | None = None,
        made: tuple[Any, ...] | None = None,
    ):
        self.header = header
        self.turns = turns
        self._columns = keyed(columns)
        self._load = load
        self.acceptance_distributions = acceptance_distributions
        # (function, arguments) with which another process makes the same
        self._made = made
        self.depth: int = header["depth"]
        self.top_ks = tuple(header["top_ks"])
        self.most_nodes = int(header["most_nodes"])
        # levels: the longest copied path; forwards: whether anything is drafted by a network
        self.copies: dict[str, Any] | None = header.get("copies")
        self.forwards = self.copies is None or bool(self.copies["forwards"])
        # all trees up to a number of children and nodes per level, if recorded
        numbers = header.get("family")
        self.family = Family(numbers[0], tuple(numbers[1:])) if numbers else None

    def __reduce__(self) -> tuple[Any, ...]:
        """The receiving process reopens a recording on disk; one in memory is sent whole."""
        parts = (self.header, self.turns, self._columns, None, self.acceptance_distributions)
        return self._made or (Trace, parts)

    @property
    def noise(self) -> str:
        """What sampled texts drew their noise from; "" if none did."""
        sampled = self.header.get("temperature")
        return self.header.get("noise", SHARED_NOISE) if sampled else ""

    def __len__(self) -> int:
        return int(self.turns["positions"].sum())

    def column(
        self, kind: str, top_k: int = 0, beam: tuple[int, ...] = (), level: int = -1
    ) -> np.ndarray:
        """One array over positions, by its Column. SpecdecError if the recording lacks it."""
        column = Column(kind, top_k, beam, level)
        array = self.get(column)
        if array is None:
            why = f"the recording holds no {column.name}"
            raise SpecdecError(f"{why}; record again with it (--trees for whole trees).")
        return array

    def get(self, column: Column) -> np.ndarray | None:
        """The same, or None if the recording lacks it."""
        if column not in self._columns:
            array = self._load(column) if self._load else None
            if array is None and column.kind in ("ranks", "scores"):
                array = self._derived(column)
            if array is None:
                return None
            self._columns[column] = array
        return self._columns[column]

    @property
    def ranks(self) -> _ByWidth:
        """ranks[k], or ranks[k, beam]: int16 [R, depth + 1, depth + 1]. (r, n, j): the rank, after
        n expansions, of the node at depth j + 1 on the target's path, or NEVER.
        """
        return _ByWidth(self)

    def _derived(self, column: Column) -> np.ndarray | None:
        """Ranks or scores of a tree that only the family holds, NEVER beyond its depth; of copies
        alone, the same ranks after every expansion.
        """
        kind, top_k, beam, _ = column
        if not self.forwards and kind == "ranks":
            ranks = self.column("copied_ranks")
            return np.broadcast_to(ranks[:, None], (len(ranks), self.depth + 1, ranks.shape[1]))
        levels = self.depth_of(top_k, beam)
        if levels < 0 or self.family is None or (top_k in self.top_ks and not beam):
            return None
        scores, nodes = member(self.column, self.family, top_k, beam, levels)
        if kind == "scores":
            return scores
        beyond = self.depth - levels
        ranks = path_ranks(scores, nodes, top_k, beam)
        return np.pad(ranks, ((0, 0), (0, beyond), (0, beyond)), constant_values=NEVER)

    def depth_of(self, top_k: int, beam: tuple[int, ...] = ()) -> int:
        """The most expansions of such trees that can be replayed; -1 for none."""
        # without drafted nodes all trees are equal
        if not self.forwards or (top_k in self.top_ks and not beam):
            return self.depth
        return self.family.depth_of(top_k, beam, self.depth) if self.family else -1

    def trees(self, top_k: int) -> Trees:
        """The whole candidate trees for one k."""
        check_recorded(self, top_k)
        return Trees(*(self.column(kind, top_k) for kind in Trees._fields))

    def accepted_tok(
        self, rows: Any, top_k: int, expansions: int, verify_nodes: int, beam: tuple[int, ...] = ()
    ) -> np.ndarray:
        """int64 [rows]: accepted draft tokens of one tree at many positions."""
        check_recorded(self, top_k, expansions, verify_nodes, beam)
        return (self.ranks[top_k, beam][rows, expansions] < verify_nodes).sum(-1)

    def candidates(self, top_k: int, expansions: int, beam: tuple[int, ...] = ()) -> Any:
        """Nodes available for verification: one number, or int [R] if copies are among them."""
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
        """The turns of a boolean mask, or of one part ("train", "tune" or "test"), as a trace."""
        chosen = np.asarray(self.turns["part"] == part if part else mask, dtype=bool)
        if not chosen.any():
            parts = ", ".join(self.turns["part"].unique())
            raise SpecdecError(f"no recorded turn is left of the parts {parts}; record more.")
        rows = np.flatnonzero(np.repeat(chosen, self.turns["positions"]))
        distributions = self.acceptance_distributions
        if distributions is not None:
            inside = np.isin(distributions[0], rows)
            distributions = (
                np.searchsorted(rows, distributions[0][inside]),
                distributions[1][inside],
            )

        def load(column: Column) -> np.ndarray | None:
            array = self.get(column)
            return None if array is None else array[rows]

        made = Trace.select, (self, chosen)
        return Trace(self.header, numbered(self.turns[chosen]), {}, load, distributions, made)

    def restrict(self, ranges: dict[str, tuple[int, int]]) -> Trace:
        """The recording restricted to a cost model's `ranges`. Shallower and smaller trees than the
        low ends stay: a cost model keeps its first value there, so they gain nothing.
        """
        low, high = ranges.get("top_k", (1, max(self.top_ks)))
        top_ks = tuple(top_k for top_k in self.top_ks if low <= top_k <= high)
        if not top_ks:
            raise SpecdecError(f"top_k {low} to {high} was not recorded; record it.")
        depth = min(self.depth, ranges.get("expansions", (0, self.depth))[1])
        most_nodes = min(self.most_nodes, ranges.get("verify_nodes", (0, self.most_nodes))[1])
        if (top_ks, depth, most_nodes) == (self.top_ks, self.depth, self.most_nodes):
            return self

        def cut(column: Column) -> np.ndarray | None:
            array = self.get(column)
            if array is None:
                return None
            pool = pool_size(depth, column.top_k, column.beam)
            ends = {"scores": pool, "tokens": pool, "beams": depth, "candidates": depth + 1}
            ends |= {"ranks": depth + 1, "family_path": depth + 1}
            if column.kind in ends:
                array = array[:, : ends[column.kind]]
            # copied paths may be longer than the drafted one
            if column.kind == "ranks" and not self.copies:
                array = array[:, :, : depth + 1]
            return array

        header = {**self.header, "top_ks": top_ks, "depth": depth, "most_nodes": most_nodes}
        made = Trace.restrict, (self, ranges)
        return Trace(header, self.turns, {}, cut, self.acceptance_distributions, made)


@dataclass(frozen=True)
class _ByWidth:
    """trace.ranks, read on demand."""

    trace: Trace

    def __getitem__(self, width: Any) -> np.ndarray:
        top_k, beam = width if isinstance(width, tuple) else (width, ())
        check_recorded(self.trace, top_k, beam=beam)
        return self.trace.column("ranks", top_k, beam)


def check_recorded(
    trace: Trace, top_k: int, expansions: int = 0, verify_nodes: int = 0, beam: tuple[int, ...] = ()
) -> None:
    """Refuse an answer that the recording cannot replay."""
    deepest = trace.depth_of(top_k, beam)
    why = ""
    if deepest < 0:
        why = f"top_k={top_k} with beam={beam} was not recorded, only {trace.top_ks}"
    elif not 0 <= expansions <= deepest:
        why = f"depth {expansions} was asked for, but such trees were recorded to depth {deepest}"
    elif verify_nodes > trace.most_nodes:
        why = f"{verify_nodes} nodes were asked for, but at most {trace.most_nodes} were recorded"
    if why:
        raise SpecdecError(f"{why}; record again with it.")


def numbered(turns: pd.DataFrame) -> pd.DataFrame:
    """The turns with `first`, the first row of each if all are in sequence."""
    first = np.concatenate(([0], turns["positions"].cumsum()[:-1])).astype(int)
    return turns.assign(first=first).reset_index(drop=True)


def joined(traces: list[Trace], top_k: int) -> Trace:
    """Recordings of one pair as one, for one k and the smallest of their depths: ranks, scores and,
    if all have them, features and the drafter's states.
    """
    if len({(trace.header["pair"], trace.header.get("weights")) for trace in traces}) > 1:
        raise SpecdecError("recordings of different pairs cannot be joined; record one pair.")
    depth = min(trace.depth for trace in traces)
    most_nodes = min(trace.most_nodes for trace in traces)
    common = {"top_k": (top_k, top_k), "expansions": (0, depth), "verify_nodes": (0, most_nodes)}
    parts = [trace.restrict(common) for trace in traces]
    columns = {}
    for column in (Column("context_tok"), Column("ranks", top_k), Column("scores", top_k)):
        columns[column] = np.concatenate([part.column(*column) for part in parts])
    for column in (Column("features"), Column("draft_state")):
        arrays = [array for part in parts if (array := part.get(column)) is not None]
        if len(arrays) == len(parts):
            columns[column] = np.concatenate(arrays)
    turns = numbered(pd.concat([part.turns for part in parts], ignore_index=True))
    return Trace({**parts[0].header, "family": ()}, turns, columns)


def path_nodes(tokens: np.ndarray, beams: np.ndarray, path: np.ndarray) -> np.ndarray:
    """int64 [R, depth + 1]: pool index of each path node, -1 from the first missing one.

    tokens int [R, C]; beams int [R, depth, k]; path int [R, depth + 1]: the target's next tokens.
    """
    levels, top_k = beams.shape[1:]
    starts = [pool_size(level, top_k) for level in range(levels)]  # of the levels below the first
    places = path_places(np.split(tokens, starts, axis=1), [*beams.swapaxes(0, 1)], path, top_k)
    return np.where(places < 0, -1, places + [0, *starts])


def parents(beams: np.ndarray, top_k: int) -> np.ndarray:
    """int64 [1 + C]: the parent of each node of a pool, the root first. beams [expansions, k]."""
    starts = np.array([1, *(1 + pool_size(level, top_k) for level in range(len(beams)))])
    nodes = beams.astype(np.int64) + starts[:-1, None]
    return np.concatenate(([-1], np.repeat([0, *nodes.ravel()], top_k)))


def path_ranks(
    scores: np.ndarray, nodes: np.ndarray, top_k: int, beam: tuple[int, ...] = ()
) -> np.ndarray:
    """int16 [R, depth + 1, depth + 1]: rank of path node j in the pool after n expansions.

    Ties go to the earlier one. scores float32 [R, C]; nodes int [R, depth + 1] of `path_nodes`.
    """
    count, levels = nodes.shape
    ends = [pool_size(n, top_k, beam) for n in range(levels)]
    ranks = np.full((count, levels, levels), NEVER, dtype=np.int16)
    index = np.arange(scores.shape[1])
    for j in range(levels):
        rows = np.flatnonzero(nodes[:, j] >= 0)
        node = nodes[rows, j, None]
        rivals = scores[rows]
        score = np.take_along_axis(rivals, node, 1)
        better = (rivals > score) | ((rivals == score) & (index < node))
        # better nodes of each level, summed up to the level
        counts = np.add.reduceat(better, [0, *ends[:-1]], axis=1, dtype=np.int32).cumsum(1)
        ranks[rows, j:, j] = np.minimum(counts[:, j:], NEVER - 1)
    return ranks


# Files


@door
def open_trace(folder: Path | str, pair: str | None = None) -> Trace:
    """The finished recording in `folder` (or named by a recording.json), read on first use.

    pair: the name or key that the recording must have, else SpecdecError.

    >>> import specdec
    >>> from specdec.report import explorer
    >>> open_trace(explorer.FOLDER / "recordings" / "smollm2").top_ks
    (2, 4, 10)
    """
    # 1. the header and the turns
    folder = recording_folder(folder)
    if not (folder / "trace.json").is_file():
        raise SpecdecError(f"there is no finished recording in {folder}: no trace.json.")
    header = stored.read_json(folder / "trace.json", stored.TraceFile, ADVICE, SCHEMA)
    if pair is not None and pair not in (header["pair"], header.get("pair_key")):
        raise SpecdecError(f"{folder} is of {header['pair']!r}, not {pair!r}; record that pair.")
    turns = runs.read_table(stored.check_file(header, folder, "turns.parquet", ADVICE))
    shards = list(map("part-{:05d}.parquet".format, turns["piece"].unique()))
    # 2. how a column is read from its table when it is needed
    tables = {}
    for table, entries in header["columns"].items():
        tables.update(dict.fromkeys(map(column_of, entries), table))

    @functools.cache
    def checked_file(name: str) -> Path:
        return stored.check_file(header, folder, name, ADVICE)

    def load(column: Column) -> np.ndarray | None:
        if column not in tables:
            return None
        files = [checked_file(f"{tables[column]}/{shard}") for shard in shards]
        array = stacked([read_columns(file, [column])[column] for file in files])
        if len(array) != turns["positions"].sum():
            raise SpecdecError(f"{folder}: rows and positions differ; {ADVICE}.")
        return array

    # 3. RADAR's distributions, a file of their own
    distributions = None
    if (folder / "lengths.parquet").is_file():
        columns = read_columns(checked_file("lengths.parquet"))
        distributions = columns[Column("row")], columns[Column("distribution")]
    return Trace(header, turns, {}, load, distributions, (open_trace, (folder.resolve(),)))


def recording_folder(folder: Path | str) -> Path:
    """The folder of a recording, which a recording.json may name."""
    place = runs.placed(folder)
    link = place if place.suffix == ".json" else place / "recording.json"
    if (place / "trace.json").is_file() or not link.is_file():
        return place
    return runs.placed(stored.read_json(link)["folder"])


def column_of(stored: Mapping[str, Any]) -> Column:
    """The column of an entry in a file."""
    return Column(**{**stored, "beam": tuple(stored.get("beam", ()))})


def keyed(columns: Columns) -> dict[Column, np.ndarray]:
    """The same mapping, with a Column for every kind given alone."""
    arrays = {}
    for key, array in columns.items():
        arrays[Column(key) if isinstance(key, str) else key] = array
    return arrays


def stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays concatenated, padded to the widest: with -inf, or -1 for candidate numbers."""
    if parts[0].ndim != 2:
        return np.concatenate(parts)
    absent = -np.inf if parts[0].dtype.kind == "f" else -1
    width = max(part.shape[1] for part in parts)
    wide = []
    for part in parts:
        missing = width - part.shape[1]
        wide.append(np.pad(part, ((0, 0), (0, missing)), constant_values=absent))
    return np.concatenate(wide)


def stacked_columns(parts: Sequence[Mapping[Any, np.ndarray]]) -> dict[Any, np.ndarray]:
    """The columns of several parts below each other."""
    return {column: stacked([part[column] for part in parts]) for column in parts[0]}


def write_columns(path: Path, columns: Columns) -> Path:
    """Write arrays over the same rows to one parquet file, matrices as lists of fixed length."""
    fields = {}
    shapes = {}
    entries = {}
    floats = []
    for column, array in keyed(columns).items():
        name = column.name
        values = pa.array(np.ascontiguousarray(array).reshape(-1))
        if array.ndim > 1:
            values = pa.FixedSizeListArray.from_arrays(values, int(np.prod(array.shape[1:])))
        fields[name] = values
        shapes[name] = list(array.shape[1:])
        entries[name] = column.stored
        # split by byte, floats compress better
        if array.dtype in (np.float32, np.float16):
            floats.append(f"{name}.list.element" if array.ndim > 1 else name)
    facts = runs.canonical({"shapes": shapes, "columns": entries}).encode()
    table = pa.table(fields).replace_schema_metadata({b"specdec": facts})
    packing = dict(compression="zstd", compression_level=6, use_dictionary=False)
    with runs.atomic(path) as temporary:
        pq.write_table(table, temporary, use_byte_stream_split=floats, **packing)
    return Path(path)


def read_columns(path: Path, columns: Sequence[Column] | None = None) -> dict[Column, np.ndarray]:
    """The columns of `write_columns`'s file; SpecdecError names a missing or damaged file."""
    names = [column.name for column in columns or ()]
    try:
        table = pq.read_table(path, columns=names or None)
        facts = json.loads(table.schema.metadata[b"specdec"])
    except (OSError, KeyError, TypeError, pa.ArrowException) as error:
        raise unreadable(path, error, "a recording", "delete it and record again") from error
    arrays = {}
    for column in columns or map(column_of, facts["columns"].values()):
        values = table.column(column.name).combine_chunks()
        if isinstance(values.type, pa.FixedSizeListType):
            values = values.flatten()
        shape = facts["shapes"][column.name]
        arrays[column] = values.to_numpy(zero_copy_only=False).reshape(-1, *shape)
    return arrays
