"""Change one thing in the package, run the tests that reach it, and see whether one of them notices.

`make mutants` does it for every change that mutmut knows (or a seeded sample of them), each in a forked process: no file of the
checkout is touched. Most changes lie inside a function that no import runs: there the room's tests are collected once, and
each process gives the function its changed code (`changed_code.py`). For the others only the libraries are loaded already, and
the changed module is served from memory. Results are appended line by line to runs/mutants/results.jsonl, so that a run that
was stopped goes on. A change is tried against the tests of its own room that ran its line, the quick ones first, until one
fails. What errors say is left as it is, and tests that measure time are left out, since on a busy machine they would notice
anything.

.ci/survivors.yml says of lines whose change no test noticed why that is so; the report counts what stands there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import changed_code

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "runs" / "mutants"
HEAVY = "torch transformers pandas scipy.stats pyarrow.parquet gymnasium stable_baselines3 hypothesis pydantic pytest yaml"
GIB = 1 << 30
QUIET = ("-q", "-s", "-p", "no:cacheprovider")
AT_IMPORT = ""  # in place of a test's name: the line ran before any test
CLOCKS = re.compile(r"perf_counter|process_time|monotonic|timeit|fast_enough")


@dataclass(frozen=True)
class Mutant:
    """One change. path: of the module, from the root; first, last: its lines; diff: what changes; source: the whole module."""

    path: str
    first: int
    last: int
    diff: str
    source: str = field(repr=False)

    @property
    def room(self) -> str:
        return Path(self.path).parts[1]

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.path}\n{self.source}".encode()).hexdigest()[:16]


def folder_of(room: str, root: Path) -> Path:
    """Where a room's modules lie."""
    return root / ("notebooks" if room in ("workbook", "experiments") else "specdec") / room


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Every change of one module, in the order of its lines."""
    import libcst
    from libcst.metadata import MetadataWrapper, WhitespaceInclusivePositionProvider
    from mutmut.mutation.file_mutation import MutationVisitor
    from mutmut.mutation.mutators import mutation_operators
    from mutmut.mutation.pragma_handling import IgnoredCode

    class Visitor(MutationVisitor):
        """mutmut's own, but for functions with decorators (whole modules are replaced here) and what errors say."""

        def _skip_node_and_children(self, node) -> bool:
            if isinstance(node, libcst.FunctionDef | libcst.Raise):
                return isinstance(node, libcst.Raise)
            return super()._skip_node_and_children(node)

    code = path.read_text(encoding="utf-8")
    wrapper = MetadataWrapper(libcst.parse_module(code), unsafe_skip_copy=True)
    visitor = Visitor(mutation_operators, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    spans = wrapper.resolve(WhitespaceInclusivePositionProvider)
    starts = [0, *itertools.accumulate(len(line) for line in code.splitlines(keepends=True))]
    name, found = path.relative_to(root).as_posix(), {}
    for one in visitor.mutations:
        old, new = (
            wrapper.module.code_for_node(node) for node in (one.original_node, one.mutated_node)
        )
        span = spans[one.original_node]
        begin, end = (starts[place.line - 1] + place.column for place in (span.start, span.end))
        breaks = [
            "\n" + level * "    " for level in range(10)
        ]  # a node knows nothing of the block it stands in
        lead = next((lead for lead in breaks if old.replace("\n", lead) == code[begin:end]), None)
        if lead is None:
            continue
        old, new = code[begin:end], new.replace("\n", lead)
        source = code[:begin] + new + code[end:]
        if source not in found and compiles(source):
            first, last = (
                1 + code.count("\n", 0, begin),
                1 + code.count("\n", 0, begin + len(old.rstrip())),
            )
            rows = (
                code.splitlines()[first - 1 : last],
                source.splitlines()[first - 1 : last + new.count("\n") - old.count("\n")],
            )
            diff = "\n".join(
                mark + line for mark, lines in zip("-+", rows, strict=True) for line in lines
            )
            found[source] = Mutant(name, first, last, diff, source)
    return sorted(found.values(), key=lambda one: (one.first, one.last))


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class Served:
    """Imports one module from a changed source."""

    def __init__(self, path: Path, source: str, root: Path):
        self.path, self.source = path, source
        self.name = ".".join(path.relative_to(root).with_suffix("").parts).removeprefix(
            "notebooks."
        )

    def find_spec(self, name, path=None, target=None):
        return (
            importlib.util.spec_from_loader(name, self, origin=str(self.path))
            if name == self.name
            else None
        )

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__file__ = str(self.path)
        exec(compile(self.source, self.path, "exec", dont_inherit=True), module.__dict__)


class Chosen:
    """A pytest plugin that runs the tests of `durations`, quickest first, and remembers the one that failed."""

    def __init__(self, durations: dict[str, float]):
        self.durations, self.failed = durations, None

    def pytest_collection_modifyitems(self, config, items):
        dropped = [item for item in items if item.nodeid not in self.durations]
        items[:] = sorted(
            (item for item in items if item.nodeid in self.durations), key=self._seconds
        )
        config.hook.pytest_deselected(items=dropped)

    def _seconds(self, item) -> float:
        return self.durations[item.nodeid]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid


class Watched:
    """A pytest plugin that notes how long each test takes and which lines of the room it runs."""

    def __init__(self, coverage):
        self.coverage, self.tests = coverage, {}

    def pytest_collection_modifyitems(self, config, items):
        clocks = [
            item for item in items if CLOCKS.search(inspect.getsource(item.function) + item.name)
        ]
        items[:] = [item for item in items if item not in clocks]
        config.hook.pytest_deselected(items=clocks)

    def pytest_runtest_logstart(self, nodeid, location):
        self.coverage.switch_context(nodeid)
        self.begin = time.process_time()

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.tests.setdefault(report.nodeid, time.process_time() - self.begin)
        elif not report.passed:  # those that fail or are skipped as things are say nothing
            self.tests[report.nodeid] = None


def run_pytest(files: list[str], plugin) -> int:
    import pytest

    return int(pytest.main(["-x", *QUIET, "--tb=line", *files], plugins=[plugin]))


def baseline(room: str, root: Path) -> dict:
    """Which tests of a room run which lines, and how long they take: {"tests": {id: seconds}, "lines": {path: {line: ids}}}.

    AT_IMPORT stands among the ids of a line that runs before the tests.
    """
    import coverage

    watch = coverage.Coverage(
        data_file=None, include=[str(folder_of(room, root) / "*")], messages=False
    )
    plugin = Watched(watch)
    watch.start()
    import pytest

    pytest.main([*QUIET, str(root / "tests" / room)], plugins=[plugin])
    watch.stop()
    data, lines = watch.get_data(), {}
    tests = {name: seconds for name, seconds in plugin.tests.items() if seconds is not None}
    for file in data.measured_files():
        contexts = data.contexts_by_lineno(file)
        name = Path(file).relative_to(root).as_posix()
        lines[name] = {
            line: [one for one in ran if one in tests or one == AT_IMPORT]
            for line, ran in contexts.items()
        }
    return {"tests": tests, "lines": lines}


def tests_for(mutant: Mutant, known: dict) -> dict[str, float]:
    """The tests that run a mutant's lines; where only the import runs them, those that run anything of the module."""
    lines = known["lines"].get(mutant.path, {})
    own = [str(line) for line in range(mutant.first, mutant.last + 1)]
    names = {name for line in own for name in lines.get(line, ())} - {AT_IMPORT}
    if not names and any(line in lines for line in own):
        names = {name for ran in lines.values() for name in ran} - {AT_IMPORT}
    return {name: known["tests"][name] for name in names}


def likely(mutant: Mutant, tests: dict[str, float], root: Path) -> dict[str, int]:
    """Tests -> 2 where their file names the module and what the changed statement defines, 1 for one of both, else 0."""
    statements = ast.parse((root / mutant.path).read_text(encoding="utf-8")).body
    whole = next((one for one in statements if one.lineno <= mutant.first <= one.end_lineno), None)
    names = [one for one in ast.walk(whole) if isinstance(one, ast.Name)] if whole else []
    defined = [name.id for name in names if isinstance(name.ctx, ast.Store)]
    words = [
        re.compile(rf"\b{word}\b") for word in (Path(mutant.path).stem, "|".join(defined) or "(?!)")
    ]
    texts = {name.split("::")[0] for name in tests}
    marks = {
        file: sum(bool(word.search((root / file).read_text(encoding="utf-8"))) for word in words)
        for file in texts
    }
    return {name: marks[name.split("::")[0]] for name in tests}


def quickest(
    tests: dict[str, float], seconds: float, first: dict[str, int] | None = None
) -> dict[str, float]:
    """Those that take at most so long together, one at least: those of a high mark in `first`, then the quick ones."""
    ordered = sorted(tests, key=lambda name: (-(first or {}).get(name, 0), tests[name]))
    ends = itertools.accumulate(tests[name] for name in ordered)
    return {
        name: tests[name]
        for place, (name, end) in enumerate(zip(ordered, ends, strict=True))
        if not place or end <= seconds
    }


def forked(work, seconds: float, said: Path | None) -> tuple[dict | None, str]:
    """(what `work()` returns, "") from a process of its own; (None, why) where it was stopped or died.

    seconds: of processor time. said: where what it prints goes; None: where this process prints.
    """
    scratch = Path(tempfile.mkdtemp(prefix="mutant-"))
    answer = scratch / "answer.json"
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            resource.setrlimit(resource.RLIMIT_DATA, (8 * GIB, 8 * GIB))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if said is not None:
                handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for stream in (1, 2):
                    os.dup2(handle, stream)
            answer.write_text(json.dumps(work()))
        finally:
            os._exit(0)
    latest, status = time.monotonic() + 10 * seconds, None
    try:
        while status is None and time.monotonic() < latest:
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started, and itself where it is late
    if status is None:
        os.waitpid(child, 0)
    try:
        return (json.loads(answer.read_text()), "") if answer.exists() else (None, ending(status))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def ending(status: int | None) -> str:
    late = status is None or (
        os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    )
    return "timeout" if late else "killed"


def tried(mutant: Mutant, tests: dict[str, float], root: Path) -> dict:
    """The outcome for one mutant: survived, killed (and by which test), timeout or untested."""
    if not tests:
        return {"outcome": "untested"}

    def work() -> dict:
        sys.meta_path.insert(0, Served(root / mutant.path, mutant.source, root))
        plugin = Chosen(tests)
        code = run_pytest(sorted({name.split("::")[0] for name in tests}), plugin)
        return {"outcome": "survived" if code == 0 else "killed", "by": plugin.failed}

    return outcome(work, tests)


def outcome(work, tests: dict[str, float]) -> dict:
    """What `work()` found in a process of its own, in at most five times what these tests take."""
    begin = time.monotonic()
    found, why = forked(work, 20 + 5 * sum(tests.values()), STORE / "last.txt")
    return (found or {"outcome": why}) | {
        "tests": len(tests),
        "seconds": round(time.monotonic() - begin, 2),
    }


class InPlace:
    """A pytest plugin that runs no test as things are: for each mutant a process forks, changes its functions and runs its tests.

    waiting: (mutant, its tests). other: called with each mutant that is no matter of functions alone. done: with each outcome.
    """

    def __init__(self, waiting: list[tuple[Mutant, dict[str, float]]], root: Path, done, other):
        self.waiting, self.root, self.done, self.other = waiting, root, done, other

    def pytest_runtestloop(self, session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        functions = changed_code.live_functions(str(self.root))
        for mutant, tests in self.waiting:
            file = str(self.root / mutant.path)
            codes = [
                compile(source, file, "exec", dont_inherit=True)
                for source in (Path(file).read_text(), mutant.source)
            ]
            pairs = changed_code.changed_code(*codes)
            known = pairs and any(functions.get(changed_code.place(old)) for old, _ in pairs)
            if known and tests and set(tests) <= set(self.items):
                self.done(
                    mutant, outcome(lambda p=pairs, t=tests: self._run(p, functions, t), tests)
                )
            else:
                self.other(mutant)
        return True

    def _run(self, pairs: list, functions: changed_code.Functions, tests: dict[str, float]) -> dict:
        """In the forked process: the outcome."""
        from _pytest.runner import runtestprotocol

        os.environ["SPECDEC_HOME"] = os.path.join(tempfile.gettempdir(), "home")
        os.environ["SPECDEC_CACHE"] = os.path.join(os.environ["SPECDEC_HOME"], "cache")
        changed_code.change(pairs, functions)
        items = [self.items[name] for name in sorted(tests, key=tests.get)]
        for item, following in zip(items, [*items[1:], None], strict=True):
            if any(
                report.failed for report in runtestprotocol(item, log=False, nextitem=following)
            ):
                return {"outcome": "killed", "by": item.nodeid}
        return {"outcome": "survived", "by": None}


def known_of(room: str, root: Path) -> dict:
    """`baseline`, kept until a file of the room or of its tests changes."""
    files = sorted([*folder_of(room, root).rglob("*.py"), *(root / "tests" / room).rglob("*.py")])
    key = hashlib.sha256(b"imports" + b"".join(file.read_bytes() for file in files)).hexdigest()[
        :16
    ]
    kept = STORE / f"{room}-{key}.json"
    if not kept.exists():
        print(
            f"running the tests of {room} once, to see which lines each of them reaches ...",
            flush=True,
        )
        found, why = forked(lambda: baseline(room, root), 3600, STORE / f"{room}.txt")
        if not found or not found["tests"]:
            raise SystemExit(f"the tests of {room} did not run ({why}); see {STORE / room}.txt")
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def results(again: str = "") -> dict[str, dict]:
    """What earlier runs found, by the mutant's key; an outcome named in `again` counts as not tried."""
    file = STORE / "results.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        found[record["key"]] = record
    return {
        key: record for key, record in found.items() if record["outcome"] not in again.split(",")
    }


def chosen(rooms: list[str], only: str, sample: int, seed: int, root: Path) -> list[Mutant]:
    paths = [
        path
        for room in rooms
        for path in sorted(folder_of(room, root).rglob("*.py"))
        if only in path.name
    ]
    found = [mutant for path in paths for mutant in mutants_of(path, root)]
    print(f"{len(found)} mutants of {', '.join(rooms)}", flush=True)
    if 0 < sample < len(found):
        found = random.Random(seed).sample(found, sample)
    return found


def survivors(path: Path = ROOT / ".ci" / "survivors.yml") -> dict[tuple[str, str], str]:
    """(module, its changed lines without their spaces) -> why no test notices the change."""
    import yaml

    listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {
        (module, squeezed(line)): listed["reasons"][why]
        for module, reasons in listed["survivors"].items()
        for why, lines in reasons.items()
        for line in lines
    }


def squeezed(lines: str) -> str:
    return "".join(lines.split())


def report(mutants: list[Mutant], done: dict[str, dict]) -> None:
    records, why = [done[mutant.key] for mutant in mutants if mutant.key in done], survivors()
    counts = Counter(record["outcome"] for record in records)
    noticed, explained = counts["killed"] + counts["timeout"], 0
    for one in (one for one in records if one["outcome"] in ("survived", "untested")):
        old = "".join(line[1:] for line in one["diff"].splitlines() if line.startswith("-"))
        reason = why.get((one["path"], squeezed(old)), "")
        explained += bool(reason)
        print(
            "-" * 80,
            f"{one['path']}:{one['first']} {one['outcome']}  {reason}",
            one["diff"],
            sep="\n",
        )
    print("-" * 80)
    print(f"{explained} of those that nobody noticed have a reason in .ci/survivors.yml.")
    print(
        f"{len(records)} of {len(mutants)} tried: "
        + ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
    )
    if records:
        print(f"noticed: {100 * noticed / len(records):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="+", default=["core"])
    parser.add_argument("--only", default="", help="modules whose file name holds this")
    parser.add_argument(
        "--sample", type=int, default=0, help="so many of all mutants, drawn with the seed; 0: all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="stop after so many; the next run goes on"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="of tests per mutant, quick ones first; the rest is not asked",
    )
    parser.add_argument(
        "--again",
        default="",
        help="try those again that had this outcome: survived,untested,timeout",
    )
    parser.add_argument(
        "--list", action="store_true", help="say what is known already and try nothing"
    )
    asked = parser.parse_args()
    STORE.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]
    mutants = chosen(asked.rooms, asked.only, asked.sample, asked.seed, ROOT)
    if not asked.list:
        try_all(mutants, asked)
    report(mutants, results())


def try_all(mutants: list[Mutant], asked) -> None:
    done = results(asked.again)
    waiting = [mutant for mutant in mutants if mutant.key not in done]
    os.environ["OMP_NUM_THREADS"] = "1"
    for library in HEAVY.split():
        importlib.import_module(library)
    known = {room: known_of(room, ROOT) for room in sorted({mutant.room for mutant in waiting})}
    tests = {}
    for mutant in waiting:
        reached = tests_for(mutant, known[mutant.room])
        tests[mutant.key] = quickest(reached, asked.seconds, likely(mutant, reached, ROOT))
    longest = sum(sum(one.values()) for one in tests.values())
    print(
        f"{len(mutants) - len(waiting)} known already, {len(waiting)} to try: between {len(waiting) / 60:.0f} and "
        f"{(4 * len(waiting) + longest) / 60:.0f} minutes of processor time",
        flush=True,
    )
    latest = time.monotonic() + 60 * asked.minutes
    for room in known:
        own = [(mutant, tests[mutant.key]) for mutant in waiting if mutant.room == room]
        seconds = 60 + sum(25 + 5 * sum(tests.values()) for _, tests in own)
        left, _ = forked(
            lambda r=room, o=own, k=known[room]: try_in_place(r, o, k, latest), seconds, None
        )
        for number, key in enumerate(left or (), 1):
            if time.monotonic() > latest:
                return
            mutant = next(mutant for mutant, _ in own if mutant.key == key)
            note(mutant, tried(mutant, tests[key], ROOT), f"{number}/{len(left)}")


def try_in_place(
    room: str, waiting: list[tuple[Mutant, dict[str, float]]], known: dict, latest: float
) -> list[str]:
    """Try what can be tried with the room's tests collected once; the keys of the others."""
    import pytest

    left, count = [], itertools.count(1)
    quick = []
    for mutant, tests in waiting:
        lines = known["lines"].get(mutant.path, {})
        at_import = any(
            AT_IMPORT in lines.get(str(line), ()) for line in range(mutant.first, mutant.last + 1)
        )
        left.append(mutant.key) if at_import else quick.append((mutant, tests))

    def done(mutant: Mutant, found: dict) -> None:
        note(mutant, found, f"{next(count)}/{len(quick)}")
        if time.monotonic() > latest:
            os._exit(0)

    plugin = InPlace(quick, ROOT, done, lambda mutant: left.append(mutant.key))
    settings = [
        "-o",
        "addopts=",
        "--import-mode=importlib",
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-s",
    ]
    pytest.main([*settings, str(ROOT / "tests" / room)], plugins=[plugin])
    return left


def note(mutant: Mutant, found: dict, number: str) -> None:
    """Append one outcome to the results, and say it."""
    record = {"key": mutant.key, **asdict(mutant), **found}
    record.pop("source")
    with open(STORE / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(
        f"{number} {mutant.path}:{mutant.first} {found['outcome']} {found.get('seconds', 0):.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
