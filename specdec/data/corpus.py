"""The corpus of the small pairs, and their training text: 32,449 chats of sixteen task families.

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
JOINED_FRAC = 0.2  # examples that continue the chat before them


class Example(NamedTuple):
    """One conversation: its task family, the user's turns and the reference answers."""

    family: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]

    @property
    def messages(self) -> list[dict]:
        """The chat's messages."""
        messages = []
        for turn, answer in zip(self.turns, self.answers, strict=True):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": answer})
        return messages


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
    """`count` chats (None: no end): those of `stream`, then all in one new order after another."""
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


class CorpusChats:
    """The corpus as a ChatSource (training.drafter.chats)."""

    key = None

    def prompts(self, seed: int, count: int) -> list[list[dict]]:
        """At most `count` conversations that are not in the target's own training stream."""
        chats = streams()[PROMPTS]
        if seed != 0:
            chats = random.Random(seed).sample(chats, len(chats))
        return [example.messages for example in chats[:count]]

    def stream(self, block_seed: str) -> Iterator[list[dict]]:
        """Conversations of one block of rows, without end."""
        rng = random.Random(f"joined/{block_seed}")
        messages: list[dict] = []
        for example in training_examples(block_seed):
            # some chats continue, so that drafters see several turns
            if messages and rng.random() >= JOINED_FRAC:
                yield messages
                messages = []
            messages = messages + example.messages
