"""Bad input and its sentences: one module per room, one row per case; tests/test_refusals.py tries
them all.

A module holds `ROWS`, a list of what `row` makes. A row's call takes the `Given` of its test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from fakes.pairs import shared_bigrams, shared_pair
from fakes.traces import round_costs, synthetic_trace

from specdec.errors import SpecdecError


class Given:
    """An empty folder that is the home of results, and shared small objects, made when needed."""

    def __init__(self, folder: Path):
        self.folder = folder

    pair = property(lambda self: shared_pair())
    bigrams = property(lambda self: shared_bigrams())
    trace = property(lambda self: synthetic_trace())
    costs = property(lambda self: round_costs())

    def file(self, name: str, text: str) -> Path:
        """A file in the folder with this content."""
        path = self.folder / name
        path.write_text(text)
        return path


def row(name: str, call: Callable[[Given], object], *words: str, error=SpecdecError):
    """One refusal: row("no such suite", lambda given: load_suite("x"), "'x'", "did you mean").

    words: parts of the sentence, the value or the name that is wrong first.
    """
    return SimpleNamespace(name=name, call=call, words=words, error=error)
