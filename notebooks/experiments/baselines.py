"""Drafters beside each other on one target: loaded by kind, described, judged in one interleaved
run and by replay.

A kind that a pair has no weights of is left out, with the sentence that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.protocols import Drafter
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation.methods import DraftedBy
from specdec.models.load import load_drafter, preset_drafter
from specdec.models.pairs import KINDS, kind_and_source
from specdec.policies.heuristics import CopyGate
from specdec.replays.record import record
from specdec.replays.replay import replay

GATED = "hybrid, gated"
# a small language model has no usual place
ALL = tuple(kind for kind in KINDS if kind != "lm")


def drafters_of(pair: Pair, kinds: Sequence[str]) -> tuple[dict[str, Drafter], dict[str, str]]:
    """The drafters of a preset's target by kind; and for each kind that is not available the
    sentence that says why.

    kinds: names in `pairs.KINDS`, or "kind:folder". SpecdecError for a name that is no kind.
    """
    drafters = {}
    absent = {}
    for kind in kinds:
        if kind_and_source(kind)[0] is None:
            raise nearest_name_error("kind of drafter", kind, KINDS)
        try:
            drafters[kind] = load_drafter(preset_drafter(pair.name, kind), pair.target)
        except SpecdecError as error:
            absent[kind] = str(error)
    return drafters, absent


def methods_of(
    drafters: dict[str, Drafter], tree: TreeConfig, copied_tokens: int, saved_frac: float
) -> dict[str, DraftedBy]:
    """Each drafter with the tree, one that only copies with `copied_tokens`; and a hybrid's with a
    `CopyGate` as well.
    """
    methods = {}
    for kind, drafter in drafters.items():
        shape = tree if getattr(drafter, "forwards", True) else CopiedTree(copied_tokens)
        methods[kind] = DraftedBy(drafter, Static.of(shape), kind)
    if "hybrid" in drafters:
        shape = (tree.total_tokens, tree.depth, tree.top_k, *tree.beam)
        gate = CopyGate(shape, copied_tokens, saved_frac)
        methods[GATED] = DraftedBy(drafters["hybrid"], gate, "hybrid")
    return methods


def described(drafters: dict[str, Drafter]) -> pd.DataFrame:
    """One row per drafter: parameters of its own, their megabytes, forwards per level (0: copies
    alone), extra_rows of the target's forward, copied_tok along the longest copied path.
    """
    rows = []
    for kind, drafter in drafters.items():
        network = getattr(drafter, "network", None)
        weights = [] if network is None else list(network.parameters())
        row = {
            "drafter": kind,
            "parameters": sum(weight.numel() for weight in weights),
            "megabytes": sum(weight.numel() * weight.element_size() for weight in weights) / 1e6,
            "forwards": int(getattr(drafter, "forwards", True)),
            "extra_rows": getattr(drafter, "extra_rows", 0),
            "copied_tok": getattr(drafter, "copied_levels", 0),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def replayed(
    pair: Pair, methods: dict[str, DraftedBy], prompts, costs, **settings
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Every method replayed on a recording of its own drafter: rows of `Replayed.table` with the
    method; and why some are not.

    settings: of `record`.
    """
    parts = []
    absent = {}
    traces = {}
    for name, method in methods.items():
        try:
            key = id(method.drafter)
            if key not in traces:
                drafted = replace(pair, drafter=method.drafter)
                traces[key] = record(drafted, prompts, **settings)
            table = replay(traces[key], method.policy, costs).table
            parts.append(table.assign(method=name))
        except SpecdecError as error:
            absent[name] = str(error)
    return pd.concat(parts, ignore_index=True), absent


def reached(cycles: pd.DataFrame, depths: int = 8) -> pd.DataFrame:
    """Share of a method's cycles in which at least d tokens of the draft were accepted; one row a
    method, one column a depth.

    Whatever the tree: a path that was never drafted was not accepted either.
    """
    deep = {str(depth): cycles["accepted_tok"] >= depth for depth in range(1, depths + 1)}
    return pd.DataFrame(deep).groupby(cycles["method"], sort=False).mean()
