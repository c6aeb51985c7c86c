"""Why some suites are faster than others, and what the host does with its time: tables of a finished run of the bench.

speedup = tau / cycle_steps,    less what the prompt's own forward takes in both
"""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import numpy as np
import pandas as pd

import specdec
from specdec import runs
from specdec.core.decode import decode
from specdec.core.pair import Pair
from specdec.errors import SpecdecError, nearest_name_error

# The files whose own time is the host's, and what they do in a cycle; all else belongs to the forwards or the stop-watch.
HOST_WORK = {
    "tree": "growing and pruning the tree",
    "verification": "comparing the tree with what the target picks",
    "kv_cache": "moving accepted rows of the caches",
    "engine": "passing tensors between tree, models and caches",
    **dict.fromkeys(("cycle", "decode", "records", "policy"), "bookkeeping of the cycle"),
}
ROOMS = {Path(specdec.__file__).resolve().parent / room for room in ("core", "models")}


def suites(run: runs.Run, table: pd.DataFrame, method: str, baseline: str) -> pd.DataFrame:
    """What makes `method` fast or slow on each suite of a run: one row per suite, in the run's order, and 'all'.

    table: bench.summary(run). cycle_steps: the mean cycle in mean plain steps, both without prefill. first_frac: how often
    a cycle's first draft token is accepted. prefill_frac: of the method's whole time. answer_tok: mean of new tokens.
    """
    for name in {method, baseline} - set(table["method"]):
        raise nearest_name_error("method of this run", name, set(table["method"]))
    summary = table[table["method"] == method].set_index("suite")
    if method == baseline or summary["tau"].isna().any():
        raise SpecdecError(f"{method!r} has no cycles to explain; name a method that drafts.")
    prompts, cycles = run.read_table("prompts"), run.read_table("cycles")
    rows = []
    for suite in summary.index:
        turns = prompts if suite == "all" else prompts[prompts["suite"] == suite]
        own_cycles = cycles[(cycles["method"] == method) & (True if suite == "all" else cycles["suite"] == suite)]
        plain, own = turns[turns["method"] == baseline], turns[turns["method"] == method]
        step_ms = plain["decode_ms"].sum() / np.maximum(plain["new_tok"] - 1, 0).sum()  # the prefill brings one token
        row = {"cycle_steps": own_cycles["total_ms"].mean() / step_ms}
        row["first_frac"] = (own_cycles["accepted_tok"] > 0).mean()
        row["prefill_frac"] = own["prefill_ms"].sum() / own["total_ms"].sum()
        rows.append(row | {"answer_tok": own["new_tok"].mean()})
    shown = summary[["prompts", "speedup", "speedup_low", "speedup_high", "tau"]]
    return shown.join(pd.DataFrame(rows, index=summary.index))


def drivers(by_suite: pd.DataFrame) -> pd.Series:
    """Spearman's rank correlation, over suites, of the speed-up with each other column of `suites`; NaN below three."""
    each = by_suite.drop(index="all", errors="ignore")
    names = ["tau", "cycle_steps", "first_frac", "prefill_frac", "answer_tok"]
    varied = [name for name in names if len(each) >= 3 and each[name].nunique() > 1]  # what is constant orders nothing
    ranks = each[varied].corrwith(each["speedup"], method="spearman").reindex(names)
    return ranks.rename("rank correlation with speedup")


def host_work(pair: Pair, prompts, policy, max_new_tokens: int = 64) -> pd.DataFrame:
    """What the host does between forwards, from Python's profiler: one row per kind of work, the largest first.

    own_ms: per cycle. frac: of all the host's. The profiler slows Python down and tensor work less, so the shares say
    where to look, not how long it takes.
    """
    profile, cycles = cProfile.Profile(builtins=False), 0  # a tensor operation counts for whoever calls it
    for prompt in prompts:
        cycles += len(profile.runcall(decode, pair, prompt, policy, max_new_tokens).rows)
    if not cycles:
        raise SpecdecError("there was no cycle to profile; allow more new tokens or give other prompts.")
    own_ms: dict[str, float] = {}
    for (file, _, _), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():
        work = HOST_WORK.get(Path(file).stem) if Path(file).parent in ROOMS else None
        if work is not None:
            own_ms[work] = own_ms.get(work, 0.0) + 1e3 * own_s / cycles
    table = pd.DataFrame({"own_ms": own_ms}).sort_values("own_ms", ascending=False).rename_axis("work")
    return table.assign(frac=table["own_ms"] / table["own_ms"].sum())
