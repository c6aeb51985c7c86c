"""The chi-square test passes on exact rules, in the engine too, and fails on biased ones."""

import numpy as np
import pytest
import torch
from fakes.pairs import BigramDrafter, bigram_pair, shared_bigrams
from fakes.reference import children_of, residual_rejection

import specdec
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.verification import Picker
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import ChiSquare, chi_square, continuation_law, distribution_test

PROMPT = [3, 1, 2]
SETTINGS = dict(new_tok=3, draws=400, temperature=1.5, progress=False)


class DrawingDrafter(BigramDrafter):
    """Children are drawn without replacement.

    sort: hand them over by score instead of in draw order.
    """

    def __init__(self, target, sort=False):
        super().__init__(target)
        self.numbers = torch.Generator()
        self.sort = sort

    def expand(self, tokens, rows, top_k):
        probs = self.table[tokens].exp()
        drawn = torch.multinomial(probs, top_k, generator=self.numbers)
        drawn = (
            drawn.gather(1, self.table[tokens].gather(1, drawn).argsort(descending=True))
            if self.sort
            else drawn
        )
        return drawn, self.table[tokens].gather(1, drawn)


def residual_rule(drafter, numbers):
    """A stand-in for the engine's verification: accept x with min(1, p / q), in the order of the
    tree.
    """

    def walk(picker, tree, logits, committed):
        path = [0]
        ids = committed
        while True:
            node = path[-1]
            probs = picker.probabilities(logits[node], ids)
            children = children_of(tree.parent.tolist(), node)
            tokens = tree.token[children].tolist()
            draft = drafter.table[tree.token[node]].exp()
            index, left = residual_rejection(tokens, probs, draft, iter(numbers.random, None))
            if index is None:
                bonus = int(
                    numbers.choice(len(left), p=left.double().numpy() / float(left.double().sum()))
                )
                return path, [*tree.token[path[1:]].tolist(), bonus]
            path.append(children[index])
            ids = torch.cat((ids, tree.token[children[index]][None]))

    return walk


def draws_of(pair):
    """draw(seed) for distribution_test; one level of children, none of them pruned."""

    settings = dict(
        max_new_tokens=SETTINGS["new_tok"], temperature=SETTINGS["temperature"], stop_tokens=()
    )

    def draw(seed):
        if isinstance(pair.drafter, DrawingDrafter):
            pair.drafter.numbers.manual_seed(seed)
        return specdec.decode(pair, PROMPT, Static(4, 0, 3), seed=seed, **settings).tokens

    return draw


def small_pair(make_drafter) -> Pair:
    target = bigram_pair(vocab_size=6, say=0.6).target
    return Pair(target, make_drafter(target))


@pytest.mark.parametrize(
    "policy", [Static(8, 2, 3), Static(4, 0, 3), Static(4, 2, 1)], ids=["tree", "star", "chain"]
)
def test_the_engine_samples_from_the_target(policy):
    found = distribution_test(small_pair(BigramDrafter), PROMPT, policy, **SETTINGS)
    assert found.passed and found.draws == 400 and found.degrees >= 10, found


def test_the_exact_law_is_a_law_also_cut_by_top_k():
    pair = small_pair(BigramDrafter)
    law = continuation_law(pair, PROMPT, 2, Picker.from_settings(1.5))
    assert len(law) == 36 and sum(law.values()) == pytest.approx(1, abs=1e-5)
    logits = pair.target.model(torch.tensor([[*PROMPT, 4]])).logits[0].detach()
    expected = float((logits[-2] / 1.5).softmax(-1)[4] * (logits[-1] / 1.5).softmax(-1)[5])
    assert law[4, 5] == pytest.approx(expected, abs=1e-5)
    assert list(continuation_law(pair, PROMPT, 4, Picker())) == [
        tuple(specdec.autoregress(pair, PROMPT, 4).tokens)
    ]
    few = SETTINGS | dict(draws=250, temperature=1.3, top_k=4)
    found = distribution_test(shared_bigrams(), PROMPT, Static(8, 2, 3), **few)
    assert found.passed and found.degrees >= 5, found


@pytest.mark.parametrize(
    ("make_drafter", "exact"),
    [
        pytest.param(DrawingDrafter, True, id="children drawn, residual rule, draw order"),
        pytest.param(
            lambda t: DrawingDrafter(t, sort=True), False, id="children drawn, then sorted by score"
        ),
        pytest.param(BigramDrafter, False, id="top-k children scored with the p/q rule"),
    ],
)
def test_classical_rules_in_the_engine(make_drafter, exact, monkeypatch):
    pair = small_pair(make_drafter)
    monkeypatch.setattr(Picker, "walk", residual_rule(pair.drafter, np.random.default_rng(1)))
    found = distribution_test(pair, PROMPT, draw=draws_of(pair), **SETTINGS)
    assert found.passed is exact, found


def test_chi_square_by_hand_and_on_exact_draws():
    # 100 draws: cells of 50, 46, and of 4 (expected 2 and 2) together.
    found = chi_square([54, 40, 2, 4], [0.5, 0.46, 0.02, 0.02])
    assert found.statistic == pytest.approx(16 / 50 + 36 / 46 + 4 / 4)
    assert (found.degrees, found.draws, found.level) == (2, 100, 1e-3)
    assert found.p_value == pytest.approx(np.exp(-found.statistic / 2)), (
        "two degrees of freedom have a closed form"
    )
    far = chi_square([30, 70], [0.5, 0.5])
    assert (far.statistic, far.degrees, far.passed) == (16.0, 1, False)
    assert far.p_value == pytest.approx(6.3e-5, rel=0.01)
    assert chi_square([48, 52], [0.5, 0.5]).passed
    assert chi_square([10], [1.0], level=0.5) == ChiSquare(0.0, 0, 1.0, 10, 0.5)
    assert chi_square([90, 5, 5], [0.9, 0.05, 0.05]).degrees == 2, "five expected draws are enough"
    assert ChiSquare(1.0, 1, 0.01, 10, 0.01).passed
    assert not ChiSquare(1.0, 1, 0.009, 10, 0.01).passed
    assert chi_square([3, 0], [1.0, 0.0]) == ChiSquare(0.0, 0, 1.0, 3, 1e-3)
    assert chi_square([3, 1], [1.0, 0.0], 0.5) == ChiSquare(float("inf"), 0, 0.0, 4, 0.5), (
        "an impossible draw"
    )
    # Over repeated exact samples the test errs as often as its level says, no more and not never.
    numbers = np.random.default_rng(3)
    probs = np.array([0.4, 0.3, 0.2, 0.05, 0.05])
    p_values = [chi_square(numbers.multinomial(500, probs), probs).p_value for _ in range(400)]
    counts = np.histogram(p_values, bins=5, range=(0, 1))[0]
    assert chi_square(counts, np.full(5, 0.2)).passed


def test_bad_input():
    for message, wrong in (
        ("draws must be", dict(draws=0)),
        ("new_tok must be", dict(new_tok=0)),
        ("seed must be", dict(seed=0.5)),
        ("the temperature must be above 0", dict(temperature=0.0)),
        ("temperature", dict(temperature=float("nan"))),
    ):
        pytest.raises(
            SpecdecError, distribution_test, shared_bigrams(), PROMPT, **SETTINGS | wrong
        ).match(message)
    for bad in (([1, 2], [1.0]), ([0, 0], [0.5, 0.5]), ([5, 5], [0.5, 0.6]), ([[5]], [[1.0]])):
        pytest.raises(AssertionError, chi_square, *bad).match("one count per cell|sum to 1")
