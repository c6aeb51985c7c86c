"""A function of static tensors, recorded once as a CUDA graph and then replayed; elsewhere it is simply called.

    values ──▶ static inputs ──▶ function ──▶ static outputs          every call: the same operations at the same addresses

NOT run on a GPU where it was developed (there was none): tests on a CPU replay tapes of the operations instead. Knows nothing
about models, caches or trees.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from specdec.errors import SpecdecError, first_line

WARM_UPS = 2  # on CUDA, before recording: libraries choose their kernels and take their memory
INSTEAD = "load this pair without capture"


class Recorded:
    """A function recorded at its first call and replayed after that.

    It takes the static `inputs` by name, gives the same when it is run again, and returns a tuple of tensors (or None). They
    are overwritten by every call.
    """

    def __init__(self, function: Callable[..., tuple], device: torch.device, **inputs: Tensor):
        self.function, self.device, self.inputs = functools.partial(function, **inputs), device, inputs
        self.outputs: tuple | None = None

    def __call__(self, **values: Tensor | int) -> tuple:
        """Put each tensor into the first corner of its input, a number everywhere; run; return the static outputs."""
        for name, value in values.items():
            static = self.inputs[name]
            static.fill_(value) if isinstance(value, int) else static[tuple(map(slice, value.shape))].copy_(value)
        if self.outputs is None:
            self.outputs, self.replay = self.record()
        self.replay()
        return self.outputs

    def record(self) -> tuple[tuple, Callable[[], None]]:
        """(static outputs, what computes them anew)."""
        if self.device.type == "cuda":
            return self._as_graph()
        outputs = self.function()
        return outputs, lambda: put(outputs, self.function())

    def _as_graph(self) -> tuple[tuple, Callable[[], None]]:
        """A CUDA graph with memory of its own: the replay of another one overwrites nothing that this one left."""
        try:
            with torch.cuda.device(self.device):
                current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
                aside.wait_stream(current)
                with torch.cuda.stream(aside):
                    for _ in range(WARM_UPS):
                        self.function()
                current.wait_stream(aside)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    outputs = self.function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = first_line(error).rstrip(".")
            raise SpecdecError(f"a forward cannot be recorded as a CUDA graph ({reason}); {INSTEAD}.") from error
        return outputs, graph.replay


def put(statics: tuple, values: tuple) -> None:
    """Copy tensors to where others are; None stays."""
    for static, value in zip(statics, values, strict=True):
        if static is not None:
            static.copy_(value)


class Pool:
    """Memory by size, lent to one owner at a time and taken back when the owner is gone."""

    def __init__(self):
        self._free: dict = defaultdict(list)

    def lend(self, owner, size, make: Callable):
        """Memory that no living owner has; `make` takes new."""
        free = self._free[size]
        memory = free.pop() if free else make()
        weakref.finalize(owner, free.append, memory).atexit = False
        return memory


class Weights:
    """Where the weights of modules lie: a recording reads those addresses, so it ends when they change."""

    def __init__(self, *modules: nn.Module):
        self._held = [m._parameters for module in modules for m in module.modules() if m._parameters]
        self.version, self._seen = 0, None

    def moved(self, *settings) -> bool:
        """True if weights, or the settings given here, are others than last time; `version` counts how often."""
        parameters = (parameter for held in self._held for parameter in held.values())
        seen = ([p.data_ptr() for p in parameters if p is not None], settings)
        moved = seen != self._seen
        self._seen, self.version = seen, self.version + moved
        return moved
