"""The text of the toy: what was drawn for the shipped pairs comes first and as ever, the rest goes round; nothing held out."""

import hashlib
import itertools
import json
import lzma
import re

import pytest
from fakes.chats import held_out

from specdec.data import corpus
from specdec.data.suites import TOY, load_suite
from specdec.data.toy_chats import CorpusChats
from specdec.errors import SpecdecError


def families():
    return sorted({example.family for example in corpus.streams()[corpus.PROMPTS]})


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
    assert digest(CorpusChats().prompts(0, 2000)) == "0f821219c1131fd2"
    assert (
        CorpusChats().prompts(0, 30)
        == CorpusChats().prompts(0, 99)[:30]
        != CorpusChats().prompts(1, 30)
    )
    assert len(corpus.drafter_prompts(0, 10**6)) == len(corpus.streams()[corpus.PROMPTS])
    read = set(first("0/99", 40_000))
    for stream in (corpus.PROMPTS, corpus.RECORDED):
        apart = corpus.streams()[stream]
        assert len(read & set(apart)) < 0.01 * len(apart), (
            "the generators draw the same chat twice now and then"
        )


@pytest.mark.parametrize("stream", ["0/18", "0/99", "5/0", 3])
def test_a_stream_that_ends_goes_on_with_all_chats_in_an_order_of_its_own(stream):
    drawn = corpus.streams().get(str(stream), [])
    rows = [
        one
        for name, part in corpus.streams().items()
        for one in part
        if name not in ("drafter/0", "0/record")
    ]
    twice = first(stream, len(drawn) + 2 * len(rows))
    once, again = twice[len(drawn) : -len(rows)], twice[-len(rows) :]
    assert twice[: len(drawn)] == drawn and once != again
    assert sorted(once) == sorted(again) == sorted(rows)
    assert first(stream, 40) == twice[:40] != first("another", 40)


def test_chats_are_plain_of_sixteen_families_and_of_no_test_suite():
    assert len(families()) == 16
    for example in first("0/0", 1100) + first("0/record", 1600):
        whole = "".join(example.turns + example.answers)
        assert (
            whole.isascii()
            and len(whole) < 900
            and all(map(str.strip, example.turns + example.answers))
        )
        assert len(example.turns) == len(example.answers) == (2 if example.family == "chat" else 1)
    assert {example.family for example in first("0/99", 2000)} == set(families())
    chats = [example for part in corpus.streams().values() for example in part]
    assert len(chats) == 32_449 and not any(held_out(example.turns[0]) for example in chats)
    tested = {prompt.turns[0] for suite in TOY for prompt in load_suite(suite)}
    assert not tested & {example.turns[0] for example in chats} and all(map(held_out, tested))
    assert held_out("A  b\nC") == held_out("a b c")  # spacing and case do not move a prompt


def test_worked_answers_are_right():
    sums = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for example in (one for one in first("0/0", 4000) if one.family == "maths"):
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", example.answers[0])
        assert 1 <= len(steps) <= 5 and example.answers[0].endswith(f"\nAnswer: {steps[-1][3]}")
        assert all(
            sums[sign](int(left), int(right)) == int(shown) for left, sign, right, shown in steps
        )


def test_a_damaged_text_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "FILE", tmp_path / "corpus.jsonl.xz")
    pytest.raises(SpecdecError, corpus.streams.__wrapped__).match("no file")
    for content in (b"no archive", lzma.compress(b"[]")[:-9]):
        corpus.FILE.write_bytes(content)
        pytest.raises(SpecdecError, corpus.streams.__wrapped__).match("as chats")
