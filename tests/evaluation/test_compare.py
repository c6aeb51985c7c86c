"""Policies beside their baselines: hand-computed facts about cycles, replay against static walks, live against itself."""

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import RandomPolicy, Static
from specdec.core.records import CYCLE_COLUMNS, EXTEND, SIZE
from specdec.core.tree_config import TreeConfig
from specdec.data.suites import gather
from specdec.errors import SpecdecError
from specdec.evaluation import bench, compare, compare_live, metrics, stats
from specdec.models.load import load_pair
from specdec.policies.base import Network, chose
from specdec.policies.ltd import DepthPolicy, SizePolicy
from specdec.policies.radar import RadarPolicy
from specdec.policies.resps import RespsPolicy
from specdec.policies.value import ValuePolicy
from specdec.replays.oracle import clairvoyant
from specdec.replays.record import record
from specdec.replays.replay import replay
from specdec.replays.snapshots import open_recording
from specdec.replays.static_trees import best_static, static_turns

from experiments import one_table
from workbook import terms

DEFAULTS = (TreeConfig(16, 4, 3), TreeConfig(8, 2, 3))
GRID = dict(total_tokens=range(2, 16), depths=range(1, 5))


def recording(**options):
    trace = synthetic_trace(turns=16, **options)
    trace.turns.loc[[1, 4], "part"] = "tune"
    return trace


@pytest.fixture(scope="module")
def comparison():
    adaptive = [RandomPolicy(TreeConfig(6, 2, 3), seed, asks=(EXTEND, SIZE)) for seed in range(3)]
    policies = {"adaptive": adaptive, "fixed": [Static(9, 2, 3)]}
    charged = {"adaptive": 0.05, "fixed": 0.0}
    trace, costs = recording(), round_costs(question_ms=0.01)
    return compare.compare_replay(
        trace, costs, policies, baselines=chosen(trace, costs), policy_ms=charged, progress=False
    )


def chosen(trace, costs, **options) -> compare.Baselines:
    return compare.Baselines.choose(trace, costs, defaults=DEFAULTS, **GRID, **options)


def rows_of(*turns, method="m") -> pd.DataFrame:
    """turns: (prompt, turn, [(accepted, V, n, candidates), ...])."""
    found = []
    for prompt, turn, cycles in turns:
        for number, (accepted, nodes, n, candidates) in enumerate(cycles):
            row = dict.fromkeys(CYCLE_COLUMNS, 0) | {
                "cycle": number,
                "top_k": 3,
                "expansions": n,
                "draft_calls": n + 1,
                "candidates": candidates,
                "verify_nodes": nodes,
                "verified_tok": nodes + 1,
                "accepted_tok": accepted,
                "new_tok": accepted + 1,
            }
            found.append({"suite": "s", "prompt": prompt, "turn": turn, "method": method, **row})
    return pd.DataFrame(found)


HAND = rows_of(("a", 0, [(3, 6, 2, 21), (0, 6, 2, 21)]), ("a", 1, [(1, 2, 0, 3)]), ("b", 0, [(0, 0, 0, 3)]))


def test_cycle_facts_by_hand():
    facts = metrics.cycle_facts(HAND).loc["m"]
    assert (facts["cycles"], facts["turns"]) == (4, 3)
    assert facts["tau_pooled"] == 8 / 4 and facts["tau_macro"] == (7 / 3 + 1) / 2 and facts["tau_last_turn"] == 3 / 2
    assert facts["calls_pooled"] == 8 / 4 and facts["calls_macro"] == (7 / 3 + 1) / 2
    assert facts["rounds_per_turn"] == 4 / 3 and facts["rounds_per_turn_sd"] == pytest.approx(np.std([2, 1, 1], ddof=1))
    assert facts["accepted_per_node"] == 4 / 14 and facts["accepted_per_level"] == 4 / 8
    assert facts["accepted_per_candidate"] == 4 / 48 and facts["new_per_verified_row"] == 8 / 18
    assert facts["accepted_per_node_macro"] == pytest.approx((3 / 12 + 1 / 2) / 2)  # nothing was verified in turn b
    assert facts["accepted_per_level_macro"] == pytest.approx((3 / 6 + 1 + 0) / 3)
    assert facts["accepted_per_level_sd"] == pytest.approx(np.std([3 / 6, 1, 0], ddof=1))
    counts = metrics.answer_counts(HAND)
    assert counts["cycles"].sum() == 4 and not counts.duplicated(list(counts.columns[:-1])).any()
    assert (counts["accepted_tok"] * counts["cycles"]).sum() == HAND["accepted_tok"].sum()
    assert facts["first_accepted_frac"] == 2 / 4 and facts["all_levels_frac"] == 2 / 4
    assert facts["unique_actions"] == 3 and facts["commonest"] == "7/2/3" and facts["commonest_frac"] == 0.5
    assert facts["effective_actions"] == pytest.approx(np.exp(0.5 * np.log(2) + 0.5 * np.log(4)))
    assert not facts["collapsed"]


def test_shares_sum_to_one_and_constants_are_seen():
    rows = pd.concat([HAND, rows_of(*[("a", 0, [(1, 4, 1, 12)] * 100)], method="same")])
    shares = metrics.action_shares(rows)
    assert shares.groupby("method")["share"].sum().to_dict() == pytest.approx({"m": 1.0, "same": 1.0})
    assert shares.groupby("method", sort=False)["share"].first().tolist() == [0.5, 1.0]
    each = metrics.answer_shares(rows, columns=["verify_nodes", "expansions"]).set_index(["method", "answer"])
    assert each.loc[("m", "verify_nodes")].set_index("value")["share"].to_dict() == {6: 0.5, 2: 0.25, 0: 0.25}
    assert each.loc[("m", "expansions")].set_index("value")["cycles"].to_dict() == {2: 2, 0: 2}
    assert metrics.cycle_facts(rows)["collapsed"].to_dict() == {"m": False, "same": True}
    two = metrics.cycle_facts(rows, ["suite", "method"])
    assert two.loc[("s", "m"), "tau_pooled"] == 2.0 and len(two) == 2


def test_seeds_are_decodings_of_their_own():
    twice = pd.concat([HAND.assign(seed=0), HAND.assign(seed=1)])
    one, both = metrics.cycle_facts(HAND).loc["m"], metrics.cycle_facts(twice).loc["m"]
    assert both["turns"] == 2 * one["turns"] and both["rounds_per_turn"] == one["rounds_per_turn"]
    assert both["tau_macro"] == pytest.approx(one["tau_macro"]) and both["tau_last_turn"] == one["tau_last_turn"]


def test_facts_want_cycles():
    pytest.raises(AssertionError, metrics.cycle_facts, HAND.iloc[:0]).match("no cycles")
    with pytest.raises(KeyError, match="accepted_tok"):
        metrics.cycle_facts(HAND.drop(columns="accepted_tok"))


def test_baselines_are_the_fastest_trees_on_their_parts():
    trace, costs = recording(), round_costs()
    baselines, part = chosen(trace, costs), trace.select(trace.turns["part"].isin(compare.CHOSEN_ON))
    assert baselines.tuned == best_static(part, costs, **GRID)
    for suite, tree in baselines.per_suite.items():
        assert tree == best_static(part.select(part.turns["suite"] == suite), costs, **GRID)
    assert list(baselines.trees) == ["default 16,4,3", "default 8,2,3", "tuned static"]
    pytest.raises(SpecdecError, baselines.of_suite, "other").match("no turn of suite 'other' was recorded to tune on")


def test_it_agrees_with_static_walks(comparison):
    """The same numbers as walks over the recording, which do without the cycle's code."""
    test, costs, baselines = recording().select(part="test"), round_costs(question_ms=0.01), comparison.baselines
    table = comparison.table.set_index(["suite", "method"])
    for name, tree in baselines.trees.items():
        turns = static_turns(test, costs, tree)
        ms = turns["time_ms"].sum() / turns["new_tok"].sum()
        assert table.loc[("all", name), "ms_per_tok"] == pytest.approx(ms)
        assert table.loc[("all", name), "speedup"] == pytest.approx(turns["plain_ms"].sum() / turns["time_ms"].sum())
    for suite, tree in baselines.per_suite.items():
        turns = static_turns(test.select((test.turns["suite"] == suite).to_numpy()), costs, tree)
        ms = turns["time_ms"].sum() / turns["new_tok"].sum()
        assert table.loc[(suite, compare.PER_SUITE), "ms_per_tok"] == pytest.approx(ms)
    assert table.loc[("all", compare.CLAIRVOYANT), "ms_per_tok"] == clairvoyant(test, costs).ms_per_tok
    rows = comparison.turns[comparison.turns["method"] == baselines.default]
    assert (rows["verified_tok"] == 16 * rows["cycles"]).all() and (rows["draft_calls"] == 5 * rows["cycles"]).all()


def test_references_choose_on_one_part_and_compare_on_another():
    trace, costs = recording(), round_costs()
    table = compare.references(trace, costs, defaults=DEFAULTS, **GRID)
    assert list(table["suite"].unique()) == ["easy", "hard", "all"] and len(table) == 3 * 8
    rows, baselines = table.set_index(["suite", "method"]), chosen(trace, costs, parts=("train",))
    assert rows["tree"]["easy", compare.PER_SUITE] == baselines.per_suite["easy"].text
    assert rows["tree"]["all", "default 16,4,3"] == "16,4,3" and rows["tree"]["all", "clairvoyant"] == ""
    for suite in ("easy", "hard", "all"):
        part = rows.loc[suite]
        ms = part["ms_per_tok"]
        assert ms["clairvoyant"] <= ms["oracle tree"] <= min(ms["oracle depth"], ms["oracle size"])
        assert max(ms["oracle depth"], ms["oracle size"]) <= ms["tuned static"] * (1 + 1e-9)
        assert part["over_default"].iloc[0] == part["over_tuned"]["tuned static"] == 1
        assert part["headroom_frac"]["clairvoyant"] == 1 and part["headroom_frac"]["tuned static"] == 0
        assert part["over_tuned"]["clairvoyant"] == pytest.approx(ms["tuned static"] / ms["clairvoyant"])


def test_bad_references_are_refused():
    trace, costs = recording(), round_costs()
    with pytest.raises(SpecdecError, match="part 'test' is what trees were chosen on"):
        compare.references(trace, costs, train="test", defaults=DEFAULTS)
    with pytest.raises(SpecdecError, match="no recorded turn is left"):
        compare.references(trace, costs, test="tets", defaults=DEFAULTS)
    with pytest.raises(SpecdecError, match="'default 60,7,10' cannot be compared .* was not recorded"):
        compare.references(trace, costs)
    trace.turns.loc[(trace.turns["suite"] == "hard") & (trace.turns["part"] == "train"), "part"] = "tune"
    with pytest.raises(SpecdecError, match="no turn of suite 'hard' was recorded to tune on"):
        compare.references(trace, costs, defaults=DEFAULTS)


def test_every_machine_has_its_rows():
    trace = synthetic_trace(top_ks=(2, 3))
    cheap = round_costs(name="cheap", verify=(4.0, 4.0, 4.0))
    narrow = round_costs(name="narrow", ranges={"verify_nodes": (7, 7), "top_k": (3, 3), "expansions": (0, 2)})
    models = {"dear": round_costs(), "cheap": cheap, "narrow": narrow}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = compare.on_machines(trace, models, defaults=DEFAULTS[1:], total_tokens=[4, 8, 16])
        deep = compare.on_machines(trace, models, defaults=DEFAULTS[1:], total_tokens=[4, 8, 16], depths=[2, 3, 4])
    assert list(dict.fromkeys(table["machine"])) == list(dict.fromkeys(deep["machine"])) == list(models)
    tuned = deep[deep["method"] == "tuned static"].set_index("machine")["tree"]
    assert tuned["narrow"].str.contains(",2,").all(), "the one depth asked for that was measured"
    dear = table[table["machine"] == "dear"].drop(columns="machine").reset_index(drop=True)
    assert dear.equals(
        compare.references(trace, models["dear"], defaults=DEFAULTS[1:], total_tokens=[4, 8, 16], depths=range(5))
    )
    tuned = table[(table["method"] == "tuned static") & (table["suite"] == "all")].set_index("machine")["tree"]
    assert tuned["narrow"].startswith("8,") and tuned["narrow"].endswith(",3"), "the one size that was measured"
    best = table[table["method"] == "clairvoyant"]
    assert (best["headroom_frac"].dropna() == 1).all() and (best["over_tuned"] >= 1).all()


def test_the_table_is_tidy(comparison):
    table = comparison.table
    assert not table.duplicated(["suite", "method", "seed"]).any() and set(table["suite"]) == {"easy", "hard", "all"}
    fixed = table[(table["method"] == "fixed")].iloc[0]
    assert (fixed["draft_calls"], fixed["verify_nodes"], fixed["policy_frac"]) == (3, 8, 0)
    bounds = table[table["suite"] == "all"].set_index("method")["headroom_frac"]
    assert bounds[compare.TUNED] == 0 and bounds[compare.CLAIRVOYANT] == 1 and 0 < bounds[compare.ORACLE] <= 1
    assert (table[table["method"] == "adaptive"]["policy_frac"] > 0).all()
    charged = table.groupby("method")["policy_ms"].first()
    assert charged.loc[["adaptive", "fixed"]].tolist() == [0.05, 0] and charged.drop(["adaptive", "fixed"]).isna().all()
    rows = comparison.turns[comparison.turns["method"] == "adaptive"]
    questions = comparison.cycles[comparison.cycles["method"] == "adaptive"]["questions"].sum()
    assert rows["policy_ms"].sum() == pytest.approx(0.06 * questions)


def test_policies_are_left_alone_and_answers_are_timed():
    policy = RandomPolicy(TreeConfig(6, 2, 3), 0, asks=(EXTEND, SIZE))
    before = policy._random.getstate()
    trace, costs = recording(), round_costs()
    options = dict(baselines=chosen(trace, costs), random_seeds=(0,), progress=False)
    found = compare.compare_replay(trace, costs, {"adaptive": policy}, **options)
    assert policy._random.getstate() == before and "answer" not in vars(policy)
    assert 0 < found.policy_ms["adaptive"] < 5


def test_spread_over_seeds_and_prompts(comparison):
    table = compare.over_seeds(comparison).set_index(["suite", "method"])
    values = comparison.table[(comparison.table["suite"] == "all") & (comparison.table["method"] == "adaptive")][
        "over_tuned"
    ]
    row = table.loc[("all", "adaptive")]
    assert row["seeds"] == 3 and row["over_tuned"] == pytest.approx(values.mean())
    reach = 4.302653 * values.std() / 3**0.5  # Student's t with two degrees of freedom
    assert row["over_tuned_high"] - row["over_tuned"] == pytest.approx(reach, rel=1e-5)
    assert row["over_tuned_prompts_low"] < row["over_tuned"] < row["over_tuned_prompts_high"]
    assert 0 <= row["p_tuned"] <= row["p_tuned_holm"] <= 1
    assert np.isnan(table.loc[("all", "fixed"), "tau_low"]) and np.isnan(table.loc[("all", compare.TUNED), "p_tuned"])
    assert table.loc[("all", compare.TUNED), "over_tuned_prompts_high"] == 1
    assert row["beyond_costs"] and not table.loc[("all", compare.TUNED), "beyond_costs"]
    unsure = compare.over_seeds(dataclasses.replace(comparison, uncertainty_frac=2 * abs(np.log(row["over_tuned"]))))
    assert not unsure.set_index(["suite", "method"]).loc[("all", "adaptive"), "beyond_costs"]
    own = comparison.turns[comparison.turns["method"] == "fixed"].groupby("prompt")["time_ms"].sum()
    tuned = comparison.turns[comparison.turns["method"] == compare.TUNED].groupby("prompt")["time_ms"].sum()
    columns = np.stack([own, tuned.loc[own.index]], axis=1)
    expected = stats.interval(columns, lambda means: means[..., 1] / means[..., 0])
    assert table.loc[("all", "fixed"), "p_tuned"] == pytest.approx(expected.p_value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(part="tune"), "chosen on"),
        (dict(policies={compare.TUNED: Static(9, 2, 3)}), "belongs to no baseline"),
        (dict(policies={"wide": Static(9, 2, 5)}), "'wide' cannot be compared .* top_k=5 was not recorded"),
        (dict(policies={"none": []}), "one per seed"),
    ],
)
def test_bad_comparisons(change, sentence):
    trace, costs = recording(), round_costs()
    options = {"policies": {}, "policy_ms": {"wide": 0.0}, "baselines": chosen(trace, costs), "progress": False}
    pytest.raises(SpecdecError, compare.compare_replay, trace, costs, **options | change).match(sentence)


def test_policies_that_only_a_wider_recording_can_judge(comparison):
    costs, wide = round_costs(question_ms=0.01), recording(top_ks=(3, 4))
    quiet = dict(progress=False)
    found = terms.with_published(comparison, wide, costs, {"wide": [Static(18, 2, 4), Static(9, 2, 4)]}, **quiet)
    rows = found.table[found.table["method"] == "wide"].set_index(["suite", "seed"])
    turns = static_turns(wide.select(part="test"), costs, TreeConfig(18, 2, 4))
    assert rows.loc[("all", 0), "ms_per_tok"] == pytest.approx(turns["time_ms"].sum() / turns["new_tok"].sum())
    before, after = (one.table.set_index(["suite", "method", "seed"]) for one in (comparison, found))
    same = [name for name in before.columns if name != "headroom_frac"]
    bounded = [key for key in before.index if key[1] != compare.CLAIRVOYANT]
    pd.testing.assert_frame_equal(before.loc[bounded, same], after.loc[bounded, same])
    bounds = [one.loc[("all", compare.CLAIRVOYANT, 0), "ms_per_tok"] for one in (before, after)]
    assert bounds[1] == pytest.approx(min(bounds[0], clairvoyant(wide.select(part="test"), costs).ms_per_tok))
    assert set(found.policy_ms) == {"adaptive", "fixed", "wide"} and "wide" in set(found.cycles["method"])
    assert found.cycles.index.tolist() == list(range(len(found.cycles))) and len(found.cycles) > len(comparison.cycles)
    assert found.turns.index.tolist() == list(range(len(found.turns)))
    with pytest.raises(SpecdecError, match="the two recordings hold other texts"):
        terms.with_published(comparison, recording(top_ks=(3, 4), seed=1), costs, {"wide": Static(9, 2, 4)}, **quiet)


def test_choices_say_which_part_they_looked_at():
    seeds = [RadarPolicy(), RadarPolicy()]
    for seed, policy in enumerate(seeds):
        chose(policy, "weights", "train")
        chose(policy, "width", "tune", 3 + seed)
    table = compare.choices({"RADAR": seeds, "fixed": [Static(4, 1, 3)]})
    assert table.values.tolist() == [
        ["RADAR", "weights", "train", ""],
        ["RADAR", "width", "tune", "3"],
        ["RADAR", "width", "tune", "4"],
        ["fixed", "-", "-", "-"],
    ]


def test_what_is_kept_of_several_seeds_is_chosen_on_the_tuning_part():
    trace, costs = recording(), round_costs()
    seeds = [with_network(SizePolicy(sizes=(1, 6), depth=3, top_k=3, drafted=3), number) for number in range(4)]
    tune = trace.select(part="tune")
    times = [replay(tune, policy, costs).ms_per_tok for policy in seeds]
    best = compare.best_seed(trace, costs, seeds, 0.0)
    assert times[best] == min(times) < max(times)
    assert compare.choices({"one": [seeds[best]]}).values.tolist() == [["one", "seed", "tune", f"{best + 1} of 4"]]


def with_network(policy, seed=0):
    random = np.random.default_rng(seed)
    policy.network = Network(
        [random.normal(size=(policy.actions, policy.observation_size)).astype(np.float32)],
        [np.zeros(policy.actions, np.float32)],
    )
    return policy


def test_controllers_come_back(tmp_path):
    resps = with_network(RespsPolicy(state="official", hidden_size=8))
    resps.save(tmp_path / "resps" / "policy")
    depth = with_network(DepthPolicy(depth=3, top_k=3, total_tokens=5))
    for folder in ("iter0-depth", "iter2-depth"):
        with_network(depth, seed=int(folder[4])).save(tmp_path / "ltd" / folder / "policy")
    size = with_network(SizePolicy(sizes=(2, 4), depth=3, top_k=3, drafted=3))
    size.save(tmp_path / "ltd" / "iter1-size" / "policy")
    pair = [tmp_path / "ltd/iter1-size/policy", tmp_path / "ltd/iter0-depth/policy"]
    found = compare.load_controllers(
        {"resps": tmp_path / "resps", "ltd": [tmp_path / "ltd"], "pair": [pair], "one": [tmp_path / "resps/policy"]}
    )
    assert [len(many) for many in found.values()] == [1, 1, 1, 1]
    assert found["resps"][0].settings() == resps.settings()
    last, first = (found[name][0].policies[0].network.weights[0] for name in ("ltd", "pair"))
    np.testing.assert_array_equal(last, with_network(depth, seed=2).network.weights[0])  # the last round's
    assert not np.array_equal(first, last) and found["pair"][0].asks == {EXTEND, SIZE}


def test_missing_controllers_are_named(tmp_path):
    pytest.raises(SpecdecError, compare.load_controllers, {"ltd": [tmp_path]}).match("no policy.json")
    with_network(DepthPolicy()).save(tmp_path / "one")
    with pytest.raises(SpecdecError, match="one for depth and one for size"):
        compare.load_controllers({"ltd": [[tmp_path / "one", tmp_path / "one"]]})


def test_a_policy_from_elsewhere_warns():
    policy = RadarPolicy()
    policy.trained_for = {"pair": "large"}
    with pytest.warns(UserWarning, match="'large'"):
        compare.warn_elsewhere(policy, pair="small")


def test_a_policy_that_was_priced_anew_is_at_home():
    policy, there = ValuePolicy(top_k=3, most_expansions=2, sizes=(2, 4)), round_costs()
    policy.trained_for = {"pair": "large", "costs": "another"}
    with pytest.warns(UserWarning, match="'another'"):
        compare.warn_elsewhere(policy, costs=there.name)
    moved = policy.price(there, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare.warn_elsewhere(moved, pair="large", costs=there.name)
    with pytest.warns(UserWarning, match="'large'"):
        compare.warn_elsewhere(moved, pair="small", costs=there.name)


SUITES = ("toy/gsm8k", "toy/nq")
BASELINES = compare.Baselines(
    DEFAULTS, TreeConfig(6, 2, 3), {SUITES[0]: TreeConfig(5, 2, 3), SUITES[1]: TreeConfig(4, 1, 3)}
)


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def both(tiny, tmp_path_factory):
    """The same prompts recorded and comparison in replay, and decoded live."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("home")))
        options = dict(max_new_tokens=8)
        items = list(gather(SUITES, part="test", limit=2))
        trace = record(
            tiny,
            items,
            depth=4,
            top_ks=(3,),
            trees=(3,),
            most_nodes=20,
            features=False,
            part="test",
            progress=False,
            **options,
        )
        policies = {"adaptive": [RandomPolicy(TreeConfig(6, 2, 3), seed, asks=(EXTEND, SIZE)) for seed in range(2)]}
        replayed = compare.compare_replay(
            trace, round_costs(), policies, baselines=BASELINES, policy_ms={"adaptive": 0.1}, progress=False
        )
        quiet = dict(limit=2, warmup=0, progress=False, **options)
        live = compare_live.decode_live(tiny, policies, SUITES, BASELINES, seeds=2, **quiet)
        again = compare_live.decode_live(tiny, policies, SUITES, BASELINES, seeds=2, **quiet)
    configs = [[run.record()["config"] for run in one.runs] for one in (live, again)]
    assert configs[0] == configs[1], "the same call must find what was measured: decoding may not change the policies"
    return replayed, live


def test_agreement_counts_every_method_once():
    row = {"suite": "all", "seed": 0}
    table = pd.DataFrame(
        [
            row | {"method": compare.TUNED, "replay_ms_per_tok": 5.0, "live_ms_per_tok": 5.0},
            row | {"method": "a", "replay_ms_per_tok": 4.0, "live_ms_per_tok": 4.4},
            row | {"method": "b", "replay_ms_per_tok": 6.3, "live_ms_per_tok": 6.0},
        ]
    )
    for kind in ("replay", "live"):
        table[f"{kind}_over_tuned"] = 5.0 / table[f"{kind}_ms_per_tok"]
    table["ms_per_tok_off"] = table["replay_ms_per_tok"] / table["live_ms_per_tok"] - 1
    facts = compare_live.agreement(pd.concat([table.assign(suite="mt_bench", ms_per_tok_off=9.0), table]))
    gains = [abs(5 / 4 - 5 / 4.4), abs(5 / 6.3 - 5 / 6)]
    expected = {"methods": 3, "median_frac": 0.05, "worst_frac": 1 / 11, "spearman": 1.0}
    expected |= {"gain_median": sum(gains) / 2, "gain_worst": max(gains)}
    assert facts == pytest.approx(expected)


def test_live_methods_and_trees(both):
    _, live = both
    assert len(live.runs) == 2 and live.prompts["same"].all()
    assert set(live.labels) == {
        "autoregressive",
        live.default,
        "tuned static",
        "per-suite tuned static",
        "random",
        "adaptive #0",
        "adaptive #1",
    }
    own = live.cycles[live.cycles["method"] == compare.PER_SUITE].groupby("suite")["expansions"].max()
    assert own.to_dict() == {SUITES[0]: 2, SUITES[1]: 1}


def test_live_table(both):
    _, live = both
    table = compare_live.live_table(live)
    index = table.set_index(["suite", "method", "seed"]).sort_index()
    assert len(table) == 3 * 7 and (index.loc[("all", live.default, 0), ["over_default", "speedup_low"]] > 0).all()
    for suite in (*SUITES, "all"):
        rows = index.loc[suite]
        assert rows.loc[(compare.TUNED, 0), "over_tuned"] == pytest.approx(1)
        assert rows.loc[(live.default, 0), "over_default"] == pytest.approx(1)
        ratio = rows["speedup"] / rows.loc[(compare.TUNED, 0), "speedup"]
        drafting = rows.index.get_level_values("method") != "autoregressive"
        np.testing.assert_allclose(rows["over_tuned"][drafting], ratio[drafting])
        assert rows["p_tuned_holm"].notna().sum() == 2  # the controllers alone are tested
    assert (index.loc[("all", "adaptive"), "policy_frac"] > 0).all() and (table["same_frac"] == 1).all()
    expected = bench.summary(live.runs[0]).set_index("method")["speedup"]
    assert index.loc[(SUITES[0], "adaptive", 1), "speedup"] == pytest.approx(expected["adaptive #1"])


def test_the_recording_that_ships_is_judged_with_a_warning():
    """It holds test prompts alone; policies are given by their names."""
    shipped = open_recording(Path(compare.__file__).parents[1] / "report" / "recordings" / "smollm2")
    with pytest.warns(UserWarning, match="trees are tuned on the very turns that judge them"):
        ours = {"ours": "smollm2/ours-float32"}
        found = compare.compare_replay(shipped.trace, shipped.costs, ours, random_seeds=(), progress=False)
    ratio = found.table.set_index(["suite", "method"]).loc[("all", "ours"), "over_tuned"]
    assert 0.5 < ratio < 2 and found.baselines.chosen_on == ()


def test_replay_beside_live(both):
    replayed, live = both
    table = compare_live.beside(replayed, live)
    assert set(table["suite"]) == {*SUITES, "all"} and set(table["method"]) >= {"adaptive", compare.PER_SUITE, "random"}
    row = table.set_index(["suite", "method", "seed"]).loc[("all", compare.TUNED, 0)]
    comparison_row = replayed.table.set_index(["suite", "method", "seed"]).loc[("all", compare.TUNED, 0)]
    assert row["replay_over_default"] == pytest.approx(comparison_row["over_default"])  # all turns are in both
    assert row["speedup_off"] == pytest.approx(row["replay_speedup"] / row["live_speedup"] - 1)
    assert row["prompts"] == 4 and row["live_speedup_low"] <= row["live_speedup"] <= row["live_speedup_high"]
    held = row["live_over_default_low"] <= row["replay_over_default"] <= row["live_over_default_high"]
    assert row["over_default_inside"] == held
    one = dataclasses.replace(live, prompts=live.prompts[live.prompts["prompt"] == live.prompts["prompt"].iloc[0]])
    assert compare_live.beside(replayed, one)["speedup_inside"].isna().all()  # one prompt, no interval
    turns = live.prompts[live.prompts["method"] == compare.TUNED]
    plain = live.prompts[live.prompts["method"] == "autoregressive"]
    assert row["live_speedup"] == pytest.approx(plain["decode_ms"].sum() / turns["decode_ms"].sum())
    spent = turns["decode_ms"].sum() / (turns["new_tok"] - 1).sum()
    assert row["live_ms_per_tok"] == pytest.approx(spent)
    assert row["ms_per_tok_off"] == pytest.approx(comparison_row["ms_per_tok"] / spent - 1)
    # Prices that know the drafter's reading of the prompt add it to what drafts, once a turn.
    reading = dataclasses.replace(live, costs=dataclasses.replace(round_costs(), reading=30.0))
    slower = compare_live.beside(replayed, reading)["replay_ms_per_tok"] - table["replay_ms_per_tok"]
    drafting = table["method"] != "autoregressive"
    assert (slower[drafting] > 0).all() and (slower[~drafting] == 0).all()
    pooled = slower[(table["method"] == compare.TUNED) & (table["suite"] == "all")].item()
    assert pooled == pytest.approx(30.0 * len(turns) / (turns["new_tok"] - 1).sum())
    # Where the tuned answer is plain decoding, who knows the text is no slower: it can do without drafts, too.
    never = replayed.turns.assign(
        draft_calls=replayed.turns["draft_calls"].mask(replayed.turns["method"] == compare.TUNED, 0)
    )
    never["time_ms"] = never["time_ms"].where(never["method"] != compare.TUNED, never["plain_ms"])
    undrafted = compare_live.beside(dataclasses.replace(replayed, turns=never), reading)
    assert (undrafted[undrafted["method"] == compare.TUNED]["replay_speedup"] == 1).all()
    # Tokens and cycles do not depend on the clock: replay and live agree on them to the last one.
    cycles = replayed.turns[replayed.turns["method"] == compare.TUNED].set_index(["prompt", "turn"])["cycles"]
    assert cycles.to_dict() == turns.set_index(["prompt", "turn"])["cycles"].to_dict()


def test_one_table_holds_every_method_both_ways(both):
    replayed, live = both
    long = one_table.long_table({0.0: replayed}, {0.0: live})
    rows = long.set_index(["method", "how"])
    assert rows.loc[("adaptive", "live"), "seeds"] == 2 == rows.loc[("adaptive", "replay"), "seeds"]
    clock = compare_live.live_table(live).query("suite == 'all' and method == 'adaptive'")
    assert rows.loc[("adaptive", "live"), "over_tuned"] == pytest.approx(clock["over_tuned"].mean())
    assert rows.loc[("adaptive", "live"), "over_tuned_low"] == clock["over_tuned_low"].min()
    spread = compare.over_seeds(replayed).set_index(["suite", "method"]).loc[("all", "adaptive")]
    assert rows.loc[("adaptive", "replay"), "over_tuned_high"] == spread["over_tuned_prompts_high"]
    assert rows.loc[(compare.TUNED, "live"), "over_tuned"] == pytest.approx(1)
    shown = one_table.one_table(long, [compare.TUNED, "adaptive"])
    assert list(shown) == ["T=0, replay", "T=0, live", "seeds", "headroom_frac", "policy_frac"]
    assert list(shown.index) == [compare.TUNED, "adaptive"]
    assert (
        shown.loc[compare.TUNED, "T=0, replay"].endswith("/ 1.00 [1.00, 1.00]") and shown.loc["adaptive", "seeds"] == 2
    )
    assert one_table.one_table(long).loc["autoregressive", "T=0, live"].startswith("1.00 / - / -")


def test_live_at_temperature_one_on_one_suite(tiny, home):
    options = dict(limit=1, max_new_tokens=6, temperature=1.0, warmup=0, progress=False)
    live = compare_live.decode_live(tiny, {"ours": Static(4, 1, 3)}, SUITES[1], BASELINES, **options)
    assert len(live.runs) == 1 and compare.PER_SUITE in live.labels
    assert live.runs[0].record()["config"]["temperature"] == 1.0 and live.prompts["same"].all()
    table = compare_live.live_table(live).set_index("method")
    assert set(table["suite"]) == {SUITES[1]} and np.isnan(
        table.loc["ours", "p_default_holm"]
    )  # one prompt tells nothing


def test_live_bad_input(tiny, both, home):
    replayed, live = both
    with pytest.raises(SpecdecError, match="was recorded to tune on"):
        compare_live.decode_live(tiny, {}, ["toy/mbpp"], BASELINES)
    with pytest.raises(SpecdecError, match="belongs to no baseline"):
        compare_live.decode_live(tiny, {"random": Static(4, 1, 3)}, SUITES, BASELINES)
    elsewhere = dataclasses.replace(replayed, turns=replayed.turns.assign(prompt="other"))
    pytest.raises(SpecdecError, compare_live.beside, elsewhere, live).match("share no turn")
