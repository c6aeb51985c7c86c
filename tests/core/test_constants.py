"""Masks and counts that never change: right for every count, and few in memory."""

import pytest
import torch

from specdec.core import tree as constants

COUNTS = [1, 2, 255, 256, 257, 511, 512, 513]


@pytest.mark.parametrize("count, room", zip(COUNTS, [256] * 4 + [512] * 3 + [1024], strict=True))
def test_they_are_what_they_say_and_share_the_next_power_of_two(count, room):
    ones = torch.ones(count, count, dtype=torch.bool)
    for make, expected in (
        (constants.causal, ones.tril()),
        (constants.identity, torch.eye(count, dtype=torch.bool)),
    ):
        assert torch.equal(made := make(count, "cpu"), expected)
        assert made.untyped_storage().nbytes() == room**2
        assert made.data_ptr() == make(room, "cpu").data_ptr()
    assert torch.equal(constants.counting(count, "cpu"), torch.arange(count))


META = torch.device("meta")


def test_they_lie_on_the_device_that_asks_and_very_long_ones_are_not_kept():
    for make in (constants.counting, constants.causal, constants.identity):
        for device in (META, "meta"):
            assert make(5, device).device == META
        assert make(5, "cpu").device.type == "cpu"  # a table of one device is not another's
    for dtype in (torch.bfloat16, torch.float64):
        for one in (constants.scalar(2.0, dtype, META), constants.apart(3, dtype, META)):
            assert one.device == META and one.dtype == dtype
        mask = constants.additive(constants.causal(4, META), dtype)
        assert mask.device == META and mask.dtype == dtype and mask.shape == (4, 4)
    mask = constants.additive(torch.tensor([[True, False]]), torch.float64, -7.0)
    assert mask.tolist() == [[0.0, -7.0]] and mask.dtype == torch.float64
