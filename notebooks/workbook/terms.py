"""Equal terms: every learned controller with the same prompts, trees, prices, seeds and trials.

    equal            trained and tuned alike: shapes of trees (or intervals) are tried on part
                     "tune", and answers are priced
    live             the same config, learned while decoding, as the papers do it
    paper, official  action grids, prompts, rewards and networks as published

Every training has a folder of its own and is found there again.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.policy import Policy, Static
from specdec.core.records import TURN
from specdec.core.tree_config import TreeConfig
from specdec.costs.calibrate import measured_answer_ms
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation.compare import CHOSEN_ON, CLAIRVOYANT, Baselines, Comparison, compare_replay
from specdec.identity import EQUAL, GRID, LIVE, OFFICIAL, PAPER, STATIC, Method
from specdec.policies import ltd, radar, resps, value
from specdec.policies.base import changed, chose, load_policy
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import best_static, fastest, setting, static_grid
from specdec.training.controllers import train_ltd, train_resps
from specdec.training.env import LiveSource
from specdec.training.radar import distributions_of, latency_ms, rows_for, train_radar
from specdec.training.value import train_value

RESPS, LTD, RADAR, OURS = "Re-SpS", "LTD", "RADAR", "ours"
PUBLISHED = {RESPS: resps.CONFIGS, LTD: ltd.LAPTOP, RADAR: radar.CONFIGS}
TERMS = {
    EQUAL: (RESPS, LTD, RADAR, OURS),
    PAPER: (RESPS, LTD, RADAR),
    OFFICIAL: (RESPS, LTD, RADAR),
    LIVE: (RESPS, LTD),
}


# the trees between which each paper's controller chooses, or its grid search
GRIDS: dict[str, tuple[TreeConfig, ...]] = {
    RESPS: tuple(resps.valid_trees(resps.PAPER.totals, resps.PAPER.depths, resps.PAPER.widths)),
    LTD: tuple(
        TreeConfig(nodes + 1, depth, 10) for depth in range(4, 13) for nodes in range(40, 241, 20)
    ),
    RADAR: tuple(TreeConfig(60, depth, 10) for depth in range(1, 8)),
}
CHOSEN_FOR_LTD = "humaneval"  # on which its paper searches
# what recordings must hold for the published action grids: settings of `record`
WIDE = dict(depth=12, top_ks=(8, 10, 12, 16, 20, 32), trees=(10,), most_nodes=240)
Shape = tuple[int, tuple[int, ...]]  # children per node, and the nodes that levels expand


@dataclass(frozen=True)
class EqualTerms:
    """What every learned controller is given alike; objective and network stay its own.

    shapes: children per node and the nodes that each level expands. intervals: Re-SpS's in their
    place. trial_frac, effort: lengths as parts of a training's own.
    """

    name: str = EQUAL
    shapes: tuple[tuple[int, ...], ...] = ((4,), (4, 2, 1), (2,), (10,))
    depth: int = 12
    depths: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 7, 8, 10, 12)
    total_tokens: tuple[int, ...] = (
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
        *(60, 80, 100, 128, 160, 201, 241),
    )
    intervals: tuple[int, ...] = (10, 1, 3, 30)
    trial_frac: float = 0.2
    effort: float = 1.0


@dataclass(frozen=True)
class Job:
    """One training."""

    system: str
    terms: str
    seed: int

    @property
    def method(self) -> Method:
        return Method(self.system, self.terms)

    @property
    def folder(self) -> str:
        return f"{self.system.lower()}-{self.terms}-{self.seed}"

    @property
    def on_equal_terms(self) -> bool:
        return self.terms in (EQUAL, LIVE)


@dataclass(frozen=True)
class Arena:
    """On what, for which machine and where controllers are trained.

    trace: with parts "train" and "tune". wide: one of the published grids (`WIDE`). sampled: at
    temperature one, for RADAR. pair: to time answers and to learn live.
    """

    trace: object
    costs: object
    folder: Path
    terms: EqualTerms = EqualTerms()  # noqa: RUF009  frozen
    wide: object = None
    sampled: object = None
    pair: object = None
    live_prompts: Sequence = ()
    live_decisions: int = 256
    progress: bool = True

    def jobs(self, seeds: Sequence[int], terms: Sequence[str] = tuple(TERMS)) -> list[Job]:
        """All trainings that are possible here: a first seed of everything, then the others."""
        for name in terms:
            if name not in TERMS:
                raise nearest_name_error("terms", name, TERMS)
        jobs = []
        for seed, name in itertools.product(seeds, terms):
            possible = name == EQUAL or self.wide is not None
            if name == LIVE:
                # live rows are slow and noisy: one seed
                possible = bool(self.live_prompts) and seed == seeds[0]
            if possible:
                jobs += [Job(system, name, seed) for system in TERMS[name]]
        return jobs

    def home(self, job: Job):
        """The recording that a job learns from."""
        return self.trace if job.on_equal_terms else self.wide

    def is_trained(self, job: Job) -> bool:
        return (self.folder / job.folder / "trained.json").is_file()

    def shapes(self) -> list[Shape]:
        """The shapes of the terms whose whole trees were recorded."""
        shapes = [(top_k, tuple(beam)) for top_k, *beam in self.terms.shapes]
        recorded = list(filter(self.recorded, shapes))
        if not recorded:
            why = f"no whole trees of {self.terms.shapes} were recorded"
            raise SpecdecError(f"{why}; record trees=(4, 10).")
        return recorded

    def recorded(self, shape: Shape) -> bool:
        """Whether whole trees of a shape were recorded."""
        try:
            self.trace.column("scores", *shape)
        except SpecdecError:
            return False
        return True

    def depth(self, shape: Shape) -> int:
        """Expansions at most of a shape: those of the terms, as far as they were recorded."""
        return min(self.terms.depth, self.trace.depth_of(*shape))

    def options(self, system: str) -> list:
        """What is tried on part "tune": intervals for Re-SpS, shapes for the others."""
        shapes = self.shapes()
        if system == RESPS:
            return list(self.terms.intervals[: len(shapes)])
        if system == OURS:
            # it expands as many nodes of a level as a node has children
            square = dict.fromkeys((top_k, ()) for top_k, _ in shapes)
            return list(filter(self.recorded, square))
        if system == RADAR:
            # its network needs trees that are deep enough
            deep = [shape for shape in shapes if self.depth(shape) >= radar.DECISIONS]
            return deep or shapes
        return shapes

    def start(self, shape: Shape) -> TreeConfig:
        """The fastest tree of a shape that drafts, on part "tune": where learning begins."""
        most = self.trace.most_nodes + 1
        totals = [total for total in self.terms.total_tokens if 1 < total <= most]
        depths = range(1, self.depth(shape) + 1)
        grid = dict(total_tokens=totals, depths=depths, top_ks=[shape[0]], beams=[shape[1]])
        return best_static(self.trace.select(part="tune"), self.costs, **grid)


def best_of_grids(trace, costs, systems=tuple(GRIDS)) -> dict[Method, list[Policy]]:
    """The fastest tree of each paper's own grid, on the parts `train` and `tune`.

    LTD's is searched on HumanEval alone, as in the paper. A preset says if the grid was cut.
    """
    chosen_on = trace.turns["part"].isin(CHOSEN_ON)
    benchmarks = trace.turns["suite"].str.rpartition("/")[2]
    methods = {}
    for system in systems:
        # 1. the prompts and the trees that were recorded
        turns = chosen_on
        if system == LTD:
            turns = chosen_on & (benchmarks == CHOSEN_FOR_LTD)
        trees = []
        for tree in GRIDS[system]:
            is_small = tree.top_k in trace.top_ks and tree.verify_nodes <= trace.most_nodes
            if is_small and tree.depth <= trace.depth_of(tree.top_k, ()):
                trees.append(setting(tree))
        if not turns.any() or not trees:
            continue
        # 2. the fastest among them
        inside = pd.DataFrame(trees)
        values = [sorted(inside[name].unique()) for name in ("total_tokens", "depth", "top_k")]
        table = static_grid(trace.select(turns), costs, *values, [()])
        best = fastest(table.merge(inside))
        cut = "" if len(trees) == len(GRIDS[system]) else ", as far as recorded"
        methods[Method(STATIC, GRID, system + cut)] = [Static.of(best)]
    return methods


def opened(name: str, trace, costs, terms: EqualTerms, scale: str = "laptop") -> runs.Run:
    """The run `name` of what is trained on a recording for a machine, the same for all callers."""
    suites = list(dict.fromkeys(trace.turns["suite"]))
    facts = {"recording": trace.header["key"], "suites": suites}
    facts |= {"costs": runs.content_key(costs=costs), "terms": terms}
    return runs.start(name, runs.plain(facts), scale=scale, tie_to_code=False)


def up_to(most: int, values: Sequence[int]) -> tuple[int, ...]:
    return tuple(value for value in values if value <= most)


def equal_config(arena: Arena, system: str, option):
    """The config of a system under equal terms. option: one of `arena.options`."""
    terms = arena.terms
    most = arena.trace.most_nodes + 1
    totals = up_to(most, terms.total_tokens)
    sizes = tuple(np.subtract(totals, 1).tolist())
    changes: dict[str, Any] = {"name": EQUAL}
    if system == RESPS:
        shapes = arena.shapes()
        deepest = min(map(arena.depth, shapes))
        changes["totals"] = totals
        changes["depths"] = up_to(deepest, terms.depths)
        changes["widths"] = tuple((top_k, *beam) for top_k, beam in shapes)
        changes["small"] = True
        changes["interval"] = option
        changes["while_training"] = {"interval": option, "temperature": None}
        return changed(resps.OURS, changes)
    top_k, beam = option
    depth = arena.depth(option)
    if system == OURS:
        changes |= {"top_k": top_k, "most_expansions": depth, "sizes": sizes}
        return changed(value.OURS, changes)
    start = arena.start(option).total_tokens
    if system == RADAR:
        changes |= {"top_k": top_k, "beam": beam, "total_tokens": start}
        return changed(radar.OURS, changes)
    for part in ("depth", "size"):
        changes |= {f"{part}.depth": depth, f"{part}.top_k": top_k, f"{part}.beam": beam}
    changes |= {"depth.from_root": True, "depth.total_tokens": start, "size.sizes": sizes}
    return changed(ltd.OURS, changes)


def config_of(arena: Arena, job: Job, option=None):
    """The config that a job trains, its length included. option: one of `arena.options`.

    Without an option it is the published one.
    """
    if option is not None:
        config = equal_config(arena, job.system, option)
    else:
        config = PUBLISHED[job.system][job.terms]
        if job.system == RESPS and config.state == "official":
            # the code's 4096 is the width of the target it was run on
            width = arena.trace.features.shape[1] // config.layers
            config = changed(config, {"hidden_size": width})
    config = lengthened(config, arena.terms.effort)
    if job.terms != LIVE:
        return config
    # live decisions are few, and later rounds are left out
    changes = {f"{name}.total_steps": arena.live_decisions for name in _ppos(config)}
    if hasattr(config, "rounds"):
        changes["rounds"] = config.rounds[:2]
    return lengthened(changed(config, changes), 1.0, arena.live_decisions)


def lengthened(config, effort: float, most: int | None = None):
    """`config` with a training `effort` times as long, of PPO in whole rollouts.

    most: decisions per rollout at most.
    """
    changes = {}
    for name, ppo in _ppos(config).items():
        decisions = round(ppo.total_steps * effort)
        # less than one rollout is a shorter one, in steps of eight environments
        steps = min(ppo.n_steps, max(8, decisions - decisions % 8), most or ppo.n_steps)
        changes[f"{name}.n_steps"] = steps
        changes[f"{name}.batch_size"] = min(ppo.batch_size, steps)
        changes[f"{name}.total_steps"] = max(1, round(decisions / steps)) * steps
    for name in ("epochs", "steps"):
        if hasattr(config, name):
            changes[name] = max(1, round(getattr(config, name) * effort))
    return changed(config, changes)


def _ppos(config) -> dict:
    """The PPOConfigs of a config by their field."""
    if hasattr(config, "ppo"):
        return {"ppo": config.ppo}
    if isinstance(config, ltd.LtdConfig):
        return {"depth.ppo": config.depth.ppo, "size.ppo": config.size.ppo}
    return {}


def radar_recording(arena: Arena, config: radar.RadarConfig):
    """What RADAR learns from: as published exact distributions, else text that was sampled."""
    recordings = [arena.sampled, arena.wide, arena.trace]
    recordings = [recording for recording in recordings if recording is not None]
    if config.exact is False:
        return arena.trace
    for recording in recordings:
        if distributions_of(recording, config.exact, config.tree) is not None:
            return recording
    return recordings[0]


def learn(arena: Arena, job: Job, config, folder: Path, policy_ms: float) -> Policy:
    """Train `config` in `folder`. policy_ms: what an answer costs, where the time counts it."""
    trace = arena.home(job)
    options = dict(seed=job.seed, out_dir=folder)
    if job.system in (RESPS, LTD):
        options |= dict(policy_ms=policy_ms, progress=arena.progress)
        if job.terms != EQUAL:
            # as published: one text after the other
            options["envs"] = 1
        if job.terms == LIVE:
            prompts = list(arena.live_prompts)
            answer_tok = trace.header["max_new_tokens"]
            options["source"] = LiveSource(arena.pair, prompts, answer_tok, policy_ms=policy_ms)
        if job.system == RESPS:
            return train_resps(trace, arena.costs, config, **options)
        return train_ltd(trace, arena.costs, config, **options).policy
    if job.system == RADAR:
        data = rows_for(config, radar_recording(arena, config))
        costs = dataclasses.replace(arena.costs, policy_ms={"radar": policy_ms})
        latency = latency_ms(costs, data.context_tok, config.flat_nodes, config.tree)
        facts = {"pair": trace.header["pair"], "costs": arena.costs.name}
        return train_radar(data, latency, config, trained_for=facts, **options).policy
    options = dict(seed=job.seed, policy_ms=None, pair=arena.pair, progress=arena.progress)
    options["start"] = arena.start((config.top_k, ()))
    options["tune_on"] = trace.select(part="tune")
    return train_value(trace.select(part="train"), arena.costs, config, **options)[0]


def untrained(arena: Arena, system: str, config) -> Policy | None:
    """A policy of `config` with random weights, to time its answers; None for ours, which does."""
    if system == RESPS:
        policy = config.policy(arena.trace.features.shape[1])
        return policy.fill_at_random(config.ppo.pi)
    if system == LTD:
        depth = config.depth.policy().fill_at_random(config.depth.ppo.pi)
        size = config.size.policy().fill_at_random(config.size.ppo.pi)
        return ltd.combine(depth, size)
    if system == RADAR:
        policy = config.policy()
        weights = {name: np.zeros(shape) for name, shape in radar.SHAPES.items()}
        policy.network = policy.build_network(weights)
        return policy
    return None


def priced(arena: Arena, key: str, trace, policy: Policy | None) -> float:
    """Milliseconds of an answer, measured once: what was trained with a price keeps it."""
    path = arena.folder / "answers.json"
    prices = runs.found(path)
    if key not in prices:
        prices[key] = 0.0
        if policy is not None and arena.pair is not None:
            prices[key] = measured_answer_ms(arena.pair, copy.deepcopy(policy), arena.costs)
        elif policy is not None:
            tune = trace.select(part="tune")
            prices[key] = answer_ms(tune, copy.deepcopy(policy), arena.costs)
        runs.write_json(path, prices)
    return prices[key]


def choose(arena: Arena, system: str) -> dict:
    """The option of a system that is fastest on part "tune" after a short training.

    Returns option (its number) and table, kept beside the trainings.
    """
    path = arena.folder / f"{system.lower()}-choice.json"
    if path.is_file():
        return runs.read_json(path)
    tune = arena.trace.select(part="tune")
    rows = []
    for number, option in enumerate(arena.options(system)):
        # 1. what an answer costs before anything is learned
        config = equal_config(arena, system, option)
        key = f"{system}-{number}"
        asking_ms = priced(arena, key, arena.trace, untrained(arena, system, config))
        # 2. a short training
        short = lengthened(config, arena.terms.effort * arena.terms.trial_frac)
        folder = arena.folder / f"{system.lower()}-trial-{number}"
        policy = learn(arena, Job(system, EQUAL, 0), short, folder, asking_ms)
        # 3. its time on prompts that it did not learn from, answers charged
        charged = priced(arena, f"{key}-trained", arena.trace, policy)
        replayed = replay(tune, copy.deepcopy(policy), arena.costs, policy_ms=charged)
        rows.append({"option": str(option), "ms_per_tok": replayed.ms_per_tok})
    best = int(np.argmin([row["ms_per_tok"] for row in rows]))
    runs.write_json(path, {"option": best, "table": rows})
    return runs.read_json(path)


def train(arena: Arena, job: Job) -> Policy:
    """The policy of a job, found or trained; its choices are written into its files."""
    folder = arena.folder / job.folder
    if arena.is_trained(job):
        return saved(folder)
    began = time.perf_counter()
    # 1. what is chosen for it, and on which part
    option, key = None, f"{job.system}-{job.terms}"
    grid = "as in the paper" if job.terms == PAPER else "as in its code"
    choices = [("action grid, recipe", "none", grid)]
    what = "width"
    if job.system == RESPS:
        what = "interval"
    if job.on_equal_terms:
        best = choose(arena, job.system)["option"]
        option, key = arena.options(job.system)[best], f"{job.system}-{best}"
        choices = [(what, "tune", option)]
        if job.system in (LTD, RADAR):
            choices.append(("nodes to begin with", "tune", arena.start(option).text))
    # 2. the training
    config = config_of(arena, job, option)
    asking_ms = priced(arena, key, arena.home(job), untrained(arena, job.system, config))
    policy = learn(arena, job, config, folder, asking_ms)
    # 3. its files
    for choice, part, picked in choices:
        chose(policy, choice, part, picked)
    save(policy, folder)
    facts = {"seconds": time.perf_counter() - began}
    facts["deviations"] = policy.policies[0].trained_for.get("deviations", [])
    runs.write_json(folder / "trained.json", facts)
    # as every later run finds it: what it remembers of its training would make it another one
    return saved(folder)


def save(policy: Policy, folder: Path) -> None:
    """Into folder/policy, or of LTD's two into folder/policy/depth and folder/policy/size."""
    names = ["depth", "size"] if len(policy.policies) == 2 else [""]
    for name, part in zip(names, policy.policies, strict=True):
        part.save(folder / "policy" / name)


def saved(folder: Path) -> Policy:
    """What `save` left in a folder."""
    place = folder / "policy"
    if (place / "policy.json").is_file():
        return load_policy(place)
    return ltd.combine(load_policy(place / "depth"), load_policy(place / "size"))


def train_all(arena: Arena, jobs: Sequence[Job], minutes: float = 0.0):
    """Policies by `Job.method`, one per seed, and a table with a row per job; as `in_time`."""
    policies: dict[Method, list[Policy]] = {}

    def trained(job: Job) -> dict:
        method = job.method.but(trained_on=arena.costs.name)
        policies.setdefault(method, []).append(train(arena, job))
        facts = runs.read_json(arena.folder / job.folder / "trained.json")
        return {"minutes": facts["seconds"] / 60}

    kinds = [(job.system, job.terms) for job in jobs]
    states = in_time(jobs, kinds, minutes, trained, "trained", arena.is_trained)
    rows = []
    for job, state in zip(jobs, states, strict=True):
        rows.append({"method": str(job.method), "seed": job.seed} | state)
    policies = {method: seeds for method, seeds in policies.items() if seeds}
    return policies, pd.DataFrame(rows, columns=["minutes", "method", "seed", "state"])


def in_time(tasks, kinds, minutes: float, make: Callable, made: str, is_made: Callable) -> list:
    """What `make` says of each task, and its state: "found", `made`, "left", "refused: ...".

    minutes: no task begins that would end later if it took as long as the last of its kind.
    """
    began = time.perf_counter()
    took_s: dict[Any, float] = {}
    rows = []
    for task, kind in zip(tasks, kinds, strict=True):
        begin = time.perf_counter()
        old = is_made(task)
        late = begin - began + took_s.get(kind, 0.0) > 60 * minutes
        if minutes and late and not old:
            rows.append({"state": "left"})
            continue
        try:
            rows.append({**make(task), "state": "found" if old else made})
        except SpecdecError as error:
            rows.append({"state": f"refused: {error}"})
        if not old:
            took_s[kind] = time.perf_counter() - begin
    return rows


def with_published(comparison: Comparison, wide, costs, policies: dict, **options) -> Comparison:
    """`comparison` and policies that only another recording can judge.

    wide: of the same texts with other trees. options: of `compare_replay`.
    """
    # 1. the policies on the other recording, beside any static tree
    mine = comparison.turns
    default = comparison.baselines.defaults[0]
    per_suite = dict.fromkeys(mine["suite"], default)
    chosen_on = comparison.baselines.chosen_on
    options["baselines"] = Baselines((default,), default, per_suite, chosen_on)
    options |= {"part": mine["part"].iloc[0], "random_seeds": ()}
    wide = wide.select(wide.turns["suite"].isin(per_suite).to_numpy())
    theirs = compare_replay(wide, costs, policies, **options)
    # 2. the default tree takes the same time in both only if the texts are the same
    keys = [*TURN, "new_tok", "time_ms"]
    name = comparison.baselines.default
    times = mine.loc[mine["method"] == name, keys].round(6)
    other_times = theirs.turns.loc[theirs.turns["method"] == name, keys].round(6)
    if len(times) != len(other_times) or len(times.merge(other_times)) < len(times):
        why = "the two recordings hold other texts"
        raise SpecdecError(f"{why}; record the same prompts, in float32, with the same lengths.")
    # 3. the lower bound of each turn
    bound = mine[mine["method"] == CLAIRVOYANT].set_index(TURN)
    other = theirs.turns[theirs.turns["method"] == CLAIRVOYANT].set_index(TURN)
    lower = bound["time_ms"] <= other["time_ms"].reindex(bound.index)
    bound = bound.where(lower, other).reset_index()[list(mine)]
    # 4. both together
    turns = [mine[mine["method"] != CLAIRVOYANT], bound]
    turns.append(theirs.turns[theirs.turns["method"].isin(policies)])
    cycles = theirs.cycles[theirs.cycles["method"].isin(policies)]
    return dataclasses.replace(
        comparison,
        turns=pd.concat(turns, ignore_index=True).astype(mine.dtypes.to_dict()),
        cycles=pd.concat([comparison.cycles, cycles], ignore_index=True),
        policy_ms=comparison.policy_ms | theirs.policy_ms,
    )
