"""A drafter's norm and attention written out, for references: no cache, no tree, no packing."""

import torch


def rms(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(network, x):
    """Causal attention over rows x, positions from 0. [T, 2H] -> [T, heads * D]."""
    config, own = network.config, network.midlayer.self_attn
    count, width = len(x), config.head_dim
    q, k, v = (
        (x @ part.weight.T + (part.bias if config.attention_bias else 0)).view(count, -1, width)
        for part in (own.q_proj, own.k_proj, own.v_proj)
    )
    if config.query_key_norm:
        q, k = rms(q, own.q_norm.weight), rms(k, own.k_norm.weight)
    inverse = config.rope_theta ** (-torch.arange(0, width, 2) / width)
    turn = torch.polar(torch.ones(count, 1, width // 2), (torch.arange(count)[:, None] * inverse)[:, None])

    def rotated(heads):  # pairs (i, i + D / 2) as complex numbers
        pairs = torch.complex(*heads.chunk(2, -1)) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    groups = config.num_attention_heads // config.num_key_value_heads
    q, k, v = rotated(q), rotated(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / width**0.5
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
