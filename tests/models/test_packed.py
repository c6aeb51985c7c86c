"""Packed weights are the only copy: the same texts and state dict; changes are not missed."""

import copy
import pickle

import pytest
import torch
from fakes.families import FAMILIES, build, tokens
from torch import nn

import specdec
from specdec.models.packed import pack
from specdec.models.pairs import describe_pair

PROMPT = list(range(5, 25))
SETTINGS = {"max_new_tokens": 16, "stop_tokens": ()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-window", "mistral-window", "phi3"])
def test_a_packed_model_gives_the_same_logits_and_state(name, dtype):
    model = build(*FAMILIES[name]).to(dtype)
    packed = copy.deepcopy(model)
    pack(packed)
    ids = tokens(20, seed=3)[None]
    with torch.no_grad():
        expected = model(ids).logits.float()
        for implementation in ("eager", "sdpa"):
            packed.set_attn_implementation(implementation)
            error = (packed(ids).logits.float() - expected).square().mean().sqrt()
            assert error < (1e-4 if dtype == torch.float32 else 0.05) * expected.std()
    before = model.state_dict()
    after = packed.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_packing_twice_changes_nothing_and_a_pair_survives_a_pickle_and_a_cast():
    pair = specdec.load_pair("tiny", dtype="float32")
    described = describe_pair(pair)
    text = specdec.decode(pair, "Good morning.", max_new_tokens=24).tokens
    model = pair.target.model
    pack(model)
    assert specdec.decode(pair, "Good morning.", max_new_tokens=24).tokens == text
    assert describe_pair(pair) == described
    restored = pickle.loads(pickle.dumps(pair))
    assert specdec.decode(restored, "Good morning.", max_new_tokens=24).tokens == text
    model.double()
    assert model.lm_head.weight.dtype == torch.float64
    assert model.float().lm_head.weight.dtype == torch.float32
    assert specdec.decode(pair, "Good morning.", max_new_tokens=24).tokens == text


def test_another_default_dtype_changes_nothing():
    pair = specdec.load_pair("tiny", dtype="float32")
    results = describe_pair(pair), specdec.decode(pair, PROMPT, temperature=1.0, **SETTINGS).tokens
    torch.set_default_dtype(torch.float64)
    try:
        for used in (pair, specdec.load_pair("tiny", dtype="float32")):
            tokens = specdec.decode(used, PROMPT, temperature=1.0, **SETTINGS).tokens
            assert (describe_pair(used), tokens) == results
    finally:
        torch.set_default_dtype(torch.float32)


class Adapter(nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(3)
        self.layer = layer
        self.down = nn.Parameter(torch.randn(layer.out_features, layer.in_features) * 0.2)

    def forward(self, x):
        return self.layer(x) + x @ self.down.T


def adapted(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)


def normed(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 30.0


def hooked(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: output * 1.5)


def embedded(model):
    words = copy.deepcopy(model.get_input_embeddings())
    noise = torch.randn(words.weight.shape, generator=torch.Generator().manual_seed(2))
    words.weight.add_(noise * words.weight.std())
    model.set_input_embeddings(words)


def edited(model):
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.weight.data[::7] *= -2


def rows_edited(model):
    model.get_output_embeddings().weight.data[:200] *= -1


def words_edited(model):
    model.get_input_embeddings().weight.mul_(-1)


def loaded(model):
    weights = model.state_dict()
    model.load_state_dict({name: -weight for name, weight in weights.items()})


def resized(model):
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.get_output_embeddings().weight[:200] *= -1


CHANGES = [adapted, normed, hooked, embedded, edited, rows_edited, words_edited, loaded, resized]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_loading_changes_the_text(change, packed):
    pair = specdec.load_pair("tiny", drafter="suffix", dtype="float32", pack=packed)
    before = specdec.autoregress(pair, PROMPT, **SETTINGS).tokens
    model = pair.target.model
    with torch.no_grad():
        change(model)
    ids = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    text = ids[0, len(PROMPT) :].tolist()
    assert text != before
    assert specdec.decode(pair, PROMPT, specdec.Static(12, 3, 4), **SETTINGS).tokens == text
    prompts = [PROMPT, PROMPT[:7]]
    many = specdec.decode_many(pair, prompts, specdec.Static(6, 2, 2), **SETTINGS)
    assert many[0].tokens == text


def test_a_part_of_a_state_dict_is_loaded_and_the_rest_is_reported():
    model = specdec.load_pair("tiny", dtype="float32").target.model
    whole = model.state_dict()
    name = "model.layers.1.self_attn.k_proj.weight"
    part = {name: -whole[name]}
    keys = model.load_state_dict({**part, f"{name}s": part[name]}, strict=False, assign=True)
    assert set(keys.missing_keys) == whole.keys() - {name}
    assert keys.unexpected_keys == [f"{name}s"]
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, -whole[key] if key == name else whole[key])
    with pytest.raises(specdec.SpecdecError, match="pack=False"):
        model.lm_head.weight = nn.Parameter(whole["lm_head.weight"])
    bad = {name: whole[name][:1]}
    pytest.raises(RuntimeError, model.load_state_dict, bad, strict=False).match("size mismatch")


def rotate_wrongly(query, key, cos, sin):
    return query * sin[:, None], -key


def half(self, x):
    return x / 2


PATCHES = [("apply_rotary_pos_emb", rotate_wrongly), ("LlamaMLP.forward", half)]


@pytest.mark.parametrize("name, patch", PATCHES)
def test_a_family_that_is_patched_after_loading_runs_patched(name, patch, monkeypatch):
    pair = specdec.load_pair("tiny", drafter="suffix", dtype="float32")
    before = specdec.autoregress(pair, PROMPT, **SETTINGS).tokens
    monkeypatch.setattr(f"transformers.models.llama.modeling_llama.{name}", patch)
    plain = specdec.load_pair("tiny", drafter="suffix", dtype="float32", pack=False)
    text = specdec.autoregress(plain, PROMPT, **SETTINGS).tokens
    assert text != before
    assert specdec.autoregress(pair, PROMPT, **SETTINGS).tokens == text


def test_hooks_on_all_modules_run():
    pair = specdec.load_pair("tiny", drafter="suffix", dtype="float32")
    calls = []
    hook = torch.nn.modules.module.register_module_forward_hook
    handle = hook(lambda module, args, output: calls.append(type(module).__name__))
    specdec.autoregress(pair, PROMPT, max_new_tokens=1, stop_tokens=())
    handle.remove()
    layers = pair.target.num_layers
    assert calls.count("PackedLinear") % (7 * layers + 1) == 0 < len(calls)
