"""The reading list of core/README.md names files that exist and stays readable in a morning."""

import re
from pathlib import Path

import specdec

PACKAGE = Path(specdec.__file__).parent
MOST_LINES = 5000


def test_the_reading_list_exists_and_fits_into_a_morning():
    readme = (PACKAGE / "core" / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"^\d+\. `(\S+\.py)`: .+\?$", readme, re.MULTILINE)
    assert len(names) == len(set(names)) == 12
    assert names[:5] == [
        f"core/{name}.py" for name in "tree verification cycle engine decode".split()
    ]
    lines = {name: len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in names}
    assert sum(lines.values()) <= MOST_LINES, lines
