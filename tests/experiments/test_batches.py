"""Batches: what is counted of texts that decode together."""

import time
import types

import numpy as np
import pandas as pd
import pytest
import torch

import specdec
from specdec.core import clock
from specdec.core.decode import decode_many
from specdec.core.policy import RandomPolicy
from specdec.core.tree_config import TreeConfig
from specdec.data.suites import gather
from specdec.errors import SpecdecError
from specdec.models.target import Target

from experiments import batches
from experiments.batches import batch_summary, full_batch, measure_batches

PROMPTS = ["What is 3 plus 4?", "Tell me about the river.", "Hello"]
TREE = specdec.Static(8, 3, 3)


@pytest.fixture
def forwards(monkeypatch):
    """A second passes with every forward of the target, and only then."""
    seconds = [0]
    for name in ("forward", "run_together"):
        plain = getattr(Target, name)

        def counted(self, *arguments, plain=plain, **named):
            before = seconds[0]
            result = plain(self, *arguments, **named)
            seconds[0] = before + 1
            return result

        monkeypatch.setattr(Target, name, counted)
    with clock.counted_by(lambda: float(seconds[0])):
        yield seconds


@pytest.mark.parametrize("texts", [1, 3])
def test_every_cycle_is_counted_once_for_all(tiny, forwards, texts):
    prompts = [tiny.ids_of(prompt) for prompt in PROMPTS[:texts]]
    found = full_batch(tiny, prompts, TREE, 24, stop_tokens=())
    alone = decode_many(tiny, prompts, TREE, 24, stop_tokens=(), rows=1)
    # without the first, up to the one before the shortest text ends
    counted = slice(1, 1 + found["cycles"])
    assert found["cycles"] == min(len(out.rows) for out in alone) - 2 > 1
    assert found["new_tok"] == sum(row.new_tok for out in alone for row in out.rows[counted])
    assert found["total_ms"] == 1e3 * found["cycles"] and found["verify_nodes"] == 7


def test_a_run_holds_all_methods_of_a_group_and_continues(tiny, home):
    policy = RandomPolicy(TreeConfig(8, 3, 3))

    def methods(size):
        return {"plain": "autoregressive", "policy": policy, "tree": f"static:{2 + size},2,2"}

    settings = dict(sizes=(1, 4), rounds=2, max_new_tokens=16)
    run = measure_batches(methods, gather({"mine": PROMPTS}), tiny, **settings)
    rows = run.read_table("batches")
    assert len(rows) == 2 * 2 * 3
    assert (rows["total_ms"] > 0).all()
    # more texts than prompts: one of them twice
    assert rows["texts"].tolist() == [1] * 6 + [4] * 6
    for _, part in rows.groupby(["texts", "round"]):
        assert sorted(part["order"]) == [0, 1, 2]
    described = run.record()["config"]["methods"]
    assert described["1"]["tree"] != described["4"]["tree"]
    assert described["1"]["policy"] == described["4"]["policy"]
    again = measure_batches(methods, gather({"mine": PROMPTS}), tiny, **settings)
    assert again.directory == run.directory
    assert again.read_table("batches").equals(rows)
    table = batch_summary(run).set_index(["texts", "method"])
    assert (table["groups"] == 2).all()
    assert (table.xs("plain", level="method")["tau"] == 1).all()


def test_bad_input_is_refused_in_a_sentence(tiny, home):
    measured = (lambda size: {"tree": TREE}, gather({"mine": PROMPTS}), tiny)
    with pytest.raises(SpecdecError, match="too few to count"):
        measure_batches(*measured, sizes=(1,), rounds=1, max_new_tokens=4)


def test_time_may_be_the_processors(tiny, home, monkeypatch):
    counters = []

    def counted(*arguments, **settings):
        counters.append(clock._counter.get())
        return {"new_tok": 3, "total_ms": 2.0, "cycles": 1, "context_tok": 5.0, "verify_nodes": 7.0}

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(batches, "full_batch", counted)
    few = dict(sizes=(2,), rounds=1, max_new_tokens=9, cpu_time=True)
    measured = (lambda size: {"plain": "autoregressive"}, gather({"mine": PROMPTS}), tiny)
    run = measure_batches(*measured, **few)
    assert counters == [time.process_time]
    assert run.read_table("batches")["clock"].item() == "processor"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(SpecdecError, match="processor time counts one thread"):
        measure_batches(*measured, **few)


def test_positions_and_sizes_of_the_counted_cycles(tiny, forwards):
    """Plain texts have two tokens before the counted ones, and half of those on average."""
    prompts = [tiny.ids_of(prompt) for prompt in PROMPTS]
    found = full_batch(tiny, prompts, None, 24, stop_tokens=())
    expected = np.mean([len(ids) for ids in prompts]) + 2 + found["cycles"] / 2
    counts = dict(new_tok=60, total_ms=20e3, cycles=20, verify_nodes=0.0)
    assert found == counts | {"context_tok": pytest.approx(expected)}
    drafted = full_batch(tiny, prompts[:1], TREE, 24, stop_tokens=())
    (alone,) = decode_many(tiny, prompts[:1], TREE, 24, stop_tokens=(), rows=1)
    before = len(prompts[0]) + 1 + alone.rows[0].new_tok
    assert drafted["context_tok"] == pytest.approx(before + drafted["new_tok"] / 2)


def test_the_summary_is_of_all_groups_together():
    """Two groups of two texts; the tree writes as many tokens in half of the time."""
    rows = []
    for number, tokens in enumerate((40, 60)):
        shared = {"texts": 2, "round": number, "new_tok": tokens}
        plain = dict(method="plain", total_ms=10.0 * tokens, cycles=tokens // 2, context_tok=9.0)
        tree = dict(method="tree", total_ms=5.0 * tokens, cycles=10, context_tok=10.0 + number)
        rows += [shared | plain | {"verify_nodes": 0.0}, shared | tree | {"verify_nodes": 7.0}]
    table = pd.DataFrame(rows)
    record = {"config": {"methods": {"2": {"plain": None, "tree": {"tree": 2}}}}}
    run = types.SimpleNamespace(read_table={"batches": table}.get, record=lambda: record)
    table = batch_summary(run)
    columns = ["texts", "method", "groups", "tok_per_s", "speedup", "speedup_low", "speedup_high"]
    assert list(table) == [*columns, "tau", "verify_nodes", "ms_per_cycle", "context_tok"]
    assert table.values.tolist() == [
        pytest.approx([2, "plain", 2, 100, 1, 1, 1, 1, 0, 20, 9]),
        pytest.approx([2, "tree", 2, 200, 2, 2, 2, 2.5, 7, 25, 10.5]),
    ]
