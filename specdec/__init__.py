"""specdec: reinforcement learning for speculative decoding, four systems under one protocol.

Public names are imported on first use, so `import specdec` is cheap.
"""

from __future__ import annotations

import importlib
import os

# Before torch is loaded: OpenMP's waiting threads sleep soon, since spinning ones make decoding
# ten times as slow beside another busy process. Settings of the user are respected.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
    os.environ.update(GOMP_SPINCOUNT="3000", KMP_BLOCKTIME="1")

__version__ = "0.1.0"

_MODULES = {
    "errors": "SpecdecError",
    "core.tree_config": "TreeConfig CopiedTree",
    "core.policy": "Static RandomPolicy Chain",
    "core.tree": "StaticShape DraftTree",
    "core.records": "Generation Question Cycle",
    "core.pair": "Pair",
    "core.decode": "decode stream autoregress decode_many",
    "models.target": "Target",
    "models.load": "load_pair load_drafter",
    "models.transformers_generate": "generate",
    "evaluation.lossless": "audit distribution_test",
    "evaluation.bench": "evaluate summary",
    "evaluation.tuning": "tune_static",
    "evaluation.score": "score",
    "replays.oracle": "clairvoyant headroom",
    "replays.static_trees": "static_grid",
    "replays.record": "record",
    "replays.trace": "open_trace",
    "replays.replay": "replay",
    "policies.base": "load_policy",
    "report.explorer": "explore watch",
    "costs.model": "CostModel",
    "costs.profiles": "roofline",
    "costs.calibrate": "calibrate",
    "tools.estimate": "estimate_record",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specdec.{_HOMES[name]}"), name)


def __dir__():
    return __all__
