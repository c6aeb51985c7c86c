"""The one error for bad input. Knows nothing else of the package."""

from __future__ import annotations

import difflib


class SpecdecError(ValueError):
    """Bad input. The message is one sentence that says what is wrong and what to do about it.

    so_far: the unfinished Generation when decoding broke off midway (a policy failed), else None.

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

    so_far = None


RETIRED = {"mini": "small"}  # names of presets that are gone, and what to use instead


def nearest_name_error(what: str, name: str, known) -> SpecdecError:
    """The error for an unknown name: it lists the nearest known names (or all of them).

    >>> nearest_name_error("dtype", "bfloat", ["float32", "bfloat16"])
    SpecdecError("unknown dtype 'bfloat'; did you mean 'bfloat16', 'float32'?")
    """
    if RETIRED.get(name) in known:
        return SpecdecError(f"there is no {what} {name!r} any more; use {RETIRED[name]!r}.")
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4) or sorted(known)
    return SpecdecError(f"unknown {what} {name!r}; did you mean {', '.join(map(repr, near))}?")


def first_line(error: Exception) -> str:
    """What an error says, as far as it fits into a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
