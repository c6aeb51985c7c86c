"""The ledger of claims: what the four papers and this workbook say, and whether recorded
measurements confirm it.

figures/claims.yml holds the claims, each with the test that decides it. A test compares numbers
with a threshold; `verdicts` says how numbers with intervals decide. Numbers that a paper prints are
compared without an interval. All runs of all pairs that measured a claim decide it together, or
those of the largest pair where its test says so; without rows there is no verdict. Knows nothing
about any method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd

from specdec import runs
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation import stats
from specdec.report import provenance

from workbook import evidence, items, verdicts
from workbook.method_rows import identified
from workbook.verdicts import HOLDS, LEAST_PROMPTS, Part

PAIRS = (
    "smollm2",
    "small",
    "tiny",
)  # those that ship, the largest first: the first with rows is the one that is drawn
PRINTED = "printed numbers"
SUBJECTS = ("method", PRINTED, "ours")
SOURCE = ["run_key", "run_table"]  # columns of the rows of a test: where each comes from
# of the steps that the paper trains for; below, a training that shows nothing was too short
LEAST_TRAINED = 0.1


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim. where: its place in the paper. item: of the papers' items, the one it is about.

    test: how it is decided, see `TESTS`; without one `why` says what would be needed. about: the
    rows a test reads.
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
        """'ours', 'printed numbers' (whether a paper's own confirm it) or 'method' (whether it is
        so here).
        """
        return "ours" if self.paper == "ours" else PRINTED if "published" in self.test else "method"


def read_claims() -> dict[str, Claim]:
    """{id: Claim} of figures/claims.yml; SpecdecError for anything misspelt, listed twice or with
    neither test nor why.
    """
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
            raise nearest_name_error(
                f"kind of test in claim {claim.id}", str(claim.test.get("kind")), TESTS
            )
        for name in claim.test:
            if name not in KEYS:
                raise nearest_name_error(f"key in the test of claim {claim.id}", name, KEYS)


KEYS = {
    "kind": "one of TESTS",
    "published": "an item, or several: the numbers that the paper prints",
    "run": "name of the runs that measured it; of equal ones the newest counts",
    "table": "one of their tables, or several that must agree; `results` is what they noted at their end",
    "with": "facts of the run, such as temperature",
    "largest": "true: of several pairs the largest that was measured decides alone",
    "beside": "rows of methods that learned nothing, each as `where`: the claim says nothing where it holds of one of them",
    "trained": "{parameter of the run, or what it noted at its end: steps that the paper trains for}",
    "where": "column -> value, list of values, or {not: value}",
    "value": "the column that is compared; <value>_low and <value>_high are its interval",
    "ends": "the interval's columns where they are called otherwise",
    "exact": "true: the number counts without an interval; for counts, and for shares that have no interval",
    "over": "the rows to divide by, as `where`",
    "first": "difference_above, paired_ratio: rows, as `where`",
    "second": "difference_above: the rows to subtract; paired_ratio: those to divide by",
    "rate": "paired_ratio, signed_rank: two columns, of which the first is divided by the second, such as [new_tok, time_ms]",
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


def runs_of(
    test: dict, scale: str = "laptop", pair: str = "", shipped: bool = False
) -> list[runs.Run]:
    """The runs whose rows a test reads, of all pairs or of one; none where nothing was measured, or
    for what a paper prints.

    A run that other processes disturbed is none.
    """
    if "run" not in test:
        return []
    found = items.measured(
        test["run"], scale, shipped, **{"pair": pair or None, **test.get("with", {})}
    )
    calm = [run for run in found if not (run.record()["results"] or {}).get("crowded")]
    return [run for run in calm if any(_holds(run, table) for table in _tables(test))]


def _of_largest(found: list[runs.Run]) -> list[runs.Run]:
    """The runs of the largest pair among these; one that does not ship counts as larger than all
    that do.
    """
    pairs = [provenance.of([run]).rows[0]["pair"] for run in found]
    places = [PAIRS.index(pair) if pair in PAIRS else -1 for pair in pairs]
    return [run for run, place in zip(found, places, strict=True) if place == min(places)]


def _tables(test: dict) -> list[str]:
    return [test["table"]] if isinstance(test["table"], str) else list(test["table"])


def _holds(run: runs.Run, table: str) -> bool:
    return table == "results" or run.path(f"{table}.parquet").is_file()


def rows_of(test: dict, sources: list[runs.Run]) -> pd.DataFrame:
    """The rows of a test, with the columns SOURCE: of these runs, or what papers print."""
    if "published" in test:
        named = [test["published"]] if isinstance(test["published"], str) else test["published"]
        printed = [items.read_published(*name.split("/")) for name in named]
        return pd.concat(printed, ignore_index=True).assign(run_key="", run_table="")
    parts = [
        _table(run, table).assign(run_key=run.key, run_table=table)
        for run in sources
        for table in _tables(test)
        if _holds(run, table)
    ]
    return pd.concat(parts, ignore_index=True)


def _table(run: runs.Run, table: str) -> pd.DataFrame:
    if table == "results":
        return pd.json_normalize(run.record()["results"])
    rows = identified(run.read_table(table))
    return rows[~rows["crowded"].fillna(False).astype(bool)] if "crowded" in rows else rows


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
            table[name]
            .astype(str)
            .isin([str(value) for value in (values if isinstance(values, list) else [values])])
        )
        table = table[~inside if excluded else inside]
    return table


def parts_of(table: pd.DataFrame, test: dict, where: dict | None = None) -> pd.DataFrame:
    """The selected rows as columns name, value, low, high, prompts, still, SOURCE and `match`.

    Printed and exact numbers are their own interval. A measured interval without a width is none:
    `still` says that nothing changed there. Where rows have an interval over seeds and one over
    prompts, the wider end counts on each side.
    """
    rows = select(table, {**test.get("where", {}), **(where or {})})
    value = test.get("value", "value")
    if value not in rows:
        raise nearest_name_error("column", value, rows.columns)
    numbers = pd.to_numeric(
        rows[value].astype(float) if rows[value].dtype == bool else rows[value], errors="coerce"
    )
    prompts = rows.get("prompts", pd.Series(0, rows.index)).fillna(0).astype(int)
    exact = "published" in test or test.get("exact", False)
    low, high = (
        (numbers, numbers)
        if exact
        else _ends(rows, value, test.get("ends", [f"{value}_low", f"{value}_high"]))
    )
    shown = [
        name
        for name in ("target", "drafter", "method", "row", "choice", "suite", "column")
        if name in rows
    ]
    plain = value.rpartition(".")[2].removesuffix("_frac").replace("_", " ")
    named = (
        rows[shown].replace({"suite": {"all": "all suites"}}) if "suite" in shown else rows[shown]
    )
    names = [
        ", ".join(dict.fromkeys(str(one) for one in row if pd.notna(one))) or plain
        for row in named.itertuples(index=False)
    ]
    kept = {name: rows[name] for name in (*SOURCE, *test.get("match", ()))}
    parts = dict(name=names, value=numbers, low=low, high=high, prompts=prompts)
    parts = pd.DataFrame({**parts, **kept})
    parts = parts[parts["value"].notna()].reset_index(drop=True)
    return parts.assign(still=False) if exact else _told(parts, counted="prompts" in rows)


def _told(parts: pd.DataFrame, counted: bool = True) -> pd.DataFrame:
    """`parts` without the intervals that say nothing: of no width (`still`), or, where prompts are
    counted, from too few.
    """
    still = parts["low"] == parts["high"]
    silent = still | ((parts["prompts"] < LEAST_PROMPTS) & counted)
    return parts.assign(low=parts["low"].mask(silent), high=parts["high"].mask(silent), still=still)


def _ends(rows: pd.DataFrame, value: str, ends: list[str]) -> tuple[pd.Series, pd.Series]:
    empty = pd.Series(np.nan, rows.index)
    low, high = (rows.get(end, empty).astype(float) for end in ends)
    over_prompts = (
        rows.get(f"{value}_prompts_{end}", empty).astype(float) for end in ("low", "high")
    )
    return tuple(
        pick(one, other)
        for pick, one, other in zip((np.fmin, np.fmax), (low, high), over_prompts, strict=True)
    )


def _parts(rows: pd.DataFrame) -> list[Part]:
    """Rows of `parts_of` as Parts."""
    fields = ["name", "value", "low", "high", "prompts", *SOURCE, "still"]
    return [
        Part(name, value, low, high, prompts, (run, table), still)
        for name, value, low, high, prompts, run, table, still in rows[fields].itertuples(
            index=False
        )
    ]


def _values(table: pd.DataFrame, test: dict, where: dict | None = None) -> pd.DataFrame:
    """`parts_of` the selected rows, divided by the matching rows of `over` where a test has
    that.
    """
    rows = parts_of(table, test, where)
    if "over" not in test:
        return rows
    shared = [*SOURCE, *test.get("match", ())]
    both = rows.merge(
        parts_of(table, test, {**(where or {}), **test["over"]}), on=shared, suffixes=("", "_y")
    )
    ends = dict(low=both["low"] / both["high_y"], high=both["high"] / both["low_y"])
    return both.assign(value=both["value"] / both["value_y"], **ends)[rows.columns]


def _matched(table: pd.DataFrame, test: dict, first: dict, second: dict) -> pd.DataFrame:
    """Values of `first` beside those of `second` with the same `match`, of the same run and table;
    those of `second` with "_y".
    """
    both = [_values(table, test, where) for where in (first, second)]
    return both[0].merge(both[1], on=[*SOURCE, *test.get("match", ())], suffixes=("", "_y"))


def _averaged(name: str, values: pd.Series, source: tuple[str, str]) -> Part:
    """The mean of measurements of the same thing, with Student's interval."""
    from scipy.stats import t

    mean = float(np.mean(values))
    reach = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return Part(name, mean, mean - reach, mean + reach, source=source)


def ratio_above(table: pd.DataFrame, test: dict) -> list[Part]:
    """Every selected value, or its ratio to the value of the matching row of `over`."""
    return _parts(_values(table, test))


def difference_above(table: pd.DataFrame, test: dict) -> list[Part]:
    """Values of `first` minus those of `second`: one by one where printed, else their mean over the
    matching rows of a table.
    """
    both = _matched(table, test, test["first"], test["second"])
    change = both["value"] - both["value_y"]
    both["value"] = change.abs() if test.get("absolute") else change
    if "published" in test or test.get("exact"):
        return _parts(both.assign(low=both["value"], high=both["value"]))
    parts = []
    for source, rows in both.groupby(SOURCE):
        if len(rows) == 1:
            parts += _parts(
                rows.assign(low=rows["low"] - rows["high_y"], high=rows["high"] - rows["low_y"])
            )
        else:
            parts.append(_averaged(test.get("value", "value"), rows["value"], source))
    return parts


def paired_ratio(table: pd.DataFrame, test: dict) -> list[Part]:
    """The `rate` of `first` over that of `second`, prompt by prompt, averaged over seeds: paired
    intervals over prompts.
    """
    parts = []
    for source, rows in _sides(table, test):
        found = stats.summarise(rows, {"over": "second"}, rate=tuple(test["rate"]))
        names = {"over": "value", "over_low": "low", "over_high": "high"}
        rows = (
            found[found["method"] == "first"].tail(1).rename(columns=names)
        )  # all suites together
        rows = _told(rows).assign(name=_versus(test), **dict(zip(SOURCE, source, strict=True)))
        parts += _parts(rows)
    return parts


def signed_rank(table: pd.DataFrame, test: dict) -> list[Part]:
    """The p-value of "by prompts, the `rate` of `first` is not above that of `second`", by
    Wilcoxon's signed-rank test.
    """
    from scipy.stats import wilcoxon

    parts = []
    for source, rows in _sides(table, test):
        above, under = (stats.per_prompt(rows, test["rate"])[name] for name in test["rate"])
        rates = (above / under).T.groupby(level="method").mean().T
        p_value = float(wilcoxon(rates["first"], rates["second"], alternative="greater").pvalue)
        parts.append(
            Part(f"{_versus(test)}, Wilcoxon's test", p_value, p_value, p_value, len(rates), source)
        )
    return parts


def _sides(table: pd.DataFrame, test: dict):
    """(source, rows of both sides, which are the methods "first" and "second") of every table that
    has both.
    """
    for source, rows in select(table, test.get("where", {})).groupby(SOURCE):
        sides = [select(rows, test[side]).assign(method=side) for side in ("first", "second")]
        if not any(side.empty for side in sides):
            yield source, pd.concat(sides)


def _versus(test: dict) -> str:
    return " over ".join(" ".join(map(str, test[side].values())) for side in ("first", "second"))


def ordering(table: pd.DataFrame, test: dict) -> list[Part]:
    """The differences of neighbours in `order`: all must be above the threshold (default 0)."""
    orders = test["order"] if isinstance(test["order"][0], list) else [test["order"]]
    parts = []
    for order in orders:
        for larger, smaller in zip(order, order[1:], strict=False):
            sides = {"first": {test["by"]: larger}, "second": {test["by"]: smaller}}
            for part in difference_above(table, {**test, **sides}):
                parts.append(dataclasses.replace(part, name=f"{part.name}, minus {smaller}"))
    return parts


def share(table: pd.DataFrame, test: dict) -> list[Part]:
    """The share of selected rows of each run whose value is `is`, with Wilson's interval; all or
    nothing is counted exactly.
    """
    from scipy.stats import binomtest

    rows, parts = select(table, test.get("where", {})), []
    if not rows.empty and test["value"] not in rows:
        raise nearest_name_error("column", test["value"], rows.columns)
    for source, found in rows.groupby(SOURCE):
        good, count = int((found[test["value"]] == test["is"]).sum()), len(found)
        counted = Part(
            f"{good} of {count}", good / count, good / count, good / count, source=source
        )
        if not test.get("exact"):
            interval = binomtest(good, count).proportion_ci(method="wilson")
            counted = dataclasses.replace(
                counted, low=interval.low, high=interval.high, prompts=count
            )
        parts.append(counted)
    return parts


def adds_up(table: pd.DataFrame, test: dict) -> list[Part]:
    """How far each `whole` is from the mean or sum of the other rows with the same `match`."""
    whole = parts_of(table, test, test["whole"])
    others = parts_of(table, test, {name: {"not": value} for name, value in test["whole"].items()})
    grouped = (
        others.groupby(test["match"])["value"]
        if test["match"]
        else others.groupby(lambda _: 0)["value"]
    )
    totals = grouped.agg(test["of"]).rename("total")
    both = (
        whole.merge(totals, left_on=test["match"], right_index=True)
        if test["match"]
        else whole.assign(total=totals[0])
    )
    apart = (both["value"] - both["total"]).abs()
    return _parts(both.assign(value=apart, low=apart, high=apart))


def extreme(table: pd.DataFrame, test: dict) -> list[Part]:
    """How far the largest, smallest or mean value (or ratio) is from what is stated."""
    values = [part.value for part in ratio_above(table, test)]
    if not values:
        return []
    found = float(getattr(np, test["stat"])(values))
    which = {"max": "The largest", "min": "The smallest", "mean": "The mean"}[test["stat"]]
    told = f"{which} is {found:.4g}, the paper says {test['stated']:g}"
    return [Part(told, *[abs(found - test["stated"])] * 3)]


TESTS: dict[str, Callable] = {
    test.__name__: test
    for test in (
        ratio_above,
        difference_above,
        paired_ratio,
        signed_rank,
        ordering,
        share,
        adds_up,
        extreme,
    )
}


@dataclasses.dataclass(frozen=True)
class Judged:
    """The verdict on one claim before its family is known. note: why there is no verdict, with the
    one in its place.
    """

    claim: Claim
    runs: tuple[runs.Run, ...] = ()
    parts: tuple[Part, ...] = ()
    finding: verdicts.Finding = verdicts.Finding()
    note: tuple[str, str] = ("", "")

    @property
    def limit(self) -> tuple[float, bool]:
        """The threshold, and whether numbers must be below it."""
        test = self.claim.test
        return float(test.get("below", test.get("above", 0.0))), "below" in test

    def row(self, p_value: float) -> dict:
        """The claim's row of the ledger at a p-value, adjusted or not."""
        claim = self.claim
        facts = dict(
            id=claim.id,
            paper=claim.paper,
            about=claim.about,
            says=claim.says,
            where=claim.where,
            item=claim.item,
        )
        source = (
            provenance.of(list(self.runs)).label
            if self.runs
            else "printed"
            if "published" in claim.test
            else ""
        )
        verdict, why = self.note if self.note[0] else (self.finding.verdict(p_value), "")
        return {
            **facts,
            "verdict": verdict,
            "evidence": ". ".join(filter(None, [self._worst(p_value), why])),
            "parts": len(self.parts),
            "p_holm": p_value if self.finding.tested else np.nan,
            "source": source,
        }

    def _worst(self, p_value: float) -> str:
        """The number furthest to the wrong side, among those that have an interval where any has,
        and the limit.
        """
        if not self.parts:
            return ""
        below = self.limit[1]
        telling = [part for part in self.parts if part.told] or self.parts
        worst = min(telling, key=lambda part: -part.value if below else part.value)
        return evidence.sentence(worst, self.claim.test, p_value if self.finding.tested else None)


def examine(claim: Claim, scale: str = "laptop", pair: str = "", shipped: bool = False) -> Judged:
    """The rows of a claim, and what they say by themselves."""
    if not claim.test:
        return Judged(claim, note=(verdicts.UNTESTABLE, claim.why[:1].upper() + claim.why[1:]))
    sources = runs_of(claim.test, scale, pair, shipped)
    sources = _of_largest(sources) if claim.test.get("largest") else sources
    if "run" in claim.test and not sources:
        return Judged(
            claim, note=(verdicts.UNMEASURED, evidence.unmeasured(claim.test, _tables(claim.test)))
        )
    judged = Judged(claim, tuple(sources))
    try:
        rows = rows_of(claim.test, sources)
        parts = tuple(TESTS[claim.test["kind"]](rows, claim.test))
    except SpecdecError as error:  # rows of another version; the other claims continue
        return dataclasses.replace(judged, note=(verdicts.UNMEASURED, str(error)))
    if not parts:
        return dataclasses.replace(
            judged,
            note=(verdicts.UNMEASURED, "The runs here hold none of the rows that it compares"),
        )
    judged = dataclasses.replace(judged, parts=parts)
    judged = dataclasses.replace(judged, finding=verdicts.weigh(parts, *judged.limit))
    return dataclasses.replace(judged, note=_note(judged, rows))


def _note(judged: Judged, rows: pd.DataFrame) -> tuple[str, str]:
    """The verdict that takes the place of the one by numbers, and why; ("", "") where none does."""
    test, alone = judged.claim.test, judged.finding.verdict(judged.finding.p_value)
    if all(part.still for part in judged.parts):
        return verdicts.UNLEARNED, "What was trained does just what it did before"
    if alone != HOLDS and (short := _too_short(judged)):
        return verdicts.SHORT, short
    if alone == HOLDS:
        side = "first" if "first" in test else "where"  # the rows whose place the others take
        for where in test.get("beside", ()):
            parts = TESTS[test["kind"]](
                rows, {**test, side: {**test.get(side, {}), "terms": "", **where}}
            )
            beside = verdicts.weigh(parts, *judged.limit)
            if beside.verdict(beside.p_value) == HOLDS:
                worst = evidence.number(
                    min(parts, key=lambda part: part.value), test, judged.limit[0]
                )
                return verdicts.VACUOUS, f"What learned nothing meets it, too: {worst}"
    return "", ""


def _too_short(judged: Judged) -> str:
    """How long the longest training took, where that is less than LEAST_TRAINED of the paper's;
    else ''.
    """
    short = []
    for name, paper in judged.claim.test.get("trained", {}).items():
        trained = max(_parameter(run, name) for run in judged.runs)
        if trained < LEAST_TRAINED * paper:
            short.append(f"Only {trained:,} of {paper:,} {name.replace('_', ' ')} were trained")
    return ". ".join(short)


def _parameter(run: runs.Run, name: str) -> float:
    record = run.record()
    settings = record["config"].get("parameters", record["config"]) | (record["results"] or {})
    return settings.get(name) or 0


def judge(claim: Claim, scale: str = "laptop", pair: str = "", shipped: bool = False) -> dict:
    """The row of the ledger of a claim that is a family of its own: verdict, evidence, parts,
    p_holm, source.
    """
    judged = examine(claim, scale, pair, shipped)
    return judged.row(judged.finding.p_value)


def ledger(scale: str = "laptop", pair: str = "", shipped: bool = False) -> pd.DataFrame:
    """One row per claim, decided now: id, paper, about, says, where, item, verdict, evidence,
    parts, p_holm, source.

    pair: whose measurements are used, default all that were measured. shipped: only rows that came
    with the checkout. evidence: the number furthest to the wrong side. p_holm: after Holm over the
    measured claims of a paper.
    """
    judged = [examine(claim, scale, pair, shipped) for claim in read_claims().values()]
    p_values = dict.fromkeys((one.claim.id for one in judged), np.nan)
    for paper in {one.claim.paper for one in judged}:
        family = [one for one in judged if one.claim.paper == paper]
        found = verdicts.adjusted([one.finding for one in family])
        p_values |= {one.claim.id: p_value for one, p_value in zip(family, found, strict=True)}
    return pd.DataFrame([one.row(p_values[one.claim.id]) for one in judged])


def sources(scale: str = "laptop", pair: str = "", richest: bool = False) -> list[runs.Run]:
    """The runs that decide the ledger. richest: not they, but those that came with the checkout,
    where these hold more than twice as many rows.
    """
    used = {}
    for claim in read_claims().values():
        found = runs_of(claim.test, scale, pair)
        if richest and items.fewer_rows(
            found, shipped := runs_of(claim.test, scale, pair, shipped=True)
        ):
            found = shipped
        used |= {run.key: run for run in found}
    return list(used.values())


def summary(judged: pd.DataFrame) -> pd.DataFrame:
    """How many claims have each verdict: a row per verdict, a column per paper's method, its
    printed numbers, and ours.
    """
    papers = [items.PAPERS.get(paper, paper).partition(" (")[0] for paper in judged["paper"]]
    whose = [
        name + ", printed" * (about == PRINTED)
        for name, about in zip(papers, judged["about"], strict=True)
    ]
    counts = pd.crosstab(judged["verdict"], pd.Series(whose, judged.index, name="whose"))
    counts = counts.reindex([verdict for verdict in verdicts.VERDICTS if verdict in counts.index])
    return counts[list(dict.fromkeys(whose))].rename_axis(columns=None).reset_index()
