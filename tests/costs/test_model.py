"""The latency model: look-ups against tables written out, what it refuses, files, profiles and the roofline."""

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
        pair="made up",
        dtype="float32",
    )
    return round_costs(**fields | changes)


@pytest.fixture(autouse=True)
def nothing_said_yet():
    model_module._warned.clear()


def test_grid_points_between_and_outside_alone_and_together():
    model = known()
    assert model.root_ms(4, 100) == pytest.approx(3.0)
    assert model.root_ms(3, 0) == pytest.approx(1.5)
    assert model.expand_ms(7, 50) == pytest.approx(4.5 + 1.0)
    assert model.verify_ms(5, 100) == pytest.approx(12.5 + 5.0)
    assert model.verify_ms(20, 0) == pytest.approx(25.0)
    assert model.step_ms(200) == pytest.approx(10.0)
    assert model.turn_ms(50) == pytest.approx(13.0)
    assert model.verify_ms(40, 0) == pytest.approx(45.0)  # the last segment goes on
    assert model.expand_ms(1, 0) == pytest.approx(2.0) and model.expand_ms(64, 0) == pytest.approx(
        6.0
    )
    single = known(nodes=(0,), verify=(7.0,), verify_per_tok=(0.0,))
    assert single.verify_ms(100, 5) == pytest.approx(7.0)
    assert model.draft_ms(4, 3, 100) == pytest.approx(3.0 + 3 * 5.0)
    assert model.cycle_ms(4, 3, 10, 100) == pytest.approx(18.0 + 25.0 + 0.5), (
        "a cycle is the sum of its parts"
    )
    unsure = known(errors={"tree_frac": 0.01}).uncertainty_frac
    assert model.uncertainty_frac == 0 and unsure == pytest.approx(0.02772, abs=1e-5)
    axes = [2, 5, 10], [0, 3], np.arange(0, 50, 7), [0, 77]  # top_k, expansions, nodes, context
    table = model.cycle_ms(*np.ix_(*axes))
    assert table.shape == (3, 2, 8, 2)
    for place in np.ndindex(table.shape):
        one = [axis[i] for axis, i in zip(axes, place, strict=True)]
        assert table[place] == pytest.approx(model.cycle_ms(*one))
    verify, verify_per_tok = model.lookup(45)
    assert len(verify) == 46 and all(type(value) is float for value in verify)
    for nodes in (0, 7, 30, 45):
        expected = model.verify_ms(nodes, 123)
        assert verify[nodes] + 123 * verify_per_tok[nodes] == pytest.approx(expected)
    for k in (2, 3, 10):
        base, per_tok = model.levels(k, 3)
        assert base[0] + 123 * per_tok[0] == pytest.approx(model.root_ms(k, 123))
        assert base[2] + 123 * per_tok[2] == pytest.approx(model.expand_ms(k, 123))


def test_a_beam_pays_for_its_nodes_and_only_a_first_expansion_for_cold_caches():
    model = known(candidate_ms=0.01, first_ms=0.4)
    by_hand = (
        model.root_ms(10, 50) + 0.4 + model.expand_ms(10, 50, 3) + 2 * model.expand_ms(10, 50, 2)
    )
    assert model.draft_ms(10, 3, 50, (3, 2)) == pytest.approx(by_hand)
    assert model.expand_ms(10, 50) - known().expand_ms(10, 50) == pytest.approx(0.01 * 100)
    model, expansions = known(first_ms=0.4), np.array([0, 1, 2, 5])
    for beam in ((), (3, 2)):
        beyond = model.draft_ms(10, expansions, 50, beam) - known().draft_ms(
            10, expansions, 50, beam
        )
        assert beyond == pytest.approx([0, 0.4, 0.4, 0.4])
    assert model.draft_ms(0, 3, 50) == 0  # a plain step drafts nothing


@pytest.mark.filterwarnings("ignore")  # of what lies beyond what was measured
@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_monotone_and_says_where_it_is_from(name):
    model = profile(name)
    times = model.verify_ms(np.arange(300)[:, None], [0, 500, 3000])
    deeper = model.cycle_ms(10, np.arange(12), 60, 300)
    assert (np.diff(times, axis=0) >= 0).all() and (np.diff(times, axis=1) >= 0).all()
    assert (np.diff(deeper) > 0).all() and model.step_ms(300) > 0
    words = {"published": ("arXiv", "Fig."), "roofline": ("not measured",)}[model.kind]
    assert any(word in model.provenance for word in words)
    assert model.check_machine()


def test_published_constants_give_the_papers_times_and_rooflines_those_by_hand():
    model, ltd = profile("radar-rtx3090-llama-3.1-8b"), profile("ltd-a100-vicuna-13b")
    times = model.cycle_ms(10, np.array([0, 7]), 59, 500)
    assert times == pytest.approx([70.67, 70.67 + 7 * 2.684])  # Eq. 6 without T_p
    assert model.policy_ms["radar"] == 0.4
    for step in (128, 192):  # LTD's curve has its steps
        assert ltd.verify_ms(step, 0) - ltd.verify_ms(step - 1, 0) > 5
    assert ltd.draft_ms(10, 10, 0) == pytest.approx(18.2)
    words = str(profile("ltd-a100-vicuna-13b"))
    assert (
        len(words) < 200
        and "\n" not in words
        and words.startswith("CostModel('ltd-a100-vicuna-13b', published: ")
    )
    model = roofline(1e9, 1e8, **GPU, launch_ms_per_layer=0.1, draft_host_ms=0.3)
    assert model.step_ms(0) == pytest.approx(2.0 + 1.0)  # 2 GB at 1 TB/s, 10 launches
    assert model.verify_ms(63, 0) == pytest.approx(
        3.0
    )  # 64 rows: 1.28 ms of arithmetic hide behind the reading
    assert model.verify_ms(199, 0) == pytest.approx(
        4.0 + 1.0, rel=0.02
    )  # 200 rows are bound by arithmetic
    assert model.step_ms(1000) - model.step_ms(0) == pytest.approx(
        0.04
    )  # 2 * 1000 * 2 bytes * 10 layers per token
    assert model.expand_ms(10, 0) == pytest.approx(0.2 + 0.1 + 0.3)
    assert "not measured" in model.provenance


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
    assert known(machine=here).check_machine()
    elsewhere = known(name="elsewhere", machine={**here, "cpu": "Z80"})
    with pytest.warns(UserWarning, match="calibrated on another machine .*Z80"):
        assert not elsewhere.check_machine()
    assert not elsewhere.check_machine()
    assert dataclasses.replace(elsewhere, kind="published").check_machine()


GPU = dict(bandwidth_gb_per_s=1000, tflop_per_s=100, layers=10, hidden=1000)


def test_batches_by_hand_and_of_what_was_measured():
    one = known(candidate_ms=0.01)
    two = one.batched(2)
    assert two.verify_ms([0, 10, 30], 0) == pytest.approx(
        [10.5, 26.0, 66.0]
    )  # as many rows as 1, 21 and 61 nodes
    assert two.verify_ms(10, 100) == pytest.approx(
        26.0 + 2 * 10.0
    )  # each text attends to its own context
    assert two.step_ms(0) == pytest.approx(8.5 + 0.5), (
        "the second text's host work is that of a cycle"
    )
    assert two.step_ms(100) == pytest.approx(9.0 + 2.0)
    assert two.expand_ms(4, 0) == pytest.approx(5.0 + 2 * 0.16)  # 8 rows
    assert two.expand_ms(10, 0) == pytest.approx(
        6.0 + 10 * 0.5 + 2 * 1.0
    )  # 20 rows, ten past the last width
    assert two.root_ms(4, 0) == pytest.approx(2.0) and one.batched(4).root_ms(
        4, 0
    ) == pytest.approx(2.0 + 1.0)
    assert (two.rest_ms, two.question_ms, two.policy_ms) == (1.0, 0.04, {"mlp": 0.2})
    assert two.turn_ms(50) == pytest.approx(2 * one.turn_ms(50)) and two.texts == 2
    assert (
        one.batched(1) is one
        and two.uncertainty_frac == 0
        and "computed, not measured" in two.provenance
    )
    # LTD measured 20 to 200 nodes: of eight texts with 2 to 24 nodes each.
    model = profile("ltd-a100-vicuna-13b").batched(8)
    assert model.measured("verify_nodes", range(40)) == list(range(2, 25))
    assert model.verify_ms(15, 0) < 40 < model.verify_ms(16, 0)  # its step at 128 rows
    # What speculation lives from: rows that cost nothing beside reading the weights.
    model = profile("roofline-h100-llama-8b-graphs")
    room = [
        model.batched(texts).verify_ms(7, 300) / model.batched(texts).step_ms(300)
        for texts in (1, 8, 64)
    ]
    assert room[0] == pytest.approx(1) and room[1] < 1.05 and room[2] > 1.5
    by_hand = roofline(1e9, 1e8, **GPU).batched(64)
    assert by_hand.verify_ms(9, 0) == pytest.approx(2 * 640 / 100) and by_hand.expand_ms(
        10, 0
    ) == pytest.approx(1.28)


def test_files_hold_equal_models_and_bad_ones_are_one_sentence(tmp_path):
    path = tmp_path / "costs.json"
    for model in (
        known(errors={"total_frac": 0.01}),
        PROFILES["radar-rtx3090-vicuna-13b"],
        known(),
    ):
        assert CostModel.load(model.save(path)) == model
    record = json.loads(path.read_text())
    assert record.pop("texts") == 1  # files from before there were batches load
    path.write_text(json.dumps(record))
    assert CostModel.load(path) == known()
    path = known().save(tmp_path / "costs.json")
    whole = path.read_text()
    record = json.loads(whole)
    for content in (
        record | {"schema": 2},
        record | {"class": "TreeConfig"},
        [1, 2],
        record | {"speed": 1},
        {name: value for name, value in record.items() if name != "verify"},
        record | {"verify": "fast"},
        record | {"verify": [3, 2, 1]},
        record | {"ranges": 3},
        record | {"machine": [1]},
        record | {"step": "quick"},
    ):
        path.write_text(json.dumps(content))
        pytest.raises(SpecdecError, CostModel.load, path).match("cost model")
    path.write_text(whole[:100])
    pytest.raises(SpecdecError, CostModel.load, path).match("cannot be read as JSON")
    pytest.raises(SpecdecError, CostModel.load, tmp_path / "nowhere.json").match("there is no file")
