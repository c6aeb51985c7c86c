"""Policies: what they may be asked, what they answer, how they combine, and how wrong answers are refused."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec.core.cycle import Engine, answer_of, checked_flag, checked_plan, checked_size
from specdec.core.policy import Chain, Policy, PolicyLike, RandomPolicy, Static, checked_policy, largest
from specdec.core.records import EXTEND, KINDS, PLAN, SIZE, Question, View
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError, check_kind, like

LIMITS = TreeConfig(12, 3, 4)


def question(kind, most=None) -> Question:
    return Question(kind, 10, 0, 0, LIMITS if kind == PLAN else most, None, None)


class Answers:
    """Answers with what it was given, and remembers what it was asked and shown."""

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


def test_static_is_never_asked():
    policy = Static(12, 3, 4)
    assert policy.asks == frozenset() and policy.plan == policy.limits == LIMITS
    for kind in KINDS:
        with pytest.raises(SpecdecError, match=kind):
            policy.answer(question(kind))


def test_static_default_is_the_official_tree():
    assert Static().plan == TreeConfig(60, 7, 10)


@pytest.mark.parametrize("bad", [(0, 7, 10), (60, -1, 10), (60, 7, 0), (60, 1, 4), (6.5, 2, 4)])
def test_impossible_trees_are_refused(bad):
    with pytest.raises(SpecdecError):
        Static(*bad)


def test_limits_of_a_static_shape_have_room_for_it():
    shape = StaticShape(EAGLE1_TREE)
    assert shape.limits == TreeConfig(26, 4, 4) == Static(shape=shape).limits
    wide = StaticShape(
        (*((a,) for a in (0, 1)), *itertools.product((0, 1), repeat=2), *itertools.product((0, 1), repeat=3))
    )
    assert (wide.top_k, wide.widest, wide.depth) == (2, 4, 2)
    limits = wide.limits
    assert limits.top_k == 4 and 1 + limits.pool_size >= 1 + 2 + 4 + 8


@pytest.mark.parametrize("asks", [set(c) for n in range(4) for c in itertools.combinations(KINDS, n)])
def test_random_policy_answers_legally_and_is_repeatable(asks):
    first, second = RandomPolicy(LIMITS, seed=3, asks=asks), RandomPolicy(LIMITS, seed=3, asks=asks)
    assert first.asks == asks
    for _ in range(200):
        for kind in asks:
            most = {EXTEND: 1, SIZE: 7}.get(kind)
            answer, again = first.answer(question(kind, most)), second.answer(question(kind, most))
            assert answer == again
            if kind == PLAN:
                assert checked_plan(answer, LIMITS) is answer
            elif kind == EXTEND:
                assert checked_flag(answer) is answer
            else:
                assert checked_size(answer, 7) == answer


def test_random_policy_reaches_every_corner():
    policy = RandomPolicy(LIMITS, seed=0)
    plans = [policy.answer(question(PLAN)) for _ in range(1500)]
    assert {p.depth for p in plans} == {0, 1, 2, 3} and {p.top_k for p in plans} == {1, 2, 3, 4}
    assert {p.total_tokens for p in plans} == set(range(1, 13))
    assert {policy.answer(question(SIZE, 5)) for _ in range(200)} == set(range(6))
    assert {policy.answer(question(EXTEND, 1)) for _ in range(50)} == {True, False}


def test_chain_sends_each_question_to_the_first_that_answers_it():
    stopper = Answers({EXTEND: True}, limits=TreeConfig(4, 6, 2), plan=TreeConfig(4, 1, 2))
    sizer = Answers({EXTEND: False, SIZE: 3}, limits=TreeConfig(30, 2, 9))
    both = Chain(stopper, sizer)
    assert both.asks == {EXTEND, SIZE} and both.plan == stopper.plan
    assert both.limits == TreeConfig(30, 6, 9)
    assert both.answer(question(EXTEND, 1)) is True and both.answer(question(SIZE, 5)) == 3
    assert (stopper.asked, sizer.asked) == ([EXTEND], [SIZE])
    both.observe("a row")
    both.reset()
    assert stopper.seen == sizer.seen == ["a row"] and stopper.resets == sizer.resets == 1
    pytest.raises(SpecdecError, Chain).match("at least one")


def test_random_plans_reach_all_that_is_allowed():
    """Every width, depth and size, and beams of their own only where they are asked for."""
    limits = TreeConfig(6, 2, 3, beam=(4,))
    for own_beams in (False, True):
        policy = RandomPolicy(limits, seed=1, smallest_top_k=2, own_beams=own_beams)
        plans = [policy.answer(Question(PLAN, 3, 0, 0, limits, None, None)) for _ in range(400)]
        assert {plan.top_k for plan in plans} == {2, 3} and {plan.depth for plan in plans} == {0, 1, 2}
        assert {plan.total_tokens for plan in plans} == {1, 2, 3, 4, 5, 6}
        widths = {width for plan in plans for width in plan.beam}
        assert widths == ({1, 2, 3, 4} if own_beams else set())
        beams = [policy._beam() for _ in range(400)]
        assert {len(beam) for beam in beams} == {0, 1, 2, 3} and 150 < beams.count(()) < 250
    with pytest.raises(SpecdecError, match="^smallest_top_k=4 is above the limits' top_k=3"):
        RandomPolicy(limits, smallest_top_k=4)


def test_the_largest_beam_is_kept_room_for():
    beams = [TreeConfig(6, 2, 4, beam=(3,)), TreeConfig(7, 2, 2)]
    assert largest(beams).widest == 3 == max(limits.widest for limits in beams)
    assert repr(Static(6, 2, 4, beam=(3,))) == "Static(6, 2, 4, beam=(3,))"
    assert repr(Static.of(StaticShape(EAGLE1_TREE))).count("beam") == 0


def test_copies_need_room_for_their_tokens_alone():
    narrow = TreeConfig(12, 10, 1)  # a chain
    assert checked_plan(CopiedTree(12), narrow) == CopiedTree(12)
    with pytest.raises(SpecdecError, match="total_tokens=13, but its limits reserve room for 12"):
        checked_plan(CopiedTree(13), narrow)


def test_those_that_draw_are_reseeded():
    class Draws(Answers):
        def reseed(self, number):
            self.number = number

    one, two, plain = Draws({EXTEND: True}), Draws({SIZE: 3}), Answers({PLAN: LIMITS})
    Chain(one, two, plain).reseed(7)
    assert one.number == two.number == 7
    pytest.raises(SpecdecError, Chain, plain, "eagle3").match("^each part of a Chain")


def test_what_is_like_a_policy_gets_the_defaults():
    own = Answers({SIZE: 3}, plan=TreeConfig(9, 2, 3))
    policy = checked_policy(own)
    assert isinstance(policy, Policy) and (policy.asks, policy.plan, policy.limits) == (own.asks, own.plan, LIMITS)
    policy.reset()
    policy.reseed(7)  # Policy's, which does nothing
    policy.observe("a row")
    assert policy.answer(question(SIZE, 5)) == 3 and (own.asked, own.seen, own.resets) == ([SIZE], ["a row"], 1)
    assert (policy.outputs, policy.tuned_on, policy.policies) == (None, (), (policy,))
    own.plan, own.outputs = LIMITS, 5
    assert policy.plan == LIMITS and policy.outputs == 5, "what it has is read from it, each time"
    assert checked_policy(policy) is policy
    own.answers.clear()
    with pytest.raises(SpecdecError, match="^policy Answers failed on a size question"):
        answer_of(policy, question(SIZE, 5))
    own.asks = "size"
    pytest.raises(SpecdecError, checked_policy, own).match("^asks is a set of kinds")


class Proxy:
    """What it has it gets from another object, when it is asked; isinstance() does not see that from Python 3.12 on."""

    def __init__(self, own):
        self.own = own

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "own"), name)


def test_what_is_like_a_policy_may_hand_on_what_it_is_asked():
    own, check = Answers({SIZE: 3}), functools.partial(check_kind, "policy", hint=PolicyLike | None)
    for policy in (own, Proxy(own), Chain(Proxy(own)), checked_policy(Proxy(own)), Static(), None):
        check(value=policy)
        assert isinstance(checked_policy(policy), Policy)
    for bad in (Proxy(object()), "eagle3", Static, Proxy(TreeConfig())):
        pytest.raises(SpecdecError, checked_policy, bad).match("^policy must be a policy such as")
    pytest.raises(SpecdecError, check, value=Proxy(object())).match("^policy must be PolicyLike")
    view = {name: None for name in (*View.__annotations__, *vars(View), "clock", "candidates") if name[0] != "_"}
    assert not like(SimpleNamespace(**view), Engine), "what a protocol inherits counts, and so does its own"


def test_a_policy_that_states_nothing_is_the_default_tree():
    policy = Policy()
    assert (policy.asks, policy.plan, policy.limits) == (frozenset(), TreeConfig(), TreeConfig())
    policy.reset(), policy.reseed(1), policy.observe("a row")
    assert policy.policies == (policy,)
    with pytest.raises(SpecdecError, match="^Policy answers no plan question"):
        policy.answer(question(PLAN))


def test_largest_limits_hold_all():
    assert largest([TreeConfig(60, 2, 8), TreeConfig(5, 9, 1)]) == TreeConfig(60, 9, 8)


@pytest.mark.parametrize("answer", [True, False, 1, 0, 1.0, np.True_, np.int64(0), torch.tensor(True), torch.tensor(0)])
def test_flags(answer):
    assert checked_flag(answer) is bool(answer)


@pytest.mark.parametrize("answer", [None, 2, -1, "yes", 0.5, float("nan"), np.ones(2), torch.ones(2), [], LIMITS])
def test_bad_flags(answer):
    pytest.raises(SpecdecError, checked_flag, answer).match("EXTEND with True or False")


@pytest.mark.parametrize("answer", [0, 7, 3.0, np.int64(7), np.float32(2), torch.tensor(5)])
def test_sizes(answer):
    assert checked_size(answer, 7) == int(answer)
    assert type(checked_size(answer, 7)) is int


@pytest.mark.parametrize(
    "answer", [-1, 8, 2.5, float("nan"), float("inf"), None, "3", True, np.arange(3), torch.ones(2), 10**30]
)
def test_bad_sizes(answer):
    pytest.raises(SpecdecError, checked_size, answer, 7).match("SIZE with an integer from 0 to 7")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "a TreeConfig, a StaticShape or a CopiedTree"),
        ((12, 3, 4), "a TreeConfig, a StaticShape or a CopiedTree"),
        (TreeConfig(13, 3, 4), "total_tokens=13"),
        (TreeConfig(2, 4, 1), "depth=4"),
        (TreeConfig(2, 0, 5), "top_k=5"),
        (StaticShape([(rank,) for rank in range(5)]), "top_k=5"),
        (StaticShape([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]), "depth=4"),
    ],
)
def test_bad_plans(answer, message):
    pytest.raises(SpecdecError, checked_plan, answer, LIMITS).match(message)


def test_a_failing_policy_is_named():
    class Careless(Answers):
        def answer(self, question):
            return {}["forgotten"]

    with pytest.raises(SpecdecError, match=r"policy Careless failed on a size question \(KeyError: 'forgotten'\)"):
        answer_of(Careless({SIZE: 1}), question(SIZE, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Static(shape=3), lambda: Static(shape="x"), lambda: Static.of(None),
        lambda: RandomPolicy(TreeConfig(6, 2, 2), smallest_top_k=3), lambda: RandomPolicy(TreeConfig(6, 2, 2), smallest_top_k=0),
        lambda: RandomPolicy(TreeConfig(6, 2, 2), own_beams="x"),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_refused(make):
    pytest.raises(SpecdecError, make).match("shape|tree|smallest_top_k|own_beams")
