"""What an audit is made of: the policies it tries, a row per text, the verdict on a near-tie by
hand, a test's own numbers.
"""

import contextlib
import random
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.bars import Bar
from fakes.pairs import shared_bigrams

from specdec.core.policy import Chain, RandomPolicy, Static
from specdec.core.records import Generation
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import Picker
from specdec.errors import SpecdecError
from specdec.evaluation import lossless
from specdec.evaluation.lossless import COLUMNS, Audit, ChiSquare, audit, distribution_test

TREES = (
    "1/0/1 2/0/1 4/2/1 8/6/1 7/0/6 12/1/4 16/3/4 26/2/6 40/4/6 60/5/10 12,5,4,2,1 30,4,2,2,4,6"
).split()
SMALL = TreeConfig(16, 4, 4)
LARGE = TreeConfig(60, 5, 8)
ASKED = "plan extend size plan+extend plan+size extend+size plan+extend+size".split()


def said(policy: RandomPolicy) -> tuple:
    return policy.limits, policy._random.getstate(), set(policy.asks), policy.own_beams


def test_the_policies_that_are_tried():
    policies = lossless.default_policies(seed=40)
    random_ones = [*(f"random {asks}" for asks in ASKED), "random, large", "random chains"]
    static = [f"static {name}" for name in TREES]
    assert list(policies) == [*static, "EAGLE-1", "bushy shape", *random_ones, "two chained"]
    for name in TREES:
        assert policies[f"static {name}"].plan.text == name.replace("/", ",")
    assert policies["EAGLE-1"].plan.choices == StaticShape(EAGLE1_TREE).choices
    below = [(), (0,), (1,), (0, 0), (1, 0)]
    bushy = StaticShape(tuple((child, *rest) for child in range(3) for rest in below))
    assert policies["bushy shape"].plan.choices == bushy.choices
    limits = [*[SMALL] * 7, LARGE, TreeConfig(7, 5, 1)]
    for more, (name, asks) in enumerate(
        zip(random_ones, [*ASKED, ASKED[-1], ASKED[-1]], strict=True)
    ):
        started = random.Random(40 + more).getstate()
        assert said(policies[name]) == (
            limits[more],
            started,
            set(asks.split("+")),
            name != "random chains",
        )
    chained = policies["two chained"]
    assert isinstance(chained, Chain)
    assert [said(policy) for policy in chained.policies] == [
        (SMALL, random.Random(49).getstate(), {"extend"}, False),
        (LARGE, random.Random(50).getstate(), {"size"}, False),
    ]
    assert said(lossless.default_policies()["random plan"])[1] == random.Random(0).getstate()


def made_up(
    policy="a",
    temperature=0.0,
    dtype="float32",
    tokens=8,
    questions=1,
    equal=True,
    gap=None,
    tie=False,
) -> dict:
    gap = float("nan") if gap is None else gap
    row = dict(
        prompt=0, policy=policy, temperature=temperature, dtype=dtype, tokens=tokens, accepted_tok=3
    )
    row |= dict(
        questions=questions,
        equal=equal,
        first_divergence=None if equal else 2,
        top2_gap=gap,
        gap=gap,
    )
    return row | dict(tolerance=0.5, near_tie=tie)


def test_the_table_of_an_audit_is_whole_and_who_was_asked_nothing_has_shown_nothing():
    rows = [
        made_up(),
        made_up("b", dtype="bfloat16", equal=False, gap=0.25, tie=True),
        made_up("b", dtype="bfloat16", equal=False, gap=0.4, tie=True) | {"prompt": 1},
        made_up("b", dtype="bfloat16", equal=False, gap=2.0),
        made_up("b", 1.0, tokens=5),
        made_up("c", 1.0, "float16", equal=False, gap=0.125, tie=True),
    ]
    found = Audit(pd.DataFrame(rows, columns=COLUMNS))
    columns = [
        "temperature",
        "prompts",
        "policies",
        "tokens",
        "accepted_tok",
        "differing",
        "failures",
        "texts",
    ]
    assert list(found.table) == [*columns[:3], "texts", *columns[3:7], "worst_tie"]
    assert found.table.values.tolist() == [
        [0.0, 2, 2, 4, 32, 12, 3, 1, 0.8],
        [1.0, 1, 2, 2, 13, 6, 1, 0, 0.25],
    ]
    assert found.failures.index.tolist() == [3] and not found.passed and found.unasked == []
    assert Audit(found.rows.drop(index=3)).passed
    rows = [made_up(policy, questions=asked) for policy, asked in (("a", 0), ("b", 0), ("b", 2))]
    rows = pd.DataFrame(rows, columns=COLUMNS)
    assert Audit(rows).passed and Audit(rows).unasked == []
    found = Audit(rows, frozenset({"a", "b", "never decoded"}))
    assert found.unasked == ["a"] and not found.passed


def test_every_policy_decodes_every_prompt_at_every_temperature(monkeypatch):
    asked = Mock()
    pair = shared_bigrams()
    facts = [
        dict(accepted_tok=2, kept_tok=1, questions=4),
        dict(accepted_tok=1, kept_tok=3, questions=1),
    ]
    cycles = [SimpleNamespace(**one) for one in facts]
    asked.plain.return_value = Generation([5, 6, 7], 1)
    asked.tree.side_effect = lambda *given, **_: Generation(
        [5, 6, 7][: given[2].plan.depth + 1], 1, cycles
    )
    monkeypatch.setattr(lossless, "autoregress", asked.plain)
    monkeypatch.setattr(lossless, "decode", asked.tree)
    monkeypatch.setattr(lossless, "tqdm", Bar)
    short = Static(4, 1, 3)
    whole = RandomPolicy(TreeConfig(6, 2, 3), asks=("size",))
    found = audit(pair, [[1], [2, 3]], {"short": short, "whole": whole}, seed=7, top_k=5)
    expected = []
    for number, prompt in enumerate(([1], [2, 3])):
        for temperature in (0.0, 1.0):
            settings = dict(max_new_tokens=32, temperature=temperature, seed=7 + number, top_k=5)
            expected.append(call.plain(pair, prompt, **settings))
            expected += [call.tree(pair, prompt, policy, **settings) for policy in (short, whole)]
    assert asked.mock_calls == expected
    assert found.asking == {"whole"}
    assert list(found.rows) == list(COLUMNS)
    first = found.rows.iloc[0].to_dict()
    nothing = {name: first.pop(name) for name in ("top2_gap", "tolerance")}
    told = dict(
        prompt=0,
        policy="short",
        temperature=0.0,
        dtype="float32",
        tokens=2,
        accepted_tok=2,
        questions=5,
    )
    told |= dict(equal=False, first_divergence=2, gap=float("inf"), near_tie=False)
    assert np.isnan(list(nothing.values())).all() and first == told
    assert found.rows["equal"].tolist() == [False, True] * 4
    assert found.rows["prompt"].tolist() == [0] * 4 + [1] * 4
    assert found.rows["first_divergence"].isna().tolist() == [False, True] * 4
    bar = Bar.made.pop()
    assert bar.total == bar.n == 8 and bar.named == {"disable": False}
    audit(pair, [[1]], [short], progress=False)
    assert asked.plain.call_args.kwargs["seed"] == 0 and Bar.made.pop().named["disable"] is True


def test_several_texts_are_decoded_at_once(monkeypatch):
    asked = []
    pair = shared_bigrams()

    def decode_many(pair, prompts, policy_of, **settings):
        asked.append((prompts, [policy_of(number) for number in range(len(prompts))], settings))
        return [
            lossless.decode(pair, [1, 2], policy_of(number), max_new_tokens=4)
            for number in range(len(prompts))
        ]

    monkeypatch.setattr(lossless, "decode_many", decode_many)
    trees = [Static(4, 1, 3), Static(6, 2, 3), Static(3, 1, 1)]
    found = audit(pair, [[1, 2]], trees, 4, (0.0,), rows=2, progress=False)
    assert asked == [([[1, 2]] * 3, trees, dict(rows=2, max_new_tokens=4, temperature=0.0, seed=0))]
    assert found.passed and found.rows["policy"].tolist() == ["0 Static", "1 Static", "2 Static"]
    monkeypatch.setattr(lossless, "decode_many", None)
    assert audit(pair, [[1, 2]], trees[:1], 4, (0.0,), rows=1, progress=False).passed


class Planted:
    """A target of three tokens of text whose token-by-token scores are `steps`, and those of one
    forward `steps` + `moved`.
    """

    device = torch.device("cpu")
    dtype = torch.bfloat16

    def __init__(self, steps, moved):
        self.steps = steps
        self.block = steps + moved
        self.asked = []

    @contextlib.contextmanager
    def inference(self, taps):
        assert taps is False
        yield

    def new_cache(self, room):
        return [0, room]

    def forward(self, tokens, cache, last_only=False):
        read = cache[0] + len(tokens)
        assert read <= cache[1]
        cache[0] = read
        self.asked.append((tokens.tolist(), last_only))
        rows = (
            self.steps[read - 2 : read - 1]
            if last_only
            else torch.cat((torch.zeros(1, 12), self.block))
        )
        return SimpleNamespace(logits=rows)


def planted(moved, logits, temperature=1.0):
    target = Planted(logits, moved)
    pair = SimpleNamespace(target=target, ids_of=lambda prompt: prompt)
    return lossless._NearTies(
        pair, [8, 9], [0, 1, 0], Picker.from_settings(temperature, 3), temperature
    ), target


def test_a_near_tie_by_hand(monkeypatch):
    """Of twelve tokens the ten best are rivals; what moves all of them alike is no noise, nor what
    moves the others.
    """
    rows = [(9.0, 8.75, 7), (6.0, 7.0, 5), (9.0, 1.0, 0)]
    logits = torch.tensor(
        [[first, second, *range(third, third - 10, -1)] for first, second, third in rows]
    )
    moved = torch.zeros(3, 12)
    moved[0, :] = 5.0  # all alike
    moved[1, 10:] = 7.0  # of no rival
    moved[2, 0] = 1.0  # ten rivals, one of which moved by one: a variance of a tenth
    ties, target = planted(moved, logits, temperature=0.5)
    assert (lossless.RIVALS, lossless.NOISES, lossless.MOST_CELLS) == (10, 6, 4096)
    noise = (2 * 0.1 / 3) ** 0.5
    assert ties.measured[1] == pytest.approx(noise) and ties.measured[0].tolist() == logits.tolist()
    assert target.asked == [([8, 9], True), ([0], True), ([1], True), ([8, 9, 0, 1], False)]
    before = []
    monkeypatch.setattr(
        ties.picker,
        "scores",
        lambda row, ids: before.append(ids.tolist()) or 2 * row,
        raising=False,
    )
    found = ties.compare([0, 3, 0])
    assert found == (
        False,
        1,
        pytest.approx(2.0),
        pytest.approx(2 * 3.0),
        pytest.approx(6 * noise / 0.5),
        False,
    )
    assert ties.compare([1, 1, 0]) == (False, 0, 0.5, 0.5, pytest.approx(6 * noise / 0.5), True)
    assert before == [[8, 9, 0], [8, 9]], "what was written before the first that differs"
    assert ties.compare([0, 1, 0])[:2] == (True, None) and ties.compare([0, 1, 0])[5] is False
    assert ties.compare([0, 1])[:2] == (False, 2)
    assert ties.compare([0, 1, 0, 4])[1:6:2] == (3, float("inf"), False)
    quiet, _ = planted(torch.zeros(3, 12), logits, temperature=0.0)
    monkeypatch.setattr(quiet.picker, "scores", lambda row, ids: row, raising=False)
    rounding = torch.finfo(torch.bfloat16).eps * 9.0
    assert quiet.compare([1, 1, 0])[4] == pytest.approx(rounding), (
        "of a greedy text without noise one rounding is left"
    )


def test_the_most_continuations_that_are_computed_and_counts_of_seeds_in_a_row(monkeypatch):
    pair = shared_bigrams()
    monkeypatch.setattr(lossless, "MOST_CELLS", 9)
    law = lossless.continuation_law(pair, [3], 2, Picker.from_settings(1.0, top_k=3))
    assert len(law) == 9 and sum(law.values()) == pytest.approx(1)
    monkeypatch.setattr(lossless, "MOST_CELLS", 8)
    many = pytest.raises(
        SpecdecError, lossless.continuation_law, pair, [3], 2, Picker.from_settings(1.0, top_k=3)
    )
    many.match("more than 8 continuations of 2 tokens")
    law = Mock(return_value={(0,): 0.25, (1,): 0.75})
    pair = shared_bigrams()
    tree = Static(3, 1, 1)
    decode = Mock(
        side_effect=lambda *given, seed, **named: SimpleNamespace(tokens=[int(seed % 4 > 0)])
    )
    monkeypatch.setattr(lossless, "continuation_law", law)
    monkeypatch.setattr(lossless, "decode", decode)
    few = dict(draws=40, seed=8, new_tok=1, top_k=2, level=0.25, progress=False)
    assert distribution_test(pair, [3], tree, **few) == ChiSquare(0.0, 1, 1.0, 40, 0.25)
    *given, picker = law.call_args.args
    assert given == [pair, [3], 1] and picker.sample
    settings = dict(max_new_tokens=1, stop_tokens=(), temperature=1.0, top_k=2)
    assert decode.mock_calls == [
        call(pair, [3], tree, seed=seed, **settings) for seed in range(8, 48)
    ]
    draw = Mock(return_value=[2])
    wrong = distribution_test(pair, [3], draw=draw, **few)
    assert wrong == ChiSquare(float("inf"), 0, 0.0, 40, 0.25) and not wrong.passed
    assert draw.mock_calls == [call(seed) for seed in range(8, 48)]
