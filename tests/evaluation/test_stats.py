"""Statistics against hand calculations, against a slow bootstrap, and on data whose truth is known."""

import numpy as np
import pandas as pd
import pytest

from specdec.errors import SpecdecError
from specdec.evaluation import stats


def slow_bootstrap(numerator, denominator, resamples, seed):
    """The obvious one: draw prompts one resample at a time."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(resamples):
        drawn = generator.integers(0, len(numerator), len(numerator))
        found.append(numerator[drawn].sum() / denominator[drawn].sum())
    return np.quantile(found, [0.025, 0.975])


def test_ratio_of_sums_agrees_with_the_slow_bootstrap():
    generator = np.random.default_rng(0)
    cycles = generator.integers(5, 40, 60)
    tokens = cycles * generator.uniform(1, 6, 60)
    fast = stats.ratio_of_sums(tokens, cycles, seed=1)
    low, high = slow_bootstrap(tokens, cycles, 10_000, seed=2)
    assert fast.value == pytest.approx(tokens.sum() / cycles.sum())
    assert (fast.low, fast.high) == pytest.approx((low, high), rel=0.01)
    assert fast.low < fast.value < fast.high and fast.prompts == 60


def test_two_speedups_by_hand():
    """Prompt 1: 10 tokens in 1 s against 4 s, four times as fast; prompt 2: 10 in 10 s against 10 s, no gain."""
    tokens, seconds, base_seconds = [10, 10], [1, 10], [4, 10]
    assert stats.speedup(tokens, seconds, tokens, base_seconds).value == pytest.approx(14 / 11)
    assert stats.mean_speedup(tokens, seconds, tokens, base_seconds).value == pytest.approx(2.5)


def test_tokens_count_in_the_speedup():
    """A method that stops after half of the tokens in half of the time is not faster."""
    assert stats.speedup([5, 5], [1, 1], [10, 10], [2, 2]).value == pytest.approx(1)


def test_pairing_narrows_the_interval():
    """Prompts differ tenfold in time, the method always takes half: paired, the ratio has no spread at all."""
    seconds = np.linspace(1, 10, 40)
    found = stats.speedup(np.ones(40), seconds / 2, np.ones(40), seconds)
    assert found.value == pytest.approx(2) and found.high - found.low < 1e-9


def test_coverage_of_the_interval():
    """A 90 % interval for a known ratio holds it about 90 times in 100."""
    generator = np.random.default_rng(3)
    hits = 0
    for trial in range(300):
        weights = generator.uniform(1, 2, 50)
        noisy = 3 * weights * generator.lognormal(-0.02, 0.2, 50)  # mean of this lognormal is exp(0) = 1
        found = stats.ratio_of_sums(noisy, weights, level=0.9, resamples=400, seed=trial)
        hits += found.low <= 3 <= found.high
    assert 0.84 <= hits / 300 <= 0.95


def test_seeds_repeat():
    tokens, cycles = np.arange(1, 21), np.full(20, 5)
    assert stats.ratio_of_sums(tokens, cycles, seed=4) == stats.ratio_of_sums(tokens, cycles, seed=4)
    assert stats.ratio_of_sums(tokens, cycles, seed=4) != stats.ratio_of_sums(tokens, cycles, seed=5)


def test_one_prompt_has_no_interval():
    found = stats.ratio_of_sums([6], [2])
    assert found.value == 3 and np.isnan(found.low) and np.isnan(found.high)


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04; monotone: 0.04, 0.06, 0.06, 0.06."""
    assert stats.holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == pytest.approx([1, 1])
    assert stats.holm([0.2]) == pytest.approx([0.2])
    assert len(stats.holm([])) == 0


def test_wilcoxon_by_hand():
    """Five differences of one sign: the two-sided exact p-value is 2 / 2**5."""
    assert stats.wilcoxon([2, 3, 4, 5, 6], [1, 1, 1, 1, 1]) == pytest.approx(2 / 32)
    assert stats.wilcoxon([1, 2, 3], [1, 2, 3]) == 1.0


def rows_of(speed: dict, prompts=40, repeats=2, seed=0) -> pd.DataFrame:
    """prompts.parquet of methods whose true speeds are known, with 5 % noise per measurement."""
    generator = np.random.default_rng(seed)
    made = []
    for suite in ("maths", "chat"):
        for prompt in range(prompts):
            length = int(generator.integers(20, 60))
            for method, factor in speed.items():
                for repeat in range(repeats):
                    seconds = length * 0.01 / factor * generator.lognormal(0, 0.05)
                    cycles = 0 if factor == 1 else length // 3
                    made.append(
                        (suite, f"p{prompt}", method, repeat, length, 1e3 * seconds, cycles, length if cycles else 0)
                    )
    return pd.DataFrame(
        made, columns=["suite", "prompt", "method", "repeat", "new_tok", "total_ms", "cycles", "cycle_tok"]
    )


def test_compare_finds_the_planted_speeds():
    table = stats.compare(rows_of({"plain": 1, "eagle3": 2, "twin": 1.0001}), "plain", resamples=2000)
    table = table.set_index(["suite", "method"])
    assert set(table.index.unique("suite")) == {"maths", "chat", "all"}
    fast, base, twin = (table.loc["all", name] for name in ("eagle3", "plain", "twin"))
    assert 1.95 < fast["speedup_low"] < fast["speedup"] < fast["speedup_high"] < 2.05
    assert fast["mean_speedup"] == pytest.approx(2, abs=0.05)
    assert fast["p_holm"] < 1e-6 and twin["p_holm"] > 0.05
    assert base["speedup"] == 1 and np.isnan(base["p_value"]) and np.isnan(base["tau"])
    assert fast["tau"] == pytest.approx(3.1, abs=0.15) and fast["tau_macro"] == pytest.approx(3.1, abs=0.15)
    assert base["tok_per_s"] == pytest.approx(100, rel=0.02)
    assert fast["prompts"] == 80
    tested = table[table["p_value"].notna()]
    assert tested["p_holm"].to_numpy() == pytest.approx(stats.holm(tested["p_value"]))


def test_noise_check_passes_on_twins_and_fails_on_a_difference():
    rows = rows_of({"a": 1, "b": 1, "slower": 0.95})
    same, different = stats.noise_check(rows, "a", "b"), stats.noise_check(rows, "a", "slower")
    assert same["quiet"] and 0 < same["width"] < 0.05
    assert not different["quiet"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.ratio_of_sums([], []), "at least one prompt"),
        (lambda: stats.ratio_of_sums([1, 2], [1]), "equal lengths"),
        (lambda: stats.ratio_of_sums([1, np.nan], [1, 1]), "NaN"),
        (lambda: stats.ratio_of_sums([1], [1], level=95), "between 0 and 1"),
        (lambda: stats.wilcoxon([0, 1], [1, 1]), "positive"),
    ],
)
def test_what_cannot_be_computed(call, message):
    with pytest.raises(AssertionError, match=message):
        call()


def test_unfinished_runs_and_unknown_baselines_are_refused():
    with pytest.raises(SpecdecError, match="did you mean 'plain'"):
        stats.compare(rows_of({"plain": 1}), "plane")
    with pytest.raises(SpecdecError, match="1 prompts.*equally often"):
        stats.compare(rows_of({"plain": 1, "b": 1}).iloc[:-1], "plain")
