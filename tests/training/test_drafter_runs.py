"""How runs of drafters are put together: optimisers, rates, fresh networks, plans, agreement."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of, weights_of
from fakes.refusals import refusal

from specdec import runs
from specdec.models.eagle_network import EagleConfig, default_taps
from specdec.training.drafter import eagle3
from specdec.training.drafter.chats import ChatList
from specdec.training.drafter.eagle3 import optimizers, train_drafter
from specdec.training.drafter.objective import TokenBatch
from specdec.training.drafter.presets import Budget, Continued, Settings
from specdec.training.drafter.ttt import LossRules, Supervised
from specdec.training.loop import mixed_seed, rate_factor

from workbook.pictures import training_curves, training_results

TOY = Settings(48, steps=4, batch=2, length=48, warmup_steps=2)


def test_rates_rise_and_fall():
    assert [rate_factor(step, 100, 4) for step in (0, 1, 3, 50)] == [0.25, 0.5, 1.0, 1.0]
    result = [rate_factor(step, 100, 0) for step in (65, 72, 86, 100)]
    assert result == pytest.approx([1.0, 0.8, 0.4, 0.0])
    result = [rate_factor(step, None, 10, 110) for step in (4, 10, 60, 110, 200)]
    assert result == pytest.approx([0.5, 1, 0.5, 0, 0])
    # an average needs no falling rate
    averaged = Settings(warmup_steps=2, average_frac=0.3)
    assert [averaged.rate_factor(step, 100) for step in (0, 1, 99)] == [0.5, 1.0, 1.0]
    assert Settings(warmup_steps=2).rate_factor(99, 100) == pytest.approx(1 / 35)
    continued = Continued()
    assert continued.rate_factor(5, None) == 1.0
    result = [continued.rate_factor(step, 200) for step in (0, 5, 100, 200, 300)]
    cosine = 0.5 * (1 + math.cos(math.pi * 5 / 200))
    assert result == pytest.approx([1 / 6, cosine, 0.5, 0.0, 0.0])


def test_seeds_of_steps_differ():
    seeds = {mixed_seed(seed, number) for seed in range(4) for number in range(-1, 4)}
    assert len(seeds) == 20 and all(0 <= seed < 2**63 for seed in seeds)


def test_curves_and_results_of_several_runs_in_one_table(tmp_path):
    names = {"first": tmp_path / "a", "second": tmp_path / "b"}
    steps = np.arange(1, 7) * 10
    for number, folder in enumerate(names.values()):
        curve = {"steps": steps, "reward": steps + number, "entropy": 1.0, "tok_per_ms": 0.5}
        runs.write_table(folder / "curve.parquet", pd.DataFrame(curve))
        plan = {"settings": {"ppo": {"total_steps": 60}}, "elapsed_s": 120.0}
        runs.write_json(folder / "plan.json", plan)
    drawn = training_curves(names, points=3)
    second = drawn[(drawn["run"] == "second") & (drawn["what"] == "reward")]
    assert second["steps"].tolist() == [20, 40, 60]
    assert second["value"].tolist() == [16.0, 36.0, 56.0]
    row = training_results(names).iloc[1].to_dict()
    assert row == {"run": "second", "steps": 60, "minutes": 2.0, "steps_per_s": 0.5}


def network_for(settings, kind="eagle3"):
    model, _ = chat_target()
    return eagle3.new_network(model, settings, np.arange(model.config.vocab_size) % 50, 3, kind)


def test_matrices_are_for_muon_and_the_rest_for_adam():
    settings = Settings(48, learning_rate=0.02, head_rate=0.003)
    network = network_for(settings)
    names = {id(weight): name for name, weight in network.named_parameters()}
    (adam,), (muon,) = (optimizer.param_groups for optimizer in optimizers(network, settings))
    by_muon = {names[id(weight)] for weight in muon["params"]}
    matrices = {name for name, weight in network.named_parameters() if weight.ndim == 2}
    assert by_muon == matrices - {"lm_head.weight"}
    assert {names[id(weight)] for weight in adam["params"]} == set(names.values()) - by_muon
    expected = {"lr": 0.003, "peak": 0.003, "betas": (0.9, 0.95), "weight_decay": 0.0}
    assert {name: adam[name] for name in expected} == expected
    expected = {"lr": 0.02, "peak": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    assert {name: muon[name] for name in expected} == expected


def test_noise_on_features_follows_from_seed_and_step():
    output = SimpleNamespace(features=torch.zeros(4, 64, 30))
    batch = TokenBatch(torch.zeros(4, 64, dtype=torch.long), step=3)
    objective = Supervised(noise=0.1)
    first = objective._noisy(output, batch)
    width = 0.1 * 512 / 64
    assert first.abs().max() <= width / 2 and float(first.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(first.std()) == pytest.approx(width / 12**0.5, rel=0.02)
    assert torch.equal(first, objective._noisy(output, batch))
    assert not torch.equal(first, replace(objective, seed=1)._noisy(output, batch))
    assert not torch.equal(first, objective._noisy(output, replace(batch, step=4)))


def test_agreement_of_drafts_by_hand(monkeypatch):
    first = np.zeros((3, 8), dtype=bool)
    # token i + step + 2 is the first choice of slot i
    first[0] = [0, 1, 0, 1, 0, 1, 1, 1]
    first[1] = [0, 1, 1, 0, 1, 1, 1, 1]
    first[2] = [0, 1, 1, 1, 1, 1, 1, 1]
    monkeypatch.setattr(eagle3, "_first_choices", lambda *given: first.copy())
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
    text = TokenBatch(torch.zeros(1, 8, dtype=torch.long), mask)
    result = eagle3.draft_accuracy(None, None, [text], drafts=3)
    # slots 1 .. 4 draft tokens 3 .. 6 at step 0, and two of these are right; token 2 comes from the
    # prompt, three are right behind it (slot 1), and the bonus token 6 ends the answer
    expected = {"cycles": 1, "emitted_tok": 4, "tau_chain": 4.0, "top1_frac": 0.5}
    assert result == expected
    # two answers, with a slot that drafts none and one that drafts across the end
    first[:] = [[0, 0, 1, 0, 0, 1, 1, 0]] * 3
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1]])
    text = TokenBatch(torch.zeros(1, 8, dtype=torch.long), mask)
    result = eagle3.draft_accuracy(None, None, [text], drafts=3)
    expected = {"cycles": 4, "emitted_tok": 4, "tau_chain": 1.0, "top1_frac": 0.25}
    assert result == expected


def test_a_fresh_network_is_that_of_its_target_over_the_commonest_tokens(tmp_path):
    model, _ = chat_target()
    vocabulary = model.config.vocab_size
    warm = network_for(Settings(48))
    eps = model.config.rms_norm_eps
    config = EagleConfig(32, 48, 2, 1, vocabulary, 48, 32, rms_norm_eps=eps, taps=default_taps(7))
    assert warm.config == config
    kept = warm.t2d.nonzero().squeeze(1)
    counts = np.arange(vocabulary) % 50
    assert len(kept) == 48 and counts[kept].min() >= np.sort(counts)[-48]
    assert torch.equal(warm.lm_head.weight, model.lm_head.weight[kept])
    assert torch.equal(network_for(Settings(48)).fc.weight, warm.fc.weight)
    other = network_for(Settings(None, intermediate_size=20, fc_norm="each")).config
    fields = dict(draft_vocab_size=vocabulary, intermediate_size=20, fc_norm="each")
    assert other == replace(config, **fields)
    last = (7,)
    single = replace(config, generation=1, num_taps=1, taps=last, fc_bias=True)
    for kind in ("eagle1", "griffin"):
        assert network_for(TOY, kind).config == replace(single, griffin=kind == "griffin")
    for kind in ("medusa", "hydra"):
        heads = network_for(TOY, kind).config
        assert (heads.taps, heads.draft_vocab_size) == (last, 48)
    model.save_pretrained(tmp_path / "target")
    cpu = torch.device("cpu")
    assert "has no tokenizer" in refusal(eagle3.load_target, tmp_path / "target", cpu)


def test_a_run_notes_what_it_depends_on_and_what_it_measured(tmp_path):
    settings = replace(TOY, passes=3, steps=None, held_out=2, held_out_frac=0.4)
    objective = Supervised(LossRules(2))
    options = dict(objective=objective, settings=settings, budget=Budget(seed=4))
    assert train_drafter(chat_target(), CHATS, out_dir=tmp_path, **options) == tmp_path / "drafter"
    plan = runs.read_json(tmp_path / "drafter_training" / "plan.json")
    described = {"settings": settings, "objective": objective, "seed": 4}
    described |= {"target": "LlamaForCausalLM", "conversations": ChatList(CHATS).key}
    described |= dict.fromkeys(("start_from", "minutes", "steps"))
    assert plan["settings"] == runs.plain(described)
    curve = curve_of(tmp_path)
    assert len(curve) == plan["last_step"] == plan["steps_done"] and (curve["batch_tok"] > 0).all()
    assert plan["results"]["held_out_tau_chain"] >= 1
    # the official layout
    folder = tmp_path / "drafter"
    config = runs.read_json(folder / "config.json")
    fields = dict(draft_vocab_size=48, rope_theta=10000.0, hidden_size=32)
    fields["max_position_embeddings"] = 128
    assert {name: config[name] for name in fields} == fields
    weights = weights_of(folder)
    assert weights["fc.weight"].shape == (32, 96) and "embed_tokens.weight" not in weights
    kept = torch.arange(48) + weights["d2t"]
    assert kept.tolist() == weights["t2d"].nonzero().squeeze(1).tolist()
