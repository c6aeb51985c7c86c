"""The draft-and-verify cycle as a generator that asks a policy three questions: PLAN, EXTEND, SIZE.

    PLAN? ─▶ root ─▶ EXTEND? ─▶ expand ─▶ EXTEND? ─▶ ... ─▶ SIZE? ─▶ verify ─▶ commit ─▶ one row

Decoding sends the answers of a policy, a training environment those of its learner. Replay runs the
same code on recorded trees. The `Engine` does the work (live: `engine.py`); this file touches no
token. Forwards of a live engine are yielded to the driver too, so that several turns can share
them. (EAGLE-2 section 4; LTD section 3.)
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from specdec.core.clock import Clock
from specdec.core.policy import Policy
from specdec.core.protocols import Forward, Step, finish
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question, View
from specdec.core.tree_config import Plan, TreeConfig
from specdec.errors import SpecdecError

A = TypeVar("A")  # an answer, or the result of a step


class Engine(View, Protocol):
    """What a cycle needs, live or replayed. Each method charges its forward to the clock.

    A step that needs a model returns a generator of the forwards it waits for; any other returns
    its value at once.
    """

    limits: TreeConfig  # the largest tree there is room for
    cycles: int  # finished cycles of this turn
    forwards: bool  # False for a drafter that only copies
    extra_rows: int  # rows of the target's forward beside the tree, which are never committed

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


def cycle(
    engine: Engine, asks: frozenset[str], plan: Plan
) -> Generator[Question | Forward, Any, Cycle]:
    """One cycle. Kinds of questions outside `asks` keep the values of `plan`. Returns its row."""
    clock = engine.clock
    clock.start()
    context_tok = engine.context_tok
    index = engine.cycles
    questions = expansions = 0

    # 1. PLAN: how many tokens, how deep, how wide? One token is a plain step without drafting.
    if PLAN in asks:
        questions += 1
        plan = yield from ask(engine, PLAN, checked_plan, engine.limits)
    else:
        plan = checked_plan(plan, engine.limits)
    drafts = plan.drafted and engine.forwards and engine.most_expansions >= 0

    # 2. root pass: the drafter reads the tokens committed last and proposes the root's children
    yield from done(engine.root(plan))

    # 3. EXTEND: one draft forward over the best leaves adds one level, as long as the policy likes
    depth = min(plan.depth, engine.most_expansions) if drafts else 0
    while expansions < depth:
        if EXTEND in asks:
            questions += 1
            if not (yield from ask(engine, EXTEND, checked_flag, 1, plan, expansions)):
                break
        yield from done(engine.expand())
        expansions += 1

    # 4. SIZE: how many of the drafted nodes does the target read?
    candidates = engine.candidates
    verify_nodes = min(plan.verify_nodes, candidates)
    if SIZE in asks and verify_nodes:
        questions += 1
        largest = min(engine.limits.verify_nodes, candidates)
        verify_nodes = yield from ask(engine, SIZE, checked_size, largest, plan, expansions)

    # 5. verification: one target forward over the best nodes; walk while the target agrees
    accepted_tok = yield from done(engine.verify(verify_nodes))

    # 6. the accepted path and the target's own next token join the text
    kept_tok = engine.commit()
    return Cycle(
        cycle=index,
        context_tok=context_tok,
        top_k=plan.top_k if drafts else 0,
        expansions=expansions,
        draft_calls=expansions + 1 if drafts else 0,
        candidates=candidates,
        verify_nodes=verify_nodes,
        verified_tok=verify_nodes + 1 + engine.extra_rows,
        accepted_tok=accepted_tok,
        new_tok=accepted_tok + 1,
        kept_tok=kept_tok,
        questions=questions,
        **clock.stop(),
    )


def ask(
    engine: Engine,
    kind: str,
    checked: Callable[[Any, Any], A],
    largest: Any,
    plan: Plan | None = None,
    expansions: int = 0,
) -> Generator[Question, Any, A]:
    """Yield one question and return its checked answer; its time is the policy's."""
    engine.clock.mark()
    answer = yield Question(
        kind, engine.context_tok, expansions, engine.cycles, largest, plan, engine
    )
    checked_answer = checked(answer, largest)
    engine.clock.lap("policy")
    return checked_answer


def done(step: Step[A] | A) -> Step[A]:
    """Run a step and yield its forwards; a value that is no generator is returned as it is."""
    return (yield from step) if isinstance(step, Generator) else step


def run_cycle(engine: Engine, policy: Policy) -> Cycle:
    """Run one cycle with a policy, one forward at a time."""
    return finish(driven(engine, policy))


def driven(engine: Engine, policy: Policy) -> Generator[Forward, Any, Cycle]:
    """One cycle with a policy's answers; the driver runs only the forwards. Returns its row."""
    steps = cycle(engine, policy.asks, policy.plan)
    reply: Any = None
    while True:
        try:
            item = steps.send(reply)
        except StopIteration as finished:
            row: Cycle = finished.value
            break
        reply = (yield item) if isinstance(item, Forward) else policy.answer(item)
    policy.observe(row)
    return row


def begin_turn(policy: Policy, prompt_tok: int | None = None) -> None:
    """Start a turn of the policy: its random draws depend on its seed and the prompt's length."""
    policy.reset()
    # so that prompts decoded one after the other or together draw alike
    if prompt_tok is not None:
        policy.reseed(prompt_tok)


def checked_plan(answer: Any, limits: TreeConfig) -> Plan:
    """A plan within the limits that memory was reserved for."""
    if not isinstance(answer, Plan):
        kinds = "a TreeConfig, a StaticShape or a CopiedTree"
        raise SpecdecError(f"a policy must answer PLAN with {kinds}, got {answer!r}.")
    # Copied candidates take rows of the target's forward, and nothing of the drafter.
    names = ("total_tokens", "depth", "top_k", "widest") if answer.drafted else ("total_tokens",)
    for name in names:
        planned = getattr(answer.limits, name)
        reserved = getattr(limits, name)
        if planned > reserved:
            why = f"the policy plans {name}={planned}, but its limits reserve room for {reserved}"
            raise SpecdecError(f"{why}; answer within `limits` or raise them.")
    return answer


def checked_flag(answer: Any, largest: int = 1) -> bool:
    """True to draft one level deeper, False to stop."""
    if answer not in (True, False):
        raise SpecdecError(f"a policy must answer EXTEND with True or False, got {answer!r}.")
    return bool(answer)


def checked_size(answer: Any, largest: int) -> int:
    """verify_nodes between 0 (the root alone) and `largest`."""
    with contextlib.suppress(TypeError):
        nodes = operator.index(answer)
        if 0 <= nodes <= largest:
            return nodes
    legal = f"an integer from 0 to {largest}"
    raise SpecdecError(f"a policy must answer SIZE with {legal}, got {answer!r}.")
