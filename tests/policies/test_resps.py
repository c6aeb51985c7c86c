"""Re-SpS's policy: its 177 trees, what it sees of live pairs, when it is asked, the quirks of the
code, presets.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from fakes.pairs import random_pair, shared_bigrams
from fakes.questions import Watch, asked

import specdec
from specdec.core.records import PLAN
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies import resps
from specdec.policies.base import changed
from specdec.policies.resps import RespsPolicy, official_state

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LIMITS = TreeConfig(128, 8, 32)


@functools.cache
def pair():
    """Forty tokens, so that 32 children can be drafted."""
    return random_pair(vocab_size=40, seed=7)


def width() -> int:
    return 3 * pair().target.hidden_size


def armed(policy, hidden=(16, 16), seed=0):
    """The policy with a random network whose actions are all about equally likely."""
    return policy.fill_at_random(hidden, seed)


def scripted(policy, actions):
    """The policy with a choice that is read off a list."""
    left = iter(actions)
    policy.choose = lambda observation: next(left)
    policy.observation = lambda question: None
    return policy


def test_177_trees_in_the_flat_order_are_kept_while_decoding_and_an_early_break_stops_at_enough():
    policy = RespsPolicy(features_size=6)
    flat = list(itertools.product((32, 48, 64, 80, 96, 128), range(3, 9), (8, 12, 16, 20, 32)))
    dropped = [flat.index(tree) for tree in ((80, 3, 8), (96, 3, 8), (128, 3, 8))]
    trees = [(tree.total_tokens, tree.depth, tree.top_k) for tree in policy.trees]
    assert trees == [tree for number, tree in enumerate(flat) if number not in dropped]
    assert policy.actions == len(trees) == 177
    assert flat[148] == (96, 8, 20) == trees[146]
    assert trees[0] == (32, 3, 8) and trees[176] == (128, 8, 32)
    assert policy.limits == LIMITS
    small = RespsPolicy(features_size=6, totals=(4, 8), depths=(2, 3), widths=(2, 4))
    assert [(t.total_tokens, t.depth, t.top_k) for t in small.trees] == [
        (4, 2, 4),
        (4, 3, 2),
        (4, 3, 4),
        (8, 3, 4),
    ]
    assert small.limits == TreeConfig(8, 3, 4)  # no room for a starter that is never in force
    lagging = dataclasses.replace(small, action_lag=True, starter=(9, 4, 3))
    assert lagging.limits == TreeConfig(9, 4, 4)
    policy = RespsPolicy(features_size=width(), interval=3, widths=(8, 12))
    scripted(policy, range(100))
    rows = specdec.decode(pair(), PROMPT, policy, 24).rows
    assert len(rows) > 6
    for row in rows:
        tree = policy.trees[row.cycle // 3]
        assert (row.verified_tok, row.expansions, row.top_k) == (
            tree.total_tokens,
            tree.depth,
            tree.top_k,
        )
    policy = RespsPolicy(features_size=6, early_break=True)
    for tree, whole in zip(policy.trees, RespsPolicy(features_size=6).trees, strict=True):
        count, depth = 1 + whole.top_k, 0
        while depth < whole.depth and count < whole.total_tokens:
            count, depth = count + whole.top_k**2, depth + 1
        assert tree == dataclasses.replace(whole, depth=depth)
    assert {tree.depth for tree in policy.trees} == {0, 1, 2}


def layer_norm(rows) -> np.ndarray:
    out = []
    for row in rows:
        mean = sum(row) / len(row)
        variance = sum((value - mean) ** 2 for value in row) / len(row)
        out += [(value - mean) / (variance + 1e-5) ** 0.5 for value in row]
    return np.array(out)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"state": "concat"}, lambda rows: rows.ravel()),
        ({"state": "official", "hidden_size": 32}, lambda rows: (rows[0] + rows[1] + rows[2]) / 3),
        (
            {"state": "official", "hidden_size": 40},
            lambda rows: np.concatenate((rows[0], rows[1][:8])),
        ),
        ({"state": "normalised"}, lambda rows: layer_norm([rows.ravel()])),
        ({"state": "normalised", "per_layer": True}, layer_norm),
    ],
)
def test_observations_of_a_live_pair(settings, expected):
    policy = armed(RespsPolicy(features_size=width(), interval=2, widths=(8, 12), **settings))
    seen = []

    def look(question):
        *before, _ = ids = PROMPT + question.view.tokens
        assert len(ids) == question.context_tok + 1  # the root is committed, but not in the state
        seen.append((before, policy.observation(question)))

    specdec.decode(pair(), PROMPT, Watch(policy, look), 10)
    assert len(seen) > 2
    model, layers = pair().target.model, pair().target.num_layers
    for ids, found in seen:
        assert found.dtype == np.float32 and found.shape == (policy.observation_size,)
        with torch.inference_mode():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        rows = torch.stack([states[layer][0, -1] for layer in (2, layers // 2, layers - 3)]).numpy()
        np.testing.assert_allclose(found, expected(rows), atol=2e-5)


def test_official_state_in_all_its_branches_and_of_half_precision():
    features = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(official_state(features, 4), [4, 5, 6, 7])  # (0 + 4 + 8) / 3, ...
    np.testing.assert_array_equal(official_state(features, 12), features)
    np.testing.assert_array_equal(official_state(features, 5), [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(official_state(features, 14), [*features, 0, 0])
    np.testing.assert_array_equal(official_state(None, 3), [0, 0, 0])
    # The widths of the papers' models with the scripts' 4096 (0.1): an average for one, a cut for
    # two.
    for total, mean in ((3 * 4096, True), (3 * 5120, False), (3 * 8192, False)):
        random = np.random.default_rng(total).normal(size=total).astype(np.float32)
        whole = random.reshape(3, -1).mean(axis=0) if mean else random[:4096]
        np.testing.assert_array_equal(official_state(random, 4096), whole)
    features = torch.tensor([1.5, -2.0, 0.25])
    for dtype in (torch.float16, torch.bfloat16):
        seen = RespsPolicy(features_size=3).observation(asked(PLAN, features=features.to(dtype)))
        assert seen.dtype == np.float32 and seen.tolist() == features.tolist()
    seen = RespsPolicy(features_size=3).observation(asked(PLAN, features=features))
    seen += 1  # what the policy hands out is not the engine's memory
    assert features.tolist() == [1.5, -2.0, 0.25]


def schedule(policy, cycles):
    """(cycles that ask the network, trees in force) for one turn."""
    policy.reset()
    queries, trees = [], []
    for cycle in range(cycles):
        question = asked(PLAN, cycle=cycle)
        queries += [cycle] if policy.decides(question) else []
        trees.append(policy.answer(question))
    return queries, trees


def test_a_tree_is_kept_for_an_interval_by_the_official_schedule_and_each_quirk():
    policy = scripted(RespsPolicy(features_size=6, interval=10), [5, 6, 7, 8])
    queries, trees = schedule(policy, 25)
    assert queries == [0, 10, 20]
    assert trees == [policy.trees[5]] * 10 + [policy.trees[6]] * 10 + [policy.trees[7]] * 5
    assert schedule(policy, 4) == ([0], [policy.trees[8]] * 4)
    config = dataclasses.replace(resps.OFFICIAL, hidden_size=4)
    policy = scripted(config.policy(12, training=True), [5, 6, 7, 8])
    queries, trees = schedule(policy, 25)
    starter = TreeConfig(96, 8, 20)
    assert queries == [1, 11, 21]
    expected = [TreeConfig(97, 8, 20), starter] + [policy.trees[5]] * 10 + [policy.trees[6]] * 10
    assert trees == expected + [policy.trees[7]] * 3
    assert schedule(policy, 3)[1] == [TreeConfig(97, 8, 20), starter, policy.trees[8]]
    assert schedule(scripted(config.policy(12), range(9)), 62)[0] == [1, 31, 61]
    for quirk, queries, first in (
        ({"action_lag": True}, [0, 3, 6], [146, 0, 0, 0, 1, 1, 1, 2]),
        ({"first_tree": (96, 8, 20)}, [1, 4, 7], [146, 0, 0, 0, 1, 1, 1, 2]),
        ({}, [0, 3, 6], [0, 0, 0, 1, 1, 1, 2, 2]),
    ):
        policy = scripted(RespsPolicy(features_size=6, interval=3, **quirk), range(9))
        assert schedule(policy, 8) == (queries, [policy.trees[action] for action in first])


def draws(policy, turns=1, count=400) -> list[int]:
    found = []
    observation = np.ones(policy.observation_size, dtype=np.float32)
    for _ in range(turns):
        policy.reset()
        found += [policy.choose(observation) for _ in range(count)]
    return found


def test_arg_max_or_draws_at_a_temperature_from_a_generator_of_its_own():
    policy = armed(RespsPolicy(features_size=6, totals=(32, 48), depths=(3,), widths=(8, 12)))
    logits = policy.logits(np.ones(6, dtype=np.float32))
    assert set(draws(policy)) == {int(logits.argmax())}
    hot = armed(dataclasses.replace(policy, temperature=1.5))
    wanted = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum()
    found = np.bincount(draws(hot, count=6000), minlength=4) / 6000
    np.testing.assert_allclose(found, wanted, atol=0.03)

    def drawn(turns, count=400, seed=3, **settings):
        return draws(
            armed(RespsPolicy(features_size=6, temperature=1.5, seed=seed, **settings)),
            turns,
            count,
        )

    torch.manual_seed(0)
    expected = drawn(2)
    np.random.seed(1)
    torch.manual_seed(1)
    assert drawn(2) == expected != drawn(2, seed=4)
    free, tied = drawn(80, 2, 0), drawn(80, 2, 0, reseed_each_turn=True)
    assert tied == tied[:2] * 80 and len(set(tied)) <= 2 and len(set(free)) > 50


def test_text_state_sees_what_the_encoder_says():
    texts = []

    def encode(text):
        texts.append(text)
        return np.full(384, len(text), dtype=np.float64)

    policy = armed(RespsPolicy(state="text", interval=2, widths=(8, 12)))
    policy.attach(encode, read=lambda question: " ".join(map(str, PROMPT + question.view.tokens)))
    assert policy.observation_size == 384
    seen = policy.observation(asked(PLAN, tokens=[7]))
    assert seen.dtype == np.float32 and seen.tolist() == [len(texts[0])] * 384
    plain = specdec.autoregress(pair(), PROMPT, 8).tokens
    assert specdec.decode(pair(), PROMPT, policy, 8).tokens == plain
    assert all(text.startswith("3 1 4 1 5 9 2 6 ") for text in texts) and len(set(texts)) > 2
    policy = armed(RespsPolicy(state="text"))
    pytest.raises(SpecdecError, policy.answer, asked(PLAN, cycle=0)).match("needs an encoder")
    policy.attach(lambda text: np.zeros(3), lambda question: "")
    pytest.raises(AssertionError, policy.answer, asked(PLAN, cycle=0)).match(
        "must return 384 numbers"
    )


def test_settings_of_the_configs_changes_bad_ones_and_features_of_another_pair():
    assert resps.STANDARD["paper"].temperature == 1.0 and resps.STANDARD["ours"] is resps.OURS
    assert (
        resps.STANDARD["official"].temperature is None
        and resps.VARIANTS["max_entropy"] == resps.CONFIGS
    )
    ppo = {name: resps.STANDARD[name].ppo for name in ("paper", "official")}
    found = {name: (one.gamma, one.gae_lambda, one.ent_coef) for name, one in ppo.items()}
    assert found == {"paper": (0.99, 0.95, 0.01), "official": (0.95, 0.9, 0.01)}
    for config in (resps.PAPER, resps.OFFICIAL):
        learner = config.policy(6, training=True)
        assert (config.policy(6).interval, learner.interval, learner.temperature) == (30, 10, None)
    quirks, plain = resps.OFFICIAL.policy(12288), resps.PAPER.policy(12288)
    assert quirks.action_lag and quirks.reseed_each_turn and quirks.first_tree == (97, 8, 20)
    assert quirks.observation_size == 4096 and quirks.limits == LIMITS
    assert plain.observation_size == 12288 and not plain.action_lag and plain.first_tree is None
    arrays = armed(quirks, resps.OFFICIAL.ppo.pi).network.arrays()
    assert sum(array.size for array in arrays.values()) == 563_761, "the actor's size on the sheet"
    for own, other in (
        (resps.OURS, resps.PAPER),
        (resps.OURS, resps.OFFICIAL),
        (resps.PAPER, resps.OURS),
    ):
        flat = {f"ppo.{name}": value for name, value in vars(other.ppo).items()}
        assert changed(own, vars(other) | {"ppo": own.ppo} | flat) == other
    with pytest.raises(
        SpecdecError, match="unknown field of PPOConfig 'gama'; did you mean 'gamma'"
    ):
        changed(resps.OURS, {"ppo.gama": 1})
    for settings, message in (
        ({"state": "mean"}, "unknown state of Re-SpS 'mean'"),
        ({}, "needs features_size"),
        ({"state": "normalised"}, "needs features_size"),
        ({"state": "normalised", "features_size": 10, "per_layer": True}, "width of 3 layers"),
        ({"features_size": 6, "temperature": 0.0}, "above 0"),
        ({"features_size": 6, "temperature": float("nan")}, "above 0"),
        (
            {"features_size": 6, "totals": (64,), "depths": (2,), "widths": (8,)},
            "no tree of the grid",
        ),
        ({"features_size": 6, "starter": (5000, 3, 8)}, "lower total_tokens"),
    ):
        pytest.raises(SpecdecError, RespsPolicy, **settings).match(message)
    pytest.raises(AssertionError, RespsPolicy, features_size=6, interval=0)
    policy = armed(RespsPolicy(features_size=6))
    with pytest.raises(SpecdecError, match="reads 6 features, but the pair gives 4"):
        policy.answer(asked(PLAN, cycle=0, features=torch.zeros(4)))
    with pytest.raises(SpecdecError, match="but the pair gives 0"):
        specdec.decode(
            shared_bigrams(), PROMPT, armed(RespsPolicy(features_size=6, widths=(8,))), 4
        )
    policy = armed(RespsPolicy(state="official", hidden_size=4, widths=(8,)))
    plain = specdec.autoregress(shared_bigrams(), PROMPT, 8).tokens
    assert specdec.decode(shared_bigrams(), PROMPT, policy, 8).tokens == plain
