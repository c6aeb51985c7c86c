"""Equal terms: every learned controller with the same prompts, trees, prices, seeds and trials; beside it what was published.

    equal            trained and tuned alike: shapes of trees (or intervals) are tried on part "tune", answers are priced
    live             the same config, learned while decoding, as the papers do it
    paper, official  action grids, prompts, rewards and networks as published

Every training lands in a folder of its own and is found there again. Knows nothing about comparisons.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
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
from specdec.data.suites import conversation, gather
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation.compare import CHOSEN_ON, CLAIRVOYANT, Baselines, Comparison, compare_replay
from specdec.identity import EQUAL, GRID, LIVE, OFFICIAL, PAPER, STATIC, Method
from specdec.policies import ltd, radar, resps, value
from specdec.policies.base import changed, chose, load_policy
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import SETTING, best_static, fastest, setting, static_grid
from specdec.training.controllers import train_ltd, train_resps
from specdec.training.env import LiveSource
from specdec.training.radar import distributions_of, latency_ms, rows_for, train_radar, training_turns
from specdec.training.value import train_value

RESPS, LTD, RADAR, OURS = "Re-SpS", "LTD", "RADAR", "ours"
PUBLISHED = {RESPS: resps.CONFIGS, LTD: ltd.LAPTOP, RADAR: radar.CONFIGS}
TERMS = {EQUAL: (RESPS, LTD, RADAR, OURS), PAPER: tuple(PUBLISHED), OFFICIAL: tuple(PUBLISHED), LIVE: (RESPS, LTD)}
GRIDS: dict[
    str, tuple[TreeConfig, ...]
] = {  # the trees between which each paper's controller chooses, or its grid search
    RESPS: tuple(resps.valid_trees(resps.PAPER.totals, resps.PAPER.depths, resps.PAPER.widths)),
    LTD: tuple(TreeConfig(nodes + 1, depth, 10) for depth in range(4, 13) for nodes in range(40, 241, 20)),
    RADAR: tuple(TreeConfig(60, depth, 10) for depth in range(1, 8)),
}
CHOSEN_FOR_LTD = "humaneval"  # on which its paper searches
PROBE = 64  # decisions of the training that an estimate is made from
# What recordings must hold for the published action grids: settings of `record`.
WIDE = dict(depth=12, top_ks=(8, 10, 12, 16, 20, 32), trees=(10,), most_nodes=240)


@dataclass(frozen=True)
class EqualTerms:
    """What every learned controller is given alike; objective, network and length of training stay its own.

    shapes: children per node and, where they differ, the nodes that each level expands; those that were recorded are tried.
    depth: expansions at most, where the recording is as deep (RADAR's network decides seven times). total_tokens, depths: of
    the trees, as large and as deep as a static tree's may be. The plain step, 1 token, is open to controllers that plan before
    drafting; LTD, RADAR and ours answer after the first draft call.
    intervals: tried in place of shapes by the controller whose answers name the shape themselves, as many as there are
    shapes. trial_frac: how long each option learns, as a part of a training. effort: the same of every training's own length.
    """

    name: str = EQUAL
    shapes: tuple[tuple[int, ...], ...] = ((4,), (4, 2, 1), (2,), (10,))
    depth: int = 12
    depths: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 7, 8, 10, 12)
    total_tokens: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 60, 80, 100, 128, 160, 201, 241)
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
        """What its policy is among others; seeds share it."""
        return Method(self.system, self.terms)

    @property
    def folder(self) -> str:
        return f"{self.system.lower()}-{self.terms}-{self.seed}"


@dataclass(frozen=True)
class Arena:
    """On what, for which machine and where controllers are trained.

    trace: a recording with parts "train" and "tune". wide: one that holds the published action grids (`WIDE`), or None.
    sampled: one at temperature one, which RADAR's published terms ask for, or None. pair: to time answers inside live
    decoding and to learn live. live_prompts, live_decisions: what that learns from, and how much.
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
        here = [name for name in terms if name == EQUAL or (self.live_prompts if name == LIVE else self.wide)]
        later = {LIVE: 1}  # live rows are slow and noisy: one seed
        return [
            Job(system, name, seed)
            for number, seed in enumerate(seeds)
            for name in here
            for system in TERMS[name]
            if number < later.get(name, len(seeds))
        ]

    def shapes(self) -> list[tuple[int, tuple[int, ...]]]:
        """(children, beam) of the terms whose whole trees were recorded."""
        asked = [(top_k, tuple(beam)) for top_k, *beam in self.terms.shapes]
        found = [shape for shape in asked if self.recorded(shape)]
        if not found:
            raise SpecdecError(f"no whole trees of {self.terms.shapes} were recorded; record trees=(4, 10).")
        return found

    def recorded(self, shape: tuple[int, tuple[int, ...]]) -> bool:
        """Whether whole trees of a shape were recorded."""
        try:
            self.trace.column("scores", *shape)
        except SpecdecError:
            return False
        return True

    def depth(self, shape: tuple[int, tuple[int, ...]]) -> int:
        """Expansions at most of a shape: those of the terms, as far as they were recorded."""
        return min(self.terms.depth, self.trace.depth_of(*shape))

    def choice_file(self, system: str) -> Path:
        """Where `choose` keeps what it found."""
        return self.folder / f"{system.lower()}-choice.json"

    def options(self, system: str) -> list:
        """What is tried on part "tune", equally many for each system where the trees are deep enough for RADAR's network."""
        shapes = self.shapes()
        if system == OURS:  # it expands as many nodes as it has children
            square = dict.fromkeys((top_k, ()) for top_k, _ in shapes)
            shapes = [shape for shape in square if self.recorded(shape)]
        if system == RADAR:
            shapes = [shape for shape in shapes if self.depth(shape) >= radar.DECISIONS] or shapes
        return list(self.terms.intervals[: len(shapes)]) if system == RESPS else shapes

    def start(self, shape: tuple[int, tuple[int, ...]]) -> TreeConfig:
        """The fastest tree of a shape that drafts anything, on part "tune": where each controller begins."""
        totals = [total for total in self.terms.total_tokens if 1 < total <= self.trace.most_nodes + 1]
        grid = dict(depths=range(1, self.depth(shape) + 1), top_ks=[shape[0]], beams=[shape[1]])
        return best_static(self.trace.select(part="tune"), self.costs, total_tokens=totals, **grid)


def best_of_grids(trace, costs, systems=tuple(GRIDS)) -> dict[Method, list[Policy]]:
    """The fastest tree of each paper's own grid, as far as the recording holds it, on the parts `train` and `tune`.

    LTD's is searched on HumanEval alone, as in the paper, and left out where that was not recorded; RADAR's are its tree of
    60 tokens by the number of calls. A method's preset says where the grid was not recorded whole.
    """
    chosen_on, found = trace.turns["part"].isin(CHOSEN_ON), {}
    for system in systems:
        named = trace.turns["suite"].str.rpartition("/")[2] == CHOSEN_FOR_LTD
        asked = chosen_on & named if system == LTD else chosen_on
        trees = [tree for tree in GRIDS[system] if _recorded(trace, tree)]
        if asked.any() and trees:
            totals, depths, top_ks = ({getattr(tree, name) for tree in trees} for name in SETTING[:3])
            table = static_grid(trace.select(asked), costs, sorted(totals), sorted(depths), sorted(top_ks), [()])
            inside = pd.MultiIndex.from_frame(table[SETTING]).isin([tuple(setting(tree).values()) for tree in trees])
            best = fastest(table[inside].reset_index(drop=True))
            whole = "" if len(trees) == len(GRIDS[system]) else ", as far as recorded"
            found[Method(STATIC, GRID, system + whole)] = [Static.of(best)]
    return found


def _recorded(trace, tree: TreeConfig) -> bool:
    known = tree.top_k in trace.top_ks and tree.verify_nodes <= trace.most_nodes
    return known and tree.depth <= trace.depth_of(tree.top_k, ())


def opened(name: str, trace, costs, terms: EqualTerms, scale: str = "laptop") -> runs.Run:
    """The run `name` of what is trained on a recording for a machine: found again by every caller with the same inputs."""
    facts = {"recording": trace.header["key"], "suites": list(dict.fromkeys(trace.turns["suite"]))}
    facts |= {"costs": runs.content_key(costs=costs), "terms": terms}
    return runs.start(name, runs.plain(facts), scale=scale, tie_to_code=False)


def equal_config(arena: Arena, system: str, option):
    """The config of a system under equal terms. option: one of `arena.options`."""
    terms = arena.terms
    totals = tuple(total for total in terms.total_tokens if total <= arena.trace.most_nodes + 1)
    if system == RESPS:
        widths = tuple((top_k, *beam) for top_k, beam in arena.shapes())
        deepest = min(map(arena.depth, arena.shapes()))
        depths = tuple(depth for depth in terms.depths if depth <= deepest)
        grid = {"totals": totals, "depths": depths, "widths": widths, "small": True}
        learning = {"interval": option, "temperature": None}
        return changed(resps.OURS, {"name": EQUAL, **grid, "interval": option, "while_training": learning})
    top_k, beam = option
    if system == OURS:
        sizes = tuple(total - 1 for total in totals)
        tree = {"top_k": top_k, "most_expansions": arena.depth(option), "sizes": sizes}
        return changed(value.OURS, {"name": EQUAL, **tree})
    start = arena.start(option)
    if system == RADAR:
        tree = {"top_k": top_k, "beam": beam, "total_tokens": start.total_tokens}
        return changed(radar.OURS, {"name": EQUAL, **tree})
    shape = {"depth": arena.depth(option), "top_k": top_k, "beam": beam}
    fields = {f"{kind}.{field}": value for kind in ("depth", "size") for field, value in shape.items()}
    fields |= {"depth.from_root": True, "depth.total_tokens": start.total_tokens}
    return changed(ltd.OURS, {"name": EQUAL, **fields, "size.sizes": tuple(total - 1 for total in totals)})


def published_config(arena: Arena, system: str, preset: str):
    """The config of a system as its paper or its code has it."""
    config = PUBLISHED[system][preset]
    if system == RESPS and config.state == "official":  # the code's 4096 is the width of the target it was run on
        config = changed(config, {"hidden_size": arena.trace.features.shape[1] // config.layers})
    return config


def config_of(arena: Arena, job: Job, option=None):
    """The config that a job trains, its length included. option: one of `arena.options`, where terms have any."""
    config = (
        published_config(arena, job.system, job.terms) if option is None else equal_config(arena, job.system, option)
    )
    config = lengthened(config, arena.terms.effort)
    return briefly(config, arena.live_decisions) if job.terms == LIVE else config


def lengthened(config, effort: float, most: int | None = None):
    """`config` with a training `effort` times as long; of PPO whole rollouts, shorter ones where it is less than one.

    most: decisions per rollout at most.
    """
    changes = {}
    for kind in ("ppo", "depth.ppo", "size.ppo"):
        part = config
        for name in kind.split("."):
            part = getattr(part, name, None)
        if part is None:
            continue
        wanted = round(part.total_steps * effort)
        steps = min(part.n_steps, most or part.n_steps, max(8, wanted - wanted % 8))
        total = max(1, round(wanted / steps)) * steps
        batch = min(part.batch_size, steps)
        changes |= {f"{kind}.n_steps": steps, f"{kind}.batch_size": batch, f"{kind}.total_steps": total}
    for name in ("epochs", "steps"):
        if hasattr(config, name):
            changes[name] = max(1, round(getattr(config, name) * effort))
    return changed(config, changes)


def length(arena: Arena, config) -> float:
    """What a training learns from: decisions of PPO, rows that RADAR goes through, examples of ours."""
    if isinstance(config, value.ValueConfig):
        return config.steps * config.batch
    if isinstance(config, radar.RadarConfig):
        turns = training_turns(radar_recording(arena, config), config.prompts)
        exact = distributions_of(turns, config.exact, config.tree)
        return config.epochs * len(turns if exact is None else exact[0])
    if isinstance(config, resps.RespsConfig):
        return config.ppo.total_steps
    return sum(getattr(config, part.learner).ppo.total_steps for part in config.rounds)


def radar_recording(arena: Arena, config: radar.RadarConfig):
    """What RADAR learns from. As published: the recording with exact distributions, at temperature one by what they are, else
    the one that was sampled at temperature one."""
    if config.exact is False:
        return arena.trace
    held = [one for one in (arena.sampled, arena.wide, arena.trace) if one is not None]
    return next((one for one in held if distributions_of(one, config.exact, config.tree) is not None), held[0])


def learn(arena: Arena, job: Job, config, folder: Path, policy_ms: float, source=None) -> Policy:
    """Train `config` in `folder`. policy_ms: what an answer costs, counted wherever the config's time counts policies."""
    trace = arena.trace if job.terms in (EQUAL, LIVE) else arena.wide
    options = dict(seed=job.seed, out_dir=folder)
    if job.system in (RESPS, LTD):
        train = train_resps if job.system == RESPS else train_ltd
        one_by_one = {} if job.terms == EQUAL else {"envs": 1}  # as published: one text after the other
        options |= dict(policy_ms=policy_ms, source=source, progress=arena.progress, **one_by_one)
        trained = train(trace, arena.costs, config, **options)
        return trained if job.system == RESPS else trained.policy
    if job.system == RADAR:
        data = rows_for(config, radar_recording(arena, config))
        costs = dataclasses.replace(arena.costs, policy_ms={"radar": policy_ms})
        latency = latency_ms(costs, data.context_tok, config.flat_nodes, config.tree)
        facts = {"pair": trace.header["pair"], "costs": arena.costs.name}
        return train_radar(data, latency, config, trained_for=facts, **options).policy
    tune = trace.select(part="tune")
    options = dict(seed=job.seed, policy_ms=None, pair=arena.pair, progress=arena.progress)
    start = arena.start((config.top_k, ()))
    return train_value(trace.select(part="train"), arena.costs, config, start=start, tune_on=tune, **options)[0]


def untrained(arena: Arena, system: str, config) -> Policy | None:
    """A policy of `config` with random weights, to time its answers; None for ours, which times its own."""
    if system == RESPS:
        return config.policy(arena.trace.features.shape[1]).fill_at_random(config.ppo.pi)
    if system == LTD:
        return ltd.combine(*(part.policy().fill_at_random(part.ppo.pi) for part in (config.depth, config.size)))
    if system == RADAR:
        policy = config.policy()
        policy.network = policy.build_network({name: np.zeros(shape) for name, shape in radar.SHAPES.items()})
        return policy
    return None


def priced(arena: Arena, key: str, trace, policy: Policy | None) -> float:
    """Milliseconds of an answer, measured once and kept under `key`: what was trained with a price keeps it."""
    path = arena.folder / "answers.json"
    known = runs.found(path)
    if key not in known:
        own = copy.deepcopy(policy)
        if own is None:
            known[key] = 0.0
        elif arena.pair is not None:
            known[key] = measured_answer_ms(arena.pair, own, arena.costs)
        else:
            known[key] = answer_ms(trace.select(part="tune"), own, arena.costs)
        runs.write_json(path, known)
    return known[key]


def choose(arena: Arena, system: str) -> dict:
    """The option of a system that is fastest on part "tune" after a short training. Returns option (its number) and table."""
    path = arena.choice_file(system)
    if not path.is_file():
        runs.write_json(path, _tried(arena, system))
    return runs.read_json(path)


def _tried(arena: Arena, system: str) -> dict:
    rows, tune = [], arena.trace.select(part="tune")
    for number, option in enumerate(arena.options(system)):
        config = equal_config(arena, system, option)
        key = f"{system}-{number}"
        asking_ms = priced(arena, key, arena.trace, untrained(arena, system, config))
        short = lengthened(config, arena.terms.effort * arena.terms.trial_frac)
        folder = arena.folder / f"{system.lower()}-trial-{number}"
        policy = learn(arena, Job(system, EQUAL, 0), short, folder, asking_ms)
        charged = priced(arena, f"{key}-trained", arena.trace, policy)
        ms = replay(tune, copy.deepcopy(policy), arena.costs, policy_ms=charged).ms_per_tok
        rows.append({"option": str(option), "ms_per_tok": ms, "learned_from": length(arena, short)})
    return {"option": min(range(len(rows)), key=lambda number: rows[number]["ms_per_tok"]), "table": rows}


def train(arena: Arena, job: Job) -> Policy:
    """The policy of a job: found where it was trained before, else trained, its choices written into its files."""
    folder = arena.folder / job.folder
    if (found := saved(folder)) is not None:
        return found
    began, source, option, key = time.perf_counter(), None, None, f"{job.system}-{job.terms}"
    if job.terms in (EQUAL, LIVE):
        best = choose(arena, job.system)["option"]
        option, key = arena.options(job.system)[best], f"{job.system}-{best}"
        log = [("interval" if job.system == RESPS else "width", "tune", option)]
        if job.system in (LTD, RADAR):
            log.append(("nodes to begin with", "tune", arena.start(option).text))
    else:
        log = [("action grid, recipe", "none", "as in the paper" if job.terms == PAPER else "as in its code")]
    config = config_of(arena, job, option)
    home = arena.trace if job.terms in (EQUAL, LIVE) else arena.wide
    asking_ms = priced(arena, key, home, untrained(arena, job.system, config))
    if job.terms == LIVE:
        answer_tok = arena.trace.header["max_new_tokens"]
        source = LiveSource(arena.pair, list(arena.live_prompts), answer_tok, policy_ms=asking_ms)
    policy = learn(arena, job, config, folder, asking_ms, source)
    for choice, part, picked in log:
        chose(policy, choice, part, picked)
    save(policy, folder)
    facts = {"learned_from": length(arena, config), "seconds": time.perf_counter() - began}
    counted = policy.policies[0].trained_for.get("deviations", [])
    runs.write_json(folder / "trained.json", facts | {"deviations": counted})
    # As every later run finds it: what it remembers of its training would make that run another one.
    return saved(folder)


def briefly(config, decisions: int):
    """`config` for a live training of so many decisions; of LTD each policy alone, without the later rounds in turns."""
    parts = ("ppo",) if hasattr(config, "ppo") else ("depth.ppo", "size.ppo")
    short = {f"{part}.total_steps": decisions for part in parts}
    if hasattr(config, "rounds"):
        short["rounds"] = config.rounds[:2]
    return lengthened(changed(config, short), 1.0, decisions)


def save(policy: Policy, folder: Path) -> None:
    """Into folder/policy, or of LTD's two into folder/policy/depth and folder/policy/size."""
    parts = policy.policies if len(policy.policies) > 1 else None
    for name, part in zip(("depth", "size"), parts, strict=True) if parts else [("", policy)]:
        part.save(folder / "policy" / name)


def saved(folder: Path) -> Policy | None:
    """What `train` left in a folder; None where it has not finished."""
    if not (folder / "trained.json").is_file():
        return None
    if (folder / "policy" / "policy.json").is_file():
        return load_policy(folder / "policy")
    return ltd.combine(*(load_policy(folder / "policy" / name) for name in ("depth", "size")))


def deviations(arena: Arena, job: Job) -> list[str]:
    """In what a published row still differs from what was published; nothing of a job that is not trained yet."""
    return runs.found(arena.folder / job.folder / "trained.json").get("deviations", [])


def training_prompts(pair, trace) -> list:
    """The prompts of a recording's part "train", first turns, as the pair decodes them: what live learning decodes."""
    turns = trace.select(part="train").turns
    wanted = set(turns["prompt"])
    items = gather(list(dict.fromkeys(turns["suite"])), seed=trace.header.get("seed", 0))
    return [conversation(pair, item, 0, []) for item in items if item.id in wanted]


def expected_s(arena: Arena, jobs: Sequence[Job]) -> dict[Job, float]:
    """Seconds that each job will take, from a very short training of its kind; 0 for what was trained before.

    The first job of a system under equal terms pays for its trials. NaN where already that training was refused.
    """
    seconds, probes, tried = {}, {}, set()
    for job in jobs:
        if (arena.folder / job.folder / "trained.json").is_file():
            seconds[job] = 0.0
            continue
        config = config_of(arena, job, arena.options(job.system)[0] if job.terms in (EQUAL, LIVE) else None)
        kind = job.system, job.terms
        if kind not in probes:
            try:
                probes[kind] = _probed(arena, job, config)
            except SpecdecError:
                probes[kind] = np.nan, np.nan
        trials = 0
        if job.terms == EQUAL and job.system not in tried and not arena.choice_file(job.system).is_file():
            trials = len(arena.shapes())
        tried.add(job.system)
        fixed, slope = probes[kind]
        seconds[job] = fixed * (1 + trials) + slope * (1 + trials * arena.terms.trial_frac) * length(arena, config)
    return seconds


def _probed(arena: Arena, job: Job, config) -> tuple[float, float]:
    """(seconds, seconds per decision, row or example) from two trainings too short to be of use, one longer than the other."""
    if job.system == RADAR or job.terms == LIVE:  # nearly all of it grows with the length
        short = lengthened(config, 0.0) if job.system == RADAR else briefly(config, PROBE // 4)
        return 0.0, _timed(arena, job, short) / length(arena, short)
    if job.system == OURS:
        probes = [dataclasses.replace(config, steps=steps) for steps in (1, 20)]
    else:
        probes = [briefly(config, decisions) for decisions in (PROBE, 8 * PROBE)]
    (few, more), (short, longer) = zip(*((_timed(arena, job, c), length(arena, c)) for c in probes), strict=True)
    slope = max(0.0, more - few) / (longer - short)
    return max(0.0, few - slope * short), slope


def _timed(arena: Arena, job: Job, config) -> float:
    """Seconds of one training, of which nothing is kept."""
    source = None
    if job.terms == LIVE:
        source = LiveSource(arena.pair, list(arena.live_prompts), arena.trace.header["max_new_tokens"])
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        learn(dataclasses.replace(arena, progress=False), job, config, Path(folder), 0.0, source)
        return time.perf_counter() - began


def train_all(
    arena: Arena, jobs: Sequence[Job], minutes: float = 0.0, expected: dict[Job, float] | None = None
) -> tuple[dict[Method, list[Policy]], pd.DataFrame]:
    """The policies by `Job.method`, a list with one per seed, and a table: one row per job, what it took or would take.

    Its state says "found", "trained", "left" or why it was refused: one system that cannot learn here stops no other.
    minutes: no training begins that would not end in this time (0: no limit); what is left is for the next call.
    expected: of `expected_s`, where that was asked already.
    """
    expected = expected or expected_s(arena, jobs)
    policies: dict[Method, list[Policy]] = {}

    def one(job: Job) -> dict:
        policies.setdefault(job.method.but(trained_on=arena.costs.name), []).append(train(arena, job))
        facts = runs.read_json(arena.folder / job.folder / "trained.json")
        return {"minutes": facts["seconds"] / 60, "learned_from": facts["learned_from"]}

    states = in_time({job: expected[job] for job in jobs}, minutes, one, "trained")
    labels = [{"method": str(job.method.but(trained_on=arena.costs.name)), "seed": job.seed} for job in jobs]
    table = pd.DataFrame([label | state for label, state in zip(labels, states, strict=True)])
    return {method: some for method, some in policies.items() if some}, table.reindex(
        columns=["minutes", "learned_from", "method", "seed", "expected_min", "state"]
    )


def in_time(
    expected_s: dict[Any, float], minutes: float, make: Callable[[Any], dict], made: str, slowest: float = np.inf
) -> list[dict]:
    """What `make` says of each thing in turn, with expected_min and its state: "found", `made`, "left" or "refused: ...".

    expected_s: 0 for what was trained before. Nothing is begun that would not end in `minutes` (0: no limit); expectations are
    scaled by how long the last one took, at most `slowest` times as long.
    """
    began, factor, rows = time.perf_counter(), 1.0, []
    for what, seconds in expected_s.items():
        begin, wanted_s = time.perf_counter(), factor * seconds
        row = {"expected_min": wanted_s / 60, "state": "left"}
        if not (minutes and seconds and begin - began + wanted_s > 60 * minutes):
            try:
                row |= make(what) | {"state": made if seconds else "found"}
                if seconds > 0:
                    factor = min(slowest, max(0.2, (time.perf_counter() - begin) / seconds))
            except SpecdecError as error:
                row["state"] = f"refused: {error}"
        rows.append(row)
    return rows


def with_published(comparison: Comparison, wide, costs, policies: dict, **options) -> Comparison:
    """`comparison` and policies that only another recording can judge: `wide`, of the same turns with other trees.

    The bound of a turn is the lower of both recordings'. SpecdecError where the recordings hold other texts. options:
    policy_ms, pair and progress of `compare_replay`.
    """
    mine, part = comparison.turns, comparison.turns["part"].iloc[0]
    default = comparison.baselines.defaults[0]
    known = dict.fromkeys(mine["suite"], default)
    stand_in = Baselines((default,), default, known, comparison.baselines.chosen_on)
    wide = wide.select(wide.turns["suite"].isin(known).to_numpy())
    other = compare_replay(wide, costs, policies, part=part, baselines=stand_in, random_seeds=(), **options)
    keys = [*TURN, "new_tok", "time_ms"]
    both = [some[some["method"] == comparison.baselines.default][keys] for some in (mine, other.turns)]
    if len(both[0]) != len(both[1]) or len(both[0].round(6).merge(both[1].round(6))) < len(both[0]):
        raise SpecdecError(
            "the two recordings hold other texts; record the same prompts, in float32, with the same lengths."
        )
    bounds = [some[some["method"] == CLAIRVOYANT].set_index(TURN) for some in (mine, other.turns)]
    lower = bounds[0].where(bounds[0]["time_ms"] <= bounds[1]["time_ms"].reindex(bounds[0].index), bounds[1])
    kept = [mine[mine["method"] != CLAIRVOYANT], lower.reset_index()[list(mine)]]
    new, cycles = (table[table["method"].isin(policies)] for table in (other.turns, other.cycles))
    return dataclasses.replace(
        comparison,
        turns=pd.concat([*kept, new], ignore_index=True).astype(mine.dtypes.to_dict()),
        cycles=pd.concat([comparison.cycles, cycles], ignore_index=True),
        policy_ms=comparison.policy_ms | other.policy_ms,
    )
