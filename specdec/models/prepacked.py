"""Weights of linear layers laid out once for the CPU's matrix kernels, while a model decodes.

PyTorch re-arranges a weight matrix on every call with few rows, which on a CPU costs more than the product itself
(2-3x in bfloat16). Here the arrangement is made once and kept beside the model. Layers that were seen to read the very
same input (queries, keys and values; gate and up) run as one product. The model's own weights are not touched.
Elsewhere (CUDA, other dtypes, a build without the kernels) nothing happens.

Knows nothing about model families: it swaps `forward` of plain `nn.Linear` modules, nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Below these sizes the plain product is faster: prepacked kernels cost some 20 us a call, and for few rows float32 has a
# matrix-vector kernel that needs no arrangement. (Measured; `specdec doctor --bench` shows the effect as a whole.)
PREPACK_FROM_ROWS = {torch.float32: 4, torch.bfloat16: 1}
PREPACK_FROM_WEIGHTS = {torch.float32: 400_000, torch.bfloat16: 8_192}
MOST_BYTES = 4 << 30  # a second copy of the weights: worth it for models that fit a CPU comfortably


class PrepackedLinears:
    """Prepacked copies of a model's linear layers, renewed when a weight changes, dropped with this object."""

    def __init__(self, model: nn.Module, most_bytes: int = MOST_BYTES):
        linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"]
        usable = sum(m.weight.nbytes for m in linears) <= most_bytes
        self._groups = [_Group([m]) for m in linears] if usable else []

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Watch one forward inside: layers that are given the same tensor one after the other become one product."""
        calls: list[tuple[nn.Linear, Tensor | None]] = []
        modules = [m for group in self._groups for m in group.modules]

        def note(module, args):
            calls.append((module, args[0] if args else None))

        handles = [m.register_forward_pre_hook(note) for m in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        groups: list[list[nn.Linear]] = []
        grouped: set[int] = set()
        last = None
        for module, x in calls:
            if id(module) in grouped:  # a shared or repeated layer cannot be grouped safely
                continue
            grouped.add(id(module))
            if x is not None and x is last and (groups[-1][0].bias is None) == (module.bias is None):
                groups[-1].append(module)
            else:
                groups.append([module])
            last = x
        uncalled = [[m] for m in modules if id(m) not in grouped]
        self._groups = [_Group(members) for members in groups + uncalled]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the linear layers run on their prepacked weights."""
        swapped = []
        try:
            for group in self._groups:
                if any("forward" in m.__dict__ or m._forward_hooks for m in group.modules):
                    continue
                for module, forward in zip(group.modules, group.forwards(), strict=False):
                    module.forward = forward
                    swapped.append(module)
            yield
        finally:
            for module in swapped:
                del module.forward
            for group in self._groups:
                group.forget()


class _Group:
    """Linear layers that read the same input. The first to be called computes for all, the others pick up their part."""

    def __init__(self, modules: list[nn.Linear]):
        self.modules = modules
        self._state, self._forwards = None, []
        self.forget()

    def forget(self) -> None:
        self._input, self._parts = None, ()

    def forwards(self) -> list[Callable[[Tensor], Tensor]]:
        """One forward per module, or none if the plain ones are as good; renewed when a weight has changed."""
        parameters = [p for m in self.modules for p in (m.weight, m.bias) if p is not None]
        state = tuple((p.data_ptr(), None if p.is_inference() else p._version, p.dtype) for p in parameters)
        if state != self._state:
            self._state, self._forwards = state, self._build()
        return self._forwards

    def _build(self) -> list[Callable[[Tensor], Tensor]]:
        weights = [m.weight.detach() for m in self.modules]
        biases = [None if m.bias is None else m.bias.detach() for m in self.modules]
        if len(weights) == 1:
            return [prepacked_linear(weights[0], biases[0])] if can_prepack(weights[0]) else []
        self._sizes = [w.shape[0] for w in weights]
        joint = prepacked_linear(torch.cat(weights), None if biases[0] is None else torch.cat(biases))
        # Large weights and few rows: reading them is all the work, and the model's own copy is as good.
        bulky = sum(w.numel() for w in weights) >= PREPACK_FROM_WEIGHTS.get(weights[0].dtype, 0)
        alone_below = PREPACK_FROM_ROWS.get(weights[0].dtype, 1) * weights[0].shape[1] if bulky else 0

        def first(x: Tensor) -> Tensor:
            if x.numel() < alone_below:
                self.forget()
                return F.linear(x, weights[0], biases[0])
            self._input, self._parts = x, joint(x).split(self._sizes, -1)
            return self._parts[0]

        def later(number: int) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                if x is self._input:
                    return self._parts[number]
                return F.linear(x, weights[number], biases[number])

            return forward

        return [first, *(later(number) for number in range(1, len(weights)))]


def prepacked_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """x [..., I] -> x @ weight.T + bias [..., O], on a prepacked copy of `weight` [O, I] where that is possible and faster."""
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    if not can_prepack(weight):
        return lambda x: F.linear(x, weight, bias)
    with torch.inference_mode():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    run, fewest = torch.ops.mkldnn._linear_pointwise, PREPACK_FROM_ROWS[weight.dtype]
    width = weight.shape[1]

    def forward(x: Tensor) -> Tensor:
        if x.numel() < fewest * width:
            return F.linear(x, weight, bias)
        return run(x, packed, bias, "none", [], "")

    return forward


def can_prepack(weight: Tensor) -> bool:
    """True for a CPU matrix that is worth prepacking, in a dtype whose kernels this PyTorch and this processor have."""
    if weight.device.type != "cpu" or weight.dtype not in PREPACK_FROM_ROWS or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and weight.numel() >= PREPACK_FROM_WEIGHTS[weight.dtype]
