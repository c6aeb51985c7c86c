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
from specdec.core.tree_config import TREES, TreeConfig
from specdec.costs.calibrate import Calibration
from specdec.costs.measure import CalibrateConfig
from specdec.costs.model import CostModel
from specdec.data.suites import Prompt, gather
from specdec.errors import SpecdecError, door
from specdec.evaluation import compare, metrics, stats
from specdec.evaluation.bench import EvaluateConfig, evaluate
from specdec.evaluation.compare import (
    PER_SUITE,
    RANDOM,
    RATIOS,
    TUNED,
    Baselines,
    Comparison,
    warn_elsewhere,
)
from specdec.evaluation.methods import AUTOREGRESSIVE
from specdec.identity import Method
from specdec.models.fingerprint import describe_pair
from specdec.replays.static_trees import (
    SETTING,
    fastest,
    judged_shapes,
    setting,
    static_grid,
    static_turns,
    tree_of,
)
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
    suites,
    baselines: Baselines,
    config: EvaluateConfig | None = None,
    *,
    seeds: int = 1,
    calibration: CalibrateConfig | None = None,
    **settings,
) -> Live:
    """Decode the test part of `suites` with plain decoding, baselines and policies, interleaved
    prompt by prompt.

    policies: name -> policies, the first `seeds` of which are used; they stay unchanged. suites:
    names, as in the recording of `baselines`; each has its own run, which includes the suite's own
    tree.
    calibration: calibrate too, in pieces between the prompts. settings: fields of EvaluateConfig by
    name. The same call continues a stopped one.
    """
    config = runs.configured(config or LIVE, EvaluateConfig, settings)
    suites = [suites] if isinstance(suites, str) else list(suites)
    own_trees = [baselines.of_suite(suite) for suite in suites]
    policies = baselines.by_method(policies)
    labels = {}
    methods = {}
    for name, some in policies.items():
        for seed, policy in enumerate(some[:seeds]):
            warn_elsewhere(policy, pair=pair.name)
            label = name if min(seeds, len(some)) == 1 else f"{name} #{seed}"
            labels[label], methods[label] = (name, seed), policy
    done = []
    timing = calibration and Calibration(pair, calibration)
    between = timing and (lambda frac: timing.go_on(frac / len(suites)))
    for suite, own_tree in zip(suites, own_trees, strict=True):
        trees = {
            baselines.default: baselines.defaults[0],
            TUNED: baselines.tuned,
            PER_SUITE: own_tree,
        }
        static = {name: Static.of(tree) for name, tree in trees.items()}
        compared = {
            AUTOREGRESSIVE: AUTOREGRESSIVE,
            **static,
            RANDOM: baselines.random(),
            **copy.deepcopy(methods),
        }
        name = f"{config.name}_{runs.plain_name(suite.replace('/', '_'))}"
        own = dataclasses.replace(config, part="test", name=name)
        done.append(evaluate(compared, suite, pair, own, between=between))
    tables = [
        pd.concat([run.read_table(kind) for run in done], ignore_index=True)
        for kind in ("prompts", "cycles")
    ]
    labels = {label: (Method.of(label), 0) for label in compared if label not in labels} | labels
    costs = _measured_beside(done[-1], timing) if timing else None
    where = {"temperature": config.temperature, "machine": tables[0]["machine"].iloc[0]}
    return Live(tuple(done), *tables, labels, tuple(policies), baselines.default, costs, **where)


def _measured_beside(run: runs.Run, timing: Calibration) -> CostModel:
    """The cost model measured between the prompts of a run, stored beside its rows."""
    path = run.path("costs.json")
    if timing.begun or not path.is_file():  # new decodings come with new costs
        timing.model().save(path)
    return CostModel.load(path)


def live_table(
    live: Live, *, prefill: bool = True, only: pd.DataFrame | None = None, **options
) -> pd.DataFrame:
    """One row per suite ("all" pools several), method and seed, measured live.

    Columns suite, method, seed, prompts, tok_per_s, tau and, each with a paired interval (_low,
    _high), speedup over plain decoding, over_default and over_tuned. p_default_holm and
    p_tuned_holm: after Holm over the policies of a suite. draft_calls and others are per cycle;
    policy_frac of their time; and metrics.text_facts.

    prefill: False leaves out the prompt's own forward, as replay does. only: (suite,
    prompt, turn) to keep. options: of `stats.interval`.
    """
    prompts = (
        live.prompts if only is None else live.prompts.merge(only[TURN].drop_duplicates(), on=TURN)
    )
    prompts = prompts if prefill else _without_prefill(prompts)
    if prompts.empty:
        raise SpecdecError(
            "there is nothing to compare: no prompt was decoded beyond its first token."
        )
    tested = {label for label, (method, _) in live.labels.items() if method in live.policies}
    table = stats.compare(prompts, AUTOREGRESSIVE, **options)
    table = table.drop(columns=["p_value", "p_holm", *stats.spread_names("mean_speedup")])
    drafting = prompts[prompts["method"] != AUTOREGRESSIVE]
    baselines = {"over_default": live.default, "over_tuned": TUNED}
    ratios = stats.summarise(drafting, baselines, family=tested, **options)
    shown = ["suite", "method"]
    for name in baselines:
        shown += [*stats.spread_names(name), *([f"{stats.p_name(name)}_holm"] if tested else [])]
    table = table.merge(ratios[shown], on=["suite", "method"], how="left")
    table = table.merge(_measures(live.cycles, prompts), on=["suite", "method"], how="left")
    table.insert(2, "seed", [live.labels[label][1] for label in table["method"]])
    table["method"] = [str(live.labels[label][0]) for label in table["method"]]
    methods = list(dict.fromkeys(method for method, _ in live.labels.values()))
    facts = {"temperature": live.temperature, "machine": live.machine}
    return identity.with_fields(stats.in_order(table, methods), methods, **facts)


def _without_prefill(prompts: pd.DataFrame) -> pd.DataFrame:
    """Tokens after the first (which the prefill yields) and their time; turns that end with it are
    dropped.
    """
    longer = prompts[prompts.groupby(TURN)["new_tok"].transform("min") > 1]
    return longer.assign(new_tok=longer["new_tok"] - 1, total_ms=longer["decode_ms"])


def _measures(cycles: pd.DataFrame, prompts: pd.DataFrame) -> pd.DataFrame:
    """Draft calls and nodes per cycle, the policy's share of the time, and how many texts are equal
    and correct.
    """
    keys = [*TURN, "method", "repeat"]
    cycles = stats.with_all(cycles.merge(prompts[keys], on=keys))
    prompts = stats.with_all(prompts)
    groups = cycles.groupby(["suite", "method"], sort=False)
    table = groups[["draft_calls", "verify_nodes"]].mean()
    table["policy_frac"] = groups["policy_ms"].sum() / groups["total_ms"].sum()
    return table.join(metrics.text_facts(prompts), how="outer").reset_index()


def beside(comparison: Comparison, live: Live, **options) -> pd.DataFrame:
    """Replay's predictions next to live measurements, on common turns and without prefill on both
    sides.

    A live first cycle includes the drafter's reading of the prompt, so costs measured alongside add
    that to the turns of methods that draft.

    Columns suite, method, seed, prompts, and for each of RATIOS: replay_<ratio>, live_<ratio> with
    its interval, <ratio>_off (replay / live - 1) and <ratio>_inside (whether the interval holds the
    prediction; NA for a single prompt); replay_ms_per_tok, live_ms_per_tok and ms_per_tok_off. Both
    sides must have decoded with the same max_new_tokens. options: of `stats.interval`.
    """
    turns = comparison.turns.merge(
        _without_prefill(live.prompts)[[*TURN, "prompt_tok"]].drop_duplicates(), on=TURN
    )
    if turns.empty:
        raise SpecdecError(
            "replay and live share no turn; compare on the same suites, and record their test part."
        )
    if live.costs is not None:
        turns["time_ms"] += (turns["draft_calls"] > 0) * live.costs.reading_ms(turns["prompt_tok"])
        least = np.minimum(turns.groupby(TURN)["time_ms"].transform("min"), turns["plain_ms"])
        # the bound knows when to draft in no cycle
        turns["time_ms"] = turns["time_ms"].mask(turns["method"] == compare.CLAIRVOYANT, least)
    keys = ["suite", "method", "seed"]
    predicted = dataclasses.replace(comparison, turns=turns).table[[*keys, "ms_per_tok", *RATIOS]]
    both = live_table(live, prefill=False, only=turns, **options).merge(
        predicted, on=keys, suffixes=("", "_replay")
    )
    table = both[[*keys, "prompts"]].copy()
    for name in RATIOS:
        replayed = both[f"{name}_replay"]
        low = both[f"{name}_low"]
        high = both[f"{name}_high"]
        table[f"replay_{name}"] = replayed
        table[f"live_{name}"], table[f"live_{name}_low"], table[f"live_{name}_high"] = (
            both[name],
            low,
            high,
        )
        table[f"{name}_off"] = replayed / both[name] - 1
        table[f"{name}_inside"] = replayed.between(low, high).astype("boolean").mask(low.isna())
    table["replay_ms_per_tok"], table["live_ms_per_tok"] = (
        both["ms_per_tok"],
        1e3 / both["tok_per_s"],
    )
    table["ms_per_tok_off"] = table["replay_ms_per_tok"] / table["live_ms_per_tok"] - 1
    return table.join(both[[*identity.FIELDS, "temperature", "machine"]])


def agreement(table: pd.DataFrame) -> dict[str, float]:
    """Accuracy of replay's predictions over all methods of a table of `beside`, all suites
    together, as numbers by name.

    methods; median_frac and worst_frac: errors of milliseconds per token; spearman: their rank
    correlation; gain_median and
    gain_worst: difference between predicted and live gain over the tuned tree (0.02 is two
    percentage points).
    """
    suites = table["suite"].tolist()
    rows = table[table["suite"] == ("all" if "all" in suites else suites[0])]
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

    table: one row per tree, and one for plain decoding: method, total_tokens, depth, top_k,
    predicted_ms and measured_ms per token (prefill excluded), error_frac: predicted speed (tokens
    per second) over the measured one, less 1; predicted_speedup and measured_speedup over plain
    decoding of the same turns, relative_frac: their ratio, less 1; within_costs: whether a tree's
    error, beyond the one common to all trees, is within the costs' stated uncertainty.
    """

    table: pd.DataFrame
    # rank correlation of the trees' times
    spearman: float
    # relative extra time of all trees together over the prediction
    drift_frac: float
    # how many turns were compared, and left out as their live text differs (half precision)
    turns: int
    left_out: int
    # pairs of turn and tree with other cycles than predicted: 0 if the recording is exact
    cycles_differing: int
    # the bench's
    run: runs.Run
    # used for the prediction
    costs: CostModel = dataclasses.field(repr=False)
    # the compared turns
    trace: Trace = dataclasses.field(repr=False)

    def priced(self, costs: CostModel) -> LiveCheck:
        """The same decodings beside the predictions of other costs."""
        chosen = {row["method"]: tree_of(row) for row in self.trees.to_dict("records")}
        return dataclasses.replace(
            check_predictions(self.trace, costs, chosen, self.run), left_out=self.left_out
        )

    @property
    def trees(self) -> pd.DataFrame:
        """The rows of the table that are trees."""
        return self.table[self.table["method"] != AUTOREGRESSIVE]

    @property
    def facts(self) -> dict[str, float]:
        """All single-number results; median and worst: a tree's error, of its speed and of its
        speed-up over plain decoding.

        uncertainty_frac: the costs' relative uncertainty (95 %) in comparing two predicted trees.
        """
        off = self.trees[["error_frac", "relative_frac"]].abs().astype(float)
        median = off.median()
        worst = off.max()
        return {
            "trees": len(self.trees),
            "turns": self.turns,
            "left_out": self.left_out,
            "cycles_differing": self.cycles_differing,
            "spearman": float(self.spearman),
            "drift_frac": float(self.drift_frac),
            "uncertainty_frac": float(self.costs.uncertainty_frac),
            "median_frac": float(median["error_frac"]),
            "median_relative_frac": float(median["relative_frac"]),
            "worst_frac": float(worst["error_frac"]),
            "worst_relative_frac": float(worst["relative_frac"]),
        }


def pick_trees(
    trace: Trace, costs: CostModel, count: int = 10, part: str = "train", default="eagle3"
) -> dict:
    """name -> TreeConfig: the default, the tree tuned on `part`, and others evenly spread over the
    ranking there.

    Sizes are SIZES, depths and widths those of the recording. default: a name of TREES or a
    TreeConfig.
    """
    default = default if isinstance(default, TreeConfig) else TREES[default]
    trace = trace.select(part=part)
    static_turns(trace, costs, default)  # refuses a default that was not recorded
    sizes = [total for total in SIZES if total <= trace.most_nodes + 1]
    grid = static_grid(trace, costs, sizes, range(1, trace.depth + 1))
    trees = {"default": default, "tuned": fastest(grid)}
    ranked = map(tree_of, grid.sort_values("ms_per_tok", kind="stable")[SETTING].to_dict("records"))
    others = [tree for tree in dict.fromkeys(ranked) if tree not in trees.values()]
    if count < 2 or len(others) < count - 2:
        why = f"{count} trees were asked for, but {len(others) + 2} are there"
        raise SpecdecError(f"{why}; ask for 2 or more, or record more widths or depths.")
    points = min(count - 1, len(others))  # the fastest of the others is used if all are needed
    places = np.linspace(0, len(others) - 1, points)[points - (count - 2) :].round().astype(int)
    return trees | {tree.text: tree for tree in (others[place] for place in places)}


@runs.with_settings(CHECKED)
@door
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

    trees: name -> TreeConfig, two or more (see `pick_trees`). prompts: those recorded, if the
    recording is not of suites by name. settings: fields of EvaluateConfig; limit (2) takes the
    recording's first prompts per suite, of its part (test). The recording must be the pair's own
    and greedy, the cost model of this pair, precision and machine.
    costs: or how to measure them, in pieces between the prompts: then a change of the machine's
    speed since calibration is no error of the prediction.

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
    _check(pair, trace, costs, trees)
    trace, header = trace.select(part=config.part), trace.header
    first = (
        trace.turns.drop_duplicates("prompt")
        .groupby("suite", sort=False)
        .head(config.limit)["prompt"]
    )
    trace = trace.select(trace.turns["prompt"].isin(first))
    items = _items(trace, prompts, config.folder, header.get("seed", 0))
    for tree in trees.values():
        judged_shapes(trace, tree)  # refuses unrecorded trees before anything is decoded
    methods = {AUTOREGRESSIVE: AUTOREGRESSIVE} | {
        name: Static.of(tree) for name, tree in trees.items()
    }
    decoding = dict(max_new_tokens=header["max_new_tokens"], temperature=0.0, limit=None, part=None)
    timing = Calibration(pair, costs) if isinstance(costs, CalibrateConfig) else None
    run = evaluate(
        methods,
        items,
        pair,
        dataclasses.replace(config, **decoding),
        between=timing and timing.go_on,
    )
    return check_predictions(trace, _measured_beside(run, timing) if timing else costs, trees, run)


def check_predictions(
    trace: Trace, costs: CostModel, trees: dict[str, TreeConfig], run: runs.Run
) -> LiveCheck:
    """The LiveCheck of a finished bench run of the turns of `trace`, plain and with `trees`."""
    rows = run.read_table("prompts").merge(trace.turns[[*TURN, "kept_tok"]], on=TURN)
    same_text = (
        (rows["same"] & (rows["new_tok"] == rows["kept_tok"]))
        .groupby([rows[name] for name in TURN])
        .all()
    )
    index = pd.MultiIndex.from_frame(trace.turns[TURN])
    compared = trace.select(same_text.reindex(index, fill_value=False).to_numpy())
    predicted = {name: static_turns(compared, costs, tree) for name, tree in trees.items()}
    turns = next(iter(predicted.values()))
    # the live first cycle includes it
    read_ms = costs.reading_ms(compared.turns["prompt_tok"].to_numpy())
    for name, tree in trees.items():
        predicted[name]["time_ms"] += read_ms * (tree.verify_nodes > 0)
    predicted = {AUTOREGRESSIVE: turns.assign(time_ms=turns["plain_ms"]), **predicted}
    predicted = pd.concat([turns.assign(method=name) for name, turns in predicted.items()])
    both = predicted.merge(rows, on=[*TURN, "method"], suffixes=("_predicted", ""))
    sums = both.groupby("method", sort=False)[["new_tok_predicted", "time_ms", "decode_ms"]].sum()
    table = pd.DataFrame(
        [setting(trees[name]) if name in trees else {} for name in sums.index], sums.index, SETTING
    )
    table = table.astype(dict.fromkeys(SETTING[:-1], "Int64"))
    for kind, column in (("predicted", "time_ms"), ("measured", "decode_ms")):
        table[f"{kind}_ms"] = ms_per_tok(sums[column], sums["new_tok_predicted"])
        table[f"{kind}_speedup"] = speedup(
            table.loc[AUTOREGRESSIVE, f"{kind}_ms"], table[f"{kind}_ms"]
        )
    table["error_frac"] = table["measured_ms"] / table["predicted_ms"] - 1
    table["relative_frac"] = table["predicted_speedup"] / table["measured_speedup"] - 1
    times = table.loc[list(trees), ["predicted_ms", "measured_ms"]]
    spearman = float(times["predicted_ms"].corr(times["measured_ms"], method="spearman"))
    drift_frac = float(times["measured_ms"].sum() / times["predicted_ms"].sum() - 1)
    apart = np.log(table["error_frac"] + 1) - np.log1p(drift_frac)
    table["within_costs"] = (apart.abs() <= costs.uncertainty_frac).where(
        table.index != AUTOREGRESSIVE
    )
    differing = (both["cycles"] != both["cycles_predicted"]) & (both["method"] != AUTOREGRESSIVE)
    counts = len(compared.turns), len(trace.turns) - len(compared.turns), int(differing.sum())
    shown = [
        "predicted_ms",
        "measured_ms",
        "error_frac",
        "predicted_speedup",
        "measured_speedup",
        "relative_frac",
    ]
    table = table[[*SETTING, *shown, "within_costs"]].reset_index()
    return LiveCheck(table, spearman, drift_frac, *counts, run, costs, compared)


def _check(pair: Pair, trace: Trace, costs: CostModel | CalibrateConfig, trees) -> None:
    here = describe_pair(pair)
    header = trace.header
    if header.get("temperature", 0.0) != 0:
        raise SpecdecError(
            "a live check decodes greedily, but this recording was sampled; record greedily."
        )
    if isinstance(costs, CostModel) and (costs.kind != "calibrated" or not costs.check_machine()):
        why = f"the cost model {costs.name!r} is not of this machine"
        raise SpecdecError(f"{why}; run specdec.calibrate(pair) here first.")
    whose = [
        ("recording", header["pair"], header.get("dtype"), header.get("weights") == here["weights"])
    ]
    if isinstance(costs, CostModel):
        whose.append(("cost model", costs.pair, costs.dtype, costs.pair == here["pair"]))
    for what, name, dtype, same in whose:
        if not same or dtype != here["dtype"]:
            of_pair = f"{here['pair']!r} in {here['dtype']}"
            why = f"the {what} belongs to the pair {name!r} in {dtype}, not to this {of_pair}"
            raise SpecdecError(f"{why}; record and calibrate this pair.")
    if not isinstance(trees, dict) or len(trees) < 2 or AUTOREGRESSIVE in trees:
        why = f"trees is a dict of two or more names, none {AUTOREGRESSIVE!r}, and TreeConfigs"
        raise SpecdecError(f"{why}; see pick_trees.")


def _items(trace: Trace, prompts, folder, seed: int) -> list[Prompt]:
    """The prompts of the recording's turns, in its order."""
    suites = list(dict.fromkeys(trace.turns["suite"])) if prompts is None else prompts
    items = {item.id: item for item in gather(suites, folder=folder, seed=seed)}
    wanted = list(dict.fromkeys(trace.turns["prompt"]))
    if missing := [prompt for prompt in wanted if prompt not in items]:
        why = f"the recorded prompt {missing[0]!r} is not among the prompts given"
        raise SpecdecError(f"{why}; pass what was recorded.")
    return [items[prompt] for prompt in wanted]
