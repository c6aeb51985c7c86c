"""Arrays over the positions of a recording: their keys, and the files that hold them.

A column is identified by its key. Its name is for display, in files and errors; no code parses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specdec import runs
from specdec.errors import unreadable


class Column(NamedTuple):
    """The key of an array: a kind alone ("context_tok"), or with the width of its trees, or with a level of a family.

    >>> Column("ranks", 4, (2, 1)).name, Column("family_beam", level=3).name, Column("text").stored
    ('ranks_4,2,1', 'family_beam_3', {'kind': 'text'})
    """

    kind: str
    top_k: int = 0  # children per node; 0 if not of trees of one width
    beam: tuple[int, ...] = ()  # nodes expanded per level, as in a TreeConfig
    level: int = -1  # of a family's trees

    @property
    def name(self) -> str:
        numbers = [self.top_k, *self.beam] if self.top_k else [self.level] if self.level >= 0 else []
        return "_".join([self.kind, ",".join(map(str, numbers))] if numbers else [self.kind])

    @property
    def stored(self) -> dict[str, Any]:
        """Its form in files; `column_of` reads it."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults.get(name)}


Columns = Mapping[Any, np.ndarray]  # by Column; a kind alone means its Column


def column_of(listed: Any) -> Column:
    """The column for an entry in a file. Older recordings list names, such as "ranks_10" and "family_beam_3"."""
    if not isinstance(listed, str):
        return Column(**{**listed, "beam": tuple(listed.get("beam", ()))})
    kind, _, numbers = listed.rpartition("_")
    if kind in ("ranks", "scores", "tokens", "beams", "candidates"):
        top_k, *beam = map(int, numbers.split(","))
        return Column(kind, top_k, tuple(beam))
    return Column(kind, level=int(numbers)) if kind in ("family_scores", "family_beam") else Column(listed)


def keyed(columns: Columns) -> dict[Column, np.ndarray]:
    """The same mapping, with a Column for every kind given alone."""
    return {Column(key) if isinstance(key, str) else key: array for key, array in columns.items()}


def stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays concatenated, padded to the widest: with -inf, or -1 for candidate numbers."""
    most = max(part.shape[1:] for part in parts)
    if all(part.shape[1:] == most for part in parts):
        return np.concatenate(parts)
    value = -np.inf if parts[0].dtype.kind == "f" else -1
    wide = [np.pad(part, ((0, 0), (0, most[0] - part.shape[1])), constant_values=value) for part in parts]
    return np.concatenate(wide)


def write_columns(path: Path, columns: Columns) -> Path:
    """Write arrays over the same rows to one parquet file; matrices become lists of fixed length, floats split by byte."""
    fields, shapes, listed, floats = {}, {}, {}, []
    for column, array in keyed(columns).items():
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        width = int(np.prod(array.shape[1:])) if array.ndim > 1 else 0
        fields[column.name] = pa.FixedSizeListArray.from_arrays(flat, width) if width else flat
        shapes[column.name], listed[column.name] = list(array.shape[1:]), column.stored
        if array.dtype in (np.float32, np.float16):
            floats.append(f"{column.name}.list.element" if width else column.name)
    facts = runs.canonical({"shapes": shapes, "columns": listed}).encode()
    table = pa.table(fields).replace_schema_metadata({b"specdec": facts})
    packing = dict(compression="zstd", compression_level=6, use_dictionary=False, use_byte_stream_split=floats)
    with runs.atomic(path) as temporary:
        pq.write_table(table, temporary, **packing)
    return Path(path)


def read_columns(path: Path, columns: Sequence[Column] | None = None) -> dict[Column, np.ndarray]:
    """Read `write_columns`'s file, or some columns of it; SpecdecError names a missing or damaged file."""
    try:
        table = pq.read_table(path, columns=None if columns is None else [column.name for column in columns])
        facts = json.loads(table.schema.metadata[b"specdec"])
        shapes, listed = facts["shapes"], facts.get("columns", {})
    except (OSError, KeyError, TypeError, pa.ArrowException) as error:
        raise unreadable(path, error, "a recording", "delete it and record again") from error
    found = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        values = column.flatten() if isinstance(column.type, pa.FixedSizeListType) else column
        array = values.to_numpy(zero_copy_only=False).reshape(-1, *shapes[name])
        found[column_of(listed.get(name, name))] = array
    return found
