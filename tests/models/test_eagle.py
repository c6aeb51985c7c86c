"""EAGLE drafting against its equations written out: no cache, no tree, no packing, one path at a time."""

import pytest
import torch
from fakes.pairs import random_network, random_target
from fakes.reference import assert_drafted
from fakes.slow_layer import attention, rms

from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.models.eagle.drafter import EagleDrafter
from specdec.models.eagle.network import EagleConfig
from specdec.models.target import Target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
VOCAB, WIDTH = 24, 32
LAYER = dict(intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
READINGS = {
    "official": {},
    "narrow, own embedding": dict(hidden_size=16, own_embedding=True),
    "reduced vocabulary": dict(draft_vocab_size=10),
    "speculators' residual": dict(norm_before_residual=True),
    "normed output fed back": dict(norm_output=True),
    "a norm per tap": dict(fc_norm="each"),
    "one norm over all taps": dict(fc_norm="joint"),
    "biases": dict(attention_bias=True, fc_bias=True),
    "query and key norms": dict(query_key_norm=True),
    "another rope base": dict(rope_theta=300.0),
    "wide heads": dict(head_dim=16),
    "other taps": dict(taps=(1, 3, 7)),
    "eagle-1": dict(generation=1, num_taps=1, fc_bias=True),
    "eagle-1, reduced vocabulary": dict(generation=1, num_taps=1, fc_bias=True, draft_vocab_size=10),
    "griffin": dict(generation=1, num_taps=1, fc_bias=True, griffin=True),
}


def joined(network, features):
    """Target features to states: fc over the taps side by side, normed first where the reading says so."""
    config, fc = network.config, network.fc
    if config.generation != 3:
        return features
    if config.fc_norm == "each":
        taps = features.split(config.target_hidden_size, -1)
        features = torch.cat([rms(tap, norm.weight) for tap, norm in zip(taps, network.fc_norm, strict=True)], -1)
    if config.fc_norm == "joint":
        features = rms(features, network.input_norm.weight)
    return features @ fc.weight.T + (fc.bias if config.fc_bias else 0)


def layer_input(network, embedded, states):
    """What attention reads, and the stream it is added to."""
    config, layer, fc = network.config, network.midlayer, network.fc
    if config.griffin:
        mixed = torch.cat((embedded, states), -1) @ fc.fc.weight.T + fc.fc.bias
        gate = rms(rms(mixed, fc.post_attention_layernorm.weight), fc.mlp.input_layernorm.weight)
        gate = torch.cat((gate, rms(embedded, fc.mlp.input_layernorm.weight)), -1) @ fc.mlp.up_proj.weight.T
        mixed = mixed + torch.nn.functional.silu(gate) @ fc.mlp.down_proj.weight.T
        return mixed, mixed
    if config.generation != 3:
        mixed = torch.cat((embedded, states), -1) @ fc.weight.T + fc.bias
        return mixed, mixed
    normed = rms(states, layer.hidden_norm.weight)
    x = torch.cat((rms(embedded, layer.input_layernorm.weight), normed), -1)
    return x, normed if config.norm_before_residual else states


def slow_children(drafter, ids, features, path):
    """Log-probabilities [Vd] after `path` (drafted tokens below the root): every row again for every drafted token.

    ids int64 [T] up to the root, features [T - 1, F] of all tokens before it. (EAGLE-3 section 3.1, figure 5.)
    """
    network, layer = drafter.network, drafter.network.midlayer
    embedding = network.embed_tokens if network.config.own_embedding else drafter.target.model.get_input_embeddings()
    states, tokens = joined(network, features), ids[1:]
    for token in [*path, None]:
        x, stream = layer_input(network, embedding.weight[tokens], states)
        stream = stream + attention(network, x) @ layer.self_attn.o_proj.weight.T
        x, mlp = rms(stream, layer.post_attention_layernorm.weight), layer.mlp
        gate = torch.nn.functional.silu(x @ mlp.gate_proj.weight.T)
        added = (gate * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
        last = (stream + added[:, :WIDTH])[-1:] if network.config.griffin else (stream + added)[-1:]
        spoken, last = last, (stream + added[:, WIDTH:])[-1:] if network.config.griffin else last
        if token is not None:
            tokens = torch.cat((tokens, torch.tensor([token])))
            states = torch.cat((states, rms(last, network.norm.weight) if network.config.norm_output else last))
    if network.config.generation != 3:
        logits = drafter.target.model.lm_head(spoken)[0]
        return (logits if drafter.target_id is None else logits[drafter.target_id]).log_softmax(-1)
    return (rms(last, network.norm.weight) @ network.lm_head.weight.T)[0].log_softmax(-1)


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
@torch.inference_mode()
def test_drafted_trees_equal_the_slow_way(reading):
    target = Target(random_target(VOCAB, hidden=WIDTH, seed=3))
    sizes = dict(hidden_size=WIDTH, draft_vocab_size=VOCAB) | reading
    config = EagleConfig(**sizes, **LAYER, vocab_size=VOCAB, target_hidden_size=WIDTH)
    drafter = EagleDrafter(random_network(config, seed=5), target)
    target.taps = drafter.taps
    if drafter.target_id is not None:
        assert drafter.target_id.tolist() == list(range(3, 23, 2))

    def slow(ids):
        hidden = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[tap][0, :-1] for tap in drafter.taps], -1)
        return lambda path: slow_children(drafter, torch.tensor(ids), features, path)

    # At least two cycles: the second reads what the first left in the cache.
    assert_drafted(Pair(target, drafter), PROMPT, Static(36, 2, 4), slow, range(18, 30))
