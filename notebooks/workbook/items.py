"""The papers' tables and figures: the list of all of them, saving one with its provenance, and
listing those that exist.

notebooks/items.yml names every item once. A notebook draws one with `save` (inside a notebook:
`run.show_item`), which leaves it in runs/<scale>/figures/<paper>/<item>.*; `publish` copies them
into the committed folder figures/. Knows nothing about what an item shows.

    run.show_item("resps/table1", PaperTable.of(ours, items.read_published("resps", "table1"),
    how=item.how))
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from pathlib import Path

import pandas as pd

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.report import figures, provenance, tables
from specdec.report.tables import need

from workbook.paper_table import PaperTable

FILES = {"figure": ("svg", "pdf", "png"), "table": ("md", "csv", "tex")}
FILES |= {"diagram": FILES["figure"], "settings": FILES["table"]}
UNMEASURED = ("diagram", "settings")  # kinds that state and measure nothing
ILLUSTRATION = "illustration"  # the line below a diagram, where other items have measurements


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of items.yml.

    kind: figure or table; diagram or settings where there is nothing to measure. notebook: the one
    that draws it. reads: the notebooks whose rows it is drawn from. not_here: what stays unmeasured
    here. pairs: the papers' targets, with which `how` would measure it; gpu_gib and hours: what
    that takes, an estimate. command: in place of the usual one.
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
        """How what is not measured here would be: the command, the GPU memory, the hours.

        '' where nothing is left.
        """
        if not self.pairs and not self.command:
            return ""
        command = self.command
        if not command:
            numbers = [name.partition("_")[0] for name in (*self.reads, self.notebook)]
            only = " ".join(dict.fromkeys(numbers))
            pair, *others = self.pairs
            command = f"make book SCALE=paper ARGS='--only {only} -p pair {pair}'"
            if others:
                command += f", and again for {', '.join(others)}"
        return f"{command} (about {self.hours:g} h, {self.gpu_gib} GiB of GPU memory)"


def read_items() -> dict[str, Item]:
    """{id: Item} of notebooks/items.yml, in its order; SpecdecError for anything misspelt or listed
    twice.
    """
    return _items_in(runs.workbook() / "notebooks" / "items.yml")


@functools.cache
def _items_in(path: Path) -> dict[str, Item]:
    items = read_listed(path, Item)
    for item in items.values():
        if item.kind not in FILES:
            raise nearest_name_error(f"kind of {item.id}", item.kind, FILES)
    return items


def read_listed(path: Path, kind: type) -> dict:
    """{id: kind} of a YAML list whose lines are the fields of a dataclass, lists as tuples.

    SpecdecError for an unknown field, or an id that is listed twice.
    """
    fields = [field.name for field in dataclasses.fields(kind)]
    listed = {}
    for line in runs.read_yaml(path):
        for name, setting in line.items():
            if name not in fields:
                raise nearest_name_error(f"key in {path.name}", name, fields)
            if isinstance(setting, list):
                line[name] = tuple(setting)
        entry = kind(**line)
        if entry.id in listed:
            raise SpecdecError(f"{path} lists {entry.id} twice.")
        listed[entry.id] = entry
    return listed


def find_item(item_id: str) -> Item:
    """The item of this id, such as "ltd/figure5"; SpecdecError that names the nearest.

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
    """Write an item's files and the json file beside them into runs/<scale>/figures/<paper>/.

    Returns their paths. content: a figure (svg, pdf, png; `data`, a DataFrame, as csv), or a
    DataFrame or PaperTable (md, csv, tex), as the item's kind asks. sources: the Runs whose rows
    are shown. missing: sentences about what of the item is not there, default what the table
    says, or attrs["missing"] of `data`; empty says that it is complete. Equal rows give equal
    bytes. SpecdecError for an unknown item, the wrong kind of content, or sources that are no
    Runs.
    """
    # 1. what was handed over
    item = find_item(item_id)
    is_table = isinstance(content, pd.DataFrame | PaperTable)
    if is_table != ("md" in FILES[item.kind]):
        kind = type(content).__name__
        raise SpecdecError(f"{item.id} is a {item.kind}; it cannot be saved as a {kind}.")
    for source in sources:
        if not isinstance(source, runs.Run):
            raise SpecdecError(f"what {item.id} shows must come from Runs, not from {source!r}.")
    # 2. what the json file says of it
    facts = _facts(content if is_table else data)
    if missing is None:
        missing = facts["missing"]
    about = {
        "item": item.id,
        "title": item.title,
        "notebook": item.notebook,
        "missing": list(map(str, missing)),
        "rows": facts["rows"] or {"measured": facts["count"] if sources else 0},
        "doubts": facts["doubts"],
    }
    if item.kind == "diagram":
        about["label"] = ILLUSTRATION
    # 3. the files
    stem = runs.figure_path(item.paper, item.name, scale)
    if isinstance(content, PaperTable):
        # the number of prompts is a part of a row's name
        origin = provenance.of(sources)
        texts = (content.markdown(), content.to_csv(), content.latex)
        return tables.write(stem, *texts, origin=origin, about=about)
    if is_table:
        return tables.save(content, stem, sources=sources, digits=digits, about=about)
    return figures.save(content, stem, sources=sources, data=data, about=about)


def _facts(content: pd.DataFrame | PaperTable | None) -> dict:
    """What an item's json file says of its rows: rows, missing and doubts, and their count."""
    facts = {"rows": None, "missing": [], "doubts": [], "count": 0}
    if isinstance(content, PaperTable):
        facts |= {"rows": content.counts, "missing": list(content.lacking)}
        facts["doubts"] = list(content.doubts)
    elif content is not None:
        facts |= {"rows": content.attrs.get("rows"), "count": len(content)}
        facts["missing"] = content.attrs.get("missing", [])
    return facts


def measured(
    name: str, scale: str = "laptop", shipped: bool = False, **parameters
) -> list[runs.Run]:
    """Finished runs called `name`, the newest first.

    Those of this home, then those that came with the checkout. shipped: only the latter.
    parameters: what the run was measured with, such as pair="smollm2", dtype="float32" or
    temperature=0.0, as its provenance or its settings say; None leaves a fact open. Unless
    `drafter` is among them, it is the pair's own. Only the newest of equal runs (same parameters)
    is given. An empty list says that nothing was measured.
    """
    chosen = {}
    parameters = {"drafter": "", **parameters}
    for run in runs.find(name, scale, shipped):
        (row,) = provenance.of([run]).rows
        config = run.record()["config"]
        config = config.get("parameters", config)
        facts = {key: fact for key, fact in row.items() if fact is not None}
        facts = {"drafter": "", **config, **facts}
        fits = True
        for key, asked in parameters.items():
            fits = fits and (asked is None or facts.get(key) == asked)
        if fits:
            chosen.setdefault(runs.canonical([config, row["pair"]]), run)
    return list(chosen.values())


SAME, PARTLY, STATED, NOT_MEASURED = (
    "same layout, our pairs",
    "partly",
    "diagram or settings",
    "not measured",
)


def figures_dir() -> Path:
    """The committed folder of published items, figures/, under the home of results."""
    return runs.home() / "figures"


@dataclasses.dataclass(frozen=True)
class Drawn:
    """An item as it lies on the disk: its files, and what the json file beside them says."""

    item: Item
    stem: Path
    facts: dict

    def files(self) -> list[Path]:
        """Every file of it; the ones its kind asks for and, of a figure, the csv of what is
        drawn.
        """
        kinds = dict.fromkeys((*FILES[self.item.kind], "csv", "json"))
        return [
            path
            for kind in kinds
            if (path := self.stem.with_name(f"{self.stem.name}.{kind}")).is_file()
        ]

    @property
    def incomplete(self) -> list[str]:
        """Names of files that its kind asks for and that are not there."""
        names = [f"{self.stem.name}.{kind}" for kind in FILES[self.item.kind]]
        return [name for name in names if not self.stem.with_name(name).is_file()]

    @property
    def state(self) -> str:
        """SAME, PARTLY (facts["missing"] says what is not there), NOT_MEASURED, or STATED, which
        measures nothing.
        """
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
        suffix = " (not measured here)"
        return f"without {'; '.join(text.removesuffix(suffix) for text in self.facts['missing'])}"

    @functools.cached_property
    def sources(self) -> list[runs.Run]:
        """Those that it comes from, as far as they are there."""
        sources = []
        for row in self.facts.get("measured", ()):
            run = run_of(row.get("key") or "", row.get("run") or "")
            if run is not None:
                sources.append(run)
        return sources

    @property
    def fault(self) -> str:
        """Why it cannot be published; '' where it can.

        All files and runs must be there, and the runs' label on what they gave.
        """
        if self.incomplete:
            return f"{', '.join(self.incomplete)} is not there"
        if self.facts.get("item") != self.item.id or "measured" not in self.facts:
            return "it does not say where it comes from"
        rows = self.facts["rows"]["measured"]
        if self.item.kind not in UNMEASURED and rows and not self.facts["measured"]:
            return "it shows measured rows and names no run"
        if len(self.sources) < len(self.facts["measured"]):
            return "a run that it comes from is not there any more"
        label = provenance.of(self.sources).label
        if self.item.kind == "diagram":
            label = ILLUSTRATION
        file = self.stem.with_name(f"{self.stem.name}.{FILES[self.item.kind][0]}")
        if label != self.facts["label"] or label not in file.read_text(encoding="utf-8"):
            return f"it does not bear the label of its runs, {label!r}"
        return ""


def run_of(key: str, name: str) -> runs.Run | None:
    """The run of this key, here or among those that came with the checkout; else None."""
    places = [*sorted((runs.home() / "runs").glob("*")), runs.shipped_dir()]
    for place in places:
        folder = place / f"{name}-{key[:12]}"
        if (folder / "run.json").is_file():
            record = runs.read_json(folder / "run.json")
            if record["key"] == key:
                return runs.Run(folder, name, record["scale"], key)
    return None


def drawn(scale: str = "laptop", published: bool = False) -> dict[str, Drawn]:
    """{id: Drawn} of every item in the runs of this scale, or in figures/."""
    there = {}
    for item in read_items().values():
        stem = runs.figure_path(item.paper, item.name, scale)
        if published:
            stem = figures_dir() / item.paper / item.name
        label = stem.with_name(f"{stem.name}.json")
        if label.is_file():
            there[item.id] = Drawn(item, stem, runs.read_json(label))
        elif any(stem.parent.glob(f"{stem.name}.*")):
            there[item.id] = Drawn(item, stem, {"rows": {"measured": 0}, "missing": []})
    return there


def status(scale: str = "laptop") -> pd.DataFrame:
    """One row per item, all 47: item, title, state, missing, scale, notebook.

    Of the runs; else what figures/ holds.
    """
    there = {**drawn(published=True), **drawn(scale)}
    rows = []
    for item in read_items().values():
        row = {"item": item.id, "title": item.title, "state": NOT_MEASURED}
        row |= {"missing": item.not_here, "scale": "", "notebook": item.notebook}
        if item.id in there:
            own = there[item.id]
            row |= {"state": own.state, "scale": own.facts.get("label", "")}
            if own.state != NOT_MEASURED:
                row["missing"] = own.lacking
        rows.append(row)
    return pd.DataFrame(rows)


MOST_RUN_MB = 4.0  # a larger table of a run stays where it is
# With a smaller part of the published rows, an item does not replace the published one: half of
# them are fewer prompts, seeds or repeats, which a quick run of the book has.
LEAST_PART = 0.5
RUN_FILES = ("run.json", "recording.json", "costs.json", "*.parquet")


def publish(scale: str = "laptop", also=(), replace: bool = False) -> pd.DataFrame:
    """Take the items of the runs of `scale` into figures/, and their rows into figures/measured.

    So they can be drawn again anywhere. Columns: item, state ('published', 'kept', 'refused'),
    note. also: more Runs whose rows go with them, such as those that decide the claims. Refused:
    what does not say, or does not show, where it comes from. Kept: a published item of a larger
    scale, or one that rests on more than twice as many rows; replace: the latter is not kept.
    """
    # 1. which items are taken
    old = drawn(published=True)
    items = dict(old)
    rows = []
    for item_id, fresh in drawn(scale).items():
        state = "published"
        note = fresh.fault
        if note:
            state = "refused"
        elif item_id in old:
            note = _better(old[item_id], fresh, replace)
            state = "kept" if note else "published"
        if state == "published":
            items[item_id] = fresh
        rows.append({"item": item_id, "state": state, "note": note})
    # 2. their files, one step per paper
    by_paper: dict[str, dict] = {}
    for own in items.values():
        files = by_paper.setdefault(own.item.paper, {})
        files |= {path.name: path for path in own.files()}
    for paper, files in by_paper.items():
        if files:
            runs.replace_folder(figures_dir() / paper, files)
    # 3. the rows that they come from
    used = {run.key: run for own in items.values() for run in own.sources}
    used |= {run.key: run for run in also}
    sources = {}
    for run in used.values():
        for pattern in RUN_FILES:
            for path in sorted(run.directory.glob(pattern)):
                if path.stat().st_size <= MOST_RUN_MB * 1e6:
                    sources[f"{run.directory.name}/{path.name}"] = path
    if sources:
        runs.replace_folder(figures_dir() / "measured", sources)
    runs.write_text(figures_dir() / "README.md", contents())
    return pd.DataFrame(rows, columns=["item", "state", "note"])


def _better(old: Drawn, new: Drawn, replace: bool) -> str:
    """Why the published item stays; '' where it does not."""
    larger = _rank(old) - _rank(new)
    if larger > 0:
        return "one of a larger scale"
    fewer = "" if larger < 0 or replace else fewer_rows(new.sources, old.sources)
    return f"one with more rows: {fewer} (--replace takes this one all the same)" if fewer else ""


def fewer_rows(new: list[runs.Run], old: list[runs.Run]) -> str:
    """Of which table the new runs hold less than LEAST_PART of the old ones' rows; '' of none."""
    here = _rows_of_tables(new)
    for name, count in _rows_of_tables(old).items():
        if here[name] < LEAST_PART * count:
            return f"{count} in {name}, here {here[name]}"
    return ""


def _rows_of_tables(sources: list[runs.Run]) -> collections.Counter:
    import pyarrow.parquet as pq

    counts = collections.Counter()
    for run in sources:
        for path in sorted(run.directory.glob("*.parquet")):
            counts[f"{run.name}/{path.stem}"] += pq.read_metadata(path).num_rows
    return counts


def _rank(drawn_item: Drawn) -> int:
    """Place of the largest scale of its rows: rows of a toy pair make an item no smaller."""
    levels = ("none", *provenance.LEVELS)
    rows = drawn_item.facts.get("measured", ())
    scales = [provenance.scale_of(row) for row in rows]
    if not scales:
        scales = [drawn_item.facts.get("scale", "none")]
    return max(levels.index(scale) for scale in scales)


PAPERS = {"resps": "Re-SpS", "ltd": "LTD (Learning to Draft)", "radar": "RADAR", "ppow": "PPOW"}
SPEAKERS = {**PAPERS, "ours": "This workbook"}  # whose claims the ledger holds
ABOUT = (
    "Written by `make figures`. Each item has our rows in the layout of the paper, and a json file "
    "that says where they come from. [claims.md](claims.md) holds the claims that are decided by "
    "them."
)


def contents(ledger: pd.DataFrame | None = None) -> str:
    """figures/README.md: paper by paper every item with a thumbnail, its state and its files.

    ledger: the claims, as `claims.ledger` gives them, for the verdicts of its claims.
    """
    there = drawn(published=True)
    parts = ["# The papers' tables and figures", ABOUT]
    for paper, name in PAPERS.items():
        lines = [f"## {name}", "", "| picture | what it shows | claims about it | files |"]
        lines.append("|---|---|---|---|")
        for item in read_items().values():
            if item.paper == paper:
                lines.append(_line(item, there.get(item.id), ledger))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(item: Item, own: Drawn | None, ledger: pd.DataFrame | None) -> str:
    """An item's line of `contents`."""
    files = []
    state = NOT_MEASURED
    about = ""
    if own is not None:
        files = own.files()
        state = ": ".join(filter(None, (own.state, own.lacking)))
        about = f"<br><sub>{own.facts.get('label', '')}</sub>"
    picture = ""
    for path in files:
        if path.suffix == ".svg":
            picture = f'<img src="{item.paper}/{path.name}" width="160" alt="{item.title}">'
            break
    links = " ".join(f"[{path.suffix[1:]}]({item.paper}/{path.name})" for path in files)
    anchor = f'<a id="{item.anchor}"></a>'
    text = f"{anchor}**{item.label}** {item.title}<br>{state}{about}"
    return f"| {picture} | {text} | {_verdicts(item, ledger)} | {links} |"


def _verdicts(item: Item, ledger: pd.DataFrame | None) -> str:
    """'holds: 1, 2<br>does not hold: 1', each number a link to its claim."""
    if ledger is None:
        return ""
    lines = []
    for verdict, rows in ledger[ledger["item"] == item.id].groupby("verdict"):
        links = [f"[{place}](claims.md#{claim})" for place, claim in enumerate(rows["id"], 1)]
        lines.append(f"{verdict}: {', '.join(links)}")
    return "<br>".join(lines)


def published_file(paper: str, item: str) -> Path:
    """Where the paper's own numbers of an item lie, if it prints any."""
    return (
        runs.workbook()
        / "figures"
        / "published"
        / f"{runs.plain_name(paper)}_{runs.plain_name(item)}.csv"
    )


def read_published(paper: str, item: str) -> pd.DataFrame:
    """The paper's own numbers of one item, figures/published/<paper>_<item>.csv of the checkout, in
    long rows.

    Column `source` says where in the paper a number stands, `doubt` what speaks against it (empty
    where nothing does). The others are the item's own: those of our rows (method, suite, ...),
    `target` for the paper's model, and the values. Lines that begin with # are comments.
    SpecdecError for an item without such a file.
    """
    path = published_file(paper, item)
    if not path.is_file():
        raise nearest_name_error(
            "published table", path.stem, [table.stem for table in path.parent.glob("*.csv")]
        )
    table = pd.read_csv(path, comment="#", keep_default_na=True)
    need(table, "source", "doubt")
    return table.assign(doubt=table["doubt"].fillna(""))
