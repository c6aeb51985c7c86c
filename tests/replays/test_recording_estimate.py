"""What a recording is said to take against what it takes, and the command that makes one."""

import numpy as np
import pytest
from fakes.pairs import shared_pair

from specdec import runs
from specdec.errors import SpecdecError
from specdec.replays import trace
from specdec.replays.record import record
from specdec.tools import cli, estimate

SETTINGS = dict(max_new_tokens=24, depth=3, top_ks=(2,), trees=(3,), most_nodes=20)
pytestmark = pytest.mark.usefixtures("home")


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
    recording = record(pair, prompts, progress=False, **settings)
    assert (needed.prompts, needed.turns, needed.positions) == (8, 8, len(recording))
    assert needed.most_positions == 8 * 23 >= len(recording)
    parts = runs.find("record")[0].directory.rglob("part-*.parquet")
    written = sum(path.stat().st_size for path in parts) / 1e6
    assert 0.5 * written < needed.megabytes < 1.5 * written
    assert needed.fits and needed.minutes > 0


def test_a_recording_that_does_not_fit_is_said(monkeypatch):
    for settings, message in (
        (dict(max_new_token=8), "unknown setting 'max_new_token'; did you mean"),
        (dict(top_ks=(0,)), "top_k must be an integer"),
        (SETTINGS | {"max_new_tokens": 900}, "context"),
    ):
        with pytest.raises(SpecdecError, match=message):
            estimate.estimate_record(shared_pair(), prompts_of(1), **settings)
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    needed = estimate.estimate_record(shared_pair(), prompts_of(2), samples=1, **SETTINGS)
    assert not needed.fits and "only 0 MB are free" in needed.sentence


COMMAND = (
    "record --pair tiny --dtype float32 --suites toy/gsm8k --limit 3 --max-new-tokens 12 --depth 2"
).split()


def test_record_from_the_command_line(capsys, home):
    assert cli.main([*COMMAND, "--trees", "3", "--estimate"]) == 0
    streams = capsys.readouterr()
    assert streams.err.startswith("recording 3 prompts") and not streams.out
    assert not list(home.rglob("trace.json"))
    assert (
        cli.main([*COMMAND, "--trees", "3", "--most-nodes", "10", "--family", "3", "2", "1"]) == 0
    )
    folder = capsys.readouterr().out.strip()
    recording = trace.open_trace(folder, "tiny")
    pytest.raises(SpecdecError, trace.open_trace, folder, "small").match("record that pair")
    assert (recording.header["trees"], recording.depth, recording.most_nodes) == (
        [3],
        2,
        10,
    ) and len(recording) > 0
    assert recording.depth_of(3, (2, 1)) == 2 and recording.depth_of(3, (3, 1)) == 0
    assert cli.main([*COMMAND, "--trees", "0"]) == 2
    assert "top_k must be an integer of at least 1" in capsys.readouterr().err
