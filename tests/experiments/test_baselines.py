"""Drafters beside each other on one target: which are at hand, what they are, how far their paths
reach.
"""

import pandas as pd
import pytest
from fakes.traces import round_costs

import specdec
from specdec.core.tree_config import CopiedTree
from specdec.errors import SpecdecError
from specdec.models.drafters import KINDS
from specdec.models.load import shipped_folder
from specdec.policies.copying import CopyGate
from specdec.runs import read_json

from experiments import baselines


def test_drafters_of_one_target_in_one_run(tiny, home):
    found, absent = baselines.drafters_of(
        tiny, ["eagle3", "hybrid", "suffix", "lookahead", "medusa"]
    )
    assert (
        list(found) == ["eagle3", "hybrid", "suffix", "lookahead"]
        and "no medusa drafter ships" in absent["medusa"]
    )
    pytest.raises(SpecdecError, baselines.drafters_of, tiny, ["sufix"]).match(
        "did you mean 'suffix'"
    )
    facts = baselines.described(found).set_index("drafter")
    assert facts["forwards"].tolist() == [1, 1, 0, 0]
    assert facts.loc["hybrid", "parameters"] == facts.loc["eagle3", "parameters"]
    assert facts.loc["suffix", "megabytes"] == 0 < facts.loc["lookahead", "extra_rows"]
    methods = baselines.methods_of(found, specdec.TreeConfig(6, 2, 2), 5, 0.2)
    assert isinstance(methods["suffix"].policy.plan, CopiedTree) and isinstance(
        methods[baselines.GATED].policy, CopyGate
    )
    prompts = {"mine": ["one two three, one two three, one two"]}
    run = specdec.evaluate(
        {"plain": "autoregressive", **methods}, prompts, tiny, max_new_tokens=10, progress=False
    )
    assert run.read_table("prompts")["same"].all()
    settings = dict(max_new_tokens=10, depth=9, top_ks=(2,), trees=(), progress=False)
    judged, left_out = baselines.replayed(tiny, methods, prompts, round_costs(), **settings)
    assert list(left_out) == ["lookahead"] and "measure it live" in left_out["lookahead"]
    live = run.read_table("prompts").set_index("method")
    rows = judged.set_index("method")
    assert rows.index.tolist() == ["eagle3", "hybrid", "suffix", baselines.GATED]
    assert (rows["cycle_tok"] == live.loc[rows.index, "cycle_tok"]).all()
    cycles = pd.DataFrame({"method": ["a", "a", "b"], "accepted_tok": [0, 2, 3]})
    assert baselines.reached(cycles, 3).to_numpy().tolist() == [[0.5, 0.5, 0.0], [1.0, 1.0, 1.0]]


def test_drafters_that_ship_beside_eagle3(home):
    pair, tree = specdec.load_pair("small", dtype="float32"), specdec.TreeConfig(12, 3, 3)
    found, _ = baselines.drafters_of(pair, ["eagle1", "griffin", "medusa", "hydra"])
    methods = {"plain": "autoregressive", **baselines.methods_of(found, tree, 5, 0.2)}
    settings = dict(part="test", limit=1, max_new_tokens=32, progress=False)
    rows = specdec.evaluate(methods, ["toy/humaneval", "toy/xsum"], pair, **settings).read_table(
        "prompts"
    )
    assert rows["same"].all() and len(found) == 4
    sums = rows.groupby("method")[["cycle_tok", "cycles"]].sum()
    for kind in found:
        assert (
            sums.loc[kind, "cycle_tok"] / sums.loc[kind, "cycles"] > 1.5
        )  # one that learned nothing has 1
        card = read_json(shipped_folder("small") / KINDS[kind].folder / "card.json")
        assert card["kind"] == kind and len(card["learned"]) > 3
