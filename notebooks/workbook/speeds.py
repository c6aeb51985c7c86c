"""README's first picture: ways of decoding beside plain decoding, and beside the static tree that
was tuned for the machine.

All rows are greedy and came with the checkout. Knows nothing about how they were measured.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from specdec.evaluation import stats
from specdec.identity import DEFAULT, EQUAL, STATIC, TUNED
from specdec.report import figures
from specdec.report.tables import surely

from workbook import findings, items
from workbook.pictures import dots, under_heads

LIVE, REPLAYED = "live", "replayed"
SHOWN = {  # head -> name -> system, terms and preset of a method
    "one tree for all": {
        "EAGLE-3's default, 60 tokens": (STATIC, DEFAULT, "60,7,10"),
        "tuned here": (STATIC, TUNED),
    },
    "learned, equal terms": {name: (name, EQUAL) for name in findings.SYSTEMS},
    "ours": {"value forecasts": ("ours", EQUAL)},
    "bound": {"clairvoyant": ("clairvoyant", "")},
}
# In the comparison of drafters: the hybrid, plain decoding, and the hybrid's tree without copies.
HYBRID, PLAIN, ALONE = "hybrid, gated", "autoregressive", "eagle3"
OVER = {
    "speedup": "times as fast as plain decoding",
    "over_tuned": "times as fast as the tuned tree",
}
LEAST = {"speedup": 0.0, "over_tuned": 0.8}  # on these axes; an arrow marks what is slower


def rows(found: findings.Findings, drafters=None) -> pd.DataFrame:
    """One row per method: head, method, and for each of OVER its value, <name>_low, <name>_high,
    <name>_prompts, <name>_how.

    drafters: a run that compared drafters, with the hybrid's prompts.
    """
    shown = []
    for head, methods in SHOWN.items():
        for name, method in methods.items():
            replayed, live = found.rows("replayed", *method), found.rows("live", *method)
            ends = {f"speedup_{end}": replayed[f"speedup_prompts_{end}"] for end in ("low", "high")}
            replayed = replayed.assign(**ends)
            sides = {
                "speedup": (live, LIVE) if len(live) else (replayed, REPLAYED),
                "over_tuned": (replayed, REPLAYED),
            }
            shown.append({"head": head, "method": name} | _cells(sides))
        if head == "ours" and drafters is not None:
            prompts = drafters.read_table("prompts")
            prompts = prompts[prompts["method"].isin([HYBRID, PLAIN, ALONE])]
            sides = {
                name: (_over(prompts, base), LIVE)
                for name, base in zip(OVER, (PLAIN, ALONE), strict=True)
            }
            shown.append({"head": head, "method": "hybrid: tree and copies*"} | _cells(sides))
    return pd.DataFrame(shown)


def _over(prompts: pd.DataFrame, base: str) -> pd.DataFrame:
    table = stats.compare(prompts, base)
    table = table[(table["suite"] == "all") & (table["method"] == HYBRID)]
    ends = {f"over_tuned_{end}": table[f"speedup_{end}"] for end in ("low", "high")}
    return table.assign(over_tuned=table["speedup"], **ends)


def _cells(sides: dict[str, tuple[pd.DataFrame, str]]) -> dict:
    """Of the first row of each side, which knows every column of its name."""
    cells = {}
    for name, (table, how) in sides.items():
        row = surely(table).iloc[0]
        cells |= {key: row[key] for key in (name, f"{name}_low", f"{name}_high")}
        cells |= {f"{name}_prompts": int(row["prompts"]), f"{name}_how": how}
    return cells


def draw(table: pd.DataFrame, note: str = ""):
    """The picture of `rows`: dots with intervals under heads, filled where decoded live, open where
    replayed.
    """
    with figures.drawn(height_in=3.6, note=note) as (figure, _):
        both = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        places = under_heads(both[0], table["head"], table["method"])
        for axes, (name, least) in zip(both, LEAST.items(), strict=True):
            axes.axvline(1.0, color="0.3", linewidth=1, linestyle="--")
            near, ends = table[name] >= least, (f"{name}_low", f"{name}_high")
            for how, face in ((LIVE, figures.COLOURS[0]), (REPLAYED, "white")):
                own = near & (table[f"{name}_how"] == how)
                dots(
                    axes, places[own], table[own], name, ends=ends, markerfacecolor=face, label=how
                )
            for place, value, high in zip(places, table[name], table[ends[1]], strict=True):
                text, at = (
                    (f"{value:.2f}", max(value, np.nan_to_num(high)))
                    if value >= least
                    else (f"◂ {value:.2f}", least)
                )
                axes.annotate(
                    text, (at, place), (5, 0), textcoords="offset points", va="center", fontsize=8
                )
            first = table.iloc[0]
            axes.set_xlabel(
                f"{OVER[name]}\n({first[f'{name}_how']}, n = {first[f'{name}_prompts']} prompts)"
            )
        ticks = [0.4, 0.5, 0.7, 1.0, 1.4, 2.0]
        both[0].set_xscale("log")
        both[0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        both[0].minorticks_off()
        both[0].set_xlim(right=2.6)
        both[1].grid(axis="y", visible=False)
        both[1].set_xlim(LEAST["over_tuned"], 1.1 * table["over_tuned_high"].max())
        both[0].legend(ncols=2, **figures.ABOVE)
    return figure


def write(folder: Path) -> list[Path]:
    """Draw speed.svg for README.md from the newest comparison that came with the checkout; []
    without one.
    """
    found = findings.read()
    if found is None:
        return []
    drafters = items.measured("baselines", shipped=True, pair="smollm2", temperature=0.0)[:1]
    table = rows(found, *drafters)
    note = "Greedy; bars are 95 % intervals over prompts."
    for row in table[table["method"].str.endswith("*")].to_dict("records"):
        note += f" * Decoded live on {row['over_tuned_prompts']} other prompts; right, over its own tree without copies."
    return figures.save(
        draw(table, note), folder / "speed", sources=[found.run, *drafters], data=table
    )
