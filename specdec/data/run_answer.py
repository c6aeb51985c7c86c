"""The child process that tests a code answer: `answer_checks` runs this file alone, without the package.

It forks at once. The answer's process gets only the program, in its own session, under limits and without any descriptor but
the two for calls; this process reads the tests, calls the answer's functions and judges. So the expected values are never in
the answer's memory, and nothing that it prints or kills is trusted.
Only plain values (`plain_text`) pass between the two, as Python literals. POSIX only.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import resource
import sys

LIMITS = {
    "RLIMIT_AS": 2 << 30,
    "RLIMIT_FSIZE": 16 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_CPU": 5,
    "RLIMIT_CORE": 0,
}
LIMITS |= {"RLIMIT_NPROC": 0}  # root is exempt
MOST_BYTES = 1 << 20  # of one message
# Events that Python reports beforehand; compiled code can avoid the report.
REFUSED = "socket. subprocess. shutil. ctypes. signal. fcntl. os.system os.exec os.fork os.posix_spawn os.spawn os.kill".split()
REFUSED += "os.remove os.rename os.link os.symlink os.truncate os.chmod os.chown os.mkdir os.rmdir os.set".split()
REFUSED += (
    "os.utime sqlite3. syslog. resource. pty. gc. sys.addaudithook cpython. code.__new__".split()
)
UNSEEN = ("mknod", "mkfifo")  # what Python creates without a report


def plain_text(value) -> str:
    """A value of plain types as a literal; subclasses and numpy's numbers as their plain equivalents. TypeError for others."""
    if hasattr(value, "item") and hasattr(value, "dtype"):
        value = value.item()
    for kind in (bool, int, str, bytes, complex):
        if isinstance(value, kind):
            return repr(kind(value))
    if isinstance(value, float):  # infinity has no literal except an overflowing one
        return repr(float(value)).replace("inf", "1e999")
    if isinstance(value, dict):
        return f"{{{', '.join(f'{plain_text(key)}: {plain_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(plain_text, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{plain_text(item)}, ' for item in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(map(plain_text, value))}}}" if value else "set()"
    if value is None:
        return "None"
    raise TypeError(f"a {type(value).__name__} is no plain value")


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
    """The audit hook: refuses REFUSED, writing outside `folder`, and access to other processes.

    Opening folders is refused too: relative to an open folder, reported paths can mislead.
    """
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(tuple(REFUSED)):
            raise PermissionError(event)
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            alien = (
                path.startswith("/proc/") and path.split("/")[2].isdigit()
            )  # the judge knows the expected values
            if alien or os.path.isdir(path):
                raise PermissionError(path)
            if arguments[2] & writing and not path.startswith((folder + os.sep, os.devnull)):
                raise PermissionError(path)

    return hook


def confine(keep: tuple[int, ...], limits: dict[str, int] = LIMITS) -> None:
    """A session of its own, limits, and only the descriptors in `keep`; its output is discarded."""
    os.setsid()
    for name, most in limits.items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, name), (most, most))
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


def judge(job: dict, requests, results) -> None:
    """Run the tests with a proxy for every function of the answer. Raises if one fails."""
    send(requests, json.dumps(job["program"]))

    def called(name: str):
        def call(*arguments, **settings):
            send(requests, plain_text([name, list(arguments), settings]))
            raised, value = received(results)
            if raised is not None:
                kind = getattr(builtins, str(raised), None)
                raise (
                    kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception
                )(raised)
            return value

        return call

    names = {name: called(name) for name in map(str, received(results))}
    exec(compile("\n\n".join(job["tests"]), "<tests>", "exec"), names)


def received(results):
    """One message from the answer as plain values; ValueError if it is too long or missing."""
    line = results.readline(MOST_BYTES)
    if not line.endswith("\n"):
        raise ValueError("the answer has ended, or said too much")
    return ast.literal_eval(line)


def main() -> None:
    """Write the answer's process id and, once all tests have passed, the token that the parent waits for."""
    (asked, asking), (told, telling) = os.pipe(), os.pipe()
    answer = os.fork()  # before the job is read, so that the answer's memory holds no tests
    text = dict(encoding="utf-8", errors="replace")
    if answer == 0:
        confine((asked, telling))
        try:
            serve(open(asked, **text), open(telling, "w", **text))
        finally:
            os._exit(1)
    os.close(asked)
    os.close(telling)
    os.write(1, b"%d\n" % answer)
    job = json.load(sys.stdin)
    judge(job, open(asking, "w", **text), open(told, **text))
    os.write(1, job["passed"].encode())


if __name__ == "__main__":
    main()
