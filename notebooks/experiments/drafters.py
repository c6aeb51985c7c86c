"""Several ways to train a drafter on equal terms: the same start, text and steps; then what each is
worth.

Every training is a run of its own below one folder, every decoding one of the bench: what is
finished is not done again.
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
from specdec.core.decode import decode
from specdec.data.suites import conversation, gather
from specdec.evaluation import bench, stats
from specdec.evaluation.methods import AUTOREGRESSIVE, DraftedBy
from specdec.models.eagle_network import vocabulary_ids
from specdec.models.load import load_drafter, load_pair
from specdec.parallel import parallel
from specdec.training.drafter.chats import (
    conversation_document,
    cut,
    lay_out,
    regenerate,
    split,
    token_batch,
)
from specdec.training.drafter.eagle3 import (
    OnlineConfig,
    OnlineDrafter,
    draft_accuracy,
    train_drafter,
)
from specdec.training.drafter.networks import load_network, load_target
from specdec.training.drafter.objective import FrozenTarget, Objective
from specdec.training.drafter.ppow import roll_out, window_starts
from specdec.training.drafter.presets import Budget, Settings
from specdec.training.loop import compute_dtype

# the drafter from which all continue
START = "start"
# (name, seed) -> folder of the drafter
Trained = dict[tuple[str, int], Path]


def train_all(
    target: str,
    conversations: list,
    objectives: dict[str, Objective],
    settings: Settings | dict[str, Settings],
    *,
    start_from: Path,
    out_dir: Path,
    seeds: Sequence[int] = (0,),
    on: str | None = None,
    jobs: int | None = None,
) -> Trained:
    """Train every objective with every seed from the drafter in `start_from`, called START.

    settings: of all, or those of each name. Objectives that draw get the seed, too; text and order
    follow from it. on, jobs: where else than in this process, and how many at once
    (`specdec.parallel`).
    """
    trained: Trained = {(START, 0): Path(start_from)}
    tasks = []
    for name, seed in itertools.product(objectives, seeds):
        objective = objectives[name]
        if hasattr(objective, "seed"):
            objective = replace(objective, seed=seed)
        folder = Path(out_dir) / f"{runs.plain_name(name)}-{seed}"
        options = dict(
            out_dir=folder,
            budget=Budget(seed=seed),
            objective=objective,
            settings=settings if isinstance(settings, Settings) else settings[name],
            start_from=start_from if objective.network == "eagle3" else None,
        )
        # one that was killed continues from its checkpoint
        tasks.append(functools.partial(train_drafter, target, conversations, **options))
        trained[name, seed] = folder / "drafter"
    parallel(tasks, on, jobs, desc="drafters")
    return trained


def train_at_best_rate(
    target: str,
    conversations: list,
    objectives: dict[str, Objective],
    settings: Settings,
    rates: Sequence[float],
    *,
    seeds: Sequence[int] = (0,),
    **more,
) -> tuple[Trained, pd.DataFrame]:
    """Every objective at every learning rate with the first seed, at its best rate with the others.

    Best is what had most tokens per cycle on held-out text. Returns (trained at the best rate,
    tried): a row per objective and rate with held_out_tau_chain and chosen. more: of `train_all`.
    """
    # 1. every rate
    at_rates = {}
    by_rate = {}
    rows = []
    for name, rate in itertools.product(objectives, rates):
        place = f"{name}-at-{rate:g}"
        at_rates[place] = objectives[name]
        by_rate[place] = replace(settings, learning_rate=rate)
        rows.append({"objective": name, "learning_rate": rate})
    first = train_all(target, conversations, at_rates, by_rate, seeds=seeds[:1], **more)
    tried = pd.DataFrame(rows, index=list(at_rates))
    for place in at_rates:
        plan = first[place, seeds[0]].parent / "drafter_training" / "plan.json"
        results = runs.read_json(plan)["results"]
        tried.loc[place, "held_out_tau_chain"] = results["held_out_tau_chain"]
    # 2. the best of each objective, with every seed
    best = tried.groupby("objective", sort=False)["held_out_tau_chain"].idxmax()
    tried["chosen"] = tried.index.isin(best)
    again = {place: at_rates[place] for place in best}
    trained = first | train_all(target, conversations, again, by_rate, seeds=seeds[1:], **more)
    kept: Trained = {(START, 0): first[START, 0]}
    for name, seed in itertools.product(objectives, seeds):
        kept[name, seed] = trained[best[name], seed]
    return kept, tried.reset_index(drop=True)


def training_curves(trained: Trained) -> pd.DataFrame:
    """A row per step and training: drafter, seed, step, what the objective measured.

    held_out_tau_chain is there where it was due.
    """
    tables = []
    for (name, seed), folder in trained.items():
        path = folder.parent / "drafter_training" / "loss.parquet"
        if name != START:
            tables.append(runs.read_table(path).assign(drafter=name, seed=seed))
    table = pd.concat(tables, ignore_index=True)
    first = ["drafter", "seed", "step"]
    return table[[*first, *table.columns.drop(first)]]


def decode_all(
    target: str, trained: Trained, suites, methods: dict, dtype: str = "float32", **settings
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(prompts, cycles): the bench's rows of every drafter, with temperature, seed and drafter.

    methods: of each drafter. settings: fields of EvaluateConfig by name. All drafters and plain
    decoding take turns in one run, prompt by prompt; rows of plain decoding are of START.
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
    target: str,
    trained: Trained,
    prompts: Sequence,
    *,
    folder: Path,
    max_new_tokens: int,
    drafts: int = 6,
) -> pd.DataFrame:
    """Tokens per cycle of greedy chains, without decoding: rows as `compare_tau` reads them.

    The target writes its greedy answer to each of `prompts` (the first turn) once, kept in
    `folder`; then a forward of the drafter along it says what chains of `drafts` tokens would have
    had accepted (`eagle3.draft_accuracy`). Exact but for near-ties of the target, which writes in
    its training's dtype.
    """
    # 1. the target's answers
    model, tokenizer = load_target(target, Budget().place())
    empty = {"role": "assistant", "content": ""}
    asked = [[{"role": "user", "content": item.turns[0]}, empty] for item in prompts]
    how = {"folder": folder, "greedy_frac": 1.0, "max_new_tokens": max_new_tokens}
    answered = {}
    for chat in regenerate(model, tokenizer, asked, **how):
        answered[chat[0]["content"]] = chat
    # 2. the drafters along them
    dtype = compute_dtype(torch.device(model.device))
    networks = {key: load_network(place, model).to(dtype) for key, place in trained.items()}
    taps_of = {network.config.taps for network in networks.values()}
    targets = {taps: FrozenTarget(model, taps, dtype) for taps in taps_of}
    rows = []
    for item in tqdm(prompts, desc="chains"):
        document = conversation_document(tokenizer, answered[item.turns[0]])
        if int(document.answer.sum()) < 2:
            continue
        text = token_batch(lay_out([document], [[0]], len(document.ids)), model.device)
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

    prompts: rows of `decode_all` or `chain_rows`. tau: tokens per cycle, mean over seeds.
    over_baseline with low and high: its ratio to the baseline's, paired by prompt; worst_seed and
    best_seed: where several were trained, as they say what another seed would have done. speedup:
    over plain decoding, where it was timed.
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
    both = speeds[~is_plain].merge(plain, on=["temperature", "suite"], suffixes=("", "_plain"))
    return both.assign(speedup=both["speedup"] / both.pop("speedup_plain"))


def speed_by_accepted(
    prompts: pd.DataFrame, cycles: pd.DataFrame, chain: str, window: int, gamma: float
) -> pd.DataFrame:
    """What each accepted length is worth here, from cycles of a chain of `window` tokens and plain
    decoding beside it.

    accepted_tok 0 .. window; cycles seen; cycle_ms; measured: speed over plain decoding, (k + 1)
    tokens in a cycle; where no cycle was seen, of the mean cycle's time. cost_aware: k / (k gamma +
    1).
    """
    plain = prompts[prompts["method"] == AUTOREGRESSIVE]
    plain_ms = plain["decode_ms"].sum() / (plain["new_tok"] - 1).clip(lower=1).sum()
    of_chain = cycles[cycles["method"] == chain]
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
    target: str,
    trained: Trained,
    conversations: list,
    settings: Settings,
    window: int,
    most: int = 400,
) -> pd.DataFrame:
    """How greedy windows fare on held-out text: drafter, seed, text, slot, accepted_tok, nabla,
    hard.

    nabla: mean over the window of exp(d) - d - 1, d = log target - log drafter of a drafted token.
    hard: the START drafter's window there is not accepted whole. At most `most` windows, evenly
    spread.
    """
    pair = load_pair(target=target)
    held_out = split(conversations, settings)[1]
    rows = []
    for (name, seed), folder in trained.items():
        network = load_network(folder, pair.target.model)
        frozen = FrozenTarget(pair.target.model, network.config.taps)
        network = network.to(frozen.dtype)
        for number, chat in enumerate(held_out):
            document = cut(conversation_document(pair.tokenizer, chat), settings.length)
            batch = token_batch(lay_out([document], [[0]], len(document.ids)), pair.target.device)
            if len(document.ids) < window + 2 or not bool(window_starts(batch, window).any()):
                continue
            slots = window_starts(batch, window)[0].nonzero().T
            slots = slots[:, :: max(1, round(slots.shape[1] * len(held_out) / most))]
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
    nabla = (log_ratio.exp() - log_ratio - 1).mean(-1)
    accepted = (of_target.argmax(-1) == drafted).long().cumprod(-1).sum(-1)
    return {"accepted_tok": accepted[0].numpy(), "nabla": nabla[0].numpy()}


def serve(
    target: str,
    drafter: Path,
    suites,
    policy,
    learning: OnlineConfig,
    dtype: str = "float32",
    *,
    limit: int,
    part: str,
    **settings,
) -> pd.DataFrame:
    """The same requests served in order by a drafter that stays as it is and by one that learns
    from them (`OnlineDrafter`).

    limit, part: of `gather`. settings: of `decode`. A row per request and way: request, suite,
    prompt, learning, new_tok, cycles, cycle_tok, tau.
    """
    rows = []
    for learns in (False, True):
        pair = load_pair(target=target, drafter=drafter, dtype=dtype)
        serving = functools.partial(decode, pair)
        if learns:
            serving = OnlineDrafter(pair, config=learning).decode
        for number, item in enumerate(gather(suites, limit=limit, part=part)):
            out = serving(pair.ids_of(conversation(pair, item, 0, [])), policy, **settings)
            row = {"request": number, "suite": item.suite, "prompt": item.id, "learning": learns}
            row |= {"new_tok": out.new_tok, "cycles": len(out.rows), "tau": out.tau}
            rows.append(row | {"cycle_tok": sum(cycle.new_tok for cycle in out.rows)})
    return pd.DataFrame(rows)
