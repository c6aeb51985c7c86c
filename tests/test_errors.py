"""Warnings point at who called, errors name what is wrong: whatever lies between."""

import errno
import math
import warnings
from pathlib import Path

import pytest
from fakes.refusals import refusal
from fakes.traces import round_costs, synthetic_trace

from specdec import runs, stored
from specdec.costs import model
from specdec.errors import SpecdecError, door, first_line, warn
from specdec.policies.base import PPOConfig
from specdec.policies.ltd import DepthConfig, DepthPolicy, LtdConfig, SizeConfig
from specdec.policies.radar import RadarConfig, read_weights
from specdec.policies.resps import RespsConfig
from specdec.policies.value import ValueConfig
from specdec.replays.columns import read_columns
from specdec.training.controllers import train_ltd
from specdec.training.drafter.presets import Budget, Continued, Settings, objective_named
from specdec.training.env import LiveSource, ReplaySource, Reward
from specdec.training.loop import read_checkpoint
from specdec.training.value import train_value

HERE = Path(__file__)


def test_warnings_of_public_functions_too_point_at_who_calls_or_the_outermost(monkeypatch):
    for wrapped in [warn, door(warn), door(door(warn))]:
        with pytest.warns(UserWarning, match="look") as caught:
            wrapped("look")
        line = HERE.read_text().splitlines()[caught[0].lineno - 1]
        assert (Path(caught[0].filename), line.strip()) == (HERE, 'wrapped("look")')
    monkeypatch.setattr(model, "_warned", set())  # other tests were warned of such models
    narrow = round_costs(name="narrow", ranges={"verify_nodes": (1, 2)})
    policy = DepthPolicy(depth=2, top_k=3, total_tokens=8)
    policy.trained_for = {"pair": "another"}
    for call in (
        lambda: narrow.verify_ms([59], 0),
        lambda: round_costs(kind="calibrated", machine={"cpu": "Z80"}).check_machine(),
        lambda: policy.warn_elsewhere(pair="this"),
    ):
        with pytest.warns(UserWarning) as caught:
            call()
        assert Path(caught[0].filename) == HERE, caught[0].message
    monkeypatch.setattr(
        "specdec.errors.__file__", str(Path("/errors.py"))
    )  # everything lies in the package then
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("look")
    assert len(caught) == 1


def test_a_file_that_cannot_be_read_is_not_called_damaged_and_one_that_another_is_made_of_is_named(
    tmp_path,
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "junk").write_bytes(b"\x00{\xff")
    for reader in [stored.read_json, runs.read_yaml, read_columns, read_checkpoint, read_weights]:
        assert "there is no" in refusal(reader, tmp_path / "nothing")
        assert "cannot be read: " in refusal(reader, tmp_path / "folder")
        junk = refusal(reader, tmp_path / "junk")
        assert "cannot be read" not in junk or "cannot be read as" in junk
    missing = tmp_path / "there" / "weights"
    for place in (tmp_path / "out" / "copy", tmp_path / "copy"):
        sentence = refusal(runs.replace_folder, place, {"weights": missing})
        assert f"for which {missing} is read: No such file" in sentence and "disk" not in sentence
    with pytest.raises(SpecdecError, match="for which .*nowhere is read"):
        with runs.atomic(tmp_path / "file"):
            Path("/nowhere").stat()
    assert (
        first_line(ValueError("a field is wrong:\n  expected int\nmore"))
        == "a field is wrong: expected int"
    )


def test_advice_fits_what_went_wrong(home, tmp_path_factory, monkeypatch):
    def write(folder, code):
        with runs.atomic(folder / "file") as temporary:
            raise OSError(code, "planted", str(temporary))

    monkeypatch.setenv("SPECDEC_CACHE", str(home / "cache"))
    for code, advice in (
        (errno.ENOSPC, "free the disk"),
        (errno.EROFS, "make the folder writable"),
        (errno.EACCES, "make the folder writable"),
        (errno.ENAMETOOLONG, "check what is at this path"),
    ):
        for folder, elsewhere in (
            (home, "set SPECDEC_HOME"),
            (home / "cache", "set SPECDEC_CACHE"),
            (tmp_path_factory.mktemp("else"), "write elsewhere"),
        ):
            assert f"planted; {advice} or {elsewhere}" in refusal(write, folder, code)


def test_settings_of_trainings_and_prices_of_answers_are_checked_when_they_are_given(home):
    for config, spoiled in [
        (
            PPOConfig,
            dict(
                learning_rate=math.nan,
                gamma=1.5,
                n_steps=0,
                pi=(-1,),
                activation=3,
                linear_decay="no",
            ),
        ),
        (RespsConfig, dict(interval=-1, temperature=math.inf, totals=(8, math.nan))),
        (DepthConfig, dict(depth=-3, stride=1.5)),
        (SizeConfig, dict(sizes=(-1,), drafted="all")),
        (LtdConfig, dict(select="yes", depth=None)),
        (RadarConfig, dict(alpha=-1.0, batch=0, continue_bias=math.nan)),
        (ValueConfig, dict(noise=math.nan, dropout=7.0)),
        (Reward, dict(unit_ms=0.0, rate=math.nan, laps="draft_ms")),
        (Settings, dict(batch=0, steps=0, passes=0, learning_rate=-1.0, held_out_frac=1.5)),
        (Continued, dict(measure_every=0, length=0)),
        (Budget, dict(minutes=math.nan, steps=0, seed=10**40)),
    ]:
        config()
        for name, value in spoiled.items():
            assert name in refusal(config, **{name: value})
    for policy_ms in [-1.0, math.nan, math.inf]:
        trace, costs = synthetic_trace(turns=4, positions=12), round_costs()
        given = dict(policy_ms=policy_ms)
        assert "policy_ms" in refusal(train_value, trace, costs, **given)
        assert "policy_ms" in refusal(train_ltd, trace, costs, out_dir=home, **given)
        assert "policy_ms" in refusal(ReplaySource, trace, costs, **given)
        assert "policy_ms" in refusal(LiveSource, None, [], **given)
    for value in [math.nan, "abc", -1.0]:
        assert "beta" in refusal(objective_named, "ppow", {"beta": value})
