"""Training RADAR: exact distributions, the data set, both losses, learning a known optimum, and
exact resumption.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.killed import killed_at
from fakes.traces import round_costs, synthetic_trace

from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.profiles import profile
from specdec.errors import SpecdecError
from specdec.policies.base import load_policy
from specdec.policies.radar import CONFIGS, SHAPES, LstmNetwork, RadarConfig, RadarPolicy
from specdec.replays.replay import replay
from specdec.replays.trace import NEVER, Trace
from specdec.training import radar as radar_module
from specdec.training.radar import (
    RadarData,
    Rows,
    from_trace,
    latency_ms,
    returns_to_go,
    train_radar,
    training_turns,
)

LATENCY = 70.67 + np.arange(8) * 2.684 + np.minimum(np.arange(8) + 1, 7) * 0.4  # RADAR's constants


def two_kinds(rows=600, prompts=30, seed=0) -> RadarData:
    """Easy rows accept all that is drafted, hard ones nothing; the first state tells which, and
    that is all there is.
    """
    random = np.random.default_rng(seed)
    easy = random.random(rows) < 0.5
    scores = -np.sort(random.exponential(2.0, size=(rows, 8, 10)).astype(np.float32))
    scores[:, 0, 0] = np.where(easy, -0.05, -3.0)
    scores[:, 0, 1:] = -4.0
    lengths = np.where(easy[:, None], np.arange(1, 9), 0)
    return RadarData(
        scores,
        radar_module.point_masses(lengths),
        random.integers(prompts, size=rows),
        np.full(rows, 50),
    )


def graded(rows=2500, prompts=50, seed=0) -> RadarData:
    """Every row has its own acceptance probability per level, which its scores show almost
    plainly.
    """
    random = np.random.default_rng(seed)
    p = random.beta(2, 2, size=rows)
    levels = -np.log(p)[:, None] * np.arange(1, 9)
    scores = -(levels[..., None] + random.exponential(0.3, size=(rows, 8, 10)).cumsum(-1))
    stops = np.arange(8)[:, None]
    lengths = np.arange(9)
    chain = np.where(lengths <= stops, (1 - p)[:, None, None], (lengths == stops + 1).astype(float))
    distributions = chain * p[:, None, None] ** lengths * (lengths <= stops + 1)
    return RadarData(scores, distributions, random.integers(prompts, size=rows), np.full(rows, 50))


def test_data_are_mended_or_refused_and_split_by_whole_prompts():
    data = two_kinds(20)
    assert data.select(range(20)).key == data.key and len(data) == 20
    assert data.select([0, 1]).key != data.select([1, 0]).key
    rough = data.distributions.copy()
    rough[:, :, 0] -= 0.002
    mended = dataclasses.replace(data, distributions=rough).distributions
    assert mended.min() >= 0 and np.allclose(mended.sum(-1), 1, atol=1e-6)
    late = np.roll(data.distributions, 1, axis=1)  # stop 0 gets the lengths of stop 7
    rising = data.scores[..., ::-1].copy()
    for change, match in (
        ({"distributions": late}, "at most a \\+ 1"),
        ({"distributions": data.distributions * 1.1}, "sum to 1"),
        ({"scores": rising}, "descending"),
        ({"scores": data.scores - np.inf}, "finite"),
        ({"scores": data.scores[:, :7]}, "shape"),
        ({"prompts": data.prompts[:5]}, "shape"),
    ):
        pytest.raises(AssertionError, dataclasses.replace, data, **change).match(match)
    data = two_kinds(300)
    train, held = data.split("prompt", seed=1)
    assert not set(data.prompts[train]) & set(data.prompts[held])
    assert sorted([*train, *held]) == list(range(300)) and len(np.unique(data.prompts[held])) == 6
    train, held = data.split("cycle")
    assert len(held) == 60 and set(data.prompts[train]) & set(data.prompts[held])
    pytest.raises(SpecdecError, data.select(data.prompts == 0).split).match("empty")
    default, zero, one = data.split(), data.split("prompt", 0), data.split(seed=1)
    assert default[1].tolist() == zero[1].tolist() != one[1].tolist()


def toy_trace(positions=30, depth=8, temperature=0.0, lengths=None) -> Trace:
    """Two turns of trees of k = 10, their first tokens the 41st best or none of the best."""
    trace = synthetic_trace(
        turns=2, positions=positions // 2, depth=depth, top_ks=(10,), most_nodes=240
    )
    trace.context_tok[:] = np.arange(100, 100 + positions)
    trace.root_rank[:] = np.where(np.arange(positions) % 3 == 0, 40, NEVER)
    trace.header.update(pair="toy", temperature=temperature)
    trace.acceptance_distributions = lengths
    return trace


def test_rows_of_recordings_their_origin_and_the_suites_that_are_meant():
    trace = toy_trace()
    data = from_trace(trace)
    assert (
        len(data) == 30
        and data.prompts.tolist() == [0] * 15 + [1] * 15
        and data.context_tok[3] == 103
    )
    scores, ranks = trace.trees(10).scores, trace.ranks[10]
    for row, a in itertools.product((0, 7, 29), range(8)):
        level = scores[row, :10] if a == 0 else scores[row, pool_size(a - 1, 10) : pool_size(a, 10)]
        np.testing.assert_array_equal(data.scores[row, a], sorted(level, reverse=True)[:10])
        accepted = sum(int(rank) < 59 for rank in ranks[row, a])
        assert data.expected[row, a] == accepted
    assert data.expected.max() > 1
    flat = from_trace(trace, flat_nodes=59)
    assert flat.expected[3:5, 0].tolist() == [
        1,
        0,
    ]  # the 41st best first token, and none of the best
    pytest.raises(SpecdecError, from_trace, trace, exact=True).match("exact=False")
    pytest.raises(SpecdecError, from_trace, toy_trace(positions=4, depth=6)).match("depth 7")
    distributions, none = (
        np.zeros((2, 8, 9), np.float32),
        np.array([0.4, 0.3, 0.35, 0.3, 0.5, 0.3, 0.45]),
    )
    distributions[:, 1:, 0], distributions[:, 1:, 1] = none, 1 - none
    distributions[:, 0, :2] = 0.1, 0.9  # the flat tree holds more first tokens than ten children
    trace = toy_trace(lengths=(np.array([21, 4]), distributions.copy()))
    data = from_trace(trace)
    assert data.context_tok.tolist() == [121, 104] and data.header["exact"]
    np.testing.assert_allclose(data.expected, [[0.7, *(1 - none)]] * 2, rtol=1e-6)
    np.testing.assert_allclose(from_trace(trace, flat_nodes=59).expected[:, 0], 0.9, rtol=1e-6)
    assert (
        len(from_trace(trace, exact=False)) == 30
        and (trace.acceptance_distributions[1] == distributions).all()
    )
    trace = toy_trace(temperature=0.5)
    trace.header.update(key="k", pair_key="p", dtype="float32", seed=3, other="not told")
    told = {
        "key": "k",
        "pair": "toy",
        "pair_key": "p",
        "dtype": "float32",
        "temperature": 0.5,
        "seed": 3,
    }
    data = from_trace(trace)
    assert data.header == told | {"flat_nodes": None, "exact": False}
    assert from_trace(trace, flat_nodes=59).header["flat_nodes"] == 59
    some = data.select([4, 2])
    assert (
        some.header == data.header
        and some.context_tok.tolist() == [104, 102]
        and some.prompts.tolist() == [0, 0]
    )
    arrays = [getattr(data, name) for name in ("scores", "distributions", "prompts", "context_tok")]
    assert [str(array.dtype) for array in arrays] == ["float32"] * 2 + ["int32"] * 2
    assert all(array.flags.c_contiguous for array in arrays)
    small = from_trace(trace, tree=TreeConfig(8, 7, 10))
    ranks = trace.ranks[10]
    assert [small.expected[5, a] for a in range(8)] == [
        sum(int(rank) < 7 for rank in ranks[5, a]) for a in range(8)
    ]
    pytest.raises(SpecdecError, from_trace, trace, flat_nodes=10).match("flat_nodes None or 59")
    distributions = np.tile(np.eye(9, dtype=np.float32)[0], (2, 8, 1))
    known = toy_trace(lengths=(np.array([21, 4]), distributions))
    other = TreeConfig(8, 7, 10)
    pytest.raises(SpecdecError, from_trace, known, exact=True, tree=other).match(
        "exact=False for other trees"
    )
    assert len(from_trace(known, tree=other)) == 30, "of another tree every position, drawn"
    trace = synthetic_trace(turns=8, positions=4)
    trace.turns["suite"] = ["laptop/easy", "hard"] * 4
    train = trace.select(part="train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert training_turns(trace, ()).turns["suite"].tolist() == train.turns["suite"].tolist()
        assert set(training_turns(trace, ("easy", "other")).turns["suite"]) == {"laptop/easy"}
        assert set(training_turns(trace, ("hard",)).turns["suite"]) == {"hard"}
    with pytest.warns(UserWarning, match=r"no training prompt of \('none',\) was recorded"):
        every = training_turns(trace, ("none",))
    assert every.turns.equals(train.turns) and set(every.turns["part"]) == {"train"}


def test_replay_does_what_the_data_say():
    trace = synthetic_trace(turns=4, positions=30, depth=8, top_ks=(10,), most_nodes=60)
    data = from_trace(trace)
    torch.manual_seed(0)
    network = radar_module.RadarNetwork().eval()
    with torch.no_grad():  # half of the first decisions stop, half go on
        logits = network(torch.from_numpy(data.scores[:, :1]))
        network.mlp[3].bias[0] += (logits[..., 1] - logits[..., 0]).median()
    policy = RadarPolicy()
    policy.network = LstmNetwork(
        {name: value.numpy() for name, value in network.state_dict().items()}
    )
    latency = latency_ms(round_costs(), data.context_tok)
    stops = radar_module.stop_probs(network, Rows.of(data, latency), greedy=True).argmax(1).numpy()
    assert 0.3 < (stops > 0).mean() < 0.7
    lived = replay(trace, policy, round_costs(), keep_cycles=True).rows
    for rows, row in zip(lived, trace.turns["first"].tolist(), strict=True):
        for cycle in rows:
            assert (cycle.expansions, cycle.accepted_tok) == (
                stops[row],
                data.expected[row, stops[row]],
            )
            assert cycle.total_ms == pytest.approx(latency[row, stops[row]])
            row += cycle.new_tok


def test_returns_rewards_rates_fresh_networks_and_the_best_of_all_choices_by_hand():
    stops, final, alpha = torch.arange(8), torch.arange(8) + 0.5, 0.02
    for gamma, a, j in itertools.product((1.0, 0.9), range(8), range(7)):
        expected = -alpha * sum(gamma ** (i - j) for i in range(j, a)) + gamma ** (a - j) * float(
            final[a]
        )
        found = returns_to_go(stops, final, alpha, gamma)[a, j]
        assert float(found) == pytest.approx(expected if j <= a else 0.0, abs=1e-6)
    random = np.random.default_rng(3)
    lengths = np.minimum(random.integers(0, 9, size=(4, 8)), np.arange(1, 9))
    data = RadarData(
        -np.ones((4, 8, 10)), radar_module.point_masses(lengths), np.arange(4), np.zeros(4)
    )
    rows = Rows.of(data, np.tile(LATENCY, (4, 1)))
    best = max(
        sum(lengths[i, a] + 1 for i, a in enumerate(stops)) / sum(LATENCY[a] for a in stops)
        for stops in itertools.product(range(8), repeat=4)
    )
    assert radar_module.clairvoyant_rate(rows) == pytest.approx(best, rel=1e-6)
    config = RadarConfig(learning_rate=1e-5)
    factors = [radar_module.rate_factor(config, epoch, 8) for epoch in (0, 2, 4, 8)]
    assert factors == pytest.approx([1.0, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1])
    lengths, latency = torch.tensor([0.0, 3.0]), torch.tensor([10.0, 20.0])
    ratio = RadarConfig()
    assert radar_module.final_rewards(ratio, lengths, latency, 9.0, 2.0).tolist() == pytest.approx(
        [0.0, 20 * 3 / 20]
    )
    bonus = dataclasses.replace(ratio, count_bonus=True)
    assert radar_module.final_rewards(bonus, lengths, latency, 9.0, 2.0).tolist() == pytest.approx(
        [2.0, 20 * 4 / 20]
    )
    priced = dataclasses.replace(bonus, objective="lagrangian")
    assert radar_module.final_rewards(priced, lengths, latency, 0.1, 2.0).tolist() == pytest.approx(
        [0.0, 2.0]
    )
    torch.manual_seed(0)
    plain = radar_module.RadarNetwork()
    assert {name: tuple(weight.shape) for name, weight in plain.state_dict().items()} == SHAPES
    torch.manual_seed(0)
    eager = radar_module.RadarNetwork(continue_bias=2.0)
    assert plain.mlp[2].p == 0.1 and (eager.mlp[3].bias - plain.mlp[3].bias).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("objective", ["ratio", "lagrangian"])
def test_reinforce_estimates_the_exact_gradient(objective):
    settings = RadarConfig(objective=objective, gradient="exact", gamma=1.0, alpha=0.05)
    random, copies = np.random.default_rng(0), 60_000
    distribution = np.stack(
        [np.pad(random.dirichlet(np.ones(a + 2)), (0, 7 - a)) for a in range(8)]
    )
    data = RadarData(-np.ones((1, 8, 10)), distribution[None], [0], [0])
    rows = Rows.of(data, LATENCY[None])
    logits = torch.randn(1, 7, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = radar_module.loss_of(settings, logits, rows, 0.03, 3.0)
    exact = torch.autograd.grad(loss, logits)[0] / 7
    many = rows[torch.zeros(copies, dtype=torch.long)]
    sampled = dataclasses.replace(settings, gradient="sampled")
    torch.manual_seed(0)
    each = logits.expand(copies, 7, 2).detach().clone().requires_grad_()
    grads = (
        torch.autograd.grad(radar_module.loss_of(sampled, each, many, 0.03, 3.0), each)[0] * copies
    )
    error = grads.std(0) / copies**0.5
    assert ((grads.mean(0) - exact[0]).abs() <= 4.5 * error + 1e-7).all()
    assert (exact.abs() > 10 * error).any()  # the test could see a difference


SHORT = dataclasses.replace(CONFIGS["ours"], epochs=4, batch=16)


@pytest.mark.parametrize("change", [{}, {"gradient": "exact", "entropy": 0.3}])
def test_ours_learns_the_known_optimum(tmp_path, change):
    data, settings = two_kinds(), dataclasses.replace(SHORT, **change)
    found = train_radar(data, LATENCY, settings, out_dir=tmp_path, trained_for={"pair": "toy"})
    held = data.split("prompt")[1]
    easy = data.expected[held, 7] == 8
    best = (easy * 9 + ~easy).sum() / np.where(easy, LATENCY[7], LATENCY[0]).sum()
    assert found.results["known_lengths_tok_per_ms"] == pytest.approx(best, rel=1e-6)
    assert found.results["tok_per_ms"] == pytest.approx(best, rel=0.01)
    assert found.results["gain_frac"] > 0.05
    policy = load_policy(tmp_path / "policy")
    assert policy.trained_for["pair"] == "toy"
    for row in held[:20]:  # the policy on disk does what was judged
        memory, stops = None, []
        for n in range(7):
            logits, memory = policy.network.step(data.scores[row, n], memory)
            stops.append(logits[0] >= logits[1])
        assert not any(stops) if data.expected[row, 7] == 8 else stops[0]


def test_reinforce_learns_as_well_and_a_constant_is_reported(tmp_path):
    settings = RadarConfig(
        alpha=0.03, learning_rate=1e-3, epochs=8, batch=32, select_by="throughput"
    )
    found = train_radar(graded(), LATENCY, settings, out_dir=tmp_path)
    assert found.results["gain_frac"] > 0.02
    assert (
        0.2
        > found.results["known_lengths_tok_per_ms"] / found.results["constant_tok_per_ms"] - 1
        > 0.05
    )
    assert (
        found.policy.temperature == 1.0
        and found.results["tok_per_ms"] > found.curve["tok_per_ms_drawn"].iloc[0]
    )
    with pytest.warns(UserWarning, match="collapsed to a constant"):
        settings = dataclasses.replace(SHORT, epochs=1, learning_rate=1e-6, continue_bias=9.0)
        found = train_radar(two_kinds(), LATENCY, settings, out_dir=tmp_path / "constant")
    assert found.results["most_common_stop"] == 7


@pytest.mark.parametrize("preset", ["official", "ours"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, monkeypatch, preset):
    def run(name, latency=LATENCY):
        return train_radar(two_kinds(240), latency, settings, seed=5, out_dir=tmp_path / name)

    settings = dataclasses.replace(CONFIGS[preset], epochs=4, batch=16)
    whole = run("whole")
    with killed_at(radar_module, "loss_of", 31):  # inside the third epoch
        run("killed")
    torch.manual_seed(123)  # what else happens in the process must not matter
    resumed = run("killed")
    for name, value in whole.policy.network.arrays().items():
        np.testing.assert_array_equal(resumed.policy.network.arrays()[name], value)
    pd.testing.assert_frame_equal(
        whole.curve.drop(columns="elapsed_s"), resumed.curve.drop(columns="elapsed_s")
    )
    assert len(whole.curve) == 4 and whole.results == resumed.results
    monkeypatch.setattr(radar_module, "loss_of", None)  # a finished run trains no more
    assert run("killed").results == whole.results
    pytest.raises(SpecdecError, run, "killed", LATENCY * 2).match("other settings")


def test_impossible_settings_latencies_and_presets_are_refused(tmp_path):
    data, wrong = two_kinds(40), {"gamma": 0.0, "epochs": 0, "select_by": "loss"}
    for name, value in wrong.items():
        pytest.raises((SpecdecError, AssertionError), RadarConfig, **{name: value}).match(name)
    pytest.raises(SpecdecError, RadarConfig, objective="ration").match("did you mean 'ratio'")
    for latency, match in ((LATENCY[::-1], "grow"), (LATENCY - 72, "above 0")):
        pytest.raises(SpecdecError, train_radar, data, latency, SHORT, out_dir=tmp_path).match(
            match
        )
    pytest.raises(SpecdecError, train_radar, data, LATENCY, "our", out_dir=tmp_path).match("ours")


def test_latencies_and_losses_by_their_definition():
    costs = profile("radar-rtx3090-llama-3.1-8b")
    np.testing.assert_allclose(
        latency_ms(costs, [10, 900], flat_nodes=59), np.tile(LATENCY, (2, 1))
    )
    tree, costs = (
        TreeConfig(16, 7, 2),
        round_costs(question_ms=0.125, policy_ms={"radar": 0.5, "ltd": 9.0}),
    )
    nodes = np.array([2, 6, 10, 14, 15, 15, 15, 15])
    verify = np.where(nodes <= 10, 4 + nodes / 10, 5 + (nodes - 10) * 0.1)
    expected = 1.25 + 0.5 * np.arange(8) + verify + np.minimum(np.arange(8) + 1, 7) * 0.625
    found = latency_ms(costs, [3, 900], tree=tree)
    assert (
        found.shape == (2, 8)
        and found[0] == pytest.approx(expected)
        and found[1] == pytest.approx(expected)
    )
    free = latency_ms(round_costs(), [3], tree=tree)[0]
    assert free == pytest.approx(1.25 + 0.5 * np.arange(8) + verify)
    assert latency_ms(round_costs(), [3])[0][0] == pytest.approx(1.25 + 5.0), "ten children"
    assert latency_ms(round_costs(), [3], 59)[0][0] == pytest.approx(1.25 + 5 + 4.9), "a flat tree"
    rows, rate, step_ms = some_rows(), 0.05, 3.0
    logits = torch.randn(5, 7, 2, generator=torch.Generator().manual_seed(3))
    config = RadarConfig(gradient="exact", gamma=0.9, alpha=0.2, entropy=0.5)
    probs = logits.double().softmax(-1).numpy()
    exact, advantage = [], []
    for row in range(5):
        final = 10.0 * step_ms * rows.expected[row].numpy() / rows.latency_ms[row].numpy()
        returns = [0.9**a * final[a] - 0.2 * sum(0.9**i for i in range(a)) for a in range(8)]
        alive, expected = 1.0, 0.0
        for a in range(7):
            expected += alive * probs[row, a, 0] * returns[a]
            alive *= probs[row, a, 1]
        entropy = -(probs[row] * np.log(probs[row])).sum()
        exact.append(expected + alive * returns[7] + 0.5 * 0.25 * entropy)
        value, cost = returns[7], 0.0
        for a in range(6, -1, -1):
            gain = value - returns[a]
            right = probs[row, a, 1 if gain > 0 else 0]
            cost -= abs(gain) * np.log(right)
            value = value if probs[row, a, 1] > 0.5 else returns[a]
        advantage.append(cost)
    loss = radar_module.loss_of(config, logits, rows, rate, step_ms, 0.25)
    assert float(loss) == pytest.approx(-np.mean(exact), rel=1e-4)
    pulled = radar_module.loss_of(
        dataclasses.replace(config, gradient="advantage"), logits, rows, rate, step_ms
    )
    assert float(pulled) == pytest.approx(np.mean(advantage), rel=1e-4)
    full = float(radar_module.loss_of(config, logits, rows, rate, step_ms))
    assert full < float(loss), "the entropy bonus counts whole where no factor is given"


def some_rows(count=5, seed=0) -> Rows:
    random = np.random.default_rng(seed)
    data = graded(count, 3, seed)
    return Rows.of(data, LATENCY + random.random((count, 1)))


def by_definition(network, rows: Rows) -> dict[bool, np.ndarray]:
    """P(stop = a) [Q, 8] by whether the likelier action is taken (True) or one is drawn."""
    with torch.no_grad():
        probs = network.eval()(rows.scores).double().softmax(-1).numpy()
    greedy = [next((a for a in range(7) if stop[a, 0] >= stop[a, 1]), 7) for stop in probs]
    drawn = [
        [*(stop[:a, 1].prod() * stop[a, 0] for a in range(7)), stop[:, 1].prod()] for stop in probs
    ]
    return {True: np.eye(8)[greedy], False: np.array(drawn)}


def rate_of(probs: np.ndarray, rows: Rows) -> float:
    return (probs * (rows.expected.numpy() + 1)).sum() / (probs * rows.latency_ms.numpy()).sum()


def mixed_trainer(**changes):
    """A trainer whose fresh network stops now here, now there."""
    config = dataclasses.replace(SHORT, continue_bias=0.5, **changes)
    trainer = radar_module._Trainer(config, some_rows(40), some_rows(30, seed=1), 4)
    with torch.no_grad():
        logits = trainer.network.eval()(trainer.train.scores[:, :1])
        trainer.network.mlp[3].bias[0] += (logits[..., 1] - logits[..., 0]).median()
    return trainer


def test_epochs_are_judged_on_held_out_rows_beside_the_best_constant():
    trainer = mixed_trainer(gradient="exact", gamma=0.99)
    held, calls = trainer.held_out, np.arange(1, 9)
    probs = by_definition(trainer.network, held)
    assert 0.1 < (probs[True].argmax(1) > 0).mean() < 0.9
    with torch.no_grad():
        loss = radar_module.loss_of(
            trainer.config, trainer.network(held.scores), held, 0.07, trainer.step_ms
        )
    assert trainer._held_out_row(0.07) == {
        "held_out_loss": pytest.approx(float(loss), rel=1e-5),
        "tok_per_ms": pytest.approx(rate_of(probs[True], held), rel=1e-6),
        "tok_per_ms_drawn": pytest.approx(rate_of(probs[False], held), rel=1e-5),
        "draft_calls": pytest.approx((probs[True] @ calls).mean(), rel=1e-6),
        "draft_calls_drawn": pytest.approx((probs[False] @ calls).mean(), rel=1e-5),
    }
    rates = [rate_of(np.eye(8)[[a] * 40], trainer.train) for a in range(8)]
    assert trainer.constant == int(np.argmax(rates)) and trainer.constant_rate == pytest.approx(
        max(rates), rel=1e-6
    )
    assert trainer.step_ms == pytest.approx((LATENCY[6] - LATENCY[0]) / 6, rel=1e-5)
    trainer = mixed_trainer()
    trainer.best.consider(trainer.network.state_dict(), 1.0, 3)
    held, probs = trainer.held_out, by_definition(trainer.network, trainer.held_out)
    constant = rate_of(np.eye(8)[[trainer.constant] * 30], held)
    for greedy in (True, False):
        rate, shares = rate_of(probs[greedy], held), probs[greedy].mean(0)
        assert trainer.judge(greedy) == {
            "tok_per_ms": pytest.approx(rate, rel=1e-5),
            "constant_tok_per_ms": pytest.approx(constant, rel=1e-6),
            "gain_frac": pytest.approx(rate / constant - 1, rel=1e-3),
            "known_lengths_tok_per_ms": radar_module.clairvoyant_rate(held),
            "constant_stop": trainer.constant,
            "draft_calls": pytest.approx((shares * np.arange(1, 9)).sum(), rel=1e-5),
            "most_common_stop": int(shares.argmax()),
            "most_common_frac": pytest.approx(shares.max(), rel=1e-5),
            "kept_epoch": 3,
        }


def test_the_epoch_is_kept_that_did_best_by_what_is_asked(monkeypatch):
    names = ("held_out_loss", "tok_per_ms", "tok_per_ms_drawn")
    rows = [
        (5.0, 1.0, 3.0),
        (4.0, 2.0, 2.0),
        (3.0, 1.5, 1.0),
        (3.0, 2.0, 3.0),
    ]  # the last is no better
    for change, kept in (
        ({"select_by": "surrogate"}, 2),
        ({"select_by": "throughput", "temperature": None}, 1),
        ({"select_by": "throughput", "temperature": 1.0}, 0),
    ):
        trainer, told, weights = mixed_trainer(**change), iter(rows), []
        monkeypatch.setattr(
            trainer,
            "_held_out_row",
            lambda rate, told=told: dict(zip(names, next(told), strict=True)),
        )
        for number in range(4):
            assert set(trainer.epoch(number, 1.0)) == {"loss", "rate_per_ms", *names}
            weights.append(copy.deepcopy(trainer.network.state_dict()))
        assert trainer.best.step == kept
        assert all(
            torch.equal(value, weights[kept][name]) for name, value in trainer.best.weights.items()
        )


@pytest.mark.parametrize("objective", ["lagrangian", "ratio"])
def test_time_is_worth_what_was_reached_or_a_constant_reaches(objective, monkeypatch):
    monkeypatch.setattr(radar_module, "DROPOUT", 0.0)
    for stops in (True, False):
        trainer = mixed_trainer(objective=objective, learning_rate=0.0, batch=64)
        if stops:
            with torch.no_grad():
                trainer.network.mlp[3].bias.copy_(torch.tensor([99.0, 0.0]))  # at once
        reached = rate_of(by_definition(trainer.network, trainer.train)[True], trainer.train)
        wanted = (
            max(trainer.constant_rate, reached)
            if objective == "lagrangian"
            else trainer.constant_rate
        )
        row = trainer.epoch(0, 1.0)
        assert row["rate_per_ms"] == pytest.approx(wanted, rel=1e-6)
        logits = trainer.network(trainer.train.scores)
        loss = radar_module.loss_of(trainer.config, logits, trainer.train, wanted, trainer.step_ms)
        assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_run_leaves_what_it_was_taught_for_with_the_prompts_and_prices_of_a_recording(
    tmp_path, monkeypatch
):
    data = dataclasses.replace(two_kinds(200), header={"pair": "made up", "flat_nodes": 59})
    config = dataclasses.replace(CONFIGS["ours"], epochs=2, batch=64, flat_nodes=59)
    found = train_radar(
        data, LATENCY, config, seed=6, out_dir=tmp_path, trained_for={"pair": "toy"}
    )
    facts = {
        "seed": 6,
        "data": data.header,
        "training": radar_module.runs.plain(config),
        "pair": "toy",
    }
    facts["deviations"] = []
    choice = {
        "choice": "weights and epoch",
        "part": "train",
        "value": "recipe 'ours', chosen before",
    }
    assert (
        found.policy.trained_for
        == load_policy(tmp_path / "policy").trained_for
        == {**facts, "choices": [choice]}
    )
    assert found.policy.seed == 6 and found.policy.flat_nodes == 59
    results = json.loads((tmp_path / "results.json").read_text())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert results == plan["results"] == found.results
    latency = hashlib.sha256(np.tile(LATENCY, (200, 1)).tobytes()).hexdigest()
    wanted = {
        "training": facts["training"],
        "seed": 6,
        "data": data.key,
        "steps": 2,
        "latency": latency,
    }
    assert plan["settings"] == wanted
    curve = pd.read_parquet(tmp_path / "loss.parquet")
    judged = ["held_out_loss", "tok_per_ms", "tok_per_ms_drawn", "draft_calls", "draft_calls_drawn"]
    assert list(curve) == ["step", "loss", "rate_per_ms", *judged, "elapsed_s"] and curve.equals(
        found.curve
    )

    def checked(latency, rows):
        asked.update(latency=latency)
        return np.tile(LATENCY, (rows, 1))

    asked, trace = {}, synthetic_trace(turns=8, positions=10, depth=8, top_ks=(10,), most_nodes=60)
    monkeypatch.setattr(radar_module, "_checked_latency", checked)
    config = dataclasses.replace(
        CONFIGS["ours"], epochs=1, prompts=("hard",), flat_nodes=59, split_by="cycle"
    )
    costs = round_costs(name="mine")
    found = train_radar(trace, costs, config, out_dir=tmp_path / "recorded")
    learned = trace.select(part="train").select(
        trace.select(part="train").turns["suite"].eq("hard").to_numpy()
    )
    data = from_trace(learned, flat_nodes=59)
    np.testing.assert_allclose(asked["latency"], latency_ms(costs, data.context_tok, 59))
    assert len(asked["latency"]) == 20 and found.policy.trained_for["data"] == data.header
    assert (found.policy.trained_for["pair"], found.policy.trained_for["costs"]) == (
        "synthetic",
        "mine",
    )
    bare = train_radar(trace, LATENCY, config, out_dir=tmp_path / "bare").policy.trained_for
    assert (bare["pair"], bare["costs"], bare["seed"]) == ("synthetic", None, 0)


def test_the_papers_preset_learns_from_distributions_drawn_anew_at_every_visit(tmp_path):
    trace = synthetic_trace(turns=8, positions=10, depth=8, top_ks=(10,), most_nodes=60)
    rows, half = np.arange(0, 80, 2), np.zeros((40, 8, 9), np.float32)
    half[:, :, :2] = 0.5  # nothing or one token, at even odds
    trace.acceptance_distributions = rows, half
    paper = dataclasses.replace(CONFIGS["paper"], epochs=1, prompts=())
    data = radar_module.rows_for(paper, trace)
    assert (
        data.header["exact"]
        and len(data) == len(trace.select(part="train").acceptance_distributions[0]) < 40
    )
    assert not radar_module.rows_for(CONFIGS["ours"], trace).header["exact"], "many single lengths"
    batch, logits = Rows.of(data, np.tile(LATENCY, (len(data), 1))), torch.zeros(len(data), 7, 2)
    torch.manual_seed(0)
    seen = {float(radar_module.loss_of(paper, logits, batch, 1.0, 1.0)) for _ in range(5)}
    assert len(seen) == 5, "the same rows earn something else at the next visit"
    found = train_radar(trace, round_costs(), paper, out_dir=tmp_path)
    count = len(data) - round(0.2 * len(data))
    questions = trace.select(part="train").turns["prompt"].nunique()
    wanted = (
        f"{count} cycles of {questions} questions, with exact distributions; in the paper 188,408"
    )
    assert any(line.startswith(wanted) for line in found.policy.trained_for["deviations"])
    trace.acceptance_distributions = None
    again = train_radar(
        trace, round_costs(), paper, out_dir=tmp_path / "single"
    ).policy.trained_for["deviations"]
    assert "with one length each" in again[-1]
