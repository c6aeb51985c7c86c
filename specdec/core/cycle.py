"""The draft-and-verify cycle as a generator that asks a policy three questions: PLAN, EXTEND, SIZE.

    PLAN? ─▶ root ─▶ EXTEND? ─▶ expand ─▶ EXTEND? ─▶ ... ─▶ SIZE? ─▶ verify ─▶ commit ─▶ one row

Decoding sends the answers of a policy, a training environment those of its learner; replay runs the same code on recorded
trees. The `Engine` does the work (live: `engine.py`); this file decides nothing and touches no token. Forwards of a live
engine are yielded to the driver too, so that several turns can share them. (EAGLE-2 section 4; LTD section 3.)
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
    """What a cycle needs, live or replayed: the same methods in the same order. Each charges its forward to the clock.

    A step that needs a model returns a generator of the forwards it waits for; any other returns its value at once.
    """

    limits: TreeConfig  # the largest tree there is room for
    cycles: int  # finished cycles of this turn
    forwards: bool  # False for a drafter that only copies
    extra_rows: int  # rows of the target's forward beside the tree: a window that is never committed

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
    """One cycle. Kinds of questions outside `asks` keep the values of `plan`. Returns the cycle's row.

    Yields questions, which expect an answer, and a live engine's forwards, which expect a result (`at_once` runs them).
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
    plain = plan.verify_nodes == 0  # a plan of one token is a plain step: no draft, no further question
    drafted = plan.drafted and engine.forwards  # else the tree has copied candidates only, if any
    yield from done(engine.root(plan))  # the drafter reads the tokens committed last and proposes the root's children
    deepest = min(plan.depth, engine.most_expansions) if drafted else 0
    while expansions < deepest:
        if EXTEND in asks and not (yield from asked(EXTEND, 1, checked_flag)):
            break
        yield from done(engine.expand())  # one draft forward over the best leaves: one more level
        expansions += 1
    candidates = engine.candidates
    verify_nodes = min(plan.verify_nodes, candidates)
    if SIZE in asks and candidates and not plain:
        verify_nodes = yield from asked(SIZE, min(engine.limits.verify_nodes, candidates), checked_size)
    # one target forward over the best nodes; walk while the target agrees
    accepted_tok = yield from done(engine.verify(verify_nodes))
    kept_tok = engine.commit()  # the accepted path and the target's own next token join the text
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
    """Run a step and yield its forwards; a value that is no generator is returned as it is."""
    return (yield from step) if isinstance(step, Generator) else step


def run_cycle(engine: Engine, policy: Policy) -> Cycle:
    """Run one cycle with a policy, one forward at a time."""
    return finish(driven(engine, policy))


def driven(engine: Engine, policy: Policy) -> Generator[Forward, Any, Cycle]:
    """One cycle with a policy's answers; the driver runs only the forwards. Returns the cycle's row.

    Errors inside the policy are reported as the policy's.
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
    """Start a turn of the policy; an exception inside it names the policy.

    It is reseeded with the prompt's length. So its random draws depend on its seed and that length alone, whatever the order
    in which turns are decoded or replayed.
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
    """Turn the policy's exception into a SpecdecError that names it; a SpecdecError of its own passes."""
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
        why = "a policy must answer PLAN with a TreeConfig, a StaticShape or a CopiedTree"
        raise SpecdecError(f"{why}, got {answer!r}.")
    needed = answer.limits
    numbers = [("total_tokens", needed.total_tokens, limits.total_tokens)]
    if answer.drafted:
        numbers += [("depth", needed.depth, limits.depth), ("top_k", needed.top_k, limits.top_k)]
        numbers += [("widest", needed.widest, limits.widest)]
    for name, planned, reserved in numbers:
        if planned > reserved:
            why = f"the policy plans {name}={planned}, but its limits reserve room for {reserved}"
            raise SpecdecError(f"{why}; answer within `limits` or raise them.")
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
