"""The 47 items: all listed once, saved with where they come from, byte for byte alike."""

import json

import pandas as pd
import pytest

from specdec import runs
from specdec.errors import SpecdecError
from specdec.report import figures, items, provenance, tables

COUNTS = {"resps": (8, 3), "ltd": (11, 7), "radar": (2, 2), "ppow": (10, 4)}
TABLE = pd.DataFrame({"method": ["50% & more"], "speedup": [1.0625]}).set_index("method")


@pytest.fixture
def run(home) -> runs.Run:
    run = runs.start("evaluate", {"pair": {"pair": "smollm2", "dtype": "float32", "device": "cpu"}, "seed": 0})
    run.write_table("prompts", pd.DataFrame({"suite": ["laptop/nq"], "prompt": ["a"], "method": ["plain"]}))
    return run.finish()


def test_every_table_and_figure_of_the_four_papers_is_listed():
    listed = items.read_items()
    expected = [f"{paper}/{kind}{number}" for paper, counts in COUNTS.items()
                for kind, count in zip(("table", "figure"), counts, strict=True) for number in range(1, count + 1)]  # fmt: skip
    assert list(listed) == expected and len(listed) == 47
    for item in listed.values():
        assert item.title and item.notebook, item.id
        assert item.kind in ("table", "settings") if "/table" in item.id else item.kind in ("figure", "diagram")
        assert bool(item.reads) == bool(item.not_here) == bool(item.how) == (item.kind not in items.UNMEASURED), item.id
        assert set(item.pairs) <= set(provenance.PAPER_PAIRS), item.id


def test_pairs_and_suites_of_the_papers_are_known():
    from specdec.data.suites import SUITES
    from specdec.models.load import PRESETS, SHIPPED

    assert set(provenance.PAPER_PAIRS) == {name for name in PRESETS if not name.startswith("smollm2")}
    assert set(provenance.TOYS) <= set(SHIPPED)
    assert {name for name in SUITES if "/" not in name} <= set(provenance.BENCHMARKS)


def test_how_names_the_command_the_memory_and_the_hours():
    how = items.find_item("resps/table6").how
    assert how == (
        "make book SCALE=paper ARGS='--only 30 31 60 -p pair llama-3.1-8b' (about 4 h, 20 GiB of GPU memory)"
    )


def test_a_table_is_saved_three_ways_with_its_provenance(run):
    saved = [items.save("resps/table1", TABLE, sources=[run], missing=["Medusa"]) for _ in range(2)]
    assert [path.name for path in saved[0]] == ["table1.md", "table1.csv", "table1.tex", "table1.json"]
    assert saved[0][0] == runs.figure_path("resps", "table1").with_suffix(".md")
    first = [path.read_bytes() for path in saved[0]]
    assert first == [path.read_bytes() for path in saved[1]]
    tex, facts = first[2].decode(), json.loads(first[3])
    assert (
        r"50\% \& more" in tex and "laptop scale: smollm2 float32 on CPU" in tex and r"\label{tab:resps-table1}" in tex
    )
    assert facts["item"] == "resps/table1" and facts["missing"] == ["Medusa"] and facts["rows"] == {"measured": 1}
    assert facts["measured"][0]["suites"] == ["laptop/nq"] and facts["scale"] == "laptop"


def test_a_table_of_both_sides_brings_its_counts_and_doubts(run):
    theirs = pd.DataFrame({"method": ["Hydra"], "speedup": [2.8], "source": "Table 1", "doubt": "printed twice"})
    table = tables.beside(TABLE.reset_index(), theirs, "speedup", columns=[])
    markdown, _, _, label = items.save("resps/table1", table, sources=[run])
    facts = json.loads(label.read_text())
    assert facts["rows"] == {"measured": 1, "published_only": 1, "not_measured": 0} and facts["missing"] == ["Hydra"]
    assert "Published numbers in doubt: printed twice" in markdown.read_text()


def test_a_figure_is_saved_three_ways(run):
    data = pd.DataFrame({"x": [1, 2], "y": [1, 2], "by": "a"})
    saved = [
        items.save("ltd/figure5", figures.curves(data, "x", "y", by="by"), sources=[run], data=data) for _ in range(2)
    ]
    assert [path.suffix for path in saved[0]] == [".svg", ".pdf", ".png", ".csv", ".json"]
    again = [path.read_bytes() for path in saved[1]]
    assert [path.read_bytes() for path in saved[0]] == again and b"laptop scale" in again[0]
    assert json.loads(again[-1])["rows"] == {"measured": 2} and json.loads(again[-1])["missing"] == []


def test_runs_are_found_by_what_was_measured(run):
    assert items.measured("evaluate", pair="smollm2", dtype="float32") == [run]
    assert items.measured("evaluate", pair="small") == [] and items.measured("evaluate", seed=None) == [run]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: items.save("resps/tabel1", TABLE), "unknown item 'resps/tabel1'; did you mean 'resps/table1'"),
        (lambda: items.save("resps/figure1", TABLE), "resps/figure1 is a figure; it cannot be saved as a DataFrame"),
        (lambda: items.save("resps/table1", TABLE, sources=[{"pair": "llama-3.1-8b"}]), "must come from Runs"),
    ],
)
def test_bad_items_get_one_sentence(home, call, message):
    with pytest.raises(SpecdecError, match=message):
        call()
    assert not (home / "runs").exists()
