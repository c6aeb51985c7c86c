"""Forwards that a turn waits for. Whoever drives turns runs them: one at once, or those of several turns together.

    turn 1  ──▶ DraftForward ┐                      turn 1 ──▶ TargetForward ┐
    turn 2  ──▶ DraftForward ┴▶ together ──▶ ...    turn 2 ──▶ TargetForward ┴▶ together ──▶ ...

A step (prefill, root, expand, verify) is a generator: it yields a forward, is sent the result, and returns its value. Knows
nothing about cycles, policies or models.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.core.protocols import Drafter, DraftSession, TargetCache, TargetModel


@dataclass(slots=True)
class TargetForward:
    """New rows for the target, as `TargetModel.forward` takes them."""

    target: TargetModel
    tokens: Tensor
    cache: TargetCache
    depth: Tensor | None = None
    ancestors: Tensor | None = None
    last_only: bool = False

    def run(self):
        """The target's rows."""
        return self.target.forward(self.tokens, self.cache, self.depth, self.ancestors, self.last_only)


@dataclass(slots=True)
class DraftForward:
    """One call of a drafter's session: `root` (inputs: tokens, features) or `expand` (inputs: tokens, rows)."""

    drafter: Drafter
    session: DraftSession
    kind: str
    inputs: tuple
    top_k: int

    def run(self):
        """Children: tokens and log-probabilities."""
        return getattr(self.session, self.kind)(*self.inputs, self.top_k)


Forward = TargetForward | DraftForward
Step = Generator[Forward, Any, Any]


def finish(step):
    """Run a step's forwards one by one. Returns what it returns; a value stands for a step that was done at once."""
    if not isinstance(step, Generator):
        return step
    try:
        forward = next(step)
        while True:
            forward = step.send(forward.run())
    except StopIteration as finished:
        return finished.value


def at_once(steps: Generator) -> Generator:
    """The same generator without its forwards: they are run here, all else is passed on."""
    try:
        item = next(steps)
        while True:
            item = steps.send(item.run() if isinstance(item, Forward) else (yield item))
    except StopIteration as finished:
        return finished.value


def together(forwards: Sequence[Forward]) -> list:
    """Results of several turns' forwards, all of one kind and of one model, in their order."""
    first = forwards[0]
    many: Callable | None = None
    if len(forwards) > 1:
        owner = first.target if isinstance(first, TargetForward) else first.drafter
        many = getattr(owner, "run_together", None)
    return [forward.run() for forward in forwards] if many is None else many(forwards)
