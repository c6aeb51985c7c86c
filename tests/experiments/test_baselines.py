"""Drafters beside each other on one target: which are at hand, decoded and replayed."""

import pytest
from fakes.traces import round_costs

import specdec
from specdec.core.policy import Static
from specdec.core.tree_config import CopiedTree
from specdec.errors import SpecdecError
from specdec.evaluation.methods import DraftedBy
from specdec.policies.heuristics import CopyGate

from experiments import baselines


def test_drafters_of_one_target_in_one_run(tiny, home):
    # 1. which are at hand
    kinds = ["eagle3", "hybrid", "suffix", "lookahead"]
    drafters, absent = baselines.drafters_of(tiny, [*kinds, "medusa"])
    assert list(drafters) == kinds
    assert "no medusa drafter ships" in absent["medusa"]
    with pytest.raises(SpecdecError, match="did you mean 'suffix'"):
        baselines.drafters_of(tiny, ["sufix"])
    # 2. decoded, and replayed where that is possible
    tree = specdec.Static(6, 2, 2)
    copied = Static.of(CopiedTree(5))
    methods = {
        "eagle3": DraftedBy(drafters["eagle3"], tree, "eagle3"),
        "hybrid": DraftedBy(drafters["hybrid"], tree, "hybrid"),
        "suffix": DraftedBy(drafters["suffix"], copied, "suffix"),
        "lookahead": DraftedBy(drafters["lookahead"], copied, "lookahead"),
        "gated": DraftedBy(drafters["hybrid"], CopyGate((6, 2, 2), 5, 0.2), "hybrid"),
    }
    prompts = {"mine": ["one two three, one two three, one two"]}
    every = {"plain": "autoregressive", **methods}
    run = specdec.evaluate(every, prompts, tiny, max_new_tokens=10, progress=False)
    live = run.read_table("prompts").set_index("method")
    assert live["same"].all()
    settings = dict(max_new_tokens=10, depth=9, top_ks=(2,), trees=(), progress=False)
    judged, left_out = baselines.replayed(tiny, methods, prompts, round_costs(), **settings)
    assert list(left_out) == ["lookahead"]
    rows = judged.set_index("method")
    assert rows.index.tolist() == ["eagle3", "hybrid", "suffix", "gated"]
    assert (rows["cycle_tok"] == live.loc[rows.index, "cycle_tok"]).all()


def test_drafters_that_ship_beside_eagle3(home):
    pair = specdec.load_pair("small", dtype="float32")
    kinds = ["eagle1", "griffin", "medusa", "hydra"]
    drafters, _ = baselines.drafters_of(pair, kinds)
    assert list(drafters) == kinds
    every = {"plain": "autoregressive"}
    for kind, drafter in drafters.items():
        every[kind] = DraftedBy(drafter, specdec.Static(12, 3, 3), kind)
    settings = dict(part="test", limit=1, max_new_tokens=32, progress=False)
    run = specdec.evaluate(every, ["toy/humaneval", "toy/xsum"], pair, **settings)
    rows = run.read_table("prompts")
    assert rows["same"].all()
    sums = rows.groupby("method")[["cycle_tok", "cycles"]].sum().loc[kinds]
    # one that learned nothing has 1
    assert (sums["cycle_tok"] / sums["cycles"] > 1.5).all()
