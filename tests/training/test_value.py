"""Training of our controller: targets are what replay accepts, it learns what a static tree cannot
do, and prices move it.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.traces import round_costs, synthetic_trace
from fakes.values import SIZES, random_policy

from specdec.core.policy import Static
from specdec.core.records import SIZE
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError
from specdec.policies.base import choices_of, load_policy
from specdec.policies.value import NOTHING, AcceptanceModel, ValueConfig, history_after
from specdec.replays.oracle import clairvoyant, headroom
from specdec.replays.replay import replay
from specdec.replays.static_trees import best_static
from specdec.replays.trace import Trace
from specdec.training import value
from specdec.training.value import (
    Examples,
    Net,
    calibrate_rate,
    evaluation_ms,
    ms_per_tok,
    reprice,
    train_value,
)

SMALL = ValueConfig(top_k=3, sizes=SIZES, hidden=24, steps=300, rounds=1)
COSTS = round_costs()
STATIC = Static(7, 2, 3)


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(turns=48, positions=60, depth=4, top_ks=(3,), most_nodes=20, hit=0.6)


@pytest.fixture(scope="module")
def few(trace):
    """Its first turns."""
    return trace.select(np.arange(48) < 3)


@pytest.fixture(scope="module")
def trained(trace):
    return train_value(trace.select(part="train"), COSTS, SMALL, progress=False)


def net_of(answers=None, probe=True, **settings) -> Net:
    """A network of 10 inputs (mean 1, deviation 2) and 6 features (0 and 4)."""
    inputs = (np.full(10, 1.0, np.float32), np.full(10, 2.0, np.float32))
    features = (np.full(6, 0.0, np.float32), np.full(6, 4.0, np.float32))
    if answers is None:
        answers = np.zeros((3, 2), np.float32)
    return Net(dataclasses.replace(SMALL, **settings), inputs, features, answers, probe)


def test_the_numpy_network_is_the_trained_one():
    torch.manual_seed(0)
    nets = [net_of().eval() for _ in range(2)]
    inputs = torch.randn(7, 10)
    features = torch.randn(7, 6)
    with torch.no_grad():
        answers = [net(inputs, features).view(7, 3, 2).numpy() for net in nets]
    models = [AcceptanceModel(net.arrays(), 3, 2) for net in nets]
    models.append(AcceptanceModel(value.averaged([net.arrays() for net in nets]), 3, 2))
    for model, answer in zip(models, [*answers, np.mean(answers, 0)], strict=True):
        predicted = model(inputs.numpy(), model.state(features.numpy()))
        np.testing.assert_allclose(predicted, answer, atol=1e-5)


def test_a_network_starts_at_the_mean_answer(monkeypatch):
    torch.manual_seed(0)
    answers = np.arange(6, dtype=np.float32).reshape(3, 2)
    net = net_of(answers, dropout=0.0, noise=0.25)
    assert net.out.bias.tolist() == list(range(6))
    assert 0 < net.out.weight.abs().max() <= 0.1 * 24**-0.5
    inputs = torch.randn(7, 10)
    features = torch.randn(7, 6)
    with torch.no_grad():
        monkeypatch.setattr(torch, "randn_like", torch.ones_like)
        noisy = net.train()(inputs, features)
        torch.testing.assert_close(noisy, net.eval()(inputs, features + 0.25 * 4.0))
        blind = net_of(answers, probe=False).eval()
        assert torch.equal(blind(inputs, features), blind(inputs, 9 * features))
        dropping = net_of(answers, dropout=0.9, noise=0.0).train()
        assert not torch.equal(dropping(inputs, features), dropping(inputs, features))


def test_it_beats_the_tuned_tree_and_never_the_bound(trace, trained):
    policy, curve = trained
    test = trace.select(part="test")
    tuned = replay(test, Static.of(best_static(trace.select(part="train"), COSTS)), COSTS)
    ours = replay(test, policy, COSTS)
    bound = clairvoyant(test, COSTS)
    assert ours.speedup > 1.03 * tuned.speedup
    assert 0.06 < headroom(ours.ms_per_tok, tuned.ms_per_tok, bound.ms_per_tok) < 1
    assert curve["held_out_loss"].min() < curve["held_out_loss"].iloc[0]


def test_evaluations_are_charged(trace, trained):
    policy = trained[0]
    test = trace.select(part="test").select(np.arange(24) < 6)
    free = ms_per_tok(policy, test, COSTS, 0.0)
    before = policy.evaluations
    replayed = replay(test, policy, COSTS, keep_cycles=True)
    evaluations = policy.evaluations - before
    assert len(replayed.cycles) <= evaluations <= replayed.cycles["questions"].sum()
    paid = ms_per_tok(policy, test, COSTS, 2.0)
    assert paid == pytest.approx(free + 2.0 * evaluations / replayed.table["new_tok"].sum())
    assert 0.001 < evaluation_ms(policy, test, COSTS) < 50


def test_cycles_start_where_replay_says(few):
    rows, histories = value.cycle_starts(few, COSTS, STATIC, detours=0)
    cycles = replay(few, STATIC, COSTS, keep_cycles=True)
    expected_rows = []
    expected = []
    for turn, cycles_of_turn in enumerate(cycles.rows):
        row = int(few.turns["first"].iloc[turn])
        history = NOTHING
        for cycle in cycles_of_turn:
            expected_rows.append(row)
            expected.append(history)
            row += cycle.new_tok
            history = history_after(history, cycle.accepted_tok, cycle.expansions)
    assert rows.tolist() == expected_rows
    np.testing.assert_array_equal(histories, np.stack(expected))
    # detours follow the plain replay, each with a seed of its own
    twice = value.cycle_starts(few, COSTS, STATIC, 2, seed=3)[0].tolist()
    first = value.cycle_starts(few, COSTS, STATIC, 1, seed=3)[0].tolist()
    second = value.cycle_starts(few, COSTS, STATIC, 1, seed=4)[0].tolist()
    assert twice == first + second[len(rows) :]
    assert first[: len(rows)] == expected_rows and first != second


def test_detours_verify_few_nodes():
    recorder = value._Detours(STATIC, 0.25, seed=1)
    recorder.reset()
    counts = np.zeros(21)
    for _ in range(8000):
        question = SimpleNamespace(kind=SIZE, largest=20)
        counts[recorder.answer(question)] += 1
    assert counts[[5, *range(7, 21)]].sum() == 0
    assert counts[6] == pytest.approx(6000, abs=150)
    assert counts[:5] == pytest.approx([400] * 5, abs=75)
    question.largest = 0
    assert recorder.answer(question) == 0


@pytest.fixture(scope="module")
def examples(trace):
    rows, histories = value.cycle_starts(trace, COSTS, STATIC, detours=0)
    return Examples(trace, random_policy(8, probe="target"), rows, histories)


def test_examples_hold_what_replay_accepts(trace, examples):
    numbers = np.array([3, 50, 7, *range(100, 117)])
    rows = examples.rows[numbers]
    inputs, features, accepted = examples.batch(numbers, 1)
    np.testing.assert_array_equal(features, trace.features[rows])
    for expansions in range(5):
        for number, size in enumerate(SIZES):
            expected = trace.accepted_tok(rows, 3, expansions, size)
            np.testing.assert_array_equal(accepted[:, expansions, number], expected)
    for number, row in enumerate(rows[:3]):
        history = examples.histories[numbers[number]]
        begun = examples.policy.inputs.begin(trace.context_tok[row], history)
        expected = examples.policy.inputs.update(begun, trace.trees(3).scores[row, :12], 1)
        np.testing.assert_allclose(inputs[number], expected, rtol=1e-6)
    last = len(examples.rows) - 1
    assert examples.sample(4).tolist() == [0, int(last / 3), int(last * 2 / 3), last]


def test_examples_are_split_by_prompts(trace, examples):
    turns = trace.turns.assign(prompt=[f"p{turn // 2}" for turn in range(48)])
    of_pairs = Trace(trace.header, turns, dict(trace._columns))
    paired = Examples(of_pairs, examples.policy, examples.rows, examples.histories)
    held = []
    for seed in (0, 0, 1):
        training, held_out = paired.split(0.3, seed)
        prompts = [set((side.rows // 120).tolist()) for side in (training, held_out)]
        assert len(prompts[1]) == 7 and prompts[0] | prompts[1] == set(range(24))
        assert not prompts[0] & prompts[1]
        for side in (training, held_out):
            inside = np.isin(examples.rows, side.rows)
            np.testing.assert_array_equal(side.rows, examples.rows[inside])
            np.testing.assert_array_equal(side.histories, examples.histories[inside])
        held.append(prompts[1])
    assert held[0] == held[1] != held[2]


def test_the_first_level_of_a_planning_policy(trace):
    starts = value.cycle_starts(trace, COSTS, STATIC, detours=0)
    planning = Examples(trace, random_policy(1, probe="none", plans=True), *starts)
    plain = Examples(trace, random_policy(1, probe="none"), *starts)
    numbers = np.arange(30)
    inputs, _, accepted = planning.batch(numbers, 0)
    # nothing is copied here
    assert accepted.shape == (30, 6, len(SIZES)) and not accepted[:, 0].any()
    np.testing.assert_array_equal(accepted[:, 1:], plain.batch(numbers, 0)[2])
    level = planning.policy.inputs._level
    assert (inputs[:, level] == np.eye(6)[0]).all()


def test_the_best_weights_are_kept(examples, monkeypatch):
    scripted = [3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9]
    networks = []
    levels = []
    real = value._loss

    def loss(net, level, inputs, features, accepted):
        if net.training:
            levels.append(level)
            assert (accepted == 5.0).all()
            return real(net, level, inputs, features, accepted)
        if not level:
            networks.append(net.arrays())
        return torch.tensor(scripted[len(networks) - 1] + level)

    class Teacher:  # says 5 everywhere
        def state(self, features):
            return None

        def __call__(self, inputs, state):
            return np.full((len(inputs), 5, len(SIZES)), 5.0, np.float32)

    monkeypatch.setattr(value, "_loss", loss)
    config = dataclasses.replace(SMALL, steps=5000, batch=8, learning_rate=0.003)
    arrays, curve = value.fit_model(*examples.split(0.2, 0), config, 3, False, Teacher())
    assert curve["step"].tolist() == list(range(99, 600, 100))
    weights = 0.8 ** np.arange(5)
    expected = np.add(scripted[:6], np.average(range(5), weights=weights))
    assert curve["held_out_loss"].tolist() == pytest.approx(expected)
    assert curve["loss"].iloc[-1] < 0.5 * curve["loss"].iloc[0]
    assert all((arrays[name] == array).all() for name, array in networks[1].items())
    assert not (arrays["out.weight"] == networks[2]["out.weight"]).all()
    # a level is drawn like the length of a cycle that continues four times in five
    shares = np.bincount(levels) / 600
    assert shares[0] == pytest.approx(0.2, abs=0.06)
    assert shares[4] == pytest.approx(0.8**4, abs=0.08)


@pytest.fixture
def quick(monkeypatch):
    """Networks are random instead of fitted; the calls are noted."""
    calls = []
    starts = value.cycle_starts

    def fit(examples, config, seed, progress, distil):
        calls.append(("fit", len(examples.rows), seed, distil))
        deepest = examples.policy.most_expansions
        network = random_policy(8, seed, most_expansions=deepest).network
        return network, pd.DataFrame({"step": [99, 199]})

    def collect(trace, costs, policy, detours, seed):
        rows, histories = starts(trace, costs, policy, detours, seed)
        calls.append(("starts", policy, seed, len(rows)))
        return rows, histories

    monkeypatch.setattr(value, "fit_ensemble", fit)
    monkeypatch.setattr(value, "cycle_starts", collect)
    return calls


def test_starts_are_collected_under_the_policy(trace, quick):
    few = trace.select(np.arange(48) < 4)
    tuning = trace.select(np.arange(48) // 2 == 3)
    config = dataclasses.replace(SMALL, rounds=2, name="small")
    options = dict(tune_on=tuning, seed=7, policy_ms=0.5, progress=False)
    policy, curve = train_value(few, COSTS, config, **options)
    (_, static, *first), fitted, (_, acting, *second), last = quick
    # at most 24 tokens, depth 5
    assert static.plan == TreeConfig(13, 4, 3)
    assert acting.priced_for == "round numbers"
    assert (first[0], second[0]) == (7, 17)
    assert fitted == ("fit", first[1], 7, False)
    assert last == ("fit", first[1] + second[1], 107, True)
    assert curve["round"].tolist() == [0, 0, 1, 1]
    assert policy.trained_for["rate"] == policy.rate
    assert [row["part"] for row in choices_of(policy)] == ["train", "tune"]
    assert (policy.most_expansions, policy.probe) == (4, "target")


def test_a_training_begins_at_a_tree(few, quick, monkeypatch):
    calibrated = []

    def calibrate(policy, trace, costs, rate, policy_ms):
        calibrated.append((rate, policy_ms))
        return policy.price(costs, rate), 9.0

    monkeypatch.setattr(value, "calibrate_rate", calibrate)
    monkeypatch.setattr(value, "evaluation_ms", lambda *given: (given[3] == "pair") * 0.125)
    tree = TreeConfig(5, 2, 3)
    config = dataclasses.replace(SMALL, most_expansions=3, probe="none")
    options = dict(start=tree, policy_ms=None, pair="pair", progress=False)
    policy, _ = train_value(few, COSTS, config, **options)
    begun = 1 / replay(few, Static.of(tree), COSTS).ms_per_tok
    assert quick[0][1].plan == tree
    assert calibrated == [(pytest.approx(begun), 0.125)]
    assert (policy.trained_for["rate"], policy.most_expansions) == (9.0, 3)


def test_a_recording_is_learned_on_the_best_beam(tmp_path, monkeypatch):
    both = synthetic_trace(turns=4, positions=20, depth=3, top_ks=(2, 3), most_nodes=20)
    both.turns["part"] = ["train", "tune", "test", "train"]
    both.header["trees"] = (3, 2)
    call = {}

    def train(trace, costs, config, **options):
        call.update(options, config=config, parts=trace.turns["part"].tolist())
        return random_policy(8, probe="target"), pd.DataFrame({"step": [99]})

    monkeypatch.setattr(value, "train_value", train)
    options = dict(seed=4, out_dir=tmp_path)
    policy = value.train_recording(both, COSTS, SMALL, **options)
    assert call["config"] == dataclasses.replace(SMALL, top_k=2)
    assert call["seed"] == 4
    assert call["parts"] == ["train", "train"] and call["policy_ms"] is None
    assert call["tune_on"].turns["part"].tolist() == ["tune"]
    tune = both.select(part="tune")
    times = {}
    for depth in range(1, 4):
        for total in range(2, pool_size(depth, 2) + 2):
            times[total, depth] = replay(tune, Static(total, depth, 2), COSTS).ms_per_tok
    start = call["start"]
    assert times[start.total_tokens, start.depth] == min(times.values())
    assert pd.read_parquet(tmp_path / "curve.parquet").to_dict("list") == {"step": [99]}
    assert load_policy(tmp_path / "policy").settings() == policy.settings()


def test_the_rate_is_raised_and_schedules_are_tried(trace, monkeypatch):
    rates = []
    times = iter((2.0, 4.0, 5.0))
    monkeypatch.setattr(
        value, "ms_per_tok", lambda policy, *_: rates.append(policy.rate) or next(times)
    )
    policy, rate = calibrate_rate(random_policy(), trace, COSTS, 1.0, 0.75)
    assert rates == [1.0, 0.5, 0.25] and policy.rate == rate == 0.2

    def ms(policy, given, costs, policy_ms):
        assert given is trace and policy_ms == 0.5
        schedule = abs(policy.first_evaluation - 1) + abs(policy.stride - 3)
        return schedule + abs(policy.continue_bonus_tok + 0.05)

    monkeypatch.setattr(value, "ms_per_tok", ms)
    tuned = value.tune_schedule(random_policy(), trace, COSTS, 0.5)
    assert (tuned.first_evaluation, tuned.stride, tuned.continue_bonus_tok) == (1, 3, -0.05)


def test_repricing(trace, trained, monkeypatch):
    monkeypatch.setattr(value, "evaluation_ms", lambda *_: 0.25)
    few = trace.select(np.arange(48) < 6)
    policy = trained[0].with_settings(stride=2).price(COSTS, 0.2)
    dear = round_costs(name="dear", verify=(4.0, 12.0, 200.0), expand=(0.75, 0.75))
    moved = reprice(policy, few, dear)
    assert moved.expand_ms == 0.75 and moved.priced_for == "dear"
    assert ms_per_tok(moved, few, dear, 0.25) < ms_per_tok(policy, few, dear, 0.25)
    assert moved.trained_for["costs"] == "dear"
    assert moved.rate == pytest.approx(1 / ms_per_tok(moved, few, dear, 0.25), rel=0.05)
    pytest.raises(SpecdecError, reprice, Static(), few, dear).match("no costs to replace")
