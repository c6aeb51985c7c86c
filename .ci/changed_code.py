"""Change functions of a module that is loaded already: their code, in place, so that nothing need be imported anew.

A function object keeps its place in everybody's namespace and gets other code. That is enough where a change of the source
lies inside functions; what a module runs when it is imported (constants, defaults, decorators, class bodies) is done by then.
"""

from __future__ import annotations

import gc
import inspect
from collections import defaultdict
from types import CodeType, FunctionType

Functions = dict[tuple[str, str, int], list[FunctionType]]  # by file, qualified name and first line
RUN_AT_ONCE = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
FACTS = "co_code co_names co_varnames co_freevars co_cellvars co_argcount co_posonlyargcount co_kwonlyargcount co_flags"


def place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def live_functions(below: str) -> Functions:
    """Every function whose file's path begins with `below`."""
    found = defaultdict(list)
    gc.unfreeze()  # what is frozen is not listed
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(below):
            found[place(one.__code__)].append(one)
    gc.collect()
    gc.freeze()
    return found


def changed_code(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """(old, new) of each function that differs, with those it stands in; None where what an import runs differs."""
    return _differing(old, new, at_import=True)


def _differing(
    old: CodeType, new: CodeType, at_import: bool
) -> list[tuple[CodeType, CodeType]] | None:
    nested = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)]
    if _own(old) != _own(new) or len(nested[0]) != len(nested[1]):
        return None if at_import else [(old, new)]
    found = []
    for before, after in zip(*nested, strict=True):
        body = not before.co_flags & inspect.CO_OPTIMIZED  # of a class
        pairs = _differing(before, after, at_import and (body or before.co_name in RUN_AT_ONCE))
        if pairs is None:
            return None
        found += pairs
    return [(old, new), *found] if found and not at_import else found


def _own(code: CodeType) -> tuple:
    """What a code object does, but for the functions that it makes and the lines it stands on."""
    constants = [(type(one), repr(one)) for one in code.co_consts if not isinstance(one, CodeType)]
    return tuple(getattr(code, fact) for fact in FACTS.split()), constants


def change(pairs: list[tuple[CodeType, CodeType]], functions: Functions) -> None:
    """Give live functions their new code. LookupError where the outermost has none, ValueError where its shape differs."""
    if not any(functions.get(place(old)) for old, _ in pairs):
        raise LookupError(f"no function is made by {place(pairs[0][0])}")
    for old, new in pairs:
        for function in functions.get(place(old), ()):
            function.__code__ = new
