"""The papers' own ablation tables: variants of a system trained side by side and replayed, suite by
suite.

`ablation` changes one field of ours and tells the effect; here stand the variants that a table of a
paper compares. All are judged on the test part of one recording, answers charged.
"""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from specdec.core.tree_config import PAPER_TREES
from specdec.evaluation import metrics
from specdec.evaluation.compare import Baselines, Comparison, compare_replay
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed
from specdec.replays.replay import answer_ms, replay
from specdec.training.controllers import train_ltd, train_resps
from specdec.training.radar import train_radar, training_turns

REWARDS = {f"reward {name}": {"reward": name} for name in ("accepted", "time_cost", "throughput")}
OBSERVATIONS = {f"sees {name}": {"size.parts": parts} for name, parts in ltd.OBSERVATIONS.items()}
SHAPES = {"pi 1024": (1024,), "pi 1024, 256": (1024, 256), "pi 1024, 512, 256": (1024, 512, 256)}
SHAPES = {name: {"size.ppo.pi": shape, "size.ppo.vf": shape} for name, shape in SHAPES.items()}
SIZE_ALONE = {"ours": {}} | REWARDS | OBSERVATIONS | SHAPES


def size_alone(
    trace,
    costs,
    out_dir: Path,
    *,
    base: ltd.LtdConfig = ltd.OURS,
    seeds=(0,),
    variants=None,
    progress=True,
) -> Comparison:
    """The size policy of LTD, trained alone in every variant, on trees of `base`'s depth.

    variants: names of SIZE_ALONE; default all. What sees the target's features needs a recording
    that kept them. A finished training is not repeated.
    """
    features = 0 if trace.features is None else int(trace.features.shape[1])
    alone = changed(base, {"rounds": (ltd.Round("iter0", "size"),)})
    policies = {}
    for name in tqdm(
        list(SIZE_ALONE) if variants is None else list(variants),
        desc="variants",
        disable=not progress,
    ):
        changes = dict(SIZE_ALONE[name])
        if "hidden" in changes.get("size.parts", ()):
            if not features:
                continue
            changes["size.features_size"] = features
        config, folder = (
            changed(alone, changes),
            "".join(letter if letter.isalnum() else "-" for letter in name),
        )
        options = {"progress": progress}
        policies[name] = [
            train_ltd(
                trace,
                costs,
                config,
                seed=seed,
                out_dir=Path(out_dir) / f"{folder}-{seed}",
                **options,
            ).policy
            for seed in seeds
        ]
    return compare_replay(trace, costs, policies, random_seeds=(), progress=progress)


RADAR_GRID = {"alpha": (0.01, 0.02, 0.04, 0.06, 0.09), "gamma": (0.99, 0.98)}


def radar_grid(
    trace, costs, out_dir: Path, base: radar.RadarConfig, *, seeds=(0,), grid=None, progress=True
):
    """RADAR, trained at every point of a grid of its config's fields: one row per point and seed.

    Columns: the fields, seed, and of the test turns tau, draft_calls (per cycle), speedup and
    over_default. base: the rest of the config; its objective must be the one that alpha belongs to.
    """
    grid = grid or RADAR_GRID
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    policies = {}
    for point in tqdm(points, desc="grid", disable=not progress):
        name = " ".join(f"{field}={value:g}" for field, value in point.items())
        folder = Path(out_dir) / name.replace(" ", "-").replace("=", "-")
        config = changed(base, point)
        policies[name] = [
            train_radar(
                trace, costs, config, seed=seed, out_dir=folder.with_name(f"{folder.name}-{seed}")
            ).policy
            for seed in seeds
        ]
    table = compare_replay(trace, costs, policies, random_seeds=(), progress=progress).table
    rows = table[(table["suite"] == "all") & table["method"].isin(list(policies))]
    fields = pd.DataFrame(points, index=list(policies)).loc[rows["method"]].reset_index(drop=True)
    measured = rows[["seed", "tau", "draft_calls", "speedup", "over_default"]].reset_index(
        drop=True
    )
    return pd.concat([fields, measured], axis=1)


VARIANTS = {"standard": "Standard PPO", "max_entropy": "Max-Entropy PPO"}
STATES = {"concat": "Feature Vector", "text": "Text Embedding"}


def resps_variants(
    trace,
    costs,
    out_dir: Path,
    *,
    changes: dict,
    seeds=(0,),
    widths=(128, 64),
    encoder=None,
    progress=True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two tables, (variants, turns). Variants: row (as the paper names it), width of both hidden
    layers, over_eagle3, unique_actions, seeds. Turns: one row per test turn, variant and seed, with
    row and width.

    encoder: of sentences. With it, and a recording that holds embeddings of its text
    (`experiments.texts`), the variants that see these are there too, and an answer of theirs is
    charged an embedding made now.

    over_eagle3: plain mean over suites of the speed over the tree that the paper compares with.
    unique_actions: trees drafted at least once. Both are means over seeds. changes: to the paper's
    configs, such as the grid and the budget.
    """
    policies, rows, charged, test = {}, [], {}, trace.select(part="test")
    states = (
        STATES
        if encoder is not None and "text_state" in trace.header
        else {"concat": STATES["concat"]}
    )
    for width, (variant, named), (state, seen) in product(widths, VARIANTS.items(), states.items()):
        shape = {"state": state, "ppo.pi": (width, width), "ppo.vf": (width, width)}
        config = changed(resps.VARIANTS[variant]["paper"], shape | changes)
        own = [
            {"seed": seed, "out_dir": Path(out_dir) / f"{variant}-{state}-{width}-{seed}"}
            for seed in seeds
        ]
        name = f"{named} + {seen}, {width}"
        policies[name] = [
            train_resps(trace, costs, config, progress=progress, **where) for where in own
        ]
        rows.append(
            {"method": name, "row": f"{named} + {seen}", "width": width, "seeds": len(seeds)}
        )
        if state == "text":
            charged[name] = answer_ms(test, _encoding(policies[name][0], encoder), costs)
    chosen = Baselines.choose(trace, costs, defaults=(PAPER_TREES["resps"],))
    options = dict(baselines=chosen, policy_ms=charged, random_seeds=(), progress=progress)
    compared = compare_replay(trace, costs, policies, **options)
    by_suite = (
        compared.table[compared.table["suite"] != "all"].groupby("method")["over_default"].mean()
    )
    unique = (
        metrics.actions(compared.cycles, ["method", "seed"])["unique_actions"]
        .groupby(level="method")
        .mean()
    )
    table = pd.DataFrame(rows)
    turns = compared.turns.merge(table[["method", "row", "width"]], on="method")
    return table.assign(
        over_eagle3=table["method"].map(by_suite), unique_actions=table["method"].map(unique)
    ), turns


def _encoding(policy: resps.RespsPolicy, encoder) -> resps.RespsPolicy:
    """A copy that embeds a text of its own before it answers, as long as what it would see."""
    return copy.deepcopy(policy).attach(encoder, lambda question: "word " * question.context_tok)


def training_phase(trace, costs, config: resps.RespsConfig, policies: list) -> pd.DataFrame:
    """`metrics.cycle_facts` of trained policies on the questions they learned from, answering as
    they did while learning.

    That is, drawing their answers, and keeping each as long as `config` says for training: Re-SpS's
    row of that name in Table 6. policies: one per seed.
    """
    learned_from = training_turns(trace, config.prompts)
    how = {**config.while_training, "temperature": 1.0}
    replayed = [
        replay(learned_from, one.with_settings(**how), costs, keep_cycles=True).cycles
        for one in policies
    ]
    cycles = pd.concat(
        [rows.assign(seed=seed) for seed, rows in enumerate(replayed)], ignore_index=True
    )
    return (
        metrics.cycle_facts(cycles.assign(method="Training phase"))
        .reset_index()
        .assign(suite="all")
    )


def interval_sweep(trace, costs, policies: list, intervals=(1, 5, 10, 20, 50), progress=True):
    """Trained Re-SpS policies asked every so many cycles. Returns two tables, (intervals, turns).

    Intervals: interval, seconds (of all test turns), tok_per_s, policy_frac, means over seeds.
    Turns: one row per test turn, interval and seed. policies: one per seed.
    """
    swept = {
        str(length): [policy.with_settings(interval=length) for policy in policies]
        for length in intervals
    }
    turns = compare_replay(trace, costs, swept, random_seeds=(), progress=progress).turns
    own = turns[turns["method"].isin(list(swept))]
    own = own.assign(interval=own["method"].astype(int))
    sums = own.groupby("interval", sort=False)[["time_ms", "new_tok", "policy_ms"]].sum()
    table = sums.assign(
        seconds=sums["time_ms"] / 1e3 / len(policies),
        tok_per_s=1e3 * sums["new_tok"] / sums["time_ms"],
    )
    table = table.assign(policy_frac=sums["policy_ms"] / sums["time_ms"]).reset_index()
    return table[["interval", "seconds", "tok_per_s", "policy_frac"]], own
