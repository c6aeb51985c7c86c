"""What goes between host and device in a cycle: one read-back and one upload."""

import contextlib

import pytest
import torch

import specdec
from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.policy import Static
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.verification import Picker

READS = ("cpu", "tolist", "item", "__int__", "__bool__", "__float__", "__index__")
UPLOADS = ("tensor", "as_tensor", "from_numpy")


@contextlib.contextmanager
def counted(monkeypatch):
    """Counts of read-backs and uploads inside; calls within a counted call do not count."""
    counts, inside = {"reads": 0, "uploads": 0}, []

    def counting(owner, name, kind, patch):
        plain = getattr(owner, name)

        def call(*args, **kwargs):
            counts[kind] += not inside
            inside.append(kind)
            try:
                return plain(*args, **kwargs)
            finally:
                inside.pop()

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        for name in READS:
            counting(torch.Tensor, name, "reads", patch)
        for name in UPLOADS:
            counting(torch, name, "uploads", patch)
        yield counts


@pytest.mark.parametrize("tree", [Static(60, 7, 10), Static.of(StaticShape(EAGLE1_TREE))])
@pytest.mark.parametrize(
    "sampling", [{}, dict(temperature=1.0), dict(temperature=0.8, top_k=20, repetition_penalty=1.2)]
)
def test_one_read_back_and_one_upload_a_cycle(tiny, monkeypatch, tree, sampling):
    # as on an accelerator
    monkeypatch.setattr(Picker, "whole_trees", staticmethod(lambda device: True))
    picker = Picker.from_settings(**sampling)
    # tables are made when they are first needed
    specdec.decode(tiny, "Tell me about the river.", tree, 64)
    prompt = torch.tensor(tiny.ids_of("What is 3 plus 4?"))
    engine = LiveEngine(tiny, prompt, 64, tree.limits, picker)
    with engine.inference():
        engine.prefill()
        run_cycle(engine, tree)
        for _ in range(3):
            with counted(monkeypatch) as counts:
                run_cycle(engine, tree)
            assert counts == {"reads": 1, "uploads": 1}
