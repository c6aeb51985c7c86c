"""The executed book as Markdown pages with pictures, to be read without installing anything.

`write_pages` turns executed copies of one run of the book into figures/book/NN_name.md: prose as it is, code folded, tables and
formulas as GitHub renders them, pictures as small PNG. Dropped are progress bars and warnings (stderr), widgets, and the cell of
parameters that papermill injects, whose values the first lines name. A page says when, where and by which commit it was
executed, and the contents say whether its source has changed since. Knows nothing about what the notebooks compute.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from pathlib import Path

from specdec import runs
from specdec.errors import SpecdecError

from workbook import notebooks
from workbook.book import tidy_all
from workbook.pictures import small_picture

REPRS = re.compile(r"^(<.*>|\w+\(.*\)|run \S+ \(.*|None)$", re.S)  # texts of outputs that tell a reader nothing
FOLDED = "<details><summary>{0}</summary>\n\n```python\n{1}\n```\n\n</details>"
CONTENTS = "README.md"
FOUND = "found"  # the tag of the cell that says in a sentence what was found
MARKED = re.compile(r"<!-- found -->\n\n(.*?)\n\n<!-- end of found -->", re.S)
CHAPTERS = {
    "0": "Start",
    "1": "Learn how it works",
    "2": "Record, calibrate, train",
    "3": "Compare",
    "4": "Ablations",
    "5": "Costs, machines, batches, subjects",
    "6": "The papers' tables and figures",
    "7": "Claims",
    "9": "Appendix",
}
SOURCES = "../../notebooks"  # from the pages


def folder() -> Path:
    """Where the pages are: figures/book, in the checkout."""
    return runs.workbook() / "figures" / "book"


def source_hash(notebook: dict) -> str:
    """What a page was made from: the cells of a notebook or of its executed copy, outputs and header aside (12 digits)."""
    cells = [(cell["cell_type"], notebooks.source_of(cell)) for cell in notebook["cells"][1:] if not _injected(cell)]
    return hashlib.sha256(repr(cells).encode()).hexdigest()[:12]


def _tags(cell: dict) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def _injected(cell: dict) -> bool:
    return "injected-parameters" in _tags(cell)


def page_of(executed: dict, name: str, pages=()) -> tuple[str, dict[str, bytes]]:
    """(markdown, {file name: PNG}) of one executed notebook. pages: names of the notebooks that have a page."""
    parts, pictures = [_head(executed, name, pages)], {}
    for cell in executed["cells"][1:]:
        text = notebooks.source_of(cell)
        if cell["cell_type"] == "markdown":
            parts.append(_linked(text, pages))
        elif not _injected(cell) and text.strip():
            parts.append(FOLDED.format("parameters" if "parameters" in _tags(cell) else "code", text))
            shown = [_shown(output, name, pictures, pages) for output in notebooks.readable(cell.get("outputs", []))]
            shown = [part for part in shown if part]
            parts += ["<!-- found -->", *shown, "<!-- end of found -->"] if shown and FOUND in _tags(cell) else shown
    parts.append(f"---\n\n<sub>Source: [{name}.ipynb]({SOURCES}/{name}.ipynb), {source_hash(executed)}.</sub>")
    return "\n\n".join(parts) + "\n", pictures


def _head(executed: dict, name: str, pages) -> str:
    """Title and promise, the way on, and where the page comes from."""
    title, promise = notebooks.title_and_promise(executed)
    ways = re.findall(r"\[(← previous|next →)\]\((\w+\.ipynb)\)", notebooks.source_of(executed["cells"][0]))
    links = [f"[{way}]({_led(target, pages)})" for way, target in ways]
    links = [f"[notebook]({SOURCES}/{name}.ipynb)", f"[contents]({CONTENTS})", *links]
    return f"# {title}\n\n> {promise}\n\n{' · '.join(links)}\n\n<sub>{provenance(executed)}</sub>"


def _without_folder(value):
    """A path of the machine that executed the notebook by its last part, anything else unchanged."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def provenance(executed: dict) -> str:
    """When a copy was executed, by which commit, where, and with which parameters other than the notebook's own."""
    facts, papermill = (executed.get("metadata", {}).get(name) or {} for name in (notebooks.EXECUTED, "papermill"))
    commit = f"commit {facts['commit'][:12]}" if facts.get("commit") else "an unknown commit"
    parts = [f"Executed by {commit}{' with local changes' if facts.get('dirty') else ''}"]
    parts += [f"on {papermill['end_time'][:10]}"] if papermill.get("end_time") else []
    parts += [f"in {papermill['duration'] / 60:.1f} min"] if papermill.get("duration") else []
    parts += [f"on {facts['cpu']}"] if facts.get("cpu") else []
    usual = notebooks.default_parameters(executed)
    given = {key: value for key, value in (papermill.get("parameters") or {}).items() if usual.get(key) != value}
    others = [f"`{key} = {_without_folder(value)!r}`" for key, value in given.items()]
    return f"{' '.join(parts)}, with the parameters below{' but ' * bool(others)}{', '.join(others)}."


def _led(target: str, pages) -> str:
    """Where a link of a notebook leads from figures/book: to the page of a notebook that has one, else to the file."""
    file, mark, heading = target.partition("#")
    name = file.removesuffix(".ipynb")
    inside = f"{name}.md" if name in pages else file.removeprefix("../figures/book/")
    return f"{inside if inside != file else posixpath.normpath(f'{SOURCES}/{file}')}{mark}{heading}"


def _linked(text: str, pages) -> str:
    """Prose or a table whose links lead on from figures/book."""
    return re.sub(r"(?<=\]\()(?!https?:|#)([^)\s]+)(?=\))", lambda found: _led(found[1], pages), text)


def _shown(output: dict, name: str, pictures: dict[str, bytes], pages) -> str:
    """One output in Markdown; '' for what a page leaves out."""
    if output["output_type"] == "stream":
        text = "".join(output["text"]) if output["name"] == "stdout" else ""
        return f"```\n{text.rstrip()}\n```" if text.strip() else ""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items() if isinstance(text, str | list)}
    if "text/markdown" in data:
        return _linked(data["text/markdown"], pages)
    if "image/png" in data:
        file = f"{name}-{len(pictures) + 1}.png"
        pictures[file] = small_picture(base64.b64decode(data["image/png"]))
        return f"![{_alternative(output, data)}]({file})"
    text = data.get("text/plain", "")
    return "" if not text or REPRS.match(text) else f"```\n{text}\n```"


def _alternative(output: dict, data: dict[str, str]) -> str:
    """What a picture shows, in words: as its notebook says, else that it is a figure."""
    titled = re.search(r"<title>(.*?)</title>", data.get("image/svg+xml", ""))
    said = output.get("metadata", {}).get("image/png", {}).get("alt") or (titled[1] if titled else "Figure")
    return re.sub(r"[\[\]\n]", " ", said)


def write_pages(book, names=(), to: Path | None = None) -> list[Path]:
    """Write the pages of the book's executed copies, of all or of these notebooks, and the page of contents; returns the paths.

    The first lines of the notebooks link the pages of the checkout. SpecdecError where a copy is missing or holds an error.
    """
    to, entries = to or folder(), {entry.stem: entry for entry in reversed(book.entries) if not entry.notebook}
    names = names or [name for name, entry in entries.items() if book.copy(entry).is_file()]
    pages = {*names, *(path.stem for path in to.glob("[0-9]*.md"))}
    for name in names:
        if name not in entries or not book.copy(entries[name]).is_file():
            raise SpecdecError(
                f"there is no executed copy of {name}; run `python -m specdec.book run --only {name}` first."
            )
        executed = notebooks.read_notebook(book.copy(entries[name]))
        if any(output["output_type"] == "error" for cell in executed["cells"] for output in cell.get("outputs", ())):
            raise SpecdecError(f"{book.copy(entries[name])} ends in an error; a page shows whole runs only.")
        text, pictures = page_of(executed, name, pages)
        for old in to.glob(f"{name}-*.png"):
            old.unlink()
        for file, content in pictures.items():
            with runs.atomic(to / file) as path:
                path.write_bytes(content)
        runs.write_text(to / f"{name}.md", text)
    if to == folder():
        tidy_all()
    return [*sorted(to.glob("[0-9]*.md")), runs.write_text(to / CONTENTS, contents(book, to))]


def contents(book, to: Path | None = None) -> str:
    """The page of contents: by chapter every notebook with its promise, what it found, its first picture, and whether its source
    has changed since."""
    to, chapter = to or folder(), ""
    lines = ["# The executed book", "", "Every notebook with its results, to be read here without installing anything."]
    for entry in (entry for entry in book.entries if not entry.notebook):
        if CHAPTERS[entry.stem[0]] != chapter:
            chapter = CHAPTERS[entry.stem[0]]
            lines += ["", f"## {chapter}", "", "| | notebook | what was found |", "|---|---|---|"]
        source, page = notebooks.read_notebook(book.source(entry)), to / f"{entry.stem}.md"
        title, promise = notebooks.title_and_promise(source)
        if not page.is_file():
            link = f"[**{title}**]({SOURCES}/{entry.stem}.ipynb)"
            lines.append(f"| | {link}<br>{promise} | not executed yet |")
            continue
        older = "" if is_present(page, source) else "<br>*The notebook has changed since this page was executed.*"
        picture = next(iter(sorted(to.glob(f"{entry.stem}-*.png"), key=_number)), None)
        thumbnail = f'[<img src="{picture.name}" width="200" alt="{title}">]({page.name})' if picture else ""
        lines.append(f"| {thumbnail} | [**{title}**]({page.name})<br>{promise} | {_found(page)}{older} |")
    return "\n".join(lines) + "\n"


def _found(page: Path) -> str:
    """What a page says was found, as one cell of a table."""
    found = MARKED.search(page.read_text(encoding="utf-8"))
    lines = [line.removeprefix("- ").replace("|", "\\|") for line in (found[1] if found else "").splitlines() if line]
    return "<br>".join(lines)


def is_present(page: Path, source: dict) -> bool:
    """Whether a page was made from its source as it is now."""
    return source_hash(source) in page.read_text(encoding="utf-8").rpartition("Source:")[2]


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
