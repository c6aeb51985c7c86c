"""Re-SpS and LTD trained from their configs: what comes out, rounds that go on, the checkpoint that
is kept, the command.
"""

import functools
import inspect
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fakes.traces import COSTS, SMALL_LTD, SMALL_RESPS, synthetic_trace

from specdec import runs
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies import ltd, radar, resps, value
from specdec.policies.base import changed, choices_of, load_policy
from specdec.replays.replay import replay
from specdec.replays.trace import Trace
from specdec.tools import cli, places
from specdec.training import controllers
from specdec.training import radar as radar_training
from specdec.training.controllers import (
    interval_credit,
    train_ltd,
    train_resps,
    train_sweep,
    train_system,
)
from specdec.training.env import ReplaySource, Reward
from specdec.training.ppo import Outcome, RunOptions, Task, train_policy

from experiments import sentences, texts

pytestmark = pytest.mark.filterwarnings("ignore:this .* gave the answer")
TRACE = synthetic_trace(turns=8, positions=40)  # depth 4, k = 3, 20 nodes, 8 features
PARTS = ["train", "tune", "test", "train"] * 2


def small_resps(preset, **changes):
    first = {"first_tree": (8, 3, 3)} if preset == "official" else {}
    return changed(resps.CONFIGS[preset], SMALL_RESPS | first | changes)


def small_ltd(preset, **changes):
    return changed(ltd.CONFIGS[preset], SMALL_LTD | changes)


def parted(parts=PARTS, **header) -> Trace:
    return Trace({**TRACE.header, **header}, TRACE.turns.assign(part=parts), dict(TRACE._columns))


@pytest.mark.parametrize("preset", resps.CONFIGS)
def test_resps_from_its_configs(preset, tmp_path):
    config = small_resps(preset, **{"ppo.total_steps": 128})
    policy = train_resps(TRACE, COSTS, config, out_dir=tmp_path, progress=False)
    assert policy.interval == config.interval and policy.temperature == config.temperature
    again = load_policy(tmp_path / "policy")
    assert again.trained_for["preset"] == preset and again.trained_for["steps"] == 128
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
    names = [
        "iter0-size",
        "iter0-depth",
        "iter0",
        "iter1-size",
        "iter1",
        "iter2-depth",
        "iter2",
        "iter3-size",
        "iter3",
    ]
    assert list(trained.rounds) == names and trained.policy is trained.rounds["iter3"]
    assert trained.table["frozen"].fillna("").tolist() == ["", "", "depth", "size", "depth"]
    for name in ("iter0-depth", "iter0", "iter3"):
        replay(TRACE.select(part="test"), trained.rounds[name], COSTS)
    again = load_policy(tmp_path / "iter3-size" / "policy")
    assert again.trained_for["preset"] == preset and again.trained_for["round"] == "iter3"


def test_a_later_round_goes_on_from_the_weights_and_the_fastest_are_kept(tmp_path):
    config = small_ltd("paper", rounds=ltd.ROUNDS[:2])
    trained = train_ltd(TRACE, COSTS, config, out_dir=tmp_path, progress=False)
    still = replace(config.size.ppo, learning_rate=0.0)
    run = RunOptions(tmp_path / "on", start_from=tmp_path / "iter0-size", progress=False)
    learner = config.size.policy(training=True)
    goes_on = train_policy(learner, Task(ReplaySource(TRACE, COSTS)), still, run)
    assert (goes_on.network.weights[0] == trained.rounds["iter0-size"].network.weights[0]).all()
    config = small_resps("ours", **{"ppo.total_steps": 128, "select": True})
    policy = train_resps(
        parted(), COSTS, config, out_dir=tmp_path, segment_steps=64, progress=False
    )
    scores = pd.read_parquet(tmp_path / "curve.parquet")["score"].dropna()
    assert len(scores) == 2
    assert 1 / replay(parted().select(part="tune"), policy, COSTS).ms_per_tok == pytest.approx(
        scores.max()
    )


def test_bad_input(tmp_path):
    for train, config, message in (
        (train_resps, "our", "unknown preset of Re-SpS 'our'"),
        (train_resps, small_resps("ours", reward="speed"), "unknown reward 'speed'"),
        (train_resps, small_resps("ours", select=True), 'needs turns of part "tune"'),
        (train_ltd, small_ltd("paper", rounds=ltd.ROUNDS[2:]), "needs a trained depth policy"),
        (
            train_ltd,
            small_ltd("paper", **{"depth.depth": 1, "rounds": ltd.ROUNDS[1:2]}),
            "never asked",
        ),
        (train_ltd, small_ltd("paper", rounds=()), "rounds is empty"),
    ):
        pytest.raises(SpecdecError, train, TRACE, COSTS, config, out_dir=tmp_path).match(message)


def test_the_command_line_trains_a_controller_and_reaches_every_field(
    monkeypatch, tmp_path, capsys
):
    costs, opened, trained = str(COSTS.save(tmp_path / "costs.json")), [], []
    monkeypatch.setattr(
        "specdec.tools.places.open_trace", lambda *given: opened.append(given) or TRACE
    )
    monkeypatch.setattr(controllers, "recorded_grid", lambda config, trace: config)
    for place, name in (
        (controllers, "train_resps"),
        (controllers, "train_ltd"),
        (radar_training, "train_radar"),
    ):
        monkeypatch.setattr(place, name, lambda *given, **options: trained.append((given, options)))

    def train(system, *given, costs=costs):
        return cli.main(
            [
                "train",
                system,
                "--trace",
                "t",
                "--costs",
                costs,
                "--out",
                "o",
                "--preset",
                "paper",
                *given,
            ]
        )

    assert train("ltd", "--restart") == 0
    ((folder, pair),), ((given, options),) = opened, trained
    assert (folder.name, pair) == ("t", None) and given == (TRACE, COSTS, ltd.LAPTOP["paper"])
    assert options["seed"] == 0 and not options["resume"]
    for system, words, config in (
        ("ltd", "--budget paper", ltd.PAPER),
        (
            "resps",
            "--variant standard --set interval=3 --set ppo.pi=[64,64]",
            changed(resps.STANDARD["paper"], {"interval": 3, "ppo.pi": (64, 64)}),
        ),
        (
            "ltd",
            "--order 4 --set depth.ppo.normalise_observations=true",
            changed(
                ltd.LAPTOP["paper"],
                {"rounds": ltd.ORDERS["4"], "depth.ppo.normalise_observations": True},
            ),
        ),
        (
            "radar",
            "--set alpha=0.05 exact=false",
            changed(radar.PAPER, {"alpha": 0.05, "exact": False}),
        ),
    ):
        assert train(system, *words.split()) == 0 and trained.pop()[0] == (TRACE, COSTS, config)
    trained.clear()
    assert train("ltd", costs="nowhere") == 2
    assert "unknown hardware profile 'nowhere'" in capsys.readouterr().err
    for system, wrong, told in (
        (
            "resps",
            "intervall=3",
            "unknown field of RespsConfig 'intervall'; did you mean 'interval'",
        ),
        ("resps", "interval=0", "interval of RespsConfig must be"),
        ("ltd", "depth.strid=2", "unknown field of DepthConfig 'strid'; did you mean 'stride'"),
        ("ltd", "name.size=2", "unknown field of str 'size'"),
        ("radar", "gradient=exakt", "unknown gradient 'exakt'; did you mean 'exact'"),
        ("radar", "alpha=much", "alpha of RadarConfig must be float"),
        ("radar", "alpha", "--set takes name=value such as ppo.gamma=0.9, not 'alpha'"),
    ):
        assert train(system, "--set", wrong) == 2 and not trained
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


def test_the_command_line_embeds_the_text_for_the_state_that_reads_it(
    monkeypatch, tmp_path, capsys
):
    costs = str(COSTS.save(tmp_path / "costs.json"))
    monkeypatch.setattr("specdec.tools.places.open_trace", lambda *given: TRACE)
    monkeypatch.setattr(places, "load", lambda which, dtype: (which.name, dtype))
    monkeypatch.setattr(sentences, "encoder_at_hand", lambda: ("encoder", ""))
    monkeypatch.setattr(texts, "with_text_states", lambda pair, trace, encoder: (pair, encoder))
    seen = []
    monkeypatch.setattr(
        controllers, "train_system", lambda system, trace, *given, **options: seen.append(trace)
    )
    given = ["train", "resps", "--trace", "t", "--costs", costs, "--out", "o", "--set"]
    assert (
        cli.main([*given, "state=text", "--pair", "tiny"])
        == cli.main([*given, "state=concat"])
        == 0
    )
    assert seen == [(("tiny", TRACE.header["dtype"]), "encoder"), TRACE]
    monkeypatch.setattr(sentences, "encoder_at_hand", lambda: (None, "it is not installed."))
    assert (
        cli.main([*given, "state=text", "--pair", "tiny"]) == 2
        and "not installed" in capsys.readouterr().err
    )


@pytest.fixture
def untaught(monkeypatch):
    """Trainings are noted and leave random weights."""
    given = []

    def train(learner, task, ppo, run, judge):
        given.append(SimpleNamespace(learner=learner, task=task, ppo=ppo, run=run, judge=judge))
        runs.write_json(
            Path(run.out_dir) / "plan.json", {"results": {"tok_per_ms": float(len(given))}}
        )
        return learner.fill_at_random((4,), seed=len(given))

    monkeypatch.setattr(controllers, "train_policy", train)
    return given


def test_resps_is_taught_as_its_config_says(tmp_path, untaught):
    plain, official = (
        small_resps("ours"),
        small_resps("official", reward="lagrangian", select=True, prompts=("hard",)),
    )
    train_resps(TRACE, COSTS, plain, out_dir=tmp_path / "plain")
    trace = parted()
    policy = train_resps(
        trace, COSTS, official, seed=3, out_dir=tmp_path, policy_ms=0.5, envs=2, source="live"
    )
    first, second = untaught
    assert isinstance(first.task.source, ReplaySource) and first.task.source.policy_ms == 0.0
    assert set(first.task.source.trace.turns["part"]) == {"train"}
    trees = [[tree] for tree in first.learner.trees]
    assert first.task.reward == controllers.reward_of(plain, first.task.source, trees)
    assert (first.task.episode, first.task.adapt_rate, first.task.reseed_each_turn) == (
        "turn",
        True,
        False,
    )
    facts = {
        "preset": "ours",
        "config": asdict(plain),
        "pair": "synthetic",
        "costs": "round numbers",
    }
    facts["deviations"] = []
    assert first.run == RunOptions(tmp_path / "plain", 0, trained_for=facts) and first.judge is None
    assert (
        second.task.source == "live" and second.task.reward.rate > 0 and second.ppo == official.ppo
    )
    assert (second.task.episode, second.task.adapt_rate, second.task.reseed_each_turn) == (
        "interval",
        True,
        True,
    )
    assert second.run.out_dir == tmp_path and (second.run.seed, second.run.envs) == (3, 2)
    assert second.learner.settings() == official.policy(8, training=True).settings()
    assert (
        policy.settings() == official.policy(8).settings()
        and policy.network is second.learner.network
    )
    tune = trace.select(part="tune")
    assert second.judge(policy) == 1 / replay(tune, policy, COSTS, policy_ms=0.5).ms_per_tok
    kept, alone = (load_policy(folder / "policy") for folder in (tmp_path, tmp_path / "plain"))
    weights = {"choice": "weights", "part": "train", "value": "recipe 'official', chosen before"}
    assert choices_of(kept) == [weights, {"choice": "checkpoint", "part": "tune", "value": ""}]
    assert choices_of(alone) == [weights | {"value": "recipe 'ours', chosen before"}]
    blind = parted(TRACE.turns["part"], features=False)
    train_resps(blind, COSTS, small_resps("paper", state="text"), out_dir=tmp_path)
    assert untaught[2].learner.features_size == 0 and untaught[2].run.seed == 0
    defaults = [
        inspect.signature(train).parameters["config"].default for train in (train_resps, train_ltd)
    ]
    assert defaults[0] is resps.OURS and defaults[1] is ltd.OURS


def test_ltds_rounds_go_on_from_each_other_and_are_judged_beside_the_frozen_partner(
    tmp_path, untaught
):
    config = small_ltd("ours", random_depth=True, **{"size.drafted": None, "depth.first_depth": 2})
    trained = train_ltd(TRACE, COSTS, config, seed=2, out_dir=tmp_path, policy_ms=0.5, envs=4)
    size, depth, size_1, depth_2, size_3 = untaught
    folders = [tmp_path / f"{part.name}-{part.learner}" for part in config.rounds]
    assert [one.run.out_dir for one in untaught] == folders
    assert [one.run.start_from for one in untaught] == [
        None,
        None,
        folders[0],
        folders[1],
        folders[2],
    ]
    assert all(
        (one.run.seed, one.run.envs) == (2, 4) and one.task.source.policy_ms == 0.5
        for one in untaught
    )
    assert [one.run.trained_for["round"] for one in untaught] == [
        part.name for part in config.rounds
    ]
    assert [one.run.trained_for["frozen"] for one in untaught] == [
        None,
        None,
        "depth",
        "size",
        "depth",
    ]
    facts = {
        "preset": "ours",
        "config": asdict(config),
        "pair": "synthetic",
        "costs": "round numbers",
    }
    facts["deviations"] = []
    assert size.run.trained_for == facts | {"round": "iter0", "frozen": None}
    assert depth.task.others is None and size_1.task.others is trained.rounds["iter0-depth"]
    assert (
        depth_2.task.others is trained.rounds["iter1-size"]
        and size_3.task.others is trained.rounds["iter2-depth"]
    )
    random_depth = size.task.others(7)
    assert isinstance(random_depth, ltd.RandomDepth) and random_depth.plans[-1] == TreeConfig(
        21, 4, 3
    )
    assert len(random_depth.plans) == 4
    same = ltd.RandomDepth(4, 3, 20, 7)
    assert [random_depth.answer(None).depth for _ in range(9)] == [
        same.answer(None).depth for _ in range(9)
    ]
    assert {one.task.adapt_rate for one in untaught} == {True} and {
        one.judge for one in untaught
    } == {None}
    assert trained.table.fillna("").to_dict("list") == {
        "name": ["iter0", "iter0", "iter1", "iter2", "iter3"],
        "learner": ["size", "depth", "size", "depth", "size"],
        "frozen": ["", "", "depth", "size", "depth"],
        "tok_per_ms": [1.0, 2.0, 3.0, 4.0, 5.0],
    }
    assert trained.rounds["iter1"].policies == (
        trained.rounds["iter0-depth"],
        trained.rounds["iter1-size"],
    )
    assert trained.rounds["iter2"].policies == (
        trained.rounds["iter2-depth"],
        trained.rounds["iter1-size"],
    )
    learned = load_policy(folders[3] / "policy")
    assert (
        learned.settings() == config.depth.policy().settings()
        and choices_of(learned)[0]["choice"] == "weights"
    )
    assert (
        size.learner.settings() == config.size.policy(training=True).settings()
        and depth.ppo == config.depth.ppo
    )
    untaught.clear()
    train_ltd(
        TRACE,
        COSTS,
        replace(config, random_depth=False, rounds=ltd.ROUNDS[:1]),
        out_dir=tmp_path / "deep",
    )
    assert untaught[0].task.others is None and untaught[0].run.seed == 0
    untaught.clear()
    config = small_ltd("paper", select=True, rounds=ltd.ROUNDS[:4])
    trained = train_ltd(parted(), COSTS, config, out_dir=tmp_path / "judged")
    tune = parted().select(part="tune")
    alone, both = trained.rounds["iter0-depth"], trained.rounds["iter2"]
    assert untaught[1].judge(alone) == 1 / replay(tune, alone, COSTS).ms_per_tok
    assert untaught[3].judge(both.policies[0]) == 1 / replay(tune, both, COSTS).ms_per_tok
    assert (
        untaught[2].judge(both.policies[1])
        == 1 / replay(tune, trained.rounds["iter1"], COSTS).ms_per_tok
    )


def test_a_lagrangian_reward_begins_at_the_fastest_constant_tree_within_reach():
    source = ReplaySource(TRACE.select(part="train"), COSTS)
    trees = [
        TreeConfig(total, depth, 3)
        for total, depth in ((1, 1), (4, 1), (8, 2), (16, 3), (21, 4), (4, 3))
    ]
    rates = [1 / replay(source.trace, Static.of(tree), COSTS).ms_per_tok for tree in trees]
    config = small_resps("ours", timed=("draft", "verify"))
    found = controllers.reward_of(config, source, [[tree] for tree in trees])
    assert found.rate == pytest.approx(10 * max(rates)), "of the tokens that are kept"
    assert found == Reward("lagrangian", False, ("draft_ms", "verify_ms"), 10.0, found.rate)
    slow = controllers.reward_of(config, source, [[trees[int(np.argmin(rates))]]])
    assert slow.rate == pytest.approx(10 * min(rates)) and slow.rate < found.rate
    for name, kind, mean, unit in (
        ("mean_of_ratios", "ratio", True, 1000.0),
        ("ratio_of_sums", "ratio", False, 1000.0),
        ("throughput", "ratio", False, 10.0),
        ("accepted", "accepted", False, 10.0),
        ("time_cost", "time", False, 10.0),
    ):
        reward = Reward(kind, mean, ("draft_ms", "verify_ms"), unit, 0.0)
        assert controllers.reward_of(replace(config, reward=name), source, [trees]) == reward
    size = ltd.SizePolicy(
        sizes=(1, 4, 20), depth=2, top_k=3, drafted=None
    )  # which constants LTD's could imitate
    wanted = [(2, 1), (2, 2), (5, 1), (5, 2), (13, 1), (21, 2)]  # pools of 12 and 21 nodes
    beside = sorted(controllers._constants(size, beside=True), key=str)
    assert beside == sorted([[TreeConfig(total, depth, 3)] for total, depth in wanted], key=str)
    assert controllers._constants(size) == [[TreeConfig(total, 2, 3)] for total in (2, 5, 21)], (
        "as deep as planned"
    )
    depth = ltd.DepthPolicy(total_tokens=15, depth=2, top_k=3)
    assert controllers._constants(depth) == [[TreeConfig(13, 1, 3)], [TreeConfig(15, 2, 3)]]
    config = small_ltd("ours")
    learner = config.size.policy(training=True)
    alone = controllers._constants(learner, at_random=True)
    assert [len(trees) for trees in alone] == [learner.depth] * len(learner.sizes)
    priced = controllers.reward_of(config, source, alone).rate
    reached = []
    for size in learner.sizes:
        drafting = ltd.RandomDepth(learner.depth, learner.top_k, size, seed=1)
        reached.append(
            10 / np.mean([replay(source.trace, drafting, COSTS).ms_per_tok for _ in range(40)])
        )
    assert priced == pytest.approx(max(reached), rel=0.03)
    any_depth = controllers.reward_of(
        config, source, controllers._constants(learner, beside=True)
    ).rate
    assert priced < 0.97 * any_depth, "the best tree of any depth is out of its reach"


def test_a_policy_remembers_what_its_training_lacked(tmp_path):
    config = small_resps("paper", **{"ppo.total_steps": 128, "prompts": ("hard",)})
    train_resps(TRACE, COSTS, config, out_dir=tmp_path, progress=False)
    told = load_policy(tmp_path / "policy").trained_for["deviations"]
    count = TRACE.select(part="train").turns.query("suite == 'hard'")["prompt"].nunique()
    assert any(line.startswith(f"128 decisions on {count} questions") for line in told)
    assert len(told) == len(config.deviations)
    config = small_ltd("paper", rounds=ltd.ROUNDS[:2])
    trained = train_ltd(TRACE, COSTS, config, out_dir=tmp_path / "ltd", progress=False)
    steps = sum(getattr(config, part.learner).ppo.total_steps for part in config.rounds)
    assert (
        f"{steps} decisions over all rounds"
        in trained.policy.policies[0].trained_for["deviations"][-1]
    )


def test_an_interval_earns_what_its_config_says_and_of_a_grid_stays_what_was_recorded():
    def credited(rows, before=(), first=False, ended=False, interval=2, **flags):
        config = replace(resps.PAPER, **flags)
        given = Outcome(np.ones(2), list(rows), list(before), first, ended)
        return [
            (seen.tolist(), cycles, done)
            for seen, cycles, done in interval_credit(config, interval)(given)
        ]

    ones, nothing = [1.0, 1.0], [0.0, 0.0]
    assert credited("ab") == [(ones, ["a", "b"], False)] and credited("ab", ended=True) == [
        (ones, ["a", "b"], True)
    ]
    assert credited("a") == [] and credited("a", push_partial=True, ended=True) == [
        (ones, ["a"], True)
    ]
    assert credited("ab", terminal=True) == [(ones, ["a", "b"], True)]
    assert credited("ab", before="x") == [(ones, ["a", "b"], False)]
    assert credited("ab", before="x", start_in_reward=True) == [(ones, ["x", "a", "b"], False)]
    junk = dict(junk_zero=True, first=True)
    assert credited("abc", **junk, ended=True) == [
        (ones, ["a", "b"], False),
        (nothing, ["c"], True),
    ]
    assert credited("ab", **junk, terminal=True) == [(ones, ["a"], True), (nothing, ["b"], True)]
    assert credited("ab", junk_zero=True) == [(ones, ["a", "b"], False)]
    assert credited("a", **junk, push_partial=True, before="x", start_in_reward=True) == [
        (ones, ["x", "a"], False)
    ]
    assert credited("a", **junk, interval=1) == [(ones, ["a"], False)], (
        "one cycle cannot be divided"
    )
    whole = replace(
        resps.PAPER,
        totals=(3, 8, 16),
        depths=(2, 3, 4),
        widths=(3,),
        starter=(8, 3, 3),
        name="fits",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert controllers.recorded_grid(whole, TRACE) is whole
    wide = replace(
        whole,
        totals=(3, 21, 22),
        depths=(3, 4, 5),
        widths=(3, 8),
        first_tree=(22, 5, 8),
        small=True,
    )
    told = r"of the 18 trees of the preset 'fits' 4 are learned from, of the widths \(3,\)"
    with pytest.warns(UserWarning, match=told):
        kept = controllers.recorded_grid(wide, TRACE)
    cut = {
        "totals": (3, 21),
        "depths": (3, 4),
        "widths": (3,),
        "starter": (21, 4, 3),
        "first_tree": (21, 4, 3),
    }
    assert kept == replace(wide, **cut)
    both = synthetic_trace(turns=2, positions=8, top_ks=(1, 3))
    with pytest.warns(UserWarning, match=r"widths \(3,\)"):
        other = controllers.recorded_grid(replace(whole, widths=(8,), starter=(8, 3, 8)), both)
    assert (other.widths, other.starter, other.first_tree) == ((3,), (16, 4, 3), None), (
        "a chain is no width of a tree"
    )
    with pytest.warns(UserWarning, match="widths"):  # the tree it begins with was not recorded
        assert controllers.recorded_grid(replace(whole, starter=(8, 3, 8)), TRACE).starter == (
            16,
            4,
            3,
        )
    none = pytest.raises(
        SpecdecError, controllers.recorded_grid, replace(whole, depths=(7,)), TRACE
    )
    none.match("no tree of the preset 'fits' was recorded: depth 4")


@pytest.fixture
def trainers(monkeypatch):
    """(system, config, options) of what is trained."""
    asked = []

    def note(system, trace, costs, config, **options):
        asked.append((system, config, options))
        return system

    for system, place, name in (
        ("resps", controllers, "train_resps"),
        ("ltd", controllers, "train_ltd"),
        ("radar", controllers.radar, "train_radar"),
        ("ours", controllers.value, "train_recording"),
    ):
        monkeypatch.setattr(place, name, functools.partial(note, system))
    monkeypatch.setattr(controllers, "recorded_grid", lambda config, trace: (config, "as recorded"))
    return asked


def test_a_system_is_trained_by_its_name(tmp_path, trainers):
    options = {"seed": 0, "out_dir": tmp_path}
    again = options | {"resume": True}
    for system in ("resps", "ltd", "radar", "ours"):
        assert train_system(system, TRACE, COSTS, out_dir=tmp_path) == system
    assert trainers == [
        ("resps", (resps.OURS, "as recorded"), again),
        ("ltd", ltd.OURS, again),
        ("radar", radar.OURS, again),
        ("ours", value.OURS, options),
    ]
    trainers.clear()
    for system, preset in (
        ("resps", "paper"),
        ("ltd", "official"),
        ("radar", "paper"),
        ("ours", "ours"),
    ):
        train_system(
            system, TRACE, COSTS, preset=preset, steps=640, seed=4, out_dir=tmp_path, resume=False
        )
    lengths = {"depth.ppo.total_steps": 640, "size.ppo.total_steps": 640}
    options = {"seed": 4, "out_dir": tmp_path, "resume": False}
    assert trainers == [
        ("resps", (changed(resps.PAPER, {"ppo.total_steps": 640}), "as recorded"), options),
        ("ltd", changed(ltd.OFFICIAL, lengths), options),
        ("radar", changed(radar.PAPER, {"epochs": 640}), options),
        ("ours", changed(value.OURS, {"steps": 640}), {"seed": 4, "out_dir": tmp_path}),
    ]
    for paper, config in ((False, ltd.LAPTOP["paper"]), (True, ltd.PAPER)):
        train_system("ltd", TRACE, COSTS, preset="paper", out_dir=tmp_path, paper=paper)
        assert trainers[-1][1] == config
    for system, preset, message in (
        ("radra", "ours", "unknown system 'radra'; did you mean 'radar'"),
        ("ltd", "papers", "unknown preset of ltd 'papers'"),
    ):
        pytest.raises(
            SpecdecError, train_system, system, TRACE, COSTS, preset=preset, out_dir=tmp_path
        ).match(message)


def test_a_sweep_trains_what_is_not_there(tmp_path, monkeypatch):
    trained, placed = [], []

    def train(system, trace, costs, *, out_dir, **options):
        assert isinstance(trace, Trace) and costs.name == "round numbers"
        trained.append((system, out_dir.name, options))
        out_dir.mkdir(exist_ok=True)

    def parallel(tasks, on, jobs, desc):
        placed.append((len(tasks), on, jobs, desc))
        for task in tasks:
            task()

    monkeypatch.setattr(controllers, "train_system", train)
    monkeypatch.setattr(controllers, "parallel", parallel)
    table = train_sweep(
        ["resps", "ours"],
        TRACE,
        COSTS,
        (0, 3),
        out_dir=tmp_path,
        on="local",
        jobs=2,
        preset="paper",
    )
    names = ["resps-0", "resps-3", "ours-0", "ours-3"]
    told = {"preset": "paper", "paper": False}
    assert trained == [(name.split("-")[0], name, told | {"seed": int(name[-1])}) for name in names]
    assert placed == [(4, "local", 2, "trainings")]
    assert table["folder"].tolist() == [str(tmp_path / name) for name in names]
    assert list(table) == ["system", "seed", "folder", "seconds"] and (table["seconds"] >= 0).all()
    assert table["system"].tolist() == ["resps", "resps", "ours", "ours"] and table[
        "seed"
    ].tolist() == [0, 3, 0, 3]
    keys = [runs.found(tmp_path / name / "trained.json") for name in names]
    assert len({one["key"] for one in keys}) == 4 and all(
        set(one) == {"key", "seconds"} for one in keys
    )
    again = train_sweep(["resps", "ours"], TRACE, COSTS, (0, 3), out_dir=tmp_path, preset="paper")
    assert len(trained) == 4 and again["seconds"].tolist() == table["seconds"].tolist()
    assert placed[1] == (0, None, None, "trainings")
    others = parted(["test", *TRACE.turns["part"][1:]]), parted(TRACE.turns["part"], key="another")
    given = [
        (TRACE, COSTS, 9),
        (TRACE, replace(COSTS, step=9.0), None),
        *((one, COSTS, None) for one in others),
    ]
    for count, (trace, costs, steps) in enumerate(given, 5):
        train_sweep(["ours"], trace, costs, out_dir=tmp_path, preset="paper", steps=steps)
        assert len(trained) == count, "what it would learn from is another"
