"""Loads an EAGLE drafter from its folder and checks that its checkpoint is interpreted correctly.

A wrong tap, a norm on the wrong side of a residual or a different RoPE base raises no error: only acceptance falls. So the
drafter can be run along the target's own text, under each reading of the fields in doubt (listed in `checkpoints.py`), to
measure how often the two agree. Knows nothing about file layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec.errors import warn
from specdec.models.eagle.checkpoints import EMBEDDING, read_checkpoint
from specdec.models.eagle.drafter import EagleDrafter
from specdec.models.eagle.network import EagleConfig, default_taps
from specdec.models.families import setting
from specdec.models.target import Target

CALIBRATION_TOK = 64
STEPS = 3  # draft steps per position: an error in the fed-back state shows from the second step on
MARGIN_FRAC = 0.03  # required advantage of another reading; 64 x 3 comparisons justify no less
STRANGER_FRAC = 0.15  # below this, the drafter hardly belongs to the target under any reading


def agreement(drafter: EagleDrafter, tokens: Tensor, steps: int = STEPS, count: int = CALIBRATION_TOK) -> float:
    """Fraction of drafted tokens that equal the target's arg-max, over `steps` draft steps from each position.

    tokens int64 [T], of which the last `count` positions are compared. Each step gets the true next token and the state of
    the step before, so that one early mistake does not hide the rest.
    """
    target, length = drafter.target, len(tokens)
    first = max(0, length - steps - count)
    with target.inference(), drafter.inference():
        rows = target.forward(tokens, target.new_cache(length))
        wanted = rows.logits.argmax(-1)
        session = drafter.session(length, steps)
        if first:
            session.advance(tokens[1 : first + 1], rows.features[:first])
        only = torch.zeros(1, dtype=torch.long, device=tokens.device)
        right = []
        for here in range(first, length - steps):
            drafted, _ = session.root(tokens[here + 1 : here + 2], rows.features[here : here + 1], 1)
            right.append(drafted[0, 0] == wanted[here + 1])
            for after in range(here + 2, here + 1 + steps):
                drafted, _ = session.expand(tokens[after : after + 1], only, 1)
                right.append(drafted[0, 0] == wanted[after])
        return float(torch.stack(right).float().mean())


def own_text(target: Target, start: Tensor, count: int = CALIBRATION_TOK) -> Tensor:
    """`start` int64 [P] and its greedy continuation by the target, [P + count]."""
    tokens = torch.cat((start.to(target.device), start.new_zeros(count).to(target.device)))
    with target.inference(taps=False):
        cache, done = target.new_cache(len(tokens)), 0
        for length in range(len(start), len(tokens)):
            tokens[length] = target.forward(tokens[done:length], cache, last_only=True).logits[-1].argmax()
            done = length
    return tokens


def calibrate_reading(drafter: EagleDrafter, doubts: tuple[str, ...], start: Tensor) -> dict[str, float]:
    """Try the other readings of the fields in `doubts`, keep the one that agrees best with the target, warn if it is another.

    start int64 [P]: tokens the target continues greedily by CALIBRATION_TOK. Sets the drafter's config, its taps and
    the target's. Returns the agreement of every reading tried, the file's own under "file".
    """
    target = drafter.target
    target.taps = drafter.taps
    literal, tokens = drafter.config, own_text(target, start)
    scores: dict[EagleConfig, float] = {}
    choices = [[(name, value) for value in _values(literal, name, target.num_layers)] for name in doubts]
    readings = [replace(literal, **dict(choice)) for choice in itertools.product(*choices)]  # the file's own first
    for config in tqdm(readings, desc="calibrating", unit="reading", leave=False):
        _read_as(drafter, config)
        scores[config] = agreement(drafter, tokens)
    # Among readings that agree about equally well, the one closest to the file: 64 tokens cannot separate them.
    close = [config for config, score in scores.items() if score > max(scores.values()) - MARGIN_FRAC]
    chosen = min(close, key=lambda config: (len(_differences(literal, config)), -scores[config]))
    _read_as(drafter, chosen)
    best = scores[chosen]
    if changed := _differences(literal, chosen):
        warn(
            f"the drafter is read with {', '.join(changed)} instead of what its config.json says: so it agrees with "
            f"the target on {best:.0%} of {CALIBRATION_TOK * STEPS} drafted tokens instead of {scores[literal]:.0%}."
        )
    elif best < STRANGER_FRAC:
        warn(
            f"the drafter agrees with the target on at most {best:.0%} of drafted tokens, however it is read; it was "
            "probably trained for another target, or on other layers of it."
        )
    return {", ".join(_differences(literal, config)) or "file": score for config, score in scores.items()}


def _values(config: EagleConfig, name: str, num_layers: int) -> list:
    value = config.to_dict()[name]
    if name == "taps":  # numbered as in the file, or shifted by one either way
        shifted = (tuple(tap + step for tap in value or default_taps(num_layers)) for step in (1, -1))
        return [value, *(taps for taps in shifted if all(0 <= tap <= num_layers for tap in taps))]
    if name == "rope_theta":
        return [value, 10000.0]
    return [value, not value]


def _read_as(drafter: EagleDrafter, config: EagleConfig) -> None:
    """Change only fields that leave every weight in place."""
    drafter.config = drafter.network.config = config
    drafter.taps = drafter.target.taps = tuple(config.taps or default_taps(drafter.target.num_layers))


def _differences(old: EagleConfig, new: EagleConfig) -> list[str]:
    before, after = old.to_dict(), new.to_dict()
    return [f"{name}={after[name]}" for name in after if after[name] != before[name]]


def load_eagle(folder: Path, target: Target, reading: str = "file", start: Sequence[int] | None = None) -> EagleDrafter:
    """The drafter in `folder`, bound to a target. reading, start: see `load_drafter`."""
    checkpoint = read_checkpoint(folder)
    own, theirs = checkpoint.tensors.get(EMBEDDING), target.embedding.weight
    if own is not None and own.shape == theirs.shape and torch.equal(own.to(theirs.device, theirs.dtype), theirs):
        checkpoint.config = replace(checkpoint.config, own_embedding=False)  # a copy of the target's takes memory
        del checkpoint.tensors[EMBEDDING]
    drafter = EagleDrafter(checkpoint.network(), target)
    if reading == "calibrate":
        begin = setting(target.config, "bos_token_id")
        start = [begin if isinstance(begin, int) else 0] if start is None else start
        calibrate_reading(drafter, checkpoint.doubts, torch.tensor(list(start), dtype=torch.long))
    return drafter
