"""A block drafter: one forward drafts every position of a block; trees come from the positions.

    text ... root | row 1 | row 2 | ...    one causal pass after every commit; the keys of rows
                │       │       │          1, 2, ... are not kept
               q_1     q_2     q_3         q_j: distribution of the j-th token after the root,
                                           whatever is drafted before it

All nodes of a level have the same children, and the probability of a node is the product of the q_j
along its path. So the root pass drafts everything and an expansion is a look-up: the best nodes of
the pool are the best of the product (DDTree's trees), as far as `top_k` reaches. The network is
`eagle_network.BlockNetwork`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.core.protocols import DraftForward
from specdec.errors import SpecdecError
from specdec.models.eagle_drafter import (
    BatchedDrafter,
    ChosenTrees,
    DraftStep,
    EagleDrafter,
    EagleSession,
    TreeKeys,
)
from specdec.models.eagle_files import read_network
from specdec.models.eagle_network import BlockNetwork
from specdec.models.target import Target


class BlockDrafter(EagleDrafter):
    """A block network bound to a target."""

    def __init__(self, network: BlockNetwork, target: Target):
        super().__init__(network, target)
        # expansions: the root's children come from the first row
        self.deepest = self.config.block - 1

    def session(self, context_tok: int, tree_tok: int) -> BlockSession:
        return BlockSession(self, context_tok)

    def batched(self, tokens: Tensor, features: Tensor, depth: int) -> BatchedBlocks:
        return BatchedBlocks(self, tokens, features, self.config.block)

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        if forwards[0].kind == "expand":
            return [forward.run() for forward in forwards]
        results = []
        for forward, children in zip(forwards, super().run_together(forwards), strict=True):
            session: Any = forward.session
            results.append(session.begin(children))
        return results


class BlockSession(EagleSession):
    """One turn. The rows of a block follow the text's, and are overwritten by the next tokens."""

    def __init__(self, drafter: BlockDrafter, context_tok: int):
        super().__init__(drafter, context_tok, drafter.config.block - 1)

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        return self.begin(super().root(tokens, features, top_k))

    def begin(self, children: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keep the children of every level, [B, k] each; returns those of the root."""
        self._children = children
        self._level = 0
        return children[0][:1], children[1][:1]

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self._level += 1
        ids, log_probs = (part[self._level, :top_k] for part in self._children)
        return ids.expand(len(tokens), -1), log_probs.expand(len(tokens), -1)

    def step(self, kind: str, tokens: Tensor, inputs: Tensor) -> DraftStep:
        """The lasting rows of A new tokens, and the rows of the block after them."""
        mask_tokens, mask_hidden = self.network.masked()
        rows = torch.cat((tokens, mask_tokens))
        hidden = torch.cat((self.network.fuse(inputs), mask_hidden))
        return self.causal_step(rows, hidden, len(tokens))

    def keep_states(self, kind: str, states: Tensor) -> Tensor:
        """The states [B, H] of the block."""
        block = states[-self.drafter.config.block :]
        self.root_state = block[0]
        return block


class BatchedBlocks(BatchedDrafter):
    """`BatchedDrafter` of a block drafter: the rows of all roots' blocks, position by position."""

    def roots(self, contexts: Tensor) -> Tensor:
        """The states of the blocks, [P, B, H]."""
        network = self.drafter.network
        states = [self.states[contexts - 1][:, None]]
        tokens, hidden = network.masked(len(contexts))
        # each row sees its block's rows before it
        rows = torch.zeros_like(contexts)[:, None]
        attend = functools.partial(TreeKeys(self.store).attend, contexts, rows)
        for place in range(self.drafter.config.block - 1):
            row = slice(place, place + 1)
            step = self.step(tokens[:, row], hidden[:, row], contexts + place, attend)
            states.append(self.drafter.layer(step))
        return torch.cat(states, 1)

    def _level(
        self, contexts: Tensor, keys: TreeKeys, trees: ChosenTrees, beam: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        row, top_k = len(trees.beams) + 1, trees.scores[0].shape[1]
        children, log_probs = self.drafter.children(hidden[:, row : row + 1], top_k)
        above = trees.scores[-1].gather(1, beam)[..., None]
        tokens = children.expand(-1, beam.shape[1], -1).flatten(1)
        return (above + log_probs).flatten(1), tokens, hidden


def load_block(folder: Path, target: Target) -> BlockDrafter:
    """The drafter in `folder`, bound to a target. SpecdecError if it is no block drafter."""
    network = read_network(folder)
    if not isinstance(network, BlockNetwork):
        raise SpecdecError(f"{folder} is no block drafter; load it as eagle3.")
    return BlockDrafter(network, target)
