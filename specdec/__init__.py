"""specdec: reinforcement learning in speculative decoding, four systems under one fair protocol.

The public names are imported on first use, so that `import specdec` costs nothing.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "SpecdecError": "config",
    "TreeConfig": "config",
    "Static": "policy",
    "RandomPolicy": "policy",
    "Chain": "policy",
    "StaticShape": "tree",
    "DraftTree": "tree",
    "Generation": "records",
    "Question": "records",
    "Cycle": "records",
    "Target": "target",
    "Pair": "hub",
    "load_pair": "hub",
    "load_drafter": "hub",
    "decode": "decoding",
    "stream": "decoding",
    "autoregress": "decoding",
    "chat": "decoding",
    "generate": "decoding",
    "audit": "lossless",
    "distribution_test": "distribution",
    "evaluate": "bench",
    "summary": "bench",
    "noise_check": "bench",
    "tune_static": "tuning",
    "clairvoyant": "bound",
    "static_grid": "statics",
    "headroom": "bound",
    "record": "recording",
    "estimate_record": "recording_estimate",
    "live_check": "livecheck",
    "open_trace": "trace",
    "replay": "replaying",
    "load_policy": "policies.learned",
    "CostModel": "costs",
    "roofline": "costs",
    "calibrate": "calibration",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specdec.{_HOMES[name]}"), name)


def __dir__():
    return __all__
