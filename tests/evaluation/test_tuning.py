"""The tuned static tree: which trees are tried, who goes on to the next step, what the tables hold,
from times by hand.
"""

import random
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pandas as pd
import pytest
from fakes.pairs import shared_pair
from fakes.traces import round_costs, synthetic_trace

import specdec
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.data.suites import gather, load_suite, split
from specdec.errors import SpecdecError
from specdec.evaluation import tuning
from specdec.evaluation.bench import EvaluateConfig
from specdec.evaluation.compare import Baselines
from specdec.policies.copying import CopyGate
from specdec.replays.record import settings_of
from specdec.replays.static_trees import static_grid, static_turns, tree_of

GRID = (
    "1,0,1 3,1,1 5,3,1 7,5,1 9,7,1 8,3,3 8,5,3 16,3,3 16,3,8 16,5,3 16,5,8 16,7,3 16,7,8 24,5,3 24,5,8 24,7,3 24,7,8 "  # noqa: E501
    "32,5,3 32,5,8 32,7,3 32,7,8 32,9,3 32,9,8 48,5,6 48,5,10 48,7,6 48,7,10 48,9,6 48,9,10 60,5,6 60,5,10 60,7,6 60,7,10"  # noqa: E501
).split()
# of a text of ten tokens, else 60
MS = {"2,0,1": 30.0, "4,2,2": 10.0, "6,2,2": 20.0, "8,2,2": 40.0, "9,3,2": 50.0}


def test_the_trees_that_are_tried_in_steps_that_grow_threefold():
    assert [tree.text for tree in tuning.default_grid()] == GRID
    assert tuning._steps(60, 33, 4) == [(0, 4), (4, 16), (16, 52), (52, 60)]
    assert tuning._steps(60, 3, 4) == [(0, 60)]
    assert tuning._steps(16, 33, 4) == [(0, 4), (4, 16)], "a step that would be empty is left out"
    assert tuning._steps(17, 10, 4) == [(0, 4), (4, 16), (16, 17)]
    # 33 trees on 4 prompts, 11 on 12, 4 on 36 and 2 on the last 8.
    assert tuning.decodings(33, 60) == 33 * 4 + 11 * 12 + 4 * 36 + 2 * 8


@pytest.fixture
def asked(monkeypatch):
    """What the bench was asked for; it times texts as MS says, and those of the first prompt of a
    step a tenth longer.
    """
    found = []

    def evaluate(policies, items, pair, config):
        found.append((list(policies), [item.id for item in items], pair, config))
        rows = [
            dict(method=label, prompt=item.id, new_tok=10, cycles=4, cycle_tok=12)
            | dict(total_ms=MS.get(policy.plan.text, 60.0) * (1.1 if item is items[0] else 1.0))
            for label, policy in policies.items()
            for item in items
        ]
        return SimpleNamespace(
            read_table=lambda name: pd.DataFrame(rows) if name == "prompts" else None
        )

    monkeypatch.setattr(tuning, "evaluate", evaluate)
    return found


def test_a_third_goes_on_and_every_step_has_new_prompts(asked):
    prompts = [[number] for number in range(9)]
    trees = [TreeConfig(*map(int, text.split(","))) for text in MS]
    settings = dict(first=2, most=7, seed=3, limit=8, part=None, max_new_tokens=5)
    found = tuning.tune_static(
        shared_pair(), prompts, trees, EvaluateConfig(name="mine", repeats=2), **settings
    )
    items = gather(prompts, limit=8)
    random.Random(3).shuffle(items)
    names = [item.id for item in items[:7]]
    config = EvaluateConfig(name="mine", repeats=2, seed=3, max_new_tokens=5)
    assert asked == [
        (list(MS), names[:2], shared_pair(), config),
        (["4,2,2", "6,2,2"], names[2:], shared_pair(), config),
    ]
    assert found.policy.plan.text == "4,2,2"
    assert found.policy.tuned_on == {item.digest for item in items[:7]}
    assert len(found.runs) == 2
    columns = [
        "step",
        "method",
        "total_tokens",
        "depth",
        "top_k",
        "beam",
        "prompts",
        "ms_per_tok",
        "tau",
        "kept",
    ]
    assert list(found.table) == columns
    both = ["4,2,2", "6,2,2"]
    # Of two texts, and of seven, one in each step was longer.
    rows = [(0, label, 2, 2.1 / 20, label in both) for label in sorted(MS, key=MS.get)]
    rows += [(1, label, 7, 7.2 / 70, label == both[0]) for label in both]
    assert found.table.values.tolist() == [
        [
            step,
            label,
            *map(int, label.split(",")),
            "",
            prompts,
            pytest.approx(MS[label] * longer),
            3.0,
            kept,
        ]
        for step, label, prompts, longer, kept in rows
    ]


def test_a_race_ends_where_one_tree_is_left(asked):
    trees = [TreeConfig(4, 2, 2), TreeConfig(6, 2, 2)]
    found = tuning.tune_static(shared_pair(), [[1], [2], [3]], trees, first=1, most=1)
    assert len(asked) == 1 and len(asked[0][1]) == 1
    assert asked[0][3] == EvaluateConfig(name="tune_static")
    assert found.table["kept"].tolist() == [True, False]
    alone = tuning.tune_static(shared_pair(), [[1], [2]], trees[1:])
    assert alone.policy.plan == trees[1] and alone.table["prompts"].tolist() == [2]
    tuning.tune_static(shared_pair(), {"mine": [[number] for number in range(70)]}, trees)
    assert len(asked[-1][1]) == 60, "no more than sixty unless told otherwise"
    for name in ("first", "most"):
        none = pytest.raises(
            SpecdecError, tuning.tune_static, shared_pair(), [[1]], trees, **{name: 0}
        )
        none.match(f"{name} must be an integer of at least 1")


def test_only_the_tuning_part_of_suites_by_name_is_used(asked, monkeypatch):
    gathered = Mock(return_value=gather([[1], [2]]))
    by_name = {"toy/nq": ["a"]}
    monkeypatch.setattr(tuning, "gather", gathered)
    where = {"limit": 3, "folder": "here", "seed": 7}
    for prompts in (["toy/nq"], by_name):
        tuning.tune_static(shared_pair(), prompts, [TreeConfig(4, 2, 2)], part="test", **where)
    assert gathered.mock_calls == [
        call(["toy/nq"], part="tune", **where),
        call(by_name, part=None, **where),
    ]
    assert asked[0][3] == EvaluateConfig(name="tune_static", folder="here", seed=7)


@pytest.mark.parametrize(("first", "most"), [(3, 30), (4, 24), (1, 60), (4, 3)])
def test_the_answers_of_a_race_are_counted_before_it_runs(asked, first, most):
    tuning.tune_static(shared_pair(), ["toy/gsm8k", "toy/nq"], first=first, most=most)
    decoded = {id for _, ids, *_ in asked for id in ids}
    tune = {one.id for name in ("toy/gsm8k", "toy/nq") for one in split(load_suite(name))["tune"]}
    assert decoded <= tune and len(decoded) == min(most, len(tune))
    count = tuning.decodings(len(tuning.default_grid()), len(decoded), first)
    assert count == sum(len(some) * len(ids) for some, ids, *_ in asked)


def test_all_that_is_found_of_a_race(monkeypatch):
    """Live, a tree takes a millisecond per verified row, in suite "hard" the small one four times
    as long.
    """
    trace = synthetic_trace(turns=8)
    costs = round_costs()
    asked = []
    trace.turns["part"] = ["tune", "tune", "test", "test"] * 2
    small = TreeConfig(3, 1, 3)
    large = TreeConfig(5, 1, 3)

    def finalists(some, prices, count):
        assert (prices, count, set(some.turns["part"])) == (costs, 1, {"tune"})
        return [large if list(some.turns["suite"].unique()) == ["hard"] else small]

    def evaluate(methods, suite, pair, config):
        plans = {name: policy.plan for name, policy in methods.items()}
        asked.append((plans, suite, pair, config))
        ms = {name: 10.0 * plan.total_tokens for name, plan in plans.items()}
        ms |= {"3,1,3": 120.0} if suite == "hard" else {}
        rows = pd.DataFrame(
            [dict(method=name, new_tok=11, decode_ms=ms[name]) for name in plans for _ in range(2)]
        )
        return SimpleNamespace(read_table=lambda table: rows)

    items = Mock(side_effect=lambda suite, **named: [SimpleNamespace(digest=f"of {suite}")])
    for name, stand_in in (("finalists", finalists), ("evaluate", evaluate), ("gather", items)):
        monkeypatch.setattr(tuning, name, stand_in)
    found = tuning.race_static(
        "pair", trace, costs, count=1, limit=2, folder="here", part="tune", repeats=3
    )
    config = dict(limit=2, folder="here", part="tune", repeats=3)
    trees = {"3,1,3": small, "5,1,3": large}
    assert asked == [
        ({"3,1,3": small}, "easy", "pair", EvaluateConfig(name="race_static_easy", **config)),
        (trees, "hard", "pair", EvaluateConfig(name="race_static_hard", **config)),
    ]
    assert items.mock_calls == [
        call(suite, limit=2, folder="here", part="tune") for suite in ("easy", "hard")
    ]
    assert (found.tuned, found.per_suite) == (small, {"easy": small, "hard": large})
    assert found.tuned_on == {"of easy", "of hard"} and len(found.runs) == 2
    columns = [
        "suite",
        "total_tokens",
        "depth",
        "top_k",
        "beam",
        "predicted_ms",
        "measured_ms",
        "fastest",
    ]
    assert list(found.table) == columns
    tune = trace.select(part="tune")

    def predicted(tree, *suites):
        turns = static_turns(tune, costs, tree)
        turns = turns[turns["suite"].isin(suites)]
        return pytest.approx(turns["time_ms"].sum() / turns["new_tok"].sum())

    assert found.table.values.tolist() == [
        ["easy", 3, 1, 3, "", predicted(small, "easy"), 3.0, True],
        ["hard", 3, 1, 3, "", predicted(small, "hard"), 12.0, False],
        ["hard", 5, 1, 3, "", predicted(large, "hard"), 5.0, True],
        # the only one that all were decoded by
        ["all", 3, 1, 3, "", predicted(small, "easy", "hard"), 7.5, True],
    ]


def test_finalists_are_so_many_and_may_be_searched_in_a_part_of_the_grid():
    trace = synthetic_trace(top_ks=(2, 3))
    costs = round_costs()
    found = tuning.finalists(trace, costs)
    grid = static_grid(trace, costs).sort_values("time_ms", kind="stable")
    assert (
        len({(tree.depth, tree.top_k, tree.beam) for tree in found})
        == len(found)
        == tuning.FINALISTS
        == 5
    )
    assert found[0] == tree_of(grid.iloc[0]), "the fastest of all, and of each shape the fastest"
    of_shape = grid[(grid["depth"] == found[1].depth) & (grid["top_k"] == found[1].top_k)]
    assert found[1] == tree_of(of_shape.iloc[0])
    part = tuning.finalists(trace, costs, 2, depths=[1, 2], top_ks=[3])
    assert len(part) == 2 and {(tree.depth, tree.top_k) for tree in part} == {(1, 3), (2, 3)}


def test_the_race_decides_and_never_sees_a_test_prompt(home):
    suites = ["toy/gsm8k", "toy/mt_bench"]
    quiet = dict(max_new_tokens=12, progress=False, limit=2)
    pair = specdec.load_pair("tiny", dtype="float32")
    costs = round_costs()
    shape = dict(depth=3, top_ks=(2,), trees=(), family=(3, 3, 1))
    trace = specdec.record(pair, suites, **quiet | shape | {"limit": 6})
    race = tuning.race_static(pair, trace, costs, count=2, **quiet)
    table = race.table
    assert set(table["suite"]) == {*suites, "all"} and set(race.per_suite) == set(suites)
    for suite, rows in table.groupby("suite"):
        best = tree_of(rows.loc[rows["measured_ms"].idxmin()])
        assert best == (race.tuned if suite == "all" else race.per_suite[suite])
        assert rows["fastest"].sum() == 1
        assert (rows["measured_ms"] > 0).all()
        assert (rows["predicted_ms"] > 0).all()
    assert len(table[table["suite"] == "all"]) == 2
    for run in race.runs:
        prompts = run.read_table("prompts")["prompt"].unique()
        parts = trace.turns.set_index("prompt")["part"].groupby(level=0).first()
        assert {parts.get(prompt, "tune") for prompt in prompts} == {"tune"}
    again = specdec.record(pair, trace, temperature=1.0, **settings_of(trace), progress=False)
    assert again.turns[["suite", "prompt", "part"]].equals(
        trace.turns[["suite", "prompt", "part"]]
    ), "the same prompts"
    assert again.family == trace.family and again.depth == 3 and again.header["temperature"] == 1.0
    chosen = Baselines.from_race(
        pair, trace, costs, count=2, defaults=(TreeConfig(9, 3, 2),), **quiet
    )
    assert chosen.chosen_on == ("tune",) and set(chosen.per_suite) == set(suites)


def test_every_gate_is_tried_with_every_tree_and_each_tree_alone(monkeypatch):
    trace = SimpleNamespace(copies="copies", forwards=True)
    asked = []
    trees = [TreeConfig(4, 2, 3), TreeConfig(5, 3, 2, beam=(2, 1))]

    def timed(given, policy, costs):
        asked.append(policy)
        assert given is trace and costs == "costs"
        ms = 9.0 if isinstance(policy, Static) else policy.copied_tokens + policy.saved_frac
        return SimpleNamespace(tau=2.0, ms_per_tok=ms, speedup=1 / ms)

    monkeypatch.setattr(tuning, "replay", timed)
    table = tuning.tune_gate(trace, "costs", trees, copied=(8, 12), saved=(0.5, 0.25))
    numbers = [(4, 2, 3), (5, 3, 2, 2, 1)]
    assert [policy.plan for policy in (asked[0], asked[5])] == trees
    gates = [
        CopyGate(own, copied, saved)
        for own in numbers
        for copied in (8, 12)
        for saved in (0.5, 0.25)
    ]
    assert [policy for policy in asked if isinstance(policy, CopyGate)] == gates
    assert list(table) == [
        "policy",
        "tree",
        "copied_tokens",
        "saved_frac",
        "tau",
        "ms_per_tok",
        "speedup",
    ]
    assert table["ms_per_tok"].tolist() == [
        8.25,
        8.25,
        8.5,
        8.5,
        9.0,
        9.0,
        12.25,
        12.25,
        12.5,
        12.5,
    ]
    assert table.index.tolist() == list(range(10))
    assert table["tree"].unique().tolist() == [tree.text for tree in trees]
    assert table["saved_frac"].tolist()[:4] == [0.25, 0.25, 0.5, 0.5]
    assert table["copied_tokens"].isna().sum() == 2
    assert np.isnan(table["saved_frac"][4]) and (table["speedup"] == 1 / table["ms_per_tok"]).all()
    asked.clear()
    tuning.tune_gate(trace, "costs", trees[:1])
    usual = [(copied, saved) for copied in (6, 8, 12) for saved in (0.1, 0.2, 0.3, 0.4)]
    assert [(one.copied_tokens, one.saved_frac) for one in asked[1:]] == usual
    for without in ({"copies": None}, {"forwards": False}):
        given = SimpleNamespace(**vars(trace) | without), "costs", trees
        pytest.raises(SpecdecError, tuning.tune_gate, *given).match(
            "record a drafter that has both"
        )
