"""The ablation: what configs say about choices, what a change is worth by hand, and small trainings
of all three systems.
"""

import json
import math
import warnings
from pathlib import Path

import pandas as pd
import pytest
from fakes.traces import COSTS, SMALL_LTD, SMALL_RESPS, synthetic_trace

from specdec import runs
from specdec.errors import SpecdecError
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed

from experiments import ablation
from experiments.ablation import CHOICES, PRESETS, Choice, ablate, effects, stated

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


def test_what_a_change_is_worth_by_hand():
    late, other = (
        Choice({"action_lag": True}, decoding=True),
        Choice({"interval": 30}, decoding=True),
    )
    times = {("a", "ours"): 5.0, ("b", "ours"): 15.0, ("a", late.name): 5.0, ("b", late.name): 20.0}
    times |= {("a", other.name): 2.5, ("b", other.name): 7.5}
    rows = [
        (*key, turn, seed, ms * (1 + seed))
        for key, ms in times.items()
        for turn in range(2)
        for seed in range(2)
    ]
    turns = pd.DataFrame(rows, columns=["prompt", "choice", "turn", "seed", "time_ms"]).assign(
        suite="s"
    )
    table = effects("resps", turns, (late, other))
    columns = [
        "choice",
        "field",
        "paper",
        "official",
        "ours",
        "changed_to",
        "seeds",
        "over_ours",
        "low",
        "high",
    ]
    assert list(table) == columns and table["over_ours"][0] == pytest.approx(40 / 50)
    # Without one prompt it is 30/40, without the other 10/10: the jackknife's error of the
    # logarithm is half of their distance.
    reach = 12.7062 * math.log(4 / 3) / 2  # Student's t with one degree of freedom
    ends = [0.8 * math.exp(-reach), 0.8 * math.exp(reach)]
    assert table.loc[0, ["low", "high"]].tolist() == pytest.approx(ends, rel=1e-5)
    assert table.loc[0, columns[2:6]].tolist() == ["False", "True", "False", "True"]
    said = [str(value) for value in stated("resps", other).values()]
    assert table.iloc[1].tolist() == [
        other.name,
        "interval",
        *said,
        "30",
        2,
        *[pytest.approx(2.0)] * 3,
    ]


SOME = {
    "resps": ("push_partial=False", "state=concat", "ppo.n_steps=64", "action_lag=True, decoding"),
    "ltd": (
        "random_depth=False",
        "size.exponentiated=False",
        "depth.ppo.gamma=0.999",
        "depth.stride=3, decoding",
    ),
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
    assert (
        len(list(tmp_path.iterdir())) == 1 + learned
    )  # what only decodes otherwise learns nothing
    curve = "loss.parquet" if system == "radar" else "curve.parquet"
    written = {file: file.stat().st_ino for file in tmp_path.rglob(curve)}
    _, again = ablate(system, trace, COSTS, tmp_path, **options)
    assert again["cycles"].tolist() == turns["cycles"].tolist()
    if system != "radar":  # which writes its curve once more
        assert {file: file.stat().st_ino for file in written} == written  # nothing is trained twice


def test_one_of_two_policies_decodes_otherwise_and_an_unknown_system_is_refused(tmp_path):
    depth = ltd.OURS.depth.policy().fill_at_random((4,))
    size = ltd.OURS.size.policy().fill_at_random((4,))
    both = ablation.redecoded(ltd.combine(depth, size), {"depth.stride": 3})
    assert [policy.settings() for policy in both.policies] == [
        depth.settings() | {"stride": 3},
        size.settings(),
    ]
    both = ablation.redecoded(
        ltd.combine(depth, size), {"depth.stride": 2, "size.temperature": 0.5}
    )
    assert both.policies[0].stride == 2 and both.policies[1].temperature == 0.5
    pytest.raises(SpecdecError, ablate, "respz", TRACE, COSTS, tmp_path).match("resps")
    assert PRESETS == ("paper", "official", "ours")


def test_the_choices_by_name_and_what_changes_with_them():
    recorded = json.loads(Path(__file__).with_name("choices.json").read_text())
    beside_the_configs = ("reward", "gradient", "size.sizes")
    for system, many in CHOICES.items():
        for choice in many:
            said = stated(system, choice)
            assert said["ours"] != choice.value, "ours is changed to something else"
            assert choice.field in beside_the_configs or choice.value in said.values()
        assert [[choice.name, runs.plain(choice.changes)] for choice in many] == recorded[system]
    every = [choice for many in CHOICES.values() for choice in many]
    assert len({choice.name for choice in every}) == len(every)
    assert all(choice.decoding == choice.name.endswith(", decoding") for choice in every)
    sizes = next(choice for choice in every if choice.field == "size.sizes")
    assert sizes.value == ltd.PAPER_SIZES and len(sizes.value) > 6
    assert Choice({"a": (1, 2, 3, 4, 5, 6)}).name == "a=1, 2, 3, 4, 5, 6"
    assert Choice({"a": tuple(range(7))}).name == "a=7 values, 0 to 6"
    for system, own in (("resps", resps), ("ltd", ltd), ("radar", radar)):
        (first, *_) = CHOICES[system]
        said = {
            name: getattr(config, first.field)
            for name, config in own.CONFIGS.items()
            if name in PRESETS
        }
        assert stated(system, first) == said
