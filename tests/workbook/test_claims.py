"""The ledger: every test kind on rows whose answer is known, and no verdict without rows."""

import json
import re
import shutil

import pandas as pd
import pytest

from specdec import runs
from specdec.errors import SpecdecError

from workbook import claims, verdicts
from workbook.verdicts import FAILS, HOLDS, UNDECIDED, UNMEASURED

LEDGER = claims.read_claims()
NOTEBOOKS = runs.workbook() / "notebooks"


def made(name: str, table: str, rows: pd.DataFrame, pair="smollm2", **results) -> runs.Run:
    run = runs.start(name, {"parameters": {"pair": pair, "dtype": "float32"}})
    run.write_table(table, rows)
    return run.finish(**results)


def verdict(test: dict, **options) -> tuple[str, str]:
    row = claims.judge(claims.Claim("x", "ours", "says", "where", test=test), **options)
    return row["verdict"], row["evidence"]


LIVE = pd.DataFrame(
    [("all", "ours", 1.10, 1.02, 1.18, 12), ("all", "LTD", 0.85, 0.78, 0.93, 12), ("all", "RADAR", 1.0, 0.9, 1.1, 12),
     ("nq", "ours", 1.2, 1.1, 1.3, 2)], columns=["suite", "method", "over", "over_low", "over_high", "prompts"]
)  # fmt: skip


RATIO_ABOVE = {"kind": "ratio_above", "run": "controllers", "table": "live", "value": "over"}


def test_intervals_decide_and_values_without_them_only_as_counts(home):
    made("controllers", "live", LIVE)
    for where, limit, expected in (
        ({"system": "ours", "suite": "all"}, {"above": 1}, HOLDS),
        ({"system": "ours", "suite": "all"}, {"above": 1.05}, UNDECIDED),
        ({"system": "LTD"}, {"above": 1}, FAILS),
        ({"system": "LTD"}, {"below": 1}, HOLDS),
        ({"system": "ours", "suite": "all"}, {"below": 1}, FAILS),
        ({"system": "RADAR"}, {"below": 1}, UNDECIDED),
        ({"suite": "all"}, {"above": 1}, FAILS),  # one of several fails
        ({"suite": {"not": "all"}}, {"above": 1}, UNDECIDED),  # two prompts say nothing
        ({"method": "nobody"}, {"above": 1}, UNMEASURED),
    ):
        assert verdict(RATIO_ABOVE | {"where": where, **limit})[0] == expected
    made("controllers", "live", LIVE.drop(columns=["over_low", "over_high"]))
    test = RATIO_ABOVE | {"where": {"system": "LTD"}, "above": 1}
    assert verdict(test)[0] == UNDECIDED and verdict({**test, "exact": True})[0] == FAILS


def test_rows_that_say_nothing_decide_nothing(home):
    same = LIVE[:1].assign(suite="nq", over=1.0, over_low=1.0, over_high=1.0, prompts=20)
    made("controllers", "live", same)
    test = RATIO_ABOVE | {"above": 0.99}
    assert verdict(test)[0] == verdicts.UNLEARNED
    told = "unknown column 'ovr'; did you mean 'over', 'over_low', 'over_high'?"
    assert verdict({**test, "value": "ovr"}) == (UNMEASURED, told)
    wide = {**test, "value": "prompts", "exact": True, "where": {"suite": "all"}}
    assert verdict(wide)[0] == HOLDS, "one suite stands for all"


RATIO = RATIO_ABOVE | {"where": {"suite": "all"}, "above": 1}
OURS = RATIO | {"where": {"suite": "all", "system": "ours"}}
UNWRITTEN = "Not measured yet: notebook 31_controllers writes these rows (live)"


def test_live_and_replay_must_agree(home):
    other = dict(
        good=LIVE,
        open=LIVE.assign(over_low=0.9),
        bad=LIVE.assign(over=0.9, over_low=0.85, over_high=0.95),
    )
    run = runs.start("controllers", {"parameters": {"pair": "small", "dtype": "float32"}})
    for name, rows in {"live": LIVE, **other}.items():
        run.write_table(name, rows)
    run.finish()
    found = {name: verdict(OURS | {"table": ["live", name]})[0] for name in other}
    assert found == {"good": HOLDS, "open": UNDECIDED, "bad": UNDECIDED}
    assert verdict(OURS | {"table": ["bad", "missing"]})[0] == FAILS, (
        "a table that nobody wrote says nothing"
    )


def test_all_runs_of_all_pairs_decide(home):
    made("controllers", "live", LIVE, pair="small")
    made("controllers", "live", LIVE.assign(prompts=3), pair="tiny")
    assert verdict(OURS)[0] == HOLDS
    made(
        "controllers", "live", LIVE.assign(over=0.8, over_low=0.75, over_high=0.85), pair="smollm2"
    )
    assert verdict(OURS)[0] == FAILS and verdict(OURS, pair="small")[0] == HOLDS


def test_the_largest_pair_decides_alone_where_a_test_says_so(home):
    for pair, over in (("smollm2", 1.1), ("tiny", 0.8)):
        rows = LIVE.assign(over=over, over_low=over - 0.05, over_high=over + 0.05, target=pair)
        made("controllers", "live", rows, pair)
    found, evidence = verdict(OURS | {"largest": True})
    assert verdict(OURS)[0] == FAILS and found == HOLDS and "(smollm2, ours" in evidence


def test_what_learns_nothing_holds_nothing(home):
    random = LIVE[:1].assign(method="random")
    made("controllers", "live", pd.concat([LIVE, random]))
    beside = OURS | {"beside": [{"system": "random"}]}
    found, evidence = verdict(beside)
    told = (
        "What learned nothing meets it, too: 1.10 × [1.02, 1.18], 12 prompts (random, all suites)"
    )
    assert found == verdicts.VACUOUS and evidence.endswith(told)
    assert verdict(OURS | {"beside": [{"system": "LTD"}]})[0] == HOLDS


def test_a_short_training_refutes_nothing(home):
    for pair, steps in (("small", 80), ("tiny", 900)):
        run = runs.start(
            "controllers", {"parameters": {"pair": pair, "dtype": "float32", "steps": steps}}
        )
        run.write_table("live", LIVE)
        run.finish()
    for system, paper, expected in (
        ("LTD", 30_000, verdicts.SHORT),
        ("LTD", 9_000, FAILS),
        ("ours", 30_000, HOLDS),
    ):
        test = RATIO | {"where": {"suite": "all", "system": system}, "trained": {"steps": paper}}
        found, evidence = verdict(test)
        short = "Only 900 of 30,000 steps were trained" in evidence
        assert found == expected and short == (expected == verdicts.SHORT)


def test_disturbed_rows_count_nothing(home):
    made("controllers", "live", LIVE, crowded=True)
    assert verdict(OURS) == (UNMEASURED, UNWRITTEN)
    made("controllers", "live", LIVE.assign(crowded=[True, False, False, False]), pair="small")
    assert (
        verdict(OURS)[0] == UNMEASURED and verdict(OURS | {"where": {"system": "LTD"}})[0] == FAILS
    )


def test_intervals_over_seeds_and_over_prompts_both_count(home):
    wide = LIVE.assign(over_prompts_low=LIVE["over"] - 0.2, over_prompts_high=LIVE["over"] + 0.2)
    made("controllers", "live", wide)
    assert verdict(OURS)[0] == UNDECIDED and "1.10 × [0.90, 1.30]" in verdict(OURS)[1]


def test_claims_of_a_paper_are_one_family(home, monkeypatch):
    """p = 0.02 by itself: decided alone, open among three, where those that no interval decides do
    not count.
    """
    made("controllers", "live", LIVE)
    close = OURS | {"above": 1.01}
    tests = [close] * 3 + [close | {"exact": True}]
    family = {
        str(place): claims.Claim(str(place), "ours", "says", "", test=test)
        for place, test in enumerate(tests)
    }
    family["apart"] = claims.Claim("apart", "ltd", "says", "where", test=close)
    monkeypatch.setattr(claims, "read_claims", lambda: family)
    table = claims.ledger().set_index("id")
    assert table["verdict"].to_dict() == {
        "0": UNDECIDED,
        "1": UNDECIDED,
        "2": UNDECIDED,
        "3": HOLDS,
        "apart": HOLDS,
    }
    assert (
        table["p_holm"]["0"] == pytest.approx(3 * table["p_holm"]["apart"])
        and table["p_holm"].isna()["3"]
    )


def test_prompts_are_paired(home):
    """Every prompt is 5 % faster, however far prompts lie apart; unpaired intervals would decide
    nothing.
    """
    rows = [
        ("all", f"p{prompt}", name, seed, 10, 10.0 * (1 + prompt) / (gain + 0.001 * (prompt % 3)))
        for prompt in range(10) for name, gain in (("ours", 1.05), ("LTD", 1.0)) for seed in range(2)
    ]  # fmt: skip
    turns = pd.DataFrame(rows, columns=["suite", "prompt", "method", "seed", "new_tok", "time_ms"])
    made("controllers", "turns", turns)
    test = {
        "kind": "paired_ratio",
        "run": "controllers",
        "table": "turns",
        "rate": ["new_tok", "time_ms"],
    }
    test |= {"first": {"system": "ours"}, "second": {"system": "LTD"}}
    assert (
        verdict({**test, "above": 1.04})[0] == HOLDS
        and verdict({**test, "above": 1.06})[0] == FAILS
    )
    assert "1.05 × [1.05, 1.05], 10 prompts (ours over LTD)" in verdict({**test, "above": 1})[1]
    assert verdict({**test, "second": {"system": "ours"}, "above": 1})[0] == verdicts.UNLEARNED
    assert verdict({**test, "second": {"system": "nobody"}, "above": 1})[0] == UNMEASURED
    ranks = test | {"kind": "signed_rank", "below": 0.05}
    assert (
        verdict(ranks)[0] == HOLDS
        and "p = 0.00098, 10 prompts (ours over LTD, Wil" in verdict(ranks)[1]
    )
    assert verdict(ranks | {"first": test["second"], "second": test["first"]})[0] == FAILS


def test_no_rows_no_verdict(home):
    test = RATIO_ABOVE | {"above": 1}
    assert verdict(test) == (UNMEASURED, UNWRITTEN)
    made("controllers", "live", LIVE, pair="small")
    assert verdict(test)[0] == FAILS and verdict(test, pair="smollm2")[0] == UNMEASURED


def test_differences_of_matching_rows_shares_and_results_of_a_run(home):
    rows = [
        (seed, name, value)
        for seed in range(4)
        for name, value in (("a", 1.0 + seed), ("b", 0.5 + 1.01 * seed))
    ]
    made("train", "compared", pd.DataFrame(rows, columns=["seed", "method", "speed"]))
    test = {
        "kind": "difference_above",
        "run": "train",
        "table": "compared",
        "value": "speed",
        "match": ["seed"],
    }
    test |= {"first": {"method": "a"}, "second": {"method": "b"}}
    held, evidence = verdict({**test, "above": 0})
    assert held == HOLDS and evidence.startswith("0.48 [0.46, 0.51] (speed); needs > 0; p = ")
    assert (
        verdict({**test, "above": 0.5})[0] == UNDECIDED
        and verdict({**test, "above": 0.6})[0] == FAILS
    )
    order = {
        "kind": "ordering",
        "by": "method",
        "order": ["b", "a"],
        **{name: test[name] for name in list(test)[1:5]},
    }
    assert verdict({**order, "above": 0})[0] == FAILS
    made("audit", "rows", pd.DataFrame({"equal": [True] * 30 + [False]}))
    test = {"kind": "share", "run": "audit", "table": "rows", "value": "equal", "is": True}
    assert verdict({**test, "above": 0.8})[0] == HOLDS
    assert verdict({**test, "above": 0.95})[0] == UNDECIDED
    assert verdict({**test, "exact": True, "above": 0.9999}) == (FAILS, "30 of 31; needs all")
    told = verdict({**test, "value": "equals"})
    assert told[0] == UNMEASURED and "did you mean 'equal'" in told[1]
    made("check", "rows", pd.DataFrame({"suite": ["nq"]}), live={"cycles_differing": 0})
    test = {
        "kind": "ratio_above",
        "run": "check",
        "table": "results",
        "value": "live.cycles_differing",
        "exact": True,
    }
    assert verdict({**test, "below": 0.5})[0] == HOLDS


def printed(monkeypatch, rows):
    table = pd.DataFrame(rows, columns=["row", "column", "value"]).assign(
        target="8B", source="Table 1", doubt=""
    )
    monkeypatch.setattr(claims.items, "read_published", lambda *_: table)


def test_printed_numbers_are_compared_as_they_stand(monkeypatch):
    rows = [
        ("ours", "a", 2.0),
        ("ours", "b", 3.0),
        ("ours", "Mean", 2.5),
        ("base", "a", 1.6),
        ("base", "b", 3.0),
    ]
    printed(monkeypatch, rows)
    test = {
        "published": "ltd/table1",
        "where": {"row": "ours", "column": {"not": "Mean"}},
        "match": ["column"],
    }
    ratio = {"kind": "ratio_above", **test, "over": {"row": "base"}}
    assert verdict({**ratio, "above": 1}) == (FAILS, "1 × (8B, ours, b); needs > 1")
    assert verdict({**ratio, "above": 0.99})[0] == HOLDS
    mean = {
        "kind": "adds_up",
        "published": "ltd/table1",
        "where": {"row": "ours"},
        "match": ["row"],
    }
    assert verdict({**mean, "whole": {"column": "Mean"}, "of": "mean", "below": 0.01})[0] == HOLDS
    assert verdict({**mean, "whole": {"column": "Mean"}, "of": "sum", "below": 0.01})[0] == FAILS
    largest = {"kind": "extreme", **test, "stat": "max", "below": 0.01}
    told = "The largest is 3, the paper says 2.9; may differ by 0.01"
    assert verdict({**largest, "stated": 3.0})[0] == HOLDS and verdict(
        {**largest, "stated": 2.9}
    ) == (FAILS, told)


def test_claims_of_all_papers_read_tables_that_their_notebooks_write_and_numbers_that_these_state():
    assert len(LEDGER) >= 45 + 10
    assert {claim.paper for claim in LEDGER.values()} == {"resps", "ltd", "radar", "ppow", "ours"}
    assert {claim.about for claim in LEDGER.values()} == set(claims.SUBJECTS)
    # Names of tables between braces stand for any; what a training took is a parameter, or noted by
    # `finish`.
    texts = {
        path.stem.partition("_")[2]: json.loads(path.read_text())
        for path in NOTEBOOKS.glob("*.ipynb")
    }
    code = {
        name: "\n".join("".join(cell["source"]) for cell in nb["cells"])
        for name, nb in texts.items()
    }
    for claim in (claim for claim in LEDGER.values() if "run" in claim.test):
        source = code[claim.test["run"]]
        written = re.findall(r'write_table\(f?"([^"]+)"', source)
        written += ["results", "prompts"]  # the last by `evaluate`
        patterns = [re.sub(r"\\\{.*?\\\}", ".+", re.escape(name)) for name in written]
        for table in claims._tables(claim.test):
            assert any(re.fullmatch(pattern, table) for pattern in patterns), (claim.id, table)
        for name in claim.test.get("trained", {}):
            noted = name.endswith("_steps") and '{f"{part}_steps"' in source
            assert noted or re.search(rf"^{name}: int =", source, re.MULTILINE), (claim.id, name)


def test_what_the_papers_print_is_decided(home, monkeypatch):
    monkeypatch.setattr(runs, "shipped_dir", lambda: home / "nothing-shipped")
    table = claims.ledger().set_index("id")
    decided = table[table["about"] == "printed numbers"]["verdict"]
    assert set(decided) == {HOLDS, FAILS}, decided[~decided.isin([HOLDS, FAILS])]
    held = "resps-5.45 ltd-beats-grid radar-faster radar-calls ppow-means".split()
    refuted = "resps-faster resps-means ltd-tau-means ppow-tau ltd-c2t".split()
    found = [set(decided[[f"{claim}-printed" for claim in some]]) for some in (held, refuted)]
    assert found == [{HOLDS}, {FAILS}]
    rest = table[table["about"] != "printed numbers"]["verdict"]
    assert set(rest) == {UNMEASURED, verdicts.UNTESTABLE}, "nothing was measured, here or elsewhere"


def test_a_bad_ledger_gets_one_sentence(home, monkeypatch):
    monkeypatch.setattr(runs, "workbook", lambda: home)
    monkeypatch.setattr(claims.items, "read_items", lambda: {"ltd/table1": None})
    for text, message in (
        (
            "- {id: a, paper: ltd, says: x, were: y}",
            "unknown key in claims.yml 'were'; did you mean 'where'",
        ),
        ("- {id: a, paper: ltd, says: x, where: y}", "claim a needs either a test, or why"),
        (
            "- {id: a, paper: ltd, says: x, where: y, test: {kind: ratio}}",
            "did you mean 'ratio_above'",
        ),
        (
            "- {id: a, paper: ltd, says: x, where: y, test: {kind: share, vale: z}}",
            "did you mean 'value'",
        ),
        (
            "- {id: a, paper: ltd, says: x, where: y, why: z, item: ltd/tabel1}",
            "unknown item 'ltd/tabel1'",
        ),
        ("- {id: a, paper: ltd, says: x, where: y, why: z}\n" * 2, "lists a twice"),
    ):
        runs.write_text(home / "figures" / "claims.yml", text)
        pytest.raises(SpecdecError, claims.read_claims).match(message)


def test_what_ships_with_more_rows_decides_when_published(home, monkeypatch):
    test = RATIO_ABOVE | {"where": {}, "above": 1}
    monkeypatch.setattr(
        claims, "read_claims", lambda: {"x": claims.Claim("x", "ours", "says", "where", test=test)}
    )
    shipped = made("controllers", "live", LIVE)
    monkeypatch.setattr(runs, "shipped_dir", lambda: home / "figures" / "measured")
    (home / "figures").mkdir()
    shipped.directory.parent.rename(home / "figures" / "measured")

    def chosen_beside(rows: int, **options) -> list[int]:
        run = runs.start(
            "controllers", {"parameters": {"pair": "smollm2", "dtype": "float32"}, "rows": rows}
        )
        run.write_table("live", LIVE.head(rows))
        run.finish()
        chosen = [len(run.read_table("live")) for run in claims.sources(**options)]
        shutil.rmtree(run.directory)  # two runs of one second have no newest
        return chosen

    assert chosen_beside(1) == [1] and chosen_beside(1, richest=True) == [4]
    assert chosen_beside(2, richest=True) == [2], "half of them are enough"
