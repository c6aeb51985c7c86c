"""Drafting by n-grams: `prompt_lookup` and `suffix` copy what followed the same tokens earlier, `lookahead` generates its own.

    text       ... the quick brown fox jumps over ... the quick brown |          longest match: 3 tokens
    copied                          fox jumps over ...                 fox jumps over

`prompt_lookup` copies one path: the continuation of the longest match's first place (transformers' rule). `suffix` builds a
trie of all places: its nodes are weighted by how often such copies were right on recorded texts (`CopyOdds`); longer matches
and agreement between places count for more. Both depend on the text alone, so that recordings of them are exact.
`hybrid` merges copies with the tree of a network's drafter, on one scale, so that the best nodes of both are
verified; a plan of CopiedTree skips the network for a cycle. `lookahead`: see below.

The table of CopyOdds is of counts; Laplace's rule keeps a cell between its counts and its prior:

    matched    1  2  3  4-5  6-8  9-13  14-     tokens that agree before it, copied ones among them
    places     one · several that agree · the best of several that differ · another of those
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from specdec import runs
from specdec.core.protocols import Drafter, DraftForward, DraftSession
from specdec.core.text import Text
from specdec.core.tree import Trie
from specdec.errors import SpecdecError, check_integer
from specdec.models.eagle_drafter import load_eagle
from specdec.models.target import Target
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
        hits, outcomes = (
            table[seen.places][seen.matched] if table else 0 for table in (self.hits, self.outcomes)
        )
        return (hits + PRIOR_COUNT * prior(seen)) / (outcomes + PRIOR_COUNT)

    def log_prob(self, seen: Evidence) -> float:
        """The logarithm of `probability` on the drafter's scale."""
        return self._log_probs[seen.places][seen.matched]

    @functools.cached_property
    def _log_probs(self) -> list[list[float]]:
        cells = [
            [Evidence(kind, column) for column in range(len(MATCHED))]
            for kind in range(len(PLACES))
        ]
        return [[math.log(self.probability(cell)) / self.scale for cell in row] for row in cells]

    @property
    def table(self) -> list[dict]:
        """A row per cell: places, matched (at least), outcomes, hits, probability."""
        cells = [
            Evidence(kind, column) for kind in range(len(PLACES)) for column in range(len(MATCHED))
        ]
        rows = [{"places": PLACES[kind], "matched": MATCHED[column]} for kind, column in cells]
        for row, (kind, column) in zip(rows, cells, strict=True):
            row |= {"outcomes": self.outcomes[kind][column] if self.outcomes else 0}
            row |= {"hits": self.hits[kind][column] if self.hits else 0}
            row |= {"probability": self.probability(Evidence(kind, column))}
        return rows

    @property
    def _fields(self) -> dict:
        tables = {"hits": list(map(list, self.hits)), "outcomes": list(map(list, self.outcomes))}
        return {
            "matched": list(MATCHED),
            **tables,
            "scale": self.scale,
            "learned_from": self.learned_from,
        }

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
            raise SpecdecError(
                f"there is no {FILE} in {folder}; name the folder that it was saved to."
            )
        stored = runs.read_json(path, CopiesFile, advice := "count it again")
        odds = cls(
            *(tuple(map(tuple, stored[name])) for name in ("hits", "outcomes")),
            stored["scale"],
            stored["learned_from"],
        )
        if stored["hash"] != odds.key or stored["matched"] != list(MATCHED):
            raise SpecdecError(f"{path} is damaged or of another version; {advice}.")
        for hits, outcomes in zip(odds.hits, odds.outcomes, strict=False):
            if not (
                len(hits) == len(outcomes) == len(MATCHED) and all(map(operator.le, hits, outcomes))
            ):
                bins = f"the match-length bins differ from {list(MATCHED)}"
                raise SpecdecError(f"{path}: hits exceed outcomes, or {bins}; {advice}.")
        if not len(odds.hits) == len(odds.outcomes) in (0, len(PLACES)):
            raise SpecdecError(
                f"{path} has {len(odds.hits)} kinds of places, not {len(PLACES)}; {advice}."
            )
        return odds


def fit_scale(scores, right) -> float:
    """The scale a > 0 for which exp(a x score) best predicts correct nodes (maximum likelihood).

    scores: cumulative draft log-probabilities [N]; right: bool [N].
    """
    scores, right = np.minimum(np.asarray(scores, float), -1e-6), np.asarray(right, bool)
    if not right.any() or right.all():
        return 1.0

    def negative_log_likelihood(log_scale: float) -> float:
        log_p = np.exp(log_scale) * scores
        return -float(log_p[right].sum() + np.log(-np.expm1(log_p[~right])).sum())

    return float(
        np.exp(
            scipy.optimize.minimize_scalar(
                negative_log_likelihood, bounds=(-2.5, 1.5), method="bounded"
            ).x
        )
    )


@dataclass(frozen=True)
class NgramConfig:
    """Which places are searched, and how much is copied from them."""

    longest: int = 16  # tokens of a match that are compared
    shortest: int = 1  # shorter matches are ignored
    levels: int = 10  # tokens copied along a path
    nodes: int = 24  # of a trie
    places: int = 16  # the newest that end like the text
    children: int = 3  # of a node
    first_place: bool = False  # one path, from the first place of the longest match up to `longest`

    def __post_init__(self):
        for name in ("longest", "shortest", "levels", "nodes", "places", "children"):
            check_integer(name, vars(self)[name], 1)
        if self.shortest > self.longest:
            raise SpecdecError(
                f"shortest={self.shortest} exceeds longest={self.longest}; a match has both bounds."
            )


PROMPT_LOOKUP = NgramConfig(longest=2, first_place=True, nodes=10)  # transformers' settings


def matches(text: Text, config: NgramConfig) -> list[tuple[int, int]]:
    """(tokens that match, where the match ends) of the newest places, longest matches first, ties by the newest."""
    found = text.ends_like(2)[-config.places :]
    if len(found) < config.places and config.shortest == 1:
        known = set(found)
        found = [end for end in text.ends_like(1)[-config.places :] if end not in known] + found
    found = [(text.match(end, config.longest), end) for end in found]
    return sorted((m for m in found if m[0] >= config.shortest), reverse=True)[: config.places]


def first_match(text: Text, config: NgramConfig) -> list[tuple[int, int]]:
    """The first place of the longest match, counted up to `longest`; [] for none."""
    for width in range(min(config.longest, len(text.tokens) - 1), config.shortest - 1, -1):
        for end in text.ends_like(min(width, 2)):
            if text.match(end, width) == width:
                return [(width, end)]
    return []


def next_tokens(
    text: Text, places: list[tuple[int, int]], depth: int, children: int
) -> list[tuple]:
    """What followed `places` [(match, end)] after `depth` copied tokens: [(token, its places, its Evidence)], best first."""
    follows: dict[int, list[tuple[int, int]]] = {}
    for match, end in places:
        if end + depth + 1 < len(text.tokens):
            follows.setdefault(text.tokens[end + depth + 1], []).append((match, end))
    ranked = sorted(follows.items(), key=lambda item: (-item[1][0][0], -len(item[1])))
    return [
        (token, own, Evidence.of(own[0][0] + depth, len(own), rank, len(ranked)))
        for rank, (token, own) in enumerate(ranked[:children])
    ]


def trie_of(text: Text, config: NgramConfig, odds: CopyOdds) -> Trie:
    """The `nodes` most probable copies of up to `levels` tokens."""
    found = first_match(text, config) if config.first_place else matches(text, config)
    nodes, waiting, order = [], [], itertools.count()

    def look(node: int, depth: int, score: float, places) -> None:
        for token, own, seen in next_tokens(text, places, depth, config.children):
            below = score + odds.log_prob(seen)
            heapq.heappush(waiting, (-below, next(order), node, depth + 1, token, own))

    look(0, 0, 0.0, found)
    while waiting and len(nodes) < config.nodes:
        below, _, parent, depth, token, own = heapq.heappop(waiting)
        nodes.append((token, parent, -below))
        if depth < config.levels:
            look(len(nodes), depth, -below, own)
    return Trie(*zip(*nodes, strict=True)) if nodes else Trie()


class NgramSession(DraftSession):
    """One turn's text."""

    def __init__(self, config: NgramConfig, odds: CopyOdds):
        self.config, self.odds, self.text = config, odds, Text()

    def copied(self, ids: Tensor) -> Trie:
        self.text.grow_to(ids)
        return trie_of(self.text, self.config, self.odds)


class NgramDrafter(Drafter):
    """`prompt_lookup` or `suffix` for a target. Trees of any policy consist of copies; there is nothing to expand.

    >>> import specdec
    >>> from specdec.core.tree_config import CopiedTree
    >>> pair = specdec.load_pair("tiny", dtype="float32", drafter="suffix")
    >>> out = specdec.decode(pair, "one two three one two", specdec.Static.of(CopiedTree(8)), max_new_tokens=8)
    >>> out.tokens == specdec.autoregress(pair, "one two three one two", max_new_tokens=8).tokens
    True
    """

    forwards = False

    def __init__(
        self, target: Target, config: NgramConfig | None = None, odds: CopyOdds | None = None
    ):
        self.target, self.config, self.odds = target, config or NgramConfig(), odds or CopyOdds()
        self.copied_levels = self.config.levels
        self.fingerprinted = {"kind": "ngrams", **asdict(self.config), "odds": self.odds.key}

    def session(self, context_tok: int, tree_tok: int) -> NgramSession:
        return NgramSession(self.config, self.odds)


def outcomes(
    ids: Tensor, first: int, config: NgramConfig, ends: Iterable[int] | None = None
) -> Iterator[tuple[Evidence, bool]]:
    """Every copy proposed along the text's own path in cycles from token number `first` on, and whether it was right.

    ids int64 [T]. A cycle begins after the tokens that the one before it copied and the target's own. ends: instead, after these
    numbers of tokens, ascending. At each place the drafter sees the text up to there.
    """
    text, tokens, begins = Text(), ids.tolist(), first
    for end in range(first, len(tokens)) if ends is None else ends:
        if ends is None and end < begins:
            continue
        text.grow_to(ids[:end])
        places, begins = matches(text, config), end + 1
        for depth in range(min(config.levels, len(tokens) - end)):
            seen = next_tokens(text, places, depth, config.children)
            if not seen:
                break
            follows = tokens[end + depth]
            yield from ((what, token == follows) for token, _, what in seen)
            begins += any(token == follows for token, *_ in seen)
            places = next((own for token, own, _ in seen if token == follows), [])


class HybridSession(DraftSession):
    """The network drafter's session, and the turn's text."""

    def __init__(self, drafting: DraftSession, copying: NgramSession):
        self.drafting, self.copying = drafting, copying
        self.root, self.expand = drafting.root, drafting.expand

    @property
    def root_state(self) -> Tensor | None:
        return self.drafting.root_state

    def copied(self, ids: Tensor) -> Trie:
        return self.copying.copied(ids)


class HybridDrafter(Drafter):
    """`drafter`, any that drafts level by level, merged with copies of the text.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32", drafter="hybrid")
    >>> out = specdec.decode(pair, "one two three one two", specdec.Static(8, 2, 3), max_new_tokens=8)
    >>> out.tokens == specdec.autoregress(pair, "one two three one two", max_new_tokens=8).tokens
    True
    """

    def __init__(
        self, drafter: Drafter, config: NgramConfig | None = None, odds: CopyOdds | None = None
    ):
        self.drafter, self.copies = drafter, NgramDrafter(drafter.target, config, odds)
        self.target, self.taps, self.deepest = drafter.target, drafter.taps, drafter.deepest
        self.network, self.target_id = drafter.network, drafter.target_id
        self.copied_levels = self.copies.copied_levels
        self.fingerprinted = {"kind": "hybrid", "copies": self.copies.fingerprinted}

    def refresh(self) -> None:
        self.drafter.refresh()

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        return self.drafter.run_together(
            [replace(one, session=one.session.drafting) for one in forwards]
        )

    def session(self, context_tok: int, tree_tok: int) -> HybridSession:
        return HybridSession(
            self.drafter.session(context_tok, tree_tok), self.copies.session(context_tok, tree_tok)
        )


#
#     level 0    a1  a2  a3  a4        W columns beside the root, one position further each; levels one further each
#     level 1    b1  b2  b3  b4        row (l, c) sees the text, the root, level 0 up to its column, its column's levels up to l
#     forward    the target's next tokens after b1 .. b4 are c1 .. c4: n-grams a1 b1 c1, a2 b2 c2, ...; all moves up a level
#
# The n-grams go into a pool by their first token; those that begin with the root are the candidates. (Fu et al. 2024,
# section 3; their code credits a matched n-gram one token short, this does not.) The pool depends on earlier cycles, so
# lookahead is measured live and cannot be recorded.

STEP_PROB = 0.7  # of every token of a pooled n-gram, less for lower ranks; only orders candidates
NEWER = 0.95  # factor of an n-gram for every newer one with the same first token


@dataclass(frozen=True)
class LookaheadConfig:
    """The window and the pool. The paper's code uses 7 / 5 / 7 for 7B models on a GPU; rows cost more on a CPU."""

    columns: int = 4  # W, of the window
    ngram: int = 4  # N, tokens of an n-gram; the window has N - 1 levels
    kept: int = 4  # G, n-grams per first token, the newest
    from_prompt: bool = True  # also fill the pool from the prompt and the text

    def __post_init__(self):
        for name, low in (("columns", 1), ("ngram", 2), ("kept", 1)):
            check_integer(name, vars(self)[name], low)

    @property
    def rows(self) -> int:
        """Rows of the target's forward, beside the tree."""
        return self.columns * (self.ngram - 1)


class NgramPool:
    """first token -> the newest `kept` continuations of N - 1 tokens, the newest last."""

    def __init__(self, config: LookaheadConfig):
        self.config, self._of = config, {}

    def add(self, ngram: list[int]) -> None:
        """Store N tokens; a known n-gram becomes the newest."""
        found = self._of.setdefault(ngram[0], OrderedDict())
        found.pop(rest := tuple(ngram[1:]), None)
        found[rest] = None
        if len(found) > self.config.kept:
            found.popitem(last=False)

    def trie(self, first: int) -> Trie:
        """The continuations of a token as a trie; newer ones score higher."""
        nodes: dict[tuple[int, ...], int] = {(): 0}
        rows = []
        for age, rest in enumerate(reversed(self._of.get(first, ()))):
            for length in range(1, len(rest) + 1):
                if (path := rest[:length]) not in nodes:
                    rows.append(
                        (path[-1], nodes[path[:-1]], math.log(NEWER**age * STEP_PROB**length))
                    )
                    nodes[path] = len(rows)
        return Trie(*zip(*rows, strict=True)) if rows else Trie()


class LookaheadSession(DraftSession):
    """One turn: the current window, and the pool."""

    def __init__(self, config: LookaheadConfig, device: torch.device):
        self.config, self.pool, self.device = config, NgramPool(config), device
        self.levels: list[
            list[int]
        ] = []  # of the window; one more is filled per forward until there are N - 1
        self._read: list[int] = []
        number = torch.arange(config.rows, device=device)
        self._level, self._column = number // config.columns, number % config.columns

    def copied(self, ids: Tensor) -> Trie:
        known, count = len(self._read), self.config.ngram
        self._read += ids[known:].tolist()
        if not self.levels:  # initial guesses: tokens of the prompt, cyclically
            self.levels = [
                [self._read[(7 * c + 3) % len(self._read)] for c in range(self.config.columns)]
            ]
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


class LookaheadDrafter(Drafter):
    """Lookahead for a target: no weights, no network.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32", drafter="lookahead")
    >>> out = specdec.decode(pair, "one two three one two", specdec.Static(8, 2, 3), max_new_tokens=8)
    >>> out.tokens == specdec.autoregress(pair, "one two three one two", max_new_tokens=8).tokens
    True
    """

    forwards = False

    def __init__(self, target: Target, config: LookaheadConfig | None = None):
        self.target, self.config = target, config or LookaheadConfig()
        self.copied_levels, self.extra_rows = self.config.ngram - 1, self.config.rows
        self.fingerprinted = {"kind": "lookahead", **asdict(self.config)}

    def session(self, context_tok: int, tree_tok: int) -> LookaheadSession:
        return LookaheadSession(self.config, self.target.device)


def load_suffix(
    folder: Path | None, target: Target, config: NgramConfig | None = None
) -> NgramDrafter:
    """Copies from all places, with the copy odds in `folder` if present."""
    return NgramDrafter(target, config, folder and CopyOdds.load(folder))


load_prompt_lookup = functools.partial(load_suffix, config=PROMPT_LOOKUP)


def load_hybrid(folder: Path, target: Target) -> HybridDrafter:
    """The EAGLE drafter in `folder` and copies.

    The odds of the copies are in copies/, inside the folder or beside it.
    """
    drafter = load_eagle(folder, target)
    for place in (folder / "copies", folder.parent / "copies"):
        if place.is_dir():
            return HybridDrafter(drafter, odds=CopyOdds.load(place))
    return HybridDrafter(drafter)
