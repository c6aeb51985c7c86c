"""EAGLE-3's training-time test: against a slow oracle and golden vectors; whole trainings."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of, same_weights, weights_of
from fakes.golden import GOLDEN, needs_golden
from fakes.killed import killed_at
from fakes.refusals import refusal
from safetensors.torch import load_file

from specdec import runs
from specdec.models.eagle_network import (
    EagleConfig,
    EagleNetwork,
    RMSNorm,
    default_taps,
    rotary_tables,
    rotate,
)
from specdec.training.drafter import eagle3, ttt
from specdec.training.drafter.objective import FrozenTarget, TargetOutput, TokenBatch
from specdec.training.drafter.presets import Budget, Continued, Settings, objective_named
from specdec.training.drafter.ttt import LossRules, NormFunction, Supervised, draft_vocabulary

VOCABULARY, KEPT, HIDDEN, SLOTS = 40, 24, 16, 9


def network(groups=2) -> EagleNetwork:
    torch.manual_seed(1)
    drafter = EagleNetwork(EagleConfig(HIDDEN, 24, 4, groups, VOCABULARY, KEPT, HIDDEN)).double()
    d2t, t2d = draft_vocabulary(torch.randint(0, 50, (VOCABULARY,)), KEPT)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    return drafter


class Scene:
    """Random rows, and a target that answers them with random features and logits."""

    def __init__(self, rows=2, documents=None):
        torch.manual_seed(2)
        mask = (torch.rand(rows, SLOTS) < 0.8).long()
        if documents is not None:
            mask = torch.ones_like(mask)
        self.embedding = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.features = torch.randn(rows, SLOTS, 3 * HIDDEN, dtype=torch.float64)
        self.logits = 2 * torch.randn(rows, SLOTS, VOCABULARY, dtype=torch.float64)
        ids = torch.randint(0, VOCABULARY, (rows, SLOTS))
        self.batch = TokenBatch(ids, mask, documents)

    def __call__(self, batch) -> TargetOutput:
        return TargetOutput(self.features, self.logits)

    def same_document(self, row, first, second) -> bool:
        documents = self.batch.documents
        if documents is None:
            return True
        return second < SLOTS and bool(documents[row, first] == documents[row, second])


def slow_state(net, scene, row, slot, step, memory):
    """State of one slot after one step, by the definition: one query, a list of keys."""
    key = (row, slot, step)
    if key in memory:
        return memory[key]["state"]
    # 1. the token and the state that it reads
    ids = scene.batch.ids
    token = ids[row, slot + step + 1] if slot + step + 1 < SLOTS else torch.tensor(0)
    if step:
        hidden = slow_state(net, scene, row, slot, step - 1, memory)
    else:
        hidden = net.fuse(scene.features[row, slot])
    x, residual = net.attention_input(scene.embedding[token], hidden)
    q, k, v = net.midlayer.self_attn.project(x)
    cos, sin = rotary_tables(net.config.head_dim, net.config.rope_theta, SLOTS + 8)
    memory[key] = {"key": rotate(k, cos[slot + step], sin[slot + step]), "value": v}
    q = rotate(q, cos[slot + step], sin[slot + step])
    # 2. the step-0 keys of earlier slots must exist
    for earlier in range(slot):
        slow_state(net, scene, row, earlier, 0, memory)
    keys = [(row, j, 0) for j in range(slot + 1) if scene.same_document(row, slot, j)]
    keys += [(row, slot, m) for m in range(1, step + 1)]
    # 3. attention
    heads = []
    for head in range(net.config.num_attention_heads):
        group = head // (net.config.num_attention_heads // net.config.num_key_value_heads)
        scores = torch.stack([memory[at]["key"][group] for at in keys]) @ q[head]
        values = torch.stack([memory[at]["value"][group] for at in keys])
        heads.append(torch.softmax(scores / math.sqrt(net.config.head_dim), 0) @ values)
    memory[key]["state"] = net.finish(torch.cat(heads), residual)
    return memory[key]["state"]


def slow_losses(net, scene, objective):
    """(losses, numbers of slots) per step by the definition of section 8, one slot at a time."""
    rules = objective.rules
    kept = net.t2d.nonzero().squeeze(1)
    rows = len(scene.batch.ids)
    memory, losses, counts = {}, [], []
    aligned = {(row, slot) for row in range(rows) for slot in range(SLOTS)}
    for step in range(rules.steps):
        total, count, followed = torch.zeros((), dtype=torch.float64), 0, set()
        for row, slot in itertools.product(range(rows), range(SLOTS - step)):
            mask = [*scene.batch.loss_mask[row].tolist(), 0, 0]
            p = slot + step
            teacher = torch.zeros(VOCABULARY).double()
            if p + 1 < SLOTS:
                teacher = scene.logits[row, p + 1]
            counted = mask[p] if rules.official else mask[p + 1] and mask[p + 2]
            counted = counted and scene.same_document(row, slot, p + 2)
            if not (counted and net.t2d[teacher.argmax()] and (row, slot) in aligned):
                continue
            target = torch.softmax(teacher[kept], 0)
            if objective.labels == "hard":
                target = (kept == scene.batch.ids[row, p + 2]).double()
                if not target.any():
                    continue
            log_q = torch.log_softmax(net.head(slow_state(net, scene, row, slot, step, memory)), 0)
            total = total - (target * log_q).sum()
            count += 1
            best = kept[log_q.topk(rules.aligned_top).indices]
            if not rules.aligned_top or scene.batch.ids[row, p + 2] in best:
                followed.add((row, slot))
        losses.append(total / (rows * SLOTS if rules.official else count))
        counts.append(count)
        if rules.aligned_top:
            aligned = followed
    return losses, counts


SLOW = {
    "official": Supervised(LossRules(4, 0.7, True)),
    "ours": Supervised(LossRules(4, 0.7)),
    "aligned": Supervised(LossRules(3, 0.7, aligned_top=20)),
    "hard": Supervised(LossRules(4, 0.7), "hard"),
}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", SLOW)
def test_losses_and_gradients_equal_the_slow_definition(name, groups):
    documents = torch.tensor([[0] * 9, [0] * 9, [0] * 4 + [1] * 5, [0] * 7 + [-1] * 2])
    scene = Scene(4, None if name == "official" else documents)
    plain, net = network(groups), network(groups)
    objective = SLOW[name]
    objective.prepare(net, scene, ())
    total, measures = objective(net, scene, scene.batch)
    losses, counts = slow_losses(plain, scene, objective)
    assert min(counts) > 0 and measures["counted_tok"] == counts[0]
    assert name != "aligned" or counts[1] < slow_losses(plain, scene, SLOW["ours"])[1][1]
    expected = sum(0.7**step * loss for step, loss in enumerate(losses))
    assert [measures[f"loss_{step}"] for step in range(len(losses))] == pytest.approx(
        [float(loss.detach()) for loss in losses], rel=1e-6
    )
    gradients = torch.autograd.grad(total, list(net.parameters()))
    slow = torch.autograd.grad(expected, list(plain.parameters()))
    torch.testing.assert_close(gradients, slow, rtol=1e-5, atol=1e-7)


def test_the_backward_pass_of_a_norm():
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: NormFunction.apply(*given, 1e-5), (x, weight))
    norm = RMSNorm(6, 1e-5).double()
    torch.testing.assert_close(NormFunction.apply(x, norm.weight, 1e-5), norm(x), rtol=1e-6, atol=0)


@needs_golden
def test_losses_accuracies_logits_and_gradients_equal_the_golden_batch():
    from transformers import AutoModelForCausalLM

    golden = load_file(GOLDEN / "ttt" / "ttt.safetensors")
    expected = json.loads((GOLDEN / "ttt" / "ttt.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32).eval()
    net = EagleNetwork(EagleConfig(64, 128, 4, 2, 512, 256, 64))
    net.load_state_dict(load_file(GOLDEN / "drafter" / "model.safetensors"))
    target = FrozenTarget(model, default_taps(8))
    real = golden["attention_mask"]
    with torch.no_grad():
        out = model(golden["input_ids"], attention_mask=real, output_hidden_states=True)
    features = torch.cat([out.hidden_states[tap] for tap in target.taps], -1)
    output = TargetOutput(features, out.logits)
    batch = TokenBatch(golden["input_ids"], golden["loss_mask"], output=output)
    total, measures = Supervised(LossRules(official=True))(net, target, batch)
    for step in range(7):
        assert measures[f"loss_{step}"] == pytest.approx(expected["plosses"][step], rel=1e-5)
        assert measures[f"accuracy_{step}"] == pytest.approx(expected["acc"][step], rel=1e-5)
    assert float(total.detach()) == pytest.approx(expected["weighted_loss"], rel=1e-5)
    # padding follows the text, which cannot see it
    real = real.bool()
    for step, hidden in enumerate(ttt.unroll(net, target.embedding, features, batch, 7)):
        logits = golden[f"logits_step{step}"][real]
        torch.testing.assert_close(net.head(hidden)[real], logits, rtol=1e-4, atol=1e-4)
    total.backward()
    for name, parameter in net.named_parameters():
        gradient = golden[f"grad.{name}"]
        assert float((parameter.grad - gradient).norm() / gradient.norm()) < 1e-5, name


TOY = Settings(
    48, steps=6, batch=2, length=64, warmup_steps=2, regenerate_chats=4, max_new_tokens=12
)
PASSES = Settings(
    48,
    fc_norm="each",
    batch=2,
    length=48,
    steps=None,
    passes=12,
    warmup_steps=2,
    head_rate=0.005,
    held_out=2,
    held_out_frac=0.4,
    average_frac=0.3,
    measure_every=3,
)
THREE_STEPS = Supervised(LossRules(steps=3))


def trained(out_dir, settings=TOY, objective=THREE_STEPS, target=None, **options):
    target = target or chat_target()
    options |= dict(out_dir=out_dir, objective=objective, settings=settings)
    return eagle3.train_drafter(target, CHATS, **options)


BEST = Continued(
    48, 32, batch=2, length=48, steps=6, passes=3, held_out=2, held_out_frac=0.4, measure_every=3
)
WINDOWS = objective_named("ppow", {"window": 3, "places_per_row": 2})


@pytest.mark.parametrize(
    ("settings", "objective"), [(TOY, THREE_STEPS), (PASSES, THREE_STEPS), (BEST, WINDOWS)]
)
def test_a_killed_run_continues_to_the_same_weights_and_measurements(tmp_path, settings, objective):
    whole = trained(tmp_path / "whole", settings, objective)
    with killed_at(eagle3.DrafterRun, "step", 5):
        trained(tmp_path / "cut", settings, objective)
    other = dict(settings=settings, objective=objective, budget=Budget(seed=1))
    assert "other settings" in refusal(trained, tmp_path / "cut", **other)
    if settings.held_out:
        measured = curve_of(tmp_path / "cut").dropna(subset=["held_out_tau_chain"])
        assert measured["step"].tolist() == [0, 3]
    cut = trained(tmp_path / "cut", settings, objective)
    assert same_weights(whole, cut)
    assert curve_of(tmp_path / "whole").equals(curve_of(tmp_path / "cut"))
    before = (cut / "model.safetensors").stat().st_mtime_ns
    # a finished one returns at once
    trained(tmp_path / "cut", settings, objective)
    assert (cut / "model.safetensors").stat().st_mtime_ns == before


def test_held_out_text_is_measured_and_the_average_weighs_the_last_steps(tmp_path, monkeypatch):
    weights = []
    step = eagle3.DrafterRun.step

    def noted(self, number, factor):
        row = step(self, number, factor)
        weights.append(self.network.fc.weight.detach().clone())
        return row

    monkeypatch.setattr(eagle3.DrafterRun, "step", noted)
    folder = trained(tmp_path, PASSES)
    results = runs.read_json(tmp_path / "drafter_training" / "plan.json")["results"]
    assert 0 < results["held_out_top1_frac"] < 1
    taus = curve_of(tmp_path)["held_out_tau_chain"].dropna()
    assert results["held_out_tau_chain"] > taus.iloc[0]
    mean = torch.zeros_like(weights[0])
    for number, weight in enumerate(weights):
        mean += (weight - mean) / max(1, 0.3 * (number + 1))
    averaged = weights_of(folder)["fc.weight"].float()
    torch.testing.assert_close(averaged, mean, rtol=0.01, atol=1e-4)


def test_packed_rows_read_themselves_alone():
    frozen = FrozenTarget(chat_target()[0], (2, 3, 4))
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (1, 12))
    packed = frozen(TokenBatch(ids, documents=torch.tensor([[0] * 5 + [1] * 7])))
    for part in (slice(0, 5), slice(5, 12)):
        alone = frozen(TokenBatch(ids[:, part]))
        close = dict(rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(packed.features[:, part], alone.features, **close)
        torch.testing.assert_close(packed.logits[:, part], alone.logits, **close)
    rows, columns = torch.tensor([0, 0]), torch.tensor([3, 9])
    logits, best, log_sum = packed.at(rows, columns)
    np.testing.assert_allclose(log_sum, packed.logits[0, [3, 9]].exp().sum(-1).log(), rtol=1e-5)
    assert best.tolist() == logits.argmax(-1).tolist()


def test_bad_requests_get_one_sentence(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    assert "there is no folder" in refusal(trained, tmp_path, target=nowhere)
    start = dict(start_from=tmp_path / "nowhere")
    assert "there is no drafter in" in refusal(trained, tmp_path, **start)
