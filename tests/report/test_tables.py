"""Tables on rows small enough to check by eye."""

import json

import pandas as pd
import pytest
from fakes.rows import COMPARED, CYCLES

from specdec import runs
from specdec.errors import SpecdecError
from specdec.report import figures, tables

from workbook import items


def test_paper_tables_keep_their_order_and_show_no_interval_of_fewer_than_eight_prompts():
    table = tables.paper_table(COMPARED, "speedup")
    assert list(table.columns) == ["maths", "chat"] and list(table.index) == ["eagle3", "tuned"]
    assert table.loc["eagle3", "chat"] == "1.50 [1.25, 1.75]"
    assert table.loc["tuned", "chat"] == "-"
    # Neither in a paper's table, nor printed as they are, nor as whiskers.
    table = COMPARED.assign(prompts=[7, 8, 8, 8])
    few, enough = (
        tables.surely(table).iloc[[0, 1]][["speedup_low", "speedup_high"]].isna().all(axis=1)
    )
    assert few and not enough
    cell = tables.paper_table(table, "speedup").loc[table["method"][0], table["suite"][0]]
    assert cell == f"{table['speedup'][0]:.2f}"
    assert [line.split().count("-") for line in tables.markdown(table).splitlines()[2:4]] == [2, 0]
    whiskers = figures.speedup_bars(table).axes[0].containers[1].lines[2][0].get_segments()
    assert [len(points) for points in whiskers] == [0, 2], "no mark at all, and one whisker"
    table = pd.DataFrame({"p": [0.5, None], "passed": [True, None], "name": ["a", float("nan")]})
    assert tables.markdown(table).splitlines()[-1].split() == ["|", "-", "|", "-", "|", "-", "|"]


def test_tables_of_cycles_by_hand():
    split = tables.time_split(CYCLES).loc["eagle3"]
    assert split["verify_ms"] == 4.0 and split["total_ms"] == 9.0
    assert split["verify_frac"] == pytest.approx(4 / 9)
    assert sum(split[part.replace("_ms", "_frac")] for part in tables.PARTS) == pytest.approx(1)
    # Depth 1: three of four accepted. Depth 2: of the two deep trees that got there, one. Depth 3:
    # the one.
    table = tables.acceptance_by_depth(CYCLES)
    expected = {"depth": [1, 2, 3], "reached": [4, 2, 1], "acceptance_frac": [0.75, 0.5, 1.0]}
    assert table[list(expected)].to_dict("list") == expected


def test_a_latex_table_has_its_notes_below():
    lines = tables.latex_table("TABULAR", "5 % off", "tab:off", "$n = 3$").splitlines()
    assert lines[2] == "\\caption{5 \\% off}" and lines[-2].endswith("raggedright $n = 3$}")


def test_labels_stand_over_tables(home):
    run = runs.start("evaluate", {"pair": {"pair": "smollm2", "dtype": "float32", "device": "cpu"}})
    table = pd.DataFrame({"method": ["eagle3"], "tau": [4.123], "prompts": [80.0], "p": [None]})
    markdown, csv, label = tables.save(table, home / "tau", sources=[run])
    text = markdown.read_text()
    assert text.startswith("*laptop scale: smollm2 float32 on CPU*")
    assert text.splitlines()[-1].split() == "| eagle3 | 4.12 | 80 | - |".split()
    assert pd.read_csv(csv)["tau"].tolist() == [4.123]
    assert json.loads(label.read_text())["measured"][0]["key"] == run.key


def test_what_is_no_table_of_a_paper_is_refused(home, monkeypatch):
    with pytest.raises(SpecdecError, match="did you mean 'speedup'"):
        tables.paper_table(COMPARED, "speedupp")
    with pytest.raises(SpecdecError, match="two rows stand for"):
        tables.paper_table(pd.concat([COMPARED, COMPARED]), "speedup")
    monkeypatch.setattr(runs, "workbook", lambda: home)
    path = home / "figures" / "published" / "ltd_table1.csv"
    runs.write_text(path, "# comment\nmethod,tau,source,doubt\nEagle3,6.35,Table 1,\n")
    published = items.read_published("ltd", "table1")
    assert published.values.tolist() == [["Eagle3", 6.35, "Table 1", ""]]
    with pytest.raises(SpecdecError, match="did you mean 'ltd_table1'"):
        items.read_published("ltd", "tabel1")
