"""The `laptop/...` suites: all prompts differ, from the benchmarks too; references are right."""

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

SHARED = Path(os.environ.get("SPECDEC_SHARED", Path(suites.__file__).parents[3] / "shared"))
MOST_ALIKE = 0.12  # shared pairs of 3 words over all of two prompts
CHECKED = {"humaneval", "gsm8k", "nq", "mbpp"}


def of(name: str) -> list[suites.Prompt]:
    return suites.load_suite(f"laptop/{name}")


def grams(texts, size: int) -> set[tuple]:
    """All runs of `size` words in any of the texts."""
    runs = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        runs.update(tuple(words[i : i + size]) for i in range(len(words) - size + 1))
    return runs


def alike(prompts) -> float:
    """The largest Jaccard similarity of two prompts, as sets of three words in a row."""
    sets = [grams(prompt.turns, 3) for prompt in prompts]
    return max(len(a & b) / max(1, len(a | b)) for a, b in itertools.combinations(sets, 2))


@pytest.mark.parametrize("name", suites.NAMES)
def test_every_suite_has_enough_prompts_in_every_part(name):
    prompts = of(name)
    train, tune, test = map(len, suites.split(prompts).values())
    assert train >= 12 and tune >= 5 and test >= 12
    for number, prompt in enumerate(prompts):
        assert prompt.id == f"laptop/{name}/{number}"
        assert len(prompt.turns) == (2 if name == "mt_bench" else 1)
        assert (prompt.check is not None) == (name in CHECKED)
        assert prompt.reference or name == "mt_bench"


def test_no_two_prompts_are_alike_and_generated_ones_would_be_found_out():
    assert alike([prompt for name in suites.NAMES for prompt in of(name)]) <= MOST_ALIKE
    assert alike(of("mmlu")) <= MOST_ALIKE
    assert alike(suites.load_suite("toy/gsm8k")[:32]) > 1.5 * MOST_ALIKE


def test_nothing_is_shared_with_the_real_benchmarks():
    rows = []
    for file in sorted((SHARED / "data" / "benchmarks").glob("*.jsonl")):
        rows += [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    if not rows:
        pytest.skip(f"no benchmarks in {SHARED} (SPECDEC_SHARED names another place)")
    texts = []
    for row in rows:
        texts += row["turns"]
        texts += [text for text in row.get("reference") or [] if isinstance(text, str)]
    real = grams(texts, 8)
    assert len(real) > 20_000
    for name in (*suites.NAMES, suites.SUBJECTS):
        for prompt in of(name):
            assert not grams([*prompt.turns, prompt.reference or ""], 8) & real, prompt.id


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_references_pass_their_checks_and_nonsense_does_not(name):
    code = name in ("humaneval", "mbpp")
    nonsense = "```python\ndef nothing():\n    return None\n```" if code else "I cannot say."
    for prompt in of(name)[: 4 if code else None]:
        assert suites.check_answer(prompt, prompt.reference) is True, prompt.id
        assert suites.check_answer(prompt, nonsense) is False


def test_sums_in_worked_answers_lead_to_the_result():
    equation = re.compile(r"([\d.]+(?: [-+*/] [\d.]+)+) = (\d+(?:\.\d+)?)")
    for prompt in of("gsm8k"):
        steps, result = prompt.reference.split("\n#### ")
        sums = equation.findall(steps)
        assert len(sums) == steps.count("=") >= 2, prompt.id
        for left, right in sums:
            assert eval(left) == pytest.approx(float(right)), (prompt.id, left)
        assert float(sums[-1][1]) == float(result), prompt.id
        assert not passes(prompt.check, f"The answer is {float(result) + 1}.")


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_examples_hold_and_code_checks_refuse_a_function_that_does_nothing(name):
    for prompt in of(name):
        space = {}
        exec(prompt.check.get("prompt", "") + prompt.reference, space)
        function = space[prompt.check["entry"]]
        if name == "humaneval":
            parsed = doctest.DocTestParser().get_doctest(function.__doc__, space, "", None, 0)
            done = doctest.DocTestRunner(verbose=False).run(parsed)
            assert parsed.examples and done.failed == 0, prompt.id
            exec(prompt.check["prompt"] + prompt.reference, space)
        tests = "\n".join(prompt.check["tests"])
        exec(tests, space)
        exec(f"def {prompt.check['entry']}(*arguments):\n    return None", space)
        pytest.raises((AssertionError, TypeError), exec, tests, space)


def test_subjects_have_three_questions_each_and_letters_that_check():
    prompts = of("mmlu")
    subjects = suites.by_subject(prompts)
    assert len(subjects) == 57 and {len(group) for group in subjects.values()} == {3}
    letters = Counter(prompt.check["value"] for prompt in prompts)
    # guessing one letter gains little
    assert set(letters) == set("ABCD") and min(letters.values()) >= len(prompts) / 6
    for prompt in prompts:
        choices = dict(re.findall(r"^([A-D])\. (.+)$", prompt.turns[0], re.MULTILINE))
        assert list(choices) == list("ABCD") and len(set(choices.values())) == 4, prompt.id
        for letter, text in choices.items():
            correct = letter == prompt.check["value"]
            assert suites.check_answer(prompt, f"{letter}. {text}") is correct, prompt.id
