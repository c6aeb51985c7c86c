"""The instructor's page speaks of what the notebooks hold."""

import re

from specdec import machine
from specdec.tools import notebooks

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
