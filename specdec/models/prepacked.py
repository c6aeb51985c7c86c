"""Products of linear layers with the fastest CPU kernel, while a model decodes.

PyTorch re-arranges a weight matrix on every call with few rows, which on a CPU can cost more than the product itself. Here
the arrangement is done once and kept beside the model ("prepacked"), and layers that share an input (queries, keys and
values; gate and up) may run as one product. The fastest kernel depends on the shape, the dtype, the number of rows and the
machine, so it is measured once per machine (`best_kernels`). The model's own weights are not modified, and the model is
restored afterwards. Elsewhere (CUDA, other dtypes, a build without the kernels) nothing happens.

Knows nothing about model families: it only swaps `forward` of plain `nn.Linear` modules.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec import machine, runs
from specdec.core.pair import dtype_name
from specdec.errors import SpecdecError

PREPACK_FROM_WEIGHTS = 4_096  # below this, call overhead exceeds the product
MOST_BYTES = 4 << 30  # a second copy of the weights: worth it for models that fit a CPU comfortably
OWN, JOINT, PACKED = 0, 1, 2  # each layer alone; one plain product for layers with one input; one prepacked product
ROWS = (1, 2, 4, 8, 16, 32, 64)  # measured; other counts use the next larger one
_MOST_WEIGHTS = 1 << 21  # a slice of this size is as informative as a larger matrix
_REPEATS, _COPIES = 4, 6  # best of so many; layers of one shape alternate, so that they do not all fit a cache
_MARGIN = 0.97  # the gain that justifies a second copy
SPOTS = 17  # values compared in each weight, spread over it


class PrepackedLinears:
    """Prepacked copies of a model's linear layers, renewed when a weight changes, dropped with this object."""

    def __init__(self, model: nn.Module, most_bytes: int = MOST_BYTES):
        linears = [m for m in model.modules() if is_plain_linear(m) and m.weight.device.type == "cpu"]
        usable = sum(m.weight.nbytes for m in linears) <= most_bytes
        self._groups = [Group([m]) for m in linears if can_prepack(m.weight)] if usable else []

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Watch one forward: consecutive layers with the same input tensor become one group."""
        inputs: list[tuple[nn.Linear, Tensor]] = []
        modules = [m for group in self._groups for m in group.modules]

        def note(module: nn.Linear, args: tuple) -> None:
            inputs.append((module, args[0] if args else None))

        with contextlib.ExitStack() as handles:
            for module in modules:
                handles.enter_context(module.register_forward_pre_hook(note))
            yield
        grouped: set[int] = set()
        groups: list[list[nn.Linear]] = []
        last = None
        for module, x in inputs:
            if id(module) in grouped:  # a shared or repeated layer cannot be grouped safely
                continue
            grouped.add(id(module))
            if x is not None and x is last and (groups[-1][0].bias is None) == (module.bias is None):
                groups[-1].append(module)
            else:
                groups.append([module])
            last = x
        alone = [[m] for m in modules if id(m) not in grouped]
        self._groups = [Group(members) for members in groups + alone]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the linear layers run on the fastest kernels."""
        found = ((group.modules, group.forwards(self._groups)) for group in self._groups)
        own = (
            zip(modules, forwards, strict=True)
            for modules, forwards in found
            if forwards and not any("forward" in m.__dict__ or m._forward_hooks for m in modules)
        )
        try:
            with replaced(itertools.chain.from_iterable(own)):
                yield
        finally:
            for group in self._groups:
                group.forget()

    def renew(self) -> None:
        """Renew copies of weights that were changed without PyTorch's version counter."""
        for group in self._groups:
            group.renew()

    def group_of(self, modules: list[nn.Linear]) -> Group:
        """The observed group of these layers that share an input, else a new one that runs plain products."""
        return next((group for group in self._groups if group.modules == modules), None) or Group(modules)


@contextlib.contextmanager
def replaced(forwards: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Inside, these modules run the given forwards."""
    swapped = []
    try:
        for module, forward in forwards:
            swapped.append(module)
            module.__dict__["forward"] = forward  # bypasses nn.Module's checks, the larger part of the cost
        yield
    finally:
        for module in swapped:
            module.__dict__.pop("forward", None)


def is_plain_linear(module: nn.Module) -> bool:
    """A linear layer with its whole weight on this device: not sharded, not moved by accelerate."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not hasattr(module, "_hf_hook")


class Group:
    """Linear layers that read the same input. The first one called computes all outputs, the others take their part.

    product: x [..., I] -> the outputs of all layers side by side, [..., sum of O], for callers that want them so.
    """

    def __init__(self, modules: list[nn.Linear]):
        self.modules = modules
        self.product: Callable[[Tensor], Tensor] = self._plain
        self._state, self._forwards = None, []
        self._seen: list[Tensor] = []  # sampled values of each weight
        self.forget()

    def _plain(self, x: Tensor) -> Tensor:
        outputs = [F.linear(x, m.weight, m.bias) for m in self.modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def forget(self) -> None:
        self._input, self._parts = None, ()

    def weights(self) -> list[Tensor]:
        return [m.weight.detach() for m in self.modules]

    def shapes(self) -> tuple:
        return tuple((m.weight.shape, m.weight.dtype, m.bias is None) for m in self.modules)

    def renew(self) -> None:
        """Drop copies of weights whose values have changed."""
        if self._forwards and self._changed():
            self._state = None

    def _changed(self) -> bool:
        """Whether values differ from the last call. PyTorch does not count changes through `weight.data`."""
        with torch.inference_mode():
            now = [weight.detach().flatten()[:: max(1, weight.numel() // SPOTS)] for weight in self._parameters()]
            same = len(now) == len(self._seen) and all(map(torch.equal, now, self._seen))
            self._seen = self._seen if same else [values.clone() for values in now]
        return not same

    def _parameters(self) -> list[nn.Parameter]:
        return [p for m in self.modules for p in m._parameters.values() if p is not None]

    def forwards(self, groups: list[Group]) -> list[Callable[[Tensor], Tensor]]:
        """One forward per module, or none if plain products are as fast, as on up to _COPIES `groups` of these shapes."""
        state = [(p.data_ptr(), p.dtype, 0 if p.is_inference() else p._version) for p in self._parameters()]
        if state != self._state:
            self._changed()
            alike = [other.weights() for other in groups if other.shapes() == self.shapes()]
            self._state, self._forwards = state, self._build(best_kernels(alike[:_COPIES]))
        return self._forwards

    def _build(self, kernels: tuple[int, ...]) -> list[Callable[[Tensor], Tensor]]:
        self.product = self._plain
        if not any(kernels):
            return []
        weights, biases = self.weights(), [None if m.bias is None else m.bias.detach() for m in self.modules]
        if len(weights) == 1:
            self.product = _one_product(weights[0], biases[0], kernels)
            return [self.product]
        self._sizes = [w.shape[0] for w in weights]
        width, most = weights[0].shape[1], len(kernels) - 1
        joint = {OWN: self._plain}  # each of the others keeps a copy of the weights
        weight, bias = torch.cat(weights), None if biases[0] is None else torch.cat(biases)
        if JOINT in kernels:
            joint[JOINT] = functools.partial(F.linear, weight=weight, bias=bias)
        if PACKED in kernels:
            joint[PACKED] = _packed_product(weight, bias)
        one = next(iter(set(kernels))) if len(set(kernels)) == 1 else None

        def product(x: Tensor) -> Tensor:
            return joint[kernels[min(x.numel() // width, most)]](x)

        def first(x: Tensor) -> Tensor:
            kernel = kernels[min(x.numel() // width, most)]
            if kernel == OWN:
                self.forget()
                return F.linear(x, weights[0], biases[0])
            self._input, self._parts = x, joint[kernel](x).split(self._sizes, -1)
            return self._parts[0]

        self.product = product if one is None else joint[one]

        def later(number: int) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                return self._parts[number] if x is self._input else F.linear(x, weights[number], biases[number])

            return forward

        return [first, *(later(number) for number in range(1, len(weights)))]


def prepacked_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """x [..., I] -> x @ weight.T + bias [..., O], on a prepacked copy of `weight` [O, I] if that is possible and faster."""
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    return _one_product(weight, bias, best_kernels([[weight]]) if can_prepack(weight) else (OWN,))


def _one_product(weight: Tensor, bias: Tensor | None, kernels: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """The product of one matrix with the kernels chosen for it; JOINT is the plain product."""
    if PACKED not in kernels:
        return lambda x: F.linear(x, weight, bias)
    packed, width, most = _packed_product(weight, bias), weight.shape[1], len(kernels) - 1
    if set(kernels) == {PACKED}:
        return packed

    def forward(x: Tensor) -> Tensor:
        return packed(x) if kernels[min(x.numel() // width, most)] == PACKED else F.linear(x, weight, bias)

    return forward


def can_prepack(weight: Tensor) -> bool:
    """True for a CPU matrix whose size and dtype have kernels in this PyTorch and on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and weight.numel() >= PREPACK_FROM_WEIGHTS


def _packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    with torch.inference_mode():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, bias, "none", [], "")


def best_kernels(groups: list[list[Tensor]]) -> tuple[int, ...]:
    """Entry r is the fastest of OWN, JOINT and PACKED for r rows, the last entry for all larger counts.

    groups: the weights [O, I] of one or more groups of equal shapes; members of a group share their input. Measured once
    per machine and shape, then read from the user's cache.
    """
    members = groups[0]
    sizes = "+".join(str(w.shape[0]) for w in members)
    key = f"{dtype_name(members[0].dtype)} {sizes}x{members[0].shape[1]}"
    path, kernels = _book(str(machine.cache_folder()))
    if key not in kernels:
        kernels[key] = _measure(groups)
        with contextlib.suppress(SpecdecError):  # else the next process measures again
            runs.write_json(path, {"rows": ROWS, "kernels": kernels})
    measured = kernels[key]
    return tuple(measured[next(i for i, most in enumerate(ROWS) if rows <= most)] for rows in range(ROWS[-1] + 1))


@torch.inference_mode()
def _measure(groups: list[list[Tensor]]) -> list[int]:
    """The fastest kernel for every count of ROWS; a plain product wins ties, because it needs no copy.

    With one thread, whose clock misses no other's work; `specdec.threads` chooses the model's number afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _timed(groups)
    finally:
        torch.set_num_threads(threads)


def _timed(groups: list[list[Tensor]]) -> list[int]:
    frac = min(1.0, _MOST_WEIGHTS / sum(w.numel() for w in groups[0]))
    groups = [[w[: max(1, int(frac * w.shape[0]))] for w in group] for group in groups]
    joined = [torch.cat(group) for group in groups] if len(groups[0]) > 1 else []
    kinds = {OWN: [lambda x, group=group: [F.linear(x, weight) for weight in group] for group in groups]}
    if joined:
        kinds[JOINT] = [functools.partial(F.linear, weight=weight) for weight in joined]
    kinds[PACKED] = [_packed_product(weight, None) for weight in joined or [group[0] for group in groups]]
    best = []
    for rows in ROWS:
        x = torch.ones(1, rows, groups[0][0].shape[1], dtype=groups[0][0].dtype)  # without torch's random generator
        fastest = dict.fromkeys(kinds, float("inf"))
        for _ in range(_REPEATS):  # alternating; in thread time, which other processes hardly affect
            for kind, products in kinds.items():
                begin = time.thread_time()
                for product in products:
                    product(x)
                fastest[kind] = min(fastest[kind], time.thread_time() - begin)
        fastest[OWN] *= _MARGIN
        best.append(min(fastest, key=fastest.get))
    return best


@functools.lru_cache(maxsize=8)
def _book(folder: str) -> tuple[Path, dict[str, list[int]]]:
    """The file of measurements on this machine with this PyTorch, and "float32 768+256+256x512" -> the kernels for ROWS."""
    described = f"{machine.hardware()['cpu']} {machine.hardware()['cpu_flags']} {torch.__version__} one thread {ROWS}"
    path = Path(folder) / f"kernels-{hashlib.sha256(described.encode()).hexdigest()[:12]}.json"
    try:
        return path, runs.read_json(path)["kernels"]
    except (SpecdecError, OSError, KeyError, TypeError, ValueError):
        return path, {}
