"""What policies cost: components add up to what the cycles took, and a stop-watch on a method sees
it and goes.
"""

import pandas as pd
import pytest

import specdec
from specdec.core import clock
from specdec.core.policy import Static
from specdec.policies import ltd, resps
from specdec.policies.base import changed

from experiments import overhead

GRID = {"totals": (4, 8), "depths": (2, 3), "widths": (4,), "starter": (8, 3, 4), "interval": 2}


def test_untrained_policies_decode_the_targets_text_and_ltds_two_are_timed_apart(tiny):
    prompts = [("a", "a/0", tiny.ids_of("What is 2 + 3?")), ("b", "b/0", tiny.ids_of("A river."))]
    features = len(tiny.drafter.taps) * tiny.target.hidden_size
    policy = changed(resps.PAPER, GRID).policy(features)
    policy = policy.fill_at_random((8, 8))
    cycles, spent = overhead.decode_timed(tiny, prompts, policy, 8, predicted=(policy, "choose"))
    for _, _, ids in prompts:
        static = specdec.decode(tiny, ids, Static(4, 2, 4), 8).tokens
        assert specdec.decode(tiny, ids, policy, 8).tokens == static
    assert 0 < spent["predicted"] < cycles["policy_ms"].sum()
    assert set(cycles["suite"]) == {"a", "b"}
    shapes = {"depth": 3, "top_k": 4}
    depth = changed(ltd.OURS.depth, shapes | {"total_tokens": 8}).policy().fill_at_random((8,))
    size = changed(ltd.OURS.size, shapes | {"sizes": (3, 7)}).policy().fill_at_random((8, 8))
    table = overhead.per_sample(tiny, prompts, depth, size, 8)
    table = table.pivot(index="suite", columns="method", values="value")
    assert list(table.index) == ["a", "b"]
    assert (table[["size", "depth", "total"]] > 0).all(axis=None)
    share = (table["size"] + table["depth"]) / 10 / table["total"]
    assert table["share"].tolist() == pytest.approx(share.tolist())
    small = {"ppo.n_steps": 8, "ppo.batch_size": 4, "ppo.pi": (4,), "ppo.vf": (4,)}
    policy = changed(resps.PAPER, GRID).policy(12)
    assert overhead.update_ms(policy, changed(resps.PAPER, small).ppo, repeats=1) > 0


LAPS = ["draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms"]
CYCLES = pd.DataFrame([(3.0, 1.0, 5.0, 0.5, 0.5), (5.0, 3.0, 4.0, 1.5, 1.5)], columns=LAPS)


def test_the_tables_of_re_sps_are_whole():
    assert overhead.inference(CYCLES).values.tolist() == [
        ["Drafting", 8.0, 32.0],
        ["Tree Structure Management", 4.0, 16.0],
        ["Verification", 9.0, 36.0],
        ["RL Policy Prediction", 4.0, 16.0],
        ["Total", 25.0, 100.0],
    ]
    spent = {"tokenization": 1.0, "tree_initialization": 0.25, "tree_construction": 0.5}
    spent |= {"tree_update": 0.25, "hidden_states_extraction": 1.0, "rl_policy_prediction": 2.0}
    table = overhead.training(CYCLES, spent, update_ms=2.0, transitions=1.5)
    expected = {"drafting_process": 8.0, "input_update": 2.0, "verification_process": 9.0, **spent}
    expected |= {"rl_policy_update": 3.0, "Total meaningful time": 27.0}
    expected |= {"Container/organizational overhead": 1.0}
    expected |= {"Unaccounted time (model inference, etc.)": 1.0, "TOTAL TIME": 29.0}
    assert dict(zip(table["component"], table["time_ms"], strict=True)) == expected
    shares = [100 * ms / 29 for ms in expected.values()]
    assert table["time_pct"].tolist() == pytest.approx(shares)


def test_methods_are_timed_by_the_clock_in_force_and_apart():
    class Sleeper:
        def work(self, seconds):
            ticks.extend(range(seconds))

        def fail(self):
            self.work(2)
            raise ZeroDivisionError

    ticks, sleeper = [], Sleeper()
    watched = {"a": (sleeper, "work"), "b": (Sleeper, "fail")}
    with clock.counted_by(lambda: len(ticks)), overhead.timed(**watched) as spent:
        sleeper.work(3)
        sleeper.work(1)
        with pytest.raises(ZeroDivisionError):
            sleeper.fail()
    assert spent == {"a": 6000.0, "b": 2000.0}
    assert "work" not in vars(sleeper)
