"""Generated chats: the target's own, nothing twice, nothing of a benchmark, resumable."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.chats import chat_target
from fakes.refusals import refusal
from safetensors.numpy import load_file

import specdec
from specdec.data.suites import prompt_digest
from specdec.training.drafter import generate_data
from specdec.training.drafter.chats import ANSWER, TOKENS, load_conversations
from specdec.training.drafter.generate_data import (
    ChatConfig,
    ChatFiles,
    ChatWriter,
    benchmark_texts,
    generate_chats,
    read_prompts,
)

GIVEN = "What is 3 plus 4?\nWrite two lines:\\none and two\n"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Short chats after two given prompts, six to a part."""
    monkeypatch.setattr(generate_data, "PART", 6)
    path = tmp_path / "given.txt"
    path.write_text(GIVEN)
    monkeypatch.setattr(generate_data, "PROMPTS", path)
    return ChatConfig(seed=5, rows=4, prompt_tok=40, answer_tok=12)


def chats_of(folder) -> dict[int, dict]:
    """Lines by the number of their chat."""
    paths = sorted(folder.glob("*.jsonl"))
    lines = "".join(path.read_text() for path in paths).split("\n")[:-1]
    rows = {json.loads(line)["number"]: json.loads(line) for line in lines}
    assert len(rows) == len(lines)
    return rows


def generate(pair, config, folder, tokens=1, **options):
    return generate_chats(pair, config, folder, tokens=tokens, progress=False, **options)


def slow_chat(pair, config, number: int) -> tuple[list[int], list[int]]:
    """(ids, roles) of a made-up chat, each token by a forward of the text so far."""
    chat = torch.tensor([number])
    template = pair.ids_of([{"role": "user", "content": "USERTEXT"}])
    marker = pair.tokenizer.encode("USERTEXT", add_special_tokens=False)
    begin = template.index(marker[0])
    after = template[begin + len(marker) :]
    special = pair.stop_tokens | set(pair.tokenizer.all_special_ids)
    share = float(generate_data.chance(config.seed, chat, -1))
    temperature = 0.0 if share < 0.6 else 0.7 if share < 0.8 else 1.0
    openings = read_prompts(generate_data.OPENINGS)
    share = float(generate_data.chance(config.seed, chat, -2))
    ids = template[:begin]
    [opening] = openings[int(share * len(openings))]
    ids += pair.tokenizer.encode(opening["content"], add_special_tokens=False)
    roles = [0] * len(ids)

    def continued(limit, stops, heat, role):
        for _ in range(limit):
            with torch.no_grad():
                logits = pair.target.model(torch.tensor([ids])).logits[:, -1]
            draws = generate_data.chance(config.seed, chat, len(ids))
            ids.append(int(generate_data.draw(logits, torch.tensor([heat]), draws)))
            roles.append(role)
            if ids[-1] in stops:
                break

    continued(begin + config.prompt_tok - len(ids), special, 0.9, 1)
    assert ids[-1] == after[0]
    ids += after[1:]
    roles[-1:] = [0] * len(after)
    continued(config.answer_tok, pair.stop_tokens, temperature, 2)
    return ids, roles


def test_chats_in_bulk_are_those_that_plain_forwards_write_alone(tiny, config, tmp_path):
    files = generate(tiny, config, tmp_path / "out", 120)
    rows, tokens = chats_of(tmp_path / "out"), {}
    for path in sorted((tmp_path / "out").glob(f"*{TOKENS}")):
        part = load_file(path)
        assert (part["tokens"].dtype, part["roles"].dtype) == (np.uint16, np.uint8)
        ends = part["lengths"].cumsum()
        for number, end, length in zip(part["numbers"], ends, part["lengths"], strict=True):
            chat = slice(end - length, end)
            tokens[int(number)] = part["tokens"][chat].tolist(), part["roles"][chat].tolist()
    answer_tok = 0
    for number, row in rows.items():
        ids, roles = tokens[number]
        question, answer = (message["content"] for message in row["messages"])
        prompt = tiny.ids_of([{"role": "user", "content": question}])
        if number >= 2:
            assert (ids, roles) == slow_chat(tiny, config, number), number
        assert ids[: len(prompt)] == prompt and 2 not in roles[: len(prompt)]
        assert roles[len(prompt) :] == [2] * (len(ids) - len(prompt))
        assert answer == tiny.text_of(ids[len(prompt) :])
        answer_tok += len(ids) - len(prompt)
    assert files.answer_tok == answer_tok >= 120 and files.ended == set(tokens)
    questions = [rows[number]["messages"][0]["content"] for number in (0, 1)]
    assert questions == ["What is 3 plus 4?", "Write two lines:\none and two"]
    assert {row["temperature"] for row in rows.values()} > {0.0}
    # training reads the same chats, in token ids
    documents = load_conversations(tmp_path / "out")
    for item, (number, row) in zip(documents, rows.items(), strict=True):
        assert (item.ids.tolist(), item.part) == (tokens[number][0], row["part"])
        assert item.temperature == pytest.approx(row["temperature"])


def test_a_stopped_folder_is_continued_to_the_same_chats(tiny, config, tmp_path, monkeypatch):
    generate(tiny, config, tmp_path / "whole", 100)
    whole = chats_of(tmp_path / "whole")
    for tokens in (1, 50, 100):
        files = generate(tiny, replace(config, rows=3), tmp_path / "parts", tokens)
        assert files.answer_tok >= tokens
    parts = chats_of(tmp_path / "parts")
    shared = whole.keys() & parts.keys()
    assert len(shared) > 5 and all(whole[number] == parts[number] for number in shared)
    # no number is begun twice, and gaps are filled first
    assert sum(files.counts[fate] for fate in generate_data.FATES) == len(files.ended)
    assert not generate(tiny, config, tmp_path / "late", 90, minutes=0).ended
    writer = ChatWriter(tiny, config)
    with tiny.inference(plain=True):
        writer.begin({0, 1, 3, 6})
    assert writer.chat.tolist() == [2, 4, 5, 7] and int(writer.begun) == 4


def test_a_kill_loses_no_more_than_the_last_seconds(tiny, config, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_data, "SAVE_S", 0.0)
    files = generate(tiny, config, tmp_path / "out", 60)
    # lines were written, and the process was killed before their tokens were
    newest = sorted((tmp_path / "out").glob("*.jsonl"))[-1]
    before = newest.read_text()
    newest.write_text(before + '{"number": 1000000, "messages": []}\n')
    again = generate(tiny, config, tmp_path / "out", 60)
    assert newest.read_text() == before
    assert (again.counts, again.ended) == (files.counts, files.ended)
    written = []
    save = ChatFiles.save

    def killed(self):
        save(self)
        written.append(self.answer_tok)
        if len(written) == 3:
            monkeypatch.setattr(ChatFiles, "save", lambda self: None)
            raise KeyboardInterrupt

    monkeypatch.setattr(ChatFiles, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny, config, tmp_path / "cut", 10**6)
    stored = load_conversations(tmp_path / "cut")
    assert sum(int(item.answer.sum()) for item in stored) == written[-1] > 0


def test_other_chats_are_refused(tiny, config, tmp_path):
    generate(tiny, config, tmp_path)
    half, new = specdec.load_pair("tiny", dtype="bfloat16"), tmp_path / "new"
    for pair, changes, folder, words in (
        (tiny, {"seed": 6}, tmp_path, "made with another settings"),
        (half, {}, tmp_path, "made with another target"),
        (tiny, {"answer_tok": 2000}, new, "lower prompt_tok or answer_tok"),
    ):
        assert words in refusal(generate, pair, replace(config, **changes), folder)


def test_nothing_twice_and_nothing_of_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(generate_data, "HOLD_OUT", 0.25)
    prompt, reference = list(benchmark_texts())[:2]
    ids, roles = np.arange(70_000, 70_004), np.array([0, 1, ANSWER, ANSWER])
    files = ChatFiles(tmp_path, {"seed": 1}, 100_000)

    def add(*chats):
        for texts in chats:
            files.add(len(files.ended), ids, roles, 0.7, list(texts))
        files.save()

    repeated, benchmark = (" ONE. ", "Two."), (f"{prompt.upper()}\n", "Something.")
    add((), ("One.", "Something."), ("two.", " "), repeated, benchmark, ("New", "Fresh\u2028 one"))
    assert list(chats_of(tmp_path)) == [1, 5]
    expected = dict(unfinished=1, kept=2, empty=1, repeated=1, benchmark=1, answer_tok=4)
    assert files.counts == expected
    files = ChatFiles(tmp_path, {"seed": 1}, 100_000)
    assert files.counts == expected and files.ended == set(range(6))
    add(("Three", reference), ("one.", "x"), ("y", "SOMETHING."), ("z", "fresh one"))
    assert [files.counts[name] for name in ("benchmark", "repeated", "kept")] == [2, 4, 2]
    add(*((f"Prompt {i}", f"Answer {i}") for i in range(200)))
    documents = load_conversations(tmp_path)
    assert [item.ids.tolist() for item in documents] == [ids.tolist()] * 202
    parts = [item.part for item in documents]
    assert 30 < parts.count("held-out") < 70
    assert parts == [row["part"] for row in chats_of(tmp_path).values()]


def test_rows_of_chats_are_read_and_odd_files_are_named(tmp_path):
    tokens = np.array([[1, 4, 9, 2, 5, 8, 2, 1, 4, 7, 1, 4], [1, 4, 2, 5, 6, 2, 1, 4, 9, 2, 5, 1]])
    roles = np.array([[0, 0, 1, 1, 0, 2, 2, 0, 0, 1, 0, 0], [0, 0, 1, 0, 2, 2, 0, 0, 1, 1, 0, 2]])
    path = tmp_path / "tokens-0.npz"
    heats = np.where(roles == 2, 7, 9).astype(np.uint8)
    np.savez(path, tokens=tokens.astype(np.uint16), roles=roles.astype(np.uint8), heats=heats)
    # a chat without an answer, and the last one of a row, are left out
    first, second = load_conversations(tmp_path)
    assert first.ids.tolist() == [1, 4, 9, 2, 5, 8, 2] and second.ids.tolist() == [1, 4, 2, 5, 6, 2]
    assert first.answer.tolist() == [False] * 5 + [True] * 2
    assert (first.temperature, first.part) == (0.7, None)
    (tmp_path / f"bad{TOKENS}").write_bytes(b"nothing")
    assert "tokens of chats" in refusal(load_conversations, tmp_path)


def test_benchmarks_and_prompts_are_read_from_files(tmp_path, monkeypatch):
    row = {"question_id": 1, "turns": ["How many eggs?", "And now?"], "reference": ["Seven eggs."]}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row) + "\n")
    embedded = set(benchmark_texts())
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
    more = set(benchmark_texts()) - embedded
    assert more == {"How many eggs?", "And now?", "Seven eggs."}
    path = tmp_path / "prompts.txt"
    path.write_text("\n")
    assert "holds no prompt" in refusal(read_prompts, path)


@pytest.mark.parametrize("path", [generate_data.OPENINGS, generate_data.PROMPTS])
def test_own_texts_are_many_and_of_no_benchmark(path):
    digests = [prompt_digest(message["content"]) for [message] in read_prompts(path)]
    assert len(set(digests)) == len(digests) >= 150
    assert not set(digests) & {prompt_digest(text) for text in benchmark_texts()}


def test_tokens_are_drawn_by_their_odds_and_chances_are_even():
    logits = torch.tensor([0.0, 2.0, 1.0, -30.0]).expand(4000, 4)
    chats = torch.arange(4000)
    chances = generate_data.chance(2**62, chats, 3)
    assert 0 <= float(chances.min()) and float(chances.max()) < 1
    for values in (chances, generate_data.chance(0, chats[:1], chats)):
        counts = torch.histc(values, 10, 0, 1)
        # 9 degrees, p = 0.001
        assert float(((counts - 400) ** 2 / 400).sum()) < 27.9
    # splitmix64 in whole numbers without signs
    for chat in range(40):
        mixed = 2**62
        for part in (chat, 3):
            mixed = mixed * 0x9E3779B97F4A7C15 + part
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
                mixed %= 2**64
                mixed = (mixed ^ mixed >> shift) * factor
        assert float(chances[chat]) == (mixed >> 40) / 2**24
    assert not torch.equal(chances, generate_data.chance(1, chats, 3))
    drawn = generate_data.draw(logits.bfloat16(), torch.full((4000,), 0.5), chances)
    counts, expected = torch.bincount(drawn, minlength=4), 4000 * (logits[0] / 0.5).softmax(-1)
    # 2 degrees, p = 0.001
    assert float(((counts - expected)[:3] ** 2 / expected[:3]).sum()) < 13.8 and counts[3] == 0
    assert generate_data.draw(logits[:2], torch.zeros(2), torch.tensor([0.0, 0.99])).tolist() == [
        1,
        1,
    ]


def test_layers_with_a_window_see_no_further_and_prompts_end(config):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    window = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)
    model, tokenizer = chat_target(Qwen2ForCausalLM, Qwen2Config, **window)
    pair = specdec.load_pair(target=model, tokenizer=tokenizer)
    writer = ChatWriter(pair, replace(config, prompt_tok=30))
    assert len(pair.target.kinds) == 2
    with pair.inference(plain=True):
        writer.begin(set())
        tokens = [writer.step()[0] for _ in range(20)]
        place = writer.time - writer.start
        logits = writer._logits(place)
        row = int(place.argmax())
        ids = torch.stack(tokens)[-int(place[row]) - 1 :, row]
        expected = pair.target.model(ids[None]).logits[0, -1]
        # a prompt that goes on is dropped when it is as long as it may be
        writer.begin({1})
        lengths = []
        for _ in range(6):
            lengths += [len(ids) for _, ids, _, _, texts in writer.chats() if not texts]
    torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
    assert max(lengths, key=lengths.count) == len(writer.before) + 30
