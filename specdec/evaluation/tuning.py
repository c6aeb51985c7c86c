"""The tuned static tree: the fastest constant (total_tokens, depth, top_k) on this machine, chosen
on tuning prompts.

Successive halving: all candidates decode a few prompts, the fastest third decodes more, and so on
(Jamieson and Talwalkar 2016). Each step is a run of the bench: interleaved, warmed up, resumable.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig, tree_from
from specdec.data.suites import gather
from specdec.errors import SpecdecError, check_kind
from specdec.evaluation.bench import EvaluateConfig, evaluate
from specdec.policies.heuristics import CopyGate
from specdec.replays.replay import replay
from specdec.replays.static_trees import SETTING, setting, static_grid, tree_of

FINALISTS = 5  # trees that replay finds fastest, which then race live
PART = "tune"  # of the suites and recordings on which trees race
KEEP = 3  # one in KEEP candidates remains for the next step, on KEEP times as many prompts
FIRST = 4  # prompts of the first step
# plain steps, chains, small trees and the published defaults: total_tokens, depth and top_k
GRID = "1,0,1 3,1,1 5,3,1 7,5,1 9,7,1 8,3,3 8,5,3 16,3,3 16,3,8 16,5,3 16,5,8 16,7,3 16,7,8"
GRID += " 24,5,3 24,5,8 24,7,3 24,7,8 32,5,3 32,5,8 32,7,3 32,7,8 32,9,3 32,9,8 48,5,6 48,5,10"
GRID += " 48,7,6 48,7,10 48,9,6 48,9,10 60,5,6 60,5,10 60,7,6 60,7,10"
GATE_COLUMNS = ["policy", "tree", "copied_tokens", "saved_frac", "tau", "ms_per_tok", "speedup"]


@dataclass(frozen=True)
class Tuning:
    """The result of `tune_static`.

    table: one row per step and candidate, prompts so far, and whether it was kept.
    """

    policy: Static  # the fastest; `evaluate` refuses to measure it on the prompts it was `tuned_on`
    table: pd.DataFrame


def tune_static(pair: Pair, prompts, grid=(), *, most=60, name="tune_static", **settings) -> Tuning:
    """Find the fastest static tree for `pair` on this machine.

    prompts: names of suites, of which only the "tune" part is used, or the tuning prompts. grid:
    the trees to try, default those of GRID. most: prompts used in all. settings: other fields of
    EvaluateConfig. Speed is new tokens over prefill and decoding time.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> trees = [specdec.TreeConfig(3, 1, 1), specdec.TreeConfig(6, 2, 2)]
    >>> few = dict(max_new_tokens=8, progress=False)
    >>> tuning = tune_static(pair, {"mine": ["Hello."]}, trees, **few)
    >>> tuning.policy.plan in trees, len(tuning.table)
    (True, 2)
    """
    # 1. the trees, and the prompts in a random order
    config = runs.configured(EvaluateConfig(name=name), EvaluateConfig, settings)
    trees = list(grid) or list(map(tree_from, GRID.split()))
    for tree in trees:
        check_kind("each tree", tree, TreeConfig)
    by_name = not isinstance(prompts, dict) and all(isinstance(name, str) for name in prompts)
    chosen = dict(limit=config.limit, folder=config.folder, part=PART if by_name else None)
    items = gather(prompts, seed=config.seed, **chosen)
    random.Random(config.seed).shuffle(items)
    items = items[:most]
    config = replace(config, part=None, limit=None)
    # 2. the steps
    policies = _static_policies(trees)
    tables = []
    rows = []
    for step, (start, end) in enumerate(_steps(len(items), len(policies))):
        rows.append(evaluate(policies, items[start:end], pair, config).read_table("prompts"))
        table = _ranked(pd.concat(rows, ignore_index=True), policies).assign(step=step, prompts=end)
        count = 1
        if end < len(items):
            count = math.ceil(len(policies) / KEEP)
        best = table["method"].head(count).tolist()
        tables.append(table.assign(kept=table["method"].isin(best)))
        policies = {text: policies[text] for text in best}
        if len(policies) == 1:
            break
    # 3. the fastest
    winner = policies[best[0]]
    winner.tuned_on = frozenset(item.digest for item in items)
    columns = ["step", "method", *SETTING, "prompts", "ms_per_tok", "tau", "kept"]
    return Tuning(winner, pd.concat(tables, ignore_index=True)[columns])


def finalists(trace, costs) -> list[TreeConfig]:
    """The fastest static trees on a recording; only the best size of each depth, width and beam."""
    table = static_grid(trace, costs).sort_values("time_ms", kind="stable")
    table = table.drop_duplicates(SETTING[1:]).head(FINALISTS)
    return list(dict.fromkeys(map(tree_of, table.to_dict("records"))))


def race_static(
    pair: Pair, trace, costs, *, name="race_static", **settings
) -> dict[str, TreeConfig]:
    """The strongest static tree of every suite and of "all": chosen by replay on part "tune", then
    raced live on it.

    Every suite is decoded by the FINALISTS that replay finds fastest over all suites, and by those
    it finds fastest on this one. trace: a recording of suites by name. settings: other fields of
    EvaluateConfig.
    """
    config = runs.configured(EvaluateConfig(name=name), EvaluateConfig, settings)
    trace = trace.select(part=PART)
    pooled = finalists(trace, costs)
    # 1. a live race on every suite
    trees = {}
    parts = []
    for suite in dict.fromkeys(trace.turns["suite"]):
        turns = trace.select((trace.turns["suite"] == suite).to_numpy())
        methods = _static_policies([*pooled, *finalists(turns, costs)])
        trees.update(methods)
        of_suite = f"{name}_{runs.plain_name(suite.replace('/', '_'))}"
        run = evaluate(methods, suite, pair, replace(config, part=PART, name=of_suite))
        parts.append(run.read_table("prompts"))
    rows = pd.concat(parts)
    rows["new_tok"] -= 1  # the first token comes from the prefill
    # 2. all suites together, for the trees that all of them decoded
    shared = rows[rows["method"].isin(_static_policies(pooled))].assign(suite="all")
    groups = pd.concat([rows, shared]).groupby(["suite", "method"], sort=False)
    sums = groups[["decode_ms", "new_tok"]].sum()
    ms = sums["decode_ms"] / sums["new_tok"]
    fastest = ms.groupby(level="suite", sort=False).idxmin()
    return {suite: trees[text].plan for suite, text in fastest}


def tune_gate(
    trace, costs, trees: Sequence[TreeConfig], copied=(6, 8, 12), saved=(0.1, 0.2, 0.3, 0.4)
) -> pd.DataFrame:
    """Every `CopyGate` in replay, one row each, fastest first: GATE_COLUMNS.

    trace: a recording of a drafter that copies. trees: drafted when the copies are too unlikely;
    each also appears without a gate, with copied_tokens and saved_frac missing.
    """
    if trace.copies is None or not trace.forwards:
        raise SpecdecError("a gate needs copies and a tree; record a drafter that has both.")
    rows = []
    for tree in trees:
        plan = (tree.total_tokens, tree.depth, tree.top_k, *tree.beam)
        for numbers in ((math.nan, math.nan), *itertools.product(copied, saved)):
            policy = Static.of(tree) if math.isnan(numbers[0]) else CopyGate(plan, *numbers)
            replayed = replay(trace, policy, costs)
            rates = replayed.tau, replayed.ms_per_tok, replayed.speedup
            rows.append((policy, tree.text, *numbers, *rates))
    return pd.DataFrame(rows, columns=GATE_COLUMNS).sort_values("ms_per_tok", ignore_index=True)


def _steps(prompts: int, candidates: int) -> list[tuple[int, int]]:
    """[start, end) of the prompts of each step; the last step takes the rest."""
    bounds = [0]
    size = FIRST
    while candidates > KEEP and bounds[-1] + size < prompts:
        bounds.append(bounds[-1] + size)
        size = size * KEEP
        candidates = math.ceil(candidates / KEEP)
    return list(itertools.pairwise([*bounds, prompts]))


def _static_policies(trees: Iterable[TreeConfig]) -> dict[str, Static]:
    return {tree.text: Static.of(tree) for tree in trees}


def _ranked(rows: pd.DataFrame, policies: dict[str, Static]) -> pd.DataFrame:
    """One row per remaining candidate, fastest first; all have decoded the same prompts."""
    rows = rows[rows["method"].isin(policies)]
    sums = rows.groupby("method")[["new_tok", "total_ms", "cycles", "cycle_tok"]].sum()
    settings = [setting(policies[text].plan) for text in sums.index]
    table = pd.DataFrame(settings).assign(method=sums.index)
    table["ms_per_tok"] = (sums["total_ms"] / sums["new_tok"]).to_numpy()
    table["tau"] = (sums["cycle_tok"] / sums["cycles"]).to_numpy()
    return table.sort_values("ms_per_tok", ignore_index=True)
