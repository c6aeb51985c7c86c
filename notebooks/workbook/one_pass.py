"""Two drafters of one target at the prices of several machines, and what control is worth.

The first of two drafters is the one that the second is compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from specdec.costs.model import CostModel
from specdec.evaluation import compare, stats

from workbook import central

ORACLES = {
    compare.ORACLE_DEPTH: "perfect depth",
    compare.ORACLE_SIZE: "perfect size",
    compare.ORACLE: "perfect depth and size",
    compare.CLAIRVOYANT: "everything perfect",
}


def block_costs(costs: CostModel, rows: int, level_ms: float = 0.0) -> CostModel:
    """The cost model of a drafter that drafts a block of `rows` positions in its root pass.

        root_ms   of the root pass, plus what an expansion of `rows` nodes costs beyond one of a
                  single node
        expand_ms = level_ms, the host's work of choosing the nodes of a level

    Computed, not measured.

    >>> from specdec.costs.profiles import profile
    >>> costs = block_costs(profile("ltd-a100-vicuna-13b"), 8)
    >>> costs.draft_ms(top_k=10, expansions=[0, 3, 7], context_tok=0).tolist()
    [2.4, 2.4, 2.4]
    """

    def widened(root, expand):
        # an expansion that is wider costs what was measured at that width
        wider_ms = np.interp(rows, costs.widths, expand) - np.interp(1, costs.widths, expand)
        return np.array(root) + max(0.0, float(wider_ms))

    about = f"Drafting in one pass of {rows} rows: computed, not measured."
    return dataclasses.replace(
        costs,
        name=f"{costs.name}, one pass of {rows}",
        provenance=f"{costs.provenance} {about}",
        root=widened(costs.root, costs.expand),
        root_per_tok=widened(costs.root_per_tok, costs.expand_per_tok),
        expand=(level_ms,) * len(costs.widths),
        expand_per_tok=(0.0,) * len(costs.widths),
        candidate_ms=0.0,
        first_ms=0.0,
        errors={},
    )


def worth(comparison: compare.Comparison, machine: str, drafter: str) -> pd.DataFrame:
    """Rows of a comparison: the speed over the tuned tree with its interval over prompts."""
    table = central.over_tuned(comparison)
    names = {"machine": machine, "drafter": drafter, "where": f"{drafter}, {machine}"}
    return table.assign(**names, knows=table["method"].map(ORACLES))


def _times(turns: pd.DataFrame):
    """(machine, time by drafter, method, suite and prompt) of every machine."""
    for machine, part in turns.groupby("machine", sort=False):
        yield machine, part.groupby(["drafter", "method", "suite", "prompt"])["time_ms"].sum()


def less(turns: pd.DataFrame, drafters: Sequence[str]) -> pd.DataFrame:
    """How many times as much knowing is worth with the first drafter as with the second."""
    rows = []
    for machine, times in _times(turns):
        for method, knows in ORACLES.items():
            sides = []
            for drafter in drafters:
                sides += [times[drafter, compare.TUNED], times[drafter, method]]
            # four times of each prompt, resampled together
            columns = pd.concat(sides, axis=1)
            ratio = stats.interval(
                columns, lambda ms: ms[..., 0] / ms[..., 1] / (ms[..., 2] / ms[..., 3])
            )
            row = {"machine": machine, "knows": knows, "prompts": len(columns)}
            rows.append(row | stats.spread_of("less", ratio))
    return pd.DataFrame(rows)


def questions(turns: pd.DataFrame, drafters: Sequence[str], bounds: dict) -> pd.DataFrame:
    """What the perfect answer of each question is worth, paired over prompts.

    bounds: question -> its policies, and two methods, whose times' ratio is that worth.
    """
    rows = []
    for machine, times in _times(turns):
        for question, (policies, without, knowing) in bounds.items():
            for drafter in drafters:
                ratio = stats.ratio_of_sums(times[drafter, without], times[drafter, knowing])
                row = {"question": question, "asked by": policies, "machine": machine}
                row |= {"drafter": drafter, "where": f"{drafter}, {machine}"}
                row["prompts"] = len(times[drafter, without])
                rows.append(row | stats.spread_of("worth", ratio))
    return pd.DataFrame(rows)
