"""tau, ms_per_tok and speedup are ratios of sums, the same for a row, a table and everything together."""

import pandas as pd

from specdec.core.rates import SUMS, Rates, with_rates
from specdec.core.records import Generation

TABLE = pd.DataFrame([[10, 4, 12, 50.0, 100.0], [30, 6, 30, 30.0, 90.0]], columns=SUMS)


class Turns(Rates):
    table = TABLE


def test_rates_of_rows_and_of_all_together():
    rows = with_rates(TABLE)
    assert rows["tau"].tolist() == [3.0, 5.0] and rows["speedup"].tolist() == [2.0, 3.0]
    assert rows["ms_per_tok"].tolist() == [5.0, 1.0]
    together = with_rates(TABLE.sum().to_frame().T).iloc[0]
    pooled = Turns()
    assert (pooled.tau, pooled.ms_per_tok, pooled.speedup) == (42 / 10, 80 / 40, 190 / 80)
    assert (pooled.tau, pooled.ms_per_tok, pooled.speedup) == tuple(together[["tau", "ms_per_tok", "speedup"]])


def test_a_text_without_cycles_has_no_tau():
    assert Generation([1], 3).tau != Generation([1], 3).tau
