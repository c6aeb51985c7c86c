"""The kinds of drafters by name: how each is loaded, and where a shipped pair has its weights.

    "suffix"              a drafter without weights
    "eagle3"              the shipped weights of that kind
    "hybrid:FOLDER"       a kind, and the folder or hub id of its weights
    "FOLDER"              the kind that its config.json says

A new kind is one file and one line of KINDS.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from specdec.core.protocols import Drafter
from specdec.errors import SpecdecError, nearest_name_error
from specdec.models.target import Target

# sizes of the published drafters, counted where no folder is named
DRAFT_VOCABULARY = 32_000
HEADS = {"medusa": 5, "hydra": 4}
COPIES = "copies"  # folder of the table of copy odds, beside a pair's own drafter


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    loader: "module:function" under `specdec.models`: (folder, target) -> the drafter; the target
    alone for a kind without weights.
    folder: its name under a shipped pair, "" for a kind without weights.
    mark: a field of config.json that only checkpoints of this kind have.
    optional: it also works without its folder.
    """

    loader: str
    folder: str = ""
    mark: str = ""
    optional: bool = False

    def load(self, folder: Path | None, target: Target) -> Drafter:
        load = pkgutil.resolve_name(f"specdec.models.{self.loader}")
        drafter: Drafter = load(folder, target) if self.folder else load(target)
        return drafter

    def network(self, folder: Path | None, config: Any) -> nn.Module | None:
        """The weights, on the meta device if possible, for counting; None without weights.

        folder: of the checkpoint; None: the published form for a target of this config.
        """
        if self.folder in ("", COPIES):
            return None
        if self.folder in HEADS:
            return _heads_network(self.folder, folder, config)
        if self.folder == "lm":
            if folder is None:
                raise SpecdecError("a language model has no usual size; name it, lm:FOLDER.")
            import transformers

            return on_meta(transformers.AutoConfig.from_pretrained(folder))
        return _eagle_network(self.folder, folder, config)


KINDS = {
    "eagle3": Kind("eagle_drafter:load_eagle", "drafter"),
    "prompt_lookup": Kind("ngrams:load_prompt_lookup", COPIES, optional=True),
    "suffix": Kind("ngrams:load_suffix", COPIES, optional=True),
    "lookahead": Kind("ngrams:LookaheadDrafter"),
    "hybrid": Kind("ngrams:load_hybrid", "drafter"),
    "eagle1": Kind("eagle_drafter:load_eagle", "eagle1"),
    "griffin": Kind("eagle_drafter:load_eagle", "griffin"),
    "block": Kind("block:load_block", "block", mark="para_depths"),
    "medusa": Kind("heads:load_heads", "medusa", mark="medusa_num_heads"),
    "hydra": Kind("heads:load_heads", "hydra", mark="hydra_num_heads"),
    "lm": Kind("small_lm:load_small_lm", "lm", mark="draft_lm"),
}


def kind_and_source(text: str) -> tuple[str | None, str]:
    """(kind, source) of "kind", "kind:source" or "source"; the kind is None if none is named."""
    kind, colon, source = text.partition(":")
    if kind in KINDS:
        return kind, source
    # C:\folder is a path, and so is one with a colon further on
    if colon and "/" not in kind and len(kind) > 1:
        raise nearest_name_error("kind of drafter", kind, KINDS)
    return None, text


def kind_of(config: dict[str, Any]) -> str:
    """The kind of a checkpoint from its config.json; without another kind's mark, EAGLE."""
    for name, kind in KINDS.items():
        if kind.mark and kind.mark in config:
            return name
    return "eagle3"


def on_meta(config: Any) -> nn.Module:
    """The causal LM of this transformers config, without its weights."""
    import transformers

    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _eagle_network(kind: str, folder: Path | None, config: Any) -> nn.Module:
    """EAGLE's layer, in the published form as wide as the target."""
    from specdec.models.eagle_files import read_checkpoint
    from specdec.models.eagle_network import layer_like, network_of

    shape: dict[str, Any] = {"generation": 1, "num_taps": 1, "fc_bias": True}
    if kind == "drafter":
        shape = {"draft_vocab_size": min(DRAFT_VOCABULARY, config.vocab_size)}
    elif kind == "block":
        shape = {"block": 8}
    elif kind == "griffin":
        shape["griffin"] = True
    layer = layer_like(config, config.vocab_size, **shape)
    if folder is not None:
        layer = read_checkpoint(folder).config
    with torch.device("meta"):
        return network_of(layer)


def _heads_network(kind: str, folder: Path | None, config: Any) -> nn.Module:
    from specdec.models.heads import HeadsConfig, heads_network, read_heads

    hidden = config.hidden_size
    vocabulary = config.vocab_size
    if folder is not None:
        sizes = {"hidden_size": hidden, "vocab_size": vocabulary}
        sizes["num_layers"] = config.num_hidden_layers
        target: Any = SimpleNamespace(**sizes, config=config)
        return read_heads(folder, target)
    shape = HeadsConfig(hidden, vocabulary, vocabulary, HEADS[kind], projections="each")
    if kind == "hydra":
        shape = replace(shape, head_bias=True, path="state")
    with torch.device("meta"):
        return heads_network(shape)
