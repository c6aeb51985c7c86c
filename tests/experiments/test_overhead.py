"""What policies cost: components add up to what the cycles took, and a stop-watch on a method sees
it and goes.
"""

import numpy as np
import pandas as pd
import pytest

import specdec
from specdec.core import clock
from specdec.core.policy import Static
from specdec.core.tree import GrowingTree
from specdec.policies import ltd, resps
from specdec.policies.base import changed

from experiments import overhead

GRID = {"totals": (4, 8), "depths": (2, 3), "widths": (4,), "starter": (8, 3, 4), "interval": 2}


@pytest.fixture(scope="module")
def prompts(tiny):
    return [("a", "a/0", tiny.ids_of("What is 2 + 3?")), ("b", "b/0", tiny.ids_of("Name a river."))]


def test_untrained_policies_decode_the_targets_text_and_ltds_two_are_timed_apart(tiny, prompts):
    width = overhead.features_size(tiny)
    policy = changed(resps.PAPER, GRID).policy(width).fill_at_random((8, 8))
    cycles, spent = overhead.decode_timed(tiny, prompts, policy, 8, predicted=(policy, "choose"))
    static = [specdec.decode(tiny, ids, Static(4, 2, 4), 8).tokens for _, _, ids in prompts]
    assert [specdec.decode(tiny, ids, policy, 8).tokens for _, _, ids in prompts] == static
    assert 0 < spent["predicted"] < cycles["policy_ms"].sum() and set(cycles["suite"]) == {"a", "b"}
    shapes = {"depth": 3, "top_k": 4}
    depth = changed(ltd.OURS.depth, shapes | {"total_tokens": 8}).policy().fill_at_random((8,))
    size = changed(ltd.OURS.size, shapes | {"sizes": (3, 7)}).policy().fill_at_random((8, 8))
    table = overhead.per_sample(tiny, prompts, depth, size, 8).pivot(
        index="suite", columns="method", values="value"
    )
    assert list(table.index) == ["a", "b"] and (table[["size", "depth", "total"]] > 0).all(
        axis=None
    )
    assert np.allclose(table["share"], (table["size"] + table["depth"]) / 10 / table["total"])
    policy = changed(resps.PAPER, GRID).policy(12)
    ppo = changed(
        resps.PAPER, {"ppo.n_steps": 8, "ppo.batch_size": 4, "ppo.pi": (4,), "ppo.vf": (4,)}
    ).ppo
    assert overhead.update_ms(policy, ppo, repeats=1) > 0


LAPS = ["draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms"]
CYCLES = pd.DataFrame([(3.0, 1.0, 5.0, 0.5, 0.5), (5.0, 3.0, 4.0, 1.5, 1.5)], columns=LAPS)


def test_the_tables_of_re_sps_are_whole():
    found = overhead.inference(CYCLES)
    assert list(found) == ["component", "time_ms", "time_pct"] and found.values.tolist() == [
        ["Drafting", 8.0, 32.0],
        ["Tree Structure Management", 4.0, 16.0],
        ["Verification", 9.0, 36.0],
        ["RL Policy Prediction", 4.0, 16.0],
        ["Total", 25.0, 100.0],
    ]
    spent = {
        "tokenization": 1.0,
        "tree_initialization": 0.25,
        "tree_construction": 0.5,
        "tree_update": 0.25,
    }
    spent |= {"hidden_states_extraction": 1.0, "rl_policy_prediction": 2.0, "post_processing": 1.0}
    found = overhead.training(CYCLES, spent, update_ms=2.0, transitions=1.5)
    expected = {"drafting_process": 8.0, "input_update": 2.0, "verification_process": 9.0, **spent}
    expected |= {
        "rl_policy_update": 3.0,
        "Total meaningful time": 28.0,
        "Container/organizational overhead": 1.0,
    }
    expected |= {"Unaccounted time (model inference, etc.)": 1.0, "TOTAL TIME": 30.0}
    assert found["component"].tolist() == list(expected) and found["time_ms"].tolist() == list(
        expected.values()
    )
    assert found["time_pct"].tolist() == pytest.approx([100 * ms / 30 for ms in expected.values()])
    more = overhead.training(CYCLES, {"rl_policy_prediction": 9.0, "tree_update": 9.0}, 0.0, 0.0)
    assert more.set_index("component")["time_ms"].iloc[-3:-1].tolist() == [0.0, 0.0], (
        "nothing is below zero"
    )
    untimed = overhead.training(CYCLES, {}, 0.0, 0.0).set_index("component")["time_ms"]
    assert untimed.iloc[-4:].tolist() == [19.0, 4.0, 2.0, 25.0]


def test_methods_are_timed_by_the_clock_in_force_and_apart():
    class Sleeper:
        def work(self, seconds):
            ticks.extend(range(seconds))

        def fail(self):
            self.work(2)
            raise ZeroDivisionError

    ticks, sleeper = [], Sleeper()
    with (
        clock.counted_by(lambda: len(ticks)),
        overhead.timed(a=(sleeper, "work"), b=(Sleeper, "fail")) as spent,
    ):
        sleeper.work(3)
        sleeper.work(1)
        with pytest.raises(ZeroDivisionError):
            sleeper.fail()
    assert spent == {"a": 6000.0, "b": 2000.0} and "work" not in vars(sleeper)
    assert overhead.tree_work() == {
        "tree_initialization": (GrowingTree, "restart"),
        "tree_construction": (GrowingTree, "grow"),
        "tree_update": (GrowingTree, "prune"),
    }
    with overhead.timed(**overhead.tree_work()) as spent:
        assert spent == dict.fromkeys(overhead.tree_work(), 0.0)
