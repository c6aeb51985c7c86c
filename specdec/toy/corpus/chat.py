"""Two-turn conversations over MT-Bench's eight categories; the second turn works on the first answer.

Knows nothing about scoring.
"""

# ruff: noqa: E501  (one template a row reads as a table)
from __future__ import annotations

import random

from specdec.toy.corpus.code import write_code
from specdec.toy.corpus.example import Example, fill, sample
from specdec.toy.corpus.instruct import explanation
from specdec.toy.corpus.maths import word_problem
from specdec.toy.corpus.passages import passage_and_questions
from specdec.toy.corpus.structured import ordering
from specdec.toy.corpus.topics import TOPICS
from specdec.toy.corpus.words import NUMBER_WORDS
from specdec.toy.corpus.writing import letter_request, letter_slots, letter_text

_TRAVEL = (
    "[Last {season}|In {month}] I [traveled|went|drove] to {town} with {name}.",
    "The {adj} {place} [surprised|impressed|delighted] us {time_of_day}.",
    "We [ate|tried|shared] {food} and {food2} in a {adj} {place}.",
    "A {job} [showed us|told us about|sold us] a {material} {object}.",
    "[Despite|After] {weather}, {name} felt {mood}.",
    "Do not miss the {place} and the {hobby} [club|school|festival].",
    "I [left|came home] {mood}, with a {object} in my bag.",
)
_ROLES = {
    "pirate": ("Ahoy", "The sea", "my ship"), "king": ("Welcome to my court", "My kingdom", "my crown"),
    "robot": ("Beep", "My memory", "my circuits"), "gardener": ("Good day", "My garden", "my roses"),
    "detective": ("Good evening", "The case", "my notebook"), "chef": ("Come in", "My kitchen", "my knives"),
    "ghost": ("Boo", "This old house", "my chains"), "astronaut": ("Hello from above", "The station", "my suit"),
}
_ROLE_LINES = (
    "{site} is {adj} and full of {plural}.",
    "[Every {weekday}|{time_of_day}] I [check|polish|clean|guard] {own}.",
    "Once a {animal} [stole|broke|loved] {own}.",
    "{name} the {job} [is my best friend|owes me {n} {plural}|always laughs at me].",
    "[Nothing makes|Few things make] me as {mood} as {hobby}.",
    "I [dream of|fear|remember] {weather} near the {place}.",
    "I [eat|trade|hide] {food} {time_of_day}.",
)


def _sentences(text: str) -> list[str]:
    return [part if part.endswith(".") else part + "." for part in text.replace("\n", " ").split(". ")]


def _follow_up(rng: random.Random, answer: str) -> tuple[str, str]:
    """A second turn that transforms the first answer."""
    parts = _sentences(answer)
    kind = rng.randrange(5)
    if kind == 0:
        return "Write that as a numbered list.", "\n".join(f"{i}. {part}" for i, part in enumerate(parts, 1))
    if kind == 1:
        return rng.choice(("Shorten it to one sentence.", "Keep only the first sentence.")), parts[0]
    if kind == 2:
        return "Repeat only the last sentence.", parts[-1]
    if kind == 3:
        return "How many sentences did you write?", f"I wrote {NUMBER_WORDS[min(len(parts), 12)]} sentences."
    return "Say the sentences in reverse order.", " ".join(parts[::-1])


def _slots(rng: random.Random) -> dict:
    bound = {"name": sample(rng, "person", 1)[0], "n": rng.randint(2, 9), "food2": sample(rng, "food", 1)[0]}
    fill(rng, "{town:town} {season:season} {month:month}", bound)
    return bound


def _writing(rng: random.Random) -> tuple[list[str], list[str]]:
    if rng.random() < 0.5:
        bound = letter_slots(rng)
        first, purpose = letter_request(rng, bound)
        answer = letter_text(rng, purpose, bound)
        new = sample(rng, "person", 1)[0]
        return [first, f"Sign it with {new} instead."], [answer, answer.rsplit("\n", 1)[0] + "\n" + new]
    bound = _slots(rng)
    first = fill(
        rng, "[Write|Compose] a [short|] travel [post|blog] about a trip to {town} [with {name}|in {month}].", bound
    )
    lines = [_TRAVEL[0], *rng.sample(_TRAVEL[1:], rng.randint(2, 4))]
    answer = " ".join(fill(rng, line, bound) for line in lines)
    second, reply = _follow_up(rng, answer)
    return [first.replace("  ", " "), second], [answer, reply]


def _roleplay(rng: random.Random) -> tuple[list[str], list[str]]:
    role = rng.choice(sorted(_ROLES))
    hello, site, own = _ROLES[role]
    bound = _slots(rng) | {"site": site, "own": own}
    first = fill(
        rng,
        f"[Pretend|Imagine] you are a {role} from {{town}}. [Greet {{name}}|Say hello to {{name}}] and [describe your day|talk about your life].",
        bound,
    )
    lines = rng.sample(_ROLE_LINES, 5)
    answer = " ".join([f"{hello}, {bound['name']}!", *(fill(rng, line, bound) for line in lines[:3])])
    second = rng.choice(("Tell me more.", "Go on.", "What else?", "Stay in your role and continue."))
    return [first, second], [answer, " ".join(fill(rng, line, bound) for line in lines[3:])]


def _reasoning(rng: random.Random) -> tuple[list[str], list[str]]:
    question, worked, name = ordering(rng)
    names = worked.split("\n")[0].split(": ")[1].rstrip(".").split(", ")
    other = names[1] if rng.random() < 0.5 else names[-1] if name == names[0] else names[0]
    place = {0: "first", len(names) - 1: "last"}.get(names.index(other), NUMBER_WORDS[names.index(other) + 1])
    second = f"Where in your list is {other}?"
    reply = (
        f"{other} is {place} in the list." if place in ("first", "last") else f"{other} is number {place} in the list."
    )
    return [question, second], [worked, reply]


def _math(rng: random.Random) -> tuple[list[str], list[str]]:
    question, worked, value = word_problem(rng)
    extra = rng.randint(2, 30)
    second = rng.choice((f"Now add {extra} to your answer.", f"What if there were {extra} more at the end?"))
    return [question, second], [worked, f"{value} + {extra} = {value + extra}.\nAnswer: {value + extra}"]


def _coding(rng: random.Random) -> tuple[list[str], list[str]]:
    example = write_code(rng)
    code = example.answers[0]
    entry = example.check["entry"]
    new = f"{rng.choice(('my', 'new', 'do', 'run'))}_{entry}"
    return [example.turns[0], f"Rename the function to {new}."], [code, code.replace(f"def {entry}(", f"def {new}(")]


def _extraction(rng: random.Random) -> tuple[list[str], list[str]]:
    passage, rows = passage_and_questions(rng, 2)
    return [f"{passage}\n\n{rows[0][0]}", rows[1][0]], [rows[0][1], rows[1][1]]


def _knowledge(field: str):
    def make(rng: random.Random) -> tuple[list[str], list[str]]:
        topic = rng.choice([topic for topic in sorted(TOPICS) if TOPICS[topic][0] == field])
        count, name = rng.randint(2, 4), sample(rng, "person", 1)[0]
        bound = {"name": name}
        first = fill(
            rng,
            f"[I am {{name}}, a {{job}}. |][What should I know about|Teach {{name}} about|Can you explain] {topic}? [Use|Write] {NUMBER_WORDS[count]} sentences.",
            bound,
        )
        answer = explanation(rng, topic, count)
        second, reply = _follow_up(rng, answer)
        if rng.random() < 0.4:
            left = [fact for fact in TOPICS[topic][1:] if fact not in answer]
            if left:
                second, reply = (
                    rng.choice(("Tell me one more fact.", "Add something you did not say yet.")),
                    rng.choice(left),
                )
        return [first, second], [answer, reply]

    return make


CATEGORIES = {
    "writing": _writing, "roleplay": _roleplay, "reasoning": _reasoning, "math": _math, "coding": _coding,
    "extraction": _extraction, "stem": _knowledge("stem"), "humanities": _knowledge("humanities"),
}


def chat(rng: random.Random) -> Example:
    """Two turns of one category."""
    turns, answers = CATEGORIES[rng.choice(sorted(CATEGORIES))](rng)
    return Example("chat", tuple(turns), tuple(answers))


MAKERS = {"chat": chat}
