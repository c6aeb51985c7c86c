"""Weights packed once for this processor's fastest kernels, when specdec loads a pair on a CPU."""

from __future__ import annotations

from torch import nn


def pack(module: nn.Module) -> None:
    """Pack the linear layers of a module in place; the packed form is then the only copy."""
