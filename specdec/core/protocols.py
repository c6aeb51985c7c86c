"""Interfaces of targets and drafters, and the forwards that a turn waits for.

A drafter opens a `DraftSession` per turn. The cycle calls `root` once per cycle with the tokens
committed since the last, then `expand` once per further level. Implementations are in `models`.

A step (prefill, root, expand, verify) is a generator: it yields a forward, is sent the result, and
returns its value. The driver runs forwards one at a time, or those of several turns together:

    turn 1  ──▶ DraftForward ┐                      turn 1 ──▶ TargetForward ┐
    turn 2  ──▶ DraftForward ┴▶ together ──▶ ...    turn 2 ──▶ TargetForward ┴▶ together ──▶ ...
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.core.tree import Trie


class DraftSession:
    """One turn of drafting.

    Shapes: A newly committed tokens, W frontier nodes, k children per node, E rows of a window. A
    session implements `root` and `expand`, or `copied`, or all three.
    """

    root_state: Tensor | None = None  # [H], the network's state at the root after `root`

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        """The children of the root, after reading `tokens` int64 [A], whose last is the root.

        features [A, F]: the target's *before* each token. Returns (tokens int64 [1, k],
        log-probabilities float32 [1, k], descending).
        """
        raise NotImplementedError

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Children of W frontier nodes, [W, k] twice.

        rows int64 [W]: the row of the previous forward that each node came from.
        """
        raise NotImplementedError

    def copied(self, ids: Tensor) -> Trie:
        """Candidates that need no forward, after the committed tokens int64 [T] up to the root."""
        return Trie()

    def window(self, levels: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rows that the target reads beside each tree and that are never committed (Lookahead).

        None for none, else (tokens int64 [E], depth of each below the root int64 [E], which of them
        each sees beside the text and the root bool [E, E]), none deeper than `levels`.
        """
        return None

    def learn(self, logits: Tensor) -> None:
        """The target's logits [E, V] after the window's rows."""


class Drafter:
    """A draft model and what it needs from the target."""

    network: Any = None  # its weights, a torch module; None without weights
    target_id: Tensor | None = None  # the target's ids of a reduced draft vocabulary, int64 [Vd]
    fingerprinted: dict[str, Any] | None = None  # what else results depend on
    taps: tuple[int, ...] = ()  # the `hidden_states` indices whose features `root` receives
    forwards: bool = True  # False if its sessions have no `root` and `expand`
    copied_levels: int = 0  # the longest path that its sessions' `copied` proposes
    extra_rows: int = 0  # the largest number of rows of its sessions' `window`
    deepest: int | None = None  # the largest number of expansions, whatever is planned
    position_limit: int | None = None  # of its own context; beyond it the steps are plain

    def refresh(self) -> None:
        """Adapt to a changed target: its dtype, device, embedding or head."""

    def inference(self) -> AbstractContextManager[Any]:
        """A context in which the drafter can draft."""
        return nullcontext()

    def session(self, context_tok: int, tree_tok: int) -> DraftSession:
        """A session for `context_tok` committed tokens and `tree_tok` drafted rows per cycle."""
        raise NotImplementedError

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        """Results of several sessions' forwards of one kind, in their order."""
        return [forward.run() for forward in forwards]


# The result of a target's forward: logits [T, V] and features [T, F], None without taps.
TargetRows = Any
# Its keys and values: committed tokens first, then the rows of the newest tree. keep(start, rows,
# index) keeps the first `start` entries and `rows` after them, also given on the cache's device.
TargetCache = Any


class TargetModel:
    """A language model that verifies trees."""

    taps: tuple[int, ...] = ()  # the `hidden_states` indices whose features it collects
    device: torch.device
    vocab_size: int
    position_limit: int | None = None
    end_tokens: frozenset[int] = frozenset()

    def refresh(self) -> None:
        """Update to changes of the model's modules and weights since their last use."""

    def inference(self, taps: bool = True) -> AbstractContextManager[Any]:
        """A context in which the target can verify. taps: whether it collects features."""
        return nullcontext()

    def new_cache(self, capacity: int) -> TargetCache:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> TargetRows:
        """One forward over new rows, as a `TargetForward` describes them."""
        raise NotImplementedError

    def run_together(self, forwards: Sequence[TargetForward]) -> Sequence[TargetRows]:
        """Rows of several sequences' forwards, in their order."""
        return [forward.run() for forward in forwards]


@dataclass(slots=True)
class TargetForward:
    """T new rows for the target. A tree has depths and ancestors."""

    target: TargetModel
    tokens: Tensor  # int64 [T]
    cache: TargetCache
    depth: Tensor | None = None  # int64 [T]
    ancestors: Tensor | None = None  # bool [T, T]
    last_only: bool = False

    def run(self) -> TargetRows:
        return self.target.forward(
            self.tokens, self.cache, self.depth, self.ancestors, self.last_only
        )


@dataclass(slots=True)
class DraftForward:
    """One call of a session: `root` (inputs: tokens, features) or `expand` (tokens, rows)."""

    drafter: Drafter
    session: DraftSession
    kind: str
    inputs: tuple[Tensor, Any]
    top_k: int

    def run(self) -> tuple[Tensor, Tensor]:
        """Children: tokens and log-probabilities."""
        step = self.session.root if self.kind == "root" else self.session.expand
        return step(*self.inputs, self.top_k)


Forward = TargetForward | DraftForward
T = TypeVar("T")
Step = Generator[Forward, Any, T]  # the forwards it waits for, one after the other; its result


def at_once(steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    """The same generator without its forwards, which are run here."""
    reply: Any = None
    while True:
        try:
            item = steps.send(reply)
        except StopIteration as finished:
            value: T = finished.value
            return value
        reply = item.run() if isinstance(item, Forward) else (yield item)


def finish(step: Step[T]) -> T:
    """Run a step's forwards one by one and return its result."""
    try:
        next(at_once(step))
    except StopIteration as finished:
        value: T = finished.value
        return value
    raise AssertionError("a step yields forwards alone")


def together(forwards: Sequence[Any]) -> Sequence[Any]:
    """Results of several turns' forwards, in their order; all of one kind and of one model."""
    first = forwards[0]
    # a single forward needs no packing
    if len(forwards) == 1:
        return [first.run()]
    model = first.target if isinstance(first, TargetForward) else first.drafter
    results: Sequence[Any] = model.run_together(forwards)
    return results
