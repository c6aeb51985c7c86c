"""Pairs of one's own by name: what is registered, what a folder stands for, where commands and notebooks meet."""

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
from specdec.tools import cli, places

SMALL = load.shipped_folder("small")


@pytest.fixture
def own(home, monkeypatch):
    """A user who has registered nothing, in a folder with a pair of theirs, `mine`."""
    monkeypatch.setenv("SPECDEC_CONFIG", str(home / "config"))
    monkeypatch.setattr(pairs, "_GIVEN", {})
    monkeypatch.setattr(pairs, "_PLACES", {})
    monkeypatch.chdir(home)
    for part in ("target", "drafter"):
        shutil.copytree(load.shipped_folder("tiny") / part, home / "mine" / part)
    return home / "mine"


def test_what_is_registered(own, monkeypatch):
    for given, target, drafter in [
        ({"target": "mine"}, "mine/target", "mine/drafter"),
        ({"target": "mine/target", "drafter": "mine"}, "mine/target", "mine/drafter"),
        ({"target": "mine", "kind": "suffix"}, "mine/target", "suffix"),
        ({"target": "mine", "drafter": "hybrid:mine"}, "mine/target", "hybrid:mine/drafter"),
        (
            {"target": "mine", "drafter": "mine", "kind": "hybrid"},
            "mine/target",
            "hybrid:mine/drafter",
        ),
        ({"target": "small"}, "small", str(SMALL / "drafter")),
        ({"target": "small", "drafter": "suffix"}, "small", "suffix"),
        ({"target": "some/model"}, "some/model", ""),
    ]:
        if "/model" in target:
            monkeypatch.setattr(load, "target_config", lambda place: None)  # no network here
        load.register("model-1", **given)
        kept, home = pairs.registered()["model-1"], own.parent
        assert kept.target == (str(home / target) if "mine" in target else target)
        assert kept.drafter == drafter.replace("mine", f"{home}/mine")


def test_a_registered_name_is_a_name_everywhere(own, capsys):
    assert cli.main(["register", "model-1", "--target", "mine"]) == 0 and cli.main(["pairs"]) == 0
    assert f"{own}/drafter" in capsys.readouterr().out.split("| model-1")[1]
    pair, text = load.load_pair("model-1", dtype="float32"), [3, 4, 5]
    tokens = specdec.decode(pair, text, specdec.Static(8, 3, 2), max_new_tokens=8).tokens
    assert pair.name == "model-1"
    assert tokens == specdec.autoregress(load.load_pair("tiny"), text, max_new_tokens=8).tokens
    assert load.load_pair(target="model-1").drafter is None and load.at_hand("model-1")
    source = load.source_of(pair)
    pairs.registry().unlink()  # another machine
    assert load.load_again(**source).name == "model-1"
    assert load.load_pair("mine", drafter="hybrid").drafter is not None, (
        "its own weights, drafted with otherwise"
    )
    assert cli.main(["estimate", "--pair", "mine", "--limit", "1"]) == 0
    assert cli.main(["export", "sglang", "--pair", "mine", "--tree", "8,3,2", "--out", "out"]) == 0


def test_a_folder_stands_for_its_pair(own, monkeypatch):
    assert pairs.named("mine") == pairs.named(str(own)) == pairs.named("mine/target") == "mine"
    assert pairs.typed("mine") == str(own) and pairs.typed("small") == "small"
    load.register("model-1", target="mine")
    assert pairs.named(str(own)) == "model-1", (
        "the name that was given goes before that of the folder"
    )
    shutil.move(own, own.parent / "small-one")
    monkeypatch.chdir("/")
    assert pairs.named("small-one") == "small-one", "below the home of results"
    assert (
        pairs.named("HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-hub"
        and pairs.named("a/b") == "b"
    )


def test_what_is_refused(own):
    load.register("mine", "mine")
    (own.parent / "other" / "mine").mkdir(parents=True)
    for call, sentence in [
        (lambda: load.load_pair("mien"), "unknown preset 'mien'; did you mean 'mine'"),
        (lambda: pairs.named("no/such/place"), "there is no folder no/such/place"),
        (
            lambda: pairs.named("other/mine"),
            "would be called 'mine', as another one is; .*register",
        ),
        (
            lambda: load.load_pair("mine", drafter="medusa"),
            "kind 'medusa' has weights: name their folder",
        ),
        (lambda: load.register("tiny", "mine"), "the name is taken"),
        (lambda: load.register("a b", "mine"), "letters, digits"),
        (lambda: load.register("a"), "needs a target"),
        (lambda: load.register("a", "mien"), "unknown preset 'mien'"),
        (lambda: load.register("a", "mine/drafter/none"), "there is no folder"),
        (lambda: load.register("a", "mine", kind="griffn"), "unknown kind of drafter 'griffn'"),
        (
            lambda: load.register("a", "mine", "suffix:mine/drafter/x/y"),
            "neither a folder nor a hub id",
        ),
        (lambda: load.register("a", "other"), "no config.json|cannot be read"),
    ]:
        pytest.raises(SpecdecError, call).match(sentence)
        assert list(pairs.registered()) == ["mine"]


def test_commands_and_notebooks_meet(own, monkeypatch, capsys):
    options = dict(
        max_new_tokens=6, depth=3, top_ks=(2, 3), trees=(3,), features=False, progress=False
    )
    trace = record(shared_pair(), [[3, 4, 5]], **options)
    folder = next(run.directory for run in runs.find("record"))
    written = places.leave_recording(folder, trace)
    assert written == runs.recorded("random") / "recording.json"
    dtype = dtype_name(shared_pair().target.dtype)
    round_costs(pair="random").save(places.costs_file("random", dtype))
    monkeypatch.chdir("/")
    relative = runs.read_json(written)["folder"]
    key = trace.header["key"]
    runs.write_json(
        runs.runs_dir() / "noted" / "recording.json", {"key": key, "pair": "random"}
    )  # a notebook's run
    for named in (
        relative,
        written,
        written.parent,
        "runs/laptop/recorded/random",
        runs.runs_dir() / "noted",
    ):
        assert specdec.open_trace(named).header["key"] == key
    assert places.trace(None, "random").header["key"] == key
    shown = specdec.explore(relative, {"tree": specdec.Static(4, 1, 3)}, pair=shared_pair())
    assert shown.message == "" and shown.recordings["random"].costs.name == "round numbers"
    prices = str(places.costs_file("random", dtype).relative_to(runs.home()))
    assert specdec.explore(
        relative, {"tree": specdec.Static(4, 1, 3)}, pair=shared_pair(), costs=prices
    ).recordings
    assert "no pair is known as 'random'" in specdec.explore(relative).message
    assert runs.recorded("tiny+suffix") == runs.recorded("tiny") / "suffix", "as notebook 21 has it"
    assert Path(relative).parts[:2] == ("runs", "laptop")


def test_a_tree_that_was_tuned_here_is_the_default(home, monkeypatch):
    tiny = load.load_pair("tiny", dtype="float32")
    recording = record(tiny, {"mine": ["Hello."]}, max_new_tokens=8, progress=False)
    monkeypatch.setattr(places, "trace", lambda folder, pair: recording)
    assert places.keep_tree("tiny", "float32") is None  # there are no prices
    monkeypatch.setattr(places, "costs", lambda text, pair, dtype: round_costs())
    tree = places.keep_tree("tiny", "float32")
    assert (
        load.load_pair("tiny", dtype="float32").usual_tree
        == tree
        == best_static(recording, round_costs())
    )
    assert (
        load.load_pair("small", dtype="float32").usual_tree == specdec.TreeConfig(6, 2, 3) != tree
    )
