"""Runs the book: book.yml through papermill, parameters checked, only what is stale, every promise of a file kept.

Knows nothing about what the notebooks compute. Executed copies land in runs/<scale>/notebooks; the sources stay as
they are. A notebook is stale when its source, its parameters, the package, or a file it reads has changed.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import pandas as pd

from specdec import machine, pages, runs
from specdec.config import SpecdecError, nearest_name_error
from specdec.pages import Entry

# A kernel without a screen: tqdm.auto falls back to text bars, which a terminal can show and a stored copy keeps.
LAUNCH = (
    "import sys; sys.modules['tqdm.notebook'] = None; "
    "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
)


def run(scale="laptop", only=(), *, everything=False, jobs=1, force=False, parameters=None, folder=None):
    """Execute the stale notebooks of the book; a DataFrame tells what happened to each.

    only: names or beginnings of names ("2" means the twenties); without it the main ones, or all with `everything`.
    parameters: values that replace those of book.yml in every selected notebook; unknown ones are an error.
    jobs: notebooks that may run at once; one that reads what another writes waits for it.
    Returns columns name, state ('done', 'fresh', 'failed', 'skipped'), seconds, copy, note. SpecdecError before
    anything runs for what can be known before; a notebook that fails stops only those that read its files.
    """
    book = Book(scale, folder)
    chosen = book.choose(only, everything)
    settings = {entry.name: book.parameters(entry, parameters or {}) for entry in chosen}
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
        self.folder = Path(folder) if folder else pages.notebooks_folder()
        self.entries = pages.read_book(self.folder)
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
        return [pattern.replace("{scale}", self.scale) for pattern in listed]

    def needs(self, entry: Entry, chosen: list[Entry]) -> list[str]:
        """Names among `chosen` that write what `entry` reads."""
        reads = set(self.patterns(entry.reads))
        return [one.name for one in chosen if one is not entry and reads & set(self.patterns(one.writes))]

    def missing(self, listed) -> list[str]:
        return [pattern for pattern in self.patterns(listed) if not matches(pattern)]

    def key(self, entry: Entry, given: dict) -> str:
        """What the executed copy depends on."""
        reads = [str(path) + machine.file_hash(path) for path in map(matches, self.patterns(entry.reads)) for path in path]
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
    import papermill

    copy, key, started = book.copy(entry), book.key(entry, given), time.monotonic()
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.with_suffix(".json").unlink(missing_ok=True)
    try:
        papermill.execute_notebook(
            entry.source(book.folder),
            copy,
            parameters=given,
            cwd=book.folder,
            progress_bar={"desc": entry.name} if shown else False,
            stderr_file=sys.stderr if shown else None,
            kernel_manager_class=_kernel_manager(),
        )
    except papermill.PapermillExecutionError as error:
        where = f"cell {error.exec_count} raised {error.ename}: {error.evalue}"
        return "failed", time.monotonic() - started, f"{where} (see {copy})"
    except (RuntimeError, OSError) as error:  # the kernel died or never came up
        return "failed", time.monotonic() - started, f"{type(error).__name__}: {error} (see {copy})"
    _collapse_bars(copy)
    seconds = time.monotonic() - started
    if missing := book.missing(entry.writes):
        return "failed", seconds, f"it ran but did not write {', '.join(missing)} as book.yml promises"
    runs.write_json(copy.with_suffix(".json"), {"key": key, "parameters": given, "seconds": seconds})
    return "done", seconds, ""
