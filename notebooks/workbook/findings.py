"""The findings on README's first screen: one table and the sentences that its numbers support.

All numbers come from one comparison that came with the checkout.
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

# the controllers of the papers; PPOW trains the drafter instead
SYSTEMS = ("Re-SpS", "LTD", "RADAR")
PPOW_STEPS = 30_000  # the paper's
LIVE, REPLAYED = "speedup", "over_tuned"
HEADS = ["", "× plain decoding, live", "× the tuned tree, replay"]
# system, terms and preset of the methods that the table shows
DEFAULT_TREE, TUNED_TREE = (STATIC, DEFAULT, "60,7,10"), (STATIC, TUNED)
OURS, BOUND = ("ours", EQUAL), ("clairvoyant", "")


@dataclass(frozen=True)
class Findings:
    """live, replayed: rows of all suites together, greedy. run: where they come from."""

    run: runs.Run
    live: pd.DataFrame
    replayed: pd.DataFrame

    def rows(self, side: str, system: str, terms: str, preset: str = "") -> pd.DataFrame:
        """The rows of a method on one side, "live" or "replayed"."""
        table = getattr(self, side)
        inside = (table["system"] == system) & (table["terms"] == terms)
        if preset:
            inside &= table["preset"] == preset
        return table[inside]

    def cells(self, *method: str) -> tuple[str, str]:
        """'1.23 [1.05, 1.45]' of one method, live and replayed; '-' where it has no row."""
        cells = []
        for side, value in (("live", LIVE), ("replayed", REPLAYED)):
            rows = self.rows(side, *method)
            cells.append(tables.cells(rows, value)[0] if len(rows) else "-")
        return cells[0], cells[1]

    def learned(self, side: str, terms: str) -> pd.DataFrame:
        """The rows of the papers' controllers on these terms."""
        return pd.concat([self.rows(side, system, terms) for system in SYSTEMS])

    def ranges(self, terms: str) -> tuple[str, str]:
        """'0.46 to 0.90', live and replayed: the papers' controllers on these terms."""
        cells = []
        for side, value in (("live", LIVE), ("replayed", REPLAYED)):
            numbers = self.learned(side, terms)[value]
            ends = dict.fromkeys((f"{numbers.min():.2f}", f"{numbers.max():.2f}"))
            cells.append(" to ".join(ends))
        return cells[0], cells[1]

    def table(self) -> pd.DataFrame:
        """The default tree, the papers' settings, one tuned tree, equal terms, ours, the bound."""
        default = "EAGLE-3's default tree (60 tokens, depth 7, width 10)"
        rows = [
            (default, *self.cells(*DEFAULT_TREE)),
            ("RL controllers with the papers' settings", *self.ranges(PAPER)),
            ("**one small static tree, tuned here**", self.cells(*TUNED_TREE)[0], "1"),
            ("the same RL controllers, trained on equal terms", *self.ranges(EQUAL)),
            ("ours (forecasts learned from the recording)", *self.cells(*OURS)),
            ("clairvoyant bound", *self.cells(*BOUND)),
        ]
        return pd.DataFrame(rows, columns=HEADS)

    def value(self, *method: str) -> float:
        return float(self.rows("replayed", *method)[REPLAYED].iloc[0])

    def sentences(self) -> str:
        """What the table says, in words; the intervals of the controllers decide how it is put."""
        learned = self.learned("replayed", EQUAL)
        gains = 100 * (learned[REPLAYED] - 1)
        # rows of few prompts have no interval and count as open
        above = learned["system"][surely(learned)[f"{REPLAYED}_low"] > 1]
        certain = f"only for {' and '.join(above)} does the interval exclude 0"
        if not len(above):
            certain = "no interval excludes 0"
        elif len(above) == len(learned):
            certain = "every interval excludes 0"
        ours, bound = 100 * (self.value(*OURS) - 1), 100 * (self.value(*BOUND) - 1)
        return (
            f"**Tuning one static tree makes decoding {1 / self.value(*DEFAULT_TREE):.1f} times as "
            f"fast as the default tree. Learning adds {gains.min():.0f} to {gains.max():.0f} % on "
            f"top ({certain}), our own controller {ours:.0f} %. Knowing the future would add "
            f"{bound:.0f} %**: no controller here comes near it."
        )

    def caption(self) -> str:
        live, replayed = int(self.live["prompts"].max()), int(self.replayed["prompts"].max())
        trained = self.replayed["system"].isin((*SYSTEMS, "ours"))
        seeds = int(self.replayed.loc[trained, "seeds"].max())
        (row,) = provenance.of([self.run]).rows
        threads = self.run.record()["sessions"][-1].get("threads")
        plural = "" if threads == 1 else "s"
        return (
            f"SmolLM2-135M, {row['dtype']}, {row['machine']}, {threads} thread{plural}, greedy. "
            f"Live: {live} prompts. Replay: {replayed} test prompts, {seeds} training seeds. In "
            f"brackets: 95 % intervals over prompts."
        )

    def markdown(self) -> str:
        caption = f"<sub>{self.caption()}</sub>"
        return "\n\n".join([tables.markdown(self.table()), caption, self.sentences(), not_run()])


def not_run() -> str:
    """What no row of this checkout is about."""
    text = "**Not run:** anything on a GPU, and the papers' models of 8B to 70B parameters."
    trained = items.measured("train_ppow", shipped=True, pair="smollm2")
    steps = [run.record()["config"]["parameters"]["steps"] for run in trained]
    if steps:
        text += f" PPOW was trained for {max(steps)} of its {PPOW_STEPS:,} steps."
    return text


def read() -> Findings | None:
    """The findings of the newest comparison of the real pair that came with the checkout."""
    for run in items.measured("controllers", shipped=True, pair="smollm2"):
        if run.path("live_t0.parquet").is_file() and run.path("replay_t0.parquet").is_file():
            live = identified(run.read_table("live_t0"))
            replayed = identified(run.read_table("replay_t0"))
            # the interval over prompts is the one to show
            for end in ("low", "high"):
                replayed[f"{REPLAYED}_{end}"] = replayed[f"{REPLAYED}_prompts_{end}"]
            pooled = replayed[replayed["suite"] == "all"]
            return Findings(run, live[live["suite"] == "all"], pooled)
    return None
