"""Bad input and what is said about it: one module per room, one row per case, all tried by tests/test_refusals.py.

A module holds `ROWS`, a list of what `row` makes. A row's call takes the `Given` of its test, from which it takes what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from fakes.pairs import shared_bigrams, shared_pair
from fakes.traces import round_costs, synthetic_trace

from specdec.errors import SpecdecError


class Given:
    """What rows are tried on: an empty folder that is the home of results, and shared small objects, made when asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    pair = property(lambda self: shared_pair())
    bigrams = property(lambda self: shared_bigrams())
    trace = property(lambda self: synthetic_trace())
    costs = property(lambda self: round_costs())

    def file(self, name: str, text: str | bytes) -> Path:
        """A file in the folder with this content."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path


def row(
    name: str, call: Callable[[Given], object], *words: str, error: type[Exception] = SpecdecError
) -> SimpleNamespace:
    """One refusal: row("no such suite", lambda given: load_suite("x"), "'x'", "did you mean").

    words: what the sentence must contain, the value or the name that is wrong first. error: what is raised; a SpecdecError's
    sentence is one line that ends with a full stop or a question mark.
    """
    return SimpleNamespace(name=name, call=call, words=words, error=error)
