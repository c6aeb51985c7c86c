"""Figures: what is drawn is what the table says, files are reproducible, the scale is in the picture."""

import json

import numpy as np
import pandas as pd
import pytest
from fakes.rows import COMPARED, CYCLES

from specdec import runs
from specdec.errors import SpecdecError
from specdec.report import figures, tables


def test_bars_have_the_heights_and_intervals_of_the_table():
    figure = figures.speedup_bars(COMPARED)
    bars, _ = figure.axes[0].containers[:2]
    assert [bar.get_height() for bar in bars] == [2.0, 1.5]
    (segments,) = figure.axes[0].containers[1].lines[2]
    reach = [sorted(points[:, 1]) for points in segments.get_segments()]
    assert np.allclose(reach, [[1.9, 2.1], [1.25, 1.75]])


def test_baseline_is_left_out_and_published_is_drawn():
    published = pd.DataFrame({"suite": ["maths"], "method": ["tuned"], "speedup": [4.4]})
    axes = figures.speedup_bars(COMPARED, baseline="eagle3", published=published).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tuned"]
    diamonds = [line for line in axes.lines if line.get_marker() == "D"]
    assert 4.4 in diamonds[0].get_ydata()


def test_time_split_stacks_to_the_total():
    axes = figures.time_split(tables.time_split(CYCLES)).axes[0]
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(9.0)
    assert {"44%"} <= {text.get_text() for text in axes.texts}


def test_node_curve_draws_every_part():
    axes = figures.node_curve(tables.node_curve(CYCLES)).axes[0]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"draft", "verify", "host", "total"}


def test_node_curve_of_three_panels_covers_no_text():
    """Labels, titles and ticks of three panels, drawn, lie apart and inside the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    three = pd.concat([CYCLES.assign(context=context) for context in (64, 256, 768)])
    figure = figures.node_curve(tables.node_curve(three, by="context"), by="context", title="one cycle")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [figure._supxlabel, figure._suptitle]
    texts += [text for axes in figure.axes for text in (axes.xaxis.label, axes.yaxis.label, axes.title)]
    texts += [text for axes in figure.axes for text in axes.get_xticklabels()]
    texts = [text for text in texts if text.get_visible() and text.get_text()]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    assert [text.get_text() for text in texts].count("tokens verified in one forward") == 1
    assert [axes.get_title() for axes in figure.axes] == ["context 64", "context 256", "context 768"]
    for number, box in enumerate(boxes):
        for other, text in zip(boxes[number + 1 :], texts[number + 1 :], strict=True):
            assert not box.overlaps(other), (texts[number].get_text(), text.get_text())
        assert box.y0 >= 0 and box.y1 <= figure.bbox.y1, texts[number].get_text()


def test_files_are_reproducible_and_say_where_they_come_from(home):
    run = runs.start("evaluate", {})
    saved = []
    for name in ("one", "two"):
        figure = figures.speedup_bars(COMPARED)
        saved.append(figures.save(figure, home / name / "fig3", scale="laptop", sources=[run], data=COMPARED))
    assert [path.suffix for path in saved[0]] == [".svg", ".pdf", ".png", ".csv", ".json"]
    for first, second in zip(*saved, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.suffix
    svg = (home / "one" / "fig3.svg").read_text()
    assert ">laptop scale<" in svg and run.key in svg
    assert run.key.encode() in (home / "one" / "fig3.png").read_bytes()
    assert json.loads((home / "one" / "fig3.json").read_text())["runs"] == [run.label()]


def test_paper_scale_is_not_marked(home):
    paths = figures.save(figures.speedup_bars(COMPARED), home / "fig3", scale="paper")
    assert "laptop scale" not in paths[0].read_text()


def test_nothing_to_draw_is_said():
    with pytest.raises(SpecdecError, match="nothing to draw"):
        figures.tau_bars(COMPARED.assign(tau=np.nan))


def test_curves_draw_one_line_per_name_and_panel():
    table = pd.DataFrame(
        {
            "step": [1, 2, 1, 2, 1],
            "loss": [4.0, 2.0, 9.0, 3.0, 5.0],
            "model": ["target"] * 2 + ["drafter"] * 3,
            "seed": [0, 0, 0, 0, 1],
        }
    )
    axes = figures.curves(table, "step", "loss", by="seed", panel="model", labels=("steps done", "loss")).axes
    assert [axis.get_title() for axis in axes] == ["target", "drafter"] and axes[0].get_xlabel() == "steps done"
    assert [line.get_ydata().tolist() for line in axes[1].lines] == [[9.0, 3.0], [5.0]]
    with pytest.raises(SpecdecError, match="did you mean 'loss'"):
        figures.curves(table, "step", "los", by="seed")
