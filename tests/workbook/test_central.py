"""The central table's terms and rows, and the ladder of what is known, on recordings made up for
the purpose.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.traces import round_costs, synthetic_trace

import specdec
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.evaluation import compare
from specdec.replays.replay import replay

from workbook import central, ladder, terms

COSTS = round_costs()
SHAPE = (3, ())


@pytest.fixture(scope="module")
def trace():
    made = synthetic_trace(turns=24, positions=40, depth=4, top_ks=(3,), most_nodes=20, hit=0.6)
    turns = made.turns.assign(part=np.array(["train", "tune", "test"])[np.arange(24) % 3])
    turns["ids"] = [np.arange(tok + 41) % 7 for tok in turns["prompt_tok"]]
    made.turns, made.header["trees"] = turns, [3]
    return made


def test_answers_and_walks_are_those_of_replay(trace):
    answers = ladder.Answers.of(trace, COSTS, SHAPE)
    assert (
        answers.expansions[0] == -1 and answers.nodes[0] == 0 and (answers.new_tok[:, 0] == 1).all()
    )
    number = int(np.flatnonzero((answers.expansions == 2) & (answers.nodes == 8))[0])
    walked = ladder.walked(trace, answers, np.full(len(trace), number))
    replayed = replay(trace, Static.of(TreeConfig(9, 2, 3)), COSTS).table
    np.testing.assert_allclose(walked["time_ms"], replayed["time_ms"], rtol=1e-6)
    assert walked["cycles"].tolist() == replayed["cycles"].tolist()
    best = ladder.best_static(trace, answers)
    times = [
        ladder.walked(trace, answers, np.full(len(trace), one))["time_ms"] for one in (best, number)
    ]
    asked = trace.turns["part"].isin(["train", "tune"]).to_numpy()
    assert times[0][asked].sum() <= times[1][asked].sum()


def test_knowing_the_truth_is_worth_more_than_knowing_nothing(trace):
    answers = ladder.Answers.of(trace, COSTS, SHAPE)
    nothing = np.tile(answers.new_tok.mean(0), (len(trace), 1))
    half = ladder.mixed(nothing, answers, 0.5)
    same = (half == answers.new_tok).all(1).mean()
    assert 0.4 < same < 0.75
    static = ladder.best_static(trace, answers)
    times = [
        ladder.walked(trace, answers, ladder.taken(trace, answers, told, static))["time_ms"].sum()
        for told in (nothing, half, answers.new_tok)
    ]
    assert times[0] > times[1] > times[2]
    late = ladder.taken(trace, answers, answers.new_tok, static, least=2)
    assert (answers.expansions[late] >= 2).all(), "what has passed is no answer"


def test_a_forecast_learns_what_its_columns_tell(trace):
    answers = ladder.Answers.of(trace, COSTS, SHAPE)
    part = trace.turns["part"].to_numpy().repeat(trace.turns["positions"])
    truth, draw = answers.new_tok[:, -1], np.random.default_rng(77)
    told = np.stack([truth, draw.normal(size=len(truth))], 1)
    predicted = ladder.fit(told, answers, part, seeds=(0,))[part == "test", -1]
    blind = ladder.fit(told[:, 1:], answers, part, seeds=(0,))[part == "test", -1]
    assert (
        ladder.explained(predicted, truth[part == "test"])
        > 0.8
        > 0.1
        > ladder.explained(blind, truth[part == "test"])
    )


def test_what_a_gain_needs_lies_between_the_rows_of_the_ladder():
    rows = dict(
        choosing=["free", "free", "paid", "free"],
        r2=[0.5, 0.1, 0.2, 0.3],
        over_static=[1.2, 1.0, 1.4, 1.0],
    )
    needed = ladder.worth(pd.DataFrame(rows), (0.9, 1.05, 1.1, 1.3))
    assert list(needed.values())[:3] == pytest.approx([0.1, 0.35, 0.4]) and np.isnan(needed[1.3])


def test_memory_looks_back_only(trace):
    found, (first, *_) = ladder.memory(trace, SHAPE), trace.turns["first"]
    accepted = (trace.ranks[SHAPE][:, -1] < ladder.NEVER).sum(-1)
    for row in range(first + 1, first + 8):  # what is beyond the root is not known yet
        known = [r for r in range(first, row) if r + accepted[r] + 1 <= row]
        if not known:
            assert found[row, 2] == found[first, 2]
    hits = trace.ranks[SHAPE][:, 0, 0] == 0
    assert found[first + 1, 0] == pytest.approx(0.8 * hits.mean() + 0.2 * hits[first], rel=1e-5)


def test_equal_terms_begin_with_the_tuned_trees_own_shape(trace):
    equal = central.same_space(trace, COSTS, 0.5)
    tuned = compare.Baselines.choose(trace, COSTS).tuned
    assert equal.shapes[0] == (tuned.top_k, *tuned.beam) and len(equal.shapes) == len(
        terms.EqualTerms().shapes
    )
    assert max(equal.total_tokens) == 241 and equal.depth == 12 and equal.effort == 0.5


def test_rows_stand_beside_the_tuned_tree_and_prices_are_found(trace, tmp_path):
    wide = synthetic_trace(turns=24, positions=30, depth=7, top_ks=(10,), most_nodes=60, hit=0.6)
    wide.turns = wide.turns.assign(part=np.array(["train", "tune", "test"])[np.arange(24) % 3])
    rows = central.judged(wide, COSTS, {"mine": Static(4, 1, 10)}, policy_ms={"mine": 0.5}).assign(
        machine="here"
    )
    own = rows[rows["method"] == "mine"].iloc[0]
    assert (
        own["over_tuned_low"] <= own["over_tuned"] <= own["over_tuned_high"]
        and own["policy_ms"] == 0.5
    )
    COSTS.save(tmp_path / "costs-float32.json")
    assert central.costs_of("float32", tmp_path).verify == COSTS.verify
    small, large = (
        central.costs_of(f"h100{name}-graphs", tmp_path) for name in ("-llama-8b", "x8-llama-70b")
    )
    assert small.name == "roofline-h100-llama-8b-graphs" and large.step > small.step


@torch.no_grad()
def test_what_the_target_thought_of_the_last_tokens():
    pair = specdec.load_pair("tiny", dtype="float32")
    small = dict(depth=3, top_ks=(3,), trees=(3,), max_new_tokens=8, progress=False)
    some = specdec.record(pair, {"mine": ["What is 2 + 3?"]}, **small)
    turn = some.turns.iloc[0]
    tokens = torch.tensor(np.asarray(turn["ids"]))
    with pair.inference():
        known = (
            pair.target.forward(tokens, pair.target.new_cache(len(tokens)))
            .logits.float()
            .log_softmax(-1)
        )
    told = ladder.certainty(pair, some, back=2)
    root = turn["prompt_tok"] + 2  # of the third position
    assert told[2, 1] == pytest.approx(float(known[root - 1, tokens[root]]), abs=1e-4)
    assert told[3, 4] == pytest.approx(told[2, 1], abs=1e-4), "the token before the last"
    states = ladder.node_states(pair, some, 2)
    assert states.shape[:2] == (len(some), 2) and np.isfinite(states.astype(float)).all()
