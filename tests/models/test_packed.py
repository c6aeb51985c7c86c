"""Packed weights are the only copy: the same texts, the same state dict, and no quiet changes."""

import copy

import pytest
import torch
from fakes.families import FAMILIES, build, tokens

import specdec
from specdec.errors import SpecdecError
from specdec.models.fingerprint import describe_pair
from specdec.models.packed import pack


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


def test_texts_and_fingerprint_stay_and_changes_are_refused():
    pair = specdec.load_pair("tiny", dtype="float32")
    described = describe_pair(pair)
    text = specdec.decode(pair, "Good morning.", max_new_tokens=24).tokens
    model = pair.target.model
    pack(model)
    assert specdec.decode(pair, "Good morning.", max_new_tokens=24).tokens == text
    assert describe_pair(pair) == described
    model.to(torch.float32)
    for change in (lambda: model.bfloat16(), lambda: model.load_state_dict(model.state_dict())):
        pytest.raises(SpecdecError, change).match("packed")
