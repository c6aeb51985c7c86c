"""Fingerprints of a pair: the same for the same weights, large ones included, and another for every changed value."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec.core.pair import Pair
from specdec.models.fingerprint import describe_pair, fingerprint
from specdec.policies.base import load_policy


def pair_of(**weights: torch.Tensor) -> Pair:
    """A pair whose target holds just these weights."""
    model = torch.nn.Module()
    for name, weight in weights.items():
        model.register_buffer(name, weight)
    return Pair(SimpleNamespace(model=model, dtype=torch.bfloat16, device=torch.device("cpu")))


def test_fingerprints_of_small_weights_stay_what_they_were_and_large_ones_are_seen():
    for size in [0, 1, 63, 64, 65, 1000, 576 * 576, 2**24, 2**24 + 1]:
        weight = torch.arange(size, dtype=torch.int32).to(torch.uint8)
        weights, digest = (
            {"first": weight, "second": torch.linspace(0, 1, 300).view(3, 100)},
            hashlib.sha256(),
        )
        for (
            name,
            weight,
        ) in weights.items():  # as it has always been hashed; fingerprints on disk hold it
            flat = weight.flatten()
            spots = torch.linspace(0, max(0, len(flat) - 1), min(64, len(flat))).long()
            digest.update(f"{name} {tuple(weight.shape)} {flat[spots].double().tolist()}".encode())
        assert describe_pair(pair_of(**weights))["weights"] == digest.hexdigest()[:16]
    for size in [
        17_000_004,
        17_000_003,
        17_000_002,
    ]:  # in float32 the last index is rounded up, exact, rounded down
        weight = torch.zeros(size, dtype=torch.uint8)
        described = describe_pair(pair_of(weight=weight))
        assert described == describe_pair(pair_of(weight=weight.clone()))
        weight[0] = 1  # the first value is always among those that are looked at
        assert describe_pair(pair_of(weight=weight))["weights"] != described["weights"]


@pytest.mark.parametrize(
    "name", ["ours-float32", "radar-float32", "ltd-float32/depth", "resps-float32"]
)
def test_a_policy_read_twice_is_the_same(name, monkeypatch):
    empty, left = np.empty, iter(range(1, 10**6))

    def littered(*args, **kwargs):
        array = empty(*args, **kwargs)
        array.fill(next(left))
        return array

    monkeypatch.setattr(np, "empty", littered)
    first, second = (fingerprint(load_policy(f"smollm2/{name}")) for _ in range(2))
    assert first == second
