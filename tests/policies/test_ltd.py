"""LTD's two policies: what they see on live trees, when they are asked, what their answers do, presets and co-training."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from fakes.pairs import random_pair, shared_bigrams, shared_pair

import specdec
from specdec.core.policy import Chain, Static
from specdec.core.records import EXTEND, PLAN, SIZE, Question
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies import ltd
from specdec.policies.base import Network, load_policy
from specdec.policies.ltd import DepthPolicy, RandomDepth, ShortNetwork, SizePolicy, combine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def network(sizes, seed=0, activation="tanh", scale=1.0) -> Network:
    random = np.random.default_rng(seed)
    pairs = list(zip(sizes[:-1], sizes[1:], strict=True))
    weights = [random.normal(size=(out, inputs)) * scale / np.sqrt(inputs) for inputs, out in pairs]
    return Network(weights, [random.normal(size=out) * 0.1 for _, out in pairs], activation)


def armed(policy, hidden=(32, 16), seed=0):
    """The policy with a random network."""
    policy.network = network((policy.observation_size, *hidden, policy.actions), seed, policy.activation)
    return policy


@dataclasses.dataclass
class View:
    """What a question shows of an engine."""

    scores: torch.Tensor | None = None
    newest_scores: torch.Tensor | None = None
    features: torch.Tensor | None = None


def asked(kind, expansions=0, cycle=1, plan=None, context_tok=700, largest=1, view=None) -> Question:
    return Question(kind, context_tok, expansions, cycle, largest, plan or TreeConfig(61, 12, 10), view)


class Watch:
    """Passes questions on to a policy and shows each to `look` first."""

    def __init__(self, policy, look):
        self.policy, self.look = policy, look
        self.asks, self.limits, self.plan = policy.asks, policy.limits, policy.plan
        self.reset, self.observe = policy.reset, policy.observe

    def answer(self, question):
        self.look(question)
        return self.policy.answer(question)


def slow_newest(tree) -> list[float]:
    """Scores of the deepest level: parents from best to worst, the children of each from best to worst."""
    score, parent, depth = tree.score.tolist(), tree.parent.tolist(), tree.depth.tolist()
    deepest = [node for node in range(len(score)) if depth[node] == max(depth)]
    parents = sorted({parent[node] for node in deepest}, key=lambda node: (-score[node], node))
    return [score[n] for p in parents for n in sorted((n for n in deepest if parent[n] == p), key=lambda n: -score[n])]


def slow_entropies(tree) -> list[float]:
    """Per expanded node, level by level and best first: minus the sum of p log p over its children."""
    score, parent, depth = tree.score.tolist(), tree.parent.tolist(), tree.depth.tolist()
    inner = sorted(set(parent[1:]), key=lambda node: (depth[node], -score[node]))
    steps = [[score[n] - score[node] for n in range(len(score)) if parent[n] == node] for node in inner]
    return [-sum(np.exp(step) * step for step in row) for row in steps]


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
        expected = slow_newest(question.view.growing.whole())
        expected += [committed_tok(question.view) / 1000] * 14 + [question.expansions / 10] * 14
        found = policy.observation(question)
        assert found.dtype == np.float32 and found.shape == (128,) == (policy.observation_size,)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        seen.append(question.expansions)

    specdec.decode(pair, PROMPT, Watch(policy, look), 32)
    assert {1, 2, 3} <= set(seen) <= {1, 2, 3, 4}


def size_expectation(question, parts) -> list[float]:
    tree, pool = question.view.growing.whole(), 10 + 100 * 12
    scores = tree.score[1:].tolist()
    values = {
        "scores": scores + [0.0] * (pool - len(scores)),
        "length": [committed_tok(question.view) / 1000] * 29,
        "depth": [question.expansions / 10] * 29,
        "hidden": question.view.features.tolist() if "hidden" in parts else None,
        "entropy": slow_entropies(tree),
    }
    values["entropy"] += [0.0] * (121 - len(values["entropy"]))
    return [value for part in parts for value in values[part]]


@pytest.mark.parametrize("name", ltd.OBSERVATIONS)
def test_size_observation_on_live_trees(name):
    pair, parts = shared_pair(), ltd.OBSERVATIONS[name]
    width = 3 * pair.target.hidden_size
    policy = armed(SizePolicy(parts=parts, features_size=width, temperature=1.0))
    extra = {"hidden": width, "entropy": 121}
    assert policy.observation_size == 1210 + sum(29 if p in ("length", "depth") else extra[p] for p in parts[1:])
    sizes = []

    def look(question):
        found = policy.observation(question)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, size_expectation(question, parts), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(policy.logits(found), policy.network(found), rtol=1e-4, atol=1e-5)
        sizes.append(len(question.scores))

    chain = Chain(RandomDepth(seed=2), Watch(policy, look))
    specdec.decode(pair, PROMPT, chain, 12)
    assert len(set(sizes)) > 2 and all((size - 10) % 100 == 0 for size in sizes)


@pytest.mark.parametrize("best", [1, 3, 6, 8, 99])
def test_the_best_probabilities(best):
    policy = SizePolicy(depth=2, top_k=2, drafted=1, sizes=(1, 3), exponentiated=True, best=best)
    question = asked(SIZE, 1, plan=TreeConfig(4, 1, 2), largest=6)
    question.view = View(torch.tensor([-0.5, -2.0, -0.6, -3.0, -7.0, -2.0]))
    shown = np.exp([-0.5, -0.6, -2.0, -2.0, -3.0, -7.0])[:best]
    padding = [0.0] * (min(best, 10) - len(shown))  # ten candidates at most
    expected = [*shown, *padding, *[0.7] * 29, *[0.1] * 29]
    np.testing.assert_allclose(policy.observation(question), expected, rtol=1e-6)


def test_half_precision_scores_and_features_are_read():
    view = View(torch.linspace(-9, -1, 110).bfloat16(), features=torch.ones(6, dtype=torch.float16))
    policy = SizePolicy(parts=ltd.OBSERVATIONS["+hidden"], features_size=6)
    seen = policy.observation(asked(SIZE, 1, largest=110, view=view))
    assert seen.dtype == np.float32 and seen[-6:].tolist() == [1] * 6 and seen[109] == -1


def queried(policy, cycle=1) -> list[int]:
    plan = policy.plan
    return [n for n in range(plan.depth) if policy.decides(asked(EXTEND, n, cycle, plan))]


def test_it_is_asked_after_every_stride():
    assert queried(DepthPolicy()) == list(range(1, 12))
    assert queried(DepthPolicy(stride=3)) == [3, 6, 9]
    assert queried(DepthPolicy(stride=5, depth=7)) == [5]
    assert queried(DepthPolicy(ask_at_zero=True)) == list(range(12))
    assert queried(DepthPolicy(first_depth=8), cycle=0) == [] and queried(DepthPolicy(), cycle=0) == list(range(1, 12))


def fixed(policy, action):
    """The policy with a network that always chooses `action`."""
    weights = [np.zeros((4, policy.observation_size)), np.zeros((policy.actions, 4))]
    policy.network = Network(weights, [np.zeros(4), np.arange(policy.actions) == action], policy.activation)
    return policy


@pytest.mark.parametrize(
    ("settings", "stop", "go"),
    [({}, 1, 12), ({"stride": 3}, 3, 12), ({"stride": 3, "depth": 5}, 3, 5), ({"ask_at_zero": True}, 1, 12)],
)
def test_depths_of_a_constant_network(settings, stop, go):
    """The first expansion always happens, the last is forced, and a stride only ever stops at its multiples."""
    for action, expected in ((0, stop), (1, go)):
        policy = fixed(DepthPolicy(total_tokens=20, **settings), action)
        rows = specdec.decode(shared_bigrams(), PROMPT, policy, 16).rows
        assert {row.expansions for row in rows} == {expected} and {row.verify_nodes for row in rows} == {19}


def test_official_first_tree_is_never_asked_for():
    both = combine(fixed(ltd.OFFICIAL.depth.policy(), 0), fixed(ltd.OFFICIAL.size.policy(), 23))
    rows = specdec.decode(shared_bigrams(), PROMPT, both, 24).rows
    assert [(row.expansions, row.verify_nodes) for row in rows[:2]] == [(8, 59), (3, 240)]
    assert {(row.expansions, row.verify_nodes) for row in rows[1:]} == {(3, 240)}


def test_the_length_that_never_changes():
    view = View(newest_scores=torch.zeros(100))
    for context_tok in (50, 700):  # the two lengths of the sheet's check
        question = asked(EXTEND, 3, context_tok=context_tok, view=view)
        assert DepthPolicy(constant_length=True).observation(question)[100:114].tolist() == [np.float32(0.01)] * 14
        assert DepthPolicy().observation(question)[100:114].tolist() == [np.float32(context_tok / 1000)] * 14


def test_before_the_first_expansion_it_sees_the_tree_before():
    policy = DepthPolicy(ask_at_zero=True)
    assert not policy.observation(asked(EXTEND, 0, view=View()))[:100].any()
    last = torch.linspace(-4, -1, 100)
    expected = last.numpy().copy()
    policy.observation(asked(EXTEND, 2, view=View(newest_scores=last)))
    last.zero_()  # the engine uses its memory again
    seen = policy.observation(asked(EXTEND, 0, view=View(newest_scores=torch.ones(10))))
    np.testing.assert_array_equal(seen[:100], expected)
    assert policy.meaning(0, asked(EXTEND, 0)) is True  # whatever the answer
    assert policy.meaning(0, asked(EXTEND, 1)) is False and policy.meaning(1, asked(EXTEND, 1)) is True


def test_sizes_of_the_presets():
    assert ltd.PAPER_SIZES == (20, 40, 60, 80, 100, 120, 140, 160, 180, 200, 220, 240)
    assert len(ltd.OFFICIAL_SIZES) == 24 and ltd.OFFICIAL_SIZES[:2] == (10, 20) and ltd.OFFICIAL_SIZES[-1] == 240
    assert ltd.PAPER.size.policy().actions == 12
    assert ltd.OFFICIAL.size.policy().actions == 24


@pytest.mark.parametrize(("expansions", "most"), [(1, 110), (2, 210), (12, 240)])
def test_sizes_are_clipped_to_the_pool(expansions, most):
    policy = fixed(SizePolicy(sizes=ltd.OFFICIAL_SIZES), 23)
    assert policy.limits == TreeConfig(241, 12, 10)
    assert policy.meaning(23, asked(SIZE, expansions, largest=min(240, 10 + 100 * expansions))) == most
    depth = fixed(DepthPolicy(stride=expansions), 0)
    rows = specdec.decode(shared_bigrams(), PROMPT, combine(depth, policy), 4).rows
    assert {row.verify_nodes for row in rows} == {most} and {row.verified_tok for row in rows} == {most + 1}


def test_alone_it_drafts_to_a_fixed_depth():
    rows = specdec.decode(shared_bigrams(), PROMPT, fixed(SizePolicy(drafted=3), 1), 8).rows
    assert {(row.expansions, row.verify_nodes, row.questions) for row in rows} == {(3, 40, 1)}


def test_random_depths_are_uniform_from_one():
    policy = RandomDepth(seed=1)
    twin = RandomDepth(seed=1)
    answers = [policy.answer(asked(PLAN)) for _ in range(2400)]
    assert answers == [twin.answer(asked(PLAN)) for _ in range(2400)]
    counts = np.bincount([plan.depth for plan in answers], minlength=13)
    assert counts[0] == 0 and np.abs(counts[1:] - 200).max() < 60
    assert {plan.top_k for plan in answers} == {10} and policy.limits == TreeConfig(241, 12, 10)
    assert next(plan for plan in answers if plan.depth == 1).verify_nodes == 110  # all there is


@functools.cache
def wide_pair():
    return random_pair(vocab_size=40, seed=5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("preset", ltd.CONFIGS)
def test_text_equals_plain_decoding(preset, temperature):
    config = ltd.CONFIGS[preset]
    for seed, pair in enumerate((wide_pair(), shared_bigrams())):
        depth = armed(config.depth.policy(), seed=seed)
        size = armed(config.size.policy(), seed=seed + 1)
        plain = specdec.autoregress(pair, PROMPT, 12, temperature, seed=3).tokens
        for policy in (depth, size, combine(depth, size)):
            assert specdec.decode(pair, PROMPT, policy, 12, temperature, seed=3).tokens == plain


def test_combine():
    depth, size = DepthPolicy(), SizePolicy()
    both = combine(depth, size)
    assert (
        both.asks == {EXTEND, SIZE} and both.plan == TreeConfig(61, 12, 10) and both.limits == TreeConfig(241, 12, 10)
    )
    with pytest.raises(SpecdecError, match="cannot see all trees"):
        combine(DepthPolicy(top_k=8), size)
    with pytest.raises(SpecdecError, match="give both one top_k and depth"):
        combine(DepthPolicy(depth=13), size)
    assert combine(DepthPolicy(depth=6), size).limits == TreeConfig(241, 12, 10)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("used", [0, 1, 7, 20])
def test_short_network_gives_the_same_answers(activation, used):
    random = np.random.default_rng(used)
    full = network((20 + 5 + 3 + 4, 16, 8, 3), activation=activation)
    short = ShortNetwork(full, 20, [(5, True), (3, False), (4, True)])
    for _ in range(5):
        observation = np.concatenate(
            (random.normal(size=used), np.zeros(20 - used), [random.normal()] * 5, random.normal(size=3), [0.7] * 4)
        ).astype(np.float32)
        np.testing.assert_allclose(short(observation), full(observation), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [(), (1024,), (1024, 256), (1024, 512, 256)])
def test_a_new_network_is_used_at_once(hidden):
    policy = armed(SizePolicy(depth=2, drafted=2), hidden)
    observation = np.random.default_rng(0).normal(size=policy.observation_size).astype(np.float32)
    observation[210:239], observation[239:] = 0.4, 0.2  # copies of one length and one depth
    for seed in (1, 2):
        armed(policy, hidden, seed)
        np.testing.assert_allclose(policy.logits(observation), policy.network(observation), rtol=1e-4, atol=1e-4)
    rows = np.stack([observation, 2 * observation])
    np.testing.assert_array_equal(policy.logits(rows), policy.network(rows))


@pytest.mark.parametrize("preset", ltd.CONFIGS)
@pytest.mark.parametrize("kind", [DepthPolicy, SizePolicy])
def test_saved_policies_are_the_same(kind, preset, tmp_path):
    config = ltd.CONFIGS[preset]
    untrained = (config.depth if kind is DepthPolicy else config.size).policy()
    policy = armed(dataclasses.replace(untrained, temperature=0.7, seed=4))
    policy.trained_for = {"pair": "random"}
    twin = load_policy(policy.save(tmp_path))
    assert type(twin) is kind and dataclasses.asdict(twin) == dataclasses.asdict(policy)
    assert (twin.limits, twin.plan, twin.trained_for) == (policy.limits, policy.plan, policy.trained_for)
    for observation in np.random.default_rng(0).normal(size=(20, policy.observation_size)).astype(np.float32):
        np.testing.assert_array_equal(twin.logits(observation), policy.logits(observation))
        assert twin.choose(observation) == policy.choose(observation)


def test_configs_differ_as_the_sheet_says():
    depth, quirky = ltd.PAPER.depth.policy(), ltd.OFFICIAL.depth.policy()
    assert (depth.stride, depth.activation, depth.constant_length, depth.plan.verify_nodes) == (1, "relu", False, 60)
    assert (quirky.stride, quirky.activation, quirky.constant_length, quirky.plan.verify_nodes) == (3, "tanh", True, 59)
    learning = ltd.OFFICIAL.depth.policy(training=True)
    assert (learning.stride, learning.constant_length, learning.plan.verify_nodes) == (1, False, 60)
    assert learning.ask_at_zero and learning.first_depth == 5
    for config, decoding in ((ltd.PAPER, 8), (ltd.OFFICIAL, 8), (ltd.OURS, 12)):
        assert config.size.policy().plan.depth == decoding and config.size.policy(training=True).plan.depth == 12
    assert ltd.OFFICIAL.size.policy().first_nodes == 59 and not ltd.OFFICIAL.random_depth and ltd.PAPER.random_depth
    assert (ltd.PAPER.reward, ltd.OFFICIAL.reward, ltd.OURS.reward) == ("throughput", "throughput", "lagrangian")


@pytest.mark.parametrize("preset", ltd.CONFIGS)
def test_ppo_learns_what_the_policy_runs(preset):
    for part in (ltd.CONFIGS[preset].depth, ltd.CONFIGS[preset].size):
        assert part.policy(training=True).activation == part.ppo.activation
        assert part.ppo.n_steps % part.ppo.batch_size == 0


def test_published_ppo_numbers():
    depth, size, script = ltd.PAPER.depth.ppo, ltd.PAPER.size.ppo, ltd.OFFICIAL.depth.ppo
    names = ("n_steps", "batch_size", "n_epochs", "gamma")
    assert [getattr(depth, name) for name in names] == [2048, 256, 20, 0.999]
    assert (size.gamma, size.pi, size.vf, size.total_steps) == (0.9, (1024, 256), (1024, 256), 100_000)
    assert [getattr(script, name) for name in names] == [128, 64, 1, 0.99]
    assert depth.total_steps == 1_000_000 and ltd.LAPTOP["paper"].depth.ppo.total_steps == 61_440
    weights = 128 * 1024 + 1024 + 1024 * 2 + 2
    assert abs(weights - 134_000) < 1000  # the sheet's count of the actor
    policy = armed(DepthPolicy(), depth.pi)
    assert sum(array.size for array in policy.network.arrays().values()) == weights


def test_rounds_follow_section_6():
    named = [(r.name, r.learner, r.frozen) for r in ltd.ROUNDS]
    assert named[2:] == [("iter1", "size", "depth"), ("iter2", "depth", "size"), ("iter3", "size", "depth")]
    assert [r.learner for r in ltd.ORDERS["4"][2:]] == ["depth", "size", "depth", "size"]
    for order in ltd.ORDERS.values():
        done = set()
        for one in order:
            assert one.frozen is None or one.frozen in done
            done.add(one.learner)


@pytest.mark.parametrize("plan", [TreeConfig(20, 5, 8), TreeConfig(60, 13, 10), StaticShape(EAGLE1_TREE)])
@pytest.mark.parametrize("policy", [DepthPolicy(), SizePolicy()])
def test_foreign_trees_are_refused(policy, plan):
    (kind,) = policy.asks
    view = View(torch.zeros(30), torch.zeros(16))
    with pytest.raises(SpecdecError, match="top_k=10 and at most depth=12, but the plan in force is"):
        armed(policy).answer(asked(kind, 1, plan=plan, view=view))


def test_foreign_trees_are_refused_while_decoding():
    with pytest.raises(SpecdecError, match="top_k=4 and depth=3"):
        specdec.decode(shared_bigrams(), PROMPT, Chain(Static(12, 3, 4), armed(SizePolicy())), 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DepthPolicy(temperature=-1.0), "above 0"),
        (lambda: ltd.DepthConfig(depth=3, stride=3).policy(), "never asked"),
        (lambda: DepthPolicy(total_tokens=5000), "lower total_tokens"),
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
    ],
)
def test_bad_settings(make, message):
    pytest.raises(SpecdecError, make).match(message)


def test_without_a_network_there_is_no_answer(tmp_path):
    for policy, kind in ((DepthPolicy(), EXTEND), (SizePolicy(), SIZE)):
        view = View(torch.zeros(110), torch.zeros(100))
        with pytest.raises(SpecdecError, match="no network yet"):
            policy.answer(asked(kind, 1, view=view))
        pytest.raises(SpecdecError, policy.save, tmp_path).match("no network yet")


def test_features_of_another_pair_are_refused():
    policy = armed(SizePolicy(parts=ltd.OBSERVATIONS["+hidden"], features_size=6))
    with pytest.raises(SpecdecError, match="reads 6 features, but the pair gives 8"):
        policy.answer(asked(SIZE, 1, view=View(torch.zeros(110), features=torch.zeros(8))))
