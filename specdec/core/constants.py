"""Tensors that never change, made once per device, so that no cycle has to build them: nothing goes from host to device.

Knows nothing about what they are used for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_MOST_KEPT = 2048


def counting(count: int, device) -> Tensor:
    """0, 1, ..., count - 1 as int64 [count]."""
    return _counting(_room(count), str(device))[:count]


def causal(count: int, device) -> Tensor:
    """bool [count, count], true on and below the diagonal."""
    table = _causal if count <= _MOST_KEPT else _causal.__wrapped__  # a long prompt's would fill memory for good
    return table(_room(count), str(device))[:count, :count]


def identity(count: int, device) -> Tensor:
    """bool [count, count], true on the diagonal."""
    return _identity(_room(count), str(device))[:count, :count]


def _room(count: int) -> int:
    """A power of two of at least 256: few tables serve all counts."""
    return max(256, 1 << (count - 1).bit_length())


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _counting(count: int, device: str) -> Tensor:
    return torch.arange(count, device=device)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _causal(count: int, device: str) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool, device=device).tril_()


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _identity(count: int, device: str) -> Tensor:
    return torch.eye(count, dtype=torch.bool, device=device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def apart(count: int, dtype: torch.dtype, device) -> Tensor:
    """An attention mask [count, count] under which everyone sees itself alone: 0 on the diagonal, -inf elsewhere."""
    return additive(identity(count, device), dtype).clone()


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def scalar(value: float, dtype: torch.dtype, device) -> Tensor:
    """`value` as a tensor []."""
    return torch.tensor(value, dtype=dtype, device=device)


def additive(seen: Tensor, dtype: torch.dtype, hidden: float = float("-inf")) -> Tensor:
    """An attention mask of the shape of bool `seen`: 0 where seen, `hidden` elsewhere."""
    return torch.where(seen, scalar(0.0, dtype, seen.device), scalar(hidden, dtype, seen.device))
