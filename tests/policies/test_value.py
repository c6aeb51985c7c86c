"""Our controller: its numpy network is the trained one, its prices decide, it learns what a static tree cannot do."""

import warnings

import numpy as np
import pytest
import torch
from fakes.pairs import random_pair, shared_pair
from fakes.traces import round_costs, synthetic_trace

from specdec import machine
from specdec.core.decode import autoregress, decode
from specdec.core.policy import Static
from specdec.costs.measure import answer_ms
from specdec.errors import SpecdecError
from specdec.policies.base import load_policy
from specdec.policies.value import AcceptanceModel, TreeInputs, ValueConfig, ValuePolicy, history_after
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

SIZES = (0, 1, 3, 6, 12, 20)
SMALL = ValueConfig(top_k=3, sizes=SIZES, hidden=24, probe_width=4, steps=400, rounds=1, detours=2, ensemble=2)


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(turns=48, positions=60, depth=4, top_ks=(3,), most_nodes=20, hit=0.6)


@pytest.fixture(scope="module")
def trained(trace):
    return train_value(trace.select(part="train"), round_costs(), SMALL, progress=False)


def random_policy(features=32, seed=0, **fields):
    """An untrained policy whose network says something."""
    policy = ValuePolicy(**{"top_k": 3, "most_expansions": 4, "sizes": SIZES, **fields})
    random, width, outputs = np.random.default_rng(seed), policy.inputs.size, 5 * len(policy.sizes)
    shapes = {
        "probe.weight": (4, features),
        "probe.bias": (4,),
        "hidden.weight": (16, width + 4),
        "hidden.bias": (16,),
        "out.weight": (outputs, 16),
        "out.bias": (outputs,),
    }
    policy.network = AcceptanceModel(
        {name: random.normal(size=shape) for name, shape in shapes.items()}, 5, len(policy.sizes)
    )
    return policy.price(round_costs(), 0.2)


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


def test_inputs_of_a_batch_equal_those_of_one(trace):
    inputs, scores = TreeInputs(3, 4, SIZES), trace.trees(3).scores[:5]
    history = history_after(history_after(np.zeros(5, np.float32), 4, 3), 1, 3)
    assert history.tolist() == pytest.approx([1 / 8, 4 / 8, 0.8 * 0.5 + 0.2 / 8, 0.0, 1.0])
    assert inputs.size == 6 + 3 * 5 + 5 + 1 + 5  # children, three numbers a level, sizes above 0, context, history
    for expansions in range(5):
        pool, contexts = scores[:, : 3 + 9 * expansions], trace.context_tok[:5]
        batch = inputs.update(inputs.begin(contexts, np.tile(history, (5, 1))), pool, expansions)
        assert batch.shape == (5, inputs.size)
        for row in range(5):
            one = inputs.update(inputs.begin(contexts[row], history), pool[row], expansions)
            np.testing.assert_allclose(one, batch[row], rtol=1e-6)
    best = np.exp(np.sort(pool[0])[::-1])
    np.testing.assert_allclose(
        inputs.size_masses(np.exp(pool[0]), 4), [best[:size].sum() for size in SIZES[1:]], rtol=1e-5
    )
    growing = inputs.begin(contexts[0], history)
    for expansions in (0, 2, 3, 4):  # evaluations may skip levels
        step = inputs.update(growing, scores[0, : 3 + 9 * expansions], expansions)
        fresh = inputs.update(inputs.begin(contexts[0], history), scores[0, : 3 + 9 * expansions], expansions)
        np.testing.assert_array_equal(step, fresh)


def test_inputs_by_hand():
    inputs = TreeInputs(2, 1, (0, 1, 3))
    scores = np.log(np.float32([0.6, 0.3, 0.4, 0.1, 0.2, 0.05]))  # two nodes, then two children of each
    seen = inputs.update(inputs.begin(100, np.zeros(5, np.float32)), scores, 1)
    children = np.maximum(scores[2:] / 5, -2)  # with k = 2 these are all
    expected = [*children, 0.9, 0.75, 0.6, 0.4, 0, 1, 0.6, 1.3, 0.2, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    seen = inputs.update(inputs.begin(100, np.zeros(5, np.float32)), scores[:2], 0)
    np.testing.assert_allclose(seen[:6], [*scores[:2] / 5, -2, -2, 0.9, 0], rtol=1e-5)


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


def test_prices_of_another_machine_never_pass_silently(tmp_path, trained):
    policy, here = trained[0], machine.short_name(machine.speed_facts())
    for name, said in (("mine@000000", "machine 000000"), ("mine", "does not name"), (f"mine@{here}", None)):
        folder = policy.with_settings(priced_for=name).save(tmp_path / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_policy(folder)
        told = [str(one.message) for one in caught if "specdec reprice" in str(one.message)]
        assert told == [] if said is None else said in told[0]


def test_an_answer_is_timed_between_forwards():
    pair, policy = shared_pair(), random_policy(probe="none")
    found = answer_ms(pair, policy, round_costs(), [[1, 2, 3], [4, 5, 6, 7]], new_tok=24)
    assert 0.002 < found < 50
    assert answer_ms(pair, policy, round_costs(question_ms=1e3), [[1, 2, 3], [4, 5, 6, 7]], new_tok=24) == 0
    assert answer_ms(pair, Static(4, 1, 2), round_costs(), [[1, 2, 3], [4, 5, 6]]) == 0


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


def test_save_and_load(tmp_path, trace, trained):
    policy, _ = trained
    policy.save(tmp_path)
    again = load_policy(tmp_path)
    assert again.settings() == policy.settings() and again.trained_for["pair"] == "synthetic"
    first, second = (replay(trace, one, round_costs()).table for one in (policy, again))
    assert first.equals(second)


@pytest.mark.parametrize("temperature, probe", [(0.0, "both"), (1.0, "target"), (0.0, "draft"), (1.0, "none")])
def test_lossless(temperature, probe):
    pair = random_pair()
    widths = {"none": 1, "target": 3 * pair.target.hidden_size, "draft": pair.drafter.config.hidden_size}
    prompt = list(range(2, 9))
    policy = random_policy({**widths, "both": widths["target"] + widths["draft"]}[probe], stride=2, probe=probe)
    found = decode(pair, prompt, policy, max_new_tokens=40, temperature=temperature, seed=3)
    assert found.tokens == autoregress(pair, prompt, max_new_tokens=40, temperature=temperature, seed=3).tokens
    assert probe == "none" or found.cycles["verify_nodes"].nunique() > 1  # this one sees little that changes


def test_bad_input(trace):
    unpriced = ValuePolicy(top_k=3, most_expansions=4, sizes=SIZES)
    with pytest.raises(SpecdecError, match="no prices yet"):
        replay(trace, unpriced, round_costs())
    blind = synthetic_trace()
    blind.header["features"] = False
    with pytest.raises(SpecdecError, match="holds no features"):
        train_value(blind, round_costs(), SMALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shipped_policies_decode(dtype):
    import specdec

    policy = specdec.load_policy(f"small/ours-{dtype}")
    pair = specdec.load_pair("small", dtype=dtype)
    assert policy.trained_for["pair"] == pair.name and policy.rate > 0
    messages = [{"role": "user", "content": "Write a short story about a lighthouse."}]
    found = decode(pair, messages, policy, max_new_tokens=40)
    assert found.tau > 2 and found.cycles["verify_nodes"].nunique() > 2
    if dtype == "float32":
        assert found.tokens == autoregress(pair, messages, max_new_tokens=40).tokens
    with pytest.raises(SpecdecError, match="policy.json"):
        specdec.load_policy("small/nobody")
