"""The executed book as Markdown pages with pictures, to be read without installing anything.

`write_pages` turns executed copies of one run of the book into figures/book/NN_name.md: prose as it is, code folded, tables and
formulas as GitHub renders them, pictures as small PNG. Dropped are progress bars and warnings (stderr), widgets, and the cell of
parameters that papermill injects, whose values stand in the cell above. A page says by which commit it was executed and whether
its source has changed since. Knows nothing about what the notebooks compute.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from pathlib import Path

from specdec import machine, runs
from specdec.errors import SpecdecError

from workbook import notebooks

COLOURS, WIDEST_PX = 64, 1000  # of a picture
REPRS = re.compile(r"^(<.*>|NotebookRun\(.*|None)$", re.S)  # texts of outputs that tell a reader nothing
FOLDED = "<details><summary>{0}</summary>\n\n```python\n{1}\n```\n\n</details>"
CONTENTS = "README.md"


def folder() -> Path:
    """Where the pages are: figures/book, in the checkout."""
    return runs.workbook() / "figures" / "book"


def source_hash(notebook: dict) -> str:
    """What a page was made from: the cells of its source, outputs and header aside (12 hexadecimal digits)."""
    cells = [(cell["cell_type"], notebooks.source_of(cell)) for cell in notebook["cells"][1:]]
    return hashlib.sha256(repr(cells).encode()).hexdigest()[:12]


def page_of(executed: dict, source: dict, name: str, about: str, pages=()) -> tuple[str, dict[str, bytes]]:
    """(markdown, {file name: PNG}) of one executed notebook.

    source: the notebook in the checkout. about: when it was executed. pages: names of the notebooks that have a page.
    """
    parts, pictures = [], {}
    changed = notebooks.default_parameters(source)
    for cell in executed["cells"]:
        text, tags = notebooks.source_of(cell), cell.get("metadata", {}).get("tags", ())
        if cell["cell_type"] == "markdown":
            parts.append(_linked(text, pages))
        elif "injected-parameters" not in tags and text.strip():
            parts.append(FOLDED.format("parameters" if "parameters" in tags else "code", text))
            shown = [_shown(output, name, pictures) for output in cell.get("outputs", ())]
            parts += [part for part in shown if part]
    given = executed.get("metadata", {}).get("papermill", {}).get("parameters", {})
    others = ", ".join(f"{key}={value!r}" for key, value in given.items() if changed.get(key) != value)
    foot = f"Executed {about}, parameters as in the notebook{f' but {others}' if others else ''}."
    parts.append(
        f"---\n\n<sub>{foot} Source: [{name}.ipynb](../../notebooks/{name}.ipynb), {source_hash(source)}.</sub>"
    )
    return "\n\n".join(parts) + "\n", pictures


def _linked(text: str, pages) -> str:
    """Prose whose links lead on from figures/book: to the page of a notebook that has one, else to the file."""

    def led(found: re.Match) -> str:
        name = found[1].removesuffix(".ipynb")
        return f"]({name}.md)" if name in pages else f"](../../notebooks/{found[1]})"

    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", led, text)


def _shown(output: dict, name: str, pictures: dict[str, bytes]) -> str:
    """One output in Markdown; '' for what a page leaves out."""
    if output["output_type"] == "stream":
        text = "".join(output["text"]) if output["name"] == "stdout" else ""
        return f"```\n{text.rstrip()}\n```" if text.strip() else ""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items() if isinstance(text, str | list)}
    if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
        return ""
    if "text/markdown" in data:
        return data["text/markdown"]
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


def small_picture(content: bytes) -> bytes:
    """The picture as PNG of at most COLOURS colours and WIDEST_PX pixels of width."""
    from PIL import Image

    picture = Image.open(io.BytesIO(content)).convert("RGB")
    if picture.width > WIDEST_PX:
        picture = picture.resize(
            (WIDEST_PX, round(picture.height * WIDEST_PX / picture.width)), Image.Resampling.LANCZOS
        )
    written = io.BytesIO()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(written, "png", optimize=True)
    return written.getvalue()


def write_pages(book, names=(), to: Path | None = None) -> list[Path]:
    """Write the pages of the book's executed copies, of all or of these notebooks, and the page of contents; returns the paths.

    SpecdecError where a copy is missing or holds an error.
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
        source = notebooks.read_notebook(book.source(entries[name]))
        text, pictures = page_of(executed, source, name, _about(executed), pages)
        for old in to.glob(f"{name}-*.png"):
            old.unlink()
        for file, content in pictures.items():
            with runs.atomic(to / file) as path:
                path.write_bytes(content)
        runs.write_text(to / f"{name}.md", text)
    return [*sorted(to.glob("[0-9]*.md")), runs.write_text(to / CONTENTS, contents(book, to))]


def _about(executed: dict) -> str:
    day = (executed.get("metadata", {}).get("papermill", {}).get("end_time") or "")[:10]
    commit = (machine.commit()["commit"] or "")[:12]
    return " ".join(filter(None, [f"on {day}" if day else "", f"at commit {commit}" if commit else ""]))


def contents(book, to: Path | None = None) -> str:
    """The page of contents: every notebook with its promise, its first picture, and whether its source has changed since."""
    to, done = to or folder(), set()
    lines = ["# The executed book", "", "Written by `python -m specdec.book pages` from executed copies.", ""]
    lines += ["| notebook | what it gives | picture |", "|---|---|---|"]
    for entry in book.entries:
        if entry.notebook or entry.stem in done:
            continue
        done.add(entry.stem)
        source, page = notebooks.read_notebook(book.source(entry)), to / f"{entry.stem}.md"
        title, promise = notebooks.title_and_promise(source)
        if not page.is_file():
            lines.append(f"| [{entry.stem}](../../notebooks/{entry.stem}.ipynb) | {promise} (not executed yet) | |")
            continue
        older = "" if is_present(page, source) else " (its source has changed since)"
        picture = next(iter(sorted(to.glob(f"{entry.stem}-*.png"), key=_number)), None)
        thumbnail = f'<img src="{picture.name}" width="160" alt="{title}">' if picture else ""
        lines.append(f"| [{entry.stem}]({entry.stem}.md) | {promise}{older} | {thumbnail} |")
    return "\n".join(lines) + "\n"


def is_present(page: Path, source: dict) -> bool:
    """Whether a page was made from its source as it is now."""
    return source_hash(source) in page.read_text(encoding="utf-8").rpartition("Source:")[2]


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
