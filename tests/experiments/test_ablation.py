"""The ablation: what configs say about choices, what a change is worth by hand, and small trainings
of all three systems.
"""

import math
import warnings

import pandas as pd
import pytest
from fakes.traces import COSTS, SMALL_LTD, SMALL_RESPS, synthetic_trace

from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed

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
    options = dict(base=base, seeds=(0,), progress=False)
    table, turns = ablate(system, trace, COSTS, tmp_path, choices, **options)
    assert table["choice"].tolist() == [choice.name for choice in choices]
    assert (table["over_ours"] > 0).all()
    assert set(turns["choice"]) == {"ours", *table["choice"]}
    # what only decodes otherwise learns nothing
    learned = sum(not choice.decoding for choice in choices)
    assert len(list(tmp_path.iterdir())) == 1 + learned
    # nothing is trained twice; RADAR writes its curve once more
    curves = {file: file.stat().st_ino for file in tmp_path.rglob("curve.parquet")}
    _, again = ablate(system, trace, COSTS, tmp_path, choices, **options)
    assert again["cycles"].tolist() == turns["cycles"].tolist()
    assert {file: file.stat().st_ino for file in curves} == curves


def test_one_of_two_policies_decodes_otherwise():
    depth = ltd.OURS.depth.policy().fill_at_random((4,))
    size = ltd.OURS.size.policy().fill_at_random((4,))
    both = ablation.redecoded(ltd.combine(depth, size), {"depth.stride": 3})
    settings = [policy.settings() for policy in both.policies]
    assert settings == [depth.settings() | {"stride": 3}, size.settings()]
