"""The classifiers among the heuristics: what they learn from, read off a recording, and fitting
them.
"""

import hashlib
import itertools
import json

import numpy as np
import pytest
import torch
from fakes.killed import killed_at
from fakes.questions import pool, question
from fakes.traces import synthetic_trace

from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError
from specdec.policies.base import load_policy
from specdec.policies.heuristics import Disco, ResidualNetwork, node_depths, unit_features
from specdec.replays.trace import Trace

from workbook import classifiers, rules
from workbook.classifiers import (
    balanced,
    c2t_arrays,
    disco_arrays,
    fit_c2t,
    fit_disco,
    specdec_plus_arrays,
)


def likely_trace(positions=60, depth=4) -> Trace:
    """One turn of trees of k = 10."""
    options = dict(top_ks=(10,), most_nodes=240, features=6)
    return synthetic_trace(turns=1, positions=positions, depth=depth, **options)


def test_arrays_hold_what_the_policies_will_see_balanced_and_c2t_learns_from_paths():
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
    depths = np.tile(node_depths(410, 10) / 10, 8).astype(np.float32)
    assert {*map(tuple, inputs)} <= {
        *zip(scores.ravel(), depths, strict=True)
    } and labels.mean() == 0.5
    assert labels.sum() == (ranks[:, 4] < 410).sum()
    inputs, labels = disco_arrays(trace, max_depth=3, verify_nodes=5)
    assert inputs.shape == (3 * 8, 12) and inputs.dtype == np.float32 and labels.dtype == bool
    assert labels.tolist() == [bool(ranks[row, n, n] < 5) for n in range(3) for row in range(8)]
    assert len(disco_arrays(trace, max_depth=5)[0]) == len(disco_arrays(trace)[0]) == 5 * 8
    features, levels = specdec_plus_arrays(trace, max_depth=3, verify_nodes=5)
    accepted = trace.accepted_tok(np.arange(8), 10, 3, 5)
    assert features is trace.features and levels.dtype == np.int8 and levels.shape == (8, 4)
    assert levels.tolist() == [
        [1] * count + [0] * int(count < 4) + [-1] * (3 - count) for count in accepted
    ]
    blind = Trace({**trace.header, "features": False}, trace.turns, dict(trace._columns))
    pytest.raises(SpecdecError, specdec_plus_arrays, blind).match(r"record with features=True")
    inputs, labels = c2t_arrays(trace, max_depth=2, seed=3)
    assert (
        inputs.dtype == np.float32
        and labels.dtype == bool
        and inputs[:, 1].max() <= np.float32(0.3)
    )
    begin = 0
    for row in range(8):
        order = np.argsort(-scores[row, :210], kind="stable")
        path = [int(order[rank]) for rank in ranks[row, 2, :3] if rank < 210]
        if not path:
            continue
        some = slice(begin, begin + 2 * len(path))
        assert labels[some].tolist() == [True] * len(path) + [False] * len(path)
        expected = [[scores[row, node], node_depths(210, 10)[node] / 10] for node in path]
        np.testing.assert_array_equal(inputs[some][: len(path)], np.float32(expected))
        begin += 2 * len(path)
    assert begin == len(labels) > 0
    others = [c2t_arrays(trace, max_depth=2, seed=seed)[0].tolist() for seed in (3, 3, 4)]
    assert others[0] == others[1] != others[2]
    assert (
        c2t_arrays(trace, max_depth=2)[0].tolist()
        == c2t_arrays(trace, max_depth=2, seed=0)[0].tolist()
    )
    trace.ranks[10][:] = 10**4
    pytest.raises(SpecdecError, c2t_arrays, trace).match("no target path enters")
    labels = np.array([True] * 3 + [False] * 10)
    chosen = balanced(labels, seed=1)
    assert (
        sorted(chosen[:3]) == [0, 1, 2]
        and len(set(chosen[3:])) == 3
        and not labels[chosen[3:]].any()
    )
    pytest.raises(SpecdecError, balanced, np.ones(4, dtype=bool)).match("both kinds")
    torch.manual_seed(0)
    module, seen = classifiers._Residual(20, 32, 5), torch.randn(20)
    answer = module(seen[None])[0].detach()
    np.testing.assert_allclose(
        classifiers.exported(module)(seen.numpy()), answer, rtol=1e-5, atol=1e-6
    )
    pytest.raises(KeyError, ResidualNetwork, {"gate.weight": np.zeros((2, 2))}).match("gate.bias")


def accuracy(probability, labels) -> float:
    """Mean of the shares that are right among positives and among negatives."""
    right = (probability >= 0.5) == labels
    return (right[labels].mean() + right[~labels].mean()) / 2


def test_fitted_classifiers_tell_kinds_and_levels_apart(tmp_path):
    random = np.random.default_rng(0)
    inputs = random.uniform(0, 1, size=(2000, 12)).astype(np.float32)
    labels = inputs[:, 0] > 0.7  # 30 % positives
    options = dict(batch=16, epochs=4, rate=3e-3)
    _, curve = fit_disco(
        inputs, labels, out_dir=tmp_path / "disco", policy={"verify_nodes": 40}, **options
    )
    again = load_policy(tmp_path / "disco" / "policy")
    assert isinstance(again, Disco) and again.verify_nodes == 40
    assert accuracy(1 / (1 + np.exp(-again.network(inputs)[:, 0])), labels) > 0.9
    assert curve["loss"].is_monotonic_decreasing and len(curve) == 4
    inputs = np.stack((-random.exponential(3, 2000), random.integers(1, 9, 2000) / 10), 1).astype(
        np.float32
    )
    labels = inputs[:, 0] + 2 * inputs[:, 1] > -1
    c2t, _ = fit_c2t(inputs, labels, out_dir=tmp_path / "c2t", **options)
    assert accuracy(1 / (1 + np.exp(-c2t.network(inputs)[:, 0])), labels) > 0.9
    assert c2t.network.weights[0].shape == (64, 2)
    random = np.random.default_rng(0)
    lengths = random.integers(0, 4, size=600)
    features = (np.eye(4)[lengths] + random.normal(size=(600, 4)) * 0.1).astype(np.float16)
    level = np.arange(4)
    labels = np.where(
        level < lengths[:, None], 1, np.where(level == lengths[:, None], 0, -1)
    ).astype(np.int8)
    options = dict(out_dir=tmp_path, hidden=64, epochs=8, rate=3e-3)
    _, curve = classifiers.fit_specdec_plus(features, labels, **options)
    policy = load_policy(tmp_path / "policy")
    assert policy.max_depth == 3
    for length in range(1, 4):
        asked = [question(pool(random, n), n, features=torch.eye(4)[length]) for n in range(3)]
        assert [policy.answer(one) for one in asked] == [n < length for n in range(3)]
    assert curve["accuracy"].iloc[-1] > 0.95


def test_opponents_stay_inside_the_recording(tmp_path, monkeypatch):
    trace = likely_trace(depth=6)
    monkeypatch.setattr(classifiers, "EPOCHS", dict.fromkeys(classifiers.EPOCHS, 1))
    rivals = rules.opponents(trace, tmp_path, depth=6)
    assert list(rivals) == ["DDD", "SVIP", "GammaTune", "C2T", "Disco", "SpecDec++"]
    assert all(policy.limits.depth <= 6 for policy in rivals.values())
    assert rivals["GammaTune"].default_depth == 4 and rivals["GammaTune"].most == 6
    assert load_policy(tmp_path / "disco" / "policy").max_depth == 6


def test_fitting_resumes_exactly_and_what_it_notes_of_itself_is_so(tmp_path):
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(200, 12)).astype(np.float32), random.random(200) < 0.4
    whole, _ = fit_disco(inputs, labels, out_dir=tmp_path / "whole", epochs=3, batch=32, seed=4)
    again = dict(out_dir=tmp_path / "killed", epochs=3, batch=32, seed=4)
    with killed_at(torch.nn.functional, "binary_cross_entropy_with_logits", 8):
        fit_disco(inputs, labels, **again)
    resumed, _ = fit_disco(inputs, labels, **again)
    for name, value in whole.network.arrays().items():
        np.testing.assert_array_equal(resumed.network.arrays()[name], value)
    pytest.raises(SpecdecError, fit_disco, inputs + 1, labels, **again).match("other settings")
    pytest.raises(AssertionError, fit_disco, inputs, labels[:5], out_dir=tmp_path / "bad").match(
        "one label"
    )
    fit = classifiers.fit_specdec_plus
    pytest.raises(AssertionError, fit, inputs, labels, out_dir=tmp_path / "bad").match(
        "same positions"
    )
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(50, 12)).astype(np.float32), random.random(50) < 0.4
    options = dict(batch=7, epochs=2, seed=4, rate=0.01, policy={"verify_nodes": 40})
    policy, curve = fit_disco(inputs, labels, out_dir=tmp_path, hidden=16, **options)
    count = 2 * int(labels.sum())
    assert (
        policy.trained_for
        == load_policy(tmp_path / "policy").trained_for
        == {"examples": count, "epochs": 2}
    )
    assert list(curve) == ["step", "loss", "accuracy", "elapsed_s"] and curve["step"].tolist() == [
        0,
        1,
    ]
    plan = json.loads((tmp_path / "plan.json").read_text())
    data, shape = (
        hashlib.sha256(inputs.tobytes() + labels.tobytes()).hexdigest(),
        [[16, 12], [16], [1, 16], [1]],
    )
    told = {
        "kind": "Disco",
        "data": data,
        "shape": shape,
        "batch": 7,
        "seed": 4,
        "rate": 0.01,
        "steps": 2,
    }
    assert plan["settings"] == told
    assert plan["results"] == curve.iloc[-1][["loss", "accuracy"]].to_dict()
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(60, 2)).astype(np.float32), random.random(60) < 0.3
    found = {}
    for seed in (0, 1):
        policy, curve = fit_c2t(
            inputs, labels, out_dir=tmp_path / str(seed), epochs=1, rate=0.0, batch=16, seed=seed
        )
        sample = balanced(labels, seed)
        logits = torch.from_numpy(policy.network(inputs[sample])[:, 0])
        wanted = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(labels[sample]).float()
        )
        assert curve["loss"][0] == pytest.approx(float(wanted), rel=1e-5)
        assert curve["accuracy"][0] == ((logits.numpy() > 0) == labels[sample]).mean()
        found[seed] = policy.network.weights[0]
    assert (found[0] != found[1]).any() and (balanced(labels) == balanced(labels, 0)).all()
    again, _ = fit_c2t(
        inputs, labels, out_dir=tmp_path / "again", epochs=1, rate=0.0, batch=16, seed=0
    )
    assert (again.network.weights[0] == found[0]).all()


def test_specdec_plus_learns_only_from_labelled_levels(tmp_path, monkeypatch):
    labels = np.array([[1, 0, -1], [1, 1, 0], [0, -1, -1], [1, 1, 0]], np.int8)
    features = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float16)
    seen = {}

    def noted(kind, module, inputs, labels, options, row=None, column=None):
        seen.update(
            kind=kind,
            module=module,
            inputs=inputs,
            labels=labels,
            options=options,
            row=row,
            column=column,
        )
        return None, None

    monkeypatch.setattr(classifiers, "_fit", noted)
    fit_plus = classifiers.fit_specdec_plus
    fit_plus(features, labels, out_dir=tmp_path, hidden=7, seed=3, policy={"threshold": 0.6})
    assert seen["row"].tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 3]
    assert seen["column"].tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 2]
    assert seen["labels"].tolist() == [True, False, True, True, False, False, True, True, False]
    np.testing.assert_array_equal(seen["inputs"], unit_features(features))
    assert seen["options"] == classifiers.FitOptions(
        tmp_path, 5, seed=3, policy={"max_depth": 2, "threshold": 0.6}
    )
    shapes = [list(weight.shape) for weight in seen["module"].parameters()]
    assert (
        shapes == [[7, 5], [7], [7, 5], [7], [3, 7], [3]] and seen["kind"].__name__ == "SpecDecPlus"
    )
    for fit, width in ((fit_disco, 128), (fit_c2t, 64)):
        fit(np.zeros((3, 2)), [True, False, True], out_dir=tmp_path)
        assert seen["module"][0].weight.shape == (width, 2) and seen["options"].epochs == 50
        assert seen["column"] is None and seen["row"] is None
    fit_plus(features, labels, out_dir=tmp_path)
    assert seen["module"].gate.weight.shape == (1024, 5)
    assert classifiers.FitOptions(tmp_path, 1) == classifiers.FitOptions(
        tmp_path, 1, 1e-4, 256, 0, True, {}
    )


def test_a_classifier_is_fitted_by_its_name_to_the_tree_it_is_for(tmp_path, monkeypatch):
    trace, asked = likely_trace(8), []

    def fit(*examples, out_dir, **options):
        asked.append((examples, out_dir, options))
        return "fitted", None

    whole = {"C2T": {"max_depth", "top_k"}, "Disco": {"max_depth", "verify_nodes", "top_k"}}
    whole["SpecDec++"] = whole["Disco"]
    for name, (_, arrays, takes) in dict(classifiers._FITS).items():
        assert takes == whole[name]
        monkeypatch.setitem(classifiers._FITS, name, (fit, arrays, takes))
    tree = {"max_depth": 3, "verify_nodes": 5, "top_k": 10}
    found = classifiers.fitted("Disco", trace, str(tmp_path), seed=2, policy=tree)
    assert found == "fitted" and asked[0][1:] == (
        tmp_path,
        {"seed": 2, "policy": tree, "epochs": 50},
    )
    for got, wanted in zip(asked[0][0], disco_arrays(trace, **tree), strict=True):
        np.testing.assert_array_equal(got, wanted)
    classifiers.fitted("C2T", trace, tmp_path, policy=tree, epochs=1)
    np.testing.assert_array_equal(asked[1][0][0], c2t_arrays(trace, max_depth=3)[0])
    assert asked[1][2] == {"seed": 0, "policy": tree, "epochs": 1}
    assert classifiers.EPOCHS == {"Disco": 50, "C2T": 50, "SpecDec++": 5}, (
        "LTD's appendix A.1 and SpecDec++'s own"
    )
    del asked[:]
    rivals = rules.opponents(trace, tmp_path, seed=6)
    rivals_of = (("C2T", "c2t"), ("Disco", "disco"), ("SpecDec++", "specdec_plus"))
    told = {"seed": 6, "policy": {"max_depth": 12}}
    wanted = [
        (tmp_path / folder, told | {"epochs": classifiers.EPOCHS[name]})
        for name, folder in rivals_of
    ]
    assert [one[1:] for one in asked] == wanted
    assert (
        rivals["DDD"].limits.depth == rivals["SVIP"].limits.depth == 12
        and rivals["GammaTune"].default_depth == 8
    )
    rules.opponents(trace, tmp_path)
    assert asked[-1][2]["seed"] == 0
