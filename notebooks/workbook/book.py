"""The book: what each notebook reads and writes (book.yml), and the outdated ones run in order.

Executed copies land in runs/<scale>/notebooks; the sources stay as they are. A notebook is stale
when its source, its parameters, the package, or a file that it reads has changed.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pandas as pd

from specdec import machine, runs, stored
from specdec.errors import SpecdecError, check_name, nearest_name_error
from specdec.tools import cli

from workbook import notebooks
from workbook.items import read_items

STAND_IN = "small"  # replaces a pair that is not available
CONTENTS = "00_start_here"
RESULTS = "70_claims"  # the notebook that shows all results
# in a copy where other processes took CPUs (`bench`, `machine`): the run, or a cell's own times
DISTURBED = re.compile(r"(?:ratios of (\S+)|measured now) are no result")
PAGES = "../figures/book"  # executed pages, from the notebooks
# parameters that count something, of which one is the least
COUNTS = "answer_tok answers decodings draws epochs length live_tok max_new_tokens prompts repeats"


@dataclass(frozen=True)
class Entry:
    """One line of book.yml: a notebook, what it is given, what it needs and leaves, what it costs.

    notebook: its source, where another entry has the same. main: part of `make reproduce`. reads,
    may_read, writes: file patterns under the home of results, with {scale}, {figures} and
    parameters; of reads those are needed whose parameter has no value, may_read are shown if they
    exist. parameters, cost: per scale. smoke: parameters for the tests. apart: the command that
    runs it in place of `make book`.
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
        for scale in (*line.get("cost", {}), *line.get("parameters", {})):
            check_name("scale", scale, runs.SCALES)
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
    each = line.pop("each", None)
    if each is None:
        return [line]
    expanded = []
    for values in itertools.product(*each.values()):
        chosen = dict(zip(each, values, strict=True))
        # values as they stand in names: gsm8k for [gsm8k], 1 for 1.0
        texts = {}
        for name, value in chosen.items():
            texts[name] = f"{value:g}" if isinstance(value, float) else str(value)
            if isinstance(value, list):
                texts[name] = "_".join(value)
        parameters = {}
        for scale in runs.SCALES:
            parameters[scale] = dict(chosen)
            for name, value in line.get("parameters", {}).get(scale, {}).items():
                filled = value.format(**texts) if isinstance(value, str) else value
                parameters[scale][name] = filled
        name = line["name"].format(**texts)
        expanded.append({**line, "name": name, "parameters": parameters})
    return expanded


class Book:
    """The entries at one scale: what is selected, given and needed, and whether it is fresh."""

    def __init__(self, scale: str = "laptop", folder: Path | None = None):
        self.scale = check_name("scale", scale, runs.SCALES)
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

    def unfinished(self, entry: Entry) -> Path:
        """Where it is executed; a failed execution is left there."""
        return self.copy(entry).with_suffix(".unfinished.ipynb")

    def find(self, stem: str) -> Entry:
        """The first entry of a notebook; SpecdecError for an unknown name."""
        entries = self.sources()
        if stem not in entries:
            raise nearest_name_error("notebook", stem, entries)
        return entries[stem]

    def sources(self) -> dict[str, Entry]:
        """Notebook -> its first entry, which says what it reads."""
        firsts: dict[str, Entry] = {}
        for entry in self.entries:
            firsts.setdefault(entry.stem, entry)
        return firsts

    def choose(self, only=(), everything: bool = False) -> list[Entry]:
        """Entries in the order of the book; SpecdecError when a name in `only` matches nothing.

        Entries made by `each` have two underscores, and so must a beginning that names them.
        """
        if isinstance(only, str):
            only = [only]
        if not only:
            if everything:
                return list(itertools.filterfalse(operator.attrgetter("apart"), self.entries))
            return list(filter(operator.attrgetter("main"), self.entries))
        chosen = set()
        for beginning in only:
            matching = []
            for entry in self.entries:
                if entry.name.startswith(beginning) and (
                    "__" in beginning or "__" not in entry.name
                ):
                    matching.append(entry.name)
            if not beginning or not matching:
                names = [entry.name for entry in self.entries]
                raise nearest_name_error("notebook", beginning, names)
            chosen.update(matching)
        return [entry for entry in self.entries if entry.name in chosen]

    def defaults(self, entry: Entry) -> dict:
        return notebooks.default_parameters(notebooks.read_notebook(self.source(entry)))

    def parameters(self, entry: Entry, changes: dict) -> dict:
        """Every parameter of the notebook; SpecdecError for an unknown name or another type."""
        defaults = self.defaults(entry)
        settings = {"scale": self.scale, **entry.parameters.get(self.scale, {}), **changes}
        check_parameters(entry.name, defaults, settings)
        return {**defaults, **settings}

    def filled(self, patterns, values: dict) -> list[str]:
        """Paths under these parameters; `pair` and `drafter` are folders of `runs.recorded`."""
        # names in braces that patterns may hold
        facts = {**values, "scale": self.scale, "figures": f"runs/{self.scale}/figures"}
        if values.get("pair"):
            models = cli.Models(values["pair"], drafter=values.get("drafter") or None)
            recorded = runs.recorded(models.name).relative_to(runs.runs_dir() / "recorded")
            facts |= {"pair": recorded.parts[0], "drafter": "/".join(recorded.parts[1:])}
        return [pattern.format(**facts).replace("//", "/") for pattern in patterns]

    def reads(self, entry: Entry, values: dict) -> dict[str, str]:
        """The files that it needs under these parameters: those that no parameter names instead."""
        needed = {}
        for name, pattern in entry.reads.items():
            if not values.get(name):
                (needed[name],) = self.filled([pattern], values)
        return needed

    def writes(self, entry: Entry, values: dict) -> list[str]:
        return self.filled(entry.writes, values)

    def all_reads(self, entry: Entry, values: dict) -> list[str]:
        """The files that it needs, and those that it shows if they exist."""
        return [*self.reads(entry, values).values(), *self.filled(entry.may_read, values)]

    def key(self, entry: Entry, values: dict) -> str:
        """What the executed copy depends on: the content of all that it reads or names."""
        files = [self.source(entry)]
        for pattern in self.all_reads(entry, values):
            files += find_files(pattern)
        # prompts, policies, prices, recordings and the weights of a pair that is no preset
        files += named_files([values, os.environ.get("SPECDEC_DATA", "")])
        # names, not paths: another home of results changes nothing
        hashes = [(file.name, machine.file_hash(file)) for file in files]
        return runs.content_key(values=values, code=self.code, files=hashes, writes=entry.writes)

    def unwritten(self, entry: Entry, values: dict) -> list[str]:
        """What it promises to write and is not there."""
        patterns = self.writes(entry, values)
        return [pattern for pattern in patterns if not any(runs.home().glob(pattern))]

    def disturbed(self, entry: Entry) -> list[str]:
        """The runs behind the executed copy that other processes disturbed, '' for a cell."""
        copy = self.copy(entry)
        return DISTURBED.findall(copy.read_text(encoding="utf-8")) if copy.is_file() else []

    def state(self, entry: Entry, values: dict | None = None) -> str:
        """'fresh', 'disturbed', 'stale' or 'never run' under these or its usual parameters."""
        values = values or self.parameters(entry, {})
        record = self.copy(entry).with_suffix(".json")
        if not record.is_file():
            return "never run"
        complete = self.copy(entry).is_file() and not self.unwritten(entry, values)
        # hashes of all that it read are compared, not times
        same = runs.read_json(record)["key"] == self.key(entry, values)
        if not complete or not same:
            return "stale"
        return "disturbed" if self.disturbed(entry) else "fresh"

    def missing(self, entry: Entry, values: dict) -> str:
        """'' or which files it lacks and which notebooks write them."""
        lacking = [path for path in self.reads(entry, values).values() if not find_files(path)]
        if not lacking:
            return ""
        writers = []
        for writer in self.entries:
            # the writer as it would run for this notebook; `name` belongs to each
            settings = self.parameters(writer, {})
            for name in settings.keys() & values.keys() - {"name"}:
                settings[name] = values[name]
            if matches(lacking, self.writes(writer, settings)):
                writers.append(writer.name)
        sentence = f"needs {', '.join(lacking)}"
        if writers:
            sentence += f", which {', '.join(writers)} writes; run it first"
        return sentence


def find_files(pattern: str) -> list[Path]:
    """Files that match under the home of results, else beside the notebooks, else as shipped."""
    shipped = re.sub(r"^runs/\w+/", "", pattern)
    folders = [(runs.home(), pattern), (runs.workbook(), pattern), (runs.shipped_dir(), shipped)]
    for folder, relative in folders:
        files = sorted(folder.glob(relative))
        if files:
            return files
    return []


def named_files(value) -> list[Path]:
    """The files that texts in a parameter name, each or by a folder: "place" or "kind:place"."""
    files = []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            files += named_files(part)
    elif isinstance(value, str) and value:
        for text in filter(None, (value, value.partition(":")[2])):
            for folder in (Path.cwd(), runs.home(), runs.workbook()):
                # false also for texts that cannot be a path
                path = os.path.join(folder, os.path.expanduser(text))
                if os.path.isfile(path):
                    return [Path(path)]
                if os.path.isdir(path):
                    return sorted(filter(Path.is_file, Path(path).rglob("*")))
    return files


def matches(reads, writes) -> bool:
    """Whether one of the patterns `writes` covers one of `reads`, or the other way round."""
    for read, write in itertools.product(reads, writes):
        if fnmatch(read, write) or fnmatch(write, read):
            return True
    return False


def check_parameters(entry_name: str, defaults: dict, settings: dict) -> None:
    """SpecdecError for a name that the parameters cell lacks, or a value of another type."""
    for name, value in settings.items():
        if name not in defaults:
            raise nearest_name_error(f"parameter of {entry_name}", name, defaults)
        if value is None or defaults[name] is None:
            continue
        kind = type(defaults[name])
        lowest = int(name in COUNTS.split())
        if kind in (int, float) and isinstance(value, int | float) and value < lowest:
            raise SpecdecError(f"parameter {name} of {entry_name} is below {lowest}: {value:g}.")
        fits = isinstance(value, (int, float) if kind is float else kind)
        # True would pass as an integer
        if not fits or isinstance(value, bool) != (kind is bool):
            expected = f"of type {kind.__name__}, got {value!r}"
            raise SpecdecError(f"parameter {name} of {entry_name} is {expected}.")


def run(
    book, only=(), *, everything=False, force=False, smoke=False, parameters=()
) -> pd.DataFrame:
    """Execute the stale notebooks of the book in order; a DataFrame says what happened to each.

    only: beginnings of names; without it the main ones, or all with `everything`. parameters: for
    those notebooks that have them. smoke: with the small settings of the tests. force: fresh ones
    too, and disturbed rows are measured again. Columns: name, state ('done', 'fresh', 'disturbed',
    'failed', 'skipped'), seconds, copy, note.
    """
    entries = book.choose(only, everything)
    settings = _settings(book, entries, smoke, dict(parameters))
    rows: list[dict] = []
    without: dict[str, list[str]] = {}  # what failed or was skipped -> what it would have written
    for entry in entries:
        values = settings[entry.name]
        needed = book.reads(entry, values).values()
        failed = [writer for writer, writes in without.items() if matches(needed, writes)]
        missing = book.missing(entry, values)
        state, seconds, note = book.state(entry, values), 0.0, ""
        if failed:
            state, note = "skipped", f"(its input failed: {', '.join(failed)})"
        elif missing:
            state, note = "failed", f"({missing})"
        elif force or state not in ("fresh", "disturbed"):
            state, seconds, note = _execute(book, entry, values, force)
        if state in ("failed", "skipped"):
            without[entry.name] = book.writes(entry, values)
        if state == "disturbed":
            command = f"specdec book run --only {entry.name} --force"
            note = f"(others kept CPUs busy; measure again: {command})"
        print(f"{entry.name}: {state} {note}")
        facts = {"seconds": seconds, "copy": str(book.copy(entry)), "note": note}
        rows.append({"name": entry.name, "state": state, **facts})
    return pd.DataFrame(rows)


def _execute(book: Book, entry: Entry, values: dict, force: bool) -> tuple[str, float, str]:
    """(state, seconds, note) of one execution."""
    for run in filter(None, book.disturbed(entry) if force else ()):
        shutil.rmtree(runs.runs_dir(book.scale) / run, ignore_errors=True)
    # before the run, which may write files that it also reads
    key = book.key(entry, values)
    # the old copy stays until a new one is complete
    unfinished = book.unfinished(entry)
    seconds, fault = notebooks.execute(book.source(entry), unfinished, values)
    missing = book.unwritten(entry, values)
    if missing and not fault:
        fault = f"it ran but did not write {', '.join(missing)} as book.yml promises"
    if fault:
        return "failed", seconds, f"({fault}; see {unfinished})"
    os.replace(unfinished, book.copy(entry))
    # without this record the next call runs it again
    record = {"key": key, "parameters": values, "seconds": seconds}
    runs.write_json(book.copy(entry).with_suffix(".json"), record)
    return "disturbed" if book.disturbed(entry) else "done", seconds, ""


def _settings(book: Book, entries: list[Entry], smoke: bool, parameters: dict) -> dict[str, dict]:
    """Name of each entry -> its parameters. A pair that is not available is replaced.

    A `pair` counts as `pairs` in notebooks that have only that.
    """
    settings, unknown = {}, dict.fromkeys(parameters)
    for entry in entries:
        defaults = book.defaults(entry)
        changes = {}
        if smoke:
            changes |= entry.smoke
        for parameter, value in parameters.items():
            name = parameter
            if name == "pair" and name not in defaults and "pairs" not in parameters:
                name, value = "pairs", [value]
            if name in defaults:
                changes[name] = value
                unknown.pop(parameter, None)
        settings[entry.name] = book.parameters(entry, changes)
        if "pair" in defaults:
            settings[entry.name]["pair"] = pair_at_hand(settings[entry.name]["pair"])
    for name in unknown:
        first = entries[0]
        raise nearest_name_error(f"parameter of {first.name}", name, book.defaults(first))
    return settings


def pair_at_hand(name: str) -> str:
    """The pair of this name, or STAND_IN where its target on PyPI is not available."""
    from specdec.models.load import target_place
    from specdec.models.pairs import PRESETS

    if name not in PRESETS:
        return name
    try:
        # presets of the hub are taken on trust
        target_place(name)
    except SpecdecError as error:
        print(f"{str(error).rstrip('.')}: the pair {STAND_IN!r} replaces {name!r}.")
        return STAND_IN
    return name


def write_page(book: Book) -> None:
    """Write notebook 70 as one HTML page of all results; print the counts of verdicts, its path."""
    from workbook import claims, items

    copy = book.copy(book.find(RESULTS))
    if not copy.is_file():
        print(f"There is no page of results: run {RESULTS} for it.")
        return
    verdicts = claims.ledger(book.scale)["verdict"].value_counts()
    states = items.status(book.scale)["state"].value_counts()
    for title, counts in (("claims", verdicts), ("items", states)):
        print(f"{title}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    path = runs.runs_dir(book.scale) / "report.html"
    runs.write_text(path, notebooks.as_html(notebooks.read_notebook(copy)))
    print(f"All results on one page: {path}")


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
    # 1. the way on
    title, promise = notebooks.title_and_promise(notebook)
    position = stems.index(entry.stem)
    links = [f"[executed page]({page})"] if page else []
    if position > 0:
        links.append(f"[← previous]({stems[position - 1]}.ipynb)")
    if CONTENTS in stems:
        links.append(f"[contents]({CONTENTS}.ipynb)")
    if position + 1 < len(stems):
        links.append(f"[next →]({stems[position + 1]}.ipynb)")
    # 2. cost and files
    costs = ", ".join(f"{cost} ({scale})" for scale, cost in entry.cost.items()) or "seconds"
    reads, writes = "`, `".join((*entry.reads.values(), *entry.may_read)), "`, `".join(entry.writes)
    texts = [f"`{paths}`" if paths else "nothing" for paths in (reads, writes)]
    files = f"**Reads** {texts[0]} · **Writes** {texts[1]}"
    parts = [
        f"# {title}",
        f"> {promise}",
        " · ".join(links),
        f"**Cost** {costs} · **Paper items** {entry.items}",
        f"<details><summary>Files</summary>\n\n{files}\n\n</details>",
    ]
    return "\n\n".join(parts)


def tidy_all(folder: Path | None = None, check: bool = False) -> list[str]:
    """Take outputs off every notebook and write its first cell anew; returns those that changed.

    check: changes nothing.
    """
    book = Book(folder=folder)
    entries = book.sources()
    changed = []
    for stem, entry in entries.items():
        path = book.source(entry)
        notebook = notebooks.read_notebook(path)
        page = f"{PAGES}/{stem}.md"
        if not (book.folder / page).is_file():
            page = ""
        text = notebooks.tidy(notebook, header(notebook, entry, list(entries), page))
        if text != path.read_text(encoding="utf-8"):
            changed.append(stem)
            if not check:
                runs.write_text(path, text)
    return changed


def open_lab() -> int:
    """Open the table of contents in JupyterLab; returns its exit status.

    `python -m specdec.book tidy`, or the pre-commit hook, takes the outputs off again.
    """
    first = notebooks_folder() / f"{CONTENTS}.ipynb"
    return subprocess.call([sys.executable, "-m", "jupyterlab", str(first)])


def write_student_edition(to: Path, folder: Path | None = None) -> list[Path]:
    """Write every notebook of a book that holds solutions, without them; returns the files."""
    book = Book(folder=folder)
    # 1. the notebooks that hold solutions, between which links lead
    taught = {}
    for stem, entry in book.sources().items():
        notebook = notebooks.read_notebook(book.source(entry))
        if "solution" in itertools.chain(*map(notebooks.tags_of, notebook["cells"])):
            taught[stem] = notebook
    # 2. their editions
    paths = []
    for stem, notebook in taught.items():
        notebook["cells"][0]["source"] = header(notebook, book.find(stem), list(taught))
        handed_out = notebooks.student_edition(notebook, [f"{name}.ipynb" for name in taught])
        paths.append(runs.write_json(to / f"{stem}.ipynb", handed_out))
    return paths


def open(name: str, values: dict, *, run: runs.Run | None = None, tie_to_code: bool = True):
    """The run of the notebook `name` under its parameters, taken from `values` (its `globals()`).

    Equal parameters and files find the same directory. run: one that exists already.
    """
    from workbook.notebook_run import NotebookRun

    book = Book(values["scale"])
    entry = book.find(name)
    defaults = book.defaults(entry)
    parameters = {parameter: values[parameter] for parameter in defaults}
    check_parameters(name, defaults, parameters)
    missing = book.missing(entry, parameters)
    if missing:
        raise SpecdecError(f"{name} {missing}.")
    files, hashes = {}, {}
    for key, path in book.reads(entry, parameters).items():
        files[key] = find_files(path)[-1]
        # the content of a file, not its place, decides which run it is
        hashes[key] = machine.file_hash(files[key])
    figures = name.partition("_")[2]
    if run is None:
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
