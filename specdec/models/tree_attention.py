"""Tree attention for any transformers model, through the library's public `AttentionInterface`.

While a `TreeMask` is active, every attention layer of the model builds its mask from query positions, the ancestor
matrix and its *own* sliding window, and ignores the mask that the model prepared. No code depends on a model family:
layers with capped scores or sinks run their family's own eager attention, all others PyTorch's fused one.

Knows nothing about tokens, caches or drafters.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from specdec import machine
from specdec.core.tree import additive, counting
from specdec.core.tree import causal as causal_order
from specdec.errors import SpecdecError
from specdec.models.families import setting

NAME = "specdec_tree"
PASSED_ON = ("sliding_window", "softcap", "s_aux")  # attention arguments of a layer besides the scale
_active: ContextVar[TreeMask | JoinedMask | None] = ContextVar("specdec_tree_mask", default=None)


class TreeMask:
    """Which rows see which in one forward of T new rows after `prefix` cached ones.

    positions: int64 [T], the absolute position of each new row (cached row i sits at position i).
    ancestors: bool [T, T], row i sees new row j; None means plain causal order (prefill, or a single token).
    """

    prepared = False  # whether the model also gets its masks, for layers with attention code of their own

    def __init__(self, positions: Tensor, prefix: int, ancestors: Tensor | None = None):
        self.positions, self.prefix, self.ancestors = positions, prefix, ancestors
        self.widths: set[int | None] = set()  # of the masks that the model prepared in this forward; None is unlimited
        self._masks: dict = {}
        self.rotary: tuple | None = None  # tables of this forward, made by its first layer (`lean.py`)
        self.noted: dict | None = None  # what every layer passes on, while observed (`lean.py`)

    def visible(self, window: int | None) -> Tensor:
        """bool [T, prefix + T]: ancestry, cut by a sliding window (a key is seen if query - key < window)."""
        count, device = self.positions.shape[0], self.positions.device
        among = causal_order(count, device) if self.ancestors is None else self.ancestors
        seen = F.pad(among, (self.prefix, 0), value=True)
        if window is not None:
            keys = torch.cat((counting(self.prefix, device), self.positions))
            seen &= self.positions[:, None] - keys[None, :] < window
        return seen

    def additive(self, window: int | None, like: Tensor, hidden: float, times: int = 1) -> Tensor:
        """Additive mask [times * T, prefix + T], of dtype and device of `like`: 0 where visible, `hidden` elsewhere.

        Computed once per kind of layer, device and pass.
        """
        key = (window, like.dtype, like.device, hidden, times)
        if key not in self._masks:
            mask = additive(self.visible(window).to(like.device), like.dtype, hidden)
            self._masks[key] = mask.repeat(times, 1) if times > 1 else mask
        return self._masks[key]

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows of the layers' masks."""
        return {window for window, *_ in self._masks}

    def is_causal(self, window: int | None) -> bool:
        """True if causal order suffices: a single row, or a prompt, and no window cuts anything."""
        count = self.positions.shape[0]
        if window is not None and self.prefix + count > window:
            return False
        return self.ancestors is None and (self.prefix == 0 or count == 1)


class JoinedMask:
    """The masks of several sequences whose new rows lie side by side in one forward; each keeps its own keys.

    keys_of: the joined cache's function from new keys and values [1, kv heads, T, D] to all of them by sequence.
    at_once: whether it can also attend for all single-row sequences together (`kv_cache.PagedParts`).
    """

    prepared = False

    def __init__(self, masks: list[TreeMask], keys_of: Callable[[Tensor, Tensor], Sequence], at_once: bool = False):
        self.masks, self.keys_of, self.at_once = masks, keys_of, at_once
        self.counts = [mask.positions.shape[0] for mask in masks]
        self.positions = torch.cat([mask.positions for mask in masks])
        self.widths: set[int | None] = set()
        self.rotary: tuple | None = None
        self.noted: dict | None = None
        self._plain: dict[int | None, bool] = {}

    def single_rows_at_once(self, window: int | None, kwargs: dict) -> bool:
        """Whether single-row sequences see all their keys, under the layer's window, in plain attention."""
        if not self.at_once or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
            return False
        if window not in self._plain:
            single = (mask for mask, count in zip(self.masks, self.counts, strict=True) if count == 1)
            self._plain[window] = all(mask.is_causal(window) for mask in single)
        return self._plain[window]


def tree_attention(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling=None, dropout=0.0, **kwargs
) -> tuple[Tensor, None]:
    """The registered function. query [B, heads, T, D], key and value [B, kv heads, M, D] -> [B, T, heads, D], contiguous."""
    state = _active.get()
    if state is None:
        raise SpecdecError(
            "specdec is decoding with this model, and something else ran it: a logits processor, a criterion, a streamer or "
            "another thread; leave that out, or run it after decoding has ended."
        )
    if state.noted is not None:
        state.noted[module] = dict(scaling=scaling, **{name: kwargs[name] for name in PASSED_ON if name in kwargs})
    window = window_of(module, state, kwargs)
    if isinstance(state, TreeMask):
        return _attend(module, query, key, value, state, window, scaling, kwargs).contiguous(), None
    keys = state.keys_of(key, value)  # every sequence attends to its own
    parts = keys.attend(query, scaling) if state.single_rows_at_once(window, kwargs) else {}
    for number, part in enumerate(query.split(state.counts, dim=2)):
        if number not in parts:
            parts[number] = _attend(module, part, *keys[number], state.masks[number], window, scaling, kwargs)
    return torch.cat([parts[number] for number in range(len(state.counts))], dim=1), None


def _attend(module, query, key, value, mask: TreeMask, window: int | None, scaling, kwargs) -> Tensor:
    """One sequence, or several with the same mask. Returns [B, T, heads, D]."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        eager = setting(sys.modules[type(module).__module__], "eager_attention_forward")
        if eager is None:
            name = type(module).__name__
            raise SpecdecError(f"{name} caps scores or has sinks but offers no eager attention; choose another family.")
        bias = mask.additive(window, query, torch.finfo(query.dtype).min)[None, None]  # added to the scores
        return eager(module, query, key, value, bias, scaling=scaling, dropout=0.0, **kwargs)[0]
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    causal = mask.is_causal(window)
    if batch == 1:
        bias = None if causal else mask.additive(window, query, float("-inf"), groups)
        query = query.view(kv_heads, groups, rows, width)
        out = grouped_attention(query, key[0], value[0], bias, causal and rows > 1, scaling)
        return out.view(1, heads, rows, -1).transpose(1, 2)
    bias = None if causal else mask.additive(window, query, float("-inf"))
    settings = dict(is_causal=causal and rows > 1, scale=scaling, enable_gqa=groups > 1)
    return F.scaled_dot_product_attention(query, key, value, bias, **settings).transpose(1, 2)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Query heads grouped by the key head they share. query [kv, groups, T, D], key and value [kv, M, D] -> [kv, groups, T, D].

    bias: additive [groups * T, M] or None. The heads of a group are stacked as rows of one product: no key is
    repeated. (Measured on a CPU: up to 5 times as fast for one row, never slower.)
    """
    kv_heads, groups, rows, width = query.shape
    dtype = query.dtype
    if products_pay(query, key):
        return _attention_of_products(query, key, value, bias, causal, scale)
    if groups * rows == 1 and dtype == torch.bfloat16 and query.device.type == "cpu":
        # The bfloat16 kernel takes 3 times as long as conversion plus the float32 kernel (without AMX, one row).
        query, key, value = query.float(), key.float(), value.float()
        bias = None if bias is None else bias.float()  # a tree of only its root has one
    if causal:  # needs rows in order: the keys are broadcast with a stride of zero instead
        key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    else:
        stacked = query.reshape(1, kv_heads, groups * rows, width)
        out = F.scaled_dot_product_attention(stacked, key[None], value[None], bias, scale=scale)
    return out.view(kv_heads, groups, rows, -1).to(dtype)


PRODUCTS_FROM = 20_000  # above so many (row, key) pairs, two plain products are faster than torch's kernel
BLOCK_ROWS = 64  # rows of a causal product at a time: half of a single large one would be masked


def products_pay(query: Tensor, key: Tensor) -> bool:
    """Whether attention is faster as two products: query [kv, groups, T, D], key [kv, M, D].

    torch's CPU kernel hardly uses bfloat16 instructions. (Measured on a processor that has them: 16 rows
    over 800 keys in half the time, a prompt of 600 in two fifths; below about 5,000 products, and in float32, no gain.)
    """
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or not multiplies_bfloat16():
        return False
    return query.shape[1] * query.shape[2] * key.shape[1] >= PRODUCTS_FROM


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has the instructions and torch uses them."""
    return machine.multiplies_bfloat16() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _attention_of_products(query, key, value, bias, causal: bool, scale: float | None) -> Tensor:
    """grouped_attention as two products and a softmax, causal rows in blocks."""
    _, groups, rows, width = query.shape
    query = query * (width**-0.5 if scale is None else scale)
    if not causal:
        return _two_products(query, key, value, None if bias is None else bias.unflatten(0, (groups, rows)))
    out = torch.empty_like(query)
    future = additive(causal_order(BLOCK_ROWS, query.device), query.dtype)
    for begin in range(0, rows, BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, rows)
        part = slice(begin, end)
        seen = F.pad(future[: end - begin, : end - begin], (begin, 0))
        out[:, :, part] = _two_products(query[:, :, part], key[:, :end], value[:, :end], seen)
    return out


def _two_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(query key.T + bias) value: query [kv, groups, T, D], bias [T, M] or [groups, T, M] -> [kv, groups, T, D]."""
    kv_heads, groups, rows, _ = query.shape
    stacked = query.reshape(kv_heads, groups * rows, -1)
    scores = torch.bmm(key, stacked.transpose(1, 2))  # keys first: they are read in memory order
    scores = scores.transpose(1, 2).contiguous()
    if bias is not None:
        scores.view(kv_heads, groups, rows, -1).add_(bias)
    return torch.bmm(scores.softmax(-1), value).view(query.shape)


def window_of(module, mask: TreeMask | JoinedMask, kwargs: dict) -> int | None:
    """The layer's own sliding window: the argument it passes, else its attribute, else the width of the model's own masks.

    The last is for families whose window is only in a mask (which is ignored here). With masks of several widths,
    the layer's kind decides.
    """
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    if len(mask.widths) == 1:
        return next(iter(mask.widths))
    kinds = setting(setting(module, "config"), "layer_types")
    return module.config.sliding_window if kinds and kinds[module.layer_idx] == "sliding_attention" else None


def note_window(
    *args, local_size: int | None = None, dtype: torch.dtype = torch.float32, device=None, **kwargs
) -> Tensor | None:
    """The registered mask function: records the window of the mask that the model would build, and builds it, [1, 1, T, M],
    only if layers of the model need one."""
    mask = _active.get()
    if mask is None:
        return None
    mask.widths.add(local_size)
    if not mask.prepared:
        return None
    return mask.additive(local_size, torch.empty(0, dtype=dtype, device=device), torch.finfo(dtype).min)[None, None]


def active_mask() -> TreeMask | JoinedMask | None:
    """The mask of the running forward, if it is one of ours."""
    return _active.get()


@contextlib.contextmanager
def tree_mask(mask: TreeMask | JoinedMask | None) -> Iterator[None]:
    """Make `mask` the one that the model's layers use; afterwards the earlier one, whatever was set in between."""
    token = _active.set(mask)
    try:
        yield
    finally:
        _active.reset(token)


def has_patched_attention(model) -> bool:
    """True while the model runs under tree attention."""
    return setting(model.config.get_text_config(), "_attn_implementation") == NAME


@functools.cache
def _register() -> None:
    transformers.AttentionInterface.register(NAME, tree_attention)
    transformers.AttentionMaskInterface.register(NAME, note_window)


@contextlib.contextmanager
def patched_attention(configs: list) -> Iterator[None]:
    """Run a model under tree attention and restore its implementation, also after an error.

    configs: its `attention_configs`.
    """
    _register()
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
