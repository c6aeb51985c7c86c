"""Diagrams: nothing written lies over another text or outside the page, letters can be read."""

import pytest
from fakes.notebooks import functions_of
from matplotlib.backends.backend_agg import FigureCanvasAgg

DIAGRAMS = [
    ("60_resps", "resps_trees"),
    ("60_resps", "resps_architecture"),
    ("61_ltd", "ltd_method"),
    ("62_radar", "radar_method"),
    ("63_ppow", "ppow_rewards"),
    ("63_ppow", "ppow_method"),
]


@pytest.mark.parametrize(("stem", "name"), DIAGRAMS)
def test_texts_can_be_read_and_stay_where_they_belong(stem, name):
    figure = getattr(functions_of(stem), name)()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    assert len(texts) > 8
    assert min(text.get_fontsize() for text in texts) >= 6.5
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text.get_text()
        assert sum(box.overlaps(other) for other in boxes) == 1, text.get_text()
    frames = [patch for patch in figure.axes[0].patches if "Fancy" in type(patch).__name__]
    for frame in frames:
        frame = frame.get_window_extent(canvas.get_renderer())
        for text, box in zip(texts, boxes, strict=True):
            if frame.contains((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2):
                assert frame.x0 <= box.x0 and box.x1 <= frame.x1, text.get_text()
