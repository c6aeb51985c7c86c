"""Tables of a comparison in replay, by hand: what is compared with what, who is charged what, and
which shard did it.
"""

import copy
import random
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pandas as pd
import pytest
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import Static
from specdec.core.tree_config import TREES as TREES_BY_NAME
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare, stats
from specdec.identity import FIELDS
from specdec.policies.base import chose
from specdec.policies.radar import RadarPolicy

from workbook import references

FIRST = TreeConfig(16, 4, 3)
SECOND = TreeConfig(8, 2, 3)
TUNED = TreeConfig(6, 2, 3)
TREES = compare.Baselines(
    (FIRST, SECOND), TUNED, {"easy": TreeConfig(5, 2, 3), "hard": TreeConfig(4, 1, 3)}
)


def test_baselines_by_name_and_names_that_are_taken():
    assert TREES.trees == {"default 16,4,3": FIRST, "default 8,2,3": SECOND, "tuned static": TUNED}
    assert TREES.default == "default 16,4,3" and TREES.of_suite("hard") == TreeConfig(4, 1, 3)
    assert TREES.chosen_on == ("train", "tune")
    policy = TREES.random(5)
    usual = TREES.random()
    assert (policy.limits, policy.asks) == (FIRST, {"extend", "size"})
    assert [one._random.getstate() for one in (policy, usual)] == [
        random.Random(seed).getstate() for seed in (5, 0)
    ]
    beams = replace(TREES, tuned=TreeConfig(6, 2, 3, beam=(2, 1)))
    own = {"top_ks": [3], "beams": [(2, 1)]}
    depth = own | {"sizes": [5]}
    size = own | {"depths": [2]}
    assert beams.bounds == {
        "oracle depth": depth,
        "oracle size": size,
        "oracle tree": own,
        "clairvoyant": {},
    }
    one = Static(4, 2, 1)
    two = Static(3, 1, 1)
    assert TREES.by_method({"a": one, "b": [one, two], "c": (two,)}) == {
        "a": [one],
        "b": [one, two],
        "c": [two],
    }
    bounds = ["oracle depth", "oracle size", "oracle tree", "clairvoyant"]
    for name in (*TREES.trees, "autoregressive", "per-suite tuned static", "random", *bounds):
        pytest.raises(SpecdecError, TREES.by_method, {name: one}).match("belongs to no baseline")
    for wrong in (3, [one, 3], []):
        pytest.raises(SpecdecError, TREES.by_method, {"a": wrong}).match("one per seed")


def test_trees_are_chosen_on_parts_of_the_recording(monkeypatch):
    trace = synthetic_trace(turns=8)
    costs = round_costs()
    grid = Mock(wraps=compare.static_grid)
    monkeypatch.setattr(compare, "static_grid", grid)
    few = dict(total_tokens=[2, 4], depths=[1], top_ks=[3])
    found = compare.Baselines.choose(trace, costs, parts=["test"], defaults=[FIRST], **few)
    (some, prices), named = grid.call_args
    assert (set(some.turns["part"]), prices, named) == ({"test"}, costs, {"by": "suite", **few})
    assert found.defaults == (FIRST,)
    assert found.chosen_on == ("test",)
    assert list(found.per_suite) == ["easy", "hard"]
    usual = compare.Baselines.choose(trace, costs)
    assert usual.defaults == (TREES_BY_NAME["eagle3"], TREES_BY_NAME["eagle3-scripts"])
    assert set(grid.call_args.args[0].turns["part"]) == {"train"}
    assert usual.chosen_on == ("train", "tune")
    race = Mock(return_value=SimpleNamespace(tuned=TUNED, per_suite=TREES.per_suite))
    monkeypatch.setattr(compare, "race_static", race)
    raced = compare.Baselines.from_race("pair", trace, costs, defaults=[FIRST, SECOND], limit=3)
    race.assert_called_once_with("pair", trace, costs, limit=3)
    assert raced == replace(TREES, chosen_on=("tune",))


def turns_of(**methods) -> pd.DataFrame:
    """methods: name -> milliseconds of two prompts, of suites "s" and "t"; ten tokens each, in 50
    ms plainly.
    """
    rows = []
    for name, times in methods.items():
        for suite, ms in zip("st", times, strict=True):
            row = dict(
                suite=suite,
                prompt=f"{suite}/0",
                turn=0,
                part="test",
                method=name.replace("_", " "),
                seed=0,
            )
            row |= dict(new_tok=10, cycles=4, cycle_tok=12, plain_ms=50.0, time_ms=ms)
            rows.append(row | dict(draft_calls=8, verified_tok=24, policy_ms=ms / 8))
    return pd.DataFrame(rows)


def compared(seeds=1, **methods) -> compare.Comparison:
    """Of a policy "ours" with so many seeds, each a millisecond slower than the one before."""
    rows = turns_of(
        default=(25.0, 40.0), tuned_static=(20.0, 20.0), clairvoyant=(10.0, 8.0), **methods
    )
    rows["method"] = rows["method"].replace("default", "default 16,4,3")
    own = rows[rows["method"] == "ours"]
    more = [own.assign(seed=seed, time_ms=own["time_ms"] + seed) for seed in range(1, seeds)]
    rows = pd.concat([rows, *more], ignore_index=True)
    return compare.Comparison(
        rows, pd.DataFrame(), TREES, {"ours": 0.25}, uncertainty_frac=np.log(1.3)
    )


def test_a_row_of_the_table_is_whole():
    table = compared(ours=(16.0, 10.0)).table
    names = (
        "seed turns prompts ms_per_tok tau speedup over_default over_tuned "
        "headroom_frac draft_calls verify_nodes"
    )
    measured = ["suite", "method", *names.split(), "policy_frac", "policy_ms", "beyond_costs"]
    assert list(table) == [*measured, *FIELDS, "temperature", "machine"]
    assert table.iloc[-1][[*FIELDS, "temperature", "machine"]].tolist() == [
        "ours",
        "",
        "",
        "",
        "",
        0.0,
        "",
    ]
    assert set(table.loc[table["system"] == "static", "terms"]) == {"default", "tuned"}
    table = table[measured]
    assert table["suite"].value_counts().to_dict() == {"s": 4, "t": 4, "all": 4}
    rows = table.set_index(["suite", "method"])
    gap = (1 / 1.3 - 1 / 2.0) / (1 / 0.9 - 1 / 2.0)
    assert rows.loc[("all", "ours")].tolist() == [
        0, 2, 2, pytest.approx(1.3), 3.0, pytest.approx(100 / 26), pytest.approx(65 / 26), pytest.approx(40 / 26),  # noqa: E501
        pytest.approx(gap), 2.0, 5.0, 1 / 8, 0.25, True
    ]  # fmt: skip
    assert rows.loc[("s", "ours"), ["over_default", "over_tuned", "beyond_costs"]].tolist() == [
        25 / 16,
        20 / 16,
        False,
    ]
    assert rows.loc[("t", "ours"), ["over_tuned", "beyond_costs"]].tolist() == [2.0, True]
    assert np.isnan(rows.loc[("all", "tuned static"), "policy_ms"])
    assert rows.loc[("all", "clairvoyant"), "over_tuned"] > 2
    uneven = compared(ours=(16.0, 10.0))
    uneven.turns.loc[uneven.turns["method"] == "ours", "new_tok"] = 9
    pytest.raises(AssertionError, getattr, uneven, "table").match("did not decode the same turns")
    assert compare.Comparison(None, None, TREES, {}).uncertainty_frac == 0.0


def test_every_ratio_has_the_interval_of_its_own_reference():
    # Two seeds; over prompts of all suites the plain times, the default's and the tuned tree's are
    # paired with both.
    comparison = compared(seeds=2, ours=(16.0, 10.0))
    table = compare.over_seeds(comparison, level=0.8)
    row = table.set_index(["suite", "method"]).loc[("all", "ours")]
    times = np.array([[16.0, 17.0], [10.0, 11.0]])
    references = {"speedup": (50.0, 50.0), "over_default": (25.0, 40.0), "over_tuned": (20.0, 20.0)}
    for name, own in references.items():
        columns = np.column_stack([own, times])
        spread = stats.interval(
            columns, lambda means: (means[..., :1] / means[..., 1:]).mean(-1), level=0.8
        )
        seeds = [sum(own) / 26, sum(own) / 28]
        # Student's t with one degree of freedom, 90 %
        reach = 3.0776835 * np.std(seeds, ddof=1) / 2**0.5
        ends = [
            np.mean(seeds),
            np.mean(seeds) - reach,
            np.mean(seeds) + reach,
            spread.low,
            spread.high,
        ]
        names = [*stats.spread_names(name), *stats.spread_names(f"{name}_prompts")[1:]]
        assert row[names].tolist() == pytest.approx(ends)
        if name != "speedup":
            p_name = stats.p_name(name)
            assert row[[p_name, f"{p_name}_holm"]].tolist() == pytest.approx([spread.p_value] * 2)
    assert (row["seeds"], row["prompts"], row["beyond_costs"]) == (2, 2, True)
    unsure = compare.over_seeds(replace(comparison, uncertainty_frac=1.0)).set_index(
        ["suite", "method"]
    )
    assert not unsure.loc[("all", "ours"), "beyond_costs"]
    others = table[table["method"] != "ours"]
    assert others.loc[others["method"] == "tuned static", "over_tuned_prompts_high"].iloc[-1] == 1
    assert others[["p_default", "p_tuned", "p_default_holm", "p_tuned_holm"]].isna().all(axis=None)
    assert "p_speedup" not in table and "speedup_holm" not in table
    one = table.set_index(["suite", "method"]).loc[("s", "ours")]
    assert one["prompts"] == 1 and np.isnan(one["over_tuned_prompts_low"])
    alone = (
        compare.over_seeds(compared(ours=(16.0, 10.0)))
        .set_index(["suite", "method"])
        .loc[("all", "ours")]
    )
    assert alone[["tau_low", "tau_high"]].isna().all() and alone["tau"] == 3.0
    nobody = replace(compared(), policy_ms={})
    assert not [name for name in compare.over_seeds(nobody) if name.startswith("p_")]
    comparison = replace(
        compared(one=(16.0, 10.0), two=(19.0, 17.0)), policy_ms={"one": 0.0, "two": 0.0}
    )
    table = compare.over_seeds(comparison).set_index(["suite", "method"]).loc["all"]
    for name in ("p_default", "p_tuned"):
        two = table.loc[["one", "two"]]
        assert two[f"{name}_holm"].tolist() == stats.holm(two[name]).tolist()


def test_policies_are_told_what_they_are_judged_on_and_timed_where_nobody_said_what_they_cost(
    monkeypatch,
):
    warned = Mock()
    trace = synthetic_trace(turns=4)
    costs = round_costs()
    trace.header["pair"] = "synthetic"
    monkeypatch.setattr(compare, "warn_elsewhere", warned)
    seeds = [Static(3, 1, 3), Static(4, 1, 3)]
    options = dict(baselines=TREES, policy_ms={"a": 0.0}, random_seeds=(), progress=False)
    compare.compare_replay(trace, costs, {"a": seeds}, **options)
    assert warned.mock_calls == [call(seed, pair="synthetic", costs=costs.name) for seed in seeds]
    looked = RadarPolicy()
    chose(looked, "weights", "train")
    compare.refuse_if_chosen_on("it", looked, "test")
    chose(looked, "width", "test", 3)
    refused = pytest.raises(
        SpecdecError, compare.compare_replay, trace, costs, {"it": looked}, **options
    )
    refused.match("'it' looked at part 'test' for its width")
    replayed = Mock(return_value=0.5)
    live = Mock(return_value=0.5)
    monkeypatch.setattr(compare, "answer_ms", replayed)
    monkeypatch.setattr(compare, "measured_answer_ms", live)
    options |= dict(policy_ms={"b": 2.0})
    found = compare.compare_replay(trace, costs, {"a": seeds, "b": Static(2, 1, 3)}, **options)
    test, own, prices = replayed.call_args.args
    assert (set(test.turns["part"]), own.plan, prices) == ({"test"}, seeds[0].plan, costs)
    assert not live.called
    assert own is not seeds[0] and found.policy_ms == {"a": 0.5, "b": 2.0}
    compare.compare_replay(trace, costs, {"a": seeds}, pair="pair", **options)
    pair, own, prices = live.call_args.args
    assert (pair, own.plan, prices) == ("pair", seeds[0].plan, costs)
    assert live.call_count == replayed.call_count == 1


def test_levels_and_nodes_as_far_as_a_machine_was_measured():
    """LTD's Figure 2: drafting d levels, the root pass among them, beside verifying 20 d nodes."""
    whole = round_costs(name="whole")
    short = round_costs(name="short", ranges={"expansions": (0, 3), "verify_nodes": (0, 60)})
    late = round_costs(name="late", ranges={"expansions": (8, 9), "verify_nodes": (0, 500)})
    table = compare.pair_costs({"a": whole, "b": short, "c": late}, "b")
    assert list(table) == ["machine", "here", "depth", "nodes", "draft_ms", "verify_ms"]
    assert table["machine"].tolist() == ["a"] * 10 + ["b"] * 3 + ["c"] * 2
    assert table["here"].tolist() == [False] * 10 + [True] * 3 + [False] * 2
    assert table["depth"].tolist() == [*range(1, 11), 1, 2, 3, 9, 10]
    assert (table["nodes"] == 20 * table["depth"]).all()
    # A root pass of 1 ms and expansions of 0.5; 5 ms for 10 nodes and 0.1 for each of the next 230.
    assert table["draft_ms"].tolist() == pytest.approx(
        [1 + 0.5 * (depth - 1) for depth in table["depth"]]
    )
    assert table["verify_ms"].tolist() == pytest.approx(
        [5 + 0.1 * (nodes - 10) for nodes in table["nodes"]]
    )
    sloped = round_costs(root_per_tok=(0.01, 0.01), verify_per_tok=(0.1, 0.1, 0.1))
    row = compare.pair_costs({"a": sloped}, "a", top_k=4, context_tok=100).iloc[0]
    assert (row["draft_ms"], row["verify_ms"]) == (pytest.approx(1 + 1), pytest.approx(6 + 10))
    usual = compare.pair_costs({"a": sloped}, "a").iloc[0]
    assert (usual["draft_ms"], usual["verify_ms"]) == (pytest.approx(1 + 3), pytest.approx(6 + 30))
    wide = round_costs(widths=(1, 10), root=(1.0, 10.0))
    assert compare.pair_costs({"a": wide}, "a").iloc[0]["draft_ms"] == 10.0


def test_references_are_a_comparison_without_policies(monkeypatch):
    trace = synthetic_trace(turns=8)
    costs = round_costs()
    compared = Mock(wraps=compare.compare_replay)
    monkeypatch.setattr(compare, "compare_replay", compared)
    table = references.references(trace, costs, defaults=(FIRST,), total_tokens=[4, 8])
    assert compared.call_args.kwargs.pop("baselines").chosen_on == ("train",)
    compared.assert_called_once_with(trace, costs, {}, part="test", random_seeds=(), progress=False)
    columns = (
        "suite method tree ms_per_tok tau speedup over_default over_tuned headroom_frac".split()
    )
    assert list(table) == columns and table.index.tolist() == list(range(3 * 7))
    assert table["suite"].tolist() == ["easy"] * 7 + ["hard"] * 7 + ["all"] * 7
    pooled = table[table["method"] == "per-suite tuned static"].set_index("suite")["tree"]
    assert pooled["all"] == "" and pooled["easy"]
    assert table[table["method"] == "default 16,4,3"]["tree"].tolist() == ["16,4,3"] * 3


def test_the_best_seed_pays_for_its_answers(monkeypatch):
    trace = synthetic_trace(turns=4)
    costs = round_costs()
    trace.turns["part"] = ["tune", "test"] * 2
    replayed = Mock(side_effect=[SimpleNamespace(ms_per_tok=ms) for ms in (2.0, 1.0, 1.0)])
    monkeypatch.setattr(compare, "replay", replayed)
    policies = [RadarPolicy(), RadarPolicy(), RadarPolicy()]
    before = copy.deepcopy(policies[0].trained_for)
    assert compare.best_seed(trace, costs, policies, 0.5) == 1
    for (tune, _, prices), named in replayed.call_args_list:
        assert (set(tune.turns["part"]), prices, named) == ({"tune"}, costs, {"policy_ms": 0.5})
    assert policies[0].trained_for == policies[2].trained_for == before
    assert policies[1].trained_for["choices"] == [
        {"choice": "seed", "part": "tune", "value": "2 of 3"}
    ]


def test_controllers_that_ship_go_by_their_printed_names(monkeypatch, tmp_path):
    loaded = []
    monkeypatch.setattr(
        compare, "load_controller", lambda folder: loaded.append(folder) or f"of {folder.name}"
    )
    monkeypatch.setattr(compare, "shipped_folder", lambda name: tmp_path / name)
    for name in ("resps-float32", "ltd-float32", "radar-float32", "ours-float32", "ours-bfloat16"):
        (tmp_path / "small" / name).mkdir(parents=True)
    assert compare.shipped_controllers("small", "float32") == {
        "Re-SpS, as shipped": ["of resps-float32"],
        "LTD, as shipped": ["of ltd-float32"],
        "RADAR, as shipped": ["of radar-float32"],
        "ours, as shipped": ["of ours-float32"],
    }
    assert loaded[0] == tmp_path / "small" / "resps-float32"
    assert compare.shipped_controllers("small", "bfloat16") == {
        "ours, as shipped": ["of ours-bfloat16"]
    }
    assert compare.shipped_controllers("tiny", "float32") == {}
    monkeypatch.setattr(compare, "load_controller", str)
    loaded = compare.load_controllers({"a": "one", "b": tmp_path, "c": ["one", "two"]})
    assert loaded == {"a": ["one"], "b": [str(tmp_path)], "c": ["one", "two"]}
