"""EAGLE drafting against its equations written out: no cache, no tree, no packing, one path at a time."""

from dataclasses import replace

import pytest
import torch
from fakes.pairs import random_network, random_target
from fakes.reference import assert_drafted
from fakes.slow_layer import slow_children

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


@torch.inference_mode()
def test_a_head_that_was_replaced_is_the_drafters_too():
    target = Target(random_target(VOCAB, hidden=WIDTH, layers=2))
    config = EagleConfig(WIDTH, **LAYER, vocab_size=VOCAB, draft_vocab_size=VOCAB, target_hidden_size=WIDTH)
    drafter = EagleDrafter(random_network(replace(config, generation=1, num_taps=1)), target)
    target.model.lm_head = torch.nn.Linear(WIDTH, VOCAB)
    target.refresh()
    drafter.refresh()
    states = torch.randn(3, WIDTH)
    assert torch.equal(drafter.head(states), target.model.lm_head(states))
