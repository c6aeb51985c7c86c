"""Entry points for users: the command line, estimates of a machine, and the book's functions."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`book` is a module of the notebooks; SpecdecError where there are none."""
    if name != "book":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specdec.runs import workbook_module

    return workbook_module(name)
