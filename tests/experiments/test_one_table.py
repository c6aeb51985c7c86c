"""The one table of a pair: which row and which end of an interval each figure comes from, and how
it is printed.
"""

import pandas as pd
import pytest

from experiments import one_table

OF = dict(system="s", terms="", preset="", trained_on="", adapted="", machine="here")
VALUES = {"speedup": 3.0, "over_default": 1.5, "over_tuned": 1.25}


def replayed(method: str, seeds: int) -> list[dict]:
    """Rows of `compare.over_seeds`: of all suites together, and of one that must not be shown."""
    row = {"suite": "all", "method": method, "seeds": seeds, "prompts": 4, "p_tuned_holm": 0.5}
    row |= {"headroom_frac": 0.5, "policy_frac": 0.125, **OF}
    for ratio, value in VALUES.items():
        # beside them what other seeds would give
        row |= {ratio: value, f"{ratio}_low": 0.0, f"{ratio}_high": 99.0}
        row |= {f"{ratio}_prompts_low": value - 0.25, f"{ratio}_prompts_high": value + 0.25}
    return [row, {**row, "suite": "maths", "speedup": 77.0}]


def clocked(suite: str) -> list[dict]:
    """Rows of `compare_live.live_table`: two seeds of a policy and one of plain decoding."""
    rows = []
    shared = {"suite": suite, "prompts": 2, **OF}
    for seed in range(2):
        row = shared | {"method": "ours", "seed": seed, "p_tuned_holm": 0.01 + seed}
        row["policy_frac"] = 0.25 + seed / 4
        for ratio, value in VALUES.items():
            row[ratio] = value + seed
            row[f"{ratio}_low"] = value - 0.5 - seed / 8
            row[f"{ratio}_high"] = value + 0.5 + seed
        rows.append(row)
    return [*rows, shared | {"method": "autoregressive", "seed": 0, "speedup": 1.0}]


@pytest.fixture
def tables(monkeypatch):
    """At temperature 0 both ways, at 1 in replay alone; by the clock with suites and without."""
    tables = {
        "cold": replayed("ours", 3) + replayed("tuned static", 1),
        "warm": replayed("ours", 2),
        "live": [{**row, "speedup": 1000.0} for row in clocked("maths")] + clocked("all"),
        "one suite": clocked("maths"),
    }
    monkeypatch.setattr(one_table.compare, "over_seeds", lambda name: pd.DataFrame(tables[name]))
    monkeypatch.setattr(one_table, "live_table", lambda name: pd.DataFrame(tables[name]))


def test_every_figure_is_of_all_suites_together(tables):
    long = one_table.long_table({0.0: "cold", 1.0: "warm"}, {0.0: "live"})
    assert list(long) == one_table.COLUMNS
    keys = long[["method", "temperature", "how", "seeds", "prompts"]].values.tolist()
    assert keys == [
        ["ours", 0.0, "replay", 3, 4],
        ["tuned static", 0.0, "replay", 1, 4],
        ["ours", 1.0, "replay", 2, 4],
        ["ours", 0.0, "live", 2, 2],
        ["autoregressive", 0.0, "live", 1, 2],
    ]
    rows = long.set_index(["method", "temperature", "how"])[one_table.ENDS]
    spread = [3.0, 2.75, 3.25, 1.5, 1.25, 1.75, 1.25, 1.0, 1.5]
    assert rows.loc[("ours", 0.0, "replay")].tolist() == spread
    # by the clock the mean of both seeds, between the ends of any
    clock = [3.5, 2.375, 4.5, 2.0, 0.875, 3.0, 1.75, 0.625, 2.75]
    assert rows.loc[("ours", 0.0, "live")].tolist() == clock
    live = long[(long["how"] == "live") & (long["method"] == "ours")]
    assert live[["policy_frac", "p_tuned_holm"]].values.tolist() == [[0.375, 1.01]]
    alone = one_table.long_table({}, {0.5: "one suite"}).set_index("method")
    assert alone.loc["ours", ["speedup", "temperature", "seeds"]].tolist() == [3.5, 0.5, 2]


def test_how_it_is_printed(tables):
    long = one_table.long_table({0.0: "cold", 1.0: "warm"}, {0.0: "live"})
    printed = one_table.one_table(long)
    columns = ["T=0, replay", "T=1, replay", "T=0, live", "seeds", "headroom_frac", "policy_frac"]
    assert list(printed) == columns
    replay, live = "3.00 / 1.50 / 1.25 [1.00, 1.50]", "3.50 / 2.00 / 1.75 [0.62, 2.75]"
    assert printed.loc["ours"].tolist() == [replay, replay, live, 3, 0.5, 0.125]
    assert printed.loc["tuned static"].tolist()[:4] == [replay, "-", "-", 1]
    assert printed.loc["autoregressive"].tolist()[:3] == ["-", "-", "1.00 / - / -"]
    order = ["tuned static", "nobody", "ours"]
    assert list(one_table.one_table(long, order).index) == ["tuned static", "ours"]
