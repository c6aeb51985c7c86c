"""Whether a text passes an example's check: numbers, exact text, contained facts, JSON, code.

Checks are plain dictionaries: {"kind": "number" | "exact" | "contains" | "letter" | "json",
"value": ...} or {"kind": "code", "entry": name, "tests": [statements], "prompt": code to complete
(optional)}.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from specdec.errors import SpecdecError

CODE_TIMEOUT_S = 5.0
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def passes(check: dict, text: str) -> bool:
    """Whether `text` passes `check`.

    Numbers: the one after the last `Answer:`, `####` or `boxed`, else the last number. `exact`
    ignores spacing; `contains` looks for whole words in any case; `letter` takes the first A to D
    that stands alone; `json` compares the first object. Code runs against its tests in a process of
    its own, with limits on time, memory, files and processes; it never gets the expected values
    (`run_answer`). It is no sandbox: compiled code is not watched, files may be read that this user
    may read, and root's limits on processes do not hold.

    >>> passes({"kind": "number", "value": "42"}, "40 + 2 = 42, so the answer is 42.")
    True
    """
    kind = check["kind"]
    value = check.get("value")
    if kind == "code":
        return _passes_tests(check, text)
    if kind == "exact":
        return text.split() == value.split()
    if kind == "number":
        marked = re.findall(rf"(?:Answer:|####|boxed{{)\s*\$?({NUMBER})", text)
        numbers = marked or re.findall(NUMBER, text)
        return bool(numbers) and float(numbers[-1].replace(",", "")) == float(value)
    if kind == "contains":
        words = [value] if isinstance(value, str) else value
        choices = "|".join(map(re.escape, words))
        return re.search(rf"(?<!\w)(?:{choices})(?!\w)", text, re.IGNORECASE) is not None
    if kind == "letter":
        # a leading article "A" is no answer: a letter counts before a mark or at a line's end
        answer = re.search(r"(?i:answer)(?i:\s+is)?[\s:*(]*([A-D])\b(?![\w'])", text)
        answer = answer or re.search(r"(?<!\w)([A-D])(?=[).:,*\]]|\s*(?:\n|$))", text)
        return answer is not None and answer[1] == value
    assert kind == "json", f"unknown kind of check {kind!r}"
    try:
        return json.JSONDecoder().raw_decode(text, text.index("{"))[0] == json.loads(value)
    except (ValueError, RecursionError):  # no brace, not JSON from there on, or nested without end
        return False


def _program(check: dict, text: str) -> str:
    """The answer's code (the first fenced part that defines the function, else the first block,
    else the whole answer) without what follows the function, completed by the prompt.
    """
    defines = re.compile(rf"def\s+{check['entry']}\b")
    parts = re.split("```(?:python|py)?", text)
    code = next(filter(defines.search, parts), parts[min(1, len(parts) - 1)])
    function = defines.search(code)
    if function:
        remark = re.compile(r"^(?!def |class |import |from |async )[^\s#@)\]}]", re.MULTILINE)
        rest = remark.search(code, function.end())
        code = code[: rest.start()] if rest else code
    # the prompt may have imports and helpers; a bare body continues it, a function replaces its own
    prompt = check.get("prompt", "")
    if prompt and function:
        return f"{prompt}\n    pass\n\n{code}"
    return prompt + code


def _passes_tests(check: dict, text: str) -> bool:
    if not hasattr(os, "fork"):
        why = "answers of code can be run on Linux and macOS only"
        raise SpecdecError(f"{why}; leave suites with code out here.")
    # printed after all tests have passed: exiting early with status 0 is not a pass
    token = secrets.token_hex(16)
    job = {"program": _program(check, text), "tests": check["tests"], "passed": token}
    # the working directory stays clean
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        command = [sys.executable, "-I", str(Path(__file__).with_name("run_answer.py"))]
        child = subprocess.Popen(command, **pipes, cwd=folder, env={}, start_new_session=True)
        try:
            output = child.communicate(json.dumps(job).encode(), timeout=CODE_TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            output = child.communicate()[0]
        process, _, verdict = output.partition(b"\n")
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            os.killpg(int(process), signal.SIGKILL)  # it outlives a judge that it killed
    return verdict == token.encode()
