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


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 576 * 576, 2**24 + 1])
def test_fingerprints_on_disk_stay_valid(size):
    weight = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    weights = {"first": weight, "second": torch.linspace(0, 1, 300).view(3, 100)}
    digest = hashlib.sha256()
    for name, values in weights.items():
        flat = values.flatten()
        spots = torch.linspace(0, max(0, len(flat) - 1), min(64, len(flat))).long()
        digest.update(f"{name} {tuple(values.shape)} {flat[spots].double().tolist()}".encode())
    assert describe_pair(pair_of(**weights))["weights"] == digest.hexdigest()[:16]


def test_objects_are_described_by_their_attributes():
    class Slotted:
        __slots__ = ("size",)

    slotted = Slotted()
    slotted.size = 3
    value = {"tensor": torch.ones(2), "object": SimpleNamespace(a=(1, 2)), "slotted": slotted}
    described = fingerprint(value)
    assert described["object"] == {"class": "SimpleNamespace", "a": [1, 2]}
    assert described["slotted"]["size"] == 3
    value["tensor"] = torch.ones(2, dtype=torch.float64)
    assert fingerprint(value)["tensor"] != described["tensor"]
