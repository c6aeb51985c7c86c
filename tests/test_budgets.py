"""The programme stays small: lines of the package, of the notebooks' helpers and of the tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Folder, lines that are allowed today, and the most of this round.
BUDGETS = {
    "package": ("specdec", 23_500, 24_500),
    "helpers": ("notebooks", 6_700, 7_500),
    "tests": ("tests", 20_000, 21_000),
}
FILES = (95, 95)


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("part", BUDGETS)
def test_lines_stay_within_their_budget(part):
    folder, limit, goal = BUDGETS[part]
    lines = 0
    for path in python_files(folder):
        lines += len(path.read_text(encoding="utf-8").splitlines())
    assert 0 < lines <= limit, f"{lines} lines; the round allows {goal}"


def test_the_package_has_few_files():
    limit, goal = FILES
    count = len(python_files("specdec"))
    assert 0 < count <= limit, f"{count} files; the round allows {goal}"
