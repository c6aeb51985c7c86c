"""Constant tensors, built once per device, so that a cycle copies none of them from the host.

Knows nothing about what they are used for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_MOST_KEPT = 2048


def counting(count: int, device: torch.device | str) -> Tensor:
    """0, 1, ..., count - 1 as int64 [count]."""
    return _table("counting", _room(count), str(device))[:count]


def causal(count: int, device: torch.device | str) -> Tensor:
    """bool [count, count], true on and below the diagonal."""
    make = _table if count <= _MOST_KEPT else _table.__wrapped__  # a long prompt's would stay in memory permanently
    return make("causal", _room(count), str(device))[:count, :count]


def identity(count: int, device: torch.device | str) -> Tensor:
    """bool [count, count], true on the diagonal."""
    return _table("identity", _room(count), str(device))[:count, :count]


def _room(count: int) -> int:
    """A power of two of at least 256: few tables serve all counts."""
    return max(256, 1 << (count - 1).bit_length())


_MAKE = {
    "counting": lambda count, device: torch.arange(count, device=device),
    "causal": lambda count, device: torch.ones(count, count, dtype=torch.bool, device=device).tril_(),
    "identity": lambda count, device: torch.eye(count, dtype=torch.bool, device=device),
}


@functools.lru_cache(maxsize=48)
@torch.inference_mode(False)
def _table(kind: str, count: int, device: str) -> Tensor:
    return _MAKE[kind](count, device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def apart(count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An attention mask [count, count] in which every row sees only itself: 0 on the diagonal, -inf elsewhere."""
    return additive(identity(count, device), dtype).clone()


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def scalar(value: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`value` as a tensor []."""
    return torch.tensor(value, dtype=dtype, device=device)


def additive(seen: Tensor, dtype: torch.dtype, hidden: float = float("-inf")) -> Tensor:
    """An attention mask of the shape of bool `seen`: 0 where seen, `hidden` elsewhere."""
    return torch.where(seen, scalar(0.0, dtype, seen.device), scalar(hidden, dtype, seen.device))
