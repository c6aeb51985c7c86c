"""Training text of the small pairs: the corpus as chats, library source, and rows for learning to copy."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from specdec.toy.corpus import Example, drafter_prompts, library_text, training_examples
from specdec.training.drafter.chats import ANSWER, PROMPT, Document


def example_messages(example: Example) -> list[dict]:
    """An example of the corpus as chat messages."""
    messages = []
    for turn, answer in zip(example.turns, example.answers, strict=True):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return messages


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


def library_ids(tokenizer, texts: Iterable[str] | None = None) -> list[np.ndarray]:
    """Each library module as ids [T] (bos first); `texts` replaces the library in tests."""
    sources = [text for _, text in library_text()] if texts is None else list(texts)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    coded = tokenizer(sources, add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array(bos + ids, dtype=np.int64) for ids in coded]


def copy_task(rng: random.Random, vocabulary: Sequence[int], bos: int) -> Document:
    """A few random tokens, then spans of them again: only copying predicts the spans.

    Sources are 2 to 24 tokens, short ones as frequent as long ones, because a model with untrained attention learns
    from the short ones first. Only tokens predictable by copying count as ANSWER.
    """
    source = rng.choices(vocabulary, k=round(2 * 12 ** rng.random()))
    ids, kind = [bos, *source], [PROMPT] * (1 + len(source))
    while len(ids) < 48:
        begin = rng.randrange(len(source)) if len(source) > 4 else 0
        span = source[begin : begin + rng.randint(4, 20)]
        ids += span
        kind += [PROMPT] + [ANSWER] * (len(span) - 1)
    return Document(np.array(ids, dtype=np.int64), np.array(kind, dtype=np.uint8))
