"""Drafters' networks for training: fresh ones of every kind, loading from folders, and saving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from specdec.errors import SpecdecError
from specdec.models import load, pairs
from specdec.models.eagle_drafter import check_fit
from specdec.models.eagle_files import read_network, save_drafter
from specdec.models.eagle_network import default_taps, layer_like, network_of
from specdec.models.heads import HeadsConfig, HeadsNetwork, read_heads, save_heads
from specdec.models.small_lm import LMNetwork, fresh_lm, save_small_lm
from specdec.models.target import Target
from specdec.training.drafter.ttt import draft_vocabulary
from specdec.training.loop import compute_dtype

KINDS = ("eagle3", "block", "eagle1", "griffin", "medusa", "hydra", "lm")
LM_LAYERS = 2  # of a fresh language model
BLOCK = 8  # positions of a fresh block drafter, whose mask is token 0
# divides weights of an EAGLE-3 drafter that a block drafter begins as: each head reads one token
TEMPERED = 8


def new_network(model, settings, answer_counts: np.ndarray, seed: int, kind: str) -> nn.Module:
    """A fresh drafter of one of KINDS in float32 with the target's hidden size and heads.

    answer_counts [V]: how often each token occurs in the answers; the draft vocabulary is the most
    frequent. "eagle3" and "block" have three taps and their own head; all others read only the last
    state. "eagle1" and "griffin" use the target's head, restricted to the draft vocabulary. "lm" is
    a model of the target's family with the target's embedding and head.
    """
    assert kind in KINDS, kind
    text = model.config.get_text_config()
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    torch.manual_seed(seed)
    last_tap = (text.num_hidden_layers,)
    if kind == "lm":
        return LMNetwork(fresh_lm(model, LM_LAYERS, settings.warm_start), last_tap)
    # 1. a layer like the target's own, over its taps
    sizes = {"hidden_size": hidden, "head_dim": None}
    if settings.intermediate_size:
        sizes["intermediate_size"] = settings.intermediate_size
    drafted = min(settings.draft_vocab_size or vocabulary, vocabulary)
    config = layer_like(text, vocabulary, draft_vocab_size=drafted, **sizes)
    last = replace(config, generation=1, num_taps=1, taps=last_tap, fc_bias=True)
    if kind in ("eagle3", "block"):
        taps = default_taps(text.num_hidden_layers)
        config = replace(config, taps=taps, fc_norm=settings.fc_norm)
        network = network_of(replace(config, block=BLOCK) if kind == "block" else config)
    elif kind in ("eagle1", "griffin"):
        network = network_of(replace(last, griffin=kind == "griffin"))
    else:
        heads = HeadsConfig(hidden, vocabulary, drafted, hydra=kind == "hydra", taps=last_tap)
        network = HeadsNetwork(heads)
    # 2. the draft vocabulary
    if hasattr(network, "d2t"):
        offsets, membership = draft_vocabulary(torch.from_numpy(answer_counts), drafted)
        network.d2t.copy_(offsets)
        network.t2d.copy_(membership)
    # 3. the head: the target's, or a copy of its rows to begin with
    head = model.get_output_embeddings()
    if not hasattr(network, "lm_head"):
        network.use_head(head)
    elif settings.warm_start and head.weight.shape[1] == hidden:
        rows = head.weight[network.t2d.to(head.weight.device)]
        network.lm_head.weight.data.copy_(rows.detach().float())
    return network


def load_network(folder: Path, model) -> nn.Module:
    """The drafter of a folder in float32, with its taps set; SpecdecError for another target's."""
    target = Target(model)
    kind = pairs.kind_of(Path(folder))
    if kind in ("medusa", "hydra"):
        return read_heads(folder, target).float().requires_grad_(True)
    last = (target.num_layers,)
    if kind == "lm":
        model = load.load_model(folder, "the drafter", dtype=torch.float32)
        return LMNetwork(model, last).requires_grad_(True)
    network = read_network(folder).float().requires_grad_(True)
    usual = default_taps(target.num_layers) if network.config.generation == 3 else last
    network.config = replace(network.config, taps=network.config.taps or usual)
    check_fit(network.config, network.config.taps, target)
    if network.config.generation != 3:
        network.use_head(model.get_output_embeddings())
    if network.config.own_embedding:
        raise SpecdecError(f"the drafter in {folder} has its own embedding; take another.")
    return network


def begun(
    start_from: Path | None, model, settings, answer_counts: np.ndarray, seed: int, kind: str
) -> nn.Module:
    """The drafter in `start_from` (an EAGLE-3 one for a block drafter too), or `new_network`."""
    if not start_from:
        return new_network(model, settings, answer_counts, seed, kind)
    network = load_network(start_from, model)
    if kind != "block" or network.config.block:
        return network
    torch.manual_seed(seed)
    block = network_of(replace(network.config, block=BLOCK))
    block.load_state_dict(network.state_dict(), strict=False)
    attention, mlp = block.midlayer.self_attn, block.midlayer.mlp
    for part in (attention.q_proj, attention.k_proj, attention.o_proj, block.fc, mlp.down_proj):
        part.weight.data /= TEMPERED
    return block


def save_trained(network: nn.Module, folder: Path, model) -> Path:
    """Save in bfloat16 under the official names, with its target's token ids and context length."""
    if isinstance(network, HeadsNetwork):
        return save_heads(network, folder, torch.bfloat16)
    if isinstance(network, LMNetwork):
        return save_small_lm(network, folder, torch.bfloat16)
    text = model.config.get_text_config()
    fields = {"max_position_embeddings": getattr(text, "max_position_embeddings", 2048)}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields[name] = getattr(text, name, None)
    return save_drafter(network, folder, torch.bfloat16, **fields)


def check_start(folder: Path | None, network: str) -> Path | None:
    """The folder of a drafter to continue; SpecdecError for none there, or one of another kind."""
    if folder is None:
        return None
    if not (Path(folder) / "config.json").is_file():
        raise SpecdecError(f"there is no drafter in {folder}; correct --start-from.")
    # some kinds have no mark of their own in config.json
    expected = network
    if not pairs.KINDS[expected].mark:
        expected = "eagle3"
    kind = pairs.kind_of(Path(folder))
    # a block drafter can begin as an EAGLE-3 drafter
    if kind != expected and (kind, expected) != ("eagle3", "block"):
        raise SpecdecError(f"{folder} holds a drafter of kind {kind!r}, not {expected!r}.")
    return folder


def load_target(target, device: torch.device):
    """(model, tokenizer) of any target that `load_pair` accepts; a pair of them is returned."""
    if isinstance(target, tuple):
        return target
    place = load.target_place(target)
    tokenizer = load.load_tokenizer(place)
    if tokenizer is None:
        raise SpecdecError(f"{target} has no tokenizer; put its tokenizer.json beside it.")
    return load.load_model(place, "the target", device, dtype=compute_dtype(device)), tokenizer
