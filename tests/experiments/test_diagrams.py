"""Diagrams: nothing written lies over another text or outside the page, letters can be read, bytes
repeat.
"""

import re

import pytest

from experiments import diagrams


@pytest.fixture(params=diagrams.DIAGRAMS, scope="module")
def drawn(request):
    """(figure, canvas) of every diagram, drawn at the density of a page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = diagrams.draw(request.param)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return figure, canvas


def test_texts_can_be_read_and_stay_where_they_belong(drawn):
    figure, canvas = drawn
    assert figure.get_figwidth() in (5.5, 7.0)
    assert min(text.get_fontsize() for axes in figure.axes for text in axes.texts) >= 6.5
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    assert len(texts) > 8
    for text, box in zip(texts, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text.get_text()
        assert [
            other for other, place in zip(texts, boxes, strict=True) if box.overlaps(place)
        ] == [text]
    frames = [patch for patch in figure.axes[0].patches if "Fancy" in type(patch).__name__]
    frames = [frame.get_window_extent(canvas.get_renderer()) for frame in frames]
    for text in figure.axes[0].texts:
        span = text.get_window_extent(canvas.get_renderer())
        for frame in frames:
            if frame.contains((span.x0 + span.x1) / 2, (span.y0 + span.y1) / 2):
                assert frame.x0 <= span.x0 and span.x1 <= frame.x1, text.get_text()


def test_the_trees_of_the_first_figure_keep_the_limits_written_under_them():
    shown = dict(zip(("3", "5", "2"), (diagrams.FIXED, diagrams.WIDE, diagrams.DEEP), strict=True))
    written = [
        text.get_text()
        for text in diagrams.resps_trees().axes[0].texts
        if text.get_text().startswith("TT")
    ]
    for text in set(written):
        total, depth, top_k = re.findall(r"\d+", text)
        levels = shown[top_k]
        assert 1 + sum(map(len, levels)) == int(total) and len(levels) == int(depth)
        assert max(parents.count(parent) for parents in levels for parent in parents) == int(top_k)
