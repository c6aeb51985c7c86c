"""Drafters beside each other on one target: loaded by kind, and judged by replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from specdec.core.pair import Pair
from specdec.core.protocols import Drafter
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation.methods import DraftedBy
from specdec.models.load import load_drafter, preset_drafter
from specdec.models.pairs import KINDS, kind_and_source
from specdec.replays.record import record
from specdec.replays.replay import replay

# a small language model has no usual place
ALL = tuple(kind for kind in KINDS if kind != "lm")


def drafters_of(pair: Pair, kinds: Sequence[str]) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Drafters of a preset's target by kind or "kind:folder", and why others are not available."""
    drafters = {}
    absent = {}
    for kind in kinds:
        if kind_and_source(kind)[0] is None:
            raise nearest_name_error("kind of drafter", kind, KINDS)
        # no weights of this kind
        try:
            drafters[kind] = load_drafter(preset_drafter(pair.name, kind), pair.target)
        except SpecdecError as error:
            absent[kind] = str(error)
    return drafters, absent


def replayed(
    pair: Pair, methods: dict[str, DraftedBy], prompts, costs, **settings
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Every method replayed on a recording (`record`) of its own drafter, and why some are not."""
    parts = []
    absent = {}
    traces = {}
    for name, method in methods.items():
        try:
            # one recording for all methods with the same drafter
            key = id(method.drafter)
            if key not in traces:
                drafted = replace(pair, drafter=method.drafter)
                traces[key] = record(drafted, prompts, **settings)
            table = replay(traces[key], method.policy, costs).table
            parts.append(table.assign(method=name))
        except SpecdecError as error:
            absent[name] = str(error)
    return pd.concat(parts, ignore_index=True), absent
