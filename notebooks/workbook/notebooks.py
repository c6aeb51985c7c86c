"""One notebook: its parameters, its tidy form on disk, and its execution in a Jupyter kernel of this interpreter.

Knows nothing about other notebooks (book.py) or about what the cells compute. Execution goes through papermill, needs no
installed kernelspec and opens no network port. Progress bars come out as text on the terminal; the executed copy has none.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from specdec import machine, runs
from specdec.errors import SpecdecError

# A kernel without a screen: tqdm.auto takes text bars when its notebook module cannot be imported.
LAUNCH = (
    "import sys; sys.modules['tqdm.notebook'] = None; "
    "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
)
BAR_INTERVAL_S = "2"
BAR = re.compile(r"\d%\||\[\d+:\d\d(<[\d:?]+)?, [^]]*/[^]]*\]")  # a line of tqdm, with or without a total
WIDGET = "application/vnd.jupyter.widget-view+json"
EXECUTED = "executed"  # the copy's metadata that say by which commit it was executed, and on which machine


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


def default_parameters(notebook: dict) -> dict:
    """Name -> default of every assignment in the cell that is tagged `parameters`."""
    cells = [cell for cell in notebook["cells"] if "parameters" in cell.get("metadata", {}).get("tags", ())]
    nodes = ast.parse(source_of(cells[0])).body if cells else []
    return {node.target.id: ast.literal_eval(node.value) for node in nodes if isinstance(node, ast.AnnAssign)}


def injected_names(cells) -> list[str]:
    """Names that papermill assigned: in those of the executed `cells` (texts) that begin with its remark."""
    nodes = [node for text in cells if text.startswith("# Parameters\n") for node in ast.parse(text).body]
    return [target.id for node in nodes if isinstance(node, ast.Assign) for target in node.targets]


def tidy(notebook: dict, header: str) -> str:
    """The text under which a notebook is committed: no outputs, no metadata but tags and the kernel, solutions folded.

    header: what its first cell shall say.
    """
    cells = [_tidy_cell(cell) for cell in notebook["cells"]]
    cells[0]["source"] = header.splitlines(keepends=True)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    clean = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(clean, indent=1, ensure_ascii=False) + "\n"


def _tidy_cell(cell: dict) -> dict:
    tags = cell.get("metadata", {}).get("tags")
    folded = {"jupyter": {"source_hidden": True}} if "solution" in (tags or ()) else {}
    clean = {"cell_type": cell["cell_type"]}
    if cell["cell_type"] == "code":
        clean["execution_count"] = None
    clean |= {"id": cell["id"], "metadata": folded | ({"tags": tags} if tags else {})}
    if cell["cell_type"] == "code":
        clean["outputs"] = []
    return clean | {"source": source_of(cell).rstrip("\n").splitlines(keepends=True)}


def relinked(notebook: dict, links: Callable[[str], str]) -> dict:
    """The notebook for another folder. links: where a link to another file of its folder leads from there."""
    cells = [dict(cell) for cell in notebook["cells"]]
    for cell in cells:
        if cell["cell_type"] == "markdown":
            cell["source"] = re.sub(r"(?<=\]\()\s*([^):#\s]+)(?=[#)])", lambda found: links(found[1]), source_of(cell))
    return {**notebook, "cells": cells}


def student_edition(notebook: dict, handed_out: Collection[str] = ()) -> dict:
    """The notebook without its solutions, and without links to other files than those `handed_out` with it.

    Its checks do not say that a solution ran, so that the cells below a wrong answer run all the same. Text is split at
    headings, and every cell says how nbgrader grades it and where it is in slides.
    """

    def link(found: re.Match) -> str:
        return found[0] if found[2] in handed_out else found[1]

    cells = []
    for cell in notebook["cells"]:
        tags, parts = set(cell["metadata"].get("tags", [])), [source_of(cell)]
        if "solution" in tags:
            continue
        if "check" in tags:
            parts = [parts[0].replace(", solved=True", "")]
        if cell["cell_type"] == "markdown":
            parts = re.split(r"\n+(?=#{2,3} )", re.sub(r"\[([^\]]*)\]\(([^):#]+)\)", link, parts[0]))
        for number, text in enumerate(parts):
            name = f"{cell['id']}-{number}" if number else cell["id"]
            metadata = {**cell["metadata"], **in_class({**cell, "id": name, "source": text}, tags)}
            cells.append({**cell, "id": name, "source": text, "metadata": metadata})
    return {**notebook, "cells": cells}


def in_class(cell: dict, tags: Collection[str]) -> dict:
    """The metadata that `nbgrader` and `jupyter nbconvert --to slides` read.

    A check is worth 1 point; an open question is graded by hand, with 2.
    """
    code, graded = cell["cell_type"] == "code", "check" in tags or ("exercise" in tags and cell["cell_type"] != "code")
    if {"parameters", "check"} & set(tags):
        slide = "skip"
    elif code:
        slide = "-" if "exercise" in tags else "subslide"
    else:
        slide = (
            "slide"
            if re.match(r"#{1,3} ", cell["source"])
            else "subslide"
            if cell["source"][:2] == "**"
            else "fragment"
        )
    told = {"slideshow": {"slide_type": slide}}
    if "exercise" not in tags and not graded:
        return told
    kind = {"grade": graded, "solution": "exercise" in tags, "locked": "check" in tags, "task": False}
    points = {"points": 1 if code else 2} if graded else {}
    return told | {"nbgrader": {"schema_version": 3, "grade_id": cell["id"], **kind, **points}}


def readable(outputs: list[dict]) -> list[dict]:
    """Outputs without what only a kernel can use: progress bars, and the views of widgets.

    >>> readable([{"output_type": "stream", "name": "stderr", "text": "100%|##| 3/3 [00:01<00:00, 2.9it/s]\\nWarning: hot\\n"}])
    [{'output_type': 'stream', 'name': 'stderr', 'text': 'Warning: hot'}]
    """
    kept = []
    for output in outputs:
        if output.get("name") == "stderr":
            lines = re.split(r"[\r\n]+", "".join(output["text"]))
            output = {**output, "text": "\n".join(line for line in lines if line.strip() and not BAR.search(line))}
        if WIDGET not in output.get("data", {}) and output.get("text") != "":
            kept.append(output)
    return kept


def _tell(copy: Path) -> None:
    """Leave the executed copy readable, with what it was executed by in its metadata."""
    executed = read_notebook(copy)
    for cell in executed["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = readable(cell["outputs"])
    executed["metadata"][EXECUTED] = {**machine.commit(), "cpu": machine.hardware()["cpu"]}
    runs.write_text(copy, json.dumps(executed, indent=1, ensure_ascii=False) + "\n")


def execute(source: Path, copy: Path, parameters: dict, progress: bool = True) -> tuple[float, str]:
    """Execute `source` with `parameters` into `copy`, which is left as far as it came when a cell fails.

    progress: also on the terminal. Returns the seconds it took, and '' or one sentence that says what went wrong.
    The copy has a cell of the parameters that differ from the source's, none where all are the same.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    started, usual = time.monotonic(), default_parameters(read_notebook(source))
    changed = {name: value for name, value in parameters.items() if repr(value) != repr(usual.get(name))}
    runs.write_text(copy, source.read_text(encoding="utf-8"))  # a folder that cannot be written is known at once
    try:
        papermill.execute_notebook(
            source,
            copy,
            parameters=changed,
            kernel_name="python3",
            cwd=source.parent,
            progress_bar=progress,
            stderr_file=sys.stderr if progress else None,
            kernel_manager_class=_kernel_manager(),
            coalesce_streams=True,  # keeps only the last state of a text progress bar
        )
        fault = ""
    except PapermillExecutionError as error:
        first_line = str(error.evalue).strip().splitlines()[:1]
        fault = f"cell {error.exec_count} raised {error.ename}: {''.join(first_line)}"
    except (RuntimeError, OSError) as error:  # the kernel died or never came up
        fault = f"the kernel stopped ({type(error).__name__}: {error})"
    seconds = time.monotonic() - started
    _tell(copy)
    return seconds, fault


def _kernel_manager() -> type:
    """A kernel manager class whose kernels are this interpreter, over ipc where the system has it."""
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from traitlets import CaselessStrEnum, default

    paths = [str(Path(machine.__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    this_interpreter = KernelSpec(
        argv=[sys.executable, "-c", LAUNCH, "-f", "{connection_file}"],
        language="python",
        env={"PYTHONPATH": os.pathsep.join(paths), "TQDM_MININTERVAL": BAR_INTERVAL_S},
    )

    class Headless(AsyncKernelManager):
        transport = CaselessStrEnum(["tcp", "ipc"], "tcp" if sys.platform == "win32" else "ipc", config=True)

        @default("ip")
        def _own_file(self):  # the library's default is one name for all kernels of a folder
            name = os.path.join(tempfile.gettempdir(), f"specdec-{uuid.uuid4().hex}")
            return name if self.transport == "ipc" else "127.0.0.1"

        @property
        def kernel_spec(self):
            return this_interpreter

    return Headless
