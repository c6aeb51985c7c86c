"""The mutation test finds changes, and knows those that a test notices."""

import pytest

pytest.importorskip("mutmut", reason="make mutants fetches it")
import mutants

MODULE = """
def total(first, second=0):
    unused = "no test looks at this"
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
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "STORE", tmp_path)
    path = tmp_path / "room" / "sums.py"
    path.parent.mkdir()
    path.write_text(MODULE)
    (tmp_path / "test_sums.py").write_text(TESTS)
    return path


def test_changes_are_one_at_a_time_and_tests_notice_them(module):
    changes = {mutant.diff: mutant for mutant in mutants.mutants_of(module)}
    assert not [diff for diff in changes if "sentence" in diff]
    noticed = (
        changes["- return first + second\n+ return first - second"]
        if ("- return first + second\n+ return first - second" in changes)
        else changes["- first + second\n+ first - second"]
    )
    unnoticed = next(mutant for mutant in changes.values() if mutant.first == 3)
    tests = {"test_sums.py::test_total": 0.1}
    assert mutants.tried(noticed, tests) == "killed"
    assert mutants.tried(unnoticed, tests) == "survived"
    assert mutants.tried(noticed, {}) == "untested"
    assert module.read_text() == MODULE


def test_the_tests_of_a_change_are_those_that_run_its_lines():
    facts = {
        "seconds": {"slow": 5.0, "quick": 1.0, "else": 0.1},
        "lines": {"a.py": {"3": ["slow", "quick", ""], "4": ["else"]}},
    }

    def chosen(first: int, limit_s: float) -> list[str]:
        mutant = mutants.Mutant("a.py", first, first, "", "")
        return list(mutants.tests_of(mutant, facts, limit_s))

    assert chosen(3, 60) == ["quick", "slow"]
    assert chosen(3, 2) == ["quick"]
    assert chosen(9, 60) == ["else", "quick", "slow"]
