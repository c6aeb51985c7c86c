"""News-like articles with a three-sentence summary (CNN/DailyMail) or a one-sentence one (X-Sum).

Knows nothing about scoring. A summary is put together from the article's own facts, never from its template alone.
"""

# ruff: noqa: E501  (one fact a row reads as a table)
from __future__ import annotations

import random

from specdec.toy.corpus.example import Example, fill, sample

# Each kind: facts to bind, article sentences (lead, details...), summary sentences, one-line summary.
_KINDS = (
    {
        "facts": "{town:town} {day:weekday} {place:building} {name:person} {family:surname}",
        "lead": "A fire [broke out|started] in the {place} of {town} [late|early] on {day}",
        "lead_tail": ", and {n} people had to leave their homes",
        "details": (
            "Firefighters needed {h} hours to put out the flames.",
            "The cause was [a broken heater|a fallen candle|an old cable|a lightning strike|a kitchen accident], [the police|officials] said.",
            "{name} {family}, who lives nearby, called for help after smelling smoke.",
        ),
        "extra": (
            "[Nobody|No one] was hurt.",
            "Two streets were closed until the morning.",
            "The mayor thanked the crews for their [quick|brave|careful] work.",
            "Repairs may cost {m} thousand dollars.",
            "Neighbors brought [blankets|hot tea|warm soup] to the families.",
        ),
        "summary": (
            "A fire in the {place} of {town} forced {n} people from their homes on {day}.",
            "It took {h} hours to put out.",
            "{name} {family} called for help.",
        ),
        "line": "A fire in the {place} of {town} has forced {n} people to leave their homes, and crews needed {h} hours to put it out.",
    },
    {
        "facts": "{town:town} {day:weekday} {project:project} {name:person} {family:surname}",
        "lead": "The council of {town} [voted|decided] on {day} to build {project}",
        "lead_tail": " for {m} million dollars",
        "details": (
            "Mayor {name} {family} said the plan would [help local families|bring new jobs|make the town safer|attract visitors].",
            "Work is due to begin in {month:month} and will take {h} years.",
            "The vote was {n} to {few}.",
        ),
        "extra": (
            "Some residents [fear|worry about] more traffic and noise.",
            "Shop owners [welcomed|praised|questioned] the decision.",
            "A similar plan failed {h} years ago.",
            "The money will come from [a new tax|the state|a private fund|a bank loan].",
            "Students will be asked for [ideas|drawings|names].",
        ),
        "summary": (
            "The council of {town} will build {project} for {m} million dollars.",
            "Mayor {name} {family} supports the plan.",
            "Work begins in {month} and takes {h} years.",
        ),
        "line": "The town of {town} is to spend {m} million dollars on {project}, with work due to begin in {month}.",
    },
    {
        "facts": "{town:town} {day:weekday} {sport:sport} {name:person} {family:surname} {rival:town}",
        "lead": "{town} beat {rival} {n} to {few} in the {sport} final on {day}",
        "lead_tail": ", its [first|second|third] title in {m} years",
        "details": (
            "{name} {family} was named player of the match.",
            "About {m} hundred fans watched [the game|the final] in {weather}.",
            "Coach {coach:surname} said the team had trained [twice a day|for months|through the winter|without a break].",
        ),
        "extra": (
            "{rival} led at half time but [lost its rhythm|grew tired|made late mistakes].",
            "Fans sang [in the streets|until midnight|all the way home].",
            "The winners receive a [silver|golden|bronze] cup.",
            "The next season starts in {month}.",
            "Tickets were sold out within {h} hours.",
        ),
        "summary": (
            "{town} beat {rival} {n} to {few} in the {sport} final on {day}.",
            "{name} {family} was player of the match.",
            "About {m} hundred fans watched.",
        ),
        "line": "{town} have won the {sport} final against {rival} by {n} to {few}, with {name} {family} as the best player.",
    },
    {
        "facts": "{town:town} {day:weekday} {animal:animal} {name:person} {family:surname} {place:place}",
        "lead": "A {animal} [that escaped|missing] from the zoo of {town} was found on {day}",
        "lead_tail": " in a {place}, {n} miles away",
        "details": (
            "{name} {family}, a {job:job}, saw the animal and called the zoo.",
            "The {animal} had been missing for {h} days.",
            "Keepers used [fresh fruit|a long net|soft music|warm milk] to catch it.",
        ),
        "extra": (
            "It was [hungry|tired|thirsty] but in good health.",
            "Children had put up {m} posters in the town.",
            "The zoo will [repair|replace|check] its fences.",
            "Visitors can see the animal again from {month}.",
            "The zoo offered a free ticket as thanks.",
        ),
        "summary": (
            "A {animal} that escaped from the zoo of {town} was found in a {place}.",
            "It had been missing for {h} days.",
            "{name} {family}, a {job}, called the zoo.",
        ),
        "line": "A missing {animal} has been found {n} miles from the zoo of {town} after {h} days.",
    },
    {
        "facts": "{town:town} {day:weekday} {product:product} {name:person} {family:surname}",
        "lead": "A company in {town} [announced|said] on {day} that it will [hire|take on] {m} workers",
        "lead_tail": " to make a new {product}",
        "details": (
            "Sales rose by {n} percent last year.",
            "Director {name} {family} called it [a big step|a happy day|a fair bet|good news for all].",
            "The first {product} will be sold in {month:month}.",
        ),
        "extra": (
            "Each one will cost {h}0 dollars.",
            "The union asked for [better pay|shorter shifts|safer machines].",
            "The factory is the largest [employer|building|workplace] in the area.",
            "Rivals are planning [cheaper|smaller|lighter] models.",
            "The town hopes for [more visitors|new shops|lower rents].",
        ),
        "summary": (
            "A company in {town} will hire {m} workers to make a new {product}.",
            "Sales rose by {n} percent last year.",
            "The product will be sold in {month}.",
        ),
        "line": "A company in {town} is to hire {m} people to make a new {product} after its sales rose by {n} percent.",
    },
    {
        "facts": "{town:town} {day:weekday} {weather:weather} {name:person} {family:surname}",
        "lead": "{weather} [closed|shut] {n} schools around {town} on {day}",
        "lead_tail": ", and trains were {m} minutes late",
        "details": (
            "About {h} thousand homes were without power.",
            "{name} {family} of the weather office expects [better|calmer|drier|worse] conditions by {later:weekday}.",
            "A bus slid off the road near the {place:place}, but [nobody was hurt|the driver was safe].",
        ),
        "extra": (
            "Drivers were told to stay at home.",
            "Farmers fear for the {crop} harvest.",
            "Shops sold out of [candles|batteries|bread|salt].",
            "Volunteers brought food to older residents.",
            "It was the worst {season} weather in {m} years.",
        ),
        "summary": (
            "{weather} closed {n} schools around {town} on {day}.",
            "About {h} thousand homes lost power.",
            "A bus slid off the road near the {place}.",
        ),
        "line": "{weather} has closed {n} schools and left {h} thousand homes without power around {town}.",
    },
    {
        "facts": "{town:town} {day:weekday} {material:material} {name:person} {family:surname} {place:place}",
        "lead": "Researchers [have found|discovered] a {material} {object:object} under the {place} of {town}",
        "lead_tail": " that is {m} hundred years old",
        "details": (
            "Professor {name} {family} led the team of {n} people.",
            "They dug for {h} months before they saw it.",
            "The {object} will be shown in the museum from {month:month}.",
        ),
        "extra": (
            "It may have belonged to [a king|a merchant|a priest|a sailor].",
            "A local {job} gave the first hint.",
            "Experts from {other:town} will study it.",
            "The team hopes to find [more pieces|a grave|old letters|a hidden room].",
            "Entry to the museum will be free on {day}.",
        ),
        "summary": (
            "Researchers found a {material} {object} under the {place} of {town}.",
            "It is {m} hundred years old.",
            "It will be shown in the museum from {month}.",
        ),
        "line": "A {material} {object} that is {m} hundred years old has been found in {town} by a team led by {name} {family}.",
    },
    {
        "facts": "{town:town} {day:weekday} {object:object} {name:person} {family:surname}",
        "lead": "Police in {town} arrested a {job:job} on {day} for stealing a {material:material} {object}",
        "lead_tail": " worth {m} thousand dollars",
        "details": (
            "The owner, {name} {family}, had reported the theft {h} days earlier.",
            "Officers found the {object} [in a garage|under a bed|behind a wall|in a car|at a market].",
            "A camera had filmed the thief at {n} in the morning.",
        ),
        "extra": (
            "The suspect [denied everything|said nothing|asked for a lawyer|admitted the theft].",
            "The court will hear the case in {month}.",
            "Neighbors were [shocked|surprised|relieved].",
            "Police asked other victims to call.",
            "The owner plans to buy a better lock.",
        ),
        "summary": (
            "Police in {town} arrested a {job} for stealing a {material} {object}.",
            "It belonged to {name} {family}.",
            "A camera had filmed the thief.",
        ),
        "line": "A {job} has been arrested in {town} over the theft of a {material} {object} from {name} {family}.",
    },
)
_PROJECTS = (
    "a new library", "a sports hall", "a bridge", "a public garden", "a bus station", "a swimming pool", "a hospital",
    "a music school", "a market hall", "a bicycle path", "a theater", "a solar park",
)


def _article(rng: random.Random) -> tuple[str, list[str], str]:
    """Article, the three summary sentences, the one-line summary."""
    kind = rng.choice(_KINDS)
    town, rival = sample(rng, "town", 2)
    high = rng.randint(3, 30)
    bound = {"town": town, "rival": rival, "n": high, "few": rng.randint(1, high - 1), "h": rng.randint(2, 9)}
    bound |= {"m": rng.randint(10, 90), "project": rng.choice(_PROJECTS)}
    fill(rng, kind["facts"], bound)
    lead = fill(rng, kind["lead"] + kind["lead_tail"] + ".", bound)
    details = [fill(rng, detail, bound) for detail in kind["details"]]
    extra = [fill(rng, text, bound) for text in rng.sample(kind["extra"], rng.randint(2, 3))]
    body = details + extra
    rng.shuffle(body)
    summary = [fill(rng, text, bound) for text in kind["summary"]]
    return " ".join([lead, *body]), summary, fill(rng, kind["line"], bound)


def news(rng: random.Random) -> Example:
    """Article and a summary of three sentences."""
    article, summary, _ = _article(rng)
    opening = rng.choice(("Summarize: ", "Summarize this article: ", "Write a short summary of this article: "))
    return Example("news", (opening + article,), (" ".join(summary),))


def headline(rng: random.Random) -> Example:
    """Article and a summary of one sentence."""
    article, _, line = _article(rng)
    opening = rng.choice(("Summarize in one sentence: ", "What is this article about, in one sentence? "))
    return Example("headline", (opening + article,), (line,))


MAKERS = {"news": news, "headline": headline}
