"""Policies compared in replay with static trees, a random policy and bounds.

Static trees are chosen on some parts of the recording and all methods compared on another one; the
time of a policy's answers is included. `compare_live` measures the same methods live.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import scipy

from specdec import identity, runs
from specdec.core.policy import Policy, RandomPolicy, Static
from specdec.core.records import EXTEND, SIZE, SUMS, with_rates
from specdec.core.tree_config import TREES, TreeConfig
from specdec.costs.calibrate import measured_answer_ms
from specdec.costs.model import CostModel
from specdec.costs.profiles import prices
from specdec.errors import SpecdecError, warn
from specdec.evaluation import stats
from specdec.evaluation.methods import AUTOREGRESSIVE, load_controller
from specdec.evaluation.tuning import race_static
from specdec.identity import STATIC, Method
from specdec.parallel import parallel
from specdec.policies.base import choices_of, chose, shipped_folder
from specdec.replays.oracle import clairvoyant, headroom
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import SETTING, fastest, static_grid
from specdec.replays.trace import Trace, open_trace

CHOSEN_ON = ("train", "tune")
DEFAULTS = (TREES["eagle3"], TREES["eagle3-scripts"])
TUNED = Method(STATIC, identity.TUNED)
PER_SUITE = Method(STATIC, identity.PER_SUITE)
RANDOM = Method("random")
ORACLE_DEPTH, ORACLE_SIZE, ORACLE = (Method(f"oracle {what}") for what in ("depth", "size", "tree"))
CLAIRVOYANT = Method("clairvoyant")
RATIOS = ("speedup", "over_default", "over_tuned")
MEASURES = (
    "ms_per_tok",
    "tau",
    *RATIOS,
    "headroom_frac",
    "draft_calls",
    "verify_nodes",
    "policy_frac",
)


@dataclass(frozen=True)
class Baselines:
    """Static trees and the other methods that policies are compared with."""

    defaults: tuple[TreeConfig, ...]  # published trees; the first is "the default"
    tuned: TreeConfig  # the fastest over all suites
    per_suite: dict[str, TreeConfig]  # the fastest of each suite
    chosen_on: tuple[str, ...] = CHOSEN_ON  # the parts of the recording used for the choice

    @classmethod
    def choose(cls, trace, costs, *, parts=CHOSEN_ON, defaults=DEFAULTS, **grid) -> Baselines:
        """The fastest static trees on `parts` of a recording.

        grid: total_tokens, depths, top_ks of `static_grid`.
        """
        by_suite = static_grid(
            trace.select(trace.turns["part"].isin(parts)), costs, by="suite", **grid
        )
        tuned = fastest(by_suite.groupby(SETTING, as_index=False, sort=False)[SUMS].sum())
        per_suite = {suite: fastest(rows) for suite, rows in by_suite.groupby("suite", sort=False)}
        return cls(tuple(defaults), tuned, per_suite, tuple(parts))

    @classmethod
    def from_race(cls, pair, trace, costs, *, defaults=DEFAULTS, **settings) -> Baselines:
        """The trees that win a live race among the fastest in replay on the tune part
        (`race_static`).
        """
        race = race_static(pair, trace, costs, **settings)
        return cls(tuple(defaults), race.tuned, race.per_suite, ("tune",))

    @property
    def default(self) -> Method:
        """The default tree's method."""
        return next(iter(self.trees))

    @property
    def trees(self) -> dict[Method, TreeConfig]:
        """Trees that are the same for every suite, by method: the defaults and the tuned one."""
        return {Method(STATIC, identity.DEFAULT, tree.text): tree for tree in self.defaults} | {
            TUNED: self.tuned
        }

    def of_suite(self, suite: str) -> TreeConfig:
        """The tree tuned on one suite."""
        if suite not in self.per_suite:
            why = f"no turn of suite {suite!r} was recorded to tune on"
            raise SpecdecError(f"{why}; record some or leave the suite out.")
        return self.per_suite[suite]

    def random(self, seed: int = 0) -> RandomPolicy:
        """Stops drafting and cuts the default tree at random: the effect of arbitrary answers."""
        return RandomPolicy(self.defaults[0], seed, asks=(EXTEND, SIZE))

    @property
    def bounds(self) -> dict[Method, dict]:
        """Options of `clairvoyant` by method: which decisions an oracle that knows the text may
        take.

        An oracle chooses depth, size or both; the rest comes from the tuned tree. The clairvoyant
        chooses everything.
        """
        own = {"top_ks": [self.tuned.top_k], "beams": [self.tuned.beam]}
        depth = {"depths": [self.tuned.depth]}
        size = {"sizes": [self.tuned.verify_nodes]}
        return {ORACLE_DEPTH: own | size, ORACLE_SIZE: own | depth, ORACLE: own, CLAIRVOYANT: {}}

    def by_method(self, policies: dict) -> dict[Method, list[Policy]]:
        """{method: [policy per seed]}; a single policy counts as one seed. SpecdecError for names
        already in use.
        """
        taken = {*self.trees, AUTOREGRESSIVE, PER_SUITE, RANDOM, *self.bounds}
        lists = {}
        for name, some in policies.items():
            seeds = list(some) if isinstance(some, list | tuple) else [some]
            seeds = [load_controller(one) if isinstance(one, str | Path) else one for one in seeds]
            lists[Method.of(name)] = seeds
            if (
                name in taken
                or not seeds
                or not all(isinstance(policy, Policy) for policy in seeds)
            ):
                wanted = "a policy or a list of them, one per seed, under a name of no baseline"
                raise SpecdecError(f"{name!r} must be {wanted}.")
        return lists


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_replay`."""

    turns: pd.DataFrame  # one row per turn, method and seed, with the columns of `Replayed.table`
    cycles: pd.DataFrame  # one row per cycle of all methods but the bounds
    baselines: Baselines
    policy_ms: dict[Method, float]  # time charged for one answer of each policy
    uncertainty_frac: float = (
        0.0  # relative uncertainty (95 %) of the costs in a comparison of two times
    )
    temperature: float = 0.0  # of the recording
    machine: str = ""  # whose costs these are

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """One row per suite ("all" pools them), method and seed: these, turns, prompts, MEASURES
        and policy_ms.

        speedup is over plain decoding, over_default and over_tuned over those trees. draft_calls
        and verify_nodes are means per cycle, policy_frac is the policy's share of the time.
        policy_ms is missing for baselines. beyond_costs: whether over_tuned differs from 1 by more
        than the costs' uncertainty; otherwise it is no finding. The columns of `with_fields` come
        last.
        """
        turns = self.turns.assign(of=self.turns["suite"] + "/" + self.turns["prompt"].astype(str))
        groups = pd.concat([turns, turns.assign(suite="all")]).groupby(
            ["suite", "method", "seed"], sort=False
        )
        sums = groups[[*SUMS, "draft_calls", "verified_tok", "policy_ms"]].sum()
        table = (
            with_rates(sums)
            .assign(turns=groups.size(), prompts=groups["of"].nunique())
            .reset_index()
        )
        assert (table.groupby("suite")["new_tok"].nunique() == 1).all(), (
            "the methods did not decode the same turns"
        )

        def of(method: str) -> pd.Series:
            return table["suite"].map(
                table[table["method"] == method].set_index("suite")["ms_per_tok"]
            )

        table["over_default"] = of(self.baselines.default) / table["ms_per_tok"]
        table["over_tuned"] = of(TUNED) / table["ms_per_tok"]
        table["headroom_frac"] = headroom(table["ms_per_tok"], of(TUNED), of(CLAIRVOYANT))
        table["draft_calls"] /= table["cycles"]
        table["verify_nodes"] = table["verified_tok"] / table["cycles"] - 1
        table["policy_frac"] = table["policy_ms"] / table["time_ms"]
        table["policy_ms"] = table["method"].map(self.policy_ms)
        table["beyond_costs"] = self.beyond_costs(table["over_tuned"])
        shown = [
            "suite",
            "method",
            "seed",
            "turns",
            "prompts",
            *MEASURES,
            "policy_ms",
            "beyond_costs",
        ]
        return self.with_identity(table[shown])

    def with_identity(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with the fields of every row's method (`identity.FIELDS`), the temperature and
        the machine.
        """
        methods = [*self.baselines.trees, PER_SUITE, *self.policy_ms]
        return identity.with_fields(
            table, methods, temperature=self.temperature, machine=self.machine
        )

    def beyond_costs(self, ratio):
        """Whether a ratio of two times differs from 1 by more than the costs' uncertainty."""
        return np.abs(np.log(ratio)) > self.uncertainty_frac


@dataclass(frozen=True)
class ReplayConfig:
    """Settings of a comparison in replay.

    The answer time of policies missing from policy_ms is measured on this machine with the first
    seed: in live decoding if the `pair` is given, else in replay (`answer_ms`), whose caches are
    warmer than live ones.
    """

    baselines: Baselines | None = None  # None: chosen on the recording
    part: str = "test"  # the part of the recording to replay
    policy_ms: dict | None = None  # name -> time of one answer; others are measured
    pair: object = None  # in which policies are measured while it decodes
    random_seeds: tuple[int, ...] = (0, 1, 2)  # of the random policy
    progress: bool = True
    # run elsewhere: local, ray or ray://host:port (`parallel`)
    on: str | None = None
    # the most contenders at once there
    jobs: int | None = None


@dataclass(frozen=True)
class Contender:
    """One method in `compare_replay`: a policy, or the options of a bound."""

    name: Method
    recording: Trace  # all test turns, or one suite's for its own tree
    policy: Policy | None = None
    seed: int = 0
    policy_ms: float = 0.0  # charged for an answer
    bound: dict | None = None  # options of `clairvoyant`


@runs.with_settings(ReplayConfig)
def compare_replay(
    trace, costs, policies: dict[str, list[Policy]], config: ReplayConfig | None = None, **settings
) -> Comparison:
    """Replay the turns of a part of the recording with `policies` and with all baselines.

    trace, costs: also their folder or file, as `open_trace` and `profiles.prices` take them.
    policies: name -> policies or their folders (`load_controller`), one per training seed; they
    stay unchanged. settings: fields of ReplayConfig by name. If only that part was recorded, trees
    are tuned on it, with a warning. SpecdecError for a part used to make choices, and for a policy
    that this recording cannot replay.
    """
    config = runs.configured(config, ReplayConfig, settings)
    costs = prices(costs)
    trace = open_trace(trace) if isinstance(trace, str | Path) else trace
    baselines = config.baselines or _usual(trace, costs, config.part)
    if config.part in baselines.chosen_on:
        why = f"trees were chosen on part {config.part!r}"
        raise SpecdecError(f"{why}; compare on another part, such as test.")
    test = trace.select(part=config.part)
    policies = baselines.by_method(policies)

    # 1. the references: fixed trees and random answers, whose answers cost nothing
    contenders = []
    for name, tree in baselines.trees.items():
        contenders.append(Contender(name, test, Static.of(tree)))
    for seed in config.random_seeds:
        contenders.append(Contender(RANDOM, test, baselines.random(seed), seed))

    # 2. the policies to judge; an answer costs what it takes on this machine
    charged = dict(config.policy_ms or {})
    for name, seeds in policies.items():
        for policy in seeds:
            refuse_if_chosen_on(name, policy, config.part)
            warn_elsewhere(policy, pair=trace.header["pair"], costs=costs.name)
        if name not in charged:
            with _named(name):
                policy = copy.deepcopy(seeds[0])
                if config.pair is None:
                    charged[name] = answer_ms(test, policy, costs)
                else:
                    charged[name] = measured_answer_ms(config.pair, policy, costs)
        for seed, policy in enumerate(seeds):
            contenders.append(Contender(name, test, policy, seed, charged[name]))

    # 3. the best tree of every suite, and the bounds
    for suite in dict.fromkeys(test.turns["suite"]):
        turns = test.select((test.turns["suite"] == suite).to_numpy())
        contenders.append(Contender(PER_SUITE, turns, Static.of(baselines.of_suite(suite))))
    for name, options in baselines.bounds.items():
        contenders.append(Contender(name, test, bound=options))

    # 4. replay all of them, here or elsewhere
    tasks = [partial(_replayed, contender, costs) for contender in contenders]
    tables = parallel(tasks, config.on, config.jobs, desc="replay", progress=config.progress)
    turns = pd.concat([turns for turns, _ in tables], ignore_index=True)
    cycles = pd.concat([cycles for _, cycles in tables if cycles is not None], ignore_index=True)
    charged = {name: charged[name] for name in policies}
    temperature = float(trace.header.get("temperature", 0.0))
    spread = costs.uncertainty_frac
    return Comparison(turns, cycles, baselines, charged, spread, temperature, costs.name)


def _usual(trace, costs, part: str) -> Baselines:
    """Baselines chosen on the usual parts; on the test part, with a warning, if nothing else was
    recorded.
    """
    if trace.turns["part"].isin(CHOSEN_ON).any():
        return Baselines.choose(trace, costs)
    why = f"there is no part {' or '.join(CHOSEN_ON)}, so trees are tuned on what judges them"
    warn(f"{why} and look faster than they are; for a fair comparison record more prompts.")
    return replace(Baselines.choose(trace, costs, parts=(part,)), chosen_on=())


@contextlib.contextmanager
def _named(name: str):
    """Adds the policy's name to SpecdecErrors."""
    try:
        yield
    except SpecdecError as error:
        raise SpecdecError(f"{name!r} cannot be compared on this recording: {error}") from error


def _replayed(contender: Contender, costs: CostModel) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Turns and cycles of one contender; a bound has no cycles."""
    labels = {"method": contender.name, "seed": contender.seed}
    with _named(contender.name):
        if contender.policy is None:
            turns = clairvoyant(contender.recording, costs, **contender.bound).turns
            return turns.assign(policy_ms=0.0, **labels), None
        policy = copy.deepcopy(contender.policy)
        options = dict(policy_ms=contender.policy_ms, keep_cycles=True)
        replayed = replay(contender.recording, policy, costs, **options)
    return replayed.table.assign(**labels), replayed.cycles.assign(**labels)


def refuse_if_chosen_on(name: str, policy: Policy, part: str) -> None:
    """SpecdecError if a choice in the making of a policy used the part that tests it."""
    seen = [row["choice"] for row in choices_of(policy) if row["part"] == part]
    if seen:
        why = f"{name!r} looked at part {part!r} for its {seen[0]}"
        raise SpecdecError(f"{why}; judge it on another part, such as test.")


def warn_elsewhere(policy: Policy, **here) -> None:
    """Warn if a policy, or part of a Chain, was trained for another pair, or for other costs
    without repricing.
    """
    for part in getattr(policy, "policies", (policy,)):
        if hasattr(part, "warn_elsewhere"):
            settled = {"costs"} if getattr(part, "priced_for", None) == here.get("costs") else set()
            part.warn_elsewhere(
                **{name: value for name, value in here.items() if name not in settled}
            )


def pair_costs(models: dict, here: str, top_k: int = 10, context_tok: int = 300) -> pd.DataFrame:
    """Milliseconds of drafting d levels and of verifying 20 d nodes, d = 1 .. 10, within each
    machine's measured range.

    Columns machine, here, depth, nodes, draft_ms, verify_ms; the first level is the root pass, as
    LTD's Figure 2 counts.
    """
    rows = []
    for name, costs in models.items():
        for depth, nodes in ((depth, 20 * depth) for depth in range(1, 11)):
            if costs.measured("expansions", [depth - 1]) and costs.measured(
                "verify_nodes", [nodes]
            ):
                ms = (
                    float(costs.draft_ms(top_k, depth - 1, context_tok)),
                    float(costs.verify_ms(nodes, context_tok)),
                )
                rows.append((name, name == here, depth, nodes, *ms))
    return pd.DataFrame(
        rows, columns=["machine", "here", "depth", "nodes", "draft_ms", "verify_ms"]
    )


def over_seeds(comparison: Comparison, *, level: float = stats.LEVEL) -> pd.DataFrame:
    """One row per suite and method, with the spreads over training seeds and over prompts.

    Columns suite, method, seeds, prompts, and each of MEASURES: its mean over seeds with Student's
    t-interval (<measure>_low, _high; NaN for one seed). For each of RATIOS also <ratio>_prompts_low
    and _high: paired interval over prompts of the mean over seeds. beyond_costs: as in
    `Comparison.table`.
    p_default, p_tuned: its p-values; p_default_holm and p_tuned_holm adjust over the policies of a
    suite (baselines are no hypotheses of ours and get none).
    """
    rows = []
    for (suite, method), seeds in comparison.table.groupby(["suite", "method"], sort=False):
        row = {"suite": suite, "method": method, "seeds": len(seeds)}
        for name in MEASURES:
            mean, deviation = float(seeds[name].mean()), seeds[name].std()  # NaN for one seed
            reach = (
                scipy.stats.t.ppf((1 + level) / 2, len(seeds) - 1) * deviation / len(seeds) ** 0.5
            )
            row |= {name: mean, f"{name}_low": mean - reach, f"{name}_high": mean + reach}
        rows.append(row | {"beyond_costs": comparison.beyond_costs(row["over_tuned"])})
    table = pd.DataFrame(rows).merge(
        _over_prompts(comparison, level), on=["suite", "method"], how="left"
    )
    tests = [name for name in table if name.startswith("p_")]
    first = [name for name in table if name not in ("beyond_costs", *tests)]
    return comparison.with_identity(table[[*first, "beyond_costs", *tests]])


def _over_prompts(comparison: Comparison, level: float) -> pd.DataFrame:
    """suite, method, prompts, and of RATIOS the intervals over prompts and the p-values, as
    `over_seeds` calls them.
    """
    plain = comparison.turns[comparison.turns["method"] == TUNED]
    plain = plain.assign(method=AUTOREGRESSIVE, time_ms=plain["plain_ms"])
    rows = pd.concat([comparison.turns, plain])
    policies = set(comparison.policy_ms)
    baselines = dict(
        zip(RATIOS, (AUTOREGRESSIVE, comparison.baselines.default, TUNED), strict=True)
    )
    table = stats.summarise(
        rows, baselines, rate=stats.SPEED, family=policies, pool=True, level=level
    )
    ends = {f"{name}_{end}": f"{name}_prompts_{end}" for name in RATIOS for end in ("low", "high")}
    tests = ["p_default", "p_tuned", "p_default_holm", "p_tuned_holm"] if policies else []
    table.loc[~table["method"].isin(policies), tests] = np.nan
    return table.rename(columns=ends)[["suite", "method", "prompts", *ends.values(), *tests]]


def best_seed(trace, costs, policies: list[Policy], policy_ms: float) -> int:
    """Index of the fastest policy on part "tune", recorded in its log: which of several trainings
    to keep.
    """
    tune = trace.select(part="tune")
    times = [
        replay(tune, copy.deepcopy(policy), costs, policy_ms=policy_ms).ms_per_tok
        for policy in policies
    ]
    best = int(np.argmin(times))
    chose(policies[best], "seed", "tune", f"{best + 1} of {len(policies)}")
    return best


def choices(policies: dict[str, list[Policy]]) -> pd.DataFrame:
    """The part of the prompts used for each choice in the making of a policy: one row per method,
    choice and seed's value.

    Columns method, choice, part, value. Policies without such a record have one row of dashes.
    """
    rows = []
    columns = ["method", "choice", "part", "value"]
    for name, seeds in policies.items():
        logs = [row for policy in seeds for row in choices_of(policy)] or [
            dict.fromkeys(columns, "-")
        ]
        rows += [row | {"method": name} for row in logs]
    return pd.DataFrame(rows, columns=columns).drop_duplicates(ignore_index=True)


def load_controllers(folders: dict[str, list]) -> dict[Method, list[Policy]]:
    """method -> policies, from name -> folders, one per seed, as `methods.load_controller` takes
    them.
    """
    lists = {
        Method.of(name): [some] if isinstance(some, str | Path) else some
        for name, some in folders.items()
    }
    return {name: list(map(load_controller, some)) for name, some in lists.items()}


def shipped_controllers(pair: str, dtype: str) -> dict[Method, list[Policy]]:
    """The shipped controllers of a pair and dtype; empty if there are none.

    >>> list(shipped_controllers("small", "float32"))
    ['ours, as shipped']
    """
    kinds = {"resps": "Re-SpS", "ltd": "LTD", "radar": "RADAR", "ours": "ours"}
    folders = {
        Method(name, identity.SHIPPED): shipped_folder(f"{pair}/{kind}-{dtype}")
        for kind, name in kinds.items()
    }
    return {
        method: [load_controller(folder)] for method, folder in folders.items() if folder.is_dir()
    }
