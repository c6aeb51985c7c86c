"""Runs parts of an unmodified model with PyTorch's fused functions and as a few products each, while the model is in use.

RMS norms and the rotary embedding of queries and keys are recognised by what they do (`LeanModules`); attention modules, gated
MLPs and decoder layers by their parts and by the names in their code (`LeanLayers`): with any further name (a clamp, a
multiplier, a position-dependent scale) they run unchanged. A forward over a few tokens is mostly call overhead, not arithmetic.
When the model is probed, each replacement runs beside the original code on the model's own tensors; it is used only where
both agree. Everything else is unchanged, and the model is restored afterwards.

Knows no family, tree, cache or kernel: products are in `prepacked.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.exclusive import process_lock
from specdec.models.families import cache_keyword, setting
from specdec.models.prepacked import Group, PrepackedLinears, is_plain_linear, replaced
from specdec.models.tree_attention import active_mask, tree_attention

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
        own = ((n, form) for n, form in self._lean_norms if "forward" not in n.__dict__ and not n._forward_hooks)
        norms = ((norm, functools.partial(form, norm, self._norms[norm])) for norm, form in own)
        with replaced(norms), contextlib.ExitStack() as files:
            for file in self._lean_files:
                files.enter_context(lean_rotary(file))
            yield


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
            vars(file)[ROTARY] = lambda *args, **kwargs: rotate_both(args, kwargs) or entry[1](*args, **kwargs)
    try:
        yield
    finally:
        with process_lock():
            entry[0] -= 1
            if entry[0] == 0:
                vars(file)[ROTARY] = entry[1]
                del _in_use[id(file)]


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


PROJECTIONS, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = (  # names allowed in the code of an attention module
    PROJECTIONS
    | HEAD_NORMS
    | set("ALL_ATTENTION_FUNCTIONS get_interface eager_attention_forward _attn_implementation config getattr".split())
    | set("apply_rotary_pos_emb update layer_idx head_dim scaling sliding_window attention_dropout training".split())
    | set("shape view reshape transpose contiguous".split())
)


class LeanLayers:
    """The modules validated for one model. Nothing is replaced before `observing` has watched a forward."""

    def __init__(self, model: nn.Module, linears: PrepackedLinears, modules: LeanModules):
        self._linears, self._modules = linears, modules
        self._noted: dict[nn.Module, dict] = {}  # what an attention module passes on besides queries, keys and values
        kinds = ((is_layer, _layer), (is_attention, _attention), (is_gated_mlp, _gated_mlp))  # a layer before its parts
        self._candidates = {m: build for fits, build in kinds for m in model.modules() if tried(fits, m)}
        self._lean: dict[nn.Module, Callable] = {}

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Watch one forward: compares each candidate's output with its replacement's."""
        plain = Group, lambda norm: functools.partial(type(norm).forward, norm), self._noted
        trials = {module: build(module, *plain) for module, build in self._candidates.items()}
        errors: dict[nn.Module, float] = {}
        caches: dict[nn.Module, _OwnCopy] = {}

        def before(module, args, kwargs) -> None:
            cache = kwargs.get(cache_keyword(type(module)))
            if (state := active_mask()) is not None and cache is not None:
                state.noted = self._noted
                caches[module] = tried(
                    _OwnCopy, cache, dict(module.named_children()).get("self_attn", module).layer_idx
                )

        def after(module, args, kwargs, output) -> None:
            if module in caches:
                kwargs = {**kwargs, cache_keyword(type(module)): caches.pop(module)}
            lean = tried(trials[module], *args, **kwargs)
            same = lean is not None and type(lean) is type(output)
            error = error_of(*(x[0] if isinstance(x, tuple) else x for x in (lean, output))) if same else float("inf")
            errors[module] = max(errors.get(module, 0.0), error)

        with contextlib.ExitStack() as handles:
            for module in trials:
                handles.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.enter_context(module.register_forward_hook(after, with_kwargs=True))
            yield
        lean = self._linears.group_of, self._modules.norm, self._noted
        shown = {m: build for m, build in self._candidates.items() if errors.get(m, 2.0) <= 1.0}
        self._lean = {module: build(module, *lean) for module, build in shown.items()}

    def active(self) -> AbstractContextManager[None]:
        """Inside, the replacements run. Modules that others hooked or replaced run unchanged, so enter this context first."""
        return replaced(self._untouched())

    def _untouched(self) -> Iterator[tuple[nn.Module, Callable]]:
        inside: set[nn.Module] = set()
        for module, forward in self._lean.items():
            if module not in inside and is_untouched(module):
                yield module, forward
                inside.update(module.children())


class _OwnCopy:
    """A copy of one layer's keys and values, for a second run of the same rows."""

    def __init__(self, cache, index: int):
        self.rows = copy.deepcopy(cache.layers[index])

    def update(self, keys: Tensor, values: Tensor, *others, **kwargs) -> tuple[Tensor, Tensor]:
        return self.rows.update(keys, values)  # a copy needs neither the layer's number nor other arguments


def is_attention(module: nn.Module) -> bool:
    """Four projections, optionally a norm over every head's queries and keys, a rotary embedding, nothing else."""
    parts = PROJECTIONS | HEAD_NORMS if "q_norm" in dict(module.named_children()) else PROJECTIONS
    known = ATTENTION >= names_used_by(module) >= parts | {"apply_rotary_pos_emb"}
    if not (known and consists_of(module, parts, PROJECTIONS)):
        return False
    width = module.head_dim
    norms = [module.get_submodule(name).weight.shape for name in parts & HEAD_NORMS]
    features = [module.get_submodule(name).out_features for name in PROJECTIONS - {"o_proj"}]
    return all(shape == (width,) for shape in norms) and all(size % width == 0 for size in features)


def is_gated_mlp(module: nn.Module) -> bool:
    """act(gate(x)) * up(x), projected down."""
    linears = GATED_MLP - {"act_fn"}
    activated = isinstance(setting(module, "act_fn"), nn.Module)
    return consists_of(module, GATED_MLP if activated else linears, linears) and names_used_by(module) == GATED_MLP


def is_layer(module: nn.Module) -> bool:
    """x + attention(norm(x)), then the same with the MLP."""
    known = consists_of(module, LAYER, set()) and names_used_by(module) == LAYER
    return known and is_attention(module.self_attn) and is_gated_mlp(module.mlp)


def consists_of(module: nn.Module, parts: set[str], linears: set[str]) -> bool:
    """Exactly these children, some of them plain linear layers, and no parameters of its own."""
    children = dict(module.named_children())
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return set(children) == parts and not own and all(is_plain_linear(children[name]) for name in linears)


def names_used_by(module: nn.Module) -> set[str]:
    """The names in the code of a module's forward; an impossible name if it stores functions of its own."""
    code = setting(inspect.unwrap(type(module).forward), "__code__")
    simple = code is not None and not any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    return set(code.co_names) if simple else {""}


def is_untouched(module: nn.Module) -> bool:
    """Whether the module is not replaced, nor anything inside it hooked or replaced."""
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module)
    return not hooked and not any("forward" in m.__dict__ for m in module.modules())


# The building blocks of a replacement are functions for products of layers with one input (`Group`) and for norms, and what
# attention modules pass on.
def _attention(module: nn.Module, group: Callable, norm_of: Callable, noted: dict) -> Callable:
    projections, out = group([module.q_proj, module.k_proj, module.v_proj]), group([module.o_proj])
    norms = [norm_of(part) for name, part in module.named_children() if name in HEAD_NORMS]
    width, keyword = module.head_dim, cache_keyword(type(module))
    q_heads, kv_heads = (layer.out_features // width for layer in (module.q_proj, module.k_proj))

    def forward(hidden_states: Tensor, *others, position_embeddings=None, **kwargs):
        cache = kwargs.get(keyword)
        tables = None if others or cache is None else rotary_tables(position_embeddings, width)
        if tables is None or module not in noted:
            passed = dict(position_embeddings=position_embeddings, **kwargs)
            return type(module).forward(module, hidden_states, *others, **passed)
        heads = projections.product(hidden_states).unflatten(-1, (-1, width))  # [B, T, heads + 2 kv heads, D]
        turned, values = heads.split((q_heads + kv_heads, kv_heads), 2)
        if norms:
            parts = turned.split((q_heads, kv_heads), 2)
            turned = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], 2)
        turned = apply_rotary(turned, *tables).transpose(1, 2)
        keys, values = cache.update(turned[:, q_heads:], values.transpose(1, 2), module.layer_idx)
        attended, weights = tree_attention(module, turned[:, :q_heads], keys, values, **noted[module])
        return out.product(attended.flatten(2)), weights

    return forward


def _gated_mlp(module: nn.Module, group: Callable, *_) -> Callable:
    gate_and_up, down = group([module.gate_proj, module.up_proj]), group([module.down_proj])
    activate = setting(module.act_fn, "forward", module.act_fn)
    sizes = module.gate_proj.out_features, module.up_proj.out_features

    def forward(hidden_states: Tensor) -> Tensor:
        gate, up = gate_and_up.product(hidden_states).split(sizes, -1)
        return down.product(activate(gate).mul_(up))

    return forward


def _layer(module: nn.Module, group: Callable, norm_of: Callable, noted: dict) -> Callable:
    attention, mlp = _attention(module.self_attn, group, norm_of, noted), _gated_mlp(module.mlp, group)
    before_attention, before_mlp = (norm_of(m) for m in (module.input_layernorm, module.post_attention_layernorm))

    def forward(hidden_states: Tensor, *others, **kwargs) -> Tensor:
        if others:
            return type(module).forward(module, hidden_states, *others, **kwargs)
        hidden = attention(before_attention(hidden_states), **kwargs)[0].add_(hidden_states)
        return mlp(before_mlp(hidden)).add_(hidden)

    return forward
