"""README's first picture: ways of decoding beside plain decoding, and beside the tuned static tree.

All rows are greedy and came with the checkout.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from specdec.evaluation import stats
from specdec.identity import EQUAL
from specdec.report import figures
from specdec.report.tables import surely

from workbook import findings, items
from workbook.pictures import dots, under_heads

LIVE, REPLAYED = "live", "replayed"
SHOWN = {  # head -> name -> system, terms and preset of a method
    "one tree for all": {
        "EAGLE-3's default, 60 tokens": findings.DEFAULT_TREE,
        "tuned here": findings.TUNED_TREE,
    },
    "learned, equal terms": {name: (name, EQUAL) for name in findings.SYSTEMS},
    "ours": {"value forecasts": findings.OURS},
    "bound": {"clairvoyant": findings.BOUND},
}
# In the comparison of drafters: the hybrid, plain decoding, and the hybrid's tree without copies.
HYBRID, PLAIN, ALONE = "hybrid, gated", "autoregressive", "eagle3"
OVER = {
    "speedup": "times as fast as plain decoding",
    "over_tuned": "times as fast as the tuned tree",
}
LEAST = {"speedup": 0.0, "over_tuned": 0.8}  # on these axes; an arrow marks what is slower


def rows(found: findings.Findings, drafters=None) -> pd.DataFrame:
    """One row per method: head, method, and for each of OVER value, low, high, prompts and how.

    drafters: a run that compared drafters, with the hybrid's prompts.
    """
    shown = []
    for head, methods in SHOWN.items():
        for name, method in methods.items():
            replayed, live = found.rows("replayed", *method), found.rows("live", *method)
            # what was decoded here counts more than what is predicted
            if len(live):
                cells = _cells("speedup", live, LIVE)
            else:
                ends = {
                    f"speedup_{end}": replayed[f"speedup_prompts_{end}"] for end in ("low", "high")
                }
                cells = _cells("speedup", replayed.assign(**ends), REPLAYED)
            cells |= _cells("over_tuned", replayed, REPLAYED)
            shown.append({"head": head, "method": name} | cells)
        if head == "ours" and drafters is not None:
            prompts = drafters.read_table("prompts")
            prompts = prompts[prompts["method"].isin([HYBRID, PLAIN, ALONE])]
            cells = {}
            for name, base in zip(OVER, (PLAIN, ALONE), strict=True):
                # the same prompts over each base
                table = stats.compare(prompts, base)
                table = table[(table["suite"] == "all") & (table["method"] == HYBRID)]
                ends = {f"speedup{end}": f"{name}{end}" for end in ("", "_low", "_high")}
                cells |= _cells(name, table.rename(columns=ends), LIVE)
            shown.append({"head": head, "method": "hybrid: tree and copies*"} | cells)
    return pd.DataFrame(shown)


def _cells(name: str, table: pd.DataFrame, how: str) -> dict:
    """Of the first row of a table."""
    row = surely(table).iloc[0]
    cells = {key: row[key] for key in (name, f"{name}_low", f"{name}_high")}
    return cells | {f"{name}_prompts": int(row["prompts"]), f"{name}_how": how}


def draw(table: pd.DataFrame, note: str = ""):
    """The picture of `rows`: dots with intervals, filled where live, open where replayed."""
    with figures.drawn(height_in=3.6, note=note) as (figure, _):
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        places = under_heads(left, table["head"], table["method"])
        for axes, (name, least) in zip((left, right), LEAST.items(), strict=True):
            axes.axvline(1.0, color="0.3", linewidth=1, linestyle="--")
            ends = (f"{name}_low", f"{name}_high")
            for how, face in ((LIVE, figures.COLOURS[0]), (REPLAYED, "white")):
                part = (table[name] >= least) & (table[f"{name}_how"] == how)
                look = dict(ends=ends, markerfacecolor=face, label=how)
                dots(axes, places[part], table[part], name, **look)
            for place, value, high in zip(places, table[name], table[ends[1]], strict=True):
                text, at = f"{value:.2f}", max(value, np.nan_to_num(high))
                if value < least:
                    text, at = f"◂ {value:.2f}", least
                look = dict(textcoords="offset points", va="center", fontsize=8)
                axes.annotate(text, (at, place), (5, 0), **look)
            first = table.iloc[0]
            count = f"n = {first[f'{name}_prompts']} prompts"
            axes.set_xlabel(f"{OVER[name]}\n({first[f'{name}_how']}, {count})")
        ticks = [0.4, 0.5, 0.7, 1.0, 1.4, 2.0]
        left.set_xscale("log")
        left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        left.minorticks_off()
        left.set_xlim(right=2.6)
        right.grid(axis="y", visible=False)
        right.set_xlim(LEAST["over_tuned"], 1.1 * table["over_tuned_high"].max())
        left.legend(ncols=2, **figures.ABOVE)
    return figure


def write(folder: Path) -> list[Path]:
    """Draw speed.svg for README.md from the newest comparison with the checkout; [] without one."""
    found = findings.read()
    if found is None:
        return []
    drafters = items.measured("baselines", shipped=True, pair="smollm2", temperature=0.0)[:1]
    table = rows(found, *drafters)
    note = "Greedy; bars are 95 % intervals over prompts."
    for count in table.loc[table["method"].str.endswith("*"), "over_tuned_prompts"]:
        note += f" * Decoded live on {count} other prompts; right, over its own tree without"
        note += " copies."
    sources = [found.run, *drafters]
    return figures.save(draw(table, note), folder / "speed", sources=sources, data=table)
