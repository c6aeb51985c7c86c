"""What people start: the command line, the doctor, estimates, and the way to the book, which lies beside the notebooks."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`from specdec.tools import book` is the workbook's. SpecdecError where there are no notebooks."""
    if name != "book":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specdec import runs  # here, so that --help is instant

    return runs.workbook_module("book")
