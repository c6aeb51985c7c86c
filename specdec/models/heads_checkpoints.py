"""Medusa's and Hydra's checkpoints on disk: the official layouts -> `HeadsNetwork`, and back.

    Medusa   config.json: medusa_num_heads, medusa_num_layers          medusa_lm_head.safetensors or .pt
             {i}.{j}.linear.{weight,bias}                              block of head i, once per layer j, all the same
             {i}.{L}.weight                                            its projection; version 2 has none: the target's
    Hydra    config.json: hydra_num_heads, hydra_num_layers, ...       hydra_lm_head.safetensors or .pt
             hydra_mlp.{i}.{j}.{linear,res_connection}.{weight,bias}   odd j alone in Hydra++, whose even ones are dropout
             hydra_lm_head.{i}[.1].{weight,bias}                       its projection
             prefix_embeding_layer.*                                   Hydra++'s layer
       ours     both, in place of a projection per head                   lm_head.weight, d2t, t2d: one for all, over a part of
                                                                       the vocabulary; config.json says draft_vocab_size

What the files leave out comes from the target: sizes, and the shape of the layer's attention. Reading is strict: every weight
is present, none is left over. If config.json and the weights disagree on the number of heads, the weights decide, with a
warning. Knows nothing about hubs, decoding or training.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from specdec import runs
from specdec.errors import SpecdecError, warn
from specdec.models.eagle.checkpoints import Fields, bad_checkpoint, read_weights, save_tensors, with_weights
from specdec.models.eagle.network import EagleConfig, layer_like
from specdec.models.families import setting
from specdec.models.heads import HeadsConfig, HeadsNetwork, HydraDrafter, MedusaDrafter, heads_network
from specdec.models.target import Target
from specdec.stored import inside

MEDUSA_2 = "medusa_head."  # heads trained together with their model, stored beside its weights
PREFIX = "prefix_embeding_layer."  # official spelling
UNREAD = re.compile(rf"^input_embed_fn\.|^{PREFIX}embed_tokens\.|rotary_emb\.inv_freq$")
SHARED = ("lm_head.weight", "d2t", "t2d")


def read_heads(folder: str | Path, target: Target) -> HeadsNetwork:
    """The heads in `folder`, built for `target`. SpecdecError if they are incomplete, have extra weights or do not fit."""
    folder = Path(folder).expanduser()
    fields = Fields.read(folder)
    kind = "hydra" if "hydra_num_heads" in fields else "medusa"
    tensors = _tensors(folder, f"{kind}_lm_head")
    layers = fields.number(f"{kind}_num_layers", 1)
    if layers > max(1, len(tensors)):
        raise bad_checkpoint(
            folder, f"config.json counts {layers} layers, its weights are {len(tensors)}; fetch it again."
        )
    read = _hydra if kind == "hydra" else _medusa
    config, named = read(fields, tensors, layers, target)
    stated = fields.get(f"{kind}_num_heads")
    if stated != config.num_heads:
        warn(f"{folder}: config.json counts {stated} heads, the weights {config.num_heads}; the weights decide.")
    with torch.device("meta"):  # allocates nothing of the size that config.json claims
        network = heads_network(config)
    return with_weights(network, named, folder, "this target")


def _tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """The heads' weights under their official names, without unused ones."""
    names = [f"{stem}.safetensors", f"{stem}.pt", "model.safetensors", "pytorch_model.bin"]
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is None:
        raise SpecdecError(f"{folder} has no weights of heads; expected {' or '.join(names[:2])}.")
    path = inside(folder, name, "fetch the checkpoint again")
    tensors = {name: tensor for name, tensor in read_weights(path).items() if not UNREAD.search(name)}
    together = {name.removeprefix(MEDUSA_2): tensor for name, tensor in tensors.items() if name.startswith(MEDUSA_2)}
    return together or tensors


def _medusa(fields: Fields, tensors: dict[str, Tensor], layers: int, target: Target):
    """(config, tensors by our names) of Medusa's heads."""
    heads = _count_heads(fields.folder, tensors, r"(\d+)\.0\.linear\.weight")
    named, rest = {}, dict(tensors)
    for head in range(heads):
        for part in ("weight", "bias"):
            same = [rest.pop(f"{head}.{layer}.linear.{part}", None) for layer in range(layers)]
            named[f"first.{head}.linear.{part}"] = _repeated_block(fields.folder, f"{head}.*.linear.{part}", same)
        if (own := rest.pop(f"{head}.{layers}.weight", None)) is not None:
            named[f"lm_heads.{head}.weight"] = own
    return _with_projection(fields, named, rest, dict(num_heads=heads, num_layers=layers), target)


def _hydra(fields: Fields, tensors: dict[str, Tensor], layers: int, target: Target):
    """(config, tensors by our names) of Hydra's heads."""
    kinds = {"mlp": "state", "prefix-mlp": "layer"}
    kind = str(fields.get("hydra_head_arch", "mlp"))
    if kind not in kinds or fields.get("grounded_heads") is False or fields.get("hidden_state_offset"):
        raise bad_checkpoint(
            fields.folder, f"Hydra heads of kind {kind!r} with these settings are not supported; only {list(kinds)}."
        )
    step, first = (2, 1) if kind == "prefix-mlp" else (1, 0)  # dropout layers count too
    heads = _count_heads(fields.folder, tensors, rf"hydra_mlp\.(\d+)\.{first}\.linear\.weight")
    named, rest = {}, dict(tensors)
    for head in range(heads):
        for part in ("weight", "bias"):
            for block in ("linear", "res_connection"):
                named[f"first.{head}.{block}.{part}"] = rest.pop(f"hydra_mlp.{head}.{first}.{block}.{part}", None)
            if layers > 1:
                name = f"hydra_mlp.{head}.*.linear.{part}"
                numbers = [str(first + step * layer) for layer in range(1, layers)]
                same = [rest.pop(name.replace("*", number), None) for number in numbers]
                named[f"further.{head}.linear.{part}"] = _repeated_block(fields.folder, name, same)
            named[f"lm_heads.{head}.{part}"] = rest.pop(f"hydra_lm_head.{head}.{'1.' * first}{part}", None)
    for name in [name for name in rest if name.startswith(PREFIX)]:
        named["prefix." + name.removeprefix(PREFIX).replace("layers.0.", "midlayer.")] = rest.pop(name)
    named = {name: tensor for name, tensor in named.items() if tensor is not None}
    shape = dict(num_heads=heads, num_layers=layers, path=kinds[kind], head_bias="lm_heads.0.bias" in named)
    if kind == "prefix-mlp":
        shape["layer"] = _layer_of(fields, named, target)
    return _with_projection(fields, named, rest, shape, target)


def _with_projection(fields: Fields, named: dict, rest: dict, shape: dict, target: Target):
    """Add the projection to tokens, and anything left over, which the reader refuses."""
    own = "each" if "lm_heads.0.weight" in named else "shared" if SHARED[0] in rest else "target"
    vocabulary = fields.number("draft_vocab_size", target.vocab_size)
    if own != "shared" and vocabulary != target.vocab_size:
        raise bad_checkpoint(fields.folder, "heads over a part of the vocabulary need a projection of their own.")
    config = HeadsConfig(
        target.hidden_size, target.vocab_size, vocabulary, projections=own, taps=(target.num_layers,), **shape
    )
    return config, named | rest


def _count_heads(folder: Path, tensors: dict[str, Tensor], pattern: str) -> int:
    """The number of heads, counted from 0 without a gap."""
    found = {int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))}
    if not found or found != set(range(len(found))):
        raise bad_checkpoint(
            folder, "no heads are numbered 0, 1, ... among its weights; this is no checkpoint of such heads."
        )
    return len(found)


def _repeated_block(folder: Path, name: str, same: list[Tensor | None]) -> Tensor:
    """The one block that a head's layers repeat."""
    if any(tensor is None for tensor in same):
        raise SpecdecError(f"{folder} lacks {name} of some layer; it is incomplete, fetch or export it again.")
    if not all(torch.equal(tensor, same[0]) for tensor in same[1:]):
        raise bad_checkpoint(
            folder, f"the layers {name} differ, but one block is applied several times in every known trainer."
        )
    return same[0]


def _layer_of(fields: Fields, named: dict[str, Tensor], target: Target) -> EagleConfig:
    """The shape of Hydra++'s layer: the target's own, with plain RoPE."""
    text = target.config
    rope = setting(text, "rope_parameters", {})
    if "rope_theta" not in fields and rope.get("rope_type", "default") != "default":
        raise bad_checkpoint(
            fields.folder, f"RoPE scaling of type {rope['rope_type']!r} is not supported for Hydra++'s layer."
        )
    up = named.get("prefix.midlayer.mlp.up_proj.weight")
    form = {} if up is None else {"intermediate_size": up.shape[0]}
    return layer_like(
        text,
        target.vocab_size,
        **form,
        rope_theta=float(fields.number("rope_theta", rope.get("rope_theta", 10000.0))),
        generation=1,
        num_taps=1,
        taps=(target.num_layers,),
    )


def save_heads(network: HeadsNetwork, folder: str | Path, dtype: torch.dtype | None = None, **fields) -> Path:
    """Write config.json and the heads' safetensors in the official layout, each file atomically; returns the folder."""
    folder, config = Path(folder), network.config
    kind, (first, step) = "hydra" if config.path else "medusa", (1, 2) if config.path == "layer" else (0, 1)
    tensors = {}
    for name, value in network.state_dict().items():
        part, _, rest = name.partition(".")
        head, _, rest = rest.partition(".")
        if part in ("first", "further"):
            stem = f"hydra_mlp.{head}" if config.path else head
            repeats = range(part == "further", 1 if config.path and part == "first" else config.num_layers)
            names = [f"{stem}.{first + step * layer}.{rest}" for layer in repeats]
        elif part == "lm_heads":
            own = f"{head}.{config.num_layers}."
            names = [(f"hydra_lm_head.{head}.{'1.' * first}" if config.path else own) + rest]
        else:
            names = [name.replace("prefix.midlayer.", "prefix.layers.0.").replace("prefix.", PREFIX, 1)]
        if name in ("d2t", "t2d") and config.projections != "shared":
            continue
        value = value.to(dtype) if dtype and value.is_floating_point() else value
        tensors |= {given: value.clone() for given in names}  # safetensors take no memory twice
    save_tensors(tensors, folder / f"{kind}_lm_head.safetensors")
    raw = {f"{kind}_num_heads": config.num_heads, f"{kind}_num_layers": config.num_layers}
    if config.path:
        raw |= {"hydra_head_arch": "prefix-mlp" if config.path == "layer" else "mlp"}
        raw |= {"grounded_heads": True, "hidden_state_offset": 0}
    else:
        raw["version"] = "2"
    raw |= {"rope_theta": config.layer.rope_theta} if config.layer else {}
    raw |= {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    raw |= {"draft_vocab_size": config.draft_vocab_size} if config.projections == "shared" else {}
    runs.write_json(folder / "config.json", {**raw, **fields})
    return folder


def load_heads(folder: Path, target: Target):
    """The drafter in `folder`, bound to a target."""
    network = read_heads(folder, target)
    return (HydraDrafter if network.config.path else MedusaDrafter)(network, target)
