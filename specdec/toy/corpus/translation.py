"""Translation into Velan, a small invented language (in place of WMT14). Knows nothing about checking.

Velan: verb last (subject object verb); adjectives follow their noun; plural `-i`, object `-en` after it; `lo` is the
definite and `un` the indefinite article; verbs take `-a` now, `-ta` in the past, `-ra` in the future; `ne` before the
verb negates; place phrases stand before the verb with their preposition behind the noun.
"""

from __future__ import annotations

import functools
import random

from specdec.toy.corpus.example import Example

_NOUNS = (
    "man woman child farmer sailor teacher doctor king queen friend dog cat horse bird fish wolf house tree river "
    "stone book song bread apple boat door garden road table lamp mountain star letter knife bridge field city "
    "market flower"
).split()
_PLACES = "river house garden road mountain bridge field city market tree boat table".split()
_PERSONS = "man woman child farmer sailor teacher doctor king queen friend dog cat horse wolf bird".split()
_PLURALS = {"man": "men", "woman": "women", "child": "children", "fish": "fishes", "wolf": "wolves", "knife": "knives",
            "city": "cities", "bread": "breads"}
_ADJECTIVES = "old young small big red green white dark good strong happy tired clever quiet warm cold long new".split()
_VERBS = (  # base, third person, past
    ("see", "sees", "saw"), ("love", "loves", "loved"), ("find", "finds", "found"), ("carry", "carries", "carried"),
    ("bring", "brings", "brought"), ("want", "wants", "wanted"), ("hear", "hears", "heard"), ("buy", "buys", "bought"),
    ("sell", "sells", "sold"), ("make", "makes", "made"), ("lose", "loses", "lost"), ("follow", "follows", "followed"),
    ("help", "helps", "helped"), ("know", "knows", "knew"), ("watch", "watches", "watched"),
    ("paint", "paints", "painted"),
)
_PREPOSITIONS = "near under behind in beside from".split()
_ONSETS = "b d f g k l m n p r s t v z".split()
_VOWELS = "a e o u".split()


@functools.cache
def lexicon() -> dict[str, str]:
    """English base word -> Velan stem; drawn once from a fixed seed, all stems different."""
    rng, taken, table = random.Random("velan"), {"lo", "un", "ne", "ed"}, {}
    english = [*_NOUNS, *_ADJECTIVES, *(verb[0] for verb in _VERBS), *_PREPOSITIONS]
    for word in english:
        while True:
            stem = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2 if len(word) < 6 else 3))
            stem += rng.choice("lmnrsk") if word in _NOUNS or word in {verb[0] for verb in _VERBS} else ""
            if stem not in taken:
                break
        taken.add(stem)
        table[word] = stem
    return table


class _NounPhrase:
    def __init__(self, rng: random.Random, nouns, adjective_chance: float):
        self.noun, self.plural, self.definite = rng.choice(nouns), rng.random() < 0.3, rng.random() < 0.7
        self.adjective = rng.choice(_ADJECTIVES) if rng.random() < adjective_chance else ""

    def english(self) -> str:
        noun = (_PLURALS.get(self.noun) or self.noun + "s") if self.plural else self.noun
        words = f"{self.adjective} {noun}".strip()
        if self.definite:
            return f"the {words}"
        return f"some {words}" if self.plural else f"{'an' if words[0] in 'aeiou' else 'a'} {words}"

    def velan(self, ending: str = "") -> str:
        table = lexicon()
        noun = table[self.noun] + ("i" if self.plural else "") + ending
        return " ".join(filter(None, ["lo" if self.definite else "un", noun, table.get(self.adjective, "")]))


def _clause(rng: random.Random) -> tuple[str, str]:
    """One clause in English and in Velan, without capital and full stop."""
    table = lexicon()
    subject, thing = _NounPhrase(rng, _PERSONS, 0.4), _NounPhrase(rng, _NOUNS, 0.45)
    base, third, past = rng.choice(_VERBS)
    tense, negative = rng.choice(("a", "ta", "ra")), rng.random() < 0.15
    if negative:
        helper = {"a": "do" if subject.plural else "does", "ta": "did", "ra": "will"}[tense]
        verb = f"{helper} not {base}"
    else:
        verb = {"a": base if subject.plural else third, "ta": past, "ra": f"will {base}"}[tense]
    english, velan = f"{subject.english()} {verb} {thing.english()}", f"{subject.velan()} {thing.velan('en')}"
    if rng.random() < 0.4:
        place, preposition = _NounPhrase(rng, _PLACES, 0.2), rng.choice(_PREPOSITIONS)
        english, velan = f"{english} {preposition} {place.english()}", f"{velan} {place.velan()} {table[preposition]}"
    return english, f"{velan} {'ne ' if negative else ''}{table[base]}{tense}"


def sentence(rng: random.Random) -> tuple[str, str]:
    """One sentence in English and in Velan."""
    english, velan = _clause(rng)
    if rng.random() < 0.3:
        second_english, second_velan = _clause(rng)
        english, velan = f"{english} and {second_english}", f"{velan} ed {second_velan}"
    return english[0].upper() + english[1:] + ".", velan[0].upper() + velan[1:] + "."


def translate(rng: random.Random) -> Example:
    """One or two sentences, two thirds of them into Velan."""
    pairs = [sentence(rng) for _ in range(rng.choice((1, 2, 2)))]
    english, velan = (" ".join(side) for side in zip(*pairs, strict=True))
    if rng.random() < 0.67:
        opening = rng.choice(("Translate into Velan: ", "Translate English to Velan: ", "Say this in Velan: "))
        prompt, answer = opening + english, velan
    else:
        opening = rng.choice(("Translate into English: ", "Translate Velan to English: ", "What does this mean? "))
        prompt, answer = opening + velan, english
    return Example("translate", (prompt,), (answer,), {"kind": "exact", "value": answer})


MAKERS = {"translate": translate}
