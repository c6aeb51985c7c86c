"""This machine's features and missing parts, and the costs of a tree's cycle here.

All methods alternate, so that a busy machine slows them alike, and only ratios within a round are
compared. Nothing is changed and nothing is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from specdec import machine, runs
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.records import tau
from specdec.core.tree_config import TreeConfig
from specdec.data import suites
from specdec.errors import SpecdecError
from specdec.evaluation import bench
from specdec.models.load import SHIPPED, load_pair
from specdec.tools.estimate import free_memory_gib, nearest_existing

OK, NOTE, FAULT = "ok", "note", "fault"
TREES = (TreeConfig(8, 3, 3), TreeConfig(16, 5, 3), TreeConfig(24, 5, 6), TreeConfig(60, 7, 10))
PLAIN = "plain"


def checks(pairs=SHIPPED) -> pd.DataFrame:
    """One row per fact: fact, value, state (OK, NOTE for a possible improvement, FAULT)."""
    facts = machine.fingerprint()
    cores = facts["cores"]
    rows = [("CPU", f"{facts['cpu']}, {cores} usable cores, {facts['system']}", OK)]
    rows.append(("GPU", facts["gpu"] or "none", OK))
    # 1. what slows decoding down
    if not facts["gpu"] and not machine.multiplies_bfloat16():
        rows.append(("number format", "no bfloat16 units: use float32", NOTE))
    free_gib = free_memory_gib()
    if free_gib is not None:
        rows.append(("memory", f"{free_gib:.1f} GiB free", NOTE if free_gib < 2 else OK))
    threads = facts["threads"] or 0
    rows.append(("threads", f"{threads} (OMP_NUM_THREADS)", NOTE if threads > cores else OK))
    # 2. what is missing
    for name in pairs:
        try:
            load_pair(name)
            rows.append((f"pair {name}", "loads", OK))
        except SpecdecError as error:
            rows.append((f"pair {name}", str(error), FAULT))
    folder = os.environ.get(suites.DATA_VARIABLE)
    missing = folder is not None and not Path(folder).expanduser().is_dir()
    rows.append(("benchmarks", folder or "embedded only", FAULT if missing else OK))
    writable = os.access(nearest_existing(runs.home()), os.W_OK)
    rows.append(("results", str(runs.home()), OK if writable else FAULT))
    # 3. versions, and who else computes here
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    rows.append(("versions", f"Python {facts['python']}, {versions}", OK))
    crowded = machine.Neighbours().crowded()
    rows.append(("load", crowded or "this process has its cores", NOTE if crowded else OK))
    return pd.DataFrame(rows, columns=["fact", "value", "state"])


def benchmark(pairs=("small",), rounds: int = 1) -> pd.DataFrame:
    """`cycle_costs` of shipped pairs; a row each."""
    rows = []
    for name in pairs:
        pair = load_pair(name, dtype="float32")
        rows.append(cycle_costs(pair, suite_prompts(pair), rounds=rounds))
    return pd.DataFrame(rows)


def cycle_costs(pair: Pair, prompts, trees=TREES, new_tok=24, rounds: int = 1, **settings) -> dict:
    """Costs of the fastest of `trees` on `prompts`, as medians over the rounds.

    plain_ms: a step of `autoregress`. draft_steps, verify_steps, rest_steps: of the mean cycle, in
    plain steps. speed: over that of `autoregress`, with the range over the rounds.
    """
    methods = {PLAIN: "autoregressive"}
    for tree in trees:
        methods[f"{tree.total_tokens}/{tree.depth}/{tree.top_k}"] = Static.of(tree)
    options = {"max_new_tokens": new_tok, "repeats": rounds, "progress": False, **settings}
    turns, cycles = bench.decode_rounds(methods, {pair.name: prompts}, pair, **options)
    facts = {"pair": pair.name, "dtype": dtype_name(pair.target.dtype)}
    return {**facts, **fastest(turns, cycles)}


def fastest(turns: pd.DataFrame, cycles: pd.DataFrame) -> dict:
    """The tree with the most tokens per second, and its mean cycle in plain steps."""
    # 1. sums of every method and round; the prompt's own forward is no step
    counted = ["new_tok", "steps", "cycles", "cycle_tok", "total_ms", "decode_ms"]
    turns = turns.assign(steps=turns["new_tok"] - 1)
    sums = turns.groupby(["method", "repeat"])[counted].sum()
    cycles = cycles.assign(cycle_ms=cycles["total_ms"]).groupby(["method", "repeat"])
    sums = sums.join(cycles[["draft_ms", "verify_ms", "cycle_ms"]].sum())
    # 2. the fastest tree over all rounds
    pooled = sums.drop(index=PLAIN, level="method").groupby("method").sum()
    tree = (pooled["new_tok"] / pooled["total_ms"]).idxmax()
    # 3. ratios within a round
    token_ms = sums["total_ms"] / sums["new_tok"]
    speed = token_ms[PLAIN] / token_ms[tree]
    step_ms = sums.loc[PLAIN, "decode_ms"] / sums.loc[PLAIN, "steps"]
    rows = sums.loc[tree]
    steps = rows[["draft_ms", "verify_ms", "cycle_ms"]].div(rows["cycles"] * step_ms, axis=0)
    rest = steps["cycle_ms"] - steps["draft_ms"] - steps["verify_ms"]
    return {
        "tree": tree,
        "tau": float(tau(rows["cycle_tok"].sum(), rows["cycles"].sum())),
        "plain_ms": float(step_ms.median()),
        "draft_steps": float(steps["draft_ms"].median()),
        "verify_steps": float(steps["verify_ms"].median()),
        "rest_steps": float(rest.median()),
        "speed": float(speed.median()),
        "speed_low": float(speed.min()),
        "speed_high": float(speed.max()),
    }


def suite_prompts(pair: Pair) -> list[list[int]]:
    """Token ids of one tuning prompt of each of the pair's usual suites."""
    names = [suites.embedded_suite(name, pair.name) for name in suites.DEFAULT_NAMES]
    return suites.openings(pair, suites.gather(names, part="tune", limit=1))
