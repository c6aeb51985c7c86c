"""Short questions over an invented passage (in place of Natural Questions). Knows nothing about scoring."""

# ruff: noqa: E501  (one fact a row reads as a table)
from __future__ import annotations

import random

from specdec.toy.corpus.example import Example, fill, sample

# Each row: passage sentences with the fact's slot, and questions with the sentence that answers them.
_PERSON = (
    ("{who} was born in {town} in {year}.", "year", "When was {who} born?|In which year was {who} born?", "{who} was born in {year}."),
    ("{who} was born in {town} in {year}.", "town", "Where was {who} born?|In which town was {who} born?", "{who} was born in {town}."),
    ("[The family|Their family] lived near a {place}.", "place", "What did the family of {who} live near?", "The family lived near a {place}."),
    ("{who} [worked as|became] a {job}.", "job", "What was the job of {who}?|What did {who} do for a living?", "{who} was a {job}."),
    ("In {later}, {who} won a prize for {hobby}.", "hobby", "What did {who} win a prize for?", "{who} won a prize for {hobby}."),
    ("In {later}, {who} won a prize for {hobby}.", "later", "When did {who} win a prize?", "{who} won a prize in {later}."),
    ("{who} had {n} children.", "n", "How many children did {who} have?", "{who} had {n} children."),
    ("[Friends|Neighbors] remember {who} for great {quality}.", "quality", "What is {who} remembered for?", "{who} is remembered for great {quality}."),
)
_TOWN = (
    ("{town} lies on the river {river}.", "river", "Which river does {town} lie on?|What river runs through {town}?", "{town} lies on the river {river}."),
    ("It was founded in {year} by a {job}.", "year", "When was {town} founded?|In which year was {town} founded?", "{town} was founded in {year}."),
    ("It was founded in {year} by a {job}.", "job", "Who founded {town}?", "{town} was founded by a {job}."),
    ("About {m} thousand people live there.", "m", "How many people live in {town}?", "About {m} thousand people live in {town}."),
    ("The town is known for its {crop}.", "crop", "What is {town} known for?", "{town} is known for its {crop}."),
    ("Every {month} there is a {sport} festival.", "month", "When is the festival in {town}?", "The festival in {town} is in {month}."),
    ("Every {month} there is a {sport} festival.", "sport", "What kind of festival does {town} have?", "{town} has a {sport} festival."),
    ("Its oldest building is a {place} made of {material}.", "material", "What is the oldest building in {town} made of?", "It is made of {material}."),
    ("Its oldest building is a {place} made of {material}.", "place", "What is the oldest building in {town}?", "The oldest building in {town} is a {place}."),
)
_BRIDGE = (
    ("The {river} bridge opened in {year}.", "year", "When did the {river} bridge open?|In which year was the {river} bridge opened?", "The {river} bridge opened in {year}."),
    ("It was designed by {who}.", "who", "Who designed the {river} bridge?", "The {river} bridge was designed by {who}."),
    ("It is built of {material} and is {m} meters long.", "material", "What is the {river} bridge built of?", "The {river} bridge is built of {material}."),
    ("It is built of {material} and is {m} meters long.", "m", "How long is the {river} bridge?", "The {river} bridge is {m} meters long."),
    ("It took {n} years to build.", "n", "How long did it take to build the {river} bridge?", "It took {n} years to build the {river} bridge."),
    ("It joins {town} and {other}.", "town", "Which towns does the {river} bridge join?", "The {river} bridge joins {town} and {other}."),
    ("Since {later} it has been painted {color}.", "color", "What color is the {river} bridge?", "The {river} bridge is {color}."),
)
_SHOW = (
    ("The film {film} was made in {year}.", "year", "When was the film {film} made?|When did {film} come out?", "{film} was made in {year}."),
    ("It was directed by {who}.", "who", "Who directed {film}?|Who is the director of {film}?", "{film} was directed by {who}."),
    ("It tells the story of a {job} and a {animal}.", "job", "What is {film} about?", "{film} is about a {job} and a {animal}."),
    ("The main part was played by {actor}.", "actor", "Who played the main part in {film}?|Who is the star of {film}?", "{actor} played the main part in {film}."),
    ("It was filmed in {town} in the {season}.", "town", "Where was {film} filmed?", "{film} was filmed in {town}."),
    ("It was filmed in {town} in the {season}.", "season", "In which season was {film} filmed?", "{film} was filmed in the {season}."),
    ("The music was written by {composer}.", "composer", "Who wrote the music for {film}?", "The music for {film} was written by {composer}."),
    ("It won {n} prizes.", "n", "How many prizes did {film} win?", "{film} won {n} prizes."),
)
_TOPICS = (_PERSON, _TOWN, _BRIDGE, _SHOW)
_RIVERS = "Ara Belt Cove Drin Esk Fenn Gale Hume Isar Jole Kell Lune Mere Nidd Orme Pell Rill Sule Tarn Usk".split()


def full_name(rng: random.Random) -> str:
    """First name and surname."""
    return fill(rng, "{person} {surname}")


def facts(rng: random.Random) -> dict:
    """One consistent set of facts for any of the topics."""
    year = rng.randint(1802, 1960)
    town, other = sample(rng, "town", 2)
    who, actor, composer = (full_name(rng) for _ in range(3))
    film = fill(rng, "The {adj} {object}|The {color} {place}|The {job} and the {animal}".split("|")[rng.randrange(3)])
    film = " ".join(word if word in ("and", "the") else word.capitalize() for word in film.split())
    bound = {
        "year": year,
        "later": year + rng.randint(20, 50),
        "town": town,
        "other": other,
        "who": who,
        "actor": actor,
    }
    bound |= {"composer": composer, "film": film, "n": rng.randint(2, 9), "m": rng.randint(11, 99)}
    bound |= {
        "river": rng.choice(_RIVERS),
        "material": rng.choice(("stone", "wood", "brick", "steel", "iron", "marble")),
    }
    slots = "{job:job} {hobby:hobby} {quality:quality} {place:building} {crop:crop} {month:month}"
    fill(rng, slots + " {sport:sport} {color:color} {season:season} {animal:animal}", bound)
    return bound


def passage_and_questions(rng: random.Random, questions: int) -> tuple[str, list[tuple[str, str, str]]]:
    """A passage and, for each question, (question, answer, the fact asked for).

    The answer goes on to quote the passage's next sentence (its previous one at the end), so that it depends on the text
    without repeating itself.
    """
    topic, bound = rng.choice(_TOPICS), facts(rng)
    sentences = list(dict.fromkeys(row[0] for row in topic))
    kept = {sentences[0], *rng.sample(sentences[1:], min(len(sentences) - 1, rng.randint(3, 5)))}
    written = {text: fill(rng, text, bound) for text in sentences if text in kept}
    rows = rng.sample([row for row in topic if row[0] in kept], questions)
    order, asked = list(written), []
    for source, key, questions_text, answer in rows:
        question = fill(rng, rng.choice(questions_text.split("|")), bound)
        position = order.index(source)
        neighbor = written[order[position + 1] if position + 1 < len(order) else order[position - 1]]
        asked.append((question, f'{fill(rng, answer, bound)} The text also says: "{neighbor}"', str(bound[key])))
    return " ".join(written.values()), asked


def passage_qa(rng: random.Random) -> Example:
    """Passage, question, one-sentence answer; checked by the fact it must contain."""
    passage, [(question, answer, value)] = passage_and_questions(rng, 1)
    prompt = rng.choice((f"{passage}\n\n{question}", f"Read the text and answer. {passage} {question}"))
    return Example("passage_qa", (prompt,), (answer,), {"kind": "contains", "value": value})


MAKERS = {"passage_qa": passage_qa}
