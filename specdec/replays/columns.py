"""Arrays over the positions of a recording: their keys, and the files that hold them.

A column is identified by its key. Its name is for files and errors; no code parses it.
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
    """The key of an array: a kind, perhaps with the width of its trees or a level of a family.

    >>> Column("ranks", 4, (2, 1)).name, Column("family_beam", level=3).name, Column("text").stored
    ('ranks_4,2,1', 'family_beam_3', {'kind': 'text'})
    """

    kind: str
    # children per node; 0 if not of trees of one width
    top_k: int = 0
    # nodes expanded per level, as in a TreeConfig
    beam: tuple[int, ...] = ()
    # of a family's trees
    level: int = -1

    @property
    def name(self) -> str:
        if self.top_k:
            widths = map(str, (self.top_k, *self.beam))
            return f"{self.kind}_{','.join(widths)}"
        return f"{self.kind}_{self.level}" if self.level >= 0 else self.kind

    @property
    def stored(self) -> dict[str, Any]:
        """Its form in files, for `column_of`: the fields that differ from their defaults."""
        fields = self._asdict().items()
        defaults = self._field_defaults
        return {name: value for name, value in fields if value != defaults.get(name)}


Columns = Mapping[Any, np.ndarray]  # by Column; a kind alone means its Column


def column_of(stored: Mapping[str, Any]) -> Column:
    """The column of an entry in a file."""
    return Column(**{**stored, "beam": tuple(stored.get("beam", ()))})


def keyed(columns: Columns) -> dict[Column, np.ndarray]:
    """The same mapping, with a Column for every kind given alone."""
    return {Column(key) if isinstance(key, str) else key: array for key, array in columns.items()}


def stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays concatenated, padded to the widest: with -inf, or -1 for candidate numbers."""
    if parts[0].ndim != 2:
        return np.concatenate(parts)
    widest = max(part.shape[1] for part in parts)
    absent = -np.inf if parts[0].dtype.kind == "f" else -1
    padded = []
    for part in parts:
        missing = widest - part.shape[1]
        padded.append(np.pad(part, ((0, 0), (0, missing)), constant_values=absent))
    return np.concatenate(padded)


def write_columns(path: Path, columns: Columns) -> Path:
    """Write arrays over the same rows to one parquet file, matrices as lists of fixed length."""
    fields = {}
    shapes = {}
    stored = {}
    floats = []
    for column, array in keyed(columns).items():
        values = pa.array(np.ascontiguousarray(array).reshape(-1))
        width = int(np.prod(array.shape[1:])) if array.ndim > 1 else 0
        fields[column.name] = pa.FixedSizeListArray.from_arrays(values, width) if width else values
        shapes[column.name] = list(array.shape[1:])
        stored[column.name] = column.stored
        # split by byte, floats compress better
        if array.dtype in (np.float32, np.float16):
            floats.append(f"{column.name}.list.element" if width else column.name)
    facts = runs.canonical({"shapes": shapes, "columns": stored}).encode()
    table = pa.table(fields).replace_schema_metadata({b"specdec": facts})
    packing = dict(compression="zstd", compression_level=6, use_dictionary=False)
    with runs.atomic(path) as temporary:
        pq.write_table(table, temporary, use_byte_stream_split=floats, **packing)
    return Path(path)


def read_columns(path: Path, columns: Sequence[Column] | None = None) -> dict[Column, np.ndarray]:
    """The columns of `write_columns`'s file; SpecdecError names a missing or damaged file."""
    names = None if columns is None else [column.name for column in columns]
    try:
        table = pq.read_table(path, columns=names)
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
