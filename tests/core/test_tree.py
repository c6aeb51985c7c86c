"""The flat-array tree against the tree that is grown node by node, and every number of EAGLE-1's
static tree.
"""

import pytest
import torch
from fakes.reference import ReferenceTree, children_of
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.tree import EAGLE1_TREE, DraftTree, GrowingTree, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def children_from(seed: int, top_k: int, step: float):
    """Children of a path as a fixed random function of the path. step: log-probabilities are
    multiples of it (ties).
    """

    def children(path):
        generator = torch.Generator().manual_seed(hash((seed, *path)) % (1 << 62))
        tokens = torch.randperm(50, generator=generator)[:top_k]
        log_probs = -torch.rand(top_k, generator=generator) * 4
        log_probs = (log_probs / step).round() * step if step else log_probs
        return list(
            zip(tokens.tolist(), log_probs.sort(descending=True).values.tolist(), strict=True)
        )

    return children


def begun(root: int, *levels) -> GrowingTree:
    """A tree after levels of (tokens, log-probabilities), lists [W, k], with two nodes expanded on
    each.
    """
    tree = GrowingTree()
    tree.restart(root)
    for tokens, log_probs in levels:
        tree.grow(torch.tensor(tokens), torch.tensor(log_probs), 2)
    return tree


def grown(children, root: int, depth: int, top_k: int, beam=()) -> GrowingTree:
    """The fast tree from the same function, level by level, as the engine grows it."""
    tree, shape = begun(root), TreeConfig(1, depth, top_k, beam=beam)
    for level in range(depth + 1):
        whole = tree.whole()
        paths = [whole.token[row[row >= 0]].tolist() for row in whole.lineage()[tree.frontier[0]]]
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
    slow, fast = (
        ReferenceTree(7, children, depth, top_k, beam),
        grown(children, 7, depth, top_k, beam),
    )
    whole = fast.whole()
    assert [whole.token.tolist(), whole.parent.tolist()] == [
        [n[k] for n in slow.nodes] for k in ("token", "parent")
    ]
    assert whole.depth.tolist() == [n["depth"] for n in slow.nodes]
    assert whole.score.tolist() == [n["score"] for n in slow.nodes]
    assert fast.candidates == TreeConfig(1, depth, top_k, beam=beam).pool_size
    assert fast.level == depth + 1
    verify_nodes = round(share * fast.candidates)
    tree, (tokens, parents, mask) = fast.prune(verify_nodes), slow.prune(verify_nodes)
    assert (tree.token.tolist(), tree.parent.tolist(), tree.ancestors.tolist()) == (
        tokens,
        parents,
        mask,
    )


def path_set(tree: DraftTree) -> set[tuple]:
    return {tuple(tree.token[row[row >= 0]].tolist()) for row in tree.lineage()}


def test_a_certain_child_does_not_displace_its_parent_and_a_kept_tree_survives():
    tree = begun(9, ([[1, 2]], [[-0.5, -0.5]]), ([[3, 4], [5, 6]], [[0.0, -9.0], [0.0, -9.0]]))
    for verify_nodes, tokens in (
        (1, [9, 1]),
        (2, [9, 1, 2]),
        (3, [9, 1, 2, 3]),
        (4, [9, 1, 2, 3, 5]),
    ):
        assert tree.prune(verify_nodes).token.tolist() == tokens
    growing = begun(1, ([[2, 3]], [[-1.0, -2.0]]))
    assert growing.newest_scores.tolist() == growing.scores.tolist() == [-1.0, -2.0]
    growing.grow(torch.tensor([[4, 5], [6, 7]]), torch.tensor([[-1.0, -9.0], [-0.5, -4.0]]), 2)
    assert growing.newest_scores.tolist() == [-2.0, -10.0, -2.5, -6.0] and growing.candidates == 6
    assert [part.tolist() for part in growing.frontier[:2]] == [[3, 5], [0, 1]]
    assert growing.prune(4).token.tolist() == growing.prune(4).token.tolist()
    assert len(growing.prune(10**6)) == 7
    kept, whole = growing.prune(3), growing.whole()
    before = kept.token.tolist(), kept.score.tolist(), whole.token.tolist()
    growing.restart(9)
    growing.grow(torch.tensor([[8, 8]]), torch.tensor([[-9.0, -9.0]]), 2)
    assert (kept.token.tolist(), kept.score.tolist(), whole.token.tolist()) == before
    assert growing.whole().token.tolist() == [9, 8, 8]


def test_a_tree_by_hand_the_root_alone_and_bad_ones():
    #        0
    #      / | \
    #     1  2  3
    #    / \     \
    #   4   5     6
    #       |
    #       7
    tree = DraftTree.from_arrays([10, 11, 12, 13, 14, 15, 16, 17], [-1, 0, 0, 0, 1, 1, 3, 5])
    assert tree.depth.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert tree.paths().tolist() == [[0, 2, -1, -1], [0, 1, 4, -1], [0, 3, 6, -1], [0, 1, 5, 7]]
    cut = tree.select(torch.tensor([0, 1, 3, 5]))
    assert (cut.token.tolist(), cut.parent.tolist()) == ([10, 11, 13, 15], [-1, 0, 0, 1])
    assert cut.ancestors.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert cut.paths().tolist() == [[0, 2, -1], [0, 1, 3]]
    growing = begun(3, ([[1, 2]], [[-1.0, -2.0]]))
    for alone in (DraftTree.from_arrays([3], [-1]), growing.prune(0)):
        assert alone.token.tolist() == [3]
        assert alone.ancestors.tolist() == [[True]]
        assert alone.paths().tolist() == [[0]]
    assert DraftTree.from_arrays([3], [-1]).levels == 0
    unread = GrowingTree("meta")  # a device whose values cannot be read back
    unread.restart(torch.tensor(3, device="meta"))
    assert unread.size == 1


@pytest.mark.parametrize(
    "tokens, parents", [([1, 2], [-1]), ([1, 2], [0, 0]), ([9, 5], [-1, 1]), ([9, 5], [-1, -1])]
)
def test_no_trees(tokens, parents):
    pytest.raises(AssertionError, DraftTree.from_arrays, tokens, parents)


@pytest.mark.parametrize("paths", [((0, 0),), ((0,), (0, -1)), ()])
def test_no_shapes(paths):
    pytest.raises(SpecdecError, StaticShape, paths)


@QUICK
@given(st.lists(st.floats(0, 1, exclude_max=True), max_size=24))
def test_masks_and_paths_equal_the_slow_way(places):
    parents = [-1] + [int(place * node) for node, place in enumerate(places, start=1)]
    tree = DraftTree.from_arrays(list(range(len(parents))), parents)

    def climb(node):
        return [*climb(parents[node]), node] if node >= 0 else []

    count = len(parents)
    assert tree.ancestors.tolist() == [
        [other in climb(node) for other in range(count)] for node in range(count)
    ]
    assert [[n for n in row if n >= 0] for row in tree.lineage().tolist()] == [
        climb(node) for node in range(count)
    ]
    leaves = [node for node in range(count) if not children_of(parents, node)]
    assert [[n for n in row if n >= 0] for row in tree.paths().tolist()] == [
        climb(leaf) for leaf in leaves
    ]
    assert tree.paths().shape[1] == 1 + int(tree.depth.max())


def test_static_shapes_and_scores_by_hand():
    shape = StaticShape(EAGLE1_TREE)
    assert len(set(EAGLE1_TREE)) == len(EAGLE1_TREE) == shape.verify_nodes == 25
    assert (shape.top_k, shape.depth, shape.total_tokens) == (4, 4, 26)
    per_level = [sum(len(choice) == level for choice in EAGLE1_TREE) for level in range(1, 6)]
    assert per_level == [4, 8, 8, 3, 2]
    # (a) (0b 1b 2b 3b) (00c 01c 02c 10c) (000d) (0000e): whom each level expands, as flat
    # candidates of its frontier.

    assert [level.tolist() for level in shape.on(torch.device("cpu"))[0]] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4],
        [0],
        [0],
        [],
    ]
    assert shape.limits == TreeConfig(26, 4, 4)
    assert path_set(grown_static(shape)) == paths_listed(EAGLE1_TREE)
    shape = StaticShape([(1, 0), (1,), (0,), (2,), (2, 1), (2, 1, 0), (1, 0)])
    assert shape.choices == ((0,), (1,), (2,), (1, 0), (2, 1), (2, 1, 0))
    assert (shape.top_k, shape.depth, shape.verify_nodes, shape.total_tokens, shape.widest) == (
        3,
        2,
        6,
        7,
        2,
    )
    expanded, kept = shape.on(torch.device("cpu"))
    assert [level.tolist() for level in expanded] == [[1, 2], [4], []]
    assert kept.tolist() == [0, 1, 2, 3, 4, 8, 10] and kept.dtype == expanded[2].dtype == torch.long
    assert StaticShape([(0,)]).widest == 1
    assert shape.on(torch.device("meta"))[1].device.type == "meta"
    scored = DraftTree.from_arrays([9, 5, 6], [-1, 0, 1], [0.0, -0.5, -1.5])
    assert scored.score.tolist() == [0.0, -0.5, -1.5] and scored.score.dtype == torch.float32
    plain = DraftTree.from_arrays([9, 5, 6], [-1, 0, 1])
    assert plain.score.tolist() == [0.0] * 3 and plain.depth.tolist() == [0, 1, 2]
    whole = DraftTree.from_arrays([9, 5, 6, 7], [-1, 0, 0, 2], [0.0, -2.0, -0.5, -1.0])
    kept = whole.select(torch.tensor([0, 2, 3]))
    assert kept.token.tolist() == [9, 6, 7] and kept.score.tolist() == [0.0, -0.5, -1.0]


def grown_static(shape: StaticShape) -> DraftTree:
    """Drafted like EAGLE-1 does: token of a child = 10 * its parent's token + its rank + 1."""
    expanded, kept = shape.on(torch.device("cpu"))
    growing, ranks = begun(0), torch.arange(shape.top_k)
    for chosen in expanded:
        tokens = growing.frontier[2][:, None] * 10 + ranks + 1
        growing.grow(tokens, -1.0 - ranks.float().expand(tokens.shape), shape.top_k, chosen)
    return growing.select(kept)


def paths_listed(choices) -> set[tuple]:
    """The same paths as sets of tokens."""
    numbers = [
        [int("".join(str(rank + 1) for rank in choice[: i + 1])) for i in range(len(choice))]
        for choice in choices
    ]
    return {(0, *path) for path in (*numbers, ())}


@QUICK
@given(st.data())
def test_any_prefix_closed_list_is_a_tree(data):
    choices = set()
    for _ in range(data.draw(st.integers(1, 12))):
        stem = data.draw(st.sampled_from([(), *sorted(choices)]))
        if len(stem) < 4:
            choices.add((*stem, data.draw(st.integers(0, 2))))
    tree = grown_static(StaticShape(data.draw(st.permutations(sorted(choices)))))
    assert path_set(tree) == paths_listed(choices)
