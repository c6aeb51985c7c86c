"""What more text would bring: a drafter's held-out accuracy against the different answer tokens it has learned from.

Knows nothing about how the drafter was trained; reads what `eagle3.train_drafter` wrote down.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from specdec import runs
from specdec.errors import SpecdecError

TAU, TOP1 = "held_out_tau_chain", "held_out_top1_frac"


def learning_curve(out_dir: Path) -> pd.DataFrame:
    """The measurements of a training in `out_dir`, finished or not: step, seen_tok, distinct_tok, rate_frac, TOP1, TAU.

    seen_tok: answer tokens read so far. distinct_tok: those not read before. rate_frac: the learning rate as a fraction
    of its peak. The last row of a finished training is the drafter that it wrote. SpecdecError where nothing was held out.
    """
    folder = Path(out_dir) / "drafter_training"
    plan = runs.read_json(folder / "plan.json")
    if plan["finished"]:
        last = {"step": plan["steps_done"]} | plan["results"]
        rows = pd.concat([runs.read_table(folder / "loss.parquet"), pd.DataFrame([last])])
    else:
        shards = runs.Shards(folder / "loss")
        rows = shards.read() if shards.done() else pd.DataFrame()
    if TAU not in rows:
        raise SpecdecError(f"the training in {out_dir} has measured nothing on held-out text (its setting held_out).")
    columns = ["step", "seen_tok", "distinct_tok", "rate_frac", TOP1, TAU]
    measured = rows.loc[rows[TAU].notna(), columns].reset_index(drop=True)
    return measured.astype({"seen_tok": int, "distinct_tok": int})


def fit_doubling(curve: pd.DataFrame, from_tok: int = 30_000) -> pd.DataFrame:
    """What each doubling of the different tokens brings: the slope of a straight line over their log2, for TOP1 and TAU.

    Fitted to measurements at the full learning rate after `from_tok` tokens; lower rates and repeated text are another
    curve. One row each: measure, per_doubling, its 95 % interval (low, high), points. Without three points, no row.
    """
    at_full_rate = (curve["rate_frac"] == 1) & (curve["distinct_tok"] == curve["seen_tok"])
    points = curve[at_full_rate & (curve["distinct_tok"] >= from_tok)]
    rows = []
    for measure in (TOP1, TAU) if len(points) >= 3 else ():
        line = stats.linregress(np.log2(points["distinct_tok"]), points[measure])
        margin = stats.t.ppf(0.975, len(points) - 2) * line.stderr
        rows.append({"measure": measure, "per_doubling": line.slope, "low": line.slope - margin})
        rows[-1] |= {"high": line.slope + margin, "points": len(points)}
    return pd.DataFrame(rows, columns=["measure", "per_doubling", "low", "high", "points"])
