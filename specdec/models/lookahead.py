"""Lookahead decoding: the target itself makes n-grams, in a window of guesses that rides along with every tree.

    level 0    a1  a2  a3  a4        W columns beside the root, one position further each; levels one further each
    level 1    b1  b2  b3  b4        row (l, c) sees the text, the root, level 0 up to its column, its column's levels up to l
    forward        what the target says after b1 .. b4 is c1 .. c4: n-grams a1 b1 c1, a2 b2 c2, ...; then all moves up a level

The n-grams go into a pool by their first token; those that begin with the root are the candidates. (Fu et al. 2024, section 3;
its code credits a matched n-gram one token short, this does not.) The pool depends on the cycles that went before, so lookahead
is measured live and cannot be recorded. Knows nothing about trees or policies.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from specdec.core.tries import Trie
from specdec.errors import SpecdecError
from specdec.models.target import Target

STEP_PROB = 0.7  # of every token of a pooled n-gram, the next best guess having less; it only orders candidates
NEWER = 0.95  # what an n-gram has left for every newer one of the same first token


@dataclass(frozen=True)
class LookaheadConfig:
    """The window and the pool. The paper's code takes 7 / 5 / 7 for 7B models on a GPU; rows cost more on a CPU."""

    columns: int = 4  # W, of the window
    ngram: int = 4  # N, tokens of an n-gram; the window has N - 1 levels
    kept: int = 4  # G, n-grams per first token, the newest
    from_prompt: bool = True  # fill the pool from the prompt and the text as well

    def __post_init__(self):
        for name, low in (("columns", 1), ("ngram", 2), ("kept", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise SpecdecError(f"{name} must be an integer of at least {low}, got {value!r}.")

    @property
    def rows(self) -> int:
        """Of the target's forward, beside the tree."""
        return self.columns * (self.ngram - 1)


class NgramPool:
    """first token -> the newest `kept` continuations of N - 1 tokens, the newest last."""

    def __init__(self, config: LookaheadConfig):
        self.config, self._of = config, {}

    def add(self, ngram: list[int]) -> None:
        """Remember N tokens; what is known already becomes the newest."""
        found = self._of.setdefault(ngram[0], OrderedDict())
        found.pop(rest := tuple(ngram[1:]), None)
        found[rest] = None
        if len(found) > self.config.kept:
            found.popitem(last=False)

    def trie(self, first: int) -> Trie:
        """The continuations of a token, those that begin alike sharing their nodes; newer ones score higher."""
        nodes: dict[tuple[int, ...], int] = {(): 0}
        rows = []
        for age, rest in enumerate(reversed(self._of.get(first, ()))):
            for length in range(1, len(rest) + 1):
                if (path := rest[:length]) not in nodes:
                    rows.append((path[-1], nodes[path[:-1]], math.log(NEWER**age * STEP_PROB**length)))
                    nodes[path] = len(rows)
        return Trie(*zip(*rows, strict=True)) if rows else Trie()


class LookaheadSession:
    """One turn: the window as it stands, and the pool."""

    def __init__(self, config: LookaheadConfig, device: torch.device):
        self.config, self.pool, self.device = config, NgramPool(config), device
        self.levels: list[list[int]] = []  # of the window, filled one more per forward until there are N - 1
        self._read: list[int] = []
        number = torch.arange(config.rows, device=device)
        self._level, self._column = number // config.columns, number % config.columns

    def copied(self, ids: Tensor) -> Trie:
        known, count = len(self._read), self.config.ngram
        self._read += ids[known:].tolist()
        if not self.levels:  # guesses to begin with: tokens of the prompt, round and round
            self.levels = [[self._read[(7 * c + 3) % len(self._read)] for c in range(self.config.columns)]]
        if self.config.from_prompt:
            for end in range(max(known, count - 1), len(self._read)):
                self.pool.add(self._read[end - count + 1 : end + 1])
        return self.pool.trie(self._read[-1])

    def window(self, levels: int) -> tuple[Tensor, Tensor, Tensor] | None:
        rows = len(self.levels) * self.config.columns
        if not rows or len(self.levels) - 1 + self.config.columns > levels:
            return None
        level, column = self._level[:rows], self._column[:rows]
        below = (level == 0) & (column <= column[:, None])
        sees = below | ((column == column[:, None]) & (level <= level[:, None]))
        tokens = torch.tensor([token for part in self.levels for token in part], device=self.device)
        return tokens, 1 + level + column, sees

    def learn(self, logits: Tensor) -> None:
        columns, last = self.config.columns, self.config.ngram - 1
        self.levels.append(logits[-columns:].argmax(-1).tolist())
        if len(self.levels) > last:
            for ngram in zip(*self.levels, strict=True):
                self.pool.add(list(ngram))
            self.levels.pop(0)


class LookaheadDrafter:
    """Lookahead for a target: no weights, no network.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32", drafter="lookahead")
    >>> out = specdec.decode(pair, "one two three one two", specdec.Static(8, 2, 3), max_new_tokens=8)
    >>> out.tokens == specdec.autoregress(pair, "one two three one two", max_new_tokens=8).tokens
    True
    """

    taps, forwards = (), False

    def __init__(self, target: Target, config: LookaheadConfig | None = None):
        self.target, self.config = target, config or LookaheadConfig()
        self.copied_levels, self.extra_rows = self.config.ngram - 1, self.config.rows

    @property
    def fingerprinted(self) -> dict:
        """What a result depends on."""
        return {"kind": "lookahead", **asdict(self.config)}

    def inference(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def session(self, context_tok: int, tree_tok: int) -> LookaheadSession:
        return LookaheadSession(self.config, self.target.device)
