"""kill -9 at random moments until a job ends by itself: it equals what was never interrupted, and nothing is lost."""

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

# A server imports once what takes seconds and forks a process for each job, whose usual time has no imports in it.
SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def server():
    paths = [Path(__file__).parent, machine.checkout() / "notebooks", machine.checkout()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
        )
        SERVER.set_forkserver_preload(["crashing"])
        started(time.sleep, 0).join()


def started(work, *arguments):
    process = SERVER.Process(target=work, args=arguments)
    process.start()
    return process


def start(job: str, home: Path):
    """A new process that does the job, and where it says what it found."""
    home.mkdir(parents=True, exist_ok=True)
    output = home / f"{job}-{time.monotonic_ns()}.json"
    return started(crashing.do, job, home, output), output


def found(process, output: Path) -> list:
    process.join()
    assert process.exitcode == 0, output.name
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("parts", "kills"), [(1, 2), pytest.param(5, 10, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("job", crashing.JOBS)
def test_two_and_fifty_kills(tmp_path, job, parts, kills):
    for part in range(
        parts
    ):  # a run that has ended cannot be killed any more: ten moments in each of five
        begin, whole, home = (
            time.monotonic(),
            tmp_path / f"whole {part}",
            tmp_path / f"killed {part}",
        )
        expected = found(*start(job, whole))
        usual_s, draw, ends = time.monotonic() - begin, random.Random(kills), []
        for _ in range(kills):
            process, _ = start(job, home)
            time.sleep(draw.uniform(0, usual_s))
            process.kill()
            process.join()
            ends.append(process.exitcode)
        assert set(ends) <= {-signal.SIGKILL, 0}, (
            ends
        )  # one that had ended already cannot be killed
        assert found(*start(job, home)) == expected
        assert not [
            path for path in home.rglob(".*.tmp") if path.stat().st_mtime < time.time() - 3600
        ]


@pytest.mark.nightly
def test_three_processes_in_one_run_lose_no_row(tmp_path):
    expected = found(*start("evaluated", tmp_path / "one"))
    processes = [start("evaluated", tmp_path / "three") for _ in range(3)]
    assert [found(*one) for one in processes] == [expected] * 3
