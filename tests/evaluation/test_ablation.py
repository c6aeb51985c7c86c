"""Quirks: what presets say about them, what a change is worth by hand, and small trainings of all three systems."""

import warnings

import pandas as pd
import pytest
from fakes.traces import COSTS, GRID, SMALL, TREE, synthetic_trace

from specdec.errors import SpecdecError
from specdec.evaluation import ablation
from specdec.evaluation.ablation import QUIRKS, Quirk, effects, measure_quirks, stated
from specdec.policies import ltd

TRACE = synthetic_trace(turns=8, positions=40)
DEEP = synthetic_trace(turns=8, positions=30, depth=7, top_ks=(10,), most_nodes=60, features=4)
OPTIONS = {
    "resps": dict(changes={**GRID, "per_layer": False}, ppo=SMALL, total_steps=64, select=False),
    "ltd": dict(
        rounds=ltd.ROUNDS[:2],
        changes={"depth": dict(total_tokens=8, **TREE), "size": dict(sizes=(1, 4, 8, 20), drafted=4, best=20, **TREE)},
        ppo={"depth": SMALL, "size": SMALL},
        total_steps={"depth": 64, "size": 64},
        select=False,
    ),
    "radar": dict(epochs=1),
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this .* (gave the answer|stops after)")
        yield


@pytest.mark.parametrize("system, quirk", [(name, one) for name, many in QUIRKS.items() for one in many])
def test_a_quirk_changes_ours_to_something_else(system, quirk):
    said = stated(system, quirk)
    assert quirk.setting == "temperature" or None not in said.values()
    assert said["ours"] != quirk.value
    named = "Table" in quirk.name or quirk.setting in ("reward", "gradient", "sizes")  # variants beside the presets
    assert named or quirk.value in said.values()


def test_what_a_change_is_worth_by_hand():
    rows = [("a", "ours", 10.0), ("b", "ours", 30.0), ("a", "late", 10.0), ("b", "late", 40.0)]
    turns = pd.DataFrame(rows, columns=["prompt", "quirk", "time_ms"]).assign(suite="s", seed=0)
    turns = pd.concat([turns, turns.assign(seed=1, time_ms=turns["time_ms"] * 2)])
    found = effects("resps", turns, (Quirk("late", "decoding", "action_lag", True),)).iloc[0]
    assert found["over_ours"] == pytest.approx(40 / 50)
    assert found["low"] == pytest.approx(0.75) and found["high"] == pytest.approx(1.0)
    assert (found["paper"], found["official"], found["ours"], found["changed_to"]) == ("False", "True", "False", "True")


@pytest.mark.parametrize("system", ["resps", "ltd", "radar"])
def test_measuring(system, tmp_path, monkeypatch):
    trace = DEEP if system == "radar" else TRACE
    kinds = {one.where: one for one in QUIRKS[system] if one.setting != "stride" or one.where == "decoding"}
    chosen = tuple(kinds.values())
    options = dict(seeds=(0,), options=OPTIONS[system], quirks=chosen, progress=False)
    table, turns = measure_quirks(system, trace, COSTS, tmp_path, **options)
    assert list(table["choice"]) == [one.name for one in chosen]
    assert table["over_ours"].between(0.2, 5).all()
    assert set(turns["quirk"]) == {"ours", *table["choice"]}
    learned = sum(one.where != "decoding" for one in chosen)
    assert len(list(tmp_path.iterdir())) == 1 + learned  # what only decodes otherwise learns nothing
    places = {
        file: file.stat().st_ino for file in tmp_path.rglob("loss.parquet" if system == "radar" else "curve.parquet")
    }
    _, again = measure_quirks(system, trace, COSTS, tmp_path, **options)
    assert again["cycles"].tolist() == turns["cycles"].tolist()
    if system != "radar":  # which writes its curve once more
        assert {file: file.stat().st_ino for file in places} == places  # nothing is trained twice


def test_an_unknown_system_is_refused(tmp_path):
    with pytest.raises(SpecdecError, match="resps"):
        measure_quirks("respz", TRACE, COSTS, tmp_path)
    assert ablation.PRESETS == ("paper", "official", "ours")
