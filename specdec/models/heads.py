"""Medusa's and Hydra's heads: each predicts one of the next tokens from the target's last state.

    h        the target's last state before the root, after the final norm
    head i   state_i = block(path_i),  block(x) = x + silu(W x + b),  i = 0, 1, ...
             logits of the i + 1st token after the root = projection(state_i)
    Medusa   path_i = h: all nodes of a level have the same children
    Hydra    path_i = [h; e(t_0); ...; e(t_i)], t_0 the root, t_1 .. t_i the tokens down to the node

Ours share one projection over the draft vocabulary; the official ones have one per head. Files:

    Medusa   config.json: medusa_num_heads       medusa_lm_head.safetensors or .pt
             {i}.0.linear.{weight,bias}          block of head i
             {i}.1.weight                        its projection
    Hydra    config.json: hydra_num_heads        hydra_lm_head.safetensors or .pt
             hydra_mlp.{i}.0.{linear,res_connection}.{weight,bias}
             hydra_lm_head.{i}.{weight,bias}
    ours     lm_head.weight, d2t, t2d in place of the projections; draft_vocab_size
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec import runs
from specdec.core.protocols import DraftSession
from specdec.models.eagle_drafter import NetworkDrafter
from specdec.models.eagle_files import (
    WEIGHT_FILES,
    Fields,
    bad_checkpoint,
    read_tensors,
    save_tensors,
    with_weights,
)
from specdec.models.eagle_network import best_tokens
from specdec.models.target import Target

# (our name, the official one) of a head's block and projection, after its number
MEDUSA = [("first.{}.", "{}.0."), ("lm_heads.{}.", "{}.1.")]
HYDRA = [("first.{}.", "hydra_mlp.{}.0."), ("lm_heads.{}.", "hydra_lm_head.{}.")]


@dataclass(frozen=True)
class HeadsConfig:
    """The heads of one drafter."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int = 4
    hydra: bool = False  # they also read the tokens drafted so far
    shared: bool = True  # one projection over the draft vocabulary, else one per head
    taps: tuple[int, ...] | None = None  # the last hidden state
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
    """x + silu(W x + b), initially the identity; for a wider input, `res_connection` x for x."""

    def __init__(self, wide: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(wide, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection: nn.Module = nn.Identity()
        if wide != hidden:
            # initially the target's state (which comes first), and nothing of the tokens
            self.res_connection = nn.Linear(wide, hidden)
            nn.init.eye_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)

    def forward(self, x: Tensor) -> Tensor:  # [..., wide] -> [..., H]
        return self.res_connection(x) + F.silu(self.linear(x))


class HeadsNetwork(nn.Module):
    """Weights of Medusa's or Hydra's heads.

    Call order at each level: path = extend(path, embedded), state(path, level), head(state, level).
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadsConfig):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.first = nn.ModuleList()
        self.lm_heads = nn.ModuleList()
        for head in range(config.num_heads):
            wide = hidden * (head + 2) if config.hydra else hidden
            self.first.append(Block(wide, hidden))
            if not config.shared:
                self.lm_heads.append(nn.Linear(hidden, config.vocab_size, bias=config.hydra))
        if config.shared:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def extend(self, path: Tensor, embedded: Tensor) -> Tensor:
        """Paths [..., X] of nodes from their parents' and their tokens' embeddings [..., H]."""
        return torch.cat((path, embedded.to(path.dtype)), -1) if self.config.hydra else path

    def state(self, path: Tensor, level: int) -> Tensor:
        """The states [..., H] of nodes at `level` (0: the root)."""
        return self.first[level](path)

    def head(self, state: Tensor, level: int = 0) -> Tensor:
        """Draft logits [..., Vd]."""
        return self.lm_head(state) if self.config.shared else self.lm_heads[level](state)


class HeadsDrafter(NetworkDrafter):
    """Heads bound to a target, whose last hidden state they read (Hydra's: its embedding too)."""

    def __init__(self, network: HeadsNetwork, target: Target):
        super().__init__(network.requires_grad_(False), target)
        # expansions: the root's children come from the first head
        self.deepest = self.config.num_heads - 1

    def session(self, context_tok: int, tree_tok: int) -> HeadsSession:
        return HeadsSession(self)


class HeadsSession(DraftSession):
    """One turn: paths and level of the last forward's nodes."""

    def __init__(self, drafter: HeadsDrafter):
        self.drafter = drafter
        self.network = drafter.network

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        assert features is not None, "heads read the target's states"
        self._level = -1
        self._path = features[-1:]
        return self._children_of(tokens[-1:], top_k)

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self._path = self._path[rows]
        return self._children_of(tokens, top_k)

    def _children_of(self, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Children of nodes one level below the last ones."""
        self._level += 1
        network = self.network
        self._path = network.extend(self._path, self.drafter.embedding(tokens))
        # Medusa's nodes all have the same children
        paths = self._path if network.config.hydra else self._path[:1]
        state = network.state(paths, self._level)
        if self._level == 0:
            self.root_state = state[0]
        logits = network.head(state, self._level).float()
        ids, log_probs = best_tokens(logits, top_k, self.drafter.target_id)
        return ids.expand(len(tokens), -1), log_probs.expand(len(tokens), -1)


def load_heads(folder: Path, target: Target) -> HeadsDrafter:
    return HeadsDrafter(read_heads(folder, target), target)


def read_heads(folder: str | Path, target: Target) -> HeadsNetwork:
    """The heads in `folder`, built for `target`. SpecdecError if they do not fit."""
    fields = Fields(folder)
    folder = fields.folder
    kind = "hydra" if "hydra_num_heads" in fields else "medusa"
    # Hydra's other variants would load and draft badly
    heads = fields.number(f"{kind}_num_heads")
    usual = {"hydra_head_arch": "mlp", f"{kind}_num_layers": 1, "hidden_state_offset": 0}
    if any(fields.get(name, value) != value for name, value in usual.items()):
        raise bad_checkpoint(folder, "only heads of kind mlp and of one layer are read")
    # 1. the weights, by our names
    files = (f"{kind}_lm_head.safetensors", f"{kind}_lm_head.pt", *WEIGHT_FILES)
    tensors = read_tensors(folder, files)
    names = HYDRA if kind == "hydra" else MEDUSA
    official = [(theirs, ours) for ours, theirs in names]
    tensors = {renamed(name, official): tensor for name, tensor in tensors.items()}
    # 2. their shape; what a file does not say is the target's
    config = HeadsConfig(
        target.hidden_size,
        target.vocab_size,
        fields.number("draft_vocab_size", target.vocab_size),
        heads,
        hydra=kind == "hydra",
        shared="lm_head.weight" in tensors,
        taps=(target.num_layers,),
    )
    return with_weights(HeadsNetwork, config, tensors, folder)


def renamed(name: str, names: list[tuple[str, str]]) -> str:
    """A tensor's name with the beginning of one convention replaced by another's."""
    for before, after in names:
        pattern = re.escape(before).replace(r"\{\}", r"(\d+)")
        match = re.match(pattern, name)
        if match:
            return after.format(match[1]) + name[match.end() :]
    return name


def save_heads(network: HeadsNetwork, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write config.json and the heads' safetensors in the official layout, each atomically."""
    folder = Path(folder)
    config = network.config
    tensors = {}
    for name, value in network.state_dict().items():
        # a vocabulary that is not reduced needs no maps
        if name not in ("d2t", "t2d") or config.shared:
            tensors[renamed(name, HYDRA if config.hydra else MEDUSA)] = value
    kind = "hydra" if config.hydra else "medusa"
    save_tensors(tensors, folder / f"{kind}_lm_head.safetensors", dtype)
    raw: dict[str, Any] = {"version": "2"}
    if config.hydra:
        raw = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
    raw |= {f"{kind}_num_heads": config.num_heads, f"{kind}_num_layers": 1}
    raw |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    if config.shared:
        raw["draft_vocab_size"] = config.draft_vocab_size
    runs.write_json(folder / "config.json", raw)
    return folder
