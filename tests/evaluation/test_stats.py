"""Statistics against hand calculations and a slow bootstrap, and on data of known truth."""

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


def test_a_mean_by_hand_and_holm_and_a_ratio_of_many_beside_the_bootstrap():
    # Log-linear in no column, so by hand: leaving one of 1, 2, 3 out gives means 2.5, 2, 1.5.
    found = stats.interval([[1.0], [2.0], [3.0]], lambda means: means[..., 0])
    error = np.sqrt(2 * np.var(np.log([2.5, 2.0, 1.5])))
    reach = 4.302653 * error  # Student's t with two degrees of freedom
    assert found.value == 2
    assert np.log([found.low, found.high]) == pytest.approx(np.log(2) + np.array([-reach, reach]))
    assert found.p_value == pytest.approx(2 * (1 - 0.5 * (1 + _t2(np.log(2) / error))))
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04; monotone: 0.04,
    # 0.06, 0.06, 0.06.
    assert stats.holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == pytest.approx([1, 1])
    assert stats.holm([0.2]) == pytest.approx([0.2]) and len(stats.holm([])) == 0
    generator = np.random.default_rng(0)
    cycles = generator.integers(5, 40, 200)
    tokens = cycles * generator.uniform(1, 6, 200)
    found = stats.ratio_of_sums(tokens, cycles)
    columns = np.stack([tokens, cycles], axis=1).astype(float)
    slow = percentile_bootstrap(
        columns, lambda means: means[..., 0] / means[..., 1], generator, 10_000
    )
    assert found.value == pytest.approx(tokens.sum() / cycles.sum()) and found.prompts == 200
    assert (found.low, found.high) == pytest.approx(slow, rel=0.01)


def _t2(x: float) -> float:
    """P(|T| < x) of Student's t with two degrees of freedom, which has a closed form."""
    return x / np.sqrt(2 + x * x)


def decoded(prompts: int, generator) -> np.ndarray:
    """Tokens, times, and plain times of prompts whose lengths and gains are skewed, as in live
    runs. [P, 4]
    """
    tokens = np.minimum(96, generator.geometric(1 / 40, prompts) + 5)
    plain = 10 * tokens * generator.lognormal(0, 0.03, prompts)
    return np.stack(
        [tokens, plain / generator.lognormal(0.2, 0.35, prompts), tokens, plain], axis=1
    )


@pytest.mark.parametrize("prompts", [4, 6, 8, 30])
def test_coverage_of_the_interval(prompts):
    generator = np.random.default_rng(prompts)
    trials = 600

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
    """p < 1 - level exactly where the interval leaves 1 out; with no difference p is uniform enough
    to be trusted.
    """
    generator = np.random.default_rng(5)
    found = []
    for _ in range(400):
        ratios = generator.lognormal(0, 0.2, 8)
        centred = ratios[:, None] / np.exp(0.02)  # by the mean of such a lognormal
        one = stats.interval(centred, lambda means: means[..., 0])
        assert (one.p_value < 0.05) == (not one.low <= 1 <= one.high)
        found.append(one.p_value)
    assert 0.02 <= np.mean(np.array(found) < 0.05) <= 0.09


def test_an_interval_says_its_level_and_its_prompts():
    found = stats.ratio_of_sums([6, 2, 4], [2, 1, 1], level=0.5)
    assert (found.level, found.prompts, found.value) == (0.5, 3, 3.0)
    wide = stats.ratio_of_sums([6, 2, 4], [2, 1, 1])
    assert wide.level == 0.95 and wide.prompts == 3 and wide.p_value == found.p_value
    # with one degree of freedom the quartile of Student's t is 1, the 62.5 % point this
    tan = np.tan(np.pi / 4 / 2)
    two = [stats.ratio_of_sums([6, 2], [2, 1], level=level) for level in (0.5, 0.25)]
    reach = [np.log(one.high / one.value) for one in two]
    assert reach[1] / reach[0] == pytest.approx(tan)
    assert two[0].low == pytest.approx(two[0].value ** 2 / two[0].high)
    alone = stats.ratio_of_sums([6], [2], level=0.8)
    assert (alone.value, alone.level, alone.prompts) == (3.0, 0.8, 1), "one prompt has no interval"
    assert np.isnan([alone.low, alone.high, alone.p_value]).all()
    assert stats.Interval(1.0, 0.5, 2.0).level == 0.95
    assert stats.Interval(1.0, 0.5, 2.0).prompts == 0
    assert np.isnan(stats.Interval(1.0, 0.5, 2.0).p_value)
    wrong = {
        "at least one prompt": ([], []),
        "equal lengths": ([1, 2], [1]),
        "NaN": ([1, np.nan], [1, 1]),
    }
    for message, columns in wrong.items():
        pytest.raises(AssertionError, stats.ratio_of_sums, *columns).match(message)
    pytest.raises(AssertionError, stats.ratio_of_sums, [1], [1], level=95).match("between 0 and 1")
    assert stats.ratio_of_sums([2, 2], [2, 2]).p_value == 1.0
    assert stats.ratio_of_sums([4, 4], [2, 2]).p_value == 0.0


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
    tokens = np.array([10, 20])
    times = np.array([50.0, 25.0])
    plain = tokens
    plain_ms = np.array([100.0, 100.0])
    fast = speedup(tokens, times, plain, plain_ms, level=0.9)
    mean = stats.mean_speedup(tokens, times, plain, plain_ms, level=0.9)
    tau = stats.ratio_of_sums([12, 20], [5, 4], level=0.9)
    row = dict(prompts=2, speedup=200 / 75, speedup_low=fast.low, speedup_high=fast.high)
    row |= dict(
        mean_speedup=3.0,
        mean_speedup_low=mean.low,
        mean_speedup_high=mean.high,
        tok_per_s=30 / 0.075,
    )
    row |= dict(
        p_value=fast.p_value,
        tau=32 / 9,
        tau_low=tau.low,
        tau_high=tau.high,
        tau_macro=(12 / 5 + 5) / 2,
    )
    row |= dict(p_holm=fast.p_value)
    assert table.iloc[3, 2:].to_dict() == pytest.approx(row)
    assert table.iloc[3, :2].tolist() == ["maths", "tree"]
    assert table["tau"].isna().tolist() == [True, False] * 3
    assert table["p_holm"].isna().tolist() == [True, True, True, False, True, False]
    assert table.loc[1, ["speedup", "tau"]].tolist() == [2.0, 5.0]
    assert np.isnan(table.loc[1, "speedup_low"])
    one = stats.compare(by_hand().query("suite == 'maths'"), "plain")
    assert one["suite"].tolist() == ["maths", "maths"], "one suite is not pooled"
    bare = stats.compare(by_hand().drop(columns=["cycles", "cycle_tok"]), "plain")
    assert "tau" not in bare and bare["speedup"].tolist() == table["speedup"].tolist()


def test_rows_are_summed_pooled_and_put_in_order_and_their_noise_is_told():
    twice = pd.concat([by_hand(repeat=0), by_hand(repeat=1, total_ms=by_hand()["total_ms"] * 3)])
    summed = stats.per_prompt(twice)
    assert summed.index.tolist() == [("chat", "c"), ("maths", "a"), ("maths", "b")]
    assert summed["total_ms", "tree", 0].tolist() == [200.0, 200.0, 100.0]
    assert summed["cycle_tok", "tree", 0].tolist() == [60, 24, 40]
    assert summed["new_tok", "plain", 0].tolist() == [60, 20, 40]
    assert list(summed.columns.unique(0)) == ["new_tok", "total_ms", "cycles", "cycle_tok"]
    rows = by_hand()
    both = stats.with_all(rows)
    assert both["suite"].tolist() == [*rows["suite"], *["all"] * 6]
    assert stats.with_all(rows[:4]).equals(rows[:4])
    keys = [("y", "b", 1), ("x", "a", 0), ("y", "b", 0), ("x", "b", 0), ("y", "a", 0)]
    table = pd.DataFrame(keys, columns=["suite", "method", "seed"])
    ordered = [["y", "b", 0], ["y", "b", 1], ["y", "a", 0], ["x", "b", 0], ["x", "a", 0]]
    found = stats.in_order(table, ["b", "a"])
    assert found.values.tolist() == ordered and found.index.tolist() == list(range(5))
    assert stats.in_order(table.drop(columns="seed"), ["a", "b"])["method"].tolist() == [
        "a",
        "b",
        "b",
        "a",
        "b",
    ]
    found = stats.noise_check(by_hand(), "tree", "plain", level=0.9)
    ratio = speedup([30, 10, 20], [50, 50, 25], [30, 10, 20], [100, 100, 100], level=0.9)
    said = dict(
        speedup=300 / 125,
        speedup_low=ratio.low,
        speedup_high=ratio.high,
        width=ratio.high - ratio.low,
    )
    said |= dict(prompts=3, p_value=ratio.p_value, quiet=False)
    assert found == pytest.approx(said)
    tree = by_hand().query("method == 'tree'")
    twin = tree.assign(method="twin", total_ms=tree["total_ms"] * [1.01, 0.99, 1.0])
    assert stats.noise_check(pd.concat([tree, twin]), "tree", "twin")["quiet"]


def test_each_suite_is_a_family_of_its_own():
    tree = by_hand().query("method == 'tree'")
    slower = tree.assign(method="slower", total_ms=tree["total_ms"] * [1.1, 1.2, 1.15])
    rows = pd.concat([by_hand(), slower, tree.assign(method="twin")])
    rows = pd.concat([rows[rows["suite"] == "maths"].assign(suite="code"), rows])
    table = stats.compare(rows, "plain").set_index(["suite", "method"])
    for suite in ("maths", "code", "all"):
        tested = table.loc[suite].drop("plain")
        assert len(tested) == 3
        assert tested["p_holm"].tolist() == stats.holm(tested["p_value"]).tolist()
        assert tested["p_holm"].gt(tested["p_value"]).all()
    assert table.loc[("all", "plain"), "speedup"] == 1
    assert np.isnan(table.loc[("all", "plain"), "p_value"])
    own = stats.compare(rows, "plain", family={"slower"}).set_index(["suite", "method"])
    assert own["p_holm"].notna().sum() == 3 and own["p_value"].equals(table["p_value"])
    assert own.loc[("all", "slower"), "p_holm"] == own.loc[("all", "slower"), "p_value"]
    pytest.raises(SpecdecError, stats.compare, rows, "plane").match("did you mean 'plain'")
    pytest.raises(SpecdecError, stats.compare, rows.iloc[:-1], "plain").match(
        "1 prompts.*equally often"
    )
