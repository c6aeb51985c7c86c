"""How much of what is drafted is accepted, by every definition in use, and what a policy answers: facts about cycles.

"Acceptance rate" means another quotient in every paper; here each is named by what it divides. Knows nothing about models,
policies or time; it takes rows with the columns of `records.Cycle` and the turn they belong to.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec.core.rates import TURN
from specdec.errors import SpecdecError, nearest_name_error
from specdec.policies.base import COLLAPSED_FRAC

ACTION = ["verified_tok", "expansions", "top_k"]  # total_tokens, depth and width as executed: Re-SpS's action
ANSWERS = ("expansions", "verify_nodes", "top_k")
_SUMS = ["new_tok", "accepted_tok", "verify_nodes", "verified_tok", "draft_calls", "candidates"]

# Quotients of sums over cycles: name -> (what is counted, what it is divided by). draft_calls = expansions + 1 is also the
# longest path a cycle can accept. Re-SpS's Table 6 gives a rate without saying of what (sheet 3.6): accepted_per_node is
# accepted / (TT - 1), accepted_per_level is accepted / (depth + 1). Its third candidate, accepted per root-to-leaf path,
# needs the number of leaves, which no row holds.
RATES = {
    "accepted_per_node": ("accepted_tok", "verify_nodes"),
    "accepted_per_level": ("accepted_tok", "draft_calls"),
    "accepted_per_candidate": ("accepted_tok", "candidates"),
    "new_per_verified_row": ("new_tok", "verified_tok"),
}


def cycle_facts(rows: pd.DataFrame, by="method") -> pd.DataFrame:
    """One row per value of `by` (a column or a list of columns), which stands in the index.

    rows: `Replayed.cycles` or cycles.parquet, with `by`; where repeats or seeds are columns, each decoding of a turn counts.
    cycles, turns; tau_pooled (new tokens over cycles, as LTD has it), tau_macro (mean over prompts of each one's own, as
    RADAR's code has it), tau_last_turn (pooled, of each prompt's last turn alone: what LTD's code records); calls_pooled
    and calls_macro (draft calls per cycle, RADAR's "average calls" is the second); rounds_per_turn and its deviation
    rounds_per_turn_sd (Re-SpS's "acceptance length" of Table 6: cycles per turn, so less is better); RATES, and
    <rate>_macro, the mean over turns of each one's own; first_accepted_frac (cycles that accept at least one draft token);
    all_levels_frac (cycles that accept a token at every drafted depth: deeper might have paid); the columns of `actions`.
    SpecdecError for missing columns or no rows.
    """
    by = [by] if isinstance(by, str) else list(by)
    rows = _checked(rows, by)
    decoding = [*by, *TURN, *(name for name in ("repeat", "seed") if name in rows and name not in by)]
    turns = rows.groupby(decoding, sort=False)[_SUMS].sum()
    turns["cycles"] = rows.groupby(decoding, sort=False).size()
    prompts = turns.groupby([name for name in decoding if name != "turn"], sort=False).sum()
    sums, per_turn = turns.groupby(by, sort=False).sum(), turns.groupby(by, sort=False)
    found = pd.DataFrame({"cycles": sums["cycles"], "turns": per_turn.size()})
    found["tau_pooled"] = sums["new_tok"] / sums["cycles"]
    found["tau_macro"] = _mean_of(prompts["new_tok"] / prompts["cycles"], by)
    last = turns.groupby([name for name in decoding if name != "turn"], sort=False).tail(1)
    last = last.groupby(by, sort=False).sum()
    found["tau_last_turn"] = last["new_tok"] / last["cycles"]
    found["calls_pooled"] = sums["draft_calls"] / sums["cycles"]
    found["calls_macro"] = _mean_of(prompts["draft_calls"] / prompts["cycles"], by)
    found["rounds_per_turn"], found["rounds_per_turn_sd"] = per_turn["cycles"].mean(), per_turn["cycles"].std()
    for name, (counted, divisor) in RATES.items():
        found[name] = _quotient(sums[counted], sums[divisor])
        found[f"{name}_macro"] = _mean_of(_quotient(turns[counted], turns[divisor]), by)
    found["first_accepted_frac"] = _mean_of((rows["accepted_tok"] > 0).set_axis(_index(rows, by)), by)
    whole = rows["accepted_tok"] >= rows["draft_calls"]
    found["all_levels_frac"] = _mean_of(whole.set_axis(_index(rows, by)), by)
    return found.join(actions(rows, by))


def actions(rows: pd.DataFrame, by="method") -> pd.DataFrame:
    """What is answered, by value of `by`: unique_actions (distinct ACTION as executed, Re-SpS's Tables 2 and 5),
    effective_actions (exp of the entropy of their shares: rare ones hardly count), commonest ("total_tokens/depth/top_k"),
    commonest_frac, and collapsed: one action makes up COLLAPSED_FRAC of the cycles or more."""
    by = [by] if isinstance(by, str) else list(by)
    shares = action_shares(rows, by)
    found = []
    for key, part in shares.groupby(by, sort=False):
        share, most = part["share"].to_numpy(), part.iloc[0]
        found.append(
            {
                **dict(zip(by, key, strict=True)),
                "unique_actions": len(part),
                "effective_actions": float(np.exp(-(share * np.log(share)).sum())),
                "commonest": "/".join(str(most[name]) for name in ACTION),
                "commonest_frac": most["share"],
                "collapsed": bool(most["share"] >= COLLAPSED_FRAC),
            }
        )
    return pd.DataFrame(found).set_index(by)


def action_shares(rows: pd.DataFrame, by="method", columns=ACTION) -> pd.DataFrame:
    """The histogram of actions: `by`, `columns`, cycles, share (of the cycles of that `by`), commonest first."""
    by = [by] if isinstance(by, str) else list(by)
    rows = _checked(rows, by, [*columns])
    counts = rows.groupby([*by, *columns], sort=False).size().rename("cycles").reset_index()
    counts["share"] = counts["cycles"] / counts.groupby(by)["cycles"].transform("sum")
    places = [counts.groupby(by, sort=False).ngroup(), -counts["cycles"]]
    return counts.loc[pd.concat(places, axis=1).sort_values([0, "cycles"], kind="stable").index].reset_index(drop=True)


def answer_shares(rows: pd.DataFrame, by="method", columns=ANSWERS) -> pd.DataFrame:
    """`action_shares` of every column alone, in long form: `by`, answer (the column's name), value, cycles, share."""
    by = [by] if isinstance(by, str) else list(by)
    parts = [action_shares(rows, by, [name]).rename(columns={name: "value"}).assign(answer=name) for name in columns]
    return pd.concat(parts, ignore_index=True)[[*by, "answer", "value", "cycles", "share"]]


def _checked(rows: pd.DataFrame, by: list[str], needed=(*TURN, *_SUMS, *ACTION)) -> pd.DataFrame:
    """`rows` without those of methods that have no cycles of their own; SpecdecError for missing columns or no rows."""
    for name in (*by, *needed):
        if name not in rows:
            raise nearest_name_error("column of the cycles", name, rows.columns)
    if rows.empty:
        raise SpecdecError("there are no cycles to look at; decode or replay with keep_cycles=True first.")
    return rows


def _index(rows: pd.DataFrame, by: list[str]) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows[by])


def _mean_of(values: pd.Series, by: list[str]) -> pd.Series:
    return values.groupby(level=by, sort=False).mean()


def _quotient(counted: pd.Series, divisor: pd.Series) -> pd.Series:
    """NaN where nothing was there to be accepted."""
    return counted / divisor.where(divisor > 0)
