"""Measured cells of the published tables of speed, computed again from parquet by plain pandas,
without the report room.

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
    name: name.lower().replace("-", "_")
    for name in "MT-bench MT-Bench HumanEval GSM8K Alpaca MBPP".split()
}
BENCHMARKS |= {"CNN/DM": "cnn_dm", "QA": "nq"}
DEFAULTS = {"resps": "default 60,5,10", "ltd": "default 60,8,10", "radar": "default 60,7,10"}
LABELS = {
    "default 60,7,10": "EAGLE-3, depth 7 (ours)",
    "tuned static": "tuned static (ours)",
    "eagle1": "EAGLE-2",
}
LABELS |= {"tuned static of width 10": "tuned static of width 10 (ours)"}
SPELT = {", tuned": "", ", the paper's settings": "", "the released weights,": "released weights"}
SPELT |= {"ours,": "ours (value forecasts),"}
CELLS = 40


def labels(method: str, paper: str) -> set[str]:
    """How a method may be called in a paper's table (lower case)."""
    found = {method, LABELS.get(method, method)}
    for spelt, printed in SPELT.items():
        found.add(method.replace(spelt, printed))
    if method == DEFAULTS[paper]:
        found |= {"EAGLE-3", "Eagle3"}
    return {name.lower() for name in found}


def measured_rows() -> list[tuple]:
    """(paper, temperature, pair, label, {(benchmark, metric): printed number}) of every measured
    row.
    """
    rows = []
    for paper, name, temperature in TABLES:
        table = pd.read_csv(FIGURES / paper / f"{name}.csv", dtype=str)
        for _, row in table[table["whose"] == "Measured here"].iterrows():
            cells = {}
            for column in table.columns[3:]:
                head, _, metric = column.partition(", ")
                if head in BENCHMARKS and isinstance(row[column], str) and row[column] != "-":
                    cells[BENCHMARKS[head], metric or "speedup"] = float(row[column].split()[0])
            rows.append(
                (
                    paper,
                    temperature,
                    row["model"].partition(",")[0],
                    row["row"].partition(", n = ")[0],
                    cells,
                )
            )
    return [row for row in rows if row[-1]]


def tables_of(pair: str, temperature: int) -> list[pd.DataFrame]:
    found = []
    for folder in sorted((FIGURES / "measured").iterdir()):
        config = json.loads((folder / "run.json").read_text())["config"]
        whose = (
            config["pair"]["pair"]
            if isinstance(config.get("pair"), dict)
            else config["parameters"].get("pair")
        )
        paths = (
            folder / f"{name}_t{temperature}.parquet" for name in ("live", "replay", "opponents")
        )
        found += [pd.read_parquet(path) for path in paths if whose == pair and path.is_file()]
    return [table.assign(benchmark=table["suite"].str.rpartition("/")[2]) for table in found]


def found_again(table: pd.DataFrame, cells: dict) -> bool:
    means = table.groupby("benchmark")[[*{metric for _, metric in cells}]].mean(numeric_only=True)
    there = {(name, metric) for name, metric in cells if name in means.index}
    return there == set(cells) and all(abs(means.loc[key] - cells[key]) < 0.0051 for key in there)


def test_random_cells_are_those_of_one_run_each():
    rows, checked = measured_rows(), 0
    random.Random(37).shuffle(rows)
    for paper, temperature, pair, label, cells in rows:
        own = (
            part
            for table in tables_of(pair, temperature)
            for method, part in table.groupby("method")
            if label.lower() in labels(method, paper)
        )
        assert any(found_again(part, cells) for part in own), (paper, pair, label, cells)
        checked += len(cells)
        if checked >= CELLS:
            return
    raise AssertionError(f"only {checked} cells are there")
