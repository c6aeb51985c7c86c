"""What hostile code can do from an answer: nothing to the parent, nothing outside its folder, and not pass."""

import ast
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from specdec.data import answer_checks
from specdec.data.answer_checks import passes
from specdec.data.run_answer import plain_text
from specdec.errors import SpecdecError

RIGHT = "def f(x):\n    return x + 1\n"


def judged(text: str, tests=("assert f(1) == 2",)) -> bool:
    return passes({"kind": "code", "entry": "f", "tests": list(tests)}, f"```python\n{text}\n```")


def test_tests_see_values_errors_and_helpers_and_plain_values_come_over():
    answer = "def g(x):\n    return {x, (1.5, None)}\n\ndef f(x):\n    if x < 0:\n        raise ValueError(x)\n    return g(x)\n"
    tests = [
        "assert f(1) == {1, (1.5, None)} and g(2) == {2, (1.5, None)}",
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
        "def check(candidate):\n    assert candidate(3) == {3, (1.5, None)}\ncheck(f)",
    ]
    assert judged(answer, tests) and not judged(answer, ["assert f(1) == {1}"])
    assert judged(f"import os\nos.write(1, b'\\xff\\xfe')\n{RIGHT}"), (
        "bytes that are no text change nothing"
    )
    for values in [
        [1, -2.5, "a\n'b", b"\xff", None, True, 1j],
        {"a": {1: ()}},
        {1, 2},
        set(),
        float("inf"),
        (1,),
        [[[]]],
    ]:
        assert ast.literal_eval(plain_text(values)) == values
        with pytest.raises(TypeError):
            plain_text([values, object()])


def test_attacks_do_not_pass_and_nothing_is_written_outside(tmp_path):
    for attack in [
        "class Anything(int):\n    def __eq__(self, other): return True\ndef f(x): return Anything()",
        "import sys\nframe = sys._getframe()\nwhile frame:\n    print(frame.f_locals)\n    frame = frame.f_back",
        "x = bytearray(8 << 30)",
        "def f(x): return [[]] * 10**7",
    ]:
        assert not judged(f"{attack}\n" if "def f" in attack else f"{attack}\ndef f(x): return x\n")
    place = tmp_path / "escaped"
    attacks = [
        "open({!r}, 'w')",
        "os.open({!r}, os.O_CREAT)",
        "os.mkdir({!r})",
        "os.mknod({!r})",
        "os.mkfifo({!r})",
    ]
    attacks += ["import sqlite3; sqlite3.connect({!r})"]
    attacks += ["os.open('escaped', os.O_CREAT, dir_fd=os.open(os.path.dirname({!r}), 0))"]
    for attack in attacks:
        assert not judged(f"import os\n{attack.format(str(place))}\n{RIGHT}") and not place.exists()
    assert judged(f"open('inside.txt', 'w').write('x')\n{RIGHT}")


@pytest.mark.parametrize(
    "attack", ["os.kill(os.getppid(), 9)", "os.killpg(0, 9)", "os.kill(os.getpid(), 9)"]
)
def test_the_parent_lives(attack):
    call = (
        f"passes({{'kind': 'code', 'entry': 'f', 'tests': []}}, {f'import os{chr(10)}{attack}'!r})"
    )
    code = f"from specdec.data.answer_checks import passes\n{call}\nprint('alive')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True
    )
    assert done.returncode == 0 and done.stdout == "alive\n", done.stderr


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc here")
def test_what_is_expected_is_not_read_in_the_judges_memory():
    below = "os.open('%d/mem' % os.getppid(), 0, dir_fd=os.open('/proc', 0))"
    for spy in ("open('/proc/%d/cmdline' % os.getppid())", below):
        assert not judged(f"import os\n{spy}\n{RIGHT}")


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="no /proc here")
@pytest.mark.parametrize("text", ["import time\ntime.sleep(600)\n", "while True: pass\n"])
def test_nothing_is_left_running(monkeypatch, tmp_path, text):
    monkeypatch.setattr(answer_checks, "CODE_TIMEOUT_S", 1.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not judged(text)
    time.sleep(0.1)
    assert not [
        one for one in Path("/proc").glob("[0-9]*/cwd") if str(tmp_path) in os.path.realpath(one)
    ]


JSON = '{"a": 1, "b": "x"}'


def test_what_passes_a_check():
    for kind, value, right, wrong in [
        ("number", "42", ["Answer: 42", "40 + 2 = 42.\nAnswer: 42."], ["Answer: 421"]),
        (
            "number",
            "42",
            ["It is 42", "#### 42", "so \\boxed{42}", "$42.00"],
            ["Answer: 7, not 42", ""],
        ),
        ("number", "42", ["Answer: 41\nNo wait.\nAnswer: 42"], []),
        ("number", "1234", ["Answer: 1,234"], []),
        ("exact", "lo pupen\ndabeka.", [" lo  pupen dabeka.\n"], ["lo pupen"]),
        ("contains", "mill", ["It is a Mill."], ["a million"]),
        ("contains", ["Rome", "Paris"], ["in Paris"], ["in London"]),
        (
            "json",
            JSON,
            ['Here: {"b": "x", "a": 1} done'],
            ['{"a": "1", "b": "x"}', "no braces", "{broken"],
        ),
        (
            "json",
            "{}",
            [],
            ['{"a":' * 3000 + "1" + "}" * 3000, '{"a":' * 300_000, "{" * 10_000],
        ),  # nested without end
        (
            "letter",
            "B",
            ["B", "(B) the left one", "The correct answer is **B**"],
            ["C, not B.", "Answer: A\nB."],
        ),
        ("letter", "B", ["A cell does this. So: B."], ["A bee", ""]),
    ]:
        for expected, texts in ((True, right), (False, wrong)):
            for text in texts:
                assert passes({"kind": kind, "value": value}, text) is expected, text
        pytest.raises(SpecdecError, passes, {"kind": "numbr", "value": "1"}, "1").match("number")


CODE = {
    "kind": "code",
    "entry": "double",
    "tests": ["assert double(3) == 6", "assert double(0) == 0"],
}


def test_code_runs_apart_only_passing_tests_pass_and_a_bare_body_is_completed_by_the_prompt():
    for answer, expected in [
        ("def double(n):\n    return 2 * n", True),
        ("Sure!\n```python\ndef double(n):\n    return 2 * n\n```\nDone.", True),
        ("```\ndef double(n):\n    return n + n", True),  # cut off before the closing fence
        (
            "def double(n):\n    return 2 * n\n```\n\nThis function doubles a number.",
            True,
        ),  # opened by nobody
        (
            "First:\n```\nprint(1)\n```\nthen:\n```python\ndef double(n):\n    return 2 * n\n```",
            True,
        ),
        (
            "def double(n):\n    return two(n)\n\ndef two(n):\n    return 2 * n\n\nprint(duoble(4), (",
            True,
        ),  # cut off
        ("def double(\n    n,\n):\n    return 2 * n\n\nIt doubles.", True),
        ("def double(n):\n    return n * n", False),
        ("def double(n)\n    return 2 * n", False),
        ("import sys; sys.exit(0)", False),  # leaving early is not passing
        ("import os; os._exit(0)", False),
        (
            "def double(n):\n    import socket; socket.create_connection(('localhost', 9)); return 2 * n",
            False,
        ),
        ("import subprocess; subprocess.run(['true'])\ndef double(n):\n    return 2 * n", False),
        ("print('x' * 100)\ndef double(n):\n    return 2 * n", True),
    ]:
        assert passes(CODE, answer) is expected
    check = CODE | {"prompt": 'import math\n\ndef double(n):\n    """Twice n."""\n'}
    assert passes(check, "    return math.floor(2 * n)")
    assert passes(
        check, "def double(n):\n    return math.floor(2 * n)"
    )  # the prompt's imports count
    assert not passes(check, "    return n")
