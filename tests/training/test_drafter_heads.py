"""Drafters other than EAGLE-3: GRIFFIN's token alignment by hand, nothing leaks, each is made, taught and decodes losslessly."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of
from fakes.pairs import spread

import specdec
from specdec.evaluation.lossless import audit
from specdec.training.drafter.accuracy import draft_accuracy, static_tree
from specdec.training.drafter.eagle3 import train_drafter
from specdec.training.drafter.networks import load_network, new_network
from specdec.training.drafter.objective import FrozenTarget, TokenBatch
from specdec.training.drafter.presets import OBJECTIVES, Settings
from specdec.training.drafter.ttt import LossRules, Teacher, stepped_loss, unroll

SETTINGS = Settings(100, steps=30, batch=2, length=48, warmup_steps=2, learning_rate=0.02, passes=1)
KINDS = ("block", "eagle1", "griffin", "medusa", "hydra", "hydra++", "lm")  # of networks of their own


def test_token_alignment_by_hand():
    """Slots 0, 1, 2 of the text 5 6 7 5 6 7 5 are taught tokens 7 5 6; only who drafted the text's token goes on."""
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    counted = torch.full((7, 8), 1 / 8)
    teacher = Teacher(counted, counted.argmax(-1), torch.arange(7)[None], torch.tensor([7, 6, 5]), 0.0)
    best = torch.tensor([[7, 1, 1], [5, 1, 1], [6, 7, 5]]), torch.tensor([[1, 2, 6], [1, 6, 2], [1, 1, 1]])
    states = torch.zeros(3, 1, 3, 8)  # the first and the second, by step and slot
    for logit, tokens in zip((2.0, 1.0), best, strict=True):
        states.scatter_(-1, tokens[:, None, :, None], logit)
    network = SimpleNamespace(head=lambda hidden, step: hidden, d2t=torch.zeros(8, dtype=torch.long))
    wanted = {0: [3, 3, 3], 1: [3, 1, 1], 2: [3, 2, 1], 8: [3, 3, 3]}  # 2: slot 2 lives for a step, then loses 7
    for top, tokens in wanted.items():
        given = TokenBatch(ids), teacher, LossRules(3, 1.0, aligned_top=top), torch.arange(3)[None]
        loss = stepped_loss(network, *given, iter(states), lambda drafted, _: drafted.sum())
        assert loss.counted_tok.tolist() == tokens, top


@pytest.fixture(scope="module")
def scene():
    model, _ = chat_target()
    torch.manual_seed(6)
    ids = torch.randint(3, model.config.vocab_size, (1, 20))
    batch = TokenBatch(ids, torch.ones_like(ids), torch.zeros_like(ids))
    target = FrozenTarget(model, (model.config.num_hidden_layers,))
    return model, target, batch, target(batch).features


def network_of_kind(model, name):
    """A random one, over a part of the vocabulary, that says different things in different places."""
    counts = np.arange(model.config.vocab_size) % 50
    network = new_network(model, SETTINGS, counts, 0, OBJECTIVES[name].network)
    spread(network, 5)
    return network


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_slot_knows_nothing_of_what_follows(scene, name):
    """At step s slot i reads features up to i and tokens up to i + s + 1; what comes later changes nothing, what it reads does."""
    model, target, batch, features = scene
    network, steps, slot = network_of_kind(model, name), 3, 8
    if name == "block":  # three taps
        target = FrozenTarget(model, network.config.taps)
        features = target(batch).features

    def logits(ids=batch.ids, features=features):
        states = unroll(network, target.embedding, features, replace(batch, ids=ids), steps)
        return [network.head(hidden)[0, slot] for hidden in states]

    before = logits()
    for step in range(steps):
        later = batch.ids.clone()
        later[:, slot + step + 2 :] = 7
        torch.testing.assert_close(logits(later)[step], before[step], rtol=0, atol=0)
    moved = features.clone()
    moved[:, slot + 1 :] += 3.0
    assert all(torch.equal(new, old) for new, old in zip(logits(features=moved), before, strict=True))
    moved[:, slot] += 3.0
    assert name == "lm" or not torch.allclose(logits(features=moved)[0], before[0])
    for step in range({"medusa": 0, "block": 1}.get(name, steps)):  # heads read no tokens, blocks only the root
        read = batch.ids.clone()
        read[:, slot + step + 1] = (read[:, slot + step + 1] + 1) % 100
        assert not torch.allclose(logits(read)[step], before[step])


@pytest.mark.parametrize("name", KINDS)
def test_one_is_made_taught_and_decodes(tmp_path, name):
    """The loss falls; the same chain is measured in training and decoded; no tree or policy changes the text."""
    model, tokenizer = chat_target()
    folder = train_drafter((model, tokenizer), CHATS, out_dir=tmp_path, objective=OBJECTIVES[name], settings=SETTINGS)
    losses = curve_of(tmp_path)["loss"]
    assert losses.tail(5).mean() < losses.head(5).mean()
    pair = specdec.load_pair(target=model, drafter=folder, tokenizer=tokenizer)
    cycles, texts = 0, []
    for chat in CHATS[:3]:
        prompt = pair.ids_of(chat[:1])
        decoded = specdec.decode(pair, prompt, policy=specdec.Static(4, 2, 1), max_new_tokens=24)
        cycles += len(decoded.cycles)
        ids = torch.tensor([prompt + list(decoded.tokens)])
        texts.append(TokenBatch(ids, (torch.arange(ids.shape[1]) >= len(prompt))[None]))
    network = load_network(folder, model)
    measured = draft_accuracy(network, FrozenTarget(model, network.config.taps), texts, drafts=3)
    assert measured["cycles"] == cycles
    prompts = [pair.ids_of(chat[:1]) for chat in CHATS[:2]]
    policies = {"tree": specdec.Static(10, 2, 3)}
    if name != "lm":
        shape = static_tree(pair, prompts, 6, depth=3, max_new_tokens=12)
        assert shape.verify_nodes == 6 and (0,) in shape.choices and shape.depth <= 2
        policies["static"] = specdec.Static.of(shape)
    found = audit(pair, prompts, policies, max_new_tokens=16, progress=False)
    # two prompts at two temperatures, in float32: every token agrees
    assert found.passed and len(found.rows) == 4 * len(policies)
