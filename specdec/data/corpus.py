"""The corpus of the small pairs: 32,449 chats of sixteen task families.

The chats ship as text, `corpus.jsonl.xz`, in the order in which the shipped pairs read them with
seed 0. A chat's `stream` is its purpose: "0/tokenizer", "0/<block>" (of the target's rows),
"drafter/0/<block>" (of the drafter's rows), "drafter/0" (prompts that the target answers again for
its drafter) and "0/record" (prompts of recordings). No prompt of a test suite is among them.

Trainings longer than the text, or with other seeds, read the same chats again in random orders.
"""

from __future__ import annotations

import functools
import json
import lzma
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("corpus.jsonl.xz")
PROMPTS, RECORDED = "drafter/0", "0/record"  # streams that are not used for rows


class Example(NamedTuple):
    """One conversation: its task family, the user's turns and the reference answers."""

    family: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]


@functools.cache
def streams() -> dict[str, list[Example]]:
    """{stream: its chats, in order}."""
    chats: dict[str, list[Example]] = {}
    with lzma.open(FILE, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            example = Example(row["family"], tuple(row["turns"]), tuple(row["answers"]))
            chats.setdefault(row["stream"], []).append(example)
    return chats


def training_examples(stream: str | int, count: int | None = None) -> Iterator[Example]:
    """`count` chats (None: no end): those of `stream`, then all in one new order after another.

    >>> next(training_examples("0/0", 1)).family
    'howto'
    """
    return islice(_without_end(str(stream)), count)


def _without_end(stream: str) -> Iterator[Example]:
    yield from streams().get(stream, [])
    rows: list[Example] = []
    for name, chats in streams().items():
        if name not in (PROMPTS, RECORDED):
            rows += chats
    rng = random.Random(f"corpus/{stream}")
    while True:
        yield from rng.sample(rows, len(rows))


def drafter_prompts(seed: int, count: int) -> list[Example]:
    """At most `count` chats that no target is trained on; seeds other than 0 change the order."""
    chats = streams()[PROMPTS]
    if seed != 0:
        chats = random.Random(seed).sample(chats, len(chats))
    return chats[:count]
