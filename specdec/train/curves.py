"""How trainings went: their curves and results as tables, for the notebooks that train. Reads files; trains nothing."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from specdec import runs


def training_curves(
    folders: dict[str, Path], columns=("reward", "entropy", "tok_per_ms"), points: int = 60
) -> pd.DataFrame:
    """The curves of several runs in long form: run, steps, what, value; means over blocks, about `points` per run."""
    found = []
    for name, folder in folders.items():
        curve = runs.read_table(Path(folder) / "curve.parquet")[["steps", *columns]]
        block = curve.index // max(1, len(curve) // points)
        mean = curve.groupby(block).mean().assign(steps=curve["steps"].groupby(block).max())
        found.append(mean.melt("steps", var_name="what", value_name="value").assign(run=name))
    return pd.concat(found, ignore_index=True)[["run", "steps", "what", "value"]]


def training_results(folders: dict[str, Path]) -> pd.DataFrame:
    """One row per run: steps, minutes, steps_per_s, the greedy policy's commonest answer on training text and its share."""
    rows = []
    for name, folder in folders.items():
        found = runs.read_json(Path(folder) / "plan.json")["results"]
        common = "/".join(map(str, found["most_common"]))
        rows.append({
            "run": name, "steps": found["steps"], "minutes": found["elapsed_s"] / 60,
            "steps_per_s": found["steps"] / max(1e-9, found["elapsed_s"]), "answers": found["answers"],
            "commonest": common, "commonest_frac": found["most_common_frac"],
        })  # fmt: skip
    return pd.DataFrame(rows)
