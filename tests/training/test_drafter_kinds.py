"""Drafters of every kind: GRIFFIN's alignment by hand; nothing leaks; each is made, taught, decodes
losslessly, learns online.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of
from fakes.pairs import random_drafter, random_pair, random_target, shared_bigrams, spread

import specdec
from specdec.core.decode import autoregress, decode
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.tree import StaticShape
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit
from specdec.models.eagle_network import EagleConfig
from specdec.models.heads import HeadsConfig, HydraDrafter, HydraNetwork
from specdec.models.load import load_drafter
from specdec.models.small_lm import SmallLM
from specdec.models.target import Target
from specdec.training.drafter.accuracy import draft_accuracy
from specdec.training.drafter.eagle3 import OnlineConfig, OnlineDrafter, train_drafter
from specdec.training.drafter.networks import load_network, new_network
from specdec.training.drafter.objective import FrozenTarget, TokenBatch
from specdec.training.drafter.presets import OBJECTIVES, Settings, objective_named
from specdec.training.drafter.ttt import (
    LossRules,
    Supervised,
    Teacher,
    TrainingTimeTest,
    stepped_loss,
    unroll,
)

SETTINGS = Settings(100, steps=30, batch=2, length=48, warmup_steps=2, learning_rate=0.02, passes=1)
CHAIN = Static(4, 2, 1)
CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
OWN = (
    "block",
    "eagle1",
    "griffin",
    "medusa",
    "hydra",
    "hydra++",
    "lm",
)  # objectives that make a network of their own


def test_token_alignment_by_hand():
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    counted = torch.full((7, 8), 1 / 8)
    teacher = Teacher(
        counted, counted.argmax(-1), torch.arange(7)[None], torch.tensor([7, 6, 5]), 0.0
    )
    best = (
        torch.tensor([[7, 1, 1], [5, 1, 1], [6, 7, 5]]),
        torch.tensor([[1, 2, 6], [1, 6, 2], [1, 1, 1]]),
    )
    states = torch.zeros(3, 1, 3, 8)  # the first and the second, by step and slot
    for logit, tokens in zip((2.0, 1.0), best, strict=True):
        states.scatter_(-1, tokens[:, None, :, None], logit)
    network = SimpleNamespace(
        head=lambda hidden, step: hidden, d2t=torch.zeros(8, dtype=torch.long)
    )
    wanted = {
        0: [3, 3, 3],
        1: [3, 1, 1],
        2: [3, 2, 1],
        8: [3, 3, 3],
    }  # 2: slot 2 lives for a step, then loses 7
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
    """A random one, over a part of the vocabulary."""
    counts = np.arange(model.config.vocab_size) % 50
    network = new_network(model, SETTINGS, counts, 0, OBJECTIVES[name].network)
    spread(network, 5)
    return network


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_a_slot_knows_nothing_of_what_follows(scene, name):
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
    assert all(
        torch.equal(new, old) for new, old in zip(logits(features=moved), before, strict=True)
    )
    moved[:, slot] += 3.0
    assert name == "lm" or not torch.allclose(logits(features=moved)[0], before[0])
    for step in range(
        {"medusa": 0, "block": 1}.get(name, steps)
    ):  # heads read no tokens, blocks only the root
        read = batch.ids.clone()
        read[:, slot + step + 1] = (read[:, slot + step + 1] + 1) % 100
        assert not torch.allclose(logits(read)[step], before[step])


@pytest.mark.parametrize(
    ("name", "layers"), [("eagle3", 1), ("block", 2), *((name, 1) for name in OWN)]
)
def test_one_is_made_taught_and_decodes(tmp_path, name, layers):
    (model, tokenizer), objective = (
        chat_target(),
        OBJECTIVES.get(name, TrainingTimeTest(LossRules(3))),
    )
    settings = replace(SETTINGS, layers=layers)
    folder = train_drafter(
        (model, tokenizer), CHATS, out_dir=tmp_path, objective=objective, settings=settings
    )
    losses = curve_of(tmp_path)["loss"]
    assert losses.tail(5).mean() < losses.head(5).mean()
    pair = specdec.load_pair(target=model, drafter=folder, tokenizer=tokenizer)
    cycles, texts = 0, []
    for chat in CHATS[:3]:
        prompt = pair.ids_of(chat[:1])
        decoded = decode(pair, prompt, policy=CHAIN, max_new_tokens=24)
        cycles += len(decoded.cycles)
        ids = torch.tensor([prompt + list(decoded.tokens)])
        texts.append(TokenBatch(ids, (torch.arange(ids.shape[1]) >= len(prompt))[None]))
    # In double precision: where the drafter likes two tokens alike, float32 rounds them apart in
    # its own way on each processor.
    network, target = load_network(folder, model).double(), copy.deepcopy(model).double()
    measured = draft_accuracy(network, FrozenTarget(target, network.config.taps), texts, drafts=3)
    assert measured["cycles"] == cycles
    prompts = [pair.ids_of(chat[:1]) for chat in CHATS[:2]]
    policies = {"tree": Static(10, 2, 3)}
    if name != "lm":
        policies["static"] = specdec.Static.of(StaticShape([(0,), (1,), (0, 0), (0, 1)]))
    found = audit(pair, prompts, policies, max_new_tokens=16, progress=False)
    # two prompts at two temperatures, in float32: every token agrees
    assert found.passed and len(found.rows) == 4 * len(policies)


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


def test_it_learns_every_few_cycles_from_the_newest_tokens_and_what_was_served_takes_fewer_cycles(
    monkeypatch,
):
    pair = random_pair(seed=3)
    settings = dict(max_new_tokens=40, stop_tokens=())
    cold = len(decode(pair, [1, 2, 3], CHAIN, **settings).rows)
    online = OnlineDrafter(pair, config=OnlineConfig(every=1, learning_rate=0.01))
    for _ in range(2):
        online.decode([1, 2, 3], CHAIN, **settings)
    assert (
        len(decode(pair, [1, 2, 3], CHAIN, **settings).rows) < 0.7 * cold
    )  # by the weights that now draft
    for pair in (random_pair(drafter_fields={"hidden": 16}), shared_bigrams()):
        pytest.raises(SpecdecError, OnlineDrafter, pair).match("only EAGLE's layers")
    never = OnlineConfig(every=0)
    pytest.raises(SpecdecError, OnlineDrafter, random_pair(), config=never).match("every must be")
    online = OnlineDrafter(
        random_pair(seed=3), config=OnlineConfig(every=2, longest=6, learning_rate=0.5)
    )
    assert online.run.settings == Settings(muon=False, learning_rate=0.5) and online.held_out == ()
    assert online.run.objective == objective_named("osd")
    steps = []

    def step(number, factor):
        steps.append((number, factor, online.batch(number)))
        return {"loss": number}

    monkeypatch.setattr(online.run, "step", step)
    assert online.learn(list(range(10, 14)), 3) == {"loss": 0} and online.learn(
        list(range(10, 20)), 6
    ) == {"loss": 1}
    (_, factor, short), (number, _, newest) = steps
    assert (factor, number, online.steps) == (1.0, 1, 2)
    assert (
        short.ids.tolist() == [[10, 11, 12, 13]]
        and short.loss_mask.tolist() == [[0, 0, 0, 1]]
        and short.step == 0
    )
    assert newest.ids.tolist() == [[14, 15, 16, 17, 18, 19]] and newest.loss_mask.tolist() == [
        [0, 0, 1, 1, 1, 1]
    ]
    assert newest.documents.tolist() == [[0] * 6] and newest.step == 1
    online = OnlineDrafter(random_pair(seed=3), config=OnlineConfig(every=3))
    learned = []
    monkeypatch.setattr(
        online, "learn", lambda ids, prompt_tok: learned.append((list(ids), prompt_tok))
    )
    said = online.decode([1, 2, 3], CHAIN, max_new_tokens=20, stop_tokens=())
    lengths, written = [], 1  # the prompt itself gave the first
    for number, row in enumerate(said.rows, 1):
        written += row.new_tok
        if number % 3 == 0:
            lengths.append(min(written, 20))
    assert [len(ids) - 3 for ids, _ in learned] == lengths and {
        prompt for _, prompt in learned
    } == {3}
    assert all(ids == [1, 2, 3, *said.tokens][: len(ids)] for ids, _ in learned)
    assert said.prompt_tok == 3 and said.text == online.pair.text_of(said.tokens)
    target = Target(random_target(24, seed=3))
    heads = OnlineDrafter(Pair(target, OTHERS["hydra++"](target), name="heads"))
    assert heads.run.objective == Supervised(LossRules(3), labels="soft", errors_only=True)
    small = OnlineDrafter(Pair(target, OTHERS["lm"](target), name="lm"))
    assert small.run.objective.rules == LossRules(4) and small.run.target.taps == (
        target.num_layers,
    )
    own = Supervised(LossRules(2))
    assert OnlineDrafter(random_pair(), own).run.objective is own


LAYER = EagleConfig(32, 32, 4, 2, 24, 24, 32, generation=1, num_taps=1, taps=(8,))
HEADS = HeadsConfig(32, 24, 24, num_heads=3, taps=(8,), path="layer", layer=LAYER)
OTHERS = {
    "hydra++": lambda target: HydraDrafter(HydraNetwork(HEADS), target),
    "griffin": lambda target: random_drafter(target, generation=1, num_taps=1, griffin=True),
    "lm": lambda target: SmallLM(random_target(24, hidden=16, layers=1, seed=8), target),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_drafters_learn_where_they_were_corrected(name):
    target = Target(random_target(24, seed=3))
    pair = Pair(target, OTHERS[name](target), name=name)
    settings = dict(max_new_tokens=40, stop_tokens=())
    wanted, cold = (
        autoregress(pair, [1, 2, 3], **settings).tokens,
        decode(pair, [1, 2, 3], CHAIN, **settings),
    )
    online = OnlineDrafter(pair, config=OnlineConfig(every=1, learning_rate=0.01))
    assert all(online.decode([1, 2, 3], CHAIN, **settings).tokens == wanted for _ in range(2))
    assert len(decode(pair, [1, 2, 3], CHAIN, **settings).rows) < 0.8 * len(cold.rows)


def kind(name: str, steps: int, *marks, levels: int = 8, reached: float = 0.9, **settings):
    """levels: of the chain, where the drafter has no end of its own. reached: of the tokens per
    cycle that they allow.
    """
    return pytest.param(name, steps, levels, reached, settings, id=f"{name}-{levels}", marks=marks)


@pytest.mark.parametrize(
    ("name", "steps", "levels", "reached", "settings"),
    [
        kind("eagle3", 60, levels=4),
        kind("block", 60),
        kind("medusa", 40),
        kind("hydra", 40),
        kind("eagle3", 100, pytest.mark.nightly),
        kind("eagle1", 800, pytest.mark.nightly, learning_rate=0.01),
        kind("griffin", 300, pytest.mark.nightly, learning_rate=0.01),
        kind(
            "hass", 200, pytest.mark.nightly, reached=4 / 9
        ),  # taught three drafts, and the target's own follows
        kind("hydra++", 60, pytest.mark.nightly),
        kind("lm", 600, pytest.mark.nightly, learning_rate=0.01),
    ],
)
def test_one_answer_is_learned_by_heart(tiny, tmp_path, name, steps, levels, reached, settings):
    answer = autoregress(tiny, CHAT, max_new_tokens=28)
    chat = [*CHAT, {"role": "assistant", "content": answer.text}]
    objective = OBJECTIVES.get(name, TrainingTimeTest(LossRules(levels)))
    settings = Settings(
        **{"steps": steps, "batch": 1, "length": 48, "warmup_steps": 10, **settings}
    )
    model = tiny.target.model, tiny.tokenizer
    folder = train_drafter(model, [chat], out_dir=tmp_path, objective=objective, settings=settings)
    drafter = load_drafter(folder, tiny.target)
    levels = levels if drafter.deepest is None else drafter.deepest + 1
    chain = Static(levels + 1, levels - 1, 1)
    out = decode(replace(tiny, drafter=drafter), CHAT, chain, max_new_tokens=1 + 3 * (levels + 1))
    assert (
        out.tokens == answer.tokens[: out.new_tok]
        and reached * (levels + 1) <= out.tau <= levels + 1
    )
