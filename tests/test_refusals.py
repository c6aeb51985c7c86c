"""Every row of tests/refusals is refused with an error that names what is wrong, and nothing is
begun.
"""

import importlib
from pathlib import Path

import pytest
from refusals import Given

FOLDER = Path(__file__).with_name("refusals")
ROOMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
ROWS = {}
for room in ROOMS:
    for row in importlib.import_module(f"refusals.{room}").ROWS:
        assert f"{room}: {row.name}" not in ROWS, "no row has the name of another"
        ROWS[f"{room}: {row.name}"] = row


@pytest.mark.parametrize("name", ROWS)
def test_bad_input_gets_one_sentence(name, home):
    row = ROWS[name]
    with pytest.raises(row.error) as caught:
        row.call(Given(home))
    text = str(caught.value)
    assert row.words and all(word in text for word in row.words), text
    assert not list(home.glob("runs/*")), "nothing was begun"
