"""Batches: what is counted of texts that decode together."""

import numpy as np
import pytest

import specdec
from specdec.core import clock
from specdec.core.policy import RandomPolicy
from specdec.core.together import decode_many
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation.batches import batch_summary, full_batch, measure_batches
from specdec.models.target import Target

PROMPTS = ["What is 3 plus 4?", "Tell me about the river.", "Hello"]
TREE = specdec.Static(8, 3, 3)


@pytest.fixture(scope="module")
def tiny():
    return specdec.load_pair("tiny", dtype="float32")


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
    """One forward of the target serves a cycle of all texts; the tokens are those of the same cycles alone."""
    prompts = [tiny.ids_of(prompt) for prompt in PROMPTS[:texts]]
    found = full_batch(tiny, prompts, TREE, 24, stop_tokens=())
    alone = decode_many(tiny, prompts, TREE, 24, stop_tokens=(), rows=1)
    counted = slice(1, 1 + found["cycles"])  # without the first, up to the one before the shortest text ends
    assert found["cycles"] == min(len(out.rows) for out in alone) - 2 > 1
    assert found["new_tok"] == sum(row.new_tok for out in alone for row in out.rows[counted])
    assert found["total_ms"] == 1e3 * found["cycles"] and found["verify_nodes"] == 7
    plain = full_batch(tiny, prompts, None, 24, stop_tokens=())
    assert plain["new_tok"] == texts * plain["cycles"] and plain["total_ms"] == 1e3 * plain["cycles"]
    assert plain["cycles"] == 24 - 4 and plain["context_tok"] > np.mean([len(ids) for ids in prompts])


def test_a_run_holds_all_methods_of_a_group_and_continues(tiny, home):
    methods = {"plain": "autoregressive", "tree": TREE, "policy": RandomPolicy(TreeConfig(8, 3, 3))}
    settings = dict(sizes=(1, 2), rounds=2, max_new_tokens=16, progress=False)
    run = measure_batches(methods, {"mine": PROMPTS}, tiny, **settings)
    rows = run.read_table("batches")
    assert len(rows) == 2 * 2 * 3 and (rows["total_ms"] > 0).all()
    assert all(sorted(part["order"]) == [0, 1, 2] for _, part in rows.groupby(["texts", "round"]))
    again = measure_batches(methods, {"mine": PROMPTS}, tiny, **settings)
    assert again.directory == run.directory and again.read_table("batches").equals(rows)
    table = batch_summary(run).set_index(["texts", "method"])
    pooled = rows.groupby(["texts", "method"])[["new_tok", "total_ms", "cycles"]].sum()
    speed = 1e3 * pooled["new_tok"] / pooled["total_ms"]
    for place, row in table.iterrows():
        assert row["tok_per_s"] == pytest.approx(speed[place]) and row["groups"] == 2
        assert row["speedup"] == pytest.approx(speed[place] / speed[place[0], "plain"])
        assert row["ms_per_cycle"] == pytest.approx(pooled["total_ms"][place] / pooled["cycles"][place])
        assert row["tau"] == pytest.approx(pooled["new_tok"][place] / pooled["cycles"][place] / place[0])
    assert (table.xs("plain", level="method")["tau"] == 1).all()


def test_methods_may_depend_on_the_size(tiny, home):
    def made(size):
        return {"plain": "autoregressive", "tree": f"static:{2 + size},2,2"}

    run = measure_batches(made, {"mine": PROMPTS}, tiny, sizes=(4,), rounds=1, max_new_tokens=16, progress=False)
    assert set(run.record()["config"]["methods"]["4"]) == {"plain", "tree"}
    assert run.read_table("batches")["texts"].tolist() == [4, 4], "more texts than prompts: one of them twice"


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        ({"tree": TREE}, dict(sizes=(0,)), "a size must be an integer of at least 1"),
        ({"tree": TREE}, dict(sizes=()), "sizes is empty"),
        ({"tree": TREE}, dict(rounds=0), "rounds must be an integer of at least 1"),
        ({"tree": "eagel3"}, {}, "unknown method 'eagel3'; did you mean 'eagle3'"),
        ({"tree": TREE}, dict(sizes=(1,), max_new_tokens=4, progress=False), "too few to count"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(tiny, home, methods, settings, message):
    with pytest.raises(SpecdecError, match=message):
        measure_batches(methods, {"mine": PROMPTS}, tiny, **settings)
