"""Word problems with worked steps ending in `Answer: N` (after GSM8K). Knows nothing about how answers are checked.

Every step is one operation written `a + b = c`; numbers stay between 0 and 999, divisions are exact.
"""

from __future__ import annotations

import random

from specdec.toy.corpus.example import Example, fill, sample

# verb phrase, its operation, and how the worked step introduces it
_GAINS = (
    ("buys {k} more {things}", "buying"),
    ("finds {k} {things}", "finding some"),
    ("gets {k} {things} from {other}", "the gift"),
    ("wins {k} {things} in a game", "the game"),
    ("receives {k} {things} as a gift", "the gift"),
    ("collects {k} more {things}", "collecting"),
)
_LOSSES = (
    ("gives {k} {things} to {other}", "giving some away"),
    ("loses {k} {things}", "losing some"),
    ("sells {k} {things}", "selling"),
    ("throws away {k} broken {things}", "throwing some away"),
    ("uses {k} of the {things}", "using some"),
    ("leaves {k} {things} at school", "leaving some"),
)
_TIMES = (("doubles the number of {things}", 2), ("triples the number of {things}", 3))
_WHEN = ("Then", "After that", "Later", "Next", "The next day", "In the evening")


def _step(a: int, operation: str, b: int) -> tuple[str, int]:
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
    return f"{a} {operation} {b} = {value}", value


def _holdings(rng: random.Random) -> tuple[str, list[str], int]:
    """One person's collection changes one to four times."""
    bound = {"k": 0}
    fill(rng, "{name:person} {other:person} {things:plural}", bound)
    value = rng.randint(5, 60)
    story = [fill(rng, f"{{name}} [has|starts with|owns] {value} {{things}}.", bound)]
    steps = []
    for index in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.12 and value <= 60:
            (phrase, k), operation, reason = rng.choice(_TIMES), "*", "that"
        elif kind < 0.55 or value < 6:
            (phrase, reason), operation, k = rng.choice(_GAINS), "+", rng.randint(2, 40)
        else:
            (phrase, reason), operation, k = rng.choice(_LOSSES), "-", rng.randint(1, min(value - 1, 40))
        bound["k"] = k
        when = "" if index == 0 else rng.choice(_WHEN) + " "
        story.append(fill(rng, f"{when}{{name}} {phrase}.", bound))
        text, value = _step(value, operation, k)
        steps.append(f"After {reason}: {text}.")
    story.append(fill(rng, "How many {things} does {name} have [now|in the end|left at the end]?", bound))
    return " ".join(story), steps, value


def _shopping(rng: random.Random) -> tuple[str, list[str], int]:
    """Quantity times price, perhaps a second item, perhaps change from a note."""
    bound = {}
    fill(rng, "{name:person} {first:plural}", bound)
    count, price = rng.randint(2, 12), rng.randint(2, 9)
    story = [fill(rng, f"{{name}} buys {count} {{first}} [at|for] {price} dollars each.", bound)]
    text, total = _step(count, "*", price)
    steps = [f"The {bound['first']} cost {text} dollars."]
    if rng.random() < 0.5:
        extra = rng.randint(3, 40)
        story.append(
            fill(rng, f"[{{name}} also pays|Delivery costs|A bag costs] {extra} dollars[ more| extra|].", bound)
        )
        story[-1] = story[-1].replace("pays", "spends").replace("  ", " ")
        text, total = _step(total, "+", extra)
        steps.append(f"In total that is {text} dollars.")
    if rng.random() < 0.5:
        money = rng.choice([note for note in (50, 100, 150, 200) if note > total])
        story.append(fill(rng, f"{{name}} [pays with|hands over|has] {money} dollars. How much money is left?", bound))
        text, total = _step(money, "-", total)
        steps.append(f"The money left is {text} dollars.")
    else:
        story.append(fill(rng, "How much does {name} [pay|spend] in total?", bound))
    return " ".join(story), steps, total


def _sharing(rng: random.Random) -> tuple[str, list[str], int]:
    """An exact division, perhaps with additions before and a subtraction after."""
    bound = {}
    fill(rng, "{name:person} {things:plural}", bound)
    people, each = rng.randint(2, 9), rng.randint(3, 12)
    total = people * each
    steps = []
    if rng.random() < 0.6 and total > 10:
        first = rng.randint(2, total - 2)
        story = [f"{bound['name']} has {first} red and {total - first} blue {bound['things']}."]
        steps.append(f"Altogether there are {_step(first, '+', total - first)[0]} {bound['things']}.")
    else:
        story = [f"{bound['name']} has {total} {bound['things']}."]
    group = rng.choice(("friends", "boxes", "bags", "children", "teams", "tables", "rows"))
    story.append(fill(rng, f"[They are shared equally|{{name}} divides them equally] among {people} {group}.", bound))
    text, value = _step(total, "/", people)
    one = {"friends": "friend", "boxes": "box", "bags": "bag", "children": "child"}.get(group, group[:-1])
    steps.append(f"Each {one} gets {text} {bound['things']}.")
    if rng.random() < 0.5 and value > 2:
        lost = rng.randint(1, value - 1)
        story.append(f"Then {lost} {bound['things']} are taken from one {one}. How many stay with that {one}?")
        text, value = _step(value, "-", lost)
        steps.append(f"After that there are {text} {bound['things']}.")
    else:
        story.append(f"How many {bound['things']} does each {one} get?")
    return " ".join(story), steps, value


def _comparison(rng: random.Random) -> tuple[str, list[str], int]:
    """Two or three people, linked by more/fewer/times; the question is a total or one of them."""
    first, second, third = sample(rng, "person", 3)
    things = fill(rng, "{plural}").lower()
    base = rng.randint(6, 40)
    story, steps = [f"{first} has {base} {things}."], []
    kind = rng.choice(("more", "fewer", "times"))
    amount = rng.randint(2, 4) if kind == "times" else rng.randint(2, base - 2)
    if kind == "times":
        story.append(f"{second} has {amount} times as many {things} as {first}.")
        text, other = _step(base, "*", amount)
    else:
        story.append(f"{second} has {amount} {kind} {things} than {first}.")
        text, other = _step(base, "+" if kind == "more" else "-", amount)
    steps.append(f"{second} has {text} {things}.")
    total_people, total = [base, other], other
    if rng.random() < 0.35:
        extra = rng.randint(1, 30)
        story.append(f"{third} has {extra} more {things} than {second}.")
        text, total = _step(other, "+", extra)
        steps.append(f"{third} has {text} {things}.")
        total_people.append(total)
    if rng.random() < 0.6:
        story.append(rng.choice(("How many do they have together?", "How many are there in total?")))
        total = total_people[0]
        for value in total_people[1:]:
            text, total = _step(total, "+", value)
            steps.append(f"Together: {text}.")
    else:
        story.append(f"How many {things} does {third if len(total_people) == 3 else second} have?")
    return " ".join(story), steps, total


def _rate(rng: random.Random) -> tuple[str, list[str], int]:
    """So many per day, for so many days, plus or minus something."""
    bound = {}
    fill(rng, "{name:person} {things:plural}", bound)
    per, days = rng.randint(3, 12), rng.randint(2, 9)
    unit, units = rng.choice(
        (("day", "days"), ("hour", "hours"), ("week", "weeks"), ("bag", "bags"), ("trip", "trips"))
    )
    verb = rng.choice(("makes", "paints", "packs", "sorts", "carries", "checks"))
    story = [f"{bound['name']} {verb} {per} {bound['things']} per {unit} for {days} {units}."]
    text, value = _step(per, "*", days)
    steps = [f"In {days} {units}: {text} {bound['things']}."]
    if rng.random() < 0.7:
        change = rng.randint(1, value - 1)
        text, value = _step(value, "-", change) if rng.random() < 0.6 else _step(value, "+", change)
        if " - " in text:
            story.append(
                fill(rng, f"[{change} of them break|{change} of them are sold|{change} of them get lost].", bound)
            )
        else:
            story.append(fill(rng, f"[{change} more were there before|A helper adds {change} more].", bound))
        steps.append(f"With the change: {text} {bound['things']}.")
    story.append(fill(rng, "How many {things} are there [now|in the end]?", bound))
    return " ".join(story), steps, value


_KINDS = (_holdings, _shopping, _sharing, _comparison, _rate)


def word_problem(rng: random.Random) -> tuple[str, str, int]:
    """Question, worked answer, value."""
    question, steps, value = rng.choice(_KINDS)(rng)
    return question, "\n".join([*steps, f"Answer: {value}"]), value


def maths(rng: random.Random) -> Example:
    """One problem, sometimes with an instruction before or after it."""
    question, answer, value = word_problem(rng)
    before, after = rng.choice((("", ""), ("", ""), ("Solve step by step: ", ""), ("", " Show the steps.")))
    return Example("maths", (before + question + after,), (answer,), {"kind": "number", "value": str(value)})


MAKERS = {"maths": maths}
