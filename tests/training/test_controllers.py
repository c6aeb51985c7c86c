"""Re-SpS and LTD trained from their configs: what comes out, rounds that go on, the checkpoint that is kept, the command."""

import warnings
from dataclasses import replace

import pandas as pd
import pytest
from fakes.traces import COSTS, SMALL_LTD, SMALL_RESPS, synthetic_trace

from specdec.errors import SpecdecError
from specdec.policies import ltd, resps
from specdec.policies.base import changed, load_policy
from specdec.replays.replay import replay
from specdec.replays.trace import Trace
from specdec.training.controllers import train_ltd, train_resps
from specdec.training.env import ReplaySource
from specdec.training.ppo import RunOptions, Task, train_policy

TRACE = synthetic_trace(turns=8, positions=40)  # depth 4, k = 3, 20 nodes, 8 features


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this .* gave the answer")
        yield


def small_resps(preset, **changes):
    first = {"first_tree": (8, 3, 3)} if preset == "official" else {}
    return changed(resps.CONFIGS[preset], SMALL_RESPS | first | changes)


def small_ltd(preset, **changes):
    return changed(ltd.CONFIGS[preset], SMALL_LTD | changes)


@pytest.mark.parametrize("preset", resps.CONFIGS)
def test_resps_from_its_configs(preset, tmp_path):
    config = small_resps(preset, **{"ppo.total_steps": 128})
    policy = train_resps(TRACE, COSTS, config, out_dir=tmp_path, progress=False)
    assert policy.interval == config.interval and policy.temperature == config.temperature
    again = load_policy(tmp_path / "policy")
    facts = again.trained_for
    assert (facts["pair"], facts["costs"], facts["preset"]) == ("synthetic", "round numbers", preset)
    assert facts["config"]["reward"] == config.reward and facts["steps"] == 128
    test = TRACE.select(part="test")
    assert replay(test, policy, COSTS).ms_per_tok == replay(test, again, COSTS).ms_per_tok
    with pytest.warns(UserWarning, match="trained for costs 'round numbers'"):
        again.warn_elsewhere(costs="another")


@pytest.mark.parametrize("preset", ltd.CONFIGS)
def test_ltd_from_its_configs(preset, tmp_path):
    config = small_ltd(preset, **{"depth.stride": 1, "size.first_nodes": 4})
    if preset == "official":
        learning = {**config.depth.while_training, "total_tokens": 8, "first_depth": 2}
        config = changed(config, {"depth.first_depth": 2, "depth.while_training": learning})
    trained = train_ltd(TRACE, COSTS, config, out_dir=tmp_path, progress=False)
    names = ["iter0-size", "iter0-depth", "iter0", "iter1-size", "iter1", "iter2-depth", "iter2", "iter3-size", "iter3"]
    assert list(trained.rounds) == names and trained.policy is trained.rounds["iter3"]
    assert trained.table["frozen"].fillna("").tolist() == ["", "", "depth", "size", "depth"]
    for name in ("iter0-depth", "iter0", "iter3"):
        replay(TRACE.select(part="test"), trained.rounds[name], COSTS)
    again = load_policy(tmp_path / "iter3-size" / "policy")
    assert again.trained_for["preset"] == preset and again.trained_for["round"] == "iter3"


def test_a_later_round_goes_on_from_the_weights(tmp_path):
    config = small_ltd("paper", rounds=ltd.ROUNDS[:2])
    trained = train_ltd(TRACE, COSTS, config, out_dir=tmp_path, progress=False)
    still = replace(config.size.ppo, learning_rate=0.0)
    run = RunOptions(tmp_path / "on", start_from=tmp_path / "iter0-size", progress=False)
    learner = config.size.policy(training=True)
    goes_on = train_policy(learner, Task(ReplaySource(TRACE, COSTS)), still, run)
    assert (goes_on.network.weights[0] == trained.rounds["iter0-size"].network.weights[0]).all()


def test_the_best_by_speed_on_the_tuning_turns(tmp_path):
    turns = TRACE.turns.assign(part=["train", "tune", "test", "train"] * 2)
    trace = Trace(TRACE.header, turns, dict(TRACE._columns))
    config = small_resps("ours", **{"ppo.total_steps": 128, "select": True})
    policy = train_resps(trace, COSTS, config, out_dir=tmp_path, segment_steps=64, progress=False)
    scores = pd.read_parquet(tmp_path / "curve.parquet")["score"].dropna()
    assert len(scores) == 2
    assert 1 / replay(trace.select(part="tune"), policy, COSTS).ms_per_tok == pytest.approx(scores.max())


def test_bad_input(tmp_path):
    cases = [
        (train_resps, "our", "unknown preset of Re-SpS 'our'"),
        (train_resps, small_resps("ours", reward="speed"), "unknown reward 'speed'"),
        (train_resps, small_resps("ours", select=True), 'needs turns of part "tune"'),
        (train_ltd, small_ltd("paper", rounds=ltd.ROUNDS[2:]), "needs a trained depth policy"),
        (train_ltd, small_ltd("paper", **{"depth.depth": 1, "rounds": ltd.ROUNDS[1:2]}), "never asked"),
        (train_ltd, small_ltd("paper", rounds=()), "rounds is empty"),
    ]
    for train, config, message in cases:
        with pytest.raises(SpecdecError, match=message):
            train(TRACE, COSTS, config, out_dir=tmp_path)


def test_the_command_line_trains_a_controller(monkeypatch, tmp_path, capsys):
    from specdec.replays import trace
    from specdec.tools import cli
    from specdec.training import controllers

    called = []
    COSTS.save(tmp_path / "costs.json")
    monkeypatch.setattr(trace, "open_trace", lambda folder, pair: called.append((folder.name, pair)) or TRACE)
    monkeypatch.setattr(controllers, "train_ltd", lambda *arguments, **options: called.append((arguments, options)))
    given = ["--trace", "t", "--costs", str(tmp_path / "costs.json"), "--out", "o", "--preset", "paper", "--restart"]
    assert cli.main(["train", "ltd", *given]) == 0
    opened, (arguments, options) = called
    assert opened == ("t", None) and arguments == (TRACE, COSTS, ltd.LAPTOP["paper"])
    assert options["seed"] == 0 and not options["resume"]
    assert cli.main(["train", "ltd", *given, "--budget", "paper"]) == 0
    assert called[-1][0] == (TRACE, COSTS, ltd.PAPER)
    assert cli.main(["train", "ltd", "--trace", "t", "--costs", "nowhere", "--out", "o"]) == 2
    assert "unknown hardware profile 'nowhere'" in capsys.readouterr().err
