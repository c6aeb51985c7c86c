"""What is noted of decoding, before anything was decoded, and the names that files and tables go by."""

import inspect
import math

from specdec.core import rates, records
from specdec.core.records import Cycle, Generation
from specdec.core.typical import TypicalPicker, decode_typical


def test_a_generation_of_nothing():
    nothing = Generation([], 3)
    assert (nothing.rows, nothing.text, nothing.finish_reason) == ([], None, "length")
    assert nothing.prefill_ms == nothing.decode_ms == nothing.total_ms == 0.0
    assert math.isnan(nothing.tokens_per_s) and math.isnan(nothing.tau)
    assert list(nothing.cycles.columns) == list(Cycle.__dataclass_fields__) and len(nothing.cycles) == 0


def test_names_that_stored_files_go_by():
    """Recordings, policies and tables of others hold them."""
    assert (records.PLAN, records.EXTEND, records.SIZE) == ("plan", "extend", "size")
    assert rates.TURN == ["suite", "prompt", "turn"]
    assert rates.SUMS == ["new_tok", "cycles", "cycle_tok", "time_ms", "plain_ms"]


def test_typical_acceptance_has_medusas_constants():
    for rule in (TypicalPicker.__init__, decode_typical):
        parameters = inspect.signature(rule).parameters
        assert (parameters["threshold"].default, parameters["alpha"].default) == (0.09, 0.3)
    assert inspect.signature(decode_typical).parameters["temperature"].default == 1.0
