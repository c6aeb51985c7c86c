"""Tree attention beside its slow, obvious form: one row, one head, one key at a time."""

import itertools
import math

import pytest
import torch
from fakes.families import model_of, random_tree
from fakes.families import tokens as random_tokens
from torch import nn

from specdec.core.tree import DraftTree
from specdec.errors import SpecdecError
from specdec.models import tree_attention as module
from specdec.models.families import attention_configs
from specdec.models.tree_attention import TreeMask, tree_attention, tree_mask, window_of


def obvious(tree: DraftTree, prefix: int, window: int | None) -> torch.Tensor:
    """bool [N, prefix + N]: walk up from every node; a key that is `window` positions away or more is out of sight."""
    mask = torch.zeros(len(tree), prefix + len(tree), dtype=torch.bool)
    for node in range(len(tree)):
        position = prefix + int(tree.depth[node])
        for row in range(prefix):
            mask[node, row] = window is None or position - row < window
        above = node
        while above >= 0:
            mask[node, prefix + above] = window is None or int(tree.depth[node] - tree.depth[above]) < window
            above = int(tree.parent[above])
    return mask


def seen_by(tree: DraftTree, prefix: int) -> TreeMask:
    return TreeMask(tree.depth + prefix, prefix, tree.ancestors)


def test_no_mask_is_made_where_causal_order_says_it_all_and_windows_are_the_layers_own_word():
    for prefix, count, window in itertools.product((0, 1, 7), (1, 2, 5), (None, 1, 3, 6, 20)):
        state = TreeMask(torch.arange(count) + prefix, prefix)
        causal = torch.ones(count, prefix + count, dtype=torch.bool).tril_(prefix)
        if state.is_causal(window):  # the kernel's own causal order starts at key 0, so it needs an empty prefix
            assert torch.equal(state.visible(window), causal) and (prefix == 0 or count == 1)
    assert TreeMask(torch.arange(9), 0).is_causal(None) and TreeMask(torch.tensor([9]), 9).is_causal(None)
    assert not seen_by(random_tree(0), 0).is_causal(None)
    generator = torch.Generator().manual_seed(0)
    layer = nn.Module()
    for prefix, rows in ((0, 6), (5, 1), (5, 3)):
        query, key, value = (torch.randn(1, 2, n, 8, generator=generator) for n in (rows, prefix + rows, prefix + rows))
        state = TreeMask(torch.arange(rows) + prefix, prefix)
        with tree_mask(state):
            out, _ = tree_attention(layer, query, key, value)
        assert torch.allclose(out, naive(query, key, value, state.visible(None), 8**-0.5), atol=1e-5)
        assert bool(state.windows) == (prefix > 0 and rows > 1)
    state, layer = TreeMask(torch.arange(3), 0), nn.Module()
    assert window_of(layer, state, {}) is None
    layer.layer_idx, layer.config = 1, type("Config", (), dict(sliding_window=9, layer_types=None))()
    assert window_of(layer, state, {}) is None  # a config alone proves nothing: some models never use it
    state.widths.add(7)
    assert window_of(layer, state, {}) == 7  # the model's masks are all of this width
    state.widths.add(None)
    assert window_of(layer, state, {}) is None
    layer.config.layer_types = ["full_attention", "sliding_attention"]
    assert window_of(layer, state, {}) == 9
    layer.layer_idx = 0
    assert window_of(layer, state, {}) is None
    layer.sliding_window = 5
    assert window_of(layer, state, {}) == 5
    assert all(window_of(layer, state, {"sliding_window": window}) is window for window in (None, 4))


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 40])
@pytest.mark.parametrize("prefix", [0, 1, 5, 30])
def test_masks_are_those_of_a_walk(prefix, window):
    for seed in range(3):
        tree, state = random_tree(seed), seen_by(random_tree(seed), prefix)
        expected = obvious(tree, prefix, window)
        assert torch.equal(state.visible(window), expected)
        mask = state.additive(window, torch.zeros(1), -9.0)
        assert torch.equal(mask == 0, expected) and torch.equal(mask == -9.0, ~expected)
        assert state.additive(window, torch.zeros(1), -9.0) is mask  # one per kind of layer and pass
        assert state.windows == {window}


def naive(query, key, value, seen, scale):
    """Softmax attention of every row and head over the keys it sees; key head h serves its group of query heads."""
    batch, heads, rows, width = query.shape
    out = torch.zeros(batch, rows, heads, value.shape[-1])
    for b in range(batch):
        for head in range(heads):
            shared = head * key.shape[1] // heads
            for row in range(rows):
                keys = seen[row].nonzero().flatten()
                scores = torch.stack([query[b, head, row].float() @ key[b, shared, k].float() for k in keys]) * scale
                out[b, row, head] = scores.softmax(0) @ value[b, shared, keys].float()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 4, 4), (1, 4, 2), (1, 6, 1), (2, 4, 2)])
def test_grouped_heads_read_their_own_keys(batch, heads, kv_heads, dtype):
    generator = torch.Generator().manual_seed(heads * kv_heads)
    tree, prefix, window, width = random_tree(1), 4, 5, 8
    room = torch.randn(2, batch, kv_heads, 40, width, generator=generator).to(dtype)
    key, value = room[:, :, :, : prefix + len(tree)]  # views into a longer cache, as a TreeCache returns them
    query = torch.randn(batch, len(tree), heads, width, generator=generator).to(dtype).transpose(1, 2)
    layer = nn.Module()
    layer.sliding_window = window
    for state in (seen_by(tree, prefix), TreeMask(torch.arange(13) + prefix, prefix)):
        with tree_mask(state):
            out, weights = tree_attention(layer, query, key, value, None, scaling=0.3)
        assert out.shape == (batch, len(tree), heads, width) and weights is None
        exact = naive(query, key, value, state.visible(window), 0.3)
        assert torch.allclose(out.float(), exact, atol=1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(("rows", "prefix"), [(3, 30), (1, 200), (9, 0), (65, 0), (130, 0)])
def test_two_products_attend_as_the_kernel_does(monkeypatch, rows, prefix):
    generator = torch.Generator().manual_seed(rows)
    room = torch.randn(2, 2, 300, 16, generator=generator).bfloat16()
    key, value = room[:, :, : prefix + rows]  # views into a longer cache
    query = torch.randn(2, 3, rows, 16, generator=generator).bfloat16()
    seen = torch.ones(rows, prefix + rows).tril(prefix).bool()
    bias = None if not prefix else torch.where(seen, 0.0, -math.inf).repeat(3, 1).bfloat16()
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    outs = []
    for least in (1, 10**9):
        monkeypatch.setattr(module, "PRODUCTS_FROM", least)
        assert module.products_pay(query, key) == (least == 1)
        outs.append(module.grouped_attention(query, key, value, bias, not prefix, 0.3).float())
    exact = naive(query.flatten(0, 1)[None], key[None], value[None], seen, 0.3)[0].transpose(0, 1).unflatten(0, (2, 3))
    for out in outs:
        assert torch.allclose(out, exact, atol=0.03)
    assert (outs[0] - exact).abs().mean() < 0.005
    assert not module.products_pay(query.float(), key.float())


class Capped(nn.Module):
    """A layer whose module offers `eager_attention_forward` (this file's own), as families with capped scores do."""


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, **kwargs):
    assert attention_mask.dtype == query.dtype and attention_mask.ndim == 4  # a bool mask would be added as 0 and 1
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    scores = softcap * torch.tanh(scores / softcap) + attention_mask
    return (scores.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


def test_capped_scores_run_the_familys_own_kernel_with_our_mask_and_whatever_has_none_is_refused():
    generator = torch.Generator().manual_seed(3)
    tree, cap = random_tree(2), 0.7
    query, key, value = (torch.randn(1, h, n, 8, generator=generator) for h, n in ((4, 13), (2, 16), (2, 16)))
    with tree_mask(seen_by(tree, 3)):
        out, _ = tree_attention(Capped(), query, key, value, None, scaling=0.5, softcap=cap)
    for row, head in ((0, 0), (7, 1), (12, 3)):
        keys = obvious(tree, 3, None)[row].nonzero().flatten()
        scores = [cap * math.tanh(float(query[0, head, row] @ key[0, head // 2, k]) * 0.5 / cap) for k in keys]
        assert torch.allclose(out[0, row, head], torch.tensor(scores).softmax(0) @ value[0, head // 2, keys], atol=1e-5)
    with pytest.raises(SpecdecError, match="specdec is decoding"):  # no mask is active
        tree_attention(nn.Module(), query, key, value)
    stranger = nn.Linear(1, 1)  # torch.nn.modules.linear offers no such kernel
    with tree_mask(seen_by(tree, 3)), pytest.raises(SpecdecError, match="Linear caps scores or has sinks"):
        tree_attention(stranger, query, key, value, None, scaling=0.5, softcap=cap)


def test_masks_nest_end_with_errors_and_tell_their_widths():
    model = model_of("gemma3")
    name, outer, inner = model.config._attn_implementation, *(TreeMask(torch.arange(2), 0) for _ in range(2))
    with pytest.raises(RuntimeError, match="stop"), module.patched_attention(attention_configs(model)):
        assert model.config._attn_implementation == module.NAME and module.has_patched_attention(model)
        with tree_mask(outer):
            with module.patched_attention(attention_configs(model)), tree_mask(inner):
                assert module._active.get() is inner
            assert module._active.get() is outer and module.has_patched_attention(model)
            raise RuntimeError("stop")
    assert module._active.get() is None and not module.has_patched_attention(model)
    assert model.config._attn_implementation == name
    for name, widths in (("llama", {None}), ("mistral-window", {6}), ("gemma3", {None, 6})):
        model, prompt = model_of(name), random_tokens(5, seed=0)
        state = TreeMask(torch.arange(5), 0)
        with torch.no_grad(), module.patched_attention(attention_configs(model)), tree_mask(state):
            model(prompt[None], position_ids=state.positions[None], use_cache=False)
        assert state.widths == widths
