"""The kinds of drafters by name: how each is loaded, and where a shipped pair keeps its weights of that kind.

    "suffix"              a drafter without weights
    "eagle3"              the weights of that kind that ship with the preset
    "hybrid:FOLDER"       a kind, and the folder or hub id of its weights
    "FOLDER"              whatever its config.json says it is

A new kind is one file and one line here. Knows nothing about presets, hubs or tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specdec.core.protocols import Drafter
from specdec.errors import nearest_name_error
from specdec.models.target import Target


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    load: (folder, target, how) -> the drafter; the folder is None for a kind without weights; how: `reading` and `start`
    of `load_drafter`. folder: its name under a shipped pair, "" for a kind without weights. marks: fields of config.json
    that only checkpoints of this kind have.
    """

    load: Callable[..., Drafter]
    folder: str = ""
    marks: tuple[str, ...] = ()


def _eagle(folder: Path, target: Target, how: dict) -> Drafter:
    from specdec.models.eagle.loading import load_eagle

    return load_eagle(folder, target, **how)


KINDS = {"eagle3": Kind(_eagle, "drafter")}


def named(text: str) -> tuple[str | None, str]:
    """(kind, source) of "kind", "kind:source" or "source"; the kind is None where the text names none."""
    kind, colon, source = text.partition(":")
    if kind in KINDS:
        return kind, source
    if colon and "/" not in kind and len(kind) > 1:  # not C:\folder, not a path with a colon in it
        raise nearest_name_error("kind of drafter", kind, KINDS)
    return None, text


def kind_of(config: dict) -> str:
    """The kind of a checkpoint by the fields of its config.json; what no other kind claims is EAGLE's to judge."""
    return next((name for name, kind in KINDS.items() if any(mark in config for mark in kind.marks)), "eagle3")
