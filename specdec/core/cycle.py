"""The draft-and-verify cycle, once, as a generator that asks: PLAN, EXTEND, SIZE.

Decoding sends the policy's answers, an environment sends its learner's, replay runs the same lines over recorded trees. The
`Engine` does the work (live: `engine.py`); this file decides nothing and touches no token. (EAGLE-2 section 4; LTD section 3.)
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from specdec.core.clock import Clock
from specdec.core.policy import Policy, limits_of
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree import Plan, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError


class Engine(Protocol):
    """What a cycle needs. Live or replayed, the same methods in the same order; each charges its forward to the clock."""

    clock: Clock
    limits: TreeConfig  # the largest tree there is room for
    context_tok: int
    cycles: int  # finished cycles of this turn
    candidates: int  # drafted nodes so far
    most_expansions: int  # what the context limit still allows

    def root(self, plan: Plan) -> None: ...

    def expand(self) -> None: ...

    def verify(self, verify_nodes: int) -> int:
        """Run the target over the tree. Returns accepted_tok."""
        ...

    def commit(self) -> int:
        """Take over the accepted path and the bonus token. Returns kept_tok."""
        ...


def cycle(engine: Engine, asks: frozenset[str], plan: Plan) -> Generator[Question, Any, Cycle]:
    """One cycle. Kinds not in `asks` keep `plan`'s values. Returns the finished row."""
    clock = engine.clock
    clock.start()
    questions, expansions, context_tok, index = 0, 0, engine.context_tok, engine.cycles

    def ask(kind: str, largest):
        return Question(kind, context_tok, expansions, index, largest, None if kind == PLAN else plan, engine)

    clock.mark()
    if PLAN in asks:
        plan = checked_plan((yield ask(PLAN, engine.limits)), engine.limits)
        questions += 1
        clock.lap("policy")
    else:
        plan = checked_plan(plan, engine.limits)
    engine.root(plan)
    deepest = min(plan.depth, engine.most_expansions)
    while expansions < deepest:
        if EXTEND in asks:
            clock.mark()
            go_on = checked_flag((yield ask(EXTEND, 1)))
            questions += 1
            clock.lap("policy")
            if not go_on:
                break
        engine.expand()
        expansions += 1
    verify_nodes = min(plan.verify_nodes, engine.candidates)
    if SIZE in asks:
        most = min(engine.limits.verify_nodes, engine.candidates)
        clock.mark()
        verify_nodes = checked_size((yield ask(SIZE, most)), most)
        questions += 1
        clock.lap("policy")
    candidates = engine.candidates
    accepted_tok = engine.verify(verify_nodes)
    kept_tok = engine.commit()
    return Cycle(
        index,
        context_tok,
        plan.top_k,
        expansions,
        expansions + 1,
        candidates,
        verify_nodes,
        verify_nodes + 1,
        accepted_tok,
        accepted_tok + 1,
        kept_tok,
        questions,
        **clock.stop(),
    )


def run_cycle(engine: Engine, policy: Policy) -> Cycle:
    """Drive one cycle with a policy. Whatever goes wrong inside the policy is reported as the policy's fault."""
    steps = cycle(engine, policy.asks, policy.plan)
    try:
        question = next(steps)
        while True:
            question = steps.send(answer_of(policy, question))
    except StopIteration as finished:
        row = finished.value
    try:
        policy.observe(row)
    except SpecdecError:
        raise
    except Exception as error:
        raise fault(policy, "while it observed a cycle", error) from error
    return row


def answer_of(policy: Policy, question: Question):
    """The policy's answer; an exception inside it names the policy and the question."""
    try:
        return policy.answer(question)
    except SpecdecError:
        raise
    except Exception as error:
        raise fault(policy, f"on a {question.kind} question", error) from error


def fault(policy: Policy, where: str, error: Exception) -> SpecdecError:
    """The sentence that a policy's own failure becomes."""
    return SpecdecError(
        f"policy {type(policy).__name__} failed {where} ({type(error).__name__}: {error}); "
        "nothing decoded so far is affected."
    )


def checked_plan(answer, limits: TreeConfig) -> Plan:
    """A TreeConfig or StaticShape within the limits that memory was reserved for."""
    if not isinstance(answer, TreeConfig | StaticShape):
        raise SpecdecError(f"a policy must answer PLAN with a TreeConfig or a StaticShape, got {answer!r}.")
    needed = limits_of(answer)
    for name in ("total_tokens", "depth", "top_k"):
        if getattr(needed, name) > getattr(limits, name):
            raise SpecdecError(
                f"the policy plans {name}={getattr(needed, name)}, but its limits reserve room for {getattr(limits, name)}; "
                "answer within `limits` or raise them."
            )
    return answer


def checked_flag(answer) -> bool:
    """True to draft one level deeper, False to stop; 1 and 0 count as well."""
    if (number := whole_number(answer)) in (0, 1):
        return bool(number)
    raise SpecdecError(f"a policy must answer EXTEND with True or False, got {answer!r}.")


def checked_size(answer, most: int) -> int:
    """verify_nodes between 0 (the root alone) and `most`."""
    number = whole_number(answer)
    if isinstance(answer, bool) or not 0 <= number <= most:
        raise SpecdecError(f"a policy must answer SIZE with an integer from 0 to {most}, got {answer!r}.")
    return number


def whole_number(answer) -> int:
    """`answer`, also numpy's or torch's, as an int; -1 for what is not a whole number."""
    try:
        number = int(answer)
        return number if number == answer else -1
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return -1
