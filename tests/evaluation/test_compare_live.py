"""Predicted and measured trees side by side: exact counts on a real pair, exact arithmetic on made-
up times, refusals.
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
from specdec.replays.static_trees import static_turns

TREES = {"small": TreeConfig(4, 1, 3), "deep": TreeConfig(12, 4, 3), "wide": TreeConfig(20, 2, 3)}


@pytest.fixture
def recorded(home):
    """A random pair, what it was given, its recording and a cost model that claims to be of it."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 24, size).tolist() for size in (5, 9, 13)]
    options = dict(
        max_new_tokens=20,
        depth=4,
        top_ks=(3,),
        trees=(),
        most_nodes=30,
        features=False,
        progress=False,
    )
    trace = record(shared_pair(), prompts, **options)
    return prompts, trace, round_costs(kind="calibrated", pair="random", dtype="float32")


def test_live_decoding_takes_the_predicted_cycles(recorded):
    prompts, trace, costs = recorded
    found = live_check(shared_pair(), trace, costs, TREES, prompts=prompts, limit=2, progress=False)
    assert (found.turns, found.left_out, found.cycles_differing) == (2, 0, 0)
    assert found.table["method"].tolist() == ["autoregressive", *TREES]
    shapes = [[tree.total_tokens, tree.depth, tree.top_k] for tree in TREES.values()]
    assert found.trees[["total_tokens", "depth", "top_k"]].to_numpy().tolist() == shapes
    first = trace.select(np.arange(3) < 2)
    tokens = first.turns["positions"].sum()
    for name, tree in TREES.items():
        row = found.table.set_index("method").loc[name]
        assert row["predicted_ms"] == pytest.approx(
            static_turns(first, costs, tree)["time_ms"].sum() / tokens
        )
        live = found.run.read_table("prompts").query("method == @name")
        assert row["measured_ms"] == pytest.approx(live["decode_ms"].sum() / tokens)
    # a step of the made-up machine
    assert found.table["predicted_ms"].iloc[0] == pytest.approx(4.0)
    assert -1 <= found.spearman <= 1 and found.facts["trees"] == len(TREES)


@pytest.mark.filterwarnings("ignore")  # so short a calibration is not exact
def test_costs_measured_between_the_prompts_are_kept(recorded, monkeypatch):
    (prompts, trace, costs), pieces, go_on = recorded, [], compare_live.Calibration.go_on
    monkeypatch.setattr(
        compare_live.Calibration,
        "go_on",
        lambda self, frac: pieces.append(frac) or go_on(self, frac),
    )
    few = CalibrateConfig(
        seconds=0.2, top_ks=(1, 2, 3), nodes=(0, 2, 4), depth=4, contexts=(5, 20), progress=False
    )
    options = dict(prompts=prompts, limit=2, progress=False)
    found, again = (live_check(shared_pair(), trace, few, TREES, **options) for _ in range(2))
    assert pieces == [0.5, 0.5], "a finished run was measured again, or a prompt had no share"
    assert found.costs.kind == "calibrated" and found.costs.pair == "random"
    assert found.table.equals(again.table) and (found.trees["predicted_ms"] > 0).all()
    mine = found.priced(costs)
    assert mine.table["measured_ms"].equals(found.table["measured_ms"])
    assert mine.turns == found.turns
    assert mine.table["predicted_ms"].iloc[0] == pytest.approx(4.0)  # a step of the made-up machine
    fresh = live_check(shared_pair(), trace, few, TREES, force=True, **options)
    assert fresh.costs != found.costs, "what is decoded again needs prices of its own"


def made_up(factors, repeats=1, other=(), **costs):
    """The check of a synthetic recording against a bench run that took `factors` times as long as
    predicted.

    other: (method, prompt, column, its value there).
    """
    trace = synthetic_trace()
    costs = round_costs(**costs)
    rows = []
    for name, tree in {"autoregressive": None, **TREES}.items():
        turns = static_turns(trace, costs, tree or TreeConfig(1, 0, 3))
        ms = turns["plain_ms"] if tree is None else turns["time_ms"]
        for repeat in range(repeats):
            row = turns[["suite", "prompt", "turn", "cycles"]].assign(
                method=name, repeat=repeat, same=True
            )
            rows.append(
                row.assign(new_tok=trace.turns["kept_tok"], decode_ms=ms * factors.get(name, 1.0))
            )
    rows = pd.concat(rows, ignore_index=True)
    for method, prompt, column, value in other:
        rows.loc[(rows["method"] == method) & (rows["prompt"] == prompt), column] = value
    return check_predictions(trace, costs, TREES, SimpleNamespace(read_table=lambda name: rows))


def test_ranks_and_speeds_are_apart_and_costs_admit_errors():
    equal = made_up({}, repeats=2)
    slower = made_up(dict.fromkeys(TREES, 1.2))
    for found, drift in (
        (equal, 0),
        (slower, 0.2),
        (made_up(dict.fromkeys(["autoregressive", *TREES], 1.2)), 0.2),
    ):
        assert found.spearman == pytest.approx(1)
        assert found.drift_frac == pytest.approx(drift, abs=1e-12)
        assert found.facts["worst_frac"] == pytest.approx(drift, abs=1e-12)
        alone = drift if found is slower else 0
        assert found.facts["worst_relative_frac"] == pytest.approx(alone, abs=1e-12)
    assert equal.cycles_differing == 0 and equal.turns == 6
    np.testing.assert_allclose(equal.table["predicted_speedup"], equal.table["measured_speedup"])
    order = equal.trees.set_index("method")["predicted_ms"].sort_values()
    assert made_up({order.index[0]: 2 * order.iloc[-1] / order.iloc[0]}).spearman == pytest.approx(
        -0.5
    )
    found = made_up(dict.fromkeys(TREES, 1.2) | {"wide": 1.5}, errors={"tree_frac": 0.05})
    within = found.table.set_index("method")["within_costs"]
    assert np.isnan(within["autoregressive"])
    assert within[["small", "deep"]].all()
    assert not within["wide"]
    assert found.facts["uncertainty_frac"] == pytest.approx(0.05 * 1.96 * 2**0.5)


def test_the_prompt_is_read_in_a_first_cycle_and_other_texts_are_left_out():
    usual = made_up({})
    found = made_up({}, reading=2.0, reading_per_tok=0.5)
    later = (found.table["predicted_ms"] - usual.table["predicted_ms"]).to_numpy()
    turns = synthetic_trace().turns
    expected = (2.0 + 0.5 * turns["prompt_tok"]).sum() / turns["positions"].sum()
    assert later[0] == 0 and later[1:] == pytest.approx(expected)
    found = made_up({}, other=[("deep", "p1", "new_tok", 1), ("wide", "p2", "same", False)])
    assert (found.turns, found.left_out) == (4, 2)
    assert found.facts["worst_frac"] == pytest.approx(0, abs=1e-12)
    assert made_up({}, other=[("deep", "p1", "cycles", 1)]).cycles_differing == 1


def test_bad_input(recorded, monkeypatch):
    prompts, trace, costs = recorded
    monkeypatch.setattr(
        compare_live, "evaluate", lambda *_, **__: pytest.fail("decoded before refusing")
    )

    def header(**changes):
        other = trace.select(np.ones(3, dtype=bool))
        other.header = {**trace.header, **changes}
        return {"trace": other}

    def priced(**changes):
        return {"costs": dataclasses.replace(costs, **changes)}

    refused = {
        "recording belongs to the pair 'random' in float32, not to this": header(weights="other"),
        "in bfloat16, not to this 'random' in float32": header(dtype="bfloat16"),
        "this recording was sampled": header(temperature=1.0),
        "not of this machine": priced(kind="published"),
        "to the pair 'small' in float32, not to this 'random'": priced(pair="small"),
        "two or more names": {"trees": {"one": TreeConfig(4, 1, 3)}},
        "none of them 'autoregressive'": {"trees": TREES | {"autoregressive": TreeConfig(4, 1, 3)}},
        "'prompts/1' is not among the prompts given": {"prompts": prompts[:1]},
        r"top_k \[7\] was not recorded": {"trees": TREES | {"far": TreeConfig(4, 1, 7)}},
        "depths must be": {"trees": TREES | {"far": TreeConfig(4, 9, 3)}},
    }
    right = {"trace": trace, "costs": costs, "trees": TREES, "prompts": prompts, "progress": False}
    for message, wrong in refused.items():
        pytest.raises(SpecdecError, live_check, shared_pair(), **right | wrong).match(message)
    with (
        pytest.warns(UserWarning, match="another machine"),
        pytest.raises(SpecdecError, match="calibrate"),
    ):
        live_check(shared_pair(), **right | priced(name="far away", machine={"cpu": "Z80"}))
