"""The programme stays small: lines of the package, of the notebooks' helpers and of the tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = {
    "package": (["specdec"], 24_500),
    "helpers": (["notebooks"], 7_500),
    "tests": (["tests"], 21_000),
}
MOST_FILES = 95


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("part", BUDGETS)
def test_lines_stay_within_their_budget(part):
    folders, most = BUDGETS[part]
    lines = 0
    for folder in folders:
        for path in python_files(folder):
            lines += len(path.read_text(encoding="utf-8").splitlines())
    assert 0 < lines <= most


def test_the_package_has_few_files():
    assert 0 < len(python_files("specdec")) <= MOST_FILES
