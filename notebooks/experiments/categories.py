"""What a question is about, by the keywords that Re-SpS sorts its training questions with (its
Table 3).

The first category with a keyword anywhere in the lower-cased text wins, inside longer words too:
"how" is found in "show". So it describes keywords more than questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# in the order in which they are tried
KEYWORDS = {
    "Writing": "write compose draft create blog email letter".split(),
    "Coding": "code program function algorithm debug python java javascript".split(),
    "Math": "math calculate solve equation formula number".split(),
    "Reasoning": "analyze explain reasoning why how logic".split(),
    "Roleplay": ["roleplay", "pretend", "imagine", "act as", "you are"],
    "Extraction": "extract summarize information data facts".split(),
    "Humanities": "translate language meaning definition".split(),
}


def category(text: str) -> str:
    """The category of a question.

    >>> category("Show me a river."), category("Name a river.")
    ('Reasoning', 'General')
    """
    lower = text.lower()
    for name, words in KEYWORDS.items():
        if any(word in lower for word in words):
            return name
    return "General"


def composition(texts: Iterable[str]) -> list[dict]:
    """One row per category, and one of all: category, questions, share_pct."""
    counts = Counter(map(category, texts))
    total = sum(counts.values())
    rows = []
    for name in sorted([*KEYWORDS, "General"]):
        share = 100 * counts[name] / max(1, total)
        rows.append({"category": name, "questions": counts[name], "share_pct": share})
    share = 100.0 if total else 0.0
    return [*rows, {"category": "Total", "questions": total, "share_pct": share}]
