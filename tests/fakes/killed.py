"""A training that is killed in the middle."""

import itertools
from contextlib import contextmanager

import pytest


@contextmanager
def killed_at(owner, name: str, call: int):
    """What is done inside breaks off at this call (the first is 0) of `owner.name`."""
    real, calls = getattr(owner, name), itertools.count()

    def dies(*arguments, **options):
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, dies)
        yield
