"""Controllers beside everything they must be compared with, in replay: one table per suite, seeds and prompts counted apart.

Trees that never change are chosen on the parts "train" and "tune" of a recording, everybody is judged on "test", and every
policy pays for its answers. `judging_live` measures the same methods by the clock. Trains nothing.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specdec.core.policy import Policy, RandomPolicy, Static
from specdec.core.rates import SUMS, TURN, with_rates
from specdec.core.records import EXTEND, SIZE
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import stats
from specdec.policies.base import load_policy
from specdec.policies.ltd import combine
from specdec.replays.oracle import DEFAULTS, clairvoyant, headroom
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import SETTING, fastest, static_grid

CHOSEN_ON = ("train", "tune")
TUNED, PER_SUITE, RANDOM = "tuned static", "per-suite tuned static", "random"
ORACLE, CLAIRVOYANT = "oracle tree", "clairvoyant"
RATIOS = ("speedup", "over_default", "over_tuned")
MEASURES = ("ms_per_tok", "tau", *RATIOS, "headroom_frac", "draft_calls", "verify_nodes", "policy_frac")
_COUNTED = [*SUMS, "draft_calls", "verified_tok", "policy_ms"]


@dataclass(frozen=True)
class Opponents:
    """Trees that never change: defaults (the first is "the default"), tuned on all suites together, and on each alone."""

    defaults: tuple[TreeConfig, ...]
    tuned: TreeConfig
    per_suite: dict[str, TreeConfig]

    @property
    def default(self) -> str:
        """The name of the default among the methods."""
        return default_name(self.defaults[0])


def default_name(tree: TreeConfig) -> str:
    return f"default ({tree.total_tokens}, {tree.depth}, {tree.top_k})"


def choose_opponents(trace, costs, *, parts=CHOSEN_ON, defaults=DEFAULTS, **grid) -> Opponents:
    """The fastest static trees on `parts` of a recording. grid: total_tokens, depths, top_ks of `static_grid`."""
    by_suite = static_grid(trace.select(trace.turns["part"].isin(parts)), costs, by="suite", **grid)
    tuned = fastest(by_suite.groupby(SETTING, as_index=False)[SUMS].sum())
    per_suite = {suite: fastest(rows) for suite, rows in by_suite.groupby("suite", sort=False)}
    return Opponents(tuple(defaults), tuned, per_suite)


@dataclass(frozen=True)
class Judged:
    """What `judge_replay` found.

    table: one row per suite ("all" pools them), method and seed: suite, method, seed, turns, and MEASURES: speedup over
    plain decoding, over_default and over_tuned the same over those trees, draft_calls and verify_nodes per cycle (means),
    policy_frac the policy's share of the time, policy_ms what one answer was charged (NaN for references), also by system.
    turns: one row per turn, method and seed, what `Replayed.table` counts. cycles: one row per cycle of all but the bounds.
    """

    table: pd.DataFrame
    turns: pd.DataFrame
    cycles: pd.DataFrame
    opponents: Opponents
    policy_ms: dict[str, float]


def judge_replay(
    trace,
    costs,
    policies: dict[str, list[Policy]],
    *,
    opponents: Opponents | None = None,
    part: str = "test",
    policy_ms: dict[str, float] | None = None,
    random_seeds=(0, 1, 2),
    progress: bool = True,
    **grid,
) -> Judged:
    """Judge `policies` on the turns of `part`, beside the default trees, tuned static, per-suite tuned static, a random
    policy (any number of levels and nodes inside the default's limits), the oracle tree and the clairvoyant bound.

    policies: system -> its policies, one per training seed. policy_ms: what one answer of a system costs; systems that are
    not named are measured on this machine (`answer_ms` of their first policy). opponents: default `choose_opponents`, to
    which grid goes. The policies themselves are left as they are. SpecdecError for answers that were not recorded, names
    that are taken, or a part that trees are chosen on.
    """
    if part in CHOSEN_ON:
        raise SpecdecError(
            f"part {part!r} is what trees and policies are chosen on; judge on another part, such as test."
        )
    judged, policies = trace.select(part=part), listed(policies)
    opponents = opponents or choose_opponents(trace, costs, **grid)
    references = static_policies(opponents) | {RANDOM: [random_policy(opponents, seed) for seed in random_seeds]}
    taken = [name for name in policies if name in {*references, PER_SUITE, ORACLE, CLAIRVOYANT}]
    if taken:
        raise SpecdecError(f"the name {taken[0]!r} belongs to a reference; call the policy otherwise.")
    charged, turns, cycles = dict(policy_ms or {}), [], []
    jobs = [(name, seed, one) for name, many in (references | policies).items() for seed, one in enumerate(many)]
    for name, seed, policy in tqdm(jobs, desc="replay", disable=not progress, leave=False):
        if name in policies:
            warn_elsewhere(policy, pair=trace.header["pair"], costs=costs.name)
            charged.setdefault(name, _measured(judged, policy, costs, name))
        found = _replayed(judged, policy, costs, charged.get(name, 0.0), name)
        for kept, rows in ((turns, found.table), (cycles, found.cycles)):
            kept.append(rows.assign(method=name, seed=seed))
    own, own_cycles = _per_suite(judged, costs, opponents)
    turns = [*turns, own, *_bounds(judged, costs, opponents.tuned)]
    turns, cycles = (pd.concat(rows, ignore_index=True) for rows in (turns, [*cycles, own_cycles]))
    charged = {name: charged[name] for name in policies}
    table = replay_table(turns, opponents)
    return Judged(table.assign(policy_ms=table["method"].map(charged)), turns, cycles, opponents, charged)


def listed(policies: dict) -> dict[str, list[Policy]]:
    """{system: [policy per seed]}; a single policy counts as one seed. SpecdecError for anything else."""
    if not isinstance(policies, dict):
        raise SpecdecError("policies is a dict of systems and their policies, such as {'ours': [policy]}.")
    found = {name: list(one) if isinstance(one, list | tuple) else [one] for name, one in policies.items()}
    for name, many in found.items():
        if not many or not all(hasattr(one, "answer") for one in many):
            raise SpecdecError(
                f"{name!r} must be a policy or a list of policies, one per seed; got {policies[name]!r}."
            )
    return found


def static_policies(opponents: Opponents) -> dict[str, list[Policy]]:
    """The default trees and the tuned one as policies, by name."""
    trees = {default_name(tree): tree for tree in opponents.defaults} | {TUNED: opponents.tuned}
    return {name: [Static.of(tree)] for name, tree in trees.items()}


def random_policy(opponents: Opponents, seed: int = 0) -> RandomPolicy:
    """Stops drafting and cuts the tree at random, inside the default tree: what any answer at all costs or gains."""
    return RandomPolicy(opponents.defaults[0], seed, asks=(EXTEND, SIZE))


def warn_elsewhere(policy: Policy, **here) -> None:
    """Warn where a policy, or a part of a Chain, was trained for another pair, or for other costs and not priced anew."""
    for one in getattr(policy, "policies", (policy,)):
        if hasattr(one, "warn_elsewhere"):
            settled = {"costs"} if getattr(one, "priced_for", None) == here.get("costs") else set()
            one.warn_elsewhere(**{name: value for name, value in here.items() if name not in settled})


def _measured(trace, policy: Policy, costs, name: str) -> float:
    try:
        return answer_ms(trace, copy.deepcopy(policy), costs)
    except SpecdecError as error:
        raise SpecdecError(f"{name!r} cannot be judged on this recording: {error}") from error


def _replayed(trace, policy: Policy, costs, policy_ms: float, name: str):
    try:
        return replay(trace, copy.deepcopy(policy), costs, policy_ms=policy_ms, keep_cycles=True)
    except SpecdecError as error:
        raise SpecdecError(f"{name!r} cannot be judged on this recording: {error}") from error


def _per_suite(trace, costs, opponents: Opponents) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Turns and cycles of every suite under its own tree."""
    suites, found = trace.turns["suite"], []
    for suite in dict.fromkeys(suites):
        if suite not in opponents.per_suite:
            raise SpecdecError(
                f"no turn of suite {suite!r} was recorded to tune on; record some or leave the suite out."
            )
        own = Static.of(opponents.per_suite[suite])
        found.append(_replayed(trace.select((suites == suite).to_numpy()), own, costs, 0.0, PER_SUITE))
    turns, cycles = (pd.concat([getattr(one, name) for one in found]) for name in ("table", "cycles"))
    return turns.assign(method=PER_SUITE, seed=0), cycles.assign(method=PER_SUITE, seed=0)


def _bounds(trace, costs, tuned: TreeConfig) -> list[pd.DataFrame]:
    """Turns of the best tree in every cycle, of the tuned one's width and of any; whoever knows the text could do that."""
    found = []
    for name, top_ks in ((ORACLE, [tuned.top_k]), (CLAIRVOYANT, None)):
        bound = clairvoyant(trace, costs, top_ks)
        answers = bound.answers.assign(
            draft_calls=bound.answers["expansions"] + 1, verified_tok=bound.answers["verify_nodes"] + 1
        )
        sums = answers.groupby(TURN, sort=False)[["draft_calls", "verified_tok"]].sum().reset_index()
        found.append(bound.turns.merge(sums, on=TURN).assign(policy_ms=0.0, method=name, seed=0))
    return found


def replay_table(turns: pd.DataFrame, opponents: Opponents) -> pd.DataFrame:
    """`Judged.table` but policy_ms, of any selection of `Judged.turns` that holds the same turns for every method."""
    pooled = pd.concat([turns, turns.assign(suite="all")])
    groups = pooled.groupby(["suite", "method", "seed"], sort=False)
    table = with_rates(groups[_COUNTED].sum()).assign(turns=groups.size()).reset_index()
    if (table.groupby("suite")["new_tok"].nunique() > 1).any():
        raise SpecdecError("the methods did not decode the same turns; judge them on the same recording.")

    def of(method: str) -> pd.Series:
        return table["suite"].map(table[table["method"] == method].set_index("suite")["ms_per_tok"])

    table["over_default"] = of(opponents.default) / table["ms_per_tok"]
    table["over_tuned"] = of(TUNED) / table["ms_per_tok"]
    table["headroom_frac"] = headroom(table["ms_per_tok"], of(TUNED), of(CLAIRVOYANT))
    table["draft_calls"] /= table["cycles"]
    table["verify_nodes"] = table["verified_tok"] / table["cycles"] - 1
    table["policy_frac"] = table["policy_ms"] / table["time_ms"]
    return table[["suite", "method", "seed", "turns", *MEASURES]]


# ---- seeds and prompts -----------------------------------------------------------------------------------------------
def over_seeds(judged: Judged, *, level: float = stats.LEVEL, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """One row per suite and method, with the spread over training seeds and the one over prompts.

    Columns suite, method, seeds, prompts, and for each of MEASURES its mean over seeds with Student's t-interval
    (<measure>_low, _high; NaN for one seed). For each of RATIOS also <ratio>_prompts_low and _high: paired bootstrap over
    prompts of the mean over seeds. p_default, p_tuned: Wilcoxon over prompts, times averaged over seeds; p_default_holm and
    p_tuned_holm adjust over all suites and policies (references are no hypotheses of ours and get none).
    """
    policies, found = set(judged.policy_ms), []
    for (suite, method), rows in judged.table.groupby(["suite", "method"], sort=False):
        row = {"suite": suite, "method": method, "seeds": len(rows)}
        for name in MEASURES:
            row |= _interval(name, rows[name].to_numpy(), level)
        times = _prompt_times(judged, suite, method)
        row["prompts"] = len(times)
        for number, name in enumerate(RATIOS):
            columns = times[:, [number, *range(len(RATIOS), times.shape[1])]]
            spread = stats.bootstrap(columns, _mean_ratio, level=level, resamples=resamples, seed=seed)
            row |= {f"{name}_prompts_low": spread.low, f"{name}_prompts_high": spread.high}
        if method in policies:
            own = times[:, len(RATIOS) :].mean(axis=1)
            row |= {"p_default": stats.wilcoxon(own, times[:, 1]), "p_tuned": stats.wilcoxon(own, times[:, 2])}
        found.append(row)
    table = pd.DataFrame(found)
    tested = table["method"].isin(policies)
    for name in ("p_default", "p_tuned"):
        if tested.any():
            table.loc[tested, f"{name}_holm"] = stats.holm(table.loc[tested, name])
    return table


def _mean_ratio(means: np.ndarray) -> np.ndarray:
    return (means[..., :1] / means[..., 1:]).mean(axis=-1)


def _interval(name: str, values: np.ndarray, level: float) -> dict:
    """Mean and Student's t-interval of independent seeds."""
    from scipy.stats import t

    mean, count = float(values.mean()), len(values)
    reach = t.ppf((1 + level) / 2, count - 1) * values.std(ddof=1) / count**0.5 if count > 1 else np.nan
    return {name: mean, f"{name}_low": mean - reach, f"{name}_high": mean + reach}


def _prompt_times(judged: Judged, suite: str, method: str) -> np.ndarray:
    """Milliseconds [P, 3 + S] per prompt: plain, default, tuned, and the method under each seed."""
    turns = judged.turns if suite == "all" else judged.turns[judged.turns["suite"] == suite]

    def summed(name: str, column: str = "time_ms") -> pd.DataFrame:
        rows = turns[turns["method"] == name]
        return rows.groupby(["suite", "prompt", "seed"])[column].sum().unstack("seed")

    tables = [summed(TUNED, "plain_ms"), summed(judged.opponents.default), summed(TUNED), summed(method)]
    return pd.concat(tables, axis=1).to_numpy(float)


# ---- files -----------------------------------------------------------------------------------------------------------
def load_controllers(folders: dict[str, list]) -> dict[str, list[Policy]]:
    """system -> policies, from system -> folders, one per seed. A folder is what `policy.save` wrote, or a training's
    out_dir (its policy/; of LTD's rounds the last of each kind); LTD's two policies may also be given as a pair."""
    found = {}
    for name, many in folders.items():
        many = [many] if isinstance(many, str | Path) else list(many)
        found[name] = [_load(one) for one in many]
    return listed(found)


def _load(folder) -> Policy:
    if isinstance(folder, list | tuple):
        both = {one.kind: one for one in map(load_policy, folder)}
        if set(both) != {EXTEND, SIZE}:
            raise SpecdecError(f"{list(map(str, folder))} must be LTD's two policies, one for depth and one for size.")
        return combine(both[EXTEND], both[SIZE])
    folder = Path(folder)
    for place in (folder, folder / "policy"):
        if (place / "policy.json").is_file():
            return load_policy(place)
    last = {}
    for place in folder.glob("iter*-*/policy/policy.json"):
        number, kind = re.fullmatch(r"iter(\d+)-(\w+)", place.parts[-3]).groups()
        last[kind] = max(last.get(kind, (-1, None)), (int(number), place.parent))
    if set(last) != {"depth", "size"}:
        raise SpecdecError(f"{folder} holds no policy.json and no rounds of LTD; give a folder that policy.save wrote.")
    return combine(load_policy(last["depth"][1]), load_policy(last["size"][1]))
