"""The one table of a pair: which row and which end of an interval each figure comes from, and how
it is printed.
"""

import numpy as np
import pandas as pd
import pytest

from specdec.evaluation.stats import spread_names

from experiments import one_table

COLUMNS = (
    "method temperature how seeds prompts speedup speedup_low speedup_high over_default over_default_low over_default_high "
    "over_tuned over_tuned_low over_tuned_high headroom_frac policy_frac p_tuned_holm "
    "system terms preset trained_on adapted machine"
).split()
OF = dict(system="s", terms="", preset="", trained_on="", adapted="", machine="here")
RATIOS = {"speedup": 3.0, "over_default": 1.5, "over_tuned": 1.25}


def replayed(method: str, seeds: int, **fields) -> list[dict]:
    """Rows of `compare.over_seeds`: of all suites together, and of one that must not be shown."""
    row = {
        "suite": "all",
        "method": method,
        "seeds": seeds,
        "prompts": 4,
        "headroom_frac": 0.5,
        "policy_frac": 0.125,
    }
    for ratio, value in RATIOS.items():
        row |= {
            ratio: value,
            f"{ratio}_low": 0.0,
            f"{ratio}_high": 99.0,
        }  # what other seeds would give
        row |= {f"{ratio}_prompts_low": value - 0.25, f"{ratio}_prompts_high": value + 0.25}
    row |= {"p_tuned_holm": 0.5, **OF, **fields}
    return [row, {**row, "suite": "maths", "speedup": 77.0}]


def clocked(suites=("maths", "all"), tested=True) -> pd.DataFrame:
    """Rows of `compare_live.live_table`: two seeds of a policy and one of plain decoding."""
    rows = []
    for suite in suites:
        shared = {"suite": suite, "prompts": 2, "policy_frac": 0.25, **OF}
        for seed in range(2):
            row = shared | {
                "method": "ours",
                "seed": seed,
                "policy_frac": 0.25 + seed / 4,
                "p_tuned_holm": 0.01 + seed,
            }
            for ratio, value in RATIOS.items():
                ends = value + np.array([seed, -0.5 - seed / 8, 0.5 + seed])
                row |= dict(zip(spread_names(ratio), ends, strict=True))
            rows.append(row)
        rows.append(
            shared | {"method": "autoregressive", "seed": 0, "speedup": 1.0, "policy_frac": np.nan}
        )
    rows[0]["speedup"] += 1000 * (len(suites) > 1)  # of a suite that must not be shown
    table = pd.DataFrame(rows)
    return table if tested else table.drop(columns="p_tuned_holm")


@pytest.fixture
def long(monkeypatch):
    """At temperature 0 both ways, at 1 in replay alone."""
    tables = {
        "cold": replayed("ours", 3) + replayed("tuned static", 1, policy_frac=0.0),
        "warm": replayed("ours", 2),
    }
    monkeypatch.setattr(
        one_table.compare, "over_seeds", lambda comparison: pd.DataFrame(tables[comparison])
    )
    monkeypatch.setattr(one_table, "live_table", lambda live: {"live": clocked()}[live])
    return one_table.long_table({0.0: "cold", 1.0: "warm"}, {0.0: "live"})


def test_every_figure_is_of_all_suites_together_as_is_what_is_printed(long, monkeypatch):
    assert list(long) == COLUMNS
    spread = [3.0, 2.75, 3.25, 1.5, 1.25, 1.75, 1.25, 1.0, 1.5]
    clock = [3.5, 2.375, 4.5, 2.0, 0.875, 3.0, 1.75, 0.625, 2.75]
    nothing = [np.nan] * 6
    expected = [
        ["ours", 0.0, "replay", 3, 4, *spread, 0.5, 0.125, 0.5, *OF.values()],
        ["tuned static", 0.0, "replay", 1, 4, *spread, 0.5, 0.0, 0.5, *OF.values()],
        ["ours", 1.0, "replay", 2, 4, *spread, 0.5, 0.125, 0.5, *OF.values()],
        ["ours", 0.0, "live", 2, 2, *clock, np.nan, 0.375, 1.01, *OF.values()],
        [
            "autoregressive",
            0.0,
            "live",
            1,
            2,
            1.0,
            np.nan,
            np.nan,
            *nothing,
            np.nan,
            np.nan,
            np.nan,
            *OF.values(),
        ],
    ]
    pd.testing.assert_frame_equal(long, pd.DataFrame(expected, columns=COLUMNS), check_dtype=False)
    shown = one_table.one_table(long)
    both, live = "3.00 / 1.50 / 1.25 [1.00, 1.50]", "3.50 / 2.00 / 1.75 [0.62, 2.75]"
    columns = ["T=0, replay", "T=1, replay", "T=0, live", "seeds", "headroom_frac", "policy_frac"]
    assert list(shown) == columns and shown.columns.name is None
    assert list(shown.index) == ["ours", "tuned static", "autoregressive"]
    assert shown.loc["ours"].tolist() == [both, both, live, 3, 0.5, 0.125]
    assert shown.loc["tuned static"].tolist() == [both, "-", "-", 1, 0.5, 0.0]
    assert shown.loc["autoregressive"].tolist()[:3] == ["-", "-", "1.00 / - / -"]
    assert list(one_table.one_table(long, ["tuned static", "nobody", "ours"]).index) == [
        "tuned static",
        "ours",
    ]
    monkeypatch.setattr(one_table, "live_table", lambda live: clocked(("maths",), tested=False))
    table = one_table.long_table({}, {0.5: "live"}).set_index("method")
    assert table.loc["ours", ["speedup", "temperature", "seeds"]].tolist() == [3.5, 0.5, 2]
    assert table["p_tuned_holm"].isna().all() and table["how"].eq("live").all()
