"""Re-SpS's keyword categories."""

from experiments.categories import KEYWORDS, category, composition

EXPECTED = {
    "Write a Python function": "Writing",  # the first list wins
    "Debug this": "Coding",
    "What number follows?": "Math",
    "SHOW the way": "Reasoning",
    "Act as a guide": "Roleplay",
    "List the facts": "Extraction",
    "Its meaning?": "Humanities",
    "Name a river": "General",
    "": "General",
}


def test_the_first_list_with_a_keyword_wins_and_shares_add_up():
    assert {text: category(text) for text in EXPECTED} == EXPECTED
    rows = composition(["Debug this", "Name a river", "Name a lake", "Solve it"])
    assert [row["category"] for row in rows] == sorted([*KEYWORDS, "General"]) + ["Total"]
    shares = {row["category"]: row["share_pct"] for row in rows}
    assert (
        shares["General"] == 50
        and shares["Coding"] == shares["Math"] == 25
        and shares["Total"] == 100
    )
    assert rows[-1]["questions"] == 4 and composition([])[-1]["questions"] == 0
