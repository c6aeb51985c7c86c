"""Every public name shows how it is used, and what it shows is true."""

import doctest
import importlib

import pytest

import specdec


@pytest.mark.parametrize("name", specdec.__all__)
def test_public_names_have_an_example_that_holds(name, home):
    thing = getattr(specdec, name)
    module = importlib.import_module(thing.__module__)
    test = doctest.DocTestParser().get_doctest(
        thing.__doc__ or "", vars(module).copy(), name, module.__file__, 0
    )
    assert test.examples, f"{name}: an example is missing"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(
        test, out=said.append
    )
    assert not said, "".join(said)
