"""Train Re-SpS and LTD on a recording, as their papers, their codes or we would: presets in, policies out.

Turns the systems' own settings and flags (`policies.resps`, `policies.ltd`) into arguments of `ppo.train_policy`; holds
no algorithm. Training reads part "train" of the recording, a choice between checkpoints part "tune"; "test" is for you.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.policy import Policy
from specdec.errors import SpecdecError, nearest_name_error
from specdec.policies import ltd, resps
from specdec.policies.base import Learned, PPOConfig
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid
from specdec.training.env import ReplaySource, Reward
from specdec.training.ppo import RunOptions, Task, train_policy
from specdec.training.rollouts import Credit, Outcome

# Decisions per training; LTD's count per round. "paper" is what the texts say (policies.*.PPO), "laptop" keeps one seed of
# all rounds within 10 minutes on two cores: only LTD's wide networks with 20 epochs per rollout have to be scaled down.
LAPTOP_STEPS = {
    "resps": {"paper": 55_000, "official": 55_000, "ours": 60_000},
    "ltd": {
        "paper": {"depth": 61_440, "size": 20_480},
        "official": {"depth": 100_000, "size": 100_000},
        "ours": {"depth": 200_000, "size": 100_000},
    },
}
BUDGETS = ("laptop", "paper")
# Whether the best of several checkpoints is kept, by speed on part "tune": LTD's paper does ([P] 3.3), the codes do not.
SELECTED = {"resps": ("ours",), "ltd": ("paper", "ours")}
_LAGRANGIAN_UNIT_MS = 10.0


def train_resps(
    trace,
    costs,
    preset: str = "ours",
    variant: str = "max_entropy",
    *,
    seed: int = 0,
    out_dir: Path,
    total_steps: int | None = None,
    budget: str = "laptop",
    small: bool = False,
    changes: dict | None = None,
    flags: dict | None = None,
    ppo: dict | None = None,
    select: bool | None = None,
    policy_ms: float = 0.0,
    **options,
) -> resps.RespsPolicy:
    """Train Re-SpS on part "train" of `trace` and return the policy as it is used, also saved in out_dir/policy.

    variant: "max_entropy" or "standard"; small: the [64, 64] networks. changes, flags, ppo: what differs from the preset
    (fields of RespsPolicy, of its Flags, PPO settings). select: keep the checkpoint that is fastest on part "tune".
    policy_ms: charged per question. options: of `ppo.RunOptions` (envs, segment_steps, progress, resume).
    A recording must hold every width of the grid and, but for state "text", features.
    """
    known = _changed(resps.FLAGS[_known("Re-SpS", preset, resps.FLAGS)], flags)
    fixed = {"features_size": 0 if trace.features is None else int(trace.features.shape[1]), **(changes or {})}
    settings = {**resps.ppo_settings(preset, variant, small), "normalise_reward": known.normalise_reward}
    settings = _changed(PPOConfig(**settings), ppo, "PPO setting")
    common = {"activation": settings.activation, **fixed}
    learner = resps.RespsPolicy(**{**resps.settings(preset, variant, training=True), **common, "temperature": None})
    used = resps.RespsPolicy(**{**resps.settings(preset, variant), **common})
    select = preset in SELECTED["resps"] if select is None else select
    judge = _judge(trace, costs, policy_ms, lambda policy: _like(used, policy)) if select else None
    train = trace.select(part="train")
    reward = _reward(
        known,
        {"mean_of_ratios": ("ratio", True, 1e3), "ratio_of_sums": ("ratio", False, 1e3)},
        lambda: _best_rate(train, costs, learner.totals, learner.depths, learner.widths),
    )
    steps = total_steps or _steps(budget, LAPTOP_STEPS["resps"][preset], settings.total_steps)
    facts = {"preset": preset, "variant": variant, "flags": runs.plain(known), **_facts(trace, costs)}
    task = Task(
        ReplaySource(train, costs, policy_ms=policy_ms),
        reward,
        episode="interval" if known.terminal else "turn",
        credit=interval_credit(known, learner.interval),
        adapt_rate=known.reward == "lagrangian",
        reseed_each_turn=known.reseed_each_turn,
    )
    run = RunOptions(Path(out_dir), seed, trained_for=facts, **options)
    train_policy(learner, task, dataclasses.replace(settings, total_steps=steps), run, judge)
    _like(used, learner).save(Path(out_dir) / "policy")
    return used


def interval_credit(flags: resps.Flags, interval: int) -> Credit:
    """What an interval of Re-SpS earns: flags push_partial, start_in_reward, junk_zero, terminal (see `resps.Flags`)."""

    def credit(outcome: Outcome):
        whole = len(outcome.rows) >= interval
        if not whole and not flags.push_partial:
            return []
        done = flags.terminal or outcome.ended
        counted = [*outcome.before, *outcome.rows] if flags.start_in_reward else outcome.rows
        if not (flags.junk_zero and outcome.first and whole and len(counted) > 1):
            return [(outcome.observation, counted, done)]
        nothing = np.zeros_like(outcome.observation)
        return [(outcome.observation, counted[:-1], flags.terminal), (nothing, counted[-1:], done)]

    return credit


@dataclasses.dataclass(frozen=True)
class LtdTrained:
    """policy: depth and size after the last round. rounds: "iter0-size", "iter0-depth" the policies that learned alone,
    "iter0", "iter1", ... the combined ones after each iteration. table: one row per training, with its results."""

    policy: Policy
    rounds: dict[str, Policy]
    table: pd.DataFrame


def train_ltd(
    trace,
    costs,
    preset: str = "ours",
    *,
    seed: int = 0,
    out_dir: Path,
    rounds=ltd.ROUNDS,
    budget: str = "laptop",
    total_steps: dict[str, int] | None = None,
    changes: dict[str, dict] | None = None,
    flags: dict | None = None,
    ppo: dict[str, dict] | None = None,
    select: bool | None = None,
    policy_ms: float = 0.0,
    **options,
) -> LtdTrained:
    """Train LTD's two policies: each alone, then in turns while the other one answers (`ltd.ROUNDS`, `ltd.ORDERS`).

    Every round is a run of its own in out_dir/<iteration>-<learner>; a later round of the same policy goes on from its
    weights and optimiser, its steps and learning rate start over. total_steps, changes, ppo: per policy, {"depth": ...,
    "size": ...}; flags: of both. Others as in `train_resps`; select picks by the speed of both policies together.
    """
    known = _changed(ltd.FLAGS[_known("LTD", preset, ltd.FLAGS)], flags)
    select = preset in SELECTED["ltd"] if select is None else select
    setup = _Ltd(trace, trace.select(part="train"), costs, preset, known, changes or {}, ppo or {}, select, policy_ms)
    latest: dict[str, Learned] = {}
    folders: dict[str, Path] = {}
    found, table = {}, []
    for one in rounds:
        kind, folder = one.learner, Path(out_dir) / f"{one.name}-{one.learner}"
        steps = (total_steps or {}).get(kind) or _steps(
            budget, LAPTOP_STEPS["ltd"][preset][kind], setup.paper_steps(kind)
        )
        latest[kind] = setup.train(one, latest, folder, steps, seed, folders.get(kind), options)
        folders[kind], found[folder.name] = folder, latest[kind]
        if len(latest) == 2:
            found[one.name] = ltd.combine(latest["depth"], latest["size"])
        table.append({**one._asdict(), **runs.read_json(folder / "plan.json")["results"]})
    if not found:
        raise SpecdecError("rounds is empty; give at least one, such as ltd.ROUNDS[:2].")
    return LtdTrained(list(found.values())[-1], found, pd.DataFrame(table))


@dataclasses.dataclass(frozen=True)
class _Ltd:
    """What all rounds of one training of LTD share."""

    trace: object
    train_trace: object
    costs: object
    preset: str
    flags: ltd.Flags
    changes: dict
    ppo: dict
    select: bool
    policy_ms: float

    def train(self, one: ltd.Round, latest: dict, folder: Path, steps: int, seed: int, start_from, options) -> Learned:
        """One round: the policy as it decodes, saved in folder/policy."""
        learner, used = (self.policy(one.learner, training) for training in (True, False))
        if one.frozen is not None and one.frozen not in latest:
            raise SpecdecError(
                f"round {one.name!r} needs a trained {one.frozen} policy; put a round that trains it first."
            )
        partner = latest.get(one.frozen)
        facts = {"preset": self.preset, "round": one.name, "frozen": one.frozen, "flags": runs.plain(self.flags)}

        def rate() -> float:
            return _best_rate(self.train_trace, self.costs, *_ltd_grid(learner))

        def whole(policy: Learned) -> Policy:
            return _joined(_like(used, policy), partner)

        task = Task(
            ReplaySource(self.train_trace, self.costs, policy_ms=self.policy_ms),
            _reward(self.flags, _LTD_REWARDS, rate),
            others=self.random_depth(learner) if partner is None else partner,
            adapt_rate=self.flags.reward == "lagrangian",
        )
        judge = _judge(self.trace, self.costs, self.policy_ms, whole) if self.select else None
        facts |= _facts(self.trace, self.costs)
        run = RunOptions(folder, seed, start_from=start_from, trained_for=facts, **options)
        ppo = dataclasses.replace(self.settings(one.learner), total_steps=steps)
        train_policy(learner, task, ppo, run, judge)
        _like(used, learner).save(folder / "policy")
        return used

    def settings(self, kind: str) -> PPOConfig:
        return _changed(PPOConfig(**ltd.PPO[self.preset][kind]), self.ppo.get(kind), "PPO setting")

    def paper_steps(self, kind: str) -> int:
        return self.settings(kind).total_steps

    def policy(self, kind: str, training: bool) -> Learned:
        """A fresh policy with the preset's settings while training or at inference."""
        settings = ltd.PRESETS[self.preset][kind] | (ltd.WHILE_TRAINING[self.preset][kind] if training else {})
        settings |= {"activation": self.settings(kind).activation, **self.changes.get(kind, {})}
        policy = {"depth": ltd.DepthPolicy, "size": ltd.SizePolicy}[kind](**settings)
        if kind == "depth" and policy.depth <= policy.stride:
            raise SpecdecError(
                f"a depth policy with depth={policy.depth} and stride={policy.stride} is never asked; draft deeper."
            )
        return policy

    def random_depth(self, learner: Learned):
        """What drafts while the size policy learns alone; None where every tree is as deep as planned."""
        if isinstance(learner, ltd.DepthPolicy) or not self.flags.random_depth:
            return None
        deepest, top_k, most = learner.depth, learner.top_k, learner.limits.verify_nodes

        def random_depth(seed: int) -> Policy:
            return ltd.RandomDepth(deepest, top_k, most, seed)

        return random_depth


_LTD_REWARDS = {
    "throughput": ("ratio", False, 10.0),
    "accepted": ("accepted", False, 10.0),
    "time_cost": ("time", False, 10.0),
}


def _joined(policy: Learned, partner: Learned | None) -> Policy:
    if partner is None:
        return policy
    return ltd.combine(*((policy, partner) if isinstance(policy, ltd.DepthPolicy) else (partner, policy)))


def _ltd_grid(learner: Learned) -> tuple:
    """The constant trees (total_tokens, depths, top_ks) that the learner could imitate."""
    sizes = getattr(learner, "sizes", (learner.plan.verify_nodes,))
    return [size + 1 for size in sizes], range(1, learner.depth + 1), [learner.top_k]


# ---- shared ----------------------------------------------------------------------------------------------------------
def _known(system: str, preset: str, presets: dict) -> str:
    if preset not in presets:
        raise nearest_name_error(f"preset of {system}", preset, presets)
    return preset


def _changed(config, changes: dict | None, what: str = "flag"):
    unknown = set(changes or {}) - {field.name for field in dataclasses.fields(config)}
    if unknown:
        raise nearest_name_error(what, sorted(unknown)[0], [field.name for field in dataclasses.fields(config)])
    return dataclasses.replace(config, **(changes or {}))


def _steps(budget: str, laptop: int, paper: int) -> int:
    if budget not in BUDGETS:
        raise nearest_name_error("budget", budget, BUDGETS)
    return laptop if budget == "laptop" else paper


def _reward(flags, named: dict[str, tuple], rate: Callable[[], float]) -> Reward:
    """The environment's reward for flags.reward, with time over flags.timed; rate() in tokens per ms."""
    laps = tuple(f"{part}_ms" for part in flags.timed)
    if flags.reward == "lagrangian":
        unit = _LAGRANGIAN_UNIT_MS
        return Reward("lagrangian", laps=laps, unit_ms=unit, rate=rate() * unit)
    if flags.reward not in named:
        raise nearest_name_error("reward", flags.reward, ("lagrangian", *named))
    kind, mean, unit = named[flags.reward]
    return Reward(kind, mean=mean, laps=laps, unit_ms=unit)


def _best_rate(trace, costs, total_tokens, depths, top_ks) -> float:
    """Tokens per ms of the fastest of these constant trees: what a learner that prices time must not stay below."""
    grid = static_grid(trace, costs, total_tokens, depths, top_ks)
    return float((grid["cycle_tok"] / grid["time_ms"]).max())


def _judge(trace, costs, policy_ms: float, used: Callable[[Learned], Policy]):
    """A policy's speed in replay on part "tune"."""
    if "tune" not in set(trace.turns["part"]):
        raise SpecdecError('choosing a checkpoint needs turns of part "tune"; record some or pass select=False.')
    held_out = trace.select(part="tune")
    return lambda policy: 1 / replay(held_out, used(policy), costs, policy_ms=policy_ms).ms_per_tok


def _like(used: Learned, learner: Learned) -> Learned:
    """`used`, the policy as it decodes, with what `learner` has learned."""
    used.network, used.trained_for = learner.network, learner.trained_for
    return used


def _facts(trace, costs) -> dict:
    return {"pair": trace.header["pair"], "costs": costs.name}
