"""Drafting without a model: what followed the same tokens before, in the prompt or in the answer so far, may follow again.

    text       ... the quick brown fox jumps over ... the quick brown |          longest match: 3 tokens
    copied                          fox jumps over ...                 fox jumps over

`prompt_lookup` copies one path: what followed the first place of the longest match (transformers' rule). `suffix` makes a trie
of all places: its nodes are weighed by how often such copies were right on recorded texts (`copy_odds`), longer matches and
more places that agree counting for more.
Both are functions of the text alone, so that recordings of them are exact. Knows nothing about trees, policies or models.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from torch import Tensor

from specdec.core.tries import Trie
from specdec.errors import SpecdecError
from specdec.models.copy_odds import CopyOdds, Evidence
from specdec.models.target import Target


@dataclass(frozen=True)
class NgramConfig:
    """Which places are looked at, and how much is copied from them."""

    longest: int = 16  # tokens of a match that are compared
    shortest: int = 1  # a match of fewer is none
    levels: int = 10  # tokens copied along a path
    nodes: int = 24  # of a trie
    places: int = 16  # looked at: the newest that end like the text
    children: int = 3  # of a node
    first_place: bool = False  # one path, from the first place of the longest match up to `longest`

    def __post_init__(self):
        for name in ("longest", "shortest", "levels", "nodes", "places", "children"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecdecError(f"{name} must be an integer of at least 1, got {value!r}.")
        if self.shortest > self.longest:
            raise SpecdecError(f"shortest={self.shortest} exceeds longest={self.longest}; a match has both bounds.")


PROMPT_LOOKUP = NgramConfig(longest=2, first_place=True, nodes=10)  # as transformers looks up


class Text:
    """A text that grows, and where each of its tokens and pairs of tokens stands."""

    def __init__(self):
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)  # an n-gram of one or two -> where it ends

    def grow_to(self, ids: Tensor) -> None:
        """Read what `ids` has beyond the tokens read already."""
        for token in ids[len(self.tokens) :].tolist():
            self.tokens.append(token)
            end = len(self.tokens) - 1
            self._places[(token,)].append(end)
            if end:
                self._places[self.tokens[end - 1], token].append(end)

    def ends_like(self, width: int) -> list[int]:
        """Earlier places where the text's last one or two tokens end, first to last."""
        return self._places[tuple(self.tokens[-width:])][:-1] if len(self.tokens) >= width else []

    def match(self, place: int, longest: int) -> int:
        """How many tokens up to and including `place` are those that the text ends with; at most `longest`."""
        tokens, last, count = self.tokens, len(self.tokens) - 1, 0
        while count < longest and place - count >= 0 and tokens[place - count] == tokens[last - count]:
            count += 1
        return count


def matches(text: Text, config: NgramConfig) -> list[tuple[int, int]]:
    """(tokens that match, where the match ends) of the newest places, the longest matches first, of equals the newest."""
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


def evidence(text: Text, places: list[tuple[int, int]], depth: int, children: int) -> list[tuple]:
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
    """The most probable `nodes` copies of up to `levels` tokens."""
    found = first_match(text, config) if config.first_place else matches(text, config)
    nodes, waiting, order = [], [], itertools.count()

    def look(node: int, depth: int, score: float, places) -> None:
        for token, own, seen in evidence(text, places, depth, config.children):
            below = score + odds.log_prob(seen)
            heapq.heappush(waiting, (-below, next(order), node, depth + 1, token, own))

    look(0, 0, 0.0, found)
    while waiting and len(nodes) < config.nodes:
        below, _, parent, depth, token, own = heapq.heappop(waiting)
        nodes.append((token, parent, -below))
        if depth < config.levels:
            look(len(nodes), depth, -below, own)
    return Trie(*zip(*nodes, strict=True)) if nodes else Trie()


class NgramSession:
    """One turn's text."""

    def __init__(self, config: NgramConfig, odds: CopyOdds):
        self.config, self.odds, self.text = config, odds, Text()

    def copied(self, ids: Tensor) -> Trie:
        self.text.grow_to(ids)
        return trie_of(self.text, self.config, self.odds)


class NgramDrafter:
    """`prompt_lookup` or `suffix` for a target. Trees of any policy are made of what was copied; there is nothing to expand.

    >>> import specdec
    >>> from specdec.core.tree_config import CopiedTree
    >>> pair = specdec.load_pair("tiny", dtype="float32", drafter="suffix")
    >>> out = specdec.decode(pair, "one two three one two", specdec.Static.of(CopiedTree(8)), max_new_tokens=8)
    >>> out.tokens == specdec.autoregress(pair, "one two three one two", max_new_tokens=8).tokens
    True
    """

    taps, forwards, extra_rows = (), False, 0

    def __init__(self, target: Target, config: NgramConfig | None = None, odds: CopyOdds | None = None):
        self.target, self.config, self.odds = target, config or NgramConfig(), odds or CopyOdds()
        self.copied_levels = self.config.levels

    @property
    def fingerprinted(self) -> dict:
        """What a result depends on."""
        return {"kind": "ngrams", **asdict(self.config), "odds": self.odds.key}

    def inference(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def session(self, context_tok: int, tree_tok: int) -> NgramSession:
        return NgramSession(self.config, self.odds)


def outcomes(ids: Tensor, first: int, config: NgramConfig) -> Iterator[tuple[Evidence, bool]]:
    """Every copy that stood at a place on the text's own path, from token number `first` on, and whether it came true.

    ids int64 [T]. Each place is looked at as a drafter would, with the text up to there.
    """
    text, tokens = Text(), ids.tolist()
    for end in range(first, len(tokens)):
        text.grow_to(ids[:end])
        places = matches(text, config)
        for depth in range(min(config.levels, len(tokens) - end)):
            seen = evidence(text, places, depth, config.children)
            if not seen:
                break
            follows = tokens[end + depth]
            yield from ((what, token == follows) for token, _, what in seen)
            places = next((own for token, own, _ in seen if token == follows), [])
