"""EAGLE checkpoints on disk: files of every layout -> `EagleNetwork`, and back into the official layout.

Official EAGLE-3, SGLang / SpecForge, speculators and EAGLE-1/2 files are told apart by `drafters/eagle_layouts.py`.
Loading is strict: every weight is there, none is left over, every shape fits. Pickles are unpickled as tensors only, so
that a file cannot run code. Knows nothing about targets, hubs or decoding. Where a folder holds both, model.safetensors
is read and pytorch_model.bin is not (the official engine does the reverse; the two are written together and agree).

What an EAGLE checkpoint states about itself: raw config.json and weight names of any layout -> `EagleConfig`.

Every rule here fails silently, as low acceptance, when it is got wrong (baselines sheet A3). Reads plain JSON, never
a configuration class, which would add defaults that the drafter was not trained with (a RoPE base above all). Knows
nothing about file formats, targets or decoding.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specdec import runs
from specdec.core.pair import dtype_name
from specdec.errors import SpecdecError, first_line
from specdec.models.eagle.network import EagleConfig, EagleNetwork

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
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
    )
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
    raw |= {"tie_word_embeddings": False, "torch_dtype": dtype_name(dtype)}
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


# ---- from drafters.eagle_layouts ----------------------------------------


# Prefix in a file -> prefix of the official EAGLE-3 names. All other names agree between the layouts.
PREFIXES = (("layers.0.", "midlayer."),)
# Left behind by trainers and never read: frozen copies of the target, tables that are recomputed.
IGNORED = re.compile(r"^(verifier_|target_model\.)|(^|\.)rotary_emb\.inv_freq$")
EMBEDDING = "embed_tokens.weight"
QUERY = "midlayer.self_attn.q_proj.weight"


def official_names(tensors: dict[str, Tensor], source) -> dict[str, Tensor]:
    """The tensors under the names `EagleNetwork` uses, without those nobody reads. SpecdecError for a second layer."""
    named = {}
    for name, tensor in tensors.items():
        if IGNORED.search(name):
            continue
        if re.match(r"layers\.[1-9]", name):
            raise SpecdecError(f"{source} has more than one drafter layer ({name}); only one layer is supported.")
        for prefix, official in PREFIXES:
            if name.startswith(prefix):
                name = official + name.removeprefix(prefix)
        named[name] = tensor
    return named


def refuse_other_heads(source, raw: dict, names) -> None:
    """SpecdecError for drafters of other families, recognised by config.json or by their weight names."""
    kind = None
    if "fc.fc.weight" in names:
        kind = "GRIFFIN"
    elif "hydra_num_heads" in raw or any(name.startswith("hydra_") for name in names):
        kind = "Hydra"
    elif "medusa_num_heads" in raw or any(re.match(r"\d+\.\d+\.linear|medusa_head\.", name) for name in names):
        kind = "Medusa"
    if kind:
        raise SpecdecError(f"{source} holds {kind} heads, not an EAGLE drafter; give an EAGLE-1, -2 or -3 checkpoint.")


def layout_of(source, raw: dict, tensors: dict[str, Tensor]) -> str:
    """The layout by marker, names and shapes: "official", "sglang", "speculators", or "eagle1" (EAGLE-2, HASS too)."""
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise SpecdecError(f"{source} is a speculators checkpoint of kind {kind!r}; only 'eagle3' is supported.")
    fc, query = tensors.get("fc.weight"), tensors.get(QUERY)
    if fc is None or query is None or fc.ndim != 2 or query.ndim != 2:
        missing = "fc.weight" if fc is None or fc.ndim != 2 else "the layer's self_attn.q_proj.weight"
        raise SpecdecError(f"{source} is not an EAGLE drafter: it has no matrix {missing}.")
    if kind:
        return "speculators"
    if query.shape[1] == fc.shape[0] and fc.shape[1] == 2 * fc.shape[0]:
        return "eagle1"
    names = " ".join(map(str, raw.get("architectures") or ())).lower()
    return "sglang" if "eagle3" in names or "eagle_config" in raw else "official"


def eagle_config(source, layout: str, raw: dict, tensors: dict[str, Tensor]) -> tuple[EagleConfig, tuple[str, ...]]:
    """The shape and reading that config.json states, and the fields worth checking by `eagle_reading`.

    raw: config.json; tensors under official names. Weights decide where the engines that train or serve a layout are
    known to ignore a field (attention bias, head size). SpecdecError names a field that is missing or unsupported.
    """
    layer = {**raw, **part(source, raw, "transformer_layer_config")} if layout == "speculators" else raw
    for name, only in (("hidden_act", "silu"), ("mlp_bias", False)):
        if layer.get(name) not in (None, only):
            raise SpecdecError(f"{source}: {name} {layer[name]!r} in config.json is not supported, only {only!r}.")
    heads = number(source, layer, "num_attention_heads")
    vocabulary = number(source, layer, "vocab_size")
    shape = dict(
        hidden_size=number(source, layer, "hidden_size"),
        intermediate_size=number(source, layer, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=number(source, layer, "num_key_value_heads", heads),
        head_dim=max(1, tensors[QUERY].shape[0] // heads),
        vocab_size=vocabulary,
        rms_norm_eps=number(source, layer, "rms_norm_eps", 1e-6, float),
        rope_theta=rope_theta(source, layer),
        own_embedding=EMBEDDING in tensors or (layout == "official" and raw.get("target_hidden_size") is not None),
    )
    biased = f"{QUERY.removesuffix('weight')}bias" in tensors
    if layout == "eagle1":  # `bias` is true where the field is missing
        bias = raw.get("bias") is not False
        reading = dict(generation=1, num_taps=1, fc_bias=bias, attention_bias=biased or bool(raw.get("qkv_bias")))
        return EagleConfig(**shape, **reading, draft_vocab_size=vocabulary, target_hidden_size=shape["hidden_size"]), ()
    taps = tap_ids(source, layout, raw)
    config = EagleConfig(
        **shape,
        draft_vocab_size=number(source, raw, "draft_vocab_size", _vocabulary_default(layout, raw, vocabulary)),
        target_hidden_size=number(source, raw, "target_hidden_size", shape["hidden_size"]),
        num_taps=len(taps) if taps else number(source, raw, "num_aux_hidden_states", 3),
        taps=taps,
        norm_before_residual=_residual_is_normed(source, layout, raw),
        # Serving stacks and speculators mean "feed norm(output) back"; SpecForge's trainer writes the field for another
        # purpose, hence the question below.
        norm_output=bool(raw.get("norm_output")),
        attention_bias=biased or (layout == "speculators" and bool(layer.get("attention_bias"))),
        query_key_norm="midlayer.self_attn.q_norm.weight" in tensors
        or (layout == "speculators" and layer.get("model_type") == "qwen3"),
        fc_norm=_fc_norm(source, raw, tensors),
        fc_bias="fc.bias" in tensors,
    )
    doubts = {
        "taps": layout != "official",  # explicit ids are off by one in many files, absent ones may hide another choice
        "norm_output": layout != "official" and "norm_output" in raw,
        "norm_before_residual": layout != "official",
        "rope_theta": config.rope_theta != 10000.0,  # trainers that ignore the field train with 10000 whatever it says
    }
    return config, tuple(name for name, doubtful in doubts.items() if doubtful)


def rope_theta(source, layer: dict) -> float:
    """The drafter's own RoPE base: 10000 unless its own config.json says otherwise, whatever the target uses.

    Scaled RoPE is refused. The official engine knows linear and dynamic scaling only and then drops the base to 10000;
    vLLM and SGLang honour llama3 and yarn in the layouts they serve, which `rotary_tables` cannot express yet.
    """
    rope = part(source, layer, "rope_parameters") or part(source, layer, "rope_scaling")
    if rope and all(isinstance(value, dict) for value in rope.values()):  # one entry per kind of layer
        rope = rope.get("full_attention") or next(iter(rope.values()))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise SpecdecError(
            f"{source}: its config.json asks for RoPE scaling of type {kind!r}, which is not supported; "
            "use a drafter with plain RoPE."
        )
    if layer.get("partial_rotary_factor", rope.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise SpecdecError(f"{source}: partial rotary embeddings are not supported; use a drafter with plain RoPE.")
    return number(source, {"rope_theta": rope.get("rope_theta", layer.get("rope_theta"))}, "rope_theta", 10000.0, float)


def tap_ids(source, layout: str, raw: dict) -> tuple[int, ...] | None:
    """Indices into `hidden_states`, or None for the default 2, L // 2, L - 3.

    Ids under `eagle_config` (SpecForge, SGLang) count layer outputs, one less than `hidden_states` does; ids at the top
    level (speculators, vLLM) index `hidden_states`. Converted files carry the former in the place of the latter.
    """
    field = "eagle_aux_hidden_state_layer_ids"
    nested = part(source, raw, "eagle_config")
    if nested.get("use_aux_hidden_state") is False:
        raise SpecdecError(
            f"{source} drafts from the last hidden state alone (use_aux_hidden_state), which is not supported."
        )
    ids, step = (raw.get(field), 0) if raw.get(field) is not None else (nested.get(field), 1)
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise SpecdecError(f"{source}: {field} must be a list of layer numbers, got {ids!r}.")
    if not step and len(ids) == 3 and ids[0] == 1 and ids[1] == (ids[2] + 4) // 2 - 1:
        warnings.warn(
            f"{source}: tap ids {ids} look like layer outputs (SpecForge counts so), but stand where they index "
            'hidden_states; load with reading="calibrate" to find out.',
            stacklevel=2,
        )
    return tuple(i + step for i in ids)


def _residual_is_normed(source, layout: str, raw: dict) -> bool:
    value = raw.get("norm_before_residual")
    if value is None and layout == "speculators":  # writers' defaults differ: no value is safe to assume
        raise SpecdecError(
            f"{source}: a speculators config.json must say norm_before_residual; find out how it was trained."
        )
    return bool(value)


def _fc_norm(source, raw: dict, tensors) -> str | None:
    """How the taps are normed before fc. Weights say which way; a flag without its weights makes them missing."""
    if "fc_norm.0.weight" in tensors or raw.get("fc_norm"):
        return "each"
    flag = raw.get("norm_before_fc") or part(source, raw, "eagle_config").get("norm_before_fc")  # NVIDIA nests it
    return "joint" if "input_norm.weight" in tensors or flag else None


def _vocabulary_default(layout: str, raw: dict, vocabulary: int) -> int | None:
    """draft_vocab_size where that field is absent: another name for it, or no reduction where writers leave it out."""
    return raw.get("truncated_vocab_size", None if layout == "official" else vocabulary)


def part(source, raw: dict, name: str) -> dict:
    """The JSON object `name` of config.json, empty when it is absent."""
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise SpecdecError(f"{source}: {name} in config.json must be an object, got {value!r}.")
    return value


def number(source, raw: dict, name: str, default=None, kind: type = int):
    """The positive number `name` of config.json."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise SpecdecError(f"{source}: config.json has no {name}, and it is not to be guessed; add it.")
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float) or not value > 0:
        raise SpecdecError(f"{source}: {name} in config.json must be a positive number, got {value!r}.")
    return kind(value)
