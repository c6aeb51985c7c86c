"""Whether a text passes an example's check: numbers, exact text, contained facts, a letter, code.

Checks are plain dictionaries: {"kind": "number" | "exact" | "contains" | "letter", "value":
...} or {"kind": "code", "entry": name, "tests": [statements], "prompt": code to complete
(optional)}.

Code is tested by this file, run alone as a child process. The child forks at once: the answer's
process gets only the program, under limits and without any descriptor but the two for calls; the
judge reads the tests and calls the answer's functions. So the expected values are never in the
answer's memory. POSIX only.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile

CODE_TIMEOUT_S = 5.0
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
# of the answer's process
LIMITS = {
    "RLIMIT_AS": 2 << 30,
    "RLIMIT_FSIZE": 16 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_CPU": 5,
    "RLIMIT_CORE": 0,
    "RLIMIT_NPROC": 0,  # root is exempt
}
MOST_BYTES = 1 << 20  # of one message
# Events that Python reports beforehand; compiled code can avoid the report.
REFUSED = tuple(
    """socket. subprocess. shutil. ctypes. signal. fcntl. os.system os.exec os.fork os.posix_spawn
    os.spawn os.kill os.remove os.rename os.link os.symlink os.truncate os.chmod os.chown os.mkdir
    os.rmdir os.set os.utime sqlite3. syslog. resource. pty. gc. sys.addaudithook cpython.
    code.__new__""".split()
)
UNSEEN = ("mknod", "mkfifo")  # what Python creates without a report


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
    if not hasattr(os, "fork"):
        # the child has no other module of this package
        from specdec.errors import SpecdecError

        raise SpecdecError("answers of code run on Linux and macOS only; leave out their suites.")
    # printed after all tests have passed: exiting early with status 0 is not a pass
    token = secrets.token_hex(16)
    job = {"program": _program(check, text), "tests": check["tests"], "passed": token}
    # the working directory stays clean
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        command = [sys.executable, "-I", os.path.abspath(__file__)]
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


def plain_text(value) -> str:
    """A value of plain types as a literal; numpy's numbers as plain ones. Else TypeError."""
    if hasattr(value, "item") and hasattr(value, "dtype"):
        value = value.item()
    for kind in (bool, int, str, bytes, complex):
        if isinstance(value, kind):
            return repr(kind(value))
    if value is None:
        return "None"
    if isinstance(value, float):  # infinity has no literal except an overflowing one
        return repr(float(value)).replace("inf", "1e999")
    if isinstance(value, dict):
        items = (f"{plain_text(key)}: {plain_text(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    for kind, form in ((list, "[{}]"), (tuple, "({})"), (set | frozenset, "{{{}}}")):
        if isinstance(value, kind):
            items = "".join(f"{plain_text(item)}, " for item in value)
            return form.format(items) if items or kind in (list, tuple) else "set()"
    raise TypeError(f"a {type(value).__name__} is no plain value")


def serve(requests, results) -> None:
    """Run the program, then call its functions on request, one line each way."""
    program = json.loads(requests.readline())
    # what the hook below would not hear of
    for name in UNSEEN:
        for module in (os, sys.modules["posix"]):
            vars(module).pop(name, None)
    sys.addaudithook(guard(os.path.realpath(os.getcwd())))
    names = {"__name__": "answer"}
    exec(compile(program, "<answer>", "exec"), names)
    send(results, plain_text([name for name, value in names.items() if callable(value)]))
    for line in requests:
        name, arguments, settings = ast.literal_eval(line)
        try:
            send(results, f"(None, {plain_text(names[name](*arguments, **settings))})")
        except Exception as error:
            send(results, repr((type(error).__name__, None)))


def guard(folder: str):
    """The audit hook: refuses REFUSED, writing outside `folder`, other processes, and open folders,
    relative to which reported paths can mislead.
    """
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(event)
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            # the judge's memory has the expected values
            of_process = path.startswith("/proc/") and path.split("/")[2].isdigit()
            if of_process or os.path.isdir(path):
                raise PermissionError(path)
            if arguments[2] & writing and not path.startswith((folder + os.sep, os.devnull)):
                raise PermissionError(path)

    return hook


def confine(keep: tuple[int, ...]) -> None:
    """A session of its own, limits, and only the descriptors in `keep`; its output is discarded."""
    import resource

    os.setsid()
    for name, most in LIMITS.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    last = 3
    for number in sorted(keep):
        os.closerange(last, number)
        last = number + 1
    os.closerange(last, 1 << 16)


def send(stream, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def received(results):
    """One message from the answer as plain values; ValueError if it is too long or missing."""
    line = results.readline(MOST_BYTES)
    if not line.endswith("\n"):
        raise ValueError("the answer has ended, or its message is too long")
    return ast.literal_eval(line)


def judge(job: dict, requests, results) -> None:
    """Run the tests with a proxy for every function of the answer. Raises if one fails."""
    send(requests, json.dumps(job["program"]))

    def proxy(name: str):
        def call(*arguments, **settings):
            send(requests, plain_text([name, list(arguments), settings]))
            raised, value = received(results)
            if raised is None:
                return value
            # tests may expect an error by its type
            kind = getattr(builtins, str(raised), None)
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                kind = Exception
            raise kind(raised)

        return call

    names = {name: proxy(name) for name in map(str, received(results))}
    exec(compile("\n\n".join(job["tests"]), "<tests>", "exec"), names)


def main() -> None:
    """The child: write the answer's process id and, once all tests have passed, the token."""
    call_in, call_out = os.pipe()
    result_in, result_out = os.pipe()
    answer = os.fork()  # before the job is read, so that the answer's memory has no tests
    text = dict(encoding="utf-8", errors="replace")
    if answer == 0:
        confine((call_in, result_out))
        try:
            serve(open(call_in, **text), open(result_out, "w", **text))
        finally:
            os._exit(1)
    os.close(call_in)
    os.close(result_out)
    os.write(1, b"%d\n" % answer)
    job = json.load(sys.stdin)
    judge(job, open(call_out, "w", **text), open(result_in, **text))
    os.write(1, job["passed"].encode())


if __name__ == "__main__":
    main()
