"""The static trees and bounds that policies are compared with, alone: on one machine, or at the
prices of several.

Knows nothing about policies.
"""

from __future__ import annotations

import pandas as pd

from specdec.evaluation import compare


def references(
    trace, costs, *, train="train", test="test", defaults=compare.DEFAULTS, **grid
) -> pd.DataFrame:
    """The baselines alone, chosen on part `train` and replayed on `test`: one row per suite and
    method. grid: of `choose`.
    """
    baselines = compare.Baselines.choose(trace, costs, parts=(train,), defaults=defaults, **grid)
    options = dict(part=test, random_seeds=(), progress=False)
    table = compare.compare_replay(trace, costs, {}, baselines=baselines, **options).table
    table = table.sort_values(
        "suite", key=lambda suites: pd.factorize(suites)[0], kind="stable", ignore_index=True
    )
    trees = {(compare.PER_SUITE, suite): tree for suite, tree in baselines.per_suite.items()}
    trees |= {
        (name, suite): tree for name, tree in baselines.trees.items() for suite in table["suite"]
    }
    named = [trees.get(key) for key in zip(table["method"], table["suite"], strict=True)]
    table = table.assign(tree=[tree.text if tree else "" for tree in named])
    return table[["suite", "method", "tree", "ms_per_tok", "tau", *compare.RATIOS, "headroom_frac"]]


def on_machines(trace, models: dict, *, total_tokens=None, depths=None, **options) -> pd.DataFrame:
    """`references` under every cost model of `models` (name -> CostModel), with a first column
    `machine`.

    total_tokens, depths: tuning grid, default all; each machine uses those in its measured range.
    options: of `references`.
    """
    tables = []
    for name, costs in models.items():
        part = trace.restrict(costs.ranges)
        low, shallow = (
            costs.ranges.get(what, (0, 0))[0] for what in ("verify_nodes", "expansions")
        )
        sizes = range(1, part.most_nodes + 2) if total_tokens is None else total_tokens
        sizes = [total for total in sizes if low < total <= part.most_nodes + 1] or [
            part.most_nodes + 1
        ]
        levels = range(part.depth + 1) if depths is None else depths
        levels = [level for level in levels if shallow <= level <= part.depth] or [part.depth]
        table = references(part, costs, total_tokens=sizes, depths=levels, **options)
        table.insert(0, "machine", name)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)
