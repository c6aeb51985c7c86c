"""Work for shards: of a module of its own, since workers import it."""

import os
import signal
import time
from pathlib import Path

from specdec.errors import SpecdecError


def doubled(number: int) -> int:
    return 2 * number


def noted(number: int, folder: Path) -> int:
    """Leaves a line for each time it ran."""
    with open(folder / f"{number}.txt", "a") as file:
        file.write(f"{os.getpid()}\n")
    return number


def killed(number: int, folder: Path, times: int) -> int:
    """Its process is killed in the first so many attempts, half-way."""
    noted(number, folder)
    if len((folder / f"{number}.txt").read_text().split()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def refused(number: int) -> int:
    raise SpecdecError(f"{number} cannot be done; try another.")


def broken(number: int) -> float:
    return number / 0


def span(folder: Path, number: int) -> tuple[float, float]:
    """When it ran."""
    begin = time.time()
    time.sleep(0.3)
    return begin, time.time()


def environment() -> dict:
    return dict(os.environ)


def slow(number: int, folder: Path) -> int:
    time.sleep(1)
    return noted(number, folder)
