"""Entry points for users: the command line, the doctor, estimates, and the book's functions."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """A module, imported when first used; `book` is the workbook's (SpecdecError without one)."""
    if name == "book":
        return importlib.import_module("specdec.runs").workbook_module(name)
    if name in ("doctor", "estimate", "places"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
