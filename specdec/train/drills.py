"""Rows that teach a small model to copy, and nothing else. Knows nothing about corpora, packing or models."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from specdec.train.data import ANSWER, PROMPT, Document


def copy_drill(rng: random.Random, vocabulary: Sequence[int], bos: int) -> Document:
    """A few random tokens, then spans of them again: nothing but copying predicts the spans.

    Small models take millions of tokens of ordinary text to discover copying. Sources are 2 to 24 tokens, short ones
    as frequent as long ones, because a model that still looks everywhere learns from the short ones first. Only what
    copying predicts counts as ANSWER.
    """
    source = rng.choices(vocabulary, k=round(2 * 12 ** rng.random()))
    ids, kind = [bos, *source], [PROMPT] * (1 + len(source))
    while len(ids) < 48:
        begin = rng.randrange(len(source)) if len(source) > 4 else 0
        span = source[begin : begin + rng.randint(4, 20)]
        ids += span
        kind += [PROMPT] + [ANSWER] * (len(span) - 1)
    return Document(np.array(ids, dtype=np.int64), np.array(kind, dtype=np.uint8))
