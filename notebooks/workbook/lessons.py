"""Checks of the exercises: an answer is judged out of sight, and a box says how it stands.

    check("10.alpha")   green: right, and a fact to remember
                        red:   what is wrong in a sentence, and a hint; a second miss brings more, the third a solution
                        grey:  nothing was answered yet, which is no miss

The checks are in `exercises.py`, the solutions in the book's own notebooks. Knows nothing about what is taught.
"""

from __future__ import annotations

import html
import linecache
import math
import numbers
import os
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.errors import SpecdecError, nearest_name_error

from workbook import book, notebooks

RIGHT, WRONG, OPEN = "right", "wrong", "open"
COLOURS = {RIGHT: "46, 125, 50", WRONG: "198, 40, 40", OPEN: "120, 120, 120"}
TITLES = {RIGHT: "Right.", WRONG: "Not right yet.", OPEN: "Not answered."}
MISSES: Counter[str] = Counter()  # by exercise, since the kernel started


class Miss(Exception):
    """The answer is wrong; a sentence that says in what, and does not say what is right."""


class Unanswered(Exception):
    """There is no answer yet; a sentence that says what to do."""


def need(condition: Any, sentence: str) -> None:
    """Miss with this sentence unless the condition holds."""
    if not condition:
        raise Miss(sentence[:1].upper() + sentence[1:])


class Given:
    """What the notebook holds, by name. Unanswered where a cell that makes it has not run."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise Unanswered(f"Run the cells above first: there is no `{name}` yet.")
        return self._values[name]


@dataclass(frozen=True)
class Exercise:
    """reads: how each answer is read, by its name in the notebook. hints: for the first miss, and for the second.

    test(given, *answers) -> a fact to remember, or ""; it raises Miss.
    """

    reads: dict[str, Callable[[str, Any], Any]]
    hints: tuple[str, str]
    test: Callable[..., str | None]


@dataclass(frozen=True)
class Verdict:
    """How an answer stands: the state, a sentence or two, and code where a solution is shown."""

    state: str
    text: str
    code: str = ""


EXERCISES: dict[str, Exercise] = {}  # filled by those who ask them


def exercise(name: str, reads: dict[str, Callable[[str, Any], Any]], *hints: str):
    """Add a function to EXERCISES as the test of the exercise `name`."""

    def add(test):
        EXERCISES[name] = Exercise(reads, hints, test)
        return test

    return add


def check(name: str, solved: bool = False) -> None:
    """Judge an answer of the calling notebook, and show the box.

    name: as in EXERCISES. solved: its solution ran above, so that where nobody reads along (papermill, the tests) a wrong one
    ends the run. nbgrader counts a cell that raises as wrong.
    """
    from IPython.display import display

    verdict = judge(name, sys._getframe(1).f_globals)
    display(boxed(verdict), raw=True)
    graded = os.environ.get("NBGRADER_EXECUTION") or (solved and not _read_along())
    if graded and verdict.state != RIGHT:
        raise AssertionError(verdict.text)


def judge(name: str, values: Mapping[str, Any]) -> Verdict:
    """The state of the answer to an exercise in the notebook whose variables are `values`; a miss is counted."""
    if name not in EXERCISES:
        raise nearest_name_error("exercise", name, EXERCISES)
    asked = EXERCISES[name]
    try:
        given = Given(values)
        answers = [read(f"`{answer}`", getattr(given, answer)) for answer, read in asked.reads.items()]
        fact = asked.test(given, *answers) or ""
    except Unanswered as none:
        return Verdict(OPEN, str(none))
    except Miss as miss:
        return _missed(name, str(miss))
    except SpecdecError as error:
        return _missed(name, f"It is refused: {error}")
    except Exception as error:  # noqa: BLE001  whatever a reader's code raises
        return _missed(name, _where(error, values))
    del MISSES[name]
    return Verdict(RIGHT, fact)


def _missed(name: str, sentence: str) -> Verdict:
    MISSES[name] += 1
    if MISSES[name] <= 2 or not (code := solution(name)):
        return Verdict(WRONG, f"{sentence} {EXERCISES[name].hints[MISSES[name] > 1]}")
    return Verdict(WRONG, f"{sentence} This is a solution:", code)


def _where(error: Exception, values: Mapping[str, Any]) -> str:
    """What an answer raised, and the line of the notebook in which it did."""
    first = str(error).splitlines()[0] if str(error) else "no message"
    said, at = f"{type(error).__name__}: {first}", error.__traceback__
    lines = []
    while at is not None:
        if at.tb_frame.f_globals is values and at.tb_frame.f_code.co_name != "<module>":
            lines.append(linecache.getline(at.tb_frame.f_code.co_filename, at.tb_lineno).strip())
        at = at.tb_next
    place = f"It stops at `{lines[-1]}`" if lines and lines[-1] else "It stops" if lines else "It cannot be judged"
    return f"{place} ({said.rstrip('.')})."


def solution(name: str) -> str:
    """The code that solves an exercise in the book's own notebook; "" where there is none."""
    for path in book.notebooks_folder().glob(f"{name.partition('.')[0]}_*.ipynb"):
        code = ""
        for cell in notebooks.read_notebook(path)["cells"]:
            if "solution" in cell["metadata"].get("tags", ()) and cell["cell_type"] == "code":
                code = notebooks.source_of(cell)
            if "check" in cell["metadata"].get("tags", ()) and f'"{name}"' in notebooks.source_of(cell):
                return code
    return ""


def boxed(verdict: Verdict) -> dict[str, str]:
    """The box as html, and as text for readers that show none."""
    plain = " ".join(filter(None, (TITLES[verdict.state], verdict.text)))
    parts = [html.escape(part) for part in verdict.text.split("`")]
    marked = "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))
    code = f"<pre style='margin: 6px 0 0'>{html.escape(verdict.code)}</pre>" if verdict.code else ""
    colour = COLOURS[verdict.state]
    style = f"border-left: 4px solid rgb({colour}); background: rgba({colour}, 0.12); padding: 6px 12px; color: inherit"
    box = f"<div role='status' class='specdec-{verdict.state}' style='{style}'><b>{TITLES[verdict.state]}</b> {marked}{code}</div>"
    return {"text/html": box, "text/plain": f"{plain}\n\n{verdict.code}" if verdict.code else plain}


def _read_along() -> bool:
    """Whether a person runs the notebook: papermill and the like allow no input."""
    interactive = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return bool(getattr(getattr(interactive, "kernel", None), "_allow_stdin", False))


def number(low: float = -math.inf, high: float = math.inf, whole: bool = False) -> Callable[[str, Any], float]:
    """Reads a number, of whatever library, in [low, high]; `whole` makes it an int, and 1e3 is one."""
    kind = "a whole number" if whole else "a number"
    limits = f" from {low:g} to {high:g}" if high < math.inf else f" of at least {low:g}" if low > -math.inf else ""

    def read(what: str, value: Any) -> float:
        if value is None:
            raise Unanswered(f"Put your answer into {what}, then run this cell again.")
        if hasattr(value, "item") and np.size(value) == 1:
            value = value.item()
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        fits = real and low <= value <= high and (not whole or value % 1 == 0)
        need(fits, f"{what} must be {kind}{limits}, and is {_shown(value)}.")
        return int(value) if whole else float(value)

    return read


def several(what_each: str = "", each: Callable[[str, Any], Any] | None = None) -> Callable[[str, Any], list]:
    """Reads a list, from whatever can be gone through but a text; each of its members is read by `each`."""

    def read(what: str, value: Any) -> list:
        if value is None or (isinstance(value, list) and not value):
            raise Unanswered(f"Put your answer into {what}, then run this cell again.")
        value = value.tolist() if hasattr(value, "tolist") else value
        fits = isinstance(value, Iterable) and not isinstance(value, str | dict)
        need(fits, f"{what} must be a list{what_each}, and is {_shown(value)}.")
        return [each(f"an entry of {what}", one) for one in value] if each else list(value)

    return read


def function(gives: Callable[[str, Any], Any]) -> Callable[[str, Any], Answer]:
    """Reads a function whose values are read by `gives`."""

    def read(what: str, value: Any) -> Answer:
        need(callable(value), f"{what} must be a function, and is {_shown(value)}.")
        return Answer(what, value, gives)

    return read


class Answer:
    """A function of the notebook. It may not change a list or an array that it is given."""

    def __init__(self, what: str, asked: Callable, gives: Callable[[str, Any], Any]):
        self.what, self.asked, self.gives, self.answered = what, asked, gives, False

    def __call__(self, *given: Any) -> Any:
        lent = [one.copy() if isinstance(one, list | np.ndarray) else one for one in given]
        value = self.asked(*lent)
        kept = all(np.array_equal(a, b) for a, b in zip(given, lent, strict=True) if isinstance(a, list | np.ndarray))
        need(kept, f"{self.what} changes what it is given; work on a copy.")
        if value is None and not self.answered:
            raise Unanswered(f"{self.what} returns nothing yet; write it, then run both cells again.")
        need(value is not None, f"{self.what} returns nothing for {_shown(given[0])}.")
        self.answered = True
        return self.gives(f"what {self.what} returns", value)


def _shown(value: Any) -> str:
    return f"the {type(value).__name__} {reprlib.repr(value)}"
