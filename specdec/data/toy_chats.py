"""Training text of the small pairs: the corpus as chats."""

from __future__ import annotations

import random
from collections.abc import Iterator

from specdec.data.corpus import Example, drafter_prompts, training_examples

JOINED_FRAC = 0.2  # examples that continue the chat before them


def example_messages(example: Example) -> list[dict]:
    """An example of the corpus as chat messages."""
    messages = []
    for turn, answer in zip(example.turns, example.answers, strict=True):
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer})
    return messages


class CorpusChats:
    """The corpus as a ChatSource (training.drafter.chats)."""

    key = None

    def prompts(self, seed: int, count: int) -> list[list[dict]]:
        """At most `count` conversations that are not in the target's own training stream."""
        return [example_messages(example) for example in drafter_prompts(seed, count)]

    def stream(self, block_seed: str) -> Iterator[list[dict]]:
        """Conversations of one block of rows, without end."""
        rng = random.Random(f"joined/{block_seed}")
        messages: list[dict] = []
        for example in training_examples(block_seed):
            if messages and rng.random() >= JOINED_FRAC:
                yield messages
                messages = []
            messages = messages + example_messages(example)
