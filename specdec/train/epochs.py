"""Training of small networks by epochs: `loop.Loop` with an epoch as its step, so that a killed run resumes exactly.

All randomness of an epoch comes from (seed, epoch); an epoch that is interrupted leaves the weights it began with.
"""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pandas as pd
import torch
from torch import Tensor

from specdec.train.loop import Loop


class Epochs(Loop):
    """`run(epoch(number, rate_factor) -> dict)`: the dicts become the rows of loss.parquet, one per epoch."""

    def __init__(self, *arguments, seed: int, shown: tuple[str, ...] = ("loss",), **named):
        self.seed, self.shown = seed, shown
        super().__init__(*arguments, **named)

    def run(self, step: Callable[[int, float], dict]) -> None:
        """Train to the end; Ctrl-C saves the state after the last whole epoch."""

        def whole(number: int, factor: float) -> dict:
            before = [copy.deepcopy(one.state_dict()) for one in (*self.modules.values(), *self.optimizers)]
            try:
                with seeded(self.seed, number):
                    return step(number, factor)
            except BaseException:
                for one, state in zip((*self.modules.values(), *self.optimizers), before, strict=True):
                    one.load_state_dict(state)
                raise

        super().run(whole)

    def _show(self, bar) -> None:
        row = self.curve[-1]
        bar.unit, bar.total = "epoch", self.plan["last_step"]
        bar.set_postfix({name: f"{row[name]:.4g}" for name in self.shown if pd.notna(row.get(name))}, refresh=False)
        bar.update()


@contextmanager
def seeded(seed: int, number: int):
    """torch's CPU generator set from (seed, number) inside the block, and as it was afterwards."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def batches(rows: int, size: int) -> Iterator[Tensor]:
    """All row numbers in random order, `size` at a time."""
    yield from torch.randperm(rows).split(size)
