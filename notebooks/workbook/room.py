"""A controller that finds the room: what is to gain over a tuned tree with copies of the text.

tree      the tuned tree of the drafter alone: the base of every ratio
hybrid    the fastest tree that is always the same, with copies merged into it
gate      the same behind a `CopyGate`, tuned: the strongest opponent that does not learn
rule      copies, tree or nothing by summed probabilities and prices, on the same information
ours      `ValuePolicy` with `plans`: one network decides all of it
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import CopiedTree, Plan, TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.evaluation import compare
from specdec.evaluation.tuning import tune_gate
from specdec.models.ngrams import CopyOdds, NgramConfig
from specdec.policies.base import as_array, load_policy, tree_of
from specdec.policies.value import OURS, ValueConfig
from specdec.replays.copies import copy_odds_of, with_copies
from specdec.replays.static_trees import best_static
from specdec.replays.trace import Trace
from specdec.training.value import train_value

TREE, HYBRID, GATE, RULE = "tuned tree", "static hybrid", "gated hybrid", "rule"
TOTALS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
# every number of nodes that is worth telling apart with narrow trees, and those of wide trees
SIZES = (0, 1, 2, 3, 4, 5, 7, 9, 12, 16, 24, 32, 48, 63)
WIDE_SIZES = (0, 1, 2, 4, 7, 12, 16, 24, 32, 48, 63, 80, 100, 128, 160)
ROOM = dataclasses.replace(
    OURS, name="room", top_k=4, most_expansions=6, sizes=SIZES, probe="none", plans=True
)


@dataclass(frozen=True)
class Ground:
    """Two recordings of the same texts: of the drafter alone, and merged with copies.

    seeds: of trainings. pair: to time answers while it decodes.
    """

    alone: Trace
    merged: Trace
    odds: CopyOdds
    config: NgramConfig
    seeds: tuple[int, ...] = (0, 1, 2)
    scale: str = "laptop"
    pair: Pair | None = field(default=None, compare=False)

    def part(self, name: str, copies: bool = True) -> Trace:
        return (self.merged if copies else self.alone).select(part=name)


def ground(trace: Trace, **fields: Any) -> Ground:
    """The recordings, with the odds of copies counted on the part `train`."""
    config = NgramConfig(levels=min(NgramConfig().levels, trace.depth + 1))
    odds = copy_odds_of(trace.select(part="train"), config, learned_from="the part train")
    return Ground(trace, with_copies(trace, odds, config), odds, config, **fields)


class Worth(Policy):
    """The rule: the answer with the most tokens per millisecond of its own cycle.

    scale: of scores. tree: the largest it drafts. usual: what a drafted cycle is taken to cost.
    drafted_tok: tokens that a tree is expected to bring.
    """

    asks = frozenset({PLAN, EXTEND, SIZE})
    DEEPER, NEWEST = math.log(0.25), 0.2

    def __init__(self, costs: CostModel, scale: float, tree: TreeConfig, usual: Plan):
        self.plan, self.scale = tree, scale
        self.limits = tree
        nodes = np.arange(tree.verify_nodes + 1)
        levels = range(tree.depth + 1)
        self._verify_ms = costs.verify_ms(nodes, 200) + costs.rest_ms
        self._draft_ms = [float(costs.draft_ms(tree.top_k, level, 200)) for level in levels]
        self._drafted_ms = self._draft_ms[usual.depth] + self._verify_ms[usual.verify_nodes]
        self.reset()

    def reset(self) -> None:
        self.drafted_tok = 1.0

    def best(self, scores: np.ndarray, spent_ms: float) -> tuple[float, int]:
        """(tokens per ms, nodes) of the best number of nodes with these scores."""
        # scores are logarithms; copies bring their own
        chances = np.exp(self.scale * np.asarray(scores, dtype=float))
        chances = np.sort(chances)[::-1][: len(self._verify_ms) - 1]
        tokens = 1 + np.concatenate(([0.0], np.cumsum(chances)))
        rates = tokens / (self._verify_ms[: len(tokens)] + spent_ms)
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
        if question.kind == EXTEND:
            return float(question.newest_scores.max()) > self.DEEPER
        scores = np.concatenate((as_array(question.scores), copied.astype(np.float32)))
        _, nodes = self.best(scores, self._draft_ms[question.expansions])
        return min(nodes, question.largest)

    def observe(self, cycle: Cycle) -> None:
        if cycle.draft_calls:
            self.drafted_tok += self.NEWEST * (cycle.accepted_tok - self.drafted_tok)


def opponents(ground: Ground, costs: CostModel) -> dict[str, Policy]:
    """The strongest answers that nothing learned, chosen on the parts `train` and `tune`."""
    # 1. static trees, without and with copies
    tuned = compare.Baselines.choose(ground.alone, costs).tuned
    merged = ground.merged.select(ground.merged.turns["part"].isin(compare.CHOSEN_ON))
    totals = [total for total in TOTALS if total <= merged.most_nodes + 1]
    static = best_static(merged, costs, total_tokens=totals)
    # 2. the gate, with trees around the static one
    trees = []
    for depth, more in itertools.product((static.depth, static.depth + 1), (0, 2)):
        total = static.total_tokens + more
        if total <= pool_size(depth, static.top_k) + 1 and depth <= merged.depth:
            trees.append(TreeConfig(total, depth, static.top_k))
    grid = dict(copied=(5, 9, 13, 17), saved=(0.0, 0.1, 0.2, 0.3))
    gated = tune_gate(ground.part("tune"), costs, trees, **grid)
    gate = gated.loc[gated["copied_tokens"].notna(), "policy"].iloc[0]
    # 3. the rule, with the largest tree of ours
    form = form_for(static)
    depth = min(max(form.most_expansions, static.depth), merged.depth)
    most = tree_of(min(max(form.sizes), merged.most_nodes), depth, static.top_k)
    rule = Worth(costs, ground.odds.scale, most, static)
    return {TREE: Static.of(tuned), HYBRID: Static.of(static), GATE: gate, RULE: rule}


def form_for(static: Plan) -> ValueConfig:
    """ROOM with as many children per node as the best static hybrid has."""
    form = ROOM
    if static.top_k != ROOM.top_k:
        wide = dict(most_expansions=4, sizes=WIDE_SIZES)
        form = dataclasses.replace(ROOM, top_k=static.top_k, **wide)
    return dataclasses.replace(form, most_expansions=max(form.most_expansions, static.depth + 1))


def learned(ground: Ground, costs: CostModel, config: ValueConfig, copies: bool = True) -> list:
    """A policy per seed, trained on the part `train` and tuned on `tune`; found again later.

    copies: learns from the recording with copies.
    """
    trace = ground.merged if copies else ground.alone
    sizes = tuple(size for size in config.sizes if size <= trace.most_nodes)
    config = dataclasses.replace(config, sizes=sizes)
    facts = {"recording": trace.header["key"], "costs": runs.content_key(costs=costs)}
    facts["config"] = config
    policies = []
    for seed in ground.seeds:
        key = runs.plain({**facts, "seed": seed})
        run = runs.start("room", key, scale=ground.scale, tie_to_code=False)
        folder = run.path("policy")
        if not folder.is_dir():
            options = dict(policy_ms=None, pair=ground.pair, seed=seed, progress=False)
            options["tune_on"] = ground.part("tune", copies)
            policy, curve = train_value(ground.part("train", copies), costs, config, **options)
            run.write_table("curve", curve)
            policy.save(folder)
            run.finish()
        policies.append(load_policy(folder))
    return policies
