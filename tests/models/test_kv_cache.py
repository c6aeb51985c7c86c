"""Caches: rows in place, paths, dropped tails, overflow; many sequences say what each says."""

import pytest
import torch
from fakes.families import FAMILIES, VOCAB, model_of
from fakes.families import tokens as random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.decode import drive
from specdec.core.protocols import TargetForward, finish
from specdec.errors import SpecdecError
from specdec.models.families import cache_keyword
from specdec.models.kv_cache import TreeCache
from specdec.models.target import Target


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


def test_rows_that_make_no_path_are_refused_and_nothing_moves():
    cache = filled(range(8))
    for start, rows in ((3, [2]), (3, [4, 4]), (3, [5, 4]), (3, [3, 8]), (9, [])):
        pytest.raises(AssertionError, cache.keep, start, rows).match("cannot keep rows")
        assert names(cache) == list(range(8))


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
    cache.require(2)
    pytest.raises(SpecdecError, cache.require, 3).match("room for 12 tokens, 13 are needed")
    cache.crop(-2)
    cache.keep(3, [3, 4, 7])
    assert names(cache) == [0, 1, 2, 3, 4, 7]
    copied = TreeCache(2, 8)
    copied.append(cache, 2, 5)
    assert names(copied) == [2, 3, 4]


def text(target, prompt, new_tok):
    """A prompt, twice a few tokens at once, and single tokens: logits of last rows, and tokens."""
    cache = target.new_cache(200)
    ids = []
    logits = []
    unread = list(prompt)
    while len(ids) < new_tok:
        rows = yield TargetForward(target, torch.tensor(unread), cache, last_only=True)
        logits.append(rows.logits[-1])
        ids.append(int(rows.logits[-1].argmax()))
        unread = ids[-1:]
        if len(ids) in (3, 5):
            unread = [ids[-1], *prompt[:4]]
        if len(ids) == 7:
            # its last token is written anew, from the one before
            cache.truncate(len(cache) - 1)
            unread = ids[-2:]
    return torch.stack(logits), ids


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_together_what_it_says_alone(name):
    target = Target(model_of(name))
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in (5, 3, 28, 11):
        prompts.append(torch.randint(2, VOCAB, (length,), generator=generator).tolist())
    with target.inference():
        alone = [finish(text(target, prompt, 14)) for prompt in prompts]
        together = dict(drive((text(target, prompt, 14) for prompt in prompts), 3))
    for number, (logits, ids) in enumerate(alone):
        assert together[number][1] == ids
        torch.testing.assert_close(together[number][0], logits, rtol=1e-4, atol=1e-4)
