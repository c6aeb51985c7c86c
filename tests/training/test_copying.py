"""Choosing a gate between copies and a tree: which are tried, and that the fastest stands first."""

from types import SimpleNamespace

import numpy as np
import pytest

from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies.copying import CopyGate
from specdec.training import copying


def test_every_gate_is_tried_with_every_tree_and_each_tree_alone(monkeypatch):
    trace, trees = (
        SimpleNamespace(copies="copies", forwards=True),
        [TreeConfig(4, 2, 3), TreeConfig(5, 3, 2, beam=(2, 1))],
    )
    asked = []

    def timed(given, policy, costs):
        asked.append(policy)
        assert given is trace and costs == "costs"
        ms = 9.0 if isinstance(policy, Static) else policy.copied_tokens + policy.saved_frac
        return SimpleNamespace(tau=2.0, ms_per_tok=ms, speedup=1 / ms)

    monkeypatch.setattr(copying, "replay", timed)
    table = copying.gates(trace, "costs", trees, copied=(8, 12), saved=(0.5, 0.25))
    numbers = [(4, 2, 3), (5, 3, 2, 2, 1)]
    assert [policy.plan for policy in (asked[0], asked[5])] == trees
    assert [policy for policy in asked if isinstance(policy, CopyGate)] == [
        CopyGate(own, copied, saved) for own in numbers for copied in (8, 12) for saved in (0.5, 0.25)
    ]
    assert list(table) == ["policy", "tree", "copied_tokens", "saved_frac", "tau", "ms_per_tok", "speedup"]
    assert table["ms_per_tok"].tolist() == [8.25, 8.25, 8.5, 8.5, 9.0, 9.0, 12.25, 12.25, 12.5, 12.5]
    assert table.index.tolist() == list(range(10)) and table["tree"].unique().tolist() == [tree.text for tree in trees]
    assert table["saved_frac"].tolist()[:4] == [0.25, 0.25, 0.5, 0.5] and table["copied_tokens"].isna().sum() == 2
    assert np.isnan(table["saved_frac"][4]) and (table["speedup"] == 1 / table["ms_per_tok"]).all()
    asked.clear()
    copying.gates(trace, "costs", trees[:1])
    assert [(one.copied_tokens, one.saved_frac) for one in asked[1:]] == [
        (copied, saved) for copied in (6, 8, 12) for saved in (0.1, 0.2, 0.3, 0.4)
    ]
    for without in ({"copies": None}, {"forwards": False}):
        with pytest.raises(SpecdecError, match="record a drafter that has both"):
            copying.gates(SimpleNamespace(**vars(trace) | without), "costs", trees)
