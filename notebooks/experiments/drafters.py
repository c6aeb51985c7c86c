"""Several ways to train a drafter on equal terms, and what each is worth.

What is finished is not done again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import runs
from specdec.evaluation import bench, stats
from specdec.evaluation.methods import AUTOREGRESSIVE, DraftedBy
from specdec.models.eagle_network import vocabulary_ids
from specdec.models.load import load_drafter, load_pair
from specdec.parallel import parallel
from specdec.training.drafter import chats
from specdec.training.drafter.eagle3 import draft_accuracy, load_network, load_target, train_drafter
from specdec.training.drafter.objective import FrozenTarget, Objective
from specdec.training.drafter.ppow import roll_out, window_starts
from specdec.training.drafter.presets import Budget, Settings
from specdec.training.loop import compute_dtype

# the drafter from which all continue
START = "start"
# of `window_facts`, about
WINDOWS = 400
# (name, seed) -> folder of the drafter
Trained = dict[tuple[str, int], Path]


def train_all(
    target: str,
    conversations: list,
    objectives: dict[str, Objective],
    settings: Settings | dict[str, Settings],
    start_from: Path,
    out_dir: Path,
    seeds: Sequence[int],
    jobs: int = 1,
) -> Trained:
    """Train every objective with every seed from the drafter in `start_from`, called START.

    settings: of all, or by name. jobs: trainings at once; 1 trains in this process.
    """
    trained: Trained = {(START, 0): start_from}
    tasks = []
    for name, seed in itertools.product(objectives, seeds):
        objective = objectives[name]
        if hasattr(objective, "seed"):
            objective = replace(objective, seed=seed)
        folder = out_dir / f"{runs.plain_name(name)}-{seed}"
        options = dict(out_dir=folder, budget=Budget(seed=seed), objective=objective)
        options["settings"] = settings[name] if isinstance(settings, dict) else settings
        if objective.network == "eagle3":
            options["start_from"] = start_from
        # one that was killed continues from its checkpoint
        tasks.append(functools.partial(train_drafter, target, conversations, **options))
        trained[name, seed] = folder / "drafter"
    if jobs > 1:
        parallel(tasks, "local", jobs, desc="drafters")
    else:
        parallel(tasks, desc="drafters")
    return trained


def results_of(folder: Path) -> dict:
    """What a training says of its drafter in `folder`, such as held_out_tau_chain."""
    return runs.read_json(folder.parent / "drafter_training" / "plan.json")["results"]


def training_curves(trained: Trained) -> pd.DataFrame:
    """A row per step and training: drafter, seed, step, what the objective measured."""
    tables = []
    for (name, seed), folder in trained.items():
        path = folder.parent / "drafter_training" / "loss.parquet"
        if name != START:
            tables.append(runs.read_table(path).assign(drafter=name, seed=seed))
    table = pd.concat(tables, ignore_index=True)
    first = ["drafter", "seed", "step"]
    return table[[*first, *table.columns.drop(first)]]


def decode_all(
    target: str, trained: Trained, suites, methods: dict, dtype: str, **settings
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(prompts, cycles): the bench's rows of every drafter, with temperature, seed and drafter.

    methods: of each drafter. settings: fields of EvaluateConfig. Plain rows are of START.
    """
    pair = load_pair(target=target, drafter=trained[START, 0], dtype=dtype)
    every = {}
    labels = {}
    for way, method in methods.items():
        if method == AUTOREGRESSIVE:
            every[way] = method
            labels[way] = (START, 0, way)
    for (name, seed), folder in trained.items():
        drafter = load_drafter(folder, pair.target)
        for way, method in methods.items():
            if method != AUTOREGRESSIVE:
                label = f"{name} {seed}, {way}"
                every[label] = DraftedBy(drafter, method, f"{name} {seed}")
                labels[label] = (name, seed, way)
    # the bench tells methods apart by name alone
    run = bench.evaluate(every, suites, pair, **settings)
    tables = []
    for table in ("prompts", "cycles"):
        rows = run.read_table(table)
        names, seeds, ways = zip(*rows["method"].map(labels), strict=True)
        rows = rows.assign(method=ways)
        rows.insert(0, "drafter", names)
        rows.insert(0, "seed", seeds)
        rows.insert(0, "temperature", settings.get("temperature", 0.0))
        tables.append(rows)
    return tables[0], tables[1]


def chain_rows(
    target: str, trained: Trained, prompts: Sequence, folder: Path, max_new_tokens: int, drafts: int
) -> pd.DataFrame:
    """Tokens per cycle of greedy chains, without decoding: rows as `compare_tau` reads them.

    The target writes its greedy answer to each of `prompts` (the first turn) once, kept in
    `folder`; a forward of the drafter along it says what chains of `drafts` tokens would have had
    accepted. Exact but for near-ties of the target, which writes in its training's dtype.
    """
    # 1. the target's answers
    model, tokenizer = load_target(target, Budget().place())
    empty = {"role": "assistant", "content": ""}
    questions = [[{"role": "user", "content": item.turns[0]}, empty] for item in prompts]
    how = {"folder": folder, "greedy_frac": 1.0, "max_new_tokens": max_new_tokens}
    answered = {}
    for chat in chats.regenerate(model, tokenizer, questions, **how):
        answered[chat[0]["content"]] = chat
    # 2. the drafters along them
    dtype = compute_dtype(torch.device(model.device))
    networks = {key: load_network(place, model).to(dtype) for key, place in trained.items()}
    taps_of = {network.config.taps for network in networks.values()}
    targets = {taps: FrozenTarget(model, taps, dtype) for taps in taps_of}
    rows = []
    for item in tqdm(prompts, desc="chains"):
        document = chats.conversation_document(tokenizer, answered[item.turns[0]])
        if int(document.answer.sum()) < 2:
            continue
        text = chats.token_batch(chats.lay_out([document], [[0]], len(document.ids)), model.device)
        # one forward of the target for all drafters
        read = {taps: replace(text, output=frozen(text)) for taps, frozen in targets.items()}
        for (name, seed), network in networks.items():
            taps = network.config.taps
            counts = draft_accuracy(network, targets[taps], [read[taps]], drafts=drafts)
            row = {"temperature": 0.0, "seed": seed, "drafter": name, "suite": item.suite}
            row |= {"prompt": item.id, "method": "chain", "cycles": counts["cycles"]}
            rows.append(row | {"cycle_tok": counts["emitted_tok"]})
    return pd.DataFrame(rows)


def compare_tau(prompts: pd.DataFrame, baseline: str = START) -> pd.DataFrame:
    """One row per temperature, method, suite ("all" pools them) and drafter.

    tau: tokens per cycle, mean over seeds. over_baseline: its ratio, paired by prompt, and of the
    worst_seed and best_seed. speedup: over plain decoding, where it was timed.
    """
    every = pd.concat([prompts, prompts.assign(suite="all")])
    drafted = every[every["method"] != AUTOREGRESSIVE]
    keys = ["temperature", "method"]
    counts = ["cycle_tok", "cycles"]
    tables = []
    for (temperature, method), part in drafted.groupby(keys, sort=False):
        part = part.assign(method=part["drafter"])
        # 1. the ratio with its interval, suite by suite and pooled
        suites = part[part["suite"] != "all"]
        over = {"over_baseline": baseline}
        table = stats.summarise(suites, over, rate=("cycle_tok", "cycles"), pool=True)
        # 2. the same of the worst and of the best seed
        sums = part.groupby(["suite", "method", "seed"])[counts].sum()
        taus = (sums["cycle_tok"] / sums["cycles"]).unstack("seed")
        alone = taus.div(taus.xs(baseline, level="method").mean(axis=1), axis=0, level="suite")
        seeds = pd.DataFrame({"worst_seed": alone.min(axis=1), "best_seed": alone.max(axis=1)})
        table = table.merge(seeds.reset_index(), on=["suite", "method"])
        table = table.rename(columns={"method": "drafter", "rate": "tau"})
        tables.append(table.assign(temperature=temperature, method=method))
    ends = {"over_baseline_low": "low", "over_baseline_high": "high"}
    table = pd.concat(tables).rename(columns=ends)
    # 3. in the order of the rows
    keys = ["temperature", "method", "suite"]
    columns = [*keys, "drafter", "prompts", "seeds", "tau", "over_baseline", "low", "high"]
    table = drafted[keys].drop_duplicates().merge(table, on=keys)
    table = table[[*columns, "worst_seed", "best_seed"]]
    if "total_ms" in prompts:
        table = table.merge(_speedups(every), how="left")
    return table


def _speedups(prompts: pd.DataFrame) -> pd.DataFrame:
    """speedup per temperature, suite, drafter and method, over plain decoding."""
    keys = ["temperature", "suite", "drafter", "method"]
    sums = prompts.groupby(keys)[["new_tok", "total_ms"]].sum()
    speeds = (sums["new_tok"] / sums["total_ms"]).rename("speedup").reset_index()
    is_plain = speeds["method"] == AUTOREGRESSIVE
    plain = speeds[is_plain].drop(columns=["drafter", "method"])
    drafted = speeds[~is_plain].merge(plain, on=["temperature", "suite"], suffixes=("", "_plain"))
    return drafted.assign(speedup=drafted["speedup"] / drafted.pop("speedup_plain"))


def speed_by_accepted(
    prompts: pd.DataFrame, cycles: pd.DataFrame, chain: str, window: int, gamma: float
) -> pd.DataFrame:
    """What each accepted length is worth: accepted_tok, cycles, cycle_ms, measured, cost_aware.

    measured: speed of chains of `window` tokens over plain decoding. cost_aware: k / (k gamma + 1).
    """
    plain = prompts[prompts["method"] == AUTOREGRESSIVE]
    plain_ms = plain["decode_ms"].sum() / (plain["new_tok"] - 1).clip(lower=1).sum()
    of_chain = cycles[cycles["method"] == chain]
    # lengths that never occurred have no time of their own
    times = of_chain.groupby("accepted_tok")["total_ms"].agg(["size", "mean"])
    table = times.reindex(range(window + 1)).rename(columns={"size": "cycles", "mean": "cycle_ms"})
    table["cycles"] = table["cycles"].fillna(0).astype(int)
    cycle_ms = table["cycle_ms"].fillna(of_chain["total_ms"].mean())
    length = np.arange(window + 1)
    table["measured"] = (length + 1) * plain_ms / cycle_ms
    table["cost_aware"] = length / (length * gamma + 1)
    return table.reset_index(names="accepted_tok")


@torch.no_grad()
def window_facts(
    target: str, trained: Trained, conversations: list, settings: Settings, window: int
) -> pd.DataFrame:
    """Greedy windows on held-out text: drafter, seed, text, slot, accepted_tok, nabla, hard.

    nabla: mean of exp(d) - d - 1, d = log target - log drafter. hard: START's is not accepted.
    """
    pair = load_pair(target=target)
    held_out = chats.split(conversations, settings)[1]
    rows = []
    for (name, seed), folder in trained.items():
        network = load_network(folder, pair.target.model)
        frozen = FrozenTarget(pair.target.model, network.config.taps)
        network = network.to(frozen.dtype)
        for number, chat in enumerate(held_out):
            document = chats.conversation_document(pair.tokenizer, chat)
            document = chats.cut(document, settings.length)
            row = chats.lay_out([document], [[0]], len(document.ids))
            batch = chats.token_batch(row, pair.target.device)
            # an answer without room for a window says nothing
            if len(document.ids) < window + 2 or not bool(window_starts(batch, window).any()):
                continue
            slots = window_starts(batch, window)[0].nonzero().T
            # evenly fewer, so that all texts together have about WINDOWS
            slots = slots[:, :: max(1, round(slots.shape[1] * len(held_out) / WINDOWS))]
            facts = _greedy_facts(frozen, network, batch, slots, window)
            where = {"drafter": name, "seed": seed, "text": number, "slot": slots[0]}
            rows.append(pd.DataFrame(where | facts))
    table = pd.concat(rows, ignore_index=True)
    start = table[table["drafter"] == START].set_index(["text", "slot"])["accepted_tok"]
    places = pd.MultiIndex.from_frame(table[["text", "slot"]])
    return table.assign(hard=start.reindex(places).to_numpy() < window)


def _greedy_facts(frozen: FrozenTarget, network, batch, slots, window: int) -> dict:
    """accepted_tok and nabla of the greedy window at each slot."""
    batch = replace(batch, output=frozen(batch))
    options = (frozen.embedding, batch, slots, window, lambda logits: logits.argmax(-1))
    drafted, logits = roll_out(network, *options)
    of_target, _ = frozen.continued(batch, slots, drafted)
    log_p = of_target.log_softmax(-1)[..., vocabulary_ids(network)]
    log_ratio = (log_p - logits.log_softmax(-1)).gather(-1, logits.argmax(-1, keepdim=True))
    log_ratio = log_ratio.squeeze(-1)
    # the estimate of the divergence that is never negative
    nabla = (log_ratio.exp() - log_ratio - 1).mean(-1)
    accepted = (of_target.argmax(-1) == drafted).long().cumprod(-1).sum(-1)
    return {"accepted_tok": accepted[0].numpy(), "nabla": nabla[0].numpy()}
