"""Interfaces of targets and drafters, and the forwards that a turn waits for.

A drafter opens a `DraftSession` per turn. The cycle calls `root` once per cycle with the tokens committed since the last,
then `expand` once per further level. A session decides nothing: the tree chooses the nodes to expand.
`Drafter`, `DraftSession` and `TargetModel` are base classes with defaults for what a subclass does not define. Their
implementations live in `models`.

The driver of the turns runs their forwards: one at a time, or those of several turns together.

    turn 1  ──▶ DraftForward ┐                      turn 1 ──▶ TargetForward ┐
    turn 2  ──▶ DraftForward ┴▶ together ──▶ ...    turn 2 ──▶ TargetForward ┴▶ together ──▶ ...

A step (prefill, root, expand, verify) is a generator: it yields a forward, is sent the result, and returns its value.
`Claims` are what a drafter's card promises, checked while the drafter runs. Knows nothing about cycles, policies or models.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specdec.core.tree import Trie
from specdec.errors import check_fields, check_number, warn

CHECKED_AT = (64, 128, 256, 512)  # cycles
FEWER = 0.85  # this fraction of the card's figure is enough
UNLIKELY = 1e-5  # significance level: how often a drafter as good as its card is warned of
SURE, ERRORS = (
    0.9,
    2.0,
)  # hard text lowers a drafter's own probabilities too: only accuracy well below them counts


class DraftSession:
    """One turn of drafting. Shapes: A newly committed tokens, W frontier nodes, k children per node, E rows of a window.

    A session implements `root` and `expand`, or `copied` (its drafter then sets `copied_levels`), or all three.
    """

    root_state: Tensor | None = (
        None  # [H], the network's state at the root after `root`; policies may read it
    )

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        """Consume `tokens` int64 [A] (the last one is the tree's root) with the target features [A, F] *before* each of them.

        Returns (tokens int64 [1, k], log-probabilities float32 [1, k], descending): the children of the root.
        """
        raise NotImplementedError

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Children of W frontier nodes. rows int64 [W]: the row of the previous forward each node came from. [W, k] twice."""
        raise NotImplementedError

    def copied(self, ids: Tensor) -> Trie:
        """Candidates that need no forward, after the committed tokens int64 [T], the last of which is the root.

        Within a turn the ids only grow.
        """
        return Trie()

    def window(self, levels: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Extra rows that the target reads beside each tree and that are never committed; None for none.

        (tokens, int64 [E]; how far below the root each stands, int64 [E]; which of them each sees beside the text and the
        root, bool [E, E]); none of them more than `levels` below the root.
        """
        return None

    def learn(self, logits: Tensor) -> None:
        """The target's logits [E, V] after the window's rows."""


@dataclass
class Claims:
    """A drafter's accuracy as measured with its own target, from its config.json, and the counts taken while it drafts.

    first_drafts_frac: share of greedy cycles in which the likeliest first draft is the target's token; None: not measured.
    taught_drafts: draft steps unrolled in training; None: unknown. outside_frac: share of the target's own tokens outside the
    draft vocabulary, by kind of text.

    >>> claims = Claims(first_drafts_frac=0.5)
    >>> claims.count(torch.tensor(7), torch.tensor(0.75).log(), 7)
    >>> claims.settle()
    >>> claims.cycles, claims.right, claims.confident
    (1, 1, 0.75)
    """

    first_drafts_frac: float | None = None
    taught_drafts: int | None = None
    outside_frac: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, frac in self.outside_frac.items():
            check_number(f"outside_frac of {name}", frac, 0.0, 1.0)
        self.cycles, self.right, self.warned = 0, 0, False
        self._unread: list[tuple[Tensor, Tensor, int]] = []
        self.confident = self.variance = (
            0.0  # correct drafts expected from the drafter's own probabilities
        )

    def count(self, token: Tensor, log_prob: Tensor, picked: int) -> None:
        """Record a greedy cycle: `picked` is the target's first token, `token` the likeliest draft.

        Warns once if too few first drafts are right for both the card and their own probabilities. Tensors are read back only at
        the check points, so that an accelerator does not wait, and none are kept after the last.
        """
        if self.cycles == CHECKED_AT[-1]:
            return
        self.cycles += 1
        self._unread.append((token, log_prob, picked))
        if self.cycles in CHECKED_AT:
            self.settle()
            self._check()

    def settle(self) -> None:
        """Read back and count the pending cycles."""
        if self._unread:
            tokens, log_probs, picked = zip(*self._unread, strict=True)
            chances = torch.stack(log_probs).float().exp().tolist()
            self.right += sum(map(int.__eq__, torch.stack(tokens).tolist(), picked))
            self.confident += sum(chances)
            self.variance += sum(chance * (1 - chance) for chance in chances)
            self._unread = []

    def _check(self) -> None:
        if self.first_drafts_frac is None or self.warned:
            return
        sure = self.right + ERRORS * math.sqrt(self.variance) < SURE * self.confident
        if sure and at_most(self.right, self.cycles, FEWER * self.first_drafts_frac) < UNLIKELY:
            self.warned = True
            warn(
                f"in {self.cycles} cycles {self.right / self.cycles:.0%} of this drafter's first drafts were right, but "
                f"{self.first_drafts_frac:.0%} according to its card: it reads other layers (taps) than it was trained on, another "
                "target or another chat template; the text stays correct, but decoding is slow."
            )


def at_most(right: int, cycles: int, chance: float) -> float:
    """Probability of at most `right` successes in so many trials, each with this chance."""
    return sum(
        math.comb(cycles, n) * chance**n * (1 - chance) ** (cycles - n) for n in range(right + 1)
    )


class Drafter:
    """A draft model and what it needs from the target."""

    network: Any = None  # its weights, a torch module; None without weights
    target_id: Tensor | None = None  # the target's ids of a reduced draft vocabulary, int64 [Vd]
    fingerprinted: dict[str, Any] | None = None  # what else results depend on
    taps: tuple[int, ...] = ()  # the `hidden_states` indices whose features `root` receives
    forwards: bool = True  # False if its sessions have no `root` and `expand`
    copied_levels: int = 0  # the longest path that its sessions' `copied` proposes
    extra_rows: int = 0  # the most rows of its sessions' `window`
    claims: Claims | None = None  # what its card promises
    deepest: int | None = (
        None  # with a last level: the most expansions; trees end there whatever is planned
    )

    def refresh(self) -> None:
        """Adapt to a changed target: its dtype, device, embedding or head."""

    def inference(self) -> AbstractContextManager[Any]:
        """A context in which the drafter can draft."""
        return nullcontext()

    def repack(self) -> None:
        """Prepare the weights for drafting after they changed."""

    def session(self, context_tok: int, tree_tok: int) -> DraftSession:
        """A session for at most `context_tok` committed tokens and `tree_tok` drafted rows per cycle."""
        raise NotImplementedError

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        """Results of several sessions' forwards of one kind, in their order; by default one after the other."""
        return [forward.run() for forward in forwards]


class TargetRows(Protocol):
    """The result of a target's forward."""

    logits: Tensor  # [T, V]
    features: Tensor | None  # [T, F] at each token, None without taps


class TargetCache(Protocol):
    """The target's keys and values: committed tokens first, the rows of the newest tree after them."""

    def keep(self, start: int, rows: list[int], index: Tensor | None = None) -> None:
        """Keep the first `start` entries and `rows` after them; forget the rest. index: `rows` on the cache's device."""


class TargetModel:
    """A language model that verifies trees."""

    taps: tuple[int, ...] = ()  # the `hidden_states` indices whose features it collects
    device: torch.device
    vocab_size: int
    position_limit: int | None = None

    @property
    def threads(self) -> int:
        """CPU threads of its last decoding."""
        return torch.get_num_threads()

    def refresh(self) -> None:
        """Update to changes of the model's modules and weights since their last use."""

    def inference(self, taps: bool = True) -> AbstractContextManager[Any]:
        """Tree attention switched on; afterwards the model is as it was."""
        return nullcontext()

    def new_cache(self, capacity: int) -> TargetCache:
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        cache: TargetCache,
        depth: Tensor | None = None,
        ancestors: Tensor | None = None,
        last_only: bool = False,
    ) -> TargetRows:
        """One forward over T new rows. tokens int64 [T]; a tree gives depth int64 [T] and ancestors bool [T, T]."""
        raise NotImplementedError

    def run_together(self, forwards: Sequence[TargetForward]) -> Sequence[TargetRows]:
        """Rows of several sequences' forwards, in their order; by default one after the other."""
        return [forward.run() for forward in forwards]


@dataclass(slots=True)
class TargetForward:
    """New rows for the target, as `TargetModel.forward` takes them."""

    target: TargetModel
    tokens: Tensor
    cache: TargetCache
    depth: Tensor | None = None
    ancestors: Tensor | None = None
    last_only: bool = False

    def run(self) -> TargetRows:
        """The target's rows."""
        return self.target.forward(
            self.tokens, self.cache, self.depth, self.ancestors, self.last_only
        )


@dataclass(slots=True)
class DraftForward:
    """One call of a drafter's session: `root` (inputs: tokens, features) or `expand` (inputs: tokens, rows)."""

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
Step = Generator[Forward, Any, T]  # the forwards it waits for, one after the other, and its result


def finish(step: Generator[Forward, Any, T]) -> T:
    """Run a step's forwards one by one and return its result."""
    try:
        forward = next(step)
        while True:
            forward = step.send(forward.run())
    except StopIteration as finished:
        return finished.value


def at_once(steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    """The same generator without its forwards: they are run here, everything else is yielded on."""
    try:
        item = next(steps)
        while True:
            item = steps.send(item.run() if isinstance(item, Forward) else (yield item))
    except StopIteration as finished:
        return finished.value


def together(forwards: Sequence[Any]) -> Sequence[Any]:
    """Results of several turns' forwards, in their order; all of one kind and of one model."""
    first = forwards[0]
    if len(forwards) == 1:
        return [first.run()]
    owner: TargetModel | Drafter = (
        first.target if isinstance(first, TargetForward) else first.drafter
    )
    return owner.run_together(forwards)
