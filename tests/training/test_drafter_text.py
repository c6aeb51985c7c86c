"""What drafters learn from: chats, the target's own answers, packed rows, held-out chats."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.chats import CHATS, chat_target
from fakes.refusals import refusal

from specdec import runs
from specdec.training.drafter import chats
from specdec.training.drafter.chats import ChatList, Document, FixedText, StreamedText, split
from specdec.training.drafter.presets import Budget, Settings

PARTS = (("train", 0.0), ("held-out", 0.0), ("held-out", 0.7))
USER = {"role": "user", "content": "Say wood."}


def chat_of(length: int) -> list[dict]:
    answer = {"role": "assistant", "content": "a" * length}
    return [{"role": "user", "content": f"Question {length}"}, answer]


def document(length: int, token: int = 7) -> Document:
    return Document(np.full(length, token), np.ones(length, bool))


def test_answers_are_found_under_a_template_with_their_end_of_turn():
    tokenizer = chat_target()[1]
    ids, answer, *_ = chats.conversation_document(tokenizer, CHATS[0] + CHATS[1])
    text = tokenizer.apply_chat_template(CHATS[0] + CHATS[1], tokenize=False)
    assert tokenizer.decode(ids) == text
    expected = "".join(chat[1]["content"] + tokenizer.eos_token for chat in CHATS[:2])
    assert tokenizer.decode(ids[answer]) == expected


def test_a_template_that_rewrites_history_still_shows_its_answers(monkeypatch):
    tokenizer = chat_target()[1]
    # earlier turns lose their roles, and the last answer is followed by a line
    earlier = "{%- if loop.last %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] }}{%- else %}"
    later = "{{ m['content'] ~ '|' }}{%- endif %}{%- endfor %}{{ '\\n' }}"
    template = "{%- for m in messages %}" + earlier + later
    monkeypatch.setattr(tokenizer, "chat_template", template)
    ids, answer, *_ = chats.conversation_document(tokenizer, CHATS[0] + CHATS[1])
    content = [chat[1]["content"] for chat in CHATS[:2]]
    assert "".join(tokenizer.decode(ids[answer]).split()) == "".join("".join(content).split())


def test_tokens_stay_as_they_are_and_odd_lines_are_read_or_named(tmp_path):
    tokenizer = chat_target()[1]
    tokens = document(4)
    assert chats.conversation_document(tokenizer, tokens) is tokens
    foreign = document(4, 10**6)
    assert "another tokenizer" in refusal(chats.conversation_document, tokenizer, foreign)
    # tokens are neither answered anew nor rendered
    source = ChatList([tokens, document(5)])
    assert source.prompts(0, 2) == [] and source.key != ChatList([tokens, document(6)]).key
    answer = {"role": "assistant", "content": "wo\u2028od"}
    (tmp_path / "2.jsonl").write_text(json.dumps({"messages": CHATS[0]}) + "\n\n")
    line = json.dumps({"messages": [USER, answer], "number": 3}, ensure_ascii=False)
    (tmp_path / "1.jsonl").write_text(line)
    assert chats.load_conversations(tmp_path) == [[USER, answer], CHATS[0]]
    for bad in ({}, {"messages": [{"role": "robot", "content": "a"}]}):
        (tmp_path / "1.jsonl").write_text(json.dumps({"messages": [USER]} | bad))
        assert "1.jsonl, line 1: not a chat" in refusal(chats.load_conversations, tmp_path)


@pytest.fixture
def answered(monkeypatch):
    """(lengths of the replaced answers, temperature, limit, a drawn number) of every batch of 2."""
    batches = []

    def answer(batch, model, tokenizer, temperature, limit):
        lengths = [len(chat[1]["content"]) for chat in batch]
        batches.append((lengths, temperature, limit, float(torch.rand(1))))
        new = []
        for chat, length in zip(batch, lengths, strict=True):
            new.append([chat[0], {"role": "assistant", "content": f"new {length}"}])
        return new

    monkeypatch.setattr(chats, "answer", answer)
    monkeypatch.setattr(chats, "ANSWERED_ROWS", 2)
    return batches


def test_answers_of_like_length_are_written_together_and_only_once(tmp_path, answered):
    given = [chat_of(n) for n in (5, 1, 4, 8, 2, 7, 3, 6)]

    def regenerate(folder, seed=3, **options):
        options |= dict(folder=folder, seed=seed, max_new_tokens=9)
        return chats.regenerate("model", "tokenizer", given, **options)

    written = regenerate(tmp_path / "a")
    groups = [batch[0] for batch in answered]
    assert sorted(groups) == [[1, 2], [3, 4], [5, 6], [7, 8]] and groups != sorted(groups)
    assert [batch[1:3] for batch in answered] == [(0.8, 9), (0.0, 9)] * 2
    contents = [chat[1]["content"] for chat in written]
    assert contents == [f"new {n}" for n in itertools.chain(*groups)]
    for number, batch in enumerate(answered):
        torch.manual_seed(3 * 1_000_003 + number)
        assert batch[3] == float(torch.rand(1))
    answered.clear()
    assert regenerate(tmp_path / "a") == written and not answered
    assert regenerate(tmp_path / "b", minutes=-1.0) == []
    regenerate(tmp_path / "b", greedy_frac=0.25, seed=0)
    assert [batch[1] for batch in answered] == [0.8, 0.8, 0.8, 0.0]
    assert [batch[0] for batch in answered] != groups, "another seed, another order"


def test_greedy_answers_are_the_targets_turn_after_turn(tmp_path):
    model, tokenizer = chat_target()
    both = [CHATS[0] + CHATS[1], [{"role": "system", "content": "Short."}, *CHATS[2]]]
    how = dict(folder=tmp_path, greedy_frac=1.0, max_new_tokens=8)
    written = chats.regenerate(model, tokenizer, both, **how)
    for chat in written:
        for turn, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(
                chat[:turn], tokenize=False, add_generation_prompt=True
            )
            ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
            out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
            assert message["content"] == tokenizer.decode(out, skip_special_tokens=True)
    roles = [[message["role"] for message in chat] for chat in sorted(written, key=len)]
    assert roles == [["system", "user", "assistant"], ["user", "assistant"] * 2]


def test_sampling_and_room_of_an_answer(monkeypatch):
    model, tokenizer = chat_target()
    calls = []

    def generate(input_ids, attention_mask, **options):
        calls.append((input_ids.shape[1], options))
        written = torch.tensor([[9, 9, 9, tokenizer.eos_token_id, tokenizer.pad_token_id]])
        return torch.cat((input_ids, written.expand(len(input_ids), -1)), 1)

    monkeypatch.setattr(model, "generate", generate)
    expected = tokenizer.decode([9, 9, 9])
    answered = chats.answer(CHATS[:2], model, tokenizer, 0.0, 1000)
    assert [chat[1]["content"] for chat in answered] == [expected] * 2
    chats.answer(CHATS[:2], model, tokenizer, 0.7, 5)
    (length, greedy), (_, sampled) = calls
    assert greedy == {"pad_token_id": 0, "max_new_tokens": 128 - length, "do_sample": False}
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    assert sampled == {"pad_token_id": 0, "max_new_tokens": 5, **sampling}
    monkeypatch.setattr(model.config, "max_position_embeddings", length)
    full = refusal(chats.answer, CHATS[:2], model, tokenizer, 0.0, 5)
    assert "fills the target's whole context" in full


def test_documents_go_into_the_first_row_with_room_the_longest_first():
    documents = [document(n, 10 + n) for n in (2, 3, 1)]
    documents[0].answer[:] = False
    packed = chats.lay_out(documents, [[1, 0], [2]], 6)
    assert packed.ids.tolist() == [[13, 13, 13, 12, 12, 0], [11, 0, 0, 0, 0, 0]]
    assert packed.loss_mask.tolist() == [[True] * 3 + [False] * 3, [True] + [False] * 5]
    assert packed.documents.tolist() == [[1, 1, 1, 0, 0, -1], [2, -1, -1, -1, -1, -1]]
    batch = chats.token_batch(packed, "cpu", 7, [1])
    assert batch.step == 7 and torch.equal(batch.documents, packed.documents[1:])
    assert chats.first_fit([2, 5, 3, 6], 6) == [[3], [1], [2, 0]]
    lengths = np.random.default_rng(0).integers(1, 60, 300).tolist()
    rows = chats.first_fit(lengths, 60)
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert sorted(itertools.chain(*rows)) == list(range(300))
    assert max(filled) <= 60 and np.mean(filled) > 0.95 * 60


def test_a_stream_mixes_own_answers_in_and_is_a_function_of_seed_and_step():
    tokenizer = chat_target()[1]
    settings = Settings(batch=2, length=48, regenerated_frac=0.75)

    def stream(seed=3):
        return StreamedText(tokenizer, ChatList(CHATS[:3]), CHATS[3:], settings, seed, "cpu")

    text = stream()
    coded = [chats.conversation_document(tokenizer, chat).ids.tolist() for chat in CHATS]
    read = [item.ids.tolist() for item in itertools.islice(text._documents("b"), 400)]
    mine = [ids for ids in read if ids in coded[3:]]
    assert len(mine) == pytest.approx(300, abs=35)
    # each of them once before any is read again
    for begin in range(0, 297, 3):
        assert sorted(mine[begin : begin + 3]) == sorted(coded[3:])
    # batches are the rows of blocks, 32 to a block
    block = text.block(1)
    assert torch.equal(text.batch(33).ids, block.ids[2:4])
    assert torch.equal(stream().batch(33).ids, text.batch(33).ids)
    assert not torch.equal(stream(4).batch(33).ids, text.batch(33).ids)
    counts = np.bincount(text.block(0).ids[text.block(0).loss_mask], minlength=300)
    assert (text.answer_counts(300) == counts).all() and counts.sum() > 0


def test_every_document_is_read_once_a_pass():
    lengths = (30, 7, 12, 20, 41, 5, 3, 18)
    settings = Settings(length=32, batch=2, passes=4)
    text = FixedText([document(n, n) for n in lengths], [document(9)], settings, 1, "cpu")
    cut = [min(n, 32) for n in lengths]
    batches = [text.batch(number) for number in range(text.steps)]
    ids = torch.cat([batch.ids[batch.documents >= 0] for batch in batches])
    assert text.steps * 2 == 4 * len(text.rows)
    assert torch.bincount(ids)[list(lengths)].tolist() == [4 * n for n in cut]
    assert text.answer_counts(50)[list(lengths)].tolist() == cut
    # past the end it starts again
    assert torch.equal(text.batch(text.steps + 1).ids, batches[1].ids)
    (held_out,) = text.held_out_texts()
    assert held_out.ids.tolist() == [[7] * 9] and held_out.loss_mask.all()


def test_the_side_of_a_chat_follows_from_its_prompt():
    def chat(prompt, **answer):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": "a"} | answer]

    conversations = [chat(f"q{n}") for n in range(400)]
    settings = Settings(held_out=1000, held_out_frac=0.25)
    learned, held_out = split(conversations, settings)
    assert 60 < len(held_out) < 140 and len(learned) + len(held_out) == 400
    again = split([*conversations[::-1], chat("x")], settings)[1]
    assert all(item in again for item in held_out)
    assert split(conversations, Settings()) == (conversations, [])
    assert len(split(conversations, replace(settings, held_out=5))[1]) == 5
    marked = [chat("q8", part="held-out"), chat("q9", part="train"), chat("q7", temperature=0.7)]
    for frac, sides in ((0.0, (2, 1)), (1.0, (1, 1))):
        sides_of = split(marked, replace(settings, held_out_frac=frac))
        assert tuple(map(len, sides_of)) == sides, "sampled answers are not measured on"
    # tokens say it themselves, or are placed by their prompt
    sides = [document(3)._replace(part=part, temperature=heat) for part, heat in PARTS]
    learned, held_out = split(sides, settings)
    assert [len(learned), held_out] == [1, sides[1:2]]
    answer = np.array([False, True, True])
    tokens = [Document(np.array([n, 7, 7]), answer) for n in range(400)]
    assert 60 < len(split(tokens, settings)[1]) < 140
    none = replace(settings, held_out_frac=1e-6)
    assert "of 3 conversations none are held out" in refusal(split, conversations[:3], none)


def test_own_answers_are_written_first_where_settings_ask(tmp_path, monkeypatch):
    calls = []

    def regenerate(*given, **how):
        calls.append((given, how))
        return CHATS[:2]

    monkeypatch.setattr(chats, "regenerate", regenerate)
    settings = Settings(48, batch=2, length=48, regenerate_chats=3, max_new_tokens=9)

    budget = Budget(minutes=8.0, seed=5)

    def text_of(settings=settings):
        return chats.training_text(*chat_target(), ChatList(CHATS), settings, tmp_path, budget)

    text = text_of()
    key = runs.content_key(prompts=CHATS[:3], seed=5, most=9)[:12]
    given, how = calls.pop()
    assert given == (*chat_target(), CHATS[:3])
    folder = tmp_path / f"regenerated-{key}"
    assert how == {"folder": folder, "minutes": 2.0, "seed": 5, "max_new_tokens": 9}
    assert isinstance(text, StreamedText) and len(text.answers) == 2 and text.seed == 5
    (tmp_path / "checkpoint.safetensors").write_text("")
    text_of()
    assert calls.pop()[1]["minutes"] == 0, "a resumed run adds no text"
    fixed = text_of(replace(settings, passes=3))
    assert isinstance(fixed, FixedText) and len(fixed.documents) == 2
    parted = Settings(batch=2, length=48, passes=2, held_out=2, held_out_frac=0.5)
    text = text_of(parted)
    assert [len(text.documents), len(text.held_out)] == list(map(len, split(CHATS, parted)))
