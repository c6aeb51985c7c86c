"""A drafter that learns while it serves: the text stays the target's, and what it saw before it drafts better."""

import pytest
import torch
from fakes.pairs import random_drafter, random_pair, random_target, shared_bigrams

from specdec.core.decode import autoregress, decode
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.models.eagle.network import EagleConfig
from specdec.models.heads import HeadsConfig, HydraDrafter, HydraNetwork
from specdec.models.small_lm import SmallLM
from specdec.models.target import Target
from specdec.training.drafter.eagle3 import OnlineConfig, OnlineDrafter
from specdec.training.drafter.presets import Settings, objective_named
from specdec.training.drafter.supervised import Supervised
from specdec.training.drafter.ttt import LossRules

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


def test_what_was_served_before_takes_fewer_cycles_and_what_cannot_learn_is_refused():
    pair = random_pair(seed=3)
    settings = dict(max_new_tokens=40, stop_tokens=())
    cold = len(decode(pair, [1, 2, 3], CHAIN, **settings).rows)
    online = OnlineDrafter(pair, config=OnlineConfig(every=1, learning_rate=0.01))
    for _ in range(2):
        online.decode([1, 2, 3], CHAIN, **settings)
    assert len(decode(pair, [1, 2, 3], CHAIN, **settings).rows) < 0.7 * cold  # by the weights that now draft
    for pair in (random_pair(drafter_fields={"hidden": 16}), shared_bigrams()):
        pytest.raises(SpecdecError, OnlineDrafter, pair).match("only EAGLE's layers")
    never = OnlineConfig(every=0)
    pytest.raises(SpecdecError, OnlineDrafter, random_pair(), config=never).match("every must be at least 1, got 0")


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
    settings = dict(max_new_tokens=40, stop_tokens=())
    wanted, cold = autoregress(pair, [1, 2, 3], **settings).tokens, decode(pair, [1, 2, 3], CHAIN, **settings)
    online = OnlineDrafter(pair, config=OnlineConfig(every=1, learning_rate=0.01))
    assert all(online.decode([1, 2, 3], CHAIN, **settings).tokens == wanted for _ in range(2))
    assert len(decode(pair, [1, 2, 3], CHAIN, **settings).rows) < 0.8 * len(cold.rows)


def test_it_learns_every_few_cycles_from_the_newest_tokens_and_heads_their_steps(monkeypatch):
    online = OnlineDrafter(random_pair(seed=3), config=OnlineConfig(every=2, longest=6, learning_rate=0.5))
    assert online.run.settings == Settings(muon=False, learning_rate=0.5) and online.begins == ()
    assert online.run.objective == objective_named("osd")
    steps = []

    def step(number, factor):
        steps.append((number, factor, online.batch(number)))
        return {"loss": number}

    monkeypatch.setattr(online.run, "step", step)
    assert online.learn(list(range(10, 14)), 3) == {"loss": 0} and online.learn(list(range(10, 20)), 6) == {"loss": 1}
    (_, factor, short), (number, _, newest) = steps
    assert (factor, number, online.steps) == (1.0, 1, 2)
    assert short.ids.tolist() == [[10, 11, 12, 13]] and short.loss_mask.tolist() == [[0, 0, 0, 1]] and short.step == 0
    assert newest.ids.tolist() == [[14, 15, 16, 17, 18, 19]] and newest.loss_mask.tolist() == [[0, 0, 1, 1, 1, 1]]
    assert newest.documents.tolist() == [[0] * 6] and newest.step == 1
    online = OnlineDrafter(random_pair(seed=3), config=OnlineConfig(every=3))
    learned = []
    monkeypatch.setattr(online, "learn", lambda ids, prompt_tok: learned.append((list(ids), prompt_tok)))
    said = online.decode([1, 2, 3], CHAIN, max_new_tokens=20, stop_tokens=())
    lengths, written = [], 1  # the prompt itself gave the first
    for number, row in enumerate(said.rows, 1):
        written += row.new_tok
        if number % 3 == 0:
            lengths.append(min(written, 20))
    assert [len(ids) - 3 for ids, _ in learned] == lengths and {prompt for _, prompt in learned} == {3}
    assert all(ids == [1, 2, 3, *said.tokens][: len(ids)] for ids, _ in learned)
    assert said.prompt_tok == 3 and said.text == online.pair.text_of(said.tokens)
    target = Target(random_target(24, seed=3))
    heads = OnlineDrafter(Pair(target, OTHERS["hydra++"](target), name="heads"))
    assert heads.run.objective == Supervised(LossRules(3), labels="soft", errors_only=True)
    small = OnlineDrafter(Pair(target, OTHERS["lm"](target), name="lm"))
    assert small.run.objective.rules == LossRules(4) and small.run.target.taps == (target.num_layers,)
    own = Supervised(LossRules(2))
    assert OnlineDrafter(random_pair(), own).run.objective is own
