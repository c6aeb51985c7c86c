"""kill -9 at random moments: what is run again equals what was never interrupted."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import crashing
import pytest

from specdec import machine

# A server imports once and forks a process for each job, whose usual time has no imports in it.
SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def server():
    paths = [Path(__file__).parent, machine.checkout() / "notebooks", machine.checkout()]
    with pytest.MonkeyPatch.context() as patch:
        existing = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([*map(str, paths), existing]))
        SERVER.set_forkserver_preload(["crashing"])
        process = SERVER.Process(target=time.sleep, args=(0,))
        process.start()
        process.join()


def start(job: str, home: Path):
    """A new process that does the job, and the file of its results."""
    home.mkdir(parents=True, exist_ok=True)
    output = home / f"{job}-{time.monotonic_ns()}.json"
    process = SERVER.Process(target=crashing.do, args=(job, home, output))
    process.start()
    return process, output


def result(process, output: Path) -> list:
    process.join()
    assert process.exitcode == 0, output.name
    return json.loads(output.read_text())


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("job", crashing.JOBS)
def test_kills(tmp_path, job, kills):
    begin = time.monotonic()
    expected = result(*start(job, tmp_path / "whole"))
    usual_s = time.monotonic() - begin
    draw = random.Random(kills)
    for kill in range(kills):
        # a finished run cannot be killed any more: ten moments in each
        home = tmp_path / f"killed {kill // 10}"
        process, _ = start(job, home)
        time.sleep(draw.uniform(0, usual_s))
        process.kill()
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 0)
    assert result(*start(job, home)) == expected
