"""Pairs of one's own by name: what a folder stands for, and where commands and notebooks meet."""

import shutil
from pathlib import Path

import pytest
from fakes.pairs import shared_pair
from fakes.traces import round_costs

import specdec
from specdec import runs
from specdec.core.pair import dtype_name
from specdec.errors import SpecdecError
from specdec.models import load, pairs
from specdec.replays.record import record
from specdec.replays.static_trees import best_static
from specdec.tools import places

TREE = specdec.Static(4, 1, 3)


@pytest.fixture
def own(home, monkeypatch):
    """A user in a folder with a pair of theirs, `mine`."""
    monkeypatch.setattr(pairs, "_PAIRS", {})
    monkeypatch.setattr(pairs, "_PLACES", {})
    monkeypatch.chdir(home)
    for part in ("target", "drafter"):
        shutil.copytree(load.shipped_folder("tiny") / part, home / "mine" / part)
    return home / "mine"


def test_a_folder_stands_for_its_pair(own, monkeypatch):
    assert pairs.named("mine") == pairs.named(str(own)) == pairs.named("mine/target") == "mine"
    assert pairs.typed("mine") == str(own)
    assert pairs.typed("small") == "small"
    shutil.move(own, own.parent / "small-one")
    monkeypatch.chdir("/")
    assert pairs.named("small-one") == "small-one", "below the home of results"
    assert pairs.named("HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-hub"
    assert pairs.named("a/b") == "b"


def test_a_folders_pair_is_loaded_and_loaded_again(own):
    text = [3, 4, 5]
    pair = load.load_pair("mine", dtype="float32")
    tokens = specdec.decode(pair, text, specdec.Static(8, 3, 2), max_new_tokens=8).tokens
    assert pair.name == "mine"
    assert tokens == specdec.autoregress(load.load_pair("tiny"), text, max_new_tokens=8).tokens
    assert load.load_pair(target="mine").drafter is None
    assert load.at_hand("mine")
    source = load.source_of(pair)
    # another machine
    pairs._PAIRS.clear()
    assert load.load_again(**source).name == "mine"
    assert load.load_pair("mine", drafter="hybrid").drafter is not None, "its own weights"


def test_what_is_refused(own):
    pairs.named("mine")
    (own.parent / "other" / "mine").mkdir(parents=True)
    for call, words in [
        (lambda: load.load_pair("mien"), "'mine'"),
        (lambda: pairs.named("no/such/place"), "no folder"),
        (lambda: pairs.named("other/mine"), "rename"),
        (lambda: load.load_pair("mine", drafter="medusa"), "has weights"),
        (lambda: load.load_pair("mine", drafter="griffn"), "neither a folder"),
    ]:
        pytest.raises(SpecdecError, call).match(words)


def test_commands_and_notebooks_meet(own, monkeypatch):
    options = {"max_new_tokens": 6, "depth": 3, "top_ks": (2, 3), "trees": (3,)}
    trace = record(shared_pair(), [[3, 4, 5]], **options, features=False, progress=False)
    folder = next(run.directory for run in runs.find("record"))
    written = places.leave_recording(folder, trace)
    assert written == runs.recorded("random") / "recording.json"
    dtype = dtype_name(shared_pair().target.dtype)
    round_costs(pair="random").save(places.costs_file("random", dtype))
    monkeypatch.chdir("/")
    relative = runs.read_json(written)["folder"]
    key = trace.header["key"]
    notebooks_run = runs.runs_dir() / "noted"
    runs.write_json(notebooks_run / "recording.json", {"key": key, "pair": "random"})
    places_of_it = [relative, written, written.parent, "runs/laptop/recorded/random", notebooks_run]
    for place in places_of_it:
        assert specdec.open_trace(place).header["key"] == key
    assert places.trace(None, "random").header["key"] == key
    shown = specdec.explore(relative, {"tree": TREE}, pair=shared_pair())
    assert shown.message == ""
    assert shown.recordings["random"].costs.name == "round numbers"
    assert "no pair is known as 'random'" in specdec.explore(relative).message
    assert Path(relative).parts[:2] == ("runs", "laptop")


def test_a_tree_that_was_tuned_here_is_the_default(home, monkeypatch):
    tiny = load.load_pair("tiny", dtype="float32")
    recording = record(tiny, {"mine": ["Hello."]}, max_new_tokens=8, progress=False)
    monkeypatch.setattr(places, "trace", lambda folder, pair: recording)
    assert places.keep_tree("tiny", "float32") is None, "there are no prices"
    monkeypatch.setattr(places, "costs", lambda text, pair, dtype: round_costs())
    tree = places.keep_tree("tiny", "float32")
    assert tree == best_static(recording, round_costs())
    assert load.load_pair("tiny", dtype="float32").usual_tree == tree
    assert load.load_pair("small", dtype="float32").usual_tree == specdec.TreeConfig(6, 2, 3)
