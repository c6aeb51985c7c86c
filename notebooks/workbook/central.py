"""Controllers on several machines: prices, trainings on equal terms, speeds over the tuned tree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd

from specdec.costs.model import CostModel
from specdec.costs.profiles import GPUS, HOSTS, PROFILES, profile, roofline
from specdec.evaluation import compare
from specdec.identity import EQUAL
from specdec.replays.trace import Trace

from workbook import terms

# Llama-3.1-70B with a drafter of one layer, as `costs.profiles.LLAMA_8B` has it for 8B; on eight
# GPUs that share the weights.
LLAMA_70B = dict(parameters=69.5e9, drafter_parameters=1.4e9, layers=80, hidden=8192, kv_frac=0.125)


def gpu_costs(name: str) -> CostModel:
    """The prices of a GPU by the name of its profile, for a data sheet's without "roofline-"."""
    return profile(name if name in PROFILES else f"roofline-{name}")


def costs_of(name: str, folder: Path) -> CostModel:
    """The prices of a machine: costs-NAME.json in `folder` (notebook 21), else a GPU's.

    `h100x8-llama-70b-graphs` is Llama-3.1-70B on eight H100s, without the time between them.
    """
    calibrated = Path(folder) / f"costs-{name}.json"
    if calibrated.is_file():
        return CostModel.load(calibrated)
    gpu, _, host = name.partition("x8-llama-70b-")
    if not host:
        return gpu_costs(name)
    # eight GPUs read their parts of the weights at the same time
    bandwidth, rate = GPUS[gpu]
    speeds = {"bandwidth_gb_per_s": 8 * bandwidth, "tflop_per_s": 8 * rate}
    return roofline(**LLAMA_70B, **HOSTS[host], **speeds, name=f"roofline-{name}")


def same_space(trace: Trace, costs: CostModel, effort: float = 1.0) -> terms.EqualTerms:
    """Equal terms whose first shape is the tuned tree's own."""
    usual = terms.EqualTerms()
    tuned = compare.Baselines.choose(trace, costs).tuned
    shapes = dict.fromkeys(((tuned.top_k, *tuned.beam), *usual.shapes))
    return dataclasses.replace(usual, shapes=tuple(shapes)[: len(usual.shapes)], effort=effort)


def trained(name, trace, costs, equal, seeds, *, pair, minutes: float, scale: str):
    """Every system trained at these prices, and the table of `terms.train_all`.

    name: of the run that keeps the trainings. pair: to time answers while it decodes.
    """
    place = terms.opened(name, trace, costs, equal, scale)
    arena = terms.Arena(trace, costs, place.directory, equal, pair=pair, progress=False)
    return terms.train_all(arena, arena.jobs(seeds, [EQUAL]), minutes)


def over_tuned(comparison: compare.Comparison) -> pd.DataFrame:
    """Rows of `compare.over_seeds`; the interval over the tuned tree is that over prompts."""
    table = compare.over_seeds(comparison)
    ends = {f"over_tuned_{end}": table[f"over_tuned_prompts_{end}"] for end in ("low", "high")}
    return table.assign(**ends)
