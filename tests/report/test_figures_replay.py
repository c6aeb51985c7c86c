"""Figures of recordings: every line, mark and band is what the table says."""

import numpy as np
import pandas as pd
import pytest
from fakes.traces import round_costs, synthetic_trace

from specdec.errors import SpecdecError
from specdec.replays.static_trees import static_grid
from specdec.report import figures
from specdec.report.figures import depth_and_size, intervals, predicted_measured, speed_surface

GRID = static_grid(synthetic_trace(top_ks=(2, 3)), round_costs(), [2, 4, 8, 16], range(5))
CHECK = pd.DataFrame(
    {"method": ["default", "tuned", "8,2,3"], "predicted_ms": [6.0, 4.0, 5.0], "measured_ms": [6.2, 4.1, 4.6]}
)


def test_curves_over_depth_and_size():
    wide = GRID[GRID["top_k"] == 3]
    left, right = wide[wide["total_tokens"].isin([4, 16])], wide[wide["depth"].isin([1, 2, 4])]
    figure = depth_and_size(left, right, "tau", label="tokens per cycle (tau)")
    by_depth, by_size = figure.axes
    assert [line.get_label() for line in by_depth.lines] == ["4", "16"]
    assert [line.get_label() for line in by_size.lines] == ["1", "2", "4"]
    rows = left[left["total_tokens"] == 16].sort_values("depth")
    np.testing.assert_array_equal(by_depth.lines[1].get_xdata(), rows["depth"])
    np.testing.assert_array_equal(by_depth.lines[1].get_ydata(), rows["tau"])
    rows = right[right["depth"] == 2].sort_values("total_tokens")
    np.testing.assert_array_equal(by_size.lines[1].get_ydata(), rows["tau"])
    highest = max(left["tau"].max(), right["tau"].max())
    assert all(axes.get_ylim()[1] > highest and axes.get_ylim()[0] == 0 for axes in figure.axes), "cut off"
    assert by_depth.get_ylabel() == "tokens per cycle (tau)" and by_size.get_xlabel() == "tree size (tokens)"


def test_the_same_lines_are_named_once():
    left, right = (
        pd.DataFrame({x: [1, 2], "ms": [1.0, high], "after": "64"}) for x, high in (("depth", 2), ("total_tokens", 9))
    )
    figure = depth_and_size(left, right, "ms", label="ms", lines=("after", "after"))
    assert [axes.get_legend() is None for axes in figure.axes] == [True, False]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() == (0, pytest.approx(9.45))


def test_the_surface_shows_the_best_width_and_every_mark():
    figure = speed_surface(GRID, {"default": (4, 16), "tuned": (1, 4), "clairvoyant (mean)": (2.5, 6.4)})
    axes, bar = figure.axes
    best = GRID.groupby(["total_tokens", "depth"])["speedup"].max()
    low, high = axes.collections[0].get_clim()
    assert low <= best.min() + 0.1 and high >= best.max() - 0.1
    places = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
    assert places == {"default": (4, 16), "tuned": (1, 4), "clairvoyant (mean)": (2.5, 6.4)}
    assert [text.get_text() for text in axes.get_yticklabels()] == ["2", "4", "8", "16"]
    assert axes.get_yscale() == "log" and bar.get_ylabel() == "times as fast as plain decoding"


def test_predictions_are_drawn_over_measurements(home):
    figure = predicted_measured(CHECK)
    axes = figure.axes[0]
    points = next(line for line in axes.lines if line.get_marker() == "o")
    np.testing.assert_array_equal(points.get_xdata(), CHECK["predicted_ms"])
    np.testing.assert_array_equal(points.get_ydata(), CHECK["measured_ms"])
    assert [text.get_text() for text in axes.texts] == CHECK["method"].tolist()
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1] / band[:, 0]).max() == pytest.approx(1.1) and (band[:, 1] / band[:, 0]).min() == pytest.approx(
        0.9
    )
    saved = figures.save(figure, home / "check", scale="laptop", data=CHECK)
    assert "laptop scale" in saved[0].read_text()


def test_bad_tables_are_refused():
    with pytest.raises(SpecdecError, match="unknown column 'taus'"):
        depth_and_size(GRID, GRID, "taus", label="tau")
    with pytest.raises(SpecdecError, match="two or more depths and sizes"):
        speed_surface(GRID[GRID["depth"] == 1], {})
    with pytest.raises(SpecdecError, match="no rows"):
        predicted_measured(CHECK[:0])


def test_intervals_show_every_row():
    table = pd.DataFrame(
        {
            "choice": ["a", "b", "c"],
            "gain": [1.1, 0.9, 1.0],
            "low": [1.0, 0.8, 0.9],
            "high": [1.2, 1.0, 1.1],
            "of": list("xxy"),
        }
    )
    figure = intervals(table, "choice", "gain", panel="of", label="speed", title="choices")
    first, second = figure.axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["a", "b"] and first.get_title(loc="left") == "x"
    assert first.lines[0].get_xdata().tolist() == [1.1, 0.9] and second.lines[0].get_xdata().tolist() == [1.0]
    assert first.lines[0].get_ydata().tolist() == [1, 0], "the first row is the topmost"
    reach = first.collections[0].get_segments()
    assert [segment[:, 0].tolist() for segment in reach] == [[1.0, 1.2], [0.8, 1.0]]
    assert second.get_xlabel() == "speed" and len(intervals(table, "choice", "gain").axes) == 1
    with pytest.raises(SpecdecError, match="high"):
        intervals(table.drop(columns="high"), "choice", "gain")
