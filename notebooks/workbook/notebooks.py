"""One notebook: its parameters, its tidy form, its execution, and its edition for students.

Execution goes through papermill in a kernel of this interpreter: it needs no installed kernelspec
and opens no network port.
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
    """The notebook as plain JSON; SpecdecError when it is damaged."""
    notebook = runs.read_json(path)
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise SpecdecError(f"{path} is not a notebook.")
    return notebook


def source_of(cell: dict) -> str:
    """A cell's text, however the file stores it."""
    return "".join(cell["source"])


def tags_of(cell: dict) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def has_solutions(notebook: dict) -> bool:
    return any("solution" in tags_of(cell) for cell in notebook["cells"])


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
    cells = [_tidy_cell(cell) for cell in notebook["cells"]]
    cells[0]["source"] = header.splitlines(keepends=True)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    clean = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(clean, indent=1, ensure_ascii=False) + "\n"


def _tidy_cell(cell: dict) -> dict:
    tags = tags_of(cell)
    is_code = cell["cell_type"] == "code"
    metadata: dict = {}
    if "solution" in tags:
        metadata["jupyter"] = {"source_hidden": True}
    if tags:
        metadata["tags"] = tags
    clean: dict = {"cell_type": cell["cell_type"]}
    if is_code:
        clean["execution_count"] = None
    clean["id"] = cell["id"]
    clean["metadata"] = metadata
    if is_code:
        clean["outputs"] = []
    clean["source"] = source_of(cell).rstrip("\n").splitlines(keepends=True)
    return clean


def student_edition(notebook: dict, handed_out: Collection[str] = ()) -> dict:
    """The notebook without its solutions, and without links to files that are not handed out.

    A check raises where an answer is wrong, which nbgrader counts; the cells below run all the
    same. A check is worth 1 point, an open question 2, graded by hand.
    """
    from nbconvert.preprocessors import TagRemovePreprocessor
    from nbformat import from_dict

    def link(match: re.Match) -> str:
        return match[0] if match[2] in handed_out else match[1]

    remove = TagRemovePreprocessor(remove_cell_tags={"solution"})
    edition, _ = remove.preprocess(from_dict(notebook), {})
    for cell in edition["cells"]:
        tags = list(tags_of(cell))
        if cell["cell_type"] == "markdown":
            cell["source"] = re.sub(r"\[([^\]]*)\]\(([^):#]+)\)", link, source_of(cell))
        points = 0
        if "check" in tags:
            points = 1
            cell["metadata"]["tags"] = [*tags, "raises-exception"]
        elif "exercise" in tags and cell["cell_type"] == "markdown":
            points = 2
        if points or "exercise" in tags:
            cell["metadata"]["nbgrader"] = {
                "schema_version": 3,
                "grade_id": cell["id"],
                "grade": points > 0,
                "solution": "exercise" in tags,
                "locked": "check" in tags,
                "task": False,
                **({"points": points} if points else {}),
            }
    return json.loads(json.dumps(edition))


def as_html(notebook: dict) -> str:
    """An executed notebook as one page of HTML without its code."""
    from nbconvert import HTMLExporter
    from nbformat import from_dict

    exporter = HTMLExporter(exclude_input=True, exclude_input_prompt=True, embed_images=True)
    exporter.exclude_output_prompt = True
    page, _ = exporter.from_notebook_node(from_dict(notebook))
    return page


def execute(source: Path, copy: Path, parameters: dict, progress: bool = True) -> tuple[float, str]:
    """Execute `source` with `parameters` into `copy`, left as far as it came if a cell fails.

    progress: also on the terminal. Returns the seconds it took, and '' or one sentence that says
    what went wrong. The copy has a cell of the parameters that differ from the source's.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    begin = time.monotonic()
    defaults = default_parameters(read_notebook(source))
    changed = {}
    for name, value in parameters.items():
        if repr(value) != repr(defaults.get(name)):
            changed[name] = value
    # a folder that cannot be written is known at once
    runs.write_text(copy, source.read_text(encoding="utf-8"))
    fault = ""
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
    except PapermillExecutionError as error:
        first_line = "".join(str(error.evalue).strip().splitlines()[:1])
        fault = f"cell {error.exec_count} raised {error.ename}: {first_line}"
    except (RuntimeError, OSError) as error:
        fault = f"the kernel stopped ({type(error).__name__}: {error})"
    executed = read_notebook(copy)
    executed["metadata"][EXECUTED] = {**machine.commit(), "cpu": machine.hardware()["cpu"]}
    runs.write_text(copy, json.dumps(executed, indent=1, ensure_ascii=False) + "\n")
    return time.monotonic() - begin, fault


def _kernel_manager() -> type:
    """A kernel manager class whose kernels are this interpreter, over ipc if the system has it."""
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from traitlets import CaselessStrEnum, default

    paths = [str(Path(machine.__file__).resolve().parents[1])]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    this_interpreter = KernelSpec(
        argv=[sys.executable, "-c", LAUNCH, "-f", "{connection_file}"],
        language="python",
        env={"PYTHONPATH": os.pathsep.join(paths), "TQDM_MININTERVAL": "2"},
    )
    usual = "tcp" if sys.platform == "win32" else "ipc"

    class Headless(AsyncKernelManager):
        transport = CaselessStrEnum(["tcp", "ipc"], usual, config=True)

        @default("ip")
        def _ip(self):  # the library's default is one name for all kernels of a folder
            if self.transport == "tcp":
                return "127.0.0.1"
            return os.path.join(tempfile.gettempdir(), f"specdec-{uuid.uuid4().hex}")

        @property
        def kernel_spec(self):
            return this_interpreter

    return Headless
