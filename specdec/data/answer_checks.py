"""Whether a text passes an example's check: numbers, exact text, contained facts, a letter, code.

Checks are plain dictionaries: {"kind": "number" | "exact" | "contains" | "letter", "value":
...} or {"kind": "code", "entry": name, "tests": [statements], "prompt": code to complete
(optional)}.

Code and its tests run in a child process, which is this file run alone, under limits: they guard
against accidents of a model's code and are no sandbox. POSIX only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

CODE_TIMEOUT_S = 5.0
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
# of the child process
LIMITS = {
    "RLIMIT_AS": 2 << 30,
    "RLIMIT_FSIZE": 16 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_CPU": 5,
    "RLIMIT_CORE": 0,
    "RLIMIT_NPROC": 0,  # root is exempt
}
# Events that Python reports beforehand; compiled code can avoid the report.
REFUSED = tuple(
    """socket. subprocess. shutil. ctypes. signal. fcntl. os.system os.exec os.fork os.posix_spawn
    os.spawn os.kill os.remove os.rename os.link os.symlink os.truncate os.chmod os.chown os.mkdir
    os.rmdir os.set os.utime sqlite3. syslog. resource. pty. gc. sys.addaudithook cpython.
    code.__new__""".split()
)
PASSED = 117  # exit status after all tests; exiting early with status 0 is not a pass


def passes(check: dict, text: str) -> bool:
    """Whether `text` passes `check`.

    Numbers: the one after the last `Answer:`, `####` or `boxed`, else the last number. `exact`
    ignores spacing; `contains` looks for whole words in any case; `letter` takes the first A to D
    that stands alone. Code runs with limits on time, memory, files and processes. It is no sandbox:
    compiled code is not watched, files may be read that this user may read, and root's limits on
    processes do not hold.

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
    assert kind == "letter", f"unknown kind of check {kind!r}"
    # a leading article "A" is no answer: a letter counts before a mark or at a line's end
    answer = re.search(r"(?i:answer)(?i:\s+is)?[\s:*(]*([A-D])\b(?![\w'])", text)
    answer = answer or re.search(r"(?<!\w)([A-D])(?=[).:,*\]]|\s*(?:\n|$))", text)
    return answer is not None and answer[1] == value


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
    if not hasattr(os, "killpg"):
        # the child has no other module of this package
        from specdec.errors import SpecdecError

        raise SpecdecError("answers of code run on Linux and macOS only; leave out their suites.")
    job = json.dumps({"program": _program(check, text), "tests": check["tests"]})
    # the working directory stays clean
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-I", os.path.abspath(__file__)]
        options = dict(cwd=folder, env={}, start_new_session=True, stdin=subprocess.PIPE)
        child = subprocess.Popen(command, **options)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(job.encode(), timeout=CODE_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    return child.returncode == PASSED


def guard(folder: str):
    """The audit hook: refuses REFUSED and writing outside `folder`."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(event)
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if arguments[2] & writing and not path.startswith((folder + os.sep, os.devnull)):
                raise PermissionError(path)

    return hook


def confine() -> None:
    """Limits, no output, and the audit hook."""
    import resource

    for name, most in LIMITS.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    sys.addaudithook(guard(os.path.realpath(os.getcwd())))


def main() -> None:
    """The child: run the program and its tests, then exit with PASSED."""
    job = json.load(sys.stdin)
    confine()
    names = {"__name__": "answer"}
    exec(compile(job["program"], "<answer>", "exec"), names)
    exec(compile("\n\n".join(job["tests"]), "<tests>", "exec"), names)
    os._exit(PASSED)


if __name__ == "__main__":
    main()
