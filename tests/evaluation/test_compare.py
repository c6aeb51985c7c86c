"""Policies beside their baselines: hand-computed facts about cycles, replay against static walks,
live against itself.
"""

import dataclasses
import warnings

import numpy as np
import pandas as pd
import pytest
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import RandomPolicy, Static
from specdec.core.records import EXTEND, SIZE
from specdec.core.tree_config import TreeConfig
from specdec.data.suites import gather
from specdec.errors import SpecdecError
from specdec.evaluation import bench, compare, compare_live
from specdec.policies.base import chose
from specdec.policies.radar import RadarPolicy
from specdec.policies.value import ValuePolicy
from specdec.replays.oracle import clairvoyant
from specdec.replays.record import record
from specdec.replays.static_trees import best_static, static_turns

from experiments import one_table
from workbook import references, terms

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
    trace = recording()
    costs = round_costs(question_ms=0.01)
    options = dict(baselines=chosen(trace, costs), policy_ms=charged, progress=False)
    return compare.compare_replay(trace, costs, policies, **options)


def chosen(trace, costs, **options) -> compare.Baselines:
    return compare.Baselines.choose(trace, costs, defaults=DEFAULTS, **GRID, **options)


def test_it_agrees_with_static_walks(comparison):
    test = recording().select(part="test")
    costs = round_costs(question_ms=0.01)
    baselines = comparison.baselines
    table = comparison.table.set_index(["suite", "method"])
    for name, tree in baselines.trees.items():
        turns = static_turns(test, costs, tree)
        ms = turns["time_ms"].sum() / turns["new_tok"].sum()
        assert table.loc[("all", name), "ms_per_tok"] == pytest.approx(ms)
        assert table.loc[("all", name), "speedup"] == pytest.approx(
            turns["plain_ms"].sum() / turns["time_ms"].sum()
        )
    trace = recording()
    part = trace.select(trace.turns["part"].isin(compare.CHOSEN_ON))
    assert baselines.tuned == best_static(part, costs, **GRID)
    for suite, tree in baselines.per_suite.items():
        assert tree == best_static(part.select(part.turns["suite"] == suite), costs, **GRID)
        turns = static_turns(test.select((test.turns["suite"] == suite).to_numpy()), costs, tree)
        ms = turns["time_ms"].sum() / turns["new_tok"].sum()
        assert table.loc[(suite, compare.PER_SUITE), "ms_per_tok"] == pytest.approx(ms)
    assert (
        table.loc[("all", compare.CLAIRVOYANT), "ms_per_tok"] == clairvoyant(test, costs).ms_per_tok
    )
    rows = comparison.turns[comparison.turns["method"] == baselines.default]
    assert (rows["verified_tok"] == 16 * rows["cycles"]).all()
    assert (rows["draft_calls"] == 5 * rows["cycles"]).all()


def test_references_choose_on_one_part_and_compare_on_another():
    trace = recording()
    costs = round_costs()
    table = references.references(trace, costs, defaults=DEFAULTS, **GRID)
    assert list(table["suite"].unique()) == ["easy", "hard", "all"] and len(table) == 3 * 8
    rows = table.set_index(["suite", "method"])
    baselines = chosen(trace, costs, parts=("train",))
    assert rows["tree"]["easy", compare.PER_SUITE] == baselines.per_suite["easy"].text
    assert rows["tree"]["all", "default 16,4,3"] == "16,4,3"
    assert rows["tree"]["all", "clairvoyant"] == ""
    for suite in ("easy", "hard", "all"):
        part = rows.loc[suite]
        ms = part["ms_per_tok"]
        assert ms["clairvoyant"] <= ms["oracle tree"] <= min(ms["oracle depth"], ms["oracle size"])
        assert max(ms["oracle depth"], ms["oracle size"]) <= ms["tuned static"] * (1 + 1e-9)
        assert part["over_default"].iloc[0] == part["over_tuned"]["tuned static"] == 1
        assert part["headroom_frac"]["clairvoyant"] == 1
        assert part["headroom_frac"]["tuned static"] == 0
        assert part["over_tuned"]["clairvoyant"] == pytest.approx(
            ms["tuned static"] / ms["clairvoyant"]
        )


def test_bad_comparisons_and_references():
    trace = recording()
    costs = round_costs()
    options = {
        "policies": {},
        "policy_ms": {"wide": 0.0},
        "baselines": chosen(trace, costs),
        "progress": False,
    }
    for change, sentence in (
        (dict(part="tune"), "chosen on"),
        (dict(policies={compare.TUNED: Static(9, 2, 3)}), "of no baseline"),
        (
            dict(policies={"wide": Static(9, 2, 5)}),
            "'wide' cannot be compared .* top_k=5 was not recorded",
        ),
    ):
        pytest.raises(SpecdecError, compare.compare_replay, trace, costs, **options | change).match(
            sentence
        )
    refused = {
        "'default 60,7,10' cannot be compared .* was not recorded": dict(defaults=compare.DEFAULTS),
    }
    for sentence, change in refused.items():
        given = dict(defaults=DEFAULTS) | change
        pytest.raises(SpecdecError, references.references, trace, costs, **given).match(sentence)
    trace.turns.loc[(trace.turns["suite"] == "hard") & (trace.turns["part"] == "train"), "part"] = (
        "tune"
    )
    untuned = pytest.raises(SpecdecError, references.references, trace, costs, defaults=DEFAULTS)
    untuned.match("no turn of suite 'hard' was recorded to tune on")


def test_every_machine_has_its_rows():
    trace = synthetic_trace(top_ks=(2, 3))
    cheap = round_costs(name="cheap", verify=(4.0, 4.0, 4.0))
    narrow = round_costs(
        name="narrow", ranges={"verify_nodes": (7, 7), "top_k": (3, 3), "expansions": (0, 2)}
    )
    models = {"dear": round_costs(), "cheap": cheap, "narrow": narrow}
    few = dict(defaults=DEFAULTS[1:], total_tokens=[4, 8, 16])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = references.on_machines(trace, models, **few)
        deep = references.on_machines(trace, models, **few, depths=[2, 3, 4])
    assert (
        list(dict.fromkeys(table["machine"]))
        == list(dict.fromkeys(deep["machine"]))
        == list(models)
    )
    tuned = deep[deep["method"] == "tuned static"].set_index("machine")["tree"]
    assert tuned["narrow"].str.contains(",2,").all(), "the one depth asked for that was measured"
    dear = table[table["machine"] == "dear"].drop(columns="machine").reset_index(drop=True)
    assert dear.equals(references.references(trace, models["dear"], **few, depths=range(5)))
    tuned = table[(table["method"] == "tuned static") & (table["suite"] == "all")].set_index(
        "machine"
    )["tree"]
    assert tuned["narrow"].startswith("8,") and tuned["narrow"].endswith(",3"), (
        "the one size that was measured"
    )
    best = table[table["method"] == "clairvoyant"]
    assert (best["headroom_frac"].dropna() == 1).all() and (best["over_tuned"] >= 1).all()


def test_policies_that_only_a_wider_recording_can_judge(comparison):
    costs = round_costs(question_ms=0.01)
    wide = recording(top_ks=(3, 4))
    quiet = dict(progress=False)
    found = terms.with_published(
        comparison, wide, costs, {"wide": [Static(18, 2, 4), Static(9, 2, 4)]}, **quiet
    )
    rows = found.table[found.table["method"] == "wide"].set_index(["suite", "seed"])
    turns = static_turns(wide.select(part="test"), costs, TreeConfig(18, 2, 4))
    assert rows.loc[("all", 0), "ms_per_tok"] == pytest.approx(
        turns["time_ms"].sum() / turns["new_tok"].sum()
    )
    before, after = (
        one.table.set_index(["suite", "method", "seed"]) for one in (comparison, found)
    )
    same = [name for name in before.columns if name != "headroom_frac"]
    bounded = [key for key in before.index if key[1] != compare.CLAIRVOYANT]
    pd.testing.assert_frame_equal(before.loc[bounded, same], after.loc[bounded, same])
    bounds = [one.loc[("all", compare.CLAIRVOYANT, 0), "ms_per_tok"] for one in (before, after)]
    assert bounds[1] == pytest.approx(
        min(bounds[0], clairvoyant(wide.select(part="test"), costs).ms_per_tok)
    )
    assert set(found.policy_ms) == {"adaptive", "fixed", "wide"}
    assert "wide" in set(found.cycles["method"])
    assert found.cycles.index.tolist() == list(range(len(found.cycles)))
    assert len(found.cycles) > len(comparison.cycles)
    assert found.turns.index.tolist() == list(range(len(found.turns)))
    given = comparison, recording(top_ks=(3, 4), seed=1), costs, {"wide": Static(9, 2, 4)}
    pytest.raises(SpecdecError, terms.with_published, *given, **quiet).match(
        "the two recordings hold other texts"
    )


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


def test_a_policy_that_was_priced_anew_is_at_home():
    policy = ValuePolicy(top_k=3, most_expansions=2, sizes=(2, 4))
    there = round_costs()
    policy.trained_for = {"pair": "large", "costs": "another"}
    for here, name in ((dict(pair="small"), "large"), (dict(costs=there.name), "another")):
        with pytest.warns(UserWarning, match=f"'{name}'"):
            compare.warn_elsewhere(policy, **here)
    moved = policy.price(there, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare.warn_elsewhere(moved, pair="large", costs=there.name)
    with pytest.warns(UserWarning, match="'large'"):
        compare.warn_elsewhere(moved, pair="small", costs=there.name)


SUITES = ("toy/gsm8k", "toy/nq")
PER_SUITE = dict(zip(SUITES, (TreeConfig(5, 2, 3), TreeConfig(4, 1, 3)), strict=True))
BASELINES = compare.Baselines(DEFAULTS, TreeConfig(6, 2, 3), PER_SUITE)


@pytest.fixture(scope="module")
def both(tiny, tmp_path_factory):
    """The same prompts recorded and comparison in replay, and decoded live."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("home")))
        options = dict(max_new_tokens=8)
        items = list(gather(SUITES, part="test", limit=2))
        shape = dict(depth=4, top_ks=(3,), trees=(3,), most_nodes=20, features=False)
        trace = record(tiny, items, part="test", progress=False, **shape, **options)
        policies = {
            "adaptive": [
                RandomPolicy(TreeConfig(6, 2, 3), seed, asks=(EXTEND, SIZE)) for seed in range(2)
            ]
        }
        charged = dict(baselines=BASELINES, policy_ms={"adaptive": 0.1}, progress=False)
        replayed = compare.compare_replay(trace, round_costs(), policies, **charged)
        quiet = dict(limit=2, warmup=0, progress=False, **options)
        live = compare_live.decode_live(tiny, policies, SUITES, BASELINES, seeds=2, **quiet)
        again = compare_live.decode_live(tiny, policies, SUITES, BASELINES, seeds=2, **quiet)
    configs = [[run.record()["config"] for run in one.runs] for one in (live, again)]
    assert configs[0] == configs[1], (
        "the same call must find what was measured: decoding may not change the policies"
    )
    return replayed, live


def test_live_table(both):
    _, live = both
    assert len(live.runs) == 2 and live.prompts["same"].all()
    own = (
        live.cycles[live.cycles["method"] == compare.PER_SUITE].groupby("suite")["expansions"].max()
    )
    assert own.to_dict() == {SUITES[0]: 2, SUITES[1]: 1}
    table = compare_live.live_table(live)
    index = table.set_index(["suite", "method", "seed"]).sort_index()
    assert len(table) == 3 * 7
    assert (index.loc[("all", live.default, 0), ["over_default", "speedup_low"]] > 0).all()
    for suite in (*SUITES, "all"):
        rows = index.loc[suite]
        assert rows.loc[(compare.TUNED, 0), "over_tuned"] == pytest.approx(1)
        assert rows.loc[(live.default, 0), "over_default"] == pytest.approx(1)
        ratio = rows["speedup"] / rows.loc[(compare.TUNED, 0), "speedup"]
        drafting = rows.index.get_level_values("method") != "autoregressive"
        np.testing.assert_allclose(rows["over_tuned"][drafting], ratio[drafting])
        assert rows["p_tuned_holm"].notna().sum() == 2  # the controllers alone are tested
    assert (index.loc[("all", "adaptive"), "policy_frac"] > 0).all()
    assert (table["same_frac"] == 1).all()
    expected = bench.summary(live.runs[0]).set_index("method")["speedup"]
    assert index.loc[(SUITES[0], "adaptive", 1), "speedup"] == pytest.approx(
        expected["adaptive #1"]
    )


def test_replay_beside_live(both, tiny, home):
    replayed, live = both
    table = compare_live.beside(replayed, live)
    assert set(table["suite"]) == {*SUITES, "all"}
    assert set(table["method"]) >= {"adaptive", compare.PER_SUITE, "random"}
    tuned = table["method"] == compare.TUNED
    drafting = table["method"] != "autoregressive"
    turns = live.prompts[live.prompts["method"] == compare.TUNED]
    # Prices that know the drafter's reading of the prompt add it to what drafts, once a turn.
    reading = dataclasses.replace(live, costs=round_costs(reading=30.0))
    slower = (
        compare_live.beside(replayed, reading)["replay_ms_per_tok"] - table["replay_ms_per_tok"]
    )
    assert (slower[drafting] > 0).all() and (slower[~drafting] == 0).all()
    pooled = slower[tuned & (table["suite"] == "all")].item()
    assert pooled == pytest.approx(30.0 * len(turns) / (turns["new_tok"] - 1).sum())
    # Where the tuned answer is plain decoding, who knows the text is no slower: it can do without
    # drafts, too.
    never = replayed.turns.copy()
    of_tuned = replayed.turns["method"] == compare.TUNED
    never["draft_calls"] = never["draft_calls"].mask(of_tuned, 0)
    never["time_ms"] = never["time_ms"].mask(of_tuned, never["plain_ms"])
    undrafted = compare_live.beside(dataclasses.replace(replayed, turns=never), reading)
    assert (undrafted[tuned]["replay_speedup"] == 1).all()
    # Tokens and cycles do not depend on the clock: replay and live agree on them to the last one.
    cycles = replayed.turns[of_tuned].set_index(["prompt", "turn"])["cycles"]
    assert cycles.to_dict() == turns.set_index(["prompt", "turn"])["cycles"].to_dict()
    replayed, live = both
    taken = {"random": Static(4, 1, 3)}
    decode_live = compare_live.decode_live
    pytest.raises(SpecdecError, decode_live, tiny, {}, ["toy/mbpp"], BASELINES).match(
        "was recorded to tune on"
    )
    pytest.raises(SpecdecError, decode_live, tiny, taken, SUITES, BASELINES).match("of no baseline")
    elsewhere = dataclasses.replace(replayed, turns=replayed.turns.assign(prompt="other"))
    pytest.raises(SpecdecError, compare_live.beside, elsewhere, live).match("share no turn")


def test_one_table_holds_every_method_both_ways(both):
    replayed, live = both
    long = one_table.long_table({0.0: replayed}, {0.0: live})
    rows = long.set_index(["method", "how"])
    assert rows["seeds"]["adaptive"].tolist() == [2, 2]
    assert rows.loc[(compare.TUNED, "live"), "over_tuned"] == pytest.approx(1)
    shown = one_table.one_table(long, [compare.TUNED, "adaptive"])
    assert list(shown) == ["T=0, replay", "T=0, live", "seeds", "headroom_frac", "policy_frac"]
    assert list(shown.index) == [compare.TUNED, "adaptive"]
    assert shown.loc[compare.TUNED, "T=0, replay"].endswith("/ 1.00 [1.00, 1.00]")
    assert one_table.one_table(long).loc["autoregressive", "T=0, live"].startswith("1.00 / - / -")
