"""The gate between copies and the drafted tree, by hand."""

import math

import pytest
from fakes import questions

from specdec.core.records import PLAN
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies.copying import CopyGate


def asked(*chances):
    return questions.asked(PLAN, copied_scores=[math.log(chance) for chance in chances])


def test_there_is_room_for_the_tree_and_for_copies():
    gate = CopyGate()
    assert gate.plan == TreeConfig(8, 3, 3) and gate.copied.verify_nodes == 11
    assert (gate.limits.total_tokens, gate.limits.depth) == (12, 3)
    large = CopyGate(tree=(20, 4, 4, 2, 1), copied_tokens=12)
    assert large.plan == large.limits == TreeConfig(20, 4, 4, beam=(2, 1))
    shallow = CopyGate(tree=(1, 0, 1), copied_tokens=6).limits
    assert (shallow.total_tokens, shallow.depth, shallow.top_k) == (6, 1, 6)
    pytest.raises(SpecdecError, CopyGate, saved_frac=-0.1).match("saved_frac")


def test_copies_alone_if_they_promise_enough():
    gate = CopyGate()
    assert gate.enough_tok == pytest.approx(0.8 * 2 - 1)
    assert gate.answer(asked(0.5, 0.11)) is gate.copied
    assert gate.answer(asked(0.5, 0.09)) is gate.plan
    # two copies and the root: the best two of three
    chances = [math.log(0.5), math.log(0.25), math.log(0.9)]
    assert CopyGate(copied_tokens=3).promise(chances) == pytest.approx(1.4)
    exact = CopyGate(saved_frac=0.5, drafted_tok=2.0)
    assert exact.enough_tok == 0.5 and exact.answer(asked(0.5)) is exact.copied


def test_the_mean_of_drafted_trees_moves_within_a_turn():
    gate = CopyGate(newest_frac=0.25)
    gate.observe(questions.finished(3, 3))
    assert gate.drafted == 1.5 and gate.enough_tok == pytest.approx(0.8 * 2.5 - 1)
    gate.observe(questions.finished(9, 0))
    assert gate.drafted == 1.5, "nothing was drafted"
    gate.reset()
    assert gate.drafted == 1.0
