"""SpecdecError for bad input, and warnings. Imports nothing else of the package."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import reprlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints

HALF = re.compile("[\ud800-\udfff]")  # a surrogate; valid Python text has none
F = TypeVar("F", bound=Callable[..., Any])  # a function, unchanged by `door`


class SpecdecError(ValueError):
    """Bad input. The message is one sentence: what is wrong and what to do.

    so_far: results until decoding broke off, else None: the unfinished Generation of `decode`, a list of `decode_many` and
    `chat`. An interrupt (Ctrl-C) carries it too.

    >>> import specdec
    >>> try:
    ...     specdec.load_pair("tinny")
    ... except SpecdecError as error:
    ...     print(error)
    unknown preset 'tinny'; did you mean 'tiny'?

    >>> import specdec
    >>> try:
    ...     specdec.TreeConfig(total_tokens=0)
    ... except SpecdecError as error:
    ...     print(error)
    total_tokens must be an integer of at least 1, got 0.
    """

    so_far: Any = None


@contextlib.contextmanager
def keeping(so_far: Callable[[Any], Any]) -> Iterator[None]:
    """An exception that leaves the block carries so_far(its earlier value, None at first) as `so_far`."""
    try:
        yield
    except BaseException as error:
        cast(Any, error).so_far = so_far(getattr(error, "so_far", None))
        raise


RETIRED = {"mini": "small"}  # removed presets, and their replacements


def nearest_name_error(what: str, name: str, known) -> SpecdecError:
    """The error for an unknown name, with the nearest known names (or all of them).

    >>> nearest_name_error("dtype", "bfloat", ["float32", "bfloat16"])
    SpecdecError("unknown dtype 'bfloat'; did you mean 'bfloat16', 'float32'?")
    """
    if RETIRED.get(str(name)) in list(known):
        return SpecdecError(f"there is no {what} {name!r} any more; use {RETIRED[str(name)]!r}.")
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4) or sorted(known)
    return SpecdecError(f"unknown {what} {name!r}; did you mean {', '.join(map(repr, near))}?")


def check_name(what: str, name: Any, known) -> Any:
    """`name` if it is one of the known ones; else `nearest_name_error`."""
    if name not in known:
        raise nearest_name_error(what, name, known)
    return name


def first_line(error: Exception) -> str:
    """The first line of an error's message, shortened to fit into a sentence."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # torch colours its messages
    first, *rest = plain.splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


def unreadable(path, error: Exception, kind: str, advice: str, missing: str = "check the path") -> SpecdecError:
    """The error for a file that is missing (`missing` says what to do), unreadable, or no `kind` (`advice`)."""
    if isinstance(error, FileNotFoundError):
        return SpecdecError(f"there is no file {path}; {missing}.")
    if Path(path).is_dir():
        return SpecdecError(f"{path} cannot be read: it is a folder; check the path.")
    if isinstance(error, OSError) and type(error) is not OSError:  # a subclass such as PermissionError
        return SpecdecError(f"{path} cannot be read: {error.strerror or first_line(error)}; check the file.")
    return SpecdecError(f"{path} cannot be read as {kind} ({first_line(error)}); {advice}.")


def warn(message: str) -> None:
    """Warn at the caller's line outside this package, whatever functions and wrappers lie between."""
    ours, frame, level = str(Path(__file__).parent), sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_integer(name: str, value: Any, lowest: int | None = None) -> int:
    """`value` if it is an integer of at least `lowest`; SpecdecError otherwise. A bool is no integer.

    >>> check_integer("limit", 3, 1)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int) or (lowest is not None and value < lowest):
        least = "" if lowest is None else f" of at least {lowest}"
        raise SpecdecError(f"{name} must be an integer{least}, got {value!r}.")
    return value


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    """`value` if it is a finite number in [low, high]; SpecdecError otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise SpecdecError(f"{name} must be a finite number, got {value!r}.")
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise SpecdecError(f"{name} must be {limits}, got {value!r}.")
    return value


def check_text(what: str, value: str) -> str:
    """`value` if it can be encoded as UTF-8; SpecdecError if it holds half of a character.

    >>> check_text("the prompt", "a fox")
    'a fox'
    """
    if half := HALF.search(value):
        shown = ascii(value[max(0, half.start() - 12) : half.end()])
        why = f"{what} holds half of a character, as text that was cut leaves it: {shown}"
        raise SpecdecError(f"{why}; repair or drop it.")
    return value


def check_fields(config, **limits: tuple[float, float]) -> None:
    """SpecdecError if a dataclass field does not match its annotation, or a number is not finite or out of range.

    limits: (lowest, highest) by name; otherwise numbers, alone or in a tuple, are at least 0, those named ..._frac at most 1.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{field.name} of {type(config).__name__}"
        check_kind(name, value, hints[field.name])
        limit = limits.get(field.name, (0.0, 1.0 if field.name.endswith("_frac") else math.inf))
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, numbers.Real) and not isinstance(number, bool):
                check_number(name, number, *limit)


def door(function: F) -> F:
    """Decorator of public functions: refuses arguments that do not match the annotations.

    >>> @door
    ... def double(number: int) -> int:
    ...     return 2 * number
    >>> double("2")
    Traceback (most recent call last):
        ...
    specdec.errors.SpecdecError: number of double() must be int, got the str '2'.
    """
    signature = inspect.signature(function)
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    named = [one.name for one in signature.parameters.values() if one.kind not in several]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments  # raises TypeErrors that name the argument
        for name in named:
            if name in given:
                check_kind(f"{name} of {function.__name__}()", given[name], _hints(function).get(name, Any))
        return function(*args, **kwargs)

    return cast(F, checked)


def check_kind(name: str, value: Any, hint: Any) -> None:
    """SpecdecError if `value` does not match the annotation."""
    if not _fits(value, hint):
        shown = reprlib.repr(value)
        wanted = hint.__name__ if isinstance(hint, type) else str(hint)
        wanted = re.sub(r"\b(typing|collections\.abc|pathlib|specdec(\.\w+)+)\.", "", wanted)
        raise SpecdecError(f"{name} must be {wanted}, got the {type(value).__name__} {shown}.")


_hints = functools.cache(get_type_hints)
# includes NumPy's numbers; lists and tuples are interchangeable
_WIDER = {int: numbers.Integral, float: numbers.Real, tuple: (tuple, list), list: (tuple, list)}


def _fits(value, hint) -> bool:
    """Whether a value matches an annotation, as far as `isinstance` can tell; container elements are not checked."""
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if isinstance(value, bool) and kind in (int, float):
        return False
    if Protocol in getattr(kind, "__bases__", ()):
        return like(value, kind)
    try:
        return isinstance(value, _WIDER.get(kind, kind))
    except TypeError:  # not checkable: Any, a literal
        return True


def like(value: Any, protocol: type) -> bool:
    """Whether a value has a protocol's attributes. Since Python 3.12 isinstance() ignores those from __getattr__."""
    stated = [one for one in protocol.__mro__ if Protocol in one.__bases__]
    named = {name for one in stated for name in (*inspect.get_annotations(one), *vars(one))}
    return not isinstance(value, type) and all(hasattr(value, name) for name in named if not name.startswith("_"))
