"""Trains Re-SpS and LTD on a recording: one config in, policies out. And any system by name.

    config.policy(training=True)  --PPO on replayed turns-->  weights  -->  config.policy()

Training uses part "train" of the recording, the choice of a checkpoint part "tune"; "test" is left
for evaluation.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.core.policy import Policy
from specdec.core.records import SIZE
from specdec.core.tree_config import TreeConfig
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_name, warn
from specdec.policies import ltd, resps
from specdec.policies.base import L, Learned, changed, chose, named, tree_of
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid
from specdec.replays.trace import Trace
from specdec.training import radar, value
from specdec.training.env import UNITS_MS, Credit, ReplaySource, Reward, Task
from specdec.training.ppo import RunOptions, train_policy

# The fields with the length of a training: decisions, passes (radar) or steps (ours).
LENGTHS = {
    "resps": ("ppo.total_steps",),
    "ltd": ("depth.ppo.total_steps", "size.ppo.total_steps"),
    "radar": ("epochs",),
    "ours": ("steps",),
}


class _Course:
    """What the trainings of one config share. decisions: of all its trainings together."""

    def __init__(self, config, trace: Trace, costs: CostModel, policy_ms: float, decisions: int):
        turns = radar.training_turns(trace, config.prompts)
        self.replayed = ReplaySource(turns, costs, policy_ms)
        self.config = config
        self.tune = trace.select(part="tune") if config.select else None
        # what a policy says of its training
        prompts = turns.turns.groupby(["suite", "prompt"], sort=False)
        counts = {"decisions": decisions, "questions": prompts.ngroups}
        self.facts = {
            "preset": config.name,
            "config": dataclasses.asdict(config),
            "deviations": [line.format_map(counts) for line in config.deviations],
            "pair": trace.header["pair"],
            "costs": costs.name,
        }

    def learn(self, learner: L, decoding: L, ppo, task: Task, run: RunOptions, partner=None) -> L:
        """Train `learner`. Returns `decoding` with its weights, also saved in out_dir/policy.

        partner: decodes beside it while checkpoints are judged.
        """

        def speed(learned: Learned) -> float:
            """Tokens per ms on part "tune" of the policy as it decodes, beside its partner."""
            policy = decoding.with_weights(learned)
            if partner is not None:
                pair = (partner, policy) if policy.kind == SIZE else (policy, partner)
                policy = ltd.combine(*pair)
            source = self.replayed
            replayed = replay(self.tune, policy, source.costs, policy_ms=source.policy_ms)
            return 1 / replayed.ms_per_tok

        judge = speed if self.config.select else None
        run = dataclasses.replace(run, trained_for=self.facts | run.trained_for)
        decoding.with_weights(train_policy(learner, task, ppo, run, judge))
        chose(decoding, "weights", "train", f"recipe {self.config.name!r}, chosen before")
        if self.config.select:
            chose(decoding, "checkpoint", "tune")
        decoding.save(Path(run.out_dir) / "policy")
        return decoding


def train_resps(
    trace: Trace, costs, config=resps.OURS, *, out_dir: Path, policy_ms=0.0, source=None, **options
) -> resps.RespsPolicy:
    """Train Re-SpS on part "train" of `trace`; returns the policy as it decodes.

    It is also saved in out_dir/policy. config: a RespsConfig or a name of `resps.CONFIGS`.
    policy_ms: charged per question. source: an `env.LiveSource` (with envs=1) in place of the
    recording's turns. options: fields of `ppo.RunOptions`. The recording must hold every width of
    the grid and, except for state "text", features.
    """
    config = named(config, resps.CONFIGS, "Re-SpS")
    features_size = 0 if trace.features is None else int(trace.features.shape[1])
    learner = config.policy(features_size, training=True)
    course = _Course(config, trace, costs, policy_ms, config.ppo.total_steps)
    task = Task(
        source or course.replayed,
        reward_of(config, course.replayed, [[tree] for tree in learner.trees]),
        episode="interval" if config.terminal else "turn",
        credit=interval_credit(config, learner.interval),
        reseed_each_turn=config.reseed_each_turn,
    )
    run = RunOptions(out_dir, **options)
    return course.learn(learner, config.policy(features_size), config.ppo, task, run)


def interval_credit(config: resps.RespsConfig, interval: int) -> Credit:
    """The reward of an interval by the config's flags (sheet 1.5)."""

    def credit(observation, rows: list, before: list, first: bool, ended: bool):
        complete = len(rows) >= interval
        if not complete and not config.push_partial:
            return []
        done = config.terminal or ended
        if config.start_in_reward:
            rows = [*before, *rows]
        if not (config.junk_zero and first and complete and len(rows) > 1):
            return [(observation, rows, done)]
        nothing = np.zeros_like(observation)
        return [(observation, rows[:-1], config.terminal), (nothing, rows[-1:], done)]

    return credit


class LtdTrained(NamedTuple):
    """policy: depth and size after the last round. rounds: "iter0-size", "iter0-depth", ... the
    policies as trained; "iter0", "iter1", ... the combined ones after each iteration.
    """

    policy: Policy
    rounds: dict[str, Policy]


def train_ltd(
    trace: Trace, costs, config=ltd.OURS, *, out_dir: Path, policy_ms=0.0, source=None, **options
) -> LtdTrained:
    """Train LTD's two policies: each alone, then in turns while the other one answers.

    config: an LtdConfig or a name of `ltd.LAPTOP`. Every round is its own run in
    out_dir/<iteration>-<learner>; the last two policies are also saved in out_dir/policy. A later
    round of the same policy continues from its weights and optimiser. Otherwise as `train_resps`.
    """
    config = named(config, ltd.LAPTOP, "LTD")
    assert config.rounds, "a round at least"
    decisions = sum(getattr(config, part.learner).ppo.total_steps for part in config.rounds)
    course = _Course(config, trace, costs, policy_ms, decisions)
    latest: dict[str, Learned] = {}
    folders: dict[str, Path] = {}
    policies: dict[str, Policy] = {}
    for round_ in config.rounds:
        kind = round_.learner
        folder = Path(out_dir) / f"{round_.name}-{kind}"
        assert round_.frozen in (None, *latest), "a round that trains the partner comes first"
        # 1. the learner and who answers beside it; alone, the size policy gets random depths
        part = getattr(config, kind)
        learner = part.policy(training=True)
        partner = latest.get(round_.frozen)
        at_random = partner is None and kind == "size" and config.random_depth
        constants = _constants(learner, partner is not None, at_random)
        others = partial(ltd.RandomDepth, learner) if at_random else partner
        reward = reward_of(config, course.replayed, constants)
        task = Task(source or course.replayed, reward, others=others)
        # 2. PPO, from the weights of its last round
        facts = {"round": round_.name, "frozen": round_.frozen}
        run = RunOptions(folder, **options, start_from=folders.get(kind), trained_for=facts)
        latest[kind] = course.learn(learner, part.policy(), part.ppo, task, run, partner)
        # 3. the policies after this round
        folders[kind] = folder
        policies[folder.name] = latest[kind]
        if len(latest) == 2:
            policies[round_.name] = ltd.combine(latest["depth"], latest["size"])
    for kind, policy in latest.items():
        policy.save(Path(out_dir) / "policy" / kind)
    return LtdTrained(list(policies.values())[-1], policies)


def _constants(learner: Learned, beside=False, at_random=False) -> list[list[TreeConfig]]:
    """The trees of each constant answer, equally often.

    A size policy has trees of the plan's depth, `at_random` of all, `beside` a partner of any.
    """
    limits = learner.limits
    sizes = getattr(learner, "sizes", (learner.plan.verify_nodes,))
    depths = range(1, learner.depth + 1)
    if learner.kind == SIZE and not (beside or at_random):
        depths = [learner.plan.depth]
    constants = []
    for size in sizes:
        trees = [tree_of(size, depth, limits.top_k, limits.beam) for depth in depths]
        # at random depths an answer has all of them
        constants.extend([trees] if at_random else [[tree] for tree in trees])
    return constants


def reward_of(config, source: ReplaySource, constants: list[list[TreeConfig]]) -> Reward:
    """The environment's reward for config.reward, with time over config.timed.

    "lagrangian" starts from the rate of the fastest of `constants`, which the learner can reach: a
    lower rate would undervalue time, a higher one would make it stop too early.
    """
    reward = Reward(config.reward, tuple(f"{part}_ms" for part in config.timed))
    if reward.kind != "lagrangian":
        return reward
    # 1. kept tokens and milliseconds of a cycle of every tree; one grid for each shape
    shapes: dict[tuple, list[TreeConfig]] = {}
    for tree in dict.fromkeys(itertools.chain.from_iterable(constants)):
        shapes.setdefault((tree.depth, tree.top_k, tree.beam), []).append(tree)
    per_cycle: dict[TreeConfig, np.ndarray] = {}
    for (depth, top_k, beam), trees in shapes.items():
        totals = [tree.total_tokens for tree in trees]
        table = static_grid(source.trace, source.costs, totals, (depth,), (top_k,), (beam,))
        sums = table[["new_tok", "time_ms"]].to_numpy() / table[["cycles"]].to_numpy()
        per_cycle.update(zip(trees, sums, strict=True))
    # 2. the best mean of a constant's trees
    sums = [sum(per_cycle[tree] for tree in trees) for trees in constants]
    rate = max(float(tokens / ms) for tokens, ms in sums)
    return dataclasses.replace(reward, rate=rate * UNITS_MS["lagrangian"])


def train_system(
    system, trace, costs, *, preset="ours", variant="max_entropy", steps=None, changes=(), **options
):
    """Train "resps", "ltd", "radar" or "ours" on a recording; policies are written to out_dir.

    variant: of Re-SpS (`resps.VARIANTS`). steps: the length (`LENGTHS`) in place of the preset's.
    changes: of the config, as in `changed`. options: out_dir, seed and, but for ours, resume=False
    to start over. Several trainings at once are tasks of `specdec.parallel.parallel`.
    """
    # 1. the config, with this length and changed
    lengths = LENGTHS[check_name("system", system, LENGTHS)]
    changes = dict.fromkeys(lengths if steps else (), steps) | dict(changes)
    configs = {
        "resps": named(variant, resps.VARIANTS, "Re-SpS's variants"),
        "ltd": ltd.LAPTOP,
        "radar": radar.controller.CONFIGS,
        "ours": {preset: value.ValueConfig()},
    }
    config = changed(named(preset, configs[system], system), changes)
    if system == "resps":
        config = recorded_grid(config, trace)
    # 2. the training
    trainings = {"resps": train_resps, "ltd": train_ltd, "radar": radar.train_radar}
    train = trainings.get(system, value.train_recording)
    return train(trace, costs, config, **options)


def recorded_grid(config: resps.RespsConfig, trace: Trace) -> resps.RespsConfig:
    """`config` restricted to the trees that were recorded; warns if any are dropped."""
    widths = tuple(k for k in config.widths if k in trace.top_ks)
    widths = widths or tuple(k for k in trace.top_ks if k > 1)
    depths = tuple(n for n in config.depths if n <= trace.depth)
    totals = tuple(total for total in config.totals if total - 1 <= trace.most_nodes)
    same = (widths, depths, totals) == (config.widths, config.depths, config.totals)
    if same and config.starter[2] in trace.top_ks:
        return config
    if not (widths and depths and totals):
        why = f"no tree of the preset {config.name!r} was recorded: depth {trace.depth}"
        raise SpecdecError(f"{why}, record deeper.")
    starter = (max(totals), max(depths), max(widths))
    grid = {"widths": widths, "depths": depths, "totals": totals, "starter": starter}
    grid["first_tree"] = starter if config.first_tree else None
    why = f"the grid of the preset {config.name!r} is cut to totals {totals}, depths {depths}"
    warn(f"{why} and widths {widths}: the recording holds no others (record --top-ks).")
    return changed(config, grid)
