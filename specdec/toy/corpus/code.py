"""Function completion (after HumanEval) and short function writing (after MBPP), with tests that were run.

Knows nothing about how a model's answer is executed. Every reference is executed here to get
the examples its prompt shows.
"""

from __future__ import annotations

import functools
import random

from specdec.toy.corpus.example import Example
from specdec.toy.corpus.ideas import IDEAS
from specdec.toy.corpus.ideas_text import TEXT_IDEAS

_ARGUMENTS = {
    "ints": ("numbers", "values", "nums", "items", "scores", "data", "entries", "prices"),
    "text": ("text", "word", "s", "name", "string", "label", "title"),
    "line": ("sentence", "line", "text", "phrase", "message"),
    "words": ("words", "names", "labels", "strings", "tags"),
    "n": ("n", "number", "limit", "k", "amount", "maximum"),
    "m": ("m", "num", "count", "size", "times", "step"),
    "letter": ("letter", "char", "symbol", "c"),
    "pairs": ("table", "mapping", "ages", "stock", "points"),
}
_ANNOTATIONS = {"ints": "list", "text": "str", "line": "str", "words": "list", "n": "int", "m": "int", "letter": "str"}
_SHORT_WORDS = (
    "apple tree level sun river noon stone bird cloud radar ship house moon green table civic garden light book wave "
    "star paper kayak forest mouse lamp field glass wind music bread north"
).split()


def _argument(rng: random.Random, kind: str):
    if kind in ("ints", "nonempty", "pairlist"):
        length = rng.randint({"ints": 3, "nonempty": 2, "pairlist": 3}[kind], 5)
        return [rng.randint(0, 12) for _ in range(length)]
    if kind == "pairs":
        return {
            word: value for word, value in zip(rng.sample(_SHORT_WORDS, 3), rng.sample(range(1, 13), 3), strict=True)
        }
    if kind in ("line", "words"):
        words = rng.sample(_SHORT_WORDS, rng.randint(2, 4))
        return words if kind == "words" else " ".join(words)
    if kind == "text":
        return rng.choice(_SHORT_WORDS)
    return rng.choice("aeioulnrst") if kind == "letter" else rng.randint(0 if kind == "n" else 1, 9)


def _base_kind(kind: str) -> str:
    return "ints" if kind in ("nonempty", "pairlist") else kind


@functools.lru_cache(maxsize=4096)
def _compiled(source: str):
    return compile(source, "<reference>", "exec")


class _Task:
    """One drawn function: name, arguments, wording, source, and calls with their results."""

    def __init__(self, rng: random.Random, calls: int):
        names, kinds, descriptions, body = rng.choice(IDEAS + TEXT_IDEAS)
        self.entry = rng.choice(names.split())
        self.kinds = kinds.split()
        self.arguments: list[str] = []
        for kind in self.kinds:
            pool = [name for name in _ARGUMENTS[_base_kind(kind)] if name not in self.arguments]
            self.arguments.append(rng.choice(pool))
        slots = dict(zip("ab", self.arguments, strict=False)) | {"k": rng.randint(2, 9)}
        self.description = rng.choice(descriptions.split("|")).format(**slots)
        lines = body.format(**slots).split("\n")
        self.signature = f"def {self.entry}({', '.join(self.arguments)}):"
        self.source = "\n".join([self.signature, *("    " + line for line in lines)])
        scope: dict = {}
        exec(_compiled(self.source), scope)
        self.calls = []
        for _ in range(calls):
            drawn = [_argument(rng, kind) for kind in self.kinds]
            shown = f"{self.entry}({', '.join(map(repr, drawn))})"
            self.calls.append((shown, repr(scope[self.entry](*drawn))))

    def answer(self) -> str:
        return f"```python\n{self.source}\n```"

    def check(self) -> dict:
        return {
            "kind": "code",
            "entry": self.entry,
            "tests": [f"assert {call} == {value}" for call, value in self.calls],
        }


def complete(rng: random.Random) -> Example:
    """Signature, docstring and one or two doctest examples; the answer is the whole function."""
    task = _Task(rng, 5)
    description = task.description[0].upper() + task.description[1:]
    shown = "".join(f"    >>> {call}\n    {value}\n" for call, value in task.calls[: rng.randint(1, 2)])
    opening = rng.choice(("Complete the code I provided.", "Complete this function.", "Finish the function below."))
    prompt = f'{opening}\n\n{task.signature}\n    """{description}.\n\n{shown}    """\n'
    return Example("complete", (prompt,), (task.answer(),), task.check())


def write_code(rng: random.Random) -> Example:
    """`Write a function to ...`, with the name and often one test in the prompt."""
    task = _Task(rng, 5)
    call, value = task.calls[0]
    arguments = " and ".join(task.arguments)
    opening = rng.choice(
        (
            f"Write a function {task.entry}({', '.join(task.arguments)}) to {task.description}.",
            f"Write a python function to {task.description}. Call it {task.entry}, with {arguments} as input.",
            f"Write a function named {task.entry} that takes {arguments}. It should {task.description}.",
        )
    )
    prompt = opening + rng.choice(("", f" For example, {call} gives {value}.", f"\nassert {call} == {value}"))
    return Example("write_code", (prompt,), (task.answer(),), task.check())


MAKERS = {"complete": complete, "write_code": write_code}
