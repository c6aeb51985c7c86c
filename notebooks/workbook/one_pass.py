"""Two drafters of one target at the prices of several machines, and what control is worth.

Knows nothing about how the drafters draft; the first of two is the one that the second is compared
with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.tree_config import TreeConfig
from specdec.costs.model import CostModel
from specdec.evaluation import bench, compare, stats
from specdec.models import load
from specdec.report import tables

from workbook import terms

ORACLES = {
    compare.ORACLE_DEPTH: "perfect depth",
    compare.ORACLE_SIZE: "perfect size",
    compare.ORACLE: "perfect depth and size",
    compare.CLAIRVOYANT: "everything perfect",
}
# question -> its policies, and two bounds: the ratio of their times is what a perfect answer is
# worth
QUESTIONS = {
    "EXTEND": ("LTD's depth policy, RADAR, ours", compare.TUNED, compare.ORACLE_DEPTH),
    "SIZE": ("LTD's size policy, ours", compare.TUNED, compare.ORACLE_SIZE),
    "PLAN": ("Re-SpS", compare.ORACLE, compare.CLAIRVOYANT),
}
HERE = "this machine"


def trained_on(pair: str, drafters: Sequence[str]) -> pd.DataFrame:
    """Steps, seen_tok (tokens of chats) and minutes of each drafter's training, from its card.

    Those of the drafter that it began as are included; NaN without a card.
    """
    shipped = load.shipped_folder(pair)
    rows, parts = [], {}
    for kind in drafters:
        card = runs.found(shipped / ("" if kind == "eagle3" else kind) / "card.json")
        training, weights = card.get("training", {}), card.get("weights", {}).get("drafter", {})
        trainings = list(parts.get(card.get("began_as"), []))
        for part in (training.get("drafter"), *training.get("later", [])):
            if part:
                trainings.append(part)
        parts[weights.get("sha256")] = trainings
        row: dict = {"drafter": kind}
        for name in ("steps", "seen_tok", "minutes"):
            row[name] = sum(part[name] for part in trainings) or np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def block_costs(
    costs: CostModel, rows: int, level_ms: float = 0.0, more_ms: float = 0.0
) -> CostModel:
    """The cost model of a drafter that drafts a block of `rows` positions in its root pass.

        root_ms   of the root pass, plus what an expansion of `rows` nodes costs beyond one of a
                  single node, plus more_ms, the time of layers that the drafter in `costs` lacks
        expand_ms = level_ms, the host's work of choosing the nodes of a level

    Computed, not measured.

    >>> from specdec.costs.profiles import profile
    >>> costs = block_costs(profile("ltd-a100-vicuna-13b"), 8)
    >>> costs.draft_ms(top_k=10, expansions=[0, 3, 7], context_tok=0).tolist()
    [2.4, 2.4, 2.4]
    """

    def widened(root, expand):
        wider_ms = np.interp(rows, costs.widths, expand) - np.interp(1, costs.widths, expand)
        return np.array(root) + max(0.0, float(wider_ms))

    about = f"Drafting in one pass of {rows} rows: computed, not measured."
    return dataclasses.replace(
        costs,
        name=f"{costs.name}, one pass of {rows}",
        provenance=f"{costs.provenance} {about}",
        root=widened(costs.root, costs.expand) + more_ms,
        root_per_tok=widened(costs.root_per_tok, costs.expand_per_tok),
        expand=(level_ms,) * len(costs.widths),
        expand_per_tok=(0.0,) * len(costs.widths),
        candidate_ms=0.0,
        first_ms=0.0,
        errors={},
    )


def priced(machines: dict[str, dict[str, CostModel]], context_tok: int = 200) -> pd.DataFrame:
    """Milliseconds of root pass, one more level, verifying eight nodes, and a plain step."""
    rows = []
    for machine, drafters in machines.items():
        for drafter, costs in drafters.items():
            row = {"machine": machine, "drafter": drafter}
            row["root_ms"] = float(costs.root_ms(4, context_tok))
            row["level_ms"] = float(costs.expand_ms(4, context_tok))
            row["verify_8_ms"] = float(costs.verify_ms(8, context_tok))
            row["plain_ms"] = float(costs.step_ms(context_tok))
            rows.append(row)
    return pd.DataFrame(rows)


def replayed(
    trace, costs: CostModel, default: TreeConfig, policies: dict | None = None
) -> compare.Comparison:
    """Baselines, bounds and policies on the part `test`. The tuned tree drafts something."""
    drafting = range(2, trace.most_nodes + 2)
    baselines = compare.Baselines.choose(trace, costs, defaults=(default,), total_tokens=drafting)
    options = dict(baselines=baselines, random_seeds=(), progress=False)
    return compare.compare_replay(trace, costs, policies or {}, **options)


def worth(comparison: compare.Comparison, machine: str, drafter: str) -> pd.DataFrame:
    """Rows of a comparison: the speed over the tuned tree with its interval over prompts."""
    table = compare.over_seeds(comparison)
    ends = {f"over_tuned_{end}": table[f"over_tuned_prompts_{end}"] for end in ("low", "high")}
    names = {"machine": machine, "drafter": drafter, "where": f"{drafter}, {machine}"}
    return table.assign(**names, knows=table["method"].map(ORACLES), **ends)


def trained(
    pair,
    trace,
    costs: CostModel,
    equal: terms.EqualTerms,
    seeds: Sequence[int],
    minutes: float,
    scale: str,
):
    """The papers' systems and ours trained for a machine, and the table of `terms.train_all`."""
    place = terms.opened("trained_controllers", trace, costs, equal, scale)
    arena = terms.Arena(trace, costs, place.directory, equal, pair=pair, progress=False)
    return terms.train_all(arena, arena.jobs(seeds, [terms.EQUAL]), minutes)


def beside(turns: pd.DataFrame, first: str, rate: tuple[str, str]) -> pd.DataFrame:
    """The rate of every drafter by suite and for all, and its paired ratio to the first's."""
    table = stats.summarise(turns.assign(method=turns["drafter"]), {"over": first}, rate=rate)
    return table.assign(drafter=table["method"])


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
            columns = pd.concat(sides, axis=1)
            ratio = stats.interval(
                columns, lambda ms: ms[..., 0] / ms[..., 1] / (ms[..., 2] / ms[..., 3])
            )
            row = {"machine": machine, "knows": knows, "prompts": len(columns)}
            rows.append(row | stats.spread_of("less", ratio))
    return pd.DataFrame(rows)


def questions(turns: pd.DataFrame, drafters: Sequence[str]) -> pd.DataFrame:
    """What the perfect answer of each of QUESTIONS is worth, paired over prompts.

    Of EXTEND and SIZE, beside the tuned tree. Of PLAN, what it adds to perfect depth and size: the
    width, and plain steps.
    """
    rows = []
    for machine, times in _times(turns):
        for question, (policies, without, knowing) in QUESTIONS.items():
            for drafter in drafters:
                ratio = stats.ratio_of_sums(times[drafter, without], times[drafter, knowing])
                row = {"question": question, "asked by": policies, "machine": machine}
                row |= {"drafter": drafter, "where": f"{drafter}, {machine}"}
                row["prompts"] = len(times[drafter, without])
                rows.append(row | stats.spread_of("worth", ratio))
    return pd.DataFrame(rows)


def judged_live(run: runs.Run, drafters: Sequence[str]) -> pd.DataFrame:
    """`bench.summary` of all suites over the first drafter's tuned tree.

    over_own: over that of the method's own drafter. A method is called as its drafter, with its
    tuned tree, or "<drafter>, <controller>".
    """
    ends = {f"speedup{end}": f"over_own{end}" for end in ("", "_low", "_high")}
    parts = []
    for drafter in drafters:
        rows = bench.summary(run, drafter).rename(columns=ends)
        rows = rows[rows["method"].str.partition(", ")[0] == drafter]
        parts.append(rows[["suite", "method", *ends.values()]])
    table = _pooled(bench.summary(run, drafters[0]))
    return table.merge(pd.concat(parts), on=["suite", "method"], how="left")


def _pooled(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of all suites together; of a single suite its own."""
    return table[table["suite"] == table["suite"].iloc[-1]]


def percent(row: pd.Series) -> str:
    """The gain over the tuned tree in percent, with its interval."""
    columns = [f"over_tuned{end}" for end in ("_low", "", "_high")]
    certain = tables.surely(row.to_frame().T)[columns].iloc[0].astype(float)
    # plus zero, since -0.0 would be printed with its sign
    low, value, high = (round(100 * (ratio - 1), 1) + 0.0 for ratio in certain)
    interval = "" if pd.isna(low) else f" [{low:.1f}, {high:.1f}]"
    return f"**{value:.1f} %**{interval}"


def sentences(bounds: pd.DataFrame, drafters: Sequence[str]) -> list[str]:
    """What control is worth with both drafters, a line per machine: rows of `worth`, all suites."""
    lines = []
    for machine, part in bounds.groupby("machine", sort=False):
        rows = part.set_index(["knows", "drafter"])
        gains = []
        for knows in ("everything perfect", "perfect depth", "perfect size"):
            first, second = (percent(rows.loc[knows, drafter]) for drafter in drafters)
            gains.append(f"{knows} {first} with {drafters[0]} and {second} with {drafters[1]}")
        lines.append(f"- {machine}: {'; '.join(gains)}.")
    return lines
