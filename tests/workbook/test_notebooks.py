"""The conventions of the book, held by reading every notebook; the instructor's page; what notebooks teach; small runs."""

import ast
import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys

import nbformat
import numpy as np
import pytest
from fakes.notebooks import cell as cell_of
from fakes.notebooks import code_cells, run_cells
from IPython.display import display

import specdec
from specdec import machine
from specdec.core.records import CYCLE_COLUMNS
from specdec.core.tree_config import TreeConfig
from specdec.costs import calibrate, measure
from specdec.costs.profiles import profile
from specdec.policies import ltd, radar, resps
from specdec.policies.base import Rule, changed
from specdec.data.toy_chats import CorpusChats

from workbook import book, claims, exercises, items, lessons, notebooks, terms

FOLDER = machine.checkout() / "notebooks"
ENTRIES = book.read_book(FOLDER)
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
NOTEBOOKS = {name: notebooks.read_notebook(FOLDER / f"{name}.ipynb") for name in NAMES}
TAGS = {"parameters", "teach", "interactive", "exercise", "solution", "check", "found"}
SHOWN = {"Markdown", "print", "show", "show_table", "show_item", "check", "table", "figure", "diagram", "display"}
MAX_CELL_LINES, MAX_FUNCTION_LINES = 20, 5

every_notebook = pytest.mark.parametrize("name", NAMES)


def prose(name: str) -> list[str]:
    return [notebooks.source_of(cell) for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "markdown"]


def test_every_notebook_is_in_the_book_tidy_and_passes_the_linter():
    """No outputs, no stray metadata, header lines as book.yml says; `specdec book tidy` mends them."""
    assert set(NAMES) == {entry.stem for entry in ENTRIES}
    for opened, entry in itertools.product((book.Book("laptop", FOLDER), book.Book("paper", FOLDER)), ENTRIES):
        assert all(opened.parameters(entry, some)["scale"] == opened.scale for some in ({}, entry.smoke))
    assert book.tidy_all(FOLDER, check=True) == []
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, str(FOLDER)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@every_notebook
def test_it_is_a_valid_notebook_with_headings(name):
    """One H1 with a promise and the link to its page below it, nothing numbered by hand; it ends in what was found, computed."""
    nbformat.validate(nbformat.from_dict(NOTEBOOKS[name]))
    for cell in NOTEBOOKS[name]["cells"]:
        assert set(cell["metadata"].get("tags", [])) <= TAGS
        assert notebooks.source_of(cell).strip(), "an empty cell"
    title, promise = notebooks.title_and_promise(NOTEBOOKS[name])
    assert title and promise.endswith((".", "?"))
    headings = [line for text in prose(name) for line in re.sub(r"```.*?```", "", text, flags=re.S).splitlines()]
    headings = [line for line in headings if re.match(r"#+ ", line)]
    assert sum(line.startswith("# ") for line in headings) == 1
    assert not [line for line in headings if re.match(r"#+ \d+[.)]", line)] and "## What was found" in headings
    there = (FOLDER / "../figures/book" / f"{name}.md").is_file()
    assert (f"[executed page](../figures/book/{name}.md)" in prose(name)[0]) == there
    cells = code_cells(NOTEBOOKS[name])
    assert [place for place, (tags, _) in enumerate(cells, 1) if "found" in tags] == [len(cells)]
    assert re.search(r'f".*\{.*\}', cells[-1][1]), "a sentence that was typed"


@every_notebook
def test_parameters_are_literal_typed_commented_and_checked_before_they_are_used(name):
    """Papermill's command line gives a list as text, whose letters would pass for its elements."""
    tagged = [number for number, (tags, _) in enumerate(code_cells(NOTEBOOKS[name])) if "parameters" in tags]
    assert tagged == [0], "the first code cell, and no other, is tagged parameters"
    (_, parameters), (_, source), *_ = code_cells(NOTEBOOKS[name])
    lines, assigned = parameters.splitlines(), ast.parse(parameters).body
    assert lines[0].startswith('scale: str = "laptop"')
    for node in assigned:
        assert isinstance(node, ast.AnnAssign) and node.value is not None, "only typed assignments"
        ast.literal_eval(node.value)
        assert node.lineno == node.end_lineno and "#" in lines[node.lineno - 1], "one line each, with a comment"

    given = {node.target.id for node in assigned}
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    opens = re.compile(rf'book\.(open|check)\("{name}"')
    checked = [line for line, text in enumerate(source.splitlines(), 1) if opens.search(text)]
    assert checked and all(node.lineno > checked[0] for node in names if node.id in given)


@every_notebook
def test_cells_are_short_and_simple(name):
    for (tags, source), (_, following) in itertools.pairwise([*code_cells(NOTEBOOKS[name]), ({}, "")]):
        assert "interactive" not in tags or ".picture(" in following, "a widget without a still picture"
        lines = [line for line in source.splitlines() if line.strip()]
        assert len(lines) <= MAX_CELL_LINES or "parameters" in tags, source
        last = ast.parse(source).body[-1]
        if isinstance(last, ast.Expr) and "interactive" not in tags:
            function = getattr(last.value, "func", None)
            assert getattr(function, "attr", getattr(function, "id", "")) in SHOWN, f"an object's repr: {source}"
        assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|work|mnt)/", source), "an absolute path"
        if "teach" in tags:
            continue
        for node in ast.walk(ast.parse(source)):
            assert not isinstance(node, ast.ClassDef), "a class outside a teach cell"
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is long; put it into specdec"


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
            plain = "".join(shown.get("text/plain", ""))
            assert not plain.startswith(("<IPython.core.display.SVG", "<Figure", "<matplotlib"))
            if {"image/svg+xml", "image/png"} & set(shown):
                assert {"image/svg+xml", "image/png"} <= set(shown), "a reader that hides one of them shows nothing"
                assert output["metadata"]["image/png"]["alt"] == plain


def test_pictures_that_some_readers_hide_are_noticed():
    def executed(**data):
        return {"cells": [{"outputs": [{"data": data, "metadata": {"image/png": {"alt": "a line"}}}]}]}

    hidden = {"image/svg+xml": "<svg/>", "text/plain": "a line"}
    check_pictures(executed(**hidden, **{"image/png": "..."}))
    for fault in ({"text/plain": "<IPython.core.display.SVG object>"}, hidden):
        pytest.raises(AssertionError, check_pictures, executed(**fault))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["20_your_own_model", "50_profile_cycle", "90_toy_pair", "91_evidence", "43_ablate_ppow"]
)
def test_it_needs_nothing_else(name, home):
    run_cells(name)


SOLVED = {name for name in NAMES if any("solution" in tags for tags, _ in code_cells(NOTEBOOKS[name]))}
TAUGHT = [entry for entry in ENTRIES if entry.name in SOLVED]


# Answers that a check must not take, beside those of a student who wrote nothing; `right` is the solution.
WRONG = {
    "10.pass": "lambda n: right(n) / 1e3; lambda n: 5.0; lambda n: [right(n), 0.9][1]; lambda n: (right(n), 1); 7",
    "10.passes": "4.8; 'six'; True; -1; float('nan'); [5]",
    "10.lookup": "lambda text: text.pop() and right(text); lambda text: 0; lambda text: text[-1]; lambda text: 8 if text[1] == 7 "
    "else None; lambda text: 'cat'",
    "10.liar": "lambda text: picks(target, text)[-1]; lambda text: -1; lambda text: 10**9; lambda text: text.append(3) or 3",
    "10.alpha": "'0.75'; 0.7; 1.2; p",
    "10.rest": "lambda p, q: p; lambda p, q: p - q; lambda p, q: np.maximum(p - q, 0); lambda p, q: right(words, q); lambda p, "
    "q: 0.2; lambda p, q: p.sort() or p; lambda p, q: np.array([0.75, 0, 0.5, 0, 0]) / 1.25",
    "10.biased": "exact; lambda p, q, rng: 0; lambda p, q, rng: rng.integers(5); lambda p, q, rng: 9; lambda p, q: 1",
    "10.draws": "3; 0; 10**9; 'many'",
    "10.walk": "['cat', 'ran', 'away']; ['dog']; 'dog barked'; []  or ['dog', 'barked', 'down']",
    "10.gumbel": "lambda p, noise: np.argmax(p + noise); lambda p, noise: np.argmax(p); lambda p, noise: rng.choice(5, p=p)",
    "10.mask": "lambda parents: [[i == j for j in parents] for i in parents]; lambda parents: right(tree_parents); lambda "
    "parents: 3; lambda parents: right(parents)[1:]",
    "10.best": "lambda alpha, c, longest=20: 5; lambda alpha, c: right(alpha, c); lambda alpha, c, longest=20: right(alpha, c)",
    "10.when": "lambda alpha: 0.6; lambda alpha: 1 / 0; lambda alpha: -1",
    "10.measure": "0.99; 'half'; 2",
    "11.verified": "lambda score, count: right(score, count) | {0}; lambda score, count: set(range(1, count + 1)); lambda score, "
    "count: right(score, 2); lambda score, count: 3",
    "11.last": "lambda score, parent, count: {len(score) - 1}; lambda score, parent, count: range(1, count + 1)",
    "11.plain": "-1; 10**6; 'all'",
    "12.cycle": "lambda n, v: n; lambda n, v: right(n, v) + v; lambda n, v: 'long'",
    "12.even": "0.5 * right; '1'; -1",
    "12.likely": "sized(lambda q, least: int((q.scores > least).sum())); sized(lambda q, least: 10**6); sized(lambda q, least: "
    "q.cycle % 2); sized(lambda q, least: min(int((q.scores > math.log(0.05)).sum()), q.largest)); sized(lambda q, least: 1 / 0)",
    "12.useless": "specdec.Static; sized(lambda q, least: 3); 5",
    "12.headroom": "specdec.headroom; lambda p, t, c: specdec.headroom(p, t, c); lambda p, t, c: (t - p) / (t - c); lambda p, t, "
    "c: 0",
    "12.ratio": "[1, 2]; [(1, 0)]; [(2, 16.0)]; [(1.5, 2.0)]; 'slow'",
    "12.threshold": "0; 0.9999; -1; 'low'",
    "12.calls": "lambda e, b, c: 5; lambda e, b, c: len(e); lambda e, b, c: 1.5",
    "12.when": "9; 11; 0; 10.5; '10'",
    "22.asked": "2; 61; 0; 2.5; 'three'",
    "22.reward": "lambda t, s: sum(t) / sum(s); lambda t, s: right(t, s) * len(s); lambda t, s: 1.0; lambda t, s: 'fast'",
    "22.errors": "[7, 12]; [1, 7, 12]; [7, 9, 12, 15]; [99]; 'seven'",
    "22.idle": "trees.loc[trees['total_tokens'] >= 32, 'speedup'].max(); 1; 2; 0.0",
    "22.kept": "1; 0; bounds_ms[1] / bounds_ms[10]; 'half'",
    "23.reachable": "[0, 3, 6, 9, 12]; [3, 6, 9]; list(range(3, 13)); [6, 12]; 12",
    "23.gamma": "0.99**9; 1; 1.2; 'nine'",
    "23.accepted": "lambda ranks, n, nodes: n; lambda ranks, n, nodes: right(ranks, n, nodes + 1); lambda ranks, n, nodes: -1",
    "23.ratio": "(4, 20.0); (1, 50.0); (3,); 'short'",
    "23.over": "1 / right; 0; right + 1; 'more'",
    "24.expected": "2.2; 0.9; 3; 'one'",
    "24.lstm": "lambda w, s, h, c: right(w, s, h, c)[::-1]; lambda w, s, h, c: (h, c); lambda w, s, h, c: right(w, s, h, c)[0]; "
    "lambda w, s, h, c: (h, right(w, s, h, c)[1]); lambda w, s, h, c: 1",
    "24.bonus": "(3.0, 10.0); (1.0, 30.0); (2.4, 19.9); (1,); 'early'",
    "24.memory": "2; 0.999; right + 0.1; 'many'",
    "25.eta": "1; 0.5; -1; 'small'",
    "25.advantages": "lambda r: [one - sum(r) / len(r) for one in r]; lambda r: [0.0]; lambda r: 5; lambda r: "
    "((torch.tensor(r) - torch.tensor(r).mean()) / (torch.tensor(r).std() + 1e-6)).tolist()",
    "25.flat": "[0, 1, 1, 1]; [window] * 4; [1, 1]; [99] * 4; 'flat'",
    "25.closed": "lambda q, c: 1.0; lambda q, c: right(q, 0); lambda q, c: -1; lambda q, c: "
    "right(q, c) - __import__('math').prod(q) * len(q) / (len(q) * c + 1)",
    "25.paid": "1.5; right + 0.1; -1; 'none'",
}
ALSO_RIGHT = {
    "10.passes": "float(right)",
    "10.rest": "lambda p, q: right(p, q).tolist(); lambda p, q: torch.tensor(right(p, q))",
    "10.biased": "lambda p, q, rng: rng.choice(len(q), p=q)",
    "10.draws": "1e3; np.int64(2000)",
    "10.walk": "('dog', 'barked')",
    "10.mask": "lambda parents: np.array(right(parents)).astype(int)",
    "11.verified": "lambda score, count: sorted(right(score, count))",
    "12.when": "np.float64(10)",
    "12.ratio": "((2, 10), [2, 10], (1, 40))",
    "22.errors": "{15, 12, 7}",
    "24.lstm": "lambda w, s, h, c: [part.tolist() for part in right(w, s, h, c)]",
    "25.advantages": "lambda r: torch.tensor(right(r)); lambda r: [0.0] * len(r) if len(set(r)) == 1 else right(r)",
}


def sized(answer):
    """A policy like OnlyLikely, by another answer."""

    class Sized(specdec.Static):
        asks, least = frozenset({"size"}), 0.05

        def answer(self, question):
            return answer(question, self.least)

    return Sized


def judged(name: str, solved: dict, text: str):
    """The verdict on another answer in place of the solution's."""
    answer = next(iter(lessons.EXERCISES[name].reads))
    given = eval(text, {**solved, "right": solved[answer], "sized": sized})
    return lessons.judge(name, {**solved, answer: given})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", TAUGHT, ids=lambda entry: entry.name)
def test_checks_are_open_for_students_right_with_solutions_and_miss_wrong_answers(entry, request, capsys):
    """A wrong answer gets a sentence or two that do not hold the solution; the third miss shows it."""
    request.getfixturevalue("recorded" if entry.reads else "home")
    opened = book.Book()
    values = opened.parameters(entry, entry.smoke)
    student, solved, kinds = {"display": display}, {}, []
    for tags, source in code_cells(NOTEBOOKS[entry.name]):
        code = compile(source, entry.name, "exec")
        kinds += tags & {"exercise", "solution", "check"}
        if "solution" in tags:
            solved, shown = dict(student), source
            exec(code, solved)
        elif "check" in tags:
            name = re.fullmatch(r'check\("([\w.]+)", solved=True\)', source)[1]
            verdict = lessons.judge(name, student)
            assert verdict.state == lessons.OPEN and re.match(r"\w.{20,}[.!?]|`.{20,}[.!?]", verdict.text), verdict
            pytest.raises(AssertionError, exec, code, student)
            exec(code, solved)
            assert "Right." in capsys.readouterr().out
            for text in WRONG[name].split("; "):
                lessons.MISSES.clear()
                first, more, third = (judged(name, solved, text) for _ in "123")
                for verdict, ending in zip((first, more), lessons.EXERCISES[name].hints, strict=True):
                    assert verdict.state == lessons.WRONG and not verdict.code, (name, text, verdict)
                    assert verdict.text.endswith(ending) and len(verdict.text) < 330, verdict.text
                    assert re.match(r"[`A-Z0-9]", verdict.text) and "\n" not in verdict.text, verdict.text
                    assert len(re.findall(r"[.?!](?: (?=[A-Z`])|$)", verdict.text)) <= 2, verdict.text
                assert third.code == shown
            for text in filter(None, ALSO_RIGHT.get(name, "").split("; ")):
                assert judged(name, solved, text).state == lessons.RIGHT, (name, text, judged(name, solved, text))
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


READING = [one for one in ENTRIES if (one.reads or one.may_read) and one not in TAUGHT]  # those run above


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", READING, ids=lambda entry: entry.name)
def test_it_runs_on_what_notebook_21_recorded(entry, recorded):
    run_cells(entry.name)


def cells_of(name: str, *ids: str, **names) -> dict:
    """Run these cells of a notebook alone, with these names; returns all names. An algorithm has at most 15 lines."""
    for cell in NOTEBOOKS[name]["cells"]:
        assert cell["id"] != "algorithm" or len(notebooks.source_of(cell).splitlines()) <= 15
        if cell["id"] in ids:
            exec(compile(notebooks.source_of(cell), f"{name}, {cell['id']}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def answers(tiny):
    """A recording of 50 answers, and a cost model."""
    settings = dict(depth=7, top_ks=(10,), trees=(10,), max_new_tokens=6, progress=False)
    trace = specdec.record(tiny, {"mine": [f"What is {number} + 3?" for number in range(50)]}, **settings)
    return trace, profile("roofline-a100-llama-8b-eager")


def policies_of(system: str, config: str, features: int):
    """One of a system's policies with small trees and random weights, in the settings of a config."""
    if system == "resps":
        grid = {
            "totals": (3, 4, 8, 16, 60),
            "depths": (2, 3, 7),
            "widths": (10,),
            "interval": 2,
            "starter": (60, 7, 10),
        }
        return [changed(resps.CONFIGS[config], grid).policy(features).fill_at_random((16,))]
    if system == "ltd":
        both = changed(ltd.CONFIGS[config], {"depth.depth": 7, "size.depth": 7, "size.drafted": None})
        return [part.policy().fill_at_random((16,), seed) for seed, part in enumerate((both.depth, both.size), 11)]
    policy, random = radar.CONFIGS[config].policy(flat_nodes=None), np.random.default_rng(8)
    policy.network = radar.LstmNetwork({name: random.normal(0, 0.1, shape) for name, shape in radar.SHAPES.items()})
    return [policy]


@pytest.mark.parametrize("config", ["paper", "ours"])
@pytest.mark.parametrize(
    "name, system", [("22_train_resps", "resps"), ("23_train_ltd", "ltd"), ("24_train_radar", "radar")]
)
def test_the_lines_of_a_lesson_decide_as_the_package_does(answers, name, system, config):
    """In every cycle of 50 recorded answers; in at most 15 lines."""
    trace, costs = answers
    assert len(trace.turns) == 50
    taught = cells_of(name, "state", "algorithm", np=np)[f"{system}_turn"]
    policies, columns = policies_of(system, config, trace.features.shape[1]), ["verify_nodes", "expansions", "top_k"]
    columns = {"ltd": columns[1::-1], "radar": columns[1:2]}.get(system, columns)
    replayed = specdec.replay(trace, specdec.Chain(*policies), costs, keep_cycles=True)
    decided = [tuple(getattr(row, column) for column in columns) for rows in replayed.rows for row in rows]
    mine = [one for turn in range(50) for one in taught(trace, turn, *policies)]
    assert [one if isinstance(one, tuple) else (one,) for one in mine] == decided and len(set(decided)) > 1


@pytest.mark.filterwarnings("ignore")
def test_the_lines_of_the_lesson_on_ppow_compute_its_loss(home, monkeypatch):
    """For the windows of 50 recorded answers, which its own cell compares one by one."""
    name, prompts = "25_train_ppow", CorpusChats.prompts
    entry = next(entry for entry in ENTRIES if entry.name == name)
    monkeypatch.setattr(CorpusChats, "prompts", lambda self, seed, count: prompts(self, seed, 60))
    taught = ("cell-02", "lesson-imports", "few-answers", "windows", "algorithm", "equal")
    found = cells_of(name, *taught, **book.Book().parameters(entry, entry.smoke | {"group": 4}))
    assert len(found["losses"]) >= 50 and len({round(mine, 3) for mine, _ in found["losses"]}) > 10


@pytest.mark.filterwarnings("ignore")
def test_the_recipe_of_a_fifth_paper_runs_as_written(recorded, tmp_path, monkeypatch):
    """Two new files and an entry in each of three: what the page says to write is written, and nothing else."""
    page = (
        (FOLDER / "recipes.md").read_text(encoding="utf-8").partition("\n## A fifth paper\n")[2].partition("\n## ")[0]
    )
    policy, cells, *entries = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", page, flags=re.M | re.S)
    root, claimed = tmp_path / "notebooks", tmp_path / "figures" / "claims.yml"
    shutil.copytree(FOLDER, root, ignore=shutil.ignore_patterns("workbook", "experiments"))
    shutil.copytree(FOLDER.parent / "figures" / "published", claimed.parent / "published")
    shutil.copy(FOLDER.parent / "figures" / "claims.yml", claimed)
    for path, entry in zip((root / "book.yml", root / "items.yml", claimed), entries, strict=True):
        path.write_text(path.read_text(encoding="utf-8") + entry, encoding="utf-8")
    parts = [part.partition("\n") for part in cells.removeprefix("# %%").split("# %%")]
    made = [cell_of("code", text.strip(), place, tags.split()) for place, (tags, _, text) in enumerate(parts, 1)]
    made.insert(0, cell_of("markdown", "# The fifth paper\n\n> Does it decode faster?", 0))
    (root / "27_fifth.ipynb").write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4}))
    (tmp_path / "fifth.py").write_text(policy)
    monkeypatch.setattr(specdec.policies, "__path__", [*specdec.policies.__path__, str(tmp_path)])
    monkeypatch.setattr(Rule, "classes", dict(Rule.classes))
    monkeypatch.setenv("SPECDEC_NOTEBOOKS", str(root))
    run = run_cells("27_fifth")["run"]
    assert "27_fifth" in book.tidy_all(root) and book.tidy_all(root, check=True) == []
    assert specdec.load_policy(run.path("seed-0", "policy")).trained_for["pair"] == "tiny"
    assert "fifth/table1" in items.drawn()
    assert claims.examine(claims.read_claims()["fifth-beats-tuned-here"]).finding is not None


def test_the_student_edition_can_be_graded_and_shown_as_slides():
    """A point for every check, two for every open question; each section begins a slide."""
    for name in SOLVED:
        handed = notebooks.student_edition(NOTEBOOKS[name])
        nbformat.validate(nbformat.from_dict(handed))
        graded = [cell["metadata"]["nbgrader"] for cell in handed["cells"] if "nbgrader" in cell["metadata"]]
        asked = [one for one in lessons.EXERCISES if one[:2] == name[:2]]
        opened = sum("**Open.**" in notebooks.source_of(cell) for cell in handed["cells"])
        assert sum(one.get("points", 0) for one in graded) == len(asked) + 2 * opened and opened
        assert len({one["grade_id"] for one in graded}) == len(graded) == 2 * len(asked) + opened
        for one in handed["cells"]:
            at = one["metadata"]["slideshow"]["slide_type"]
            assert "\n## " not in one["source"] and (at == "slide") == (
                one["source"].startswith("#") and one["cell_type"] != "code"
            )


def test_the_instructors_page_follows_the_sections_and_adds_up():
    """Each session's table lists its notebook's sections in order and every exercise once, in 90 minutes that are all told."""
    sessions = re.split(r"^## Session ", (FOLDER / "teaching.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    assert len(sessions) == 6
    for session in sessions:
        name = re.search(r"\]\((\w+)\.ipynb\)", session)[1]
        told = re.findall(r"^\| \d.+", session, flags=re.M)
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told]
        parts = re.split(r"^## (.+)$", notebooks_text(name), flags=re.M)
        sections, texts = parts[1::2], dict(zip(parts[1::2], parts[2::2], strict=True))
        assert [row[1] for row in rows] == ["Arrive", *sections[: len(rows) - 1]]
        assert not any('check("' in texts[section] for section in sections[len(rows) - 1 :])
        for minutes, section, reading, lesson, talk, home, _ in rows:
            told = sum(int(number) for number in (reading, talk) if number != "-")
            assert int(minutes) == told + 6 * lesson.count("`") // 2 and (told or section == "Arrive")
            asked = re.findall(r'check\("([\w.]+)"', texts.get(section, ""))
            answers = [next(iter(lessons.EXERCISES[one].reads)) for one in asked]
            assert sorted(re.findall(r"`(\w+)`", lesson + home)) == sorted(answers)
        assert sum(int(row[0]) for row in rows) == 90


def notebooks_text(name: str) -> str:
    return "\n".join(notebooks.source_of(cell) for cell in NOTEBOOKS[name]["cells"])


def test_what_is_said_of_the_best_length_follows_from_the_formula():
    """Notebook 10: with alpha = 0.5 the top is at so many drafts, and every curve's top lies inside the picture."""
    text = notebooks_text("10_speculative_decoding")
    said = re.findall(r"(\d) (?:drafts? )?for \$c = ([\d.]+)\$", text)
    best = lambda alpha, c: max(range(60), key=lambda gamma: exercises.expected_speed(alpha, gamma, c))  # noqa: E731
    assert len(said) == 3 and all(best(0.5, float(c)) == int(drafts) for drafts, c in said)
    alphas, costs, last = re.search(r"for a in \((.+?)\) for c in \((.+?)\) for g in range\((\d+)\)", text).groups()
    assert all(best(float(a), float(c)) < int(last) - 1 for a in alphas.split(",") for c in costs.split(","))
    assert '"longer", data=theory, sources=[])' in text, "what follows from a formula is not captioned as measured"


def test_words_and_units_of_the_code_are_explained():
    """Every column of a cycle, in its order, and every number of a tree but RADAR's."""
    text = "\n".join(prose("02_words_and_units"))
    parts = re.findall(r"## (.+)\n([^#]*)", text)
    tables = {title: re.findall(r"^\| `(\w+)`", part, flags=re.M) for title, part in parts}
    assert tables["Columns of a cycle"] == list(CYCLE_COLUMNS)
    assert {field.name for field in dataclasses.fields(TreeConfig)} - set(tables["Numbers of a tree"]) <= {"flat_nodes"}
