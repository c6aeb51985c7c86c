"""Timing of a cycle by laps.

    start ──▶ mark ═══▶ lap("policy") ──▶ mark ═══▶ lap("draft") ──▶ ... ──▶ stop
                          time between a mark and a lap belongs to the lap;  the rest is host time and is reported

On an asynchronous device (a GPU) times are events in its stream, read after the cycle, so that nothing waits for the device
before that. Knows nothing about what is timed.
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
    """Seconds of the active counter: the wall clock, or processor time inside `by_processor_time`."""
    return _counter.get()()


@contextlib.contextmanager
def counted_by(counter: Callable[[], float]) -> Iterator[None]:
    """Inside this block every time is read from `counter`, which counts seconds."""
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)


def by_processor_time(used: bool = True) -> AbstractContextManager[None]:
    """Inside this block decoding is timed by the processor time of this process. Does nothing unless `used`.

    For machines that other processes keep busy; one CPU thread only, since waiting threads count as busy.
    """
    return counted_by(time.process_time if used else _counter.get())


class Clock:
    """Stop-watch for one cycle at a time. `now` is a second counter; `wait` makes the device finish first."""

    def __init__(self, device: torch.device | str | None = None):
        module = None if device is None or torch.device(device).type == "cpu" else torch.get_device_module(device)
        self.wait: Callable[[], None] = lambda: module.synchronize(device) if module else None
        self.now: Callable[[], float] = _counter.get()
        own = self.now is time.perf_counter  # any other counter is the host's
        self._events = _events(module, device) if own and module else None
        self.start()

    def start(self) -> None:
        """Begin a cycle."""
        self._laps: dict[str, list[tuple[Moment, Moment]]] = {name: [] for name in LAPS}
        if self._events is not None:
            self._events.restart()
        self._begin = self._mark = self._finished()

    def mark(self) -> None:
        """Begin a lap here; the time since the last lap was host time."""
        self._mark = self.now() if self._events is None else self._events.record()

    def lap(self, name: str) -> None:
        """Charge the time since the last mark or lap to `name`."""
        moment = self._finished()
        self._laps[name].append((self._mark, moment))
        self._mark = moment

    def stop(self) -> dict[str, float]:
        """End the cycle: milliseconds per lap, `host_ms` for the rest, `total_ms` for all."""
        if self._events is None:
            end = self.now()
        else:
            end = self._events.record()
            end.synchronize()  # the only wait for the device
        total_ms = self.ms_between(self._begin, end)
        laps = {f"{name}_ms": sum(self.ms_between(*moments) for moments in laps) for name, laps in self._laps.items()}
        return {**laps, "host_ms": total_ms - sum(laps.values()), "total_ms": total_ms}

    def ms_between(self, earlier: Moment, later: Moment) -> float:
        """Milliseconds between two moments of the cycle that has ended."""
        return float(1e3 * (later - earlier) if self._events is None else earlier.elapsed_time(later))

    def _finished(self) -> Moment:
        """The current time; on a device, when all work queued so far is done."""
        if self._events is not None:
            return self._events.record()
        self.wait()
        return self.now()


class _Events:
    """A device's timing events, reused in every cycle. stream: a function that returns the current stream."""

    def __init__(self, make: Callable[..., Moment], stream: Callable[[], Any]):
        self._make, self._stream = make, stream
        self._made: list[Moment] = []
        self.restart()

    def restart(self) -> None:
        self._used = 0

    def record(self) -> Moment:
        """An event after all work queued so far."""
        if self._used == len(self._made):
            self._made.append(self._make(enable_timing=True))
        event = self._made[self._used]
        self._used += 1
        event.record(self._stream())
        return event


def _events(module: Any, device: Any) -> _Events | None:
    """The events of a device whose module has them (`torch.cuda`)."""
    make, stream = vars(module).get("Event"), vars(module).get("current_stream")
    return _Events(make, lambda: stream(device)) if make and stream else None
