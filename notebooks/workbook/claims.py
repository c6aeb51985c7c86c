"""The ledger of claims: what the four papers and this workbook say, and whether rows of parquet bear it out.

figures/claims.yml holds the claims, each with the test that decides it. A test compares numbers with a threshold; where they
were measured, their 95 % interval decides (each on its own: with so many claims some intervals miss by chance). Numbers that a
paper prints are compared as they stand. Without rows there is no verdict. Knows nothing about any method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.identity import identified
from specdec.report import provenance

from workbook import items

HOLDS, FAILS, UNDECIDED, UNTESTABLE = "holds", "does not hold", "undecided", "not testable at this scale"
PAIRS = ("smollm2", "small", "tiny")  # whose rows decide: the first that was measured
LEAST_PROMPTS = 8  # fewer say nothing about their spread
SUBJECTS = ("method", "printed numbers", "ours")


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim. where: its place in the paper. item: of the papers' items, the one it is about.

    test: how it is decided, see `TESTS`; without one `why` says what would be needed. about: the rows a test reads.
    """

    id: str
    paper: str
    says: str
    where: str
    item: str = ""
    test: dict = dataclasses.field(default_factory=dict)
    why: str = ""

    @property
    def about(self) -> str:
        """'ours', 'printed numbers' (whether a paper's own bear it out) or 'method' (whether it is so here)."""
        return "ours" if self.paper == "ours" else "printed numbers" if "published" in self.test else "method"


def read_claims() -> dict[str, Claim]:
    """{id: Claim} of figures/claims.yml; SpecdecError for anything misspelt, listed twice or with neither test nor why."""
    claims = items.read_listed(runs.workbook() / "figures" / "claims.yml", Claim)
    for claim in claims.values():
        if bool(claim.test) == bool(claim.why):
            raise SpecdecError(f"claim {claim.id} needs either a test, or why there is none.")
        check(claim)
    return claims


def check(claim: Claim) -> None:
    """SpecdecError for a kind of test or a key that there is not, or an item that is none."""
    if claim.item:
        items.find_item(claim.item)
    if claim.test:
        if claim.test.get("kind") not in TESTS:
            raise nearest_name_error(f"kind of test in claim {claim.id}", str(claim.test.get("kind")), TESTS)
        for name in claim.test:
            if name not in KEYS:
                raise nearest_name_error(f"key in the test of claim {claim.id}", name, KEYS)


KEYS = {
    "kind": "one of TESTS",
    "published": "an item, or several: the numbers that the paper prints",
    "run": "name of the runs that measured it; of equal ones the newest counts",
    "table": "one of their tables, or `results` for what they noted at their end",
    "with": "facts of the run, such as temperature",
    "where": "column -> value, list of values, or {not: value}",
    "value": "the column that is compared; <value>_low and <value>_high are its interval",
    "ends": "the interval's columns where they are called otherwise",
    "exact": "true: the number counts as it stands; for counts, and for shares that have no interval",
    "over": "ratio_above: the rows to divide by, as `where`",
    "first": "difference_above: rows, as `where`",
    "second": "difference_above: the rows to subtract",
    "absolute": "true: the size of the difference",
    "match": "columns that rows to compare have in common",
    "by": "ordering: the column whose values are ordered",
    "order": "ordering: those values, largest first; or several such lists",
    "whole": "adds_up: the row or column that stands for all others, as `where`",
    "of": "adds_up: mean or sum",
    "is": "share: what the value must be",
    "stat": "extreme: max, min or mean",
    "stated": "extreme: what the paper says it is",
    "above": "the threshold",
    "below": "the same, the other way round",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One number that a test compares, and its interval; NaN ends where there is none."""

    name: str
    value: float
    low: float = np.nan
    high: float = np.nan

    def __str__(self) -> str:
        exact = np.isnan(self.low) or self.low == self.high
        return f"{self.name} {self.value:.4g}" + ("" if exact else f" [{self.low:.4g}, {self.high:.4g}]")


def runs_of(test: dict, scale: str = "laptop", pair: str = "", shipped: bool = False) -> list[runs.Run]:
    """The runs whose rows a test reads; none where nothing was measured, or for what a paper prints."""
    for name in ([pair] if pair else PAIRS) if "run" in test else ():
        found = items.measured(test["run"], scale, shipped, pair=name, **test.get("with", {}))
        found = [run for run in found if test["table"] == "results" or run.path(f"{test['table']}.parquet").is_file()]
        if found:
            return found[:1]
    return []


def rows_of(test: dict, sources: list[runs.Run]) -> pd.DataFrame:
    """The rows of a test: of these runs, or what papers print."""
    if "published" in test:
        named = [test["published"]] if isinstance(test["published"], str) else test["published"]
        return pd.concat([items.read_published(*name.split("/")) for name in named], ignore_index=True)
    return pd.concat([_table(run, test) for run in sources], ignore_index=True)


def _table(run, test: dict) -> pd.DataFrame:
    if test["table"] == "results":
        return pd.json_normalize(run.record()["results"])
    return identified(run.read_table(test["table"]))


def select(table: pd.DataFrame, where: dict) -> pd.DataFrame:
    """Rows whose columns have these values."""
    for name, wanted in where.items():
        if name not in table:
            raise nearest_name_error("column", name, table.columns)
        excluded = isinstance(wanted, dict)
        if name == "suite" and wanted == "all" and table["suite"].nunique() == 1:
            continue  # of one suite there are no pooled rows
        values = wanted["not"] if excluded else wanted
        inside = (
            table[name].astype(str).isin([str(value) for value in (values if isinstance(values, list) else [values])])
        )
        table = table[~inside if excluded else inside]
    return table


def parts_of(table: pd.DataFrame, test: dict, where: dict | None = None) -> pd.DataFrame:
    """The selected rows as columns name, value, low, high and `match`. Printed and exact numbers are their own interval."""
    rows = select(table, {**test.get("where", {}), **(where or {})})
    value = test.get("value", "value")
    if value not in rows:
        raise nearest_name_error("column", value, rows.columns)
    numbers = pd.to_numeric(rows[value].astype(float) if rows[value].dtype == bool else rows[value], errors="coerce")
    ends = test.get("ends", [f"{value}_low", f"{value}_high"])
    exact = "published" in test or test.get("exact", False)
    low, high = (numbers if exact else rows.get(end, pd.Series(np.nan, rows.index)) for end in ends)
    if not exact:  # an interval without a width comes of rows that are all the same, or of too few
        silent = (low == high) | (rows.get("prompts", pd.Series(LEAST_PROMPTS, rows.index)) < LEAST_PROMPTS)
        low, high = low.mask(silent), high.mask(silent)
    shown = [name for name in ("target", "drafter", "method", "row", "choice", "suite", "column") if name in rows]
    names = [" ".join(map(str, row)) or value for row in rows[shown].itertuples(index=False)]
    matched = {name: rows[name] for name in test.get("match", ())}
    parts = pd.DataFrame({"name": names, "value": numbers, "low": low, "high": high, **matched})
    return parts[parts["value"].notna()].reset_index(drop=True)


def _paired(table: pd.DataFrame, test: dict, first: dict, second: dict) -> pd.DataFrame:
    """Parts of `first` beside those of `second` with the same `match`: columns _x and _y."""
    both = [parts_of(table, test, where) for where in (first, second)]
    how = {"on": test["match"]} if test.get("match") else {"how": "cross"}
    return both[0].merge(both[1], **how)


def _averaged(name: str, values: np.ndarray) -> Part:
    """The mean of measurements of the same thing, with Student's interval."""
    from scipy.stats import t

    mean = float(np.mean(values))
    reach = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return Part(name, mean, mean - reach, mean + reach)


def ratio_above(table: pd.DataFrame, test: dict) -> list[Part]:
    """Every selected value, or its ratio to the value of the matching row of `over`."""
    if "over" not in test:
        parts = parts_of(table, test)
        return [Part(*row) for row in parts[["name", "value", "low", "high"]].itertuples(index=False)]
    both = _paired(table, test, {}, test["over"])
    low, high = both["low_x"] / both["high_y"], both["high_x"] / both["low_y"]
    return [Part(*row) for row in zip(both["name_x"], both["value_x"] / both["value_y"], low, high, strict=True)]


def difference_above(table: pd.DataFrame, test: dict) -> list[Part]:
    """Values of `first` minus those of `second`: one by one where printed, else their mean over the matching rows."""
    both = _paired(table, test, test["first"], test["second"])
    change = (both["value_x"] - both["value_y"]).to_numpy()
    change = np.abs(change) if test.get("absolute") else change
    if "published" in test or test.get("exact"):
        return [Part(name, value, value, value) for name, value in zip(both["name_x"], change, strict=True)]
    if len(both) == 1:
        return [
            Part(both["name_x"][0], change[0], *(both["low_x"] - both["high_y"]), *(both["high_x"] - both["low_y"]))
        ]
    return [_averaged(test.get("value", "value"), change)] if len(both) else []


def ordering(table: pd.DataFrame, test: dict) -> list[Part]:
    """The differences of neighbours in `order`: all must be above the threshold (default 0)."""
    orders = test["order"] if isinstance(test["order"][0], list) else [test["order"]]
    parts = []
    for order in orders:
        for larger, smaller in zip(order, order[1:], strict=False):
            sides = {"first": {test["by"]: larger}, "second": {test["by"]: smaller}}
            for part in difference_above(table, {**test, **sides}):
                parts.append(dataclasses.replace(part, name=f"{part.name} minus {smaller}"))
    return parts


def share(table: pd.DataFrame, test: dict) -> list[Part]:
    """The share of selected rows whose value is `is`, with Wilson's interval; all or nothing is counted exactly."""
    from scipy.stats import binomtest

    rows = select(table, test.get("where", {}))
    if rows.empty:
        return []
    if test["value"] not in rows:
        raise nearest_name_error("column", test["value"], rows.columns)
    good, count = int((rows[test["value"]] == test["is"]).sum()), len(rows)
    name = f"{good} of {count}"
    if test.get("exact"):
        return [Part(name, good / count, good / count, good / count)]
    interval = binomtest(good, count).proportion_ci(method="wilson")
    return [Part(name, good / count, interval.low, interval.high)]


def adds_up(table: pd.DataFrame, test: dict) -> list[Part]:
    """How far each `whole` is from the mean or sum of the other rows with the same `match`."""
    whole = parts_of(table, test, test["whole"])
    others = parts_of(table, test, {name: {"not": value} for name, value in test["whole"].items()})
    grouped = others.groupby(test["match"])["value"] if test["match"] else others.groupby(lambda _: 0)["value"]
    totals = grouped.agg(test["of"]).rename("total")
    both = (
        whole.merge(totals, left_on=test["match"], right_index=True) if test["match"] else whole.assign(total=totals[0])
    )
    apart = (both["value"] - both["total"]).abs()
    return [Part(name, value, value, value) for name, value in zip(both["name"], apart, strict=True)]


def extreme(table: pd.DataFrame, test: dict) -> list[Part]:
    """How far the largest, smallest or mean value (or ratio) is from what is stated."""
    values = [part.value for part in ratio_above(table, test)]
    if not values:
        return []
    found = float(getattr(np, test["stat"])(values))
    return [Part(f"{test['stat']} {found:.4g}, stated {test['stated']:g}, apart", *[abs(found - test["stated"])] * 3)]


TESTS: dict[str, Callable] = {
    test.__name__: test for test in (ratio_above, difference_above, ordering, share, adds_up, extreme)
}


def decide(parts: list[Part], test: dict) -> str:
    """HOLDS where all intervals lie on the right side, FAILS where one lies on the wrong side, else UNDECIDED."""
    if not parts:
        return UNDECIDED
    sign = -1.0 if "below" in test else 1.0
    limit = sign * float(test.get("below", test.get("above", 0.0)))
    sides = [(part.low, part.high) if sign > 0 else (-part.high, -part.low) for part in parts]
    if any(high <= limit for _, high in sides):  # a missing end compares as neither
        return FAILS
    return HOLDS if all(low > limit for low, _ in sides) else UNDECIDED


def judge(claim: Claim, scale: str = "laptop", pair: str = "", shipped: bool = False) -> dict:
    """The claim's row of the ledger: verdict, evidence (the number furthest to the wrong side), parts, source."""
    row = dict(id=claim.id, paper=claim.paper, about=claim.about, says=claim.says, where=claim.where, item=claim.item)
    if not claim.test:
        return {**row, "verdict": UNTESTABLE, "evidence": claim.why, "parts": 0, "source": ""}
    sources = runs_of(claim.test, scale, pair, shipped)
    if "run" in claim.test and not sources:
        note = f"no rows yet: a run {claim.test['run']!r} would write {claim.test['table']}"
        return {**row, "verdict": UNDECIDED, "evidence": note, "parts": 0, "source": ""}
    source = provenance.of(sources).label if sources else "printed"
    try:
        parts = TESTS[claim.test["kind"]](rows_of(claim.test, sources), claim.test)
    except SpecdecError as error:  # rows of another make; the other claims go on
        return {**row, "verdict": UNDECIDED, "evidence": str(error), "parts": 0, "source": source}
    if not parts:
        return {**row, "verdict": UNDECIDED, "evidence": "no such rows", "parts": 0, "source": source}
    sign = -1.0 if "below" in claim.test else 1.0
    worst = min(parts, key=lambda part: sign * part.value)
    limit = " ".join(f"{name} {claim.test[name]:g}" for name in ("above", "below") if name in claim.test) or "above 0"
    evidence = f"{worst}; must be {limit}"
    return {**row, "verdict": decide(parts, claim.test), "evidence": evidence, "parts": len(parts), "source": source}


def ledger(scale: str = "laptop", pair: str = "", shipped: bool = False) -> pd.DataFrame:
    """One row per claim, decided now: id, paper, about, says, where, item, verdict, evidence, parts, source.

    pair: whose rows decide, default the first of PAIRS that was measured. shipped: only by rows that came with the checkout.
    """
    return pd.DataFrame([judge(claim, scale, pair, shipped) for claim in read_claims().values()])


def sources(scale: str = "laptop", pair: str = "", richest: bool = False) -> list[runs.Run]:
    """The runs that decide the ledger. richest: not they, but those that came with the checkout, where these hold more than
    twice as many rows."""
    used = {}
    for claim in read_claims().values():
        found = runs_of(claim.test, scale, pair)
        if richest and items.fewer_rows(found, shipped := runs_of(claim.test, scale, pair, shipped=True)):
            found = shipped
        used |= {run.key: run for run in found}
    return list(used.values())


def summary(verdicts: pd.DataFrame) -> pd.DataFrame:
    """How many claims hold, by paper and by what they are about."""
    counts = verdicts.groupby(["paper", "about"], sort=False)["verdict"].value_counts().unstack(fill_value=0)
    counts = counts.reindex(columns=[HOLDS, FAILS, UNDECIDED, UNTESTABLE], fill_value=0)
    return counts.rename_axis(columns=None).reset_index()
