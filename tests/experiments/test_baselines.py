"""Drafters beside each other on one target: which are at hand, what they are, how far their paths
reach.
"""

import pandas as pd
import pytest
from fakes.traces import round_costs

import specdec
from specdec.core.tree_config import CopiedTree
from specdec.errors import SpecdecError
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
    # 2. what they are
    facts = baselines.described(drafters).set_index("drafter")
    assert facts["forwards"].tolist() == [1, 1, 0, 0]
    assert facts.loc["hybrid", "parameters"] == facts.loc["eagle3", "parameters"] > 0
    assert facts.loc["suffix", "megabytes"] == 0 < facts.loc["lookahead", "extra_rows"]
    # 3. decoded, and replayed where that is possible
    methods = baselines.methods_of(drafters, specdec.TreeConfig(6, 2, 2), 5, 0.2)
    assert isinstance(methods["suffix"].policy.plan, CopiedTree)
    assert isinstance(methods[baselines.GATED].policy, CopyGate)
    prompts = {"mine": ["one two three, one two three, one two"]}
    every = {"plain": "autoregressive", **methods}
    run = specdec.evaluate(every, prompts, tiny, max_new_tokens=10, progress=False)
    live = run.read_table("prompts").set_index("method")
    assert live["same"].all()
    settings = dict(max_new_tokens=10, depth=9, top_ks=(2,), trees=(), progress=False)
    judged, left_out = baselines.replayed(tiny, methods, prompts, round_costs(), **settings)
    assert list(left_out) == ["lookahead"]
    rows = judged.set_index("method")
    assert rows.index.tolist() == ["eagle3", "hybrid", "suffix", baselines.GATED]
    assert (rows["cycle_tok"] == live.loc[rows.index, "cycle_tok"]).all()


def test_how_far_paths_reach():
    cycles = pd.DataFrame({"method": ["a", "a", "b"], "accepted_tok": [0, 2, 3]})
    assert baselines.reached(cycles, 3).to_numpy().tolist() == [[0.5, 0.5, 0.0], [1.0, 1.0, 1.0]]


def test_drafters_that_ship_beside_eagle3(home):
    pair = specdec.load_pair("small", dtype="float32")
    kinds = ["eagle1", "griffin", "medusa", "hydra"]
    drafters, _ = baselines.drafters_of(pair, kinds)
    assert list(drafters) == kinds
    methods = baselines.methods_of(drafters, specdec.TreeConfig(12, 3, 3), 5, 0.2)
    every = {"plain": "autoregressive", **methods}
    settings = dict(part="test", limit=1, max_new_tokens=32, progress=False)
    run = specdec.evaluate(every, ["toy/humaneval", "toy/xsum"], pair, **settings)
    rows = run.read_table("prompts")
    assert rows["same"].all()
    sums = rows.groupby("method")[["cycle_tok", "cycles"]].sum().loc[kinds]
    # one that learned nothing has 1
    assert (sums["cycle_tok"] / sums["cycles"] > 1.5).all()
