"""Why some suites are faster than others, and what the host does with its time: a finished run of the bench, explained.

The speed of a tree is tau over what a cycle costs in plain steps, less what the prompt's forward takes in both; this
module puts these numbers side by side, per suite, and says in one paragraph which of them goes with the speed. Knows
nothing about how a run was measured, or about figures.
"""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.decode import decode
from specdec.core.pair import Pair
from specdec.errors import SpecdecError, nearest_name_error
from specdec.report import tables

# The files whose own time is the host's, and what they do in a cycle; everything else belongs to the forwards (or to the
# stop-watch itself, which on some machines makes a system call each time it is read).
HOST_WORK = {
    "tree": "growing and pruning the tree",
    "verification": "comparing the tree with what the target picks",
    "kv_cache": "moving accepted rows of the caches",
    "engine": "passing tensors between tree, models and caches",
    **dict.fromkeys(("cycle", "decode", "records", "policy"), "bookkeeping of the cycle"),
}
ROOMS = {Path(__file__).resolve().parents[1] / room for room in ("core", "models")}


def suites(run: runs.Run, table: pd.DataFrame, method: str, baseline: str) -> pd.DataFrame:
    """What makes `method` fast or slow on each suite of a run: one row per suite, in the run's order, and 'all'.

    table: bench.summary(run). Columns: speedup with its interval, tau, cycle_steps (the mean cycle in mean plain steps,
    both without prefill), first_frac (how often a cycle's first draft token is accepted), prefill_frac (of the method's
    whole time), answer_tok (mean new tokens of an answer). Apart from prefills speedup is tau / cycle_steps.
    """
    for name in (method, baseline):
        if name not in set(table["method"]):
            raise nearest_name_error("method of this run", name, set(table["method"]))
    if method == baseline or table.loc[table["method"] == method, "tau"].isna().any():
        raise SpecdecError(f"{method!r} has no cycles to explain; name a method that drafts.")
    chosen = table[table["method"] == method].set_index("suite")
    found = chosen[["speedup", "speedup_low", "speedup_high", "tau"]].copy()
    prompts, cycles = run.read_table("prompts"), run.read_table("cycles")
    for suite in found.index:
        turns, rows = (one if suite == "all" else one[one["suite"] == suite] for one in (prompts, cycles))
        plain, own = turns[turns["method"] == baseline], turns[turns["method"] == method]
        rows = rows[rows["method"] == method]
        step_ms = plain["decode_ms"].sum() / np.maximum(plain["new_tok"] - 1, 0).sum()  # the prefill brings one token
        found.loc[suite, "cycle_steps"] = rows["total_ms"].mean() / step_ms
        found.loc[suite, "first_frac"] = (rows["accepted_tok"] > 0).mean()
        found.loc[suite, "prefill_frac"] = own["prefill_ms"].sum() / own["total_ms"].sum()
        found.loc[suite, "answer_tok"] = own["new_tok"].mean()
    return found


def drivers(found: pd.DataFrame) -> pd.Series:
    """Spearman's rank correlation, over suites, of the speed-up with each other column of `suites`; NaN below three."""
    each = found.drop(index="all", errors="ignore")
    names = ["tau", "cycle_steps", "first_frac", "prefill_frac", "answer_tok"]
    varied = [name for name in names if len(each) >= 3 and each[name].nunique() > 1]  # what is constant orders nothing
    return each[varied].corrwith(each["speedup"], method="spearman").reindex(names)


def host_work(pair: Pair, prompts, policy, max_new_tokens: int = 64) -> pd.DataFrame:
    """What the host does between forwards, from Python's profiler: one row per kind of work, the largest first.

    prompts: what `decode` takes. Columns: own_ms per cycle and frac of all the host's; index: work. The profiler slows
    Python down and tensor work less, so the shares say where to look, not how long it takes.
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


def findings(run: runs.Run, found: pd.DataFrame, host: pd.DataFrame, method: str) -> str:
    """A paragraph in markdown: which suites are fast and which slow, what goes with it, the time split, the host's work.

    found: of `suites`; host: of `host_work`; both of `method`. Every number in it is one of theirs or of the run.
    """
    each = found.drop(index="all", errors="ignore").sort_values("speedup")
    fast, slow = each.iloc[-1], each.iloc[0]
    cycles = run.read_table("cycles")
    split = tables.time_split(cycles[cycles["method"] == method]).loc[method]
    texts = [
        f"With **{method}** the fastest suite is {_suite(fast)}, the slowest {_suite(slow)}.",
        _goes_with(drivers(found)),
        f"On {fast.name} a cycle's first draft token is accepted in **{fast['first_frac']:.0%}** of cycles, on {slow.name} "
        f"in **{slow['first_frac']:.0%}**; of the time **{fast['prefill_frac']:.0%}** and **{slow['prefill_frac']:.0%}** "
        "go into the prompt's own forward, which no draft shortens.",
        f"A cycle takes **{split['total_ms']:.1f} ms**: drafting **{split['draft_frac']:.0%}**, verifying "
        f"**{split['verify_frac']:.0%}**, committing **{split['commit_frac']:.0%}**, the policy "
        f"**{split['policy_frac']:.0%}**, the host **{split['host_frac']:.0%}**.",
        f"Of the host's Python, **{host['frac'].iloc[0]:.0%}** is {host.index[0]}"
        + (f" and **{host['frac'].iloc[1]:.0%}** {host.index[1]}." if len(host) > 1 else "."),
    ]
    return " ".join(text for text in texts if text)


def _suite(row: pd.Series) -> str:
    return (
        f"**{row.name}** ({row['speedup']:.2f} times as fast: tau {row['tau']:.2f} over a cycle of "
        f"{row['cycle_steps']:.2f} plain steps)"
    )


def _goes_with(ranks: pd.Series) -> str:
    """Which of tau, the price of a cycle and the prompt's share orders the suites most as the speed-up does."""
    signed = {"tau": 1, "cycle_steps": -1, "prefill_frac": -1}
    words = {"tau": "tau", "cycle_steps": "the price of a cycle", "prefill_frac": "the share of the prompt's forward"}
    known = (ranks[list(signed)] * pd.Series(signed)).dropna()
    if known.empty:
        return ""
    order = known.sort_values(ascending=False).index
    told = ", ".join(f"{words[name]} {ranks[name]:+.2f}" for name in order)
    return f"Over the suites the speed-up goes most with **{words[order[0]]}** (rank correlations: {told})."
