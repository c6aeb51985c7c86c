"""A clock whose every look costs the same: times in tests are exact."""

from specdec.core.clock import Clock


class FakeClock(Clock):
    """Every look at it takes `step` seconds."""

    def __init__(self, step: float = 1.0):
        super().__init__()
        self._seconds, self.step, self.now = 0.0, step, self._tick
        self.start()

    def _tick(self) -> float:
        self._seconds += self.step
        return self._seconds
