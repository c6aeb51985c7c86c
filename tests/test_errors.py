"""Warnings point at the caller, errors name what is wrong."""

import errno
import math
from pathlib import Path

import numpy as np
import pytest
from fakes.refusals import refusal
from fakes.traces import round_costs, synthetic_trace

from specdec import runs, stored
from specdec.core.tree_config import TreeConfig
from specdec.errors import check_fields, check_integer, check_number, door, first_line, warn
from specdec.policies.base import PPOConfig
from specdec.policies.value import ValueConfig
from specdec.training.drafter.presets import Budget, Settings
from specdec.training.env import Reward
from specdec.training.value import train_value

HERE = Path(__file__)


def test_a_warning_points_at_the_line_outside_the_package():
    for function in [warn, door(warn), door(door(warn))]:
        with pytest.warns(UserWarning, match="look") as caught:
            function("look")
        line = HERE.read_text().splitlines()[caught[0].lineno - 1]
        assert (Path(caught[0].filename), line.strip()) == (HERE, 'function("look")')
    with pytest.warns(UserWarning) as caught:
        round_costs(kind="calibrated", machine={"cpu": "Z80"}).check_machine()
    assert Path(caught[0].filename) == HERE


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "junk").write_bytes(b"\x00{\xff")
    for reader in [stored.read_json, runs.read_yaml, runs.read_table]:
        assert "there is no" in refusal(reader, tmp_path / "nothing")
        assert "cannot be read as" in refusal(reader, tmp_path / "junk")
    assert "cannot be read: " in refusal(stored.read_json, tmp_path / "folder")
    several_lines = ValueError("a field is wrong:\n  expected int\nmore")
    assert first_line(several_lines) == "a field is wrong: expected int"


def test_a_disk_error_names_the_file_and_the_way_out(tmp_path):
    def write():
        with runs.atomic(tmp_path / "file"):
            raise OSError(errno.EROFS, "planted")

    sentence = refusal(write)
    assert f"{tmp_path / 'file'}: [Errno {errno.EROFS}] planted; free the disk" in sentence


@door
def double(number: int, name: str | None = None) -> int:
    return 2 * number


def test_a_door_refuses_what_its_annotations_exclude():
    assert double(2) == double(np.int64(2), "x") == 4
    assert refusal(double, "2") == "number of double() must be int, got the str '2'."
    for wrong in ((True,), (2.0,), (2, 3)):
        assert "of double() must be" in refusal(double, *wrong)


def test_numbers_out_of_range_are_refused():
    assert check_integer("limit", 1, 1) == 1 and check_number("rate", 1, 0, 1) == 1
    numbers = [check_integer("limit", np.int64(4)), TreeConfig(np.int32(8), 3, 2).total_tokens]
    assert numbers == [4, 8] and {type(number) for number in numbers} == {int}
    for value in [0, 1.5, True, np.True_, np.float64(2), "2"]:
        assert "limit" in refusal(check_integer, "limit", value, 1)
    for value in [-0.1, 1.1, math.nan, math.inf, "1", True]:
        assert "rate" in refusal(check_number, "rate", value, 0, 1)
    check_fields(PPOConfig(), n_steps=(1, 1e9))
    assert "n_steps" in refusal(check_fields, PPOConfig(), n_steps=(10**7, math.inf))


@pytest.mark.parametrize(
    "config, wrong",
    [
        (PPOConfig, dict(learning_rate=math.nan, gamma=1.5, n_steps=0, activation=3)),
        (ValueConfig, dict(noise=math.nan, dropout=7.0)),
        (Reward, dict(rate=math.nan)),
        (Settings, dict(batch=0, passes=0, learning_rate=-1.0)),
        (Budget, dict(minutes=math.nan, steps=0)),
    ],
)
def test_settings_are_checked_when_they_are_given(config, wrong):
    config()
    for name, value in wrong.items():
        assert name in refusal(config, **{name: value})


def test_costs_of_answers_are_checked_before_a_training():
    trace = synthetic_trace(turns=4, positions=12)
    for value in [-1.0, math.nan]:
        assert "policy_ms" in refusal(train_value, trace, round_costs(), policy_ms=value)
