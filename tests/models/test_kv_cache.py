"""The caches: rows in place, paths kept, tails dropped, overflow refused; sequences on borrowed pages say what they say alone."""

import inspect

import pytest
import torch
from fakes.families import model_of
from fakes.families import tokens as random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from specdec.core.decode import drive
from specdec.core.protocols import finish
from specdec.models.families import cache_keyword
from specdec.models.kv_cache import RowLayer, TreeCache


def block(rows, layer=0):
    """Keys and values [1, 2, T, 3] and [1, 2, T, 5] that name their row and layer."""
    rows = torch.as_tensor(rows, dtype=torch.float32)[None, None, :, None]
    keys = (rows + 1000 * layer).expand(1, 2, -1, 3)
    return keys.clone(), -keys[..., :1].expand(-1, -1, -1, 5).clone()


def grow(cache: TreeCache, rows) -> TreeCache:
    for index in range(2):
        cache.update(*block(rows, index), index)
    return cache


def filled(rows, capacity=12) -> TreeCache:
    return grow(TreeCache(2, capacity), rows)


def names(cache: TreeCache) -> list[int]:
    """The row names a cache holds, checked to agree over layers, heads, keys and values."""
    held = cache.layers[0].keys[0, 0, : len(cache), 0].tolist() if len(cache) else []
    for index, layer in enumerate(cache.layers):
        keys, values = block(held, index)
        for stored, expected in ((layer.keys, keys), (layer.values, values)):
            assert torch.equal(stored[:, :, : layer.rows], expected)
    return [int(name) for name in held]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.lists(st.booleans(), min_size=0, max_size=6))
def test_keeping_a_path_is_list_indexing(start, chosen):
    total = start + len(chosen)
    cache = filled(range(total), capacity=max(1, total))
    rows = [start + number for number, wanted in enumerate(chosen) if wanted]
    if total:
        cache.keep(start, rows)
        assert names(cache) == list(range(start)) + rows


def test_rows_that_make_no_path_are_refused_and_nothing_moves():
    cache, wrong = (
        filled(range(8)),
        ((3, [2]), (3, [4, 4]), (3, [5, 4]), (3, [3, 8]), (3, [8]), (9, []), (-1, [0])),
    )
    for start, rows in (*wrong, (3, [-1])):
        pytest.raises(AssertionError, cache.keep, start, rows).match("cannot keep rows")
        assert names(cache) == list(range(8))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "gpt-oss"])
def test_transformers_takes_it_as_a_cache(name):
    model, prompt = model_of(name), random_tokens(15, seed=1)
    cache = TreeCache(model.config.num_hidden_layers, 32)
    assert isinstance(cache.layers[0], RowLayer)
    with torch.no_grad():
        whole = model(prompt[None], use_cache=False).logits[0]
        given = {cache_keyword(type(model)): cache, "use_cache": True}
        parts = [model(part[None], **given).logits[0] for part in prompt.split([9, 5, 1])]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
    cache.reset()
    text = model.generate(prompt[None], past_key_values=cache, do_sample=False, max_new_tokens=8)
    assert torch.equal(text, model.generate(prompt[None], do_sample=False, max_new_tokens=8))


def test_a_cache_goes_by_the_name_that_a_forward_has_for_it():
    before = type("Before", (), {"forward": lambda self, input_ids, past_key_values=None: None})
    now = type("Now", (), {"forward": lambda self, input_ids, cache=None, **kwargs: None})
    assert (cache_keyword(before), cache_keyword(now)) == ("past_key_values", "cache")
    assert cache_keyword(LlamaForCausalLM) in inspect.signature(LlamaForCausalLM.forward).parameters


def prompts(vocabulary, lengths):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


def assert_same_alone(target, asked, new_tok, places, rows):
    """Texts of prompts whose caches come from `places`, so many in one forward, are those of each prompt alone."""
    alone = [finish(text(target, target, prompt, new_tok)) for prompt in asked]
    several = (
        text(target, place, prompt, new_tok) for place, prompt in zip(places, asked, strict=True)
    )
    together = dict(drive(several, rows))
    for number, (logits, ids) in enumerate(alone):
        assert together[number][1] == ids
        torch.testing.assert_close(together[number][0], logits, rtol=1e-4, atol=1e-4)
