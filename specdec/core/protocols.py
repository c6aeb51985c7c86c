"""What the core needs of a target and of a drafter; their implementations live in `models`.

A drafter opens a `DraftSession` per turn. The cycle calls `root` once per cycle with everything that was committed since,
then `expand` once per further level. A session never decides anything: which nodes to expand is the tree's business.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from specdec.core.tries import Trie


class DraftSession(Protocol):
    """One turn of drafting. Shapes: A newly committed tokens, W frontier nodes, k children per node.

    A session whose network has a state at the root keeps it as `root_state` [H] after `root`, for policies to look at.
    """

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        """Consume `tokens` int64 [A] (the last one is the tree's root) with the target features [A, F] *before* each of them.

        Returns (tokens int64 [1, k], log-probabilities float32 [1, k], descending): the children of the root.
        """

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Children of W frontier nodes. rows int64 [W]: the row of the previous forward each node came from. [W, k] twice."""


class CopyingSession(Protocol):
    """What a session may have beside `root` and `expand`, or in their place: candidates that cost no forward."""

    def copied(self, ids: Tensor) -> Trie:
        """Candidates after the committed tokens, int64 [T], the last of which is the root. A turn's ids only ever grow."""


class WindowSession(CopyingSession, Protocol):
    """A copying session that has the target read extra rows beside each tree, which are never committed."""

    def window(self, levels: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """(tokens, int64 [E]; how far below the root each stands, int64 [E]; which of them each sees beside the text and the
        root, bool [E, E]); none of them more than `levels` below the root, or None."""

    def learn(self, logits: Tensor) -> None:
        """The target's logits [E, V] after the window's rows."""


class Drafter(Protocol):
    """Weights plus what the target must provide.

    One that cannot draft below some level has `deepest`: the most expansions. Trees end there, whatever is planned.
    """

    taps: tuple[int, ...]  # the `hidden_states` indices whose features `root` receives
    # A drafter whose sessions copy also has
    #   copied_levels: int   the longest path that `copied` proposes
    #   forwards: bool       False where its sessions have no `root` and `expand`
    #   extra_rows: int      of `window`

    def inference(self) -> AbstractContextManager:
        """Whatever the drafter must switch on while it drafts."""

    def session(self, context_tok: int, tree_tok: int) -> DraftSession:
        """A session for at most `context_tok` committed tokens and `tree_tok` drafted rows per cycle."""


class TargetRows(Protocol):
    """What a target's forward gives."""

    logits: Tensor  # [T, V]
    features: Tensor | None  # [T, F] at each token, None without taps


class TargetCache(Protocol):
    """The target's keys and values: committed tokens first, the rows of the newest tree after them."""

    def keep(self, start: int, rows: list[int], index: Tensor | None = None) -> None:
        """Keep the first `start` entries and `rows` after them; forget the rest. index: `rows` on the cache's device."""


class TargetModel(Protocol):
    """A language model that verifies trees."""

    taps: tuple[int, ...]  # the `hidden_states` indices whose features it collects
    device: torch.device
    vocab_size: int
    position_limit: int | None

    def inference(self, taps: bool = True) -> AbstractContextManager:
        """Tree attention switched on; afterwards the model is as it was."""

    def new_cache(self, capacity: int) -> TargetCache: ...

    def forward(self, tokens: Tensor, cache: TargetCache, depth=None, ancestors=None, last_only=False) -> TargetRows:
        """One forward over T new rows. tokens int64 [T]; a tree gives depth int64 [T] and ancestors bool [T, T]."""
