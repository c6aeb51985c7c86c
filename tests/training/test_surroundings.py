"""Trainings under settings of the caller, and trainings that diverge."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from fakes.traces import COSTS, SMALL_RESPS, synthetic_trace

from specdec.errors import SpecdecError
from specdec.policies import radar, resps
from specdec.policies.base import changed
from specdec.policies.value import ValueConfig
from specdec.training.controllers import train_resps
from specdec.training.loop import Best, TrainingRun
from specdec.training.radar import train_radar
from specdec.training.value import train_value

TRACE = synthetic_trace(turns=12, positions=20, depth=8, top_ks=(3, 10), most_nodes=60)
OURS = ValueConfig(top_k=3, sizes=(0, 1, 3, 7), hidden=8, steps=20, rounds=1)


def train(system, folder, rate=None):
    """A short training; returns the weights."""
    if system == "resps":
        changes = {"ppo.total_steps": 64} | ({"ppo.learning_rate": rate} if rate else {})
        config = changed(resps.OURS, SMALL_RESPS | changes)
        policy = train_resps(TRACE, COSTS, config, out_dir=folder, progress=False)
    elif system == "radar":
        config = dataclasses.replace(radar.OURS, epochs=2, learning_rate=rate or 1e-3)
        policy = train_radar(TRACE, COSTS, config, out_dir=folder).policy
    else:
        config = dataclasses.replace(OURS, learning_rate=rate or 1e-3)
        policy = train_value(TRACE, COSTS, config, progress=False)[0]
        policy.save(folder / "policy")
    return policy.network.arrays()


@pytest.fixture
def restored():
    state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_float32_matmul_precision("highest")
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002


def seed_all():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)


def draws():
    return random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("system", ["resps", "radar", "ours"])
def test_a_training_does_not_depend_on_the_callers_settings(system, tmp_path):
    plain = train(system, tmp_path / "plain")
    seed_all()
    expected = draws()
    seed_all()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        weights = train(system, tmp_path / "other")
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_device().type == "meta"
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    assert draws() == expected
    assert plain.keys() == weights.keys()
    assert all(np.array_equal(plain[name], weights[name]) for name in plain)


@pytest.mark.parametrize("system", ["resps", "radar", "ours"])
def test_a_training_that_diverges_saves_nothing(system, tmp_path):
    with np.errstate(all="ignore"), pytest.raises(SpecdecError, match="diverged"):
        train(system, tmp_path, rate=1e30)
    assert not list(tmp_path.rglob("policy.*"))


def test_what_is_not_finite_is_not_stored(tmp_path):
    policy = resps.RespsPolicy(state="concat", features_size=8, totals=(8,), depths=(3,))
    policy.fill_at_random((4,)).network.weights[0][0, 0] = np.nan
    pytest.raises(SpecdecError, policy.save, tmp_path).match("not finite")
    run = TrainingRun(tmp_path, {"steps": 1})
    layer = torch.nn.Linear(2, 1)
    run.track({"layer": layer}, [torch.optim.SGD(layer.parameters(), 0.1)])
    run.save()
    before = run.checkpoint.read_bytes()
    torch.nn.init.constant_(layer.bias, torch.inf)
    pytest.raises(SpecdecError, run.save).match("diverged")
    assert run.checkpoint.read_bytes() == before
    pytest.raises(SpecdecError, Best().consider, {}, np.nan).match("diverged")
