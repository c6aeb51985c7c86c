"""The paper's block and ours: names, marks, counts, and parts of at most so many columns, in
markdown, csv and LaTeX.
"""

import pandas as pd
import pytest

from specdec.errors import SpecdecError

from workbook.paper_table import MAX_COLUMNS, PaperTable

OURS = pd.DataFrame(
    [("small", "Ours", "chat", "speedup", 1.5, 1.25, 3.0, 20),
     ("small", "Ours", "maths", "speedup", 2.0, 1.0, 3.0, 5),
     ("small", "tree", "chat", "speedup", 1.0, None, None, 20)],
    columns=["pair", "row", "column", "metric", "value", "value_low", "value_high", "prompts"],
)  # fmt: skip
THEIRS = pd.DataFrame(
    [(model, row, column, metric, 2.0 + place, "copied" if (row, model) == ("Medusa", "13B") else "")  # noqa: E501
     for place, (model, row, column, metric) in enumerate(
         (model, row, column, metric) for model in ("8B", "13B") for row in ("Ours", "Medusa")
         for column in ("maths", "chat") for metric in ("speedup", "tau"))],
    columns=["target", "row", "column", "metric", "value", "doubt"],
)  # fmt: skip


def lines(text: str) -> list[str]:
    """Of markdown, without the widths of its columns and the rules below their names."""
    shown = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in shown if line and not line.startswith("|:")]


def test_the_papers_block_and_ours_below_it():
    table = PaperTable.of(OURS, THEIRS, how="make book")
    assert lines(table.markdown()) == [
        "*The paper*",
        "| model | row | maths, speedup | maths, tau | chat, speedup | chat, tau |",
        "| 8B | Ours | 2.00 | 3.00 | 4.00 | 5.00 |",
        "| 8B | Medusa | 6.00 | 7.00 | 8.00 | 9.00 |",
        "| 13B | Ours | 10.00 | 11.00 | 12.00 | 13.00 |",
        "| 13B | Medusa | 14.00 (a) | 15.00 (a) | 16.00 (a) | 17.00 (a) |",
        "*Measured here*",
        "| model | row | maths, speedup | maths, tau | chat, speedup | chat, tau |",
        "| small | Ours, n = 5 to 20 | 2.00 | - | 1.50 [1.25, 3.00] | - |",
        "| small | tree, n = 20 | - | - | 1.00 | - |",
        "(a) copied",
        "Not measured here: Medusa. To measure: `make book`.",
    ]
    assert table.counts == {
        "measured": 2,
        "published_only": 1,
        "not_measured": 0,
    } and table.lacking == ("Medusa",)
    head, *rows = [line.split(",")[:4] for line in table.to_csv().splitlines()]
    assert head == ["whose", "model", "row", '"maths']
    assert [row[0] for row in rows] == ["The paper"] * 4 + ["Measured here"] * 2


def test_a_wide_table_is_printed_in_parts_and_latex_groups_its_columns():
    wide = pd.concat([THEIRS.assign(column=THEIRS["column"] + str(place)) for place in range(4)])
    table = PaperTable.of(None, wide)
    parts = [(metric, len(heads)) for metric, heads in table.parts()]
    assert parts == [("speedup", 8), ("tau", 8)], "16 columns and 2 names are too many for one part"
    assert max(line.count("|") - 1 for line in table.markdown().splitlines()) <= MAX_COLUMNS
    assert [line for line in lines(table.markdown()) if line[0] == "*"] == [
        "*The paper, speedup*",
        "*The paper, tau*",
    ]
    one = PaperTable.of(None, THEIRS.assign(column=range(16), metric=""))
    assert [len(heads) for _, heads in one.parts()] == [10, 6]
    text = PaperTable.of(OURS, THEIRS, how="make book").latex("6 % more", "tab:x")
    assert "\\caption{6 \\% more}" in text and text.count("\\begin{table}") == 1
    assert "\\multicolumn{2}{c}{maths} & \\multicolumn{2}{c}{chat} \\\\" in text
    assert "The paper & 8B & Ours & 2.00" in text and "Measured here & small & Ours" in text
    assert " & small & tree, n = 20 & - & - & 1.00 & - \\\\" in text
    assert "(a) copied" in text


def test_one_side_alone_and_bad_input():
    ours = PaperTable.of(OURS, None)
    assert ours.counts["published_only"] == 0 and "*The paper*" not in ours.markdown()
    theirs = PaperTable.of(None, THEIRS[THEIRS["target"] == "8B"])
    assert lines(theirs.markdown())[1].startswith("| row | maths, speedup |"), (
        "one model needs no name"
    )
    assert theirs.lacking == ("Ours", "Medusa") and theirs.notes == (
        "Not measured here: Ours, Medusa.",
    )
    whole = PaperTable.of(None, THEIRS.head(1).assign(value=64.0, metric="setting"), digits=None)
    assert lines(whole.markdown())[-2] == "| Ours | 64 |"
    pytest.raises(SpecdecError, PaperTable.of, None, None).match("neither measured nor published")
    twice = pytest.raises(SpecdecError, PaperTable.of, pd.concat([OURS, OURS]), None)
    twice.match("two rows stand for .*'chat', 'speedup'")
    misspelt = OURS.rename(columns={"value": "valu"})
    pytest.raises(SpecdecError, PaperTable.of, misspelt, None).match("'value'")


def test_equal_rows_are_named_and_metrics_have_digits_of_their_own():
    rows = [("P+L", "x", 1 / 3), ("P+L", "y", 0.5), ("P+D", "x", 1 / 3), ("P+D", "y", 0.5)]
    rows += [("P", "x", 1 / 3), ("P", "y", 0.51)]
    long = pd.DataFrame(rows, columns=["row", "column", "value"]).assign(pair="small", turns=5)
    table = PaperTable.of(long.assign(metric="ratio"), None, digits={"ratio": 3})
    assert table.notes == ("Equal in every digit (small): P+L; P+D.",)
    assert lines(table.markdown())[2] == "| P+L, n = 5 turns | 0.333 | 0.500 |"
