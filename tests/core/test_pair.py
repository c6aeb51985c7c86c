"""What a pair makes of prompts and of tokens, and which of its models it opens."""

import dataclasses

import numpy as np
import pytest
import torch
from fakes.pairs import shared_bigrams

from specdec.core.pair import dtype_name
from specdec.errors import SpecdecError


class Words:
    """A tokenizer of numbered words; the token 1 is special, 9 begins a chat."""

    chat_template = "yes"

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, tokens, skip_special_tokens):
        return " ".join(str(token) for token in tokens if not (skip_special_tokens and token == 1))

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        assert return_dict is False and add_generation_prompt is True
        return [9] + [int(word) for message in messages for word in message["content"].split()]


def with_words(**facts):
    return dataclasses.replace(shared_bigrams(), **{"tokenizer": Words(), **facts})


def test_texts_become_tokens_and_tokens_texts():
    pair = with_words()
    assert pair.ids_of("3 0 5") == [9, 3, 0, 5] and pair.ids_of("3 0 5", raw=True) == [3, 0, 5]
    assert pair.ids_of([{"role": "user", "content": "7"}]) == [9, 7]
    for ids in ([3, 0, 5], (3, 0, 5), np.int32([3, 0, 5]), torch.tensor([[3, 0, 5]])):
        assert pair.ids_of(ids) == [3, 0, 5]
    assert pair.text_of([3, 1, 5]) == "3 5" and shared_bigrams().text_of([3]) is None
    assert dtype_name(torch.bfloat16) == "bfloat16"


CHAT = [{"role": "user", "content": "7"}]


@pytest.mark.parametrize(
    "tokenizer, prompt, word",
    [
        (None, "3 4", "no tokenizer to read text"),
        (object(), CHAT, "no chat template"),
        (Words(), "", "empty"),
        (Words(), [3, -1], "token id -1"),
        (Words(), [24], "token id 24"),
        (Words(), [[1, 2], [3, 4]], "a prompt is text, token ids"),
        (Words(), torch.tensor([1.0]), "a prompt is text, token ids"),
        (Words(), [{"role": "user"}], "chat messages are"),
    ],
)
def test_what_is_no_prompt(tokenizer, prompt, word):
    pytest.raises(SpecdecError, with_words(tokenizer=tokenizer).ids_of, prompt).match(word)
