"""The picture of a tree: places by hand, well-formed text, nothing of a token taken as markup."""

from xml.etree import ElementTree

from specdec.report import explorer_panels as panels
from specdec.report import figures

from workbook import pictures

# 0 ─┬─ 1 ─┬─ 3      depth 0 1 2
#    │     └─ 4
#    └─ 2
PARENTS = [-1, 0, 0, 1, 1]


def test_places_by_hand():
    assert panels.places(PARENTS) == ([0, 1, 1, 2, 2], [1.25, 0.5, 2.0, 0.0, 1.0])
    parents = [-1] + [0] * 4 + [1] * 4 + [2] * 4 + [5] * 3
    spots = set(zip(*panels.places(parents), strict=True))
    assert len(spots) == len(parents), "no two boxes overlap"


def test_every_node_is_drawn_and_the_path_is_filled(home):
    figure = pictures.tree(
        list("abcde"), PARENTS, scores=[0, -0.1, -2, -0.2, -3], accepted=[0, 1, 4]
    )
    texts = figure.axes[0].texts
    assert [text.get_text() for text in texts] == list("abcde")
    assert len(figure.axes[0].lines) == 4
    fills = [text.get_bbox_patch().get_facecolor()[:3] for text in texts]
    assert [fill != (1, 1, 1) for fill in fills] == [True, True, False, False, True]
    darkness = [text.get_bbox_patch().get_edgecolor()[3] for text in texts]
    assert darkness[0] == 1
    assert darkness[1] > darkness[3] > darkness[2] > darkness[4]


def test_nothing_of_a_token_is_markup(home):
    figure = pictures.tree(["<script>&", " x\n", "\x0e\x00", "$x^2$"], [-1, 0, 1, 2])
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words == ["<script>&", "␣x⏎", "··", "$x^2$"]
    svg = figures.save(figure, home / "tree")[0].read_text()
    assert "&lt;script&gt;&amp;" in svg
    assert "$x^2$" in svg
    ElementTree.fromstring(svg)
