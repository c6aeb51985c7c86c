"""A training run: its curve grows in shards, a run on time finds its end, and what cannot be
continued is refused.
"""

import math
import time

import pandas as pd
import pytest
import torch
from fakes.bars import Bar
from safetensors.torch import save_file

from specdec import runs
from specdec.errors import SpecdecError
from specdec.training import loop
from specdec.training.loop import Best, Curve, TrainingRun, generators, seeded


def trained(folder, steps=6, dies_at=None, **settings):
    """A run of a one-layer network whose steps draw random numbers; returns (run, weights)."""
    run = TrainingRun(folder, {"steps": steps}, settings.pop("resume", True))
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    run.track({"layer": layer}, [optimizer])

    def step(number, factor):
        for half in range(2):
            with seeded(7, 2 * number + half):
                loss = layer(torch.randn(5, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (number, half) == (dies_at, 0):
                raise KeyboardInterrupt
        return {"loss": float(loss.detach())}

    run.run(step, "test", all_or_nothing=True, progress=False, **settings)
    return run, layer.weight.detach()


@pytest.mark.parametrize("save_s", [0, 1000])
def test_a_step_that_breaks_off_leaves_nothing_behind(tmp_path, save_s):
    run, weights = trained(tmp_path / "straight", save_s=save_s)
    pytest.raises(KeyboardInterrupt, trained, tmp_path / "killed", dies_at=3, save_s=save_s)
    again, resumed = trained(tmp_path / "killed", save_s=save_s)
    assert torch.equal(weights, resumed)
    assert again.table()["loss"].tolist() == run.table()["loss"].tolist() and len(run.table()) == 6
    assert len(runs.read_table(tmp_path / "killed" / "loss.parquet")) == 6
    assert [session["step"] for session in again.plan["sessions"]] == [0, 3]


def test_a_finished_run_keeps_one_table_and_rows_after_the_checkpoint_are_cut(tmp_path):
    run, _ = trained(tmp_path)
    rows = run.table()
    run.finish(loss=1.0)
    assert not run.curve.shards.done() and run.table().equals(rows)
    again = TrainingRun(tmp_path, {"steps": 6})
    again.run(None, "nothing to do")
    assert again.finished and again.plan["results"] == {"loss": 1.0} and again.table().equals(rows)
    assert not TrainingRun(tmp_path, {"steps": 6}, resume=False).finished
    pytest.raises(KeyboardInterrupt, trained, tmp_path, dies_at=3, save_s=0)
    Curve(tmp_path / "loss").shards.write(3, pd.DataFrame({"step": [3, 4], "loss": 0.0}))
    run, _ = trained(tmp_path, save_s=0)
    assert run.table()["step"].tolist() == list(range(6)) and (run.table()["loss"] > 0).all()


def test_saving_a_long_curve_costs_what_is_new(tmp_path):
    run = TrainingRun(tmp_path, {"steps": 20_000})
    run.track({})
    columns = {f"{name}_{s}": 0.25 for name in ("loss", "accuracy") for s in range(7)}
    for number in range(20_000):
        run.curve.add({"step": number, "loss": 0.5, **columns})
        run.step += 1
        if run.step % 1000 == 0:
            before = time.time_ns()
            run.save()
            written = [
                path
                for path in tmp_path.rglob("*")
                if path.is_file() and path.stat().st_mtime_ns >= before
            ]
            assert len(written) <= 3 and sum(path.stat().st_size for path in written) < 50_000
            assert not run.curve.new
    assert len(run.curve.shards.done()) == 20
    again = TrainingRun(tmp_path, {"steps": 20_000})
    again.track({})
    assert again.step == 20_000 and again.table()["step"].tolist() == list(range(20_000))


def test_rates_are_shares_of_their_peaks_and_a_run_on_time_or_on_its_text_finds_its_end(tmp_path):
    run = TrainingRun(tmp_path, {"steps": None, "minutes": 0.2 / 60})
    run.track({})
    run.run(lambda number, _: time.sleep(0.01), "test", lambda step, last: 1.0, progress=False)
    assert (
        run.plan["last_step"] == run.step >= 2
        and runs.read_json(tmp_path / "plan.json")["last_step"] == run.step
    )
    torch.manual_seed(3)
    with generators(1, 2):
        first = torch.rand(2)
    rest = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(rest, torch.rand(2)) and not torch.equal(first, rest)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 9.0, "peak": 0.5}])
    run, seen = TrainingRun(tmp_path / "rates", {"steps": 2}), []
    run.track({}, [optimizer])

    def step(number, share):
        seen.append((number, share, optimizer.param_groups[0]["lr"]))

    run.run(step, "test", lambda step, last: (step + 1) / last, progress=False)
    assert seen == [(0, 0.5, 0.25), (1, 1.0, 0.5)]
    run = TrainingRun(tmp_path / "a", {"steps": None, "minutes": None})
    run.track({})
    run.end_at(7)
    assert run.plan["last_step"] == 7 == runs.read_json(tmp_path / "a" / "plan.json")["last_step"]
    for name, settings in (("b", {"steps": 5}), ("c", {"steps": None, "minutes": 1.0})):
        other = TrainingRun(tmp_path / name, settings)
        other.end_at(7)
        assert other.plan["last_step"] == settings["steps"]
    stopped = TrainingRun(tmp_path / "d", {"steps": 9})
    stopped.track({})
    stopped.stopped = lambda: stopped.step == 2
    stopped.run(lambda number, factor: None, "test", progress=False)
    assert stopped.step == 2


def test_other_runs_are_refused_in_a_sentence(tmp_path):
    trained(tmp_path)
    pytest.raises(SpecdecError, TrainingRun, tmp_path, {"steps": 7}).match("other settings")
    save_file(
        {"layer.weight": torch.zeros(1, 3)},
        tmp_path / "checkpoint.safetensors",
        {"step": "3", "curve": "[]"},
    )
    pytest.raises(SpecdecError, trained, tmp_path).match("another version")
    (tmp_path / "checkpoint.safetensors").write_bytes(b"nothing")
    pytest.raises(SpecdecError, trained, tmp_path).match("cannot be read")
    assert trained(tmp_path, resume=False)[0].step == 6


def test_the_plan_and_the_bar_say_where_a_run_is(tmp_path, monkeypatch):
    monkeypatch.setattr(Bar, "made", bars := [])
    monkeypatch.setattr(loop, "tqdm", Bar)
    run = TrainingRun(tmp_path, {"steps": 3})
    run.track({})
    assert (
        run.plan["settings"] == {"steps": 3}
        and run.plan["last_step"] == 3
        and run.plan["finished"] is False
    )
    rows = iter([{"loss": 0.123456, "other": 1.0}, None, {"loss": float("nan"), "accuracy_0": 2.0}])
    run.run(lambda number, factor: next(rows) if factor == 1.0 else None, "label")
    (bar,) = bars
    wanted = {"initial": 0, "desc": "label", "disable": False}
    assert {name: bar.named[name] for name in wanted} == wanted
    assert (
        bar.n == bar.total == 3
        and bar.closed
        and bar.told == [{"loss": "0.1235"}, {"accuracy_0": "2"}]
    )
    assert run.curve.table()["step"].tolist() == [0, 2]
    run.finish(best=4)
    plan = runs.read_json(tmp_path / "plan.json")
    assert set(plan) == {
        "settings",
        "last_step",
        "finished",
        "sessions",
        "steps_done",
        "elapsed_s",
        "results",
    }
    assert (plan["finished"], plan["steps_done"], plan["results"]) == (True, 3, {"best": 4})
    run.finish(best=5)
    assert runs.read_json(tmp_path / "plan.json")["results"] == {"best": 4}, (
        "what is finished stays as it was"
    )
    assert plan["sessions"][0]["step"] == 0 and len(plan["sessions"]) == 1


def test_the_best_weights_are_kept_and_found_again_in_a_checkpoint():
    network = torch.nn.Linear(2, 2)
    best, seen = Best(network), []
    assert torch.equal(best.weights["weight"], network.weight) and (best.score, best.step) == (
        -math.inf,
        -1,
    )
    for step, score in enumerate((1.0, 2.0, 2.0, 1.5, 3.0, 2.0)):
        with torch.no_grad():
            network.weight.fill_(score + step)
        best.consider(network.state_dict(), score, step)
        seen.append((best.score, best.step, best.misses, float(best.weights["weight"][0, 0])))
    assert seen == [
        (1, 0, 0, 1),
        (2, 1, 0, 3),
        (2, 1, 1, 3),
        (2, 1, 2, 3),
        (3, 4, 0, 7),
        (3, 4, 1, 7),
    ]
    state, other = best.state_dict(), Best()
    other.load_state_dict(state)
    assert (other.score, other.step, other.misses) == seen[-1][:3]
    assert float(other.load_into(torch.nn.Linear(2, 2)).weight[0, 0]) == 7
    best.consider(network.state_dict(), None)
    assert (best.score, best.step, best.misses) == (-math.inf, -1, 0), (
        "what has no score is the newest"
    )
    assert torch.equal(best.weights["weight"], network.weight)
    narrow = Best(dtype=torch.float32)
    narrow.consider({}, 0.1)
    assert narrow.score == float(torch.tensor(0.1, dtype=torch.float32)) != 0.1
