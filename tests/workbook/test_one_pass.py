"""Two drafters: what each question is worth with both, the sentence and the table made from rows, live rows over their own tree."""

import numpy as np
import pandas as pd
import pytest

from specdec import runs
from specdec.evaluation import bench, compare
from specdec.evaluation.stats import LEAST_PROMPTS

from workbook import one_pass

DRAFTERS = ("eagle3", "block")
TIMES = {compare.TUNED: (10, 9), compare.ORACLE_DEPTH: (8, 9), compare.ORACLE_SIZE: (9, 6)}
TIMES |= {compare.ORACLE: (7, 6), compare.CLAIRVOYANT: (5, 3)}


def test_questions_are_paired_by_prompt():
    """Prompts differ tenfold and every gain is the same: the intervals have no width to speak of."""
    rows = [
        ("gpu", drafter, method, "nq", f"p{prompt}", ms * (1 + prompt))
        for prompt in range(10) for method, both in TIMES.items() for drafter, ms in zip(DRAFTERS, both, strict=True)
    ]  # fmt: skip
    turns = pd.DataFrame(rows, columns=["machine", "drafter", "method", "suite", "prompt", "time_ms"])
    table = one_pass.questions(turns, DRAFTERS).set_index(["question", "drafter"])
    assert table["worth"].to_dict() == pytest.approx(
        {("EXTEND", "eagle3"): 10 / 8, ("EXTEND", "block"): 1.0, ("SIZE", "eagle3"): 10 / 9, ("SIZE", "block"): 1.5}
        | {("PLAN", "eagle3"): 7 / 5, ("PLAN", "block"): 2.0}
    )
    less = one_pass.less(turns, DRAFTERS).set_index("knows")
    assert less.loc["perfect depth", "less"] == pytest.approx(10 / 8)
    assert less.loc["everything perfect", "less"] == pytest.approx((10 / 5) / (9 / 3))
    np.testing.assert_allclose(table["worth_high"], table["worth_low"])


def rows_of(**gains) -> pd.DataFrame:
    """Rows of `worth`: name -> gains with both drafters in percent, each plus or minus one."""
    rows = [
        ("here", drafter, name, 1 + gain / 100)
        for name, both in gains.items()
        for drafter, gain in zip(DRAFTERS, both, strict=True)
    ]
    table = pd.DataFrame(rows, columns=["machine", "drafter", "knows", "over_tuned"]).assign(suite="all", prompts=20)
    return table.assign(over_tuned_low=table["over_tuned"] - 0.01, over_tuned_high=table["over_tuned"] + 0.01)


BOUNDS = rows_of(**{"everything perfect": (60, 37), "perfect depth": (20, 1), "perfect size": (22.2, 14)})
AT_MOST = (
    "- here: control is worth at most **60.0 %** [59.0, 61.0] with EAGLE-3 and **37.0 %** [36.0, 38.0] with a one-pass drafter; "
    "perfect depth **20.0 %** [19.0, 21.0] and **1.0 %** [0.0, 2.0], "
    "perfect size **22.2 %** [21.2, 23.2] and **14.0 %** [13.0, 15.0]."
)


def test_the_sentence_is_made_from_rows_with_intervals():
    learned = rows_of(LTD=(2, -3), ours=(-4, 5)).rename(columns={"knows": "system"})
    told = " Learned control: **2.0 %** [1.0, 3.0] (LTD) and **5.0 %** [4.0, 6.0] (ours)."
    assert one_pass.sentences(BOUNDS, learned, DRAFTERS) == [AT_MOST + told]
    of_one = learned[learned["drafter"] == "block"]
    assert one_pass.sentences(BOUNDS, of_one, DRAFTERS) == [AT_MOST], "nothing to compare with"
    few = one_pass.sentences(BOUNDS.assign(prompts=LEAST_PROMPTS - 1), of_one, DRAFTERS)[0]
    assert "**37.0 %** with a one-pass drafter" in few and "[" not in few


def test_every_pair_has_a_row_with_its_scale(home):
    found = []
    for pair, tau in (("small", 2.5), ("smollm2", 3.0), ("small", 2.0)):
        run = runs.start("one_pass", {"parameters": {"pair": pair, "dtype": "float32", "seed": int(2 * tau)}})
        rates = pd.DataFrame({"suite": "all", "drafter": DRAFTERS, "prompts": 20, "rate": [tau, 1.0], "over": [1, 0.9]})
        for name, table in (("tau", rates), ("speed", rates), ("bounds", BOUNDS.assign(machine=one_pass.HERE))):
            run.write_table(name, table)
        found.append(run.finish())
    table = one_pass.of_pairs(found, DRAFTERS).set_index("pair")
    assert table["scale"].to_dict() == {"small": "toy", "smollm2": "laptop"}
    assert table["tau, eagle3"].to_dict() == {"small": "2.50", "smollm2": "3.00"}, "the newest of a pair"
    assert table.loc["small", "perfect depth, block"] == "**1.0 %** [0.0, 2.0]"
    assert one_pass.of_pairs(found, ("eagle3", "medusa")).empty


def test_live_rows_stand_beside_the_tree_of_their_own_drafter(monkeypatch):
    speeds = {"eagle3": 1.0, "block": 0.8, "block, ours": 0.9, "autoregressive": 0.5}

    def summary(run, baseline):
        rows = [
            (suite, name, *[speed / speeds[baseline]] * 3) for suite in ("nq", "all") for name, speed in speeds.items()
        ]
        return pd.DataFrame(rows, columns=["suite", "method", "speedup", "speedup_low", "speedup_high"])

    monkeypatch.setattr(bench, "summary", summary)
    table = one_pass.judged_live(None, DRAFTERS).set_index("method")
    assert set(table["suite"]) == {"all"} and table["speedup"].to_dict() == speeds
    assert table["over_own"].dropna().to_dict() == pytest.approx({"eagle3": 1, "block": 1, "block, ours": 1.125})
