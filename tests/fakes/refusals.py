"""What a call is refused with, and a file that would run code."""

from pathlib import Path

import pytest

from specdec.errors import SpecdecError


def refusal(call, *arguments, **settings) -> str:
    """The sentence of the SpecdecError that a call ends with; it is one line."""
    with pytest.raises(SpecdecError) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Bomb:
    """Unpickled, it makes the file `path`."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))
