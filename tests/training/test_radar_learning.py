"""Training RADAR: exact distributions, the data set, the losses, learning a known optimum, and
exact resumption.
"""

import copy
import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.killed import killed_at
from fakes.traces import round_costs, synthetic_trace

from specdec import runs
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.profiles import profile
from specdec.errors import SpecdecError
from specdec.policies.base import load_policy
from specdec.policies.radar import CONFIGS, LstmNetwork, RadarConfig, RadarPolicy
from specdec.replays.replay import replay
from specdec.replays.trace import NEVER, Trace
from specdec.training import radar as radar_module
from specdec.training.radar import (
    RadarData,
    Rows,
    from_trace,
    latency_ms,
    returns_to_go,
    rows_of,
    train_radar,
    training_turns,
)

LATENCY = 70.67 + np.arange(8) * 2.684 + np.minimum(np.arange(8) + 1, 7) * 0.4  # RADAR's constants


def point_masses(lengths) -> np.ndarray:
    """Accepted lengths int [Q, 8] as distributions [Q, 8, 9]."""
    return np.eye(9)[lengths]


def two_kinds(rows=600, prompts=30, seed=0) -> RadarData:
    """Easy rows accept all that is drafted, hard ones nothing; the first state says which."""
    random = np.random.default_rng(seed)
    easy = random.random(rows) < 0.5
    scores = -np.sort(random.exponential(2.0, size=(rows, 8, 10)).astype(np.float32))
    scores[:, 0, 0] = np.where(easy, -0.05, -3.0)
    scores[:, 0, 1:] = -4.0
    distributions = point_masses(np.where(easy[:, None], np.arange(1, 9), 0))
    prompt = random.integers(prompts, size=rows)
    return RadarData(scores, distributions, prompt, np.full(rows, 50))


def graded(rows=2500, prompts=50, seed=0) -> RadarData:
    """Every row has its own acceptance probability per level, which its scores almost show."""
    random = np.random.default_rng(seed)
    p = random.beta(2, 2, size=rows)
    levels = -np.log(p)[:, None] * np.arange(1, 9)
    scores = -(levels[..., None] + random.exponential(0.3, size=(rows, 8, 10)).cumsum(-1))
    stops = np.arange(8)[:, None]
    lengths = np.arange(9)
    chain = np.where(lengths <= stops, (1 - p)[:, None, None], (lengths == stops + 1).astype(float))
    distributions = chain * p[:, None, None] ** lengths * (lengths <= stops + 1)
    return RadarData(scores, distributions, random.integers(prompts, size=rows), np.full(rows, 50))


def some_rows(count=5, seed=0) -> Rows:
    random = np.random.default_rng(seed)
    return rows_of(graded(count, 3, seed), LATENCY + random.random((count, 1)))


def test_data_are_split_by_prompts_or_by_cycles():
    data = two_kinds(300)
    train, held = data.split("prompt", seed=1)
    assert not set(data.prompts[train]) & set(data.prompts[held])
    assert sorted([*train, *held]) == list(range(300))
    assert len(np.unique(data.prompts[held])) == 6
    train, held = data.split("cycle")
    assert len(held) == 60 and set(data.prompts[train]) & set(data.prompts[held])


def toy_trace(positions=30, depth=8, temperature=0.0, lengths=None) -> Trace:
    """Two turns of trees of k = 10, their first tokens the 41st best or none of the best."""
    shape = dict(turns=2, positions=positions // 2, depth=depth, top_ks=(10,), most_nodes=240)
    trace = synthetic_trace(**shape)
    trace.context_tok[:] = np.arange(100, 100 + positions)
    trace.root_rank[:] = np.where(np.arange(positions) % 3 == 0, 40, NEVER)
    trace.header.update(pair="toy", temperature=temperature)
    trace.acceptance_distributions = lengths
    return trace


def test_rows_of_a_recording():
    trace = toy_trace(temperature=0.5)
    trace.header.update(key="k", other="not stored")
    data = from_trace(trace)
    assert data.prompts.tolist() == [0] * 15 + [1] * 15
    assert data.context_tok[3] == 103
    scores = trace.trees(10).scores
    ranks = trace.ranks[10]
    for row, a in itertools.product((0, 7, 29), range(8)):
        level = scores[row, :10] if a == 0 else scores[row, pool_size(a - 1, 10) : pool_size(a, 10)]
        np.testing.assert_array_equal(data.scores[row, a], sorted(level, reverse=True)[:10])
        assert data.expected[row, a] == sum(int(rank) < 59 for rank in ranks[row, a])
    assert data.expected.max() > 1
    assert data.header["key"] == "k" and "other" not in data.header
    flat = from_trace(trace, flat_nodes=59)
    # the 41st best first token, and none of the best
    assert flat.expected[3:5, 0].tolist() == [1, 0]
    assert flat.header["flat_nodes"] == 59
    small = from_trace(trace, tree=TreeConfig(8, 7, 10))
    assert small.expected[5].tolist() == (ranks[5, :8] < 7).sum(1).tolist()
    pytest.raises(SpecdecError, from_trace, toy_trace(positions=4, depth=6)).match("depth 7")


def test_rows_with_recorded_distributions():
    distributions = np.zeros((2, 8, 9), np.float32)
    none = np.array([0.4, 0.3, 0.35, 0.3, 0.5, 0.3, 0.45])
    distributions[:, 1:, 0] = none
    distributions[:, 1:, 1] = 1 - none
    distributions[:, 0, :2] = 0.1, 0.9  # the flat tree holds more first tokens than ten children
    trace = toy_trace(lengths=(np.array([21, 4]), distributions.copy()))
    data = from_trace(trace)
    assert data.context_tok.tolist() == [121, 104] and data.header["exact"]
    np.testing.assert_allclose(data.expected, [[0.7, *(1 - none)]] * 2, rtol=1e-6)
    np.testing.assert_allclose(from_trace(trace, flat_nodes=59).expected[:, 0], 0.9, rtol=1e-6)
    assert len(from_trace(trace, exact=False)) == 30
    assert (trace.acceptance_distributions[1] == distributions).all()
    # rounding errors are mended
    rough = data.distributions - np.float32(0.002) * (np.arange(9) == 0)
    mended = dataclasses.replace(data, distributions=rough).distributions
    assert mended.min() >= 0 and np.allclose(mended.sum(-1), 1, atol=1e-6)
    # of another tree none are recorded
    assert len(from_trace(trace, tree=TreeConfig(8, 7, 10))) == 30


def test_suites_are_chosen_by_their_names():
    trace = synthetic_trace(turns=8, positions=4)
    trace.turns["suite"] = ["laptop/easy", "hard"] * 4
    train = trace.select(part="train")
    assert training_turns(trace, ()).turns.equals(train.turns)
    assert set(training_turns(trace, ("easy", "other")).turns["suite"]) == {"laptop/easy"}
    with pytest.warns(UserWarning, match=r"no training prompt of \('none',\) was recorded"):
        assert training_turns(trace, ("none",)).turns.equals(train.turns)


def test_replay_does_what_the_data_say():
    trace = synthetic_trace(turns=4, positions=30, depth=8, top_ks=(10,), most_nodes=60)
    data = from_trace(trace)
    torch.manual_seed(0)
    network = radar_module.RadarNetwork().eval()
    with torch.no_grad():  # half of the first decisions stop, half continue
        logits = network(torch.from_numpy(data.scores[:, :1]))
        network.mlp[3].bias[0] += (logits[..., 1] - logits[..., 0]).median()
    policy = RadarPolicy()
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    policy.network = LstmNetwork(weights)
    latency = latency_ms(round_costs(), data.context_tok)
    probs = radar_module.stop_probs(network, rows_of(data, latency), greedy=True)
    stops = probs.argmax(1).numpy()
    assert 0.3 < (stops > 0).mean() < 0.7
    turns = replay(trace, policy, round_costs(), keep_cycles=True).rows
    for cycles, row in zip(turns, trace.turns["first"].tolist(), strict=True):
        for cycle in cycles:
            assert cycle.expansions == stops[row]
            assert cycle.accepted_tok == data.expected[row, stops[row]]
            assert cycle.total_ms == pytest.approx(latency[row, stops[row]])
            row += cycle.new_tok


def test_returns_by_hand():
    stops = torch.arange(8)
    final = stops + 0.5
    for gamma, a, j in itertools.product((1.0, 0.9), range(8), range(7)):
        penalty = 0.02 * sum(gamma ** (i - j) for i in range(j, a))
        expected = gamma ** (a - j) * float(final[a]) - penalty if j <= a else 0.0
        returns = returns_to_go(stops, final, 0.02, gamma)
        assert float(returns[a, j]) == pytest.approx(expected, abs=1e-6)


def test_the_bound_is_the_best_of_all_choices():
    random = np.random.default_rng(3)
    lengths = np.minimum(random.integers(0, 9, size=(4, 8)), np.arange(1, 9))
    distributions = point_masses(lengths)
    data = RadarData(-np.ones((4, 8, 10)), distributions, np.arange(4), np.zeros(4))
    best = 0.0
    for stops in itertools.product(range(8), repeat=4):
        new_tok = sum(lengths[row, a] + 1 for row, a in enumerate(stops))
        best = max(best, new_tok / sum(LATENCY[a] for a in stops))
    rows = rows_of(data, np.tile(LATENCY, (4, 1)))
    assert radar_module.clairvoyant_rate(rows) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("objective", ["ratio", "lagrangian"])
def test_reinforce_estimates_the_exact_gradient(objective):
    settings = RadarConfig(objective=objective, gradient="exact", gamma=1.0, alpha=0.05)
    random = np.random.default_rng(0)
    copies = 60_000
    lengths = [np.pad(random.dirichlet(np.ones(a + 2)), (0, 7 - a)) for a in range(8)]
    data = RadarData(-np.ones((1, 8, 10)), np.stack(lengths)[None], [0], [0])
    rows = rows_of(data, LATENCY[None])
    logits = torch.randn(1, 7, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = radar_module.loss_of(settings, logits, rows, 0.03, 3.0)
    exact = torch.autograd.grad(loss, logits)[0] / 7
    many = rows.at(torch.zeros(copies, dtype=torch.long))
    sampled = dataclasses.replace(settings, gradient="sampled")
    torch.manual_seed(0)
    each = logits.expand(copies, 7, 2).detach().clone().requires_grad_()
    loss = radar_module.loss_of(sampled, each, many, 0.03, 3.0)
    grads = torch.autograd.grad(loss, each)[0] * copies
    error = grads.std(0) / copies**0.5
    assert ((grads.mean(0) - exact[0]).abs() <= 4.5 * error + 1e-7).all()
    assert (exact.abs() > 10 * error).any()  # the test could see a difference


def test_losses_by_their_definition():
    rows = some_rows()
    logits = torch.randn(5, 7, 2, generator=torch.Generator().manual_seed(3))
    config = RadarConfig(gradient="exact", gamma=0.9, alpha=0.2)
    probs = logits.double().softmax(-1).numpy()
    exact = []
    advantage = []
    for row in range(5):
        final = 30.0 * rows.expected[row].numpy() / rows.latency_ms[row].numpy()
        returns = [0.9**a * final[a] - 0.2 * sum(0.9**i for i in range(a)) for a in range(8)]
        alive = 1.0
        expected = 0.0
        for a in range(7):
            expected += alive * probs[row, a, 0] * returns[a]
            alive *= probs[row, a, 1]
        exact.append(expected + alive * returns[7])
        value = returns[7]
        cost = 0.0
        for a in range(6, -1, -1):
            gain = value - returns[a]
            cost -= abs(gain) * np.log(probs[row, a, int(gain > 0)])
            value = value if probs[row, a, 1] > 0.5 else returns[a]
        advantage.append(cost)
    loss = radar_module.loss_of(config, logits, rows, 0.05, 3.0)
    assert float(loss) == pytest.approx(-np.mean(exact), rel=1e-4)
    pushed = dataclasses.replace(config, gradient="advantage")
    loss = radar_module.loss_of(pushed, logits, rows, 0.05, 3.0)
    assert float(loss) == pytest.approx(np.mean(advantage), rel=1e-4)


def test_latencies_by_hand():
    costs = profile("radar-rtx3090-llama-3.1-8b")
    flat = latency_ms(costs, [10, 900], flat_nodes=59)
    np.testing.assert_allclose(flat, np.tile(LATENCY, (2, 1)))
    tree = TreeConfig(16, 7, 2)
    costs = round_costs(question_ms=0.125, policy_ms={"radar": 0.5, "ltd": 9.0})
    nodes = np.array([2, 6, 10, 14, 15, 15, 15, 15])
    verify = np.where(nodes <= 10, 4 + nodes / 10, 5 + (nodes - 10) * 0.1)
    free = 1.25 + 0.5 * np.arange(8) + verify
    asked = free + np.minimum(np.arange(8) + 1, 7) * 0.625
    assert latency_ms(costs, [3, 900], tree=tree)[1] == pytest.approx(asked)
    assert latency_ms(round_costs(), [3], tree=tree)[0] == pytest.approx(free)


SHORT = dataclasses.replace(CONFIGS["ours"], epochs=4, batch=16)


def test_ours_learns_the_known_optimum(tmp_path):
    data = two_kinds()
    trained = train_radar(data, LATENCY, SHORT, out_dir=tmp_path, trained_for={"pair": "toy"})
    held = data.split("prompt")[1]
    easy = data.expected[held, 7] == 8
    best = (easy * 9 + ~easy).sum() / np.where(easy, LATENCY[7], LATENCY[0]).sum()
    assert trained.results["known_lengths_tok_per_ms"] == pytest.approx(best, rel=1e-6)
    assert trained.results["tok_per_ms"] == pytest.approx(best, rel=0.01)
    assert trained.results["gain_frac"] > 0.05
    assert load_policy(tmp_path / "policy").trained_for["pair"] == "toy"


@pytest.mark.parametrize("preset", ["official", "ours"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, monkeypatch, preset):
    def run(name, latency=LATENCY):
        return train_radar(two_kinds(240), latency, settings, seed=5, out_dir=tmp_path / name)

    settings = dataclasses.replace(CONFIGS[preset], epochs=4, batch=16)
    straight = run("straight")
    with killed_at(radar_module, "loss_of", 31):  # inside the third epoch
        run("killed")
    torch.manual_seed(123)  # what else happens in the process must not matter
    resumed = run("killed")
    for name, value in straight.policy.network.arrays().items():
        np.testing.assert_array_equal(resumed.policy.network.arrays()[name], value)
    curves = [trained.curve.drop(columns="elapsed_s") for trained in (straight, resumed)]
    pd.testing.assert_frame_equal(*curves)
    assert len(straight.curve) == 4 and straight.results == resumed.results
    monkeypatch.setattr(radar_module, "loss_of", None)  # a finished run trains no more
    assert run("killed").results == straight.results
    pytest.raises(SpecdecError, run, "killed", LATENCY * 2).match("other settings")


def test_times_that_do_not_grow_are_refused(tmp_path):
    times = LATENCY[::-1]
    refused = pytest.raises(SpecdecError, train_radar, two_kinds(40), times, out_dir=tmp_path)
    refused.match("grow")


def by_definition(network, rows: Rows, greedy: bool) -> np.ndarray:
    """P(stop = a) [Q, 8] where the likelier action is taken, or one is drawn."""
    with torch.no_grad():
        probs = network.eval()(rows.scores).double().softmax(-1).numpy()
    stops = []
    for stop in probs:
        alive = 1.0
        row = []
        for a in range(7):
            share = float(stop[a, 0] >= stop[a, 1]) if greedy else stop[a, 0]
            row.append(alive * share)
            alive *= 1 - share
        stops.append([*row, alive])
    return np.array(stops)


def rate_of(probs: np.ndarray, rows: Rows) -> float:
    return (probs * (rows.expected.numpy() + 1)).sum() / (probs * rows.latency_ms.numpy()).sum()


def mixed_trainer(**changes):
    """A trainer whose fresh network stops at once in half of the rows."""
    config = dataclasses.replace(SHORT, continue_bias=0.5, **changes)
    trainer = radar_module._Trainer(config, some_rows(40), some_rows(30, seed=1), 4)
    with torch.no_grad():
        logits = trainer.network.eval()(trainer.train.scores[:, :1])
        trainer.network.mlp[3].bias[0] += (logits[..., 1] - logits[..., 0]).median()
    return trainer


def test_the_learning_rate_falls_as_a_cosine():
    trainer = mixed_trainer(learning_rate=1e-5)
    factors = [trainer.rate_factor(epoch, 8) for epoch in (0, 2, 4, 8)]
    assert factors == pytest.approx([1.0, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1])


def test_an_epoch_is_judged_on_held_out_rows():
    trainer = mixed_trainer(gradient="exact", gamma=0.99)
    held = trainer.held_out
    calls = np.arange(1, 9)
    with torch.no_grad():
        logits = trainer.network(held.scores)
        loss = radar_module.loss_of(trainer.config, logits, held, 0.07, trainer.step_ms)
    assert trainer._held_out_loss(0.07) == pytest.approx(float(loss), rel=1e-5)
    row = trainer.epoch(0, 1.0)
    probs = by_definition(trainer.network, held, greedy=True)
    assert row["tok_per_ms"] == pytest.approx(rate_of(probs, held), rel=1e-5)
    assert row["draft_calls"] == pytest.approx((probs @ calls).mean(), rel=1e-5)
    rates = [rate_of(np.eye(8)[[a] * 40], trainer.train) for a in range(8)]
    assert trainer.constant == int(np.argmax(rates))
    assert trainer.constant_rate == pytest.approx(max(rates), rel=1e-6)
    assert trainer.step_ms == pytest.approx((LATENCY[6] - LATENCY[0]) / 6, rel=1e-5)


def test_a_policy_is_judged_beside_a_constant():
    trainer = mixed_trainer(temperature=1.0)
    trainer.best.consider(trainer.network.state_dict(), 1.0, 3)
    held = trainer.held_out
    probs = by_definition(trainer.network, held, greedy=False)
    rate = rate_of(probs, held)
    constant = rate_of(np.eye(8)[[trainer.constant] * 30], held)
    shares = probs.mean(0)
    assert trainer.judge() == {
        "tok_per_ms": pytest.approx(rate, rel=1e-5),
        "constant_tok_per_ms": pytest.approx(constant, rel=1e-6),
        "gain_frac": pytest.approx(rate / constant - 1, rel=1e-3),
        "known_lengths_tok_per_ms": radar_module.clairvoyant_rate(held),
        "draft_calls": pytest.approx((shares * np.arange(1, 9)).sum(), rel=1e-5),
        "most_common_frac": pytest.approx(shares.max(), rel=1e-5),
    }


@pytest.mark.parametrize(
    "change, kept",
    [
        ({"select_by": "surrogate"}, 2),
        ({"select_by": "throughput", "temperature": None}, 1),
        ({"select_by": "throughput", "temperature": 1.0}, 0),
    ],
)
def test_the_best_epoch_is_kept(monkeypatch, change, kept):
    # the last is no better
    rows = [(5.0, 1.0, 3.0), (4.0, 2.0, 2.0), (3.0, 1.5, 1.0), (3.0, 2.0, 3.0)]
    trainer = mixed_trainer(**change)
    weights = []

    def probs_of(network, batch, greedy):
        return torch.full((len(batch.scores), 8), float(greedy))

    def rates(probs, batch):
        return rows[len(weights)][1 if probs.max() > 0 else 2]

    monkeypatch.setattr(trainer, "_held_out_loss", lambda rate: rows[len(weights)][0])
    for number in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(radar_module, "stop_probs", probs_of)
            patch.setattr(radar_module, "throughput", rates)
            trainer.epoch(number, 1.0)
        weights.append(copy.deepcopy(trainer.network.state_dict()))
    assert trainer.best.step == kept
    for name, value in trainer.best.weights.items():
        assert torch.equal(value, weights[kept][name])


@pytest.mark.parametrize("objective", ["lagrangian", "ratio"])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_value_of_time(objective, at_once, monkeypatch):
    monkeypatch.setattr(radar_module, "DROPOUT", 0.0)
    trainer = mixed_trainer(objective=objective, learning_rate=1e-30, batch=64)
    if at_once:
        with torch.no_grad():
            trainer.network.mlp[3].bias.copy_(torch.tensor([99.0, 0.0]))
    rate = trainer.constant_rate
    if objective == "lagrangian":
        probs = by_definition(trainer.network, trainer.train, greedy=True)
        rate = max(rate, rate_of(probs, trainer.train))
    row = trainer.epoch(0, 1.0)
    assert row["rate_per_ms"] == pytest.approx(rate, rel=1e-6)
    logits = trainer.network(trainer.train.scores)
    loss = radar_module.loss_of(trainer.config, logits, trainer.train, rate, trainer.step_ms)
    assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_run_notes_its_settings_and_results(tmp_path):
    data = dataclasses.replace(two_kinds(200), header={"pair": "made up", "flat_nodes": 59})
    config = dataclasses.replace(CONFIGS["ours"], epochs=2, batch=64, flat_nodes=59)
    options = dict(seed=6, out_dir=tmp_path, trained_for={"pair": "toy"})
    trained = train_radar(data, LATENCY, config, **options)
    policy = load_policy(tmp_path / "policy")
    choice = {"choice": "weights and epoch", "part": "train"}
    choice["value"] = "recipe 'ours', chosen before"
    training = runs.plain(config)
    facts = {"seed": 6, "data": data.header, "training": training, "pair": "toy"}
    assert policy.trained_for == {**facts, "deviations": [], "choices": [choice]}
    assert policy.seed == 6 and policy.flat_nodes == 59
    plan = runs.read_json(tmp_path / "plan.json")
    assert plan["results"] == trained.results
    assert pd.read_parquet(tmp_path / "loss.parquet").equals(trained.curve)


def test_a_recording_is_learned(tmp_path):
    trace = synthetic_trace(turns=8, positions=10, depth=8, top_ks=(10,), most_nodes=60)
    changes = dict(epochs=1, prompts=("hard",), flat_nodes=59, split_by="cycle")
    config = dataclasses.replace(CONFIGS["ours"], **changes)
    costs = round_costs(name="mine")
    recorded = train_radar(trace, costs, config, out_dir=tmp_path / "recorded")
    hard = trace.select((trace.turns["suite"] == "hard") & (trace.turns["part"] == "train"))
    data = from_trace(hard, flat_nodes=59)
    latency = latency_ms(costs, data.context_tok, 59)
    facts = {"pair": "synthetic", "costs": "mine"}
    same = train_radar(data, latency, config, out_dir=tmp_path / "rows", trained_for=facts)
    assert recorded.policy.trained_for == same.policy.trained_for
    assert recorded.results == same.results and len(data) == 20
