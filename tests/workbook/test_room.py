"""One decision: opponents, the rule, texts joined to one, and the table, on a small recording."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import specdec
from specdec.core.policy import Static
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


def test_opponents_are_chosen_and_trainings_are_found_again(ground):
    policies = room.opponents(ground, COSTS)
    assert list(policies) == [room.TREE, room.HYBRID, room.GATE, room.RULE]
    tune, static = ground.part("tune"), policies[room.HYBRID].plan
    other = Static(max(2, static.total_tokens - 2), static.depth, static.top_k)
    chosen = ground.merged.select(ground.merged.turns["part"] != "test")
    fastest = replay(chosen, policies[room.HYBRID], COSTS).ms_per_tok
    assert fastest <= replay(chosen, other, COSTS).ms_per_tok
    gated = replay(tune, policies[room.GATE], COSTS).ms_per_tok
    assert gated <= replay(tune, Static.of(static), COSTS).ms_per_tok
    first, second = room.learned(ground, COSTS, room.ROOM)
    assert max(first.sizes) <= 30 and first.plans
    again = room.learned(ground, COSTS, room.ROOM)
    assert again[1].trained_for == second.trained_for, "found, not trained"
    alone = room.learned(ground, COSTS, dataclasses.replace(room.ROOM, plans=False), copies=False)
    assert not alone[0].plans


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
