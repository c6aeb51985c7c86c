"""The runner of mutants finds changes, notices those that a test notices, and outlives what hangs."""

import pytest

pytest.importorskip("mutmut", reason="make mutants fetches it")
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
    monkeypatch.setattr(mutants, "STORE", tmp_path)
    path = tmp_path / "room" / "sums.py"
    path.parent.mkdir()
    path.write_text(MODULE)
    return path


def test_changes_are_one_at_a_time_and_leave_sentences_alone(module):
    found = mutants.mutants_of(module, module.parents[1])
    assert len({one.key for one in found}) == len(found) > 6
    diffs = [one.diff for one in found]
    assert "-    return first + second\n+    return first - second" in diffs
    assert "-    if self.many > 1:\n+    if self.many >= 1:" in diffs  # behind a decorator, too
    assert not [diff for diff in diffs if "sentence" in diff]
    assert all(MODULE.splitlines()[one.first - 1] == one.diff.splitlines()[0][1:] for one in found)


def test_what_a_test_notices_is_killed(module, monkeypatch):
    root = module.parents[1]
    (root / "test_sums.py").write_text(TESTS)
    monkeypatch.chdir(root)
    outcomes = {}
    for one in mutants.mutants_of(module, root):
        if one.first in (3, 4):
            outcomes[one.diff] = mutants.tried(one, {"test_sums.py::test_total": 0.1}, root)["outcome"]
    assert outcomes.pop("-    return first + second\n+    return first - second") == "killed"
    assert set(outcomes.values()) == {"survived"} and len(outcomes) >= 2
    assert module.read_text() == MODULE
    assert mutants.tried(mutants.mutants_of(module, root)[0], {}, root) == {"outcome": "untested"}


def test_what_hangs_is_stopped(tmp_path):
    def endless():
        while True:
            pass

    assert mutants.forked(endless, 1, tmp_path / "said.txt") == (None, "timeout")
    assert mutants.forked(lambda: [1], 5, tmp_path / "said.txt") == ([1], "")
