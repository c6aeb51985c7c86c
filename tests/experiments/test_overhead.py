"""What policies cost: a stop-watch on a method sees it and goes."""

import pytest
from fakes.notebooks import functions_of

import specdec
from specdec.core import clock
from specdec.core.policy import Static
from specdec.policies import resps
from specdec.policies.base import changed

overhead = functions_of("51_policy_overhead")

GRID = {"totals": (4, 8), "depths": (2, 3), "widths": (4,), "starter": (8, 3, 4), "interval": 2}


def test_untrained_policies_decode_the_targets_text_and_are_timed(tiny):
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
    small = {"ppo.n_steps": 8, "ppo.batch_size": 4, "ppo.pi": (4,), "ppo.vf": (4,)}
    policy = changed(resps.PAPER, GRID).policy(12)
    assert overhead.update_ms(policy, changed(resps.PAPER, small).ppo, repeats=1) > 0


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
