"""The papers' own ablation tables: variants of a system trained side by side and replayed, suite by
suite.

`ablation` changes one field of ours and tells the effect; here are the variants that a table of a
paper compares. All are judged on the test part of one recording, answers charged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
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


def size_alone(
    trace,
    costs,
    out_dir: Path,
    variants: dict[str, dict],
    *,
    base: ltd.LtdConfig,
    seeds=(0,),
    progress=True,
) -> Comparison:
    """The size policy of LTD, trained alone in every variant, on trees of `base`'s depth.

    variants: name -> changes of `base`. What sees the target's features needs a recording that kept
    them, and is left out without. A finished training is not repeated.
    """
    alone = changed(base, {"rounds": (ltd.Round("iter0", "size"),)})
    policies = {}
    for name, changes in tqdm(variants.items(), desc="variants", disable=not progress):
        config = changed(alone, changes)
        # the target's features are as wide as the recorded ones
        if "hidden" in config.size.parts:
            if trace.features is None:
                continue
            config = changed(config, {"size.features_size": int(trace.features.shape[1])})
        folder = "".join(letter if letter.isalnum() else "-" for letter in name)
        policies[name] = []
        for seed in seeds:
            options = dict(seed=seed, out_dir=Path(out_dir) / f"{folder}-{seed}")
            trained = train_ltd(trace, costs, config, progress=progress, **options)
            policies[name].append(trained.policy)
    return compare_replay(trace, costs, policies, random_seeds=(), progress=progress)


def radar_grid(
    trace,
    costs,
    out_dir: Path,
    base: radar.RadarConfig,
    grid: dict[str, Sequence[float]],
    *,
    seeds=(0,),
    progress=True,
) -> pd.DataFrame:
    """RADAR, trained at every point of a grid of its config's fields: one row per point and seed.

    Columns: the fields, seed, and of the test turns tau, draft_calls (per cycle), speedup and
    over_default. base: the rest of the config; its objective must be the one that alpha belongs to.
    """
    points = {}
    policies = {}
    for values in tqdm(list(product(*grid.values())), desc="grid", disable=not progress):
        point = dict(zip(grid, values, strict=True))
        name = " ".join(f"{field}={value:g}" for field, value in point.items())
        folder = name.replace(" ", "-").replace("=", "-")
        points[name] = point
        policies[name] = []
        for seed in seeds:
            options = dict(seed=seed, out_dir=Path(out_dir) / f"{folder}-{seed}")
            trained = train_radar(trace, costs, changed(base, point), **options)
            policies[name].append(trained.policy)
    table = compare_replay(trace, costs, policies, random_seeds=(), progress=progress).table
    # without the static trees and the bound
    rows = table[(table["suite"] == "all") & table["method"].isin(list(policies))]
    rows = rows.join(pd.DataFrame.from_dict(points, orient="index"), on="method")
    columns = [*grid, "seed", "tau", "draft_calls", "speedup", "over_default"]
    return rows[columns].reset_index(drop=True)


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
    # 1. the trainings
    test = trace.select(part="test")
    states = dict(STATES)
    if encoder is None or "text_state" not in trace.header:
        del states["text"]
    policies = {}
    charged = {}
    rows = []
    for width, (variant, title), (state, sees) in product(widths, VARIANTS.items(), states.items()):
        shape = {"state": state, "ppo.pi": (width, width), "ppo.vf": (width, width)}
        config = changed(resps.VARIANTS[variant]["paper"], shape | changes)
        row = f"{title} + {sees}"
        name = f"{row}, {width}"
        policies[name] = []
        for seed in seeds:
            folder = Path(out_dir) / f"{variant}-{state}-{width}-{seed}"
            options = dict(seed=seed, out_dir=folder, progress=progress)
            policies[name].append(train_resps(trace, costs, config, **options))
        rows.append({"method": name, "row": row, "width": width, "seeds": len(seeds)})
        if state == "text":
            charged[name] = answer_ms(test, _encoding(policies[name][0], encoder), costs)
    # 2. beside the paper's tree
    chosen = Baselines.choose(trace, costs, defaults=(PAPER_TREES["resps"],))
    options = dict(baselines=chosen, policy_ms=charged, random_seeds=(), progress=progress)
    compared = compare_replay(trace, costs, policies, **options)
    by_suite = compared.table[compared.table["suite"] != "all"]
    actions = metrics.actions(compared.cycles, ["method", "seed"])["unique_actions"]
    table = pd.DataFrame(rows)
    turns = compared.turns.merge(table[["method", "row", "width"]], on="method")
    table["over_eagle3"] = table["method"].map(by_suite.groupby("method")["over_default"].mean())
    table["unique_actions"] = table["method"].map(actions.groupby(level="method").mean())
    return table, turns


def _encoding(policy: resps.RespsPolicy, encoder) -> resps.RespsPolicy:
    """A copy that embeds a text of its own before it answers, as long as what it would see."""
    return copy.deepcopy(policy).attach(encoder, lambda question: "word " * question.context_tok)


def training_phase(trace, costs, config: resps.RespsConfig, policies: list) -> pd.DataFrame:
    """`metrics.cycle_facts` of trained policies on the questions they learned from, answering as
    they did while learning.

    That is, drawing their answers, and keeping each as long as `config` says for training: Re-SpS's
    row of that name in Table 6. policies: one per seed.
    """
    # answers are drawn while learning, and kept for an interval of its own
    learned_from = training_turns(trace, config.prompts)
    how = {**config.while_training, "temperature": 1.0}
    parts = []
    for seed, policy in enumerate(policies):
        replayed = replay(learned_from, policy.with_settings(**how), costs, keep_cycles=True)
        parts.append(replayed.cycles.assign(seed=seed, method="Training phase"))
    facts = metrics.cycle_facts(pd.concat(parts, ignore_index=True))
    return facts.reset_index().assign(suite="all")


def interval_sweep(
    trace, costs, policies: list, intervals: Sequence[int], progress=True
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Trained Re-SpS policies asked every so many cycles. Returns two tables, (intervals, turns).

    Intervals: interval, seconds (of all test turns), tok_per_s, policy_frac, means over seeds.
    Turns: one row per test turn, interval and seed. policies: one per seed.
    """
    swept = {}
    for interval in intervals:
        swept[str(interval)] = [policy.with_settings(interval=interval) for policy in policies]
    turns = compare_replay(trace, costs, swept, random_seeds=(), progress=progress).turns
    turns = turns[turns["method"].isin(list(swept))]
    turns = turns.assign(interval=turns["method"].astype(int))
    table = turns.groupby("interval", sort=False)[["time_ms", "new_tok", "policy_ms"]].sum()
    table["seconds"] = table["time_ms"] / 1e3 / len(policies)
    table["tok_per_s"] = 1e3 * table["new_tok"] / table["time_ms"]
    table["policy_frac"] = table["policy_ms"] / table["time_ms"]
    return table.reset_index()[["interval", "seconds", "tok_per_s", "policy_frac"]], turns
