"""How good is a controller? It is replayed on the recording that ships, at the prices of several
machines.

Speed over plain decoding and over the static tree tuned for the machine, with intervals over
prompts; the share of the gap between that tree and the clairvoyant bound; the time of the policy's
answers, measured here and charged. A policy's file is imported, so its code runs here. What is
accepted is that of the recorded pair, on every machine.
"""

from __future__ import annotations

import copy
import functools
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.policy import Policy, checked_policy
from specdec.core.tree_config import TreeConfig, tree_from
from specdec.costs.model import CostModel
from specdec.costs.profiles import prices
from specdec.errors import SpecdecError, first_line
from specdec.evaluation import stats
from specdec.evaluation.compare import TUNED, Baselines
from specdec.evaluation.methods import AUTOREGRESSIVE, method_from
from specdec.policies.base import Learned
from specdec.replays.oracle import clairvoyant, headroom
from specdec.replays.replay import answer_ms, replay
from specdec.replays.static_trees import static_turns
from specdec.replays.trace import Trace, open_trace

RECORDING = Path(__file__).parents[1] / "report" / "recordings" / "scored"
MACHINES = (
    "h100-llama-3.1-8b-graphs",
    "roofline-a100-llama-8b-eager",
    "roofline-rtx3090-llama-8b-graphs",
)
# of trees that are tuned
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80, 120, 160, 240)
RATIOS = {"speedup": AUTOREGRESSIVE, "over_tuned": TUNED}


@dataclass(frozen=True)
class Bench:
    """One machine: its prices, the turns to judge on, and what a policy is compared with."""

    costs: CostModel
    trace: Trace
    tuned: TreeConfig
    turns: pd.DataFrame  # of plain decoding and of the tuned tree, with a column method
    bound_ms: float  # per token

    @classmethod
    def of(cls, recorded: Trace, costs: CostModel) -> Bench:
        """The tree is the one that the recording names for these prices, else the fastest on its
        parts for choices.
        """
        recorded = recorded.restrict(costs.ranges)
        test = recorded.select(part="test")
        key = runs.content_key(costs=runs.plain(vars(costs)))[:16]
        text = recorded.header.get("tuned", {}).get(key)
        if text:
            tuned = tree_from(text)
        else:
            sizes = [size for size in SIZES if size <= recorded.most_nodes + 1]
            tuned = Baselines.choose(recorded, costs, total_tokens=sizes).tuned
        turns = static_turns(test, costs, tuned)
        plain = turns.assign(method=AUTOREGRESSIVE, time_ms=turns["plain_ms"])
        turns = pd.concat([plain, turns.assign(method=TUNED)], ignore_index=True)
        return cls(costs, test, tuned, turns, clairvoyant(test, costs).ms_per_tok)

    def judge(self, policy: Policy, policy_ms: float) -> dict[str, Any]:
        """The columns of `Score.table`."""
        replayed = replay(self.trace, policy, self.costs, policy_ms=policy_ms)
        rows = pd.concat([self.turns, replayed.table.assign(method="policy")], ignore_index=True)
        table = stats.summarise(rows, RATIOS, rate=stats.SPEED, pool=True)
        row = table[(table["suite"] == "all") & (table["method"] == "policy")].iloc[0]
        names = [*stats.spread_names("speedup"), *stats.spread_names("over_tuned")]
        columns = {"machine": self.costs.name, **row[["prompts", *names]]}
        tuned_ms = replayed.ms_per_tok * row["over_tuned"]
        columns["headroom_frac"] = headroom(replayed.ms_per_tok, tuned_ms, self.bound_ms)
        columns["tau"] = replayed.tau
        columns["policy_ms"] = policy_ms
        answers_ms = replayed.table["policy_ms"].sum()
        columns["policy_frac"] = float(answers_ms / replayed.table["time_ms"].sum())
        columns["tuned"] = self.tuned.text
        apart = abs(np.log(row["over_tuned"]))
        columns["beyond_costs"] = bool(apart > self.costs.uncertainty_frac)
        return columns


@dataclass(frozen=True)
class Score:
    """The result of `score`.

    table: one row per machine: prompts, speedup (over plain decoding) and over_tuned with _low and
    _high, headroom_frac, tau, policy_ms (of one answer), policy_frac (of the time), tuned (the
    tree), and beyond_costs: whether over_tuned differs from 1 by more than the prices' uncertainty.
    """

    name: str
    table: pd.DataFrame

    @property
    def sentence(self) -> str:
        """The first machine's row in words."""
        row = self.table.iloc[0]
        speed = f"{self.name} decodes {row['speedup']:.2f} times as fast as plain decoding"
        tuned = f"{row['over_tuned']:.3f} times as fast as the tuned tree {row['tuned']}"
        share = f"has {row['headroom_frac']:.0%} of the headroom"
        return f"{speed} and {tuned} ({row['machine']}), and {share}."


def score(
    policy, *, trace=None, costs=None, machines=MACHINES, policy_ms=None, progress=True
) -> Score:
    """Judge one controller, in seconds and without a model.

    policy: a policy, a Python file with a subclass of Policy (importing it runs its code: look at
    it first), or a policy's name or folder (`method_from`). trace: a recording or its folder,
    default the one that ships. costs: its prices, a file or a profile's name, default those beside
    it. machines: more prices. policy_ms: the time of an answer; None measures it.

    >>> judged = score("static:8,3,4", machines=(), progress=False)
    >>> bool(judged.table["speedup"][0] > 1)
    True
    """
    benches = course(trace, costs, machines, progress)
    name, controller = _opened(policy)
    if policy_ms is None:
        first = benches[0]
        policy_ms = answer_ms(first.trace, _priced(controller, first.costs), first.costs)
    rows = []
    for bench in tqdm(benches, name, unit="machine", disable=not progress):
        rows.append(bench.judge(_priced(controller, bench.costs), policy_ms))
    return Score(name, pd.DataFrame(rows))


def course(trace=None, costs=None, machines=MACHINES, progress=False) -> list[Bench]:
    """A Bench for the recording's own prices and one for each machine."""
    if trace is None and costs is None:
        return [_shipped(name) for name in tqdm(("", *machines), disable=not progress)]
    if isinstance(trace, Trace) and costs is None:
        raise SpecdecError("a recording in memory names no prices; give score costs=...")
    place = RECORDING if trace is None else trace
    recorded = place if isinstance(place, Trace) else open_trace(place)
    first = runs.placed(place) / "costs.json" if costs is None else costs
    return [Bench.of(recorded, prices(source)) for source in (first, *machines)]


@functools.cache
def _shipped(name: str) -> Bench:
    return Bench.of(open_trace(RECORDING), prices(name or RECORDING / "costs.json"))


def _opened(policy: Any) -> tuple[str, Policy]:
    """(name, policy) of what was given to `score`; the code of a Python file runs here."""
    if not isinstance(policy, str | Path):
        return type(policy).__name__, checked_policy(policy)
    if not str(policy).endswith(".py"):
        # None, for plain decoding, would be the default tree
        return str(policy), checked_policy(method_from(str(policy)))
    file = Path(policy).resolve()
    if not file.is_file():
        raise SpecdecError(f"there is no file {policy}; check the path.")
    # what the file imports may be beside it
    sys.path.append(str(file.parent))
    try:
        names = runpy.run_path(str(file), run_name=file.stem)
        kinds = [kind for kind in names.values() if getattr(kind, "__module__", "") == file.stem]
        classes = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Policy)]
        if len(classes) != 1:
            raise TypeError(f"{len(classes)} subclasses of Policy instead of one")
        return file.stem, checked_policy(classes[0]())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the file raises
        reason = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
        raise SpecdecError(f"{file.name} cannot be used as a policy ({reason}).") from error
    finally:
        sys.path.remove(str(file.parent))


def _priced(policy: Policy, costs: CostModel) -> Policy:
    """A fresh copy of the policy; a rule with a method `price` gets the prices of the machine."""
    if hasattr(policy, "price") and not isinstance(policy, Learned):
        return policy.price(costs)
    return copy.deepcopy(policy)
