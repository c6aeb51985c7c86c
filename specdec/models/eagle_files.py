"""EAGLE checkpoints on disk: official files -> `EagleNetwork`, and back into the official layout.

    layout     recognised by                            taps stated as     head
    official   EAGLE-3's shapes                         layer outputs      reduced vocabulary
    eagle1     fc of twice the width, narrow queries    (last state)       the target's own
    griffin    fc.fc, down_proj of twice the width      (last state)       the target's own
    (a block)  mask_hidden, ours, beside EAGLE-3's

EAGLE-2 and HASS have EAGLE-1's layout. SGLang and SpecForge write EAGLE-3's with switches of their
own, which are read. A wrong rule here fails silently, as low acceptance. So loading is strict:
every weight is present, none is left over, every shape fits. config.json is read as plain JSON,
never through a configuration class, which would add defaults that the drafter was not trained with
(above all a RoPE base). Pickles are unpickled as tensors only, so that a file cannot run code. If a
folder has both, model.safetensors is read and pytorch_model.bin is not.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Written by trainers and never read: frozen copies of the target, tables that are recomputed.
IGNORED = re.compile(r"^(verifier_|target_model\.)|(^|\.)rotary_emb\.inv_freq$")
EMBEDDING = "embed_tokens.weight"
QUERY = "midlayer.self_attn.q_proj.weight"
FOREIGN = {"hydra": "hydra_", "medusa": r"\d+\.\d+\.linear|medusa_head\."}
DAMAGE = (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, EOFError, ValueError)

Network = TypeVar("Network", bound=nn.Module)


@dataclass
class Checkpoint:
    """A checkpoint before its network is built.

    layout: "official", "eagle1" or "griffin". config: as stated. tensors: under official names.
    """

    folder: Path
    layout: str
    config: EagleConfig
    tensors: dict[str, Tensor] = field(repr=False)

    def network(self) -> EagleNetwork:
        """The network with these weights, in the file's dtype.

        SpecdecError names weights that are missing or do not fit.
        """
        return with_weights(network_of, self.config, self.tensors, self.folder, "its config.json")


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Detect the layout of the checkpoint in `folder` and read it.

    SpecdecError if it cannot be an EAGLE drafter.
    """
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


class Fields(dict[str, Any]):
    """config.json of one folder, as plain JSON."""

    def __init__(self, folder: Path, raw: dict[str, Any]):
        super().__init__(raw)
        self.folder = folder

    @classmethod
    def read(cls, folder: Path) -> Fields:
        """SpecdecError if config.json is missing or damaged."""
        path = folder / "config.json"
        if not path.is_file():
            why = "it has no config.json; copy the checkpoint's own beside its weights"
            raise bad_checkpoint(folder, f"{why}.")
        return cls(folder, stored.read_json(path, stored.DrafterFile, "fetch it again"))

    def part(self, name: str) -> Fields:
        """The JSON object `name`, empty if absent; checked like the file itself."""
        where = f"{self.folder / 'config.json'}, {name}"
        part = stored.checked(stored.DrafterFile, self.get(name) or {}, where, "fetch it again")
        return Fields(self.folder, part)

    def number(self, name: str, default: Any = None) -> Any:
        """The number `name`, or its default; SpecdecError if it has none."""
        value = default if self.get(name) is None else self[name]
        if value is None:
            why = f"config.json has no {name}, and it is not to be guessed; add it"
            raise bad_checkpoint(self.folder, f"{why}.")
        return value


def _refuse_other_heads(fields: Fields, names: Iterable[str]) -> None:
    """SpecdecError for drafters of other families, by config.json or by weight names."""
    for kind, pattern in FOREIGN.items():
        if f"{kind}_num_heads" in fields or any(re.match(pattern, name) for name in names):
            why = f"{kind.title()} heads are no EAGLE drafter; give one of EAGLE-1, -2, -3, GRIFFIN"
            raise bad_checkpoint(fields.folder, f"{why}.")


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
    shape["head_dim"] = max(1, tensors[QUERY].shape[0] // shape["num_attention_heads"])
    biased = f"{QUERY.removesuffix('weight')}bias" in tensors

    # 1. EAGLE-1, 2, HASS and GRIFFIN
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

    # 2. EAGLE-3
    outputs = fields.part("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    # layer outputs there; `hidden_states` begins with the embedding
    taps = tuple(layer + 1 for layer in outputs) if outputs else None
    fc_norm = None
    if "fc_norm.0.weight" in tensors or fields.get("fc_norm"):
        fc_norm = "each"
    elif "input_norm.weight" in tensors or fields.get("norm_before_fc"):
        fc_norm = "joint"
    announced = fields.get("target_hidden_size")
    # SGLang announces the target's size in files that use the target's embedding
    architectures = " ".join(str(name) for name in fields.get("architectures") or ())
    of_sglang = "eagle_config" in fields or "eagle3" in architectures.lower()
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


def _block(fields: Fields, tensors: dict[str, Tensor]) -> dict[str, Any]:
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
    """All used tensors of the first of WEIGHT_FILES that exists, on the CPU; shards combined."""
    names = [name for name in WEIGHT_FILES if (folder / name).is_file()]
    if not names:
        raise SpecdecError(f"{folder} has no weights; expected {' or '.join(SINGLE_FILES)}.")
    if names[0].endswith(".json"):
        files = stored.shards_of(folder / names[0])
    else:
        files = [stored.inside(folder, names[0], "fetch the checkpoint again")]
    tensors = {}
    for file in files:
        for name, tensor in read_weights(file).items():
            if not IGNORED.search(name):
                tensors[name] = tensor
    return tensors


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, on the CPU. SpecdecError for damage, or for more than tensors."""
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _unpickle(path)
    except (*DAMAGE, KeyError) as error:
        if isinstance(error, pickle.UnpicklingError) and stored.is_code(path, error):
            why = f"{path} is a pickle with code in it, which was not run"
            raise SpecdecError(f"{why}; ask for safetensors.") from None
        why = f"{path} is truncated or corrupt ({first_line(error)})"
        raise SpecdecError(f"{why}; fetch it again.") from None
    values = tensors.values() if isinstance(tensors, dict) else [None]
    if not all(isinstance(value, Tensor) for value in values):
        why = f"{path} does not hold a plain table of tensors"
        raise SpecdecError(f"{why}; ask its author for safetensors.")
    return tensors


def _unpickle(path: Path) -> Any:
    """Tensors and plain containers.

    weights_only refuses every other name in the pickle before calling it.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # a file from before torch 1.6
        return torch.load(path, weights_only=True, map_location="cpu")


def _official_names(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of `EagleNetwork`. Only a block drafter has a second layer."""
    deeper = [name for name in tensors if re.match(r"layers\.[1-9]", name)]
    if deeper and "mask_hidden" not in tensors:
        why = f"it has more than one drafter layer ({deeper[0]}); only a block's may"
        raise bad_checkpoint(folder, f"{why}.")
    return {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}


def with_weights(
    build: Callable[[Any], Network],
    config: Any,
    tensors: dict[str, Tensor],
    folder: Path,
    asked_by: str,
) -> Network:
    """The network build(config) with the tensors as its frozen weights.

    asked_by: the source of its shapes, for errors. SpecdecError for weights that are missing, left
    over, of another shape or quantised, for non-finite values, and for wrong vocabulary maps. The
    maps may be absent if the whole vocabulary of the target is drafted.
    """
    # 1. its shapes, without allocating what config.json claims
    try:
        with torch.device("meta"):
            network = build(config)
    except RuntimeError as error:
        why = f"config.json describes no network ({first_line(error)})"
        raise bad_checkpoint(folder, f"{why}; fetch it again.") from error
    expected = network.state_dict()

    # 2. every tensor by itself
    tensors = dict(tensors)
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name].shape:
            why = f"{name} has shape {tuple(tensor.shape)}"
            wanted = f"{asked_by} asks for {tuple(expected[name].shape)}"
            raise bad_checkpoint(folder, f"{why}, but {wanted}; they do not belong together.")
        if name == "d2t":
            tensors[name] = tensor.long()
        elif name == "t2d":
            tensors[name] = tensor.bool()
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            why = f"{name} is stored as {tensor.dtype}; quantised drafters are not supported"
            raise bad_checkpoint(folder, f"{why}.")
        elif not bool(tensor.isfinite().all()):
            why = f"{name} holds values that are not finite"
            raise bad_checkpoint(folder, f"{why}; fetch the checkpoint again.")

    # 3. none is missing, none left over
    if "d2t" in expected and not config.is_reduced:
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
        tensors.setdefault("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
    missing = sorted(set(expected) - set(tensors))
    if missing:
        hint = " (target_hidden_size in config.json announces it)" if EMBEDDING in missing else ""
        why = f"it lacks {', '.join(missing[:5])}{hint}"
        raise bad_checkpoint(folder, f"{why}; fetch or export it again.")
    extra = sorted(set(tensors) - set(expected))
    if extra:
        why = f"it holds {', '.join(extra[:5])}, which its config.json does not account for"
        raise bad_checkpoint(folder, f"{why}.")
    if "d2t" in expected:
        check_vocabulary(folder, config, tensors)
    network.load_state_dict(tensors, strict=True, assign=True)
    return network.requires_grad_(False)


def check_vocabulary(folder: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    """draft_id + d2t[draft_id] must name distinct tokens, exactly those that t2d marks."""
    offsets = tensors["d2t"]
    marked = tensors["t2d"].nonzero().flatten()

    def agree(ids: Tensor) -> bool:
        return torch.equal(ids.sort().values, marked)

    if agree(torch.arange(len(offsets)) + offsets):
        return
    why = "it does not name the tokens that t2d marks"
    if agree(offsets):
        why = "it holds ids instead of offsets"
    advice = "export the checkpoint again"
    raise bad_checkpoint(folder, f"the vocabulary map d2t is wrong, {why}; {advice}.")


def save_drafter(
    network: EagleNetwork, folder: str | Path, dtype: torch.dtype | None = None, **fields: Any
) -> Path:
    """Write config.json and model.safetensors in the official layout; returns the folder.

    Each file is written atomically. dtype: of the floating-point weights, default unchanged.
    fields: more fields for config.json (token ids, lengths). Switches unknown to the official
    engine get their names from SGLang.
    """
    folder = Path(folder)
    config = network.config
    layer = "midlayer." if config.generation == 3 else "layers.0."
    tensors = {}
    for name, value in network.state_dict().items():
        if dtype and value.is_floating_point():
            value = value.to(dtype)
        tensors[name.replace("midlayer.", layer, 1)] = value
    save_tensors(tensors, folder / "model.safetensors")
    stored_dtype = tensors[f"{layer}self_attn.q_proj.weight"].dtype
    runs.write_json(folder / "config.json", {**description(config, stored_dtype), **fields})
    return folder


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file atomically."""
    plain = {name: value.cpu().contiguous() for name, value in tensors.items()}
    with runs.atomic(path) as temporary:
        save_file(plain, temporary, {"format": "pt"})


def description(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of one drafter; the inverse of `_eagle_config`."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(dtype),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
    }
    if config.generation != 3 and config.is_reduced:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.generation != 3:
        raw["bias"] = config.fc_bias
        raw["qkv_bias"] = config.attention_bias
        return raw
    raw["architectures"] = ["LlamaForCausalLMEagle3"]
    raw["draft_vocab_size"] = config.draft_vocab_size
    raw["norm_before_residual"] = config.norm_before_residual
    raw["norm_output"] = config.norm_output
    if config.own_embedding or config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.block:
        raw["para_depths"] = config.block
        raw["ptd_token_id"] = config.mask_token
    if config.fc_norm:
        raw["fc_norm" if config.fc_norm == "each" else "norm_before_fc"] = True
    if config.taps is not None:
        # layer outputs there; `hidden_states` begins with the embedding
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps]}
    return raw
