"""The 47 items: all listed once, saved with where they come from, byte for byte alike."""

import json

import pandas as pd
import pytest

from specdec import runs
from specdec.errors import SpecdecError
from specdec.report import figures

from workbook import items
from workbook.paper_table import PaperTable

COUNTS = {"resps": (8, 3), "ltd": (11, 7), "radar": (2, 2), "ppow": (10, 4)}
BARS = pd.DataFrame({"suite": ["laptop/nq"], "method": ["plain"], "speedup": [1.5]})
TABLE = pd.DataFrame({"method": ["50% & more"], "speedup": [1.0625]}).set_index("method")


@pytest.fixture
def run(home) -> runs.Run:
    pair = {"pair": "smollm2", "dtype": "float32", "device": "cpu"}
    run = runs.start("evaluate", {"pair": pair, "seed": 0})
    prompts = {"suite": ["laptop/nq"], "prompt": ["a"], "method": ["plain"]}
    run.write_table("prompts", pd.DataFrame(prompts))
    return run.finish()


def test_every_table_and_figure_of_the_four_papers_is_listed():
    expected = []
    for paper, counts in COUNTS.items():
        for kind, count in zip(("table", "figure"), counts, strict=True):
            expected += [f"{paper}/{kind}{number}" for number in range(1, count + 1)]
    assert list(items.read_items()) == expected and len(expected) == 47


def test_a_table_is_saved_in_several_ways_with_its_provenance(run):
    paths = items.save("resps/table1", TABLE, sources=[run], missing=["Medusa"])
    assert [path.suffix for path in paths] == [".md", ".csv", ".tex", ".json"]
    assert paths[0] == runs.figure_path("resps", "table1").with_suffix(".md")
    first = [path.read_bytes() for path in paths]
    again = items.save("resps/table1", TABLE, sources=[run], missing=["Medusa"])
    assert first == [path.read_bytes() for path in again]
    tex, facts = first[2].decode(), json.loads(first[3])
    assert r"50\% \& more" in tex and "laptop scale: smollm2 float32 on CPU" in tex
    assert facts["item"] == "resps/table1" and facts["missing"] == ["Medusa"]
    assert facts["rows"] == {"measured": 1} and facts["scale"] == "laptop"
    assert facts["measured"][0]["suites"] == ["laptop/nq"]


def test_a_papers_table_says_what_is_missing_and_in_doubt(run):
    theirs = LONG.drop(columns="pair").assign(target="8B", row="Hydra", doubt="printed twice")
    content = PaperTable.of(LONG, theirs)
    markdown, _, _, label = items.save("resps/table1", content, sources=[run])
    facts = json.loads(label.read_text())
    assert facts["rows"] == {"measured": 1, "published_only": 1, "not_measured": 0}
    assert facts["missing"] == ["Hydra"] and facts["doubts"] == ["printed twice"]
    assert "(a) printed twice" in markdown.read_text()


LONG = pd.DataFrame({"pair": "smollm2", "row": ["eagle3"], "column": "speed", "value": [2.0]})


def test_runs_are_found_by_what_was_measured(home, run):
    def here(**facts):  # beside the published ones
        found = items.measured("evaluate", **facts)
        return [one for one in found if one.directory.is_relative_to(home)]

    assert here(pair="smollm2", dtype="float32") == here(seed=None) == [run]
    assert here(pair="small") == []
    parameters = {"pair": "small", "dtype": "float32", "drafter": "griffin"}
    other = runs.start("raced", {"parameters": parameters}).finish()
    assert items.measured("raced", pair="small") == []
    assert items.measured("raced", pair="small", drafter="griffin") == [other]
    pytest.raises(SpecdecError, items.save, "resps/tabel1", TABLE).match("'resps/table1'")


def test_all_items_are_listed_and_say_what_is_there(run):
    assert set(items.status()["state"]) == {items.NOT_MEASURED} and len(items.status()) == 47
    items.save("resps/table1", TABLE, sources=[run], missing=["Medusa", "Hydra"])
    items.save("resps/table2", TABLE, sources=[run])
    items.save("resps/table3", PaperTable.of(None, LONG))
    items.save("ltd/table3", TABLE)
    items.save("radar/table1", TABLE, sources=[run])
    runs.figure_path("radar", "table1").with_suffix(".tex").unlink()
    table = items.status().set_index("item")
    assert table.loc["resps/table1", "missing"] == "without Medusa; Hydra"
    # published numbers alone are no measurement, and a file of radar/table1 is gone
    names = ["resps/table1", "resps/table2", "ltd/table3", "resps/table3", "radar/table1"]
    states = [items.PARTLY, items.SAME, items.STATED, items.NOT_MEASURED, items.NOT_MEASURED]
    assert table.loc[names, "state"].tolist() == states
    assert table.loc["resps/table2", "scale"] == "laptop scale: smollm2 float32 on CPU"


def test_publishing_takes_items_and_the_rows_they_come_from(run, home, monkeypatch):
    items.save("resps/table1", TABLE, sources=[run])
    items.save("resps/figure1", figures.speedup_bars(BARS), sources=[run], data=BARS)
    assert items.publish()["state"].tolist() == ["published", "published"]
    files = [f"table1.{kind}" for kind in ("md", "csv", "tex", "json")]
    files += [f"figure1.{kind}" for kind in ("svg", "pdf", "png", "csv", "json")]
    assert sorted(path.name for path in (home / "figures" / "resps").iterdir()) == sorted(files)
    shipped = home / "figures" / "measured"
    rows = {path.name for path in (shipped / run.directory.name).iterdir()}
    assert rows == {"run.json", "prompts.parquet"}
    # a fresh clone: nothing but what was committed
    monkeypatch.setattr(runs, "shipped_dir", lambda: shipped)
    (home / "runs").rename(home / "gone")
    (found,) = items.measured("evaluate", pair="smollm2")
    assert found.directory == shipped / run.directory.name and found.read_table("prompts")[
        "prompt"
    ].tolist() == ["a"]
    assert items.status().set_index("item").loc["resps/table1", "state"] == items.SAME
    items.save("resps/table2", TABLE, sources=[found])
    assert items.publish().values.tolist() == [["resps/table2", "published", ""]]
    assert (home / "figures" / "resps" / "table1.md").is_file() and shipped.is_dir(), (
        "what was there stays"
    )


def test_rows_that_decide_claims_go_with_them(run, home):
    items.save("resps/table1", TABLE, sources=[run])
    decides = runs.start("ablate_ltd", {"parameters": {"pair": "smollm2"}})
    decides.write_table("effects", TABLE)
    decides.finish()
    items.publish(also=[decides, run])
    shipped = {folder.name for folder in (home / "figures" / "measured").iterdir()}
    assert shipped == {run.directory.name, decides.directory.name}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"label": "paper scale: llama-3.1-8b on GPU"}, "'laptop scale: smollm2 float32 on CPU'"),
        ({"measured": []}, "names no run"),
        ({"measured": [{"run": "evaluate", "key": "0" * 64}]}, "not there any more"),
    ],
)
def test_what_hides_where_it_comes_from_is_refused(run, home, changes, word):
    *paths, label = items.save("resps/table1", TABLE, sources=[run])
    runs.write_json(label, {**json.loads(label.read_text()), **changes})
    (row,) = items.publish().to_dict("records")
    assert row["state"] == "refused" and word in row["note"]
    paths[0].unlink()
    assert items.publish()["note"].tolist() == ["table1.md is not there"]
    assert not (home / "figures" / "resps").exists()


def test_neither_a_smaller_scale_nor_fewer_rows_replace_what_was_published(home):
    def drawn_from(rows: int, pair="smollm2") -> list:
        run = runs.start(
            "evaluate", {"pair": {"pair": pair, "dtype": "float32", "device": "cpu"}, "seed": rows}
        )
        run.write_table("prompts", pd.DataFrame({"prompt": range(rows)}))
        items.save("resps/table1", TABLE, sources=[run.finish()])
        return items.publish(replace=rows == 1).values.tolist()[0][1:]

    assert drawn_from(5) == ["published", ""]
    assert drawn_from(6, "tiny") == ["kept", "one of a larger scale"]
    assert "laptop scale" in (home / "figures" / "resps" / "table1.md").read_text()
    state, note = drawn_from(2)
    assert state == "kept" and note.startswith("one with more rows: 5 in evaluate/prompts, here 2 ")
    assert drawn_from(3)[0] == "published", "more than half of them"
    assert drawn_from(1)[0] == "published", "replaced, as asked"
