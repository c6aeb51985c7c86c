"""Generated chats: the target's own, nothing twice, nothing of a benchmark, resumable."""

import json
import random
from dataclasses import replace

import pytest
import torch
from fakes.refusals import refusal

import specdec
from specdec import runs
from specdec.data.suites import prompt_digest
from specdec.training.drafter import generate_data
from specdec.training.drafter.chats import load_conversations
from specdec.training.drafter.generate_data import (
    ChatConfig,
    ChatFiles,
    benchmark_texts,
    generate_chats,
    read_prompts,
)

GIVEN = "What is 3 plus 4?\nWrite two lines:\\none and two\n"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Short chats, three to a shard, after two given prompts."""
    monkeypatch.setattr(generate_data, "SHARD", 3)
    path = tmp_path / "given.txt"
    path.write_text(GIVEN)
    monkeypatch.setattr(generate_data, "PROMPTS", path)
    return ChatConfig(seed=5, rows=4, prompt_tok=40, answer_tok=12)


def chats_of(folder):
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        rows += [json.loads(line) for line in path.read_text().split("\n") if line]
    return rows


def shards_of(folder):
    return {path.name: path.read_text() for path in sorted(folder.glob("chats-*.jsonl"))}


def generate(pair, config, folder, tokens=1, **options):
    return generate_chats(pair, config, folder, tokens=tokens, progress=False, **options)


def slow_chat(pair, config, number: int) -> tuple[str, list[int]]:
    """(question, ids of its answer) of a made-up chat, each token by a forward of the text."""
    template = pair.ids_of([{"role": "user", "content": "USERTEXT"}])
    marker = pair.tokenizer.encode("USERTEXT", add_special_tokens=False)
    begin = template.index(marker[0])
    special = pair.stop_tokens | set(pair.tokenizer.all_special_ids)
    rng = random.Random(f"chats/{config.seed}/{number}")
    values, shares = zip(*generate_data.TEMPERATURES, strict=True)
    temperature = rng.choices(values, shares)[0]

    def continued(ids, limit, stops, heat):
        written = []
        while len(written) < limit and not (written and written[-1] in stops):
            with torch.no_grad():
                logits = pair.target.model(torch.tensor([[*ids, *written]])).logits[0, -1]
            written.append(generate_data.draw(logits, heat, rng))
        return written

    [opening] = rng.choice(read_prompts(generate_data.OPENINGS))
    ids = pair.tokenizer.encode(opening["content"], add_special_tokens=False)
    ids += continued([*template[:begin], *ids], config.prompt_tok - len(ids), special, 0.9)
    question = pair.tokenizer.decode(ids[:-1]).strip()
    prompt = pair.ids_of([{"role": "user", "content": question}])
    return question, continued(prompt, config.answer_tok, pair.stop_tokens, temperature)


def test_chats_are_those_that_plain_forwards_write(tiny, config, tmp_path):
    files = generate(tiny, config, tmp_path / "out", 120)
    rows = chats_of(tmp_path / "out")
    assert files.answer_tok == sum(len(row["answer_ids"]) for row in rows) >= 120
    assert len(load_conversations(tmp_path / "out")) == len(rows)
    questions = [row["messages"][0]["content"] for row in rows]
    assert questions[:2] == ["What is 3 plus 4?", "Write two lines:\none and two"]
    for row, question in zip(rows[2:], questions[2:], strict=True):
        assert (question, row["answer_ids"]) == slow_chat(tiny, config, row["number"])
        assert row["messages"][1]["content"] == tiny.text_of(row["answer_ids"])
    assert {row["temperature"] for row in rows} > {0.0}


def test_a_stopped_folder_is_continued_to_the_same_chats(tiny, config, tmp_path):
    generate(tiny, config, tmp_path / "whole", 90)
    whole = shards_of(tmp_path / "whole")
    assert len(whole) > 2
    for tokens in (1, 50, 90):
        files = generate(tiny, replace(config, rows=3), tmp_path / "parts", tokens)
        assert files.answer_tok >= tokens
    assert shards_of(tmp_path / "parts") == whole
    folders = (tmp_path / "whole", tmp_path / "parts")
    manifests = [runs.read_json(folder / "manifest.json") for folder in folders]
    assert manifests[0] == manifests[1]
    generate(tiny, config, tmp_path / "late", 90, minutes=0)
    assert shards_of(tmp_path / "late") == {}


def test_an_unfinished_write_is_written_again_and_other_chats_are_refused(tiny, config, tmp_path):
    files = generate(tiny, config, tmp_path)
    # killed before the manifest knew of it
    extra = tmp_path / f"chats-{files.counts['shards']:05d}.jsonl"
    extra.write_text((tmp_path / "chats-00000.jsonl").read_text())
    again = generate(tiny, config, tmp_path)
    assert not extra.exists() and again.counts == files.counts
    half, new = specdec.load_pair("tiny", dtype="bfloat16"), tmp_path / "new"
    for pair, changes, folder, words in (
        (tiny, {"seed": 6}, tmp_path, "made with another settings"),
        (half, {}, tmp_path, "made with another target"),
        (tiny, {"answer_tok": 2000}, new, "lower prompt_tok or answer_tok"),
    ):
        assert words in refusal(generate, pair, replace(config, **changes), folder)


def chat(prompt, answer="Something.", ids=(7, 8)):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"temperature": 0.0, "messages": messages, "answer_ids": list(ids)}


def followed(first: dict, question: str, answer: str) -> dict:
    """A chat with a further question."""
    messages = [*first["messages"], *chat(question, answer)["messages"]]
    return first | {"messages": messages}


def test_nothing_twice_and_nothing_of_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(generate_data, "SHARD", 6)
    monkeypatch.setattr(generate_data, "HOLD_OUT", 0.0)
    prompt, reference = list(benchmark_texts())[:2]
    (tmp_path / "own.jsonl").write_text(json.dumps(chat("Old.", "An old answer.")) + "\n")
    files = ChatFiles(tmp_path, {"seed": 1})
    assert files.answer_tok == 2
    repeated, known = chat(" ONE. ", "Two."), chat(f"{prompt.upper()}\n")
    silent, fresh = chat("two.", " "), chat("New", "Fresh\u2028 one")
    files.write(enumerate([None, chat("One."), silent, repeated, known, fresh]))
    assert [row["number"] for row in chats_of(tmp_path) if "number" in row] == [1, 5]
    expected = dict(unfinished=1, kept=2, empty=1, repeated=1, benchmark=1, shards=1, train_tok=6)
    assert files.counts == expected
    again = ChatFiles(tmp_path, {"seed": 1})
    assert again.counts == expected and again.next_numbers == range(6, 12)
    repeated = [chat("old.", "x"), chat("y", "an OLD  answer."), chat("z", "fresh one")]
    again.write(enumerate([chat("Three", reference), *repeated], 6))
    counts = [again.counts[name] for name in ("benchmark", "repeated", "kept")]
    assert counts == [2, 4, 2]


def test_a_second_question_may_follow_many_chats_and_stays_in_their_part(tmp_path, monkeypatch):
    monkeypatch.setattr(generate_data, "HOLD_OUT", 0.25)
    reference = list(benchmark_texts())[1]
    files = ChatFiles(tmp_path, {})
    rows = []
    for i in range(200):
        first = chat(f"Prompt {i}", f"Answer {i}")
        rows += [first, followed(first, "Shorter.", f"Short {i}")]
    again = followed(rows[0], "Shorter.", "Other.")
    benchmark = followed(chat("One", reference), "Shorter.", "Fine.")
    files.write(enumerate([*rows, again, benchmark]))
    counts = [files.counts[name] for name in ("kept", "repeated", "benchmark")]
    assert counts == [400, 1, 1]
    parts = [row["part"] for row in chats_of(tmp_path)]
    assert parts[::2] == parts[1::2] and 30 < parts[::2].count("held-out") < 70
    assert files.counts["held_out_tok"] == 2 * parts.count("held-out")


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


def test_tokens_are_drawn_by_their_odds():
    logits, rng = torch.tensor([0.0, 2.0, 1.0, -30.0]), random.Random(0)
    assert generate_data.draw(logits, 0, rng) == 1
    drawn = [generate_data.draw(logits.bfloat16(), 0.5, rng) for _ in range(4000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=4)
    expected = 4000 * (logits / 0.5).softmax(-1)
    # 2 degrees, p = 0.001
    assert float(((counts - expected)[:3] ** 2 / expected[:3]).sum()) < 13.8 and counts[3] == 0
