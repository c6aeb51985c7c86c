"""Caches: rows in place, paths, dropped tails, overflow. Several at once: core/test_together."""

import pytest
import torch
from fakes.families import model_of
from fakes.families import tokens as random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.models.kv_cache import TreeCache
from specdec.models.target import cache_keyword


def block(rows, layer=0):
    """Keys and values [1, 2, T, 3] and [1, 2, T, 5] that name their row and layer."""
    rows = torch.as_tensor(rows, dtype=torch.float32)[None, None, :, None]
    keys = (rows + 1000 * layer).expand(1, 2, -1, 3)
    return keys.clone(), -keys[..., :1].expand(-1, -1, -1, 5).clone()


def filled(rows, capacity=12) -> TreeCache:
    cache = TreeCache(2, capacity)
    for index in range(2):
        cache.update(*block(rows, index), index)
    return cache


def names(cache: TreeCache) -> list[int]:
    """The row names a cache holds, checked to agree over layers, heads, keys and values."""
    held = cache.layers[0].keys[0, 0, : len(cache), 0].tolist() if len(cache) else []
    for index, layer in enumerate(cache.layers):
        keys, values = block(held, index)
        for stored, expected in ((layer.keys, keys), (layer.values, values)):
            assert torch.equal(stored[:, :, : layer.rows], expected)
    return [int(name) for name in held]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.lists(st.booleans(), min_size=0, max_size=6))
def test_keeping_a_path_is_list_indexing(start, chosen):
    total = start + len(chosen)
    cache = filled(range(total), capacity=max(1, total))
    rows = [start + number for number, accepted in enumerate(chosen) if accepted]
    if total:
        cache.keep(start, rows)
        assert names(cache) == list(range(start)) + rows


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "gpt-oss"])
def test_transformers_takes_it_as_a_cache(name):
    model, prompt = model_of(name), random_tokens(15, seed=1)
    cache = TreeCache(model.config.num_hidden_layers, 32)
    with torch.no_grad():
        whole = model(prompt[None], use_cache=False).logits[0]
        arguments = {cache_keyword(type(model)): cache, "use_cache": True}
        parts = [model(part[None], **arguments).logits[0] for part in prompt.split([9, 5, 1])]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
    cache.reset()
    text = model.generate(prompt[None], past_key_values=cache, do_sample=False, max_new_tokens=8)
    assert torch.equal(text, model.generate(prompt[None], do_sample=False, max_new_tokens=8))


def test_rows_are_written_in_place_and_an_overflow_is_refused_before_that():
    cache = filled(range(4))
    memory = cache.layers[0].keys.data_ptr()
    keys, values = cache.update(*block([4, 5]), 0)
    assert keys.shape == (1, 2, 6, 3) and values.shape == (1, 2, 6, 5)
    assert keys.data_ptr() == memory
    assert cache.get_seq_length() == len(cache) == 6
    assert cache.get_mask_sizes(3, 0) == (9, 0)
    cache = filled(range(10))
    pytest.raises(AssertionError, cache.update, *block([7, 8, 9]), 0).match("made for 12")
    cache.truncate(8)
    cache.keep(3, [3, 4, 7])
    assert names(cache) == [0, 1, 2, 3, 4, 7]
    copied = TreeCache(2, 8)
    copied.append(cache, 2, 5)
    assert names(copied) == [2, 3, 4]
