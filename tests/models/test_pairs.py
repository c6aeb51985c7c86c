"""Where commands and notebooks meet: recordings, costs and tuned trees of a pair."""

from fakes.pairs import shared_pair
from fakes.traces import round_costs

import specdec
from specdec import runs
from specdec.core.pair import dtype_name
from specdec.models import load
from specdec.replays.record import record
from specdec.replays.static_trees import best_static
from specdec.tools import cli


def test_commands_and_notebooks_meet(home, monkeypatch):
    options = {"max_new_tokens": 6, "depth": 3, "top_ks": (2, 3), "trees": (3,)}
    trace = record(shared_pair(), [[3, 4, 5]], **options, features=False, progress=False)
    folder = next(run.directory for run in runs.find("record"))
    written = cli.leave_recording(folder, trace)
    dtype = dtype_name(shared_pair().target.dtype)
    round_costs(pair="random").save(cli.costs_file("random", dtype))
    monkeypatch.chdir("/")
    relative = runs.read_json(written)["folder"]
    for place in (relative, written, written.parent, "runs/laptop/recorded/random"):
        assert specdec.open_trace(place).header["key"] == trace.header["key"]
    assert cli.find_recording(None, "random").header["key"] == trace.header["key"]
    assert cli.find_costs(None, "random", dtype).name == "round numbers"


def test_a_tree_that_was_tuned_here_is_the_default(home, monkeypatch):
    tiny = load.load_pair("tiny", dtype="float32")
    recording = record(tiny, {"mine": ["Hello."]}, max_new_tokens=8, progress=False)
    monkeypatch.setattr(cli, "find_recording", lambda folder, pair: recording)
    assert cli.keep_tree("tiny", "float32") is None, "there are no prices"
    monkeypatch.setattr(cli, "find_costs", lambda text, pair, dtype: round_costs())
    tree = cli.keep_tree("tiny", "float32")
    assert tree == best_static(recording, round_costs())
    assert load.load_pair("tiny", dtype="float32").usual_tree == tree
    assert load.load_pair("small", dtype="float32").usual_tree == specdec.TreeConfig(6, 2, 3)
