"""Drafters beside each other on one target: loaded by kind, described, judged in one interleaved
run and by replay.

Knows nothing about what they draft with; a kind that a pair has no weights of is left out, with the
sentence that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.protocols import Drafter
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation.methods import DraftedBy
from specdec.models.drafters import KINDS, kind_and_source
from specdec.models.load import load_drafter, preset_drafter, shipped_folder
from specdec.policies.copying import CopyGate
from specdec.replays.record import record
from specdec.replays.replay import replay

GATED = "hybrid, gated"
ALL = tuple(kind for kind in KINDS if kind != "lm")  # a small language model has no usual place


def drafters_of(pair: Pair, kinds: Sequence[str]) -> tuple[dict[str, Drafter], dict[str, str]]:
    """The drafters of a preset's target by kind; and for each kind that is not available the
    sentence that says why.

    kinds: names in `drafters.KINDS`, or "kind:folder". SpecdecError for a name that is no kind.
    """
    if unknown := [kind for kind in kinds if kind_and_source(kind)[0] is None]:
        raise nearest_name_error("kind of drafter", unknown[0], KINDS)
    found, absent = {}, {}
    for kind in kinds:
        try:
            found[kind] = load_drafter(preset_drafter(pair.name, kind), pair.target)
        except SpecdecError as error:
            absent[kind] = str(error)
    return found, absent


def methods_of(
    drafters: dict[str, Drafter], tree: TreeConfig, copied_tokens: int, saved_frac: float
) -> dict:
    """Each drafter with the tree, one that only copies with `copied_tokens`; and a hybrid's with a
    `CopyGate` as well: `DraftedBy` by kind.
    """
    methods = {}
    for kind, drafter in drafters.items():
        own = tree if getattr(drafter, "forwards", True) else CopiedTree(copied_tokens)
        methods[kind] = DraftedBy(drafter, Static.of(own), kind)
    if "hybrid" in drafters:
        gate = CopyGate(
            (tree.total_tokens, tree.depth, tree.top_k, *tree.beam), copied_tokens, saved_frac
        )
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
        megabytes = sum(weight.numel() * weight.element_size() for weight in weights) / 1e6
        row = [
            kind,
            sum(weight.numel() for weight in weights),
            megabytes,
            int(getattr(drafter, "forwards", True)),
        ]
        rows.append([*row, getattr(drafter, "extra_rows", 0), getattr(drafter, "copied_levels", 0)])
    return pd.DataFrame(
        rows, columns=["drafter", "parameters", "megabytes", "forwards", "extra_rows", "copied_tok"]
    )


def with_training(described: pd.DataFrame, pair: str) -> pd.DataFrame:
    """`described` with learned_tok, distinct tokens of answers, and trained_min, minutes, from the
    drafters' cards.

    NaN for a kind that this pair ships without a card.
    """
    rows = []
    for kind in described["drafter"]:
        folder = shipped_folder(pair)
        own = kind in KINDS and KINDS[kind].folder == kind
        card = (
            runs.found((folder / kind if own else folder) / "card.json")
            if own or kind == "eagle3"
            else {}
        )
        training = card.get("training", {})
        minutes = [
            run["minutes"] for run in (training.get("drafter"), *training.get("later", [])) if run
        ]
        learned_tok = card["learned"][-1]["distinct_tok"] if card.get("learned") else np.nan
        rows.append({"learned_tok": learned_tok, "trained_min": sum(minutes) or np.nan})
    return described.join(pd.DataFrame(rows, index=described.index))


def replayed(
    pair: Pair, methods: dict[str, DraftedBy], prompts, costs, **settings
) -> tuple[pd.DataFrame, dict]:
    """Every method replayed on a recording of its own drafter: rows of `Replayed.table` with the
    method; and why some are not.

    settings: of `record`.
    """
    parts, absent, traces = [], {}, {}
    for name, method in methods.items():
        try:
            if id(method.drafter) not in traces:
                traces[id(method.drafter)] = record(
                    replace(pair, drafter=method.drafter), prompts, **settings
                )
            table = replay(traces[id(method.drafter)], method.policy, costs).table
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
