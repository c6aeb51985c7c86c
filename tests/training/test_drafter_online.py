"""A drafter that learns while it serves: the text stays the target's, and what it saw before it drafts better."""

import pytest
import torch
from fakes.pairs import bigram_pair, random_pair

from specdec.core.decode import autoregress, decode
from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.training.drafter.online import OnlineConfig, OnlineDrafter

CHAIN = Static(4, 2, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_while_weights_change(temperature):
    pair = random_pair(seed=3)
    before = [weight.clone() for weight in pair.drafter.network.parameters()]
    online = OnlineDrafter(pair, config=OnlineConfig(every=2, learning_rate=0.01))
    settings = dict(max_new_tokens=40, temperature=temperature, seed=5, stop_tokens=())
    said = online.decode([1, 2, 3], CHAIN, **settings)
    assert said.tokens == autoregress(pair, [1, 2, 3], **settings).tokens
    assert online.steps == len(said.rows) // 2 > 5 and said.finish_reason == "length"
    after = list(pair.drafter.network.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_was_served_before_takes_fewer_cycles():
    pair = random_pair(seed=3)
    settings = dict(max_new_tokens=60, stop_tokens=())
    cold = len(decode(pair, [1, 2, 3], CHAIN, **settings).rows)
    online = OnlineDrafter(pair, config=OnlineConfig(every=1, learning_rate=0.01))
    for _ in range(3):
        online.decode([1, 2, 3], CHAIN, **settings)
    assert len(decode(pair, [1, 2, 3], CHAIN, **settings).rows) < 0.7 * cold  # by the weights that now draft


def test_drafters_that_cannot_learn_are_refused():
    with pytest.raises(SpecdecError, match="only an EAGLE-3 drafter"):
        OnlineDrafter(random_pair(drafter_fields={"hidden": 16}))
    with pytest.raises(SpecdecError, match="only an EAGLE-3 drafter"):
        OnlineDrafter(bigram_pair())
    with pytest.raises(SpecdecError, match="every must be at least 1"):
        OnlineDrafter(random_pair(), config=OnlineConfig(every=0))
