"""The picture of a tree: places by hand, well-formed text, nothing of a token taken as markup."""

from xml.etree import ElementTree

import pytest

from specdec.report import treeview

# 0 ─┬─ 1 ─┬─ 3      depth 0 1 2
#    │     └─ 4
#    └─ 2
PARENTS = [-1, 0, 0, 1, 1]


def test_places_by_hand():
    depth, row = treeview.places(PARENTS)
    assert depth == [0, 1, 1, 2, 2]
    assert row == [1.25, 0.5, 2.0, 0.0, 1.0]


def test_a_long_chain_needs_no_recursion():
    depth, row = treeview.places([-1, *range(3000)])
    assert depth[-1] == 3000 and set(row) == {0.0}


def boxes(picture: str) -> list:
    root = ElementTree.fromstring(picture)
    return [group for group in root.iter("{http://www.w3.org/2000/svg}g")]


def test_every_node_is_drawn_and_the_path_is_filled():
    picture = treeview.svg(["a", "b", "c", "d", "e"], PARENTS, scores=[0, -0.1, -2, -0.2, -3], accepted=[0, 1, 4])
    drawn = boxes(picture)
    assert [group.get("data-node") for group in drawn] == ["0", "1", "2", "3", "4"]
    filled = [group.get("data-node") for group in drawn if group[1].get("fill") != "white"]
    assert filled == ["0", "1", "4"]
    assert picture.count("<path") == 4
    assert picture == treeview.svg(
        ["a", "b", "c", "d", "e"], PARENTS, scores=[0, -0.1, -2, -0.2, -3], accepted=[0, 1, 4]
    )


def test_no_two_boxes_overlap():
    parents = [-1] + [0] * 4 + [1] * 4 + [2] * 4 + [5] * 3
    spots = set(zip(*treeview.places(parents), strict=True))
    assert len(spots) == len(parents)


def test_tokens_are_text_not_markup():
    drawn = boxes(treeview.svg(["<script>&", " x\n", "\x0e\x00"], [-1, 0, 1]))
    assert [group[2].text for group in drawn] == ["<script>&", "␣x⏎", "··"]


@pytest.mark.parametrize(
    ("tokens", "parents", "options"),
    [
        ([], [], {}),
        (["a", "b"], [-1], {}),
        (["a", "b"], [-1, 1], {}),
        (["a", "b"], [0, -1], {}),
        (["a"], [-1], {"accepted": [1]}),
        (["a"], [-1], {"scores": [0, 1]}),
    ],
)
def test_what_is_not_a_tree_is_refused(tokens, parents, options):
    with pytest.raises(AssertionError):
        treeview.svg(tokens, parents, **options)
