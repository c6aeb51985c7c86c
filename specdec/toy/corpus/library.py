"""The standard library's own source as training text. Knows nothing about the generated families.

Whole modules are held out, so that no line of a test module is ever trained on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from specdec.errors import nearest_name_error

_SKIPPED_PARTS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "__pycache__",
    "encodings", "pydoc_data", "ensurepip", "unicodedata", "lib-dynload", "__phello__",
}
_LARGEST_BYTES = 200_000  # beyond this a module is a data table or a monolith that would dominate


def module_split(name: str) -> str:
    """`test` for one module in eight, by the hash of its top-level package; else `train`."""
    return "test" if hashlib.sha256(name.split(".")[0].encode()).digest()[0] % 8 == 0 else "train"


def library_text(split: str) -> Iterator[tuple[str, str]]:
    """(module name, source) of this Python's standard library, sorted by name; `split` is `train` or `test`.

    Sources that are not ASCII are skipped. Raises SpecdecError for another split name.
    """
    if split not in ("train", "test"):
        raise nearest_name_error("split", split, ("train", "test"))
    return _modules(split, Path(sysconfig.get_paths()["stdlib"]))


def _modules(split: str, folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if _SKIPPED_PARTS.intersection(parts) or path.stat().st_size > _LARGEST_BYTES:
            continue
        name = ".".join(parts)[: -len(".py")].removesuffix(".__init__")
        if module_split(name) != split:
            continue
        text = path.read_bytes().decode("latin-1").replace("\r\n", "\n")
        if text.strip() and text.isascii():
            yield name, text
