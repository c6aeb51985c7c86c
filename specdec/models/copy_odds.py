"""The probability that a copied token is the target's own: a table of counts from recorded texts.

    matched    1  2  3  4-5  6-8  9-13  14-     tokens that agree before it, copied ones among them
    places     one · several that agree · the best of several that differ · another of those

Laplace's rule keeps a cell between its counts and its prior. Knows nothing about texts, tries or models.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec import runs
from specdec.errors import SpecdecError
from specdec.stored import CopiesFile

MATCHED = (1, 2, 3, 4, 6, 9, 14)  # lower bound of each column
PLACES = ("one", "agreed", "best", "other")
FILE = "copies.json"
PRIOR_COUNT = 4.0  # weight of a cell's prior, in outcomes


class Evidence(NamedTuple):
    """A cell of the table."""

    places: int
    matched: int

    @classmethod
    def of(cls, matched: int, places: int, rank: int, tokens: int) -> Evidence:
        """matched: tokens that agree; places: number that continue so; rank: of this token among `tokens` different ones, from 0"""
        kind = (1 if places > 1 else 0) if tokens == 1 else (2 if rank == 0 else 3)
        return cls(kind, bisect.bisect_right(MATCHED, matched) - 1)


def prior(seen: Evidence) -> float:
    """The probability before any counts: it rises with the match, and the second of two is hardly ever right."""
    matched = MATCHED[seen.matched]
    return {0: 0.9, 1: 0.95, 2: 0.7, 3: 0.2}[seen.places] * matched / (matched + 1.5)


@dataclass(frozen=True)
class CopyOdds:
    """Probabilities by Evidence, and the drafter's scale.

    hits, outcomes: per kind of places and column of matches; empty if none are counted. scale: a drafter's cumulative
    log-probabilities times this are the log of how often such nodes were right; 1 without a drafter.
    learned_from: what was counted, for display.
    """

    hits: tuple[tuple[int, ...], ...] = ()
    outcomes: tuple[tuple[int, ...], ...] = ()
    scale: float = 1.0
    learned_from: str = ""

    @classmethod
    def from_outcomes(
        cls, found: Iterable[tuple[Evidence, bool]], scale: float = 1.0, learned_from: str = ""
    ) -> CopyOdds:
        """The table of these outcomes: (its Evidence, whether the copied token was the target's)."""
        hits = [[0] * len(MATCHED) for _ in PLACES]
        outcomes = [[0] * len(MATCHED) for _ in PLACES]
        for seen, right in found:
            outcomes[seen.places][seen.matched] += 1
            hits[seen.places][seen.matched] += right
        return cls(tuple(map(tuple, hits)), tuple(map(tuple, outcomes)), scale, learned_from)

    def probability(self, seen: Evidence) -> float:
        """That the token is the target's, given that all tokens before it are."""
        hits, outcomes = (table[seen.places][seen.matched] if table else 0 for table in (self.hits, self.outcomes))
        return (hits + PRIOR_COUNT * prior(seen)) / (outcomes + PRIOR_COUNT)

    def log_prob(self, seen: Evidence) -> float:
        """The logarithm of `probability` on the drafter's scale."""
        return self._log_probs[seen.places][seen.matched]

    @functools.cached_property
    def _log_probs(self) -> list[list[float]]:
        cells = [[Evidence(kind, column) for column in range(len(MATCHED))] for kind in range(len(PLACES))]
        return [[math.log(self.probability(cell)) / self.scale for cell in row] for row in cells]

    @property
    def table(self) -> list[dict]:
        """A row per cell: places, matched (at least), outcomes, hits, probability."""
        cells = [Evidence(kind, column) for kind in range(len(PLACES)) for column in range(len(MATCHED))]
        rows = [{"places": PLACES[kind], "matched": MATCHED[column]} for kind, column in cells]
        for row, (kind, column) in zip(rows, cells, strict=True):
            row |= {"outcomes": self.outcomes[kind][column] if self.outcomes else 0}
            row |= {"hits": self.hits[kind][column] if self.hits else 0}
            row |= {"probability": self.probability(Evidence(kind, column))}
        return rows

    @property
    def _fields(self) -> dict:
        tables = {"hits": list(map(list, self.hits)), "outcomes": list(map(list, self.outcomes))}
        return {"matched": list(MATCHED), **tables, "scale": self.scale, "learned_from": self.learned_from}

    @property
    def key(self) -> str:
        """A hash of the contents."""
        return runs.content_key(**self._fields)

    def save(self, folder: str | Path) -> Path:
        """Write copies.json, with its hash, into a folder."""
        path = Path(folder).expanduser() / FILE
        runs.write_json(path, {**self._fields, "hash": self.key})
        return path

    @classmethod
    def load(cls, folder: str | Path) -> CopyOdds:
        """Read what `save` wrote. SpecdecError for a missing or damaged file."""
        path = Path(folder).expanduser() / FILE
        if not path.is_file():
            raise SpecdecError(f"there is no {FILE} in {folder}; name the folder that it was saved to.")
        stored = runs.read_json(path, CopiesFile, advice := "count it again")
        odds = cls(
            *(tuple(map(tuple, stored[name])) for name in ("hits", "outcomes")), stored["scale"], stored["learned_from"]
        )
        if stored["hash"] != odds.key or stored["matched"] != list(MATCHED):
            raise SpecdecError(f"{path} is damaged or of another version; {advice}.")
        for hits, outcomes in zip(odds.hits, odds.outcomes, strict=False):
            if not (len(hits) == len(outcomes) == len(MATCHED) and all(map(operator.le, hits, outcomes))):
                bins = f"the match-length bins differ from {list(MATCHED)}"
                raise SpecdecError(f"{path}: hits exceed outcomes, or {bins}; {advice}.")
        if not len(odds.hits) == len(odds.outcomes) in (0, len(PLACES)):
            raise SpecdecError(f"{path} has {len(odds.hits)} kinds of places, not {len(PLACES)}; {advice}.")
        return odds


def fit_scale(scores, right) -> float:
    """The scale a > 0 for which exp(a x score) best predicts correct nodes (maximum likelihood).

    scores: cumulative draft log-probabilities [N]; right: bool [N].
    """
    import numpy as np
    from scipy.optimize import minimize_scalar

    scores, right = np.minimum(np.asarray(scores, float), -1e-6), np.asarray(right, bool)
    if not right.any() or right.all():
        return 1.0

    def negative_log_likelihood(log_scale: float) -> float:
        log_p = np.exp(log_scale) * scores
        return -float(log_p[right].sum() + np.log(-np.expm1(log_p[~right])).sum())

    return float(np.exp(minimize_scalar(negative_log_likelihood, bounds=(-2.5, 1.5), method="bounded").x))
