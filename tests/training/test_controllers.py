"""Re-SpS and LTD trained from their configs: what comes out, rounds that continue each other, the
checkpoint that is kept, the command.
"""

import functools
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from fakes.traces import COSTS, SMALL_LTD, SMALL_RESPS, synthetic_trace

from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies import ltd, radar, resps, value
from specdec.policies.base import changed, choices_of, load_policy
from specdec.replays.replay import replay
from specdec.replays.trace import Trace
from specdec.tools import cli
from specdec.training import controllers
from specdec.training.controllers import (
    recorded_grid,
    reward_of,
    train_ltd,
    train_resps,
    train_system,
)
from specdec.training.env import ReplaySource, Reward

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
    again = load_policy(tmp_path / "policy")
    facts = again.trained_for
    assert (facts["preset"], facts["steps"]) == (preset, 128)
    lines = [line for line in facts["deviations"] if line.startswith("128 decisions on")]
    assert len(lines) == (preset != "ours")
    test = TRACE.select(part="test")
    assert replay(test, policy, COSTS).ms_per_tok == replay(test, again, COSTS).ms_per_tok


@pytest.mark.parametrize("preset", ltd.CONFIGS)
def test_ltd_from_its_configs(preset, tmp_path):
    config = small_ltd(preset, **{"depth.stride": 1, "size.first_nodes": 4})
    if preset == "official":
        learning = {**config.depth.while_training, "total_tokens": 8, "first_depth": 2}
        config = changed(config, {"depth.first_depth": 2, "depth.while_training": learning})
    trained = train_ltd(TRACE, COSTS, config, out_dir=tmp_path, progress=False)
    names = ["iter0-size", "iter0-depth", "iter0", "iter1-size", "iter1", "iter2-depth", "iter2"]
    assert list(trained.rounds) == [*names, "iter3-size", "iter3"]
    assert trained.policy is trained.rounds["iter3"]
    replay(TRACE.select(part="test"), trained.policy, COSTS)
    again = load_policy(tmp_path / "iter3-size" / "policy")
    assert again.trained_for["preset"] == preset
    assert again.trained_for["round"] == "iter3"


@pytest.fixture
def command(monkeypatch, tmp_path):
    """train(system, *words): the exit status of `specdec train`."""
    costs = str(COSTS.save(tmp_path / "costs.json"))
    monkeypatch.setattr("specdec.replays.trace.open_trace", lambda *_: TRACE)

    def train(system, *words, costs=costs):
        words = ["--trace", str(tmp_path), "--costs", costs, "--out", "o", *words]
        return cli.main(["train", system, *words])

    return train


def test_unfit_configs_are_refused(tmp_path):
    shallow = {"depth.depth": 1, "rounds": ltd.ROUNDS[1:2]}
    for train, config, message in (
        (train_resps, "our", "unknown preset"),
        (train_resps, small_resps("ours", select=True), "no recorded turn is left"),
        (train_ltd, small_ltd("paper", **shallow), "never asked"),
    ):
        pytest.raises(SpecdecError, train, TRACE, COSTS, config, out_dir=tmp_path).match(message)
    unknown = pytest.raises(SpecdecError, train_system, "radra", TRACE, COSTS, out_dir=tmp_path)
    unknown.match("'radar'")


def test_the_command_reaches_every_field(command, trainers, capsys):
    assert command("ltd", "--preset", "paper", "--restart", "--steps", "640") == 0
    system, config, options = trainers.pop()
    lengths = (config.depth.ppo.total_steps, config.size.ppo.total_steps)
    assert (system, lengths) == ("ltd", (640, 640))
    assert options["seed"] == 0 and not options["resume"]
    changes = {"interval": 3, "ppo.pi": (64, 64), "select": True}
    normalised = {"rounds": ltd.ORDERS["4"], "depth.ppo.normalise_observations": True}
    for system, words, expected in (
        (
            "resps",
            "--variant standard --set interval=3 --set ppo.pi=[64,64] select=true",
            (changed(resps.STANDARD["paper"], changes), "as recorded"),
        ),
        (
            "ltd",
            "--order 4 --set depth.ppo.normalise_observations=true",
            changed(ltd.LAPTOP["paper"], normalised),
        ),
        ("radar", "--set alpha=0.05", changed(radar.PAPER, {"alpha": 0.05})),
        ("ours", "", value.OURS),
    ):
        assert command(system, "--preset", "paper", *words.split()) == 0
        assert trainers.pop()[:2] == (system, expected)
    assert command("ltd", costs="nowhere") == 2
    assert "unknown hardware profile 'nowhere'" in capsys.readouterr().err
    assert command("resps", "--set", "interval=0") == 2 and not trainers
    assert "interval" in capsys.readouterr().err


@pytest.fixture
def untaught(monkeypatch):
    """Trainings are noted and leave random weights."""
    calls = []

    def train(learner, task, ppo, run, judge):
        calls.append(SimpleNamespace(learner=learner, task=task, ppo=ppo, run=run, judge=judge))
        return learner.fill_at_random((4,), seed=len(calls))

    monkeypatch.setattr(controllers, "train_policy", train)
    return calls


def test_resps_is_taught_as_its_config_says(tmp_path, untaught):
    plain = small_resps("ours", select=False)
    changes = dict(reward="lagrangian", select=True, prompts=("hard",))
    official = small_resps("official", **changes)
    train_resps(TRACE, COSTS, plain, out_dir=tmp_path / "plain")
    options = dict(seed=3, out_dir=tmp_path, policy_ms=0.5, envs=2, source="live")
    policy = train_resps(parted(), COSTS, official, **options)
    first, second = untaught
    # 1. ours
    assert isinstance(first.task.source, ReplaySource)
    assert first.task.source.policy_ms == 0.0
    assert set(first.task.source.trace.turns["part"]) == {"train"}
    assert (first.task.episode, first.task.reseed_each_turn) == ("turn", False)
    assert first.run.trained_for["config"] == asdict(plain) and first.judge is None
    # 2. the published code's
    assert second.task.source == "live" and second.task.reward.rate > 0
    assert (second.task.episode, second.task.reseed_each_turn) == ("interval", True)
    assert (second.run.out_dir, second.run.seed, second.run.envs) == (tmp_path, 3, 2)
    assert second.ppo == official.ppo
    assert second.learner.settings() == official.policy(8, training=True).settings()
    assert policy.settings() == official.policy(8).settings()
    tune = parted().select(part="tune")
    assert second.judge(policy) == 1 / replay(tune, policy, COSTS, policy_ms=0.5).ms_per_tok
    choices = choices_of(load_policy(tmp_path / "policy"))
    assert [row["part"] for row in choices] == ["train", "tune"]


def test_ltds_rounds_continue_each_other(tmp_path, untaught):
    config = small_ltd("ours", select=False, **{"size.drafted": None, "depth.first_depth": 2})
    options = dict(seed=2, out_dir=tmp_path, policy_ms=0.5, envs=4)
    rounds = train_ltd(TRACE, COSTS, config, **options).rounds
    folders = [tmp_path / f"{part.name}-{part.learner}" for part in config.rounds]
    assert [call.run.start_from for call in untaught] == [None, None, *folders[:3]]
    for call in untaught:
        assert (call.run.seed, call.run.envs, call.judge) == (2, 4, None)
        assert call.task.source.policy_ms == 0.5
    size, depth, size_1, depth_2, size_3 = untaught
    assert depth.task.others is None and size_1.task.others is rounds["iter0-depth"]
    assert depth_2.task.others is rounds["iter1-size"]
    assert size_3.task.others is rounds["iter2-depth"]
    assert depth.ppo == config.depth.ppo
    # alone, the size policy learns on random depths
    random_depth = size.task.others(7)
    assert random_depth.plans[-1] == TreeConfig(21, 4, 3)
    assert len(random_depth.plans) == 4
    same = ltd.RandomDepth(size.learner, 7)
    depths = [[policy.answer(None).depth for _ in range(9)] for policy in (random_depth, same)]
    assert depths[0] == depths[1]
    assert rounds["iter1"].policies == (rounds["iter0-depth"], rounds["iter1-size"])
    assert rounds["iter2"].policies == (rounds["iter2-depth"], rounds["iter1-size"])
    untaught.clear()
    alone = replace(config, random_depth=False, rounds=ltd.ROUNDS[:1])
    train_ltd(TRACE, COSTS, alone, out_dir=tmp_path / "deep")
    assert untaught[0].task.others is None


def test_ltds_checkpoints_are_judged_in_pairs(tmp_path, untaught):
    config = small_ltd("paper", select=True, rounds=ltd.ROUNDS[:4])
    rounds = train_ltd(parted(), COSTS, config, out_dir=tmp_path).rounds
    tune = parted().select(part="tune")
    for call, learned, judged in (
        (1, rounds["iter0-depth"], rounds["iter0-depth"]),
        (2, rounds["iter1"].policies[1], rounds["iter1"]),
        (3, rounds["iter2"].policies[0], rounds["iter2"]),
    ):
        assert untaught[call].judge(learned) == 1 / replay(tune, judged, COSTS).ms_per_tok


def test_rewards_by_their_names():
    config = small_resps("ours", timed=("draft", "verify"))
    laps = ("draft_ms", "verify_ms")
    for name in ("mean_of_ratios", "accepted"):
        assert reward_of(replace(config, reward=name), None, []) == Reward(name, laps)


def test_a_lagrangian_reward_begins_at_a_constant():
    source = ReplaySource(TRACE.select(part="train"), COSTS)
    trees = [TreeConfig(total, depth, 3) for total, depth in ((1, 1), (8, 2), (21, 4), (4, 3))]
    rates = [1 / replay(source.trace, Static.of(tree), COSTS).ms_per_tok for tree in trees]
    config = small_resps("ours", timed=("draft", "verify"))
    reward = reward_of(config, source, [[tree] for tree in trees])
    assert reward.rate == pytest.approx(10 * max(rates))
    assert reward == Reward("lagrangian", ("draft_ms", "verify_ms"), reward.rate)
    both = reward_of(config, source, [trees[1:3]])
    assert min(rates[1:3]) < both.rate / 10 < max(rates[1:3])
    # constants that LTD's policies could imitate
    size = ltd.SizePolicy(sizes=(1, 4, 20), depth=2, top_k=3, drafted=None)
    pools = [(2, 1), (2, 2), (5, 1), (5, 2), (13, 1), (21, 2)]  # of 12 and 21 nodes
    beside = controllers._constants(size, beside=True)
    assert beside == [[TreeConfig(total, depth, 3)] for total, depth in pools]
    assert controllers._constants(size) == [[TreeConfig(total, 2, 3)] for total in (2, 5, 21)]
    depth = ltd.DepthPolicy(total_tokens=15, depth=2, top_k=3)
    assert controllers._constants(depth) == [[TreeConfig(13, 1, 3)], [TreeConfig(15, 2, 3)]]


def test_of_a_grid_stays_what_was_recorded():
    grid = {"totals": (3, 8, 16), "depths": (2, 3, 4), "widths": (3,), "starter": (8, 3, 3)}
    config = replace(resps.PAPER, name="fits", **grid)
    assert recorded_grid(config, TRACE) is config
    large = {"totals": (3, 21, 22), "depths": (3, 4, 5), "widths": (3, 8)}
    wide = replace(config, **large, first_tree=(22, 5, 8), small=True)
    with pytest.warns(UserWarning, match=r"'fits' is cut to .* widths \(3,\)"):
        kept = recorded_grid(wide, TRACE)
    cut = {"totals": (3, 21), "depths": (3, 4), "widths": (3,)}
    assert kept == replace(wide, **cut, starter=(21, 4, 3), first_tree=(21, 4, 3))
    both = synthetic_trace(turns=2, positions=8, top_ks=(1, 3))
    # a chain is no width of a tree
    with pytest.warns(UserWarning, match="widths"):
        other = recorded_grid(replace(config, widths=(8,), starter=(8, 3, 8)), both)
    assert (other.widths, other.starter) == ((3,), (16, 4, 3))
    deep = replace(config, depths=(7,))
    pytest.raises(SpecdecError, recorded_grid, deep, TRACE).match("depth 4")


@pytest.fixture
def trainers(monkeypatch):
    """(system, config, options) of each training."""
    calls = []

    def note(system, trace, costs, config, **options):
        calls.append((system, config, options))

    monkeypatch.setattr(controllers, "train_resps", functools.partial(note, "resps"))
    monkeypatch.setattr(controllers, "train_ltd", functools.partial(note, "ltd"))
    monkeypatch.setattr(controllers.radar, "train_radar", functools.partial(note, "radar"))
    monkeypatch.setattr(controllers.value, "train_recording", functools.partial(note, "ours"))
    monkeypatch.setattr(controllers, "recorded_grid", lambda config, trace: (config, "as recorded"))
    return calls
