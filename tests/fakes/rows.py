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
    {
        "method": ["eagle3"] * 4,
        "draft_calls": [3, 3, 3, 1],
        "accepted_tok": [3, 1, 0, 1],
        "verified_tok": [60, 60, 30, 30],
        "draft_ms": [4.0, 4.0, 4.0, 4.0],
        "policy_ms": [0.0, 0.0, 0.0, 0.0],
        "verify_ms": [5.0, 5.0, 3.0, 3.0],
        "commit_ms": [0.5, 0.5, 0.5, 0.5],
        "host_ms": [0.5, 0.5, 0.5, 0.5],
        "total_ms": [10.0, 10.0, 8.0, 8.0],
    }
)


def speedup(tokens, times, base_tokens, base_times, **options) -> stats.Interval:
    """Ratio of throughputs, each a ratio of sums, from columns [P] by hand."""
    columns = np.column_stack([tokens, times, base_tokens, base_times]).astype(float)
    return stats.interval(columns, lambda of: of[..., 0] / of[..., 1] * of[..., 3] / of[..., 2], **options)
