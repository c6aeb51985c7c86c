"""One notebook: its parameters, its tidy form, its execution, and its edition for students.

Execution goes through papermill in a kernel of this interpreter.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Collection
from pathlib import Path

from specdec import machine, runs
from specdec.errors import SpecdecError

# A kernel without a screen: tqdm.auto takes text bars if its notebook module cannot be imported.
LAUNCH = (
    "import sys; sys.modules['tqdm.notebook'] = None; "
    "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
)
EXECUTED = "executed"  # the copy's metadata: the commit that executed it, and the machine


def read_notebook(path: Path) -> dict:
    """The notebook as plain JSON."""
    return runs.read_json(path)


def source_of(cell: dict) -> str:
    """A cell's text, a list of lines or one string."""
    return "".join(cell["source"])


def tags_of(cell: dict) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def title_and_promise(notebook: dict) -> tuple[str, str]:
    """The H1 and the block quote of the first cell."""
    title, promise = "", []
    for line in source_of(notebook["cells"][0]).splitlines():
        if line.startswith("# ") and not title:
            title = line[2:].strip()
        if line.startswith(">"):
            promise.append(line[1:].strip())
    return title, " ".join(promise)


def default_parameters(notebook: dict) -> dict:
    """Name -> default of every assignment in the cell that is tagged `parameters`."""
    defaults = {}
    for cell in notebook["cells"]:
        if "parameters" in tags_of(cell):
            for node in ast.parse(source_of(cell)).body:
                if isinstance(node, ast.AnnAssign):
                    defaults[node.target.id] = ast.literal_eval(node.value)
    return defaults


def tidy(notebook: dict, header: str) -> str:
    """The text under which a notebook is committed: no outputs, tags alone, solutions folded.

    header: what its first cell shall say.
    """
    cells = []
    for cell in notebook["cells"]:
        tags = tags_of(cell)
        metadata: dict = {}
        if "solution" in tags:
            metadata["jupyter"] = {"source_hidden": True}
        if tags:
            metadata["tags"] = tags
        # one line per string, as Jupyter saves them
        source = source_of(cell).rstrip("\n").splitlines(keepends=True)
        clean = {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": metadata}
        if cell["cell_type"] == "code":
            clean |= {"execution_count": None, "outputs": []}
        # keys in the order in which Jupyter writes them
        cells.append(dict(sorted({**clean, "source": source}.items())))
    cells[0]["source"] = header.splitlines(keepends=True)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    # nbconvert names scripts after it
    language = {"file_extension": ".py", "name": "python"}
    metadata = {"kernelspec": kernel, "language_info": language}
    clean = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(clean, indent=1, ensure_ascii=False) + "\n"


def student_edition(notebook: dict, handed_out: Collection[str] = ()) -> dict:
    """The notebook without solutions, and without links to files that are not handed out.

    For nbgrader a check is worth 1 point, an open question 2, graded by hand.
    """

    def link(match: re.Match) -> str:
        return match[0] if match[2] in handed_out else match[1]

    cells = []
    for cell in notebook["cells"]:
        tags, source, metadata = tags_of(cell), source_of(cell), dict(cell["metadata"])
        if "solution" in tags:
            continue
        is_prose = cell["cell_type"] == "markdown"
        if is_prose:
            # the text of a link stays
            source = re.sub(r"\[([^\]]*)\]\(([^):#]+)\)", link, source)
        # an open question is prose, an exercise without points is checked below it
        points = 2 if is_prose else 0
        if "check" in tags:
            points = 1
            metadata["tags"] = [*tags, "raises-exception"]
        if "check" in tags or "exercise" in tags:
            grading = {"schema_version": 3, "grade_id": cell["id"], "task": False}
            grading |= {"grade": points > 0, "solution": "exercise" in tags}
            grading["locked"] = "check" in tags
            if points:
                grading["points"] = points
            metadata["nbgrader"] = grading
        cells.append({**cell, "source": source, "metadata": metadata})
    return {**notebook, "cells": cells}


def as_html(notebook: dict) -> str:
    """An executed notebook as one page of HTML without its code."""
    import nbformat
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(exclude_input=True, exclude_input_prompt=True, embed_images=True)
    exporter.exclude_output_prompt = True
    # texts may be lists of lines, which only its reader joins
    page, _ = exporter.from_notebook_node(nbformat.reads(json.dumps(notebook), as_version=4))
    return page


def execute(source: Path, copy: Path, parameters: dict) -> tuple[float, str]:
    """Execute `source` with `parameters` into `copy`, left as far as it came if a cell fails.

    Returns the seconds, and '' or what went wrong.
    """
    import papermill
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from papermill.exceptions import PapermillExecutionError

    class ThisInterpreter(AsyncKernelManager):
        """Its kernels are this interpreter, and open no network port where the system has ipc."""

        transport = "tcp" if sys.platform == "win32" else "ipc"
        if transport == "ipc":
            ip = str(Path(tempfile.gettempdir()) / f"specdec-{uuid.uuid4().hex}")
        kernel_spec = KernelSpec(argv=[sys.executable, "-c", LAUNCH, "-f", "{connection_file}"])

    # 1. what differs from the source
    begin = time.monotonic()
    defaults = default_parameters(read_notebook(source))
    changed = {}
    for name, value in parameters.items():
        if repr(value) != repr(defaults.get(name)):
            changed[name] = value
    # a folder that cannot be written is known at once
    runs.write_text(copy, source.read_text(encoding="utf-8"))
    # 2. the execution
    fault = ""
    try:
        papermill.execute_notebook(
            source,
            copy,
            parameters=changed,
            kernel_name="python3",
            cwd=source.parent,
            stderr_file=sys.stderr,
            kernel_manager_class=ThisInterpreter,
            coalesce_streams=True,  # keeps only the last state of a text progress bar
        )
    except PapermillExecutionError as error:
        first_line = "".join(str(error.evalue).strip().splitlines()[:1])
        fault = f"cell {error.exec_count} raised {error.ename}: {first_line}"
    except (RuntimeError, OSError) as error:
        fault = f"the kernel stopped ({type(error).__name__}: {error})"
    # 3. what it was executed by; a full disk, which is the fault then, leaves half a copy
    try:
        executed = read_notebook(copy)
        executed["metadata"][EXECUTED] = {**machine.commit(), "cpu": machine.hardware()["cpu"]}
        runs.write_text(copy, json.dumps(executed, indent=1, ensure_ascii=False) + "\n")
    except SpecdecError:
        if not fault:
            raise
    return time.monotonic() - begin, fault
