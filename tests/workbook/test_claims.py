"""The ledger: every kind of test on rows whose answer is known, and no verdict without rows."""

import shutil

import pandas as pd
import pytest

from specdec import runs

from workbook import claims, verdicts
from workbook.verdicts import FAILS, HOLDS, UNDECIDED, UNMEASURED

LEDGER = claims.read_claims()
LIVE = pd.DataFrame(
    [
        ("all", "ours", 1.10, 1.02, 1.18, 12),
        ("all", "LTD", 0.85, 0.78, 0.93, 12),
        ("all", "RADAR", 1.0, 0.9, 1.1, 12),
        ("nq", "ours", 1.2, 1.1, 1.3, 2),
    ],
    columns=["suite", "method", "over", "over_low", "over_high", "prompts"],
)
RATIO_ABOVE = {"kind": "ratio_above", "run": "controllers", "table": "live", "value": "over"}
RATIO = RATIO_ABOVE | {"where": {"suite": "all"}, "above": 1}
OURS = RATIO | {"where": {"suite": "all", "system": "ours"}}
UNWRITTEN = "Not measured yet: notebook 31_controllers writes these rows (live)"


def made(name: str, table: str, rows: pd.DataFrame, pair="smollm2", steps=0, **results) -> runs.Run:
    parameters = {"pair": pair, "dtype": "float32", "steps": steps}
    run = runs.start(name, {"parameters": parameters})
    run.write_table(table, rows)
    return run.finish(**results)


def claim(test: dict, paper="ours", name="x") -> claims.Claim:
    return claims.Claim(name, paper, "says", "where", test=test)


def judged(test: dict, **options) -> tuple[str, str]:
    """(verdict, evidence) of a claim that is a family of its own."""
    examined = claims.examine(claim(test), **options)
    row = examined.row(examined.finding.p_value)
    return row["verdict"], row["evidence"]


def verdict(test: dict, **options) -> str:
    return judged(test, **options)[0]


@pytest.mark.parametrize(
    ("where", "limit", "expected"),
    [
        ({"system": "ours", "suite": "all"}, {"above": 1}, HOLDS),
        ({"system": "ours", "suite": "all"}, {"above": 1.05}, UNDECIDED),
        ({"system": "LTD"}, {"above": 1}, FAILS),
        ({"system": "LTD"}, {"below": 1}, HOLDS),
        ({"system": "ours", "suite": "all"}, {"below": 1}, FAILS),
        ({"system": "RADAR"}, {"below": 1}, UNDECIDED),
        ({"suite": "all"}, {"above": 1}, FAILS),  # one of several fails
        ({"suite": {"not": "all"}}, {"above": 1}, UNDECIDED),  # two prompts say nothing
        ({"method": "nobody"}, {"above": 1}, UNMEASURED),
    ],
)
def test_intervals_decide(home, where, limit, expected):
    made("controllers", "live", LIVE)
    assert verdict(RATIO_ABOVE | {"where": where, **limit}) == expected


def test_values_without_intervals_decide_as_counts_alone(home):
    made("controllers", "live", LIVE.drop(columns=["over_low", "over_high"]))
    test = RATIO_ABOVE | {"where": {"system": "LTD"}, "above": 1}
    assert verdict(test) == UNDECIDED and verdict({**test, "exact": True}) == FAILS


def test_rows_that_say_nothing_decide_nothing(home):
    made("controllers", "live", LIVE[:1].assign(suite="nq", over=1, over_low=1, over_high=1))
    test = RATIO_ABOVE | {"above": 0.99}
    assert verdict(test) == verdicts.UNLEARNED
    found, evidence = judged({**test, "value": "ovr"})
    assert found == UNMEASURED and "'over'" in evidence
    wide = {**test, "value": "prompts", "exact": True, "where": {"suite": "all"}}
    assert verdict(wide) == HOLDS, "one suite stands for all"


def test_live_and_replay_must_agree(home):
    tables = {
        "live": LIVE,
        "good": LIVE,
        "open": LIVE.assign(over_low=0.9),
        "bad": LIVE.assign(over=0.9, over_low=0.85, over_high=0.95),
    }
    run = runs.start("controllers", {"parameters": {"pair": "small", "dtype": "float32"}})
    for name, rows in tables.items():
        run.write_table(name, rows)
    run.finish()
    expected = {"good": HOLDS, "open": UNDECIDED, "bad": UNDECIDED}
    for name, decided in expected.items():
        assert verdict(OURS | {"table": ["live", name]}) == decided
    assert verdict(OURS | {"table": ["bad", "missing"]}) == FAILS, "nobody wrote the other"


def test_all_runs_of_all_pairs_decide_or_the_largest(home):
    made("controllers", "live", LIVE, pair="small")
    made("controllers", "live", LIVE.assign(prompts=3), pair="tiny")
    assert verdict(OURS) == HOLDS
    slow = LIVE.assign(over=0.8, over_low=0.75, over_high=0.85, target="smollm2")
    made("controllers", "live", slow, pair="smollm2")
    made("controllers", "live", LIVE, pair="own")
    assert verdict(OURS) == FAILS and verdict(OURS, pair="small") == HOLDS
    assert verdict(OURS | {"largest": True}) == HOLDS, "one that does not ship is larger than all"


def test_what_learns_nothing_holds_nothing(home):
    made("controllers", "live", pd.concat([LIVE, LIVE[:1].assign(method="random")]))
    found, evidence = judged(OURS | {"beside": [{"system": "random"}]})
    assert found == verdicts.VACUOUS
    assert evidence.endswith("1.10 × [1.02, 1.18], 12 prompts (random, all suites)")
    assert verdict(OURS | {"beside": [{"system": "LTD"}]}) == HOLDS


@pytest.mark.parametrize(
    ("system", "paper", "expected"),
    [("LTD", 30_000, verdicts.SHORT), ("LTD", 9_000, FAILS), ("ours", 30_000, HOLDS)],
)
def test_a_short_training_refutes_nothing(home, system, paper, expected):
    made("controllers", "live", LIVE, pair="small", steps=80)
    made("controllers", "live", LIVE, pair="tiny", steps=900)
    where = {"suite": "all", "system": system}
    found, evidence = judged(RATIO | {"where": where, "trained": {"steps": paper}})
    assert found == expected
    assert ("Only 900 of 30,000 steps" in evidence) == (expected == verdicts.SHORT)


def test_disturbed_rows_count_nothing(home):
    made("controllers", "live", LIVE, crowded=True)
    assert judged(OURS) == (UNMEASURED, UNWRITTEN)
    made("controllers", "live", LIVE.assign(crowded=[True, False, False, False]), pair="small")
    assert verdict(OURS) == UNMEASURED and verdict(OURS | {"where": {"system": "LTD"}}) == FAILS


def test_the_wider_interval_counts(home):
    wide = LIVE.assign(over_prompts_low=LIVE["over"] - 0.2, over_prompts_high=LIVE["over"] + 0.2)
    made("controllers", "live", wide)
    found, evidence = judged(OURS)
    assert found == UNDECIDED and "1.10 × [0.90, 1.30]" in evidence


def test_claims_of_a_paper_are_one_family(home, monkeypatch):
    """p = 0.02 by itself: decided alone, open among three that intervals decide."""
    made("controllers", "live", LIVE)
    close = OURS | {"above": 1.01}
    family = {str(place): claim(close, name=str(place)) for place in range(3)}
    family["3"] = claim(close | {"exact": True}, name="3")
    family["apart"] = claim(close, "ltd", "apart")
    monkeypatch.setattr(claims, "read_claims", lambda: family)
    table = claims.ledger().set_index("id")
    assert table["verdict"].tolist() == [UNDECIDED] * 3 + [HOLDS, HOLDS]
    assert table["p_holm"]["0"] == pytest.approx(3 * table["p_holm"]["apart"])
    assert table["p_holm"].isna()["3"]


def test_prompts_are_paired(home):
    """Every prompt is 5 % faster, however far prompts lie apart."""
    rows = []
    for prompt in range(10):
        for name, gain in (("ours", 1.05), ("LTD", 1.0)):
            time_ms = 10.0 * (1 + prompt) / (gain + 0.001 * (prompt % 3))
            rows += [("all", f"p{prompt}", name, seed, 10, time_ms) for seed in range(2)]
    columns = ["suite", "prompt", "method", "seed", "new_tok", "time_ms"]
    made("controllers", "turns", pd.DataFrame(rows, columns=columns))
    test = {"kind": "paired_ratio", "run": "controllers", "table": "turns"}
    test |= {"first": {"system": "ours"}, "second": {"system": "LTD"}}
    test |= {"rate": ["new_tok", "time_ms"], "above": 1}
    assert verdict({**test, "above": 1.04}) == HOLDS and verdict({**test, "above": 1.06}) == FAILS
    assert "1.05 × [1.05, 1.05], 10 prompts (ours over LTD)" in judged(test)[1]
    assert verdict({**test, "second": {"system": "ours"}}) == verdicts.UNLEARNED
    assert verdict({**test, "second": {"system": "nobody"}}) == UNMEASURED
    del test["above"]
    ranks = test | {"kind": "signed_rank", "below": 0.05}
    found, evidence = judged(ranks)
    assert found == HOLDS and "p = 0.00098, 10 prompts" in evidence
    assert verdict(ranks | {"first": test["second"], "second": test["first"]}) == FAILS


def test_differences_of_matching_rows(home):
    rows = []
    for seed in range(4):
        rows += [(seed, "a", 1.0 + seed), (seed, "b", 0.5 + 1.01 * seed)]
    made("train", "compared", pd.DataFrame(rows, columns=["seed", "method", "speed"]))
    test = {"run": "train", "table": "compared", "value": "speed", "match": ["seed"]}
    order = {**test, "kind": "ordering", "by": "method", "order": ["b", "a"], "above": 0}
    assert verdict(order) == FAILS
    test |= {"kind": "difference_above", "first": {"method": "a"}, "second": {"method": "b"}}
    assert judged({**test, "above": 0}) == (HOLDS, "0.47 (a); needs > 0")
    assert verdict({**test, "above": 0.475}) == FAILS, "one of four seeds is below"


def test_shares_and_results_of_a_run(home):
    made("audit", "rows", pd.DataFrame({"equal": [True] * 30 + [False]}))
    test = {"kind": "share", "run": "audit", "table": "rows", "value": "equal", "is": True}
    assert (
        verdict({**test, "above": 0.8}) == HOLDS and verdict({**test, "above": 0.95}) == UNDECIDED
    )
    assert judged({**test, "exact": True, "above": 0.9999}) == (FAILS, "30 of 31; needs all")
    assert verdict({**test, "value": "equals"}) == UNMEASURED
    made("check", "rows", pd.DataFrame({"suite": ["nq"]}), live={"cycles_differing": 0})
    test = {"kind": "ratio_above", "run": "check", "table": "results", "exact": True}
    assert verdict({**test, "value": "live.cycles_differing", "below": 0.5}) == HOLDS


def test_printed_numbers_are_compared_as_they_stand(monkeypatch):
    rows = [("ours", "a", 2.0), ("ours", "b", 3.0), ("ours", "Mean", 2.5)]
    rows += [("base", "a", 1.6), ("base", "b", 3.0)]
    table = pd.DataFrame(rows, columns=["row", "column", "value"])
    table = table.assign(target="8B", source="Table 1", doubt="")
    monkeypatch.setattr(claims.items, "read_published", lambda *_: table)
    test = {"published": "ltd/table1", "match": ["column"]}
    test["where"] = {"row": "ours", "column": {"not": "Mean"}}
    ratio = {"kind": "ratio_above", **test, "over": {"row": "base"}}
    assert judged({**ratio, "above": 1}) == (FAILS, "1 × (8B, ours, b); needs > 1")
    assert verdict({**ratio, "above": 0.99}) == HOLDS
    mean = {"kind": "adds_up", "published": "ltd/table1", "where": {"row": "ours"}, "below": 0.01}
    mean |= {"match": ["row"], "whole": {"column": "Mean"}}
    assert verdict({**mean, "of": "mean"}) == HOLDS and verdict({**mean, "of": "sum"}) == FAILS
    largest = {"kind": "extreme", **test, "stat": "max", "below": 0.01}
    assert verdict({**largest, "stated": 3.0}) == HOLDS
    sentence = "The largest is 3, the paper says 2.9; may differ by 0.01"
    assert judged({**largest, "stated": 2.9}) == (FAILS, sentence)


def test_what_the_papers_print_is_decided(home, monkeypatch):
    monkeypatch.setattr(runs, "shipped_dir", lambda: home / "nothing-shipped")
    table = claims.ledger().set_index("id")
    decided = table.loc[table["about"] == "printed numbers", "verdict"]
    assert set(decided) == {HOLDS, FAILS}
    for name in ("resps-5.45", "ltd-beats-grid", "radar-faster", "radar-calls", "ppow-means"):
        assert decided[f"{name}-printed"] == HOLDS
    for name in ("resps-faster", "resps-means", "ltd-tau-means", "ppow-tau", "ltd-c2t"):
        assert decided[f"{name}-printed"] == FAILS
    rest = table.loc[table["about"] != "printed numbers", "verdict"]
    assert set(rest) == {UNMEASURED, verdicts.UNTESTABLE}, "nothing was measured"


@pytest.mark.parametrize(("rows", "richest", "chosen"), [(1, False, 1), (1, True, 4), (2, True, 2)])
def test_what_ships_with_more_rows_decides_when_published(home, monkeypatch, rows, richest, chosen):
    entry = claim(RATIO_ABOVE | {"where": {}, "above": 1})
    monkeypatch.setattr(claims, "read_claims", lambda: {"x": entry})
    shipped = made("controllers", "live", LIVE)
    monkeypatch.setattr(runs, "shipped_dir", lambda: home / "measured")
    shutil.move(shipped.directory.parent, home / "measured")
    parameters = {"pair": "smollm2", "dtype": "float32", "steps": 0}
    run = runs.start("controllers", {"parameters": parameters, "rows": rows})
    run.write_table("live", LIVE.head(rows))
    run.finish()
    deciding = claims.sources(richest=richest)
    assert [len(run.read_table("live")) for run in deciding] == [chosen]
