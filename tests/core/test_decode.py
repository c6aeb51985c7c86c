"""Decoding as callers use it: text, streams, stop tokens, lengths, `generate`."""

import dataclasses
import itertools
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from fakes.pairs import bigram_pair, shared_bigrams, shared_pair
from fakes.refusals import refusal

import specdec
from specdec.core.decode import opened
from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import truncate
from specdec.errors import SpecdecError
from specdec.models.load import shipped_folder
from specdec.models.target import Target

SMALL = Static(12, 3, 4)
PROMPT = [3, 1, 4, 1, 5]
QUESTION = "What is 3 plus 4?"


def untouched(pair) -> bool:
    """The model is as its owner gave it: no hooks of ours."""
    modules = pair.target.model.modules()
    return not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


@pytest.mark.parametrize(
    "settings", [{}, dict(temperature=1.0), dict(temperature=0.8, top_k=20, repetition_penalty=1.2)]
)
@pytest.mark.parametrize("policy", [None, SMALL, RandomPolicy(TreeConfig(12, 3, 4))])
def test_decode_equals_autoregress(tiny, policy, settings):
    plain = specdec.autoregress(tiny, QUESTION, 16, seed=4, **settings)
    drafted = specdec.decode(tiny, QUESTION, policy, 16, seed=4, **settings)
    assert drafted.tokens == plain.tokens and drafted.text == plain.text
    assert drafted.finish_reason == plain.finish_reason and drafted.prompt_tok == plain.prompt_tok
    assert untouched(tiny)


def test_plain_decoding_asks_for_one_row_of_logits_each(monkeypatch):
    pair = shared_bigrams()
    expected = specdec.autoregress(pair, PROMPT, 9, stop_tokens=()).tokens
    forward = Mock(wraps=pair.target.forward)
    monkeypatch.setattr(pair.target, "forward", forward)
    tokens = specdec.autoregress(pair, PROMPT, 9, stop_tokens=expected[3:4]).tokens
    assert tokens == truncate(expected, expected[3:4])
    calls = [call.args for call in forward.call_args_list]
    assert [len(call[0]) for call in calls] == [len(PROMPT)] + [1] * (len(tokens) - 1)
    assert all(call[-1] for call in calls), "the last row alone"


def test_seeds_temperatures_and_the_length_of_the_prompt_decide_draws(monkeypatch):
    pair, numbers, policy = shared_bigrams(), [], RandomPolicy(TreeConfig(6, 2, 2), 0)
    monkeypatch.setattr(policy, "reseed", numbers.append)
    specdec.decode(pair, PROMPT, policy, 4)
    list(specdec.stream(pair, PROMPT + PROMPT, policy, 4))
    assert numbers == [5, 10]
    for temperature, texts in ((1.5, 2), (0.0, 1)):
        drawn = [specdec.decode(pair, PROMPT, SMALL, 16, temperature, s).tokens for s in (1, 1, 2)]
        assert drawn[0] == drawn[1] and len(set(map(tuple, drawn))) == texts


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_never_more_tokens_than_asked(count):
    pair = shared_bigrams()
    text = specdec.autoregress(pair, PROMPT, 12).tokens[:count]
    for policy in (SMALL, Static(60, 7, 10), RandomPolicy(TreeConfig(12, 6, 4))):
        drafted = specdec.decode(pair, PROMPT, policy, count)
        assert drafted.tokens == text and drafted.finish_reason == "length"
        assert opened(pair, PROMPT, policy, count)[0].generation.finish_reason == "unfinished"
        assert sum(row.kept_tok for row in drafted.rows) == count - 1
    assert specdec.autoregress(pair, PROMPT, count).tokens == text
    assert sum(specdec.stream(pair, PROMPT, SMALL, count), []) == text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_end_the_text_where_plain_decoding_ends_it(temperature):
    pair, settings = shared_bigrams(), dict(max_new_tokens=16, temperature=temperature, seed=2)
    text = specdec.decode(pair, PROMPT, SMALL, **settings).tokens
    inside = set()
    for token in set(text):
        drafted = specdec.decode(pair, PROMPT, SMALL, **settings, stop_tokens=[token])
        plain = specdec.autoregress(pair, PROMPT, **settings, stop_tokens=[token])
        assert drafted.tokens == plain.tokens == truncate(text, [token])
        assert drafted.finish_reason == plain.finish_reason == "stop"
        inside |= {row.new_tok - row.kept_tok for row in drafted.rows}
        pieces = list(specdec.stream(pair, PROMPT, SMALL, **settings, stop_tokens=[token]))
        assert sum(pieces, []) == drafted.tokens
        assert [len(piece) for piece in pieces] == [1, *(row.kept_tok for row in drafted.rows)]
    assert max(inside) >= 1, "at least one text really ended inside a path"


def test_the_models_own_stop_token_or_a_criterion_ends_the_text():
    pair = bigram_pair()
    first, second = specdec.autoregress(pair, PROMPT, 2).tokens
    pair.stop_tokens = frozenset({second})
    assert specdec.decode(pair, PROMPT, SMALL, 10).tokens == [first, second]
    assert len(specdec.decode(pair, PROMPT, SMALL, 10, stop_tokens=()).tokens) == 10
    pair.stop_tokens = frozenset({first})
    with pytest.warns(UserWarning, match="wants a user's message"):
        stopped = specdec.decode(pair, PROMPT, SMALL, 10)
    assert stopped.tokens == [first] and stopped.rows == [] and stopped.finish_reason == "stop"


@pytest.mark.parametrize("raw", [False, True])
def test_a_text_is_a_users_message_to_a_chat_model_unless_it_is_raw(tiny, raw):
    ids = tiny.ids_of([{"role": "user", "content": QUESTION}])
    if raw:
        ids = tiny.tokenizer.encode(QUESTION)
    settings = dict(max_new_tokens=8, stop_tokens=())
    text = specdec.autoregress(tiny, ids, **settings).tokens
    settings["raw"] = raw
    assert specdec.autoregress(tiny, QUESTION, **settings).tokens == text
    assert specdec.decode(tiny, QUESTION, SMALL, **settings).tokens == text
    assert specdec.decode_many(tiny, [QUESTION, ids], SMALL, **settings)[0].tokens == text
    assert sum(specdec.stream(tiny, QUESTION, SMALL, **settings), []) == text


@pytest.mark.parametrize(
    "device, tuned, tree",
    [("cpu", None, (6, 2, 3)), ("meta", None, (60, 7, 10)), ("cpu", (4, 1, 3), (4, 1, 3))],
)
def test_the_tree_without_a_policy_suits_pair_and_device(device, tuned, tree):
    pair = dataclasses.replace(shared_bigrams(), tree=tuned and specdec.TreeConfig(*tuned))
    rows = specdec.decode(pair, PROMPT, None, 8).rows
    assert max(row.verify_nodes for row in rows) == pair.usual_tree.verify_nodes
    elsewhere = dataclasses.replace(pair, target=SimpleNamespace(device=device))
    assert elsewhere.usual_tree == specdec.TreeConfig(*tree)


def test_streams_can_be_abandoned_and_interleaved():
    pair, prompts = shared_bigrams(), (PROMPT, PROMPT[::-1])
    texts = [specdec.autoregress(pair, prompt, 20).tokens for prompt in prompts]
    next(specdec.stream(pair, PROMPT, SMALL, 20))
    assert untouched(pair), "between two pieces the model is its owner's"
    streams = [specdec.stream(pair, prompt, SMALL, 20) for prompt in prompts]
    pieces = list(itertools.zip_longest(*streams, fillvalue=[]))
    assert [sum(of_one, []) for of_one in zip(*pieces, strict=True)] == texts


@pytest.fixture(scope="module")
def model_and_drafter(tiny):
    """A user's own model and a drafter loaded for it; (model, drafter, ids [1, T])."""
    folder = shipped_folder("tiny")
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    drafter = specdec.load_drafter(folder / "drafter", model)
    return model, drafter, torch.tensor([tiny.ids_of(QUESTION)])


def generated(model_and_drafter, **settings):
    model, drafter, ids = model_and_drafter
    settings |= dict(custom_generate=specdec.generate, drafter=drafter, policy=SMALL)
    return model.generate(ids, **settings)


def test_generate_is_greedy_or_takes_a_generation_config(model_and_drafter):
    model, _, ids = model_and_drafter
    settings = dict(max_new_tokens=12, repetition_penalty=1.3, do_sample=False)
    output = generated(model_and_drafter, **settings)
    assert torch.equal(output, model.generate(ids, **settings))
    warped = dict(max_new_tokens=16, temperature=0.8, top_k=12, top_p=0.95)
    config = hf.GenerationConfig(do_sample=True, eos_token_id=2, **warped)
    sampled = generated(model_and_drafter, generation_config=config, seed=6)[0, ids.shape[1] :]
    pair = specdec.Pair(Target(model), stop_tokens=frozenset({2}))
    assert sampled.tolist() == specdec.autoregress(pair, ids[0], seed=6, **warped).tokens


def test_end_tokens_set_after_loading_end_the_text():
    pair = specdec.load_pair("tiny", dtype="float32")
    text = specdec.decode(pair, QUESTION, SMALL, 12, stop_tokens=()).tokens
    pair.target.model.generation_config.eos_token_id = [text[2]]
    for call in (specdec.decode, specdec.autoregress):
        assert call(pair, QUESTION, max_new_tokens=12).tokens == truncate(text, text[2:3])
    pair.stop_tokens = frozenset(text[4:5])
    tokens = specdec.decode(pair, QUESTION, SMALL, 12).tokens
    assert tokens == truncate(text, text[4:5]), "the pair's own hold until the next change"


def test_generate_stops_where_transformers_stops(model_and_drafter):
    model, _, ids = model_and_drafter
    settings = dict(max_new_tokens=20, do_sample=False)
    text = model.generate(ids, **settings, eos_token_id=None)[0, ids.shape[1] :].tolist()
    # wherever in an accepted path it lies
    for token in list(dict.fromkeys(text))[:6]:
        seen = [lambda ids, scores, token=token, **_: ids[:, -1] == token]
        for stops in (
            dict(eos_token_id=None, stopping_criteria=seen),
            dict(eos_token_id=[token, 2]),
        ):
            ours = generated(model_and_drafter, **settings, **stops)
            assert torch.equal(ours, model.generate(ids, **settings, **stops))
            assert ours[0, ids.shape[1] :].tolist() == truncate(text, [token, 2])


@pytest.mark.parametrize("drafter", [None, shared_pair().drafter])
def test_generate_refuses_the_drafter_of_another_model(model_and_drafter, drafter):
    model, _, ids = model_and_drafter
    settings = dict(custom_generate=specdec.generate, drafter=drafter, max_new_tokens=4)
    pytest.raises(SpecdecError, model.generate, ids, **settings).match("generate needs drafter=")


@pytest.mark.parametrize("call", [specdec.decode, specdec.autoregress, specdec.stream])
def test_bad_input_is_refused(call):
    for settings, message in (
        (dict(max_new_tokens=510), "context ends at 512"),
        (dict(max_new_tokens=0), "max_new_tokens must be"),
        (dict(temperature=-0.5), "temperature must be a finite number"),
        (dict(seed=1.5), "seed must be an integer"),
        (dict(stop_tokens=["</s>"]), "a stop token must be an integer"),
    ):
        assert message in refusal(call, shared_bigrams(), PROMPT, **settings)
    assert untouched(shared_bigrams())


def test_pairs_and_policies_that_cannot_decode(tiny):
    assert "no drafter" in refusal(specdec.decode, specdec.Pair(shared_bigrams().target), PROMPT)
    wide = refusal(specdec.decode, shared_pair(), PROMPT, Static(12, 3, 30), 4)
    assert "top_k=30 exceeds the draft vocabulary of 24" in wide
    options = dict(visit=1, max_new_tokens=4)
    pytest.raises(TypeError, specdec.decode_many, tiny, [PROMPT], **options).match("visit")
    wizard = [{"role": "wizard", "content": "hi"}]
    assert "the chat template refuses" in refusal(specdec.decode, tiny, wizard)


def test_sampled_texts_of_different_prompts_and_of_equal_ones_are_independent(tiny):
    options = dict(max_new_tokens=8, temperature=3.0, stop_tokens=())
    prompts = [[1, 5 + number, 9] for number in range(40)]
    for plain in (False, True):
        texts = [g.tokens for g in specdec.decode_many(tiny, prompts, plain=plain, **options)]
        # 512 tokens at this temperature: two texts of 40 draw the same one by chance
        most = Counter(text[5] for text in texts).most_common(1)[0][1]
        assert most <= 6
        # equal prompts get other samples, each of which can be had alone
        same = [g.tokens for g in specdec.decode_many(tiny, [PROMPT] * 3, plain=plain, **options)]
        assert len(set(map(tuple, same))) == 3
        for visit, text in enumerate(same):
            assert specdec.decode(tiny, PROMPT, visit=visit, **options).tokens == text


def test_plain_decoding_needs_no_drafter_that_fits():
    pair = specdec.load_pair("tiny", dtype="float32", pack=False)
    pair.target.model.resize_token_embeddings(504, mean_resizing=False)
    assert specdec.autoregress(pair, [5, 6, 7], max_new_tokens=4).new_tok == 4
    assert len(specdec.decode_many(pair, [[5, 6, 7]], max_new_tokens=4, plain=True)) == 1
    with pytest.raises(specdec.SpecdecError, match="vocabulary"):
        specdec.decode(pair, [5, 6, 7], max_new_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_callers_default_device_and_autocast_change_no_text(tiny, temperature):
    settings = dict(max_new_tokens=12, temperature=temperature)
    texts = [specdec.decode(tiny, PROMPT, SMALL, **settings).tokens]
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        ids = torch.tensor(PROMPT, device="cpu")
        with tiny.inference():
            cache = tiny.target.new_cache(len(ids))
            assert tiny.target.forward(ids, cache).logits.dtype == torch.float32
        texts.append(specdec.decode(tiny, PROMPT, SMALL, **settings).tokens)
        texts.append(specdec.autoregress(tiny, PROMPT, **settings).tokens)
    assert texts == [texts[0]] * 3
