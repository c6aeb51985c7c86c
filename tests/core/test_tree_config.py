"""The numbers of trees: widths by level beside a slow count, memory, and trees of the papers."""

import itertools

import pytest
import torch
from fakes.pairs import random_pair

from specdec.core import tree_config as sizes
from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.core.tree_config import TREES, CopiedTree, TreeConfig, plain_beam, tree_from
from specdec.errors import SpecdecError

BEAMS = [beam for length in range(4) for beam in itertools.product(range(1, 6), repeat=length)]


def widths(depth: int, top_k: int, beam: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes expanded level by level, as far as the level above offers them."""
    offered, expanded = top_k, []
    for level in range(depth):
        width = beam[min(level, len(beam) - 1)] if beam else top_k
        expanded.append(min(width, offered))
        offered = expanded[-1] * top_k
    return tuple(expanded)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_beams_have_one_form(top_k):
    forms = {}
    for beam in BEAMS:
        plain, expanded = plain_beam(top_k, beam), widths(6, top_k, beam)
        assert forms.setdefault(expanded, plain) == plain
        for depth in (0, 1, 2, 5, 6):
            tree = TreeConfig(2, depth, top_k, beam=beam)
            assert tree.beam == plain
            assert tuple(tree.beam_at(level) for level in range(depth)) == expanded[:depth]
            assert tree.pool_size == top_k + top_k * sum(expanded[:depth])
            assert tree.widest == max(plain, default=top_k)
    assert forms[(top_k,) * 6] == ()
    for bad in ((0,), (2, -1), (1.5,), (True,), "21"):
        pytest.raises(SpecdecError, TreeConfig, 4, 2, 3, beam=bad).match("the beam must be")


def test_the_smallest_trees():
    assert not TreeConfig(1, 0, 1).drafted and TreeConfig(2, 0, 1).drafted
    assert TreeConfig(21, 1, 4).verify_nodes == TreeConfig(21, 1, 4).pool_size == 20
    for numbers in ((6, 0, 4), (22, 1, 4)):
        pytest.raises(SpecdecError, TreeConfig, *numbers).match("candidates")
    for name in ("total_tokens", "depth", "top_k", "flat_nodes"):
        tree = {"total_tokens": 6, "depth": 3, "top_k": 3, name: -1}
        pytest.raises(SpecdecError, TreeConfig, **tree).match(f"^{name} must be")
    assert {TreeConfig(6, 3, 3, flat_nodes=nodes).flat_nodes for nodes in (0, 3, 5)} == {0, 3, 5}
    for flat_nodes in (2, 6):
        pytest.raises(SpecdecError, TreeConfig, 6, 3, 3, flat_nodes).match("top_k=3 and the 5")


def test_texts_are_read_back():
    for text in ("60,7,10", "16,5,4,2,1"):
        assert tree_from(text).text == text
    pytest.raises(SpecdecError, tree_from, "16,5,x").match("is not a static tree")


def test_trees_of_copies():
    tree = CopiedTree(7)
    assert (tree.verify_nodes, tree.drafted, tree.text) == (6, False, "copied:7")
    assert tree.limits == TreeConfig(7, 0, 6) and CopiedTree(1).limits == TreeConfig(1, 0, 1)
    pytest.raises(SpecdecError, CopiedTree, 0).match("total_tokens")


def test_the_papers_trees():
    texts = [tree.text for tree in TREES.values()]
    assert texts == ["60,7,10", "60,5,10", "32,8,4", "60,8,10", "50,8,10"]
    papers = {name: tree.text for name, tree in sizes.PAPER_TREES.items()}
    assert papers == {"resps": "60,5,10", "ltd": "60,8,10", "radar": "60,7,10"}


def test_what_is_larger_than_the_free_memory_is_refused(monkeypatch):
    free = 100 << 20
    monkeypatch.setattr(sizes, "free_bytes", lambda device: free)
    sizes.check_memory("a thing", free, "cuda")
    call = (sizes.check_memory, "a thing", free + 1)
    pytest.raises(SpecdecError, *call).match("^a thing takes 0.1 GiB and 0.1 GiB are free")
    pair = random_pair(limit=10**9)
    call = (decode, pair, [1, 2], Static(4, 1, 2))
    pytest.raises(SpecdecError, *call, max_new_tokens=10**8).match("key-value cache of .* 0.1 GiB")
    pytest.raises(SpecdecError, pair.drafter.session, 10**8, 4).match("GiB are free")
    # layers, keys and values, heads, width, float32
    room = free // (8 * 2 * 2 * 8 * 4)
    assert len(pair.target.new_cache(room)) == 0
    pytest.raises(SpecdecError, pair.target.new_cache, room + 1).match("key-value cache")
    monkeypatch.setattr(sizes, "free_bytes", lambda device: None)
    sizes.check_memory("a thing", 1 << 60)


def test_free_memory_is_what_the_system_says(monkeypatch):
    for text, free in (("MemTotal:  9 kB\nMemAvailable:    2048 kB\n", 2048 * 1024), ("", None)):
        monkeypatch.setattr(sizes.Path, "read_text", lambda self, text=text: text)
        assert sizes.free_bytes() == free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device, 5))
    assert sizes.free_bytes("cuda") == "cuda"
