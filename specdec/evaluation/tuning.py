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
from specdec.core.records import ms_per_tok, tau
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.data.suites import gather
from specdec.errors import SpecdecError, check_integer, door
from specdec.evaluation.bench import EvaluateConfig, evaluate
from specdec.policies.copying import CopyGate
from specdec.replays.replay import replay
from specdec.replays.static_trees import SETTING, setting, static_grid, static_turns, tree_of

FINALISTS = 5  # trees that replay finds fastest, which then race live
GATE_COLUMNS = ["policy", "tree", "copied_tokens", "saved_frac", "tau", "ms_per_tok", "speedup"]
KEEP = 3  # one in KEEP candidates remains for the next step, on KEEP times as many prompts
TUNED = EvaluateConfig(name="tune_static")
RACED = EvaluateConfig(name="race_static")


@dataclass(frozen=True)
class Tuning:
    """The result of `tune_static`.

    table: one row per step and candidate, prompts so far, and whether it was kept.
    """

    policy: Static  # the fastest; `evaluate` refuses to measure it on the prompts it was `tuned_on`
    table: pd.DataFrame
    runs: tuple[runs.Run, ...]  # one per step


def default_grid() -> list[TreeConfig]:
    """Plain steps, chains, small trees and the published defaults, up to 60 tokens."""
    depths = {8: (3, 5), 16: (3, 5, 7), 24: (5, 7), 32: (5, 7, 9), 48: (5, 7, 9), 60: (5, 7)}
    grid = [TreeConfig(1, 0, 1), *(TreeConfig(depth + 2, depth, 1) for depth in (1, 3, 5, 7))]
    for total, levels in depths.items():
        widths = (3,) if total <= 8 else (3, 8) if total <= 32 else (6, 10)
        grid += [
            TreeConfig(total, n, k) for n in levels for k in widths if total - 1 <= pool_size(n, k)
        ]
    return grid


@runs.with_settings(TUNED)
@door
def tune_static(
    pair: Pair,
    prompts: Iterable,
    grid: list[TreeConfig] | None = None,
    config: EvaluateConfig | None = None,
    *,
    first: int = 4,
    most: int = 60,
    **settings,
) -> Tuning:
    """Find the fastest static tree for `pair` on this machine.

    prompts: names of suites, of which only the "tune" part is used, or the tuning prompts. grid:
    the trees to try, default `default_grid()`. first: prompts of the first step. most: prompts used
    in all. settings: fields of EvaluateConfig by name. Speed is new tokens over prefill and
    decoding time.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> trees = [specdec.TreeConfig(3, 1, 1), specdec.TreeConfig(6, 2, 2)]
    >>> few = dict(max_new_tokens=8, progress=False)
    >>> tuning = tune_static(pair, {"mine": ["Hello."]}, trees, **few)
    >>> tuning.policy.plan in trees, len(tuning.table)
    (True, 2)
    """
    config = runs.configured(config or TUNED, EvaluateConfig, settings)
    first = check_integer("first", first, 1)
    most = check_integer("most", most, 1)
    trees = list(grid) if grid is not None else default_grid()
    if not trees:
        raise SpecdecError("the grid of trees is empty; give at least one TreeConfig.")
    by_name = not isinstance(prompts, dict) and all(isinstance(name, str) for name in prompts)
    part = "tune" if by_name else None
    items = gather(prompts, limit=config.limit, folder=config.folder, part=part, seed=config.seed)
    random.Random(config.seed).shuffle(items)
    items = items[:most]
    config = replace(config, part=None, limit=None)
    racing = {tree.text: tree for tree in trees}
    tables = []
    done = []
    rows = []
    for step, (start, end) in enumerate(_steps(len(items), len(racing), first)):
        policies = {label: Static.of(tree) for label, tree in racing.items()}
        done.append(evaluate(policies, items[start:end], pair, config))
        rows.append(done[-1].read_table("prompts"))
        table = _ranked(pd.concat(rows, ignore_index=True), racing).assign(step=step, prompts=end)
        kept = (
            table["method"].head(math.ceil(len(racing) / KEEP) if end < len(items) else 1).tolist()
        )
        tables.append(table.assign(kept=table["method"].isin(kept)))
        racing = {label: racing[label] for label in kept}
        if len(racing) == 1:
            break
    best = Static.of(racing[kept[0]])
    best.tuned_on = frozenset(item.digest for item in items)
    columns = ["step", "method", *SETTING, "prompts", "ms_per_tok", "tau", "kept"]
    return Tuning(best, pd.concat(tables, ignore_index=True)[columns], tuple(done))


@dataclass(frozen=True)
class Race:
    """The result of `race_static`.

    table: one row per suite ("all" pools them) and tree decoded in it: suite, SETTING, predicted_ms
    and measured_ms per token (prefill excluded), fastest.
    """

    tuned: TreeConfig  # the fastest over all suites, among the trees that all suites decoded
    per_suite: dict[str, TreeConfig]
    table: pd.DataFrame
    tuned_on: frozenset  # digests of the prompts
    runs: tuple[runs.Run, ...]


def finalists(trace, costs, count: int = FINALISTS, **grid) -> list[TreeConfig]:
    """The fastest static trees on a recording; only the best size of each depth, width and beam.

    grid: of `static_grid`.
    """
    table = (
        static_grid(trace, costs, **grid)
        .sort_values("time_ms", kind="stable")
        .drop_duplicates(SETTING[1:])
    )
    return list(dict.fromkeys(map(tree_of, table.head(count).to_dict("records"))))


@runs.with_settings(RACED)
def race_static(
    pair: Pair,
    trace,
    costs,
    config: EvaluateConfig | None = None,
    *,
    count: int = FINALISTS,
    part: str = "tune",
    **settings,
) -> Race:
    """The strongest static trees: chosen by replay, then raced live, on the same part of the same
    suites.

    Every suite is decoded by the `count` trees that replay finds fastest over all suites, and by
    those it finds fastest on this one. trace: a recording of suites by name. settings: fields of
    EvaluateConfig by name.
    """
    config = runs.configured(config or RACED, EvaluateConfig, settings)
    trace = trace.select(part=part)
    suites = list(dict.fromkeys(trace.turns["suite"]))
    parts = {suite: trace.select((trace.turns["suite"] == suite).to_numpy()) for suite in suites}
    pooled = finalists(trace, costs, count)
    done = []
    rows = []
    digests = set()
    for suite in suites:
        trees = list(dict.fromkeys([*pooled, *finalists(parts[suite], costs, count)]))
        name = f"{config.name}_{runs.plain_name(suite.replace('/', '_'))}"
        methods = {tree.text: Static.of(tree) for tree in trees}
        done.append(evaluate(methods, suite, pair, replace(config, part=part, name=name)))
        turns = done[-1].read_table("prompts")
        turns["new_tok"] -= 1  # the first token comes from the prefill
        measured = turns.groupby("method")[["decode_ms", "new_tok"]].sum()
        for tree in trees:
            predicted = static_turns(parts[suite], costs, tree)[["time_ms", "new_tok"]].sum()
            rows.append(
                {
                    "suite": suite,
                    "tree": tree,
                    **measured.loc[tree.text],
                    **predicted.add_prefix("predicted_"),
                }
            )
        digests |= {
            item.digest
            for item in gather(suite, limit=config.limit, part=part, folder=config.folder)
        }
    found = pd.DataFrame(rows)
    together = (
        found[found["tree"].isin(pooled)]
        .groupby("tree", sort=False)
        .sum(numeric_only=True)
        .reset_index()
    )
    found = pd.concat([found, together.assign(suite="all")], ignore_index=True)
    found["measured_ms"] = ms_per_tok(found["decode_ms"], found["new_tok"])
    found["predicted_ms"] = ms_per_tok(found["predicted_time_ms"], found["predicted_new_tok"])
    fastest = found.loc[found.groupby("suite", sort=False)["measured_ms"].idxmin()].set_index(
        "suite"
    )["tree"]
    found["fastest"] = found["tree"] == found["suite"].map(fastest)
    named = pd.DataFrame([setting(tree) for tree in found["tree"]])
    table = pd.concat(
        [found[["suite"]], named, found[["predicted_ms", "measured_ms", "fastest"]]], axis=1
    )
    return Race(
        fastest["all"],
        {suite: fastest[suite] for suite in suites},
        table,
        frozenset(digests),
        tuple(done),
    )


def tune_gate(
    trace, costs, trees: Sequence[TreeConfig], copied=(6, 8, 12), saved=(0.1, 0.2, 0.3, 0.4)
) -> pd.DataFrame:
    """Every `CopyGate` in replay, one row each, fastest first: GATE_COLUMNS.

    trace: a recording of a drafter that copies. trees: drafted when the copies are too unlikely;
    each also appears without a gate, with copied_tokens and saved_frac missing.
    """
    if trace.copies is None or not trace.forwards:
        why = "a gate chooses between copies and a network's tree"
        raise SpecdecError(f"{why}; record a drafter that has both (hybrid).")
    rows = []
    for tree in trees:
        plan = (tree.total_tokens, tree.depth, tree.top_k, *tree.beam)
        for numbers in [(math.nan, math.nan), *itertools.product(copied, saved)]:
            policy = Static.of(tree) if math.isnan(numbers[0]) else CopyGate(plan, *numbers)
            found = replay(trace, policy, costs)
            rows.append((policy, tree.text, *numbers, found.tau, found.ms_per_tok, found.speedup))
    return pd.DataFrame(rows, columns=GATE_COLUMNS).sort_values("ms_per_tok", ignore_index=True)


def decodings(candidates: int, prompts: int, first: int = 4) -> int:
    """Number of answers that `tune_static` decodes for so many trees and single-turn prompts, for
    estimates.
    """
    count = 0
    left = candidates
    for start, end in _steps(prompts, candidates, first):
        count = count + (end - start) * left
        left = math.ceil(left / KEEP)
    return count


def _steps(prompts: int, candidates: int, first: int) -> list[tuple[int, int]]:
    """[start, end) of the prompts of each step; the last step takes the rest, so that the finalists
    see most.
    """
    bounds = [0]
    size = first
    left = candidates
    while left > KEEP and bounds[-1] + size < prompts:
        bounds.append(bounds[-1] + size)
        size = size * KEEP
        left = math.ceil(left / KEEP)
    return list(zip(bounds, [*bounds[1:], prompts], strict=True))


def _ranked(rows: pd.DataFrame, racing: dict[str, TreeConfig]) -> pd.DataFrame:
    """One row per remaining candidate, fastest first; all have decoded the same prompts."""
    rows = rows[rows["method"].isin(list(racing))]
    sums = rows.groupby("method")[["new_tok", "total_ms", "cycles", "cycle_tok"]].sum()
    table = pd.DataFrame([setting(racing[label]) for label in sums.index]).assign(method=sums.index)
    table["ms_per_tok"] = ms_per_tok(sums["total_ms"], sums["new_tok"]).to_numpy()
    table["tau"] = tau(sums["cycle_tok"], sums["cycles"]).to_numpy()
    return table.sort_values("ms_per_tok", ignore_index=True)
