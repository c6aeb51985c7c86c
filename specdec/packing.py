"""Weights of linear layers laid out once for the CPU's matrix kernels, while a model is lent to the decoder.

PyTorch re-arranges a weight matrix on every call with few rows, which on a CPU costs more than the product itself
(2-3x in bfloat16). Here the arrangement is made once and kept beside the model; the model's own weights are not touched and
it is handed back as it was. Elsewhere (CUDA, other dtypes, a build without the kernels) nothing happens.

Knows nothing about model families: it swaps `forward` of plain `nn.Linear` modules, nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Below these sizes the plain product is faster: packed kernels cost some 20 us a call, and for few rows float32 has a
# matrix-vector kernel that needs no arrangement. (Measured; `specdec doctor --bench` shows the effect as a whole.)
PACKED_FROM_ROWS = {torch.float32: 4, torch.bfloat16: 1}
PACKED_FROM_WEIGHTS = {torch.float32: 400_000, torch.bfloat16: 8_192}
MOST_BYTES = 4 << 30  # a second copy of the weights: worth it for models that fit a CPU comfortably


class PackedLinears:
    """Packed copies of a model's linear layers, renewed when a weight changes, dropped with this object."""

    def __init__(self, model: nn.Module, most_bytes: int = MOST_BYTES):
        self._modules = [m for m in model.modules() if type(m) is nn.Linear and can_pack(m.weight)]
        if sum(m.weight.nbytes for m in self._modules) > most_bytes:
            self._modules = []
        self._packed: dict[int, tuple[tuple, Callable]] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the linear layers run on their packed weights."""
        swapped = []
        try:
            for module in self._modules:
                if "forward" not in module.__dict__ and not module._forward_hooks:
                    module.forward = self._forward_of(module)
                    swapped.append(module)
            yield
        finally:
            for module in swapped:
                del module.forward

    def _forward_of(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        weight = module.weight
        state = (weight.data_ptr(), None if weight.is_inference() else weight._version, weight.dtype)
        known = self._packed.get(id(module))
        if known is None or known[0] != state:
            known = (state, packed_linear(weight, module.bias))
            self._packed[id(module)] = known
        return known[1]


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """x [..., I] -> x @ weight.T + bias [..., O], on a packed copy of `weight` [O, I] where that is possible and faster."""
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    if not can_pack(weight):
        return lambda x: F.linear(x, weight, bias)
    with torch.inference_mode():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    run, fewest = torch.ops.mkldnn._linear_pointwise, PACKED_FROM_ROWS[weight.dtype]
    width = weight.shape[1]

    def forward(x: Tensor) -> Tensor:
        if x.numel() < fewest * width:
            return F.linear(x, weight, bias)
        return run(x, packed, bias, "none", [], "")

    return forward


def can_pack(weight: Tensor) -> bool:
    """True for a CPU matrix that is worth packing, in a dtype whose kernels this PyTorch and this processor have."""
    if weight.device.type != "cpu" or weight.dtype not in PACKED_FROM_ROWS or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and weight.numel() >= PACKED_FROM_WEIGHTS[weight.dtype]
