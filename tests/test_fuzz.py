"""Anything may be passed to a public name: it works, or one sentence says what is wrong with which argument."""

import contextlib
import io
import signal
import warnings
from pathlib import Path

import fuzzing
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from specdec.errors import SpecdecError
from specdec.tools import cli

SECONDS = 60  # a call that takes longer hangs
COUNTS = [[some, pytest.param(many, marks=pytest.mark.nightly)] for some, many in ((130, 1500), (20, 200))]
COMMON = dict(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    home = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(home))
        yield fuzzing.calls(home)


@st.composite
def spoiled(draw, names, arguments):
    name = draw(st.sampled_from(names))
    given = arguments(name)
    which = draw(st.lists(st.sampled_from(sorted(given)), min_size=1, max_size=2, unique=True)) if given else []
    return name, {one: draw(st.sampled_from(fuzzing.JUNK)) for one in which}


@contextlib.contextmanager
def limited():
    """No call may hang, be chatty or leave a warning as an error."""

    def late(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield errors
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def call_of(calls, name, junk) -> None:
    function, right = calls[name]
    try:
        with limited():
            function(**right | junk)
    except SpecdecError as error:
        message = str(error)
        assert message and "Traceback" not in message and len(message) < 1500, message
    except (TypeError, ValueError) as error:  # Python's own, at the door
        assert any(one in str(error) for one in right), f"{name}({junk}): {type(error).__name__}: {error}"


@pytest.mark.parametrize("count", COUNTS[0])
def test_calls(calls, count):
    @settings(max_examples=count, **COMMON)
    @given(spoiled(sorted(calls), lambda name: calls[name][1]))
    def check(case):
        call_of(calls, *case)

    check()


@pytest.mark.parametrize("count", COUNTS[1])
def test_commands(home: Path, count):
    words, names = st.sampled_from(fuzzing.WORDS), sorted(fuzzing.COMMANDS)

    @settings(max_examples=count, **COMMON)
    @given(st.sampled_from(names), st.integers(0, 30), words, st.booleans())
    def check(name, place, word, one_more):
        arguments = list(fuzzing.COMMANDS[name])
        if one_more or not arguments:
            arguments.append(word)
        else:
            arguments[place % len(arguments)] = word
        # A number names notebooks, and those take minutes.
        assume(name != "book" or not arguments[2].isdigit())
        status = 0
        with limited() as errors:
            try:
                status = cli.main([name, *arguments])
            except SystemExit as left:  # argparse
                status = left.code
        assert status in (0, 1, 2, None), (name, arguments)
        assert "Traceback" not in errors.getvalue()

    check()


def test_every_public_name_is_called(calls):
    import specdec

    held = "SpecdecError Question Cycle Generation Pair generate live_check calibrate headroom register".split()
    held += ["explore", "watch", "CopiedTree"]  # widgets, tested by themselves
    assert {name.split(".")[0] for name in calls} == set(specdec.__all__) - set(held)
