"""Items of the papers: rows under the paper's names, what is missing said, nothing stopped by a run
that is not there.
"""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from specdec import runs
from specdec.core.tree_config import PAPER_TREES
from specdec.evaluation import compare
from specdec.identity import Method, with_fields

from experiments import panels, paper_rows, papers
from workbook import items, pictures

SUITES = {"mt_bench": "MT-Bench", "gsm8k": "GSM8K"}
METHODS = [
    paper_rows.default_row("resps", "EAGLE-3"),
    paper_rows.Row("Re-SpS", {"system": "Re-SpS"}),
]


OF_NAMES = {name: Method(name, "equal") for name in ("Re-SpS", "LTD", "RADAR")}
OF_NAMES |= {
    f"default 60,{depth},10": Method("static", "default", f"60,{depth},10") for depth in (5, 7, 8)
}
OF_NAMES["iter3"] = Method("LTD", preset="iter3")


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
    """An item of a page of the tiny pair, or of others; what is shown of it stands in the page's
    run.
    """

    def item_of(paper: str, name: str, *pairs: str) -> papers.Shown:
        return papers.Page(FakeRun(), paper, [*pairs] or ["tiny"]).item(name)

    return item_of


def finished(name="controllers", table="live_t0", rows=None) -> runs.Run:
    run = runs.start(name, {"parameters": {"pair": "tiny", "dtype": "float32"}})
    run.write_table(table, measured().drop(columns="pair") if rows is None else rows)
    return run.finish()


def test_rows_get_the_papers_names_and_means():
    rows = paper_rows.as_printed(
        measured(), METHODS, SUITES, {"speedup": "Speedup"}, how="replayed"
    )
    found = rows.set_index(["row", "column"])["value"]
    ours = {("Re-SpS", "MT-Bench"): 3.0, ("Re-SpS", "GSM8K"): 1.5, ("Re-SpS", "Mean"): 2.25}
    assert found.to_dict() == ours | {("EAGLE-3", "GSM8K"): 4.0}, (
        "no mean, for one of its columns is missing"
    )
    nothing = paper_rows.as_printed(pd.DataFrame(), METHODS, SUITES, ["speedup"])
    assert nothing.columns.tolist() == paper_rows.LONG
    assert set(rows["pair"]) == {"tiny, replayed"} and set(rows["metric"]) == {"Speedup"}
    once = rows.set_index(["row", "column"]).loc[("Re-SpS", "MT-Bench")]
    assert (once["value_low"], once["value_high"]) == (2.5, 3.5)
    assert (
        rows.set_index(["row", "column"])
        .loc[("Re-SpS", "GSM8K")]
        .isna()[["value_low", "value_high"]]
        .all()
    )
    trees = compare.Baselines(tuple(PAPER_TREES.values()), PAPER_TREES["ltd"], {}).trees
    rows = [paper_rows.default_row(paper, paper) for paper in PAPER_TREES] + [paper_rows.TUNED_ROW]
    assert all(
        row.where.items() <= method.fields.items() for row, method in zip(rows, trees, strict=True)
    )


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
    assert "Re-SpS (not measured here)" in item.page.run.shown.missing, (
        "trained otherwise, no row of the paper"
    )


def test_an_item_stands_beside_the_paper_and_says_what_it_lacks(opened):
    run, item = finished(), opened("resps", "table1", "tiny", "nowhere")
    rows = paper_rows.as_printed(item.read("controllers", "live_t0"), METHODS, SUITES, ["speedup"])
    item.table(rows, metric="speedup")
    shown = item.page.run.shown
    assert shown.sources == [run] and shown.missing == [
        "Medusa (not measured here)",
        "Hydra (not measured here)",
        "EAGLE-3: MT-Bench, HumanEval, Alpaca, CNN/DM, Mean (not measured here)",
        "Re-SpS: HumanEval, Alpaca, CNN/DM (not measured here)",
    ]
    ours, theirs = shown.content.measured, shown.content.published
    assert ours.loc[("tiny", "Re-SpS"), ("MT-Bench", "speedup")] == "3.00 [2.50, 3.50]"
    assert theirs.loc[("LLaMA 3.1-8B", "EAGLE-3"), ("MT-Bench", "speedup")] == "3.39"
    assert [column for column, _ in theirs.columns[:3]] == ["MT-Bench", "HumanEval", "GSM8K"]
    assert "Not measured here: Medusa, Hydra. To measure: `make book" in shown.content.notes[-1]
    record = json.loads(runs.figure_path("resps", "table1").with_suffix(".json").read_text())
    assert record["scale"] == "toy" and record["rows"] == {
        "measured": 2,
        "published_only": 2,
        "not_measured": 0,
    }


def test_other_notebooks_add_their_own_methods_and_repeat_none(opened):
    rows = (
        measured()
        .replace({"method": {"unnamed": "Medusa"}})
        .drop(columns="pair")
        .assign(speedup=9.0)
    )
    finished(), finished("baselines", rows=rows)
    item = opened("resps", "table1")
    read = item.read(papers.COMPARED, "live_t0")
    assert (
        read.loc[read["speedup"] == 9.0, "method"].tolist() == ["Medusa"] and len(item.sources) == 2
    )
    assert (
        set(read["method"]) == {"Re-SpS, equal terms", "default 60,5,10", "unnamed", "Medusa"}
        and not item.missing
    )
    assert (
        item.read(papers.COMPARED, "opponents_t0").empty
        and "controllers or heuristics" in item.missing[0]
    )


def test_a_methods_rows_come_from_one_run(opened):
    rows = [
        *((suite, "Re-SpS", 9.0) for suite in ("gsm8k", "alpaca", "nq", "xsum")),
        ("gsm8k", "DDD", 9.0),
    ]
    rows = identified(pd.DataFrame(rows, columns=["suite", "method", "speedup"]))
    first, second = finished(table="replay_t0"), finished("heuristics", "replay_t0", rows)
    item = opened("resps", "table1")
    read = item.read(papers.COMPARED, "replay_t0")
    assert (read.groupby("method")["run_key"].nunique() == 1).all()
    assert set(read.loc[read["run_key"] == second.key, "method"]) == {"Re-SpS, equal terms", "DDD"}
    assert "default 60,5,10" in set(read.loc[read["run_key"] == first.key, "method"])
    item.read("heuristics", "replay_t0")
    assert item.sources == [first, second], "each once"


def test_subjects_stand_beside_the_tuned_tree_and_intervals_beside_the_shortest():
    rows = [
        ("anatomy", "default 60,8,10", 0.5, 1.0),
        ("anatomy", "LTD", 0.9, 1.2),
        ("virology", "LTD", 1.1, 0.8),
    ]
    rows += [("all", "LTD", 1.9, 1.0), ("anatomy", "random", 1.0, 0.6)]
    table = pd.DataFrame(rows, columns=["subject", "method", "over_tuned", "over_default"])
    named = [paper_rows.Row(name, {"system": name}) for name in ("ours", "LTD")]
    shown = paper_rows.of_subjects(identified(table), named)
    assert shown.values.tolist() == [["anatomy", "LTD", 0.9, 1.2], ["virology", "LTD", 1.1, 0.8]]
    left, right = panels.by_subject(shown, note="one question").axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["virology", "anatomy"]
    assert (
        left.get_title(loc="left")
        == right.get_title(loc="left")
        == "LTD: faster on 1 of 2 subjects"
    )
    sweep = pd.DataFrame({"pair": "tiny", "interval": [1, 5], "tok_per_s": [40.0, 39.0]})
    assert paper_rows.of_intervals(sweep, pd.DataFrame())["gain"].tolist() == [
        0.0,
        pytest.approx(-2.5),
    ]
    turns = [
        ("a", place, interval, 100.0, 40 - (interval == 5), 10)
        for place in range(9)
        for interval in (1, 5)
    ]
    turns = pd.DataFrame(
        turns, columns=["suite", "prompt", "interval", "time_ms", "new_tok", "cycles"]
    )
    turns = turns.assign(method=turns["interval"].astype(str), pair="tiny", seed=0, cycle_tok=9)
    found = paper_rows.of_intervals(sweep, turns)
    assert found["prompts"].tolist() == [9, 9] and found["gain_low"].tolist() == pytest.approx(
        [0.0, -2.5]
    )
    grid = pd.DataFrame(
        [(t, d, k, 1 + d + t / 100 + k / 10) for t in (8, 32) for d in (2, 7) for k in (4, 10)],
        columns=["total_tokens", "depth", "top_k", "tau"],
    ).assign(pair="tiny", new_tok=9)
    left, right = panels.fixed_trees(grid).axes
    assert left.get_title(loc="left") == "trees of 32 tokens, width 10"
    assert left.lines[0].get_xdata().tolist() == [2, 7] and left.lines[0].get_ydata().tolist() == [
        4.32,
        9.32,
    ]
    assert right.lines[0].get_xdata().tolist() == [8, 32]


def test_without_a_run_the_item_is_the_papers_alone(opened):
    table, figure = opened("ltd", "table2"), opened("ltd", "figure3")
    table.table(
        paper_rows.as_printed(table.read("ablate_ltd", "size_alone"), METHODS, SUITES, ["speedup"])
    )
    figure.figure(None, figure.read("train_ltd", "curves"))
    run = runs.start("train_radar", {"parameters": {"pair": "tiny", "dtype": "float32"}})
    run.write_table("curves", pd.DataFrame({"run": ["iter0 size 0"], "value": [1.0]}))
    read = opened("ltd", "figure3").read(run.finish().name, "curves")
    assert read["run"].tolist() == ["iter0 size 0"], "a table's own columns stay as they are"
    shown = table.page.run.shown
    assert shown.sources == [] and "no finished run ablate_ltd" in shown.missing[0]
    assert figure.page.run.shown.missing == [
        "no finished run train_ltd with a table curves for tiny"
    ]
    for name in ("table2", "figure3"):
        record = json.loads(runs.figure_path("ltd", name).with_suffix(".json").read_text())
        assert record["scale"] == "none" and record["rows"]["measured"] == 0


def test_a_single_target_stands_above_ours_and_temperatures_in_columns_of_their_own(opened):
    item = opened("ltd", "table10")
    item.table(
        paper_rows.as_printed(
            measured(), {"Re-SpS, equal terms": "[1024]"}, {"gsm8k": "GSM8K"}, ["speedup"]
        )
    )
    table = item.page.run.shown.content
    assert table.measured.loc[("tiny", "[1024]"), ("GSM8K", "speedup")] == "1.50"
    assert (
        table.published.loc[("Llama-3.1-8B-Instruct", "[1024]"), ("GSM8K", "speedup")] == "3.99 (a)"
    )
    rows = [("start", 0.0, 2.0), ("ppow", 0.0, 2.5), ("ppow", 1.0, 2.25)]
    rows = pd.DataFrame(rows, columns=["drafter", "temperature", "tau"])
    finished("train_ppow", "compared", rows.assign(suite="toy/gsm8k", method="tree", speedup=1.5))
    item, parts = opened("ppow", "table1"), []
    for temperature in (0, 1):
        rows = item.read("train_ppow", "compared", keep={"temperature": temperature})
        named = {"tau": f"tau, T={temperature}"}
        drafters = paper_rows.named({"start": "EAGLE-3", "ppow": "PPOW"}, "drafter")
        parts.append(paper_rows.as_printed(rows, drafters, {"gsm8k": "GSM8K"}, named))
    item.table(pd.concat(parts))
    table = item.page.run.shown.content
    assert table.measured.loc[("tiny", "PPOW"), "GSM8K"].dropna().tolist() == ["2.50", "2.25"]
    assert table.published.loc[("LLaMA-3.1-8B-Instruct", "PPOW"), ("GSM8K", "tau, T=1")] == "5.63"
    assert item.page.run.shown.missing == [
        "GRIFFIN (not measured here)",
        *(f"{row}: MT-Bench, HumanEval, Mean (not measured here)" for row in ("EAGLE-3", "PPOW")),
    ]


def test_rows_of_drafters():
    names = {"ppow": "PPOW"}
    prompts = pd.DataFrame(
        {"pair": "tiny", "drafter": ["ppow", "ppow", "other"], "method": "candidates 4"}
    )
    prompts = prompts.assign(cycle_tok=[6, 9, 4], cycles=[2, 4, 1])
    assert paper_rows.taus(prompts, "drafter", "method", names)["value"].tolist() == [15 / 6]
    windows = pd.DataFrame({"pair": "tiny", "drafter": "ppow", "hard": [True, True, False]})
    windows = windows.assign(accepted_tok=[1, 2, 6], nabla=[0.5, 1.5, 0.25])
    found = paper_rows.of_windows(windows, names).set_index(["column", "metric"])["value"].to_dict()
    assert found[("Hard windows", "tau")] == 2.5 and found[("Easy windows", "tau")] == 7.0
    assert found[("Hard windows", "divergence")] == 1.0
    rates = pd.DataFrame(
        {"pair": "tiny", "objective": ["ppow", "cst"], "learning_rate": 1e-4, "tau": [2.0, 1.0]}
    )
    spread = paper_rows.spread(rates, "objective", "learning_rate", {"tau": "tau"}, names)
    assert spread[["row", "column", "value"]].to_numpy().tolist() == [["PPOW", "0.0001", 2.0]]
    settings = pd.DataFrame(
        {"pair": "tiny", "setting": ["window", "reward"], "value": ["6", "speedup"]}
    )
    assert paper_rows.settings(settings, {"window": "K"})[["row", "value"]].to_numpy().tolist() == [
        ["K", 6.0]
    ]
    curve = pd.DataFrame(
        {"pair": "tiny", "drafter": "ppow", "step": range(8), "kl": [1.0, 3.0] * 4}
    )
    lines = paper_rows.named_lines(curve, names, "kl", points=4)
    assert lines["value"].tolist() == [2.0] * 4 and lines["step"].tolist() == [0, 2, 4, 6]
    seeds = pd.concat([curve.assign(seed=0), curve.assign(seed=1, kl=curve["kl"] + 2)])
    lines = pictures.over_start(paper_rows.named_lines(seeds, names, "kl"))
    assert (
        lines["value"].tolist() == [0.0, 100.0] * 4 and lines["high"].tolist() == [50.0, 150.0] * 4
    )
    rounds = pd.DataFrame(
        {"run": ["iter0 size 0", "iter0 size 1", "iter0 depth 0"], "steps": 8, "what": "score"}
    )
    rounds = rounds.assign(value=[0.01, 0.03, 0.5], recipe=["ours", "ours", "paper"])
    lines, count = paper_rows.of_rounds(rounds, "ours")
    assert count == 2 and lines[["name", "value", "low", "high"]].values.tolist() == [
        ["Iter0, size", 20.0, 10.0, 30.0]
    ]


def test_bars_of_gains_take_both_sides_and_stacked_ones_end_at_the_sum():
    rows = [("Iter0, our settings", 1.25), ("Iter1, our settings", 1.5), ("Eagle3", 0.5)]
    long = pd.DataFrame(rows, columns=["row", "value"]).assign(
        pair="tiny", column="Mean", metric="speedup", turns=7
    )
    long = pd.concat([long, long.assign(metric="tau")])
    over = {"table7": "Iter0", "table8": "Iter0"}
    bars = paper_rows.gain_bars({"table7": long, "table8": pd.DataFrame()}, "ltd", over, "Eagle3")
    assert list(bars.groupby("panel").size()) == [5, 3] and bars["published"].sum() == 6
    ours = bars[bars["whose"] == "measured here, our settings"].set_index("row")["gain"]
    assert ours.to_dict() == pytest.approx({"Iter1": 20.0, "Eagle3": -60.0})
    figure = pictures.bar_panels(bars, "row", "gain", by="whose", panel="panel", labels=("", "%"))
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert sorted(heights) == pytest.approx(
        sorted([20, -60, *(100 * (x / 3.87 - 1) for x in (3.90, 3.92, 3.92))])
    )
    names = [axes.get_xlabel().replace("\n", " ") for axes in figure.axes]
    assert (
        names[0] == "Table 7, over Iter0: tiny (n = 7 turns); Llama-3.1-8B-Instruct"
        and "Table 8, over" in names[1]
    )
    split = pd.DataFrame(
        {"pair": "tiny", "method": ["default 60,7,10", "LTD"], "draft_ms": [2.0, 1.0]}
    )
    split = split.assign(verify_ms=[6.0, 4.0], total_ms=[10.0, 6.0])
    costs = pd.DataFrame({"pair": "tiny", "machine": "here", "depth": [1, 2], "nodes": [20, 40]})
    costs = costs.assign(draft_ms=[1.0, 2.0], verify_ms=[3.0, 5.0])
    bars = paper_rows.cost_bars(costs, identified(split), items.read_published("ltd", "figure2"))
    ours = bars[~bars["published"]].groupby("x", sort=False)["value"].sum()
    assert ours.to_dict() == {
        "(1, 20)": 4.0,
        "(2, 40)": 7.0,
        "default": 80.0,
        "LTD, equal terms": 50.0,
    }
    ms, pct, *published = panels.cost_panels(bars).axes
    assert max(bar.get_y() + bar.get_height() for bar in ms.patches) == 7.0 and len(published) == 2
    assert max(bar.get_x() + bar.get_width() for bar in pct.patches) == 80.0
    assert [text.get_text() for text in pct.get_yticklabels()] == ["default", "LTD, equal terms"]
    assert [text.get_text() for text in pct.texts] == ["tiny", "b"]
    names = [paper_rows.default_row("radar", "EAGLE-3"), RADAR]
    bars = paper_rows.length_and_calls(COUNTS, names, items.read_published("radar", "figure2"))
    ours = bars[~bars["published"].astype(bool)]
    ours = ours.assign(of=ours["panel"].str.split().str[0]).set_index(["of", "row", "column"])[
        "value"
    ]
    accepted = {
        ("accepted", "RADAR", 0): 40.0,
        ("accepted", "RADAR", 6): 60.0,
        ("accepted", "EAGLE-3", 6): 100.0,
    }
    assert ours.to_dict() == accepted | {("draft", "RADAR", 3): 40.0, ("draft", "RADAR", 8): 60.0}
    assert bars["published"].sum() == 26
    nothing = paper_rows.length_and_calls(
        pd.DataFrame(), names, items.read_published("radar", "figure2")
    )
    assert nothing["published"].all()
    cells = paper_rows.shares_by_accepted(COUNTS, [RADAR])
    assert cells.groupby(["method", "accepted"], sort=False)[
        "share"
    ].sum().tolist() == pytest.approx([1.0, 1.0])
    assert cells["accepted"].unique().tolist() == ["0 or 1 accepted", "5 and more"]
    options = dict(rows="method", columns="accepted", labels=("expansions", "nodes"))
    axes = pictures.heat_panels(cells, "expansions", "verify_nodes", "share", **options).axes[0]
    image = axes.images[0].get_array()
    assert {text.get_text() for text in axes.texts} == {"a", "75", "25"}
    assert axes.get_title(loc="left") == "RADAR: 0 or 1 accepted\nn = 40 cycles"
    assert (
        image.shape == (2, 2)
        and image.max() == pytest.approx(0.75)
        and image.sum() == pytest.approx(1.0)
    )


LONG = (7, 60, 6, 8)
COUNTS = [("RADAR", 2, 20, 0, 3, 30), ("RADAR", 2, 60, 0, 3, 10), ("RADAR", *LONG, 60)]
COUNTS += [("default 60,7,10", *LONG, 100), ("other", *LONG, 100)]
COLUMNS = ["method", "expansions", "verify_nodes", "accepted_tok", "draft_calls", "cycles"]
COUNTS = identified(pd.DataFrame(COUNTS, columns=COLUMNS).assign(pair="tiny"))
RADAR = paper_rows.Row("RADAR", {"system": "RADAR"})


def test_settings_are_part_of_a_rows_name(opened):
    for preset, speed in (({"preset": "paper"}, 0.5), ({}, 1.5)):  # what names no preset was ours
        run = runs.start(
            "train_ltd", {"parameters": {"pair": "tiny", "dtype": "float32", **preset}}
        )
        rows = pd.DataFrame({"suite": ["gsm8k"], "method": ["iter3"], "seed": 0, "speedup": speed})
        run.write_table("compared", identified(rows))
        run.finish()
    item = opened("ltd", "table7")
    names = paper_rows.by_recipe({"iter3": "Iter3"}, "preset")
    found = paper_rows.as_printed(
        item.read("train_ltd", "compared"), names, {"gsm8k": "GSM8K"}, ["speedup"]
    )
    assert found.set_index("row")["value"].to_dict() == {"Iter3": 0.5, "Iter3, our settings": 1.5}


def test_what_learned_nothing_is_said():
    rows = [
        ("LTD", True, "3/7/4", 0.99),
        ("RADAR", False, "60/7/10", 0.4),
        ("default 60,7,10", True, "60/7/10", 1.0),
    ]
    facts = identified(
        pd.DataFrame(rows, columns=["method", "collapsed", "commonest", "commonest_frac"])
    )
    named = [*paper_rows.on_terms("LTD", "LTD"), *paper_rows.on_terms("RADAR", "RADAR")]
    (told,) = paper_rows.constants(facts.assign(pair="tiny"), named)
    assert told.startswith("LTD, equal terms of tiny became a constant: 3/7/4") and "99%" in told
    assert paper_rows.constants(pd.DataFrame(), named) == []
    long = [
        ("start", "tau", 2.0),
        ("ppow", "tau", 2.0),
        ("ppow", "speedup", 1.1),
        ("cst", "tau", 2.1),
    ]
    long = pd.DataFrame(long, columns=["row", "metric", "value"]).assign(
        pair="tiny", column="GSM8K"
    )
    (told,) = paper_rows.unmoved(long, "start")
    assert told == "ppow (tiny) has the numbers of its start: it is no better than its start."
    curve = pd.DataFrame({"pair": "tiny", "drafter": "ppow", "step": [0, 20, 40]})
    (told,) = paper_rows.best_and_last(
        curve.assign(held_out_tau_chain=[2.0, 2.5, 1.5]), {"ppow": "PPOW"}
    )
    assert told.endswith("(step 40): 2.000, 2.500 (step 20), 1.500.")


def test_deviations_stand_behind_their_means_and_the_papers_own_test_pools_prompts(opened):
    long = pd.DataFrame(
        {
            "row": "EAGLE-3",
            "column": "GSM8K",
            "metric": ["length", "length_sd"],
            "value": [23, 3.674],
        }
    )
    (row,) = paper_rows.with_deviations(long.assign(pair="tiny")).to_dict("records")
    assert (row["metric"], row["value"], row["value_sd"]) == ("length", 23.0, 3.674)
    item = opened("resps", "table6")
    assert not item.printed["metric"].str.endswith("_sd").any()
    item.table(pd.DataFrame([row]).assign(metric="acceptance_length"))
    assert "23.00 ± 3.67" in item.page.run.shown.content.markdown()
    prompts = [(suite, number) for suite in ("a", "b") for number in range(6)]
    turns = [(suite, number, "default 60,5,10", 0, 10.0) for suite, number in prompts]
    turns += [
        (s, n, "Re-SpS", seed, 9.0 - n / 10 + seed / 9) for s, n in prompts for seed in (0, 1)
    ]
    table = pd.DataFrame(turns, columns=["suite", "prompt", "method", "seed", "time_ms"]).assign(
        new_tok=8
    )
    named = paper_rows.on_terms("Re-SpS", "Re-SpS")
    against = paper_rows.default_row("resps", "EAGLE-3")
    table = identified(table).assign(pair="tiny", run_key="x")
    (row,) = paper_rows.signed_ranks(table, named, against).to_dict("records")
    assert (row["row"], row["column"], row["prompts"]) == ("Re-SpS, equal terms", "p-value", 12)
    assert row["value"] == pytest.approx(0.5**12), "all twelve prompts are faster"
    assert paper_rows.signed_ranks(table[table["system"] == "Re-SpS"], named, against).empty
