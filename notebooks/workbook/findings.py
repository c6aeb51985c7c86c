"""The findings on README's first screen: one table and the sentences that its numbers support.

All numbers come from one comparison that came with the checkout: live ratios to plain decoding, and
replayed ratios to the tuned static tree. Knows the names of the papers' systems, and nothing about
how anything was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from specdec import runs
from specdec.identity import DEFAULT, EQUAL, PAPER, STATIC, TUNED
from specdec.report import provenance, tables
from specdec.report.tables import surely

from workbook import items
from workbook.method_rows import identified

SYSTEMS = (
    "Re-SpS",
    "LTD",
    "RADAR",
)  # the controllers of the papers; PPOW trains the drafter instead
PPOW_STEPS = 30_000  # the paper's
LIVE, REPLAYED = "speedup", "over_tuned"
HEADS = ["", "× plain decoding, live", "× the tuned tree, replay"]


@dataclass(frozen=True)
class Findings:
    """live, replayed: rows of all suites together, greedy, with the fields of their methods. run:
    where they come from.
    """

    run: runs.Run
    live: pd.DataFrame
    replayed: pd.DataFrame

    def rows(self, side: str, system: str, terms: str, preset: str = "") -> pd.DataFrame:
        """The rows of a method on one side, "live" or "replayed"."""
        table = getattr(self, side)
        kept = (table["system"] == system) & (table["terms"] == terms)
        return table[kept & (table["preset"] == preset) if preset else kept]

    def cell(self, side: str, value: str, system: str, terms: str, preset: str = "") -> str:
        """'1.23 [1.05, 1.45]' of one method; '-' where it has no row."""
        rows = self.rows(side, system, terms, preset)
        return tables.cells(rows, value)[0] if len(rows) else "-"

    def range(self, side: str, value: str, terms: str) -> str:
        """'0.46 to 0.90': the slowest and the fastest of the papers' controllers on these terms."""
        found = pd.concat([self.rows(side, system, terms) for system in SYSTEMS])[value]
        ends = [f"{end:.2f}" for end in (found.min(), found.max())]
        return " to ".join(dict.fromkeys(ends))

    def table(self) -> pd.DataFrame:
        """At most eight rows: the default tree, the papers' settings, one tuned tree, equal terms,
        ours, the bound.
        """
        default, tuned, ours, bound = (
            (STATIC, DEFAULT, "60,7,10"),
            (STATIC, TUNED),
            ("ours", EQUAL),
            ("clairvoyant", ""),
        )
        rows = [
            ("EAGLE-3's default tree (60 tokens, depth 7, width 10)", *self.both(*default)),
            ("RL controllers with the papers' settings", *self.ranges(PAPER)),
            ("**one small static tree, tuned here**", *self.both(*tuned)[:1], "1"),
            ("the same RL controllers, trained on equal terms", *self.ranges(EQUAL)),
            ("ours (forecasts learned from the recording)", *self.both(*ours)),
            ("clairvoyant bound", *self.both(*bound)),
        ]
        return pd.DataFrame(rows, columns=HEADS)

    def both(self, *method: str) -> tuple[str, str]:
        return self.cell("live", LIVE, *method), self.cell("replayed", REPLAYED, *method)

    def ranges(self, terms: str) -> tuple[str, str]:
        return self.range("live", LIVE, terms), self.range("replayed", REPLAYED, terms)

    def value(self, *method: str) -> float:
        return float(self.rows("replayed", *method)[REPLAYED].iloc[0])

    def sentences(self) -> str:
        """What the table says, in words; the intervals of the controllers decide how it is put."""
        gain = 1 / self.value(STATIC, DEFAULT, "60,7,10")
        ours, bound = (
            100 * (self.value(*method) - 1) for method in (("ours", EQUAL), ("clairvoyant", ""))
        )
        learned = pd.concat([self.rows("replayed", system, EQUAL) for system in SYSTEMS])
        gains = 100 * (learned[REPLAYED] - 1)
        above = learned["system"][surely(learned)[f"{REPLAYED}_low"] > 1]
        held = (
            f"only for {' and '.join(above)} does the interval exclude 0"
            if len(above)
            else "no interval excludes 0"
        )
        held = held if len(above) < len(learned) else "every interval excludes 0"
        return (
            f"**Tuning one static tree makes decoding {gain:.1f} times as fast as the default tree. Learning adds "
            f"{gains.min():.0f} to {gains.max():.0f} % on top ({held}), our own controller {ours:.0f} %. Knowing the future "
            f"would add {bound:.0f} %**: no controller here comes near it."
        )

    def caption(self) -> str:
        counts = [int(table["prompts"].max()) for table in (self.live, self.replayed)]
        seeds = int(
            self.replayed.loc[self.replayed["system"].isin((*SYSTEMS, "ours")), "seeds"].max()
        )
        (row,) = provenance.of([self.run]).rows
        threads = self.run.record()["sessions"][-1].get("threads")
        return (
            f"SmolLM2-135M, {row['dtype']}, {row['machine']}, {threads} thread{'s' * (threads != 1)}, greedy. Live: {counts[0]} "
            f"prompts. Replay: {counts[1]} test prompts, {seeds} training seeds. In brackets: 95 % intervals over prompts."
        )

    def markdown(self) -> str:
        parts = [
            tables.markdown(self.table()),
            f"<sub>{self.caption()}</sub>",
            self.sentences(),
            not_run(),
        ]
        return "\n\n".join(parts)


def not_run() -> str:
    """What no row of this checkout is about."""
    trained = items.measured("train_ppow", shipped=True, pair="smollm2")
    steps = [run.record()["config"]["parameters"]["steps"] for run in trained]
    ppow = f" PPOW was trained for {max(steps)} of its {PPOW_STEPS:,} steps." if steps else ""
    return f"**Not run:** anything on a GPU, and the papers' models of 8B to 70B parameters.{ppow}"


def read() -> Findings | None:
    """The findings of the newest comparison of the real pair that came with the checkout; None
    where there is none.
    """
    for run in items.measured("controllers", shipped=True, pair="smollm2"):
        if run.path("live_t0.parquet").is_file() and run.path("replay_t0.parquet").is_file():
            live, replayed = (identified(run.read_table(name)) for name in ("live_t0", "replay_t0"))
            ends = {
                f"{REPLAYED}_{end}": replayed[f"{REPLAYED}_prompts_{end}"]
                for end in ("low", "high")
            }
            replayed = replayed.assign(**ends)
            return Findings(run, *(table[table["suite"] == "all"] for table in (live, replayed)))
    return None
