"""Laps sum to the whole, whatever is left over is host time, and the fake clock is exact."""

import time

import pytest
from fakes.clock import FakeClock

from specdec.core import clock
from specdec.core.clock import LAPS, Clock


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


def test_an_unknown_lap_is_an_error():
    with pytest.raises(KeyError):
        Clock().lap("coffee")
