"""Attention over cached keys, for our own layers: packed targets and drafters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

STACKING = ("cpu",)  # devices whose kernel has no groups of heads
ROW = 64  # values; GPU kernels need mask rows that begin at multiples of 16 bytes


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

    mask: additive, broadcastable to [B, 1, T, M]; None if all keys are visible. causal: T = M rows
    in order. On a device of STACKING the heads that share a key head become rows of one product, so
    that no key is read twice (up to 5 times as fast for one row).
    """
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    if causal or groups == 1 or query.device.type not in STACKING:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    if mask is not None:
        if mask.dim() == 4:
            mask = mask.expand(-1, 1, rows, -1)
        mask = mask.repeat(*[1] * (mask.dim() - 2), groups, 1)
    stacked = query.reshape(batch, key.shape[1], groups * rows, width)
    attended = F.scaled_dot_product_attention(stacked, key, value, mask, scale=scale)
    return attended.reshape(batch, heads, rows, -1)
