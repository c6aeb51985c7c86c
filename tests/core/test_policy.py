"""Policies: what they may be asked, what they answer, how they combine; wrong answers."""

import itertools

import numpy as np
import pytest
import torch

from specdec.core.cycle import checked_flag, checked_plan, checked_size
from specdec.core.policy import Chain, Policy, RandomPolicy, Static, checked_policy, unused
from specdec.core.records import EXTEND, PLAN, SIZE, Question
from specdec.core.tree import StaticShape
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError

LIMITS = TreeConfig(12, 3, 4)


def question(kind, most=None) -> Question:
    return Question(kind, 10, 0, 0, most, None, None)


class Answers(Policy):
    """Answers with what it was given, and remembers what it was asked and shown."""

    def __init__(self, answers: dict, limits=LIMITS, plan=LIMITS):
        self.answers, self.asks = answers, frozenset(answers)
        self.limits, self.plan = limits, plan
        self.log = []

    def reset(self):
        self.log.append("reset")

    def reseed(self, number):
        self.log.append(number)

    def answer(self, question):
        self.log.append(question.kind)
        return self.answers[question.kind]

    def observe(self, cycle):
        self.log.append(cycle)


def test_static_is_never_asked_and_has_room_for_its_shape():
    policy = Static(12, 3, 4)
    assert policy.asks == frozenset() and policy.plan == policy.limits == LIMITS
    pytest.raises(SpecdecError, policy.answer, question(SIZE)).match("answers no size")
    assert Static().plan == TreeConfig(60, 7, 10), "the official tree"
    assert Static(9, 3, 4, beam=(2, 1)).plan == TreeConfig(9, 3, 4, beam=(2, 1))
    assert Policy().outputs is None and Policy().plan == Policy().limits == TreeConfig()
    wide = StaticShape([path for n in (1, 2, 3) for path in itertools.product((0, 1), repeat=n)])
    assert (wide.top_k, wide.widest, wide.depth) == (2, 4, 2)
    assert Static(shape=wide).limits == wide.limits and wide.limits.top_k == 4


def test_random_answers_reach_all_that_is_allowed():
    limits = TreeConfig(6, 2, 3, beam=(4,))
    for own_beams, widths in ((False, set()), (True, {1, 2, 3, 4})):
        policy = RandomPolicy(limits, seed=1, own_beams=own_beams)
        again = RandomPolicy(limits, seed=1, own_beams=own_beams)
        plans = [policy.answer(question(PLAN)) for _ in range(400)]
        assert plans == [again.answer(question(PLAN)) for _ in range(400)]
        assert {plan.top_k for plan in plans} == {1, 2, 3}
        assert {plan.depth for plan in plans} == {0, 1, 2}
        assert {plan.total_tokens for plan in plans} == {1, 2, 3, 4, 5, 6}
        assert {width for plan in plans for width in plan.beam} == widths
    assert {policy.answer(question(SIZE, 5)) for _ in range(200)} == set(range(6))
    assert {policy.answer(question(EXTEND, 1)) for _ in range(50)} == {True, False}


def test_chain_sends_each_question_to_the_first_that_answers_it():
    stopper = Answers({EXTEND: True}, limits=TreeConfig(4, 6, 2), plan=TreeConfig(4, 1, 2))
    sizer = Answers({EXTEND: False, SIZE: 3}, limits=TreeConfig(30, 2, 9))
    both = Chain(stopper, sizer)
    assert both.asks == {EXTEND, SIZE} and both.plan == stopper.plan
    assert both.limits == TreeConfig(30, 6, 9, beam=(9,)) and both.policies == (stopper, sizer)
    both.reset()
    both.reseed(7)
    assert both.answer(question(EXTEND)) is True and both.answer(question(SIZE)) == 3
    both.observe("a row")
    assert stopper.log == ["reset", 7, EXTEND, "a row"]
    assert sizer.log == ["reset", 7, SIZE, "a row"]
    pytest.raises(SpecdecError, Chain, sizer, "eagle3").match("a policy is")


def test_what_is_no_policy():
    assert checked_policy(None).plan == TreeConfig()
    answers = Answers({SIZE: 3})
    assert checked_policy(answers) is answers
    pytest.raises(SpecdecError, checked_policy, Static).match("a policy is such as")
    answers.asks = {"sizes"}
    pytest.raises(SpecdecError, checked_policy, answers).match("did you mean 'size'")


def test_a_text_gets_a_policy_of_its_own():
    static, answers = Static(), Answers({SIZE: 3})
    assert unused(static) is static
    copied = unused(answers)
    copied.answer(question(SIZE, 5))
    assert copied.log == [SIZE] and answers.log == []


def test_flags_sizes_and_plans():
    for answer in (True, False, 1, 0, np.True_, torch.tensor(0)):
        assert checked_flag(answer) is bool(answer)
    for answer in (0, 7, np.int64(7), torch.tensor(5)):
        assert checked_size(answer, 7) == int(answer) and type(checked_size(answer, 7)) is int
    for answer in (None, -1, 2.5):
        pytest.raises(SpecdecError, checked_flag, answer).match("EXTEND with True or False")
        pytest.raises(SpecdecError, checked_size, answer, 7).match("SIZE .* from 0 to 7")
    pytest.raises(SpecdecError, checked_size, 8, 7)
    for answer, message in (
        ((12, 3, 4), "a TreeConfig, a StaticShape or a CopiedTree"),
        (TreeConfig(13, 3, 4), "total_tokens=13, but its limits reserve room for 12"),
        (TreeConfig(2, 4, 1), "depth=4"),
        (StaticShape([(rank,) for rank in range(5)]), "top_k=5"),
        (CopiedTree(13), "total_tokens=13"),
    ):
        pytest.raises(SpecdecError, checked_plan, answer, LIMITS).match(message)
    # copies need room for their tokens alone
    assert checked_plan(CopiedTree(12), TreeConfig(12, 10, 1)) == CopiedTree(12)
