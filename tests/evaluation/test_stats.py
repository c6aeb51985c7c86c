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


def test_a_mean_by_hand():
    # Log-linear in no column, so by hand: leaving one of 1, 2, 3 out gives means 2.5, 2, 1.5.
    spread = stats.interval([[1.0], [2.0], [3.0]], lambda means: means[..., 0])
    error = np.sqrt(2 * np.var(np.log([2.5, 2.0, 1.5])))
    reach = 4.302653 * error  # Student's t with two degrees of freedom
    assert spread.value == 2
    assert np.log([spread.low, spread.high]) == pytest.approx(
        [np.log(2) - reach, np.log(2) + reach]
    )
    # P(|T| < x) of Student's t with two degrees of freedom has a closed form
    distance = np.log(2) / error
    assert spread.p_value == pytest.approx(1 - distance / np.sqrt(2 + distance**2))
    alone = stats.ratio_of_sums([6], [2])
    assert alone.value == 3.0 and np.isnan(alone[1:]).all(), "one prompt has no interval"
    assert stats.ratio_of_sums([2, 2], [2, 2]).p_value == 1.0
    assert stats.ratio_of_sums([4, 4], [2, 2]).p_value == 0.0
    for columns in (([], []), ([1, np.nan], [1, 1])):
        pytest.raises(AssertionError, stats.ratio_of_sums, *columns)


def test_p_values_of_several_tests():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04; monotone.
    assert stats.holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == pytest.approx([1, 1])
    assert stats.holm([0.2]) == pytest.approx([0.2]) and len(stats.holm([])) == 0


def decoded(prompts: int, generator) -> np.ndarray:
    """Tokens, times, and plain times of prompts whose lengths and gains are skewed, as in live
    runs. [P, 4]
    """
    tokens = np.minimum(96, generator.geometric(1 / 40, prompts) + 5)
    plain = 10 * tokens * generator.lognormal(0, 0.03, prompts)
    fast = plain / generator.lognormal(0.2, 0.35, prompts)
    return np.stack([tokens, fast, tokens, plain], axis=1)


@pytest.mark.parametrize("prompts", [4, 8, 30])
def test_coverage_of_the_interval(prompts):
    generator = np.random.default_rng(prompts)
    trials = 600

    def ratio(means):
        return means[..., 0] / means[..., 1] * means[..., 3] / means[..., 2]

    truth = ratio(decoded(400_000, generator).mean(axis=0))
    hits = common = 0
    for _ in range(trials):
        columns = decoded(prompts, generator)
        spread = speedup(*columns.T)
        hits += spread.low <= truth <= spread.high
        low, high = percentile_bootstrap(columns, ratio, generator)
        common += low <= truth <= high
    assert 0.90 <= hits / trials <= 0.98
    assert common < hits and (prompts > 8 or common / trials < 0.89)


HAND = [
    ("maths", "a", "plain", 10, 100.0, 0, 0),
    ("maths", "a", "tree", 10, 50.0, 5, 12),
    ("maths", "b", "plain", 20, 100.0, 0, 0),
    ("maths", "b", "tree", 20, 25.0, 4, 20),
    ("chat", "c", "plain", 30, 100.0, 0, 0),
    ("chat", "c", "tree", 30, 50.0, 6, 30),
]
COLUMNS = "suite prompt method new_tok total_ms cycles cycle_tok".split()


def by_hand(**more) -> pd.DataFrame:
    return pd.DataFrame(HAND, columns=COLUMNS).assign(**more)


def test_a_row_of_the_comparison_is_whole():
    table = stats.compare(by_hand(), "plain")
    assert table["suite"].tolist() == ["chat", "chat", "maths", "maths", "all", "all"]
    fast = speedup([10, 20], [50, 25], [10, 20], [100, 100])
    tau = stats.ratio_of_sums([12, 20], [5, 4])
    row = {"prompts": 2, **stats.spread_of("speedup", fast)}
    assert fast.value == 200 / 75 and tau.value == 32 / 9
    row.update(stats.spread_of("tau", tau), tau_macro=(12 / 5 + 5) / 2, tok_per_s=30 / 0.075)
    row.update(p_value=fast.p_value, p_holm=fast.p_value)
    assert table.iloc[3, 2:].to_dict() == pytest.approx(row)
    assert table.iloc[3, :2].tolist() == ["maths", "tree"]
    assert table["tau"].isna().tolist() == [True, False] * 3
    assert table["p_holm"].isna().tolist() == [True, True, True, False, True, False]
    assert table.loc[1, ["speedup", "tau"]].tolist() == [2.0, 5.0]
    one = stats.compare(by_hand().query("suite == 'maths'"), "plain")
    assert one["suite"].tolist() == ["maths", "maths"], "one suite is not pooled"


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
    assert table.loc[("all", "plain"), "speedup"] == 1
    assert np.isnan(table.loc[("all", "plain"), "p_value"])
    family = stats.compare(rows, "plain", family={"slower"}).set_index(["suite", "method"])
    assert family["p_holm"].notna().sum() == 3 and family["p_value"].equals(table["p_value"])
    row = family.loc[("all", "slower")]
    assert row["p_holm"] == row["p_value"]
    pytest.raises(SpecdecError, stats.compare, rows, "plane").match("did you mean 'plain'")
    uneven = rows.iloc[:-1]
    pytest.raises(SpecdecError, stats.compare, uneven, "plain").match("1 prompts.*equally often")
