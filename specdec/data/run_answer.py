"""The child process that tests a code answer: `answer_checks` runs this file alone.

It forks at once. The answer's process gets only the program, under limits and without any
descriptor but the two for calls; this process reads the tests, calls the answer's functions and
judges. So the expected values are never in the answer's memory. POSIX only.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import resource
import sys

LIMITS = {
    resource.RLIMIT_AS: 2 << 30,
    resource.RLIMIT_FSIZE: 16 << 20,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CPU: 5,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_NPROC: 0,  # root is exempt
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
    if not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"a {type(value).__name__} is no plain value")
    items = "".join(f"{plain_text(item)}, " for item in value)
    if isinstance(value, list):
        return f"[{items}]"
    if isinstance(value, tuple):
        return f"({items})"
    return f"{{{items}}}" if value else "set()"


def serve(requests, results) -> None:
    """Run the program, then call its functions on request, one line each way."""
    program = json.loads(requests.readline())
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
    os.setsid()
    for kind, most in LIMITS.items():
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
            kind = getattr(builtins, str(raised), None)
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                kind = Exception
            raise kind(raised)

        return call

    names = {name: proxy(name) for name in map(str, received(results))}
    exec(compile("\n\n".join(job["tests"]), "<tests>", "exec"), names)


def main() -> None:
    """Write the answer's process id and, once all tests have passed, the token that the parent
    expects.
    """
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
