"""A policy from a foreign file, in a process of its own that gets what a live policy sees at that moment.

    here: recording, prices, clock   ──  a question with its arrays, or a finished cycle  ──▶   visitor: the file alone
                                     ◀──  the answer and its milliseconds, or the error   ──

The recording is never in the visitor's memory. It may read Python's libraries, the package and the files beside its own. With
`run_answer`'s limits and guard, and like those no sandbox: compiled code is not watched. Messages are JSON, arrays safetensors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save
from safetensors.torch import load

from specdec import runs
from specdec.core.policy import Policy, check_asks, checked_policy
from specdec.core.records import PLAN, Cycle, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError, first_line

START_S, ANSWER_S, ALL_S = 60.0, 5.0, 60.0  # to import the libraries, or the file; one answer; all answers of a run
MEMORY = 1 << 30  # bytes beyond the libraries' own
PACKAGE = Path(__file__).resolve().parents[1]
NEW = "`specdec new-policy NAME` writes a file that works."


class Visitor(Policy):
    """The policy of a file; `visiting` makes it. spent_ms: the time of each answer so far."""

    def __init__(self, file: Path, channel: Connection):
        self.file, self.channel, self.number = file, channel, 0
        self.spent_ms: list[float] = []
        self.facts: dict[str, Any] = {"remembers": False}

    def open(self, costs: Any, slowly: bool = False) -> Visitor:
        """Load the file. costs: for a policy with a method `price`. slowly: empty the caches before each answer (`answer_ms`)."""
        self.facts |= self._received(START_S)
        self.facts |= self._asked("open", file=str(self.file), costs=runs.plain(vars(costs)), slowly=slowly)
        self.asks, self.limits, self.plan = check_asks(self.facts["asks"]), *map(_decoded, self.facts["trees"])
        return self

    @property
    def remembers(self) -> bool:
        return bool(self.facts["remembers"])

    def reset(self) -> None:
        self._asked("reset")

    def reseed(self, number: int) -> None:
        self._asked("reseed", seed=number)

    def answer(self, question: Question) -> Any:
        names = ("features", "copied_scores", "matched") + ("scores", "draft_state") * (question.kind != PLAN)
        arrays = {}
        for name in names:
            with contextlib.suppress(SpecdecError):  # not recorded
                arrays[name] = np.asarray(getattr(question, name))
        shown = {name: getattr(question, name) for name in ("kind", "context_tok", "expansions", "cycle")}
        shown |= {name: _encoded(getattr(question, name)) for name in ("largest", "plan")}
        reply = self._asked("answer", arrays, question=shown)
        self.spent_ms.append(reply["ms"])
        if sum(self.spent_ms) > 1e3 * ALL_S:
            raise SpecdecError(f"{self.file.name} took more than {ALL_S:g} s for its answers; make them faster.")
        return _decoded(reply["answer"])

    def observe(self, cycle: Cycle) -> None:
        self._asked("observe", cycle=cycle.row())

    def __deepcopy__(self, memo: dict[int, Any]) -> Visitor:
        """A copy in the same process."""
        other = copy.copy(self)
        other.number = self._asked("copy")["number"]
        return other

    def _asked(self, do: str, arrays: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
        """The reply to one request; SpecdecError for a failure, a silence or an end of the process."""
        with contextlib.suppress(OSError):  # `_received` reports the end
            _send(self.channel, {"do": do, "number": self.number, **facts}, arrays or {})
        reply = self._received(START_S if do == "open" else ANSWER_S)
        if "error" in reply:
            raise SpecdecError(f"{self.file.name} {reply['error']}")
        return reply

    def _received(self, limit_s: float) -> dict[str, Any]:
        try:
            if self.channel.poll(limit_s):
                return _receive(self.channel)[0]
        except (EOFError, OSError, ValueError):
            raise SpecdecError(f"{self.file.name} ended its process; a policy only answers and observes.") from None
        raise SpecdecError(f"{self.file.name} did not answer within {limit_s:g} s; a policy answers in milliseconds.")


@contextlib.contextmanager
def visiting(file: Path, count: int) -> Iterator[list[Visitor]]:
    """So many visitors of one file, each in a fresh process without the others' memory; `open` each before use."""
    if not hasattr(os, "fork"):
        raise SpecdecError("policies' files are judged on Linux and macOS only; give the policy itself.")
    pipes = [Pipe() for _ in range(count)]
    theirs = [there.fileno() for _, there in pipes]
    code = f"from specdec.evaluation import visitor; visitor.main({str(file.parent)!r}, {theirs})"
    own = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    own |= {"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = subprocess.Popen([sys.executable, "-P", "-c", code], env=own, cwd="/", pass_fds=theirs, **quiet)
    visitors = [Visitor(file, here) for here, _ in pipes]
    for _, there in pipes:
        there.close()
    try:
        yield visitors
    finally:
        first.kill()
        first.wait()
        for visitor in visitors:
            visitor.channel.close()
            with contextlib.suppress(KeyError, ProcessLookupError, PermissionError):
                os.kill(visitor.facts["pid"], signal.SIGKILL)


def main(folder: str, descriptors: list[int]) -> None:
    """The visitors' first process: import the libraries once, then become a process for each descriptor."""
    import torch

    from specdec.policies import base  # noqa: F401 - so that a policy's own import takes no time

    torch.set_num_threads(1)
    for descriptor in descriptors:
        if os.fork() == 0:
            with contextlib.suppress(EOFError, OSError):
                _confine(folder, descriptor)
                _serve(Connection(descriptor))
            os._exit(0)
        os.close(descriptor)  # so that the other end sees when the visitor ends
    time.sleep(1e6)


def _confine(folder: str, descriptor: int) -> None:
    """`run_answer`'s limits with more memory, and its guard with fewer files."""
    from specdec.data import run_answer

    pages = Path("/proc/self/statm")
    used = int(pages.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if pages.is_file() else 8 << 30
    run_answer.confine((descriptor,), run_answer.LIMITS | {"RLIMIT_AS": used + MEMORY, "RLIMIT_CPU": int(2 * ALL_S)})
    sys.modules |= {name: None for name in sys.modules if name.partition(".")[0] == "pyarrow"}  # it opens files unseen
    libraries = tuple(os.path.realpath(place) + os.sep for place in (sys.prefix, sys.base_prefix, PACKAGE, "/dev"))
    guard = run_answer.guard(os.devnull)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        guard(event, arguments)
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            known = path.startswith(libraries) and "/recordings/" not in path
            if not known and os.path.dirname(path) != folder:
                raise PermissionError(path)

    sys.addaudithook(hook)


def _serve(channel: Connection) -> None:
    """Reply to requests until the channel is closed."""
    own: list[Any] = []
    _send(channel, {"pid": os.getpid()})
    while True:
        request, arrays = _receive(channel)
        what = {"open": "was loaded", "answer": "was asked"}.get(request["do"], f"ran `{request['do']}`")
        try:
            reply = _reply(own, request, arrays)
        except PermissionError as error:
            reply = {"error": f"reached for {first_line(error)}; a policy sees its questions and the cycles before."}
        except ImportError as error:
            reply = {"error": f"imports what is missing ({first_line(error).rstrip('.')}); use what specdec installs."}
        except SpecdecError as error:
            reply = {"error": f"failed when it {what}: {first_line(error)}"}
        except Exception as error:  # noqa: BLE001 - whatever it raises is its result
            reason = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
            reply = {"error": f"failed when it {what} ({reason}); {NEW}"}
        _send(channel, reply)


def _reply(own: list[Any], request: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """own: the policy and its copies, after the array that empties the caches."""
    do, policy = request["do"], own[request["number"] + 1] if own else None
    if do == "open":
        own += [np.ones(2**20 if request["slowly"] else 0), made(Path(request["file"]), request["costs"])]
        trees = [_encoded(getattr(own[1], name)) for name in ("limits", "plan")]
        return {"asks": sorted(own[1].asks), "remembers": own[1].remembers, "trees": trees}
    if do == "copy":
        own.append(copy.deepcopy(policy))
        return {"number": len(own) - 2}
    if do == "answer":
        shown = request["question"] | {name: _decoded(request["question"][name]) for name in ("largest", "plan")}
        if "scores" in arrays:
            plan, level = shown["plan"], shown["expansions"]
            before = pool_size(level - 1, plan.top_k, plan.beam) if level else 0
            arrays["newest_scores"] = arrays["scores"][before:]
        asked = Question(**shown, view=SimpleNamespace(**arrays))
        own[0].sum()
        begin = time.perf_counter()
        answer = policy.answer(asked)
        return {"ms": 1e3 * (time.perf_counter() - begin), "answer": _encoded(answer)}
    if do == "observe":
        policy.observe(Cycle(**request["cycle"]))
    elif do == "reseed":
        policy.reseed(request["seed"])
    else:
        policy.reset()
    return {}


def made(file: Path, costs: dict[str, Any]) -> Policy:
    """The policy of a file's class. SpecdecError for none or several, and for what is no policy."""
    from specdec.costs.model import CostModel

    module = sys.modules["policy_file"] = ModuleType("policy_file")
    sys.path.append(str(file.parent))
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), vars(module))
    kinds = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == "policy_file"]
    kinds = [kind for kind in kinds if hasattr(kind, "answer")]
    if len(kinds) != 1:
        found = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise SpecdecError(f"it holds {found} instead of one class with a method `answer`; {NEW}")
    policy = kinds[0]()
    policy = checked_policy(policy.price(CostModel(**costs)) if hasattr(policy, "price") else policy)
    if not isinstance(policy.limits, TreeConfig) or not isinstance(policy.plan, TreeConfig):
        raise SpecdecError(f"`limits` and `plan` of {kinds[0].__name__} must be TreeConfigs; {NEW}")
    return policy


def _encoded(value: Any) -> Any:
    """A tree, a number or nothing as JSON; anything else as its text."""
    if isinstance(value, TreeConfig):
        return {"tree": dataclasses.asdict(value)}
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    return value if value is None or isinstance(value, bool | int | float) else {"text": repr(value)[:80]}


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            TreeConfig(**value["tree"] | {"beam": tuple(value["tree"]["beam"])}) if "tree" in value else value["text"]
        )
    return value


def _send(channel: Connection, facts: dict[str, Any], arrays: dict[str, Any] | None = None) -> None:
    channel.send_bytes(json.dumps(facts).encode())
    channel.send_bytes(save(arrays) if arrays else b"")


def _receive(channel: Connection) -> tuple[dict[str, Any], dict[str, Any]]:
    facts, packed = json.loads(channel.recv_bytes()), channel.recv_bytes()
    return facts, load(packed) if packed else {}
