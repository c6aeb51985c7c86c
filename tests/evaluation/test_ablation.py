"""The ablation: what configs say about choices, what a change is worth by hand, and small trainings of all three systems."""

import math
import warnings

import pandas as pd
import pytest
from fakes.traces import COSTS, SMALL_LTD, SMALL_RESPS, synthetic_trace

from specdec.errors import SpecdecError
from specdec.evaluation.ablation import CHOICES, PRESETS, Choice, ablate, effects, stated
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed

TRACE = synthetic_trace(turns=8, positions=40)
DEEP = synthetic_trace(turns=8, positions=30, depth=7, top_ks=(10,), most_nodes=60, features=4)
BASE = {
    "resps": changed(resps.OURS, SMALL_RESPS),
    "ltd": changed(ltd.OURS, SMALL_LTD | {"rounds": ltd.ROUNDS[:2]}),
    "radar": changed(radar.OURS, {"epochs": 1}),
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this .* (gave the answer|stops after)")
        yield


@pytest.mark.parametrize("system, choice", [(name, choice) for name, many in CHOICES.items() for choice in many])
def test_a_choice_changes_ours_to_something_else(system, choice):
    said = stated(system, choice)
    assert said["ours"] != choice.value
    beside_the_configs = ("reward", "gradient", "size.sizes")
    assert choice.field in beside_the_configs or choice.value in said.values()


def test_every_choice_has_a_name_of_its_own():
    for choices in CHOICES.values():
        assert len({choice.name for choice in choices}) == len(choices)


def test_what_a_change_is_worth_by_hand():
    late = Choice({"action_lag": True}, decoding=True)
    rows = [("a", "ours", 10.0), ("b", "ours", 30.0), ("a", late.name, 10.0), ("b", late.name, 40.0)]
    turns = pd.DataFrame(rows, columns=["prompt", "choice", "time_ms"]).assign(suite="s", seed=0)
    turns = pd.concat([turns, turns.assign(seed=1, time_ms=turns["time_ms"] * 2)])
    row = effects("resps", turns, (late,)).iloc[0]
    assert row["over_ours"] == pytest.approx(40 / 50)
    # Without one prompt it is 30/40, without the other 10/10: the jackknife's error of the logarithm is half of their distance.
    reach = 12.7062 * math.log(4 / 3) / 2  # Student's t with one degree of freedom
    assert [row["low"], row["high"]] == pytest.approx([0.8 * math.exp(-reach), 0.8 * math.exp(reach)], rel=1e-5)
    assert (row["paper"], row["official"], row["ours"], row["changed_to"]) == ("False", "True", "False", "True")


SOME = {
    "resps": ("push_partial=False", "state=concat", "ppo.n_steps=64", "action_lag=True, decoding"),
    "ltd": ("random_depth=False", "size.exponentiated=False", "depth.ppo.gamma=0.999", "depth.stride=3, decoding"),
    "radar": ("continue_bias=0.0", "half_inputs=True, decoding"),
}


@pytest.mark.parametrize("system", SOME)
def test_measuring(system, tmp_path):
    trace = DEEP if system == "radar" else TRACE
    choices = tuple(choice for choice in CHOICES[system] if choice.name in SOME[system])
    options = dict(base=BASE[system], seeds=(0,), choices=choices, progress=False)
    table, turns = ablate(system, trace, COSTS, tmp_path, **options)
    assert sorted(table["choice"]) == sorted(SOME[system])
    assert table["over_ours"].notna().all() and (table["over_ours"] > 0).all()
    assert set(turns["choice"]) == {"ours", *table["choice"]}
    learned = sum(not choice.decoding for choice in choices)
    assert len(list(tmp_path.iterdir())) == 1 + learned  # what only decodes otherwise learns nothing
    curve = "loss.parquet" if system == "radar" else "curve.parquet"
    written = {file: file.stat().st_ino for file in tmp_path.rglob(curve)}
    _, again = ablate(system, trace, COSTS, tmp_path, **options)
    assert again["cycles"].tolist() == turns["cycles"].tolist()
    if system != "radar":  # which writes its curve once more
        assert {file: file.stat().st_ino for file in written} == written  # nothing is trained twice


def test_an_unknown_system_is_refused(tmp_path):
    with pytest.raises(SpecdecError, match="resps"):
        ablate("respz", TRACE, COSTS, tmp_path)
    assert PRESETS == ("paper", "official", "ours")
