"""A drafter that learns while it serves: the text stays the target's, and what it saw before it drafts better."""

import pytest
import torch
from fakes.pairs import bigram_pair, random_drafter, random_pair, random_target

from specdec.core.decode import autoregress, decode
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.models.eagle.network import EagleConfig
from specdec.models.hydra import HydraDrafter, HydraNetwork
from specdec.models.medusa import HeadsConfig
from specdec.models.small_lm import SmallLM
from specdec.models.target import Target
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


LAYER = EagleConfig(32, 32, 4, 2, 24, 24, 32, generation=1, num_taps=1, taps=(8,))
OTHERS = {
    "hydra++": lambda target: HydraDrafter(
        HydraNetwork(HeadsConfig(32, 24, 24, num_heads=3, taps=(8,), path="layer", layer=LAYER)), target
    ),
    "griffin": lambda target: random_drafter(target, generation=1, num_taps=1, griffin=True),
    "lm": lambda target: SmallLM(random_target(24, hidden=16, layers=1, seed=8), target),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_drafters_learn_where_they_were_corrected(name):
    target = Target(random_target(24, seed=3))
    pair = Pair(target, OTHERS[name](target), name=name)
    settings = dict(max_new_tokens=60, stop_tokens=())
    wanted, cold = autoregress(pair, [1, 2, 3], **settings).tokens, decode(pair, [1, 2, 3], CHAIN, **settings)
    online = OnlineDrafter(pair, config=OnlineConfig(every=1, learning_rate=0.01))
    assert all(online.decode([1, 2, 3], CHAIN, **settings).tokens == wanted for _ in range(2))
    assert len(decode(pair, [1, 2, 3], CHAIN, **settings).rows) < 0.8 * len(cold.rows)


def test_drafters_that_cannot_learn_are_refused():
    with pytest.raises(SpecdecError, match="only EAGLE's layers"):
        OnlineDrafter(random_pair(drafter_fields={"hidden": 16}))
    with pytest.raises(SpecdecError, match="only EAGLE's layers"):
        OnlineDrafter(bigram_pair())
    with pytest.raises(SpecdecError, match="every must be at least 1"):
        OnlineDrafter(random_pair(), config=OnlineConfig(every=0))
