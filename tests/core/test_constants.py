"""Masks and counts that never change: right for every count, and few in memory."""

import pytest
import torch

from specdec.core import constants

COUNTS = [1, 2, 255, 256, 257, 511, 512, 513]


@pytest.mark.parametrize("count", COUNTS)
def test_they_are_what_they_say(count):
    ones = torch.ones(count, count, dtype=torch.bool)
    assert torch.equal(constants.causal(count, "cpu"), ones.tril())
    assert torch.equal(constants.identity(count, "cpu"), torch.eye(count, dtype=torch.bool))
    assert torch.equal(constants.counting(count, "cpu"), torch.arange(count))


@pytest.mark.parametrize("count, room", zip(COUNTS, [256] * 4 + [512] * 3 + [1024], strict=True))
def test_counts_share_the_next_power_of_two(count, room):
    assert constants.causal(count, "cpu").untyped_storage().nbytes() == room**2
    assert constants.identity(count, "cpu").untyped_storage().nbytes() == room**2
    assert constants.causal(count, "cpu").data_ptr() == constants.causal(room, "cpu").data_ptr()
