"""Preallocated key-value caches accepted by transformers as a `Cache`: one for tree paths, one of shared pages.

`TreeCache`: rows are written in place, never concatenated. After a tree forward `keep` gathers the accepted rows and drops
the rest; `truncate` drops a tail. Sliding layers keep their full history: the mask implements the window
(`tree_attention.py`). `JoinedCache` puts several of them into one forward.

`PagedMemory`: keys and values of many sequences in one memory. A sequence takes pages of PAGE rows as it grows and returns
them when its cache is deleted. If every sequence adds one row, as in plain decoding of many texts, attention is one product
of all pages' keys with their owners' queries, a softmax over the pages of every owner, and one product with
all pages' values. Only the last page of a sequence is padded. For chains only.

Knows nothing about tokens or trees; rows are absolute row numbers.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.errors import SpecdecError


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, kv heads, capacity, D], filled up to `rows`."""

    is_croppable, is_sliding = True, False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.rows = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on first use: head count, widths, dtype and device come from the layer."""
        batch, heads, _, width = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(batch, heads, self.capacity, width)
        self.values = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append [B, kv heads, T, D] and return views of all rows so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.rows, self.rows + key_states.shape[-2]
        assert end <= self.capacity, f"{end} rows, but room was made for {self.capacity}"
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.rows = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, start: int, rows: Tensor) -> None:
        """Move `rows` (int64 [A], absolute, ascending, all >= start) to start..start+A and drop what follows."""
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

    get_max_cache_shape = get_max_length

    def crop(self, max_length: int) -> None:
        """transformers' name for dropping rows: a negative number drops that many; other numbers are refused."""
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
        """Filled rows (committed tokens - 1 between cycles)."""
        return self.layers[0].rows

    def require(self, rows: int) -> None:
        """Refuse a forward of `rows` tokens that would not fit, before it writes anything."""
        if len(self) + rows > self.capacity:
            why = f"the key-value cache has room for {self.capacity} tokens but {len(self) + rows} are needed"
            raise SpecdecError(f"{why}; shorten the prompt, lower max_new_tokens or use a smaller tree.")

    def append(self, other: TreeCache, begin: int = 0, end: int | None = None) -> None:
        """Copy rows [begin, end) of another cache of the same model, default all, as if their tokens had been read here."""
        end = len(other) if end is None else end
        self.require(end - begin)
        for layer, given in zip(self.layers, other.layers, strict=True):
            if given.is_initialized:
                layer.update(given.keys[:, :, begin:end], given.values[:, :, begin:end])

    def keep(self, start: int, rows: list[int], index: Tensor | None = None) -> None:
        """Keep the accepted path: `rows` are absolute row numbers, ascending, all at or after `start` and filled.

        index: the same numbers as int64 [A] on the cache's device, if the caller has them.
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
        """Drop everything after the first `rows` rows."""
        assert 0 <= rows <= len(self), f"cannot truncate a cache of {len(self)} rows to {rows}"
        for layer in self.layers:
            layer.rows = rows


class CannotJoin(Exception):
    """A model whose sequences cannot share a forward."""


class JoinedCache(Cache):
    """The caches of several sequences, for one forward over new rows of all of them side by side.

    The model's new keys and values are split into each sequence's own cache; `keys_of` returns their keys and values.
    """

    def __init__(self, caches: list[TreeCache], counts: list[int]):
        super().__init__(layers=list(caches[0].layers))
        self.caches, self.counts = caches, counts
        # id of the new keys -> (these, to keep the id unique; values; the parts)
        self._stored: dict[int, tuple] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Store new rows [1, kv heads, T, D] of all sequences, and return them unchanged."""
        parts = zip(self.caches, key_states.split(self.counts, 2), value_states.split(self.counts, 2), strict=True)
        stored = [cache.layers[layer_idx].update(keys, values) for cache, keys, values in parts]
        self._stored[id(key_states)] = (key_states, value_states, stored)
        return key_states, value_states

    def keys_of(self, new_keys: Tensor, new_values: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values [1, kv heads, M, D] by sequence, for the tensors that `update` returned."""
        _, values, parts = self._stored.get(id(new_keys), (None, None, None))
        if values is None or values is not new_values:
            raise CannotJoin("this model changes keys or values after they were stored")
        return parts

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


PAGE = 64  # rows; larger pages waste reads at the end of every sequence, smaller ones multiply slower


class PagedMemory:
    """Pages of keys [P, kv heads, D, PAGE] and of values [P, kv heads, PAGE, D] for each layer, and a list of free ones.

    Keys are stored transposed, so that the scores of a query are contiguous, where a softmax is cheap.
    """

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self.stores: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._free: list[int] = []
        self._pages = 0

    def new_cache(self, capacity: int) -> PagedCache:
        """An empty sequence of at most `capacity` rows."""
        return PagedCache(self, capacity)

    def take_page(self) -> int:
        """The lowest free page, so that used pages stay together."""
        if not self._free:
            more = max(64, self._pages // 4)
            self._free = list(range(self._pages, self._pages + more))
            self._pages += more
            for layer, stores in enumerate(self.stores):
                if stores is not None:
                    self.stores[layer] = tuple(torch.cat((x, x.new_zeros(more, *x.shape[1:]))) for x in stores)
        return heapq.heappop(self._free)

    def return_pages(self, pages: list[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)

    def write(self, layer: int, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows [N, kv heads, D] in slots of pages, both int64 [N]."""
        if self.stores[layer] is None:
            heads, width = keys.shape[1:]
            values_shape = (self._pages, heads, PAGE, values.shape[2])
            self.stores[layer] = keys.new_zeros(self._pages, heads, width, PAGE), values.new_zeros(values_shape)
        key_store, value_store = self.stores[layer]
        key_store[pages, :, :, slots] = keys
        value_store[pages, :, slots] = values


class PagedLayer(RowLayer):
    """One layer of a sequence: a `RowLayer` for chains, on pages."""

    def __init__(self, memory: PagedMemory, layer: int, pages: list[int], capacity: int):
        super().__init__(capacity)
        self.memory, self.layer, self.pages = memory, layer, pages

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        places = torch.arange(self.rows, self.rows + key_states.shape[2], device=key_states.device)
        pages = torch.tensor(self.pages, device=places.device)[places // PAGE]
        keys, values = (x[0].transpose(0, 1) for x in (key_states, value_states))
        self.memory.write(self.layer, pages, places % PAGE, keys, values)
        self.count_rows(len(places))
        return self.read()

    def count_rows(self, rows: int) -> None:
        """Count stored rows."""
        self.rows, self.is_initialized = self.rows + rows, True

    def read(self) -> tuple[Tensor, Tensor]:
        """All rows so far, [1, kv heads, rows, D] of keys and of values."""
        used = self.pages[: -(-self.rows // PAGE)]
        keys, values = (store[used].transpose(0, 1) for store in self.memory.stores[self.layer])
        return tuple(x.flatten(1, 2)[None, :, : self.rows] for x in (keys.transpose(2, 3), values))

    def keep(self, start: int, rows: Tensor) -> None:
        raise NotImplementedError("a path of a tree is kept by a TreeCache")


class PagedCache(TreeCache):
    """The cache of one sequence on pages of a memory."""

    def __init__(self, memory: PagedMemory, capacity: int):
        self.memory, self.pages, self.capacity = memory, [], capacity
        layers = [PagedLayer(memory, layer, self.pages, capacity) for layer in range(memory.num_layers)]
        Cache.__init__(self, layers=layers)
        weakref.finalize(self, memory.return_pages, self.pages)

    def require(self, rows: int) -> None:
        super().require(rows)
        while PAGE * len(self.pages) < len(self) + rows:
            self.pages.append(self.memory.take_page())


class PagedJoin(JoinedCache):
    """Caches of one memory in one forward. Sequences with a single new row are `side_by_side`, the others run one by one."""

    def __init__(self, caches: list[PagedCache], counts: list[int], device: torch.device):
        super().__init__(caches, counts)
        self.memory = caches[0].memory
        self.ends = list(itertools.accumulate(counts))
        self.side_by_side = [number for number, count in enumerate(counts) if count == 1]
        new_rows = [(caches[number].pages, len(caches[number])) for number in self.side_by_side]
        # of each new row: its column among all new rows, its page, its slot
        columns = [self.ends[number] - 1 for number in self.side_by_side]
        pages, places = [pages[row // PAGE] for pages, row in new_rows], [row % PAGE for _, row in new_rows]
        self.columns, self.page, self.place = torch.tensor([columns, pages, places], dtype=torch.long, device=device)
        # of each page in use: its owner (one more than there are, if not in this forward), and its filled rows
        nobody = len(new_rows)
        in_use = 1 + max((page for pages, _ in new_rows for page in pages), default=-1)
        owned = [[nobody, PAGE]] * in_use
        for owner, (pages, row) in enumerate(new_rows):
            for number, page in enumerate(pages):
                owned[page] = [owner, min(max(row + 1 - number * PAGE, 0), PAGE)]
        self.owner, filled = torch.tensor(owned, dtype=torch.long, device=device).view(-1, 2).unbind(1)
        hidden = torch.arange(PAGE, device=device) >= filled[:, None]
        self.bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        new = (x[0].index_select(1, self.columns).transpose(0, 1) for x in (key_states, value_states))
        self.memory.write(layer_idx, self.page, self.place, *new)
        for number, (cache, end) in enumerate(zip(self.caches, self.ends, strict=True)):
            if (count := self.counts[number]) == 1:
                cache.layers[layer_idx].count_rows(1)
            else:
                cache.layers[layer_idx].update(*(x[:, :, end - count : end] for x in (key_states, value_states)))
        self._stored[id(key_states)] = (key_states, value_states, layer_idx)
        return key_states, value_states

    def keys_of(self, new_keys: Tensor, new_values: Tensor) -> PagedParts:
        return PagedParts(self, super().keys_of(new_keys, new_values))


class PagedParts:
    """One layer of a `PagedJoin`: keys and values by sequence, or attention for those side by side."""

    def __init__(self, join: PagedJoin, layer: int):
        self.join, self.layer = join, layer

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.join.caches[number].layers[self.layer].read()

    def attend(self, query: Tensor, scale: float | None) -> dict[int, Tensor]:
        """Attention of sequences with a single new row. query [1, heads, T, D] -> {sequence: [1, 1, heads, Dv]}."""
        join, count = self.join, len(self.join.side_by_side)
        query = query.index_select(2, join.columns)
        keys, values = (x[: len(join.owner)] for x in join.memory.stores[self.layer])
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query = query[0].transpose(0, 1).unflatten(1, (keys.shape[1], -1))  # [N, kv heads, groups, D]
        per_page = F.pad(query, (0, 0) * 3 + (0, 1))[join.owner]
        scores = (per_page @ keys).float().mul_(scale).add_(join.bias)  # [P, kv heads, groups, PAGE]
        page_best = scores.amax(-1)
        best, sums = page_best.new_zeros(2, count + 1, *page_best.shape[1:])
        index = join.owner[:, None, None].expand_as(page_best)
        best.scatter_reduce_(0, index, page_best, "amax", include_self=False)
        weights = scores.sub_(best[join.owner][..., None]).exp_()
        sums.index_add_(0, join.owner, weights.sum(-1))
        mixed = (weights.to(values.dtype) @ values).float()  # [P, kv heads, groups, Dv]
        mixed = mixed.new_zeros(count + 1, *mixed.shape[1:]).index_add_(0, join.owner, mixed)
        rows = (mixed / sums[..., None])[:count].flatten(1, 2).to(query.dtype)
        return dict(zip(join.side_by_side, rows[:, None, None].unbind(), strict=True))
