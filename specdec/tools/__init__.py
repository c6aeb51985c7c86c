"""Entry points for users: the command line, the doctor, estimates, and access to the book beside the notebooks."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`from specdec.tools import book` is the workbook's. SpecdecError without notebooks."""
    if name != "book":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specdec import runs  # here, so that --help is instant

    return runs.workbook_module("book")
