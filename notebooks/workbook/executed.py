"""The executed book as Markdown pages with pictures, to be read without installing anything.

A page says when and by which commit it was executed; the contents say which pages are older than
their notebooks.
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

# texts of outputs that tell a reader nothing
REPRS = re.compile(r"^(<.*>|\w+\(.*\)|run \S+ \(.*|None)$", re.S)
FOUND = re.compile(r"<!-- found -->\n\n(.*?)\n\n<!-- end of found -->", re.S)
SOURCES = "../../notebooks"  # from the pages
CONTENTS = "README.md"
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
OLDER = "*Made from an earlier version of the notebook.*"
INTRO = (
    "Every notebook with its results, to be read here without installing anything. A page "
    "shows its notebook as it was when the commit that the page names executed it."
)


def folder() -> Path:
    """Where the pages are: figures/book, in the checkout."""
    return runs.workbook() / "figures" / "book"


def source_hash(notebook: dict) -> str:
    """12 digits of the cells of a notebook or of its executed copy, outputs and header aside."""
    cells = []
    for cell in notebook["cells"][1:]:
        if "injected-parameters" not in notebooks.tags_of(cell):
            cells.append((cell["cell_type"], notebooks.source_of(cell)))
    return hashlib.sha256(repr(cells).encode()).hexdigest()[:12]


def page_of(executed: dict, name: str, pages=()) -> tuple[str, dict[str, bytes]]:
    """(markdown, {file name: PNG}) of one executed notebook.

    pages: names of the notebooks that have a page, to which links lead.
    """
    title, promise = notebooks.title_and_promise(executed)
    links = f"[notebook]({SOURCES}/{name}.ipynb) · [contents]({CONTENTS})"
    parts = [f"# {title}", f"> {promise}", links, f"<sub>{provenance(executed)}</sub>"]
    pictures: dict[str, bytes] = {}
    for cell in executed["cells"][1:]:
        source, tags = notebooks.source_of(cell), notebooks.tags_of(cell)
        # papermill repeats what the provenance above already says
        if "injected-parameters" in tags or not source:
            continue
        if cell["cell_type"] == "markdown":
            parts.append(_relinked(source, pages))
            continue
        summary = "parameters" if "parameters" in tags else "code"
        code = f"```python\n{source}\n```"
        parts.append(f"<details><summary>{summary}</summary>\n\n{code}\n\n</details>")
        texts = []
        for output in cell.get("outputs", []):
            texts += _texts_of(output, name, pictures, pages)
        if "found" in tags and texts:
            texts = ["<!-- found -->", *texts, "<!-- end of found -->"]
        parts += texts
    footer = f"Source: [{name}.ipynb]({SOURCES}/{name}.ipynb), {source_hash(executed)}."
    parts.append(f"---\n\n<sub>{footer}</sub>")
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)) + "\n", pictures


def _texts_of(output: dict, name: str, pictures: dict[str, bytes], pages) -> list[str]:
    """An output in Markdown, [] for what tells nothing; a picture is added to `pictures`."""
    data = output.get("data", {})
    if "text/markdown" in data:
        return [_relinked("".join(data["text/markdown"]), pages)]
    if "image/png" in data:
        file = f"{name}-{len(pictures) + 1}.png"
        pictures[file] = small_picture(base64.b64decode("".join(data["image/png"])))
        alternative = output["metadata"].get("image/png", {}).get("alt", "Figure")
        return [f"![{re.sub(r'[][]', ' ', alternative)}]({file})"]
    text = "".join(data.get("text/plain", "")).strip()
    if output.get("name") == "stdout":
        text = "".join(output["text"]).rstrip()
    if not text or REPRS.match(text) or "widget" in " ".join(data):
        return []
    return [f"```\n{text}\n```"]


def provenance(executed: dict) -> str:
    """When a copy was executed, by which commit, where, and with which changed parameters."""
    facts = executed["metadata"].get(notebooks.EXECUTED, {})
    papermill = executed["metadata"].get("papermill", {})
    text = f"Executed by commit {facts.get('commit', 'unknown')[:12]}"
    if facts.get("dirty"):
        text += " with local changes"
    if papermill.get("end_time"):
        text += f" on {papermill['end_time'][:10]} in {papermill['duration'] / 60:.1f} min"
    text += f" on {facts.get('cpu', 'an unknown machine')}, with the parameters below"
    defaults = notebooks.default_parameters(executed)
    changed = []
    for name, value in papermill.get("parameters", {}).items():
        if defaults.get(name) != value:
            if isinstance(value, str) and Path(value).is_absolute():
                value = Path(value).name
            changed.append(f"`{name} = {value!r}`")
    return f"{text} but {', '.join(changed)}." if changed else f"{text}."


def _relinked(text: str, pages) -> str:
    """Prose or a table whose links lead on from figures/book: to pages, else to the files."""

    def target(match: re.Match) -> str:
        file, mark, heading = match[1].partition("#")
        name = file.removesuffix(".ipynb")
        if name in pages:
            return f"{name}.md{mark}{heading}"
        return posixpath.normpath(f"{SOURCES}/{file}") + mark + heading

    return re.sub(r"(?<=\]\()(?!https?:|#)([^)\s]+)(?=\))", target, text)


def write_pages(book, names=(), to: Path | None = None) -> list[Path]:
    """Write the pages of the book's executed copies, of all or of these notebooks, and contents.

    Returns the paths. SpecdecError where a copy is missing.
    """
    to = to or folder()
    copies = {entry.stem: book.copy(entry) for entry in book.entries if not entry.notebook}
    names = names or [name for name, copy in copies.items() if copy.is_file()]
    pages = {*names, *(path.stem for path in to.glob("[0-9]*.md"))}
    for name in names:
        if name not in copies or not copies[name].is_file():
            advice = f"run `python -m specdec.book run --only {name}` first"
            raise SpecdecError(f"there is no executed copy of {name}; {advice}.")
        executed = notebooks.read_notebook(copies[name])
        text, pictures = page_of(executed, name, pages)
        # a page may have fewer pictures than before
        for outdated in to.glob(f"{name}-*.png"):
            outdated.unlink()
        for file, content in pictures.items():
            with runs.atomic(to / file) as path:
                path.write_bytes(content)
        runs.write_text(to / f"{name}.md", text)
    if to == folder():
        tidy_all()  # the notebooks' first lines link the pages
    contents_path = runs.write_text(to / CONTENTS, contents(book, to))
    return [*sorted(to.glob("[0-9]*.md")), contents_path]


def contents(book, to: Path) -> str:
    """The page of contents: by chapter every notebook with its promise and what it found."""
    lines = ["# The executed book", "", INTRO]
    chapter = ""
    for entry in book.entries:
        if entry.notebook:
            continue
        if CHAPTERS[entry.stem[0]] != chapter:
            chapter = CHAPTERS[entry.stem[0]]
            lines += ["", f"## {chapter}", "", "| | notebook | what was found |", "|---|---|---|"]
        source = notebooks.read_notebook(book.source(entry))
        title, promise = notebooks.title_and_promise(source)
        page = to / f"{entry.stem}.md"
        if not page.is_file():
            link = f"[**{title}**]({SOURCES}/{entry.stem}.ipynb)"
            lines.append(f"| | {link}<br>{promise} | not executed yet |")
            continue
        text = page.read_text(encoding="utf-8")
        results = []
        for block in FOUND.findall(text):
            results += [line.removeprefix("- ") for line in block.splitlines() if line]
        if source_hash(source) not in text.rpartition("Source:")[2]:
            results.append(OLDER)
        results = [line.replace("|", "\\|") for line in results]
        thumbnail = ""
        if (to / f"{entry.stem}-1.png").is_file():
            image = f'<img src="{entry.stem}-1.png" width="200" alt="{title}">'
            thumbnail = f"[{image}]({page.name})"
        link = f"[**{title}**]({page.name})"
        lines.append(f"| {thumbnail} | {link}<br>{promise} | {'<br>'.join(results)} |")
    return "\n".join(lines) + "\n"
