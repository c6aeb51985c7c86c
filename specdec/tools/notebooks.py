"""The notebooks as files: the list in book.yml, their header lines, and their tidy form without outputs.

Knows nothing about running them (book.py) or about what they compute.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from specdec import machine, runs
from specdec.errors import SpecdecError, nearest_name_error

CONTENTS = "00_start_here"


@dataclass(frozen=True)
class Entry:
    """One line of book.yml: a notebook, what it is given, what it needs and leaves, what it costs.

    reads, writes: file patterns under the home of results; {scale} and {figures} are filled in. parameters, cost: per
    scale. smoke: parameters under which the tests run it, small. main: part of `make reproduce`. notebook: the source
    when several entries share one; else equal to name.
    """

    name: str
    notebook: str = ""
    main: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    items: str = "none"
    cost: dict = field(default_factory=dict)
    parameters: dict = field(default_factory=dict)
    smoke: dict = field(default_factory=dict)

    def source(self, folder: Path) -> Path:
        return folder / f"{self.notebook or self.name}.ipynb"


def notebooks_folder() -> Path:
    """The folder of notebook sources and book.yml in the checkout."""
    return machine.checkout() / "notebooks"


def read_book(folder: Path | None = None) -> list[Entry]:
    """The entries of book.yml in order; SpecdecError for anything misspelt, missing or listed twice."""
    import yaml

    folder = folder or notebooks_folder()
    path = folder / "book.yml"
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecdecError(f"there is no {path}; run from a checkout of specdec.") from error
    except yaml.YAMLError as error:
        raise SpecdecError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(listed, list) or not all(isinstance(line, dict) and "name" in line for line in listed):
        raise SpecdecError(f"{path} must be a list of entries, each with a name.")
    entries = [_entry(line) for line in listed]
    names = [entry.name for entry in entries]
    for entry in entries:
        if names.count(entry.name) > 1:
            raise SpecdecError(f"{path} lists {entry.name} twice.")
        if not entry.source(folder).is_file():
            raise SpecdecError(f"{path} lists {entry.name}, but there is no {entry.source(folder)}.")
    return entries


def _entry(line: dict) -> Entry:
    known = {one.name for one in fields(Entry)}
    for name in line:
        if name not in known:
            raise nearest_name_error("key in book.yml", name, known)
    for what in ("cost", "parameters"):
        for scale in line.get(what, {}):
            runs.known_scale(scale)
    patterns = {what: tuple(line.get(what, ())) for what in ("reads", "writes")}
    return Entry(**{**line, **patterns})


def read_notebook(path: Path) -> dict:
    """The notebook as plain JSON; SpecdecError when it is damaged."""
    notebook = runs.read_json(path)
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise SpecdecError(f"{path} is not a notebook.")
    return notebook


def source_of(cell: dict) -> str:
    """A cell's text, however the file stores it."""
    return "".join(cell["source"])


def title_and_promise(notebook: dict) -> tuple[str, str]:
    """The H1 and the block quote of the first cell."""
    lines = source_of(notebook["cells"][0]).splitlines()
    title = next((line[2:].strip() for line in lines if line.startswith("# ")), "")
    promise = " ".join(line[1:].strip() for line in lines if line.startswith(">"))
    return title, promise


def header(notebook: dict, entry: Entry, entries: list[Entry]) -> str:
    """The first cell: title, promise, the line Reads · Writes · Paper items · Cost, and the way on."""
    title, promise = title_and_promise(notebook)
    facts = [
        f"**Reads** {_files(entry.reads)}",
        f"**Writes** {_files(entry.writes)}",
        f"**Paper items** {entry.items}",
        f"**Cost** {', '.join(f'{cost} ({scale})' for scale, cost in entry.cost.items()) or 'seconds'}",
    ]
    return f"# {title}\n\n> {promise}\n\n{' · '.join(facts)}\n\n{navigation(entry, entries)}"


def navigation(entry: Entry, entries: list[Entry]) -> str:
    """← previous · contents · next →, in the order of book.yml."""
    order = list(dict.fromkeys(one.notebook or one.name for one in entries))
    here = order.index(entry.notebook or entry.name)
    links = [f"[contents]({CONTENTS}.ipynb)"]
    if here > 0:
        links.insert(0, f"[← previous]({order[here - 1]}.ipynb)")
    if here + 1 < len(order):
        links.append(f"[next →]({order[here + 1]}.ipynb)")
    return " · ".join(links)


def _files(patterns) -> str:
    return ", ".join(f"`{pattern}`" for pattern in patterns) or "nothing"


def tidy(notebook: dict, entry: Entry, entries: list[Entry]) -> str:
    """The text under which a notebook is committed: fresh header, no outputs, no metadata but tags and the kernel."""
    cells = [_tidy_cell(cell) for cell in notebook["cells"]]
    cells[0]["source"] = header(notebook, entry, entries).splitlines(keepends=True)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _tidy_cell(cell: dict) -> dict:
    tags = cell.get("metadata", {}).get("tags")
    clean = {"cell_type": cell["cell_type"]}
    if cell["cell_type"] == "code":
        clean["execution_count"] = None
    clean |= {"id": cell["id"], "metadata": {"tags": tags} if tags else {}}
    if cell["cell_type"] == "code":
        clean["outputs"] = []
    return clean | {"source": source_of(cell).rstrip("\n").splitlines(keepends=True)}


def tidy_all(folder: Path | None = None, check: bool = False) -> list[str]:
    """Bring every notebook of the book into tidy form; returns the names that were not. `check` changes nothing."""
    folder = folder or notebooks_folder()
    entries = read_book(folder)
    changed = {}
    for entry in entries:
        path = entry.source(folder)
        text = tidy(read_notebook(path), entry, entries)
        if path not in changed and text != path.read_text(encoding="utf-8"):
            changed[path] = text
    for path, text in ({} if check else changed).items():
        runs.write_text(path, text)
    return [path.stem for path in changed]
