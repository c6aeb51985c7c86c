"""LTD's two policies: what they see on live trees, when they are asked, what their answers do,
presets and co-training.
"""

import dataclasses
import operator

import numpy as np
import pytest
import torch
from fakes import questions
from fakes.pairs import random_pair, shared_bigrams, shared_pair

import specdec
from specdec.core.policy import Chain, Static
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies import ltd, resps
from specdec.policies.base import Learned, Network, load_policy
from specdec.policies.ltd import DepthPolicy, RandomDepth, ShortNetwork, SizePolicy, combine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def armed(policy, hidden=(32, 16), seed=0):
    """The policy with a random network, biases included."""
    random, network = np.random.default_rng(seed), policy.fill_at_random(hidden, seed).network
    network.biases = [np.float32(random.normal(size=len(bias)) * 0.1) for bias in network.biases]
    return policy


def asked(kind, expansions=0, cycle=1, plan=None, context_tok=700, largest=1, **seen):
    return questions.asked(
        kind, expansions, cycle, plan or TreeConfig(61, 12, 10), context_tok, largest, **seen
    )


def slow(tree) -> tuple[list[float], list[float]]:
    """Scores of the deepest level, parents from best to worst and the children of each; of each
    expanded node, level by level and best first, minus the sum of p log p over its children.
    """
    score, parent, depth = tree.score.tolist(), tree.parent.tolist(), tree.depth.tolist()
    deepest = [node for node in range(len(score)) if depth[node] == max(depth)]
    parents = sorted({parent[node] for node in deepest}, key=lambda node: (-score[node], node))
    newest = [
        score[n]
        for p in parents
        for n in sorted((n for n in deepest if parent[n] == p), key=lambda n: -score[n])
    ]
    inner = sorted(set(parent[1:]), key=lambda node: (depth[node], -score[node]))
    steps = [
        [score[n] - score[node] for n in range(len(score)) if parent[n] == node] for node in inner
    ]
    return newest, [-sum(np.exp(step) * step for step in row) for row in steps]


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
        assert found.dtype == np.float32 and found.shape == (128,) == (policy.observation_size,)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        seen.append(question.expansions)

    specdec.decode(pair, PROMPT, questions.Watch(policy, look), 32)
    assert {1, 2, 3} <= set(seen) <= {1, 2, 3, 4}


def size_expectation(question, parts) -> list[float]:
    tree, pool = question.view.growing.whole(), 10 + 100 * 12
    scores = tree.score[1:].tolist()
    values = {
        "scores": scores + [0.0] * (pool - len(scores)),
        "length": [committed_tok(question.view) / 1000] * 29,
        "depth": [question.expansions / 10] * 29,
        "hidden": question.view.features.tolist() if "hidden" in parts else None,
        "entropy": slow(tree)[1],
    }
    values["entropy"] += [0.0] * (121 - len(values["entropy"]))
    return [value for part in parts for value in values[part]]


@pytest.mark.parametrize("name", ltd.OBSERVATIONS)
def test_size_observation_on_live_trees(name):
    pair, parts = shared_pair(), ltd.OBSERVATIONS[name]
    width = 3 * pair.target.hidden_size
    policy = armed(SizePolicy(parts=parts, features_size=width, temperature=1.0))
    extra = {"hidden": width, "entropy": 121}
    assert policy.observation_size == 1210 + sum(
        29 if p in ("length", "depth") else extra[p] for p in parts[1:]
    )
    sizes = []

    def look(question):
        found = policy.observation(question)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, size_expectation(question, parts), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            policy.logits(found), policy.network(found), rtol=1e-4, atol=1e-5
        )
        sizes.append(len(question.scores))

    chain = Chain(RandomDepth(seed=2), questions.Watch(policy, look))
    specdec.decode(pair, PROMPT, chain, 12)
    assert len(set(sizes)) > 2 and all((size - 10) % 100 == 0 for size in sizes)


def test_the_best_probabilities_are_shown_in_half_precision_too_and_when_it_is_asked():
    for best in [1, 3, 6, 8, 99]:
        policy = SizePolicy(
            depth=2, top_k=2, drafted=1, sizes=(1, 3), exponentiated=True, best=best
        )
        scores = torch.tensor([-0.5, -2.0, -0.6, -3.0, -7.0, -2.0])
        question = asked(SIZE, 1, plan=TreeConfig(4, 1, 2), largest=6, scores=scores)
        shown = np.exp([-0.5, -0.6, -2.0, -2.0, -3.0, -7.0])[:best]
        padding = [0.0] * (min(best, 10) - len(shown))  # ten candidates at most
        expected = [*shown, *padding, *[0.7] * 29, *[0.1] * 29]
        np.testing.assert_allclose(policy.observation(question), expected, rtol=1e-6)
    seen = dict(
        scores=torch.linspace(-9, -1, 110).bfloat16(), features=torch.ones(6, dtype=torch.float16)
    )
    policy = SizePolicy(parts=ltd.OBSERVATIONS["+hidden"], features_size=6)
    seen = policy.observation(asked(SIZE, 1, largest=110, **seen))
    assert seen.dtype == np.float32 and seen[-6:].tolist() == [1] * 6 and seen[109] == -1
    for context_tok in (50, 700):  # the two lengths of the sheet's check
        question = asked(EXTEND, 3, context_tok=context_tok, newest_scores=torch.zeros(100))
        assert (
            DepthPolicy(constant_length=True).observation(question)[100:114].tolist()
            == [np.float32(0.01)] * 14
        )
        assert (
            DepthPolicy().observation(question)[100:114].tolist()
            == [np.float32(context_tok / 1000)] * 14
        )
    policy = DepthPolicy(ask_at_zero=True)
    assert not policy.observation(asked(EXTEND, 0))[:100].any()
    last = torch.linspace(-4, -1, 100)
    expected = last.numpy().copy()
    policy.observation(asked(EXTEND, 2, newest_scores=last))
    last.zero_()  # the engine uses its memory again
    seen = policy.observation(asked(EXTEND, 0, newest_scores=torch.ones(10)))
    np.testing.assert_array_equal(seen[:100], expected)
    assert policy.meaning(0, asked(EXTEND, 0)) is True  # whatever the answer
    assert (
        policy.meaning(0, asked(EXTEND, 1)) is False and policy.meaning(1, asked(EXTEND, 1)) is True
    )
    policy, twin = RandomDepth(seed=1), RandomDepth(seed=1)
    answers = [policy.answer(asked(PLAN)) for _ in range(2400)]
    assert answers == [twin.answer(asked(PLAN)) for _ in range(2400)]
    counts = np.bincount([plan.depth for plan in answers], minlength=13)
    assert counts[0] == 0 and np.abs(counts[1:] - 200).max() < 60
    assert {plan.top_k for plan in answers} == {10} and policy.limits == TreeConfig(241, 12, 10)
    assert next(plan for plan in answers if plan.depth == 1).verify_nodes == 110  # all there is
    for settings, cycle, queried in [
        ({}, 1, range(1, 12)),
        (dict(stride=3), 1, [3, 6, 9]),
        (dict(stride=5, depth=7), 1, [5]),
        (dict(ask_at_zero=True), 1, range(12)),
        (dict(first_depth=8), 0, []),
        ({}, 0, range(1, 12)),
    ]:
        policy = DepthPolicy(**settings)
        plan = policy.plan
        assert [
            n for n in range(plan.depth) if policy.decides(asked(EXTEND, n, cycle, plan))
        ] == list(queried)


def fixed(policy, action):
    """The policy with a network that always chooses `action`."""
    weights = [np.zeros((4, policy.observation_size)), np.zeros((policy.actions, 4))]
    policy.network = Network(
        weights, [np.zeros(4), np.arange(policy.actions) == action], policy.activation
    )
    return policy


def test_what_constant_networks_draft_and_verify_within_strides_first_trees_and_pools():
    for settings, stop, go in (
        ({}, 1, 12),
        ({"stride": 3}, 3, 12),
        ({"stride": 3, "depth": 5}, 3, 5),
        ({"ask_at_zero": True}, 1, 12),
    ):
        for action, expected in ((0, stop), (1, go)):
            policy = fixed(DepthPolicy(total_tokens=20, **settings), action)
            rows = specdec.decode(shared_bigrams(), PROMPT, policy, 16).rows
            assert {row.expansions for row in rows} == {expected} and {
                row.verify_nodes for row in rows
            } == {19}
    both = combine(fixed(ltd.OFFICIAL.depth.policy(), 0), fixed(ltd.OFFICIAL.size.policy(), 23))
    rows = specdec.decode(shared_bigrams(), PROMPT, both, 24).rows
    assert [(row.expansions, row.verify_nodes) for row in rows[:2]] == [(8, 59), (3, 240)]
    assert {(row.expansions, row.verify_nodes) for row in rows[1:]} == {(3, 240)}
    rows = specdec.decode(shared_bigrams(), PROMPT, fixed(SizePolicy(drafted=3), 1), 8).rows
    assert {(row.expansions, row.verify_nodes, row.questions) for row in rows} == {(3, 40, 1)}
    for expansions, most in [(1, 110), (2, 210), (12, 240)]:
        policy = fixed(SizePolicy(sizes=ltd.OFFICIAL_SIZES), 23)
        assert policy.limits == TreeConfig(241, 12, 10)
        assert (
            policy.meaning(23, asked(SIZE, expansions, largest=min(240, 10 + 100 * expansions)))
            == most
        )
        depth = fixed(DepthPolicy(stride=expansions), 0)
        rows = specdec.decode(shared_bigrams(), PROMPT, combine(depth, policy), 4).rows
        assert {row.verify_nodes for row in rows} == {most} and {
            row.verified_tok for row in rows
        } == {most + 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("preset", ltd.CONFIGS)
def test_text_equals_plain_decoding(preset, temperature):
    config, of_resps = (
        ltd.CONFIGS[preset],
        dataclasses.replace(resps.CONFIGS[preset], interval=2, hidden_size=32),
    )
    for seed, pair in enumerate((random_pair(vocab_size=40, seed=5), shared_bigrams())):
        depth = armed(config.depth.policy(), seed=seed)
        size = armed(config.size.policy(), seed=seed + 1)
        plain = specdec.autoregress(pair, PROMPT, 12, temperature, seed=3).tokens
        others = (
            [armed(of_resps.policy(3 * pair.target.hidden_size), seed=one) for one in (0, 1)]
            if not seed
            else []
        )
        for policy in (depth, size, combine(depth, size), *others):
            assert specdec.decode(pair, PROMPT, policy, 12, temperature, seed=3).tokens == plain


def test_combined_policies_fit_and_bad_settings_trees_or_features_are_refused(tmp_path):
    depth, size = DepthPolicy(), SizePolicy()
    both = combine(depth, size)
    assert (both.asks, both.plan, both.limits) == (
        {EXTEND, SIZE},
        TreeConfig(61, 12, 10),
        TreeConfig(241, 12, 10),
    )
    pytest.raises(SpecdecError, combine, DepthPolicy(top_k=8), size).match("cannot see all trees")
    pytest.raises(SpecdecError, combine, DepthPolicy(depth=13), size).match(
        "give both one top_k and depth"
    )
    assert combine(DepthPolicy(depth=6), size).limits == TreeConfig(241, 12, 10)
    with pytest.raises(SpecdecError, match="top_k=4 and depth=3"):
        specdec.decode(shared_bigrams(), PROMPT, Chain(Static(12, 3, 4), armed(SizePolicy())), 8)
    for policy, kind in ((DepthPolicy(), EXTEND), (SizePolicy(), SIZE)):
        with pytest.raises(SpecdecError, match="no network yet"):
            policy.answer(asked(kind, 1, scores=torch.zeros(110), newest_scores=torch.zeros(100)))
        pytest.raises(SpecdecError, policy.save, tmp_path).match("no network yet")
    policy = armed(SizePolicy(parts=ltd.OBSERVATIONS["+hidden"], features_size=6))
    with pytest.raises(SpecdecError, match="reads 6 features, but the pair gives 8"):
        policy.answer(asked(SIZE, 1, scores=torch.zeros(110), features=torch.zeros(8)))
    for make, message in (
        (lambda: DepthPolicy(temperature=-1.0), "above 0"),
        (lambda: ltd.DepthConfig(depth=3, stride=3).policy(), "never asked"),
        (lambda: SizePolicy(parts=("length", "scores")), "begin with 'scores'"),
        (lambda: SizePolicy(parts=("scores", "depth", "length")), "order"),
        (lambda: SizePolicy(parts=("scores", "colour")), "keep the order"),
        (lambda: SizePolicy(parts=()), "begin with 'scores'"),
        (lambda: SizePolicy(sizes=()), "numbers of nodes"),
        (lambda: SizePolicy(sizes=(-1, 4)), "numbers of nodes"),
        (lambda: SizePolicy(best=-1), "numbers of nodes"),
        (lambda: SizePolicy(drafted=13), "drafted at most depth"),
        (lambda: SizePolicy(parts=ltd.OBSERVATIONS["+hidden"]), "needs features_size"),
        (lambda: DepthPolicy(activation="gelu").build_network({}), "unknown activation 'gelu'"),
    ):
        pytest.raises(SpecdecError, make).match(message)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("used", [0, 1, 7, 20])
def test_short_network_gives_the_same_answers(activation, used):
    random, policy = np.random.default_rng(used), Learned(activation=activation)
    policy.observation_size, policy.actions = 20 + 5 + 3 + 4, 3
    full = armed(policy, (16, 8)).network
    short = ShortNetwork(full, 20, [(5, True), (3, False), (4, True)])
    for _ in range(5):
        parts = (
            random.normal(size=used),
            np.zeros(20 - used),
            [random.normal()] * 5,
            random.normal(size=3),
            [0.7] * 4,
        )
        observation = np.concatenate(parts).astype(np.float32)
        np.testing.assert_allclose(short(observation), full(observation), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [(), (1024,), (1024, 256), (1024, 512, 256)])
def test_a_new_network_is_used_at_once(hidden):
    policy = armed(SizePolicy(depth=2, drafted=2), hidden)
    observation = np.random.default_rng(0).normal(size=policy.observation_size).astype(np.float32)
    observation[210:239], observation[239:] = 0.4, 0.2  # copies of one length and one depth
    for seed in (1, 2):
        armed(policy, hidden, seed)
        np.testing.assert_allclose(
            policy.logits(observation), policy.network(observation), rtol=1e-4, atol=1e-4
        )
    rows = np.stack([observation, 2 * observation])
    np.testing.assert_array_equal(policy.logits(rows), policy.network(rows))


UNTRAINED = [config.policy() for of in ltd.CONFIGS.values() for config in (of.depth, of.size)]
UNTRAINED += [config.policy(12) for config in resps.CONFIGS.values()]


@pytest.mark.parametrize("untrained", UNTRAINED)
def test_saved_policies_are_the_same(untrained, tmp_path):
    policy = armed(dataclasses.replace(untrained, temperature=0.7, seed=4))
    policy.trained_for = {"pair": "random", "interval": 10}
    twin = load_policy(policy.save(tmp_path))
    assert type(twin) is type(untrained) and dataclasses.asdict(twin) == dataclasses.asdict(policy)
    assert (twin.limits, twin.plan, twin.trained_for) == (
        policy.limits,
        policy.plan,
        policy.trained_for,
    )
    for observation in (
        np.random.default_rng(0).normal(size=(20, policy.observation_size)).astype(np.float32)
    ):
        np.testing.assert_array_equal(twin.logits(observation), policy.logits(observation))
        assert twin.choose(observation) == policy.choose(observation)


def test_policies_of_the_presets():
    names = (
        "stride",
        "activation",
        "constant_length",
        "first_depth",
        "ask_at_zero",
        "plan.verify_nodes",
    )
    kinds = [(ltd.PAPER, False), (ltd.OFFICIAL, False), (ltd.OFFICIAL, True)]
    found = [
        operator.attrgetter(*names)(config.depth.policy(training)) for config, training in kinds
    ]
    assert found == [
        (1, "relu", False, None, False, 60),
        (3, "tanh", True, 8, False, 59),
        (1, "tanh", False, 5, True, 60),
    ]
    for config, decoding in ((ltd.PAPER, 8), (ltd.OFFICIAL, 8), (ltd.OURS, 12)):
        assert (
            config.size.policy().plan.depth == decoding
            and config.size.policy(training=True).plan.depth == 12
        )
        assert config.size.policy(training=True).activation == config.size.ppo.activation
    assert ltd.LAPTOP["paper"].depth.ppo.total_steps == 61_440 and ltd.LAPTOP["ours"] is ltd.OURS
    policy, weights = armed(DepthPolicy(), ltd.PAPER.depth.ppo.pi), 128 * 1024 + 1024 + 1024 * 2 + 2
    assert sum(array.size for array in policy.network.arrays().values()) == weights
    assert abs(weights - 134_000) < 1000  # the sheet's count of the actor


@pytest.mark.parametrize(
    "plan", [TreeConfig(20, 5, 8), TreeConfig(60, 13, 10), StaticShape(EAGLE1_TREE)]
)
@pytest.mark.parametrize("policy", [DepthPolicy(), SizePolicy()])
def test_foreign_trees_are_refused(policy, plan):
    (kind,) = policy.asks
    with pytest.raises(
        SpecdecError, match="top_k=10 and at most depth=12, but the plan in force is"
    ):
        armed(policy).answer(
            asked(kind, 1, plan=plan, scores=torch.zeros(30), newest_scores=torch.zeros(16))
        )
