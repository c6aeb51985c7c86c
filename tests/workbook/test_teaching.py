"""The instructor's page speaks of what the notebooks hold, and the words of the code are explained."""

import re
from dataclasses import fields

from specdec import machine
from specdec.core.records import CYCLE_COLUMNS
from specdec.core.tree_config import TreeConfig

from workbook import notebooks

FOLDER = machine.checkout() / "notebooks"


def test_the_instructors_page_follows_the_sections():
    """Each session's table lists its notebook's sections in order, in 90 minutes."""
    sessions = re.split(r"^## Session ", (FOLDER / "teaching.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    assert len(sessions) == 2
    for session in sessions:
        name = re.search(r"\]\((\w+)\.ipynb\)", session)[1]
        rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", session, flags=re.M)
        cells = notebooks.read_notebook(FOLDER / f"{name}.ipynb")["cells"]
        text = "\n".join(notebooks.source_of(cell) for cell in cells if cell["cell_type"] == "markdown")
        sections = re.findall(r"^## (.+)$", text, flags=re.M)
        assert [title.strip() for _, title in rows] == sections[: len(rows)] and len(sections) <= len(rows) + 1
        assert sum(int(minutes) for minutes, _ in rows) == 90


def test_words_and_units_of_the_code_are_explained():
    """Every column of a cycle, in its order, and every number of a tree but RADAR's."""
    cells = notebooks.read_notebook(FOLDER / "02_words_and_units.ipynb")["cells"]
    text = "\n".join(notebooks.source_of(cell) for cell in cells if cell["cell_type"] == "markdown")
    tables = {
        title: re.findall(r"^\| `(\w+)`", part, flags=re.M) for title, part in re.findall(r"## (.+)\n([^#]*)", text)
    }
    assert tables["Columns of a cycle"] == list(CYCLE_COLUMNS)
    assert {field.name for field in fields(TreeConfig)} - set(tables["Numbers of a tree"]) <= {"flat_nodes"}
