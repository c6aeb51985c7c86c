"""One recording, many machines: who is how fast under each cost model, judged only where that model was measured.

Knows nothing about models or policies; a trace and cost models in, one table out.
"""

from __future__ import annotations

import pandas as pd

from specdec.bound import DEFAULTS, references
from specdec.config import SpecdecError, pool_size
from specdec.trace import Trace


def measured_only(trace: Trace, costs) -> Trace:
    """The recording without the widths, depths and sizes beyond the largest that `costs` was measured at (its `ranges`).

    Smaller ones stay: below its first point a cost model holds the first value, so that no answer gains by going there.
    SpecdecError where no width is left.
    """
    low, high = costs.ranges.get("top_k", (1, max(trace.top_ks)))
    top_ks = tuple(top_k for top_k in trace.top_ks if low <= top_k <= high)
    if not top_ks:
        raise SpecdecError(
            f"the cost model {costs.name!r} was measured at top_k {low} to {high}, which was not recorded; record it as well."
        )
    depth = min(trace.depth, costs.ranges.get("expansions", (0, trace.depth))[1])
    most = min(trace.most_nodes, costs.ranges.get("verify_nodes", (0, trace.most_nodes))[1])
    if (top_ks, depth, most) == (trace.top_ks, trace.depth, trace.most_nodes):
        return trace

    def cut(name: str):
        kind, _, top_k = name.partition("_")
        array = trace.column(name)
        if kind == "ranks":
            return array[:, : depth + 1, : depth + 1]
        if kind == "beams":
            return array[:, :depth]
        return array[:, : pool_size(depth, int(top_k))] if kind in ("scores", "tokens") else array

    header = {**trace.header, "top_ks": top_ks, "depth": depth, "most_nodes": most}
    return Trace(header, trace.turns, {"context_tok": trace.context_tok}, cut, trace.lengths)


def on_machines(trace: Trace, models: dict, *, defaults=DEFAULTS, total_tokens=None, depths=None, **options):
    """`bound.references` under every cost model of `models` (name -> CostModel), with a column `machine` in front.

    total_tokens, depths: to tune over, default all; each machine takes those it was measured at. options: train, test.
    """
    found = []
    for name, costs in models.items():
        part = measured_only(trace, costs)
        low, shallow = (costs.ranges.get(what, (0, 0))[0] for what in ("verify_nodes", "expansions"))
        sizes = range(2, part.most_nodes + 2) if total_tokens is None else total_tokens
        sizes = [total for total in sizes if low < total <= part.most_nodes + 1] or [part.most_nodes + 1]
        levels = range(part.depth + 1) if depths is None else depths
        levels = [level for level in levels if shallow <= level <= part.depth] or [part.depth]
        table = references(part, costs, defaults=defaults, total_tokens=sizes, depths=levels, **options)
        table.insert(0, "machine", name)
        found.append(table)
    return pd.concat(found, ignore_index=True)
