"""The executed book as Markdown pages with pictures, to be read without installing anything.

`write_pages` turns executed copies into figures/book/NN_name.md by nbconvert: prose as it is, code
folded, tables and formulas as GitHub renders them, pictures as small PNG. A page says when and by
which commit it was executed; the contents say which pages show an earlier version of a notebook.
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
# One cell after the other; what `_prepared` left of the outputs, pictures as links to files.
TEMPLATE = """{% for cell in nb.cells %}{% if cell.cell_type == "markdown" %}
{{ cell.source }}
{% else %}
<details><summary>{{ cell.metadata.summary }}</summary>

```python
{{ cell.source }}
```

</details>
{% if cell.metadata.is_found %}
<!-- found -->
{% endif %}{% for text in cell.metadata.texts %}
{{ text }}
{% endfor %}{% if cell.metadata.is_found %}
<!-- end of found -->
{% endif %}{% endif %}{% endfor %}"""


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
    from nbconvert import MarkdownExporter
    from nbformat import from_dict

    pictures: dict[str, bytes] = {}
    cells = []
    for cell in executed["cells"][1:]:
        if "injected-parameters" in notebooks.tags_of(cell) or not notebooks.source_of(cell):
            continue
        cells.append(_prepared(cell, name, pictures, pages))
    exporter = MarkdownExporter(raw_template=TEMPLATE)
    prepared = from_dict({**executed, "cells": cells})
    body, _ = exporter.from_notebook_node(prepared)
    title, promise = notebooks.title_and_promise(executed)
    links = f"[notebook]({SOURCES}/{name}.ipynb) · [contents]({CONTENTS})"
    footer = f"Source: [{name}.ipynb]({SOURCES}/{name}.ipynb), {source_hash(executed)}."
    parts = [
        f"# {title}",
        f"> {promise}",
        links,
        f"<sub>{provenance(executed)}</sub>",
        re.sub(r"\n{3,}", "\n\n", body).strip(),
        f"---\n\n<sub>{footer}</sub>",
    ]
    return "\n\n".join(parts) + "\n", pictures


def _prepared(cell: dict, name: str, pictures: dict[str, bytes], pages) -> dict:
    """The cell with its outputs as texts of Markdown; its pictures are added to `pictures`."""
    source = notebooks.source_of(cell)
    if cell["cell_type"] == "markdown":
        return {**cell, "source": _relinked(source, pages)}
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        text = "".join(data.get("text/plain", "")).strip()
        if output.get("name") == "stdout":
            text = "".join(output["text"]).rstrip()
        if "text/markdown" in data:
            texts.append(_relinked("".join(data["text/markdown"]), pages))
        elif "image/png" in data:
            file = f"{name}-{len(pictures) + 1}.png"
            pictures[file] = small_picture(base64.b64decode("".join(data["image/png"])))
            alternative = output["metadata"].get("image/png", {}).get("alt", "Figure")
            texts.append(f"![{re.sub(r'[][]', ' ', alternative)}]({file})")
        elif text and not REPRS.match(text) and "widget" not in " ".join(data):
            texts.append(f"```\n{text}\n```")
    tags = notebooks.tags_of(cell)
    summary = "parameters" if "parameters" in tags else "code"
    is_found = "found" in tags and len(texts) > 0
    metadata = {"summary": summary, "texts": texts, "is_found": is_found}
    return {**cell, "source": source, "metadata": metadata}


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
    ending = f" but {', '.join(changed)}" if changed else ""
    return f"{text}{ending}."


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

    Returns the paths. SpecdecError where a copy is missing or holds an error.
    """
    to = to or folder()
    entries = {entry.stem: entry for entry in book.entries if not entry.notebook}
    if not names:
        names = [name for name, entry in entries.items() if book.copy(entry).is_file()]
    pages = {*names, *(path.stem for path in to.glob("[0-9]*.md"))}
    for name in names:
        if name not in entries or not book.copy(entries[name]).is_file():
            advice = f"run `python -m specdec.book run --only {name}` first"
            raise SpecdecError(f"there is no executed copy of {name}; {advice}.")
        executed = notebooks.read_notebook(book.copy(entries[name]))
        for cell in executed["cells"]:
            for output in cell.get("outputs", ()):
                if output["output_type"] == "error":
                    raise SpecdecError(f"{book.copy(entries[name])} ends in an error.")
        text, pictures = page_of(executed, name, pages)
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
    intro = (
        "Every notebook with its results, to be read here without installing anything. A page "
        "shows its notebook as it was when the commit that the page names executed it."
    )
    lines = ["# The executed book", "", intro]
    chapter = ""
    for entry in book.entries:
        if entry.notebook:
            continue
        if CHAPTERS[entry.stem[0]] != chapter:
            chapter = CHAPTERS[entry.stem[0]]
            lines += ["", f"## {chapter}", "", "| | notebook | what was found |", "|---|---|---|"]
        source = notebooks.read_notebook(book.source(entry))
        page = to / f"{entry.stem}.md"
        title, promise = notebooks.title_and_promise(source)
        if not page.is_file():
            link = f"[**{title}**]({SOURCES}/{entry.stem}.ipynb)"
            lines.append(f"| | {link}<br>{promise} | not executed yet |")
            continue
        text = page.read_text(encoding="utf-8")
        results = []
        if FOUND.search(text):
            for line in FOUND.search(text)[1].splitlines():
                if line:
                    results.append(line.removeprefix("- ").replace("|", "\\|"))
        if source_hash(source) not in text.rpartition("Source:")[2]:
            results.append(OLDER)
        pictures = list(to.glob(f"{entry.stem}-1.png"))
        thumbnail = ""
        if pictures:
            image = f'<img src="{pictures[0].name}" width="200" alt="{title}">'
            thumbnail = f"[{image}]({page.name})"
        link = f"[**{title}**]({page.name})"
        lines.append(f"| {thumbnail} | {link}<br>{promise} | {'<br>'.join(results)} |")
    return "\n".join(lines) + "\n"
