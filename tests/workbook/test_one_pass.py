"""Two drafters: what each question is worth with both, the sentence and the table made from rows,
live rows over their own tree.
"""

from itertools import product

import pandas as pd
import pytest

from specdec import runs
from specdec.evaluation import bench, compare

from workbook import one_pass

DRAFTERS = ("eagle3", "block")
TIMES = {compare.TUNED: (10, 9), compare.ORACLE_DEPTH: (8, 9), compare.ORACLE_SIZE: (9, 6)}
TIMES |= {compare.ORACLE: (7, 6), compare.CLAIRVOYANT: (5, 3)}
GAINS = {"everything perfect": (60, 37), "perfect depth": (20, 1), "perfect size": (22.2, 14)}


def test_questions_are_paired_by_prompt():
    cells = product(TIMES, (0, 1), range(10))  # prompts differ tenfold, and every gain is the same
    rows = [
        ("gpu", DRAFTERS[i], name, "nq", f"p{p}", TIMES[name][i] * (1 + p)) for name, i, p in cells
    ]
    turns = pd.DataFrame(
        rows, columns=["machine", "drafter", "method", "suite", "prompt", "time_ms"]
    )
    table = one_pass.questions(turns, DRAFTERS)
    for end in ("worth", "worth_low", "worth_high"):  # EXTEND, SIZE and PLAN, with both drafters
        assert table[end].tolist() == pytest.approx([10 / 8, 1.0, 10 / 9, 1.5, 7 / 5, 2.0])
    less = one_pass.less(turns, DRAFTERS).set_index("knows")["less"]
    assert less[["perfect depth", "everything perfect"]].tolist() == pytest.approx(
        [10 / 8, (10 / 5) / (9 / 3)]
    )


def rows_of(gains: dict, prompts=20) -> pd.DataFrame:
    """Rows of `worth`: name -> gains with both drafters in percent, each plus or minus one."""
    rows = [
        ("here", DRAFTERS[i], name, name, 1 + gains[name][i] / 100)
        for name, i in product(gains, (0, 1))
    ]
    table = pd.DataFrame(rows, columns=["machine", "drafter", "knows", "system", "over_tuned"])
    ends = {
        f"over_tuned_{end}": table["over_tuned"] + side
        for end, side in (("low", -0.01), ("high", 0.01))
    }
    return table.assign(suite="all", prompts=prompts, **ends)


def test_the_sentence_is_made_from_rows_with_intervals():
    learned = rows_of({"LTD": (2, -3), "ours": (-4, 5)})
    (told,) = one_pass.sentences(rows_of(GAINS), learned, DRAFTERS)
    assert (
        "**60.0 %** [59.0, 61.0] with EAGLE-3 and **37.0 %** [36.0, 38.0] with a one-pass drafter"
        in told
    )
    assert (
        "depth **20.0 %** [19.0, 21.0] and **1.0 %** [0.0, 2.0], perfect size **22.2 %** [21.2, 23.2]"
        in told
    )
    assert told.endswith(
        " Learned control: **2.0 %** [1.0, 3.0] (LTD) and **5.0 %** [4.0, 6.0] (ours)."
    )
    (few,) = one_pass.sentences(rows_of(GAINS, 3), learned[learned["drafter"] == "block"], DRAFTERS)
    assert "**37.0 %** with a one-pass drafter" in few and "[" not in few and "Learned" not in few
    trainings = pd.DataFrame({"drafter": DRAFTERS, "steps": [240, 120], "seen_tok": [2e6, 1e6]})
    assert "**unequal budgets**: block saw 0.50 times as many tokens as eagle3" in one_pass.budget(
        trainings
    )
    assert "the same budget" in one_pass.budget(one_pass.trained_on("tiny", DRAFTERS))


def test_every_pair_has_a_row_with_its_scale(home):
    found = []
    for pair, tau in (("small", 2.5), ("smollm2", 3.0), ("small", 2.0)):
        run = runs.start(
            "one_pass", {"parameters": {"pair": pair, "dtype": "float32", "seed": tau}}
        )
        rates = pd.DataFrame(
            {"suite": "all", "drafter": DRAFTERS, "prompts": 20, "rate": [tau, 1.0], "over": 0.9}
        )
        for name, table in {"tau": rates, "speed": rates, "bounds": rows_of(GAINS)}.items():
            run.write_table(name, table.assign(machine=one_pass.HERE))
        found.append(run.finish())
    table = one_pass.of_pairs(found, DRAFTERS).set_index("pair")
    assert table[["scale", "tau, eagle3"]].values.tolist() == [["toy", "2.50"], ["laptop", "3.00"]]
    assert table["perfect depth, block"]["small"] == "**1.0 %** [0.0, 2.0]"
    assert one_pass.of_pairs(found, ("medusa",)).empty


def test_live_rows_are_beside_the_tree_of_their_own_drafter(monkeypatch):
    speeds = pd.Series(
        {"eagle3": 1.0, "block": 0.8, "block, ours": 0.9, "autoregressive": 0.5}, name="speedup"
    )

    def summary(_, base):
        table = (speeds / speeds[base]).rename_axis("method").reset_index().assign(suite="all")
        return table.assign(speedup_low=0.0, speedup_high=2.0)

    monkeypatch.setattr(bench, "summary", summary)
    table = one_pass.judged_live(None, DRAFTERS).set_index("method")
    assert table["speedup"].to_dict() == speeds.to_dict()
    assert table["over_own"].dropna().to_dict() == pytest.approx(
        {"eagle3": 1, "block": 1, "block, ours": 1.125}
    )
