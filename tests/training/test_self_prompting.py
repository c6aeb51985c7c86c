"""Generated chats: answers are the target's own, nothing twice, nothing of a benchmark, and
stopping changes nothing.
"""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fakes.pairs import bigram_pair

import specdec
from specdec.data.suites import prompt_digest
from specdec.errors import SpecdecError
from specdec.tools import cli
from specdec.training.drafter import generate_data as own
from specdec.training.drafter.chats import load_conversations
from specdec.training.drafter.generate_data import (
    ChatFiles,
    benchmark_texts,
    estimate_chats,
    generate_chats,
)

GIVEN = "What is 3 plus 4?\nWrite two lines:\\none and two\n"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Short chats, three to a shard, after two given prompts."""
    monkeypatch.setattr(own, "SHARD", 3)
    (tmp_path / "given.txt").write_text(GIVEN)
    return own.ChatConfig(
        seed=5, rows=4, prompt_tok=40, answer_tok=12, prompts=tmp_path / "given.txt"
    )


def chats_of(folder):
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def shards_of(folder):
    return {path.name: path.read_text() for path in sorted(folder.glob("chats-*.jsonl"))}


def generate(pair, config, folder, tokens=1, **options):
    return generate_chats(pair, config, folder, tokens=tokens, progress=False, **options)


def test_answers_are_the_targets_own_and_stopping_changes_nothing(tiny, config, tmp_path):
    greedy = replace(config, temperatures=((0.0, 1.0),))
    files = generate(tiny, greedy, tmp_path / "out", 60)
    rows = chats_of(tmp_path / "out")
    assert files.answer_tok == sum(len(row["answer_ids"]) for row in rows) >= 60
    assert [row["number"] for row in rows] == sorted(row["number"] for row in rows)
    assert [row["messages"][0]["content"] for row in rows[:2]] == [
        "What is 3 plus 4?",
        "Write two lines:\none and two",
    ]
    openings = tuple(message["content"].strip() for [message] in own.read_prompts(own.OPENINGS))
    for row in rows:
        *asked, answer = row["messages"]
        alone = specdec.autoregress(tiny, asked, max_new_tokens=greedy.answer_tok)
        assert row["answer_ids"] == alone.tokens and answer["content"] == alone.text
        assert row["number"] < 2 or asked[0]["content"].startswith(openings)
    assert len(load_conversations(tmp_path / "out")) == len(rows)
    generate(tiny, config, tmp_path / "whole", 90)
    whole = shards_of(tmp_path / "whole")
    assert len(whole) > 2 and len({row["temperature"] for row in chats_of(tmp_path / "whole")}) > 1
    for tokens in (1, 50, 90):
        files = generate(tiny, replace(config, rows=3), tmp_path / "parts", tokens)
        assert files.answer_tok >= tokens
    assert shards_of(tmp_path / "parts") == whole
    manifests = [
        json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("whole", "parts")
    ]
    assert manifests[0] == manifests[1]
    generate(tiny, config, tmp_path / "late", 90, minutes=0)
    assert shards_of(tmp_path / "late") == {}


def test_an_unfinished_write_is_written_again_and_other_chats_are_refused(tiny, config, tmp_path):
    files = generate(tiny, config, tmp_path)
    extra = tmp_path / f"chats-{files.shards:05d}.jsonl"
    extra.write_text(
        (tmp_path / "chats-00000.jsonl").read_text()
    )  # killed before the manifest knew of it
    again = generate(tiny, config, tmp_path)
    assert not extra.exists() and again.counts == files.counts
    half, new = specdec.load_pair("tiny", dtype="bfloat16"), tmp_path / "new"
    for pair, changes, folder, message in (
        (tiny, {"seed": 6}, tmp_path, "made with another settings"),
        (tiny, {"openings": config.prompts}, tmp_path, "made with another settings"),
        (half, {}, tmp_path, "made with another target"),
        (bigram_pair(), {}, new, "no tokenizer"),
        (tiny, {"prompts": tmp_path / "nothing"}, new, "there is no file"),
        (tiny, {"answer_tok": 2000}, new, "may grow to .* lower prompt_tok or answer_tok"),
        (tiny, {"rows": 0}, new, "rows"),
        (tiny, {"rows": 10**9}, new, "GiB"),
    ):
        pytest.raises(SpecdecError, generate, pair, replace(config, **changes), folder).match(
            message
        )
    for minutes in (float("nan"), -1.0):
        pytest.raises(SpecdecError, generate, tiny, config, new, minutes=minutes).match("minutes")


def chat(prompt, answer="Something.", ids=(7, 8)):
    said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"temperature": 0.0, "messages": said, "answer_ids": list(ids)}


def test_nothing_twice_and_nothing_of_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "SHARD", 6)
    prompt, reference = list(benchmark_texts())[:2]
    (tmp_path / "own.jsonl").write_text(json.dumps(chat("Old.", "An old answer.")) + "\n")
    files = ChatFiles(tmp_path, {"seed": 1}, hold_out=0.0)
    assert files.answer_tok == 2
    repeated, known = chat(" ONE. ", "Two."), chat(f"{prompt.upper()}\n")
    files.write(
        enumerate([None, chat("One."), chat("two.", " "), repeated, known, chat("New", "Fresh")])
    )
    assert [row["number"] for row in chats_of(tmp_path) if "number" in row] == [1, 5]
    expected = dict(unfinished=1, kept=2, empty=1, repeated=1, benchmark=1, shards=1, train_tok=6)
    assert files.counts == expected
    again = ChatFiles(tmp_path, {"seed": 1}, hold_out=0.0)
    assert again.counts == expected and again.next_numbers == range(6, 12)
    more = [
        chat("Three", reference),
        chat("old.", "x"),
        chat("y", "an OLD  answer."),
        chat("z", "fresh"),
    ]
    again.write(enumerate(more, 6))
    assert (
        again.counts["benchmark"] == 2
        and again.counts["repeated"] == 4
        and again.counts["kept"] == 2
    )


def test_a_second_question_may_follow_many_chats_and_prompts_come_from_a_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(own, "SHARD", 400)
    reference = list(benchmark_texts())[1]
    files = ChatFiles(tmp_path / "second", {}, hold_out=0.25)
    asked = [{"role": "user", "content": "Say it shorter."}]
    numbered = []
    for i in range(199):
        first = chat(f"Prompt {i}", f"Answer {i}")
        second = chat("", f"Short {i}")
        numbered += [
            first,
            second | {"messages": first["messages"] + asked + second["messages"][1:]},
        ]
    again = numbered[1] | {
        "messages": numbered[1]["messages"][:-1] + [{"role": "assistant", "content": "Other."}]
    }
    said = chat("One", reference)["messages"] + asked + chat("", "Fine.")["messages"][1:]
    given = chat("", "Fine.") | {"messages": said}
    files.write(enumerate([*numbered, again, given]))
    assert (files.counts["kept"], files.counts["repeated"], files.counts["benchmark"]) == (
        398,
        1,
        1,
    )
    parts = [row["part"] for row in chats_of(tmp_path / "second")]
    assert parts[::2] == parts[1::2] and 20 < parts[::2].count("held-out") < 80
    parts = []
    for folder, order in (("a", 1), ("b", -1)):
        files = ChatFiles(tmp_path / folder, {}, hold_out=0.25)
        numbered = [chat(f"Prompt {i}", f"Answer {i}") for i in range(400)][::order]
        files.write(enumerate(numbered))
        rows = chats_of(tmp_path / folder)
        parts.append({row["messages"][0]["content"] for row in rows if row["part"] == "held-out"})
        assert files.counts["held_out_tok"] == 2 * len(parts[-1])
    assert parts[0] == parts[1] and 70 < len(parts[0]) < 130
    row = {"question_id": 1, "turns": ["How many eggs?", "And now?"], "reference": ["Seven eggs."]}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row) + "\n")
    more = set(benchmark_texts(tmp_path)) - set(benchmark_texts())
    assert more == {"How many eggs?", "And now?", "Seven eggs."}
    path = tmp_path / "prompts.jsonl"
    said = {"system": "S", "user": "a\\n", "assistant": "b"}
    messages = [{"role": role, "content": text} for role, text in said.items()]
    path.write_text(
        json.dumps({"messages": messages}) + "\n\n" + json.dumps({"prompt": "c"}) + "\n"
    )
    assert own.read_prompts(path) == [messages[:2], [{"role": "user", "content": "c"}]]
    for line in ("{", '{"prompt": 3}', '{"messages": []}', '{"messages": ["x"]}', "[1]"):
        path.write_text(line)
        pytest.raises(SpecdecError, own.read_prompts, path).match("prompts.jsonl, line 1: ")
    path.write_text("\n")
    pytest.raises(SpecdecError, own.read_prompts, path).match("holds no prompt")
    pytest.raises(SpecdecError, own.read_prompts, tmp_path / "nowhere.txt").match(
        "there is no file"
    )


@pytest.mark.parametrize("path", [own.OPENINGS, own.PROMPTS])
def test_own_texts_are_many_and_of_no_benchmark(path):
    digests = [prompt_digest(message["content"]) for [message] in own.read_prompts(path)]
    assert len(set(digests)) == len(digests) >= 150
    assert not set(digests) & {prompt_digest(text) for text in benchmark_texts()}


def test_tokens_are_drawn_around_what_a_user_says_and_only_new_ones_are_read(tiny):
    before, after = own.around_user_text(tiny)
    said = tiny.tokenizer.encode("Hi", add_special_tokens=False)
    assert [*before, *said, *after] == tiny.ids_of([{"role": "user", "content": "Hi"}])
    logits, rng = torch.tensor([0.0, 2.0, 1.0, -30.0]), random.Random(0)
    assert [own.draw(logits, 0, rng) for _ in range(3)] == [1, 1, 1]
    counts = torch.bincount(
        torch.tensor([own.draw(logits.bfloat16(), 0.5, rng) for _ in range(4000)]), minlength=4
    )
    expected = 4000 * (logits / 0.5).softmax(-1)
    assert (
        counts[3] == 0 and float(((counts - expected)[:3] ** 2 / expected[:3]).sum()) < 13.8
    )  # 2 degrees, p = 0.001
    kept = []
    cache = SimpleNamespace(append=kept.append, truncate=kept.append)
    text = own._Text(SimpleNamespace(device=torch.device("cpu")), cache, "opened", [1, 2, 3])
    for replies, ids, most, stops, wanted, shared in (
        ([10, 11, 12], [1, 2, 3, 4, 5], 8, {12}, ([[4, 5], [10], [11]], [10, 11, 12]), 3),
        ([20, 21], [1, 2, 3, 9, 9], 2, {12}, ([[9, 9], [20]], [20, 21]), 3),  # what differs is read
        ([30], [1, 2, 3], 1, {}, ([[3]], [30]), 2),  # the last one is read in any case
        ([], [1, 2, 3], 0, {}, ([], []), 2),
    ):
        assert (
            continued(text, replies, ids, most, frozenset(stops), 0.0, None) == wanted
            and kept[-1] == shared
        )
        assert text.held == [*ids, *replies[:-1]]
    assert kept == ["opened", 3, 3, 2, 2]


def test_the_command_says_what_the_folder_holds(tiny, tmp_path, config, capsys):
    assert "1,000 answer tokens take about" in estimate_chats(tiny, config, 1000)
    assert estimate_chats(tiny, config, 2_000_000).endswith("and 24 MB.")
    places = f"--out {tmp_path}/out --prompts {config.prompts}"
    arguments = f"generate-data tiny {places} --rows 3 --tokens".split()
    assert cli.main([*arguments, "0.05k", "--estimate"]) == 0
    assert (
        not (tmp_path / "out").exists() and "50 answer tokens take about" in capsys.readouterr().err
    )
    assert cli.main([*arguments, "5"]) == 0
    assert "answer tokens (kept" in capsys.readouterr().out
    assert cli.main([*arguments, "many"]) == 2
    assert "--tokens takes a number such as 500k or 3M" in capsys.readouterr().err


def continued(text, replies, *arguments):
    """(tokens that each forward read, what was written) of `_Text.continued` where these tokens are
    the likeliest.
    """
    steps, read = text.continued(*arguments), []
    try:
        forward = next(steps)
        for reply in replies:
            read.append(forward.tokens.tolist())
            logits = torch.zeros(1, 50)
            logits[0, reply] = 99.0
            forward = steps.send(SimpleNamespace(logits=logits))
        read.append(forward.tokens.tolist())
        return read, None
    except StopIteration as ended:
        return read, ended.value


def test_a_prompt_is_drawn_at_its_temperature_and_an_answer_at_its_own(tiny, monkeypatch):
    config = own.ChatConfig(
        seed=5, prompt_tok=20, answer_tok=7, prompt_temperature=0.5, temperatures=((0.25, 1.0),)
    )
    writer, asked = own.ChatWriter(tiny, config), []
    writer.prompts = writer.prompts[:1]
    writer.target = SimpleNamespace(new_cache=lambda limit: None)
    end = next(iter(writer.turn_ends))

    def text(self, ids, most, stops, temperature, rng):
        asked.append((ids, most, stops, temperature))
        yield from ()
        return [40, 41, end] if stops == writer.breaks else [50, 51]

    monkeypatch.setattr(own._Text, "continued", text)
    monkeypatch.setattr(own._Text, "__init__", lambda self, *given: None)

    def run(number):
        try:
            next(writer._chat(number, None))
        except StopIteration as ended:
            return ended.value

    number, row = run(0)
    given = tiny.ids_of(writer.prompts[0])
    assert asked == [(given, 7, tiny.stop_tokens, 0.25)] and number == 0
    said = {"role": "assistant", "content": tiny.text_of([50, 51])}
    assert row == {
        "temperature": 0.25,
        "messages": [*writer.prompts[0], said],
        "answer_ids": [50, 51],
    }
    asked.clear()
    number, row = run(3)
    (begun, most, stops, temperature), (question, *rest) = asked
    opening = begun[len(writer.before) :]
    assert begun[: len(writer.before)] == writer.before and (most, temperature) == (
        20 - len(opening),
        0.5,
    )
    content = tiny.tokenizer.decode([*opening, 40, 41]).strip()
    assert row["messages"][0] == {"role": "user", "content": content} and row["messages"][1] == said
    assert question == tiny.ids_of([row["messages"][0]]) and rest == [7, tiny.stop_tokens, 0.25]
    openings = [tiny.tokenizer.encode(one, add_special_tokens=False) for one in writer.openings]
    rng = random.Random("chats/5/3")
    rng.choices([0.25], [1.0])  # the temperature is drawn first
    assert opening == rng.choice(openings)
    end = 42  # a prompt that does not end there came to nothing
    assert run(3) == (3, None)
    writer.limit = 10
    assert run(0) == (0, None), "too long for the context"
