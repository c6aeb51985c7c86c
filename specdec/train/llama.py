"""The training forward of a transformers Llama: the same weights and numbers in fewer passes over memory.

transformers' own forward is written for every case; for a small model on a CPU most of its time goes into element-wise
kernels and attention's backward. Here a layer is one function, compiled once and reused for all layers, and attention
runs over blocks of queries that skip the future. Equality with transformers is a test.
Knows nothing about data, optimisers or checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_QUERY_BLOCK = 128  # queries per attention block; keys after its end are never touched


def document_bias(document: torch.Tensor) -> torch.Tensor:
    """Additive mask [B, 1, S, S] float32: 0 where a token may look (same document, not later), else -inf."""
    length = document.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    allowed = (document[:, :, None] == document[:, None, :]) & earlier  # padding rows see padding: no NaN
    return torch.zeros(allowed.shape, device=document.device).masked_fill_(~allowed, float("-inf"))[:, None]


def rope_tables(config, length: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [S, head_dim / 2] float32 of plain rotary embeddings."""
    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _normed(hidden, weight, eps, dtype):
    """RMSNorm in float32, its result in `dtype`."""
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)


def _rotated(states, cos, sin):
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attention(query, key, value, bias):
    """softmax(q k' / sqrt(d) + bias) v in blocks of queries; [B, heads, S, d] each, bias [B, 1, S, S]."""
    length, pieces = query.shape[2], []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        scores = (query[:, :, begin:end] @ key[:, :, :end].transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        weights = torch.softmax(scores + bias[:, :, begin:end, :end], dim=-1).to(value.dtype)
        pieces.append(weights @ value[:, :, :end])
    return torch.cat(pieces, dim=2)


def decoder_layer(hidden, norm_in, qkv, out, norm_mid, gate_up, down, cos, sin, bias, heads: int, eps: float):
    """One Llama layer. hidden [B, S, H] float32; matrices in the compute dtype; returns hidden [B, S, H] float32."""
    batch, length, width = hidden.shape
    states = F.linear(_normed(hidden, norm_in, eps, qkv.dtype), qkv)
    query, key, value = states.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = _attention(_rotated(query, cos, sin), _rotated(key, cos, sin), value, bias)
    hidden = hidden + F.linear(mixed.transpose(1, 2).reshape(batch, length, width), out).float()
    gate, up = F.linear(_normed(hidden, norm_mid, eps, gate_up.dtype), gate_up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, down).float()


def weighted_loss(hidden, norm, head, labels, weights, eps: float):
    """Sum of weights * cross-entropy over the sum of weights. hidden [B, S, H]; labels, weights [B, S]."""
    logits = F.linear(_normed(hidden, norm, eps, head.dtype), head).float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1.0)


class TrainingForward:
    """loss(ids, document, weights) of a LlamaForCausalLM without grouped-query attention or biases.

    dtype: the matrices' compute type (bfloat16 where the machine multiplies it faster); the residual stream, norms,
    softmax and loss stay float32. compiled: whether one layer and the loss go through torch.compile.
    """

    def __init__(self, model, dtype: torch.dtype = torch.float32, compiled: bool = False):
        assert model.config.num_key_value_heads == model.config.num_attention_heads, "no grouped-query attention here"
        self.model, self.dtype = model, dtype
        self.layer, self.loss_function = decoder_layer, weighted_loss
        if compiled:
            self.layer = torch.compile(decoder_layer, dynamic=False)
            self.loss_function = torch.compile(weighted_loss, dynamic=False)

    def hidden(self, ids: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        """Last layer's output before the final norm [B, S, H] float32; ids, document [B, S] int64."""
        config, decoder = self.model.config, self.model.model
        cos, sin = (table.to(self.dtype) for table in rope_tables(config, ids.shape[1], ids.device))
        bias, hidden = document_bias(document), F.embedding(ids, decoder.embed_tokens.weight)
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)).to(self.dtype)
            gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).to(self.dtype)
            out, down = attention.o_proj.weight.to(self.dtype), mlp.down_proj.weight.to(self.dtype)
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            hidden = self.layer(
                hidden, norms[0], qkv, out, norms[1], gate_up, down, cos, sin, bias,
                config.num_attention_heads, config.rms_norm_eps,
            )  # fmt: skip
        return hidden

    def loss(self, ids: torch.Tensor, document: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted next-token loss. ids, document [B, S] int64; weights [B, S]: how much predicting ids[b, s] counts.

        The first token of a document is never predicted, whatever its weight.
        """
        labels = torch.roll(ids, -1, dims=1)
        inside = torch.zeros_like(weights)
        inside[:, :-1] = weights[:, 1:] * (document[:, 1:] == document[:, :-1])
        hidden, eps = self.hidden(ids, document), self.model.config.rms_norm_eps
        head = self.model.lm_head.weight.to(self.dtype)
        return self.loss_function(hidden, self.model.model.norm.weight, head, labels, inside, eps)
