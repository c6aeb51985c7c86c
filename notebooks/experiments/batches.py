"""Batches: what several methods write per second when they decode the same texts at once.

Every text takes every counted cycle, so that the batch is always full: it ends with its first text,
and the first cycle, in which the drafter reads the prompt, is left out. Methods take turns in a
random order. `CostModel.batched` predicts what is measured here.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Generator, Sequence

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
from specdec.data.suites import describe_items, openings
from specdec.errors import SpecdecError
from specdec.evaluation import stats
from specdec.evaluation.bench import check_countable
from specdec.evaluation.methods import named_methods
from specdec.models.pairs import describe_pair, fingerprint

# cycles at the start of a text
UNCOUNTED = 1


def measure_batches(
    methods: Callable[[int], dict],
    items: list,
    pair: Pair,
    *,
    sizes: Sequence[int],
    rounds: int,
    max_new_tokens: int,
    seed: int = 0,
    cpu_time: bool = False,
    scale: str = "laptop",
) -> runs.Run:
    """Decode groups of texts of every size with every method; the Run holds batches.parquet.

    methods: size -> {name: policy or text}. items: of `gather`, first turns alone. rounds: groups
    of every size. One row is a group decoded by a method: texts, round, method, and sums or means
    of the counted cycles. The same call continues what was stopped.
    """
    # 1. what is measured
    check_countable(pair, cpu_time)
    policies = {}
    fingerprints: dict[int, dict] = {}
    for size in sizes:
        policies[size] = named_methods(methods(size))
        fingerprints[size] = {}
        for label, policy in policies[size].items():
            fingerprints[size][label] = fingerprint(policy)
    identity = {
        "methods": fingerprints,
        "items": describe_items(items),
        "pair": describe_pair(pair),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "clock": "processor" if cpu_time else "wall",
    }
    run = runs.start("batches_live", identity, scale=scale)
    columns = {name: identity["pair"][name] for name in ("pair", "dtype", "device")}
    columns |= {"clock": identity["clock"], "threads": identity["threads"]}
    columns["machine"] = runs.content_key(**machine.hardware())[:8]
    # 2. a shard for each group of texts, in a random order
    jobs = list(enumerate(itertools.product(sizes, range(rounds))))
    random.Random(seed).shuffle(jobs)
    shards = run.shards("batches")
    done = set(shards.done())
    with clock.by_processor_time(cpu_time):
        for shard, (size, number) in tqdm(jobs, desc="batches"):
            if shard in done:
                continue
            draw = random.Random(f"{seed}/{size}/{number}")
            rows = _group(pair, policies[size], items, size, draw, max_new_tokens)
            shards.write(shard, pd.DataFrame(rows).assign(round=number, **columns))
    shards.merge()
    return run.finish(groups=len(jobs))


def _group(
    pair: Pair, policies: dict, items: list, size: int, draw: random.Random, max_new_tokens: int
) -> list[dict]:
    """Rows of one group of texts, decoded by all methods in a random order."""
    drawn: list = []
    while len(drawn) < size:
        drawn += draw.sample(items, len(items))
    prompts = openings(pair, drawn[:size])
    order = draw.sample(list(policies), len(policies))
    settings = dict(seed=draw.getrandbits(31), stop_tokens=())
    rows = {}
    for place, method in enumerate(order):
        counted = full_batch(pair, prompts, policies[method], max_new_tokens, **settings)
        rows[method] = {"texts": size, "method": method, "order": place, **counted}
    return [rows[method] for method in policies]


def full_batch(
    pair: Pair, prompts: list[list[int]], policy: Policy | None, max_new_tokens: int, **settings
) -> dict:
    """Sums and means of the cycles that all `prompts` (token ids) take together.

    policy: None decodes plainly; each text has a copy of its own. The first text ends the batch.
    """
    settings["max_new_tokens"] = max_new_tokens
    plain = policy is None
    generations: list[Generation] = []

    def turn(ids: list[int]) -> Generator:
        if plain:
            return plain_steps(pair, ids, **settings)
        # a policy holds state, so every text has a copy of its own
        engine, copied = opened(pair, ids, copy.deepcopy(policy), **settings)
        generations.append(engine.generation)
        return steps(engine, copied)

    # 1. all texts together, until the first ends
    marks: list[list[tuple[float, int]]] = [[] for _ in prompts]
    with pair.inference(plain):
        turns = (_marked(turn(ids), mark, plain) for ids, mark in zip(prompts, marks, strict=True))
        ended, _ = next(drive(turns, len(prompts)))
    # 2. its last cycle, which others may not have ended, is cut at max_new_tokens
    last = len(marks[ended]) - 2
    if last <= UNCOUNTED:
        why = f"a text ended after {last + 1} cycles, too few to count"
        raise SpecdecError(f"{why}; raise max_new_tokens.")
    # 3. what was written in the counted cycles
    # [texts, cycles, (seconds, tokens)], as far as all texts have them
    of_cycles = np.array([mark[: last + 1] for mark in marks])
    seconds = of_cycles[:, :, 0].max(axis=0)
    tokens = of_cycles[:, :, 1].sum(axis=0)
    new_tok = int(tokens[UNCOUNTED + 1 :].sum())
    before = int(tokens[: UNCOUNTED + 1].sum())
    prompt_tok = float(np.mean(list(map(len, prompts))))
    nodes = []
    for out in generations:
        nodes += [row.verify_nodes for row in out.rows[UNCOUNTED:last]]
    return {
        "new_tok": new_tok,
        "total_ms": 1e3 * float(seconds[last] - seconds[UNCOUNTED]),
        "cycles": last - UNCOUNTED,
        "context_tok": prompt_tok + (before + new_tok / 2) / len(prompts),
        "verify_nodes": float(np.mean(nodes)) if nodes else 0.0,
    }


def _marked(turn: Generator, marks: list[tuple[float, int]], plain: bool) -> Generator:
    """The turn, with (seconds, new tokens) left in `marks` after the prompt and every cycle."""
    result = None
    prompt_is_read = False
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
            if prompt_is_read:
                marks.append((clock.now(), 1))
            prompt_is_read = True
        result = yield item


def batch_summary(run: runs.Run) -> pd.DataFrame:
    """One row per (texts, method): tok_per_s of all texts together, speedup over plain decoding at
    the same size, with its interval over groups; tau and verify_nodes of one text; ms_per_cycle and
    context_tok.
    """
    rows = run.read_table("batches")
    names = list(dict.fromkeys(rows["method"]))
    per_text = rows.assign(suite=rows["texts"], prompt=rows["round"], cycle_tok=rows["new_tok"])
    per_text["cycles"] *= rows["texts"]
    parts = []
    for texts, part in per_text.groupby("suite"):
        methods = run.record()["config"]["methods"][str(texts)]
        plain = next(name for name, method in methods.items() if method is None)
        table = stats.compare(part, plain)
        groups = part.groupby("method")
        means = groups[["context_tok", "verify_nodes"]].mean()
        sums = groups[["total_ms", "cycles"]].sum()
        means["ms_per_cycle"] = sums["total_ms"] / sums["cycles"] * texts
        parts.append(stats.in_order(table.join(means, on="method"), names))
    table = pd.concat(parts, ignore_index=True)
    table = table.rename(columns={"suite": "texts", "prompts": "groups"})
    columns = ["texts", "method", "groups", "tok_per_s", *stats.spread_names("speedup"), "tau"]
    return table[[*columns, "verify_nodes", "ms_per_cycle", "context_tok"]]
