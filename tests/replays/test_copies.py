"""Recordings of drafters that copy: replay accepts what live decoding accepts, and the odds are
those of the texts.
"""

import dataclasses
import pickle

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
from specdec.models import ngrams
from specdec.models.ngrams import PROMPT_LOOKUP, CopyOdds, HybridDrafter, NgramConfig, NgramDrafter
from specdec.policies.base import load_policy
from specdec.policies.heuristics import CopyGate
from specdec.replays.copies import copy_odds_of, with_copies
from specdec.replays.oracle import clairvoyant
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid, static_turns
from specdec.replays.trace import path_nodes

FEW = NgramConfig(levels=4, nodes=8)
COLUMNS = (
    "context_tok top_k expansions draft_calls candidates verify_nodes "
    "verified_tok accepted_tok kept_tok questions"
).split()
PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2], [7, 7, 8, 9, 7, 7], list(range(20)), [3]]
SETTINGS = dict(
    max_new_tokens=40, depth=4, top_ks=(2, 3), trees=(3,), most_nodes=30, progress=False
)
COSTS = round_costs()


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """name -> (pair, its recording)."""
    base = shared_pair()
    drafters = {
        "alone": base.drafter,
        "suffix": NgramDrafter(base.target, FEW),
        "prompt_lookup": NgramDrafter(base.target, dataclasses.replace(PROMPT_LOOKUP, levels=4)),
        "hybrid": HybridDrafter(base.drafter, FEW, CopyOdds(scale=0.7)),
    }
    recordings = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("home")))
        for name, drafter in drafters.items():
            pair = dataclasses.replace(base, drafter=drafter)
            recordings[name] = pair, specdec.record(pair, {"mine": PROMPTS}, **SETTINGS)
    return recordings


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


def compared(pair, trace, make):
    """The cycles of a policy in replay, which are those of live decoding."""
    # a policy that draws numbers goes on from prompt to prompt
    policy = make()
    live = [decode(pair, prompt, policy, max_new_tokens=40).cycles for prompt in PROMPTS]
    cycles = replay(trace, make(), COSTS, keep_cycles=True).cycles
    prompts = list(trace.turns["prompt"])
    for prompt, rows in cycles.groupby("prompt", sort=False):
        expected = live[prompts.index(prompt)][COLUMNS]
        assert (rows[COLUMNS].to_numpy() == expected.to_numpy()).all()
    return cycles


@pytest.mark.parametrize("name", ["suffix", "prompt_lookup", "hybrid"])
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_is_what_live_decoding_does(traces, name, policy):
    cycles = compared(*traces[name], POLICIES[policy])
    assert cycles["accepted_tok"].sum() > 10
    assert name == "hybrid" or not cycles["draft_calls"].any()


def planning(**fields):
    return random_policy(1, 1, probe="none", plans=True, **fields)


def test_a_policy_of_values_plans_plain_steps_copies_and_trees_alike(traces):
    pair, trace = traces["hybrid"]
    drafted = set()
    for rate in (0.0, 0.2, 50.0):  # what time is worth: at the last, a plain step at once
        cycles = compared(pair, trace, lambda rate=rate: planning().price(COSTS, rate))
        drafted |= set(zip(cycles["draft_calls"] > 0, cycles["verify_nodes"] > 0, strict=True))
    assert drafted >= {(True, True), (False, True), (False, False)}
    shallow = planning(top_k=2, most_expansions=1, sizes=(0, 20), continue_bonus_tok=-99.0)
    rows = decode(pair, PROMPTS[0], shallow.price(COSTS, 0.0), max_new_tokens=20).cycles
    assert rows["verify_nodes"].max() <= shallow.limits.verify_nodes == 6, "the trie may hold more"
    with pytest.raises(SpecdecError, match="before a tree there is no state"):
        random_policy(1, probe="draft", plans=True)


def test_copies_join_a_recording_without_models(traces):
    merged = traces["hybrid"][1]
    joined = with_copies(traces["alone"][1], CopyOdds(scale=0.7), FEW)
    # what another process receives, which has no columns in memory
    sent = pickle.loads(pickle.dumps(joined))
    assert joined.top_ks == (3,) and joined.copies == merged.copies
    assert joined.header["key"] != traces["alone"][1].header["key"]
    columns = [("copied_ranks", 0), ("copied_scores", 0), ("ranks", 3), ("candidates", 3)]
    for column in (*columns, ("scores", 3)):
        np.testing.assert_array_equal(joined.column(*column), merged.column(*column))
        np.testing.assert_array_equal(sent.column(*column), merged.column(*column))
    policy = POLICIES["tree"]()
    times = [replay(trace, policy, COSTS).table["time_ms"].sum() for trace in (joined, merged)]
    assert times[0] == times[1]


@pytest.mark.parametrize("name", ["suffix", "hybrid"])
def test_static_trees_and_the_bound(traces, name):
    _, trace = traces[name]
    for tree in (TreeConfig(12, 3, 3), TreeConfig(4, 0, 3), TreeConfig(1, 0, 2)):
        walked = static_turns(trace, COSTS, tree)
        replayed = replay(trace, Static.of(tree), COSTS).table
        for column in ("cycles", "cycle_tok", "time_ms"):
            assert np.allclose(walked[column], replayed[column]), (tree, column)
    slower = [replay(trace, make(), COSTS).ms_per_tok for make in POLICIES.values()]
    slower.append(static_grid(trace, COSTS)["ms_per_tok"].min())
    slower.append(clairvoyant(trace, COSTS, sizes=[0, 3, 6]).ms_per_tok)
    assert clairvoyant(trace, COSTS).ms_per_tok <= min(slower) * (1 + 1e-9)


def test_odds_are_counted_in_every_turn(traces):
    _, trace = traces["suffix"]
    odds = copy_odds_of(trace, FEW)
    outcomes = np.sum(odds.outcomes)
    assert outcomes > 50 and odds.scale == 1.0 and 0 < np.sum(odds.hits) < outcomes
    # whole trees say how sure the drafter may be: by the scores of the text's own nodes
    alone = traces["alone"][1]
    drafted = alone.trees(3)
    nodes = path_nodes(drafted.tokens, drafted.beams, alone.text[:, 1:])
    right = (np.arange(drafted.scores.shape[1]) == nodes[..., None]).any(1)
    scale = ngrams.fit_scale(drafted.scores.ravel(), right.ravel())
    assert copy_odds_of(alone, FEW).scale == scale != 1
    first = trace.select(np.arange(len(trace.turns)) == 0)
    assert np.sum(copy_odds_of(first, FEW).outcomes) < outcomes


def test_the_fastest_gate_is_found(traces, tmp_path):
    _, trace = traces["hybrid"]
    table = tune_gate(trace, COSTS, [TreeConfig(8, 2, 3)], copied=(6,), saved=(0.0, 0.4))
    assert len(table) == 3 and table["ms_per_tok"].is_monotonic_increasing
    assert table["saved_frac"].isna().sum() == 1
    for row in table.itertuples():
        assert replay(trace, row.policy, COSTS).tau == row.tau
    gate = table[table["saved_frac"].notna()]["policy"].iloc[0]
    assert load_policy(gate.save(tmp_path)) == gate
    with pytest.raises(SpecdecError, match="record a drafter that has both"):
        tune_gate(traces["suffix"][1], COSTS, [TreeConfig(8, 2, 3)])
