"""The suites: embedded, from a folder, from the hub (a fake), checked and split."""

import dataclasses
import json
import sys
import types

import pytest

from specdec.data import suites
from specdec.errors import SpecdecError

LAPTOP, TOY, REAL = suites.LAPTOP, suites.TOY, list(suites.NAMES)


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv(suites.DATA_VARIABLE, raising=False)


def test_every_paper_suite_exists_in_three_forms_and_a_pair_gets_those_that_suit_it():
    assert list(suites.SUITES) == [*LAPTOP, "laptop/mmlu", *TOY, *REAL, "mmlu"] and len(REAL) == 9
    for name in REAL:
        # a full commit, not a branch
        assert len(suites.SUITES[name].hub[3]) == 40
    assert [suites.embedded_suite(name, "tiny") for name in REAL] == TOY
    assert [suites.embedded_suite(name, "small+suffix") for name in REAL] == TOY
    assert [suites.embedded_suite(name, "qwen3-14b") for name in REAL] == LAPTOP
    assert suites.embedded_suite("toy/nq", "qwen3-14b") == "toy/nq"
    assert suites.embedded_suite("mmlu", "tiny") == "laptop/mmlu"


@pytest.mark.parametrize("name", ["gsm8k", "nq", "wmt14", "humaneval", "mbpp"])
@pytest.mark.parametrize("form", ["toy", "laptop"])
def test_references_pass_and_nonsense_fails(form, name):
    code = "```python\nprint('hello')\n```"
    is_code = name in ("humaneval", "mbpp")
    for prompt in suites.load_suite(f"{form}/{name}", limit=4 if is_code else None):
        if prompt.check is None:
            assert (form, name) == ("laptop", "wmt14")
            continue
        assert suites.check_answer(prompt, prompt.reference) is True
        assert suites.check_answer(prompt, code if is_code else "I do not know.") is False


def test_limits_take_a_stable_seeded_subset_that_grows():
    every = suites.load_suite("toy/gsm8k")
    five = suites.load_suite("toy/gsm8k", limit=5)
    nine = suites.load_suite("toy/gsm8k", limit=9)
    assert len(five) == 5 and {prompt.id for prompt in five} < {prompt.id for prompt in nine}
    assert [prompt for prompt in every if prompt in nine] == nine  # in the suite's own order
    assert five != suites.load_suite("toy/gsm8k", limit=5, seed=1)
    assert suites.load_suite("toy/gsm8k", limit=500) == every


def write(folder, name, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / name).write_text("\n".join(texts))


def test_a_folder_of_jsonl_is_read(tmp_path, monkeypatch):
    row = {"question_id": 7, "turns": ["How many?"], "reference": ["1 + 2 = 3\n#### 1,003"]}
    write(tmp_path, "gsm8k.jsonl", row, "", {"question_id": 8, "turns": ["And now?"]})
    first, second = suites.load_suite("gsm8k", tmp_path)
    assert (first.id, first.turns) == ("gsm8k/7", ("How many?",))
    assert first.reference == "1 + 2 = 3\n#### 1,003"
    assert suites.check_answer(first, "Answer: 1003") is True
    assert suites.check_answer(second, "3") is None
    monkeypatch.setenv(suites.DATA_VARIABLE, str(tmp_path))
    assert suites.load_suite("gsm8k") == [first, second]
    rows = [{"question_id": id, "turns": ["Why?"]} for id in ("anatomy/1", "law/2", "law/9")]
    write(tmp_path, "mmlu.jsonl", *rows)
    subjects = suites.by_subject(suites.load_suite("mmlu", tmp_path))
    assert list(map(len, subjects.values())) == [1, 2]
    assert len(suites.by_subject(subjects["mmlu:law"], limit=1)["mmlu:law"]) == 1


def test_a_conversation_is_chat_messages_or_their_text():
    prompt = suites.Prompt("a", "s", ("Why?", "And?"))
    chat = suites.conversation(types.SimpleNamespace(chats=True), prompt, 1, ["So."])
    roles = [(message["role"], message["content"]) for message in chat]
    assert roles == [("user", "Why?"), ("assistant", "So."), ("user", "And?")]
    plain = types.SimpleNamespace(chats=False)
    assert suites.conversation(plain, prompt, 1, ["So."]) == "Why?\n\nSo.\n\nAnd?"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"question_id": 1, "turns": ["x"]', "JSON"),
        ({"turns": ["x"]}, "question_id"),
        ({"question_id": 3, "prompt": "x"}, "turns"),
        ({"question_id": 3, "turns": []}, "turns"),
        ({"question_id": 3, "turns": "x"}, "turns"),
        ({"question_id": 3, "turns": ["x", 4]}, "turns"),
    ],
)
def test_malformed_lines_name_file_and_line(line, word, tmp_path):
    write(tmp_path, "qa.jsonl", {"question_id": 1, "turns": ["fine"]}, line)
    with pytest.raises(SpecdecError, match=f"qa.jsonl, line 2.*{word}"):
        suites.load_suite("nq", tmp_path)
    with pytest.raises(SpecdecError, match="xsum.jsonl"):
        suites.load_suite("xsum", tmp_path)


HUB_ROWS = {
    "mt_bench": {"prompt": ["a", "b"], "reference": [], "category": "math"},
    "humaneval": {
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate() == 1",
    },
    "gsm8k": {"question": "q", "answer": "work\n#### 5"},
    "alpaca": {"instruction": "Do it.", "input": "now", "output": "done"},
    "cnn_dm": {"article": "a", "highlights": "h"},
    "nq": {"question": "who", "answer": ["Ann", "Anna"]},
    "mbpp": {
        "text": "Write f.",
        "code": "def f():\n    return 1",
        "test_list": ["assert f() == 1"],
    },
    "xsum": {"document": "d", "summary": "s"},
    "wmt14": {"translation": {"de": "Hallo", "en": "Hello"}},
}
# the turns and the reference of each
HUB_PROMPTS = {
    "mt_bench": (("a", "b"), None),
    "humaneval": (("Complete the code I provided.\n\ndef f():\n",), "    return 1\n"),
    "gsm8k": (("q",), "work\n#### 5"),
    "alpaca": (("Do it.\nnow",), "done"),
    "cnn_dm": (("Summarize: a",), "h"),
    "nq": (("who",), "Ann"),
    "mbpp": (("Write f.\nassert f() == 1",), "def f():\n    return 1"),
    "xsum": (("Summarize in one sentence: d",), "s"),
    "wmt14": (("Translate German to English: Hallo",), "Hello"),
}


@pytest.mark.parametrize("name", REAL)
def test_hub_rows_become_prompts_at_the_pinned_revision(name, monkeypatch):
    calls = []

    def load_dataset(repository, config, *, split, revision):
        calls.append([repository, config, split, revision])
        return [HUB_ROWS[name]] * 100

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    first, *rest = suites.load_suite(name)
    assert calls == [list(suites.SUITES[name].hub)] and len(rest) == suites.SUITE_PROMPTS - 1
    assert (first.turns, first.reference) == HUB_PROMPTS[name]
    if first.check:
        assert suites.check_answer(first, "Anna" if name == "nq" else first.reference) is True


def test_a_prompt_that_shares_a_text_with_a_later_part_is_left_out():
    prompts = [suites.Prompt(str(n), "s", (f"question {n}",)) for n in range(40)]
    parts = suites.split(prompts)
    assert sum(map(len, parts.values())) == 40
    test = parts["test"][0]
    # a training prompt whose second turn is the test prompt, in other case and spacing
    train = parts["train"][0]
    copy = dataclasses.replace(train, turns=(*train.turns, "  QUESTION " + test.id))
    again = suites.split([copy if prompt is train else prompt for prompt in prompts])
    assert again["train"] == parts["train"][1:]
    assert (again["tune"], again["test"]) == (parts["tune"], parts["test"])
    # the same of a shared answer
    shared = [dataclasses.replace(prompt, reference="So it is.") for prompt in prompts]
    assert [len(part) for part in suites.split(shared).values()] == [0, 0, len(parts["test"])]


@pytest.mark.parametrize("names", [TOY, LAPTOP])
def test_splits_are_disjoint_and_blind_to_the_rest(names):
    """Over all suites together, though each is split alone."""
    prompts = suites.gather(names)
    gathered = {part: suites.gather(names, part=part) for part in suites.PARTS}
    texts = [frozenset().union(*(prompt.texts for prompt in part)) for part in gathered.values()]
    assert sum(map(len, texts)) == len(frozenset().union(*texts))
    share = {name: len(part) / len(prompts) for name, part in gathered.items()}
    assert share == pytest.approx({"train": 0.4, "tune": 0.2, "test": 0.4}, abs=0.06)
    half = suites.split(prompts[::2])
    for name, part in gathered.items():
        assert {prompt.id for prompt in half[name]} >= {
            prompt.id for prompt in part if prompt in prompts[::2]
        }
    for name in names:
        for part in suites.split(suites.load_suite(name)).values():
            assert len(part) >= 5


def test_prompts_are_gathered_from_names_texts_and_token_ids():
    named = suites.gather(["toy/nq", "toy/gsm8k"], limit=2)
    assert [prompt.suite for prompt in named] == ["toy/nq"] * 2 + ["toy/gsm8k"] * 2
    ids = suites.gather([[1, 2], (3,)])
    assert [(prompt.id, prompt.turns) for prompt in ids] == [
        ("prompts/0", ([1, 2],)),
        ("prompts/1", ([3],)),
    ]
    moved = suites.gather({"mine": [named[0], "Hello."]})
    assert [(prompt.id, prompt.suite) for prompt in moved] == [
        (named[0].id, "mine"),
        ("mine/1", "mine"),
    ]
    test = suites.gather("toy/nq", part="test", limit=3)
    assert test == suites.split(suites.load_suite("toy/nq"))["test"][:3]
    assert suites.describe_items(named) != suites.describe_items(named[::-1])


def test_real_prompts_are_taken_from_the_folder_for_pairs_that_understand_them(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(suites.DATA_VARIABLE, str(tmp_path))
    names = ["gsm8k", "cnn_dm", "xsum"]
    assert suites.usual_suites(names, "smollm2") == [f"laptop/{name}" for name in names]
    for file in ("gsm8k", "sum"):
        write(tmp_path, f"{file}.jsonl", {"question_id": 1, "turns": ["How many?"]})
    assert suites.usual_suites(names, "smollm2") == ["gsm8k", "cnn_dm", "laptop/xsum"]
    assert suites.usual_suites(names, "small") == [f"toy/{name}" for name in names]
    assert suites.usual_suites(["toy/nq", "xsum"], "smollm2") == ["toy/nq", "laptop/xsum"]
