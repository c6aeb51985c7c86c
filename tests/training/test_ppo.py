"""PPO: exact resume, exact export, what a decision earns, and that it learns."""

import hashlib
import warnings
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.killed import killed_at
from fakes.pairs import random_pair
from fakes.traces import COSTS, GRID, TREE, synthetic_trace
from safetensors.torch import load_file

from specdec import runs
from specdec.errors import SpecdecError
from specdec.policies import ltd, resps
from specdec.policies.base import PPOConfig
from specdec.replays.replay import replay
from specdec.training import ppo as ppo_module
from specdec.training.controllers import interval_credit
from specdec.training.env import Env, LiveSource, ReplaySource, Reward
from specdec.training.ppo import (
    EnvRunner,
    Outcome,
    Rollouts,
    RunningMoments,
    RunOptions,
    Task,
    build_ppo,
    each_alone,
)

pytestmark = pytest.mark.filterwarnings("ignore:this .* gave the answer")
TRACE = synthetic_trace(turns=8, positions=40)  # depth 4, k = 3, 20 nodes, 8 features
SIZES = dict(sizes=(1, 4, 8, 20), drafted=4, **TREE)
PPO = PPOConfig(
    n_steps=64, batch_size=32, n_epochs=2, learning_rate=3e-3, warmup_frac=0.1, linear_decay=True
)
PPO = replace(
    PPO, gamma=0.9, ent_coef=0.01, pi=(16, 8), vf=(16,), activation="relu", total_steps=256
)


def sizes(**more):
    return ltd.SizePolicy(**{**SIZES, **more})


def train(folder, learner=None, ppo=PPO, judge=None, total_steps=None, **settings):
    """A short training; settings of Task and RunOptions by name."""
    ppo = replace(ppo, total_steps=total_steps or ppo.total_steps)
    names = {field.name for field in fields(Task)}
    task = {
        "source": ReplaySource(TRACE, COSTS),
        **{name: settings.pop(name) for name in names & set(settings)},
    }
    options = RunOptions(folder, **{"progress": False, "segment_steps": 64, **settings})
    return ppo_module.train_policy(learner or sizes(), Task(**task), ppo, options, judge)


def same(one, other) -> bool:
    return all(np.array_equal(array, other.arrays()[name]) for name, array in one.arrays().items())


def curve_of(folder):
    return pd.read_parquet(folder / "curve.parquet").drop(columns="elapsed_s")


def test_rates_moments_draws_and_intervals_by_hand():
    falling = PPOConfig(learning_rate=2.0, warmup_frac=0.01, linear_decay=True)
    rates = [
        ppo_module.learning_rate(falling, progress) for progress in (0.0, 0.005, 0.01, 0.505, 1.0)
    ]
    assert rates == pytest.approx([0, 1, 2, 1, 0])
    constant = replace(falling, warmup_frac=0.0, linear_decay=False)
    assert [ppo_module.learning_rate(constant, progress) for progress in (0.0, 0.5, 1.0)] == [
        2,
        2,
        2,
    ]
    random, moments = np.random.default_rng(0), RunningMoments(3)
    parts = [random.normal(2, 3, size=(n, 3)) * (1, 1, 0) for n in (1, 7, 40)]
    for part in parts:
        moments.add(part)
    mean, deviation = moments.scale()
    rows = np.concatenate(parts)
    assert mean == pytest.approx(rows.mean(0), abs=1e-6)
    assert deviation == pytest.approx([*rows.std(0)[:2], 1.0], rel=1e-6)
    still = RunningMoments(2)
    still.add(np.array([[3.0, 1.0], [3.0, 1.02]]))
    assert still.scale()[1].tolist() == pytest.approx([1.0, 0.01]), (
        "what never changes has a deviation of one"
    )
    runner = EnvRunner(make_env(sizes())(0), 0, 0, each_alone, None)
    logits = np.array([0.0, 1.0, -1.0, 0.5])
    counts = np.bincount([runner.draw(logits) for _ in range(20_000)], minlength=4)
    assert counts / 20_000 == pytest.approx(np.exp(logits) / np.exp(logits).sum(), abs=0.015)
    policy = resps.RespsPolicy(state="concat", features_size=8, interval=10, **GRID)
    rollouts = Rollouts(make_env(policy, "turn"), 2, interval_credit(resps.PAPER, 10))
    model = build_ppo(
        lambda: make_env(policy, "turn")(0), replace(PPO, n_steps=40, batch_size=20), 2, 0
    )
    with rollouts.opened(0, 0):
        rollouts.fill(model.policy, model.rollout_buffer, Reward("accepted"))
    starts = model.rollout_buffer.episode_starts[:, 0]
    assert 1 < starts.sum() < len(starts)
    assert interval_credit(resps.PAPER, 10)(Outcome(np.ones(1), [], [], True, True)) == []
    for config, rounds, expected in (
        # rewards of rounds 0-9, a junk one of round 10 with no state, 11-20, 21-24 (sheet 1.5)
        (
            resps.OFFICIAL,
            25,
            [
                (0, 9, False, True),
                (10, 10, True, True),
                (11, 20, False, True),
                (21, 24, False, True),
            ],
        ),
        (resps.OFFICIAL, 9, [(0, 8, False, True)]),
        (resps.OFFICIAL, 11, [(0, 9, False, True), (10, 10, True, True)]),
        (resps.PAPER, 25, [(1, 10, False, False), (11, 20, False, False)]),
        (resps.OURS, 25, [(1, 10, False, False), (11, 20, False, False), (21, 24, False, True)]),
        (resps.PAPER, 21, [(1, 10, False, False), (11, 20, False, True)]),
    ):
        assert rounds_of(rounds, config) == expected


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_exported_network_answers_as_stable_baselines_does(activation, scaled):
    learner = sizes(activation=activation)
    env = Env(learner, ReplaySource(TRACE, COSTS))
    model = build_ppo(lambda: env, replace(PPO, activation=activation), 1, 3)
    with torch.no_grad():  # far from the nearly uniform start, so that differences would show
        for parameter in model.policy.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    random = np.random.default_rng(0)
    raw = (5 * random.normal(size=(500, learner.observation_size)) - 3).astype(np.float32)
    scale = (raw.mean(0), raw.std(0)) if scaled else None
    network = ppo_module.export(model.policy, activation, scale)
    seen = (raw - scale[0]) / scale[1] if scaled else raw
    theirs = (
        model.policy.get_distribution(torch.from_numpy(seen)).distribution.logits.detach().numpy()
    )
    ours = network(raw)
    ours = ours - np.log(np.exp(ours).sum(1, keepdims=True))  # torch's are normalised
    assert np.abs(ours - theirs).max() < 1e-5 * max(1, np.abs(theirs).max())
    margin = np.sort(theirs, axis=1)
    clear = margin[:, -1] - margin[:, -2] > 1e-4
    assert clear.sum() > 400 and (ours.argmax(1) == theirs.argmax(1))[clear].all()
    predicted = model.predict(seen, deterministic=True)[0]
    assert (predicted == ours.argmax(1))[clear].all()
    assert np.allclose(ppo_module.action_logits(model.policy, seen), network(raw), atol=1e-4)


def make_env(learner, episode="cycle"):
    return lambda seed: Env(replace(learner), ReplaySource(TRACE, COSTS), None, Reward(), episode)


@pytest.mark.parametrize("episode", ["cycle", "turn"])
def test_the_buffer_holds_what_the_environments_did(episode):
    learner = ltd.DepthPolicy(total_tokens=8, **TREE)
    rollouts, reward = Rollouts(make_env(learner, episode), 3, each_alone), Reward("accepted")
    model = build_ppo(lambda: make_env(learner)(0), replace(PPO, n_steps=90, batch_size=30), 3, 0)
    rollouts.scale = np.float32(0.5), np.float32(2.0)
    with rollouts.opened(5, 0):
        found = rollouts.fill(model.policy, model.rollout_buffer, reward)
    buffer, cycles = model.rollout_buffer, 0
    for column, seed in enumerate(np.random.SeedSequence((5, 0)).generate_state(3).tolist()):
        env = make_env(learner)(seed)
        observation, starts = env.reset(seed=seed)[0], True
        for row in range(30):
            assert (buffer.observations[row, column] == (observation - 0.5) / 2).all()
            assert buffer.episode_starts[row, column] == starts
            observation, _, _, _, info = env.step(int(buffer.actions[row, column, 0]))
            assert buffer.rewards[row, column] == sum(one.kept_tok for one in info["cycles"])
            starts = info["turn_ended"] or (episode == "cycle" and bool(info["cycles"]))
            cycles += len(info["cycles"])
        assert rollouts.last[1][column] == starts
    assert found["cycles"] == cycles and found["reward"] == pytest.approx(buffer.rewards.mean())
    seen = (
        torch.from_numpy(buffer.observations.reshape(90, -1)),
        torch.from_numpy(buffer.actions.reshape(90)),
    )
    with torch.no_grad():
        values, log_probs, entropy = model.policy.evaluate_actions(*seen)
    assert np.allclose(buffer.values.ravel(), values.numpy().ravel(), atol=1e-6)
    assert np.allclose(buffer.log_probs.ravel(), log_probs.numpy(), atol=1e-6)
    assert found["entropy"] == pytest.approx(float(entropy.mean()))
    assert sum(found["actions"]) == 90


def test_a_cleared_buffer_holds_one_turn_for_each_environment_and_bad_input_is_refused(tmp_path):
    trace = synthetic_trace(turns=6, positions=40)
    policy = resps.RespsPolicy(**GRID | {"interval": 2}, features_size=8)

    def filled(n_steps: int, clear: bool):
        def made(seed=0):
            return Env(policy, ReplaySource(trace, COSTS), reward=Reward(), episode="turn")

        rollouts = Rollouts(made, 2, interval_credit(resps.PAPER, 2), clear=clear)
        model = build_ppo(made, replace(PPO, n_steps=n_steps, batch_size=4), 2, 0)
        with rollouts.opened(0, 0):
            rollouts.fill(model.policy, model.rollout_buffer, Reward())
        return model.rollout_buffer.episode_starts

    assert filled(8, clear=True)[1:].sum() == 0, "no turn follows another"
    assert filled(80, clear=False)[1:].sum() > 0
    pytest.raises(SpecdecError, filled, 80, clear=True).match(
        "with clear_buffer: before n_steps do"
    )
    options = dict(
        source=ReplaySource(trace, COSTS),
        credit=interval_credit(resps.PAPER, 2),
        clear_each_turn=True,
    )
    options |= dict(ppo=replace(PPO, activation="tanh"), episode="turn", envs=1)
    pytest.raises(SpecdecError, train, tmp_path, policy, **options).match("longer turns")
    for kind, message, options in (
        (SpecdecError, "trains tanh", dict(ppo=replace(PPO, activation="tanh"))),
        (SpecdecError, "divide among envs=7", dict(envs=7)),
        (SpecdecError, "unknown episode", dict(episode="day")),
        (AssertionError, "needs rate", dict(reward=Reward("lagrangian"))),
    ):
        pytest.raises(kind, train, tmp_path, **options).match(message)
    policy = resps.RespsPolicy(state="concat", features_size=8, interval=50, **GRID)
    options = dict(
        ppo=replace(PPO, activation="tanh"),
        episode="turn",
        envs=1,
        credit=interval_credit(resps.PAPER, 50),
    )
    pytest.raises(SpecdecError, train, tmp_path / "long", policy, **options).match(
        "gave no transition"
    )


def rounds_of(trace_turn_tok, flags, interval=10):
    """The transitions of turns in which every cycle gives one token: (first, last cycle, zero observation?, ends?)."""
    trace = synthetic_trace(turns=2, positions=trace_turn_tok, hit=-5)
    trace.ranks[3][:] = 32767  # nothing is ever accepted: as many cycles as tokens
    options = dict(first_tree=(8, 3, 3), action_lag=True, **GRID)
    policy = resps.RespsPolicy(state="concat", features_size=8, interval=interval, **options)
    runner = EnvRunner(
        Env(policy, ReplaySource(trace, COSTS)), 0, 0, interval_credit(flags, interval), None
    )
    turns, current = [], []
    while len(turns) < 3:
        runner.step(0)
        while runner.pending:
            if (one := runner.pending.popleft()) is None:
                turns.append(current)
                current = []
            else:
                _, observation, rows, done = one
                current.append((rows[0].cycle, rows[-1].cycle, not observation.any(), done))
    assert turns[1] == turns[2]
    return turns[1]  # the first turn of a segment does not know its first cycle


RUNS = {
    "size": dict(learner=sizes, episode="cycle"),
    "depth": dict(
        learner=lambda: ltd.DepthPolicy(total_tokens=8, ask_at_zero=True, **TREE), episode="cycle"
    ),
    "random depth": dict(
        learner=sizes, others=lambda seed: ltd.RandomDepth(4, 3, 20, seed), episode="cycle"
    ),
    "everything": dict(
        learner=lambda: resps.RespsPolicy(
            state="concat", activation="relu", features_size=8, interval=2, **GRID
        ),
        reward=Reward("lagrangian", rate=1.0),
        adapt_rate=True,
        reseed_each_turn=True,
        episode="turn",
        ppo=replace(PPO, normalise_observations=True, normalise_reward=True),
        credit=interval_credit(resps.OFFICIAL, 2),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_as_an_uninterrupted_one(name, tmp_path):
    given = dict(RUNS[name])
    build = given.pop("learner")
    given |= {
        "total_steps": 320,
        "segment_steps": 128,
        "judge": lambda policy: float(policy.network.biases[0].sum()),
    }
    whole = train(tmp_path / "whole", build(), **given)
    with killed_at(Rollouts, "fill", 3):  # in the middle of the second of three segments
        train(tmp_path / "killed", build(), **given)
    torch.manual_seed(99)  # whatever has happened in between
    np.random.seed(99)  # noqa: NPY002
    resumed = train(tmp_path / "killed", build(), **given)
    assert same(whole.network, resumed.network)
    stored = [load_file(tmp_path / run / "checkpoint.safetensors") for run in ("whole", "killed")]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[0][key], stored[1][key]) for key in stored[0])
    curves = [curve_of(tmp_path / run) for run in ("whole", "killed")]
    pd.testing.assert_frame_equal(*curves)
    assert len(curves[0]) == 5
    if name == "size":
        assert not same(train(tmp_path / "other", build(), **given, seed=1).network, whole.network)


def test_a_finished_run_returns_at_once_and_another_is_refused(tmp_path, monkeypatch):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = (
        torch.rand(1, generator=torch.Generator().manual_seed(1)),
        np.random.RandomState(1).rand(),
    )  # noqa: NPY002
    first = train(tmp_path)
    drawn = torch.rand(1), np.random.rand()  # noqa: NPY002
    assert drawn == expected, "training leaves the global generators alone"
    monkeypatch.setattr(Rollouts, "fill", None)
    assert same(train(tmp_path).network, first.network)
    pytest.raises(SpecdecError, train, tmp_path, seed=1).match("other settings")
    (tmp_path / "checkpoint.safetensors").write_bytes(b"nothing")
    pytest.raises(SpecdecError, train, tmp_path).match("cannot be read")


def test_it_learns_and_warns_of_a_constant(tmp_path):
    ppo = replace(PPO, n_steps=128, n_epochs=4, learning_rate=1e-2, ent_coef=0.0)
    with pytest.warns(
        UserWarning, match=r"gave the answer \(1,\) in 100.0% of cycles: it collapsed"
    ):
        warnings.simplefilter("always")
        policy = train(
            tmp_path, reward=Reward("time"), ppo=ppo, total_steps=1536, segment_steps=512
        )
    curve = curve_of(tmp_path)
    assert (
        curve["reward"].iloc[-1] > curve["reward"].iloc[0]
        and curve["entropy"].iloc[-1] < curve["entropy"].iloc[0]
    )
    assert replay(TRACE, policy, COSTS, keep_cycles=True).cycles["verify_nodes"].max() == 1
    assert pd.read_parquet(tmp_path / "answers.parquet")["cycles"].sum() == 1536
    with warnings.catch_warnings():  # not where answers differ
        warnings.simplefilter("error")
        train(tmp_path / "new", total_steps=64, ppo=replace(PPO, learning_rate=0.0), seed=3)
    assert len(pd.read_parquet(tmp_path / "new" / "answers.parquet")) > 1


def test_it_trains_on_a_live_pair(tmp_path):
    from specdec.replays.record import record

    pair, prompts = random_pair(), [list(range(3, 12)), list(range(5, 17))]
    trace = record(
        pair,
        prompts,
        max_new_tokens=16,
        depth=4,
        top_ks=(3,),
        trees=(3,),
        most_nodes=20,
        progress=False,
    )
    ppo = replace(PPO, n_steps=32, n_epochs=1, vf=(8,))
    found = []
    for name, source in (
        ("live", LiveSource(pair, prompts, 16)),
        ("replayed", ReplaySource(trace, COSTS)),
    ):
        options = dict(
            source=source,
            reward=Reward("accepted"),
            ppo=ppo,
            total_steps=64,
            envs=1,
            segment_steps=32,
        )
        found.append(train(tmp_path / name, **options).network.weights[-1])
    assert np.allclose(*found, atol=1e-3) and np.abs(found[0]).max() > 0
    two = pytest.raises(
        AssertionError, train, tmp_path / "two", source=LiveSource(pair, prompts), ppo=ppo, envs=2
    )
    two.match("one live source decodes one text at a time")


def test_the_rate_follows_the_throughput_above_the_floor_and_the_best_is_kept(tmp_path):
    options = dict(adapt_rate=True, total_steps=192, ppo=replace(PPO, learning_rate=0.0))
    for floor in (0.01, 50.0):
        train(
            tmp_path / str(floor), reward=Reward("lagrangian", unit_ms=1.0, rate=floor), **options
        )
    low, high = (curve_of(tmp_path / floor) for floor in ("0.01", "50.0"))
    assert low["rate"].iloc[0] == 0.01 and low["rate"].iloc[1] == pytest.approx(
        low["tok_per_ms"].iloc[0]
    )
    expected = (0.8 * low["new_tok"][0] + low["new_tok"][1]) / (
        0.8 * low["total_ms"][0] + low["total_ms"][1]
    )
    assert low["rate"].iloc[2] == pytest.approx(expected)
    assert (high["rate"] == 50.0).all()
    seen, scores = [], iter([1.0, 3.0, 2.0, 0.0])
    policy = train(tmp_path, judge=lambda policy: seen.append(policy.network) or next(scores))
    assert len(seen) == 4 and same(policy.network, seen[1]) and not same(policy.network, seen[3])


def hash_of(network) -> str:
    return hashlib.sha256(
        b"".join(array.tobytes() for array in network.arrays().values())
    ).hexdigest()


def test_a_run_notes_all_that_its_weights_depend_on(tmp_path):
    partner = ltd.DepthPolicy(total_tokens=8, **TREE).fill_at_random((4,))
    first = train(tmp_path / "first", total_steps=64)
    options = dict(
        seed=5,
        envs=4,
        start_from=tmp_path / "first",
        trained_for={"pair": "synthetic"},
        segment_steps=100,
    )
    learner, reward = sizes(), Reward("accepted", laps=("draft_ms",))
    policy = train(
        tmp_path / "run", learner, others=partner, reward=reward, total_steps=192, **options
    )
    ppo = replace(PPO, total_steps=192)
    plan = runs.read_json(tmp_path / "run" / "plan.json")
    turns = TRACE.turns[["suite", "prompt", "turn", "part", "first", "positions"]].to_dict("list")
    source = runs.content_key(header=TRACE.header, turns=turns, costs=COSTS, policy_ms=0.0)
    others = ["DepthPolicy", partner.settings(), hash_of(partner.network)]
    task = asdict(Task(source)) | {"reward": reward, "others": others}
    told = {
        "learner": ["SizePolicy", learner.settings()],
        "task": task,
        "ppo": ppo,
        "seed": 5,
        "envs": 4,
    }
    told |= {"segment_steps": 100, "judge": False, "trained_for": {"pair": "synthetic"}}
    told |= {
        "start_from": hash_of(first.network),
        "steps": 2,
    }  # of 128 decisions, the whole rollouts nearest to 100
    assert plan["settings"] == (runs.plain(told))
    assert policy.trained_for == {"seed": 5, "steps": 192, "ppo": asdict(ppo), "pair": "synthetic"}
    curve = pd.read_parquet(tmp_path / "run" / "curve.parquet")
    counted = [
        "steps",
        "reward",
        "entropy",
        "cycles",
        "new_tok",
        "total_ms",
        "time",
        "actions",
        "tok_per_ms",
        "rate",
    ]
    learned = ["learning_rate", "value_loss", "approx_kl", "clip_fraction", "explained_variance"]
    assert list(curve) == [*counted, *learned, "score", "elapsed_s"]
    assert curve["steps"].tolist() == [64, 128, 192] and curve["score"].isna().all()
    assert curve["tok_per_ms"].tolist() == pytest.approx(
        (curve["new_tok"] / curve["total_ms"]).tolist()
    )
    rates = [ppo_module.learning_rate(ppo, part / 6) for part in (1, 3, 5)]
    assert curve["learning_rate"].tolist() == pytest.approx(rates)
    answers = pd.read_parquet(tmp_path / "run" / "answers.parquet")
    results = plan["results"]
    assert list(answers) == ["verify_nodes", "cycles"] and answers["cycles"].is_monotonic_decreasing
    assert {name: results[name] for name in results if name not in ("elapsed_s", "tok_per_ms")} == {
        "steps": 192,
        "best_score": None,
        "answers": len(answers),
        "most_common": [int(answers["verify_nodes"].iloc[0])],
        "most_common_frac": answers["cycles"].iloc[0] / answers["cycles"].sum(),
        "weights": hash_of(policy.network),
    }
    assert answers["cycles"].sum() == 192 and 0.05 < results["tok_per_ms"] < 1


def test_what_decides_is_described_and_every_environment_has_a_source_and_a_partner_of_its_own():
    assert ppo_module._described(None) is None and ppo_module._described(sizes) == "sizes"
    assert ppo_module._described(ltd.RandomDepth(4, 3, 20)) == "RandomDepth"
    assert ppo_module._described(ltd.DepthPolicy(total_tokens=8, **TREE))[2] is None, (
        "nothing learned yet"
    )
    learn, judged = (TRACE.select(part=part) for part in ("train", "test"))
    replayed = (
        ReplaySource(learn, COSTS),
        ReplaySource(judged, COSTS),
        ReplaySource(learn, COSTS, 1.0),
    )
    keys = [ppo_module._described(source) for source in replayed]
    dear = ppo_module._described(ReplaySource(learn, replace(COSTS, step=9.0)))
    assert len({*keys, dear}) == 4
    pair = random_pair()
    given = dict(prompts=[[1, 2]], max_new_tokens=16, temperature=0.0)
    changes = (
        {},
        {"prompts": [[1, 3]]},
        {"max_new_tokens": 17},
        {"temperature": 1.0},
        {"seed": 1},
        {"policy_ms": 1.0},
    )
    live = [LiveSource(pair, **given | change) for change in changes]
    assert len({ppo_module._described(source) for source in live}) == 6
    assert ppo_module._described(live[0]) == ppo_module._described(LiveSource(pair, [[1, 2]], 16))
    partner, source, learner = (
        ltd.DepthPolicy(total_tokens=8, **TREE),
        ReplaySource(TRACE, COSTS, 0.5),
        sizes(),
    )
    task = Task(source, Reward("accepted"), "turn", partner)
    first, second = (ppo_module._new_env(learner, task, seed) for seed in (1, 2))
    for env in (first, second):
        own = env.source
        assert own is not source and (own.trace, own.costs, own.policy_ms) == (TRACE, COSTS, 0.5)
        assert env.others is not partner and env.others.settings() == partner.settings()
        assert env.learner is not learner and env.learner.settings() == learner.settings()
        assert (env.reward, env.episode) == (Reward("accepted"), "turn")
    assert first.others is not second.others and first.learner is not second.learner
    task = Task(lambda: source, others=lambda seed: ltd.RandomDepth(4, 3, 20, seed))
    made = [ppo_module._new_env(learner, task, seed) for seed in range(12)]
    assert made[3].source is source
    depths = [env.others.answer(None).depth for env in made]
    assert depths == [ltd.RandomDepth(4, 3, 20, seed).answer(None).depth for seed in range(12)]
    assert ppo_module._new_env(learner, Task(source), 0).others is None


def test_stable_baselines_is_told_all_of_the_config():
    given = dict(
        n_steps=60,
        batch_size=20,
        n_epochs=3,
        clip_range=0.3,
        gamma=0.8,
        gae_lambda=0.7,
        ent_coef=0.02,
    )
    given |= dict(vf_coef=0.4, learning_rate=0.01, pi=(6, 5), vf=(4,), activation="relu")
    config = PPOConfig(**given, total_steps=600)
    model = build_ppo(lambda: make_env(sizes())(0), config, 3, 7)
    for name in ("batch_size", "n_epochs", "gamma", "gae_lambda", "ent_coef", "vf_coef"):
        assert getattr(model, name) == given[name]
    assert (model.n_steps, model.n_envs, model.seed, str(model.device)) == (20, 3, 7, "cpu")
    assert model.clip_range(1.0) == 0.3 and model.lr_schedule(0.25) == 0.01
    nets = model.policy.mlp_extractor.policy_net, model.policy.mlp_extractor.value_net
    widths = [
        [layer.out_features for layer in net if hasattr(layer, "out_features")] for net in nets
    ]
    assert widths == [[6, 5], [4]] and isinstance(nets[0][1], torch.nn.ReLU)
    tanh = build_ppo(lambda: make_env(sizes())(0), replace(config, activation="tanh"), 3, 7)
    assert isinstance(tanh.policy.mlp_extractor.policy_net[1], torch.nn.Tanh)
    again, other = (build_ppo(lambda: make_env(sizes())(0), config, 3, seed) for seed in (7, 8))
    weights = [one.policy.action_net.weight for one in (model, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_checkpoint_remembers_moments_rate_and_best_and_rewards_are_divided():
    state = ppo_module.State(sizes())
    assert state.rate(0.25) == 0.25 and state.best_score is None and state.rate_sums == [0.0, 0.0]
    state.note_rate(10.0, 4.0)
    state.note_rate(2.0, 4.0)
    assert state.rate_sums == pytest.approx([10.0, 7.2]) and state.rate(0.25) == pytest.approx(
        10 / 7.2
    )
    assert state.rate(5.0) == 5.0
    networks = [sizes().fill_at_random((4,), seed).network for seed in range(3)]

    def kept(some) -> int:
        return [same(network, some.network) for network in networks].index(True)

    assert np.isnan(state.keep(networks[0], None)) and kept(state) == 0 and state.best_score is None
    assert state.keep(networks[1], 2.0) == 2.0 and kept(state) == 1
    assert state.keep(networks[2], 2.0) == 2.0 and kept(state) == 1, "as good is no better"
    state.observations.add(np.ones((3, sizes().observation_size)))
    state.rewards.add(np.arange(4.0).reshape(-1, 1))
    other = ppo_module.State(sizes())
    other.load_state_dict({name: tensor.clone() for name, tensor in state.state_dict().items()})
    assert other.best_score == 2.0 and other.rate_sums == state.rate_sums
    assert other.observations.count == 3 and (other.observations.mean == 1).all()
    assert other.rewards.scale()[1][0] == pytest.approx(np.arange(4.0).std())
    assert kept(other) == 1 and other.network.activation == sizes().activation
    empty = ppo_module.State(sizes())
    empty.load_state_dict(ppo_module.State(sizes()).state_dict())
    assert empty.network is None and empty.best_score is None
    mean, deviation = empty.observations.scale()
    assert (
        (mean == 0).all() and (deviation == 1).all() and mean.dtype == deviation.dtype == np.float32
    )
    # 2, 4, 6, 8 deviate by sqrt(5), and with four tens after them all eight by sqrt(65 - 7.5 ** 2)
    state, rows, given = (
        ppo_module.State(SimpleNamespace(observation_size=1, activation="tanh")),
        [],
        [],
    )
    buffer = SimpleNamespace(
        compute_returns_and_advantage=lambda *last: rows.append(buffer.rewards.copy())
    )

    def fill(policy, buffer, reward):
        buffer.rewards = np.array(given.pop(0), np.float32).reshape(2, 2)
        return {"new_tok": 4, "time": 2.0}

    config = replace(
        PPO, normalise_observations=False, normalise_reward=True, total_steps=8, n_steps=4
    )
    rollouts = SimpleNamespace(fill=fill, last=())
    learner = SimpleNamespace(state=state, config=config, task=Task(None), rollouts=rollouts)
    learner.policy, learner.num_timesteps = None, 0
    given += [(2, 4, 6, 8), (10, 10, 10, 10)]
    for steps in (4, 8):
        assert ppo_module.SegmentRollouts.collect_rollouts(learner, None, None, buffer, 4)
        assert learner.num_timesteps == steps
    np.testing.assert_allclose(rows[0].ravel(), np.array([2, 4, 6, 8]) / 5**0.5, rtol=1e-6)
    np.testing.assert_allclose(rows[1].ravel(), [10 / (520 / 8 - 7.5**2) ** 0.5] * 4, rtol=1e-6)
    assert state.rate(0.0) > 0 and learner.row["rate"] == 0.0
