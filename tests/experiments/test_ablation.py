"""The ablation: what configs say about choices, what a change is worth by hand, small trainings of
all three systems, and variants beside the paper's tree.
"""

import math
import types
import warnings

import numpy as np
import pandas as pd
import pytest
from fakes.traces import COSTS, SMALL_LTD, SMALL_RESPS, round_costs, synthetic_trace

from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed
from specdec.replays.replay import replay

from experiments import ablation
from experiments.ablation import Choice, ablate, effects

TRACE = synthetic_trace(turns=8, positions=40)
DEEP = synthetic_trace(turns=8, positions=30, depth=7, top_ks=(10,), most_nodes=60, features=4)
# the base config, and some choices of each system
SYSTEMS = {
    "resps": (
        changed(resps.OURS, SMALL_RESPS),
        [
            Choice({"push_partial": False}),
            Choice({"state": "concat"}),
            Choice({"action_lag": True}, decoding=True),
        ],
    ),
    "ltd": (
        changed(ltd.OURS, SMALL_LTD | {"rounds": ltd.ROUNDS[:2]}),
        [
            Choice({"size.exponentiated": False, "size.best": 0}),
            Choice({"depth.stride": 3}, decoding=True),
        ],
    ),
    "radar": (
        changed(radar.OURS, {"epochs": 1}),
        [Choice({"continue_bias": 0.0}), Choice({"half_inputs": True}, decoding=True)],
    ),
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this .* (gave the answer|stops after)")
        yield


def test_what_a_change_is_worth_by_hand():
    late = Choice({"action_lag": True}, decoding=True)
    seldom = Choice({"interval": 30}, decoding=True)
    times = {("a", "ours"): 5.0, ("b", "ours"): 15.0}
    times |= {("a", late.name): 5.0, ("b", late.name): 20.0}
    times |= {("a", seldom.name): 2.5, ("b", seldom.name): 7.5}
    rows = []
    for (prompt, choice), ms in times.items():
        for turn in range(2):
            rows += [(prompt, choice, turn, seed, ms * (1 + seed)) for seed in range(2)]
    turns = pd.DataFrame(rows, columns=["prompt", "choice", "turn", "seed", "time_ms"])
    table = effects("resps", turns.assign(suite="s"), [late, seldom])
    assert table["seeds"].tolist() == [2, 2]
    assert table["over_ours"].tolist() == pytest.approx([40 / 50, 2.0])
    # Without one prompt it is 30/40, without the other 10/10: the jackknife's error of the
    # logarithm is half of their distance; Student's t has one degree of freedom.
    reach = 12.7062 * math.log(4 / 3) / 2
    ends = [0.8 * math.exp(-reach), 0.8 * math.exp(reach)]
    assert table.loc[0, ["low", "high"]].tolist() == pytest.approx(ends, rel=1e-5)
    assert table.loc[1, ["low", "high"]].tolist() == pytest.approx([2.0, 2.0])


def test_what_the_configs_say_of_a_choice():
    (row,) = ablation.stated("resps", [Choice({"action_lag": True}, decoding=True)]).values.tolist()
    name = "action_lag=True, decoding"
    assert row == [name, "action_lag", "False", "True", "False", "True"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_measuring(system, tmp_path):
    trace = DEEP if system == "radar" else TRACE
    base, choices = SYSTEMS[system]
    measured = (system, trace, COSTS, tmp_path, choices, base, (0,))
    table, turns = ablate(*measured)
    assert table["choice"].tolist() == [choice.name for choice in choices]
    assert (table["over_ours"] > 0).all()
    assert set(turns["choice"]) == {"ours", *table["choice"]}
    # what only decodes otherwise learns nothing
    learned = sum(not choice.decoding for choice in choices)
    assert len(list(tmp_path.iterdir())) == 1 + learned
    # nothing is trained twice; RADAR writes its curve once more
    curves = {file: file.stat().st_ino for file in tmp_path.rglob("curve.parquet")}
    _, again = ablate(*measured)
    assert again["cycles"].tolist() == turns["cycles"].tolist()
    assert {file: file.stat().st_ino for file in curves} == curves


def test_one_of_two_policies_decodes_otherwise():
    depth = ltd.OURS.depth.policy().fill_at_random((4,))
    size = ltd.OURS.size.policy().fill_at_random((4,))
    both = ablation.redecoded(ltd.combine(depth, size), {"depth.stride": 3})
    settings = [policy.settings() for policy in both.policies]
    assert settings == [depth.settings() | {"stride": 3}, size.settings()]


class Sees(Static):
    """A static tree that says what it sees, and takes an encoder."""

    state = "concat"
    encoder = None

    def attach(self, encode):
        Sees.encoder = encode(types.SimpleNamespace(context_tok=3))


def test_variants_stand_beside_the_papers_tree(monkeypatch):
    trace = synthetic_trace(positions=16, depth=7, top_ks=(10,), most_nodes=70)
    trace.turns["part"] = np.resize(["train", "tune", "test"], len(trace.turns))
    monkeypatch.setitem(ablation.PAPER_TREES, "resps", TreeConfig(8, 2, 10))
    reads = Sees(8, 2, 10)
    reads.state = "text"
    policies = {"its own": [Sees(8, 2, 10)] * 2, "larger": [Sees(24, 2, 10)] * 2, "text": [reads]}
    table, turns = ablation.beside_paper_tree(trace, round_costs(), policies, str.split)
    assert table.index.tolist() == list(policies)
    assert table["unique_actions"].tolist() == [1, 1, 1]
    assert table.loc["its own", "over_eagle3"] == pytest.approx(1.0)
    assert table.loc["larger", "over_eagle3"] < 1
    assert Sees.encoder == ["word"] * 3, "an answer that embeds a text is timed with an encoder"
    test = trace.select(part="test")
    of_larger = replay(test, policies["larger"][0], round_costs()).table["time_ms"].sum()
    sums = turns.groupby(["method", "seed"])["time_ms"].sum()
    assert sums["larger"].tolist() == pytest.approx([of_larger] * 2)
    assert len(turns) == 5 * len(test.turns)
