"""The ledger: every test kind on rows whose answer is known, and no verdict without rows."""

import shutil

import pandas as pd
import pytest

from specdec import runs
from specdec.errors import SpecdecError

from workbook import claims

LEDGER = claims.read_claims()


def made(name: str, table: str, rows: pd.DataFrame, pair="smollm2", **results) -> runs.Run:
    run = runs.start(name, {"parameters": {"pair": pair, "dtype": "float32"}})
    run.write_table(table, rows)
    return run.finish(**results)


def verdict(test: dict, **options) -> tuple[str, str]:
    row = claims.judge(claims.Claim("x", "ours", "says", "where", test=test), **options)
    return row["verdict"], row["evidence"]


LIVE = pd.DataFrame(
    [("all", "ours", 1.10, 1.02, 1.18, 12), ("all", "LTD", 0.9, 0.8, 0.99, 12), ("all", "RADAR", 1.0, 0.9, 1.1, 12),
     ("nq", "ours", 1.2, 1.1, 1.3, 2)], columns=["suite", "method", "over", "over_low", "over_high", "prompts"]
)  # fmt: skip


@pytest.mark.parametrize(
    ("where", "limit", "expected"),
    [
        ({"system": "ours", "suite": "all"}, {"above": 1}, claims.HOLDS),
        ({"system": "ours", "suite": "all"}, {"above": 1.05}, claims.UNDECIDED),
        ({"system": "LTD"}, {"above": 1}, claims.FAILS),
        ({"system": "LTD"}, {"below": 1}, claims.HOLDS),
        ({"system": "ours", "suite": "all"}, {"below": 1}, claims.FAILS),
        ({"system": "RADAR"}, {"below": 1}, claims.UNDECIDED),
        ({"suite": "all"}, {"above": 1}, claims.FAILS),  # one of several fails
        ({"suite": {"not": "all"}}, {"above": 1}, claims.UNDECIDED),  # two prompts say nothing
        ({"method": "nobody"}, {"above": 1}, claims.UNDECIDED),
    ],
)
def test_intervals_decide(home, where, limit, expected):
    made("controllers", "live", LIVE)
    test = {"kind": "ratio_above", "run": "controllers", "table": "live", "where": where, "value": "over", **limit}
    assert verdict(test)[0] == expected


def test_a_value_without_an_interval_decides_nothing_unless_it_is_a_count(home):
    made("controllers", "live", LIVE.drop(columns=["over_low", "over_high"]))
    test = {"kind": "ratio_above", "run": "controllers", "table": "live", "where": {"system": "LTD"}, "value": "over"}
    assert verdict({**test, "above": 1})[0] == claims.UNDECIDED
    assert verdict({**test, "above": 1, "exact": True})[0] == claims.FAILS


def test_rows_that_say_nothing_decide_nothing(home):
    """A change that changed nothing has an interval without a width; a table of another make has other columns."""
    same = pd.DataFrame(
        {"suite": "nq", "method": ["a"], "over": [1.0], "over_low": [1.0], "over_high": [1.0], "prompts": [20]}
    )
    made("controllers", "live", same)
    test = {"kind": "ratio_above", "run": "controllers", "table": "live", "value": "over", "above": 0.99}
    assert verdict(test)[0] == claims.UNDECIDED
    assert verdict({**test, "value": "ovr"}) == (
        claims.UNDECIDED,
        "unknown column 'ovr'; did you mean 'over', 'over_low', 'over_high'?",
    )
    wide = {**test, "value": "prompts", "exact": True, "where": {"suite": "all"}}
    assert verdict(wide)[0] == claims.HOLDS, "one suite stands for all"


def test_no_rows_no_verdict(home):
    test = {"kind": "ratio_above", "run": "controllers", "table": "live", "value": "over", "above": 1}
    assert verdict(test) == (claims.UNDECIDED, "no rows yet: a run 'controllers' would write live")
    made("controllers", "live", LIVE, pair="small")
    assert verdict(test)[0] == claims.FAILS and verdict(test, pair="smollm2")[0] == claims.UNDECIDED


def test_differences_of_matching_rows(home):
    rows = [(seed, name, value) for seed in range(4) for name, value in (("a", 1.0 + seed), ("b", 0.5 + 1.01 * seed))]
    made("train", "compared", pd.DataFrame(rows, columns=["seed", "method", "speed"]))
    test = {"kind": "difference_above", "run": "train", "table": "compared", "value": "speed", "match": ["seed"]}
    test |= {"first": {"method": "a"}, "second": {"method": "b"}}
    held, evidence = verdict({**test, "above": 0})
    assert held == claims.HOLDS and evidence.startswith("speed 0.485 [0.4645, 0.5055]")
    assert verdict({**test, "above": 0.5})[0] == claims.UNDECIDED and verdict({**test, "above": 0.6})[0] == claims.FAILS
    order = {"kind": "ordering", "by": "method", "order": ["b", "a"], **{name: test[name] for name in list(test)[1:5]}}
    assert verdict({**order, "above": 0})[0] == claims.FAILS


def test_shares(home):
    made("audit", "rows", pd.DataFrame({"equal": [True] * 30 + [False]}))
    test = {"kind": "share", "run": "audit", "table": "rows", "value": "equal", "is": True}
    assert verdict({**test, "above": 0.8})[0] == claims.HOLDS
    assert verdict({**test, "above": 0.95})[0] == claims.UNDECIDED
    assert verdict({**test, "exact": True, "above": 0.9999}) == (claims.FAILS, "30 of 31 0.9677; must be above 0.9999")
    told = verdict({**test, "value": "equals"})
    assert told[0] == claims.UNDECIDED and "did you mean 'equal'" in told[1]


def test_results_of_a_run_count_as_rows(home):
    made("check", "rows", pd.DataFrame({"suite": ["nq"]}), live={"cycles_differing": 0})
    test = {"kind": "ratio_above", "run": "check", "table": "results", "value": "live.cycles_differing", "exact": True}
    assert verdict({**test, "below": 0.5})[0] == claims.HOLDS


def printed(monkeypatch, rows):
    table = pd.DataFrame(rows, columns=["row", "column", "value"]).assign(target="8B", source="Table 1", doubt="")
    monkeypatch.setattr(claims.items, "read_published", lambda *_: table)


def test_printed_numbers_are_compared_as_they_stand(monkeypatch):
    printed(
        monkeypatch,
        [("ours", "a", 2.0), ("ours", "b", 3.0), ("ours", "Mean", 2.5), ("base", "a", 1.6), ("base", "b", 3.0)],
    )
    test = {"published": "ltd/table1", "where": {"row": "ours", "column": {"not": "Mean"}}, "match": ["column"]}
    ratio = {"kind": "ratio_above", **test, "over": {"row": "base"}}
    assert verdict({**ratio, "above": 1}) == (claims.FAILS, "8B ours b 1; must be above 1")
    assert verdict({**ratio, "above": 0.99})[0] == claims.HOLDS
    mean = {"kind": "adds_up", "published": "ltd/table1", "where": {"row": "ours"}, "match": ["row"]}
    assert verdict({**mean, "whole": {"column": "Mean"}, "of": "mean", "below": 0.01})[0] == claims.HOLDS
    assert verdict({**mean, "whole": {"column": "Mean"}, "of": "sum", "below": 0.01})[0] == claims.FAILS
    largest = {"kind": "extreme", **test, "stat": "max", "below": 0.01}
    assert (
        verdict({**largest, "stated": 3.0})[0] == claims.HOLDS
        and verdict({**largest, "stated": 2.9})[0] == claims.FAILS
    )


def test_the_ledger_holds_claims_of_all_papers_and_ours():
    assert len(LEDGER) >= 45 + 10
    assert {claim.paper for claim in LEDGER.values()} == {"resps", "ltd", "radar", "ppow", "ours"}
    assert {claim.about for claim in LEDGER.values()} == set(claims.SUBJECTS)


def test_what_the_papers_print_is_decided(home, monkeypatch):
    """Against figures/published alone; a few are known from reading the tables by hand."""
    monkeypatch.setattr(runs, "shipped_dir", lambda: home / "nothing-shipped")
    table = claims.ledger().set_index("id")
    decided = table[table["about"] == "printed numbers"]["verdict"]
    assert set(decided) == {claims.HOLDS, claims.FAILS}, decided[~decided.isin([claims.HOLDS, claims.FAILS])]
    held = {
        "resps-5.45-printed",
        "ltd-beats-grid-printed",
        "radar-faster-printed",
        "radar-calls-printed",
        "ppow-means-printed",
    }
    refuted = {
        "resps-faster-printed",
        "resps-means-printed",
        "ltd-tau-means-printed",
        "ppow-tau-printed",
        "ltd-c2t-printed",
    }
    assert set(decided[list(held)]) == {claims.HOLDS} and set(decided[list(refuted)]) == {claims.FAILS}
    rest = table[table["about"] != "printed numbers"]["verdict"]
    assert set(rest) == {claims.UNDECIDED, claims.UNTESTABLE}, "nothing was measured, here or elsewhere"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {id: a, paper: ltd, says: x, were: y}", "unknown key in claims.yml 'were'; did you mean 'where'"),
        ("- {id: a, paper: ltd, says: x, where: y}", "claim a needs either a test, or why"),
        ("- {id: a, paper: ltd, says: x, where: y, test: {kind: ratio}}", "did you mean 'ratio_above'"),
        ("- {id: a, paper: ltd, says: x, where: y, test: {kind: share, vale: z}}", "did you mean 'value'"),
        ("- {id: a, paper: ltd, says: x, where: y, why: z, item: ltd/tabel1}", "unknown item 'ltd/tabel1'"),
        (
            "- {id: a, paper: ltd, says: x, where: y, why: z}\n- {id: a, paper: ltd, says: x, where: y, why: z}",
            "lists a twice",
        ),
    ],
)
def test_a_bad_ledger_gets_one_sentence(home, monkeypatch, text, message):
    runs.write_text(home / "figures" / "claims.yml", text)
    monkeypatch.setattr(runs, "workbook", lambda: home)
    monkeypatch.setattr(claims.items, "read_items", lambda: {"ltd/table1": None})
    pytest.raises(SpecdecError, claims.read_claims).match(message)


def test_what_ships_with_more_rows_decides_when_published(home, monkeypatch):
    test = {"kind": "ratio_above", "run": "controllers", "table": "live", "where": {}, "value": "over", "above": 1}
    monkeypatch.setattr(claims, "read_claims", lambda: {"x": claims.Claim("x", "ours", "says", "where", test=test)})
    shipped = made("controllers", "live", LIVE)
    monkeypatch.setattr(runs, "shipped_dir", lambda: home / "figures" / "measured")
    (home / "figures").mkdir()
    shipped.directory.parent.rename(home / "figures" / "measured")

    def chosen_beside(rows: int, **options) -> list[int]:
        run = runs.start("controllers", {"parameters": {"pair": "smollm2", "dtype": "float32"}, "rows": rows})
        run.write_table("live", LIVE.head(rows))
        run.finish()
        chosen = [len(run.read_table("live")) for run in claims.sources(**options)]
        shutil.rmtree(run.directory)  # two runs of one second have no newest
        return chosen

    assert chosen_beside(1) == [1] and chosen_beside(1, richest=True) == [4]
    assert chosen_beside(2, richest=True) == [2], "half of them are enough"
