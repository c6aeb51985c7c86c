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

RIGHT = "def f(x):\n    return x + 1\n"


def judged(text: str, tests=("assert f(1) == 2",)) -> bool:
    return passes({"kind": "code", "entry": "f", "tests": list(tests)}, f"```python\n{text}\n```")


def test_tests_see_values_errors_and_helpers():
    answer = "def g(x):\n    return {x, (1.5, None)}\n\ndef f(x):\n    if x < 0:\n        raise ValueError(x)\n    return g(x)\n"
    tests = [
        "assert f(1) == {1, (1.5, None)} and g(2) == {2, (1.5, None)}",
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
        "def check(candidate):\n    assert candidate(3) == {3, (1.5, None)}\ncheck(f)",
    ]
    assert judged(answer, tests) and not judged(answer, ["assert f(1) == {1}"])
    assert judged(f"import os\nos.write(1, b'\\xff\\xfe')\n{RIGHT}"), "bytes that are no text change nothing"


@pytest.mark.parametrize(
    "values", [[1, -2.5, "a\n'b", b"\xff", None, True, 1j], {"a": {1: ()}}, {1, 2}, set(), float("inf"), (1,), [[[]]]]
)
def test_plain_values_come_over(values):
    assert ast.literal_eval(plain_text(values)) == values
    with pytest.raises(TypeError):
        plain_text([values, object()])


@pytest.mark.parametrize(
    "attack",
    [
        "import os\nos._exit(0)",
        "class Anything(int):\n    def __eq__(self, other): return True\ndef f(x): return Anything()",
        "import sys\nframe = sys._getframe()\nwhile frame:\n    print(frame.f_locals)\n    frame = frame.f_back",
        "x = bytearray(8 << 30)",
        "raise SystemExit(0)",
        "def f(x): return [[]] * 10**7",
    ],
)
def test_what_does_not_pass(attack):
    assert not judged(f"{attack}\n" if "def f" in attack else f"{attack}\ndef f(x): return x\n")


@pytest.mark.parametrize("attack", ["os.kill(os.getppid(), 9)", "os.killpg(0, 9)", "os.kill(os.getpid(), 9)"])
def test_the_parent_lives(attack):
    """In a process of its own, so that a defect does not take the tests with it."""
    call = f"passes({{'kind': 'code', 'entry': 'f', 'tests': []}}, {f'import os{chr(10)}{attack}'!r})"
    code = f"from specdec.data.answer_checks import passes\n{call}\nprint('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True)
    assert done.returncode == 0 and done.stdout == "alive\n", done.stderr


def test_nothing_is_written_outside(tmp_path):
    place = tmp_path / "escaped"
    attacks = ["open({!r}, 'w')", "os.open({!r}, os.O_CREAT)", "os.mkdir({!r})", "os.mknod({!r})", "os.mkfifo({!r})"]
    attacks += ["import sqlite3; sqlite3.connect({!r})"]
    attacks += ["os.open('escaped', os.O_CREAT, dir_fd=os.open(os.path.dirname({!r}), 0))"]
    for attack in attacks:
        assert not judged(f"import os\n{attack.format(str(place))}\n{RIGHT}") and not place.exists()
    assert judged(f"open('inside.txt', 'w').write('x')\n{RIGHT}")


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
    assert not [one for one in Path("/proc").glob("[0-9]*/cwd") if str(tmp_path) in os.path.realpath(one)]


@pytest.mark.parametrize("text", ['{"a":' * 3000 + "1" + "}" * 3000, '{"a":' * 300_000, "{" * 10_000])
def test_json_nested_without_end_is_no_answer(text):
    assert not passes({"kind": "json", "value": "{}"}, text)
