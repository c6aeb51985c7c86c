"""Equal terms on every machine: a controller may answer what the tuned tree may be, is trained at
that machine's prices with several seeds, and is judged on test prompts beside the tuned tree and
the bound.

Knows nothing about how systems learn (`terms`), and nothing about what a recording holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec import runs
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
    """How long and how often everybody learns. effort: as a part of each system's own length;
    seeds: of trainings.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    effort: float = 1.0
    systems: tuple[str, ...] = (terms.RESPS, terms.LTD, terms.RADAR, terms.OURS)
    minutes: float = 0.0  # nothing begins that would not end in this time; 0: no limit
    scale: str = "laptop"
    pair: Pair | None = field(default=None, compare=False)  # to time answers while it decodes


def costs_of(name: str, folder: Path) -> CostModel:
    """The prices of a machine: costs-NAME.json in `folder` (notebook 21), a data sheet's of a GPU,
    or a published profile.

    `h100x8-llama-70b-graphs` is Llama-3.1-70B on eight H100s that share weights and arithmetic,
    without the time between them.
    """
    if (calibrated := Path(folder) / f"costs-{name}.json").is_file():
        return CostModel.load(calibrated)
    gpu, _, model = name.partition("x8-llama-70b-")
    if not model:
        return profile(f"roofline-{name}")
    bandwidth, rate = GPUS[gpu]
    return roofline(
        **LLAMA_70B,
        **HOSTS[model],
        name=f"roofline-{name}",
        bandwidth_gb_per_s=8 * bandwidth,
        tflop_per_s=8 * rate,
    )


def same_space(trace: Trace, costs: CostModel, effort: float = 1.0) -> terms.EqualTerms:
    """Equal terms whose first shape is the tuned tree's own, where its whole trees were
    recorded.
    """
    usual = terms.EqualTerms()
    tuned = compare.Baselines.choose(trace, costs).tuned
    shapes = dict.fromkeys(((tuned.top_k, *tuned.beam), *usual.shapes))
    return dataclasses.replace(usual, shapes=tuple(shapes)[: len(usual.shapes)], effort=effort)


def trained(
    trace: Trace, costs: CostModel, how: Terms
) -> tuple[dict[Method, list[Policy]], pd.DataFrame]:
    """The systems trained on a recording at a machine's prices, a policy per seed, and the table of
    `terms.train_all`.

    A training that was finished before is found again.
    """
    equal = same_space(trace, costs, how.effort)
    place = terms.opened("central", trace, costs, equal, how.scale)
    arena = terms.Arena(trace, costs, place.directory, equal, pair=how.pair)
    jobs = [job for job in arena.jobs(how.seeds, [terms.EQUAL]) if job.system in how.systems]
    return terms.train_all(arena, jobs, how.minutes)


def judged(
    trace: Trace, costs: CostModel, policies: dict[Method, list[Policy]], **options: Any
) -> pd.DataFrame:
    """Rows of `compare.over_seeds` for the part `test`: over_tuned with its interval over prompts,
    paired, mean over seeds.

    options: of `compare.compare_replay`, such as policy_ms.
    """
    options |= {
        "baselines": compare.Baselines.choose(trace, costs),
        "random_seeds": (),
        "progress": False,
    }
    comparison = compare.compare_replay(trace, costs, policies, **options)
    table = compare.over_seeds(comparison)
    ends = {f"over_tuned_{end}": table[f"over_tuned_prompts_{end}"] for end in ("low", "high")}
    charged = table["method"].map(comparison.policy_ms)
    return table.assign(**ends, tree=comparison.baselines.tuned.text, policy_ms=charged)


def by_suite(rows: pd.DataFrame) -> pd.DataFrame:
    """Where is the gain? A row per suite, machine and system: tau of the default tree, over_tuned,
    and the bound's.
    """
    keys = ["machine", "suite"]
    default = rows[rows["terms"] == DEFAULT].groupby(keys)["tau"].first().rename("default_tau")
    bound = (
        rows[rows["method"] == compare.CLAIRVOYANT]
        .groupby(keys)["over_tuned"]
        .first()
        .rename("bound")
    )
    learned = rows[(rows["terms"] == EQUAL) & (rows["suite"] != "all")]
    return learned.merge(default.reset_index(), on=keys).merge(bound.reset_index(), on=keys)


def table(
    trace: Trace, prices: dict[str, CostModel], how: dict[str, Terms], **options: Any
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of `judged` for every machine of `how`, in a column `machine`, and the trainings."""
    rows, trainings = [], []
    for name, own in how.items():
        policies, made = trained(trace, prices[name], own)
        rows.append(judged(trace, prices[name], policies, **options).assign(machine=name))
        trainings.append(made.assign(machine=name))
    return pd.concat(rows, ignore_index=True), pd.concat(trainings, ignore_index=True)


def learning_curve(
    trace: Trace, costs: CostModel, how: Terms, prompts: Sequence[int], draw: int = 0
) -> pd.DataFrame:
    """What a system gains over the tuned tree by the number of training prompts: rows of `judged`
    with a column `prompts_learned`.

    The fewer are drawn at random from the more. Choices are made on the whole part `tune`.
    """
    turns = trace.turns
    names = np.random.default_rng(draw).permutation(
        turns.loc[turns["part"] == "train", "prompt"].unique()
    )
    rows = []
    for count in prompts:
        some = trace.select(~turns["prompt"].isin(names[count:]).to_numpy())
        some.header = {
            **some.header,
            "key": runs.content_key(of=trace.header["key"], prompts=sorted(names[:count])),
        }
        policies, _ = trained(some, costs, how)
        rows.append(judged(trace, costs, policies).assign(prompts_learned=count))
    return pd.concat(rows, ignore_index=True)


def beside(
    trace: Trace,
    costs: CostModel,
    policies: dict[str, Policy],
    prompts: pd.DataFrame,
    **options: Any,
) -> pd.DataFrame:
    """What replay says of the turns of `prompts` that were decoded live: columns method, replay
    (over the tuned tree).

    options: of `compare.compare_replay`: baselines, policy_ms.
    """
    same = trace.turns["prompt"].isin(set(prompts["prompt"])) & (trace.turns["part"] == "test")
    options |= {"random_seeds": (), "progress": False}
    found = compare.compare_replay(trace.select(same.to_numpy()), costs, policies, **options).table
    found = found[found["suite"] == "all"] if (found["suite"] == "all").any() else found
    return (
        found[["method", "over_tuned"]]
        .rename(columns={"over_tuned": "replay"})
        .astype({"method": str})
    )
