"""The one table of a pair: every method at every temperature, predicted and by the clock."""

from __future__ import annotations

import pandas as pd

from specdec.evaluation import compare
from specdec.evaluation.compare import RATIOS, Comparison
from specdec.evaluation.compare_live import Live, live_table
from specdec.identity import FIELDS

REPLAY = "replay"
LIVE = "live"
ENDS = [f"{ratio}{end}" for ratio in RATIOS for end in ("", "_low", "_high")]
COLUMNS = ["method", "temperature", "how", "seeds", "prompts", *ENDS]
COLUMNS += ["headroom_frac", "policy_frac", "p_tuned_holm", *FIELDS, "machine"]


def long_table(comparisons: dict[float, Comparison], lives: dict[float, Live]) -> pd.DataFrame:
    """One row per method, temperature and way of timing, over all suites together; COLUMNS.

    Intervals are over prompts; by the clock from the lowest to the highest end of any seed.
    """
    tables = []
    for temperature, comparison in comparisons.items():
        table = compare.over_seeds(comparison).query("suite == 'all'")
        for ratio in RATIOS:
            for end in ("low", "high"):
                table = table.assign(**{f"{ratio}_{end}": table[f"{ratio}_prompts_{end}"]})
        tables.append(table.assign(temperature=temperature, how=REPLAY))
    for temperature, live in lives.items():
        tables.append(_clocked(live).assign(temperature=temperature, how=LIVE))
    return pd.concat(tables, ignore_index=True).reindex(columns=COLUMNS)


def _clocked(live: Live) -> pd.DataFrame:
    """Rows by the clock, all seeds of a method together."""
    table = live_table(live)
    # a run of one suite has no rows of all
    suite = "all" if (table["suite"] == "all").any() else table["suite"].iloc[0]
    groups = table[table["suite"] == suite].groupby("method", sort=False)
    pooled = groups[["prompts", *FIELDS, "machine"]].first()
    pooled["seeds"] = groups.size()
    pooled["policy_frac"] = groups["policy_frac"].mean()
    if "p_tuned_holm" in table:
        pooled["p_tuned_holm"] = groups["p_tuned_holm"].max()
    for ratio in RATIOS:
        pooled[ratio] = groups[ratio].mean()
        pooled[f"{ratio}_low"] = groups[f"{ratio}_low"].min()
        pooled[f"{ratio}_high"] = groups[f"{ratio}_high"].max()
    return pooled.reset_index()


def one_table(long: pd.DataFrame, order: list[str] | None = None) -> pd.DataFrame:
    """The printed form: a row per method, a column per temperature and way of timing.

    A cell reads "over plain / over default / over the tuned tree [interval of the last]". order: of
    the methods.
    """
    # 1. a cell for each row
    numbers = long[list(RATIOS)].map("{:.2f}".format, na_action="ignore").fillna("-")
    cells = []
    for place, row in long.iterrows():
        cell = " / ".join(numbers.loc[place])
        # the interval of the last ratio
        low = row["over_tuned_low"]
        high = row["over_tuned_high"]
        if pd.notna(low) and pd.notna(high):
            cell += f" [{low:.2f}, {high:.2f}]"
        cells.append(cell)
    # 2. a column per temperature and way of timing
    heads = [f"T={t:g}, {how}" for t, how in zip(long["temperature"], long["how"], strict=True)]
    wide = long.assign(cell=cells, head=heads).pivot(index="method", columns="head", values="cell")
    wide = wide[list(dict.fromkeys(heads))].fillna("-")
    # 3. shares of headroom and time, of replay at the first temperature
    is_first = long["temperature"] == long["temperature"].iloc[0]
    first = long[(long["how"] == REPLAY) & is_first].set_index("method")
    for name in ("seeds", "headroom_frac", "policy_frac"):
        wide[name] = first[name]
    methods = order or list(dict.fromkeys(long["method"]))
    return wide.loc[[name for name in methods if name in wide.index]].rename_axis(columns=None)
