"""Executes one notebook through papermill, in a kernel of this very interpreter.

Knows nothing about the book. Needs no installed kernelspec and opens no network port: the kernel talks over files
where the system can. Progress bars come out as text, on the terminal and in the stored copy.

Runs the book: book.yml through papermill, parameters checked, only what is stale, every promise of a file kept.

Knows nothing about what the notebooks compute. Executed copies land in runs/<scale>/notebooks; the sources stay as
they are. A notebook is stale when its source, its parameters, the package, or a file it reads has changed.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
import time
import uuid
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import pandas as pd

from specdec import machine, runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.tools import notebooks
from specdec.tools.notebooks import Entry

# A kernel without a screen: tqdm.auto takes text bars when its notebook module cannot be imported.
LAUNCH = (
    "import sys; sys.modules['tqdm.notebook'] = None; "
    "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
)
BAR_INTERVAL_S = "2"


def execute(source: Path, copy: Path, parameters: dict, shown: bool = True) -> str:
    """Execute `source` with `parameters` into `copy`, which is left as far as it came when a cell fails.

    shown: progress on the terminal. Returns '' or one sentence that says what went wrong.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    runs.write_text(copy, source.read_text(encoding="utf-8"))  # a folder that cannot be written is known at once
    try:
        papermill.execute_notebook(
            source,
            copy,
            parameters=parameters,
            kernel_name="python3",
            cwd=source.parent,
            progress_bar=shown,
            stderr_file=sys.stderr if shown else None,
            kernel_manager_class=_kernel_manager(),
            coalesce_streams=True,  # keeps only the last state of a text progress bar
        )
    except PapermillExecutionError as error:
        first_line = str(error.evalue).strip().splitlines()[:1]
        return f"cell {error.exec_count} raised {error.ename}: {''.join(first_line)}"
    except (RuntimeError, OSError) as error:  # the kernel died or never came up
        return f"the kernel stopped ({type(error).__name__}: {error})"
    return ""


def _kernel_manager() -> type:
    """A kernel manager class whose kernels are this interpreter, over ipc where the system has it."""
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from traitlets import CaselessStrEnum, default

    paths = [str(machine.checkout()), *filter(None, [os.environ.get("PYTHONPATH")])]
    here = KernelSpec(
        argv=[sys.executable, "-c", LAUNCH, "-f", "{connection_file}"],
        language="python",
        env={"PYTHONPATH": os.pathsep.join(paths), "TQDM_MININTERVAL": BAR_INTERVAL_S},
    )

    class Headless(AsyncKernelManager):
        transport = CaselessStrEnum(["tcp", "ipc"], "tcp" if sys.platform == "win32" else "ipc", config=True)

        @default("ip")
        def _own_file(self):  # the library's default is one name for all kernels of a folder
            return (
                os.path.join(tempfile.gettempdir(), f"specdec-{uuid.uuid4().hex}")
                if self.transport == "ipc"
                else "127.0.0.1"
            )

        @property
        def kernel_spec(self):
            return here

    return Headless


# ---- from book ----------------------------------------


def run(
    scale="laptop", only=(), *, everything=False, jobs=1, force=False, smoke=False, parameters=None, folder=None
) -> pd.DataFrame:
    """Execute the stale notebooks of the book; a DataFrame tells what happened to each.

    only: names or beginnings of names ("2" means the twenties); without it the main ones, or all with `everything`.
    parameters: values that replace those of book.yml in every selected notebook; unknown ones are an error.
    smoke: with the small settings of the tests. force: fresh ones too.
    jobs: notebooks that may run at once; one that reads what another writes waits for it.
    Returns columns name, state ('done', 'fresh', 'failed', 'skipped'), seconds, copy, note. SpecdecError before
    anything runs for what can be known before; a notebook that fails stops only those that read its files.
    """
    book = Book(scale, folder)
    chosen = book.choose(only, everything)
    extra = parameters or {}
    settings = {one.name: book.parameters(one, {**(one.smoke if smoke else {}), **extra}) for one in chosen}
    needs = {entry.name: book.needs(entry, chosen) for entry in chosen}
    runner = _Runner(book, settings, force, shown=jobs == 1)
    if jobs > 1:
        runner.in_parallel(chosen, needs, jobs)
    else:
        for entry in chosen:
            runner.take(entry, needs[entry.name])
    return pd.DataFrame([runner.outcomes[entry.name] for entry in chosen])


class Book:
    """The entries at one scale: what is chosen, what it is given, what it needs, whether it is fresh."""

    def __init__(self, scale: str = "laptop", folder: Path | None = None):
        self.scale = runs.known_scale(scale)
        self.folder = Path(folder) if folder else notebooks.notebooks_folder()
        self.entries = notebooks.read_book(self.folder)
        self.code = machine.code_hash()

    def choose(self, only=(), everything: bool = False) -> list[Entry]:
        """Entries in the order of the book; SpecdecError when a name in `only` matches nothing."""
        wanted = [only] if isinstance(only, str) else list(only)
        names = [entry.name for entry in self.entries]
        for beginning in wanted:
            if not any(name.startswith(beginning) for name in names):
                raise nearest_name_error("notebook", beginning, names)
        if wanted:
            return [entry for entry in self.entries if entry.name.startswith(tuple(wanted))]
        return [entry for entry in self.entries if everything or entry.main]

    def parameters(self, entry: Entry, extra: dict) -> dict:
        """What the notebook is called with; SpecdecError for a name or a type its parameters cell does not have."""
        import papermill

        given = {"scale": self.scale, **entry.parameters.get(self.scale, {}), **extra}
        known = papermill.inspect_notebook(entry.source(self.folder))
        for name, value in given.items():
            if name not in known:
                raise nearest_name_error(f"parameter of {entry.name}", name, known)
            default = ast.literal_eval(known[name]["default"])
            if not _same_kind(value, default):
                kind = type(default).__name__
                raise SpecdecError(f"parameter {name} of {entry.name} is of type {kind}, got {value!r}.")
        return given

    def patterns(self, listed) -> list[str]:
        figures = "figures" if self.scale == "paper" else f"runs/{self.scale}/figures"  # as runs.figure_path has it
        return [pattern.replace("{scale}", self.scale).replace("{figures}", figures) for pattern in listed]

    def needs(self, entry: Entry, chosen: list[Entry]) -> list[str]:
        """Names among `chosen` that write what `entry` reads."""
        reads = set(self.patterns(entry.reads))
        return [one.name for one in chosen if one is not entry and reads & set(self.patterns(one.writes))]

    def missing(self, listed) -> list[str]:
        return [pattern for pattern in self.patterns(listed) if not matches(pattern)]

    def key(self, entry: Entry, given: dict) -> str:
        """What the executed copy depends on."""
        files = [path for pattern in self.patterns(entry.reads) for path in matches(pattern)]
        reads = [(path.name, machine.file_hash(path)) for path in files]
        source = machine.file_hash(entry.source(self.folder))
        return runs.content_key(source=source, given=given, code=self.code, reads=reads, writes=entry.writes)

    def copy(self, entry: Entry) -> Path:
        return runs.runs_dir(self.scale) / "notebooks" / f"{entry.name}.ipynb"

    def is_fresh(self, entry: Entry, given: dict) -> bool:
        record = self.copy(entry).with_suffix(".json")
        whole = record.is_file() and self.copy(entry).is_file() and not self.missing(entry.writes)
        return whole and runs.read_json(record)["key"] == self.key(entry, given)

    def state(self, entry: Entry) -> str:
        """'fresh', 'stale' or 'never run', for the table of contents."""
        if not self.copy(entry).with_suffix(".json").is_file():
            return "never run"
        return "fresh" if self.is_fresh(entry, self.parameters(entry, {})) else "stale"


def matches(pattern: str) -> list[Path]:
    """Files that match under the home of results, or else in the checkout (the papers' own numbers)."""
    return sorted(runs.home().glob(pattern)) or sorted(machine.checkout().glob(pattern))


def _same_kind(value, default) -> bool:
    if default is None or value is None:
        return True
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


class _Runner:
    """Takes entries one by one or side by side and keeps what became of each."""

    def __init__(self, book: Book, settings: dict, force: bool, shown: bool):
        self.book, self.settings, self.force, self.shown = book, settings, force, shown
        self.outcomes: dict[str, dict] = {}

    def take(self, entry: Entry, needs: list[str]):
        """Run `entry` here and now unless it is fresh or cannot run."""
        if self._ready(entry, needs):
            self._note(entry, *_execute(self.book, entry, self.settings[entry.name], self.shown))

    def in_parallel(self, chosen: list[Entry], needs: dict, jobs: int):
        """Run what is ready in `jobs` processes; start what waited for files as they appear."""
        waiting, running = list(chosen), {}
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            while waiting or running:
                for entry in [one for one in waiting if set(needs[one.name]) <= set(self.outcomes)]:
                    waiting.remove(entry)
                    if self._ready(entry, needs[entry.name]):
                        task = pool.submit(_execute, self.book, entry, self.settings[entry.name], False)
                        running[task] = entry
                if not running and waiting and not any(set(needs[one.name]) <= set(self.outcomes) for one in waiting):
                    raise SpecdecError(f"{', '.join(one.name for one in waiting)} read each other's files in a circle.")
                for task in wait(running, return_when=FIRST_COMPLETED).done:
                    self._note(running.pop(task), *task.result())

    def _ready(self, entry: Entry, needs: list[str]) -> bool:
        """Whether to run it now; notes the outcome when not."""
        failed = [name for name in needs if self.outcomes.get(name, {}).get("state") in ("failed", "skipped")]
        if failed:
            self._note(entry, "skipped", 0.0, f"needs {', '.join(failed)}")
        elif missing := self.book.missing(entry.reads):
            self._note(entry, "failed", 0.0, f"needs {', '.join(missing)}{_writers(self.book, missing)}")
        elif not self.force and self.book.is_fresh(entry, self.settings[entry.name]):
            self._note(entry, "fresh", 0.0, "")
        else:
            return True
        return False

    def _note(self, entry: Entry, state: str, seconds: float, note: str):
        copy = self.book.copy(entry)
        self.outcomes[entry.name] = dict(name=entry.name, state=state, seconds=seconds, copy=str(copy), note=note)
        print(f"{entry.name}: {state}" + (f" in {seconds:.0f} s" if seconds else "") + (f"; {note}" if note else ""))


def _writers(book: Book, missing: list[str]) -> str:
    names = [entry.name for entry in book.entries if set(book.patterns(entry.writes)) & set(missing)]
    return f", which {', '.join(names)} writes; run it first" if names else ""


def _execute(book: Book, entry: Entry, given: dict, shown: bool) -> tuple[str, float, str]:
    """(state, seconds, note) of one notebook, executed into its copy. A failure leaves the copy as far as it came."""
    copy, key, started = book.copy(entry), book.key(entry, given), time.monotonic()
    copy.with_suffix(".json").unlink(missing_ok=True)
    fault = execute(entry.source(book.folder), copy, given, shown)
    seconds = time.monotonic() - started
    if not fault and (missing := book.missing(entry.writes)):
        fault = f"it ran but did not write {', '.join(missing)} as book.yml promises"
    if fault:
        return "failed", seconds, f"{fault} (see {copy})"
    runs.write_json(copy.with_suffix(".json"), {"key": key, "parameters": given, "seconds": seconds})
    return "done", seconds, ""


def contents(scale: str = "laptop", folder: Path | None = None) -> str:
    """The table of contents in markdown: notebook, promise, paper items, cost, and whether its copy is fresh."""
    book = Book(scale, folder)
    lines = ["| notebook | what it gives | paper items | cost | state |", "|---|---|---|---|---|"]
    for entry in book.entries:
        title, promise = notebooks.title_and_promise(notebooks.read_notebook(entry.source(book.folder)))
        link = f"[{entry.name}]({entry.notebook or entry.name}.ipynb)"
        cost = entry.cost.get(scale, "seconds")
        lines.append(f"| {link} {title} | {promise} | {entry.items} | {cost} | {book.state(entry)} |")
    return "\n".join(lines)


def main(arguments=None) -> int:
    """python -m specdec.book run | contents | tidy; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specdec.book", description="Run and tidy the notebooks.")
    commands = parser.add_subparsers(dest="command", required=True)
    options = commands.add_parser("run", help="execute what is stale")
    options.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names or beginnings of names")
    options.add_argument("--all", action="store_true", help="every notebook, not only the main ones")
    options.add_argument("--jobs", type=int, default=1, help="notebooks at once (timings suffer above 1)")
    options.add_argument("--force", action="store_true", help="run fresh ones too")
    options.add_argument("--smoke", action="store_true", help="with the small settings of the tests")
    options.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="one parameter")
    for command in (options, commands.add_parser("contents", help="print the table of contents")):
        command.add_argument("--scale", default="laptop", help="laptop or paper")
    tidying = commands.add_parser("tidy", help="strip outputs and rewrite header lines")
    tidying.add_argument("--check", action="store_true", help="change nothing, only say what is not tidy")
    given = parser.parse_args(arguments)
    try:
        return _obey(given)
    except SpecdecError as error:
        print(f"specdec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nspecdec: stopped; the same command continues where this one was.", file=sys.stderr)
        return 130  # what a shell reports for Ctrl-C


def _obey(given: argparse.Namespace) -> int:
    if given.command == "contents":
        print(contents(given.scale))
        return 0
    if given.command == "tidy":
        untidy = notebooks.tidy_all(check=given.check)
        print("\n".join(untidy) or "everything is tidy")
        return int(given.check and bool(untidy))
    values = {name: yaml_value(text) for name, text in given.p}
    options = {name: getattr(given, name) for name in ("jobs", "force", "smoke")}
    report = run(given.scale, given.only, everything=given.all, parameters=values, **options)
    return int(report["state"].isin(["failed", "skipped"]).any())


def yaml_value(text: str):
    """A command-line value as the number, flag, list or string it looks like."""
    import yaml

    return yaml.safe_load(text)


if __name__ == "__main__":
    sys.exit(main())
