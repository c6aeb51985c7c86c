"""Medusa's and Hydra's heads: each predicts one of the next tokens from the target's last hidden state.

    h  the target's last state before the root, after the final norm
    head i:  state_i = block(...block(path_i)),  block(x) = x + silu(W x + b)          i = 0, 1, ... num_heads - 1
             logits of the i + 1st token after the root = projection(state_i)

       Medusa   path_i = h                                 the tokens in between are not read, so one pass gives the
                                                        whole tree: all nodes of a level have the same children
    Hydra    path_i = [s; e(t_0); ...; e(t_i)]          t_0 the root, t_1 .. t_i the drafted tokens down to the node
             s      = h; in Hydra++ the state of one more Llama layer over all of the target's states

The projection is shared by all heads over the draft vocabulary, or the target's own, or, as in the first official files, one
per head. Hydra++'s layer has its own keys and values, kept by an `EagleSession` as for EAGLE.

Static trees come from a table of how often each rank of each head is right (`tree_from_table`). Knows nothing about
training, files or policies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.core.protocols import DraftSession
from specdec.core.tree import StaticShape
from specdec.errors import SpecdecError
from specdec.models.eagle.drafter import EagleDrafter, EagleSession, NetworkDrafter
from specdec.models.eagle.network import EagleConfig, EagleNetwork, RMSNorm, best_tokens
from specdec.models.prepacked import PrepackedLinears
from specdec.models.target import Target


@dataclass(frozen=True)
class HeadsConfig:
    """The heads of one drafter.

    num_layers: how often each head's block is applied (official files name it once per application).
    projections: "shared" (one over the draft vocabulary), "target" (the target's own), or "each" (one per head).
    head_bias: of the projections. taps: the last hidden state. path: None for Medusa; Hydra's heads also read the tokens drafted
    so far, after the target's state ("state") or after one more layer over all states ("layer", Hydra++).
    layer: that layer's shape.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    projections: str = "shared"
    head_bias: bool = False
    taps: tuple[int, ...] | None = None
    path: str | None = None
    layer: EagleConfig | None = None
    num_taps = 1
    own_embedding = False
    generation = 0  # of EAGLE: none

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def is_reduced(self) -> bool:
        """Whether some of the target's tokens can never be drafted."""
        return self.draft_vocab_size < self.vocab_size


class Block(nn.Module):
    """x + silu(W x + b), initially the identity; for a wider input, `residual` x in place of x."""

    def __init__(self, wide: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(wide, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = None
        if wide != hidden:  # initially the target's state (which comes first), and nothing of the tokens
            self.res_connection = nn.Linear(wide, hidden)
            nn.init.zeros_(self.res_connection.bias)
            with torch.no_grad():
                self.res_connection.weight.copy_(torch.eye(hidden, wide))

    def forward(self, x: Tensor) -> Tensor:  # [..., wide] -> [..., H]
        stays = x if self.res_connection is None else self.res_connection(x)
        return stays + F.silu(self.linear(x))


class HeadsNetwork(nn.Module):
    """Weights of Medusa's heads.

    Call order, for N nodes: path = extend(path, embedded) once per level, state(path, level), head(state, level).
    """

    def __init__(self, config: HeadsConfig):
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.first = nn.ModuleList(Block(self.width(head), hidden) for head in range(config.num_heads))
        further = config.num_heads if config.path and config.num_layers > 1 else 0
        self.further = nn.ModuleList(Block(hidden, hidden) for _ in range(further))
        own = {"shared": 1, "target": 0, "each": config.num_heads}[config.projections]
        sizes = (hidden, config.draft_vocab_size)
        if own == 1:
            self.lm_head = nn.Linear(*sizes, bias=config.head_bias)
        self.lm_heads = nn.ModuleList(nn.Linear(*sizes, bias=config.head_bias) for _ in range(own * (own > 1)))
        self.target_head: Callable[[Tensor], Tensor] | None = None  # the target's head, for heads that project by it
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def width(self, head: int) -> int:
        """Input width of a head's first block."""
        return self.config.hidden_size

    def extend(self, path: Tensor, embedded: Tensor) -> Tensor:
        """The paths [..., X] of nodes from their parents' paths and their tokens' embeddings [..., H]."""
        return path

    def state(self, path: Tensor, level: int) -> Tensor:
        """The states [..., H] of nodes at `level` (0: the root). SpecdecError below the last head."""
        if level >= self.config.num_heads:
            raise SpecdecError(f"this drafter has {self.config.num_heads} heads and drafts no deeper.")
        state = self.first[level](path)
        again = self.further[level] if len(self.further) else self.first[level]
        for _ in range(self.config.num_layers - 1):
            state = again(state)
        return state

    def head(self, state: Tensor, level: int = 0) -> Tensor:
        """Draft logits [..., Vd]."""
        if self.target_head is not None:
            return self.target_head(state)
        return (self.lm_heads[level] if len(self.lm_heads) else self.lm_head)(state)

    def use_head(self, head: nn.Module) -> None:
        """Use the target's head if these have none; it stays the target's and is not saved."""
        if self.config.projections == "target":
            self.target_head = lambda state: head(state)

    def prepack(self) -> PrepackedLinears:
        return PrepackedLinears(self)


class MedusaDrafter(NetworkDrafter):
    """Heads bound to a target, whose embedding they use (Hydra's) and whose last hidden state they read."""

    def __init__(self, network: HeadsNetwork, target: Target):
        super().__init__(network.requires_grad_(False), target)
        self.deepest = self.config.num_heads - 1  # expansions: the root's children come from the first head

    def session(self, context_tok: int, tree_tok: int) -> MedusaSession:
        return MedusaSession(self)

    def children(self, state: Tensor, level: int, top_k: int) -> tuple[Tensor, Tensor]:
        """The k best next tokens after states [W, H]: target ids and float32 log-probabilities, [W, k] each."""
        return best_tokens(self.network.head(state, level).float(), top_k, self.target_id)


class MedusaSession(DraftSession):
    """One turn, with the paths of the last forward's nodes and their level."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter, self.network = drafter, drafter.network

    def root(self, tokens: Tensor, features: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self._level, self._path = -1, self.context(tokens, features)[-1:]
        return self._children_of(tokens[-1:], top_k)

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self._path = self._path[rows]
        return self._children_of(tokens, top_k)

    def context(self, tokens: Tensor, features: Tensor) -> Tensor:
        """The start of every path at each newly committed token. [A, H]"""
        return features

    def _children_of(self, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Children of nodes one level below the last ones."""
        self._level += 1
        self._path = self.network.extend(self._path, F.embedding(tokens, self.drafter.embedding.weight))
        paths = self._path if self.network.config.path else self._path[:1]  # Medusa's nodes all have the same children
        state = self.network.state(paths, self._level)
        if self._level == 0:
            self.root_state = state[0]
        return tuple(part.expand(len(tokens), -1) for part in self.drafter.children(state, self._level, top_k))


def tree_from_table(right_frac: Sequence[Sequence[float]], nodes: int) -> StaticShape:
    """Medusa's static tree with so many nodes: built by repeatedly adding the node most likely to be reached.

    right_frac [heads][ranks]: how often the token of that rank is the target's own, given the tokens before it are right; a
    node's probability is the product along its path.

    >>> tree_from_table([[0.6, 0.2, 0.1], [0.5, 0.1]], 4).choices
    ((0,), (1,), (0, 0), (1, 0))
    """
    if not len(right_frac) or nodes < 1 or not all(len(row) for row in right_frac):
        raise SpecdecError("a static tree needs a table with a row of shares per head, and at least one node.")
    waiting, chosen = [(-float(right_frac[0][0]), (0,), 1.0)], []  # negated probability, path, its parent's
    while waiting and len(chosen) < nodes:
        chance, path, above = heapq.heappop(waiting)
        chosen.append(path)
        level, rank = len(path) - 1, path[-1] + 1
        if rank < len(right_frac[level]):
            heapq.heappush(waiting, (-above * float(right_frac[level][rank]), (*path[:-1], rank), above))
        if level + 1 < len(right_frac):
            heapq.heappush(waiting, (chance * float(right_frac[level + 1][0]), (*path, 0), -chance))
    return StaticShape(chosen)


class PrefixLayer(EagleNetwork):
    """One Llama layer and a final norm over the target's states alone: an EAGLE-1 layer without fusion."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        del self.fc
        self.midlayer.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.input_layernorm(hidden), hidden

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        return self.norm(super().finish(attended, residual))


class HydraNetwork(HeadsNetwork):
    """Weights of Hydra's heads, and of Hydra++'s layer."""

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        if config.path == "layer":
            self.prefix = PrefixLayer(config.layer)

    def width(self, head: int) -> int:
        return self.config.hidden_size * (head + 2)

    def extend(self, path: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat((path, embedded.to(path.dtype)), -1)


class HydraDrafter(MedusaDrafter):
    """Hydra's heads bound to a target."""

    layer: EagleDrafter | None = None

    def __init__(self, network: HydraNetwork, target: Target):
        super().__init__(network, target)
        if self.config.path == "layer":
            self.layer = EagleDrafter(network.prefix, target)
            self.repack()

    def repack(self) -> None:
        if self.layer is not None:
            self.layer.repack()
        super().repack()  # the layer's fused products among them

    def session(self, context_tok: int, tree_tok: int) -> HydraSession:
        return HydraSession(self, context_tok)


class HydraSession(MedusaSession):
    """One turn; Hydra++'s layer reads every committed token's state once."""

    def __init__(self, drafter: HydraDrafter, context_tok: int):
        super().__init__(drafter)
        self._lasting = EagleSession(drafter.layer, context_tok, 0) if drafter.layer is not None else None

    def context(self, tokens: Tensor, features: Tensor) -> Tensor:
        return features if self._lasting is None else self._lasting.advance(tokens, features)


def heads_network(config: HeadsConfig) -> HeadsNetwork:
    """Medusa's or Hydra's network, with initial weights."""
    return (HydraNetwork if config.path else HeadsNetwork)(config)
