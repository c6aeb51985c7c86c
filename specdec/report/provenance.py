"""The source of numbers, read from their runs: pair, dtype, device, machine, suites, prompts,
seeds, costs.

The scale of a table or figure is computed only here: it is a property of its rows, not a setting.
Anything not known to be of the papers' scale counts as smaller.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from specdec import runs
from specdec.errors import SpecdecError

LEVELS = ("toy", "laptop", "reduced", "paper")  # a table is as large as its smallest row
TOYS = ("tiny", "small")
PAPER_PAIRS = (
    *("llama-3.1-8b", "llama-3.3-70b", "vicuna-13b", "deepseek-r1-8b"),
    *("qwen3-8b", "qwen3-14b", "qwen3-32b"),
)
BENCHMARKS = (
    "mt_bench",
    "humaneval",
    "gsm8k",
    "alpaca",
    "cnn_dm",
    "nq",
    "mbpp",
    "xsum",
    "wmt14",
    "mmlu",
)
POOLED = ("all",)  # names in tables for several suites together
SAID = ("pair", "dtype", "device", "temperature", "clock")


def of(sources, shown: pd.DataFrame | None = None) -> Provenance:
    """The provenance of `sources`: Runs, or dicts with the columns of a row if there is no run (a
    training's curve).

    shown: the rows that are shown of them, whose suites and prompts the caption counts.
    """
    return Provenance(tuple(_row(source) for source in sources), _counts(shown))


@dataclasses.dataclass(frozen=True)
class Provenance:
    """rows: one dict per source: run, pair, dtype, device, machine, suites, prompts, seeds, prices,
    commit; None if the
    run does not say. shown: suites and prompts of what is shown, in words."""

    rows: tuple[dict, ...]
    shown: str = ""

    @property
    def scale(self) -> str:
        """The smallest of the rows' scales; 'none' if nothing was measured.

        toy: a pair made for this workbook. laptop: on a CPU. reduced: on a GPU, but not a target of
        the papers on their benchmarks. paper: that.
        """
        return min(map(_scale, self.rows), key=LEVELS.index) if self.rows else "none"

    @property
    def label(self) -> str:
        """The label in every picture and over every table: for each scale the measured pairs,
        dtypes and devices.
        """
        if not self.rows:
            return "nothing measured here"
        parts = []
        for scale in dict.fromkeys(map(_scale, self.rows)):
            rows = [row for row in self.rows if _scale(row) == scale]
            models = [
                " ".join(filter(None, (row["pair"] or "unknown pair", row["dtype"])))
                for row in rows
            ]
            devices = [
                {"cpu": "CPU", "cuda": "GPU"}.get(row["device"], "unknown device") for row in rows
            ]
            parts.append(f"{scale} scale: {_joined(models)} on {_joined(devices)}")
        return "; ".join(parts)

    @property
    def caption(self) -> str:
        """The label, and what is needed to judge it: machine, what is shown, seeds, costs behind
        replayed time.
        """
        if not self.rows:
            return "Nothing measured here."
        suites, seeds = (
            sorted({one for row in self.rows for one in row[name]}) for name in ("suites", "seeds")
        )
        written = (
            "prompts written for this workbook" if any("/" in suite for suite in suites) else ""
        )
        prices = _joined(row["prices"] for row in self.rows)
        facts = [self.label, _joined(row["machine"] for row in self.rows), self.shown, written]
        facts.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else "")
        facts.append(f"time from the costs of {prices}" if prices else "")
        return ", ".join(filter(None, facts)) + "."

    def record(self) -> dict:
        """The record for the file beside a table or figure."""
        return {
            "scale": self.scale,
            "label": self.label,
            "caption": self.caption,
            "measured": list(self.rows),
        }


def _counts(shown: pd.DataFrame | None) -> str:
    """Number of suites in the rows, and of prompts behind each row, as far as their columns say."""
    facts, table = [], pd.DataFrame() if shown is None else shown
    if "suite" in table and (count := table.loc[~table["suite"].isin(POOLED), "suite"].nunique()):
        facts.append(f"{count} suite{'s' * (count != 1)}")
    if "prompts" in table and len(
        counts := pd.to_numeric(table["prompts"], errors="coerce").dropna()
    ):
        low, high = int(counts.min()), int(counts.max())
        facts.append(f"{low}{f' to {high}' * (high > low)} prompt{'s' * (high != 1)} a row")
    return ", ".join(facts)


def _joined(values) -> str:
    return " and ".join(dict.fromkeys(str(value) for value in values if value))


def _scale(row: dict) -> str:
    if row["pair"] in TOYS or any(suite.startswith("toy/") for suite in row["suites"]):
        return "toy"
    if row["device"] != "cuda":
        return "laptop"
    names = {suite.partition(":")[0] for suite in row["suites"]}  # mmlu:anatomy belongs to mmlu
    return (
        "paper" if names and names <= set(BENCHMARKS) and row["pair"] in PAPER_PAIRS else "reduced"
    )


NAMES = (
    "run",
    "key",
    "pair",
    "dtype",
    "device",
    "machine",
    "suites",
    "prompts",
    "seeds",
    "temperature",
    "clock",
)
EMPTY = dict.fromkeys((*NAMES, "prices", "commit")) | {"suites": [], "seeds": []}


def _row(source) -> dict:
    if not isinstance(source, dict | runs.Run):
        raise SpecdecError(f"a source is a Run or a dict of facts, not {source!r}.")
    return EMPTY | (source if isinstance(source, dict) else _row_of(source.directory))


@functools.lru_cache(maxsize=256)
def _facts_of_table(path: Path, _changed: int) -> dict:
    """Values of the columns that say where rows come from, in one parquet file."""
    asked = ("suite", "prompt", "seed", "machine", "part", *SAID)
    if not (names := [name for name in asked if name in pq.read_schema(path).names]):
        return {}
    table = pd.read_parquet(path, columns=names).drop_duplicates()
    if "suite" in table:
        table = table[~table["suite"].isin(POOLED)]
    facts = {
        name: sorted(table[name].dropna().unique().tolist(), key=str)
        for name in names
        if name != "prompt"
    }
    if {"suite", "prompt"} <= set(names):
        facts["prompts"] = len(table[["suite", "prompt"]].drop_duplicates())
    return facts


def _row_of(folder: Path) -> dict:
    record = runs.read_json(folder / "run.json")
    config, session = record["config"], record["sessions"][-1]
    described = (
        config["pair"] if isinstance(config.get("pair"), dict) else config.get("parameters", config)
    )
    row = {name: described.get(name) for name in SAID} | {"temperature": config.get("temperature")}
    row |= {
        "run": record["name"],
        "key": record["key"],
        "machine": session.get("gpu") or session.get("cpu"),
    }
    row["device"] = (
        row["device"]
        if row["device"] in ("cpu", "cuda")
        else "cuda"
        if session.get("gpu")
        else "cpu"
    )
    row["commit"] = session.get("commit")
    seeds = described.get("seeds", described.get("seed", config.get("seed")))
    tables = [
        _facts_of_table(path, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.parquet"))
    ]
    for name, other in (("recording", folder / "recording.json"), ("costs", folder / "costs.json")):
        if other.is_file():
            left = runs.read_json(other)
            row |= (
                {"prices": left["name"]}
                if name == "costs"
                else {"pair": left["pair"], "dtype": left["dtype"]}
            )
            tables += [left] if name == "recording" else []
    for name in SAID:
        found = {value for table in tables for value in _listed(table.get(name))}
        row[name] = found.pop() if len(found) == 1 and row[name] in (None, "auto") else row[name]
    row["suites"] = sorted(
        {str(suite) for table in tables for suite in _listed(table.get("suite"))}
    )
    row["prompts"] = max(
        (table["prompts"] for table in tables if table.get("prompts")), default=None
    )
    row["seeds"] = sorted({int(seed) for seed in _listed(seeds)})
    return row


def _listed(value) -> list:
    return [] if value is None else value if isinstance(value, list) else [value]
