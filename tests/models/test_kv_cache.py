"""The caches: rows in place, paths kept, tails dropped, overflow refused; sequences on borrowed pages say what they say alone."""

import copy
import inspect

import pytest
import torch
from fakes.families import FAMILIES, VOCAB, model_of
from fakes.families import tokens as random_tokens
from fakes.pairs import random_target
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from specdec.core.decode import drive
from specdec.core.protocols import TargetForward, finish
from specdec.errors import SpecdecError
from specdec.models.families import cache_keyword
from specdec.models.kv_cache import PAGE, PagedJoin, RowLayer, TreeCache
from specdec.models.target import Target


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


def test_memory_takes_after_its_first_use_chains_are_kept_without_copies_and_caches_are_cut_and_reset():
    cache, other = filled(range(3)), filled(range(5), capacity=5)
    cache.truncate(2)
    cache.append(other)
    assert names(cache) == [0, 1, 0, 1, 2, 3, 4] and names(other) == [0, 1, 2, 3, 4]
    with pytest.raises(SpecdecError, match="room for 12 tokens but 17"):
        for _ in range(2):
            cache.append(other)
    cache = TreeCache(1, 4)
    assert len(cache) == 0 and cache.layers[0].keys is None
    cache.update(
        torch.ones(1, 3, 2, 4, dtype=torch.bfloat16),
        torch.ones(1, 3, 2, 6, dtype=torch.bfloat16),
        0,
    )
    assert cache.layers[0].keys.shape == (1, 3, 4, 4) and cache.layers[0].values.shape == (
        1,
        3,
        4,
        6,
    )
    assert cache.layers[0].keys.dtype == torch.bfloat16
    for capacity in (0, -1):
        pytest.raises(AssertionError, TreeCache, 1, capacity).match("at least one row")
    cache = filled(range(4))
    memory = cache.layers[0].keys.data_ptr()
    keys, values = cache.update(*block([4, 5]), 0)
    assert keys.shape == (1, 2, 6, 3) and values.shape == (1, 2, 6, 5)
    assert keys.data_ptr() == cache.layers[0].keys.data_ptr() == memory
    assert keys[0, 1, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert cache.get_seq_length() == len(cache) == 6 and cache.get_mask_sizes(3, 0) == (9, 0)
    assert (
        cache.capacity
        == cache.layers[0].get_max_length()
        == cache.layers[0].get_max_cache_shape()
        == 12
    )
    cache = filled(range(10))
    cache.require(2)
    pytest.raises(SpecdecError, cache.require, 3).match("room for 12 tokens but 13 are needed")
    pytest.raises(AssertionError, cache.update, *block([10, 11, 12]), 0).match(
        "13 rows, but room was made for 12"
    )
    assert names(cache) == list(range(10))
    cache.update(*block([10, 11]), 0)
    assert cache.layers[0].rows == 12
    cache = filled(range(8))
    before = copy.deepcopy(cache.layers[0].keys)
    cache.keep(3, [3, 4, 5])
    assert names(cache) == [0, 1, 2, 3, 4, 5] and torch.equal(cache.layers[0].keys, before)
    cache.keep(4, [5])
    grow(cache, [20, 21])
    assert names(cache) == [0, 1, 2, 3, 5, 20, 21]
    cache = TreeCache(3, 8)
    grow(cache, range(6))  # of the first two; the third layer reads the second's
    cache.keep(2, [3, 5])
    assert cache.layers.pop().keys is None and names(cache) == [0, 1, 3, 5]
    cache = filled(range(8))
    cache.truncate(6)
    assert names(cache) == list(range(6))
    for rows in (7, -1):
        pytest.raises(AssertionError, cache.truncate, rows).match(
            "cannot truncate a cache of 6 rows"
        )
    cache.crop(-2)
    assert names(cache) == list(range(4))
    cache.crop(0)
    assert len(cache) == 4
    pytest.raises(SpecdecError, cache.crop, 3).match("negative")
    cache.crop(-9)
    assert len(cache) == 0
    cache = filled(range(8))
    cache.reset()
    assert len(cache) == 0 and cache.layers[0].keys is not None
    grow(cache, [5, 6])
    assert names(cache) == [5, 6]


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


def text(target, memory, prompt, new_tok):
    """A prompt, twice a few tokens at once, and single tokens: logits of each last row, and the tokens."""
    cache, ids, logits = memory.new_cache(200), [], []
    unread = list(prompt)
    while len(ids) < new_tok:
        rows = yield TargetForward(target, torch.tensor(unread), cache, last_only=True)
        logits.append(rows.logits[-1])
        ids.append(int(rows.logits[-1].argmax()))
        unread = ids[-1:] if len(ids) not in (3, 5) else [ids[-1], *prompt[:4]]
        if len(ids) == 7:  # writes its last token anew, from the one before
            cache.truncate(len(cache) - 1)
            unread = ids[-2:]
    return torch.stack(logits), ids


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


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_what_it_says_alone(name):
    target = Target(model_of(name))
    with target.inference():
        assert_same_alone(
            target, prompts(VOCAB, (5, 3, PAGE - 4, 11)), 14, [target.new_memory()] * 4, 3
        )


@pytest.mark.parametrize(("rows", "count"), [(2, 8), (40, 40)])
def test_many_sequences_over_many_pages(rows, count, monkeypatch):
    joined = []
    monkeypatch.setattr(
        PagedJoin,
        "update",
        lambda *a, f=PagedJoin.update: joined.append(a[0].side_by_side) or f(*a),
    )
    target = Target(random_target(vocab_size=24, layers=2))
    with target.inference():
        memory = target.new_memory()
        assert_same_alone(
            target, prompts(24, range(3, 3 + 2 * count, 2)), 50, [memory] * count, rows
        )
    assert max(map(len, joined)) == rows
    pages = memory.stores[0][0].shape[0]
    assert [memory.take_page() for _ in range(pages)] == list(
        range(pages)
    )  # every page was given back
    assert (pages > 64) == (rows == 40)


def test_two_memories_and_other_caches_share_a_forward_and_take_no_more_rows_than_were_agreed_on():
    target = Target(random_target())
    with target.inference():
        memories = target.new_memory(), target.new_memory()
        assert_same_alone(target, prompts(24, (4, 9, 6)), 12, [*memories, target], 3)
        cache = memories[0].new_cache(4)
        target.forward(torch.tensor([1, 2, 3]), cache)
        with pytest.raises(SpecdecError, match="room for 4 tokens but 5 are needed"):
            target.forward(torch.tensor([4, 5]), cache)
    assert len(cache) == 3
