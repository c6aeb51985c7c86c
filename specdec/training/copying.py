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

NEVER = 1e9  # promises no copies keep: the tree in every cycle


def gates(
    trace, costs, trees: Sequence[TreeConfig], copied=(6, 8, 12), enough=(0.5, 1.0, 1.5, 2.0, 3.0)
) -> pd.DataFrame:
    """One row per gate, the fastest first: gate (a policy), tree, copied_tokens, enough_tok, tau, ms_per_tok, speedup.

    trees: what is drafted where copies promise too little; each also stands without a gate, at enough_tok = NEVER.
    """
    if trace.copies is None or not trace.forwards:
        raise SpecdecError(
            "a gate chooses between copies and a network's tree; record a drafter that has both (hybrid)."
        )
    settings = [(tree, *one) for tree in trees for one in [*itertools.product(copied, enough), (copied[0], NEVER)]]
    rows = []
    for tree, copied_tokens, enough_tok in settings:
        gate = CopyGate((tree.total_tokens, tree.depth, tree.top_k, *tree.beam), copied_tokens, enough_tok)
        found = replay(trace, gate if enough_tok < NEVER else Static.of(tree), costs)
        row = {"gate": gate, "tree": tree.text, "copied_tokens": copied_tokens, "enough_tok": enough_tok}
        rows.append(row | {name: getattr(found, name) for name in ("tau", "ms_per_tok", "speedup")})
    return pd.DataFrame(rows).sort_values("ms_per_tok", ignore_index=True)
