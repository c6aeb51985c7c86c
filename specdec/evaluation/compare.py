"""Policies compared in replay with static trees, a random policy and bounds.

Static trees are chosen on some parts of the recording and all methods compared on another one; the
time of a policy's answers is included. `compare_live` measures the same methods live.
"""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy
from tqdm.auto import tqdm

from specdec import identity
from specdec.core.policy import Policy, RandomPolicy, Static
from specdec.core.records import EXTEND, SIZE, SUMS, with_rates
from specdec.core.tree_config import TREES, TreeConfig
from specdec.costs.calibrate import measured_answer_ms
from specdec.errors import SpecdecError
from specdec.evaluation import stats
from specdec.evaluation.methods import AUTOREGRESSIVE
from specdec.evaluation.tuning import race_static
from specdec.identity import STATIC, Method
from specdec.policies.base import choices_of, chose, load_policy, shipped_folder
from specdec.replays.oracle import clairvoyant, headroom
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import SETTING, fastest, static_grid

CHOSEN_ON = ("train", "tune")
DEFAULTS = (TREES["eagle3"], TREES["eagle3-scripts"])
TUNED = Method(STATIC, identity.TUNED)
PER_SUITE = Method(STATIC, identity.PER_SUITE)
RANDOM = Method("random")
ORACLE_DEPTH = Method("oracle depth")
ORACLE_SIZE = Method("oracle size")
ORACLE = Method("oracle tree")
CLAIRVOYANT = Method("clairvoyant")
RATIOS = ("speedup", "over_default", "over_tuned")
COUNTS = ("draft_calls", "verify_nodes", "policy_frac")
MEASURES = ("ms_per_tok", "tau", *RATIOS, "headroom_frac", *COUNTS)


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
        choosing = trace.turns["part"].isin(parts)
        if not choosing.any():
            why = f"there is no part {' or '.join(parts)} to choose trees on"
            raise SpecdecError(f"{why}; record some prompts of it.")
        chosen_on = trace.select(choosing)
        by_suite = static_grid(chosen_on, costs, by="suite", **grid)
        tuned = fastest(by_suite.groupby(SETTING, as_index=False, sort=False)[SUMS].sum())
        per_suite = {}
        for suite, rows in by_suite.groupby("suite", sort=False):
            per_suite[suite] = fastest(rows)
        return cls(tuple(defaults), tuned, per_suite, tuple(parts))

    @classmethod
    def from_race(cls, pair, trace, costs, **settings) -> Baselines:
        """The trees that win a live race on the tune part (`race_static`)."""
        per_suite = race_static(pair, trace, costs, **settings)
        return cls(DEFAULTS, per_suite.pop("all"), per_suite, ("tune",))

    @property
    def default(self) -> Method:
        """The default tree's method."""
        return next(iter(self.trees))

    @property
    def trees(self) -> dict[Method, TreeConfig]:
        """The defaults and the tuned tree, which are the same for every suite."""
        trees = {Method(STATIC, identity.DEFAULT, tree.text): tree for tree in self.defaults}
        return {**trees, TUNED: self.tuned}

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
        """Options of `clairvoyant` by method. An oracle knows the text and chooses depth, size or
        both; the rest comes from the tuned tree. The clairvoyant chooses everything.
        """
        width = {"top_ks": [self.tuned.top_k], "beams": [self.tuned.beam]}
        return {
            ORACLE_DEPTH: {**width, "sizes": [self.tuned.verify_nodes]},
            ORACLE_SIZE: {**width, "depths": [self.tuned.depth]},
            ORACLE: width,
            CLAIRVOYANT: {},
        }

    def by_method(self, policies: dict) -> dict[Method, list[Policy]]:
        """{method: [policy per seed]}; a single policy counts as one seed."""
        baselines = {*self.trees, AUTOREGRESSIVE, PER_SUITE, RANDOM, *self.bounds}
        lists = {}
        for name, seeds in policies.items():
            if not isinstance(seeds, list | tuple):
                seeds = [seeds]
            if name in baselines or not all(isinstance(policy, Policy) for policy in seeds):
                expected = "a policy or a list of them, one per seed, under a name of no baseline"
                raise SpecdecError(f"{name!r} must be {expected}.")
            lists[Method.of(name)] = list(seeds)
        return lists


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_replay`."""

    turns: pd.DataFrame  # one row per turn, method and seed, with the columns of `Replayed.table`
    cycles: pd.DataFrame  # one row per cycle of all methods but the bounds
    baselines: Baselines
    policy_ms: dict[Method, float]  # time charged for one answer of each policy
    uncertainty_frac: float = 0.0  # of the costs (95 %), in a comparison of two times
    temperature: float = 0.0  # of the recording
    machine: str = ""  # whose costs these are
    noise: str = ""  # of a sampled recording, see `Trace.noise`

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """One row per suite ("all" pools them), method and seed.

        speedup is over plain decoding. draft_calls and verify_nodes are means per cycle,
        policy_frac is the policy's share of the time; policy_ms is missing for baselines.
        """
        # 1. sums and rates
        turns = self.turns.assign(of=self.turns["suite"] + "/" + self.turns["prompt"].astype(str))
        groups = pd.concat([turns, turns.assign(suite="all")])
        groups = groups.groupby(["suite", "method", "seed"], sort=False)
        sums = groups[[*SUMS, "draft_calls", "verified_tok", "policy_ms"]].sum()
        table = with_rates(sums).assign(turns=groups.size(), prompts=groups["of"].nunique())
        table = table.reset_index()
        same_turns = (table.groupby("suite")["new_tok"].nunique() == 1).all()
        assert same_turns, "the methods did not decode the same turns"
        # 2. over the trees and the bound of the same suite
        ms = table["ms_per_tok"]
        first_seeds = table[table["seed"] == 0]
        reference_ms = first_seeds.pivot(index="suite", columns="method", values="ms_per_tok")
        reference_ms = reference_ms.loc[table["suite"]].set_index(table.index)
        table["over_default"] = reference_ms[self.baselines.default] / ms
        table["over_tuned"] = reference_ms[TUNED] / ms
        table["headroom_frac"] = headroom(ms, reference_ms[TUNED], reference_ms[CLAIRVOYANT])
        # 3. means of a cycle
        table["draft_calls"] /= table["cycles"]
        table["verify_nodes"] = table["verified_tok"] / table["cycles"] - 1
        table["policy_frac"] = table["policy_ms"] / table["time_ms"]
        table["policy_ms"] = table["method"].map(self.policy_ms)
        table["beyond_costs"] = self.beyond_costs(table["over_tuned"])
        first = ["suite", "method", "seed", "turns", "prompts"]
        return self.with_identity(table[[*first, *MEASURES, "policy_ms", "beyond_costs"]])

    def with_identity(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with `identity.FIELDS`, the temperature and the machine."""
        methods = [*self.baselines.trees, PER_SUITE, *self.policy_ms]
        facts = {"temperature": self.temperature, "machine": self.machine}
        if self.noise:
            facts["noise"] = self.noise
        return identity.with_fields(table, methods, **facts)

    def beyond_costs(self, ratio):
        """Whether a ratio of two times differs from 1 by more than the costs' uncertainty."""
        return np.abs(np.log(ratio)) > self.uncertainty_frac


def compare_replay(
    trace,
    costs,
    policies: dict,
    *,
    baselines: Baselines | None = None,
    part="test",
    policy_ms: dict | None = None,
    pair=None,
    random_seeds=(0, 1, 2),
    progress=True,
) -> Comparison:
    """Replay the turns of a part of the recording with `policies` and with all baselines.

    policies: name -> a policy or one per training seed. baselines: default chosen on the recording.
    policy_ms: name -> time of one answer; that of others is measured, live if there is a `pair`.
    """
    baselines = baselines or Baselines.choose(trace, costs)
    if part in baselines.chosen_on:
        raise SpecdecError(f"trees were chosen on part {part!r}; compare on another one.")
    test = trace.select(part=part)
    policies = baselines.by_method(policies)
    charged = dict(policy_ms or {})
    # 1. the references: fixed trees and random answers, whose answers cost nothing
    trees = baselines.trees.items()
    contenders: list[tuple] = [(name, 0, test, Static.of(tree)) for name, tree in trees]
    contenders += [(RANDOM, seed, test, baselines.random(seed)) for seed in random_seeds]
    # 2. the policies to judge; an answer costs what it takes on this machine
    for name, seeds in policies.items():
        for seed, policy in enumerate(seeds):
            for choice in choices_of(policy):
                if choice["part"] == part:
                    why = f"{name!r} looked at part {part!r} for its {choice['choice']}"
                    raise SpecdecError(f"{why}; judge it on another part, such as test.")
            warn_elsewhere(policy, pair=trace.header["pair"], costs=costs.name)
            contenders.append((name, seed, test, policy))
        first = copy.deepcopy(seeds[0])
        if name not in charged and pair is None:
            charged[name] = answer_ms(test, first, costs)
        elif name not in charged:
            charged[name] = measured_answer_ms(pair, first, costs)
    # 3. the best tree of every suite
    for suite in dict.fromkeys(test.turns["suite"]):
        turns = test.select((test.turns["suite"] == suite).to_numpy())
        contenders.append((PER_SUITE, 0, turns, Static.of(baselines.of_suite(suite))))
    # 4. replay all of them
    turns, cycles = [], []
    for name, seed, recording, policy in tqdm(contenders, "replay", disable=not progress):
        settings = {"policy_ms": charged.get(name, 0.0), "keep_cycles": True}
        replayed = replay(recording, copy.deepcopy(policy), costs, **settings)
        turns.append(replayed.table.assign(method=name, seed=seed))
        cycles.append(replayed.cycles.assign(method=name, seed=seed))
    # 5. the bounds, which have no cycles
    for name, options in baselines.bounds.items():
        bound = clairvoyant(test, costs, **options).turns
        turns.append(bound.assign(policy_ms=0.0, method=name, seed=0))
    tables = [pd.concat(parts, ignore_index=True) for parts in (turns, cycles)]
    charged = {name: charged[name] for name in policies}
    facts = (costs.uncertainty_frac, float(trace.header.get("temperature", 0.0)), costs.name)
    return Comparison(*tables, baselines, charged, *facts, trace.noise)


def warn_elsewhere(policy: Policy, **here) -> None:
    """Warn if a policy, or part of a Chain, was trained for another pair or other costs."""
    for part in getattr(policy, "policies", (policy,)):
        facts = dict(here)
        if getattr(part, "priced_for", None) == here.get("costs"):
            facts.pop("costs", None)
        if hasattr(part, "warn_elsewhere"):
            part.warn_elsewhere(**facts)


def over_seeds(comparison: Comparison) -> pd.DataFrame:
    """One row per suite and method, with the spreads over training seeds and over prompts.

    MEASURES: means over seeds with Student's t-interval (<measure>_low, _high; NaN for one seed).
    RATIOS also have <ratio>_prompts_low and _high: paired intervals over prompts. p_default
    and p_tuned; p_default_holm and p_tuned_holm are adjusted over the policies of a suite.
    """
    # 1. means and spreads over seeds
    keys = ["suite", "method"]
    rows = []
    for (suite, method), seeds in comparison.table.groupby(keys, sort=False):
        row = {"suite": suite, "method": method, "seeds": len(seeds)}
        quantile = scipy.stats.t.ppf((1 + stats.LEVEL) / 2, len(seeds) - 1)
        for name in MEASURES:
            mean = float(seeds[name].mean())
            reach = quantile * seeds[name].std() / len(seeds) ** 0.5  # NaN for one seed
            row.update({name: mean, f"{name}_low": mean - reach, f"{name}_high": mean + reach})
        row["beyond_costs"] = comparison.beyond_costs(row["over_tuned"])
        rows.append(row)
    # 2. intervals and tests over prompts
    plain = comparison.turns[comparison.turns["method"] == TUNED]
    plain = plain.assign(method=AUTOREGRESSIVE, time_ms=plain["plain_ms"])
    turns = pd.concat([comparison.turns, plain])
    over = {"speedup": AUTOREGRESSIVE, "over_default": comparison.baselines.default}
    over["over_tuned"] = TUNED
    policies = set(comparison.policy_ms)
    prompts = stats.summarise(turns, over, rate=stats.SPEED, family=policies, pool=True)
    tests = ["p_default", "p_tuned", "p_default_holm", "p_tuned_holm"] if policies else []
    prompts.loc[~prompts["method"].isin(policies), tests] = np.nan
    ends = {}
    for name in RATIOS:
        ends[f"{name}_low"] = f"{name}_prompts_low"
        ends[f"{name}_high"] = f"{name}_prompts_high"
    prompts = prompts.rename(columns=ends)[[*keys, "prompts", *ends.values(), *tests]]
    table = pd.DataFrame(rows).merge(prompts, on=keys, how="left")
    last = ["beyond_costs", *tests]
    return comparison.with_identity(table[[*table.columns.drop(last), *last]])


def best_seed(trace, costs, policies: list[Policy], policy_ms: float) -> int:
    """Index of the fastest policy on part "tune", recorded in its log."""
    tune = trace.select(part="tune")
    replayed = [replay(tune, copy.deepcopy(one), costs, policy_ms=policy_ms) for one in policies]
    times_ms = [result.ms_per_tok for result in replayed]
    best = int(np.argmin(times_ms))
    chose(policies[best], "seed", "tune", f"{best + 1} of {len(policies)}")
    return best


def choices(policies: dict[str, list[Policy]]) -> pd.DataFrame:
    """The part of the prompts used for each choice in the making of a policy: method, choice, part,
    value. Policies without such a record have one row of dashes.
    """
    columns = ["method", "choice", "part", "value"]
    rows = []
    for name, seeds in policies.items():
        logs = list(itertools.chain.from_iterable(map(choices_of, seeds)))
        for row in logs or [dict.fromkeys(columns, "-")]:
            rows.append({**row, "method": name})
    return pd.DataFrame(rows, columns=columns).drop_duplicates(ignore_index=True)


def load_controllers(folders: dict[str, list]) -> dict[Method, list[Policy]]:
    """method -> policies, from name -> folders, one per seed."""
    return {Method.of(name): list(map(load_policy, seeds)) for name, seeds in folders.items()}


def shipped_controllers(pair: str, dtype: str) -> dict[Method, list[Policy]]:
    """The shipped controllers of a pair and dtype; empty if there are none."""
    systems = {"resps": "Re-SpS", "ltd": "LTD", "radar": "RADAR", "ours": "ours"}
    controllers = {}
    for kind, name in systems.items():
        folder = shipped_folder(f"{pair}/{kind}-{dtype}")
        if folder.is_dir():
            controllers[Method(name, identity.SHIPPED)] = [load_policy(folder)]
    return controllers
