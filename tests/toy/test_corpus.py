"""The corpus: deterministic, varied, never leaking a test prompt, and every checkable answer is right."""

import ast
import json
import re
import subprocess
import sys

import pytest

from specdec.data.suites import EMBEDDED_FOLDER
from specdec.errors import SpecdecError
from specdec.toy import corpus
from specdec.toy.corpus import code, instruct, maths, news, passages, structured, translation
from specdec.toy.corpus.ideas import IDEAS
from specdec.toy.corpus.ideas_text import TEXT_IDEAS
from specdec.toy.corpus.library import module_split
from specdec.toy.corpus.measure import distinct_n, loop_rate
from specdec.toy.suites import write_suites


def take(family, count=300, seed=0):
    return list(corpus.generate(family, seed, count))


def test_there_are_at_least_twelve_families_and_each_speaks_its_name():
    assert len(set(corpus.FAMILIES)) == len(corpus.FAMILIES) >= 12
    for family in corpus.FAMILIES:
        for example in take(family, 40):
            assert example.family == family
            assert len(example.turns) == len(example.answers) == (2 if family == "chat" else 1)


@pytest.mark.parametrize("family", corpus.FAMILIES)
def test_streams_are_deterministic_and_have_the_prefix_property(family):
    assert take(family, 20) == take(family, 50)[:20]
    assert take(family, 20) != take(family, 20, seed=1)


def test_streams_do_not_depend_on_the_hash_seed_of_the_process():
    program = (
        "from specdec.toy import corpus; import hashlib;"
        "print(hashlib.sha256(repr([list(corpus.generate(f, 3, 12)) for f in corpus.FAMILIES]).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("family", corpus.FAMILIES)
def test_text_is_plain_compact_and_fully_resolved(family):
    for example in take(family):
        whole = "".join(example.turns + example.answers)
        assert whole.isascii() and len(whole) < 900
        assert all(text.strip() for text in example.turns + example.answers)
        assert not re.search(r"\{\w+(:\w+)?\}|\w\|\w|  \w", whole) or family in ("complete", "write_code", "chat")


@pytest.mark.parametrize("family", corpus.FAMILIES)
def test_text_is_varied_and_does_not_loop(family):
    examples = take(family, 400)
    answers = [answer for example in examples for answer in example.answers]
    assert len({example.turns[0] for example in examples}) > 0.9 * len(examples)
    assert sum(map(loop_rate, answers)) / len(answers) < 0.02
    assert distinct_n(answers, 4) > (0.1 if family in ("howto", "letter") else 0.2)


def test_open_families_are_more_varied_than_closed_ones():
    variety = {family: distinct_n([e.answers[0] for e in take(family)], 3) for family in ("story", "table", "headline")}
    assert variety["story"] > variety["table"] and variety["story"] > variety["headline"]


def test_measures_on_texts_with_known_values():
    assert distinct_n(["a b a b"], 2) == pytest.approx(2 / 3)  # ab, ba, ab
    assert distinct_n(["a"], 4) == 1.0
    assert loop_rate("a b c d e f") == 0.0
    assert loop_rate("a b c d a b c d") == pytest.approx(1 / 5)  # the last of five 4-grams was seen before
    assert loop_rate([7] * 10) == pytest.approx(6 / 7)


def test_no_training_example_is_held_out_and_about_an_eighth_of_the_stream_is():
    assert not any(corpus.held_out(example) for example in corpus.training_examples(0, 3000))
    held = [corpus.held_out(example) for family in corpus.FAMILIES for example in take(family)]
    assert 0.10 < sum(held) / len(held) < 0.15
    assert corpus.held_out("A  b\nC") == corpus.held_out("a b c")  # spacing and case do not move a prompt


def test_the_mixture_is_deterministic_follows_weights_and_rejects_bad_ones():
    first = list(corpus.training_examples(5, 60))
    assert first == list(corpus.training_examples(5, 90))[:60] and first != list(corpus.training_examples(6, 60))
    counts = [e.family for e in corpus.training_examples(0, 600, {"maths": 3, "story": 1})]
    assert set(counts) == {"maths", "story"} and 0.65 < counts.count("maths") / 600 < 0.85
    with pytest.raises(SpecdecError, match="maths"):
        corpus.training_examples(0, 1, {"math": 1})
    with pytest.raises(SpecdecError, match="weight"):
        corpus.training_examples(0, 1, {"maths": 0})
    with pytest.raises(SpecdecError, match="story"):
        corpus.generate("stories", 0, 1)


STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def worked_value(answer):
    """Recompute every step of a worked answer and return the last result; independent of the generator."""
    last = None
    for left, sign, right, shown in STEP.findall(answer):
        left, right = int(left), int(right)
        if sign == "/":
            assert left % right == 0
        last = {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}[sign]
        assert last == int(shown) and 0 <= last < 1000
    return last


def test_every_worked_step_and_every_maths_answer_is_right():
    signs = set()
    for example in take("maths", 1500):
        answer = example.answers[0]
        value = worked_value(answer)
        assert answer.endswith(f"\nAnswer: {value}") and example.check == {"kind": "number", "value": str(value)}
        steps = STEP.findall(answer)
        assert 1 <= len(steps) <= 5
        signs.update(step[1] for step in steps)
        first = [steps[0][0], steps[0][2]]
        words = example.turns[0]
        assert all(number in words or "doubles" in words or "triples" in words for number in first[:1])
    assert signs == set("+-*/")


def test_worked_values_chain_from_the_prompt():
    """Each number in a step stands in the problem or is an earlier result (doubling and tripling are said in words)."""
    for example in take("maths", 500):
        known = set(re.findall(r"\d+", example.turns[0])) | {"2" * ("doubles" in example.turns[0])}
        known |= {"3" * ("triples" in example.turns[0])}
        for left, sign, right, shown in STEP.findall(example.answers[0]):
            summed = "red and" in example.turns[0] and sign == "/"
            assert summed or {left, right} <= known, example
            known.add(shown)


def run_answer(example):
    source = example.answers[0].removeprefix("```python\n").removesuffix("\n```")
    scope = {}
    exec(source, scope)
    assert callable(scope[example.check["entry"]])
    for line in example.check["tests"]:
        exec(line, scope)
    return scope


@pytest.mark.parametrize("family", ["complete", "write_code"])
def test_every_code_answer_passes_its_tests(family):
    for example in take(family, 600):
        assert len(example.check["tests"]) >= 3
        run_answer(example)


def test_a_wrong_function_fails_its_tests():
    example = take("complete", 1)[0]
    entry = example.check["entry"]
    with pytest.raises(AssertionError):
        scope = {entry: lambda *arguments: object()}
        for line in example.check["tests"]:
            exec(line, scope)


def test_doctest_examples_in_prompts_hold():
    for example in take("complete", 300):
        scope = run_answer(example)
        shown = re.findall(r">>> (.+)\n    (.+)\n", example.turns[0])
        assert shown and all(repr(eval(call, scope)) == value for call, value in shown)


def test_every_function_idea_is_drawn_and_no_argument_hides_a_local_name():
    rows = IDEAS + TEXT_IDEAS
    assert 100 <= len(rows) <= 200
    for _, kinds, _, body in rows:
        source = "def f():\n    " + body.format(a="ARG_A", b="ARG_B", k=2).replace("\n", "\n    ")
        stored = {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assert not stored & {name for kind in kinds.split() for name in code._ARGUMENTS[code._base_kind(kind)]}
    entries = {example.check["entry"] for example in take("write_code", 3000)}
    assert all(entries & set(names.split()) for names, *_ in rows)


def test_translation_is_one_to_one_and_reversible_word_by_word():
    table = translation.lexicon()
    assert len(set(table.values())) == len(table) > 70
    back = {stem: word for word, stem in table.items()}
    endings = re.compile(r"(ien|en|i|ta|ra|a)$")
    marks = {"lo", "un", "ne", "ed"}
    for example in take("translate", 200):
        velan = example.turns[0].split(": ")[-1].split("? ")[-1]
        velan = (
            velan
            if example.turns[0].startswith(("Translate into English", "Translate Velan", "What"))
            else example.answers[0]
        )
        for word in velan.lower().replace(".", "").split():
            stems = {word} | {word.removesuffix(e) for e in ("i", "en", "ien", "a", "ta", "ra")}
            assert word in marks or stems & set(back), (word, velan)
            assert word in marks or word in back or endings.search(word)


def test_summaries_come_from_the_article():
    """Every number, name and weekday of a summary stands in its article."""
    facts = re.compile(r"\d+|\b(?:[A-Z][a-z]+ [A-Z][a-z]+|[A-Z][a-z]+day)\b")
    for family in ("news", "headline"):
        for example in take(family):
            found = facts.findall(example.answers[0])
            assert all(fact in example.turns[0] or fact.lower() in example.turns[0].lower() for fact in found), example
    assert len({e.answers[0] for e in take("news")}) > 290
    assert len(news._KINDS) >= 8


def test_passage_answers_contain_the_fact_and_the_passage_does_too():
    for example in take("passage_qa", 500):
        value = example.check["value"]
        assert value in example.answers[0] and value in example.turns[0]
        quote = example.answers[0].split('also says: "')[1].rstrip('"')
        assert quote in example.turns[0] or quote in example.turns[0].replace("\n", " ")
    assert all(len(topic) >= 7 for topic in passages._TOPICS)


def test_tables_and_puzzles_are_computed_from_the_prompt():
    for example in take("table"):
        rows = [line.strip("| ").split(" | ") for line in example.answers[0].split("\n")[2:]]
        sentences = example.turns[0].split(": ", 1)[1].rstrip(".").split(". ")
        assert len(rows) == len(sentences)
        for row in rows:
            assert sum(set(row) <= set(sentence.split()) for sentence in sentences) == 1
        if "sorted by name" in example.turns[0]:
            assert rows == sorted(rows)
        elif " sorted by " in example.turns[0]:
            assert rows == sorted(rows, key=lambda row: int(row[-1]))
    sorted_seen = 0
    for example in take("puzzle"):
        prompt, answer = example.turns[0], example.answers[0]
        if prompt.startswith("Sort these numbers"):
            numbers = [int(text) for text in prompt.split(": ")[1].split(", ")]
            assert answer == ", ".join(map(str, sorted(numbers, reverse="largest to smallest" in prompt)))
            sorted_seen += 1
        elif "alphabetical" in prompt:
            assert answer.split(", ") == sorted(prompt.split(": ")[1].split(", "))
        elif "Who is the" in prompt:
            names = answer.split("\n")[0].split(": ")[1].rstrip(".").split(", ")
            clues = re.findall(r"(\w+) is \w+ than (\w+)\.", prompt)
            assert sorted(clues) == sorted(zip(names, names[1:], strict=False))
            assert example.check["value"] == answer.split("\n")[1]
    assert sorted_seen > 20 and set(structured.MAKERS) == {"extract", "table", "puzzle"}


def test_json_answers_hold_the_asked_keys_with_values_from_the_text():
    for example in take("extract"):
        record = json.loads(example.answers[0])
        assert record and all(str(value) in example.turns[0] for value in record.values())
        assert all(key in example.turns[0] for key in record)


def test_listed_words_respect_the_exception():
    for example in take("instruct", 800):
        excluded = re.search(r"that do not start with (\w)\.", example.turns[0])
        if excluded:
            words = [line.split(". ")[1] for line in example.answers[0].split("\n")]
            assert not any(word.startswith(excluded.group(1)) for word in words)
    assert len(instruct._TASKS) >= 8 and len(maths._KINDS) >= 5


def test_library_modules_are_split_whole_and_are_ascii():
    train, test = (dict(corpus.library_text(split)) for split in ("train", "test"))
    assert train and test and not set(train) & set(test)
    assert len(test) / (len(train) + len(test)) < 0.3
    assert {module_split(name) for name in test} == {"test"} and {name.split(".")[0] for name in train}.isdisjoint(
        name.split(".")[0] for name in test
    )
    assert sum(map(len, train.values())) > 2_000_000 and all(text.isascii() for text in train.values())
    with pytest.raises(SpecdecError, match="train"):
        corpus.library_text("training")


def test_the_toy_suites_are_what_the_generators_write(tmp_path):
    """Byte for byte, so that nobody edits a suite by hand and no generator drifts away from its suite."""
    write_suites(tmp_path)
    written, shipped = tmp_path / "toy", EMBEDDED_FOLDER / "toy"
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in shipped.iterdir())
    for path in written.iterdir():
        assert path.read_bytes() == (shipped / path.name).read_bytes(), path.name
