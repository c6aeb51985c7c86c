"""Several ways to train a drafter on equal terms: the same start, text and steps; then what each is
worth.

Every training is a run of its own below one folder, every decoding one of the bench: what is
finished is not done again. Knows nothing about what an objective does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.data.suites import conversation, gather
from specdec.evaluation import bench, stats
from specdec.evaluation.methods import AUTOREGRESSIVE, DraftedBy
from specdec.models.eagle_network import vocabulary_ids
from specdec.models.load import load_drafter, load_pair
from specdec.parallel import parallel
from specdec.training.drafter.accuracy import draft_accuracy
from specdec.training.drafter.chats import (
    ChatList,
    Regeneration,
    conversation_document,
    cut,
    lay_out,
    regenerate,
)
from specdec.training.drafter.eagle3 import OnlineConfig, OnlineDrafter, prepared, train_drafter
from specdec.training.drafter.networks import load_network, load_target
from specdec.training.drafter.objective import FrozenTarget, Objective
from specdec.training.drafter.ppow import at_columns, roll_out, window_starts
from specdec.training.drafter.presets import Budget, Settings
from specdec.training.drafter.texts import split, token_batch, training_text
from specdec.training.loop import compute_dtype

START = "start"  # the drafter from which all continue
Trained = dict[tuple[str, int], Path]  # (name, seed) -> folder of the drafter


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
    """Train every objective with every seed from the drafter in `start_from`, which is in the
    answer as START.

    settings: of all, or those of each name. Objectives that draw get the seed, too; text and order
    follow from it.
    on, jobs: where else than in this process, and how many at once (`specdec.parallel`).
    """
    trained: Trained = {(START, 0): Path(start_from)}
    tasks = []
    for name, seed in itertools.product(objectives, seeds):
        objective, own = (
            objectives[name],
            settings if isinstance(settings, Settings) else settings[name],
        )
        objective = replace(objective, seed=seed) if hasattr(objective, "seed") else objective
        folder = Path(out_dir) / f"{runs.plain_name(name)}-{seed}"
        options = dict(out_dir=folder, budget=Budget(seed=seed), objective=objective, settings=own)
        options["start_from"] = start_from if objective.network == "eagle3" else None
        tasks.append(functools.partial(_train, target, conversations, options))
        trained[name, seed] = folder / "drafter"
    parallel(tasks, on, jobs, desc="drafters")
    return trained


def _train(target: str, conversations: list, options: dict) -> None:
    """A shard of `train_all`; one that was killed continues from its checkpoint."""
    train_drafter(target, conversations, **options)


def train_at_best_rate(
    target: str,
    conversations: list,
    objectives: dict[str, Objective],
    settings: Settings,
    rates: Sequence[float],
    **more,
) -> tuple[Trained, pd.DataFrame]:
    """Every objective at every learning rate with the first seed, and at its best rate with the
    others: (trained, tried).

    Best is what had most tokens per cycle on held-out text. trained: at the best rate. tried:
    objective, learning_rate, held_out_tau_chain, chosen. more: what `train_all` takes by name.
    """
    seeds, rows = list(more.pop("seeds", (0,))), []
    own = {
        f"{name}-at-{rate:g}": replace(settings, learning_rate=rate)
        for name in objectives
        for rate in rates
    }
    by_rate = dict(zip(own, itertools.product(objectives, rates), strict=True))
    every = {place: objectives[name] for place, (name, _) in by_rate.items()}
    first = train_all(target, conversations, every, own, seeds=seeds[:1], **more)
    for place, (name, rate) in by_rate.items():
        results = runs.read_json(first[place, seeds[0]].parent / "drafter_training" / "plan.json")[
            "results"
        ]
        rows.append(
            {
                "objective": name,
                "learning_rate": rate,
                "held_out_tau_chain": results["held_out_tau_chain"],
            }
        )
    tried = pd.DataFrame(rows, index=list(by_rate))
    chosen = dict.fromkeys(objectives) | {
        name: part["held_out_tau_chain"].idxmax() for name, part in tried.groupby("objective")
    }
    best = {place: every[place] for place in chosen.values()}
    found = first | train_all(target, conversations, best, own, seeds=seeds[1:], **more)
    kept = {(name, seed): found[place, seed] for name, place in chosen.items() for seed in seeds}
    tried["chosen"] = tried.index.isin(list(best))
    return {(START, 0): first[START, 0]} | kept, tried.reset_index(drop=True)


def training_curves(trained: Trained) -> pd.DataFrame:
    """A row per step and training: drafter, seed, step, what the objective measured,
    held_out_tau_chain where it was due.
    """
    tables = []
    for (name, seed), folder in trained.items():
        path = folder.parent / "drafter_training" / "loss.parquet"
        if name != START:
            tables.append(runs.read_table(path).assign(drafter=name, seed=seed))
    table = pd.concat(tables, ignore_index=True)
    return table[["drafter", "seed", "step", *table.columns.drop(["drafter", "seed", "step"])]]


def gradient_agreement(
    target: str,
    conversations: list,
    objectives: dict[str, Objective],
    settings: Settings,
    start_from: Path,
    batches: int,
) -> pd.DataFrame:
    """How much of an objective's gradient is the same on other text, at the drafter from which all
    continue; no weight changes.

    A row per objective: objective, batches, cosine, its mean between two batches of settings.batch
    rows, and `cosine_to_X`, that of the mean gradient to the mean one of objective X. Where batches
    were of pure noise around a common direction, a cosine of c says that c of the squared length is
    common, and that (1 - c) / c batches give as much signal as noise.
    """
    budget = Budget()
    model, tokenizer = load_target(target, budget.place())
    means, rows = {}, []
    for name, objective in tqdm(objectives.items(), desc="gradients"):
        text = training_text(model, tokenizer, ChatList(conversations), settings, Path(), budget)
        run, found = prepared(model, text, objective, settings, budget, start_from), []
        run.refresh()
        for step in range(batches):
            run.gradients(run.objective.collect(run.working, run.target, text.batch(step)))
            parts = [
                torch.zeros_like(w) if w.grad is None else w.grad for w in run.network.parameters()
            ]
            found.append(torch.cat([part.flatten() for part in parts]))
        agree, means[name] = common_direction(found)
        others = {f"cosine_to_{other}": float(mean @ means[name]) for other, mean in means.items()}
        rows.append({"objective": name, "batches": batches, "cosine": agree} | others)
    return pd.DataFrame(rows)


def common_direction(gradients: Sequence[torch.Tensor]) -> tuple[float, torch.Tensor]:
    """(mean cosine between two of at least two gradients [N], the direction [N] of the mean of
    their directions).

    In float64: sums of millions of float32 squares are off by a thousandth, as much as some of
    these cosines.
    """
    directions = F.normalize(torch.stack(list(gradients)).double(), dim=1)
    pairs = math.comb(len(directions), 2)
    return float((directions @ directions.T).triu(1).sum()) / pairs, F.normalize(
        directions.mean(0), dim=0
    )


def decode_all(
    target: str, trained: Trained, suites, methods: dict, dtype: str = "float32", **settings
):
    """(prompts, cycles): the bench's rows of every drafter, with the columns temperature, seed and
    drafter in front.

    methods: of each drafter. settings: fields of EvaluateConfig by name. All drafters and plain
    decoding take turns in one run, prompt by prompt; rows of plain decoding are of START.
    """
    pair = load_pair(target=target, drafter=trained[START, 0], dtype=dtype)
    plain = {name: method for name, method in methods.items() if method == AUTOREGRESSIVE}
    drafted, of, tables = {}, {name: (START, 0, name) for name in plain}, []
    for (name, seed), folder in trained.items():
        drafter = load_drafter(folder, pair.target)
        for way in (way for way in methods if way not in plain):
            label = f"{name} {seed}, {way}"
            drafted[label], of[label] = (
                DraftedBy(drafter, methods[way], f"{name} {seed}"),
                (name, seed, way),
            )
    run = bench.evaluate(plain | drafted, suites, pair, **settings)
    for what in ("prompts", "cycles"):
        rows = run.read_table(what)
        names, seeds, ways = zip(*rows["method"].map(of), strict=True)
        rows = rows.assign(method=ways)
        for column, value in (
            ("drafter", names),
            ("seed", seeds),
            ("temperature", settings.get("temperature", 0.0)),
        ):
            rows.insert(0, column, value)
        tables.append(rows)
    return tuple(tables)


def chain_rows(
    target: str,
    trained: Trained,
    prompts: Sequence,
    *,
    folder: Path,
    max_new_tokens: int,
    drafts: int = 6,
):
    """Tokens per cycle of greedy chains, without decoding: rows as `compare_tau` reads them, one
    per prompt and drafter.

    The target writes its greedy answer to each of `prompts` (the first turn) once, kept in
    `folder`; then a forward of the drafter along it says what chains of `drafts` tokens would have
    had accepted (`accuracy.draft_accuracy`). Exact but for near-ties of the target, which writes in
    its training's dtype.
    """
    model, tokenizer = load_target(target, Budget().place())
    asked = [
        [{"role": "user", "content": item.turns[0]}, {"role": "assistant", "content": ""}]
        for item in prompts
    ]
    how = Regeneration(greedy_frac=1.0, max_new_tokens=max_new_tokens)
    answered = {
        chat[0]["content"]: chat for chat in regenerate(model, tokenizer, asked, how, folder=folder)
    }
    dtype = compute_dtype(torch.device(model.device))
    networks = {key: load_network(place, model).to(dtype) for key, place in trained.items()}
    targets = {
        taps: FrozenTarget(model, taps, dtype)
        for taps in {one.config.taps for one in networks.values()}
    }
    rows = []
    for item in tqdm(prompts, desc="chains"):
        document = conversation_document(tokenizer, answered[item.turns[0]])
        if int(document.answer.sum()) < 2:
            continue
        text = token_batch(lay_out([document], [[0]], len(document.ids)), model.device)
        read = {
            taps: replace(text, output=one(text)) for taps, one in targets.items()
        }  # once for all drafters
        for (name, seed), network in networks.items():
            taps = network.config.taps
            found = draft_accuracy(network, targets[taps], [read[taps]], drafts=drafts)
            row = {
                "temperature": 0.0,
                "seed": seed,
                "drafter": name,
                "suite": item.suite,
                "prompt": item.id,
            }
            rows.append(
                row
                | {"method": "chain", "cycles": found["cycles"], "cycle_tok": found["emitted_tok"]}
            )
    return pd.DataFrame(rows)


TAUS = [
    "temperature",
    "method",
    "suite",
    "drafter",
    "prompts",
    "seeds",
    "tau",
    "over_baseline",
    "low",
    "high",
]
TAUS += ["worst_seed", "best_seed"]


def compare_tau(prompts: pd.DataFrame, baseline: str = START) -> pd.DataFrame:
    """One row per temperature, method, suite ("all" pools them) and drafter, from rows of
    `decode_all` or `chain_rows`.

    tau: tokens per cycle, mean over seeds. over_baseline with low and high: its ratio to the
    baseline's, paired by prompt; what another seed would have done is in the interval only where
    several were trained: worst_seed and best_seed are theirs. speedup: over plain decoding, where
    it was timed.
    """
    tables, every = [], pd.concat([prompts, prompts.assign(suite="all")])
    for (temperature, method), part in _drafted(prompts).groupby(
        ["temperature", "method"], sort=False
    ):
        part = part.assign(method=part["drafter"])
        found = stats.summarise(
            part, {"over_baseline": baseline}, rate=("cycle_tok", "cycles"), pool=True
        )
        sums = pd.concat([part, part.assign(suite="all")]).groupby(["suite", "method", "seed"])[
            ["cycle_tok", "cycles"]
        ]
        taus = (sums.sum()["cycle_tok"] / sums.sum()["cycles"]).unstack("seed")
        alone = taus.div(taus.xs(baseline, level="method").mean(axis=1), axis=0, level="suite")
        seeds = pd.DataFrame(
            {"worst_seed": alone.min(axis=1), "best_seed": alone.max(axis=1)}
        ).reset_index()
        found = found.merge(seeds, on=["suite", "method"]).assign(temperature=temperature)
        tables.append(
            found.rename(columns={"method": "drafter", "rate": "tau"}).assign(method=method)
        )
    table = pd.concat(tables).rename(
        columns={"over_baseline_low": "low", "over_baseline_high": "high"}
    )
    table = _drafted(every)[TAUS[:3]].drop_duplicates().merge(table, on=TAUS[:3])[TAUS]
    return table.merge(_speedups(every), how="left") if "total_ms" in prompts else table


def _drafted(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["method"] != AUTOREGRESSIVE]


def _speedups(prompts: pd.DataFrame) -> pd.DataFrame:
    """speedup per temperature, suite, drafter and method, over plain decoding."""
    sums = prompts.groupby(["temperature", "suite", "drafter", "method"])[
        ["new_tok", "total_ms"]
    ].sum()
    speeds = (sums["new_tok"] / sums["total_ms"]).rename("speedup").reset_index()
    plain = speeds[speeds["method"] == AUTOREGRESSIVE].drop(columns=["drafter", "method"])
    both = _drafted(speeds).merge(plain, on=["temperature", "suite"], suffixes=("", "_plain"))
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
    times = (
        cycles[cycles["method"] == chain].groupby("accepted_tok")["total_ms"].agg(["size", "mean"])
    )
    table = times.reindex(range(window + 1)).rename(columns={"size": "cycles", "mean": "cycle_ms"})
    table["cycles"] = table["cycles"].fillna(0).astype(int)
    mean_ms = cycles.loc[cycles["method"] == chain, "total_ms"].mean()
    length = np.arange(window + 1)
    table["measured"] = (length + 1) * plain_ms / table["cycle_ms"].fillna(mean_ms)
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
):
    """How greedy windows fare on held-out text: drafter, seed, text, slot, accepted_tok, nabla,
    hard.

    nabla: mean over the window of exp(d) - d - 1, d = log target - log drafter of a drafted token.
    hard: the START drafter's window there is not accepted whole. At most `most` windows, evenly
    spread.
    """
    pair = load_pair(target=target)
    held_out, rows = split(conversations, settings)[1], []
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
            rows.append(
                pd.DataFrame(
                    {"drafter": name, "seed": seed, "text": number, "slot": slots[0], **facts}
                )
            )
    table = pd.concat(rows, ignore_index=True)
    start = table[table["drafter"] == START].set_index(["text", "slot"])["accepted_tok"]
    places = pd.MultiIndex.from_frame(table[["text", "slot"]])
    return table.assign(hard=start.reindex(places).to_numpy() < window)


def _greedy_facts(frozen: FrozenTarget, network, batch, slots, window: int) -> dict:
    batch, given = (
        replace(batch, output=frozen(batch)),
        torch.full((*slots.shape, window), -1, device=slots.device),
    )
    drafted, logits = roll_out(
        network, frozen.embedding, batch, slots, given, lambda logits: logits.argmax(-1)
    )
    says = frozen.continued(batch, slots, drafted)
    log_q, ids = logits.log_softmax(-1), vocabulary_ids(network)
    log_ratio = says.log_softmax(-1)[..., ids] - log_q
    chosen = at_columns(log_ratio, logits.argmax(-1))
    nabla = (chosen.exp() - chosen - 1).mean(-1)
    accepted = (says.argmax(-1) == drafted).long().cumprod(-1).sum(-1)
    return {"accepted_tok": accepted[0].numpy(), "nabla": nabla[0].numpy()}


def serve(
    target: str,
    drafter: Path,
    suites,
    policy,
    learning: OnlineConfig,
    dtype: str = "float32",
    **settings,
):
    """The same requests served in order by a drafter that stays as it is and by one that learns
    from them (`OnlineDrafter`).

    settings: limit, part, folder and seed of `gather`, and those of `decode`. A row per request and
    way: request, suite, prompt, learning, new_tok, cycles, cycle_tok, tau.
    """
    chosen = {
        name: settings.pop(name) for name in ("limit", "part", "folder", "seed") if name in settings
    }
    items, rows = gather(suites, **chosen), []
    for learns in (False, True):
        pair = load_pair(target=target, drafter=drafter, dtype=dtype)
        online = OnlineDrafter(pair, config=learning)
        for number, item in enumerate(items):
            prompt = pair.ids_of(conversation(pair, item, 0, []))
            way = online.decode if learns else functools.partial(decode, pair)
            out = way(prompt, policy, **settings)
            row = {"request": number, "suite": item.suite, "prompt": item.id, "learning": learns}
            cycle_tok = sum(cycle.new_tok for cycle in out.rows)
            row |= {
                "new_tok": out.new_tok,
                "cycles": len(out.rows),
                "cycle_tok": cycle_tok,
                "tau": out.tau,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def trees_by_candidates(depth: int, counts: Sequence[int]) -> dict[str, Static]:
    """Trees in which so many candidate sequences of `depth` + 1 tokens are verified together:
    "candidates 4" and so on.

    The paper leaves the word undefined. Here it is the tree's width: the best that many nodes of
    each level are drafted on.
    """
    return {
        f"candidates {count}": Static((depth + 1) * count + 1, depth, count) for count in counts
    }
