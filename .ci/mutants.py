"""Mutation test: change one thing in the package, run the tests that reach it, see if one fails.

`make mutants` tries a seeded sample of the changes that mutmut knows. Each is tried in a forked
process, in which the changed module is imported from memory; no file of the checkout is touched.
The tests of the module's folder are run once with coverage, so that a change meets only the tests
that ran its line. Outcomes are appended to runs/mutants/results.jsonl; the same call continues.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "runs" / "mutants"
# Imported once, before processes are forked.
LIBRARIES = "torch transformers pandas scipy.stats pyarrow.parquet gymnasium stable_baselines3"
OPTIONS = ["-x", "-q", "-s", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider"]
MEMORY = 8 << 30


@dataclass(frozen=True)
class Mutant:
    """A change. path: of the module, from the root; first, last: its lines; source: all of it."""

    path: str
    first: int
    last: int
    diff: str
    source: str = field(repr=False)

    @property
    def folder(self) -> str:
        return Path(self.path).parts[1]

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.path}\n{self.source}".encode()).hexdigest()[:16]


def folder_of(name: str) -> Path:
    """The modules of a folder of the package, or of one beside the notebooks."""
    above = "notebooks" if name in ("workbook", "experiments") else "specdec"
    return ROOT / above / name


def mutants_of(path: Path) -> list[Mutant]:
    """Every change of one module that compiles, but for what errors say."""
    import libcst
    from libcst.metadata import MetadataWrapper, WhitespaceInclusivePositionProvider
    from mutmut.mutation.file_mutation import MutationVisitor
    from mutmut.mutation.mutators import mutation_operators
    from mutmut.mutation.pragma_handling import IgnoredCode

    class Visitor(MutationVisitor):
        def _skip_node_and_children(self, node) -> bool:
            # functions with decorators are changed too, since whole modules are replaced
            if isinstance(node, libcst.FunctionDef | libcst.Raise):
                return isinstance(node, libcst.Raise)
            return super()._skip_node_and_children(node)

    # 1. where mutmut would change what
    code = path.read_text(encoding="utf-8")
    wrapper = MetadataWrapper(libcst.parse_module(code), unsafe_skip_copy=True)
    visitor = Visitor(mutation_operators, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    spans = wrapper.resolve(WhitespaceInclusivePositionProvider)
    starts = [0, *itertools.accumulate(len(line) for line in code.splitlines(keepends=True))]
    mutants = {}
    for mutation in visitor.mutations:
        # 2. a statement of several lines is printed without the indentation of its block
        old = wrapper.module.code_for_node(mutation.original_node)
        new = wrapper.module.code_for_node(mutation.mutated_node)
        span = spans[mutation.original_node]
        begin = starts[span.start.line - 1] + span.start.column
        end = starts[span.end.line - 1] + span.end.column
        indents = ["\n" + "    " * level for level in range(10)]
        fitting = [one for one in indents if old.replace("\n", one) == code[begin:end]]
        if not fitting:
            continue
        new = new.replace("\n", fitting[0])
        source = code[:begin] + new + code[end:]
        # 3. only what compiles, and each change once
        try:
            compile(source, "mutant", "exec")
        except SyntaxError:
            continue
        first = 1 + code.count("\n", 0, begin)
        last = first + code[begin:end].rstrip().count("\n")
        diff = f"- {code[begin:end].strip()}\n+ {new.strip()}"
        name = path.relative_to(ROOT).as_posix()
        mutants.setdefault(source, Mutant(name, first, last, diff, source))
    return sorted(mutants.values(), key=lambda mutant: (mutant.first, mutant.last))


class Served:
    """Imports one module from a changed source."""

    def __init__(self, mutant: Mutant):
        self.path = ROOT / mutant.path
        self.source = mutant.source
        self.name = mutant.path.removesuffix(".py").replace("/", ".").removeprefix("notebooks.")

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            return importlib.util.spec_from_loader(name, self, origin=str(self.path))
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__file__ = str(self.path)
        exec(compile(self.source, self.path, "exec", dont_inherit=True), module.__dict__)


class Chosen:
    """A pytest plugin that runs the tests of `durations` (seconds), the quickest first."""

    def __init__(self, durations: dict[str, float]):
        self.durations = durations

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.durations]
        items.sort(key=lambda item: self.durations[item.nodeid])


class Watched:
    """A pytest plugin that notes how long each test takes and which lines it runs."""

    def __init__(self, coverage):
        self.coverage = coverage
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid, location):
        self.coverage.switch_context(nodeid)
        self.begin = time.process_time()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = time.process_time() - self.begin


def reached(folder: str) -> dict:
    """{"seconds": {test: s}, "lines": {path: {line: tests}}}; stored until a file changes."""
    tests = ROOT / "tests" / folder
    files = sorted([*folder_of(folder).rglob("*.py"), *tests.rglob("*.py")])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    stored = STORE / f"{folder}-{digest}.json"

    def watch() -> dict:
        import coverage
        import pytest

        tracer = coverage.Coverage(data_file=None, include=[f"{folder_of(folder)}/*"])
        plugin = Watched(tracer)
        tracer.start()
        pytest.main([*OPTIONS[1:], str(tests)], plugins=[plugin])
        tracer.stop()
        data = tracer.get_data()
        lines = {}
        for file in data.measured_files():
            name = Path(file).relative_to(ROOT).as_posix()
            lines[name] = data.contexts_by_lineno(file)
        return {"seconds": plugin.seconds, "lines": lines}

    if not stored.exists():
        print(f"running the tests of {folder} once ...", flush=True)
        facts = forked(watch, 3600)
        if not facts or not facts["seconds"]:
            raise SystemExit(f"the tests of {folder} did not run; see {STORE / 'last.txt'}")
        stored.write_text(json.dumps(facts))
    return json.loads(stored.read_text())


def tests_of(mutant: Mutant, facts: dict, limit_s: float) -> dict[str, float]:
    """The tests that run its lines, quick ones first and at most `limit_s` seconds of them.

    Where only the import runs them: those that run anything of the module.
    """
    lines = facts["lines"].get(mutant.path, {})
    names: set[str] = set()
    for line in range(mutant.first, mutant.last + 1):
        names.update(lines.get(str(line), ()))
    names &= set(facts["seconds"])
    if not names:
        for tests in lines.values():
            names.update(set(tests) & set(facts["seconds"]))
    chosen: dict[str, float] = {}
    for name in sorted(names, key=facts["seconds"].get):
        if not chosen or sum(chosen.values()) + facts["seconds"][name] <= limit_s:
            chosen[name] = facts["seconds"][name]
    return chosen


def forked(work, seconds: float):
    """What `work()` returns in a process of its own; None if it died or took too long."""
    STORE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        answer = Path(scratch) / "answer.json"
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                os.environ["TMPDIR"] = tempfile.tempdir = scratch
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
                output = os.open(STORE / "last.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                answer.write_text(json.dumps(work()))
            finally:
                os._exit(0)
        latest = time.monotonic() + 10 * seconds
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > latest:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
        return json.loads(answer.read_text()) if answer.exists() else None


def tried(mutant: Mutant, tests: dict[str, float]) -> str:
    """The outcome: "killed" by a test (or by taking too long), "survived" or "untested"."""
    if not tests:
        return "untested"

    def work() -> int:
        import pytest

        sys.meta_path.insert(0, Served(mutant))
        files = sorted({name.split("::")[0] for name in tests})
        return int(pytest.main([*OPTIONS, "--tb=line", *files], plugins=[Chosen(tests)]))

    return "survived" if forked(work, 20 + 5 * sum(tests.values())) == 0 else "killed"


def main() -> None:
    # 1. options, and the sample
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="+", default=["core"], help="folders of modules")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for one mutant")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "notebooks"), str(ROOT / "tests")]
    os.environ["OMP_NUM_THREADS"] = "1"
    mutants = []
    for folder in options.rooms:
        for path in sorted(folder_of(folder).rglob("*.py")):
            mutants += mutants_of(path)
    if 0 < options.sample < len(mutants):
        mutants = random.Random(options.seed).sample(mutants, options.sample)
    # 2. outcomes of earlier calls
    results = STORE / "results.jsonl"
    outcomes = {}
    if results.exists():
        for line in results.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            outcomes[record["key"]] = record["outcome"]
    # 3. the others
    for library in LIBRARIES.split():
        importlib.import_module(library)
    facts = {folder: reached(folder) for folder in options.rooms}
    for number, mutant in enumerate(mutants, 1):
        if mutant.key not in outcomes:
            tests = tests_of(mutant, facts[mutant.folder], options.seconds)
            outcomes[mutant.key] = tried(mutant, tests)
            record = {"key": mutant.key, "outcome": outcomes[mutant.key]}
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            place = f"{mutant.path}:{mutant.first}"
            print(f"{number}/{len(mutants)} {place} {outcomes[mutant.key]}", flush=True)
    # 4. what no test noticed
    counts = Counter(outcomes.get(mutant.key, "not tried") for mutant in mutants)
    for mutant in mutants:
        if outcomes.get(mutant.key) in ("survived", "untested"):
            place = f"{mutant.path}:{mutant.first}"
            print(f"{place} {outcomes[mutant.key]}\n{mutant.diff}\n")
    print(dict(counts))
    tries = counts["killed"] + counts["survived"] + counts["untested"]
    print(f"noticed: {100 * counts['killed'] / max(1, tries):.1f} % of {tries}")


if __name__ == "__main__":
    main()
