"""The number of threads that a model gets is the one that measured fastest, and is looked at again when the load changes."""

import os
import subprocess
import sys

import pytest
import torch

import specdec
from specdec import machine, waiting
from specdec import threads as threads_module
from specdec.threads import Threads, fastest


@pytest.fixture
def four(monkeypatch):
    """torch as on a machine of four cores where nobody has decided; returns the numbers that were set."""
    state, numbers = {"now": 4}, []

    def set_to(number):
        state["now"] = number
        numbers.append(number)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["now"])
    monkeypatch.setattr(torch, "set_num_threads", set_to)
    return numbers


class Time:  # passes only where somebody sleeps
    now_s = 0.0

    def sleep(self, seconds):
        self.now_s += seconds

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Time()
    monkeypatch.setattr(threads_module, "time", clock)
    return clock


def test_the_fastest_number_a_large_model_is_timed_once_and_others_when_the_load_changes(
    four, clock, monkeypatch
):
    for ms_of, best in [
        ({1: 2, 2: 6, 4: 12}, 1),
        ({1: 12, 2: 3, 4: 8}, 2),
        ({1: 12, 2: 6, 4: 2}, 4),
        ({1: 9.1, 2: 9.1, 4: 10}, 4),  # too little to win
    ]:
        assert (
            fastest(lambda ms_of=ms_of: clock.sleep(ms_of[torch.get_num_threads()] / 1e3), 4)
            == best
        )
        assert torch.get_num_threads() == 4 and {1, 2, 4} <= set(four)
    monkeypatch.setattr(threads_module, "LARGE_S", 0.01)
    calls = []
    assert fastest(lambda: calls.append(clock.sleep(0.02)), 4) == 4
    assert len(calls) == 2 and torch.get_num_threads() == 4
    monkeypatch.setattr(machine, "Neighbours", Load)
    mine, other, measured = Threads(torch.nn.Linear(2, 2)), Threads(torch.nn.Linear(2, 2)), []
    monkeypatch.setattr(
        threads_module, "fastest", lambda forward, most: measured.append(Load.busy) or 2
    )
    for busy in ("", "", "", "others", "others", ""):
        monkeypatch.setattr(Load, "busy", busy)
        with mine.used(lambda: None):
            assert torch.get_num_threads() == 2
            with other.used(
                lambda: None
            ):  # a drafter that is a model itself: the target's number holds
                assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 4
    assert measured == ["", "others", ""] and other.count is None


class Load:  # others that use the cores or do not, as is said from outside
    busy = ""

    def seconds(self):
        return 60.0

    def crowded(self):
        return Load.busy


@pytest.mark.parametrize("given", ["environment", "device"])
def test_nothing_is_measured_where_somebody_has_decided(four, monkeypatch, given):
    if given == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
    model = torch.nn.Linear(2, 2, device="meta" if given == "device" else "cpu")
    with Threads(model).used(lambda: pytest.fail("timed")):
        assert torch.get_num_threads() == 4
    assert four == []


def test_decoding_measures_and_puts_the_number_back(four):
    pair = specdec.load_pair("tiny", dtype="float32")
    out = specdec.decode(pair, [5, 6, 7], specdec.Static(6, 2, 2), max_new_tokens=4, stop_tokens=())
    assert len(out.tokens) == 4 and pair.target.threads in (1, 2, 4)
    assert torch.get_num_threads() == 4 and len(four) >= 4


@pytest.mark.parametrize(
    "busy, seconds, crowded",
    [(0.5, 9, True), (0.3, 9, False), (0.5, 0.1, False), (float("nan"), 9, False)],
)
def test_a_pair_that_loads_beside_others_says_so(monkeypatch, recwarn, busy, seconds, crowded):
    monkeypatch.setattr(machine, "ENOUGH_CORES", 0.8)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(machine.Neighbours, "cpus", lambda self: busy)
    monkeypatch.setattr(machine.Neighbours, "seconds", lambda self: seconds)
    monkeypatch.setattr(waiting, "too_late", True)
    specdec.load_pair("tiny")
    told = " ".join(str(one.message) for one in recwarn)
    assert ("keep 0.5 of 2 cores" in told) == ("import specdec first" in told) == crowded


@pytest.mark.parametrize(
    "given, spins",
    [({}, "3000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_threads_that_wait_sleep_soon(given, spins):
    code = "import os, {}; print(specdec.waiting.too_late, os.environ.get('GOMP_SPINCOUNT'))"
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))
    } | given

    def run(imports):
        command = [sys.executable, "-c", code.format(imports)]
        return subprocess.run(
            command, env=clean, capture_output=True, text=True, check=True
        ).stdout.split()

    assert run("specdec") == ["False", spins]
    assert run("torch, specdec") == [str(not given), spins]
