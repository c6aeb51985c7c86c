"""Equal terms on every machine, in one table.

A controller may answer what the tuned tree may be, is trained at that machine's prices with
several seeds, and is judged on test prompts beside the tuned tree and the bound.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.costs.model import CostModel
from specdec.costs.profiles import GPUS, HOSTS, profile, roofline
from specdec.evaluation import compare
from specdec.identity import DEFAULT, EQUAL, Method
from specdec.replays.trace import Trace

from workbook import terms

# Llama-3.1-70B with a drafter of one layer, as `costs.profiles.LLAMA_8B` has it for 8B; on eight
# GPUs that share the weights.
LLAMA_70B = dict(parameters=69.5e9, drafter_parameters=1.4e9, layers=80, hidden=8192, kv_frac=0.125)


@dataclass(frozen=True)
class Terms:
    """How long and how often everybody learns.

    effort: as a part of each system's own length. minutes: as in `terms.in_time`. pair: to time
    answers while it decodes.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    effort: float = 1.0
    minutes: float = 0.0
    scale: str = "laptop"
    pair: Pair | None = field(default=None, compare=False)


def costs_of(name: str, folder: Path) -> CostModel:
    """The prices of a machine: costs-NAME.json in `folder` (notebook 21), else a data sheet's.

    `h100x8-llama-70b-graphs` is Llama-3.1-70B on eight H100s that share weights and arithmetic,
    without the time between them.
    """
    calibrated = Path(folder) / f"costs-{name}.json"
    if calibrated.is_file():
        return CostModel.load(calibrated)
    gpu, _, host = name.partition("x8-llama-70b-")
    if not host:
        return profile(f"roofline-{name}")
    bandwidth, rate = GPUS[gpu]
    return roofline(
        **LLAMA_70B,
        **HOSTS[host],
        name=f"roofline-{name}",
        bandwidth_gb_per_s=8 * bandwidth,
        tflop_per_s=8 * rate,
    )


def same_space(trace: Trace, costs: CostModel, effort: float = 1.0) -> terms.EqualTerms:
    """Equal terms whose first shape is the tuned tree's own."""
    usual = terms.EqualTerms()
    tuned = compare.Baselines.choose(trace, costs).tuned
    shapes = dict.fromkeys(((tuned.top_k, *tuned.beam), *usual.shapes))
    return dataclasses.replace(usual, shapes=tuple(shapes)[: len(usual.shapes)], effort=effort)


def arena_of(trace: Trace, costs: CostModel, how: Terms) -> terms.Arena:
    """Where the systems are trained on a recording at a machine's prices."""
    equal = same_space(trace, costs, how.effort)
    place = terms.opened("central", trace, costs, equal, how.scale)
    return terms.Arena(trace, costs, place.directory, equal, pair=how.pair)


def trained(
    trace: Trace, costs: CostModel, how: Terms
) -> tuple[dict[Method, list[Policy]], pd.DataFrame]:
    """The systems, a policy per seed, and the table of `terms.train_all`."""
    arena = arena_of(trace, costs, how)
    return terms.train_all(arena, arena.jobs(how.seeds, [EQUAL]), how.minutes)


def judged(
    trace: Trace, costs: CostModel, policies: dict[Method, list[Policy]], **options: Any
) -> pd.DataFrame:
    """Rows of `compare.over_seeds` for the part `test`; options: of `compare.compare_replay`."""
    options |= {"baselines": compare.Baselines.choose(trace, costs), "random_seeds": ()}
    comparison = compare.compare_replay(trace, costs, policies, progress=False, **options)
    table = compare.over_seeds(comparison)
    ends = {f"over_tuned_{end}": table[f"over_tuned_prompts_{end}"] for end in ("low", "high")}
    charged = table["method"].map(comparison.policy_ms)
    return table.assign(**ends, tree=comparison.baselines.tuned.text, policy_ms=charged)


def table(
    trace: Trace, prices: dict[str, CostModel], how: dict[str, Terms]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of `judged` for every machine of `how`, in a column `machine`, and the trainings."""
    rows, trainings = [], []
    for name, terms_here in how.items():
        policies, made = trained(trace, prices[name], terms_here)
        rows.append(judged(trace, prices[name], policies).assign(machine=name))
        trainings.append(made.assign(machine=name))
    return pd.concat(rows, ignore_index=True), pd.concat(trainings, ignore_index=True)


def by_suite(rows: pd.DataFrame) -> pd.DataFrame:
    """Where is the gain? A row per suite, machine and system, with default_tau and the bound."""
    keys = ["machine", "suite"]
    default = rows[rows["terms"] == DEFAULT].groupby(keys)["tau"].first().rename("default_tau")
    bound = rows[rows["method"] == compare.CLAIRVOYANT].groupby(keys)["over_tuned"].first()
    learned = rows[(rows["terms"] == EQUAL) & (rows["suite"] != "all")]
    learned = learned.merge(default.reset_index(), on=keys)
    return learned.merge(bound.rename("bound").reset_index(), on=keys)


def beside(
    trace: Trace,
    costs: CostModel,
    policies: dict[str, Policy],
    prompts: pd.DataFrame,
    **options: Any,
) -> pd.DataFrame:
    """What replay says of the test turns of `prompts`, which were decoded live.

    Columns method, replay (over the tuned tree). options: baselines and policy_ms of
    `compare.compare_replay`.
    """
    same = trace.turns["prompt"].isin(set(prompts["prompt"])) & (trace.turns["part"] == "test")
    part = trace.select(same.to_numpy())
    options |= {"random_seeds": (), "progress": False}
    rows = compare.compare_replay(part, costs, policies, **options).table
    if (rows["suite"] == "all").any():
        rows = rows[rows["suite"] == "all"]
    rows = rows[["method", "over_tuned"]].rename(columns={"over_tuned": "replay"})
    return rows.astype({"method": str})
