"""Fingerprints of a pair: the same for the same weights, another for changed values."""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from specdec.core.pair import Pair
from specdec.models.pairs import describe_pair, fingerprint


def pair_of(**weights: torch.Tensor) -> Pair:
    """A pair whose target holds just these weights."""
    model = torch.nn.Module()
    for name, weight in weights.items():
        model.register_buffer(name, weight)
    return Pair(SimpleNamespace(model=model, dtype=torch.bfloat16, device=torch.device("cpu")))


@pytest.mark.parametrize("place", [0, 150, 299])
def test_every_byte_of_every_weight_counts(place):
    weight = torch.linspace(0, 1, 300)
    digest = hashlib.sha256()
    for name, values in (("first", weight), ("second", weight.bfloat16())):
        content = hashlib.sha256(values.view(torch.uint8).numpy()).hexdigest()[:16]
        size = values.numel() * values.itemsize
        digest.update(f"{name} {values.dtype} (300,) uint8[{size}] {content}".encode())
    pair = pair_of(first=weight, second=weight.bfloat16())
    assert describe_pair(pair)["weights"] == digest.hexdigest()[:16]
    # a change behind autograd's back too
    weight.view(torch.int32).data[place] ^= 1
    assert describe_pair(pair)["weights"] != digest.hexdigest()[:16]


def test_objects_are_described_by_their_attributes():
    class Slotted:
        __slots__ = ("size",)

    slotted = Slotted()
    slotted.size = 3
    value = {"tensor": torch.ones(2), "object": SimpleNamespace(a=(1, 2)), "slotted": slotted}
    described = fingerprint(value)
    assert described["object"] == {"class": "SimpleNamespace", "a": [1, 2]}
    assert described["slotted"]["size"] == 3
    layer = torch.nn.Linear(2, 1)
    weights = {name: fingerprint(weight) for name, weight in layer.state_dict().items()}
    assert fingerprint(layer) == {"class": "Linear", **weights}
    ring = SimpleNamespace()
    ring.next = ring
    assert str(fingerprint(ring)).count("class") == 6, "rings end"
    value["tensor"] = torch.ones(2, dtype=torch.float64)
    assert fingerprint(value)["tensor"] != described["tensor"]
