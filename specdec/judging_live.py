"""Controllers by the clock: plain decoding, trees that never change, a random policy and every controller, interleaved.

A thin layer over `bench.evaluate`; the trees are those that `judging.choose_opponents` found on a recording. `beside` sets
what replay predicted next to what was measured, on the same prompts. Trains nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec import bench, runs, stats
from specdec.config import SpecdecError
from specdec.hub import Pair
from specdec.judging import (
    PER_SUITE,
    RANDOM,
    TUNED,
    Judged,
    Opponents,
    listed,
    random_policy,
    replay_table,
    warn_elsewhere,
)
from specdec.methods import AUTOREGRESSIVE
from specdec.policy import Static

_PROMPT, _TURN = ["suite", "prompt"], ["suite", "prompt", "turn"]
_RATIOS = ("speedup", "over_default", "over_tuned")


@dataclass(frozen=True)
class Live:
    """What `judge_live` measured. prompts, cycles: the rows of its runs. labels: name of a method in them -> (method,
    seed). Controllers are named `systems`, the default tree is called `default`."""

    runs: tuple[runs.Run, ...]
    prompts: pd.DataFrame
    cycles: pd.DataFrame
    labels: dict[str, tuple[str, int]]
    systems: tuple[str, ...]
    default: str


def judge_live(
    pair: Pair, policies: dict, suites, opponents: Opponents, *, seeds: int = 1, per_suite: bool = True,
    random_seed: int = 0, name: str = "controllers", **options,
) -> Live:  # fmt: skip
    """Decode the test part of `suites` with plain decoding, the default, the tuned and the suite's own tree, the random
    policy, and the first `seeds` policies of every system; all in turns, prompt by prompt.

    suites: names, as in the recording that `opponents` come from. per_suite: one run per suite, in which the suite's own
    tree takes part (a policy is not told which suite it decodes); False leaves that tree out and mixes all suites in
    one run. options: of `bench.evaluate` (limit, max_new_tokens, temperature, repeats, cpu_time, seed, folder, scale,
    warmup, progress). The same call continues what was stopped. Policies are left as they are.
    """
    suites = [suites] if isinstance(suites, str) else list(suites)
    missing = [suite for suite in suites if suite not in opponents.per_suite]
    if per_suite and missing:
        raise SpecdecError(f"no tree was tuned for suite {missing[0]!r}; record it or pass per_suite=False.")
    policies, labels, methods = listed(policies), {}, {}
    for system, many in policies.items():
        for seed, policy in enumerate(many[:seeds]):
            warn_elsewhere(policy, pair=pair.name)
            label = system if min(seeds, len(many)) == 1 else f"{system} #{seed}"
            labels[label], methods[label] = (system, seed), policy
    trees = {opponents.default: opponents.defaults[0], TUNED: opponents.tuned}
    taken = [label for label in methods if label in {AUTOREGRESSIVE, PER_SUITE, RANDOM, *trees}]
    if taken:
        raise SpecdecError(f"the name {taken[0]!r} belongs to a reference; call the policy otherwise.")
    done = []
    for group in [[suite] for suite in suites] if per_suite else [suites]:
        shown = trees | ({PER_SUITE: opponents.per_suite[group[0]]} if per_suite else {})
        compared = {AUTOREGRESSIVE: AUTOREGRESSIVE} | {label: Static.of(tree) for label, tree in shown.items()}
        compared |= {RANDOM: random_policy(opponents, random_seed), **copy.deepcopy(methods)}
        called = f"{name}_{runs.plain_name(group[0].replace('/', '_'))}" if per_suite else name
        done.append(bench.evaluate(compared, group, pair, part="test", name=called, **options))
    tables = (pd.concat([run.read_table(kind) for run in done], ignore_index=True) for kind in ("prompts", "cycles"))
    labels = {label: (label, 0) for label in compared if label not in labels} | labels
    return Live(tuple(done), *tables, labels, tuple(policies), opponents.default)


def live_table(live: Live, *, prefill: bool = True, only: pd.DataFrame | None = None, **options) -> pd.DataFrame:
    """One row per suite ("all" pools several) and method, by the clock.

    Columns suite, method, seed, prompts, tok_per_s, tau and, each with a paired bootstrap interval (_low, _high), speedup
    over plain decoding, over_default and over_tuned; p_default_holm and p_tuned_holm (Wilcoxon, Holm over all suites and
    controllers); draft_calls and verify_nodes per cycle, policy_frac of the time in cycles, and same_frac, texts equal
    to plain decoding's. prefill: False counts only what comes after the prompt's own forward, which is what replay
    predicts. only: (suite, prompt, turn) to keep. options: of `stats.bootstrap`.
    """
    prompts = live.prompts if only is None else live.prompts.merge(only[_TURN].drop_duplicates(), on=_TURN)
    if not prefill:
        prompts = _without_prefill(prompts)
    if prompts.empty:
        raise SpecdecError("there is nothing to compare: no prompt was decoded beyond its first token.")
    table = stats.compare(prompts, AUTOREGRESSIVE, **options).drop(columns=["p_value", "p_holm"])
    table = table[[name for name in table if not name.startswith("mean_speedup")]]
    tree_rows = prompts[prompts["method"] != AUTOREGRESSIVE]
    for reference, name in ((live.default, "default"), (TUNED, "tuned")):
        found = stats.compare(tree_rows, reference, **options)
        found = found.rename(columns=lambda column, name=name: column.replace("speedup", f"over_{name}"))
        kept = [f"over_{name}{end}" for end in ("", "_low", "_high")]
        tested = found["method"].map(lambda label: live.labels[label][0]).isin(live.systems)
        if tested.any():
            found.loc[tested, f"p_{name}_holm"] = stats.holm(found.loc[tested, "p_value"])
            kept.append(f"p_{name}_holm")
        table = table.merge(found[["suite", "method", *kept]], on=["suite", "method"], how="left")
    table = table.merge(_measures(live, prompts), on=["suite", "method"], how="left")
    table.insert(2, "seed", [live.labels[label][1] for label in table["method"]])
    table["method"] = [live.labels[label][0] for label in table["method"]]
    order = {label: place for place, label in enumerate(dict.fromkeys(name for name, _ in live.labels.values()))}
    places = pd.DataFrame({"suite": pd.factorize(table["suite"])[0], "method": table["method"].map(order)})
    return table.loc[places.assign(seed=table["seed"]).sort_values(["suite", "method", "seed"]).index].reset_index(
        drop=True
    )


def _without_prefill(prompts: pd.DataFrame) -> pd.DataFrame:
    """Tokens after the first, which the prefill brings, and their time; turns that end with it are left out."""
    shortest = prompts.groupby(_TURN)["new_tok"].transform("min")
    kept = prompts[shortest > 1]
    return kept.assign(new_tok=kept["new_tok"] - 1, total_ms=kept["decode_ms"])


def _measures(live: Live, prompts: pd.DataFrame) -> pd.DataFrame:
    """Draft calls and nodes per cycle, the policy's share of the time, and how many texts are the same."""
    keys = [*_TURN, "method", "repeat"]
    cycles = live.cycles.merge(prompts[keys], on=keys)
    several = prompts["suite"].nunique() > 1
    rows, turns = (pd.concat([one, one.assign(suite="all")]) if several else one for one in (cycles, prompts))
    groups = rows.groupby(["suite", "method"], sort=False)
    found = groups[["draft_calls", "verify_nodes"]].mean()
    found["policy_frac"] = groups["policy_ms"].sum() / groups["total_ms"].sum()
    found = found.join(turns.groupby(["suite", "method"])["same"].mean().rename("same_frac"), how="outer")
    return found.reset_index()


def beside(judged: Judged, live: Live, **options) -> pd.DataFrame:
    """Replay's prediction next to the live measurement, on the turns that both have and without prefill on both sides.

    Columns suite, method, seed, prompts, and for speedup, over_default and over_tuned: replay_<ratio>, live_<ratio> with
    its interval, <ratio>_off (replay / live - 1) and <ratio>_inside (whether the interval holds the prediction; NA for a
    single prompt, which has none). A policy that draws at random draws otherwise on the two sides. A
    recording of longer or shorter answers predicts other positions: give both the same max_new_tokens. options: of
    `stats.bootstrap`. SpecdecError where no turn is in both.
    """
    decoded = _without_prefill(live.prompts)[_TURN].drop_duplicates()
    turns = judged.turns.merge(decoded, on=_TURN)
    if turns.empty:
        raise SpecdecError("replay and live share no turn; judge both on the same suites, and record their test part.")
    table = replay_table(turns, judged.opponents)
    if table["suite"].nunique() == 2:  # one suite and all of it: live tables have no "all" then
        table = table[table["suite"] != "all"]
    predicted = table[["suite", "method", "seed", *_RATIOS]].rename(
        columns={name: f"replay_{name}" for name in _RATIOS}
    )
    measured = live_table(live, prefill=False, only=turns, **options)
    ratios = [f"{name}{end}" for name in _RATIOS for end in ("", "_low", "_high")]
    measured = measured[["suite", "method", "seed", "prompts", *ratios]]
    found = measured.rename(columns={name: f"live_{name}" for name in ratios})
    found = found.merge(predicted, on=["suite", "method", "seed"])
    columns = ["suite", "method", "seed", "prompts"]
    for name in _RATIOS:
        low, high = found[f"live_{name}_low"], found[f"live_{name}_high"]
        found[f"{name}_off"] = found[f"replay_{name}"] / found[f"live_{name}"] - 1
        inside = found[f"replay_{name}"].between(low, high).astype("boolean")
        found[f"{name}_inside"] = inside.mask(low.isna())
        columns += [
            f"replay_{name}",
            *(f"live_{name}{end}" for end in ("", "_low", "_high")),
            f"{name}_off",
            f"{name}_inside",
        ]
    return found[columns]


# What issue 5 asks of controllers: speed over the default for each, over the tuned tree and of the headroom for ours.
AIMS = {"over_default": 1.08, "over_tuned": 1.05, "headroom_frac": 0.25}


def aims(replayed: pd.DataFrame, live: pd.DataFrame, systems, ours: str = "ours") -> pd.DataFrame:
    """Which of AIMS were reached: one row per system and aim, with columns system, aim, wanted, found, low, high, reached.

    replayed: of `judging.over_seeds`; live: of `live_table`. Live numbers are those of all suites and of the slowest seed
    measured. A controller reaches over_default where its number does; `ours` must reach over_tuned with its whole interval
    above one, and headroom_frac in replay as a mean over seeds. "slower suites" counts those (and seeds) whose interval over
    the default lies below one: none are wanted. With one prompt there is no interval, and what needs one is not reached.
    """
    every, found = live["suite"] == ("all" if (live["suite"] == "all").any() else live["suite"].iloc[0]), []
    for system in systems:
        rows = live[every & (live["method"] == system)]
        if rows.empty:
            raise SpecdecError(f"{system!r} was not decoded live; name systems of judge_live.")
        for name in ("over_default", "over_tuned") if system == ours else ("over_default",):
            row = rows.loc[rows[name].idxmin()]
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            reached = row[name] >= AIMS[name] and (name == "over_default" or low > 1)
            found.append((system, name, AIMS[name], row[name], low, high, reached))
        own = live[(live["method"] == system) & (live["suite"] != "all")]
        slower = int((own["over_default_high"] < 1).sum())
        known = bool(own["over_default_high"].notna().all())
        found.append((system, "slower suites", 0, slower, np.nan, np.nan, slower == 0 and known))
        if system == ours:
            row = replayed[(replayed["suite"] == "all") & (replayed["method"] == system)].iloc[0]
            share = row["headroom_frac"]
            spread = row["headroom_frac_low"], row["headroom_frac_high"]
            found.append(
                (system, "headroom_frac", AIMS["headroom_frac"], share, *spread, share >= AIMS["headroom_frac"])
            )
    return pd.DataFrame(found, columns=["system", "aim", "wanted", "found", "low", "high", "reached"])
