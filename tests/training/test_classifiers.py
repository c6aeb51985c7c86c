"""The classifiers among the heuristics: what they learn from, read off a recording, and fitting them."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.questions import pool, question

from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError
from specdec.policies.base import load_policy
from specdec.policies.heuristics import Disco, ResidualNetwork, node_depths
from specdec.replays.trace import Trace, path_nodes, path_ranks
from specdec.training import classifiers
from specdec.training.classifiers import (
    balanced,
    c2t_arrays,
    disco_arrays,
    fit_c2t,
    fit_disco,
    fit_specdec_plus,
    specdec_plus_arrays,
)


def likely_trace(positions=60, depth=4, top_k=10, seed=0) -> Trace:
    """Trees whose path follows the draft's own probabilities, and features that say how long it stays inside."""
    random = np.random.default_rng(seed)
    count = pool_size(depth, top_k)
    scores, tokens = np.zeros((positions, count), np.float32), np.zeros((positions, count), np.int32)
    beams, path = np.zeros((positions, depth, top_k), np.int16), np.full((positions, depth + 1), -1)
    for r in range(positions):
        sharp = random.uniform(0.3, 3.0)
        scores[r] = pool(random, depth, top_k, sharp)
        tokens[r] = np.arange(count) % top_k
        start = 0
        for n in range(depth):
            end = pool_size(n, top_k)
            beams[r, n], start = np.argsort(-scores[r, start:end], kind="stable")[:top_k], end
        path[r] = np.where(random.random(depth + 1) < np.exp(-1 / sharp / 2), 0, top_k + 1)  # 0: the first child
    nodes = path_nodes(tokens, beams, path)
    ranks = path_ranks(scores, nodes, top_k)
    inside = (ranks[:, depth] < 60).sum(-1)
    features = random.normal(size=(positions, 6)) * 0.1 + np.eye(6)[np.minimum(inside, 5)]
    columns = {
        "scores_10": scores,
        "tokens_10": tokens,
        "beams_10": beams,
        "ranks_10": ranks,
        "features": features.astype(np.float16),
        "context_tok": np.arange(positions, dtype=np.int32),
    }
    turns = pd.DataFrame(
        {"suite": ["toy"], "prompt": ["a"], "turn": 0, "part": "train", "first": 0, "positions": positions}
    )
    return Trace({"depth": depth, "top_ks": [10], "most_nodes": 240, "features": True}, turns, columns)


def test_arrays_hold_what_the_policies_will_see():
    trace = likely_trace(8)
    inputs, labels = disco_arrays(trace)
    policy, scores, ranks = Disco(), trace.trees(10).scores, trace.ranks[10]
    assert len(inputs) == 8 * 5
    for n, row in itertools.product(range(5), range(8)):
        seen = policy.observation(question(scores[row, : pool_size(n, 10)], n))
        np.testing.assert_allclose(inputs[n * 8 + row], seen, rtol=1e-6)
        assert labels[n * 8 + row] == (ranks[row, n, n] < 60)
    features, levels = specdec_plus_arrays(trace)
    accepted = trace.accepted_tok(np.arange(8), 10, 4, 60)
    assert levels.shape == (8, 13) and features.shape == (8, 6)
    for row in range(8):
        expected = [1] * accepted[row] + [0] + [-1] * 12
        assert levels[row].tolist() == [*expected[:5], *[-1] * 8]
    inputs, labels = c2t_arrays(trace)
    known = {
        (np.float32(s), np.float32(d / 10)) for row in scores for s, d in zip(row, node_depths(410, 10), strict=True)
    }
    assert {tuple(one) for one in inputs} <= known and labels.mean() == 0.5
    assert labels.sum() == (ranks[:, 4] < 410).sum()


def test_balanced_takes_all_of_the_rarer_kind():
    labels = np.array([True] * 3 + [False] * 10)
    chosen = balanced(labels, seed=1)
    assert sorted(chosen[:3]) == [0, 1, 2] and len(set(chosen[3:])) == 3 and not labels[chosen[3:]].any()
    with pytest.raises(SpecdecError, match="both kinds"):
        balanced(np.ones(4, dtype=bool))


def accuracy(probability, labels) -> float:
    """Mean of the shares that are right among positives and among negatives."""
    right = (probability >= 0.5) == labels
    return (right[labels].mean() + right[~labels].mean()) / 2


def test_fitted_classifiers_tell_the_kinds_apart(tmp_path):
    random = np.random.default_rng(0)
    inputs = random.uniform(0, 1, size=(2000, 12)).astype(np.float32)
    labels = inputs[:, 0] > 0.7  # 30 % positives
    options = dict(batch=16, epochs=4, rate=3e-3)
    _, curve = fit_disco(inputs, labels, out_dir=tmp_path / "disco", policy={"verify_nodes": 40}, **options)
    again = load_policy(tmp_path / "disco" / "policy")
    assert isinstance(again, Disco) and again.verify_nodes == 40
    assert accuracy(1 / (1 + np.exp(-again.network(inputs)[:, 0])), labels) > 0.9
    assert curve["loss"].is_monotonic_decreasing and len(curve) == 4
    inputs = np.stack((-random.exponential(3, 2000), random.integers(1, 9, 2000) / 10), 1).astype(np.float32)
    labels = inputs[:, 0] + 2 * inputs[:, 1] > -1
    c2t, _ = fit_c2t(inputs, labels, out_dir=tmp_path / "c2t", **options)
    assert accuracy(1 / (1 + np.exp(-c2t.network(inputs)[:, 0])), labels) > 0.9
    assert c2t.network.weights[0].shape == (64, 2)


def test_specdec_plus_learns_levels_from_features(tmp_path):
    random = np.random.default_rng(0)
    lengths = random.integers(0, 4, size=600)
    features = (np.eye(4)[lengths] + random.normal(size=(600, 4)) * 0.1).astype(np.float16)
    level = np.arange(4)
    labels = np.where(level < lengths[:, None], 1, np.where(level == lengths[:, None], 0, -1)).astype(np.int8)
    _, curve = fit_specdec_plus(features, labels, out_dir=tmp_path, hidden=64, epochs=8, rate=3e-3)
    policy = load_policy(tmp_path / "policy")
    assert policy.max_depth == 3
    for length in range(1, 4):
        asked = [question(pool(random, n), n, features=torch.eye(4)[length]) for n in range(3)]
        assert [policy.answer(one) for one in asked] == [n < length for n in range(3)]
    assert curve["accuracy"].iloc[-1] > 0.95


def test_opponents_stay_inside_the_recording(tmp_path, monkeypatch):
    trace = likely_trace(depth=6)
    monkeypatch.setattr(classifiers, "EPOCHS", dict.fromkeys(classifiers.EPOCHS, 1))
    rivals = classifiers.opponents(trace, tmp_path, depth=6)
    assert list(rivals) == ["DDD", "SVIP", "GammaTune", "C2T", "Disco", "SpecDec++"]
    assert all(policy.limits.depth <= 6 for policy in rivals.values())
    assert rivals["GammaTune"].default_depth == 4 and rivals["GammaTune"].most == 6
    assert load_policy(tmp_path / "disco" / "policy").max_depth == 6


def test_fitting_resumes_exactly_and_refuses_other_data(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(200, 12)).astype(np.float32), random.random(200) < 0.4
    whole, _ = fit_disco(inputs, labels, out_dir=tmp_path / "whole", epochs=3, batch=32, seed=4)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    calls = itertools.count()

    def breaks(*arguments):
        if next(calls) == 8:
            raise KeyboardInterrupt
        return loss(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.nn.functional, "binary_cross_entropy_with_logits", breaks)
        fit_disco(inputs, labels, out_dir=tmp_path / "killed", epochs=3, batch=32, seed=4)
    resumed, _ = fit_disco(inputs, labels, out_dir=tmp_path / "killed", epochs=3, batch=32, seed=4)
    for name, value in whole.network.arrays().items():
        np.testing.assert_array_equal(resumed.network.arrays()[name], value)
    with pytest.raises(SpecdecError, match="other settings"):
        fit_disco(inputs + 1, labels, out_dir=tmp_path / "killed", epochs=3, batch=32, seed=4)
    with pytest.raises(AssertionError, match="one label"):
        fit_disco(inputs, labels[:5], out_dir=tmp_path / "bad")
    with pytest.raises(AssertionError, match="same positions"):
        fit_specdec_plus(inputs, labels, out_dir=tmp_path / "bad")


def test_residual_network_equals_torch():
    torch.manual_seed(0)
    module, seen = classifiers._Residual(20, 32, 5), torch.randn(20)
    with torch.no_grad():
        np.testing.assert_allclose(
            classifiers.exported(module)(seen.numpy()), module(seen[None])[0], rtol=1e-5, atol=1e-6
        )
    with pytest.raises(KeyError, match="gate.bias"):
        ResidualNetwork({"gate.weight": np.zeros((2, 2))})
