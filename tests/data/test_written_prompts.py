"""The `laptop/...` suites: written by hand, all different, unlike the benchmarks they echo, and every reference is right."""

import doctest
import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from specdec.data import suites
from specdec.data.answer_checks import passes

BENCHMARKS = (
    Path(os.environ.get("SPECDEC_SHARED", Path(suites.__file__).parents[3] / "shared"))
    / "data"
    / "benchmarks"
)
MOST_ALIKE = 0.12  # shared pairs of 3 words over all of two prompts
CHECKED = {"humaneval", "gsm8k", "nq", "mbpp"}


def of(name: str) -> list[suites.Prompt]:
    return suites.load_suite(f"laptop/{name}")


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(texts, size: int) -> set[tuple]:
    """All runs of `size` words in any of the texts."""
    split = [words(text) for text in texts]
    return {tuple(text[i : i + size]) for text in split for i in range(len(text) - size + 1)}


def alike(prompts) -> float:
    """The largest Jaccard similarity of two prompts, as sets of three words in a row."""
    sets = [grams(prompt.turns, 3) for prompt in prompts]
    return max(len(a & b) / max(1, len(a | b)) for a, b in itertools.combinations(sets, 2))


@pytest.mark.parametrize("name", suites.NAMES)
def test_every_suite_has_enough_prompts_in_every_part_and_generated_ones_would_be_found_out(name):
    prompts = of(name)
    train, tune, test = map(len, suites.split(prompts).values())
    assert len(prompts) >= 32 and train >= 12 and tune >= 5 and test >= 12
    assert [prompt.id for prompt in prompts] == [
        f"laptop/{name}/{number}" for number in range(len(prompts))
    ]
    assert {len(prompt.turns) for prompt in prompts} == ({2} if name == "mt_bench" else {1})
    assert all(
        turn.strip() == turn or name == "humaneval" for prompt in prompts for turn in prompt.turns
    )
    assert {prompt.check is not None for prompt in prompts} == {name in CHECKED}
    assert all(prompt.reference for prompt in prompts) or name == "mt_bench"
    assert alike(suites.load_suite(f"toy/{name}")[: len(of(name))]) > 1.5 * MOST_ALIKE


def test_no_two_prompts_are_alike():
    assert alike([prompt for name in suites.NAMES for prompt in of(name)]) <= MOST_ALIKE


def test_nothing_is_shared_with_the_real_benchmarks():
    lines = [
        line
        for file in sorted(BENCHMARKS.glob("*.jsonl"))
        for line in file.read_text("utf-8").splitlines()
    ]
    if not lines:
        pytest.skip(f"no benchmarks in {BENCHMARKS} (SPECDEC_SHARED names another place)")
    rows = [json.loads(line) for line in lines]
    answers = [text for row in rows for text in row.get("reference") or [] if isinstance(text, str)]
    real = grams([turn for row in rows for turn in row["turns"]] + answers, 8)
    assert len(real) > 20_000 and grams([rows[0]["turns"][0]], 8) <= real
    for prompt in (prompt for name in (*suites.NAMES, suites.SUBJECTS) for prompt in of(name)):
        shared = grams([*prompt.turns, prompt.reference or ""], 8) & real
        assert not shared, (prompt.id, sorted(shared)[:3])


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_references_pass_their_checks_and_nonsense_does_not(name):
    code = name in ("humaneval", "mbpp")
    nonsense = "```python\ndef nothing():\n    return None\n```" if code else "I cannot say."
    for prompt in of(name)[: 6 if code else None]:
        assert suites.check_answer(prompt, prompt.reference) is True, prompt.id
        assert suites.check_answer(prompt, nonsense) is False


def test_sums_in_worked_answers_lead_to_the_result_and_examples_in_docstrings_hold():
    equation = re.compile(r"([\d.]+(?: [-+*/] [\d.]+)+) = (\d+(?:\.\d+)?)")
    for prompt in of("gsm8k"):
        steps, result = prompt.reference.split("\n#### ")
        sums = equation.findall(steps)
        assert len(sums) == steps.count("=") >= 2, prompt.id
        for left, right in sums:
            assert eval(left) == pytest.approx(float(right)), (prompt.id, left)
        assert float(sums[-1][1]) == float(result), prompt.id
        assert not passes(prompt.check, f"The answer is {float(result) + 1}.")
    for prompt in of("humaneval"):
        space = {}
        exec(prompt.check["prompt"] + prompt.reference, space)
        function = space[prompt.check["entry"]]
        examples = doctest.DocTestParser().get_doctest(function.__doc__, space, prompt.id, None, 0)
        assert (
            examples.examples and doctest.DocTestRunner(verbose=False).run(examples).failed == 0
        ), prompt.id


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_code_checks_refuse_a_function_that_does_nothing(name):
    for prompt in of(name):
        space, tests = {}, "\n".join(prompt.check["tests"])
        exec(prompt.check.get("prompt", "") + prompt.reference, space)
        exec(tests, space)
        exec(f"def {prompt.check['entry']}(*arguments):\n    return None", space)
        pytest.raises((AssertionError, TypeError), exec, tests, space)


def test_articles_have_the_length_of_a_column_and_conversations_cover_the_eight_categories():
    for prompt in of("cnn_dm") + of("xsum"):
        assert 150 <= len(prompt.turns[0].split()) <= 300
        assert 8 <= len(prompt.reference.split()) <= 70 and prompt.reference not in prompt.turns[0]
    lines = (
        (suites.EMBEDDED_FOLDER / "laptop" / "mt_bench.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    categories = Counter(json.loads(line)["category"] for line in lines)
    names = {
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    }
    assert set(categories) == names and min(categories.values()) >= 4


def test_subjects_have_three_questions_each_and_letters_that_check():
    prompts = of("mmlu")
    named = suites.by_subject(prompts)
    assert len(named) == 57 and {len(some) for some in named.values()} == {3}
    assert alike(prompts) <= MOST_ALIKE and len({prompt.turns for prompt in prompts}) == len(
        prompts
    )
    letters = Counter(prompt.check["value"] for prompt in prompts)
    assert (
        set(letters) == set("ABCD") and min(letters.values()) >= len(prompts) / 6
    )  # guessing one letter gains little
    for prompt in prompts:
        choices = re.findall(r"^([A-D])\. (.+)$", prompt.turns[0], re.MULTILINE)
        assert [letter for letter, _ in choices] == list("ABCD") and len(
            {text for _, text in choices}
        ) == 4, prompt.id
        wrong = next(
            f"{letter}. {text}" for letter, text in choices if letter != prompt.check["value"]
        )
        assert suites.check_answer(prompt, prompt.reference) is True, prompt.id
        assert (
            suites.check_answer(prompt, wrong) is False
            and suites.check_answer(prompt, "A fool knows.") is False
        )
