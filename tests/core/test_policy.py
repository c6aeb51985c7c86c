"""Policies: what they may be asked, what they answer, how they combine, and how wrong answers are
refused.
"""

import itertools

import numpy as np
import pytest
import torch

from specdec.core.cycle import answer_of, checked_flag, checked_plan, checked_size
from specdec.core.policy import Chain, Policy, RandomPolicy, Static, checked_policy, largest, unused
from specdec.core.records import EXTEND, KINDS, PLAN, SIZE, Question
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError

LIMITS = TreeConfig(12, 3, 4)


def question(kind, most=None) -> Question:
    return Question(kind, 10, 0, 0, LIMITS if kind == PLAN else most, None, None)


class Answers(Policy):  # answers with what it was given, and remembers what it was asked and shown
    def __init__(self, answers: dict, limits=LIMITS, plan=LIMITS):
        self.answers, self.asks = answers, frozenset(answers)
        self.limits, self.plan = limits, plan
        self.asked, self.seen, self.resets = [], [], 0

    def reset(self):
        self.resets += 1

    def answer(self, question):
        self.asked.append(question.kind)
        return self.answers[question.kind]

    def observe(self, cycle):
        self.seen.append(cycle)


def test_static_is_never_asked_and_has_room_for_its_shape():
    policy = Static(12, 3, 4)
    assert policy.asks == frozenset() and policy.plan == policy.limits == LIMITS
    for kind in KINDS:
        pytest.raises(SpecdecError, policy.answer, question(kind)).match(kind)
    assert Static().plan == TreeConfig(60, 7, 10), "the official tree"
    for shape in (3, "x"):
        pytest.raises(SpecdecError, Static, shape=shape).match("the shape of a Static")
    pytest.raises(SpecdecError, Static.of, None).match("the tree of Static.of")
    wide = StaticShape(
        [path for length in (1, 2, 3) for path in itertools.product((0, 1), repeat=length)]
    )
    assert (wide.top_k, wide.widest, wide.depth) == (2, 4, 2)
    assert wide.limits.top_k == 4 and 1 + wide.limits.pool_size >= 1 + 2 + 4 + 8
    assert Static(shape=wide).limits == wide.limits


@pytest.mark.parametrize(
    "asks", [set(c) for n in range(4) for c in itertools.combinations(KINDS, n)]
)
def test_random_policy_answers_legally_and_is_repeatable(asks):
    first, second = RandomPolicy(LIMITS, seed=3, asks=asks), RandomPolicy(LIMITS, seed=3, asks=asks)
    assert first.asks == asks
    for _ in range(200):
        for kind in asks:
            check, most = {
                PLAN: (checked_plan, LIMITS),
                EXTEND: (checked_flag, 1),
                SIZE: (checked_size, 7),
            }[kind]
            answer, again = first.answer(question(kind, most)), second.answer(question(kind, most))
            assert answer == again == check(answer, most)
            assert type(check(answer, most)) is type(answer)


def test_chain_sends_each_question_to_the_first_that_answers_it():
    class Draws(Answers):
        def reseed(self, number):
            self.number = number

    stopper = Draws({EXTEND: True}, limits=TreeConfig(4, 6, 2), plan=TreeConfig(4, 1, 2))
    sizer = Answers({EXTEND: False, SIZE: 3}, limits=TreeConfig(30, 2, 9))
    both = Chain(stopper, sizer)
    assert both.asks == {EXTEND, SIZE} and both.plan == stopper.plan
    assert both.limits == TreeConfig(30, 6, 9)
    assert both.answer(question(EXTEND, 1)) is True and both.answer(question(SIZE, 5)) == 3
    assert (stopper.asked, sizer.asked) == ([EXTEND], [SIZE])
    both.observe("a row")
    both.reset()
    assert stopper.seen == sizer.seen == ["a row"] and stopper.resets == sizer.resets == 1
    both.reseed(7)  # those that draw
    assert stopper.number == 7
    pytest.raises(SpecdecError, Chain, sizer, "eagle3").match("^each part of a Chain")


def test_random_answers_reach_all_that_is_allowed():
    limits = TreeConfig(6, 2, 3, beam=(4,))
    for own_beams in (False, True):
        policy = RandomPolicy(limits, seed=1, smallest_top_k=2, own_beams=own_beams)
        plans = [policy.answer(question(PLAN)) for _ in range(400)]
        assert {plan.top_k for plan in plans} == {2, 3}
        assert {plan.depth for plan in plans} == {0, 1, 2}
        assert {plan.total_tokens for plan in plans} == {1, 2, 3, 4, 5, 6}
        assert {width for plan in plans for width in plan.beam} == (
            {1, 2, 3, 4} if own_beams else set()
        )
        beams = [policy._beam() for _ in range(400)]
        assert {len(beam) for beam in beams} == {0, 1, 2, 3} and 150 < beams.count(()) < 250
    assert {policy.answer(question(SIZE, 5)) for _ in range(200)} == set(range(6))
    assert {policy.answer(question(EXTEND, 1)) for _ in range(50)} == {True, False}
    for bad, message in ((dict(own_beams="x"), "own_beams of .* must be bool"),):
        pytest.raises(SpecdecError, RandomPolicy, limits, **bad).match(message)
    assert {RandomPolicy(limits, seed=seed).answer(question(PLAN)).top_k for seed in range(30)} == {
        1,
        2,
        3,
    }


def test_room_is_kept_for_the_largest_beam_and_of_copies_for_their_tokens_alone():
    beams = [TreeConfig(6, 2, 4, beam=(3,)), TreeConfig(7, 2, 2)]
    assert largest(beams).widest == 3 == max(limits.widest for limits in beams)
    assert largest([TreeConfig(60, 2, 8), TreeConfig(5, 9, 1)]) == TreeConfig(60, 9, 8)
    assert repr(Static(6, 2, 4, beam=(3,))) == "Static(6, 2, 4, beam=(3,))"
    assert repr(Static.of(StaticShape(EAGLE1_TREE))).count("beam") == 0
    narrow = TreeConfig(12, 10, 1)  # a chain
    assert checked_plan(CopiedTree(12), narrow) == CopiedTree(12)
    with pytest.raises(SpecdecError, match="total_tokens=13, but its limits reserve room for 12"):
        checked_plan(CopiedTree(13), narrow)


def test_the_defaults_of_a_policy_and_what_is_none():
    policy = Policy()
    policy.reset()
    policy.reseed(1)
    policy.observe("a row")
    assert (policy.asks, policy.plan, policy.limits) == (frozenset(), TreeConfig(), TreeConfig())
    assert policy.policies == (policy,)
    pytest.raises(SpecdecError, policy.answer, question(PLAN)).match("answers no plan question")
    answers = Answers({SIZE: 3})
    assert checked_policy(answers) is answers and checked_policy(None).plan == TreeConfig()
    answers.answers.clear()
    with pytest.raises(SpecdecError, match="Answers failed on a size question .KeyError: 'size'"):
        answer_of(answers, question(SIZE, 5))
    for bad in ("eagle3", Static, TreeConfig(), object()):
        pytest.raises(SpecdecError, checked_policy, bad).match("^policy must be a policy such as")
    answers.asks = "size"
    pytest.raises(SpecdecError, checked_policy, answers).match("^asks is a set of kinds")
    answers.asks = {"sizes"}
    pytest.raises(SpecdecError, checked_policy, answers).match("did you mean 'size'")


def test_a_text_gets_a_policy_of_its_own():
    static = Static()
    assert unused(static) is static
    answers = Answers({SIZE: 3})
    copied = unused(answers)
    copied.answer(question(SIZE, 5))
    assert copied.asked == [SIZE] and answers.asked == []


def test_flags_sizes_and_bad_plans():
    for answer in (
        True,
        False,
        1,
        0,
        1.0,
        np.True_,
        np.int64(0),
        torch.tensor(True),
        torch.tensor(0),
    ):
        assert checked_flag(answer) is bool(answer)
    for answer in (0, 7, 3.0, np.int64(7), np.float32(2), torch.tensor(5)):
        assert checked_size(answer, 7) == int(answer) and type(checked_size(answer, 7)) is int
    neither = [None, -1, "3", 2.5, float("nan"), np.arange(3), torch.ones(2), 10**30]
    for answer in (*neither, 2, [], LIMITS):
        pytest.raises(SpecdecError, checked_flag, answer).match("EXTEND with True or False")
    for answer in (*neither, 8, float("inf"), True):
        pytest.raises(SpecdecError, checked_size, answer, 7).match(
            "SIZE with an integer from 0 to 7"
        )
    for answer, message in (
        (None, "a TreeConfig, a StaticShape or a CopiedTree"),
        ((12, 3, 4), "a TreeConfig, a StaticShape or a CopiedTree"),
        (TreeConfig(13, 3, 4), "total_tokens=13"),
        (TreeConfig(2, 4, 1), "depth=4"),
        (TreeConfig(2, 0, 5), "top_k=5"),
        (StaticShape([(rank,) for rank in range(5)]), "top_k=5"),
        (StaticShape([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]), "depth=4"),
    ):
        pytest.raises(SpecdecError, checked_plan, answer, LIMITS).match(message)
