"""What trained controllers are worth in replay, and what they answer: tables for the notebooks that train them.

Reads policies and the files of training runs; trains nothing.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from specdec import runs
from specdec.bound import references
from specdec.config import SpecdecError
from specdec.policy import Policy
from specdec.replaying import answer_ms, replay

ANSWERS = ("expansions", "verify_nodes", "top_k")


def judged(trace, costs, policies: dict[str, Policy], part: str = "test", **grid) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`bound.references` on the turns of `part` with the policies among them, and all their cycles.

    Trees are tuned on part "train". Every policy pays for its answers what they cost on this machine (`answer_ms`); the
    table says so in policy_ms (per answer) and policy_frac (of its time). cycles: one row per cycle with its `method`.
    """
    turns, others, cycles, costs_of = trace.select(part=part), {}, [], {}
    for name, policy in policies.items():
        each_ms = answer_ms(turns, policy, costs)
        found = replay(turns, policy, costs, policy_ms=each_ms, keep_cycles=True)
        others[name] = found.table
        cycles.append(found.cycles.assign(method=name))
        share = found.table["policy_ms"].sum() / found.table["time_ms"].sum()
        costs_of[name] = {"policy_ms": each_ms, "policy_frac": share}
    if not cycles:
        raise SpecdecError("there is no policy to judge; give at least one.")
    table = references(trace, costs, test=part, others=others, **grid)
    charged = pd.DataFrame.from_dict(costs_of, orient="index")
    return table.join(charged, on="method"), pd.concat(cycles, ignore_index=True)


def answer_shares(cycles: pd.DataFrame, columns=ANSWERS) -> pd.DataFrame:
    """How often each answer occurs: rows method, answer (a column of the cycles), value, share of the method's cycles."""
    parts = []
    for column in columns:
        share = cycles.groupby("method", sort=False)[column].value_counts(normalize=True).rename("share").reset_index()
        parts.append(share.rename(columns={column: "value"}).assign(answer=column))
    return pd.concat(parts, ignore_index=True)[["method", "answer", "value", "share"]]


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
