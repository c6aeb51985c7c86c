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
    parts = runs.find("record")[0].directory.rglob("part-*.parquet")
    written = sum(path.stat().st_size for path in parts) / 1e6
    assert 0.5 * written < needed.megabytes < 1.5 * written
    assert needed.minutes > 0
    with pytest.raises(SpecdecError, match="did you mean"):
        estimate.estimate_record(pair, prompts, max_new_token=8)


COMMAND = "record --pair tiny --dtype float32 --suites toy/gsm8k --limit 3".split()
COMMAND += "--max-new-tokens 12 --depth 2 --trees 3".split()


def test_record_from_the_command_line(capsys, home):
    assert cli.main([*COMMAND, "--estimate"]) == 0
    streams = capsys.readouterr()
    assert streams.err.startswith("recording 3 prompts") and not streams.out
    assert not list(home.rglob("trace.json"))
    assert cli.main([*COMMAND, *"--most-nodes 10 --family 3 2 1".split()]) == 0
    folder = capsys.readouterr().out.strip()
    recording = trace.open_trace(folder, "tiny")
    pytest.raises(SpecdecError, trace.open_trace, folder, "small").match("record that pair")
    assert recording.header["trees"] == [3] and len(recording) > 0
    assert (recording.depth, recording.most_nodes) == (2, 10)
    assert recording.depth_of(3, (2, 1)) == 2 and recording.depth_of(3, (3, 1)) == 0
