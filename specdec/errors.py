"""The one error for bad input, and the one way to warn. Knows nothing else of the package."""

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

HALF = re.compile("[\ud800-\udfff]")  # a surrogate: Python's texts hold no pair of them
F = TypeVar("F", bound=Callable[..., Any])  # a function, which `door` leaves as it is


class SpecdecError(ValueError):
    """Bad input. The message is one sentence that says what is wrong and what to do about it.

    so_far: what there was when decoding broke off midway, else None: of `decode` the unfinished Generation, of
    `decode_many` and `chat` a list. An interrupt (Ctrl-C) carries it as well.

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
    """Whatever ends the block early carries as `so_far` what this makes of what it carried before, None at first."""
    try:
        yield
    except BaseException as error:
        cast(Any, error).so_far = so_far(getattr(error, "so_far", None))
        raise


RETIRED = {"mini": "small"}  # names of presets that are gone, and what to use instead


def nearest_name_error(what: str, name: str, known) -> SpecdecError:
    """The error for an unknown name: it lists the nearest known names (or all of them).

    >>> nearest_name_error("dtype", "bfloat", ["float32", "bfloat16"])
    SpecdecError("unknown dtype 'bfloat'; did you mean 'bfloat16', 'float32'?")
    """
    if RETIRED.get(str(name)) in list(known):
        return SpecdecError(f"there is no {what} {name!r} any more; use {RETIRED[str(name)]!r}.")
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4) or sorted(known)
    return SpecdecError(f"unknown {what} {name!r}; did you mean {', '.join(map(repr, near))}?")


def first_line(error: Exception) -> str:
    """What an error says, as far as it fits into a sentence."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # torch paints its messages
    first, *rest = plain.splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


def unreadable(path, error: Exception, kind: str, advice: str, missing: str = "check the path") -> SpecdecError:
    """The error for a file that is not there (`missing` says what to do), may not be read, or is no `kind` (`advice`)."""
    if isinstance(error, FileNotFoundError):
        return SpecdecError(f"there is no file {path}; {missing}.")
    if Path(path).is_dir():
        return SpecdecError(f"{path} cannot be read: it is a folder; check what stands there.")
    if isinstance(error, OSError) and type(error) is not OSError:  # one of Python's own: not allowed, ...
        return SpecdecError(f"{path} cannot be read: {error.strerror or first_line(error)}; check what stands there.")
    return SpecdecError(f"{path} cannot be read as {kind} ({first_line(error)}); {advice}.")


def warn(message: str) -> None:
    """Warn of the line that called into this package, through however many functions and wrappers of it."""
    ours, frame, level = str(Path(__file__).parent), sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_integer(name: str, value: Any, lowest: int | None = None) -> int:
    """`value` itself where it is an integer of at least `lowest`; SpecdecError otherwise. A bool is no number.

    >>> check_integer("limit", 3, 1)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int) or (lowest is not None and value < lowest):
        least = "" if lowest is None else f" of at least {lowest}"
        raise SpecdecError(f"{name} must be an integer{least}, got {value!r}.")
    return value


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    """`value` itself where it is a finite number in [low, high]; SpecdecError otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise SpecdecError(f"{name} must be a finite number, got {value!r}.")
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise SpecdecError(f"{name} must be {limits}, got {value!r}.")
    return value


def check_text(what: str, value: str) -> str:
    """`value` itself where it can be written as UTF-8; SpecdecError where it holds half of a character.

    >>> check_text("the prompt", "a fox")
    'a fox'
    """
    if half := HALF.search(value):
        shown = ascii(value[max(0, half.start() - 12) : half.end()])
        raise SpecdecError(
            f"{what} holds half of a character, as text that was cut leaves it: {shown}; repair or drop it."
        )
    return value


def check_fields(config, **limits: tuple[float, float]) -> None:
    """SpecdecError where a field of a dataclass is not what its annotation says, or a number in it is not finite and in range.

    limits: (lowest, highest) by name; else a number, alone or in a tuple, is at least 0, and one named ..._frac at most 1.
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
    """A public function that refuses arguments which are not what its annotations say; others are passed on as they are.

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
        given = signature.bind(*args, **kwargs).arguments  # its TypeErrors name the argument
        for name in named:
            if name in given:
                check_kind(f"{name} of {function.__name__}()", given[name], _hints(function).get(name, Any))
        return function(*args, **kwargs)

    return cast(F, checked)


def check_kind(name: str, value: Any, hint: Any) -> None:
    """SpecdecError where `value` is not of the annotated kind."""
    if not _fits(value, hint):
        shown = reprlib.repr(value)
        wanted = hint.__name__ if isinstance(hint, type) else str(hint)
        wanted = re.sub(r"\b(typing|collections\.abc|pathlib|specdec(\.\w+)+)\.", "", wanted)
        raise SpecdecError(f"{name} must be {wanted}, got the {type(value).__name__} {shown}.")


_hints = functools.cache(get_type_hints)
# NumPy's numbers; people write either kind of list
_WIDER = {int: numbers.Integral, float: numbers.Real, tuple: (tuple, list), list: (tuple, list)}


def _fits(value, hint) -> bool:
    """Whether a value is of an annotated kind, as far as `isinstance` can say; what containers hold is not looked at."""
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if isinstance(value, bool) and kind in (int, float):
        return False
    if Protocol in getattr(kind, "__bases__", ()):
        return like(value, kind)
    try:
        return isinstance(value, _WIDER.get(kind, kind))
    except TypeError:  # nothing that can be asked for: Any, a literal
        return True


def like(value: Any, protocol: type) -> bool:
    """Whether a value has what a protocol names. isinstance() overlooks, from Python 3.12 on, what __getattr__ gives."""
    stated = [one for one in protocol.__mro__ if Protocol in one.__bases__]
    named = {name for one in stated for name in (*inspect.get_annotations(one), *vars(one))}
    return not isinstance(value, type) and all(hasattr(value, name) for name in named if not name.startswith("_"))
