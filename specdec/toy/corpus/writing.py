"""Stories, letters, scripts of two speakers and how-to steps: the open-ended families. Knows nothing about scoring."""

# ruff: noqa: E501  (one template a row reads as a table)
from __future__ import annotations

import random

from specdec.toy.corpus.example import Example, fill, join_and, sample, several
from specdec.toy.corpus.topics import STEPS

_OPENINGS = (
    "[On a|One] {weather_word} [morning|evening|day], {name} the {hero} left the {place}.",
    "[Long ago|Once], a {adj} {hero} named {name} lived near a {place}.",
    "{name} was a {adj} {hero} who loved {hobby}.",
    "In the {adj} {place2:place} of {town}, {name} the {hero} was [looking for|dreaming of|guarding] a {thing}.",
    "Nobody in {town} knew that {name}, the {hero}, [owned|had hidden|had lost] a {adj} {thing}.",
)
_MIDDLES = (
    "{adverb}, {name} [opened|touched|lifted|followed] the {object}.",
    "A {animal} [appeared|waited|called|sang] [behind|beside|under|above] the {adj} {place}.",
    '"[Where is|Who took|Give me|I need] the {object}?" [asked|whispered|cried] {other}.',
    "{other}, a {adj} {job}, [offered|showed|sold|promised] {name} some {food}.",
    "The {color} {object} [began to glow|fell to the ground|was gone|felt {adj}].",
    "{name} felt {mood} and [walked|ran|climbed|crept] to the {place}.",
    "There was {weather} {time_of_day}, and the {place} looked {adj}.",
    "It [smelled of|tasted like|reminded {name} of] {food} and {material}.",
    "Together they [crossed|searched|left|cleaned] the {place} {adverb}.",
    "{other} [laughed|nodded|sighed|smiled] and [pointed at|hid|found|broke] a {object}.",
    "Under the {object} lay a {adj} {material} {object}.",
    "{name} [remembered|heard|imagined] [an old song|a warning|a promise|a {adj} voice].",
    "[For {n} days|All night|Until {weekday}] they [talked about|waited for|worked on] {hobby}.",
)
_ENDINGS = (
    "In the end, {name} [gave|returned|sold|showed] the {thing} to {other}.",
    "From that day on, the {hero} was never {mood} again.",
    "[At last|Finally], {name} [came|went] home, {mood} and {mood2}.",
    "And the {thing} [is still there|was never found|belongs to everyone now].",
    "{name} had learned that {quality} is worth more than {thing_plural}.",
)


def _story_slots(rng: random.Random) -> dict:
    name, other = sample(rng, "person", 2)
    first, second = sample(rng, "mood", 2)
    bound = {"name": name, "other": other, "thing": fill(rng, "{object}").lower(), "n": rng.randint(2, 9)}
    bound |= {"hero": sample(rng, rng.choice(("animal", "job")), 1)[0], "mood2": second, "thing_plural": "gold"}
    bound["weather_word"] = rng.choice(("rainy", "windy", "foggy", "sunny", "snowy", "quiet", "stormy"))
    fill(rng, "{town:town}", bound)
    return bound


def story_text(rng: random.Random, bound: dict, middles: int) -> str:
    """Opening, `middles` different sentences and an ending about the bound hero and thing."""
    start = fill(rng, rng.choice(_OPENINGS), bound)
    return " ".join([start, *several(rng, _MIDDLES, middles, bound), fill(rng, rng.choice(_ENDINGS), bound)])


def story(rng: random.Random) -> Example:
    """A short tale about a hero, a name and a thing named in the prompt."""
    bound = _story_slots(rng)
    request = rng.choice(
        (
            "[Write|Tell me] a [short|little|] story about a {hero} named {name} and a {thing}.",
            "[Write|Invent] a [short|] tale in which {name} the {hero} [finds|loses] a {thing}.",
            "[I want|Please write] a story with {name}, {other}, a {hero} and a {thing}.",
        )
    )
    prompt = fill(rng, request, bound).replace("  ", " ")
    return Example("story", (prompt,), (story_text(rng, bound, rng.randint(3, 6)),))


_PURPOSES = {
    "invite": ("invite {other} to a {event}", ("I would like to invite you to [our|a|the] {event} [on {weekday}|in {month}].", "It [takes place|will be] in the {place}.", "[There will be|We will have] {food} and {hobby}.", "Please [let me know|tell me] by {weekday} if you can come.", "[Bring|Feel free to bring] a friend or some {food}.")),
    "thank": ("thank {other} for a {thing}", ("Thank you [so much|very much|] for the {adj} {thing}.", "It [looks|is] {adj} and I use it {time_of_day}.", "Everybody here is {mood} about it.", "It reminds me of {feeling_word}.", "I hope to [return the favor|see you soon|visit you in {month}].")),
    "apologize": ("apologize to {other} for missing the {event}", ("I am sorry that I missed the {event}.", "[My train was late|I was ill|I forgot the date|There was {weather}].", "I know that you were {mood}.", "Next time I will [call you|be early|leave {time_of_day}].", "Can I [make up for it|invite you] with some {food}?")),
    "complain": ("complain to {other} about a broken {product}", ("I bought a {product} [from you|in your shop] on {weekday}.", "After {n} days it [stopped working|fell apart|turned {color}|made a {adj} noise].", "I [ask for|would like] [a new one|my money back|a repair].", "You can reach me {time_of_day}.", "I have been a {mood} customer until now.")),
    "ask": ("ask {other} for help with {hobby}", ("I [want|would like] to learn more about {hobby}.", "You are the most {quality_adj} person I know.", "Could we meet on {weekday} [in|near] the {place}?", "I can [bring|pay for] the {food}.", "It would take [an hour|{n} hours|a morning].")),
    "apply": ("apply to {other} for a job as a {job}", ("I [would like to apply|am applying] for the job as a {job}.", "I have {n} years of experience in {hobby}.", "People praise my {quality} and my {quality2}.", "I could start in {month}.", "I [would be|am] happy to come to the {place} for an interview.")),
}


def letter_text(rng: random.Random, purpose: str, bound: dict) -> str:
    """Greeting, three or four sentences for the purpose, closing and signature."""
    _, sentences = _PURPOSES[purpose]
    kept = [sentences[0], *(text for text in sentences[1:] if rng.random() < 0.65)]
    body = " ".join(fill(rng, text, bound).replace("  ", " ") for text in kept)
    opening = fill(rng, "[Dear {other}|Hello {other}|Hi {other}],", bound)
    close = fill(rng, "[Best wishes|Kind regards|Yours|See you soon|With thanks],\n{name}", bound)
    return f"{opening}\n{body}\n{close}"


def letter_slots(rng: random.Random) -> dict:
    """Names and things that a letter keeps fixed."""
    bound = _story_slots(rng)
    first, second = sample(rng, "quality", 2)
    bound |= {
        "quality": first,
        "quality2": second,
        "feeling_word": rng.choice(("home", "summer", "my childhood", "the sea")),
    }
    bound["quality_adj"] = rng.choice(("patient", "creative", "skilled", "honest", "helpful"))
    fill(rng, "{event:event} {product:product} {hobby:hobby} {job:job}", bound)
    return bound


def letter_request(rng: random.Random, bound: dict) -> tuple[str, str]:
    """A request for a letter, and its purpose."""
    purpose = rng.choice(sorted(_PURPOSES))
    kind = rng.choice(("letter", "email", "short note"))
    verb = rng.choice(("Write", "Draft", "Compose"))
    return fill(rng, f"{verb} a {kind} from {{name}} to {_PURPOSES[purpose][0]}.", bound), purpose


def letter(rng: random.Random) -> Example:
    """A letter with a purpose, a sender and a receiver."""
    bound = letter_slots(rng)
    prompt, purpose = letter_request(rng, bound)
    return Example("letter", (prompt,), (letter_text(rng, purpose, bound),))


_LINES = (
    "[Did you see|Have you heard about|Do you like] the {adj} {object}?",
    "I [bought|lost|found|broke] my {object} {time_of_day}.",
    "[No|Yes|Well], I was [too|very|a bit] {mood} to [notice|care|ask].",
    "[Really|Oh|Hmm]? {other2:person} told me about the {event}.",
    "Let us [meet|talk|eat] [in|near] the {place} on {weekday}.",
    "I [prefer|would rather have|love|hate] {food} and {food2}.",
    "[Maybe|Perhaps] a {job} could [help|repair it|explain it].",
    "[Because of|After] {weather}, the {place} is closed.",
    "{hobby} makes me {mood}.",
    "[What|How much] did the {product} cost?",
    "It was {n} dollars, [far too much|a fair price|not bad].",
    "My {animal} [hid|ate|carried off] the {object}.",
    "That sounds {adj}. [Tell me more|Go on|I cannot believe it].",
)


def dialogue(rng: random.Random) -> Example:
    """A scripted talk between two named people about a thing."""
    bound = _story_slots(rng)
    first, second = bound["name"], bound["other"]
    bound["food2"] = "tea"
    prompt = fill(
        rng, "[Write a conversation|Write a dialogue|Make up a talk] between {name} and {other} about a {thing}.", bound
    )
    lines = several(rng, _LINES, rng.randint(3, 5), bound)
    lines.insert(
        0,
        fill(
            rng,
            "[Where is [the|my|your] {thing}?|Look at [the|my|your] {thing}!|What do you think of [the|my|your] {thing}?|I need [the|your] {thing}.]",
            bound,
        ),
    )
    lines.append(
        fill(
            rng,
            "[Goodbye|See you|Take care], [my friend|{second}|and good luck].",
            bound | {"second": second if len(lines) % 2 == 0 else first},
        )
    )
    text = "\n".join(f"{(first, second)[index % 2]}: {line}" for index, line in enumerate(lines))
    return Example("dialogue", (prompt,), (text,))


def howto(rng: random.Random) -> Example:
    """Numbered steps, all of them or the first few; sometimes what is needed or a warning first."""
    goal = rng.choice(sorted(STEPS))
    steps = STEPS[goal]
    count = rng.randint(3, len(steps))
    name, place = sample(rng, "person", 1)[0], sample(rng, "place", 1)[0]
    who = rng.choice((f"My friend {name} wants", "I want", f"{name} from the {place} wants"))
    prompt = f"{who} to {goal}. " + rng.choice(
        (f"Give {count} steps.", f"List the first {count} steps.", f"How? Use {count} steps.")
    )
    opening = rng.choice((f"Here is how to {goal}:", f"To {goal}, follow these steps:"))
    answer = "\n".join([opening, *(f"{number}. {step}" for number, step in enumerate(steps[:count], 1))])
    if rng.random() < 0.5:
        items = sample(rng, "object", 2)
        prompt += f" I have a {items[0]} and a {items[1]}."
        answer += fill(rng, f"\n[You may use|Keep|Use] your {join_and(items)} [as well|nearby|if it helps].")
    return Example("howto", (prompt,), (answer,))


MAKERS = {"story": story, "letter": letter, "dialogue": dialogue, "howto": howto}
