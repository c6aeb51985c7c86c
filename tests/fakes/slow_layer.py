"""EAGLE's layers written out, for references: no cache, no tree, no packing."""

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def rms(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def attention(network, x):
    """Causal attention over rows x, positions from 0. [T, 2H] -> [T, heads * D]."""
    config = network.config
    layer = network.midlayer.self_attn
    count, width = len(x), config.head_dim
    q, k, v = (
        part(x).view(1, count, -1, width) for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    inverse = config.rope_theta ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(count), torch.cat((inverse, inverse)))[None]
    q, k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2)
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).flatten(2)[0]


def joined(network, features):
    """Target features to states: fc over the taps side by side, normed first where they should."""
    config, fc = network.config, network.fc
    if config.generation != 3:
        return features
    if config.fc_norm == "each":
        taps = features.split(config.target_hidden_size, -1)
        normed = [rms(tap, norm.weight) for tap, norm in zip(taps, network.fc_norm, strict=True)]
        features = torch.cat(normed, -1)
    return features @ fc.weight.T + (fc.bias if config.fc_bias else 0)


def layer_input(network, embedded, states):
    """What attention reads, and the stream it is added to."""
    config, layer, fc = network.config, network.midlayer, network.fc
    pair = torch.cat((embedded, states), -1)
    if config.griffin:
        mixed = pair @ fc.fc.weight.T + fc.fc.bias
        norm = fc.mlp.input_layernorm.weight
        gate = rms(rms(mixed, fc.post_attention_layernorm.weight), norm)
        gate = torch.cat((gate, rms(embedded, norm)), -1) @ fc.mlp.up_proj.weight.T
        mixed = mixed + F.silu(gate) @ fc.mlp.down_proj.weight.T
        return mixed, mixed
    if config.generation != 3:
        mixed = pair @ fc.weight.T + fc.bias
        return mixed, mixed
    normed = rms(states, layer.hidden_norm.weight)
    return torch.cat((rms(embedded, layer.input_layernorm.weight), normed), -1), states


def layer_output(network, embedded, states):
    """What the layer makes of causal rows: the stream, and what its MLP adds."""
    layer = network.midlayer
    x, stream = layer_input(network, embedded, states)
    stream = stream + attention(network, x) @ layer.self_attn.o_proj.weight.T
    return stream, mlp_output(layer, stream)


def mlp_output(layer, stream):
    x, mlp = rms(stream, layer.post_attention_layernorm.weight), layer.mlp
    gate = F.silu(x @ mlp.gate_proj.weight.T)
    return (gate * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T


def slow_block(drafter, ids, features):
    """Log-probabilities [B, Vd] of the positions after the root: all rows of text and block."""
    network, count = drafter.network, drafter.config.block - 1
    masked = joined(network, network.mask_hidden[0]).expand(count, -1)
    states = torch.cat((joined(network, features), masked))
    tokens = torch.cat((ids[1:], torch.full((count,), drafter.config.mask_token)))
    embedded = drafter.target.model.get_input_embeddings().weight[tokens]
    rows = sum(layer_output(network, embedded, states))
    return (rms(rows[-count - 1 :], network.norm.weight) @ network.lm_head.weight.T).log_softmax(-1)


def slow_children(drafter, ids, features, path):
    """Log-probabilities [Vd] after `path` (drafted tokens below the root): every row again for
    every drafted token.

    ids int64 [T] up to the root, features [T - 1, F] of all tokens before it. (EAGLE-3 section 3.1,
    figure 5.)
    """
    network, width = drafter.network, drafter.config.hidden_size
    embedding = drafter.target.model.get_input_embeddings()
    if network.config.own_embedding:
        embedding = network.embed_tokens
    states, tokens = joined(network, features), ids[1:]
    for token in [*path, None]:
        stream, added = layer_output(network, embedding.weight[tokens], states)
        # GRIFFIN's head reads the first half of what the MLP adds, the second is fed back
        spoken = (stream + added[:, :width])[-1:]
        last = (stream + added[:, -width:])[-1:]
        if token is not None:
            tokens = torch.cat((tokens, torch.tensor([token])))
            states = torch.cat((states, last))
    if network.config.generation != 3:
        logits = drafter.target.model.lm_head(spoken)[0]
        return (logits if drafter.target_id is None else logits[drafter.target_id]).log_softmax(-1)
    return (rms(spoken, network.norm.weight) @ network.lm_head.weight.T)[0].log_softmax(-1)
