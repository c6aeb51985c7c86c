"""Batches: the same texts decoded so many at once by several methods, and what all of them write
per second.

    prompts ──▶ cycle ──▶ cycle ──▶ ... ──▶ the first text ends
                     └──── counted ────┘     every text takes every cycle, so that the batch is
                     always full

Methods take turns on the same texts in a random order, and sizes are mixed. The first cycle is left
out: the drafter reads the prompt in it. Rows land in atomic shards, as those of `bench` do.
`CostModel.batched` predicts what is measured here. Knows nothing about trees or prices.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.core import clock
from specdec.core.decode import drive, opened, plain_steps, steps
from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.core.protocols import Forward, TargetForward
from specdec.core.records import Generation
from specdec.data.suites import describe_items, gather, openings
from specdec.errors import SpecdecError, check_integer
from specdec.evaluation import stats
from specdec.evaluation.bench import check_countable
from specdec.evaluation.methods import DraftedBy, Sampling, named_methods
from specdec.models.fingerprint import describe_pair, fingerprint

SIZES = (1, 2, 4, 8, 16, 32, 64)
UNCOUNTED = 1  # cycles at the start of a text


@dataclass(frozen=True)
class BatchConfig(Sampling):
    """How many texts at once, which, how long and how often."""

    sizes: tuple[int, ...] = SIZES
    rounds: int = 3  # groups of texts of every size
    max_new_tokens: int = 48  # of a text; those that end earlier are cut off by nothing else
    part: str | None = None
    folder: str | Path | None = None
    seed: int = 0  # of the texts, the orders and sampling
    cpu_time: bool = False
    name: str = "batches"
    scale: str = "laptop"
    progress: bool = True


@runs.with_settings(BatchConfig)
def measure_batches(
    methods: dict | Callable[[int], dict],
    prompts,
    pair: Pair,
    config: BatchConfig | None = None,
    **settings,
) -> runs.Run:
    """Decode groups of texts of every size with every method; returns the Run that holds
    batches.parquet.

    methods: {name: policy or text} as `bench.evaluate` takes them, but for other drafters; or a
    function that makes them for a size, for policies with prices. prompts: as in `gather`; of
    conversations the first turn. A group of more texts than there are prompts holds some twice.
    settings: fields of BatchConfig by name.

    One row is a group decoded by a method: texts, round, method, new_tok and total_ms of the
    counted cycles, cycles (of one text), context_tok and verify_nodes (means). The same call
    continues what was stopped. SpecdecError for bad input.
    """
    config = runs.configured(config, BatchConfig, settings)
    for name, lowest in (("rounds", 1), ("max_new_tokens", 4)):
        check_integer(name, getattr(config, name), lowest)
    if not config.sizes:
        raise SpecdecError(
            "sizes is empty; name how many texts to decode at once, such as (1, 8, 64)."
        )
    for size in config.sizes:
        check_integer("a size", size, 1)
    check_countable(pair, config.cpu_time)
    sizes = tuple(dict.fromkeys(config.sizes))
    policies = {
        size: _policies(methods(size) if callable(methods) else methods, pair) for size in sizes
    }
    items = gather(prompts, folder=config.folder, part=config.part, seed=config.seed)
    identity = {
        "methods": {
            size: {label: fingerprint(policy) for label, policy in policies[size].items()}
            for size in sizes
        },
        "items": describe_items(items),
        "pair": describe_pair(pair),
        "threads": torch.get_num_threads(),
        **{
            name: getattr(config, name)
            for name in ("rounds", "max_new_tokens", "seed", "temperature")
        },
        "sampling": config.warping,
        "clock": "processor" if config.cpu_time else "wall",
    }
    run = runs.start(config.name, identity, scale=config.scale)
    jobs = [(size, number) for size in sizes for number in range(config.rounds)]
    random.Random(config.seed).shuffle(jobs)
    shards, done = run.shards("batches"), set(run.shards("batches").done())
    label = {name: identity["pair"][name] for name in ("pair", "dtype", "device")} | {
        "clock": identity["clock"]
    }
    label |= {"threads": identity["threads"], "machine": runs.content_key(**machine.hardware())[:8]}
    with clock.by_processor_time(config.cpu_time):
        for size, number in tqdm(jobs, desc=config.name, unit="group", disable=not config.progress):
            shard = sizes.index(size) * config.rounds + number
            if shard in done:
                continue
            rows = _group(pair, policies[size], items, config, (size, number))
            shards.write(shard, pd.DataFrame(rows).assign(**label))
    shards.merge()
    return run.finish(groups=len(jobs))


def _policies(methods: dict, pair: Pair) -> dict[str, Policy | None]:
    policies = named_methods(methods)
    for label, policy in policies.items():
        if isinstance(policy, DraftedBy):
            raise SpecdecError(
                f"method {label!r} does not decode several texts at once; give a policy."
            )
        if policy is not None and pair.drafter is None:
            raise SpecdecError(
                f"this pair has no drafter, so it cannot decode by {label!r}; "
                "load one with load_pair."
            )
    return policies


def _group(
    pair: Pair, policies: dict, items: list, config: BatchConfig, job: tuple[int, int]
) -> list[dict]:
    """Rows of one group of texts, decoded by all methods."""
    size, number = job
    draw = random.Random(f"{config.seed}/{size}/{number}")
    drawn = [
        item for _ in range(-(-size // len(items))) for item in draw.sample(items, len(items))
    ][:size]
    prompts = openings(pair, drawn)
    order, seed, rows = draw.sample(list(policies), len(policies)), draw.getrandbits(31), {}
    settings = dict(seed=seed, stop_tokens=(), **config.sampling)
    for place, method in enumerate(order):
        counted = full_batch(pair, prompts, policies[method], config.max_new_tokens, **settings)
        rows[method] = {"texts": size, "round": number, "method": method, "order": place, **counted}
    return [rows[method] for method in policies]


def full_batch(
    pair: Pair, prompts: list[list[int]], policy: Policy | None, max_new_tokens: int, **settings
) -> dict:
    """new_tok, total_ms, cycles, context_tok and verify_nodes of the cycles that all `prompts`
    (token ids) take together.

    policy: None decodes plainly; each text has a copy of its own. The batch ends with its first
    text.
    """
    settings["max_new_tokens"] = max_new_tokens
    marks: list[list[tuple[float, int]]] = [[] for _ in prompts]
    generations: list[Generation] = []

    def turn(ids: list[int]) -> Generator:
        if policy is None:
            return plain_steps(pair, ids, **settings)
        engine, own = opened(pair, ids, copy.deepcopy(policy), **settings)
        generations.append(Generation(engine.tokens, engine.prompt_tok))
        return steps(engine, own, generations[-1])

    with pair.inference(policy is None):
        turns = (
            _marked(turn(ids), own, policy is None) for ids, own in zip(prompts, marks, strict=True)
        )
        ended, _ = next(drive(turns, len(prompts)))
    last = (
        len(marks[ended]) - 2
    )  # its final cycle, which others may not have ended, is cut at max_new_tokens
    if last <= UNCOUNTED:
        raise SpecdecError(
            f"a text ended after {last + 1} cycles, too few to count; raise max_new_tokens."
        )
    new_tok = sum(tokens for own in marks for _, tokens in own[UNCOUNTED + 1 : last + 1])
    before = sum(tokens for own in marks for _, tokens in own[: UNCOUNTED + 1])
    begin, end = (max(own[place][0] for own in marks) for place in (UNCOUNTED, last))
    context_tok = float(np.mean([len(ids) for ids in prompts])) + (before + new_tok / 2) / len(
        prompts
    )
    nodes = [row.verify_nodes for out in generations for row in out.rows[UNCOUNTED:last]]
    found = {"new_tok": new_tok, "total_ms": 1e3 * (end - begin), "cycles": last - UNCOUNTED}
    return {
        **found,
        "context_tok": context_tok,
        "verify_nodes": float(np.mean(nodes)) if nodes else 0.0,
    }


def _marked(turn: Generator, marks: list[tuple[float, int]], plain: bool) -> Generator:
    """The turn, with (seconds, new tokens) left in `marks` after the prompt and after every cycle.

    A plain turn says nothing after its steps: it has another token when it asks for the next
    forward.
    """
    result, asked = None, False
    while True:
        try:
            item = turn.send(result)
        except StopIteration:
            return
        result = None
        if not isinstance(item, Forward):
            marks.append((clock.now(), len(item)))
            continue
        if plain and isinstance(item, TargetForward):
            if asked:
                marks.append((clock.now(), 1))
            asked = True
        result = yield item


def batch_summary(run: runs.Run, baseline: str | None = None) -> pd.DataFrame:
    """One row per (texts, method): tok_per_s of all texts together, speedup over the baseline at
    the same size, with its interval over groups; tau and verify_nodes of one text; ms_per_cycle and
    context_tok.
    """
    rows = run.read_table("batches")
    names = list(dict.fromkeys(rows["method"]))
    per_text = rows.assign(
        suite=rows["texts"], prompt=rows["round"], cycles=rows["cycles"] * rows["texts"]
    )
    parts = []
    for texts, part in per_text.groupby("suite"):
        methods = run.record()["config"]["methods"][str(texts)]
        base = baseline or next(
            (name for name, method in methods.items() if method is None), next(iter(methods))
        )
        table = stats.compare(part.assign(cycle_tok=part["new_tok"]), base)
        groups = part.groupby("method")
        sums, means = (
            groups[["total_ms", "cycles"]].sum(),
            groups[["context_tok", "verify_nodes"]].mean(),
        )
        means["ms_per_cycle"] = sums["total_ms"] / sums["cycles"] * texts
        table = table.join(means, on="method")
        parts.append(
            stats.in_order(table, [name for name in names if name in set(table["method"])])
        )
    table = pd.concat(parts, ignore_index=True).rename(
        columns={"suite": "texts", "prompts": "groups"}
    )
    columns = [
        "texts",
        "method",
        "groups",
        "tok_per_s",
        *stats.spread_names("speedup"),
        "tau",
        "verify_nodes",
    ]
    return table[[*columns, "ms_per_cycle", "context_tok"]]
