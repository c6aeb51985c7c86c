"""CUDA graphs played on a CPU: the operations of one run are taped, and a replay does them again on the very same tensors.

No Python of the recorded function runs in a replay, every number it held is the taped one, and every tensor stays where it was.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(*anything) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(anything) if isinstance(leaf, torch.Tensor)]


def reads_back(function, args: tuple) -> bool:
    """Whether the host waits for values: for what they are, or for how many there are."""
    name = function._schema.name
    if name == "aten::index":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags)
    return bool(tags) or name == "aten::is_nonzero" or (name == "aten::where" and len(args) == 1)


class Tape(TorchDispatchMode):
    """What `torch.cuda.CUDAGraph` is to a GPU. Used as a context it records."""

    def __init__(self):
        super().__init__()
        self.operations: list[tuple] = []
        self.recording = False

    def __enter__(self):
        self.recording = True
        return super().__enter__()

    def __exit__(self, *error):
        self.recording = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if reads_back(function, args):
            raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
        outputs = function(*args, **kwargs)
        self.operations.append((function, args, kwargs, outputs))
        return outputs

    def replay(self):
        for function, args, kwargs, outputs in self.operations:
            for before, now in zip(tensors(outputs), tensors(function(*args, **kwargs)), strict=True):
                if before.data_ptr() != now.data_ptr():  # else a view, or in place
                    before.copy_(now)

    def described(self) -> list[tuple]:
        """Every operation with its numbers, and of its tensors shape and, where they come from outside, address."""
        made: set[int] = set()
        rows = []
        for function, args, kwargs, outputs in self.operations:
            leaves = [self._described(leaf, made) for leaf in tree_leaves((args, kwargs))]
            rows.append((str(function), *leaves, *(tuple(out.shape) for out in tensors(outputs))))
            given = {id(tensor) for tensor in tensors(args, kwargs)}
            made |= {id(out) for out in tensors(outputs) if id(out) not in given}
        return rows

    @staticmethod
    def _described(leaf, made: set[int]):
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), None if id(leaf) in made else leaf.data_ptr()
        return repr(leaf)


class Stream:
    def wait_stream(self, other):
        pass


def pretend_cuda(monkeypatch) -> list[Tape]:
    """`torch.cuda`'s graphs become tapes, also where tensors are on the CPU. Returns them, as they are made."""
    from specdec.models.recorded import Recorded

    made: list[Tape] = []

    class Graph(Tape):
        def __init__(self):
            super().__init__()
            made.append(self)

    for name, value in dict(
        device=lambda device: contextlib.nullcontext(),
        current_stream=Stream,
        Stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
        CUDAGraph=Graph,
        graph=lambda tape: tape,
        is_current_stream_capturing=lambda: any(tape.recording for tape in made),
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Recorded, "record", Recorded._as_graph)
    return made
