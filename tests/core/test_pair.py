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


def test_texts_become_tokens_and_tokens_texts():
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


CHAT = [{"role": "user", "content": "7"}]
NONE = dict(tokenizer=None)


@pytest.mark.parametrize(
    "facts, prompt, word",
    [
        (NONE, "3 4", "no tokenizer to read text"),
        (NONE, CHAT, "no tokenizer to read chat"),
        (dict(tokenizer=object()), CHAT, "no chat template"),
        ({}, "", "empty"),
        ({}, [], "empty"),
        ({}, [3, -1], "token id -1"),
        ({}, [24], "token id 24"),
        ({}, [3, "4"], "a list of other things"),
        ({}, [1.5], "a list of other things"),
        ({}, [[1, 2], [3, 4]], "a list of other things"),
        ({}, [{"role": "user"}], "chat messages are"),
        ({}, [*CHAT, "y"], "chat messages are"),
        ({}, torch.tensor([1.0]), "other things"),
        ({}, (True, 3), "a tuple of other things"),
        ({}, {3: 4}, "a dict"),
        ({}, None, "a NoneType"),
    ],
)
def test_what_is_no_prompt(facts, prompt, word):
    pair = dataclasses.replace(with_words(), **facts)
    pytest.raises(SpecdecError, pair.ids_of, prompt).match(word)


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
