"""EAGLE checkpoints on disk: files of every layout -> `EagleNetwork`, and back into the official layout.

Official EAGLE-3, SGLang / SpecForge, speculators and EAGLE-1/2 files are told apart by `drafters/eagle_layouts.py`.
Loading is strict: every weight is there, none is left over, every shape fits. Pickles are unpickled as tensors only, so
that a file cannot run code. Knows nothing about targets, hubs or decoding. Where a folder holds both, model.safetensors
is read and pytorch_model.bin is not (the official engine does the reverse; the two are written together and agree).
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specdec import runs
from specdec.config import SpecdecError
from specdec.drafters.eagle_layers import EagleConfig, EagleNetwork
from specdec.drafters.eagle_layouts import EMBEDDING, eagle_config, layout_of, official_names, part, refuse_other_heads
from specdec.fetch import first_line

# Looked for in this order; the index files name the shards of a split checkpoint.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass
class Checkpoint:
    """One checkpoint, read but not yet built: the reading its file states, and its tensors under official names.

    layout: "official", "sglang", "speculators" or "eagle1". doubts: fields of `config` that files of this layout are
    known to state wrongly and that `calibrate_reading` can settle.
    """

    folder: Path
    layout: str
    config: EagleConfig
    tensors: dict[str, Tensor] = field(repr=False)
    doubts: tuple[str, ...] = ()

    def network(self) -> EagleNetwork:
        """The network with these weights, in the file's dtype. SpecdecError names weights that are missing or unfit."""
        with torch.device("meta"):
            network = EagleNetwork(self.config)
        tensors = _complete(self.folder, self.config, self.tensors)
        expected = network.state_dict()
        _check_names(self.folder, expected, tensors)
        for name, tensor in tensors.items():
            if tensor.shape != expected[name].shape:
                raise SpecdecError(
                    f"{self.folder}: {name} has shape {tuple(tensor.shape)}, but its config.json asks for "
                    f"{tuple(expected[name].shape)}; these weights and this config.json do not belong together."
                )
            if expected[name].is_floating_point() and not bool(tensor.isfinite().all()):
                raise SpecdecError(
                    f"{self.folder}: {name} holds values that are not finite; fetch the checkpoint again."
                )
        if self.config.generation == 3:
            _check_vocabulary(self.folder, self.config, tensors)
        network.load_state_dict(tensors, strict=True, assign=True)
        return network.requires_grad_(False)


def read_drafter(folder: str | Path) -> EagleNetwork:
    """The network of the checkpoint in `folder`, read as its config.json says. SpecdecError for what does not fit."""
    return read_checkpoint(folder).network()


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Find the layout of the checkpoint in `folder` and read it. SpecdecError for what cannot be an EAGLE drafter."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise SpecdecError(f"there is no drafter folder {folder}; check the path.")
    raw = read_config(folder)
    refuse_other_heads(folder, raw, ())
    tensors = read_tensors(folder)
    refuse_other_heads(folder, raw, tensors)
    tensors = official_names(tensors, folder)
    layout = layout_of(folder, raw, tensors)
    config, doubts = eagle_config(folder, layout, raw, tensors)
    return Checkpoint(folder, layout, config, tensors, doubts)


def named_target(folder: str | Path) -> str:
    """The target a speculators checkpoint names (other layouts name none: SpecdecError)."""
    verifier = part(folder, part(folder, read_config(Path(folder)), "speculators_config"), "verifier")
    if not isinstance(verifier.get("name_or_path"), str):
        raise SpecdecError(f"the drafter {folder} does not name its target; give target=... too.")
    return verifier["name_or_path"]


# --- files ------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict:
    """config.json as plain JSON. SpecdecError when it is missing or damaged."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecdecError(f"{folder} has no config.json; copy the checkpoint's own beside its weights.") from None
    except (OSError, ValueError) as error:
        raise SpecdecError(f"{path} cannot be read as JSON ({error}); fetch it again.") from error
    if not isinstance(raw, dict):
        raise SpecdecError(f"{path} holds a {type(raw).__name__} instead of a JSON object; fetch it again.")
    return raw


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the first of WEIGHT_FILES that exists, on the CPU; shards are put together."""
    path = next((Path(folder) / name for name in WEIGHT_FILES if (Path(folder) / name).is_file()), None)
    if path is None:
        raise SpecdecError(f"{folder} has no weights; expected model.safetensors or pytorch_model.bin.")
    if path.suffix != ".json":
        return _read_file(path)
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SpecdecError(f"{path} is not a list of shards ({error!r}); fetch it again.") from error
    tensors = {}
    for shard in shards:
        if Path(shard).name != shard:
            raise SpecdecError(f"{path} names the shard {shard!r} outside its folder; fetch the checkpoint again.")
        tensors.update(_read_file(path.with_name(shard)))
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _unpickle(path)
    except FileNotFoundError:
        raise SpecdecError(f"the weight file {path} is missing; fetch the checkpoint again.") from None
    except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        if "Unsupported global" in str(error) or "Unsupported class" in str(error):
            raise SpecdecError(
                f"{path} is a pickle with code in it, which is refused and was not run; ask its author for safetensors."
            ) from None
        raise SpecdecError(f"{path} is truncated or corrupt ({first_line(error)}); fetch it again.") from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise SpecdecError(f"{path} does not hold a plain table of tensors; ask its author for safetensors.")
    return tensors


def _unpickle(path: Path):
    """weights_only builds tensors and plain containers and refuses every other name in the pickle before calling it."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        return torch.load(path, weights_only=True, map_location="cpu")  # a file from before torch 1.6


# --- strictness -------------------------------------------------------------------------------------------------------


def _complete(folder: Path, config: EagleConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with exact types, and the vocabulary maps filled in where they may be left out (Vd = V)."""
    tensors = dict(tensors)
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d"):
            tensors[name] = tensor.bool() if name == "t2d" else tensor.long()
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            raise SpecdecError(f"{folder}: {name} is stored as {tensor.dtype}; quantised drafters are not supported.")
    if config.generation == 3 and config.draft_vocab_size == config.vocab_size:
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
        tensors.setdefault("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
    return tensors


def _check_names(folder: Path, expected, tensors) -> None:
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing:
        hint = " (target_hidden_size in config.json announces it)" if EMBEDDING in missing else ""
        raise SpecdecError(
            f"{folder} lacks {', '.join(missing)}{hint}; it is not a complete EAGLE drafter, fetch or export it again."
        )
    if extra:
        raise SpecdecError(
            f"{folder} holds {', '.join(extra)}, which its config.json does not account for; nothing was loaded."
        )


def _check_vocabulary(folder: Path, config: EagleConfig, tensors) -> None:
    """target_id = draft_id + d2t[draft_id] must name distinct tokens, the very ones that t2d marks."""
    offsets, member = tensors["d2t"], tensors["t2d"]
    ids = torch.arange(len(offsets)) + offsets

    def agree(ids: Tensor) -> bool:
        inside = bool(((ids >= 0) & (ids < config.vocab_size)).all())
        return inside and len(ids.unique()) == len(ids) and bool(member[ids].all()) and int(member.sum()) == len(ids)

    if not agree(ids):
        reason = "it holds ids instead of offsets" if agree(offsets) else "it does not name the tokens that t2d marks"
        raise SpecdecError(f"{folder}: the vocabulary map d2t is wrong, {reason}; export the checkpoint again.")


# --- writing ----------------------------------------------------------------------------------------------------------


def save_drafter(network: EagleNetwork, folder: str | Path, dtype: torch.dtype | None = None, **fields) -> Path:
    """Write config.json and model.safetensors in the official layout, each file in one step; returns the folder.

    dtype: of the floating-point weights, default as they are. fields: more fields for config.json (token ids, lengths).
    Switches that the official engine does not know are written under the names SGLang and speculators give them.
    """
    from safetensors.torch import save_file

    folder, config = Path(folder), network.config
    layer = "midlayer." if config.generation == 3 else "layers.0."
    tensors = {
        name.replace("midlayer.", layer, 1): value.to(dtype) if dtype and value.is_floating_point() else value
        for name, value in network.state_dict().items()
    }
    with runs.atomic(folder / "model.safetensors") as temporary:
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, temporary, {"format": "pt"})
    runs.write_json(folder / "config.json", {**_description(config, tensors["fc.weight"].dtype), **fields})
    return folder


def _description(config: EagleConfig, dtype: torch.dtype) -> dict:
    """config.json of one drafter; the inverse of `eagle_layouts.eagle_config`."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
             "rms_norm_eps", "rope_theta")  # fmt: skip
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
    raw |= {"tie_word_embeddings": False, "torch_dtype": str(dtype).removeprefix("torch.")}
    raw |= {name: getattr(config, name) for name in names}
    if config.generation != 3:
        return {**raw, "bias": config.fc_bias, "qkv_bias": config.attention_bias}
    raw |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.draft_vocab_size}
    raw |= {"norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output}
    if config.own_embedding or config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.fc_norm:
        raw["fc_norm" if config.fc_norm == "each" else "norm_before_fc"] = True
    if config.taps is not None:  # counted as layer outputs there, one less than hidden_states
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps]}
    return raw
