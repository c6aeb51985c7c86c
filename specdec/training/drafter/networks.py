"""Drafters' networks for training: fresh ones of every kind, loading from folders, and saving.

Knows nothing about objectives, optimisers or text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from specdec import ranks
from specdec.errors import SpecdecError, check_name
from specdec.models import drafters, load, spread
from specdec.models.eagle_files import Fields, read_checkpoint, save_drafter
from specdec.models.eagle_drafter import check_fit
from specdec.models.eagle_network import default_taps, layer_like, network_of
from specdec.models.heads import HeadsConfig, HeadsNetwork, heads_network, read_heads, save_heads
from specdec.models.small_lm import LMNetwork, fresh_lm, read_small_lm, save_small_lm
from specdec.models.target import Target
from specdec.training.drafter.ttt import draft_vocabulary
from specdec.training.loop import compute_dtype

KINDS = ("eagle3", "block", "eagle1", "griffin", "medusa", "hydra", "hydra++", "lm")
LM_LAYERS = 2  # of a fresh language model
BLOCK = 8  # positions of a fresh block drafter, whose mask is token 0
TEMPERED = 8  # divides weights of an EAGLE-3 drafter that a block drafter begins as: its heads attend to one token each


def new_network(model, settings, answer_counts: np.ndarray, seed: int, kind: str = "eagle3") -> nn.Module:
    """A fresh drafter of one of KINDS in float32 with the target's hidden size and heads.

    settings: a `presets.Settings`. answer_counts [V]: how often each token occurs in the answers; the draft vocabulary is the
    most frequent. "eagle3" and "block" have three taps, their own head and RoPE base 10000; all others read only the last state.
    "eagle1" and "griffin" use the target's head, restricted to the draft vocabulary; the heads of
    "medusa", "hydra" and "hydra++" share a projection that is initialised with those rows. "lm" is a model of the target's
    family with two layers, initialised with the target's embedding and head only.
    """
    check_name("kind of drafter", kind, KINDS)
    text = model.config.get_text_config()
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    torch.manual_seed(seed)
    if kind == "lm":
        return LMNetwork(fresh_lm(model, LM_LAYERS, settings.warm_start), (text.num_hidden_layers,))
    sizes = dict(hidden_size=hidden, head_dim=None)
    if settings.intermediate_size:
        sizes["intermediate_size"] = settings.intermediate_size
    drafted = min(settings.draft_vocab_size or vocabulary, vocabulary)
    config = layer_like(text, vocabulary, draft_vocab_size=drafted, **sizes)
    last = replace(config, generation=1, num_taps=1, taps=(text.num_hidden_layers,), fc_bias=True)
    if kind in ("eagle3", "block"):
        taps, block = default_taps(text.num_hidden_layers), BLOCK * (kind == "block")
        network = network_of(
            replace(config, taps=taps, fc_norm=settings.fc_norm, block=block, num_layers=settings.layers)
        )
    elif kind in ("eagle1", "griffin"):
        network = network_of(replace(last, griffin=kind == "griffin"))
    else:
        path = {"medusa": None, "hydra": "state", "hydra++": "layer"}[kind]
        layer = replace(last, draft_vocab_size=vocabulary) if path == "layer" else None
        sizes = hidden, vocabulary, config.draft_vocab_size
        network = heads_network(HeadsConfig(*sizes, taps=last.taps, path=path, layer=layer))
    if hasattr(network, "d2t"):
        found = draft_vocabulary(torch.from_numpy(answer_counts), config.draft_vocab_size)
        network.d2t.copy_(found[0])
        network.t2d.copy_(found[1])
    head = spread.whole_head(model)
    if not hasattr(network, "lm_head"):
        network.use_head(head)
    elif settings.warm_start and head is not None and head.weight.shape[1] == hidden:
        with torch.no_grad():
            network.lm_head.weight.copy_(head.weight[network.t2d.to(head.weight.device)].float())
    return network


def load_network(folder: Path, model) -> nn.Module:
    """The drafter of a folder in float32, with its taps set. SpecdecError if it reads another target."""
    target = Target(model)
    kind = drafters.kind_of(Fields.read(Path(folder).expanduser()))
    if kind in drafters.HEADS:
        return read_heads(folder, target).float().requires_grad_(True)
    if kind == "lm":
        return LMNetwork(read_small_lm(folder, torch.float32), (target.num_layers,)).requires_grad_(True)
    network = read_checkpoint(folder).network().float().requires_grad_(True)
    usual = default_taps(target.num_layers) if network.config.generation == 3 else (target.num_layers,)
    network.config = replace(network.config, taps=network.config.taps or usual)
    check_fit(network.config, network.config.taps, target)
    if network.config.generation != 3:
        network.use_head(spread.whole_head(model))
    if network.config.own_embedding:
        raise SpecdecError(f"the drafter in {folder} has an embedding of its own, which is not trained; take another.")
    return network


def begun(start_from: Path | None, model, settings, answer_counts: np.ndarray, seed: int, kind: str) -> nn.Module:
    """The drafter in `start_from`, or `new_network`. A block drafter can begin as an EAGLE-3 drafter with smaller weights."""
    if settings.layers > 1 and kind != "block":
        raise SpecdecError(f"only a block drafter is trained with several layers; {kind} has none to choose.")
    if not start_from:
        return new_network(model, settings, answer_counts, seed, kind)
    network = load_network(start_from, model)
    if kind != "block" or network.config.block:
        return network
    made = network_of(replace(network.config, block=BLOCK, num_layers=settings.layers))
    made.load_state_dict(network.state_dict(), strict=False)
    attention = made.midlayer.self_attn
    for part in (made.fc, made.midlayer.mlp.down_proj, attention.q_proj, attention.k_proj, attention.o_proj):
        part.weight.data /= TEMPERED
    for layer in made.layers.values():  # they change nothing yet
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return made


def save_trained(network: nn.Module, folder: Path, model) -> Path:
    """Save the drafter in bfloat16 under the official names, with the token ids and the context length of its target.

    Only one of several ranks writes it.
    """
    if not ranks.leads():
        return folder
    if isinstance(network, HeadsNetwork):
        return save_heads(network, folder, torch.bfloat16)
    if isinstance(network, LMNetwork):
        return save_small_lm(network, folder, torch.bfloat16)
    text = model.config.get_text_config()
    ids = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    longest = getattr(text, "max_position_embeddings", 2048)
    return save_drafter(network, folder, torch.bfloat16, max_position_embeddings=longest, **ids)


def check_start(folder: Path | None) -> Path | None:
    """The folder of a drafter to continue from; SpecdecError if there is none, before anything is read or written."""
    if folder is not None and not (Path(folder) / "config.json").is_file():
        raise SpecdecError(f"there is no drafter in {folder} to continue from; name one with --start-from FOLDER.")
    return folder


def load_target(target, device: torch.device, fsdp: bool = False):
    """(model, tokenizer) of any target that `load_pair` accepts; a (model, tokenizer) pair is returned unchanged."""
    if isinstance(target, tuple):
        return target
    place = load.target_place(target)
    tokenizer = load.load_tokenizer(place)
    if tokenizer is None:
        raise SpecdecError(f"{target} has no tokenizer to read conversations with; put its tokenizer.json beside it.")
    return load.load_model(place, compute_dtype(device), device, spread=spread.FSDP if fsdp else None), tokenizer
