"""RADAR's controller: the published network in numpy, what it is asked, and losslessness."""

import numpy as np
import pytest
import torch
from fakes.pairs import shared_bigrams
from fakes.questions import asked

from specdec import autoregress, decode
from specdec.core.records import EXTEND
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies import radar
from specdec.policies.base import load_policy
from specdec.policies.radar import SHAPES, LstmNetwork, RadarPolicy, best_scores
from specdec.training.radar import RadarNetwork


def torch_network(seed=0, scale=1.0) -> RadarNetwork:
    torch.manual_seed(seed)
    network = RadarNetwork().eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight *= scale
    return network


def arrays_of(network) -> dict:
    return {name: value.detach().numpy() for name, value in network.state_dict().items()}


def random_policy(seed=0, **settings) -> RadarPolicy:
    policy = RadarPolicy(seed=seed, **settings)
    policy.network = LstmNetwork(arrays_of(torch_network(seed, scale=3.0)))
    return policy


def random_states(seed=0, steps=7) -> np.ndarray:
    random = np.random.default_rng(seed)
    return -np.sort(random.exponential(3.0, size=(steps, 10)).astype(np.float32))


def question(expansions, newest):
    return asked(EXTEND, expansions, newest_scores=torch.as_tensor(newest, dtype=torch.float32))


def answers(policy, states) -> list[bool]:
    return [policy.answer(question(n, state)) for n, state in enumerate(states)]


def reference_logits(module, states) -> np.ndarray:
    """With torch.nn.LSTM built here from the published names, not through RadarNetwork."""
    lstm = torch.nn.LSTM(10, 128, batch_first=True)
    weights = module.state_dict()
    cell = [name for name in weights if name.startswith("lstm.")]
    lstm.load_state_dict({name.removeprefix("lstm."): weights[name] for name in cell})
    states = torch.from_numpy(states)
    with torch.no_grad():
        joined = torch.cat((lstm(states[None])[0][0], states), dim=1)
        inner = torch.relu(joined @ weights["mlp.0.weight"].T + weights["mlp.0.bias"])
        return (inner @ weights["mlp.3.weight"].T + weights["mlp.3.bias"]).numpy()


def test_published_weights_are_read_and_survive_saving(tmp_path):
    state = torch_network(3).state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == SHAPES
    torch.save(state, tmp_path / "b-0.03-a-0.02.pt")
    policy = radar.released(tmp_path)["b-0.03-a-0.02"]
    assert policy.temperature == 1.0 and policy.half_inputs
    again = load_policy(policy.save(tmp_path / "policy"))
    assert again.settings() == policy.settings()
    for key, value in again.network.arrays().items():
        np.testing.assert_array_equal(value, state[key])
    pytest.raises(SpecdecError, LstmNetwork, {}).match("not RADAR's")
    pytest.raises(SpecdecError, radar.released, tmp_path / "policy").match("holds no .pt")


def test_a_state_is_the_ten_best_scores():
    newest = np.random.default_rng(0).normal(size=100).astype(np.float32)
    expected = np.float32(sorted(newest.tolist(), reverse=True)[:10])
    np.testing.assert_array_equal(best_scores(newest), expected)
    np.testing.assert_array_equal(best_scores(newest, half=True), np.float16(expected))
    np.testing.assert_array_equal(RadarPolicy().observation(question(0, newest)), expected)
    pytest.raises(SpecdecError, best_scores, newest[:9]).match("top_k=10")
    tree = dict(total_tokens=12, top_k=4, beam=(2, 1))
    policy = random_policy(**tree)
    assert policy.plan == TreeConfig(12, 7, 4, beam=(2, 1)) == radar.RadarConfig(**tree).tree
    state = policy.observation(question(0, np.float32([-1, -3, -2, -4])))
    assert state.tolist() == [-1, -2, -3, -4, *[-20] * 6]


def test_answers_follow_the_logits_and_memory_lasts_one_cycle():
    policy, states = random_policy(4), random_states(5)
    expected = reference_logits(torch_network(4, 3.0), states)
    for _ in range(2):
        for n, state in enumerate(states):
            assert policy.answer(question(n, state)) is bool(expected[n, 0] < expected[n, 1])
            np.testing.assert_allclose(policy.outputs, expected[n], rtol=1e-4, atol=1e-4)
    drawing = random_policy(4, temperature=1.0)
    odds = torch.from_numpy(expected).softmax(-1)[:, 1].numpy()
    counts = np.mean([answers(drawing, states) for _ in range(1000)], axis=0)
    np.testing.assert_allclose(counts, odds, atol=4 * 0.5 / 1000**0.5)
    with torch.no_grad():  # what is trained is what decides
        trained = torch_network(4, 3.0)(torch.from_numpy(states)[None])[0]
    np.testing.assert_allclose(trained, expected, rtol=1e-4, atol=1e-4)
    assert radar.OURS.policy().temperature is None and radar.OURS.policy().flat_nodes is None
    assert radar.PAPER.policy(temperature=0.5).temperature == 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_weights_decode_losslessly_with_changing_depths(temperature):
    pair, settings = shared_bigrams(), dict(max_new_tokens=48, temperature=temperature, seed=7)
    plain = autoregress(pair, [3, 1, 4, 1, 5], **settings).tokens
    out = decode(pair, [3, 1, 4, 1, 5], random_policy(1, temperature=1.0), **settings)
    assert out.tokens == plain and out.cycles["draft_calls"].nunique() > 2
    # never after the eighth call
    assert (out.cycles["questions"] == np.minimum(out.cycles["draft_calls"], 7)).all()
