"""Recordings of drafters that copy: replay accepts what live decoding accepts, and the odds are
those of the texts.
"""

import dataclasses

import numpy as np
import pytest
from fakes.pairs import shared_pair
from fakes.traces import RandomRecorded, round_costs
from fakes.values import random_policy

import specdec
from specdec.core.decode import decode
from specdec.core.policy import Chain, RandomPolicy, Static
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation.tuning import tune_gate
from specdec.models.ngrams import (
    PROMPT_LOOKUP,
    CopyOdds,
    HybridDrafter,
    LookaheadDrafter,
    NgramConfig,
    NgramDrafter,
)
from specdec.policies.base import load_policy
from specdec.policies.copying import CopyGate
from specdec.replays.copies import copy_odds_of, with_copies
from specdec.replays.oracle import clairvoyant
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid, static_turns

FEW = NgramConfig(levels=4, nodes=8)
COLUMNS = (
    "context_tok top_k expansions draft_calls candidates verify_nodes "
    "verified_tok accepted_tok kept_tok questions"
).split()
PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2], [7, 7, 8, 9, 7, 7], list(range(20)), [3]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """name -> (pair, its recording)."""
    base = shared_pair()
    found = {}
    drafters = {
        "suffix": NgramDrafter(base.target, FEW),
        "prompt_lookup": NgramDrafter(base.target, dataclasses.replace(PROMPT_LOOKUP, levels=4)),
        "hybrid": HybridDrafter(base.drafter, FEW, CopyOdds(scale=0.7)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("home")))
        for name, drafter in drafters.items():
            pair = dataclasses.replace(base, drafter=drafter)
            settings = dict(
                max_new_tokens=40, depth=4, top_ks=(2, 3), trees=(3,), most_nodes=30, progress=False
            )
            found[name] = pair, specdec.record(pair, {"mine": PROMPTS}, **settings)
    return found


class Recorded(RandomRecorded):
    top_ks = (2, 3)
    copies_frac = 0.33


POLICIES = {
    "tree": lambda: Static(12, 3, 3),
    "copies": lambda: Static.of(CopiedTree(6)),
    "gate": lambda: Chain(
        CopyGate((10, 2, 3), 7, 0.3), RandomPolicy(TreeConfig(20, 4, 3), seed=2, asks=("extend",))
    ),
    "random": lambda: Recorded(TreeConfig(25, 4, 3), seed=5),
}


@pytest.mark.parametrize("name", ["suffix", "prompt_lookup", "hybrid"])
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_is_what_live_decoding_does(traces, name, policy):
    pair, trace = traces[name]
    again = POLICIES[policy]()
    live = [decode(pair, prompt, again, max_new_tokens=40).cycles for prompt in PROMPTS]
    cycles = replay(trace, POLICIES[policy](), round_costs(), keep_cycles=True).cycles
    for number, rows in cycles.groupby("prompt", sort=False):
        theirs = live[list(trace.turns["prompt"]).index(number)]
        assert (rows[COLUMNS].to_numpy() == theirs[COLUMNS].to_numpy()).all(), rows[
            COLUMNS
        ].compare(theirs[COLUMNS])
    assert cycles["accepted_tok"].sum() > 10
    assert name == "hybrid" or not cycles["draft_calls"].any()


def planning(seed=1, **fields):
    return random_policy(1, seed, probe="none", plans=True, **fields)


def test_a_policy_of_values_plans_plain_steps_copies_and_trees_the_same_live_and_replayed(traces):
    pair, trace = traces["hybrid"]
    drafted = set()
    for rate in (0.0, 0.2, 50.0):  # what time is worth: at the last, a plain step at once
        policy = planning().price(round_costs(), rate)
        live = [decode(pair, prompt, policy, max_new_tokens=40).cycles for prompt in PROMPTS]
        cycles = replay(trace, policy, round_costs(), keep_cycles=True).cycles
        for number, rows in cycles.groupby("prompt", sort=False):
            theirs = live[list(trace.turns["prompt"]).index(number)]
            assert (rows[COLUMNS].to_numpy() == theirs[COLUMNS].to_numpy()).all(), rows[
                COLUMNS
            ].compare(theirs[COLUMNS])
        kinds = np.where(
            cycles["draft_calls"] > 0,
            "tree",
            np.where(cycles["verify_nodes"] > 0, "copies", "plain"),
        )
        drafted |= set(kinds.tolist())
    assert drafted == {"tree", "copies", "plain"}
    offered = trace.select(trace.turns["prompt"] == trace.turns["prompt"].iloc[-1])
    assert not np.isfinite(offered.column("copied_scores")[0]).any(), "a first token offers none"
    shallow = planning(top_k=2, most_expansions=1, sizes=(0, 20), continue_bonus_tok=-99.0)
    rows = decode(pair, PROMPTS[0], shallow.price(round_costs(), 0.0), max_new_tokens=20).cycles
    assert rows["verify_nodes"].max() <= shallow.limits.verify_nodes == 6, "the trie may hold more"
    pytest.raises(SpecdecError, random_policy, 1, probe="draft", plans=True).match(
        "before a tree there is no state"
    )


def test_copies_join_a_recording_without_models(traces):
    base = shared_pair()
    settings = dict(
        max_new_tokens=40, depth=4, top_ks=(2, 3), trees=(3,), most_nodes=30, progress=False
    )
    alone = specdec.record(base, {"mine": PROMPTS}, **settings)
    merged = traces["hybrid"][1]
    found = with_copies(alone, CopyOdds(scale=0.7), FEW)
    assert found.top_ks == (3,)
    assert found.copies == merged.copies
    assert found.header["key"] != alone.header["key"]
    for kind, top_k in (
        ("copied_ranks", 0),
        ("copied_scores", 0),
        ("ranks", 3),
        ("candidates", 3),
        ("scores", 3),
    ):
        np.testing.assert_array_equal(found.column(kind, top_k), merged.column(kind, top_k))
    part = found.select(found.turns["prompt"] == found.turns["prompt"].iloc[1])
    policies = [POLICIES["tree"](), planning()]
    for policy in policies:
        theirs = merged.select(merged.turns["prompt"] == merged.turns["prompt"].iloc[1])
        told = [
            replay(some, policy, round_costs()).table["time_ms"].sum() for some in (part, theirs)
        ]
        assert told[0] == told[1]
    with pytest.raises(AssertionError, match="no longer than"):
        with_copies(alone, CopyOdds(), NgramConfig(levels=6))


@pytest.mark.parametrize("name", ["suffix", "hybrid"])
def test_static_trees_and_the_bound(traces, name):
    _, trace = traces[name]
    costs = round_costs()
    for tree in (TreeConfig(12, 3, 3), TreeConfig(4, 0, 3), TreeConfig(1, 0, 2)):
        walked = static_turns(trace, costs, tree)
        replayed = replay(trace, Static.of(tree), costs).table
        for column in ("cycles", "cycle_tok", "time_ms"):
            assert np.allclose(walked[column], replayed[column]), (tree, column)
    bound = clairvoyant(trace, costs)
    others = [replay(trace, policy(), costs).ms_per_tok for policy in POLICIES.values()]
    others += [
        static_grid(trace, costs)["ms_per_tok"].min(),
        clairvoyant(trace, costs, sizes=[0, 3, 6]).ms_per_tok,
    ]
    assert bound.ms_per_tok <= min(others) * (1 + 1e-9)
    part = trace.restrict({"verify_nodes": (1, 11), "expansions": (0, 3)})
    assert replay(part, Static(12, 3, 3), costs).tau == replay(trace, Static(12, 3, 3), costs).tau


def test_odds_are_counted_the_fastest_gate_is_found(traces, tmp_path):
    _, trace = traces["suffix"]
    odds = copy_odds_of(trace, FEW)
    turns = len(trace.turns)
    seen = sum(map(sum, odds.outcomes))
    assert seen > 50 and odds.scale == 1.0 and 0 < sum(map(sum, odds.hits)) < seen
    alone = [copy_odds_of(trace.select(np.arange(turns) == turn), FEW) for turn in range(turns)]
    assert turns > 1 and sum(sum(map(sum, one.outcomes)) for one in alone) == seen, (
        "every turn counts"
    )
    _, trace = traces["hybrid"]
    table = tune_gate(trace, round_costs(), [TreeConfig(8, 2, 3)], copied=(6,), saved=(0.0, 0.4))
    assert len(table) == 3
    assert table["ms_per_tok"].is_monotonic_increasing
    assert table["saved_frac"].isna().sum() == 1
    for row in table.itertuples():
        assert replay(trace, row.policy, round_costs()).tau == row.tau
    gate = table[table["saved_frac"].notna()]["policy"].iloc[0]
    assert load_policy(gate.save(tmp_path)) == gate
    with pytest.raises(SpecdecError, match="record a drafter that has both"):
        tune_gate(traces["suffix"][1], round_costs(), [TreeConfig(8, 2, 3)])
    base = shared_pair()
    few = dict(max_new_tokens=8, depth=4, top_ks=(2,), trees=(), progress=False)
    for drafter, settings, words in (
        (LookaheadDrafter(base.target), {}, "measure it live"),
        (NgramDrafter(base.target), {}, "depth 9 at least"),
        (NgramDrafter(base.target, FEW), {"family": (2, 2)}, "EAGLE"),
    ):
        pair = dataclasses.replace(base, drafter=drafter)
        pytest.raises(
            SpecdecError, specdec.record, pair, {"mine": PROMPTS}, **few | settings
        ).match(words)
