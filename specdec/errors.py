"""SpecdecError for bad input, checks that raise it, and warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import operator
import re
import reprlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Function = TypeVar("Function", bound=Callable[..., Any])
# Classes that an annotation also accepts: NumPy's numbers, and lists in place of tuples.
WIDER: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
WIDER[tuple] = WIDER[list] = (tuple, list)


class SpecdecError(ValueError):
    """Bad input. The message is one sentence: what is wrong and what to do.

    so_far: what was decoded until decoding broke off, else None: the unfinished Generation of
    `decode`, a list of them of `decode_many` and `chat`. An interrupt (Ctrl-C) carries it too.

    >>> import specdec
    >>> try:
    ...     specdec.load_pair("tinny")
    ... except SpecdecError as error:
    ...     print(error)
    unknown preset 'tinny'; did you mean 'tiny'?
    """

    so_far: Any = None


@contextlib.contextmanager
def keeping(so_far: Callable[[Any], Any]) -> Iterator[None]:
    """An exception that leaves the block carries so_far(its value before) as `so_far`."""
    try:
        yield
    except BaseException as error:
        cast(Any, error).so_far = so_far(getattr(error, "so_far", None))
        raise


def nearest_name_error(what: str, name: str, known) -> SpecdecError:
    """The error for an unknown name, with one or two of the nearest known names."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=2, cutoff=0.6)
    near = near or difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)
    return SpecdecError(f"unknown {what} {name!r}; did you mean {', '.join(map(repr, near))}?")


def check_name(what: str, name: Any, known) -> Any:
    """`name` if it is one of the known ones; else `nearest_name_error`."""
    if name not in known:
        raise nearest_name_error(what, name, known)
    return name


def first_line(error: Exception) -> str:
    """The first line of an error's message, to fit into a sentence."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # torch colours its messages
    lines = text.splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0]


def check_pointer(path) -> None:
    """SpecdecError for a file that holds the name of its content, as clones without Git LFS do."""
    if Path(path).is_file():
        with open(path, "rb") as file:
            if file.read(23) == b"version https://git-lfs":
                raise SpecdecError(f"{path} is a pointer of Git LFS; run `git lfs pull` there.")


def unreadable(path, error: Exception, kind: str, advice: str) -> SpecdecError:
    """The error for a file that is missing, cannot be opened or is no `kind` (see `advice`)."""
    if isinstance(error, FileNotFoundError):
        return SpecdecError(f"there is no file {path}; check the path, or run what writes it.")
    # permissions, a folder: the content is not to blame
    if Path(path).is_dir() or (isinstance(error, OSError) and error.strerror):
        return SpecdecError(f"{path} cannot be read: {first_line(error)}; check the path.")
    check_pointer(path)
    return SpecdecError(f"{path} cannot be read as {kind} ({first_line(error)}); {advice}.")


def warn(message: str) -> None:
    """Warn at the caller's line outside this package, whatever functions lie between."""
    folder = str(Path(__file__).parent)
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def check_integer(name: str, value: Any, lowest: int = 0) -> int:
    """The int of an integer, NumPy's too, of at least `lowest`; SpecdecError for others."""
    try:
        number = operator.index(value)
    except TypeError:  # a float, a text, NumPy's bool
        number = None
    if number is None or number < lowest or value is True or value is False:
        raise SpecdecError(f"{name} must be an integer of at least {lowest}, got {value!r}.")
    return number


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    """`value` if it is a finite number in [low, high]; SpecdecError otherwise."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        limits = f"between {low:g} and {high:g}, got {value!r}"
        raise SpecdecError(f"{name} must be a finite number {limits}.")
    return value


def check_text(what: str, value: str) -> str:
    """`value`; SpecdecError if it holds half of a character, as text that was cut leaves it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SpecdecError(f"{what} holds half of a character; repair or drop it.") from None
    return value


def check_fields(config, **limits: tuple[float, float]) -> None:
    """SpecdecError if a dataclass field is not as annotated, not finite or out of range.

    limits: (lowest, highest) by name. Otherwise numbers, alone or in a tuple, are at least 0, and
    those named ..._frac at most 1.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{field.name} of {type(config).__name__}"
        check_kind(name, value, hints[field.name])
        highest = 1.0 if field.name.endswith("_frac") else math.inf
        low, high = limits.get(field.name, (0.0, highest))
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, numbers.Real) and not isinstance(number, bool):
                check_number(name, number, low, high)


def door(function: Function) -> Function:
    """Decorator of functions without *args: refuses what does not match the annotations."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        hints = _hints(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in hints:
                check_kind(f"{name} of {function.__name__}()", value, hints[name])
        return function(*args, **kwargs)

    return cast(Function, checked)


def check_kind(name: str, value: Any, hint: Any) -> None:
    """SpecdecError if `value` does not match the annotation; elements are not looked at."""
    if not _matches(value, hint):
        expected = hint.__name__ if isinstance(hint, type) else str(hint)
        expected = re.sub(r"\b(\w+\.)+", "", expected)  # names without their modules
        kind = type(value).__name__
        raise SpecdecError(f"{name} must be {expected}, got the {kind} {reprlib.repr(value)}.")


_hints = functools.cache(get_type_hints)


def _matches(value: Any, hint: Any) -> bool:
    """Whether a value matches an annotation, by its class alone."""
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return any(_matches(value, choice) for choice in get_args(hint))
    if kind in (int, float) and isinstance(value, bool):
        return False
    try:
        return isinstance(value, WIDER.get(kind, kind))
    except TypeError:  # an annotation that no class stands for, such as Literal or a Protocol
        return True
