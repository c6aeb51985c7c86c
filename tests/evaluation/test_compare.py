"""Policies beside their baselines on a synthetic recording, and live on the tiny pair."""

import dataclasses
from types import SimpleNamespace

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
from specdec.replays.oracle import clairvoyant
from specdec.replays.record import record
from specdec.replays.static_trees import best_static, static_turns

from workbook import terms

DEFAULTS = (TreeConfig(16, 4, 3), TreeConfig(8, 2, 3))
GRID = dict(total_tokens=range(2, 16), depths=range(1, 5))
COSTS = round_costs(question_ms=0.01)


def recording(**options):
    trace = synthetic_trace(turns=16, **options)
    trace.turns.loc[[1, 4], "part"] = "tune"
    return trace


def random_policies(count):
    tree = TreeConfig(6, 2, 3)
    return [RandomPolicy(tree, seed, asks=(EXTEND, SIZE)) for seed in range(count)]


@pytest.fixture(scope="module")
def comparison():
    policies = {"adaptive": random_policies(3), "fixed": [Static(9, 2, 3)]}
    charged = {"adaptive": 0.05, "fixed": 0.0}
    trace = recording()
    options = dict(baselines=chosen(trace, COSTS), policy_ms=charged, progress=False)
    return compare.compare_replay(trace, COSTS, policies, **options)


def chosen(trace, costs, **options) -> compare.Baselines:
    return compare.Baselines.choose(trace, costs, defaults=DEFAULTS, **GRID, **options)


def ms_of(trace, costs, tree) -> float:
    turns = static_turns(trace, costs, tree)
    return pytest.approx(turns["time_ms"].sum() / turns["new_tok"].sum())


def test_it_agrees_with_static_walks(comparison):
    trace = recording()
    test = trace.select(part="test")
    part = trace.select(trace.turns["part"].isin(compare.CHOSEN_ON))
    baselines = comparison.baselines
    ms = comparison.table.set_index(["suite", "method"])["ms_per_tok"]
    for name, tree in baselines.trees.items():
        assert ms[("all", name)] == ms_of(test, COSTS, tree)
    assert baselines.tuned == best_static(part, COSTS, **GRID)
    for suite, tree in baselines.per_suite.items():
        assert tree == best_static(part.select(part.turns["suite"] == suite), COSTS, **GRID)
        of_suite = test.select((test.turns["suite"] == suite).to_numpy())
        assert ms[(suite, compare.PER_SUITE)] == ms_of(of_suite, COSTS, tree)
    assert ms[("all", compare.CLAIRVOYANT)] == clairvoyant(test, COSTS).ms_per_tok
    rows = comparison.turns[comparison.turns["method"] == baselines.default]
    assert (rows["verified_tok"] == 16 * rows["cycles"]).all()
    assert (rows["draft_calls"] == 5 * rows["cycles"]).all()


def test_policies_that_only_a_wider_recording_can_judge(comparison):
    wide = recording(top_ks=(3, 4))
    policies = {"wide": [Static(18, 2, 4), Static(9, 2, 4)]}
    joined = terms.with_published(comparison, wide, COSTS, policies, progress=False)
    rows = joined.table[joined.table["method"] == "wide"].set_index(["suite", "seed"])
    test = wide.select(part="test")
    assert rows.loc[("all", 0), "ms_per_tok"] == ms_of(test, COSTS, TreeConfig(18, 2, 4))
    before = comparison.table.set_index(["suite", "method", "seed"])
    after = joined.table.set_index(["suite", "method", "seed"])
    same = [name for name in before.columns if name != "headroom_frac"]
    rest = [key for key in before.index if key[1] != compare.CLAIRVOYANT]
    pd.testing.assert_frame_equal(before.loc[rest, same], after.loc[rest, same])
    key = ("all", compare.CLAIRVOYANT, 0)
    least = min(before.loc[key, "ms_per_tok"], clairvoyant(test, COSTS).ms_per_tok)
    assert after.loc[key, "ms_per_tok"] == pytest.approx(least)
    assert set(joined.policy_ms) == {"adaptive", "fixed", "wide"}
    assert len(joined.cycles) > len(comparison.cycles)
    other = recording(top_ks=(3, 4), seed=1)
    with pytest.raises(SpecdecError, match="the two recordings hold other texts"):
        terms.with_published(comparison, other, COSTS, policies, progress=False)


SUITES = ["toy/gsm8k", "toy/nq"]
PER_SUITE = dict(zip(SUITES, (TreeConfig(5, 2, 3), TreeConfig(4, 1, 3)), strict=True))
BASELINES = compare.Baselines(DEFAULTS, TreeConfig(6, 2, 3), PER_SUITE)


@pytest.fixture(scope="module")
def both_ways(tiny, tmp_path_factory):
    """The same prompts recorded and compared in replay, and decoded live."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("home")))
        items = gather(SUITES, part="test", limit=2)
        shape = dict(depth=4, top_ks=(3,), trees=(3,), most_nodes=20, features=False)
        trace = record(tiny, items, part="test", progress=False, max_new_tokens=8, **shape)
        policies = {"adaptive": random_policies(2)}
        charged = dict(baselines=BASELINES, policy_ms={"adaptive": 0.1}, progress=False)
        replayed = compare.compare_replay(trace, round_costs(), policies, **charged)
        quiet = dict(limit=2, warmup=0, progress=False, max_new_tokens=8, seeds=2)
        live = compare_live.decode_live(tiny, policies, SUITES, BASELINES, **quiet)
        timing = SimpleNamespace(spent_s=1.0, model=round_costs)
        patch.setattr(compare_live, "Calibration", lambda pair, seconds: timing)
        again = compare_live.decode_live(tiny, policies, SUITES, BASELINES, calibration=1, **quiet)
    assert again.costs == round_costs() and live.costs is None
    # decoding does not change the policies, so the same call finds the same runs
    assert [run.key for run in live.runs] == [run.key for run in again.runs]
    return replayed, live


def test_live_table(both_ways):
    _, live = both_ways
    assert len(live.runs) == 2 and live.prompts["same"].all()
    per_suite = live.cycles[live.cycles["method"] == compare.PER_SUITE].groupby("suite")
    assert per_suite["expansions"].max().to_dict() == {SUITES[0]: 2, SUITES[1]: 1}
    table = compare_live.live_table(live)
    index = table.set_index(["suite", "method", "seed"]).sort_index()
    assert len(table) == 3 * 7 and (table["same_frac"] == 1).all()
    for suite in (*SUITES, "all"):
        rows = index.loc[suite]
        assert rows.loc[(live.default, 0), "over_default"] == pytest.approx(1)
        ratio = rows["speedup"] / rows.loc[(compare.TUNED, 0), "speedup"]
        drafting = rows.index.get_level_values("method") != "autoregressive"
        np.testing.assert_allclose(rows["over_tuned"][drafting], ratio[drafting])
        assert rows["p_tuned_holm"].notna().sum() == 2  # the controllers alone are tested
    speed = bench.summary(live.runs[0]).set_index("method").loc["adaptive #1", "speedup"]
    assert index.loc[(SUITES[0], "adaptive", 1), "speedup"] == pytest.approx(speed)


def test_replay_beside_live(both_ways):
    replayed, live = both_ways
    table = compare_live.beside(replayed, live)
    assert set(table["suite"]) == {*SUITES, "all"}
    tuned = table["method"] == compare.TUNED
    drafting = table["method"] != "autoregressive"
    turns = live.prompts[live.prompts["method"] == compare.TUNED]
    # 1. prices that know the drafter's reading of the prompt add it to what drafts, once a turn
    reading = dataclasses.replace(live, costs=round_costs(reading=30.0))
    later = compare_live.beside(replayed, reading)["replay_ms_per_tok"]
    slower = later - table["replay_ms_per_tok"]
    assert (slower[drafting] > 0).all() and (slower[~drafting] == 0).all()
    pooled = slower[tuned & (table["suite"] == "all")].item()
    assert pooled == pytest.approx(30.0 * len(turns) / (turns["new_tok"] - 1).sum())
    # 2. if the tuned answer is plain decoding, the bound is no slower: it need not draft
    never = replayed.turns.copy()
    of_tuned = replayed.turns["method"] == compare.TUNED
    never["draft_calls"] = never["draft_calls"].mask(of_tuned, 0)
    never["time_ms"] = never["time_ms"].mask(of_tuned, never["plain_ms"])
    undrafted = compare_live.beside(dataclasses.replace(replayed, turns=never), reading)
    assert (undrafted[tuned]["replay_speedup"] == 1).all()
    # 3. replay and live agree on cycles to the last one
    cycles = replayed.turns[of_tuned].set_index(["prompt", "turn"])["cycles"]
    assert cycles.to_dict() == turns.set_index(["prompt", "turn"])["cycles"].to_dict()
    elsewhere = dataclasses.replace(replayed, turns=replayed.turns.assign(prompt="other"))
    pytest.raises(SpecdecError, compare_live.beside, elsewhere, live).match("share no turn")
