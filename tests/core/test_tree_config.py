"""The numbers of trees: widths by level beside a slow count, one form for every beam, texts, and
the papers' trees.
"""

import itertools

import pytest

from specdec.core.policy import Static
from specdec.core.tree_config import (
    PAPER_TREES,
    TREES,
    CopiedTree,
    TreeConfig,
    plain_beam,
    pool_size,
    tree_from,
)
from specdec.errors import SpecdecError

BEAMS = [beam for length in range(4) for beam in itertools.product(range(1, 6), repeat=length)]


def widths(depth: int, top_k: int, beam: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes expanded level by level: what is wanted, as far as the level above offers it."""
    offered, found = top_k, []
    for level in range(depth):
        wanted = (beam or (top_k,))[min(level, len(beam) - 1) if beam else 0]
        found.append(min(wanted, offered))
        offered = found[-1] * top_k
    return tuple(found)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_beams_have_one_form(top_k):
    forms = {}
    for beam in BEAMS:
        plain, expanded = plain_beam(top_k, beam), widths(6, top_k, beam)
        forms.setdefault(expanded, set()).add(plain)
        for depth in (0, 1, 2, 5, 6):
            tree = TreeConfig(2, depth, top_k, beam=beam)
            assert tree.beam == plain and tree.frontiers == expanded[:depth]
            assert (
                tree.pool_size
                == pool_size(depth, top_k, plain)
                == top_k + top_k * sum(expanded[:depth])
            )
            assert tree.widest == (max(plain) if plain else top_k)
            assert [tree.beam_at(level) for level in range(6)] == list(expanded)
    assert all(len(found) == 1 for found in forms.values())
    assert forms[(top_k,) * 6] == {()}


@pytest.mark.parametrize("beam", [(0,), (2, -1), (1.5,), (True,), "21", 3, None, {2}])
def test_bad_beams(beam):
    pytest.raises(SpecdecError, TreeConfig, 4, 2, 3, beam=beam).match(
        "beam must be a tuple of integers of at least 1"
    )
    assert plain_beam(3, [2, 1]) == (2, 1)


def test_the_smallest_trees():
    assert TreeConfig(1, 0, 1).verify_nodes == 0
    assert not TreeConfig(1, 0, 1).drafted
    assert TreeConfig(2, 0, 1).drafted
    assert TreeConfig(5, 0, 4).pool_size == 4
    assert TreeConfig(21, 1, 4).verify_nodes == TreeConfig(21, 1, 4).pool_size
    for tree in (dict(total_tokens=6, depth=0, top_k=4), dict(total_tokens=22, depth=1, top_k=4)):
        pytest.raises(SpecdecError, TreeConfig, **tree).match("candidates")
    pytest.raises(SpecdecError, TreeConfig, 8, 2, 2, beam=(1,)).match("offer 6")
    for number in ("total_tokens", "depth", "top_k", "flat_nodes"):
        tree = {"total_tokens": 6, "depth": 3, "top_k": 3, number: -1}
        pytest.raises(SpecdecError, TreeConfig, **tree).match(f"^{number} must be")
    TreeConfig(6, 3, 3, flat_nodes=3), TreeConfig(6, 3, 3, flat_nodes=5)
    for flat_nodes in (2, 6):
        pytest.raises(SpecdecError, TreeConfig, 6, 3, 3, flat_nodes=flat_nodes).match(
            "between top_k=3 and the 5 nodes"
        )


def test_texts_are_read_back_also_of_copies_alone_and_the_papers_trees_are_theirs():
    for tree in (TreeConfig(60, 7, 10), TreeConfig(16, 5, 4, beam=(2, 1)), TreeConfig(2, 0, 1)):
        assert tree_from(tree.text) == tree
    assert TreeConfig(16, 5, 4, beam=(2, 1)).text == "16,5,4,2,1"
    for text in ("16,5", "16,5,x", ""):
        no_tree = pytest.raises(SpecdecError, tree_from, text)
        no_tree.match("is not a static tree; write static:total_tokens,depth,top_k")
    assert repr(Static(12, 3, 4)) == "Static(12, 3, 4)"
    tree = CopiedTree(7)
    assert (tree.verify_nodes, tree.drafted, tree.text) == (6, False, "copied:7")
    assert CopiedTree().total_tokens == 12
    assert tree.limits == TreeConfig(7, 0, 6) and CopiedTree(1).limits == TreeConfig(1, 0, 1)
    assert repr(Static.of(tree)) == "Static.of(CopiedTree(total_tokens=7))"
    for bad in (0, -3, 2.5, 10**9):
        pytest.raises(SpecdecError, CopiedTree, bad).match("total_tokens")
    numbers = {name: (tree.total_tokens, tree.depth, tree.top_k) for name, tree in TREES.items()}
    assert numbers == {
        "eagle3": (60, 7, 10),
        "eagle3-scripts": (60, 5, 10),
        "eagle3-qwen3": (32, 8, 4),
        "ltd": (60, 8, 10),
        "ltd-vicuna-13b": (50, 8, 10),
    }
    assert all(not tree.beam and not tree.flat_nodes for tree in TREES.values())
    assert PAPER_TREES == {
        "resps": TREES["eagle3-scripts"],
        "ltd": TREES["ltd"],
        "radar": TREES["eagle3"],
    }
