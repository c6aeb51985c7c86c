"""What a recording is said to take against what it takes, and every refusal that a recording owes
its reader.
"""

import functools

import numpy as np
import pytest
from fakes.pairs import shared_bigrams, shared_pair

import specdec
from specdec import runs
from specdec.costs import calibrate
from specdec.errors import SpecdecError
from specdec.replays import trace
from specdec.replays.record import record
from specdec.tools import cli, estimate

SETTINGS = dict(max_new_tokens=24, depth=3, top_ks=(2,), trees=(3,), most_nodes=20)


@pytest.fixture(autouse=True)
def somewhere_else(home):
    return home


def prompts_of(count):
    random = np.random.default_rng(0)
    return [random.integers(0, 24, size).tolist() for size in random.integers(4, 30, count)]


@pytest.mark.parametrize("features", [True, False])
def test_the_estimate_is_what_is_written(features, home):
    settings = SETTINGS | {"features": features, "family": (3, 3, 2) if features else ()}
    pair = shared_pair()
    prompts = prompts_of(8)
    needed = estimate.estimate_record(pair, prompts, samples=8, **settings)
    assert not list(home.rglob("*.parquet")), "an estimate writes nothing"
    found = record(pair, prompts, progress=False, **settings)
    assert (needed.prompts, needed.turns, needed.positions) == (8, 8, len(found))
    written = (
        sum(
            path.stat().st_size for path in runs.find("record")[0].directory.rglob("part-*.parquet")
        )
        / 1e6
    )
    assert 0.5 * written < needed.megabytes < 1.5 * written, (needed.megabytes, written)
    assert needed.fits
    assert needed.minutes > 0
    assert needed.sentence.startswith("recording 8 prompts (8 turns) of random")


def test_more_prompts_take_more_bad_settings_are_those_of_record_and_no_room_is_said(monkeypatch):
    settings = SETTINGS | dict(features=False, samples=3)
    few, many = (
        estimate.estimate_record(shared_bigrams(), prompts_of(count), **settings)
        for count in (4, 40)
    )
    assert many.turns == 10 * few.turns
    assert many.megabytes > 4 * few.megabytes
    for settings, message in (
        (dict(max_new_token=8), "unknown setting 'max_new_token'; did you mean"),
        (dict(top_ks=(0,)), "top_k must be an integer"),
        (SETTINGS | {"max_new_tokens": 900}, "the target's context"),
        (dict(samples=0), "samples must be an integer"),
    ):
        pytest.raises(
            SpecdecError, estimate.estimate_record, shared_pair(), prompts_of(1), **settings
        ).match(message)
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    needed = estimate.estimate_record(shared_pair(), prompts_of(2), samples=1, **SETTINGS)
    assert not needed.fits and "only 0 MB are free: record fewer" in needed.sentence


def test_another_unfinished_or_damaged_recording_is_refused():
    record(shared_pair(), prompts_of(1), progress=False, **SETTINGS)
    folder = runs.find("record")[0].directory

    def refused(message, *pair):
        pytest.raises(SpecdecError, lambda: trace.open_trace(folder, *pair).ranks[3]).match(message)

    refused("recorded with the pair 'random', not 'small'; record that pair", "small")
    piece = next((folder / "positions").glob("part-*.parquet"))
    piece.write_bytes(piece.read_bytes()[:100])
    refused("has changed since it was written.*record again")
    header = runs.read_json(folder / "trace.json")
    runs.write_json(folder / "trace.json", {**header, "schema": trace.SCHEMA + 1})
    refused(rf"written with schema {trace.SCHEMA + 1}, this is {trace.SCHEMA}; record again")
    (folder / "trace.json").unlink()
    refused("trace.json")


COMMAND = (
    "record --pair tiny --dtype float32 --suites toy/gsm8k --limit 3 --max-new-tokens 12 --depth 2"
).split()


def test_record_from_the_command_line(capsys, home):
    assert cli.main([*COMMAND, "--trees", "3", "--estimate"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("recording 3 prompts (3 turns) of tiny") and not said.out
    assert not list(home.rglob("trace.json"))
    assert (
        cli.main([*COMMAND, "--trees", "3", "--most-nodes", "10", "--family", "3", "2", "1"]) == 0
    )
    folder = capsys.readouterr().out.strip()
    found = trace.open_trace(folder, "tiny")
    assert (found.header["trees"], found.depth, found.most_nodes) == ([3], 2, 10) and len(found) > 0
    assert found.depth_of(3, (2, 1)) == 2 and found.depth_of(3, (3, 1)) == 0
    assert cli.main([*COMMAND, "--trees", "0"]) == 2
    assert "top_k must be an integer of at least 1" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*(of a core|more than 10 %)")
def test_calibrate_from_the_command_line(capsys, tmp_path, monkeypatch):
    few = dict(top_ks=(1, 2), nodes=(0, 2, 4), depth=3, contexts=(10, 60), progress=False)
    monkeypatch.setattr(calibrate, "calibrate", functools.partial(calibrate.calibrate, **few))
    out = tmp_path / "costs.json"
    arguments = ["calibrate", "--pair", "tiny", "--dtype", "float32", "--seconds"]
    assert cli.main([*arguments, "0.5", "--cpu-time", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip().endswith(str(out))
    assert specdec.CostModel.load(out).pair == "tiny"
    assert cli.main([*arguments, "0", "--out", str(out)]) == 2
    assert "seconds must be above 0" in capsys.readouterr().err
