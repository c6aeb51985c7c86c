"""What passes a check, and what an answer's code can do: nothing outside its folder."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from specdec.data import answer_checks
from specdec.data.answer_checks import passes

RIGHT = "def f(x):\n    return x + 1\n"
needs_proc = pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc here")


def judged(text: str, tests=("assert f(1) == 2",)) -> bool:
    check = {"kind": "code", "entry": "f", "tests": list(tests)}
    return passes(check, f"```python\n{text}\n```")


def test_tests_see_values_errors_and_helpers(capfd):
    answer = "def g(x):\n    return {x, (1.5, None)}\n\n"
    answer += "def f(x):\n    if x < 0:\n        raise ValueError(x)\n    return g(x)\n"
    tests = [
        "assert f(1) == {1, (1.5, None)} and g(2) == {2, (1.5, None)}",
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
        "def check(candidate):\n    assert candidate(3) == {3, (1.5, None)}\ncheck(f)",
    ]
    assert judged(answer, tests) and not judged(answer, ["assert f(1) == {1}"])
    # bytes that are no text change nothing
    assert judged(f"import os\nos.write(1, b'\\xff\\xfe')\nos.write(2, b'noise')\n{RIGHT}")
    assert capfd.readouterr() == ("", "")


def test_attacks_do_not_pass_and_nothing_is_written_outside(tmp_path):
    for attack in [
        "x = bytearray(8 << 30)\ndef f(x): return x + 1",
        "def f(x): return [[]] * 10**7",
    ]:
        assert not judged(f"{attack}\n")
    place = tmp_path / "escaped"
    for attack in [
        "open({!r}, 'w')",
        "os.open({!r}, os.O_CREAT)",
        "os.mkdir({!r})",
        "import sqlite3; sqlite3.connect({!r})",
    ]:
        assert not judged(f"import os\n{attack.format(str(place))}\n{RIGHT}") and not place.exists()
    assert judged(f"open('inside.txt', 'w').write('x')\n{RIGHT}")


@needs_proc
def test_nothing_is_left_running(monkeypatch, tmp_path):
    monkeypatch.setattr(answer_checks, "CODE_TIMEOUT_S", 1.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not judged("while True: pass\n")
    time.sleep(0.1)
    folders = map(os.path.realpath, Path("/proc").glob("[0-9]*/cwd"))
    assert not [folder for folder in folders if str(tmp_path) in folder]


PASSES = [
    ("number", "42", ["Answer: 42", "40 + 2 = 42.\nAnswer: 42.", "It is 42", "#### 42", "$42.00"]),
    ("number", "42", ["so \\boxed{42}", "Answer: 41\nNo wait.\nAnswer: 42"]),
    ("number", "1234", ["Answer: 1,234"]),
    ("exact", "lo pupen\ndabeka.", [" lo  pupen dabeka.\n"]),
    ("contains", "mill", ["It is a Mill."]),
    ("contains", ["Rome", "Paris"], ["in Paris"]),
    ("letter", "B", ["B", "(B) the left one", "The correct answer is **B**"]),
    ("letter", "B", ["A cell does this. So: B."]),
]
FAILS = [
    ("number", "42", ["Answer: 421", "Answer: 7, not 42", ""]),
    ("exact", "lo pupen\ndabeka.", ["lo pupen"]),
    ("contains", "mill", ["a million"]),
    ("contains", ["Rome", "Paris"], ["in London"]),
    ("letter", "B", ["C, not B.", "Answer: A\nB.", "A bee", ""]),
]


@pytest.mark.parametrize("row", [(*row, True) for row in PASSES] + [(*row, False) for row in FAILS])
def test_what_passes_a_check(row):
    kind, value, texts, expected = row
    for text in texts:
        assert passes({"kind": kind, "value": value}, text) is expected, text


DOUBLE = "def double(n):\n    return 2 * n"
TWO = "def double(n):\n    return two(n)\n\ndef two(n):\n    return 2 * n\n\nprint(duoble(4), ("
CODE = [
    (DOUBLE, True),
    (f"Sure!\n```python\n{DOUBLE}\n```\nDone.", True),
    (f"```\n{DOUBLE}", True),  # cut off before the closing fence
    (f"First:\n```\nprint(1)\n```\nthen:\n```python\n{DOUBLE}\n```", True),
    (TWO, True),  # cut off
    ("def double(\n    n,\n):\n    return 2 * n\n\nIt doubles.", True),
    (f"print('x' * 100)\n{DOUBLE}", True),
    ("def double(n):\n    return n * n", False),
    ("def double(n)\n    return 2 * n", False),
    ("import os; os._exit(0)", False),  # leaving early is not passing
    (f"import subprocess; subprocess.run(['true'])\n{DOUBLE}", False),
]


@pytest.mark.parametrize(("answer", "expected"), CODE)
def test_only_code_that_passes_its_tests_passes(answer, expected):
    tests = ["assert double(3) == 6", "assert double(0) == 0"]
    assert passes({"kind": "code", "entry": "double", "tests": tests}, answer) is expected


def test_a_bare_body_is_completed_by_the_prompt():
    prompt = 'import math\n\ndef double(n):\n    """Twice n."""\n'
    check = {
        "kind": "code",
        "entry": "double",
        "tests": ["assert double(3) == 6"],
        "prompt": prompt,
    }
    assert passes(check, "    return math.floor(2 * n)")
    # the prompt's imports count
    assert passes(check, "def double(n):\n    return math.floor(2 * n)")
    assert not passes(check, "    return n")
