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
from specdec.policies.base import load_policy
from specdec.policies.value import NOTHING, AcceptanceModel, ValueConfig, ValuePolicy, history_after
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
COSTS, STATIC = round_costs(), Static(7, 2, 3)
SIDES = [
    [np.full(size, value, np.float32) for value in values]
    for size, values in ((10, (1.0, 2.0)), (6, (0.0, 4.0)))
]


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


def test_the_numpy_network_is_the_trained_one_and_is_noisy_while_it_learns(monkeypatch):
    torch.manual_seed(0)
    nets = [Net(SMALL, *SIDES, np.zeros((3, 2), np.float32), True).eval() for _ in range(2)]
    inputs, features = torch.randn(7, 10), torch.randn(7, 6)
    with torch.no_grad():
        answers = [net(inputs, features).view(7, 3, 2).numpy() for net in nets]
    for net, answer in zip(nets, answers, strict=True):
        model = AcceptanceModel(net.arrays(), 3, 2)
        np.testing.assert_allclose(
            model(inputs.numpy(), model.state(features.numpy())), answer, atol=1e-5
        )
    both = AcceptanceModel(value.averaged([net.arrays() for net in nets]), 3, 2)
    np.testing.assert_allclose(
        both(inputs.numpy(), both.state(features.numpy())), np.mean(answers, 0), atol=1e-5
    )
    torch.manual_seed(0)
    functional = torch.nn.functional
    answers = np.arange(6, dtype=np.float32).reshape(3, 2)
    net = Net(dataclasses.replace(SMALL, dropout=0.0, noise=0.25), *SIDES, answers, True)
    assert (
        net.out.bias.tolist() == list(range(6)) and 0 < net.out.weight.abs().max() <= 0.1 * 24**-0.5
    )
    assert list(net.state_dict())[:4] == [
        "input_mean",
        "input_deviation",
        "feature_mean",
        "feature_deviation",
    ]
    inputs, features = torch.randn(7, 10), torch.randn(7, 6)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch, "randn_like", torch.ones_like)
        torch.testing.assert_close(
            net.train()(inputs, features), net.eval()(inputs, features + 0.25 * 4.0)
        )
        blind = Net(SMALL, *SIDES, answers, False).eval()
        torch.testing.assert_close(
            blind(inputs, features), blind(inputs, 9 * features), rtol=0, atol=0
        )
        seen = []
        patch.setattr(
            functional,
            "dropout",
            lambda x, p, training=True: seen.append((x.shape[1], p, training)) or x,
        )
        dropping = Net(dataclasses.replace(SMALL, dropout=0.5), *SIDES, answers, True)
        dropping.train()(inputs, features)
        dropping.eval()(inputs, features)
    assert seen == [(6, 0.5, True), (24, 0.5, True), (24, 0.5, False)]


def test_it_beats_the_tuned_tree_never_the_bound_prices_move_it_and_evaluations_are_charged(
    trace, trained
):
    policy, curve = trained
    test, costs = trace.select(part="test"), COSTS
    tuned = replay(test, Static.of(best_static(trace.select(part="train"), costs)), costs)
    ours, bound = replay(test, policy, costs), clairvoyant(test, costs)
    assert ours.speedup > 1.03 * tuned.speedup
    assert 0.06 < headroom(ours.ms_per_tok, tuned.ms_per_tok, bound.ms_per_tok) < 1
    assert curve["held_out_loss"].min() < curve["held_out_loss"].iloc[0]
    train, test = (trace.select(part=part).select(np.arange(24) < 8) for part in ("train", "test"))
    dear = round_costs(name="dear nodes", verify=(4.0, 12.0, 200.0))
    moved, rate = calibrate_rate(policy, train, dear, policy.rate)
    kept = [
        replay(test, one, COSTS, keep_cycles=True).cycles["verify_nodes"].mean()
        for one in (policy, moved)
    ]
    assert kept[1] < 0.8 * kept[0]
    assert replay(test, moved, dear).ms_per_tok < replay(test, policy, dear).ms_per_tok
    assert rate == pytest.approx(1 / replay(train, moved, dear).ms_per_tok, rel=0.02)
    policy, test = trained[0], trace.select(part="test").select(np.arange(24) < 6)
    free = ms_per_tok(policy, test, COSTS, 0.0)
    assert free == replay(test, policy, COSTS).ms_per_tok
    before = policy.evaluations
    found = replay(test, policy, COSTS, keep_cycles=True)
    evaluations = policy.evaluations - before
    assert len(found.cycles) <= evaluations <= found.cycles["questions"].sum()
    paid = ms_per_tok(policy, test, COSTS, 2.0)
    assert paid == pytest.approx(free + 2.0 * evaluations / found.table["new_tok"].sum())
    rare = value.tune_schedule(policy, test, COSTS, 20.0)  # dear evaluations: fewer of them
    rare.evaluations = 0
    replay(test, rare, COSTS)
    assert rare.evaluations < evaluations
    assert 0.001 < evaluation_ms(policy, test, COSTS) < 50


def test_cycles_start_where_replay_says_and_detours_verify_few_nodes_and_begin_anew_with_each_seed(
    few,
):
    rows, histories = value.cycle_starts(few, COSTS, STATIC, detours=0)
    cycles = replay(few, STATIC, COSTS, keep_cycles=True)
    expected_rows, expected = [], []
    for turn, lived in enumerate(cycles.rows):
        row, history = int(few.turns["first"].iloc[turn]), NOTHING
        for one in lived:
            expected_rows.append(row)
            expected.append(history)
            row, history = (
                row + one.new_tok,
                history_after(history, one.accepted_tok, one.expansions),
            )
    assert rows.tolist() == expected_rows and rows.dtype == np.int64
    np.testing.assert_array_equal(histories, np.stack(expected))
    assert histories.dtype == np.float32 and not histories[0].any()
    given = (
        dict(detours=0, seed=3),
        dict(detours=1, seed=3),
        dict(detours=2, seed=3),
        dict(detours=1, seed=4),
    )
    parts = [value.cycle_starts(few, COSTS, STATIC, **some)[0].tolist() for some in given]
    plain = parts[0]
    first, second = parts[1][len(plain) :], parts[2][len(parts[1]) :]
    assert parts[2][: len(parts[1])] == parts[1] and parts[1][: len(plain)] == plain
    assert plain + second == parts[3] and first != second != plain
    recorder = value._StartRecorder(STATIC, 0.25, seed=1)
    recorder.reset()
    asked = [
        SimpleNamespace(kind=SIZE, view=SimpleNamespace(row=n), largest=20) for n in range(8000)
    ]
    counts = np.bincount([recorder.answer(one) for one in asked], minlength=21)
    assert recorder.rows == list(range(8000)) and len(recorder.histories) == 8000
    assert counts[[5, *range(7, 21)]].sum() == 0 and counts[6] == pytest.approx(6000, abs=150)
    assert counts[:5] == pytest.approx([400] * 5, abs=75)
    assert recorder.answer(SimpleNamespace(kind=SIZE, view=SimpleNamespace(row=0), largest=0)) == 0
    own = random_policy(8, probe="target")  # whoever answers the sizes is asked for them
    assert value._StartRecorder(own, 0.0, 0).asks == own.asks
    assert value._StartRecorder(STATIC, 0.0, 0).asks == STATIC.asks | {SIZE}


@pytest.fixture(scope="module")
def examples(trace):
    rows, histories = value.cycle_starts(trace, COSTS, STATIC, detours=0)
    return Examples(trace, random_policy(8, probe="target"), rows, histories)


def test_examples_hold_what_replay_accepts_split_by_prompts_and_are_standardised(trace, examples):
    numbers = np.array([3, 50, 7, *range(100, 117)])
    rows = examples.rows[numbers]
    inputs, features, accepted = examples.batch(numbers, 1)
    np.testing.assert_array_equal(features, trace.features[rows])
    assert {array.dtype for array in (inputs, features, accepted)} == {np.dtype(np.float32)}
    wanted = [
        [trace.accepted_tok(rows, 3, expansions, size) for size in SIZES] for expansions in range(5)
    ]
    np.testing.assert_array_equal(accepted, np.moveaxis(wanted, -1, 0))
    for number, row in enumerate(rows[:3]):
        begun = examples.inputs.begin(trace.context_tok[row], examples.histories[numbers[number]])
        seen = examples.inputs.update(begun, trace.trees(3).scores[row, :12], 1)
        np.testing.assert_allclose(inputs[number], seen, rtol=1e-6)
    numbers = numbers[:3]
    blind = Examples(trace, random_policy(1, probe="none"), examples.rows, examples.histories)
    assert (
        blind.batch(numbers, 1)[1].tolist() == [[0.0]] * 3
        and blind.batch(numbers, 1)[1].dtype == np.float32
    )
    assert examples.sample(4).tolist() == [
        int(part * (len(examples.rows) - 1) / 3) for part in range(4)
    ]
    assert examples.sample(10**6).tolist() == list(range(len(examples.rows)))
    turns = trace.turns.assign(prompt=[f"p{turn // 2}" for turn in range(48)])
    of_pairs = Trace(trace.header, turns, dict(trace._columns))
    paired, held = Examples(of_pairs, examples.policy, examples.rows, examples.histories), []
    for seed in (0, 0, 1):
        training, held_out = paired.split(0.3, seed)
        prompts = [set((side.rows // 60 // 2).tolist()) for side in (training, held_out)]
        assert (
            len(prompts[1]) == 7
            and prompts[0] | prompts[1] == set(range(24))
            and not prompts[0] & prompts[1]
        )
        assert sorted([*training.rows, *held_out.rows]) == sorted(examples.rows)
        np.testing.assert_array_equal(
            held_out.histories, examples.histories[np.isin(examples.rows, held_out.rows)]
        )
        held.append(prompts[1])
    assert held[0] == held[1] != held[2]
    assert len({row // 120 for row in paired.split(0.001, 0)[1].rows.tolist()}) == 1, (
        "one prompt at least"
    )
    few = Examples(trace, examples.policy, examples.rows[:1500], examples.histories[:1500])
    (mean, deviation), (feature_mean, feature_deviation), answer = value._moments(
        few, np.random.default_rng(0)
    )
    features = trace.features[few.rows].astype(np.float32)
    np.testing.assert_allclose(feature_mean, features.mean(0), atol=1e-5)
    np.testing.assert_allclose(feature_deviation, features.std(0) + 0.05, rtol=1e-4)
    np.testing.assert_allclose(answer, few.batch(np.arange(1500), 0)[2].mean(0), atol=1e-5)
    level = few.inputs._level
    assert mean[level] == pytest.approx([0.2] * 5) and deviation[level] == pytest.approx(
        [0.4 + 0.05] * 5, rel=1e-4
    )


def test_the_first_level_of_a_planning_policy_is_that_before_the_root_pass(trace):
    rows, histories = value.cycle_starts(trace, COSTS, STATIC, detours=0, plans=True)
    planning = Examples(trace, random_policy(1, probe="none", plans=True), rows, histories)
    plain = Examples(trace, random_policy(1, probe="none"), rows, histories)
    numbers = np.arange(30)
    inputs, _, accepted = planning.batch(numbers, 0)
    assert accepted.shape == (30, 6, len(SIZES)) and not accepted[:, 0].any(), (
        "nothing is copied here"
    )
    np.testing.assert_array_equal(accepted[:, 1:], plain.batch(numbers, 0)[2])
    level = planning.inputs._level
    assert (inputs[:, level] == np.eye(6)[0]).all()
    assert (planning.batch(numbers, 2)[0][:, level] == np.eye(6)[2]).all(), "after one expansion"
    width = planning.inputs.size
    assert width == plain.inputs.size + 1 + len(SIZES) - 1, "one level more, and the sums of copies"


class Teacher:  # says 5 everywhere
    def state(self, features):
        return features.shape

    def __call__(self, inputs, state):
        assert state == (len(inputs), 8)
        return np.full((len(inputs), 5, len(SIZES)), 5.0, np.float32)


def test_the_weights_with_the_least_held_out_loss_are_kept(examples, monkeypatch):
    scripted, kept, asked, taught, made = [3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9], [], [], set(), {}
    real, batch, adam = value._loss, Examples.batch, torch.optim.AdamW

    def loss(net, level, inputs, features, accepted):
        if net.training:
            taught.add(float(accepted.mean()))
            return real(net, level, inputs, features, accepted)
        if not level:
            kept.append(net.arrays())
        return torch.tensor(scripted[len(kept) - 1] + level)

    def noted(self, numbers, level):
        asked.append((len(numbers), level))
        return batch(self, numbers, level)

    monkeypatch.setattr(value, "_loss", loss)
    monkeypatch.setattr(Examples, "batch", noted)
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda weights, **told: made.update(told) or adam(weights, **told)
    )
    config = dataclasses.replace(SMALL, steps=5000, batch=8, learning_rate=0.003, weight_decay=0.04)
    arrays, curve = value.fit_model(*examples.split(0.2, 0), config, 3, False, Teacher())
    assert made == {"lr": 0.003, "weight_decay": 0.04} and taught == {5.0}
    assert list(curve) == ["step", "loss", "held_out_loss"] and curve["step"].tolist() == list(
        range(99, 600, 100)
    )
    weights = 0.8 ** np.arange(5)
    assert curve["held_out_loss"].tolist() == pytest.approx(
        np.add(scripted[:6], np.average(range(5), weights=weights))
    )
    assert curve["loss"].iloc[-1] < 0.5 * curve["loss"].iloc[0]
    assert all((arrays[name] == array).all() for name, array in kept[1].items())
    assert not (arrays["out.weight"] == kept[2]["out.weight"]).all()
    learned = [level for count, level in asked if count == 8]
    assert (
        len(learned) == 600
    )  # a level is drawn like the length of a cycle that goes on four times in five
    shares = np.bincount(learned) / 600
    assert shares[0] == pytest.approx(0.2, abs=0.06) and shares[4] == pytest.approx(
        0.8**4, abs=0.08
    )
    brief = dataclasses.replace(SMALL, steps=3, batch=8)  # ends before its first measurement
    arrays, curve = value.fit_model(*examples.split(0.2, 0), brief, 0, False)
    assert set(arrays) == set(AcceptanceModel.NAMES) and curve.empty
    assert list(curve) == ["step", "loss", "held_out_loss"]


@pytest.fixture
def quick(monkeypatch):
    """Networks are random instead of fitted; what was asked for is noted."""
    asked, starts = [], value.cycle_starts

    def fit(examples, config, seed, progress, distil):
        asked.append(("fit", len(examples.rows), config, seed, progress, distil))
        deepest = examples.policy.most_expansions
        return random_policy(8, seed, most_expansions=deepest).network, pd.DataFrame(
            {"step": [99, 199]}
        )

    def collect(trace, costs, policy, detours, seed, plans):
        found = starts(trace, costs, policy, detours, seed, plans)
        asked.append(("starts", policy, detours, seed, len(found[0])))
        return found

    monkeypatch.setattr(value, "fit_ensemble", fit)
    monkeypatch.setattr(value, "cycle_starts", collect)
    return asked


def test_starts_are_collected_under_the_static_tree_and_then_under_the_policy(
    trace, quick, monkeypatch
):
    few, tuning = (trace.select(np.isin(np.arange(48), part)) for part in (range(4), (6, 7)))
    tuned, real = [], value.tune_schedule
    monkeypatch.setattr(
        value, "tune_schedule", lambda *given: tuned.append(given[1:]) or real(*given)
    )
    config = dataclasses.replace(SMALL, rounds=2, name="small")
    policy, curve = train_value(
        few, COSTS, config, tune_on=tuning, seed=7, policy_ms=0.5, progress=False
    )
    first, fitted, second, last = quick
    assert (first[1].plan.total_tokens, first[1].plan.depth, first[1].plan.top_k) == (13, 4, 3), (
        "at most 24, depth 5"
    )
    assert first[2:4] == (3, 7) and second[2:4] == (3, 17) and second[1].trained_for == {}
    assert isinstance(second[1], ValuePolicy) and second[1].priced_for == "round numbers"
    assert fitted[1:] == (first[4], config, 7, False, False)
    assert last[1:] == (first[4] + second[4], config, 107, False, True)
    assert curve.to_dict("list") == {"step": [99, 199] * 2, "round": [0, 0, 1, 1]}
    assert curve.index.tolist() == [0, 1, 2, 3]
    assert tuned == [(tuning, COSTS, 0.5)]
    schedule = {
        "choice": "schedule",
        "part": "tune",
        "value": f"{policy.first_evaluation}, {policy.stride}",
    }
    recipe = {
        "choice": "weights, sizes, probe",
        "part": "train",
        "value": "recipe 'small', chosen before",
    }
    facts = {"pair": "synthetic", "costs": "round numbers", "seed": 7, "rate": policy.rate}
    assert policy.trained_for == facts | {"choices": [recipe, schedule]}
    assert (policy.top_k, policy.most_expansions, policy.sizes, policy.probe) == (
        3,
        4,
        SIZES,
        "target",
    )


def test_a_training_begins_where_it_is_told_and_measures_what_answers_cost(few, quick, monkeypatch):
    def calibrate(policy, *given):
        calibrated.append(given)
        return policy.price(*given[1:3]), 9.0

    monkeypatch.setattr(value, "calibrate_rate", calibrate)
    monkeypatch.setattr(
        value, "evaluation_ms", lambda *given: (given[2:] == (COSTS, "pair")) * 0.125
    )
    tree, calibrated = TreeConfig(5, 2, 3), []
    config = dataclasses.replace(SMALL, rounds=1, most_expansions=3, probe="none")
    policy, _ = train_value(
        few, COSTS, config, start=tree, policy_ms=None, pair="pair", progress=False
    )
    began = 1 / replay(few, Static.of(tree), COSTS).ms_per_tok
    assert quick[0][1].plan == tree and calibrated == [(few, COSTS, pytest.approx(began), 0.125)]
    assert policy.trained_for["rate"] == 9.0 and policy.trained_for["choices"][1]["part"] == "train"
    assert policy.most_expansions == 3 and policy.probe == "none"
    train_value(few, COSTS, config, start=tree, progress=False)
    assert calibrated[-1][-1] == 0.0, "free where nobody says what an answer costs"
    for start in (
        None,
        TreeConfig(1, 0, 3),
        TreeConfig(1, 2, 3),
    ):  # plain decoding is no tree to learn from
        quick.clear()
        train_value(few, COSTS, dataclasses.replace(SMALL, rounds=1), start=start, progress=False)
        assert quick[0][1].plan == TreeConfig(13, 4, 3)
    pytest.raises(SpecdecError, train_value, few, COSTS, config, policy_ms=-1.0).match("policy_ms")
    both = dataclasses.replace(config, probe="both")
    pytest.raises(SpecdecError, train_value, few, COSTS, both).match("holds no draft_state")
    few = synthetic_trace()
    few.header["features"] = False
    pytest.raises(SpecdecError, train_value, few, COSTS, SMALL).match("holds no features")


def test_a_recording_is_learned_on_the_beam_of_its_fastest_tree(tmp_path, monkeypatch):
    both = synthetic_trace(turns=4, positions=20, depth=3, top_ks=(2, 3), most_nodes=20)
    both.turns["part"] = ["train", "tune", "test", "train"]
    both.header["trees"] = (3, 2)
    asked = {}

    def train(trace, costs, config, **options):
        asked.update(options, config=config, learn=trace)
        return random_policy(8, probe="target"), pd.DataFrame({"step": [99]})

    monkeypatch.setattr(value, "train_value", train)
    options = dict(seed=4, out_dir=tmp_path)
    policy = value.train_recording(both, COSTS, SMALL, **options)
    tune = both.select(part="tune")
    assert (
        asked["config"] == dataclasses.replace(SMALL, top_k=2)
        and asked["seed"] == 4
        and asked["policy_ms"] is None
    )
    assert asked["learn"].turns["part"].tolist() == ["train", "train"]
    assert asked["tune_on"].turns["part"].tolist() == ["tune"]
    grid = [(total, depth) for depth in range(1, 4) for total in range(2, pool_size(depth, 2) + 2)]
    times = {one: replay(tune, Static(*one, 2), COSTS).ms_per_tok for one in grid}
    assert times[asked["start"].total_tokens, asked["start"].depth] == min(times.values())
    assert asked["start"].top_k == 2 and asked["start"].total_tokens > 1
    assert pd.read_parquet(tmp_path / "curve.parquet").to_dict("list") == {"step": [99]}
    assert load_policy(tmp_path / "policy").settings() == policy.settings()
    value.train_recording(both, round_costs(verify=(4.0, 4.0, 4.0)), SMALL, **options)
    assert asked["config"].top_k == asked["start"].top_k == 3, "where nodes are free"
    both.header["trees"] = ()
    pytest.raises(SpecdecError, value.train_recording, both, COSTS, SMALL, **options).match(
        "keeps no whole trees"
    )


def test_the_rate_is_raised_schedules_are_tried_and_an_evaluation_costs_the_answers_between_too(
    trace, monkeypatch
):
    seen, times = [], iter((2.0, 4.0, 5.0))
    monkeypatch.setattr(
        value, "ms_per_tok", lambda policy, *given: seen.append((policy.rate, given)) or next(times)
    )
    policy, rate = calibrate_rate(random_policy(), trace, COSTS, 1.0, 0.75)
    assert (
        seen == [(began, (trace, COSTS, 0.75)) for began in (1.0, 0.5, 0.25)]
        and policy.rate == rate == 0.2
    )
    tried = []

    def ms(policy, given, costs, policy_ms):
        tried.append((policy.first_evaluation, policy.stride, policy.continue_bonus_tok))
        assert given is trace and policy_ms == 0.5
        return (
            abs(policy.first_evaluation - 1)
            + abs(policy.stride - 3)
            + abs(policy.continue_bonus_tok + 0.05)
        )

    monkeypatch.setattr(value, "ms_per_tok", ms)
    found = value.tune_schedule(random_policy(), trace, COSTS, 0.5)
    assert (found.first_evaluation, found.stride, found.continue_bonus_tok) == (1, 3, -0.05)
    assert tried[:9] == [(first, stride, 0.0) for first in (0, 1, 2) for stride in (1, 2, 3)]
    assert tried[9:] == [(1, 3, bonus) for bonus in (-0.1, -0.05, 0.0, 0.05)]
    monkeypatch.setattr(value, "answer_ms", lambda *given: 2.0 if given[0] is trace else 0.0)
    monkeypatch.setattr(
        value, "measured_answer_ms", lambda pair, *_: 3.0 if pair == "pair" else 0.0
    )
    policy = random_policy(8, probe="target", first_evaluation=1)
    first = replay(trace.select(np.arange(48) < 4), policy, COSTS, keep_cycles=True)
    share = first.cycles["questions"].sum() / policy.evaluations
    assert share > 1
    assert evaluation_ms(policy, trace, COSTS) == pytest.approx(2.0 * share)
    assert evaluation_ms(policy, trace, COSTS, "pair") == pytest.approx(3.0 * share)


def test_repricing_tells_where_another_shape_of_trees_is_faster(recwarn):
    both = synthetic_trace(turns=6, positions=40, depth=3, top_ks=(1, 3), hit=0.6)
    tree = random_policy(probe="none", most_expansions=3, sizes=(0, 1, 3))
    reprice(tree, both, round_costs(verify=(1.0, 90.0, 900.0)))
    assert not recwarn.list, "nodes are so dear that none is worth it"
    with pytest.warns(
        UserWarning,
        match=r"keeps trees of top_k=3, .* 4,2,1 is 25% faster than the best of them; train",
    ):
        reprice(tree, both, COSTS)


def test_repricing_lists_every_price_before_and_after(trace, trained, monkeypatch):
    monkeypatch.setattr(value, "evaluation_ms", lambda *given: 0.25)
    few, policy = (
        trace.select(np.arange(48) < 6),
        trained[0].with_settings(stride=2).price(COSTS, 0.2),
    )
    policy.trained_for = {"pair": "synthetic", "costs": "round numbers", "rate": 0.2}
    dear = round_costs(
        name="dear", verify=(4.0, 12.0, 200.0), expand=(0.75, 0.75), errors={"tree_frac": 0.01}
    )
    found = reprice(policy, few, dear)
    moved, tree = found.policy, best_static(few, dear, top_ks=[3])
    tree_ms = replay(few, Static.of(tree), dear).ms_per_tok
    times = [ms_per_tok(one, few, dear, 0.25) for one in (policy, moved)]
    nodes = [
        (f"verification of {n} nodes, ms", COSTS.verify_ms(n, 0), dear.verify_ms(n, 0))
        for n in SIZES
    ]
    names = ("first_evaluation", "stride", "continue_bonus_tok")
    expected = [
        ("priced for", "round numbers", "dear"),
        ("tokens per ms", 0.2, moved.rate),
        ("expansion, ms", 0.5, 0.75),
        *nodes,
        *((name, getattr(policy, name), getattr(moved, name)) for name in names),
        ("one evaluation here, ms", np.nan, 0.25),
        ("predicted here, ms per token", *times),
        (f"predicted here, over the static tree {tree.text}", *(tree_ms / time for time in times)),
    ]
    table = found.table
    assert list(table) == ["", "before", "after"] and table[""].tolist() == [
        row[0] for row in expected
    ]
    wanted = pd.DataFrame([row[1:] for row in expected], columns=["before", "after"])
    pd.testing.assert_frame_equal(table[["before", "after"]], wanted, check_dtype=False)
    assert found.uncertainty_frac == dear.uncertainty_frac > 0 and times[1] < times[0]
    assert moved.trained_for == {"pair": "synthetic", "costs": moved.priced_for, "rate": moved.rate}
    assert moved.priced_for == "dear"
    assert policy.trained_for["costs"] == policy.priced_for == "round numbers", (
        "the one that was given stays as it was"
    )
    pytest.raises(SpecdecError, reprice, Static(), few, dear).match("has no costs to replace")
