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


def as_always(pair: Pair, samples: int = 64) -> str:
    """What `describe_pair` has always hashed of weights below 2**24 values; fingerprints on disk hold it."""
    digest = hashlib.sha256()
    for name, weight in sorted(pair.target.model.state_dict().items()):
        flat = weight.flatten()
        spots = torch.linspace(0, max(0, len(flat) - 1), min(samples, len(flat))).long()
        digest.update(f"{name} {tuple(weight.shape)} {flat[spots].double().tolist()}".encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, 576 * 576, 2**24, 2**24 + 1])
def test_fingerprints_of_small_weights_stay_what_they_were(size):
    weight = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    pair = pair_of(first=weight, second=torch.linspace(0, 1, 300).view(3, 100))
    assert describe_pair(pair)["weights"] == as_always(pair)


# In float32 the last index is, in turn, rounded up, exact and rounded down.
@pytest.mark.parametrize("size", [17_000_004, 17_000_003, 17_000_002])
def test_weights_of_more_than_two_to_the_24_values(size):
    weight = torch.zeros(size, dtype=torch.uint8)
    described = describe_pair(pair_of(weight=weight))
    assert described == describe_pair(pair_of(weight=weight.clone()))
    weight[0] = 1  # the first value is always among those that are looked at
    assert describe_pair(pair_of(weight=weight))["weights"] != described["weights"]


@pytest.mark.parametrize("name", ["ours-float32", "radar-float32", "ltd-float32/depth", "resps-float32"])
def test_a_policy_read_twice_is_the_same(name, monkeypatch):
    """Room for later numbers must not hold what memory held before: a run would not be found again."""
    empty, left = np.empty, iter(range(1, 10**6))

    def littered(*args, **kwargs):
        array = empty(*args, **kwargs)
        array.fill(next(left))
        return array

    monkeypatch.setattr(np, "empty", littered)
    first, second = (fingerprint(load_policy(f"smollm2/{name}")) for _ in range(2))
    assert first == second
