"""PPOW and its kin: by hand, windows against the engine, gradients, a toy problem, trainings."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of, weights_of
from fakes.pairs import spread
from fakes.refusals import refusal

from specdec import runs
from specdec.models.eagle_drafter import EagleDrafter
from specdec.models.eagle_files import save_drafter
from specdec.models.eagle_network import EagleConfig, EagleNetwork
from specdec.models.target import Target
from specdec.training.drafter import eagle3
from specdec.training.drafter import ppow as ppow_module
from specdec.training.drafter.objective import FrozenTarget, TokenBatch
from specdec.training.drafter.ppow import Ppow, Windows, divergence, group_advantages, roll_out
from specdec.training.drafter.presets import (
    OBJECTIVES,
    Budget,
    Continued,
    Settings,
    objective_named,
)
from specdec.training.drafter.ttt import LossRules, Supervised, draft_vocabulary, teach
from specdec.training.loop import Best

TAPS = (2, 3, 4)


def log(*values):
    return torch.tensor(values, dtype=torch.float64).log()


def test_advantages_and_clipped_gains_by_hand():
    result = group_advantages(torch.tensor([[1.0, 3.0, 0.0, 0.0, 0.0, 4.0]]).double(), 2, 1.0)
    # groups (1, 3), (0, 0), (0, 4): means 2, 0, 2; deviations 1, 0, 2; delta 1
    assert result[0].tolist() == pytest.approx([-0.5, 0.5, 0.0, 0.0, -2 / 3, 2 / 3])
    # 0.893 eight times has a mean that differs from it in float32
    assert not group_advantages(torch.full((1, 24), 0.893), 8, 1e-6).any()
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0]).log()
    gain = ppow_module.clipped_gain(ratio, torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0]), 0.2)
    assert gain.tolist() == pytest.approx([1.2, -1.5, 0.5, -0.8, 2.0])


def test_criticality_and_window_places_by_hand():
    # P = (1/2, 1/2, 0, 0): C = 1 - 1/2; over the draft vocabulary {0, 2} P is (1, 0)
    columns = torch.tensor([0, 2])
    result = ppow_module.criticality(log(0.5, 0.5, 0.0, 0.0)[None], log(0.25, 0.75)[None], columns)
    assert float(result) == pytest.approx(0.5 * math.log(4))
    sure, flat = log(1.0, 0.0, 0.0, 0.0), log(0.25, 0.25, 0.25, 0.25)
    values = ppow_module.criticality(sure, flat, torch.arange(4))
    assert float(values) == pytest.approx(math.log(4))
    values = ppow_module.criticality(flat, sure.clamp(min=-9), torch.arange(4))
    assert float(values) == pytest.approx(0.0, abs=1e-12)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1]])
    # a window of 2 at slot i needs answers at i + 1 .. i + 3, of one document
    for documents, begins in ((None, [1, 2, 6]), (torch.tensor([[0] * 5 + [1] * 5]), [1, 6])):
        batch = TokenBatch(torch.zeros_like(mask), mask, documents)
        assert ppow_module.window_starts(batch, 2)[0].nonzero().flatten().tolist() == begins


def test_rewards_and_divergences_by_hand():
    measured = Ppow(window=2, reward="measured", speedups=(0.5, 1.0, 3.0))
    for config, accepted, reward in (
        (Ppow(), 3.0, 3 / 1.36),  # k / (k gamma + 1)
        (Ppow(), 10.0, 10 / 2.2),
        (measured, 0.0, 0.5),
        (measured, 2.0, 3.0),
        (Ppow(reward="none"), 3.0, 0.0),
    ):
        assert float(config._speed_reward(torch.tensor(accepted))) == pytest.approx(reward)
    p, q = log(0.5, 0.25), log(0.25, 0.75)
    expected = {
        "reverse_kl": 0.25 * math.log(0.5) + 0.75 * math.log(3),
        "forward_kl": 2 / 3 * math.log(8 / 3) + 1 / 3 * math.log(4 / 9),
    }
    for name, value in expected.items():
        assert float(divergence(name, q, p)) == pytest.approx(value), name


def test_measures_of_windows_by_hand():
    usable = torch.tensor([[True, True], [True, False]])
    rewards = torch.tensor([[1.0, 1.0, 2.0, 4.0], [3.0, 3.0, 9.0, 9.0]])
    accepted = torch.tensor([[1.0, 0.0, 2.0, 3.0], [0.0, 0.0, 9.0, 9.0]])
    windows = Windows(None, None, None, None, None, accepted, rewards, usable, None)
    near = torch.tensor([[False, True, False, False], [True, False, True, True]])
    expected = dict(reward=14 / 6, accepted_tok=1.0, proximity_frac=2 / 6)
    expected |= dict(epsilon=2.0, zero_variance_frac=2 / 3)
    assert Ppow(group=2)._measures(windows, near) == pytest.approx(expected)


def chat_network(model, dtype=torch.float32, kept=48) -> EagleNetwork:
    """A random drafter for `chat_target`, over a part of its vocabulary."""
    torch.manual_seed(5)
    vocabulary = model.config.vocab_size
    network = EagleNetwork(EagleConfig(32, 48, 2, 1, vocabulary, kept, 32, taps=TAPS))
    spread(network, 5)
    d2t, t2d = draft_vocabulary(torch.randint(0, 50, (vocabulary,)), kept)
    network.d2t.copy_(d2t)
    network.t2d.copy_(t2d)
    return network.to(dtype)


def chat_batch(model, rows=2, length=24):
    """Rows of two packed texts; all of it but a few tokens of prompt are answers."""
    torch.manual_seed(6)
    ids = torch.randint(3, model.config.vocab_size, (rows, length))
    documents = torch.tensor([[0] * 9 + [1] * (length - 9)] * rows)
    mask = torch.ones_like(ids)
    mask[:, :2] = mask[:, 9:11] = 0
    return TokenBatch(ids, mask, documents)


@pytest.fixture(scope="module")
def scene():
    model, _ = chat_target()
    target, batch = FrozenTarget(model, TAPS), chat_batch(model)
    return model, chat_network(model), target, replace(batch, output=target(batch))


def drafted_from(network, target, batch, slots, window=4):
    greedy = lambda logits: logits.argmax(-1)  # noqa: E731
    return roll_out(network, target.embedding, batch, slots, window, greedy)


def text_before(batch, row: int, slot: int):
    """What a window at this slot follows: the tokens of its document."""
    return batch.ids[row, 0 if batch.documents[row, slot] == 0 else 9 : slot + 2]


def test_windows_are_what_the_engine_drafts(scene):
    model, network, target, batch = scene
    slots = torch.tensor([[1, 4, 6, 12, 18], [2, 3, 9, 10, 17]])
    drafted, _ = drafted_from(network, target, batch, slots)
    drafter = EagleDrafter(chat_network(model), Target(model, TAPS))
    for row, slot in itertools.product(range(2), range(5)):
        ids, session = text_before(batch, row, int(slots[row, slot])), drafter.session(32, 8)
        with drafter.target.inference(), torch.inference_mode():
            features = drafter.target.forward(ids, drafter.target.new_cache(32)).features
            tokens, _ = session.root(ids[1:], features[:-1], 1)
            chain = [int(tokens.flatten()[0])]
            while len(chain) < 4:
                tokens, _ = session.expand(torch.tensor(chain[-1:]), torch.tensor([0]), 1)
                chain.append(int(tokens.flatten()[0]))
        assert drafted[row, slot].tolist() == chain


def test_the_target_verifies_windows_as_if_each_stood_alone_and_greedy_ones_are_its_own(scene):
    model, _, target, batch = scene
    slots = torch.tensor([[1, 4, 4, 12], [9, 17, 3, 3]])
    torch.manual_seed(1)
    drafted = torch.randint(3, 60, (2, 4, 3))
    logits, caches = target.continued(batch, slots, drafted)
    for row, window in itertools.product(range(2), range(4)):
        ids = torch.cat((text_before(batch, row, int(slots[row, window])), drafted[row, window]))
        with torch.no_grad():
            alone = model(ids[None]).logits[0, -4:-1]
        torch.testing.assert_close(logits[row, window], alone, rtol=1e-4, atol=1e-4)
    shorter, _ = target.continued(batch, slots, drafted[..., :1])
    torch.testing.assert_close(shorter, logits[:, :, :1])
    # the same with the target's own greedy windows, where they are needed
    needed = torch.tensor([[True, True, False, True], [False, True, True, True]])
    tokens, along = target.greedy(batch, slots, logits, caches, needed)
    assert not tokens[1, 0].any() and not along[1, 0].any()
    torch.testing.assert_close(along.argmax(-1), tokens)
    again, _ = target.continued(batch, slots, tokens)
    torch.testing.assert_close(again[needed], along[needed], rtol=1e-4, atol=1e-4)


def test_proximity_is_paid_by_the_distance_to_the_targets_own_window(scene):
    _, network, target, batch = scene
    near = {}
    for epsilon in (-1e9, 8.0, 1e9):
        config = Ppow(window=3, group=4, eta=0.25, epsilon=epsilon, places_per_row=3)
        windows, measures = config.collect(network, target, batch).collected
        near[epsilon] = windows.rewards - config._speed_reward(windows.accepted)
        paid = float((near[epsilon] > 0).float().mean())
        assert measures["proximity_frac"] == pytest.approx(paid)
    none = windows.accepted == 0
    assert none.any() and not near[-1e9].any() and torch.equal(near[1e9], 0.25 * none)
    # the distance anew, from the windows of the last one
    logits, caches = target.continued(batch, windows.slots, windows.drafted)
    tokens, along = target.greedy(batch, windows.slots, logits, caches, none | ~none)
    best = ppow_module.token_log_probs(along, tokens).sum(-1)
    drafted = ppow_module.token_log_probs(logits, windows.drafted).sum(-1)
    assert torch.equal(near[8.0], 0.25 * (none & (best - drafted < 8.0)))
    # a first token that the target likes more than the drafter is never rejected
    of_target = windows.log_p[..., 0, :].gather(-1, windows.columns[..., :1])[..., 0]
    assert not (none & (of_target >= windows.log_q[..., 0])).any()


def test_epsilon_is_measured_so_that_a_fifth_is_paid(scene):
    model, _, target, batch = scene
    network = chat_network(model)
    batches = [replace(batch, step=step) for step in range(6)]
    shape = dict(window=3, group=4, places_per_row=8, epsilon=None)
    objective = Ppow(**shape).prepare(network, target, iter(batches))
    rows = [objective.collect(network, target, item).collected for item in batches]
    none = torch.cat([windows.accepted == 0 for windows, _ in rows])
    near = torch.cat([windows.gap < objective.epsilon for windows, _ in rows]) & none
    assert float(near.sum() / none.sum()) == pytest.approx(0.2, abs=0.02)
    # a run that goes on measures the same
    assert objective == Ppow(**shape).prepare(network, target, iter(batches))
    for fixed in (Ppow(), Ppow(**shape, eta=0.0), Ppow(**shape, reward="none")):
        assert fixed.prepare(network, target, iter(batches)) is fixed


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_the_gradient_is_that_of_the_loss(name):
    model, _ = chat_target()
    network = chat_network(model, torch.float64)
    target = FrozenTarget(model, TAPS, torch.float64)
    config = Ppow(3, 3, 2, divergence=name, beta=0.3, clip=0.05, hard_from=0.5)
    batch = config.collect(network, target, chat_batch(model))
    torch.manual_seed(0)
    windows, measures = batch.collected
    windows = replace(windows, rewards=torch.rand_like(windows.rewards))
    batch = replace(batch, collected=(windows, measures))
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.02 * torch.randn_like(weight)
    config.prepare(network, target, ())
    loss, _ = config(network, target, batch)
    attention = network.midlayer.self_attn
    weights = [network.fc.weight, attention.k_proj.weight, network.lm_head.weight]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        direction = torch.randn_like(weight)
        values = []
        for move in (1e-6, -2e-6):
            weight.data.add_(direction, alpha=move)
            values.append(float(config(network, target, batch)[0].detach()))
        weight.data.add_(direction, alpha=1e-6)
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-8)


def test_windows_follow_from_seed_and_step_and_equal_rewards_leave_the_divergence(scene):
    _, network, target, batch = scene
    config = Ppow(window=3, group=2, places_per_row=5)
    collected = config.collect(network, target, batch)
    windows, measures = collected.collected
    assert windows.drafted.shape == (2, 10, 3)
    assert network.t2d[windows.drafted].all()
    again, _ = config.collect(network, target, batch).collected
    assert torch.equal(windows.drafted, again.drafted)
    assert torch.equal(windows.rewards, again.rewards)
    other, _ = config.collect(network, target, replace(batch, step=1)).collected
    assert not torch.equal(windows.drafted, other.drafted)
    flat = replace(windows, rewards=torch.full_like(windows.rewards, 0.893))
    loss, row = config(network, target, replace(collected, collected=(flat, measures)))
    assert float(loss.detach()) == pytest.approx(config.beta * row["kl"], rel=1e-5)


def test_tokens_behind_a_rejected_one_are_left_out(scene):
    _, network, target, batch = scene
    config = Ppow(window=4, group=4, eta=0.0, beta=0.0)
    batch = config.collect(network, target, batch)
    windows, measures = batch.collected
    torch.manual_seed(0)
    accepted = torch.randint(0, 5, windows.accepted.shape)
    windows = replace(windows, accepted=accepted, rewards=torch.rand(accepted.shape))
    batch = replace(batch, collected=(windows, measures))
    advantages = group_advantages(windows.rewards, 4, config.delta)[..., None]
    masks = {True: torch.ones(4), False: torch.arange(4) <= accepted[..., None]}
    for after, mask in masks.items():
        loss, _ = replace(config, after_rejection=after)(network, target, batch)
        expected = -float((advantages * mask).sum(-1).mean() / 4)
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)


def test_greedy_verification_accepts_the_target_s_own_choices(scene):
    _, network, target, batch = scene
    config = Ppow(window=3, group=4, places_per_row=8, verify="greedy", eta=0.0)
    windows, _ = config.collect(network, target, batch).collected
    logits, _ = target.continued(batch, windows.slots, windows.drafted)
    matches = (logits.argmax(-1) == windows.drafted).long()
    assert torch.equal(windows.accepted, matches.cumprod(-1).sum(-1).float())
    assert 0 < float(windows.accepted.mean()) < 3


def test_places_follow_the_curriculum_and_the_scores(scene, monkeypatch):
    _, network, target, batch = scene
    shares = {"gradual": [0.2, 0.5, 0.74, 0.8, 0.8], "switched": [0.2, 0.2, 0.2, 0.8, 0.8]}
    for curriculum, expected in shares.items():
        config = Ppow(window=3, curriculum_steps=10, curriculum=curriculum)
        result = []
        for step in (0, 5, 9, 10, 99):
            collected = config.collect(network, target, replace(batch, step=step)).collected
            result.append(collected[1]["hard_frac"])
        assert result == pytest.approx(expected)
    scores, correct = torch.zeros(2, 24), torch.ones(2, 24, dtype=torch.bool)
    scores[:, 14] = 1.0
    correct[:, 16] = False
    monkeypatch.setattr(ppow_module, "divergence_along", lambda *given: (scores, correct))
    config = Ppow(window=3, places_per_row=32, hard_from=1.0, hard_to=1.0, eta=0.0)
    for places, begins in (("adaptive", [12, 13, 14]), ("errors", [16])):
        windows, _ = replace(config, places=places).collect(network, target, batch).collected
        assert windows.slots.unique().tolist() == begins


def test_hass_weighs_the_likeliest_tokens_and_cuts_the_gradient(scene):
    _, network, target, batch = scene
    rules = LossRules(2, 1.0)
    teacher = teach(network, batch.output, batch, rules)
    hass = Supervised(rules, soft_weight=0.1, top_k=3, top_weight=1.0, detach=True)
    probs, row = hass._labels(network, teacher, batch)
    best = teacher.probs.topk(3).indices
    torch.testing.assert_close(probs.gather(1, best), 1.1 * teacher.probs.gather(1, best))
    assert float(probs.sum()) < 1.1 * len(teacher.probs) and torch.equal(row, teacher.row)
    losses = [item(network, target, batch)[0] for item in (hass, replace(hass, detach=False))]
    cut, joined = (torch.autograd.grad(loss, network.fc.weight)[0] for loss in losses)
    assert torch.allclose(*losses) and not torch.allclose(cut, joined)


SETTINGS = Continued(
    48,
    steps=6,
    passes=3,
    batch=2,
    length=48,
    held_out=2,
    held_out_frac=0.4,
    measure_every=2,
    learning_rate=0.003,
)
OF_EAGLE3 = [name for name in OBJECTIVES if OBJECTIVES[name].network == "eagle3"]
OF_EAGLE3.remove("ppow-paper")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A drafter that has learned a little."""
    settings = Settings(48, steps=30, batch=2, length=48, warmup_steps=2, learning_rate=0.01)
    options = dict(objective=Supervised(LossRules(3)), settings=settings)
    out_dir = tmp_path_factory.mktemp("first")
    return eagle3.train_drafter(chat_target(), CHATS, out_dir=out_dir, **options)


def continued(out_dir, objective, start_from, settings=SETTINGS, **options):
    options |= dict(objective=objective, settings=settings, start_from=start_from, budget=Budget())
    return eagle3.train_drafter(chat_target(), CHATS, out_dir=out_dir, **options)


def test_the_best_weights_are_written(first, tmp_path, monkeypatch):
    scores = []
    consider = Best.consider

    def noted(self, weights, score, step):
        scores.append(score)
        consider(self, weights, score, step)

    monkeypatch.setattr(Best, "consider", noted)
    ruinous = replace(SETTINGS, learning_rate=1.0, steps=8)
    continued(tmp_path, OBJECTIVES["cst-hard"], first, ruinous)
    taus = curve_of(tmp_path)["held_out_tau_chain"].dropna()
    assert scores[:-1] == taus.tolist(), "the last weights are measured behind the last step"
    plan = runs.read_json(tmp_path / "drafter_training" / "plan.json")
    assert plan["results"]["held_out_tau_chain"] == pytest.approx(max(scores))
    assert max(scores) > scores[-1]


@pytest.mark.parametrize("name", OF_EAGLE3)
def test_every_objective_moves_a_trained_drafter(first, tmp_path, name):
    changes = {}
    if isinstance(OBJECTIVES[name], Ppow):
        changes = {"window": min(3, OBJECTIVES[name].window), "places_per_row": 4}
    settings = replace(SETTINGS, steps=2, held_out=0)
    folder = continued(tmp_path, objective_named(name, changes), first, settings)
    assert not torch.equal(weights_of(first)["fc.weight"], weights_of(folder)["fc.weight"])
    assert np.isfinite(curve_of(tmp_path)["loss"]).all()


def test_bad_requests_get_one_sentence(first, tmp_path):
    assert "did you mean 'ppow'" in refusal(objective_named, "ppo")
    assert "did you mean 'beta'" in refusal(objective_named, "ppow", {"betta": 1})
    config = EagleConfig(32, 48, 2, 1, len(chat_target()[1]), 48, 64, taps=TAPS)
    wide = save_drafter(EagleNetwork(config), tmp_path / "wide")
    for objective, start, words in (
        (Ppow(window=60), first, "a window of 60 tokens does not fit"),
        (Ppow(), wide, "states of 64 numbers"),
        (Supervised(network="medusa"), first, "of kind 'eagle3', not 'medusa'"),
    ):
        assert words in refusal(continued, tmp_path / "new", objective, start, resume=False)
