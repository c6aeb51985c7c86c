"""Re-SpS's policy: its 177 trees, what it sees of live pairs, when it is asked, presets."""

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
from specdec.policies.resps import RespsPolicy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


WIDTH = 3 * 32  # features of `pair`


@functools.cache
def pair():
    """Forty tokens, so that 32 children can be drafted."""
    return random_pair(vocab_size=40, seed=7)


def armed(policy, hidden=(16, 16), seed=0):
    """The policy with a random network whose actions are all about equally likely."""
    return policy.fill_at_random(hidden, seed)


def scripted(policy, actions):
    """The policy with a choice that is read off a list."""
    remaining = iter(actions)
    policy.choose = lambda observation: next(remaining)
    policy.observation = lambda question: None
    return policy


def numbers(tree) -> tuple[int, int, int]:
    return tree.total_tokens, tree.depth, tree.top_k


def test_177_trees_in_the_flat_order():
    policy = RespsPolicy(features_size=6)
    flat = list(itertools.product((32, 48, 64, 80, 96, 128), range(3, 9), (8, 12, 16, 20, 32)))
    dropped = {(80, 3, 8), (96, 3, 8), (128, 3, 8)}
    assert [numbers(tree) for tree in policy.trees] == [t for t in flat if t not in dropped]
    assert policy.actions == 177 and policy.limits == TreeConfig(128, 8, 32)
    grid = RespsPolicy(features_size=6, totals=(4, 8), depths=(2, 3), widths=(2, 4))
    assert [numbers(t) for t in grid.trees] == [(4, 2, 4), (4, 3, 2), (4, 3, 4), (8, 3, 4)]
    assert grid.limits == TreeConfig(8, 3, 4), "no room for a starter that is never in force"
    lagging = dataclasses.replace(grid, action_lag=True, starter=(9, 4, 3))
    assert lagging.limits == TreeConfig(9, 4, 4)
    kept = resps.valid_trees((1, 4), (2, 3), (2, (2, 1)), small=True)
    texts = [tree.text for tree in kept]
    assert texts == ["1,2,2", "4,2,2", "4,2,2,1", "4,3,2", "4,3,2,1"]


def layer_norm(rows) -> np.ndarray:
    rows = torch.from_numpy(np.array(rows))
    return torch.nn.functional.layer_norm(rows, rows.shape[1:]).ravel().numpy()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"state": "concat"}, lambda rows: rows.ravel()),
        ({"state": "official", "hidden_size": 32}, lambda rows: (rows[0] + rows[1] + rows[2]) / 3),
        ({"state": "official", "hidden_size": 40}, lambda rows: rows.ravel()[:40]),
        ({"state": "official", "hidden_size": 100}, lambda rows: [*rows.ravel(), 0, 0, 0, 0]),
        ({"state": "normalised"}, lambda rows: layer_norm([rows.ravel()])),
        ({"state": "normalised", "per_layer": True}, layer_norm),
    ],
)
def test_observations_of_a_live_pair(settings, expected):
    policy = armed(RespsPolicy(features_size=WIDTH, interval=2, widths=(8, 12), **settings))
    seen = []

    def look(question):
        # the root is committed, but not in the state
        *before, _ = ids = PROMPT + question.view.tokens
        assert len(ids) == question.context_tok + 1
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


def schedule(policy, cycles):
    """(cycles that ask the network, trees in force) for one turn."""
    policy.reset()
    queries, trees = [], []
    for cycle in range(cycles):
        question = asked(PLAN, cycle=cycle)
        if policy.decides(question):
            queries.append(cycle)
        trees.append(policy.answer(question))
    return queries, trees


def test_a_tree_is_kept_for_an_interval():
    policy = scripted(RespsPolicy(features_size=6, interval=10), [5, 6, 7, 8])
    queries, trees = schedule(policy, 25)
    assert queries == [0, 10, 20]
    assert trees == [policy.trees[n] for n in [5] * 10 + [6] * 10 + [7] * 5]
    assert schedule(policy, 4) == ([0], [policy.trees[8]] * 4)
    live = scripted(RespsPolicy(features_size=WIDTH, interval=3, widths=(8, 12)), range(100))
    rows = specdec.decode(pair(), PROMPT, live, 24).rows
    planned = [numbers(live.trees[row.cycle // 3]) for row in rows]
    assert [(row.verified_tok, row.expansions, row.top_k) for row in rows] == planned


def test_the_schedule_of_the_code_and_each_quirk_alone():
    config = dataclasses.replace(resps.OFFICIAL, hidden_size=4)
    policy = scripted(config.policy(12, training=True), [5, 6, 7, 8])
    queries, trees = schedule(policy, 25)
    first, starter = TreeConfig(97, 8, 20), TreeConfig(96, 8, 20)
    assert queries == [1, 11, 21]
    learned = [policy.trees[n] for n in [5] * 10 + [6] * 10 + [7] * 3]
    assert trees == [first, starter, *learned]
    assert schedule(policy, 3)[1] == [first, starter, policy.trees[8]]
    assert schedule(scripted(config.policy(12), range(9)), 62)[0] == [1, 31, 61]
    for quirk, queries, first in (
        ({"action_lag": True}, [0, 3, 6], [146, 0, 0, 0, 1, 1, 1, 2]),
        ({"first_tree": (96, 8, 20)}, [1, 4, 7], [146, 0, 0, 0, 1, 1, 1, 2]),
    ):
        policy = scripted(RespsPolicy(features_size=6, interval=3, **quirk), range(9))
        assert schedule(policy, 8) == (queries, [policy.trees[action] for action in first])


def draws(turns=1, count=400, **settings) -> list[int]:
    policy = armed(RespsPolicy(features_size=6, totals=(32, 48), depths=(3, 4), **settings))
    choices = []
    for _ in range(turns):
        policy.reset()
        choices += [policy.choose(np.ones(6, dtype=np.float32)) for _ in range(count)]
    return choices


def test_arg_max_or_draws_at_a_temperature_from_a_generator_of_its_own():
    policy = armed(RespsPolicy(features_size=6, totals=(32, 48), depths=(3, 4)))
    logits = policy.logits(np.ones(6, dtype=np.float32))
    assert set(draws()) == {int(logits.argmax())}
    odds = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum()
    counts = np.bincount(draws(count=6000, temperature=1.5), minlength=len(odds))
    np.testing.assert_allclose(counts / 6000, odds, atol=0.03)
    hot = dict(turns=40, count=2, temperature=1.5)
    free = draws(**hot, seed=3)
    assert draws(**hot, seed=3) == free != draws(**hot, seed=4)
    tied = draws(**hot, reseed_each_turn=True)
    assert tied == tied[:2] * 40 and len(set(free)) > 2


def test_text_state_sees_what_the_encoder_says():
    texts = []

    def encode(text):
        texts.append(text)
        return np.full(384, len(text), dtype=np.float64)

    policy = armed(RespsPolicy(state="text", interval=2, widths=(8, 12)))
    recorded = torch.arange(384).float()
    seen = policy.observation(asked(PLAN, text_state=recorded))
    np.testing.assert_array_equal(seen, recorded)
    policy.attach(lambda asked: encode(" ".join(map(str, PROMPT + asked.view.tokens))))
    seen = policy.observation(asked(PLAN, tokens=[7]))
    assert seen.dtype == np.float32 and seen.tolist() == [len(texts[0])] * 384
    plain = specdec.autoregress(pair(), PROMPT, 8).tokens
    assert specdec.decode(pair(), PROMPT, policy, 8).tokens == plain
    assert all(text.startswith("3 1 4 1 5 9 2 6 ") for text in texts) and len(set(texts)) > 2


def test_presets():
    assert resps.VARIANTS["max_entropy"] == resps.CONFIGS and resps.STANDARD["ours"] is resps.OURS
    for name, expected in (("paper", (0.99, 0.95, 0.01)), ("official", (0.95, 0.9, 0.01))):
        ppo = resps.STANDARD[name].ppo
        assert (ppo.gamma, ppo.gae_lambda, ppo.ent_coef) == expected
    assert [resps.STANDARD[name].temperature for name in ("paper", "official")] == [1.0, None]
    learner = resps.PAPER.policy(6, training=True)
    assert (resps.PAPER.policy(6).interval, learner.interval, learner.temperature) == (30, 10, None)
    arrays = armed(resps.OFFICIAL.policy(12288), resps.OFFICIAL.ppo.pi).network.arrays()
    assert sum(array.size for array in arrays.values()) == 563_761, "the actor's size on the sheet"


def test_changes_by_name():
    changes = {"interval": 5, "ppo.gamma": 0.5, "ppo.ent_coef": 0.0}
    config = changed(resps.OURS, changes)
    assert (config.interval, config.ppo.gamma, config.ppo.ent_coef) == (5, 0.5, 0.0)
    assert config.ppo.n_steps == 512 and config.name == "ours"
    with pytest.raises(SpecdecError, match="unknown field of PPOConfig 'gama'.*'gamma'"):
        changed(resps.OURS, {"ppo.gama": 1})


def test_bad_settings_and_features_of_another_pair():
    for settings, message in (
        ({"state": "mean"}, "unknown state of Re-SpS 'mean'"),
        ({"temperature": 0.0}, "above 0"),
        ({"totals": (64,), "depths": (2,), "widths": (8,)}, "no tree of the grid"),
    ):
        pytest.raises(SpecdecError, RespsPolicy, features_size=6, **settings).match(message)
    call = (specdec.decode, shared_bigrams(), PROMPT)
    policy = armed(RespsPolicy(features_size=6, widths=(8,)))
    pytest.raises(SpecdecError, *call, policy, 4).match("reads 6 numbers, .* gives 0")
    # the code's state is zero without features
    policy = armed(RespsPolicy(state="official", hidden_size=4, widths=(8,)))
    plain = specdec.autoregress(shared_bigrams(), PROMPT, 8).tokens
    assert specdec.decode(shared_bigrams(), PROMPT, policy, 8).tokens == plain
