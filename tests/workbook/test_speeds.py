"""README's pictures are what code draws from the rows that came with the checkout."""

import pandas as pd

from specdec import machine, runs

from workbook import speeds


def test_the_picture_of_speeds_is_drawn_from_the_newest_rows(home):
    """Otherwise: run `make figures`."""
    for path in speeds.write(home):
        committed = machine.checkout() / "figures" / path.name
        if path.suffix == ".json":
            assert runs.read_json(path) == runs.read_json(committed)
        if path.suffix == ".csv":
            # the last digits of a mean differ between processors
            pd.testing.assert_frame_equal(pd.read_csv(path), pd.read_csv(committed), rtol=1e-9)
