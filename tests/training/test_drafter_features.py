"""A fixed text: kept features are the target's, every document is read as often as asked, and what
held-out text says.
"""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.chats import CHATS, chat_target, curve_of, same_weights, weights_of
from fakes.killed import killed_at
from transformers import GraniteConfig, GraniteForCausalLM

from specdec.data.toy_chats import CorpusChats
from specdec.errors import SpecdecError
from specdec.models.eagle_files import read_checkpoint
from specdec.training.drafter import chats as chats_module
from specdec.training.drafter import eagle3
from specdec.training.drafter import texts as texts_module
from specdec.training.drafter.accuracy import TAU, TOP1, learning_curve
from specdec.training.drafter.chats import (
    ANSWER,
    PROMPT,
    Document,
    conversation_document,
    load_conversations,
)
from specdec.training.drafter.generate_data import ChatFiles
from specdec.training.drafter.objective import FrozenTarget
from specdec.training.drafter.presets import Budget, CacheConfig, Settings
from specdec.training.drafter.texts import FeatureCache, FixedText, split, taught_places
from specdec.training.drafter.ttt import LossRules, TrainingTimeTest

PASSES = Settings(
    48, fc_norm="each", batch=2, length=48, steps=None, passes=12, warmup_steps=2, head_rate=0.005
)
PASSES = replace(PASSES, held_out=2, held_out_frac=0.4, average_frac=0.3)
OBJECTIVE = TrainingTimeTest(LossRules(steps=3))
MANY = [
    [
        {"role": "user", "content": f"Say {word} {n}."},
        {"role": "assistant", "content": f"{word} {n} and no more."},
    ]
    for word in ("wood", "iron", "rain")
    for n in range(7)
]


def documents():
    return [conversation_document(chat_target()[1], chat) for chat in CHATS]


def trained(out_dir, cache, settings=PASSES, **options):
    budget = Budget(features=CacheConfig(*cache))
    options = dict(objective=OBJECTIVE, settings=settings, budget=budget) | options
    return eagle3.train_drafter(chat_target(), CHATS, out_dir=out_dir, **options)


@pytest.fixture
def small_shards(monkeypatch):
    """Two documents a shard; yields the list of documents that the target reads."""
    read, real = [], FeatureCache._compute
    monkeypatch.setattr(texts_module, "SHARD_TOK", 40)
    monkeypatch.setattr(
        FeatureCache, "_compute", lambda self, *a: read.append(a[1]) or real(self, *a)
    )
    return read


def test_kept_features_and_logits_are_the_targets(tmp_path, small_shards):
    target, texts = FrozenTarget(chat_target()[0], (2, 3, 4)), documents()
    text = FixedText(texts, [], Settings(length=64, batch=2, passes=1), 0, "cpu")
    text.prepare(target, CacheConfig(tmp_path))
    batch = text.batch(0)
    live = target(replace(batch, output=None))
    assert target(batch) is batch.output
    real = batch.documents >= 0
    torch.testing.assert_close(
        batch.output.features[real], live.features[real], rtol=0.01, atol=1e-3
    )
    kinds = chats_module.lay_out(texts, [text.rows[row] for row in text._rows_of(0, 1)], 64).kind
    taught = torch.from_numpy(kinds == ANSWER)
    taught[:, 1:] |= taught[:, :-1] & (batch.documents[:, 1:] == batch.documents[:, :-1])
    rows, columns = taught.nonzero(as_tuple=True)
    some = torch.arange(3, 200, 7)
    kept, wanted = batch.output.logits.at(rows, columns, some), live.logits.at(rows, columns, some)
    assert len(rows) > 20 and torch.equal(kept[1], wanted[1])
    torch.testing.assert_close(kept[0], wanted[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(kept[2], wanted[2], rtol=1e-4, atol=1e-4)


def test_shards_are_made_once(tmp_path, small_shards):
    target, texts = FrozenTarget(chat_target()[0], (2, 3, 4)), documents()
    with killed_at(FeatureCache, "_write", 1):
        FeatureCache(target, texts, CacheConfig(tmp_path)).fill(progress=False)
    small_shards.clear()
    whole = FeatureCache(target, texts, CacheConfig(tmp_path))
    whole.fill(progress=False)
    assert [list(item.ids) for item in small_shards] == [list(item.ids) for item in texts[2:]]
    files = list(tmp_path.rglob("*"))
    assert (
        0
        < whole.gb * 1e9
        <= sum(file.stat().st_size for file in files if file.is_file())
        <= whole.gb * 1e9 + 3000
    )
    small_shards.clear()
    longer = FeatureCache(target, [*texts, texts[0]], CacheConfig(tmp_path))
    longer.fill(progress=False)
    assert len(small_shards) == 1  # what is new
    assert all(torch.equal(*pair) for pair in zip(longer.read(6), whole.read(0), strict=True))
    FeatureCache(FrozenTarget(chat_target()[0], (2, 3, 5)), texts, CacheConfig(tmp_path)).fill(
        progress=False
    )
    assert len(small_shards) == 7  # other taps


def test_features_that_cannot_be_kept_are_refused_in_a_sentence(
    tmp_path, small_shards, monkeypatch
):
    def cache(model=chat_target, **limit):
        return FeatureCache(
            FrozenTarget(model()[0], (2, 3, 4)), documents(), CacheConfig(tmp_path, **limit)
        )

    pytest.raises(SpecdecError, cache(limit_gb=1e-6).fill).match("more than the limit of 1e-06 GB")
    with monkeypatch.context() as patch:
        patch.setattr(texts_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        pytest.raises(SpecdecError, cache().fill).match("0.00 GB are free")
    assert not list(tmp_path.iterdir())
    scaled = functools.partial(chat_target, GraniteForCausalLM, GraniteConfig, logits_scaling=4.0)
    changed = pytest.raises(SpecdecError, cache(scaled).fill, progress=False)
    changed.match("GraniteForCausalLM changes its head.s logits")
    cache().fill(progress=False)
    for file in cache().folder.iterdir():
        file.write_bytes(b"damaged")
    pytest.raises(SpecdecError, cache().read, 0).match("cannot be read")


def test_training_on_kept_features_is_training_beside_the_target(tmp_path, small_shards):
    kept, beside = (
        trained(tmp_path / name, (tmp_path / "f", gb)) for name, gb in (("kept", 1), ("beside", 0))
    )
    curves = [curve_of(folder.parent) for folder in (kept, beside)]
    assert len(curves[0]) == len(curves[1]) > 10
    assert len(small_shards) == sum(map(len, split(CHATS, PASSES)))
    np.testing.assert_allclose(curves[0]["loss"], curves[1]["loss"], rtol=0.02)
    np.testing.assert_allclose(
        curves[0]["missing_mass_frac"], curves[1]["missing_mass_frac"], atol=0.01
    )
    assert curves[0]["loss"].iloc[-1] < 0.8 * curves[0]["loss"].iloc[0]
    assert read_checkpoint(kept).config.fc_norm == "each"


def test_a_killed_run_continues_to_the_same_weights_and_measurements(tmp_path, monkeypatch):
    monkeypatch.setattr(Settings, "is_measured", lambda self, step: step % 3 == 0)
    whole = trained(tmp_path / "whole", (tmp_path / "f",))
    with killed_at(eagle3.DrafterRun, "step", 5):
        trained(tmp_path / "cut", (tmp_path / "f",))
    unfinished = learning_curve(tmp_path / "cut")
    assert same_weights(whole, trained(tmp_path / "cut", (tmp_path / "f",)))
    curves = [learning_curve(tmp_path / name) for name in ("whole", "cut")]
    pd.testing.assert_frame_equal(*curves)
    pd.testing.assert_frame_equal(unfinished, curves[0].head(2))
    assert curves[0]["step"].tolist()[:2] == [0, 3] and (curves[0]["rate_frac"].iloc[2:] == 1).all()
    assert curves[0][TAU].iloc[-1] > curves[0][TAU].iloc[0] and curves[0][TOP1].between(0, 1).all()


def test_the_average_weighs_the_last_part_of_the_steps(tmp_path, monkeypatch):
    weights, real = [], eagle3.DrafterRun._add_to_average

    def noted(self, number):
        weights.append(self.network.fc.weight.detach().clone())
        real(self, number)
        assert torch.equal(self.parts["average"].fc.weight, self.result.fc.weight)

    monkeypatch.setattr(eagle3.DrafterRun, "_add_to_average", noted)
    folder = trained(tmp_path, (tmp_path / "f",))
    shares = [1 / max(1, 0.3 * (number + 1)) for number in range(len(weights))]
    parts = [
        share * np.prod([1 - later for later in shares[number + 1 :]])
        for number, share in enumerate(shares)
    ]
    assert sum(parts) == pytest.approx(1) and sum(parts[len(parts) // 2 :]) > 0.8
    mean = sum(part * weight for part, weight in zip(parts, weights, strict=True))
    torch.testing.assert_close(weights_of(folder)["fc.weight"].float(), mean, rtol=0.01, atol=1e-4)


def test_answers_stand_as_they_were_sampled_and_odd_line_ends_can_be_continued_and_read(tmp_path):
    tokenizer = chat_target()[1]
    user = {"role": "user", "content": "Say wood."}
    rows = [
        {
            "messages": [user, {"role": "assistant", "content": "wood"}],
            "temperature": 0.7,
            "answer_ids": [9, 8, 7, 2],
        },
        {"messages": [user], "temperature": 0, "answer_ids": [5]},
        {"messages": CHATS[0]},
    ]
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    (tmp_path / "1.jsonl").write_text(
        json.dumps(rows[0], ensure_ascii=False).replace("wood", "wo\u2028od")
    )
    chats = load_conversations(tmp_path)
    assert [chat[-1].get("temperature") for chat in chats] == [0.7, 0, None] and chats[2] == CHATS[
        0
    ]
    first = conversation_document(tokenizer, chats[1])
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    assert first.ids.tolist() == [*prompt, 5] and (first.kind == ANSWER).tolist() == [False] * len(
        prompt
    ) + [True]
    assert taught_places(conversation_document(tokenizer, chats[0])).sum() == 4
    middle = Document(np.arange(5), np.array([PROMPT, ANSWER, PROMPT, PROMPT, ANSWER], np.uint8))
    assert taught_places(middle).tolist() == [False, True, True, False, True], (
        "and the token after an answer"
    )
    foreign = [user, {"role": "assistant", "content": "", "answer_ids": [10**6]}]
    pytest.raises(SpecdecError, conversation_document, tokenizer, foreign).match(
        "of another tokenizer"
    )
    (tmp_path / "2.jsonl").write_text(json.dumps(rows[1] | {"part": "held-out"}))
    assert load_conversations(tmp_path)[1][-1]["part"] == "held-out"
    for bad in (
        {"answer_ids": []},
        {"answer_ids": ["a"]},
        {"answer_ids": [1], "temperature": "hot"},
    ):
        (tmp_path / "1.jsonl").write_text(json.dumps({"messages": [user]} | bad))
        wrong = pytest.raises(SpecdecError, load_conversations, tmp_path)
        wrong.match(r"1\.jsonl, line 1: (answer_ids|temperature) must be")
    odd = tmp_path / "odd line ends"
    files = ChatFiles(odd, {"target": "t"})
    user = {"role": "user", "content": "Say\u2028wood."}
    row = {
        "messages": [user, {"role": "assistant", "content": "wood\x85en"}],
        "temperature": 0,
        "answer_ids": [5, 6],
    }
    files.write([(0, row), *((number, None) for number in range(1, 64))])
    files.write([(number, None) for number in files.next_numbers])
    assert ChatFiles(odd, {"target": "t"}).answer_tok == 2
    assert [chat[-1]["answer_ids"] for chat in load_conversations(odd)] == [[5, 6]]


def test_every_document_is_read_once_a_pass(tmp_path):
    lengths = (30, 7, 12, 20, 41, 5, 3, 18)
    texts = [Document(np.full(n, n), np.full(n, ANSWER, np.uint8)) for n in lengths]
    text = FixedText(texts, [], Settings(length=32, batch=2, passes=4), 1, "cpu")
    lengths = [min(n, 32) for n in lengths]
    assert sorted(index for row in text.rows for index in row) == list(range(len(texts)))
    assert all(sum(lengths[index] for index in row) <= 32 for row in text.rows)
    batches = [text.batch(number) for number in range(text.steps)]
    ids = torch.cat([batch.ids[batch.documents >= 0] for batch in batches])
    assert text.steps * 2 // len(text.rows) == 4
    assert torch.bincount(ids)[41] == 4 * 32
    assert torch.bincount(ids)[7] == 4 * 7
    counts = text.answer_counts(50)
    assert counts[41] == 32 and counts[7] == 7 and counts.sum() == sum(lengths)
    assert text.progress(0) == {"seen_tok": 0, "distinct_tok": 0}
    assert text.progress(text.steps) == {"seen_tok": 4 * sum(lengths), "distinct_tok": sum(lengths)}
    tokens = [int((batch.documents >= 0).sum()) for batch in batches]
    read = [text.progress(step)["seen_tok"] for step in range(text.steps)]
    assert read == [sum(tokens[:step]) for step in range(text.steps)]
    orders = [text._reads[number * len(text.rows) :][: len(text.rows)] for number in range(4)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    lengths = np.random.default_rng(0).integers(1, 60, 300).tolist()
    rows = chats_module.first_fit(lengths, 60)
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert sorted(index for row in rows for index in row) == list(range(300))
    assert max(filled) <= 60 and np.mean(filled) > 0.95 * 60


def test_the_side_of_a_chat_follows_from_its_prompt(tmp_path):
    def chat(prompt, **answer):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": "a"} | answer]

    def prompts(conversations):
        return {chat[0]["content"] for chat in conversations}

    chats = [chat(f"q{n}") for n in range(400)]
    chats[7][1]["temperature"] = 0.7
    settings = Settings(held_out=1000, held_out_frac=0.25)
    learned, held_out = split(chats, settings)
    assert 60 < len(held_out) < 140 and len(learned) + len(held_out) >= 399
    assert prompts(held_out) <= prompts(split([*chats[::-1], chat("x")], settings)[1])
    assert not any(chat[1].get("temperature") for chat in held_out)
    assert split(chats, Settings()) == (chats, [])
    chats[8] = chat("q8", part="held-out")
    chats[9] = chat("q9", part="train")
    sides = []
    for frac in (0.0, 1.0):
        sides.append([len(side) for side in split(chats, replace(settings, held_out_frac=frac))])
    assert sides == [[399, 1], [1, 398]]
    plain = [chat(f"q{n}") for n in range(400)]
    whole = replace(settings, held_out_frac=1.0)
    none = replace(settings, held_out_frac=1e-6)
    pytest.raises(SpecdecError, split, plain, whole).match("all 400 conversations are held out")
    few = pytest.raises(SpecdecError, split, plain[:3], none)
    few.match("no greedy answer among 3 conversations is held out")
    options = dict(out_dir=tmp_path, settings=PASSES, objective=OBJECTIVE)
    train = eagle3.train_drafter
    endless = pytest.raises(SpecdecError, train, chat_target(), CorpusChats(), **options)
    endless.match("must be a list of conversations")
