"""Re-SpS's keyword categories."""

import pytest

from experiments.categories import KEYWORDS, category, composition


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the first list wins
        ("Write a Python function", "Writing"),
        ("What number follows?", "Math"),
        ("SHOW the way", "Reasoning"),
        ("Act as a guide", "Roleplay"),
        ("", "General"),
    ],
)
def test_the_first_list_with_a_keyword_wins(text, expected):
    assert category(text) == expected


def test_shares_add_up():
    rows = composition(["Debug this", "Name a river", "Name a lake", "Solve it"])
    assert [row["category"] for row in rows] == sorted([*KEYWORDS, "General"]) + ["Total"]
    shares = {row["category"]: row["share_pct"] for row in rows}
    expected = {"General": 50, "Coding": 25, "Math": 25, "Total": 100}
    assert {name: shares[name] for name in expected} == expected
    assert rows[-1]["questions"] == 4
    assert composition([])[-1]["questions"] == 0
