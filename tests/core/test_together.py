"""Several texts at once equal each alone, token for token, whatever shapes their trees."""

import copy
from unittest.mock import Mock, patch

import pytest
import torch
from fakes.families import FAMILIES, model_of
from fakes.pairs import BigramDrafter

import specdec
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
TREE = specdec.Static(12, 3, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_is_the_one_decoded_alone(tiny, temperature):
    settings = dict(max_new_tokens=16, temperature=temperature, seed=3)
    alone = [specdec.decode(tiny, prompt, TREE, **settings) for prompt in PROMPTS]
    for rows in (1, 2, 16):
        many = decode_many(tiny, PROMPTS, TREE, rows=rows, **settings)
        plain = decode_many(tiny, PROMPTS, rows=rows, plain=True, **settings)
        for expected, drafted, undrafted in zip(alone, many, plain, strict=True):
            assert drafted.tokens == undrafted.tokens == expected.tokens
            assert (drafted.text, drafted.prompt_tok) == (expected.text, expected.prompt_tok)
            assert drafted.finish_reason == undrafted.finish_reason == expected.finish_reason
            accepted = [row.accepted_tok for row in drafted.rows]
            assert accepted == [row.accepted_tok for row in expected.rows]


def test_each_turn_has_a_policy_of_its_own(tiny):
    policies = [RandomPolicy(TreeConfig(24, 4, 5), seed=number) for number in range(len(PROMPTS))]
    alone = []
    for prompt, policy in zip(PROMPTS, copy.deepcopy(policies), strict=True):
        alone.append(shapes(specdec.decode(tiny, prompt, policy, 24)))
    many = decode_many(tiny, PROMPTS, policies.__getitem__, 24)
    assert [shapes(text) for text in many] == alone
    assert len({shape for rows in alone for shape in rows}) > 5


def shapes(text) -> list[tuple[int, int, int]]:
    return [(row.top_k, row.expansions, row.verify_nodes) for row in text.rows]


def test_forwards_are_shared(tiny):
    counts = []
    for owner in (Target, type(tiny.drafter)):
        run = owner.run_together
        with patch.object(owner, "run_together", autospec=True, side_effect=run) as counted:
            decode_many(tiny, PROMPTS, TREE, 24, stop_tokens=(), rows=3)
        counts.append([len(call.args[1]) for call in counted.call_args_list])
    target, drafter = counts
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


def test_places_are_taken_over_at_once():
    """Of turns of 1, 5 and 2 forwards, two at a time: the third begins when the first ends."""
    log, model = [], Mock()
    model.run_together = lambda forwards: log.append(len(forwards)) or [None] * len(forwards)

    def turn(number, forwards):
        for _ in range(forwards):
            yield [0]  # tokens of a step are passed over
            yield TargetForward(model, torch.tensor(number), None)
        return -number

    turns = (turn(number, forwards) for number, forwards in enumerate((1, 5, 2)))
    assert list(drive(turns, 2)) == [(0, 0), (2, -2), (1, -1)]
    assert log == [2, 2, 2] and model.forward.call_count == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(prompts="Hello"), "takes a list of prompts"),
        (dict(prompts=["Hello"], rows=0), "rows must be an integer of at least 1"),
        (dict(prompts=["Hello"], policy=RandomPolicy(TreeConfig(12, 3, 4))), "need a policy each"),
        (dict(prompts=["Hello", ""]), "^prompt 1: the prompt is empty"),
        (dict(prompts=["Hello", [5, 10**9]], plain=True), "^prompt 1: token id 1000000000"),
        (dict(prompts=["Hello", "a fox \ud83e"]), "^prompt 1: .* half of a character"),
    ],
)
def test_bad_input_is_refused_before_anything_is_decoded(tiny, monkeypatch, arguments, message):
    monkeypatch.setattr(Target, "forward", None)
    pytest.raises(SpecdecError, decode_many, tiny, **arguments).match(message)


class Stops(specdec.Static):
    """Ends its text as Ctrl-C does or by failing."""

    asks = frozenset({"size"})

    def __init__(self, stop):
        super().__init__(4, 1, 2)
        self.stop = stop

    def answer(self, question):
        raise self.stop


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_carries_what_was_decoded(tiny, stop):
    texts, ends = decode_many(tiny, PROMPTS, max_new_tokens=8), (KeyboardInterrupt, RuntimeError)
    policies = [None, None, Stops(stop), None]
    ended = pytest.raises(ends, decode_many, tiny, PROMPTS, policies.__getitem__, 8, rows=1)
    so_far = [text and text.tokens for text in ended.value.so_far]
    assert so_far == [texts[0].tokens, texts[1].tokens, None, None]
