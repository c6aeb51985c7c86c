"""The static trees and bounds that policies are compared with, at the prices of machines."""

from __future__ import annotations

import pandas as pd

from specdec.evaluation import compare


def references(trace, costs, *, defaults=compare.DEFAULTS, **grid) -> pd.DataFrame:
    """The baselines alone, chosen on part `train` and replayed on `test`.

    One row per suite and method. grid: of `Baselines.choose`.
    """
    baselines = compare.Baselines.choose(trace, costs, parts=("train",), defaults=defaults, **grid)
    options = dict(part="test", random_seeds=(), progress=False)
    table = compare.compare_replay(trace, costs, {}, baselines=baselines, **options).table
    order = {suite: place for place, suite in enumerate(table["suite"].unique())}
    table = table.sort_values("suite", key=lambda names: names.map(order), kind="stable")
    trees = []
    for row in table.itertuples():
        tree = baselines.trees.get(row.method)
        if row.method == compare.PER_SUITE:
            tree = baselines.per_suite.get(row.suite)
        trees.append(tree.text if tree else "")
    table = table.assign(tree=trees).reset_index(drop=True)
    return table[["suite", "method", "tree", "ms_per_tok", "tau", *compare.RATIOS, "headroom_frac"]]


def on_machines(trace, models: dict, *, total_tokens, depths=None, **options) -> pd.DataFrame:
    """`references` under every cost model of `models`, with a first column `machine`.

    total_tokens, depths: tuning grid, default every depth; each machine uses those in its measured
    range. options: of `references`.
    """
    tables = []
    for name, costs in models.items():
        part = trace.restrict(costs.ranges)
        low, shallow = (costs.ranges.get(what, (0,))[0] for what in ("verify_nodes", "expansions"))
        most = part.most_nodes + 1
        sizes = [total for total in total_tokens if low < total <= most] or [most]
        every = range(part.depth + 1) if depths is None else depths
        levels = [level for level in every if shallow <= level <= part.depth] or [part.depth]
        table = references(part, costs, total_tokens=sizes, depths=levels, **options)
        table.insert(0, "machine", name)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)
