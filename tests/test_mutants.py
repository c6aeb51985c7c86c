"""The runner of mutants finds changes, notices those that a test notices, and outlives what hangs."""

import pytest

pytest.importorskip("mutmut", reason="make mutants fetches it")
import changed_code
import mutants

MODULE = """
def total(first, second=0):
    unused = "nobody looks"
    return first + second


@property
def size(self):
    if self.many > 1:
        raise ValueError("a sentence is left as it is")
    return len(self.all)
"""
TESTS = "from room.sums import total\n\ndef test_total():\n    assert total(1, 2) == 3\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mutants, "STORE", tmp_path)
    path = tmp_path / "room" / "sums.py"
    path.parent.mkdir()
    path.write_text(MODULE)
    (tmp_path / "test_sums.py").write_text(TESTS)
    return path


def test_changes_are_one_at_a_time_and_leave_sentences_alone(module):
    found = mutants.mutants_of(module, module.parents[1])
    assert len({one.key for one in found}) == len(found) > 6
    diffs = [one.diff for one in found]
    assert "-    return first + second\n+    return first - second" in diffs
    assert "-    if self.many > 1:\n+    if self.many >= 1:" in diffs  # behind a decorator, too
    assert not [diff for diff in diffs if "sentence" in diff]
    assert all(MODULE.splitlines()[one.first - 1] == one.diff.splitlines()[0][1:] for one in found)


def test_what_a_test_notices_is_killed(module):
    root = module.parents[1]
    outcomes = {}
    for one in mutants.mutants_of(module, root):
        if one.first in (3, 4):
            outcomes[one.diff] = mutants.tried(one, {"test_sums.py::test_total": 0.1}, root)[
                "outcome"
            ]
    assert outcomes.pop("-    return first + second\n+    return first - second") == "killed"
    assert set(outcomes.values()) == {"survived"} and len(outcomes) >= 2
    assert module.read_text() == MODULE
    assert mutants.tried(mutants.mutants_of(module, root)[0], {}, root) == {"outcome": "untested"}


def test_functions_are_changed_in_place(module):
    root = module.parents[1]
    found = [one for one in mutants.mutants_of(module, root) if one.first < 6]
    tests, said = {"test_sums.py::test_total": 0.1}, root / "said.json"

    def in_place() -> list:
        outcomes, left = {}, []
        told = (
            (lambda one, outcome: outcomes.update({one.key: outcome["outcome"]})),
            lambda one: left.append(one.key),
        )
        mutants.run_pytest(
            ["test_sums.py"], mutants.InPlace([(one, tests) for one in found], root, *told)
        )
        return [outcomes, left]

    (outcomes, left), _ = mutants.forked(in_place, 60, said)
    assert sorted([*outcomes, *left]) == sorted(one.key for one in found)
    defaults = [one.key for one in found if one.first == 2]
    assert left == defaults != [] and set(outcomes.values()) == {"killed", "survived"}
    for one in found:
        if one.key in outcomes:
            assert outcomes[one.key] == mutants.tried(one, tests, root)["outcome"], one.diff


def test_inner_functions_change_with_their_makers_and_quick_tests_fill_the_time():
    old, new = (
        f"def outer(a):\n    def inner(b):\n        return a {sign} b\n    return inner\n"
        for sign in "+-"
    )
    names = {}
    exec(compile(old, "/somewhere/both.py", "exec"), names)
    made_before = names["outer"](5)
    codes = [compile(source, "/somewhere/both.py", "exec") for source in (old, new)]
    pairs = changed_code.changed_code(*codes)
    assert [before.co_name for before, _ in pairs] == ["outer", "inner"]
    changed_code.change(pairs, changed_code.live_functions("/somewhere"))
    assert names["outer"](5)(2) == 3 and made_before(2) == 3
    assert (
        changed_code.changed_code(*(compile(f"x = {one}", "m", "exec") for one in (1, True)))
        is None
    )
    pytest.raises(LookupError, changed_code.change, pairs, {}).match("outer")
    assert mutants.quickest({"a": 3.0, "b": 1.0, "c": 2.0}, 3.5) == {"b": 1.0, "c": 2.0}
    assert mutants.quickest({"a": 3.0}, 1.0) == {"a": 3.0} and mutants.quickest({}, 1.0) == {}
    assert mutants.quickest({"a": 3.0, "b": 1.0, "c": 2.0}, 3.5, {"a": 1}) == {"a": 3.0}


def test_tests_that_name_what_changes_come_first(module):
    root = module.parents[1]
    for name, text in (
        ("both", "from room import sums, SIZES"),
        ("one", "sums"),
        ("none", "assumes"),
    ):
        (root / f"{name}.py").write_text(text)
    last = len(MODULE.splitlines()) + 1
    change = mutants.Mutant("room/sums.py", last, last, "", "")
    module.write_text(MODULE + "SIZES = 1, 2\n")
    marks = mutants.likely(
        change, dict.fromkeys(("both.py::a", "one.py::a", "none.py::a"), 1.0), root
    )
    assert marks == {"both.py::a": 2, "one.py::a": 1, "none.py::a": 0}


def test_what_hangs_is_stopped(tmp_path):
    def endless():
        while True:
            pass

    assert mutants.forked(endless, 1, tmp_path / "said.txt") == (None, "timeout")
    assert mutants.forked(lambda: [1], 5, tmp_path / "said.txt") == ([1], "")


def test_what_survives_is_listed_with_a_reason_as_long_as_its_line_is_there():
    listed = mutants.survivors()
    assert listed and all(len(reason) > 10 for reason in listed.values())
    modules = {
        path: mutants.squeezed((mutants.ROOT / path).read_text(encoding="utf-8"))
        for path, _ in listed
    }
    gone = [f"{path}: {line}" for path, line in listed if line not in modules[path]]
    assert not gone, "the line has changed: take it out of .ci/survivors.yml"


def test_the_report_counts_those_with_a_reason(module, capsys, monkeypatch):
    two = [one for one in mutants.mutants_of(module, module.parents[1]) if "first" in one.diff][:2]
    done = {
        one.key: {"path": one.path, "first": one.first, "diff": one.diff, "outcome": "survived"}
        for one in two
    }
    old = "".join(line[1:] for line in two[0].diff.splitlines() if line.startswith("-"))
    monkeypatch.setattr(
        mutants, "survivors", lambda: {(two[0].path, mutants.squeezed(old)): "it does not matter"}
    )
    mutants.report(two[:1], done)
    said = capsys.readouterr().out
    assert (
        "survived  it does not matter" in said
        and "1 of those that nobody noticed have a reason" in said
    )
    assert "1 of 1 tried: 1 survived\nnoticed: 0.0 %" in said
