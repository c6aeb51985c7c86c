"""Two drafters: what each question is worth with both, on rows whose answers are known."""

from itertools import product

import pandas as pd
import pytest

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
    (line,) = one_pass.sentences(rows_of(GAINS), DRAFTERS)
    assert "**60.0 %** [59.0, 61.0] with eagle3 and **37.0 %** [36.0, 38.0] with block" in line
    (few,) = one_pass.sentences(rows_of(GAINS, 3), DRAFTERS)
    assert "[" not in few, "three prompts have no interval"


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
