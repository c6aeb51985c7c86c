"""Lengths of others as recordings of chains: hand-made lengths, the published prices, and the data where they are."""

import json

import numpy as np
import pandas as pd
import pytest

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.replays.oracle import clairvoyant
from specdec.replays.replay import replay

from workbook import chains

TURNS = pd.DataFrame([{"suite": "s", "prompt": "s/0", "turn": 0, "part": "test", "prompt_tok": 10}])


def test_lengths_become_chains_that_accept_as_many_tokens():
    trace = chains.trace_of(TURNS, [np.array([3, 1, 4, 3, 2, 1])], "made up")
    assert (trace.depth, trace.most_nodes, trace.top_ks) == (2, 3, (1,))
    costs = chains.h100(1, 3)
    # chains of three: 3 tokens from 0, 3 from 3 (of which the text ends after 3); of one: 2, 2, 2
    whole, short = (replay(trace, Static(levels + 1, levels - 1, 1), costs, keep_cycles=True) for levels in (3, 1))
    assert whole.cycles["accepted_tok"].tolist() == [2, 2] and short.cycles["accepted_tok"].tolist() == [1, 1, 1]
    assert clairvoyant(trace, costs).ms_per_tok <= whole.ms_per_tok
    with pytest.raises(SpecdecError, match="one token at least"):
        chains.trace_of(TURNS, [np.array([1, 0])], "made up")


def test_prices_are_the_published_ones_in_both_readings():
    once, each = (chains.h100(8, 5, reading) for reading in chains.READINGS)
    fixed, per_row, per_cached = (1e3 * number for number in chains.TARGET_S)
    assert once.verify_ms(3, 100) == pytest.approx(fixed + 8 * (4 * per_row + 100 * per_cached))
    assert once.step_ms(100) == pytest.approx(fixed + 8 * (per_row + 100 * per_cached) + 1e3 * chains.REST_S)
    draft, per_draft, cached = (1e3 * number for number in chains.DRAFT_S)
    assert once.draft_ms(1, 4, 100) == pytest.approx(draft + 5 * 8 * per_draft + 8 * 100 * cached)
    assert each.draft_ms(1, 4, 100) - once.draft_ms(1, 4, 100) == pytest.approx(4 * draft)


def test_carrying_on_is_seen_where_it_is_and_not_where_lengths_are_drawn():
    counted = np.tile([5, 4, 3, 2, 1, 2, 1, 3, 2, 1], 30)
    trace = chains.trace_of(TURNS, [counted], "made up")
    assert chains.carried_on(trace)["follows_frac"][0] == 1.0
    drawn = chains.carried_on(chains.drawn_anew(trace)).iloc[0]
    assert drawn["follows_frac"] < 0.6
    free = chains.carried_on(chains.trace_of(TURNS, [np.random.default_rng(0).integers(1, 6, 20_000)], "made up")).iloc[
        0
    ]
    assert free["follows_frac"] == pytest.approx(free["expected_frac"], abs=0.03)


def test_rules_are_judged_beside_the_best_chain_and_the_bound(tmp_path):
    table = chains.judge(chains.made_up(), 4, chains.READINGS[0], ("hf_heuristic", "ucb")).set_index(
        ["suite", "method"]
    )
    assert table["headroom_frac"]["all"]["bound"] == pytest.approx(1)
    assert table["headroom_frac"]["all"]["best chain"] == 0
    assert (table["speedup"]["all"].drop("bound") < table["speedup"]["all"]["bound"]).all()
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"prompt_token_ids": [1]}) + "\n")
    with pytest.raises(SpecdecError, match="SpecDecode-Bench"):
        chains.read(tmp_path)


@pytest.mark.skipif(chains.found_in() is None, reason="needs SpecDecode-Bench's files beside SPECDEC_DATA")
def test_the_published_lengths_are_read():
    trace = chains.read(chains.found_in(), limit=2)
    assert len(trace.turns) == 8 and set(trace.turns["suite"]) == set(chains.SETS)
