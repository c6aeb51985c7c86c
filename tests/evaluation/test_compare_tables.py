"""Tables of a comparison in replay, by hand: what is compared with what, and time of answers."""

import copy
import random
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare, stats
from specdec.identity import FIELDS
from specdec.policies.base import chose
from specdec.policies.radar import RadarPolicy

FIRST = TreeConfig(16, 4, 3)
SECOND = TreeConfig(8, 2, 3)
TUNED = TreeConfig(6, 2, 3)
PER_SUITE = {"easy": TreeConfig(5, 2, 3), "hard": TreeConfig(4, 1, 3)}
TREES = compare.Baselines((FIRST, SECOND), TUNED, PER_SUITE)


def test_baselines_by_name():
    assert TREES.trees == {"default 16,4,3": FIRST, "default 8,2,3": SECOND, "tuned static": TUNED}
    assert TREES.default == "default 16,4,3" and TREES.of_suite("hard") == TreeConfig(4, 1, 3)
    policy = TREES.random(5)
    assert (policy.limits, policy.asks) == (FIRST, {"extend", "size"})
    assert policy._random.getstate() == random.Random(5).getstate()
    beams = replace(TREES, tuned=TreeConfig(6, 2, 3, beam=(2, 1)))
    width = {"top_ks": [3], "beams": [(2, 1)]}
    assert beams.bounds == {
        "oracle depth": {**width, "sizes": [5]},
        "oracle size": {**width, "depths": [2]},
        "oracle tree": width,
        "clairvoyant": {},
    }
    one = Static(4, 2, 1)
    two = Static(3, 1, 1)
    lists = TREES.by_method({"a": one, "b": [one, two], "c": (two,)})
    assert lists == {"a": [one], "b": [one, two], "c": [two]}
    for name in (*TREES.trees, "autoregressive", "per-suite tuned static", "random", *beams.bounds):
        pytest.raises(SpecdecError, TREES.by_method, {name: one}).match("of no baseline")
    for wrong in (3, [one, 3]):
        pytest.raises(SpecdecError, TREES.by_method, {"a": wrong}).match("one per seed")


def compared(seeds=1, **methods) -> compare.Comparison:
    """Two prompts, of suites "s" and "t"; ten tokens each, in 50 ms plainly. A policy "ours" has so
    many seeds, each a millisecond slower than the one before.
    """
    times = {"default 16,4,3": (25.0, 40.0), "tuned static": (20.0, 20.0)}
    times.update(clairvoyant=(10.0, 8.0), **methods)
    rows = []
    for name, both in times.items():
        for seed in range(seeds if name == "ours" else 1):
            for suite, ms in zip("st", both, strict=True):
                row = dict(suite=suite, prompt=f"{suite}/0", turn=0, part="test", method=name)
                row.update(seed=seed, new_tok=10, cycles=4, cycle_tok=12, plain_ms=50.0)
                row.update(time_ms=ms + seed, draft_calls=8, verified_tok=24, policy_ms=ms / 8)
                rows.append(row)
    policy_ms = {"ours": 0.25}
    return compare.Comparison(pd.DataFrame(rows), pd.DataFrame(), TREES, policy_ms, np.log(1.3))


def test_a_row_of_the_table_is_whole():
    table = compared(ours=(16.0, 10.0)).table
    names = ["suite", "method", "seed", "turns", "prompts", *compare.MEASURES]
    last = [*FIELDS, "temperature", "machine"]
    assert list(table) == [*names, "policy_ms", "beyond_costs", *last]
    assert table.iloc[-1][last].tolist() == ["ours", "", "", "", "", 0.0, ""]
    assert set(table.loc[table["system"] == "static", "terms"]) == {"default", "tuned"}
    assert table["suite"].value_counts().to_dict() == {"s": 4, "t": 4, "all": 4}
    rows = table.set_index(["suite", "method"])
    row = {"seed": 0, "turns": 2, "prompts": 2, "ms_per_tok": 1.3, "tau": 3.0}
    row.update(speedup=100 / 26, over_default=65 / 26, over_tuned=40 / 26)
    row.update(headroom_frac=(1 / 1.3 - 1 / 2.0) / (1 / 0.9 - 1 / 2.0))
    row.update(draft_calls=2.0, verify_nodes=5.0, policy_frac=1 / 8, policy_ms=0.25)
    for name, value in row.items():
        assert rows.loc[("all", "ours"), name] == pytest.approx(value), name
    beyond = rows.xs("ours", level="method")["beyond_costs"]
    assert beyond.to_dict() == {"s": False, "t": True, "all": True}
    assert np.isnan(rows.loc[("all", "tuned static"), "policy_ms"])
    uneven = compared(ours=(16.0, 10.0))
    uneven.turns.loc[uneven.turns["method"] == "ours", "new_tok"] = 9
    pytest.raises(AssertionError, getattr, uneven, "table").match("did not decode the same turns")


def test_every_ratio_has_the_interval_of_its_own_reference():
    # Two seeds; over prompts of all suites each reference is paired with both.
    comparison = compared(seeds=2, ours=(16.0, 10.0))
    keys = ["suite", "method"]
    table = compare.over_seeds(comparison)
    row = table.set_index(keys).loc[("all", "ours")]
    times = np.array([[16.0, 17.0], [10.0, 11.0]])
    references = {"speedup": (50.0, 50.0), "over_default": (25.0, 40.0), "over_tuned": (20.0, 20.0)}

    def ratio(means):
        return (means[..., :1] / means[..., 1:]).mean(-1)

    for name, reference in references.items():
        spread = stats.interval(np.column_stack([reference, times]), ratio)
        seeds = [sum(reference) / 26, sum(reference) / 28]
        # Student's t with one degree of freedom, 97.5 %
        reach = 12.706205 * np.std(seeds, ddof=1) / 2**0.5
        mean = np.mean(seeds)
        ends = [mean, mean - reach, mean + reach, spread.low, spread.high]
        names = [*stats.spread_names(name), *stats.spread_names(f"{name}_prompts")[1:]]
        assert row[names].tolist() == pytest.approx(ends)
        if name != "speedup":
            p_name = stats.p_name(name)
            assert row[[p_name, f"{p_name}_holm"]].tolist() == pytest.approx([spread.p_value] * 2)
    assert (row["seeds"], row["prompts"], row["beyond_costs"]) == (2, 2, True)
    baselines = table[table["method"] != "ours"]
    tests = ["p_default", "p_tuned", "p_default_holm", "p_tuned_holm"]
    assert baselines[tests].isna().all(axis=None) and "p_speedup" not in table
    one = table.set_index(keys).loc[("s", "ours")]
    assert one["prompts"] == 1 and np.isnan(one["over_tuned_prompts_low"])
    alone = compare.over_seeds(compared(ours=(16.0, 10.0))).set_index(keys).loc[("all", "ours")]
    assert alone[["tau_low", "tau_high"]].isna().all() and alone["tau"] == 3.0
    nothing = compare.over_seeds(replace(compared(), policy_ms={}))
    assert not [name for name in nothing if name.startswith("p_")]
    two = compared(one=(16.0, 10.0), two=(19.0, 17.0))
    table = compare.over_seeds(replace(two, policy_ms={"one": 0.0, "two": 0.0}))
    rows = table.set_index(keys).loc["all"].loc[["one", "two"]]
    assert rows["p_tuned_holm"].tolist() == stats.holm(rows["p_tuned"]).tolist()


def test_a_policy_that_looked_at_the_test_part_is_refused():
    looked = RadarPolicy()
    chose(looked, "weights", "train")
    chose(looked, "width", "test", 3)
    options = dict(baselines=TREES, policy_ms={"it": 0.0}, random_seeds=(), progress=False)
    with pytest.raises(SpecdecError, match="'it' looked at part 'test' for its width"):
        compare.compare_replay(synthetic_trace(), round_costs(), {"it": looked}, **options)
    table = compare.choices({"RADAR": [looked, looked], "fixed": [Static(4, 1, 3)]})
    assert table.values.tolist() == [
        ["RADAR", "weights", "train", ""],
        ["RADAR", "width", "test", "3"],
        ["fixed", "-", "-", "-"],
    ]


def test_the_best_seed_pays_for_its_answers(monkeypatch):
    trace = synthetic_trace(turns=4)
    costs = round_costs()
    trace.turns["part"] = ["tune", "test"] * 2
    replayed = Mock(side_effect=[SimpleNamespace(ms_per_tok=ms) for ms in (2.0, 1.0, 1.0)])
    monkeypatch.setattr(compare, "replay", replayed)
    policies = [RadarPolicy(), RadarPolicy(), RadarPolicy()]
    before = copy.deepcopy(policies[0].trained_for)
    assert compare.best_seed(trace, costs, policies, 0.5) == 1
    for (tune, _, prices), settings in replayed.call_args_list:
        assert (set(tune.turns["part"]), prices, settings) == ({"tune"}, costs, {"policy_ms": 0.5})
    assert policies[0].trained_for == policies[2].trained_for == before
    choice = {"choice": "seed", "part": "tune", "value": "2 of 3"}
    assert policies[1].trained_for["choices"] == [choice]
