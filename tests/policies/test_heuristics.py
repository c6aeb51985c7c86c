"""The heuristics of LTD's Table 1 against hand-computed trees, and their classifiers fitted to synthetic recordings."""

import itertools
import math
import types

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.pairs import bigram_pair, random_pair, shared_bigrams

from specdec import autoregress, decode
from specdec.core.policy import Chain, Static
from specdec.core.records import EXTEND, PLAN, SIZE, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError
from specdec.policies.base import Network, load_policy
from specdec.policies.heuristics import (
    C2T,
    DDD,
    SVIP,
    Disco,
    GammaTune,
    ResidualNetwork,
    SpecDecPlus,
    child_log_probs,
    entropy,
    grid_trees,
    newest_level,
    node_depths,
)
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


def pool(random, expansions, top_k=10, scale=1.0) -> np.ndarray:
    """Cumulative scores of a random tree in creation order, children descending below each parent."""
    scores, parents = [], np.zeros(1)
    for _ in range(expansions + 1):
        steps = -np.sort(random.exponential(scale, size=(len(parents), top_k)), axis=1)
        flat = (parents[:, None] + steps).reshape(-1)
        scores.append(flat)
        parents = np.sort(flat)[::-1][:top_k]
    return np.concatenate(scores).astype(np.float32)


def question(scores, expansions, kind=EXTEND, top_k=10, largest=1, features=None, plan=None) -> Question:
    start = 0 if expansions == 0 else pool_size(expansions - 1, top_k)
    tensor = torch.from_numpy(np.asarray(scores, np.float32))
    view = types.SimpleNamespace(scores=tensor, newest_scores=tensor[start:], features=features)
    return Question(kind, 20, expansions, 0, largest, plan or TreeConfig(61, 12, top_k), view)


def finished(accepted_tok, draft_calls):
    return types.SimpleNamespace(accepted_tok=accepted_tok, draft_calls=draft_calls)


# ---- reading scores --------------------------------------------------------------------------------------------------


def test_parents_of_the_newest_level_are_the_beam():
    random = np.random.default_rng(0)
    scores = pool(random, 3)
    newest, parents = newest_level(question(scores[:10], 0))
    assert newest.shape == (1, 10) and parents.tolist() == [0]
    for n in (1, 2, 3):
        newest, parents = newest_level(question(scores[: pool_size(n, 10)], n))
        before = scores[0 if n == 1 else pool_size(n - 2, 10) : pool_size(n - 1, 10)]
        assert parents.tolist() == sorted(before.tolist(), reverse=True)[:10]
        logs = child_log_probs(newest, parents)
        assert (logs <= 0).all() and np.isfinite(logs).all()
        np.testing.assert_allclose(logs + parents[:, None], newest, atol=1e-5)
    with pytest.raises(SpecdecError, match="static shape"):
        newest_level(question(scores[:22], 1))


def test_entropy_estimates():
    probs = np.array([0.5, 0.25])
    with_rest = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert entropy(np.log(probs)) == pytest.approx(with_rest)
    two_thirds = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert entropy(np.log(probs), "renormalised") == pytest.approx(two_thirds)
    assert entropy(np.array([0.0, -30.0])) == pytest.approx(0, abs=1e-9)  # a certain draft
    full = np.random.default_rng(0).dirichlet(np.ones(50))
    true = -(full * np.log(full)).sum()
    assert entropy(np.log(np.sort(full)[::-1][:10])) <= true  # a lower bound


# ---- rules -----------------------------------------------------------------------------------------------------------


def level(best_paths) -> np.ndarray:
    """A pool after 5 expansions whose newest level has these best scores, and nothing else worth a look."""
    scores = np.full(pool_size(5, 10), -50.0)
    scores[pool_size(4, 10) :][: len(best_paths)] = best_paths
    return scores


def test_ddd_looks_at_the_beams_mass_at_three_depths():
    rule = DDD()
    assert rule.plan == rule.limits == TreeConfig(61, 12, 10) and rule.asks == {EXTEND}
    low, high = level(np.log([0.2] * 3)), level(np.log([0.25] * 3))  # 0.6 and 0.75; exp(-0.3) = 0.741
    assert rule.answer(question(low, 5)) is False and rule.answer(question(high, 5)) is True
    assert DDD(statistic="best").answer(question(high, 5)) is False
    assert DDD(statistic="best").answer(question(level([-0.29]), 5)) is True
    eleven = level(np.log([0.07] * 11))  # ten beams hold 0.7, all eleven nodes 0.77
    assert rule.answer(question(eleven, 5)) is False
    for n in (0, 1, 2, 3, 4, 6, 8, 10, 11):
        assert rule.answer(question(np.full(pool_size(n, 10), -50.0), n)) is True


def root(probs) -> Question:
    return question(np.log(np.sort(probs)[::-1]), 0)


def test_svip_stops_at_high_entropy():
    flat, peaked = root(np.full(10, 0.02)), root([0.9, 0.05] + [0.001] * 8)
    nats = 10 * 0.02 * -math.log(0.02) + 0.8 * -math.log(0.8)
    assert 1 - math.sqrt(0.15 * nats) > 0.3  # by "bound" even this goes on: the estimate's entropy is bounded
    assert SVIP().answer(flat) is True and SVIP(minimum=0.7).answer(flat) is False
    assert SVIP(minimum=0.7).answer(peaked) is True
    assert SVIP(rule="distance").answer(flat) is False and SVIP(rule="distance").answer(peaked) is True
    edge = math.sqrt(0.15 * nats)
    assert SVIP(rule="distance", minimum=edge + 1e-5).answer(flat) is True
    assert SVIP(rule="distance", minimum=edge - 1e-5).answer(flat) is False


def test_svip_on_the_best_path_or_the_whole_beam():
    scores = pool(np.random.default_rng(0), 1, scale=0.3)
    scores[:10] = [-0.1, *np.linspace(-2.5, -4, 9)]
    scores[10:20] = -0.1 + np.log([0.95] + [0.001] * 9)  # certain after the best path
    scores[20:] = np.repeat(scores[1:10], 10) + math.log(0.05)  # unsure after all others
    ask = question(scores, 1)
    sharp = dict(rule="distance", minimum=0.25)
    assert SVIP(**sharp).answer(ask) is True and SVIP(node="mean", **sharp).answer(ask) is False


@pytest.mark.parametrize("wrong", [{"rule": "bounds"}, {"node": "worst"}])
def test_unknown_choices_are_refused(wrong):
    with pytest.raises(AssertionError):
        SVIP(**wrong)
    for kind, other in ((DDD, {"statistic": "sum"}), (SpecDecPlus, {"rule": "odds"})):
        with pytest.raises(AssertionError):
            kind(**other)
    for policy in (SVIP(estimate="full"), Disco(estimate="all")):
        with pytest.raises(AssertionError):
            policy.answer(question(pool(np.random.default_rng(0), 0), 0))


def test_gammatune_follows_acceptance_within_bounds():
    rule = GammaTune()
    ask = Question(PLAN, 20, 0, 0, rule.limits, None, None)
    assert rule.limits == TreeConfig(61, 12, 10) and rule.answer(ask) == TreeConfig(61, 8, 10)
    rule.observe(finished(3, 9))
    assert rule.average_tok == pytest.approx(0.8 * 8 + 0.2 * 3) and rule.answer(ask).depth == 7
    for _ in range(40):
        rule.observe(finished(0, 5))
    assert rule.answer(ask).depth == 4
    for _ in range(60):
        depth = rule.answer(ask).depth
        rule.observe(finished(depth + 1, depth + 1))
    assert rule.answer(ask).depth == 12
    rule.reset()
    assert rule.answer(ask).depth == 8
    for wrong in ({"eta": 0.0}, {"low": 1.5}, {"high": 0.5}):
        with pytest.raises(AssertionError):
            GammaTune(**wrong)


def test_the_grid_is_the_sheets():
    trees = grid_trees()
    assert len(trees) == 9 * 11 and trees[0] == TreeConfig(41, 4, 10) and trees[-1] == TreeConfig(241, 12, 10)


# ---- classifiers by hand ---------------------------------------------------------------------------------------------


def linear(weights, bias) -> Network:
    """A one-layer network."""
    return Network([np.float32([weights])], [np.float32([bias])], "relu")


def test_disco_reads_probabilities_entropy_and_depth():
    policy = Disco()
    scores = pool(np.random.default_rng(1), 2)
    seen = policy.observation(question(scores, 2))
    newest, parents = newest_level(question(scores, 2))
    assert seen.shape == (12,) and seen.dtype == np.float32 and seen[11] == np.float32(0.2)
    np.testing.assert_allclose(seen[:10], np.exp(sorted(newest.reshape(-1).tolist(), reverse=True)[:10]), rtol=1e-6)
    assert seen[10] == pytest.approx(float(entropy(child_log_probs(newest[0], parents[0]))), rel=1e-5)
    policy.network = linear([10.0] + [0.0] * 11, -10 * float(seen[0]) + 0.01)  # just above one half
    assert policy.answer(question(scores, 2)) is True
    policy.network = linear([10.0] + [0.0] * 11, -10 * float(seen[0]) - 0.01)
    assert policy.answer(question(scores, 2)) is False
    with pytest.raises(SpecdecError, match="top_k"):
        policy.answer(question(scores[:4], 0, top_k=4))


def constant_residual(odds, features=6) -> ResidualNetwork:
    """A residual network that gives these probabilities whatever it sees."""
    zeros, width = np.zeros((3, features)), len(odds)
    arrays = zeros, np.zeros(3), zeros, np.zeros(3), np.zeros((width, 3)), np.log(odds) - np.log1p(-np.asarray(odds))
    return ResidualNetwork(dict(zip(ResidualNetwork.NAMES, arrays, strict=True)))


def test_specdec_plus_compares_odds_and_runs_once_per_cycle():
    scores, features = pool(np.random.default_rng(0), 4), torch.ones(6)
    answers = {}
    for rule in ("level", "path"):
        policy = SpecDecPlus(max_depth=4, rule=rule, threshold=0.7)
        policy.network = constant_residual([0.9, 0.9, 0.8, 0.9, 0.6])  # products 0.9, 0.81, 0.648
        questions = (question(scores[: pool_size(n, 10)], n, features=features) for n in range(5))
        answers[rule] = [policy.answer(one) for one in questions]
    assert answers == {"level": [True] * 4 + [False], "path": [True, True, False, False, False]}
    policy.network = constant_residual([0.5] * 5)
    assert policy.answer(question(scores, 1, features=features)) is True  # still the cycle's first answer
    assert policy.answer(question(scores[:10], 0, features=features)) is False
    with pytest.raises(SpecdecError, match="features"):
        policy.answer(question(scores[:10], 0))


def test_residual_network_equals_torch():
    from specdec.training.classifiers import _Residual, exported

    torch.manual_seed(0)
    module, seen = _Residual(20, 32, 5), torch.randn(20)
    with torch.no_grad():
        np.testing.assert_allclose(exported(module)(seen.numpy()), module(seen[None])[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(KeyError, match="gate.bias"):
        ResidualNetwork({"gate.weight": np.zeros((2, 2))})


def test_c2t_counts_likely_nodes():
    policy = C2T()
    assert policy.asks == {SIZE} and policy.plan == TreeConfig(61, 8, 10)
    scores = pool(np.random.default_rng(0), 3, scale=4.0)
    policy.network = linear([1.0, 0.0], 2.0)  # likely: score of at least -2
    likely = int((scores >= -2).sum())
    assert 1 < likely < 60
    ask = question(scores, 3, SIZE, largest=60)
    assert policy.answer(ask) == likely
    assert policy.answer(question(scores, 3, SIZE, largest=2)) == 2
    policy.network = linear([1.0, 0.0], -1.0)
    assert policy.answer(ask) == 1
    policy.network = linear([1.0, 0.0], 99.0)
    assert policy.answer(ask) == 60
    policy.prunes, policy.network = False, linear([1.0, 0.0], -1.0)
    assert policy.answer(ask) == 60
    deep = C2T()
    deep.network = linear([0.0, -10.0], 1.5)  # likely: depth 1 alone
    assert deep.answer(ask) == 10


def test_node_depths():
    assert node_depths(pool_size(2, 3), 3).tolist() == [1] * 3 + [2] * 9 + [3] * 9


@pytest.mark.parametrize("kind", [Disco, SpecDecPlus, C2T])
def test_classifiers_refuse_what_they_cannot_do(kind):
    for wrong in ({"temperature": 1.0}, {"threshold": 0.0}):
        with pytest.raises(AssertionError):
            kind(**wrong)
    with pytest.raises(SpecdecError, match="no network"):
        kind().answer(question(pool(np.random.default_rng(0), 0), 0, features=torch.ones(6)))


# ---- fitting ---------------------------------------------------------------------------------------------------------


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


# ---- live ------------------------------------------------------------------------------------------------------------


def classifier(kind, weights, bias, **settings):
    """A classifier that is linear in its inputs."""
    policy = kind(**settings)
    policy.network = linear(weights, bias)
    return policy


def residual_policy(pair, seed=0) -> SpecDecPlus:
    """SpecDec++ with random weights of which features decide."""
    random, policy, features = np.random.default_rng(seed), SpecDecPlus(), 3 * pair.target.hidden_size
    shapes = (8, features), (8,), (8, features), (8,), (policy.max_depth + 1, 8), (policy.max_depth + 1,)
    arrays = {name: random.normal(size=shape) * 0.1 for name, shape in zip(ResidualNetwork.NAMES, shapes, strict=True)}
    arrays["head.weight"] *= 10
    policy.network = ResidualNetwork(arrays)
    return policy


def live_policies():
    yield DDD(layers=(1,), threshold=-0.75)
    yield SVIP(minimum=0.43)
    yield GammaTune(default_depth=6, eta=0.5)
    yield classifier(C2T, [1.0, 0.0], 3.2)
    yield classifier(Disco, [1.0, *[0.0] * 11], -0.27)
    yield Chain(classifier(C2T, [1.0, 0.0], 3.2, max_depth=12), DDD(layers=(1,), threshold=-0.75))


def test_all_decode_losslessly():
    pair, prompt = shared_bigrams(), [3, 1, 4, 1, 5]
    plain = autoregress(pair, prompt, max_new_tokens=48).tokens
    for policy in live_policies():
        out = decode(pair, prompt, policy=policy, max_new_tokens=48)
        assert out.tokens == plain, policy
        choices = set(zip(out.cycles["draft_calls"], out.cycles["verify_nodes"], strict=True))
        assert len(choices) > 1, policy  # it does decide


def test_specdec_plus_reads_live_features():
    pair, prompt = random_pair(), [3, 1, 4, 1, 5]
    policy = residual_policy(pair)
    out = decode(pair, prompt, policy=policy, max_new_tokens=24)
    assert out.tokens == autoregress(pair, prompt, max_new_tokens=24).tokens
    assert out.cycles["draft_calls"].nunique() > 1
    with pytest.raises(SpecdecError):
        decode(bigram_pair(), prompt, policy=policy, max_new_tokens=4)


def test_no_op_c2t_verifies_what_the_static_tree_does():
    pair, prompt = shared_bigrams(), [3, 1, 4]
    policy = classifier(C2T, [1.0, 0.0], 3.2, prunes=False)
    out = decode(pair, prompt, policy=policy, max_new_tokens=16).cycles
    static = decode(pair, prompt, policy=Static(61, 8, 10), max_new_tokens=16).cycles
    assert out[["verify_nodes", "accepted_tok"]].equals(static[["verify_nodes", "accepted_tok"]])
