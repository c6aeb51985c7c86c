"""Fingerprints: all that could change a result, as small JSON; a run resumes only if unchanged."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from specdec.core.pair import Pair, dtype_name
from specdec.core.protocols import Drafter


def fingerprint(value: Any, depth: int = 6) -> Any:
    """`value` as small JSON that changes when anything inside does; arrays are hashed."""
    if getattr(value, "fingerprinted", None) is not None:
        # the part of a larger object that results depend on
        value = value.fingerprinted
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _hash_of(value)
    if isinstance(value, torch.nn.Module):
        value = {"class": type(value).__name__, **value.state_dict()}
    if isinstance(value, dict):
        return {str(name): fingerprint(item, depth) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [fingerprint(item, depth) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, random.Random):
        return hashlib.sha256(repr(value.getstate()).encode()).hexdigest()
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if depth == 0 or isinstance(value, type) or callable(value) and not hasattr(value, "__dict__"):
        return name
    # any other object: its attributes, in slots or not
    attributes = {}
    for kind in type(value).__mro__:
        for slot in getattr(kind, "__slots__", ()):
            if hasattr(value, slot):
                attributes[slot] = getattr(value, slot)
    attributes.update(getattr(value, "__dict__", {}))
    fields = {key: fingerprint(item, depth - 1) for key, item in sorted(attributes.items())}
    return {"class": name, **fields}


def _hash_of(array: Any) -> str:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    array = np.ascontiguousarray(array)
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def describe_pair(pair: Pair) -> dict[str, Any]:
    """What results depend on in a pair; up to 64 values of every weight are hashed."""
    drafter = pair.drafter or Drafter()
    target: Any = pair.target
    digest = hashlib.sha256()
    for module in (target.model, drafter.network):
        for name, weight in sorted(module.state_dict().items()) if module is not None else ():
            flat = weight.detach().flatten()
            last = max(0, len(flat) - 1)
            spots = torch.linspace(0, last, min(64, len(flat)), device=flat.device).long()
            spots.clamp_(max=last)  # beyond 2**24 values float32 may round past the end
            digest.update(f"{name} {tuple(weight.shape)} {flat[spots].double().tolist()}".encode())
    described = {
        "pair": pair.name,
        "dtype": dtype_name(target.dtype),
        "device": target.device.type,
        "taps": None if pair.drafter is None else list(pair.drafter.taps),
        "stop_tokens": sorted(pair.stop_tokens),
        "weights": digest.hexdigest()[:16],
    }
    if drafter.fingerprinted is not None:
        described["drafter"] = drafter.fingerprinted
    return described
