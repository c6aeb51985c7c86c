"""What is noted of decoding, before anything was decoded, and the names that files and tables go by."""

import math

import pandas as pd

from specdec.core import records
from specdec.core.records import SUMS, Cycle, Generation, Rates, with_rates


def test_a_generation_of_nothing():
    nothing = Generation([], 3)
    assert (nothing.rows, nothing.text, nothing.finish_reason) == ([], None, "length")
    assert nothing.prefill_ms == nothing.decode_ms == nothing.total_ms == 0.0
    assert math.isnan(nothing.tokens_per_s) and math.isnan(nothing.tau)
    assert list(nothing.cycles.columns) == list(Cycle.__dataclass_fields__) and len(nothing.cycles) == 0


def test_names_that_stored_files_go_by():
    """Recordings, policies and tables of others hold them."""
    assert (records.PLAN, records.EXTEND, records.SIZE) == ("plan", "extend", "size")
    assert records.TURN == ["suite", "prompt", "turn"]
    assert records.SUMS == ["new_tok", "cycles", "cycle_tok", "time_ms", "plain_ms"]


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
