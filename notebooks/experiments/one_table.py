"""The one table of a pair: every method at every temperature, predicted and by the clock, over all
that it is compared with.

Rows of replay come from `compare.over_seeds`, rows of the clock from `compare_live.live_table`;
nothing is measured here.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec.evaluation import compare
from specdec.evaluation.compare import RATIOS, Comparison
from specdec.evaluation.compare_live import Live, live_table
from specdec.identity import FIELDS

REPLAY, LIVE = "replay", "live"
HEADS = {"speedup": "plain", "over_default": "default", "over_tuned": "tuned"}
ENDS = [f"{ratio}{end}" for ratio in RATIOS for end in ("", "_low", "_high")]
COLUMNS = [
    "method",
    "temperature",
    "how",
    "seeds",
    "prompts",
    *ENDS,
    "headroom_frac",
    "policy_frac",
    "p_tuned_holm",
]
COLUMNS += [*FIELDS, "machine"]


def long_table(comparisons: dict[float, Comparison], lives: dict[float, Live]) -> pd.DataFrame:
    """One row per method, temperature and way of timing, over all suites together; COLUMNS.

    The intervals of RATIOS span what other prompts could give: in replay of the mean over seeds; by
    the clock, where several seeds were decoded, from the lowest to the highest end of any seed,
    around their mean.
    """
    tables = [
        _replayed(comparison).assign(temperature=t, how=REPLAY)
        for t, comparison in comparisons.items()
    ]
    tables += [_clocked(live).assign(temperature=t, how=LIVE) for t, live in lives.items()]
    return pd.concat(tables, ignore_index=True).reindex(columns=COLUMNS)


def _replayed(comparison: Comparison) -> pd.DataFrame:
    table = compare.over_seeds(comparison).query("suite == 'all'").drop(columns="suite")
    for ratio in RATIOS:
        for end in ("low", "high"):
            table[f"{ratio}_{end}"] = table.pop(f"{ratio}_prompts_{end}")
    return table.reindex(columns=[name for name in COLUMNS if name not in ("temperature", "how")])


def _clocked(live: Live) -> pd.DataFrame:
    table = live_table(live)
    pooled = table[
        table["suite"] == ("all" if (table["suite"] == "all").any() else table["suite"].iloc[0])
    ]
    ends = {
        name: "min" if name.endswith("_low") else "max" if name.endswith("_high") else "mean"
        for name in ENDS
    }
    ends |= {"policy_frac": "mean"} | ({"p_tuned_holm": "max"} if "p_tuned_holm" in pooled else {})
    ends |= dict.fromkeys(["prompts", *FIELDS, "machine"], "first")
    groups = pooled.groupby("method", sort=False)
    return groups.agg(ends).assign(seeds=groups.size()).reset_index()


def one_table(long: pd.DataFrame, order: list[str] | None = None) -> pd.DataFrame:
    """The printed form: a row per method, a column per temperature and way of timing.

    A cell reads "over plain / over default / over the tuned tree [interval of the last]". Then the
    share of the bound's headroom and of the policy's time: of replay, at the first temperature.
    order: the methods, default as they come.
    """

    def text(row) -> str:
        numbers = " / ".join(
            "-" if np.isnan(row[ratio]) else f"{row[ratio]:.2f}" for ratio in RATIOS
        )
        ends = row["over_tuned_low"], row["over_tuned_high"]
        return numbers if np.isnan(ends).any() else f"{numbers} [{ends[0]:.2f}, {ends[1]:.2f}]"

    heads = [f"T={t:g}, {how}" for t, how in zip(long["temperature"], long["how"], strict=True)]
    long = long.assign(cell=long.apply(text, axis=1), head=heads)
    wide = long.pivot(index="method", columns="head", values="cell")[
        list(dict.fromkeys(long["head"]))
    ].fillna("-")
    first = long[
        (long["how"] == REPLAY) & (long["temperature"] == long["temperature"].iloc[0])
    ].set_index("method")
    for name in ("seeds", "headroom_frac", "policy_frac"):
        wide[name] = first[name]
    methods = order or list(dict.fromkeys(long["method"]))
    return wide.loc[[name for name in methods if name in wide.index]].rename_axis(columns=None)
