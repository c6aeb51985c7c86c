"""The record every family yields, and the tiny template language the families are written in.

Knows nothing about tokenizers, models or suites.

Template language: `[a|b|c]` picks one alternative (they may nest); `{key}` is a bound value or, when unbound, a random
entry of the word list of that name; `{key:list}` draws from a list and binds the draw, so that it can be repeated.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from specdec.data.suites import prompt_digest
from specdec.toy.corpus.words import LISTS

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO]|un|um|up)")
_START = re.compile(r"(^|[.!?]\s+|\n)([a-z])")


@dataclass(frozen=True)
class Example:
    """One conversation: user turns, the reference answers, and how to check the last answer if it can be checked."""

    family: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    check: dict | None = None


def held_out(example_or_prompt) -> bool:
    """True for the eighth of all first user turns that only tests may see (by sha256 of the normalised text)."""
    prompt = example_or_prompt if isinstance(example_or_prompt, str) else example_or_prompt.turns[0]
    return prompt_digest(prompt)[0] % 8 == 0


def pick_alternatives(rng: random.Random, template: str) -> str:
    """Resolve every `[a|b]`, innermost first."""
    while "[" in template:
        resolved = _ALTERNATIVES.sub(lambda match: rng.choice(match.group(1).split("|")), template)
        if resolved == template:
            break
        template = resolved
    return template


def fill(rng: random.Random, template: str, bound: dict | None = None) -> str:
    """Resolve a template; `bound` is read and, for `{key:list}`, written. Sets a/an and capitals."""
    bound = {} if bound is None else bound

    def slot(match: re.Match) -> str:
        key, source = match.group(1), match.group(2)
        if key in bound:
            return str(bound[key])
        value = rng.choice(LISTS[source or key])
        if source:
            bound[key] = value
        return value

    text = _SLOT.sub(slot, pick_alternatives(rng, template))
    text = _ARTICLE.sub(r"\1n ", text)
    return _START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def several(rng: random.Random, templates, count: int, bound: dict | None = None) -> list[str]:
    """`count` different templates filled, in random order."""
    return [fill(rng, template, bound) for template in rng.sample(list(templates), count)]


def sample(rng: random.Random, list_name: str, count: int) -> list[str]:
    """`count` different entries of a word list."""
    return rng.sample(LISTS[list_name], count)


def join_and(parts) -> str:
    """`a`, `a and b`, `a, b and c`."""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
