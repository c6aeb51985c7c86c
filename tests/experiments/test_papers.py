"""Items of the papers: rows under the paper's names, what is missing said, nothing stopped by a run
that is not there.
"""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
from fakes.traces import round_costs

from specdec import runs
from specdec.core.tree_config import PAPER_TREES
from specdec.evaluation import compare
from specdec.identity import Method, with_fields

from experiments import panels, paper_rows, papers
from workbook import items, pictures

SUITES = {"mt_bench": "MT-Bench", "gsm8k": "GSM8K"}
EAGLE = paper_rows.default_row("resps", "EAGLE-3")
METHODS = [EAGLE, paper_rows.Row("Re-SpS", {"system": "Re-SpS"})]
OF_NAMES = {name: Method(name, "equal") for name in ("Re-SpS", "LTD", "RADAR")}
for deep in (5, 7, 8):
    OF_NAMES[f"default 60,{deep},10"] = Method("static", "default", f"60,{deep},10")


def identified(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the fields of its methods; controllers are on equal terms."""
    methods = [OF_NAMES.get(name, Method(name)) for name in table["method"]]
    return with_fields(table.assign(method=list(map(str, methods))), methods)


def measured() -> pd.DataFrame:
    """Two suites in two forms, two methods, one of them with two seeds."""
    rows = [
        ("laptop/gsm8k", "Re-SpS", 0, 1.0),
        ("laptop/gsm8k", "Re-SpS", 1, 2.0),
        ("mt_bench", "Re-SpS", 0, 3.0),
        ("laptop/gsm8k", "default 60,5,10", 0, 4.0),
        ("toy/nq", "Re-SpS", 0, 5.0),
        ("all", "Re-SpS", 0, 6.0),
        ("mt_bench", "unnamed", 0, 7.0),
    ]
    table = pd.DataFrame(rows, columns=["suite", "method", "seed", "speedup"])
    ends = {"speedup_low": table["speedup"] - 0.5, "speedup_high": table["speedup"] + 0.5}
    return identified(table).assign(pair="tiny", **ends)


class FakeRun:
    """Takes what a notebook's run is shown."""

    scale = "laptop"

    def show_item(self, item_id, content, sources=(), missing=None, data=None):
        self.shown = SimpleNamespace(content=content, sources=sources, missing=missing, data=data)
        items.save(item_id, content, sources=sources, missing=missing, data=data)


@pytest.fixture
def opened(home):
    """An item of a page of the tiny pair, or of others."""

    def item_of(paper: str, name: str, *pairs: str) -> papers.Shown:
        return papers.Page(FakeRun(), paper, [*pairs] or ["tiny"]).item(name)

    return item_of


def finished(name="controllers", table="live_t0", rows=None) -> runs.Run:
    run = runs.start(name, {"parameters": {"pair": "tiny", "dtype": "float32"}})
    run.write_table(table, measured().drop(columns="pair") if rows is None else rows)
    return run.finish()


def test_rows_get_the_papers_names_and_means():
    rows = paper_rows.as_printed(measured(), METHODS, SUITES, {"speedup": "Speed"}, how="replayed")
    # EAGLE-3 has no mean, for one of its columns is missing
    cells = rows.set_index(["row", "column"])["value"].to_dict()
    ours = {("Re-SpS", "MT-Bench"): 3.0, ("Re-SpS", "GSM8K"): 1.5, ("Re-SpS", "Mean"): 2.25}
    assert cells == ours | {("EAGLE-3", "GSM8K"): 4.0}
    assert set(rows["pair"]) == {"tiny, replayed"}
    assert set(rows["metric"]) == {"Speed"}
    ends = rows.set_index(["row", "column"])[["value_low", "value_high"]]
    assert ends.loc[("Re-SpS", "MT-Bench")].tolist() == [2.5, 3.5]
    assert ends.loc[("Re-SpS", "GSM8K")].isna().all(), "of two seeds"
    nothing = paper_rows.as_printed(pd.DataFrame(), METHODS, SUITES, ["speedup"])
    assert nothing.columns.tolist() == paper_rows.LONG


def test_rows_of_trees_are_those_of_the_comparison():
    trees = compare.Baselines(tuple(PAPER_TREES.values()), PAPER_TREES["ltd"], {}).trees
    rows = [paper_rows.default_row(paper, paper) for paper in PAPER_TREES] + [paper_rows.TUNED_ROW]
    for row, method in zip(rows, trees, strict=True):
        assert row.where.items() <= method.fields.items()


def test_only_the_papers_settings_have_the_papers_name(opened):
    released = Method("Re-SpS", "released", "llama3")
    table = measured().query("method != 'unnamed'")
    table = pd.concat([table, table.head(1).assign(method=str(released), **released.fields)])
    carried = table.head(1).assign(adapted="carried", speedup=99.0)
    weights = paper_rows.Row("Re-SpS, weights {preset}", {"system": "Re-SpS", "terms": "released"})
    named = [*paper_rows.on_terms("Re-SpS", "Re-SpS"), weights]
    rows = paper_rows.as_printed(pd.concat([table, carried]), named, SUITES, ["speedup"])
    assert set(rows["row"]) == {"Re-SpS, equal terms", "Re-SpS, weights llama3"}
    assert rows["value"].max() < 99, "what was made for another machine is no row of the paper"
    item = opened("resps", "table1")
    item.table(rows)
    assert "Re-SpS (not measured here)" in item.page.run.shown.missing


def test_an_item_stands_beside_the_paper_and_says_what_it_lacks_and_was_read_from(opened):
    run = finished()
    item = opened("resps", "table1", "tiny", "nowhere")
    rows = paper_rows.as_printed(item.read("controllers", "live_t0"), METHODS, SUITES, ["speedup"])
    item.table(rows, metric="speedup")
    shown = item.page.run.shown
    assert shown.sources == [run]
    assert shown.missing == [
        "Medusa (not measured here)",
        "Hydra (not measured here)",
        "EAGLE-3: MT-Bench, HumanEval, Alpaca, CNN/DM, Mean (not measured here)",
        "Re-SpS: HumanEval, Alpaca, CNN/DM (not measured here)",
    ]
    ours, theirs = shown.content.measured, shown.content.published
    assert ours.loc[("tiny", "Re-SpS"), ("MT-Bench", "speedup")] == "3.00 [2.50, 3.50]"
    assert theirs.loc[("LLaMA 3.1-8B", "EAGLE-3"), ("MT-Bench", "speedup")] == "3.39"
    record = json.loads(runs.figure_path("resps", "table1").with_suffix(".json").read_text())
    assert record["scale"] == "toy"
    assert record["rows"] == {"measured": 2, "published_only": 2, "not_measured": 0}
    (reading,) = item.page.sources().to_dict("records")
    expected = {"item": "table1", "run": run.directory.name, "table": "live_t0", "pair": "tiny"}
    assert reading == expected | {"rows": 7, "prompts": ""}


def test_a_methods_rows_come_from_one_run(opened):
    suites = ("gsm8k", "alpaca", "nq", "xsum")
    rows = [*((suite, "Re-SpS", 9.0) for suite in suites), ("gsm8k", "DDD", 9.0)]
    rows = identified(pd.DataFrame(rows, columns=["suite", "method", "speedup"]))
    first = finished(table="replay_t0")
    second = finished("heuristics", "replay_t0", rows)
    item = opened("resps", "table1")
    read = item.read(papers.COMPARED, "replay_t0")
    of_second = read.loc[read["run_key"] == second.key, "method"]
    assert set(of_second) == {"Re-SpS, equal terms", "DDD"}
    of_first = read.loc[read["run_key"] == first.key, "method"]
    assert set(of_first) == {"default 60,5,10", "unnamed"}
    item.read("heuristics", "replay_t0")
    assert item.sources == [first, second], "each once"
    assert item.read(papers.COMPARED, "opponents_t0").empty
    assert "controllers or heuristics" in item.missing[0]


def test_without_a_run_the_item_is_the_papers_alone(opened):
    table, figure = opened("ltd", "table2"), opened("ltd", "figure3")
    rows = table.read("ablate_ltd", "size_alone")
    table.table(paper_rows.as_printed(rows, METHODS, SUITES, ["speedup"]))
    figure.figure(None, figure.read("train_ltd", "curves"))
    shown = table.page.run.shown
    assert shown.sources == []
    assert "no finished run ablate_ltd" in shown.missing[0]
    why = "no finished run train_ltd with a table curves for tiny"
    assert figure.page.run.shown.missing == [why]
    for name in ("table2", "figure3"):
        record = json.loads(runs.figure_path("ltd", name).with_suffix(".json").read_text())
        assert record["scale"] == "none"
        assert record["rows"]["measured"] == 0


def test_temperatures_have_columns_of_their_own(opened):
    rows = [("start", 0.0, 2.0), ("ppow", 0.0, 2.5), ("ppow", 1.0, 2.25)]
    rows = pd.DataFrame(rows, columns=["drafter", "temperature", "tau"])
    finished("train_ppow", "compared", rows.assign(suite="toy/gsm8k", method="tree", speedup=1.5))
    item = opened("ppow", "table1")
    drafters = paper_rows.named({"start": "EAGLE-3", "ppow": "PPOW"}, "drafter")
    parts = []
    for temperature in (0, 1):
        rows = item.read("train_ppow", "compared", keep={"temperature": temperature})
        metrics = {"tau": f"tau, T={temperature}"}
        parts.append(paper_rows.as_printed(rows, drafters, {"gsm8k": "GSM8K"}, metrics))
    item.table(pd.concat(parts))
    table = item.page.run.shown.content
    assert table.measured.loc[("tiny", "PPOW"), "GSM8K"].dropna().tolist() == ["2.50", "2.25"]
    assert table.published.loc[("LLaMA-3.1-8B-Instruct", "PPOW"), ("GSM8K", "tau, T=1")] == "5.63"


def test_long_rows():
    table = pd.DataFrame({"pair": "tiny", "size": [4, 8], "ms": [1.0, 2.0], "prompts": 3})
    rows = paper_rows.by_column(table, "size", {"ms": "Time"}, metric="time")
    assert rows[paper_rows.KEYS].values.tolist() == [
        ["tiny", "4", "Time", "time"],
        ["tiny", "8", "Time", "time"],
    ]
    assert rows["value"].tolist() == [1.0, 2.0]
    rows = paper_rows.long_rows(table, row=[None, "b"], column="c", metric="m", value=table["ms"])
    assert rows["value"].tolist() == [2.0]
    assert paper_rows.by_column(pd.DataFrame(), "size", {"ms": "Time"}).empty


def test_a_policy_that_became_a_tree_is_said_and_deviations_become_a_column():
    facts = pd.DataFrame({"method": ["Re-SpS", "LTD"], "collapsed": [True, False]})
    facts = identified(facts).assign(pair="tiny", commonest="8/2/4", commonest_frac=0.99)
    (sentence,) = paper_rows.constants(facts, METHODS)
    assert sentence.startswith("Re-SpS of tiny became a constant: 8/2/4 ")
    long = pd.DataFrame({"row": "r", "column": "c", "metric": ["length", "length_sd"]})
    long = paper_rows.with_deviations(long.assign(pair="tiny", value=[23, 3.674]))
    (row,) = long.to_dict("records")
    assert (row["metric"], row["value"], row["value_sd"]) == ("length", 23.0, 3.674)


def test_lines_change_against_their_start():
    lines = pd.DataFrame(
        {"panel": "tiny", "name": "PPOW", "step": [0, 1, 0, 1], "of": [0, 0, 1, 1]}
    )
    lines = pictures.over_start(pictures.over_seeds(lines.assign(value=[1.0, 3.0, 3.0, 5.0])))
    assert lines["value"].tolist() == [0.0, 100.0]
    assert lines["high"].tolist() == [50.0, 150.0]


def test_stacked_bars_end_at_the_sum():
    rows = [
        (False, "tiny", "(1, 20)", "draft", "ms", 1.0),
        (False, "tiny", "(2, 40)", "draft", "ms", 2.0),
        (False, "tiny", "(1, 20)", "verify", "ms", 3.0),
        (False, "tiny", "(2, 40)", "verify", "ms", 5.0),
        (False, "tiny", "default", "draft", "pct", 20.0),
        (False, "tiny", "default", "verify", "pct", 60.0),
        (True, "Llama", "(5, 60)", "draft", "ms", 9.0),
        (True, "Llama", "(5, 60)", "verify", "ms", 9.0),
        (True, "Llama", "default", "draft", "pct", 30.0),
        (True, "Llama", "default", "verify", "pct", 30.0),
    ]
    bars = pd.DataFrame(rows, columns=["published", "whose", "x", "part", "kind", "value"])
    left, right, *published = panels.cost_panels(bars).axes
    assert max(bar.get_y() + bar.get_height() for bar in left.patches) == 7.0
    assert max(bar.get_x() + bar.get_width() for bar in right.patches) == 80.0
    assert len(published) == 2


def test_subjects_stand_by_speed():
    rows = [("anatomy", "LTD", 0.9, 1.2), ("virology", "LTD", 1.1, 0.8)]
    table = pd.DataFrame(rows, columns=["subject", "method", "over_tuned", "over_default"])
    axes = panels.by_subject(table).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["virology", "anatomy"]
    assert axes.lines[0].get_xdata().tolist() == [0.9, 1.1]
    assert axes.lines[0].get_ydata().tolist() == [1, 0]


def test_fixed_trees_take_the_nearest_size_depth_and_width():
    rows = []
    for total, depth, top_k in ((8, 2, 4), (8, 7, 10), (32, 2, 10), (32, 7, 10)):
        rows.append((total, depth, top_k, 1 + depth + total / 100 + top_k / 10))
    grid = pd.DataFrame(rows, columns=["total_tokens", "depth", "top_k", "tau"])
    left, right = panels.fixed_trees(grid.assign(pair="tiny", new_tok=9)).axes
    assert left.get_title(loc="left") == "trees of 32 tokens, width 10"
    assert left.lines[0].get_xdata().tolist() == [2, 7]
    assert left.lines[0].get_ydata().tolist() == [4.32, 9.32]
    assert right.lines[0].get_xdata().tolist() == [8, 32]


def test_levels_and_nodes_as_far_as_a_machine_was_measured():
    """LTD's Figure 2: drafting d levels, the root pass among them, beside verifying 20 d nodes."""
    short = round_costs(ranges={"expansions": (0, 3), "verify_nodes": (0, 60)})
    late = round_costs(ranges={"expansions": (8, 9), "verify_nodes": (0, 500)})
    table = panels.pair_costs({"a": round_costs(), "b": short, "c": late}, "b")
    assert list(table) == ["machine", "here", "depth", "nodes", "draft_ms", "verify_ms"]
    assert table["machine"].tolist() == ["a"] * 10 + ["b"] * 3 + ["c"] * 2
    assert table["here"].tolist() == [False] * 10 + [True] * 3 + [False] * 2
    assert table["depth"].tolist() == [*range(1, 11), 1, 2, 3, 9, 10]
    assert (table["nodes"] == 20 * table["depth"]).all()
    # A root pass of 1 ms and expansions of 0.5; 5 ms for 10 nodes and 0.1 for each of the next 230.
    assert table["draft_ms"].tolist() == pytest.approx(1 + 0.5 * (table["depth"] - 1))
    assert table["verify_ms"].tolist() == pytest.approx(5 + 0.1 * (table["nodes"] - 10))
    sloped = round_costs(root_per_tok=(0.01, 0.01), verify_per_tok=(0.1, 0.1, 0.1))
    row = panels.pair_costs({"a": sloped}, "a", context_tok=100).iloc[0]
    assert (row["draft_ms"], row["verify_ms"]) == (pytest.approx(1 + 1), pytest.approx(6 + 10))
