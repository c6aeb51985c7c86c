"""Schemas of files that are read back, and checksums that detect changes.

A dataclass (a cost model, a policy's settings, an entry of book.yml) is the schema of its own file;
the other files' schemas are here. A fault is one sentence that names the file and the place in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, NotRequired

try:
    import pydantic
    from annotated_types import Ge, Gt, Le, MinLen
except ImportError:  # a GPU machine with torch and transformers only reads no file with a schema
    pydantic = None  # type: ignore[assignment]
    Ge = Gt = Le = MinLen = int  # type: ignore[assignment,misc]
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from specdec import machine
from specdec.errors import SpecdecError, first_line, unreadable

CHECKSUM = "checksum"  # of the file itself
FILES = "files"  # sha256 of associated files, by their paths below its folder
Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
SEAL = {CHECKSUM: NotRequired[str | None], FILES: NotRequired[dict[str, str]]}


class RunFile(TypedDict):
    """run.json"""

    name: str
    scale: str
    key: str
    config: dict
    sessions: list[dict]
    finished: str | None


# policy.json; `settings` are those of the class it names
PolicyFile = TypedDict(
    "PolicyFile", {"schema": int, "class": str, "settings": dict, "trained_for": dict, **SEAL}
)
# trace.json; a recording holds no rank above 32766
TraceFile = TypedDict(
    "TraceFile",
    {
        "schema": int,
        "key": str,
        "pair": str,
        "pair_key": NotRequired[str],
        "temperature": NotRequired[Annotated[float, Ge(0)]],
        "seed": NotRequired[int],
        "max_new_tokens": NotRequired[Positive | None],
        "depth": Positive,
        "top_ks": Annotated[list[Positive], MinLen(1)],
        "trees": NotRequired[list[Positive]],
        "family": NotRequired[list[Positive]],
        "most_nodes": Annotated[int, Ge(1), Le(32766)],
        "columns": dict[str, list[str | dict]],
        **SEAL,
    },
)


class CopiesFile(TypedDict):
    """copies.json"""

    matched: list[int]
    hits: list[list[Count]]
    outcomes: list[list[Count]]
    scale: Annotated[float, Gt(0)]
    learned_from: str
    hash: str


class BookLine(TypedDict):
    """A line of book.yml, before `each` is expanded."""

    name: str
    each: NotRequired[dict[str, list]]
    reads: NotRequired[list[str] | dict[str, str]]
    parameters: NotRequired[dict[str, dict]]


# These may hold further fields; all others may not.
OPEN = (RunFile, TraceFile, BookLine)


def checked(schema: type, value: Any, where: str | Path, advice: str) -> Any:
    """`value` (JSON types) checked against its schema: a dict, or an object of the dataclass."""
    if pydantic is None:
        raise SpecdecError(f"{where} is checked by pydantic, which is not installed; install it.")
    try:
        return _adapter(schema).validate_json(json.dumps(value, default=str), strict=True)
    except pydantic.ValidationError as errors:
        error = errors.errors(include_url=False)[0]
        place = ".".join(map(str, error["loc"])) or "it"
        why = f"{place}: {error['msg'].rstrip('.')}, got {error['input']!r:.60}"
    # from a dataclass's own checks
    except (TypeError, LookupError, ArithmeticError, AttributeError) as error:
        why = f"the fields contradict each other ({first_line(error)})"
    raise SpecdecError(f"{where}: {why}; {advice}.")


@functools.cache
def _adapter(schema: type):
    extra = "allow" if schema in OPEN else "forbid"
    # pydantic looks for this setting on the class
    schema.__pydantic_config__ = pydantic.ConfigDict(extra=extra, allow_inf_nan=False)
    return pydantic.TypeAdapter(schema)


def read_json(
    path: Path, schema: type | None = None, advice: str = "delete it and run again", version=None
) -> Any:
    """A JSON file, checked against its schema and its own checksum.

    version: the number that its "schema" must have.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error, "JSON", advice) from error
    if schema is None:
        return value
    value = checked(schema, value, path, advice)
    if version is not None and value["schema"] != version:
        why = f"{path} was written with schema {value['schema']}, this is {version}"
        raise SpecdecError(f"{why}; {advice}.")
    if isinstance(value, dict) and value.get(CHECKSUM) not in (None, digest(value)):
        raise SpecdecError(f"{path} has changed since it was written (its checksum); {advice}.")
    return value


def read_text(path: Path, advice: str) -> str:
    """The content of a UTF-8 text file. SpecdecError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "UTF-8 text", advice) from error


def json_line(text: str, where: str, advice: str) -> Any:
    """The JSON of one line; SpecdecError if it is invalid. where: file and line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecdecError(f"{where}: not valid JSON ({first_line(error)}); {advice}.") from None


def sealed(record: dict, folder: Path, files=()) -> dict:
    """`record` with the sha256 of `files` below `folder` and a checksum over everything."""
    hashes = {str(name): machine.file_hash(Path(folder) / name) for name in files}
    record = {**record, FILES: hashes}
    return {**record, CHECKSUM: digest(record)}


def digest(record: dict) -> str:
    """sha256 of a record without its checksum, independent of key order."""
    content = {name: value for name, value in record.items() if name != CHECKSUM}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_file(record: dict, folder: Path, name: str, advice: str) -> Path:
    """The file `name` below `folder`; SpecdecError if it is not the one that `record` names."""
    path = Path(folder) / name
    expected = record.get(FILES, {}).get(name)
    if not path.is_file():
        raise SpecdecError(f"there is no file {path}, which belongs to {folder}; {advice}.")
    if expected is not None and machine.file_hash(path) != expected:
        raise SpecdecError(f"{path} has changed since it was written (its sha256); {advice}.")
    return path
