"""Small modules of an unmodified model through PyTorch's fused functions, while the model is in use.

Two things are recognised by what they do, not by family: normalisation by the root mean square, and the rotary embedding of
queries and keys. Each is run beside its own code on the model's own tensors when the model is probed, and is replaced
only where both agree. Everything else runs as it is, and the model is handed back as it was.

Knows nothing about trees, caches or linear layers (those are in `prepacked.py`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.tree_attention import active_mask

ROTARY = "apply_rotary_pos_emb"  # what transformers' model files call it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest value; one rounding


class LeanModules:
    """The replacements that one model has been shown to allow. Nothing is replaced before `observing` has watched a forward."""

    def __init__(self, model: nn.Module):
        self._norms = [m for m in model.modules() if _epsilon_of(m) is not None]
        files = {sys.modules.get(type(m).__module__) for m in model.modules()} - {None}
        self._files = [file for file in files if callable(getattr(file, ROTARY, None))]
        self._equal_norms: list[nn.Module] = []
        self._equal_files: list = []

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Watch one forward inside: what every candidate gives is compared with what its replacement would give."""
        verdicts: dict[int, bool] = {}

        def note(candidate, agrees: bool) -> None:
            verdicts[id(candidate)] = verdicts.get(id(candidate), True) and agrees

        def after_norm(module: nn.Module, args, output) -> None:
            note(module, len(args) == 1 and agree(_norm(module)(args[0]), output))

        def compared(file, own: Callable) -> Callable:
            def apply(*args, **kwargs):
                outputs = own(*args, **kwargs)
                lean = rotate_both(args, kwargs)
                note(file, lean is not None and all(map(agree, lean, outputs)))
                return outputs

            return apply

        handles = [norm.register_forward_hook(after_norm) for norm in self._norms]
        own_functions = [(file, getattr(file, ROTARY)) for file in self._files]
        try:
            for file, own in own_functions:
                setattr(file, ROTARY, compared(file, own))
            yield
        finally:
            for file, own in own_functions:
                setattr(file, ROTARY, own)
            for handle in handles:
                handle.remove()
        self._equal_norms = [norm for norm in self._norms if verdicts.get(id(norm))]
        self._equal_files = [file for file in self._files if verdicts.get(id(file))]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the replacements run."""
        swapped = []
        try:
            for norm in self._equal_norms:
                if "forward" not in norm.__dict__ and not norm._forward_hooks:
                    norm.forward = _norm(norm)
                    swapped.append(norm)
            with contextlib.ExitStack() as files:
                for file in self._equal_files:
                    files.enter_context(lean_rotary(file))
                yield
        finally:
            for norm in swapped:
                del norm.forward


def agree(lean: Tensor, own: Tensor) -> bool:
    """Whether both are the same up to the rounding of their dtype, measured at the largest value."""
    if lean.shape != own.shape or lean.dtype != own.dtype:
        return False
    error = (lean.float() - own.float()).abs().max()
    return bool(error <= TOLERANCE.get(own.dtype, 0.0) * own.float().abs().max())


def _epsilon_of(module: nn.Module) -> float | None:
    """The epsilon of what may be a normalisation by the root mean square: one weight vector, an epsilon, nothing else."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or module.weight.ndim != 1 or next(module.children(), None) is not None:
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    shape, epsilon = module.weight.shape, _epsilon_of(module)

    def forward(x: Tensor) -> Tensor:  # [..., H] -> [..., H]
        return F.rms_norm(x, shape, module.weight, epsilon)

    return forward


# ---- the rotary embedding ------------------------------------------------------------------------------------------------

_in_use: dict[int, list] = {}  # id of a model file -> [how many targets use it, its own function]
_in_use_lock = threading.Lock()


@contextlib.contextmanager
def lean_rotary(file) -> Iterator[None]:
    """Let a model file's rotary embedding run lean inside our own forwards; other users of the file get its own function."""
    with _in_use_lock:
        entry = _in_use.setdefault(id(file), [0, getattr(file, ROTARY)])
        entry[0] += 1
        if entry[0] == 1:
            setattr(file, ROTARY, _lean_or(entry[1]))
    try:
        yield
    finally:
        with _in_use_lock:
            entry[0] -= 1
            if entry[0] == 0:
                setattr(file, ROTARY, entry[1])
                del _in_use[id(file)]


def _lean_or(own: Callable) -> Callable:
    def apply(*args, **kwargs):
        lean = rotate_both(args, kwargs) if active_mask() is not None else None
        return own(*args, **kwargs) if lean is None else lean

    return apply


def rotate_both(args: tuple, kwargs: dict) -> tuple[Tensor, Tensor] | None:
    """Queries and keys [B, heads, T, D] rotated by cos, sin [B, T, D]; None for any other call.

    rotate_half(x) * sin is x with its halves swapped, times sin with its first half negated.
    """
    if kwargs or len(args) != 4 or args[2].ndim != 3 or args[2].shape[-1] != args[0].shape[-1]:
        return None
    queries, keys, cos, sin = args
    state = active_mask()
    if state is None or state.rotary is None or state.rotary[0] is not cos:
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        tables = (cos, cos[:, None], signed[:, None])
        if state is not None:
            state.rotary = tables
    else:
        tables = state.rotary
    return tuple((x * tables[1]).addcmul_(x.roll(x.shape[-1] // 2, -1), tables[2]) for x in (queries, keys))
