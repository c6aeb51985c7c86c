"""A controller that finds the room: what is to gain over a tuned tree if copies of the text are
candidates too.

    tree      the tuned tree of the drafter alone: the base of every ratio
    hybrid    the fastest tree that is always the same, with copies merged into it
    gate      the same behind a `CopyGate`, tuned: the strongest opponent that does not learn
    rule      copies, tree or nothing by summed probabilities and prices, on the same information
    ours      `ValuePolicy` with `plans`: one network decides all of it

Knows nothing about how the network learns (`training.value`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static
from specdec.core.records import EXTEND, PLAN, SIZE, TURN, Cycle, Question
from specdec.core.tree_config import CopiedTree, Plan, TreeConfig, pool_size
from specdec.costs.calibrate import measured_answer_ms
from specdec.costs.model import CostModel
from specdec.evaluation import compare, stats
from specdec.evaluation.tuning import tune_gate
from specdec.models.ngrams import CopyOdds, NgramConfig
from specdec.policies.base import as_array, load_policy, tree_of
from specdec.policies.value import OURS, ValueConfig, ValuePolicy
from specdec.replays.copies import copy_odds_of, with_copies
from specdec.replays.oracle import clairvoyant
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import best_static
from specdec.replays.trace import Trace
from specdec.training.value import Examples, cycle_starts, reprice, train_value

from workbook import ladder

TREE, HYBRID, GATE, RULE, BOUND = "tuned tree", "static hybrid", "gated hybrid", "rule", "bound"
TOTALS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
# Numbers of nodes: every one that is worth telling apart with narrow trees, and those of wide
# trees.
SIZES = (0, 1, 2, 3, 4, 5, 7, 9, 12, 16, 24, 32, 48, 63)
WIDE_SIZES = (0, 1, 2, 4, 7, 12, 16, 24, 32, 48, 63, 80, 100, 128, 160)
ROOM = dataclasses.replace(
    OURS, name="room", top_k=4, most_expansions=6, sizes=SIZES, probe="none", plans=True
)
WIDE = dict(most_expansions=4, sizes=WIDE_SIZES)  # where the best static tree is wider
ALONE = "no copies"
# What is left out of the whole controller.
PARTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "no plan": {"plans": False},
    ALONE: {},  # of the drafter alone
}


@dataclass(frozen=True)
class Ground:
    """Two recordings of the same texts: of the drafter alone, and merged with copies (`ground`).
    seeds: of trainings.
    """

    alone: Trace
    merged: Trace
    odds: CopyOdds
    config: NgramConfig
    seeds: tuple[int, ...] = (0, 1, 2)
    scale: str = "laptop"
    pair: Pair | None = field(default=None, compare=False)  # to time answers while it decodes

    def part(self, name: str, copies: bool = True) -> Trace:
        return (self.merged if copies else self.alone).select(part=name)

    def evaluation_ms(self, policy: Policy, costs: CostModel, copies: bool = True) -> float:
        """The time of one answer, while the pair decodes if there is one."""
        timed = (
            measured_answer_ms(self.pair, policy, costs)
            if self.pair
            else answer_ms(self.part("tune", copies), policy, costs)
        )
        return float(timed)


def ground(trace: Trace, **fields: Any) -> Ground:
    """The recordings, with the odds of copies counted on the part `train`."""
    config = NgramConfig(levels=min(NgramConfig().levels, trace.depth + 1))
    odds = copy_odds_of(trace.select(part="train"), config, learned_from="the part train")
    return Ground(trace, with_copies(trace, odds, config), odds, config, **fields)


class Worth(Policy):
    """The rule: the drafter's and the copies' probabilities are summed, and the answer with the
    most tokens per millisecond of its own cycle is taken. Nothing is learned but the scale of
    scores, which `CopyOdds` holds.

    tree: the largest it drafts; usual: what a drafted cycle is taken to cost beforehand, the best
    static hybrid.
    drafted_tok: accepted tokens that a tree is expected to bring before it is drafted, the mean of
    the text's newest trees.
    deeper: the score of the likeliest path above which one more level is drafted.
    """

    asks, deeper = frozenset({PLAN, EXTEND, SIZE}), math.log(0.25)

    def __init__(
        self,
        costs: CostModel,
        scale: float,
        tree: TreeConfig,
        usual: Plan,
        newest_frac: float = 0.2,
    ):
        self.plan, self.scale, self.newest_frac = tree, scale, newest_frac
        self.limits = tree
        nodes = np.arange(tree.verify_nodes + 1)
        self._verify_ms = costs.verify_ms(nodes, 200) + costs.rest_ms
        self._draft_ms = [
            float(costs.draft_ms(tree.top_k, level, 200)) for level in range(tree.depth + 1)
        ]
        self._drafted_ms = self._draft_ms[usual.depth] + self._verify_ms[usual.verify_nodes]
        self.reset()

    def reset(self) -> None:
        self.drafted_tok = 1.0

    def best(self, scores: np.ndarray, spent_ms: float) -> tuple[float, int]:
        """(tokens per ms, nodes) of the best number of nodes with these scores."""
        chances = np.sort(np.exp(self.scale * np.asarray(scores, dtype=float)))[::-1][
            : len(self._verify_ms) - 1
        ]
        rates = (1 + np.concatenate(([0.0], np.cumsum(chances)))) / (
            self._verify_ms[: len(chances) + 1] + spent_ms
        )
        return float(rates.max()), int(rates.argmax())

    def answer(self, question: Question) -> Any:
        copied = np.asarray(question.copied_scores)
        if question.kind == PLAN:
            rate, nodes = self.best(copied, 0.0)
            if (1 + self.drafted_tok) / self._drafted_ms > rate:
                return self.plan
            return CopiedTree(nodes + 1) if nodes else TreeConfig(1, 0, 1)
        if isinstance(question.plan, CopiedTree):
            return min(question.plan.verify_nodes, question.largest)
        scores = np.concatenate((as_array(question.scores), copied.astype(np.float32)))
        if question.kind == SIZE:
            return min(self.best(scores, self._draft_ms[question.expansions])[1], question.largest)
        return float(question.newest_scores.max()) > self.deeper

    def observe(self, cycle: Cycle) -> None:
        if cycle.draft_calls:
            self.drafted_tok += self.newest_frac * (cycle.accepted_tok - self.drafted_tok)


def opponents(ground: Ground, costs: CostModel) -> dict[str, Policy]:
    """The strongest answers that nothing learned, chosen on the parts `train` and `tune`; the first
    is of the drafter alone.
    """
    tuned = compare.Baselines.choose(ground.alone, costs).tuned
    merged = ground.merged.select(ground.merged.turns["part"].isin(compare.CHOSEN_ON))
    static = best_static(
        merged, costs, total_tokens=[total for total in TOTALS if total <= merged.most_nodes + 1]
    )
    more = itertools.product(
        (static.depth, static.depth + 1), (static.total_tokens, static.total_tokens + 2)
    )
    trees = [
        TreeConfig(total, depth, static.top_k)
        for depth, total in more
        if total <= pool_size(depth, static.top_k) + 1 and depth <= merged.depth
    ]
    gated = tune_gate(
        ground.part("tune"), costs, trees, copied=(5, 9, 13, 17), saved=(0.0, 0.1, 0.2, 0.3)
    )
    gate = gated.loc[gated["copied_tokens"].notna(), "policy"].iloc[0]
    form = form_for(static)
    depth = min(max(form.most_expansions, static.depth), merged.depth)
    most = tree_of(min(max(form.sizes), merged.most_nodes), depth, static.top_k)
    rule = Worth(costs, ground.odds.scale, most, static)
    return {TREE: Static.of(tuned), HYBRID: Static.of(static), GATE: gate, RULE: rule}


def learned(
    ground: Ground, costs: CostModel, config: ValueConfig = ROOM, copies: bool = True
) -> list[ValuePolicy]:
    """A policy per seed, trained on the part `train` and tuned on `tune`; found again where it was
    trained before.

    copies: learns from the recording with copies.
    """
    trace, made = ground.merged if copies else ground.alone, []
    config = dataclasses.replace(
        config, sizes=tuple(size for size in config.sizes if size <= trace.most_nodes)
    )
    facts = {
        "recording": trace.header["key"],
        "costs": runs.content_key(costs=costs),
        "config": config,
    }
    for seed in ground.seeds:
        run = runs.start(
            "room", runs.plain({**facts, "seed": seed}), scale=ground.scale, tie_to_code=False
        )
        if not (folder := run.path("policy")).is_dir():
            own = dict(tune_on=ground.part("tune", copies), seed=seed, progress=False)
            policy, curve = train_value(
                ground.part("train", copies), costs, config, policy_ms=None, pair=ground.pair, **own
            )
            run.write_table("curve", curve)
            policy.save(folder)
            run.finish()
        made.append(load_policy(folder))
    return made


def form_for(static: Plan) -> ValueConfig:
    """ROOM with as many children per node as the best static hybrid has."""
    form = (
        ROOM
        if static.top_k == ROOM.top_k
        else dataclasses.replace(ROOM, top_k=static.top_k, **WIDE)
    )
    return dataclasses.replace(form, most_expansions=max(form.most_expansions, static.depth + 1))


def turns_of(
    trace: Trace, costs: CostModel, method: str, policies: Iterable[Policy], policy_ms: float = 0.0
) -> pd.DataFrame:
    """Rows per turn of a method: TURN, new_tok, time_ms, policy_ms, the mean over its policies."""
    tables = [replay(trace, policy, costs, policy_ms=policy_ms).table for policy in policies]
    names = ["new_tok", "time_ms", "policy_ms", "cycles"]
    mean = sum(table[names] for table in tables) / len(tables)
    return tables[0][TURN].assign(method=method, **mean)


def summarised(turns: pd.DataFrame) -> pd.DataFrame:
    """Speeds over the tuned tree and over the gate, by suite and for all, and the policy's share of
    the time.
    """
    table = stats.summarise(
        turns, {"over_tuned": TREE, "over_gate": GATE}, rate=stats.SPEED, pool=True
    )
    sums = turns.groupby("method")[["policy_ms", "time_ms"]].sum()
    table["policy_frac"] = table["method"].map(sums["policy_ms"] / sums["time_ms"])
    bound = table[table["method"] == BOUND].set_index("suite")["over_gate"]
    return table.assign(headroom_frac=(table["over_gate"] - 1) / (table["suite"].map(bound) - 1))


def judged(
    ground: Ground, costs: CostModel, parts: Iterable[str] = ("ours",)
) -> tuple[pd.DataFrame, dict[str, list]]:
    """`summarised` of the part `test`: opponents, the bound, and ours in each form of `parts`; and
    the policies by method.
    """
    policies: dict[str, list] = {
        name: [policy] for name, policy in opponents(ground, costs).items()
    }
    turns = [
        turns_of(
            ground.part("test", name != TREE),
            costs,
            name,
            some,
            0.0 if name in (TREE, HYBRID) else costs.question_ms,
        )
        for name, some in policies.items()
    ]
    for part in parts:
        config = dataclasses.replace(form_for(policies[HYBRID][0].plan), **PARTS[part])
        policies[part] = learned(ground, costs, config, part != ALONE)
        charged = ground.evaluation_ms(policies[part][0], costs, part != ALONE)
        turns.append(
            turns_of(ground.part("test", part != ALONE), costs, part, policies[part], charged)
        )
    bound = clairvoyant(ground.part("test"), costs).turns
    turns.append(
        bound[[*TURN, "new_tok", "time_ms"]].assign(method=BOUND, policy_ms=0.0, cycles=np.nan)
    )
    return summarised(pd.concat(turns, ignore_index=True)), policies


def moved(
    ground: Ground, costs: CostModel, policies: list[ValuePolicy], there: list[ValuePolicy]
) -> pd.DataFrame:
    """Policies of another machine re-priced for `costs`, beside those trained `there`: the share of
    the speed that is kept.
    """
    tune = ground.part("tune")
    again = [reprice(policy, tune, costs, ground.pair) for policy in policies]
    turns = [
        turns_of(ground.part("test"), costs, name, some)
        for name, some in (("trained", there), ("re-priced", again))
    ]
    table = stats.summarise(
        pd.concat(turns, ignore_index=True), {"kept": "trained"}, rate=stats.SPEED, pool=True
    )
    return table[(table["method"] == "re-priced") & (table["suite"] == "all")]


def explained(ground: Ground, costs: CostModel, policy: ValuePolicy, static: Plan) -> pd.DataFrame:
    """How well the accepted tokens of the best static hybrid, and of so many copies alone, are
    forecast where test cycles begin.

    Columns known (before the root pass, after it, after a level more), answer and r2: the explained
    share of the variance.
    """
    test = ground.part("test")
    rows, histories = cycle_starts(test, costs, policy, 0, plans=True)
    examples = Examples(test, policy, rows, histories)
    size = min(len(policy.sizes) - 1, int(np.searchsorted(policy.sizes, static.verify_nodes)))
    every, found = np.arange(len(rows)), []
    for level, known in enumerate(("before drafting", "after the root pass", "after one level")):
        inputs, features, accepted = examples.batch(every, level)
        told = policy.network(
            inputs, policy.network.state(features if policy.probe != "none" else None)
        )
        for answer, row in (("copies", 0), (static.text, static.depth + 1)):
            if row >= level:
                truth = accepted[:, row, size]
                r2 = ladder.explained(told[:, row, size], truth)
                found.append({"known": known, "answer": answer, "r2": r2})
    return pd.DataFrame(found)
