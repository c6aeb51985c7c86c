"""Storage of results: paths, run directories, provenance, atomic files, shards.

Every file is written beside its final place and moved there in one step, so that a killed process,
a full disk or a read-only folder never leaves half a file.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import importlib
import io
import json
import os
import re
import shutil
from collections import UserDict
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import yaml

if TYPE_CHECKING:  # a GPU machine may lack it
    import pandas as pd

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None  # type: ignore[assignment]

from specdec import machine
from specdec.errors import SpecdecError, check_kind, check_name, first_line, unreadable
from specdec.stored import RunFile, read_json, read_text, sealed

SCALES = ("laptop", "paper")
# In the schema of every parquet file, before the digest of the file with zeros in place of it.
SEAL = b"specdec-sha256:"
NO_DIGEST = b"0" * 64


def home() -> Path:
    """The folder of runs/ and figures/: SPECDEC_HOME, the notebooks' parent, or the working one."""
    notebooks = machine.notebooks_folder()
    usual = notebooks.parent if notebooks else Path.cwd()
    return Path(os.environ.get("SPECDEC_HOME") or usual).expanduser().resolve()


def placed(path: Path | str) -> Path:
    """`path` or, if it does not exist, the same below the results folder or the checkout."""
    path = Path(path).expanduser()
    notebooks = machine.notebooks_folder()
    places = [path, home() / path, (notebooks or home() / "notebooks").parent / path]
    return next((place for place in places if place.exists()), path)


def workbook() -> Path:
    """The folder of notebooks/ and figures/. SpecdecError without notebooks."""
    notebooks = machine.notebooks_folder()
    if notebooks is None or not (notebooks / "book.yml").is_file():
        advice = f"name their folder in {machine.NOTEBOOKS_VARIABLE}"
        raise SpecdecError(f"this needs the notebooks of a checkout; {advice}.")
    return notebooks.parent


def workbook_module(name: str, package: str = "workbook") -> Any:
    """A module beside the notebooks, of `workbook` or `experiments`. SpecdecError without them."""
    workbook()
    machine.find_workbook()
    return importlib.import_module(f"{package}.{name}")


def runs_dir(scale: str = "laptop") -> Path:
    """The output folder of everything at this scale; ignored by git."""
    return home() / "runs" / check_name("scale", scale, SCALES)


def recorded(pair: str, scale: str = "laptop") -> Path:
    """The folder of a pair's recordings and costs; one for each of its drafters."""
    return runs_dir(scale).joinpath("recorded", *map(safe_name, pair.split("+")))


def tree_file(pair: str, dtype: str) -> Path:
    """The file of the tree tuned for a pair on this machine."""
    return recorded(pair) / f"tree-{dtype}.json"


def safe_name(text: str) -> str:
    """A text, such as a pair's name, as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._+-]", "-", text).lstrip(".-_+") or "own"


def figure_path(paper: str, item: str, scale: str = "laptop") -> Path:
    """The path, without suffix, of a figure or table of the runs."""
    return runs_dir(scale) / "figures" / plain_name(paper) / plain_name(item)


def plain_name(name: str) -> str:
    """`name` if it is safe as a file name; SpecdecError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
        allowed = "letters, digits, '.', '_', '+' and '-'"
        raise SpecdecError(f"{name!r} cannot name a file; use {allowed} only.")
    return name


@contextmanager
def atomic(path: Path, folder: bool = False):
    """Yield a temporary path beside `path`, which replaces `path` after a successful block.

    folder: it is a folder. A full or read-only disk becomes one SpecdecError sentence.
    """
    path = Path(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        with _disk_errors(path):
            (fresh if folder else path.parent).mkdir(parents=True, exist_ok=True)
            yield fresh
            # the content must be on the disk before its name is
            for file in filter(Path.is_file, [fresh, *fresh.rglob("*")]):
                with open(file, "rb+") as stream:
                    os.fsync(stream.fileno())
            # a folder with content cannot be replaced at once, so these are two renames
            if folder and path.exists():
                os.replace(path, old)
            os.replace(fresh, path)
    finally:
        # the first error was reported, so a failing clean-up adds nothing
        with suppress(OSError):
            # if the second rename failed, the old folder returns
            if old.exists() and not path.exists():
                os.replace(old, path)
        for folder_left in (fresh, old):
            shutil.rmtree(folder_left, ignore_errors=True)
        with suppress(OSError):
            fresh.unlink()


@contextmanager
def _disk_errors(path: Path):
    """Failures to write a file as one sentence, safetensors' and torch's own errors too."""
    try:
        yield
    except Exception as error:
        of_library = type(error).__name__ == "SafetensorError" or "inline_container" in str(error)
        if not isinstance(error, OSError) and not of_library:
            raise
        advice = "free the disk, or set SPECDEC_HOME or SPECDEC_CACHE to a writable folder"
        why = f"cannot write {path}: {first_line(error)}; {advice}"
        raise SpecdecError(f"{why}, then run again (what was written before is intact).") from error


def write_text(path: Path, text: str) -> Path:
    """Write `text` (UTF-8) atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def write_json(path: Path, value, files=None) -> Path:
    """Write `value` as readable JSON, atomically.

    files: names below its folder that belong to it. With these, even (), readers notice a change.
    """
    value = plain(value)
    if files is not None:
        value = sealed(value, Path(path).parent, files)
    return write_text(path, json.dumps(value, indent=2, allow_nan=True) + "\n")


@contextmanager
def locked(folder: Path):
    """Inside, no other process holds the same folder; the lock ends with the process."""
    path = Path(folder).with_name(f".{Path(folder).name}.lock")
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "w")
    with lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_table(path: Path, table: pd.DataFrame) -> Path:
    """Write `table` as parquet, atomically, with the sha256 of its bytes for `read_table`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = pa.Table.from_pandas(table, preserve_index=False)
    # pandas keeps its own notes there
    facts = {**(columns.schema.metadata or {}), b"seal": SEAL + NO_DIGEST}
    with atomic(path) as temporary:
        pq.write_table(columns.replace_schema_metadata(facts), temporary)
        # the digest replaces as many zeros, so that no offset in the file changes
        content = temporary.read_bytes()
        before, _, after = content.rpartition(SEAL + NO_DIGEST)
        digest = hashlib.sha256(content).hexdigest().encode()
        temporary.write_bytes(before + SEAL + digest + after)
    return Path(path)


def read_table(path: Path) -> pd.DataFrame:
    """Read a parquet file; SpecdecError if it is missing or damaged, by one bit too."""
    import pandas as pd

    try:
        content = Path(path).read_bytes()
        before, seal, after = content.rpartition(SEAL)
        digest = hashlib.sha256(before + SEAL + NO_DIGEST + after[64:]).hexdigest()
        if seal and after[:64] != digest.encode():
            raise ValueError("its bytes have changed since it was written")
        return pd.read_parquet(io.BytesIO(content))
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "parquet", "delete it and run again") from error


def read_yaml(path: Path):
    """Read a YAML file of the checkout; SpecdecError if it is missing or damaged."""
    try:
        return yaml.safe_load(read_text(path, "correct it"))
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())  # it has several lines
        raise SpecdecError(f"{path} cannot be read as YAML ({reason}); correct it.") from error


class Table(UserDict):
    """A mapping that `read()` makes when it is first used, so that an import opens no file."""

    def __init__(self, read: Callable[[], dict[str, Any]]):
        self._read = read

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        return self._read()


def found(path: Path) -> dict[str, Any]:
    """The content of a JSON file; {} if it does not exist."""
    return read_json(path) if path.is_file() else {}


def plain(value: Any) -> Any:
    """`value` as JSON types only. Dataclasses keep their class name, as part of their content."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: plain(getattr(value, name)) for name in names}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    why = f"a {type(value).__name__} cannot be recorded"
    raise SpecdecError(f"{why}; pass numbers, strings, lists, dicts, dataclasses.")


def canonical(value) -> str:
    """The canonical JSON text of `value`: sorted names, no spaces."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=True)


def content_key(**inputs) -> str:
    """sha256 (hex) of the canonical JSON of all inputs, equal in every process."""
    return hashlib.sha256(canonical(inputs).encode()).hexdigest()


def configured(config, cls, settings: dict):
    """`config`, by default cls(), with `settings`: f(x, Config(seed=1)) is f(x, seed=1).

    SpecdecError for a setting that the dataclass `cls` lacks.
    """
    check_kind("config", config, cls | None)
    fields = [field.name for field in dataclasses.fields(cls)]
    for name in settings:
        check_name("setting", name, fields)
    updated = dataclasses.replace(cls() if config is None else config, **settings)
    for name, hint in get_type_hints(cls).items():
        check_kind(name, getattr(updated, name), hint)
    return updated


def start(name: str, config: dict, *, scale: str = "laptop", tie_to_code: bool = True) -> Run:
    """Open the run directory of (name, config, this machine, this source).

    The same call finds the same directory, so a stopped run continues; another setting, machine or
    source leads to another one. tie_to_code: False leaves the source out, for trainings that must
    survive an unrelated edit.
    """
    # 1. the directory of this content
    identity = {"name": plain_name(name), "config": config, "hardware": machine.hardware()}
    key = content_key(**identity, code=machine.code_hash() if tie_to_code else None)
    run = Run(runs_dir(scale) / f"{name}-{key[:12]}", name, scale, key)
    # 2. one more session of the run
    session = {"started": _now(), "process": os.getpid(), **machine.fingerprint()}
    with locked(run.directory):
        record = {"name": name, "scale": scale, "key": key, "config": config, "sessions": []}
        if run.path("run.json").is_file():
            record = run.record()
        sessions = [*record["sessions"], session]
        write_json(run.path("run.json"), {**record, "sessions": sessions, "finished": None})
    return run


def shipped_dir() -> Path:
    """Runs that came with the notebooks: the source of the committed figures."""
    notebooks = machine.notebooks_folder()
    return (notebooks.parent if notebooks else home()) / "figures" / "measured"


def find(name: str, scale: str = "laptop", shipped: bool = False) -> list[Run]:
    """All finished runs of this name, newest first, then (or only) those of the checkout."""
    places = [shipped_dir()] if shipped else [runs_dir(scale), shipped_dir()]
    runs: dict[str, Run] = {}
    for place in places:
        finished = []
        for path in place.glob(f"{plain_name(name)}-*/run.json"):
            record = read_json(path, RunFile)
            if record["name"] == name and record["scale"] == scale and record["finished"]:
                finished.append((record["finished"], record["key"], path.parent))
        for _, key, folder in sorted(finished, reverse=True):
            runs.setdefault(key, Run(folder, name, scale, key))
    return list(runs.values())


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory. Everything in it is written atomically and can be read during the run."""

    directory: Path
    name: str
    scale: str
    key: str

    def path(self, *names: str) -> Path:
        """A path inside the run directory."""
        return self.directory.joinpath(*names)

    def record(self) -> dict:
        """run.json: name, scale, key, config, sessions, finished, results."""
        return read_json(self.path("run.json"), RunFile)

    def write_table(self, name: str, table: pd.DataFrame) -> Path:
        return write_table(self.path(f"{plain_name(name)}.parquet"), table)

    def read_table(self, name: str) -> pd.DataFrame:
        return read_table(self.path(f"{plain_name(name)}.parquet"))

    def shards(self, name: str) -> Shards:
        """The store for rows of table `name` that are collected piece by piece."""
        return Shards(self.path(plain_name(name)))

    def finish(self, **results) -> Run:
        """Record the end of the run, and any `results` worth reading without opening a table."""
        with locked(self.directory):
            record = self.record()
            # torch may have been imported, or its threads set, since the session began
            record["sessions"][-1].update(machine.torch_state())
            write_json(self.path("run.json"), {**record, "finished": _now(), "results": results})
        return self


@dataclasses.dataclass(frozen=True)
class Shards:
    """Rows of a table in files part-<number>.parquet."""

    folder: Path

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.parquet"

    def done(self) -> list[int]:
        """Numbers of the complete shards, ascending."""
        numbers = []
        for path in self.folder.glob("part-*.parquet"):
            numbers.append(int(path.stem.removeprefix("part-")))
        return sorted(numbers)

    def write(self, number: int, rows: pd.DataFrame) -> Path:
        return write_table(self.path(number), rows)

    def merge(self) -> pd.DataFrame:
        """All shards in order as one table, also written as <folder>.parquet; the shards stay."""
        import pandas as pd

        tables = [read_table(self.path(number)) for number in self.done()]
        if not tables:
            raise SpecdecError(f"{self.folder} holds no rows yet; run the measurement first.")
        table = pd.concat(tables, ignore_index=True)
        write_table(self.folder.with_name(f"{self.folder.name}.parquet"), table)
        return table


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
