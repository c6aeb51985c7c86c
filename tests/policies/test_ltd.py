"""LTD's two policies: what they see on live trees, when they are asked, what answers do."""

import dataclasses

import numpy as np
import pytest
import torch
from fakes import questions
from fakes.pairs import random_pair, shared_bigrams, shared_pair

import specdec
from specdec.core.policy import Chain
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies import ltd, resps
from specdec.policies.base import Network, load_policy
from specdec.policies.ltd import DepthPolicy, RandomDepth, SizePolicy, combine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LARGEST = TreeConfig(61, 12, 10)


def armed(policy, hidden=(32, 16), seed=0):
    """The policy with a random network, biases included."""
    random, network = np.random.default_rng(seed), policy.fill_at_random(hidden, seed).network
    network.biases = [np.float32(random.normal(size=len(bias)) * 0.1) for bias in network.biases]
    return policy


def asked(kind, expansions=0, cycle=1, plan=LARGEST, context_tok=700, **seen):
    return questions.asked(kind, expansions, cycle, plan, context_tok, **seen)


def slow(tree) -> tuple[list[float], list[float]]:
    """Scores of the deepest level, best parent first; entropies below each expanded node."""
    score, parent, depth = tree.score.tolist(), tree.parent.tolist(), tree.depth.tolist()
    children = {}
    for node in range(1, len(score)):
        children.setdefault(parent[node], []).append(node)
    inner = sorted(children, key=lambda node: (depth[node], -score[node]))
    newest, entropies = [], []
    for node in inner:
        steps = np.array([score[child] - score[node] for child in children[node]])
        entropies.append(-float((np.exp(steps) * steps).sum()))
        if depth[node] == max(depth) - 1:
            newest += sorted((score[child] for child in children[node]), reverse=True)
    return newest, entropies


def committed_tok(engine) -> int:
    """Tokens before the root, counted by hand: the last new token is the root."""
    return len(PROMPT) + len(engine.tokens) - 1


@pytest.mark.parametrize("pair", [shared_pair(), shared_bigrams()], ids=["eagle", "bigrams"])
def test_depth_observation_on_live_trees(pair):
    policy = armed(DepthPolicy(depth=5, total_tokens=20, temperature=100.0))  # a coin
    seen = []

    def look(question):
        if question.expansions == 0:
            return
        expected = slow(question.view.growing.whole())[0]
        expected += [committed_tok(question.view) / 1000] * 14 + [question.expansions / 10] * 14
        found = policy.observation(question)
        assert found.dtype == np.float32 and found.shape == (policy.observation_size,) == (128,)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        seen.append(question.expansions)

    specdec.decode(pair, PROMPT, questions.Watch(policy, look), 32)
    assert {1, 2, 3} <= set(seen) <= {1, 2, 3, 4}


def size_expectation(question, parts) -> list[float]:
    tree, engine = question.view.growing.whole(), question.view
    scores, entropies = tree.score[1:].tolist(), slow(tree)[1]
    values = {
        "scores": scores + [0.0] * (1210 - len(scores)),
        "length": [committed_tok(engine) / 1000] * 29,
        "depth": [question.expansions / 10] * 29,
        "hidden": engine.features.tolist(),
        "entropy": entropies + [0.0] * (121 - len(entropies)),
    }
    return [value for part in parts for value in values[part]]


@pytest.mark.parametrize("name", ltd.OBSERVATIONS)
def test_size_observation_on_live_trees(name):
    pair, parts, sizes = shared_pair(), ltd.OBSERVATIONS[name], set()
    width = 3 * pair.target.hidden_size
    policy = armed(SizePolicy(parts=parts, features_size=width, temperature=1.0))

    def look(question):
        found = policy.observation(question)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, size_expectation(question, parts), rtol=1e-5, atol=1e-6)
        sizes.add(len(question.scores))

    chain = Chain(RandomDepth(SizePolicy(), 2), questions.Watch(policy, look))
    specdec.decode(pair, PROMPT, chain, 12)
    assert len(sizes) > 2


def test_quirks_of_the_depth_policys_observation():
    for context_tok in (50, 700):  # the two lengths of the sheet's check
        question = asked(EXTEND, 3, context_tok=context_tok, newest_scores=torch.zeros(100))
        for constant, length in ((True, 0.01), (False, context_tok / 1000)):
            seen = DepthPolicy(constant_length=constant).observation(question)
            assert seen[100:114].tolist() == [np.float32(length)] * 14
    policy = DepthPolicy(ask_at_zero=True)
    newest = torch.linspace(-4, -1, 100)
    expected = newest.numpy().copy()
    policy.observation(asked(EXTEND, 2, newest_scores=newest))
    newest.zero_()  # the engine uses its memory again
    seen = policy.observation(asked(EXTEND, 0, newest_scores=torch.ones(10)))
    np.testing.assert_array_equal(seen[:100], expected)
    assert policy.meaning(0, asked(EXTEND, 0)) is True, "whatever the answer"
    root = DepthPolicy(from_root=True)
    seen = root.observation(asked(EXTEND, 0, newest_scores=newest[:10]))
    assert seen[:100].tolist() == [0.0] * 10 + [-20.0] * 90
    assert root.decides(asked(EXTEND, 0)) and root.meaning(0, asked(EXTEND, 0)) is False


def test_the_best_probabilities():
    tree, scores = TreeConfig(4, 1, 2), [-0.5, -2.0, -0.6, -3.0, -7.0, -2.0]
    question = asked(SIZE, 1, plan=tree, largest=6, scores=torch.tensor(scores))
    # ten candidates at most
    for best, padding in ((3, 0), (8, 2), (99, 4)):
        policy = SizePolicy(
            sizes=(1, 3), depth=2, top_k=2, drafted=1, exponentiated=True, best=best
        )
        probs = np.exp(sorted(scores, reverse=True))[:best]
        expected = [*probs, *[0.0] * padding, *[0.7] * 29, *[0.1] * 29]
        np.testing.assert_allclose(policy.observation(question), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "cycle", "queried"),
    [
        ({}, 0, range(1, 12)),
        (dict(stride=5, depth=7), 1, [5]),
        (dict(ask_at_zero=True), 1, range(12)),
        (dict(first_depth=8), 0, []),
    ],
)
def test_when_the_depth_policy_is_asked(settings, cycle, queried):
    policy = DepthPolicy(**settings)
    levels = range(policy.depth)
    decided = [n for n in levels if policy.decides(asked(EXTEND, n, cycle, policy.plan))]
    assert decided == list(queried)


def fixed(policy, action):
    """The policy with a network that always chooses `action`."""
    weights = [np.zeros((4, policy.observation_size)), np.zeros((policy.actions, 4))]
    biases = [np.zeros(4), np.arange(policy.actions) == action]
    policy.network = Network(weights, biases, policy.activation)
    return policy


def shapes(policy, new_tok=16) -> list[tuple[int, int]]:
    rows = specdec.decode(shared_bigrams(), PROMPT, policy, new_tok).rows
    return [(row.expansions, row.verify_nodes) for row in rows]


def test_what_constant_networks_draft_and_verify():
    for settings, stop, go in (
        ({}, 1, 12),
        ({"stride": 3, "depth": 5}, 3, 5),
        ({"from_root": True}, 0, 12),
    ):
        for action, expected in ((0, stop), (1, go)):
            policy = fixed(DepthPolicy(total_tokens=11, **settings), action)
            assert set(shapes(policy)) == {(expected, 10)}
    assert set(shapes(fixed(SizePolicy(drafted=3), 1), 8)) == {(3, 40)}
    pair = combine(fixed(ltd.OFFICIAL.depth.policy(), 0), fixed(ltd.OFFICIAL.size.policy(), 23))
    first, *later = shapes(pair, 24)
    assert first == (8, 59) and set(later) == {(3, 240)}
    shallow = fixed(DepthPolicy(), 0)
    size = fixed(SizePolicy(sizes=ltd.OFFICIAL_SIZES), 23)
    assert set(shapes(combine(shallow, size), 4)) == {(1, 110)}, "all there is"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("preset", ltd.CONFIGS)
def test_text_equals_plain_decoding(preset, temperature):
    config, pair = ltd.CONFIGS[preset], random_pair(vocab_size=40, seed=5)
    of_resps = dataclasses.replace(resps.CONFIGS[preset], interval=2, hidden_size=32)
    depth, size = armed(config.depth.policy()), armed(config.size.policy(), seed=1)
    grid = armed(of_resps.policy(3 * pair.target.hidden_size))
    settings = dict(max_new_tokens=12, temperature=temperature, seed=3)
    plain = specdec.autoregress(pair, PROMPT, **settings).tokens
    for policy in (depth, size, combine(depth, size), grid):
        assert specdec.decode(pair, PROMPT, policy, **settings).tokens == plain


def test_what_is_refused(tmp_path):
    pytest.raises(SpecdecError, DepthPolicy().save, tmp_path).match("no network yet")
    policy = armed(SizePolicy(parts=ltd.OBSERVATIONS["+hidden"], features_size=6))
    wrong = asked(SIZE, 1, scores=torch.zeros(110), features=torch.zeros(8))
    pytest.raises(SpecdecError, policy.answer, wrong).match("reads 6 numbers, .* gives 8")
    pytest.raises(SpecdecError, SizePolicy, parts=("scores", "colour")).match("colour")
    for depth in (DepthPolicy(top_k=8), DepthPolicy(depth=13), DepthPolicy(beam=(2,))):
        pytest.raises(SpecdecError, combine, depth, SizePolicy()).match("cannot see all trees")


def test_random_depths_are_uniform():
    policy = RandomDepth(SizePolicy(), 1)
    plans = [policy.answer(asked(PLAN)) for _ in range(2400)]
    counts = np.bincount([plan.depth for plan in plans], minlength=13)
    assert counts[0] == 0 and np.abs(counts[1:] - 200).max() < 60
    assert {plan.verify_nodes for plan in plans if plan.depth == 1} == {110}, "all there is"
    assert policy.limits == TreeConfig(241, 12, 10)


@pytest.mark.parametrize(
    "plan",
    [
        TreeConfig(20, 5, 8),
        TreeConfig(60, 13, 10),
        TreeConfig(9, 2, 10, beam=(2,)),
        StaticShape(EAGLE1_TREE),
    ],
)
@pytest.mark.parametrize("policy", [DepthPolicy(), SizePolicy()])
def test_foreign_trees_are_refused(policy, plan):
    (kind,) = policy.asks
    question = asked(kind, 1, plan=plan)
    pytest.raises(SpecdecError, policy.answer, question).match("at most depth=12, but")


UNTRAINED = [config.policy() for of in ltd.CONFIGS.values() for config in (of.depth, of.size)]
UNTRAINED += [config.policy(12) for config in resps.CONFIGS.values()]


@pytest.mark.parametrize("untrained", UNTRAINED)
def test_saved_policies_are_the_same(untrained, tmp_path):
    policy = armed(dataclasses.replace(untrained, temperature=0.7, seed=4))
    policy.trained_for = {"pair": "random", "interval": 10}
    twin = load_policy(policy.save(tmp_path))
    assert type(twin) is type(untrained) and dataclasses.asdict(twin) == dataclasses.asdict(policy)
    assert (twin.limits, twin.plan) == (policy.limits, policy.plan)
    assert twin.trained_for == policy.trained_for
    random = np.random.default_rng(0)
    for observation in random.normal(size=(5, policy.observation_size)).astype(np.float32):
        np.testing.assert_array_equal(twin.logits(observation), policy.logits(observation))
        assert twin.choose(observation) == policy.choose(observation)
