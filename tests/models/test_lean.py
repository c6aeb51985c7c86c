"""Fused modules and layers of unmodified models: the same numbers, only where that was seen, and handed back as they were."""

import contextlib

import pytest
import torch
from fakes.families import FAMILIES, build, model_of, random_tree, spread
from fakes.families import tokens as random_tokens
from torch import nn
from transformers.models.llama import modeling_llama as llama

from specdec.models import lean
from specdec.models.lean import names_used_by
from specdec.models.target import Target

F32, BF16 = torch.float32, torch.bfloat16
# Family -> modules of each kind that run lean. Those that are not here have none.
LEAN = {
    "llama": dict(DecoderLayer=4, Attention=4, MLP=4),
    "mistral-window": dict(DecoderLayer=4, Attention=4, MLP=4),
    "qwen2-window": dict(DecoderLayer=4, Attention=4, MLP=4),
    "qwen3": dict(DecoderLayer=4, Attention=4, MLP=4),  # norms of queries and keys
    "gemma3": dict(Attention=8, MLP=8),  # four norms a layer
    "granite": dict(Attention=4, MLP=4),  # multiplies what it adds
    "mixtral": dict(Attention=4),
    "cohere2": dict(MLP=4),  # turns neighbours, not halves: its code mentions nothing unusual, its numbers differ
    "olmo2": dict(MLP=4),  # norms all heads' queries as one
    "gpt-oss": {},  # sinks
    "gpt2": {},
}


def outputs(target: Target) -> list[torch.Tensor]:
    """Logits of a prompt, of a tree after it, and of one more token."""
    tree = random_tree(2)
    with target.inference():
        cache = target.new_cache(64)
        rows = [target.forward(random_tokens(9, seed=1), cache)]
        rows += [target.forward(tree.token, cache, tree.depth, tree.ancestors)]
        cache.keep(9, [9, 10])
        rows += [target.forward(random_tokens(1, seed=3), cache)]
    return [row.logits for row in rows]


def assert_as_without_layers(target: Target, most: float) -> None:
    """The largest error in units of what rounding is allowed."""
    plain = Target(target.model)
    plain._layers._candidates.clear()
    for lean_logits, own in zip(outputs(target), outputs(plain), strict=True):
        assert lean.error_of(lean_logits, own) <= most


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", LEAN)
def test_what_is_recognised_computes_the_same(name, dtype):
    model = model_of(name, dtype)
    target = Target(model)
    assert_as_without_layers(target, 4.0 if dtype == F32 else 1.0)
    names = [type(module).__name__ for module in target._layers._lean]
    found = {kind: sum(one.endswith(kind) for one in names) for kind in ("DecoderLayer", "Attention", "MLP")}
    assert found == dict.fromkeys(found, 0) | LEAN[name] and sum(found.values()) == len(names)
    assert not any("forward" in m.__dict__ for m in model.modules())


@contextlib.contextmanager
def swapped(target: Target):
    """The modules whose layers' replacements run inside an `inference`."""
    with target.inference(), target._lean.active():
        yield {m for m in target._layers._lean if "forward" in m.__dict__}


def test_layers_take_their_parts_along_but_for_hooked_ones_and_changed_weights_are_seen_at_the_next_use():
    model = build(*FAMILIES["llama"])
    target, layers = Target(model), model.model.layers
    with swapped(target) as modules:
        assert modules == set(layers)
    seen = []
    handle = layers[1].mlp.down_proj.register_forward_hook(lambda module, args, output: seen.append(1))
    layers[2].self_attn.forward = own = layers[2].self_attn.forward  # as accelerate does
    # A whole layer's hook is served.
    handle_3 = layers[3].register_forward_hook(lambda module, args, output: seen.append(3))
    with swapped(target) as modules:
        assert modules == {layers[0], layers[1].self_attn, layers[2].mlp, layers[2].self_attn, layers[3]}
        assert layers[2].self_attn.forward is own
        target.forward(random_tokens(3, seed=0), target.new_cache(4))
    assert seen == [1, 3]
    handle.remove(), handle_3.remove()
    del layers[2].self_attn.forward
    with pytest.raises(RuntimeError, match="stop"), swapped(target) as modules:
        assert modules == set(layers)
        raise RuntimeError("stop")
    assert not any("forward" in m.__dict__ for m in model.modules())
    model = build(*FAMILIES["qwen2"])
    target = Target(model)
    outputs(target)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    assert_as_without_layers(target, 4.0)
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 30.0
    assert_as_without_layers(target, 4.0)
    config, sizes = FAMILIES["llama"]
    model = build(config, sizes | dict(hidden_size=36, num_attention_heads=9, num_key_value_heads=3))
    with swapped(Target(model)) as modules:
        assert modules == set(model.model.layers)
    assert names_used_by(model_of("llama").model.layers[0]) == lean.LAYER
    assert "residual_multiplier" in names_used_by(model_of("granite").model.layers[0])

    nested = type("Nested", (nn.Module,), {"forward": lambda self, x: (lambda y: y.clamp(0))(x)})
    assert names_used_by(nested()) == {""}
    target, other = Target(build(*FAMILIES["llama"])), build(*FAMILIES["llama"], seed=1)
    ids = random_tokens(5, seed=2)[None]
    with torch.no_grad():
        expected = other(ids).logits
        with target.inference():
            target.forward(ids[0], target.new_cache(8))
            assert llama.apply_rotary_pos_emb.__module__ == "specdec.models.lean"
            assert torch.equal(other(ids).logits, expected)
    assert llama.apply_rotary_pos_emb.__module__ == llama.__name__


class Clamped(llama.LlamaAttention):  # a limit that nothing in the probe reaches
    def forward(self, hidden_states, *others, **kwargs):
        return super().forward(hidden_states.clamp(-1e4, 1e4), *others, **kwargs)


class Halved(llama.LlamaMLP):  # mentions what others mention and computes something else
    def forward(self, x):
        return 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Extra(llama.LlamaMLP):  # a parameter more
    def __init__(self, config):
        super().__init__(config)
        self.offset = nn.Parameter(torch.zeros(()))


class Broken(llama.LlamaMLP):  # not a number: equal to nothing
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * (1e38 * 1e38 * 0.0)


@pytest.mark.parametrize(
    ("part", "kind", "candidate"),
    [("self_attn", Clamped, False), ("mlp", Extra, False), ("mlp", Halved, True), ("mlp", Broken, True)],
)
def test_anything_else_runs_as_it_is(part, kind, candidate):
    model = build(*FAMILIES["llama"])
    layers, other = model.model.layers, "mlp" if part == "self_attn" else "self_attn"
    given = kind(*((model.config, 1) if part == "self_attn" else (model.config,))).eval()
    spread(given, seed=5)
    setattr(layers[1], part, given)
    target = Target(model)
    assert (given in target._layers._candidates) == candidate
    with target._layers.active():  # nothing is replaced before it was watched
        assert not any("forward" in m.__dict__ for m in model.modules())
    if kind is Broken:
        target._layers._candidates = {given: target._layers._candidates[given]}
        with torch.no_grad(), target._layers.observing():
            given(torch.ones(1, 2, model.config.hidden_size))
        assert not target._layers._lean
        return
    with swapped(target) as modules:
        assert modules == {layers[0], getattr(layers[1], other), layers[2], layers[3]}


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_errors_are_counted_by_row_and_nothing_equals_nan(dtype):
    own = torch.tensor([[1000.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=dtype)
    lean_rows = own.clone()
    assert lean.error_of(lean_rows, own) == 0.0
    lean_rows[0, 1] = 1.5  # small beside its row's largest value in bfloat16
    large = lean.error_of(lean_rows, own)
    assert (large > 1.0) == (dtype == F32)
    lean_rows[1, 1] = 1.5
    assert lean.error_of(lean_rows, own) > max(1.0, large)
    for other in (own[:2], own.double(), own.clone().fill_(float("nan"))):
        assert lean.error_of(other, own) == float("inf")
