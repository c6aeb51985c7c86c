"""Short instructions (after Alpaca): lists, rewriting, classification, explanation, advice. Knows nothing about scoring."""

# ruff: noqa: E501  (one template a row reads as a table)
from __future__ import annotations

import random

from specdec.toy.corpus.example import Example, fill, join_and, sample
from specdec.toy.corpus.topics import TOPICS
from specdec.toy.corpus.words import LISTS, NUMBER_WORDS

_LISTABLE = {
    "animal": "animals", "food": "kinds of food", "job": "jobs", "color": "colors", "hobby": "hobbies",
    "sport": "sports", "material": "materials", "quality": "good qualities", "object": "objects", "event": "events",
}
_OPPOSITES = dict(
    pair.split(":")
    for pair in "hot:cold big:small old:young happy:sad fast:slow early:late full:empty light:dark strong:weak rich:poor "
    "near:far clean:dirty hard:soft high:low loud:quiet wet:dry sharp:blunt long:short brave:afraid open:closed".split()
)
_SWAPS = {"big": "large", "small": "little", "happy": "glad", "fast": "quick", "hard": "firm", "sad": "unhappy",
          "quiet": "silent", "strong": "sturdy", "broken": "damaged", "strange": "odd", "pretty": "lovely"}
_POSITIVE = (
    "I love this {product}, it [works very well|looks great|saves me time].",
    "The {product} is [wonderful|excellent|a joy], and {name} [smiled|agreed].",
    "[Great|Perfect] {product}, I would buy it again.",
)
_NEGATIVE = (
    "I hate this {product}, it [broke at once|looks cheap|wastes my time].",
    "The {product} is [terrible|useless|a mess], and {name} [complained|sent it back].",
    "[Awful|Bad] {product}, I want my money back.",
)
_ADVICE = (
    "[Set|Choose] a [small|clear|realistic] goal for {hobby}.",
    "Ask a {job} or a friend for help.",
    "[Practice|Try it] {time_of_day}, even for {n} minutes.",
    "Keep a notebook about your {hobby}.",
    "Do not worry about {adj} days.",
    "Reward yourself with {food}.",
    "Read about {hobby} [in the library|on {weekday}].",
    "[Be patient|Stay curious|Trust your {quality}].",
    "Join a group that meets near the {place}.",
    "Look back each {weekday} and [write down|note] what went well.",
)


def _list(rng: random.Random, _: dict) -> tuple[str, str]:
    kind, count = rng.choice(sorted(_LISTABLE)), rng.randint(3, 6)
    prompt = f"{rng.choice(('List', 'Name', 'Give me', 'Tell me'))} {NUMBER_WORDS[count]} {_LISTABLE[kind]}"
    if rng.random() < 0.5:
        letter = rng.choice(sorted({word[0] for word in LISTS[kind]}))
        words = sorted(word for word in LISTS[kind] if word[0] != letter)
        chosen = rng.sample(words, count)
        return f"{prompt} that do not start with {letter}.", "\n".join(f"{i}. {w}" for i, w in enumerate(chosen, 1))
    skipped = sample(rng, kind, 2)
    chosen = rng.sample([word for word in LISTS[kind] if word not in skipped], count)
    return f"{prompt} other than {join_and(skipped)}.", "\n".join(f"- {word}" for word in chosen)


def _opposite(rng: random.Random, _: dict) -> tuple[str, str]:
    words = rng.sample(sorted(_OPPOSITES), rng.randint(2, 4))
    form = rng.choice(("Give the opposites of {}.", "What are the opposites of {}?"))
    return form.format(join_and(words)), "\n".join(f"{word} - {_OPPOSITES[word]}" for word in words)


def _rewrite(rng: random.Random, bound: dict) -> tuple[str, str]:
    sentence = fill(rng, "{name} [carried|found|sold|painted|wanted|dropped] the {adj} {object} {time_of_day}.", bound)
    kind = rng.randrange(4)
    if kind == 0:
        return f"Rewrite in capital letters: {sentence}", sentence.upper()
    if kind == 1:
        other = sample(rng, "person", 1)[0]
        return f"Replace {bound['name']} with {other}: {sentence}", sentence.replace(bound["name"], other)
    if kind == 2:
        words = sentence[:-1].split()
        return f"Turn this into a list of words: {sentence}", ", ".join(words)
    word = rng.choice(sorted(_SWAPS))
    text = fill(rng, f"{{name}} said that the {word} {{object}} of {{other}} was in the {{place}}.", bound)
    return f"Use a synonym for '{word}': {text}", text.replace(f" {word} ", f" {_SWAPS[word]} ")


def _classify(rng: random.Random, bound: dict) -> tuple[str, str]:
    if rng.random() < 0.5:
        positive = rng.random() < 0.5
        review = fill(rng, rng.choice(_POSITIVE if positive else _NEGATIVE), bound)
        label = "positive" if positive else "negative"
        return f"Is this review positive or negative? {review}", f"The review is {label}."
    kinds = {"animal": "animal", "food": "food", "job": "job", "color": "color"}
    pairs = [(sample(rng, kind, 1)[0], kinds[kind]) for kind in rng.choices(sorted(kinds), k=3)]
    asked = ", ".join(word for word, _ in pairs)
    return f"Classify each word as animal, food, job or color: {asked}", "\n".join(f"{w}: {k}" for w, k in pairs)


def explanation(rng: random.Random, topic: str, count: int) -> str:
    """The definition and `count` - 1 further facts in their order."""
    facts = TOPICS[topic][1:]
    kept = sorted(rng.sample(range(1, len(facts)), count - 1))
    return " ".join([facts[0], *(facts[index] for index in kept)])


def _explain(rng: random.Random, bound: dict) -> tuple[str, str]:
    topic, count = rng.choice(sorted(TOPICS)), rng.randint(2, 4)
    words = NUMBER_WORDS[count]
    prompt = fill(
        rng, f"[Explain|Describe|Tell {{name}} about|Write about] {topic} in {words} sentences[ for a {{job}}|].", bound
    )
    return prompt, explanation(rng, topic, count)


def _advise(rng: random.Random, bound: dict) -> tuple[str, str]:
    count = rng.randint(3, 4)
    prompt = fill(rng, f"[Give|Offer] {{name}}, a {{job}}, {NUMBER_WORDS[count]} tips for {{hobby}}.", bound)
    tips = [fill(rng, text, bound) for text in rng.sample(_ADVICE, count)]
    return prompt, "\n".join(f"{number}. {tip}" for number, tip in enumerate(tips, 1))


def _sentence_with(rng: random.Random, bound: dict) -> tuple[str, str]:
    first, second = sample(rng, "object", 2)
    form = (
        "[The {job}|{name}|A {adj} {animal}] [put|hid|saw|left|kept] the {a} [near|behind|under] the {b} {time_of_day}."
    )
    prompt = rng.choice(("Write a sentence with the words ", "Make a sentence that uses ")) + f"{first} and {second}"
    return fill(rng, prompt + "[.| about a {job}.| about {name}.]", bound), fill(
        rng, form, bound | {"a": first, "b": second}
    )


def _compare(rng: random.Random, bound: dict) -> tuple[str, str]:
    first, second = sample(rng, rng.choice(("animal", "object", "hobby", "job")), 2)
    prompt = fill(rng, f"[Compare|What is the difference between] {first} and {second}[ for {{name}}|][.|?]", bound)
    texts = (
        f"[Both|{first} and {second}] can make people {{mood}}.",
        f"{first} is [more {{word}}|better known|the older idea], while {second} feels {{adj}}.",
        f"Many would choose {second} [in {{season}}|{{time_of_day}}|when they feel {{mood}}].",
        f"{first} [goes well with|reminds us of] {{food}}, {second} with {{material}}.",
    )
    return prompt, " ".join(fill(rng, texts[i], bound | {"word": "common"}) for i in sorted(rng.sample(range(4), 3)))


_DESCRIPTIONS = (
    "The {what} [stands|lies|waits] near a {adj} {place} and is made of [stone|wood|brick|iron|glass|marble].",
    "Its [door|roof|floor|wall] is {color} and feels {adj}.",
    "{time_of_day}, you can [hear|see|meet] a {animal} or a {job2:job} there.",
    "It [smells of|reminds people of] {food} and {season}.",
    "[Visitors|Children|Neighbors] [come|stay] for the {hobby2:hobby} and leave {mood}.",
    "In {month}, {weather} can make it look {adj}.",
    "{name} [once lost|keeps|found] a {material} {object} [inside|behind it|on the stairs].",
    "[Some|Many|Few] [say|think|know] that a {job} [built|painted|bought] it [{n} years ago|for a {animal}].",
)


def _describe(rng: random.Random, bound: dict) -> tuple[str, str]:
    bound = bound | {"what": sample(rng, "building", 1)[0]}
    count = rng.randint(3, 5)
    prompt = fill(
        rng, f"Describe [a|an imaginary|the] {{adj}} {{what}} in {{town}} in {NUMBER_WORDS[count]} sentences.", bound
    )
    kept = [_DESCRIPTIONS[0], *rng.sample(_DESCRIPTIONS[1:], count - 1)]
    return prompt, " ".join(fill(rng, text, bound) for text in kept)


_TASKS = (
    _list, _opposite, _rewrite, _classify, _explain, _advise, _advise, _sentence_with, _compare, _describe, _describe
)


def instruct(rng: random.Random) -> Example:
    """One instruction and its answer."""
    name, other = sample(rng, "person", 2)
    bound = {"name": name, "other": other, "n": rng.randint(5, 30)}
    fill(rng, "{hobby:hobby} {product:product} {job:job}", bound)
    prompt, answer = rng.choice(_TASKS)(rng, bound)
    return Example("instruct", (prompt,), (answer,))


MAKERS = {"instruct": instruct}
