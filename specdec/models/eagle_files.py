"""EAGLE checkpoints on disk: official files -> `EagleNetwork`, and back into the official layout.

    EAGLE-3            three taps, its own head over a reduced vocabulary
    EAGLE-1, -2, HASS  fc of twice the width, narrow queries, the target's own head
    GRIFFIN            fc.fc, down_proj of twice the width, the target's own head
    block (ours)       mask_hidden beside EAGLE-3's

A wrong rule here fails silently, as low acceptance. So loading is strict: every weight is present,
none is left over, and switches of other engines are refused. config.json is plain JSON: a
configuration class would add defaults (above all a RoPE base). Pickles hold tensors only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec import runs, stored
from specdec.core.pair import dtype_name
from specdec.errors import SpecdecError, unreadable
from specdec.models.eagle_network import EagleConfig, EagleNetwork, network_of

# in this order; shards of one kind are read together
WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
# written by trainers and never read: copies of the target, tables that are recomputed
IGNORED = re.compile(r"^(verifier_|target_model\.|input_embed_fn\.)|(^|\.)rotary_emb\.inv_freq$")
EMBEDDING = "embed_tokens.weight"
QUERY = "midlayer.self_attn.q_proj"
# switches of other trainers, by the only value that is supported
SWITCHES = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "norm_before_residual": False,
    "norm_output": False,
    "norm_before_fc": False,
}
# names of arithmetic that our layer lacks; some values mean that it is off
FOREIGN = "^sliding_window|^layer_types|softcap|sink|_multiplier|logits?_scal|^scale_|qk_norm"
FOREIGN += "|partial_rotary|clip_qkv|chunk_size|temperature_tuning|query_pre_attn"

# fields of config.json with the names of ours
SHAPE = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
SHAPE += ["head_dim", "vocab_size", "rms_norm_eps", "rope_theta"]

Tensors = dict[str, Tensor]
Network = TypeVar("Network", bound=nn.Module)


def read_network(folder: str | Path) -> EagleNetwork:
    """The network in `folder`, in the file's dtype. SpecdecError if it is no EAGLE drafter."""
    return with_weights(network_of, *read_checkpoint(folder), Path(folder))


def read_checkpoint(folder: str | Path) -> tuple[EagleConfig, Tensors]:
    """The shape and the tensors, by our names, of the drafter in `folder`."""
    fields = Fields(folder)
    tensors = {}
    for name, value in read_tensors(fields.folder).items():
        # EAGLE-1's name of the layer
        tensors[re.sub(r"^layers\.0\.", "midlayer.", name)] = value
    return config_from(fields, tensors), tensors


def bad_checkpoint(folder: Path, reason: str) -> SpecdecError:
    return SpecdecError(f"{folder}: {reason}.")


class Fields(dict[str, Any]):
    """config.json of one folder, as plain JSON. SpecdecError if it is missing or damaged."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        content = stored.read_json(self.folder / "config.json", advice="fetch it again")
        if not isinstance(content, dict):
            raise bad_checkpoint(self.folder, "config.json is no JSON object")
        super().__init__(content)

    def number(self, name: str, default: Any = None, lowest: float = 1e-30) -> Any:
        """The positive number `name`, or its default; SpecdecError if it is none."""
        value = default if self.get(name) is None else self[name]
        # sizes are whole numbers, as their defaults say
        kinds = (int, float) if isinstance(default, float) else (int,)
        if type(value) not in kinds or not lowest <= value < math.inf:
            raise bad_checkpoint(
                self.folder, f"{name} in config.json must be a positive number, not {value!r}"
            )
        return value

    def part(self, name: str) -> dict[str, Any]:
        """The object `name`; {} if it is missing. SpecdecError if it is something else."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise bad_checkpoint(self.folder, f"config.json: {name} must be an object")
        return value


def config_from(fields: Fields, tensors: Tensors) -> EagleConfig:
    """Shape and interpretation; the weights decide where engines ignore a field of config.json."""
    folder = fields.folder
    check_arithmetic(fields)
    griffin = "fc.fc.weight" in tensors
    first = tensors.get("fc.fc.weight", tensors.get("fc.weight"))
    query = tensors.get(f"{QUERY}.weight")
    if first is None or query is None or first.ndim != 2 or query.ndim != 2:
        why = "this is not an EAGLE drafter: it has no matrix fc.weight or q_proj.weight"
        raise bad_checkpoint(folder, why)

    # 1. what every layout has
    hidden = fields.number("hidden_size")
    heads = fields.number("num_attention_heads")
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": fields.number("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.number("num_key_value_heads", heads),
        "head_dim": max(1, query.shape[0] // heads),
        "vocab_size": fields.number("vocab_size"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(fields),
        "own_embedding": EMBEDDING in tensors,
        "attention_bias": f"{QUERY}.bias" in tensors,
    }

    # 2. EAGLE-1, 2, HASS and GRIFFIN
    rows, columns = first.shape
    if griffin or (query.shape[1] == rows and columns == 2 * rows):
        return EagleConfig(
            **shape,
            draft_vocab_size=fields.number("draft_vocab_size", shape["vocab_size"]),
            target_hidden_size=hidden,
            generation=1,
            num_taps=1,
            griffin=griffin,
            # `bias` is true where the field is missing; GRIFFIN's trainer ignores it
            fc_bias=griffin or fields.get("bias") is not False,
        )

    # 3. EAGLE-3 and blocks
    outputs = fields.part("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if outputs:
        # layer outputs there; `hidden_states` begins with the embedding
        shape |= {"taps": tuple(layer + 1 for layer in outputs), "num_taps": len(outputs)}
    if "mask_hidden" in tensors:
        shape["block"] = fields.number("para_depths")
        shape["mask_token"] = fields.number("ptd_token_id", lowest=0)
    return EagleConfig(
        **shape,
        draft_vocab_size=fields.number("draft_vocab_size"),
        target_hidden_size=fields.number("target_hidden_size", hidden),
        fc_norm="each" if "fc_norm.0.weight" in tensors or fields.get("fc_norm") else None,
        fc_bias="fc.bias" in tensors,
    )


def check_arithmetic(fields: Fields) -> None:
    """SpecdecError for a switch or a name of arithmetic that our layer does not compute."""
    folder = fields.folder
    for name, only in SWITCHES.items():
        if fields.get(name) not in (None, only):
            raise bad_checkpoint(folder, f"{name} {fields[name]!r} is not supported, only {only!r}")
    for name, value in fields.items():
        is_off = value is not True and value in (None, False, 0, 1)
        if name == "sliding_window":
            is_off = value is None or fields.get("use_sliding_window") is False
        elif name == "layer_types":
            is_off = set(value or ()) <= {"full_attention"}
        elif name == "attention_multiplier":
            is_off = value is None  # 1 is another scale than ours
        if re.search(FOREIGN, name) and not is_off:
            raise bad_checkpoint(folder, f"{name} {value!r} is not supported")


def _rope_theta(fields: Fields) -> float:
    """The drafter's own RoPE base. Scaled RoPE is refused: engines read it differently."""
    rope = fields.part("rope_parameters") or fields.part("rope_scaling")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise bad_checkpoint(fields.folder, f"RoPE scaling of type {kind!r} is not supported")
    return float(rope.get("rope_theta") or fields.number("rope_theta", 10000.0))


def read_tensors(folder: Path, patterns: tuple[str, ...] = WEIGHT_FILES) -> Tensors:
    """All tensors in use of the first kind of file that exists, on the CPU; shards combined."""
    for pattern in patterns:
        tensors: Tensors = {}
        for path in sorted(folder.glob(pattern)):
            tensors |= read_weights(path)
        if tensors:
            return {name: value for name, value in tensors.items() if not IGNORED.search(name)}
    raise SpecdecError(f"{folder} has no weights; expected {' or '.join(patterns)}.")


def read_weights(path: Path) -> Tensors:
    """All tensors of one file, on the CPU. SpecdecError for damage, or for more than tensors."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # weights_only refuses every other name in the pickle before calling it
        tensors: Tensors = torch.load(path, weights_only=True, map_location="cpu")
        return {name: value.contiguous() for name, value in tensors.items()}
    except Exception as error:  # damage has many names
        advice = "it is damaged or holds more than tensors: fetch it again, as safetensors"
        raise unreadable(path, error, "weights", advice) from error


def with_weights(
    build: Callable[[Any], Network], config: Any, tensors: Tensors, folder: Path
) -> Network:
    """The network build(config) with these frozen weights; SpecdecError if they do not fit."""
    # 1. no memory is taken for what config.json claims
    with torch.device("meta"):
        network = build(config)
    # a full vocabulary needs no maps
    if "d2t" in network.state_dict() and not config.is_reduced:
        tensors.setdefault("d2t", torch.zeros(config.vocab_size))
        tensors.setdefault("t2d", torch.ones(config.vocab_size))
    # 2. every tensor by itself
    for name, tensor in tensors.items():
        if name == "d2t":
            tensors[name] = tensor.long()
        elif name == "t2d":
            tensors[name] = tensor.bool()
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            raise bad_checkpoint(folder, f"{name} is quantised ({tensor.dtype}), not a float")
        elif not tensor.isfinite().all():
            raise bad_checkpoint(folder, f"{name} holds values that are not finite")
    # 3. none is missing, none left over
    try:
        network.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        why = "the weights are not those that config.json describes"
        raise bad_checkpoint(folder, f"{why} ({' '.join(str(error).split())[:400]})") from None
    if "d2t" in tensors:
        offsets = tensors["d2t"]
        ids = torch.arange(len(offsets)) + offsets
        if not torch.equal(ids.sort().values, tensors["t2d"].nonzero().flatten()):
            why = "the vocabulary map draft_id + d2t[draft_id] does not name the tokens of t2d"
            raise bad_checkpoint(folder, why)
    return network.requires_grad_(False)


def save_drafter(
    network: EagleNetwork, folder: str | Path, dtype: torch.dtype | None = None, **fields: Any
) -> Path:
    """Write config.json (and more `fields`) and model.safetensors in the official layout."""
    folder = Path(folder)
    config = network.config
    # 1. the weights
    layer = "midlayer." if config.generation == 3 else "layers.0."
    tensors = {}
    for name, value in network.state_dict().items():
        tensors[name.replace("midlayer.", layer, 1)] = value
    tensors = save_tensors(tensors, folder / "model.safetensors", dtype)
    # 2. their description, the inverse of `config_from`
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(tensors[f"{layer}self_attn.q_proj.weight"].dtype),
    }
    for name in SHAPE:
        raw[name] = getattr(config, name)
    if config.generation == 3 or config.is_reduced:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.generation == 3:
        raw["architectures"] = ["LlamaForCausalLMEagle3"]
        if config.own_embedding or config.target_hidden_size != config.hidden_size:
            raw["target_hidden_size"] = config.target_hidden_size
    else:
        raw |= {"bias": config.fc_bias, "qkv_bias": config.attention_bias}
    if config.block:
        raw |= {"para_depths": config.block, "ptd_token_id": config.mask_token}
    if config.fc_norm:
        raw["fc_norm"] = True
    if config.taps is not None and config.generation == 3:
        # layer outputs there; `hidden_states` begins with the embedding
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps]}
    runs.write_json(folder / "config.json", {**raw, **fields})
    return folder


def save_tensors(tensors: Tensors, path: Path, dtype: torch.dtype | None = None) -> Tensors:
    """Write a safetensors file atomically, weights in `dtype`; returns its tensors."""
    plain = {}
    for name, value in tensors.items():
        if dtype and value.is_floating_point():
            value = value.to(dtype)
        plain[name] = value.cpu().contiguous()
    with runs.atomic(path) as temporary:
        save_file(plain, temporary, {"format": "pt"})
    return plain
