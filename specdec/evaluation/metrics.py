"""Acceptance by every definition in use, statistics of a policy's answers, and checks of texts.

"Acceptance rate" is a different quotient in every paper; here each is named by its denominator.
Rows have the columns of `records.Cycle` and of their turn. `by` is a column or a list of columns,
the index of the result.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec.core.records import TURN, tau
from specdec.policies.base import COLLAPSED_FRAC

# total_tokens, depth and width as executed: Re-SpS's action
ACTION = ["verified_tok", "expansions", "top_k"]
ANSWERS = ("expansions", "verify_nodes", "top_k")

# Quotients of sums over cycles: name -> (numerator, denominator). draft_calls = expansions + 1 is
# also the
# longest path that a cycle can accept. Re-SpS's Table 6 does not define its rate: accepted_per_node
# is
# accepted / (TT - 1), accepted_per_level is accepted / (depth + 1).
RATES = {
    "accepted_per_node": ("accepted_tok", "verify_nodes"),
    "accepted_per_level": ("accepted_tok", "draft_calls"),
    "accepted_per_candidate": ("accepted_tok", "candidates"),
    "new_per_verified_row": ("new_tok", "verified_tok"),
}
_COUNTED = [
    "cycles",
    "first_accepted",
    "all_levels",
    *dict.fromkeys(name for pair in RATES.values() for name in pair),
]


def cycle_facts(rows: pd.DataFrame, by="method") -> pd.DataFrame:
    """One row per value of `by`. rows: `Replayed.cycles` or cycles.parquet; every repeat or seed
    counts as a turn.

    tau_pooled: new tokens over cycles, as in LTD. tau_macro: mean over the prompts' own, as in
    RADAR's code.
    tau_last_turn: pooled over each prompt's last turn only, as LTD's code records it.
    calls_pooled, calls_macro: draft calls per cycle; the second is RADAR's "average calls".
    rounds_per_turn, rounds_per_turn_sd: cycles per turn, the "acceptance length" of Re-SpS's Table
    6; less is better.
    RATES, and <rate>_macro, <rate>_sd: mean and deviation over the turns' own.
    first_accepted_frac, all_levels_frac: share of cycles that accept a draft token, or one at every
    drafted depth. And the columns of `actions`.
    """
    by = _list(by)
    decoding = [
        *by,
        *TURN,
        *(name for name in ("repeat", "seed") if name in rows and name not in by),
    ]
    prompt = [name for name in decoding if name != "turn"]
    first = rows["accepted_tok"] > 0
    all_levels = rows["accepted_tok"] >= rows["draft_calls"].clip(lower=1)
    rows = rows.assign(cycles=1, first_accepted=first, all_levels=all_levels)
    turns = rows.groupby(decoding, sort=False)[_COUNTED].sum()
    prompts = turns.groupby(prompt, sort=False).sum()
    last = turns.groupby(prompt, sort=False).tail(1)
    sums, last = (some.groupby(by, sort=False).sum() for some in (turns, last))

    def mean(quotients: pd.Series) -> pd.Series:
        return quotients.groupby(level=by, sort=False).mean()

    rounds = turns["cycles"].groupby(level=by, sort=False)
    facts = pd.DataFrame({"cycles": sums["cycles"], "turns": rounds.size()})
    facts["tau_pooled"] = tau(sums["new_tok"], sums["cycles"])
    facts["tau_macro"] = mean(tau(prompts["new_tok"], prompts["cycles"]))
    facts["tau_last_turn"] = tau(last["new_tok"], last["cycles"])
    facts["calls_pooled"] = sums["draft_calls"] / sums["cycles"]
    facts["calls_macro"] = mean(prompts["draft_calls"] / prompts["cycles"])
    facts["rounds_per_turn"], facts["rounds_per_turn_sd"] = rounds.mean(), rounds.std()
    for name, (number, divisor) in RATES.items():  # missing if nothing could be accepted
        facts[name] = sums[number] / sums[divisor].where(sums[divisor] > 0)
        own = (turns[number] / turns[divisor].where(turns[divisor] > 0)).groupby(
            level=by, sort=False
        )
        facts[f"{name}_macro"], facts[f"{name}_sd"] = own.mean(), own.std()
    facts["first_accepted_frac"] = sums["first_accepted"] / sums["cycles"]
    facts["all_levels_frac"] = sums["all_levels"] / sums["cycles"]
    return facts.join(actions(rows, by))


def text_facts(prompts: pd.DataFrame) -> pd.DataFrame:
    """Equality and correctness of the texts, by suite and method. prompts: prompts.parquet.

    same_frac: share of texts equal to the baseline's. checked: number of answers with a check.
    accuracy_frac: share of those that pass, NaN if there are none; it is the target's own, and
    truncated answers are checked as they are.
    """
    groups = prompts.groupby(["suite", "method"], sort=False)
    facts = groups["same"].mean().to_frame("same_frac").assign(checked=groups["correct"].count())
    return facts.assign(accuracy_frac=groups["correct"].mean().astype(float))


def actions(rows: pd.DataFrame, by="method") -> pd.DataFrame:
    """Statistics of the actions, one row per value of `by`.

    unique_actions: distinct ACTION as executed, Re-SpS's Tables 2 and 5. effective_actions: exp of
    the entropy of their shares, which gives rare ones little weight. commonest:
    "total_tokens/depth/top_k", with its share commonest_frac.
    collapsed: one action makes up COLLAPSED_FRAC of the cycles or more.
    """
    by = _list(by)
    shares = action_shares(rows, by)
    shares["commonest"] = shares[ACTION].astype(str).agg("/".join, axis=1)
    groups = shares.groupby(by, sort=False)
    table = groups.size().to_frame("unique_actions")
    table["effective_actions"] = groups["share"].agg(
        lambda share: np.exp(-np.sum((share * np.log(share)).to_numpy()))
    )
    table = table.assign(
        commonest=groups["commonest"].first(), commonest_frac=groups["share"].first()
    )
    return table.assign(collapsed=table["commonest_frac"] >= COLLAPSED_FRAC)


def action_shares(rows: pd.DataFrame, by="method", columns=ACTION) -> pd.DataFrame:
    """The histogram of actions: `by`, `columns`, cycles, share (of the cycles of that `by`), most
    frequent first.
    """
    by = _list(by)
    columns = list(columns)
    assert len(rows), "there are no cycles: decode, or replay with keep_cycles=True"
    counts = rows.groupby([*by, *columns], sort=False).size().rename("cycles").reset_index()
    counts["share"] = counts["cycles"] / counts.groupby(by)["cycles"].transform("sum")
    places = pd.DataFrame(
        {"group": counts.groupby(by, sort=False).ngroup(), "cycles": -counts["cycles"]}
    )
    return counts.loc[places.sort_values(["group", "cycles"], kind="stable").index].reset_index(
        drop=True
    )


def answer_shares(rows: pd.DataFrame, by="method", columns=ANSWERS) -> pd.DataFrame:
    """`action_shares` of every column separately, in long form: `by`, answer (the column's name),
    value, cycles, share.
    """
    by = _list(by)
    parts = [
        action_shares(rows, by, [name]).rename(columns={name: "value"}).assign(answer=name)
        for name in columns
    ]
    return pd.concat(parts, ignore_index=True)[[*by, "answer", "value", "cycles", "share"]]


def answer_counts(rows: pd.DataFrame, by=("suite", "method", "seed")) -> pd.DataFrame:
    """Number of cycles with each answer and each accepted length: `by`, ANSWERS, draft_calls,
    accepted_tok, cycles.
    """
    columns = [*(name for name in by if name in rows), *ANSWERS, "draft_calls", "accepted_tok"]
    return rows.groupby(columns, sort=False).size().rename("cycles").reset_index()


def _list(by) -> list[str]:
    return [by] if isinstance(by, str) else list(by)
