"""How runs of drafters are put together: optimisers, rates, text, what a run notes; agreement and
measures by hand.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of

from specdec import runs
from specdec.errors import SpecdecError
from specdec.models.eagle_network import EagleConfig, default_taps
from specdec.training.drafter import accuracy, chats, networks, texts
from specdec.training.drafter.chats import (
    ANSWER,
    LIBRARY,
    PROMPT,
    Batch,
    ChatList,
    Document,
    Regeneration,
    Rows,
)
from specdec.training.drafter.eagle3 import optimizers, train_drafter
from specdec.training.drafter.objective import FrozenTarget, TokenBatch
from specdec.training.drafter.ppow import Ppow, Windows
from specdec.training.drafter.presets import Budget, Continued, Settings
from specdec.training.drafter.texts import FixedText, StreamedText, token_batch
from specdec.training.drafter.ttt import LossRules, Supervised, TrainingTimeTest
from specdec.training.loop import batches, in_use, mixed_seed, rate_factor

from workbook.pictures import training_curves, training_results

TOY = Settings(48, steps=4, batch=2, length=48, warmup_steps=2)


def test_rates_rise_and_fall_and_curves_and_results_of_several_runs(tmp_path):
    assert [rate_factor(step, 100, 4) for step in (0, 1, 3, 50)] == [0.25, 0.5, 1.0, 1.0]
    assert [rate_factor(step, 100, 0) for step in (65, 72, 86, 100)] == pytest.approx(
        [1.0, 0.8, 0.4, 0.0]
    )
    assert [rate_factor(step, None, 10, 110) for step in (4, 10, 60, 110, 200)] == pytest.approx(
        [0.5, 1, 0.5, 0, 0]
    )
    kept = Settings(warmup_steps=2, average_frac=0.3)
    assert [kept.rate_factor(step, 100) for step in (0, 1, 99)] == [0.5, 1.0, 1.0], (
        "an average needs no falling rate"
    )
    assert Settings(warmup_steps=2).rate_factor(99, 100) == pytest.approx(1 / 35)
    continued = Continued()
    assert continued.rate_factor(5, None) == 1.0
    wanted = [1 / 6, 1.0 * 0.5 * (1 + math.cos(math.pi * 5 / 200)), 0.5, 0.0, 0.0]
    found = [continued.rate_factor(step, 200) for step in (0, 5, 100, 200, 300)]
    assert found == pytest.approx(wanted)
    assert [step for step in range(80) if continued.is_measured(step)] == [0, 25, 50, 75]
    assert [step for step in range(600) if kept.is_measured(step)] == [
        64,
        91,
        128,
        182,
        256,
        363,
        512,
    ]
    names = {"first": tmp_path / "a", "second": tmp_path / "b"}
    for number, folder in enumerate(names.values()):
        steps = np.arange(1, 7) * 10
        curve = {"steps": steps, "reward": steps + number, "entropy": 1.0, "tok_per_ms": 0.5}
        runs.write_table(folder / "curve.parquet", pd.DataFrame(curve))
        found = {
            "steps": 60,
            "elapsed_s": 120.0,
            "answers": 3,
            "most_common": [4, number],
            "most_common_frac": 0.5,
        }
        runs.write_json(folder / "plan.json", {"results": found})
    drawn = training_curves(names, points=3)
    assert list(drawn) == ["run", "steps", "what", "value"] and drawn.index.tolist() == list(
        range(18)
    )
    first = drawn[(drawn["run"] == "second") & (drawn["what"] == "reward")]
    assert first["steps"].tolist() == [20, 40, 60] and first["value"].tolist() == [16.0, 36.0, 56.0]
    assert (
        drawn["what"].unique().tolist() == ["reward", "entropy", "tok_per_ms"]
        and len(training_curves(names)) == 36
    )
    told = {
        "run": ["first", "second"],
        "steps": [60] * 2,
        "minutes": [2.0] * 2,
        "steps_per_s": [0.5] * 2,
    }
    told |= {"answers": [3] * 2, "commonest": ["4/0", "4/1"], "commonest_frac": [0.5] * 2}
    assert training_results(names).to_dict("list") == told
    torch.manual_seed(0)
    parts = list(batches(7, 3))
    assert [len(part) for part in parts] == [3, 3, 1] and sorted(torch.cat(parts).tolist()) == list(
        range(7)
    )
    seeds = {mixed_seed(seed, number) for seed in range(4) for number in range(-1, 4)}
    assert len(seeds) == 20 and all(0 <= seed < 2**63 for seed in seeds)


def network_for(settings, kind="eagle3"):
    model, _ = chat_target()
    return networks.new_network(model, settings, np.arange(model.config.vocab_size) % 50, 3, kind)


def test_optimisers_layouts_agreement_of_drafts_and_measures_of_windows_by_hand(monkeypatch):
    settings = Settings(48, learning_rate=0.02, head_rate=0.003, betas=(0.8, 0.9))
    network = network_for(settings)
    adam, muon = optimizers(network, settings)
    names = {id(weight): name for name, weight in network.named_parameters()}
    (first,), (second,) = adam.param_groups, muon.param_groups
    by_adam, by_muon = (
        {names[id(weight)] for weight in group["params"]} for group in (first, second)
    )
    matrices = {name for name, weight in network.named_parameters() if weight.ndim == 2}
    assert by_muon == matrices - {"lm_head.weight"} and by_adam == set(names.values()) - by_muon
    assert "lm_head.weight" in by_adam and "norm.weight" in by_adam
    wanted = {"lr": 0.003, "peak": 0.003, "betas": (0.8, 0.9), "weight_decay": 0.0, "fused": True}
    assert {name: first[name] for name in wanted} == wanted
    wanted = {"lr": 0.02, "peak": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    assert {name: second[name] for name in wanted} == wanted
    (alone,) = optimizers(network, replace(settings, muon=False, head_rate=None))
    assert (
        len(alone.param_groups[0]["params"]) == len(names) and alone.param_groups[0]["peak"] == 0.02
    )
    output = SimpleNamespace(features=torch.zeros(4, 64, 30))
    batch = TokenBatch(torch.zeros(4, 64, dtype=torch.long), step=3)
    texts = ((0, batch), (0, batch), (1, batch), (0, replace(batch, step=4)))
    first, *others = (Supervised(noise=0.1, seed=seed)._noisy(output, one) for seed, one in texts)
    width = 0.1 * 512 / 64
    assert first.abs().max() <= width / 2 and float(first.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(first.std()) == pytest.approx(width / 12**0.5, rel=0.02)
    assert [torch.equal(first, other) for other in others] == [True, False, False]
    assert Supervised()._noisy(output, batch) is output.features
    kinds = ((2, PROMPT), (3, ANSWER), (1, LIBRARY))
    documents = [Document(np.full(n, 10 + n), np.full(n, kind, np.uint8)) for n, kind in kinds]
    packed = chats.lay_out(documents, [[1, 0], [2]], 6)
    assert packed.ids.tolist() == [[13, 13, 13, 12, 12, 0], [11, 0, 0, 0, 0, 0]]
    assert packed.kind.tolist() == [[2, 2, 2, 1, 1, 0], [3, 0, 0, 0, 0, 0]]
    assert packed.document.tolist() == [[1, 1, 1, 0, 0, -1], [2, -1, -1, -1, -1, -1]]
    batch = token_batch(packed, "cpu", 7)
    assert batch.loss_mask.tolist()[0] == [True] * 3 + [False] * 3 and (
        batch.step,
        batch.output,
    ) == (7, None)
    assert (
        torch.equal(batch.documents, torch.from_numpy(packed.document))
        and token_batch(packed, "cpu").step == 0
    )
    rows = Rows(lambda seed: iter(documents * 40), seed=0, length=6, block_rows=4)
    text = StreamedText(rows, 2, "cpu")
    assert (
        torch.equal(text.batch(1).ids, torch.from_numpy(rows.block(0).ids[2:]))
        and text.batch(1).step == 1
    )
    first = rows.block(0)
    counts = np.bincount(first.ids[first.kind == ANSWER], minlength=20)
    assert (text.answer_counts(20) == counts).all() and text.progress(9) == {}
    assert isinstance(rows.batch(0, 2), Batch)
    ranks = np.array(
        [[9, 0, 1, 0, 2, 0, 0, 0], [9, 0, 0, -1, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0, 0, 0]]
    )
    asked = []
    monkeypatch.setattr(accuracy, "_ranks", lambda *given: asked.append(given[-1]) or ranks)
    frozen = type(
        "T", (), {"embedding": None, "__call__": lambda self, text: SimpleNamespace(features=None)}
    )()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
    text = TokenBatch(torch.zeros(1, 8, dtype=torch.long), mask)
    found = accuracy.draft_accuracy(None, frozen, [text], drafts=3, top_k=3)
    assert asked == [(3, 3, 1)]
    # step 0: slots 1 .. 4 draft tokens 3 .. 6, ranks 0 1 0 2; step 1: slots 1 .. 3, ranks 0 0 -1;
    # step 2: slots 1, 2: 0 0
    table = found["table"]
    assert table.to_dict("list") == {
        "draft_step": [0, 1, 2],
        "positions_tok": [4, 3, 2],
        "top1_frac": [2 / 4, 2 / 3, 2 / 2],
        "topk_frac": [4 / 4, 2 / 3, 2 / 2],
        "reached_frac": [2 / 4, 1 / 3, 1 / 2],
    }
    np.testing.assert_allclose(found["rank_frac"], [[0.5, 0.25, 0.25], [2 / 3, 0, 0], [1, 0, 0]])
    # token 2 comes from the prompt; from it three are right (slot 1), and the bonus token 6 ends
    # the answer
    assert (found["cycles"], found["emitted_tok"], found["tau_chain"]) == (1, 4, 4.0)
    silent = [replace(text, loss_mask=0 * mask)]
    none = pytest.raises(
        SpecdecError, accuracy.draft_accuracy, None, frozen, silent, drafts=3, top_k=3
    )
    none.match("no answer of two tokens or more")
    assert accuracy._spans(np.array([1, 1, 0, 1, 0, 0, 1], dtype=bool)) == [(0, 2), (3, 4), (6, 7)]
    accepted = np.array([0, 2, 0, 0, 1, 0, 0, 0])
    assert (
        accuracy._chain_cycles(accepted, 2, 8) == 2
        and accuracy._chain_cycles(accepted, 3, 8) == 4 - 1
    )
    usable = torch.tensor([[True, True], [True, False]])
    rewards = torch.tensor([[1.0, 1.0, 2.0, 4.0], [3.0, 3.0, 9.0, 9.0]])
    accepted = torch.tensor([[1.0, 0.0, 2.0, 3.0], [0.0, 0.0, 9.0, 9.0]])
    log_p = torch.tensor([0.5, 0.25]).log().expand(2, 4, 3, 2)
    windows = Windows(None, None, None, log_p, None, accepted, rewards, usable, None)
    none = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    near = torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.5, 0.0, 0.5, 0.5]])
    found = Ppow(group=2)._measures(windows, none, near, 0.75)
    assert found == {
        "reward": pytest.approx(14 / 6),
        "accepted_tok": pytest.approx(1.0),
        "none_frac": pytest.approx(0.5),
        "proximity_frac": pytest.approx(2 / 6),
        "paid_frac": pytest.approx(2 / 3),
        "epsilon": 2.0,
        "zero_variance_frac": pytest.approx(2 / 3),
        "missing_mass_frac": pytest.approx(0.25),
        "hard_frac": 0.75,
        "windows": 6,
    }
    model, _ = chat_target()
    drafter, target = network_for(TOY), FrozenTarget(model, (2, 3, 4))
    weights, body = (sum(weight.numel() for weight in one.parameters()) for one in (drafter, model))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    body -= 0 if tied else model.model.embed_tokens.weight.numel()
    assert Ppow(gamma=None)._gamma(drafter, target) == pytest.approx(weights / body)
    assert Ppow()._gamma(drafter, target) == 0.12


def test_a_fresh_network_is_that_of_its_target_over_the_commonest_tokens(tmp_path):
    model, _ = chat_target()
    vocabulary, text = model.config.vocab_size, model.config
    warm, cold = network_for(Settings(48)), network_for(Settings(48, warm_start=False))
    config = EagleConfig(
        32, 48, 2, 1, vocabulary, 48, 32, rms_norm_eps=text.rms_norm_eps, taps=default_taps(7)
    )
    assert warm.config == config and config.generation == 3 and len(config.taps) == 3
    counts = np.arange(vocabulary) % 50
    kept = warm.t2d.nonzero().squeeze(1)
    assert len(kept) == 48 and counts[kept].min() >= np.sort(counts)[-48]
    assert torch.equal(warm.lm_head.weight, model.lm_head.weight[kept])
    assert not torch.equal(cold.lm_head.weight, warm.lm_head.weight)
    assert torch.equal(network_for(Settings(48)).fc.weight, warm.fc.weight)
    other = network_for(Settings(None, intermediate_size=20, fc_norm="each")).config
    assert other == replace(
        config, draft_vocab_size=vocabulary, intermediate_size=20, fc_norm="each"
    )
    assert network_for(Settings(10**6)).config.draft_vocab_size == vocabulary
    last = (text.num_hidden_layers,)
    single = replace(config, generation=1, num_taps=1, taps=last, fc_bias=True)
    for kind in ("eagle1", "griffin"):
        assert network_for(TOY, kind).config == replace(single, griffin=kind == "griffin")
    for kind, path in (("medusa", None), ("hydra", "state"), ("hydra++", "layer")):
        made = network_for(TOY, kind).config
        assert (made.path, made.taps, made.draft_vocab_size, made.vocab_size) == (
            path,
            last,
            48,
            vocabulary,
        )
        assert (made.layer is None) == (kind != "hydra++")
    pytest.raises(SpecdecError, network_for, TOY, "eagle4").match(
        "unknown kind of drafter 'eagle4'"
    )
    written = runs.read_json(networks.save_trained(warm, tmp_path / "warm", model) / "config.json")
    assert written["max_position_embeddings"] == text.max_position_embeddings != 2048
    assert (
        networks.check_start(tmp_path / "warm") == tmp_path / "warm"
        and networks.check_start(None) is None
    )
    pytest.raises(SpecdecError, networks.check_start, tmp_path).match(
        "there is no drafter in .* to continue from"
    )
    model.save_pretrained(tmp_path / "target")
    bare = pytest.raises(
        SpecdecError, networks.load_target, tmp_path / "target", torch.device("cpu")
    )
    bare.match("has no tokenizer")


def test_a_run_notes_what_it_depends_on_and_what_it_measured(tmp_path, capsys):
    settings = replace(TOY, passes=3, steps=None, held_out=2, held_out_frac=0.4)
    objective = TrainingTimeTest(LossRules(2))
    options = dict(objective=objective, settings=settings, budget=Budget(seed=4))
    assert train_drafter(chat_target(), CHATS, out_dir=tmp_path, **options) == tmp_path / "drafter"
    plan = runs.read_json(tmp_path / "drafter_training" / "plan.json")
    told = {"settings": settings, "objective": objective, "target": "LlamaForCausalLM", "seed": 4}
    told |= dict.fromkeys(("start_from", "minutes", "steps"))
    told["conversations"] = ChatList(CHATS).key
    assert plan["settings"] == in_use(runs.plain(told))
    curve = curve_of(tmp_path)
    measures = ["counted_tok", "missing_mass_frac", "loss_0", "accuracy_0", "loss_1", "accuracy_1"]
    assert list(curve) == ["step", "loss", "grad_norm", "batch_tok", *measures]
    assert len(curve) == plan["last_step"] == plan["steps_done"] and (curve["batch_tok"] > 0).all()
    held = ["held_out_top1_frac", "held_out_tau_chain"]
    assert list(plan["results"]) == [
        "draft_vocab_size",
        "seen_tok",
        "distinct_tok",
        *held,
        "rate_frac",
    ]
    assert plan["results"]["draft_vocab_size"] == 48
    assert plan["results"]["rate_frac"] == settings.rate_factor(len(curve), len(curve))
    streamed = train_drafter(
        chat_target(), CHATS, out_dir=tmp_path / "s", objective=objective, settings=TOY
    )
    told = runs.read_json(tmp_path / "s" / "drafter_training" / "plan.json")["settings"]
    assert (told["conversations"], told["steps"], told["seed"]) == (
        ChatList(CHATS).key,
        4,
        0,
    ) and streamed.is_dir()
    options = dict(out_dir=tmp_path / "n", settings=TOY, start_from=tmp_path / "nowhere")
    missing = pytest.raises(SpecdecError, train_drafter, chat_target(), CHATS, **options)
    missing.match("there is no drafter in .*nowhere to continue from")


def test_what_a_drafter_learns_from_is_written_first_where_settings_ask(tmp_path, monkeypatch):
    def text_of(settings, budget=None):
        given = (ChatList(CHATS), settings, tmp_path, budget or Budget())
        return texts.training_text(*chat_target(), *given)

    calls = []

    def regenerate(*given, **how):
        calls.append((given, how))
        return CHATS[:2]

    monkeypatch.setattr(texts.chats, "regenerate", regenerate)
    settings = replace(TOY, regenerate_chats=3, max_new_tokens=9)
    text = text_of(settings, Budget(minutes=8.0, seed=5))
    key = runs.content_key(prompts=CHATS[:3], seed=5, most=9)[:12]
    given, how = calls.pop()
    assert given == (*chat_target(), CHATS[:3], Regeneration(max_new_tokens=9))
    assert how == {"folder": tmp_path / f"regenerated-{key}", "minutes": 2.0, "seed": 5}
    assert isinstance(text, StreamedText) and (text.size, text.steps) == (2, None)
    assert (text.rows.block_rows, text.rows.length, text.rows.seed) == (64, 48, 5)
    text_of(settings)
    assert calls.pop()[1]["minutes"] is None
    (tmp_path / "checkpoint.safetensors").write_text("")
    text_of(settings, Budget(minutes=8.0))
    assert calls.pop()[1]["minutes"] == 0, "a resumed run adds no text"
    fixed = text_of(replace(settings, passes=3))
    assert isinstance(fixed, FixedText) and len(fixed.documents) == 2 and fixed.held_out == []
    given = replace(TOY, passes=2, held_out=2, held_out_frac=0.5)
    parted = text_of(given, Budget(seed=1))
    learned, held_out = texts.split(CHATS, given)
    assert (len(parted.documents), len(parted.held_out)) == (len(learned), len(held_out))
    assert (parted.length, parted.size) == (48, 2)
    assert len(parted._reads) == 2 * len(parted.rows)
