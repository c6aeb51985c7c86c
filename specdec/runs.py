"""Storage of results: paths, run directories, provenance, atomic files, shards.

Knows nothing about models, notebooks or what the rows mean. Every file is written beside its final place and moved
there in one step, so that a killed process, a full disk or a read-only folder never leaves half a file.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import shutil
import time
from collections import UserDict
from collections.abc import Callable, Collection
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from specdec import machine
from specdec.errors import SpecdecError, check_kind, check_name, first_line, unreadable
from specdec.stored import RunFile, read_json, sealed

SCALES = ("laptop", "paper")
Shown = TypeVar("Shown", bound=Callable[..., Any])


def home() -> Path:
    """The folder for runs/ and figures/: SPECDEC_HOME, or the one that holds the notebooks, or the
    working directory."""
    notebooks = machine.notebooks_folder()
    usual = notebooks.parent if notebooks else Path.cwd()
    return Path(os.environ.get("SPECDEC_HOME") or usual).expanduser().resolve()


def placed(path: Path | str) -> Path:
    """`path` or, if it does not exist, the same below the results folder or the checkout, as commands and files print it."""
    path, notebooks = Path(path).expanduser(), machine.notebooks_folder()
    below = [path, home() / path, *([notebooks.parent / path] if notebooks else [])]
    return next((place for place in below if place.exists()), path)


def workbook() -> Path:
    """The folder of notebooks/ and of figures/ (published numbers and results). SpecdecError without notebooks."""
    notebooks = machine.notebooks_folder()
    if notebooks is None or not (notebooks / "book.yml").is_file():
        where = f"{notebooks} holds no book.yml" if notebooks else "an installed package has none"
        why = f"this needs the notebooks of a checkout of specdec, and {where}"
        raise SpecdecError(
            f"{why}; name their folder with --notebooks FOLDER, or in {machine.NOTEBOOKS_VARIABLE}."
        )
    return notebooks.parent


def workbook_module(name: str, room: str = "workbook") -> Any:
    """A module of notebooks/workbook, or of notebooks/experiments. SpecdecError without notebooks."""
    workbook()
    machine.find_workbook()
    return importlib.import_module(f"{room}.{name}")


def runs_dir(scale: str = "laptop") -> Path:
    """The output folder of everything at this scale; ignored by git."""
    return home() / "runs" / known_scale(scale)


def recorded(pair: str, scale: str = "laptop") -> Path:
    """The folder where `record`, `calibrate` and notebook 21 write for a pair; one for each of its drafters."""
    return runs_dir(scale).joinpath("recorded", *map(safe_name, pair.split("+")))


def tree_file(pair: str, dtype: str) -> Path:
    """The file of the tree tuned for a pair on this machine."""
    return recorded(pair) / f"tree-{dtype}.json"


def safe_name(text: str) -> str:
    """A text, such as a pair's name, as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._+-]", "-", text).lstrip(".-_+") or "own"


def figure_path(paper: str, item: str, scale: str = "laptop") -> Path:
    """The path, without suffix, of a figure or table of the runs: runs/<scale>/figures/<paper>/<item>."""
    return runs_dir(scale) / "figures" / plain_name(paper) / plain_name(item)


def known_scale(scale: str) -> str:
    """`scale` if it is one of SCALES; SpecdecError otherwise."""
    return check_name("scale", scale, SCALES)


def plain_name(name: str) -> str:
    """`name` if it is safe as a file name; SpecdecError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
        raise SpecdecError(
            f"{name!r} cannot name a file; use letters, digits, '.', '_', '+' and '-' only."
        )
    return name


@contextmanager
def atomic(path: Path):
    """Yield a temporary path beside `path`; after a successful block, flush it to the disk and move it into place.

    On any error `path` stays unchanged and the temporary file is removed. Disk errors (full, read-only), including those
    that libraries raise as their own, become one SpecdecError sentence.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _disk_faults_told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _flush(temporary)
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # the first error was reported; a failing clean-up adds nothing
            temporary.unlink()


@contextmanager
def atomic_folder(path: Path):
    """Yield a temporary folder beside `path`; after a successful block, flush its files and let it replace `path`.

    Two renames, so that there is never half a folder under the name. Errors as in `atomic`.
    """
    path = Path(path)
    fresh, old = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        with _disk_faults_told(path):
            fresh.mkdir(parents=True)
            _sweep(path.parent)
            yield fresh
            for file in filter(Path.is_file, fresh.rglob("*")):
                _flush(file)
            if path.exists():
                os.replace(path, old)
            os.replace(fresh, path)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        with suppress(OSError):
            if old.exists() and not path.exists():
                os.replace(old, path)
        shutil.rmtree(fresh, ignore_errors=True)


def _flush(file: Path) -> None:
    with open(file, "rb+") as written:
        os.fsync(written.fileno())


def replace_folder(place: Path, files: dict[str, Path]) -> Path:
    """Make `place` a folder of copies {relative name: source}, in one step."""
    with atomic_folder(place) as fresh:
        for name, source in files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, fresh / name)
    return Path(place)


def need_space(folder: Path, size: int) -> None:
    """OSError if `folder` has less free space; only checked for sizes that matter."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(f"{size / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")


@contextmanager
def _disk_faults_told(path: Path):
    """Inside, any failure to write a file becomes one sentence, including safetensors' and torch's own errors."""
    try:
        yield
    except Exception as error:
        of_a_library = type(error).__name__ == "SafetensorError" or "inline_container" in str(error)
        if not isinstance(error, OSError) and not of_a_library:
            raise
        raise _unwritable(path, error) from error


_TODO = {  # everything else is treated as a full disk
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make the folder writable"),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT), "check what is at this path"
    ),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "check what is at this path"),
}


def _unwritable(path: Path, error: Exception) -> SpecdecError:
    """The sentence for a disk error: at `path` itself, or at another file that is read to write it."""
    told = error if isinstance(error, OSError) else OSError()
    reason, code = told.strerror or first_line(error), told.errno
    other = Path(told.filename) if isinstance(told.filename, str | Path) else path
    ours = (path, *path.parents)
    if other not in ours and not any(
        part.startswith(f".{path.name}.{os.getpid()}.") for part in other.parts
    ):
        return SpecdecError(
            f"cannot write {path}, for which {other} is read: {reason}; check that file."
        )
    places = (("SPECDEC_CACHE", machine.cache_folder()), ("SPECDEC_HOME", home()))
    named = (f"set {name} to another folder" for name, place in places if place in path.parents)
    advice = f"{_TODO.get(code, 'free the disk')} or {next(named, 'write elsewhere')}"
    return SpecdecError(
        f"cannot write {path}: {reason}; {advice}, then run again (what was written before is intact)."
    )


def write_text(path: Path, text: str) -> Path:
    """Write `text` (UTF-8) atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def write_json(path: Path, value, files=None) -> Path:
    """Write `value` as readable JSON, atomically; dataclasses, paths and numpy numbers are understood.

    files: names of those below its folder that belong to it; with these, even (), readers notice a changed byte.
    """
    value = plain(value) if files is None else sealed(plain(value), Path(path).parent, files)
    return write_text(path, json.dumps(value, indent=2, allow_nan=True) + "\n")


@contextmanager
def locked(folder: Path, shared: bool = False):
    """Inside, no other process holds the same folder; the lock ends with the process. On systems without locks, no lock.

    shared: other holders with shared=True may be inside too.
    """
    path = Path(folder).with_name(f".{Path(folder).name}.lock")
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    with _disk_faults_told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def write_table(path: Path, table: pd.DataFrame, **metadata) -> Path:
    """Write `table` as parquet, atomically; `metadata` (small JSON) goes into the file's schema under b'specdec'."""
    columns = pa.Table.from_pandas(table, preserve_index=False)
    columns = columns.replace_schema_metadata(
        {**(columns.schema.metadata or {}), b"specdec": canonical(metadata)}
    )
    with atomic(path) as temporary:
        pq.write_table(columns, temporary)
    return Path(path)


def read_table(path: Path) -> pd.DataFrame:
    """Read a parquet file; a missing or damaged one is a SpecdecError that names it."""
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        missing = "run the notebook that writes it first"
        raise unreadable(path, error, "parquet", "delete it and run again", missing) from error


def read_yaml(path: Path):
    """Read a YAML file of the checkout; a missing or damaged one is a SpecdecError that names it."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        told = (
            ValueError(" ".join(str(error).split())) if isinstance(error, yaml.YAMLError) else error
        )
        missing = "check the path, or run from a checkout of specdec"
        raise unreadable(path, told, "YAML", "correct it", missing) from error


class Table(UserDict):
    """A mapping that `read()` makes when it is first used, for tables in a file: importing their module opens none.

    >>> Table(lambda: {"a": 1})["a"]
    1
    """

    def __init__(self, read: Callable[[], dict[str, Any]]):
        self._read = read

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        return self._read()


def found(path: Path) -> dict[str, Any]:
    """The content of a JSON file; {} if it does not exist."""
    return read_json(path) if path.is_file() else {}


def plain(value: Any) -> Any:
    """`value` as JSON types only. Dataclasses keep their class name, so that two classes with equal fields differ."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
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
    """sha256 (hex) of the canonical JSON of all inputs: equal inputs give equal keys, in every process."""
    return hashlib.sha256(canonical(inputs).encode()).hexdigest()


def configured(config, cls, settings: dict):
    """One frozen config of dataclass `cls`: `config`, or the defaults for None, updated with `settings` by name.

    So a function with many settings accepts both `f(x, Config(seed=1))` and `f(x, seed=1)`. SpecdecError for a
    setting that `cls` lacks.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     seed: int = 0
    ...     limit: int = 4
    >>> configured(Config(limit=2), Config, {"seed": 1})
    Config(seed=1, limit=2)
    """
    if config is not None and not isinstance(config, cls):
        raise SpecdecError(
            f"settings are given by name or as one {cls.__name__}, not as {config!r}."
        )
    fields = [field.name for field in dataclasses.fields(cls)]
    for name in settings:
        check_name("setting", name, fields)
    whole = dataclasses.replace(cls() if config is None else config, **settings)
    for name, hint in get_type_hints(cls).items():
        check_kind(name, getattr(whole, name), hint)
    return whole


def with_settings(config: Any, without: Collection[str] = ()) -> Callable[[Shown], Shown]:
    """A decorator: the signature of a function that ends in `**settings` lists every setting by name.

    config: the dataclass with the settings as fields, or an instance, whose values are then shown as defaults.
    without: fields that the function does not take. The function itself is unchanged.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     seed: int = 0
    >>> @with_settings(Config)
    ... def draw(config: Config | None = None, **settings): ...
    >>> str(inspect.signature(draw))
    "(config: 'Config | None' = None, *, seed: 'int' = 0)"
    """
    cls = config if isinstance(config, type) else type(config)

    def decorate(function: Shown) -> Shown:
        signature = inspect.signature(function)
        parameters = []
        for parameter in signature.parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                parameters.append(parameter)
        names = {parameter.name for parameter in parameters} | set(without)
        for field in dataclasses.fields(cls):
            if field.name not in names:
                parameters.append(_parameter(field, config))
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def _parameter(field: dataclasses.Field, config: Any) -> inspect.Parameter:
    """A dataclass field as an argument by name, with the value of `config` as its default."""
    # fields with a default factory have no class attribute
    default = getattr(config, field.name, field.default)
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
        if callable(field.default_factory):
            default = field.default_factory()
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=default, annotation=field.type)


def start(name: str, config: dict, *, scale: str = "laptop", tie_to_code: bool = True) -> Run:
    """Open the run directory of (name, config, this machine, this source) and record the session in its run.json.

    The same call finds the same directory again, so a stopped run continues; anything that could change a result (another
    setting, machine or source) leads to another directory. `tie_to_code=False` leaves the
    source out, for long training runs that must survive an unrelated edit; every session's commit is recorded anyway.
    """
    identity = {"name": plain_name(name), "config": config, "hardware": machine.hardware()}
    key = content_key(**identity, code=machine.code_hash() if tie_to_code else None)
    run = Run(runs_dir(scale) / f"{name}-{key[:12]}", name, scale, key)
    session = {"started": _now(), "process": os.getpid(), **machine.fingerprint()}
    with locked(run.directory):
        record = (
            run.record()
            if run.path("run.json").is_file()
            else {**run.label(), "config": config, "sessions": []}
        )
        _sweep(run.directory)
        write_json(
            run.path("run.json"),
            {**record, "sessions": [*record["sessions"], session], "finished": None},
        )
    return run


def shipped_dir() -> Path:
    """Runs that came with the notebooks: the source of the committed figures."""
    notebooks = machine.notebooks_folder()
    return (notebooks.parent if notebooks else home()) / "figures" / "measured"


def find(name: str, scale: str = "laptop", shipped: bool = False) -> list[Run]:
    """All finished runs of this name, newest first; with `shipped`, followed by those that came with the checkout."""
    found: dict[str, Run] = {}
    for place in (shipped_dir(),) if shipped else (runs_dir(scale), shipped_dir()):
        records = [
            (read_json(path, RunFile), path.parent)
            for path in place.glob(f"{plain_name(name)}-*/run.json")
        ]
        finished = [
            one
            for one in records
            if (one[0]["name"], one[0]["scale"]) == (name, scale) and one[0]["finished"]
        ]
        for record, folder in sorted(finished, key=lambda one: one[0]["finished"], reverse=True):
            found.setdefault(record["key"], Run(folder, name, scale, record["key"]))
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory. Everything in it is written atomically and can be read during the run."""

    directory: Path
    name: str
    scale: str
    key: str

    def __repr__(self) -> str:
        """One line: a notebook's last cell shows it."""
        record = self.record() if self.path("run.json").is_file() else {}
        results = "".join(
            f", {name} {value}" for name, value in (record.get("results") or {}).items()
        )
        state = f"finished{results}" if record.get("finished") else "not finished"
        return f"run {self.directory.name} ({self.scale}): {state}"

    def label(self) -> dict:
        """The provenance stored in every file of this run."""
        return {"name": self.name, "scale": self.scale, "key": self.key}

    def path(self, *names: str) -> Path:
        """A path inside the run directory."""
        return self.directory.joinpath(*names)

    def record(self) -> dict:
        """run.json: name, scale, key, config, sessions (machine, versions, commit of each start), finished, results."""
        return read_json(self.path("run.json"), RunFile)

    def write_table(self, name: str, table: pd.DataFrame) -> Path:
        """Write <name>.parquet with this run's label in its metadata."""
        return write_table(self.path(f"{plain_name(name)}.parquet"), table, **self.label())

    def read_table(self, name: str) -> pd.DataFrame:
        return read_table(self.path(f"{plain_name(name)}.parquet"))

    def shards(self, name: str) -> Shards:
        """The store for rows of table `name` that are collected piece by piece."""
        return Shards(self.path(plain_name(name)), self.label())

    def finish(self, **results) -> Run:
        """Record the end of the run, and any `results` worth reading without opening a table."""
        used = {name: value for name, value in machine.torch_state().items() if value is not None}
        with locked(self.directory):
            record = self.record()
            own = [
                one for one in record["sessions"] if one.get("process", os.getpid()) == os.getpid()
            ]
            for session in own[-1:]:
                session |= used
            write_json(self.path("run.json"), {**record, "finished": _now(), "results": results})
        return self


@dataclasses.dataclass(frozen=True)
class Shards:
    """Rows of one table in numbered files, <folder>/part-<number>.parquet: a killed run loses one shard at most.

    label: goes into every file's metadata.
    """

    folder: Path
    label: dict = dataclasses.field(default_factory=dict)

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.parquet"

    def done(self) -> list[int]:
        """Numbers of the complete shards, ascending. SpecdecError for a foreign file."""
        numbers = {
            path: path.stem.removeprefix("part-") for path in self.folder.glob("part-*.parquet")
        }
        if foreign := [path for path, number in numbers.items() if not number.isdecimal()]:
            raise SpecdecError(f"{foreign[0]} is no shard of this table; move it elsewhere.")
        return sorted(map(int, numbers.values()))

    def write(self, number: int, rows: pd.DataFrame) -> Path:
        return write_table(self.path(number), rows, **self.label)

    def drop(self, first: int) -> None:
        """Delete the shards numbered `first` and higher."""
        for number in self.done():
            if number >= first:
                self.path(number).unlink()

    def read(self) -> pd.DataFrame:
        """All shards in order as one table. SpecdecError if there are none."""
        if not (numbers := self.done()):
            raise SpecdecError(f"{self.folder} holds no rows yet; run the measurement first.")
        tables = [read_table(self.path(number)) for number in numbers]
        for path in map(self.path, numbers if self.label else ()):
            label = (pq.read_schema(path).metadata or {}).get(b"specdec", b"{}")
            if json.loads(label) not in ({}, plain(self.label)):
                raise SpecdecError(f"{path} belongs to another run; delete it and run again.")
        return pd.concat(tables, ignore_index=True)

    def merge(self) -> pd.DataFrame:
        """All shards in order as one table, also written as <folder>.parquet; the shards stay."""
        table = self.read()
        write_table(self.folder.with_name(f"{self.folder.name}.parquet"), table, **self.label)
        return table


def _sweep(folder: Path, older_than_s: float = 3600.0):
    """Remove temporary files and folders of killed processes; recent ones may belong to a process that is still writing."""
    for path in list(folder.rglob(".*.tmp")):
        with suppress(OSError):  # another process may be faster, or own the folder
            if time.time() - path.stat().st_mtime > older_than_s:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
