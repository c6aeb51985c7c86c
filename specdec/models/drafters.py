"""The kinds of drafters by name: how each is loaded, and where a shipped pair has its weights of that kind.

       "suffix"              a drafter without weights
       "eagle3"              the shipped weights of that kind
    "hybrid:FOLDER"       a kind, and the folder or hub id of its weights
       "FOLDER"              the kind that its config.json says

A new kind is one file and one line of KINDS, which also gives the size of its weights: those of a folder or, without one,
those its authors publish for a target of that shape. Knows nothing about presets, hubs or tokenizers.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from specdec import runs, stored
from specdec.core.protocols import Claims, Drafter
from specdec.errors import SpecdecError, nearest_name_error
from specdec.models.dflash import read_dflash
from specdec.models.eagle_files import read_checkpoint
from specdec.models.eagle_network import layer_like, network_of
from specdec.models.heads import HeadsConfig, heads_network, read_heads
from specdec.models.target import Target


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    loader: "module:function" under `specdec.models`: (folder, target) -> the drafter; the target alone for a kind without
    weights. has_readings: the loader takes `reading` and `start` of `load_drafter` as well.
    folder: its name under a shipped pair, "" for a kind without weights. marks: fields of config.json that only checkpoints
    of this kind have. optional: it also works without its folder.
    network: (folder or None, the target's transformers config) -> its weights, on the meta device if possible, for counting;
    None: it has none.
    """

    loader: str
    folder: str = ""
    marks: tuple[str, ...] = ()
    optional: bool = False
    has_readings: bool = False
    network: Callable[..., nn.Module | None] = lambda folder, config: None

    def load(self, folder: Path | None, target: Target, **reading) -> Drafter:
        """A drafter of this kind. reading: `reading` and `start` of `load_drafter`."""
        load = pkgutil.resolve_name(f"specdec.models.{self.loader}")
        if not self.folder:
            return load(target)
        return load(folder, target, **reading) if self.has_readings else load(folder, target)


DRAFT_VOCABULARY = 32_000  # of the published EAGLE-3 drafters
HEADS = {"medusa": 5, "hydra": 4}  # of the published ones, each with a projection over the whole vocabulary


def _eagle_network(folder: Path | None, config, **form) -> nn.Module:
    """EAGLE's layer. The published form: as wide as the target (that of Llama-3.3-70B is narrower)."""
    if folder is not None:
        shape = read_checkpoint(folder).config
    else:
        vocabulary = config.vocab_size
        drafted = vocabulary if form else min(DRAFT_VOCABULARY, vocabulary)
        shape = layer_like(config, vocabulary, draft_vocab_size=drafted, **form)
    with torch.device("meta"):
        return network_of(shape)


def _heads_network(kind: str, folder: Path | None, config) -> nn.Module:
    sizes = dict(hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    if folder is not None:
        return read_heads(folder, SimpleNamespace(**sizes, num_layers=config.num_hidden_layers, config=config))
    form = dict(path="state", head_bias=True) if kind == "hydra" else {}
    shape = HeadsConfig(**sizes, draft_vocab_size=config.vocab_size, num_heads=HEADS[kind], projections="each", **form)
    with torch.device("meta"):
        return heads_network(shape)


def _dflash_network(folder: Path | None, config) -> nn.Module:
    if folder is None:
        raise SpecdecError("DFlash drafters have several sizes; name a folder to count one, dflash:FOLDER.")
    return read_dflash(folder)


def _small_lm_network(folder: Path | None, config) -> nn.Module:
    if folder is None:
        raise SpecdecError("a small language model has no usual size; name its folder to count it, lm:FOLDER.")
    return on_meta(transformers.AutoConfig.from_pretrained(folder))


def on_meta(config) -> nn.Module:
    """The target of this transformers config, without its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


CLAIMS = "specdec"  # the field of config.json with the measured accuracy
COPIES = "copies"  # folder of the table of copy odds, beside a pair's own drafter
_EAGLE = functools.partial(Kind, "eagle.drafter:load_eagle", has_readings=True)
_HEADS = functools.partial(Kind, "heads:load_heads")
_BLOCK = functools.partial(_eagle_network, block=8)
_FIRST_EAGLE = functools.partial(_eagle_network, generation=1, num_taps=1, fc_bias=True)
KINDS = {
    "eagle3": _EAGLE("drafter", network=_eagle_network),
    "prompt_lookup": Kind("ngrams:load_prompt_lookup", COPIES, optional=True),
    "suffix": Kind("ngrams:load_suffix", COPIES, optional=True),
    "lookahead": Kind("ngrams:LookaheadDrafter"),
    "hybrid": Kind("ngrams:load_hybrid", "drafter", has_readings=True, network=_eagle_network),
    "eagle1": _EAGLE("eagle1", network=_FIRST_EAGLE),
    "griffin": _EAGLE("griffin", network=functools.partial(_FIRST_EAGLE, griffin=True)),
    "dflash": Kind("dflash:load_dflash", "dflash", ("dflash_config", "block_size"), network=_dflash_network),
    "block": Kind("block:load_block", "block", ("para_depths", "ptd_token_id", "mask_token_id"), network=_BLOCK),
    "medusa": _HEADS("medusa", ("medusa_num_heads",), network=functools.partial(_heads_network, "medusa")),
    "hydra": _HEADS("hydra", ("hydra_num_heads",), network=functools.partial(_heads_network, "hydra")),
    "lm": Kind("small_lm:load_small_lm", "lm", ("draft_lm",), network=_small_lm_network),
}


def claims_of(config: dict) -> Claims:
    """The measured accuracy in a drafter's config.json."""
    return stored.checked(Claims, config.get(CLAIMS) or {}, f"{CLAIMS!r} in a drafter's config.json", "leave it out")


def write_claims(folder: Path, **measured: Any) -> None:
    """Store measurements of the drafter in `folder`, fields of `Claims`, in its config.json; other fields stay."""
    path = Path(folder) / "config.json"
    config = runs.read_json(path)
    runs.write_json(path, {**config, CLAIMS: {**config.get(CLAIMS, {}), **measured}})


def kind_and_source(text: str) -> tuple[str | None, str]:
    """(kind, source) of "kind", "kind:source" or "source"; the kind is None if the text names none."""
    kind, colon, source = text.partition(":")
    if kind in KINDS:
        return kind, source
    if colon and "/" not in kind and len(kind) > 1:  # not C:\folder, not a path with a colon in it
        raise nearest_name_error("kind of drafter", kind, KINDS)
    return None, text


def kind_of(config: dict) -> str:
    """The kind of a checkpoint from the fields of its config.json; EAGLE handles those without another kind's marks."""
    return next((name for name, kind in KINDS.items() if any(mark in config for mark in kind.marks)), "eagle3")
