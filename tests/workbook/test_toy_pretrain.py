"""Training a target: tokenizer, chat spans, packing, the fast forward against transformers, resume to the same bits,
and the start that copies before any training, by position and content alone."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.chats import held_out
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import runs
from specdec.errors import SpecdecError
from specdec.data.toy_chats import CorpusChats
from specdec.data.corpus import training_examples
from specdec.training.drafter import chats as chats_module
from specdec.training.drafter.presets import Budget

from workbook import toy_pretrain as pretrain
from workbook.toy_pretrain import TrainingForward
from workbook.toy_rows import copy_task, library_ids
from workbook.toy_tokenizer import train_tokenizer

TOY = pretrain.Preset(
    320, 32, 2, 2, 48, batch=2, length=64, steps=6, warmup_steps=2, tokenizer_examples=60, library_frac=0.0
)
CHAT = [
    {"role": "user", "content": "Add 12 and 30."},
    {"role": "assistant", "content": "12 + 30 = 42."},
    {"role": "user", "content": "And minus 2?"},
    {"role": "assistant", "content": "40."},
]
# Like Qwen3's: the last answer gets an empty thought, earlier ones do not; contents are stripped.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1_TEMPLATE = (  # of an earlier answer only what follows its thought, and a cue that no history begins with
    "{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1].lstrip() }}"
    "<|im_end|>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
THOUGHT = "It is an end.\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((t for e in training_examples(1, 60) for t in (*e.turns, *e.answers)), 320)


def test_tokenizer_round_trips_and_splits_digits_and_a_longer_chat_continues_a_shorter_one(tokenizer, tmp_path):
    text = "def f(x):\n\treturn  x + 1234  # caf\u00e9 \u4f60\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and len(tokenizer) == 320
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert all(len(piece) == 1 for piece in pieces if any(c.isdigit() for c in piece))
    assert [rows[:1].tolist() for rows in library_ids(tokenizer, ["import os", "x = 1"])] == [[1], [1]]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == ids and again.chat_template == tokenizer.chat_template
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (1, 2, 0)

    def render(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)

    answer = tokenizer(CHAT[1]["content"])["input_ids"] + [tokenizer.eos_token_id]
    first, second = render(CHAT[:1]), render(CHAT[:3])
    assert second[: len(first) + len(answer)] == first + answer
    assert len(second) > len(first) + len(answer)


@pytest.mark.parametrize("answers", [("12 + 30 = 42.", "40."), ("a", "is"), ("end", "think"), ("is", THOUGHT + "a")])
@pytest.mark.parametrize("template", [None, THINKING_TEMPLATE, R1_TEMPLATE])
def test_answer_mask_covers_answers_and_end_of_turn(tokenizer, template, answers):
    used = copy.deepcopy(tokenizer)
    end = used.eos_token
    if template is not None:
        used.chat_template, end = template, "<|im_end|>"
    chat = [*CHAT[:1], {**CHAT[1], "content": answers[0]}, *CHAT[2:3], {**CHAT[3], "content": answers[1]}]
    ids, kind = chats_module.conversation_document(used, chat)
    mask = kind == chats_module.ANSWER
    runs_of_mask = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    spans = [used.decode(ids[begin:stop]) for begin, stop in runs_of_mask.reshape(-1, 2)]
    spans = [span.removeprefix("<think>\n\n</think>\n\n").rstrip("\n") for span in spans]
    kept = [answer.removeprefix(THOUGHT if template == R1_TEMPLATE else "") for answer in answers]
    assert spans == [answer + end for answer in kept]


def test_malformed_chats_name_file_and_line(tmp_path):
    good = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    other = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(other)}\n")
    first, second = chats_module.load_conversations(path)
    assert first == second == other["messages"]
    bad = ("{", "[1]", '{"text": 1}', '{"messages": [{"role": "tool", "content": "x"}]}')
    for line in (*bad, '{"messages": [{"role": "user", "content": "x"}]}'):
        path.write_text(f"{json.dumps(good)}\n{line}\n")
        pytest.raises(SpecdecError, chats_module.load_conversations, path).match("chats.jsonl, line 2")
    path.write_text("\n")
    pytest.raises(SpecdecError, chats_module.load_conversations, path).match("no conversation")
    path.unlink()
    pytest.raises(SpecdecError, chats_module.load_conversations, path).match("there is no file")


def pieces_of(block):
    """[(row, ids of one document), ...] of packed rows; a document is one run of tokens."""
    pieces = []
    for row, ids in enumerate(block.ids):
        for number in dict.fromkeys(block.document[row][block.document[row] >= 0].tolist()):
            places = np.flatnonzero(block.document[row] == number)
            assert len(places) == places[-1] - places[0] + 1
            pieces.append((row, ids[places]))
    return pieces


def test_packed_rows_hold_whole_documents_and_no_test_prompt(tokenizer):
    drawn, chats = [], chats_module.documents(tokenizer, CorpusChats())

    def noted(block_seed):
        for document in chats(block_seed):
            drawn.append(document)
            yield document

    block = chats_module.Rows(noted, seed=3, length=512, block_rows=8).block(0)
    pieces = pieces_of(block)
    assert all(ids[0] == tokenizer.bos_token_id and (ids[1:] != ids[0]).all() for _, ids in pieces)
    assert len({row for row, _ in pieces}) == 8 < len(pieces), "some row holds several"
    given = sorted(document.ids[:512].tolist() for document in drawn)
    placed = sorted(ids.tolist() for _, ids in pieces)
    left_out = [ids for ids in given if ids not in placed or placed.remove(ids)]
    room = (block.kind == chats_module.PADDING).sum(axis=1).max()
    assert not placed and all(len(ids) > room for ids in left_out)
    assert ((block.document == -1) == (block.kind == chats_module.PADDING)).all()
    assert block.answer_mask.mean() > 0.2 and (block.kind != chats_module.PADDING).mean() > 0.8
    assert (block.ids[block.answer_mask] == tokenizer.eos_token_id).any()
    chats = chats_module.documents(tokenizer, CorpusChats(joined_frac=0.0))
    block = chats_module.Rows(chats, seed=0, length=256, block_rows=16).block(0)
    for _, ids in pieces_of(block):
        assert not held_out(tokenizer.decode(ids).split("<|user|>")[1].split("<|end|>")[0])


@torch.no_grad()
def test_copy_tasks_count_what_copying_predicts_and_an_untrained_start_copies():
    rng = random.Random(0)
    for _ in range(20):
        task = copy_task(rng, range(10, 1000), bos=1)
        seen = set()
        for place in range(1, len(task.ids)):
            pair = tuple(task.ids[place - 1 : place + 1])
            assert task.kind[place] == chats_module.PROMPT or pair in seen  # its predecessor was followed by it before
            seen.add(pair)
        assert task.ids[0] == 1 and (task.kind == chats_module.ANSWER).mean() > 0.3
    model, generator = _model(copying_start=True), torch.Generator().manual_seed(0)
    assert _copied_frac(model) > 0.7 > 0.05 > _copied_frac(_model(copying_start=False))
    ids = torch.randperm(2000, generator=generator)[:260] + 8
    text = torch.cat((ids, ids[20:40]))[None]  # seen 240 tokens ago, each once
    chosen = model(text).logits[0, 260:279].argmax(-1)
    assert (chosen == ids[21:40]).float().mean() > 0.7
    model.set_attn_implementation("eager")  # the head that looks one back does so at any position
    ids = torch.randint(8, 2000, (1, 300), generator=generator.manual_seed(0))
    weights = model(ids, output_attentions=True).attentions[0][0, 0]
    assert weights.diagonal(-1).mean() > 0.85 > 0.1 > weights.diagonal(0)[1:].mean()


def test_fast_forward_equals_transformers_document_by_document_and_presets_fit_their_budgets(tokenizer):
    torch.manual_seed(0)
    model = pretrain.build_model(TOY, tokenizer)
    rows = chats_module.Rows(chats_module.documents(tokenizer, CorpusChats()), seed=0, length=160, block_rows=4)
    batch = rows.batch(0, 2)
    ids, document = torch.from_numpy(batch.ids), torch.from_numpy(batch.document)
    weights = torch.rand(ids.shape)
    loss = TrainingForward(model).loss(ids, document, weights)
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total, count = 0.0, 0.0
    for row in range(2):  # the slow oracle: every document alone through transformers
        for number in document[row].unique():
            chosen = document[row] == number
            logits = model(input_ids=ids[row][chosen][None], use_cache=False).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, ids[row][chosen][1:], reduction="none")
            total = total + (losses * weights[row][chosen][1:]).sum()
            count = count + weights[row][chosen][1:].sum()
    (total / count).backward()
    torch.testing.assert_close(loss, total / count, rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-3, atol=1e-6, msg=name)
    for name, most in (("tiny", 1_600_000), ("small", 12_000_000)):
        shape = pretrain.PRESETS[name]
        with torch.device("meta"):
            model = pretrain.build_model(shape, tokenizer)
        assert sum(p.numel() for p in model.parameters()) <= most and shape.layers >= 7


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    whole = pretrain.train_target(TOY, tmp_path / "whole", Budget(threads=1))
    plain_step, calls = pretrain._step, []

    def dying_step(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError
        return plain_step(*arguments)

    monkeypatch.setattr(pretrain, "_step", dying_step)
    pytest.raises(ZeroDivisionError, pretrain.train_target, TOY, tmp_path / "parts", Budget(threads=1))
    assert not (tmp_path / "parts/target/model.safetensors").exists()
    parts = pretrain.train_target(TOY, tmp_path / "parts", Budget(threads=1))
    assert len(calls) == 4 + 3  # three steps before the kill, the one that died, three after
    first, second = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    curve = runs.read_table(tmp_path / "parts/loss.parquet")
    assert curve["step"].tolist() == list(range(6))
    assert curve["loss"].tolist() == runs.read_table(tmp_path / "whole/loss.parquet")["loss"].tolist()
    before = (parts / "model.safetensors").stat().st_mtime_ns
    pretrain.train_target(TOY, tmp_path / "parts", Budget(threads=1))  # finished: nothing runs again
    assert len(calls) == 7 and (parts / "model.safetensors").stat().st_mtime_ns == before
    others = pytest.raises(SpecdecError, pretrain.train_target, TOY, tmp_path / "parts", Budget(seed=1))
    others.match("other settings")


def test_a_toy_target_learns_and_answers(tmp_path):
    shape = dataclasses.replace(TOY, steps=40, batch=8, warmup_steps=5)
    folder = pretrain.train_target(shape, tmp_path, Budget(threads=1))
    curve = runs.read_table(tmp_path / "loss.parquet")["loss"]
    assert curve.tail(5).mean() < curve.head(3).mean() - 0.8
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == len(tokenizer) == 320
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompts = [[{"role": "user", "content": "Add 1 and 2."}], CHAT[:3]]
    together = chats_module.generate_texts(prompts, model.float(), tokenizer, 0.0, 8)
    alone = [chats_module.generate_texts([prompt], model, tokenizer, 0.0, 8)[0] for prompt in prompts]
    assert together == alone and all("<|" not in text for text in together)


def _model(copying_start: bool):
    torch.manual_seed(0)
    shape = dataclasses.replace(pretrain.PRESETS["small"], copying_start=copying_start)
    return pretrain.build_model(shape, SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()


def _copied_frac(model) -> float:
    """How often the model's first choice is right where nothing but copying predicts the token."""
    rng, right, all = random.Random(0), 0, 0
    for _ in range(20):
        task = copy_task(rng, range(8, model.config.vocab_size), bos=1)
        chosen = model(torch.from_numpy(task.ids)[None]).logits[0, :-1].argmax(-1).numpy()
        counted = task.kind[1:] == chats_module.ANSWER
        right, all = right + (chosen == task.ids[1:])[counted].sum(), all + counted.sum()
    return right / all
