"""A block drafter: one forward drafts every position of a block, and trees are made of the positions' distributions.

    text ... root | row 1 | row 2 | ...        one causal pass after every commit; the keys of rows 1, 2, ... are not kept
                │       │       │
               q_1     q_2     q_3             q_j: distribution of the j-th token after the root, whatever is drafted before it

All nodes of a level have the same children, and the probability of a node is the product of the q_j along its path. So the
root pass drafts everything and an expansion is a look-up: the best nodes of the pool are the best of the product (DDTree's
trees), as far as `top_k` reaches. The network is `eagle_network.BlockNetwork`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.core.protocols import DraftForward, DraftSession
from specdec.errors import SpecdecError
from specdec.models.eagle_drafter import BatchedDrafter, EagleDrafter, EagleSession, TreeKeys
from specdec.models.eagle_files import read_checkpoint
from specdec.models.eagle_network import BlockNetwork, rotate
from specdec.models.target import Target


class BlockDrafter(EagleDrafter):
    """A block network bound to a target."""

    def __init__(self, network: BlockNetwork, target: Target):
        super().__init__(network, target)
        self.deepest = (
            self.config.block - 1
        )  # expansions: the root's children come from the first row

    def session(self, context_tok: int, tree_tok: int) -> BlockSession:
        return BlockSession(self, context_tok)

    def layer(
        self, tokens: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Callable
    ) -> Tensor:
        """States after all layers; `attend` is called once per layer, in order, and keeps the keys of each apart."""
        x = super().layer(tokens, hidden, cos, sin, attend)
        for layer in self.network.layers.values():
            q, k, v = layer.self_attn.project(layer.input_layernorm(x))
            x = layer.finish(attend(rotate(q, cos, sin), rotate(k, cos, sin), v), x)
        return x

    def batched(self, tokens: Tensor, features: Tensor, depth: int) -> BatchedBlocks:
        return BatchedBlocks(self, tokens, features, self.config.block)

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        if forwards[0].kind == "expand":
            return [one.run() for one in forwards]
        children = super().run_together(forwards)
        return [one.session.begin(drafted) for one, drafted in zip(forwards, children, strict=True)]


class BlockLevels(DraftSession):
    """The levels of a tree whose children all come from the root pass."""

    def begin(self, children: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keep the children of every level, [B, k] each; returns those of the root."""
        self._children, self._level = children, 0
        return self._of_level(1, children[0].shape[1])

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self._level += 1
        if self._level >= len(self._children[0]):
            raise SpecdecError(
                f"this drafter drafts blocks of {len(self._children[0])} tokens and no deeper."
            )
        return self._of_level(len(tokens), top_k)

    def _of_level(self, nodes: int, top_k: int) -> tuple[Tensor, Tensor]:
        tokens, log_probs = (part[self._level, :top_k].expand(nodes, -1) for part in self._children)
        return tokens, log_probs


class BlockSession(BlockLevels, EagleSession):
    """One turn. The rows of a block follow the text's, and are overwritten by the next tokens."""

    def __init__(self, drafter: BlockDrafter, context_tok: int):
        EagleSession.__init__(self, drafter, context_tok, drafter.config.block - 1)
        self.stores += [torch.zeros_like(self.store) for _ in drafter.network.layers]
        self._turns = itertools.cycle(self.stores)

    def root(self, tokens: Tensor, features: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        return self.begin(EagleSession.root(self, tokens, features, top_k))

    def root_step(self, tokens: Tensor, features: Tensor):
        """The lasting rows of A new tokens, and the rows of the block after them."""
        hidden = self.network.fuse(features)
        rows = (
            torch.cat(parts) for parts in zip((tokens, hidden), self.network.masked(), strict=True)
        )
        return self.causal_step(*rows, len(tokens))

    def _attend(self, *given) -> Tensor:
        self._keys, self._values = next(self._turns)
        return super()._attend(*given)

    def keep_states(self, kind: str, states: Tensor) -> Tensor:
        """The states [B, H] of the block."""
        block = states[-self.drafter.config.block :]
        self.root_state = block[0]
        return block


class BatchedBlocks(BatchedDrafter):
    """`BatchedDrafter` of a block drafter: the rows of all roots' blocks, position by position."""

    def roots(self, contexts: Tensor) -> Tensor:
        """The states of the blocks, [P, B, H]."""
        network, states = self.drafter.network, [self.states[contexts - 1][:, None]]
        keys = itertools.cycle([(store, TreeKeys()) for store in self.stores])
        tokens, hidden = network.masked(len(contexts))
        rows = torch.zeros_like(contexts)[:, None]
        attend = functools.partial(
            self._attend, contexts, rows, keys
        )  # each row sees its block's rows before it
        for place in range(self.drafter.config.block - 1):
            cos, sin = (table[contexts + place][:, None, None] for table in (self._cos, self._sin))
            one = slice(place, place + 1)
            states.append(self.drafter.layer(tokens[:, one], hidden[:, one], cos, sin, attend))
        return torch.cat(states, 1)

    def _attend(self, contexts: Tensor, rows: Tensor, keys, *heads: Tensor) -> Tensor:
        (self.keys, self.values), own = next(keys)
        return super()._attend(contexts, rows, own, *heads)

    def _level(
        self,
        contexts,
        level: int,
        keys,
        beam: Tensor,
        scores: Tensor,
        tokens,
        hidden: Tensor,
        top_k: int,
    ):
        children, log_probs = self.drafter.children(
            hidden[:, level + 1 : level + 2], top_k
        )  # [P, 1, k]
        best = scores.gather(1, beam)[..., None]
        return (
            (best + log_probs).flatten(1),
            children.expand(-1, beam.shape[1], -1).flatten(1),
            hidden,
        )


def load_block(folder: Path, target: Target) -> BlockDrafter:
    """The drafter in `folder`, bound to a target. SpecdecError if its weights are no block drafter's."""
    network = read_checkpoint(folder).network()
    if not network.config.block:
        raise SpecdecError(
            f"{folder} drafts one position after the other and is no block drafter; load it as eagle3."
        )
    return BlockDrafter(network, target)
