"""Drafters of every kind: nothing leaks; each is taught, decodes losslessly and learns online."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of
from fakes.pairs import random_pair, shared_bigrams, spread
from fakes.refusals import refusal

import specdec
from specdec.core.decode import autoregress, decode
from specdec.core.policy import Static
from specdec.evaluation.lossless import audit
from specdec.training.drafter.eagle3 import (
    OnlineConfig,
    OnlineDrafter,
    draft_accuracy,
    load_network,
    new_network,
    train_drafter,
)
from specdec.training.drafter.objective import FrozenTarget, TokenBatch
from specdec.training.drafter.presets import OBJECTIVES, Settings
from specdec.training.drafter.ttt import LossRules, Supervised, unroll

SETTINGS = Settings(100, steps=30, batch=2, length=48, warmup_steps=2, learning_rate=0.02, passes=1)
CHAIN = Static(4, 2, 1)
CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
# objectives that train a network of their own kind
FRESH = ("block", "eagle1", "griffin", "medusa", "hydra", "lm")


@pytest.fixture(scope="module")
def scene():
    model, _ = chat_target()
    torch.manual_seed(6)
    ids = torch.randint(3, model.config.vocab_size, (1, 20))
    batch = TokenBatch(ids, torch.ones_like(ids), torch.zeros_like(ids))
    return model, batch


@pytest.mark.parametrize("name", FRESH)
@torch.no_grad()
def test_a_slot_knows_nothing_of_what_follows(scene, name):
    model, batch = scene
    counts = np.arange(model.config.vocab_size) % 50
    network = new_network(model, SETTINGS, counts, 0, OBJECTIVES[name].network)
    spread(network, 5)
    target = FrozenTarget(model, network.config.taps)
    features = target(batch).features
    steps, slot = 3, 8

    def logits(ids=batch.ids, features=features):
        states = unroll(network, target.embedding, features, replace(batch, ids=ids), steps)
        return [network.head(hidden)[0, slot] for hidden in states]

    before = logits()
    # 1. later tokens and features change nothing
    for step in range(steps):
        later = batch.ids.clone()
        later[:, slot + step + 2 :] = 7
        assert torch.equal(logits(later)[step], before[step])
    moved = features.clone()
    moved[:, slot + 1 :] += 3.0
    assert all(map(torch.equal, logits(features=moved), before))
    # 2. the newest ones matter; a language model reads no features
    moved[:, slot] += 3.0
    assert name == "lm" or not torch.allclose(logits(features=moved)[0], before[0])
    # heads read no tokens, blocks only the root
    for step in range({"medusa": 0, "block": 1}.get(name, steps)):
        read = batch.ids.clone()
        read[:, slot + step + 1] = (read[:, slot + step + 1] + 1) % 100
        assert not torch.allclose(logits(read)[step], before[step])


KINDS = ("eagle3", *FRESH)


@pytest.mark.parametrize("name", KINDS)
def test_a_drafter_is_taught_and_decodes(tmp_path, name):
    # 1. taught
    model, tokenizer = chat_target()
    objective = OBJECTIVES.get(name, Supervised(LossRules(3)))
    how = dict(objective=objective, settings=SETTINGS)
    folder = train_drafter((model, tokenizer), CHATS, out_dir=tmp_path, **how)
    losses = curve_of(tmp_path)["loss"]
    assert losses.tail(5).mean() < losses.head(5).mean()
    # 2. its cycles are those that its training forward foresees; in double precision, since
    # float32 rounds two equally likely tokens apart
    pair = specdec.load_pair(target=model, drafter=folder, tokenizer=tokenizer)
    prompts = [pair.ids_of(chat[:1]) for chat in CHATS[:3]]
    cycles, texts = 0, []
    for prompt in prompts:
        decoded = decode(pair, prompt, policy=CHAIN, max_new_tokens=24)
        cycles += len(decoded.cycles)
        ids = torch.tensor([prompt + list(decoded.tokens)])
        texts.append(TokenBatch(ids, (torch.arange(ids.shape[1]) >= len(prompt))[None]))
    network, target = load_network(folder, model).double(), copy.deepcopy(model).double()
    measured = draft_accuracy(network, FrozenTarget(target, network.config.taps), texts, drafts=3)
    assert measured["cycles"] == cycles
    # 3. the text is the target's own
    policies = {"tree": Static(10, 2, 3)}
    if name != "lm":
        shape = specdec.StaticShape([(0,), (1,), (0, 0), (0, 1)])
        policies["static"] = specdec.Static.of(shape)
    result = audit(pair, prompts[:2], policies, max_new_tokens=16, progress=False)
    assert result.passed and len(result.rows) == 4 * len(policies)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_while_weights_change(temperature):
    pair = random_pair(seed=3)
    before = [weight.clone() for weight in pair.drafter.network.parameters()]
    online = OnlineDrafter(pair, config=OnlineConfig(every=2, learning_rate=0.01))
    settings = dict(max_new_tokens=40, temperature=temperature, seed=5, stop_tokens=())
    out = online.decode([1, 2, 3], CHAIN, **settings)
    assert out.tokens == autoregress(pair, [1, 2, 3], **settings).tokens
    assert online.steps == len(out.rows) // 2 > 5 and out.finish_reason == "length"
    assert not all(map(torch.equal, before, pair.drafter.network.parameters()))


def test_a_step_reads_the_newest_tokens(monkeypatch):
    config = OnlineConfig(every=2, longest=6, learning_rate=0.5)
    online = OnlineDrafter(random_pair(seed=3), config=config)
    assert online.run.settings == Settings(muon=False, learning_rate=0.5)
    assert online.run.objective == OBJECTIVES["osd"]
    steps = []

    def step(number):
        steps.append((number, online.batch(number)))
        return {"loss": number}

    monkeypatch.setattr(online.run, "step", step)
    assert online.learn(list(range(10, 14)), 3) == {"loss": 0}
    assert online.learn(list(range(10, 20)), 6) == {"loss": 1}
    (_, short), (number, newest) = steps
    assert (number, online.steps) == (1, 2)
    assert short.ids.tolist() == [[10, 11, 12, 13]] and short.loss_mask.tolist() == [[0, 0, 0, 1]]
    assert newest.ids.tolist() == [[14, 15, 16, 17, 18, 19]] and newest.step == 1
    assert newest.loss_mask.tolist() == [[0, 0, 1, 1, 1, 1]]
    assert newest.documents.tolist() == [[0] * 6]


def test_it_learns_every_few_cycles_from_what_was_written(monkeypatch):
    online = OnlineDrafter(random_pair(seed=3), config=OnlineConfig(every=3))
    learned = []
    monkeypatch.setattr(online, "learn", lambda ids, prompt_tok: learned.append((ids, prompt_tok)))
    out = online.decode([1, 2, 3], CHAIN, max_new_tokens=20, stop_tokens=())
    # the prompt itself gave the first
    written = np.minimum(1 + np.cumsum([row.new_tok for row in out.rows]), 20)
    assert [len(ids) - 3 for ids, _ in learned] == written[2::3].tolist()
    for ids, prompt_tok in learned:
        assert ids == [1, 2, 3, *out.tokens][: len(ids)] and prompt_tok == 3
    assert out.prompt_tok == 3 and out.text == online.pair.text_of(out.tokens)


def test_what_cannot_learn_online_is_refused():
    griffin = dict(generation=1, num_taps=1, griffin=True)
    narrow = random_pair(drafter_fields={"hidden": 16})
    for pair in (narrow, random_pair(drafter_fields=griffin), shared_bigrams()):
        assert "only EAGLE-3 drafters" in refusal(OnlineDrafter, pair)
