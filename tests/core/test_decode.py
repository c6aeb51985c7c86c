"""Decoding as people call it: text, streams, chats, stop tokens, lengths, and `generate` inside
transformers.
"""

import dataclasses
import functools
import itertools
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from fakes.bars import Bar
from fakes.pairs import bigram_pair, shared_bigrams, shared_pair
from fakes.refusals import refusal

import specdec
from specdec.core import clock
from specdec.core import decode as decoding
from specdec.core.decode import turn
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import Picker, truncate
from specdec.errors import SpecdecError
from specdec.models.load import shipped_folder
from specdec.models.target import Target

SMALL = Static(12, 3, 4)
PROMPT = [3, 1, 4, 1, 5]
QUESTION = "What is 3 plus 4?"


@functools.cache
def tiny():
    return specdec.load_pair("tiny", dtype="float32", device="cpu")


def untouched(pair) -> bool:
    """The model is as its owner gave it: its own attention, no hooks of ours."""
    modules = pair.target.model.modules()
    hooks = any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    return pair.target.model.config._attn_implementation != "specdec_tree" and not hooks


@pytest.mark.parametrize(
    "settings", [{}, dict(temperature=1.0), dict(temperature=0.8, top_k=20, repetition_penalty=1.2)]
)
@pytest.mark.parametrize("policy", [None, SMALL, RandomPolicy(TreeConfig(12, 3, 4))])
def test_decode_equals_autoregress(policy, settings):
    plain = specdec.autoregress(tiny(), QUESTION, 16, seed=4, **settings)
    drafted = specdec.decode(tiny(), QUESTION, policy, 16, seed=4, **settings)
    assert drafted.tokens == plain.tokens and drafted.text == plain.text
    assert drafted.finish_reason == plain.finish_reason and drafted.prompt_tok == plain.prompt_tok
    assert untouched(tiny())


def test_what_a_generation_holds_and_times_of_the_counter():
    pair = shared_bigrams()
    text = specdec.decode(pair, PROMPT, SMALL, 20)
    assert len(text.tokens) == text.new_tok == 20 and text.text is None and text.prompt_tok == 5
    assert text.tau == pytest.approx(text.cycles.new_tok.mean()) and text.tau > 1
    assert list(text.cycles.cycle) == list(range(len(text.rows)))
    assert text.total_ms == text.prefill_ms + text.decode_ms > 0
    assert text.cycles.total_ms.sum() <= text.decode_ms
    assert text.tokens_per_s == pytest.approx(1e3 * 20 / text.total_ms)
    plain = specdec.autoregress(pair, PROMPT, 20)
    assert plain.rows == [] and len(plain.cycles) == 0 and plain.tau != plain.tau
    text.prefill_ms = text.decode_ms = 0.0
    assert repr(text) == f"Generation(20 tokens, {len(text.rows)} cycles, tau {text.tau:.2f})"
    pair, looks = shared_bigrams(), itertools.count(5, 2)
    with clock.counted_by(lambda: float(next(looks))):
        plain = specdec.autoregress(pair, PROMPT, 6, stop_tokens=())
        drafted = specdec.decode(pair, PROMPT, SMALL, 6, stop_tokens=())
    assert (plain.prefill_ms, plain.decode_ms) == (2000.0, 2000.0)
    assert plain.tokens == drafted.tokens
    assert drafted.prefill_ms == 2000.0 and len(drafted.rows) > 1
    assert drafted.decode_ms == sum(row.total_ms + 2 * 2000.0 for row in drafted.rows)


def test_the_bar_counts_tokens_and_plain_decoding_asks_for_one_row_of_logits_each(monkeypatch):
    monkeypatch.setattr(Bar, "made", bars := [])
    monkeypatch.setattr(decoding, "tqdm", Bar)
    specdec.decode(shared_bigrams(), PROMPT, SMALL, 7, stop_tokens=())
    assert not bars
    specdec.decode(shared_bigrams(), PROMPT, SMALL, 7, stop_tokens=(), progress=True)
    assert [(bar.total, bar.unit, bar.n, bar.closed) for bar in bars] == [(7, "tok", 7, True)]
    pair, rows = shared_bigrams(), []
    forward = pair.target.forward

    def watched(tokens, cache, *args, **options):
        out = forward(tokens, cache, *args, **options)
        rows.append((len(tokens), len(out.logits)))
        return out

    expected = specdec.autoregress(pair, PROMPT, 9, stop_tokens=()).tokens
    monkeypatch.setattr(pair.target, "forward", watched)
    for stops in ((), (expected[3],)):
        rows.clear()
        tokens = specdec.autoregress(pair, PROMPT, 9, stop_tokens=stops).tokens
        assert rows == [(len(PROMPT), 1)] + [(1, 1)] * (len(tokens) - 1)
        assert tokens == expected[: len(tokens)]
        assert not stops or len(tokens) == 1 + expected.index(expected[3])


def test_seeds_temperatures_and_the_length_of_the_prompt_decide_draws(monkeypatch):
    numbers, policy = [], RandomPolicy(TreeConfig(6, 2, 2), 0)
    monkeypatch.setattr(policy, "reseed", numbers.append)
    specdec.decode(shared_bigrams(), PROMPT, policy, 4)
    list(specdec.stream(shared_bigrams(), PROMPT + PROMPT, policy, 4))
    assert numbers == [5, 10]
    texts = [
        specdec.decode(shared_bigrams(), PROMPT, SMALL, 16, 1.5, seed).tokens for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    greedy = [
        specdec.decode(shared_bigrams(), PROMPT, SMALL, 16, 0.0, seed).tokens for seed in (1, 2)
    ]
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_never_more_tokens_than_asked(count):
    pair = shared_bigrams()
    whole = specdec.autoregress(pair, PROMPT, 12).tokens
    for policy in (SMALL, Static(60, 7, 10), RandomPolicy(TreeConfig(12, 6, 4))):
        drafted = specdec.decode(pair, PROMPT, policy, count)
        assert drafted.tokens == whole[:count] and drafted.finish_reason == "length"
        assert sum(row.kept_tok for row in drafted.rows) == count - 1
    assert specdec.autoregress(pair, PROMPT, count).tokens == whole[:count]
    assert sum(specdec.stream(pair, PROMPT, SMALL, count), []) == whole[:count]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_end_the_text_where_plain_decoding_ends_it(temperature):
    pair = shared_bigrams()
    whole = specdec.decode(pair, PROMPT, SMALL, 16, temperature, seed=2)
    inside = set()
    for token in set(whole.tokens):
        drafted = specdec.decode(pair, PROMPT, SMALL, 16, temperature, seed=2, stop_tokens=[token])
        plain = specdec.autoregress(pair, PROMPT, 16, temperature, seed=2, stop_tokens=[token])
        assert drafted.tokens == plain.tokens == truncate(whole.tokens, [token])
        assert drafted.finish_reason == plain.finish_reason == "stop"
        if drafted.rows:
            inside.add(drafted.rows[-1].new_tok - drafted.rows[-1].kept_tok)
        pieces = list(
            specdec.stream(pair, PROMPT, SMALL, 16, temperature, seed=2, stop_tokens=[token])
        )
        assert sum(pieces, []) == drafted.tokens
        assert [len(piece) for piece in pieces] == [1, *(row.kept_tok for row in drafted.rows)]
    assert max(inside) >= 1  # at least one text really ended inside a path


def test_the_models_own_stop_token_or_a_question_after_every_token_ends_the_text():
    pair = bigram_pair()
    first, second = specdec.autoregress(pair, PROMPT, 2).tokens
    pair.stop_tokens = frozenset({second})
    assert specdec.decode(pair, PROMPT, SMALL, 10).tokens == [first, second]
    assert len(specdec.decode(pair, PROMPT, SMALL, 10, stop_tokens=()).tokens) == 10
    pair.stop_tokens = frozenset({first})
    stopped = specdec.decode(pair, PROMPT, SMALL, 10)
    assert stopped.tokens == [first] and stopped.rows == [] and stopped.finish_reason == "stop"
    settings = dict(limits=SMALL.limits, picker=Picker(), stop_early=lambda ids: len(ids) >= 5)
    engine = LiveEngine(shared_pair(), torch.tensor([1, 2, 3]), 8, **settings)
    with engine.inference():
        list(turn(engine, SMALL))
    assert engine.finish_reason == "stop" and len(engine.tokens) == 2


@pytest.mark.parametrize("raw", [False, True])
def test_a_text_is_a_users_message_to_a_chat_model_unless_it_is_raw(raw):
    pair = tiny()
    ids = (
        pair.tokenizer.encode(QUESTION)
        if raw
        else pair.ids_of([{"role": "user", "content": QUESTION}])
    )
    settings, way = dict(max_new_tokens=8, stop_tokens=()), dict(raw=True) if raw else {}
    told = specdec.autoregress(pair, ids, **settings).tokens
    assert specdec.autoregress(pair, QUESTION, **settings, **way).tokens == told
    assert specdec.decode(pair, QUESTION, SMALL, **settings, **way).tokens == told
    assert specdec.decode_many(pair, [QUESTION, ids], SMALL, **settings, **way)[0].tokens == told
    assert sum(specdec.stream(pair, QUESTION, SMALL, **settings, **way), []) == told
    assert specdec.watch(pair, QUESTION, SMALL, **settings, **way).start().wait().tokens == told
    untemplated = dataclasses.replace(pair, tokenizer=SimpleNamespace(encode=pair.tokenizer.encode))
    assert untemplated.ids_of(QUESTION) == pair.ids_of(QUESTION, True)


def test_an_empty_answer_says_why():
    pair = tiny()
    first = specdec.autoregress(pair, QUESTION, 1).tokens
    for way in (specdec.decode, specdec.autoregress):
        with pytest.warns(UserWarning, match="wants a user's message"):
            assert way(pair, QUESTION, max_new_tokens=4, stop_tokens=first).tokens == first


@pytest.mark.parametrize(
    "device, own, tree",
    [("cpu", None, (6, 2, 3)), ("meta", None, (60, 7, 10)), ("cpu", (4, 1, 3), (4, 1, 3))],
)
def test_the_tree_without_a_policy_suits_pair_and_device(device, own, tree):
    pair = dataclasses.replace(shared_bigrams(), tree=own and specdec.TreeConfig(*own))
    given = specdec.decode(pair, PROMPT, None, 8)
    assert max(row.verify_nodes for row in given.rows) == pair.usual_tree.verify_nodes
    elsewhere = dataclasses.replace(pair, target=SimpleNamespace(device=device))
    assert elsewhere.usual_tree == specdec.TreeConfig(*tree)


def test_streams_can_be_abandoned_and_interleaved():
    pair = shared_bigrams()
    whole, other = (
        specdec.autoregress(pair, prompt, 20).tokens for prompt in (PROMPT, PROMPT[::-1])
    )
    abandoned = specdec.stream(pair, PROMPT, SMALL, 20)
    next(abandoned), next(abandoned)
    assert untouched(pair)  # between two pieces the model is its owner's
    pair.target.model(torch.tensor([PROMPT]))
    streams = [specdec.stream(pair, prompt, SMALL, 20) for prompt in (PROMPT, PROMPT[::-1])]
    texts = [
        sum(pieces, [])
        for pieces in zip(*itertools.zip_longest(*streams, fillvalue=[]), strict=True)
    ]
    assert texts == [whole, other]
    del abandoned
    assert specdec.decode(pair, PROMPT, SMALL, 20).tokens == whole


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chats_of_several_turns(temperature):
    pair, turns = tiny(), ["What is 2 plus 2?", "And plus 3?", "Thanks."]
    settings = dict(system="Be brief.", max_new_tokens=10, temperature=temperature, seed=1)
    drafted = specdec.chat(pair, turns, SMALL, **settings)
    plain = specdec.chat(pair, turns, plain=True, **settings)
    assert [a.tokens for a in drafted] == [a.tokens for a in plain] and len(drafted) == 3
    assert all(earlier.prompt_tok < later.prompt_tok for earlier, later in pairwise(drafted))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": turns[0]}]
    messages += [
        {"role": "assistant", "content": drafted[0].text},
        {"role": "user", "content": turns[1]},
    ]
    again = specdec.decode(pair, messages, SMALL, 10, temperature, 1)
    assert again.tokens == drafted[1].tokens


@pytest.fixture(scope="module")
def own():
    """A user's own model and a drafter loaded for it; (model, drafter, ids [1, T])."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        shipped_folder("tiny") / "target", dtype=torch.float32
    )
    drafter = specdec.load_drafter(shipped_folder("tiny") / "drafter", model)
    return model, drafter, torch.tensor([tiny().ids_of(QUESTION)])


def generated(own, *args, **kwargs):
    model, drafter, ids = own
    return model.generate(
        *(args or (ids,)), custom_generate=specdec.generate, drafter=drafter, policy=SMALL, **kwargs
    )


def test_generate_is_greedy_or_takes_a_generation_config_and_torchs_seed(own):
    model, _, ids = own
    penalised = dict(max_new_tokens=12, repetition_penalty=1.3)
    for settings in (dict(max_new_tokens=16), dict(max_length=ids.shape[1] + 7), penalised):
        settings |= dict(do_sample=False)
        plain = generated(own, **settings)
        assert torch.equal(plain, model.generate(ids, **settings))
    assert model.config._attn_implementation != "specdec_tree"
    output = generated(own, return_dict_in_generate=True, **settings)
    assert isinstance(output, hf.generation.GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, plain)
    warped = dict(max_new_tokens=16, temperature=0.8, top_k=12, top_p=0.95)
    config = hf.GenerationConfig(do_sample=True, eos_token_id=2, **warped)
    sampled = generated(own, generation_config=config, seed=6)[0, ids.shape[1] :].tolist()
    pair = specdec.Pair(Target(model), stop_tokens=frozenset({2}))
    assert sampled == specdec.autoregress(pair, ids[0], seed=6, **warped).tokens

    def texts(seed):
        torch.manual_seed(seed)
        return [
            generated(own, do_sample=True, temperature=1.5, max_new_tokens=24).tolist()
            for _ in range(2)
        ]

    assert texts(3) == texts(3) != texts(4)
    first, second = texts(3)
    assert first != second  # the generator moves on, as with transformers' own sampling


def test_generate_stops_where_transformers_stops(own):
    model, _, ids = own
    whole = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)[
        0, ids.shape[1] :
    ].tolist()

    for token in list(dict.fromkeys(whole))[:6]:  # wherever in an accepted path it lies
        seen = [lambda ids, scores, token=token, **_: ids[:, -1] == token]
        for stops in (
            dict(eos_token_id=None, stopping_criteria=seen),
            dict(eos_token_id=[token, 2]),
        ):
            settings = dict(max_new_tokens=20, do_sample=False, **stops)
            ours = generated(own, **settings)
            assert torch.equal(ours, model.generate(ids, **settings))
        assert ours[0, ids.shape[1] :].tolist() == truncate(whole, [token, 2])


def test_generate_refuses(own):
    model, drafter, ids = own
    settings = dict(inputs=ids, custom_generate=specdec.generate, drafter=drafter, max_new_tokens=4)
    for change, message in (
        (dict(drafter=None), "generate needs drafter="),
        (dict(drafter=shared_pair().drafter), "made for this very model"),
        (dict(num_beams=2), "without beams"),
        (dict(num_return_sequences=2, do_sample=True), "returns one sequence"),
        (dict(inputs=ids.repeat(2, 1)), "one prompt at a time, got a batch of 2"),
        (dict(max_new_tokens=5000), "context ends at 1024"),
    ):
        pytest.raises(SpecdecError, model.generate, **settings | change).match(message)


@pytest.mark.parametrize("call", [specdec.decode, specdec.autoregress, specdec.stream])
@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 24], {}, "token id 24 is outside the target's vocabulary of 24"),
        ([1.5], {}, "a prompt is text, token ids"),
        (None, {}, "a prompt is text, token ids"),
        ([1] * 500, dict(max_new_tokens=20), "ask for at most 12 tokens"),
        ([1] * 600, dict(max_new_tokens=1), "shorten the prompt"),
        ([1], dict(max_new_tokens=0), "max_new_tokens must be an integer of at least 1, got 0"),
        ([1], dict(temperature=-0.5), "temperature must be at least 0"),
        ([1], dict(seed=1.5), "seed must be an integer"),
        ([1], dict(seed=1 << 70, temperature=1.0), "seed must fit into 64 bits"),
        ([1], dict(top_p=2.0), "top_p must be between 0 and 1"),
        ([1], dict(topk=5), "topk"),
        ([1], dict(stop_tokens=5), "stop_tokens is a list of token ids"),
        ([1], dict(stop_tokens=["</s>"]), "stop_tokens is a list of token ids"),
    ],
)
def test_bad_input_gets_one_sentence(call, prompt, settings, message):
    sentence = refusal(call, shared_bigrams(), prompt, **settings)
    assert re.search(message, sentence)
    assert untouched(shared_bigrams())


@pytest.mark.parametrize("call", [specdec.decode, specdec.stream])
def test_pairs_and_policies_that_cannot_decode(call):
    assert "no drafter" in refusal(call, specdec.Pair(shared_bigrams().target), PROMPT)
    assert "policy" in refusal(call, shared_bigrams(), PROMPT, "static")
    wide = refusal(lambda: list(call(shared_pair(), PROMPT, Static(12, 3, 30), 4)))
    assert "top_k=30 exceeds the draft vocabulary of 24" in wide


def test_who_answers_a_chat_and_what_is_said_to_them(monkeypatch):
    said, pair = [], tiny()
    monkeypatch.setattr(
        Pair, "ids_of", lambda self, prompt, raw: said.append([m["role"] for m in prompt]) or PROMPT
    )
    tree, both = Static(3, 1, 2), ["Hello.", "And then?"]
    for plain, system in ((True, None), (False, None), (False, "Be brief.")):
        said.clear()
        answers = specdec.chat(
            pair, both, tree, system, plain=plain, max_new_tokens=4, stop_tokens=()
        )
        begun = ["system"] * bool(system) + ["user"]
        assert said[2:] == [begun, [*begun, "assistant", "user"]], (
            "beside the reading of both beforehand"
        )
        nodes = {row.verify_nodes for answer in answers for row in answer.rows}
        assert nodes == (
            set() if plain else {2}
        )  # the policy's own tree, and none where nothing is drafted


@pytest.mark.parametrize("content", [None, 3, [{"type": "image"}], [3], {"text": "x"}])
def test_chats_refuse(content):
    for turns in ([], "Hello."):
        assert "a list of at least one user turn" in refusal(specdec.chat, tiny(), turns)
    assert "chat messages are a list" in refusal(specdec.decode, tiny(), [{"content": "no role"}])
    assert "the chat template refuses" in refusal(
        specdec.decode, tiny(), [{"role": "wizard", "content": "hi"}]
    )
    assert "content" in refusal(tiny().ids_of, [{"role": "user", "content": content}])
