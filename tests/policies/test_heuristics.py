"""The rules of LTD's Table 1 against trees computed by hand, and decoding with them."""

import math

import numpy as np
import pytest
import torch
from fakes.pairs import random_pair, shared_bigrams
from fakes.questions import asked, finished, pool, question

from specdec import autoregress, decode
from specdec.core.policy import Chain
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError
from specdec.policies import heuristics
from specdec.policies.base import Network
from specdec.policies.heuristics import C2T, DDD, SVIP, CopyGate, Disco, GammaTune, SpecDecPlus


def test_parents_of_the_newest_level_are_the_beam():
    scores = pool(np.random.default_rng(0), 3)
    newest, parents = heuristics.newest_level(question(scores[:10], 0))
    assert newest.shape == (1, 10) and parents.tolist() == [0]
    for n, begin, end in ((1, 0, 10), (2, 10, 110), (3, 110, 210)):
        newest, parents = heuristics.newest_level(question(scores[: pool_size(n, 10)], n))
        assert parents.tolist() == sorted(scores[begin:end].tolist(), reverse=True)[:10]
        np.testing.assert_array_equal(newest.ravel(), scores[end:][:100])
    pytest.raises(SpecdecError, heuristics.newest_level, question(scores[:22], 1)).match("k beams")


def test_entropies_are_lower_bounds():
    parent = np.float64(-1.5)
    nats = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    children = parent + np.log([0.5, 0.25])
    assert heuristics.child_entropy(children, parent) == pytest.approx(nats)
    certain = heuristics.child_entropy(np.array([0.0, -30.0]), np.float64(0))
    assert certain == pytest.approx(0, abs=1e-9)


def level(best_paths) -> np.ndarray:
    """A pool after 5 expansions whose newest level has these best scores."""
    scores = np.full(pool_size(5, 10), -50.0)
    scores[pool_size(4, 10) :][: len(best_paths)] = best_paths
    return scores


def test_ddd_looks_at_the_beams_mass():
    rule = DDD()
    assert rule.plan == rule.limits == TreeConfig(61, 12, 10) and rule.asks == {EXTEND}
    # exp(-0.3) = 0.741
    for chances, answer in (([0.2] * 3, False), ([0.25] * 3, True)):
        assert rule.answer(question(level(np.log(chances)), 5)) is answer
    # ten beams hold 0.7, all eleven nodes 0.77
    assert rule.answer(question(level(np.log([0.07] * 11)), 5)) is False
    for n in (0, 1, 4, 6, 8, 10, 11):
        assert rule.answer(question(np.full(pool_size(n, 10), -50.0), n)) is True


def test_svip_stops_at_high_entropy_of_the_best_path():
    flat = question(np.log(np.full(10, 0.02)), 0)
    nats = 10 * 0.02 * -math.log(0.02) + 0.8 * -math.log(0.8)
    edge = 1 - math.sqrt(0.15 * nats)
    assert SVIP(minimum=edge - 1e-5).answer(flat) is True
    assert SVIP(minimum=edge + 1e-5).answer(flat) is False


def test_gammatune_follows_acceptance_within_bounds():
    rule = GammaTune()
    ask = asked(PLAN)
    assert rule.limits == TreeConfig(61, 12, 10) and rule.answer(ask) == TreeConfig(61, 8, 10)
    rule.observe(finished(3, 9))
    assert rule.average_tok == pytest.approx(0.8 * 8 + 0.2 * 3) and rule.answer(ask).depth == 7
    rule.observe(finished(8, 8))
    assert rule.average_tok == pytest.approx(0.8 * 7 + 0.2 * 9)
    for accepted_tok, depth in ((0, 4), (30, 12)):
        for _ in range(40):
            rule.observe(finished(accepted_tok, 5))
        assert rule.answer(ask).depth == depth
    rule.reset()
    assert rule.answer(ask).depth == 8


def classifier(kind, weights, bias, **settings):
    """A classifier that is linear in its inputs."""
    policy = kind(**settings)
    policy.network = Network([np.float32([weights])], [np.float32([bias])], "relu")
    return policy


def test_disco_reads_best_paths_entropy_and_depth():
    scores = pool(np.random.default_rng(1), 2)
    seen = Disco().observation(question(scores, 2))
    newest, parents = heuristics.newest_level(question(scores, 2))
    best = sorted(newest.ravel().tolist(), reverse=True)[:10]
    nats = float(heuristics.child_entropy(newest[0], parents[0]))
    np.testing.assert_allclose(seen, [*np.exp(best), nats, 0.2], rtol=1e-5)
    assert seen.dtype == np.float32
    for more, answer in ((0.01, True), (-0.01, False)):
        policy = classifier(Disco, [10.0] + [0.0] * 11, -10 * float(seen[0]) + more)
        assert policy.answer(question(scores, 2)) is answer
    pytest.raises(SpecdecError, Disco().answer, question(scores, 2)).match("no network")


def test_specdec_plus_compares_each_levels_odds_once_per_cycle():
    scores = pool(np.random.default_rng(0), 4)
    features = torch.ones(6)
    policy = SpecDecPlus(max_depth=4, threshold=0.7)
    policy.network = constant_residual([0.9, 0.9, 0.8, 0.9, 0.6])
    questions = [question(scores[: pool_size(n, 10)], n, features=features) for n in range(5)]
    assert [policy.answer(ask) for ask in questions] == [True] * 4 + [False]
    policy.network = constant_residual([0.5] * 5)
    assert policy.answer(questions[1]) is True, "still the cycle's first answer"
    assert policy.answer(questions[0]) is False
    seen = policy.observation(question(scores, 0, features=torch.tensor([3.0, -4.0])))
    np.testing.assert_allclose(seen, np.array([3, -4]) / 12.5**0.5, rtol=1e-5)


def constant_residual(odds, features=6) -> heuristics.ResidualNetwork:
    """A residual network that gives these probabilities whatever it sees."""
    zeros = np.zeros((3, features))
    logits = np.log(odds) - np.log1p(-np.asarray(odds))
    arrays = (zeros, np.zeros(3), zeros, np.zeros(3), np.zeros((len(odds), 3)), logits)
    names = heuristics.ResidualNetwork.NAMES
    return heuristics.ResidualNetwork(dict(zip(names, arrays, strict=True)))


def test_c2t_counts_likely_nodes():
    scores = pool(np.random.default_rng(0), 3, scale=4.0)
    likely = int((scores >= -2).sum())
    assert C2T().asks == {SIZE} and C2T().plan == TreeConfig(61, 8, 10) and 1 < likely < 60
    for weights, bias, largest, answer in (
        ([1.0, 0.0], 2.0, 60, likely),  # likely: score of at least -2
        ([1.0, 0.0], 2.0, 2, 2),
        ([1.0, 0.0], -1.0, 60, 1),
        ([0.0, -10.0], 1.5, 60, 10),  # likely: depth 1 alone
    ):
        policy = classifier(C2T, weights, bias)
        assert policy.answer(question(scores, 3, SIZE, largest=largest)) == answer


def copies(*chances):
    return asked(PLAN, copied_scores=[math.log(chance) for chance in chances])


def test_copies_alone_if_they_promise_enough():
    gate = CopyGate()
    assert gate.plan == TreeConfig(8, 3, 3) and gate.copied.verify_nodes == 11
    # room for the tree and for the copies
    assert (gate.limits.total_tokens, gate.limits.depth) == (12, 3)
    shallow = CopyGate(tree=(1, 0, 1), copied_tokens=6).limits
    assert (shallow.total_tokens, shallow.depth, shallow.top_k) == (6, 0, 5)
    large = CopyGate(tree=(20, 4, 4, 2, 1), copied_tokens=12)
    assert large.plan == large.limits == TreeConfig(20, 4, 4, beam=(2, 1))
    # at least 0.8 * 2 - 1
    assert gate.answer(copies(0.5, 0.11)) is gate.copied
    assert gate.answer(copies(0.5, 0.09)) is gate.plan
    # two copies and the root: the best two of three
    few = CopyGate(copied_tokens=3, saved_frac=0.0)
    assert few.answer(copies(0.3, 0.2, 0.6)) is few.plan
    assert few.answer(copies(0.3, 0.2, 0.8)) is few.copied


def test_the_mean_of_drafted_trees_moves_within_a_turn():
    gate = CopyGate()
    gate.observe(finished(3, 3))
    assert gate.drafted == 1.4 and gate.enough_tok == pytest.approx(0.8 * 2.4 - 1)
    gate.observe(finished(9, 0))
    assert gate.drafted == 1.4, "nothing was drafted"
    gate.reset()
    assert gate.drafted == 1.0


def test_all_decode_losslessly():
    pair, prompt = shared_bigrams(), [3, 1, 4, 1, 5]
    plain = autoregress(pair, prompt, max_new_tokens=48).tokens
    early = DDD(layers=(1,), threshold=-0.75)
    for policy in (
        early,
        SVIP(minimum=0.43),
        GammaTune(default_depth=6),
        classifier(Disco, [1.0, *[0.0] * 11], -0.27),
        Chain(classifier(C2T, [1.0, 0.0], 3.2, max_depth=12), early),
    ):
        out = decode(pair, prompt, policy=policy, max_new_tokens=48)
        assert out.tokens == plain, policy
        choices = set(zip(out.cycles["draft_calls"], out.cycles["verify_nodes"], strict=True))
        assert len(choices) > 1, "it does decide"


def test_specdec_plus_reads_live_features():
    pair, prompt = random_pair(), [3, 1, 4, 1, 5]
    policy = SpecDecPlus()
    policy.network = constant_residual([0.9, 0.3] * 7, 3 * pair.target.hidden_size)
    out = decode(pair, prompt, policy=policy, max_new_tokens=24)
    assert out.tokens == autoregress(pair, prompt, max_new_tokens=24).tokens
    assert set(out.cycles["draft_calls"]) == {2}
    call = (decode, shared_bigrams(), prompt, policy)
    pytest.raises(SpecdecError, *call).match("no target features")
