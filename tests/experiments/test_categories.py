"""Re-SpS's keyword categories."""

import pytest

from experiments.categories import KEYWORDS, category, composition


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write a Python function", "Writing"),  # the first list wins
        ("Debug this", "Coding"),
        ("What number follows?", "Math"),
        ("SHOW the way", "Reasoning"),
        ("Act as a guide", "Roleplay"),
        ("List the facts", "Extraction"),
        ("Its meaning?", "Humanities"),
        ("Name a river", "General"),
        ("", "General"),
    ],
)
def test_the_first_list_with_a_keyword_wins(text, expected):
    assert category(text) == expected


def test_shares_add_up():
    rows = composition(["Debug this", "Name a river", "Name a lake", "Solve it"])
    assert [row["category"] for row in rows] == sorted([*KEYWORDS, "General"]) + ["Total"]
    shares = {row["category"]: row["share_pct"] for row in rows}
    assert shares["General"] == 50 and shares["Coding"] == shares["Math"] == 25 and shares["Total"] == 100
    assert rows[-1]["questions"] == 4 and composition([])[-1]["questions"] == 0
