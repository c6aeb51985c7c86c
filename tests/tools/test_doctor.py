"""The doctor names what is missing, and the costs of a cycle follow from the measured rows."""

import pandas as pd
import pytest

from specdec.tools import doctor


def test_checks_find_a_wrong_folder(monkeypatch, home):
    monkeypatch.setenv("SPECDEC_DATA", str(home / "nowhere"))
    checks = doctor.checks(pairs=("tiny", "nothing")).set_index("fact")
    assert checks.loc["benchmarks", "state"] == doctor.FAULT
    assert checks.loc["pair tiny", "state"] == doctor.OK
    assert checks.loc["pair nothing", "state"] == doctor.FAULT
    assert checks.loc["results", "value"] == str(home)


def test_a_cycle_is_counted_in_plain_steps():
    counts = {"new_tok": 11, "cycle_tok": 10, "total_ms": 25.0, "decode_ms": 20.0, "repeat": 0}
    plain = {"method": "plain", **counts, "cycles": 10}
    tree = {"method": "8/3/3", **counts, "cycles": 5, "total_ms": 12.5}
    slow = {"method": "60/7/10", **counts, "cycles": 5, "total_ms": 50.0}
    cycle = {"repeat": 0, "draft_ms": 5.0, "verify_ms": 10.0, "total_ms": 20.0}
    cycles = pd.DataFrame([{"method": name, **cycle} for name in ("8/3/3", "60/7/10")])
    row = doctor.fastest(pd.DataFrame([plain, tree, slow]), cycles)
    assert row["tree"] == "8/3/3"
    expected = {"tau": 2.0, "plain_ms": 2.0, "draft_steps": 0.5, "verify_steps": 1.0}
    expected.update(rest_steps=0.5, speed=2.0, speed_low=2.0, speed_high=2.0)
    for name, value in expected.items():
        assert row[name] == pytest.approx(value), name
