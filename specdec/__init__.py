"""specdec: reinforcement learning in speculative decoding, four systems under one fair protocol.

The public names are imported on first use, so that `import specdec` costs nothing.
"""

from __future__ import annotations

import importlib

from specdec import waiting  # noqa: F401 - for its effect, before torch is loaded

__version__ = "0.1.0"

_HOMES = {
    "SpecdecError": "errors",
    "TreeConfig": "core.tree_config",
    "CopiedTree": "core.tree_config",
    "Static": "core.policy",
    "RandomPolicy": "core.policy",
    "Chain": "core.policy",
    "StaticShape": "core.tree",
    "DraftTree": "core.tree",
    "Generation": "core.records",
    "Question": "core.records",
    "Cycle": "core.records",
    "Target": "models.target",
    "Pair": "core.pair",
    "load_pair": "models.load",
    "load_drafter": "models.load",
    "register": "models.load",
    "decode": "core.decode",
    "stream": "core.decode",
    "autoregress": "core.decode",
    "chat": "core.decode",
    "decode_many": "core.together",
    "generate": "models.transformers_generate",
    "audit": "evaluation.lossless",
    "distribution_test": "evaluation.lossless",
    "evaluate": "evaluation.bench",
    "summary": "evaluation.bench",
    "noise_check": "evaluation.bench",
    "tune_static": "evaluation.tuning",
    "clairvoyant": "replays.oracle",
    "static_grid": "replays.static_trees",
    "headroom": "replays.oracle",
    "record": "replays.record",
    "estimate_record": "tools.estimate",
    "live_check": "evaluation.compare_live",
    "open_trace": "replays.trace",
    "replay": "replays.replay",
    "load_policy": "policies.base",
    "explore": "report.explorer",
    "watch": "report.live",
    "CostModel": "costs.model",
    "roofline": "costs.profiles",
    "calibrate": "costs.calibrate",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specdec.{_HOMES[name]}"), name)


def __dir__():
    return __all__
