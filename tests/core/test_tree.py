"""The flat-array tree against one that is grown node by node, and static trees."""

import itertools

import pytest
import torch
from fakes.reference import ReferenceTree, children_of, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.tree import EAGLE1_TREE, DraftTree, GrowingTree, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
CPU = torch.device("cpu")


def children_from(seed: int, top_k: int, step: float):
    """A path's children, a random function of it; log-probabilities are multiples of a step."""

    def children(path):
        generator = torch.Generator().manual_seed(hash((seed, *path)) % (1 << 62))
        tokens = torch.randperm(50, generator=generator)[:top_k].tolist()
        log_probs = -torch.rand(top_k, generator=generator) * 4
        log_probs = (log_probs / step).round() * step if step else log_probs
        return list(zip(tokens, log_probs.sort(descending=True).values.tolist(), strict=True))

    return children


def begun(root: int, *levels) -> GrowingTree:
    """A tree after levels of (tokens, log-probabilities), two nodes expanded on each."""
    tree = GrowingTree()
    tree.restart(torch.tensor(root))
    for tokens, log_probs in levels:
        tree.grow(torch.tensor(tokens), torch.tensor(log_probs), 2)
    return tree


def grown(children, root: int, depth: int, top_k: int, beam=()) -> GrowingTree:
    """The fast tree from the same function, level by level, as the engine grows it."""
    tree, shape = begun(root), TreeConfig(1, depth, top_k, beam=beam)
    for level in range(depth + 1):
        nodes = tree.whole()
        paths = [nodes.token[row[row >= 0]].tolist() for row in nodes.lineage()[tree.frontier[0]]]
        listed = torch.tensor([children(path) for path in paths], dtype=torch.float64)  # [W, k, 2]
        tree.grow(listed[..., 0].long(), listed[..., 1].float(), shape.beam_at(level))
    return tree


@QUICK
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(0, 4),
    top_k=st.integers(1, 5),
    step=st.sampled_from([0.0, 0.5, 2.0, 8.0]),  # 8: all log-probabilities are 0, everything ties
    share=st.floats(0, 1),
    beam=st.lists(st.integers(1, 7), max_size=4).map(tuple),
)
def test_growing_equals_the_reference(seed, depth, top_k, step, share, beam):
    children = children_from(seed, top_k, step)
    slow = ReferenceTree(7, children, depth, top_k, beam)
    fast = grown(children, 7, depth, top_k, beam)
    nodes = fast.whole()
    for name in ("token", "parent", "depth", "score"):
        assert getattr(nodes, name).tolist() == [node[name] for node in slow.nodes]
    assert fast.candidates == TreeConfig(1, depth, top_k, beam=beam).pool_size
    assert fast.level == depth + 1
    verify_nodes = round(share * fast.candidates)
    tree, (tokens, parents, mask) = fast.prune(verify_nodes), slow.prune(verify_nodes)
    assert (tree.token.tolist(), tree.parent.tolist()) == (tokens, parents)
    assert tree.ancestors.tolist() == mask


def test_a_certain_child_does_not_displace_its_parent_and_a_kept_tree_survives():
    tree = begun(9, ([[1, 2]], [[-0.5, -0.5]]), ([[3, 4], [5, 6]], [[0.0, -9.0], [0.0, -9.0]]))
    for verify_nodes, tokens in enumerate(([9], [9, 1], [9, 1, 2], [9, 1, 2, 3], [9, 1, 2, 3, 5])):
        assert tree.prune(verify_nodes).token.tolist() == tokens
    growing = begun(1, ([[2, 3]], [[-1.0, -2.0]]))
    assert growing.newest_scores.tolist() == growing.scores.tolist() == [-1.0, -2.0]
    growing.grow(torch.tensor([[4, 5], [6, 7]]), torch.tensor([[-1.0, -9.0], [-0.5, -4.0]]), 2)
    assert growing.newest_scores.tolist() == [-2.0, -10.0, -2.5, -6.0] and growing.candidates == 6
    assert [part.tolist() for part in growing.frontier[:3]] == [[3, 5], [0, 1], [4, 6]]
    kept = growing.prune(3)
    before = kept.token.tolist(), kept.score.tolist()
    growing.restart(torch.tensor(9))
    growing.grow(torch.tensor([[8, 8]]), torch.tensor([[-9.0, -9.0]]), 2)
    assert (kept.token.tolist(), kept.score.tolist()) == before
    assert growing.whole().token.tolist() == [9, 8, 8]


def test_a_tree_by_hand():
    #        0
    #      / | \
    #     1  2  3
    #    / \     \
    #   4   5     6
    #       |
    #       7
    parents = [-1, 0, 0, 0, 1, 1, 3, 5]
    scores = [0.0, -2.0, -0.5, -1.0, -3.0, -2.5, -1.5, -4.0]
    tree = DraftTree.from_arrays(range(10, 18), parents, scores)
    assert tree.depth.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert paths_of(tree).tolist() == [[0, 2, -1, -1], [0, 1, 4, -1], [0, 3, 6, -1], [0, 1, 5, 7]]
    cut = tree.select(torch.tensor([0, 1, 3, 5]))
    assert (cut.token.tolist(), cut.parent.tolist()) == ([10, 11, 13, 15], [-1, 0, 0, 1])
    assert cut.score.tolist() == [0.0, -2.0, -1.0, -2.5] and paths_of(cut).shape == (2, 3)
    for alone in (DraftTree.from_arrays([3], [-1]), begun(3).prune(5), begun(3).prune(0)):
        assert alone.token.tolist() == [3] and alone.levels == 0
        assert alone.ancestors.tolist() == [[True]] and paths_of(alone).tolist() == [[0]]


@QUICK
@given(st.lists(st.floats(0, 1, exclude_max=True), max_size=24))
def test_masks_and_paths_equal_the_slow_way(places):
    parents = [-1] + [int(place * node) for node, place in enumerate(places, start=1)]
    tree = DraftTree.from_arrays(list(range(len(parents))), parents)

    def climb(node):
        return [*climb(parents[node]), node] if node >= 0 else []

    nodes = range(len(parents))
    lines = [climb(node) for node in nodes]
    assert tree.ancestors.tolist() == [[other in line for other in nodes] for line in lines]
    assert [[n for n in row if n >= 0] for row in tree.lineage().tolist()] == lines
    leaves = [line for line in lines if not children_of(parents, line[-1])]
    assert [[n for n in row if n >= 0] for row in paths_of(tree).tolist()] == leaves


def grown_static(shape: StaticShape) -> DraftTree:
    """Drafted like EAGLE-1 does: token of a child = 10 * its parent's token + its rank + 1."""
    expanded, kept = shape.on(CPU)
    growing, ranks = begun(0), torch.arange(shape.top_k)
    for chosen in expanded:
        tokens = growing.frontier[2][:, None] * 10 + ranks + 1
        growing.grow(tokens, -1.0 - ranks.float().expand(tokens.shape), shape.top_k, chosen)
    return growing.select(kept)


def drafted_paths(tree: DraftTree) -> set[tuple]:
    return {tuple(tree.token[row[row >= 0]].tolist()) for row in tree.lineage()}


def listed_paths(choices) -> set[tuple]:
    """The same paths of tokens from the ranks."""
    paths = {(0,)}
    for choice in choices:
        tokens = itertools.accumulate(choice, lambda token, rank: 10 * token + rank + 1, initial=0)
        paths.add(tuple(tokens))
    return paths


def test_static_shapes_by_hand():
    shape = StaticShape(EAGLE1_TREE)
    assert len(set(EAGLE1_TREE)) == shape.verify_nodes == 25
    assert (shape.top_k, shape.depth, shape.total_tokens) == (4, 4, 26)
    # (a) (0b 1b 2b 3b) (00c 01c 02c 10c) (000d) (0000e): what each level expands
    levels = [level.tolist() for level in shape.on(CPU)[0]]
    assert levels == [[0, 1, 2, 3], [0, 1, 2, 4], [0], [0], []]
    assert shape.limits == TreeConfig(26, 4, 4)
    assert drafted_paths(grown_static(shape)) == listed_paths(EAGLE1_TREE)
    shape = StaticShape([(1, 0), (1,), (0,), (2,), (2, 1), (2, 1, 0), (1, 0)])
    assert shape.choices == ((0,), (1,), (2,), (1, 0), (2, 1), (2, 1, 0))
    assert (shape.top_k, shape.depth, shape.verify_nodes, shape.widest) == (3, 2, 6, 2)
    expanded, kept = shape.on(CPU)
    assert [level.tolist() for level in expanded] == [[1, 2], [4], []]
    assert kept.tolist() == [0, 1, 2, 3, 4, 8, 10] and kept.dtype == expanded[2].dtype == torch.long
    for paths in (((0, 0),), ((0,), (0, -1)), ()):
        pytest.raises(SpecdecError, StaticShape, paths)


@QUICK
@given(st.data())
def test_any_prefix_closed_list_is_a_tree(data):
    choices = set()
    for _ in range(data.draw(st.integers(1, 12))):
        stem = data.draw(st.sampled_from([(), *sorted(choices)]))
        if len(stem) < 4:
            choices.add((*stem, data.draw(st.integers(0, 2))))
    tree = grown_static(StaticShape(data.draw(st.permutations(sorted(choices)))))
    assert drafted_paths(tree) == listed_paths(choices)
