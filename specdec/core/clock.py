"""Timing of a cycle by laps.

    start ──▶ mark ═══▶ lap("policy") ──▶ mark ═══▶ lap("draft") ──▶ ... ──▶ stop
        time between a mark and a lap belongs to the lap; the rest is host time

On a GPU times are events in its stream. They are read after the cycle, so that nothing waits for
the device before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

Moment = Any  # a device's event, or seconds of the host's counter
LAPS = ("draft", "policy", "verify", "commit")
_counter: ContextVar[Callable[[], float]] = ContextVar("counter", default=time.perf_counter)


def now() -> float:
    """Seconds of the active counter: wall clock, or processor time in `by_processor_time`."""
    return _counter.get()()


@contextlib.contextmanager
def counted_by(counter: Callable[[], float]) -> Iterator[None]:
    """Inside this block every time is read from `counter`, which counts seconds."""
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)


def by_processor_time(used: bool) -> AbstractContextManager[None]:
    """Inside this block decoding is timed by the processor time of this process, if `used`.

    For busy machines. Use one CPU thread: waiting threads count as busy.
    """
    return counted_by(time.process_time if used else _counter.get())


class Clock:
    """Stop-watch for one cycle at a time. now: the counter of seconds."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.now: Callable[[], float] = _counter.get()
        self._device = torch.device(device)
        # any other counter belongs to the host, and events do not know it
        on_gpu = self._device.type == "cuda" and self.now is time.perf_counter
        self._events: list[Any] | None = [] if on_gpu else None
        self.start()

    def wait(self) -> None:
        """Return when the device has finished all work queued so far."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def start(self) -> None:
        """Begin a cycle."""
        self.laps: dict[str, list[tuple[Moment, Moment]]] = {name: [] for name in LAPS}
        self._recorded = 0
        self.begin = self._mark = self._finished()

    def mark(self) -> None:
        """Begin a lap here; the time since the last lap was host time."""
        self._mark = self.now() if self._events is None else self._event()

    def lap(self, name: str) -> None:
        """Charge the time since the last mark or lap to `name`."""
        moment = self._finished()
        self.laps[name].append((self._mark, moment))
        self._mark = moment

    def stop(self) -> dict[str, float]:
        """End the cycle: milliseconds per lap, `host_ms` for the rest, `total_ms` for all."""
        if self._events is None:
            end = self.now()
        else:
            end = self._event()
            # the only wait for the device in a cycle
            end.synchronize()
        times = {}
        for name, laps in self.laps.items():
            times[f"{name}_ms"] = sum(self.ms_between(first, last) for first, last in laps)
        total_ms = self.ms_between(self.begin, end)
        return {**times, "host_ms": total_ms - sum(times.values()), "total_ms": total_ms}

    def ms_between(self, earlier: Moment, later: Moment) -> float:
        """Milliseconds between two moments of the cycle that has ended."""
        if self._events is None:
            return float(1e3 * (later - earlier))
        return float(earlier.elapsed_time(later))

    def _finished(self) -> Moment:
        """The current time; on a device, when all work queued so far is done."""
        if self._events is not None:
            return self._event()
        self.wait()
        return self.now()

    def _event(self) -> Moment:
        """An event after all work queued so far; the first cycle's serve all others."""
        assert self._events is not None, "times of the host are no events"
        if self._recorded == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._recorded]
        self._recorded += 1
        event.record(torch.cuda.current_stream(self._device))
        return event
