"""A check of a recording on disk against its form, which FORMAT.md beside this file describes, and a recording from lengths.

The tables of FORMAT.md are read here: they are the list of columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.tree_config import pool_size
from specdec.data.suites import PARTS
from specdec.errors import SpecdecError, door
from specdec.replays.columns import Column, column_of
from specdec.replays.trace import NEVER, SCHEMA, Trace, numbered, open_trace, path_nodes, path_ranks


@functools.cache
def form(first: str) -> pd.DataFrame:
    """The rows of FORMAT.md's table whose first cell is headed "column" or "of a turn", by that cell; texts as they are."""
    lines = (Path(__file__).parent / "FORMAT.md").read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in lines[at : lines.index("", at)]
    ]
    return pd.DataFrame(rows[2:], columns=rows[0]).set_index(first)


@door
def check_recording(folder: Path | str) -> tuple[Trace | None, list[str]]:
    """(the recording, every fault in a sentence): all files are read. None if it cannot be opened.

    >>> import specdec
    >>> check_recording(Path(specdec.__file__).parent / "report" / "recordings" / "scored")
    (Trace(24 turns, 1447 positions, k in (2, 4, 10), depth 8), [])
    """
    try:
        trace = open_trace(folder)
    except SpecdecError as error:
        return None, [str(error)]
    if faults := list(_faults_of_turns(trace.turns)):
        return trace, faults
    columns = stored_columns(trace)
    promised = [Column("context_tok")]
    promised += [Column(kind) for kind in ("copied_ranks", "copied_scores") if trace.copies]
    promised += [Column("ranks", k) for k in trace.top_ks if trace.forwards]
    whole = [k for k in trace.header.get("trees", ()) if trace.forwards]
    promised += [Column(kind, k) for k in whole for kind in ("scores", "tokens", "beams")]
    promised += [
        Column("family_scores", level=level) for level in range(trace.depth + 1) if trace.family
    ]
    lacking = [column.name for column in promised if column not in columns]
    faults = [
        f"the header promises the column {name} and does not list it among its columns."
        for name in lacking
    ]
    arrays = {}
    for column in columns:
        try:
            arrays[column] = trace.column(*column)
            faults += _faults_of_form(trace, column, arrays[column])
        except SpecdecError as error:
            faults.append(str(error))
    return trace, faults or list(_faults_of_values(trace, arrays))


def stored_columns(trace: Trace) -> list[Column]:
    """The columns of the files of a recording on disk."""
    return [column_of(one) for table in trace.header["columns"].values() for one in table]


def _faults_of_turns(turns: pd.DataFrame) -> Iterator[str]:
    for name, kind in form("of a turn")["type"].items():
        if pd.api.types.infer_dtype(turns[name]) != {"text": "string"}.get(kind, kind):
            yield f"turns.parquet: {name} holds {turns[name].dtype}, not {kind}."
            return
    parts = sorted(set(turns["part"]) - set(PARTS))
    yield from (
        f"turns.parquet: {part!r} is no part; the parts are {', '.join(PARTS)}." for part in parts
    )
    needed = {"positions": turns["kept_tok"] - 1, "first": numbered(turns)["first"]}
    for name, right in needed.items():
        if len(wrong := np.flatnonzero((turns[name] != right) | (right < 0))):
            yield f"turns.parquet: {name} is {turns[name][wrong[0]]} in row {wrong[0]} and must be {right[wrong[0]]}."


def _faults_of_form(trace: Trace, column: Column, array: np.ndarray) -> Iterator[str]:
    if column.kind not in form("column").index:
        yield f"{column.name} is no column of a recording; FORMAT.md lists them."
        return
    dtype, shape = form("column").loc[column.kind, ["type", "shape of a row"]]
    nodes = pool_size(trace.depth, column.top_k, column.beam) if column.top_k else 0
    known = (
        {"64": 64, "k": column.top_k, "C": nodes}
        | {f"D+{n}": trace.depth + n for n in (1, 2)}
        | {"D": trace.depth}
    )
    wanted = [known.get(size) for size in shape.split(", ") if size]
    fits = len(wanted) == array.ndim - 1 and all(
        w in (None, n) for w, n in zip(wanted, array.shape[1:], strict=True)
    )
    if array.dtype != dtype or not fits:
        given = f"{array.dtype} {list(array.shape[1:])}"
        yield f"{column.name} holds {given} per row, and must hold {dtype} [{shape}] with D = {trace.depth}."


def _faults_of_values(trace: Trace, arrays: dict[Column, np.ndarray]) -> Iterator[str]:
    """Contradictions between columns of the right form; the first row of each."""
    starts = trace.turns["prompt_tok"] - trace.turns["first"]
    counted = np.repeat(starts, trace.turns["positions"]) + np.arange(len(trace))
    if len(wrong := np.flatnonzero(arrays[Column("context_tok")] != counted)):
        yield f"context_tok, row {wrong[0]}: it must be the turn's prompt_tok plus the position in the turn."
    level, root = np.arange(trace.depth + 1), arrays.get(Column("root_rank"))
    of_roots = 10 if 10 in trace.top_ks else min(trace.top_ks)  # whose root pass gave root_rank
    for (_, k, beam, _), ranks in (
        (column, array) for column, array in arrays.items() if column.kind == "ranks"
    ):
        wrong = np.any(
            (np.diff(ranks, axis=2) < 0).any((1, 2), keepdims=True) | (ranks < 0), (1, 2)
        )
        if not trace.copies:
            pool = np.array([pool_size(n, k, beam) for n in range(trace.depth + 1)])[:, None]
            wrong |= np.any((ranks != NEVER) & ((ranks >= pool) | (level > level[:, None])), (1, 2))
        if root is not None and not trace.copies and k == of_roots:
            wrong |= np.where(root < k, root, NEVER) != ranks[:, 0, 0]
        needed = [
            Column("text"),
            *(Column(kind, k, beam) for kind in ("scores", "tokens", "beams")),
        ]
        if not trace.copies and not wrong.any() and set(needed) <= set(arrays):
            text, scores, tokens, beams = (arrays[column] for column in needed)
            nodes = path_nodes(tokens, beams, text[:, 1:])
            wrong = np.any(path_ranks(scores, nodes, k, beam) != ranks, (1, 2))
        if wrong.any():
            row = np.flatnonzero(wrong)[0]
            yield f"ranks of k = {k}, row {row}: they contradict each other, the root's rank or the tree's scores."


def trace_of(turns: pd.DataFrame, lengths: list[np.ndarray], pair: str) -> Trace:
    """A recording of chains from accepted lengths alone. `save_trace` writes it.

    turns: suite, prompt, turn, part, prompt_tok. lengths: for every turn, int [positions], the tokens that a step would yield
    at each position, 1 or more. SpecdecError for smaller ones.

    >>> turns = pd.DataFrame([{"suite": "mine", "prompt": "mine/0", "turn": 0, "part": "test", "prompt_tok": 10}])
    >>> trace_of(turns, [np.array([3, 1, 4, 3, 2, 1])], "llama-3.1-8b")
    Trace(1 turns, 6 positions, k in (1,), depth 2)
    """
    every = np.concatenate(lengths).astype(int)
    if every.min() < 1:
        raise SpecdecError(
            "a step yields one token at least, the target's own; these lengths hold smaller ones."
        )
    deepest = max(2, int(every.max()) - 1)  # drafts
    level = np.arange(deepest)
    # node j of the chain is on the target's path if j < length - 1, and in the pool after n expansions if j <= n
    ranks = np.where(
        (level < every[:, None, None] - 1) & (level <= level[:, None]), level, NEVER
    ).astype(np.int16)
    positions = [len(own) for own in lengths]
    turns = numbered(turns.assign(kept_tok=np.add(positions, 1), positions=positions, piece=0))
    contexts = np.repeat((turns["prompt_tok"] - turns["first"]).to_numpy(), positions) + np.arange(
        len(every)
    )
    columns: dict[Column, np.ndarray] = {
        Column("ranks", 1): ranks,
        Column("context_tok"): contexts.astype(np.int32),
    }
    columns[Column("root_rank")] = np.where(every > 1, 0, NEVER).astype(np.int16)
    header = dict(
        schema=SCHEMA,
        pair=pair,
        dtype="float16",
        temperature=0.0,
        depth=deepest - 1,
        top_ks=[1],
        trees=[],
    )
    header["columns"] = {"positions": [column.stored for column in columns]}
    header["key"] = runs.content_key(
        pair=pair, turns=turns.to_dict("records"), lengths=every.tolist()
    )
    return Trace(header | dict(most_nodes=deepest, family=[]), turns, columns)
