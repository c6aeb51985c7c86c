"""Two drafters: what each question is worth with both, on rows whose answers are known."""

from itertools import product

import pandas as pd
import pytest

from specdec import runs
from specdec.evaluation import bench, compare

from workbook import one_pass

DRAFTERS = ("eagle3", "block")
TIMES = {
    compare.TUNED: (10, 9),
    compare.ORACLE_DEPTH: (8, 9),
    compare.ORACLE_SIZE: (9, 6),
    compare.ORACLE: (7, 6),
    compare.CLAIRVOYANT: (5, 3),
}
GAINS = {"everything perfect": (60, 37), "perfect depth": (20, 1), "perfect size": (22.2, 14)}


def test_questions_are_paired_by_prompt():
    rows = []
    # prompts differ tenfold, and every gain is the same
    for name, drafter, prompt in product(TIMES, (0, 1), range(10)):
        ms = TIMES[name][drafter] * (1 + prompt)
        rows.append(("gpu", DRAFTERS[drafter], name, "nq", f"p{prompt}", ms))
    columns = ["machine", "drafter", "method", "suite", "prompt", "time_ms"]
    turns = pd.DataFrame(rows, columns=columns)
    table = one_pass.questions(turns, DRAFTERS)
    for end in ("worth", "worth_low", "worth_high"):  # EXTEND, SIZE and PLAN, with both drafters
        assert table[end].tolist() == pytest.approx([10 / 8, 1.0, 10 / 9, 1.5, 7 / 5, 2.0])
    less = one_pass.less(turns, DRAFTERS).set_index("knows")["less"]
    assert less["perfect depth"] == pytest.approx(10 / 8)
    assert less["everything perfect"] == pytest.approx((10 / 5) / (9 / 3))


def rows_of(gains: dict, prompts=20) -> pd.DataFrame:
    """Rows of `worth`: name -> gains with both drafters in percent, each plus or minus one."""
    rows = []
    for name, drafter in product(gains, (0, 1)):
        ratio = 1 + gains[name][drafter] / 100
        ends = {"over_tuned_low": ratio - 0.01, "over_tuned_high": ratio + 0.01}
        row = {"machine": "here", "drafter": DRAFTERS[drafter], "knows": name, "system": name}
        rows.append(row | {"over_tuned": ratio, **ends})
    return pd.DataFrame(rows).assign(suite="all", prompts=prompts)


def test_the_sentence_is_made_from_rows_with_intervals():
    learned = rows_of({"LTD": (2, -3), "ours": (-4, 5)})
    (line,) = one_pass.sentences(rows_of(GAINS), learned, DRAFTERS)
    assert "**60.0 %** [59.0, 61.0] with eagle3 and **37.0 %** [36.0, 38.0] with block" in line
    assert "**2.0 %** [1.0, 3.0] (LTD) and **5.0 %** [4.0, 6.0] (ours)" in line
    alone = learned[learned["drafter"] == "block"]
    (few,) = one_pass.sentences(rows_of(GAINS, 3), alone, DRAFTERS)
    assert "[" not in few and "Learned" not in few, "three prompts have no interval"


def test_unequal_budgets_are_said():
    trainings = pd.DataFrame({"drafter": DRAFTERS, "steps": [240, 120], "seen_tok": [2e6, 1e6]})
    assert "unequal budgets**: block saw 0.50 times as many" in one_pass.budget(trainings)
    assert "the same budget" in one_pass.budget(one_pass.trained_on("tiny", DRAFTERS))


def test_every_pair_has_a_row_with_its_scale(home):
    sources = []
    for pair, tau in (("small", 2.5), ("smollm2", 3.0), ("small", 2.0)):
        parameters = {"pair": pair, "dtype": "float32", "seed": tau}
        run = runs.start("one_pass", {"parameters": parameters})
        rates = {"suite": "all", "drafter": DRAFTERS, "prompts": 20, "rate": [tau, 1.0]}
        rates = pd.DataFrame({**rates, "over": 0.9})
        for name, table in {"tau": rates, "speed": rates, "bounds": rows_of(GAINS)}.items():
            run.write_table(name, table.assign(machine=one_pass.HERE))
        sources.append(run.finish())
    table = one_pass.of_pairs(sources, DRAFTERS).set_index("pair")
    assert table[["scale", "tau, eagle3"]].values.tolist() == [["toy", "2.50"], ["laptop", "3.00"]]
    assert table["perfect depth, block"]["small"] == "**1.0 %** [0.0, 2.0]"
    assert one_pass.of_pairs(sources, ("medusa",)).empty


def test_live_rows_are_beside_the_tree_of_their_own_drafter(monkeypatch):
    speeds = {"eagle3": 1.0, "block": 0.8, "block, ours": 0.9, "autoregressive": 0.5}

    def summary(_, base):
        table = pd.Series(speeds, name="speedup") / speeds[base]
        table = table.rename_axis("method").reset_index().assign(suite="all")
        return table.assign(speedup_low=0.0, speedup_high=2.0)

    monkeypatch.setattr(bench, "summary", summary)
    table = one_pass.judged_live(None, DRAFTERS).set_index("method")
    assert table["speedup"].to_dict() == speeds
    expected = {"eagle3": 1, "block": 1, "block, ours": 1.125}
    assert table["over_own"].dropna().to_dict() == pytest.approx(expected)
