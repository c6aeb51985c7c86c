"""The chi-square test passes on exact rules, in the engine too, and fails on biased ones."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from fakes.pairs import BigramDrafter, bigram_pair, shared_bigrams

import specdec
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.verification import Picker
from specdec.errors import SpecdecError
from specdec.evaluation import lossless
from specdec.evaluation.lossless import ChiSquare, chi_square, continuation_law, distribution_test

PROMPT = [3, 1, 2]
SETTINGS = dict(new_tok=3, draws=400, temperature=1.5, progress=False)


def small_pair(make_drafter) -> Pair:
    target = bigram_pair(vocab_size=6, say=0.6).target
    return Pair(target, make_drafter(target))


@pytest.mark.parametrize("tree", [(8, 2, 3), (4, 0, 3), (4, 2, 1)], ids=["tree", "star", "chain"])
def test_the_engine_samples_from_the_target(tree):
    result = distribution_test(small_pair(BigramDrafter), PROMPT, Static(*tree), **SETTINGS)
    assert result.passed and result.degrees >= 10, result


def test_the_exact_law_is_a_law_also_cut_by_top_k(monkeypatch):
    pair = small_pair(BigramDrafter)
    law = continuation_law(pair, PROMPT, 2, Picker.from_settings(1.5))
    assert len(law) == 36 and sum(law.values()) == pytest.approx(1, abs=1e-5)
    logits = pair.target.model(torch.tensor([[*PROMPT, 4]])).logits[0].detach() / 1.5
    expected = float(logits[-2].softmax(-1)[4] * logits[-1].softmax(-1)[5])
    assert law[4, 5] == pytest.approx(expected, abs=1e-5)
    greedy = tuple(specdec.autoregress(pair, PROMPT, 4).tokens)
    assert list(continuation_law(pair, PROMPT, 4, Picker())) == [greedy]
    few = {**SETTINGS, "draws": 250, "temperature": 1.3, "top_k": 4}
    result = distribution_test(shared_bigrams(), PROMPT, Static(8, 2, 3), **few)
    assert result.passed and result.degrees >= 5, result
    monkeypatch.setattr(lossless, "MOST_CELLS", 8)
    with pytest.raises(SpecdecError, match="more than 8 continuations of 2 tokens"):
        continuation_law(pair, PROMPT, 2, Picker.from_settings(1.0, top_k=3))


def test_counts_of_seeds_in_a_row(monkeypatch):
    def tokens(*arguments, seed, **settings):
        return SimpleNamespace(tokens=[int(seed % 4 > 0)])

    decode = Mock(side_effect=tokens)
    monkeypatch.setattr(lossless, "decode", decode)
    monkeypatch.setattr(lossless, "continuation_law", lambda *_: {(0,): 0.25, (1,): 0.75})
    pair = shared_bigrams()
    few = dict(draws=40, new_tok=1, top_k=2, progress=False)
    assert distribution_test(pair, [3], "tree", **few) == ChiSquare(0.0, 1, 1.0)
    settings = dict(max_new_tokens=1, stop_tokens=(), temperature=1.0, top_k=2)
    expected = [call(pair, [3], "tree", seed=seed, **settings) for seed in range(40)]
    assert decode.mock_calls == expected
    draw = Mock(return_value=[2])
    assert not distribution_test(pair, [3], draw=draw, **few).passed
    assert draw.mock_calls == [call(seed) for seed in range(40)]
    with pytest.raises(SpecdecError, match="temperature above 0"):
        distribution_test(pair, [3], temperature=0.0)


def test_chi_square_by_hand_and_on_exact_draws():
    # 100 draws: cells of 50, 46, and of 4 (expected 2 and 2) together.
    result = chi_square([54, 40, 2, 4], [0.5, 0.46, 0.02, 0.02])
    assert result.statistic == pytest.approx(16 / 50 + 36 / 46 + 4 / 4)
    # two degrees of freedom have a closed form
    assert result.degrees == 2 and result.p_value == pytest.approx(np.exp(-result.statistic / 2))
    far = chi_square([30, 70], [0.5, 0.5])
    assert (far.statistic, far.degrees, far.passed) == (16.0, 1, False)
    assert far.p_value == pytest.approx(6.3e-5, rel=0.01)
    assert chi_square([48, 52], [0.5, 0.5]).passed
    assert chi_square([90, 5, 5], [0.9, 0.05, 0.05]).degrees == 2, "five expected draws are enough"
    assert chi_square([3, 0], [1.0, 0.0]) == ChiSquare(0.0, 0, 1.0)
    assert chi_square([3, 1], [1.0, 0.0]) == ChiSquare(float("inf"), 0, 0.0), "an impossible draw"
    assert not chi_square([95, 5], [0.9999, 0.0001]).passed, "a rare token drawn often"
    # Over repeated exact samples the test errs as often as its level says.
    numbers = np.random.default_rng(3)
    probs = np.array([0.4, 0.3, 0.2, 0.05, 0.05])
    p_values = [chi_square(numbers.multinomial(500, probs), probs).p_value for _ in range(400)]
    counts = np.histogram(p_values, bins=5, range=(0, 1))[0]
    assert chi_square(counts, np.full(5, 0.2)).passed
