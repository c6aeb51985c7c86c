"""The rules of engines and papers as they are, and tuned on the terms on which controllers are trained.

    as they are   an engine's chain with its constants, a paper's tree with its settings; cut to what was recorded
    tuned         a chain and every shape of the terms are tried; what else a rule leaves open is chosen on part "train",
                  the shape on part "tune", and answers are priced, as for controllers that learn (`terms`)

A rule has nothing to learn but its few settings, so all of them are tried in replay. The classifiers among the papers' rules
are fitted as well, once per shape. Knows nothing about comparisons.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.policy import Policy
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError, nearest_name_error
from specdec.identity import TUNED, Method
from specdec.policies import engines
from specdec.policies.base import chose, load_policy
from specdec.policies.heuristics import DDD, SVIP, GammaTune
from specdec.replays.replay import answer_ms, replay
from specdec.replays.trace import Trace

from workbook import classifiers
from workbook.terms import Arena, in_time

STEPS = ((1, 3, 5, 7), (1, 2, 3), (0, 1, 3))
LONGEST = (2, 3, 4, 6)
LIKELY = (0.15, 0.3, 0.45, 0.6, 0.75)
GRID = tuple(np.geomspace(0.25, 4, 13).tolist())  # temperatures


@dataclass(frozen=True)
class Open:
    """What a rule leaves open: setting -> values that are tried.

    fitted: it is a classifier. seeded: it draws, so that seeds differ. square: it reads trees of as many beams as children.
    """

    knobs: dict[str, tuple]
    fitted: bool = False
    seeded: bool = False
    square: bool = False


ENGINES = {
    "sglang_ema": Open({"candidates": STEPS}),
    "sglang_throughput": Open({"candidates": STEPS[:2]}),
    "sglang_draft_prob": Open({"levels": LONGEST}),
    "vllm_adaptive_verification": Open({"levels": LONGEST}),
    "vllm_adaptive_k": Open({"explore": (0.1, 0.02)}, seeded=True),
    "llamacpp_ev": Open({"look_ahead": (0, 2)}),
    "llamacpp_p_min": Open({"p_min": LIKELY}),
    "hf_heuristic": Open({"start": (2, 5), "more": (1, 2)}),
    "hf_confidence": Open({"p_min": LIKELY}),
    "trtllm_gate": Open({"levels": LONGEST, "threshold": (0.0, 0.2)}),
    "ucb": Open({"arms": ((1, 2, 3, 4), (0, 1, 2, 3)), "per_text": (True, False)}),
    "exp3": Open({"arms": ((1, 2, 3, 4), (0, 1, 2, 3)), "per_text": (True, False)}, seeded=True),
    "vllm_logistic": Open({"levels": LONGEST}),
}
PAPERS = {
    "DDD": Open({"layers": ((5, 7, 9), (1, 2, 3, 4, 5, 6, 7)), "threshold": (-2.0, -1.0, -0.3)}, square=True),
    "SVIP": Open({"minimum": (0.3, 0.5, 0.6, 0.7)}, square=True),
    "GammaTune": Open({"default_depth": (2, 3, 5)}, square=True),
    "C2T": Open({"threshold": (0.3, 0.5, 0.7)}, fitted=True, square=True, seeded=True),
    "Disco": Open({"threshold": (0.3, 0.5, 0.7)}, fitted=True, square=True, seeded=True),
    "SpecDec++": Open({"threshold": (0.3, 0.5, 0.7)}, fitted=True, square=True, seeded=True),
}
RULES = ENGINES | PAPERS
_CLASSES = {"DDD": DDD, "SVIP": SVIP, "GammaTune": GammaTune}


@dataclass(frozen=True, eq=False)
class Tuner:
    """Rules for an arena's recording and prices. folder: where what was tuned is found again. names: () for all of RULES."""

    arena: Arena
    folder: Path
    seeds: tuple[int, ...] = (0,)
    names: tuple[str, ...] = ()

    def __post_init__(self):
        for name in self.names:
            if name not in RULES:
                raise nearest_name_error("rule", name, RULES)
        object.__setattr__(self, "names", tuple(self.names) or tuple(RULES))

    @functools.cached_property
    def parts(self) -> dict:
        """The recording's parts that choices are made on."""
        return {part: self.arena.trace.select(part=part) for part in ("train", "tune")}

    def shapes(self, name: str) -> list[tuple[int, tuple[int, ...]]]:
        """(children, beam) that are tried: a chain where one was recorded, then the shapes of the terms."""
        chain = [(1, ())] if self.arena.trace.depth_of(1) >= 0 else []
        return [one for one in dict.fromkeys([*chain, *self.arena.shapes()]) if not (RULES[name].square and one[1])]

    @functools.cache  # noqa: B019  as many entries as shapes, and a tuner does not live long
    def nodes(self, shape) -> int:
        """Nodes to verify: all of a chain, else as many as the shape's fastest tree."""
        return self.depth(shape) + 1 if shape[0] == 1 else self.arena.start(shape).verify_nodes

    def depth(self, shape) -> int:
        """Expansions at most."""
        return min(self.arena.terms.depth, self.arena.trace.depth_of(*shape))

    def settings(self, name: str, shape) -> list[dict]:
        """Everything that is tried in one shape."""
        (top_k, beam), depth, nodes = shape, self.depth(shape), self.nodes(shape)
        if name in ENGINES:
            common = {"top_k": top_k, "beam": beam, "verify_nodes": nodes, "most_levels": depth + 1}
        else:
            common = {"top_k": top_k, "verify_nodes": min(nodes, pool_size(depth, top_k)), "max_depth": depth}
        knobs = RULES[name].knobs
        return [common | dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values())]

    @functools.cache  # noqa: B019
    def temperatures(self, top_k: int, beam: tuple[int, ...]) -> tuple[float, ...]:
        return temperatures(self.parts["train"], top_k, beam)

    def made(self, name: str, wanted: dict, fitted: Policy | None = None, seed: int = 0) -> Policy | None:
        """A rule of these settings; None where they do not go together, such as more levels than were recorded."""
        if fitted is not None:
            return fitted.with_settings(threshold=wanted["threshold"])
        wanted = dict(wanted)
        if RULES[name].seeded:
            wanted["seed"] = seed
        if name == "vllm_adaptive_verification":
            wanted |= {"confidence": "probability", "temperatures": self.temperatures(wanted["top_k"], wanted["beam"])}
        if name == "GammaTune":  # from the root's children alone to the deepest tree
            begins = wanted["default_depth"]
            wanted |= {"low": 0.5 / begins, "high": (wanted.pop("max_depth") + 0.5) / begins}
        try:
            return engines.rule(name, self.arena.costs, **wanted) if name in ENGINES else _CLASSES[name](**wanted)
        except (SpecdecError, AssertionError):
            return None

    def fit(self, name: str, wanted: dict, folder: Path, seed: int = 0, **options) -> Policy | None:
        """The classifier of a shape; None for other rules."""
        if not RULES[name].fitted:
            return None
        tree = {key: wanted[key] for key in ("top_k", "verify_nodes", "max_depth")}
        return classifiers.fitted(name, self.parts["train"], folder, seed=seed, policy=tree, **options)

    def shipped(self, name: str) -> Policy:
        """An engine's rule as it ships, on chains no longer than the recording's; prices are the arena's."""
        deepest = self.arena.trace.depth_of(1) + 1
        if not deepest:
            raise SpecdecError(f"{name} drafts chains, which were not recorded; record a family or top_k 1.")
        return chose(engines.shipped(name, deepest, self.arena.costs), "constants", "none", "as they ship")

    def tune(self, name: str) -> tuple[list[Policy], dict]:
        """The policies of a rule, one per seed that matters, and what was found: shape, settings, ms_per_tok, replays."""
        folder, rows, began = self.folder / runs.plain_name(name), [], time.perf_counter()
        seeds = list(self.seeds if RULES[name].seeded else self.seeds[:1])
        if (facts := runs.found(folder / "tuned.json")).get("seeds") == seeds:
            return [load_policy(folder / f"seed-{seed}" / "policy") for seed in seeds], facts
        for number, shape in enumerate(self.shapes(name)):
            rows += self._best_settings(name, shape, folder / f"trial-{number}")
        if not rows:
            raise SpecdecError(f"no settings of {name} fit this recording; record deeper trees or a family.")
        best, policies = min(rows, key=lambda row: row["ms_per_tok"]), []
        for seed in seeds:
            fitted = self.fit(name, best["settings"], folder / f"seed-{seed}" / "fit", seed)
            policy = self.made(name, best["settings"], fitted, seed)
            policy.trained_for |= {"pair": self.arena.trace.header["pair"], "costs": self.arena.costs.name}
            chose(policy, "settings", "train", {key: best["settings"][key] for key in RULES[name].knobs})
            chose(policy, "width", "tune", best["shape"]).save(folder / f"seed-{seed}" / "policy")
            policies.append(policy)
        facts = {**best, "seeds": seeds, "replays": sum(row["replays"] for row in rows)}
        runs.write_json(folder / "tuned.json", runs.plain(facts | {"seconds": time.perf_counter() - began}))
        return policies, runs.read_json(folder / "tuned.json")

    def _best_settings(self, name: str, shape, folder: Path) -> list[dict]:
        """A row with the settings of one shape that are fastest on "train", and their time on "tune"; none if none fit."""
        costs, asking_ms, found = self.arena.costs, None, []
        options = self.settings(name, shape)
        fitted = self.fit(name, options[0], folder)
        for wanted in options:
            if (policy := self.made(name, wanted, fitted)) is None:
                continue
            if asking_ms is None:
                asking_ms = answer_ms(self.parts["train"], copy.deepcopy(policy), costs)
            ms = replay(self.parts["train"], copy.deepcopy(policy), costs, policy_ms=asking_ms).ms_per_tok
            found.append((ms, len(found), wanted, policy))
        if not found:
            return []
        _, _, wanted, policy = min(found)
        ms = replay(self.parts["tune"], policy, costs, policy_ms=asking_ms).ms_per_tok
        return [{"shape": shape, "settings": wanted, "ms_per_tok": ms, "replays": len(found) + 1}]

    def expected_s(self) -> dict[str, float]:
        """Seconds that tuning each rule will take, from a replay of two turns and a fit of one epoch; 0 if tuned before."""
        train = self.parts["train"]
        few = train.select(np.arange(len(train.turns)) < 2)
        return {name: self._expected_s(name, few, len(train) / len(few)) for name in self.names}

    def _expected_s(self, name: str, few, times: float) -> float:
        if (self.folder / runs.plain_name(name) / "tuned.json").is_file():
            return 0.0
        tried, fit_s = self.shapes(name), 0.0
        wanted, fitted = self.settings(name, tried[0])[0], None
        if RULES[name].fitted:
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                fitted = self.fit(name, wanted, Path(folder), epochs=1)
            fit_s = (time.perf_counter() - begin) * classifiers.EPOCHS[name] * (len(tried) + len(self.seeds))
        options = sum(len(self.settings(name, shape)) for shape in tried)
        fitting = [self.made(name, wanted, fitted) for wanted in self.settings(name, tried[0])]
        policy = next((policy for policy in fitting if policy is not None), None)
        if policy is None:
            return 1.0
        replay(few, copy.deepcopy(policy), self.arena.costs)  # reads what it needs of the recording
        begin = time.perf_counter()
        replay(few, policy, self.arena.costs)
        return (time.perf_counter() - begin) * times * options + fit_s

    def all(
        self, minutes: float = 0.0, expected: dict | None = None
    ) -> tuple[dict[Method, list[Policy]], pd.DataFrame]:
        """{method: policies}, engines' rules as they ship and all of them tuned; a table with a row for each of the latter.

        minutes: no rule is begun that would not be tuned in this time (0: no limit); what is left is for the next call.
        The state of a row says "found", "tuned", "left" or why the rule was refused: that stops no other.
        """
        expected = expected or self.expected_s()
        methods = {name: Method(name, TUNED, trained_on=self.arena.costs.name) for name in self.names}
        policies: dict[Method, list[Policy]] = {}
        for name in self.names:
            with contextlib.suppress(SpecdecError):  # no chains were recorded; its row says so
                policies |= {Method(name): [self.shipped(name)]} if name in ENGINES else {}
            policies[methods[name]] = []

        def one(name: str) -> dict:
            if name in ENGINES:
                self.shipped(name)
            policies[methods[name]], facts = self.tune(name)
            return _row_of(name, facts)

        states = in_time({name: expected[name] for name in self.names}, minutes, one, "tuned", slowest=5.0)
        nothing = {"shape": "", "settings": "", "replays": 0}
        rows = [{"method": str(methods[name]), **nothing, **row} for name, row in zip(self.names, states, strict=True)]
        policies = {method: made for method, made in policies.items() if made}
        columns = ["method", "state", "shape", "settings", "ms_per_tok", "replays", "minutes", "expected_min"]
        return policies, pd.DataFrame(rows, columns=columns)


def _row_of(name: str, facts: dict) -> dict:
    """What a table says of a rule that was tuned."""
    chosen = ", ".join(f"{key}={facts['settings'][key]}" for key in RULES[name].knobs)
    shown = {key: facts[key] for key in ("replays", "ms_per_tok")} | {"minutes": facts["seconds"] / 60}
    return shown | {"shape": str(facts["shape"]), "settings": chosen}


def temperatures(trace, top_k: int, beam: tuple[int, ...] = (), levels: int = 6, most: int = 1000) -> tuple[float, ...]:
    """A temperature per level, from the first on, under which the drafter's probabilities are those of being accepted.

    DSpark's sequential temperature scaling: each level's is the one of GRID with the least expected calibration error of the
    product down to it, those above being settled. Of a tree the best path of each level is looked at. most: positions at most.
    """
    levels = min(levels, trace.depth_of(top_k, beam) + 1)
    rows = np.unique(np.linspace(0, len(trace) - 1, min(most, len(trace))).astype(int))
    scores = trace.column("scores", top_k, beam)[rows]
    ranks, plan, found = trace.ranks[top_k, beam][rows], TreeConfig(1, levels - 1, top_k, beam=beam), []
    start, each = 0, np.arange(len(rows))
    for level in range(levels):
        end = pool_size(level, top_k, beam)
        pool = scores[:, :end]
        best = pool[:, start:].argmax(1) + start
        own = pool[each, best][:, None]
        place = (pool > own).sum(1) + ((pool == own) & (np.arange(end) < best[:, None])).sum(1)  # its rank in the pool
        accepted = ranks[:, level, level] == place
        chances = [engines.calibrated(pool, plan, (*found, one))[each, best] for one in GRID]
        found.append(GRID[int(np.argmin([calibration_error(one, accepted) for one in chances]))])
        start = end
    return tuple(found)


def calibration_error(chances: np.ndarray, happened: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: mean over equally wide bins, by their share, of |mean chance - share that happened|."""
    bin_of = np.minimum((chances * bins).astype(int), bins - 1)
    sums = np.bincount(bin_of, chances - happened, bins)
    return float(np.abs(sums).sum() / len(chances))


def opponents(trace: Trace, out_dir: Path, *, depth: int = 12, seed: int = 0) -> dict[str, Policy]:
    """The rules and classifiers of LTD's Table 1 by their names there, the classifiers fitted to `trace`.

    depth: the deepest tree of all. GammaTune may go half as deep again as it begins, so it begins at two thirds of it.
    """
    limit = {"max_depth": depth}
    rules = {"DDD": DDD(**limit), "SVIP": SVIP(**limit), "GammaTune": GammaTune(default_depth=2 * depth // 3)}
    folders = {"C2T": "c2t", "Disco": "disco", "SpecDec++": "specdec_plus"}
    for name, place in folders.items():
        rules[name] = classifiers.fitted(name, trace, Path(out_dir) / place, seed=seed, policy=limit)
    return rules
