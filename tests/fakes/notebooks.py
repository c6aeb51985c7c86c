"""Notebooks as text, made of a title and code; and the code of those that ship, run here."""

import ast
import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

from IPython.display import display

from specdec import runs

from workbook import book, notebooks

PARAMETERS = (
    'scale: str = "laptop"  # laptop | paper\nseed: int = 0  # seed\nrate: float = 0.5  # a rate\n'
    "repeats: int = 1  # at least one"
)

LEVELS = ("FIXED", "WIDE", "DEEP")  # example trees of a diagram


def cell(kind: str, text: str, number: int, tags=()) -> dict:
    made = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {"tags": list(tags)} if tags else {},
        "source": text,
    }
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(title: str, *code: str) -> str:
    cells = [
        cell("markdown", f"# {title}\n\n> Promises {title}.", 0),
        cell("code", PARAMETERS, 1, ["parameters"]),
    ]
    cells += [cell("code", text, number) for number, text in enumerate(code, start=2)]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return json.dumps(
        {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    )


def code_cells(read: dict) -> list[tuple[set, str]]:
    """(tags, source) of the code cells of a notebook."""
    cells = [cell for cell in read["cells"] if cell["cell_type"] == "code"]
    return [(set(cell["metadata"].get("tags", [])), notebooks.source_of(cell)) for cell in cells]


def functions_of(stem: str) -> SimpleNamespace:
    """What the cells of a notebook of the book import and define, none of it called."""
    # parameters are annotated, and constants are called in capitals
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AnnAssign)
    names: dict = {}
    for _, source in code_cells(notebooks.read_notebook(book.notebooks_folder() / f"{stem}.ipynb")):
        tree, kept = ast.parse(source), []
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(node, kinds) or getattr(target, "id", None) in LEVELS:
                kept.append(node)
        tree.body = kept
        exec(compile(tree, stem, "exec"), names)
    return SimpleNamespace(**names)


def run_cells(name: str, **changes) -> dict:
    """Run the code of a notebook of the book here, small, without a kernel. Returns its names.

    changes: parameters other than those of its smoke test.
    """
    opened = book.Book()
    entry = next(entry for entry in opened.entries if entry.name == name)
    values = opened.parameters(entry, entry.smoke | changes)
    names = {"display": display}
    for tags, source in code_cells(notebooks.read_notebook(opened.source(entry))):
        exec(compile(source, name, "exec"), names)
        names |= values if "parameters" in tags else {}
    assert not opened.unwritten(entry, values)
    return names


def execute_here(source: Path, copy: Path, parameters: dict) -> tuple[float, str]:
    """`notebooks.execute` in this process in place of a kernel."""
    read, names, fault = notebooks.read_notebook(source), {}, ""
    for one in [cell for cell in read["cells"] if cell["cell_type"] == "code"]:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                exec(notebooks.source_of(one), names)
            except Exception as error:
                fault = fault or f"a cell raised {type(error).__name__}"
        names |= parameters if "parameters" in one["metadata"].get("tags", ()) else {}
        one["outputs"] = [{"output_type": "stream", "text": said.getvalue()}]
    runs.write_json(copy, read)
    return 1.0, fault
