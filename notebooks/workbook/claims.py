"""The ledger of claims: what the four papers and this workbook say, and whether rows confirm it.

figures/claims.yml holds the claims, each with the test that decides it; `verdicts` says how. All
runs of all pairs that measured a claim decide it together. Without rows there is no verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.stats import binomtest, wilcoxon

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation import stats
from specdec.report import provenance

from workbook import evidence, items, verdicts
from workbook.method_rows import identified, mark_of_noise
from workbook.verdicts import HOLDS, LEAST_PROMPTS

# places of the shipped pairs, the largest first
PAIRS = {"smollm2": 0, "small": 1, "tiny": 2}
PRINTED = "printed numbers"
SOURCE = ["run_key", "run_table"]  # columns of the rows of a test: where each comes from
CLAIM_COLUMNS = ("id", "paper", "about", "says", "where", "item")  # of the ledger
# of the steps that the paper trains for; below, a training that shows nothing was too short
LEAST_TRAINED = 0.1
KEYS = (  # figures/claims.yml says what they mean
    *("kind", "published", "run", "table", "with", "largest", "beside", "trained"),
    *("where", "value", "ends", "exact", "over", "first", "second", "rate", "absolute"),
    *("match", "by", "order", "whole", "of", "is", "stat", "stated", "above", "below"),
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim. where: its place in the paper. item: of the papers' items, the one it is about.

    test: how it is decided (`KEYS`); without one `why` says what would be needed.
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
        """Whose numbers decide: "ours", "printed numbers" of a paper, or the "method" here."""
        if self.paper == "ours":
            return "ours"
        return PRINTED if "published" in self.test else "method"

    @property
    def limit(self) -> tuple[float, bool]:
        """The threshold, and whether numbers must be below it."""
        if "below" in self.test:
            return float(self.test["below"]), True
        return float(self.test.get("above", 0.0)), False


def read_claims() -> dict[str, Claim]:
    """{id: Claim} of figures/claims.yml; SpecdecError for anything misspelt or listed twice."""
    claims = items.read_listed(runs.workbook() / "figures" / "claims.yml", Claim)
    for claim in claims.values():
        if bool(claim.test) == bool(claim.why):
            raise SpecdecError(f"claim {claim.id} needs either a test, or why there is none.")
        if claim.item:
            items.find_item(claim.item)
        for name in claim.test:
            if name not in KEYS:
                raise nearest_name_error(f"key in the test of claim {claim.id}", name, KEYS)
        if claim.test and claim.test["kind"] not in TESTS:
            raise nearest_name_error(f"test of claim {claim.id}", claim.test["kind"], TESTS)
    return claims


def listed(value) -> list:
    return value if isinstance(value, list) else [value]


def runs_of(test: dict, scale="laptop", pair: str = "", shipped: bool = False) -> list[runs.Run]:
    """The runs whose rows a test reads, of all pairs or of one; none for what a paper prints.

    A run that other processes disturbed is left out.
    """
    if "run" not in test:
        return []
    facts = {"pair": pair or None, **test.get("with", {})}
    chosen = []
    for run in items.measured(test["run"], scale, shipped, **facts):
        results = run.record()["results"] or {}
        holds = any(_holds(run, table) for table in listed(test["table"]))
        if holds and not results.get("crowded"):
            chosen.append(run)
    if not test.get("largest") or not chosen:
        return chosen
    # a pair that does not ship counts as larger than all that do
    by_place: dict[int, list[runs.Run]] = {}
    for run in chosen:
        place = PAIRS.get(provenance.of([run]).rows[0]["pair"], -1)
        by_place.setdefault(place, []).append(run)
    return by_place[min(by_place)]


def _holds(run: runs.Run, table: str) -> bool:
    return table == "results" or run.path(f"{table}.parquet").is_file()


def rows_of(test: dict, sources: list[runs.Run]) -> pd.DataFrame:
    """The rows of a test, with the columns SOURCE: of these runs, or what papers print."""
    parts = []
    for name in listed(test.get("published", [])):
        printed = items.read_published(*name.split("/"))
        parts.append(printed.assign(run_key="", run_table=""))
    for run in sources:
        for table in listed(test["table"]):
            if table == "results":
                rows = pd.json_normalize(run.record()["results"])
            elif _holds(run, table):
                rows = identified(run.read_table(table))
                if "crowded" in rows:
                    rows = rows[~rows["crowded"].fillna(False).astype(bool)]
            else:
                continue
            parts.append(rows.assign(run_key=run.key, run_table=table))
    return pd.concat(parts, ignore_index=True)


def select(table: pd.DataFrame, where: dict) -> pd.DataFrame:
    """Rows whose columns have these values."""
    for name, condition in where.items():
        if name not in table:
            raise nearest_name_error("column", name, table.columns)
        # of one suite there are no pooled rows
        if name == "suite" and condition == "all" and table["suite"].nunique() == 1:
            continue
        excluded = isinstance(condition, dict)
        values = listed(condition["not"] if excluded else condition)
        inside = table[name].astype(str).isin(list(map(str, values)))
        table = table[inside != excluded]
    return table


def parts_of(table: pd.DataFrame, test: dict, where: dict | None = None) -> pd.DataFrame:
    """The selected rows as columns name, value, low, high, prompts, still, SOURCE and `match`.

    Of an interval over seeds and one over prompts the wider end counts on each side.
    """
    # 1. the rows and their numbers
    rows = select(table, {**test.get("where", {}), **(where or {})})
    value = test.get("value", "value")
    if value not in rows:
        raise nearest_name_error("column", value, rows.columns)
    numbers = pd.to_numeric(rows[value], errors="coerce").astype(float)
    parts = pd.DataFrame({"name": _names(rows, value), "value": numbers}, index=rows.index)
    # 2. their intervals
    exact = "published" in test or test.get("exact", False)
    if not exact:
        low, high = test.get("ends", [f"{value}_low", f"{value}_high"])
        parts["low"] = np.fmin(_column(rows, low), _column(rows, f"{value}_prompts_low"))
        parts["high"] = np.fmax(_column(rows, high), _column(rows, f"{value}_prompts_high"))
    # 3. what they rest on and where they come from
    parts["prompts"] = rows.get("prompts", pd.Series(0, rows.index)).fillna(0).astype(int)
    for name in (*SOURCE, *test.get("match", ())):
        parts[name] = rows[name]
    parts = parts[parts["value"].notna()].reset_index(drop=True)
    if exact:
        return _exactly(parts, parts["value"])
    return _with_still(parts, counted="prompts" in rows)


def _names(rows: pd.DataFrame, value: str) -> list[str]:
    """What each number is of, from the columns that say it; else the column's own name."""
    columns = ("target", "drafter", "method", "row", "choice", "suite", "column")
    labels = rows[[name for name in columns if name in rows]]
    if "suite" in labels:
        labels = labels.replace({"suite": {"all": "all suites"}})
    plain = value.rpartition(".")[2].removesuffix("_frac").replace("_", " ")
    names = []
    for row in labels.itertuples(index=False):
        words = dict.fromkeys(str(word) for word in row if pd.notna(word))
        names.append(", ".join(words) or plain)
    return names


def _column(rows: pd.DataFrame, name: str) -> pd.Series:
    """A column of numbers, NaN where there is none."""
    return rows.get(name, pd.Series(np.nan, rows.index)).astype(float)


def _with_still(parts: pd.DataFrame, counted: bool = True) -> pd.DataFrame:
    """`parts` without the intervals that say nothing.

    Those have no width (`still`) or, where prompts are counted, rest on too few.
    """
    still = parts["low"] == parts["high"]
    silent = still | ((parts["prompts"] < LEAST_PROMPTS) & counted)
    low = parts["low"].mask(silent)
    high = parts["high"].mask(silent)
    return parts.assign(low=low, high=high, still=still)


def _exactly(parts: pd.DataFrame, values: pd.Series) -> pd.DataFrame:
    """`parts` with these numbers, which have no spread."""
    return parts.assign(value=values, low=values, high=values, still=False)


def _part(name: str, value: float, source, **fields) -> dict:
    """One row of parts, whose number has no spread; fields: what else is known of it."""
    row = {"name": name, "value": value, "low": value, "high": value, "prompts": 0, "still": False}
    return {**row, **dict(zip(SOURCE, source, strict=True)), **fields}


def ratio_above(table: pd.DataFrame, test: dict, where: dict | None = None) -> pd.DataFrame:
    """Every selected value, or its ratio to the value of the matching row of `over`."""
    rows = parts_of(table, test, where)
    if "over" not in test:
        return rows
    divisors = parts_of(table, test, {**(where or {}), **test["over"]})
    pairs_of = rows.merge(divisors, on=[*SOURCE, *test.get("match", ())], suffixes=("", "_y"))
    quotient = pairs_of["value"] / pairs_of["value_y"]
    low = pairs_of["low"] / pairs_of["high_y"]
    high = pairs_of["high"] / pairs_of["low_y"]
    return pairs_of.assign(value=quotient, low=low, high=high)[rows.columns]


def difference_above(table: pd.DataFrame, test: dict) -> pd.DataFrame:
    """Values of `first` minus the matching ones of `second`, of numbers without an interval."""
    first = ratio_above(table, test, test["first"])
    second = ratio_above(table, test, test["second"])
    pairs_of = first.merge(second, on=[*SOURCE, *test.get("match", ())], suffixes=("", "_y"))
    change = pairs_of["value"] - pairs_of["value_y"]
    if test.get("absolute"):
        change = change.abs()
    return _exactly(pairs_of, change)


def paired_ratio(table: pd.DataFrame, test: dict) -> pd.DataFrame:
    """The `rate` of `first` over that of `second`, prompt by prompt, averaged over seeds."""
    names = {"over": "value", "over_low": "low", "over_high": "high"}
    parts = [pd.DataFrame()]
    for name, source, rows in _sides(table, test):
        ratios = stats.summarise(rows, {"over": "second"}, rate=tuple(test["rate"]))
        # the last row is that of all suites together
        ratios = ratios[ratios["method"] == "first"].tail(1).rename(columns=names)
        where = dict(zip(SOURCE, source, strict=True))
        parts.append(_with_still(ratios).assign(name=name, **where))
    return pd.concat(parts, ignore_index=True)


def signed_rank(table: pd.DataFrame, test: dict) -> pd.DataFrame:
    """Wilcoxon's p-value of "the `rate` of `first` is not above that of `second`", over prompts."""
    parts = []
    above, under = test["rate"]
    for name, source, rows in _sides(table, test):
        quantities = stats.per_prompt(rows, test["rate"])
        rates = (quantities[above] / quantities[under]).T.groupby(level="method").mean().T
        tested = wilcoxon(rates["first"], rates["second"], alternative="greater")
        name = f"{name}, Wilcoxon's test"
        parts.append(_part(name, float(tested.pvalue), source, prompts=len(rates)))
    return pd.DataFrame(parts)


def _sides(table: pd.DataFrame, test: dict):
    """(name, source, rows of methods "first" and "second") of every table that has both."""
    sides = [" ".join(map(str, test[side].values())) for side in ("first", "second")]
    for source, rows in select(table, test.get("where", {})).groupby(SOURCE):
        first = select(rows, test["first"]).assign(method="first")
        second = select(rows, test["second"]).assign(method="second")
        if len(first) and len(second):
            yield " over ".join(sides), source, pd.concat([first, second])


def ordering(table: pd.DataFrame, test: dict) -> pd.DataFrame:
    """The differences of neighbours in `order`: all must be above the threshold (default 0)."""
    orders = test["order"]
    if not isinstance(orders[0], list):
        orders = [orders]
    parts = []
    for order in orders:
        for larger, smaller in zip(order, order[1:], strict=False):
            sides = {"first": {test["by"]: larger}, "second": {test["by"]: smaller}}
            rows = difference_above(table, {**test, **sides})
            if len(rows):
                parts.append(rows.assign(name=rows["name"] + f", minus {smaller}"))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def share(table: pd.DataFrame, test: dict) -> pd.DataFrame:
    """The share of selected rows of each run whose value is `is`, with Wilson's interval."""
    rows = select(table, test.get("where", {}))
    value = test["value"]
    if not rows.empty and value not in rows:
        raise nearest_name_error("column", value, rows.columns)
    parts = []
    for source, group in rows.groupby(SOURCE):
        good = int((group[value] == test["is"]).sum())
        fields = {}
        if not test.get("exact"):
            interval = binomtest(good, len(group)).proportion_ci(method="wilson")
            fields = {"low": interval.low, "high": interval.high, "prompts": len(group)}
        parts.append(_part(f"{good} of {len(group)}", good / len(group), source, **fields))
    return pd.DataFrame(parts)


def adds_up(table: pd.DataFrame, test: dict) -> pd.DataFrame:
    """How far each `whole` is from the mean or sum of the other rows with the same `match`."""
    totals_printed = parts_of(table, test, test["whole"])
    rest = parts_of(table, test, {name: {"not": value} for name, value in test["whole"].items()})
    totals = rest.groupby(test["match"])["value"].agg(test["of"]).rename("total")
    totals_printed = totals_printed.merge(totals, left_on=test["match"], right_index=True)
    return _exactly(totals_printed, (totals_printed["value"] - totals_printed["total"]).abs())


def extreme(table: pd.DataFrame, test: dict) -> pd.DataFrame:
    """How far the largest, smallest or mean value (or ratio) is from what is stated."""
    values = ratio_above(table, test)["value"]
    if values.empty:
        return pd.DataFrame()
    number = float(getattr(np, test["stat"])(values))
    which = {"max": "The largest", "min": "The smallest", "mean": "The mean"}[test["stat"]]
    sentence = f"{which} is {number:.4g}, the paper says {test['stated']:g}"
    return pd.DataFrame([_part(sentence, abs(number - test["stated"]), ("", ""))])


TESTS: dict[str, Callable] = {
    "ratio_above": ratio_above,
    "difference_above": difference_above,
    "paired_ratio": paired_ratio,
    "signed_rank": signed_rank,
    "ordering": ordering,
    "share": share,
    "adds_up": adds_up,
    "extreme": extreme,
}


@dataclasses.dataclass
class Judged:
    """What the rows of one claim say, before its family is known.

    verdict, why: in place of the verdict by numbers, "" where the numbers decide.
    """

    claim: Claim
    runs: list[runs.Run] = dataclasses.field(default_factory=list)
    parts: pd.DataFrame = dataclasses.field(default_factory=pd.DataFrame)
    finding: verdicts.Finding = verdicts.Finding()
    verdict: str = ""
    why: str = ""

    def row(self, p_value: float) -> dict:
        """The claim's row of the ledger at a p-value, adjusted or not."""
        claim = self.claim
        source = "printed" if "published" in claim.test else ""
        if self.runs:
            source = provenance.of(self.runs).label
        tested = p_value if self.finding.tested else None
        number = ""
        if len(self.parts):
            # the number furthest to the wrong side, among those with an interval where any has
            bounded = verdicts.bounded(self.parts)
            values = self.parts.loc[bounded | ~bounded.any(), "value"]
            worst = values.idxmin()
            if claim.limit[1]:
                worst = values.idxmax()
            number = evidence.sentence(self.parts.loc[worst], claim.test, tested)
        about = {name: getattr(claim, name) for name in CLAIM_COLUMNS}
        return about | {
            "verdict": self.verdict or self.finding.verdict(p_value),
            "evidence": ". ".join(filter(None, [number, self.why])),
            "parts": len(self.parts),
            "p_holm": np.nan if tested is None else tested,
            "source": source,
        }


def examine(claim: Claim, scale: str = "laptop", pair: str = "", shipped: bool = False) -> Judged:
    """The rows of a claim, and what they say by themselves."""
    test = claim.test
    judged = Judged(claim, verdict=verdicts.UNTESTABLE, why=claim.why[:1].upper() + claim.why[1:])
    if not test:
        return judged
    # 1. the runs
    judged.runs = runs_of(test, scale, pair, shipped)
    judged.verdict = verdicts.UNMEASURED
    if "run" in test and not judged.runs:
        judged.why = evidence.unmeasured(test, listed(test["table"]))
        return judged
    # 2. their numbers; rows of another version stop no other claim
    try:
        rows = rows_of(test, judged.runs)
        parts = TESTS[test["kind"]](rows, test).reset_index(drop=True)
    except SpecdecError as error:
        judged.why = str(error)
        return judged
    if parts.empty:
        judged.why = "The runs here hold none of the rows that it compares"
        return judged
    # 3. what they say
    judged.parts, judged.finding = parts, verdicts.weigh(parts, *claim.limit)
    judged.verdict, why = _exception(judged, rows)
    judged.why = ". ".join(filter(None, [why, mark_of_noise(rows)]))
    return judged


def _exception(judged: Judged, rows: pd.DataFrame) -> tuple[str, str]:
    """The verdict that takes the place of the one by numbers, and why; ("", "") for none."""
    test = judged.claim.test
    if judged.parts["still"].all():
        return verdicts.UNLEARNED, "What was trained does just what it did before"
    if judged.finding.verdict(judged.finding.p_value) != HOLDS:
        # a training that shows nothing may have been too short
        short = []
        for name, paper in test.get("trained", {}).items():
            trained = 0
            for run in judged.runs:
                # a run was given its steps, or noted them at its end
                facts = items.settings_of(run) | (run.record()["results"] or {})
                trained = max(trained, facts.get(name) or 0)
            if trained < LEAST_TRAINED * paper:
                unit = name.replace("_", " ")
                short.append(f"Only {trained:,} of {paper:,} {unit} were trained")
        if short:
            return verdicts.SHORT, ". ".join(short)
        return "", ""
    # a claim that holds as well for a method without learning says nothing about learning
    side = "first" if "first" in test else "where"
    for where in test.get("beside", ()):
        replaced = {**test, side: {**test.get(side, {}), "terms": "", **where}}
        parts = TESTS[test["kind"]](rows, replaced)
        beside = verdicts.weigh(parts, *judged.claim.limit)
        if beside.verdict(beside.p_value) == HOLDS:
            least = parts.loc[parts["value"].idxmin()]
            worst = evidence.number(least, test, judged.claim.limit[0])
            return verdicts.VACUOUS, f"What learned nothing meets it, too: {worst}"
    return "", ""


def ledger(scale: str = "laptop", pair: str = "", shipped: bool = False) -> pd.DataFrame:
    """One row per claim, decided now. p_holm: after Holm over the measured claims of a paper.

    pair: whose measurements are used, default all. shipped: only rows of the checkout.
    """
    claims = read_claims().values()
    judged = [examine(claim, scale, pair, shipped) for claim in claims]
    papers = pd.Series([claim.paper for claim in claims])
    p_values = pd.Series(1.0, papers.index)
    for places in papers.groupby(papers).groups.values():
        p_values[places] = verdicts.adjusted([judged[place].finding for place in places])
    return pd.DataFrame([claim.row(p) for claim, p in zip(judged, p_values, strict=True)])


def sources(scale: str = "laptop", pair: str = "", richest: bool = False) -> list[runs.Run]:
    """The runs that decide the ledger.

    richest: in their place those of the checkout, where these hold twice as many rows.
    """
    origins = {}
    for claim in read_claims().values():
        deciding = runs_of(claim.test, scale, pair)
        if richest:
            shipped = runs_of(claim.test, scale, pair, shipped=True)
            if items.fewer_rows(deciding, shipped):
                deciding = shipped
        origins |= {run.key: run for run in deciding}
    return list(origins.values())


def summary(judged: pd.DataFrame) -> pd.DataFrame:
    """How many claims have each verdict: a column per paper's method, its printed numbers, ours."""
    whose = []
    for paper, about in zip(judged["paper"], judged["about"], strict=True):
        name = items.PAPERS.get(paper, paper).partition(" (")[0]
        if about == PRINTED:
            name += ", printed"
        whose.append(name)
    counts = pd.crosstab(judged["verdict"], pd.Series(whose, judged.index, name="whose"))
    counts = counts.reindex([name for name in verdicts.VERDICTS if name in counts.index])
    return counts[list(dict.fromkeys(whose))].rename_axis(columns=None).reset_index()
