"""What plain `generate` would honour and the cycle cannot is refused; what it can is done."""

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.stopping_criteria import StopStringCriteria

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.models.transformers_generate import generate

ONE = torch.tensor([[1]])


@pytest.fixture
def ids(tiny):
    return torch.tensor([tiny.ids_of("Hello there")])


@pytest.fixture
def call(tiny, ids):
    def call(input_ids=ids, plain=False, **settings):
        drafted = {"custom_generate": generate, "drafter": tiny.drafter, "policy": Static(8, 3, 2)}
        settings = {"max_new_tokens": 12, "do_sample": False, **settings}
        if not plain:
            settings = {**drafted, **settings}
        return tiny.target.model.generate(input_ids, **settings)

    return call


def test_greedy_texts_with_padding_processors_and_stop_strings(tiny, call, ids):
    plain = call(plain=True)
    assert torch.equal(call(), plain)
    padded = torch.nn.functional.pad(ids, (2, 0))
    mask = (torch.arange(padded.shape[1])[None] >= 2).long()
    assert torch.equal(call(padded, attention_mask=mask)[:, 2:], plain)
    assert torch.equal(call(past_key_values=DynamicCache()), plain)
    processors = [lambda ids, scores: scores.roll(1, -1)]
    other = call(plain=True, logits_processor=processors)
    assert torch.equal(call(logits_processor=processors), other)
    assert not torch.equal(other, plain)
    text = tiny.tokenizer.decode(plain[0, ids.shape[1] :])
    stop = [StopStringCriteria(tiny.tokenizer, [text.strip()[3]])]
    shorter = call(stopping_criteria=stop)
    assert shorter.shape[1] < plain.shape[1]
    assert torch.equal(shorter, call(plain=True, stopping_criteria=stop))


def test_sampled_texts_follow_the_seed(call):
    first = call(do_sample=True, seed=3)
    assert torch.equal(call(do_sample=True, seed=3), first)
    torch.manual_seed(1)
    drawn = call(do_sample=True)
    torch.manual_seed(1)
    assert torch.equal(call(do_sample=True), drawn)


REFUSED = [
    ("one prompt at a time", {"input_ids": torch.ones(2, 3, dtype=torch.long)}),
    ("num_beams", {"num_beams": 2}),
    ("guidance_scale", {"guidance_scale": 2.0, "negative_prompt_ids": ONE}),
    ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
    ("return_dict", {"output_scores": True, "return_dict_in_generate": True}),
    ("pixel_values", {"pixel_values": ONE}),
    ("drafter", {"drafter": 3}),
    ("token id 1000000000 is outside", {"input_ids": torch.tensor([[3, 10**9]])}),
]


@pytest.mark.parametrize(("words", "settings"), REFUSED)
def test_what_changes_a_text_and_is_not_followed_is_refused(
    tiny, call, monkeypatch, words, settings
):
    # another family's settings get past this model's own check
    kind = type(tiny.target.model)
    monkeypatch.setattr(kind, "_validate_model_kwargs", lambda model, arguments: None)
    pytest.raises(SpecdecError, call, **settings).match(words)


def test_tokens_hidden_inside_the_prompt_are_refused(call, ids):
    numbers = torch.arange(ids.shape[1])[None]
    for mask in (numbers < ids.shape[1] - 1, numbers != 1):
        pytest.raises(SpecdecError, call, attention_mask=mask.long()).match("attention_mask")
