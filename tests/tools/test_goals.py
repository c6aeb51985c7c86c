"""The probe of what trees bring here, and its sentences on machines that are not here."""

from dataclasses import replace

import pytest

from specdec.core.pair import Pair
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.models.load import load_pair
from specdec.tools import doctor
from specdec.tools import doctor as doctor_module

SLOW = doctor_module.Reach(
    "small",
    "bfloat16",
    (16, 5, 3),
    tau=4.4,
    speed=1.76,
    step_ms=9.0,
    draft_steps=0.4,
    verify_steps=1.8,
    rest_steps=0.1,
    rows=24,
    rows_cost=2.0,
    prefill_frac=0.1,
    cpu_flags=("avx512_bf16", "avx512f"),
)


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="float32", device="cpu")


def test_the_probe_measures_cycles_in_plain_steps(tiny):
    trees = (TreeConfig(8, 3, 3), TreeConfig(60, 7, 10))
    found = doctor_module.probe(tiny, trees, suites=("laptop/gsm8k", "laptop/alpaca"), max_new_tokens=12)
    assert (found.pair, found.dtype) == ("tiny", "float32") and found.tree in {(8, 3, 3), (60, 7, 10)}
    assert 1 <= found.tau <= found.tree[1] + 2 and found.rows == 60
    assert min(found.step_ms, found.draft_steps, found.verify_steps, found.rest_steps, found.speed) > 0
    assert found.cycle_steps == pytest.approx(found.draft_steps + found.verify_steps + found.rest_steps)
    assert found.cpu_flags == tuple(doctor.machine.hardware()["cpu_flags"])
    # Apart from prefills, speed is tau over what a cycle costs.
    assert found.speed == pytest.approx(found.tau / found.cycle_steps, rel=0.6)


def test_more_rows_cost_more(tiny):
    assert doctor_module.rows_cost(tiny, 256) > doctor_module.rows_cost(tiny, 2) > 0


def test_bad_input_is_refused(tiny):
    with pytest.raises(SpecdecError, match="no drafter"):
        doctor_module.probe(Pair(tiny.target, None, tiny.tokenizer, "plain"))
    with pytest.raises(SpecdecError, match="no trees"):
        doctor_module.probe(tiny, ())
    with pytest.raises(SpecdecError, match="did you mean"):
        doctor_module.probe(tiny, suites=("laptop/gsm9k",))


def test_what_is_reached_is_said_without_reasons():
    text = doctor_module.sentence(replace(SLOW, speed=2.4))
    assert doctor_module.reaches(replace(SLOW, speed=2.4)) and text.endswith(
        "2.40 times as fast as plain decoding (2.2 was the aim)."
    )
    assert doctor_module.sentence(replace(SLOW, dtype="float16")).endswith("as fast as plain decoding.")


def test_what_is_not_reached_is_explained_by_the_figures():
    text = doctor_module.sentence(SLOW, 0.52)
    assert "1.76 times as fast as plain decoding, where 2.2 was the aim" in text
    assert "at its tau of 4.4 a cycle may cost 2.0 plain steps, and it costs 2.3" in text
    assert "cost 2.0 times as much for 24 rows as for one" in text
    assert "no AMX but only vector units (avx512_bf16) for bfloat16, and products in bfloat16 take 0.52" in text
    assert "draft forwards" not in text and "the host takes" not in text


def test_prompts_that_take_the_gain_away_are_named():
    """The cycles alone would do: then it is not said that they cost too much."""
    text = doctor_module.sentence(replace(SLOW, tau=5.5, speed=2.1, prefill_frac=0.17))
    assert "its cycles alone are 2.39 times as fast" in text and "take 17% of the time" in text
    assert "may cost" not in text


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        ({"cpu_flags": ("avx2",)}, "no AMX but no units at all for bfloat16", "vector units"),
        ({"cpu_flags": ("amx_bf16", "avx512_bf16")}, "in spite of its AMX units", "no AMX"),
        ({"dtype": "float32", "speed": 1.1}, "not only for its weights.", "AMX"),
        ({"rows_cost": 1.1}, "what falls short is the drafter's tau", "AMX"),
        ({"rows_cost": 1.1, "draft_steps": 1.5}, "6 draft forwards in a row cost 0.25 of a plain step each", "rows"),
        ({"rest_steps": 0.9}, "the host takes 29% of a cycle", "draft forwards"),
    ],
)
def test_reasons(changes, words, absent):
    text = doctor_module.sentence(replace(SLOW, **changes))
    assert words in text and absent not in text and text.endswith(".")
