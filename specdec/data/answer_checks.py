"""Whether a text passes an example's check: numbers, exact text, contained facts, JSON, code that must run.

Knows nothing about prompts or suites. Checks are plain dictionaries: {"kind": "number" | "exact" | "contains" | "letter" |
"json", "value": ...} or {"kind": "code", "entry": name, "tests": [statements], "prompt": code to complete (optional)}.
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

from specdec.errors import SpecdecError, check_name

CODE_TIMEOUT_S = 5.0
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def passes(check: dict, text: str) -> bool:
    """Whether `text` passes `check`. Raises SpecdecError for an unknown kind.

    Numbers: the one after the last `Answer:`, `####` or `boxed`, else the last number. `exact` ignores spacing;
    `contains` looks for the value (or any of a list) as whole words in any case; `letter` takes the first of A to D that
    stands alone, after the word "answer" if there is one; `json` compares the first object.
    Code runs against its tests in a process and session of its own, with limits on time, memory, files and processes; it
    is never shown what is expected (`run_answer`). Sockets, child processes, signals and writing outside its folder are
    refused as far as Python reports them. It is no sandbox: compiled code is not watched (`ctypes` is refused, but other
    modules load libraries too), files may be read that this user may read, and root's limits on processes do not hold.

    >>> passes({"kind": "number", "value": "42"}, "40 + 2 = 42, so the answer is 42.")
    True
    """
    return _CHECKERS[check_name("kind of check", check["kind"], _CHECKERS)](check, text)


def _check_number(check: dict, text: str) -> bool:
    marked = re.findall(rf"(?:Answer:|####|boxed{{)\s*\$?({_NUMBER})", text)
    numbers = marked or re.findall(_NUMBER, text)
    return bool(numbers) and float(numbers[-1].replace(",", "")) == float(check["value"])


def _check_contains(check: dict, text: str) -> bool:
    values = [check["value"]] if isinstance(check["value"], str) else check["value"]
    return any(
        re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) for value in values
    )


def _check_letter(check: dict, text: str) -> bool:
    """A leading article "A" is no answer: a letter counts before a mark or the end of its line or text, or after `answer`."""
    led = re.search(r"(?i:answer)(?i:\s+is)?[\s:*(]*([A-D])\b(?![\w'])", text)
    found = led or re.search(r"(?<!\w)([A-D])(?=[).:,*\]]|\s*(?:\n|$))", text)
    return bool(found) and found[1] == check["value"]


def _check_json(check: dict, text: str) -> bool:
    try:
        return json.JSONDecoder().raw_decode(text, text.index("{"))[0] == json.loads(check["value"])
    except (ValueError, RecursionError):  # no brace, not JSON from there on, or nested without end
        return False


def _program(check: dict, text: str) -> str:
    """The answer's code, completed by the prompt where that holds the signature.

    The code is the first part between fences that defines the function, else the first block, else the whole answer.
    Unindented lines after the function that define nothing, remarks or a demo, are dropped.
    """
    parts, prompt = re.split("```(?:python|py)?", text), check.get("prompt", "")
    defines = re.compile(rf"def\s+{check['entry']}\b").search
    code = next(filter(defines, parts), parts[min(1, len(parts) - 1)])
    if found := defines(code):
        rest = re.compile(r"^(?!def |class |import |from |async )[^\s#@)\]}]", re.MULTILINE).search(
            code, found.end()
        )
        code = code[: rest.start()] if rest else code
    if prompt:  # it may hold imports and helpers; a bare body continues it, a whole function replaces its own
        code = f"{prompt}\n    pass\n\n{code}" if defines(code) else prompt + code
    return code


def _check_code(check: dict, text: str) -> bool:
    if not hasattr(os, "fork"):
        raise SpecdecError(
            "answers of code can be run on Linux and macOS only; leave suites with code out here."
        )
    passed = secrets.token_hex(
        16
    )  # printed after all tests have passed: exiting early with status 0 is not a pass
    job = json.dumps(
        {"program": _program(check, text), "tests": check["tests"], "passed": passed}
    ).encode()
    with tempfile.TemporaryDirectory(
        ignore_cleanup_errors=True
    ) as folder:  # the working directory stays clean
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        command = [sys.executable, "-I", str(Path(__file__).with_name("run_answer.py"))]
        child = subprocess.Popen(command, **pipes, cwd=folder, env={}, start_new_session=True)
        try:
            said = child.communicate(job, timeout=CODE_TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            said = child.communicate()[0]
        answer, _, verdict = said.partition(b"\n")
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            os.killpg(int(answer), signal.SIGKILL)  # it outlives a judge that it killed
    return verdict == passed.encode()


_CHECKERS = {
    "number": _check_number,
    "exact": lambda check, text: text.split() == check["value"].split(),
    "contains": _check_contains,
    "letter": _check_letter,
    "json": _check_json,
    "code": _check_code,
}
