"""Policies answer questions with small integers; no answer can change the text.

Here: the base class, the constant policy, a random one for audits, and a chain of several. Learned
policies are in `policies`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.core.records import EXTEND, KINDS, PLAN, Cycle, Question
from specdec.core.tree_config import Beam, CopiedTree, Plan, TreeConfig, plain_beam, pool_size
from specdec.errors import SpecdecError, check_integer, check_kind, check_name


class Policy:
    """Shapes the trees of a turn, cycle by cycle. Subclasses define what they need."""

    asks: frozenset[str] = frozenset()  # the kinds of questions it answers
    limits: TreeConfig = TreeConfig()  # the largest tree it may ask for; memory is reserved for it
    plan: Plan = TreeConfig()  # used for questions that it does not answer
    choices: Sequence[Any] = ()  # what the outputs mean, if there is one for each
    outputs: Any = None  # the network's last output, for display
    # pair, costs and choices of one that was trained; never changed in place
    trained_for: dict[str, Any] = {}  # noqa: RUF012
    tuned_on: Sequence[Any] = ()  # prompts whose answers it has seen: not to be evaluated on

    @property
    def policies(self) -> Sequence[Policy]:
        """The policies it consists of; itself if it is no Chain."""
        return (self,)

    def reset(self) -> None:
        """A turn begins."""

    def reseed(self, number: int) -> None:
        """Seed further random draws with the policy's own seed and this number."""

    def answer(self, question: Question) -> Any:
        """A TreeConfig or StaticShape to PLAN, a flag to EXTEND, a number of nodes to SIZE."""
        raise SpecdecError(f"{type(self).__name__} answers no {question.kind} question.")

    def observe(self, cycle: Cycle) -> None:
        """A cycle has finished."""


class Static(Policy):
    """The same tree in every cycle (EAGLE-2, EAGLE-3), or a `StaticShape` (EAGLE-1, Medusa).

    >>> Static(total_tokens=60, depth=7, top_k=10).plan
    TreeConfig(total_tokens=60, depth=7, top_k=10, flat_nodes=0, beam=())
    """

    def __init__(
        self,
        total_tokens: int = 60,
        depth: int = 7,
        top_k: int = 10,
        shape: Plan | None = None,
        beam: Beam = (),
    ):
        shape = shape or TreeConfig(total_tokens, depth, top_k, beam=beam)
        check_kind("the shape of a Static", shape, Plan)
        self.plan = shape
        self.limits = shape.limits

    @classmethod
    def of(cls, tree: Plan) -> Static:
        """The policy of one TreeConfig, StaticShape or CopiedTree."""
        return cls(shape=tree)

    def __repr__(self) -> str:
        plan = self.plan
        if isinstance(plan, CopiedTree):
            return f"Static.of({plan})"
        beam = f", beam={plan.beam}" if plan.beam else ""
        return f"Static({plan.total_tokens}, {plan.depth}, {plan.top_k}{beam})"


class RandomPolicy(Policy):
    """Random legal answers to the given kinds of questions. For audits and property tests.

    own_beams: also beams other than the number of children; only a family's recording has those.

    >>> policy = RandomPolicy(TreeConfig(12, 3, 4), seed=1, asks=("extend",))
    >>> sorted(policy.asks), policy.plan == policy.limits
    (['extend'], True)
    """

    def __init__(
        self,
        limits: TreeConfig,
        seed: int = 0,
        asks: Iterable[str] = KINDS,
        own_beams: bool = False,
    ):
        self.limits = self.plan = limits
        self.asks = frozenset(asks)
        self.own_beams = own_beams
        self._random = random.Random(check_integer("seed", seed))

    def answer(self, question: Question) -> Any:
        if question.kind == EXTEND:
            return self._random.random() < 0.7
        if question.kind != PLAN:
            return self._random.randint(0, question.largest)
        # any tree within the limits, also one that drafts more than it verifies
        top_k = self._random.randint(1, self.limits.top_k)
        depth = self._random.randint(0, self.limits.depth)
        beam: Beam = ()
        if self.own_beams:
            # nodes to expand on up to three levels; half the time as many as there are children
            levels = self._random.choice((0, 0, 0, 1, 2, 3))
            widths = [self._random.randint(1, self.limits.widest) for _ in range(levels)]
            beam = plain_beam(top_k, tuple(widths))
        verify_nodes = min(self.limits.verify_nodes, pool_size(depth, top_k, beam))
        return TreeConfig(self._random.randint(1, verify_nodes + 1), depth, top_k, beam=beam)


class Chain(Policy):
    """Several policies as one: each question goes to the first that answers its kind.

    >>> limits = TreeConfig(12, 3, 4)
    >>> extend = RandomPolicy(limits, asks=("extend",))
    >>> sorted(Chain(extend, RandomPolicy(limits, asks=("size",))).asks)
    ['extend', 'size']
    """

    policies: Sequence[Policy] = ()

    def __init__(self, *policies: Policy):
        self.policies = tuple(checked_policy(policy) for policy in policies)
        # the first policy that answers a kind
        self._answers: dict[str, Policy] = {}
        for policy in self.policies:
            for kind in policy.asks:
                self._answers.setdefault(kind, policy)
        self.asks = frozenset(self._answers)
        self.plan = policies[0].plan
        self.limits = largest([policy.limits for policy in policies])

    def reset(self) -> None:
        for policy in self.policies:
            policy.reset()

    def reseed(self, number: int) -> None:
        for policy in self.policies:
            policy.reseed(number)

    def answer(self, question: Question) -> Any:
        return self._answers[question.kind].answer(question)

    def observe(self, cycle: Cycle) -> None:
        for policy in self.policies:
            policy.observe(cycle)


def checked_policy(policy: Policy | None) -> Policy:
    """The policy; EAGLE-3's default tree for None. SpecdecError for all else."""
    if policy is None:
        return Static()
    if not isinstance(policy, Policy):
        raise SpecdecError(f"a policy is such as specdec.Static(60, 7, 10), got {policy!r}.")
    # a text is no set of kinds: its letters are refused here
    for kind in policy.asks:
        check_name("kind of question in asks", kind, KINDS)
    return policy


def unused(policy: Policy) -> Policy:
    """A copy for one text, so that the given policy stays unchanged; itself if never asked."""
    return copy.deepcopy(policy) if checked_policy(policy).asks else policy


def largest(limits: list[TreeConfig]) -> TreeConfig:
    """The smallest limits that hold all of `limits`."""
    rows = [(tree.total_tokens, tree.depth, tree.top_k, tree.widest) for tree in limits]
    total_tokens, depth, top_k, widest = map(max, zip(*rows, strict=True))
    return TreeConfig(total_tokens, depth, top_k, beam=(widest,))
