"""EAGLE-3's training-time test: the loss against a slow oracle and golden vectors, the trainer end
to end.
"""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of, same_weights, weights_of
from fakes.golden import GOLDEN, needs_golden
from fakes.killed import killed_at
from safetensors.torch import load_file
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.models.eagle_network import (
    EagleConfig,
    EagleNetwork,
    RMSNorm,
    default_taps,
    rotary_tables,
    rotate,
)
from specdec.training.drafter import eagle3, texts, ttt
from specdec.training.drafter.chats import Regeneration, regenerate
from specdec.training.drafter.objective import (
    FrozenTarget,
    FullLogits,
    Objective,
    TargetOutput,
    TokenBatch,
)
from specdec.training.drafter.presets import Budget, Settings
from specdec.training.drafter.ttt import (
    RULES,
    LossRules,
    NormFunction,
    TrainingTimeTest,
    draft_vocabulary,
)

VOCABULARY, KEPT, HIDDEN, SLOTS = 40, 24, 16, 9


def network(groups=2) -> EagleNetwork:
    torch.manual_seed(1)
    made = EagleNetwork(EagleConfig(HIDDEN, 24, 4, groups, VOCABULARY, KEPT, HIDDEN)).double()
    d2t, t2d = draft_vocabulary(torch.randint(0, 50, (VOCABULARY,)), KEPT)
    made.d2t.copy_(d2t)
    made.t2d.copy_(t2d)
    return made


def batch(rows=2) -> dict[str, Tensor]:
    torch.manual_seed(2)
    mask = (torch.rand(rows, SLOTS) < 0.8).long()
    return {
        "embedding": torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64),
        "features": torch.randn(rows, SLOTS, 3 * HIDDEN, dtype=torch.float64),
        "target_logits": 2 * torch.randn(rows, SLOTS, VOCABULARY, dtype=torch.float64),
        "ids": torch.randint(0, VOCABULARY, (rows, SLOTS)),
        "loss_mask": mask,
    }


def loss_of(net, given, rules=RULES["ours"], **more):
    """The fast loss of a batch made by `batch()`; more: attention_mask, documents."""
    tokens = TokenBatch(given["ids"], given["loss_mask"], **more)
    return ttt.ttt_loss(net, tokens, output_of(given), given["embedding"], rules)


def output_of(given) -> TargetOutput:
    return TargetOutput(given["features"], FullLogits(given["target_logits"]))


def slow_state(net, given, row, slot, step, allowed, memory):
    """State of one slot after one step, by the definition: one query, a list of keys."""
    key = (row, slot, step)
    if key in memory:
        return memory[key]["state"]
    token = given["ids"][row, slot + step + 1] if slot + step + 1 < SLOTS else torch.tensor(0)
    if step:
        hidden = slow_state(net, given, row, slot, step - 1, allowed, memory)
    else:
        hidden = net.fuse(given["features"][row, slot])
    x, residual = net.attention_input(given["embedding"][token], hidden)
    q, k, v = net.midlayer.self_attn.project(x)
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
    """Per-step losses by the definition of section 8, one slot at a time; also the number of slots
    that counted.
    """
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
                teacher = (
                    torch.zeros(VOCABULARY).double()
                    if at_end
                    else given["target_logits"][row, p + 1]
                )
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


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("preset", ["official", "ours"])
def test_losses_and_gradients_equal_the_slow_definition(preset, fused):
    net, given = ttt.fuse_norms(network()) if fused else network(), batch()
    rules = LossRules(
        steps=4, decay=0.7, divide_by=RULES[preset].divide_by, positions=RULES[preset].positions
    )
    fast = loss_of(net, given, rules)
    losses, counts = slow_losses(plain := network(), given, rules)
    assert min(counts) > 0 and fast.counted_tok.tolist() == counts
    torch.testing.assert_close(fast.losses, losses, rtol=1e-6, atol=1e-7)
    total = sum(0.7**step * loss for step, loss in enumerate(losses))
    wanted = torch.autograd.grad(total, list(plain.parameters()))
    got = torch.autograd.grad(fast.total, list(net.parameters()))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_packed_documents_and_padding_are_not_seen():
    net, given = network(), batch()
    given["loss_mask"] = torch.ones_like(given["loss_mask"])
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    rules = LossRules(steps=3)
    packed = loss_of(net, given, rules, documents=documents)
    same = lambda row, a, b: b < SLOTS and documents[row, a] == documents[row, b]  # noqa: E731
    losses, counts = slow_losses(net, given, rules, allowed=same, same=same)
    assert packed.counted_tok.tolist() == counts
    torch.testing.assert_close(packed.losses, losses, rtol=1e-6, atol=1e-7)

    def widen(value: Tensor) -> Tensor:
        return torch.cat((value, value.new_zeros(1, 5, *value.shape[2:])), 1)

    net, given, rules, mask = network(), batch(rows=1), LossRules(steps=3), torch.ones(1, SLOTS)
    plain = loss_of(net, given, rules, attention_mask=mask)
    padded = {name: value if name == "embedding" else widen(value) for name, value in given.items()}
    longer = loss_of(net, padded, rules, attention_mask=widen(mask))
    torch.testing.assert_close(plain.losses, longer.losses)
    torch.testing.assert_close(plain.accuracies, longer.accuracies)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_eager_and_fused_give_the_same_loss_and_gradient(groups):
    given, documents = batch(), torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [-1] * 2])

    class Target(FrozenTarget):
        def __init__(self):
            self.embedding = given["embedding"]

        def __call__(self, batch):
            return output_of(given)

    tokens, results = TokenBatch(given["ids"], given["loss_mask"], documents), {}
    for backward in ("eager", "fused", "auto"):
        net, objective = network(groups=groups), TrainingTimeTest(LossRules(steps=4), backward)
        objective.prepare(net, Target())
        loss, measures = objective(net, Target(), tokens)
        results[backward] = loss, torch.autograd.grad(loss, list(net.parameters())), measures
    for one, other in (("eager", "fused"), ("auto", "fused")):
        torch.testing.assert_close(results[one], results[other], rtol=1e-6, atol=1e-8)
    assert torch.equal(results["auto"][0], results["fused"][0])  # on a CPU
    assert not TrainingTimeTest().fused(torch.device("cuda"))
    pytest.raises(SpecdecError, TrainingTimeTest, backward="egaer").match("backward")


def test_the_backward_pass_passes_gradcheck_and_the_draft_vocabulary_keeps_the_most_frequent():
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    assert torch.autograd.gradcheck(
        lambda x, weight: NormFunction.apply(x, weight, 1e-5), (random(3, 6), random(6))
    )
    x, norm = random(3, 6), RMSNorm(6, 1e-5).double()
    torch.testing.assert_close(
        NormFunction.apply(x, norm.weight, 1e-5), norm(x), rtol=1e-6, atol=1e-6
    )
    net, given = network(), batch()
    found = loss_of(net, given)
    mask = given["loss_mask"].bool()
    taught = [
        (row, p)
        for row in range(2)
        for p in range(SLOTS - 2)
        if mask[row, p + 1] and mask[row, p + 2]
    ]
    probs = torch.stack([given["target_logits"][row, p + 1].softmax(-1) for row, p in taught])
    assert found.missing_mass_frac == pytest.approx(
        float(probs[:, ~net.t2d].sum(-1).mean()), rel=1e-5
    )
    counts = torch.tensor([0, 5, 1, 9, 5, 0, 2])
    d2t, t2d = draft_vocabulary(counts, 4)
    assert (torch.arange(4) + d2t).tolist() == [1, 3, 4, 6]
    assert t2d.nonzero().squeeze(1).tolist() == [1, 3, 4, 6]
    assert (torch.arange(7) + draft_vocabulary(counts, 7)[0]).tolist() == list(range(7))
    pytest.raises(SpecdecError, draft_vocabulary, counts, 8).match("does not fit")
    for name, wrong in {
        "steps": 0,
        "decay": 0.0,
        "positions": "late",
        "divide_by": "batch",
    }.items():
        pytest.raises(SpecdecError, LossRules, **{name: wrong}).match(name)


@needs_golden
def test_losses_accuracies_logits_and_gradients_equal_the_golden_batch():
    from transformers import AutoModelForCausalLM

    golden = load_file(GOLDEN / "ttt" / "ttt.safetensors")
    wanted = json.loads((GOLDEN / "ttt" / "ttt.json").read_text())
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32).eval()
    net = EagleNetwork(EagleConfig(64, 128, 4, 2, 512, 256, 64))
    net.load_state_dict(load_file(GOLDEN / "drafter" / "model.safetensors"))
    ids, mask = golden["input_ids"], golden["attention_mask"]
    with torch.no_grad():
        out = target(ids, attention_mask=mask, output_hidden_states=True)
    features = torch.cat([out.hidden_states[tap] for tap in default_taps(8)], -1)
    embedding = target.get_input_embeddings().weight.detach()
    tokens = TokenBatch(ids, golden["loss_mask"], attention_mask=mask)
    output = TargetOutput(features, FullLogits(out.logits))
    found = ttt.ttt_loss(net, tokens, output, embedding, RULES["official"])
    torch.testing.assert_close(found.losses, torch.tensor(wanted["plosses"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        found.accuracies.double(), torch.tensor(wanted["acc"]).double(), rtol=1e-5, atol=0
    )
    assert float(found.total.detach()) == pytest.approx(wanted["weighted_loss"], rel=1e-5)
    for step, hidden in enumerate(ttt.unroll(net, embedding, features, tokens, 7)):
        real = mask.bool()
        torch.testing.assert_close(
            net.head(hidden)[real], golden[f"logits_step{step}"][real], rtol=1e-4, atol=1e-4
        )
    found.total.backward()
    for name, parameter in net.named_parameters():
        gradient = golden[f"grad.{name}"]
        assert float((parameter.grad - gradient).norm() / gradient.norm()) < 1e-5, name


TOY = Settings(
    48, steps=6, batch=2, length=64, warmup_steps=2, regenerate_chats=4, max_new_tokens=12
)
THREE_STEPS = TrainingTimeTest(LossRules(steps=3))


def trained(out_dir, settings=TOY, objective=THREE_STEPS, target=None, **options):
    target = target or chat_target()
    return eagle3.train_drafter(
        target, CHATS, out_dir=out_dir, objective=objective, settings=settings, **options
    )


def test_a_killed_run_continues_to_the_same_weights(tmp_path):
    whole = trained(tmp_path / "whole")
    with killed_at(eagle3.DrafterRun, "step", 3):
        trained(tmp_path / "cut")
    pytest.raises(SpecdecError, trained, tmp_path / "cut", budget=Budget(seed=1)).match(
        "other settings"
    )
    cut = trained(tmp_path / "cut")
    assert same_weights(whole, cut)
    curve = curve_of(tmp_path / "whole")
    assert len(curve) == 6 and curve.equals(curve_of(tmp_path / "cut"))
    before = (cut / "model.safetensors").stat().st_mtime_ns
    trained(tmp_path / "cut")  # finished: returns at once
    assert (cut / "model.safetensors").stat().st_mtime_ns == before


def test_a_resumed_run_on_time_reads_the_text_it_began_with(tmp_path, monkeypatch):
    given, real = [], texts.chats.regenerate
    monkeypatch.setattr(
        texts.chats, "regenerate", lambda *a, **o: given.append(o["minutes"]) or real(*a, **o)
    )
    for _ in range(2):
        with killed_at(eagle3.DrafterRun, "step", 2):
            trained(tmp_path, budget=Budget(minutes=4.0))
    assert given == [1.0, 0]


class HeadToZero(Objective):
    """A stand-in for objectives to come: it is given all it needs."""

    def __call__(self, drafter, target, batch):
        output = target(batch)
        assert (
            output.features.shape[:2]
            == output.logits.logits.shape[:2]
            == batch.ids.shape
            == batch.loss_mask.shape
        )
        assert (
            target.tokenizer.decode(batch.ids[0, :3])
            and target.embedding.dtype == drafter.fc.weight.dtype
        )
        return sum((p.float() ** 2).sum() for p in drafter.parameters()), {"step_seen": batch.step}


def test_another_objective_starts_from_a_trained_drafter(tmp_path):
    first = trained(tmp_path / "first", replace(TOY, regenerate_chats=0))
    still = replace(TOY, regenerate_chats=0, steps=2, learning_rate=0.0)
    options = dict(objective=dataclass(frozen=True)(HeadToZero)(), start_from=first)
    assert same_weights(first, trained(tmp_path / "same", still, **options))
    smaller = trained(tmp_path / "smaller", replace(still, learning_rate=0.01), **options)
    size = {folder: weights_of(folder)["fc.weight"].float().norm() for folder in (first, smaller)}
    assert size[smaller] < size[first]
    assert curve_of(tmp_path / "same")["step_seen"].tolist() == [0, 1]


def test_training_lowers_the_loss_and_writes_the_official_layout(tmp_path):
    folder = trained(tmp_path, replace(TOY, steps=30, learning_rate=5e-3, regenerate_chats=0))
    curve = curve_of(tmp_path)
    assert curve["loss"].tail(5).mean() < curve["loss"].head(5).mean()
    assert curve["accuracy_0"].tail(5).mean() > curve["accuracy_0"].head(5).mean() + 0.2
    config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    assert (
        config["draft_vocab_size"] == 48
        and config["rope_theta"] == 10000.0
        and config["hidden_size"] == 32
    )
    assert weights["fc.weight"].shape == (32, 96) and weights["d2t"].dtype == torch.int64
    assert weights["t2d"].sum() == 48 and "embed_tokens.weight" not in weights
    kept = torch.arange(48) + weights["d2t"]
    assert kept.tolist() == weights["t2d"].nonzero().squeeze(1).tolist()


def test_packed_rows_read_themselves_alone_and_regenerated_answers_are_greedy(
    tmp_path, monkeypatch
):
    frozen = FrozenTarget(chat_target()[0], (2, 3, 4))
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    whole = frozen(TokenBatch(ids, documents=documents))
    for part in (slice(0, 5), slice(5, 12)):
        alone = frozen(TokenBatch(ids[:, part]))
        torch.testing.assert_close(whole.features[:, part], alone.features, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            whole.logits.logits[:, part], alone.logits.logits, rtol=1e-4, atol=1e-5
        )
    model, tokenizer = chat_target()
    two, how = (
        [CHATS[0] + CHATS[1], CHATS[2]],
        Regeneration(greedy_frac=1.0, max_new_tokens=8, batch=2),
    )
    written = regenerate(model, tokenizer, two, how, folder=tmp_path / "own")
    assert [len(chat) for chat in sorted(written, key=len)] == [2, 4]
    for chat in written:
        for turn in range(1, len(chat), 2):
            prompt = tokenizer.apply_chat_template(
                chat[:turn], tokenize=False, add_generation_prompt=True
            )
            ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
            out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
            assert chat[turn]["content"] == tokenizer.decode(out, skip_special_tokens=True)
    monkeypatch.setattr(model, "generate", None)  # a second call reads the shards
    assert regenerate(model, tokenizer, two, how, folder=tmp_path / "own") == written


def test_bad_requests_get_one_sentence(tmp_path):
    pytest.raises(SpecdecError, trained, tmp_path, "smal").match("did you mean")
    pytest.raises(SpecdecError, trained, tmp_path, "mini").match(
        "no drafter preset 'mini' any more; use 'small'"
    )
    nowhere = str(tmp_path / "nowhere")
    pytest.raises(SpecdecError, trained, tmp_path, target=nowhere).match(
        "neither a folder nor a hub id"
    )
