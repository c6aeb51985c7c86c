"""The tuned static tree: which trees are tried, which continue, the tables of made-up times."""

import random
from types import SimpleNamespace

import pandas as pd
import pytest
from fakes.pairs import shared_pair
from fakes.traces import round_costs, synthetic_trace

import specdec
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig, tree_from
from specdec.data.suites import gather, load_suite, split
from specdec.errors import SpecdecError
from specdec.evaluation import tuning
from specdec.evaluation.bench import EvaluateConfig
from specdec.evaluation.compare import Baselines
from specdec.policies.heuristics import CopyGate
from specdec.replays.static_trees import static_grid, tree_of

GRID = """1,0,1 3,1,1 5,3,1 7,5,1 9,7,1 8,3,3 8,5,3 16,3,3 16,3,8 16,5,3 16,5,8 16,7,3 16,7,8
24,5,3 24,5,8 24,7,3 24,7,8 32,5,3 32,5,8 32,7,3 32,7,8 32,9,3 32,9,8 48,5,6 48,5,10 48,7,6 48,7,10
48,9,6 48,9,10 60,5,6 60,5,10 60,7,6 60,7,10""".split()
# of a text of ten tokens, else 60
MS = {"2,0,1": 30.0, "4,2,2": 10.0, "6,2,2": 20.0, "8,2,2": 40.0, "9,3,2": 50.0}


def test_the_trees_that_are_tried_in_steps_that_grow_threefold():
    assert tuning._steps(60, 33) == [(0, 4), (4, 16), (16, 52), (52, 60)]
    assert tuning._steps(60, 3) == [(0, 60)]
    assert tuning._steps(16, 33) == [(0, 4), (4, 16)], "a step that would be empty is left out"
    assert tuning._steps(17, 10) == [(0, 4), (4, 16), (16, 17)]


@pytest.fixture
def asked(monkeypatch):
    """The calls of the bench; it times texts as MS says, and those of the first prompt of a step a
    tenth longer.
    """
    calls = []

    def evaluate(policies, items, pair, config):
        calls.append((list(policies), [item.id for item in items], pair, config))
        rows = []
        for label, policy in policies.items():
            for item in items:
                ms = MS.get(policy.plan.text, 60.0) * (1.1 if item is items[0] else 1.0)
                counts = dict(new_tok=10, cycles=4, cycle_tok=12, total_ms=ms)
                rows.append({"method": label, "prompt": item.id, **counts})
        return SimpleNamespace(read_table=lambda name: pd.DataFrame(rows))

    monkeypatch.setattr(tuning, "evaluate", evaluate)
    return calls


def test_a_third_goes_on_and_every_step_has_new_prompts(asked):
    prompts = [[number] for number in range(9)]
    trees = list(map(tree_from, MS))
    settings = dict(most=7, name="mine", repeats=2, seed=3, limit=8, max_new_tokens=5)
    tuned = tuning.tune_static(shared_pair(), prompts, trees, **settings)
    items = gather(prompts, limit=8)
    random.Random(3).shuffle(items)
    names = [item.id for item in items[:7]]
    config = EvaluateConfig(name="mine", repeats=2, seed=3, max_new_tokens=5)
    best = ["4,2,2", "6,2,2"]
    assert asked == [
        (list(MS), names[:4], shared_pair(), config),
        (best, names[4:], shared_pair(), config),
    ]
    assert tuned.policy.plan.text == "4,2,2"
    assert tuned.policy.tuned_on == {item.digest for item in items[:7]}
    numbers = "step method total_tokens depth top_k beam prompts ms_per_tok tau kept"
    assert list(tuned.table) == numbers.split()
    columns = ["step", "method", "prompts", "ms_per_tok", "kept"]
    # of four texts, and of seven, one in each step was longer
    rows = []
    for label in sorted(MS, key=MS.get):
        rows.append([0, label, 4, pytest.approx(MS[label] * 4.1 / 40), label in best])
    for label in best:
        rows.append([1, label, 7, pytest.approx(MS[label] * 7.2 / 70), label == best[0]])
    assert tuned.table[columns].values.tolist() == rows
    assert (tuned.table["tau"] == 3.0).all()


def test_a_race_ends_where_one_tree_is_left(asked):
    trees = [TreeConfig(4, 2, 2), TreeConfig(6, 2, 2)]
    tuned = tuning.tune_static(shared_pair(), [[1], [2], [3]], trees, most=1)
    assert len(asked) == 1 and len(asked[0][1]) == 1
    assert tuned.table["kept"].tolist() == [True, False]
    alone = tuning.tune_static(shared_pair(), [[1], [2]], trees[1:])
    assert alone.policy.plan == trees[1] and alone.table["prompts"].tolist() == [2]


@pytest.mark.parametrize("most", [3, 24, 60])
def test_a_race_of_the_usual_trees_decodes_tuning_prompts_alone(asked, most):
    names = ["toy/gsm8k", "toy/nq"]
    tuning.tune_static(shared_pair(), names, most=most)
    decoded = {prompt for _, prompts, *_ in asked for prompt in prompts}
    tune = {prompt.id for name in names for prompt in split(load_suite(name))["tune"]}
    assert decoded <= tune and len(decoded) == min(most, len(tune))
    assert asked[0][0] == GRID and asked[0][3].name == "tune_static"


def test_finalists_are_the_fastest_of_different_shapes():
    trace = synthetic_trace(top_ks=(2, 3))
    costs = round_costs()
    trees = tuning.finalists(trace, costs)
    grid = static_grid(trace, costs).sort_values("time_ms", kind="stable")
    assert len({(tree.depth, tree.top_k, tree.beam) for tree in trees}) == len(trees) == 5
    assert trees[0] == tree_of(grid.iloc[0])
    of_shape = grid[(grid["depth"] == trees[1].depth) & (grid["top_k"] == trees[1].top_k)]
    assert trees[1] == tree_of(of_shape.iloc[0]), "of each shape the fastest size"


def test_the_race_decides_and_never_sees_a_test_prompt(home, monkeypatch):
    suites = ["toy/gsm8k", "toy/mt_bench"]
    quiet = dict(max_new_tokens=12, progress=False, limit=2)
    pair = specdec.load_pair("tiny", dtype="float32")
    shape = dict(depth=3, top_ks=(2,), trees=(), family=(3, 3, 1))
    trace = specdec.record(pair, suites, **{**quiet, **shape, "limit": 6})
    monkeypatch.setattr(tuning, "FINALISTS", 2)
    evaluate = tuning.evaluate
    decoded = []

    def seen(*arguments):
        run = evaluate(*arguments)
        decoded.append(run.read_table("prompts"))
        return run

    monkeypatch.setattr(tuning, "evaluate", seen)
    trees = tuning.race_static(pair, trace, round_costs(), **quiet)
    assert list(trees) == [*suites, "all"]
    rows = pd.concat(decoded).assign(new_tok=lambda rows: rows["new_tok"] - 1)
    shared = [tree.text for tree in tuning.finalists(trace.select(part="tune"), round_costs())]
    every = rows[rows["method"].isin(shared)].assign(suite="all")
    for suite, part in pd.concat([rows, every]).groupby("suite"):
        sums = part.groupby("method")[["decode_ms", "new_tok"]].sum()
        assert trees[suite].text == (sums["decode_ms"] / sums["new_tok"]).idxmin()
    assert every["method"].nunique() == 2
    parts = trace.turns.groupby("prompt")["part"].first()
    assert {parts.get(prompt, "tune") for prompt in rows["prompt"]} == {"tune"}
    chosen = Baselines.from_race(pair, trace, round_costs(), **quiet)
    assert chosen.chosen_on == ("tune",) and set(chosen.per_suite) == set(suites)


def test_every_gate_is_tried_with_every_tree_and_each_tree_alone(monkeypatch):
    policies = []

    def timed(trace, policy, costs):
        policies.append(policy)
        ms = 9.0 if isinstance(policy, Static) else policy.copied_tokens + policy.saved_frac
        return SimpleNamespace(tau=2.0, ms_per_tok=ms, speedup=1 / ms)

    monkeypatch.setattr(tuning, "replay", timed)
    trace = SimpleNamespace(copies="copies", forwards=True)
    trees = [TreeConfig(4, 2, 3), TreeConfig(5, 3, 2, beam=(2, 1))]
    table = tuning.tune_gate(trace, "costs", trees, (8, 12), (0.5, 0.25))
    assert [policy.plan for policy in (policies[0], policies[5])] == trees
    gates = []
    for numbers in ((4, 2, 3), (5, 3, 2, 2, 1)):
        gates += [CopyGate(numbers, copied, saved) for copied in (8, 12) for saved in (0.5, 0.25)]
    assert [policy for policy in policies if isinstance(policy, CopyGate)] == gates
    assert list(table) == tuning.GATE_COLUMNS
    expected = [8.25, 8.25, 8.5, 8.5, 9.0, 9.0, 12.25, 12.25, 12.5, 12.5]
    assert table["ms_per_tok"].tolist() == expected
    assert table["saved_frac"].tolist()[:4] == [0.25, 0.25, 0.5, 0.5]
    assert table["copied_tokens"].isna().tolist() == [ms == 9.0 for ms in expected]
    for without in ({"copies": None}, {"forwards": False}):
        other = SimpleNamespace(**{**vars(trace), **without})
        pytest.raises(SpecdecError, tuning.tune_gate, other, "costs", trees).match("copies")
