"""A preallocated key-value cache, accepted by transformers as a `Cache`, and attention over it.

Rows are written in place, never concatenated. After a tree forward `keep` gathers the accepted rows
and drops the rest; `truncate` drops a tail. Sliding layers keep their full history: the mask
implements the window. `attend` serves packed targets and drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

STACKING = ("cpu",)  # devices whose kernel has no groups of heads
ROW = 64  # values; GPU kernels need mask rows that begin at multiples of 16 bytes


class RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [B, kv heads, capacity, D], filled up to `rows`."""

    is_sliding = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.rows = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on first use: head count, widths, dtype and device come from the layer."""
        batch, heads, _, width = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(batch, heads, self.capacity, width)
        self.values = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, kv heads, T, D] and return views of all rows so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.rows, self.rows + key_states.shape[-2]
        assert end <= self.capacity, f"{end} rows, but room was made for {self.capacity}"
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.rows = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows + query_length, 0

    def get_seq_length(self) -> int:
        return self.rows

    def get_max_length(self) -> int:
        return self.capacity

    def reset(self) -> None:
        self.rows = 0


class TreeCache(Cache):  # type: ignore[misc]
    """One `RowLayer` per decoder layer."""

    def __init__(self, num_layers: int, capacity: int):
        super().__init__(layers=[RowLayer(capacity) for _ in range(num_layers)])

    def __len__(self) -> int:
        """Filled rows (committed tokens - 1 between cycles)."""
        return int(self.layers[0].rows)

    def append(self, other: TreeCache, begin: int, end: int) -> None:
        """Copy rows [begin, end) of another cache of the same model."""
        for layer, source in zip(self.layers, other.layers, strict=True):
            if source.is_initialized:
                layer.update(source.keys[:, :, begin:end], source.values[:, :, begin:end])

    def keep(self, start: int, rows: list[int], index: Tensor | None = None) -> None:
        """Keep the accepted path after the first `start` rows, and drop the rest.

        rows: absolute row numbers, ascending, all at or after `start` and filled. index: the same
        numbers as int64 [A] on the cache's device, if the caller has them.
        """
        end = start + len(rows)
        if rows == list(range(start, end)):  # a chain is already in place
            self.truncate(end)
            return
        if index is None:
            index = torch.tensor(rows, device=self.layers[0].keys.device)
        for layer in self.layers:
            if layer.is_initialized:  # layers that share another's keys have none of their own
                index = index.to(layer.keys.device)
                layer.keys[:, :, start:end] = layer.keys.index_select(2, index)
                layer.values[:, :, start:end] = layer.values.index_select(2, index)
                layer.rows = end

    def truncate(self, rows: int) -> None:
        """Drop everything after the first `rows` rows."""
        assert 0 <= rows <= len(self), f"cannot truncate a cache of {len(self)} rows to {rows}"
        for layer in self.layers:
            layer.rows = rows


class JoinedCache(Cache):  # type: ignore[misc]
    """The caches of several sequences, for one forward over a batch of them, padded on the right.

    counts: new rows of each sequence; the others of its [T] rows are padding and are not stored.
    """

    def __init__(self, caches: Sequence[TreeCache], counts: Sequence[int]):
        super().__init__(layers=list(caches[0].layers))
        self.caches = caches
        self.counts = counts
        self.rows = max(len(cache) + count for cache, count in zip(caches, counts, strict=True))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new rows [B, kv heads, T, D]; return all rows of each, [B, kv heads, M, D]."""
        batch, heads, _, width = key_states.shape
        keys = key_states.new_zeros(batch, heads, self.rows, width)
        values = value_states.new_zeros(batch, heads, self.rows, value_states.shape[-1])
        for number, (cache, count) in enumerate(zip(self.caches, self.counts, strict=True)):
            row = slice(number, number + 1)
            new_keys = key_states[row, :, :count]
            new_values = value_states[row, :, :count]
            all_keys, all_values = cache.layers[layer_idx].update(new_keys, new_values)
            keys[row, :, : all_keys.shape[2]] = all_keys
            values[row, :, : all_values.shape[2]] = all_values
        return keys, values


def aligned(mask: Tensor) -> Tensor:
    """The same mask [..., M] in memory whose rows begin at multiples of 64 values."""
    keys = mask.shape[-1]
    if mask.stride(-1) == 1 and mask.stride(-2) % ROW == 0 and mask.storage_offset() % ROW == 0:
        return mask
    room = mask.new_zeros(*mask.shape[:-1], -(-keys // ROW) * ROW)
    room[..., :keys] = mask
    return room[..., :keys]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Query [B, heads, T, D] over key and value [B, kv heads, M, D] -> [B, heads, T, D].

    mask: additive, broadcastable to [B, 1, T, M]; None if all keys are visible.
    """
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    if causal or groups == 1 or query.device.type not in STACKING:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    # heads that share a key head become rows of one product, so that no key is read twice
    if mask is not None:
        if mask.dim() == 4:
            mask = mask.expand(-1, 1, rows, -1)
        mask = mask.repeat(*[1] * (mask.dim() - 2), groups, 1)
    stacked = query.reshape(batch, key.shape[1], groups * rows, width)
    attended = F.scaled_dot_product_attention(stacked, key, value, mask, scale=scale)
    return attended.reshape(batch, heads, rows, -1)
