"""A training run: exact resume, a run on time finds its end, other runs are refused."""

import math
import time

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from specdec import runs
from specdec.errors import SpecdecError
from specdec.training import loop
from specdec.training.loop import Best, TrainingRun, seeded


def trained(folder, dies_at=None, resume=True, **settings):
    """A run of a one-layer network whose steps draw random numbers; returns (run, weights)."""
    run = TrainingRun(folder, {"steps": 6}, resume)
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    run.track({"layer": layer}, [optimizer])

    def step(number, factor):
        if number == dies_at and not settings.get("all_or_nothing"):
            raise KeyboardInterrupt
        for half in range(2):
            with seeded(7, 2 * number + half):
                loss = layer(torch.randn(5, 3)).square().mean()
            loop.descend(optimizer, loss)
            if number == dies_at:
                raise KeyboardInterrupt
        return {"loss": float(loss.detach())}

    run.run(step, "test", progress=False, **settings)
    return run, layer.weight.detach()


@pytest.mark.parametrize("settings", [{"all_or_nothing": True}, {"save_s": 1000}])
def test_an_interrupted_run_resumes(tmp_path, settings):
    run, weights = trained(tmp_path / "straight", **settings)
    pytest.raises(KeyboardInterrupt, trained, tmp_path / "killed", dies_at=3, **settings)
    assert len(runs.read_table(tmp_path / "killed" / "loss.parquet")) == 3
    again, resumed = trained(tmp_path / "killed", **settings)
    assert torch.equal(weights, resumed)
    assert again.table()["loss"].tolist() == run.table()["loss"].tolist()
    assert again.table()["step"].tolist() == list(range(6))
    assert again.elapsed_s > 0


def test_rows_after_the_checkpoint_are_cut(tmp_path):
    pytest.raises(KeyboardInterrupt, trained, tmp_path, dies_at=3, all_or_nothing=True)
    rows = runs.read_table(tmp_path / "loss.parquet")
    later = pd.DataFrame({"step": [3, 4], "loss": 0.0, "elapsed_s": 0.0})
    runs.write_table(tmp_path / "loss.parquet", pd.concat([rows, later]))
    run, _ = trained(tmp_path)
    assert run.table()["step"].tolist() == list(range(6))
    assert (run.table()["loss"] > 0).all()
    run.finish(best=4)
    run.finish(best=5)
    plan = runs.read_json(tmp_path / "plan.json")
    assert (plan["finished"], plan["steps_done"], plan["results"]) == (True, 6, {"best": 4})
    again = TrainingRun(tmp_path, {"steps": 6})
    again.run(None, "nothing to do")
    assert again.plan == plan
    assert not TrainingRun(tmp_path, {"steps": 6}, resume=False).plan["finished"]


def test_a_run_on_time_or_on_its_text_finds_its_end(tmp_path):
    run = TrainingRun(tmp_path, {"steps": None, "minutes": 0.2 / 60})
    run.track({})
    run.run(lambda number, _: time.sleep(0.01), "test", lambda step, last: 1.0, progress=False)
    assert run.plan["last_step"] == run.step >= 2
    assert runs.read_json(tmp_path / "plan.json")["last_step"] == run.step
    for name, settings, wanted in (
        ("a", {"steps": None, "minutes": None}, 7),
        ("b", {"steps": 5}, 5),
        ("c", {"steps": None, "minutes": 1.0}, None),
    ):
        run = TrainingRun(tmp_path / name, settings)
        run.end_at(7)
        assert run.plan["last_step"] == wanted
        assert runs.read_json(tmp_path / name / "plan.json")["last_step"] == wanted


def test_rates_are_shares_of_their_peaks(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 9.0, "peak": 0.5}])
    rates = []

    def step(number, share):
        rates.append((number, share, optimizer.param_groups[0]["lr"]))

    # a run without a schedule leaves the rates as they are
    for steps, factor in ((1, None), (2, lambda step, last: (step + 1) / last)):
        run = TrainingRun(tmp_path / str(steps), {"steps": steps})
        run.track({}, [optimizer])
        run.run(step, "test", factor, progress=False)
    assert rates == [(0, 1.0, 9.0), (0, 0.5, 0.25), (1, 1.0, 0.5)]


def test_other_runs_are_refused(tmp_path):
    trained(tmp_path)
    pytest.raises(SpecdecError, TrainingRun, tmp_path, {"steps": 7}).match("other settings")
    tensors = {"layer.weight": torch.zeros(1, 3)}
    save_file(tensors, tmp_path / "checkpoint.safetensors", {"step": "3"})
    pytest.raises(SpecdecError, trained, tmp_path).match("another version")
    (tmp_path / "checkpoint.safetensors").write_bytes(b"nothing")
    pytest.raises(SpecdecError, trained, tmp_path).match("cannot be read")
    assert trained(tmp_path, resume=False)[0].step == 6


def test_the_best_weights_are_kept():
    network = torch.nn.Linear(2, 2)
    best = Best(network)
    assert torch.equal(best.weights["weight"], network.weight)
    assert (best.score, best.step) == (-math.inf, -1)
    states = []
    for step, score in enumerate((1.0, 2.0, 2.0, 1.5, 3.0, 2.0)):
        torch.nn.init.constant_(network.weight, score + step)
        best.consider(network.state_dict(), score, step)
        states.append((best.score, best.step, best.misses, float(best.weights["weight"][0, 0])))
    # as good is no better
    assert states[:3] == [(1, 0, 0, 1), (2, 1, 0, 3), (2, 1, 1, 3)]
    assert states[3:] == [(2, 1, 2, 3), (3, 4, 0, 7), (3, 4, 1, 7)]
    restored = Best()
    restored.load_state_dict(best.state_dict())
    assert (restored.score, restored.step, restored.misses) == (3, 4, 1)
    assert float(restored.load_into(network).weight.detach()[0, 0]) == 7
    # what has no score is the newest
    best.consider(network.state_dict(), None)
    assert (best.score, best.step, best.misses) == (-math.inf, -1, 0)
    assert torch.equal(best.weights["weight"], network.weight)
