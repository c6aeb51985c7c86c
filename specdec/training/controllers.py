"""Trains Re-SpS and LTD on a recording: one config in, policies out. And any of the four systems by name.

    config.policy(training=True)  --PPO on replayed turns-->  weights  -->  config.policy()

Observation, reward and hyperparameters are in the config (`policies.resps`, `policies.ltd`); no algorithm is here.
Training uses part "train" of the recording, the choice of a checkpoint part "tune"; "test" is left for evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import fanout, runs
from specdec.core.policy import Policy
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError, nearest_name_error, warn
from specdec.policies import ltd, resps
from specdec.policies.base import Learned, changed, chose, deviations_of, named
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid
from specdec.training import radar, value
from specdec.training.env import ReplaySource, Reward
from specdec.training.ppo import Credit, Outcome, RunOptions, Task, train_policy
from specdec.training.radar_data import training_turns

# Rewards by their names in configs: kind, mean over cycles, and the unit of time in milliseconds.
REWARDS = {
    "mean_of_ratios": ("ratio", True, 1e3),  # tokens per second, Re-SpS 1.4
    "ratio_of_sums": ("ratio", False, 1e3),
    "throughput": ("ratio", False, 10.0),  # tokens per 10 ms, LTD 1.5
    "accepted": ("accepted", False, 10.0),
    "time_cost": ("time", False, 10.0),
    "lagrangian": ("lagrangian", False, 10.0),
}


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
    config, out_dir = named(config, resps.CONFIGS, "Re-SpS"), Path(out_dir)
    features_size = 0 if trace.features is None else int(trace.features.shape[1])
    learner, decoding = config.policy(features_size, training=True), config.policy(features_size)
    replayed = ReplaySource(training_turns(trace, config.prompts), costs, policy_ms=policy_ms)
    task = Task(
        source or replayed,
        reward_of(config, replayed, [[tree] for tree in learner.trees]),
        episode="interval" if config.terminal else "turn",
        credit=interval_credit(config, learner.interval),
        adapt_rate=config.reward == "lagrangian",
        reseed_each_turn=config.reseed_each_turn,
        clear_each_turn=config.clear_buffer,
    )
    judge = _judge(config, trace, costs, policy_ms, decoding.with_weights)
    run = RunOptions(out_dir, seed, trained_for=_facts(config, replayed, config.ppo.total_steps), **options)
    train_policy(learner, task, config.ppo, run, judge)
    return _saved(decoding.with_weights(learner), config, out_dir)


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
    replayed = ReplaySource(training_turns(trace, config.prompts), costs, policy_ms=policy_ms)
    decisions = sum(getattr(config, stage.learner).ppo.total_steps for stage in config.rounds)
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
        alone = _random_depth(config, learner) if partner is None else None
        task = Task(
            source or replayed,
            reward_of(config, replayed, _constants(learner, partner is not None, alone is not None)),
            others=alone or partner,
            adapt_rate=config.reward == "lagrangian",
        )
        judge = _judge(config, trace, costs, policy_ms, functools.partial(_beside, decoding, partner))
        facts = {**_facts(config, replayed, decisions), "round": stage.name, "frozen": stage.frozen}
        run = RunOptions(folder, seed, start_from=folders.get(kind), trained_for=facts, **options)
        train_policy(learner, task, part.ppo, run, judge)
        latest[kind] = policies[folder.name] = _saved(decoding.with_weights(learner), config, folder)
        folders[kind] = folder
        if len(latest) == 2:
            policies[stage.name] = ltd.combine(latest["depth"], latest["size"])
        rows.append({**stage._asdict(), **runs.read_json(folder / "plan.json")["results"]})
    return LtdTrained(list(policies.values())[-1], policies, pd.DataFrame(rows))


def _beside(decoding: Learned, partner: Learned | None, learner: Learned) -> Policy:
    """The policy that decodes: with the learner's weights, chained with the partner if there is one."""
    decoding.with_weights(learner)
    if partner is None:
        return decoding
    return ltd.combine(*((decoding, partner) if isinstance(decoding, ltd.DepthPolicy) else (partner, decoding)))


def _random_depth(config: ltd.LtdConfig, learner: Learned):
    """The partner while the size policy learns alone; None if every tree has the planned depth."""
    if isinstance(learner, ltd.DepthPolicy) or not config.random_depth:
        return None
    own = learner.limits
    return lambda seed: ltd.RandomDepth(learner.depth, learner.top_k, own.verify_nodes, seed, own.beam)


def _constants(learner: Learned, beside: bool = False, at_random: bool = False) -> list[list[TreeConfig]]:
    """What the learner achieves with a single constant answer: for each, the resulting trees, equally often.

    Alone, a size policy gets trees of the plan's depth, or `at_random` of all depths; `beside` a partner, of any depth.
    If a pool is smaller than a size, all of the pool is verified.
    """
    own, sizes = learner.limits, getattr(learner, "sizes", (learner.plan.verify_nodes,))
    alone = isinstance(learner, ltd.SizePolicy) and not (beside or at_random)
    depths = [learner.plan.depth] if alone else range(1, learner.depth + 1)
    pools = {depth: pool_size(depth, own.top_k, own.beam) + 1 for depth in depths}
    shape = dict(top_k=own.top_k, beam=own.beam)
    trees = [[TreeConfig(min(size + 1, pools[depth]), depth, **shape) for depth in depths] for size in sizes]
    return trees if at_random else [[tree] for tree in dict.fromkeys(itertools.chain(*trees))]


def train_system(
    system: str,
    trace,
    costs,
    preset: str = "ours",
    steps: int | None = None,
    *,
    seed: int = 0,
    out_dir: Path,
    paper: bool = False,
    resume: bool = True,
    variant: str = "max_entropy",
    changes: dict | None = None,
):
    """Train "resps", "ltd", "radar" or "ours" on a recording, adapted to its content; policies are written to out_dir.

    preset: "paper", "official" or "ours". steps: decisions, passes (radar) or steps (ours) in place of the preset's.
    paper: LTD's decisions as in the paper. resume: False starts over. variant: of Re-SpS (`resps.VARIANTS`). changes:
    of the config, as in `changed`.
    """
    options = {"seed": seed, "out_dir": out_dir}
    if system == "ours":
        config = changed(value.OURS, ({"steps": steps} if steps else {}) | (changes or {}))
        return value.train_recording(trace, costs, config, **options)
    trainers = {  # function, configs, and the field of the training length
        "resps": (train_resps, named(variant, resps.VARIANTS, "Re-SpS's variants"), ("ppo.total_steps",)),
        "ltd": (train_ltd, ltd.CONFIGS if paper else ltd.LAPTOP, ("depth.ppo.total_steps", "size.ppo.total_steps")),
        "radar": (radar.train_radar, radar.CONFIGS, ("epochs",)),
    }
    if system not in trainers:
        raise nearest_name_error("system", system, [*trainers, "ours"])
    train, configs, counted = trainers[system]
    config = named(preset, configs, system)
    config = changed(config, (dict.fromkeys(counted, steps) if steps else {}) | (changes or {}))
    if system == "resps":
        config = recorded_grid(config, trace)
    return train(trace, costs, config, resume=resume, **options)


def train_sweep(
    systems: Sequence[str],
    trace,
    costs,
    seeds: Sequence[int] = (0,),
    *,
    out_dir: Path,
    preset: str = "ours",
    steps: int | None = None,
    paper: bool = False,
    on: str | None = None,
    jobs: int | None = None,
) -> pd.DataFrame:
    """Train every system with every seed: a row of system, seed, folder and seconds each. Existing results are kept.

    preset, steps, paper: of `train_system`. on, jobs: where, and how many at once (`fanout`).
    """
    options = {"preset": preset, "paper": paper} | ({"steps": steps} if steps else {})
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


def _saved(policy: Learned, config, folder: Path):
    """The policy, with a record of its training data, also in folder/policy."""
    chose(policy, "weights", "train", f"recipe {config.name!r}, chosen before")
    if config.select:
        chose(policy, "checkpoint", "tune")
    policy.save(folder / "policy")
    return policy


def reward_of(config, source: ReplaySource, constants: list[list[TreeConfig]]) -> Reward:
    """The environment's reward for config.reward, with time over config.timed.

    "lagrangian" starts from the rate of the fastest of `constants` (see `_constants`), which the learner can reach: a lower rate
    would undervalue time, a higher one would make it stop too early.
    """
    if config.reward not in REWARDS:
        raise nearest_name_error("reward", config.reward, REWARDS)
    kind, mean, unit_ms = REWARDS[config.reward]
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


def _judge(config, trace, costs, policy_ms: float, decoding: Callable[[Learned], Policy]):
    """A learner's speed in replay on part "tune"; None if the config selects no checkpoint."""
    if not config.select:
        return None
    if "tune" not in set(trace.turns["part"]):
        raise SpecdecError('choosing a checkpoint needs turns of part "tune"; record some or set select=False.')
    held_out = trace.select(part="tune")
    return lambda learner: 1 / replay(held_out, decoding(learner), costs, policy_ms=policy_ms).ms_per_tok


def _facts(config, source: ReplaySource, decisions: int) -> dict:
    """The facts of its training that a policy stores, including the counts in its deviations."""
    facts = {"preset": config.name, "config": dataclasses.asdict(config)}
    questions = source.trace.turns.groupby(["suite", "prompt"], sort=False).ngroups
    facts["deviations"] = deviations_of(config, decisions=decisions, questions=questions)
    return facts | {"pair": source.trace.header["pair"], "costs": source.costs.name}
