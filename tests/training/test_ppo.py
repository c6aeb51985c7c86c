"""PPO: exact resume, exact export, what a decision earns, and that it learns."""

import itertools
from dataclasses import asdict, fields, replace

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.killed import killed_at
from fakes.traces import COSTS, GRID, TREE, synthetic_trace
from safetensors.torch import load_file

from specdec import runs
from specdec.errors import SpecdecError
from specdec.policies import ltd, resps
from specdec.policies.base import PPOConfig
from specdec.replays.replay import replay
from specdec.training import ppo as ppo_module
from specdec.training.controllers import interval_credit
from specdec.training.env import Environment, ReplaySource, Reward, Task
from specdec.training.ppo import (
    Rollouts,
    RunningMoments,
    RunOptions,
    build_ppo,
    fresh_state,
    learning_rate,
)

TRACE = synthetic_trace(turns=8, positions=40)  # depth 4, k = 3, 20 nodes, 8 features
SOURCE = ReplaySource(TRACE, COSTS)
PPO = PPOConfig(
    n_steps=64,
    batch_size=32,
    n_epochs=2,
    learning_rate=3e-3,
    warmup_frac=0.1,
    linear_decay=True,
    gamma=0.9,
    ent_coef=0.01,
    pi=(16, 8),
    vf=(16,),
    activation="relu",
    total_steps=256,
)
STILL = replace(PPO, learning_rate=0.0)


def sizes(**settings):
    return ltd.SizePolicy(**{"sizes": (1, 4, 8, 20), "drafted": 4, **TREE, **settings})


def concat(interval=2, **settings):
    grid = {**GRID, "interval": interval, **settings}
    return resps.RespsPolicy(state="concat", activation="relu", features_size=8, **grid)


def train(folder, learner=None, ppo=PPO, judge=None, total_steps=None, **settings):
    """A short training; settings of Task and RunOptions by name."""
    ppo = replace(ppo, total_steps=total_steps or ppo.total_steps)
    task = {"source": SOURCE}
    for field in fields(Task):
        if field.name in settings:
            task[field.name] = settings.pop(field.name)
    options = RunOptions(folder, **{"progress": False, "segment_steps": 64, **settings})
    return ppo_module.train_policy(learner or sizes(), Task(**task), ppo, options, judge)


def same(network, other) -> bool:
    arrays = other.arrays()
    return all(np.array_equal(array, arrays[name]) for name, array in network.arrays().items())


def curve_of(folder):
    return pd.read_parquet(folder / "curve.parquet").drop(columns="elapsed_s")


def test_the_learning_rate_warms_up_and_falls():
    falling = PPOConfig(learning_rate=2.0, warmup_frac=0.01, linear_decay=True)
    rates = [learning_rate(falling, progress) for progress in (0.0, 0.005, 0.01, 0.505, 1.0)]
    assert rates == pytest.approx([0, 1, 2, 1, 0])
    constant = replace(falling, linear_decay=False)
    assert learning_rate(constant, 0.5) == 2


def test_moments_of_parts_are_those_of_all_rows():
    random = np.random.default_rng(0)
    moments = RunningMoments(3)
    assert [array.tolist() for array in moments.scale()] == [[0, 0, 0], [1, 1, 1]]
    parts = [random.normal(2, 3, size=(n, 3)) * (1, 1, 0) for n in (1, 7, 40)]
    for part in parts:
        moments.add(part)
    mean, deviation = moments.scale()
    rows = np.concatenate(parts)
    assert mean == pytest.approx(rows.mean(0), abs=1e-6)
    # what never changes has a deviation of one
    assert deviation == pytest.approx([*rows.std(0)[:2], 1.0], rel=1e-6)


def test_actions_are_drawn_from_the_softmax():
    env = Environment(sizes(), Task(SOURCE), 0)
    logits = np.array([0.0, 1.0, -1.0, 0.5])
    counts = np.bincount([env.draw(logits) for _ in range(20_000)], minlength=4)
    assert counts / 20_000 == pytest.approx(np.exp(logits) / np.exp(logits).sum(), abs=0.015)


# rewards of rounds 0-9, a junk one of round 10 with no state, 11-20, 21-24 (sheet 1.5)
OFFICIAL_25 = [(0, 9, False, True), (10, 10, True, True), (11, 20, False, True)]


@pytest.mark.parametrize(
    "config, rounds, expected",
    [
        (resps.OFFICIAL, 25, [*OFFICIAL_25, (21, 24, False, True)]),
        (resps.OFFICIAL, 9, [(0, 8, False, True)]),
        (resps.OFFICIAL, 11, OFFICIAL_25[:2]),
        (resps.PAPER, 25, [(1, 10, False, False), (11, 20, False, True)]),
        (resps.PAPER, 21, [(1, 10, False, False), (11, 20, False, True)]),
        (resps.OURS, 25, [(1, 10, False, False), (11, 20, False, False), (21, 24, False, True)]),
    ],
)
def test_the_transitions_of_a_turn(config, rounds, expected):
    """(first cycle, last cycle, no observation?, begins an episode with the next?) of each."""
    trace = synthetic_trace(turns=2, positions=rounds, hit=-5)
    trace.ranks[3][:] = 32767  # nothing is ever accepted: as many cycles as tokens
    policy = concat(10, first_tree=(8, 3, 3), action_lag=True)
    task = Task(ReplaySource(trace, COSTS), credit=interval_credit(config, 10))
    env = Environment(policy, task, 0)
    while len(env.pending) < 20:
        env.step(0)
    found = []
    for (_, observation, rows, _), (*_, starts) in itertools.pairwise(env.pending):
        found.append((rows[0].cycle, rows[-1].cycle, not observation.any(), starts))
    # the first turn of a segment does not know its first cycle
    count = len(expected)
    assert found[count : 2 * count] == found[2 * count : 3 * count] == expected


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_exported_network_answers_as_before(activation, scaled):
    learner = sizes(activation=activation)
    config = replace(PPO, activation=activation)
    model = build_ppo(learner, config, envs=1, seed=3)
    with torch.no_grad():  # far from the nearly uniform start, so that differences would show
        for parameter in model.policy.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            parameter.add_(0.3 * noise)
    random = np.random.default_rng(0)
    raw = (5 * random.normal(size=(500, learner.observation_size)) - 3).astype(np.float32)
    scale = (raw.mean(0), raw.std(0)) if scaled else (0 * raw[0], raw[0] ** 0)
    network = ppo_module.export(model.policy, activation, scale)
    inputs = ((raw - scale[0]) / scale[1]).astype(np.float32)
    theirs = model.policy.get_distribution(torch.from_numpy(inputs)).distribution.logits
    theirs = theirs.detach().numpy()
    ours = network(raw)
    ours = ours - np.log(np.exp(ours).sum(1, keepdims=True))  # torch's are normalised
    assert np.abs(ours - theirs).max() < 1e-5 * max(1, np.abs(theirs).max())


@pytest.mark.parametrize("episode", ["cycle", "turn"])
def test_the_buffer_holds_what_the_environments_did(episode):
    learner = ltd.DepthPolicy(total_tokens=8, **TREE)
    task = Task(SOURCE, episode=episode)
    rollouts = Rollouts(learner, task, RunOptions("", 5, 3), 0)
    model = build_ppo(learner, replace(PPO, n_steps=90, batch_size=30), 3, 0)
    rollouts.scale = (np.float32(0.5), np.float32(2.0))
    row = rollouts.fill(model.policy, model.rollout_buffer, Reward("accepted"))
    buffer = model.rollout_buffer
    tokens = 0
    for column, seed in enumerate(np.random.SeedSequence((5, 0)).generate_state(3).tolist()):
        env = Environment(learner, task, seed)
        starts = True
        for step in range(30):
            assert (buffer.observations[step, column] == (env.observation - 0.5) / 2).all()
            assert buffer.episode_starts[step, column] == starts
            cycles = env.step(int(buffer.actions[step, column, 0]))
            env.pending.clear()
            earned = sum(cycle.kept_tok for cycle in cycles)
            assert buffer.rewards[step, column] == earned
            starts = env.following[1]
            assert starts == bool(cycles) or episode == "turn"
            tokens += earned
        assert rollouts.following[1][column] == starts
    assert row["new_tok"] == tokens
    assert row["reward"] == pytest.approx(buffer.rewards.mean())
    assert row["time"] == pytest.approx(row["total_ms"] / 10)
    observations = torch.from_numpy(buffer.observations.reshape(90, -1))
    actions = torch.from_numpy(buffer.actions.reshape(90))
    with torch.no_grad():
        values, log_probs, entropy = model.policy.evaluate_actions(observations, actions)
    assert np.allclose(buffer.values.ravel(), values.numpy().ravel(), atol=1e-6)
    assert np.allclose(buffer.log_probs.ravel(), log_probs.numpy(), atol=1e-6)
    assert row["entropy"] == pytest.approx(float(entropy.mean()))


def test_short_turns_are_refused(tmp_path):
    task = dict(episode="turn", envs=1, credit=interval_credit(resps.PAPER, 50))
    pytest.raises(SpecdecError, train, tmp_path, concat(50), **task).match("longer turns")
    pytest.raises(SpecdecError, train, tmp_path, envs=7).match("envs=7")


EVERYTHING = dict(
    others=lambda seed: ltd.RandomDepth(sizes(), seed),
    reward=Reward("lagrangian", rate=1.0),
    reseed_each_turn=True,
    episode="turn",
    ppo=replace(PPO, normalise_observations=True, normalise_reward=True),
    credit=interval_credit(resps.OFFICIAL, 2),
)


def test_a_killed_run_resumes(tmp_path):
    options = dict(EVERYTHING, total_steps=320, segment_steps=128)
    options["judge"] = lambda policy: float(policy.network.biases[0].sum())
    straight = train(tmp_path / "straight", concat(), **options)
    with killed_at(Rollouts, "fill", 3):  # in the middle of the second of three segments
        train(tmp_path / "killed", concat(), **options)
    torch.manual_seed(99)  # whatever has happened in between
    np.random.seed(99)  # noqa: NPY002
    resumed = train(tmp_path / "killed", concat(), **options)
    assert same(straight.network, resumed.network)
    folders = (tmp_path / "straight", tmp_path / "killed")
    stored = [load_file(folder / "checkpoint.safetensors") for folder in folders]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[0][key], stored[1][key]) for key in stored[0])
    curves = [curve_of(folder) for folder in folders]
    pd.testing.assert_frame_equal(*curves)
    assert len(curves[0]) == 5
    assert not same(train(tmp_path / "other", concat(), **options, seed=1).network, resumed.network)


def test_a_finished_run_returns_and_another_is_refused(tmp_path, monkeypatch):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    learn = ReplaySource(TRACE.select(part="train"), COSTS)
    task = dict(source=learn, others=ltd.RandomDepth(sizes()), total_steps=64)
    first = train(tmp_path, **task)
    # training leaves the global generators alone
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(1))
    assert np.random.rand() == np.random.RandomState(1).rand()  # noqa: NPY002
    monkeypatch.setattr(Rollouts, "fill", None)
    assert same(train(tmp_path, **task).network, first.network)
    for change in (
        dict(seed=1),
        dict(source=ReplaySource(TRACE.select(part="test"), COSTS)),
        dict(source=ReplaySource(learn.trace, replace(COSTS, step=9.0))),
        dict(others=ltd.DepthPolicy(total_tokens=8, **TREE).fill_at_random((4,))),
        dict(reward=Reward("accepted")),
        dict(judge=lambda policy: 0.0),
    ):
        with pytest.raises(SpecdecError, match="other settings"):
            train(tmp_path, **{**task, **change})


def test_it_learns_what_is_rewarded(tmp_path):
    ppo = replace(PPO, n_steps=128, n_epochs=4, learning_rate=1e-2, ent_coef=0.0)
    options = dict(ppo=ppo, total_steps=1536, segment_steps=512)
    policy = train(tmp_path, reward=Reward("time_cost"), **options)
    curve = curve_of(tmp_path)
    assert curve["reward"].iloc[-1] > curve["reward"].iloc[0]
    assert curve["entropy"].iloc[-1] < curve["entropy"].iloc[0]
    assert replay(TRACE, policy, COSTS, keep_cycles=True).cycles["verify_nodes"].max() == 1


def test_observations_are_normalised():
    config = replace(PPO, normalise_observations=True)
    model = build_ppo(concat(), config, 4, 0)
    state = fresh_state(concat().observation_size)
    rollouts = Rollouts(concat(), Task(SOURCE, episode="turn"), RunOptions("", envs=4), 0)
    raw = []
    for steps in (0, 64):
        row = ppo_module.iteration(model, rollouts, state, config, steps)
        mean, deviation = rollouts.scale
        raw.append(model.rollout_buffer.observations.reshape(-1, 8) * deviation + mean)
        assert row["steps"] == steps + 64
        rate = model.policy.optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(learning_rate(config, (steps + 32) / 256))
    assert np.abs(rollouts.scale[0] - raw[0].mean(0)).max() < 1e-5
    mean, deviation = state.observations.scale()
    rows = np.concatenate(raw)
    assert mean == pytest.approx(rows.mean(0), abs=1e-5)
    assert deviation == pytest.approx(rows.std(0), rel=1e-4)


def test_the_rate_follows_the_throughput_above_the_floor(tmp_path):
    curves = []
    for floor in (0.01, 50.0):
        reward = Reward("lagrangian", rate=floor)
        train(tmp_path / str(floor), reward=reward, total_steps=192, ppo=STILL)
        curves.append(curve_of(tmp_path / str(floor)))
    low, high = curves
    tokens = low["new_tok"]
    ms = low["total_ms"] / 10
    recent = (0.8 * tokens[0] + tokens[1]) / (0.8 * ms[0] + ms[1])
    assert low["rate"].tolist() == pytest.approx([0.01, 10 * low["tok_per_ms"][0], recent])
    assert (high["rate"] == 50.0).all()


def test_the_best_network_is_kept(tmp_path):
    networks = []
    scores = [1.0, 3.0, 2.0, 0.0]

    def judge(policy):
        networks.append(policy.network)
        return scores[len(networks) - 1]

    policy = train(tmp_path, judge=judge)
    assert len(networks) == 4
    assert same(policy.network, networks[1])
    assert not same(policy.network, networks[3])
    assert curve_of(tmp_path)["score"].tolist() == scores


def test_a_run_notes_its_settings_and_results(tmp_path):
    first = train(tmp_path / "first", total_steps=64)
    options = dict(seed=5, envs=4, start_from=tmp_path / "first", segment_steps=100)
    policy = train(tmp_path / "run", total_steps=192, trained_for={"pair": "synthetic"}, **options)
    ppo = replace(PPO, total_steps=192)
    plan = runs.read_json(tmp_path / "run" / "plan.json")
    settings = plan["settings"]
    # segments of 128 decisions: the complete rollouts nearest to 100
    assert (settings["seed"], settings["envs"], settings["steps"]) == (5, 4, 2)
    first_plan = runs.read_json(tmp_path / "first" / "plan.json")
    assert settings["start_from"] == first_plan["results"]["weights"]
    facts = {"seed": 5, "steps": 192, "ppo": asdict(ppo), "pair": "synthetic"}
    assert policy.trained_for == facts
    curve = curve_of(tmp_path / "run")
    assert curve["steps"].tolist() == [64, 128, 192]
    # with a learning rate of zero it stays at the weights it starts from
    still = train(tmp_path / "still", ppo=STILL, total_steps=64, start_from=tmp_path / "first")
    assert same(still.network, first.network)


def test_stable_baselines_gets_all_of_the_config():
    settings = dict(batch_size=20, n_epochs=3, gamma=0.8, gae_lambda=0.7, ent_coef=0.02)
    settings["vf_coef"] = 0.4
    widths = dict(pi=(6, 5), vf=(4,), activation="relu")
    config = PPOConfig(n_steps=60, learning_rate=0.01, clip_range=0.3, **settings, **widths)
    model = build_ppo(sizes(), config, 3, 7)
    for name, value in settings.items():
        assert getattr(model, name) == value
    assert (model.n_steps, model.n_envs, model.seed) == (20, 3, 7)
    assert model.clip_range(1.0) == 0.3 and model.lr_schedule(0.25) == 0.01
    actor = model.policy.mlp_extractor.policy_net
    critic = model.policy.mlp_extractor.value_net
    assert [layer.out_features for layer in (*actor[::2], critic[0])] == [6, 5, 4]
