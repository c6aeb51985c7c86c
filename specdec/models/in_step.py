"""Decoding with a target that lies in shares among several processes: all of them take the same steps.

    every rank      drafts with its own copy of the drafter, and computes its share of the target's forward
    rank 0          has the say: its drafts, its policy's answers and its picked tokens count on all
    the slowest     rank's time is what a lap took

So the ranks walk the same tree even where their GPUs round otherwise. Knows nothing about how the target is shared.
"""

from __future__ import annotations

import functools
from collections.abc import Generator

import torch
from torch import Tensor

from specdec import ranks
from specdec.core.clock import Clock
from specdec.core.cycle import answer_of, begin_turn
from specdec.core.engine import LiveEngine
from specdec.core.forwards import Step
from specdec.core.policy import Policy, reseed
from specdec.core.records import Cycle
from specdec.core.verification import Picker


class InStep:
    """What `Pair.in_step` is for: it makes picker, engine and policy of a turn those of all ranks."""

    def picker(self, picker: Picker) -> Picker:
        return AgreedPicker(picker.warpers, picker.sample, picker.seed)

    def turn(self, engine: LiveEngine, policy: Policy) -> tuple[LiveEngine, Policy]:
        engine.clock = SlowestClock(engine.target.device)
        engine.root, engine.expand = (functools.partial(_agreeing, step) for step in (engine.root, engine.expand))
        return engine, LedPolicy(policy) if policy.asks else policy


class AgreedPicker(Picker):
    """Rank 0's picks."""

    def pick_tree(self, tree, logits: Tensor, committed: Tensor) -> Tensor | None:
        picks = super().pick_tree(tree, logits, committed)
        return None if picks is None else ranks.agreed(picks)

    def pick(self, logits: Tensor, ids: Tensor) -> int:
        return int(ranks.agreed(torch.tensor(super().pick(logits, ids))))


class LedPolicy(Policy):
    """A policy that rank 0 alone asks. What it raises ends the decoding on all."""

    def __init__(self, policy: Policy):
        self.policy, self.asks, self.limits, self.plan = policy, policy.asks, policy.limits, policy.plan

    def reset(self) -> None:
        ranks.led(lambda: begin_turn(self.policy))

    def reseed(self, number: int) -> None:
        ranks.led(lambda: reseed(self.policy, number))

    def answer(self, question):
        return ranks.led(lambda: answer_of(self.policy, question))

    def observe(self, cycle: Cycle) -> None:
        ranks.led(lambda: self.policy.observe(cycle))


class SlowestClock(Clock):
    """Every lap takes as long as it took the slowest rank, and a cycle as long as its laps."""

    def stop(self) -> dict[str, float]:
        laps = super().stop()
        laps.pop("total_ms")
        laps = dict(zip(laps, ranks.slowest([*laps.values()]), strict=True))
        return {**laps, "total_ms": sum(laps.values())}


def _agreeing(step, *args) -> Step | None:
    """A step of the drafter whose children are rank 0's: tokens int64 and log-probabilities float32, [W, k] each."""
    steps = step(*args)
    return steps if not isinstance(steps, Generator) else _agreed_children(steps)


def _agreed_children(steps: Step) -> Step:
    try:
        forward = next(steps)
        while True:
            tokens, log_probs = yield forward
            both = ranks.agreed(torch.stack((tokens.double(), log_probs.double())))  # exact: ids are below 2**53
            forward = steps.send((both[0].to(tokens.dtype), both[1].to(log_probs.dtype)))
    except StopIteration as finished:
        return finished.value
