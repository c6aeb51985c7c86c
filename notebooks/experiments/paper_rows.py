"""Rows of measurements under the names that a paper prints: long rows for its tables, and the data
of its figures.

Long rows have the columns LONG: whose they are (pair), the paper's row and column, the metric, the
value, its interval and the prompts that it rests on. A row has the paper's name only where it is
made with the paper's settings. Knows nothing about where rows come from or how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec.core.tree_config import PAPER_TREES
from specdec.evaluation import stats
from specdec.identity import DEFAULT, EQUAL, GRID, LIVE, OFFICIAL, PAPER, STATIC, TERMS, TUNED

from workbook.items import read_published
from workbook.pictures import over_seeds

KEYS = ["pair", "row", "column", "metric"]
COUNTED = ["prompts", "turns"]  # what a value rests on; of a table without prompts its turns
LONG = [*KEYS, "value", "value_low", "value_high", *COUNTED]
BARS = ["panel", "row", "column", "whose", "value", "published"]


@dataclass(frozen=True)
class Row:
    """A row of a paper's table: how it is called there, and which of our methods it holds.

    where: fields of a method (`identity.FIELDS`), or another column of our rows, and their values;
    the label may name fields in braces.
    """

    label: str
    where: dict[str, str]


def named(names: dict[str, str], column: str = "system") -> list[Row]:
    """Rows of systems, rules and drafters by name: ours -> the paper's. column: where our names
    stand.
    """
    untrained = {"terms": "", "preset": ""} if column == "system" else {}
    return [Row(label, {column: name} | untrained) for name, label in names.items()]


def default_row(paper: str, label: str) -> Row:
    """The row of the tree that a paper calls EAGLE-3.

    >>> default_row("ltd", "Eagle3").where["preset"]
    '60,8,10'
    """
    return Row(label, {"system": STATIC, "terms": DEFAULT, "preset": PAPER_TREES[paper].text})


TUNED_ROW = Row("tuned static (ours)", {"system": STATIC, "terms": TUNED})  # in every table


def grid_rows(
    system: str, label: str = "best static tree of the paper's own grid (ours)"
) -> list[Row]:
    """The rows of the fastest static tree of a paper's own grid, and of as much of that grid as was
    recorded.
    """
    said = ("", ", as far as recorded")
    return [
        Row(label + cut, {"system": STATIC, "terms": GRID, "preset": system + cut}) for cut in said
    ]


def on_terms(system: str, printed: str) -> list[Row]:
    """The rows of a controller: as the paper trains it, under the paper's name; on each of the
    other terms, said beside it.
    """
    labels = {PAPER: printed} | {
        term: f"{printed}, {TERMS[term]}" for term in (EQUAL, OFFICIAL, LIVE)
    }
    return [Row(label, {"system": system, "terms": term}) for term, label in labels.items()]


def by_recipe(names: dict[str, str], column: str = "system") -> list[Row]:
    """Rows of trainings: with the paper's settings under the paper's names, with ours under names
    that say so.

    names: ours, as named in `column`, -> the paper's.
    """
    said = {"paper": "", "official": ", the released settings", "ours": ", our settings"}
    return [
        Row(label + how, {column: name, "recipe": recipe})
        for recipe, how in said.items()
        for name, label in names.items()
    ]


def with_deviations(long: pd.DataFrame) -> pd.DataFrame:
    """Long or published rows in which the rows of a metric "x_sd" have become the column value_sd
    of those of "x".
    """
    long = long.reset_index(drop=True)
    told = long["metric"].astype(str).str.endswith("_sd")
    if not told.any():
        return long
    keys = [key for key in ("target", "temperature", *KEYS) if key in long]
    spread = long[told].assign(metric=long["metric"].str.removesuffix("_sd"))[[*keys, "value"]]
    return long[~told].merge(spread.rename(columns={"value": "value_sd"}), on=keys, how="left")


def labelled(table: pd.DataFrame, rows: Sequence[Row]) -> pd.DataFrame:
    """Those rows of `table` that one of `rows` names, with its label as `row` and its place in
    `rows`.

    Methods at prices that are not their own (`identity.CARRIED`) belong to no row of a paper.
    """
    table = table.assign(at=range(len(table)))
    parts, at_home = [], table.get("adapted", pd.Series("", table.index)) == ""
    for place, row in enumerate(rows):
        part = table[at_home & (table[list(row.where)] == pd.Series(row.where)).all(axis=1)]
        labels = (
            [row.label.format(**fields) for fields in part.to_dict("records")]
            if "{" in row.label
            else row.label
        )
        parts.append(part.assign(row=labels, place=place))
    return pd.concat(parts).sort_values("at", kind="stable").drop(columns="at")


def benchmark(suites: pd.Series) -> pd.Series:
    """The benchmark of each suite: gsm8k of laptop/gsm8k and of toy/gsm8k."""
    return suites.str.rpartition("/")[2]


def as_printed(
    table: pd.DataFrame,
    rows: Sequence[Row] | dict[str, str],
    suites: dict[str, str],
    metrics: dict[str, str] | list[str],
    how: str = "",
    mean: str = "Mean",
) -> pd.DataFrame:
    """Long rows (`LONG`) of a table, under the names that a paper prints.

    table: with pair, suite, `metrics` and what `rows` look at.

    rows: in the paper's order, or a dict of printed names of our methods. suites: our name -> the
    paper's, in its order; what is not named is left out, and a suite is known by its benchmark.
    metrics: our column -> the paper's name. how: added to the pair, with a run's clock for
    "{clock}". Rows of several seeds are averaged, and then have no interval. A column called `mean`
    ("" for none) is the mean over the paper's columns, where all of them are there.
    """
    if table.empty:
        return pd.DataFrame(columns=LONG)
    metrics = metrics if isinstance(metrics, dict) else {name: name for name in metrics}
    rows = named(rows, "method") if isinstance(rows, dict) else rows
    clocks = table.get("clock", pd.Series("", table.index))
    pair = table["pair"] + [f", {how.format(clock=clock)}" * bool(how) for clock in clocks]
    column = benchmark(table["suite"]).map(suites)
    shown = labelled(table.assign(pair=pair, column=column), rows).dropna(subset=["column"])
    parts = []
    for name, label in metrics.items():
        ends = {
            f"{name}_{end}": f"value_{end}" for end in ("low", "high") if f"{name}_{end}" in shown
        }
        counted = [column for column in COUNTED if column in shown]
        part = shown[[*KEYS[:3], name, *ends, *counted]].rename(columns={name: "value", **ends})
        parts.append(part.assign(metric=label).reindex(columns=LONG))
    long = pd.concat(parts, ignore_index=True).astype({"value": float})
    groups = long.groupby(KEYS, sort=False)
    once = groups.size().eq(1).reindex(pd.MultiIndex.from_frame(long[KEYS])).to_numpy()
    long.loc[~once, ["value_low", "value_high"]] = float("nan")
    long = groups[LONG[len(KEYS) :]].mean().reset_index()
    labels = shown.sort_values("place", kind="stable")["row"]
    order = {name: place for place, name in enumerate(dict.fromkeys([*labels, *suites.values()]))}
    if mean and len(set(suites.values())) > 1:
        long = pd.concat(
            [long, means(long, list(dict.fromkeys(suites.values())), mean)], ignore_index=True
        )
    return long.sort_values(
        KEYS[1:3], key=lambda names: names.map(order), kind="stable", ignore_index=True
    )


def means(long: pd.DataFrame, columns: list[str], name: str = "Mean") -> pd.DataFrame:
    """Rows of the mean over `columns`, as the papers average, where every one of them is there."""
    keys = [key for key in KEYS if key != "column"]
    own = (
        long[long["column"].isin(columns)]
        .groupby(keys, sort=False)["value"]
        .agg(["mean", "size"])
        .reset_index()
    )
    own = own[own["size"] == len(columns)].rename(columns={"mean": "value"})
    return own.assign(column=name).reindex(columns=LONG)


def long_rows(
    table: pd.DataFrame, row: str, values: dict[str, str], metric: str = ""
) -> pd.DataFrame:
    """Long rows of a table with pair and the column `row`: one for each of `values` (our column ->
    the paper's column).

    metric: of all of them; default each column's own name.
    """
    if table.empty:
        return pd.DataFrame(columns=LONG)
    parts = [
        table[["pair"]].assign(
            row=table[row].astype(str), column=label, metric=metric or name, value=table[name]
        )
        for name, label in values.items()
    ]
    return pd.concat(parts, ignore_index=True).reindex(columns=LONG)


def spread(
    table: pd.DataFrame, row: str, column: str, values: dict[str, str], names: dict[str, str]
) -> pd.DataFrame:
    """Long rows of a table in which both `row` (under `names`) and `column` are columns; values:
    our column -> its metric.
    """
    if table.empty:
        return pd.DataFrame(columns=LONG)
    table = table.sort_values(column, kind="stable")
    keys = {"row": table[row].map(names), "column": table[column].astype(str)}
    parts = [
        table[["pair"]].assign(**keys, metric=metric, value=table[name])
        for name, metric in values.items()
    ]
    return pd.concat(parts, ignore_index=True).dropna(subset=["row"]).reindex(columns=LONG)


def settings(table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    """Long rows of a table of settings (setting, value), those that are numbers; names: ours -> the
    paper's.
    """
    if table.empty:
        return pd.DataFrame(columns=LONG)
    named = table["setting"].replace(names).str.replace("_", " ")
    rows = table.assign(row=named, column="Value", metric="setting")
    rows["value"] = pd.to_numeric(table["value"], errors="coerce")
    return rows.dropna(subset=["value"]).reindex(columns=LONG)


def named_lines(
    table: pd.DataFrame, drafters: dict[str, str], what: str, points: int = 0
) -> pd.DataFrame:
    """Lines of trainings: panel (the pair), name (the drafter's), step, and of the column `what`
    over seeds the mean (value), the least (low) and the largest (high).

    points: means over so many blocks of steps; 0 takes every step.
    """
    if table.empty:
        return pd.DataFrame()
    kept = table[table["drafter"].isin(list(drafters)) & table[what].notna()]
    block = max(1, -(-int(kept["step"].max() + 1) // points)) if points and len(kept) else 1
    keys = [
        kept["pair"].rename("panel"),
        kept["drafter"].map(drafters).rename("name"),
        kept["step"] // block * block,
    ]
    of_seeds = kept.groupby([*keys, kept.get("seed", keys[0]).rename("of")], sort=False)[
        what
    ].mean()
    return over_seeds(of_seeds.rename("value").reset_index())


def of_rounds(curves: pd.DataFrame, recipe: str) -> tuple[pd.DataFrame, int]:
    """LTD's Figure 3: lines of its rounds of one recipe, panel by what was measured; and how many
    seeds each line rests on.

    curves: run ("iter0 size 0": round, policy, seed), steps, what (reward or score), value, recipe.
    """
    if curves.empty:
        return curves, 0
    own = curves[curves["recipe"] == recipe]
    parts = own["run"].str.split(" ", expand=True)
    reward = (
        "reward (tokens per 10 ms)" if recipe == "paper" else "reward (tokens less priced time)"
    )
    units = {
        "reward": (reward, 1.0),
        "score": ("speed on tuning prompts (tokens/s)", 1e3),
    }  # scores are tokens per ms
    named = own.assign(panel=own["what"].map(lambda what: units[what][0]), step=own["steps"])
    named["name"] = parts[0].str.capitalize() + ", " + parts[1]
    named["value"] *= own["what"].map(lambda what: units[what][1])
    return over_seeds(named), parts[2].nunique()


def of_intervals(sweep: pd.DataFrame, turns: pd.DataFrame) -> pd.DataFrame:
    """Re-SpS's Figure 3: pair, interval, and by how many % speed differs from that of the shortest
    interval (gain).

    sweep: pair, interval, tok_per_s. turns: the test turns behind it, for paired intervals
    (gain_low, gain_high) and prompts.
    """
    if sweep.empty:
        return sweep
    rows, parts = sweep.sort_values("interval", kind="stable"), []
    rows["gain"] = 100 * (
        rows["tok_per_s"] / rows.groupby("pair")["tok_per_s"].transform("first") - 1
    )
    for pair, own in turns.groupby("pair", sort=False) if len(turns) else ():
        shortest = {"over": str(own["interval"].min())}
        table = stats.summarise(own, shortest, rate=stats.SPEED, pool=True).query("suite == 'all'")
        ends = {f"gain_{end}": 100 * (table[f"over_{end}"] - 1) for end in ("low", "high")}
        parts.append(table.assign(pair=pair, interval=table["method"].astype(int), **ends))
    named = ["pair", "interval", "prompts", "gain_low", "gain_high"]
    return rows.merge(pd.concat(parts)[named], how="left") if parts else rows


def taus(prompts: pd.DataFrame, row: str, column: str, methods: dict[str, str]) -> pd.DataFrame:
    """Long rows of tokens per cycle, from rows of prompts: `row` under the names of `methods`,
    `column` as it is.
    """
    if prompts.empty:
        return pd.DataFrame(columns=LONG)
    kept = prompts.assign(row=prompts[row].map(methods), column=prompts[column].astype(str)).dropna(
        subset=["row"]
    )
    sums = (
        kept[kept["cycles"] > 0]
        .groupby(KEYS[:3], sort=False)[["cycle_tok", "cycles"]]
        .sum()
        .reset_index()
    )
    return sums.assign(metric="tau", value=sums["cycle_tok"] / sums["cycles"]).reindex(columns=LONG)


def of_chains(
    chained: pd.DataFrame, rows: Sequence[Row], suites: dict[str, str], tau: str
) -> pd.DataFrame:
    """Long rows of chains (`drafters.compare_tau` over the start): tokens per cycle, and their
    ratio to the start's.

    tau: what the paper's table calls tokens per cycle. Of trainings in several runs the first
    counts. A column "All" pools the suites.
    """
    if chained.empty:
        return chained
    first = chained.drop_duplicates(["pair", "suite", "drafter"])
    first = first.rename(columns={"low": "over_baseline_low", "high": "over_baseline_high"})
    metrics = {"tau": tau, "over_baseline": "tau over its start's"}
    own = as_printed(first, rows, suites, metrics, how="one chain")
    return pd.concat([own, as_printed(first, rows, {"all": "All"}, metrics, how="one chain")])


def of_windows(windows: pd.DataFrame, drafters: dict[str, str]) -> pd.DataFrame:
    """Long rows of PPOW's Table 8: accepted tokens and the target's own (tau), and the distance, of
    easy and hard windows.
    """
    if windows.empty:
        return pd.DataFrame(columns=LONG)
    kind = windows["hard"].map({True: "Hard windows", False: "Easy windows"})
    table = windows.assign(
        row=windows["drafter"].map(drafters), column=kind, tau=windows["accepted_tok"] + 1
    )
    table = table.rename(columns={"nabla": "divergence"})
    sums = (
        table.dropna(subset=["row"])
        .groupby(KEYS[:3], sort=False)[["tau", "divergence"]]
        .mean()
        .reset_index()
    )
    return sums.melt(KEYS[:3], ["tau", "divergence"], "metric", "value").reindex(columns=LONG)


PPO_FIELDS = {  # of a PPOConfig, as Re-SpS's Table 4 calls them
    "learning_rate": "Learning Rate",
    "n_steps": "PPO Steps",
    "batch_size": "Batch Size",
    "n_epochs": "PPO Epochs",
    "clip_range": "Clip Range",
    "gamma": "Gamma",
    "gae_lambda": "GAE Lambda",
    "ent_coef": "Entropy Coefficient",
    "vf_coef": "Value Function Coefficient",
}


def resps_settings(
    variants: dict[str, dict], presets=("paper", "official", "ours")
) -> pd.DataFrame:
    """Long rows of Re-SpS's Table 4: what each preset says, variant by variant, as our configs hold
    it.
    """
    rows = []
    for variant, column in {"standard": "Standard PPO", "max_entropy": "Max-Entropy PPO"}.items():
        for preset in presets:
            config = variants[variant][preset]
            values = {name: getattr(config.ppo, field) for field, name in PPO_FIELDS.items()}
            values["Inference Temperature"] = config.temperature
            rows += [
                (f"preset {preset}", name, column, "setting", value)
                for name, value in values.items()
            ]
    return (
        pd.DataFrame(rows, columns=[*KEYS, "value"]).reindex(columns=LONG).astype({"value": float})
    )


def described(printed: pd.DataFrame, classes: dict[str, type]) -> pd.DataFrame:
    """LTD's Table 3 with what our classes of the same methods decide and whether they learn; rows
    are methods.
    """
    table = printed.pivot(index="row", columns="column", values="text")[
        list(dict.fromkeys(printed["column"]))
    ]
    decides = {"extend": "depth", "size": "size", "plan": "the next tree"}
    for name, made_of in classes.items():
        policy = made_of()
        kinds = sorted(getattr(policy, "asks", ())) or [policy.kind]
        table.loc[name, "Controls (ours)"] = ", ".join(decides[kind] for kind in kinds)
        table.loc[name, "Predictor (ours)"] = (
            "a network" if hasattr(policy, "network") else "a rule"
        )
    table = table.loc[list(dict.fromkeys(printed["row"]))].fillna("two networks")
    return table.rename_axis(index="method", columns=None)


def whose(table: pd.DataFrame) -> pd.DataFrame:
    """Long or published rows with columns `whose`, the pair or the paper's target, and
    `published`.
    """
    published = "target" in table
    return table.assign(
        whose=table["target"] + " (published)" if published else table["pair"], published=published
    )


def signed_ranks(turns: pd.DataFrame, rows: Sequence[Row], against: Row) -> pd.DataFrame:
    """Long rows of the column "p-value": of "it is not faster than `against`", by Wilcoxon's
    signed-rank test over prompts.

    turns: of replay, with pair, run and the fields of a method; rates are means over seeds.
    """
    from scipy.stats import wilcoxon

    found = []
    for (pair, _), own in turns.groupby(["pair", "run_key"], sort=False) if len(turns) else ():
        shown = labelled(own, [against, *rows])
        if against.label not in set(shown["row"]):
            continue
        quantities = stats.per_prompt(shown.assign(method=shown["row"]), stats.SPEED)
        rates = (quantities["new_tok"] / quantities["time_ms"]).T.groupby(level="method").mean().T
        for row in dict.fromkeys(shown["row"]):
            if row != against.label:
                p_value = float(
                    wilcoxon(rates[row], rates[against.label], alternative="greater").pvalue
                )
                found.append((f"{pair}, replayed", row, "p-value", "p_below", p_value, len(rates)))
    return pd.DataFrame(found, columns=[*KEYS, "value", "prompts"]).reindex(columns=LONG)


def constants(facts: pd.DataFrame, rows: Sequence[Row]) -> list[str]:
    """A sentence for each of `rows` in cycle_facts (with pair) that gives one answer nearly always:
    it became a static tree.
    """
    if facts.empty:
        return []
    alike = labelled(facts[facts["collapsed"].astype(bool) & (facts["system"] != STATIC)], rows)
    return [
        f"{row.row} of {row.pair} became a constant: {row.commonest} (nodes and root, depth, width) in "
        f"{row.commonest_frac:.0%} of its cycles."
        for row in alike.drop_duplicates(["pair", "row"]).itertuples()
    ]


def best_and_last(curves: pd.DataFrame, drafters: dict[str, str]) -> list[str]:
    """A sentence per pair and drafter: tokens per cycle on held-out text at its start, at its best
    and when last measured.
    """
    lines = named_lines(curves, drafters, "held_out_tau_chain")
    told = []
    for (name, pair), own in lines.groupby(["name", "panel"], sort=False) if len(lines) else ():
        values = own.set_index("step")["value"]
        shown = f"{values.iloc[0]:.3f}, {values.max():.3f} (step {values.idxmax()}), {values.iloc[-1]:.3f}"
        told.append(
            f"{name}, {pair}: held-out chains at the start, at best and last (step {values.index[-1]}): {shown}."
        )
    return told


def unmoved(long: pd.DataFrame, start: str) -> list[str]:
    """A sentence for each row with the very tokens per cycle of `start`, from which its training
    began.
    """
    taus = long[long["metric"].str.startswith("tau")]
    values, told = taus.pivot_table("value", ["pair", "row"], ["column", "metric"]), []
    for (pair, row), own in values.iterrows():
        begun = (
            values.loc[(pair, start)].reindex(own.dropna().index)
            if (pair, start) in values.index
            else []
        )
        if row != start and len(begun) and np.allclose(own.dropna(), begun, rtol=1e-9):
            told.append(
                f"{row} ({pair}) has the numbers of its start: it is no better than its start."
            )
    return told


def gain_bars(
    measured: dict[str, pd.DataFrame], paper: str, over: dict[str, str], shared: str
) -> pd.DataFrame:
    """Bars of mean speedups of several tables, in % of change against a row of each: one panel per
    table.

    measured: name of a published table -> our long rows of the same. over: name -> the row. shared:
    a row that was measured once for all settings.
    """
    parts = []
    for name, long in measured.items():
        wide, models = [], []
        for side in filter(len, (long, read_published(paper, name))):
            speeds = whose(side[side["metric"] == "speedup"])
            own, published = speeds[speeds["column"] == "Mean"], "target" in side
            settings = own["row"].str.extract(r", ([^,]* settings)$", expand=False)
            how = (
                "published"
                if published
                else "measured here, " + settings.fillna("the paper's settings")
            )
            own = own.assign(
                how=how, row=own["row"].str.replace(r", [^,]* settings$", "", regex=True)
            )
            count = (
                ""
                if published
                else f" (n = {speeds.groupby('row')['turns'].sum().max():.0f} turns)"
            )
            models += [
                f"{model}{count}"
                for model in side["target" if published else "pair"].head(min(1, len(own)))
            ]
            wide.append(own.pivot_table("value", "how", "row", sort=False))
            if shared in wide[-1]:
                wide[-1][shared] = wide[-1][shared].fillna(wide[-1][shared].max())
        table = pd.concat(wide)
        gains = 100 * (table.div(table[over[name]], axis=0) - 1).drop(columns=over[name])
        bars = gains.stack().dropna().rename("gain").rename_axis(["whose", "row"]).reset_index()
        panel = f"Table {name.removeprefix('table')}, over {over[name]}: {'; '.join(models)}"
        parts.append(bars.assign(panel=panel, published=bars["whose"] == "published"))
    return pd.concat(parts, ignore_index=True)


def cost_bars(pairs: pd.DataFrame, split: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """LTD's Figure 2: published, whose, x, part, kind, value: ms of drafting and of verifying by
    (depth, nodes), and both as % of the default tree's cycle.

    pairs: pair, depth, nodes, draft_ms, verify_ms, of which the first pair's are shown. split:
    pair, method and its fields, draft_ms, verify_ms, total_ms of the default tree and of LTD.
    """
    parts, columns = [], ["published", "whose", "x", "part", "kind", "value"]
    for part in ("draft", "verify"):
        if len(pairs):
            first = pairs[pairs["pair"] == pairs["pair"].iloc[0]]
            x = [
                f"({depth}, {nodes})"
                for depth, nodes in zip(first["depth"], first["nodes"], strict=True)
            ]
            own = first.assign(published=False, whose=first["pair"], kind="ms")
            parts.append(own.assign(x=x, part=part, value=first[f"{part}_ms"]))
        for pair, rows in split.groupby("pair", sort=False) if len(split) else ():
            default = labelled(rows, [default_row("radar", "default")])
            shown = pd.concat(
                [default, rows[rows["system"] == "LTD"].assign(row=lambda some: some["method"])]
            )
            value = 100 * shown[f"{part}_ms"] / default["total_ms"].iloc[0]
            own = shown.assign(published=False, whose=pair, kind="pct", x=shown["row"])
            parts.append(own.assign(part=part, value=value))
        for kind in ("ms", "pct"):
            theirs = printed[printed["metric"] == f"{part}_{kind}"]
            own = theirs.assign(published=True, whose=theirs["target"], kind=kind, x=theirs["row"])
            parts.append(own.assign(part=part))
    table = pd.concat([part[columns] for part in parts], ignore_index=True)
    return table.sort_values(["published", "kind"], kind="stable", ignore_index=True)


def shares_by_accepted(counts: pd.DataFrame, rows: Sequence[Row]) -> pd.DataFrame:
    """Shares of cycles by method, accepted tokens in three classes, expansions and verify_nodes;
    shares of a class add up to 1.

    counts: method and its fields, expansions, verify_nodes, accepted_tok, cycles.
    """
    if counts.empty:
        return pd.DataFrame()
    limits, names = [-1, 1, 4, float("inf")], ["0 or 1 accepted", "2 to 4", "5 and more"]
    kept = labelled(counts, rows)
    kept = kept.assign(
        method=kept["row"], accepted=pd.cut(kept["accepted_tok"], limits, labels=names).astype(str)
    )
    keys = ["method", "accepted"]
    cells = kept.groupby([*keys, "expansions", "verify_nodes"])["cycles"].sum().reset_index()
    cells["share"] = cells["cycles"] / cells.groupby(keys)["cycles"].transform("sum")
    places = {name: place for place, name in enumerate([*(row.label for row in rows), *names])}
    return cells.sort_values(
        keys, key=lambda some: some.map(places), kind="stable", ignore_index=True
    )


def of_subjects(table: pd.DataFrame, rows: Sequence[Row]) -> pd.DataFrame:
    """LTD's Figure 7: subject, method, and its speed over the tuned tree and over the default tree.

    table: subject, method and its fields, over_tuned, over_default of one pair's run.
    """
    if table.empty:
        return table
    own = labelled(table[table["subject"] != "all"], rows).sort_values("place", kind="stable")
    return own.assign(method=own["row"])[["subject", "method", "over_tuned", "over_default"]]


def length_and_calls(
    counts: pd.DataFrame, rows: Sequence[Row], printed: pd.DataFrame
) -> pd.DataFrame:
    """RADAR's Figure 2: % of cycles by accepted tokens, and by draft calls of RADAR alone.

    counts: pair, method and its fields, accepted_tok, draft_calls, cycles.
    """
    parts, keys, ours = [], ["pair", "row"], labelled(counts, rows) if len(counts) else counts
    accepted = "accepted", "accepted_tok", "accepted draft tokens of a cycle"
    for metric, column, panel in (
        accepted,
        ("calls", "draft_calls", "draft calls of RADAR in a cycle"),
    ):
        ours = ours[ours["system"] == "RADAR"] if metric == "calls" and len(ours) else ours
        if len(ours):
            shares = ours.groupby([*keys, column], sort=False)["cycles"].sum()
            shares = (
                (100 * shares / shares.groupby(level=keys).transform("sum"))
                .rename("value")
                .reset_index()
            )
            parts.append(
                whose(shares.rename(columns={column: "column"}).sort_values("column")).assign(
                    panel=panel
                )
            )
        parts.append(whose(printed[printed["metric"] == f"{metric}_pct"]).assign(panel=panel))
    table = pd.concat(parts, ignore_index=True)
    table["column"] = table["column"].astype(int)
    table["whose"] = table["row"] + ", " + table["whose"]
    return table.sort_values(["panel", "column"], kind="stable", ignore_index=True)[BARS]
