"""Statistics against hand calculations, against a slow bootstrap, and on data whose truth is known."""

import numpy as np
import pandas as pd
import pytest
from fakes.rows import speedup

from specdec.errors import SpecdecError
from specdec.evaluation import stats


def percentile_bootstrap(columns, statistic, generator, resamples=400) -> np.ndarray:
    """The common interval, for comparison: [low, high] at 95 %."""
    prompts = len(columns)
    weights = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return np.quantile(statistic(weights @ columns / prompts), [0.025, 0.975])


def test_a_mean_by_hand():
    """Log-linear in no column, so by hand: leaving one of 1, 2, 3 out gives means 2.5, 2, 1.5."""
    found = stats.interval([[1.0], [2.0], [3.0]], lambda means: means[..., 0])
    error = np.sqrt(2 * np.var(np.log([2.5, 2.0, 1.5])))
    reach = 4.302653 * error  # Student's t with two degrees of freedom
    assert found.value == 2 and np.log([found.low, found.high]) == pytest.approx(np.log(2) + np.array([-reach, reach]))
    assert found.p_value == pytest.approx(2 * (1 - 0.5 * (1 + _t2(np.log(2) / error))))


def _t2(x: float) -> float:
    """P(|T| < x) of Student's t with two degrees of freedom, which has a closed form."""
    return x / np.sqrt(2 + x * x)


def test_many_prompts_agree_with_the_bootstrap():
    generator = np.random.default_rng(0)
    cycles = generator.integers(5, 40, 200)
    tokens = cycles * generator.uniform(1, 6, 200)
    found = stats.ratio_of_sums(tokens, cycles)
    columns = np.stack([tokens, cycles], axis=1).astype(float)
    slow = percentile_bootstrap(columns, lambda means: means[..., 0] / means[..., 1], generator, 10_000)
    assert found.value == pytest.approx(tokens.sum() / cycles.sum()) and found.prompts == 200
    assert (found.low, found.high) == pytest.approx(slow, rel=0.01)


def test_two_speedups_by_hand():
    """Prompt 1: 10 tokens in 1 s against 4 s, four times as fast; prompt 2: 10 in 10 s against 10 s, no gain."""
    tokens, seconds, base_seconds = [10, 10], [1, 10], [4, 10]
    assert speedup(tokens, seconds, tokens, base_seconds).value == pytest.approx(14 / 11)
    assert stats.mean_speedup(tokens, seconds, tokens, base_seconds).value == pytest.approx(2.5)


def test_tokens_count_in_the_speedup():
    """A method that stops after half of the tokens in half of the time is not faster."""
    assert speedup([5, 5], [1, 1], [10, 10], [2, 2]).value == pytest.approx(1)


def test_pairing_narrows_the_interval():
    """Prompts differ tenfold in time, the method always takes half: paired, the ratio has no spread at all."""
    seconds = np.linspace(1, 10, 40)
    found = speedup(np.ones(40), seconds / 2, np.ones(40), seconds)
    assert found.value == pytest.approx(2) and found.high - found.low < 1e-9


def decoded(prompts: int, generator) -> np.ndarray:
    """Tokens, times, and plain times of prompts whose lengths and gains are skewed, as in live runs. [P, 4]"""
    tokens = np.minimum(96, generator.geometric(1 / 40, prompts) + 5)
    plain = 10 * tokens * generator.lognormal(0, 0.03, prompts)
    return np.stack([tokens, plain / generator.lognormal(0.2, 0.35, prompts), tokens, plain], axis=1)


@pytest.mark.parametrize("prompts", [4, 6, 8, 30])
def test_coverage_of_the_interval(prompts):
    """A 95 % interval of the speed-up holds the truth at least 90 times in 100, where the percentile bootstrap does not."""
    generator, trials = np.random.default_rng(prompts), 600

    def ratio(means):
        return means[..., 0] / means[..., 1] * means[..., 3] / means[..., 2]

    truth = ratio(decoded(400_000, generator).mean(axis=0))
    hits = common = 0
    for _ in range(trials):
        columns = decoded(prompts, generator)
        found = speedup(*columns.T)
        hits += found.low <= truth <= found.high
        low, high = percentile_bootstrap(columns, ratio, generator)
        common += low <= truth <= high
    assert 0.90 <= hits / trials <= 0.98
    assert common < hits and (prompts > 8 or common / trials < 0.89)


def test_tests_and_intervals_agree():
    """p < 1 - level exactly where the interval leaves 1 out; with no difference p is uniform enough to be trusted."""
    generator, found = np.random.default_rng(5), []
    for _ in range(400):
        ratios = generator.lognormal(0, 0.2, 8)
        one = stats.interval(
            ratios[:, None] / np.exp(0.02), lambda means: means[..., 0]
        )  # mean of lognormal: exp(0.02)
        assert (one.p_value < 0.05) == (not one.low <= 1 <= one.high)
        found.append(one.p_value)
    assert 0.02 <= np.mean(np.array(found) < 0.05) <= 0.09


def test_one_prompt_has_no_interval():
    found = stats.ratio_of_sums([6], [2])
    assert found.value == 3 and np.isnan([found.low, found.high, found.p_value]).all()


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04; monotone: 0.04, 0.06, 0.06, 0.06."""
    assert stats.holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == pytest.approx([1, 1])
    assert stats.holm([0.2]) == pytest.approx([0.2])
    assert len(stats.holm([])) == 0


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
    table = stats.compare(rows_of({"plain": 1, "eagle3": 2, "twin": 1.0001}), "plain")
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
    for suite in ("maths", "chat", "all"):  # each a family of its own
        tested = table.loc[suite][table.loc[suite, "p_value"].notna()]
        assert len(tested) == 2 and tested["p_holm"].to_numpy() == pytest.approx(stats.holm(tested["p_value"]))


def test_only_the_family_is_adjusted():
    rows = rows_of({"plain": 1, "fast": 1.1, "other": 1.1, "twin": 1.0})
    table = stats.compare(rows, "plain", family={"fast"}).set_index(["suite", "method"])
    assert table.xs("fast", level="method")["p_holm"].equals(table.xs("fast", level="method")["p_value"])
    assert table["p_holm"].notna().sum() == 3 and table["p_value"].notna().sum() == 9


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
    ],
)
def test_what_cannot_be_computed(call, message):
    pytest.raises(AssertionError, call).match(message)


def test_unfinished_runs_and_unknown_baselines_are_refused():
    with pytest.raises(SpecdecError, match="did you mean 'plain'"):
        stats.compare(rows_of({"plain": 1}), "plane")
    with pytest.raises(SpecdecError, match="1 prompts.*equally often"):
        stats.compare(rows_of({"plain": 1, "b": 1}).iloc[:-1], "plain")


def test_an_interval_says_its_level_and_its_prompts():
    found = stats.ratio_of_sums([6, 2, 4], [2, 1, 1], level=0.5)
    assert (found.level, found.prompts, found.value) == (0.5, 3, 3.0)
    wide = stats.ratio_of_sums([6, 2, 4], [2, 1, 1])
    assert wide.level == 0.95 and wide.prompts == 3 and wide.p_value == found.p_value
    tan = np.tan(
        np.pi / 4 / 2
    )  # with one degree of freedom the quartile of Student's t is 1, the 62.5 % point tan(pi / 8)
    two = [stats.ratio_of_sums([6, 2], [2, 1], level=level) for level in (0.5, 0.25)]
    reach = [np.log(one.high / one.value) for one in two]
    assert reach[1] / reach[0] == pytest.approx(tan) and two[0].low == pytest.approx(two[0].value ** 2 / two[0].high)
    alone = stats.ratio_of_sums([6], [2], level=0.8)
    assert (alone.value, alone.level, alone.prompts) == (3.0, 0.8, 1), "one prompt has no interval"
    assert np.isnan([alone.low, alone.high, alone.p_value]).all()
    assert stats.Interval(1.0, 0.5, 2.0).level == 0.95 and stats.Interval(1.0, 0.5, 2.0).prompts == 0
    assert np.isnan(stats.Interval(1.0, 0.5, 2.0).p_value)


def test_without_spread_it_is_one_or_it_is_not():
    assert stats.ratio_of_sums([2, 2], [2, 2]).p_value == 1.0 and stats.ratio_of_sums([4, 4], [2, 2]).p_value == 0.0


HAND = [
    # suite, prompt, method, new_tok, total_ms, cycles, cycle_tok
    ("maths", "a", "plain", 10, 100.0, 0, 0),
    ("maths", "a", "tree", 10, 50.0, 5, 12),
    ("maths", "b", "plain", 20, 100.0, 0, 0),
    ("maths", "b", "tree", 20, 25.0, 4, 20),
    ("chat", "c", "plain", 30, 100.0, 0, 0),
    ("chat", "c", "tree", 30, 50.0, 6, 30),
]


def by_hand(**more) -> pd.DataFrame:
    columns = ["suite", "prompt", "method", "new_tok", "total_ms", "cycles", "cycle_tok"]
    return pd.DataFrame(HAND, columns=columns).assign(**more)


def test_a_row_of_the_comparison_is_whole():
    table = stats.compare(by_hand(), "plain", level=0.9)
    assert table["suite"].tolist() == ["chat", "chat", "maths", "maths", "all", "all"]
    tokens, times = np.array([10, 20]), np.array([50.0, 25.0])
    plain, plain_ms = tokens, np.array([100.0, 100.0])
    fast = speedup(tokens, times, plain, plain_ms, level=0.9)
    mean = stats.mean_speedup(tokens, times, plain, plain_ms, level=0.9)
    tau = stats.ratio_of_sums([12, 20], [5, 4], level=0.9)
    assert table.iloc[3].to_dict() == {
        "suite": "maths",
        "method": "tree",
        "prompts": 2,
        "speedup": pytest.approx(200 / 75),
        "speedup_low": pytest.approx(fast.low),
        "speedup_high": pytest.approx(fast.high),
        "mean_speedup": pytest.approx(3.0),
        "mean_speedup_low": mean.low,
        "mean_speedup_high": mean.high,
        "tok_per_s": 30 / 0.075,
        "p_value": pytest.approx(fast.p_value),
        "tau": pytest.approx(32 / 9),
        "tau_low": tau.low,
        "tau_high": tau.high,
        "tau_macro": pytest.approx((12 / 5 + 5) / 2),
        "p_holm": pytest.approx(fast.p_value),
    }
    assert table["tau"].isna().tolist() == [True, False] * 3 and table["p_holm"].isna().tolist() == [
        True,
        True,
        True,
    ] + [False, True, False]
    assert table.loc[1, ["speedup", "tau"]].tolist() == [2.0, 5.0] and np.isnan(table.loc[1, "speedup_low"])
    one = stats.compare(by_hand().query("suite == 'maths'"), "plain")
    assert one["suite"].tolist() == ["maths", "maths"], "one suite is not pooled"
    bare = stats.compare(by_hand().drop(columns=["cycles", "cycle_tok"]), "plain")
    assert "tau" not in bare and bare["speedup"].tolist() == table["speedup"].tolist()


def test_repeats_of_a_prompt_are_summed():
    twice = pd.concat([by_hand(repeat=0), by_hand(repeat=1, total_ms=by_hand()["total_ms"] * 3)])
    summed = stats.per_prompt(twice)
    assert summed.index.tolist() == [("chat", "c"), ("maths", "a"), ("maths", "b")]
    assert summed["total_ms", "tree", 0].tolist() == [200.0, 200.0, 100.0]
    assert summed["cycle_tok", "tree", 0].tolist() == [60, 24, 40] and summed["new_tok", "plain", 0].tolist() == [
        60,
        20,
        40,
    ]
    assert list(summed.columns.unique(0)) == ["new_tok", "total_ms", "cycles", "cycle_tok"]


def test_what_the_noise_check_says():
    found = stats.noise_check(by_hand(), "tree", "plain", level=0.9)
    ratio = speedup([30, 10, 20], [50, 50, 25], [30, 10, 20], [100, 100, 100], level=0.9)
    assert found == {
        "speedup": pytest.approx(300 / 125),
        "speedup_low": pytest.approx(ratio.low),
        "speedup_high": pytest.approx(ratio.high),
        "width": pytest.approx(ratio.high - ratio.low),
        "prompts": 3,
        "p_value": pytest.approx(ratio.p_value),
        "quiet": False,
    }


def test_rows_are_pooled_and_put_in_order():
    rows = by_hand()
    both = stats.with_all(rows)
    assert both["suite"].tolist() == [*rows["suite"], *["all"] * 6]
    assert stats.with_all(rows[:4]).equals(rows[:4])
    table = pd.DataFrame(
        [("y", "b", 1), ("x", "a", 0), ("y", "b", 0), ("x", "b", 0), ("y", "a", 0)], columns=["suite", "method", "seed"]
    )
    ordered = [["y", "b", 0], ["y", "b", 1], ["y", "a", 0], ["x", "b", 0], ["x", "a", 0]]
    found = stats.in_order(table, ["b", "a"])
    assert found.values.tolist() == ordered and found.index.tolist() == list(range(5))
    assert stats.in_order(table.drop(columns="seed"), ["a", "b"])["method"].tolist() == ["a", "b", "b", "a", "b"]
