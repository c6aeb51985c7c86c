"""EAGLE-3's training-time test: the loss against a slow oracle and golden vectors, the trainer end to end."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.config import SpecdecError
from specdec.drafters.eagle_layers import EagleConfig, EagleNetwork, RMSNorm, default_taps, rotary_tables, rotate
from specdec.train.fused import NormFunction, Rotate, StepAttention, fuse_norms
from specdec.train.ttt import RULES, LossRules, SoftCrossEntropy, draft_vocabulary, ttt_loss, unroll

SHARED = Path(os.environ.get("SPECDEC_SHARED", Path(__file__).resolve().parents[2] / "shared"))
needs_golden = pytest.mark.skipif(
    not (SHARED / "golden" / "ttt").is_dir(), reason="golden vectors are not beside the checkout (set SPECDEC_SHARED)"
)
VOCABULARY, KEPT, HIDDEN, SLOTS = 40, 24, 16, 9


def network(dtype=torch.float64, heads=4, groups=2) -> EagleNetwork:
    torch.manual_seed(1)
    config = EagleConfig(HIDDEN, 24, heads, groups, VOCABULARY, KEPT, HIDDEN)
    made = EagleNetwork(config).to(dtype)
    d2t, t2d = draft_vocabulary(torch.randint(0, 50, (VOCABULARY,)), KEPT)
    made.d2t.copy_(d2t)
    made.t2d.copy_(t2d)
    return made


def batch(rows=2, dtype=torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(2)
    mask = (torch.rand(rows, SLOTS) < 0.8).long()
    return {
        "embedding": torch.randn(VOCABULARY, HIDDEN, dtype=dtype),
        "features": torch.randn(rows, SLOTS, 3 * HIDDEN, dtype=dtype),
        "target_logits": 2 * torch.randn(rows, SLOTS, VOCABULARY, dtype=dtype),
        "ids": torch.randint(0, VOCABULARY, (rows, SLOTS)),
        "loss_mask": mask,
    }


def slow_state(net, given, row, slot, step, allowed, memory):
    """State of one slot after one step, by the definition: one query, a list of keys, no batching."""
    key = (row, slot, step)
    if key in memory:
        return memory[key]["state"]
    token = given["ids"][row, slot + step + 1] if slot + step + 1 < SLOTS else torch.tensor(0)
    if step:
        hidden = slow_state(net, given, row, slot, step - 1, allowed, memory)
    else:
        hidden = net.fuse(given["features"][row, slot])
    x, residual = net.attention_input(given["embedding"][token], hidden)
    q, k, v = net.project(x)
    cos, sin = rotary_tables(net.config.head_dim, net.config.rope_theta, SLOTS + 8)
    memory[key] = {"key": rotate(k, cos[slot + step], sin[slot + step]), "value": v}
    q = rotate(q, cos[slot + step], sin[slot + step])
    for earlier in range(slot):  # their step-0 keys must exist
        slow_state(net, given, row, earlier, 0, allowed, memory)
    seen = [(row, j, 0) for j in range(slot + 1) if j == slot or allowed(row, slot, j)]
    seen += [(row, slot, m) for m in range(1, step + 1)]
    heads = []
    for head in range(net.config.num_attention_heads):
        group = head // (net.config.num_attention_heads // net.config.num_key_value_heads)
        keys = torch.stack([memory[at]["key"][group] for at in seen])
        values = torch.stack([memory[at]["value"][group] for at in seen])
        heads.append(torch.softmax(keys @ q[head] / math.sqrt(net.config.head_dim), 0) @ values)
    memory[key]["state"] = net.finish(torch.cat(heads), residual)
    return memory[key]["state"]


def slow_losses(net, given, rules, allowed=lambda row, slot, j: True, same=lambda row, a, b: True):
    """Per-step losses by the definition of section 8, one slot at a time; also the number of slots that counted."""
    kept = net.t2d.nonzero().squeeze(1)
    rows = len(given["ids"])
    memory, losses, counts = {}, [], []
    for step in range(rules.steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in range(rows):
            mask = [*given["loss_mask"][row].tolist(), 0, 0]
            for slot in range(SLOTS - step):
                p = slot + step
                at_end = p + 1 == SLOTS
                teacher = torch.zeros(VOCABULARY).double() if at_end else given["target_logits"][row, p + 1]
                wanted = mask[p] if rules.positions == "early" else mask[p + 1] and mask[p + 2]
                if not (wanted and net.t2d[teacher.argmax()] and same(row, slot, p + 2)):
                    continue
                state = slow_state(net, given, row, slot, step, allowed, memory)
                target = torch.softmax(teacher[kept], 0)
                total = total - (target * torch.log_softmax(net.head(state), 0)).sum()
                count += 1
        losses.append(total / (count if rules.divide_by == "counted" else rows * SLOTS))
        counts.append(count)
    return torch.stack(losses), counts


@pytest.mark.parametrize("preset", ["official", "ours"])
def test_losses_and_gradients_equal_the_slow_definition(preset):
    net, given = fuse_norms(network()), batch()
    rules = LossRules(steps=4, decay=0.7, divide_by=RULES[preset].divide_by, positions=RULES[preset].positions)
    fast = ttt_loss(net, **given, rules=rules)
    losses, counts = slow_losses(plain := network(), given, rules)
    assert min(counts) > 0 and fast.counted_tok.tolist() == counts
    torch.testing.assert_close(fast.losses, losses, rtol=1e-6, atol=1e-7)
    total = sum(0.7**step * loss for step, loss in enumerate(losses))
    wanted = torch.autograd.grad(total, list(plain.parameters()))
    got = torch.autograd.grad(fast.total, list(net.parameters()))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_presets_really_differ():
    net, given = network(), batch()
    official = ttt_loss(net, **given, rules=RULES["official"])
    ours = ttt_loss(net, **given, rules=RULES["ours"])
    assert not torch.allclose(official.losses, ours.losses, rtol=1e-2)
    assert official.counted_tok[0] > ours.counted_tok[0]


def test_packed_documents_do_not_see_each_other():
    net, given = network(), batch()
    given["loss_mask"] = torch.ones_like(given["loss_mask"])
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    rules = LossRules(steps=3)
    packed = ttt_loss(net, **given, documents=documents, rules=rules)
    same = lambda row, a, b: b < SLOTS and documents[row, a] == documents[row, b]  # noqa: E731
    losses, counts = slow_losses(net, given, rules, allowed=same, same=same)
    assert packed.counted_tok.tolist() == counts
    torch.testing.assert_close(packed.losses, losses, rtol=1e-6, atol=1e-7)
    whole = ttt_loss(net, **given, rules=rules)
    assert not torch.allclose(whole.losses, packed.losses, rtol=1e-3)


def test_right_padding_changes_nothing():
    net, given = network(), batch(rows=1)
    rules = LossRules(steps=3)
    plain = ttt_loss(net, **given, attention_mask=torch.ones(1, SLOTS), rules=rules)
    padded = {name: value if name == "embedding" else widen(value) for name, value in given.items()}
    mask = widen(torch.ones(1, SLOTS))
    longer = ttt_loss(net, **padded, attention_mask=mask, rules=rules)
    torch.testing.assert_close(plain.losses, longer.losses)
    torch.testing.assert_close(plain.accuracies, longer.accuracies)


def widen(value: Tensor, extra: int = 5) -> Tensor:
    return torch.cat((value, value.new_zeros(1, extra, *value.shape[2:])), 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_hand_written_backward_passes_pass_gradcheck(groups):
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    query, memory = random(2, 2, groups, 5, 4), [random(2, 2, 5, 4) for _ in range(6)]
    bias = torch.zeros(1, 5, 5, dtype=torch.float64).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    assert torch.autograd.gradcheck(lambda query, *kv: StepAttention.apply(query, bias, *kv), (query, *memory))
    cos, sin = (table.double() for table in rotary_tables(4, 100.0, 5))
    assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, cos, sin), random(3, 5, 4))
    torch.testing.assert_close(Rotate.apply(query, cos, sin), rotate(query, cos, sin))
    assert torch.autograd.gradcheck(lambda x, weight: NormFunction.apply(x, weight, 1e-5), (random(3, 6), random(6)))
    x, norm = random(3, 6), RMSNorm(6, 1e-5).double()
    torch.testing.assert_close(NormFunction.apply(x, norm.weight, 1e-5), norm(x), rtol=1e-6, atol=1e-6)


def test_soft_cross_entropy_equals_its_definition():
    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    probs = torch.softmax(torch.randn(4, 7, dtype=torch.float64), -1)
    want = -(probs * torch.log_softmax(logits, -1)).sum()
    got = SoftCrossEntropy.apply(logits, probs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, logits)[0], torch.autograd.grad(want, logits)[0])


def test_gradients_flow_through_all_steps():
    net, given = network(), batch(rows=1)
    arguments = given["embedding"], given["features"], given["ids"]
    *_, last = unroll(net, *arguments, 3)
    assert torch.autograd.grad(last.sum(), net.fc.weight)[0].abs().sum() > 0


def test_missing_mass_is_reported():
    net, given = network(), batch()
    found = ttt_loss(net, **given)
    mask = given["loss_mask"].bool()
    taught = [(row, p) for row in range(2) for p in range(SLOTS - 2) if mask[row, p + 1] and mask[row, p + 2]]
    probs = torch.stack([given["target_logits"][row, p + 1].softmax(-1) for row, p in taught])
    assert found.missing_mass_frac == pytest.approx(float(probs[:, ~net.t2d].sum(-1).mean()), rel=1e-5)
    assert found.outside_frac == pytest.approx(float((~net.t2d[probs.argmax(-1)]).double().mean()), rel=1e-5)


def test_draft_vocabulary_keeps_the_most_frequent_in_order():
    counts = torch.tensor([0, 5, 1, 9, 5, 0, 2])
    d2t, t2d = draft_vocabulary(counts, 4)
    assert (torch.arange(4) + d2t).tolist() == [1, 3, 4, 6]
    assert t2d.nonzero().squeeze(1).tolist() == [1, 3, 4, 6]
    assert (torch.arange(7) + draft_vocabulary(counts, 7)[0]).tolist() == list(range(7))
    with pytest.raises(SpecdecError, match="does not fit"):
        draft_vocabulary(counts, 8)


@pytest.mark.parametrize("bad", [{"steps": 0}, {"decay": 0.0}, {"positions": "late"}, {"divide_by": "batch"}])
def test_bad_rules_are_refused(bad):
    with pytest.raises(SpecdecError):
        LossRules(**bad)


@needs_golden
def test_losses_accuracies_logits_and_gradients_equal_the_golden_batch():
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    golden = load_file(SHARED / "golden" / "ttt" / "ttt.safetensors")
    wanted = json.loads((SHARED / "golden" / "ttt" / "ttt.json").read_text())
    target = AutoModelForCausalLM.from_pretrained(SHARED / "golden" / "target", dtype=torch.float32).eval()
    net = EagleNetwork(EagleConfig(64, 128, 4, 2, 512, 256, 64))
    net.load_state_dict(load_file(SHARED / "golden" / "drafter" / "model.safetensors"))
    ids, mask = golden["input_ids"], golden["attention_mask"]
    with torch.no_grad():
        out = target(ids, attention_mask=mask, output_hidden_states=True)
    features = torch.cat([out.hidden_states[tap] for tap in default_taps(8)], -1)
    embedding = target.get_input_embeddings().weight.detach()
    found = ttt_loss(net, embedding, features, out.logits, ids, golden["loss_mask"], mask, rules=RULES["official"])
    torch.testing.assert_close(found.losses, torch.tensor(wanted["plosses"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.accuracies.double(), torch.tensor(wanted["acc"]).double(), rtol=1e-5, atol=0)
    assert float(found.total.detach()) == pytest.approx(wanted["weighted_loss"], rel=1e-5)
    for step, hidden in enumerate(unroll(net, embedding, features, ids, 7, mask)):
        real = mask.bool()
        torch.testing.assert_close(net.head(hidden)[real], golden[f"logits_step{step}"][real], rtol=1e-4, atol=1e-4)
    found.total.backward()
    for name, parameter in net.named_parameters():
        gradient = golden[f"grad.{name}"]
        assert float((parameter.grad - gradient).norm() / gradient.norm()) < 1e-5, name
