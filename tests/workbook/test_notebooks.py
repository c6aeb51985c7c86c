"""The notebooks of the book: their form, a smoke run of each, and the checks of the lessons."""

import ast

import pytest
from fakes.notebooks import code_cells, run_cells

from workbook import book, notebooks

BOOK = book.read_book()
STEMS = list(dict.fromkeys(entry.stem for entry in BOOK))
LESSONS = [stem for stem in STEMS if stem[:2] in ("10", "11", "12", "22", "23", "24", "25")]
QUICK = ["02_words_and_units", "10_speculative_decoding", "12_decisions", "55_other_traces"]


def read(stem: str) -> dict:
    return notebooks.read_notebook(book.notebooks_folder() / f"{stem}.ipynb")


def test_every_notebook_is_in_the_book():
    files = {path.stem for path in book.notebooks_folder().glob("*.ipynb")}
    assert files == set(STEMS)


@pytest.mark.parametrize("stem", LESSONS)
def test_every_exercise_has_a_solution_and_a_check_that_asserts(stem):
    order = [tags & {"exercise", "solution", "check"} for tags, _ in code_cells(read(stem))]
    order = [next(iter(tags)) for tags in order if tags]
    assert order == ["exercise", "solution", "check"] * (len(order) // 3)
    for tags, text in code_cells(read(stem)):
        if "check" in tags:
            asserts = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Assert)]
            assert asserts and all(one.msg is not None for one in asserts)


@pytest.mark.parametrize("name", QUICK)
def test_it_runs(name, home):
    run_cells(name)
