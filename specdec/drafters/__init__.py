"""What drafts: one protocol, one file per family of drafters.

A drafter opens a `DraftSession` per turn. The cycle calls `root` once per cycle with everything that was committed since,
then `expand` once per further level. A session never decides anything: which nodes to expand is the tree's business.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class DraftSession(Protocol):
    """One turn of drafting. Shapes: A newly committed tokens, W frontier nodes, k children per node.

    A session whose network has a state at the root keeps it as `root_state` [H] after `root`, for policies to look at.
    """

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        """Consume `tokens` int64 [A] (the last one is the tree's root) with the target features [A, F] *before* each of them.

        Returns (tokens int64 [1, k], log-probabilities float32 [1, k], descending): the children of the root.
        """
        ...

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Children of W frontier nodes. rows int64 [W]: the row of the previous forward each node came from. [W, k] twice."""
        ...


class Drafter(Protocol):
    """Weights plus what the target must provide. taps: the `hidden_states` indices whose features `root` receives."""

    taps: tuple[int, ...]

    def lent(self) -> AbstractContextManager:
        """Whatever the drafter must switch on while it drafts."""
        ...

    def session(self, context_tok: int, tree_tok: int) -> DraftSession:
        """A session for at most `context_tok` committed tokens and `tree_tok` drafted rows per cycle."""
        ...
