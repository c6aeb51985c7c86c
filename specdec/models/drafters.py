"""The kinds of drafters by name: how each is loaded, and where a shipped pair keeps its weights of that kind.

    "suffix"              a drafter that works without weights
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
    that only checkpoints of this kind have. optional: it works without its folder too.
    """

    load: Callable[..., Drafter]
    folder: str = ""
    marks: tuple[str, ...] = ()
    optional: bool = False


def _eagle(folder: Path, target: Target, how: dict) -> Drafter:
    from specdec.models.eagle.loading import load_eagle

    return load_eagle(folder, target, **how)


def _prompt_lookup(folder: Path | None, target: Target, how: dict) -> Drafter:
    from specdec.models.ngrams import PROMPT_LOOKUP, NgramDrafter

    return NgramDrafter(target, PROMPT_LOOKUP, _odds(folder))


def _suffix(folder: Path | None, target: Target, how: dict) -> Drafter:
    from specdec.models.ngrams import NgramDrafter

    return NgramDrafter(target, odds=_odds(folder))


def _lookahead(folder: None, target: Target, how: dict) -> Drafter:
    from specdec.models.lookahead import LookaheadDrafter

    return LookaheadDrafter(target)


def _hybrid(folder: Path, target: Target, how: dict) -> Drafter:
    from specdec.models.hybrid import HybridDrafter

    places = [place for place in (folder / COPIES, folder.parent / COPIES) if place.is_dir()]
    return HybridDrafter(_eagle(folder, target, how), odds=_odds(places[0] if places else None))


def _odds(folder: Path | None):
    from specdec.models.copy_odds import CopyOdds

    return None if folder is None else CopyOdds.load(folder)


def _heads(folder: Path, target: Target, how: dict) -> Drafter:
    from specdec.models.heads_checkpoints import load_heads

    return load_heads(folder, target)


def _small_lm(folder: Path, target: Target, how: dict) -> Drafter:
    from specdec.models.small_lm import load_small_lm

    return load_small_lm(folder, target)


COPIES = "copies"
KINDS = {
    "eagle3": Kind(_eagle, "drafter"),
    "prompt_lookup": Kind(_prompt_lookup, COPIES, optional=True),
    "suffix": Kind(_suffix, COPIES, optional=True),
    "lookahead": Kind(_lookahead),
    "hybrid": Kind(_hybrid, "drafter"),
    "eagle1": Kind(_eagle, "eagle1"),
    "griffin": Kind(_eagle, "griffin"),
    "medusa": Kind(_heads, "medusa", ("medusa_num_heads",)),
    "hydra": Kind(_heads, "hydra", ("hydra_num_heads",)),
    "lm": Kind(_small_lm, "lm", ("draft_lm",)),
}


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
