"""How fast could anyone have been? The least time of any controller on a recording, and who comes how close to it.

With every cycle's yield and cost a look-up, the best sequence of answers is a shortest path over positions. Knows nothing
about models, policies or the cycle's code; `trace` and `costs` are a `trace.Trace` and a `costs.CostModel`. (Design,
section 5.)

One recording, many machines: who is how fast under each cost model, judged only where that model was measured.

Knows nothing about models or policies; a trace and cost models in, one table out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec.core.rates import SUMS, TURN, Rates, with_rates
from specdec.core.tree_config import TREES, TreeConfig, pool_size
from specdec.errors import SpecdecError, nearest_name_error
from specdec.replays.static_trees import (
    SETTING,
    Prices,
    best_static,
    fastest,
    path_ranks,
    per_suite_static,
    recorded,
    static_grid,
    static_turns,
    turn_table,
    within,
)
from specdec.replays.trace import Trace

DEFAULTS = (TREES["eagle3"], TREES["eagle3-scripts"])
__all__ = ["Bound", "best_static", "clairvoyant", "headroom", "per_suite_static", "references", "static_grid"]


@dataclass(frozen=True)
class Bound(Rates):
    """What `clairvoyant` found.

    turns: one row per turn: suite, prompt, turn, part, new_tok (after the prefill's own), cycles, cycle_tok, time_ms,
    plain_ms (plain decoding of the same tokens). answers: one row per cycle of a fastest sequence: suite, prompt, turn,
    position, top_k (0: a plain step), expansions, verify_nodes, accepted_tok, time_ms.
    """

    turns: pd.DataFrame
    answers: pd.DataFrame

    per_turn = "turns"


def clairvoyant(trace, costs, top_ks=None, depths=None, sizes=None, *, plain: bool = False) -> Bound:
    """The least total time to produce every turn's tokens, over all sequences of answers (k, n, V), one per cycle.

    top_ks, depths (n), sizes (V, root excluded): the answers allowed; None allows all that were recorded, n = 0 and V = 0
    among them; V is cut to the pool, as in the cycle. plain: also allow a step without drafting, which costs
    `costs.step_ms` (the drafter's catching up is then free: optimistic). Questions cost nothing.

    Backwards over positions p: value[p] = min over a of c[p, a] + value[p + a + 1], with c[p, a] the least cost of an
    answer that accepts exactly a tokens. Fixed k and n, the sizes that accept exactly a form an interval, and
    verification never gets cheaper with V, so its smallest allowed member is enough: the minimum over all V is attained.
    SpecdecError for answers that were not recorded.
    """
    top_ks, depths = recorded(trace, top_ks, depths)
    prices = Prices.of(trace, costs, top_ks)
    cost_ms, answer = _cheapest(trace, prices, top_ks, depths, _next_size(trace, sizes))
    if plain:
        step_ms = prices.step[prices.where]
        better = step_ms < cost_ms[:, 0]
        cost_ms[better, 0], answer[better, 0] = step_ms[better], 0
    value_ms, accepted = _least(trace, cost_ms)
    cycle_row, cycle_turn = _walk(trace, accepted)
    taken = accepted[cycle_row]
    first = trace.turns["first"].to_numpy()
    answers = trace.turns[TURN].iloc[cycle_turn].reset_index(drop=True)
    answers["position"] = cycle_row - first[cycle_turn]
    answers[["top_k", "expansions", "verify_nodes"]] = answer[cycle_row, taken].astype(int)
    answers["accepted_tok"], answers["time_ms"] = taken.astype(int), cost_ms[cycle_row, taken]
    cycles = np.bincount(cycle_turn, minlength=len(first))
    cycle_tok = np.bincount(cycle_turn, weights=taken + 1.0, minlength=len(first)).astype(int)
    return Bound(turn_table(trace, prices, cycles, cycle_tok, value_ms), answers)


def headroom(policy_ms_per_tok, tuned, clairvoyant):
    """Share of the gap in speed that a policy captures: (1/policy - 1/tuned) / (1/clairvoyant - 1/tuned).

    All in ms per token, numbers or arrays: 0 is the tuned static tree, 1 the bound, negative slower than tuned, NaN where
    there is no gap. SpecdecError where the bound is slower than the tuned tree or the policy faster than the bound.
    """
    policy, tuned, least = np.broadcast_arrays(*(np.asarray(x, float) for x in (policy_ms_per_tok, tuned, clairvoyant)))
    if not all((np.isfinite(x) & (x > 0)).all() for x in (policy, tuned, least)):
        raise SpecdecError("headroom compares times per token, so all three must be positive and finite.")
    if (least > np.minimum(tuned, policy) * (1 + 1e-9)).any():
        raise SpecdecError(
            "something is faster than the clairvoyant bound; compute all three on the same turns with the same costs."
        )
    gap = 1 / least - 1 / tuned
    open_gap = gap > 1e-12 / tuned
    share = np.where(open_gap, (1 / policy - 1 / tuned) / np.where(open_gap, gap, 1), np.nan)
    return float(share) if share.ndim == 0 else share


def references(trace, costs, train="train", test="test", *, defaults=DEFAULTS, others=None, **grid) -> pd.DataFrame:
    """What a policy has to be compared with, per suite and over all: trees chosen on part `train`, judged on part `test`.

    Rows: each of `defaults` (the first is "the default"), tuned static, per-suite tuned static, oracle depth and oracle
    size (the rest as in the tuned tree), oracle tree (both; its k), clairvoyant, and `others`: name -> per-turn table of
    the test turns (`Replayed.table` of a random policy). grid: total_tokens, depths, top_ks to tune over. Columns suite,
    method, tree, ms_per_tok, tau, speedup (over plain), over_default, over_tuned, headroom_frac.
    """
    if train == test:
        raise SpecdecError(
            f"the tuned tree must not be judged on the turns it was chosen on (part {train!r}); give two parts."
        )
    judged, chosen_on = _part(trace, test), _part(trace, train)
    by_suite = static_grid(chosen_on, costs, by="suite", **grid)
    tuned = fastest(by_suite.groupby(SETTING, as_index=False)[SUMS].sum())
    trees = {suite: fastest(rows) for suite, rows in by_suite.groupby("suite", sort=False)}
    shown = {f"default {_shape(tree)}": tree for tree in defaults} | {"tuned static": tuned}
    tables = {name: static_turns(judged, costs, tree) for name, tree in shown.items()}
    tables["per-suite tuned static"] = _per_suite(judged, costs, trees)
    k, n, v = [tuned.top_k], [tuned.depth], [tuned.verify_nodes]
    tables["oracle depth"] = clairvoyant(judged, costs, k, None, v).turns
    tables["oracle size"] = clairvoyant(judged, costs, k, n, None).turns
    tables["oracle tree"] = clairvoyant(judged, costs, k).turns
    tables["clairvoyant"] = clairvoyant(judged, costs).turns
    own = {"per-suite tuned static": trees}
    own |= {name: dict.fromkeys(trees, tree) | {"all": tree} for name, tree in shown.items()}
    suites = [*dict.fromkeys(judged.turns["suite"]), "all"]
    return pd.concat([_compared(tables | (others or {}), own, suite) for suite in suites], ignore_index=True)


def _compared(tables: dict[str, pd.DataFrame], trees: dict[str, dict], suite: str) -> pd.DataFrame:
    """The rows of `references` for one suite; the first table is the default's."""
    sums = [(table if suite == "all" else table[table["suite"] == suite])[SUMS].sum() for table in tables.values()]
    rows = with_rates(pd.DataFrame(sums, index=list(tables)))
    other = rows.index[rows["new_tok"] != rows["new_tok"].iloc[0]]
    if len(other):
        raise SpecdecError(
            f"{other[0]!r} did not decode the test turns of {suite!r}; replay it on trace.select(part=...)."
        )
    speed = rows["ms_per_tok"]
    found = pd.DataFrame({"suite": suite, "method": rows.index})
    found["tree"] = [_shape(trees[name][suite]) if suite in trees.get(name, ()) else "" for name in rows.index]
    found[["ms_per_tok", "tau", "speedup"]] = rows[["ms_per_tok", "tau", "speedup"]].to_numpy()
    found["over_default"] = (speed.iloc[0] / speed).to_numpy()
    found["over_tuned"] = (speed["tuned static"] / speed).to_numpy()
    found["headroom_frac"] = headroom(speed, speed["tuned static"], speed["clairvoyant"])
    return found


# ---- the dynamic programme -------------------------------------------------------------------------------------------
def _next_size(trace, sizes) -> np.ndarray:
    """[most_nodes + 2]: the smallest allowed size from v on; most_nodes + 1 where there is none."""
    most = trace.most_nodes
    allowed = np.arange(most + 1) if sizes is None else np.array(within(sizes, 0, most, "sizes"))
    return np.append(allowed, most + 1)[np.searchsorted(allowed, np.arange(most + 2))]


def _cheapest(trace, prices: Prices, top_ks, depths, next_size):
    """Least cost [R, D + 2] of accepting exactly a tokens, and the answer (k, n, V) that attains it, int16 [R, D + 2, 3]."""
    rows, where = len(prices.where), prices.where
    best_ms = np.full((rows, trace.depth + 2), np.inf)
    answer = np.zeros((rows, trace.depth + 2, 3), dtype=np.int16)
    never = np.full((rows, 1), trace.most_nodes)
    for top_k in top_ks:
        for depth in depths:
            # Trees that accept exactly a tokens have more nodes than the rank of the a-th, at most the next one's rank.
            edges = np.concatenate((np.full((rows, 1), -1), path_ranks(trace, top_k, depth), never), axis=1)
            size = next_size[edges[:, :-1] + 1]
            nodes = np.minimum(size, min(trace.most_nodes, pool_size(depth, top_k)))
            cost_ms = prices.draft[top_k][where, depth, None] + prices.verify[where[:, None], nodes]
            row, tokens = np.nonzero((size <= edges[:, 1:]) & (cost_ms < best_ms[:, : depth + 2]))
            best_ms[row, tokens] = cost_ms[row, tokens]
            answer[row, tokens, 0], answer[row, tokens, 1], answer[row, tokens, 2] = top_k, depth, nodes[row, tokens]
    return best_ms, answer


def _least(trace, cost_ms: np.ndarray):
    """Least time per turn [turns], and the accepted_tok to aim at in every row [R]."""
    first, positions = trace.turns["first"].to_numpy(), trace.turns["positions"].to_numpy()
    tokens = cost_ms.shape[1]
    value_ms = np.zeros((len(first), positions.max() + tokens))  # nothing is left to pay beyond a turn's end
    accepted = np.zeros(len(cost_ms), dtype=np.int64)
    for position in range(positions.max() - 1, -1, -1):
        turn = np.flatnonzero(positions > position)
        total_ms = cost_ms[first[turn] + position] + value_ms[turn, position + 1 : position + 1 + tokens]
        accepted[first[turn] + position] = total_ms.argmin(axis=1)
        value_ms[turn, position] = total_ms.min(axis=1)
    return value_ms[:, 0], accepted


def _walk(trace, accepted: np.ndarray):
    """Rows and turns of the cycles, each starting where the one before ended; sorted by row. int [cycles] each."""
    row = trace.turns["first"].to_numpy()
    end = row + trace.turns["positions"].to_numpy()
    rows, turns = [], []
    while len(alive := np.flatnonzero(row < end)):
        rows.append(row[alive])
        turns.append(alive)
        row = row + np.where(row < end, accepted[np.minimum(row, len(accepted) - 1)] + 1, 0)
    rows, turns = np.concatenate(rows), np.concatenate(turns)
    order = np.argsort(rows)
    return rows[order], turns[order]


# ---- references ------------------------------------------------------------------------------------------------------
def _per_suite(trace, costs, trees: dict[str, TreeConfig]) -> pd.DataFrame:
    """The per-turn table of every suite under its own tree."""
    suites = trace.turns["suite"]
    missing = [suite for suite in dict.fromkeys(suites) if suite not in trees]
    if missing:
        raise SpecdecError(
            f"no turn of suite {missing[0]!r} was recorded to tune on; record some or leave the suite out."
        )
    return pd.concat(
        [static_turns(trace.select((suites == s).to_numpy()), costs, trees[s]) for s in dict.fromkeys(suites)]
    )


def _part(trace, name: str):
    mask = (trace.turns["part"] == name).to_numpy()
    if not mask.any():
        raise nearest_name_error("part of the trace", name, dict.fromkeys(trace.turns["part"]))
    return trace.select(mask)


def _shape(tree: TreeConfig) -> str:
    return f"({tree.total_tokens}, {tree.depth}, {tree.top_k})"


# ---- machines ---------------------------------------------------------------------------------------------------------
def on_machines(trace: Trace, models: dict, *, defaults=DEFAULTS, total_tokens=None, depths=None, **options):
    """`bound.references` under every cost model of `models` (name -> CostModel), with a column `machine` in front.

    total_tokens, depths: to tune over, default all; each machine takes those it was measured at. options: train, test.
    """
    found = []
    for name, costs in models.items():
        part = trace.restrict(costs.ranges)
        low, shallow = (costs.ranges.get(what, (0, 0))[0] for what in ("verify_nodes", "expansions"))
        sizes = range(2, part.most_nodes + 2) if total_tokens is None else total_tokens
        sizes = [total for total in sizes if low < total <= part.most_nodes + 1] or [part.most_nodes + 1]
        levels = range(part.depth + 1) if depths is None else depths
        levels = [level for level in levels if shallow <= level <= part.depth] or [part.depth]
        table = references(part, costs, defaults=defaults, total_tokens=sizes, depths=levels, **options)
        table.insert(0, "machine", name)
        found.append(table)
    return pd.concat(found, ignore_index=True)
