"""The rules of engines and papers as they are, and tuned on the terms on which controllers learn.

Tuned: a chain and every shape of the terms are tried in replay; settings are chosen on part
"train", the shape on part "tune", and answers are priced.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rules.llamacpp_ev import LlamacppEv
from rules.llamacpp_p_min import LlamacppPMin
from rules.sglang_ema import SglangEma
from rules.ucb import Ucb
from rules.vllm_logistic import VllmLogistic

from specdec import runs
from specdec.core.policy import Policy
from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError, nearest_name_error
from specdec.identity import TUNED, Method
from specdec.policies.base import chose
from specdec.policies.heuristics import DDD, SVIP, GammaTune
from specdec.replays.replay import answer_ms, replay
from specdec.replays.trace import Trace

from workbook import classifiers
from workbook.terms import Arena, Shape, in_time


@dataclass(frozen=True)
class Open:
    """What a rule leaves open: setting -> values that are tried.

    fitted: a classifier. square: as many beams as children. chain: it drafts chains alone.
    """

    knobs: dict[str, tuple]
    fitted: bool = False
    square: bool = False
    chain: bool = False


_CLASSES = {
    "sglang_ema": SglangEma,
    "llamacpp_ev": LlamacppEv,
    "llamacpp_p_min": LlamacppPMin,
    "ucb": Ucb,
    "vllm_logistic": VllmLogistic,
    "DDD": DDD,
    "SVIP": SVIP,
    "GammaTune": GammaTune,
}
ENGINES = {
    "sglang_ema": Open({"candidates": ((1, 3, 5, 7), (1, 2, 3), (0, 1, 3))}),
    "llamacpp_ev": Open({"look_ahead": (0, 2)}),
    "llamacpp_p_min": Open({"p_min": (0.15, 0.3, 0.45, 0.6, 0.75)}),
    "ucb": Open({"arms": ((1, 2, 3, 4), (0, 1, 2, 3)), "per_text": (True, False)}),
    "vllm_logistic": Open({"levels": (2, 3, 4, 6)}, chain=True),
}
_LAYERS = ((5, 7, 9), (1, 2, 3, 4, 5, 6, 7))
_THRESHOLD = {"threshold": (0.3, 0.5, 0.7)}
PAPERS = {
    "DDD": Open({"layers": _LAYERS, "threshold": (-2.0, -1.0, -0.3)}, square=True),
    "SVIP": Open({"minimum": (0.3, 0.5, 0.6, 0.7)}, square=True),
    "GammaTune": Open({"default_depth": (2, 3, 5)}, square=True),
    "C2T": Open(_THRESHOLD, fitted=True, square=True),
    "Disco": Open(_THRESHOLD, fitted=True, square=True),
    "SpecDec++": Open(_THRESHOLD, fitted=True, square=True),
}
RULES = ENGINES | PAPERS
TUNED_FILE = "tuned.json"


class Tuner:
    """Rules for an arena's recording and prices.

    folder: where what was tuned is found again. names: () for all of RULES.
    """

    def __init__(self, arena: Arena, folder: Path, seeds=(0,), names=()):
        for name in names:
            if name not in RULES:
                raise nearest_name_error("rule", name, RULES)
        self.arena, self.folder = arena, folder
        self.seeds, self.names = list(seeds), tuple(names) or tuple(RULES)
        # settings are chosen and classifiers fitted on one part, shapes chosen on the other
        self.train = arena.trace.select(part="train")
        self.tune_on = arena.trace.select(part="tune")

    def shapes(self, name: str) -> list[Shape]:
        """The shapes tried: a chain if one was recorded, then those of the terms."""
        shapes = []
        if self.arena.trace.depth_of(1) >= 0:
            shapes.append((1, ()))
        if not RULES[name].chain:
            shapes += self.arena.shapes()
        if RULES[name].square:
            shapes = [shape for shape in shapes if not shape[1]]
        return list(dict.fromkeys(shapes))

    @functools.cache  # noqa: B019  as many entries as shapes, and a tuner does not live long
    def nodes(self, shape: Shape) -> int:
        """Nodes to verify: all of a chain, else as many as the shape's fastest tree."""
        if shape[0] == 1:
            return self.arena.depth(shape) + 1
        return self.arena.start(shape).verify_nodes

    def settings(self, name: str, shape: Shape) -> list[dict]:
        """Everything that is tried in one shape."""
        # 1. what the shape and the recording fix
        top_k, beam = shape
        levels = self.arena.depth(shape) + 1
        common = {"top_k": top_k, "verify_nodes": self.nodes(shape)}
        if RULES[name].chain:
            common = {}
        elif name in ENGINES:
            common |= {"beam": beam, "most_levels": levels}
        else:
            common["verify_nodes"] = min(common["verify_nodes"], pool_size(levels - 1, top_k))
            common["max_depth"] = levels - 1
        # 2. every combination of what the rule leaves open
        knobs = RULES[name].knobs
        options = []
        for values in itertools.product(*knobs.values()):
            option = common | dict(zip(knobs, values, strict=True))
            # no more levels than were recorded
            if option.get("levels", 0) <= levels:
                options.append(option)
        return options

    def made(self, name: str, settings: dict, fitted=None) -> Policy | None:
        """A rule of these settings; None if they do not go together."""
        if fitted is not None:
            return fitted.with_settings(threshold=settings["threshold"])
        settings = dict(settings)
        if name == "GammaTune":
            # from the root's children alone to the deepest tree
            depth = settings["default_depth"]
            settings["low"] = 0.5 / depth
            settings["high"] = (settings.pop("max_depth") + 0.5) / depth
        try:
            return priced(_CLASSES[name](**settings), self.arena.costs)
        except (SpecdecError, AssertionError):
            return None

    def fit(self, name: str, settings: dict, folder: Path, seed: int = 0):
        """The classifier of a shape, found again in its folder; None for other rules."""
        if not RULES[name].fitted:
            return None
        tree = {key: settings[key] for key in ("top_k", "verify_nodes", "max_depth")}
        return classifiers.fitted(name, self.train, folder, seed=seed, policy=tree)

    def shipped(self, name: str) -> Policy:
        """An engine's rule as it ships, on chains no longer than the recording's."""
        deepest = self.arena.trace.depth_of(1) + 1
        if not deepest:
            why = f"{name} drafts chains, which were not recorded"
            raise SpecdecError(f"{why}; record a family or top_k 1.")
        # defaults, cut to what was recorded
        settings = {}
        for field in dataclasses.fields(_CLASSES[name]):
            if field.name in ("most_levels", "levels"):
                settings[field.name] = min(field.default, deepest)
            elif field.name == "candidates":
                settings[field.name] = tuple(n for n in field.default if n <= deepest)
        rule = priced(_CLASSES[name](**settings), self.arena.costs)
        return chose(rule, "constants", "none", "as they ship")

    def tune(self, name: str) -> tuple[list[Policy], dict]:
        """The policies of a rule, one per seed that matters, and facts, found again later.

        Facts: shape, settings, ms_per_tok, replays, seconds.
        """
        folder = self.folder / runs.plain_name(name)
        # 1. the best settings of every shape, then the best shape
        if not self.is_tuned(name):
            began = time.perf_counter()
            rows = []
            for number, shape in enumerate(self.shapes(name)):
                row = self.best_settings(name, shape, folder / f"trial-{number}")
                if row is not None:
                    rows.append(row)
            if not rows:
                why = f"no settings of {name} fit this recording"
                raise SpecdecError(f"{why}; record deeper trees or a family.")
            best = min(rows, key=lambda row: row["ms_per_tok"])
            best["replays"] = sum(row["replays"] for row in rows)
            best["seconds"] = time.perf_counter() - began
            runs.write_json(folder / TUNED_FILE, runs.plain(best))
        facts = runs.read_json(folder / TUNED_FILE)
        # 2. a policy per seed
        settings = {}
        for key, setting in facts["settings"].items():
            settings[key] = tuple(setting) if isinstance(setting, list) else setting
        knobs = {key: settings[key] for key in RULES[name].knobs}
        policies = []
        for seed in self.seeds if RULES[name].fitted else self.seeds[:1]:
            fitted = self.fit(name, settings, folder / f"seed-{seed}" / "fit", seed)
            policy = self.made(name, settings, fitted)
            policy.trained_for["pair"] = self.arena.trace.header["pair"]
            policy.trained_for["costs"] = self.arena.costs.name
            chose(policy, "settings", "train", knobs)
            policies.append(chose(policy, "width", "tune", facts["shape"]))
        return policies, facts

    def best_settings(self, name: str, shape: Shape, folder: Path) -> dict | None:
        """The fastest settings of a shape on "train", their time on "tune"; None if none fit."""
        costs = self.arena.costs
        options = self.settings(name, shape)
        if not options:
            return None
        fitted = self.fit(name, options[0], folder)
        asking_ms = None
        times = {}
        for number, settings in enumerate(options):
            policy = self.made(name, settings, fitted)
            if policy is None:
                continue
            if asking_ms is None:
                asking_ms = answer_ms(self.train, copy.deepcopy(policy), costs)
            times[number] = replay(self.train, policy, costs, policy_ms=asking_ms).ms_per_tok
        if not times:
            return None
        settings = options[min(times, key=times.get)]
        policy = self.made(name, settings, fitted)
        ms = replay(self.tune_on, policy, costs, policy_ms=asking_ms).ms_per_tok
        return {"shape": shape, "settings": settings, "ms_per_tok": ms, "replays": len(times) + 1}

    def is_tuned(self, name: str) -> bool:
        return (self.folder / runs.plain_name(name) / TUNED_FILE).is_file()

    def all(self, minutes: float = 0.0) -> tuple[dict[Method, list[Policy]], pd.DataFrame]:
        """{method: policies}, engines' rules as they ship and all tuned; a row for each tuned one.

        minutes, state: as in `in_time`.
        """
        policies: dict[Method, list[Policy]] = {}
        methods = {}
        for name in self.names:
            methods[name] = Method(name, TUNED, trained_on=self.arena.costs.name)
            if name in ENGINES and self.arena.trace.depth_of(1) >= 0:
                policies[Method(name)] = [self.shipped(name)]
            policies[methods[name]] = []

        def tuned(name: str) -> dict:
            if name in ENGINES:
                # refused without a recorded chain
                self.shipped(name)
            policies[methods[name]], facts = self.tune(name)
            knobs = [f"{key}={facts['settings'][key]}" for key in RULES[name].knobs]
            row = {"shape": str(facts["shape"]), "settings": ", ".join(knobs)}
            row |= {"ms_per_tok": facts["ms_per_tok"], "replays": facts["replays"]}
            return row | {"minutes": facts["seconds"] / 60}

        kinds = [RULES[name].fitted for name in self.names]
        states = in_time(self.names, kinds, minutes, tuned, "tuned", self.is_tuned)
        rows = []
        for name, state in zip(self.names, states, strict=True):
            row = {"method": str(methods[name]), "shape": "", "settings": "", "replays": 0}
            rows.append(row | state)
        policies = {method: rules for method, rules in policies.items() if rules}
        columns = ["method", "state", "shape", "settings", "ms_per_tok", "replays", "minutes"]
        return policies, pd.DataFrame(rows, columns=columns)


def priced(policy: Policy, costs) -> Policy:
    """The rule with these prices, if it takes any."""
    return policy.price(costs) if hasattr(policy, "price") else policy


def rule(name: str, costs) -> Policy:
    """An engine's rule with its own constants and these prices."""
    if name not in ENGINES:
        raise nearest_name_error("rule", name, ENGINES)
    return priced(_CLASSES[name](), costs)


def opponents(trace: Trace, out_dir: Path, *, depth: int = 12, seed: int = 0) -> dict[str, Policy]:
    """The rules and classifiers of LTD's Table 1, the classifiers fitted to `trace`.

    depth: the deepest tree of all.
    """
    limit = {"max_depth": depth}
    # GammaTune may go half as deep again as it begins
    gamma = GammaTune(default_depth=2 * depth // 3)
    rules = {"DDD": DDD(**limit), "SVIP": SVIP(**limit), "GammaTune": gamma}
    for name, place in {"C2T": "c2t", "Disco": "disco", "SpecDec++": "specdec_plus"}.items():
        folder = Path(out_dir) / place
        rules[name] = classifiers.fitted(name, trace, folder, seed=seed, policy=limit)
    return rules
