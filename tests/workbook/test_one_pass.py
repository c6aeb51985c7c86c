"""Two drafters: what each question is worth with both, on rows whose answers are known."""

from itertools import product

import pandas as pd
import pytest

from specdec.evaluation import compare

from workbook import one_pass

DRAFTERS = ("eagle3", "block")
TIMES = {
    compare.TUNED: (10, 9),
    compare.ORACLE_DEPTH: (8, 9),
    compare.ORACLE_SIZE: (9, 6),
    compare.ORACLE: (7, 6),
    compare.CLAIRVOYANT: (5, 3),
}


QUESTIONS = {
    "EXTEND": ("LTD", compare.TUNED, compare.ORACLE_DEPTH),
    "SIZE": ("LTD", compare.TUNED, compare.ORACLE_SIZE),
    "PLAN": ("Re-SpS", compare.ORACLE, compare.CLAIRVOYANT),
}


def test_questions_are_paired_by_prompt():
    rows = []
    # prompts differ tenfold, and every gain is the same
    for name, drafter, prompt in product(TIMES, (0, 1), range(10)):
        ms = TIMES[name][drafter] * (1 + prompt)
        rows.append(("gpu", DRAFTERS[drafter], name, "nq", f"p{prompt}", ms))
    columns = ["machine", "drafter", "method", "suite", "prompt", "time_ms"]
    turns = pd.DataFrame(rows, columns=columns)
    table = one_pass.questions(turns, DRAFTERS, QUESTIONS)
    for end in ("worth", "worth_low", "worth_high"):  # EXTEND, SIZE and PLAN, with both drafters
        assert table[end].tolist() == pytest.approx([10 / 8, 1.0, 10 / 9, 1.5, 7 / 5, 2.0])
    less = one_pass.less(turns, DRAFTERS).set_index("knows")["less"]
    assert less["perfect depth"] == pytest.approx(10 / 8)
    assert less["everything perfect"] == pytest.approx((10 / 5) / (9 / 3))
