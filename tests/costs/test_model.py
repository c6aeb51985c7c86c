"""The latency model: look-ups against tables written out, files, profiles and the roofline."""

import dataclasses
import json

import numpy as np
import pytest
from fakes.traces import round_costs

from specdec import machine
from specdec.costs import model as model_module
from specdec.costs.model import CostModel
from specdec.costs.profiles import PROFILES, profile, roofline
from specdec.errors import SpecdecError

GPU = dict(bandwidth_gb_per_s=1000, tflop_per_s=100, layers=10, hidden=1000)


def known(**changes) -> CostModel:
    """A model whose numbers can be computed in the head."""
    fields = dict(
        kind="calibrated",
        widths=(2, 4, 10),
        root=(1.0, 2.0, 5.0),
        root_per_tok=(0.01, 0.01, 0.01),
        expand=(2.0, 3.0, 6.0),
        expand_per_tok=(0.0, 0.02, 0.02),
        nodes=(0, 10, 30),
        verify=(10.0, 15.0, 35.0),
        verify_per_tok=(0.0, 0.1, 0.1),
        step=8.0,
        step_per_tok=0.01,
        rest_ms=0.5,
        question_ms=0.02,
        policy_ms={"mlp": 0.1},
        turn=3.0,
        turn_per_tok=0.2,
    )
    return round_costs(**fields | changes)


@pytest.fixture(autouse=True)
def nothing_was_warned_of():
    model_module._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("part", "arguments", "expected_ms"),
    [
        ("root_ms", (4, 100), 3.0),
        ("root_ms", (3, 0), 1.5),
        ("expand_ms", (7, 50), 4.5 + 1.0),
        ("expand_ms", (1, 0), 2.0),  # the nearest width holds
        ("expand_ms", (64, 0), 6.0),
        ("verify_ms", (5, 100), 12.5 + 5.0),
        ("verify_ms", (20, 0), 25.0),
        ("verify_ms", (40, 0), 45.0),  # the last segment goes on
        ("step_ms", (200,), 10.0),
        ("turn_ms", (50,), 13.0),
        ("draft_ms", (4, 3, 100), 3.0 + 3 * 5.0),
        ("draft_ms", (0, 3, 50), 0.0),  # a plain step drafts nothing
        ("cycle_ms", (4, 3, 10, 100), 18.0 + 25.0 + 0.5),
    ],
)
def test_look_ups_by_hand(part, arguments, expected_ms):
    assert getattr(known(), part)(*arguments) == pytest.approx(expected_ms)


def test_arrays_look_up_like_numbers():
    model = known()
    axes = [2, 5, 10], [0, 3], np.arange(0, 50, 7), [0, 77]  # top_k, expansions, nodes, context
    table = model.cycle_ms(*np.ix_(*axes))
    assert table.shape == (3, 2, 8, 2)
    for place in np.ndindex(table.shape):
        numbers = [axis[index] for axis, index in zip(axes, place, strict=True)]
        assert table[place] == pytest.approx(model.cycle_ms(*numbers))
    verify, verify_per_tok = model.lookup(45)
    assert len(verify) == 46 and all(type(value) is float for value in verify)
    for nodes in (0, 7, 30, 45):
        expected = model.verify_ms(nodes, 123)
        assert verify[nodes] + 123 * verify_per_tok[nodes] == pytest.approx(expected)


def test_a_beam_pays_for_its_nodes_and_only_a_first_expansion_for_cold_caches():
    model = known(candidate_ms=0.01, first_ms=0.4)
    levels_ms = 0.4 + model.expand_ms(10, 50, 3) + 2 * model.expand_ms(10, 50, 2)
    assert model.draft_ms(10, 3, 50, (3, 2)) == pytest.approx(model.root_ms(10, 50) + levels_ms)
    assert model.expand_ms(10, 50) - known().expand_ms(10, 50) == pytest.approx(0.01 * 100)
    model = known(first_ms=0.4)
    expansions = np.array([0, 1, 2, 5])
    beyond = model.draft_ms(10, expansions, 50) - known().draft_ms(10, expansions, 50)
    assert beyond == pytest.approx([0, 0.4, 0.4, 0.4])


@pytest.mark.filterwarnings("ignore")  # of what lies beyond what was measured
def test_published_constants_give_the_papers_times():
    for name in PROFILES:
        model = profile(name)
        times = model.verify_ms(np.arange(300)[:, None], [0, 500, 3000])
        assert (np.diff(times, axis=0) >= 0).all() and (np.diff(times, axis=1) >= 0).all()
    radar = profile("radar-rtx3090-llama-3.1-8b")
    times = radar.cycle_ms(10, np.array([0, 7]), 59, 500)
    assert times == pytest.approx([70.67, 70.67 + 7 * 2.684])  # Eq. 6 without T_p
    assert radar.policy_ms["radar"] == 0.4
    ltd = profile("ltd-a100-vicuna-13b")
    for step in (128, 192):  # LTD's curve has its steps
        assert ltd.verify_ms(step, 0) - ltd.verify_ms(step - 1, 0) > 5
    assert ltd.draft_ms(10, 10, 0) == pytest.approx(18.2)


def test_an_h100_as_it_was_measured():
    graphs, eager = profile("h100-llama-3.1-8b-graphs"), profile("h100-llama-3.1-8b-eager")
    # cycles of the trees 60,7,10 and 128,7,10, of a chain of five and of 220,9,16
    shapes = np.array([(10, 7, 60), (10, 7, 128), (1, 4, 5), (16, 9, 220)]).T
    times_ms = pytest.approx([12.1827, 13.3005, 9.6438, 15.3759], rel=0.008)
    assert graphs.cycle_ms(*shapes, 1024) == times_ms
    assert graphs.step_ms([128, 1024, 4096]) == pytest.approx([6.61, 6.88, 7.2638], rel=0.012)
    assert graphs.verify_ms(127, 1024) == graphs.verify_ms(128, 1024)  # padded, as cheaper
    # 32 rows and 10 rows of a level, of 16 texts of 1,024 tokens
    assert graphs.batched(16).verify_ms(31, 1024) == pytest.approx(15.8382, rel=0.03)
    assert graphs.batched(16).expand_ms(10, 0) == pytest.approx(0.6703 + 0.045)
    assert eager.cycle_ms(10, 7, 60, 1024) == pytest.approx(37.1843, rel=0.02)
    for name, ms in {"ltd": 0.0376, "ltd_size": 0.0776, "radar": 0.1282, "resps": 0.2117}.items():
        assert graphs.question_ms + graphs.policy_ms[name] == pytest.approx(ms, abs=1e-9)


def test_a_roofline_by_hand():
    model = roofline(1e9, 1e8, **GPU, launch_ms_per_layer=0.1, draft_host_ms=0.3)
    # 2 GB at 1 TB/s, 10 launches
    assert model.step_ms(0) == pytest.approx(2.0 + 1.0)
    # 1.28 ms of arithmetic for 64 rows hide behind the reading, that for 200 rows does not
    assert model.verify_ms(63, 0) == pytest.approx(3.0)
    assert model.verify_ms(199, 0) == pytest.approx(4.0 + 1.0, rel=0.02)
    # 2 * 1000 * 2 bytes * 10 layers per token
    assert model.step_ms(1000) - model.step_ms(0) == pytest.approx(0.04)
    assert model.expand_ms(10, 0) == pytest.approx(0.2 + 0.1 + 0.3)


@pytest.mark.filterwarnings("error")
def test_another_machine_and_what_lies_beyond_the_measured_warn_once():
    model = profile("radar-rtx3090-vicuna-13b")
    model.cycle_ms(10, np.arange(8), 59, 100)
    with pytest.warns(UserWarning, match="measured at verify_nodes 59 to 59 only"):
        model.verify_ms([59, 240], 0)
    with pytest.warns(UserWarning, match="top_k 10 to 10 only"):
        model.levels(8, 2)
    model.verify_ms(240, 0)
    here = machine.speed_facts()
    known(machine=here).check_machine()
    elsewhere = known(name="elsewhere", machine={**here, "cpu": "Z80"})
    with pytest.warns(UserWarning, match="calibrated on another machine .*Z80"):
        elsewhere.check_machine()
    dataclasses.replace(elsewhere, name="printed", kind="published").check_machine()


def test_batches_by_hand():
    one = known(candidate_ms=0.01)
    two = one.batched(2)
    # as many rows as 1, 21 and 61 nodes; each text attends to its own context
    assert two.verify_ms([0, 10, 30], 0) == pytest.approx([10.5, 26.0, 66.0])
    assert two.verify_ms(10, 100) == pytest.approx(26.0 + 2 * 10.0)
    # the second text's host work is that of a cycle
    assert two.step_ms(0) == pytest.approx(8.5 + 0.5)
    assert two.step_ms(100) == pytest.approx(9.0 + 2.0)
    # 8 rows; 20 rows, ten past the last width
    assert two.expand_ms(4, 0) == pytest.approx(5.0 + 2 * 0.16)
    assert two.expand_ms(10, 0) == pytest.approx(6.0 + 10 * 0.5 + 2 * 1.0)
    assert two.root_ms(4, 0) == pytest.approx(2.0)
    assert one.batched(4).root_ms(4, 0) == pytest.approx(2.0 + 1.0)
    eight = profile("ltd-a100-vicuna-13b").batched(8)  # measured at 20 to 200 nodes
    assert eight.measured("verify_nodes", range(40)) == list(range(2, 25))
    assert (two.rest_ms, two.question_ms, two.policy_ms) == (1.0, 0.04, {"mlp": 0.2})
    assert two.turn_ms(50) == pytest.approx(2 * one.turn_ms(50)) and two.texts == 2
    assert one.batched(1) is one and "computed, not measured" in two.provenance


def test_files_hold_equal_models(tmp_path):
    path = tmp_path / "costs.json"
    for model in (PROFILES["radar-rtx3090-vicuna-13b"], known(errors={"total_frac": 0.01})):
        assert CostModel.load(model.save(path)) == model
    record = json.loads(path.read_text())
    for change in ({"schema": 2}, {"class": "TreeConfig"}, {"speed": 1}, {"verify": [3, 2, 1]}):
        path.write_text(json.dumps(record | change))
        pytest.raises(SpecdecError, CostModel.load, path).match("cost model")
