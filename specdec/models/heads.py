"""Medusa's and Hydra's heads: each predicts one of the next tokens from the target's last state.

    h        the target's last state before the root, after the final norm
    head i   state_i = block(path_i),  block(x) = x + silu(W x + b),  i = 0, 1, ...
             logits of the i + 1st token after the root = projection(state_i)
    Medusa   path_i = h: all nodes of a level have the same children
    Hydra    path_i = [s; e(t_0); ...; e(t_i)], t_0 the root, t_1 .. t_i the tokens down to the node
             s = h; in Hydra++ the state of one more Llama layer over all of the target's states

The projection is shared by all heads over the draft vocabulary, or the target's own, or one per
head. Hydra++'s layer has its own keys and values, kept by an `EagleSession` as for EAGLE.

Checkpoints have the official layouts, of one block per head:

    Medusa   config.json: medusa_num_heads       medusa_lm_head.safetensors or .pt
             {i}.0.linear.{weight,bias}          block of head i
             {i}.1.weight                        its projection; version 2 has none: the target's
    Hydra    config.json: hydra_num_heads        hydra_lm_head.safetensors or .pt
             hydra_mlp.{i}.0.{linear,res_connection}.{weight,bias}   .1. in Hydra++
             hydra_lm_head.{i}[.1].{weight,bias}                     its projection
             prefix_embeding_layer.*                                 Hydra++'s layer
    ours     lm_head.weight, d2t, t2d in place of a projection per head; draft_vocab_size

"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import RMSNorm

from specdec import runs
from specdec.core.protocols import DraftSession
from specdec.models.eagle_drafter import EagleDrafter, EagleSession, NetworkDrafter
from specdec.models.eagle_files import (
    WEIGHT_FILES,
    Fields,
    bad_checkpoint,
    read_tensors,
    save_tensors,
    with_weights,
)
from specdec.models.eagle_network import EagleConfig, EagleNetwork, best_tokens, layer_like
from specdec.models.families import setting
from specdec.models.target import Target

PREFIX = "prefix_embeding_layer."  # official spelling
UNREAD = re.compile(rf"^input_embed_fn\.|^{PREFIX}embed_tokens\.")
# our names and the official ones, by the heads' path; {} is the number of a head
NAMES: dict[str | None, dict[str, str]] = {
    None: {"first.{}.linear.": "{}.0.linear.", "lm_heads.{}.": "{}.1."},
    "state": {"first.{}.": "hydra_mlp.{}.0.", "lm_heads.{}.": "hydra_lm_head.{}."},
    "layer": {
        "first.{}.": "hydra_mlp.{}.1.",
        "lm_heads.{}.": "hydra_lm_head.{}.1.",
        "prefix.midlayer.": f"{PREFIX}layers.0.",
        "prefix.": PREFIX,
    },
}


@dataclass(frozen=True)
class HeadsConfig:
    """The heads of one drafter.

    projections: "shared" (one over the draft vocabulary), "target" or "each" (one per head).
    head_bias: of the projections. taps: the last hidden state.
    path: None for Medusa; Hydra's heads also read the tokens drafted so far, after the target's
    state ("state") or after one more layer over all states ("layer", Hydra++).
    layer: that layer's shape.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int = 4
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
    """x + silu(W x + b), initially the identity; for a wider input, `res_connection` x for x."""

    def __init__(self, wide: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(wide, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection: nn.Linear | None = None
        if wide != hidden:
            # initially the target's state (which comes first), and nothing of the tokens
            self.res_connection = nn.Linear(wide, hidden)
            nn.init.zeros_(self.res_connection.bias)
            with torch.no_grad():
                self.res_connection.weight.copy_(torch.eye(hidden, wide))

    def forward(self, x: Tensor) -> Tensor:
        """[..., wide] -> [..., H]"""
        added = F.silu(self.linear(x))
        if self.res_connection is not None:
            x = self.res_connection(x)
        return x + added


class HeadsNetwork(nn.Module):
    """Weights of Medusa's or Hydra's heads, and of Hydra++'s layer.

    Call order at each level: path = extend(path, embedded), state(path, level), head(state, level).
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadsConfig):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        heads = range(config.num_heads)
        widths = [hidden * (head + 2) if config.path else hidden for head in heads]
        self.first = nn.ModuleList(Block(width, hidden) for width in widths)
        sizes = (hidden, config.draft_vocab_size)
        self.lm_heads = nn.ModuleList()
        if config.projections == "shared":
            self.lm_head = nn.Linear(*sizes, bias=False)
        elif config.projections == "each":
            self.lm_heads.extend(nn.Linear(*sizes, bias=config.head_bias) for _ in heads)
        # of heads that project by the target's
        self.target_head: Callable[[Tensor], Tensor] | None = None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        if config.layer is not None:
            self.prefix = PrefixLayer(config.layer)

    def extend(self, path: Tensor, embedded: Tensor) -> Tensor:
        """Paths [..., X] of nodes from their parents' and their tokens' embeddings [..., H]."""
        if self.config.path is None:
            return path
        return torch.cat((path, embedded.to(path.dtype)), -1)

    def state(self, path: Tensor, level: int) -> Tensor:
        """The states [..., H] of nodes at `level` (0: the root)."""
        state: Tensor = self.first[level](path)
        return state

    def head(self, state: Tensor, level: int = 0) -> Tensor:
        """Draft logits [..., Vd]."""
        if self.target_head is not None:
            return self.target_head(state)
        if self.config.projections == "each":
            return self.lm_heads[level](state)
        return self.lm_head(state)

    def use_head(self, head: nn.Module) -> None:
        """Use the target's head if these have none; it stays the target's and is not saved."""
        if self.config.projections == "target":
            self.target_head = lambda state: head(state)


class PrefixLayer(EagleNetwork):
    """One Llama layer and a final norm over the target's states alone: EAGLE-1 without fusion."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        del self.fc
        self.midlayer.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.input_layernorm(hidden), hidden

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        return self.norm(super().finish(attended, residual))


class HeadsDrafter(NetworkDrafter):
    """Heads bound to a target, whose last hidden state they read (Hydra's: its embedding too)."""

    def __init__(self, network: HeadsNetwork, target: Target):
        super().__init__(network.requires_grad_(False), target)
        # expansions: the root's children come from the first head
        self.deepest = self.config.num_heads - 1
        self.layer = EagleDrafter(network.prefix, target) if self.config.layer else None

    def session(self, context_tok: int, tree_tok: int) -> HeadsSession:
        return HeadsSession(self, context_tok)

    def children(self, state: Tensor, level: int, top_k: int) -> tuple[Tensor, Tensor]:
        return best_tokens(self.network.head(state, level).float(), top_k, self.target_id)


class HeadsSession(DraftSession):
    """One turn: paths and level of the last forward's nodes, and the session of Hydra++'s layer."""

    def __init__(self, drafter: HeadsDrafter, context_tok: int):
        self.drafter = drafter
        self.network = drafter.network
        self._layer: EagleSession | None = None
        if drafter.layer is not None:
            self._layer = EagleSession(drafter.layer, context_tok, 0)

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        assert features is not None, "heads read the target's states"
        if self._layer is not None:
            features = self._layer.advance(tokens, features)
        self._level = -1
        self._path = features[-1:]
        return self._children_of(tokens[-1:], top_k)

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self._path = self._path[rows]
        return self._children_of(tokens, top_k)

    def _children_of(self, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Children of nodes one level below the last ones."""
        self._level += 1
        embedded = self.drafter.embedding(tokens)
        self._path = self.network.extend(self._path, embedded)
        paths = self._path
        if self.network.config.path is None:
            # Medusa's nodes all have the same children
            paths = paths[:1]
        state = self.network.state(paths, self._level)
        if self._level == 0:
            self.root_state = state[0]
        ids, log_probs = self.drafter.children(state, self._level, top_k)
        return ids.expand(len(tokens), -1), log_probs.expand(len(tokens), -1)


def heads_network(config: HeadsConfig) -> HeadsNetwork:
    return HeadsNetwork(config)


def load_heads(folder: Path, target: Target) -> HeadsDrafter:
    return HeadsDrafter(read_heads(folder, target), target)


def read_heads(folder: str | Path, target: Target) -> HeadsNetwork:
    """The heads in `folder`, built for `target`. SpecdecError if they do not fit."""
    folder = Path(folder).expanduser()
    fields = Fields.read(folder)
    kind = "hydra" if "hydra_num_heads" in fields else "medusa"
    paths = {None: None, "mlp": "state", "prefix-mlp": "layer"}
    form = str(fields.get("hydra_head_arch", "mlp")) if kind == "hydra" else None
    layers = fields.get(f"{kind}_num_layers", 1)
    ungrounded = fields.get("grounded_heads") is False or fields.get("hidden_state_offset")
    if form not in paths or layers != 1 or ungrounded:
        raise bad_checkpoint(folder, "only heads of kind mlp and prefix-mlp of one layer are read")
    path = paths[form]

    # 1. the weights, by our names
    files = (f"{kind}_lm_head.safetensors", f"{kind}_lm_head.pt", *WEIGHT_FILES)
    tensors = {}
    for name, tensor in read_tensors(folder, files).items():
        if not UNREAD.search(name):
            tensors[_renamed(name, path, official=False)] = tensor

    # 2. the shape
    projections = "target"
    if "lm_heads.0.weight" in tensors:
        projections = "each"
    elif "lm_head.weight" in tensors:
        projections = "shared"
    layer = None
    up = tensors.get("prefix.midlayer.mlp.up_proj.weight")
    if path == "layer" and up is not None:
        # the target's own, with plain RoPE
        rope = setting(target.config, "rope_parameters", {})
        layer = layer_like(
            target.config,
            target.vocab_size,
            rope_theta=float(fields.number("rope_theta", rope.get("rope_theta", 10000.0))),
            intermediate_size=up.shape[0],
            generation=1,
            num_taps=1,
            taps=(target.num_layers,),
        )
    config = HeadsConfig(
        target.hidden_size,
        target.vocab_size,
        fields.number("draft_vocab_size", target.vocab_size),
        num_heads=fields.number(f"{kind}_num_heads"),
        projections=projections,
        head_bias="lm_heads.0.bias" in tensors,
        taps=(target.num_layers,),
        path=path,
        layer=layer,
    )
    return with_weights(heads_network, config, tensors, folder)


def _renamed(name: str, path: str | None, official: bool) -> str:
    """The official name of a tensor of ours, or our name of an official one."""
    for ours, theirs in NAMES[path].items():
        before, after = (ours, theirs) if official else (theirs, ours)
        pattern = re.escape(before).replace(r"\{\}", r"(\d+)")
        renamed, count = re.subn(f"^{pattern}", after.replace("{}", r"\1"), name)
        if count:
            return renamed
    return name


def save_heads(
    network: HeadsNetwork, folder: str | Path, dtype: torch.dtype | None = None, **fields: Any
) -> Path:
    """Write config.json and the heads' safetensors in the official layout, each atomically."""
    folder = Path(folder)
    config = network.config
    tensors = {}
    for name, value in network.state_dict().items():
        if name not in ("d2t", "t2d") or config.projections == "shared":
            tensors[_renamed(name, config.path, official=True)] = value
    kind = "hydra" if config.path else "medusa"
    save_tensors(tensors, folder / f"{kind}_lm_head.safetensors", dtype)
    raw: dict[str, Any] = {f"{kind}_num_heads": config.num_heads, f"{kind}_num_layers": 1}
    if config.path:
        raw |= {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
    else:
        raw["version"] = "2"
    if config.layer is not None:
        raw |= {"hydra_head_arch": "prefix-mlp", "rope_theta": config.layer.rope_theta}
    raw |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    if config.projections == "shared":
        raw["draft_vocab_size"] = config.draft_vocab_size
    runs.write_json(folder / "config.json", {**raw, **fields})
    return folder
