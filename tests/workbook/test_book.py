"""The book on a small made-up folder of notebooks: what runs, what is refused, what is stale."""

import json

import pytest
from fakes.notebooks import cell, execute_here, notebook

from specdec import machine, runs
from specdec.errors import SpecdecError

from workbook import book, notebooks

WRITE = """from specdec import runs
runs.write_text(runs.runs_dir(scale) / '{name}.txt', f'{{scale}} {{seed}} {{rate}}')"""
BOOK = """
- {name: 00_first, main: true, writes: ["runs/{scale}/first.txt"], cost: {laptop: 1 s},
   parameters: {laptop: {seed: 1}, paper: {seed: 2}}}
- {name: 10_second, main: true, reads: {first: "runs/{scale}/first.txt"},
   writes: ["runs/{scale}/second.txt"]}
- {name: 20_third}
"""


@pytest.fixture
def folder(home, monkeypatch):
    """A small book, which is the one that commands and notebooks find."""
    monkeypatch.setattr(book.Book, "code", "this source")
    monkeypatch.setattr(book, "notebooks_folder", lambda: home / "notebooks")
    place = home / "notebooks"
    place.mkdir()
    (place / "book.yml").write_text(BOOK)
    (place / "00_first.ipynb").write_text(notebook("First", WRITE.format(name="first")))
    (place / "10_second.ipynb").write_text(notebook("Second", WRITE.format(name="second")))
    (place / "20_third.ipynb").write_text(notebook("Third", "print(seed)"))
    return place


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(notebooks, "execute", execute_here)


def run(scale="laptop", *, folder, **options):
    return book.run(book.Book(scale, folder), **options)


def states(report) -> dict:
    return dict(zip(report["name"], report["state"], strict=True))


def test_notebooks_run_once_and_again_when_stale(no_kernels, folder, monkeypatch):
    assert states(run(folder=folder)) == {"00_first": "done", "10_second": "done"}
    assert (runs.runs_dir() / "first.txt").read_text() == "laptop 1 0.5"
    assert states(run(folder=folder)) == {"00_first": "fresh", "10_second": "fresh"}
    # another source, another input, a lost output, another package
    (folder / "00_first.ipynb").write_text(notebook("First", WRITE.format(name="first") + "\nseed"))
    assert states(run(folder=folder)) == {"00_first": "done", "10_second": "fresh"}
    changed = run(folder=folder, only=["00"], parameters={"seed": 9})
    assert states(changed) == {"00_first": "done"}
    assert states(run(folder=folder, only="10")) == {"10_second": "done"}
    (runs.runs_dir() / "second.txt").unlink()
    assert states(run(folder=folder, only="10")) == {"10_second": "done"}
    assert states(run(folder=folder, only="10", force=True)) == {"10_second": "done"}
    monkeypatch.setattr(book.Book, "code", "another source")
    assert book.Book(folder=folder).state(book.read_book(folder)[1]) == "stale"
    other = run("paper", only="00", folder=folder, parameters={"rate": 1})
    assert states(other) == {"00_first": "done"}
    assert (runs.runs_dir("paper") / "first.txt").read_text() == "paper 2 1"


def test_a_kernel_runs_a_notebook_and_says_by_what(folder):
    assert states(run(folder=folder, only="20", parameters={"seed": 4})) == {"20_third": "done"}
    copy = notebooks.read_notebook(runs.runs_dir() / "notebooks" / "20_third.ipynb")
    assert notebooks.source_of(copy["cells"][2]) == "# Parameters\nseed = 4\n"
    assert copy["cells"][3]["outputs"][0]["text"] == ["4\n"]
    assert copy["metadata"]["executed"]["cpu"] == machine.hardware()["cpu"]


def test_a_failing_notebook_stops_only_its_readers(no_kernels, folder):
    (folder / "00_first.ipynb").write_text(notebook("First", "1 / 0"))
    report = run(folder=folder, everything=True)
    assert states(report) == {"00_first": "failed", "10_second": "skipped", "20_third": "done"}
    assert "ZeroDivisionError" in report["note"][0] and "00_first" in report["note"][1]
    assert states(run(folder=folder, only="00")) == {"00_first": "failed"}


def test_a_disturbed_measurement_is_no_result_until_it_is_measured_again(no_kernels, folder):
    rows = runs.write_text(runs.runs_dir() / "busy-1" / "rows", "disturbed")
    code = "from specdec import runs\nhere = (runs.runs_dir() / 'busy-1').exists()\n"
    code += "print('the ratios of busy-1 are', *['no result'] * here)"
    (folder / "20_third.ipynb").write_text(notebook("Third", code))
    for _ in range(2):
        report = run(folder=folder, only="20")
        assert states(report) == {"20_third": "disturbed"} and rows.is_file()
        assert "specdec book run --only 20_third --force" in report["note"][0]
    assert "| disturbed |" in book.contents(folder=folder)
    assert states(run(folder=folder, only="20", force=True)) == {"20_third": "done"}
    assert states(run(folder=folder, only="20")) == {"20_third": "fresh"} and not rows.exists()


def test_a_complete_copy_stays_until_a_new_one_is_complete(no_kernels, folder):
    assert states(run(folder=folder, only="20")) == {"20_third": "done"}
    copy = runs.runs_dir() / "notebooks" / "20_third.ipynb"
    complete = copy.read_bytes()
    (folder / "20_third.ipynb").write_text(notebook("Third", "1 / (seed - 3)"))
    report = run(folder=folder, only="20", parameters={"seed": 3})
    assert states(report) == {"20_third": "failed"} and copy.read_bytes() == complete
    unfinished = copy.with_name("20_third.unfinished.ipynb")
    assert unfinished.is_file() and str(unfinished) in report["note"][0]
    assert book.Book(folder=folder).state(book.read_book(folder)[2]) == "stale"
    assert states(run(folder=folder, only="20")) == {"20_third": "done"}
    assert copy.read_bytes() != complete and not unfinished.exists()


@pytest.mark.parametrize("how", ["file", "in a folder", "in a list", "of a kind", "SPECDEC_DATA"])
def test_a_key_holds_the_content_of_all_that_is_named(folder, monkeypatch, how):
    """Costs, recordings, policies, a pair's weights, prompts."""
    place = folder.parent / "mine"
    file = runs.write_text(place / "drafter" / "model.safetensors", "weights")
    named = {"file": str(file), "in a folder": "mine", "in a list": [["small", str(place)]]}
    named |= {"of a kind": f"lm:{place}", "SPECDEC_DATA": "x" * 3000}
    if how == "SPECDEC_DATA":
        monkeypatch.setenv(how, str(place))
    opened = book.Book(folder=folder)

    def key():
        return opened.key(opened.entries[2], {"seed": 1, "what": {"here": named[how]}})

    first = key()
    assert key() == first
    file.write_text("changed")
    changed = key()
    file.rename(file.with_name("other.safetensors"))
    assert len({first, changed, key()}) == 3


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [("00_first", "1 + 1", "promises"), ("10_second", "1 + 1", "00_first")],
)
def test_what_went_wrong_is_noted(no_kernels, folder, name, code, word):
    (folder / f"{name}.ipynb").write_text(notebook("Another", code))
    report = run(folder=folder, only=name)
    assert report["state"][0] == "failed" and word in report["note"][0]


@pytest.mark.parametrize(
    "options",
    [
        {"parameters": {"sede": 1}},
        {"parameters": {"seed": "many"}},
        {"parameters": {"seed": True}},
        {"parameters": {"seed": -1}},
        {"parameters": {"repeats": 0}},
        {"only": [""]},
        {"only": ["21"]},
        {"scale": "labtop"},
    ],
)
def test_bad_requests_stop_before_anything_runs(no_kernels, folder, options):
    pytest.raises(SpecdecError, run, folder=folder, **options)
    assert not (folder.parent / "runs").exists()


def test_each_makes_one_entry_per_combination(folder):
    line = '- {name: "20_third__{seed}_{rate}", notebook: 20_third,'
    line += " each: {seed: [1, 2], rate: [0.5, 1.0]}, parameters: {laptop: {scale: laptop}}}"
    (folder / "book.yml").write_text(line)
    opened = book.Book(folder=folder)
    names = [entry.name for entry in opened.entries]
    assert names == ["20_third__1_0.5", "20_third__1_1", "20_third__2_0.5", "20_third__2_1"]
    assert opened.parameters(opened.entries[3], {})["seed"] == 2
    assert len(opened.choose("20_third__2")) == 2
    pytest.raises(SpecdecError, opened.choose, "20")


def test_tidy_takes_outputs_off_and_writes_the_first_cell(folder):
    assert book.tidy_all(folder, check=True) == ["00_first", "10_second", "20_third"]
    book.tidy_all(folder)
    assert book.tidy_all(folder) == []
    first = notebooks.read_notebook(folder / "10_second.ipynb")["cells"][0]
    text = notebooks.source_of(first)
    kept = notebooks.read_notebook(folder / "10_second.ipynb")["metadata"]["language_info"]
    assert kept["file_extension"] == ".py"
    assert "runs/{scale}/first.txt" in text and "[← previous](00_first.ipynb)" in text


def test_a_notebook_opens_its_run_and_names_what_is_missing(folder):
    values = {"scale": "laptop", "seed": 0, "rate": 0.5, "repeats": 1}
    with pytest.raises(SpecdecError, match="00_first"):
        book.open("10_second", values)
    runs.write_text(runs.runs_dir() / "first.txt", "here")
    opened = book.open("10_second", values)
    assert opened.figures == "second" and opened.values["seed"] == 0
    runs.write_text(runs.runs_dir() / "first.txt", "changed")
    assert book.open("10_second", values).key != opened.key
    with pytest.raises(SpecdecError, match="int"):
        book.open("10_second", {**values, "seed": "one"})


def test_the_student_edition_has_no_solutions(folder, tmp_path):
    text = json.loads((folder / "20_third.ipynb").read_text())
    text["cells"] += [
        cell("code", "x = None", 10, ["exercise"]),
        cell("code", "x = 1", 11, ["solution"]),
        cell("code", "assert x == 1, 'one'", 12, ["check"]),
        cell("markdown", "[there](00_first.ipynb) **Open.**", 13, ["exercise"]),
    ]
    (folder / "20_third.ipynb").write_text(json.dumps(text))
    (path,) = book.write_student_edition(tmp_path / "out", folder)
    cells = {one["id"]: one for one in notebooks.read_notebook(path)["cells"]}
    assert "cell-11" not in cells and cells["cell-10"]["metadata"]["nbgrader"]["solution"]
    assert cells["cell-12"]["metadata"]["nbgrader"]["points"] == 1
    assert "raises-exception" in cells["cell-12"]["metadata"]["tags"]
    assert cells["cell-13"]["source"] == "there **Open.**"
    assert cells["cell-13"]["metadata"]["nbgrader"]["points"] == 2
