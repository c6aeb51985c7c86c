"""Laps sum to the whole, whatever is left over is host time, and the fake clock is exact."""

import time

import pytest
import torch
from fakes.clock import FakeClock

from specdec.core import clock
from specdec.core.clock import Clock


def test_every_look_costs_one_step_and_laps_wait_for_the_device():
    """A device that is still busy when a lap ends would charge its work to the next lap."""
    watch, order = FakeClock(step=0.5), []
    tick = watch.now
    watch.wait = lambda: order.append("wait")
    watch.now = lambda: order.append("look") or tick()
    watch.lap("policy")  # of a cycle before
    order.clear()
    watch.start()
    watch.mark()
    watch.lap("draft")
    watch.mark()
    watch.lap("verify")
    watch.lap("commit")
    assert order == "wait look look wait look look wait look wait look".split()
    assert watch.stop() == dict(
        draft_ms=500, policy_ms=0, verify_ms=500, commit_ms=500, host_ms=1500, total_ms=3000
    )


def test_counters_hold_inside_their_blocks():
    with clock.counted_by(lambda: 7.0):
        with pytest.raises(RuntimeError), clock.counted_by(lambda: 8.0):
            assert clock.now() == 8.0
            raise RuntimeError
        assert clock.now() == 7.0
    with clock.by_processor_time(True), clock.by_processor_time(False):
        assert Clock().now is time.process_time
    assert Clock().now is time.perf_counter


class Device:
    """A GPU: work is queued and takes its time; an event passes when work before it is done."""

    def __init__(self):
        self.host = 0.0  # seconds; what the host's work takes is added by hand
        self.done = 0.0  # when all that was queued is done
        self.made = self.waits = 0

    def queue(self, seconds: float) -> None:
        self.done = max(self.done, self.host) + seconds

    def current_stream(self, device=None):
        return self

    def Event(self, enable_timing: bool):
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device, self.passes = device, None

    def record(self, stream) -> None:
        self.passes = max(self.device.done, self.device.host)

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.host = max(self.device.host, self.passes)

    def elapsed_time(self, later) -> float:
        assert later.passes <= self.device.host, "read before it has passed"
        return 1e3 * (later.passes - self.passes)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    for name in ("current_stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    return device


def test_laps_of_a_gpu_are_its_own_time_and_a_cycle_waits_for_it_once(device):
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
            dict(
                draft_ms=20e3, policy_ms=0, verify_ms=30e3, commit_ms=0, host_ms=2e3, total_ms=52e3
            )
        )
        assert device.made == 6, "the first cycle's events serve the others"
