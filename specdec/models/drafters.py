"""The kinds of drafters by name: how each is loaded, and where a shipped pair keeps its weights of that kind.

    "suffix"              a drafter that works without weights
    "eagle3"              the weights of that kind that ship with the preset
    "hybrid:FOLDER"       a kind, and the folder or hub id of its weights
    "FOLDER"              whatever its config.json says it is

A new kind is one file and one line here, which also says how large its weights are: those of a folder, or, where there is
none, those that its authors publish for a target of that shape. Knows nothing about presets, hubs or tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from specdec.core.protocols import Drafter
from specdec.errors import SpecdecError, nearest_name_error
from specdec.models.target import Target


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    load: (folder, target, how) -> the drafter; the folder is None for a kind without weights; how: `reading` and `start`
    of `load_drafter`. folder: its name under a shipped pair, "" for a kind without weights. marks: fields of config.json
    that only checkpoints of this kind have. optional: it works without its folder too. network: (folder or None, the
    target's transformers config) -> its weights, on the meta device where that will do, to be counted; None: it has none.
    """

    load: Callable[..., Drafter]
    folder: str = ""
    marks: tuple[str, ...] = ()
    optional: bool = False
    network: Callable[..., nn.Module | None] = lambda folder, config: None


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


# ---- how large they are ----------------------------------------------------------------------------------------------
DRAFT_VOCABULARY = 32_000  # of the published EAGLE-3 drafters
HEADS = {"medusa": 5, "hydra": 4}  # of the published ones, each with a projection over the whole vocabulary


def _eagle_network(folder: Path | None, config, **form) -> nn.Module:
    """EAGLE's layer. The published form: as wide as the target (that of Llama-3.3-70B is narrower)."""
    from specdec.models.eagle.checkpoints import read_checkpoint
    from specdec.models.eagle.griffin import network_of
    from specdec.models.eagle.network import EagleConfig

    if folder is not None:
        shape = read_checkpoint(folder).config
    else:
        hidden, vocab, heads = config.hidden_size, config.vocab_size, config.num_attention_heads
        shape = EagleConfig(
            hidden,
            getattr(config, "intermediate_size", None) or 4 * hidden,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            vocab,
            vocab if form else min(DRAFT_VOCABULARY, vocab),
            hidden,
            getattr(config, "head_dim", None) or hidden // heads,
            **form,
        )
    with torch.device("meta"):
        return network_of(shape)


def _first_eagle_network(folder: Path | None, config) -> nn.Module:
    return _eagle_network(folder, config, generation=1, num_taps=1, fc_bias=True)


def _griffin_network(folder: Path | None, config) -> nn.Module:
    return _eagle_network(folder, config, generation=1, num_taps=1, fc_bias=True, griffin=True)


def _heads_network(kind: str) -> Callable:
    def network(folder: Path | None, config) -> nn.Module:
        from specdec.models.heads_checkpoints import read_heads
        from specdec.models.hydra import heads_network
        from specdec.models.medusa import HeadsConfig

        sizes = dict(hidden_size=config.hidden_size, vocab_size=config.vocab_size)
        if folder is not None:
            return read_heads(folder, SimpleNamespace(**sizes, num_layers=config.num_hidden_layers, config=config))
        form = dict(path="state", head_bias=True) if kind == "hydra" else {}
        shape = HeadsConfig(
            **sizes, draft_vocab_size=config.vocab_size, num_heads=HEADS[kind], projections="each", **form
        )
        with torch.device("meta"):
            return heads_network(shape)

    return network


def _small_lm_network(folder: Path | None, config) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if folder is None:
        raise SpecdecError("a small language model has no usual size; name its folder to count it, lm:FOLDER.")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def network_in(drafter: Drafter | None) -> nn.Module | None:
    """The weights of a loaded drafter; None for one without."""
    inside = (getattr(part, "network", None) for part in (drafter, getattr(drafter, "drafter", None)))
    return next((network for network in inside if isinstance(network, nn.Module)), None)


COPIES = "copies"
KINDS = {
    "eagle3": Kind(_eagle, "drafter", network=_eagle_network),
    "prompt_lookup": Kind(_prompt_lookup, COPIES, optional=True),
    "suffix": Kind(_suffix, COPIES, optional=True),
    "lookahead": Kind(_lookahead),
    "hybrid": Kind(_hybrid, "drafter", network=_eagle_network),
    "eagle1": Kind(_eagle, "eagle1", network=_first_eagle_network),
    "griffin": Kind(_eagle, "griffin", network=_griffin_network),
    "medusa": Kind(_heads, "medusa", ("medusa_num_heads",), network=_heads_network("medusa")),
    "hydra": Kind(_heads, "hydra", ("hydra_num_heads",), network=_heads_network("hydra")),
    "lm": Kind(_small_lm, "lm", ("draft_lm",), network=_small_lm_network),
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
