"""What a pair makes of prompts and of tokens, and which of its models it opens."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from fakes.pairs import shared_bigrams

import specdec
from specdec.core.pair import dtype_name
from specdec.errors import SpecdecError


class Words:  # a tokenizer of numbered words; the token 1 is special
    chat_template = "yes"

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, tokens, skip_special_tokens):
        return " ".join(str(token) for token in tokens if not (skip_special_tokens and token == 1))

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        assert return_dict is False and add_generation_prompt is True
        return [int(word) for message in messages for word in message["content"].split()]


def with_words(**facts):
    return dataclasses.replace(shared_bigrams(), tokenizer=Words(), **facts)


def test_texts_become_tokens_and_tokens_texts_and_what_is_no_prompt_is_refused():
    pair = with_words()
    assert (
        pair.ids_of("3 0 5")
        == [3, 0, 5]
        == pair.ids_of([3, 0, 5])
        == pair.ids_of(torch.tensor([[3, 0, 5]]))
    )
    assert pair.ids_of([torch.tensor(3), torch.tensor(0)]) == [3, 0]
    assert type(pair.ids_of(torch.tensor([5]))[0]) is int
    assert pair.ids_of((3, 0, 5)) == pair.ids_of(np.int32([3, 0, 5])) == [3, 0, 5]
    assert pair.ids_of(range(2)) == [0, 1]
    assert pair.ids_of([{"role": "user", "content": "7"}]) == [7]
    assert pair.text_of(iter([3, 1, 5])) == "3 5" and shared_bigrams().text_of([3]) is None
    assert dtype_name(torch.bfloat16) == "bfloat16" and dtype_name("float32") == "float32"
    assert specdec.load_pair("tiny").text_of([]) == ""
    for facts, prompt, message in (
        (dict(tokenizer=None), "3 4", "'a pair' has no tokenizer to read text;"),
        (
            dict(tokenizer=None),
            [{"role": "user", "content": "7"}],
            "'a pair' has no tokenizer to read chat messages;",
        ),
        (
            dict(tokenizer=object()),
            [{"role": "user", "content": "7"}],
            "tokenizer of 'a pair' has no chat template;",
        ),
        *(
            ({}, nothing, "^the prompt is empty; ")
            for nothing in ("", [], torch.tensor([], dtype=torch.long))
        ),
        ({}, [3, -1], "^token id -1 is outside the target's vocabulary of 24; "),
        ({}, [24], "^token id 24 is outside"),
        *(
            ({}, bad, r"got a list of other things\.$")
            for bad in ([3, "4"], [1.5], [[1, 2], [3, 4]], ["the"])
        ),
        *(
            ({}, [*bad, {"role": "user"}], "^chat messages are a list of")
            for bad in ([], [{"role": "user", "content": "x"}, "y"])
        ),
        ({}, torch.tensor([1.0]), "of other things"),
        ({}, (True, 3), r"got a tuple of other things\.$"),
        ({}, {3: 4}, r"got a dict\.$"),
        ({}, 5.5, r"got a float\.$"),
        ({}, None, r"got a NoneType\.$"),
    ):
        pair = dataclasses.replace(with_words(name="a pair"), **facts)
        pytest.raises(SpecdecError, pair.ids_of, prompt).match(message)


def test_plain_decoding_opens_the_target_alone(monkeypatch):
    opened, pair = [], shared_bigrams()

    @contextlib.contextmanager
    def opens(what, **how):
        opened.append((what, how))
        yield

    monkeypatch.setattr(pair.target, "inference", lambda **how: opens("target", **how))
    monkeypatch.setattr(pair.drafter, "inference", lambda: opens("drafter"))
    for plain in (True, False):
        with pair.inference(plain=plain):
            pass
    assert opened == [("target", {"taps": False}), ("target", {"taps": True}), ("drafter", {})]
