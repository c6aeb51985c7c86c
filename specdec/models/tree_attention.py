# shim: goes at integration (TreeMask: target.py; attention: attention.py)
from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import machine
from specdec.core.tree import additive
from specdec.core.tree import causal as causal_order
from specdec.models.target import TreeMask  # noqa: F401


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool = False,
    scale: float | None = None,
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


PRODUCTS_FROM = (
    20_000  # above so many (row, key) pairs, two plain products are faster than torch's kernel
)
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
        return _two_products(
            query, key, value, None if bias is None else bias.unflatten(0, (groups, rows))
        )
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
