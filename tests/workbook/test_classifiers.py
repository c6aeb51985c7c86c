"""The classifiers among the heuristics: what they learn from, read off a recording, and fitting."""

import itertools

import numpy as np
import pytest
import torch
from fakes.killed import killed_at
from fakes.questions import question
from fakes.traces import synthetic_trace

from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError
from specdec.policies.base import load_policy
from specdec.policies.heuristics import Disco, node_depths
from specdec.replays.trace import Trace

from workbook import classifiers, rules
from workbook.classifiers import balanced, c2t_arrays, disco_arrays, fit, specdec_plus_arrays


def likely_trace(positions=60, depth=4) -> Trace:
    """One turn of trees of k = 10."""
    options = dict(top_ks=(10,), most_nodes=240, features=6)
    return synthetic_trace(turns=1, positions=positions, depth=depth, **options)


def test_disco_sees_what_its_policy_will_see():
    trace = likely_trace(8)
    inputs, labels = disco_arrays(trace)
    policy, scores, ranks = Disco(), trace.trees(10).scores, trace.ranks[10]
    assert len(inputs) == 8 * 5 and inputs.dtype == np.float32
    for n, row in itertools.product(range(5), range(8)):
        seen = policy.observation(question(scores[row, : pool_size(n, 10)], n))
        np.testing.assert_allclose(inputs[n * 8 + row], seen, rtol=1e-6)
        assert labels[n * 8 + row] == (ranks[row, n, n] < 60)
    inputs, labels = disco_arrays(trace, max_depth=3, verify_nodes=5)
    assert labels.tolist() == [bool(ranks[row, n, n] < 5) for n in range(3) for row in range(8)]


@pytest.mark.parametrize(("max_depth", "verify_nodes"), [(12, 60), (3, 5)])
def test_specdec_plus_has_a_label_for_every_level_that_was_reached(max_depth, verify_nodes):
    trace = likely_trace(8)
    features, levels = specdec_plus_arrays(trace, max_depth=max_depth, verify_nodes=verify_nodes)
    deepest = min(4, max_depth)
    accepted = trace.accepted_tok(np.arange(8), 10, deepest, verify_nodes)
    assert features is trace.features and levels.shape == (8, max_depth + 1)
    for row in range(8):
        expected = ([1] * accepted[row] + [0] + [-1] * 12)[: deepest + 1]
        assert levels[row].tolist() == expected + [-1] * (max_depth - deepest)


def test_c2t_has_the_target_path_and_as_many_others():
    trace = likely_trace(8)
    scores, ranks = trace.trees(10).scores, trace.ranks[10]
    inputs, labels = c2t_arrays(trace, max_depth=2, seed=3)
    assert labels.mean() == 0.5 and inputs[:, 1].max() <= np.float32(0.3)
    begin = 0
    for row in range(8):
        order = np.argsort(-scores[row, :210], kind="stable")
        path = [int(order[rank]) for rank in ranks[row, 2, :3] if rank < 210]
        part = slice(begin, begin + 2 * len(path))
        assert labels[part].tolist() == [True] * len(path) + [False] * len(path)
        expected = [[scores[row, node], node_depths(210, 10)[node] / 10] for node in path]
        if path:
            np.testing.assert_array_equal(inputs[part][: len(path)], np.float32(expected))
        begin += 2 * len(path)
    assert begin == len(labels) > 0
    draws = [c2t_arrays(trace, max_depth=2, seed=seed)[0].tolist() for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


def test_a_balanced_sample_has_all_of_the_rarer_kind():
    labels = np.array([True] * 3 + [False] * 10)
    chosen = balanced(labels, seed=1)
    assert sorted(chosen[:3]) == [0, 1, 2] and len(set(chosen[3:])) == 3
    assert not labels[chosen[3:]].any()
    assert (balanced(labels) == balanced(labels, 0)).all()


def accuracy(classifier, inputs, labels) -> float:
    """Mean of the shares that are right among positives and among negatives."""
    right = (classifier.network(inputs)[:, 0] > 0) == labels
    return (right[labels].mean() + right[~labels].mean()) / 2


def test_fitted_classifiers_tell_kinds_apart(tmp_path):
    random = np.random.default_rng(0)
    options = dict(batch=16, epochs=4, rate=3e-3)
    inputs = random.uniform(0, 1, size=(2000, 12)).astype(np.float32)
    labels = inputs[:, 0] > 0.7  # 30 % positives
    policy = {"verify_nodes": 40}
    _, curve = fit("Disco", inputs, labels, tmp_path / "disco", policy=policy, **options)
    again = load_policy(tmp_path / "disco" / "policy")
    assert isinstance(again, Disco) and again.verify_nodes == 40
    assert again.network.weights[0].shape == (128, 12)
    assert accuracy(again, inputs, labels) > 0.9
    assert curve["loss"].is_monotonic_decreasing and len(curve) == 4
    columns = (-random.exponential(3, 2000), random.integers(1, 9, 2000) / 10)
    inputs = np.stack(columns, 1).astype(np.float32)
    labels = inputs[:, 0] + 2 * inputs[:, 1] > -1
    c2t, _ = fit("C2T", inputs, labels, tmp_path / "c2t", policy={}, **options)
    assert accuracy(c2t, inputs, labels) > 0.9 and c2t.network.weights[0].shape == (64, 2)


def test_fitting_resumes_exactly(tmp_path):
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(200, 12)).astype(np.float32), random.random(200) < 0.4
    options = dict(epochs=3, batch=32, seed=4, policy={})
    whole, _ = fit("Disco", inputs, labels, tmp_path / "whole", **options)
    with killed_at(torch.nn.functional, "binary_cross_entropy_with_logits", 8):
        fit("Disco", inputs, labels, tmp_path / "killed", **options)
    resumed, _ = fit("Disco", inputs, labels, tmp_path / "killed", **options)
    for name, value in whole.network.arrays().items():
        np.testing.assert_array_equal(resumed.network.arrays()[name], value)
    with pytest.raises(SpecdecError, match="other settings"):
        fit("Disco", inputs + 1, labels, tmp_path / "killed", **options)


def test_opponents_stay_inside_the_recording(tmp_path, monkeypatch):
    trace = likely_trace(depth=6)
    assert classifiers.EPOCHS == {"Disco": 50, "C2T": 50, "SpecDec++": 5}
    monkeypatch.setattr(classifiers, "EPOCHS", dict.fromkeys(classifiers.EPOCHS, 1))
    rivals = rules.opponents(trace, tmp_path, depth=6)
    assert list(rivals) == ["DDD", "SVIP", "GammaTune", "C2T", "Disco", "SpecDec++"]
    assert all(policy.limits.depth <= 6 for policy in rivals.values())
    assert rivals["GammaTune"].default_depth == 4 and rivals["GammaTune"].most == 6
    assert load_policy(tmp_path / "disco" / "policy").max_depth == 6
