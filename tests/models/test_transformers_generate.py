"""What plain `generate` would honour and the cycle cannot is refused; what it can is done."""

import functools

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.stopping_criteria import StopStringCriteria

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.models.families import cache_keyword
from specdec.models.transformers_generate import generate


@pytest.fixture
def call(tiny):
    ids = torch.tensor([tiny.ids_of("Hello there")])

    def call(input_ids=ids, plain=False, **settings):
        own = (
            {}
            if plain
            else dict(custom_generate=generate, drafter=tiny.drafter, policy=Static(8, 3, 2))
        )
        settings = dict(max_new_tokens=12, do_sample=False) | settings
        return tiny.target.model.generate(input_ids, **own, **settings)

    call.ids = ids
    return call


ONE = torch.tensor([[1]])


def scored(read):
    return lambda input_ids, scores, **kwargs: torch.tensor([bool(read(scores))])


def test_input_it_does_not_read_and_a_processor_that_runs_the_model(tiny, call):
    model, ids = tiny.target.model, call.ids
    embedded, filled = model.get_input_embeddings()(ids), DynamicCache()
    model(ids[:, :2], **{cache_keyword(type(model)): filled})
    numbers = torch.arange(ids.shape[1])[None]
    for settings, word in (
        (dict(input_ids=None, inputs_embeds=embedded), "inputs_embeds"),
        (dict(inputs_embeds=embedded), "inputs_embeds"),
        (dict(past_key_values=filled), "fills a cache of its own"),
        (dict(attention_mask=(numbers < ids.shape[1] - 1).long()), "attention_mask"),
        (dict(attention_mask=(numbers != 1).long()), "attention_mask"),
        (dict(attention_mask=torch.zeros_like(ids)), "attention_mask"),
    ):
        pytest.raises(SpecdecError, call, **settings).match(word)
    # the model is not patched, so a processor may run it
    runs_it = [lambda ids, scores: scores + 0 * model(ids).logits[:, -1]]
    assert call(logits_processor=runs_it).tolist() == call(plain=True).tolist()
    assert call().tolist() == call(plain=True).tolist()


OUTPUTS = ["output_scores", "output_logits", "output_attentions", "output_hidden_states"]
READERS = [lambda s: s.max() > 0, lambda s: s[0], lambda s: torch.max(s), lambda s: len(s)]


def test_what_it_can(tiny, call):
    plain, positions = call(plain=True), torch.arange(call.ids.shape[1])[None]
    padded = torch.nn.functional.pad(call.ids, (2, 0))
    mask = (torch.arange(padded.shape[1])[None] >= 2).long()
    assert torch.equal(call(padded, attention_mask=mask)[:, 2:], plain)
    assert torch.equal(
        call(position_ids=positions), plain
    )  # positions that count the prompt are its own
    text = tiny.tokenizer.decode(plain[0, call.ids.shape[1] :])
    stop = [StopStringCriteria(tiny.tokenizer, [text.strip()[3]])]
    shorter = call(stopping_criteria=stop)
    assert shorter.shape[1] < plain.shape[1]
    assert shorter.tolist() == call(plain=True, stopping_criteria=stop).tolist()
    assert (
        call(past_key_values=DynamicCache()).tolist() == plain.tolist()
    )  # an empty one is no matter


def test_a_streamer_that_is_bound_gets_the_prompt_and_every_token(tiny, call):
    streamed = []

    class Streamer:
        def put(self, tokens):
            streamed.extend(tokens.flatten().tolist())

        def end(self):
            streamed.append("end")

    bound = functools.partial(generate, streamer=Streamer())
    ids = call(custom_generate=bound, drafter=tiny.drafter, plain=True)
    assert streamed == [*ids[0].tolist(), "end"]


def test_arguments_that_would_be_passed_over(tiny, call):
    for name, settings in [
        ("attention_mask", dict(attention_mask=ONE)),
        ("position_ids", dict(position_ids=torch.tensor([[5]]))),
        ("empty", dict(input_ids=torch.zeros(1, 0, dtype=torch.long))),
        ("seed", dict(seed=float("nan"))),
        ("seed", dict(seed="x")),
        ("drafter", dict(drafter=3)),
        ("token id 1000000000 is outside", dict(input_ids=torch.tensor([[3, 10**9]]))),
    ]:
        own = dict(custom_generate=generate, drafter=tiny.drafter) | settings
        pytest.raises(SpecdecError, call, plain=True, **own).match(name)


def test_what_changes_a_text_and_is_not_followed_is_refused_by_name(tiny, call, monkeypatch):
    # Another family's settings get past this model's own check.
    monkeypatch.setattr(
        type(tiny.target.model), "_validate_model_kwargs", lambda model, given: None
    )
    for name, settings in [
        (
            "guidance_scale and negative_prompt_ids",
            dict(guidance_scale=2.0, negative_prompt_ids=ONE),
        ),
        ("leave the settings of", dict(penalty_alpha=0.6, top_k=4)),
        ("leave the settings of", dict(dola_layers="high")),
        ("leave token_type_ids out", dict(token_type_ids=torch.zeros(1, 3, dtype=torch.long))),
        (
            "leave output_router_logits, pixel_values out",
            dict(pixel_values=ONE, output_router_logits=True),
        ),
        *((name, {name: True, "return_dict_in_generate": True}) for name in OUTPUTS),
        *(("reads the scores", {"stopping_criteria": [scored(read)]}) for read in READERS),
    ]:
        pytest.raises(SpecdecError, call, **settings).match(name)
