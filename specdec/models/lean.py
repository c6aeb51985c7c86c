"""Runs norms and rotary embeddings of an unmodified model with PyTorch's fused functions, while the model is in use.

Two operations are recognised by what they do, not by family: RMS normalisation, and the rotary embedding of queries and
keys. When the model is probed, each replacement runs beside the original code on the model's own tensors; it is used only
where both agree. Everything else is unchanged, and the model is restored afterwards.

Knows nothing about trees, caches or linear layers (those are in `prepacked.py`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.exclusive import process_lock
from specdec.models.families import setting
from specdec.models.tree_attention import active_mask

ROTARY = "apply_rotary_pos_emb"  # the name in transformers' model files
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest value


class LeanModules:
    """The replacements validated for one model. Nothing is replaced before `observing` has watched a forward."""

    def __init__(self, model: nn.Module):
        epsilons = ((module, _epsilon_of(module)) for module in model.modules())
        self._norms = {module: epsilon for module, epsilon in epsilons if epsilon is not None}
        files = {sys.modules.get(type(m).__module__) for m in model.modules()} - {None}
        self._files = [file for file in files if callable(vars(file).get(ROTARY))]
        self._lean_norms: list[tuple[nn.Module, Callable]] = []  # with its replacement from NORMS
        self._lean_files: list = []

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Watch one forward: compares each candidate's output with its replacement's.

        The caller holds `process_lock`, so that no other thread patches or restores a model file meanwhile.
        """
        here = threading.get_ident()
        errors: dict[tuple, float] = {}  # (module, form) or (file,) -> largest error, in roundings of the dtype

        def note(key: tuple, lean: Tensor | None, own: Tensor) -> None:
            error = float("inf") if lean is None else error_of(lean, own)
            errors[key] = max(errors.get(key, 0.0), error)

        def after_norm(module: nn.Module, args, output) -> None:
            for form in NORMS:
                note((module, form), tried(form, module, self._norms[module], *args), output)

        def compared(file, own: Callable) -> Callable:
            def apply(*args, **kwargs):
                outputs = own(*args, **kwargs)
                if threading.get_ident() != here:
                    return outputs
                lean = tried(rotate_both, args, kwargs) if isinstance(outputs, tuple) and len(outputs) == 2 else None
                for rotated, output in zip(lean or (None,), outputs, strict=False):
                    note((file,), rotated, output)
                return outputs

            return apply

        handles = [norm.register_forward_hook(after_norm) for norm in self._norms]
        found = [(file, vars(file)[ROTARY]) for file in self._files]  # lean if another thread's model is in use
        try:
            for file, function in found:
                vars(file)[ROTARY] = compared(file, _in_use.get(id(file), [0, function])[1])
            yield
        finally:
            for file, function in found:
                vars(file)[ROTARY] = function
            for handle in handles:
                handle.remove()
        best = [(norm, min(NORMS, key=lambda form: errors.get((norm, form), 2.0))) for norm in self._norms]
        self._lean_norms = [(norm, form) for norm, form in best if errors.get((norm, form), 2.0) <= 1.0]
        self._lean_files = [file for file in self._files if errors.get((file,), 2.0) <= 1.0]

    def norm(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """A norm's replacement, or the module itself."""
        form = next((form for norm, form in self._lean_norms if norm is module), None)
        return module if form is None else functools.partial(form, module, self._norms[module])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the replacements run."""
        swapped = []
        try:
            for norm, form in self._lean_norms:
                if "forward" not in norm.__dict__ and not norm._forward_hooks:
                    swapped.append(norm)
                    norm.__dict__["forward"] = functools.partial(form, norm, self._norms[norm])
            with contextlib.ExitStack() as files:
                for file in self._lean_files:
                    files.enter_context(lean_rotary(file))
                yield
        finally:
            for norm in swapped:
                norm.__dict__.pop("forward", None)


def tried(function: Callable, *args, **kwargs):
    """The result of a recogniser or replacement; None if it fails on such a module, which then runs unchanged."""
    try:
        return function(*args, **kwargs)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  foreign modules may lack anything
        return None


def error_of(lean: Tensor, own: Tensor) -> float:
    """The largest difference in units of TOLERANCE times the largest value of its row; infinite if they cannot be compared."""
    if lean.shape != own.shape or lean.dtype != own.dtype or own.dtype not in TOLERANCE:
        return float("inf")
    allowed = TOLERANCE[own.dtype] * own.float().abs().amax(-1)
    error = ((lean.float() - own.float()).abs().amax(-1) / allowed.clamp_min(torch.finfo(torch.float32).tiny)).max()
    return float(error.nan_to_num(nan=float("inf")))


def _epsilon_of(module: nn.Module) -> float | None:
    """The epsilon of a possible RMS norm: one weight vector, an epsilon, nothing else."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or module.weight.ndim != 1 or next(module.children(), None) is not None:
        return None
    epsilon = setting(module, "variance_epsilon", setting(module, "eps"))
    return epsilon if isinstance(epsilon, float) else None


def norm_rounded_once(module: nn.Module, epsilon: float, x: Tensor) -> Tensor:
    """x / rms(x) * weight in float32, then rounded. [..., H] -> [..., H]."""
    return F.rms_norm(x, module.weight.shape, module.weight, epsilon)


def norm_rounded_twice(module: nn.Module, epsilon: float, x: Tensor) -> Tensor:
    """x / rms(x), rounded, times weight, rounded: the same numbers in float32, others in bfloat16. [..., H] -> [..., H]."""
    return F.rms_norm(x, module.weight.shape, None, epsilon) * module.weight


NORMS = (norm_rounded_once, norm_rounded_twice)  # families round differently; the closer one is used


_in_use: dict[int, list] = {}  # id of a model file -> [how many targets use it, its own function]


@contextlib.contextmanager
def lean_rotary(file) -> Iterator[None]:
    """Let a model file's rotary embedding run lean inside our own forwards; other users of the file get the original."""
    with process_lock():
        entry = _in_use.setdefault(id(file), [0, vars(file)[ROTARY]])
        entry[0] += 1
        if entry[0] == 1:
            vars(file)[ROTARY] = _lean_or(entry[1])
    try:
        yield
    finally:
        with process_lock():
            entry[0] -= 1
            if entry[0] == 0:
                vars(file)[ROTARY] = entry[1]
                del _in_use[id(file)]


def _lean_or(own: Callable) -> Callable:
    def apply(*args, **kwargs):
        lean = rotate_both(args, kwargs)
        return own(*args, **kwargs) if lean is None else lean

    return apply


def rotate_both(args: tuple, kwargs: dict) -> tuple[Tensor, Tensor] | None:
    """Queries and keys [B, heads, T, D] rotated by cos, sin [B, T, D]; None for any other call, and outside our forwards."""
    tables = None if kwargs or len(args) != 4 else rotary_tables(args[2:], args[0].shape[-1])
    if tables is None:
        return None
    cos, sin = (table.transpose(1, 2) for table in tables)
    return apply_rotary(args[0], cos, sin), apply_rotary(args[1], cos, sin)


def rotary_tables(cos_and_sin: tuple[Tensor, Tensor] | None, width: int) -> tuple[Tensor, Tensor] | None:
    """For `apply_rotary`, [B, T, 1, D], made once per forward; None outside our forwards or unless all D = width values rotate."""
    state = active_mask()
    if state is None or cos_and_sin is None:
        return None
    cos, sin = cos_and_sin
    if cos.ndim != 3 or cos.shape[-1] != width:
        return None
    if state.rotary is None or state.rotary[0] is not cos:
        half = width // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        state.rotary = (cos, (cos[:, :, None], signed[:, :, None]))
    return state.rotary[1]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] rotated by its tables. rotate_half(x) * sin is x with its halves swapped, times sin with its first half negated;
    rounded as in transformers."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))
