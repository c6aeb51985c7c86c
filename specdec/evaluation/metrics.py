"""How much of what is drafted is accepted, by every definition in use, what a policy answers, and whether texts are right.

"Acceptance rate" means another quotient in every paper; here each is named by what it divides. Rows have the columns of
`records.Cycle` and the turn they belong to. `by` is a column or a list of columns, the index of what comes back.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec.core.records import TURN, tau
from specdec.policies.base import COLLAPSED_FRAC

ACTION = ["verified_tok", "expansions", "top_k"]  # total_tokens, depth and width as executed: Re-SpS's action
ANSWERS = ("expansions", "verify_nodes", "top_k")

# Quotients of sums over cycles: name -> (what is counted, what it is divided by). draft_calls = expansions + 1 is also the
# longest path a cycle can accept. Re-SpS's Table 6 gives a rate without saying of what: accepted_per_node is
# accepted / (TT - 1), accepted_per_level is accepted / (depth + 1).
RATES = {
    "accepted_per_node": ("accepted_tok", "verify_nodes"),
    "accepted_per_level": ("accepted_tok", "draft_calls"),
    "accepted_per_candidate": ("accepted_tok", "candidates"),
    "new_per_verified_row": ("new_tok", "verified_tok"),
}
_COUNTED = ["cycles", "first_accepted", "all_levels", *dict.fromkeys(name for pair in RATES.values() for name in pair)]


def cycle_facts(rows: pd.DataFrame, by="method") -> pd.DataFrame:
    """One row per value of `by`. rows: `Replayed.cycles` or cycles.parquet; every repeat or seed decodes a turn again.

    tau_pooled: new tokens over cycles, as LTD has it. tau_macro: mean over prompts of each one's own, as RADAR's code has
    it. tau_last_turn: pooled, of each prompt's last turn alone, which LTD's code records.
    calls_pooled, calls_macro: draft calls per cycle; the second is RADAR's "average calls".
    rounds_per_turn, rounds_per_turn_sd: cycles per turn, Re-SpS's "acceptance length" of Table 6, so less is better.
    RATES, and <rate>_macro, <rate>_sd: mean and deviation over turns of each one's own.
    first_accepted_frac, all_levels_frac: cycles that accept a draft token, and one at every drafted depth.
    And the columns of `actions`.
    """
    by = _list(by)
    decoding = [*by, *TURN, *(name for name in ("repeat", "seed") if name in rows and name not in by)]
    prompt = [name for name in decoding if name != "turn"]
    first, all_levels = rows["accepted_tok"] > 0, rows["accepted_tok"] >= rows["draft_calls"].clip(lower=1)
    rows = rows.assign(cycles=1, first_accepted=first, all_levels=all_levels)
    turns = rows.groupby(decoding, sort=False)[_COUNTED].sum()
    prompts, last = turns.groupby(prompt, sort=False).sum(), turns.groupby(prompt, sort=False).tail(1)
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
    for name, (number, divisor) in RATES.items():  # missing where nothing was there to be accepted
        facts[name] = sums[number] / sums[divisor].where(sums[divisor] > 0)
        own = (turns[number] / turns[divisor].where(turns[divisor] > 0)).groupby(level=by, sort=False)
        facts[f"{name}_macro"], facts[f"{name}_sd"] = own.mean(), own.std()
    facts["first_accepted_frac"] = sums["first_accepted"] / sums["cycles"]
    facts["all_levels_frac"] = sums["all_levels"] / sums["cycles"]
    return facts.join(actions(rows, by))


def text_facts(prompts: pd.DataFrame) -> pd.DataFrame:
    """What the texts are worth, by suite and method. prompts: prompts.parquet.

    same_frac: texts equal to the baseline's. checked: answers for which there is a check. accuracy_frac: the share of those
    that pass it, NaN where there are none; it is the target's own, and an answer that was cut off counts as it stands.
    """
    groups = prompts.groupby(["suite", "method"], sort=False)
    facts = groups["same"].mean().to_frame("same_frac").assign(checked=groups["correct"].count())
    return facts.assign(accuracy_frac=groups["correct"].mean().astype(float))


def actions(rows: pd.DataFrame, by="method") -> pd.DataFrame:
    """What is answered, one row per value of `by`.

    unique_actions: distinct ACTION as executed, Re-SpS's Tables 2 and 5. effective_actions: exp of the entropy of their
    shares, so that rare ones hardly count. commonest: "total_tokens/depth/top_k", with its share commonest_frac.
    collapsed: one action makes up COLLAPSED_FRAC of the cycles or more.
    """
    by = _list(by)
    shares = action_shares(rows, by)
    shares["commonest"] = shares[ACTION].astype(str).agg("/".join, axis=1)
    groups = shares.groupby(by, sort=False)
    table = groups.size().to_frame("unique_actions")
    table["effective_actions"] = groups["share"].agg(lambda share: np.exp(-np.sum((share * np.log(share)).to_numpy())))
    table = table.assign(commonest=groups["commonest"].first(), commonest_frac=groups["share"].first())
    return table.assign(collapsed=table["commonest_frac"] >= COLLAPSED_FRAC)


def action_shares(rows: pd.DataFrame, by="method", columns=ACTION) -> pd.DataFrame:
    """The histogram of actions: `by`, `columns`, cycles, share (of the cycles of that `by`), commonest first."""
    by, columns = _list(by), list(columns)
    assert len(rows), "there are no cycles: decode, or replay with keep_cycles=True"
    counts = rows.groupby([*by, *columns], sort=False).size().rename("cycles").reset_index()
    counts["share"] = counts["cycles"] / counts.groupby(by)["cycles"].transform("sum")
    places = pd.DataFrame({"group": counts.groupby(by, sort=False).ngroup(), "cycles": -counts["cycles"]})
    return counts.loc[places.sort_values(["group", "cycles"], kind="stable").index].reset_index(drop=True)


def answer_shares(rows: pd.DataFrame, by="method", columns=ANSWERS) -> pd.DataFrame:
    """`action_shares` of every column alone, in long form: `by`, answer (the column's name), value, cycles, share."""
    by = _list(by)
    parts = [action_shares(rows, by, [name]).rename(columns={name: "value"}).assign(answer=name) for name in columns]
    return pd.concat(parts, ignore_index=True)[[*by, "answer", "value", "cycles", "share"]]


def answer_counts(rows: pd.DataFrame, by=("suite", "method", "seed")) -> pd.DataFrame:
    """How many cycles gave each answer and each accepted length: `by`, ANSWERS, draft_calls, accepted_tok, cycles."""
    columns = [*(name for name in by if name in rows), *ANSWERS, "draft_calls", "accepted_tok"]
    return rows.groupby(columns, sort=False).size().rename("cycles").reset_index()


def _list(by) -> list[str]:
    return [by] if isinstance(by, str) else list(by)
