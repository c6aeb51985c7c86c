"""The papers' tables and figures: the list of all of them, and saving one with its provenance.

`save` leaves an item in runs/<scale>/figures/<paper>/, `publish` copies it into figures/.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from specdec import runs, stored
from specdec.errors import SpecdecError, nearest_name_error
from specdec.report import figures, provenance, tables
from specdec.report.tables import need

from workbook.paper_table import PaperTable

FILES = {"figure": ("svg", "pdf", "png"), "table": ("md", "csv", "tex")}
FILES |= {"diagram": FILES["figure"], "settings": FILES["table"]}
UNMEASURED = ("diagram", "settings")  # kinds that state and measure nothing
SAME, PARTLY = "same layout, our pairs", "partly"
STATED, NOT_MEASURED = "diagram or settings", "not measured"
PAPERS = {"resps": "Re-SpS", "ltd": "LTD (Learning to Draft)", "radar": "RADAR", "ppow": "PPOW"}
SPEAKERS = {**PAPERS, "ours": "This workbook"}  # whose claims the ledger holds
MOST_RUN_MB = 4.0  # a larger table of a run stays where it is
# With a smaller part of the published rows, an item does not replace the published one: half of
# them are fewer prompts, seeds or repeats, which a quick run of the book has.
LEAST_PART = 0.5
RUN_FILES = ("run.json", "recording.json", "costs.json", "*.parquet")
ABOUT = (
    "Written by `make figures`. Each item has our rows in the layout of the paper, and a json file "
    "that says where they come from. [claims.md](claims.md) holds the claims that are decided by "
    "them."
)


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of items.yml. kind: figure, table, or diagram and settings, which measure nothing.

    notebook: draws it. reads: those whose rows it shows. not_here: what stays unmeasured. pairs,
    gpu_gib, hours, command: how it would be measured.
    """

    id: str
    kind: str
    title: str
    notebook: str
    reads: tuple[str, ...] = ()
    not_here: str = ""
    pairs: tuple[str, ...] = ()
    gpu_gib: int = 0
    hours: float = 0.0
    command: str = ""

    @property
    def paper(self) -> str:
        return self.id.partition("/")[0]

    @property
    def name(self) -> str:
        return self.id.partition("/")[2]

    @property
    def label(self) -> str:
        """Its name in the paper: 'Table 10' of "ltd/table10"."""
        return re.sub(r"\D+", lambda word: f"{word[0].capitalize()} ", self.name)

    @property
    def anchor(self) -> str:
        """Its place on the pages that list all items."""
        return self.id.replace("/", "-")

    @property
    def how(self) -> str:
        """How what is not measured here would be; '' if nothing is left."""
        command = self.command
        if self.pairs and not command:
            numbers = [name.partition("_")[0] for name in (*self.reads, self.notebook)]
            pair, *more_pairs = self.pairs
            command = f"--only {' '.join(dict.fromkeys(numbers))} -p pair {pair}"
            command = f"make book SCALE=paper ARGS='{command}'"
            if more_pairs:
                command += f", and again for {', '.join(more_pairs)}"
        cost = f" (about {self.hours:g} h, {self.gpu_gib} GiB of GPU memory)"
        return command and command + cost


@functools.cache
def read_items() -> dict[str, Item]:
    """{id: Item} of notebooks/items.yml, in its order."""
    return read_listed(runs.workbook() / "notebooks" / "items.yml", Item)


def read_listed(path: Path, kind: type) -> dict:
    """{id: kind} of a YAML list whose lines are the fields of a dataclass.

    SpecdecError for an unknown field, or an id that is listed twice.
    """
    listed = {}
    for number, line in enumerate(runs.read_yaml(path), 1):
        entry = stored.checked(kind, line, f"{path}, entry {number}", "correct it")
        if entry.id in listed:
            raise SpecdecError(f"{path} lists {entry.id} twice.")
        listed[entry.id] = entry
    return listed


def find_item(item_id: str) -> Item:
    """The item of this id; SpecdecError that names the nearest.

    >>> find_item("ltd/figure5").kind
    'figure'
    """
    items = read_items()
    if item_id not in items:
        raise nearest_name_error("item", item_id, items)
    return items[item_id]


def save(
    item_id: str, content, *, scale="laptop", sources=(), missing=None, data=None, digits=2
) -> list[Path]:
    """Write an item's files and the json file beside them; returns their paths.

    content: a figure with its `data`, a DataFrame or a PaperTable. sources: the Runs whose rows are
    shown. missing: what of the item is not there. Equal rows give equal bytes.
    """
    item = find_item(item_id)
    is_table = isinstance(content, pd.DataFrame | PaperTable)
    assert is_table == ("md" in FILES[item.kind]), "tables as tables, figures as figures"
    # 1. what the json file says of it; a table of pandas carries what is missing in its attrs
    table = content if is_table else data
    rows, doubts, lacking = {"measured": 0}, [], []
    if isinstance(table, PaperTable):
        rows, doubts, lacking = table.counts, list(table.doubts), list(table.lacking)
    elif table is not None:
        rows = table.attrs.get("rows") or {"measured": len(table) if sources else 0}
        lacking = table.attrs.get("missing", [])
    about = {"item": item.id, "title": item.title, "notebook": item.notebook}
    if missing is not None:
        lacking = missing
    about["missing"] = list(map(str, lacking))
    about |= {"rows": rows, "doubts": doubts}
    if item.kind == "diagram":
        about["label"] = "illustration"
    # 2. the files
    stem = runs.figure_path(item.paper, item.name, scale)
    if isinstance(content, PaperTable):
        # the number of prompts is a part of a row's name
        origin = provenance.of(sources)
        texts = (content.markdown(), content.to_csv(), content.latex)
        return tables.write(stem, *texts, origin=origin, about=about)
    if is_table:
        return tables.save(content, stem, sources=sources, digits=digits, about=about)
    return figures.save(content, stem, sources=sources, data=data, about=about)


def settings_of(run: runs.Run) -> dict:
    """What a run was asked for: the parameters of its notebook."""
    config = run.record()["config"]
    return config.get("parameters", config)


def measured(name: str, scale="laptop", shipped: bool = False, **parameters) -> list[runs.Run]:
    """Finished runs called `name`, the newest first and only the newest of equal ones.

    parameters: of provenance or settings, such as pair="smollm2"; None leaves one open. drafter:
    default the pair's own. shipped: only those in the checkout.
    """
    required = _stated({"drafter": "", **parameters})
    chosen = {}
    for run in runs.find(name, scale, shipped):
        (row,) = provenance.of([run]).rows
        settings = settings_of(run)
        # what the provenance does not say is what the settings say
        facts = {"drafter": "", **settings, **_stated(row)}
        if required.items() <= facts.items():
            # the first is the newest
            chosen.setdefault(runs.canonical([settings, row["pair"]]), run)
    return list(chosen.values())


def _stated(facts: dict) -> dict:
    """The facts that are not None."""
    return {key: fact for key, fact in facts.items() if fact is not None}


def figures_dir() -> Path:
    """The committed folder of published items, figures/, under the home of results."""
    return runs.home() / "figures"


@dataclasses.dataclass(frozen=True)
class Drawn:
    """An item as it lies on the disk: its files, and what the json file beside them says."""

    item: Item
    stem: Path
    facts: dict

    def file(self, kind: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{kind}")

    def files(self) -> list[Path]:
        """The ones its kind asks for and, of a figure, the csv of what is drawn."""
        kinds = dict.fromkeys((*FILES[self.item.kind], "csv", "json"))
        return list(filter(Path.is_file, map(self.file, kinds)))

    @property
    def incomplete(self) -> list[str]:
        """Names of files that its kind asks for and that are not there."""
        paths = map(self.file, FILES[self.item.kind])
        return [path.name for path in paths if not path.is_file()]

    @property
    def state(self) -> str:
        """SAME, PARTLY, NOT_MEASURED, or STATED, which measures nothing."""
        if self.incomplete:
            return NOT_MEASURED
        if self.item.kind in UNMEASURED:
            return STATED
        if not self.facts["rows"]["measured"]:
            return NOT_MEASURED
        return PARTLY if self.facts["missing"] else SAME

    @property
    def lacking(self) -> str:
        """What is not there, in words; '' where nothing is said to be missing."""
        if self.state != PARTLY:
            return ""
        names = [text.removesuffix(" (not measured here)") for text in self.facts["missing"]]
        return f"without {'; '.join(names)}"

    @functools.cached_property
    def sources(self) -> list[runs.Run]:
        """The finished runs that it comes from, as far as they are there."""
        finished: dict[str, runs.Run] = {}
        rows = self.facts.get("measured", ())
        for name, scale in itertools.product({row["run"] for row in rows}, runs.SCALES):
            for run in runs.find(name, scale):
                finished.setdefault(run.key, run)
        return [finished[row["key"]] for row in rows if row["key"] in finished]

    @property
    def fault(self) -> str:
        """Why it cannot be published: a file, a run or its label is not there; '' where it can."""
        rows = self.facts.get("measured", ())
        label = provenance.of(self.sources).label
        if self.incomplete:
            return f"{', '.join(self.incomplete)} is not there"
        if self.item.kind not in UNMEASURED and self.facts["rows"]["measured"] and not rows:
            return "it shows measured rows and names no run"
        if len(self.sources) < len(rows):
            return "a run that it comes from is not there any more"
        if self.item.kind != "diagram" and label != self.facts["label"]:
            return f"it does not bear the label of its runs, {label!r}"
        return ""


def drawn(scale: str = "laptop", published: bool = False) -> dict[str, Drawn]:
    """{id: Drawn} of every item in the runs of this scale, or in figures/."""
    entries = {}
    for item in read_items().values():
        stem = runs.figure_path(item.paper, item.name, scale)
        if published:
            stem = figures_dir() / item.paper / item.name
        label = stem.with_name(f"{stem.name}.json")
        if label.is_file():
            entries[item.id] = Drawn(item, stem, runs.read_json(label))
    return entries


def status(scale: str = "laptop") -> pd.DataFrame:
    """One row per item, all 47: item, title, state, missing, scale, notebook.

    Of the runs; else what figures/ holds.
    """
    entries = {**drawn(published=True), **drawn(scale)}
    rows = []
    for item in read_items().values():
        files = entries.get(item.id)
        state, missing, label = NOT_MEASURED, item.not_here, ""
        if files:
            state, label = files.state, files.facts.get("label", "")
        if state != NOT_MEASURED:
            missing = files.lacking
        rows.append((item.id, item.title, state, missing, label, item.notebook))
    columns = ["item", "title", "state", "missing", "scale", "notebook"]
    return pd.DataFrame(rows, columns=columns)


def publish(scale: str = "laptop", also=(), replace: bool = False) -> pd.DataFrame:
    """Take the items of the runs of `scale` into figures/, and their rows into figures/measured.

    Columns: item, state ('published', 'kept', 'refused'), note. also: more Runs whose rows go with
    them.
    """
    # 1. which items are taken
    items = drawn(published=True)
    rows = []
    for item_id, fresh in drawn(scale).items():
        state, note = "refused", fresh.fault
        if not note:
            note = _better(items.get(item_id), fresh, replace)
            state = "kept" if note else "published"
        if state == "published":
            items[item_id] = fresh
        rows.append({"item": item_id, "state": state, "note": note})
    # 2. their files, one step per paper
    origins = {run.key: run for run in also}
    for paper in PAPERS:
        paths = {}
        for files in items.values():
            if files.item.paper == paper:
                paths |= {path.name: path for path in files.files()}
                origins |= {run.key: run for run in files.sources}
        if paths:
            _replace_folder(figures_dir() / paper, paths)
    # 3. the rows that they come from; large tables would make the repository slow to clone
    sources = {}
    for run, pattern in itertools.product(origins.values(), RUN_FILES):
        for path in sorted(run.directory.glob(pattern)):
            if path.stat().st_size <= MOST_RUN_MB * 1e6:
                sources[f"{run.directory.name}/{path.name}"] = path
    if sources:
        _replace_folder(figures_dir() / "measured", sources)
    runs.write_text(figures_dir() / "README.md", contents())
    return pd.DataFrame(rows, columns=["item", "state", "note"])


def _replace_folder(place: Path, files: dict[str, Path]) -> None:
    """Make `place` a folder of copies {relative name: source}, in one step."""
    with runs.atomic(place, folder=True) as fresh:
        for name, source in files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, fresh / name)


def _better(old: Drawn | None, new: Drawn, replace: bool) -> str:
    """Why the published item stays; '' where it does not, or there is none."""
    if old is None:
        return ""
    # a run of a toy pair must not replace one of a real model
    larger = _rank(old) - _rank(new)
    if larger > 0:
        return "one of a larger scale"
    fewer = fewer_rows(new.sources, old.sources)
    if larger < 0 or replace or not fewer:
        return ""
    return f"one with more rows: {fewer} (--replace takes this one all the same)"


def fewer_rows(new: list[runs.Run], old: list[runs.Run]) -> str:
    """Of which table the new runs hold less than LEAST_PART of the old ones' rows; '' of none."""
    counts = {"new": collections.Counter(), "old": collections.Counter()}
    for side, sources in (("new", new), ("old", old)):
        for run in sources:
            for path in sorted(run.directory.glob("*.parquet")):
                counts[side][f"{run.name}/{path.stem}"] += pq.read_metadata(path).num_rows
    for name, count in counts["old"].items():
        if counts["new"][name] < LEAST_PART * count:
            return f"{count} in {name}, here {counts['new'][name]}"
    return ""


def _rank(item: Drawn) -> int:
    """Place of the largest scale of its rows: rows of a toy pair make an item no smaller."""
    levels = ("none", *provenance.LEVELS)
    scales = list(map(provenance.scale_of, item.facts.get("measured", ())))
    return max(map(levels.index, scales or [item.facts.get("scale", "none")]))


def contents(ledger: pd.DataFrame | None = None) -> str:
    """figures/README.md: paper by paper every item with a thumbnail, its state and its files.

    ledger: the claims, as `claims.ledger` gives them, for the verdicts of its claims.
    """
    entries = drawn(published=True)
    parts = ["# The papers' tables and figures", ABOUT]
    for paper, name in PAPERS.items():
        lines = [f"## {name}", "", "| picture | what it shows | claims about it | files |"]
        lines.append("|---|---|---|---|")
        for item in read_items().values():
            if item.paper == paper:
                lines.append(_line(item, entries.get(item.id), ledger))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(item: Item, files: Drawn | None, ledger: pd.DataFrame | None) -> str:
    """An item's line of `contents`."""
    # 1. the item, its state and its files
    text, picture, links = NOT_MEASURED, "", []
    if files is not None:
        text = ": ".join(filter(None, (files.state, files.lacking)))
        text += f"<br><sub>{files.facts.get('label', '')}</sub>"
        for path in files.files():
            links.append(f"[{path.suffix[1:]}]({item.paper}/{path.name})")
            if path.suffix == ".svg":
                place = f"{item.paper}/{path.name}"
                picture = f'<img src="{place}" width="160" alt="{item.title}">'
    text = f'<a id="{item.anchor}"></a>**{item.label}** {item.title}<br>{text}'
    # 2. the claims about it by verdict
    verdicts = []
    if ledger is not None:
        for verdict, rows in ledger[ledger["item"] == item.id].groupby("verdict"):
            claims = [f"[{place}](claims.md#{claim})" for place, claim in enumerate(rows["id"], 1)]
            verdicts.append(f"{verdict}: {', '.join(claims)}")
    return f"| {picture} | {text} | {'<br>'.join(verdicts)} | {' '.join(links)} |"


def published_file(paper: str, item: str) -> Path:
    """Where the paper's own numbers of an item lie, if it prints any."""
    name = f"{runs.plain_name(paper)}_{runs.plain_name(item)}.csv"
    return runs.workbook() / "figures" / "published" / name


def read_published(paper: str, item: str) -> pd.DataFrame:
    """The paper's own numbers of one item, in long rows; lines that begin with # are comments.

    source: where in the paper a number stands. doubt: what speaks against it. target: its model.
    """
    path = published_file(paper, item)
    if not path.is_file():
        entries = [table.stem for table in path.parent.glob("*.csv")]
        raise nearest_name_error("published table", path.stem, entries)
    table = pd.read_csv(path, comment="#", keep_default_na=True)
    need(table, "source", "doubt")
    return table.assign(doubt=table["doubt"].fillna(""))
