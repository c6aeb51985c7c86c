"""EAGLE checkpoints on disk: official files -> `EagleNetwork`, and back into the official layout.

    layout     recognised by                            taps stated as     head
    official   EAGLE-3's shapes                         layer outputs      reduced vocabulary
    eagle1     fc of twice the width, narrow queries    (last state)       the target's own
    griffin    fc.fc, down_proj of twice the width      (last state)       the target's own
    (a block)  mask_hidden, ours, beside EAGLE-3's

EAGLE-2 and HASS have EAGLE-1's layout. SGLang and SpecForge write EAGLE-3's with switches of their
own, which are read. A wrong rule here fails silently, as low acceptance. So loading is strict: every
weight is present, none is left over, every shape fits. config.json is read as plain JSON, never
through a configuration class, which would add defaults that the drafter was not trained with (above
all a RoPE base). Pickles are unpickled as tensors only, so that a file cannot run code. If a folder
has both, model.safetensors is read and pytorch_model.bin is not.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec import runs, stored
from specdec.core.pair import dtype_name
from specdec.errors import SpecdecError, first_line
from specdec.models.eagle_network import EagleConfig, EagleNetwork, network_of

# Searched in this order; the index files name the shards of a split checkpoint.
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
WEIGHT_FILES = tuple(name + ending for name in SINGLE_FILES for ending in ("", ".index.json"))
# Written by trainers and never read: frozen copies of the target, tables that are recomputed.
IGNORED = re.compile(r"^(verifier_|target_model\.)|(^|\.)rotary_emb\.inv_freq$")
EMBEDDING = "embed_tokens.weight"
QUERY = "midlayer.self_attn.q_proj.weight"


@dataclass
class Checkpoint:
    """A checkpoint before its network is built: its config as stated, and its tensors under official names.

    layout: "official", "eagle1" or "griffin".
    """

    folder: Path
    layout: str
    config: EagleConfig
    tensors: dict[str, Tensor] = field(repr=False)

    def network(self) -> EagleNetwork:
        """The network with these weights, in the file's dtype. SpecdecError names weights that are missing or do not fit."""
        return with_weights(network_of, self.config, self.tensors, self.folder, "its config.json")


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Detect the layout of the checkpoint in `folder` and read it. SpecdecError if it cannot be an EAGLE drafter."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise SpecdecError(f"there is no drafter folder {folder}; check the path.")
    fields = Fields.read(folder)
    _refuse_other_heads(fields, ())
    tensors = read_tensors(folder)
    _refuse_other_heads(fields, tensors)
    tensors = _official_names(folder, tensors)
    layout = _layout(fields, tensors)
    config = _eagle_config(fields, layout, tensors)
    return Checkpoint(folder, layout, config, tensors)


def bad_checkpoint(folder: Path, reason: str) -> SpecdecError:
    return SpecdecError(f"{folder}: {reason}")


class Fields(dict):
    """config.json of one folder, as plain JSON."""

    def __init__(self, folder: Path, raw: dict):
        super().__init__(raw)
        self.folder = folder

    @classmethod
    def read(cls, folder: Path) -> Fields:
        """SpecdecError when config.json is missing or damaged."""
        path = folder / "config.json"
        if not path.is_file():
            raise bad_checkpoint(
                folder, "it has no config.json; copy the checkpoint's own beside its weights."
            )
        return cls(folder, stored.read_json(path, stored.DrafterFile, "fetch it again"))

    def part(self, name: str) -> Fields:
        """The JSON object `name`, empty if absent; checked like the file itself."""
        where = f"{self.folder / 'config.json'}, {name}"
        return Fields(
            self.folder,
            stored.checked(stored.DrafterFile, self.get(name) or {}, where, "fetch it again"),
        )

    def number(self, name: str, default=None):
        """The number `name`, or its default; SpecdecError if it has none."""
        value = default if self.get(name) is None else self[name]
        if value is None:
            raise bad_checkpoint(
                self.folder, f"config.json has no {name}, and it is not to be guessed; add it."
            )
        return value


def _refuse_other_heads(fields: Fields, names) -> None:
    """SpecdecError for drafters of other families, recognised by config.json or by weight names."""
    for kind, own in (("hydra", "hydra_"), ("medusa", r"\d+\.\d+\.linear|medusa_head\.")):
        if f"{kind}_num_heads" in fields or any(re.match(own, name) for name in names):
            reason = f"{kind.title()} heads are no EAGLE drafter; give one of EAGLE-1, -2 or -3 or of GRIFFIN."
            raise bad_checkpoint(fields.folder, reason)


def _layout(fields: Fields, tensors: dict[str, Tensor]) -> str:
    """The layout by names and shapes: "official", "griffin", or "eagle1" (EAGLE-2, HASS too)."""
    if fields.get("speculators_model_type") is not None:
        why = "it is a speculators checkpoint, whose layout is not supported"
        raise bad_checkpoint(fields.folder, f"{why}; give one in EAGLE's official layout.")
    griffin = "fc.fc.weight" in tensors
    for name in ("fc.fc.weight" if griffin else "fc.weight", QUERY):
        if name not in tensors or tensors[name].ndim != 2:
            why = f"this is not an EAGLE drafter: it has no matrix {name}"
            raise bad_checkpoint(fields.folder, f"{why}.")
    if griffin:
        return "griffin"
    rows, columns = tensors["fc.weight"].shape
    if tensors[QUERY].shape[1] == rows and columns == 2 * rows:
        return "eagle1"
    return "official"


def _eagle_config(fields: Fields, layout: str, tensors: dict[str, Tensor]) -> EagleConfig:
    """Shape and interpretation from config.json.

    The weights decide where engines that train or serve a layout ignore a field.
    """
    for name, only in (("hidden_act", "silu"), ("mlp_bias", False)):
        if fields.get(name) not in (None, only):
            why = f"{name} {fields[name]!r} in config.json is not supported"
            raise bad_checkpoint(fields.folder, f"{why}, only {only!r}.")
    shape = layer_shape(fields)
    heads = shape["num_attention_heads"]
    shape["head_dim"] = max(1, tensors[QUERY].shape[0] // heads)
    biased = f"{QUERY.removesuffix('weight')}bias" in tensors

    # EAGLE-1, 2, HASS and GRIFFIN
    if layout != "official":
        griffin = layout == "griffin"
        return EagleConfig(
            **shape,
            own_embedding=EMBEDDING in tensors,
            # `bias` is true where the field is missing; GRIFFIN's trainer ignores it
            fc_bias=griffin or fields.get("bias") is not False,
            griffin=griffin,
            # GRIFFIN's first stage and its engine ignore qkv_bias: the weights decide
            attention_bias=biased or (bool(fields.get("qkv_bias")) and not griffin),
            draft_vocab_size=fields.number("draft_vocab_size", shape["vocab_size"]),
            target_hidden_size=shape["hidden_size"],
            generation=1,
            num_taps=1,
        )

    # EAGLE-3
    taps = _taps(fields)
    fc_norm = None
    if "fc_norm.0.weight" in tensors or fields.get("fc_norm"):
        fc_norm = "each"
    elif "input_norm.weight" in tensors or fields.get("norm_before_fc"):
        fc_norm = "joint"
    announced = fields.get("target_hidden_size")
    # SGLang announces the target's size in files that use the target's embedding
    of_sglang = "eagle_config" in fields or "eagle3" in _architectures(fields)
    return EagleConfig(
        **shape,
        own_embedding=EMBEDDING in tensors or (announced is not None and not of_sglang),
        draft_vocab_size=fields.number("draft_vocab_size"),
        target_hidden_size=fields.number("target_hidden_size", shape["hidden_size"]),
        num_taps=len(taps) if taps else 3,
        taps=taps,
        norm_before_residual=bool(fields.get("norm_before_residual")),
        norm_output=bool(fields.get("norm_output")),
        attention_bias=biased,
        query_key_norm="midlayer.self_attn.q_norm.weight" in tensors,
        fc_norm=fc_norm,
        fc_bias="fc.bias" in tensors,
        **_block(fields, tensors),
    )


def _architectures(fields: Fields) -> str:
    return " ".join(str(name) for name in fields.get("architectures") or ()).lower()


def layer_shape(fields: Fields) -> dict[str, Any]:
    """The fields of EagleConfig that describe a layer."""
    heads = fields.number("num_attention_heads")
    return {
        "hidden_size": fields.number("hidden_size"),
        "intermediate_size": fields.number("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.number("num_key_value_heads", heads),
        "vocab_size": fields.number("vocab_size"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(fields),
    }


def _rope_theta(fields: Fields) -> float:
    """The drafter's own RoPE base: 10000 unless its own config.json has another.

    Scaled RoPE is refused: engines read it differently.
    """
    rope = fields.part("rope_parameters") or fields.part("rope_scaling")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        why = f"RoPE scaling of type {kind!r} in config.json is not supported"
        raise bad_checkpoint(fields.folder, f"{why}; use a drafter with plain RoPE.")
    return rope.number("rope_theta", fields.number("rope_theta", 10000.0))


def _taps(fields: Fields) -> tuple[int, ...] | None:
    """Indices into `hidden_states`, or None for the default 2, L // 2, L - 3.

    config.json counts layer outputs, one less than in `hidden_states`.
    """
    ids = fields.part("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return None
    return tuple(layer + 1 for layer in ids)


def _block(fields: Fields, tensors: dict[str, Tensor]) -> dict[str, int]:
    """The length of a block drafter's blocks, the mask's token and the layers."""
    if "mask_hidden" not in tensors:
        return {}
    mask = fields.get("ptd_token_id")
    block = fields.get("para_depths")
    if not isinstance(mask, int) or not isinstance(block, int) or mask < 0 or not 1 < block <= 64:
        why = "config.json must name the mask's token and a block of 2 to 64 positions"
        raise bad_checkpoint(fields.folder, f"{why}, not {mask!r} and {block!r}.")
    # a number of layers without weights builds no network
    layers = min(fields.number("num_hidden_layers", 1), len(tensors))
    return {"block": block, "mask_token": mask, "num_layers": layers}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All used tensors of the first of WEIGHT_FILES that exists, on the CPU; shards are combined."""
    path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if path is None:
        raise SpecdecError(f"{folder} has no weights; expected {' or '.join(SINGLE_FILES)}.")
    whole = path.suffix != ".json"
    shards = (
        [stored.inside(folder, path.name, "fetch the checkpoint again")]
        if whole
        else stored.shards_of(path)
    )
    return {
        name: one
        for part in shards
        for name, one in read_weights(part).items()
        if not IGNORED.search(name)
    }


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, on the CPU. SpecdecError for damaged files, or for more than tensors."""
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _unpickle(path)
    except (
        SafetensorError,
        pickle.UnpicklingError,
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
    ) as error:
        if isinstance(error, pickle.UnpicklingError) and stored.is_code(path, error):
            raise SpecdecError(
                f"{path} is a pickle with code in it, which was not run; ask for safetensors."
            ) from None
        raise SpecdecError(
            f"{path} is truncated or corrupt ({first_line(error)}); fetch it again."
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(value, Tensor) for value in tensors.values()
    ):
        raise SpecdecError(
            f"{path} does not hold a plain table of tensors; ask its author for safetensors."
        )
    return tensors


def _unpickle(path: Path):
    """weights_only builds tensors and plain containers and refuses every other name in the pickle before calling it."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        return torch.load(
            path, weights_only=True, map_location="cpu"
        )  # a file from before torch 1.6


def _official_names(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of `EagleNetwork`. SpecdecError for a second layer, except a block's."""
    deeper = [name for name in tensors if re.match(r"layers\.[1-9]", name)]
    if deeper and "mask_hidden" not in tensors:
        raise bad_checkpoint(
            folder, f"it has more than one drafter layer ({deeper[0]}); only a block's may."
        )
    return {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}


def with_weights(
    build: Callable, config, tensors: dict[str, Tensor], folder: Path, asked_by: str
) -> nn.Module:
    """The network build(config) with the tensors as its frozen weights. asked_by: the source of its shapes, for errors.

    SpecdecError for weights that are missing, left over, of another shape or quantised, for non-finite values, and for wrong
    vocabulary maps. The maps may be absent if the whole vocabulary of the target is drafted.
    """
    try:
        with torch.device("meta"):  # allocates nothing of the size that config.json claims
            network = build(config)
    except RuntimeError as error:
        reason = f"config.json describes no network ({first_line(error)}); fetch it again."
        raise bad_checkpoint(folder, reason) from error
    tensors, expected = dict(tensors), network.state_dict()
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name].shape:
            shapes = tuple(tensor.shape), tuple(expected[name].shape)
            reason = f"has shape {shapes[0]}, but {asked_by} asks for {shapes[1]}"
            raise bad_checkpoint(
                folder, f"{name} {reason}; these weights and {asked_by} do not belong together."
            )
        if name in ("d2t", "t2d"):
            tensors[name] = tensor.bool() if name == "t2d" else tensor.long()
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            raise bad_checkpoint(
                folder, f"{name} is stored as {tensor.dtype}; quantised drafters are not supported."
            )
    if "d2t" in expected and not config.is_reduced:
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
        tensors.setdefault("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
    if missing := sorted(set(expected) - set(tensors)):
        hint = " (target_hidden_size in config.json announces it)" if EMBEDDING in missing else ""
        raise bad_checkpoint(
            folder, f"it lacks {', '.join(missing[:5])}{hint}; fetch or export it again."
        )
    if extra := sorted(set(tensors) - set(expected)):
        raise bad_checkpoint(
            folder, f"it holds {', '.join(extra[:5])}, which its config.json does not account for."
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise bad_checkpoint(
                folder, f"{name} holds values that are not finite; fetch the checkpoint again."
            )
    if "d2t" in expected:
        check_vocabulary(folder, config, tensors)
    network.load_state_dict(tensors, strict=True, assign=True)
    return network.requires_grad_(False)


def check_vocabulary(folder: Path, config, tensors) -> None:
    """target_id = draft_id + d2t[draft_id] must name distinct tokens, exactly those that t2d marks."""
    offsets, member = tensors["d2t"], tensors["t2d"]

    def agree(ids: Tensor) -> bool:
        inside = bool(((ids >= 0) & (ids < config.vocab_size)).all())
        return (
            inside
            and len(ids.unique()) == len(ids)
            and bool(member[ids].all())
            and int(member.sum()) == len(ids)
        )

    if not agree(torch.arange(len(offsets)) + offsets):
        reason = (
            "it holds ids instead of offsets"
            if agree(offsets)
            else "it does not name the tokens that t2d marks"
        )
        raise bad_checkpoint(
            folder, f"the vocabulary map d2t is wrong, {reason}; export the checkpoint again."
        )


def save_drafter(
    network: EagleNetwork, folder: str | Path, dtype: torch.dtype | None = None, **fields
) -> Path:
    """Write config.json and model.safetensors in the official layout, each file atomically; returns the folder.

    dtype: of the floating-point weights, default unchanged. fields: more fields for config.json (token ids, lengths).
    Switches unknown to the official engine get their names from SGLang and speculators.
    """
    folder, config = Path(folder), network.config
    layer = "midlayer." if config.generation == 3 else "layers.0."
    tensors = {
        name.replace("midlayer.", layer, 1): value.to(dtype)
        if dtype and value.is_floating_point()
        else value
        for name, value in network.state_dict().items()
    }
    save_tensors(tensors, folder / "model.safetensors")
    dtype = tensors[f"{layer}self_attn.q_proj.weight"].dtype
    runs.write_json(folder / "config.json", {**description(config, dtype), **fields})
    return folder


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file atomically."""
    with runs.atomic(path) as temporary:
        save_file(
            {name: value.cpu().contiguous() for name, value in tensors.items()},
            temporary,
            {"format": "pt"},
        )


def description(config: EagleConfig, dtype: torch.dtype) -> dict:
    """config.json of one drafter; the inverse of `_eagle_config`."""
    names = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size"
    )
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    raw |= {
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(dtype),
    }
    stated = config.to_dict()
    raw |= {name: stated[name] for name in (*names.split(), "rms_norm_eps", "rope_theta")}
    if config.generation != 3:
        reduced = {"draft_vocab_size": config.draft_vocab_size} if config.is_reduced else {}
        return {**raw, **reduced, "bias": config.fc_bias, "qkv_bias": config.attention_bias}
    raw |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
    }
    raw |= {"norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output}
    if config.own_embedding or config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.block:
        raw |= {"para_depths": config.block, "ptd_token_id": config.mask_token}
    if config.fc_norm:
        raw["fc_norm" if config.fc_norm == "each" else "norm_before_fc"] = True
    if config.taps is not None:  # counted as layer outputs there, one less than hidden_states
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps]}
    return raw
