"""Detects whether a model still consists of the same modules and weights as when something was derived from it.

After first use, adapters may be added, layers replaced, weights cast or loaded. Fused or packed copies made elsewhere in this
folder hold only for the model as it was, so their owners check here before each use.

Knows nothing about what is derived.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor, nn

SPOTS = 17  # values compared in each weight, spread over it
SETTING = (int, float, str)


class Anatomy:
    """A model's modules, their code and plain settings, and the kind and place of every weight, at one moment.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> taken = Anatomy(model)
    >>> model[0] = nn.Linear(2, 2)
    >>> taken.holds()
    False
    """

    def __init__(self, model: nn.Module):
        self._modules = list(model.modules())
        self._settings = [  # except `training`, which may be either
            (module.__dict__, name)
            for module in self._modules
            for name, value in module.__dict__.items()
            if type(value) in SETTING
        ]
        self._parts, self._facts = self._now()  # kept alive, so that nothing new gets the identity of a removed object

    def holds(self) -> bool:
        """Whether the model still matches the snapshot."""
        parts, facts = self._now()
        same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        return same and facts == self._facts

    def _now(self) -> tuple[list[object], list[object]]:
        weights = list(itertools.chain.from_iterable(module._parameters.values() for module in self._modules))
        children = itertools.chain.from_iterable(module._modules.values() for module in self._modules)
        codes = [type(module).forward for module in self._modules]
        facts: list[object] = [(weight.dtype, weight.device) for weight in weights if weight is not None]
        facts += [held.get(name) for held, name in self._settings]
        return [*weights, *children, *codes], facts


class Values:
    """Sampled values of each weight, for changes that PyTorch does not count: those through `weight.data`."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def changed(self, weights: list[Tensor]) -> bool:
        """Whether the weights differ from the last call; True at the first call."""
        with torch.inference_mode():
            now = [weight.detach().flatten()[:: max(1, weight.numel() // SPOTS)] for weight in weights]
            if len(now) == len(self._seen) and all(map(torch.equal, now, self._seen)):
                return False
            self._seen = [values.clone() for values in now]
        return True
