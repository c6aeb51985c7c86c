"""Measured cells of the published tables, computed again from parquet without the report room.

Every measured row must be one run's: all its cells are found in one table of one run, under one
method.
"""

import json
import random

import pandas as pd

from specdec import machine

FIGURES = machine.checkout() / "figures"
TABLES = (
    ("resps", "table1", 0),
    ("ltd", "table1", 0),
    ("ltd", "table5", 1),
    ("radar", "table1", 1),
)
BENCHMARKS = {
    **{name: name.lower() for name in ("HumanEval", "GSM8K", "Alpaca", "MBPP")},
    **{"MT-bench": "mt_bench", "MT-Bench": "mt_bench", "CNN/DM": "cnn_dm", "QA": "nq"},
}
DEFAULTS = {"resps": "default 60,5,10", "ltd": "default 60,8,10", "radar": "default 60,7,10"}
LABELS = {
    "default 60,7,10": "EAGLE-3, depth 7 (ours)",
    "tuned static": "tuned static (ours)",
    "tuned static of width 10": "tuned static of width 10 (ours)",
    "eagle1": "EAGLE-2",
}
SPELT = {
    ", tuned": "",
    ", the paper's settings": "",
    "the released weights,": "released weights",
    "ours,": "ours (value forecasts),",
}
CELLS = 40


def labels(method: str, paper: str) -> set[str]:
    """How a method may be called in a paper's table (lower case)."""
    names = {method, LABELS.get(method, method)}
    for spelt, printed in SPELT.items():
        names.add(method.replace(spelt, printed))
    if method == DEFAULTS[paper]:
        names |= {"EAGLE-3", "Eagle3"}
    return {name.lower() for name in names}


def measured_rows() -> list[tuple]:
    """(paper, temperature, pair, label, {(benchmark, metric): printed number}) of measured rows."""
    rows = []
    for paper, name, temperature in TABLES:
        table = pd.read_csv(FIGURES / paper / f"{name}.csv", dtype=str)
        for _, row in table[table["whose"] == "Measured here"].iterrows():
            cells = {}
            for column in table.columns[3:]:
                head, _, metric = column.partition(", ")
                if head in BENCHMARKS and isinstance(row[column], str) and row[column] != "-":
                    number = float(row[column].split()[0])
                    cells[BENCHMARKS[head], metric or "speedup"] = number
            pair, label = row["model"].partition(",")[0], row["row"].partition(", n = ")[0]
            if cells:
                rows.append((paper, temperature, pair, label, cells))
    return rows


def tables_of(pair: str, temperature: int) -> list[pd.DataFrame]:
    tables = []
    for folder in sorted((FIGURES / "measured").iterdir()):
        config = json.loads((folder / "run.json").read_text())["config"]
        facts = config["pair"] if isinstance(config.get("pair"), dict) else config["parameters"]
        for name in ("live", "replay", "opponents"):
            path = folder / f"{name}_t{temperature}.parquet"
            if facts.get("pair") == pair and path.is_file():
                table = pd.read_parquet(path)
                benchmark = table["suite"].str.rpartition("/")[2]
                tables.append(table.assign(benchmark=benchmark))
    return tables


def holds(table: pd.DataFrame, cells: dict) -> bool:
    metrics = list({metric for _, metric in cells})
    means = table.groupby("benchmark")[metrics].mean(numeric_only=True)
    if not {name for name, _ in cells} <= set(means.index):
        return False
    return all(abs(means.loc[key] - number) < 0.0051 for key, number in cells.items())


def test_random_cells_are_those_of_one_run_each():
    rows, checked = measured_rows(), 0
    random.Random(37).shuffle(rows)
    for paper, temperature, pair, label, cells in rows:
        parts = []
        for table in tables_of(pair, temperature):
            for method, part in table.groupby("method"):
                if label.lower() in labels(method, paper):
                    parts.append(part)
        assert any(holds(part, cells) for part in parts), (paper, pair, label, cells)
        checked += len(cells)
        if checked >= CELLS:
            return
    raise AssertionError(f"only {checked} cells are there")
