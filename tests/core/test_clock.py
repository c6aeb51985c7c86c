"""Laps sum to the whole, whatever is left over is host time, and the fake clock is exact."""

import time
from types import SimpleNamespace

import pytest
import torch
from fakes.clock import FakeClock

import specdec
from specdec.core import clock
from specdec.core.clock import LAPS, Clock
from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.policy import Static
from specdec.core.verification import Picker


def test_every_look_at_the_fake_clock_costs_one_step():
    clock = FakeClock(step=0.5)
    clock.start()
    clock.mark()
    clock.lap("draft")
    clock.mark()
    clock.lap("verify")
    clock.lap("commit")
    times = clock.stop()
    assert (times["draft_ms"], times["verify_ms"], times["commit_ms"], times["policy_ms"]) == (500, 500, 500, 0)
    assert times["host_ms"] == 3 * 500 and times["total_ms"] == 6 * 500


def test_laps_of_a_real_clock_sum_to_the_whole():
    clock = Clock()
    begin = time.perf_counter()
    clock.start()
    clock.mark()
    time.sleep(0.004)
    clock.lap("draft")
    time.sleep(0.003)
    clock.mark()  # the time before a mark is nobody's: host
    time.sleep(0.002)
    clock.lap("verify")
    times = clock.stop()
    wall_ms = 1e3 * (time.perf_counter() - begin)
    assert times["draft_ms"] >= 4 and times["verify_ms"] >= 2 and times["host_ms"] >= 3
    assert sum(times[f"{lap}_ms"] for lap in LAPS) + times["host_ms"] == pytest.approx(times["total_ms"])
    assert times["total_ms"] <= wall_ms


def test_a_new_cycle_forgets_the_last_one():
    clock = FakeClock()
    clock.lap("policy")
    clock.start()
    assert clock.stop()["policy_ms"] == 0


def test_laps_wait_for_the_device():
    """A device that is still busy when a lap ends would charge its work to the next lap."""
    clock, order = FakeClock(), []
    tick = clock.now
    clock.wait = lambda: order.append("wait")
    clock.now = lambda: order.append("look") or tick()
    clock.start()
    clock.mark()
    clock.lap("verify")
    assert order == ["wait", "look", "look", "wait", "look"]


def test_processor_time_stands_still_while_others_work():
    with clock.by_processor_time():
        watch, begin = Clock(), clock.now()
        time.sleep(0.1)
        assert clock.now() - begin < 0.05 and watch.stop()["total_ms"] < 50
        with clock.by_processor_time(used=False):
            assert Clock().now is time.process_time
    assert Clock().now is time.perf_counter


GADGET = torch.device("xpu")  # torch knows the name; what it has is told by each test


def test_a_device_without_events_is_waited_for(monkeypatch):
    asked, device = [], GADGET
    monkeypatch.setattr(torch, "gadget", SimpleNamespace(synchronize=asked.append), raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.gadget)
    timer = Clock(device)
    timer.lap("draft")
    assert asked == [device] * 2 and timer._events is None
    assert Clock().wait() is None and len(asked) == 2  # nobody waits for the host


@pytest.mark.parametrize("lacks", ["Event", "current_stream"])
def test_events_need_both_halves_and_are_recorded_on_the_devices_own_stream(lacks, monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            streams.append(stream)

        def elapsed_time(self, other):
            return 2.0

        def synchronize(self):
            streams.append("waited")

    device, streams = GADGET, []
    whole = dict(Event=Event, current_stream=lambda one: one, synchronize=lambda device: None)
    monkeypatch.setattr(torch, "gadget", SimpleNamespace(**whole), raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.gadget)
    assert Clock(device).stop()["total_ms"] == 2.0
    assert streams == [device] * 2 + ["waited"]  # begun, ended
    with clock.counted_by(time.process_time):  # a counter of the host's does not see events
        assert Clock(device)._events is None
    monkeypatch.delattr(torch.gadget, lacks)
    assert Clock(device)._events is None


def test_a_counter_holds_inside_its_block_alone():
    with clock.counted_by(lambda: 7.0):
        assert clock.now() == 7.0
        with pytest.raises(RuntimeError), clock.counted_by(lambda: 8.0):
            assert clock.now() == 8.0
            raise RuntimeError
        assert clock.now() == 7.0
    assert abs(clock.now() - time.perf_counter()) < 1.0


def test_an_unknown_lap_is_an_error():
    with pytest.raises(KeyError):
        Clock().lap("coffee")


class Device:
    """Stands in for `torch.cuda`: work is queued and takes its time, an event passes when what was queued before it is done."""

    def __init__(self):
        self.host = 0.0  # seconds; what the host's work takes is added by hand
        self.done = 0.0  # when all that was queued is done
        self.made = self.recorded = self.waits = 0

    def queue(self, seconds: float) -> None:
        self.done = max(self.done, self.host) + seconds

    def wait_until(self, moment: float) -> None:
        self.waits += 1
        self.host = max(self.host, moment)

    def synchronize(self, device=None) -> None:
        self.wait_until(self.done)

    def current_stream(self, device=None):
        return self

    def Event(self, enable_timing: bool):
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device, self.passes = device, None

    def record(self, stream) -> None:
        assert stream is self.device
        self.device.recorded += 1
        self.passes = max(self.device.done, self.device.host)

    def synchronize(self) -> None:
        self.device.wait_until(self.passes)

    def elapsed_time(self, later) -> float:
        assert later.passes <= self.device.host, "read before it has passed"
        return 1e3 * (later.passes - self.passes)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    for name in ("synchronize", "current_stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    return device


def test_laps_of_a_device_are_its_own_time_and_nobody_waits_for_them(device):
    watch = Clock(torch.device("cuda"))
    for _ in range(3):
        begin, waits = device.host, device.waits
        watch.start()
        device.host += 2.0  # while the device has nothing to do
        watch.mark()
        device.queue(20.0)
        watch.lap("draft")
        device.host += 1.0  # while it is busy
        watch.mark()
        device.queue(30.0)
        watch.lap("verify")
        assert device.waits == waits and device.host == begin + 3.0
        times = watch.stop()
        assert device.waits == waits + 1 and device.host == begin + 52.0
        assert times == pytest.approx(
            dict(draft_ms=20e3, policy_ms=0, verify_ms=30e3, commit_ms=0, host_ms=2e3, total_ms=52e3)
        )
        assert device.made == 6  # the first cycle's events serve the others


def test_a_cycle_waits_for_its_device_once_however_deep_the_tree(device):
    pair = specdec.load_pair("tiny", dtype="float32")
    for tree in (Static(4, 0, 3), Static(60, 7, 10)):
        watch = Clock(torch.device("cuda"))
        prompt = torch.tensor(pair.ids_of("What is 3 plus 4?"))
        engine = LiveEngine(pair, prompt, 64, tree.limits, Picker(), clock=watch)
        with engine.inference():
            engine.prefill()
            run_cycle(engine, tree)
            waits, made = device.waits, device.made
            for _ in range(3):
                run_cycle(engine, tree)
            assert (device.waits, device.made) == (waits + 3, made)


def test_a_counter_that_is_not_the_wall_clock_waits_at_every_lap(device):
    """Events know no processor time."""
    with clock.counted_by(time.process_time):
        watch = Clock("cuda")
        waits = device.waits
        watch.mark()
        watch.lap("draft")
        watch.lap("verify")
        assert device.waits == waits + 2 and device.recorded == 0
        assert watch.stop()["total_ms"] >= 0
