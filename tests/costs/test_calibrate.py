"""Calibration: known costs come back from a made-up machine, noise does little, a real pair is timed, nonsense refused."""

import dataclasses
import itertools
import random
import time

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.pairs import bigram_pair, random_pair, shared_bigrams, shared_pair
from fakes.traces import round_costs

from specdec.core.clock import counted_by
from specdec.core.decode import decode, turn
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.verification import Picker
from specdec.costs import calibrate as calibrate_module
from specdec.costs import measure
from specdec.costs.calibrate import by_setting, calibrate, fit
from specdec.costs.measure import MarkedClock, Timings, TreeSampler
from specdec.costs.model import CostModel
from specdec.models.ngrams import HybridDrafter

SMALL = dict(
    top_ks=(1, 2, 4), nodes=(0, 2, 5, 9, 20), depth=4, contexts=(10, 60, 150), progress=False
)
TINY = dict(top_ks=(1, 2), nodes=(0, 2, 5), depth=3, contexts=(10, 60), progress=False)

TRUE = round_costs(
    kind="calibrated",
    widths=(1, 4, 10, 20),
    root=(2.0, 2.1, 2.3, 2.6),
    root_per_tok=(0.0001, 0.0004, 0.001, 0.002),
    expand=(1.0, 1.3, 2.0, 3.5),
    expand_per_tok=(0.0002, 0.0008, 0.002, 0.004),
    nodes=(0, 10, 60, 120, 240),
    verify=(9.0, 12.0, 25.0, 45.0, 90.0),
    verify_per_tok=(0.002, 0.005, 0.02, 0.038, 0.074),
    step=8.0,
    step_per_tok=0.003,
    candidate_ms=0.001,
    first_ms=0.15,
    rest_ms=0.4,
    question_ms=0.02,
    turn=5.0,
    turn_per_tok=0.3,
    reading=0.5,
    reading_per_tok=0.02,
)


def made_up(noise: float, spikes: float, count: int = 1500, seed: int = 0) -> Timings:
    """Rows as `TRUE` says, each stretch times log-normal noise, some of them three times as long."""
    draw, found = np.random.default_rng(seed), Timings()

    def seen(ms):
        return float(ms) * draw.lognormal(0, noise) * (3.0 if draw.random() < spikes else 1.0)

    for number in range(count):
        place, held, first = int(draw.integers(3)), number % 5 == 0, number % 50 == 1
        context = int((60, 400, 900)[place] + draw.integers(60))
        nodes = int(draw.integers(241) if held else draw.choice(TRUE.nodes))
        top_k = int(draw.integers(4, 21) if held else draw.choice(TRUE.widths))
        rows = int(
            draw.integers(1, top_k + 1)
            if held
            else draw.choice([w for w in TRUE.widths if w <= top_k])
        )
        expansions = int(draw.integers(1, 9))
        root_ms = seen(TRUE.root_ms(top_k, context) + (TRUE.reading_ms(context) if first else 0.0))
        parts = dict(root_ms=root_ms, verify_ms=seen(TRUE.verify_ms(nodes, context)), rest_ms=None)
        level = TRUE.expand_ms(top_k, context, rows)
        levels = [seen(level + TRUE.first_ms), *(seen(level) for _ in range(expansions - 1))]
        parts["rest_ms"] = seen(TRUE.rest_ms)
        total = {"total_ms": sum(parts.values()) + sum(levels)}
        parts |= dict(first_ms=levels[0] if expansions > 1 else np.nan, last_ms=levels[-1])
        parts["expand_ms"] = np.mean(levels[1:-1]) if expansions > 2 else np.nan
        shape = dict(
            place=place, context_tok=context, top_k=top_k, rows=rows, expansions=expansions
        )
        if first:
            found.turns.append({"prompt_tok": context, "prefill_ms": seen(TRUE.turn_ms(context))})
        kind = dict(verify_nodes=nodes, held=held, first=first, settled=not first)
        found.cycles.append(shape | parts | kind | total)
        found.steps.append(
            {"place": place, "context_tok": context, "ms": seen(TRUE.step_ms(context))}
        )
    found.questions += [seen(0.02) for _ in range(50)]
    for tree, rows in enumerate((10, 4)):
        cycles = [(10, 5, 59, context, rows) for context in range(100, 200, 5)]
        times = TRUE.cycle_ms(*np.array(cycles).T)
        read_ms = TRUE.turn_ms(100) + TRUE.reading_ms(100)
        spent = {"total_ms": float(read_ms + times.sum()), "later_ms": float(times[1:].sum())}
        found.held_turns.append({"tree": tree, "prompt_tok": 100, **spent, "cycles": cycles})
    return found


@pytest.mark.parametrize(("noise", "spikes", "tolerance"), [(0.0, 0.0, 1e-6), (0.05, 0.05, 0.05)])
def test_known_costs_come_back(noise, spikes, tolerance):
    found = fit(made_up(noise, spikes), name="found", provenance="test")
    context = np.array([80, 450, 900])
    asked = [(f"{part}_ms", width, context) for part in ("root", "expand") for width in TRUE.widths]
    asked += [("verify_ms", nodes, context) for nodes in (0, 10, 35, 60, 240)]
    for what, *at in (*asked, ("step_ms", context), ("expand_ms", 20, context, 4)):
        assert getattr(found, what)(*at) == pytest.approx(
            getattr(TRUE, what)(*at), rel=tolerance
        ), what
    for what in ("turn_ms", "reading_ms"):
        assert getattr(found, what)(500) == pytest.approx(
            getattr(TRUE, what)(500), rel=tolerance * 3
        )
    assert found.first_ms == pytest.approx(TRUE.first_ms, rel=tolerance * 4)
    assert found.rest_ms == pytest.approx(TRUE.rest_ms, abs=tolerance)
    assert (
        found.question_ms == pytest.approx(0.02, rel=0.05)
        and abs(found.errors["total_frac"]) < tolerance
    )
    assert (noise == 0) == (found.errors["cycle_median_frac"] < 1e-6)


def test_what_is_fitted_never_falls_and_errors_see_a_wrong_model():
    found = fit(made_up(0.5, 0.2, count=400), name="found", provenance="test")
    for name in ("verify", "verify_per_tok", "expand", "root"):
        assert (np.diff(getattr(found, name)) >= 0).all()
    timings, dear = made_up(0.0, 0.0), dataclasses.replace(TRUE, verify=1.5 * np.array(TRUE.verify))
    uneven = dataclasses.replace(
        TRUE, expand=1.5 * np.array(TRUE.expand) - 0.5
    )  # some trees are hit more than others
    wrong, right, tilted = (
        calibrate_module.errors(model, timings) for model in (dear, TRUE, uneven)
    )
    assert (
        wrong["cycle_median_frac"] > 0.1
        and wrong["total_frac"] > 0.1
        and tilted["tree_frac"] > 0.005
    )
    assert right["cycle_median_frac"] < 1e-9 and right["tree_frac"] < 1e-9


def by_nodes(sizes, ms, repeats=1, **odd):
    """`by_setting` of rows in which verification takes ms(nodes) in each of three contexts. odd: number, verify_ms of one."""
    rows = [
        {"verify_nodes": nodes, "place": place, "context_tok": 100 * place, "verify_ms": ms(nodes)}
        for nodes in sizes
        for place in range(3)
        for _ in range(repeats)
    ]
    if odd:
        rows[odd["number"]]["verify_ms"] = odd["verify_ms"]
    return by_setting(pd.DataFrame(rows), "verify_nodes", "verify_ms")


def test_steps_between_sizes_are_found_and_odd_rows_count_little():
    # Eight rows cost a block, nine cost two: no line may be drawn across.
    settings, base, _ = by_nodes(measure.NODES[:20], lambda n: (5.0 if n < 8 else 7.0) + 0.01 * n)
    assert {6, 7, 8, 9, 15, 16} <= set(settings.tolist())
    at = dict(zip(settings.tolist(), base, strict=True))
    assert at[7] == pytest.approx(5.07) and at[8] == pytest.approx(7.08)
    for repeats, odd in ((5, dict(number=2, verify_ms=500.0)), (1, dict(number=4, verify_ms=0.0))):
        settings, base, per_tok = by_nodes((0, 5, 10), lambda n: 5.0 + n, repeats, **odd)
        assert settings.tolist() == [0, 5, 10] and base == pytest.approx([5, 10, 15])
        assert per_tok == pytest.approx([0, 0, 0])


class Machine:
    """A bigram pair on which drafting and forwards take stated milliseconds and everything else takes none."""

    first_ms = 0.3  # what an expansion takes longer that follows the root pass

    def __init__(self):
        self.pair, self.ms, self.cold_ms = bigram_pair(limit=512), 0.0, 0.0
        forward, drafting = self.pair.target.forward, self.pair.drafter.expand

        def slow_forward(tokens, cache, *args, **options):
            self.ms += self.verify_ms(len(tokens) - 1, len(cache))
            return forward(tokens, cache, *args, **options)

        def slow_root(tokens, features, top_k):
            self.ms += 1.0 + 0.02 * len(tokens) * (len(tokens) > 9)
            self.cold_ms = self.first_ms
            return drafting(tokens[-1:], None, top_k)

        def slow_expand(tokens, rows, top_k):
            self.ms += self.expand_ms(len(tokens)) + self.cold_ms
            self.cold_ms = 0.0
            return drafting(tokens, rows, top_k)

        self.pair.target.forward = slow_forward
        self.pair.drafter.root, self.pair.drafter.expand = slow_root, slow_expand

    def verify_ms(self, nodes, context):
        return 5.0 + 0.2 * nodes + (0.001 + 0.0001 * nodes) * context

    def expand_ms(self, width):
        return 0.5 + 0.25 * width

    def now(self) -> float:
        return self.ms / 1e3


def test_a_made_up_machine_is_measured_through_the_engine_and_by_the_same_seed_alike():
    machine = Machine()
    with counted_by(machine.now):
        model = calibrate(machine.pair, seconds=5.0, **SMALL)
    context = np.array([12, 100, 200])
    for nodes in (0, 2, 7, 20):
        assert model.verify_ms(nodes, context) == pytest.approx(
            machine.verify_ms(nodes, context), rel=1e-3
        )
    for top_k in (1, 2, 3, 4):
        assert model.expand_ms(top_k, context) == pytest.approx(
            machine.expand_ms(top_k) * np.ones(3), rel=1e-3
        )
        assert model.root_ms(top_k, 50) == pytest.approx(1.0, rel=1e-3)
    assert model.first_ms == pytest.approx(machine.first_ms, rel=1e-3)
    assert model.step_ms(context) == pytest.approx(machine.verify_ms(0, context), rel=1e-3)
    assert model.rest_ms == pytest.approx(0, abs=1e-6) and model.question_ms == 0
    assert model.errors["cycle_median_frac"] < 1e-3 and abs(model.errors["total_frac"]) < 0.02
    assert model.turn_ms(150) == pytest.approx(machine.verify_ms(149, 0), rel=0.05)
    assert model.reading_ms(150) == pytest.approx(0.02 * 150, rel=0.05)
    assert model.nodes == SMALL["nodes"] and model.widths == SMALL["top_ks"]
    models = []
    for machine in (Machine(), Machine()):
        with counted_by(machine.now):
            models.append(calibrate(machine.pair, seconds=0.3, seed=4, **TINY))
    assert models[0] == models[1]


@pytest.mark.filterwarnings("ignore")  # so short a run on a busy machine may miss its mark
@pytest.mark.parametrize("make", [bigram_pair, random_pair])
def test_a_tiny_pair_in_seconds(make, tmp_path):
    pair, begin = make(), time.perf_counter()
    before = decode(pair, [1, 2, 3], max_new_tokens=8, policy=Static(8, 2, 2)).tokens
    model = calibrate(pair, seconds=0.3, **TINY)
    assert time.perf_counter() - begin < 30
    assert model.kind == "calibrated" and model.pair == pair.name and model.dtype == "float32"
    assert model.question_ms > 0
    assert 0 < model.step_ms(50) < 1000 and model.errors["cycles"] > 0 and model.errors["turns"] > 0
    assert model.cycle_ms(2, 3, 5, 50) > model.verify_ms(5, 50) > 0
    assert model.check_machine()
    assert CostModel.load(model.save(tmp_path / "costs.json")) == model
    assert decode(pair, [1, 2, 3], max_new_tokens=8, policy=Static(8, 2, 2)).tokens == before
    assert not torch.is_inference_mode_enabled()


def test_a_model_far_off_and_a_busy_machine_warn(monkeypatch):
    machine, draw = Machine(), random.Random(0)

    def now():
        machine.ms += draw.choice((0.0, 300.0))  # whatever is measured here means nothing
        return machine.ms / 1e3

    with pytest.warns(UserWarning, match="more than 10 % and 5 %"), counted_by(now):
        calibrate(machine.pair, seconds=10.0, **TINY)
    monkeypatch.setattr(measure, "BUSY_FRAC", 1e9)
    with pytest.warns(UserWarning, match="of a core while it calibrated"):
        calibrate(shared_bigrams(), seconds=0.1, **TINY)


@pytest.mark.parametrize("tree", [(1, 0, 2), (3, 0, 2), (7, 1, 2), (20, 4, 3)])
def test_stretches_leave_nothing_out(tree):
    clock, rows, moments = MarkedClock(), [], (number**2 / 1e3 for number in itertools.count())
    clock.now = lambda: next(moments)  # no two stretches take the same time

    class Watching(Static):
        def observe(self, cycle):
            rows.append(
                (
                    cycle,
                    clock.stretches(cycle.expansions, cycle.total_ms),
                    np.diff(clock.marks[1:-1]) * 1e3,
                )
            )

    policy = Watching(*tree)
    engine = LiveEngine(
        shared_bigrams(), torch.tensor([1, 2, 3]), 12, policy.limits, Picker(), clock=clock
    )
    with engine.inference():
        assert len(list(turn(engine, policy))) == len(rows) + 1 > 1
    for cycle, parts, levels in rows:
        if cycle.expansions:
            beyond = parts["root_ms"] + parts["verify_ms"] + parts["rest_ms"]
            assert beyond + levels.sum() == pytest.approx(cycle.total_ms)
            assert levels[-1] == pytest.approx(parts["last_ms"])
        else:
            assert np.isnan([parts["root_ms"], parts["last_ms"], parts["expand_ms"]]).all()


def test_dealt_trees_are_legal_and_cover_the_grid():
    shapes = TreeSampler((1, 2, 4, 10), (0, 1, 5, 30, 100), 6, random.Random(3))
    assert not shapes.complete(2)
    bands = shapes.bands()
    assert [nodes for band in bands for nodes in band] == [0, 1, 5, 30, 100]
    for number in range(400):
        band = bands[number // 2 % len(bands)]
        tree = shapes.grid(number % 2, band)
        assert tree.verify_nodes in band
        assert shapes.free(band).verify_nodes <= band[-1]
        for dealt in (tree, shapes.free(), shapes.free(band)):
            assert dealt.verify_nodes <= dealt.pool_size and dealt.widest <= dealt.top_k
            assert (
                dealt.total_tokens <= shapes.limits.total_tokens
                and dealt.top_k <= 10
                and dealt.depth <= 6
            )
    assert shapes.complete(2) and not shapes.complete(3)


def test_rows_of_small_trees_settle_before_they_count_and_copies_are_not_timed(monkeypatch):
    pair = shared_bigrams()
    config = calibrate_module._checked(pair, measure.CalibrateConfig(1.0, **SMALL))
    measured = measure.Measurements(pair, config, calibrate_module._prompts(pair, config))
    band = measured.trees.bands()[0]
    measured.cycles((1, band))
    rows = pd.DataFrame(measured.timings.cycles)
    assert rows["first"].iloc[0] and not (rows["first"] & rows["settled"]).any()
    settled = rows[rows["settled"]]
    counts = {
        nodes: next(kept for most, (_, kept) in measure.ROWS.items() if nodes <= most)
        for nodes in band
    }
    dealt = settled[~settled["held"]].groupby("verify_nodes").size()
    assert settled["held"].any() and all(counts[nodes] <= size for nodes, size in dealt.items())
    later = rows[~rows["first"]].groupby(rows["verify_nodes"] > 0)["settled"].all()
    assert later[False] and not later[True]  # of small trees a row's first cycles do not count
    measured.steps(0)
    measured.steps(0)  # goes on where the last row ended
    (first, second), length = measured.timings.steps, measure.STEPS
    begin = len(measured._prompt(config.contexts[0])) + measure.SETTLING
    assert first["context_tok"] == np.mean(range(begin, begin + length)) and first["ms"] > 0
    assert second["context_tok"] - first["context_tok"] == measure.SETTLING + length
    target, measured = shared_pair().target, []
    monkeypatch.setattr(
        calibrate_module, "Measurements", lambda pair, *rest: measured.append(pair.drafter) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        calibrate(Pair(target, HybridDrafter(shared_pair().drafter)), **SMALL, seconds=0.1)
    assert measured == [shared_pair().drafter]
