"""Schemas of files that are read back, and checksums that detect changes.

Each file's schema is here; a dataclass (a cost model, a policy's settings, an entry of book.yml) is the schema of its own
file. Any fault is one sentence that names the file and the place in it. Knows nothing about the meaning of the values.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pickletools
import zipfile
from pathlib import Path
from typing import Annotated, Any, NotRequired

import pydantic
from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from specdec import machine
from specdec.errors import SpecdecError, check_text, first_line, unreadable

CHECKSUM, FILES = (
    "checksum",
    "files",
)  # of the file itself; of associated files, by their paths below its folder
Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
Size = NotRequired[Positive | None]
Number = NotRequired[Annotated[float, Gt(0)] | None]
Flag = NotRequired[bool | None]
_SEALED = {CHECKSUM: NotRequired[str | None], FILES: NotRequired[dict[str, str]]}


class RunFile(TypedDict):
    """run.json"""

    name: str
    scale: str
    key: str
    config: dict
    sessions: list[dict]
    finished: str | None


PolicyFile = TypedDict(  # policy.json; `settings` are those of the class it names
    "PolicyFile", {"schema": int, "class": str, "settings": dict, "trained_for": dict, **_SEALED}
)
TraceFile = TypedDict(  # trace.json; a recording holds no rank above 32766
    "TraceFile",
    {
        "schema": int,
        "key": str,
        "pair": str,
        "pair_key": NotRequired[str],
        "temperature": NotRequired[Annotated[float, Ge(0)]],
        "seed": NotRequired[int],
        "max_new_tokens": Size,
        "depth": Positive,
        "top_ks": Annotated[list[Positive], MinLen(1)],
        "trees": NotRequired[list[Positive]],
        "family": NotRequired[list[Positive]],
        "most_nodes": Annotated[int, Ge(1), Le(32766)],
        "columns": dict[
            str, list[str | dict]
        ],  # strings in older ones, see `replays.columns.column_of`
        **_SEALED,
    },
)
DrafterFile = TypedDict(  # config.json of an EAGLE drafter, in all its layouts
    "DrafterFile",
    {
        **dict.fromkeys(
            ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), Size
        ),
        **dict.fromkeys(
            ("vocab_size", "draft_vocab_size", "truncated_vocab_size", "target_hidden_size"), Size
        ),
        **dict.fromkeys(
            (
                "num_aux_hidden_states",
                "medusa_num_layers",
                "hydra_num_layers",
                "para_depths",
                "block_size",
            ),
            Size,
        ),
        **dict.fromkeys(("rms_norm_eps", "rope_theta"), Number),
        **dict.fromkeys(
            (
                "norm_before_residual",
                "norm_output",
                "norm_before_fc",
                "fc_norm",
                "bias",
                "qkv_bias",
            ),
            Flag,
        ),
        **dict.fromkeys(("attention_bias", "mlp_bias"), Flag),
        "architectures": NotRequired[list[str] | None],
        "eagle_aux_hidden_state_layer_ids": NotRequired[list[int] | None],
        **dict.fromkeys(
            ("eagle_config", "speculators_config", "transformer_layer_config"),
            NotRequired[dict | None],
        ),
        **dict.fromkeys(("rope_parameters", "rope_scaling"), NotRequired[dict | None]),
    },
)


TargetFile = TypedDict(  # config.json of a causal LM: the fields whose wrong values give another model or none
    "TargetFile",
    dict.fromkeys(("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"), Size),
)
TextsFile = TypedDict(  # texts.json beside a recording for display
    "TextsFile", {"schema": int, "texts": dict[str, str], "prompts": list[str], **_SEALED}
)


class ShardList(TypedDict):
    weight_map: dict[str, str]  # *.index.json of weights in several files


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
OPEN = (RunFile, TraceFile, DrafterFile, TargetFile, ShardList, BookLine)


def checked(schema: type, value: Any, where: str | Path, advice: str) -> Any:
    """`value` (JSON types) checked against its schema: a dict, or an object of the dataclass.

    where: names the file in errors; advice: what to do about it.
    """
    try:
        return _adapter(schema).validate_json(json.dumps(value, default=str), strict=True)
    except pydantic.ValidationError as errors:
        error = errors.errors(include_url=False)[0]
        raise SpecdecError(f"{where}: {_said(error)}; {advice}.") from None
    except (
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
    ) as error:  # from a dataclass's own checks
        raise SpecdecError(
            f"{where}: the fields contradict each other ({first_line(error)}); {advice}."
        ) from error


@functools.cache
def _adapter(schema: type):
    extra = "allow" if schema in OPEN else "forbid"  # pydantic looks for this setting on the class
    schema.__pydantic_config__ = pydantic.ConfigDict(extra=extra, allow_inf_nan=False)
    return pydantic.TypeAdapter(schema)


def _said(error: dict) -> str:
    """pydantic's finding as a sentence: the place in the file and what it should hold."""
    place = ".".join(map(str, error["loc"]))
    if error["type"] in ("value_error", "assertion_error"):
        return str(error["ctx"]["error"]).rstrip(".") or "the fields contradict each other"
    if error["type"].startswith("missing"):
        return f"{place} is missing"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place} is unknown"
    shown = repr(error["input"])
    expected = error["msg"][:1].lower() + error["msg"][1:].replace("Input should", "should")
    return f"{place or 'it'}: {expected.replace('input should', 'should')}, got {shown[:60]}{'...' * (len(shown) > 60)}"


def read_json(
    path: Path, schema: type | None = None, advice: str = "delete it and run again", version=None
) -> Any:
    """A JSON file, checked against its schema. SpecdecError if it is missing, damaged or of other content.

    version: the number that its "schema" must have. A checksum in the file is compared with its content.
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
        raise SpecdecError(
            f"{path} was written with schema {value['schema']}, this is {version}; {advice}."
        )
    if isinstance(value, dict) and value.get(CHECKSUM) not in (None, digest(value)):
        raise SpecdecError(
            f"{path} has changed since it was written: its checksum is another; {advice}."
        )
    return value


def read_text(path: Path, advice: str) -> str:
    """The content of a UTF-8 text file. SpecdecError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "UTF-8 text", advice) from error


def json_line(text: str, where: str, advice: str) -> Any:
    """The JSON of one line. SpecdecError if it is invalid, nested too deeply, or cut inside a character. where: file and line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecdecError(f"{where}: not valid JSON ({first_line(error)}); {advice}.") from None
    if "\\ud" in text.lower():
        check_text(f"{where}: the line", json.dumps(value, ensure_ascii=False))
    return value


def sealed(record: dict, folder: Path, files=()) -> dict:
    """`record` (JSON types), with the sha256 of `files` below `folder` and a checksum over everything."""
    record = {
        **record,
        FILES: {str(name): machine.file_hash(Path(folder) / name) for name in files},
    }
    return {**record, CHECKSUM: digest(record)}


def digest(record: dict) -> str:
    """sha256 of a record without its checksum, independent of key order."""
    content = {name: value for name, value in record.items() if name != CHECKSUM}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def check_file(record: dict, folder: Path, name: str, advice: str) -> Path:
    """The file `name` below `folder`; SpecdecError if its sha256 differs from the record's (if it has one)."""
    path, expected = Path(folder) / name, record.get(FILES, {}).get(name)
    if not path.is_file():
        raise SpecdecError(f"there is no file {path}, which belongs to {folder}; {advice}.")
    if expected is not None and machine.file_hash(path) != expected:
        raise SpecdecError(
            f"{path} has changed since it was written: its sha256 is another; {advice}."
        )
    return path


def shards_of(index: Path, advice: str = "fetch the checkpoint again") -> list[Path]:
    """The files that an *.index.json of weights names, all of them in its folder; SpecdecError otherwise."""
    names = sorted(set(read_json(index, ShardList, advice)["weight_map"].values()))
    for name in names:
        if not inside(index.parent, name, f"{index} names it; {advice}").is_file():
            raise SpecdecError(f"the weight file {index.parent / name} is missing; {advice}.")
    return [index.parent / name for name in names]


def is_code(path: Path, error: Exception) -> bool:
    """Whether a file that torch refused with `error`, reading tensors only, is a pickle with code; it is not run."""
    if "Unsupported global" in str(error) or "Unsupported class" in str(error):
        return True
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                content = b"".join(
                    parts.read(name) for name in parts.namelist() if name.endswith("data.pkl")
                )
        else:
            with open(path, "rb") as stream:
                content = stream.read(1 << 20)
        makes = {"REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD"}
        return any(operation.name in makes for operation, _, _ in pickletools.genops(content))
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def inside(folder: Path, name: str, advice: str) -> Path:
    """`name` in `folder`. SpecdecError if it lies elsewhere, by its path or by a link.

    A link to a file beside it, or into a content-addressed download cache (blobs/), is allowed.
    """
    path, real = folder / name, (folder / name).resolve()
    blobs = folder.resolve().parents[1] / "blobs" if len(folder.resolve().parents) > 1 else None
    if Path(name).name != name or real.parent not in (folder.resolve(), blobs):
        raise SpecdecError(f"{name!r} lies outside {folder}; {advice}.")
    return path
