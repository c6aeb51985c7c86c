"""The draft-and-verify cycle, once, as a generator that asks: PLAN, EXTEND, SIZE.

    PLAN? ─▶ root ─▶ EXTEND? ─▶ expand ─▶ EXTEND? ─▶ ... ─▶ SIZE? ─▶ verify ─▶ commit ─▶ one row

Decoding sends the policy's answers, an environment sends its learner's, replay runs the same lines over recorded trees. The
`Engine` does the work (live: `engine.py`); this file decides nothing and touches no token. The forwards that a live engine
waits for are passed to the driver as well, so that several turns can share them. (EAGLE-2 section 4; LTD section 3.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, TypeVar

from specdec.core.clock import Clock
from specdec.core.policy import Policy
from specdec.core.protocols import Forward, Step, finish
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question, View
from specdec.core.tree_config import Plan, TreeConfig
from specdec.errors import SpecdecError

L = TypeVar("L")  # the largest legal answer
A = TypeVar("A")  # the answer


class Engine(View, Protocol):
    """What a cycle needs. Live or replayed, the same methods in the same order; each charges its forward to the clock.

    A step that needs a model returns a generator of the forwards it waits for; any other returns its value at once.
    """

    limits: TreeConfig  # the largest tree there is room for
    cycles: int  # finished cycles of this turn
    forwards: bool  # False for a drafter that has nothing but copied candidates
    extra_rows: int  # of the target's forward, beside the tree: a window that is never committed

    @property
    def clock(self) -> Clock: ...

    @property
    def context_tok(self) -> int: ...

    @property
    def candidates(self) -> int: ...  # drafted nodes so far

    @property
    def most_expansions(self) -> int: ...  # what the context limit still allows

    def root(self, plan: Plan) -> Step[None] | None: ...

    def expand(self) -> Step[None] | None: ...

    def verify(self, verify_nodes: int) -> Step[int] | int: ...  # accepted_tok

    def commit(self) -> int: ...  # returns kept_tok


def cycle(engine: Engine, asks: frozenset[str], plan: Plan) -> Generator[Question | Forward, Any, Cycle]:
    """One cycle. Kinds not in `asks` keep `plan`'s values. Returns the finished row.

    Yields questions, to be sent their answers, and a live engine's forwards, to be sent their results (`at_once` does).
    """
    clock = engine.clock
    clock.start()
    questions, expansions, context_tok, index = 0, 0, engine.context_tok, engine.cycles

    def asked(kind: str, largest: L, checked: Callable[[Any, L], A]) -> Generator[Question, Any, A]:
        nonlocal questions
        questions += 1
        clock.mark()
        in_force = None if kind == PLAN else plan
        answer = checked((yield Question(kind, context_tok, expansions, index, largest, in_force, engine)), largest)
        clock.lap("policy")
        return answer

    # How many nodes, how deep, how wide?
    plan = (yield from asked(PLAN, engine.limits, checked_plan)) if PLAN in asks else checked_plan(plan, engine.limits)
    plain = plan.verify_nodes == 0  # a plan of one token is a plain step: nothing is drafted, nothing more is asked
    drafted = plan.drafted and engine.forwards  # else the tree is what was copied, if anything
    yield from done(engine.root(plan))  # the drafter reads what was committed last and proposes the root's children
    deepest = min(plan.depth, engine.most_expansions) if drafted else 0
    while expansions < deepest:
        if EXTEND in asks and not (yield from asked(EXTEND, 1, checked_flag)):
            break
        yield from done(engine.expand())  # one draft forward over the best leaves: a level more
        expansions += 1
    candidates = engine.candidates
    verify_nodes = min(plan.verify_nodes, candidates)
    if SIZE in asks and candidates and not plain:
        verify_nodes = yield from asked(SIZE, min(engine.limits.verify_nodes, candidates), checked_size)
    # one target forward over the best nodes; walk while the target agrees
    accepted_tok = yield from done(engine.verify(verify_nodes))
    kept_tok = engine.commit()  # the path walked and the target's own next token join the text, all else is forgotten
    return Cycle(
        cycle=index,
        context_tok=context_tok,
        top_k=plan.top_k if drafted else 0,
        expansions=expansions,
        draft_calls=expansions + 1 if drafted else 0,
        candidates=candidates,
        verify_nodes=verify_nodes,
        verified_tok=verify_nodes + 1 + engine.extra_rows,
        accepted_tok=accepted_tok,
        new_tok=accepted_tok + 1,
        kept_tok=kept_tok,
        questions=questions,
        **clock.stop(),
    )


def done(step: Step[A] | A) -> Step[A]:
    """Wait for a step's forwards; a step that is no generator is its own value."""
    return (yield from step) if isinstance(step, Generator) else step


def run_cycle(engine: Engine, policy: Policy) -> Cycle:
    """Drive one cycle with a policy, its forwards one by one."""
    return finish(driven(engine, policy))


def driven(engine: Engine, policy: Policy) -> Generator[Forward, Any, Cycle]:
    """One cycle with a policy's answers; only forwards are left to the driver. Returns the finished row.

    Whatever goes wrong inside the policy is reported as the policy's fault.
    """
    steps = cycle(engine, policy.asks, policy.plan)
    try:
        item = next(steps)
        while True:
            item = steps.send((yield item) if isinstance(item, Forward) else answer_of(policy, item))
    except StopIteration as finished:
        row: Cycle = finished.value
    with blamed(policy, "while it observed a cycle"):
        policy.observe(row)
    return row


def begin_turn(policy: Policy, prompt_tok: int | None = None) -> None:
    """Tell the policy that a turn begins; an exception inside it names the policy.

    It is reseeded with the prompt's length, so that what a policy draws in a turn depends on its seed and that length alone,
    in whatever order turns are decoded or replayed.
    """
    with blamed(policy, "when a turn began"):
        policy.reset()
        if prompt_tok is not None:
            policy.reseed(prompt_tok)


def answer_of(policy: Policy, question: Question) -> Any:
    """The policy's answer; an exception inside it names the policy and the question."""
    with blamed(policy, f"on a {question.kind} question"):
        return policy.answer(question)


@contextlib.contextmanager
def blamed(policy: Policy, where: str) -> Iterator[None]:
    """What the policy fails with becomes a sentence that names it; one of its own stays."""
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:
        name, reason = policy.__class__.__name__, f"{type(error).__name__}: {error}"
        raise SpecdecError(f"policy {name} failed {where} ({reason}); nothing decoded so far is affected.") from error


def checked_plan(answer: Any, limits: TreeConfig) -> Plan:
    """A TreeConfig, StaticShape or CopiedTree within the limits that memory was reserved for."""
    if not isinstance(answer, Plan):
        raise SpecdecError(
            f"a policy must answer PLAN with a TreeConfig, a StaticShape or a CopiedTree, got {answer!r}."
        )
    needed = answer.limits
    numbers = [("total_tokens", needed.total_tokens, limits.total_tokens)]
    if answer.drafted:
        numbers += [("depth", needed.depth, limits.depth), ("top_k", needed.top_k, limits.top_k)]
        numbers += [("widest", needed.widest, limits.widest)]
    for name, planned, reserved in numbers:
        if planned > reserved:
            raise SpecdecError(
                f"the policy plans {name}={planned}, but its limits reserve room for {reserved}; "
                "answer within `limits` or raise them."
            )
    return answer


def checked_flag(answer: Any, largest: int = 1) -> bool:
    """True to draft one level deeper, False to stop; 1 and 0 count as well."""
    if (number := whole_number(answer)) in (0, 1):
        return bool(number)
    raise SpecdecError(f"a policy must answer EXTEND with True or False, got {answer!r}.")


def checked_size(answer: Any, largest: int) -> int:
    """verify_nodes between 0 (the root alone) and `largest`."""
    number = whole_number(answer)
    if isinstance(answer, bool) or not 0 <= number <= largest:
        raise SpecdecError(f"a policy must answer SIZE with an integer from 0 to {largest}, got {answer!r}.")
    return number


def whole_number(answer: Any) -> int:
    """`answer`, also numpy's or torch's, as an int; -1 for what is not a whole number."""
    try:
        number = int(answer)
        return number if number == answer else -1
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return -1
