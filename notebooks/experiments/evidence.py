"""What notebook 91 measures of a drafter that no other notebook does: trees judged on recordings, and an audit by suite."""

from __future__ import annotations

import copy

import pandas as pd

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.costs.profiles import profile
from specdec.data.suites import Prompt, conversation, describe_items
from specdec.evaluation import lossless, stats
from specdec.models.fingerprint import describe_pair, fingerprint
from specdec.replays.record import record
from specdec.replays.replay import replay

ANY_COSTS = "roofline-a100-llama-8b-eager"  # what is accepted does not depend on what it costs


def shape(tree: TreeConfig) -> str:
    """total_tokens/depth/top_k, and the beam if the tree has its own."""
    return tree.text.replace(",", "/")


def cycles_of(pair: Pair, items: list[Prompt], trees: list[TreeConfig], **options) -> pd.DataFrame:
    """The cycles of every tree, in a column tree, replayed from one recording of the items. options: those of `record`."""
    options |= dict(top_ks=tuple(sorted({tree.top_k for tree in trees})), depth=max(tree.depth for tree in trees))
    options |= dict(most_nodes=max(tree.verify_nodes for tree in trees), trees=(), features=False)
    trace, costs = record(pair, items, name="evidence_tau", part="test", **options), profile(ANY_COSTS)
    cycles = {shape(tree): replay(trace, Static.of(tree), costs, keep_cycles=True).cycles for tree in trees}
    return pd.concat([rows.assign(tree=tree) for tree, rows in cycles.items()])


def tau_by_suite(cycles: pd.DataFrame) -> pd.DataFrame:
    """One row per suite and one for all: prompts, and each tree's tokens per cycle, pooled over cycles."""
    cycles = stats.with_all(cycles).assign(cycles=1)
    prompts = cycles.groupby("suite", sort=False)["prompt"].nunique()
    sums = cycles.groupby(["suite", "tree"], sort=False)[["new_tok", "cycles"]].sum()
    taus = (sums["new_tok"] / sums["cycles"]).unstack("tree")[list(dict.fromkeys(cycles["tree"]))]
    return prompts.to_frame("prompts").join(taus).reset_index()


def audit_by_suite(pair: Pair, items: list[Prompt], policies: dict, tokens: int, seed: int, **options) -> pd.DataFrame:
    """The rows of `lossless.audit` of each item's first turn, with a column suite. Continues a run that was stopped.

    In float32 the policies' texts of a prompt are decoded together, in other types alone, as `decode` would.
    options: scale, and temperatures of the audit.
    """
    alone, scale = pair.target.dtype.itemsize < 4, options.pop("scale")
    policies = copy.deepcopy(policies)  # one that decides at random is another after every answer
    identity = {"pair": describe_pair(pair), "items": describe_items(items), "tokens": tokens, "seed": seed, **options}
    identity |= {"policies": {name: fingerprint(policy) for name, policy in policies.items()}, "alone": alone}
    run = runs.start("evidence_lossless", identity, scale=scale)
    shards, options = run.shards("texts"), options | dict(rows=1 if alone else len(policies), progress=False)
    for number in sorted({*range(len(items))} - {*shards.done()}):
        item = items[number]
        chat = conversation(pair, item, 0, [])
        found = lossless.audit(pair, [chat], policies, tokens, seed=seed + number, **options)
        shards.write(number, found.rows.assign(prompt=item.id, suite=item.suite))
        print(f"{run.name}, {pair.target.dtype}: {number + 1} of {len(items)} prompts", flush=True)
    audit = lossless.Audit(shards.merge())
    run.finish(texts=len(audit.rows), failures=len(audit.failures))
    return audit.rows
