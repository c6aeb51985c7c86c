"""The one place for time: laps of a cycle, synchronised with the device.

    start ──▶ mark ═══▶ lap("policy") ──▶ mark ═══▶ lap("draft") ──▶ ... ──▶ stop
               what lies between a mark and a lap is the lap's;  all the rest is host time, and it is reported

Knows nothing about what is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextvars import ContextVar

LAPS = ("draft", "policy", "verify", "commit")
_counter: ContextVar[Callable[[], float]] = ContextVar("counter", default=time.perf_counter)


def now() -> float:
    """Seconds of the counter in force: the wall clock, or processor time inside `by_processor_time`."""
    return _counter.get()()


@contextlib.contextmanager
def counted_by(counter: Callable[[], float]):
    """Inside this block every time is read from `counter`, which counts seconds."""
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)


def by_processor_time(used: bool = True):
    """Inside this block decoding is timed by the processor time of this process. Does nothing unless `used`.

    Of use where others keep the machine busy, and only with one thread on a CPU: threads that wait count as busy.
    """
    return counted_by(time.process_time if used else _counter.get())


class Clock:
    """Stop-watch for one cycle at a time. `now` is a second counter; `wait` makes the device finish first."""

    def __init__(self, device=None):
        self.wait: Callable[[], None] = _waiter(device)
        self.now: Callable[[], float] = _counter.get()
        self.start()

    def start(self) -> None:
        """Begin a cycle."""
        self.wait()
        self.seconds = dict.fromkeys(LAPS, 0.0)
        self._begin = self._mark = self.now()

    def mark(self) -> None:
        """Begin a lap here; the time since the last lap was host time."""
        self._mark = self.now()

    def lap(self, name: str) -> None:
        """Charge the time since the last mark or lap to `name`."""
        self.wait()
        moment = self.now()
        self.seconds[name] += moment - self._mark
        self._mark = moment

    def stop(self) -> dict[str, float]:
        """End the cycle: milliseconds per lap, `host_ms` for the rest, `total_ms` for all."""
        total_ms = 1e3 * (self.now() - self._begin)
        laps = {f"{name}_ms": 1e3 * value for name, value in self.seconds.items()}
        return {**laps, "host_ms": total_ms - sum(laps.values()), "total_ms": total_ms}


def _waiter(device) -> Callable[[], None]:
    kind = getattr(device, "type", device)
    if kind in (None, "cpu"):
        return lambda: None
    import torch

    return lambda: getattr(torch, kind).synchronize(device)
