"""Trains Re-SpS and LTD on a recording: one config in, policies out. And any system by name.

    config.policy(training=True)  --PPO on replayed turns-->  weights  -->  config.policy()

Observation, reward and hyperparameters are in the config (`policies.resps`, `policies.ltd`), the
algorithm is in `training.ppo`. Training uses part "train" of the recording, the choice of a
checkpoint part "tune"; "test" is left for evaluation.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.policy import Policy
from specdec.core.records import SIZE
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError, check_name, warn
from specdec.parallel import parallel
from specdec.policies import ltd, resps
from specdec.policies.base import L, Learned, changed, chose, deviations_of, named
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid
from specdec.training import radar, value
from specdec.training.env import ReplaySource, Reward
from specdec.training.ppo import Credit, Outcome, RunOptions, Task, train_policy

# Rewards by their names in configs: kind, mean over cycles, and the unit of time in milliseconds.
REWARDS = {
    "mean_of_ratios": ("ratio", True, 1e3),  # tokens per second, Re-SpS 1.4
    "ratio_of_sums": ("ratio", False, 1e3),
    "throughput": ("ratio", False, 10.0),  # tokens per 10 ms, LTD 1.5
    "accepted": ("accepted", False, 10.0),
    "time_cost": ("time", False, 10.0),
    "lagrangian": ("lagrangian", False, 10.0),
}


class _Course:
    """What the trainings of one config share. decisions: of all its trainings together."""

    def __init__(self, config, trace, costs, policy_ms, source, seed, decisions: int, options):
        self.config = config
        self.trace = trace
        self.costs = costs
        self.policy_ms = policy_ms
        turns = radar.training_turns(trace, config.prompts)
        self.replayed = ReplaySource(turns, costs, policy_ms)
        self.source = source or self.replayed
        self.seed = seed
        self.decisions = decisions
        self.options = options

    def learn(
        self,
        learner: L,
        decoding: L,
        ppo,
        out_dir: Path,
        constants,
        *,
        partner=None,
        facts=None,
        start_from=None,
        **task,
    ) -> L:
        """Train `learner`. Returns `decoding` with its weights, also saved in out_dir/policy.

        constants: as in `reward_of`. partner: decodes beside it. facts: further ones to store.
        task: fields of `ppo.Task`.
        """
        config = self.config
        # 1. the reward, and the judge of checkpoints
        reward = reward_of(config, self.replayed, constants)
        judge = self._judge(decoding, partner) if config.select else None
        # 2. what the policy will say of its training
        prompts = self.replayed.trace.turns.groupby(["suite", "prompt"], sort=False)
        deviations = deviations_of(config, decisions=self.decisions, questions=prompts.ngroups)
        trained_for = {
            "preset": config.name,
            "config": dataclasses.asdict(config),
            "deviations": deviations,
            "pair": self.trace.header["pair"],
            "costs": self.costs.name,
            **(facts or {}),
        }
        # 3. PPO
        run = RunOptions(
            out_dir, self.seed, start_from=start_from, trained_for=trained_for, **self.options
        )
        adapts = config.reward == "lagrangian"
        described = Task(self.source, reward, adapt_rate=adapts, **task)
        decoding.with_weights(train_policy(learner, described, ppo, run, judge))
        # 4. the policy as it decodes
        chose(decoding, "weights", "train", f"recipe {config.name!r}, chosen before")
        if config.select:
            chose(decoding, "checkpoint", "tune")
        decoding.save(out_dir / "policy")
        return decoding

    def _judge(self, decoding: Learned, partner: Learned | None):
        """Tokens per ms on part "tune" of the policy as it decodes, beside its partner."""
        if "tune" not in set(self.trace.turns["part"]):
            why = 'choosing a checkpoint needs turns of part "tune"'
            raise SpecdecError(f"{why}; record some or set select=False.")
        tune = self.trace.select(part="tune")

        def speed(learned: Learned) -> float:
            policy = decoding.with_weights(learned)
            if partner is not None and policy.kind == SIZE:
                policy = ltd.combine(partner, policy)
            elif partner is not None:
                policy = ltd.combine(policy, partner)
            return 1 / replay(tune, policy, self.costs, policy_ms=self.policy_ms).ms_per_tok

        return speed


@runs.with_settings(RunOptions, without=("trained_for",))
def train_resps(
    trace,
    costs,
    config: resps.RespsConfig | str = resps.OURS,
    *,
    seed: int = 0,
    out_dir: Path,
    policy_ms: float = 0.0,
    source=None,
    start_from=None,
    **options,
) -> resps.RespsPolicy:
    """Train Re-SpS on part "train" of `trace`; returns the policy as it decodes.

    It is also saved in out_dir/policy. config: a RespsConfig, or the name of one of
    `resps.CONFIGS`. policy_ms: charged per question. source: turns in place of the recording's,
    such as an `env.LiveSource` (with envs=1); rates and checkpoints are still evaluated on the
    recording. options: fields of `ppo.RunOptions`. The recording must hold every width of the grid
    and, except for state "text", features.
    """
    config = named(config, resps.CONFIGS, "Re-SpS")
    features_size = 0 if trace.features is None else int(trace.features.shape[1])
    learner = config.policy(features_size, training=True)
    decisions = config.ppo.total_steps
    course = _Course(config, trace, costs, policy_ms, source, seed, decisions, options)
    return course.learn(
        learner,
        config.policy(features_size),
        config.ppo,
        Path(out_dir),
        [[tree] for tree in learner.trees],
        start_from=start_from,
        episode="interval" if config.terminal else "turn",
        credit=interval_credit(config, learner.interval),
        reseed_each_turn=config.reseed_each_turn,
    )


def interval_credit(config: resps.RespsConfig, interval: int) -> Credit:
    """The reward of an interval by the config's flags (sheet 1.5)."""

    def credit(outcome: Outcome):
        complete = len(outcome.rows) >= interval
        if not complete and not config.push_partial:
            return []
        done = config.terminal or outcome.ended
        rows = outcome.rows
        if config.start_in_reward:
            rows = [*outcome.before, *rows]
        if not (config.junk_zero and outcome.first and complete and len(rows) > 1):
            return [(outcome.observation, rows, done)]
        nothing = np.zeros_like(outcome.observation)
        return [(outcome.observation, rows[:-1], config.terminal), (nothing, rows[-1:], done)]

    return credit


@dataclasses.dataclass(frozen=True)
class LtdTrained:
    """What `train_ltd` returns.

    policy: depth and size after the last round. rounds: "iter0-size", "iter0-depth": the policies
    trained alone; "iter0", "iter1", ... the combined ones after each iteration. table: one row per
    training, with its results.
    """

    policy: Policy
    rounds: dict[str, Policy]
    table: pd.DataFrame


@runs.with_settings(RunOptions, without=("trained_for", "start_from"))
def train_ltd(
    trace,
    costs,
    config: ltd.LtdConfig | str = ltd.OURS,
    *,
    seed: int = 0,
    out_dir: Path,
    policy_ms: float = 0.0,
    source=None,
    **options,
) -> LtdTrained:
    """Train LTD's two policies: each alone, then in turns while the other one answers.

    config: an LtdConfig, or the name of one of `ltd.LAPTOP`. Every round is its own run in
    out_dir/<iteration>-<learner>; the last two policies are also saved in out_dir/policy. A later
    round of the same policy continues from its weights and optimiser; its steps and learning rate
    start over. Otherwise as in `train_resps`; a judge chooses by the speed of both together.
    """
    config = named(config, ltd.LAPTOP, "LTD")
    if not config.rounds:
        raise SpecdecError("rounds is empty; give at least one, such as ltd.ROUNDS[:2].")
    decisions = sum(getattr(config, part.learner).ppo.total_steps for part in config.rounds)
    course = _Course(config, trace, costs, policy_ms, source, seed, decisions, options)
    latest: dict[str, Learned] = {}
    folders: dict[str, Path] = {}
    policies: dict[str, Policy] = {}
    rows = []
    for round_ in config.rounds:
        kind = round_.learner
        folder = Path(out_dir) / f"{round_.name}-{kind}"
        if round_.frozen is not None and round_.frozen not in latest:
            why = f"round {round_.name!r} needs a trained {round_.frozen} policy"
            raise SpecdecError(f"{why}; put a round that trains it first.")
        # 1. the learner and who answers beside it; alone, the size policy gets random depths
        part = getattr(config, kind)
        learner = part.policy(training=True)
        partner = latest.get(round_.frozen)
        at_random = partner is None and kind == "size" and config.random_depth
        # 2. PPO, from the weights of its last round
        latest[kind] = course.learn(
            learner,
            part.policy(),
            part.ppo,
            folder,
            _constants(learner, partner is not None, at_random),
            start_from=folders.get(kind),
            others=_random_depth(learner) if at_random else partner,
            partner=partner,
            facts={"round": round_.name, "frozen": round_.frozen},
        )
        # 3. the policies after this round
        folders[kind] = folder
        policies[folder.name] = latest[kind]
        if len(latest) == 2:
            policies[round_.name] = ltd.combine(latest["depth"], latest["size"])
        rows.append({**round_._asdict(), **runs.read_json(folder / "plan.json")["results"]})
    for kind, policy in latest.items():
        policy.save(Path(out_dir) / "policy" / kind)
    return LtdTrained(list(policies.values())[-1], policies, pd.DataFrame(rows))


def _random_depth(learner: ltd.SizePolicy):
    """The partner while the size policy learns alone."""
    limits = learner.limits

    def partner(seed: int) -> ltd.RandomDepth:
        return ltd.RandomDepth(learner.depth, learner.top_k, limits.verify_nodes, seed, limits.beam)

    return partner


def _constants(
    learner: Learned, beside: bool = False, at_random: bool = False
) -> list[list[TreeConfig]]:
    """The trees of each constant answer, equally often.

    Alone, a size policy gets trees of the plan's depth, or `at_random` of all depths; `beside` a
    partner, of any depth.
    """
    limits = learner.limits
    sizes = getattr(learner, "sizes", (learner.plan.verify_nodes,))
    depths = range(1, learner.depth + 1)
    if isinstance(learner, ltd.SizePolicy) and not (beside or at_random):
        depths = [learner.plan.depth]
    trees = []
    for size in sizes:
        row = []
        for depth in depths:
            total = 1 + min(size, pool_size(depth, limits.top_k, limits.beam))
            row.append(TreeConfig(total, depth, limits.top_k, beam=limits.beam))
        trees.append(row)
    if at_random:
        return trees
    distinct = dict.fromkeys(tree for row in trees for tree in row)
    return [[tree] for tree in distinct]


def reward_of(config, source: ReplaySource, constants: list[list[TreeConfig]]) -> Reward:
    """The environment's reward for config.reward, with time over config.timed.

    "lagrangian" starts from the rate of the fastest of `constants` (see `_constants`), which the
    learner can reach: a lower rate would undervalue time, a higher one would make it stop too
    early.
    """
    kind, mean, unit_ms = REWARDS[check_name("reward", config.reward, REWARDS)]
    rate = 0.0
    if kind == "lagrangian":
        # 1. kept tokens and milliseconds of a cycle of every tree; one grid for each shape
        shapes: dict[tuple, list[TreeConfig]] = {}
        for tree in dict.fromkeys(tree for row in constants for tree in row):
            shapes.setdefault((tree.depth, tree.top_k, tree.beam), []).append(tree)
        per_cycle: dict[TreeConfig, np.ndarray] = {}
        for (depth, top_k, beam), trees in shapes.items():
            totals = [tree.total_tokens for tree in trees]
            table = static_grid(source.trace, source.costs, totals, (depth,), (top_k,), (beam,))
            sums = table[["new_tok", "time_ms"]].to_numpy() / table[["cycles"]].to_numpy()
            per_cycle.update(zip(trees, sums, strict=True))
        # 2. the best mean of a constant's trees
        for row in constants:
            tokens, ms = sum(per_cycle[tree] for tree in row)
            rate = max(rate, float(tokens / ms) * unit_ms)
    return Reward(kind, mean, tuple(f"{part}_ms" for part in config.timed), unit_ms, rate)


@dataclasses.dataclass(frozen=True)
class SystemConfig:
    """How `train_system` trains a system.

    preset: "paper", "official" or "ours". steps: decisions, passes (radar) or steps (ours) in
    place of the preset's. paper: LTD's decisions as in the paper. resume: False starts over.
    variant: of Re-SpS (`resps.VARIANTS`). changes: of the config, as in `changed`.
    """

    preset: str = "ours"
    steps: int | None = None
    seed: int = 0
    paper: bool = False
    resume: bool = True
    variant: str = "max_entropy"
    changes: dict = dataclasses.field(default_factory=dict)


@runs.with_settings(SystemConfig)
def train_system(
    system: str, trace, costs, config: SystemConfig | None = None, *, out_dir: Path, **settings
):
    """Train "resps", "ltd", "radar" or "ours" on a recording; policies are written to out_dir."""
    how = runs.configured(config, SystemConfig, settings)
    check_name("system", system, ("resps", "ltd", "radar", "ours"))
    options = {"seed": how.seed, "out_dir": out_dir, "resume": how.resume}
    # 1. the system's function, its configs, and where its training length stands
    if system == "resps":
        train, length = train_resps, ("ppo.total_steps",)
        configs = named(how.variant, resps.VARIANTS, "Re-SpS's variants")
    elif system == "ltd":
        train, length = train_ltd, ("depth.ppo.total_steps", "size.ppo.total_steps")
        configs = ltd.CONFIGS if how.paper else ltd.LAPTOP
    elif system == "radar":
        train, length, configs = radar.train_radar, ("epochs",), radar.CONFIGS
    else:
        train, length, configs = value.train_recording, ("steps",), {how.preset: value.OURS}
        options.pop("resume")  # it takes seconds
    # 2. the config, with this length, changed, and restricted to what was recorded
    changes = dict.fromkeys(length, how.steps) if how.steps else {}
    made = changed(named(how.preset, configs, system), {**changes, **how.changes})
    if system == "resps":
        made = recorded_grid(made, trace)
    return train(trace, costs, made, **options)


@runs.with_settings(SystemConfig, without=("seed",))
def train_sweep(
    systems: Sequence[str],
    trace,
    costs,
    seeds: Sequence[int] = (0,),
    *,
    out_dir: Path,
    on: str | None = None,
    jobs: int | None = None,
    **settings,
) -> pd.DataFrame:
    """Train every system with every seed: a row of system, seed, folder and seconds each.

    Existing results stay. on, jobs: where, and how many at once (`parallel`). settings: of
    `train_system`.
    """
    options = {"preset": "ours", "paper": False}
    for name, setting in settings.items():
        if setting is not None:
            options[name] = setting
    parts = trace.turns[["prompt", "turn", "part"]].to_numpy().tolist()
    rows = []
    tasks = []
    for system in systems:
        for seed in seeds:
            folder = Path(out_dir) / f"{system}-{seed}"
            facts = {"system": system, "seed": seed, "costs": costs, **options}
            key = runs.content_key(**facts, trace=trace.header.get("key"), turns=parts)
            rows.append({"system": system, "seed": seed, "folder": str(folder)})
            if runs.found(folder / "trained.json").get("key") != key:
                how = {"seed": seed, **options}
                tasks.append(partial(_train, system, trace, costs, folder, key, how))
    parallel(tasks, on, jobs, desc="trainings")
    for row in rows:
        row["seconds"] = runs.found(Path(row["folder"]) / "trained.json")["seconds"]
    return pd.DataFrame(rows, columns=["system", "seed", "folder", "seconds"])


def _train(system: str, trace, costs, folder: Path, key: str, options: dict) -> None:
    """One training of `train_sweep`; one that was killed continues from its checkpoint."""
    began = time.perf_counter()
    train_system(system, trace, costs, out_dir=folder, **options)
    seconds = time.perf_counter() - began
    runs.write_json(folder / "trained.json", {"key": key, "seconds": seconds})


def recorded_grid(config: resps.RespsConfig, trace) -> resps.RespsConfig:
    """`config` restricted to the trees that the recording can replay; warns if any are dropped."""
    widths = tuple(k for k in config.widths if k in trace.top_ks)
    if not widths:
        widths = tuple(k for k in trace.top_ks if k > 1)
    depths = tuple(n for n in config.depths if n <= trace.depth)
    totals = tuple(total for total in config.totals if total - 1 <= trace.most_nodes)
    same = (widths, depths, totals) == (config.widths, config.depths, config.totals)
    if same and config.starter[2] in trace.top_ks:
        return config
    if not (widths and depths and totals):
        why = f"no tree of the preset {config.name!r} was recorded: depth {trace.depth}"
        raise SpecdecError(f"{why}, record deeper.")
    grid = {"widths": widths, "depths": depths, "totals": totals}
    grid["starter"] = (max(totals), max(depths), max(widths))
    grid["first_tree"] = grid["starter"] if config.first_tree else None
    restricted = changed(config, grid)
    counts = []
    for preset in (restricted, config):
        trees = resps.valid_trees(preset.totals, preset.depths, preset.widths, preset.small)
        counts.append(len(trees))
    why = f"of the {counts[1]} trees of the preset {config.name!r} {counts[0]} are learned from"
    warn(f"{why}, of the widths {widths}: the recording holds no others (record --top-ks).")
    return restricted
