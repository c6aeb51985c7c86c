"""Two drafters of one target at the prices of several machines: tokens, times, and what control is
worth with each.

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
from specdec.errors import check_integer, check_number
from specdec.evaluation import bench, compare, stats
from specdec.models import load
from specdec.report import provenance, tables

from workbook import terms

ORACLES = {compare.ORACLE_DEPTH: "perfect depth", compare.ORACLE_SIZE: "perfect size"}
ORACLES |= {compare.ORACLE: "perfect depth and size", compare.CLAIRVOYANT: "everything perfect"}
# question -> its policies, and two bounds: the ratio of their times is what a perfect answer is worth
QUESTIONS = {
    "EXTEND": ("LTD's depth policy, RADAR, ours", compare.TUNED, compare.ORACLE_DEPTH),
    "SIZE": ("LTD's size policy, ours", compare.TUNED, compare.ORACLE_SIZE),
    "PLAN": ("Re-SpS", compare.ORACLE, compare.CLAIRVOYANT),
}
HERE = "this machine"
BUDGET = ("steps", "seen_tok", "minutes")


def trained_on(pair: str, drafters: Sequence[str]) -> pd.DataFrame:
    """Steps, seen_tok (tokens of chats) and minutes of each drafter's training, from its card; NaN
    without one.

    Those of the drafter that it began as are included.
    """
    shipped = load.shipped_folder(pair)
    cards = {
        kind: runs.found(shipped / ("" if kind == "eagle3" else kind) / "card.json")
        for kind in drafters
    }
    rows, parts = [], {}
    for kind, card in cards.items():
        training, weights = card.get("training", {}), card.get("weights", {}).get("drafter", {})
        own = [one for one in (training.get("drafter"), *training.get("later", [])) if one]
        parts[weights.get("sha256")] = own = [*parts.get(card.get("began_as"), []), *own]
        rows.append(
            {"drafter": kind} | {name: sum(one[name] for one in own) or np.nan for name in BUDGET}
        )
    return pd.DataFrame(rows)


def budget(trainings: pd.DataFrame) -> str:
    """Whether two drafters were trained with the same budget, in a sentence. trainings: of
    `trained_on`.
    """
    first, second = (row for _, row in trainings.iterrows())
    if trainings["steps"].isna().any():
        return "How long they were trained is not known here."
    told = " and ".join(
        f"{row['steps']:,.0f} steps ({row['seen_tok'] / 1e6:.2f} M tokens)"
        for row in (first, second)
    )
    ratio = second["seen_tok"] / first["seen_tok"]
    equal = abs(ratio - 1) < 0.05
    unequal = f"**unequal budgets**: {second['drafter']} saw {ratio:.2f} times as many tokens as {first['drafter']}"
    return f"They were trained with {told}, {'which is the same budget' if equal else unequal}."


def block_costs(
    costs: CostModel, rows: int, level_ms: float = 0.0, more_ms: float = 0.0
) -> CostModel:
    """The cost model of a drafter of the same layer that drafts a block of `rows` positions in its
    root pass.

        root_ms   of the root pass, plus what an expansion of `rows` nodes costs beyond one of a
        single node, plus
                  more_ms, the time of layers that the drafter in `costs` does not have
        expand_ms = level_ms, the host's work of choosing the nodes of a level, whatever their
        number

    So the root pass drafts everything, and an expansion costs nothing but the host. Tables of
    publications hold no host
    work of a level: level_ms is 0 unless it is given. Computed, not measured: a block drafter of
    this machine is calibrated like any other.

    >>> from specdec.costs.profiles import profile
    >>> costs = block_costs(profile("ltd-a100-vicuna-13b"), 8)
    >>> costs.draft_ms(top_k=10, expansions=[0, 3, 7], context_tok=0).tolist()
    [2.4, 2.4, 2.4]
    """
    check_integer("rows", rows, 1)
    check_number("level_ms", level_ms)
    check_number("more_ms", more_ms)

    def widened(root, expand):
        wider_ms = np.interp(rows, costs.widths, expand) - np.interp(1, costs.widths, expand)
        return np.array(root) + max(0.0, float(wider_ms))

    free = (0.0,) * len(costs.widths)
    return dataclasses.replace(
        costs,
        name=f"{costs.name}, one pass of {rows}",
        provenance=f"{costs.provenance} Drafting in one pass of {rows} rows: computed, not measured.",
        root=widened(costs.root, costs.expand) + more_ms,
        root_per_tok=widened(costs.root_per_tok, costs.expand_per_tok),
        expand=(level_ms,) * len(costs.widths),
        expand_per_tok=free,
        candidate_ms=0.0,
        first_ms=0.0,
        errors={},
    )


def priced(machines: dict[str, dict[str, CostModel]], context_tok: int = 200) -> pd.DataFrame:
    """Milliseconds of the root pass and of one more level, of width four, of verifying eight nodes
    and of a plain step.
    """
    rows = []
    for machine, both in machines.items():
        for drafter, costs in both.items():
            times = [
                costs.root_ms(4, context_tok),
                costs.expand_ms(4, context_tok),
                costs.verify_ms(8, context_tok),
            ]
            rows.append([machine, drafter, *map(float, [*times, costs.step_ms(context_tok)])])
    return pd.DataFrame(
        rows, columns=["machine", "drafter", "root_ms", "level_ms", "verify_8_ms", "plain_ms"]
    )


def replayed(
    trace, costs: CostModel, default: TreeConfig, policies: dict | None = None
) -> compare.Comparison:
    """Baselines, bounds and policies on the part `test`. The tuned tree is the fastest that drafts
    anything.
    """
    drafting = range(2, trace.most_nodes + 2)
    choice = compare.Baselines.choose(trace, costs, defaults=(default,), total_tokens=drafting)
    return compare.compare_replay(
        trace, costs, policies or {}, baselines=choice, random_seeds=(), progress=False
    )


def worth(comparison: compare.Comparison, machine: str, drafter: str) -> pd.DataFrame:
    """Rows of a comparison: the speed over the tuned tree with its interval over prompts."""
    table = compare.over_seeds(comparison)
    ends = {f"over_tuned_{end}": table[f"over_tuned_prompts_{end}"] for end in ("low", "high")}
    knows = table["method"].map(ORACLES)
    return table.assign(
        machine=machine, drafter=drafter, where=f"{drafter}, {machine}", knows=knows, **ends
    )


def trained(
    pair,
    trace,
    costs: CostModel,
    equal: terms.EqualTerms,
    seeds: Sequence[int],
    minutes: float,
    scale: str,
):
    """The papers' systems and ours, trained on a recording for a machine, and the table of
    `terms.train_all`.
    """
    place = terms.opened("trained_controllers", trace, costs, equal, scale)
    arena = terms.Arena(trace, costs, place.directory, equal, pair=pair, progress=False)
    return terms.train_all(arena, arena.jobs(seeds, [terms.EQUAL]), minutes)


def beside(turns: pd.DataFrame, first: str, rate: tuple[str, str]) -> pd.DataFrame:
    """The rate of every drafter, and its ratio to that of the first, prompt by prompt: by suite and
    for all.
    """
    table = stats.summarise(turns.assign(method=turns["drafter"]), {"over": first}, rate=rate)
    return table.assign(drafter=table["method"])


def _sums(turns: pd.DataFrame):
    """(machine, time by drafter, method, suite and prompt) of every machine."""
    for machine, part in turns.groupby("machine", sort=False):
        yield machine, part.groupby(["drafter", "method", "suite", "prompt"])["time_ms"].sum()


def less(turns: pd.DataFrame, drafters: Sequence[str]) -> pd.DataFrame:
    """How many times as much knowing is worth with the first drafter as with the second, prompt by
    prompt, per machine.
    """
    rows = []
    for machine, sums in _sums(turns):
        for method, knows in ORACLES.items():
            sides = [
                sums[drafter, name] for drafter in drafters for name in (compare.TUNED, method)
            ]
            found = stats.interval(
                pd.concat(sides, axis=1),
                lambda ms: ms[..., 0] / ms[..., 1] / (ms[..., 2] / ms[..., 3]),
            )
            rows.append(
                {
                    "machine": machine,
                    "knows": knows,
                    "prompts": found.prompts,
                    **stats.spread_of("less", found),
                }
            )
    return pd.DataFrame(rows)


def questions(turns: pd.DataFrame, drafters: Sequence[str]) -> pd.DataFrame:
    """What the perfect answer of each of QUESTIONS is worth with each drafter on each machine,
    prompt by prompt.

    Of EXTEND and SIZE, beside the tuned tree. Of PLAN, what it adds to perfect depth and size: the
    width, and plain steps.
    """
    rows = []
    for machine, sums in _sums(turns):
        for question, (asked_by, without, knowing) in QUESTIONS.items():
            for drafter in drafters:
                found = stats.ratio_of_sums(sums[drafter, without], sums[drafter, knowing])
                row = {
                    "question": question,
                    "asked by": asked_by,
                    "machine": machine,
                    "drafter": drafter,
                }
                row |= {"where": f"{drafter}, {machine}", "prompts": found.prompts}
                rows.append(row | stats.spread_of("worth", found))
    return pd.DataFrame(rows)


def judged_live(run: runs.Run, drafters: Sequence[str]) -> pd.DataFrame:
    """`bench.summary` of all suites over the first drafter's tuned tree, and over_own: over that of
    the method's own drafter.

    A method is called as its drafter, with its tuned tree, or "<drafter>, <controller>".
    """
    own = []
    for drafter in drafters:
        rows = bench.summary(run, drafter)
        rows = rows[rows["method"].str.partition(", ")[0] == drafter]
        own.append(
            rows.rename(
                columns={f"speedup{end}": f"over_own{end}" for end in ("", "_low", "_high")}
            )
        )
    own = pd.concat(own)[["suite", "method", "over_own", "over_own_low", "over_own_high"]]
    table = bench.summary(run, drafters[0])
    return table[table["suite"] == table["suite"].iloc[-1]].merge(
        own, on=["suite", "method"], how="left"
    )


def of_pairs(sources: Sequence[runs.Run], drafters: Sequence[str]) -> pd.DataFrame:
    """The newest run of every pair, a row each, with its scale: tokens, speed, and bounds on the
    machine of the run.

    sources: runs of the notebook, the newest first. One that measured other drafters has no row.
    """
    newest: dict[str, runs.Run] = {}
    for run in sources:
        newest.setdefault(provenance.of([run]).rows[0]["pair"], run)
    rows = []
    for pair, run in newest.items():
        tau, speed = (
            _pooled(run.read_table(name)).set_index("drafter") for name in ("tau", "speed")
        )
        if not set(drafters) <= set(tau.index):
            continue
        bounds = _pooled(run.read_table("bounds"))
        bounds = bounds[bounds["machine"] == HERE].set_index(["knows", "drafter"])
        row = {
            "pair": pair,
            "scale": provenance.of([run]).scale,
            "prompts": int(tau["prompts"].iloc[0]),
        }
        if run.path("trainings.parquet").is_file():
            first, second = run.read_table("trainings")["seen_tok"]
            row |= {
                f"training of {drafters[1]}": f"{second / first:.2f} × the tokens of {drafters[0]}'s"
            }
        row |= {f"tau, {drafter}": f"{tau.loc[drafter, 'rate']:.2f}" for drafter in drafters}
        row[f"speed of {drafters[1]} over {drafters[0]}"] = tables.cells(
            speed.loc[[drafters[1]]], "over", 3
        )[0]
        for knows in ("everything perfect", "perfect depth", "perfect size"):
            row |= {
                f"{knows}, {drafter}": percent(bounds.loc[knows, drafter]) for drafter in drafters
            }
        rows.append(row)
    return pd.DataFrame(rows)


def published() -> pd.DataFrame:
    """What papers print (one_pass_published.yml), never ours: a row per drafter, model and GPU,
    cells by suite.

    A sentence without a table has a row with column `says`. Column `source` says where a number
    stands.
    """
    rows = []
    for table in runs.read_yaml(runs.workbook() / "notebooks" / "one_pass_published.yml"):
        said = {
            "paper": table["paper"],
            "source": table["source"] + ", second hand" * table.get("second_hand", False),
        }
        if "says" in table:
            rows.append(said | {"says": table["says"]})
        for drafter, suites in table.get("drafters", {}).items():
            model = f"{table['model']}, {table['gpu']}"
            rows.append(said | {"published (model, GPU)": model, "drafter": drafter, **suites})
    return pd.DataFrame(rows)


def _pooled(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of all suites together; of a single suite its own."""
    return table[table["suite"] == table["suite"].iloc[-1]]


def percent(row: pd.Series) -> str:
    """The gain over the tuned tree in percent, with its interval."""
    low, value, high = (
        round(100 * float(tables.surely(row.to_frame().T)[f"over_tuned{end}"].iloc[0] - 1), 1)
        + 0.0  # no -0.0
        for end in ("_low", "", "_high")
    )
    return f"**{value:.1f} %**" + ("" if pd.isna(low) else f" [{low:.1f}, {high:.1f}]")


def sentences(
    bounds: pd.DataFrame, controllers: pd.DataFrame, drafters: Sequence[str]
) -> list[str]:
    """What control is worth with both drafters, a line per machine. bounds, controllers: rows of
    `worth` of all suites.
    """
    told = []
    for machine, part in bounds.groupby("machine", sort=False):
        rows = part.set_index(["knows", "drafter"])
        all_, depth, size = (
            [percent(rows.loc[knows, drafter]) for drafter in drafters]
            for knows in ("everything perfect", "perfect depth", "perfect size")
        )
        told.append(
            f"- {machine}: control is worth at most {all_[0]} with EAGLE-3 and {all_[1]} with a one-pass drafter; perfect "
            f"depth {depth[0]} and {depth[1]}, perfect size {size[0]} and {size[1]}."
        )
        own = controllers[controllers["machine"] == machine]
        if own["drafter"].nunique() == len(drafters):
            best = [
                own[own["drafter"] == drafter].nlargest(1, "over_tuned").iloc[0]
                for drafter in drafters
            ]
            told[-1] += (
                f" Learned control: {percent(best[0])} ({best[0]['system']}) and {percent(best[1])} ({best[1]['system']})."
            )
    return told
