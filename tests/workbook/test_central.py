"""The central table's terms and rows, on recordings made up for the purpose."""

import numpy as np
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import Static
from specdec.evaluation import compare

from workbook import central, terms

COSTS = round_costs()


def recording(**shape):
    trace = synthetic_trace(turns=24, positions=30, hit=0.6, **shape)
    parts = np.array(["train", "tune", "test"])[np.arange(24) % 3]
    trace.turns = trace.turns.assign(part=parts)
    return trace


def test_equal_terms_begin_with_the_tuned_trees_own_shape():
    trace = recording(depth=4, top_ks=(3,), most_nodes=20)
    equal = central.same_space(trace, COSTS, 0.5)
    tuned = compare.Baselines.choose(trace, COSTS).tuned
    assert equal.shapes[0] == (tuned.top_k, *tuned.beam)
    assert len(equal.shapes) == len(terms.EqualTerms().shapes)
    assert max(equal.total_tokens) == 241 and equal.depth == 12 and equal.effort == 0.5


def test_speeds_over_the_tuned_tree_have_intervals_over_prompts():
    trace = recording(depth=7, top_ks=(10,), most_nodes=60)
    baselines = compare.Baselines.choose(trace, COSTS)
    options = {"policy_ms": {"mine": 0.5}, "random_seeds": (), "progress": False}
    policies = {"mine": Static(4, 1, 10)}
    comparison = compare.compare_replay(trace, COSTS, policies, baselines=baselines, **options)
    rows = central.over_tuned(comparison).set_index("method")
    row = rows.loc["mine"].iloc[-1]
    assert row["over_tuned_low"] <= row["over_tuned"] <= row["over_tuned_high"]
    assert row["over_tuned_low"] == row["over_tuned_prompts_low"]


def test_prices_are_calibrated_or_from_data_sheets(tmp_path):
    COSTS.save(tmp_path / "costs-float32.json")
    assert central.costs_of("float32", tmp_path).verify == COSTS.verify
    small = central.costs_of("a100-llama-8b-graphs", tmp_path)
    large = central.costs_of("h100x8-llama-70b-graphs", tmp_path)
    measured = central.costs_of("h100-llama-3.1-8b-graphs", tmp_path)
    assert small.name == "roofline-a100-llama-8b-graphs" and small.step > measured.step
    assert measured.kind == "measured" and large.name == "roofline-h100x8-llama-70b-graphs"
