"""The heuristics of LTD's Table 1 against hand-computed trees, and decoding with them."""

import math

import numpy as np
import pytest
import torch
from fakes.pairs import bigram_pair, random_pair, shared_bigrams
from fakes.questions import asked, finished, pool, question

from specdec import autoregress, decode
from specdec.core.policy import Chain, Static
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError
from specdec.policies import heuristics
from specdec.policies.base import Network
from specdec.policies.heuristics import (
    C2T,
    DDD,
    SVIP,
    Disco,
    GammaTune,
    ResidualNetwork,
    SpecDecPlus,
)


def test_parents_of_the_newest_level_are_the_beam_and_entropies_estimates():
    random = np.random.default_rng(0)
    scores = pool(random, 3)
    newest, parents = heuristics.newest_level(question(scores[:10], 0))
    assert newest.shape == (1, 10) and parents.tolist() == [0]
    for n in (1, 2, 3):
        newest, parents = heuristics.newest_level(question(scores[: pool_size(n, 10)], n))
        before = scores[0 if n == 1 else pool_size(n - 2, 10) : pool_size(n - 1, 10)]
        assert parents.tolist() == sorted(before.tolist(), reverse=True)[:10]
        logs = heuristics.child_log_probs(newest, parents)
        assert (logs <= 0).all() and np.isfinite(logs).all()
        np.testing.assert_allclose(logs + parents[:, None], newest, atol=1e-5)
    pytest.raises(SpecdecError, heuristics.newest_level, question(scores[:22], 1)).match(
        "static shape"
    )
    assert heuristics.node_depths(pool_size(2, 3), 3).tolist() == [1] * 3 + [2] * 9 + [3] * 9
    probs = np.array([0.5, 0.25])
    with_rest = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert heuristics.entropy(np.log(probs)) == pytest.approx(with_rest)
    two_thirds = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert heuristics.entropy(np.log(probs), "renormalised") == pytest.approx(two_thirds)
    assert heuristics.entropy(np.array([0.0, -30.0])) == pytest.approx(
        0, abs=1e-9
    )  # a certain draft
    full = np.random.default_rng(0).dirichlet(np.ones(50))
    true = -(full * np.log(full)).sum()
    assert heuristics.entropy(np.log(np.sort(full)[::-1][:10])) <= true  # a lower bound


def level(best_paths) -> np.ndarray:
    """A pool after 5 expansions whose newest level has these best scores, and nothing else worth a
    look.
    """
    scores = np.full(pool_size(5, 10), -50.0)
    scores[pool_size(4, 10) :][: len(best_paths)] = best_paths
    return scores


def test_ddd_looks_at_the_beams_mass_and_gammatune_follows_acceptance():
    rule = DDD()
    assert rule.plan == rule.limits == TreeConfig(61, 12, 10) and rule.asks == {EXTEND}
    low, high = (
        level(np.log([0.2] * 3)),
        level(np.log([0.25] * 3)),
    )  # 0.6 and 0.75; exp(-0.3) = 0.741
    assert rule.answer(question(low, 5)) is False and rule.answer(question(high, 5)) is True
    assert DDD(statistic="best").answer(question(high, 5)) is False
    assert DDD(statistic="best").answer(question(level([-0.29]), 5)) is True
    eleven = level(np.log([0.07] * 11))  # ten beams hold 0.7, all eleven nodes 0.77
    assert rule.answer(question(eleven, 5)) is False
    for n in (0, 1, 2, 3, 4, 6, 8, 10, 11):
        assert rule.answer(question(np.full(pool_size(n, 10), -50.0), n)) is True
    rule = GammaTune()
    ask = asked(PLAN)
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
        pytest.raises(AssertionError, GammaTune, **wrong)


def test_svip_stops_at_high_entropy_of_the_best_path_or_the_whole_beam():
    chances = np.full(10, 0.02), [0.9, 0.05] + [0.001] * 8
    flat, peaked = (question(np.log(one), 0) for one in chances)
    nats = 10 * 0.02 * -math.log(0.02) + 0.8 * -math.log(0.8)
    assert (
        1 - math.sqrt(0.15 * nats) > 0.3
    )  # by "bound" even this goes on: the estimate's entropy is bounded
    assert SVIP().answer(flat) is True and SVIP(minimum=0.7).answer(flat) is False
    assert SVIP(minimum=0.7).answer(peaked) is True
    assert (
        SVIP(rule="distance").answer(flat) is False and SVIP(rule="distance").answer(peaked) is True
    )
    edge = math.sqrt(0.15 * nats)
    assert SVIP(rule="distance", minimum=edge + 1e-5).answer(flat) is True
    assert SVIP(rule="distance", minimum=edge - 1e-5).answer(flat) is False
    scores = pool(np.random.default_rng(0), 1, scale=0.3)
    scores[:10] = [-0.1, *np.linspace(-2.5, -4, 9)]
    scores[10:20] = -0.1 + np.log([0.95] + [0.001] * 9)  # certain after the best path
    scores[20:] = np.repeat(scores[1:10], 10) + math.log(0.05)  # unsure after all others
    ask = question(scores, 1)
    sharp = dict(rule="distance", minimum=0.25)
    assert SVIP(**sharp).answer(ask) is True and SVIP(node="mean", **sharp).answer(ask) is False


def classifier(kind, weights, bias, **settings):
    """A classifier that is linear in its inputs."""
    policy = kind(**settings)
    policy.network = Network([np.float32([weights])], [np.float32([bias])], "relu")
    return policy


def test_classifiers_read_what_they_should_compare_odds_once_per_cycle_and_count_likely_nodes():
    policy = Disco()
    scores = pool(np.random.default_rng(1), 2)
    seen = policy.observation(question(scores, 2))
    newest, parents = heuristics.newest_level(question(scores, 2))
    assert seen.shape == (12,) and seen.dtype == np.float32 and seen[11] == np.float32(0.2)
    np.testing.assert_allclose(
        seen[:10], np.exp(sorted(newest.reshape(-1).tolist(), reverse=True)[:10]), rtol=1e-6
    )
    nats = heuristics.entropy(heuristics.child_log_probs(newest[0], parents[0]))
    assert seen[10] == pytest.approx(float(nats), rel=1e-5)
    for more, answer in ((0.01, True), (-0.01, False)):  # just above one half, and below
        policy = classifier(Disco, [10.0] + [0.0] * 11, -10 * float(seen[0]) + more)
        assert policy.answer(question(scores, 2)) is answer
    pytest.raises(SpecdecError, policy.answer, question(scores[:4], 0, top_k=4)).match("top_k")
    scores, features = pool(np.random.default_rng(0), 4), torch.ones(6)
    answers = {}
    for rule in ("level", "path"):
        policy = SpecDecPlus(max_depth=4, rule=rule, threshold=0.7)
        policy.network = constant_residual([0.9, 0.9, 0.8, 0.9, 0.6])  # products 0.9, 0.81, 0.648
        questions = (question(scores[: pool_size(n, 10)], n, features=features) for n in range(5))
        answers[rule] = [policy.answer(one) for one in questions]
    assert answers == {"level": [True] * 4 + [False], "path": [True, True, False, False, False]}
    policy.network = constant_residual([0.5] * 5)
    assert (
        policy.answer(question(scores, 1, features=features)) is True
    )  # still the cycle's first answer
    assert policy.answer(question(scores[:10], 0, features=features)) is False
    pytest.raises(SpecdecError, policy.answer, question(scores[:10], 0)).match("features")
    scores = pool(np.random.default_rng(0), 3, scale=4.0)
    likely = int((scores >= -2).sum())
    assert C2T().asks == {SIZE} and C2T().plan == TreeConfig(61, 8, 10) and 1 < likely < 60
    for weights, bias, prunes, largest, answer in (
        ([1.0, 0.0], 2.0, True, 60, likely),  # likely: score of at least -2
        ([1.0, 0.0], 2.0, True, 2, 2),
        ([1.0, 0.0], -1.0, True, 60, 1),
        ([1.0, 0.0], 99.0, True, 60, 60),
        ([1.0, 0.0], -1.0, False, 60, 60),
        ([0.0, -10.0], 1.5, True, 60, 10),  # likely: depth 1 alone
    ):
        policy = classifier(C2T, weights, bias, prunes=prunes)
        assert policy.answer(question(scores, 3, SIZE, largest=largest)) == answer


def constant_residual(odds, features=6) -> ResidualNetwork:
    """A residual network that gives these probabilities whatever it sees."""
    zeros, width = np.zeros((3, features)), len(odds)
    arrays = (
        zeros,
        np.zeros(3),
        zeros,
        np.zeros(3),
        np.zeros((width, 3)),
        np.log(odds) - np.log1p(-np.asarray(odds)),
    )
    return ResidualNetwork(dict(zip(ResidualNetwork.NAMES, arrays, strict=True)))


def test_unknown_choices_and_what_classifiers_cannot_do_are_refused():
    asked = question(pool(np.random.default_rng(0), 0), 0, features=torch.ones(6))
    wrong = [(SVIP, {"rule": "bounds"}), (SVIP, {"node": "worst"}), (DDD, {"statistic": "sum"})]
    for kind in (Disco, SpecDecPlus, C2T):
        wrong += [(kind, {"temperature": 1.0}), (kind, {"threshold": 0.0})]
        pytest.raises(SpecdecError, kind().answer, asked).match("no network")
    for kind, settings in (*wrong, (SpecDecPlus, {"rule": "odds"})):
        pytest.raises(AssertionError, kind, **settings)
    for policy in (SVIP(estimate="full"), Disco(estimate="all")):
        pytest.raises(AssertionError, policy.answer, asked)


def test_all_decode_losslessly():
    pair, prompt, early = shared_bigrams(), [3, 1, 4, 1, 5], DDD(layers=(1,), threshold=-0.75)
    plain = autoregress(pair, prompt, max_new_tokens=48).tokens
    for policy in (
        early,
        SVIP(minimum=0.43),
        GammaTune(default_depth=6, eta=0.5),
        classifier(C2T, [1.0, 0.0], 3.2),
        classifier(Disco, [1.0, *[0.0] * 11], -0.27),
        Chain(classifier(C2T, [1.0, 0.0], 3.2, max_depth=12), early),
    ):
        out = decode(pair, prompt, policy=policy, max_new_tokens=48)
        assert out.tokens == plain, policy
        choices = set(zip(out.cycles["draft_calls"], out.cycles["verify_nodes"], strict=True))
        assert len(choices) > 1, policy  # it does decide


def test_specdec_plus_reads_live_features_and_no_op_c2t_verifies_the_static_tree():
    pair, prompt = random_pair(), [3, 1, 4, 1, 5]
    random, policy, features = np.random.default_rng(0), SpecDecPlus(), 3 * pair.target.hidden_size
    shapes = (
        (8, features),
        (8,),
        (8, features),
        (8,),
        (policy.max_depth + 1, 8),
        (policy.max_depth + 1,),
    )
    arrays = {
        name: random.normal(size=shape) * 0.1
        for name, shape in zip(ResidualNetwork.NAMES, shapes, strict=True)
    }
    policy.network = ResidualNetwork(arrays | {"head.weight": 10 * arrays["head.weight"]})
    out = decode(pair, prompt, policy=policy, max_new_tokens=24)
    assert out.tokens == autoregress(pair, prompt, max_new_tokens=24).tokens
    assert out.cycles["draft_calls"].nunique() > 1
    pytest.raises(SpecdecError, decode, bigram_pair(), prompt, policy=policy, max_new_tokens=4)
    pair, prompt = shared_bigrams(), [3, 1, 4]
    policy = classifier(C2T, [1.0, 0.0], 3.2, prunes=False)
    out = decode(pair, prompt, policy=policy, max_new_tokens=16).cycles
    static = decode(pair, prompt, policy=Static(61, 8, 10), max_new_tokens=16).cycles
    assert out[["verify_nodes", "accepted_tok"]].equals(static[["verify_nodes", "accepted_tok"]])
