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

Checkpoints on disk have the official layouts:

    Medusa   config.json: medusa_num_heads, medusa_num_layers          medusa_lm_head.safetensors or .pt
             {i}.{j}.linear.{weight,bias}                              block of head i, once per layer j, all the same
             {i}.{L}.weight                                            its projection; version 2 has none: the target's
    Hydra    config.json: hydra_num_heads, hydra_num_layers, ...       hydra_lm_head.safetensors or .pt
             hydra_mlp.{i}.{j}.{linear,res_connection}.{weight,bias}   odd j alone in Hydra++, whose even ones are dropout
             hydra_lm_head.{i}[.1].{weight,bias}                       its projection
             prefix_embeding_layer.*                                   Hydra++'s layer
    ours     both, in place of a projection per head                   lm_head.weight, d2t, t2d: one for all, over a part of
                                                                       the vocabulary; config.json says draft_vocab_size

What the files leave out comes from the target: sizes, and the shape of the layer's attention. Reading is strict: every weight
is present, none is left over. If config.json and the weights disagree on the number of heads, the weights decide, with a
warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
SHARED = ("lm_head.weight", "d2t", "t2d")


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
        if (
            wide != hidden
        ):  # initially the target's state (which comes first), and nothing of the tokens
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
        self.first = nn.ModuleList(
            Block(self.width(head), hidden) for head in range(config.num_heads)
        )
        further = config.num_heads if config.path and config.num_layers > 1 else 0
        self.further = nn.ModuleList(Block(hidden, hidden) for _ in range(further))
        own = {"shared": 1, "target": 0, "each": config.num_heads}[config.projections]
        sizes = (hidden, config.draft_vocab_size)
        if own == 1:
            self.lm_head = nn.Linear(*sizes, bias=config.head_bias)
        self.lm_heads = nn.ModuleList(
            nn.Linear(*sizes, bias=config.head_bias) for _ in range(own * (own > 1))
        )
        self.target_head: Callable[[Tensor], Tensor] | None = (
            None  # the target's head, for heads that project by it
        )
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
            raise SpecdecError(
                f"this drafter has {self.config.num_heads} heads and drafts no deeper."
            )
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


class MedusaDrafter(NetworkDrafter):
    """Heads bound to a target, whose embedding they use (Hydra's) and whose last hidden state they read."""

    def __init__(self, network: HeadsNetwork, target: Target):
        super().__init__(network.requires_grad_(False), target)
        self.deepest = (
            self.config.num_heads - 1
        )  # expansions: the root's children come from the first head

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
        self._path = self.network.extend(
            self._path, F.embedding(tokens, self.drafter.embedding.weight)
        )
        paths = (
            self._path if self.network.config.path else self._path[:1]
        )  # Medusa's nodes all have the same children
        state = self.network.state(paths, self._level)
        if self._level == 0:
            self.root_state = state[0]
        return tuple(
            part.expand(len(tokens), -1)
            for part in self.drafter.children(state, self._level, top_k)
        )


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

    def session(self, context_tok: int, tree_tok: int) -> HydraSession:
        return HydraSession(self, context_tok)


class HydraSession(MedusaSession):
    """One turn; Hydra++'s layer reads every committed token's state once."""

    def __init__(self, drafter: HydraDrafter, context_tok: int):
        super().__init__(drafter)
        self._lasting = (
            EagleSession(drafter.layer, context_tok, 0) if drafter.layer is not None else None
        )

    def context(self, tokens: Tensor, features: Tensor) -> Tensor:
        return features if self._lasting is None else self._lasting.advance(tokens, features)


def heads_network(config: HeadsConfig) -> HeadsNetwork:
    """Medusa's or Hydra's network, with initial weights."""
    return (HydraNetwork if config.path else HeadsNetwork)(config)


def read_heads(folder: str | Path, target: Target) -> HeadsNetwork:
    """The heads in `folder`, built for `target`. SpecdecError if they are incomplete, have extra weights or do not fit."""
    folder = Path(folder).expanduser()
    fields = Fields.read(folder)
    kind = "hydra" if "hydra_num_heads" in fields else "medusa"
    names = [
        f"{kind}_lm_head.safetensors",
        f"{kind}_lm_head.pt",
        "model.safetensors",
        "pytorch_model.bin",
    ]
    if (name := next((name for name in names if (folder / name).is_file()), None)) is None:
        raise SpecdecError(f"{folder} has no weights of heads; expected {' or '.join(names[:2])}.")
    tensors = read_weights(inside(folder, name, "fetch the checkpoint again"))
    tensors = {name: tensor for name, tensor in tensors.items() if not UNREAD.search(name)}
    together = {
        name.removeprefix(MEDUSA_2): tensor
        for name, tensor in tensors.items()
        if name.startswith(MEDUSA_2)
    }
    tensors = together or tensors
    layers = fields.number(f"{kind}_num_layers", 1)
    if layers > max(1, len(tensors)):
        why = f"config.json counts {layers} layers, its weights are {len(tensors)}"
        raise bad_checkpoint(folder, f"{why}; fetch it again.")
    config, named = (_hydra if kind == "hydra" else _medusa)(fields, tensors, layers, target)
    stated = fields.get(f"{kind}_num_heads")
    if stated != config.num_heads:
        warn(
            f"{folder}: config.json counts {stated} heads, the weights {config.num_heads}; the weights decide."
        )
    return with_weights(heads_network, config, named, folder, "this target")


def _medusa(fields: Fields, tensors: dict[str, Tensor], layers: int, target: Target):
    """(config, tensors by our names) of Medusa's heads."""
    heads = _count_heads(fields.folder, tensors, r"(\d+)\.0\.linear\.weight")
    named, rest = {}, dict(tensors)
    for head in range(heads):
        for part in ("weight", "bias"):
            same = [rest.pop(f"{head}.{layer}.linear.{part}", None) for layer in range(layers)]
            named[f"first.{head}.linear.{part}"] = _repeated_block(
                fields.folder, f"{head}.*.linear.{part}", same
            )
        if (own := rest.pop(f"{head}.{layers}.weight", None)) is not None:
            named[f"lm_heads.{head}.weight"] = own
    return _with_projection(fields, named, rest, dict(num_heads=heads, num_layers=layers), target)


def _hydra(fields: Fields, tensors: dict[str, Tensor], layers: int, target: Target):
    """(config, tensors by our names) of Hydra's heads."""
    kinds = {"mlp": "state", "prefix-mlp": "layer"}
    kind = str(fields.get("hydra_head_arch", "mlp"))
    if (
        kind not in kinds
        or fields.get("grounded_heads") is False
        or fields.get("hidden_state_offset")
    ):
        why = f"Hydra heads of kind {kind!r} with these settings are not supported"
        raise bad_checkpoint(fields.folder, f"{why}; only {list(kinds)}.")
    step, first = (2, 1) if kind == "prefix-mlp" else (1, 0)  # dropout layers count too
    heads = _count_heads(fields.folder, tensors, rf"hydra_mlp\.(\d+)\.{first}\.linear\.weight")
    named, rest = {}, dict(tensors)
    for head in range(heads):
        for part in ("weight", "bias"):
            for block in ("linear", "res_connection"):
                named[f"first.{head}.{block}.{part}"] = rest.pop(
                    f"hydra_mlp.{head}.{first}.{block}.{part}", None
                )
            if layers > 1:
                name = f"hydra_mlp.{head}.*.linear.{part}"
                numbers = [str(first + step * layer) for layer in range(1, layers)]
                same = [rest.pop(name.replace("*", number), None) for number in numbers]
                named[f"further.{head}.linear.{part}"] = _repeated_block(fields.folder, name, same)
            named[f"lm_heads.{head}.{part}"] = rest.pop(
                f"hydra_lm_head.{head}.{'1.' * first}{part}", None
            )
    for name in [name for name in rest if name.startswith(PREFIX)]:
        named["prefix." + name.removeprefix(PREFIX).replace("layers.0.", "midlayer.")] = rest.pop(
            name
        )
    named = {name: tensor for name, tensor in named.items() if tensor is not None}
    shape = dict(
        num_heads=heads, num_layers=layers, path=kinds[kind], head_bias="lm_heads.0.bias" in named
    )
    if kind == "prefix-mlp":
        shape["layer"] = _layer_of(fields, named, target)
    return _with_projection(fields, named, rest, shape, target)


def _with_projection(fields: Fields, named: dict, rest: dict, shape: dict, target: Target):
    """Add the projection to tokens, and anything left over, which the reader refuses."""
    own = "each" if "lm_heads.0.weight" in named else "shared" if SHARED[0] in rest else "target"
    vocabulary = fields.number("draft_vocab_size", target.vocab_size)
    if own != "shared" and vocabulary != target.vocab_size:
        raise bad_checkpoint(
            fields.folder, "heads over a part of the vocabulary need a projection of their own."
        )
    config = HeadsConfig(
        target.hidden_size,
        target.vocab_size,
        vocabulary,
        projections=own,
        taps=(target.num_layers,),
        **shape,
    )
    return config, named | rest


def _count_heads(folder: Path, tensors: dict[str, Tensor], pattern: str) -> int:
    """The number of heads, counted from 0 without a gap."""
    found = {int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))}
    if not found or found != set(range(len(found))):
        why = "no heads are numbered 0, 1, ... among its weights"
        raise bad_checkpoint(folder, f"{why}; this is no checkpoint of such heads.")
    return len(found)


def _repeated_block(folder: Path, name: str, same: list[Tensor | None]) -> Tensor:
    """The one block that a head's layers repeat."""
    if any(tensor is None for tensor in same):
        raise SpecdecError(
            f"{folder} lacks {name} of some layer; it is incomplete, fetch or export it again."
        )
    if not all(torch.equal(tensor, same[0]) for tensor in same[1:]):
        why = f"the layers {name} differ"
        raise bad_checkpoint(
            folder, f"{why}, but one block is applied several times in every known trainer."
        )
    return same[0]


def _layer_of(fields: Fields, named: dict[str, Tensor], target: Target) -> EagleConfig:
    """The shape of Hydra++'s layer: the target's own, with plain RoPE."""
    text = target.config
    rope = setting(text, "rope_parameters", {})
    if "rope_theta" not in fields and rope.get("rope_type", "default") != "default":
        raise bad_checkpoint(
            fields.folder,
            f"RoPE scaling of type {rope['rope_type']!r} is not supported for Hydra++'s layer.",
        )
    up = named.get("prefix.midlayer.mlp.up_proj.weight")
    form = {} if up is None else {"intermediate_size": up.shape[0]}
    form |= dict(rope_theta=float(fields.number("rope_theta", rope.get("rope_theta", 10000.0))))
    return layer_like(
        text, target.vocab_size, **form, generation=1, num_taps=1, taps=(target.num_layers,)
    )


def save_heads(
    network: HeadsNetwork, folder: str | Path, dtype: torch.dtype | None = None, **fields
) -> Path:
    """Write config.json and the heads' safetensors in the official layout, each file atomically; returns the folder."""
    folder, config = Path(folder), network.config
    kind = "hydra" if config.path else "medusa"
    first, step = (1, 2) if config.path == "layer" else (0, 1)
    tensors = {}
    for name, value in network.state_dict().items():
        part, _, rest = name.partition(".")
        head, _, rest = rest.partition(".")
        if part in ("first", "further"):
            stem = f"hydra_mlp.{head}" if config.path else head
            repeats = range(
                part == "further", 1 if config.path and part == "first" else config.num_layers
            )
            names = [f"{stem}.{first + step * layer}.{rest}" for layer in repeats]
        elif part == "lm_heads":
            own = f"{head}.{config.num_layers}."
            names = [(f"hydra_lm_head.{head}.{'1.' * first}" if config.path else own) + rest]
        else:
            names = [
                name.replace("prefix.midlayer.", "prefix.layers.0.").replace("prefix.", PREFIX, 1)
            ]
        if name in ("d2t", "t2d") and config.projections != "shared":
            continue
        value = value.to(dtype) if dtype and value.is_floating_point() else value
        tensors |= {given: value.clone() for given in names}  # safetensors take no memory twice
    save_tensors(tensors, folder / f"{kind}_lm_head.safetensors")
    raw = {f"{kind}_num_heads": config.num_heads, f"{kind}_num_layers": config.num_layers}
    if config.path:
        raw |= {"hydra_head_arch": "prefix-mlp" if config.path == "layer" else "mlp"}
        raw |= {"grounded_heads": True, "hidden_state_offset": 0}
    else:
        raw["version"] = "2"
    raw |= {"rope_theta": config.layer.rope_theta} if config.layer else {}
    raw |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    raw |= {"draft_vocab_size": config.draft_vocab_size} if config.projections == "shared" else {}
    runs.write_json(folder / "config.json", {**raw, **fields})
    return folder


def load_heads(folder: Path, target: Target):
    """The drafter in `folder`, bound to a target."""
    network = read_heads(folder, target)
    return (HydraDrafter if network.config.path else MedusaDrafter)(network, target)
