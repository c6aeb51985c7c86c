"""An EAGLE drafter from its folder: the checkpoint read, its network bound to a target, its reading checked if asked to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specdec.models.eagle.calibrate import calibrate_reading
from specdec.models.eagle.checkpoints import EMBEDDING, Checkpoint, read_checkpoint
from specdec.models.eagle.drafter import EagleDrafter
from specdec.models.fixed_shapes import FixedDrafter, FixedTarget
from specdec.models.target import Target


def load_eagle(folder: Path, target: Target, reading: str = "file", start: Sequence[int] | None = None) -> EagleDrafter:
    """The drafter in `folder`, bound to a target. reading, start: see `load_drafter`."""
    checkpoint = read_checkpoint(folder)
    kind = FixedDrafter if isinstance(target, FixedTarget) else EagleDrafter
    drafter = kind(_without_copied_embedding(checkpoint, target).network(), target)
    if reading == "calibrate":
        begin = getattr(target.config, "bos_token_id", None)
        start = [begin if isinstance(begin, int) else 0] if start is None else start
        calibrate_reading(drafter, checkpoint.doubts, torch.tensor(list(start), dtype=torch.long))
    return drafter


def _without_copied_embedding(checkpoint: Checkpoint, target: Target) -> Checkpoint:
    """The checkpoint without its embedding where that is a copy of the target's: nothing is held twice."""
    own, theirs = checkpoint.tensors.get(EMBEDDING), target.embedding.weight
    if own is None or own.shape != theirs.shape or not torch.equal(own.to(theirs.device, theirs.dtype), theirs):
        return checkpoint
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != EMBEDDING}
    return replace(checkpoint, tensors=tensors, config=replace(checkpoint.config, own_embedding=False))
