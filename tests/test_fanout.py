"""Shards on processes, Ray and SLURM's local jobs: every result once, what dies is tried again, what differs is refused."""

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import shards

from specdec import fanout, machine, runs
from specdec.errors import SpecdecError
from specdec.fanout import Failed, Shard, Workers

from experiments import categories

TESTS = str(Path(__file__).parent)


def needing(place: str, package: str):
    missing = importlib.util.find_spec(package) is None
    skip = pytest.mark.skipif(missing, reason=f"the package {package} is not installed")
    return pytest.param(place, marks=[skip, pytest.mark.nightly])


CLUSTERS = [needing("ray", "ray"), needing("slurm:local", "submitit")]  # they take long to start


@pytest.fixture(autouse=True)
def importable(monkeypatch, home):
    """Workers import the shards' functions from here."""
    paths = [str(machine.checkout()), TESTS, os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    fanout.own_code.cache_clear()


def of(call, numbers, *more):
    return [Shard(f"number {number}", call, (number, *more), {"number": number}) for number in numbers]


def run(work, place, jobs=None) -> list:
    return fanout.run_on(Workers(place, jobs), work, "x", progress=False)


def times_run(home) -> dict[int, int]:
    return {int(path.stem): len(path.read_text().split()) for path in home.glob("*.txt")}


def test_this_process_keeps_order_and_keys_follow_from_the_content():
    assert run(of(shards.doubled, range(3)), None) == [0, 2, 4]
    one, same, other = of(shards.doubled, (1, 1, 2))
    assert one.key({"code": "a"}) == same.key({"code": "a"}) != other.key({"code": "a"})
    assert one.key({"code": "a"}) != one.key({"code": "b"})
    assert Shard("x", shards.noted, (), one.of).key({}) != one.key({})


@pytest.mark.parametrize("place", ["local", *CLUSTERS])
def test_results_come_once_whatever_dies_and_what_fails_is_named(place, home):
    work = of(shards.killed, (3,), home, 2) + of(shards.noted, (0, 1, 2), home) + of(shards.refused, (5,))
    work += of(shards.broken, (6,))
    results = {}
    with Workers(place, 2) as workers, pytest.raises(SpecdecError) as error:
        for shard, result in workers.gather(work, "x", progress=False):
            assert shard.name not in results, "never twice"
            results[shard.name] = result
    assert results == {f"number {n}": n for n in range(4)}
    begin = "2 of the shards failed 3 times: number 5 (5 cannot be done; try another); number 6 ("
    assert str(error.value).startswith(f"{begin}ZeroDivisionError: division by zero); the others are kept")
    assert times_run(home) == {0: 1, 1: 1, 2: 1, 3: 3}
    assert os.getpid() not in {int(path.read_text().split()[0]) for path in home.glob("*.txt")}


def test_a_worker_takes_shard_after_shard_and_what_measures_time_runs_alone(home):
    run(of(shards.noted, range(5), home), "local", 1)
    assert len({path.read_text().split()[0] for path in home.glob("*.txt")}) == 1, "no process is started meanwhile"
    timed = [Shard(f"t{n}", shards.span, (home, n), timed=True) for n in range(2)]
    usual = [Shard(f"u{n}", shards.span, (home, n)) for n in range(2)]
    with Workers("local", 3) as workers:
        spans = {shard.name: result for shard, result in workers.gather(timed + usual, "x", progress=False)}
    for name, (begin, end) in spans.items():
        others = [span for other, span in spans.items() if other != name]
        if name.startswith("t"):
            assert all(end <= start or stop <= begin for start, stop in others)
    assert Workers("local", 3, timed=True).slots == 1


def test_what_cannot_be_sent_is_said_and_a_worker_with_other_code_refused(monkeypatch):
    with Workers("local", 1) as workers:
        workers.submit(Shard("two", lambda: 1))
        [(_, result)] = workers.settled()
    assert isinstance(result, Failed) and result.reason.startswith("pickle cannot send it, ")
    usual = machine.code_hash()
    monkeypatch.setattr(fanout, "own_code", lambda: {"code": "f" * 64, **machine.versions()})
    with pytest.raises(SpecdecError, match="worker on .* has another code; install there what is here"):
        run(of(shards.doubled, (1,)), "local", 1)
    shard, settings = of(shards.doubled, (1,))[0], {"environment": {}, "threads": 1, "folder": "/"}
    assert fanout.work(pickle.dumps(shard), "another key", {"code": usual}, settings)["failed"]


def test_workers_share_home_and_threads_and_find_what_lies_beside_the_notebooks(home, monkeypatch):
    shard = Shard("x", categories.category, ("What is 2 + 3?",))
    setting = {"environment": {}, "threads": 1, "folder": str(home)}
    sent = pickle.dumps((pickle.dumps(shard), shard.key(fanout.own_code()), fanout.own_code(), setting))
    read = "import pickle, sys; from specdec import fanout; print(fanout.work(*pickle.load(sys.stdin.buffer)))"
    environment = {**os.environ, "PYTHONPATH": str(machine.checkout())}
    done = subprocess.run([sys.executable, "-c", read], cwd=home, env=environment, input=sent, capture_output=True)
    assert "'result'" in done.stdout.decode(), done.stderr.decode()
    monkeypatch.setenv("SPECDEC_DATA", "/data")
    seen = run([Shard("x", shards.environment)], "local", 1)[0]
    assert (seen["SPECDEC_HOME"], seen["SPECDEC_DATA"]) == (str(runs.home()), "/data")
    monkeypatch.setattr(machine, "torch_state", lambda: {"threads": 4})
    assert [Workers("local", jobs).threads for jobs in (1, 2, 3, 8)] == [4, 2, 1, 1]
    alone = Workers(None, 2)  # jobs alone mean this machine
    assert (Workers().on, alone.on, alone.slots) == (None, "local", 2)
    assert [len(portion) for portion in Workers("local", 2).portions(range(17))] == [3, *[2] * 7]
    assert Workers("slurm", 2).portions(range(5), per_worker=16) == [[0, 2, 4], [1, 3]]
    assert Workers().portions(range(3)) == [[0], [1], [2]]
    assert Workers("local", 2).portions(range(5), per_worker=1, dealt=False) == [[0, 1], [2, 3, 4]]
    assert Workers("local", 2).portions([], dealt=False) == [] == Workers("local", 2).portions([])


def test_bad_places_and_no_slurm_are_one_sentence(monkeypatch, tmp_path):
    for place in (None, "slurm:local", "local"):
        pytest.raises(SpecdecError, Workers, place, 0, timed=True).match("jobs must be an integer of at least 1, got 0")
    pytest.raises(SpecdecError, Workers, "lokal", 0).match("unknown place to run on 'lokal'; did you mean 'local'")
    began = time.monotonic()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused = {
        f"ray://127.0.0.1:{port}": f"no Ray cluster answers at ray://127.0.0.1:{port} .*refused",
        "ray://nowhere": "no Ray cluster answers at ray://nowhere",
    }
    if not importlib.util.find_spec("ray"):
        refused = {"ray": r"needs the package ray, which is not installed; pip install 'specdec\[ray\]'"}
    for place, said in refused.items():
        pytest.raises(SpecdecError, Workers(place).__enter__).match(said)
    assert time.monotonic() - began < 10
    pytest.importorskip("submitit", reason="the package submitit is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    pytest.raises(SpecdecError, Workers("slurm").__enter__).match("SLURM cannot be reached .*there is no scontrol")
    (tmp_path / "scontrol").write_text("#!/bin/sh\n/bin/sleep 60\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setattr(fanout, "REACH_S", 0.2)
    pytest.raises(SpecdecError, Workers("slurm").__enter__).match("timed out")


@pytest.mark.parametrize("place", CLUSTERS)
def test_clusters_give_the_results_of_one_process_and_tell_of_a_shard_that_kills_every_worker(place, home):
    assert run(of(shards.doubled, range(6)), place, 2) == [0, 2, 4, 6, 8, 10]
    assert not list((home / "runs" / "jobs").glob("*")), "what submitit wrote for itself goes when all went well"
    work = of(shards.killed, (4,), home, 9) + of(shards.noted, (0,), home)
    pytest.raises(SpecdecError, run, work, place, 2).match("number 4 .its worker was lost")
    assert times_run(home) == {0: 1, 4: 3}
