"""Figures: what is drawn is what the table says, files are reproducible, the scale is in the
picture.
"""

import json

import numpy as np
import pandas as pd
import pytest
from fakes.rows import COMPARED, CYCLES
from fakes.traces import round_costs, synthetic_trace

from specdec import machine, runs
from specdec.errors import SpecdecError
from specdec.replays.static_trees import static_grid
from specdec.report import figures, tables

from workbook import pictures


def test_bars_have_the_heights_of_the_table():
    axes = figures.speedup_bars(COMPARED).axes[0]
    assert [bar.get_height() for bar in axes.containers[0]] == [2.0, 1.5]
    (segments,) = axes.containers[1].lines[2]
    reach = [sorted(points[:, 1]) for points in segments.get_segments()]
    assert np.allclose(reach, [[1.9, 2.1], [1.25, 1.75]])
    axes = figures.speedup_bars(COMPARED, baseline="eagle3").axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tuned"]
    few = figures.speedup_bars(COMPARED.assign(prompts=3)).axes[0]
    assert few.get_xticklabels()[0].get_text().endswith("\nn = 3")
    axes = figures.time_split(tables.time_split(CYCLES)).axes[0]
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(9.0)
    assert "44%" in {text.get_text() for text in axes.texts}


def test_files_are_reproducible_and_say_where_they_come_from(home):
    run = runs.start("evaluate", {"pair": {"pair": "smollm2", "dtype": "float32", "device": "cpu"}})
    saved = []
    for name in ("one", "two"):
        figure = figures.speedup_bars(COMPARED)
        saved.append(figures.save(figure, home / name / "fig3", sources=[run], data=COMPARED))
    assert [path.suffix for path in saved[0]] == [".svg", ".pdf", ".png", ".csv", ".json"]
    for first, second in zip(*saved, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.suffix
    svg = (home / "one" / "fig3.svg").read_text()
    assert ">laptop scale: smollm2 float32 on CPU<" in svg and run.key in svg
    assert run.key.encode() in (home / "one" / "fig3.png").read_bytes()
    (row,) = json.loads((home / "one" / "fig3.json").read_text())["measured"]
    assert row["key"] == run.key and row["machine"] == machine.hardware()["cpu"]


def test_curves_draw_one_line_per_name_and_panel():
    rows = [(1, 4.0, "target", 0), (2, 2.0, "target", 0), (1, 9.0, "drafter", 0)]
    rows += [(2, 3.0, "drafter", 0), (1, 5.0, "drafter", 1)]
    table = pd.DataFrame(rows, columns=["step", "loss", "model", "seed"])
    look = dict(by="seed", panel="model", labels=("steps done", "loss"))
    axes = figures.curves(table, "step", "loss", **look).axes
    assert [panel.get_title(loc="left") for panel in axes] == ["target", "drafter"]
    assert [panel.get_xlabel() for panel in axes] == ["steps done"] * 2
    # at the ends, from below
    assert [text.get_text() for text in axes[1].texts] == ["seed 0", "seed 1", "b"]
    assert [line.get_ydata().tolist() for line in axes[1].lines] == [[9.0, 3.0], [5.0]]
    for wrong, right in (("los", "loss"), ("sead", "seed"), ("modell", "model")):
        columns = [wrong if name == right else name for name in ("loss", "seed", "model")]
        with pytest.raises(SpecdecError, match=f"did you mean '{right}'"):
            figures.curves(table, "step", columns[0], by=columns[1], panel=columns[2])


GRID = static_grid(synthetic_trace(top_ks=(2, 3)), round_costs(), [2, 4, 8, 16], range(5))
METHODS = ["default", "tuned", "8,2,3"]


def test_curves_over_depth_and_size_name_the_same_lines_once():
    wide = GRID[GRID["top_k"] == 3]
    left, right = wide[wide["total_tokens"].isin([4, 16])], wide[wide["depth"].isin([1, 2, 4])]
    figure = pictures.depth_and_size(left, right, "tau", label="tokens per cycle (tau)")
    by_depth, by_size = figure.axes
    assert [line.get_label() for line in by_depth.lines] == ["4 tokens", "16 tokens"]
    assert [line.get_label() for line in by_size.lines] == ["depth 1", "depth 2", "depth 4"]
    rows = left[left["total_tokens"] == 16].sort_values("depth")
    np.testing.assert_array_equal(by_depth.lines[1].get_ydata(), rows["tau"])
    rows = right[right["depth"] == 2].sort_values("total_tokens")
    np.testing.assert_array_equal(by_size.lines[1].get_ydata(), rows["tau"])


def test_intervals_show_every_row():
    rows = [("a", 1.1, 1.0, 1.2, "x"), ("b", 0.9, 0.8, 1.0, "x"), ("c", 1.0, 0.9, 1.1, "y")]
    table = pd.DataFrame(rows, columns=["choice", "gain", "low", "high", "of"])
    figure = pictures.intervals(table, "choice", "gain", panel="of", label="speed")
    first, second = figure.axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["a", "b"]
    assert first.get_title(loc="left") == "x"
    assert first.lines[0].get_xdata().tolist() == [1.1, 0.9]
    assert second.lines[0].get_xdata().tolist() == [1.0]
    assert first.yaxis_inverted(), "the first row is the topmost"
    reach = first.collections[0].get_segments()
    assert [segment[:, 0].tolist() for segment in reach] == [[1.0, 1.2], [0.8, 1.0]]
