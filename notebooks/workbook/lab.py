"""The book in JupyterLab: working copies of the notebooks, so that reading and running leave the sources as they are.

    notebooks/*.ipynb ──▶ runs/lab/*.ipynb, which Lab opens, runs and saves

An unchanged copy follows its source; one with changes of its own is kept under another name when the source changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from specdec import machine, runs

from workbook import notebooks

MARK = "specdec"  # the copy's metadata that name what it was made from


def folder() -> Path:
    """Where the working copies are; git ignores it."""
    return runs.home() / "runs" / "lab"


def write_copies(sources: Path, names: list[str]) -> list[str]:
    """Bring the working copies of these notebooks up to date. Returns a sentence for each that had changes of its own."""
    kept = []
    for name in names:
        source, copy = sources / f"{name}.ipynb", folder() / f"{name}.ipynb"
        if _made_from(copy) == machine.file_hash(source):
            continue
        if copy.is_file() and _code(old := notebooks.read_notebook(copy)) != old["metadata"].get(MARK, {}).get("code"):
            free = next(path for n in range(1, 10**6) if not (path := copy.with_name(f"{name}.mine{n}.ipynb")).exists())
            os.replace(copy, free)
            kept.append(f"{name} has changed; your copy of it is now {free.name}.")
        runs.write_json(copy, _copy_of(source, names))
    return kept


def _copy_of(source: Path, names: list[str]) -> dict:
    """A notebook for the working folder: its links lead where they led."""
    beside = {f"{name}.ipynb" for name in names}

    def link(target: str) -> str:
        return target if target in beside else Path(os.path.relpath(source.parent / target, folder())).as_posix()

    read = notebooks.relinked(notebooks.read_notebook(source), link)
    mark = {"source": machine.file_hash(source), "code": _code(read)}
    return {**read, "metadata": {**read["metadata"], MARK: mark}}


def _made_from(copy: Path) -> str | None:
    return notebooks.read_notebook(copy)["metadata"].get(MARK, {}).get("source") if copy.is_file() else None


def _code(notebook: dict) -> str:
    """A key of what a reader can change: the cells without their outputs."""
    return runs.content_key(cells=[[cell["cell_type"], notebooks.source_of(cell)] for cell in notebook["cells"]])


def state(name: str, source: Path) -> str:
    """'run in Lab', 'begun in Lab' or 'stale in Lab', by the outputs of the working copy; '' where it has none."""
    copy = folder() / f"{name}.ipynb"
    if not copy.is_file():
        return ""
    cells = [cell for cell in notebooks.read_notebook(copy)["cells"] if cell["cell_type"] == "code"]
    done = [cell.get("execution_count") is not None for cell in cells if notebooks.source_of(cell).strip()]
    if not any(done):
        return ""
    if _made_from(copy) != machine.file_hash(source):
        return "stale in Lab"
    return "run in Lab" if all(done) else "begun in Lab"


def command(name: str, options: list[str]) -> list[str]:
    """What starts JupyterLab on the working copy of a notebook. Its root holds the copies, the sources and what they link to."""
    root = Path(os.path.commonpath([runs.workbook(), folder()]))
    page = (folder() / f"{name}.ipynb").relative_to(root).as_posix()
    settings = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{page}"]
    if getattr(os, "geteuid", lambda: 1)() == 0:  # in a container, where Jupyter would refuse
        settings.append("--ServerApp.allow_root=True")
    return [sys.executable, "-m", "jupyterlab", *settings, *options]


def start(name: str, options: list[str]) -> int:
    """Start JupyterLab and wait for its end; returns its exit status."""
    return subprocess.call(command(name, options))
