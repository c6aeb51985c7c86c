"""Rows of a comparison and of cycles, small enough to check by eye."""

import numpy as np
import pandas as pd

from specdec.evaluation import stats

COMPARED = pd.DataFrame(
    [
        ("maths", "eagle3", 2.0, 1.9, 2.1),
        ("chat", "eagle3", 1.5, 1.25, 1.75),
        ("maths", "tuned", 2.5, 2.4, 2.6),
        ("chat", "tuned", float("nan"), float("nan"), float("nan")),
    ],
    columns=["suite", "method", "speedup", "speedup_low", "speedup_high"],
)
CYCLES = pd.DataFrame(
    [
        ("eagle3", 3, 3, 60, 4.0, 0.0, 5.0, 0.5, 0.5, 10.0),
        ("eagle3", 3, 1, 60, 4.0, 0.0, 5.0, 0.5, 0.5, 10.0),
        ("eagle3", 3, 0, 30, 4.0, 0.0, 3.0, 0.5, 0.5, 8.0),
        ("eagle3", 1, 1, 30, 4.0, 0.0, 3.0, 0.5, 0.5, 8.0),
    ],
    columns=(
        "method draft_calls accepted_tok verified_tok draft_ms policy_ms "
        "verify_ms commit_ms host_ms total_ms"
    ).split(),
)


def speedup(tokens, times, base_tokens, base_times) -> stats.Interval:
    """Ratio of throughputs, each a ratio of sums, from columns [P] by hand."""
    columns = np.column_stack([tokens, times, base_tokens, base_times]).astype(float)
    return stats.interval(columns, lambda of: of[..., 0] / of[..., 1] * of[..., 3] / of[..., 2])
