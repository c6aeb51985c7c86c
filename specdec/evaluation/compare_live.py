"""Live comparison of the same methods (`live_table`), beside replay's predictions (`beside`)."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec import identity, runs
from specdec.core.policy import Static
from specdec.core.records import TURN
from specdec.costs.calibrate import Calibration
from specdec.costs.measure import CalibrateConfig as CalibrateConfig
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError
from specdec.evaluation import compare, metrics, stats
from specdec.evaluation.bench import EvaluateConfig, evaluate
from specdec.evaluation.compare import PER_SUITE, RANDOM, RATIOS, TUNED, Comparison
from specdec.evaluation.methods import AUTOREGRESSIVE
from specdec.identity import Method


@dataclass(frozen=True)
class Live:
    """The measurements of `decode_live`."""

    runs: tuple[runs.Run, ...]
    prompts: pd.DataFrame  # rows of the runs
    cycles: pd.DataFrame
    labels: dict[str, tuple[Method, int]]  # name of a method in the runs -> (method, seed)
    policies: tuple[Method, ...]  # the methods that are not baselines
    default: str  # the name of the default tree
    costs: CostModel | None = None  # measured between the prompts, if requested
    temperature: float = 0.0
    machine: str = ""  # a hash of the hardware, as in the runs


def decode_live(
    pair, policies, suites, baselines, *, name="controllers", seeds=1, calibration=None, **more
) -> Live:
    """Decode the test part of `suites` with plain decoding, baselines and policies, interleaved
    prompt by prompt.

    policies: name -> policies, the first `seeds` of which are used. suites: names; each has a run,
    with the suite's own tree. calibration: calibrate too, in pieces between the prompts. more:
    other fields of EvaluateConfig.
    """
    config = runs.configured(EvaluateConfig(part="test"), EvaluateConfig, more)
    suite_trees = list(map(baselines.of_suite, suites))
    # 1. the methods that all suites share, and their labels
    methods: dict = {AUTOREGRESSIVE: AUTOREGRESSIVE}
    methods[baselines.default] = Static.of(baselines.defaults[0])
    methods[TUNED] = Static.of(baselines.tuned)
    methods[PER_SUITE] = None
    methods[RANDOM] = baselines.random()
    labels = {label: (Method.of(label), 0) for label in methods}
    policies = baselines.by_method(policies)
    for method, trained in policies.items():
        for seed, policy in enumerate(trained[:seeds]):
            compare.warn_elsewhere(policy, pair=pair.name)
            label = method if min(seeds, len(trained)) == 1 else f"{method} #{seed}"
            labels[label] = (method, seed)
            methods[label] = policy
    # 2. a run per suite
    timing = calibration and Calibration(pair, calibration)
    between = timing and (lambda frac: timing.go_on(frac / len(suites)))
    done = []
    for suite, tree in zip(suites, suite_trees, strict=True):
        methods[PER_SUITE] = Static.of(tree)
        label = f"{name}_{runs.plain_name(suite.replace('/', '_'))}"
        of_suite = dataclasses.replace(config, name=label)
        done.append(evaluate(copy.deepcopy(methods), suite, pair, of_suite, between=between))
    # 3. their rows
    prompts = pd.concat([run.read_table("prompts") for run in done], ignore_index=True)
    cycles = pd.concat([run.read_table("cycles") for run in done], ignore_index=True)
    # 4. the costs that were measured between them; new decodings come with new costs
    costs = None
    if timing:
        path = done[-1].path("costs.json")
        if timing.spent_s or not path.is_file():
            timing.model().save(path)
        costs = CostModel.load(path)
    facts = (baselines.default, costs, config.temperature, prompts["machine"].iloc[0])
    return Live(tuple(done), prompts, cycles, labels, tuple(policies), *facts)


def live_table(live: Live, prompts: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per suite ("all" pools several), method and seed, measured live, prefill included.

    RATIOS have paired intervals; p_default_holm and p_tuned_holm are adjusted over the policies of
    a suite. draft_calls and verify_nodes are per cycle, policy_frac of their time; with
    metrics.text_facts. prompts: rows of it, default all.
    """
    prompts = live.prompts if prompts is None else prompts
    # 1. over plain decoding, and over two trees
    keys = ["suite", "method"]
    table = stats.compare(prompts, AUTOREGRESSIVE)
    table = table.drop(columns=["p_value", "p_holm"])
    drafting = prompts[prompts["method"] != AUTOREGRESSIVE]
    baselines = {"over_default": live.default, "over_tuned": TUNED}
    tested = {label for label, (method, _) in live.labels.items() if method in live.policies}
    ratios = stats.summarise(drafting, baselines, family=tested)
    columns = [*keys]
    for name in baselines:
        columns += stats.spread_names(name)
        if tested:
            columns.append(f"{stats.p_name(name)}_holm")
    table = table.merge(ratios[columns], on=keys, how="left")
    # 2. means of the cycles of these turns
    turn = [*TURN, "method", "repeat"]
    cycles = stats.with_all(live.cycles.merge(prompts[turn], on=turn)).groupby(keys, sort=False)
    means = cycles[["draft_calls", "verify_nodes"]].mean()
    means["policy_frac"] = cycles["policy_ms"].sum() / cycles["total_ms"].sum()
    means = means.join(metrics.text_facts(stats.with_all(prompts)), how="outer")
    table = table.merge(means.reset_index(), on=keys, how="left")
    # 3. methods and seeds in place of the runs' labels
    table.insert(2, "seed", [live.labels[label][1] for label in table["method"]])
    table["method"] = [str(live.labels[label][0]) for label in table["method"]]
    methods = list(dict.fromkeys(method for method, _ in live.labels.values()))
    table = stats.in_order(table, methods)
    facts = {"temperature": live.temperature, "machine": live.machine}
    return identity.with_fields(table, methods, **facts)


def beside(comparison: Comparison, live: Live) -> pd.DataFrame:
    """Replay's predictions next to live measurements, on common turns and without prefill on both
    sides.

    For each of RATIOS: replay_<ratio>, live_<ratio> with its interval, <ratio>_off (replay / live
    - 1) and <ratio>_inside (whether the interval holds the prediction; NA for one prompt). A live
    first cycle includes the drafter's reading of the prompt: costs measured alongside add that.
    Both sides must have decoded with the same max_new_tokens.
    """
    # 1. tokens after the first, which the prefill yields; turns that end with it are dropped
    prompts = live.prompts
    prompts = prompts[prompts.groupby(TURN)["new_tok"].transform("min") > 1]
    prompts = prompts.assign(new_tok=prompts["new_tok"] - 1, total_ms=prompts["decode_ms"])
    turns = comparison.turns.merge(prompts[[*TURN, "prompt_tok"]].drop_duplicates(), on=TURN)
    if turns.empty:
        why = "replay and live share no turn"
        raise SpecdecError(f"{why}; compare on the same suites, and record their test part.")
    prompts = prompts.merge(turns[TURN].drop_duplicates(), on=TURN)
    # 2. replay's times of these turns
    if live.costs is not None:
        turns["time_ms"] += (turns["draft_calls"] > 0) * live.costs.reading_ms(turns["prompt_tok"])
        least = np.minimum(turns.groupby(TURN)["time_ms"].transform("min"), turns["plain_ms"])
        # the bound knows when to draft in no cycle
        turns["time_ms"] = turns["time_ms"].mask(turns["method"] == compare.CLAIRVOYANT, least)
    keys = ["suite", "method", "seed"]
    predicted = dataclasses.replace(comparison, turns=turns).table[[*keys, "ms_per_tok", *RATIOS]]
    # 3. side by side
    rows = live_table(live, prompts).merge(predicted, on=keys, suffixes=("", "_replay"))
    table = rows[[*keys, "prompts"]].copy()
    for name in RATIOS:
        replayed = rows[f"{name}_replay"]
        table[f"replay_{name}"] = replayed
        for column in stats.spread_names(name):
            table[f"live_{column}"] = rows[column]
        low, high = rows[f"{name}_low"], rows[f"{name}_high"]
        table[f"{name}_off"] = replayed / rows[name] - 1
        table[f"{name}_inside"] = replayed.between(low, high).astype("boolean").mask(low.isna())
    table["replay_ms_per_tok"] = rows["ms_per_tok"]
    table["live_ms_per_tok"] = 1e3 / rows["tok_per_s"]
    table["ms_per_tok_off"] = rows["ms_per_tok"] / table["live_ms_per_tok"] - 1
    return table.join(rows[[*identity.FIELDS, "temperature", "machine"]])


def agreement(table: pd.DataFrame) -> dict[str, float]:
    """Accuracy of replay's predictions in a table of `beside`, over all methods and suites.

    median_frac, worst_frac: errors of times per token; spearman: their rank correlation;
    gain_median, gain_worst: errors of the gain over the tuned tree (0.02 is two points).
    """
    # the last suite is "all", or the only one
    rows = table[table["suite"] == table["suite"].iloc[-1]]
    off = rows["ms_per_tok_off"].abs()
    replayed_ms = rows["replay_ms_per_tok"]
    gains = (rows["replay_over_tuned"] - rows["live_over_tuned"]).abs()[rows["method"] != TUNED]
    return {
        "methods": float(len(rows)),
        "median_frac": float(off.median()),
        "worst_frac": float(off.max()),
        "spearman": float(replayed_ms.corr(rows["live_ms_per_tok"], method="spearman")),
        "gain_median": float(gains.median()),
        "gain_worst": float(gains.max()),
    }
