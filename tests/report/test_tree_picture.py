"""The picture of a tree: places by hand, well-formed text, nothing of a token taken as markup."""

from xml.etree import ElementTree

import pytest

from specdec.report import explorer_panels as panels
from specdec.report import figures

from workbook import pictures

# 0 ─┬─ 1 ─┬─ 3      depth 0 1 2
#    │     └─ 4
#    └─ 2
PARENTS = [-1, 0, 0, 1, 1]


def test_places_by_hand_and_what_is_not_a_tree():
    assert panels.places(PARENTS) == ([0, 1, 1, 2, 2], [1.25, 0.5, 2.0, 0.0, 1.0])
    depth, row = panels.places([-1, *range(3000)])
    assert depth[-1] == 3000 and set(row) == {0.0}, "a long chain needs no recursion"
    parents = [-1] + [0] * 4 + [1] * 4 + [2] * 4 + [5] * 3
    spots = set(zip(*panels.places(parents), strict=True))
    assert len(spots) == len(parents), "no two boxes overlap"
    for tokens, parents, options in (
        ([], [], {}),
        (["a", "b"], [-1], {}),
        (["a", "b"], [-1, 1], {}),
        (["a", "b"], [0, -1], {}),
        (["a"], [-1], {"accepted": [1]}),
        (["a"], [-1], {"scores": [0, 1]}),
    ):
        pytest.raises(AssertionError, pictures.tree, tokens, parents, **options)


def boxes(figure) -> dict[str, object]:
    return {text.get_gid(): text for text in figure.axes[0].texts}


def test_every_node_is_drawn_and_the_path_is_filled_with_text_not_markup(home):
    def drawn():
        return pictures.tree(
            ["a", "b", "c", "d", "e"], PARENTS, scores=[0, -0.1, -2, -0.2, -3], accepted=[0, 1, 4]
        )

    figure = drawn()
    assert [text.get_text() for text in boxes(figure).values()] == ["a", "b", "c", "d", "e"]
    filled = [
        name
        for name, text in boxes(figure).items()
        if text.get_bbox_patch().get_facecolor()[:3] != (1, 1, 1)
    ]
    assert filled == ["node-0", "node-1", "node-4"] and len(figure.axes[0].lines) == 4
    darkness = [text.get_bbox_patch().get_edgecolor()[3] for text in boxes(figure).values()]
    assert darkness[0] == 1 and darkness[1] > darkness[3] > darkness[2] > darkness[4]
    first, second = (
        figures.save(one, home / name / "tree")[:3] for name, one in (("a", figure), ("b", drawn()))
    )
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    figure = pictures.tree(["<script>&", " x\n", "\x0e\x00", "$x^2$"], [-1, 0, 1, 2])
    assert [text.get_text() for text in boxes(figure).values()] == [
        "<script>&",
        "␣x⏎",
        "··",
        "$x^2$",
    ]
    svg = figures.save(figure, home / "tree")[0].read_text()
    assert "&lt;script&gt;&amp;" in svg and "$x^2$" in svg
    ElementTree.fromstring(svg)
