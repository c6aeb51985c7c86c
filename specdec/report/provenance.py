"""Where numbers come from, read from their runs: pair, machine, suites, prompts, seeds, costs.

The scale of a table or figure is computed only here: it is a property of its rows, not a setting.
Anything not known to be of the papers' scale counts as smaller.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from specdec import runs

# a table is as large as its smallest row
LEVELS = ("toy", "laptop", "reduced", "paper")
TOYS = ("tiny", "small")
PAPER_PAIRS = "llama-3.1-8b llama-3.3-70b vicuna-13b deepseek-r1-8b qwen3-8b qwen3-14b".split()
PAPER_PAIRS.append("qwen3-32b")
BENCHMARKS = "mt_bench humaneval gsm8k alpaca cnn_dm nq mbpp xsum wmt14 mmlu".split()
POOLED = "all"  # the name in tables for several suites together
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
# facts that a run's settings or the columns of its tables state
STATED = ("pair", "dtype", "device", "temperature", "clock")
FIELDS = """run key pair dtype device machine suites prompts seeds temperature clock prices
commit""".split()


def of(sources, shown: pd.DataFrame | None = None) -> Provenance:
    """The provenance of `sources`, which are Runs.

    shown: the rows that are shown of them, whose suites and prompts the caption counts.
    """
    return Provenance(tuple(_row_of(run.directory) for run in sources), _counts(shown))


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The sources of a table or figure.

    rows: one dict per source with FIELDS; None if the run does not say. shown: suites
    and prompts of what is shown, in words.
    """

    rows: tuple[dict, ...]
    shown: str = ""

    @property
    def scale(self) -> str:
        """The smallest of the rows' scales; 'none' if nothing was measured.

        toy: a pair made for this workbook. laptop: on a CPU. reduced: on a GPU, but not a target of
        the papers on their benchmarks. paper: that.
        """
        return min(map(scale_of, self.rows), key=LEVELS.index, default="none")

    @property
    def label(self) -> str:
        """For each scale the measured pairs, dtypes and devices: in every picture and table."""
        names: dict[str, list] = {}
        places: dict[str, list] = {}
        for row in self.rows:
            name = f"{row['pair'] or 'unknown pair'} {row['dtype'] or ''}".strip()
            names.setdefault(scale_of(row), []).append(name)
            place = DEVICES.get(row["device"], "unknown device")
            places.setdefault(scale_of(row), []).append(place)
        parts = []
        for scale in names:
            parts.append(f"{scale} scale: {_joined(names[scale])} on {_joined(places[scale])}")
        if any(row.get("crowded") for row in self.rows):
            parts.append("disturbed by other processes: no result")
        return "; ".join(parts) or "nothing measured here"

    @property
    def caption(self) -> str:
        """The label, machine, what is shown, seeds, and the costs behind replayed time."""
        if not self.rows:
            return "Nothing measured here."
        parts = [self.label, _joined(row["machine"] for row in self.rows), self.shown]
        if "/" in str([row["suites"] for row in self.rows]):
            parts.append("prompts written for this workbook")
        seeds = sorted(set().union(*(row["seeds"] for row in self.rows)))
        if seeds:
            parts.append(f"{_counted(len(seeds), 'seed')} {', '.join(map(str, seeds))}")
        prices = _joined(row["prices"] for row in self.rows)
        if prices:
            parts.append(f"time from the costs of {prices}")
        return ", ".join(filter(None, parts)) + "."

    def record(self) -> dict:
        """What the file beside a table or figure says."""
        words = {"scale": self.scale, "label": self.label, "caption": self.caption}
        return {**words, "measured": list(self.rows)}


def _counts(shown: pd.DataFrame | None) -> str:
    """Number of suites in the rows, and of prompts behind each row, as far as their columns say."""
    if shown is None:
        return ""
    parts = []
    if "suite" in shown:
        count = shown.loc[shown["suite"] != POOLED, "suite"].nunique()
        if count:
            parts.append(f"{count} {_counted(count, 'suite')}")
    if "prompts" in shown:
        counts = pd.to_numeric(shown["prompts"], errors="coerce").dropna().astype(int)
        if len(counts):
            span = " to ".join(map(str, sorted({counts.min(), counts.max()})))
            parts.append(f"{span} {_counted(counts.max(), 'prompt')} a row")
    return ", ".join(parts)


def _counted(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def _joined(values: Iterable) -> str:
    return " and ".join(dict.fromkeys(map(str, filter(None, values))))


def scale_of(row: dict) -> str:
    suites = row["suites"]
    if row["pair"] in TOYS or any(suite.startswith("toy/") for suite in suites):
        return "toy"
    if row["device"] != "cuda":
        return "laptop"
    # mmlu:anatomy belongs to mmlu
    names = {suite.partition(":")[0] for suite in suites}
    if names and names <= set(BENCHMARKS) and row["pair"] in PAPER_PAIRS:
        return "paper"
    return "reduced"


@functools.lru_cache(maxsize=256)
def _facts_of_table(path: Path, _changed: int) -> dict:
    """Columns that say where rows come from, of a file last changed at this time: their values."""
    columns = set(pq.read_schema(path).names)
    columns &= {"suite", "prompt", "seed", "machine", "part", *STATED}
    if not columns:
        return {}
    table = pd.read_parquet(path, columns=sorted(columns)).drop_duplicates()
    if "suite" in columns:
        table = table[table["suite"] != POOLED]
    facts: dict[str, Any] = {name: table[name].unique().tolist() for name in table}
    if {"suite", "prompt"} <= columns:
        facts["prompts"] = len(table[["suite", "prompt"]].drop_duplicates())
    return facts


def _row_of(folder: Path) -> dict:
    """What a run's folder says: its settings, its last session, its tables, what it read."""
    record = runs.read_json(folder / "run.json")
    config = record["config"]
    session = record["sessions"][-1]
    described = config.get("pair")
    if not isinstance(described, dict):
        described = config.get("parameters", config)
    # 1. the settings and the session
    row = dict.fromkeys(FIELDS)
    for name in STATED:
        row[name] = described.get(name)
    row["temperature"] = config.get("temperature")
    row["run"] = record["name"]
    row["key"] = record["key"]
    row["commit"] = session.get("commit")
    if (record.get("results") or {}).get("crowded"):
        row["crowded"] = True
    row["machine"] = session.get("gpu") or session.get("cpu")
    if row["device"] not in DEVICES:
        row["device"] = "cuda" if session.get("gpu") else "cpu"
    # 2. the tables, and the recording and costs that it read
    tables = []
    for path in sorted(folder.glob("*.parquet")):
        tables.append(_facts_of_table(path, path.stat().st_mtime_ns))
    if (folder / "recording.json").is_file():
        recording = runs.read_json(folder / "recording.json")
        row["pair"] = recording["pair"]
        row["dtype"] = recording["dtype"]
        tables.append(recording)
    if (folder / "costs.json").is_file():
        row["prices"] = runs.read_json(folder / "costs.json")["name"]
    facts = pd.DataFrame(tables, columns=[*STATED, "suite", "prompts"], dtype=object)
    for name in STATED:
        values = _values(facts[name])
        if len(values) == 1 and row[name] in (None, "auto"):
            row[name] = values[0]
    # 3. suites, prompts and seeds
    row["suites"] = sorted(map(str, _values(facts["suite"])))
    row["prompts"] = max(_values(facts["prompts"]), default=0) or None
    seeds = described.get("seeds", described.get("seed", config.get("seed")))
    row["seeds"] = sorted(map(int, _values([seeds])))
    return row


def _values(facts) -> list:
    """The different values of facts, each of which is a value, a list of values, or missing."""
    return pd.Series(list(facts), dtype=object).explode().dropna().unique().tolist()
