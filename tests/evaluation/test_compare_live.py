"""Predicted and measured trees side by side: exact counts on a real pair, arithmetic on made-up
times.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fakes.pairs import shared_pair
from fakes.traces import round_costs, synthetic_trace

from specdec.core.tree_config import TreeConfig
from specdec.costs.measure import CalibrateConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare_live
from specdec.evaluation.compare_live import check_predictions, live_check
from specdec.replays.record import record
from specdec.replays.static_trees import static_grid, static_turns, tree_of

TREES = {"small": TreeConfig(4, 1, 3), "deep": TreeConfig(12, 4, 3), "wide": TreeConfig(20, 2, 3)}


@pytest.fixture
def recorded(home):
    """Prompts, a random pair's recording of them, and a cost model that claims to be of it."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 24, size).tolist() for size in (5, 9, 13)]
    shape = dict(depth=4, top_ks=(3,), trees=(), most_nodes=30, features=False)
    trace = record(shared_pair(), prompts, max_new_tokens=20, progress=False, **shape)
    return prompts, trace, round_costs(kind="calibrated", pair="random", dtype="float32")


def test_live_decoding_takes_the_predicted_cycles(recorded):
    prompts, trace, costs = recorded
    check = live_check(shared_pair(), trace, costs, TREES, prompts, limit=2, progress=False)
    counts = [check.facts[name] for name in ("trees", "turns", "left_out", "cycles_differing")]
    assert counts == [3, 2, 0, 0]
    assert check.table["method"].tolist() == ["autoregressive", *TREES]
    first = trace.select(np.arange(3) < 2)
    tokens = first.turns["positions"].sum()
    table = check.table.set_index("method")
    live = check.run.read_table("prompts").groupby("method")["decode_ms"].sum()
    for name, tree in TREES.items():
        row = table.loc[name]
        assert row[["total_tokens", "depth", "top_k"]].tolist() == [
            tree.total_tokens,
            tree.depth,
            tree.top_k,
        ]
        predicted = static_turns(first, costs, tree)["time_ms"].sum() / tokens
        assert row["predicted_ms"] == pytest.approx(predicted)
        assert row["measured_ms"] == pytest.approx(live[name] / tokens)
    # a step of the made-up machine
    assert table["predicted_ms"].iloc[0] == pytest.approx(4.0)


@pytest.mark.filterwarnings("ignore")  # so short a calibration is not exact
def test_costs_measured_between_the_prompts_are_kept(recorded, monkeypatch):
    prompts, trace, costs = recorded
    pieces = []
    go_on = compare_live.Calibration.go_on

    def counted(self, frac):
        pieces.append(frac)
        return go_on(self, frac)

    monkeypatch.setattr(compare_live.Calibration, "go_on", counted)
    grid = dict(top_ks=(1, 2, 3), nodes=(0, 2, 4), depth=4, contexts=(5, 20))
    few = CalibrateConfig(seconds=0.2, progress=False, **grid)
    options = dict(prompts=prompts, limit=2, progress=False)
    check = live_check(shared_pair(), trace, few, TREES, **options)
    again = live_check(shared_pair(), trace, few, TREES, **options)
    assert pieces == [0.5, 0.5], "a finished run was measured again, or a prompt had no share"
    assert check.table.equals(again.table) and (check.trees["predicted_ms"] > 0).all()
    priced = check.priced(costs)
    assert priced.table["measured_ms"].equals(check.table["measured_ms"])
    assert priced.table["predicted_ms"].iloc[0] == pytest.approx(4.0)
    fresh = live_check(shared_pair(), trace, few, TREES, force=True, **options)
    uncertainty = [one.facts["uncertainty_frac"] for one in (check, fresh)]
    assert uncertainty[0] != uncertainty[1], "new decodings need new costs"


def made_up(factors, changes=(), **costs):
    """The check of a synthetic recording against a bench run that took `factors` times as long as
    predicted.

    changes: (method, prompt, column, its value there).
    """
    trace = synthetic_trace()
    costs = round_costs(**costs)
    parts = []
    for name, tree in {"autoregressive": TreeConfig(1, 0, 3), **TREES}.items():
        turns = static_turns(trace, costs, tree)
        ms = turns["plain_ms"] if name == "autoregressive" else turns["time_ms"]
        row = turns[["suite", "prompt", "turn", "cycles"]].assign(method=name, repeat=0, same=True)
        row["new_tok"] = trace.turns["kept_tok"]
        parts.append(row.assign(decode_ms=ms * factors.get(name, 1.0)))
    rows = pd.concat(parts, ignore_index=True)
    for method, prompt, column, value in changes:
        rows.loc[(rows["method"] == method) & (rows["prompt"] == prompt), column] = value
    return check_predictions(trace, costs, TREES, SimpleNamespace(read_table=lambda name: rows))


@pytest.mark.parametrize("slow", [(), tuple(TREES), ("autoregressive", *TREES)])
def test_speeds_that_drift_keep_their_ranks(slow):
    check = made_up(dict.fromkeys(slow, 1.2))
    drift = 0.2 if slow else 0.0
    alone = 0.2 if slow == tuple(TREES) else 0.0  # of the trees, not of plain decoding
    expected = {"trees": 3, "turns": 6, "left_out": 0, "cycles_differing": 0, "spearman": 1.0}
    expected.update(drift_frac=drift, median_frac=drift, worst_frac=drift)
    expected.update(median_relative_frac=alone, worst_relative_frac=alone)
    for name, value in expected.items():
        assert check.facts[name] == pytest.approx(value, abs=1e-12), name
    assert check.table["within_costs"].isna().tolist() == [True, False, False, False]


def test_one_slow_tree_is_beyond_the_costs_and_changes_the_ranks():
    factors = {**dict.fromkeys(TREES, 1.2), "wide": 1.5}
    check = made_up(factors, errors={"tree_frac": 0.05})
    within = check.table.set_index("method")["within_costs"]
    assert within[list(TREES)].tolist() == [True, True, False]
    assert check.facts["uncertainty_frac"] == pytest.approx(0.05 * 1.96 * 2**0.5)
    ms = check.trees.set_index("method")["predicted_ms"].sort_values()
    slowest = made_up({ms.index[0]: 2 * ms.iloc[-1] / ms.iloc[0]})
    assert slowest.facts["spearman"] == pytest.approx(-0.5)
    assert slowest.facts["worst_frac"] == pytest.approx(2 * ms.iloc[-1] / ms.iloc[0] - 1)
    assert slowest.facts["median_frac"] == pytest.approx(0, abs=1e-12)


def test_the_prompt_is_read_in_a_first_cycle_and_other_texts_are_left_out():
    usual = made_up({}).table["predicted_ms"]
    later = made_up({}, reading=2.0, reading_per_tok=0.5).table["predicted_ms"] - usual
    turns = synthetic_trace().turns
    expected = (2.0 + 0.5 * turns["prompt_tok"]).sum() / turns["positions"].sum()
    assert later[0] == 0 and later[1:].tolist() == pytest.approx([expected] * 3)
    facts = made_up({}, [("deep", "p1", "new_tok", 1), ("wide", "p2", "same", False)]).facts
    assert (facts["turns"], facts["left_out"]) == (4, 2)
    assert facts["worst_frac"] == pytest.approx(0, abs=1e-12)
    assert made_up({}, [("deep", "p1", "cycles", 1)]).facts["cycles_differing"] == 1


def test_what_does_not_belong_together_is_refused_before_decoding(recorded, monkeypatch):
    prompts, trace, costs = recorded
    nothing = lambda *_, **__: pytest.fail("decoded before refusing")  # noqa: E731
    monkeypatch.setattr(compare_live, "evaluate", nothing)

    def header(**changes):
        other = trace.select(np.ones(3, dtype=bool))
        other.header = {**trace.header, **changes}
        return {"trace": other}

    refused = {
        "recording belongs to the pair 'random'": header(weights="other"),
        "this recording was sampled": header(temperature=1.0),
        "not of this machine": {"costs": dataclasses.replace(costs, kind="published")},
        "'prompts/1' is not among the prompts": {"prompts": prompts[:1]},
    }
    options = {"trace": trace, "costs": costs, "trees": TREES, "prompts": prompts}
    for word, changes in refused.items():
        with pytest.raises(SpecdecError, match=word):
            live_check(shared_pair(), progress=False, **{**options, **changes})


def test_trees_that_are_picked_are_spread_evenly():
    trace = synthetic_trace(turns=8, top_ks=(2, 3), most_nodes=40)
    costs = round_costs()
    default = TreeConfig(12, 4, 3)
    trees = compare_live.pick_trees(trace, costs, 5, default)
    train = trace.select(part="train")
    table = static_grid(train, costs, [4, 8, 12, 16, 24, 32], range(1, 5))
    rows = table.sort_values("ms_per_tok", kind="stable").to_dict("records")
    ranked = list(dict.fromkeys(map(tree_of, rows)))
    rest = [tree for tree in ranked[1:] if tree != default]
    # From the fastest of the rest, which is as good as the tuned one and left out, to the slowest
    # in equal steps.
    places = [round((len(rest) - 1) * part / 3) for part in (1, 2, 3)]
    expected = {"default": default, "tuned": ranked[0]}
    expected.update({rest[place].text: rest[place] for place in places})
    assert trees == expected
    # EAGLE-3's tree is wider
    pytest.raises(SpecdecError, compare_live.pick_trees, trace, costs).match("record")
