"""Choosing the `CopyGate` of a recording: every combination is replayed, the fastest stays.

Knows nothing about models; the recording must be of a drafter that copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd

from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies.copying import CopyGate
from specdec.replays.replay import replay


def gates(trace, costs, trees: Sequence[TreeConfig], copied=(6, 8, 12), saved=(0.1, 0.2, 0.3, 0.4)) -> pd.DataFrame:
    """One row per gate, the fastest first: policy, tree, copied_tokens, saved_frac, tau, ms_per_tok, speedup.

    trees: what is drafted where copies promise too little; each also stands alone, without a gate, with saved_frac missing.
    """
    if trace.copies is None or not trace.forwards:
        raise SpecdecError(
            "a gate chooses between copies and a network's tree; record a drafter that has both (hybrid)."
        )
    rows = []
    for tree in trees:
        numbers = (tree.total_tokens, tree.depth, tree.top_k, *tree.beam)
        policies = [Static.of(tree), *(CopyGate(numbers, *one) for one in itertools.product(copied, saved))]
        for policy in policies:
            found = replay(trace, policy, costs)
            row = {"policy": policy, "tree": tree.text}
            row |= {name: getattr(policy, name, float("nan")) for name in ("copied_tokens", "saved_frac")}
            rows.append(row | {name: getattr(found, name) for name in ("tau", "ms_per_tok", "speedup")})
    return pd.DataFrame(rows).sort_values("ms_per_tok", ignore_index=True)
