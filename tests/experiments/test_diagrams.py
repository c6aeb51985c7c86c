"""Diagrams: nothing written lies over another text or outside the page, letters can be read, bytes repeat."""

import re

import pytest

from experiments import diagrams


@pytest.fixture(params=diagrams.DIAGRAMS, scope="module")
def drawn(request):
    """(item, figure, canvas) of every diagram, drawn at the density of a page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = diagrams.draw(request.param)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return request.param, figure, canvas


def test_no_text_covers_another_or_leaves_the_page(drawn):
    _, figure, canvas = drawn
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    assert len(texts) > 8
    for number, (text, box) in enumerate(zip(texts, boxes, strict=True)):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text.get_text()
        for other, name in zip(boxes[number + 1 :], texts[number + 1 :], strict=True):
            assert not box.overlaps(other), (text.get_text(), name.get_text())


def test_it_fits_the_page_and_can_be_read(drawn):
    _, figure, _ = drawn
    assert figure.get_figwidth() in (5.5, 7.0)
    assert min(text.get_fontsize() for axes in figure.axes for text in axes.texts) >= 6.5


def test_texts_stay_inside_their_boxes(drawn):
    _, figure, canvas = drawn
    page = figure.axes[0]
    boxes = [patch for patch in page.patches if "Fancy" in type(patch).__name__]
    spans = [box.get_window_extent(canvas.get_renderer()) for box in boxes]
    for text in page.texts:
        span = text.get_window_extent(canvas.get_renderer())
        centre = (span.x0 + span.x1) / 2, (span.y0 + span.y1) / 2
        for box in spans:
            if box.contains(*centre):
                assert box.x0 <= span.x0 and span.x1 <= box.x1, text.get_text()


def test_the_trees_of_the_first_figure_keep_the_limits_written_under_them():
    shown = dict(zip(("3", "5", "2"), (diagrams.FIXED, diagrams.WIDE, diagrams.DEEP), strict=True))
    written = [text.get_text() for text in diagrams.resps_trees().axes[0].texts if text.get_text().startswith("TT")]
    for text in set(written):
        total, depth, top_k = re.findall(r"\d+", text)
        levels = shown[top_k]
        assert 1 + sum(map(len, levels)) == int(total) and len(levels) == int(depth)
        assert max(parents.count(parent) for parents in levels for parent in parents) == int(top_k)
