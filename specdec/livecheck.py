"""Does the machine do what replay predicts? Static trees decoded live, next to their predicted times on the same turns.

A recording and a cost model say what every tree would take; here the same prompts are decoded by the bench, all trees in
turns, and both are put into one table. Knows nothing about training or figures.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from specdec import runs
from specdec.bench import evaluate
from specdec.config import TREES, SpecdecError, TreeConfig, pool_size
from specdec.hub import Pair
from specdec.latency import CostModel
from specdec.methods import AUTOREGRESSIVE, Item, describe_pair, gather
from specdec.policy import Static
from specdec.statics import SETTING, Prices, fastest, static_grid, static_turns
from specdec.trace import Trace

ASKED = {"spearman": 0.9, "error_frac": 0.1}  # a check beyond these has failed
SIZES = (4, 8, 12, 16, 24, 32, 48, 60, 80, 100, 128, 160, 200, 241)  # total_tokens that trees are picked from
_TURN = ["suite", "prompt", "turn"]


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
    turns = trace.turns.set_index(_TURN)
    rows = live.reset_index().merge(turns["kept_tok"].reset_index(), on=_TURN)
    rows["equal"] = rows["same"] & (rows["new_tok"] == rows["kept_tok"])
    equal = rows.groupby(_TURN)["equal"].all()
    kept = trace.select(equal.reindex(turns.index, fill_value=False).to_numpy())
    keys = kept.turns[_TURN]
    rows = rows.merge(keys, on=_TURN)
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
        both = own.merge(predicted[[*_TURN, "cycles"]], on=_TURN, suffixes=("", "_predicted"))
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
