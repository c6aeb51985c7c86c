"""Our controller: what its network reads, by hand and in batches; prices; losslessness."""

import warnings

import numpy as np
import pytest
from fakes.pairs import random_pair, shared_pair
from fakes.traces import round_costs, synthetic_trace
from fakes.values import SIZES, random_policy

import specdec
from specdec import machine
from specdec.costs.calibrate import measured_answer_ms
from specdec.errors import SpecdecError
from specdec.policies.base import load_policy
from specdec.policies.value import NOTHING, TreeInputs, ValuePolicy, ValueSettings, history_after
from specdec.replays.replay import replay


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(turns=48, positions=60, depth=4, top_ks=(3,), most_nodes=20, hit=0.6)


def test_inputs_by_hand():
    history = history_after(history_after(NOTHING, 4, 3), 1, 3)
    assert history.tolist() == pytest.approx([1 / 8, 4 / 8, 0.8 * 0.5 + 0.2 / 8, 0.0, 1.0])
    inputs = TreeInputs(ValueSettings(2, 1, (0, 1, 3)))
    # two nodes, then two children of each
    scores = np.log(np.float32([0.6, 0.3, 0.4, 0.1, 0.2, 0.05]))
    seen = inputs.update(inputs.begin(100, NOTHING), scores, 1)
    children = np.maximum(scores[2:] / 5, -2)  # with k = 2 these are all
    expected = [*children, 0.9, 0.75, 0.6, 0.4, 0, 1, 0.6, 1.3, 0.2, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    seen = inputs.update(inputs.begin(100, NOTHING), scores[:2], 0)
    np.testing.assert_allclose(seen[:6], [*scores[:2] / 5, -2, -2, 0.9, 0], rtol=1e-5)


def test_inputs_of_a_batch_equal_those_of_one_and_levels_may_be_skipped(trace):
    inputs, scores = TreeInputs(ValueSettings(3, 4, SIZES)), trace.trees(3).scores[:5]
    history = history_after(NOTHING, 4, 3)
    contexts = trace.context_tok[:5]
    growing = inputs.begin(contexts[0], history)
    for expansions in range(5):
        pool = scores[:, : 3 + 9 * expansions]
        batch = inputs.update(inputs.begin(contexts, np.tile(history, (5, 1))), pool, expansions)
        assert batch.shape == (5, inputs.size)
        for row in range(5):
            one = inputs.update(inputs.begin(contexts[row], history), pool[row], expansions)
            np.testing.assert_allclose(one, batch[row], rtol=1e-6)
        if expansions != 1:
            step = inputs.update(growing, pool[0], expansions)
            np.testing.assert_allclose(step, batch[0], rtol=1e-6)
    best = np.exp(np.sort(pool[0])[::-1])
    masses = [best[:size].sum() for size in SIZES[1:]]
    np.testing.assert_allclose(batch[0, inputs._sizes], masses, rtol=1e-5)


def test_saved_policies_come_back_and_costs_of_another_machine_never_pass_silently(tmp_path, trace):
    policy, here = random_policy(8, probe="target"), machine.short_name(machine.speed_facts())
    for name, warned in (("mine@000000", 1), (f"mine@{here}", 0)):
        policy = policy.with_settings(priced_for=name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = load_policy(policy.save(tmp_path / name))
        assert sum("reprice" in str(one.message) for one in caught) == warned
    assert again.settings() == policy.settings()
    first, second = (replay(trace, one, round_costs()).table for one in (policy, again))
    assert first.equals(second)


def test_an_answer_is_timed_between_forwards_and_there_is_none_without_prices(trace):
    pair, policy = shared_pair(), random_policy(probe="none")
    assert 0.002 < measured_answer_ms(pair, policy, round_costs()) < 50
    assert measured_answer_ms(pair, policy, round_costs(question_ms=1e3)) == 0
    unpriced = ValuePolicy(top_k=3, most_expansions=4, sizes=SIZES)
    pytest.raises(SpecdecError, replay, trace, unpriced, round_costs()).match("no costs yet")
    pytest.raises(SpecdecError, ValuePolicy, plans=True, probe="draft").match("before a tree")


@pytest.mark.parametrize(
    "temperature, probe", [(0.0, "both"), (1.0, "target"), (0.0, "draft"), (1.0, "none")]
)
def test_lossless(temperature, probe):
    pair = random_pair()
    widths = {"target": 3 * pair.target.hidden_size, "draft": pair.drafter.config.hidden_size}
    widths |= {"none": 1, "both": sum(widths.values())}
    policy = random_policy(widths[probe], stride=2, probe=probe)
    settings = dict(max_new_tokens=40, temperature=temperature, seed=3)
    out = specdec.decode(pair, list(range(2, 9)), policy, **settings)
    assert out.tokens == specdec.autoregress(pair, list(range(2, 9)), **settings).tokens
    # one without a probe sees little that changes
    assert probe == "none" or out.cycles["verify_nodes"].nunique() > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shipped_policies_decode(dtype):
    policy = specdec.load_policy(f"small/ours-{dtype}")
    pair = specdec.load_pair("small", dtype=dtype)
    assert policy.trained_for["pair"] == pair.name and policy.rate > 0
    prompt = "Write a short story about a lighthouse."
    out = specdec.decode(pair, prompt, policy, max_new_tokens=40)
    assert out.tau > 2 and out.cycles["verify_nodes"].nunique() > 2
    if dtype == "float32":
        assert out.tokens == specdec.autoregress(pair, prompt, max_new_tokens=40).tokens
