"""Tables on rows small enough to check by eye."""

import json

import pandas as pd
import pytest
from fakes.rows import COMPARED, CYCLES

from specdec import runs
from specdec.errors import SpecdecError
from specdec.report import tables


def test_paper_table_keeps_the_order_and_prints_intervals():
    table = tables.paper_table(COMPARED, "speedup")
    assert list(table.columns) == ["maths", "chat"] and list(table.index) == ["eagle3", "tuned"]
    assert table.loc["eagle3", "chat"] == "1.50 [1.25, 1.75]"
    assert table.loc["tuned", "chat"] == "-"


def test_published_numbers_stand_in_their_own_column():
    published = pd.DataFrame({"suite": ["maths", "maths"], "method": ["eagle3", "medusa"], "speedup": [4.4, 2.1]})
    table = tables.paper_table(COMPARED, "speedup", published=published, digits=1)
    assert list(table.columns) == ["maths", "maths (published)", "chat"]
    assert table.loc["eagle3", "maths (published)"] == "4.4" and table.loc["eagle3", "maths"] == "2.0 [1.9, 2.1]"
    assert table.loc["medusa"].tolist() == ["-", "2.1", "-"]
    assert table.loc["tuned", "maths (published)"] == "-"


def test_time_split_adds_up():
    split = tables.time_split(CYCLES).loc["eagle3"]
    assert split["verify_ms"] == 4.0 and split["total_ms"] == 9.0
    assert split["verify_frac"] == pytest.approx(4 / 9)
    assert sum(split[part.replace("_ms", "_frac")] for part in tables.PARTS) == pytest.approx(1)


def test_acceptance_by_depth_by_hand():
    """Depth 1: three of four accepted. Depth 2: of the two deep trees that got there, one. Depth 3: the one."""
    table = tables.acceptance_by_depth(CYCLES)
    assert table["depth"].tolist() == [1, 2, 3]
    assert table["reached"].tolist() == [4, 2, 1]
    assert table["acceptance_frac"].tolist() == [0.75, 0.5, 1.0]


def test_node_curve_takes_medians():
    curve = tables.node_curve(CYCLES)
    assert curve["verified_tok"].tolist() == [30, 60] and curve["total_ms"].tolist() == [8.0, 10.0]
    assert curve["cycles"].tolist() == [2, 2]


def test_markdown_says_laptop_scale(home):
    run = runs.start("evaluate", {})
    table = pd.DataFrame({"method": ["eagle3"], "tau": [4.123], "prompts": [80.0], "p_value": [float("nan")]})
    markdown, csv, label = tables.save(table, home / "tau", scale="laptop", sources=[run])
    text = markdown.read_text()
    assert text.startswith("*laptop scale*") and "| eagle3" in text and "4.12" in text and "| 80 " in text
    assert pd.read_csv(csv)["tau"].tolist() == [4.123]
    assert json.loads(label.read_text())["runs"] == [run.label()]
    assert "laptop" not in tables.save(table, home / "tau2", scale="paper")[0].read_text()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tables.paper_table(COMPARED, "speedupp"), "did you mean 'speedup'"),
        (lambda: tables.paper_table(pd.concat([COMPARED, COMPARED]), "speedup"), "two rows stand for"),
        (lambda: tables.time_split(CYCLES.drop(columns="host_ms")), "unknown column 'host_ms'"),
        (lambda: tables.read_published("ltd", "no-such-table"), "unknown published table"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(SpecdecError, match=message):
        call()
