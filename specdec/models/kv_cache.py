"""A preallocated key-value cache that transformers accepts as a `Cache` and that can keep a path of a tree.

Rows are written in place, never concatenated. After a tree forward `keep` gathers the accepted rows and drops the rest;
`truncate` drops a tail. A recorded forward writes at row numbers that it computes (`writing_at`) and its owner counts the
rows (`extend`), because no Python runs in a replay. Sliding layers keep their full history: the window is the mask's
business (see `tree_attention.py`).
Knows nothing about tokens or trees; rows are absolute row numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.errors import SpecdecError


@functools.cache
def cache_keyword(module: type) -> str:
    """What the forward of a transformers module calls its cache: "cache" from 5.24 on, "past_key_values" before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, kv heads, capacity, D], filled up to `rows`."""

    is_croppable, is_sliding = True, False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.rows = capacity, 0
        self.written: Tensor | None = None  # int64 [T]: where the next rows go, in place of after the last

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory on first use: the head count, widths, dtype and device are the layer's own."""
        batch, heads, _, width = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(batch, heads, self.capacity, width)
        self.values = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append [B, kv heads, T, D] and return views of all rows so far; with `written`, write there and return everything."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.written is not None:
            self.keys.index_copy_(2, self.written, key_states)
            self.values.index_copy_(2, self.written, value_states)
            return self.keys, self.values
        start, end = self.rows, self.rows + key_states.shape[-2]
        assert end <= self.capacity, f"{end} rows, but room was made for {self.capacity}"
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.rows = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, start: int, rows: Tensor) -> None:
        """Move `rows` (int64 [A], absolute, ascending, all >= start) to start..start+A and forget what follows."""
        end = start + rows.shape[0]
        self.keys[:, :, start:end] = self.keys.index_select(2, rows)
        self.values[:, :, start:end] = self.values.index_select(2, rows)
        self.rows = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows + query_length, 0

    def get_seq_length(self) -> int:
        return self.rows

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self) -> int:
        return self.capacity

    def crop(self, max_length: int) -> None:
        """transformers' name for dropping rows: a negative number drops that many; its own layers refuse others too."""
        if max_length > 0:
            raise SpecdecError("crop takes a negative number, the rows to drop; truncate takes the rows to keep.")
        self.rows = max(0, self.rows + max_length)

    def reset(self) -> None:
        self.rows = 0


class TreeCache(Cache):
    """One `RowLayer` per decoder layer. Overflow is reported before anything is written."""

    def __init__(self, num_layers: int, capacity: int):
        assert capacity >= 1, "a cache needs room for at least one row"
        super().__init__(layers=[RowLayer(capacity) for _ in range(num_layers)])
        self.capacity = capacity

    def __len__(self) -> int:
        """Rows that are filled (committed tokens - 1 between cycles)."""
        return self.layers[0].rows

    def require(self, rows: int) -> None:
        """Refuse a forward of `rows` tokens that would not fit, before it writes anything."""
        if len(self) + rows > self.capacity:
            raise SpecdecError(
                f"the key-value cache has room for {self.capacity} tokens but {len(self) + rows} are needed; "
                "shorten the prompt, lower max_new_tokens or use a smaller tree."
            )

    def append(self, other: TreeCache, begin: int = 0, end: int | None = None) -> None:
        """Take over rows [begin, end) of another cache of the same model, default all, as if their tokens had been read here."""
        end = len(other) if end is None else end
        self.require(end - begin)
        for layer, given in zip(self.layers, other.layers, strict=True):
            if given.is_initialized:
                layer.update(given.keys[:, :, begin:end], given.values[:, :, begin:end])

    def keep(self, start: int, rows: list[int], index: Tensor | None = None) -> None:
        """Keep the accepted path: `rows` are absolute row numbers, ascending, all at or after `start` and filled.

        index: the same numbers as int64 [A] on the cache's device, where the caller has them.
        """
        end, filled = start + len(rows), len(self)
        ascending = all(a < b for a, b in zip([start - 1, *rows], [*rows, filled], strict=True))
        assert 0 <= start <= filled and ascending, f"cannot keep rows {rows} from row {start} on in {filled} rows"
        if rows == list(range(start, end)):  # a chain is already in place
            self.truncate(end)
            return
        if index is None:
            index = torch.tensor(rows, device=self.layers[0].keys.device)
        for layer in self.layers:
            if layer.is_initialized:  # layers that share another's keys have none of their own
                layer.keep(start, index if index.device == layer.keys.device else index.to(layer.keys.device))

    def truncate(self, rows: int) -> None:
        """Forget everything after the first `rows` rows."""
        assert 0 <= rows <= len(self), f"cannot truncate a cache of {len(self)} rows to {rows}"
        for layer in self.layers:
            layer.rows = rows

    @contextlib.contextmanager
    def writing_at(self, rows: Tensor) -> Iterator[None]:
        """Inside, new keys and values go to the row numbers `rows` int64 [T], attention gets whole buffers, none is counted."""
        try:
            for layer in self.layers:
                layer.written = rows
            yield
        finally:
            for layer in self.layers:
                layer.written = None

    def extend(self, rows: int) -> None:
        """Count `rows` more rows that were written inside `writing_at`."""
        self.require(rows)
        filled = len(self) + rows
        for layer in self.layers:
            layer.rows = filled

    def clear(self) -> None:
        """Forget everything, and leave nothing behind: what is hidden by a mask must still be a finite number."""
        self.truncate(0)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()


class CannotJoin(Exception):
    """A model whose sequences cannot share a forward."""


class JoinedCache(Cache):
    """The caches of several sequences, for one forward over new rows of all of them side by side.

    What the model hands over is split and goes into each sequence's own cache; `keys_of` gives their keys and values back.
    """

    def __init__(self, caches: list[TreeCache], counts: list[int]):
        super().__init__(layers=list(caches[0].layers))
        self.caches, self.counts = caches, counts
        self._stored: dict[
            int, tuple
        ] = {}  # id of the new keys -> (they themselves, so that the id stays theirs; parts)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Store new rows [1, kv heads, T, D] of all sequences, and return them as they came."""
        parts = zip(self.caches, key_states.split(self.counts, 2), value_states.split(self.counts, 2), strict=True)
        stored = [cache.layers[layer_idx].update(keys, values) for cache, keys, values in parts]
        self._stored[id(key_states)] = (key_states, stored)
        return key_states, value_states

    def keys_of(self, new_keys: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values [1, kv heads, M, D] by sequence, for the very tensor that `update` returned."""
        if id(new_keys) not in self._stored:
            raise CannotJoin("this model changes keys after they were stored")
        return self._stored[id(new_keys)][1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0
