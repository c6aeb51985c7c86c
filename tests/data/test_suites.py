"""The suites: embedded, from a folder, from the hub (a fake), checked and split; bad input is one clear sentence."""

import dataclasses
import json
import sys
import types

import pytest
from fakes.chats import held_out

from specdec.data import suites
from specdec.errors import SpecdecError

LAPTOP, TOY, REAL = suites.LAPTOP, suites.TOY, list(suites.NAMES)


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv(suites.DATA_VARIABLE, raising=False)


def test_every_paper_suite_exists_in_three_forms_and_a_pair_gets_those_that_suit_it():
    assert list(suites.SUITES) == [*LAPTOP, "laptop/mmlu", *TOY, *REAL, "mmlu"] and len(REAL) == 9
    assert all(f"{kind}/{name}" in suites.SUITES for kind in ("laptop", "toy") for name in REAL)
    assert all(
        suite.description and suite.licence and suite.source for suite in suites.SUITES.values()
    )
    assert all(
        len(suites.SUITES[name].hub[3]) == 40 for name in REAL
    )  # a full commit, not a branch
    assert set(suites.TOY_PAIRS) == {"tiny", "small"}
    assert [suites.embedded_suite(name, "tiny") for name in REAL] == TOY
    assert [suites.embedded_suite(name, "qwen3-14b") for name in REAL] == LAPTOP
    assert suites.embedded_suite("toy/nq", "qwen3-14b") == "toy/nq"
    assert (
        suites.embedded_suite("mmlu", "tiny")
        == "laptop/mmlu"
        == suites.embedded_suite("mmlu", "smollm2")
    )
    assert {*suites.DEFAULT_NAMES, *suites.TIMED_NAMES} <= set(REAL)


@pytest.mark.parametrize("name", TOY)
def test_toy_suites_hold_eighty_different_held_out_prompts(name):
    prompts = suites.load_suite(name)
    assert (
        len(prompts)
        == 80
        == len({prompt.turns[0] for prompt in prompts})
        == len({prompt.id for prompt in prompts})
    )
    assert all(
        held_out(prompt.turns[0]) and prompt.suite == name and prompt.reference
        for prompt in prompts
    )
    assert {prompt.id for prompt in prompts} == {f"{name}/{number}" for number in range(80)}
    assert {len(prompt.turns) for prompt in prompts} == ({2} if name == "toy/mt_bench" else {1})


def test_references_pass_nonsense_fails_and_limits_take_a_stable_seeded_subset_that_grows():
    for names, limit, nonsense in (
        (("toy/gsm8k", "toy/nq", "toy/wmt14"), None, "I do not know."),
        (("toy/humaneval", "toy/mbpp"), 6, "```python\nprint('hello')\n```"),
    ):
        for prompt in (prompt for name in names for prompt in suites.load_suite(name, limit=limit)):
            assert suites.check_answer(prompt, prompt.reference) is True
            assert suites.check_answer(prompt, nonsense) is False
    assert suites.check_answer(suites.load_suite("toy/alpaca")[0], "anything") is None
    sums = suites.load_suite("toy/gsm8k")
    shifted = [suites.check_answer(a, b.reference) for a, b in zip(sums, sums[1:], strict=False)]
    assert sum(shifted) / len(shifted) < 0.1, "answers of one prompt rarely pass another"
    every, five, nine = (suites.load_suite("toy/gsm8k", limit=limit) for limit in (None, 5, 9))
    assert len(five) == 5 and {p.id for p in five} < {p.id for p in nine}
    assert [p for p in every if p in nine] == nine  # in the suite's own order
    assert (
        five
        == suites.load_suite("toy/gsm8k", limit=5)
        != suites.load_suite("toy/gsm8k", limit=5, seed=1)
    )
    assert suites.load_suite("toy/gsm8k", limit=500) == every
    for bad in (0, -1, 2.5, True):
        pytest.raises(SpecdecError, suites.load_suite, "toy/gsm8k", limit=bad).match("limit")
    pytest.raises(SpecdecError, suites.load_suite, "gsm9k").match("gsm8k")


def write(folder, name, *lines):
    (folder / name).write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )


def test_a_folder_of_jsonl_is_read_and_malformed_lines_name_file_line_and_field(
    tmp_path, monkeypatch
):
    row = {
        "question_id": 7,
        "category": "math",
        "turns": ["How many?"],
        "reference": ["1 + 2 = 3\n#### 1,003"],
    }
    write(tmp_path, "gsm8k.jsonl", row, "", {"question_id": 8, "turns": ["And now?"]})
    first, second = suites.load_suite("gsm8k", tmp_path)
    assert (
        first.id == "gsm8k/7"
        and first.turns == ("How many?",)
        and first.reference.startswith("1 + 2")
    )
    assert (
        suites.check_answer(first, "Answer: 1003") is True
        and suites.check_answer(second, "3") is None
    )
    monkeypatch.setenv(suites.DATA_VARIABLE, str(tmp_path))
    assert suites.load_suite("gsm8k") == [first, second]
    write(tmp_path, "sum.jsonl", {"question_id": 1, "turns": ["Summarize: x"]})
    assert suites.load_suite("cnn_dm")[0].suite == "cnn_dm"
    row = {
        "question": "Which?",
        "subject": "anatomy",
        "choices": ["this", "that", "both", "none"],
        "answer": 2,
    }
    write(
        tmp_path,
        "mmlu.jsonl",
        row,
        {**row, "subject": "virology"},
        {"question_id": "law/9", "turns": ["Why?"]},
    )
    prompts = suites.load_suite("mmlu", tmp_path)
    assert (
        prompts[0].turns == ("Which?\nA. this\nB. that\nC. both\nD. none",)
        and prompts[0].reference == "C. both"
    )
    assert (
        suites.check_answer(prompts[0], "C.") is True
        and suites.check_answer(prompts[0], "B.") is False
    )
    assert list(suites.by_subject(prompts)) == ["mmlu:anatomy", "mmlu:virology", "mmlu:law"]
    del row["answer"]
    write(tmp_path, "mmlu.jsonl", row)
    pytest.raises(SpecdecError, suites.load_suite, "mmlu", tmp_path).match("no 'answer'")
    for line, words in [
        ('{"question_id": 1, "turns": ["x"]', "JSON"),
        ({"turns": ["x"]}, "question_id"),
        ({"question_id": 3, "prompt": "x"}, "turns"),
        ("[]", "question_id, turns"),
        ({"question_id": 3, "turns": []}, "turns"),
        ({"question_id": 3, "turns": "x"}, "turns"),
        ({"question_id": 3, "turns": ["x", 4]}, "turns"),
    ]:
        write(tmp_path, "qa.jsonl", {"question_id": 1, "turns": ["fine"]}, line)
        pytest.raises(SpecdecError, suites.load_suite, "nq", tmp_path).match(
            f"qa.jsonl, line 2.*{words}"
        )
    pytest.raises(SpecdecError, suites.load_suite, "xsum", tmp_path).match("xsum.jsonl")
    write(tmp_path, "xsum.jsonl", "")
    pytest.raises(SpecdecError, suites.load_suite, "xsum", tmp_path).match("no prompts")


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


@pytest.mark.parametrize("name", REAL)
def test_hub_rows_become_prompts_at_the_pinned_revision(name, monkeypatch):
    calls = []

    def load_dataset(repository, config, *, split, revision):
        calls.append((repository, config, split, revision))
        return [HUB_ROWS[name]] * 100

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    first, *others = suites.load_suite(name)
    assert calls == [suites.SUITES[name].hub] and len(others) == suites.SUITE_PROMPTS - 1
    assert len(suites.load_suite(name, limit=3)) == 3
    assert len(first.turns) == (2 if name == "mt_bench" else 1) and (
        first.reference or name == "mt_bench"
    )
    if first.check:
        assert suites.check_answer(first, "Anna" if name == "nq" else first.reference) is True
    monkeypatch.setitem(HUB_ROWS, name, {"unexpected": 1})
    pytest.raises(SpecdecError, suites.load_suite, name).match("revision")


def test_offline_or_without_the_package_the_folder_is_offered(monkeypatch):
    def load_dataset(*arguments, **settings):
        raise ConnectionError("no route")

    for package, message in (
        (
            types.SimpleNamespace(load_dataset=load_dataset),
            "cannot load .* folder .*gsm8k.jsonl.*laptop/gsm8k",
        ),
        (None, "not installed.*folder"),
    ):
        monkeypatch.setitem(sys.modules, "datasets", package)
        pytest.raises(SpecdecError, suites.load_suite, "gsm8k").match(message)


def test_who_shares_a_text_with_a_later_part_is_left_out():
    test = suites.split([suites.Prompt(str(n), "s", (f"question {n}",)) for n in range(40)])[
        "test"
    ][0]
    others = [
        suites.Prompt(f"a{n}", "s", (f"another {n}", "And why?"), "So it is.") for n in range(40)
    ]
    alone = suites.split(others)
    assert alone["train"] == [] == alone["tune"] and 10 < len(alone["test"]) < 25
    apart = [
        dataclasses.replace(prompt, turns=prompt.turns[:1], reference=None) for prompt in others
    ]
    copy = dataclasses.replace(
        apart[0], turns=(apart[0].turns[0], "  QUESTION " + test.turns[0].split()[1])
    )
    found, whole = suites.split([*apart[1:], copy, test]), suites.split(apart)
    stays = apart[0] in whole["test"]
    assert found["test"] == [p for p in apart[1:] if p in whole["test"]] + [copy] * stays + [test]
    assert len(found["train"]) + len(found["tune"]) == len(whole["train"]) + len(whole["tune"]) - (
        not stays
    )


@pytest.mark.parametrize("names", [TOY, LAPTOP])
def test_splits_are_disjoint_complete_stable_and_blind_to_the_rest(names):
    """Over all suites together, though each is split alone: no turn and no answer stands in two parts."""
    prompts = [prompt for name in names for prompt in suites.load_suite(name)]
    gathered = {part: suites.gather(names, part=part) for part in suites.PARTS}
    texts = [frozenset().union(*(prompt.texts for prompt in part)) for part in gathered.values()]
    assert sum(map(len, texts)) == len(frozenset().union(*texts))
    assert sum(map(len, gathered.values())) > 0.95 * len(prompts)
    parts = suites.split(prompts)
    kept = {p.id for part in parts.values() for p in part}
    assert len(kept) == sum(map(len, parts.values())) > 0.95 * len(prompts)
    share = {name: len(part) / len(prompts) for name, part in parts.items()}
    assert share == pytest.approx({"train": 0.4, "tune": 0.2, "test": 0.4}, abs=0.06)
    half = suites.split(prompts[::2])
    for name in parts:  # half of them: the same parts, and at most fewer are left out
        assert {p.id for p in half[name] if p.id in kept} == {p.id for p in prompts[::2]} & {
            p.id for p in parts[name]
        }
    assert all(
        len(part) >= 5 for name in names for part in suites.split(suites.load_suite(name)).values()
    )


def test_real_prompts_are_taken_where_they_are_and_the_pair_understands_them(tmp_path, monkeypatch):
    monkeypatch.setenv(suites.DATA_VARIABLE, str(tmp_path))
    names = ["gsm8k", "cnn_dm", "xsum"]
    assert suites.usual_suites(names, "smollm2") == ["laptop/gsm8k", "laptop/cnn_dm", "laptop/xsum"]
    for file in ("gsm8k", "sum"):
        (tmp_path / f"{file}.jsonl").write_text('{"question_id": 1, "turns": ["How many?"]}\n')
    with pytest.warns(UserWarning, match=r"lacks xsum.* name them: laptop/xsum\."):
        assert suites.usual_suites(names, "smollm2") == ["gsm8k", "cnn_dm"]
    assert suites.usual_suites(names, "small") == ["toy/gsm8k", "toy/cnn_dm", "toy/xsum"]
    assert suites.usual_suites(["toy/nq", *names[:2]], "smollm2") == ["toy/nq", "gsm8k", "cnn_dm"]
    pytest.raises(SpecdecError, suites.usual_suites, ["gsm8", "cnn_dm"], "smollm2").match("gsm8")
    assert suites.usual_suites(["toy/nq", "xsum"], "smollm2") == ["toy/nq", "laptop/xsum"]
