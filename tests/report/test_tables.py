"""Tables on rows small enough to check by eye."""

import json

import pandas as pd
import pytest
from fakes.rows import COMPARED, CYCLES

from specdec import runs
from specdec.errors import SpecdecError
from specdec.report import figures, tables

from workbook import items


def test_paper_table_keeps_the_order_and_prints_intervals():
    table = tables.paper_table(COMPARED, "speedup")
    assert list(table.columns) == ["maths", "chat"] and list(table.index) == ["eagle3", "tuned"]
    assert table.loc["eagle3", "chat"] == "1.50 [1.25, 1.75]"
    assert table.loc["tuned", "chat"] == "-"


def test_intervals_of_fewer_than_four_prompts_are_not_shown():
    """Neither in a paper's table, nor printed as they are, nor as whiskers."""
    table = COMPARED.assign(prompts=[2, 4, 4, 4])
    few, enough = tables.surely(table).iloc[[0, 1]][["speedup_low", "speedup_high"]].isna().all(axis=1)
    assert few and not enough
    cell = tables.paper_table(table, "speedup").loc[table["method"][0], table["suite"][0]]
    assert cell == f"{table['speedup'][0]:.2f}"
    assert [line.split().count("-") for line in tables.markdown(table).splitlines()[2:4]] == [2, 0]
    whiskers = figures.speedup_bars(table).axes[0].containers[1].lines[2][0].get_segments()
    assert [bool(points[0, 1] == points[1, 1]) for points in whiskers] == [True, False]


def test_published_numbers_stand_in_their_own_column():
    published = pd.DataFrame({"suite": ["maths", "maths"], "method": ["eagle3", "medusa"], "speedup": [4.4, 2.1]})
    table = tables.paper_table(COMPARED, "speedup", published=published, digits=1)
    assert list(table.columns) == ["maths", "maths (published)", "chat"]
    assert table.loc["eagle3", "maths (published)"] == "4.4" and table.loc["eagle3", "maths"] == "2.0 [1.9, 2.1]"
    assert table.loc["medusa"].tolist() == ["-", "2.1", "-"]
    assert table.loc["tuned", "maths (published)"] == "-"


def test_tables_of_cycles_by_hand():
    split = tables.time_split(CYCLES).loc["eagle3"]
    assert split["verify_ms"] == 4.0 and split["total_ms"] == 9.0
    assert split["verify_frac"] == pytest.approx(4 / 9)
    assert sum(split[part.replace("_ms", "_frac")] for part in tables.PARTS) == pytest.approx(1)
    curve = tables.node_curve(CYCLES)
    assert curve["verified_tok"].tolist() == [30, 60] and curve["total_ms"].tolist() == [8.0, 10.0]
    assert curve["cycles"].tolist() == [2, 2]
    # Depth 1: three of four accepted. Depth 2: of the two deep trees that got there, one. Depth 3: the one.
    table = tables.acceptance_by_depth(CYCLES)
    expected = {"depth": [1, 2, 3], "reached": [4, 2, 1], "acceptance_frac": [0.75, 0.5, 1.0]}
    assert table[list(expected)].to_dict("list") == expected


def test_the_label_stands_over_the_table(home):
    run = runs.start("evaluate", {"pair": {"pair": "smollm2", "dtype": "float32", "device": "cpu"}})
    table = pd.DataFrame({"method": ["eagle3"], "tau": [4.123], "prompts": [80.0], "p_value": [float("nan")]})
    markdown, csv, label = tables.save(table, home / "tau", sources=[run])
    text = markdown.read_text()
    assert text.startswith("*laptop scale: smollm2 float32 on CPU*")
    assert "| eagle3" in text and "4.12" in text and "| 80 " in text
    assert pd.read_csv(csv)["tau"].tolist() == [4.123]
    assert json.loads(label.read_text())["measured"][0]["key"] == run.key


OURS = pd.DataFrame(
    [("maths", "eagle3", "small", 2.0), ("maths", "ours", "small", 2.5), ("chat", "eagle3", "small", 1.5)],
    columns=["suite", "method", "pair", "speedup"],
).assign(speedup_low=1.25, speedup_high=3.0)
THEIRS = pd.DataFrame(
    [("maths", "eagle3", "Big-8B", 4.4, "Table 1", ""), ("maths", "medusa", "Big-8B", 2.1, "Table 1", "same as 13B"),
     ("maths", "hydra", "Big-8B", float("nan"), "Table 1", ""), ("maths", "eagle3", "Big-13B", 3.8, "Table 1", "")],
    columns=["suite", "method", "target", "speedup", "source", "doubt"],
)  # fmt: skip


def test_measured_and_published_stand_side_by_side():
    table = tables.beside(OURS, THEIRS, "speedup", how={"medusa": "write it first"})
    big = ["maths, Big-8B (published)", "maths, Big-13B (published)"]
    assert list(table.columns) == ["maths, small", *big, "chat, small", "how"]
    assert list(table.index) == ["eagle3", "ours", "medusa", "hydra"] and table.index.name == "method"
    assert table.loc["eagle3"].tolist() == ["2.00 [1.25, 3.00]", "4.40", "3.80", "1.50 [1.25, 3.00]", ""]
    assert table.loc["ours"].tolist() == ["2.50 [1.25, 3.00]", "-", "-", "-", ""]
    assert table.loc["medusa"].tolist() == [tables.NOT_HERE, "2.10", "-", tables.NOT_HERE, "write it first"]
    assert table.attrs["rows"] == {"measured": 2, "published_only": 1, "not_measured": 1}
    assert table.attrs["missing"] == ["medusa", "hydra"] and table.attrs["doubts"] == ["same as 13B"]
    table = tables.beside(OURS, THEIRS, "speedup", rows=["suite", "method"], columns=[], digits=1)
    assert list(table.columns) == ["small", "Big-8B (published)", "Big-13B (published)"]
    assert table.loc["maths, ours"].tolist() == ["2.5 [1.2, 3.0]", "-", "-"] and table.index.name == "suite, method"
    table = tables.beside(None, THEIRS, "speedup", how="on a cluster")
    assert set(table["measured"]) == {tables.NOT_HERE} and set(table["how"]) == {"on a cluster"}
    assert table.attrs["rows"] == {"measured": 0, "published_only": 2, "not_measured": 1}
    pytest.raises(SpecdecError, tables.beside, None, None, "speedup").match("neither measured nor published")
    twice = pd.concat([OURS, OURS])
    pytest.raises(SpecdecError, tables.beside, twice, None, "speedup").match("two rows stand for")


def test_published_numbers_say_where_they_stand(home, monkeypatch):
    monkeypatch.setattr(runs, "workbook", lambda: home)
    path = home / "figures" / "published" / "ltd_table1.csv"
    runs.write_text(path, "# comment\nmethod,tau,source,doubt\nEagle3,6.35,Table 1,\n")
    assert items.read_published("ltd", "table1").values.tolist() == [["Eagle3", 6.35, "Table 1", ""]]
    pytest.raises(SpecdecError, items.read_published, "ltd", "tabel1").match("did you mean 'ltd_table1'")
    runs.write_text(path, "method,tau,source\nEagle3,6.35,Table 1\n")
    pytest.raises(SpecdecError, items.read_published, "ltd", "table1").match("unknown column 'doubt'")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tables.paper_table(COMPARED, "speedupp"), "did you mean 'speedup'"),
        (lambda: tables.paper_table(pd.concat([COMPARED, COMPARED]), "speedup"), "two rows stand for"),
        (lambda: tables.time_split(CYCLES.drop(columns="host_ms")), "unknown column 'host_ms'"),
        (lambda: items.read_published("ltd", "no-such-table"), "unknown published table"),
    ],
)
def test_bad_input(call, message):
    pytest.raises(SpecdecError, call).match(message)


def test_what_is_missing_is_a_dash_in_every_column():
    table = pd.DataFrame({"p": [0.5, None], "passed": [True, None], "name": ["a", float("nan")]})
    assert tables.markdown(table).splitlines()[-1].split() == ["|", "-", "|", "-", "|", "-", "|"]
