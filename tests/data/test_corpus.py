"""The text of the toy: what was drawn for the shipped pairs comes first, the rest goes round."""

import hashlib
import itertools
import json

import pytest

from specdec.data import corpus
from specdec.data.corpus import CorpusChats


def first(stream, count):
    return list(corpus.training_examples(stream, count))


def digest(chats):
    return hashlib.sha256(json.dumps(list(chats)).encode()).hexdigest()[:16]


def test_shipped_pairs_and_drafters_read_what_the_generators_drew():
    for stream, count, drawn in (
        ("0/0", 180, "661f98c9c4162275"),
        ("0/18", 180, "84ba4e403d8bb66d"),
        ("drafter/0/7", 280, "034959b00497dd8e"),
    ):
        assert digest(itertools.islice(CorpusChats().stream(stream), count)) == drawn
    chats = CorpusChats()
    assert digest(chats.prompts(0, 2000)) == "0f821219c1131fd2"
    assert chats.prompts(0, 30) == chats.prompts(0, 99)[:30] != chats.prompts(1, 30)
    assert len(chats.prompts(0, 10**6)) == len(corpus.streams()[corpus.PROMPTS])


@pytest.mark.parametrize("stream", ["0/18", "5/0", 3])
def test_a_stream_that_ends_goes_on_with_all_chats_in_a_new_order(stream):
    drawn = corpus.streams().get(str(stream), [])
    rows = []
    for name, part in corpus.streams().items():
        if name not in ("drafter/0", "0/record"):
            rows += part
    twice = first(stream, len(drawn) + 2 * len(rows))
    once, again = twice[len(drawn) : -len(rows)], twice[-len(rows) :]
    assert twice[: len(drawn)] == drawn and once != again
    assert sorted(once) == sorted(again) == sorted(rows)
    assert first(stream, 40) == twice[:40] != first("another", 40)
