"""The one verification rule against slow versions of itself and transformers."""

import re

import numpy as np
import pytest
import torch
import transformers as hf
from fakes.reference import children_of, paths_of
from fakes.refusals import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.tree import DraftTree
from specdec.core.verification import (
    Picker,
    accept,
    acceptance_distribution,
    gumbel_noise,
    make_warpers,
    mixed_seed,
    truncate,
)
from specdec.evaluation.lossless import chi_square

QUICK = settings(max_examples=40, deadline=None, derandomize=True)
IDS = torch.tensor([5, 3, 3, 7])


def random_tree(seed: int, nodes: int, vocab_size: int) -> DraftTree:
    """Any tree whose siblings carry distinct tokens."""
    draw = torch.Generator().manual_seed(seed)
    tokens, parents = [0], [-1]
    for _ in range(1, nodes):
        parent = int(torch.randint(0, len(tokens), (1,), generator=draw))
        free = sorted(set(range(vocab_size)) - {tokens[c] for c in children_of(parents, parent)})
        if free:
            tokens.append(free[int(torch.randint(0, len(free), (1,), generator=draw))])
            parents.append(parent)
    return DraftTree.from_arrays(tokens, parents)


def logits_of(seed: int, *shape: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def test_picks_by_hand():
    greedy = Picker.from_settings(0.0)
    assert greedy.pick(torch.tensor([0.0, 2.0, -1.0, 2.0]), IDS) == 1
    assert greedy.pick(torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16), IDS) == 1
    picker, logits = Picker.from_settings(0.8, 3, top_k=4), logits_of(4, 30)
    scores = picker.scores(logits, IDS)
    assert int(scores.argmax()) == picker.pick(logits, IDS) and int(scores.isfinite().sum()) == 4
    noise = gumbel_noise(3, 4, 30)
    kept = scores.isfinite()
    torch.testing.assert_close(scores[kept] - noise[kept], (logits[kept] / 0.8).double())
    assert torch.equal(greedy.scores(logits, IDS), logits)


def test_noise_depends_on_seed_and_position_alone():
    first = gumbel_noise(3, 10, 100)
    torch.rand(7)  # torch's own random state plays no part
    assert torch.equal(first, gumbel_noise(3, 10, 100)) and first.dtype == torch.float64
    for seed, position in ((3, 11), (4, 10), (10, 3), (-3, 10)):
        other = gumbel_noise(seed, position, 100)
        assert abs(float(np.corrcoef(first, other)[0, 1])) < 0.35
    assert mixed_seed(3, 10) == 6886709302207663517


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(temperature=-0.1), "temperature must be a finite number"),
        (dict(temperature=1e-40), "temperature must be 0 or at least 1e-12"),
        (dict(temperature=1.0, top_k=-1), "top_k must be an integer of at least 0"),
        (dict(temperature=1.0, top_p=1.1), "top_p must be a finite number between 0 and 1"),
        (dict(temperature=1.0, min_p=-0.5), "min_p must be a finite number between 0 and 1"),
        (dict(temperature=1.0, seed=1 << 63), "seed must fit into 64 bits"),
    ],
)
def test_bad_settings(config, message):
    assert re.search(message, refusal(Picker.from_settings, **config))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_picks_follow_the_softmax(temperature):
    logits = logits_of(1, 8)
    picks = [Picker.from_settings(temperature, seed).pick(logits, IDS) for seed in range(4000)]
    counts = np.bincount(picks, minlength=8)
    for warmer in (1.0, 1.3):
        expected = (logits.double() / (warmer * temperature)).softmax(-1)
        assert chi_square(counts, expected).passed == (warmer == 1.0)


WARPINGS = [
    dict(temperature=0.7, top_k=5),
    dict(temperature=0.7, top_k=0),
    dict(temperature=1.0, top_p=0.8),
    dict(temperature=1.4, min_p=0.1),
    dict(temperature=0.9, repetition_penalty=1.5),
    dict(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    dict(temperature=0.0, repetition_penalty=1.5),
]


def prepared_by_transformers(config: dict) -> hf.LogitsProcessorList:
    """The processors that `generate` itself makes of these settings."""
    config = {"top_k": 0, **config, "do_sample": True}
    if not config["temperature"]:
        config = {"repetition_penalty": config["repetition_penalty"]}
    sizes = dict(vocab_size=30, hidden_size=8, intermediate_size=8)
    shape = hf.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    generation = hf.GenerationConfig(**config)
    return hf.LlamaForCausalLM(shape)._get_logits_processor(generation, input_ids_seq_length=4)


@pytest.mark.parametrize("config", WARPINGS, ids=lambda c: " ".join(c))
def test_warpers_are_transformers_own(config):
    ours, theirs = make_warpers(**config), prepared_by_transformers(config)
    assert [type(p) for p in ours] == [type(p) for p in theirs]
    logits = logits_of(2, 30, spread=3.0)
    probs = Picker.from_settings(seed=1, **config).probabilities(logits, IDS)
    expected = theirs(IDS[None], logits[None])[0]
    if config["temperature"]:
        torch.testing.assert_close(probs, expected.softmax(-1))
    else:
        assert probs.tolist() == torch.eye(30)[expected.argmax()].tolist()


@pytest.mark.parametrize("config", WARPINGS, ids=lambda c: " ".join(c))
def test_inside_a_tree_each_node_is_warped_with_its_own_path(config, monkeypatch):
    """A penalty depends on the path: committed tokens and drafted ancestors, no siblings."""
    picker, vocab_size, lengths = Picker.from_settings(seed=11, **config), 6, set()
    for seed in range(25):
        tree = random_tree(seed, 24, vocab_size)
        logits = logits_of(100 + seed, len(tree), vocab_size, spread=1.0)
        committed = torch.cat((torch.tensor([5, 2]), tree.token[:1]))
        walked = picker.walk(tree, logits, committed)
        with monkeypatch.context() as patch:  # as on an accelerator: all nodes are picked at once
            patch.setattr(Picker, "whole_trees", staticmethod(lambda device: True))
            assert picker.pick_tree(tree, logits, committed) is not None
            assert picker.walk(tree, logits, committed) == walked
        # plain decoding that looks up its logits in the tree
        node, ids, path, tokens = 0, committed, [], []
        while node is not None:
            path.append(node)
            tokens.append(picker.pick(logits[node], ids))
            ids = torch.cat((ids, torch.tensor(tokens[-1:])))
            below = children_of(tree.parent.tolist(), node)
            node = next((c for c in below if int(tree.token[c]) == tokens[-1]), None)
        assert walked == (path, tokens)
        lengths.add(len(path))
    assert len(lengths) > 1


@QUICK
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 40),
    vocab_size=st.integers(2, 6),
    ties=st.booleans(),
)
def test_greedy_verification_is_the_longest_matching_path(seed, nodes, vocab_size, ties):
    """The official engine's formulation: per path the leading matches with the arg-max.

    Low precision makes exact ties common: the first of the best counts, as in plain decoding.
    """
    tree = random_tree(seed, nodes, vocab_size)
    logits = logits_of(seed, len(tree), vocab_size)
    logits = logits.round().bfloat16() if ties else logits
    best, tokens = [row.index(max(row)) for row in logits.tolist()], tree.token.tolist()
    assert best == [Picker().pick(row, IDS) for row in logits]
    longest = [0]
    for row in paths_of(tree).tolist():
        matched = [0]
        for node in row[1:]:
            if node < 0 or tokens[node] != best[matched[-1]]:
                break
            matched.append(node)
        longest = max(longest, matched, key=len)
    expected = (longest, [best[node] for node in longest])
    assert Picker().walk(tree, logits, torch.tensor([1, 0])) == expected
    assert accept(tokens, tree.parent.tolist(), lambda node, path: best[node]) == expected


@pytest.mark.parametrize(
    "tokens, stops, most, kept",
    [
        ([1, 2, 3], (), None, [1, 2, 3]),
        ([1, 2, 3, 2], (2, 3), 3, [1, 2]),
        ([1, 2, 3], (3,), 2, [1, 2]),
        ([1, 2], (9,), 0, []),
        ([5, 6], (5,), 1, [5]),
    ],
)
def test_tokens_that_count(tokens, stops, most, kept):
    assert truncate(tokens, stops, most) == kept


def brute_force_lengths(tree: DraftTree, probs: torch.Tensor, node=0, depth=0, chance=1.0):
    """Walk every sequence of target tokens down the tree."""
    lengths = np.zeros(tree.levels + 1)
    for token in range(probs.shape[1]):
        below = children_of(tree.parent.tolist(), node)
        child = next((c for c in below if int(tree.token[c]) == token), None)
        reached = chance * float(probs[node, token])
        if child is None:
            lengths[depth] += reached
        else:
            lengths += brute_force_lengths(tree, probs, child, depth + 1, reached)
    return lengths


@QUICK
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 14), zeros=st.booleans())
def test_acceptance_lengths_are_exact(seed, nodes, zeros):
    tree = random_tree(seed, nodes, 5)
    probs = logits_of(seed, len(tree), 5).softmax(-1)
    if zeros:  # as after top-k: some tokens are impossible
        probs[probs < 0.15] = 0.0
        probs /= probs.sum(-1, keepdim=True)
    lengths = acceptance_distribution(tree, probs)
    assert lengths.shape == (tree.levels + 1,)
    np.testing.assert_allclose(lengths, brute_force_lengths(tree, probs), atol=1e-6)
