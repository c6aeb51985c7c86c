"""Training of our controller: targets are what replay accepts, it learns what a static tree cannot do, and prices move it."""

import numpy as np
import pytest
import torch
from fakes.traces import round_costs, synthetic_trace
from fakes.values import SIZES, random_policy

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.policies.base import load_policy
from specdec.policies.value import AcceptanceModel, ValueConfig
from specdec.replays.oracle import clairvoyant, headroom
from specdec.replays.replay import replay
from specdec.replays.static_trees import best_static
from specdec.tools import cli
from specdec.training.value import (
    Examples,
    Net,
    averaged,
    calibrate_rate,
    cycle_starts,
    evaluation_ms,
    ms_per_tok,
    reprice,
    train_value,
    tune_schedule,
)

SMALL = ValueConfig(top_k=3, sizes=SIZES, hidden=24, probe_width=4, steps=400, rounds=1, detours=2, ensemble=2)


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(turns=48, positions=60, depth=4, top_ks=(3,), most_nodes=20, hit=0.6)


@pytest.fixture(scope="module")
def trained(trace):
    return train_value(trace.select(part="train"), round_costs(), SMALL, progress=False)


def test_the_numpy_network_is_the_trained_one():
    torch.manual_seed(0)
    moments = (np.ones(10, np.float32), np.full(10, 2.0, np.float32)), (np.zeros(6, np.float32), np.ones(6, np.float32))
    nets = [Net(SMALL, *moments, np.zeros((3, 2), np.float32), True).eval() for _ in range(2)]
    inputs, features = torch.randn(7, 10), torch.randn(7, 6)
    with torch.no_grad():
        answers = [net(inputs, features).view(7, 3, 2).numpy() for net in nets]
    for net, answer in zip(nets, answers, strict=True):
        model = AcceptanceModel(net.arrays(), 3, 2)
        np.testing.assert_allclose(model(inputs.numpy(), model.state(features.numpy())), answer, atol=1e-5)
    both = AcceptanceModel(averaged([net.arrays() for net in nets]), 3, 2)
    np.testing.assert_allclose(both(inputs.numpy(), both.state(features.numpy())), np.mean(answers, 0), atol=1e-5)


def test_targets_are_what_replay_accepts(trace):
    rows, histories = cycle_starts(trace, round_costs(), Static(7, 2, 3), detours=1)
    assert len(rows) == len(histories) > 500
    policy = random_policy(8, probe="target")
    examples = Examples(trace, policy, rows, histories)
    accepted = examples.batch(np.arange(20), 2)[2]
    for expansions in range(5):
        for number, size in enumerate(SIZES):
            np.testing.assert_array_equal(
                accepted[:, expansions, number], trace.accepted_tok(rows[:20], 3, expansions, size)
            )


def test_it_beats_the_tuned_tree_and_never_the_bound(trace, trained):
    policy, curve = trained
    test, costs = trace.select(part="test"), round_costs()
    tree = best_static(trace.select(part="train"), costs)
    tuned = replay(test, Static(tree.total_tokens, tree.depth, tree.top_k), costs)
    ours, bound = replay(test, policy, costs), clairvoyant(test, costs)
    assert ours.speedup > 1.03 * tuned.speedup
    assert 0.06 < headroom(ours.ms_per_tok, tuned.ms_per_tok, bound.ms_per_tok) < 1
    assert curve["held_out_loss"].min() < curve["held_out_loss"].iloc[0]


def test_prices_move_the_answers(trace, trained):
    policy, _ = trained
    train, test = trace.select(part="train"), trace.select(part="test")
    dear = round_costs(name="dear nodes", verify=(4.0, 12.0, 200.0))
    moved, rate = calibrate_rate(policy, train, dear, policy.rate)
    kept = [replay(test, one, round_costs(), keep_cycles=True).cycles["verify_nodes"].mean() for one in (policy, moved)]
    assert kept[1] < 0.8 * kept[0]
    assert replay(test, moved, dear).ms_per_tok < replay(test, policy, dear).ms_per_tok
    assert rate == pytest.approx(1 / replay(train, moved, dear).ms_per_tok, rel=0.02)


def test_repricing_moves_the_prices_and_says_so(trace, trained):
    policy, train = trained[0], trace.select(part="train")
    dear = round_costs(name="dear nodes@abc123", verify=(4.0, 12.0, 200.0), errors={"tree_frac": 0.01})
    found = reprice(policy, train, dear)
    table = found.table.set_index("")
    assert found.policy.priced_for == found.policy.trained_for["costs"] == "dear nodes@abc123"
    assert table.loc["verification of 20 nodes, ms"].tolist() == pytest.approx(
        [policy.verify_ms[-1], dear.verify_ms(20, 0)]
    )
    before, after = table.loc["predicted here, ms per token"]
    assert after < before and found.uncertainty_frac == dear.uncertainty_frac > 0
    with pytest.raises(SpecdecError, match="holds no prices"):
        reprice(Static(), train, dear)


def test_reprice_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    policy, costs = random_policy(probe="none"), round_costs(name="here@abc123", kind="calibrated")
    policy.trained_for = {"pair": "tiny"}
    policy.save(tmp_path / "before")
    command = f"reprice {tmp_path}/before --dtype float32 --suites toy/gsm8k --limit 3 --costs"
    assert cli.main([*command.split(), str(costs.save(tmp_path / "costs.json")), "--out", str(tmp_path / "after")]) == 0
    assert "predicted here, ms per token" in capsys.readouterr().out
    assert load_policy(tmp_path / "after").priced_for == "here@abc123"


def test_evaluations_cost_what_they_are_said_to_cost(trace, trained):
    policy, test = trained[0], trace.select(part="test")
    free = ms_per_tok(policy, test, round_costs(), 0.0)
    assert free == replay(test, policy, round_costs()).ms_per_tok
    before = policy.evaluations
    found = replay(test, policy, round_costs(), keep_cycles=True)
    evaluations = policy.evaluations - before
    assert len(found.cycles) <= evaluations <= found.cycles["questions"].sum()
    paid = ms_per_tok(policy, test, round_costs(), 2.0)
    assert paid == pytest.approx(free + 2.0 * evaluations / found.table["new_tok"].sum())
    rare = tune_schedule(policy, test, round_costs(), 20.0)  # dear evaluations: fewer of them
    rare.evaluations = 0
    replay(test, rare, round_costs())
    assert rare.evaluations < evaluations
    assert 0.001 < evaluation_ms(policy, test, round_costs()) < 50


def test_a_recording_without_features_is_refused():
    blind = synthetic_trace()
    blind.header["features"] = False
    with pytest.raises(SpecdecError, match="holds no features"):
        train_value(blind, round_costs(), SMALL)
