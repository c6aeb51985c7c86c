"""Controllers by the clock: plain decoding, trees that never change, a random policy and every controller, interleaved.

A thin layer over `bench.evaluate`; the trees are those that `judging.choose_opponents` found on a recording. `beside` sets
what replay predicted next to what was measured, on the same prompts. Trains nothing.

Does the machine do what replay predicts? Static trees decoded live, next to their predicted times on the same turns.

A recording and a cost model say what every tree would take; here the same prompts are decoded by the bench, all trees in
turns, and both are put into one table. Knows nothing about training or figures.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.rates import TURN
from specdec.core.tree_config import TREES, TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.data.prompts import Item, gather
from specdec.errors import SpecdecError
from specdec.evaluation import bench, stats
from specdec.evaluation.bench import evaluate
from specdec.evaluation.compare import (
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
from specdec.evaluation.methods import AUTOREGRESSIVE
from specdec.models.fingerprint import describe_pair
from specdec.replays.static_trees import SETTING, Prices, fastest, static_grid, static_turns
from specdec.replays.trace import Trace

_PROMPT = ["suite", "prompt"]
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
    pair: Pair,
    policies: dict,
    suites,
    opponents: Opponents,
    *,
    seeds: int = 1,
    per_suite: bool = True,
    random_seed: int = 0,
    name: str = "controllers",
    **options,
) -> Live:
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
    prompts = live.prompts if only is None else live.prompts.merge(only[TURN].drop_duplicates(), on=TURN)
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
    shortest = prompts.groupby(TURN)["new_tok"].transform("min")
    kept = prompts[shortest > 1]
    return kept.assign(new_tok=kept["new_tok"] - 1, total_ms=kept["decode_ms"])


def _measures(live: Live, prompts: pd.DataFrame) -> pd.DataFrame:
    """Draft calls and nodes per cycle, the policy's share of the time, and how many texts are the same."""
    keys = [*TURN, "method", "repeat"]
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
    decoded = _without_prefill(live.prompts)[TURN].drop_duplicates()
    turns = judged.turns.merge(decoded, on=TURN)
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


# ---- from livecheck ----------------------------------------


ASKED = {"spearman": 0.9, "error_frac": 0.1}  # a check beyond these has failed
SIZES = (4, 8, 12, 16, 24, 32, 48, 60, 80, 100, 128, 160, 200, 241)  # total_tokens that trees are picked from


@dataclasses.dataclass(frozen=True)
class LiveCheck:
    """What `live_check` found.

    table: one row per tree, and one for plain decoding: method, total_tokens, depth, top_k, predicted_ms and measured_ms
    per token (prefill excluded), error_frac: predicted speed (tokens per second) over the measured one, less 1;
    predicted_speedup and measured_speedup over plain decoding of the same turns, relative_frac: their ratio, less 1.
    spearman: rank correlation of the trees' times. drift_frac: how much longer all trees together took than predicted.
    turns: how many were compared; left_out: turns whose live text differs from the recorded one (half precision).
    cycles_differing: pairs of turn and tree with another number of cycles than predicted: 0 wherever the recording is
    exact. run: the bench's run.
    """

    table: pd.DataFrame
    spearman: float
    drift_frac: float
    turns: int
    left_out: int
    cycles_differing: int
    run: runs.Run

    @property
    def trees(self) -> pd.DataFrame:
        """The rows of the table that are trees."""
        return self.table[self.table["method"] != AUTOREGRESSIVE]

    @property
    def worst_frac(self) -> float:
        """The largest error of a tree's predicted speed, unsigned."""
        return float(self.trees["error_frac"].abs().max())

    @property
    def worst_relative_frac(self) -> float:
        """The same for speeds over plain decoding, which a machine that is slower today does not change."""
        return float(self.trees["relative_frac"].abs().max())

    @property
    def holds(self) -> bool:
        """Whether ranks and speeds are as close as asked."""
        return self.spearman >= ASKED["spearman"] and self.worst_frac <= ASKED["error_frac"]

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        verdict = "as asked" if self.holds else "less than the 0.9 and 10 % asked for"
        out = f"; {self.left_out} turns with another text were left out" if self.left_out else ""
        return (
            f"{len(self.trees)} trees on {self.turns} turns: the ranks of predicted and measured speeds agree with "
            f"{self.spearman:.2f} (Spearman), the largest error of a speed is {self.worst_frac:.1%}, {verdict}. All together "
            f"took {self.drift_frac:+.1%} longer than predicted; speeds over plain decoding, which that does not touch, are off by "
            f"{self.worst_relative_frac:.1%} at most, and {self.cycles_differing} numbers of cycles differ{out}."
        )


def pick_trees(trace: Trace, costs: CostModel, count: int = 10, part: str = "train", default="eagle3") -> dict:
    """name -> TreeConfig: the default, the tree tuned on `part`, and others spread evenly over the ranking there.

    Sizes are SIZES, depths and widths all that were recorded. SpecdecError where fewer than `count` trees differ or the
    default (a name of config.TREES or a TreeConfig) was not recorded.
    """
    given = default if isinstance(default, TreeConfig) else TREES[default]
    judged = trace.select(part=part)
    static_turns(judged, costs, given)  # refuses a default that was not recorded
    sizes = [total for total in SIZES if total <= trace.most_nodes + 1]
    grid = static_grid(judged, costs, sizes, range(1, trace.depth + 1))
    found = {"default": given, "tuned": fastest(grid)}
    whole = grid["total_tokens"] <= 1 + pool_size(grid["depth"], grid["top_k"])  # others are cut to their pool
    ranked = grid[whole].sort_values("ms_per_tok", kind="stable")
    others = [tree for tree in map(_tree, ranked[SETTING].to_numpy()) if tree not in found.values()]
    if count < 2 or len(others) < count - 2:
        raise SpecdecError(
            f"{count} trees were asked for, but {len(others) + 2} are there; record more widths or depths."
        )
    for place in np.linspace(0, len(others) - 1, count - 1)[1:].round().astype(int) if count > 2 else ():
        tree = others[place]
        found[f"{tree.total_tokens},{tree.depth},{tree.top_k}"] = tree
    return found


def _tree(setting) -> TreeConfig:
    return TreeConfig(*(int(value) for value in setting))


def live_check(
    pair: Pair,
    trace: Trace,
    costs: CostModel,
    trees: dict[str, TreeConfig],
    *,
    limit: int = 2,
    prompts=None,
    part: str = "test",
    folder=None,
    repeats: int = 1,
    name: str = "live_check",
    scale: str = "laptop",
    progress: bool = True,
) -> LiveCheck:
    """Decode prompts of the recording with every tree, interleaved, and compare with what replay says of these turns.

    trees: name -> TreeConfig, two or more. limit: prompts per suite, the recording's first of `part`. prompts: where the
    recording was not made of suites by name, what it was made of. The recording must be the pair's own and greedy, the
    cost model of this pair, precision and machine; SpecdecError otherwise.
    """
    _check(pair, trace, costs, trees)
    chosen = trace.select(part=part)
    first = chosen.turns.drop_duplicates("prompt").groupby("suite", sort=False).head(limit)["prompt"]
    chosen = chosen.select(chosen.turns["prompt"].isin(first))
    items = _items(chosen, prompts, folder, trace.header.get("seed", 0))
    for tree in trees.values():
        static_turns(chosen, costs, tree)  # refuses what was not recorded, before anything is decoded
    methods = {AUTOREGRESSIVE: AUTOREGRESSIVE}
    methods |= {label: Static.of(tree) for label, tree in trees.items()}
    options = dict(max_new_tokens=trace.header["max_new_tokens"], repeats=repeats, name=name, scale=scale)
    run = evaluate(methods, items, pair, progress=progress, **options)
    return compare(chosen, costs, trees, run)


def compare(trace: Trace, costs: CostModel, trees: dict[str, TreeConfig], run: runs.Run) -> LiveCheck:
    """The LiveCheck of a finished bench run that decoded the turns of `trace` plainly and with `trees`."""
    live = run.read_table("prompts").set_index("method")
    turns = trace.turns.set_index(TURN)
    rows = live.reset_index().merge(turns["kept_tok"].reset_index(), on=TURN)
    rows["equal"] = rows["same"] & (rows["new_tok"] == rows["kept_tok"])
    equal = rows.groupby(TURN)["equal"].all()
    kept = trace.select(equal.reindex(turns.index, fill_value=False).to_numpy())
    keys = kept.turns[TURN]
    rows = rows.merge(keys, on=TURN)
    repeats = rows["repeat"].nunique()
    tokens, found, differing = int(kept.turns["positions"].sum()), [], 0
    plain_ms = Prices.of(kept, costs, kept.top_ks[:1]).plain(kept).sum()
    for label, tree in {AUTOREGRESSIVE: None, **trees}.items():
        own = rows[rows["method"] == label]
        row = {"method": label, "measured_ms": own["decode_ms"].sum() / repeats / tokens}
        if tree is None:
            found.append({**row, "predicted_ms": plain_ms / tokens})
            continue
        predicted = static_turns(kept, costs, tree)
        both = own.merge(predicted[[*TURN, "cycles"]], on=TURN, suffixes=("", "_predicted"))
        differing += int((both["cycles"] != both["cycles_predicted"]).sum())
        found.append({**row, **dataclasses.asdict(tree), "predicted_ms": predicted["time_ms"].sum() / tokens})
    table = pd.DataFrame(found)
    for kind in ("predicted", "measured"):
        table[f"{kind}_speedup"] = table[f"{kind}_ms"].iloc[0] / table[f"{kind}_ms"]
    table["error_frac"] = table["measured_ms"] / table["predicted_ms"] - 1
    table["relative_frac"] = table["predicted_speedup"] / table["measured_speedup"] - 1
    table[SETTING] = table[SETTING].astype("Int64")
    compared = ["predicted_ms", "measured_ms", "error_frac", "predicted_speedup", "measured_speedup", "relative_frac"]
    table = table[["method", *SETTING, *compared]]
    speeds = table.iloc[1:]
    correlation = float(spearmanr(speeds["predicted_ms"], speeds["measured_ms"]).statistic)
    drift = float(speeds["measured_ms"].sum() / speeds["predicted_ms"].sum() - 1)
    return LiveCheck(table, correlation, drift, len(kept.turns), len(turns) - len(kept.turns), differing, run)


def _check(pair: Pair, trace: Trace, costs: CostModel, trees) -> None:
    described = describe_pair(pair)
    if trace.header.get("weights") != described["weights"] or trace.header.get("dtype") != described["dtype"]:
        raise SpecdecError(
            f"the recording is of the pair {trace.header['pair']!r} in {trace.header.get('dtype')}, not of this "
            f"{described['pair']!r} in {described['dtype']}; record this pair."
        )
    if trace.header.get("temperature", 0.0) != 0:
        raise SpecdecError("a live check decodes greedily, but this recording was sampled; record with temperature=0.")
    if costs.kind != "calibrated" or not costs.check_machine():
        raise SpecdecError(
            f"the cost model {costs.name!r} is not of this machine; run specdec.calibrate(pair) here first."
        )
    if (costs.pair, costs.dtype) != (described["pair"], described["dtype"]):
        raise SpecdecError(
            f"the cost model {costs.name!r} is of the pair {costs.pair!r} in {costs.dtype}, not of {described['pair']!r} "
            f"in {described['dtype']}; calibrate this pair."
        )
    if not isinstance(trees, dict) or len(trees) < 2 or not all(isinstance(one, TreeConfig) for one in trees.values()):
        raise SpecdecError("trees is a dictionary of two or more names and TreeConfigs; see livecheck.pick_trees.")
    if AUTOREGRESSIVE in trees:
        raise SpecdecError(f"a tree cannot be called {AUTOREGRESSIVE!r}: plain decoding is measured under that name.")


def _items(trace: Trace, prompts, folder, seed: int) -> list[Item]:
    """The prompts of the recording's turns, in its order."""
    wanted = list(dict.fromkeys(trace.turns["prompt"]))
    suites = list(dict.fromkeys(trace.turns["suite"])) if prompts is None else prompts
    known = {item.id: item for item in gather(suites, folder=folder, seed=seed)}
    missing = [one for one in wanted if one not in known]
    if missing:
        raise SpecdecError(
            f"the recorded prompt {missing[0]!r} is not among the prompts given; pass what was recorded."
        )
    return [known[one] for one in wanted]
