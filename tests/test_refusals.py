"""Every row of tests/refusals is refused with an error that names what is wrong."""

import importlib
from pathlib import Path

import pytest
from refusals import Given

from specdec.errors import SpecdecError

ROOMS = sorted(
    path.stem for path in Path(__file__).parent.glob("refusals/*.py") if path.stem != "__init__"
)
ROWS = [(room, row) for room in ROOMS for row in importlib.import_module(f"refusals.{room}").ROWS]


@pytest.mark.parametrize(
    "row", [row for _, row in ROWS], ids=[f"{room}: {row.name}" for room, row in ROWS]
)
def test_bad_input_gets_one_sentence(row, home):
    with pytest.raises(row.error) as caught:
        row.call(Given(home))
    said = str(caught.value)
    missing = [word for word in row.words if word not in said]
    assert row.words and not missing, f"{missing} not in: {said}"
    if row.error is SpecdecError:
        assert said.rstrip()[-1] in ".?)", f"no sentence: {said}"
    assert not list(home.glob("runs/*")), "nothing was begun"
