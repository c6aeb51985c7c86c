"""Tables of live decoding, by hand: what the bench is asked for, which figure is compared with
which, what is left out.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pandas as pd
import pytest
from fakes.pairs import shared_pair
from fakes.rows import speedup
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree_config import TreeConfig
from specdec.costs.measure import CalibrateConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare_live, stats
from specdec.evaluation.bench import EvaluateConfig
from specdec.evaluation.compare import Baselines, Comparison
from specdec.evaluation.compare_live import Live, LiveCheck
from specdec.identity import Method

DEFAULT = TreeConfig(16, 4, 3)
TUNED = TreeConfig(6, 2, 3)
TREES = Baselines((DEFAULT,), TUNED, {"toy/x": TreeConfig(5, 2, 3), "toy/y": TreeConfig(4, 1, 3)})


@pytest.fixture
def asked(monkeypatch):
    """What the bench was asked for; each run has a row of each table."""
    found = []

    def evaluate(methods, suite, pair, config, between=None):
        found.append((methods, suite, pair, config, between))
        tables = {
            name: pd.DataFrame({"of": [name], "suite": [suite]}) for name in ("prompts", "cycles")
        }
        tables["prompts"]["machine"] = "here"
        return SimpleNamespace(read_table=tables.get, name=config.name)

    monkeypatch.setattr(compare_live, "evaluate", evaluate)
    return found


def test_every_suite_is_a_run_with_its_own_tree(asked, monkeypatch):
    warned = Mock()
    pair = SimpleNamespace(name="made up")
    monkeypatch.setattr(compare_live, "warn_elsewhere", warned)
    seeds = [RandomPolicy(TUNED, seed, asks=("size",)) for seed in range(3)]
    policies = {"several": seeds, "one": Static(3, 1, 3)}
    live = compare_live.decode_live(
        pair, policies, ["toy/x", "toy/y"], TREES, seeds=2, part="train", limit=4
    )
    assert [(suite, given, config, between) for _, suite, given, config, between in asked] == [
        (
            suite,
            pair,
            EvaluateConfig(name=f"controllers_toy_{suite[-1]}", part="test", limit=4),
            None,
        )
        for suite in ("toy/x", "toy/y")
    ]
    for (methods, suite, *_), own in zip(asked, TREES.per_suite.values(), strict=True):
        names = [
            "autoregressive",
            "default 16,4,3",
            "tuned static",
            "per-suite tuned static",
            "random",
        ]
        assert list(methods) == [*names, "several #0", "several #1", "one"], suite
        plans = {name: methods[name].plan for name in (*names[1:4], "one")}
        assert plans == dict(zip(plans, (DEFAULT, TUNED, own, TreeConfig(3, 1, 3)), strict=True))
        assert methods["autoregressive"] == "autoregressive" and methods["random"].limits == DEFAULT
        for seed in range(2):
            copied = methods[f"several #{seed}"]
            assert copied is not seeds[seed]
            assert copied._random.getstate() == seeds[seed]._random.getstate()
    assert warned.mock_calls == [
        call(policy, pair="made up") for policy in (*seeds[:2], policies["one"])
    ]
    several = {f"several #{seed}": ("several", seed) for seed in range(2)}
    assert live.labels == {name: (name, 0) for name in (*names, "one")} | several
    assert (live.policies, live.default, live.costs) == (("several", "one"), "default 16,4,3", None)
    assert [run.name for run in live.runs] == ["controllers_toy_x", "controllers_toy_y"]
    assert live.prompts.values.tolist() == [
        ["prompts", "toy/x", "here"],
        ["prompts", "toy/y", "here"],
    ]
    assert (live.temperature, live.machine) == (0.0, "here")
    assert live.cycles.reset_index().values.tolist() == [
        [0, "cycles", "toy/x"],
        [1, "cycles", "toy/y"],
    ]
    warm = EvaluateConfig(name="mine", seed=3, temperature=0.5)
    first = compare_live.decode_live(pair, {"several": seeds}, "toy/x", TREES, warm)
    assert first.labels["several"] == ("several", 0)
    assert "several #0" not in first.labels
    assert first.temperature == 0.5
    assert asked[2][3] == replace(warm, name="mine_toy_x", part="test") and asked[2][1] == "toy/x"


def test_calibration_is_spread_over_all_suites(asked, monkeypatch, tmp_path):
    few = CalibrateConfig(seconds=3)
    made = Mock()
    plain = compare_live.evaluate
    timing = made.return_value
    timing.begun = True
    timing.model.return_value = round_costs(name="measured here")
    monkeypatch.setattr(compare_live, "Calibration", made)

    def evaluate(*given, between):
        run = plain(*given, between=between)
        between(0.5)
        run.path = lambda name: tmp_path / run.name / name
        return run

    monkeypatch.setattr(compare_live, "evaluate", evaluate)
    live = compare_live.decode_live("pair", {}, ["toy/x", "toy/y"], TREES, calibration=few)
    assert [path.parent.name for path in tmp_path.rglob("costs.json")] == ["controllers_toy_y"], (
        "beside the last run"
    )
    assert made.mock_calls == [
        call("pair", few),
        call().go_on(0.25),
        call().go_on(0.25),
        call().model(),
    ]
    assert live.costs.name == "measured here"
    timing.begun, timing.model = False, None
    kept = compare_live._measured_beside(live.runs[1], timing)
    assert kept == live.costs, "what was measured beside a finished run stays with it"


OURS = Method("ours", "equal")
IDENTITY = OURS.fields | {"temperature": 0.5, "machine": "here"}
TIMES = {
    "autoregressive": (100, 60),
    "d": (50, 40),
    "tuned static": (40, 30),
    "ours #0": (25, 20),
    "ours #1": (32, 30),
}


def live_rows() -> Live:
    """Two suites of two prompts by plain decoding, two trees and two seeds; a policy's share of the
    time is an eighth.
    """
    prompts = []
    cycles = []
    for name, pair_of_ms in TIMES.items():
        for suite, longer in (("x", 0), ("y", 4)):
            for number, ms in enumerate(pair_of_ms):
                key = dict(suite=suite, prompt=f"{suite}/{number}", turn=0, method=name, repeat=0)
                counted = 0 if name == "autoregressive" else 4
                row = key | dict(
                    new_tok=11 + longer, cycles=counted, cycle_tok=3 * counted, prompt_tok=7
                )
                row |= dict(total_ms=ms + 5.0, decode_ms=float(ms), same=name != "d" or number == 0)
                prompts.append(row | dict(correct=number == 0 if suite == "x" else None))
                lap = dict(draft_calls=3 + number, verify_nodes=8, policy_ms=1.0, total_ms=8.0)
                cycles += [key | lap] * counted
    labels = {name: (name, 0) for name in ("autoregressive", "d", "tuned static")}
    labels |= {"ours #0": (OURS, 0), "ours #1": (OURS, 1)}
    table = pd.DataFrame(prompts).astype({"correct": "boolean"})
    return Live((), table, pd.DataFrame(cycles), labels, (OURS,), "d", None, 0.5, "here")


def columns_of(rows: pd.DataFrame, method: str, reference: str, time: str = "total_ms") -> list:
    own = [rows[rows["method"] == name].set_index("prompt") for name in (method, reference)]
    return [one[name].to_numpy(float) for one in own for name in ("new_tok", time)]


def test_a_row_by_the_clock_is_whole_also_of_some_turns():
    live = live_rows()
    table = compare_live.live_table(live, level=0.9)
    names = ["autoregressive", "d", "tuned static", OURS, OURS]
    assert table["suite"].tolist() == ["x"] * 5 + ["y"] * 5 + ["all"] * 5
    assert table["method"].tolist() == names * 3
    assert table["seed"].tolist() == [0, 0, 0, 0, 1] * 3
    row = table.iloc[13].to_dict()
    expected = {"suite": "all", "method": str(OURS), "seed": 0, "prompts": 4}
    expected["tok_per_s"] = pytest.approx(1e3 * 52 / 110)
    for name, reference in (
        ("speedup", "autoregressive"),
        ("over_default", "d"),
        ("over_tuned", "tuned static"),
    ):
        both = [
            speedup(*columns_of(live.prompts, ours, reference), level=0.9)
            for ours in ("ours #0", "ours #1")
        ]
        ends = {name: both[0].value, f"{name}_low": both[0].low, f"{name}_high": both[0].high}
        expected |= {column: pytest.approx(value) for column, value in ends.items()}
        if name != "speedup":
            adjusted = stats.holm([one.p_value for one in both])[0]
            expected[f"{name.replace('over', 'p')}_holm"] = pytest.approx(adjusted)
    expected |= {
        "tau": 3.0,
        "tau_low": 3.0,
        "tau_high": 3.0,
        "tau_macro": 3.0,
        "draft_calls": 3.5,
        "verify_nodes": 8.0,
    }
    expected |= {"policy_frac": 1 / 8, "same_frac": 1.0, "checked": 2, "accuracy_frac": 0.5}
    assert row == expected | IDENTITY
    plain = table.iloc[10]
    assert (
        plain[["over_default", "over_tuned", "p_tuned_holm", "policy_frac", "draft_calls"]]
        .isna()
        .all()
    )
    assert table.iloc[1]["same_frac"] == 0.5 and np.isnan(table.iloc[5]["accuracy_frac"])
    assert table["p_tuned_holm"].notna().sum() == 6, "baselines are no hypotheses"
    nobody = compare_live.live_table(replace(live, policies=()))
    assert not [name for name in nobody if name.startswith("p_")]
    short = live.prompts["prompt"] == "x/1"
    live.prompts.loc[short, "new_tok"] = 1
    table = compare_live.live_table(live, prefill=False).set_index(["suite", "method", "seed"])
    assert table.loc[("x", OURS, 0), "tok_per_s"] == 1e3 * 10 / 25
    assert table.loc[("x", OURS, 0), "prompts"] == 1
    assert table.loc[("all", OURS, 1), "speedup"] == pytest.approx(
        (100 + 100 + 60) / (32 + 32 + 30)
    )
    assert table.loc[("x", OURS, 0), "draft_calls"] == 3.0, (
        "cycles of a turn that is left out do not count"
    )
    wanted = pd.DataFrame([dict(suite="y", prompt="y/1", turn=0)] * 2)
    one = compare_live.live_table(live, only=wanted)
    assert set(one["suite"]) == {"y"} and set(one["prompts"]) == {1}
    assert one["speedup"].iloc[3] == pytest.approx(65 / 25)
    assert one["draft_calls"].iloc[1] == 4.0
    live.prompts["new_tok"] = 1
    pytest.raises(SpecdecError, compare_live.live_table, live, prefill=False).match(
        "nothing to compare"
    )


def predicted() -> Comparison:
    """Of the same turns and one more; times of the first prompt are as by the clock, of the second
    twice as long.
    """
    rows = []
    for name, pair_of_ms in (TIMES | {"clairvoyant": (5, 4)}).items():
        for suite, longer in (("x", 0), ("y", 4), ("z", 0)):
            for number, ms in enumerate(pair_of_ms):
                row = dict(
                    suite=suite,
                    prompt=f"{suite}/{number}",
                    turn=0,
                    part="test",
                    seed=int(name == "ours #1"),
                )
                row |= dict(new_tok=10 + longer, cycles=4, cycle_tok=12)
                row["method"] = str(OURS) if name.startswith("ours") else name
                row |= dict(
                    plain_ms=(100.0, 60.0)[number],
                    time_ms=ms * (1.0 + number),
                    policy_ms=0.0,
                    verified_tok=9,
                )
                rows.append(row | dict(draft_calls=0 if name == "autoregressive" else 8))
    trees = SimpleNamespace(default="d", trees={})
    return Comparison(pd.DataFrame(rows), pd.DataFrame(), trees, {OURS: 0.0})


def test_a_row_beside_the_clock_is_whole():
    live = live_rows()
    comparison = predicted()
    table = compare_live.beside(comparison, live, level=0.9)
    clock = compare_live.live_table(live, prefill=False, level=0.9)
    assert (
        table[["suite", "method", "seed"]].values.tolist()
        == clock[["suite", "method", "seed"]].values.tolist()
    )
    row = table.iloc[13].to_dict()
    real = clock.iloc[13]
    ms = (25 + 40) * 2 / 48
    live_ms = (25 + 20) * 2 / 48
    ratios = {"speedup": (320 / 130, 320 / 90), "over_default": (260 / 130, 180 / 90)}
    ratios["over_tuned"] = (200 / 130, 140 / 90)
    expected = {"suite": "all", "method": str(OURS), "seed": 0, "prompts": 4}
    for name, (replayed, timed) in ratios.items():
        low = real[f"{name}_low"]
        high = real[f"{name}_high"]
        expected |= {
            f"replay_{name}": pytest.approx(replayed),
            f"live_{name}": pytest.approx(timed),
        }
        expected |= {f"live_{name}_low": low, f"live_{name}_high": high}
        expected |= {
            f"{name}_off": pytest.approx(replayed / timed - 1),
            f"{name}_inside": low <= replayed <= high,
        }
    expected |= {"replay_ms_per_tok": pytest.approx(ms), "live_ms_per_tok": pytest.approx(live_ms)}
    assert row == expected | {"ms_per_tok_off": pytest.approx(ms / live_ms - 1)} | IDENTITY
    assert not row["speedup_inside"] and row["over_default_inside"]
    one = compare_live.beside(
        comparison, replace(live, prompts=live.prompts[live.prompts["prompt"] == "x/0"])
    )
    assert set(one["suite"]) == {"x"} and one["speedup_inside"].isna().all()


def test_facts_of_a_check_are_whole_also_beside_other_prices_and_those_of_agreement(monkeypatch):
    columns = (
        "suite method replay_over_tuned live_over_tuned ms_per_tok_off "
        "replay_ms_per_tok live_ms_per_tok"
    )
    tuned = ("x", "tuned static", 1.0, 1.5, 0.5, 3.0, 3.0)
    first = ("x", "a", 2.0, 1.75, -0.25, 1.0, 2.0)
    rows = pd.DataFrame(
        [tuned, first, ("x", "b", 1.5, 1.0, 0.125, 2.0, 1.0)], columns=columns.split()
    )
    expected = {"methods": 3.0, "median_frac": 0.25, "worst_frac": 0.5, "spearman": 0.5}
    expected |= {"gain_median": 0.375, "gain_worst": 0.5}
    assert compare_live.agreement(rows) == pytest.approx(expected)
    both = pd.concat([rows.assign(suite="x", ms_per_tok_off=9.0), rows.assign(suite="all")])
    assert compare_live.agreement(both) == pytest.approx(expected)
    assert all(type(value) is float for value in compare_live.agreement(rows).values())
    found = checked()
    facts = dict(trees=3, turns=7, left_out=2, cycles_differing=1, spearman=0.5, drift_frac=0.25)
    facts |= dict(
        median_frac=0.25, median_relative_frac=0.125, worst_frac=0.5, worst_relative_frac=0.25
    )
    assert found.facts == facts | {"uncertainty_frac": pytest.approx(1.96 * 2**0.5 * 0.1)}
    assert found.trees["method"].tolist() == ["a", "b", "c"]
    assert type(found.facts["spearman"]) is float
    assert "costs=" not in repr(found) and "trace=" not in repr(found)
    found.table["depth"], found.table["top_k"], found.table["beam"] = 2, 3, ["", "", "2,1", ""]
    predict = Mock(return_value=found)
    monkeypatch.setattr(compare_live, "check_predictions", predict)
    assert replace(found, left_out=99).priced(round_costs(name="other")).left_out == 99
    trees = {
        "a": TreeConfig(4, 2, 3),
        "b": TreeConfig(6, 2, 3, beam=(2, 1)),
        "c": TreeConfig(8, 2, 3),
    }
    predict.assert_called_once_with(found.trace, round_costs(name="other"), trees, "run")


def checked() -> LiveCheck:
    table = pd.DataFrame(
        [
            ("autoregressive", 9.0, 9.0, np.nan),
            ("a", 0.25, -0.125, 4),
            ("b", -0.5, 0.25, 6),
            ("c", 0.125, 0.0625, 8),
        ],
        columns=["method", "error_frac", "relative_frac", "total_tokens"],
    )
    costs = round_costs(errors={"tree_frac": 0.1})
    return LiveCheck(table, np.float64(0.5), 0.25, 7, 2, 1, "run", costs, synthetic_trace())


def test_a_check_decodes_the_first_prompts_of_the_test_part(monkeypatch):
    pair = shared_pair()
    trace = synthetic_trace(turns=12)
    described = compare_live.describe_pair(pair)
    trace.header |= dict(pair="random", weights=described["weights"], max_new_tokens=17, seed=5)
    costs = round_costs(kind="calibrated", pair="random", dtype="float32")
    trees = {"small": TreeConfig(4, 1, 3), "deep": TreeConfig(12, 4, 3)}
    gather = Mock(return_value=[SimpleNamespace(id=f"p{number}") for number in reversed(range(12))])
    evaluate = Mock(return_value="run")
    monkeypatch.setattr(compare_live, "gather", gather)
    monkeypatch.setattr(compare_live, "evaluate", evaluate)
    monkeypatch.setattr(compare_live, "check_predictions", lambda *given: given)
    some, prices, chosen, run = compare_live.live_check(
        pair, trace, costs, trees, temperature=1.0, repeats=2
    )
    gather.assert_called_once_with(["easy", "hard"], folder=None, seed=5)
    (methods, items, given, config), between = evaluate.call_args
    assert [item.id for item in items] == some.turns["prompt"].tolist() == ["p2", "p3", "p6", "p7"]
    assert set(some.turns["part"]) == {"test"} and between == {"between": None}
    assert (given, prices, chosen, run) == (pair, costs, trees, "run")
    assert config == EvaluateConfig(
        name="live_check", max_new_tokens=17, temperature=0.0, repeats=2
    )
    assert methods.pop("autoregressive") == "autoregressive"
    assert {name: way.plan for name, way in methods.items()} == trees
    mine = EvaluateConfig(name="mine", part="train", limit=1)
    train, *_ = compare_live.live_check(pair, trace, costs, trees, ["toy/nq"], mine)
    assert train.turns["prompt"].tolist() == ["p0", "p1"]
    assert evaluate.call_args.args[3].name == "mine"
    assert gather.call_args.args == (["toy/nq"],)


def test_trees_that_are_picked_are_spread_evenly(monkeypatch):
    trace = synthetic_trace(turns=8, top_ks=(2, 3), most_nodes=40)
    costs = round_costs()
    default = TreeConfig(12, 4, 3)
    plain = compare_live.static_grid
    grid = Mock(wraps=plain)
    monkeypatch.setattr(compare_live, "static_grid", grid)
    trees = compare_live.pick_trees(trace, costs, 5, default=default)
    some, _, *given = grid.call_args.args
    assert set(some.turns["part"]) == {"train"} and given == [[4, 8, 12, 16, 24, 32], range(1, 5)]
    table = plain(trace.select(part="train"), costs, *given).sort_values(
        "ms_per_tok", kind="stable"
    )
    ranked = list(dict.fromkeys(map(compare_live.tree_of, table.to_dict("records"))))
    others = [tree for tree in ranked[1:] if tree != default]
    # From the fastest of the others, which is as good as the tuned one and left out, to the slowest
    # in equal steps.
    places = [round((len(others) - 1) * part / 3) for part in (1, 2, 3)]
    assert trees == {"default": default, "tuned": ranked[0]} | {
        others[place].text: others[place] for place in places
    }
    assert len(compare_live.pick_trees(trace, costs, default=default)) == 10
    compare_live.pick_trees(trace, costs, 2, part="test", default=default)
    assert set(grid.call_args.args[0].turns["part"]) == {"test"}
    most = len(others) + 2
    assert len(compare_live.pick_trees(trace, costs, most, default=default)) == most
    for count in (1, most + 1):
        refused = pytest.raises(
            SpecdecError, compare_live.pick_trees, trace, costs, count, default=default
        )
        refused.match(f"{count} trees were asked for, but {most} are there")
    # EAGLE-3's tree is wider
    pytest.raises(SpecdecError, compare_live.pick_trees, trace, costs).match("record")
