"""One decision: opponents, the rule, texts joined to one, and the table, on a small recording."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import specdec
from specdec.core.records import PLAN, SIZE
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.costs.profiles import profile
from specdec.replays.replay import replay

from workbook import room

COSTS = profile("roofline-a100-llama-8b-eager")


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("home")))
        settings = dict(
            max_new_tokens=16,
            depth=4,
            top_ks=(3,),
            trees=(3,),
            most_nodes=30,
            limit=6,
            progress=False,
        )
        pair = specdec.load_pair("tiny", dtype="float32")
        trace = specdec.record(pair, ["toy/gsm8k", "toy/nq"], **settings)
        quick = dict(top_k=3, most_expansions=4, sizes=(0, 1, 3, 6, 12, 40), steps=20, rounds=1)
        patch.setattr(room, "ROOM", dataclasses.replace(room.ROOM, **quick))
        yield room.ground(trace, seeds=(0, 1))


def test_opponents_and_ours_stand_in_one_table_under_the_bound_and_trainings_are_found_again(
    ground,
):
    table, policies = room.judged(ground, COSTS)
    rows = table[table["suite"] == "all"].set_index("method")
    assert set(rows.index) == {room.TREE, room.HYBRID, room.GATE, room.RULE, "ours", room.BOUND}
    assert (
        rows.loc[room.TREE, "over_tuned"]
        == 1
        == rows.loc[room.GATE, "over_gate"]
        == rows.loc[room.BOUND, "headroom_frac"]
    )
    assert rows["over_tuned"].max() == rows.loc[room.BOUND, "over_tuned"]
    direct = [
        replay(ground.part("test", copies), policies[name][0], COSTS).ms_per_tok
        for name, copies in ((room.TREE, False), (room.HYBRID, True))
    ]
    assert rows.loc[room.HYBRID, "over_tuned"] == pytest.approx(direct[0] / direct[1])
    assert (
        len(policies["ours"]) == 2
        and max(policies["ours"][0].sizes) <= 30
        and policies["ours"][0].plans
    )
    assert 0 < rows.loc["ours", "policy_frac"] < 1 and rows.loc[room.TREE, "policy_frac"] == 0
    again = room.learned(ground, COSTS, room.ROOM)
    assert again[0].trained_for == policies["ours"][0].trained_for, "found, not trained"
    kept = room.moved(ground, COSTS, policies["ours"], policies["ours"])
    assert (
        len(kept) == 1
        and kept["kept_low"].iloc[0] <= kept["kept"].iloc[0] <= kept["kept_high"].iloc[0]
    )


def test_the_rule_weighs_summed_probabilities_against_time():
    rule = room.Worth(COSTS, 1.0, TreeConfig(33, 6, 4), TreeConfig(5, 1, 4))
    rate, nodes = rule.best(np.log([0.9, 0.8, 1e-300]), 5.0)
    spent = [float(COSTS.verify_ms(n, 200)) + COSTS.rest_ms + 5.0 for n in range(4)]
    assert nodes == 2 and rate == pytest.approx(2.7 / spent[2])
    asked = SimpleNamespace(kind=PLAN, copied_scores=np.log(np.full(6, 0.95)), plan=None)
    assert isinstance(rule.answer(asked), CopiedTree)
    asked.copied_scores = np.zeros(0)
    assert rule.answer(asked) == rule.plan, "a tree is expected to bring a token"
    rule.observe(SimpleNamespace(draft_calls=2, accepted_tok=0))
    assert rule.drafted_tok == pytest.approx(0.8)
    for _ in range(60):
        rule.observe(SimpleNamespace(draft_calls=2, accepted_tok=0))
    assert rule.answer(asked) == TreeConfig(1, 0, 1), "trees have brought nothing"
    copied = SimpleNamespace(kind=SIZE, plan=CopiedTree(5), largest=3, copied_scores=np.zeros(3))
    assert rule.answer(copied) == 3
