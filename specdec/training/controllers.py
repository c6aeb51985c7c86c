"""Trains Re-SpS and LTD on a recording: one config in, policies out. And any of the four systems by name.

    config.policy(training=True)  --PPO on replayed turns-->  weights  -->  config.policy()

Observation, reward and hyperparameters are in the config (`policies.resps`, `policies.ltd`); no algorithm is here.
Training uses part "train" of the recording, the choice of a checkpoint part "tune"; "test" is left for evaluation.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import fanout, runs
from specdec.core.policy import Policy
from specdec.core.records import SIZE
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError, check_name, warn
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
    """What the trainings of one config share. source: as in `train_resps`. decisions: of all its trainings together."""

    def __init__(self, config, trace, costs, policy_ms: float, source, seed: int, decisions: int, options: dict):
        self.config, self.trace, self.costs, self.policy_ms = config, trace, costs, policy_ms
        self.replayed = ReplaySource(radar.training_turns(trace, config.prompts), costs, policy_ms)
        self.source, self.seed, self.decisions, self.options = source or self.replayed, seed, decisions, options

    def learn(
        self, learner: L, decoding: L, ppo, out_dir: Path, constants, partner=None, facts=(), start_from=None, **task
    ) -> L:
        """Train `learner`. Returns `decoding` with its weights and a record of the training, also in out_dir/policy.

        constants: as in `reward_of`. partner: decodes beside it. facts: further ones to store. task: fields of `ppo.Task`.
        """
        config, reward = self.config, reward_of(self.config, self.replayed, constants)
        if config.select and "tune" not in set(self.trace.turns["part"]):
            raise SpecdecError('choosing a checkpoint needs turns of part "tune"; record some or set select=False.')
        held_out = self.trace.select(part="tune") if config.select else None

        def speed(learned: Learned) -> float:
            both = decoding.with_weights(learned), partner
            used = decoding if partner is None else ltd.combine(*sorted(both, key=lambda one: one.kind == SIZE))
            return 1 / replay(held_out, used, self.costs, policy_ms=self.policy_ms).ms_per_tok

        questions = self.replayed.trace.turns.groupby(["suite", "prompt"], sort=False).ngroups
        known = {"preset": config.name, "config": dataclasses.asdict(config)}
        known["deviations"] = deviations_of(config, decisions=self.decisions, questions=questions)
        known |= {"pair": self.trace.header["pair"], "costs": self.costs.name, **dict(facts)}
        run = RunOptions(out_dir, self.seed, start_from=start_from, trained_for=known, **self.options)
        whole = Task(self.source, reward, adapt_rate=config.reward == "lagrangian", **task)
        decoding.with_weights(train_policy(learner, whole, ppo, run, speed if config.select else None))
        chose(decoding, "weights", "train", f"recipe {config.name!r}, chosen before")
        if config.select:
            chose(decoding, "checkpoint", "tune")
        decoding.save(out_dir / "policy")
        return decoding


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
    **options,
) -> resps.RespsPolicy:
    """Train Re-SpS on part "train" of `trace` and return the policy as it decodes, also saved in out_dir/policy.

    config: a RespsConfig, or the name of one of `resps.CONFIGS`. policy_ms: charged per question. source: turns in place of the
    recording's, such as an `env.LiveSource` (with envs=1); rates and checkpoints are still evaluated on the
    recording. options: fields of `ppo.RunOptions`.
    The recording must hold every width of the grid and, except for state "text", features.
    """
    config, start_from = named(config, resps.CONFIGS, "Re-SpS"), options.pop("start_from", None)
    features_size = 0 if trace.features is None else int(trace.features.shape[1])
    learner, decoding = config.policy(features_size, training=True), config.policy(features_size)
    course = _Course(config, trace, costs, policy_ms, source, seed, config.ppo.total_steps, options)
    task = {"episode": "interval" if config.terminal else "turn", "credit": interval_credit(config, learner.interval)}
    task |= {"reseed_each_turn": config.reseed_each_turn, "clear_each_turn": config.clear_buffer}
    trees = [[tree] for tree in learner.trees]
    return course.learn(learner, decoding, config.ppo, Path(out_dir), trees, start_from=start_from, **task)


def interval_credit(config: resps.RespsConfig, interval: int) -> Credit:
    """The reward of an interval: push_partial, start_in_reward, junk_zero and terminal of the config (sheet 1.5)."""

    def credit(outcome: Outcome):
        complete = len(outcome.rows) >= interval
        if not complete and not config.push_partial:
            return []
        done = config.terminal or outcome.ended
        counted = [*outcome.before, *outcome.rows] if config.start_in_reward else outcome.rows
        if not (config.junk_zero and outcome.first and complete and len(counted) > 1):
            return [(outcome.observation, counted, done)]
        nothing = np.zeros_like(outcome.observation)
        return [(outcome.observation, counted[:-1], config.terminal), (nothing, counted[-1:], done)]

    return credit


@dataclasses.dataclass(frozen=True)
class LtdTrained:
    """policy: depth and size after the last round. rounds: "iter0-size", "iter0-depth": the policies trained alone,
    "iter0", "iter1", ... the combined ones after each iteration. table: one row per training, with its results."""

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
    """Train LTD's two policies: each alone, then in turns while the other one answers (`config.rounds`).

    config: an LtdConfig, or the name of one of `ltd.LAPTOP`. Every round is its own run in
    out_dir/<iteration>-<learner>. A later round of the same policy continues from its weights and optimiser; its steps and
    learning rate start over. Otherwise as in `train_resps`; a judge chooses by the speed of both policies together.
    """
    config = named(config, ltd.LAPTOP, "LTD")
    if not config.rounds:
        raise SpecdecError("rounds is empty; give at least one, such as ltd.ROUNDS[:2].")
    decisions = sum(getattr(config, stage.learner).ppo.total_steps for stage in config.rounds)
    course = _Course(config, trace, costs, policy_ms, source, seed, decisions, options)
    latest: dict[str, Learned] = {}
    folders: dict[str, Path] = {}
    policies, rows = {}, []
    for stage in config.rounds:
        kind, folder = stage.learner, Path(out_dir) / f"{stage.name}-{stage.learner}"
        if stage.frozen is not None and stage.frozen not in latest:
            raise SpecdecError(
                f"round {stage.name!r} needs a trained {stage.frozen} policy; put a round that trains it first."
            )
        part, partner = getattr(config, kind), latest.get(stage.frozen)
        learner, decoding = part.policy(training=True), part.policy()
        alone = partner is None and kind == "size" and config.random_depth  # else every tree has the planned depth
        how = dict(start_from=folders.get(kind), others=_random_depth(learner) if alone else partner)
        how |= dict(partner=partner, facts={"round": stage.name, "frozen": stage.frozen})
        constants = _constants(learner, partner is not None, alone)
        latest[kind] = course.learn(learner, decoding, part.ppo, folder, constants, **how)
        policies[folder.name], folders[kind] = latest[kind], folder
        if len(latest) == 2:
            policies[stage.name] = ltd.combine(latest["depth"], latest["size"])
        rows.append({**stage._asdict(), **runs.read_json(folder / "plan.json")["results"]})
    return LtdTrained(list(policies.values())[-1], policies, pd.DataFrame(rows))


def _random_depth(learner: ltd.SizePolicy):
    """The partner while the size policy learns alone."""
    own = learner.limits
    return lambda seed: ltd.RandomDepth(learner.depth, learner.top_k, own.verify_nodes, seed, own.beam)


def _constants(learner: Learned, beside: bool = False, at_random: bool = False) -> list[list[TreeConfig]]:
    """What the learner achieves with a single constant answer: for each, the resulting trees, equally often.

    Alone, a size policy gets trees of the plan's depth, or `at_random` of all depths; `beside` a partner, of any depth.
    """
    own, sizes = learner.limits, getattr(learner, "sizes", (learner.plan.verify_nodes,))
    alone = isinstance(learner, ltd.SizePolicy) and not (beside or at_random)
    depths = [learner.plan.depth] if alone else range(1, learner.depth + 1)
    pools = {depth: pool_size(depth, own.top_k, own.beam) + 1 for depth in depths}
    shape = dict(top_k=own.top_k, beam=own.beam)
    trees = [[TreeConfig(min(size + 1, pools[depth]), depth, **shape) for depth in depths] for size in sizes]
    return trees if at_random else [[tree] for tree in dict.fromkeys(itertools.chain(*trees))]


@dataclasses.dataclass(frozen=True)
class SystemConfig:
    """How `train_system` trains a system."""

    preset: str = "ours"  # "paper", "official" or "ours"
    steps: int | None = None  # decisions, passes (radar) or steps (ours) in place of the preset's
    seed: int = 0
    paper: bool = False  # LTD's decisions as in the paper
    resume: bool = True  # False starts over
    variant: str = "max_entropy"  # of Re-SpS (`resps.VARIANTS`)
    changes: dict = dataclasses.field(default_factory=dict)  # of the config, as in `changed`


@runs.with_settings(SystemConfig)
def train_system(system: str, trace, costs, config: SystemConfig | None = None, *, out_dir: Path, **settings):
    """Train "resps", "ltd", "radar" or "ours" on a recording, adapted to its content; policies are written to out_dir."""
    how = runs.configured(config, SystemConfig, settings)
    trainers = {  # function, configs, and the field of the training length
        "resps": (train_resps, named(how.variant, resps.VARIANTS, "Re-SpS's variants"), ("ppo.total_steps",)),
        "ltd": (train_ltd, ltd.CONFIGS if how.paper else ltd.LAPTOP, ("depth.ppo.total_steps", "size.ppo.total_steps")),
        "radar": (radar.train_radar, radar.CONFIGS, ("epochs",)),
        "ours": (value.train_recording, {how.preset: value.OURS}, ("steps",)),
    }
    train, configs, counted = trainers[check_name("system", system, trainers)]
    steps = dict.fromkeys(counted, how.steps) if how.steps else {}
    made = changed(named(how.preset, configs, system), steps | how.changes)
    made = recorded_grid(made, trace) if system == "resps" else made
    resumed = {} if system == "ours" else {"resume": how.resume}  # takes seconds
    return train(trace, costs, made, seed=how.seed, out_dir=out_dir, **resumed)


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
    """Train every system with every seed: a row of system, seed, folder and seconds each. Existing results are kept.

    on, jobs: where, and how many at once (`fanout`). settings: of `train_system`.
    """
    options = {"preset": "ours", "paper": False} | {
        name: value for name, value in settings.items() if value is not None
    }
    folders = {(system, seed): Path(out_dir) / f"{system}-{seed}" for system in systems for seed in seeds}
    shards, keys = [], {}
    for (system, seed), folder in folders.items():
        facts = {"system": system, "seed": seed, "costs": costs, "trace": trace.header.get("key"), **options}
        keys[folder] = runs.content_key(**facts, turns=trace.turns[["prompt", "turn", "part"]].to_numpy().tolist())
        if runs.found(folder / "trained.json").get("key") != keys[folder]:
            given = system, trace, costs, folder, keys[folder], {"seed": seed, **options}
            shards.append(fanout.Shard(folder.name, _train_elsewhere, given, {"key": keys[folder]}))
    fanout.run_on(fanout.Workers(on, jobs), shards, "trainings")
    table = pd.DataFrame([*folders], columns=["system", "seed"]).assign(folder=[*map(str, folders.values())])
    return table.assign(seconds=[runs.found(folder / "trained.json")["seconds"] for folder in folders.values()])


def _train_elsewhere(system: str, trace, costs, folder: Path, key: str, options: dict) -> None:
    """A shard of `train_sweep`; a killed one continues from its checkpoint."""
    began = time.perf_counter()
    train_system(system, trace, costs, out_dir=folder, **options)
    runs.write_json(folder / "trained.json", {"key": key, "seconds": time.perf_counter() - began})


def recorded_grid(config: resps.RespsConfig, trace) -> resps.RespsConfig:
    """`config` restricted to the trees that the recording can replay, with a warning if any are dropped."""
    widths = tuple(k for k in config.widths if k in trace.top_ks) or tuple(k for k in trace.top_ks if k > 1)
    depths = tuple(n for n in config.depths if n <= trace.depth)
    totals = tuple(total for total in config.totals if total - 1 <= trace.most_nodes)
    kept = {"widths": widths, "depths": depths, "totals": totals}
    if kept == {name: getattr(config, name) for name in kept} and config.starter[2] in trace.top_ks:
        return config
    if not all(kept.values()):
        raise SpecdecError(f"no tree of the preset {config.name!r} was recorded: depth {trace.depth}, record deeper.")
    starter = tuple(max(kept[name]) for name in ("totals", "depths", "widths"))
    kept |= {"starter": starter, "first_tree": starter if config.first_tree else None}
    used = changed(config, kept)
    sizes = [len(resps.valid_trees(grid.totals, grid.depths, grid.widths, grid.small)) for grid in (used, config)]
    warn(
        f"of the {sizes[1]} trees of the preset {config.name!r} {sizes[0]} are learned from, of the widths {widths}: the "
        "recording holds no others (record --top-ks)."
    )
    return used


def reward_of(config, source: ReplaySource, constants: list[list[TreeConfig]]) -> Reward:
    """The environment's reward for config.reward, with time over config.timed.

    "lagrangian" starts from the rate of the fastest of `constants` (see `_constants`), which the learner can reach: a lower rate
    would undervalue time, a higher one would make it stop too early.
    """
    kind, mean, unit_ms = REWARDS[check_name("reward", config.reward, REWARDS)]
    rate = 0.0
    if kind == "lagrangian":
        of_shape, of_cycle = {}, {}  # trees; tree -> kept tokens and milliseconds of a cycle
        for tree in dict.fromkeys(itertools.chain(*constants)):
            of_shape.setdefault(((tree.depth,), (tree.top_k,), (tree.beam,)), []).append(tree)
        for shape, trees in of_shape.items():
            table = static_grid(source.trace, source.costs, [tree.total_tokens for tree in trees], *shape)
            of_cycle |= zip(trees, table[["new_tok", "time_ms"]].to_numpy() / table[["cycles"]].to_numpy(), strict=True)
        tokens, ms = np.array([sum(of_cycle[tree] for tree in trees) for trees in constants]).T
        rate = float((tokens / ms).max()) * unit_ms
    return Reward(kind, mean, tuple(f"{part}_ms" for part in config.timed), unit_ms, rate)
