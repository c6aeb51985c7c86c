"""The number of CPU threads for a model: the one measured fastest under the current load.

Small products lose more to synchronisation than they gain from threads, and beside other busy processes a thread that waits
for its turn delays all others. So a few forwards are timed with one thread, two, four ... when a model is first used, and again
when the machine becomes busy or idle. The setting holds only while the model decodes.

With OMP_NUM_THREADS set, nothing is measured and nothing changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import nn

from specdec import machine

ROUNDS, AT_MOST_S = 5, 0.5  # per measurement: forwards with each number; time limit
LARGE_S = 0.25  # models whose forward takes longer use every core
LOOK_AGAIN_S = 5.0
WORTH = 0.9  # fewer threads must take less than this fraction of the time
_decoding = threading.local()


class Threads:
    """The number of threads of one model; None before its first use on a CPU, or if OMP_NUM_THREADS is set."""

    def __init__(self, model: nn.Module):
        self.count, self._on_cpu = None, all(weight.device.type == "cpu" for weight in model.parameters())
        self._others, self._crowded = machine.Neighbours(), None

    @contextlib.contextmanager
    def used(self, forward: Callable[[], object]) -> Iterator[None]:
        """Inside, torch uses the number with which `forward` is fastest, unless another model has set one."""
        most = torch.get_num_threads()
        free = self._on_cpu and most > 1 and not os.environ.get("OMP_NUM_THREADS")
        if not free or getattr(_decoding, "under_way", False):
            yield
            return
        if self._due():
            self.count = fastest(forward, most)
        _decoding.under_way = True
        torch.set_num_threads(min(self.count or most, most))
        try:
            yield
        finally:
            _decoding.under_way = False
            torch.set_num_threads(most)

    def _due(self) -> bool:
        """Whether nothing is measured yet, or the machine has changed between idle and busy since."""
        if self.count is None:
            return True
        if self._others.seconds() < LOOK_AGAIN_S:
            return False
        crowded, before = bool(self._others.crowded()), self._crowded
        self._others, self._crowded = machine.Neighbours(), crowded
        return before is not None and crowded != before


def fastest(forward: Callable[[], object], most: int) -> int:
    """The number of threads, up to `most`, with which `forward` takes the least time; `most` for large models.

    >>> fastest(lambda: None, 1)
    1
    """
    numbers = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    times_s: dict[int, list[float]] = {number: [] for number in numbers}
    before, begin = torch.get_num_threads(), time.perf_counter()
    try:
        forward()  # the first use allocates memory
        for _ in range(ROUNDS):
            for number in reversed(numbers):
                torch.set_num_threads(number)
                start = time.perf_counter()
                forward()
                times_s[number].append(time.perf_counter() - start)
                if times_s[most][0] > LARGE_S:
                    return most
            if time.perf_counter() - begin > AT_MOST_S:
                break
    finally:
        torch.set_num_threads(before)
    typical_s = {number: median(times) for number, times in times_s.items()}
    best = min(numbers, key=typical_s.get)
    return best if typical_s[best] < WORTH * typical_s[most] else most
