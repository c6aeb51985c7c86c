"""Training text and prompts written by generators: sixteen task families, seeded, with test prompts held out by hash.

Knows nothing about tokenizers, models or how answers are scored. Importing it generates nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from specdec.errors import SpecdecError, nearest_name_error
from specdec.toy.corpus import chat, code, instruct, maths, news, passages, structured, translation, writing
from specdec.toy.corpus.example import Example, held_out, prompt_digest
from specdec.toy.corpus.library import library_text

__all__ = ["FAMILIES", "Example", "generate", "held_out", "library_text", "prompt_digest", "training_examples"]

_MAKERS = {
    name: maker
    for module in (chat, code, instruct, maths, news, passages, structured, translation, writing)
    for name, maker in module.MAKERS.items()
}
FAMILIES: tuple[str, ...] = tuple(_MAKERS)


def _example(family: str, seed: int, index: int) -> Example:
    return _MAKERS[family](random.Random(f"{family}/{seed}/{index}"))


def generate(family: str, seed: int, count: int) -> Iterator[Example]:
    """The first `count` examples of a family's stream; the stream depends on (family, seed) alone.

    Both held-out and trainable prompts appear. Raises SpecdecError for an unknown family.
    """
    if family not in _MAKERS:
        raise nearest_name_error("family", family, FAMILIES)
    return (_example(family, seed, index) for index in range(count))


def training_examples(seed: int, count: int, weights: dict | None = None) -> Iterator[Example]:
    """`count` examples drawn from all families (or from `weights`: family -> relative weight); never a held-out prompt.

    Deterministic in (seed, weights), with the prefix property. Raises SpecdecError for unknown families or no weight.
    """
    weights = dict.fromkeys(FAMILIES, 1.0) if weights is None else dict(weights)
    for family in weights:
        if family not in _MAKERS:
            raise nearest_name_error("family", family, FAMILIES)
    if not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise SpecdecError("corpus weights must be non-negative and not all zero; give at least one family a weight.")
    return _mixture(seed, count, weights)


def _mixture(seed: int, count: int, weights: dict) -> Iterator[Example]:
    names, chances = list(weights), list(weights.values())
    chooser, position, made = random.Random(f"mixture/{seed}"), dict.fromkeys(weights, 0), 0
    while made < count:
        family = chooser.choices(names, chances)[0]
        example = _example(family, seed, position[family])
        position[family] += 1
        if not held_out(example):
            made += 1
            yield example
