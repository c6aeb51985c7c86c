"""The book on a small made-up folder of notebooks: what runs, what is refused, what is stale, what failure leaves."""

import json
import re
import subprocess
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
from fakes.notebooks import PARAMETERS, cell, execute_here, notebook

from specdec import machine, runs
from specdec.errors import SpecdecError
from specdec.tools import cli

from workbook import book, lab, lessons, notebooks

WRITE = "from specdec import runs\nruns.write_text(runs.runs_dir(scale) / '{name}.txt', f'{{scale}} {{seed}} {{rate}}')"
BOOK = """
- {name: 00_first, main: true, writes: ["runs/{scale}/first.txt"], cost: {laptop: 1 s},
   parameters: {laptop: {seed: 1}, paper: {seed: 2}}}
- {name: 10_second, main: true, reads: ["runs/{scale}/first.txt"], writes: ["runs/{scale}/second.txt"]}
- {name: 20_third}
"""


@pytest.fixture
def folder(home, monkeypatch):
    """A small book, which is the one that commands and notebooks find."""
    monkeypatch.setattr(book.Book, "code", "this source")  # someone may be editing it meanwhile
    monkeypatch.setattr(book, "notebooks_folder", lambda: home / "notebooks")
    made = home / "notebooks"
    made.mkdir()
    (made / "book.yml").write_text(BOOK)
    (made / "00_first.ipynb").write_text(notebook("First", WRITE.format(name="first")))
    read = "print(runs.read_text()) if False else print((runs.runs_dir(scale) / 'first.txt').read_text())"
    (made / "10_second.ipynb").write_text(notebook("Second", WRITE.format(name="second"), read))
    (made / "20_third.ipynb").write_text(notebook("Third", "print(seed)"))
    return made


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(notebooks, "execute", execute_here)


def run(scale="laptop", *, folder, **options):
    return book.run(book.Book(scale, folder), **options)


def states(report) -> dict:
    return dict(zip(report["name"], report["state"], strict=True))


def outputs(name: str, scale="laptop") -> str:
    cells = json.loads((runs.runs_dir(scale) / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    streams = [output for one in cells for output in one.get("outputs", []) if output["output_type"] == "stream"]
    return "".join("".join(output["text"]) for output in streams)


def test_the_main_notebooks_run_once_and_again_when_stale(no_kernels, folder, monkeypatch):
    assert states(run(folder=folder)) == {"00_first": "done", "10_second": "done"}
    assert (runs.runs_dir() / "first.txt").read_text() == "laptop 1 0.5"
    assert "laptop 1 0.5" in outputs("10_second")
    assert states(run(folder=folder)) == {"00_first": "fresh", "10_second": "fresh"}
    # a new source runs the first again; the second follows because the file it reads has changed
    (folder / "00_first.ipynb").write_text(notebook("First", WRITE.format(name="first") + "\nseed"))
    assert states(run(folder=folder)) == {"00_first": "done", "10_second": "fresh"}
    assert states(run(folder=folder, only=["00"], parameters={"seed": 9})) == {"00_first": "done"}
    assert states(run(folder=folder, only="10")) == {"10_second": "done"}
    (runs.runs_dir() / "second.txt").unlink()
    assert states(run(folder=folder, only="10")) == {"10_second": "done"}
    monkeypatch.setattr(book.Book, "code", "another source")
    assert book.Book(folder=folder).state(book.read_book(folder)[1]) == "stale"
    assert states(run("paper", only="00", folder=folder, parameters={"rate": 1})) == {"00_first": "done"}
    assert (runs.runs_dir("paper") / "first.txt").read_text() == "paper 2 1"


def test_force_and_parallel_order(folder):
    bar = "import time\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(3), mininterval=0): time.sleep(0.01)"
    (folder / "20_third.ipynb").write_text(notebook("Third", bar))
    report = run(folder=folder, everything=True, jobs=2)
    assert states(report) == {"00_first": "done", "10_second": "done", "20_third": "done"}
    assert "laptop 1 0.5" in outputs("10_second")
    copy = runs.runs_dir() / "notebooks" / "20_third.ipynb"
    assert outputs("20_third") == "" and len(notebooks.read_notebook(copy)["cells"]) == 3
    assert states(run(folder=folder, only="20", force=True, parameters={"seed": 4})) == {"20_third": "done"}
    executed = notebooks.read_notebook(copy)
    assert notebooks.source_of(executed["cells"][2]) == "# Parameters\nseed = 4\n"
    assert executed["metadata"]["executed"]["cpu"] == machine.hardware()["cpu"]


def test_what_another_command_runs_is_no_part_of_the_whole_book(no_kernels, folder):
    text = (folder / "book.yml").read_text()
    (folder / "book.yml").write_text(text.replace("{name: 20_third}", "{name: 20_third, apart: make train}"))
    assert states(run(folder=folder, everything=True)) == {"00_first": "done", "10_second": "done"}
    assert states(run(folder=folder, only="20")) == {"20_third": "done"}
    whole = book.Book(folder=machine.checkout() / "notebooks")
    by_others = {entry.name: entry.apart for entry in whole.entries if entry.apart}
    training = dict.fromkeys(("25_train_ppow", "43_ablate_ppow"), "make train WHAT=ppow")
    alone = {
        name: f"python -m specdec.book run --only {name}"
        for name in ("35_more_evidence", "36_one_decision", "34_one_pass__")
    }
    one_pass = alone.pop("34_one_pass__")
    alone |= {"34_one_pass__small": one_pass, "34_one_pass__smollm2": one_pass}
    other = alone | {"55_other_traces": "python -m specdec.book run --only 55", "91_evidence": "specdec evidence"}
    assert by_others == training | other


def test_bad_requests_stop_before_anything_runs_and_a_bad_book_gets_one_sentence(folder):
    for arguments, message in (
        ({"parameters": {"sede": 1}}, "unknown parameter of 00_first 'sede'; did you mean 'seed'"),
        ({"parameters": {"seed": "many"}}, "parameter seed of 00_first is of type int, got 'many'"),
        ({"parameters": {"seed": True}}, "of type int, got True"),
        ({"only": [""]}, "the name of a notebook is empty"),
        ({"only": ["21_thirt"]}, "unknown notebook '21_thirt'; did you mean '20_third'"),
        ({"scale": "labtop"}, "unknown scale 'labtop'; did you mean 'laptop'"),
    ):
        pytest.raises(SpecdecError, run, folder=folder, **arguments).match(message)
        assert not (folder.parent / "runs").exists()
    for default, fits, not_one in (
        ([0.05, 0.2], [1, 0.5], ["NaN"]),
        ([0.05, 0.2], [], [float("nan")]),
        ([1, 2], [3], [1.5]),
        ([1, 2], [3], [True]),
        (["a"], ["b"], [1]),
        ([[4, 2], [1]], [[3]], [3]),
        ([[4, 2.5], [1]], [[3]], [["NaN"]]),
        (0.5, 1, float("nan")),
        ([1, "a"], ["b", 2, 0.5], "text"),
    ):
        given = "12_decisions", {"thresholds": default}, "thresholds"
        book._check_parameter(*given, fits)
        wrong = pytest.raises(SpecdecError, book._check_parameter, *given, not_one)
        wrong.match("parameter thresholds of 12_decisions is ")
    for text, message in (
        ("- {name: 00_first, raeds: [x]}", "unknown key in book.yml 'raeds'; did you mean 'reads'"),
        ("- {name: 00_fist}", "lists 00_fist, but there is no .*00_fist.ipynb"),
        ("- {name: 00_first}\n- {name: 00_first}", "lists 00_first twice"),
        ("name: 00_first", "must be a list"),
        ("- {name: [}", "cannot be read as YAML"),
        ("- {name: 00_first, cost: {labtop: 1 s}}", "did you mean 'laptop'"),
    ):
        (folder / "book.yml").write_text(text)
        pytest.raises(SpecdecError, book.read_book, folder).match(message)


def test_a_failing_notebook_leaves_its_copy_and_stops_only_its_readers(folder):
    (folder / "00_first.ipynb").write_text(notebook("First", "print('so far')", "1 / 0", "print('never')"))
    report = run(folder=folder, everything=True)
    assert states(report) == {"00_first": "failed", "10_second": "skipped", "20_third": "done"}
    assert "cell 4 raised ZeroDivisionError: division by zero" in report["note"][0]
    assert outputs("00_first") == "so far\n"
    assert "its input failed: 00_first" in report["note"][1]
    assert states(run(folder=folder, only="00")) == {"00_first": "failed"}  # a failure is never fresh


def test_a_pair_that_cannot_be_had_is_replaced_with_a_sentence(no_kernels, folder, monkeypatch, capsys):
    source = notebook("Third", "print(pair)").replace("seed: int = 0", "pair: str = 'dear'  # a pair\\nseed: int = 0")
    (folder / "20_third.ipynb").write_text(source)
    monkeypatch.setattr("workbook.book.pair_at_hand", lambda name: ("cheap", f"cheap stands in for {name}."))
    assert states(run(folder=folder, only=["10", "20"])) == {"10_second": "failed", "20_third": "done"}
    assert outputs("20_third") == "cheap\n" and "cheap stands in for dear." in capsys.readouterr().out


def test_headlines_are_printed_before_what_stands_and_the_place_of_the_page(no_kernels, folder, capsys):
    (folder / "book.yml").write_text(BOOK.replace("cost: {laptop: 1 s}", 'headline: "runs/{scale}/first.txt"'))
    for state in ("done", "fresh"):
        report = run(folder=folder)
        printed = capsys.readouterr().out
        assert printed.index(f"10_second: {state}") < printed.index("first.txt\n\nlaptop 1 0.5")
    opened = book.Book(folder=folder)
    opened.copy(opened.entries[1]).unlink()
    path = book.write_page(opened, report.attrs["headlines"])
    claimed, listed, last = capsys.readouterr().out.splitlines()
    assert claimed.startswith("claims: ") and listed.startswith("items: 47 not measured") and last.endswith(str(path))
    text = path.read_text()
    assert 'href="notebooks/00_first.ipynb"' in text and "10_second.ipynb" not in text and "laptop 1 0.5" in text
    (folder / "00_first.ipynb").write_text(notebook("First", "1 / 0"))
    run(folder=folder)
    assert "first.txt" not in capsys.readouterr().out


KILL = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("name", "code", "note"),
    [
        ("20_third", [KILL], "the kernel stopped"),
        ("00_first", ["1 + 1"], "did not write runs/laptop/first.txt"),
        ("10_second", [], "needs runs/laptop/first.txt, which 00_first writes; run it first"),
    ],
)
def test_what_went_wrong_is_noted(folder, name, code, note):
    (folder / f"{name}.ipynb").write_text(notebook("Another", *code))
    report = run(folder=folder, only=name)
    assert states(report) == {name: "failed"} and note in report["note"][0]


PAIRED = "- {name: 00_first, writes: ['runs/{pair}.txt']}\n- {name: 10_second}\n- {name: 20_third}"


def test_a_missing_input_says_with_which_pair_to_write_it(folder):
    for name, pair in (("00_first", "a"), ("10_second", "b")):
        (folder / f"{name}.ipynb").write_text(notebook("N").replace("rate: float = 0.5", f"pair: str = '{pair}'"))
    (folder / "book.yml").write_text(PAIRED.replace("10_second", "10_second, reads: ['runs/{pair}.txt']"))
    report = run(folder=folder, only="10")
    assert "needs runs/b.txt, which 00_first (-p pair b) writes; run it first" in report["note"][0]


def test_a_folder_is_a_pair_of_notebooks(no_kernels, folder, monkeypatch, capsys):
    mine = folder.parent / "mine" / "target"
    mine.mkdir(parents=True)
    (mine / "config.json").write_text("{}")
    for name, text in (("00_first", "pair: str = 'tiny'"), ("10_second", "pairs: list = ['tiny']")):
        (folder / f"{name}.ipynb").write_text(notebook("N", WRITE.format(name="x")).replace("rate: float = 0.5", text))
    (folder / "book.yml").write_text(PAIRED)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("SPECDEC_CONFIG", str(folder.parent / "config"))  # the folder gets a name there
    opened = book.Book(folder=folder)
    settings = book._settings_of(opened, opened.entries, False, {"pair": "mine", "seed": 4})
    assert "-p pair is no parameter of 20_third, which runs without it" in capsys.readouterr().out
    assert [settings[name].get("pair") for name in settings] == [str(mine.parent), None, None]
    assert settings["10_second"]["pairs"] == [str(mine.parent)] and {one["seed"] for one in settings.values()} == {4}
    assert opened.writes(opened.entries[0], settings["00_first"]) == ["runs/mine.txt"]
    assert book._settings_of(opened, opened.entries, False, {"pairs": ["small"]})["00_first"]["pair"] == "small"
    values = {**settings["00_first"], "In": []}
    assert book._given(opened, opened.entries[0], values)["pair"] == values["pair"] == "mine"
    misspelt = pytest.raises(SpecdecError, run, folder=folder, only="0", parameters={"pair": "mien"})
    misspelt.match("unknown preset 'mien'; did you mean")


GRAPH = """
- {name: 10_second, reads: {rate: "runs/{scale}/seed-{seed}.txt"}, writes: ["runs/{scale}/second.txt"]}
- {name: 00_first, writes: ["runs/{scale}/seed-*.txt"]}
- {name: 20_third, reads: ["runs/{scale}/second.txt"]}
"""


def test_a_reader_runs_after_its_writer_wherever_it_stands(no_kernels, folder):
    first, second = BOOK.index("- {name: 00_first"), BOOK.index("- {name: 10_second")
    (folder / "book.yml").write_text(BOOK[second:] + BOOK[first:second])
    report = run(folder=folder)
    assert states(report) == {"10_second": "done", "00_first": "done"}
    assert report["name"].tolist() == ["10_second", "00_first"] and "laptop 1 0.5" in outputs("10_second")


def test_a_parameter_takes_the_place_of_a_file(folder):
    (folder / "book.yml").write_text(GRAPH)
    opened = book.Book(folder=folder)
    second, first, third = opened.entries
    assert opened.reads(second, {"rate": 0.0, "seed": 7}) == {"rate": "runs/laptop/seed-7.txt"}
    assert opened.reads(second, {"rate": 0.5, "seed": 7}) == {}
    assert [opened.filled(second, "runs/{of}/x", {"of": of}) for of in ("", "a")] == ["runs/x", "runs/a/x"]
    settings = {entry.name: {"rate": 0.0, "seed": 7} for entry in opened.entries}
    needs = {"10_second": ["00_first"], "00_first": [], "20_third": ["10_second"]}
    assert opened.needs(opened.entries, settings) == needs
    (folder / "book.yml").write_text(GRAPH.replace("00_first, ", '00_first, reads: ["runs/{scale}/second.txt"], '))
    circular = pytest.raises(SpecdecError, run, folder=folder, everything=True, parameters={"rate": 0.0})
    circular.match("read each other's files in a circle")


def test_what_may_be_read_is_waited_for_and_not_missed(folder, monkeypatch):
    text = BOOK.replace("{name: 20_third}", '{name: 20_third, may_read: ["runs/{scale}/*.txt"]}')
    (folder / "book.yml").write_text(text)
    opened = book.Book(folder=folder)
    third, values = opened.entries[-1], {"rate": 0.5, "seed": 1}
    settings = {entry.name: values for entry in opened.entries}
    assert opened.needs(opened.entries, settings)["20_third"] == ["00_first", "10_second"]
    assert opened.needs(opened.entries, settings, may_read=False)["20_third"] == []
    before = opened.key(third, values)
    runs.write_text(runs.runs_dir() / "first.txt", "new")
    assert opened.key(third, values) != before
    monkeypatch.setattr(book.notebooks, "execute", lambda source, copy, *_: (0.0, "no" * source.stem.startswith("00")))
    report = run(folder=folder, everything=True, force=True)
    assert states(report) == {"00_first": "failed", "10_second": "skipped", "20_third": "done"}
    headed = book.header(notebooks.read_notebook(folder / "20_third.ipynb"), third, opened.entries)
    assert "`runs/{scale}/*.txt`" in headed


EACH = """
- {name: 00_first}
- {name: 10_second}
- name: 20_third__{seed}__{rate}
  notebook: 20_third
  each: {seed: [1, 2], rate: [0.5, 1.0]}
  parameters: {paper: {rate: 4.0}}
  writes: ["runs/{scale}/third-{seed}.txt"]
- {name: 20_third}
"""


def test_one_line_stands_for_an_entry_per_combination(folder):
    (folder / "book.yml").write_text(EACH)
    opened = book.Book(folder=folder)
    names = ["20_third__1__0.5", "20_third__1__1", "20_third__2__0.5", "20_third__2__1"]
    assert [entry.name for entry in opened.choose("20_third__")] == names
    assert [entry.name for entry in opened.choose(["20", "20_third"])] == ["20_third"], "the others only by their names"
    last = opened.choose("20_third__2__1")[0]
    assert opened.parameters(last, {}) == {"scale": "laptop", "seed": 2, "rate": 1.0}
    assert book.Book("paper", folder).parameters(last, {})["rate"] == 4.0
    assert opened.source(last).name == "20_third.ipynb" and opened.copy(last).name == "20_third__2__1.ipynb"
    assert opened.writes(last, {"seed": 2}) == ["runs/laptop/third-2.txt"]
    rows = [book.contents(folder=folder, executed=executed).splitlines()[2:] for executed in (False, True)]
    assert rows[0][2:] == [rows[0][2], "| 4 more | 20_third (4 sets of parameters) | | | never run |"]
    assert rows[1] == ["| 7 more | 00_first, 10_second, 20_third (5 sets of parameters) | | | never run |"]
    book.tidy_all(folder)
    assert book.tidy_all(folder, check=True) == [], "of entries that share a notebook, the first heads it"


def test_the_commands_keep_to_their_hours_by_what_the_book_says():
    opened = book.Book("laptop")
    for command, main_only, most in (("make reproduce", True, 15), ("make book", False, 180)):
        entries = [entry for entry in opened.entries if not entry.apart and (entry.main or not main_only)]
        told = [book.minutes_of(entry.cost.get("laptop", ""), opened.parameters(entry, {})) for entry in entries]
        assert most / 2 < sum(told) <= most, command


def test_what_it_will_take_is_said_first_and_contents_tell_the_state(no_kernels, folder, capsys):
    cost = "2 min, and `rate` of training"
    (folder / "book.yml").write_text(BOOK.replace("cost: {laptop: 1 s}", f'cost: {{laptop: "{cost}"}}'))
    opened = book.Book(folder=folder)
    entries = {entry.name: entry for entry in opened.entries}
    settings = {name: opened.parameters(entry, {}) for name, entry in entries.items()}
    told = "3 of 3 notebooks to run, about 2 minutes on two idle cores by what book.yml says."
    assert book.estimate(opened, entries, settings) == told
    assert book.minutes_of("1.5 h", {}) == 90 and book.minutes_of("seconds", {}) == 0 == book.minutes_of("", {})
    run(folder=folder, only=["20"])
    assert capsys.readouterr().out.startswith("1 of 1 notebooks to run.\n")
    run(folder=folder, only=["20"])
    assert capsys.readouterr().out.startswith("0 of 1 notebooks to run.\n")
    table = book.contents(folder=folder).splitlines()
    assert len(table) == 2 + 3 and table[4].endswith("| fresh |")
    assert f"[00_first](00_first.ipynb) First | Promises First. | none | {cost} | never run |" in table[2]


def test_what_papermill_was_given_by_hand_is_checked_inside(folder):
    """Its command line gives lists and numbers as text; it injects unknown names and only warns."""
    cells = ["", PARAMETERS, '# Parameters\nseed = "7"\nsede = 3\n', "x = 1"]
    values = {"scale": "laptop", "seed": "7", "rate": 0.5, "In": cells}
    pytest.raises(SpecdecError, book.open, "00_first", values).match("parameter of 00_first 'sede'.*seed")
    cells[2] = '# Parameters\nseed = "7"\n'
    assert book.open("00_first", values).values["seed"] == 7 == values["seed"]
    opens = pytest.raises(SpecdecError, book.open, "00_first", values | {"rate": "fast"})
    opens.match("parameter rate of 00_first is of type float, got 'fast'")
    early = values | {"seed": "[8]", "rate": "0.25"}
    checks = pytest.raises(SpecdecError, book.check, "00_first", early)
    checks.match(r"parameter seed of 00_first is of type int, got \[8\]")
    early["seed"] = "8"
    book.check("00_first", early)
    assert (early["seed"], early["rate"]) == (8, 0.25)
    pytest.raises(SpecdecError, book.check, "00_fist", early).match("notebook '00_fist'.*00_first")


def test_a_notebook_opens_its_run(folder, monkeypatch):
    values = {"scale": "laptop", "seed": 1, "rate": 0.5, "other": object()}
    needed = "10_second needs runs/laptop/first.txt, which 00_first writes; run it first"
    pytest.raises(SpecdecError, book.open, "10_second", values).match(needed)
    monkeypatch.setattr(runs, "shipped_dir", lambda: folder.parent / "figures" / "measured")
    for place in (runs.shipped_dir(), runs.runs_dir()):  # what came with the checkout serves where nothing is here
        path = runs.write_text(place / "first.txt", "one")
        assert book.found_files("runs/laptop/first.txt") == [path]
    first = book.open("10_second", values)
    assert first.record()["config"]["parameters"] == {"scale": "laptop", "seed": 1, "rate": 0.5}
    assert book.open("10_second", values) == first
    assert book.open("10_second", values | {"seed": 2}).directory != first.directory
    runs.write_text(runs.runs_dir() / "first.txt", "two")
    assert book.open("10_second", values).directory != first.directory
    assert book.open("10_second", values, run=first).directory == first.directory


def test_what_is_shown_is_saved_and_no_wider_than_a_cell(folder, capsys):
    import matplotlib.figure

    opened = book.open("00_first", {"scale": "laptop", "seed": 1, "rate": 0.5})
    table = pd.DataFrame({"method": ["plain"], "speedup": [1.0625]}).set_index("method")
    figure = matplotlib.figure.Figure()
    figure.subplots().plot([0, 1])
    opened.show(figure, "line", data=table)
    opened.show_table(table, "speeds", "Speeds:", digits=3)
    saved = {path.name for path in runs.figure_path("first", "line").parent.iterdir()}
    kinds = {"line": ("svg", "pdf", "png", "csv", "json"), "speeds": ("md", "csv", "json")}
    assert saved == {f"{name}.{kind}" for name, some in kinds.items() for kind in some}
    assert "1.062" in runs.figure_path("first", "speeds").with_suffix(".md").read_text()
    (row,) = runs.read_json(runs.figure_path("first", "line").with_suffix(".json"))["measured"]
    assert row["key"] == opened.key and "first, line" in capsys.readouterr().out
    wide = '<?xml version="1.0"?><svg height="100pt" width="1380pt" viewBox="0 0 9 9"><g width="1380pt"/></svg>'
    assert book.within_cell(wide) == wide.replace('height="100pt" width="1380pt"', 'height="50pt" width="690pt"')
    small = wide.replace("1380", "600")
    assert book.within_cell(small) == small and book.within_cell("<svg/>") == "<svg/>"


def test_tidy_strips_outputs_and_writes_headers(folder):
    path = folder / "10_second.ipynb"
    dirty = json.loads(path.read_text())
    dirty["cells"][2] |= {"execution_count": 3, "outputs": [{"output_type": "stream", "name": "stdout", "text": "x"}]}
    dirty["metadata"]["papermill"] = {"duration": 1}
    path.write_text(json.dumps(dirty))
    assert "10_second" in book.tidy_all(folder, check=True)
    assert json.loads(path.read_text()) == dirty  # checking changes nothing
    book.tidy_all(folder)
    assert book.tidy_all(folder, check=True) == []
    clean = json.loads(path.read_text())
    assert clean["cells"][2]["outputs"] == [] and clean["cells"][2]["execution_count"] is None
    assert "papermill" not in clean["metadata"]
    first = notebooks.source_of(clean["cells"][0]).splitlines()
    assert first[0] == "# Second" and first[2] == "> Promises Second."
    links = "[← previous](00_first.ipynb) · [contents](00_start_here.ipynb) · [next →](20_third.ipynb)"
    assert first[4] == links and first[6] == "**Cost** seconds · **Paper items** none"
    assert first[10] == "**Reads** `runs/{scale}/first.txt` · **Writes** `runs/{scale}/second.txt`"
    runs.write_text(folder / book.PAGES / "10_second.md", "# Second")
    book.tidy_all(folder)
    assert f"[executed page](../figures/book/10_second.md) · {links}" in path.read_text()


CHECK = 'from specdec.tools import book\n\nfrom workbook.exercises import check\n\ncheck("12.when", solved=True)'


def test_the_student_edition_leaves_the_solutions_out(folder, capsys):
    taught = json.loads((folder / "20_third.ipynb").read_text())
    taught["cells"] += [
        cell("markdown", "See [the first](00_first.ipynb), [this](20_third.ipynb), [more](https://a.example).", 3),
        cell("code", "smallest_n = None", 4, ["exercise"]),
        cell("code", "smallest_n = 9", 5, ["solution"]),
        cell("code", CHECK, 6, ["check"]),
        cell("code", "print('to the end')", 7),
    ]
    source, handed = folder / "20_third.ipynb", folder.parent / "handed in.ipynb"
    source.write_text(json.dumps(taught))
    report = run(folder=folder, only="20")
    assert report["state"].tolist() == ["failed"] and "AssertionError: With N = 9 asking takes" in report["note"][0]
    taught["cells"][-3]["source"] = ["smallest_n = 10"]
    source.write_text(json.dumps(taught))
    assert run(folder=folder, only="20")["state"].tolist() == ["done"]  # with solutions every check passes
    book.tidy_all(folder)
    folded = {"jupyter": {"source_hidden": True}, "tags": ["solution"]}
    assert json.loads(source.read_text())["cells"][-3]["metadata"] == folded
    assert cli.main(["book", "student", "--out", str(folder.parent / "class")]) == 0
    [written] = folder.parent.glob("class/*")
    assert capsys.readouterr().out.strip().endswith(str(written)) and written.name == "20_third.ipynb"
    text = written.read_text()
    assert "smallest_n = 10" not in text and "solved" not in text
    assert "See the first, [this](20_third.ipynb), [more](https://a.example)." in text and "00_" not in text
    *cells, _, checked, _ = json.loads(text)["cells"]
    for number, answer in enumerate(("None", "9", "10", "1 / 0"), start=10):
        cells += [cell("code", f"smallest_n = {answer}", number), {**checked, "id": f"check-{number}"}]
    runs.write_json(written, json.loads(text) | {"cells": cells})
    _, fault = notebooks.execute(written, handed, {"seed": 3}, progress=False)
    boxes = re.findall(r"class='specdec-(\w+)'", handed.read_text())
    assert boxes == ["open", "wrong", "right"] and "Zero" in fault


def test_a_reader_sees_a_box_and_no_traceback(monkeypatch):
    import IPython
    from IPython import display

    shown, kernel = [], SimpleNamespace(_allow_stdin=True)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=kernel))
    monkeypatch.setattr(display, "display", lambda box, raw: shown.append(box))
    lessons.MISSES.clear()
    exec(CHECK, {"smallest_n": 9})
    wrong = shown[0]["text/plain"]
    assert "rgb(198, 40, 40)" in shown[0]["text/html"] and wrong.startswith("Not right yet. With N = 9 ")
    exec(CHECK, {"smallest_n": 10})
    assert "rgb(46, 125, 50)" in shown[1]["text/html"] and shown[1]["text/plain"].startswith("Right.")
    exec(CHECK, {})
    assert "there is no <code>smallest_n</code> yet" in shown[2]["text/html"]
    kernel._allow_stdin = False
    pytest.raises(AssertionError, exec, CHECK, {"smallest_n": 9}).match("With N = 9 asking takes 1.1% of the time")
    pytest.raises(SpecdecError, lessons.check, "12.wen").match("did you mean '12.when'")


def test_running_the_working_copies_leaves_the_checkout_clean(folder, monkeypatch):
    monkeypatch.setattr(runs, "workbook", lambda: folder.parent)
    started, root = [], folder.parent
    monkeypatch.setattr(lab.subprocess, "call", lambda command: started.append(command) or 0)
    first = json.loads((folder / "00_first.ipynb").read_text())
    links = "[next](10_second.ipynb) [more](../core/README.md#part) ![seen](figures/a.svg) [out](https://a.example)"
    first["cells"][0]["source"] += links
    (folder / "00_first.ipynb").write_text(json.dumps(first))
    (root / ".gitignore").write_text((machine.checkout() / ".gitignore").read_text())
    git = partial(subprocess.run, cwd=root, check=True, capture_output=True, text=True)
    git(["git", "init", "-q"])
    git(["git", "add", "."])
    git(["git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "all"])
    assert cli.main(["book", "lab", "--no-browser"]) == 0
    copy = lab.folder() / "00_first.ipynb"
    assert f"--ServerApp.root_dir={root}" in started[0] and "--no-browser" in started[0]
    assert root / next(one for one in started[0] if "default_url" in one).partition("/lab/tree/")[2] == copy
    led = notebooks.source_of(notebooks.read_notebook(copy)["cells"][0])
    ups = "[more](../../core/README.md#part) ![seen](../../notebooks/figures/a.svg) [out](https://a.example)"
    assert led.endswith(f"[next](10_second.ipynb) {ups}")

    opened = book.Book(folder=folder)
    assert [opened.state(entry) for entry in opened.entries] == ["never run"] * 3
    assert notebooks.execute(copy, copy, {"seed": 7}, progress=False)[1] == ""
    assert git(["git", "status", "--porcelain"]).stdout == ""
    assert [opened.state(entry) for entry in opened.entries] == ["run in Lab", "never run", "never run"]


def test_a_changed_source_keeps_the_readers_copy(folder, monkeypatch, capsys):
    names, copies = ["00_first", "10_second", "20_third"], lab.folder()
    assert lab.write_copies(folder, names) == []
    read = json.loads((copies / "00_first.ipynb").read_text())
    read["cells"][2]["execution_count"] = 3  # only run
    (copies / "00_first.ipynb").write_text(json.dumps(read))
    read["cells"][2]["source"] = "mine = 1"
    mine = json.loads((copies / "20_third.ipynb").read_text()) | {"cells": read["cells"]}
    (copies / "20_third.ipynb").write_text(json.dumps(mine))
    before = (copies / "10_second.ipynb").stat().st_mtime_ns
    for name in ("00_first", "20_third"):
        (folder / f"{name}.ipynb").write_text(notebook("New", "print(1)"))
    assert lab.state("00_first", folder / "00_first.ipynb") == "stale in Lab"
    assert lab.write_copies(folder, names) == ["20_third has changed; your copy of it is now 20_third.mine1.ipynb."]
    assert "mine = 1" in (copies / "20_third.mine1.ipynb").read_text()
    assert all("# New" in (copies / f"{name}.ipynb").read_text() for name in ("00_first", "20_third"))
    assert (copies / "10_second.ipynb").stat().st_mtime_ns == before


def test_the_command_line_reports_in_one_sentence(folder, monkeypatch, capsys):
    with monkeypatch.context() as stopped:
        stopped.setattr(notebooks, "execute", Mock(side_effect=KeyboardInterrupt))
        assert cli.main(["book", "run", "--only", "20"]) == 130
    told = capsys.readouterr().err
    assert told.count("\n") == 2 and "the same command continues" in told
    assert cli.main(["book", "run", "--only", "20", "-p", "sede", "1"]) == 2
    assert capsys.readouterr().err.startswith("specdec: unknown parameter of 20_third 'sede'; did you mean 'seed'")
    assert cli.main(["book", "run", "--only", "20", "-p", "seed", "5"]) == 0
    assert outputs("20_third") == "5\n"
    assert cli.main(["book", "tidy", "--check"]) == 1
