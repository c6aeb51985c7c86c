"""RADAR's controller: the published network in numpy, what it is asked, and that no weights of its
change the text.
"""

import numpy as np
import pytest
import torch
from fakes.golden import SHARED
from fakes.pairs import shared_bigrams
from fakes.questions import asked
from fakes.refusals import Bomb

from specdec import autoregress, decode
from specdec.core.records import EXTEND
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies import radar
from specdec.policies.base import load_policy
from specdec.policies.radar import SHAPES, LstmNetwork, RadarPolicy, best_scores, read_weights
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
    return -np.sort(
        np.random.default_rng(seed).exponential(3.0, size=(steps, 10)).astype(np.float32)
    )


def question(expansions, newest):
    return asked(EXTEND, expansions, newest_scores=torch.as_tensor(newest, dtype=torch.float32))


def ask(policy, states) -> list[bool]:
    return [policy.answer(question(n, state)) for n, state in enumerate(states)]


def reference_logits(module, states) -> np.ndarray:
    """With torch.nn.LSTM built here from the published names, not through RadarNetwork."""
    lstm = torch.nn.LSTM(10, 128, batch_first=True)
    weights = module.state_dict()
    lstm.load_state_dict(
        {name.removeprefix("lstm."): w for name, w in weights.items() if name.startswith("lstm.")}
    )
    states = torch.from_numpy(states)
    with torch.no_grad():
        joined = torch.cat((lstm(states[None])[0][0], states), dim=1)
        inner = torch.relu(joined @ weights["mlp.0.weight"].T + weights["mlp.0.bias"])
        return (inner @ weights["mlp.3.weight"].T + weights["mlp.3.bias"]).numpy()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_numpy_network_equals_torch(scale):
    module = torch_network(1, scale)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == SHAPES
    assert sum(value.numel() for value in module.parameters()) == 89_730
    network, memory, found = LstmNetwork(arrays_of(module)), None, []
    states = random_states(2)
    for state in states:
        logits, memory = network.step(state, memory)
        found.append(logits)
    np.testing.assert_allclose(
        found, reference_logits(module, states), rtol=1e-5, atol=1e-5 * scale**2
    )
    with torch.no_grad():
        np.testing.assert_allclose(
            module(torch.from_numpy(states)[None])[0], found, rtol=1e-5, atol=1e-5 * scale**2
        )


def test_weights_load_from_both_formats_survive_saving_and_foreign_ones_are_refused(tmp_path):
    from collections import OrderedDict

    from safetensors.torch import save_file

    state = torch_network(3).state_dict()
    torch.save(OrderedDict(state), tmp_path / "b-0.03-a-0.02.pt")
    save_file(state, tmp_path / "radar.safetensors")
    for name in ("b-0.03-a-0.02.pt", "radar.safetensors"):
        policy = RadarPolicy.from_weights(tmp_path / name)
        for key, value in policy.network.arrays().items():
            np.testing.assert_array_equal(value, state[key])
    assert policy.temperature == 1.0 and policy.half_inputs
    policy.trained_for = {"pair": "someone's"}
    again = load_policy(policy.save(tmp_path / "policy"))
    assert again.settings() == policy.settings() and again.trained_for == policy.trained_for
    for key, value in again.network.arrays().items():
        np.testing.assert_array_equal(value, state[key])
    arrays = arrays_of(torch_network())
    with pytest.raises(SpecdecError, match="mlp.3.bias.*missing or unknown"):
        LstmNetwork({name: value for name, value in arrays.items() if name != "mlp.3.bias"})
    pytest.raises(SpecdecError, LstmNetwork, {**arrays, "extra": arrays["mlp.3.bias"]}).match(
        "missing or unknown"
    )
    with pytest.raises(SpecdecError, match="shape"):
        LstmNetwork(
            {**arrays, "mlp.0.weight": arrays["mlp.0.weight"][:, :128]}
        )  # the head of an earlier version
    pytest.raises(
        SpecdecError, LstmNetwork, {**arrays, "mlp.3.bias": np.float32([0, np.nan])}
    ).match("finite")
    torch.save({"mlp.3.bias": Bomb(tmp_path / "ran")}, tmp_path / "bad.pt")
    (tmp_path / "noise.pt").write_bytes(b"nothing")
    (tmp_path / "noise.safetensors").write_bytes(b"nothing")
    for name in ("bad.pt", "noise.pt", "noise.safetensors"):
        pytest.raises(SpecdecError, read_weights, tmp_path / name).match("cannot be read")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "empty").mkdir()
    pytest.raises(SpecdecError, radar.released, tmp_path / "empty").match(
        r"holds no .pt or .safetensors"
    )


def test_states_are_sorted_answers_follow_the_logits_and_memory_lasts_one_cycle():
    newest = np.random.default_rng(0).normal(size=100).astype(np.float32)
    expected = sorted(newest.tolist(), reverse=True)[:10]
    np.testing.assert_array_equal(best_scores(newest), np.float32(expected))
    np.testing.assert_array_equal(best_scores(newest, half=True), np.float32(np.float16(expected)))
    np.testing.assert_array_equal(
        RadarPolicy().observation(question(0, expected)), np.float32(expected)
    )
    pytest.raises(SpecdecError, best_scores, newest[:9]).match("top_k=10")
    tree = dict(total_tokens=12, top_k=4, beam=(2, 1))
    policy = random_policy(**tree)
    assert policy.plan == TreeConfig(12, 7, 4, beam=(2, 1)) == radar.RadarConfig(**tree).tree
    state = policy.observation(question(0, np.float32([-1, -3, -2, -4])))
    assert state.tolist() == [-1, -2, -3, -4, *[-20] * 6]
    assert radar.OURS.policy().temperature is None and radar.OURS.policy().flat_nodes is None
    assert radar.PAPER.policy(temperature=0.5).temperature == 0.5
    assert radar.OFFICIAL.policy().half_inputs and not radar.PAPER.policy().half_inputs
    policy, states = random_policy(4), random_states(5)
    logits = []
    for _ in range(2):
        for n, state in enumerate(states):
            policy.answer(question(n, state))
            logits.append(policy._memory[0].copy())
    np.testing.assert_array_equal(logits[:7], logits[7:])
    alone = policy.network.step(states[3])[1][0]
    assert (
        np.abs(alone - logits[3]).max() > 1e-3
    )  # without the memory the fourth state gives something else
    policy = random_policy(4)
    expected = reference_logits(torch_network(4, 3.0), states)
    assert ask(policy, states) == [bool(stop < go) for stop, go in expected]
    drawing = random_policy(4, temperature=1.0)
    odds = torch.from_numpy(expected).softmax(-1)[:, 1].numpy()
    counts = np.mean([ask(drawing, states) for _ in range(1000)], axis=0)
    np.testing.assert_allclose(counts, odds, atol=4 * 0.5 / 1000**0.5)
    policy, states = random_policy(), random_states()
    policy.answer(question(0, states[0]))
    pytest.raises(SpecdecError, policy.answer, question(2, states[2])).match(
        "after every draft call"
    )
    assert policy.answer(question(7, states[0])) is False
    pytest.raises(SpecdecError, RadarPolicy().answer, question(0, states[0])).match("no network")
    for name, value in (("flat_nodes", 60), ("temperature", 0.0)):
        pytest.raises(SpecdecError, RadarPolicy, **{name: value}).match(name)


@pytest.mark.skipif(
    not (SHARED / "data" / "radar_weights").is_dir(),
    reason="released weights are not beside the checkout",
)
def test_released_weights_stop_when_the_first_token_is_unlikely():
    found = radar.released(SHARED / "data" / "radar_weights")
    assert set(found) == {"ds", "llama3", "vicuna"}
    for policy in found.values():
        stops = []
        for best in (-0.1, -5.0, -10.0):
            policy._memory = None
            logits = policy.logits(np.float32(best - 0.5 * np.arange(10)))
            stops.append(float(1 / (1 + np.exp(logits[1] - logits[0]))))
        assert stops[0] < 0.05 and stops[0] <= stops[1] <= stops[2] and stops[2] > 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_weights_decode_losslessly_with_changing_depths(temperature):
    pair, prompt = shared_bigrams(), [3, 1, 4, 1, 5]
    plain = autoregress(pair, prompt, max_new_tokens=48, temperature=temperature, seed=7).tokens
    calls = set()
    for seed in range(3):
        policy = random_policy(seed, temperature=1.0)
        out = decode(
            pair, prompt, policy=policy, max_new_tokens=48, temperature=temperature, seed=7
        )
        assert out.tokens == plain
        calls |= set(out.cycles["draft_calls"])
        asked = np.minimum(out.cycles["draft_calls"], 7)
        assert (out.cycles["questions"] == asked).all()  # never after the eighth call
    assert len(calls) > 2 and max(calls) <= 8
