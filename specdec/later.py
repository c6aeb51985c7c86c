"""Modules that are imported when something of them is first used, so that what needs none of them starts at once."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class Later:
    """A module or package.

    >>> Later("os").path.basename("a/b")
    'b'
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, part: str) -> Any:
        module = importlib.import_module(self._name)
        found = getattr(module, part, Later(f"{self._name}.{part}"))
        return Later(found.__name__) if isinstance(found, ModuleType) else found
