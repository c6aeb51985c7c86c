"""Live comparison of the same methods (`live_table`), and a check of replay's predictions
(`beside`, `live_check`).
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec import identity, runs
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.records import TURN, ms_per_tok, speedup
from specdec.core.tree_config import TreeConfig
from specdec.costs.calibrate import Calibration
from specdec.costs.measure import CalibrateConfig
from specdec.costs.model import CostModel
from specdec.data.suites import gather
from specdec.errors import SpecdecError
from specdec.evaluation import compare, metrics, stats
from specdec.evaluation.bench import EvaluateConfig, evaluate
from specdec.evaluation.compare import PER_SUITE, RANDOM, RATIOS, TUNED, Baselines, Comparison
from specdec.evaluation.methods import AUTOREGRESSIVE
from specdec.identity import Method
from specdec.models.pairs import describe_pair
from specdec.replays import static_trees
from specdec.replays.static_trees import SETTING, setting, static_grid, static_turns, tree_of
from specdec.replays.trace import Trace

# total_tokens of the candidate trees
SIZES = (4, 8, 12, 16, 24, 32, 48, 60, 80, 100, 128, 160, 200, 241)
LIVE = EvaluateConfig(name="controllers")
CHECKED = EvaluateConfig(name="live_check", limit=2, part="test")


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


@runs.with_settings(LIVE)
def decode_live(
    pair: Pair,
    policies: dict,
    suites: list[str],
    baselines: Baselines,
    config: EvaluateConfig | None = None,
    *,
    seeds: int = 1,
    calibration: CalibrateConfig | None = None,
    **settings,
) -> Live:
    """Decode the test part of `suites` with plain decoding, baselines and policies, interleaved
    prompt by prompt.

    policies: name -> policies, the first `seeds` of which are used. suites: names; each has a run,
    with the suite's own tree. calibration: calibrate too, in pieces between the prompts.
    """
    config = runs.configured(config or LIVE, EvaluateConfig, settings)
    suite_trees = [baselines.of_suite(suite) for suite in suites]
    # 1. the methods that all suites share, and their labels
    methods: dict = {AUTOREGRESSIVE: AUTOREGRESSIVE}
    methods[baselines.default] = Static.of(baselines.defaults[0])
    methods[TUNED] = Static.of(baselines.tuned)
    methods[PER_SUITE] = None
    methods[RANDOM] = baselines.random()
    labels = {label: (Method.of(label), 0) for label in methods}
    policies = baselines.by_method(policies)
    for name, trained in policies.items():
        for seed, policy in enumerate(trained[:seeds]):
            compare.warn_elsewhere(policy, pair=pair.name)
            label = name if min(seeds, len(trained)) == 1 else f"{name} #{seed}"
            labels[label] = (name, seed)
            methods[label] = policy
    # 2. a run per suite
    timing = calibration and Calibration(pair, calibration)
    between = timing and (lambda frac: timing.go_on(frac / len(suites)))
    done = []
    for suite, tree in zip(suites, suite_trees, strict=True):
        methods[PER_SUITE] = Static.of(tree)
        name = f"{config.name}_{runs.plain_name(suite.replace('/', '_'))}"
        of_suite = dataclasses.replace(config, part="test", name=name)
        done.append(evaluate(copy.deepcopy(methods), suite, pair, of_suite, between=between))
    # 3. their rows
    prompts = pd.concat([run.read_table("prompts") for run in done], ignore_index=True)
    cycles = pd.concat([run.read_table("cycles") for run in done], ignore_index=True)
    costs = _measured_beside(done[-1], timing) if timing else None
    facts = (config.temperature, prompts["machine"].iloc[0])
    names = tuple(policies)
    return Live(tuple(done), prompts, cycles, labels, names, baselines.default, costs, *facts)


def _measured_beside(run: runs.Run, timing: Calibration) -> CostModel:
    """The cost model measured between the prompts of a run, stored beside its rows."""
    path = run.path("costs.json")
    if timing.begun or not path.is_file():  # new decodings come with new costs
        timing.model().save(path)
    return CostModel.load(path)


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
    table = table.drop(columns=["p_value", "p_holm", *stats.spread_names("mean_speedup")])
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
        low, high = rows[f"{name}_low"], rows[f"{name}_high"]
        table[f"replay_{name}"] = replayed
        table[f"live_{name}"] = rows[name]
        table[f"live_{name}_low"] = low
        table[f"live_{name}_high"] = high
        table[f"{name}_off"] = replayed / rows[name] - 1
        table[f"{name}_inside"] = replayed.between(low, high).astype("boolean").mask(low.isna())
    table["replay_ms_per_tok"] = rows["ms_per_tok"]
    table["live_ms_per_tok"] = 1e3 / rows["tok_per_s"]
    table["ms_per_tok_off"] = table["replay_ms_per_tok"] / table["live_ms_per_tok"] - 1
    return table.join(rows[[*identity.FIELDS, "temperature", "machine"]])


def agreement(table: pd.DataFrame) -> dict[str, float]:
    """Accuracy of replay's predictions in a table of `beside`, over all methods and suites.

    median_frac, worst_frac: errors of times per token; spearman: their rank correlation;
    gain_median, gain_worst: errors of the gain over the tuned tree (0.02 is two points).
    """
    suites = set(table["suite"])
    rows = table[table["suite"] == ("all" if "all" in suites else table["suite"].iloc[0])]
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


@dataclass(frozen=True)
class LiveCheck:
    """The result of `live_check`.

    table: one row per tree, and one for plain decoding. error_frac: predicted speed over the
    measured one, less 1; relative_frac: the same of speed-ups over plain decoding; within_costs:
    whether a tree's error, beyond the one common to all, is within the costs' uncertainty.

    facts: turns compared, and left_out as their live text differs (half precision);
    cycles_differing: pairs of turn and tree with other cycles than predicted; spearman: rank
    correlation of the trees' times; drift_frac: extra time of all trees together; median and worst
    error of speeds (_frac) and of speed-ups (_relative_frac).
    """

    table: pd.DataFrame
    facts: dict[str, float]
    run: runs.Run  # the bench's
    trace: Trace = dataclasses.field(repr=False)
    shapes: dict[str, TreeConfig] = dataclasses.field(repr=False)

    def priced(self, costs: CostModel) -> LiveCheck:
        """The same decodings beside the predictions of other costs."""
        return check_predictions(self.trace, costs, self.shapes, self.run)

    @property
    def trees(self) -> pd.DataFrame:
        """The rows of the table that are trees."""
        return self.table[self.table["method"] != AUTOREGRESSIVE]


def pick_trees(
    trace: Trace, costs: CostModel, count: int = 10, default: TreeConfig | None = None
) -> dict[str, TreeConfig]:
    """name -> TreeConfig: the default (EAGLE-3's), the tree tuned on the part train, and others
    evenly spread over the ranking there.
    """
    default = default or compare.DEFAULTS[0]
    trace = trace.select(part="train")
    static_turns(trace, costs, default)  # refuses a default that was not recorded
    sizes = [total for total in SIZES if total <= trace.most_nodes + 1]
    grid = static_grid(trace, costs, sizes, range(1, trace.depth + 1))
    trees = {"default": default, "tuned": static_trees.fastest(grid)}
    ranked = map(tree_of, grid.sort_values("ms_per_tok", kind="stable")[SETTING].to_dict("records"))
    rest = [tree for tree in dict.fromkeys(ranked) if tree not in trees.values()]
    count = min(count, len(rest) + 2)
    points = min(count - 1, len(rest))  # the fastest of the rest is used if all are needed
    places = np.linspace(0, len(rest) - 1, points)[points - (count - 2) :].round().astype(int)
    for place in places:
        trees[rest[place].text] = rest[place]
    return trees


@runs.with_settings(CHECKED)
def live_check(
    pair: Pair,
    trace: Trace,
    costs: CostModel | CalibrateConfig,
    trees: dict[str, TreeConfig],
    prompts=None,
    config: EvaluateConfig | None = None,
    **settings,
) -> LiveCheck:
    """Decode prompts of the recording with every tree, interleaved, and compare with replay's
    predictions for these turns.

    trees: name -> TreeConfig (see `pick_trees`). prompts: those recorded, if the recording is not
    of suites by name. settings: fields of EvaluateConfig; limit (2) takes the recording's first
    prompts per suite, of its part (test). costs: of this pair, precision and machine, or how to
    measure them in pieces between the prompts.

    >>> import specdec
    >>> pair, texts = specdec.load_pair("tiny", dtype="float32"), {"mine": ["What is 2 + 3?"]}
    >>> options = dict(depth=3, top_ks=(3,), trees=(), max_new_tokens=8, progress=False)
    >>> trace = specdec.record(pair, texts, **options)
    >>> from specdec.costs.profiles import profile
    >>> sheet = profile("roofline-a100-llama-8b-eager")
    >>> costs = dataclasses.replace(sheet, kind="calibrated", pair="tiny", dtype="float32")
    >>> trees = {"small": specdec.TreeConfig(4, 1, 3), "large": specdec.TreeConfig(12, 3, 3)}
    >>> check = live_check(pair, trace, costs, trees, texts, progress=False)
    >>> check.facts["trees"], check.facts["cycles_differing"]
    (2, 0)
    """
    config = runs.configured(config or CHECKED, EvaluateConfig, settings)
    _check(pair, trace, costs)
    # 1. the turns to decode, in the recording's order
    trace, header = trace.select(part=config.part), trace.header
    first = trace.turns.drop_duplicates("prompt").groupby("suite", sort=False).head(config.limit)
    trace = trace.select(trace.turns["prompt"].isin(first["prompt"]))
    for tree in trees.values():
        if isinstance(costs, CostModel):
            static_turns(trace, costs, tree)  # refuses unrecorded trees before decoding
    suites = list(dict.fromkeys(trace.turns["suite"])) if prompts is None else prompts
    items = gather(suites, folder=config.folder, seed=header.get("seed", 0))
    by_id = {item.id: item for item in items}
    recorded = trace.turns["prompt"].unique()
    missing = [prompt for prompt in recorded if prompt not in by_id]
    if missing:
        why = f"the recorded prompt {missing[0]!r} is not among the prompts given"
        raise SpecdecError(f"{why}; pass what was recorded.")
    # 2. plain decoding and every tree
    methods = {AUTOREGRESSIVE: AUTOREGRESSIVE}
    for name, tree in trees.items():
        methods[name] = Static.of(tree)
    length = header["max_new_tokens"]
    config = dataclasses.replace(config, max_new_tokens=length, limit=None, part=None)
    timing = Calibration(pair, costs) if isinstance(costs, CalibrateConfig) else None
    between = timing and timing.go_on
    run = evaluate(methods, [by_id[prompt] for prompt in recorded], pair, config, between=between)
    if timing:
        costs = _measured_beside(run, timing)
    return check_predictions(trace, costs, trees, run)


def check_predictions(
    trace: Trace, costs: CostModel, trees: dict[str, TreeConfig], run: runs.Run
) -> LiveCheck:
    """The LiveCheck of a finished bench run of the turns of `trace`, plain and with `trees`."""
    # 1. the turns whose live text is the recorded one
    rows = run.read_table("prompts").merge(trace.turns[[*TURN, "kept_tok"]], on=TURN)
    rows["recorded"] = rows["same"] & (rows["new_tok"] == rows["kept_tok"])
    recorded = rows.groupby(TURN)["recorded"].all()
    index = pd.MultiIndex.from_frame(trace.turns[TURN])
    compared = trace.select(recorded.reindex(index, fill_value=False).to_numpy())
    # 2. their predicted times; the live first cycle includes the reading of the prompt
    read_ms = costs.reading_ms(compared.turns["prompt_tok"].to_numpy())
    parts = []
    for name, tree in trees.items():
        turns = static_turns(compared, costs, tree)
        if not parts:
            parts.append(turns.assign(method=AUTOREGRESSIVE, time_ms=turns["plain_ms"]))
        turns["time_ms"] += read_ms * (tree.verify_nodes > 0)
        parts.append(turns.assign(method=name))
    merged = pd.concat(parts).merge(rows, on=[*TURN, "method"], suffixes=("_predicted", ""))
    sums = merged.groupby("method", sort=False)[["new_tok_predicted", "time_ms", "decode_ms"]].sum()
    # 3. speeds, predicted and measured
    settings = [setting(trees[name]) if name in trees else {} for name in sums.index]
    table = pd.DataFrame(settings, sums.index, SETTING)
    table = table.astype(dict.fromkeys(SETTING[:-1], "Int64"))
    for kind, column in (("predicted", "time_ms"), ("measured", "decode_ms")):
        ms = ms_per_tok(sums[column], sums["new_tok_predicted"])
        table[f"{kind}_ms"] = ms
        table[f"{kind}_speedup"] = speedup(ms[AUTOREGRESSIVE], ms)
    table["error_frac"] = table["measured_ms"] / table["predicted_ms"] - 1
    table["relative_frac"] = table["predicted_speedup"] / table["measured_speedup"] - 1
    # 4. single numbers; an error that all trees share is the machine's drift
    of_trees = table.loc[list(trees)]
    drift_frac = float(of_trees["measured_ms"].sum() / of_trees["predicted_ms"].sum() - 1)
    apart = np.log(table["error_frac"] + 1) - np.log1p(drift_frac)
    within = apart.abs() <= costs.uncertainty_frac
    table["within_costs"] = within.where(table.index != AUTOREGRESSIVE)
    drafted = merged[merged["method"] != AUTOREGRESSIVE]
    off = of_trees[["error_frac", "relative_frac"]].abs().astype(float)
    ranks = of_trees["predicted_ms"].corr(of_trees["measured_ms"], method="spearman")
    facts = {
        "trees": len(trees),
        "turns": len(compared.turns),
        "left_out": len(trace.turns) - len(compared.turns),
        "cycles_differing": int((drafted["cycles"] != drafted["cycles_predicted"]).sum()),
        "spearman": float(ranks),
        "drift_frac": drift_frac,
        "uncertainty_frac": float(costs.uncertainty_frac),
        "median_frac": float(off["error_frac"].median()),
        "median_relative_frac": float(off["relative_frac"].median()),
        "worst_frac": float(off["error_frac"].max()),
        "worst_relative_frac": float(off["relative_frac"].max()),
    }
    columns = [*SETTING, "predicted_ms", "measured_ms", "error_frac", "predicted_speedup"]
    columns += ["measured_speedup", "relative_frac", "within_costs"]
    return LiveCheck(table[columns].reset_index(), facts, run, trace, trees)


def _check(pair: Pair, trace: Trace, costs: CostModel | CalibrateConfig) -> None:
    """SpecdecError for a recording or costs of another pair, precision or machine."""
    here = describe_pair(pair)
    header = trace.header
    if header.get("temperature", 0.0) != 0:
        raise SpecdecError("a live check decodes greedily, but this recording was sampled.")
    sources = [("recording", header["pair"], header.get("dtype"), header.get("weights"))]
    if isinstance(costs, CostModel):
        if costs.kind != "calibrated" or not costs.check_machine():
            why = f"the cost model {costs.name!r} is not of this machine"
            raise SpecdecError(f"{why}; run specdec.calibrate(pair) here first.")
        weights = here["weights"] if costs.pair == here["pair"] else None
        sources.append(("cost model", costs.pair, costs.dtype, weights))
    for source, name, dtype, weights in sources:
        if (dtype, weights) != (here["dtype"], here["weights"]):
            of_pair = f"{here['pair']!r} in {here['dtype']}"
            why = f"the {source} belongs to the pair {name!r} in {dtype}, not to this {of_pair}"
            raise SpecdecError(f"{why}; record and calibrate this pair.")
