"""The conventions of the book, held by reading every notebook; the instructor's page; and the main ones run small."""

import ast
import dataclasses
import re
import subprocess
import sys

import nbformat
import pytest
from fakes.notebooks import code_cells, run_cells
from IPython.display import display

from specdec import machine
from specdec.core.records import CYCLE_COLUMNS
from specdec.core.tree_config import TreeConfig
from specdec.costs import calibrate, measure

from workbook import book, notebooks, terms

FOLDER = machine.checkout() / "notebooks"
ENTRIES = book.read_book(FOLDER)
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
NOTEBOOKS = {name: notebooks.read_notebook(FOLDER / f"{name}.ipynb") for name in NAMES}
TAGS = {"parameters", "teach", "interactive", "exercise", "solution", "check"}
MAX_CELL_LINES, MAX_FUNCTION_LINES = 20, 5

every_notebook = pytest.mark.parametrize("name", NAMES)


def prose(name: str) -> list[str]:
    return [notebooks.source_of(cell) for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "markdown"]


def test_every_notebook_is_in_the_book():
    assert set(NAMES) == {entry.stem for entry in ENTRIES}


def test_every_notebook_is_tidy():
    """No outputs, no stray metadata, header lines as book.yml says; `python -m specdec.book tidy` mends them."""
    assert book.tidy_all(FOLDER, check=True) == []


@every_notebook
def test_it_is_a_valid_notebook(name):
    nbformat.validate(nbformat.from_dict(NOTEBOOKS[name]))
    for cell in NOTEBOOKS[name]["cells"]:
        assert set(cell["metadata"].get("tags", [])) <= TAGS
        assert notebooks.source_of(cell).strip(), "an empty cell"


@every_notebook
def test_headings(name):
    """One H1 with a promise below it; nothing numbered by hand."""
    title, promise = notebooks.title_and_promise(NOTEBOOKS[name])
    assert title and promise.endswith((".", "?"))
    headings = [line for text in prose(name) for line in re.sub(r"```.*?```", "", text, flags=re.S).splitlines()]
    headings = [line for line in headings if re.match(r"#+ ", line)]
    assert sum(line.startswith("# ") for line in headings) == 1
    assert not [line for line in headings if re.match(r"#+ \d+[.)]", line)]


@every_notebook
def test_parameters_are_literal_typed_and_commented(name):
    tagged = [number for number, (tags, _) in enumerate(code_cells(NOTEBOOKS[name])) if "parameters" in tags]
    assert tagged == [0], "the first code cell, and no other, is tagged parameters"
    source = code_cells(NOTEBOOKS[name])[0][1]
    lines = source.splitlines()
    assert lines[0].startswith('scale: str = "laptop"')
    for node in ast.parse(source).body:
        assert isinstance(node, ast.AnnAssign) and node.value is not None, "only typed assignments"
        ast.literal_eval(node.value)
        assert node.lineno == node.end_lineno and "#" in lines[node.lineno - 1], "one line each, with a comment"


@every_notebook
def test_parameters_are_checked_before_they_are_used(name):
    """Papermill's command line gives a list as text, whose letters would pass for its elements."""
    (_, parameters), (_, source), *_ = code_cells(NOTEBOOKS[name])
    given = {node.target.id for node in ast.parse(parameters).body}
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    checked = [
        line for line, text in enumerate(source.splitlines(), 1) if re.search(rf'book\.(open|check)\("{name}"', text)
    ]
    assert checked and all(node.lineno > checked[0] for node in names if node.id in given)


@pytest.mark.parametrize("scale", ["laptop", "paper"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_book_passes_known_parameters(entry, scale):
    book.Book(scale, FOLDER).parameters(entry, {})
    book.Book(scale, FOLDER).parameters(entry, entry.smoke)


@every_notebook
def test_cells_are_short_and_simple(name):
    for tags, source in code_cells(NOTEBOOKS[name]):
        lines = [line for line in source.splitlines() if line.strip()]
        assert len(lines) <= MAX_CELL_LINES or "parameters" in tags, source
        assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|work|mnt)/", source), "an absolute path"
        if "teach" in tags:
            continue
        for node in ast.walk(ast.parse(source)):
            assert not isinstance(node, ast.ClassDef), "a class outside a teach cell"
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is long; put it into specdec"


def test_notebooks_pass_the_linter():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, str(FOLDER)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


# Those that show what others measured run below; one of them also in a kernel of its own, for its pictures.
EXECUTED = [entry for entry in ENTRIES if entry.main and (not entry.may_read or entry.name == "62_radar")]


@pytest.mark.parametrize("entry", EXECUTED, ids=lambda entry: entry.name)
def test_it_runs(entry, home):
    """Every main notebook runs from start to end on the tiny pair and leaves the files that book.yml promises."""
    report = book.run(book.Book(), [entry.name], smoke=True, force=True)
    assert report["state"].tolist() == ["done"], report["note"].tolist()
    check_pictures(notebooks.read_notebook(report["copy"][0]))


def check_pictures(executed: dict) -> None:
    """Every picture is there as png beside svg, with a text in its place, and no output is an object's name."""
    for cell in executed["cells"]:
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            assert not "".join(shown.get("text/plain", "")).startswith(
                ("<IPython.core.display.SVG", "<Figure", "<matplotlib")
            )
            if {"image/svg+xml", "image/png"} & set(shown):
                assert {"image/svg+xml", "image/png"} <= set(shown), "a reader that hides one of them shows nothing"
                assert output["metadata"]["image/png"]["alt"] == "".join(shown["text/plain"])


def test_pictures_that_some_readers_hide_are_noticed():
    def executed(**data):
        return {"cells": [{"outputs": [{"data": data, "metadata": {"image/png": {"alt": "a line"}}}]}]}

    both = {"image/svg+xml": "<svg/>", "image/png": "...", "text/plain": "a line"}
    check_pictures(executed(**both))
    for fault in (
        {"text/plain": "<IPython.core.display.SVG object>"},
        {"image/svg+xml": "<svg/>", "text/plain": "a line"},
    ):
        with pytest.raises(AssertionError):
            check_pictures(executed(**fault))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["50_profile_cycle", "90_toy_pair", "91_evidence", "25_train_ppow", "43_ablate_ppow"])
def test_it_needs_nothing_else(name, home):
    run_cells(name)


TAUGHT = [entry for entry in ENTRIES if any("solution" in tags for tags, _ in code_cells(NOTEBOOKS[entry.stem]))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", TAUGHT, ids=lambda entry: entry.name)
def test_checks_fail_for_students_and_pass_with_solutions(entry, home):
    """Without solutions every check fails with a sentence, and nothing else does; with its solution each passes."""
    opened = book.Book()
    values = opened.parameters(entry, entry.smoke)
    student, solved, kinds = {"display": display}, {}, []
    for tags, source in code_cells(NOTEBOOKS[entry.name]):
        code = compile(source, entry.name, "exec")
        kinds += tags & {"exercise", "solution", "check"}
        if "solution" in tags:
            solved = dict(student)
            exec(code, solved)
        elif "check" in tags:
            with pytest.raises(AssertionError) as failure:
                exec(code, student)
            assert re.match(r"\w.{20,}[.!?]", str(failure.value)), f"unhelpful: {failure.value}"
            exec(code, solved)
        else:
            exec(code, student)
        student |= values if "parameters" in tags else {}
    assert kinds == ["exercise", "solution", "check"] * (len(kinds) // 3), "each exercise has a solution and a check"
    assert not opened.unwritten(entry, values)


def time_little(patch):
    """Calibrations of a few settings, answers timed in two turns, estimates from a few decisions: no cell needs more.

    How well a calibration measures on all of its settings is for costs/test_calibrate.
    """
    every = calibrate._checked

    def few(pair, config):
        return every(pair, dataclasses.replace(config, nodes=(0, 1, 2, 4, 8, 16, 60, 240), top_ks=(1, 2, 4, 10)))

    patch.setattr(calibrate, "_checked", few)
    patch.setattr(calibrate.measured_answer_ms, "__defaults__", (2,))
    patch.setattr(measure, "PIECE_S", 0.1)
    patch.setattr(terms, "PROBE", 16)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A home of results in which notebook 21 has recorded and calibrated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("recorded")))
        time_little(patch)
        run_cells("21_record_and_calibrate")
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "entry", [entry for entry in ENTRIES if entry.reads or entry.may_read], ids=lambda entry: entry.name
)
def test_it_runs_on_what_notebook_21_recorded(entry, recorded):
    run_cells(entry.name)


def test_the_instructors_page_follows_the_sections():
    """Each session's table lists its notebook's sections in order, in 90 minutes."""
    sessions = re.split(r"^## Session ", (FOLDER / "teaching.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    assert len(sessions) == 2
    for session in sessions:
        name = re.search(r"\]\((\w+)\.ipynb\)", session)[1]
        rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", session, flags=re.M)
        text = "\n".join(prose(name))
        sections = re.findall(r"^## (.+)$", text, flags=re.M)
        assert [title.strip() for _, title in rows] == sections[: len(rows)] and len(sections) <= len(rows) + 1
        assert sum(int(minutes) for minutes, _ in rows) == 90


def test_words_and_units_of_the_code_are_explained():
    """Every column of a cycle, in its order, and every number of a tree but RADAR's."""
    text = "\n".join(prose("02_words_and_units"))
    tables = {
        title: re.findall(r"^\| `(\w+)`", part, flags=re.M) for title, part in re.findall(r"## (.+)\n([^#]*)", text)
    }
    assert tables["Columns of a cycle"] == list(CYCLE_COLUMNS)
    assert {field.name for field in dataclasses.fields(TreeConfig)} - set(tables["Numbers of a tree"]) <= {"flat_nodes"}
