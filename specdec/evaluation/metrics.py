"""Acceptance by every definition in use, statistics of a policy's answers, and checks of texts.

"Acceptance rate" is a different quotient in every paper; here each is named by its denominator.
Rows have the columns of `records.Cycle` and of their turn. `by` is a column or a list of columns,
the index of the result.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec import machine
from specdec.core.records import TURN
from specdec.policies.base import COLLAPSED_FRAC

# total_tokens, depth and width as executed: Re-SpS's action
ACTION = ["verified_tok", "expansions", "top_k"]
ANSWERS = ("expansions", "verify_nodes", "top_k")

# What accepted tokens are divided by. draft_calls = expansions + 1 is also the longest path that a
# cycle can accept. Re-SpS's Table 6 does not define its rate:
# accepted_per_node is accepted / (TT - 1), accepted_per_level is accepted / (depth + 1).
RATES = {"accepted_per_node": "verify_nodes", "accepted_per_level": "draft_calls"}
COUNTED = ["cycles", "accepted_tok", "verify_nodes", "draft_calls", "new_tok"]


def cycle_facts(rows: pd.DataFrame, by="method") -> pd.DataFrame:
    """One row per value of `by`. rows: `Replayed.cycles` or cycles.parquet; every repeat or seed
    counts as a turn.

    tau_pooled: new tokens over cycles, as in LTD. tau_macro: mean over the prompts' own, as in
    RADAR's code.
    calls_macro: draft calls per cycle, mean over prompts, RADAR's "average calls".
    rounds_per_turn, rounds_per_turn_sd: cycles per turn, the "acceptance length" of Re-SpS's Table
    6; less is better. RATES, and <rate>_macro: the mean over turns. And the columns of `actions`.
    """
    by = _list(by)
    # 1. sums of turns and of prompts
    turn = [*by, *TURN]
    for name in ("repeat", "seed"):
        if name in rows and name not in by:
            turn.append(name)
    prompt = [name for name in turn if name != "turn"]
    turns = rows.assign(cycles=1).groupby(turn, sort=False)[COUNTED].sum()
    prompts = turns.groupby(prompt, sort=False).sum()
    sums = turns.groupby(by, sort=False).sum()

    def over(quotients: pd.Series):
        return quotients.groupby(level=by, sort=False)

    # 2. tokens, calls and rounds
    rounds = over(turns["cycles"])
    facts = pd.DataFrame({"cycles": sums["cycles"], "turns": rounds.size()})
    facts["tau_pooled"] = sums["new_tok"] / sums["cycles"]
    facts["tau_macro"] = over(prompts["new_tok"] / prompts["cycles"]).mean()
    facts["calls_macro"] = over(prompts["draft_calls"] / prompts["cycles"]).mean()
    facts["rounds_per_turn"] = rounds.mean()
    facts["rounds_per_turn_sd"] = rounds.std()
    # 3. acceptance, missing where nothing could be accepted
    for name, divisor in RATES.items():
        facts[name] = sums["accepted_tok"] / sums[divisor].where(sums[divisor] > 0)
        rates = turns["accepted_tok"] / turns[divisor].where(turns[divisor] > 0)
        facts[f"{name}_macro"] = over(rates).mean()
    return facts.join(actions(rows, by))


def text_facts(prompts: pd.DataFrame) -> pd.DataFrame:
    """Equality and correctness of the texts, by suite and method. prompts: prompts.parquet.

    same_frac: share of texts equal to the baseline's. checked: answers with a check.
    accuracy_frac: share of those that pass. crowded: others used the cores, so there is no result.
    """
    groups = prompts.groupby(["suite", "method"], sort=False)
    facts = groups["same"].mean().to_frame("same_frac").assign(checked=groups["correct"].count())
    facts["accuracy_frac"] = groups["correct"].mean().astype(float)
    return facts.assign(crowded=groups.apply(is_crowded))


def is_crowded(prompts: pd.DataFrame) -> bool:
    """Whether others used too many cores for these wall-clock times to mean much."""
    counted = prompts[prompts["neighbours"].notna() & (prompts["clock"] == "wall")]
    if counted.empty:
        return False
    return machine.is_crowded(np.average(counted["neighbours"], weights=counted["total_ms"]))


def actions(rows: pd.DataFrame, by="method") -> pd.DataFrame:
    """Statistics of the actions, one row per value of `by`.

    unique_actions: distinct ACTION, Re-SpS's Tables 2 and 5. effective_actions: exp of the entropy
    of their shares. collapsed: one action makes up COLLAPSED_FRAC of the cycles or more.
    """
    by = _list(by)
    shares = action_shares(rows, by)
    shares["commonest"] = shares[ACTION].astype(str).agg("/".join, axis=1)
    shares["entropy"] = -shares["share"] * np.log(shares["share"])
    groups = shares.groupby(by, sort=False)
    table = groups.size().to_frame("unique_actions")
    table["effective_actions"] = np.exp(groups["entropy"].sum())
    table["commonest"] = groups["commonest"].first()
    table["commonest_frac"] = groups["share"].first()
    return table.assign(collapsed=table["commonest_frac"] >= COLLAPSED_FRAC)


def action_shares(rows: pd.DataFrame, by="method", columns=ACTION) -> pd.DataFrame:
    """The histogram of actions, most frequent first: `by`, `columns`, cycles, share."""
    by = _list(by)
    assert len(rows), "there are no cycles: decode, or replay with keep_cycles=True"
    counts = rows.groupby([*by, *columns], sort=False).size().rename("cycles").reset_index()
    groups = counts.groupby(by, sort=False)
    counts["share"] = counts["cycles"] / groups["cycles"].transform("sum")
    order = np.lexsort((-counts["cycles"], groups.ngroup()))
    return counts.iloc[order].reset_index(drop=True)


def answer_shares(rows: pd.DataFrame, by="method", columns=ANSWERS) -> pd.DataFrame:
    """`action_shares` of every column: `by`, answer (the column), value, cycles, share."""
    by = _list(by)
    parts = []
    for name in columns:
        shares = action_shares(rows, by, [name]).rename(columns={name: "value"})
        parts.append(shares.assign(answer=name))
    return pd.concat(parts, ignore_index=True)[[*by, "answer", "value", "cycles", "share"]]


def answer_counts(rows: pd.DataFrame) -> pd.DataFrame:
    """Cycles with each answer and accepted length, by suite, method and seed."""
    columns = ["suite", "method", "seed", *ANSWERS, "draft_calls", "accepted_tok"]
    return rows.groupby(columns, sort=False).size().rename("cycles").reset_index()


def _list(by) -> list[str]:
    return [by] if isinstance(by, str) else list(by)
