"""PPOW and its kin: hand-computed cases, windows against the engine, a gradient check, a toy
problem, the trainer.
"""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of, same_weights, weights_of
from fakes.killed import killed_at
from fakes.pairs import spread

from specdec import runs
from specdec.errors import SpecdecError
from specdec.models.eagle_drafter import EagleDrafter
from specdec.models.eagle_files import save_drafter
from specdec.models.eagle_network import EagleConfig, EagleNetwork
from specdec.models.target import Target
from specdec.training.drafter import eagle3
from specdec.training.drafter import ppow as ppow_module
from specdec.training.drafter.objective import FrozenTarget, FullLogits, TargetOutput, TokenBatch
from specdec.training.drafter.ppow import (
    Ppow,
    Windows,
    divergence,
    greedy_windows,
    group_advantages,
    roll_out,
)
from specdec.training.drafter.presets import (
    OBJECTIVES,
    Budget,
    Continued,
    Settings,
    objective_named,
)
from specdec.training.drafter.ttt import (
    RULES,
    LossRules,
    Supervised,
    TrainingTimeTest,
    draft_vocabulary,
    teach,
)
from specdec.training.loop import Best

log = lambda *values: torch.tensor(values, dtype=torch.float64).log()  # noqa: E731


def test_windows_rewards_advantages_verification_and_divergences_by_hand():
    found = group_advantages(torch.tensor([[1.0, 3.0, 0.0, 0.0, 0.0, 4.0]]).double(), 2, 1.0)
    # groups (1, 3), (0, 0), (0, 4): means 2, 0, 2; deviations 1, 0, 2; delta 1
    assert found[0].tolist() == pytest.approx([-0.5, 0.5, 0.0, 0.0, -2 / 3, 2 / 3])
    # 0.893 eight times has a mean that differs from it in float32; delta must not blow that up
    assert not group_advantages(torch.full((1, 24), 0.893), 8, 1e-6).any()
    # P = (1/2, 1/2, 0, 0): H = ln 2, C = 1 - 1/2; over the draft vocabulary {0, 2} P is (1, 0), Q =
    # (1/4, 3/4)
    found = ppow_module.criticality(
        log(0.5, 0.5, 0.0, 0.0)[None], log(0.25, 0.75)[None], torch.tensor([0, 2])
    )
    assert float(found) == pytest.approx(0.5 * math.log(4))
    sure, flat = log(1.0, 0.0, 0.0, 0.0), log(0.25, 0.25, 0.25, 0.25)
    everything = torch.arange(4)
    assert float(ppow_module.criticality(sure, flat, everything)) == pytest.approx(math.log(4))
    assert float(ppow_module.criticality(flat, sure.clamp(min=-9), everything)) == pytest.approx(
        0.0, abs=1e-12
    )
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0]).log()
    gain, clipped = ppow_module.clipped_gain(ratio, torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0]), 0.2)
    assert gain.tolist() == pytest.approx([1.2, -1.5, 0.5, -0.8, 2.0])
    assert clipped.tolist() == [True, False, False, True, False]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1]])
    # a window of 2 at slot i needs answers at i + 1 .. i + 3; from slot 2 on it would straddle two
    # documents
    for documents, begins in ((None, [1, 2, 6]), (torch.tensor([[0] * 5 + [1] * 5]), [1, 6])):
        found = ppow_module.window_starts(TokenBatch(torch.zeros_like(mask), mask, documents), 2)[0]
        assert found.nonzero().flatten().tolist() == begins
    means = ppow_module.window_means(torch.tensor([[3.0, 0.0, 6.0, 9.0]]), 2)
    assert means.tolist() == [[1.5, 3.0, 7.5, 4.5]]
    for config, accepted, reward in (
        (Ppow(), 3.0, 3 / 1.36),  # k / (k gamma + 1)
        (Ppow(), 10.0, 10 / 2.2),
        (Ppow(reward="raw"), 3.0, 3.0),
        (Ppow(reward="ratio"), 3.0, 4 / 2.2),
        (Ppow(window=2, reward="measured", speedups=(0.5, 1.0, 3.0)), 1.5, 2.0),
        (Ppow(window=2, reward="measured", speedups=(0.5, 1.0, 3.0)), 2.0, 3.0),
        (Ppow(reward="none"), 3.0, 0.0),
    ):
        assert float(config._speed_reward(torch.tensor(accepted), 0.12)) == pytest.approx(reward)
    said = log(0.5, 0.3, 0.2).expand(1, 1, 3, 3)
    drafted = torch.tensor([[[0, 1, 0]]])
    log_p, log_q = log(0.5, 0.3, 0.5)[None, None], log(0.25, 0.6, 0.5)[None, None]
    expected = Ppow(verify="expected")._verify(said, drafted, log_p, log_q, None)
    assert (
        float(expected[0]) == pytest.approx(1 + 0.5 + 0.5) and float(expected[1]) == 0
    )  # alphas 1, 1/2, 1
    greedy = Ppow(verify="greedy")._verify(said, drafted, log_p, log_q, None)
    assert float(greedy[0]) == 1
    generator = torch.Generator().manual_seed(0)
    many = (part.expand(1, 4000, *part.shape[2:]) for part in (said, drafted, log_p, log_q))
    sampled = Ppow()._verify(*many, generator)[0]
    assert set(sampled.unique().tolist()) == {1.0, 3.0} and float(sampled.mean()) == pytest.approx(
        2.0, abs=0.05
    )
    p, q, columns = log(0.5, 0.25), log(0.25, 0.75), torch.tensor(1)
    value = {
        name: float(divergence(name, q, p, columns))
        for name in ("reverse_kl", "forward_kl", "tv", "jsd", "k3")
    }
    assert value["reverse_kl"] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(3))
    assert value["forward_kl"] == pytest.approx(2 / 3 * math.log(8 / 3) + 1 / 3 * math.log(4 / 9))
    assert value["tv"] == pytest.approx(1 - 0.25 - 0.25)
    # the middle of (0.5, 0.25, 0.25) and (0.25, 0.75, 0) is (0.375, 0.5, 0.125)
    terms = (0.25, 0.375), (0.75, 0.5), (0.5, 0.375), (0.25, 0.5), (0.25, 0.125)
    assert value["jsd"] == pytest.approx(
        sum(0.5 * chance * math.log(chance / middle) for chance, middle in terms)
    )
    assert value["k3"] == pytest.approx(1 / 3 - math.log(1 / 3) - 1)


TAPS = (2, 3, 4)


def chat_network(model, dtype=torch.float32, kept=48) -> EagleNetwork:
    """A random drafter for `chat_target`, over a part of its vocabulary, that says different things
    in different places.
    """
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
    network = chat_network(model)
    target, batch = FrozenTarget(model, TAPS), chat_batch(model)
    return model, network, target, replace(batch, output=target(batch))


def drafted_from(network, target, batch, slots, window=4):
    given = torch.full((*slots.shape, window), -1)
    return roll_out(
        network, target.embedding, batch, slots, given, lambda logits: logits.argmax(-1)
    )


def text_before(batch, row: int, slot: int):
    """What a window at this slot follows: the tokens of its document."""
    return batch.ids[row, 0 if batch.documents[row, slot] == 0 else 9 : slot + 2]


def test_windows_are_what_the_engine_drafts_and_know_nothing_of_what_follows(scene):
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
    slot, slots = (
        13,
        torch.tensor([[13], [13]]),
    )  # ids from i + 2 and features from i + 1 on are not known
    before = drafted_from(network, target, batch, slots)

    def with_changed(ids_from, features_from):
        ids, features = batch.ids.clone(), batch.output.features.clone()
        ids[:, ids_from:] = 7
        features[:, features_from:] += 3.0
        changed = replace(batch, ids=ids, output=TargetOutput(features, batch.output.logits))
        return drafted_from(network, target, changed, slots)

    after = with_changed(slot + 2, slot + 1)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert not torch.allclose(
        before[1], with_changed(slot + 1, slot + 1)[1]
    )  # the token it follows does matter
    assert not torch.allclose(
        before[1], with_changed(slot + 2, slot)[1]
    )  # and so does the feature before that


def test_the_target_verifies_windows_as_if_each_stood_alone_and_greedy_ones_are_its_own(scene):
    model, network, target, batch = scene
    slots = torch.tensor([[1, 4, 4, 12], [9, 17, 3, 3]])
    torch.manual_seed(1)
    drafted = torch.randint(3, 60, (2, 4, 3))
    says = target.continued(batch, slots, drafted)
    for row, window in itertools.product(range(2), range(4)):
        ids = torch.cat((text_before(batch, row, int(slots[row, window])), drafted[row, window]))
        with torch.no_grad():
            alone = model(ids[None]).logits[0, -4:-1]
        torch.testing.assert_close(says[row, window], alone, rtol=1e-4, atol=1e-4)
    one = target.continued(batch, slots, drafted[..., :1])
    torch.testing.assert_close(one, says[:, :, :1])
    slots, needed = torch.tensor([[1, 12], [3, 17]]), torch.ones(2, 2, dtype=torch.bool)
    needed[1, 0], caches = False, []
    said = target.continued(batch, slots, ppow_module.text_windows(batch, slots, 4), caches)
    own, logits = greedy_windows(target, batch, slots, said, caches, needed)
    assert not own[1, 0].any() and not logits[1, 0].any()  # nobody asked
    for row, window in needed.nonzero().tolist():
        ids = text_before(batch, row, int(slots[row, window]))
        with torch.no_grad():
            out = model.generate(ids[None], max_new_tokens=4, min_new_tokens=4, do_sample=False)
        wanted = out[0, len(ids) :]
        if 2 not in wanted.tolist():  # generate may not say the end of the text, a window may
            assert own[row, window].tolist() == wanted.tolist()
    torch.testing.assert_close(logits.argmax(-1), own)
    along = target.continued(batch, slots, own)  # what verifies these tokens is what chose them
    torch.testing.assert_close(along[needed], logits[needed], rtol=1e-4, atol=1e-4)


def test_proximity_is_paid_by_the_distance_to_the_targets_own_window_and_epsilon_is_measured(scene):
    model, network, target, batch = scene
    near = {}
    for epsilon in (-1e9, 8.0, 1e9):
        config = Ppow(window=3, group=4, eta=0.25, epsilon=epsilon, reward="raw", places_per_row=3)
        windows, measures = config.collect(network, target, batch).collected
        near[epsilon] = windows.rewards - windows.accepted
        assert measures["proximity_frac"] == pytest.approx(
            float((near[epsilon] > 0).float().mean())
        )
    none = windows.accepted == 0
    assert bool(none.any()) and not near[-1e9].any() and torch.equal(near[1e9], 0.25 * none)
    says = target.continued(batch, windows.slots, windows.drafted).log_softmax(-1)
    says = says.gather(-1, windows.drafted[..., None]).squeeze(-1).sum(-1)
    caches: list = []
    said = target.continued(batch, windows.slots, windows.drafted, caches)
    own, along = greedy_windows(target, batch, windows.slots, said, caches, none | ~none)
    best = along.log_softmax(-1).gather(-1, own[..., None]).squeeze(-1).sum(-1)
    assert torch.equal(near[8.0], 0.25 * (none & (best - says < 8.0)))
    batches = [replace(batch, step=step) for step in range(6)]
    shape = dict(window=3, group=4, places_per_row=8)
    paid = []
    for frac in (0.2, 0.5):
        asked = Ppow(**shape, epsilon=None, paid_frac=frac)
        objective = asked.measured(network, target, iter(batches))
        rows = [objective.collect(network, target, one).collected for one in batches]
        none = torch.cat([windows.accepted == 0 for windows, _ in rows])
        near = torch.cat([windows.gap < objective.epsilon for windows, _ in rows]) & none
        assert float(near.sum() / none.sum()) == pytest.approx(frac, abs=0.02)
        shares = [measures["paid_frac"] for _, measures in rows]
        assert (
            np.mean(shares) == pytest.approx(frac, abs=0.1)
            and rows[0][1]["epsilon"] == objective.epsilon > 0
        )
        paid.append(objective.epsilon)
        assert objective == asked.measured(network, target, iter(batches)), (
            "a run that goes on measures the same"
        )
    assert paid[0] < paid[1]
    for fixed in (
        Ppow(**shape),
        Ppow(**shape, epsilon=None, eta=0.0),
        Ppow(**shape, epsilon=None, reward="none"),
    ):
        assert fixed.measured(network, target, iter(batches)) is fixed
    assert objective_named("ppow").epsilon is None and objective_named("ppow-paper").epsilon == 2.0
    pytest.raises(
        AssertionError, Ppow(**shape, epsilon=None).collect, network, target, batch
    ).match("measured")


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jsd", "tv", "k3"])
def test_the_gradient_is_that_of_the_loss(name):
    model, _ = chat_target()
    network = chat_network(model, torch.float64)
    target = FrozenTarget(model, TAPS, torch.float64)
    config = Ppow(
        window=3, group=3, places_per_row=2, divergence=name, beta=0.3, clip=0.05, hard_from=0.5
    )
    batch = config.collect(network, target, chat_batch(model))
    torch.manual_seed(0)
    windows, measures = batch.collected
    batch = replace(
        batch, collected=(replace(windows, rewards=torch.rand_like(windows.rewards)), measures)
    )
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.02 * torch.randn_like(weight)
    config.prepare(network, target)
    loss, measures = config(network, target, batch)
    assert 0 < measures["clip_frac"] < 1
    weights = [
        network.fc.weight,
        network.midlayer.self_attn.k_proj.weight,
        network.lm_head.weight,
        network.norm.weight,
    ]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        direction = torch.randn_like(weight)
        values = []
        for move in (1e-6, -2e-6):
            weight.data.add_(direction, alpha=move)
            values.append(float(config(network, target, batch)[0].detach()))
        weight.data.add_(direction, alpha=1e-6)
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-8)


def test_a_constant_reward_leaves_the_divergence_and_windows_are_what_is_collected(scene):
    _, network, target, batch = scene
    config = Ppow(window=3, group=4, reward="raw", verify="greedy", eta=0.0)
    windows, measures = (batch := config.collect(network, target, batch)).collected
    flat = replace(windows, rewards=torch.full_like(windows.rewards, 0.893))
    measures = config._measures(
        flat, 1 - windows.accepted.clamp(max=1), torch.zeros_like(flat.rewards), 0.2
    )
    assert measures["zero_variance_frac"] == 1 and measures["reward"] == pytest.approx(0.893)
    network.zero_grad()
    loss, row = config(network, target, replace(batch, collected=(flat, measures)))
    assert (
        float(loss.detach()) == pytest.approx(config.beta * row["kl"], rel=1e-5) and row["kl"] > 0
    )
    assert float(torch.autograd.grad(loss, network.fc.weight)[0].abs().sum()) > 0
    batch, config = scene[-1], Ppow(window=3, group=2, places_per_row=5)
    windows, measures = config.collect(network, target, batch).collected
    assert config(network, target, batch)[1]["clip_frac"] == 0, "nothing has moved yet"
    assert (
        isinstance(windows, Windows)
        and windows.drafted.shape == (2, 10, 3)
        and measures["windows"] == 20
    )
    assert bool(network.t2d[windows.drafted].all())
    again, _ = config.collect(network, target, batch).collected
    assert torch.equal(windows.drafted, again.drafted) and torch.equal(
        windows.rewards, again.rewards
    )
    other, _ = config.collect(network, target, replace(batch, step=1)).collected
    assert not torch.equal(windows.drafted, other.drafted)


def test_tokens_behind_a_rejected_one_are_left_out_and_windows_hold_the_text_where_asked(scene):
    _, network, target, batch = scene
    config = Ppow(window=4, group=4, reward="raw", eta=0.0, beta=0.0)
    batch = config.collect(network, target, batch)
    windows, measures = batch.collected
    torch.manual_seed(0)
    accepted = torch.randint(0, 5, windows.accepted.shape)  # some to their end
    windows = replace(windows, accepted=accepted, rewards=torch.rand(accepted.shape))
    batch = replace(batch, collected=(windows, measures))
    advantages = group_advantages(windows.rewards, 4, config.delta)[..., None]
    for after, mask in (
        (True, torch.ones(4)),
        (False, torch.arange(4) <= windows.accepted[..., None]),
    ):
        loss, _ = replace(config, after_rejection=after)(network, target, batch)
        assert float(loss.detach()) == pytest.approx(
            -float((advantages * mask).sum(-1).mean() / 4), abs=1e-5
        )
    config = objective_named("distillspec-text", {"window": 3, "places_per_row": 2})
    windows, _ = config.collect(network, target, batch).collected
    assert torch.equal(windows.drafted, ppow_module.text_windows(batch, windows.slots, 3))
    mixed, _ = (
        objective_named("distillspec-mixed", {"window": 3})
        .collect(network, target, batch)
        .collected
    )
    same = (mixed.drafted == ppow_module.text_windows(batch, mixed.slots, 3)).all(-1).float().mean()
    assert 0.2 < float(same) < 0.8


def test_places_follow_the_curriculum_and_the_scores(scene, monkeypatch):
    _, network, target, batch = scene
    shares = {"gradual": [0.2, 0.5, 0.74, 0.8, 0.8], "switched": [0.2, 0.2, 0.2, 0.8, 0.8]}
    for curriculum, wanted in shares.items():
        config = Ppow(window=3, curriculum_steps=10, curriculum=curriculum)
        seen = [
            config.collect(network, target, replace(batch, step=step)).collected[1]
            for step in (0, 5, 9, 10, 99)
        ]
        assert [row["hard_frac"] for row in seen] == pytest.approx(wanted)
    scores, right = torch.zeros(2, 24), torch.ones(2, 24, dtype=torch.bool)
    scores[:, 14] = 1.0
    right[:, 16] = False
    monkeypatch.setattr(ppow_module, "divergence_along", lambda *a: (scores, right))
    config = Ppow(window=3, places_per_row=32, hard_from=1.0, hard_to=1.0, eta=0.0)
    for places, begins in (("adaptive", [12, 13, 14]), ("errors", [16])):
        windows, _ = replace(config, places=places).collect(network, target, batch).collected
        assert windows.slots.unique().tolist() == begins


class Unigram(EagleNetwork):  # a drafter that can only say how likely each token is anywhere
    def __init__(self, vocabulary: int):
        super().__init__(EagleConfig(16, 16, 2, 1, vocabulary, vocabulary, 16, taps=TAPS))
        self.likely = torch.nn.Parameter(torch.zeros(vocabulary))

    def head(self, hidden, level=0):
        return self.likely + 0 * hidden.sum(-1, keepdim=True)


class Bigrams:  # a target whose next token follows from the last one: 3 -> 0 -> 1 -> 1 -> 1 ...
    dtype = torch.float32

    def __init__(self):
        self.embedding = torch.zeros(4, 16)
        self.table = torch.full((4, 4), -12.0)
        for last, following in ((3, 0), (0, 1), (1, 1), (2, 3)):
            self.table[last, following] = 0.0

    def __call__(self, batch):
        return TargetOutput(torch.zeros(*batch.ids.shape, 48), FullLogits(self.table[batch.ids]))

    def continued(self, batch, slots, drafted, caches=None):
        last = batch.ids.gather(1, slots + 1)[..., None]
        return self.table[torch.cat((last, drafted[..., :-1]), -1)]


def expected_tokens(network: Unigram) -> float:
    """Accepted tokens of a window of 4 behind token 3, in the limit of a sure target."""
    first, other = network.likely.detach().softmax(-1)[:2].double().tolist()
    return first * sum(other**n for n in range(4))


def learned(objective) -> Unigram:
    """The drafter after a few of the trainer's own steps on the toy text."""
    torch.manual_seed(0)
    ids = torch.tensor([[2, 3, 0, 1, 1, 1]] * 4)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]] * 4)

    class Text:
        held_out = ()

        def batch(self, step):
            return TokenBatch(ids, mask, torch.zeros_like(ids), step=step)

    settings = Settings(muon=False, learning_rate=0.1, clip_norm=10.0, steps=70)
    run = eagle3.DrafterRun(Bigrams(), Unigram(4), Text(), objective, settings)
    for step in range(70):
        run.step(step, 1.0)
    return run.network


def test_windows_teach_what_likelihood_does_not():
    """A drafter that knows frequencies alone: likelihood has it say 1 three times in four, and then
    the first token of a
    window is wrong. The reward of whole windows has it say 0, which is right at least once."""
    token_level = learned(Supervised(LossRules(1)))
    assert float(token_level.likely.detach().softmax(-1)[1]) == pytest.approx(0.75, abs=0.03)
    config = Ppow(
        window=4, group=8, places_per_row=4, eta=0.0, beta=0.001, hard_from=0.0, hard_to=0.0
    )
    window_level = learned(config)
    assert float(window_level.likely.detach().softmax(-1)[0]) > 0.9
    assert expected_tokens(window_level) > 0.95 > 0.72 > expected_tokens(token_level)


def test_hass_cuts_the_gradient_and_labels_are_the_training_time_tests_or_the_texts_tokens(scene):
    _, network, target, batch = scene
    config = Supervised(
        LossRules(2, 1.0), labels="soft", soft_weight=0.1, top_k=3, top_weight=1.0, detach=True
    )
    plain = teach(network, batch.output, batch, config.rules)
    teacher = config._weighted(network, plain, batch)
    best = plain.probs.topk(3).indices
    torch.testing.assert_close(teacher.probs.gather(1, best), 1.1 * plain.probs.gather(1, best))
    assert float(teacher.probs.sum()) < 1.1 * len(plain.probs)
    losses = [one(network, target, batch)[0] for one in (config, replace(config, detach=False))]
    free, joined = (torch.autograd.grad(loss, network.fc.weight)[0] for loss in losses)
    assert not torch.allclose(free, joined) and torch.allclose(*losses)
    model, network, target, batch = scene
    ours, loss = TrainingTimeTest(LossRules(3), "eager"), Supervised(LossRules(3), labels="soft")
    torch.testing.assert_close(loss(network, target, batch)[0], ours(network, target, batch)[0])
    network = chat_network(model, kept=200)
    loss, measures = Supervised(LossRules(1))(network, target, batch)
    logits = drafted_from(network, target, batch, torch.arange(22).expand(2, -1), 1)[1][:, :, 0]
    mask, best = batch.loss_mask.bool(), batch.output.logits.logits.argmax(-1)
    losses = []
    for row, at in itertools.product(range(2), range(22)):
        column = int(ppow_module.columns_of(network, batch.ids[row, at + 2]))
        taught = (
            mask[row, at + 1]
            and mask[row, at + 2]
            and batch.documents[row, at] == batch.documents[row, at + 2]
        )
        if taught and column >= 0 and network.t2d[best[row, at + 1]]:
            losses.append(-logits[row, at].log_softmax(-1)[column])
    assert len(losses) == measures["counted_tok"] > 0
    assert float(loss.detach()) == pytest.approx(
        float(torch.stack(losses).mean().detach()), rel=1e-5
    )


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
SMALL = dict(window=3, places_per_row=2)
OF_EAGLE3 = [
    name for name in OBJECTIVES if name != "ppow-paper" and OBJECTIVES[name].network == "eagle3"
]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A drafter that has learned a little."""
    settings = Settings(48, steps=30, batch=2, length=48, warmup_steps=2, learning_rate=0.01)
    out = tmp_path_factory.mktemp("first")
    return eagle3.train_drafter(
        chat_target(),
        CHATS,
        out_dir=out,
        objective=TrainingTimeTest(LossRules(3)),
        settings=settings,
    )


def continued(out_dir, objective, start_from, settings=SETTINGS, **options):
    options = (
        dict(objective=objective, settings=settings, start_from=start_from, budget=Budget())
        | options
    )
    return eagle3.train_drafter(chat_target(), CHATS, out_dir=out_dir, **options)


def test_a_killed_run_continues_to_the_same_weights(first, tmp_path, capsys):
    objective = objective_named("ppow", SMALL | {"updates": 2})
    whole = continued(tmp_path / "whole", objective, first)
    assert re.search(
        r"6 steps take about \d+\.\d min beside 4 measurements", capsys.readouterr().err
    )
    with killed_at(eagle3.DrafterRun, "step", 3):
        continued(tmp_path / "cut", objective, first)
    assert same_weights(whole, continued(tmp_path / "cut", objective, first))
    curve = curve_of(tmp_path / "whole")
    pd.testing.assert_frame_equal(curve, curve_of(tmp_path / "cut"))
    logged = ["reward", "accepted_tok", "kl", "zero_variance_frac", "proximity_frac", "paid_frac"]
    logged += ["epsilon", "clip_frac", "hard_frac", "none_frac"]
    assert curve["epsilon"].nunique() == 1 and curve["paid_frac"].max() > 0
    assert curve[logged].notna().all().all() and (curve["clip_frac"] > 0).any()
    assert curve["held_out_tau_chain"].notna().tolist() == [True, False] * 3


def test_the_best_weights_are_kept_and_a_run_that_gets_worse_ends(first, tmp_path, monkeypatch):
    scores, real = [], Best.consider
    monkeypatch.setattr(Best, "consider", lambda *given: scores.append(given[2]) or real(*given))
    ruinous = replace(SETTINGS, learning_rate=1.0, steps=40, patience=2)
    folder = continued(tmp_path, OBJECTIVES["cst-hard"], first, ruinous)
    taus = curve_of(tmp_path)["held_out_tau_chain"]
    assert len(taus) < 40
    taus = taus.dropna()
    plan = runs.read_json(tmp_path / "drafter_training" / "plan.json")
    assert scores[:-1] == taus.tolist(), "the last weights are measured behind the last step"
    assert plan["results"]["held_out_tau_chain"] == pytest.approx(max(scores))
    if taus.idxmax() == 0 and scores[-1] <= taus.max():
        assert same_weights(first, folder)


@pytest.mark.parametrize("name", OF_EAGLE3)
def test_every_objective_moves_a_trained_drafter(first, tmp_path, name):
    small = (
        {}
        if name.startswith(("cst", "hass"))
        else {"window": min(3, OBJECTIVES[name].window), "places_per_row": 4}
    )
    settings = replace(SETTINGS, steps=2, held_out=0)
    folder = continued(tmp_path, objective_named(name, small), first, settings)
    assert not torch.equal(weights_of(first)["fc.weight"], weights_of(folder)["fc.weight"])
    assert np.isfinite(curve_of(tmp_path)["loss"]).all()


def test_bad_requests_get_one_sentence(first, tmp_path):
    pytest.raises(SpecdecError, objective_named, "ppo").match(
        "unknown objective 'ppo'; did you mean 'ppow'"
    )
    unknown = "unknown field of Ppow 'betta'; did you mean 'beta'"
    pytest.raises(SpecdecError, objective_named, "ppow", {"betta": 1}).match(unknown)
    for wrong, message in (
        ({"group": 1}, "a group of 1 leaves nothing to compare with"),
        ({"reward": "cost"}, "unknown reward 'cost'"),
        ({"rollout": "text"}, "only windows that the drafter drafts can be rewarded"),
        ({"reward": "measured"}, "speedups for 0 to 10 tokens"),
    ):
        pytest.raises(SpecdecError, Ppow, **wrong).match(message)
    pytest.raises(SpecdecError, Supervised, RULES["official"]).match("taught")
    networks = {}
    for name, width, taps in (("deep", 32, (2, 9, 20)), ("wide", 64, TAPS)):
        network = EagleNetwork(
            EagleConfig(32, 48, 2, 1, len(chat_target()[1]), 48, width, taps=taps)
        )
        networks[name] = save_drafter(network, tmp_path / name)
    for objective, start, message in (
        (
            Ppow(window=60),
            first,
            "a window of 60 tokens and the two before it do not fit into rows of 48",
        ),
        (Supervised(feature_weight=1.0), first, "feature_weight"),
        (Ppow(), networks["deep"], r"taps \(2, 9, 20\) do not all exist in a target of 7 layers"),
        (Ppow(), networks["wide"], "trained on features of width 64"),
    ):
        pytest.raises(
            SpecdecError, continued, tmp_path / "new", objective, start, resume=False
        ).match(message)
