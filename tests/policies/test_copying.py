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


def test_settings_promises_and_what_drafted_trees_brought():
    gate = CopyGate()
    settings = {
        "tree": [8, 3, 3],
        "copied_tokens": 12,
        "saved_frac": 0.2,
        "drafted_tok": 1.0,
        "newest_frac": 0.2,
    }
    assert gate.settings() == settings and gate.asks == {PLAN}
    assert (gate.plan.total_tokens, gate.plan.depth, gate.plan.top_k, gate.plan.beam) == (
        8,
        3,
        3,
        (),
    )
    assert (gate.limits.total_tokens, gate.limits.depth, gate.copied.verify_nodes) == (12, 3, 11)
    large = CopyGate(tree=(20, 4, 4, 2, 1), copied_tokens=12)
    assert large.plan == TreeConfig(20, 4, 4, beam=(2, 1)) and large.limits.total_tokens == 20
    shallow = CopyGate(tree=(1, 0, 1), copied_tokens=6)
    assert (shallow.limits.total_tokens, shallow.limits.depth, shallow.limits.top_k) == (6, 1, 6)
    gate = CopyGate(copied_tokens=3)  # two copies and the root
    assert gate.promise([math.log(0.5), math.log(0.25), math.log(0.9)]) == pytest.approx(1.4)
    assert gate.promise([]) == 0.0
    gate = CopyGate()  # (1 - 0.2) * (1 + 1) - 1
    assert gate.enough_tok == pytest.approx(0.6)
    assert (
        gate.answer(asked(0.5, 0.11)) is gate.copied and gate.answer(asked(0.5, 0.09)) is gate.plan
    )
    exact = CopyGate(saved_frac=0.5, drafted_tok=2.0)
    assert exact.enough_tok == 0.5 and exact.answer(asked(0.5)) is exact.copied, (
        "as good is good enough"
    )
    gate = CopyGate(newest_frac=0.25)
    gate.observe(questions.finished(3, 3))
    assert gate.drafted == pytest.approx(1.5) and gate.enough_tok == pytest.approx(0.8 * 2.5 - 1)
    gate.observe(questions.finished(9, 0))
    assert gate.drafted == pytest.approx(1.5), "nothing was drafted"
    gate.reset()
    assert gate.drafted == 1.0
    idle = CopyGate(saved_frac=0.25, drafted_tok=0.25)
    assert idle.answer(asked()) is idle.copied, "a plain step"
    never = CopyGate(newest_frac=0.0)
    never.observe(questions.finished(3, 3))
    assert never.drafted == 1.0

    for bad, said in (
        ({"saved_frac": 1.1}, "saved_frac"),
        ({"newest_frac": -0.1}, "newest_frac"),
        ({"drafted_tok": -1.0}, "drafted_tok"),
        ({"drafted_tok": float("nan")}, "drafted_tok"),
    ):
        pytest.raises(SpecdecError, CopyGate, **bad).match(said)
    assert CopyGate(saved_frac=1.0, newest_frac=1.0, drafted_tok=1e6).enough_tok == -1.0
