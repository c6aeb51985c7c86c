"""The papers' own numbers: every cell is there once, every number parses, and means that do not add
up are marked.
"""

import pandas as pd
import pytest

from specdec import machine

FOLDER = machine.checkout() / "figures" / "published"
COLUMNS = ["target", "row", "column", "metric", "value", "unit", "temperature", "source", "doubt"]
# cells of all published tables and figures together
TOTAL = 1412
NAMES = sorted(path.stem for path in FOLDER.glob("*.csv"))
# What a doubt says about a printed mean that its row does not give.
UNEVEN = ("average 4.564", "does not equal the mean")


def published(name: str) -> pd.DataFrame:
    return pd.read_csv(FOLDER / f"{name}.csv", keep_default_na=False)


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_complete_and_parse(name):
    table, words = published(name), name == "ltd_table3"
    assert list(table.columns) == [*COLUMNS[:4], "text" if words else "value", *COLUMNS[5:]]
    assert not table.duplicated(
        ["target", "row", "column", "metric", "temperature", "source"]
    ).any()
    assert (table[["row", "column", "metric", "source"]] != "").all(axis=None)
    if not words:
        values = pd.to_numeric(table["value"])
        assert values.notna().all() and (values >= 0).all()
        tau = table["metric"].eq("tau")
        assert values[tau].between(1, 11).all(), "tokens per cycle of trees up to ten deep"
    assert set(table["temperature"]) <= {"", 0, 1, "0", "1"}


def test_no_cell_is_missing():
    assert len(NAMES) == 34
    assert sum(len(published(name)) for name in NAMES) == TOTAL


def means(name: str) -> pd.DataFrame:
    """Printed mean, mean of the row's own cells, and the doubt, for each row that prints one."""
    table = published(name).astype({"value": float})
    keys = ["target", "row", "metric", "temperature"]
    printed = table[table["column"] == "Mean"].set_index(keys)
    is_cell = ~table["column"].isin(["Mean", "p-value", "Training questions"])
    cells = table[is_cell].groupby(keys)["value"].mean()
    return printed[["value", "doubt"]].join(cells.rename("cells"))


WITH_MEANS = [
    name for name in NAMES if name != "ltd_table3" and (published(name)["column"] == "Mean").any()
]


@pytest.mark.parametrize("name", WITH_MEANS)
def test_printed_means_are_those_of_their_row_or_doubted(name):
    rows = means(name)
    digits = 0.00006 if name == "resps_table6" else 0.0101
    digits = pd.Series(digits, rows.index).where(rows["value"] < 11, 0.11)
    uneven = (rows["value"] - rows["cells"]).abs() > digits
    doubted = rows["doubt"].map(lambda doubt: any(words in doubt for words in UNEVEN))
    assert (uneven == doubted).all(), rows[uneven != doubted]
