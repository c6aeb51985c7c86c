"""Drafting by n-grams: `prompt_lookup` and `suffix` copy what followed the same tokens earlier.

    text       ... the quick brown fox jumps over ... the quick brown |   longest match: 3 tokens
    copied                          fox jumps over ...                 fox jumps over

`prompt_lookup` copies what follows the longest match's first place (transformers' rule). `suffix`
builds a trie of all places, weighted by how often such copies were right on recorded texts.
`hybrid` merges copies with a network's tree. `lookahead` generates n-grams of its own.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize  # type: ignore[import-untyped]
from torch import Tensor

from specdec import runs
from specdec.core.protocols import Drafter, DraftSession
from specdec.core.tree import Trie
from specdec.errors import SpecdecError
from specdec.models.eagle_drafter import load_eagle
from specdec.models.target import Target
from specdec.stored import CopiesFile, read_json

# The table of CopyOdds: columns by the tokens that agree before a copy (their lower bounds), rows
# by the places: one, several that agree, the best of several that differ, another of those.
MATCHED = (1, 2, 3, 4, 6, 9, 14)
PLACES = ("one", "agreed", "best", "other")
PRIORS = (0.9, 0.95, 0.7, 0.2)
PRIOR_COUNT = 4.0  # weight of a cell's prior, in outcomes
FILE = "copies.json"


class Text:
    """A growing text, and the places of its tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.places: dict[int, list[int]] = defaultdict(list)

    def grow_to(self, ids: Tensor) -> None:
        for token in ids[len(self.tokens) :].tolist():
            self.places[token].append(len(self.tokens))
            self.tokens.append(token)

    def match(self, place: int, longest: int) -> int:
        """Number of tokens up to `place` that equal the text's end; at most `longest`."""
        tokens = self.tokens
        last = len(tokens) - 1
        count = 0
        while count < min(longest, place + 1) and tokens[place - count] == tokens[last - count]:
            count += 1
        return count


class Evidence(NamedTuple):
    """A cell of the table: row, column."""

    places: int
    matched: int

    @classmethod
    def of(cls, matched: int, places: int, rank: int, tokens: int) -> Evidence:
        """Of a token with this rank among `tokens` that follow, at `places` places."""
        row = min(places, 2) - 1 if tokens == 1 else min(rank, 1) + 2
        return cls(row, bisect.bisect_right(MATCHED, matched) - 1)


CELLS = [Evidence(*cell) for cell in itertools.product(range(len(PLACES)), range(len(MATCHED)))]
Counts = list[list[int]]
NONE: Counts = [[0] * len(MATCHED)] * len(PLACES)


@dataclass(frozen=True)
class CopyOdds:
    """How often copies were right, by Evidence (hits of outcomes), and the drafter's scale."""

    hits: Counts = field(default_factory=lambda: NONE)
    outcomes: Counts = field(default_factory=lambda: NONE)
    # times a drafter's log-probability: the log of how often such nodes were right
    scale: float = 1.0
    learned_from: str = ""  # for display

    @classmethod
    def from_outcomes(
        cls, copies: Iterable[tuple[Evidence, bool]], scale: float = 1.0, learned_from: str = ""
    ) -> CopyOdds:
        """The table of outcomes: (Evidence, whether the copied token was the target's)."""
        hits = np.zeros((len(PLACES), len(MATCHED)), int)
        outcomes = np.zeros_like(hits)
        for cell, right in copies:
            outcomes[cell] += 1
            hits[cell] += right
        return cls(hits.tolist(), outcomes.tolist(), scale, learned_from)

    def probability(self, cell: Evidence) -> float:
        """That the token is the target's, given that all tokens before it are (Laplace's rule)."""
        # before any counts it rises with the match; a second copy is rarely right
        row, column = cell
        prior = PRIORS[row] * MATCHED[column] / (MATCHED[column] + 1.5)
        hits = self.hits[row][column] + PRIOR_COUNT * prior
        return hits / (self.outcomes[row][column] + PRIOR_COUNT)

    @functools.cached_property
    def log_probs(self) -> dict[Evidence, float]:
        """The logarithms of `probability` on the drafter's scale."""
        return {cell: math.log(self.probability(cell)) / self.scale for cell in CELLS}

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row per cell: places, matched (at least), outcomes, hits, probability."""
        rows = []
        for cell in CELLS:
            row, column = cell
            counts = {"outcomes": self.outcomes[row][column], "hits": self.hits[row][column]}
            place = {"places": PLACES[row], "matched": MATCHED[column]}
            rows.append({**place, **counts, "probability": self.probability(cell)})
        return rows

    @property
    def key(self) -> str:
        """A hash of the contents."""
        return runs.content_key(matched=list(MATCHED), **asdict(self))

    def save(self, folder: str | Path) -> Path:
        """Write copies.json, with its hash, into a folder."""
        content = {"matched": list(MATCHED), **asdict(self), "hash": self.key}
        return runs.write_json(Path(folder) / FILE, content)

    @classmethod
    def load(cls, folder: str | Path) -> CopyOdds:
        """Read what `save` wrote. SpecdecError for a missing or damaged file."""
        path = Path(folder) / FILE
        fields = read_json(path, CopiesFile, "count it again")
        odds = cls(fields["hits"], fields["outcomes"], fields["scale"], fields["learned_from"])
        if fields["hash"] != odds.key or fields["matched"] != list(MATCHED):
            raise SpecdecError(f"{path} is damaged or of another version; count it again.")
        return odds


def fit_scale(scores: np.ndarray, right: np.ndarray) -> float:
    """The scale a > 0 for which exp(a x scores [N]) best predicts `right` (maximum likelihood)."""
    log_probs = np.minimum(np.asarray(scores, float), -1e-6)
    correct = np.asarray(right, bool)
    if not correct.any() or correct.all():
        return 1.0

    def negative_log_likelihood(log_scale: float) -> float:
        scaled = np.exp(log_scale) * log_probs
        return -float(scaled[correct].sum() + np.log(-np.expm1(scaled[~correct])).sum())

    best = optimize.minimize_scalar(negative_log_likelihood, bounds=(-2.5, 1.5), method="bounded")
    return float(np.exp(best.x))


@dataclass(frozen=True)
class NgramConfig:
    """Which places are searched, and how much is copied from them."""

    longest: int = 16  # tokens of a match that are compared
    levels: int = 10  # tokens copied along a path
    nodes: int = 24  # of a trie
    places: int = 16  # the newest that end like the text
    children: int = 3  # of a node
    first_place: bool = False  # one path, from the first place of the longest match up to `longest`


PROMPT_LOOKUP = NgramConfig(longest=2, first_place=True, nodes=10)  # transformers' settings
Place = tuple[int, int]  # (tokens that match, where the match ends)


def matches(text: Text, config: NgramConfig) -> list[Place]:
    """The places to copy from, longest matches first, ties by the newest."""
    ends = text.places[text.tokens[-1]][:-1]
    if config.first_place:
        places = [(text.match(end, config.longest), end) for end in ends]
        return [max(places, key=lambda place: (place[0], -place[1]))] if places else []
    # matches of two tokens and more go before newer ones of a single token
    newest = [end for end in ends if text.match(end, 2) == 2][-config.places :]
    if len(newest) < config.places:
        newest += [end for end in ends[-config.places :] if text.match(end, 2) == 1]
    places = [(text.match(end, config.longest), end) for end in newest]
    return sorted(places, reverse=True)[: config.places]


def next_tokens(
    text: Text, places: list[Place], depth: int, children: int
) -> list[tuple[int, list[Place], Evidence]]:
    """What followed `places` after `depth` copied tokens, best first: (token, places, Evidence)."""
    follows: dict[int, list[Place]] = {}
    for match, end in places:
        if end + depth + 1 < len(text.tokens):
            follows.setdefault(text.tokens[end + depth + 1], []).append((match, end))
    ranked = sorted(follows.items(), key=lambda item: (-item[1][0][0], -len(item[1])))
    candidates = []
    for rank, (token, agreeing) in enumerate(ranked[:children]):
        cell = Evidence.of(agreeing[0][0] + depth, len(agreeing), rank, len(ranked))
        candidates.append((token, agreeing, cell))
    return candidates


def trie_of(text: Text, config: NgramConfig, odds: CopyOdds) -> Trie:
    """The `nodes` most probable copies of up to `levels` tokens."""
    nodes: list[tuple[int, int, float]] = []
    heap: list[tuple[float, int, int, int, int, list[Place]]] = []
    order = itertools.count()

    def look(node: int, depth: int, score: float, places: list[Place]) -> None:
        for token, agreeing, cell in next_tokens(text, places, depth, config.children):
            below = score + odds.log_probs[cell]
            heapq.heappush(heap, (-below, next(order), node, depth + 1, token, agreeing))

    look(0, 0, 0.0, matches(text, config))
    while heap and len(nodes) < config.nodes:
        cost, _, parent, depth, token, places = heapq.heappop(heap)
        nodes.append((token, parent, -cost))
        if depth < config.levels:
            look(len(nodes), depth, -cost, places)
    return Trie(*zip(*nodes, strict=True))


class NgramSession(DraftSession):
    """One turn's text."""

    def __init__(self, config: NgramConfig, odds: CopyOdds):
        self.config = config
        self.odds = odds
        self.text = Text()

    def copied(self, ids: Tensor) -> Trie:
        self.text.grow_to(ids)
        return trie_of(self.text, self.config, self.odds)


class NgramDrafter(Drafter):
    """`prompt_lookup` or `suffix` for a target: trees consist of copies, nothing is expanded."""

    forwards = False

    def __init__(self, target: Target, config: NgramConfig | None = None, odds: Any = None):
        self.target = target
        self.config = config or NgramConfig()
        self.odds = odds or CopyOdds()
        self.copied_levels = self.config.levels
        self.fingerprinted = {"kind": "ngrams", **asdict(self.config), "odds": self.odds.key}

    def session(self, context_tok: int, tree_tok: int) -> NgramSession:
        return NgramSession(self.config, self.odds)


class HybridDrafter(Drafter):
    """`drafter`, any that drafts level by level, merged with copies of the text."""

    def __init__(self, drafter: Any, config: NgramConfig | None = None, odds: Any = None):
        self.drafter = drafter
        self.copies = NgramDrafter(drafter.target, config, odds)
        self.copied_levels = self.copies.copied_levels
        for name in "target taps deepest position_limit network target_id".split():
            setattr(self, name, getattr(drafter, name))
        for method in (drafter.refresh, drafter.inference, drafter.run_together):
            setattr(self, method.__name__, method)
        self.fingerprinted = {"kind": "hybrid", "copies": self.copies.fingerprinted}

    def session(self, context_tok: int, tree_tok: int) -> DraftSession:
        """The network's own session, with the copies of another."""
        session: DraftSession = self.drafter.session(context_tok, tree_tok)
        copies = self.copies.session(context_tok, tree_tok)
        session.copied = copies.copied  # type: ignore[method-assign]
        return session


def outcomes(ids: Tensor, first: int, config: NgramConfig) -> Iterator[tuple[Evidence, bool]]:
    """Every copy proposed in cycles from token `first` of ids int64 [T] on, and if it was right.

    A cycle begins after the tokens that the one before it copied and the target's own.
    """
    text = Text()
    tokens = ids.tolist()
    begin = first
    while begin < len(tokens):
        text.grow_to(ids[:begin])
        places = matches(text, config)
        accepted = 0
        for depth, token in enumerate(tokens[begin : begin + config.levels]):
            candidates = next_tokens(text, places, depth, config.children)
            places = []
            for copied, agreeing, cell in candidates:
                yield cell, copied == token
                if copied == token:
                    accepted += 1
                    places = agreeing
        begin += accepted + 1


#     level 0    a1  a2  a3  a4     W columns beside the root, one position further each
#     level 1    b1  b2  b3  b4     levels one further each
#     forward    c1  c2  c3  c4     the target's next tokens after b1 .. b4
#
# Row (l, c) sees the text, the root, level 0 up to its column and its column's levels up to l. The
# n-grams a1 b1 c1, a2 b2 c2, ... go into a pool by their first token; then all moves up a level.
# Those that begin with the root are the candidates. (Fu et al. 2024, section 3.) The text fills the
# pool too. It depends on earlier cycles, so lookahead cannot be recorded.

# The paper's code uses 7 / 5 / 7 for 7B models on a GPU; rows cost more on a CPU.
COLUMNS = 4  # W, of the window
NGRAM = 4  # N, tokens of an n-gram; the window has N - 1 levels
KEPT = 4  # G, n-grams per first token, the newest
STEP_PROB = 0.7  # of every token of a pooled n-gram, less for lower ranks; only orders candidates
NEWER = 0.95  # factor of an n-gram for every newer one with the same first token


class LookaheadSession(DraftSession):
    """One turn: the window, and the pool: first token -> its newest continuations, newest last."""

    def __init__(self, device: torch.device):
        self.pool: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        self.device = device
        # the window grows by a level per forward until there are N - 1
        self.levels: list[list[int]] = []
        self._text: list[int] = []

    def copied(self, ids: Tensor) -> Trie:
        start = len(self._text)
        self._text += ids[start:].tolist()
        if not self.levels:
            # initial guesses: tokens of the prompt, cyclically
            places = range(3, 3 + 7 * COLUMNS, 7)
            self.levels = [[self._text[place % len(self._text)] for place in places]]
        for end in range(max(start + 1, NGRAM), len(self._text) + 1):
            self.add(self._text[end - NGRAM : end])
        return self.continuations(self._text[-1])

    def add(self, ngram: Sequence[int]) -> None:
        """Store N tokens; an n-gram that is there already becomes the newest."""
        first, *rest = ngram
        older = [continuation for continuation in self.pool[first] if continuation != tuple(rest)]
        self.pool[first] = [*older, tuple(rest)][-KEPT:]

    def continuations(self, first: int) -> Trie:
        """The continuations of a token; newer ones score higher."""
        numbers: dict[tuple[int, ...], int] = {(): 0}
        nodes = []
        for age, rest in enumerate(reversed(self.pool[first])):
            for length in range(1, NGRAM):
                path = rest[:length]
                if path not in numbers:
                    numbers[path] = len(numbers)
                    score = math.log(NEWER**age * STEP_PROB**length)
                    nodes.append((path[-1], numbers[path[:-1]], score))
        return Trie(*zip(*nodes, strict=True))

    def window(self, levels: int) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self.levels or len(self.levels) - 1 + COLUMNS > levels:
            return None
        number = torch.arange(len(self.levels) * COLUMNS, device=self.device)
        level = number // COLUMNS
        column = number % COLUMNS
        first_level = (level == 0) & (column <= column[:, None])
        same_column = (column == column[:, None]) & (level <= level[:, None])
        tokens = torch.tensor(self.levels, device=self.device).flatten()
        return tokens, 1 + level + column, first_level | same_column

    def learn(self, logits: Tensor) -> None:
        self.levels.append(logits[-COLUMNS:].argmax(-1).tolist())
        if len(self.levels) == NGRAM:
            for ngram in zip(*self.levels, strict=True):
                self.add(ngram)
            self.levels.pop(0)


class LookaheadDrafter(Drafter):
    """Lookahead for a target: no weights, no network."""

    forwards = False
    copied_levels = NGRAM - 1
    extra_rows = COLUMNS * (NGRAM - 1)

    fingerprinted = {"kind": "lookahead", "columns": COLUMNS, "ngram": NGRAM, "kept": KEPT}

    def __init__(self, target: Target):
        self.target = target

    def session(self, context_tok: int, tree_tok: int) -> LookaheadSession:
        return LookaheadSession(self.target.device)


def load_suffix(folder: Path | None, target: Target, config: Any = None) -> NgramDrafter:
    return NgramDrafter(target, config, None if folder is None else CopyOdds.load(folder))


def load_prompt_lookup(folder: Path | None, target: Target) -> NgramDrafter:
    return load_suffix(folder, target, PROMPT_LOOKUP)


def load_hybrid(folder: Path, target: Target) -> HybridDrafter:
    """The EAGLE drafter in `folder`, and copies with the odds in copies/ inside or beside it."""
    odds = None
    for place in (folder.parent / "copies", folder / "copies"):
        if place.is_dir():
            odds = CopyOdds.load(place)
    return HybridDrafter(load_eagle(folder, target), odds=odds)
