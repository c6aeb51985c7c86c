"""Rows of measurements under the names that a paper prints: long rows for its tables, and the data of its figures.

Long rows have the columns LONG: whose they are (pair), the paper's row and column, the metric, the value and its interval.
Knows nothing about where rows come from or how they are shown.
"""

from __future__ import annotations

import pandas as pd

from specdec.core.tree_config import PAPER_TREES
from specdec.report.tables import read_published

KEYS = ["pair", "row", "column", "metric"]
LONG = [*KEYS, "value", "value_low", "value_high"]
TUNED = "tuned static"  # what evaluation.compare calls it; importing that would take seconds
BARS = ["panel", "row", "column", "whose", "value", "published"]


def default_of(paper: str) -> str:
    """The name among compared methods of the tree that a paper calls EAGLE-3.

    >>> default_of("ltd")
    'default 60,8,10'
    """
    return f"default {PAPER_TREES[paper].text}"


TERMS = {", paper": "", "": ", equal terms", ", official": ", released settings", ", live": ", learned live"}


def on_terms(system: str, printed: str) -> dict[str, str]:
    """Names of a controller on each of the terms that it is trained on -> how a paper's row of it is called then.

    >>> on_terms("LTD", "LTD")["LTD"], on_terms("LTD", "LTD")["LTD, paper"]
    ('LTD, equal terms', 'LTD')
    """
    return {f"{system}{term}": f"{printed}{label}" for term, label in TERMS.items()}


def benchmark(suites: pd.Series) -> pd.Series:
    """The benchmark of each suite: gsm8k of laptop/gsm8k and of toy/gsm8k."""
    return suites.str.rpartition("/")[2]


def without_seeds(names: pd.Series) -> pd.Series:
    """Names of methods without the number of their seed."""
    return names.str.replace(r",? seed \d+$", "", regex=True)


def as_printed(
    table: pd.DataFrame,
    methods: dict[str, str],
    suites: dict[str, str],
    metrics: dict[str, str] | list[str],
    how: str = "",
    rows: str = "method",
    mean: str = "Mean",
) -> pd.DataFrame:
    """Long rows (`LONG`) of a table with pair, suite, `rows` and `metrics`, under the names that a paper prints.

    methods, suites: our name -> the paper's, in its order; what is not named is left out. A name that ends in * stands for
    all that begin so. A suite is known by its benchmark, a method without the number of its seed. metrics: our column ->
    the paper's name. how: added to the pair.
    Rows of several seeds are averaged, and then have no interval. A column called `mean` ("" for none) is the mean over the
    paper's columns, where all of them are there.
    """
    if table.empty:
        return pd.DataFrame(columns=LONG)
    metrics = metrics if isinstance(metrics, dict) else {name: name for name in metrics}
    pair = table["pair"] + f", {how}" * bool(how)
    names = without_seeds(table[rows])
    for begin, label in [(key[:-1], label) for key, label in methods.items() if key.endswith("*")]:
        methods = methods | {name: label + name[len(begin) :] for name in names.unique() if name.startswith(begin)}
    names = names.map(methods)
    shown = table.assign(pair=pair, column=benchmark(table["suite"]).map(suites), row=names)
    shown = shown.dropna(subset=["row", "column"])
    parts = []
    for name, label in metrics.items():
        ends = {f"{name}_{end}": f"value_{end}" for end in ("low", "high") if f"{name}_{end}" in shown}
        part = shown[[*KEYS[:3], name, *ends]].rename(columns={name: "value", **ends}).assign(metric=label)
        parts.append(part.reindex(columns=LONG))
    long = pd.concat(parts, ignore_index=True).astype({"value": float})
    groups = long.groupby(KEYS, sort=False)
    once = groups.size().eq(1).reindex(pd.MultiIndex.from_frame(long[KEYS])).to_numpy()
    long.loc[~once, ["value_low", "value_high"]] = float("nan")
    long = groups[["value", "value_low", "value_high"]].mean().reset_index()
    order = {name: place for place, name in enumerate(dict.fromkeys([*methods.values(), *suites.values()]))}
    if mean:
        long = pd.concat([long, means(long, list(dict.fromkeys(suites.values())), mean)], ignore_index=True)
    return long.sort_values(KEYS[1:3], key=lambda names: names.map(order), kind="stable", ignore_index=True)


def means(long: pd.DataFrame, columns: list[str], name: str = "Mean") -> pd.DataFrame:
    """Rows of the mean over `columns`, as the papers average, where every one of them is there."""
    keys = [key for key in KEYS if key != "column"]
    own = long[long["column"].isin(columns)].groupby(keys, sort=False)["value"].agg(["mean", "size"]).reset_index()
    own = own[own["size"] == len(columns)].rename(columns={"mean": "value"})
    return own.assign(column=name).reindex(columns=LONG)


def long_rows(table: pd.DataFrame, row: str, values: dict[str, str], metric: str = "") -> pd.DataFrame:
    """Long rows of a table with pair and the column `row`: one for each of `values` (our column -> the paper's column).

    metric: of all of them; default each column's own name.
    """
    if table.empty:
        return pd.DataFrame(columns=LONG)
    parts = [
        table[["pair"]].assign(row=table[row].astype(str), column=label, metric=metric or name, value=table[name])
        for name, label in values.items()
    ]
    return pd.concat(parts, ignore_index=True).reindex(columns=LONG)


def spread(table: pd.DataFrame, row: str, column: str, values: dict[str, str], names: dict[str, str]) -> pd.DataFrame:
    """Long rows of a table in which both `row` (under `names`) and `column` are columns; values: our column -> its metric."""
    if table.empty:
        return pd.DataFrame(columns=LONG)
    keys = {"row": table[row].map(names), "column": table[column].astype(str)}
    parts = [table[["pair"]].assign(**keys, metric=metric, value=table[name]) for name, metric in values.items()]
    return pd.concat(parts, ignore_index=True).dropna(subset=["row"]).reindex(columns=LONG)


def settings(table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    """Long rows of a table of settings (setting, value), those that are numbers; names: ours -> the paper's."""
    if table.empty:
        return pd.DataFrame(columns=LONG)
    rows = table.assign(row=table["setting"].replace(names), column="Value", metric="setting")
    return (
        rows.assign(value=pd.to_numeric(table["value"], errors="coerce")).dropna(subset=["value"]).reindex(columns=LONG)
    )


def named_lines(table: pd.DataFrame, drafters: dict[str, str], what: str, points: int = 0) -> pd.DataFrame:
    """Lines of a training: step, value of the column `what`, line (the drafter's name and its pair), what.

    points: means over so many blocks of steps; 0 takes every step.
    """
    if table.empty:
        return pd.DataFrame()
    kept = table[table["drafter"].isin(list(drafters)) & table[what].notna()]
    lines = kept.assign(line=kept["drafter"].map(drafters) + ", " + kept["pair"], value=kept[what], what=what)
    block = max(1, -(-int(lines["step"].max() + 1) // points)) if points and len(lines) else 1
    lines["step"] = lines["step"] // block * block
    return lines.groupby(["what", "line", "step"], sort=False)["value"].mean().reset_index()


def taus(prompts: pd.DataFrame, row: str, column: str, methods: dict[str, str]) -> pd.DataFrame:
    """Long rows of tokens per cycle, from rows of prompts: `row` under the names of `methods`, `column` as it is."""
    if prompts.empty:
        return pd.DataFrame(columns=LONG)
    kept = prompts.assign(row=prompts[row].map(methods), column=prompts[column].astype(str)).dropna(subset=["row"])
    sums = kept[kept["cycles"] > 0].groupby(KEYS[:3], sort=False)[["cycle_tok", "cycles"]].sum().reset_index()
    return sums.assign(metric="tau", value=sums["cycle_tok"] / sums["cycles"]).reindex(columns=LONG)


def of_windows(windows: pd.DataFrame, drafters: dict[str, str]) -> pd.DataFrame:
    """Long rows of PPOW's Table 8: accepted tokens and the target's own (tau), and the distance, of easy and hard windows."""
    if windows.empty:
        return pd.DataFrame(columns=LONG)
    kind = windows["hard"].map({True: "Hard windows", False: "Easy windows"})
    table = windows.assign(row=windows["drafter"].map(drafters), column=kind, tau=windows["accepted_tok"] + 1)
    table = table.rename(columns={"nabla": "divergence"})
    sums = table.dropna(subset=["row"]).groupby(KEYS[:3], sort=False)[["tau", "divergence"]].mean().reset_index()
    return sums.melt(KEYS[:3], ["tau", "divergence"], "metric", "value").reindex(columns=LONG)


def resps_settings(variants: dict[str, dict], presets=("paper", "official", "ours")) -> pd.DataFrame:
    """Long rows of Re-SpS's Table 4: what each preset says, variant by variant, as our configs hold it."""
    named = {"standard": "Standard PPO", "max_entropy": "Max-Entropy PPO"}
    fields = {
        "Learning Rate": "learning_rate",
        "PPO Steps": "n_steps",
        "Batch Size": "batch_size",
        "PPO Epochs": "n_epochs",
    }
    fields |= {
        "Clip Range": "clip_range",
        "Gamma": "gamma",
        "GAE Lambda": "gae_lambda",
        "Entropy Coefficient": "ent_coef",
    }
    fields |= {"Value Function Coefficient": "vf_coef"}
    rows = []
    for variant, column in named.items():
        for preset in presets:
            config = variants[variant][preset]
            values = {name: getattr(config.ppo, field) for name, field in fields.items()}
            values["Inference Temperature"] = config.temperature
            rows += [(f"preset {preset}", name, column, "setting", value) for name, value in values.items()]
    return pd.DataFrame(rows, columns=[*KEYS, "value"]).reindex(columns=LONG).astype({"value": float})


def described(printed: pd.DataFrame, classes: dict[str, type]) -> pd.DataFrame:
    """LTD's Table 3 with what our classes of the same methods decide and whether they learn; rows are methods."""
    table = printed.pivot(index="row", columns="column", values="text")[list(dict.fromkeys(printed["column"]))]
    decides = {"extend": "depth", "size": "size", "plan": "the next tree"}
    made = {name: made_of() for name, made_of in classes.items()}
    kinds = {
        name: sorted(policy.asks) if getattr(policy, "asks", None) else [policy.kind] for name, policy in made.items()
    }
    table["Controls (ours)"] = pd.Series(
        {name: ", ".join(decides[kind] for kind in own) for name, own in kinds.items()}
    )
    learned = {name: "a network" if hasattr(policy, "network") else "a rule" for name, policy in made.items()}
    table["Predictor (ours)"] = pd.Series(learned)
    return (
        table.loc[list(dict.fromkeys(printed["row"]))]
        .fillna("two networks")
        .rename_axis("method", axis=0)
        .rename_axis(None, axis=1)
    )


# --- data of figures --------------------------------------------------------------------------------------------------


def whose(table: pd.DataFrame) -> pd.DataFrame:
    """Long or published rows with columns `whose`, the pair or the paper's target, and `published`."""
    if table is None or table.empty:
        return pd.DataFrame(columns=BARS)
    published = "target" in table
    names = table["target"] + " (published)" if published else table["pair"]
    return table.assign(whose=names, published=published)


def mean_bars(measured: dict[str, pd.DataFrame], paper: str, metric: str = "speedup") -> pd.DataFrame:
    """Bars of the means of several tables: name of a published table -> our long rows of the same; one panel each."""
    parts = []
    for name, rows in measured.items():
        for side in (rows, read_published(paper, name)):
            part = whose(side)
            part = part[(part["column"] == "Mean") & (part["metric"] == metric)] if len(part) else part
            parts.append(part.assign(panel=f"Table {name.removeprefix('table')}"))
    return pd.concat([part[BARS] for part in parts if len(part)], ignore_index=True)


def cost_bars(pairs: pd.DataFrame, split: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """LTD's Figure 2: ms of drafting and verifying by (depth, nodes), and both as shares of the default tree's cycle.

    pairs: pair, machine, depth, nodes, draft_ms, verify_ms. split: pair, method, draft_ms, verify_ms, total_ms of the
    default tree, whose name begins with "default", and of LTD.
    """
    parts, left, right = [], "ms by (depth, nodes)", "% of the default's cycle"
    for part in ("draft", "verify"):
        theirs = printed[printed["metric"] == f"{part}_ms"]
        parts.append(theirs.assign(panel=f"{theirs['target'].iloc[0]} (published): {left}", x=theirs["row"], part=part))
        theirs = printed[printed["metric"] == f"{part}_pct"]
        name = theirs["target"].str.extract(r"^(\w+-?[\w.]*)", expand=False) + " " + theirs["row"]
        parts.append(theirs.assign(panel=f"published: {right}", x=name, part=part))
        if len(pairs):
            x = "(" + pairs["depth"].astype(str) + ", " + pairs["nodes"].astype(str) + ")"
            panel = pairs["pair"] + ", " + pairs["machine"] + f": {left}"
            parts.append(pd.DataFrame({"panel": panel, "x": x, "part": part, "value": pairs[f"{part}_ms"]}))
        for pair, rows in split.groupby("pair", sort=False) if len(split) else ():
            default = rows[rows["method"].str.startswith("default")].iloc[:1]
            shown = pd.concat([default.assign(method="default"), rows[rows["method"].str.startswith("LTD")]])
            value = 100 * shown[f"{part}_ms"] / default["total_ms"].iloc[0]
            parts.append(
                pd.DataFrame({"panel": f"{pair}: {right}", "x": shown["method"], "part": part, "value": value})
            )
    table = pd.concat(parts, ignore_index=True)
    table["published"] = table["panel"].str.contains("published")
    return table.sort_values("published", kind="stable", ignore_index=True)[
        ["panel", "x", "part", "value", "published"]
    ]


def shares_by_accepted(counts: pd.DataFrame, methods: dict[str, str]) -> pd.DataFrame:
    """Shares of cycles by method, accepted tokens in three classes, expansions and verify_nodes; shares of a class add up to 1.

    counts: method, expansions, verify_nodes, accepted_tok, cycles. methods: our name -> the paper's.
    """
    if counts.empty:
        return pd.DataFrame()
    names = without_seeds(counts["method"]).map(methods)
    classes = pd.cut(
        counts["accepted_tok"], [-1, 1, 4, float("inf")], labels=["0 or 1 accepted", "2 to 4", "5 and more"]
    )
    kept = counts.assign(method=names, accepted=classes.astype(str)).dropna(subset=["method"])
    keys = ["method", "accepted"]
    cells = kept.groupby([*keys, "expansions", "verify_nodes"])["cycles"].sum().reset_index()
    cells["share"] = cells["cycles"] / cells.groupby(keys)["cycles"].transform("sum")
    places = {name: place for place, name in enumerate([*methods.values(), *classes.cat.categories])}
    return cells.sort_values(keys, key=lambda some: some.map(places), kind="stable", ignore_index=True)


def of_subjects(table: pd.DataFrame, methods: list[str]) -> pd.DataFrame:
    """LTD's Figure 7: subject, method, gain (speed over the default tree) and that tree's speed over plain decoding.

    table: subject, method, speedup, over_default of one pair's run, the default tree's rows among them. methods: to show.
    """
    if table.empty:
        return table
    alone = table[table["subject"] != "all"]
    default = alone[alone["method"].str.startswith("default")].set_index("subject")["speedup"]
    own = alone[alone["method"].isin(methods)].sort_values("method", key=lambda names: names.map(methods.index))
    return own.assign(gain=own["over_default"], speedup=own["subject"].map(default))[
        ["subject", "method", "gain", "speedup"]
    ]


def length_and_calls(counts: pd.DataFrame, methods: dict[str, str], printed: pd.DataFrame) -> pd.DataFrame:
    """RADAR's Figure 2: % of cycles by accepted tokens, and by draft calls of RADAR alone.

    counts: pair, method, accepted_tok, draft_calls, cycles.
    """
    panels = {
        "accepted": ("accepted_tok", "(a) accepted draft tokens"),
        "calls": ("draft_calls", "(b) draft calls of RADAR"),
    }
    parts = []
    for metric, (column, panel) in panels.items():
        ours = counts.assign(row=counts["method"].map(methods)).dropna(subset=["row"]) if len(counts) else counts
        ours = ours[ours["row"].str.startswith("RADAR")] if metric == "calls" and len(ours) else ours
        if len(ours):
            shares = ours.groupby(["pair", "row", column], sort=False)["cycles"].sum()
            shares = (
                (100 * shares / shares.groupby(level=["pair", "row"]).transform("sum")).rename("value").reset_index()
            )
            parts.append(whose(shares.rename(columns={column: "column"}).sort_values("column")).assign(panel=panel))
        parts.append(whose(printed[printed["metric"] == f"{metric}_pct"]).assign(panel=panel))
    table = pd.concat(parts, ignore_index=True)
    table["column"] = table["column"].astype(int)
    table["whose"] = table["row"] + ", " + table["whose"]
    return table.sort_values(["panel", "column"], kind="stable", ignore_index=True)[BARS]
