"""Several texts at once equal each alone, token for token, whatever shapes their trees."""

import copy
from unittest.mock import Mock, patch

import pytest
import torch
from fakes.bars import Bar
from fakes.families import FAMILIES, model_of
from fakes.pairs import BigramDrafter, bigram_pair

import specdec
from specdec.core import decode as module
from specdec.core.decode import decode_many, drive
from specdec.core.pair import Pair
from specdec.core.policy import RandomPolicy
from specdec.core.protocols import TargetForward
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.models.target import Target

PROMPTS = [
    "What is 3 plus 4?",
    "Tell me about the river.",
    "Hello",
    "Write a function that adds two numbers, and test it.",
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_is_the_one_decoded_alone(tiny, temperature):
    settings, tree = (
        dict(max_new_tokens=16, temperature=temperature, seed=3),
        specdec.Static(12, 3, 4),
    )
    alone = [specdec.decode(tiny, prompt, tree, **settings) for prompt in PROMPTS]
    accepted = [[row.accepted_tok for row in g.rows] for g in alone]
    for rows in (1, 2, 16):
        many = decode_many(tiny, PROMPTS, tree, rows=rows, **settings)
        assert [(g.tokens, g.text) for g in many] == [(g.tokens, g.text) for g in alone]
        assert [[row.accepted_tok for row in g.rows] for g in many] == accepted
        assert max(sum(accepted, [])) >= 1
        plain = decode_many(tiny, PROMPTS, rows=rows, plain=True, **settings)
        assert [(g.tokens, g.finish_reason) for g in plain] == [
            (g.tokens, g.finish_reason) for g in many
        ]


def test_each_turn_has_a_policy_of_its_own_and_forwards_are_shared(tiny):
    def seen(texts):
        return [
            (g.tokens, [(row.top_k, row.expansions, row.verify_nodes) for row in g.rows])
            for g in texts
        ]

    policies = [RandomPolicy(TreeConfig(24, 4, 5), seed=number) for number in range(len(PROMPTS))]
    alone = seen(
        specdec.decode(tiny, *each, 24)
        for each in zip(PROMPTS, copy.deepcopy(policies), strict=True)
    )
    assert seen(decode_many(tiny, PROMPTS, policies.__getitem__, 24)) == alone
    assert len({shape for _, rows in alone for shape in rows}) > 5
    owners = Target, type(tiny.drafter)
    both = [
        patch.object(one, "run_together", autospec=True, side_effect=one.run_together)
        for one in owners
    ]
    with both[0] as targets, both[1] as drafters:
        decode_many(tiny, PROMPTS, specdec.Static(12, 3, 4), 24, stop_tokens=(), rows=3)
    target, drafter = (
        [len(one.args[1]) for one in counted.call_args_list] for counted in (targets, drafters)
    )
    assert set(target) <= {2, 3} and target.count(3) > len(target) / 2 and max(drafter) == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_in_every_family(name):
    target = Target(model_of(name))
    pair = Pair(target, BigramDrafter(target))
    prompts = [[5, 9, 3], [7] * 11 + [2, 8], [4, 4, 6, 1, 9, 2, 7]]
    settings = dict(max_new_tokens=12, stop_tokens=(), temperature=1.0)
    for plain in (True, False):
        way = specdec.autoregress if plain else specdec.decode
        alone = [way(pair, prompt, **settings).tokens for prompt in prompts]
        assert [g.tokens for g in decode_many(pair, prompts, plain=plain, **settings)] == alone


def test_policies_by_number_and_generations_of_several_texts(monkeypatch):
    prompts, options = [[1, 2, 3], [4, 5]], dict(max_new_tokens=10, stop_tokens=())
    monkeypatch.setattr(Bar, "made", bars := [])
    monkeypatch.setattr(module, "tqdm", Bar)
    monkeypatch.setattr(
        Pair, "reader", property(lambda self: lambda tokens: f"{len(tokens)} tokens")
    )
    pair, trees = bigram_pair(), [specdec.Static(3, 1, 2), specdec.Static(6, 2, 2)]
    many = decode_many(pair, prompts, trees.__getitem__, **options)
    assert not bars
    assert [max(row.verify_nodes for row in one.rows) for one in many] == [2, 5]
    facts = [(one.text, one.prompt_tok, one.finish_reason) for one in many]
    assert facts == [("10 tokens", 3, "length"), ("10 tokens", 2, "length")]
    decode_many(pair, prompts, trees[0], 4, progress=True)
    assert [(bar.total, bar.unit, bar.n) for bar in bars] == [(2, "text", 2)]
    undrafted = Pair(pair.target)
    plain = decode_many(undrafted, prompts, plain=True, **options)
    assert [one.tokens for one in plain] == [one.tokens for one in many]
    pytest.raises(SpecdecError, decode_many, undrafted, prompts).match("drafter")


def test_places_are_taken_over_at_once():
    """Of turns of 1, 5 and 2 forwards, two at a time: the third begins when the first ends."""
    log, model = [], Mock()
    model.run_together = lambda forwards: (
        [log.append([int(forward.tokens) for forward in forwards])] * len(forwards)
    )
    model.forward = lambda tokens, *rest: log.append([int(tokens)])

    def turn(number, forwards):
        for _ in range(forwards):
            yield [0]  # tokens of a step are passed over
            yield TargetForward(model, torch.tensor(number), None)
        return -number

    turns = (turn(number, forwards) for number, forwards in enumerate((1, 5, 2)))
    assert list(drive(turns, 2)) == [(0, 0), (2, -2), (1, -1)]
    assert log == [[0, 1], [1, 2], [1, 2], [1], [1]]


def test_bad_input_is_refused_in_a_sentence(tiny, monkeypatch):
    monkeypatch.setattr(Target, "forward", None)
    for arguments, message in (
        (dict(prompts="Hello"), "takes a list of prompts"),
        (dict(prompts=7), "^prompts must be Sequence, got the int 7"),
        (dict(prompts=["Hello"], rows=0), "rows must be an integer of at least 1"),
        (dict(prompts=["Hello"], policy=RandomPolicy(TreeConfig(12, 3, 4))), "need a policy each"),
        (dict(prompts=["Hello", ""]), "^prompt 1: the prompt is empty"),
        (
            dict(prompts=["Hello", [5, 10**9]], plain=True),
            "^prompt 1: token id 1000000000 is outside",
        ),
        (
            dict(prompts=["Hello", [5] * 5000]),
            "^prompt 1: the prompt has 5000 tokens and 128 more are asked for",
        ),
        (
            dict(prompts=["Hello", "a fox \ud83e"]),
            "^prompt 1: the prompt holds half of a character, .*: 'a fox .ud83e'",
        ),
        (
            dict(prompts=["Hello", [{"role": "user", "content": "\ud83e"}]]),
            "^prompt 1: a chat message holds half of",
        ),
    ):
        pytest.raises(SpecdecError, decode_many, tiny, **arguments).match(message)
    pytest.raises(SpecdecError, decode_many, "tiny", ["Hello"]).match(
        "^pair must be Pair, got the str 'tiny'"
    )


class Stops(
    specdec.Static
):  # ends its first text, or the text after so many, as Ctrl-C does or by failing
    asks = frozenset({"size"})

    def __init__(self, stop, after=0):
        super().__init__(4, 1, 2)
        self.stop, self.texts = stop, -after

    def answer(self, question):
        self.texts += question.cycle == 0
        if self.texts > 0:
            raise self.stop
        return 2


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_what_ends_a_batch_or_a_chat_keeps_what_there_is(tiny, stop, monkeypatch):
    whole, ends = decode_many(tiny, PROMPTS, max_new_tokens=8), (KeyboardInterrupt, SpecdecError)
    policies = [None, None, Stops(stop), None]
    ended = pytest.raises(ends, decode_many, tiny, PROMPTS, policies.__getitem__, 8, rows=1)
    so_far = [text and text.tokens for text in ended.value.so_far]
    assert so_far == [whole[0].tokens, whole[1].tokens, None, None]
    whole = specdec.chat(tiny, PROMPTS[:2], max_new_tokens=8)
    ended = pytest.raises(
        ends, specdec.chat, tiny, PROMPTS[:2], Stops(stop, after=1), max_new_tokens=8
    )
    first, second = ended.value.so_far
    assert first.tokens == whole[0].tokens
    assert second.tokens == whole[1].tokens[: len(second.tokens)]
    monkeypatch.setattr(Target, "forward", None)
    pytest.raises(SpecdecError, specdec.chat, tiny, ["Hello.", 3]).match(
        "^prompt 1: the content of a chat message"
    )
