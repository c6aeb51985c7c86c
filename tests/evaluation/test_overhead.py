"""What policies cost: components add up to what the cycles took, and a stop-watch on a method sees it and goes."""

import numpy as np
import pandas as pd
import pytest

import specdec
from specdec.core.policy import Static
from specdec.evaluation import overhead
from specdec.policies import ltd, resps
from specdec.policies.base import changed

GRID = {"totals": (4, 8), "depths": (2, 3), "widths": (4,), "starter": (8, 3, 4), "interval": 2}


@pytest.fixture(scope="module")
def tiny():
    pair = specdec.load_pair("tiny", dtype="float32")
    return pair, [("a", "a/0", pair.ids_of("What is 2 + 3?")), ("b", "b/0", pair.ids_of("Name a river."))]


def test_a_watched_method_is_timed_and_let_go():
    class Sleeper:
        def work(self, number):
            return number + 1

    sleeper = Sleeper()
    with overhead.timed(work=(sleeper, "work")) as spent:
        assert sleeper.work(1) == 2
    assert spent["work"] > 0 and "work" not in vars(sleeper)
    with pytest.raises(ZeroDivisionError), overhead.timed(work=(sleeper, "work")):
        raise ZeroDivisionError
    assert "work" not in vars(sleeper)
    before = vars(Sleeper)["work"]
    with overhead.timed(work=(Sleeper, "work")) as spent:
        assert sleeper.work(1) == 2 and spent["work"] > 0
    assert vars(Sleeper)["work"] is before


def test_groups_and_components_add_up():
    laps = {"draft_ms": 3.0, "policy_ms": 1.0, "verify_ms": 5.0, "commit_ms": 0.5, "host_ms": 0.5}
    cycles = pd.DataFrame([laps, laps])
    groups = overhead.inference(cycles).set_index("component")["time_pct"]
    assert groups.to_dict() == {
        "Drafting": 30.0,
        "Tree Structure Management": 10.0,
        "Verification": 50.0,
        "RL Policy Prediction": 10.0,
        "Total": 100.0,
    }
    spent = {"tokenization": 2.0, "hidden_states_extraction": 0.5, "rl_policy_prediction": 1.0, "tree_update": 0.75}
    parts = overhead.training(cycles, spent, update_ms=4.0, transitions=0.5).set_index("component")["time_ms"]
    assert parts["rl_policy_update"] == 2.0 and parts["tree_update"] == 0.75 and parts["input_update"] == 1.0
    assert parts["Total meaningful time"] == 6 + 1 + 10 + 2 + 0.5 + 1 + 0.75 + 2
    assert parts["Container/organizational overhead"] == 0.5 and parts[overhead.UNACCOUNTED] == 0.25
    assert parts["TOTAL TIME"] == 24.0


def test_untrained_policies_decode_the_targets_text(tiny):
    pair, prompts = tiny
    width = overhead.features_size(pair)
    policy = changed(resps.PAPER, GRID).policy(width).fill_at_random((8, 8))
    cycles, spent = overhead.decode_timed(pair, prompts, policy, 8, predicted=(policy, "choose"))
    static = [specdec.decode(pair, ids, Static(4, 2, 4), 8).tokens for _, _, ids in prompts]
    assert [specdec.decode(pair, ids, policy, 8).tokens for _, _, ids in prompts] == static
    assert 0 < spent["predicted"] < cycles["policy_ms"].sum() and set(cycles["suite"]) == {"a", "b"}


def test_both_policies_of_ltd_are_timed_apart(tiny):
    pair, prompts = tiny
    shapes = {"depth": 3, "top_k": 4}
    depth = changed(ltd.OURS.depth, shapes | {"total_tokens": 8}).policy().fill_at_random((8,))
    size = changed(ltd.OURS.size, shapes | {"sizes": (3, 7)}).policy().fill_at_random((8, 8))
    table = overhead.per_sample(pair, prompts, depth, size, 8).pivot(index="suite", columns="method", values="value")
    assert list(table.index) == ["a", "b"] and (table[["size", "depth", "total"]] > 0).all(axis=None)
    assert np.allclose(table["share"], (table["size"] + table["depth"]) / 10 / table["total"])


def test_an_update_takes_time():
    policy = changed(resps.PAPER, GRID).policy(12)
    ppo = changed(resps.PAPER, {"ppo.n_steps": 8, "ppo.batch_size": 4, "ppo.pi": (4,), "ppo.vf": (4,)}).ppo
    assert overhead.update_ms(policy, ppo, repeats=1) > 0
