"""Extraction to JSON, tables, and small ordering puzzles: answers computed from the prompt. Knows nothing about scoring."""

# ruff: noqa: E501  (one kind of record a row reads as a table)
from __future__ import annotations

import json
import random

from specdec.toy.corpus.example import Example, fill, join_and, sample
from specdec.toy.corpus.passages import full_name

_RECORDS = (
    ("name|job|town|age", "{name} is a {job} from {town} who is {age} years old.|The {job} {name}, {age}, lives in {town}.|Meet {name}: {age} years old, {job}, from {town}."),
    ("product|color|price|quantity", "We need {quantity} {color} {product}s at {price} dollars each.|Please send {quantity} of the {product} in {color}; the price is {price} dollars.|The {color} {product} costs {price} dollars, and I want {quantity}."),
    ("event|day|place|guests", "The {event} is on {day} in the {place} with {guests} guests.|On {day} there will be a {event} at the {place}; {guests} guests are coming.|{guests} guests are invited to the {event} at the {place} on {day}."),
    ("animal|name|color|weight", "{name} is a {color} {animal} and weighs {weight} kilos.|Our {animal} {name} is {color}, with a weight of {weight} kilos.|The {color} {animal} called {name} weighs {weight} kilos."),
    ("title|author|year|pages", "{title} by {author} came out in {year} and has {pages} pages.|In {year}, {author} wrote {title}, a book of {pages} pages.|The book {title} has {pages} pages; {author} wrote it in {year}."),
    ("from|to|day|price", "A ticket from {from} to {to} on {day} costs {price} dollars.|On {day} I travel from {from} to {to} for {price} dollars.|The {day} train to {to} leaves from {from} and costs {price} dollars."),
)
_NUMERIC = {"age": (18, 80), "price": (5, 99), "quantity": (2, 40), "guests": (10, 90), "weight": (2, 60),
            "year": (1950, 2020), "pages": (80, 400)}


def _record(rng: random.Random, keys: list[str]) -> dict:
    first, second = sample(rng, "town", 2)
    special = {"name": full_name(rng), "author": full_name(rng), "from": first, "to": second, "town": first}
    special["title"] = fill(rng, "The {adj} {place}").title()
    special["day"] = fill(rng, "{weekday}")
    record = {}
    for key in keys:
        if key in _NUMERIC:
            record[key] = rng.randint(*_NUMERIC[key])
        else:
            record[key] = special.get(key) or sample(rng, key, 1)[0]
    if "animal" in keys:
        record["name"] = record["name"].split()[0]
    return record


def extract(rng: random.Random) -> Example:
    """Sentence(s) to a JSON object with the keys the prompt lists."""
    keys_text, templates = rng.choice(_RECORDS)
    keys = keys_text.split("|")
    record = _record(rng, keys)
    text = fill(rng, rng.choice(templates.split("|")), record)
    wanted = [key for key in keys if rng.random() < 0.8] or keys
    rng.shuffle(wanted)
    opening = rng.choice(("Extract as JSON with the keys {}: ", "Give me JSON with {} from this text: "))
    answer = json.dumps({key: record[key] for key in wanted})
    prompt = opening.format(", ".join(wanted)) + text
    return Example("extract", (prompt,), (answer,), {"kind": "json", "value": answer})


def table(rng: random.Random) -> Example:
    """Sentences to a markdown table, in the order of appearance or sorted."""
    people = sample(rng, "person", rng.randint(3, 5))
    things = sample(rng, "plural", 1)[0]
    counts = rng.sample(range(2, 60), len(people))
    places = sample(rng, "town", len(people))
    if rng.random() < 0.5:
        header, rows = ("Name", things.capitalize()), list(zip(people, counts, strict=True))
        sentences = [rng.choice((f"{n} has {c} {things}.", f"{c} {things} belong to {n}.")) for n, c in rows]
    else:
        header, rows = ("Name", "Town", "Age"), list(zip(people, places, counts, strict=True))
        sentences = [rng.choice((f"{n} from {p} is {c}.", f"{n} is {c} and lives in {p}.")) for n, p, c in rows]
    order = rng.choice(("", "", " sorted by name", f" sorted by {header[-1].lower()}"))
    rows = sorted(rows) if order == " sorted by name" else sorted(rows, key=lambda row: row[-1]) if order else rows
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    prompt = f"{rng.choice(('Make', 'Write', 'Give me'))} a table{order}: " + " ".join(sentences)
    return Example("table", (prompt,), ("\n".join(lines),), {"kind": "exact", "value": "\n".join(lines)})


def ordering(rng: random.Random) -> tuple[str, str, str]:
    """A chain of comparisons; who comes first, second or last. Returns (question, worked answer, name)."""
    more, most, least = rng.choice(
        (("taller", "tallest", "shortest"), ("older", "oldest", "youngest"), ("faster", "fastest", "slowest"),
         ("heavier", "heaviest", "lightest"), ("richer", "richest", "poorest"), ("louder", "loudest", "quietest"))
    )
    names = sample(rng, "person", rng.randint(3, 4))
    clues = [f"{high} is {more} than {low}." for high, low in zip(names, names[1:], strict=False)]
    rng.shuffle(clues)
    wanted = rng.choice((most, least))
    name = names[0] if wanted == most else names[-1]
    worked = f"From {most} to {least}: {', '.join(names)}.\nThe {wanted} is {name}."
    return " ".join([*clues, f"Who is the {wanted}?"]), worked, name


def puzzle(rng: random.Random) -> Example:
    """Ordering people, sorting numbers or words, or finding the odd one out."""
    kind = rng.randrange(4)
    if kind == 0:
        question, worked, name = ordering(rng)
        return Example("puzzle", (question,), (worked,), {"kind": "contains", "value": worked.split("\n")[1]})
    if kind == 1:
        numbers = rng.sample(range(1, 100), rng.randint(4, 7))
        down = rng.random() < 0.5
        direction = "from largest to smallest" if down else "from smallest to largest"
        prompt = f"Sort these numbers {direction}: {', '.join(map(str, numbers))}"
        answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    elif kind == 2:
        words = sample(rng, rng.choice(("animal", "food", "object", "job", "place")), rng.randint(4, 6))
        prompt = rng.choice(("Put these words in alphabetical order: ", "Sort alphabetically: ")) + ", ".join(words)
        answer = ", ".join(sorted(words))
    else:
        groups = {"animal": "animals", "food": "kinds of food", "color": "colors", "job": "jobs", "month": "months"}
        main, other = rng.sample(sorted(groups), 2)
        words, odd = sample(rng, main, 3), sample(rng, other, 1)[0]
        shown = rng.sample([*words, odd], 4)
        prompt = f"Which one does not belong: {', '.join(shown)}?"
        answer = f"{odd[0].upper() + odd[1:]} does not belong, because {join_and(words)} are {groups[main]}."
    return Example("puzzle", (prompt,), (answer,), {"kind": "exact", "value": answer})


MAKERS = {"extract": extract, "table": table, "puzzle": puzzle}
