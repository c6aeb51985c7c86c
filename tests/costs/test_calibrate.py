"""Calibration: the costs of a made-up machine come back, odd rows count little."""

import dataclasses
import itertools
import random

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.pairs import bigram_pair, shared_bigrams, shared_pair
from fakes.traces import round_costs

from specdec.core.clock import Clock, counted_by
from specdec.core.decode import turn
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.verification import Picker
from specdec.costs import calibrate as calibrate_module
from specdec.costs import measure
from specdec.costs.calibrate import Calibration, by_setting, calibrate
from specdec.costs.measure import TreeSampler, stretches
from specdec.costs.model import CostModel
from specdec.models.ngrams import HybridDrafter

SMALL = dict(
    top_ks=(1, 2, 4), nodes=(0, 2, 5, 9, 20), depth=4, contexts=(10, 60, 150), progress=False
)
TINY = dict(top_ks=(1, 2), nodes=(0, 2, 5), depth=3, contexts=(10, 60), progress=False)


def by_nodes(sizes, ms, repeats=1, odd=None):
    """`by_setting` of rows in which verification takes ms(nodes) in each of three contexts."""
    rows = []
    for nodes in sizes:
        for place in range(3):
            row = {"place": place, "context_tok": 100 * place, "verify_nodes": nodes, "children": 0}
            rows += [{**row, "verify_ms": ms(nodes)} for _ in range(repeats)]
    if odd:
        rows[odd[0]]["verify_ms"] = odd[1]
    return by_setting(pd.DataFrame(rows), "verify_nodes", "verify_ms")


def test_steps_between_sizes_are_found_and_odd_rows_count_little():
    # eight rows cost a block, nine cost two: no line may be drawn across
    settings, base, *_ = by_nodes(measure.NODES[:20], lambda n: (5.0 if n < 8 else 7.0) + 0.01 * n)
    at = dict(zip(settings.tolist(), base, strict=True))
    assert at[7] == pytest.approx(5.07) and at[8] == pytest.approx(7.08)
    for repeats, odd in ((5, (2, 500.0)), (1, (4, 0.0))):  # a row and its time that differ
        settings, base, per_tok, _ = by_nodes((0, 5, 10), lambda n: 5.0 + n, repeats, odd)
        assert settings.tolist() == [0, 5, 10] and base == pytest.approx([5, 10, 15])
        assert per_tok == pytest.approx([0, 0, 0])


class Machine:
    """A bigram pair on which drafting and forwards take stated milliseconds, all else none."""

    first_ms = 0.3  # what an expansion takes longer that follows the root pass

    def __init__(self):
        self.pair = bigram_pair(limit=512)
        self.ms = self.cold_ms = 0.0
        forward, drafting = self.pair.target.forward, self.pair.drafter.expand

        def slow_forward(tokens, cache, *args, **options):
            self.ms += self.verify_ms(len(tokens) - 1, len(cache))
            return forward(tokens, cache, *args, **options)

        def slow_root(tokens, features, top_k):
            self.ms += 1.0 + 0.02 * len(tokens) * (len(tokens) > 9)
            self.cold_ms = self.first_ms
            return drafting(tokens[-1:], None, top_k)

        def slow_expand(tokens, rows, top_k):
            self.ms += self.expand_ms(len(tokens), top_k) + self.cold_ms
            self.cold_ms = 0.0
            return drafting(tokens, rows, top_k)

        self.pair.target.forward = slow_forward
        self.pair.drafter.root, self.pair.drafter.expand = slow_root, slow_expand

    def verify_ms(self, nodes, context):
        return 5.0 + 0.2 * nodes + (0.001 + 0.0001 * nodes) * context

    def expand_ms(self, rows, top_k):
        return 0.5 + 0.25 * rows + 0.02 * rows * top_k

    def now(self) -> float:
        return self.ms / 1e3


def test_a_made_up_machine_is_measured_through_the_engine():
    machine = Machine()
    with counted_by(machine.now):
        calibration = Calibration(machine.pair, seconds=5.0, **SMALL)
        assert not calibration.spent_s
        calibration.go_on(0.25)
        assert calibration.spent_s
        model = calibration.model()
    context = np.array([12, 100, 200])
    for nodes in (0, 2, 7, 20):
        expected = machine.verify_ms(nodes, context)
        assert model.verify_ms(nodes, context) == pytest.approx(expected, rel=1e-3)
    for top_k in (1, 2, 3, 4):
        for rows in range(1, top_k + 1):
            expected = machine.expand_ms(rows, top_k)
            assert model.expand_ms(top_k, 100, rows) == pytest.approx(expected, rel=2e-3)
        assert model.root_ms(top_k, 50) == pytest.approx(1.0, rel=1e-3)
    assert model.first_ms == pytest.approx(machine.first_ms, rel=1e-3)
    assert model.step_ms(context) == pytest.approx(machine.verify_ms(0, context), rel=1e-3)
    assert model.rest_ms == pytest.approx(0, abs=1e-6) and model.question_ms == 0
    assert model.errors["cycle_median_frac"] < 1e-3 and abs(model.errors["total_frac"]) < 0.02
    assert model.turn_ms(150) == pytest.approx(machine.verify_ms(149, 0), rel=0.05)
    assert model.reading_ms(150) == pytest.approx(0.02 * 150, rel=0.05)
    assert model.nodes == SMALL["nodes"] and model.widths == SMALL["top_ks"]
    assert model.ranges == {"verify_nodes": (0, 20), "expansions": (0, 4), "top_k": (1, 4)}
    # errors see a wrong model; where some trees are hit more than others, their comparison too
    assert model.errors["tree_frac"] < 0.01
    dear = dataclasses.replace(model, verify=1.5 * np.array(model.verify))
    wrong = calibrate_module.errors(dear, calibration.timings)
    assert wrong["cycle_median_frac"] > 0.1 and wrong["total_frac"] > 0.1
    assert wrong["tree_frac"] > 0.01 and wrong["trees"] > 1
    # a first expansion is dearer by the same where fewer nodes are expanded than it has children
    for row in calibration.timings.cycles:
        if row["rows"] == row["top_k"]:
            row["first_ms"] = np.nan
    narrow = calibrate_module.fit(calibration.timings, name="narrow", provenance="")
    assert narrow.first_ms == pytest.approx(machine.first_ms, rel=1e-3)


@pytest.mark.filterwarnings("ignore")  # so short a run on a busy machine may miss its mark
def test_a_tiny_pair_in_seconds(tmp_path):
    pair = shared_pair()
    model = calibrate(pair, seconds=0.3, **TINY)
    assert model.kind == "calibrated" and model.pair == pair.name and model.dtype == "float32"
    assert model.question_ms > 0 and 0 < model.step_ms(50) < 1000
    assert model.errors["cycles"] > 0 and model.errors["turns"] > 0
    assert CostModel.load(model.save(tmp_path / "costs.json")) == model


@pytest.mark.parametrize("cycle, total, warned", [(0.1, -0.05, 0), (0.11, 0, 1), (0, -0.06, 1)])
def test_a_model_far_off_warns(monkeypatch, recwarn, cycle, total, warned):
    costs = round_costs(errors={"cycle_median_frac": cycle, "total_frac": total})
    monkeypatch.setattr(calibrate_module, "fit", lambda timings, **facts: costs)
    monkeypatch.setattr(Calibration, "finish", lambda calibration: measure.Timings())
    assert Calibration(shared_bigrams(), **TINY).model() is costs
    assert sum("more than 10 % and 5 %" in str(row.message) for row in recwarn) == warned


def test_a_short_calibration_measures_every_size_in_every_context():
    machine = Machine()
    with counted_by(machine.now):
        cycles = Calibration(machine.pair, seconds=1e-3, **SMALL).finish().cycles
    fitted = {(row["place"], row["verify_nodes"]) for row in cycles if not row["held"]}
    assert fitted >= set(itertools.product(range(3), SMALL["nodes"]))


def test_an_answer_costs_its_mean_without_the_first_prompt_and_interruptions():
    machine = Machine()
    costs = round_costs(question_ms=0.5)

    class Pondering(measure.AskingPolicy):
        turns = 0

        def answer(self, question):
            Pondering.turns += question.cycle == 0
            machine.ms += 2.0 if question.cycle and self.turns > 1 else 500.0
            return 0

    with counted_by(machine.now):
        answer_ms = calibrate_module.measured_answer_ms(machine.pair, Pondering(5, 1, 4), costs)
    assert answer_ms == pytest.approx(1.5)


@pytest.mark.parametrize("tree", [(1, 0, 2), (3, 0, 2), (7, 1, 2), (20, 4, 3)])
def test_stretches_leave_nothing_out(tree):
    clock = Clock()
    moments = (number**2 / 1e3 for number in itertools.count())
    clock.now = lambda: next(moments)  # no two stretches take the same time
    rows = []

    class Watching(Static):
        def observe(self, cycle):
            parts = stretches(clock, cycle.total_ms)
            rows.append((cycle, parts, [1e3 * end for _, end in clock.laps["draft"]]))

    policy = Watching(*tree)
    ids = torch.tensor([1, 2, 3])
    engine = LiveEngine(shared_bigrams(), ids, 12, policy.limits, Picker(), clock=clock)
    with engine.inference():
        assert len(list(turn(engine, policy))) == len(rows) + 1 > 1
    for cycle, parts, ends in rows:
        levels = np.diff(ends)
        beyond = np.nan_to_num(parts["root_ms"]) + parts["verify_ms"] + parts["rest_ms"]
        assert beyond + levels.sum() == pytest.approx(cycle.total_ms)
        assert np.isnan(parts["root_ms"]) == (tree[0] == 1)
        if len(levels) > 1:
            assert parts["first_ms"] == pytest.approx(levels[0])
            assert parts["expand_ms"] == pytest.approx(levels[1:].mean())
        else:
            assert np.isnan(parts["expand_ms"])


def test_dealt_trees_are_legal_and_cover_the_grid():
    shapes = TreeSampler((1, 2, 4, 10), (0, 1, 5, 30, 100), 6, random.Random(3))
    bands = shapes.bands()
    assert bands == [(0, 1, 5), (30,), (100,)]
    covered = set()
    for number in range(400):
        band = bands[number // 2 % len(bands)]
        tree = shapes.grid(number % 2, band)
        assert tree.verify_nodes in band
        assert shapes.free(band).verify_nodes <= band[-1]
        for dealt in (tree, shapes.free(shapes.nodes)):
            assert dealt.verify_nodes <= min(dealt.pool_size, 100)
            assert dealt.widest <= dealt.top_k <= 10 and dealt.depth <= 6
        covered |= {(number % 2, "nodes", tree.verify_nodes), (number % 2, "top_k", tree.top_k)}
        covered.add((number % 2, "rows", tree.widest))
    assert len(covered) == 2 * (5 + 4 + 4)


def test_copies_are_not_timed():
    drafter = shared_pair().drafter
    hybrid = Pair(shared_pair().target, HybridDrafter(drafter))
    assert Calibration(hybrid, **SMALL).pair.drafter is drafter
