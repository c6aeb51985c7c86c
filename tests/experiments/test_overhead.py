"""What policies cost: components add up to what the cycles took, and a stop-watch on a method sees it and goes."""

import types

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


CYCLES = pd.DataFrame(
    [
        {"draft_ms": 3.0, "policy_ms": 1.0, "verify_ms": 5.0, "commit_ms": 0.5, "host_ms": 0.5},
        {"draft_ms": 5.0, "policy_ms": 3.0, "verify_ms": 4.0, "commit_ms": 1.5, "host_ms": 1.5},
    ]
)


def test_the_tables_of_re_sps_are_whole():
    found = overhead.inference(CYCLES)
    assert list(found) == ["component", "time_ms", "time_pct"] and found.values.tolist() == [
        ["Drafting", 8.0, 32.0],
        ["Tree Structure Management", 4.0, 16.0],
        ["Verification", 9.0, 36.0],
        ["RL Policy Prediction", 4.0, 16.0],
        ["Total", 25.0, 100.0],
    ]
    spent = {"tokenization": 1.0, "tree_initialization": 0.25, "tree_construction": 0.5, "tree_update": 0.25}
    spent |= {"hidden_states_extraction": 1.0, "rl_policy_prediction": 2.0, "post_processing": 1.0}
    found = overhead.training(CYCLES, spent, update_ms=2.0, transitions=1.5)
    assert found["component"].tolist() == [
        "drafting_process",
        "input_update",
        "verification_process",
        *spent,
        "rl_policy_update",
        "Total meaningful time",
        "Container/organizational overhead",
        "Unaccounted time (model inference, etc.)",
        "TOTAL TIME",
    ]
    expected = [8.0, 2.0, 9.0, *spent.values(), 3.0, 28.0, 1.0, 1.0, 30.0]
    assert found["time_ms"].tolist() == expected
    assert found["time_pct"].tolist() == pytest.approx([100 * ms / 30 for ms in expected])
    more = overhead.training(CYCLES, {"rl_policy_prediction": 9.0, "tree_update": 9.0}, 0.0, 0.0)
    assert more.set_index("component")["time_ms"].iloc[-3:-1].tolist() == [0.0, 0.0], "nothing is below zero"
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
    with clock.counted_by(lambda: len(ticks)), overhead.timed(a=(sleeper, "work"), b=(Sleeper, "fail")) as spent:
        sleeper.work(3)
        sleeper.work(1)
        with pytest.raises(ZeroDivisionError):
            sleeper.fail()
    assert spent == {"a": 6000.0, "b": 2000.0}
    assert overhead.tree_work() == {
        "tree_initialization": (GrowingTree, "restart"),
        "tree_construction": (GrowingTree, "grow"),
        "tree_update": (GrowingTree, "prune"),
    }
    with overhead.timed(**overhead.tree_work()) as spent:
        assert spent == dict.fromkeys(overhead.tree_work(), 0.0)


def test_cycles_say_of_which_prompt_they_are(monkeypatch):
    asked = []

    def decode(*given):
        asked.append(given)
        return types.SimpleNamespace(cycles=pd.DataFrame({"cycle": range(len(given[1]))}))

    monkeypatch.setattr(overhead, "decode", decode)
    cycles, spent = overhead.decode_timed("pair", [("s", "s/0", [7]), ("t", "t/0", [8, 9])], "policy", 16)
    assert asked[0] == ("pair", [7], "policy", 4), "the first answer of all is not counted"
    assert asked[1:] == [("pair", [7], "policy", 16), ("pair", [8, 9], "policy", 16)]
    assert list(cycles) == ["cycle", "suite", "prompt", "turn"] and cycles.index.tolist() == [0, 1, 2]
    assert cycles.values.tolist() == [[0, "s", "s/0", 0], [0, "t", "t/0", 0], [1, "t", "t/0", 0]] and spent == {}
    drafter = types.SimpleNamespace(taps=(1, 3, 5))
    assert (
        overhead.features_size(types.SimpleNamespace(drafter=drafter, target=types.SimpleNamespace(hidden_size=16)))
        == 48
    )


def test_ltds_table_is_per_prompt(monkeypatch):
    asked = []

    def decode_timed(pair, prompts, policy, max_new_tokens, **methods):
        asked.append((pair, prompts, policy.policies, max_new_tokens, methods))
        return pd.DataFrame({"total_ms": [600.0, 400.0]}), {"size": 30.0, "depth": 20.0}

    monkeypatch.setattr(overhead, "decode_timed", decode_timed)
    depth, size = Static(4, 2, 1), Static(6, 2, 3)
    prompts = [("s", "s/0", [7]), ("t", "t/0", [8]), ("s", "s/1", [9])]
    table = overhead.per_sample("pair", prompts, depth, size, 16)
    watched = {"size": (size, "answer"), "depth": (depth, "answer")}
    assert asked == [
        ("pair", prompts[::2], (depth, size), 16, watched),
        ("pair", prompts[1:2], (depth, size), 16, watched),
    ]
    assert list(table) == ["suite", "method", "value"] and table.values.tolist() == [
        ["s", "size", 15.0],
        ["s", "depth", 10.0],
        ["s", "total", 0.5],
        ["s", "share", 5.0],
        ["t", "size", 30.0],
        ["t", "depth", 20.0],
        ["t", "total", 1.0],
        ["t", "share", 5.0],
    ]


def test_an_update_is_ppos_own_with_the_policys_settings(monkeypatch):
    made, seconds = [], iter([0.0, 5.0, 10.0, 12.0, 20.0, 23.0])

    class PPO:
        def __init__(self, *given, **named):
            made.append((given, named))

        def train(self):
            pass

        def learn(self, steps):
            made.append(steps)
            self.train()

    monkeypatch.setattr("stable_baselines3.PPO", PPO)
    changes = {"ppo.n_steps": 8, "ppo.batch_size": 4, "ppo.pi": (4, 3), "ppo.vf": (5,), "ppo.n_epochs": 2}
    config = changed(resps.PAPER, GRID | changes | {"ppo.gamma": 0.5, "ppo.ent_coef": 0.25})
    policy = config.policy(12)
    with clock.counted_by(lambda: next(seconds)):
        assert overhead.update_ms(policy, config.ppo) == 2000.0
    (kind, world), named = made[0]
    assert kind == "MlpPolicy" and made[1:] == [8, 8, 8]
    sizes = dict(n_steps=8, batch_size=4, n_epochs=2, ent_coef=0.25, gamma=0.5)
    nets = {"net_arch": {"pi": [4, 3], "vf": [5]}}
    assert named == {"policy_kwargs": nets, "device": "cpu", "seed": 0, **sizes}
    assert world.observation_space.shape == (policy.observation_size,) and world.action_space.n == policy.actions
    nothing = np.zeros(policy.observation_size, np.float32)
    state, info = world.reset(seed=1)
    assert state.tolist() == nothing.tolist() and state.dtype == np.float32 and info == {}
    state, *rest = world.step(0)
    assert state.tolist() == nothing.tolist() and rest == [0.0, True, False, {}]
