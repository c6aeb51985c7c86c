"""The tuned static tree: the fastest constant (total_tokens, depth, top_k) on this machine, found on tuning prompts.

Any adaptive policy must beat this tree, not a default that somebody chose for another machine. Successive halving: all
candidates decode a few prompts, the fastest third decodes more, and so on (Jamieson and Talwalkar 2016). Each step is a
run of the bench: interleaved, warmed up, resumable. Knows nothing about learned policies.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pandas as pd

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.rates import ms_per_tok, tau
from specdec.core.tree_config import TreeConfig
from specdec.data.prompts import gather
from specdec.errors import SpecdecError
from specdec.evaluation.bench import evaluate

KEEP = 3  # one in KEEP candidates goes on to the next step, on KEEP times as many prompts


@dataclass(frozen=True)
class Tuning:
    """policy: the fastest tree; it remembers its prompts (`tuned_on`), and `evaluate` refuses to judge it on them.

    table: one row per step and candidate: step, method, total_tokens, depth, top_k, prompts (so far), ms_per_tok (sum
    over these prompts), tau, kept (whether it went on). runs: one Run per step, with every row behind the table.
    """

    policy: Static
    table: pd.DataFrame
    runs: tuple[runs.Run, ...]


def default_grid(largest: TreeConfig | None = None) -> list[TreeConfig]:
    """Chains, small trees and the published defaults, from 3 to 60 tokens; within `largest` if that is given."""
    chains = [TreeConfig(depth + 2, depth, 1) for depth in (1, 3, 5, 7)]
    trees = [
        TreeConfig(total, depth, top_k)
        for total, depths in (
            (8, (3, 5)),
            (16, (3, 5, 7)),
            (24, (5, 7)),
            (32, (5, 7, 9)),
            (48, (5, 7, 9)),
            (60, (5, 7)),
        )
        for depth in depths
        for top_k in ((3,) if total <= 8 else (3, 8) if total <= 32 else (6, 10))
        if total - 1 <= top_k + depth * top_k * top_k
    ]
    grid = [*chains, *trees]
    if largest is None:
        return grid
    names = ("total_tokens", "depth", "top_k")
    return [tree for tree in grid if all(getattr(tree, name) <= getattr(largest, name) for name in names)]


def tune_static(
    pair: Pair,
    prompts,
    grid: list[TreeConfig] | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    first: int = 4,
    most: int = 60,
    folder=None,
    cpu_time: bool = False,
    seed: int = 0,
    name: str = "tune_static",
    scale: str = "laptop",
    progress: bool = True,
) -> Tuning:
    """Find the fastest static tree for `pair` on this machine.

    prompts: names of suites, of which only the "tune" part of `tasks.split` is used, or tuning prompts themselves.
    first: prompts of the first step; most: prompts used in all. Speed is new tokens over prefill and decoding time
    (cpu_time: see `bench.evaluate`).
    Runs continue where they were stopped, like every run of the bench.
    """
    trees = list(grid) if grid is not None else default_grid()
    if not trees:
        raise SpecdecError("the grid of trees is empty; give at least one TreeConfig.")
    by_name = isinstance(prompts, str) or not isinstance(prompts, dict) and all(isinstance(one, str) for one in prompts)
    items = gather(prompts, folder=folder, part="tune" if by_name else None, seed=seed)
    random.Random(seed).shuffle(items)
    items = items[:most]
    names = {f"{tree.total_tokens},{tree.depth},{tree.top_k}": tree for tree in trees}
    options = dict(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, name=name, scale=scale)
    options |= {"cpu_time": cpu_time}
    found, opened, rows = [], [], None
    for step, (start, end) in enumerate(_steps(len(items), len(names), first)):
        policies = {label: Static.of(tree) for label, tree in names.items()}
        run = evaluate(policies, items[start:end], pair, progress=progress, **options)
        opened.append(run)
        rows = _together(rows, run.read_table("prompts"), names)
        table = _ranked(rows, names).assign(step=step, prompts=end)
        kept = table["method"].head(math.ceil(len(names) / KEEP) if end < len(items) else 1).tolist()
        found.append(table.assign(kept=table["method"].isin(kept)))
        names = {label: names[label] for label in kept}
        if len(names) == 1:
            break
    best = Static(*(int(found[-1].iloc[0][part]) for part in ("total_tokens", "depth", "top_k")))
    best.tuned_on = frozenset(item.digest for item in items)
    columns = ["step", "method", "total_tokens", "depth", "top_k", "prompts", "ms_per_tok", "tau", "kept"]
    return Tuning(best, pd.concat(found, ignore_index=True)[columns], tuple(opened))


def decodings(candidates: int, prompts: int, first: int = 4) -> int:
    """How many answers `tune_static` decodes for so many trees and single-turn prompts: what an estimate multiplies."""
    count, left = 0, candidates
    for start, end in _steps(prompts, candidates, first):
        count, left = count + (end - start) * left, math.ceil(left / KEEP)
    return count


def _steps(prompts: int, candidates: int, first: int) -> list[tuple[int, int]]:
    """[start, end) of the prompts of each step; the last step takes what is left, so that the finalists see most."""
    bounds, size, left = [0], first, candidates
    while left > KEEP and bounds[-1] + size < prompts:
        bounds.append(bounds[-1] + size)
        size, left = size * KEEP, math.ceil(left / KEEP)
    return list(zip(bounds, [*bounds[1:], prompts], strict=True))


def _together(before: pd.DataFrame | None, rows: pd.DataFrame, names: dict) -> pd.DataFrame:
    """All rows so far of the candidates still in the race: every one of them has decoded the same prompts."""
    rows = rows if before is None else pd.concat([before, rows], ignore_index=True)
    return rows[rows["method"].isin(list(names))]


def _ranked(rows: pd.DataFrame, names: dict[str, TreeConfig]) -> pd.DataFrame:
    """One row per candidate, the fastest first."""
    sums = rows.groupby("method")[["new_tok", "total_ms", "cycles", "cycle_tok"]].sum()
    shape = [(tree.total_tokens, tree.depth, tree.top_k) for tree in (names[label] for label in sums.index)]
    table = pd.DataFrame(shape, columns=["total_tokens", "depth", "top_k"]).assign(method=sums.index)
    table["ms_per_tok"] = ms_per_tok(sums["total_ms"], sums["new_tok"]).to_numpy()
    table["tau"] = tau(sums["cycle_tok"], sums["cycles"]).to_numpy()
    return table.sort_values("ms_per_tok", ignore_index=True)
