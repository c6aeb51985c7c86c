"""The networks of EAGLE-1, 2, 3, GRIFFIN and block drafters, with the weights' official names.

Decoding (`eagle_drafter`) and training (`training/drafter`) call the same functions, so the
equations exist once (EAGLE-3 section 3; EAGLE-1 section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import RMSNorm

from specdec.errors import SpecdecError
from specdec.models.target import setting


@dataclass(frozen=True)
class EagleConfig:
    """Shape and interpretation of a drafter. Every field that fails silently when wrong is here."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0  # the drafter's own base, never the target's
    # 3 for EAGLE-3 (three taps, own head), 1 for EAGLE-1/2 (last state, target's head)
    generation: int = 3
    num_taps: int = 3
    # indices into `hidden_states` (2: the *input* of layer 2); None: 2, L // 2, L - 3
    taps: tuple[int, ...] | None = None
    attention_bias: bool = False
    fc_norm: str | None = None  # "each": one norm per tap
    fc_bias: bool = False
    own_embedding: bool = False
    griffin: bool = False  # generation 1 with a gated fusion and a state of two streams
    block: int = 0  # positions that one pass drafts; 0: one position after the other
    mask_token: int = 0  # what the rows of a block read after its first

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def is_reduced(self) -> bool:
        """Whether some of the target's tokens can never be drafted."""
        return self.draft_vocab_size < self.vocab_size


def layer_like(config: Any, vocab_size: int, **fields: Any) -> EagleConfig:
    """The shape of a layer like the target's, from its transformers config, and other fields."""
    heads = config.num_attention_heads
    hidden = config.hidden_size
    shape = {
        "hidden_size": hidden,
        "intermediate_size": setting(config, "intermediate_size", 4 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": setting(config, "num_key_value_heads", heads),
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "target_hidden_size": hidden,
        "head_dim": setting(config, "head_dim") or 0,
        "rms_norm_eps": setting(config, "rms_norm_eps", 1e-5),
    }
    return EagleConfig(**(shape | fields))


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's three taps: the inputs of layers 2, L // 2 and L - 3 (section 3.1)."""
    if num_layers < 7:
        why = f"EAGLE-3 needs a target of at least 7 layers, not {num_layers}"
        raise SpecdecError(f"{why}; train eagle1, griffin, medusa, hydra or lm, or take suffix.")
    return 2, num_layers // 2, num_layers - 3


class Attention(nn.Module):
    """Projections of the layer's attention; EAGLE-3's reads [embedding; hidden], 2H wide."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        wide = config.hidden_size * (2 if config.generation == 3 else 1)
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(wide, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(wide, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(wide, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.fused: Callable[[Tensor], Tensor] | None = None  # one product, set by `packed.pack`

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., heads, D], keys and values [..., kv heads, D], before the rotation."""
        parts: Sequence[Tensor]
        if self.fused is None:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        else:
            keys = self.k_proj.out_features
            parts = torch.split(self.fused(x), [self.q_proj.out_features, keys, keys], dim=-1)
        q, k, v = (part.reshape(*x.shape[:-1], -1, self.config.head_dim) for part in parts)
        return q, k, v


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fused: Callable[[Tensor], Tensor] | None = None  # gate and up, set by `packed.pack`

    def forward(self, x: Tensor) -> Tensor:  # [..., H] -> [..., H]
        if self.fused is None:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        gate, up = self.fused(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """The drafter's layer, with the official names of its norms."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config)
        if config.generation == 3:
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class EagleNetwork(nn.Module):
    """Weights of one EAGLE drafter, with the official names (`midlayer.*`, `fc`, `lm_head`, ...).

    The pieces are called by their owner in this order, for N tokens with embeddings e [N, H]:

        h = fuse(features)                         [N, 3 * Ht] -> [N, H]   (EAGLE-3, section 3.1)
        x, residual = attention_input(e, h)        [N, 2H], [N, H]
        q, k, v = midlayer.self_attn.project(x)    [N, heads, D], [N, kv, D] twice
        ... rotary embedding and attention by the owner ...
        h = finish(attended, residual)             the recurrent state, before the final norm
        logits = head(h)                           [N, Vd]
    """

    fc: nn.Module
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        wide = 2 * config.hidden_size
        if config.generation == 3:
            wide = config.num_taps * config.target_hidden_size
        self.fc = nn.Linear(wide, config.hidden_size, bias=config.fc_bias)
        if config.fc_norm == "each":
            sizes = [config.target_hidden_size] * config.num_taps
            self.fc_norm = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for size in sizes)
        self.midlayer = DecoderLayer(config)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # of a drafter that has no head
        self.target_head: Callable[[Tensor], Tensor] | None = None
        if config.generation == 3:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.generation == 3 or config.is_reduced:
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.long)
            self.register_buffer("d2t", offsets)  # target_id = draft_id + d2t[draft_id]
            member = torch.arange(config.vocab_size) < config.draft_vocab_size
            self.register_buffer("t2d", member)  # which of the target's tokens can be drafted

    def fuse(self, features: Tensor) -> Tensor:
        """Target features to the drafter's state. [..., num_taps * Ht] -> [..., H]

        EAGLE-1/2's features pass unchanged.
        """
        config = self.config
        if config.generation != 3:
            return features
        if config.fc_norm == "each":
            parts = torch.split(features, config.target_hidden_size, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input, residual) from token embeddings and states, both [..., H]."""
        if self.config.generation != 3:
            # EAGLE-1/2: every step goes through fc and layer 0 has no input norm
            fused = self.fc(torch.cat((embedded, hidden), dim=-1))
            return fused, fused
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        return torch.cat((layer.input_layernorm(embedded), normed), dim=-1), hidden

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The recurrent state, *before* the final norm. [..., heads * D], [..., H] -> [..., H]"""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def head(self, hidden: Tensor, level: int = 0) -> Tensor:
        """Draft logits [..., Vd] of states, the same at every level."""
        if self.target_head is None:
            return self.lm_head(self.norm(hidden))
        return self.target_head(self.head_input(hidden))

    def head_input(self, hidden: Tensor) -> Tensor:
        """The part of a state that the target's head reads."""
        return hidden

    def use_head(self, head: Any) -> None:
        """Use the target's head (EAGLE-1/2) for the draft vocabulary; it is not saved."""
        weight = head.weight.detach()
        dtype = weight.dtype
        if not self.config.is_reduced:
            # the maps of a whole vocabulary: training reads them, files do not hold them
            member = torch.ones(self.config.vocab_size, dtype=torch.bool, device=weight.device)
            self.register_buffer("t2d", member, persistent=False)
            self.register_buffer("d2t", torch.zeros_like(member).long(), persistent=False)
            self.target_head = lambda hidden: head(hidden.to(dtype))
            return
        ids = vocabulary_ids(self).to(weight.device)
        rows = weight[ids]
        bias = None if head.bias is None else head.bias.detach()[ids]
        self.target_head = lambda hidden: F.linear(hidden.to(dtype), rows, bias)

    def feed_back(self, hidden: Tensor) -> Tensor:
        """The next draft step's input in place of target features. [..., H] -> [..., H]."""
        return hidden


def vocabulary_ids(network: Any) -> Tensor:
    """The target's id of every draft token, in the order of the head's columns. int64 [Vd]"""
    offsets: Tensor = network.d2t
    return torch.arange(len(offsets), device=offsets.device) + offsets


def best_tokens(
    logits: Tensor, top_k: int, target_id: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k best next tokens by logits [..., Vd]: target ids and log-probabilities, [..., k]."""
    vocabulary = logits.shape[-1]
    if top_k > vocabulary:
        raise SpecdecError(f"top_k={top_k} exceeds the draft vocabulary of {vocabulary} tokens.")
    log_probs, best = logits.log_softmax(-1).topk(top_k, dim=-1)
    return (best if target_id is None else target_id[best]), log_probs


def rotary_tables(
    head_dim: int, theta: float, length: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Tables [length, D] in float32 for `rotate`: cos, and sin with its first half negated."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    inverse = theta ** (-steps / head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    return torch.cat((angles, angles), -1).cos(), torch.cat((-angles.sin(), angles.sin()), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., D] in the half-split convention, computed in float32.

    cos, sin: of `rotary_tables`. Swapping the halves, with sin's sign, is `rotate_half`.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


# GRIFFIN (arXiv 2502.11018), with e the token's embedding and f the feature:
#
#     z = fc([e; f]);  z <- z + down(silu(up([n2(n1(z)); n2(e)])))
#     layer(z) = [predicted; regressed]    the head reads the first, the second is fed back
#
# The state's halves are a feature close to the target's and one that predicts the next token.


class FusionMLP(nn.Module):
    """down(silu(up([n(x); n(e)]))), one norm for both."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up_proj = nn.Linear(2 * config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:  # [..., H], [..., H] -> [..., H]
        both = torch.cat((self.input_layernorm(x), self.input_layernorm(embedded)), -1)
        return self.down_proj(F.silu(self.up_proj(both)))


class GatedFusion(nn.Module):
    """Token embeddings and features to the layer's input."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FusionMLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:  # [..., H], [..., H] -> [..., H]
        fused = self.fc(torch.cat((embedded, hidden), -1))
        return fused + self.mlp(self.post_attention_layernorm(fused), embedded)


class GriffinNetwork(EagleNetwork):
    """Weights of a GRIFFIN drafter; its states are [..., 2H]."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        self.fc = GatedFusion(config)
        sizes = (config.intermediate_size, 2 * config.hidden_size)
        self.midlayer.mlp.down_proj = nn.Linear(*sizes, bias=False)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(embedded, hidden)
        return fused, fused

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """-> [..., 2H]: both streams start equal."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended)
        return torch.cat((hidden, hidden), -1) + layer.mlp(layer.post_attention_layernorm(hidden))

    def head_input(self, hidden: Tensor) -> Tensor:
        return hidden[..., : self.config.hidden_size]

    def feed_back(self, hidden: Tensor) -> Tensor:
        return hidden[..., self.config.hidden_size :]


class BlockNetwork(EagleNetwork):
    """EAGLE-3's layer with rows for tokens that are not known yet: one pass drafts a block.

    After P-EAGLE (arXiv 2602.01469). The first row of a block is EAGLE-3's own; all others read the
    mask's token and `mask_hidden`. Each sees the text and earlier rows.
    """

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        wide = config.num_taps * config.target_hidden_size
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, wide))

    def masked(self, *shape: int) -> tuple[Tensor, Tensor]:
        """What the rows after the first read: tokens [*shape, B - 1], states [*shape, B - 1, H]."""
        hidden = self.fuse(self.mask_hidden)[0].expand(*shape, self.config.block - 1, -1)
        return torch.full(hidden.shape[:-1], self.config.mask_token, device=hidden.device), hidden


def network_of(config: EagleConfig) -> EagleNetwork:
    """A network of the kind in `config`, with initial weights."""
    if config.griffin:
        return GriffinNetwork(config)
    if config.block:
        return BlockNetwork(config)
    return EagleNetwork(config)
