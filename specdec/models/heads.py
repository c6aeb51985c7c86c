"""Medusa's and Hydra's heads: each predicts one of the next tokens from the target's last state.

    h        the target's last state before the root, after the final norm
    head i   state_i = block(...block(path_i)),  block(x) = x + silu(W x + b),  i = 0, 1, ...
             logits of the i + 1st token after the root = projection(state_i)
    Medusa   path_i = h: all nodes of a level have the same children
    Hydra    path_i = [s; e(t_0); ...; e(t_i)], t_0 the root, t_1 .. t_i the tokens down to the node
             s = h; in Hydra++ the state of one more Llama layer over all of the target's states

The projection is shared by all heads over the draft vocabulary, or the target's own, or one per
head. Hydra++'s layer has its own keys and values, kept by an `EagleSession` as for EAGLE.

Checkpoints on disk have the official layouts:

    Medusa   config.json: medusa_num_heads, medusa_num_layers    medusa_lm_head.safetensors or .pt
             {i}.{j}.linear.{weight,bias}      block of head i, once per layer j, all the same
             {i}.{L}.weight                    its projection; version 2 has none: the target's
    Hydra    config.json: hydra_num_heads, hydra_num_layers      hydra_lm_head.safetensors or .pt
             hydra_mlp.{i}.{j}.{linear,res_connection}.{weight,bias}   odd j alone in Hydra++
             hydra_lm_head.{i}[.1].{weight,bias}                 its projection
             prefix_embeding_layer.*                             Hydra++'s layer
    ours     lm_head.weight, d2t, t2d in place of a projection per head; draft_vocab_size

What the files leave out comes from the target. Reading is strict: every weight is present, none is
left over. If config.json and the weights disagree on the number of heads, the weights decide.
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

from specdec import runs
from specdec.core.protocols import DraftSession
from specdec.errors import SpecdecError, warn
from specdec.models.eagle_drafter import EagleDrafter, EagleSession, NetworkDrafter
from specdec.models.eagle_files import (
    Fields,
    bad_checkpoint,
    read_weights,
    save_tensors,
    with_weights,
)
from specdec.models.eagle_network import EagleConfig, EagleNetwork, RMSNorm, best_tokens, layer_like
from specdec.models.families import setting
from specdec.models.target import Target
from specdec.stored import inside

MEDUSA_2 = "medusa_head."  # heads trained together with their model, stored beside its weights
PREFIX = "prefix_embeding_layer."  # official spelling
UNREAD = re.compile(rf"^input_embed_fn\.|^{PREFIX}embed_tokens\.|rotary_emb\.inv_freq$")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class HeadsConfig:
    """The heads of one drafter.

    num_layers: how often each head's block is applied (official files name it per application).
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
        self.res_connection: nn.Linear | None = None
        if wide != hidden:
            # initially the target's state (which comes first), and nothing of the tokens
            self.res_connection = nn.Linear(wide, hidden)
            nn.init.zeros_(self.res_connection.bias)
            with torch.no_grad():
                self.res_connection.weight.copy_(torch.eye(hidden, wide))

    def forward(self, x: Tensor) -> Tensor:
        """[..., wide] -> [..., H]"""
        residual = x if self.res_connection is None else self.res_connection(x)
        return residual + F.silu(self.linear(x))


class HeadsNetwork(nn.Module):
    """Weights of Medusa's heads.

    Call order, for N nodes: path = extend(path, embedded) once per level, state(path, level),
    head(state, level).
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadsConfig):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        heads = range(config.num_heads)
        self.first = nn.ModuleList(Block(self.width(head), hidden) for head in heads)
        self.further = nn.ModuleList()
        if config.path and config.num_layers > 1:
            self.further.extend(Block(hidden, hidden) for _ in heads)
        sizes = (hidden, config.draft_vocab_size)
        self.lm_heads = nn.ModuleList()
        if config.projections == "shared" or (config.projections == "each" and len(heads) == 1):
            self.lm_head = nn.Linear(*sizes, bias=config.head_bias)
        elif config.projections == "each":
            self.lm_heads.extend(nn.Linear(*sizes, bias=config.head_bias) for _ in heads)
        # of heads that project by the target's
        self.target_head: Callable[[Tensor], Tensor] | None = None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def width(self, head: int) -> int:
        """Input width of a head's first block."""
        return self.config.hidden_size

    def extend(self, path: Tensor, embedded: Tensor) -> Tensor:
        """Paths [..., X] of nodes from their parents' and their tokens' embeddings [..., H]."""
        return path

    def state(self, path: Tensor, level: int) -> Tensor:
        """The states [..., H] of nodes at `level` (0: the root)."""
        heads = self.config.num_heads
        if level >= heads:
            raise SpecdecError(f"this drafter has {heads} heads and drafts no deeper.")
        state: Tensor = self.first[level](path)
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


class MedusaDrafter(NetworkDrafter):
    """Heads bound to a target, whose last hidden state they read (Hydra's: its embedding too)."""

    def __init__(self, network: HeadsNetwork, target: Target):
        super().__init__(network.requires_grad_(False), target)
        # expansions: the root's children come from the first head
        self.deepest = self.config.num_heads - 1

    def session(self, context_tok: int, tree_tok: int) -> MedusaSession:
        return MedusaSession(self)

    def children(self, state: Tensor, level: int, top_k: int) -> tuple[Tensor, Tensor]:
        """The k best next tokens after states [W, H]: target ids, float32 log-probabilities."""
        return best_tokens(self.network.head(state, level).float(), top_k, self.target_id)


class MedusaSession(DraftSession):
    """One turn, with the paths of the last forward's nodes and their level."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter = drafter
        self.network = drafter.network

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        assert features is not None, "heads read the target's states"
        self._level = -1
        self._path = self.context(tokens, features)[-1:]
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
        embedded = F.embedding(tokens, self.drafter.embedding.weight)
        self._path = self.network.extend(self._path, embedded)
        # Medusa's nodes all have the same children
        paths = self._path if self.network.config.path else self._path[:1]
        state = self.network.state(paths, self._level)
        if self._level == 0:
            self.root_state = state[0]
        ids, log_probs = self.drafter.children(state, self._level, top_k)
        return ids.expand(len(tokens), -1), log_probs.expand(len(tokens), -1)


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


class HydraNetwork(HeadsNetwork):
    """Weights of Hydra's heads, and of Hydra++'s layer."""

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        if config.layer is not None:
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

    def session(self, context_tok: int, tree_tok: int) -> HydraSession:
        return HydraSession(self, context_tok)


class HydraSession(MedusaSession):
    """One turn; Hydra++'s layer reads every committed token's state once."""

    def __init__(self, drafter: HydraDrafter, context_tok: int):
        super().__init__(drafter)
        self._layer: EagleSession | None = None
        if drafter.layer is not None:
            self._layer = EagleSession(drafter.layer, context_tok, 0)

    def context(self, tokens: Tensor, features: Tensor) -> Tensor:
        return features if self._layer is None else self._layer.advance(tokens, features)


def heads_network(config: HeadsConfig) -> HeadsNetwork:
    """Medusa's or Hydra's network, with initial weights."""
    return HydraNetwork(config) if config.path else HeadsNetwork(config)


def load_heads(folder: Path, target: Target) -> MedusaDrafter:
    """The drafter in `folder`, bound to a target."""
    network = read_heads(folder, target)
    if isinstance(network, HydraNetwork):
        return HydraDrafter(network, target)
    return MedusaDrafter(network, target)


def read_heads(folder: str | Path, target: Target) -> HeadsNetwork:
    """The heads in `folder`, built for `target`.

    SpecdecError if they are incomplete, have extra weights or do not fit.
    """
    folder = Path(folder).expanduser()
    fields = Fields.read(folder)
    kind = "hydra" if "hydra_num_heads" in fields else "medusa"

    # 1. the weights of the first file that exists
    own = [f"{kind}_lm_head.safetensors", f"{kind}_lm_head.pt"]
    names = [*own, "model.safetensors", "pytorch_model.bin"]
    present = [name for name in names if (folder / name).is_file()]
    if not present:
        raise SpecdecError(f"{folder} has no weights of heads; expected {' or '.join(own)}.")
    stored = read_weights(inside(folder, present[0], "fetch the checkpoint again"))
    tensors = {name: tensor for name, tensor in stored.items() if not UNREAD.search(name)}
    if any(name.startswith(MEDUSA_2) for name in tensors):
        for name in list(tensors):
            tensor = tensors.pop(name)
            if name.startswith(MEDUSA_2):
                tensors[name.removeprefix(MEDUSA_2)] = tensor

    # 2. by our names
    layers = fields.number(f"{kind}_num_layers", 1)
    if layers > max(1, len(tensors)):
        why = f"config.json counts {layers} layers, its weights are {len(tensors)}"
        raise bad_checkpoint(folder, f"{why}; fetch it again.")
    rename = _hydra if kind == "hydra" else _medusa
    shape, renamed = rename(fields, tensors, layers, target)

    # 3. their projection to tokens
    vocabulary = fields.number("draft_vocab_size", target.vocab_size)
    if "lm_heads.0.weight" in renamed:
        projections = "each"
    elif "lm_head.weight" in tensors:
        projections = "shared"
    else:
        projections = "target"
    if projections != "shared" and vocabulary != target.vocab_size:
        why = "heads over a part of the vocabulary need a projection of their own"
        raise bad_checkpoint(folder, f"{why}.")
    config = HeadsConfig(
        target.hidden_size,
        target.vocab_size,
        vocabulary,
        projections=projections,
        num_layers=layers,
        taps=(target.num_layers,),
        **shape,
    )
    counted = fields.get(f"{kind}_num_heads")
    if counted != config.num_heads:
        warn(f"{folder}: config.json counts {counted} heads, the weights {config.num_heads}.")
    # what is left over is refused
    return with_weights(heads_network, config, {**renamed, **tensors}, folder, "this target")


def _medusa(
    fields: Fields, tensors: Tensors, layers: int, target: Target
) -> tuple[dict[str, Any], Tensors]:
    """Fields of the config, and tensors by our names, which are taken out of `tensors`."""
    heads = _count_heads(fields.folder, tensors, r"(\d+)\.0\.linear\.weight")
    renamed = {}
    for head in range(heads):
        for part in ("weight", "bias"):
            names = [f"{head}.{layer}.linear.{part}" for layer in range(layers)]
            renamed[f"first.{head}.linear.{part}"] = _same(fields.folder, tensors, names)
        if f"{head}.{layers}.weight" in tensors:
            renamed[f"lm_heads.{head}.weight"] = tensors.pop(f"{head}.{layers}.weight")
    return {"num_heads": heads}, renamed


def _hydra(
    fields: Fields, tensors: Tensors, layers: int, target: Target
) -> tuple[dict[str, Any], Tensors]:
    """Fields of the config, and tensors by our names, which are taken out of `tensors`."""
    kind = str(fields.get("hydra_head_arch", "mlp"))
    foreign = fields.get("grounded_heads") is False or fields.get("hidden_state_offset")
    if kind not in ("mlp", "prefix-mlp") or foreign:
        why = f"Hydra heads of kind {kind!r} with these settings are not supported"
        raise bad_checkpoint(fields.folder, f"{why}; only mlp and prefix-mlp.")
    prefixed = kind == "prefix-mlp"
    # in Hydra++ dropout layers count too
    first = 1 if prefixed else 0
    further = range(3, 1 + 2 * layers, 2) if prefixed else range(1, layers)
    projection = "1." if prefixed else ""
    pattern = rf"hydra_mlp\.(\d+)\.{first}\.linear\.weight"
    heads = _count_heads(fields.folder, tensors, pattern)
    renamed = {}
    for head in range(heads):
        for part in ("weight", "bias"):
            for block in ("linear", "res_connection"):
                name = f"hydra_mlp.{head}.{first}.{block}.{part}"
                if name in tensors:
                    renamed[f"first.{head}.{block}.{part}"] = tensors.pop(name)
            if layers > 1:
                names = [f"hydra_mlp.{head}.{layer}.linear.{part}" for layer in further]
                renamed[f"further.{head}.linear.{part}"] = _same(fields.folder, tensors, names)
            name = f"hydra_lm_head.{head}.{projection}{part}"
            if name in tensors:
                renamed[f"lm_heads.{head}.{part}"] = tensors.pop(name)
    for name in list(tensors):
        if name.startswith(PREFIX):
            ours = name.removeprefix(PREFIX).replace("layers.0.", "midlayer.")
            renamed[f"prefix.{ours}"] = tensors.pop(name)
    shape: dict[str, Any] = {"num_heads": heads, "path": "layer" if prefixed else "state"}
    shape["head_bias"] = "lm_heads.0.bias" in renamed
    if prefixed:
        shape["layer"] = _layer_of(fields, renamed, target)
    return shape, renamed


def _count_heads(folder: Path, tensors: Tensors, pattern: str) -> int:
    """The number of heads, counted from 0 without a gap."""
    numbers = set()
    for name in tensors:
        match = re.fullmatch(pattern, name)
        if match:
            numbers.add(int(match[1]))
    if not numbers or numbers != set(range(len(numbers))):
        why = "no heads are numbered 0, 1, ... among its weights"
        raise bad_checkpoint(folder, f"{why}; this is no checkpoint of such heads.")
    return len(numbers)


def _same(folder: Path, tensors: Tensors, names: list[str]) -> Tensor:
    """The one block that a head's layers repeat, taken out of `tensors`."""
    blocks = []
    for name in names:
        if name not in tensors:
            raise bad_checkpoint(folder, f"it lacks {name}; fetch or export it again.")
        blocks.append(tensors.pop(name))
    if not all(torch.equal(block, blocks[0]) for block in blocks[1:]):
        why = f"the layers {names} differ"
        known = "one block is applied several times in every known trainer"
        raise bad_checkpoint(folder, f"{why}, but {known}.")
    return blocks[0]


def _layer_of(fields: Fields, renamed: Tensors, target: Target) -> EagleConfig:
    """The shape of Hydra++'s layer: the target's own, with plain RoPE."""
    rope = setting(target.config, "rope_parameters", {})
    if "rope_theta" not in fields and rope.get("rope_type", "default") != "default":
        why = f"RoPE scaling of type {rope['rope_type']!r} is not supported for Hydra++'s layer"
        raise bad_checkpoint(fields.folder, f"{why}.")
    theta = float(fields.number("rope_theta", rope.get("rope_theta", 10000.0)))
    shape = {"rope_theta": theta, "generation": 1, "num_taps": 1, "taps": (target.num_layers,)}
    up = renamed.get("prefix.midlayer.mlp.up_proj.weight")
    if up is not None:
        shape["intermediate_size"] = up.shape[0]
    return layer_like(target.config, target.vocab_size, **shape)


def save_heads(
    network: HeadsNetwork, folder: str | Path, dtype: torch.dtype | None = None, **fields: Any
) -> Path:
    """Write config.json and the heads' safetensors in the official layout; returns the folder.

    Each file is written atomically.
    """
    folder = Path(folder)
    config = network.config

    # 1. the weights, by their official names
    tensors = {}
    for name, value in network.state_dict().items():
        if name in ("d2t", "t2d") and config.projections != "shared":
            continue
        if dtype and value.is_floating_point():
            value = value.to(dtype)
        for official in _official_names(config, name):
            # safetensors take no memory twice
            tensors[official] = value.clone()
    kind = "hydra" if config.path else "medusa"
    save_tensors(tensors, folder / f"{kind}_lm_head.safetensors")

    # 2. config.json
    raw: dict[str, Any] = {f"{kind}_num_heads": config.num_heads}
    raw[f"{kind}_num_layers"] = config.num_layers
    if config.path:
        raw["hydra_head_arch"] = "prefix-mlp" if config.path == "layer" else "mlp"
        raw |= {"grounded_heads": True, "hidden_state_offset": 0}
    else:
        raw["version"] = "2"
    if config.layer is not None:
        raw["rope_theta"] = config.layer.rope_theta
    raw |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    if config.projections == "shared":
        raw["draft_vocab_size"] = config.draft_vocab_size
    runs.write_json(folder / "config.json", {**raw, **fields})
    return folder


def _official_names(config: HeadsConfig, name: str) -> list[str]:
    """The official names of our tensor: a block has one per application."""
    part, _, rest = name.partition(".")
    head, _, rest = rest.partition(".")
    prefixed = config.path == "layer"
    if part == "lm_heads":
        if config.path:
            return [f"hydra_lm_head.{head}.{'1.' if prefixed else ''}{rest}"]
        return [f"{head}.{config.num_layers}.{rest}"]
    if part not in ("first", "further"):
        return [re.sub(r"^prefix\.", PREFIX, name).replace("midlayer.", "layers.0.")]
    if not config.path:
        return [f"{head}.{layer}.{rest}" for layer in range(config.num_layers)]
    layers = range(1) if part == "first" else range(1, config.num_layers)
    numbers = [1 + 2 * layer if prefixed else layer for layer in layers]
    return [f"hydra_mlp.{head}.{number}.{rest}" for number in numbers]
