"""The strongest static tree: chosen by replay, raced live, on tuning prompts alone."""

import pytest
from fakes.traces import round_costs, synthetic_trace

import specdec
from specdec.core.tree_config import TreeConfig
from specdec.evaluation.compare import Baselines
from specdec.evaluation.tuning import finalists, race_static
from specdec.replays.record import settings_of
from specdec.replays.static_trees import static_grid, tree_of

SUITES = ["toy/gsm8k", "toy/mt_bench"]
QUIET = dict(max_new_tokens=12, progress=False, limit=2)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))


def test_finalists_are_the_best_sizes_of_different_shapes():
    trace, costs = synthetic_trace(top_ks=(2, 3)), round_costs()
    found = finalists(trace, costs, 4)
    assert len({(tree.depth, tree.top_k, tree.beam) for tree in found}) == 4
    grid = static_grid(trace, costs)
    assert found[0] == tree_of(grid.loc[grid["time_ms"].idxmin()])
    of_shape = grid[(grid["depth"] == found[1].depth) & (grid["top_k"] == found[1].top_k)]
    assert found[1] == tree_of(of_shape.loc[of_shape["time_ms"].idxmin()])


def test_the_race_decides_and_never_sees_a_test_prompt():
    pair, costs = specdec.load_pair("tiny", dtype="float32"), round_costs()
    trace = specdec.record(
        pair, SUITES, max_new_tokens=12, depth=3, top_ks=(2,), trees=(), family=(3, 3, 1), limit=6, progress=False
    )
    race = race_static(pair, trace, costs, count=2, **QUIET)
    table = race.table
    assert set(table["suite"]) == {*SUITES, "all"} and set(race.per_suite) == set(SUITES)
    for suite, rows in table.groupby("suite"):
        best = tree_of(rows.loc[rows["measured_ms"].idxmin()])
        assert best == (race.tuned if suite == "all" else race.per_suite[suite])
        assert rows["fastest"].sum() == 1 and (rows["measured_ms"] > 0).all() and (rows["predicted_ms"] > 0).all()
    assert len(table[table["suite"] == "all"]) == 2
    for run in race.runs:
        prompts = run.read_table("prompts")["prompt"].unique()
        parts = trace.turns.set_index("prompt")["part"].groupby(level=0).first()
        assert {parts.get(prompt, "tune") for prompt in prompts} == {"tune"}
    again = specdec.record(pair, trace, temperature=1.0, **settings_of(trace), progress=False)
    assert again.turns[["suite", "prompt", "part"]].equals(trace.turns[["suite", "prompt", "part"]]), "the same prompts"
    assert again.family == trace.family and again.depth == 3 and again.header["temperature"] == 1.0
    chosen = Baselines.from_race(pair, trace, costs, count=2, defaults=(TreeConfig(9, 3, 2),), **QUIET)
    assert chosen.chosen_on == ("tune",) and set(chosen.per_suite) == set(SUITES)
