"""Training text of the small pairs: the corpus as chats."""

from __future__ import annotations

import random
from collections.abc import Iterator

from specdec.data.corpus import Example, drafter_prompts, training_examples


def example_messages(example: Example) -> list[dict]:
    """An example of the corpus as chat messages."""
    texts = (text for both in zip(example.turns, example.answers, strict=True) for text in both)
    return [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(texts)
    ]


class CorpusChats:
    """The corpus as a ChatSource (training.drafter.chats).

    joined_frac: probability that an example continues the conversation before it in place of starting a new one, so that the
    model sees chats of several unrelated turns.
    """

    key = None

    def __init__(self, joined_frac: float = 0.2):
        self.joined_frac = joined_frac

    def prompts(self, seed: int, count: int) -> list[list[dict]]:
        """At most `count` conversations that are not in the target's own training stream."""
        return [example_messages(example) for example in drafter_prompts(seed, count)]

    def stream(self, block_seed: str) -> Iterator[list[dict]]:
        """Conversations of one block of rows, without end."""
        rng, messages = random.Random(f"joined/{block_seed}"), []
        for example in training_examples(block_seed):
            if messages and rng.random() >= self.joined_frac:
                yield messages
                messages = []
            messages = messages + example_messages(example)
